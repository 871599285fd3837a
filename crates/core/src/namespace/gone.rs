//! Plain files that go. The catalog stops naming a plain file before it is removed from its tier; an agent that is killed in
//! between would leave bytes that nobody knows, and unknown bytes are never deleted. So the catalog also says which they are,
//! with the same record. Only the last few can be on their way; older sayings are written over.
//!
//! The danger it avoids: a saying outlives its file, and file systems give inode numbers out again. What is said is
//! therefore the file's number, device and time of birth together: another file with its number is not meant.

use std::sync::atomic::Ordering;

use foldhash::HashSet;

use crate::model::{Change, DeviceId, Image};
use crate::tier::Plain;

use super::Namespace;
use super::tree::Tree;

/// More than so many are never between the two steps: each has a thread of its own.
const REMEMBERED: u32 = 256;
const COUNTER: &str = "gone-";

impl Namespace {
    /// What lies there, if it is this one: to be told to the transaction that lets it go. `None` where it cannot be told
    /// from a later file: then nothing is said, and what is left is kept.
    pub(super) fn going(&self, tree: &Tree, (device, ino): (DeviceId, u64), path: &[u8]) -> Option<u64> {
        let plain = self.tiers.device(device).plain_at(path).ok()??;
        if plain.ino != ino {
            return None;
        }
        said(tree.device_numbers.get(&device).copied().unwrap_or(device), plain)
    }

    pub(super) fn gone(&self, file: u64) -> Change {
        let slot = self.gone_next.fetch_add(1, Ordering::Relaxed) % REMEMBERED;
        Change::PutCounter(format!("{COUNTER}{slot}"), file)
    }
}

fn said(device: DeviceId, plain: Plain) -> Option<u64> {
    let (seconds, nanoseconds) = plain.born?;
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme);
    digest.update(&[device.tier, device.device]);
    digest.update(&plain.ino.to_le_bytes());
    digest.update(&seconds.to_le_bytes());
    digest.update(&nanoseconds.to_le_bytes());
    Some(digest.finalize())
}

/// Those that an earlier agent may not have come to remove.
pub(super) fn remembered(image: &Image) -> HashSet<u64> {
    let ours = |name: &str| name.strip_prefix(COUNTER).is_some_and(|slot| slot.parse::<u32>().is_ok());
    image.counters.iter().filter(|(name, _)| ours(name)).map(|(_, file)| *file).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A saying about a removed file named the next file that got its inode number, and that one was removed.
    #[test]
    fn an_inode_number_that_came_again_was_taken_for_the_file_that_went() {
        let device = DeviceId { tier: 0, device: 0 };
        let went = Plain { ino: 12, born: Some((1_700_000_000, 5)) };
        assert_eq!(said(device, went), said(device, went));
        assert_ne!(said(device, went), said(device, Plain { born: Some((1_700_000_000, 6)), ..went }));
        assert_ne!(said(device, went), said(DeviceId { tier: 0, device: 1 }, went));
        assert_ne!(said(device, went), said(device, Plain { ino: 13, ..went }));
        assert_eq!(said(device, Plain { born: None, ..went }), None, "it cannot be told from another");
    }
}
