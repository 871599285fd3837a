//! A copy that is made of an earlier version of the same file: only its changed blocks are written.
//!
//! The danger that it avoids: the earlier version is changed under a program that reads it, or was changed by another one.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use rustix::fs::{OFlags, fstat};

use super::PosixStore;
use super::attributes::{identity_of, subject};
use super::beneath::{open_file_at, without_atime};
use crate::{BlockSums, Cred, Gate, Meta, Staged, StorePath};
use surgetank_types::model::StoreIdentity;

impl PosixStore {
    pub(super) fn block_sums_of(&self, who: Cred, path: &StorePath, staged: &Staged) -> io::Result<BlockSums> {
        let place = self.identity.act(who, || self.root.place(path))?;
        let file = self.open_ours(who, &place)?;
        let sums = BlockSums::of(&file, staged.identity.size_bytes)?;
        self.counters.bytes_read_back.add(sums.size_bytes());
        let stat = fstat(&file)?;
        let same_file = stat.st_ino == staged.identity.ino && u64::try_from(stat.st_size) == Ok(sums.size_bytes());
        if same_file && sums.total() == staged.checksum {
            return Ok(sums);
        }
        Err(self.differs(path, sums.total(), staged.checksum))
    }

    fn differs(&self, path: &StorePath, is: u64, wanted: u64) -> io::Error {
        let what = format!("{path} in {}: checksum {is:016x} instead of {wanted:016x}", self.label);
        io::Error::new(io::ErrorKind::InvalidData, what)
    }

    pub(super) fn restage_at(
        &self,
        who: Cred,
        path: &StorePath,
        source: &File,
        meta: &Meta,
        (former, sums): (&StoreIdentity, &mut BlockSums),
        gate: Gate<'_>,
    ) -> io::Result<(Staged, u64)> {
        let place = self.identity.act(who, || self.root.place(path))?;
        let open = || without_atime(|flags| open_file_at(&place, flags), OFlags::RDWR);
        let file = self.identity.act(who, open)?;
        // (An attribute of the earlier version may be removed by now.)
        let is_bare = subject(&file, &self.identity, who, true).is_bare()?;
        if identity_of(&fstat(&file)?) != *former || !is_bare || !is_open_only_here(&file) {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        let written = sums.bring((source, None), &file, &|write| self.identity.act(who, write), gate)?;
        let written_bytes = written.iter().map(|(_, len)| len).sum();
        self.counters.bytes_written.add(written_bytes);
        crash_point!("store.copied");
        subject(&file, &self.identity, who, true).dress(meta, place.dir.as_fd(), 0)?;
        crash_point!("store.staged");
        self.counters.fsyncs.add(1);
        // Where a sync of the directory also brings the file's times to the disk, the bytes suffice here.
        let names_bring_times = self.file_system.as_ref().is_some_and(super::FileSystem::has_one_journal);
        if names_bring_times {
            file.sync_data()?
        } else {
            file.sync_all()?
        }
        self.counters.bytes_read_back.add(written_bytes);
        if !sums.match_in(&file, &written)? {
            let is = BlockSums::of(&file, sums.size_bytes())?.total();
            return Err(self.differs(path, is, sums.total()));
        }
        Ok((Staged { identity: identity_of(&fstat(&file)?), checksum: sums.total() }, written_bytes))
    }
}

/// The kernel grants a write lease exactly when no other descriptor of the file is open. Where leases do not work, the answer
/// is no.
fn is_open_only_here(file: &File) -> bool {
    let fd = file.as_raw_fd();
    // SAFETY: fcntl on a descriptor that `file` keeps open; F_SETLEASE takes an int.
    let taken = unsafe { libc::fcntl(fd, libc::F_SETLEASE, libc::F_WRLCK) } == 0;
    if taken {
        // SAFETY: as above; gives the lease back.
        unsafe { libc::fcntl(fd, libc::F_SETLEASE, libc::F_UNLCK) };
    }
    taken
}
