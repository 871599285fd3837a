//! The server's unsolicited messages to the kernel: drop cached data, and register the backing file of an open one.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;

use super::abi::notify;
use super::backing::{self, BackingId};
use super::reply;
use super::turns::Turns;

/// Cloneable; usable from any thread, also after the session ended (every call fails then).
///
/// Never call the `inval_*` and `delete` methods while answering a request. The kernel may hold, for that request, the
/// lock that the invalidation needs. (Attributes alone need no lock.)
#[derive(Debug, Clone)]
pub struct Notifier {
    device: Arc<OwnedFd>,
    turns: Arc<Turns>,
}

impl Notifier {
    pub(super) fn new(device: Arc<OwnedFd>, turns: Arc<Turns>) -> Self {
        Self { device, turns }
    }

    /// Waits until all earlier closes are released, except slow ones. Never call it while answering a request.
    pub fn await_closes(&self) {
        self.turns.await_closes(self.device.as_fd());
    }

    /// Are all earlier closes released? Waits for them, also for slow ones. Never call it while answering a request.
    pub fn closes_are_done(&self, patience: Duration) -> bool {
        self.turns.closes_are_done(self.device.as_fd(), patience)
    }

    pub(super) fn device(&self) -> &OwnedFd {
        &self.device
    }

    /// Drops cached attributes of a node and its cached pages from `offset` on: `length` bytes, 0 for all that follow;
    /// a negative `offset` drops the attributes alone. For a directory: the cached listing. `false`: the kernel does
    /// not know the node.
    pub fn inval_inode(&self, id: u64, offset: i64, length: i64) -> io::Result<bool> {
        let mut body = [0; 24];
        body[0..8].copy_from_slice(&id.to_ne_bytes());
        body[8..16].copy_from_slice(&offset.to_ne_bytes());
        body[16..24].copy_from_slice(&length.to_ne_bytes());
        self.notify(notify::INVAL_INODE, &body)
    }

    /// Drops the cached entry of the name (also a negative one).
    pub fn inval_entry(&self, parent: u64, name: &[u8]) -> io::Result<()> {
        let mut body = Vec::with_capacity(16 + name.len() + 1);
        body.extend_from_slice(&parent.to_ne_bytes());
        body.extend_from_slice(&name_bytes(name)?.to_ne_bytes());
        body.extend_from_slice(&[0; 4]);
        body.extend_from_slice(name);
        body.push(0);
        self.notify(notify::INVAL_ENTRY, &body).map(|_known| ())
    }

    /// Like `inval_entry`, and reports to watchers of the directory (inotify) that the file is gone.
    pub fn delete(&self, parent: u64, child: u64, name: &[u8]) -> io::Result<()> {
        let mut body = Vec::with_capacity(24 + name.len() + 1);
        body.extend_from_slice(&parent.to_ne_bytes());
        body.extend_from_slice(&child.to_ne_bytes());
        body.extend_from_slice(&name_bytes(name)?.to_ne_bytes());
        body.extend_from_slice(&[0; 4]);
        body.extend_from_slice(name);
        body.push(0);
        self.notify(notify::DELETE, &body).map(|_known| ())
    }

    /// Registers a file for passthrough. It must be on a file system below the mount's stack depth, and not opened as
    /// O_PATH. Its mode does not matter: the kernel opens it again for each open, with that open's flags. Needs
    /// CAP_SYS_ADMIN in the initial user namespace. The descriptor may be closed afterwards.
    ///
    /// The kernel will write with the credentials of this moment. CAP_FSETID is dropped for it: with it, a write by an
    /// ordinary user would keep the setuid bit of the backing file.
    pub fn backing_open(&self, file: impl AsFd) -> io::Result<BackingId> {
        backing::open(&self.device, file)
    }

    /// Ends a registration. Open files that use the backing file keep it open. An error: the
    /// kernel does not know the id, or CAP_SYS_ADMIN is missing.
    pub fn backing_close(&self, id: BackingId) -> io::Result<()> {
        backing::close(&self.device, id)
    }

    /// Makes the kernel send again all requests that were read and not answered. They arrive in no particular order,
    /// before other requests, with [`super::abi::UNIQUE_RESEND`] in their numbers.
    pub fn resend(&self) -> io::Result<()> {
        self.notify(notify::RESEND, &[]).map(|_known| ())
    }

    /// A node or name that the kernel does not know needs no invalidation: `false`.
    fn notify(&self, code: i32, body: &[u8]) -> io::Result<bool> {
        let header = reply::header(0, -code, body.len());
        match rustix::io::writev(self.device.as_fd(), &reply::slices(&header, body)) {
            Ok(_) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }
}

fn name_bytes(name: &[u8]) -> io::Result<u32> {
    u32::try_from(name.len()).map_err(|_long| Errno::NAMETOOLONG.into())
}
