//! The decoder of the kernel's requests. Every field is length-checked.

use rustix::fs::{OFlags, RenameFlags};
use rustix::io::Errno;
use surgetank_types::model::{FileLock, LockKind, LockRequest, Timestamp};

use super::super::abi::{self, Fields, fattr, opcode};
use super::{FilePlace, Forgets, Header, Offer, Operation, ReleaseFlags, Request, SetAttr, TimeChange, WriteFlags};

/// Decodes one request. EINVAL: a field is missing, the length is wrong, or a name is invalid.
pub fn decode(bytes: &[u8]) -> Result<Request<'_>, Errno> {
    let header = Header::decode(bytes)?;
    if header.bytes as usize != bytes.len() {
        return Err(Errno::INVAL);
    }
    let payload = bytes.len().checked_sub(abi::IN_HEADER_BYTES + header.extension_bytes).ok_or(Errno::INVAL)?;
    let mut fields = Fields::new(bytes);
    fields.take(abi::IN_HEADER_BYTES)?;
    let operation = decode_operation(&header, Fields::new(fields.take(payload)?))?;
    Ok(Request { header, operation })
}

fn decode_operation<'a>(header: &Header, mut fields: Fields<'a>) -> Result<Operation<'a>, Errno> {
    let f = &mut fields;
    Ok(match header.opcode {
        opcode::LOOKUP => Operation::Lookup { name: f.name()? },
        opcode::FORGET => Operation::Forget { count: f.u64()? },
        opcode::BATCH_FORGET => batch_forget(f)?,
        opcode::GETATTR => {
            let flags = f.u32()?;
            f.u32()?;
            let fh = f.u64()?;
            Operation::Getattr { fh: (flags & abi::GETATTR_FH != 0).then_some(fh) }
        }
        opcode::SETATTR => Operation::Setattr { change: setattr(f)? },
        opcode::READLINK => Operation::Readlink,
        opcode::SYMLINK => Operation::Symlink { name: f.name()?, target: f.text()? },
        opcode::MKNOD => {
            let (mode, device, umask) = (f.u32()?, f.u32()?, f.u32()?);
            f.u32()?;
            Operation::Mknod { name: f.name()?, mode, device: device_from_wire(device), umask }
        }
        opcode::MKDIR => {
            let (mode, umask) = (f.u32()?, f.u32()?);
            Operation::Mkdir { name: f.name()?, perm: mode & 0o7777, umask }
        }
        opcode::UNLINK => Operation::Unlink { name: f.name()? },
        opcode::RMDIR => Operation::Rmdir { name: f.name()? },
        opcode::RENAME => {
            let new_parent = f.u64()?;
            Operation::Rename { new_parent, name: f.name()?, new_name: f.name()?, flags: RenameFlags::empty() }
        }
        opcode::RENAME2 => {
            let (new_parent, flags) = (f.u64()?, f.u32()?);
            f.u32()?;
            let flags = RenameFlags::from_bits_retain(flags);
            Operation::Rename { new_parent, name: f.name()?, new_name: f.name()?, flags }
        }
        opcode::LINK => Operation::Link { source: f.u64()?, new_name: f.name()? },
        opcode::OPEN => {
            let (flags, extra) = (open_flags(f)?, f.u32()?);
            Operation::Open { flags, kill_suidgid: extra & abi::OPEN_KILL_SUIDGID != 0 }
        }
        opcode::CREATE => {
            let (flags, mode, umask, extra) = (open_flags(f)?, f.u32()?, f.u32()?, f.u32()?);
            let kill_suidgid = extra & abi::OPEN_KILL_SUIDGID != 0;
            Operation::Create { name: f.name()?, perm: mode & 0o7777, umask, flags, kill_suidgid }
        }
        opcode::TMPFILE => {
            let (flags, mode, umask) = (open_flags(f)?, f.u32()?, f.u32()?);
            Operation::Tmpfile { perm: mode & 0o7777, umask, flags }
        }
        opcode::READ => {
            let (fh, offset, size) = list_place(f)?;
            Operation::Read { fh, offset, size }
        }
        opcode::WRITE => write(f)?,
        opcode::FLUSH => {
            let fh = f.u64()?;
            f.u64()?;
            Operation::Flush { fh, lock_owner: f.u64()? }
        }
        opcode::RELEASE => {
            let (fh, _open_flags, flags) = (f.u64()?, f.u32()?, f.u32()?);
            let flush = flags & abi::RELEASE_FLUSH != 0;
            let flock_unlock = flags & abi::RELEASE_FLOCK_UNLOCK != 0;
            Operation::Release { fh, flags: ReleaseFlags { flush, flock_unlock } }
        }
        opcode::FSYNC => Operation::Fsync { fh: f.u64()?, data_only: f.u32()? & abi::FSYNC_DATA_ONLY != 0 },
        opcode::FALLOCATE => {
            let (fh, offset, length, mode) = (f.u64()?, f.u64()?, f.u64()?, f.u32()?);
            Operation::Fallocate { fh, mode, offset, length }
        }
        opcode::LSEEK => Operation::Lseek { fh: f.u64()?, offset: f.u64()?, whence: f.u32()? },
        opcode::COPY_FILE_RANGE => copy_file_range(header, f, false)?,
        opcode::COPY_FILE_RANGE_64 => copy_file_range(header, f, true)?,
        opcode::OPENDIR => Operation::Opendir,
        opcode::READDIR => {
            let (fh, offset, size) = list_place(f)?;
            Operation::Readdir { fh, offset, size }
        }
        opcode::READDIRPLUS => {
            let (fh, offset, size) = list_place(f)?;
            Operation::Readdirplus { fh, offset, size }
        }
        opcode::RELEASEDIR => Operation::Releasedir { fh: f.u64()? },
        opcode::FSYNCDIR => Operation::Fsyncdir { fh: f.u64()?, data_only: f.u32()? & abi::FSYNC_DATA_ONLY != 0 },
        opcode::STATFS => Operation::Statfs,
        opcode::GETXATTR => {
            let size = f.u32()?;
            f.u32()?;
            Operation::Getxattr { name: f.text()?, size }
        }
        opcode::SETXATTR => {
            let (size, flags) = (f.u32()?, f.u32()?);
            Operation::Setxattr { name: f.text()?, value: f.take(size as usize)?, flags }
        }
        opcode::LISTXATTR => Operation::Listxattr { size: f.u32()? },
        opcode::REMOVEXATTR => Operation::Removexattr { name: f.text()? },
        opcode::GETLK => Operation::Getlk { asked: lock(f)? },
        opcode::SETLK => Operation::Setlk { asked: lock(f)?, wait: false },
        opcode::SETLKW => Operation::Setlk { asked: lock(f)?, wait: true },
        opcode::ACCESS => Operation::Access { mask: f.u32()? },
        opcode::SYNCFS => Operation::Syncfs,
        opcode::IOCTL => Operation::Ioctl,
        opcode::INIT => Operation::Init { offer: offer(f)? },
        opcode::INTERRUPT => Operation::Interrupt { unique: f.u64()? },
        opcode::DESTROY => Operation::Destroy,
        _ => Operation::Unknown,
    })
}

fn open_flags(f: &mut Fields<'_>) -> Result<OFlags, Errno> {
    f.u32().map(OFlags::from_bits_retain)
}

/// The common front of READ, READDIR and READDIRPLUS.
fn list_place(f: &mut Fields<'_>) -> Result<(u64, u64, u32), Errno> {
    Ok((f.u64()?, f.u64()?, f.u32()?))
}

fn write<'a>(f: &mut Fields<'a>) -> Result<Operation<'a>, Errno> {
    let (fh, offset, size, flags) = (f.u64()?, f.u64()?, f.u32()?, f.u32()?);
    let _lock_owner = f.u64()?;
    let open = f.u32()?;
    f.u32()?;
    let flags =
        WriteFlags { cached: flags & abi::WRITE_CACHE != 0, kill_suidgid: flags & abi::WRITE_KILL_SUIDGID != 0, open };
    Ok(Operation::Write { fh, offset, bytes: f.take(size as usize)?, flags })
}

fn batch_forget<'a>(f: &mut Fields<'a>) -> Result<Operation<'a>, Errno> {
    let count = f.u32()? as usize;
    f.u32()?;
    let bytes = f.take(count.checked_mul(16).ok_or(Errno::INVAL)?)?;
    Ok(Operation::BatchForget { forgets: Forgets { pairs: bytes.as_chunks().0 } })
}

fn copy_file_range<'a>(header: &Header, f: &mut Fields<'a>, wide: bool) -> Result<Operation<'a>, Errno> {
    let from = FilePlace { id: header.node, fh: f.u64()?, offset: f.u64()? };
    let to = FilePlace { id: f.u64()?, fh: f.u64()?, offset: f.u64()? };
    Ok(Operation::CopyFileRange { from, to, length: f.u64()?, flags: f.u64()?, wide })
}

fn lock(f: &mut Fields<'_>) -> Result<LockRequest, Errno> {
    let (handle, owner, first, last) = (f.u64()?, f.u64()?, f.u64()?, f.u64()?);
    let (kind, pid, flags) = (f.u32()?, f.u32()?, f.u32()?);
    let kind = match i32::try_from(kind) {
        Ok(libc::F_RDLCK) => LockKind::Shared,
        Ok(libc::F_WRLCK) => LockKind::Exclusive,
        Ok(libc::F_UNLCK) => LockKind::None,
        _ => return Err(Errno::INVAL),
    };
    // Offsets of files are signed.
    if first > last || last > i64::MAX as u64 {
        return Err(Errno::INVAL);
    }
    let flock = flags & abi::LK_FLOCK != 0;
    Ok(LockRequest { handle, owner, flock, lock: FileLock { kind, first, last, pid } })
}

fn offer(f: &mut Fields<'_>) -> Result<Offer, Errno> {
    let (major, minor, readahead_bytes_max, low) = (f.u32()?, f.u32()?, f.u32()?, f.u32()?);
    let mut flags = u64::from(low);
    if flags & abi::init::INIT_EXT != 0 {
        flags |= u64::from(f.u32()?) << 32;
    }
    Ok(Offer { major, minor, readahead_bytes_max, flags })
}

fn setattr(f: &mut Fields<'_>) -> Result<SetAttr, Errno> {
    let valid = f.u32()?;
    f.u32()?;
    let (fh, size, lock_owner) = (f.u64()?, f.u64()?, f.u64()?);
    let secs = [f.u64()?, f.u64()?, f.u64()?];
    let nanos = [f.u32()?, f.u32()?, f.u32()?];
    let mode = f.u32()?;
    f.u32()?;
    let (uid, gid) = (f.u32()?, f.u32()?);
    f.u32()?;

    let has = |bit: u32| valid & bit != 0;
    // The kernel sends signed seconds in an unsigned field.
    let stamp = |which: usize| Timestamp::from_parts(secs[which] as i64, nanos[which]);
    let time = |set: u32, now: u32, which: usize| {
        has(set).then(|| if has(now) { TimeChange::Now } else { TimeChange::At(stamp(which)) })
    };
    Ok(SetAttr {
        perm: has(fattr::MODE).then_some(mode & 0o7777),
        uid: has(fattr::UID).then_some(uid),
        gid: has(fattr::GID).then_some(gid),
        size_bytes: has(fattr::SIZE).then_some(size),
        atime: time(fattr::ATIME, fattr::ATIME_NOW, 0),
        mtime: time(fattr::MTIME, fattr::MTIME_NOW, 1),
        ctime: has(fattr::CTIME).then(|| stamp(2)),
        fh: has(fattr::FH).then_some(fh),
        lock_owner: has(fattr::LOCKOWNER).then_some(lock_owner),
        kill_suidgid: has(fattr::KILL_SUIDGID),
    })
}

/// 12 bits of major number amid 20 bits of minor number, to `dev_t`.
fn device_from_wire(wire: u32) -> u64 {
    rustix::fs::makedev((wire >> 8) & 0xfff, (wire & 0xff) | ((wire >> 12) & 0xf_ff00))
}
