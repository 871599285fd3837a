//! Reads requests into a thread's buffer, and waits for them.
//!
//! A wake-up on another core costs more than most operations (10–40 µs in a virtual machine). So a thread polls for the
//! next request before it sleeps, longer if that would have paid ([`Looks`]). Between two polls it yields the core.
//! Polling needs a non-blocking descriptor: a clone, with its own queue of answers. So every request remembers its
//! descriptor.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::abi::{self, device};

/// Always worthwhile: less than half of the cost of a wake-up.
const LOOK_MIN: Duration = Duration::from_micros(20);
const LOOK_MAX: Duration = Duration::from_micros(200);
/// A thread that yields and gets the core back only after this time shares it with a computing program. A thread that
/// waits for a core there gets it later than one that is woken.
const CROWDED: Duration = Duration::from_micros(500);
/// Short at first: it may have been the hypervisor.
const KEEP_OUT_MIN: Duration = Duration::from_millis(1);
const KEEP_OUT_MAX: Duration = Duration::from_secs(1);
/// A computing program wants the core all the time, but the next poll may be this much later.
const SOON: Duration = Duration::from_millis(10);

pub struct Inbox {
    /// Placed so that the data of a WRITE starts on a page boundary.
    bytes: Vec<u8>,
    start: usize,
    size: usize,
    sleeping: Arc<OwnedFd>,
    looking: Option<OwnedFd>,
    looks: Looks,
}

/// How long to poll before sleeping.
#[derive(Debug, Clone, Copy)]
struct Looks {
    window: Duration,
    /// No polling on that core before this time: a program uses it.
    not_before: Option<(usize, Instant)>,
    keep_out: Duration,
    /// When polling was last allowed again.
    allowed_since: Option<Instant>,
}

impl Default for Looks {
    fn default() -> Self {
        Self { window: LOOK_MIN, not_before: None, keep_out: KEEP_OUT_MIN, allowed_since: None }
    }
}

impl Looks {
    fn may_begin(&mut self, core: usize, now: Instant) -> bool {
        match self.not_before {
            Some((whose, then)) if now < then => core != whose,
            Some((_, then)) => {
                (self.not_before, self.allowed_since) = (None, Some(then));
                true
            }
            None => true,
        }
    }

    /// A request came after `waited`, mostly spent asleep after polling without a request.
    fn slept(&mut self, waited: Duration) {
        self.window = if waited <= LOOK_MAX { (self.window * 2).min(LOOK_MAX) } else { LOOK_MIN };
    }

    /// The thread yielded the core and got it back only now. The sooner the other program wants it again, the longer
    /// the thread keeps off.
    fn crowded(&mut self, core: usize, release: Instant, now: Instant) {
        let soon = self.allowed_since.is_some_and(|then| release.duration_since(then) < self.keep_out.max(SOON));
        self.keep_out = if soon { (self.keep_out * 2).min(KEEP_OUT_MAX) } else { KEEP_OUT_MIN };
        self.not_before = Some((core, now + self.keep_out));
    }
}

/// A request that was read: its length and origin.
pub struct Place {
    bytes: usize,
    while_looking: bool,
}

pub struct Received<'a> {
    pub bytes: &'a [u8],
    /// The descriptor for the answer.
    pub device: BorrowedFd<'a>,
}

impl Inbox {
    pub fn new(device: Arc<OwnedFd>, write_bytes_max: usize, clones: &Clones) -> Self {
        let size = write_bytes_max + abi::REQUEST_SLACK_BYTES;
        let bytes = touched(size + 2 * abi::PAGE_BYTES);
        let data_at = (bytes.as_ptr() as usize + abi::WRITE_PREFIX_BYTES) % abi::PAGE_BYTES;
        let start = (abi::PAGE_BYTES - data_at) % abi::PAGE_BYTES;
        let alone = std::thread::available_parallelism().is_ok_and(|cores| cores.get() == 1);
        let looking = if alone { None } else { clones.take(device.as_fd()) };
        Self { bytes, start, size, sleeping: device, looking, looks: Looks::default() }
    }

    /// Waits for the next request. Calls `looked` each time that there was none.
    pub fn read(&mut self, looked: impl Fn()) -> Result<Place, Errno> {
        let room = &mut self.bytes[self.start..self.start + self.size];
        let Some(looking) = &self.looking else {
            return Ok(Place { bytes: rustix::io::read(&*self.sleeping, room)?, while_looking: false });
        };
        let since = Instant::now();
        let mut now = since;
        let looks = self.looks.may_begin(rustix::thread::sched_getcpu(), now);
        let mut goes_on = looks;
        while goes_on {
            match rustix::io::read(looking, &mut *room) {
                Ok(bytes) => return Ok(Place { bytes, while_looking: true }),
                Err(Errno::AGAIN) => {}
                Err(errno) => return Err(errno),
            }
            looked();
            goes_on = now.duration_since(since) < self.looks.window;
            if goes_on {
                rustix::thread::sched_yield();
                let before = std::mem::replace(&mut now, Instant::now());
                if now.duration_since(before) > CROWDED {
                    self.looks.crowded(rustix::thread::sched_getcpu(), before, now);
                    goes_on = false;
                }
            }
        }
        let bytes = rustix::io::read(&*self.sleeping, room)?;
        if looks {
            self.looks.slept(since.elapsed());
        }
        Ok(Place { bytes, while_looking: false })
    }

    /// Stores a request that another reader took from the first descriptor.
    pub fn put(&mut self, request: &[u8]) -> Place {
        self.bytes[self.start..self.start + request.len()].copy_from_slice(request);
        Place { bytes: request.len(), while_looking: false }
    }

    /// The thread ends: another thread may need its clone.
    pub fn leave(self, clones: &Clones) {
        if let Some(clone) = self.looking {
            clones.free().push(clone);
        }
    }

    pub fn bytes(&self, place: &Place) -> &[u8] {
        &self.bytes[self.start..self.start + place.bytes]
    }

    pub fn received(&self, place: Place) -> Received<'_> {
        let device = match &self.looking {
            Some(looking) if place.while_looking => looking.as_fd(),
            _ => self.sleeping.as_fd(),
        };
        Received { bytes: self.bytes(&place), device }
    }
}

/// Memory whose pages exist already. A server that is killed in `read` still takes a waiting request. The kernel then
/// finds no memory for the dying process, and gives the program EIO.
pub fn touched(bytes: usize) -> Vec<u8> {
    vec![u8::MAX; bytes]
}

/// Called with each clone before any read from it; `false`: it must not be used.
pub type OnClone = Box<dyn Fn(BorrowedFd<'_>) -> bool + Send + Sync>;

/// Clones of the descriptor. When one is closed, requests that were read from it and not answered fail. So they are
/// kept.
#[derive(Default)]
pub struct Clones {
    free: Mutex<Vec<OwnedFd>>,
    on_clone: Option<OnClone>,
}

impl Clones {
    pub fn new(free: Vec<OwnedFd>, on_clone: Option<OnClone>) -> Self {
        Self { free: Mutex::new(free), on_clone }
    }

    fn free(&self) -> std::sync::MutexGuard<'_, Vec<OwnedFd>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, origin: BorrowedFd<'_>) -> Option<OwnedFd> {
        let free = self.free().pop();
        free.or_else(|| {
            clone_unblocking(origin).filter(|clone| self.on_clone.as_ref().is_none_or(|told| told(clone.as_fd())))
        })
    }
}

/// Another descriptor of the same connection. Without one (no access to `/dev/fuse`) the thread does not poll.
fn clone_unblocking(origin: BorrowedFd<'_>) -> Option<OwnedFd> {
    let make = || -> io::Result<OwnedFd> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let fresh = rustix::fs::open("/dev/fuse", flags, Mode::empty())?;
        let number = origin.as_raw_fd() as u32;
        // SAFETY: the ioctl reads one `u32` through the pointer, which lives across the call.
        let outcome = unsafe { libc::ioctl(fresh.as_raw_fd(), device::CLONE.into(), &raw const number) };
        if outcome == 0 { Ok(fresh) } else { Err(io::Error::last_os_error()) }
    };
    make().inspect_err(|error| tracing::debug!(%error, "no clone of the FUSE descriptor")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polling_lasts_only_while_it_pays() {
        let mut looks = Looks::default();
        assert_eq!(looks.window, LOOK_MIN);
        for _ in 0..5 {
            looks.slept(Duration::from_micros(90));
        }
        assert_eq!(looks.window, LOOK_MAX);
        looks.slept(LOOK_MAX + Duration::from_micros(1));
        assert_eq!(looks.window, LOOK_MIN);
    }

    #[test]
    fn poller_kept_from_its_core_polls_less_often() {
        let mut looks = Looks::default();
        // (Slices of 4 ms, and the next poll half a millisecond after it is allowed.)
        let (mut now, mut kept_out, slice) = (Instant::now(), KEEP_OUT_MIN, Duration::from_millis(4));
        assert!(looks.may_begin(0, now));
        for _ in 0..12 {
            looks.crowded(0, now, now + slice);
            now += slice;
            assert!(
                !looks.may_begin(0, now + kept_out - Duration::from_nanos(1)) && looks.may_begin(0, now + kept_out)
            );
            now += kept_out + Duration::from_micros(500);
            kept_out = (kept_out * 2).min(KEEP_OUT_MAX);
        }
        assert_eq!(looks.keep_out, KEEP_OUT_MAX);
        looks.crowded(0, now, now + slice);
        assert!(!looks.may_begin(0, now + slice) && looks.may_begin(1, now + slice), "another core is another matter");
        // No program wanted the core for long.
        now += 2 * KEEP_OUT_MAX;
        looks.crowded(0, now, now + slice);
        assert!(looks.may_begin(0, now + slice + KEEP_OUT_MIN));
    }
}
