//! The store that is a directory of a POSIX file system: local disk, NFS, Lustre, any mounted one.
//!
//! `beneath` finds names without ever leaving the root, `identity` acts as the caller, `content` moves bytes, `attributes`
//! copies the rest, `durability` syncs, `publishing` makes visible. This file joins them to a [`Store`].
//!
//! What it guarantees beyond the trait:
//! * A temporary is a path with a component that begins with `STORE_TEMPORARY_PREFIX`, or whose name begins with `PART_PREFIX`.
//!   Only such paths are replaced by staging or removed by `discard` (with everything inside). A stage that fails removes what
//!   it made.
//! * A staged directory keeps `u+rwx` until `publish` or `set_meta` gives it its own mode; staged files have theirs at once.
//! * `Meta::xattrs` of `None` on publication over an existing file keeps that file's `user.*` attributes.
//! * Extended attributes that the store cannot keep are an error (EOPNOTSUPP), never dropped silently.
//! * `check` compares a directory only by existence; everything else by inode, size, mtime and (unless it has several names)
//!   ctime.

mod attributes;
mod beneath;
mod content;
mod counters;
mod durability;
mod entries;
mod identity;
mod notices;
mod publishing;
mod restaging;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use rustix::fs::{
    Access, AtFlags, FileType, Mode, OFlags, RenameFlags, StatxFlags, accessat, fadvise, fstat, fstatfs, fstatvfs,
    fsync, linkat, mkdirat, mknodat, openat, readlinkat, renameat, renameat_with, statx, symlinkat, unlinkat,
};
use rustix::io::Errno;

use surgetank_types::sync::atomic::AtomicBool;

use super::checksum::checksum;
use super::{
    BlockSums, Cred, Expect, Features, Gate, Meta, Space, Staged, Store, StoreEntry, StorePath, StoreStat, Turn,
    Verify, at_once,
};
use attributes::{Xattrs, attr_of, identity_of, is_denied, read_xattrs, subject};
use beneath::{Place, Root, open_file_at, without_atime};
use content::{Copier, written_without_error};
use counters::Counters;
pub use counters::Counts;
use durability::{FileSystem, TOGETHER_MIN};
use entries::{entries, names, remove_tree};
use identity::Identity;
use surgetank_types::model::{Kind, STORE_TEMPORARY_PREFIX, StoreIdentity};

/// A store in a directory of a mounted file system.
pub struct PosixStore {
    label: String,
    root: Root,
    identity: Identity,
    copier: Copier,
    file_system: Option<FileSystem>,
    /// Number of files published at the same time. A file system that is not local asks a server about each name, and syncs
    /// each file separately.
    at_once: usize,
    /// The file system has only renames that replace.
    replaces: AtomicBool,
    counters: Counters,
}

/// Requests to a file server that run at the same time.
const AT_ONCE: usize = 16;

impl PosixStore {
    /// `root` is a handle of the directory (`O_PATH` suffices), taken before anything was mounted over it. `label` is its name
    /// in messages. Errors: it is not a directory.
    pub fn new(root: OwnedFd, label: String) -> io::Result<Self> {
        if FileType::from_raw_mode(fstat(&root)?.st_mode) != FileType::Directory {
            return Err(Errno::NOTDIR.into());
        }
        let root = Root::new(root);
        // A root that cannot be read (a squashed agent) can still be used, but not synced as a whole.
        let file_system = root.open_dir(&StorePath::root()).ok().and_then(FileSystem::honouring);
        Ok(Self {
            label,
            root,
            identity: Identity::of_this_agent()?,
            copier: Copier::new(),
            replaces: AtomicBool::new(false),
            at_once: if file_system.is_some() { 1 } else { AT_ONCE },
            file_system,
            counters: Counters::default(),
        })
    }

    /// The driver's counters at this moment.
    pub fn counters(&self) -> Counts {
        self.counters.counts()
    }

    /// Creates by `create`; a leftover under the temporary's name is removed first.
    fn replacing<'a, T>(
        &'a self,
        who: Cred,
        path: &'a StorePath,
        create: impl Fn(&Place<'a>) -> rustix::io::Result<T>,
    ) -> io::Result<(Place<'a>, T)> {
        self.identity.act(who, || {
            let place = self.root.place(path)?;
            let made = match create(&place) {
                Err(Errno::EXIST) if path.is_temporary() || path.is_part() => {
                    remove_tree(&place)?;
                    create(&place)?
                }
                result => result?,
            };
            Ok((place, made))
        })
    }

    /// Runs `fill`, and removes the new name again if that fails.
    fn or_remove<T>(&self, who: Cred, place: &Place<'_>, fill: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        fill().inspect_err(|_| {
            // The first error counts; a leftover is hidden, and replaced next time.
            let _ = self.identity.act(who, || remove_tree(place));
        })
    }

    /// Gives the attributes to a new name that is not a regular file.
    fn stage_other(&self, who: Cred, place: &Place<'_>, meta: &Meta, keep_perm: u32) -> io::Result<Staged> {
        self.or_remove(who, place, || {
            let pinned = beneath::pin_at(place)?;
            subject(&*pinned, &self.identity, who, true).dress(meta, place.dir.as_fd(), keep_perm)?;
            Ok(Staged { identity: identity_of(&pinned.stat()?), checksum: 0 })
        })
    }

    fn settle_one(&self, who: Cred, path: &StorePath, together: bool) -> io::Result<()> {
        let place = self.identity.act(who, || self.root.place(path))?;
        let file = match self.open_ours(who, &place) {
            Err(error) if error.raw_os_error() == Some(libc::EISDIR) => {
                return if together { Ok(()) } else { self.sync_dir(who, path) };
            }
            // Links and fifos are only names: the sync of their directory keeps them.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ELOOP | libc::EINVAL)) => {
                return Ok(());
            }
            result => result?,
        };
        let device = self.file_system.as_ref().map(FileSystem::device);
        if together && device == Some(file.metadata()?.dev()) {
            return written_without_error(&file);
        }
        self.counters.fsyncs.add(1);
        file.sync_all()
    }

    fn sync_dir(&self, who: Cred, path: &StorePath) -> io::Result<()> {
        match (self.identity.act(who, || self.root.open_dir(path)), &self.file_system) {
            (Ok(dir), _) => {
                self.counters.fsyncs.add(1);
                Ok(fsync(dir)?)
            }
            // A directory that its user may enter but not read.
            (Err(error), Some(whole)) if is_denied(&error) => whole.sync(&self.counters),
            (Err(error), _) => Err(error),
        }
    }

    fn whole(&self, count: usize) -> Option<&FileSystem> {
        self.file_system.as_ref().filter(|_| count >= TOGETHER_MIN)
    }

    fn remove(&self, who: Cred, path: &StorePath, flags: AtFlags) -> io::Result<()> {
        self.identity.act(who, || {
            let place = self.root.place(path)?;
            Ok(unlinkat(&place.dir, place.name, flags)?)
        })
    }
}

impl Store for PosixStore {
    fn describe(&self) -> String {
        self.label.clone()
    }

    fn features(&self) -> Features {
        Features { publications_at_once: self.at_once, ..Features::POSIX }
    }

    fn stat(&self, who: Cred, path: &StorePath) -> io::Result<StoreStat> {
        self.counters.stats.add(1);
        let stat = self.identity.act(who, || {
            if path.0.is_empty() { Ok(fstat(self.root.handle())?) } else { self.root.place(path)?.stat() }
        })?;
        Ok(StoreStat { attr: attr_of(&stat), identity: identity_of(&stat) })
    }

    fn list(&self, who: Cred, path: &StorePath, temporaries: bool) -> io::Result<Vec<StoreEntry>> {
        self.identity.act(who, || {
            let dir = self.root.open_dir(path)?;
            let mut entries = entries(&dir)?;
            entries.retain(|entry| temporaries || !entry.name.starts_with(STORE_TEMPORARY_PREFIX));
            Ok(entries)
        })
    }

    fn names(&self, who: Cred, path: &StorePath, at_most: usize) -> io::Result<Option<Vec<Box<[u8]>>>> {
        self.identity.act(who, || names(&self.root.open_dir(path)?, at_most))
    }

    fn read_link(&self, who: Cred, path: &StorePath) -> io::Result<Box<[u8]>> {
        self.identity.act(who, || {
            let place = self.root.place(path)?;
            Ok(readlinkat(&place.dir, place.name, Vec::new())?.into_bytes().into())
        })
    }

    fn xattrs(&self, who: Cred, path: &StorePath) -> io::Result<Xattrs> {
        self.identity.act(who, || read_xattrs(&self.root.pin(path)?.path()?))
    }

    fn space(&self, path: &StorePath) -> io::Result<Space> {
        let numbers = fstatvfs(&*self.root.pin(path)?)?;
        Ok(Space {
            total_bytes: numbers.f_blocks.saturating_mul(numbers.f_frsize),
            free_bytes: numbers.f_bfree.saturating_mul(numbers.f_frsize),
            available_bytes: numbers.f_bavail.saturating_mul(numbers.f_frsize),
            inodes_total: numbers.f_files,
            inodes_free: numbers.f_favail,
            name_bytes_max: u32::try_from(numbers.f_namemax).unwrap_or(u32::MAX),
            block_bytes: u32::try_from(numbers.f_bsize).unwrap_or(u32::MAX),
        })
    }

    fn learn_groups(&self, who: Cred, groups: &[u32]) -> bool {
        self.identity.learn_groups(who, groups)
    }

    fn may_write_dir(&self, who: Cred, path: &StorePath) -> io::Result<()> {
        self.identity
            .act(who, || Ok(accessat(self.root.dir(path)?, ".", Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS)?))
    }

    fn open(&self, who: Cred, path: &StorePath, write: bool) -> io::Result<File> {
        self.identity.act(who, || self.root.open_file(path, if write { OFlags::RDWR } else { OFlags::RDONLY }))
    }

    fn create_temporary(&self, who: Cred, path: &StorePath, perm: u32) -> io::Result<File> {
        self.identity.act(who, || {
            let place = self.root.place(path)?;
            // Its owner must be able to open it again after a restart; `stage_in_place` gives it its own mode.
            Ok(openat(&place.dir, place.name, CREATE | OFlags::RDWR, Mode::from_raw_mode(perm & 0o777 | 0o600))?.into())
        })
    }

    fn stage_file(
        &self,
        who: Cred,
        path: &StorePath,
        _bound: &StorePath,
        source: &File,
        meta: &Meta,
        gate: Gate<'_>,
    ) -> io::Result<Staged> {
        let attributes_follow = meta.xattrs.as_ref().is_some_and(|xattrs| !xattrs.is_empty());
        let mode = Mode::from_raw_mode(meta.perm & 0o777 | if attributes_follow { 0o200 } else { 0 });
        let (place, target) =
            self.replacing(who, path, |place| openat(&place.dir, place.name, CREATE | OFlags::WRONLY, mode))?;
        let target = File::from(target);
        crash_point!("store.temporary_made");
        self.or_remove(who, &place, || {
            let checksum =
                self.copier.copy(source, &target, &|write| self.identity.act(who, write), &self.counters, gate)?;
            crash_point!("store.copied");
            subject(&target, &self.identity, who, true).dress(meta, place.dir.as_fd(), 0)?;
            crash_point!("store.staged");
            Ok(Staged { identity: identity_of(&fstat(&target)?), checksum })
        })
    }

    fn block_sums(&self, who: Cred, path: &StorePath, staged: &Staged) -> io::Result<Option<BlockSums>> {
        if !self.exchanges() {
            return Ok(None);
        }
        crash_point!("store.verify");
        self.block_sums_of(who, path, staged).map(Some)
    }

    fn restage_file(
        &self,
        who: Cred,
        path: &StorePath,
        source: &File,
        meta: &Meta,
        earlier: (&StoreIdentity, &mut BlockSums),
        gate: Gate<'_>,
    ) -> io::Result<(Staged, u64)> {
        crash_point!("store.restage");
        self.restage_at(who, path, source, meta, earlier, gate)
    }

    fn stage_in_place(&self, who: Cred, path: &StorePath, meta: &Meta, gate: Gate<'_>) -> io::Result<Staged> {
        let place = self.identity.act(who, || self.root.place(path))?;
        let file = self.open_ours(who, &place)?;
        let counted = |bytes| {
            self.counters.bytes_read_back.add(bytes);
            gate(bytes)
        };
        let checksum = checksum(&file, &counted)?;
        subject(&file, &self.identity, who, true).dress(meta, place.dir.as_fd(), 0)?;
        Ok(Staged { identity: identity_of(&fstat(&file)?), checksum })
    }

    fn stage_dir(&self, who: Cred, path: &StorePath, meta: &Meta) -> io::Result<Staged> {
        crash_point!("store.stage_dir");
        let mode = Mode::from_raw_mode(meta.perm & 0o777 | 0o700);
        let (place, ()) = self.replacing(who, path, |place| mkdirat(&place.dir, place.name, mode))?;
        self.stage_other(who, &place, meta, 0o700)
    }

    fn stage_symlink(&self, who: Cred, path: &StorePath, target: &[u8], meta: &Meta) -> io::Result<Staged> {
        let (place, ()) = self.replacing(who, path, |place| symlinkat(target, &place.dir, place.name))?;
        self.stage_other(who, &place, &Meta { xattrs: None, ..meta.clone() }, 0)
    }

    fn stage_node(&self, who: Cred, path: &StorePath, kind: Kind, device: u64, meta: &Meta) -> io::Result<Staged> {
        let kind = FileType::from_raw_mode(kind.type_bits());
        let mode = Mode::from_raw_mode(meta.perm & 0o777);
        let (place, ()) = self.replacing(who, path, |place| mknodat(&place.dir, place.name, kind, mode, device))?;
        self.stage_other(who, &place, &Meta { xattrs: None, ..meta.clone() }, 0)
    }

    fn settle(&self, who: Cred, paths: &[StorePath]) -> io::Result<()> {
        crash_point!("store.settle");
        let whole = self.whole(paths.len());
        if let Some(whole) = whole {
            whole.sync(&self.counters)?;
        }
        at_once(paths.len(), self.at_once, &|index| self.settle_one(who, &paths[index], whole.is_some()))
    }

    fn verify(&self, who: Cred, path: &StorePath, staged: &Staged, how: Verify, gate: Gate<'_>) -> io::Result<()> {
        crash_point!("store.verify");
        let place = self.identity.act(who, || self.root.place(path))?;
        let different =
            |why: String| io::Error::new(io::ErrorKind::InvalidData, format!("{path} in {}: {why}", self.label));
        let ours = |ino: u64| match ino == staged.identity.ino {
            true => Ok(()),
            false => Err(different("the copy was replaced by another file".into())),
        };
        let mut file = match self.open_ours(who, &place) {
            // For a link, a fifo or a directory, existence suffices.
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                let present = self.identity.act(who, || place.stat())?;
                ours(present.st_ino)?;
                let file = FileType::from_raw_mode(present.st_mode) == FileType::RegularFile;
                return if file { Err(error) } else { Ok(()) };
            }
            result => result?,
        };
        let present = fstat(&file)?;
        ours(present.st_ino)?;
        let len = attr_of(&present).size_bytes;
        if len != staged.identity.size_bytes {
            return Err(different(format!("{len} bytes instead of {}", staged.identity.size_bytes)));
        }
        if how == Verify::Reread {
            fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
            // Past the page cache with certainty, where the file system can.
            let direct = || without_atime(|flags| open_file_at(&place, flags), OFlags::RDONLY | OFlags::DIRECT);
            if let Ok(direct) = self.identity.act(who, direct) {
                ours(fstat(&direct)?.st_ino)?;
                file = direct;
            }
        }
        let counted = |bytes| {
            self.counters.bytes_read_back.add(bytes);
            gate(bytes)
        };
        let sum = match checksum(&file, &counted) {
            // The file system accepts direct I/O at open and refuses it at read.
            Err(error) if how == Verify::Reread && error.raw_os_error() == Some(libc::EINVAL) => {
                checksum(&self.open_ours(who, &place)?, &counted)?
            }
            result => result?,
        };
        if sum == staged.checksum {
            Ok(())
        } else {
            Err(different(format!("checksum {sum:016x} instead of {:016x}", staged.checksum)))
        }
    }

    fn discard(&self, who: Cred, path: &StorePath) -> io::Result<()> {
        crash_point!("store.discard");
        if !path.is_temporary() && !path.is_part() {
            return Err(Errno::INVAL.into());
        }
        match self.identity.act(who, || remove_tree(&self.root.place(path)?)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            result => result,
        }
    }

    fn check(&self, who: Cred, path: &StorePath, expect: &Expect) -> io::Result<bool> {
        self.counters.stats.add(1);
        let found = match self.identity.act(who, || present_now(&self.root.place(path)?)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            result => Some(result?),
        };
        Ok(match (expect, found) {
            (Expect::Absent | Expect::Unknown, found) => found.is_none(),
            (Expect::Identity(_) | Expect::Linked(_) | Expect::Inode(_), None) => false,
            (Expect::Inode(known), Some((_, identity))) => identity.ino == *known,
            (Expect::Identity(known), Some((kind, identity))) => kind == Kind::Directory || identity == *known,
            (Expect::Linked(known), Some((_, identity))) => {
                StoreIdentity { ctime_nanos: known.ctime_nanos, ..identity } == *known
            }
        })
    }

    fn writes_over(&self, who: Cred, temporary: &StorePath, path: &StorePath) -> io::Result<bool> {
        self.counters.stats.add(1);
        self.identity.act(who, || match self.root.place(path)?.stat() {
            Ok(present) => Ok(publishing::goes_over(&present, &self.root.place(temporary)?.stat()?)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        })
    }

    fn publish(&self, who: Cred, temporary: &StorePath, path: &StorePath, meta: &Meta) -> io::Result<StoreIdentity> {
        self.publish_at(who, temporary, path, meta, false, None)
    }

    fn publish_keeping(
        &self,
        who: Cred,
        temporary: &StorePath,
        path: &StorePath,
        meta: &Meta,
    ) -> io::Result<Option<(StoreIdentity, StoreIdentity)>> {
        crash_point!("store.exchange");
        self.publish_keeping_at(who, temporary, path, meta)
    }

    fn publish_in_turn(
        &self,
        who: Cred,
        temporary: &StorePath,
        path: &StorePath,
        meta: &Meta,
        turn: Turn<'_>,
    ) -> io::Result<StoreIdentity> {
        self.publish_at(who, temporary, path, meta, false, Some(turn))
    }

    fn publish_absent(
        &self,
        who: Cred,
        temporary: &StorePath,
        path: &StorePath,
        turn: Option<Turn<'_>>,
    ) -> io::Result<StoreIdentity> {
        self.publish_absent_at(who, temporary, path, turn)
    }

    fn replace(&self, who: Cred, temporary: &StorePath, path: &StorePath, meta: &Meta) -> io::Result<StoreIdentity> {
        self.publish_at(who, temporary, path, meta, true, None)
    }

    fn rename(&self, who: Cred, from: &StorePath, to: &StorePath) -> io::Result<()> {
        crash_point!("store.rename");
        self.counters.renames.add(1);
        self.identity.act(who, || {
            let (from, to) = (self.root.place(from)?, self.root.place(to)?);
            Ok(renameat(&from.dir, from.name, &to.dir, to.name)?)
        })
    }

    fn exchanges(&self) -> bool {
        // By type: a trial would leave something behind if the agent is killed meanwhile.
        fstatfs(self.root.handle()).is_ok_and(|told| EXCHANGING.contains(&(told.f_type as u32)))
    }

    fn exchange(&self, who: Cred, a: &StorePath, b: &StorePath) -> io::Result<()> {
        crash_point!("store.exchange");
        self.counters.renames.add(1);
        self.identity.act(who, || {
            let (a, b) = (self.root.place(a)?, self.root.place(b)?);
            Ok(renameat_with(&a.dir, a.name, &b.dir, b.name, RenameFlags::EXCHANGE)?)
        })
    }

    fn link(&self, who: Cred, from: &StorePath, to: &StorePath) -> io::Result<()> {
        crash_point!("store.link");
        self.identity.act(who, || {
            let (from, to) = (self.root.place(from)?, self.root.place(to)?);
            Ok(linkat(&from.dir, from.name, &to.dir, to.name, AtFlags::empty())?)
        })
    }

    fn unlink(&self, who: Cred, path: &StorePath) -> io::Result<()> {
        crash_point!("store.unlink");
        self.remove(who, path, AtFlags::empty())
    }

    fn remove_dir(&self, who: Cred, path: &StorePath) -> io::Result<()> {
        crash_point!("store.remove_dir");
        self.remove(who, path, AtFlags::REMOVEDIR)
    }

    fn set_meta(&self, who: Cred, path: &StorePath, kind: Kind, meta: &Meta) -> io::Result<StoreIdentity> {
        crash_point!("store.set_meta");
        let pinned = self.identity.act(who, || self.root.pin(path))?;
        let stat = pinned.stat()?;
        if Kind::from_mode(stat.st_mode) != kind {
            // The intended file was removed; another one has its name.
            return Err(Errno::NOENT.into());
        }
        // With the agent's rights only for what cannot have a second name: a planted link could otherwise give away another
        // user's file.
        let insist = kind == Kind::Directory || stat.st_nlink == 1;
        subject(&*pinned, &self.identity, who, insist).change(meta)?;
        Ok(identity_of(&pinned.stat()?))
    }

    fn sync_dirs(&self, who: Cred, paths: &[StorePath]) -> io::Result<()> {
        crash_point!("store.sync_dirs");
        let paths: BTreeSet<_> = paths.iter().collect();
        match self.whole(paths.len()) {
            Some(whole) => whole.sync(&self.counters),
            None => paths.into_iter().try_for_each(|path| self.sync_dir(who, path)),
        }
    }

    fn leave_notice(&self, name: &[u8]) -> io::Result<()> {
        notices::leave(&self.root, name)
    }

    fn has_notice(&self, name: &[u8]) -> io::Result<bool> {
        notices::is_there(&self.root, name)
    }

    fn remove_notices(&self, prefix: &[u8]) -> io::Result<()> {
        notices::remove(&self.root, prefix)
    }
}

/// Magic numbers of ext2/3/4, XFS, btrfs, F2FS, bcachefs, overlayfs, GFS2, tmpfs, ramfs. The clients of other shared file
/// systems refuse the exchange (NFS, Lustre, CephFS, SMB); of FUSE it is unknown.
const EXCHANGING: [u32; 9] =
    [0xef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010, 0xca45_1a4e, 0x794c_7630, 0x0116_1970, 0x0102_1994, 0x8584_58f6];

const CREATE: OFlags = OFlags::CREATE.union(OFlags::EXCL).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Type and identity as the server has them now, not as this node's attribute cache has them.
fn present_now(place: &Place<'_>) -> io::Result<(Kind, StoreIdentity)> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_FORCE_SYNC;
    let found = match statx(&place.dir, place.name, flags, StatxFlags::BASIC_STATS) {
        Ok(found) => found,
        // A filter that does not know the call.
        Err(Errno::NOSYS | Errno::PERM) => {
            let stat = place.stat()?;
            return Ok((Kind::from_mode(stat.st_mode), identity_of(&stat)));
        }
        Err(error) => return Err(error.into()),
    };
    let nanos = |time: rustix::fs::StatxTimestamp| {
        surgetank_types::model::Timestamp::from_parts(time.tv_sec, time.tv_nsec).nanos
    };
    let kind = Kind::from_mode(found.stx_mode.into());
    let identity = StoreIdentity {
        ino: found.stx_ino,
        size_bytes: found.stx_size,
        mtime_nanos: nanos(found.stx_mtime),
        ctime_nanos: nanos(found.stx_ctime),
    };
    Ok((kind, identity.of_kind(kind)))
}
