//! One request in, one answer out: calls the file system's method for the decoded request.

use rustix::io::Errno;
use surgetank_types::error::Fault;

use super::filesystem::Filesystem;
use super::reply::{DirectoryPlusSink, DirectorySink, Reply};
use super::request::{Operation, Request};

/// Largest extended attribute that Linux allows; larger answers cannot be requested.
const XATTR_BYTES_MAX: usize = 65536;

/// Runs the operation; on success the answer's body is in `reply`. `bulk_bytes_max` limits READ and READDIR.
pub fn answer<F: Filesystem + ?Sized>(
    fs: &F,
    request: &Request<'_>,
    reply: &mut Reply,
    bulk_bytes_max: usize,
) -> Result<(), Fault> {
    let id = request.header.node;
    let caller = &request.header.caller(0);
    fs.recall(id);
    let bounded = |size: u32| (size as usize).min(bulk_bytes_max);
    match request.operation {
        Operation::Lookup { name } => reply.looked(&fs.lookup(caller, id, name)?),
        Operation::Forget { count } => fs.forget(id, count),
        Operation::BatchForget { forgets } => forgets.iter().for_each(|(id, count)| fs.forget(id, count)),
        Operation::Getattr { fh } => reply.attributes(&fs.getattr(caller, id, fh)?),
        Operation::Setattr { change } => reply.attributes(&fs.setattr(caller, id, &change)?),
        Operation::Readlink => reply.bytes(&fs.readlink(caller, id)?),
        Operation::Symlink { name, target } => reply.entry(&fs.symlink(caller, id, name, target)?),
        Operation::Mknod { name, mode, device, umask } => {
            reply.entry(&fs.mknod(&request.header.caller(umask), id, name, mode, device)?);
        }
        Operation::Mkdir { name, perm, umask } => {
            reply.entry(&fs.mkdir(&request.header.caller(umask), id, name, perm)?);
        }
        Operation::Unlink { name } => fs.unlink(caller, id, name)?,
        Operation::Rmdir { name } => fs.rmdir(caller, id, name)?,
        Operation::Rename { name, new_parent, new_name, flags } => {
            fs.recall(new_parent);
            fs.rename(caller, id, name, new_parent, new_name, flags)?;
        }
        Operation::Link { source, new_name } => {
            fs.recall(source);
            reply.entry(&fs.link(caller, source, id, new_name)?);
        }
        Operation::Open { flags, kill_suidgid } => reply.opened(&fs.open(caller, id, flags, kill_suidgid)?),
        Operation::Create { name, perm, umask, flags, kill_suidgid } => {
            let caller = &request.header.caller(umask);
            let (entry, opened) = fs.create(caller, id, name, perm, flags, kill_suidgid)?;
            reply.entry(&entry);
            reply.opened(&opened);
        }
        Operation::Tmpfile { perm, umask, flags } => {
            let (entry, opened) = fs.tmpfile(&request.header.caller(umask), id, perm, flags)?;
            reply.entry(&entry);
            reply.opened(&opened);
        }
        Operation::Read { fh, offset, size } => {
            let buffer = reply.bulk(bounded(size));
            let used = fs.read(caller, id, fh, offset, buffer)?.min(buffer.len());
            reply.use_bulk(used);
        }
        Operation::Write { fh, offset, bytes, flags } => {
            let written = fs.write(caller, id, fh, offset, bytes, flags)?;
            count(reply, written as u64);
        }
        Operation::Flush { fh, lock_owner } => fs.flush(caller, id, fh, lock_owner)?,
        Operation::Release { fh, flags } => fs.release(id, fh, flags),
        Operation::Fsync { fh, data_only } => fs.fsync(caller, id, fh, data_only)?,
        Operation::Fallocate { fh, mode, offset, length } => fs.fallocate(caller, id, fh, mode, offset, length)?,
        Operation::Lseek { fh, offset, whence } => reply.u64(fs.lseek(caller, id, fh, offset, whence)?),
        Operation::CopyFileRange { from, to, length, flags, wide } => {
            // The older answer has 32 bits for the count: never copy more than it can express.
            let length = if wide { length } else { length.min(u64::from(u32::MAX) & !0xfff) };
            let copied = fs.copy_file_range(caller, from, to, length, flags)?;
            if wide { reply.u64(copied) } else { count(reply, copied) }
        }
        Operation::Opendir => reply.opened_directory(&fs.opendir(caller, id)?),
        Operation::Readdir { fh, offset, size } => {
            let mut sink = DirectorySink::new(reply.bulk(bounded(size)));
            fs.readdir(caller, id, fh, offset, &mut sink)?;
            let used = sink.used();
            reply.use_bulk(used);
        }
        Operation::Readdirplus { fh, offset, size } => {
            let mut sink = DirectoryPlusSink::new(reply.bulk(bounded(size)));
            fs.readdirplus(caller, id, fh, offset, &mut sink)?;
            let used = sink.used();
            reply.use_bulk(used);
        }
        Operation::Releasedir { fh } => fs.releasedir(id, fh),
        Operation::Fsyncdir { fh, data_only } => fs.fsyncdir(caller, id, fh, data_only)?,
        Operation::Statfs => reply.space(&fs.statfs(caller, id)?),
        Operation::Getxattr { name, size } => sized(reply, &fs.getxattr(caller, id, name)?, size)?,
        Operation::Setxattr { name, value, flags } => fs.setxattr(caller, id, name, value, flags)?,
        Operation::Listxattr { size } => sized(reply, &fs.listxattr(caller, id)?, size)?,
        Operation::Removexattr { name } => fs.removexattr(caller, id, name)?,
        Operation::Getlk { asked } => reply.lock(&fs.getlk(caller, id, &asked)?),
        Operation::Setlk { asked, wait } => fs.setlk(caller, id, &asked, wait)?,
        Operation::Access { mask } => fs.access(caller, id, mask)?,
        Operation::Syncfs => fs.syncfs(caller, id)?,
        Operation::Ioctl => return Err(Errno::NOTTY.into()),
        Operation::Destroy => {}
        // The handshake is complete, and the pool handles interrupts.
        Operation::Init { .. } | Operation::Interrupt { .. } => return Err(Errno::INVAL.into()),
        Operation::Unknown => return Err(Errno::NOSYS.into()),
    }
    Ok(())
}

/// A byte count in the form of WRITE's answer.
fn count(reply: &mut Reply, count: u64) {
    reply.u32(u32::try_from(count).unwrap_or(u32::MAX));
    reply.u32(0);
}

/// Extended attributes: the kernel asks for the size first (`size` 0), then for the value.
fn sized(reply: &mut Reply, value: &[u8], size: u32) -> Result<(), Errno> {
    if value.len() > XATTR_BYTES_MAX {
        return Err(Errno::TOOBIG);
    }
    if size == 0 {
        count(reply, value.len() as u64);
    } else if value.len() > size as usize {
        return Err(Errno::RANGE);
    } else {
        reply.bytes(value);
    }
    Ok(())
}
