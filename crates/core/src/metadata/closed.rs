//! Files that were closed, for the member of a pool that has them copied to other members.

use std::collections::HashMap;
use std::time::Duration;

use surgetank_policy::config::ReplicasAt;
use surgetank_policy::rule::{Decision, RuleConfig};
use surgetank_state::{Inode, Tree};
use surgetank_types::model::{FileId, Kind, Timestamp};
use surgetank_types::sync::atomic::Ordering;
use surgetank_types::sync::{Condvar, Mutex, PoisonError};

use crate::base::users::is_drained;
use crate::metadata::Metadata;
use crate::metadata::transactions::ReadTree;

/// Closed files, or files that got another name, since they were taken.
#[derive(Default)]
pub(crate) struct Closed {
    files: Mutex<Vec<FileId>>,
    news: Condvar,
}

/// What a file was when a program closed it that may write it. Another descriptor may still be there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AtClose {
    /// Higher at each close. `u64::MAX`: a program has opened the file for writing since.
    pub moment: u64,
    /// The version that the content will be, if it is not written any more.
    pub version: u32,
    pub size_bytes: u64,
    /// Of its last access and change.
    pub times: (Timestamp, Timestamp),
}

/// By file: the last close that waits, or has waited, for copies. Until a program opens the file for writing.
pub(crate) type Closes = Mutex<HashMap<FileId, AtClose>>;

/// A program opens the file for writing.
pub(crate) fn is_opened(metadata: &Metadata, id: FileId) {
    if metadata.pool.get().is_none() {
        return;
    }
    let mut closes = metadata.closes.lock().unwrap_or_else(PoisonError::into_inner);
    // (A member may still say what it has of a close before that.)
    if metadata.copies_unknown.load(Ordering::SeqCst) {
        let time = Timestamp::from_parts(0, 0);
        closes.insert(id, AtClose { moment: u64::MAX, version: 0, size_bytes: 0, times: (time, time) });
    } else {
        closes.remove(&id);
    }
}

/// May files be closed for which that waits? (Besides those with hints.)
pub(crate) fn may_wait(metadata: &Metadata) -> bool {
    let by_rule = || metadata.rules.rules().any(|rule| rule.replicas_at == Some(ReplicasAt::Close));
    metadata.pool.get().is_some() && (metadata.config.replicas_at == ReplicasAt::Close || by_rule())
}

/// Does a close of the file by a writer wait until other members have copies?
pub(crate) fn waits_for(metadata: &Metadata, id: FileId) -> bool {
    let Some(tree) = tree_if_any_waits(metadata) else { return false };
    let path = tree.logical_path(id).filter(|_| !surgetank_state::is_for_another(&tree, id));
    path.is_some_and(|path| waits(metadata, &metadata.decided(&tree, id, &path)))
}

/// The same of a file that is about to be made.
pub(crate) fn waits_for_new(metadata: &Metadata, dir: FileId, name: &[u8]) -> bool {
    let Some(tree) = tree_if_any_waits(metadata) else { return false };
    tree.child_path(dir, name).is_some_and(|path| waits(metadata, &metadata.decided_new(&tree, dir, &path)))
}

fn tree_if_any_waits(metadata: &Metadata) -> Option<ReadTree<'_>> {
    metadata.pool.get()?;
    let tree = metadata.read_tree();
    (tree.hints.any || may_wait(metadata)).then_some(tree)
}

fn waits(metadata: &Metadata, decision: &Decision) -> bool {
    let at = decision.replicas_at.unwrap_or(metadata.config.replicas_at);
    let wanted = decision.replicas.unwrap_or(metadata.config.replicas);
    at == ReplicasAt::Close && wanted > 1 && is_drained(decision.mode)
}

/// From now on closed files are noted. Those that are there are noted, too.
pub(crate) fn note_from_now_on(metadata: &Metadata) {
    let tree = metadata.read_tree();
    let is_one = |inode: &Inode| inode.attr.kind == Kind::File && inode.sealed && inode.dirty();
    let known = tree.iter().filter(|(_, inode)| is_one(inode)).map(|(id, _)| id).collect();
    // (Set once.)
    let _ = metadata.closed.set(Closed { files: Mutex::new(known), news: Condvar::new() });
}

/// In a pool: the file may need copies at other members, or belong there.
pub(crate) fn note(metadata: &Metadata, tree: &Tree, id: FileId) {
    let Some(closed) = metadata.closed.get() else { return };
    let by_rule = || {
        let wants = |rule: &RuleConfig| rule.replicas.is_some_and(|wanted| wanted > 1) || rule.collocate.is_some();
        metadata.rules.rules().any(wants)
    };
    if metadata.config.replicas > 1 || tree.hints.any || by_rule() {
        closed.files.lock().unwrap_or_else(PoisonError::into_inner).push(id);
        closed.news.notify_one();
    }
}

/// Takes the files that were noted. Without any it waits for so long.
pub(crate) fn take(metadata: &Metadata, patience: Duration) -> Vec<FileId> {
    let Some(closed) = metadata.closed.get() else { return Vec::new() };
    let mut files = closed.files.lock().unwrap_or_else(PoisonError::into_inner);
    if files.is_empty() {
        files = closed.news.wait_timeout(files, patience).unwrap_or_else(PoisonError::into_inner).0;
    }
    std::mem::take(&mut *files)
}
