//! Requests about files of other members: they are asked, and their answers are put together.

use std::collections::BTreeMap;
use std::time::Duration;

use surgetank_core::report::{PathText, Prefetch};
use surgetank_types::error::Error;

use super::{Served, locating};
use crate::agent::tending::answered;
use crate::agent::wire::{Answer, Request};
use crate::pool::router::owners::{ask_agent, owner_of, owners_below};

/// So long the answer of a member to a question is awaited.
const QUESTION: Duration = Duration::from_secs(10);

/// The answer to a request, if other members have a part in it.
pub(super) fn with_others(served: &Served, request: &Request) -> Option<Answer> {
    let pool = served.pool.as_deref()?;
    let ask = |member: u32, request: &Request| {
        let answered = serde_json::to_vec(request).map_err(|error| Error::new("JSON").why(error));
        let is_question = matches!(request, Request::Why { .. } | Request::Locate { .. } | Request::Copies { .. });
        let question = is_question.then_some(QUESTION);
        let answered = answered.and_then(|request| ask_agent(pool, member, request, question));
        let answer = answered.and_then(|answer| {
            serde_json::from_slice(&answer).map_err(|why| Error::new("another member's answer is damaged").why(why))
        });
        answer.unwrap_or_else(|error| Answer::Error(error.into()))
    };
    match request {
        Request::Locate { paths } => locating::everywhere(served, paths, &ask).map(|files| Answer::Located { files }),
        Request::Why { path } => owner_of(pool, &path.0).map(|member| ask(member, request)),
        Request::Evict { path } | Request::Pin { path, .. } => {
            let others = owners_below(pool, &path.0);
            // (Then this agent answers alone. Asked twice, it would free nothing the second time.)
            if others.is_empty() {
                return None;
            }
            // (Something below another member's directory may be of this one, or in none of its namespaces.)
            let is_of_another = owner_of(pool, &path.0).is_some();
            let here = answered(served, request).filter(|answer| !is_of_another || !matches!(answer, Answer::Error(_)));
            here.into_iter().chain(others.iter().map(|member| ask(*member, request))).reduce(both)
        }
        Request::Hint { hints } => {
            let mut by_owner: BTreeMap<Option<u32>, Vec<_>> = BTreeMap::new();
            for hint in hints {
                by_owner.entry(owner_of(pool, &hint.path.0)).or_default().push(hint.clone());
            }
            let requests = by_owner.into_iter().map(|(owner, hints)| (owner, Request::Hint { hints }));
            spread(served, requests.collect(), ask)
        }
        Request::Prefetch { patterns } => {
            let mut by_owner: BTreeMap<Option<u32>, Vec<PathText>> = BTreeMap::new();
            for pattern in patterns {
                // (The directories before the first wildcard.)
                let literal = pattern.0.split(|byte| b"*?[{\\".contains(byte)).next().unwrap_or_default();
                let fixed = if literal.len() == pattern.0.len() { literal } else { above(literal) };
                if owner_of(pool, fixed).is_none() {
                    by_owner.entry(None).or_default().push(pattern.clone());
                }
                for member in owners_below(pool, fixed) {
                    by_owner.entry(Some(member)).or_default().push(pattern.clone());
                }
            }
            let requests = by_owner.into_iter().map(|(owner, patterns)| (owner, Request::Prefetch { patterns }));
            spread(served, requests.collect(), ask)
        }
        _ => None,
    }
}

/// Asks each member, and this agent (`None`). No answer: this agent has all of it.
fn spread(
    served: &Served,
    requests: Vec<(Option<u32>, Request)>,
    ask: impl Fn(u32, &Request) -> Answer,
) -> Option<Answer> {
    if requests.iter().all(|(owner, _)| owner.is_none()) {
        return None;
    }
    let answers = requests.iter().filter_map(|(owner, request)| match owner {
        Some(member) => Some(ask(*member, request)),
        None => answered(served, request),
    });
    answers.reduce(both)
}

fn above(path: &[u8]) -> &[u8] {
    path.iter().rposition(|byte| *byte == b'/').map_or(b"", |slash| &path[..slash])
}

/// The answer of several agents. An error of one is the error of all.
fn both(one: Answer, other: Answer) -> Answer {
    match (one, other) {
        (error @ Answer::Error(_), _) | (_, error @ Answer::Error(_)) => error,
        (Answer::Evicted { bytes }, Answer::Evicted { bytes: more }) => Answer::Evicted { bytes: bytes + more },
        (Answer::Prefetching(one), Answer::Prefetching(more)) => {
            Answer::Prefetching(Prefetch { files: one.files + more.files, bytes: one.bytes + more.bytes })
        }
        (Answer::Hinted { refused: mut all }, Answer::Hinted { refused }) => {
            all.add(refused);
            Answer::Hinted { refused: all }
        }
        (one, _) => one,
    }
}

/// The answer to what another member asks, as JSON.
pub(super) fn for_another(served: &Served, request: &[u8]) -> Vec<u8> {
    let answer = serde_json::from_slice(request).ok().and_then(|request| answered(served, &request));
    let answer = answer.unwrap_or_else(|| Answer::Error(Error::new("this is not asked of another member").into()));
    serde_json::to_vec(&answer).unwrap_or_default()
}
