//! Temporaries of the agent in the store.
//!
//! Invariant: the catalog knows a directory before the first temporary is made in it. So the next agent finds and
//! removes the temporaries of a killed one.
//!
//! The danger that this avoids: a server carries out a request of the killed agent after that clean-up. So the agent
//! looks again when nothing is under way.

use std::io;
use std::time::Duration;

use foldhash::HashSet;

use surgetank_state::{Inode, Name, Temporaries, Tree};
use surgetank_store::{Cred, Store, StorePath};
use surgetank_types::clock;
use surgetank_types::model::{FileId, RunId, STORE_TEMPORARY_PREFIX, Seq};
use surgetank_types::sync::Arc;

use crate::base::Base;
use crate::base::notes::Notes;
use crate::base::queries::is_absent;
use crate::base::users::own_cred;
use crate::files::SPILL;
use crate::metadata::Metadata;

/// By then a server has completed the requests of a killed agent. `LATE_AT_THE_END` is for an agent that ends now.
const LATE: Duration = Duration::from_secs(5);
const LATE_AT_THE_END: Duration = Duration::from_millis(700);
/// The pause before an unreachable store is asked again.
const AGAIN: Duration = Duration::from_secs(60);

pub(crate) const KEPT_IN_STORE: &[u8] = b"surgetank-orphan-";

/// The agent's temporaries in the store: where some may be, and what an earlier agent left of them.
pub struct StoreTemporaries {
    key: Arc<str>,
    store: Arc<dyn Store>,
    notes: Arc<Notes>,
    metadata: Arc<Metadata>,
}

impl StoreTemporaries {
    pub(crate) fn new(base: &Base, metadata: &Arc<Metadata>) -> Self {
        Self { key: base.key.clone(), store: base.store.clone(), notes: base.notes.clone(), metadata: metadata.clone() }
    }

    /// The drain's temporary for an operation.
    pub(crate) fn staged_name(&self, seq: Seq) -> Name {
        let mut name = STORE_TEMPORARY_PREFIX.to_vec();
        name.extend_from_slice(format!("{}-{:x}", self.key, seq.number()).as_bytes());
        Name::from(name)
    }

    /// The directories in which temporaries may be, and where the store has them now.
    pub(crate) fn dirs_of_temporaries(&self) -> Vec<(FileId, StorePath)> {
        let tree = self.metadata.read_tree();
        tree.temporaries.paths(&tree)
    }

    /// Called before a temporary is made in this directory.
    pub(crate) fn expect_temporaries_in(&self, dir: FileId) {
        let mut tree = self.metadata.write_tree();
        if tree.temporaries.dirs.contains(&dir) {
            return;
        }
        tree.own(dir);
        Temporaries::expect_in(dir, &mut tree.txn);
        drop(tree);
        // The store survives a crash of the machine, so the catalog must too.
        if let Err(why) = self.metadata.sync_catalog() {
            tracing::warn!(%why, "the catalog cannot be synced: after a power loss a temporary may be left in the store");
        }
        self.metadata.write_tree().temporaries.dirs.insert(dir);
    }

    /// Forgets the directories: while nothing is under way, there are no temporaries.
    pub(crate) fn forget_temporaries(&self) {
        let inherited = {
            let tree = self.metadata.read_tree();
            if tree.temporaries.dirs.is_empty() || !self.is_nothing_under_way(&tree) {
                return;
            }
            tree.temporaries.inherited
        };
        match inherited {
            Some(since) if since.elapsed() < LATE => return,
            Some(_) if !self.discard_late() => return,
            _ => {}
        }
        let mut tree = self.metadata.write_tree();
        if !self.is_nothing_under_way(&tree) {
            return;
        }
        let Tree { temporaries, txn, .. } = &mut *tree;
        temporaries.forget_all(txn);
    }

    fn is_nothing_under_way(&self, tree: &Tree) -> bool {
        tree.ops.is_empty() && tree.staging.is_empty() && tree.discards.is_empty() && self.metadata.opens().is_empty()
    }

    /// The drain has stopped. With operations left, the next agent looks.
    pub(crate) fn discard_late_at_the_end(&self) {
        let since = {
            let tree = self.metadata.read_tree();
            let done = tree.ops.is_empty() && tree.staging.is_empty();
            tree.temporaries.inherited.filter(|_| done && !tree.temporaries.dirs.is_empty())
        };
        if let Some(since) = since {
            surgetank_types::sync::thread::sleep(LATE_AT_THE_END.saturating_sub(since.elapsed()));
            let _ = self.discard_late();
        }
    }

    /// Called when nothing is under way: temporaries were made by a server for an agent that was already killed.
    /// `false`: this agent tries again after a while, or the next one does.
    fn discard_late(&self) -> bool {
        let gone = self.discard_in_all(true);
        self.metadata.write_tree().temporaries.inherited = if gone { None } else { Some(clock::tick() + AGAIN) };
        gone
    }

    /// The temporaries to which files are spilled now.
    pub(crate) fn spill_names(&self) -> HashSet<Name> {
        self.metadata.read_tree().iter().filter_map(|(_, inode)| inode.spill().map(|place| place.1.clone())).collect()
    }

    /// Removes copies from a directory that gets no new files. They belong to a killed agent that had not yet learned
    /// that the directory exists. Returns whether there were any.
    ///
    /// Errors: copies may still be there.
    pub(crate) fn discard_left_in(&self, who: Cred, dir: &StorePath) -> io::Result<bool> {
        let spills = self.spill_names();
        let left = match self.store.list(who, dir, true) {
            Err(why) if is_absent(&why) => return Ok(false),
            listed => listed?,
        };
        let mut left = left.iter().filter(|entry| self.is_left_over(&entry.name, &spills)).peekable();
        let any = left.peek().is_some();
        left.try_for_each(|entry| self.discard_left(who, dir, &entry.name))?;
        Ok(any)
    }

    /// Removes incomplete copies of an earlier agent. Spill temporaries stay.
    pub(crate) fn discard_leftovers(&self) {
        self.discard_in_all(false);
        // A plain directory also gets spilled files, but no late requests.
        if !self.store.features().plain_files {
            self.metadata.write_tree().temporaries.inherited = Some(clock::tick());
        }
    }

    /// `late`: temporaries of operations that have begun stay. `false`: some may still be there, or the store does not
    /// answer.
    fn discard_in_all(&self, late: bool) -> bool {
        let (dirs, who) = {
            let tree = self.metadata.read_tree();
            let who = tree.get(FileId::ROOT).map(Inode::cred).unwrap_or(surgetank_store::Cred { uid: 0, gid: 0 });
            (tree.temporaries.paths(&tree), own_cred(who))
        };
        let spills = self.spill_names();
        let (mut gone, begun) = (true, clock::tick());
        for (_, dir) in dirs {
            let left = match self.store.list(who, &dir, true) {
                Err(why) if is_absent(&why) => continue,
                Err(why) => {
                    tracing::warn!(%why, %dir, "what may be left of an earlier agent's copies is not known");
                    gone = false;
                    // Each further directory would cost another wait for a store that does not answer.
                    if begun.elapsed() > LATE {
                        break;
                    }
                    continue;
                }
                Ok(left) => left,
            };
            // Temporaries of running operations: an operation exists before its temporary does.
            let wanted: HashSet<Name> =
                self.metadata.read_tree().ops.keys().map(|seq| self.staged_name(*seq)).collect();
            for entry in left {
                if self.is_left_over(&entry.name, &spills)
                    && (!late || !wanted.contains(&*entry.name))
                    && let Err(why) = self.discard_left(who, &dir, &entry.name)
                {
                    tracing::warn!(%why, %dir, "what is left of an earlier agent's copies stays in the store for now");
                    gone = false;
                }
            }
        }
        gone
    }

    fn is_left_over(&self, name: &[u8], spills: &HashSet<Name>) -> bool {
        let ours = name.strip_prefix(STORE_TEMPORARY_PREFIX).is_some_and(|rest| rest.starts_with(self.key.as_bytes()));
        ours && !spills.contains(name)
    }

    /// With a damaged catalog, it may be all that is left of a file.
    fn discard_left(&self, who: Cred, dir: &StorePath, name: &[u8]) -> io::Result<()> {
        if self.is_doubtful_spill(name) {
            self.keep_spill(who, dir, name)
        } else {
            self.store.discard(who, &dir.join(name))
        }
    }

    /// Was this temporary written before the damage, as the content of a file? No record would name it now.
    pub(crate) fn is_doubtful_spill(&self, name: &[u8]) -> bool {
        let prefix = [STORE_TEMPORARY_PREFIX, self.key.as_bytes(), SPILL].concat();
        name.strip_prefix(&*prefix).is_some_and(|number| {
            let number = std::str::from_utf8(number).ok().and_then(|number| u64::from_str_radix(number, 16).ok());
            number.is_none_or(|number| number < self.metadata.read_tree().doubtful_below)
        })
    }

    /// Gives it a name that no agent removes, and reports it.
    pub(crate) fn keep_spill(&self, who: Cred, dir: &StorePath, name: &[u8]) -> io::Result<()> {
        let number = name.rsplit(|byte| *byte == b'-').next().unwrap_or(name);
        let mut to = dir.join(&[KEPT_IN_STORE, self.key.as_bytes(), b"-", number].concat());
        // Only what the store says is free.
        loop {
            match self.store.stat(who, &to) {
                Ok(_) => to.0.push(b'+'),
                Err(why) if is_absent(&why) => break,
                Err(why) => return Err(why),
            }
        }
        let from = dir.join(name);
        if let Err(why) = self.store.rename(who, &from, &to) {
            // Unless only the answer was lost.
            let gone = self.store.stat(who, &from).is_err_and(|why| is_absent(&why));
            if !gone || self.store.stat(who, &to).is_err() {
                return Err(why);
            }
        }
        self.notes.note(
            RunId(0),
            String::from_utf8_lossy(&from.0).into_owned(),
            format!(
                "no record names it any more, for the catalog was damaged: {} in the store; it may be the only copy of a file: look at it, and rename or remove it",
                String::from_utf8_lossy(&to.0)
            ),
            true,
        );
        Ok(())
    }
}
