//! Plain files on the tiers, matched with the catalog's replicas.

use std::collections::{HashMap, HashSet};

use surgetank_state::{Inode, PlainId, Tree};
use surgetank_tier::Standing;
use surgetank_types::model::{DeviceId, FileId, Image, RunId};

use crate::files::hidden_name;
use crate::namespace::recover::lost::{Doubt, Held, went_down_with};
use crate::namespace::recover::{OnTier, PendingUnlinks, Recovery};

/// How far the plain files are matched.
#[derive(Default)]
struct Matching {
    /// By device and inode number: plain files of which no record is found yet.
    found: HashMap<(DeviceId, u64), OnTier>,
    /// Devices that could not be read, and how many files are only there.
    unread: HashMap<DeviceId, u64>,
    walked: HashSet<DeviceId>,
    /// Files whose plain file has its hidden name, and the path that it gets: so that swapped names come right.
    aside: Vec<(FileId, DeviceId, Vec<u8>)>,
}

impl Recovery<'_> {
    /// Finds every replica on its device, by inode number, and puts it under the path that the catalog says. On a `strange` device
    /// no agent has put anything, as far as the catalog knows. Returns the devices that were read completely. `damaged`: no file
    /// is removed because it has no record.
    pub(crate) fn match_tiers(
        &self,
        strange: &HashSet<DeviceId>,
        pending_unlinks: &PendingUnlinks,
        image: &Image,
        damaged: bool,
    ) -> HashSet<DeviceId> {
        let mut matching = self.walk_tiers();
        {
            let mut tree = self.metadata.write_tree();
            let replicas: Vec<(FileId, PlainId)> =
                tree.iter().filter_map(|(id, inode)| Some((id, inode.replica?))).collect();
            for (id, known) in replicas {
                self.match_replica(&mut tree, &mut matching, (id, known), image, damaged);
            }
        }
        self.set_orphans_aside(matching.found, strange, pending_unlinks, damaged);
        self.report_unread(&matching.unread);
        self.put_in_place(&matching.aside);
        matching.walked
    }

    fn walk_tiers(&self) -> Matching {
        let mut matching = Matching::default();
        for device in self.base.tiers.devices() {
            if !device.is_there() {
                if device.standing() == Standing::Absent {
                    matching.unread.insert(device.id(), 0);
                }
                continue;
            }
            let result = device.walk(&mut |path: &[u8], plain| {
                matching.found.insert((device.id(), plain.ino), OnTier { path: path.to_vec(), plain });
            });
            if let Err(why) = result {
                matching.unread.insert(device.id(), 0);
                self.base.tiers.device_failed(device.id(), &why);
                let at = device.path().display().to_string();
                self.base.notes.note(RunId(0), at, format!("the tier cannot be read: {why}"), true);
            } else {
                matching.walked.insert(device.id());
            }
        }
        matching
    }

    fn match_replica(
        &self,
        tree: &mut Tree,
        matching: &mut Matching,
        (mut id, known): (FileId, PlainId),
        image: &Image,
        damaged: bool,
    ) {
        let place = (known.device, known.ino);
        let device = self.base.tiers.device(known.device);
        let is_it = |on_tier: &OnTier| known.born == 0 || on_tier.plain.born == 0 || known.born == on_tier.plain.born;
        let is_found = matching.found.get(&place).is_some_and(is_it);
        let Some(on_tier) = is_found.then(|| matching.found.remove(&place)).flatten() else {
            let only_there =
                tree.get(id).is_some_and(|inode| inode.logical.is_some() && (inode.dirty() || !inode.sealed));
            match matching.unread.get_mut(&known.device).filter(|_| only_there) {
                // It may be there all the same.
                Some(files) => *files += 1,
                None => {
                    let put_back = self.replica_missing(tree, id, &Held::Tier(known.device));
                    matching.aside.extend(put_back.zip(tree.logical_path(id)).map(|(device, path)| (id, device, path)));
                }
            }
            return;
        };
        let Some(mut want) = tree.logical_path(id) else {
            // Unlinked while open: no process has it open any more, unless one continues after the agent's death.
            if damaged && !self.base.succession.left_open(id) {
                // It may have got a name since.
                tree.drop_replica(id);
                tree.txn.file(id);
                matching.found.insert(place, on_tier);
            } else if !self.base.succession.left_open(id) {
                drop(device.unlink(&on_tier.path));
                tree.drop_replica(id);
            } else if on_tier.path != hidden_name(id) {
                drop(device.follow(&on_tier.path, &hidden_name(id)));
            }
            return;
        };
        let is_clean = |inode: &Inode| inode.sealed && !inode.dirty();
        let written_since = |inode: &Inode| is_clean(inode) && !Self::is_still_clean(device, inode, &on_tier);
        // (Before a machine that went down makes it a spare one.)
        if damaged && tree.get(id).is_some_and(written_since) {
            tree.drop_replica(id);
            tree.txn.file(id);
            matching.found.insert(place, on_tier);
            return;
        }
        let doubt = if went_down_with(image, tree.device_numbers.get(&known.device).copied()) {
            Some(Doubt::MachineWentDown)
        } else {
            Doubt::of_length(tree.get(id), &on_tier.plain)
        };
        if let Some(doubt) = doubt {
            let Some(kept) = self.judge(tree, id, &on_tier, doubt) else {
                drop(device.unlink(&on_tier.path));
                return;
            };
            id = kept;
            want = tree.logical_path(id).unwrap_or(want);
        }
        device.add_used(i64::try_from(on_tier.plain.blocks_bytes).unwrap_or(i64::MAX));
        if let Some(inode) = tree.get_mut(id) {
            inode.charged_bytes = on_tier.plain.blocks_bytes;
        }
        tree.recount(id);
        if on_tier.path != want {
            drop(device.follow(&on_tier.path, &hidden_name(id)));
            matching.aside.push((id, device.id(), want));
        }
    }

    fn report_unread(&self, unread: &HashMap<DeviceId, u64>) {
        for (device, files) in unread {
            let device = self.base.tiers.device(*device);
            if *files > 0 && device.standing() == Standing::Absent {
                let at = device.path().display().to_string();
                let what = format!(
                    "{files} file(s) are on a tier that is not there: {at}; bring it back (mount it again) and start again; until then they are remembered, and not in the store"
                );
                // The verdict names the files that are meant for the store.
                self.base.notes.note(RunId(0), at, what, false);
            }
        }
    }

    pub(crate) fn put_in_place(&self, aside: &[(FileId, DeviceId, Vec<u8>)]) {
        for (id, device, want) in aside {
            if let Err(why) = self.base.tiers.device(*device).follow(&hidden_name(*id), want) {
                let path = String::from_utf8_lossy(want).into_owned();
                let what = format!("cannot be put in its place on the tier: {why}");
                self.base.notes.note(RunId(0), path, what, true);
            }
        }
    }
}
