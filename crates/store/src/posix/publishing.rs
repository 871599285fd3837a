//! Makes a staged copy visible under its final name.
//!
//! | present file of that name | action |
//! |---|---|
//! | none | one rename that refuses to replace anything |
//! | a file with one link, same owner | one rename over it; its ACL (and attributes that no program changed) are copied first |
//! | a file with several links, or another owner | overwritten in place, synced, compared; the inode stays, the temporary is
//! removed last |
//! | another file (`replace`) | one rename over it; its further names keep it |
//! | a link, fifo, socket, device | one rename over it |
//! | a directory | accepted for a directory: an empty temporary is dropped, a filled one replaces an empty target; EISDIR
//! otherwise |
//!
//! The danger that it avoids: an interrupted overwrite. Until the target is synced and compared, the verified temporary exists,
//! and publishing can be repeated.

use std::io;

use rustix::fs::{AtFlags, FileType, OFlags, RenameFlags, Stat, fstat, renameat, renameat_with, unlinkat};
use rustix::io::Errno;

use super::PosixStore;
use super::attributes::{carry_over, identity_of, is_denied, subject};
use super::beneath::{Pinned, Place, open_file_at, pin_at, without_atime};
use crate::checksum::checksum;
use crate::{Cred, Meta, StorePath, TakesTurn, Turn};
use surgetank_types::model::StoreIdentity;
use surgetank_types::sync::atomic::Ordering;

/// Number of looks at a name that appears and disappears meanwhile.
const ATTEMPTS_MAX: u32 = 8;

impl PosixStore {
    pub(super) fn publish_at(
        &self,
        who: Cred,
        temporary: &StorePath,
        path: &StorePath,
        meta: &Meta,
        another: bool,
        turn: Option<Turn<'_>>,
    ) -> io::Result<StoreIdentity> {
        let act = |operation: &dyn Fn() -> io::Result<()>| self.identity.act(who, operation);
        let (from, staged) = self.identity.act(who, || {
            let from = self.root.place(temporary)?;
            let staged = pin_at(&from)?;
            Ok((from, staged))
        })?;
        let to = self.identity.act(who, || self.root.place_beside(&from, temporary, path))?;
        let stat = staged.stat()?;
        let directory = is(&stat, FileType::Directory);
        if directory {
            // Children that were staged inside have changed its times.
            self.finish_dir(who, &staged, meta)?;
        }
        turn.map_or(Ok(()), TakesTurn::wait)?;
        // The file's new attributes are read while the next file is renamed.
        let shown = || turn.into_iter().for_each(TakesTurn::pass);
        for _ in 0..ATTEMPTS_MAX {
            match act(&|| self.rename_new(&from, &to)) {
                Ok(()) => {
                    shown();
                    crash_point!("store.published");
                    return self.identity_at(who, &to);
                }
                Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {}
                Err(error) => return Err(error),
            }
            let target = match self.identity.act(who, || pin_at(&to)) {
                Ok(target) => target,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            };
            let present = target.stat()?;
            if is(&present, FileType::Directory) {
                if !directory {
                    return Err(Errno::ISDIR.into());
                }
                return self.join_dirs(who, &from, &to, &target, meta);
            }
            if directory {
                return Err(Errno::NOTDIR.into());
            }
            if !another && is(&present, FileType::RegularFile) && is(&stat, FileType::RegularFile) {
                if goes_over(&present, &stat) {
                    return self.overwrite(who, &from, path, &target, meta);
                }
                let old = subject(&*target, &self.identity, who, false);
                let new = subject(&*staged, &self.identity, who, true);
                if carry_over(&old, &new, meta)? {
                    self.counters.fsyncs.add(1);
                    self.open_ours(who, &from)?.sync_all()?;
                }
            }
            self.counters.renames.add(1);
            crash_point!("store.replace");
            act(&|| Ok(renameat(&from.dir, from.name, &to.dir, to.name)?))?;
            shown();
            crash_point!("store.replaced");
            return self.identity_at(who, &to);
        }
        Err(io::Error::new(io::ErrorKind::WouldBlock, "another file comes and goes under the name"))
    }

    /// One exchange of two names. `None`: the file must be overwritten in place, or the file system has no exchange.
    pub(super) fn publish_keeping_at(
        &self,
        who: Cred,
        temporary: &StorePath,
        path: &StorePath,
        meta: &Meta,
    ) -> io::Result<Option<(StoreIdentity, StoreIdentity)>> {
        let (from, staged) = self.identity.act(who, || {
            let from = self.root.place(temporary)?;
            let staged = pin_at(&from)?;
            Ok((from, staged))
        })?;
        let to = self.identity.act(who, || self.root.place_beside(&from, temporary, path))?;
        let target = self.identity.act(who, || pin_at(&to))?;
        let (present, stat) = (target.stat()?, staged.stat()?);
        let are_files = is(&present, FileType::RegularFile) && is(&stat, FileType::RegularFile);
        if !are_files || goes_over(&present, &stat) {
            return Ok(None);
        }
        let old = subject(&*target, &self.identity, who, false);
        let new = subject(&*staged, &self.identity, who, true);
        if carry_over(&old, &new, meta)? {
            self.counters.fsyncs.add(1);
            self.open_ours(who, &from)?.sync_all()?;
        }
        self.counters.renames.add(1);
        let exchanged = self.identity.act(who, || {
            match renameat_with(&from.dir, from.name, &to.dir, to.name, RenameFlags::EXCHANGE) {
                Err(Errno::INVAL | Errno::NOSYS) => Ok(false),
                result => Ok(result.map(|()| true)?),
            }
        })?;
        if !exchanged {
            return Ok(None);
        }
        crash_point!("store.replaced");
        // The exchange is done: an error that lets the caller try with other ids would exchange the names back.
        let done = |why: io::Error| io::Error::other(format!("after the exchange: {why}"));
        Ok(Some((self.identity_at(who, &to).map_err(done)?, self.identity_at(who, &from).map_err(done)?)))
    }

    /// One rename, which fails if the name is taken; EEXIST also where the file system has no such rename.
    pub(super) fn publish_absent_at(
        &self,
        who: Cred,
        temporary: &StorePath,
        path: &StorePath,
        turn: Option<Turn<'_>>,
    ) -> io::Result<StoreIdentity> {
        if self.replaces.load(Ordering::Relaxed) {
            return Err(Errno::EXIST.into());
        }
        let from = self.identity.act(who, || {
            let from = self.root.place(temporary)?;
            // The kernel's cached attributes are renewed before the rename locks the directory.
            pin_at(&from)?;
            Ok(from)
        })?;
        let to = self.identity.act(who, || self.root.place_beside(&from, temporary, path))?;
        turn.map_or(Ok(()), TakesTurn::wait)?;
        self.identity.act(who, || {
            match renameat_with(&from.dir, from.name, &to.dir, to.name, RenameFlags::NOREPLACE) {
                // A look that uses this node's cache, as in `rename_new`, would not suffice here.
                Err(Errno::INVAL | Errno::NOSYS) => {
                    self.replaces.store(true, Ordering::Relaxed);
                    Err(Errno::EXIST.into())
                }
                renamed => Ok(renamed?),
            }
        })?;
        self.counters.renames.add(1);
        turn.into_iter().for_each(TakesTurn::pass);
        crash_point!("store.published");
        self.identity_at(who, &to)
    }

    /// EEXIST if the name is taken, also where the file system has only the rename that replaces.
    fn rename_new(&self, from: &Place<'_>, to: &Place<'_>) -> io::Result<()> {
        match renameat_with(&from.dir, from.name, &to.dir, to.name, RenameFlags::NOREPLACE) {
            Err(Errno::INVAL | Errno::NOSYS) => match to.stat() {
                Ok(_) => return Err(Errno::EXIST.into()),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    renameat(&from.dir, from.name, &to.dir, to.name)?
                }
                Err(error) => return Err(error),
            },
            result => result?,
        }
        self.counters.renames.add(1);
        Ok(())
    }

    fn finish_dir(&self, who: Cred, dir: &Pinned, meta: &Meta) -> io::Result<()> {
        let wanted = Meta { xattrs: None, uid: dir.stat()?.st_uid, gid: dir.stat()?.st_gid, ..meta.clone() };
        let inherited = dir.stat()?.st_mode & libc::S_ISGID;
        subject(&**dir, &self.identity, who, true).change(&Meta { perm: wanted.perm | inherited, ..wanted })
    }

    fn join_dirs(
        &self,
        who: Cred,
        from: &Place<'_>,
        to: &Place<'_>,
        target: &Pinned,
        meta: &Meta,
    ) -> io::Result<StoreIdentity> {
        let dropped = self.identity.act(who, || Ok(unlinkat(&from.dir, from.name, AtFlags::REMOVEDIR)?));
        match dropped {
            Ok(()) => {
                if target.stat()?.st_uid == meta.uid {
                    self.finish_dir(who, target, meta)?;
                }
            }
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOTEMPTY | libc::EEXIST)) => {
                self.counters.renames.add(1);
                self.identity.act(who, || Ok(renameat(&from.dir, from.name, &to.dir, to.name)?))?;
            }
            Err(error) => return Err(error),
        }
        self.identity_at(who, to)
    }

    fn overwrite(
        &self,
        who: Cred,
        from: &Place<'_>,
        path: &StorePath,
        target: &Pinned,
        meta: &Meta,
    ) -> io::Result<StoreIdentity> {
        let source = self.open_ours(who, from)?;
        let file = self.identity.act(who, || target.open(OFlags::RDWR).or_else(|_| target.open(OFlags::WRONLY)))?;
        self.counters.overwrites.add(1);
        let act = |operation: &dyn Fn() -> io::Result<()>| self.identity.act(who, operation);
        act(&|| file.set_len(0))?;
        crash_point!("store.overwriting");
        let sum = self.copier.copy(&source, &file, &act, &self.counters, &|_| Ok(()))?;
        // Another owner's file keeps its mode and owner, as with any write.
        let present = target.stat()?;
        let kept = Meta { uid: present.st_uid, gid: present.st_gid, ..meta.clone() };
        let own = present.st_uid == meta.uid;
        let wanted = if own { Meta { gid: meta.gid, ..kept } } else { Meta { perm: present.st_mode & 0o7777, ..kept } };
        match subject(&file, &self.identity, who, false).change(&wanted) {
            // In a user namespace all other users have the same number: “own” tells nothing there.
            Err(error) if !(own && self.identity.privileged()) && is_denied(&error) => {}
            result => result?,
        }
        self.counters.fsyncs.add(1);
        file.sync_all()?;
        let read_back = |bytes| {
            self.counters.bytes_read_back.add(bytes);
            Ok(())
        };
        let open = || without_atime(|flags| target.open(flags), OFlags::RDONLY);
        let copy = self.identity.act(who, open).or_else(|_| open())?;
        if copy.metadata()?.len() != source.metadata()?.len() || checksum(&copy, &read_back)? != sum {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!(
                    "{path} in {} reads back differently from what was written over it; the verified copy beside it is kept",
                    self.label
                ),
            ));
        }
        let identity = identity_of(&fstat(&file)?);
        self.identity.act(who, || Ok(unlinkat(&from.dir, from.name, AtFlags::empty())?))?;
        Ok(identity)
    }

    fn identity_at(&self, who: Cred, place: &Place<'_>) -> io::Result<StoreIdentity> {
        self.counters.stats.add(1);
        Ok(identity_of(&self.identity.act(who, || place.stat())?))
    }

    /// Opens one of the agent's temporaries for reading, even if its final mode does not permit its owner to read it.
    pub(super) fn open_ours(&self, who: Cred, place: &Place<'_>) -> io::Result<std::fs::File> {
        let open = || without_atime(|flags| open_file_at(place, flags), OFlags::RDONLY);
        let denied = match self.identity.act(who, open) {
            Err(error) if is_denied(&error) => error,
            result => return result,
        };
        if self.identity.differs(who) {
            // The agent's own ids can read everything, unless the store squashes them.
            match open() {
                Err(error) if is_denied(&error) => {}
                result => return result,
            }
        }
        self.identity.act(who, || {
            let pinned = pin_at(place)?;
            let stat = pinned.stat()?;
            let own = if self.identity.differs(who) { who.uid } else { self.identity.uid() };
            if !is(&stat, FileType::RegularFile) || stat.st_uid != own {
                return Err(io::Error::from(denied.kind()));
            }
            let ours = subject(&*pinned, &self.identity, who, false);
            ours.set_perm((stat.st_mode & 0o7777) | 0o400)?;
            let file = without_atime(|flags| pinned.open(flags), OFlags::RDONLY);
            ours.set_perm(stat.st_mode & 0o7777)?;
            file
        })
    }
}

/// Whether the present file must be overwritten in place: its further names must see the new version too, or its owner must
/// stay the owner.
pub(super) fn goes_over(present: &Stat, staged: &Stat) -> bool {
    let files = is(present, FileType::RegularFile) && is(staged, FileType::RegularFile);
    files && (present.st_nlink > 1 || present.st_uid != staged.st_uid)
}

fn is(stat: &Stat, kind: FileType) -> bool {
    FileType::from_raw_mode(stat.st_mode) == kind
}
