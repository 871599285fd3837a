//! The worker pool: the threads that serve one session.
//!
//! Each thread reads a request, runs it and writes the answer. One thread is enough, and fastest, for operations that
//! do not block: then no other thread waits in `read` and wakes without a request. So a thread needs a seat to read
//! ([`seats`]), and others are parked. The [`lookout`] adds a thread or a seat in two cases:
//! all threads sleep in an operation (an fsync to a slow store), or none has time to wait any more. It dismisses idle
//! threads again. A thread's buffers are allocated when it starts and freed when it ends.
//!
//! Closes are carried out in the order in which the kernel sent them ([`super::turns`]).
//!
//! States of a thread: parked → waiting (in `read`, or for the thread in it) → serving → waiting … → ended. A thread leaves when
//! the mount is gone (ENODEV), when the session stops, or when it is dismissed. The last one to leave ends the file
//! system. A thread whose request waits for another program ([`wait_long`]) does not count in the size of the pool.
//!
//! Invariants: every request that wants an answer gets exactly one, also when the file system panics (EIO). No thread
//! leaves while its request is unanswered. After the last thread left `read`, another one is in `read` within a few
//! milliseconds, so that no operation waits long for another's sleep.

mod dying;
mod lookout;
mod seats;

use std::cell::OnceCell;
use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

use rustix::io::Errno;

use super::abi::UNIQUE_RESEND;
use super::dispatch;
use super::filesystem::Filesystem;
use super::inbox::{Clones, Inbox, Received};
use super::reply::{self, Reply};
use super::request::{self, Header, Operation};
use super::turns::Turns;
use lookout::Lookout;
use seats::Seats;

/// This many threads may be stuck in operations besides those that serve.
const THREADS_STUCK_MAX: usize = 1024;

/// One thread of the pool, as other threads see it.
#[derive(Debug, Default)]
struct Berth {
    /// The request being served; 0 for none.
    unique: AtomicU64,
    /// The thread that made the request; 0 if the kernel made it, or a thread that our pid namespace does not show.
    caller: AtomicU32,
    /// A signal arrived for the caller. The kernel reports the first one of a request, whatever the caller does about
    /// it.
    interrupted: AtomicBool,
    /// The mount is gone, or the session stops: no caller waits for the answer.
    abandoned: AtomicBool,
    /// The request may wait indefinitely for another program.
    waits_long: AtomicBool,
    /// The thread is in `read`.
    waiting: AtomicBool,
    seats: Arc<Seats>,
    has_seat: AtomicBool,
    is_parked: AtomicBool,
    /// The thread leaves when it is idle.
    release: AtomicBool,
    pthread: AtomicU64,
    tid: AtomicI32,
    /// No other thread has this number at the same time.
    slot: u64,
}

thread_local! {
    static BERTH: OnceCell<Arc<Berth>> = const { OnceCell::new() };
}

/// Whether a signal arrived for the caller of this thread's request, or the mount is gone. Only a call that a local
/// file system would interrupt too may end with EINTR because of that. The kernel sends INTERRUPT for every signal,
/// even if the program's handler has SA_RESTART. All other calls check [`killed`]. Reads and writes through the page
/// cache are never interrupted: the kernel requests them on its own behalf.
pub fn interrupted() -> bool {
    BERTH.with(|berth| berth.get().is_some_and(|berth| berth.is_abandoned() || berth.is_interrupted()))
}

/// Whether the caller of this thread's request is dying, or the mount is gone. Operations that wait long check it
/// repeatedly: the kernel lets a killed program end only after the answer, and reports no signal after the first.
pub fn killed() -> bool {
    BERTH.with(|berth| {
        let Some(berth) = berth.get() else { return false };
        berth.is_abandoned() || (berth.is_interrupted() && dying::is_dying(berth.caller.load(Ordering::Relaxed)))
    })
}

/// The same of a close: the kernel makes it also for a program that a signal has ended already.
pub fn killed_at_close() -> bool {
    killed()
        || BERTH.with(|berth| berth.get().is_some_and(|berth| dying::was_killed(berth.caller.load(Ordering::Relaxed))))
}

/// A request that is being served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Current {
    /// The serving thread's number: no other thread has it at the same time.
    pub slot: u64,
    /// The kernel's number, the same when the kernel sends it again.
    pub number: u64,
    /// An earlier server read it and did not answer.
    pub again: bool,
}

/// The request that this thread serves.
pub fn current() -> Option<Current> {
    BERTH.with(|berth| {
        let berth = berth.get()?;
        let unique = berth.unique.load(Ordering::Relaxed);
        (unique != 0).then(|| Current {
            slot: berth.slot,
            number: unique & !UNIQUE_RESEND,
            again: unique & UNIQUE_RESEND != 0,
        })
    })
}

/// Declares that this thread's request may wait until another program acts, for a lock for instance. That program's
/// requests must be served meanwhile, however many threads wait. Until the answer this thread does not count towards
/// [`super::Options::threads_max`].
pub fn wait_long() {
    BERTH.with(|berth| {
        if let Some(berth) = berth.get() {
            berth.waits_long.store(true, Ordering::SeqCst);
            berth.give_seat();
        }
    });
}

/// The state that the session and the threads share.
pub struct Workers {
    device: Arc<OwnedFd>,
    threads_max: usize,
    bulk_bytes_max: usize,
    waiting: AtomicUsize,
    served: AtomicU64,
    stopping: AtomicBool,
    roll: Mutex<Roll>,
    left: Condvar,
    lookout: Lookout,
    seats: Arc<Seats>,
    turns: Arc<Turns>,
    clones: Clones,
}

#[derive(Default)]
struct Roll {
    berths: Vec<Arc<Berth>>,
    hired: u64,
    over: bool,
}

impl Workers {
    pub fn new(
        device: Arc<OwnedFd>,
        threads_max: usize,
        bulk_bytes_max: usize,
        clones: Clones,
        turns: Arc<Turns>,
    ) -> Self {
        Self {
            device,
            threads_max,
            bulk_bytes_max,
            waiting: AtomicUsize::new(0),
            served: AtomicU64::new(0),
            stopping: AtomicBool::new(false),
            roll: Mutex::default(),
            left: Condvar::new(),
            lookout: Lookout::default(),
            seats: Arc::default(),
            turns,
            clones,
        }
    }

    pub fn start<F: Filesystem>(self: &Arc<Self>, filesystem: &Arc<F>) -> io::Result<()> {
        install_wake_signal();
        let (workers, own) = (Arc::clone(self), Arc::clone(filesystem));
        self.hire(filesystem)?;
        std::thread::Builder::new().name("fuse-lookout".to_owned()).spawn(move || lookout::watch(&workers, &own))?;
        Ok(())
    }

    pub fn running(&self) -> bool {
        !self.roll().over
    }

    pub fn threads(&self) -> usize {
        self.roll().berths.len()
    }

    /// Returns when the last thread has left, or after `timeout`; returns whether all left.
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        let going_on = |roll: &mut Roll| !roll.over;
        match timeout {
            None => {
                drop(self.left.wait_while(self.roll(), going_on).unwrap_or_else(PoisonError::into_inner));
                true
            }
            Some(timeout) => {
                let outcome = self.left.wait_timeout_while(self.roll(), timeout, going_on);
                !outcome.unwrap_or_else(PoisonError::into_inner).1.timed_out()
            }
        }
    }

    /// Makes every thread leave after its current request, and waits for that.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        loop {
            self.roll().berths.iter().for_each(|berth| {
                if berth.waits_long.load(Ordering::SeqCst) {
                    berth.abandoned.store(true, Ordering::Relaxed);
                }
                berth.wake();
            });
            self.seats.look();
            // A thread may have read `stopping` just before, and entered `read` just after the signal: signal again.
            if self.wait(Some(Duration::from_millis(2))) {
                return;
            }
        }
    }

    /// Threads that wait for requests or will finish theirs soon.
    fn at_hand(&self) -> usize {
        self.roll().at_hand()
    }

    /// The threads and their requests. Those with the same request as `before` wait long, as far as more threads are
    /// allowed for them.
    fn those_in_the_same(&self, before: &[(u64, u64)]) -> Vec<(u64, u64)> {
        let roll = self.roll();
        let mut room = THREADS_STUCK_MAX.saturating_sub(roll.berths.len() - roll.at_hand());
        let mut now = Vec::with_capacity(roll.berths.len());
        for berth in &roll.berths {
            let serves = (berth.slot, berth.unique.load(Ordering::Acquire));
            if serves.1 != 0 && room > 0 && before.contains(&serves) {
                berth.waits_long.store(true, Ordering::SeqCst);
                room -= 1;
            }
            now.push(serves);
        }
        now
    }

    fn roll(&self) -> MutexGuard<'_, Roll> {
        self.roll.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hire<F: Filesystem>(self: &Arc<Self>, filesystem: &Arc<F>) -> io::Result<()> {
        let mut roll = self.roll();
        if roll.over || roll.at_hand() >= self.threads_max {
            return Ok(());
        }
        let taken = |slot: u64| roll.berths.iter().any(|berth| berth.slot == slot);
        let slot = (0..).find(|slot| !taken(*slot)).unwrap_or(u64::MAX);
        let berth = Arc::new(Berth { slot, seats: self.seats.clone(), ..Berth::default() });
        let (workers, filesystem, own) = (Arc::clone(self), Arc::clone(filesystem), Arc::clone(&berth));
        std::thread::Builder::new()
            .name(format!("fuse-{}", roll.hired))
            .spawn(move || workers.serve(&filesystem, &own))?;
        roll.hired += 1;
        roll.berths.push(berth);
        Ok(())
    }

    /// Dismisses the newest parked thread. (One with a seat may be the only one that reads.)
    fn dismiss_one(&self) {
        let roll = self.roll();
        let idle =
            |berth: &&Arc<Berth>| berth.is_parked.load(Ordering::SeqCst) && !berth.release.load(Ordering::SeqCst);
        if let Some(berth) = roll.berths.iter().rev().find(idle) {
            berth.release.store(true, Ordering::SeqCst);
        }
        drop(roll);
        self.seats.look();
    }

    /// One seat less: a thread that waits parks.
    fn narrow(&self) {
        self.seats.want(self.seats.wanted().saturating_sub(1));
        self.roll().berths.iter().for_each(|berth| berth.wake());
    }

    /// A thread that sleeps in its operation has a seat: another one gets it.
    fn free_a_seat(&self) {
        let roll = self.roll();
        let serves =
            |berth: &&Arc<Berth>| berth.has_seat.load(Ordering::SeqCst) && berth.unique.load(Ordering::Acquire) != 0;
        if let Some(berth) = roll.berths.iter().find(serves) {
            berth.give_seat();
        }
    }

    fn serve<F: Filesystem>(self: &Arc<Self>, filesystem: &Arc<F>, berth: &Arc<Berth>) {
        // SAFETY: pthread_self has no preconditions.
        berth.pthread.store(unsafe { libc::pthread_self() }, Ordering::SeqCst);
        berth.tid.store(rustix::thread::gettid().as_raw_nonzero().get(), Ordering::SeqCst);
        BERTH.with(|own| own.set(Arc::clone(berth)).ok());
        let mut inbox = Inbox::new(Arc::clone(&self.device), self.bulk_bytes_max, &self.clones);
        let mut reply = Reply::default();
        while let Some(received) = self.receive(berth, &mut inbox) {
            self.handle(&**filesystem, berth, &received, &mut reply);
        }
        inbox.leave(&self.clones);
        self.leave(filesystem, berth);
    }

    /// The next request, or `None` if this thread is to leave.
    fn receive<'a>(&self, berth: &Berth, inbox: &'a mut Inbox) -> Option<Received<'a>> {
        if !self.sits(berth) {
            return None;
        }
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let outcome = loop {
            berth.waiting.store(true, Ordering::SeqCst);
            if self.stopping.load(Ordering::SeqCst) {
                break None;
            }
            if self.seats.has_none(&berth.has_seat) {
                berth.waiting.store(false, Ordering::SeqCst);
                self.is_not_waiting();
                if !self.sits(berth) {
                    return None;
                }
                self.waiting.fetch_add(1, Ordering::SeqCst);
                continue;
            }
            match self.turns.read(inbox) {
                Ok(place) => break Some(place),
                // A signal; or the request was withdrawn between wake-up and read.
                Err(Errno::INTR | Errno::NOENT | Errno::AGAIN) => {}
                Err(Errno::NODEV) => {
                    // No caller waits for the other threads' operations any more.
                    self.roll().berths.iter().for_each(|berth| berth.abandoned.store(true, Ordering::Relaxed));
                    break None;
                }
                Err(errno) => {
                    tracing::error!(%errno, "reading requests from the kernel failed; this thread leaves");
                    break None;
                }
            }
        };
        berth.waiting.store(false, Ordering::SeqCst);
        self.served.fetch_add(1, Ordering::Relaxed);
        self.is_not_waiting();
        outcome.map(|place| inbox.received(place))
    }

    fn is_not_waiting(&self) {
        if self.waiting.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.lookout.rouse();
        }
    }

    /// Has the thread a seat? It waits for one, and returns `false` if it is to leave.
    fn sits(&self, berth: &Berth) -> bool {
        if berth.has_seat.load(Ordering::SeqCst) {
            return true;
        }
        berth.is_parked.store(true, Ordering::SeqCst);
        let leaves = || self.stopping.load(Ordering::SeqCst) || berth.release.load(Ordering::SeqCst);
        let sits = self.seats.take(&berth.has_seat, leaves);
        berth.is_parked.store(false, Ordering::SeqCst);
        // (It may have been dismissed at this moment: it stays.)
        if sits {
            berth.release.store(false, Ordering::SeqCst);
        }
        sits
    }

    fn handle<F: Filesystem>(&self, filesystem: &F, berth: &Berth, received: &Received<'_>, reply: &mut Reply) {
        let Ok(header) = Header::decode(received.bytes) else {
            tracing::error!(bytes = received.bytes.len(), "a request of the kernel is too short to be answered");
            return;
        };
        reply.clear();
        let _turn = self.turns.turn(&header, || berth.give_seat());
        let request = match request::decode(received.bytes) {
            Ok(request) => request,
            Err(errno) => {
                tracing::error!(opcode = header.opcode, "a request of the kernel is malformed");
                return send(received, &header, errno.raw_os_error(), &[]);
            }
        };
        if let Operation::Interrupt { unique } = request.operation {
            // Not found: its thread has read it and not registered it yet (try again), or it has been answered (no
            // effect).
            if !self.interrupt(unique) {
                send(received, &header, Errno::AGAIN.raw_os_error(), &[]);
            }
            return;
        }
        berth.interrupted.store(false, Ordering::Relaxed);
        berth.abandoned.store(false, Ordering::Relaxed);
        berth.caller.store(header.pid, Ordering::Relaxed);
        berth.unique.store(header.unique, Ordering::Release);
        let outcome =
            catch_unwind(AssertUnwindSafe(|| dispatch::answer(filesystem, &request, reply, self.bulk_bytes_max)));
        surgetank_types::crash_point!("mount.served");
        berth.unique.store(0, Ordering::Release);
        berth.waits_long.store(false, Ordering::SeqCst);
        match outcome {
            Ok(Ok(())) => send(received, &header, 0, reply.body()),
            Ok(Err(fault)) => {
                if fault.errno == Errno::IO {
                    // The file system did not request this one, and the program learns only the errno.
                    tracing::warn!(node = header.node, opcode = header.opcode, "{fault}");
                } else if !fault.note.is_empty() {
                    tracing::debug!(node = header.node, opcode = header.opcode, "{fault}");
                }
                send(received, &header, fault.errno.raw_os_error(), &[]);
            }
            Err(_panic) => {
                tracing::error!(node = header.node, opcode = header.opcode, "an operation panicked: EIO");
                send(received, &header, Errno::IO.raw_os_error(), &[]);
            }
        }
    }

    fn interrupt(&self, unique: u64) -> bool {
        let roll = self.roll();
        let berth = roll.berths.iter().find(|berth| berth.unique.load(Ordering::Acquire) == unique);
        berth.inspect(|berth| berth.interrupted.store(true, Ordering::Relaxed)).is_some()
    }

    fn leave<F: Filesystem>(&self, filesystem: &Arc<F>, berth: &Arc<Berth>) {
        berth.give_seat();
        let last = {
            let mut roll = self.roll();
            roll.berths.retain(|other| !Arc::ptr_eq(other, berth));
            roll.berths.is_empty()
        };
        if last {
            if catch_unwind(AssertUnwindSafe(|| filesystem.ended())).is_err() {
                tracing::error!("the end of the file system panicked");
            }
            self.roll().over = true;
            self.left.notify_all();
            self.lookout.rouse();
        }
    }
}

impl Roll {
    fn at_hand(&self) -> usize {
        self.berths.iter().filter(|berth| !berth.waits_long.load(Ordering::SeqCst)).count()
    }
}

impl Berth {
    fn is_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }

    /// Another thread may serve.
    fn give_seat(&self) {
        self.seats.give(&self.has_seat);
    }

    fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Relaxed)
    }

    /// Interrupts the thread's `read`. The caller holds the roll; a thread removes itself from the roll before it ends.
    fn wake(&self) {
        if self.waiting.load(Ordering::SeqCst) {
            // SAFETY: the thread is on the roll, so it lives and has stored its id before it first waited. The signal's
            // handler does nothing.
            unsafe { libc::pthread_kill(self.pthread.load(Ordering::SeqCst), wake_signal()) };
        }
    }
}

fn send(received: &Received<'_>, header: &Header, error: i32, body: &[u8]) {
    if !header.wants_answer() {
        return;
    }
    let head = reply::header(header.unique, error, body.len());
    match rustix::io::writev(received.device, &reply::slices(&head, body)) {
        // ENOENT: no caller waits for it any more. ENODEV: the mount is gone.
        Ok(_) | Err(Errno::NOENT | Errno::NODEV) => {}
        Err(errno) => {
            tracing::error!(%errno, opcode = header.opcode, "the kernel refused an answer")
        }
    }
}

fn wake_signal() -> libc::c_int {
    libc::SIGRTMIN() + 7
}

/// An empty handler: the signal ends a blocking `read` with EINTR.
fn install_wake_signal() {
    static INSTALLED: Once = Once::new();
    extern "C" fn nothing(_signal: libc::c_int) {}
    INSTALLED.call_once(|| {
        // SAFETY: a zeroed sigaction is a valid one (empty mask, no flags); the handler is async-signal-safe.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as libc::sighandler_t;
            libc::sigaction(wake_signal(), &raw const action, std::ptr::null_mut());
        }
    });
}
