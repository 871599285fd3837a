//! Files that were closed, for the member of a pool that has them copied to other members.

use std::time::Duration;

use surgetank_state::{Inode, Tree};
use surgetank_types::model::{FileId, Kind};
use surgetank_types::sync::{Condvar, Mutex, PoisonError};

use crate::metadata::Metadata;

/// Closed files, or files that got another name, since they were taken.
#[derive(Default)]
pub(crate) struct Closed {
    files: Mutex<Vec<FileId>>,
    news: Condvar,
}

/// From now on closed files are noted. Those that are there are noted, too.
pub(crate) fn note_from_now_on(metadata: &Metadata) {
    let tree = metadata.read_tree();
    let is_one = |inode: &Inode| inode.attr.kind == Kind::File && inode.sealed && inode.dirty();
    let known = tree.iter().filter(|(_, inode)| is_one(inode)).map(|(id, _)| id).collect();
    // (Set once.)
    let _ = metadata.closed.set(Closed { files: Mutex::new(known), news: Condvar::new() });
}

/// In a pool: the file may need copies at other members.
pub(crate) fn note(metadata: &Metadata, tree: &Tree, id: FileId) {
    let Some(closed) = metadata.closed.get() else { return };
    let by_rule = || metadata.rules.rules().any(|rule| rule.replicas.is_some_and(|wanted| wanted > 1));
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
