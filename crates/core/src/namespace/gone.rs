//! Plain files that go. The catalog stops naming a plain file before it is removed from its tier; an agent that is killed in
//! between would leave bytes that nobody knows, and unknown bytes are never deleted. So the catalog also says which they are,
//! with the same record. Only the last few can be on their way; older sayings are written over.

use std::sync::atomic::Ordering;

use foldhash::HashSet;

use crate::model::{Change, DeviceId, Image};

use super::Namespace;
use super::tree::Tree;

/// More than so many are never between the two steps: each has a thread of its own.
const REMEMBERED: u32 = 256;
const COUNTER: &str = "gone-";

impl Namespace {
    /// What the catalog is told of a plain file that is about to be removed.
    pub(super) fn gone(&self, tree: &Tree, (device, ino): (DeviceId, u64)) -> Change {
        let slot = self.gone_next.fetch_add(1, Ordering::Relaxed) % REMEMBERED;
        let number = tree.device_numbers.get(&device).copied().unwrap_or(device);
        let number = u16::from_be_bytes([number.tier, number.device]);
        Change::PutCounter(format!("{COUNTER}{slot}-{number}"), ino)
    }
}

/// Those that an earlier agent may not have come to remove.
pub(super) fn remembered(image: &Image, tree: &Tree) -> HashSet<(DeviceId, u64)> {
    let device = |number: u16| {
        let [tier, device] = number.to_be_bytes();
        let number = DeviceId { tier, device };
        tree.device_numbers.iter().find(|(_, known)| **known == number).map(|(id, _)| *id)
    };
    let place = |name: &str| device(name.strip_prefix(COUNTER)?.split_once('-')?.1.parse().ok()?);
    image.counters.iter().filter_map(|(name, ino)| Some((place(name)?, *ino))).collect()
}
