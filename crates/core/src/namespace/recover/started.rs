//! Started operations: how far the drain came before the agent died.
//!
//! The drain records which operations it is about to carry out. Until they are durable, the catalog keeps where
//! everything was before them. The drain carries them out in order. So the store is in the state after the first *k* of
//! them, for some *k*. Recovery takes the largest *k* for which every name of the operations holds the expected file.
//!
//! - If several *k* match, the names are the same after each.
//! - Where a rename is not one step, the next operation may be half done. A directory's rename is completed then.
//! - The first *k* leave the queue, and the others begin again. So programs see the right state from the first moment.
//! - Attributes do not show in names, so their changes are carried out again.
//! - If no *k* matches, another client has changed these very names. Then all operations stay in doubt, and each one
//!   recognises its own work as well as it can.
//!
//! The danger that this avoids: an operation that is carried out twice, or not at all.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::time::Duration;

use surgetank_state::{Inode, Name, Place, Tree, files_of};
use surgetank_store::{Cred, StorePath, StoreStat};
use surgetank_types::error::Result;
use surgetank_types::model::{FileId, Kind, OpKind, Prepared, Seq, StoreIdentity};

use crate::base::users::own_cred;
use crate::namespace::recover::Recovery;

struct Started {
    seq: Seq,
    kind: OpKind,
    prepared: Option<Prepared>,
    /// The holder of each name before the operation and after it.
    names: Vec<(Place, Option<FileId>, Option<FileId>)>,
    /// The names that its temporary may have before its rename, in whatever directory it was made. The temporary to
    /// which a file was spilled after its copy has another name.
    temporaries: Vec<Name>,
}

/// The expected holder of a name at some point.
struct Expected<'a> {
    path: StorePath,
    /// Another path at which it may be.
    or_at: Option<StorePath>,
    holder: Option<Holder<'a>>,
    who: Cred,
}

/// A directory whose rename has begun and is not one step: the files below it may have their new names already.
struct Moving {
    from: StorePath,
    to: StorePath,
    who: Cred,
}

impl Started {
    fn is_meta(&self) -> bool {
        matches!(self.kind, OpKind::SetMeta { .. })
    }
}

impl Moving {
    fn new_name_of(&self, path: &StorePath) -> Option<StorePath> {
        let rest = path.is_below(&self.from).then(|| &path.0[self.from.0.len()..])?;
        Some(StorePath([&self.to.0, rest].concat()))
    }
}

struct Holder<'a> {
    kind: Kind,
    /// Inode number before any publication among the operations.
    ino: Option<u64>,
    /// The last publication among the operations so far, and the possible names of its temporary.
    published: Option<(Option<Prepared>, &'a [Name])>,
}

/// A server may still be working on requests of the dead agent. Recovery waits this long before each look. It looks
/// again when the state is not one that these operations can have left.
const LATE: Duration = Duration::from_millis(700);
const LOOKS_MAX: usize = 3;

type Looked = HashMap<StorePath, Option<StoreStat>>;

impl Recovery<'_> {
    /// Settles the operations that an earlier agent had started. An error: the store does not tell what is left there.
    pub(crate) fn settle_started(&self) -> Result<()> {
        let mut started = self.started();
        if started.is_empty() {
            return Ok(());
        }
        let kinds: Vec<OpKind> = started.iter().map(|one| one.kind.clone()).collect();
        let before: Vec<(FileId, Vec<Place>)> = {
            let tree = self.metadata.read_tree();
            let files = kinds.iter().flat_map(files_of);
            files.filter_map(|id| Some((id, tree.get(id)?.names_in_store()))).collect()
        };
        {
            let mut tree = self.metadata.write_tree();
            for one in &mut started {
                one.names = names_of(&tree, &one.kind);
                tree.carried_out(&one.kind, None);
            }
        }
        let (mut looked, mut done) = (Looked::new(), None);
        let is_server = !self.base.store.features().plain_files && self.base.store.features().publications_at_once > 1;
        for _ in 0..if is_server { LOOKS_MAX } else { 1 } {
            if is_server {
                surgetank_types::sync::thread::sleep(LATE);
            }
            looked.clear();
            done = self.how_many(&started, &before, &mut looked);
            if done.is_some() {
                break;
            }
        }
        let Some(mut done) = done else {
            tracing::warn!(operations = started.len(), "the store is not as any of the started operations left it");
            return Ok(());
        };
        tracing::info!(started = started.len(), done, "operations that an earlier agent had started");
        // Attributes do not show in names, so they are set again.
        let mut gone: Vec<Vec<FileId>> = {
            let mut tree = self.metadata.write_tree();
            started[..done].iter().filter(|one| !one.is_meta()).map(|one| tree.carried_out(&one.kind, None)).collect()
        };
        let next = (done..started.len()).find(|index| !started[*index].is_meta());
        let mut moving = next.and_then(|next| self.moving(&self.metadata.read_tree(), started.get(next)));
        if let (Some(next), Some(begun)) = (next, &moving)
            && self.finish_moving(begun)
        {
            gone.push(self.metadata.write_tree().carried_out(&started[next].kind, None));
            (done, moving) = (next + 1, None);
            looked.clear();
        }
        let is_done = |(index, one): &(usize, Started)| *index < done && !one.is_meta();
        let (done, rest): (Vec<_>, Vec<_>) = started.into_iter().enumerate().partition(is_done);
        let [done, rest] = [done, rest].map(|some| some.into_iter().map(|(_, one)| one).collect::<Vec<Started>>());
        // The earlier agent may have died before the store's disk had the directories of the renamed files.
        if let Err(why) = self.sync_where(&done) {
            tracing::warn!(%why, "the store could not be synced: what was started stays in doubt");
            self.put_back(&before);
            return Ok(());
        }
        if let Err(why) = self.look_at_files(done.iter().chain(&rest), moving.as_ref(), &mut looked) {
            tracing::warn!(%why, "the store could not be looked at");
        }
        self.look_at_spills(&done, &mut looked)?;
        self.retire_started(&done, &gone, &rest, &looked);
        self.begin_again(&rest, &looked);
        Ok(())
    }

    /// The number of operations after which the store is in its present state.
    fn how_many(&self, started: &[Started], before: &[(FileId, Vec<Place>)], looked: &mut Looked) -> Option<usize> {
        // From the end: a file that was overwritten in place has the same inode before and after.
        let found = (0..=started.len()).rev().find_map(|count| {
            self.put_back(before);
            {
                let mut tree = self.metadata.write_tree();
                for one in &started[..count] {
                    tree.carried_out(&one.kind, None);
                }
            }
            match self.is_as_after(started, count, looked) {
                Ok(true) => Some(Some(count)),
                Ok(false) => None,
                Err(why) => {
                    tracing::warn!(%why, "the store could not be looked at: what was started stays in doubt");
                    Some(None)
                }
            }
        });
        self.put_back(before);
        found.flatten()
    }

    /// Completes a directory's rename that was cut off: some of its files have their new names, the others their old
    /// ones. Otherwise processes that continue would miss some of them, so this comes before any request. `false`: the
    /// rename had not begun, or the store refuses it now.
    fn finish_moving(&self, moving: &Moving) -> bool {
        let renamed = self.left_there(&moving.from, moving.who).and_then(|there| match there {
            Some(_) => self
                .files
                .copies
                .as_either(moving.who, |who| self.base.store.rename(who, &moving.from, &moving.to))
                .map(|()| true),
            None => Ok(false),
        });
        renamed.unwrap_or_else(|why| {
            tracing::warn!(%why, from = %moving.from, to = %moving.to, "a directory's rename was cut off, and cannot be finished now");
            false
        })
    }

    fn sync_where(&self, done: &[Started]) -> std::io::Result<()> {
        let (who, dirs) = {
            let tree = self.metadata.read_tree();
            let places = done.iter().flat_map(|one| one.names.iter().map(|(place, ..)| place.0));
            let dirs: std::collections::BTreeSet<FileId> = places.collect();
            let owner = tree.get(FileId::ROOT).map_or(Cred { uid: 0, gid: 0 }, Inode::cred);
            (owner, dirs.into_iter().filter_map(|dir| tree.applied_path(dir)).collect::<Vec<_>>())
        };
        // (What is gone needs no sync.)
        dirs.iter().try_for_each(|dir| match self.base.store.sync_dirs(own_cred(who), std::slice::from_ref(dir)) {
            Err(why) if crate::base::queries::is_absent(&why) => Ok(()),
            synced => synced,
        })
    }

    /// Looks at every file of the operations, at its present place.
    fn look_at_files<'a>(
        &self,
        started: impl Iterator<Item = &'a Started>,
        moving: Option<&Moving>,
        looked: &mut Looked,
    ) -> std::io::Result<()> {
        let paths: Vec<(StorePath, Cred)> = {
            let tree = self.metadata.read_tree();
            let files = started.flat_map(|one| files_of(&one.kind));
            files.filter_map(|id| Some((tree.applied_path(id)?, tree.get(id)?.cred()))).collect()
        };
        for (path, who) in paths {
            if self.look(&path, who, looked)?.is_none()
                && let Some(instead) = moving.and_then(|moving| moving.new_name_of(&path))
            {
                let there = self.look(&instead, who, looked)?;
                looked.insert(path, there);
            }
        }
        Ok(())
    }

    /// Adopts staged copies. A publication that began must complete; if its file was deleted or replaced since, the
    /// staged copy in the store is all that is left. So the copy is published. (Otherwise programs would see an empty
    /// file until its removal.)
    pub(crate) fn take_over_copies(&self) {
        let wanted: Vec<(FileId, Seq, Prepared, Cred)> = {
            let tree = self.metadata.read_tree();
            let begun = tree.ops.iter().filter(|(_, op)| op.certain && matches!(op.kind, OpKind::Publish { .. }));
            begun
                .filter_map(|(seq, op)| {
                    let inode = tree.get(op.file()).filter(|inode| inode.attr.kind == Kind::File)?;
                    let nothing = inode.logical.is_none() && inode.replica.is_none() && inode.spill().is_none();
                    nothing.then_some((op.file(), *seq, op.prepared?, inode.cred()))
                })
                .collect()
        };
        if wanted.is_empty() {
            return;
        }
        let dirs = self.files.temporaries.dirs_of_temporaries();
        for (file, seq, prepared, who) in wanted {
            let name = self.files.temporaries.staged_name(seq);
            let found = dirs.iter().find(|(_, path)| {
                let there = self.left_there(&path.join(&name), who).unwrap_or_else(|why| {
                    tracing::warn!(%why, %path, "a directory of the store does not say whether a copy is left there");
                    None
                });
                there.is_some_and(|stat| prepared.is(&stat.identity) && prepared.identity.ino == stat.identity.ino)
            });
            let mut tree = self.metadata.write_tree();
            if let Some((dir, _)) = found
                && let Some(inode) = tree.get_mut(file)
            {
                inode.extra_mut().spill = Some((*dir, name));
                tree.txn.file(file);
                self.metadata.commit(&mut tree);
            } else {
                tracing::warn!(
                    seq = seq.number(),
                    found = found.is_some(),
                    "nothing is left of a file whose publication was begun"
                );
            }
        }
    }

    fn started(&self) -> Vec<Started> {
        let mut tree = self.metadata.write_tree();
        let mut started = Vec::new();
        let mut fresh = Vec::new();
        for (seq, op) in &tree.ops {
            if !op.doubtful {
                fresh.push(*seq);
                continue;
            }
            let spill = tree.get(op.file()).and_then(Inode::spill).map(|(_, name)| name.clone());
            started.push(Started {
                seq: *seq,
                kind: op.kind.clone(),
                prepared: op.prepared,
                names: Vec::new(),
                temporaries: std::iter::once(self.files.temporaries.staged_name(*seq)).chain(spill).collect(),
            });
        }
        for seq in fresh {
            if let Some(op) = tree.ops.get_mut(&seq) {
                // Its staged copy goes, unless it may be all that is left of the file.
                op.prepared = op.prepared.filter(|_| op.certain);
            }
        }
        started
    }

    fn put_back(&self, before: &[(FileId, Vec<Place>)]) {
        let mut tree = self.metadata.write_tree();
        for (id, names) in before {
            if let Some(inode) = tree.get_mut(*id) {
                inode.set_names_in_store(names.clone());
            }
        }
    }

    /// Is the store in the state after the first `count` operations? The tree already is.
    fn is_as_after(&self, started: &[Started], count: usize, looked: &mut Looked) -> std::io::Result<bool> {
        let expected = {
            let tree = self.metadata.read_tree();
            let moving = self.moving(&tree, started.get(count));
            let mut places: Vec<(&Place, Option<FileId>)> = Vec::new();
            let mut unknown: Vec<&Place> = Vec::new();
            for one in &started[..count] {
                for (place, _, after) in &one.names {
                    match places.iter_mut().find(|(other, _)| *other == place) {
                        Some((_, holder)) => *holder = *after,
                        None => places.push((place, *after)),
                    }
                }
            }
            for (index, one) in started[count..].iter().enumerate() {
                // Begun, and not in one step: under its new name it may be there already, and what had that name gone.
                let begun = index == 0 && !self.base.store.features().atomic_renames;
                let is_unknown = target_of(&one.kind).filter(|_| begun);
                for (place, before, _) in &one.names {
                    if is_unknown.as_ref() == Some(place) {
                        unknown.push(place);
                    }
                    if !unknown.contains(&place) && !places.iter().any(|(other, _)| *other == place) {
                        places.push((place, *before));
                    }
                }
            }
            // Also where an earlier operation removed the name.
            places.retain(|(place, _)| !unknown.contains(place));
            let mut expected = Vec::with_capacity(places.len());
            for ((dir, name), holder) in places {
                match (tree.applied_path(*dir), holder) {
                    (Some(path), _) => {
                        let who = tree.get(*dir).map_or(Cred { uid: 0, gid: 0 }, Inode::cred);
                        let holder = holder.and_then(|id| holder_of(&tree, &started[..count], id));
                        let path = path.join(name);
                        let or_at = moving.as_ref().and_then(|moving| moving.new_name_of(&path));
                        expected.push(Expected { path, or_at, holder, who });
                    }
                    // The store does not have the directory, and so no file in it.
                    (None, None) => {}
                    (None, Some(_)) => return Ok(false),
                }
            }
            expected
        };
        // The names of the last operations distinguish most states at the first look.
        for one in expected.iter().rev() {
            let mut path = &one.path;
            if let Some(instead) = one.or_at.as_ref().filter(|_| one.holder.is_some())
                && self.look(path, one.who, looked)?.is_none()
            {
                path = instead;
            }
            if !self.fits(one, path, looked)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The directory rename that has begun, if the operation is one. The tree is in the state before it.
    fn moving(&self, tree: &Tree, begun: Option<&Started>) -> Option<Moving> {
        let OpKind::Rename { file, to_dir, to, .. } = &begun?.kind else { return None };
        let inode = tree.get(*file).filter(|inode| inode.is_dir() && !self.base.store.features().atomic_renames)?;
        let (from, to) = (tree.applied_path(*file)?, tree.applied_path(*to_dir)?.join(to));
        Some(Moving { from, to, who: inode.cred() })
    }

    fn fits(&self, one: &Expected<'_>, path: &StorePath, looked: &mut Looked) -> std::io::Result<bool> {
        let there = self.look(path, one.who, looked)?;
        let (Some(holder), Some(stat)) = (&one.holder, there) else {
            return Ok(one.holder.is_none() && there.is_none());
        };
        if stat.attr.kind != holder.kind {
            return Ok(false);
        }
        Ok(match &holder.published {
            None => holder.ino.is_none_or(|ino| ino == stat.identity.ino),
            // For directories and links, only their existence is known. A file is never published without a record of
            // its copy.
            Some((None, _)) => holder.kind != Kind::File,
            Some((Some(prepared), _)) if prepared.identity.ino == stat.identity.ino => true,
            // Overwritten in place, which servers do not do: complete when the temporary is gone.
            Some((Some(prepared), names)) => {
                self.base.store.features().plain_files
                    && holder.ino == Some(stat.identity.ino)
                    && prepared.is(&stat.identity)
                    && !self.is_left(
                        &self.files.temporaries.dirs_of_temporaries(),
                        names,
                        (prepared, one.who),
                        looked,
                    )?
            }
        })
    }

    /// Is this copy still under one of the names? Its directory was one that the store had at that time; the
    /// publication may use another one.
    fn is_left(
        &self,
        dirs: &[(FileId, StorePath)],
        names: &[Name],
        (copy, who): (&Prepared, Cred),
        looked: &mut Looked,
    ) -> std::io::Result<bool> {
        for (_, dir) in dirs {
            for name in names {
                let there = self.look(&dir.join(name), who, looked)?;
                if there.is_some_and(|there| there.identity.ino == copy.identity.ino) {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    fn look(&self, path: &StorePath, who: Cred, looked: &mut Looked) -> std::io::Result<Option<StoreStat>> {
        if let Some(known) = looked.get(path) {
            return Ok(*known);
        }
        let there = self.left_there(path, who)?;
        looked.insert(path.clone(), there);
        Ok(there)
    }

    /// Looks at the temporaries to which the files of these publications were spilled. A temporary may be the only
    /// place of a version.
    fn look_at_spills(&self, done: &[Started], looked: &mut Looked) -> Result<()> {
        let spills: Vec<(StorePath, Cred)> = {
            let tree = self.metadata.read_tree();
            let published = done.iter().filter(|one| matches!(one.kind, OpKind::Publish { .. }));
            let files = published.flat_map(|one| files_of(&one.kind));
            files.filter_map(|id| Some((spilled_to(&tree, id)?, tree.get(id)?.cred()))).collect()
        };
        for (path, who) in spills {
            if let Entry::Vacant(unknown) = looked.entry(path) {
                let there = self.ask_of_spill(unknown.key(), who)?;
                unknown.insert(there);
            }
        }
        Ok(())
    }

    /// Retires completed operations: their files are at their destinations, with their present identities.
    fn retire_started(&self, done: &[Started], gone: &[Vec<FileId>], rest: &[Started], looked: &Looked) {
        let mut tree = self.metadata.write_tree();
        for one in done {
            for id in files_of(&one.kind) {
                let last = done.iter().rev().find(|other| is_publication_of(other, id)).and_then(|one| one.prepared);
                recognise(&mut tree, id, last, touches_meta(rest, id), looked);
            }
        }
        for (one, gone) in done.iter().zip(gone) {
            if let OpKind::Publish { file, .. } = &one.kind {
                forget_spill(&mut tree, *file, looked);
            }
            if let OpKind::Rename { file, .. } = &one.kind {
                self.metadata.copied_with(&mut tree, *file);
            }
            self.metadata.retire(&mut tree, one.seq, one.prepared.as_ref(), gone);
        }
    }

    /// Begins the other operations again. The agent may have died between a change of attributes and the record of it.
    fn begin_again(&self, rest: &[Started], looked: &Looked) {
        let mut tree = self.metadata.write_tree();
        for one in rest {
            for id in files_of(&one.kind) {
                recognise(&mut tree, id, None, touches_meta(rest, id), looked);
                tree.txn.file(id);
            }
            if let Some(op) = tree.ops.get_mut(&one.seq) {
                op.doubtful = false;
                tree.txn.op(one.seq);
            }
        }
    }
}

fn spilled_to(tree: &Tree, file: FileId) -> Option<StorePath> {
    let (dir, name) = tree.get(file)?.spill()?;
    Some(tree.applied_path(*dir)?.join(name))
}

/// Forgets a temporary that was renamed into place, if the store shows that. One for a later version stays.
fn forget_spill(tree: &mut Tree, file: FileId, looked: &Looked) {
    let renamed = spilled_to(tree, file).is_some_and(|path| looked.get(&path).is_some_and(Option::is_none));
    if renamed && let Some(inode) = tree.get_mut(file) {
        inode.extra_mut().spill = None;
    }
}

/// The new name.
fn target_of(kind: &OpKind) -> Option<Place> {
    match kind {
        OpKind::Rename { to_dir, to, .. } => Some((*to_dir, Name::from(&**to))),
        _ => None,
    }
}

fn is_publication_of(one: &Started, id: FileId) -> bool {
    matches!(one.kind, OpKind::Publish { file, .. } if file == id)
}

/// Was an operation started that changes only the file's attributes, not its content?
fn touches_meta(started: &[Started], id: FileId) -> bool {
    started.iter().any(|one| matches!(one.kind, OpKind::SetMeta { file } if file == id))
}

/// The holder of each name before and after an operation, from the state at its place in the order.
fn names_of(tree: &Tree, kind: &OpKind) -> Vec<(Place, Option<FileId>, Option<FileId>)> {
    let place = |dir: &FileId, name: &[u8]| (*dir, Name::from(name));
    let known =
        |over: &Option<FileId>| over.filter(|over| tree.get(*over).is_some_and(|inode| inode.identity.is_some()));
    match kind {
        OpKind::SetMeta { .. } => Vec::new(),
        OpKind::Publish { file, over, .. } => {
            let again = tree.get(*file).is_some_and(|inode| inode.applied.is_some());
            let before = if again { Some(*file) } else { known(over) };
            tree.destination(kind).map(|at| (at, before, Some(*file))).into_iter().collect()
        }
        // A file that never came to the store cannot be linked there.
        OpKind::Link { file, dir, name } if tree.get(*file).is_some_and(|inode| inode.applied.is_some()) => {
            vec![(place(dir, name), None, Some(*file))]
        }
        OpKind::Link { .. } => Vec::new(),
        OpKind::Rename { file, from_dir, from, to_dir, to, over } => {
            // Two names of one file: the store does nothing then.
            let stays = (*over == Some(*file)).then_some(*file);
            vec![(place(from_dir, from), Some(*file), stays), (place(to_dir, to), known(over), Some(*file))]
        }
        OpKind::Exchange { a, a_dir, a_name, b, b_dir, b_name } => {
            vec![(place(a_dir, a_name), Some(*a), Some(*b)), (place(b_dir, b_name), Some(*b), Some(*a))]
        }
        OpKind::Unlink { file, dir, name } | OpKind::RemoveDir { file, dir, name } => {
            vec![(place(dir, name), Some(*file), None)]
        }
    }
}

fn holder_of<'a>(tree: &Tree, done: &'a [Started], id: FileId) -> Option<Holder<'a>> {
    let inode = tree.get(id)?;
    let last = done.iter().rev().find(|one| is_publication_of(one, id));
    Some(Holder {
        kind: inode.attr.kind,
        ino: inode.identity.as_ref().map(|identity| identity.ino),
        published: last.map(|one| (one.prepared, &*one.temporaries)),
    })
}

/// Decides whether the store's file is the agent's own. It is if it matches the published copy or the known identity.
/// Its ctime may differ, because names came and went; its times may differ where attributes were being set.
fn recognise(tree: &mut Tree, id: FileId, published: Option<Prepared>, meta: bool, looked: &Looked) {
    let path = tree.applied_path(id);
    let Some(inode) = tree.get_mut(id) else { return };
    let there = path.as_ref().and_then(|path| looked.get(path)).copied().flatten();
    let known: Option<StoreIdentity> = match published {
        Some(prepared) => Some(prepared.identity),
        None => inode.identity,
    };
    let Some(stat) = there else {
        // Two operations moved one file: only its last place was looked at.
        if published.is_some() {
            inode.identity = known;
        }
        return;
    };
    let same = known.is_none_or(|known| {
        known.size_bytes == stat.identity.size_bytes
            && (meta || known.mtime_nanos == stat.identity.mtime_nanos)
            && (known.ino == stat.identity.ino || published.is_some())
    });
    inode.identity = if same || inode.is_dir() { Some(stat.identity) } else { known };
}
