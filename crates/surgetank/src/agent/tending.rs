//! Requests about single files that a client or another member of the pool may make: why, locate, evict, pin, hint, prefetch.

use super::engine::Engine;
use super::wire::{Answer, Request};

/// The answer of this agent. `None`: it is another kind of request.
pub fn answered(engine: &dyn Engine, request: &Request) -> Option<Answer> {
    let answer = match request {
        Request::Why { path } => engine.why(&path.0).map(|why| Answer::Why(Box::new(why))),
        Request::Locate { paths } => Ok(Answer::Located { files: engine.locate(paths) }),
        Request::Copies { numbers, files } => Ok(Answer::Copies { copies: engine.copies(numbers, files) }),
        Request::Evict { path } => engine.evict(&path.0).map(|bytes| Answer::Evicted { bytes }),
        Request::Pin { path, on } => engine.pin(&path.0, *on).map(|()| Answer::Done),
        Request::Hint { hints } => Ok(Answer::Hinted { refused: engine.hint(hints) }),
        Request::Prefetch { patterns } => {
            let patterns: Vec<Vec<u8>> = patterns.iter().map(|pattern| pattern.0.clone()).collect();
            engine.prefetch(&patterns).map(Answer::Prefetching)
        }
        _ => return None,
    };
    Some(answer.unwrap_or_else(|error| Answer::Error(error.into())))
}
