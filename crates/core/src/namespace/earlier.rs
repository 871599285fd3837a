//! Earlier contents of a file, which a hint keeps beside it: `NAME.~1~` is the last one, `NAME.~2~` the one before.
//!
//! A content is copied before it goes. The copy is a file like any: it has the owner, the mode and the time of the content, and
//! the drain brings it to the store. The copy is complete before earlier ones move up, so that no failure costs one of them. Until
//! then it is `NAME.~0~`.
//!
//! The danger that this avoids: a program creates files, by a hint, where their owner could not.

use std::os::unix::fs::FileExt;
use std::sync::Weak;

use surgetank_policy::rule::mode_name;
use surgetank_state::Inode;
use surgetank_types::error::{Errno, Fault, FsResult};
use surgetank_types::model::{Attr, Caller, FileId, Kind, Mode, RunId, Timestamp};
use surgetank_types::sync::{Arc, OnceLock};

use crate::base::waits::Waits;
use crate::base::{Base, Door};
use crate::files::room::WriteAt;
use crate::files::{Files, Via};
use crate::namespace::attributes::{FileAttributes, SetAttr};
use crate::namespace::hints::FileHints;
use crate::namespace::names::Names;
use crate::namespace::resolve::Resolver;

/// Ends a comparison. (No file system fails with this error.)
const DIFFERS: Errno = Errno::ISNAM;
/// So much is copied at once.
const PIECE_BYTES: usize = 1 << 20;

/// Gives each piece of a file's content, with its offset, to a function.
pub type ReadElsewhere = Box<dyn Fn(FileId, &mut dyn FnMut(u64, &[u8]) -> FsResult<()>) -> FsResult<()> + Send + Sync>;

/// Keeps contents.
pub struct EarlierContents {
    door: Arc<OnceLock<Arc<dyn Door>>>,
    files: Arc<Files>,
    attributes: Arc<FileAttributes>,
    hints: Arc<FileHints>,
    names: Arc<Names>,
    resolver: Arc<Resolver>,
    waits: Arc<Waits>,
    elsewhere: OnceLock<ReadElsewhere>,
}

/// A file whose content is about to go.
struct Leaving {
    id: FileId,
    dir: FileId,
    name: Vec<u8>,
    attr: Attr,
    mode: Mode,
    run: RunId,
    as_it_is: AsItIs,
}

/// By which it is known whether a program has begun to change the content. (The epoch of a sealed file also grows if a copy of it is
/// given up.)
#[derive(PartialEq, Eq)]
enum AsItIs {
    Sealed { version: u32, size_bytes: u64, mtime: Timestamp },
    Unsealed { epoch: u32 },
}

fn as_it_is(inode: &Inode) -> AsItIs {
    match inode.sealed {
        true => AsItIs::Sealed { version: inode.version, size_bytes: inode.attr.size_bytes, mtime: inode.attr.mtime },
        false => AsItIs::Unsealed { epoch: inode.epoch },
    }
}

impl Leaving {
    fn kept_as(&self, number: u32) -> Vec<u8> {
        [&self.name, &b".~"[..], number.to_string().as_bytes(), b"~"].concat()
    }
}

impl EarlierContents {
    pub(crate) fn new(
        base: &Base,
        files: &Arc<Files>,
        attributes: &Arc<FileAttributes>,
        hints: &Arc<FileHints>,
        names: &Arc<Names>,
        resolver: &Arc<Resolver>,
    ) -> Arc<Self> {
        let made = Arc::new(Self {
            door: base.door.clone(),
            files: files.clone(),
            attributes: attributes.clone(),
            hints: hints.clone(),
            names: names.clone(),
            resolver: resolver.clone(),
            waits: base.waits.clone(),
            elsewhere: OnceLock::new(),
        });
        let weak: Weak<Self> = Arc::downgrade(&made);
        files.dispatcher.set_keeper(Box::new(move |caller, id, contents| {
            weak.upgrade().map_or(Ok(()), |this| this.set_aside(caller, id, contents))
        }));
        made
    }

    /// In a pool: reads content that another member has.
    pub fn set_reader(&self, reader: ReadElsewhere) {
        // (Set once.)
        let _ = self.elsewhere.set(reader);
    }

    fn set_aside(&self, caller: &Caller, id: FileId, contents: u32) -> FsResult<()> {
        let leaving = self.leaving(id)?;
        let (dir, attr) = (leaving.dir, leaving.attr);
        let owner = Caller { uid: attr.uid, gid: attr.gid, umask: 0, ..*caller };
        self.permit(&owner, dir)?;
        self.names.permit_change(&owner, dir)?;
        let fresh = leaving.kept_as(0);
        // The first number that is free: only those below it move.
        let mut free = contents;
        for number in 0..=contents {
            let name = leaving.kept_as(number);
            if self.files.dispatcher.was_given(dir, &name) {
                let why = format!("a program has renamed a file to {}", String::from_utf8_lossy(&name));
                return Err(Fault::new(Errno::EXIST, why));
            }
            match self.resolver.resolve(&owner, dir, &name) {
                Ok(there) => self.is_such_a_file(there, &owner)?,
                Err(fault) if fault.errno == Errno::NOENT => free = if number > 0 { free.min(number) } else { free },
                Err(fault) => return Err(fault),
            }
        }
        // An agent that died may have kept it, for the same request. Or no program has changed it.
        if self.is_kept(&owner, &leaving)? {
            return Ok(());
        }
        absent_is_fine(self.names.unlink(&owner, dir, &fresh))?;
        let kept = self.make(&owner, &leaving, &fresh);
        let changed = || Err(Fault::new(Errno::BUSY, "another program has begun to write it meanwhile"));
        let kept = kept.and_then(|()| if self.is_as_it_was(&leaving) { Ok(()) } else { changed() });
        if kept.is_err() {
            absent_is_fine(self.names.unlink(&owner, dir, &fresh))?;
        }
        kept?;
        for number in (0..free).rev() {
            let (from, to) = (leaving.kept_as(number), leaving.kept_as(number + 1));
            absent_is_fine(self.names.rename(&owner, dir, &from, dir, &to, 0))?;
        }
        // The kernel caches no such name, but the listing. (To have it drop a name, it would need the lock of the directory, which the
        // program may hold. A killed agent could not end then, and the program would wait for the next one.)
        if let Some(door) = self.door.get() {
            door.invalidate(dir, false);
        }
        Ok(())
    }

    /// May the file's owner make and remove files in the directory? (Where the kernel checks that, it checks the program, and only
    /// what the program does itself.)
    fn permit(&self, owner: &Caller, dir: FileId) -> FsResult<()> {
        const WRITE_AND_SEARCH: u32 = 3;
        let attr = self.files.metadata.read_tree().get(dir).map(|inode| inode.attr).ok_or(Errno::STALE)?;
        let shift = match () {
            () if owner.uid == 0 => return Ok(()),
            () if attr.uid == owner.uid => 6,
            // (His other groups are not known.)
            () if attr.gid == owner.gid => 3,
            () => 0,
        };
        if attr.perm >> shift & WRITE_AND_SEARCH == WRITE_AND_SEARCH { Ok(()) } else { Err(Errno::ACCESS.into()) }
    }

    /// What has the name of an earlier content is one: a file of the same owner.
    fn is_such_a_file(&self, there: FileId, owner: &Caller) -> FsResult<()> {
        let attr = self.files.metadata.read_tree().get(there).map(|inode| inode.attr).ok_or(Errno::STALE)?;
        match attr.kind {
            Kind::File if attr.uid == owner.uid => Ok(()),
            Kind::File => Err(Errno::PERM.into()),
            _ => Err(Errno::EXIST.into()),
        }
    }

    fn is_as_it_was(&self, leaving: &Leaving) -> bool {
        self.files.metadata.read_tree().get(leaving.id).is_some_and(|inode| as_it_is(inode) == leaving.as_it_is)
    }

    fn leaving(&self, id: FileId) -> FsResult<Leaving> {
        let tree = self.files.metadata.read_tree();
        let inode = tree.get(id).ok_or(Errno::STALE)?;
        let (dir, name) = inode.logical.clone().ok_or(Errno::STALE)?;
        let path = tree.logical_path(id).ok_or(Errno::STALE)?;
        Ok(Leaving {
            id,
            dir,
            name: name.to_vec(),
            attr: inode.attr,
            mode: self.files.metadata.decided(&tree, id, &path).mode,
            run: inode.run,
            as_it_is: as_it_is(inode),
        })
    }

    /// Is the last earlier content this one? The size says that it may be, and the bytes that it is.
    fn is_kept(&self, owner: &Caller, leaving: &Leaving) -> FsResult<bool> {
        let last = match self.resolver.resolve(owner, leaving.dir, &leaving.kept_as(1)) {
            Err(fault) if fault.errno == Errno::NOENT => return Ok(false),
            last => last?,
        };
        let looks_so = self.files.metadata.read_tree().get(last).is_some_and(|inode| {
            let size_bytes = inode.attr.size_bytes;
            let is_known = inode.sealed && inode.home().is_none() && matches!(leaving.as_it_is, AsItIs::Sealed { .. });
            is_known && size_bytes > 0 && size_bytes == leaving.attr.size_bytes
        });
        if !looks_so {
            return Ok(false);
        }
        let open = self.files.opener.open_inode(last, false, false, RunId(0), Via::Mount)?;
        let mut is_same = true;
        let mut there = vec![0; PIECE_BYTES];
        let compared = self.files.fetches.fetch_whole(&open, false).and_then(|()| {
            let content = open.content().file;
            self.pieces(leaving, &mut |offset, data| {
                let beside = &mut there[..data.len()];
                if self.waits.is_killed() {
                    return Err(Errno::INTR.into());
                }
                is_same = content.read_exact_at(beside, offset).is_ok() && beside == data;
                if is_same { Ok(()) } else { Err(DIFFERS.into()) }
            })
        });
        self.files.opener.close_inode(&open, false);
        match compared {
            Err(fault) if fault.errno != DIFFERS => Err(fault),
            _ => Ok(is_same),
        }
    }

    /// Copies the content to a new file.
    fn make(&self, owner: &Caller, leaving: &Leaving, name: &[u8]) -> FsResult<()> {
        let (files, attr) = (&self.files, leaving.attr);
        // (Only its owner may read it until it has its group.)
        let made = self.names.make_file(owner, (leaving.dir, name), 0o600, leaving.run, Via::Synced)?;
        let copied = self.pieces(leaving, &mut |offset, data| {
            if self.waits.is_killed() {
                return Err(Errno::INTR.into());
            }
            let mut done = 0;
            while done < data.len() {
                let at = WriteAt::Offset(offset + done as u64);
                done += files.transfers.write_mediated(&made.open, &data[done..], at)?;
            }
            Ok(())
        });
        files.opener.close_inode(&made.open, true);
        // (The kernel does not know it.)
        let times = SetAttr { atime: Some(attr.atime), mtime: Some(attr.mtime), ..SetAttr::default() };
        let dated =
            copied.and_then(|()| self.shared(owner, made.id, &attr)).and_then(|()| self.set(owner, made.id, &times));
        // A temporary's earlier content is one, too.
        let advised = dated.and_then(|()| match leaving.mode {
            Mode::Copy => Ok(()),
            mode => self.hints.set_hint(made.id, b"mode", mode_name(mode).as_bytes(), 0),
        });
        self.resolver.forget(made.id, 1);
        advised
    }

    /// The copy gets the group and the mode of the file. In a group that it cannot get, its group and others may not use it.
    fn shared(&self, owner: &Caller, made: FileId, attr: &Attr) -> FsResult<()> {
        let is_group = || self.files.metadata.read_tree().get(made).is_some_and(|inode| inode.attr.gid == attr.gid);
        if !is_group() {
            let group = SetAttr { gid: Some(attr.gid), ..SetAttr::default() };
            match self.set(owner, made, &group) {
                Err(fault) if fault.errno != Errno::PERM => return Err(fault),
                _ => {}
            }
        }
        let perm = if is_group() { attr.perm & 0o777 } else { attr.perm & 0o700 };
        self.set(owner, made, &SetAttr { perm: Some(perm), ..SetAttr::default() })
    }

    fn set(&self, owner: &Caller, id: FileId, change: &SetAttr) -> FsResult<()> {
        self.attributes.setattr(owner, id, None, change).map(drop)
    }

    /// Errors: EIO, it has not as many bytes as it should have; and those of `take`.
    fn pieces(&self, leaving: &Leaving, take: &mut dyn FnMut(u64, &[u8]) -> FsResult<()>) -> FsResult<()> {
        let mut total_bytes = 0;
        self.all_pieces(leaving, &mut |offset, data| {
            total_bytes += data.len() as u64;
            take(offset, data)
        })?;
        match leaving.as_it_is {
            AsItIs::Sealed { size_bytes, .. } if size_bytes != total_bytes => Err(Errno::IO.into()),
            _ => Ok(()),
        }
    }

    fn all_pieces(&self, leaving: &Leaving, take: &mut dyn FnMut(u64, &[u8]) -> FsResult<()>) -> FsResult<()> {
        let is_elsewhere =
            || self.files.metadata.read_tree().get(leaving.id).is_some_and(|inode| inode.home().is_some());
        let reader = || self.elsewhere.get().ok_or(Errno::IO);
        if is_elsewhere() {
            return reader()?(leaving.id, take);
        }
        let open = self.files.opener.open_inode(leaving.id, false, false, RunId(0), Via::Mount)?;
        // (It may have got another home. It gets none while it is open.)
        if is_elsewhere() {
            self.files.opener.close_inode(&open, false);
            return reader()?(leaving.id, take);
        }
        let mut read = || -> FsResult<()> {
            self.files.fetches.fetch_whole(&open, false)?;
            let content = open.content().file;
            let mut piece = vec![0; PIECE_BYTES];
            let mut offset = 0;
            loop {
                match content.read_at(&mut piece, offset) {
                    Ok(0) => return Ok(()),
                    Ok(count) => {
                        take(offset, &piece[..count])?;
                        offset += count as u64;
                    }
                    Err(why) if why.kind() == std::io::ErrorKind::Interrupted => {}
                    Err(why) => return Err(why.into()),
                }
            }
        };
        let done = read();
        self.files.opener.close_inode(&open, false);
        done
    }
}

fn absent_is_fine(done: FsResult<()>) -> FsResult<()> {
    match done {
        Err(fault) if fault.errno == Errno::NOENT => Ok(()),
        done => done,
    }
}
