//! Carries out one operation in the store.
//!
//! Each operation recognises its own work, so its repetition after a crash (or after a sync that failed) does no harm.
//! Each leaves alone what another client changed.

mod names;

use std::io;

use surgetank_state::{Copied, Inode, Name, Place, Tree, file_of};
use surgetank_store::{Cred, Expect, Meta, StorePath, Turn};
use surgetank_types::model::{CONFLICT_INFIX, FileId, Kind, OpKind, RunId, Seq, StoreIdentity};
use surgetank_types::sync::{Arc, PoisonError};

use crate::base::Base;
use crate::content::Location;
use crate::drain::again::Recognition;
use crate::drain::attempts::{Attempts, already_absent, not_yet};
use crate::drain::stage::{Stager, meta_of};
use crate::files::Files;
use crate::metadata::Metadata;
use crate::metadata::inode_locks::INODE_LOCK_TIMEOUT;

/// The result of an operation.
#[derive(Default)]
pub(super) struct Done {
    /// Directories whose names changed. By id, because a later operation of the batch may move them.
    pub dirs: Vec<FileId>,
    /// Files that the store no longer has because of the operation.
    pub removed: Vec<FileId>,
}

/// An operation in progress.
pub(super) struct Work<'a> {
    pub seq: Seq,
    pub run: RunId,
    pub kind: &'a OpKind,
    /// Another member of the pool has taken its directory over: it replaces nothing.
    pub is_taken: bool,
}

/// `None`: the name is taken.
fn unless_taken<T>(published: io::Result<T>) -> io::Result<Option<T>> {
    match published {
        Err(why) if why.raw_os_error() == Some(libc::EEXIST) => Ok(None),
        published => published.map(Some),
    }
}

fn no_place() -> io::Error {
    not_yet("its directory is not in the store yet")
}

/// A copy, the name for it, and the attributes.
type Publication<'a> = (&'a StorePath, &'a StorePath, &'a Meta);

/// Carries out one operation in the store.
pub(crate) struct Executor {
    pub(super) base: Base,
    pub(super) metadata: Arc<Metadata>,
    pub(super) files: Arc<Files>,
    pub(super) attempts: Arc<Attempts>,
    pub(super) recognition: Arc<Recognition>,
    pub(super) stager: Arc<Stager>,
}

impl Executor {
    pub(super) fn new(
        base: &Base,
        metadata: &Arc<Metadata>,
        files: &Arc<Files>,
        (attempts, recognition, stager): (&Arc<Attempts>, &Arc<Recognition>, &Arc<Stager>),
    ) -> Self {
        Self {
            base: base.clone(),
            metadata: metadata.clone(),
            files: files.clone(),
            attempts: attempts.clone(),
            recognition: recognition.clone(),
            stager: stager.clone(),
        }
    }

    /// How the store must have a file; if it differs, another client changed it.
    fn expects(&self, tree: &Tree, id: FileId) -> Option<Expect> {
        let inode = tree.get(id)?;
        let identity = *inode.identity.as_ref()?;
        let in_place = || self.metadata.open_of(id).is_some_and(|open| open.content().location == Location::Store);
        Some(if identity.is_bare() || !inode.sealed && in_place() {
            Expect::Inode(identity.ino)
        } else if identity.is_touched() || tree.is_hard_linked(id) {
            Expect::Linked(identity)
        } else {
            Expect::Identity(identity)
        })
    }

    /// Does the store have what the agent knows? A program that writes in place may change both during the check.
    fn is_as_known(&self, owner: Cred, path: &StorePath, expect: impl Fn(&Tree) -> Expect) -> io::Result<bool> {
        let mut known = expect(&self.metadata.read_tree());
        loop {
            if self.attempts.as_owner(owner, |who| self.base.store.check(who, path, &known))? {
                return Ok(true);
            }
            let now = expect(&self.metadata.read_tree());
            if now == known {
                return Ok(false);
            }
            known = now;
        }
    }

    /// What another client must not have changed when the operation's turn comes.
    fn expectation(&self, tree: &Tree, over: Option<FileId>, at: (FileId, &[u8])) -> Expect {
        let Some((id, inode)) = over.and_then(|over| Some((over, tree.get(over)?))) else {
            return Expect::Absent;
        };
        // The file counts under each of its names: a hard link is the same file.
        match self.expects(tree, id) {
            Some(expect) => expect,
            None if inode.applied.as_ref().is_some_and(|(dir, name)| *dir == at.0 && **name == *at.1) => {
                Expect::Unknown
            }
            None => Expect::Absent,
        }
    }

    /// `turn`: the operation runs together with others, and must show after those before it.
    pub(super) fn execute(&self, seq: Seq, turn: Option<Turn<'_>>) -> io::Result<Done> {
        let (kind, run) = {
            let tree = self.metadata.read_tree();
            let Some(op) = tree.ops.get(&seq) else {
                return Ok(Done::default());
            };
            (op.kind.clone(), op.run)
        };
        self.recognition.settle_doubts(&kind)?;
        self.let_readers_have(seq, &kind)?;
        let one = Work { seq, run, kind: &kind, is_taken: self.is_taken(seq, &kind)? };
        match &kind {
            OpKind::Publish { .. } => {}
            _ if one.is_taken => return Ok(self.leave_to_others(&one)),
            _ => {}
        }
        match &kind {
            OpKind::Publish { file, dir, name, over } => {
                let what = self.metadata.read_tree().get(*file).map(|inode| inode.attr.kind);
                match what {
                    Some(Kind::File) => self.publish_file(&one, *file, *over, turn),
                    Some(Kind::Directory) => self.publish_dir(&one, *file, (*dir, name)),
                    Some(_) => self.publish_special(&one, *file, (*dir, name), *over),
                    None => Ok(Done::default()),
                }
            }
            OpKind::SetMeta { file } => self.set_meta(&one, *file),
            OpKind::Link { file, dir, name } => self.link(&one, *file, (*dir, name)),
            OpKind::Rename { file, from_dir, from, to_dir, to, over } => {
                self.rename(&one, *file, (*from_dir, from), (*to_dir, to), *over)
            }
            OpKind::Exchange { a, a_dir, a_name, b, b_dir, b_name } => {
                self.exchange(&one, (*a, *a_dir, a_name), (*b, *b_dir, b_name))
            }
            OpKind::Unlink { file, dir, name } => self.unlink(&one, *file, (*dir, name)),
            OpKind::RemoveDir { file, dir, name } => self.remove_dir(&one, *file, (*dir, name)),
        }
    }

    /// Lets readers get the rest of a file that the operation removes from a store without plain files.
    fn let_readers_have(&self, seq: Seq, kind: &OpKind) -> io::Result<()> {
        let goes = match kind {
            OpKind::Unlink { file, .. } => Some(*file),
            OpKind::Publish { file, over, .. } | OpKind::Rename { file, over, .. } => over.filter(|over| over != file),
            _ => None,
        };
        let Some(id) = goes.filter(|_| !self.base.store.features().plain_files) else { return Ok(()) };
        self.files.fetches.await_fetch(id, &|| self.attempts.stopping()).or_else(|why| {
            let tried = self.metadata.read_tree().ops.get(&seq).and_then(|op| op.first_failure);
            // Readers do not delay later operations indefinitely.
            if tried.is_some_and(|first| first.elapsed() >= self.base.config.retry) {
                return Ok(());
            }
            let what = format!(
                "a program reads a file that is being removed, and the rest of the file cannot be fetched: {}",
                io::Error::from(why)
            );
            Err(io::Error::new(io::ErrorKind::WouldBlock, what))
        })
    }

    /// May an earlier agent have carried it out?
    fn is_doubtful(&self, seq: Seq) -> bool {
        self.metadata.read_tree().ops.get(&seq).is_some_and(|op| op.doubtful)
    }

    fn place(&self, at: (FileId, &[u8])) -> io::Result<(StorePath, StorePath)> {
        let dir = self.metadata.read_tree().applied_path(at.0).ok_or_else(no_place)?;
        let path = dir.join(at.1);
        Ok((dir, path))
    }

    /// Does the store have this very file at the path?
    fn is_there(&self, file: FileId, path: &StorePath, owner: Cred) -> io::Result<bool> {
        let known = self.recognition.identity(file).map(|identity| identity.ino);
        Ok(self.recognition.there(path, owner)?.is_some_and(|stat| known.is_none_or(|ino| ino == stat.identity.ino)))
    }

    /// The store is not as the operation expects. If an earlier agent may have carried the operation out, that agent
    /// changed it.
    fn stranger(&self, one: &Work<'_>, path: &StorePath, what: &str) {
        if self.is_doubtful(one.seq) {
            tracing::info!(%path, what, "an operation that an earlier agent may have carried out");
        } else {
            self.attempts.conflict(one.run, &path.0, what, None);
        }
    }

    /// Another client's file has the name, so the agent's file gets another name.
    fn beside(&self, one: &Work<'_>, dir: &StorePath, name: &[u8]) -> Box<[u8]> {
        let beside = conflict_name(name, &self.base.key, one.run);
        let what = match one.is_taken {
            true => "this node was lost to its pool, and another one has taken the directory over; both are kept",
            false => "another client changed it in the store meanwhile; both are kept",
        };
        self.attempts.conflict(one.run, &dir.join(name).0, what, Some(&dir.join(&beside)));
        beside
    }

    /// The file is in the store under this name now, and replaces the file before it.
    pub(super) fn applied(&self, kind: &OpKind, at: (FileId, &[u8]), identity: StoreIdentity) -> Done {
        let removed = self.carried_out(kind, Some((at.0, Name::from(at.1))), Some(identity));
        Done { dirs: vec![at.0], removed }
    }

    /// Sets the file's place and identity in one step, because look-ups compare the two.
    fn carried_out(&self, kind: &OpKind, at: Option<Place>, identity: Option<StoreIdentity>) -> Vec<FileId> {
        let removed = {
            let mut tree = self.metadata.write_tree();
            let removed = tree.carried_out(kind, at);
            if let (Some(identity), Some(inode)) = (identity, tree.get_mut(file_of(kind))) {
                inode.identity = Some(identity);
            }
            removed
        };
        for id in &removed {
            self.lost_a_link(*id);
        }
        removed
    }

    /// The store removed one name of a file. If the file has others, its ctime changed there by the drain's own work.
    fn lost_a_link(&self, file: FileId) {
        let rest = {
            let tree = self.metadata.read_tree();
            tree.applied_path(file).zip(tree.get(file).map(Inode::cred))
        };
        if let Some((path, owner)) = rest {
            self.reidentify(file, &path, owner);
        }
    }

    fn publish_file(
        &self,
        one: &Work<'_>,
        file: FileId,
        over: Option<FileId>,
        turn: Option<Turn<'_>>,
    ) -> io::Result<Done> {
        let staged = self.attempts.staged.lock().unwrap_or_else(PoisonError::into_inner).get(&one.seq).cloned();
        let (at, is_again, owner, meta, temporary, replaces) = {
            let tree = self.metadata.read_tree();
            let inode = tree.get(file).ok_or_else(|| not_yet("the file is not known"))?;
            let at = tree.destination(one.kind).ok_or_else(no_place)?;
            let is_again = inode.applied.is_some();
            // (`None`: its directory was removed, and the copy with it.)
            let temporary =
                staged.as_ref().and_then(|copied| Some(tree.applied_path(copied.dir)?.join(&copied.temporary)));
            // The name belongs to another file.
            let replaces = !is_again && over.is_some_and(|over| over != file);
            (at, is_again, inode.cred(), meta_of(inode), temporary, replaces)
        };
        let at = (at.0, &*at.1);
        let (dir, path) = self.place(at)?;
        let temporary = temporary.ok_or_else(|| self.recognition.is_copied_again(one.seq))?;
        let (store, mut name, mut beside) = (&self.base.store, Box::from(at.1), false);
        let expect = |tree: &Tree| match is_again {
            true => self.expects(tree, file).unwrap_or(Expect::Unknown),
            false => self.expectation(tree, over, at),
        };
        let in_turn = || turn.map_or(Ok(()), |turn| turn.wait());
        let new =
            !one.is_taken && !is_again && over.is_none() && !self.is_doubtful(one.seq) && !self.is_spill(file, &staged);
        if new && expect(&self.metadata.read_tree()) == Expect::Absent {
            let published = self.attempts.as_owner(owner, |who| store.publish_absent(who, &temporary, &path, turn));
            if let Some(identity) = unless_taken(published)? {
                return Ok(self.published(one.kind, at, identity, &staged));
            }
        }
        if one.is_taken || !self.is_as_known(owner, &path, expect)? {
            in_turn()?;
            let ours = self.recognition.published_before(one.seq, owner, &path)?;
            let version = staged.as_ref().map(|copied| copied.version);
            // An older version of the agent's own is replaced.
            let is_older =
                ours.as_ref().is_some_and(|(_, prepared)| version.is_some_and(|version| version != *prepared));
            if ours.is_some_and(|_| !is_older) {
                // It was renamed before a crash or a failed sync; only the catalog was behind.
                if let Some(Copied { dir, temporary, .. }) = &staged {
                    self.metadata.write_tree().discards.push((*dir, temporary.clone(), owner));
                }
                return self.found_published(one, at, (&path, owner), &staged);
            }
            // Published before, and the store failed before it answered: the same bytes are not a conflict.
            let same = is_older
                || match &staged {
                    Some(copied) => self.recognition.has_these_bytes(owner, &path, &copied.staged)?,
                    None => false,
                };
            beside = one.is_taken || !same;
        } else if is_again
            && self.is_doubtful(one.seq)
            && self.recognition.in_place_already(one.seq, owner, &temporary, &path, staged.as_ref())?.is_some()
        {
            return self.found_published(one, at, (&path, owner), &staged);
        }
        self.recognition.is_still_copied(one.seq, owner, &temporary, staged.as_ref())?;
        if beside {
            name = self.beside(one, &dir, at.1);
        }
        self.write_down(one.seq, &staged);
        let target = dir.join(&name);
        let known = match is_again && target == path {
            true => self.recognition.begin_overwrite(file, owner, &temporary, &target)?,
            false => None,
        };
        let open = self.is_spill(file, &staged).then(|| self.metadata.open_of(file)).flatten();
        if replaces || open.is_some() {
            in_turn()?;
        }
        // A program that writes to the temporary writes to the file itself from now on.
        let gate = open.as_ref().map(|open| open.gate.write().unwrap_or_else(PoisonError::into_inner));
        let with = (&temporary, &target, &meta);
        let keeps = |dir| self.stager.spares.keeps(&self.metadata.read_tree(), file, one.seq, dir);
        let stays = is_again && known.is_none() && target == path;
        let published = match (turn, &staged) {
            (None, Some(copied)) if stays && keeps(copied.dir) => {
                self.publish_keeping(one.seq, file, owner, copied, with)
            }
            _ => self.publish_replacing((file, one.seq), owner, with, turn, replaces),
        };
        let identity = published.inspect_err(|_| {
            if let Some(known) = known {
                self.recognition.end_overwrite(file, owner, &target, known);
            }
        })?;
        if let Some(open) = &open {
            self.goes_on_there(one, open, (&target, owner), identity);
        }
        drop(gate);
        Ok(self.published(one.kind, (at.0, &name), identity, &staged))
    }

    /// Publishes a copy; the version before becomes the spare.
    fn publish_keeping(
        &self,
        seq: Seq,
        file: FileId,
        owner: Cred,
        copied: &Copied,
        (temporary, target, meta): Publication<'_>,
    ) -> io::Result<StoreIdentity> {
        let store = &self.base.store;
        let (identity, kept) =
            self.attempts.as_owner(owner, |who| match store.publish_keeping(who, temporary, target, meta)? {
                Some((identity, kept)) => Ok((identity, Some(kept))),
                None => store.publish(who, temporary, target, meta).map(|identity| (identity, None)),
            })?;
        let kept = kept.map(|kept| (copied.dir, copied.temporary.clone(), owner, kept));
        if let Some(unused) = self.stager.spares.published(file, seq, identity, kept) {
            self.metadata.write_tree().discards.push(unused);
        }
        Ok(identity)
    }

    /// Publishes a copy; no name is left for the version before.
    fn publish_replacing(
        &self,
        (file, seq): (FileId, Seq),
        owner: Cred,
        (temporary, target, meta): Publication<'_>,
        turn: Option<Turn<'_>>,
        replaces: bool,
    ) -> io::Result<StoreIdentity> {
        let store = &self.base.store;
        let identity = self.attempts.as_owner(owner, |who| match turn {
            _ if replaces => store.replace(who, temporary, target, meta),
            Some(turn) => store.publish_in_turn(who, temporary, target, meta, turn),
            None => store.publish(who, temporary, target, meta),
        })?;
        let _ = self.stager.spares.published(file, seq, identity, None);
        Ok(identity)
    }

    /// An earlier agent's copy is not in place. The catalog records this agent's copy, so that the next agent
    /// recognises it.
    fn write_down(&self, seq: Seq, staged: &Option<Copied>) {
        let mut tree = self.metadata.write_tree();
        let (Some(op), Some(copied)) = (tree.ops.get_mut(&seq), staged) else {
            return;
        };
        let now = copied.prepared();
        if op.prepared == Some(now) {
            return;
        }
        op.prepared = Some(now);
        tree.txn.op(seq);
        drop(tree);
        if let Err(why) = self.metadata.sync_catalog() {
            tracing::warn!(%why, "the catalog cannot be synced: after a power loss a publication may be repeated");
        }
    }

    pub(super) fn owner_and_meta(&self, file: FileId) -> io::Result<(Cred, Meta)> {
        let tree = self.metadata.read_tree();
        let inode = tree.get(file).ok_or_else(no_place)?;
        Ok((inode.cred(), meta_of(inode)))
    }

    fn set_meta(&self, one: &Work<'_>, file: FileId) -> io::Result<Done> {
        let Some(path) = self.metadata.read_tree().applied_path(file) else {
            return Ok(Done::default());
        };
        // With the inode's lock no program begins or ends to write in place meanwhile, and newer attributes do not
        // arrive early. Older attributes must not replace newer ones, nor what is known of a newer version. (A file on
        // a tier is opened there, and never waits for the store.)
        let in_place = self.base.store.features().plain_files
            && self.metadata.read_tree().get(file).is_some_and(|inode| inode.replica.is_none());
        let _inode = in_place.then(|| self.metadata.lock_inode_within(file, INODE_LOCK_TIMEOUT));
        let (owner, mut meta) = self.owner_and_meta(file)?;
        let (kind, again) = self.metadata.read_tree().get(file).map_or((Kind::File, false), |inode| {
            (inode.attr.kind, inode.set_meta.is_some_and(|later| later != one.seq))
        });
        // Later attributes are set in order, after the files that the owner puts into the directory.
        if again && kind == Kind::Directory {
            meta.perm |= 0o700;
        }
        let in_place = self.attempts.is_written_in_place(file);
        if in_place {
            meta.times = None;
        }
        let ours =
            self.attempts.as_owner(owner, |who| self.files.access.is_ours_there(file, who, &path, &meta, in_place));
        match ours {
            Ok(true) => {}
            // The catalog does not record an earlier agent's changes to it: the file may still be the agent's own.
            Ok(false) if self.is_doubtful(one.seq) => {}
            Ok(false) => {
                self.stranger(one, &path, "another client changed it in the store before its mode, owner and times were set there; theirs was left alone");
                return Ok(Done::default());
            }
            Err(why) if already_absent(&why) => return Ok(Done::default()),
            Err(why) => return Err(why),
        }
        match self.attempts.as_owner(owner, |who| self.base.store.set_meta(who, &path, kind, &meta)) {
            Ok(identity) => {
                crash_point!("drain.attributes_set");
                if let Some(inode) = self.metadata.write_tree().get_mut(file)
                    && !inode.is_dir()
                {
                    inode.identity = Some(identity);
                }
                Ok(Done::default())
            }
            // Another client removed it: there is nothing to set attributes of.
            Err(why) if already_absent(&why) => Ok(Done::default()),
            Err(why) => Err(why),
        }
    }

    /// Called after the drain changed something of a file in the store other than its content.
    fn reidentify(&self, file: FileId, path: &StorePath, owner: Cred) {
        let there = self.recognition.there(path, owner);
        let mut tree = self.metadata.write_tree();
        let Some(inode) = tree.get_mut(file).filter(|inode| !inode.is_dir()) else { return };
        match there {
            Ok(Some(stat)) => {
                if inode.identity.as_ref().is_none_or(|known| known.touched().is(&stat.identity) && !known.is_bare()) {
                    inode.identity = Some(stat.identity);
                }
            }
            Ok(None) => {}
            Err(why) => {
                tracing::info!(%path, %why, "the identity of a file in the store is unknown after a change");
                inode.identity = inode.identity.as_ref().map(|known| known.touched());
            }
        }
    }
}

/// `NAME.surgetank-conflict-KEY-RUN`, shortened where a name may not be longer.
fn conflict_name(name: &[u8], key: &str, run: RunId) -> Box<[u8]> {
    let suffix = format!("{CONFLICT_INFIX}{key}-{}", run.0);
    let keep = name.len().min(255 - suffix.len().min(255));
    let mut out = name[..keep].to_vec();
    out.extend_from_slice(suffix.as_bytes());
    out.into_boxed_slice()
}
