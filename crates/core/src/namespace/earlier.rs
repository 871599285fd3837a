//! Earlier contents of a file, which a hint keeps beside it: `NAME.~1~` is the last one, `NAME.~2~` the one before.
//!
//! A content is copied before it goes. The copy is a file like any: it has the owner, the mode and the time of the content, and
//! the drain brings it to the store. The copy is complete before earlier ones move up, so that no failure costs one of them. Until
//! then it is `NAME.~0~`.
//!
//! The danger that this avoids: a program creates files, by a hint, where their owner could not.

use std::os::unix::fs::FileExt;
use std::sync::{Weak, mpsc};
use std::time::Duration;

use surgetank_policy::rule::mode_name;
use surgetank_types::error::{Errno, FsResult};
use surgetank_types::model::{Attr, Caller, FileId, Kind, Mode, RunId};
use surgetank_types::sync::{Arc, OnceLock};

use crate::base::waits::Waits;
use crate::base::{Base, Door};
use crate::files::room::WriteAt;
use crate::files::{Files, Via};
use crate::namespace::attributes::{FileAttributes, SetAttr};
use crate::namespace::hints::FileHints;
use crate::namespace::names::Names;
use crate::namespace::resolve::Resolver;

/// So much is copied at once.
const PIECE_BYTES: usize = 1 << 20;
/// So long the program waits until the kernel has forgotten the names.
const FORGOTTEN_TIMEOUT: Duration = Duration::from_millis(200);

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
    is_elsewhere: bool,
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
        files.dispatcher.set_keeper(Box::new(move |caller, id, contents, waits| {
            weak.upgrade().map_or(Ok(()), |this| this.set_aside(caller, id, contents, waits))
        }));
        made
    }

    /// In a pool: reads content that another member has.
    pub fn set_reader(&self, reader: ReadElsewhere) {
        // (Set once.)
        let _ = self.elsewhere.set(reader);
    }

    fn set_aside(&self, caller: &Caller, id: FileId, contents: u32, waits: bool) -> FsResult<()> {
        let leaving = self.leaving(id)?;
        let (dir, attr) = (leaving.dir, leaving.attr);
        let owner = Caller { uid: attr.uid, gid: attr.gid, umask: 0, ..*caller };
        self.names.permit_change(&owner, dir)?;
        // An agent that died may have kept it, for the same request.
        if self.is_kept(&owner, &leaving)? {
            return Ok(());
        }
        let fresh = leaving.kept_as(0);
        absent_is_fine(self.names.unlink(&owner, dir, &fresh))?;
        let kept = self.make(&owner, &leaving, &fresh);
        if kept.is_err() {
            absent_is_fine(self.names.unlink(&owner, dir, &fresh))?;
        }
        kept?;
        let mut names = vec![fresh];
        for number in (0..contents).rev() {
            let (from, to) = (leaving.kept_as(number), leaving.kept_as(number + 1));
            absent_is_fine(self.names.rename(&owner, dir, &from, dir, &to, 0))?;
            names.push(to);
        }
        self.forget(dir, names, waits);
        Ok(())
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
            is_elsewhere: inode.home().is_some(),
        })
    }

    /// Is the last earlier content this one? The time says that it may be, and the bytes that it is.
    fn is_kept(&self, owner: &Caller, leaving: &Leaving) -> FsResult<bool> {
        let last = match self.resolver.resolve(owner, leaving.dir, &leaving.kept_as(1)) {
            Err(fault) if fault.errno == Errno::NOENT => return Ok(false),
            last => last?,
        };
        let looks_so = self.files.metadata.read_tree().get(last).is_some_and(|inode| {
            let (attr, known) = (inode.attr, leaving.attr);
            let is_file = attr.kind == Kind::File && inode.sealed && inode.home().is_none();
            is_file && attr.size_bytes == known.size_bytes && attr.mtime == known.mtime
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
                is_same = is_same && content.read_exact_at(beside, offset).is_ok() && beside == data;
                Ok(())
            })
        });
        self.files.opener.close_inode(&open, false);
        compared.map(|()| is_same)
    }

    /// Copies the content to a new file.
    fn make(&self, owner: &Caller, leaving: &Leaving, name: &[u8]) -> FsResult<()> {
        let (files, attr) = (&self.files, leaving.attr);
        let made = self.names.make_file(owner, (leaving.dir, name), attr.perm & 0o777, leaving.run, Via::Synced)?;
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
        let dated = copied.and_then(|()| self.attributes.setattr(owner, made.id, None, &times).map(drop));
        // A temporary's earlier content is one, too.
        let advised = dated.and_then(|()| match leaving.mode {
            Mode::Copy => Ok(()),
            mode => self.hints.set_hint(made.id, b"mode", mode_name(mode).as_bytes(), 0),
        });
        self.resolver.forget(made.id, 1);
        advised
    }

    fn pieces(&self, leaving: &Leaving, take: &mut dyn FnMut(u64, &[u8]) -> FsResult<()>) -> FsResult<()> {
        if leaving.is_elsewhere {
            let reader = self.elsewhere.get().ok_or(Errno::IO)?;
            return reader(leaving.id, take);
        }
        let open = self.files.opener.open_inode(leaving.id, false, false, RunId(0), Via::Mount)?;
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

    /// The kernel may have cached the names. A thread tells it: the program may hold a lock that the kernel needs for that.
    fn forget(&self, dir: FileId, names: Vec<Vec<u8>>, waits: bool) {
        let Some(door) = self.door.get().cloned() else { return };
        let (done, is_done) = mpsc::channel();
        let tell = move || {
            names.iter().for_each(|name| door.invalidate_name(dir, name));
            door.invalidate(dir, false);
            // (The program may wait no more.)
            let _ = done.send(());
        };
        let thread = std::thread::Builder::new().name("earlier-names".to_owned()).stack_size(256 << 10).spawn(tell);
        if thread.is_ok() && waits {
            // (Then it goes on: the kernel learns of the names a little later.)
            let _ = is_done.recv_timeout(FORGOTTEN_TIMEOUT);
        }
    }
}

fn absent_is_fine(done: FsResult<()>) -> FsResult<()> {
    match done {
        Err(fault) if fault.errno == Errno::NOENT => Ok(()),
        done => done,
    }
}
