//! Scrub, against bit rot: reads every copy on a tier that the store has too, and compares it with the checksum of its
//! publication.
//!
//! - A bad copy on a tier is given up if the store's copy is right.
//! - A bad copy in the store is written again if the tier's copy is right.
//!
//! The danger that this avoids: a bad copy replaces the good one.

use surgetank_state::PlainId;
use surgetank_store::{Source, Store, StorePath};
use surgetank_tier::Tiers;
use surgetank_types::model::{DeviceId, FileId};
use surgetank_types::sync::Arc;

use crate::base::Base;
use crate::base::users::own_cred;
use crate::files::copies::Copies;
use crate::files::evict::Eviction;
use crate::files::sync::Syncs;
use crate::metadata::Metadata;
use crate::metadata::losses::Losses;
use crate::report::{Audit, Finding, Scope, What};

/// A file with two copies.
struct Pair {
    id: FileId,
    version: u32,
    plain: PlainId,
    path: Vec<u8>,
    in_store: StorePath,
    right: u64,
}

/// Compares copies on tiers with the store.
pub struct Scrub {
    store: Arc<dyn Store>,
    tiers: Arc<Tiers>,
    copies: Arc<Copies>,
    eviction: Arc<Eviction>,
    losses: Arc<Losses>,
    metadata: Arc<Metadata>,
    syncs: Arc<Syncs>,
}

impl Scrub {
    pub(crate) fn new(
        base: &Base,
        copies: &Arc<Copies>,
        eviction: &Arc<Eviction>,
        losses: &Arc<Losses>,
        metadata: &Arc<Metadata>,
        syncs: &Arc<Syncs>,
    ) -> Self {
        Self {
            store: base.store.clone(),
            tiers: base.tiers.clone(),
            copies: copies.clone(),
            eviction: eviction.clone(),
            losses: losses.clone(),
            metadata: metadata.clone(),
            syncs: syncs.clone(),
        }
    }

    /// Compares the copies on tiers and in the store with the checksum. `repair`: evicts a wrong copy on a tier, and
    /// publishes a file again whose copy in the store is wrong.
    pub fn scrub(&self, repair: bool) -> Audit {
        let mut audit = Audit::default();
        let ids: Vec<FileId> =
            self.metadata.read_tree().iter().filter(|(_, inode)| inode.replica.is_some()).map(|(id, _)| id).collect();
        for id in ids {
            audit.files += 1;
            audit.findings.extend(self.missing(id));
            if let Some(pair) = self.pair(id) {
                audit.findings.extend(self.compare(&pair, repair, &mut audit.scrubbed_bytes));
            }
        }
        let lost = self.losses.losses(&Scope::everything());
        audit.findings.extend(lost.first.into_iter().map(|lost| Finding {
            what: What::Lost,
            path: lost.path,
            at: lost.at,
            text: lost.why,
            repaired: false,
            copy: None,
        }));
        audit
    }

    /// Finds a newest version that the tier should have, and does not.
    fn missing(&self, id: FileId) -> Option<Finding> {
        let tree = self.metadata.read_tree();
        let inode = tree.get(id).filter(|inode| inode.dirty() || !inode.sealed)?;
        let device = self.tiers.device(inode.replica?.device);
        let absent = self.copies.absence(&tree, id)?;
        let path = tree.logical_path(id)?;
        let what = if absent.lasting && device.is_there() { What::Lost } else { What::Unread };
        let at = device.shown(&path)[..].into();
        Some(Finding { what, path: path[..].into(), at, text: absent.text, repaired: false, copy: None })
    }

    fn pair(&self, id: FileId) -> Option<Pair> {
        let tree = self.metadata.read_tree();
        let inode = tree.get(id).filter(|inode| inode.sealed && !inode.dirty() && inode.home().is_none())?;
        Some(Pair {
            id,
            version: inode.version,
            plain: inode.replica?,
            path: tree.logical_path(id)?,
            in_store: tree.applied_path(id)?,
            right: inode.checksum()?,
        })
    }

    fn compare(&self, pair: &Pair, repair: bool, read_bytes: &mut u64) -> Option<Finding> {
        let device: DeviceId = pair.plain.device;
        let device = self.tiers.device(device);
        let mut sum = |source: Source| {
            *read_bytes += match &source {
                Source::Plain(file) => file.metadata()?.len(),
                Source::Remote(remote) => remote.identity().size_bytes,
            };
            source.sum().map(|sum| sum == pair.right)
        };
        let on_tier = device.open(&pair.path, false).and_then(|file| sum(Source::Plain(file)));
        let who = own_cred(self.metadata.read_tree().get(pair.id)?.cred());
        // Another client may have changed the store's copy, so its identity is checked before its bytes are read.
        let known = self.metadata.read_tree().get(pair.id)?.identity;
        let unchanged = self
            .store
            .stat(who, &pair.in_store)
            .is_ok_and(|stat| known.is_some_and(|known| known.is_still(&stat.identity)));
        if !unchanged {
            // Another client changed it: there is nothing to compare with.
            return None;
        }
        let in_store = self.store.source(who, &pair.in_store).and_then(sum);
        let (what, at, text) = match (on_tier, in_store) {
            (Ok(true), Ok(true)) => return None,
            (Ok(false) | Err(_), Ok(true)) => {
                (What::RottenOnTier, false, "its bytes are not those that were written; the store's are")
            }
            (Ok(true), _) => (What::RottenInStore, true, "its bytes are not those that were written; the tier's are"),
            _ => {
                (What::RottenEverywhere, true, "its bytes are not those that were written, and no other copy has them")
            }
        };
        // Written, moved or evicted during the reads.
        let _inode = self.metadata.lock_inode(pair.id);
        let still = self.pair(pair.id).is_some_and(|now| now.version == pair.version && now.plain == pair.plain);
        if !still || self.metadata.opens().get(&pair.id).is_some_and(|open| open.writers() > 0) {
            return None;
        }
        let repaired = repair
            && match what {
                What::RottenOnTier => {
                    self.eviction.evict_locked(pair.id, "its bytes had gone bad on the tier", true) > 0
                }
                What::RottenInStore => self.publish_again(pair.id),
                _ => false,
            };
        let at = if at {
            format!("{}/{}", self.store.describe(), pair.in_store)
        } else {
            format!("{}/{}", device.files_path().display(), String::from_utf8_lossy(&pair.path))
        };
        let (path, at) = (pair.path.as_slice().into(), at.into_bytes().as_slice().into());
        Some(Finding { what, path, at, text: text.to_owned(), repaired, copy: None })
    }

    /// The store's copy is bad: the tier's copy becomes a new version.
    fn publish_again(&self, id: FileId) -> bool {
        let mut tree = self.metadata.write_tree();
        let Some(inode) = tree.get_mut(id) else { return false };
        inode.version += 1;
        tree.recount(id);
        tree.txn.file(id);
        self.metadata.queue_publish(&mut tree, id);
        self.syncs.to_be_synced(&tree, id);
        let queued = tree.get(id).is_some_and(|inode| inode.publish.is_some());
        drop(tree);
        self.metadata.wake();
        queued
    }
}
