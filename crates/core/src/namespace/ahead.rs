//! Bringing in ahead of use: what a person asks for (`surgetank prefetch`) and what rules ask for at the agent's start.
//!
//! A copy is made without any lock, under a hidden name of its own, and only counts if the file is still as it was:
//! programs never wait for it. Nobody is put out for it either: without free room the file stays where it is.

use std::io;

use crate::error::{Errno, Error, FsResult, Result};
use crate::model::{Caller, FileId, Kind, Mode, StoreIdentity};
use crate::placement::AskKind;
use crate::report::run::EventKind;
use crate::store::{Cred, StorePath};

use super::Namespace;
use super::content::Lies;
use super::files::{Wish, hidden_name};
use super::journal::Txn;
use super::tree::Tree;

/// A file that could be brought in, as it is now.
struct Source {
    path: Vec<u8>,
    store_path: StorePath,
    size_bytes: u64,
    owner: Cred,
    identity: Option<StoreIdentity>,
    perm: u32,
    wish: Wish,
}

/// What was brought in.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct BroughtIn {
    pub files: u64,
    pub bytes: u64,
}

fn failed(why: &dyn std::fmt::Display) -> Error {
    Error::new("a file could not be prefetched").why(why).data("the store has it, nothing is lost")
}

/// The agent itself looks.
fn ourselves() -> Caller {
    Caller { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw(), pid: 0, umask: 0 }
}

impl Namespace {
    /// Brings a file of the store into a tier. Returns its bytes; 0 when it is there already, somebody has it open, or
    /// no tier has room. `stop` ends a copy that is being made.
    pub fn prefetch(&self, id: FileId, stop: &(dyn Fn() -> bool + Sync)) -> Result<u64> {
        const TRIES_MAX: usize = 3;
        for _ in 0..TRIES_MAX {
            if let Some(bytes) = self.bring_ahead(id, stop)? {
                return Ok(bytes);
            }
        }
        Ok(0)
    }

    /// `None`: it became another version meanwhile; perhaps only its attributes did, by the drain.
    fn bring_ahead(&self, id: FileId, stop: &(dyn Fn() -> bool + Sync)) -> Result<Option<u64>> {
        let Some(source) = self.worth_bringing(&self.tree(), id) else {
            return Ok(Some(0));
        };
        let from = match self.store.source(self.own_cred(source.owner), &source.store_path) {
            // The drain moved it meanwhile, or it was deleted: another time.
            Err(_) if !self.is_unmoved(id, &source) => return Ok(Some(0)),
            other => other.map_err(|why| failed(&why))?,
        };
        // Another file that the drain moved there.
        let ino = from.ino().map_err(|why| failed(&why))?;
        if source.identity.is_some_and(|identity| identity.ino != ino) {
            return Ok(Some(0));
        }
        // An id of its own, and so a hidden name of its own: the file itself may be placed meanwhile.
        let copy = self.tree().new_id();
        let kind = AskKind::Prefetch { bytes: source.size_bytes };
        let placed = match self.place(&source.path, copy, kind, &source.wish, source.perm, super::files::Via::Mount) {
            Err(fault) if fault.errno == Errno::NOSPC => return Ok(Some(0)),
            other => other.map_err(|why| failed(&why))?,
        };
        let Lies::Tier(device) = placed.content.lies else {
            return Ok(Some(0));
        };
        let device = self.tiers.device(device);
        let gate = |_| {
            if stop() { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
        };
        let copied = placed.writable().and_then(|target| {
            from.copy_to(&target, source.size_bytes, &gate)?;
            Ok(target)
        });
        device.unreserve(placed.reserved_bytes);
        let discard = || drop(device.unlink(&hidden_name(copy)));
        let target = match copied {
            Ok(target) => target,
            Err(why) => {
                discard();
                return match why.raw_os_error() {
                    _ if stop() => Ok(Some(0)),
                    Some(libc::ESTALE) => Ok(None),
                    _ => Err(failed(&why)),
                };
            }
        };
        let _inode = self.lock_inode(id);
        // Changed by somebody else while we copied: the copy is of no version at all.
        let unchanged = self
            .store
            .stat(self.own_cred(source.owner), &source.store_path)
            .is_ok_and(|stat| source.identity.is_some_and(|known| known.is_still(&stat.identity)));
        let mut tree = self.tree();
        let still = self
            .worth_bringing(&tree, id)
            .is_some_and(|now| now.path == source.path && now.identity == source.identity);
        if !unchanged || !still {
            drop(tree);
            discard();
            return Ok(None);
        }
        // Its times are those that programs see: those of the store may be behind.
        let attr = tree.get(id).map(|inode| inode.attr);
        let stat = attr
            .map_or(Ok(()), |attr| super::files::Given::known(&attr).give_times(&target))
            .and_then(|()| Ok(rustix::fs::fstat(&target)?));
        let stat = match stat {
            Ok(stat) => stat,
            Err(why) => {
                drop(tree);
                discard();
                return Err(failed(&why));
            }
        };
        let mut txn = Txn::default();
        self.own(&mut tree, &mut txn, id);
        self.adopt(&mut tree, id, &placed).map_err(|why| failed(&why))?;
        let charged = u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
        device.add_used(i64::try_from(charged).unwrap_or(i64::MAX));
        device.counters().bytes_in.fetch_add(source.size_bytes, crate::sync::atomic::Ordering::Relaxed);
        self.happened.count(EventKind::Fetched, device.tier_name(), "prefetched", source.size_bytes);
        if let Some(inode) = tree.get_mut(id) {
            inode.charged_bytes = charged;
            inode.prefetched = true;
        }
        tree.recount(id);
        self.commit(&tree, txn);
        Ok(Some(source.size_bytes))
    }

    /// Is the file still where it was when we looked, and does nothing wait that will move it or what it lies in?
    fn is_unmoved(&self, id: FileId, source: &Source) -> bool {
        let tree = self.tree();
        let mut at = id;
        while at != FileId::ROOT {
            if tree.is_queued(at) {
                return false;
            }
            let Some(dir) = tree.get(at).and_then(|inode| inode.applied.as_ref()).map(|place| place.0) else {
                return false;
            };
            at = dir;
        }
        tree.applied_path(id).as_ref() == Some(&source.store_path)
    }

    /// `None`: not a file, in a tier already, newer than the store's, or in somebody's hands.
    fn worth_bringing(&self, tree: &Tree, id: FileId) -> Option<Source> {
        let inode = tree.get(id)?;
        let wanted = inode.attr.kind == Kind::File
            && inode.replica.is_none()
            && inode.sealed
            && !inode.dirty()
            && !self.opens().contains_key(&id);
        if !wanted {
            return None;
        }
        let path = tree.logical_path(id)?;
        Some(Source {
            wish: Wish { mode: Mode::Copy, ..self.wish(tree, id, &path) },
            path,
            store_path: tree.applied_path(id)?,
            size_bytes: inode.attr.size_bytes,
            owner: inode.cred(),
            identity: inode.identity.as_deref().copied(),
            perm: inode.attr.perm,
        })
    }

    /// What rules with `prefetch` name. Only directories that such a rule can mean are looked into, and only files that
    /// it means are looked at; what cannot be read or copied is passed over.
    pub fn prefetch_by_rules(&self, stop: &(dyn Fn() -> bool + Sync)) -> BroughtIn {
        let mut done = BroughtIn::default();
        let mut todo = self.rules.prefetched_below();
        while let Some(path) = todo.pop() {
            if stop() {
                break;
            }
            if let Err(why) = self.prefetch_in(&path, &mut todo, &mut done, stop) {
                let path = String::from_utf8_lossy(&path);
                tracing::warn!(%path, errno = %why.errno, "could not be looked into for prefetching");
            }
        }
        done
    }

    /// What a hint wants brought in: a file, or all below a directory. What the store does not have is passed over.
    pub fn prefetch_hinted(&self, path: &[u8], stop: &(dyn Fn() -> bool + Sync)) {
        for id in self.files_below(path).unwrap_or_default() {
            match self.prefetch(id, stop) {
                _ if stop() => return,
                Ok(_) => {}
                Err(why) => tracing::warn!(path = %String::from_utf8_lossy(path), %why, "not prefetched"),
            }
        }
    }

    /// One directory, or a file named by a rule outright.
    fn prefetch_in(
        &self,
        path: &[u8],
        todo: &mut Vec<Vec<u8>>,
        done: &mut BroughtIn,
        stop: &(dyn Fn() -> bool + Sync),
    ) -> FsResult<()> {
        let id = match self.find(path) {
            Err(fault) if matches!(fault.errno, Errno::NOENT | Errno::NOTDIR) => return Ok(()),
            other => other?,
        };
        let kind = self.tree().get(id).map(|inode| inode.attr.kind);
        if kind == Some(Kind::File) {
            self.prefetch_ruled(path, id, done, stop);
        }
        if kind != Some(Kind::Directory) {
            return Ok(());
        }
        for listed in self.merged(&ourselves(), id)? {
            if stop() {
                break;
            }
            let mut child = path.to_vec();
            if !child.is_empty() {
                child.push(b'/');
            }
            child.extend_from_slice(&listed.name);
            match listed.kind {
                Kind::Directory => todo.push(child),
                Kind::File if self.decide(&child).prefetch => match self.resolve(&ourselves(), id, &listed.name) {
                    Ok(file) => self.prefetch_ruled(&child, file, done, stop),
                    Err(fault) if fault.errno == Errno::NOENT => {}
                    Err(fault) => return Err(fault),
                },
                _ => {}
            }
        }
        Ok(())
    }

    fn prefetch_ruled(&self, path: &[u8], id: FileId, done: &mut BroughtIn, stop: &(dyn Fn() -> bool + Sync)) {
        if !self.decide(path).prefetch {
            return;
        }
        match self.prefetch(id, stop) {
            Ok(0) => {}
            Ok(bytes) => {
                done.files += 1;
                done.bytes += bytes;
            }
            Err(why) => {
                tracing::warn!(path = %String::from_utf8_lossy(path), %why, "not prefetched")
            }
        }
    }

    /// Files below a path that the tiers hold or the store has; for evict, pin and prefetch of whole trees.
    pub fn files_below(&self, path: &[u8]) -> Result<Vec<FileId>> {
        let shown = String::from_utf8_lossy(path).into_owned();
        let failed = |why: &dyn std::fmt::Display| Error::new(format!("{shown}: cannot be looked up")).why(why);
        let caller = ourselves();
        let mut files = Vec::new();
        let mut todo = vec![self.find(path).map_err(|why| failed(&why))?];
        while let Some(id) = todo.pop() {
            let kind = self.tree().get(id).map(|inode| inode.attr.kind);
            match kind {
                Some(Kind::Directory) => {
                    for listed in self.merged(&caller, id).map_err(|why| failed(&why))? {
                        match self.resolve(&caller, id, &listed.name) {
                            Ok(child) => todo.push(child),
                            Err(fault) if fault.errno == Errno::NOENT => {}
                            Err(fault) => return Err(failed(&fault)),
                        }
                    }
                }
                Some(Kind::File) => files.push(id),
                _ => {}
            }
        }
        Ok(files)
    }

    /// Files that a glob (relative to the directory) or a path names.
    pub fn files_matching(&self, pattern: &[u8]) -> Result<Vec<FileId>> {
        let text = String::from_utf8_lossy(pattern).into_owned();
        if !text.contains(['*', '?', '[', '{']) {
            return self.files_below(pattern);
        }
        let glob = globset::GlobBuilder::new(&text)
            .literal_separator(true)
            .build()
            .map_err(|why| Error::new(format!("{text}: not a pattern")).why(why))?;
        let matcher = glob.compile_matcher();
        // Only the part of the tree that the pattern's plain beginning names is walked.
        let plain: Vec<&str> = text.split('/').take_while(|part| !part.contains(['*', '?', '[', '{'])).collect();
        let mut files = Vec::new();
        for id in self.files_below(plain.join("/").as_bytes())? {
            let path = self.tree().logical_path(id).unwrap_or_default();
            let path: &std::ffi::OsStr = std::os::unix::ffi::OsStrExt::from_bytes(path.as_slice());
            if matcher.is_match(std::path::Path::new(path)) {
                files.push(id);
            }
        }
        Ok(files)
    }
}
