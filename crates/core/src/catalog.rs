//! The catalog: the state that survives the agent.
//!
//! Namespace and drain hold the live state in memory; the catalog keeps it across deaths. It takes changes in order and
//! returns them all at the next start. The trait leaves room for engines that serve many nodes. [`LogCatalog`] is the
//! engine of one node: a log with group commit, folded into a redb snapshot. `docs/internals/catalog.md` describes the
//! bytes on disk.
//!
//! Two promises, never mixed: a *committed* batch survives the death of the agent, a *synced* one also survives the
//! death of the machine.

mod damage;
mod digest;
mod directory;
mod log;
mod record;
mod segment;
mod snapshot;
mod writer;

pub use damage::Damage;
pub use directory::Recovery;
pub use log::{LogCatalog, Options};
pub use record::{Decoded, decode};

use surgetank_types::error::Result;
use surgetank_types::model::{
    Change, EntryRecord, FileId, FileRecord, HintRecord, Hinted, Image, LostRecord, Mark, OpRecord, Seq,
};

/// Position in the log; grows with every commit. Positions of failed commits are skipped, and never used twice while
/// the catalog is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Lsn(pub u64);

/// One record that the catalog remembers, as [`Catalog::load_into`] returns it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Loaded {
    /// A file, by its id.
    File(FileId, Box<FileRecord>),
    /// A name in a directory: the directory, the name, and its bindings.
    Entry(FileId, Box<[u8]>, EntryRecord),
    /// A queued operation, by its place in the order.
    Op(Seq, OpRecord),
    /// The number of a mark.
    Mark(Mark, u64),
    /// Hints, by their subject.
    Hints(Hinted, HintRecord),
    /// A loss that is not acknowledged, by the path of the file.
    Lost(Box<[u8]>, LostRecord),
}

impl Loaded {
    fn put_into(self, image: &mut Image) {
        match self {
            Self::File(id, record) => image.files.push((id, *record)),
            Self::Entry(dir, name, record) => image.entries.push((dir, name, record)),
            Self::Op(seq, record) => drop(image.ops.insert(seq, record)),
            Self::Mark(mark, number) => drop(image.marks.insert(mark, number)),
            Self::Hints(of, record) => drop(image.hints.insert(of, record)),
            Self::Lost(path, record) => drop(image.lost.insert(path, record)),
        }
    }
}

/// Remembers changes in order.
pub trait Catalog: Send + Sync {
    /// Appends one atomic batch. When it returns, the batch survives the death of the agent (not of the machine). An
    /// error means that this batch is not remembered; earlier batches are untouched, and later ones may succeed.
    /// Batches of one thread keep their order. So do batches of two threads when one commit returned before the other
    /// began.
    fn commit(&self, changes: &[Change]) -> std::io::Result<Lsn>;
    /// Returns once everything up to `upto` survives the machine. Concurrent callers share one sync.
    fn sync(&self, upto: Lsn) -> std::io::Result<()>;
    /// The position of the last commit.
    fn position(&self) -> Lsn;
    /// All that was committed, read once at the start.
    fn load(&self) -> Result<Image>;
    /// Starts over, empty: everything is in the store and there is nothing to remember.
    fn clear(&self) -> std::io::Result<()>;
    /// What the last death cost.
    fn recovery(&self) -> Recovery {
        Recovery::default()
    }
    /// The damage was reported to the user, and its treatment is on the disk: the next start need not report it again.
    fn damage_reported(&self) -> std::io::Result<()> {
        Ok(())
    }
    /// The same as [`load`](Self::load), one record at a time. The order: files by id, entries by directory and name,
    /// operations by sequence, marks, hints, losses. It serves a million files, for which a whole [`Image`] would
    /// triple the memory.
    fn load_into(&self, take: &mut dyn FnMut(Loaded)) -> Result<()> {
        let image = self.load()?;
        image.files.into_iter().for_each(|(id, record)| take(Loaded::File(id, Box::new(record))));
        image.entries.into_iter().for_each(|(dir, name, record)| take(Loaded::Entry(dir, name, record)));
        image.ops.into_iter().for_each(|(seq, record)| take(Loaded::Op(seq, record)));
        image.marks.into_iter().for_each(|(mark, number)| take(Loaded::Mark(mark, number)));
        image.hints.into_iter().for_each(|(of, record)| take(Loaded::Hints(of, record)));
        image.lost.into_iter().for_each(|(path, record)| take(Loaded::Lost(path, record)));
        Ok(())
    }
}
