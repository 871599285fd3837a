//! The checksum of a file: CRC-64/NVME over all of its logical bytes, holes read as zeros.
//!
//! Sparse and dense copies of the same content have the same checksum, so it can be compared across file systems and tools. A
//! hole is not read: appending n zero bytes multiplies the CRC register by x^(8n) modulo the polynomial, in some hundred steps
//! for any n.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crc_fast::{CrcAlgorithm, Digest};

use super::Gate;
use super::extents::{DIRECT_ALIGN_BYTES, Extent, Extents, with_buffer};

/// x^64 + … of CRC-64/NVME, bit-reflected like the register.
const POLYNOMIAL: u64 = 0x9a6c_9329_ac4b_c9b5;
/// The polynomial 1 in the reflected register.
const ONE: u64 = 1 << 63;

/// A checksum that is being computed.
pub struct Checksum {
    digest: Digest,
}

impl Default for Checksum {
    fn default() -> Self {
        Self { digest: Digest::new(CrcAlgorithm::Crc64Nvme) }
    }
}

impl Checksum {
    /// Appends bytes.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.digest.update(bytes);
    }

    /// Appends `count` zeros, without a loop over them.
    pub fn zeros(&mut self, count: u64) {
        if count > 0 {
            let register = multiply(self.digest.get_state(), x_to_the_bytes(count));
            self.digest = Digest::new_with_init_state(CrcAlgorithm::Crc64Nvme, register);
        }
    }

    /// The checksum of all bytes so far.
    pub fn value(&self) -> u64 {
        self.digest.finalize()
    }
}

/// The checksum of two parts in sequence; the second has `second_bytes`.
pub fn joined(first: u64, second: u64, second_bytes: u64) -> u64 {
    crc_fast::checksum_combine(CrcAlgorithm::Crc64Nvme, first, second, second_bytes)
}

/// What a checksum contributes to that of a longer file, in which `count` bytes follow.
pub fn shift_of_bytes(sum: u64, count: u64) -> u64 {
    multiply(sum, x_to_the_bytes(count))
}

/// The checksum of bytes in memory.
pub fn of_bytes(bytes: &[u8]) -> u64 {
    let mut sum = Checksum::default();
    sum.bytes(bytes);
    sum.value()
}

/// The checksum of what the device has, not of what the page cache has. Errors: those of reading.
pub fn reread(file: &File) -> io::Result<u64> {
    // Only advice: dirty or mapped pages stay, and the device will get those.
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed)?;
    checksum(file, &|_| Ok(()))
}

/// Reads the whole file, through the page cache unless the descriptor was opened for direct I/O. The descriptor's offset moves;
/// its length is taken at the start. Errors: those of reading and of the gate; `UnexpectedEof` if the file becomes shorter.
pub fn checksum(file: &File, gate: Gate<'_>) -> io::Result<u64> {
    let mut sum = Checksum::default();
    for extent in Extents::of(file)? {
        match extent? {
            Extent::Hole { len, .. } => sum.zeros(len),
            Extent::Bytes { start, len } => read_extent(file, start, len, |bytes| {
                sum.bytes(bytes);
                gate(bytes.len() as u64)
            })?,
        }
    }
    Ok(sum.value())
}

/// Passes the bytes of `start .. start + len` to `take` in chunks; offsets and lengths of the reads suit direct I/O.
pub fn read_extent(file: &File, start: u64, len: u64, mut take: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
    let (mut at, end) = (start, start + len);
    with_buffer(len + DIRECT_ALIGN_BYTES, |buffer| {
        while at < end {
            let skip = at % DIRECT_ALIGN_BYTES;
            let want = (end - at + skip).next_multiple_of(DIRECT_ALIGN_BYTES).min(buffer.len() as u64);
            let got = match file.read_at(&mut buffer[..want as usize], at - skip) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                result => result?,
            };
            let bytes = &buffer[..got.min((end - at + skip) as usize)];
            if bytes.len() as u64 <= skip {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file became shorter while it was read"));
            }
            let bytes = &bytes[skip as usize..];
            take(bytes)?;
            at += bytes.len() as u64;
        }
        Ok(())
    })
}

/// Product of two polynomials modulo the CRC's, all bit-reflected.
fn multiply(a: u64, mut b: u64) -> u64 {
    let mut product = 0;
    let mut bit = ONE;
    while bit != 0 {
        if a & bit != 0 {
            product ^= b;
        }
        b = if b & 1 == 0 { b >> 1 } else { (b >> 1) ^ POLYNOMIAL };
        bit >>= 1;
    }
    product
}

/// x^(8·count) by squaring.
fn x_to_the_bytes(mut count: u64) -> u64 {
    let mut power = ONE >> 8;
    let mut product = ONE;
    while count != 0 {
        if count & 1 != 0 {
            product = multiply(product, power);
        }
        power = multiply(power, power);
        count >>= 1;
    }
    product
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_of_known_bytes_is_the_published_one() {
        let mut sum = Checksum::default();
        sum.bytes(b"123456789");
        assert_eq!(sum.value(), 0xae8b_1486_0a79_9888);
    }

    #[test]
    fn checksum_of_computed_zeros_equals_that_of_read_zeros() {
        for count in [1_usize, 2, 7, 8, 255, 4096, 70_001, 3 << 20] {
            let (mut fast, mut slow) = (Checksum::default(), Checksum::default());
            for sum in [&mut fast, &mut slow] {
                sum.bytes(b"before");
            }
            fast.zeros(count as u64);
            slow.bytes(&vec![0; count]);
            for sum in [&mut fast, &mut slow] {
                sum.bytes(b"after");
            }
            assert_eq!(fast.value(), slow.value(), "{count} zeros");
        }
    }

    #[test]
    fn checksum_of_huge_hole_needs_no_reading() {
        let (mut once, mut twice) = (Checksum::default(), Checksum::default());
        once.zeros(1 << 50);
        twice.zeros(1 << 49);
        twice.zeros(1 << 49);
        assert_eq!(once.value(), twice.value());

        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 40).unwrap();
        let read = std::sync::atomic::AtomicU64::new(0);
        let gate = |bytes| {
            read.fetch_add(bytes, std::sync::atomic::Ordering::Relaxed);
            Ok(())
        };
        let mut expected = Checksum::default();
        expected.zeros(1 << 40);
        assert_eq!(checksum(&file, &gate).unwrap(), expected.value());
        assert_eq!(read.into_inner(), 0);
    }
}
