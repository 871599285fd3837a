//! The threads that serve one session.
//!
//! Each thread reads a request, runs it and writes the answer. When the last waiting thread takes a request, another is
//! hired, so that an operation which blocks (an fsync to a slow store) never keeps others waiting; threads beyond a few idle
//! ones leave again. A thread's buffers are allocated when it is hired, cost memory only as far as they are touched, and go
//! with it.
//!
//! States of a thread: waiting (in `read`) → serving → waiting … → gone. It leaves when the mount is gone (ENODEV), when the
//! session is told to stop, or when enough others wait. The last one to leave ends the file system.
//!
//! Invariants: every request that wants an answer gets exactly one, also when the file system panics (EIO); a stop never
//! takes a thread away from a request that it has begun.

use std::cell::OnceCell;
use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

use rustix::io::Errno;

use super::abi;
use super::dispatch;
use super::filesystem::Filesystem;
use super::reply::{self, Reply};
use super::request::{self, Header, Operation};

/// How many threads there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Hired at the start.
    pub start: usize,
    /// More than so many waiting: one leaves.
    pub idle_max: usize,
    pub max: usize,
}

/// One thread of the crew, as the others see it.
#[derive(Debug, Default)]
struct Berth {
    /// The request being served; 0 for none.
    unique: AtomicU64,
    /// Its caller no longer wants to wait.
    interrupted: AtomicBool,
    /// The thread is in `read`, and has this pthread id.
    waiting: AtomicBool,
    thread: AtomicU64,
}

thread_local! {
    static BERTH: OnceCell<Arc<Berth>> = const { OnceCell::new() };
}

/// Whether the caller of the request that this thread serves was interrupted (Ctrl-C, kill). Operations that wait long look
/// at it and give up with EINTR; the program hangs unkillable until they return.
pub fn interrupted() -> bool {
    BERTH.with(|berth| {
        berth
            .get()
            .is_some_and(|berth| berth.interrupted.load(Ordering::Relaxed))
    })
}

/// What the session and the threads share.
pub struct Crew {
    device: Arc<OwnedFd>,
    bounds: Bounds,
    bulk_bytes_max: usize,
    waiting: AtomicUsize,
    stopping: AtomicBool,
    roll: Mutex<Roll>,
    left: Condvar,
}

#[derive(Default)]
struct Roll {
    berths: Vec<Arc<Berth>>,
    hired: u64,
    over: bool,
}

impl Crew {
    pub fn new(device: Arc<OwnedFd>, bounds: Bounds, bulk_bytes_max: usize) -> Self {
        Self {
            device,
            bounds,
            bulk_bytes_max,
            waiting: AtomicUsize::new(0),
            stopping: AtomicBool::new(false),
            roll: Mutex::default(),
            left: Condvar::new(),
        }
    }

    pub fn start<F: Filesystem>(self: &Arc<Self>, filesystem: &Arc<F>) -> io::Result<()> {
        install_wake_signal();
        for _ in 0..self.bounds.start {
            self.hire(filesystem)?;
        }
        Ok(())
    }

    pub fn running(&self) -> bool {
        !self.roll().over
    }

    pub fn threads(&self) -> usize {
        self.roll().berths.len()
    }

    /// Returns when the last thread has left, or after `patience`; says whether they all left.
    pub fn wait(&self, patience: Option<Duration>) -> bool {
        let going_on = |roll: &mut Roll| !roll.over;
        match patience {
            None => {
                drop(
                    self.left
                        .wait_while(self.roll(), going_on)
                        .unwrap_or_else(PoisonError::into_inner),
                );
                true
            }
            Some(patience) => {
                let outcome = self
                    .left
                    .wait_timeout_while(self.roll(), patience, going_on);
                !outcome
                    .unwrap_or_else(PoisonError::into_inner)
                    .1
                    .timed_out()
            }
        }
    }

    /// Tells every thread to leave after the request it serves, and waits for that.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        loop {
            for berth in &self.roll().berths {
                if berth.waiting.load(Ordering::SeqCst) {
                    // SAFETY: a thread strikes its berth off the roll before it ends, and we hold the roll, so the id is
                    // that of a living thread. The signal's handler does nothing.
                    unsafe {
                        libc::pthread_kill(berth.thread.load(Ordering::SeqCst), wake_signal())
                    };
                }
            }
            // A thread may have looked at `stopping` just before and gone to `read` just after the signal: call again.
            if self.wait(Some(Duration::from_millis(2))) {
                return;
            }
        }
    }

    fn roll(&self) -> MutexGuard<'_, Roll> {
        self.roll.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hire<F: Filesystem>(self: &Arc<Self>, filesystem: &Arc<F>) -> io::Result<()> {
        let mut roll = self.roll();
        if roll.over || roll.berths.len() >= self.bounds.max {
            return Ok(());
        }
        let berth = Arc::<Berth>::default();
        let (crew, filesystem, own) =
            (Arc::clone(self), Arc::clone(filesystem), Arc::clone(&berth));
        std::thread::Builder::new()
            .name(format!("fuse-{}", roll.hired))
            .spawn(move || crew.serve(&filesystem, &own))?;
        roll.hired += 1;
        roll.berths.push(berth);
        Ok(())
    }

    fn serve<F: Filesystem>(self: &Arc<Self>, filesystem: &Arc<F>, berth: &Arc<Berth>) {
        // SAFETY: pthread_self has no preconditions.
        berth
            .thread
            .store(unsafe { libc::pthread_self() }, Ordering::SeqCst);
        BERTH.with(|own| own.set(Arc::clone(berth)).ok());
        let mut inbox = Inbox::new(self.bulk_bytes_max);
        let mut reply = Reply::default();
        while let Some(bytes) = self.receive(filesystem, berth, &mut inbox) {
            self.handle(&**filesystem, berth, bytes, &mut reply);
        }
        self.leave(filesystem, berth);
    }

    /// The next request, or `None` when this thread is to leave.
    fn receive<'a, F: Filesystem>(
        self: &Arc<Self>,
        filesystem: &Arc<F>,
        berth: &Berth,
        inbox: &'a mut Inbox,
    ) -> Option<&'a [u8]> {
        if self.waiting.fetch_add(1, Ordering::SeqCst) >= self.bounds.idle_max {
            self.waiting.fetch_sub(1, Ordering::SeqCst);
            return None;
        }
        let outcome = loop {
            berth.waiting.store(true, Ordering::SeqCst);
            if self.stopping.load(Ordering::SeqCst) {
                break None;
            }
            let outcome = rustix::io::read(&*self.device, inbox.room());
            berth.waiting.store(false, Ordering::SeqCst);
            match outcome {
                Ok(bytes) => break Some(bytes),
                // A signal; or the request was withdrawn between wake-up and read.
                Err(Errno::INTR | Errno::NOENT | Errno::AGAIN) => {}
                Err(Errno::NODEV) => break None,
                Err(errno) => {
                    tracing::error!(%errno, "reading requests from the kernel failed; this thread leaves");
                    break None;
                }
            }
        };
        berth.waiting.store(false, Ordering::SeqCst);
        let was_last = self.waiting.fetch_sub(1, Ordering::SeqCst) == 1;
        if was_last
            && outcome.is_some()
            && let Err(error) = self.hire(filesystem)
        {
            tracing::warn!(%error, "no further thread for the mount; operations may wait for each other");
        }
        outcome.map(|bytes| &inbox.room()[..bytes])
    }

    fn handle<F: Filesystem>(
        &self,
        filesystem: &F,
        berth: &Berth,
        bytes: &[u8],
        reply: &mut Reply,
    ) {
        let Ok(header) = Header::decode(bytes) else {
            tracing::error!(
                bytes = bytes.len(),
                "a request of the kernel is too short to be answered"
            );
            return;
        };
        reply.clear();
        let request = match request::decode(bytes) {
            Ok(request) => request,
            Err(errno) => {
                tracing::error!(
                    opcode = header.opcode,
                    bytes = bytes.len(),
                    "a request of the kernel is malformed"
                );
                return self.send(&header, errno.raw_os_error(), &[]);
            }
        };
        if let Operation::Interrupt { unique } = request.operation {
            // Not found: it was read by a thread that has not said so yet (try again), or is answered (nobody minds).
            if !self.interrupt(unique) {
                self.send(&header, Errno::AGAIN.raw_os_error(), &[]);
            }
            return;
        }
        berth.interrupted.store(false, Ordering::Relaxed);
        berth.unique.store(header.unique, Ordering::Release);
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            dispatch::answer(filesystem, &request, reply, self.bulk_bytes_max)
        }));
        berth.unique.store(0, Ordering::Release);
        match outcome {
            Ok(Ok(())) => self.send(&header, 0, reply.body()),
            Ok(Err(fault)) => {
                if !fault.note.is_empty() {
                    tracing::debug!(node = header.node, opcode = header.opcode, "{fault}");
                }
                self.send(&header, fault.errno.raw_os_error(), &[]);
            }
            Err(_panic) => {
                tracing::error!(operation = ?request.operation, node = header.node, "an operation panicked: EIO");
                self.send(&header, Errno::IO.raw_os_error(), &[]);
            }
        }
    }

    fn interrupt(&self, unique: u64) -> bool {
        let roll = self.roll();
        let berth = roll
            .berths
            .iter()
            .find(|berth| berth.unique.load(Ordering::Acquire) == unique);
        berth
            .inspect(|berth| berth.interrupted.store(true, Ordering::Relaxed))
            .is_some()
    }

    fn send(&self, header: &Header, error: i32, body: &[u8]) {
        if !header.wants_answer() {
            return;
        }
        let head = reply::header(header.unique, error, body.len());
        match rustix::io::writev(&*self.device, &reply::slices(&head, body)) {
            // ENOENT: nobody waits for it any more. ENODEV: the mount is gone.
            Ok(_) | Err(Errno::NOENT | Errno::NODEV) => {}
            Err(errno) => {
                tracing::error!(%errno, opcode = header.opcode, "the kernel refused an answer")
            }
        }
    }

    fn leave<F: Filesystem>(&self, filesystem: &Arc<F>, berth: &Arc<Berth>) {
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
        }
    }
}

/// Where requests are read to, placed so that the data of a WRITE starts on a page boundary.
struct Inbox {
    bytes: Vec<u8>,
    start: usize,
    size: usize,
}

impl Inbox {
    fn new(write_bytes_max: usize) -> Self {
        let size = write_bytes_max + abi::REQUEST_SLACK_BYTES;
        let bytes = vec![0; size + 2 * abi::PAGE_BYTES];
        let data_at = (bytes.as_ptr() as usize + abi::WRITE_PREFIX_BYTES) % abi::PAGE_BYTES;
        Self {
            bytes,
            start: (abi::PAGE_BYTES - data_at) % abi::PAGE_BYTES,
            size,
        }
    }

    fn room(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.size]
    }
}

fn wake_signal() -> libc::c_int {
    libc::SIGRTMIN() + 7
}

/// A handler that does nothing, so that the signal ends a blocking `read` with EINTR.
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
