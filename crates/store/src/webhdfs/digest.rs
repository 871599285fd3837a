//! The sum that HDFS has of a file: of every 512 bytes a CRC, of a block's CRCs an MD5, of these an MD5, with zeros behind them:
//! as many as are left of a buffer that began with room for two and doubled.
//!
//! Datanodes keep the CRCs beside the bytes and check them whenever they touch these, so the server can tell the sum of what
//! it has without reading it, and we can tell what it has to be while we send.

use crc_fast::CrcAlgorithm;
use md5::{Digest as _, Md5};

use super::answers::{Digest, ServerDefaults, from_hexadecimal};

const MD5_BYTES: usize = 16;
/// Hadoop's `DataOutputBuffer` begins with so much, and `FileChecksumHelper` sums all of it.
const BUFFER_BYTES: usize = 32;

/// In the making.
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

/// Of a whole file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sum {
    /// What the algorithm's name ends with.
    ending: String,
    md5: [u8; MD5_BYTES],
}

impl Digesting {
    /// `None`: of files with such sums nothing is known here.
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
    /// Is that what the server has? `None`: it sums in another way.
    pub fn is(&self, told: &Digest) -> Option<bool> {
        let bytes = from_hexadecimal(&told.bytes)?;
        // Bytes a CRC is of, CRCs a block has, the sum.
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
    fn however_the_bytes_come_the_sum_is_the_same() {
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
