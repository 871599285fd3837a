//! All of a file but its bytes: reading it, and copying it in an order that keeps it.
//!
//! The order: extended attributes (they need write permission), owner (the kernel clears setuid and setgid with it), mode,
//! times last. The destination directory has the same effect as on any file created there, and staging does not undo it: its
//! setgid bit decides the group of files whose group no program changed, and its default ACL limits the rights of group and
//! other users.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::buffer::spare_capacity;
use rustix::fs::{
    AtFlags, CWD, Gid, Mode, Stat, Timespec, Timestamps, Uid, XattrFlags, chmodat, chownat, fstat, getxattr,
    getxattr_query, listxattr, removexattr, setxattr, statvfs, utimensat,
};
use rustix::io::Errno;

use super::beneath::handle_path;
use super::identity::Identity;
use crate::{Cred, Meta};
use surgetank_types::model::{Attr, Kind, StoreIdentity, Timestamp};

pub type Xattrs = BTreeMap<Box<[u8]>, Box<[u8]>>;

const USER_PREFIX: &[u8] = b"user.";
const ACCESS_ACL: &[u8] = b"system.posix_acl_access";
/// The kernel's limit for one value, and for a list of names.
const XATTR_BYTES_MAX: usize = 64 << 10;

pub fn attr_of(stat: &Stat) -> Attr {
    Attr {
        kind: Kind::from_mode(stat.st_mode),
        perm: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        ino: stat.st_ino,
        links: u32::try_from(stat.st_nlink).unwrap_or(u32::MAX),
        size_bytes: stat.st_size as u64,
        blocks: stat.st_blocks as u64,
        device: stat.st_rdev,
        atime: Timestamp::from_parts(stat.st_atime, stat.st_atime_nsec as u32),
        mtime: Timestamp::from_parts(stat.st_mtime, stat.st_mtime_nsec as u32),
        ctime: Timestamp::from_parts(stat.st_ctime, stat.st_ctime_nsec as u32),
    }
}

pub fn identity_of(stat: &Stat) -> StoreIdentity {
    let attr = attr_of(stat);
    StoreIdentity {
        ino: attr.ino,
        size_bytes: attr.size_bytes,
        mtime_nanos: attr.mtime.nanos,
        ctime_nanos: attr.ctime.nanos,
    }
    .of_kind(attr.kind)
}

/// An open inode that gets the attributes of `meta`. `inode` may be an `O_PATH` handle; for a link it must be one.
pub struct Subject<'a> {
    pub inode: BorrowedFd<'a>,
    pub identity: &'a Identity,
    pub who: Cred,
    /// Whether the agent does with its own ids what `who` may not do: only for what is certainly the agent's, such as a fresh
    /// temporary.
    pub insist: bool,
}

impl Subject<'_> {
    /// Runs as `who`, and again as the agent if that is allowed and helps.
    fn act<T>(&self, operation: impl Fn() -> io::Result<T>) -> io::Result<T> {
        match self.identity.act(self.who, &operation) {
            Err(error) if self.insist && self.identity.differs(self.who) && is_denied(&error) => operation(),
            result => result,
        }
    }

    /// `user.*` attributes need permission by the mode, even for the owner: widens the mode for the length of the operation.
    fn act_on_xattrs<T>(&self, operation: impl Fn() -> io::Result<T>) -> io::Result<T> {
        let denied = match self.act(&operation) {
            Err(error) if is_denied(&error) => error,
            result => return result,
        };
        let perm = fstat(self.inode)?.st_mode & 0o7777;
        if perm & 0o600 == 0o600 || self.set_perm(perm | 0o600).is_err() {
            return Err(denied);
        }
        let result = self.act(operation);
        self.set_perm(perm)?;
        result
    }

    /// Gives the attributes to a file that was just created in `dir`; the `keep_perm` bits stay set beyond those of `meta`.
    pub fn dress(&self, meta: &Meta, dir: BorrowedFd<'_>, keep_perm: u32) -> io::Result<()> {
        let path = handle_path(self.inode)?;
        if let Some(wanted) = meta.xattrs.as_ref().filter(|wanted| !wanted.is_empty()) {
            self.act_on_xattrs(|| write_xattrs(&path, wanted))?;
        }
        let made = fstat(self.inode)?;
        let mut gid = meta.gid;
        if made.st_gid != gid && gid == self.who.gid {
            let dir = fstat(dir)?;
            if dir.st_mode & libc::S_ISGID != 0 && dir.st_gid == made.st_gid {
                gid = made.st_gid;
            }
        }
        let owner_changed = self.set_owner(&made, meta.uid, gid)?;
        let kind = Kind::from_mode(made.st_mode);
        if kind != Kind::Symlink {
            let mut perm = meta.perm | keep_perm;
            if kind == Kind::Directory {
                // Inherited from the parent.
                perm |= made.st_mode & libc::S_ISGID;
            }
            let now = if owner_changed { fstat(self.inode)? } else { made };
            self.set_perm_below_acl(&path, perm, now.st_mode & 0o7777)?;
        }
        self.set_times(&path, meta)
    }

    /// Whether the file has none of the attributes that [`carry_over`] knows: no access ACL, no `user.*`.
    pub fn is_bare(&self) -> io::Result<bool> {
        let path = handle_path(self.inode)?;
        let names = self.act(|| xattr_names(&path))?;
        Ok(!names.iter().any(|name| **name == *ACCESS_ACL || name.starts_with(USER_PREFIX)))
    }

    /// Changes the attributes to exactly `meta`, touching only what differs.
    pub fn change(&self, meta: &Meta) -> io::Result<()> {
        let path = handle_path(self.inode)?;
        let stat = fstat(self.inode)?;
        let link = Kind::from_mode(stat.st_mode) == Kind::Symlink;
        if let (Some(wanted), false) = (&meta.xattrs, link) {
            self.act_on_xattrs(|| replace_xattrs(&path, wanted))?;
        }
        self.set_owner(&stat, meta.uid, meta.gid)?;
        if !link && fstat(self.inode)?.st_mode & 0o7777 != meta.perm {
            self.set_perm(meta.perm)?;
        }
        let attr = attr_of(&stat);
        if meta.times == Some((attr.atime, attr.mtime)) { Ok(()) } else { self.set_times(&path, meta) }
    }

    pub fn set_perm(&self, perm: u32) -> io::Result<()> {
        let path = handle_path(self.inode)?;
        self.act(|| Ok(chmodat(CWD, &path, Mode::from_raw_mode(perm), AtFlags::empty())?))
    }

    /// Sets the owner. An owner that the store itself gives to what `who` creates (a squashed root) is accepted, as for any
    /// create. A requested owner that cannot be given is an error if the agent is privileged at all. Returns whether owner or
    /// group may have changed.
    fn set_owner(&self, now: &Stat, uid: u32, gid: u32) -> io::Result<bool> {
        let uid = (now.st_uid != uid).then(|| Uid::from_raw(uid));
        let gid = (now.st_gid != gid).then(|| Gid::from_raw(gid));
        if uid.is_none() && gid.is_none() {
            return Ok(false);
        }
        let chown = |uid, gid| self.act(|| Ok(chownat(self.inode, "", uid, gid, AtFlags::EMPTY_PATH)?));
        match chown(uid, gid) {
            Err(error) if is_denied(&error) || error.raw_os_error() == Some(libc::EINVAL) => {
                if self.identity.privileged() && uid.is_some_and(|uid| uid.as_raw() != self.who.uid) {
                    return Err(error);
                }
                if uid.is_some() && gid.is_some() {
                    // Best effort: the group is still wanted.
                    let _ = chown(None, gid);
                }
                Ok(true)
            }
            result => result.map(|()| true),
        }
    }

    /// `chmod` if creation did not set the mode. Under an access ACL, the rights of group and other users are only ever
    /// reduced.
    fn set_perm_below_acl(&self, path: &CStr, perm: u32, now: u32) -> io::Result<()> {
        let below = |perm: u32| match self.act(|| Ok(getxattr_query(path, ACCESS_ACL)?)) {
            Ok(_) => (perm & !0o077) | (perm & now & 0o077),
            Err(_) => perm,
        };
        if now == perm || now == below(perm) { Ok(()) } else { self.set_perm(below(perm)) }
    }

    fn set_times(&self, path: &CStr, meta: &Meta) -> io::Result<()> {
        let Some((atime, mtime)) = meta.times else { return Ok(()) };
        let spec = |time: Timestamp| Timespec { tv_sec: time.secs(), tv_nsec: time.subsec_nanos().into() };
        let times = Timestamps { last_access: spec(atime), last_modification: spec(mtime) };
        self.act(|| Ok(utimensat(CWD, path, &times, AtFlags::empty())?))
    }
}

pub fn is_denied(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES))
}

/// All `user.*` attributes of the inode at a handle path.
pub fn read_xattrs(path: &CStr) -> io::Result<Xattrs> {
    let mut xattrs = Xattrs::new();
    for name in xattr_names(path)?.into_iter().filter(|name| name.starts_with(USER_PREFIX)) {
        match read_xattr(path, &name) {
            Ok(value) => _ = xattrs.insert(name, value),
            // Removed between the two calls.
            Err(error) if error.raw_os_error() == Some(libc::ENODATA) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(xattrs)
}

fn xattr_names(path: &CStr) -> io::Result<Vec<Box<[u8]>>> {
    let mut names = Vec::with_capacity(1 << 10);
    loop {
        match listxattr(path, spare_capacity(&mut names)) {
            Ok(_) => break,
            Err(Errno::RANGE) if names.capacity() < XATTR_BYTES_MAX => names.reserve(XATTR_BYTES_MAX),
            Err(Errno::OPNOTSUPP) => return Ok(Vec::new()),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(names.split(|byte| *byte == 0).filter(|name| !name.is_empty()).map(Into::into).collect())
}

fn read_xattr(path: &CStr, name: &[u8]) -> io::Result<Box<[u8]>> {
    let mut value = Vec::with_capacity(XATTR_BYTES_MAX);
    getxattr(path, name, spare_capacity(&mut value))?;
    Ok(value.into())
}

fn write_xattrs(path: &CStr, wanted: &Xattrs) -> io::Result<()> {
    for (name, value) in wanted.iter().filter(|(name, _)| name.starts_with(USER_PREFIX)) {
        match setxattr(path, &**name, value, XattrFlags::empty()) {
            Err(Errno::NOSPC) => return Err(no_room_for(path, wanted)),
            done => done?,
        }
    }
    Ok(())
}

/// ext4 and btrfs also report "no space" for attributes that can never fit (ext4: about 4 KiB for all of a file's).
fn no_room_for(path: &CStr, wanted: &Xattrs) -> io::Error {
    if statvfs(path).is_ok_and(|space| space.f_bavail == 0) {
        return Errno::NOSPC.into();
    }
    let bytes: usize = wanted.iter().map(|(name, value)| name.len() + value.len()).sum();
    io::Error::new(io::ErrorKind::ArgumentListTooLong, format!("{bytes} bytes of extended attributes"))
}

fn replace_xattrs(path: &CStr, wanted: &Xattrs) -> io::Result<()> {
    let present = read_xattrs(path)?;
    for name in present.keys().filter(|name| !wanted.contains_key(*name)) {
        removexattr(path, &**name)?;
    }
    let missing = wanted.iter().filter(|(name, value)| present.get(*name) != Some(*value));
    write_xattrs(path, &missing.map(|(name, value)| (name.clone(), value.clone())).collect())
}

/// Copies what a rename over `old` would lose and the new file is to have: the access ACL, and the `user.*` attributes if
/// `meta` leaves them unchanged. Returns whether anything was copied.
pub fn carry_over(old: &Subject<'_>, new: &Subject<'_>, meta: &Meta) -> io::Result<bool> {
    let (old_path, new_path) = (handle_path(old.inode)?, handle_path(new.inode)?);
    let wanted = |name: &[u8]| name == ACCESS_ACL || (meta.xattrs.is_none() && name.starts_with(USER_PREFIX));
    let mut names = old.act(|| xattr_names(&old_path))?;
    names.retain(|name| wanted(name));
    for name in &names {
        let value = old.act_on_xattrs(|| read_xattr(&old_path, name))?;
        new.act_on_xattrs(|| Ok(setxattr(&new_path, &**name, &value, XattrFlags::empty())?))?;
    }
    if names.iter().any(|name| **name == *ACCESS_ACL) {
        new.set_perm(meta.perm)?;
    }
    if !names.is_empty() {
        new.set_times(&new_path, meta)?;
    }
    Ok(!names.is_empty())
}

/// The handle of a subject may be any descriptor.
pub fn subject<'a>(inode: &'a impl AsFd, identity: &'a Identity, who: Cred, insist: bool) -> Subject<'a> {
    Subject { inode: inode.as_fd(), identity, who, insist }
}
