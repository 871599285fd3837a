//! Decides the number of threads. Its own thread checks once a millisecond while there is traffic, and sleeps
//! otherwise.
//!
//! When no thread waits for requests and all sleep inside an operation, other requests would wait behind them: another thread
//! gets the seat of one. When for a while no thread ever waited and cores are free, it adds a seat. If no thread is parked, it
//! starts one. When for a second a thread was always idle, it takes a seat away or dismisses a parked thread. When the maximum number of threads sleeps, threads that have been in one
//! operation for a second (their store does not answer) no longer count.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::Workers;
use crate::mount::filesystem::Filesystem;

const TICK: Duration = Duration::from_millis(1);
/// This many checks without an idle thread mean too few threads.
const BUSY_TICKS: u32 = 50;
/// This many checks with an idle thread mean too many threads.
const IDLE_TICKS: u32 = 1000;
/// After this many checks with all threads asleep, the lookout compares which still have the same operation.
const STUCK_TICKS: u32 = 1000;
/// After this many checks without a request the lookout sleeps.
const QUIET_TICKS: u32 = 20;

/// The pool's means to wake the lookout: it costs one load while the lookout is awake.
#[derive(Debug, Default)]
pub struct Lookout {
    asleep: AtomicBool,
    turn: Mutex<()>,
    bell: Condvar,
}

impl Lookout {
    pub fn rouse(&self) {
        if self.asleep.load(Ordering::SeqCst) {
            let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
            self.asleep.store(false, Ordering::SeqCst);
            self.bell.notify_one();
        }
    }

    /// Sleeps until woken. `needless` is checked after the pool can see the sleep, so no wake-up is missed.
    fn sleep_unless(&self, needless: impl FnOnce() -> bool) {
        let mut turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.asleep.store(true, Ordering::SeqCst);
        if needless() {
            self.asleep.store(false, Ordering::SeqCst);
            return;
        }
        while self.asleep.load(Ordering::SeqCst) {
            turn = self.bell.wait(turn).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

pub fn watch<F: Filesystem>(workers: &Arc<Workers>, filesystem: &Arc<F>) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let (mut busy_ticks, mut idle_ticks, mut quiet_ticks) = (0, 0, 0);
    let mut served_before = 0;
    let (mut stuck_ticks, mut served_then) = (0, Vec::new());
    while workers.running() {
        std::thread::sleep(TICK);
        let threads = workers.at_hand();
        let served = workers.served.load(Ordering::Relaxed);
        quiet_ticks = if served == served_before { quiet_ticks + 1 } else { 0 };
        served_before = served;
        if workers.waiting.load(Ordering::SeqCst) == 0 {
            busy_ticks += 1;
            idle_ticks = 0;
            let overworked = busy_ticks >= BUSY_TICKS && workers.seats.wanted() < cores;
            let asleep = all_asleep(workers);
            stuck_ticks = if asleep && threads >= workers.threads_max { stuck_ticks + 1 } else { 0 };
            if stuck_ticks % STUCK_TICKS == 1 {
                served_then = workers.those_in_the_same(&served_then);
            }
            if overworked || asleep {
                busy_ticks = 0;
                let parked = workers.seats.parked();
                if asleep {
                    workers.free_a_seat();
                } else {
                    workers.seats.want(workers.seats.wanted() + 1);
                }
                if parked > 0 {
                    continue;
                }
                if let Err(error) = workers.hire(filesystem) {
                    tracing::warn!(%error, "no further thread for the mount; operations may wait for each other");
                }
            }
        } else {
            (busy_ticks, stuck_ticks) = (0, 0);
            idle_ticks += 1;
            if threads > 1 && idle_ticks >= IDLE_TICKS {
                idle_ticks = 0;
                if workers.seats.wanted() > 1 {
                    workers.narrow();
                } else {
                    workers.dismiss_one();
                }
            }
            if threads == 1 && quiet_ticks >= QUIET_TICKS {
                workers.lookout.sleep_unless(|| !workers.running() || workers.waiting.load(Ordering::SeqCst) == 0);
            }
        }
    }
}

/// No thread computes: each sleeps in its operation. (A thread that waits for a core is not asleep.) If one is parked, those that
/// have seats count.
fn all_asleep(workers: &Workers) -> bool {
    let is_parked = workers.seats.parked() > 0;
    let roll = workers.roll();
    let mut counting = roll.berths.iter().filter(|berth| !is_parked || berth.has_seat.load(Ordering::SeqCst));
    !roll.berths.is_empty() && counting.all(|berth| asleep(berth.tid.load(Ordering::SeqCst)))
}

fn asleep(tid: i32) -> bool {
    if tid == 0 {
        return false; // added a moment ago
    }
    let Ok(text) = std::fs::read(format!("/proc/self/task/{tid}/stat")) else {
        return true; // no /proc: one thread too many is better than a waiting operation
    };
    // The state follows the name, which is in brackets and may contain any character.
    let behind = text.iter().rposition(|&byte| byte == b')').map(|end| &text[end..]);
    matches!(behind.and_then(|rest| rest.get(2)), Some(b'S' | b'D'))
}
