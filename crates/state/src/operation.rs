//! Operations on their way to the store.

use std::time::Instant;

use surgetank_types::model::{FileId, OpKind, OpRecord, Prepared, RunId};

use crate::{Copied, Inode, Name, Place, Tree};

/// How far an operation is.
#[derive(Debug, Clone, PartialEq)]
pub enum Progress {
    /// In the queue.
    Waiting,
    /// A copy of its file is being made.
    Staging,
    /// A complete copy is in a temporary of the store, synced if it is `checked`.
    Staged {
        /// The copy.
        copied: Box<Copied>,
        /// It was compared with what it should be.
        checked: bool,
    },
    /// The drain is carrying out the operation.
    Committing,
}

/// An operation on the store.
#[derive(Debug)]
pub struct Op {
    /// What is to be done.
    pub kind: OpKind,
    /// The run that caused it.
    pub run: RunId,
    /// The staged copy, recorded before it is renamed into place: a repetition after a crash recognises it.
    pub prepared: Option<Prepared>,
    /// How far it is.
    pub progress: Progress,
    /// Not before this moment (quiet period, retry).
    pub due: Instant,
    /// While its file is empty, not before this moment: the file may belong to a process that did not get the answer to
    /// its create.
    pub not_before: Option<Instant>,
    /// Belongs to the final drain. [`Tree::hasten`](crate::Tree::hasten) ends that.
    pub(crate) last: bool,
    /// A process waits in fsync: taken although the file is open.
    pub eager: bool,
    /// How often it has failed.
    pub failures: u32,
    /// When it failed for the first time.
    pub first_failure: Option<Instant>,
    /// The last failure.
    pub error: Option<Box<Trouble>>,
    /// The store may have carried it out already (an agent died, a sync failed).
    pub doubtful: bool,
    /// It was begun once: programs' later operations build on it, so it can no longer be taken back.
    pub certain: bool,
    /// When it was queued.
    pub queued: Instant,
}

/// Why an operation did not succeed, for `status` and the verdict.
#[derive(Debug, Clone, PartialEq)]
pub struct Trouble {
    /// The error number of the last try.
    pub errno: i32,
    /// The layer that failed: the store, or a tier.
    pub place: String,
    /// The failure in words, with advice.
    pub text: String,
    /// Trying again will not help.
    pub lasting: bool,
}

impl Trouble {
    /// No room in the store, or none for this owner.
    pub fn is_full(&self) -> bool {
        matches!(self.errno, libc::ENOSPC | libc::EDQUOT)
    }
}

impl Op {
    /// Does it wait for the final drain?
    pub fn is_last(&self) -> bool {
        self.last
    }

    /// A waiting operation.
    pub fn new(kind: OpKind, run: RunId, due: Instant, last: bool) -> Self {
        Self {
            kind,
            run,
            prepared: None,
            progress: Progress::Waiting,
            due,
            not_before: None,
            last,
            eager: false,
            failures: 0,
            first_failure: None,
            error: None,
            doubtful: false,
            certain: false,
            queued: surgetank_types::clock::tick(),
        }
    }

    /// For the catalog.
    pub fn record(&self) -> OpRecord {
        OpRecord {
            kind: self.kind.clone(),
            run: self.run,
            prepared: self.prepared,
            last: self.last,
            started: self.doubtful || self.progress == Progress::Committing,
            certain: self.certain,
        }
    }

    /// Does the drain take the content of the file although it is open? Also true for a new file whose publication was
    /// begun before: that cannot be taken back, and all later operations wait.
    pub fn is_taken_open(&self, inode: &Inode) -> bool {
        self.eager || self.certain && !inode.sealed && inode.applied.is_none()
    }

    /// The path that an operation is about, said so that a person sees what is missing.
    pub fn path(&self, tree: &Tree) -> Vec<u8> {
        let place = |dir: FileId, name: &[u8]| {
            tree.child_path(dir, name)
                .or_else(|| tree.applied_path(dir).map(|path| path.join(name).0))
                .unwrap_or_else(|| name.to_vec())
        };
        match &self.kind {
            OpKind::Publish { file, dir, name, .. } => tree.logical_path(*file).unwrap_or_else(|| place(*dir, name)),
            OpKind::SetMeta { file } => tree.logical_path(*file).unwrap_or_default(),
            OpKind::Link { dir, name, .. } | OpKind::Unlink { dir, name, .. } | OpKind::RemoveDir { dir, name, .. } => {
                place(*dir, name)
            }
            OpKind::Rename { to_dir, to, .. } => place(*to_dir, to),
            OpKind::Exchange { a_dir, a_name, .. } => place(*a_dir, a_name),
        }
    }

    /// The operation in words.
    pub fn in_words(&self, tree: &Tree) -> String {
        let path = self.path(tree);
        let path = String::from_utf8_lossy(&path);
        let place = |dir: FileId, name: &[u8]| tree.child_path(dir, name).unwrap_or_else(|| name.to_vec());
        match &self.kind {
            OpKind::Publish { .. } => format!("publish {path}"),
            OpKind::SetMeta { .. } => format!("set attributes of {path}"),
            OpKind::Link { .. } => format!("link {path}"),
            OpKind::Rename { from_dir, from, .. } => {
                format!("rename {} → {path}", String::from_utf8_lossy(&place(*from_dir, from)))
            }
            OpKind::Exchange { b_dir, b_name, .. } => {
                format!("exchange {path} and {}", String::from_utf8_lossy(&place(*b_dir, b_name)))
            }
            OpKind::Unlink { .. } => format!("delete {path}"),
            OpKind::RemoveDir { .. } => format!("remove directory {path}"),
        }
    }

    /// The file that it is about.
    pub fn file(&self) -> FileId {
        file_of(&self.kind)
    }
}

/// The file an operation is about.
pub fn file_of(kind: &OpKind) -> FileId {
    match kind {
        OpKind::Publish { file, .. }
        | OpKind::SetMeta { file }
        | OpKind::Link { file, .. }
        | OpKind::Rename { file, .. }
        | OpKind::Exchange { a: file, .. }
        | OpKind::Unlink { file, .. }
        | OpKind::RemoveDir { file, .. } => *file,
    }
}

/// All files whose place or identity in the store an operation may change.
pub fn files_of(kind: &OpKind) -> impl Iterator<Item = FileId> {
    let other = match kind {
        OpKind::Publish { over, .. } | OpKind::Rename { over, .. } => *over,
        OpKind::Exchange { b, .. } => Some(*b),
        _ => None,
    };
    std::iter::once(file_of(kind)).chain(other)
}

/// The names an operation is about.
pub fn places(kind: &OpKind) -> Vec<Place> {
    let place = |dir: &FileId, name: &[u8]| (*dir, Name::from(name));
    match kind {
        OpKind::SetMeta { .. } => Vec::new(),
        OpKind::Publish { dir, name, .. }
        | OpKind::Link { dir, name, .. }
        | OpKind::Unlink { dir, name, .. }
        | OpKind::RemoveDir { dir, name, .. } => vec![place(dir, name)],
        OpKind::Rename { from_dir, from, to_dir, to, .. } => vec![place(from_dir, from), place(to_dir, to)],
        OpKind::Exchange { a_dir, a_name, b_dir, b_name, .. } => vec![place(a_dir, a_name), place(b_dir, b_name)],
    }
}
