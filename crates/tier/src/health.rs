//! Health of a device: in use, or out of use until a probe succeeds.
//!
//! States: `Healthy` → (an error of the device, not of one file) → `Sick` → (back-off ends) → `Probing` → `Healthy` again, or
//! `Sick` with twice the back-off. The back-off also doubles for a device that fails again soon after its recovery.
//!
//! The danger that it avoids: a dying disk that every new file tries first.

use std::time::{Duration, Instant};

use rustix::io::Errno;

const BACK_OFF_MIN: Duration = Duration::from_secs(1);
const BACK_OFF_MAX: Duration = Duration::from_secs(64);

/// Whether this error concerns the device rather than one file or the free space.
pub fn is_sickness(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::IO
            | Errno::ROFS
            | Errno::NODEV
            | Errno::NXIO
            | Errno::STALE
            | Errno::UCLEAN
            | Errno::NOMEDIUM
            | Errno::MEDIUMTYPE
            | Errno::REMOTEIO
            | Errno::NOTCONN
            | Errno::SHUTDOWN
            | Errno::HOSTDOWN
            | Errno::TIMEDOUT
            | Errno::BADMSG
    )
}

/// Whether this error means that the device has no space, quota or inodes left.
pub(super) fn is_full(errno: Errno) -> bool {
    matches!(errno, Errno::NOSPC | Errno::DQUOT)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Healthy,
    Sick { errno: Errno, retry_at: Instant },
    Probing { errno: Errno },
}

#[derive(Debug)]
pub(super) struct Health {
    state: State,
    back_off: Duration,
    /// Time of the last recovery; another failure soon afterwards doubles the back-off.
    recovered_at: Option<Instant>,
}

impl Health {
    pub fn new() -> Self {
        Self { state: State::Healthy, back_off: BACK_OFF_MIN, recovered_at: None }
    }

    pub fn errno(&self) -> Option<Errno> {
        match self.state {
            State::Healthy => None,
            State::Sick { errno, .. } | State::Probing { errno } => Some(errno),
        }
    }

    /// Takes the device out of use. Returns whether it was in use before.
    pub fn fail(&mut self, errno: Errno, now: Instant) -> bool {
        let was_healthy = self.state == State::Healthy;
        if was_healthy {
            let relapse = self.recovered_at.is_some_and(|at| now.duration_since(at) < self.back_off * 4);
            self.back_off = if relapse { (self.back_off * 2).min(BACK_OFF_MAX) } else { BACK_OFF_MIN };
            self.state = State::Sick { errno, retry_at: now + self.back_off };
        }
        was_healthy
    }

    /// True once per back-off: the caller must then probe and report with [`Self::probed`].
    pub fn begin_probe(&mut self, now: Instant) -> bool {
        match self.state {
            State::Sick { errno, retry_at } if retry_at <= now => {
                self.state = State::Probing { errno };
                true
            }
            _ => false,
        }
    }

    pub fn probed(&mut self, outcome: Result<(), Errno>, now: Instant) {
        match outcome {
            Ok(()) => {
                self.state = State::Healthy;
                self.recovered_at = Some(now);
            }
            Err(errno) => {
                self.back_off = (self.back_off * 2).min(BACK_OFF_MAX);
                self.state = State::Sick { errno, retry_at: now + self.back_off };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sick_device_back_off_doubles_at_each_failed_probe() {
        let start = surgetank_types::clock::tick();
        let mut health = Health::new();
        assert!(health.fail(Errno::IO, start));
        assert!(!health.fail(Errno::ROFS, start), "it was out of use already");
        assert_eq!(health.errno(), Some(Errno::IO));

        let mut now = start;
        for seconds in [1, 2, 4, 8, 16, 32, 64, 64] {
            assert!(!health.begin_probe(now + Duration::from_secs(seconds) - Duration::from_millis(1)));
            now += Duration::from_secs(seconds);
            assert!(health.begin_probe(now));
            assert!(!health.begin_probe(now), "one probe at a time");
            health.probed(Err(Errno::IO), now);
        }
        now += Duration::from_secs(64);
        assert!(health.begin_probe(now));
        health.probed(Ok(()), now);
        assert_eq!(health.errno(), None);
    }

    #[test]
    fn back_off_after_early_relapse_doubles() {
        let mut now = surgetank_types::clock::tick();
        let mut health = Health::new();
        health.fail(Errno::IO, now);
        now += Duration::from_secs(1);
        assert!(health.begin_probe(now));
        health.probed(Ok(()), now);
        health.fail(Errno::IO, now + Duration::from_secs(1));
        assert!(!health.begin_probe(now + Duration::from_secs(2)));
        assert!(health.begin_probe(now + Duration::from_secs(3)));
        health.probed(Ok(()), now + Duration::from_secs(3));
        now += Duration::from_secs(3600);
        health.fail(Errno::IO, now);
        assert!(health.begin_probe(now + Duration::from_secs(1)));
    }

    #[test]
    fn errors_of_file_or_space_leave_device_healthy() {
        for errno in [Errno::NOSPC, Errno::DQUOT, Errno::NOENT, Errno::ACCESS, Errno::EXIST, Errno::INTR, Errno::MFILE]
        {
            assert!(!is_sickness(errno), "{errno:?}");
        }
        assert!(is_sickness(Errno::IO) && is_sickness(Errno::ROFS));
    }
}
