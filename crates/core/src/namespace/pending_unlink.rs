//! Plain files that go. The catalog stops naming a plain file before it is removed from its tier; an agent that is killed in
//! between would leave bytes that nobody knows, and unknown bytes are never deleted. So the catalog also says which they are,
//! with the same record. Only the last few can be on their way; older sayings are written over.
//!
//! The danger it avoids: a saying outlives its file, and file systems give inode numbers out again. What is said is
//! therefore the file's number, device and time of birth together: another file with its number is not meant.

use surgetank_types::sync::atomic::Ordering;

use foldhash::HashSet;

use surgetank_types::model::{Change, DeviceId, Image};

use super::Namespace;
use surgetank_state::{PlainId, Tree};

/// More than so many are never between the two steps: each has a thread of its own.
const REMEMBERED: u32 = 256;
const COUNTER: &str = "gone-";

impl Namespace {
    /// What the catalog is told of a plain file that is about to be removed. Nothing, where it could not be told from a
    /// later file: then what is left is kept.
    pub(super) fn gone(&self, tree: &Tree, plain: PlainId) -> Option<Change> {
        let slot = self.gone_next.fetch_add(1, Ordering::Relaxed) % REMEMBERED;
        Some(Change::PutCounter(format!("{COUNTER}{slot}"), saying(tree, plain)?))
    }
}

pub(super) fn saying(tree: &Tree, plain: PlainId) -> Option<u64> {
    said(tree.device_numbers.get(&plain.device).copied().unwrap_or(plain.device), plain)
}

fn said(device: DeviceId, plain: PlainId) -> Option<u64> {
    if plain.born == 0 {
        return None;
    }
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme);
    digest.update(&[device.tier, device.device]);
    digest.update(&plain.ino.to_le_bytes());
    digest.update(&plain.born.to_le_bytes());
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
        let went = PlainId { device, ino: 12, born: 77 };
        assert_eq!(said(device, went), said(device, went));
        assert_ne!(said(device, went), said(device, PlainId { born: 78, ..went }));
        assert_ne!(said(device, went), said(DeviceId { tier: 0, device: 1 }, went));
        assert_ne!(said(device, went), said(device, PlainId { ino: 13, ..went }));
        assert_eq!(said(device, PlainId { born: 0, ..went }), None, "it cannot be told from another");
    }
}
