//! Stage-in and stage-out: copies files and trees from one store to another; either may be a plain directory.
//!
//! Each file is copied as in the drain: to a temporary beside its place, synced, compared with the checksum of the read
//! bytes. One step then makes it visible with its attributes. A file that is present already (same kind, size and time
//! of modification) is left alone. So an interrupted copy continues when it is requested again; a large upload
//! continues within the file.
//!
//! The dangers that it avoids:
//! - half a file under its name;
//! - a file that changes while it is read (it is read again, then refused);
//! - a file that another client puts at the target during the copy (refused, both stay);
//! - two copies of one file into one temporary at the same time (one claim per file and node, own temporaries per
//!   node).

mod claim;
mod walk;

use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;

use claim::Claim;
pub use claim::Claims;
use surgetank_store::verdict::{self, Verdict};
use surgetank_store::{Cred, Expect, Gate, Meta, Source, Staged, Store, StorePath, StoreStat, Verify, at_once};
use surgetank_types::model::{Kind, Timestamp};
use surgetank_types::sync::{Mutex, MutexGuard, PoisonError};
pub use walk::{Entry, Walked, Wanted, walk};

/// Files in progress at a time: each waits for a server most of its time.
const FILES_AT_ONCE: usize = 16;
/// Files that are made durable together: at most so many, or so many bytes.
const BATCH_FILES: usize = 256;
const BATCH_BYTES: u64 = 256 << 20;
/// Pauses before retries, when a server or a network refuses for the moment.
const PAUSES: [Duration; 3] = [Duration::from_secs(1), Duration::from_secs(4), Duration::from_secs(16)];

/// Source, target and options of a transfer.
pub struct Transfer<'a> {
    /// The store that is read.
    pub source: &'a dyn Store,
    /// The store that is written.
    pub target: &'a dyn Store,
    /// User on whose behalf both stores are asked.
    pub who: Cred,
    /// Verification of the copies.
    pub verify: Verify,
    /// A local directory for files that go from one server to another.
    pub spool: &'a Path,
    /// Claims against other transfers on this node.
    pub claims: &'a Claims,
    /// Called with bytes as they pass; its error ends the transfer.
    pub gate: Gate<'a>,
    /// Called with each file that is at its place now, with its bytes.
    pub arrived: &'a (dyn Fn(&Entry) + Sync),
}

/// The result of a transfer.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Files that were copied.
    pub copied_files: u64,
    /// Bytes that were copied.
    pub copied_bytes: u64,
    /// Files that were present already.
    pub present_files: u64,
    /// Bytes of the files that were present already.
    pub present_bytes: u64,
    /// Source paths and reasons.
    pub failed: Vec<(StorePath, io::Error)>,
    /// The transfer ended before all files had their turn; how many had none.
    pub left_files: u64,
}

/// A file to be copied.
#[derive(Clone, Copy)]
struct Wish<'a> {
    entry: &'a Entry,
    /// The attributes at the last look-up.
    stat: StoreStat,
    /// What is at its place now, and may be replaced.
    expect: Expect,
}

/// A copy under its temporary name.
struct Ready<'a> {
    wish: Wish<'a>,
    temporary: StorePath,
    staged: Staged,
    meta: Meta,
    /// Held until the copy is at its place.
    _claim: Claim<'a>,
}

impl<'a> Transfer<'a> {
    /// Copies what a walk found; directories first, their attributes last.
    pub fn carry(&self, entries: &[Entry]) -> Outcome {
        let mut outcome = Outcome::default();
        let (dirs, files): (Vec<&Entry>, Vec<&Entry>) = entries.iter().partition(|entry| entry.is_dir());
        self.make_dirs(&dirs, &mut outcome);
        let mut todo = self.compare(&files, &mut outcome);
        for pause in PAUSES.map(Some).into_iter().chain([None]) {
            let again = self.round(&todo, &mut outcome);
            let Some(pause) = pause.filter(|_| !again.is_empty() && (self.gate)(0).is_ok()) else {
                outcome.failed.extend(again.into_iter().map(|(wish, why)| (wish.entry.from.clone(), why)));
                break;
            };
            self.wait(pause);
            self.source.refresh();
            self.target.refresh();
            // Perhaps the file is there, and only the answer was lost.
            let entries: Vec<&Entry> = again.into_iter().map(|(wish, _)| wish.entry).collect();
            todo = self.compare(&entries, &mut outcome);
            for wish in &mut todo {
                wish.stat = self.source.stat(self.who, &wish.entry.from).unwrap_or(wish.stat);
            }
        }
        // From the bottom up: the content of each directory is complete.
        for dir in dirs.iter().rev().filter(|dir| dir.keeps_attributes) {
            // (A directory that is to be read-only still has to be filled, another time.)
            if (self.gate)(0).is_err() {
                break;
            }
            let meta = self.meta_of(dir, &dir.stat);
            let set = meta.and_then(|meta| self.target.set_meta(self.who, &dir.to, Kind::Directory, &meta));
            if let Err(why) = set {
                outcome.failed.push((dir.from.clone(), why));
            }
        }
        outcome
    }

    fn wait(&self, pause: Duration) {
        let until = surgetank_types::clock::tick() + pause;
        while (self.gate)(0).is_ok() && surgetank_types::clock::tick() < until {
            surgetank_types::sync::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Makes each directory after its parent.
    fn make_dirs(&self, dirs: &[&Entry], outcome: &mut Outcome) {
        let mut made = HashSet::new();
        for dir in dirs {
            if (self.gate)(0).is_err() {
                return;
            }
            let is_new = match made.contains(&dir.to.parent()) {
                true => Ok(true),
                false => match self.target.stat(self.who, &dir.to) {
                    Ok(there) if there.attr.kind == Kind::Directory => self.let_in(dir, &there).map(|()| false),
                    Ok(_) => Err(Errno::EXIST.into()),
                    Err(why) if why.kind() == io::ErrorKind::NotFound => Ok(true),
                    Err(why) => Err(why),
                },
            };
            let done = is_new.and_then(|is_new| {
                if is_new {
                    self.make_dir(dir)?;
                    made.insert(dir.to.clone());
                } else {
                    // The listing then tells what is there.
                    self.target.list(self.who, &dir.to, false)?;
                }
                Ok(())
            });
            if let Err(why) = done {
                outcome.failed.push((dir.from.clone(), why));
            }
        }
    }

    /// Opens a directory that an earlier copy made read-only, to fill it again; it gets its mode at the end.
    fn let_in(&self, dir: &Entry, there: &StoreStat) -> io::Result<()> {
        let attr = there.attr;
        if self.who.uid == 0 || attr.uid != self.who.uid || attr.perm & 0o700 == 0o700 || !dir.keeps_attributes {
            return Ok(());
        }
        let (uid, gid) = (attr.uid, attr.gid);
        let open = Meta { perm: attr.perm | 0o700, uid, gid, times: Some((attr.atime, attr.mtime)), xattrs: None };
        self.target.set_meta(self.who, &dir.to, Kind::Directory, &open).map(drop)
    }

    /// The files that are missing at the target, or have another version there.
    fn compare<'e>(&self, files: &[&'e Entry], outcome: &mut Outcome) -> Vec<Wish<'e>> {
        let compared = Mutex::new(Vec::with_capacity(files.len()));
        let all = |index: usize| {
            (self.gate)(0)?;
            let entry = files[index];
            let found = self.expect(entry);
            locked(&compared).push((index, entry, found));
            Ok(())
        };
        drop(at_once(files.len(), FILES_AT_ONCE, &all));
        let mut compared = take(&compared);
        outcome.left_files += (files.len() - compared.len()) as u64;
        compared.sort_unstable_by_key(|(index, ..)| *index);
        let mut wishes = Vec::new();
        for (_, entry, found) in compared {
            match found {
                Ok(Some(expect)) => wishes.push(Wish { entry, stat: entry.stat, expect }),
                Ok(None) => {
                    outcome.present_files += 1;
                    outcome.present_bytes += entry.bytes();
                    (self.arrived)(entry);
                }
                Err(why) => outcome.failed.push((entry.from.clone(), why)),
            }
        }
        wishes
    }

    /// `None`: the file is present.
    fn expect(&self, entry: &Entry) -> io::Result<Option<Expect>> {
        match self.target.glance(self.who, &entry.to) {
            Ok(there) if self.is_the_same(entry, &there)? => Ok(None),
            // (A listing may not tell all.)
            Ok(_) => match self.target.stat(self.who, &entry.to)? {
                there if self.is_the_same(entry, &there)? => Ok(None),
                there if there.attr.kind == Kind::Directory => Err(Errno::ISDIR.into()),
                there => Ok(Some(Expect::Identity(there.identity))),
            },
            Err(why) if why.kind() == io::ErrorKind::NotFound => Ok(Some(Expect::Absent)),
            Err(why) => Err(why),
        }
    }

    /// Returns the files that may succeed another time.
    fn round<'e>(&self, wishes: &[Wish<'e>], outcome: &mut Outcome) -> Vec<(Wish<'e>, io::Error)>
    where
        'a: 'e,
    {
        let mut again = Vec::new();
        let mut rest = wishes;
        while !rest.is_empty() {
            if (self.gate)(0).is_err() {
                outcome.left_files += rest.len() as u64;
                return again;
            }
            let mut bytes = 0;
            let fits = |wish: &&Wish<'_>| {
                bytes += wish.entry.bytes();
                bytes <= BATCH_BYTES
            };
            let count = rest.iter().take(BATCH_FILES).take_while(fits).count().max(1);
            let (batch, behind) = rest.split_at(count);
            rest = behind;
            for (wish, why) in self.batch(batch, outcome) {
                if (self.gate)(0).is_err() {
                    outcome.left_files += 1;
                } else if verdict::classify(verdict::errno_of(&why)) == Verdict::Retry {
                    again.push((wish, why));
                } else {
                    outcome.failed.push((wish.entry.from.clone(), why));
                }
            }
        }
        again
    }

    /// Returns the files that failed.
    fn batch<'e>(&self, batch: &[Wish<'e>], outcome: &mut Outcome) -> Vec<(Wish<'e>, io::Error)>
    where
        'a: 'e,
    {
        let failed = Mutex::new(Vec::new());
        let ready = Mutex::new(Vec::with_capacity(batch.len()));
        let all = |index: usize| {
            let wish = batch[index];
            match self.stage(wish) {
                Ok(one) => locked(&ready).push(one),
                Err(why) => locked(&failed).push((wish, why)),
            }
            Ok(())
        };
        drop(at_once(batch.len(), FILES_AT_ONCE, &all));
        let mut ready: Vec<Ready<'_>> = take(&ready);
        let temporaries: Vec<StorePath> = ready.iter().map(|one| one.temporary.clone()).collect();
        if let Err(why) = self.target.settle(self.who, &temporaries) {
            let errno = verdict::errno_of(&why);
            let lost = ready.drain(..).map(|one| (one.wish, self.give_up(&one.temporary, errno.into())));
            locked(&failed).extend(lost);
        }
        let published = Mutex::new(Vec::with_capacity(ready.len()));
        let all = |index: usize| {
            let one: &Ready<'_> = &ready[index];
            match self.publish(one) {
                Ok(()) => locked(&published).push(one.wish),
                Err(why) => locked(&failed).push((one.wish, self.give_up(&one.temporary, why))),
            }
            Ok(())
        };
        drop(at_once(ready.len(), FILES_AT_ONCE, &all));
        let published: Vec<Wish<'_>> = take(&published);
        let dirs: Vec<StorePath> = published.iter().map(|wish| wish.entry.to.parent()).collect();
        match self.target.sync_dirs(self.who, &dirs) {
            Ok(()) => {
                for wish in published {
                    outcome.copied_files += 1;
                    outcome.copied_bytes += wish.entry.bytes();
                    (self.arrived)(wish.entry);
                }
            }
            Err(why) => {
                let errno = verdict::errno_of(&why);
                locked(&failed).extend(published.into_iter().map(|wish| (wish, io::Error::from(errno))));
            }
        }
        take(&failed)
    }

    fn part(&self, entry: &Entry) -> StorePath {
        entry.to.part(self.target.features().directories.then(|| self.claims.owner()))
    }

    fn give_up(&self, temporary: &StorePath, why: io::Error) -> io::Error {
        // (The sent parts of a stopped upload stay for the next time.)
        if (self.gate)(0).is_ok() {
            drop(self.target.discard(self.who, temporary));
        }
        why
    }

    fn meta_of(&self, entry: &Entry, stat: &StoreStat) -> io::Result<Meta> {
        let attr = stat.attr;
        let xattrs = match attr.kind {
            Kind::File | Kind::Directory => self.source.xattrs(self.who, &entry.from)?,
            _ => surgetank_types::model::Xattrs::new(),
        };
        // Only the superuser can give files away.
        let (uid, gid) = if self.who.uid == 0 { (attr.uid, attr.gid) } else { (self.who.uid, self.who.gid) };
        // A purge of files that are long unread must not remove a file that has just arrived; a server does not check.
        let atime = if self.target.features().plain_files { surgetank_types::clock::now() } else { attr.mtime };
        // A program of another owner must not run with the rights of the user who copied it.
        let perm = if uid == attr.uid && gid == attr.gid { attr.perm } else { attr.perm & !0o6000 };
        Ok(Meta { perm, uid, gid, times: Some((atime, attr.mtime)), xattrs: Some(xattrs) })
    }

    fn make_dir(&self, entry: &Entry) -> io::Result<()> {
        let meta = self.meta_of(entry, &entry.stat)?;
        // Whatever its mode will be, the transfer has to put files there.
        let open = Meta { perm: meta.perm | 0o700, ..meta };
        let temporary = self.part(entry);
        self.target.stage_dir(self.who, &temporary, &open)?;
        self.target.publish(self.who, &temporary, &entry.to, &open).map(drop)
    }

    fn stage<'e>(&self, wish: Wish<'e>) -> io::Result<Ready<'e>>
    where
        'a: 'e,
    {
        let entry = wish.entry;
        let claim = self.claims.claim(&entry.to)?;
        let attr = wish.stat.attr;
        self.target.may_hold(&entry.to)?;
        let meta = self.meta_of(entry, &wish.stat)?;
        let temporary = self.part(entry);
        let staged = match attr.kind {
            Kind::File => self.stage_content(wish, &temporary, &meta)?,
            Kind::Symlink => {
                let target = self.source.read_link(self.who, &entry.from)?;
                self.target.stage_symlink(self.who, &temporary, &target, &meta)?
            }
            Kind::Directory => return Err(Errno::ISDIR.into()),
            other => self.target.stage_node(self.who, &temporary, other, attr.device, &meta)?,
        };
        Ok(Ready { wish, temporary, staged, meta, _claim: claim })
    }

    fn is_the_same(&self, entry: &Entry, there: &StoreStat) -> io::Result<bool> {
        let (here, there) = (entry.stat.attr, there.attr);
        if here.kind != there.kind {
            return Ok(false);
        }
        Ok(match here.kind {
            Kind::File => here.size_bytes == there.size_bytes && is_time(here.mtime, there.mtime),
            Kind::Symlink => {
                self.source.read_link(self.who, &entry.from)? == self.target.read_link(self.who, &entry.to)?
            }
            Kind::Directory => false,
            _ => here.device == there.device,
        })
    }

    fn stage_content(&self, wish: Wish<'_>, temporary: &StorePath, meta: &Meta) -> io::Result<Staged> {
        let entry = wish.entry;
        let changed = || io::Error::new(io::ErrorKind::WouldBlock, "it changed while it was copied");
        let source = self.source.source(self.who, &entry.from)?;
        if let Source::Remote(remote) = &source
            && remote.identity() != wish.stat.identity
        {
            return Err(changed());
        }
        let size_bytes = wish.stat.attr.size_bytes;
        let counted = |bytes| (self.gate)(bytes);
        // A second pass over the same bytes.
        let uncounted = |_| (self.gate)(0);
        // An object is read in one version, or not at all.
        let may_change = matches!(source, Source::Plain(_));
        let staged = match source {
            Source::Plain(file) => self.target.stage_file(self.who, temporary, &entry.to, &file, meta, &counted),
            remote if self.target.features().plain_files => {
                self.target.discard(self.who, temporary)?;
                let file = self.target.create_temporary(self.who, temporary, meta.perm)?;
                remote
                    .copy_to(&file, size_bytes, &counted)
                    .and_then(|()| self.target.stage_in_place(self.who, temporary, meta, &uncounted))
                    .inspect_err(|_| drop(self.target.discard(self.who, temporary)))
            }
            remote => {
                let spooled = spool_file(self.spool)?;
                remote.copy_to(&spooled, size_bytes, &counted)?;
                self.target.stage_file(self.who, temporary, &entry.to, &spooled, meta, &uncounted)
            }
        };
        let staged = staged.map_err(|why| if why.raw_os_error() == Some(libc::ESTALE) { changed() } else { why })?;
        let mut same = staged.identity.size_bytes == size_bytes;
        if may_change {
            let now = self.source.stat(self.who, &entry.from)?.attr;
            same &= now.size_bytes == size_bytes && now.mtime == wish.stat.attr.mtime;
        }
        if same { Ok(staged) } else { Err(self.give_up(temporary, changed())) }
    }

    fn publish(&self, one: &Ready<'_>) -> io::Result<()> {
        let uncounted = |_| (self.gate)(0);
        self.target.verify(self.who, &one.temporary, &one.staged, self.verify, &uncounted)?;
        let to = &one.wish.entry.to;
        if !self.target.check(self.who, to, &one.wish.expect)? {
            return Err(Errno::EXIST.into());
        }
        self.target.replace(self.who, &one.temporary, to, &one.meta).map(drop)
    }
}

/// File systems that keep whole seconds only have the time that was set.
fn is_time(given: Timestamp, kept: Timestamp) -> bool {
    given == kept || kept.nanos.rem_euclid(1_000_000_000) == 0 && given.secs() == kept.secs()
}

/// Without a name: the kernel removes it with this process.
fn spool_file(dir: &Path) -> io::Result<std::fs::File> {
    let flags = rustix::fs::OFlags::TMPFILE | rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC;
    Ok(rustix::fs::open(dir, flags, rustix::fs::Mode::from_raw_mode(0o600))?.into())
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn take<T: Default>(mutex: &Mutex<T>) -> T {
    std::mem::take(&mut *locked(mutex))
}
