//! The mirror's operations: each makes its own system call, on the file of the node id.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, Gid, Mode, OFlags, RawDir, RenameFlags, SeekFrom, Timespec, Timestamps,
    UTIME_NOW, UTIME_OMIT, Uid, XattrFlags,
};
use rustix::io::Errno;
use surgetank_types::error::FsResult;
use surgetank_types::model::{Attr, Caller, Kind};

use super::faults::{Op, Wrong};
use super::nodes::Node;
use super::{Handle, Mirror};
use surgetank::mount::attach::descriptor_path;
use surgetank::mount::filesystem::Filesystem;
use surgetank::mount::handshake::Agreed;
use surgetank::mount::notifier::Notifier;
use surgetank::mount::reply::{Attributes, DirectorySink, Entry, Looked, Opened, OpenedDirectory, SpaceReport};
use surgetank::mount::request::{FilePlace, ReleaseFlags, SetAttr, TimeChange, WriteFlags};

const XATTR_BYTES_MAX: usize = 65536;
const LISTING_BYTES: usize = 32 << 10;

impl Mirror {
    fn entry(&self, fd: OwnedFd) -> FsResult<(Arc<Node>, Entry)> {
        let (node, attr) = self.nodes.adopt(fd)?;
        let (entry_ttl, attr_ttl) = (self.options.ttl, self.options.ttl);
        let entry = Entry { id: node.id, generation: 0, attr, entry_ttl, attr_ttl };
        Ok((node, entry))
    }

    fn find(&self, parent: &Node, name: &[u8]) -> FsResult<(Arc<Node>, Entry)> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        self.entry(rustix::fs::openat(&parent.fd, name, flags, Mode::empty())?)
    }

    /// A new file under `name` belongs to the caller, with the group of a setgid directory.
    fn give(&self, caller: &Caller, parent: &Node, made: impl AsFd, name: &[u8], flags: AtFlags) -> FsResult<()> {
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        if uid != 0 || (caller.uid, caller.gid) == (uid, gid) {
            return Ok(());
        }
        let inherits = parent.attr()?.perm & libc::S_ISGID != 0;
        let gid = (!inherits).then(|| Gid::from_raw(caller.gid));
        rustix::fs::chownat(made, name, Some(Uid::from_raw(caller.uid)), gid, flags)?;
        Ok(())
    }

    fn made(&self, caller: &Caller, parent: &Node, name: &[u8]) -> FsResult<Entry> {
        self.give(caller, parent, &parent.fd, name, AtFlags::SYMLINK_NOFOLLOW)?;
        Ok(self.find(parent, name)?.1)
    }

    /// Keeps an open file and decides whether the kernel reads and writes it itself.
    fn opened(&self, node: Arc<Node>, file: OwnedFd) -> Opened {
        let backing = {
            let mut opens = node.opens();
            if opens.count == 0
                && self.options.passthrough
                && let Some(notifier) = self.notifier.get()
            {
                match notifier.backing_open(&file) {
                    Ok(id) => opens.backing = Some(id),
                    Err(error) => {
                        tracing::warn!(%error, "no passthrough for a file; it is read and written here")
                    }
                }
            }
            opens.count += 1;
            opens.backing
        };
        // Writes were written through: only a file whose close waits for the device needs a flush.
        let no_flush = !(self.options.flush_on_close && may_write(&file));
        Opened { fh: self.keep(node, file), backing, no_flush, ..Opened::default() }
    }

    fn reopen(&self, node: &Node, flags: OFlags) -> FsResult<OwnedFd> {
        Ok(rustix::fs::open(node.path(), flags, Mode::empty())?)
    }

    fn kill_suidgid(&self, node: &Node) -> FsResult<()> {
        let perm = node.attr()?.perm;
        let mut kept = perm & !libc::S_ISUID;
        if perm & libc::S_IXGRP != 0 {
            kept &= !libc::S_ISGID;
        }
        if kept != perm {
            rustix::fs::chmod(node.path(), Mode::from_raw_mode(kept))?;
        }
        Ok(())
    }

    fn sync(&self, handle: &Handle, data_only: bool, op: Op) -> FsResult<()> {
        let wrong = self.faults.apply(op)?;
        if wrong == Wrong::Drop {
            let size_bytes = handle.node.attr()?.size_bytes;
            let file = self.reopen(&handle.node, OFlags::WRONLY | OFlags::CLOEXEC)?;
            rustix::fs::ftruncate(&file, 0)?;
            rustix::fs::ftruncate(&file, size_bytes)?;
            return Err(Errno::IO.into());
        }
        if data_only {
            rustix::fs::fdatasync(&handle.file)?
        } else {
            rustix::fs::fsync(&handle.file)?
        }
        wrong.answer(())
    }

    fn attributes(&self, attr: Attr) -> Attributes {
        Attributes { attr, ttl: self.options.ttl }
    }
}

/// An O_PATH descriptor of an open file.
fn handle_to_path(file: &OwnedFd) -> FsResult<OwnedFd> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    Ok(rustix::fs::open(descriptor_path(file.as_fd()), flags, Mode::empty())?)
}

fn may_write(file: &OwnedFd) -> bool {
    rustix::fs::fcntl_getfl(file).is_ok_and(|flags| flags.intersects(OFlags::WRONLY | OFlags::RDWR))
}

/// Flags for the server's own descriptor: it writes at the requested offsets, through the page cache.
fn own_flags(flags: OFlags) -> OFlags {
    let not_ours = OFlags::CREATE | OFlags::EXCL | OFlags::NOCTTY | OFlags::APPEND | OFlags::DIRECT | OFlags::NOFOLLOW;
    flags.difference(not_ours) | OFlags::CLOEXEC
}

fn time_spec(change: Option<TimeChange>) -> Timespec {
    match change {
        None => Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        Some(TimeChange::Now) => Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
        Some(TimeChange::At(time)) => Timespec { tv_sec: time.secs(), tv_nsec: time.subsec_nanos().into() },
    }
}

fn kind_of(kind: FileType) -> Kind {
    match kind {
        FileType::Directory => Kind::Directory,
        FileType::Symlink => Kind::Symlink,
        FileType::Fifo => Kind::Fifo,
        FileType::Socket => Kind::Socket,
        FileType::CharacterDevice => Kind::CharDevice,
        FileType::BlockDevice => Kind::BlockDevice,
        FileType::RegularFile | FileType::Unknown => Kind::File,
    }
}

impl Filesystem for Mirror {
    fn started(&self, notifier: &Notifier, agreed: &Agreed) {
        if agreed.passthrough {
            self.notifier.get_or_init(|| notifier.clone());
        }
    }

    fn lookup(&self, _: &Caller, parent: u64, name: &[u8]) -> FsResult<Looked> {
        self.metadata(Op::Lookup)?;
        match self.find(&*self.nodes.get(parent)?, name) {
            Ok((_, entry)) => Ok(Looked::Found(entry)),
            Err(fault) if fault.errno == Errno::NOENT => Ok(Looked::Missing { ttl: self.options.ttl }),
            Err(fault) => Err(fault),
        }
    }

    fn forget(&self, id: u64, count: u64) {
        self.nodes.forget(id, count);
    }

    fn getattr(&self, _: &Caller, id: u64, _: Option<u64>) -> FsResult<Attributes> {
        self.metadata(Op::Getattr)?;
        Ok(self.attributes(self.nodes.get(id)?.attr()?))
    }

    fn setattr(&self, _: &Caller, id: u64, change: &SetAttr) -> FsResult<Attributes> {
        let wrong = self.metadata(Op::Setattr)?;
        let node = self.nodes.get(id)?;
        if change.uid.is_some() || change.gid.is_some() {
            let (uid, gid) = (change.uid.map(Uid::from_raw), change.gid.map(Gid::from_raw));
            rustix::fs::chownat(&node.fd, "", uid, gid, AtFlags::EMPTY_PATH)?;
        }
        if let Some(size_bytes) = change.size_bytes {
            match change.fh {
                Some(fh) => rustix::fs::ftruncate(&self.handle(fh)?.file, size_bytes)?,
                None => rustix::fs::ftruncate(self.reopen(&node, OFlags::WRONLY | OFlags::CLOEXEC)?, size_bytes)?,
            }
        }
        if let Some(perm) = change.perm {
            rustix::fs::chmod(node.path(), Mode::from_raw_mode(perm))?;
        }
        if change.kill_suidgid {
            self.kill_suidgid(&node)?;
        }
        if change.atime.is_some() || change.mtime.is_some() {
            let times = Timestamps { last_access: time_spec(change.atime), last_modification: time_spec(change.mtime) };
            rustix::fs::utimensat(&node.fd, "", &times, AtFlags::EMPTY_PATH)?;
        }
        wrong.answer(self.attributes(node.attr()?))
    }

    fn readlink(&self, _: &Caller, id: u64) -> FsResult<Vec<u8>> {
        self.metadata(Op::Readlink)?;
        Ok(rustix::fs::readlinkat(&self.nodes.get(id)?.fd, "", Vec::new())?.into_bytes())
    }

    fn symlink(&self, caller: &Caller, parent: u64, name: &[u8], target: &[u8]) -> FsResult<Entry> {
        let wrong = self.metadata(Op::Create)?;
        let parent = self.nodes.get(parent)?;
        rustix::fs::symlinkat(target, &parent.fd, name)?;
        wrong.answer(self.made(caller, &parent, name)?)
    }

    fn mknod(&self, caller: &Caller, parent: u64, name: &[u8], mode: u32, device: u64) -> FsResult<Entry> {
        let wrong = self.metadata(Op::Create)?;
        let parent = self.nodes.get(parent)?;
        let (kind, perm) = (FileType::from_raw_mode(mode), Mode::from_raw_mode(mode & 0o7777));
        rustix::fs::mknodat(&parent.fd, name, kind, perm, device)?;
        wrong.answer(self.made(caller, &parent, name)?)
    }

    fn mkdir(&self, caller: &Caller, parent: u64, name: &[u8], perm: u32) -> FsResult<Entry> {
        let wrong = self.metadata(Op::Mkdir)?;
        let parent = self.nodes.get(parent)?;
        rustix::fs::mkdirat(&parent.fd, name, Mode::from_raw_mode(perm))?;
        wrong.answer(self.made(caller, &parent, name)?)
    }

    fn unlink(&self, _: &Caller, parent: u64, name: &[u8]) -> FsResult<()> {
        let wrong = self.metadata(Op::Unlink)?;
        wrong.answer(rustix::fs::unlinkat(&self.nodes.get(parent)?.fd, name, AtFlags::empty())?)
    }

    fn rmdir(&self, _: &Caller, parent: u64, name: &[u8]) -> FsResult<()> {
        let wrong = self.metadata(Op::Unlink)?;
        wrong.answer(rustix::fs::unlinkat(&self.nodes.get(parent)?.fd, name, AtFlags::REMOVEDIR)?)
    }

    fn rename(
        &self,
        _: &Caller,
        parent: u64,
        name: &[u8],
        new_parent: u64,
        new_name: &[u8],
        flags: RenameFlags,
    ) -> FsResult<()> {
        let wrong = self.metadata(Op::Rename)?;
        let (from, to) = (self.nodes.get(parent)?, self.nodes.get(new_parent)?);
        wrong.answer(rustix::fs::renameat_with(&from.fd, name, &to.fd, new_name, flags)?)
    }

    fn link(&self, _: &Caller, id: u64, new_parent: u64, new_name: &[u8]) -> FsResult<Entry> {
        let wrong = self.metadata(Op::Link)?;
        let (node, parent) = (self.nodes.get(id)?, self.nodes.get(new_parent)?);
        rustix::fs::linkat(CWD, node.path(), &parent.fd, new_name, AtFlags::SYMLINK_FOLLOW)?;
        wrong.answer(self.find(&parent, new_name)?.1)
    }

    fn open(&self, _: &Caller, id: u64, flags: OFlags, kill_suidgid: bool) -> FsResult<Opened> {
        self.metadata(Op::Open)?;
        let node = self.nodes.get(id)?;
        let file = self.reopen(&node, own_flags(flags))?;
        if kill_suidgid && flags.contains(OFlags::TRUNC) {
            self.kill_suidgid(&node)?;
        }
        Ok(self.opened(node, file))
    }

    fn create(
        &self,
        caller: &Caller,
        parent: u64,
        name: &[u8],
        perm: u32,
        flags: OFlags,
        kill_suidgid: bool,
    ) -> FsResult<(Entry, Opened)> {
        self.metadata(Op::Create)?;
        let parent = self.nodes.get(parent)?;
        let ours = own_flags(flags) | OFlags::NOFOLLOW;
        let fresh = ours | OFlags::CREATE | OFlags::EXCL;
        match rustix::fs::openat(&parent.fd, name, fresh, Mode::from_raw_mode(perm)) {
            Ok(file) => {
                self.give(caller, &parent, &file, b"", AtFlags::EMPTY_PATH)?;
                let (node, entry) = self.entry(handle_to_path(&file)?)?;
                Ok((entry, self.opened(node, file)))
            }
            Err(Errno::EXIST) if !flags.contains(OFlags::EXCL) => {
                let (node, mut entry) = self.find(&parent, name)?;
                let opened = self.open(caller, node.id, flags, kill_suidgid).inspect_err(|_| {
                    self.nodes.forget(node.id, 1);
                })?;
                entry.attr = node.attr()?;
                Ok((entry, opened))
            }
            Err(errno) => Err(errno.into()),
        }
    }

    fn tmpfile(&self, caller: &Caller, parent: u64, perm: u32, flags: OFlags) -> FsResult<(Entry, Opened)> {
        self.metadata(Op::Create)?;
        let parent = self.nodes.get(parent)?;
        let unlinkable = flags & OFlags::EXCL;
        let flags = own_flags(flags) | unlinkable | OFlags::TMPFILE;
        let file = rustix::fs::open(parent.path(), flags, Mode::from_raw_mode(perm))?;
        self.give(caller, &parent, &file, b"", AtFlags::EMPTY_PATH)?;
        let (node, entry) = self.entry(handle_to_path(&file)?)?;
        Ok((entry, self.opened(node, file)))
    }

    fn read(&self, _: &Caller, _: u64, fh: u64, offset: u64, buffer: &mut [u8]) -> FsResult<usize> {
        self.traffic.reads.fetch_add(1, Ordering::Relaxed);
        self.faults.apply(Op::Read)?;
        let handle = self.handle(fh)?;
        let mut filled = 0;
        while filled < buffer.len() {
            match rustix::io::pread(&handle.file, &mut buffer[filled..], offset + filled as u64)? {
                0 => break,
                bytes => filled += bytes,
            }
        }
        Ok(filled)
    }

    fn write(&self, _: &Caller, _: u64, fh: u64, offset: u64, bytes: &[u8], flags: WriteFlags) -> FsResult<usize> {
        self.traffic.writes.fetch_add(1, Ordering::Relaxed);
        let wrong = self.faults.apply(Op::Write)?;
        let handle = self.handle(fh)?;
        if flags.kill_suidgid {
            self.kill_suidgid(&handle.node)?;
        }
        let written = match wrong {
            Wrong::Corrupt if !bytes.is_empty() => {
                let mut other = bytes.to_vec();
                let middle = other.len() / 2;
                other[middle] ^= 0x10;
                rustix::io::pwrite(&handle.file, &other, offset)?
            }
            Wrong::Short => rustix::io::pwrite(&handle.file, &bytes[..bytes.len().div_ceil(2)], offset)?,
            _ => rustix::io::pwrite(&handle.file, bytes, offset)?,
        };
        wrong.answer(written)
    }

    fn release(&self, _: u64, fh: u64, _: ReleaseFlags) {
        let Some(handle) = self.drop_handle(fh) else {
            return;
        };
        let mut opens = handle.node.opens();
        opens.count = opens.count.saturating_sub(1);
        if opens.count == 0
            && let (Some(id), Some(notifier)) = (opens.backing.take(), self.notifier.get())
            && let Err(error) = notifier.backing_close(id)
        {
            tracing::warn!(%error, "the kernel did not release a backing file");
        }
    }

    /// Requested only with [`MirrorOptions::flush_on_close`].
    ///
    /// [`MirrorOptions::flush_on_close`]: super::MirrorOptions::flush_on_close
    fn flush(&self, _: &Caller, _: u64, fh: u64, _: u64) -> FsResult<()> {
        self.sync(&*self.handle(fh)?, true, Op::Fsync)
    }

    fn fsync(&self, _: &Caller, _: u64, fh: u64, data_only: bool) -> FsResult<()> {
        self.sync(&*self.handle(fh)?, data_only, Op::Fsync)
    }

    fn fallocate(&self, _: &Caller, _: u64, fh: u64, mode: u32, offset: u64, length: u64) -> FsResult<()> {
        self.faults.apply(Op::Write)?;
        let mode = FallocateFlags::from_bits_retain(mode);
        Ok(rustix::fs::fallocate(&self.handle(fh)?.file, mode, offset, length)?)
    }

    fn lseek(&self, _: &Caller, _: u64, fh: u64, offset: u64, whence: u32) -> FsResult<u64> {
        let place = match i32::try_from(whence) {
            Ok(libc::SEEK_DATA) => SeekFrom::Data(offset),
            Ok(libc::SEEK_HOLE) => SeekFrom::Hole(offset),
            _ => return Err(Errno::INVAL.into()),
        };
        Ok(rustix::fs::seek(&self.handle(fh)?.file, place)?)
    }

    fn copy_file_range(&self, _: &Caller, from: FilePlace, to: FilePlace, length: u64, _: u64) -> FsResult<u64> {
        self.faults.apply(Op::Write)?;
        let (source, target) = (self.handle(from.fh)?, self.handle(to.fh)?);
        let (mut read_at, mut write_at) = (from.offset, to.offset);
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let (read_at, write_at) = (Some(&mut read_at), Some(&mut write_at));
        Ok(rustix::fs::copy_file_range(&source.file, read_at, &target.file, write_at, length)? as u64)
    }

    fn opendir(&self, _: &Caller, id: u64) -> FsResult<OpenedDirectory> {
        self.metadata(Op::Open)?;
        let node = self.nodes.get(id)?;
        let file = self.reopen(&node, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC)?;
        let cache = !self.options.ttl.is_zero();
        Ok(OpenedDirectory { fh: self.keep(node, file), cache, keep_cache: cache })
    }

    fn readdir(&self, _: &Caller, _: u64, fh: u64, offset: u64, sink: &mut DirectorySink<'_>) -> FsResult<()> {
        self.metadata(Op::Readdir)?;
        let handle = self.handle(fh)?;
        // One listing at a time, because they share the descriptor's position. Opens are not counted for directories.
        let _turn = handle.node.opens();
        rustix::fs::seek(&handle.file, SeekFrom::Start(offset))?;
        let mut space = [MaybeUninit::uninit(); LISTING_BYTES];
        let mut listing = RawDir::new(&handle.file, &mut space);
        while let Some(entry) = listing.next() {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if sink.add(entry.ino(), entry.next_entry_cookie(), kind_of(entry.file_type()), name) {
                break;
            }
        }
        Ok(())
    }

    fn releasedir(&self, _: u64, fh: u64) {
        self.drop_handle(fh);
    }

    fn fsyncdir(&self, _: &Caller, _: u64, fh: u64, data_only: bool) -> FsResult<()> {
        self.sync(&*self.handle(fh)?, data_only, Op::Syncdir)
    }

    fn statfs(&self, _: &Caller, id: u64) -> FsResult<SpaceReport> {
        self.metadata(Op::Statfs)?;
        let space = rustix::fs::fstatvfs(&self.nodes.get(id)?.fd)?;
        let narrow = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        Ok(SpaceReport {
            block_bytes: narrow(space.f_bsize),
            fragment_bytes: narrow(space.f_frsize),
            blocks: space.f_blocks,
            blocks_free: space.f_bfree,
            blocks_available: space.f_bavail,
            files: space.f_files,
            files_free: space.f_ffree,
            name_bytes_max: narrow(space.f_namemax),
        })
    }

    fn getxattr(&self, _: &Caller, id: u64, name: &[u8]) -> FsResult<Vec<u8>> {
        self.metadata(Op::Xattr)?;
        let mut value = vec![0; XATTR_BYTES_MAX];
        let bytes = rustix::fs::getxattr(self.nodes.get(id)?.path(), name, &mut value)?;
        value.truncate(bytes);
        Ok(value)
    }

    fn setxattr(&self, _: &Caller, id: u64, name: &[u8], value: &[u8], flags: u32) -> FsResult<()> {
        self.metadata(Op::Xattr)?;
        let flags = XattrFlags::from_bits_retain(flags);
        Ok(rustix::fs::setxattr(self.nodes.get(id)?.path(), name, value, flags)?)
    }

    fn listxattr(&self, _: &Caller, id: u64) -> FsResult<Vec<u8>> {
        self.metadata(Op::Xattr)?;
        let mut names = vec![0; XATTR_BYTES_MAX];
        let bytes = rustix::fs::listxattr(self.nodes.get(id)?.path(), &mut names)?;
        names.truncate(bytes);
        Ok(names)
    }

    fn removexattr(&self, _: &Caller, id: u64, name: &[u8]) -> FsResult<()> {
        self.metadata(Op::Xattr)?;
        Ok(rustix::fs::removexattr(self.nodes.get(id)?.path(), name)?)
    }

    fn syncfs(&self, _: &Caller, id: u64) -> FsResult<()> {
        self.faults.apply(Op::Fsync)?;
        let root = self.reopen(&*self.nodes.get(id)?, OFlags::RDONLY | OFlags::CLOEXEC)?;
        Ok(rustix::fs::syncfs(root)?)
    }
}
