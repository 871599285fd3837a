//! Revalidation: other clients change the store while no agent serves it.
//!
//! - At its end, an agent that leaves undrained files forgets files that only the store has. The next agent shows them
//!   as they are then. (Not after a crash: programs that continue have seen the agent's inode numbers.)
//! - At its start, an agent looks at the directories on the way to its own files. If another client removed one, the
//!   agent still shows it, because of its content, and makes it again in the store.
//! - Directories with waiting operations are left out. Then the drain reports that the directory is missing, and the
//!   user has to look: perhaps the whole store is not mounted.
//!
//! The dangers that this avoids: names that are gone stay visible indefinitely; a directory takes no new files because
//! the store does not have it.

use std::collections::HashSet;

use surgetank_state::{Entry, Inode, Place, Tree};
use surgetank_store::Store;
use surgetank_types::model::{FileId, Kind, OpKind, RunId};
use surgetank_types::sync::{Arc, OnceLock};

use crate::base::queries::is_absent;
use crate::base::runs::Runs;
use crate::base::users::own_cred;
use crate::base::{Base, Door};
use crate::files::Files;
use crate::files::sync::Syncs;
use crate::metadata::Metadata;
use crate::namespace::resolve::Resolver;

/// Changes of the catalog come in batches of this size.
const FORGOTTEN_AT_ONCE_MAX: usize = 4096;

/// After a restart: is the store as the catalog remembers it?
pub struct Revalidation {
    pub(super) door: Arc<OnceLock<Arc<dyn Door>>>,
    pub(super) store: Arc<dyn Store>,
    pub(super) metadata: Arc<Metadata>,
    resolver: Arc<Resolver>,
    runs: Arc<Runs>,
    syncs: Arc<Syncs>,
}

impl Revalidation {
    pub(crate) fn new(base: &Base, files: &Files, resolver: &Arc<Resolver>) -> Self {
        Self {
            door: base.door.clone(),
            store: base.store.clone(),
            runs: base.runs.clone(),
            metadata: files.metadata.clone(),
            resolver: resolver.clone(),
            syncs: files.syncs.clone(),
        }
    }

    pub(crate) fn revalidate_with_store(&self) {
        let mut dirs: Vec<(Vec<u8>, FileId)> = {
            let tree = self.metadata.read_tree();
            // Operations that move names may have been carried out before a crash: then a place is uncertain.
            if tree.ops.values().any(|op| !matches!(op.kind, OpKind::Publish { .. } | OpKind::SetMeta { .. })) {
                return;
            }
            let ours = tree.iter().filter(|(_, inode)| inode.owned && !inode.is_dir() && !only_in_store(inode));
            let mut ways = HashSet::new();
            ours.for_each(|(id, _)| add_ways(&tree, id, &mut ways));
            let queued = queued(&tree);
            let dirs = ways.into_iter().filter(|id| *id != FileId::ROOT && !queued.contains(id));
            dirs.filter(|id| tree.get(*id).is_some_and(Inode::is_dir))
                .filter_map(|id| Some((tree.applied_path(id)?.0, id)))
                .collect()
        };
        // A directory comes before the files in it.
        dirs.sort_unstable();
        for (_, dir) in dirs {
            self.revalidate_dir(dir);
        }
    }

    /// Forgets files that the store has completely, and directories that become empty. Runs while the agent serves no
    /// program.
    pub(crate) fn forget_what_the_store_has(&self) {
        let mut tree = self.metadata.write_tree();
        let queued = queued(&tree);
        let mut owned: Vec<(bool, Vec<u8>, FileId)> = tree
            .iter()
            .filter(|(id, inode)| inode.owned && *id != FileId::ROOT && !queued.contains(id))
            .filter_map(|(id, inode)| Some((inode.is_dir(), tree.logical_path(id)?, id)))
            .collect();
        // Files first, then directories from below.
        owned.sort_unstable_by(|one, other| one.0.cmp(&other.0).then_with(|| other.1.cmp(&one.1)));
        for some in owned.chunks(FORGOTTEN_AT_ONCE_MAX) {
            for (_, _, id) in some {
                forget(&mut tree, *id);
            }
            self.metadata.commit(&mut tree);
        }
    }

    fn revalidate_dir(&self, dir: FileId) {
        let (path, who) = {
            let tree = self.metadata.read_tree();
            // Void if a directory above it was missing.
            let Some((path, inode)) = tree.applied_path(dir).zip(tree.get(dir)) else {
                return;
            };
            (path, own_cred(inode.cred()))
        };
        match self.store.stat(who, &path) {
            Ok(stat) if stat.attr.kind == Kind::Directory => {
                let mut tree = self.metadata.write_tree();
                if let Some(inode) = tree.get_mut(dir) {
                    inode.identity = Some(stat.identity);
                }
                self.resolver.refresh(&mut tree, dir, &stat);
            }
            Ok(_) => self.make_again(dir),
            Err(why) if is_absent(&why) => self.make_again(dir),
            Err(why) => tracing::warn!(%why, %path, "a directory of the store cannot be looked at"),
        }
    }

    /// The store has nothing of `top` and below: the agent's own files there count as new.
    fn make_again(&self, top: FileId) {
        let mut tree = self.metadata.write_tree();
        let mut below: Vec<(Vec<u8>, FileId)> = tree
            .iter()
            .filter(|(id, _)| tree.is_within(*id, top))
            .filter_map(|(id, _)| Some((tree.logical_path(id)?, id)))
            .collect();
        below.sort_unstable();
        for (path, id) in below {
            let Some(inode) = tree.get_mut(id) else { continue };
            let Some((dir, name)) = inode.logical.clone() else { continue };
            let was_there = inode.applied.is_some();
            inode.set_names_in_store(Vec::new());
            inode.identity = None;
            if let Some(own) = inode.dir.as_mut() {
                own.complete = true;
                let last = self.runs.is_last(&self.metadata.decided(&tree, id, &path));
                let kind = OpKind::Publish { file: id, dir, name: Box::from(&*name), over: None };
                let seq = self.metadata.queue(&mut tree, kind, RunId(0), last, 0);
                if let Some(inode) = tree.get_mut(id) {
                    inode.publish = Some(seq);
                }
                tracing::warn!(path = %String::from_utf8_lossy(&path), "another client removed it in the store; it is made again");
            } else {
                let clean = was_there && !inode.dirty();
                let gone = clean && inode.replica.is_none() && inode.attr.kind == Kind::File;
                let names = names_of(inode);
                if clean {
                    // The agent's copy may be the only one now.
                    inode.version += 1;
                }
                tree.bind(dir, &name, |entry| entry.set_planned(None));
                if gone {
                    for (dir, name) in &names {
                        tree.bind(*dir, name, |entry| *entry = Entry::default());
                        tree.txn.entry(*dir, name);
                    }
                    tree.remove(id);
                    tree.txn.dropped(id);
                } else {
                    tree.recount(id);
                    self.metadata.queue_publish(&mut tree, id);
                    self.syncs.to_be_synced(&tree, id);
                }
            }
            tree.txn.file(id);
            tree.txn.entry(dir, &name);
        }
    }
}

/// The files of queued operations, and every directory above them.
fn queued(tree: &Tree) -> HashSet<FileId> {
    let mut queued = HashSet::new();
    for op in tree.ops.values() {
        let dirs = surgetank_state::places(&op.kind).into_iter().map(|(dir, _)| dir);
        dirs.chain([op.file()]).for_each(|id| add_ways(tree, id, &mut queued));
    }
    queued
}

/// Adds the file and every directory above it, both where programs see it and where the store has it.
fn add_ways(tree: &Tree, id: FileId, ways: &mut HashSet<FileId>) {
    let mut next = vec![id];
    while let Some(at) = next.pop() {
        if ways.insert(at)
            && let Some(inode) = tree.get(at)
        {
            next.extend(inode.logical.iter().chain(&inode.applied).map(|place| place.0));
        }
    }
}

fn forget(tree: &mut Tree, id: FileId) {
    let Some(inode) = tree.get(id).filter(|inode| only_in_store(inode)) else {
        return;
    };
    let names = names_of(inode);
    let settled = Entry::new(Some(id), Some(id));
    if names.iter().any(|(dir, name)| tree.entry(*dir, name) != Some(settled)) {
        return;
    }
    if let Some(inode) = tree.get_mut(id) {
        // The mount is gone, so references that the kernel did not return do not count.
        inode.lookups = 0;
        inode.owned = false;
    }
    if tree.forget_mirror(id) {
        tree.txn.dropped(id);
        names.iter().for_each(|(dir, name)| tree.txn.entry(*dir, name));
    } else if let Some(inode) = tree.get_mut(id) {
        inode.owned = true;
    }
}

fn names_of(inode: &Inode) -> Vec<Place> {
    inode.logical.iter().chain(inode.extra.iter().flat_map(|extra| &extra.more_names)).cloned().collect()
}

fn only_in_store(inode: &Inode) -> bool {
    let at_rest = inode.publish.is_none() && inode.set_meta.is_none() && inode.applied == inode.logical;
    let content = inode.sealed && !inode.dirty() && inode.replica.is_none() && inode.spill().is_none();
    at_rest && !inode.pinned && (inode.is_dir() || content)
}
