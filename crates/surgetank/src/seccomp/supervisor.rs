//! Answers calls: the listeners of all runs, the threads that serve them, and the files of granted descriptors.

use std::collections::HashMap;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use surgetank_core::namespace::Namespace;
use surgetank_types::model::FileId;

use super::call::{Answer, Call};
use super::dispatch;
use super::listener::Listener;
use super::listing::Cookies;
use super::reach::Reach;
use super::refused::Refusals;
use super::task::Task;
use crate::shimdoor;
use crate::socket_address::Address;

/// An operation that waits (for the drain, for the store) occupies a thread.
const THREADS_MAX: usize = 256;
/// Files of the store that programs may still have open; descriptors of older ones count as foreign.
const REMEMBERED_MAX: usize = 1 << 16;

/// A plain file or a bare directory: device and inode number.
type Number = (u64, u64);

pub struct Supervisor {
    pub namespace: Arc<Namespace>,
    pub shim: Arc<shimdoor::Door>,
    /// The directory, absolute, without links.
    pub over: Vec<u8>,
    pub over_dev: u64,
    dirs: Mutex<HashMap<Number, FileId>>,
    files: Mutex<HashMap<Number, FileId>>,
    pub cookies: Mutex<Cookies>,
    pub refusals: Arc<Refusals>,
    /// A process changed its root.
    pub rooted: AtomicBool,
    /// The number of runs that are being served.
    served_runs: Arc<AtomicUsize>,
    pub calls: AtomicU64,
    pub gave: Gave,
}

/// Called for each descriptor of a file that a program gets: thread, file, flags of open, and whether it was created.
pub type Gave = Box<dyn Fn(u32, FileId, i32, bool) + Send + Sync>;

/// The door while it is open.
pub struct Opened {
    pub supervisor: Arc<Supervisor>,
    socket: PathBuf,
    listener: UnixListener,
    closing: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Opens the door: runs send their listeners to `socket`.
pub fn open(
    namespace: &Arc<Namespace>,
    shim: &shimdoor::Opened,
    over: &Path,
    over_dev: u64,
    socket: &Path,
    gave: Gave,
) -> io::Result<Opened> {
    let supervisor = Arc::new(Supervisor {
        namespace: namespace.clone(),
        shim: shim.door(),
        over: over.as_os_str().as_bytes().to_vec(),
        over_dev,
        dirs: Mutex::default(),
        files: Mutex::default(),
        cookies: Mutex::default(),
        refusals: Arc::default(),
        rooted: AtomicBool::new(false),
        served_runs: Arc::default(),
        calls: AtomicU64::new(0),
        gave,
    });
    let root = rustix::fs::stat(over)?;
    supervisor.remember_dir(root.st_dev, root.st_ino, FileId::ROOT);
    match std::fs::remove_file(socket) {
        Err(why) if why.kind() != io::ErrorKind::NotFound => return Err(why),
        _ => {}
    }
    let listener = UnixListener::bind(Address::of(socket)?.path())?;
    let closing = Arc::new(AtomicBool::new(false));
    let (theirs, us, ends) = (listener.try_clone()?, supervisor.clone(), closing.clone());
    let thread = std::thread::Builder::new().name("calls".into()).spawn(move || admit(&us, &theirs, &ends))?;
    Ok(Opened { supervisor, socket: socket.to_path_buf(), listener, closing, thread: Some(thread) })
}

impl Opened {
    pub fn living(&self) -> Arc<AtomicUsize> {
        self.supervisor.served_runs.clone()
    }

    pub fn refusals(&self) -> Arc<Refusals> {
        self.supervisor.refusals.clone()
    }

    /// A process lives under one of the filters.
    pub fn in_use(&self) -> bool {
        self.supervisor.served_runs.load(Ordering::Acquire) > 0
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.closing.store(true, Ordering::Release);
        // Wakes the thread in accept.
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
        drop(std::fs::remove_file(&self.socket));
    }
}

fn admit(supervisor: &Arc<Supervisor>, socket: &UnixListener, closing: &AtomicBool) {
    while !closing.load(Ordering::Acquire) {
        let Ok((stream, _)) = socket.accept() else {
            if closing.load(Ordering::Acquire) {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
            continue;
        };
        if let Err(why) = take_in(supervisor, &stream) {
            tracing::error!(%why, "a run's calls cannot be served");
        }
    }
}

/// Receives a listener. The one byte in return reports that its calls are served from now on.
fn take_in(supervisor: &Arc<Supervisor>, stream: &UnixStream) -> io::Result<()> {
    let peer = rustix::net::sockopt::socket_peercred(stream)?;
    let ours = rustix::process::geteuid();
    if peer.uid != ours && !peer.uid.is_root() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    stream.set_read_timeout(Some(std::time::Duration::from_secs(10)))?;
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    rustix::net::recvmsg(stream, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    // The filter's listener, and the socket for access to the programs.
    let descriptors: Vec<OwnedFd> = ancillary
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        })
        .flatten()
        .collect();
    let [listener, reach] = <[OwnedFd; 2]>::try_from(descriptors).map_err(|_| io::ErrorKind::InvalidData)?;
    let listener = Listener::new(listener);
    let workers = Arc::new(Workers {
        supervisor: supervisor.clone(),
        listener,
        reach: Reach::new(reach),
        turn: Mutex::new(()),
        idle: AtomicUsize::new(0),
        threads: AtomicUsize::new(0),
    });
    supervisor.served_runs.fetch_add(1, Ordering::AcqRel);
    if let Err(why) = Workers::grow(&workers) {
        supervisor.served_runs.fetch_sub(1, Ordering::AcqRel);
        return Err(why);
    }
    rustix::net::send(stream, &[1], rustix::net::SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The threads of one listener. One of them waits for calls at a time. A thread that gets one lets the next thread
/// wait, and creates one if there is none.
struct Workers {
    supervisor: Arc<Supervisor>,
    listener: Listener,
    reach: Reach,
    turn: Mutex<()>,
    idle: AtomicUsize,
    threads: AtomicUsize,
}

impl Workers {
    fn grow(workers: &Arc<Self>) -> io::Result<()> {
        workers.threads.fetch_add(1, Ordering::AcqRel);
        workers.idle.fetch_add(1, Ordering::AcqRel);
        let us = workers.clone();
        let spawned = std::thread::Builder::new().name("call".into()).stack_size(512 << 10).spawn(move || {
            Self::serve(&us);
            if us.threads.fetch_sub(1, Ordering::AcqRel) == 1 {
                us.supervisor.served_runs.fetch_sub(1, Ordering::AcqRel);
            }
        });
        if let Err(why) = spawned {
            workers.threads.fetch_sub(1, Ordering::AcqRel);
            workers.idle.fetch_sub(1, Ordering::AcqRel);
            return Err(why);
        }
        Ok(())
    }

    fn serve(workers: &Arc<Self>) {
        loop {
            let notice = {
                let _turn = lock(&workers.turn);
                let mut fds = [PollFd::new(&workers.listener, PollFlags::IN)];
                match rustix::event::poll(&mut fds, None) {
                    Ok(_) if fds[0].revents().contains(PollFlags::IN) => {}
                    // No process lives under the filter any more.
                    Ok(_) => return,
                    Err(Errno::INTR) => continue,
                    Err(why) => {
                        tracing::error!(%why, "a run's calls are not served any more");
                        return;
                    }
                }
                match workers.listener.receive() {
                    Ok(notice) => notice,
                    // The caller was killed before the agent took the call.
                    Err(_) => continue,
                }
            };
            let last_idle = workers.idle.fetch_sub(1, Ordering::AcqRel) == 1;
            if last_idle
                && workers.threads.load(Ordering::Acquire) < THREADS_MAX
                && let Err(why) = Self::grow(workers)
            {
                tracing::warn!(%why, "no further thread for calls");
            }
            workers.supervisor.calls.fetch_add(1, Ordering::Relaxed);
            let id = notice.id;
            let call = Call::new(&workers.supervisor, &workers.listener, Some(&workers.reach), notice);
            let outcome = match dispatch::answer(&call) {
                Ok(Answer::Continue) => workers.listener.release(id),
                Ok(Answer::Value(value)) => workers.listener.succeed(id, value),
                Ok(Answer::Descriptor { file, close_on_exec }) => {
                    let _giving = workers.supervisor.shim.giving();
                    let handed = match workers.listener.hand_over(id, file.as_fd(), close_on_exec) {
                        // The caller's descriptor table is full.
                        Err(why) if why.raw_os_error() == Some(libc::EMFILE) => workers.listener.fail(id, libc::EMFILE),
                        other => other,
                    };
                    drop(file);
                    handed
                }
                Err(errno) => {
                    if errno == Errno::IO {
                        tracing::warn!(number = notice.number, tid = notice.tid, "a call ends with an I/O error");
                    }
                    workers.listener.fail(id, errno.raw_os_error())
                }
            };
            drop(call);
            if let Err(why) = outcome
                && why.raw_os_error() != Some(libc::ENOENT)
            {
                tracing::warn!(%why, number = notice.number, "a call could not be answered");
                let _ = workers.listener.fail(id, libc::EIO);
            }
            workers.idle.fetch_add(1, Ordering::AcqRel);
        }
    }
}

impl Supervisor {
    pub fn is_below(&self, path: &[u8]) -> bool {
        path.strip_prefix(&*self.over).is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
    }

    pub fn dir(&self, dev: u64, ino: u64) -> Option<FileId> {
        lock(&self.dirs).get(&(dev, ino)).copied()
    }

    /// Returns whether the directory is new here.
    pub fn remember_dir(&self, dev: u64, ino: u64, id: FileId) -> bool {
        lock(&self.dirs).insert((dev, ino), id) != Some(id)
    }

    pub fn file(&self, dev: u64, ino: u64) -> Option<FileId> {
        self.shim.of_plain(dev, ino).or_else(|| lock(&self.files).get(&(dev, ino)).copied())
    }

    /// Returns whether the file is new here: one look-up of it is then kept until the table is full.
    pub fn remember_file(&self, dev: u64, ino: u64, id: FileId) -> bool {
        let mut files = lock(&self.files);
        if files.get(&(dev, ino)) == Some(&id) {
            return false;
        }
        let mut dropped: Vec<FileId> = Vec::new();
        if files.len() >= REMEMBERED_MAX {
            dropped.extend(files.drain().map(|(_, id)| id));
        }
        // The number of a removed file came again.
        dropped.extend(files.insert((dev, ino), id));
        drop(files);
        for id in dropped {
            self.namespace.resolver.forget(id, 1);
        }
        true
    }

    /// "/" unless a process called chroot.
    pub fn root_of(&self, task: Task<'_>) -> Vec<u8> {
        if !self.rooted.load(Ordering::Relaxed) {
            return b"/".to_vec();
        }
        rustix::fs::readlink(task.proc("root"), Vec::new())
            .map_or_else(|_| b"/".to_vec(), std::ffi::CString::into_bytes)
    }
}
