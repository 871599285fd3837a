//! A thread whose call is being answered: its memory, its descriptors, its identity.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use surgetank_types::model::Caller;

use super::reach::Reach;

const PAGE_BYTES: u64 = 4096;
pub const PATH_BYTES_MAX: usize = 4096;

#[derive(Clone, Copy)]
pub struct Task<'a> {
    pub tid: u32,
    /// Access through `run`, if the agent itself has none.
    reach: Option<&'a Reach>,
}

/// The fields of `/proc/TID/status`.
#[derive(Debug, Clone, Copy)]
pub struct Status {
    pub caller: Caller,
    /// The process, of which the thread may be one of many.
    pub tgid: u32,
}

impl Task<'static> {
    /// Without access through `run`.
    pub fn of(tid: u32) -> Self {
        Self { tid, reach: None }
    }
}

impl<'a> Task<'a> {
    pub fn reached(tid: u32, reach: Option<&'a Reach>) -> Self {
        Self { tid, reach }
    }

    fn transfer(self, at: u64, buffer: *mut libc::c_void, bytes: usize, writes: bool) -> Result<usize, Errno> {
        let ours = libc::iovec { iov_base: buffer, iov_len: bytes };
        let theirs = libc::iovec { iov_base: at as *mut libc::c_void, iov_len: bytes };
        let tid = self.tid.cast_signed();
        // SAFETY: `ours` is memory of ours, readable and (unless only read from) writable for its length; the kernel
        // checks theirs.
        let moved = unsafe {
            if writes {
                libc::process_vm_writev(tid, &raw const ours, 1, &raw const theirs, 1, 0)
            } else {
                libc::process_vm_readv(tid, &raw const ours, 1, &raw const theirs, 1, 0)
            }
        };
        usize::try_from(moved).map_err(|_| Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::FAULT))
    }

    /// Reads as many bytes as there are.
    pub fn read_some(self, at: u64, buffer: &mut [u8]) -> Result<usize, Errno> {
        match (self.transfer(at, buffer.as_mut_ptr().cast(), buffer.len(), false), self.reach) {
            (Err(Errno::PERM), Some(reach)) => reach.read(self.tid, at, buffer),
            (other, _) => other,
        }
    }

    pub fn write_some(self, at: u64, bytes: &[u8]) -> Result<usize, Errno> {
        match (self.transfer(at, bytes.as_ptr().cast_mut().cast(), bytes.len(), true), self.reach) {
            (Err(Errno::PERM), Some(reach)) => reach.write(self.tid, at, bytes),
            (other, _) => other,
        }
    }

    pub fn read(self, at: u64, buffer: &mut [u8]) -> Result<(), Errno> {
        match self.read_some(at, buffer)? {
            all if all == buffer.len() => Ok(()),
            _ => Err(Errno::FAULT),
        }
    }

    pub fn write(self, at: u64, bytes: &[u8]) -> Result<(), Errno> {
        if bytes.is_empty() {
            return Ok(());
        }
        match self.write_some(at, bytes)? {
            all if all == bytes.len() => Ok(()),
            _ => Err(Errno::FAULT),
        }
    }

    /// A value of plain numbers.
    pub fn get<T: Copy + Default>(self, at: u64) -> Result<T, Errno> {
        let mut value = T::default();
        // SAFETY: the callers' types are numbers and arrays of them: any bytes are a value.
        let bytes = unsafe { std::slice::from_raw_parts_mut((&raw mut value).cast::<u8>(), size_of::<T>()) };
        self.read(at, bytes)?;
        Ok(value)
    }

    /// Bytes up to a NUL. The memory may end at a page's end.
    pub fn string(self, at: u64, bytes_max: usize) -> Result<Vec<u8>, Errno> {
        let mut string = Vec::new();
        let mut at = at;
        while string.len() < bytes_max {
            let piece =
                usize::try_from(PAGE_BYTES - at % PAGE_BYTES).unwrap_or(bytes_max).min(bytes_max - string.len());
            // Names are short: the page's rest is fetched only for long ones.
            let piece = if string.is_empty() { piece.min(256) } else { piece };
            let start = string.len();
            string.resize(start + piece, 0);
            self.read(at, &mut string[start..])?;
            if let Some(end) = string[start..].iter().position(|byte| *byte == 0) {
                string.truncate(start + end);
                return Ok(string);
            }
            at += piece as u64;
        }
        Err(Errno::NAMETOOLONG)
    }

    pub fn proc(self, what: &str) -> String {
        format!("/proc/{}/{what}", self.tid)
    }

    pub fn status(self) -> Option<Status> {
        let text = std::fs::read_to_string(self.proc("status")).ok()?;
        let field = |name: &str, index: usize| -> Option<&str> {
            text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().nth(index)
        };
        Some(Status {
            caller: Caller {
                // The fourth id, which decides the access to files.
                uid: field("Uid:", 3)?.parse().ok()?,
                gid: field("Gid:", 3)?.parse().ok()?,
                pid: self.tid,
                umask: u32::from_str_radix(field("Umask:", 0).unwrap_or("22"), 8).ok()?,
            },
            tgid: field("Tgid:", 0)?.parse().ok()?,
        })
    }

    /// A duplicate of one of its descriptors: the same open file, with the same position.
    pub fn descriptor(self, number: i32) -> Result<OwnedFd, Errno> {
        let tgid = self.status().ok_or(Errno::SRCH)?.tgid.cast_signed();
        let pid = rustix::process::Pid::from_raw(tgid).ok_or(Errno::SRCH)?;
        let process = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())?;
        let taken = rustix::process::pidfd_getfd(process.as_fd(), number, rustix::process::PidfdGetfdFlags::empty());
        match (taken, self.reach) {
            (Err(Errno::PERM), Some(reach)) => reach.descriptor(self.tid, number),
            (other, _) => other,
        }
    }
}

/// Opens a directory whose path may be longer than the kernel accepts at once.
pub fn open_directory(path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
    let each = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut from: Option<OwnedFd> = None;
    let mut rest = path;
    while rest.len() >= PATH_BYTES_MAX {
        let end = rest[..PATH_BYTES_MAX - 1].iter().rposition(|byte| *byte == b'/').ok_or(Errno::NAMETOOLONG)?;
        from = Some(open_from(from.as_ref(), &rest[..end], each | OFlags::PATH)?);
        rest = &rest[end + 1..];
    }
    open_from(from.as_ref(), rest, each | flags)
}

fn open_from(from: Option<&OwnedFd>, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
    match from {
        Some(from) => rustix::fs::openat(from, path, flags, Mode::empty()),
        None => rustix::fs::open(path, flags, Mode::empty()),
    }
}
