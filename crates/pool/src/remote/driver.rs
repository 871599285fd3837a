//! Carries out a member's wishes at a server: each is some exchanges, one after the other.

use std::io;

use super::exchange::Server;
use super::place::{Kind, Place};
use super::{Remote, Step, Wish};
use crate::Uptime;
use crate::registry::Answer;

/// A wish that takes more exchanges is given up: others change the rows too often.
const EXCHANGES_MAX: usize = 100;

/// What became of a wish.
#[derive(Debug)]
pub enum Outcome {
    /// The registry's answer.
    Answer(Answer),
    /// Whether every later join is refused.
    Ended(bool),
    /// There is no answer now.
    Later,
}

/// A connection to the servers of this place. It is made at the first exchange.
pub fn server(place: &Place, pool: &str) -> Box<dyn Server> {
    match place.kind {
        Kind::Redis(_) | Kind::Sentinel(_) => Box::new(super::redis::Redis::new(place.clone(), pool)),
        Kind::Etcd => Box::new(super::etcd::Etcd::new(place.clone(), pool)),
    }
}

/// Carries out a wish. Blocks while the server does.
///
/// Errors: the server did not answer. Whether the wish had its effect is unknown.
pub fn carry_out(
    remote: &mut Remote,
    server: &mut dyn Server,
    clock: &dyn Fn() -> Uptime,
    wish: Wish,
) -> io::Result<Outcome> {
    let mut step = remote.begin(clock(), wish);
    for _ in 0..EXCHANGES_MAX {
        match step {
            Step::Answer(answer) => return Ok(Outcome::Answer(answer)),
            Step::Ended(has_ended) => return Ok(Outcome::Ended(has_ended)),
            Step::Later => break,
            Step::Exchange(exchange) => {
                let exchanged = server.exchange(&exchange)?;
                step = remote.take(clock(), &exchanged);
            }
        }
    }
    Ok(Outcome::Later)
}
