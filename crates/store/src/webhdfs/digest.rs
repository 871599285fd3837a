//! The checksum that HDFS has of a file: a CRC of every 512 bytes, an MD5 of each block's CRCs, and an MD5 of these, followed
//! by zeros: as many as are left of a buffer that began with space for two and doubled (Hadoop's `FileChecksumHelper`,
//! `MD5MD5CRC32FileChecksum`).
//!
//! Datanodes keep the CRCs beside the bytes and check them at every access. The server can therefore tell the checksum without
//! reading the bytes, and the driver computes the expected one while it sends.

use crc_fast::CrcAlgorithm;
use md5::{Digest as _, Md5};

use super::answers::{Digest, ServerDefaults, from_hexadecimal};

const MD5_BYTES: usize = 16;
/// Hadoop's `DataOutputBuffer` begins with this size, and `FileChecksumHelper` sums all of it.
const BUFFER_BYTES: usize = 32;

/// A checksum that is being computed.
pub struct Digesting {
    crc: CrcAlgorithm,
    word: &'static str,
    chunk_bytes: usize,
    block_bytes: u64,
    chunk: Vec<u8>,
    in_block: u64,
    block: Md5,
    blocks: usize,
    whole: Md5,
}

/// The checksum of a whole file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sum {
    /// The end of the algorithm's name.
    ending: String,
    md5: [u8; MD5_BYTES],
}

impl Digesting {
    /// `None`: checksums of such files are not supported.
    pub fn new(defaults: &ServerDefaults) -> Option<Self> {
        let (crc, word) = match defaults.checksum_type {
            1 => (CrcAlgorithm::Crc32IsoHdlc, "CRC32"),
            2 => (CrcAlgorithm::Crc32Iscsi, "CRC32C"),
            _ => return None,
        };
        let chunk_bytes = usize::try_from(defaults.bytes_per_checksum).ok().filter(|bytes| *bytes > 0)?;
        let whole_chunks = defaults.block_size > 0 && defaults.block_size.is_multiple_of(chunk_bytes as u64);
        whole_chunks.then(|| Self {
            crc,
            word,
            chunk_bytes,
            block_bytes: defaults.block_size,
            chunk: Vec::with_capacity(chunk_bytes),
            in_block: 0,
            block: Md5::new(),
            blocks: 0,
            whole: Md5::new(),
        })
    }

    pub fn bytes(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.chunk.is_empty() && bytes.len() >= self.chunk_bytes {
                let (chunk, rest) = bytes.split_at(self.chunk_bytes);
                self.end_chunk(chunk);
                bytes = rest;
                continue;
            }
            let (more, rest) = bytes.split_at(bytes.len().min(self.chunk_bytes - self.chunk.len()));
            self.chunk.extend_from_slice(more);
            bytes = rest;
            if self.chunk.len() == self.chunk_bytes {
                self.end_held();
            }
        }
    }

    fn end_held(&mut self) {
        let mut chunk = std::mem::take(&mut self.chunk);
        self.end_chunk(&chunk);
        chunk.clear();
        self.chunk = chunk;
    }

    fn end_chunk(&mut self, chunk: &[u8]) {
        let crc = u32::try_from(crc_fast::checksum(self.crc, chunk)).unwrap_or(0);
        self.block.update(crc.to_be_bytes());
        self.in_block += chunk.len() as u64;
        if self.in_block >= self.block_bytes {
            self.end_block();
        }
    }

    fn end_block(&mut self) {
        let block = std::mem::take(&mut self.block);
        self.whole.update(block.finalize());
        self.blocks += 1;
        self.in_block = 0;
    }

    pub fn sum(mut self) -> Sum {
        if !self.chunk.is_empty() {
            self.end_held();
        }
        if self.in_block > 0 {
            self.end_block();
        }
        let full = self.blocks * MD5_BYTES;
        self.whole.update(vec![0; full.next_power_of_two().max(BUFFER_BYTES) - full]);
        Sum { ending: format!("MD5-of-{}{}", self.chunk_bytes, self.word), md5: self.whole.finalize().into() }
    }
}

impl Sum {
    /// Whether the server has this checksum; `None` if it uses another algorithm.
    pub fn is(&self, told: &Digest) -> Option<bool> {
        let bytes = from_hexadecimal(&told.bytes)?;
        // Bytes of a CRC, CRCs of a block, the checksum.
        let md5 = bytes.get(12..28)?;
        let same_way = told.algorithm.starts_with("MD5-of-") && told.algorithm.ends_with(&self.ending);
        same_way.then_some(md5 == self.md5)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(bytes: &[u8], block_size: u64, piece: usize) -> Sum {
        let defaults = ServerDefaults { block_size, bytes_per_checksum: 512, checksum_type: 2 };
        let mut digesting = Digesting::new(&defaults).unwrap();
        bytes.chunks(piece).for_each(|piece| digesting.bytes(piece));
        digesting.sum()
    }

    #[test]
    fn digest_is_independent_of_chunks() {
        let bytes = crate::conformance::noise(100_001);
        let whole = sum(&bytes, 1 << 20, bytes.len());
        for piece in [1, 511, 512, 513, 4096] {
            assert_eq!(sum(&bytes, 1 << 20, piece), whole, "{piece}");
        }
        assert_ne!(sum(&bytes, 2048, 513), whole, "blocks count");
        let told = |algorithm: &str, md5: &[u8; 16]| Digest {
            algorithm: algorithm.into(),
            bytes: format!("0000020000000000000000ff{}00000000", super::super::answers::hexadecimal(md5)),
        };
        assert_eq!(whole.is(&told("MD5-of-0MD5-of-512CRC32C", &whole.md5)), Some(true));
        assert_eq!(whole.is(&told("MD5-of-0MD5-of-512CRC32C", &[1; 16])), Some(false));
        assert_eq!(whole.is(&told("MD5-of-0MD5-of-512CRC32", &whole.md5)), None);
        assert_eq!(whole.is(&told("COMPOSITE-CRC32C", &whole.md5)), None);
    }
}
