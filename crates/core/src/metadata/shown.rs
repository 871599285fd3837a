//! What the shim may see in a pool: files that this member decides about and has. And of files that are being written: those whose
//! readers do not wait.
//!
//! What it must not see any more is *withdrawn*: the shim asks the mount about it. Its entry stays, because processes may have
//! descriptors of the plain file, whose fstat and fsync find the file by it.
//!
//! Invariant: who owns a directory of the store is looked at under the tree's lock. After a change of the owner the directory and its
//! files are shown again, before anything else depends on that.
//!
//! The danger that this avoids: a process believes what another member has changed.

use surgetank_state::{Inode, OWN_INODE_BASE, Tree, is_for_another};
use surgetank_types::model::{FileId, Kind};
use surgetank_types::sync::atomic::Ordering;

use crate::base::{Members, Owner};
use crate::metadata::asked::may_be_read_unasked;
use crate::metadata::index::IndexEntry;
use crate::metadata::{FILES_OF_A_MEMBER, Metadata};

/// No pool has had so many.
const MEMBERS_MAX: u64 = 1 << 16;

/// The entry as it may be shown; `None`: it must not be there. Without a pool it is the entry.
pub(crate) fn in_pool(
    metadata: &Metadata,
    tree: &Tree,
    (id, inode): (FileId, &Inode),
    entry: IndexEntry,
) -> Option<IndexEntry> {
    let (Some((_, first)), Some(members)) = (metadata.pool.get(), metadata.members.get()) else { return Some(entry) };
    if tree.homes == Some(id) || is_for_another(tree, id) {
        return None;
    }
    let withdrawn = withdrawn(entry);
    if !is_own_number(inode.attr.ino, *first) {
        return Some(withdrawn);
    }
    if inode.is_dir() {
        let searched = IndexEntry { searchable: entry.searchable, ..withdrawn };
        return Some(match owner_of(&**members, tree, id) {
            Owner::Us => entry,
            // A claim of another member is acknowledged after this has been taken back.
            Owner::TheStore => searched,
            // (It may change who may look names up. Root always may.)
            Owner::Another if !metadata.permissions.checks_permissions => searched,
            Owner::Another => withdrawn,
        });
    }
    let more = inode.extra.as_ref().map(|extra| extra.more_names.as_slice()).unwrap_or_default();
    let dirs = || inode.logical.iter().chain(more).map(|(dir, _)| *dir);
    // (The store may have names of it in directories of other members.)
    let names_are_known = inode.logical.is_none() || inode.attr.links as usize <= dirs().count();
    if !names_are_known || inode.home().is_some() || !dirs().all(|dir| owner_of(&**members, tree, dir) == Owner::Us) {
        return Some(withdrawn);
    }
    Some(IndexEntry { readable: entry.readable && stays_here(metadata, id, inode), ..entry })
}

fn withdrawn(entry: IndexEntry) -> IndexEntry {
    IndexEntry { known: false, readable: false, complete: false, searchable: false, delegated: None, ..entry }
}

/// A file whose hints are asked at each open for reading is withdrawn as long as a program writes it.
pub(crate) fn while_written(
    metadata: &Metadata,
    tree: &Tree,
    (id, inode): (FileId, &Inode),
    entry: IndexEntry,
) -> IndexEntry {
    let is_written = inode.attr.kind == Kind::File && !inode.sealed;
    if is_written && !may_be_read_unasked(metadata, tree, id) { withdrawn(entry) } else { entry }
}

/// Another member may have a file with a number that this agent gave before it was in the pool. (The store's numbers are smaller
/// than those of agents, or larger.)
fn is_own_number(ino: u64, first: u64) -> bool {
    let number = ino.checked_sub(OWN_INODE_BASE).filter(|number| *number < FILES_OF_A_MEMBER * MEMBERS_MAX);
    number.is_none_or(|number| number / FILES_OF_A_MEMBER == first / FILES_OF_A_MEMBER)
}

/// A file that another member is making has no home yet: its content may be there in a moment.
fn stays_here(metadata: &Metadata, id: FileId, inode: &Inode) -> bool {
    let is_granted = || metadata.opens().get(&id).is_some_and(|open| open.granted.load(Ordering::Relaxed));
    inode.attr.kind != Kind::File || inode.sealed || inode.version > 0 || is_granted()
}

fn owner_of(members: &dyn Members, tree: &Tree, dir: FileId) -> Owner {
    if is_made(tree, dir) {
        return Owner::Us;
    }
    tree.logical_path(dir).map_or(Owner::Another, |path| members.owner_of(&path))
}

/// Was the directory made here, or is it below one that was? (Numbers of a store may be as large: those of Lustre and of objects.)
pub(crate) fn is_made(tree: &Tree, dir: FileId) -> bool {
    let mut at = dir;
    while let Some(inode) = tree.get(at) {
        if inode.is_made(at) {
            return true;
        }
        match &inode.logical {
            Some((parent, _)) => at = *parent,
            None => return false,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use surgetank_state::Name;
    use surgetank_types::model::{Attr, Timestamp};

    use super::*;

    fn directory(tree: &mut Tree, parent: FileId, ino: impl Fn(FileId) -> u64) -> FileId {
        let id = tree.new_id();
        let mut inode = Inode::new(attr(ino(id)));
        inode.logical = Some((parent, Name::from(&b"name"[..])));
        tree.insert(id, inode);
        id
    }

    fn attr(ino: u64) -> Attr {
        let time = Timestamp::from_parts(0, 0);
        let (kind, perm, blocks) = (Kind::Directory, 0o755, 0);
        Attr {
            kind,
            perm,
            uid: 0,
            gid: 0,
            ino,
            links: 2,
            size_bytes: 0,
            blocks,
            device: 0,
            atime: time,
            mtime: time,
            ctime: time,
        }
    }

    /// Inode numbers of Lustre's root and of a directory there, and of an object.
    const LARGE: [u64; 3] = [144_115_188_193_296_385, 144_115_205_255_725_057, i64::MAX as u64];

    /// Regression: two members took a directory of Lustre for one that they had made.
    #[test]
    fn directory_of_a_store_with_large_numbers_was_not_made_here() {
        for ino in LARGE {
            let mut tree = Tree::new(Inode::new(attr(ino)));
            let of_the_store = directory(&mut tree, FileId::ROOT, |_| ino);
            assert!(!is_made(&tree, FileId::ROOT) && !is_made(&tree, of_the_store), "{ino}");
            let made = directory(&mut tree, of_the_store, |id| OWN_INODE_BASE + id.0);
            assert!(is_made(&tree, made), "{ino}");
            // (What is below it, another member may have made.)
            let below = directory(&mut tree, made, |_| ino);
            assert!(is_made(&tree, below), "{ino}");
        }
    }

    #[test]
    fn number_of_an_earlier_agent_is_not_this_members() {
        let first = 3 * FILES_OF_A_MEMBER;
        for number in [7, 2 * FILES_OF_A_MEMBER + 7, 4 * FILES_OF_A_MEMBER] {
            assert!(!is_own_number(OWN_INODE_BASE + number, first), "{number}");
        }
        assert!(is_own_number(OWN_INODE_BASE + first + 7, first) && is_own_number(7, first));
        assert!(LARGE.iter().all(|ino| is_own_number(*ino, first)));
    }
}
