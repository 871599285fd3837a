//! What is different when the catalog's log is damaged ([`Damage`]).
//!
//! It then says what was true once, and programs, the drain and evictions went on from there. What a record of that time calls
//! superfluous may be the only copy of what came later. So nothing is deleted here for want of a record: it is put aside and
//! named; and whoever looks hears that something is missing (exit code 3).

use crate::catalog::Damage;
use crate::model::{FileId, Image, OpKind, RunId, STORE_TEMPORARY_PREFIX, Seq};
use crate::store::{Cred, StorePath, checksum};
use crate::tier::Device;

use super::super::Namespace;
use super::super::journal::Txn;
use super::super::tree::{Inode, Name};
use super::{ORPHANS, OnTier, went_down};

/// Numbers that were given out since what the catalog says: kernel and store may still know them.
const NUMBERS_LEFT_OUT: u64 = 1 << 32;
const KEPT_IN_STORE: &[u8] = b"surgetank-orphan-";

impl Namespace {
    /// More was lost of the log than a death takes.
    pub(super) fn damage(&self, image: &Image) -> Option<Damage> {
        let damage = self.catalog.recovery().damage?;
        // A machine that goes down leaves what it never synced in whatever shape.
        if damage.records_behind == 0 && went_down(image) {
            self.damage_is_told();
            return None;
        }
        Some(damage)
    }

    pub(super) fn tell_damage(&self, damage: &Damage, image: &Image) {
        let why = if went_down(image) {
            "what is there was not on the disk when the machine went down, or is damaged"
        } else {
            "it is damaged"
        };
        let behind = match damage.records_behind {
            0 => String::new(),
            records => format!("; {records} intact record(s) behind that build on it and are not believed"),
        };
        self.note(
            RunId(0),
            damage.told_path().display().to_string(),
            format!(
                "the catalog's log ends at byte {}: {why}{behind}. Names, deletions and changes since then are lost; what was written since lies on the tiers under {}, if no name of before leads to it; this is the log as it was",
                damage.offset,
                String::from_utf8_lossy(ORPHANS),
            ),
            true,
        );
    }

    /// Once all of it is written down for good: an agent that is killed before leaves it to the next one.
    pub(super) fn damage_is_told(&self) {
        let told = self.sync_catalog().and_then(|()| self.catalog.damage_told());
        if let Err(why) = told {
            tracing::warn!(%why, "that the catalog's log is damaged will be told once more");
        }
    }

    /// Operations that do not know what the store should have under the name they take away: it may be another file's by now.
    pub(super) fn leave_out_blind_operations(&self) {
        let mut tree = self.tree();
        tree.next_id += NUMBERS_LEFT_OUT;
        tree.next_seq += NUMBERS_LEFT_OUT;
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
        let mut txn = Txn::default();
        for seq in blind {
            tracing::warn!(
                seq = seq.0,
                "an operation of a damaged catalog that cannot tell whose name it takes is left out"
            );
            self.cancel(&mut tree, &mut txn, seq);
        }
        self.commit(&tree, txn);
    }

    /// Is a copy on a tier still what the store has of a clean file? It may have been written since.
    pub(super) fn is_still_clean(device: &Device, inode: &Inode, on_tier: &OnTier) -> bool {
        on_tier.plain.size_bytes == inode.attr.size_bytes
            && match inode.checksum {
                Some(sum) => device
                    .open(&on_tier.path, false)
                    .and_then(|file| checksum::reread(&file))
                    .is_ok_and(|found| found == sum),
                None => on_tier.plain.mtime == inode.attr.mtime,
            }
    }

    /// What files were spilled to in the store, and no record names: out of the way of those who remove half-made copies.
    pub(super) fn keep_spills(&self) {
        let (dirs, spills, who) = {
            let tree = self.tree();
            let mut dirs: Vec<StorePath> =
                tree.iter().filter(|(_, inode)| inode.is_dir()).filter_map(|(id, _)| tree.applied_path(id)).collect();
            dirs.sort_unstable_by(|one, other| one.0.cmp(&other.0));
            let spills: Vec<Name> = tree.iter().filter_map(|(_, inode)| Some(inode.spill()?.1.clone())).collect();
            (dirs, spills, tree.get(FileId::ROOT).map_or(Cred { uid: 0, gid: 0 }, Inode::cred))
        };
        let who = self.own_cred(who);
        let prefix = [STORE_TEMPORARY_PREFIX, self.key().as_bytes(), b"-spill-"].concat();
        for dir in dirs {
            for entry in self.store.list(who, &dir, true).unwrap_or_default() {
                let Some(number) = entry.name.strip_prefix(&*prefix) else { continue };
                if spills.iter().any(|spill| **spill == *entry.name) {
                    continue;
                }
                let mut to = dir.join(&[KEPT_IN_STORE, self.key().as_bytes(), b"-", number].concat());
                while self.store.stat(who, &to).is_ok() {
                    to.0.push(b'+');
                }
                let from = dir.join(&entry.name);
                let text = match self.store.rename(who, &from, &to) {
                    Ok(()) => format!(
                        "no record names it any more, for the catalog was damaged: {} in the store; it may be the only copy of a file: look at it, and rename or remove it",
                        String::from_utf8_lossy(&to.0)
                    ),
                    Err(why) => {
                        format!("no record names it any more, and it could not be put aside in the store: {why}")
                    }
                };
                self.note(RunId(0), String::from_utf8_lossy(&from.0).into_owned(), text, true);
            }
        }
    }
}
