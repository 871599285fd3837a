//! Recovery with a damaged log of the catalog ([`Damage`]).
//!
//! Such a catalog shows an earlier state, and programs, the drain and evictions continued from there. A plain file that
//! it does not need may be the only copy of a later version.
//!
//! Invariant: nothing is deleted here for lack of a record. Such a file is set aside, and a note names it, with which
//! `run` and `wait` return 3.

use surgetank_state::Inode;
use surgetank_store::{Cred, StorePath, checksum};
use surgetank_tier::Device;
use surgetank_types::clock;
use surgetank_types::error::Result;
use surgetank_types::model::{FileId, Image, Mark, OpKind, RunId, Seq};

use crate::base::queries::{is_absent, passes};
use crate::base::users::own_cred;
use crate::catalog::Damage;
use crate::files::copies::STORE_TIMEOUT;
use crate::namespace::recover::spilled::retry_until;
use crate::namespace::recover::{ORPHANS, OnTier, Recovery, went_down};

/// Numbers that were given out after the catalog's state: kernel and store may still know them.
const NUMBERS_LEFT_OUT: u64 = 1 << 32;
/// Higher than all numbers ever given out, after any number of damages.
const ALL_SO_FAR: u64 = 1 << 48;

/// After a crash of the machine, unsynced parts of the log may have any content.
pub(crate) fn is_damage(damage: &Damage, image: &Image) -> bool {
    damage.records_behind > 0 || !went_down(image)
}

/// May the store have spilled files without a record?
pub(crate) fn is_doubtful(image: &Image) -> bool {
    image.marks.get(&Mark::DoubtfulBelow).is_some_and(|below| *below > 0)
}

impl Recovery<'_> {
    /// More was lost of the log than a death takes.
    pub(crate) fn damage(&self, image: &Image) -> Option<Damage> {
        let damage = self.base.catalog.recovery().damage?;
        if !is_damage(&damage, image) {
            self.report_damage();
            return None;
        }
        Some(damage)
    }

    /// Later agents can also find files that a damaged catalog did not name, in directories that it did not name.
    pub(crate) fn take_up_doubt(&self, image: &Image) {
        let recorded = image.marks.get(&Mark::DoubtfulBelow).copied();
        // A catalog that starts over is empty until the mark is recorded again.
        let is_unrecorded = || image.marks.is_empty() && self.base.catalog.recovery().damaged_once;
        let below = recorded.or_else(|| is_unrecorded().then_some(ALL_SO_FAR)).unwrap_or(0);
        {
            let mut tree = self.metadata.write_tree();
            tree.doubtful_below = below;
            tree.next_id = tree.next_id.max(below);
        }
        if recorded.is_none() {
            self.metadata.write_down_doubt();
        }
    }

    pub(crate) fn note_damage(&self, damage: &Damage, image: &Image) {
        let why = if went_down(image) {
            "its content was not on the disk when the machine went down, or is damaged"
        } else {
            "it is damaged"
        };
        let behind = match damage.records_behind {
            0 => String::new(),
            records => format!("; {records} intact record(s) behind that build on it and are not believed"),
        };
        self.base.notes.note(
            RunId(0),
            damage.reported_path().display().to_string(),
            format!(
                "the catalog's log ends at byte {}: {why}{behind}. Names, deletions and changes since then are lost; files written since then are on the tiers under {}, if no name of before leads to it; this is the log as it was",
                damage.offset,
                String::from_utf8_lossy(ORPHANS),
            ),
            true,
        );
    }

    /// Called once everything is recorded durably: an agent that is killed before that leaves the report to the next one.
    pub(crate) fn report_damage(&self) {
        let reported = self.metadata.sync_catalog().and_then(|()| self.base.catalog.damage_reported());
        if let Err(why) = reported {
            tracing::warn!(%why, "the damage of the catalog's log will be reported again");
        }
    }

    /// Cancels operations that do not know which file the store should have under the name that they take away. The
    /// name may have another file by now.
    pub(crate) fn leave_out_blind_operations(&self) {
        let mut tree = self.metadata.write_tree();
        tree.next_id += NUMBERS_LEFT_OUT;
        tree.next_seq += NUMBERS_LEFT_OUT;
        tree.doubtful_below = tree.next_id;
        let blind: Vec<Seq> = tree
            .ops
            .iter()
            .filter(|(_, op)| {
                let known = |id: FileId| tree.get(id).is_some_and(|inode| inode.identity.is_some());
                match &op.kind {
                    OpKind::Unlink { file, .. } | OpKind::Rename { file, .. } | OpKind::RemoveDir { file, .. } => {
                        !known(*file)
                    }
                    OpKind::Exchange { a, b, .. } => !known(*a) || !known(*b),
                    OpKind::Publish { .. } | OpKind::SetMeta { .. } | OpKind::Link { .. } => false,
                }
            })
            .map(|(seq, _)| *seq)
            .collect();
        let below = tree.doubtful_below;
        tree.txn.mark(Mark::DoubtfulBelow, below);
        for seq in blind {
            tracing::warn!(
                seq = seq.number(),
                "an operation of a damaged catalog that cannot tell whose name it takes is left out"
            );
            tree.cancel(seq);
        }
    }

    /// Does the copy on a tier still match the store's version of a clean file? A process may have written it since.
    pub(crate) fn is_still_clean(device: &Device, inode: &Inode, on_tier: &OnTier) -> bool {
        on_tier.plain.size_bytes == inode.attr.size_bytes
            && match inode.checksum() {
                Some(sum) => device
                    .open(&on_tier.path, false)
                    .and_then(|file| checksum::reread(&file))
                    .is_ok_and(|found| found == sum),
                None => on_tier.plain.mtime == inode.attr.mtime,
            }
    }

    /// Renames spill temporaries without a record, so that a later clean-up of incomplete copies does not remove them.
    ///
    /// Errors: some of them could not be moved.
    pub(crate) fn keep_spills(&self) -> Result<()> {
        let (dirs, who) = {
            let tree = self.metadata.read_tree();
            let mut dirs: Vec<StorePath> =
                tree.iter().filter(|(_, inode)| inode.is_dir()).filter_map(|(id, _)| tree.applied_path(id)).collect();
            dirs.sort_unstable_by(|one, other| one.0.cmp(&other.0));
            (dirs, tree.get(FileId::ROOT).map_or(Cred { uid: 0, gid: 0 }, Inode::cred))
        };
        let who = own_cred(who);
        let spills = self.files.temporaries.spill_names();
        let until = clock::tick() + STORE_TIMEOUT;
        for dir in dirs {
            let keep = || {
                let listed = self.base.store.list(who, &dir, true)?;
                let mut doubtful = listed.iter().filter(|entry| {
                    !spills.contains(&*entry.name) && self.files.temporaries.is_doubtful_spill(&entry.name)
                });
                doubtful.try_for_each(|entry| self.files.temporaries.keep_spill(who, &dir, &entry.name))
            };
            let kept = retry_until(until, || match keep() {
                Err(why) if is_absent(&why) => Ok(()),
                // It keeps its name, because no agent removes it.
                Err(why) if !passes(&why) => {
                    self.base.notes.note(
                        RunId(0),
                        String::from_utf8_lossy(&dir.0).into_owned(),
                        format!("what was spilled there, and no record of the damaged catalog names, could not be put aside in the store: {why}"),
                        true,
                    );
                    Ok(())
                }
                kept => kept,
            });
            kept.map_err(|why| self.files.copies.does_not_tell(&dir, why))?;
        }
        Ok(())
    }
}
