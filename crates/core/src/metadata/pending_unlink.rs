//! Pending unlinks: plain files that are about to be removed. The catalog stops naming a plain file before its removal
//! from the tier. An agent that is killed in between would leave unknown bytes, and unknown bytes are never deleted. So
//! the same record also says which file it is. Only the last few can be pending; new records overwrite older ones.
//!
//! The danger that this avoids: a record outlives its file, and the file system gives the inode number to another file.
//! So a record has the file's number, device and time of birth together.

use foldhash::HashSet;

use surgetank_state::{PlainId, Tree};
use surgetank_types::model::{DeviceId, Image, Mark};

pub(crate) fn mark_of(tree: &Tree, plain: PlainId) -> Option<u64> {
    digest(tree.device_numbers.get(&plain.device).copied().unwrap_or(plain.device), plain)
}

fn digest(device: DeviceId, plain: PlainId) -> Option<u64> {
    if plain.born == 0 {
        return None;
    }
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme);
    digest.update(&[device.tier, device.device]);
    digest.update(&plain.ino.to_le_bytes());
    digest.update(&plain.born.to_le_bytes());
    Some(digest.finalize())
}

/// The files that an earlier agent may not have removed.
pub(crate) fn remembered(image: &Image) -> HashSet<u64> {
    image.marks.iter().filter(|(mark, _)| matches!(mark, Mark::PendingUnlink(_))).map(|(_, file)| *file).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fault: a record of a removed file matched the next file with its inode number, and that file was removed.
    #[test]
    fn reused_inode_number_is_not_the_removed_file() {
        let device = DeviceId { tier: 0, device: 0 };
        let went = PlainId { device, ino: 12, born: 77 };
        assert_eq!(digest(device, went), digest(device, went));
        assert_ne!(digest(device, went), digest(device, PlainId { born: 78, ..went }));
        assert_ne!(digest(device, went), digest(DeviceId { tier: 0, device: 1 }, went));
        assert_ne!(digest(device, went), digest(device, PlainId { ino: 13, ..went }));
        assert_eq!(digest(device, PlainId { born: 0, ..went }), None, "it is indistinguishable from another file");
    }
}
