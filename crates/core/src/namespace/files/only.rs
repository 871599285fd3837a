//! Descriptor grants without a mount that could mediate (the seccomp door): every file that can be opened is opened
//! directly, or the open fails.
//!
//! This works like the shim's grants (`descriptor_grant`), but a request cannot go elsewhere:
//! - Small files of the store are copied up first.
//! - Large files, and files that a process has open there, are written in place in the store.
//! - A file without room in any tier is written to a temporary in the store.
//! - When a device is full, the program gets ENOSPC from it.
//!
//! The danger that this avoids: a program writes to a plain file that a thread of the agent is moving.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;
use surgetank_types::sync::atomic::Ordering;

use surgetank_types::clock;
use surgetank_types::error::{Errno, Fault, FsResult};
use surgetank_types::model::{Caller, FileId, Kind, RunId};

use super::super::Namespace;
use super::{KEPT, LEFT_TO_THE_MOUNT, Via};

/// While a thread of the agent moves a file's bytes (a prefetch, an eviction), no process gets the file directly.
const PATIENCE: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(2);

impl Namespace {
    /// A descriptor of a regular file's plain file, as open(2) with these flags would return it.
    pub fn open_plain(&self, caller: &Caller, id: FileId, flags: i32) -> FsResult<File> {
        let access = flags & libc::O_ACCMODE;
        let truncates = flags & libc::O_TRUNC != 0;
        let want = match access {
            libc::O_RDONLY if truncates => 6,
            libc::O_RDONLY => 4,
            libc::O_WRONLY => 2,
            _ => 6,
        };
        {
            let tree = self.read_tree();
            let inode = tree.get(id).filter(|inode| inode.attr.kind == Kind::File).ok_or(Errno::NOENT)?;
            self.permit(caller, &inode.attr, want)?;
        }
        let until = clock::tick() + PATIENCE;
        loop {
            let opened = if access == libc::O_RDONLY && !truncates {
                self.open_to_read(id, flags)
            } else {
                self.open_to_write(caller, id, flags)
            };
            match opened {
                Err(fault) if fault.errno == Errno::AGAIN && clock::tick() < until => {
                    surgetank_types::sync::thread::sleep(LOOK_EVERY)
                }
                Err(fault) if fault.errno == Errno::AGAIN => return Err(Errno::BUSY.into()),
                Err(fault) if fault.errno == LEFT_TO_THE_MOUNT => {
                    return Err(Fault::new(Errno::IO, "the plain file cannot be watched"));
                }
                other => return other,
            }
        }
    }

    fn open_to_read(&self, id: FileId, flags: i32) -> FsResult<File> {
        let _inode = self.lock_inode(id);
        let open = self.open_locked(id, false, false, RunId(0), Via::Only(flags))?;
        let file = std::fs::OpenOptions::new()
            .read(true)
            .custom_flags(flags & (KEPT | libc::O_DIRECT) & !libc::O_ACCMODE)
            .open(format!("/proc/self/fd/{}", open.content().file.as_raw_fd()));
        self.close_user(&open, false);
        Ok(file?)
    }

    fn open_to_write(&self, caller: &Caller, id: FileId, flags: i32) -> FsResult<File> {
        // An open that only truncates is a writer too, although nothing of it remains.
        let given = flags & !libc::O_TRUNC;
        let given = if given & libc::O_ACCMODE == libc::O_RDONLY { given | libc::O_RDWR } else { given };
        let _inode = self.lock_inode(id);
        let open = self.open_locked(id, true, flags & libc::O_TRUNC != 0, self.run(caller), Via::Only(given))?;
        self.count_handed(&open);
        let file = self.hand(caller, &open, None, given)?;
        self.watch_set_ids(&self.read_tree(), &open);
        Ok(file)
    }

    /// Makes a file that must not exist, and opens it for writing.
    pub fn create_plain(
        &self,
        caller: &Caller,
        dir: FileId,
        name: &[u8],
        perm: u32,
        flags: i32,
    ) -> FsResult<(FileId, File)> {
        self.must_be_absent(caller, dir, name)?;
        self.permit_change(caller, dir)?;
        let flags = flags & !libc::O_TRUNC;
        let flags = if flags & libc::O_ACCMODE == libc::O_RDONLY { flags | libc::O_RDWR } else { flags };
        let run = self.run(caller);
        let made = self.make_file(caller, (dir, name), perm, run, Via::Only(flags))?;
        self.handed.fetch_add(1, Ordering::Relaxed);
        let file = self
            .hand(caller, &made.open, made.plain, flags)
            .map_err(|fault| if fault.errno == LEFT_TO_THE_MOUNT { Errno::IO.into() } else { fault })?;
        self.watch_set_ids(&self.read_tree(), &made.open);
        Ok((made.id, file))
    }
}
