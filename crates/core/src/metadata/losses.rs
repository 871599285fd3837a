//! Losses: versions whose bytes are gone. The catalog records each loss with the change that gives the version up, and
//! commands report it until the user acknowledges it.
//!
//! The danger that this avoids: one command reports a loss and the next one does not know it.

use std::collections::BTreeMap;

use surgetank_policy::config::Survives;
use surgetank_state::Tree;
use surgetank_tier::{Device, Standing};
use surgetank_types::model::LostRecord;
use surgetank_types::sync::{Arc, Mutex, PoisonError};

use crate::metadata::Metadata;
use crate::report::{Listing, Lost, Scope};

/// The reason why a version on this device is lost.
pub(crate) fn missing_from(device: &Device, store_has_one: bool) -> String {
    let tier = format!("the tier {} ({})", device.tier_name(), device.path().display());
    let how = match (device.standing(), device.survives()) {
        (Standing::Lost, Survives::Agent) => ", which was emptied (a volatile tier does not survive a reboot)",
        (Standing::Lost, _) => ", which was emptied",
        (Standing::Absent, _) => ", which is not there",
        _ => "",
    };
    lost_from(&format!("{tier}{how}"), store_has_one)
}

pub(crate) fn lost_from(place: &str, store_has_one: bool) -> String {
    if store_has_one {
        format!("its newest version is gone from {place}; the store keeps the version before")
    } else {
        format!("it is gone from {place}, and was not in the store yet")
    }
}

/// Versions that are lost, until the user acknowledges them.
pub struct Losses {
    metadata: Arc<Metadata>,
    pub(crate) losses: Mutex<BTreeMap<Box<[u8]>, LostRecord>>,
}

impl Losses {
    pub(crate) fn new(metadata: &Arc<Metadata>) -> Self {
        Self { metadata: metadata.clone(), losses: Mutex::default() }
    }

    /// The caller commits this with the change that gives the version up.
    pub(crate) fn record_loss(&self, tree: &mut Tree, path: &[u8], at: Vec<u8>, why: String) {
        tracing::warn!(path = %String::from_utf8_lossy(path), why, "lost");
        let record = LostRecord { at: at.into(), why };
        tree.txn.lost(path, Some(record.clone()));
        self.losses.lock().unwrap_or_else(PoisonError::into_inner).insert(path.into(), record);
    }

    /// Losses that the user has not acknowledged.
    pub fn losses(&self, scope: &Scope) -> Listing<Lost> {
        let losses = self.losses.lock().unwrap_or_else(PoisonError::into_inner);
        losses.iter().filter(|(path, _)| scope.covers(path)).map(|(path, record)| in_report(path, record)).collect()
    }

    /// The user acknowledges the losses.
    pub fn forget_losses(&self) -> Listing<Lost> {
        let mut tree = self.metadata.write_tree();
        let forgotten = std::mem::take(&mut *self.losses.lock().unwrap_or_else(PoisonError::into_inner));
        forgotten.keys().for_each(|path| tree.txn.lost(path, None));
        self.metadata.commit(&mut tree);
        forgotten.iter().map(|(path, record)| in_report(path, record)).collect()
    }

    pub(crate) fn has_losses(&self) -> bool {
        !self.losses.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }
}

fn in_report(path: &[u8], record: &LostRecord) -> Lost {
    Lost { path: path.into(), at: record.at[..].into(), why: record.why.clone() }
}
