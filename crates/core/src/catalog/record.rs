//! One record of the log: a frame around one atomic batch of changes.
//!
//! ```text
//! 0        4        8                16
//! | crc32c | length |      lsn       | postcard of Vec<Change> … |
//! ```
//! Little endian. The checksum covers everything after itself. So a frame of zeros, a frame cut short and a frame with
//! a flipped bit are all bad.
//!
//! The danger that it avoids: bytes that were never a record pass for one.

use postcard::ser_flavors::Flavor;

use super::Lsn;
use surgetank_types::model::Change;

pub(super) const FRAME_BYTES: usize = 16;

/// A record found intact at the beginning of some bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decoded {
    /// Position of the record in the log.
    pub lsn: Lsn,
    /// The changes of one commit, in order.
    pub changes: Vec<Change>,
    /// How many bytes the record takes, frame included.
    pub bytes: usize,
}

/// Reads the record at the beginning of `bytes`; `None` when there is no intact one. Accepts any bytes.
pub fn decode(bytes: &[u8]) -> Option<Decoded> {
    let frame = Frame::read(bytes.first_chunk()?);
    let end = FRAME_BYTES.checked_add(usize::try_from(frame.payload_bytes).ok()?)?;
    let record = bytes.get(..end)?;
    if !frame.fits(&record[FRAME_BYTES..]) {
        return None;
    }
    let (changes, rest) = postcard::take_from_bytes(&record[FRAME_BYTES..]).ok()?;
    if !rest.is_empty() {
        return None;
    }
    Some(Decoded { lsn: frame.lsn, changes, bytes: end })
}

/// The fixed part in front of every batch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Frame {
    crc: u32,
    pub payload_bytes: u32,
    pub lsn: Lsn,
}

impl Frame {
    pub fn read(bytes: &[u8; FRAME_BYTES]) -> Self {
        let [a, b, c, d, e, f, g, h, lsn @ ..] = *bytes;
        Self {
            crc: u32::from_le_bytes([a, b, c, d]),
            payload_bytes: u32::from_le_bytes([e, f, g, h]),
            lsn: Lsn(u64::from_le_bytes(lsn)),
        }
    }

    /// Does `payload` belong to this frame?
    pub fn fits(&self, payload: &[u8]) -> bool {
        let mut covered = [0; FRAME_BYTES - 4];
        covered[..4].copy_from_slice(&self.payload_bytes.to_le_bytes());
        covered[4..].copy_from_slice(&self.lsn.0.to_le_bytes());
        let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
        digest.update(&covered);
        digest.update(payload);
        digest.finalize() == u64::from(self.crc)
    }
}

/// Appends one record to `buffer`; on error the buffer is as before.
pub(super) fn append(buffer: &mut Vec<u8>, lsn: Lsn, changes: &[Change]) -> std::io::Result<()> {
    let start = buffer.len();
    buffer.extend_from_slice(&[0; FRAME_BYTES]);
    let framed = postcard::serialize_with_flavor(changes, Tail(buffer))
        .map_err(|error| error.to_string())
        .and_then(|()| u32::try_from(buffer.len() - start - FRAME_BYTES).map_err(|_| "more than 4 GiB".to_owned()));
    let payload_bytes = match framed {
        Ok(payload_bytes) => payload_bytes,
        Err(why) => {
            buffer.truncate(start);
            return Err(std::io::Error::new(
                std::io::ErrorKind::InvalidInput,
                format!("a batch that cannot be written to the catalog log: {why}"),
            ));
        }
    };
    buffer[start + 4..start + 8].copy_from_slice(&payload_bytes.to_le_bytes());
    buffer[start + 8..start + 16].copy_from_slice(&lsn.0.to_le_bytes());
    let crc = crc_fast::crc32_iscsi(&buffer[start + 4..]);
    buffer[start..start + 4].copy_from_slice(&crc.to_le_bytes());
    Ok(())
}

/// Lets postcard write at the end of a buffer that already holds something.
struct Tail<'a>(&'a mut Vec<u8>);

impl Flavor for Tail<'_> {
    type Output = ();
    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.0.push(byte);
        Ok(())
    }
    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        self.0.extend_from_slice(bytes);
        Ok(())
    }
    fn finalize(self) -> postcard::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use surgetank_types::model::{FileId, Mark, Seq};

    fn sample() -> Vec<u8> {
        let mut buffer = Vec::new();
        let changes =
            [Change::DropFile(FileId(300)), Change::PutMark(Mark::Request(300), u64::MAX), Change::DropOp(Seq::new(9))];
        append(&mut buffer, Lsn(7), &changes).unwrap();
        buffer
    }

    #[test]
    fn record_decodes_with_its_length() {
        let mut bytes = sample();
        let length = bytes.len();
        bytes.extend_from_slice(b"what follows");
        let decoded = decode(&bytes).unwrap();
        assert_eq!((decoded.lsn, decoded.bytes, decoded.changes.len()), (Lsn(7), length, 3));
    }

    #[test]
    fn flipped_bit_or_cut_is_detected() {
        let bytes = sample();
        for at in 0..bytes.len() {
            assert_eq!(decode(&bytes[..at]), None, "cut at {at}");
            for bit in 0..8 {
                let mut bad = bytes.clone();
                bad[at] ^= 1 << bit;
                assert_eq!(decode(&bad), None, "byte {at} bit {bit}");
            }
        }
        assert_eq!(decode(&[0; 64]), None);
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic_even_with_a_valid_checksum(payload in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert_eq!(decode(&payload), None);
            let mut bytes = vec![0; FRAME_BYTES];
            bytes[4..8].copy_from_slice(&(payload.len() as u32).to_le_bytes());
            bytes.extend_from_slice(&payload);
            let crc = crc_fast::crc32_iscsi(&bytes[4..]);
            bytes[..4].copy_from_slice(&crc.to_le_bytes());
            if let Some(decoded) = decode(&bytes) {
                prop_assert_eq!(decoded.bytes, bytes.len());
            }
        }
    }
}
