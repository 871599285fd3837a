//! Decides how many threads the crew has. A thread of its own looks once a millisecond while there is traffic, and sleeps
//! when there is none.
//!
//! Hires when nobody waits for requests and everybody sleeps inside an operation (they block, and others would wait behind
//! them), or when for a while nobody ever had time to wait and there are cores for more. Lets one go when for a second
//! somebody was always idle. When all that there may be sleep, those that have been in one operation for a second (their
//! store does not answer) no longer count.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::Crew;
use crate::mount::filesystem::Filesystem;

const TICK: Duration = Duration::from_millis(1);
/// So many looks without anybody idle mean that there is more work than hands.
const BUSY_TICKS: u32 = 50;
/// So many looks with somebody idle mean that there are too many hands.
const IDLE_TICKS: u32 = 1000;
/// So many looks with everybody asleep, and it is seen whose operation is still the same.
const STUCK_TICKS: u32 = 1000;
/// So many looks without a request, and the lookout sleeps.
const QUIET_TICKS: u32 = 20;

/// How the crew rouses the lookout: costs one load while it is awake.
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

    /// Sleeps until roused. `needless` is looked at after the crew can see that we sleep, so no call is missed.
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

pub fn watch<F: Filesystem>(crew: &Arc<Crew>, filesystem: &Arc<F>) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let (mut busy_ticks, mut idle_ticks, mut quiet_ticks) = (0, 0, 0);
    let mut served_before = 0;
    let (mut stuck_ticks, mut served_then) = (0, Vec::new());
    while crew.running() {
        std::thread::sleep(TICK);
        let threads = crew.at_hand();
        let served = crew.served.load(Ordering::Relaxed);
        quiet_ticks = if served == served_before { quiet_ticks + 1 } else { 0 };
        served_before = served;
        if crew.waiting.load(Ordering::SeqCst) == 0 {
            busy_ticks += 1;
            idle_ticks = 0;
            let overworked = busy_ticks >= BUSY_TICKS && threads < cores;
            let asleep = all_asleep(crew);
            stuck_ticks = if asleep && threads >= crew.threads_max { stuck_ticks + 1 } else { 0 };
            if stuck_ticks % STUCK_TICKS == 1 {
                served_then = crew.those_in_the_same(&served_then);
            }
            if overworked || asleep {
                busy_ticks = 0;
                if let Err(error) = crew.hire(filesystem) {
                    tracing::warn!(%error, "no further thread for the mount; operations may wait for each other");
                }
            }
        } else {
            (busy_ticks, stuck_ticks) = (0, 0);
            idle_ticks += 1;
            if threads > 1 && idle_ticks >= IDLE_TICKS {
                idle_ticks = 0;
                if !last_one_free(crew) {
                    crew.dismiss_one();
                }
            }
            if threads == 1 && quiet_ticks >= QUIET_TICKS {
                crew.lookout.sleep_unless(|| !crew.running() || crew.waiting.load(Ordering::SeqCst) == 0);
            }
        }
    }
}

/// Nobody computes: each thread sleeps in the operation it runs. (One that waits for a core is not asleep.)
fn all_asleep(crew: &Crew) -> bool {
    let roll = crew.roll();
    !roll.berths.is_empty() && roll.berths.iter().all(|berth| asleep(berth.tid.load(Ordering::SeqCst)))
}

/// One waits, and all the others sleep in what they do: it would be hired again at once.
fn last_one_free(crew: &Crew) -> bool {
    crew.waiting.load(Ordering::SeqCst) == 1 && all_asleep(crew)
}

fn asleep(tid: i32) -> bool {
    if tid == 0 {
        return false; // hired a moment ago
    }
    let Ok(text) = std::fs::read(format!("/proc/self/task/{tid}/stat")) else {
        return true; // no /proc: rather a thread too many than an operation that waits
    };
    // The state follows the name, which stands in brackets and may hold anything.
    let behind = text.iter().rposition(|&byte| byte == b')').map(|end| &text[end..]);
    matches!(behind.and_then(|rest| rest.get(2)), Some(b'S' | b'D'))
}
