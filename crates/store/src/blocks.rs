//! The checksums of a file's blocks: what two versions of it have in common, without reading the earlier one.
//!
//! Invariant: the checksums describe the bytes of one file in the store. A component that writes that file otherwise must forget them.
//!
//! The danger that this avoids: a version that is made of an earlier one has a block of neither.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use crate::Gate;
use crate::checksum::{joined, of_bytes, shift_of_bytes};
use crate::extents::with_buffer;
use surgetank_types::mapped::Mapped;

/// Size of a block: a page, the least that a file system writes.
pub const BLOCK_BYTES: usize = 4096;
/// Bytes that are read at once: they stay in the processor's cache until their checksums are known.
const CHUNK_BYTES: usize = 64 * BLOCK_BYTES;

/// CRC-64/NVME of each block of a file; the last block may be shorter.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BlockSums {
    sums: Vec<u64>,
    size_bytes: u64,
}

/// Runs a write with the ids of the user for whom it is done.
pub type Act<'a> = &'a dyn Fn(&dyn Fn() -> io::Result<()>) -> io::Result<()>;

/// Bytes that were written over an earlier version: offset and length, in order.
pub type Written = Vec<(u64, u64)>;

impl BlockSums {
    /// Reads the first `size_bytes` of a file. Errors: those of reading; `UnexpectedEof` if it is shorter.
    pub fn of(file: &File, size_bytes: u64) -> io::Result<Self> {
        let mut sums = Vec::with_capacity(usize::try_from(size_bytes).unwrap_or(0) / BLOCK_BYTES + 1);
        each_chunk(file, 0, size_bytes, &mut |_, chunk| {
            sums.extend(chunk.chunks(BLOCK_BYTES).map(of_bytes));
            Ok(())
        })?;
        Ok(Self { sums, size_bytes })
    }

    /// Length of the file in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// CRC-64/NVME of the whole file.
    pub fn total(&self) -> u64 {
        let whole = usize::try_from(self.size_bytes).unwrap_or(usize::MAX) / BLOCK_BYTES;
        let shift = block_shift();
        let first = self.sums.iter().take(whole).fold(of_bytes(&[]), |sum, block| shift.apply(sum) ^ block);
        let rest = self.size_bytes % BLOCK_BYTES as u64;
        self.sums.get(whole).map_or(first, |last| joined(first, *last, rest))
    }

    fn block_bytes(&self, index: usize) -> u64 {
        self.size_bytes.saturating_sub(index as u64 * BLOCK_BYTES as u64).min(BLOCK_BYTES as u64)
    }

    /// Makes `target`, whose blocks have these checksums, equal to `source`; writes only blocks that differ, by `write`. What is
    /// new and only zeros stays a hole. `mapped`: the source's bytes in memory, so that only what changed is read.
    /// `gate` is called with the bytes written. After an error the checksums mean nothing.
    ///
    /// Errors: those of reading, writing and the gate; `UnexpectedEof` if the source becomes shorter meanwhile.
    pub fn bring(
        &mut self,
        (source, mapped): (&File, Option<&Mapped>),
        target: &File,
        write: Act<'_>,
        gate: Gate<'_>,
    ) -> io::Result<Written> {
        let size_bytes = source.metadata()?.len();
        let mut written = Written::new();
        with_buffer(CHUNK_BYTES as u64, |buffer| {
            let mut at = 0;
            while at < size_bytes {
                let want = usize::try_from(size_bytes - at).unwrap_or(usize::MAX).min(CHUNK_BYTES).min(buffer.len());
                let changed = mapped.map_or(Some((0, want)), |mapped| self.changed_in(mapped, at, want));
                if let Some((from, to)) = changed {
                    let start = at + from as u64;
                    source.read_exact_at(&mut buffer[from..to], start)?;
                    self.bring_chunk((start, &buffer[from..to]), target, &mut written, write, gate)?;
                } else {
                    gate(0)?;
                }
                at += want as u64;
            }
            Ok::<(), io::Error>(())
        })?;
        if size_bytes != self.size_bytes {
            write(&|| target.set_len(size_bytes))?;
        }
        self.sums.truncate(usize::try_from(size_bytes).unwrap_or(usize::MAX).div_ceil(BLOCK_BYTES));
        self.size_bytes = size_bytes;
        Ok(written)
    }

    fn bring_chunk(
        &mut self,
        (start, chunk): (u64, &[u8]),
        target: &File,
        written: &mut Written,
        write: Act<'_>,
        gate: Gate<'_>,
    ) -> io::Result<()> {
        let first = usize::try_from(start).unwrap_or(usize::MAX) / BLOCK_BYTES;
        let mut run: Option<(usize, usize)> = None;
        let mut flush = |run: &mut Option<(usize, usize)>| -> io::Result<()> {
            let Some((from, to)) = run.take() else { return Ok(()) };
            let at = start + from as u64;
            write(&|| target.write_all_at(&chunk[from..to], at))?;
            written.push((at, (to - from) as u64));
            gate((to - from) as u64)
        };
        for (index, block) in chunk.chunks(BLOCK_BYTES).enumerate() {
            let (sum, number, from) = (of_bytes(block), first + index, index * BLOCK_BYTES);
            let before = self.block_bytes(number);
            let same = match self.sums.get_mut(number) {
                Some(known) => std::mem::replace(known, sum) == sum && before == block.len() as u64,
                None => {
                    self.sums.push(sum);
                    block.iter().all(|byte| *byte == 0)
                }
            };
            if same {
                flush(&mut run)?;
            } else {
                run = Some((run.map_or(from, |(from, _)| from), from + block.len()));
            }
        }
        flush(&mut run)?;
        gate(0)
    }

    /// The part of `len` bytes from `start` on that has all blocks without the recorded checksums; `None`: there are none. Other
    /// processes may write the bytes meanwhile: a block that changes during the look has a checksum of neither state, and counts
    /// as changed.
    fn changed_in(&self, mapped: &Mapped, start: u64, len: usize) -> Option<(usize, usize)> {
        let Some(at) = usize::try_from(start).ok().filter(|at| at + len <= mapped.bytes()) else {
            return Some((0, len));
        };
        let first = at / BLOCK_BYTES;
        let changed = mapped.look(at, len, |bytes| {
            let is_changed = |(index, block): (usize, &[u8])| {
                let number = first + index;
                let is_same = self.sums.get(number) == Some(&of_bytes(block));
                (!is_same || self.block_bytes(number) != block.len() as u64).then_some(index * BLOCK_BYTES)
            };
            let mut changed = bytes.chunks(BLOCK_BYTES).enumerate().filter_map(is_changed);
            let from = changed.next()?;
            Some((from, (changed.next_back().unwrap_or(from) + BLOCK_BYTES).min(len)))
        });
        if mapped.is_cut() { Some((0, len)) } else { changed }
    }

    /// Whether these parts of the file have the recorded checksums. Errors: those of reading.
    pub fn match_in(&self, file: &File, parts: &Written) -> io::Result<bool> {
        let mut same = file.metadata()?.len() == self.size_bytes;
        for (start, len) in parts {
            each_chunk(file, *start, start + len, &mut |at, chunk| {
                let first = usize::try_from(at).unwrap_or(usize::MAX) / BLOCK_BYTES;
                let blocks = chunk.chunks(BLOCK_BYTES).enumerate();
                same &= blocks.into_iter().all(|(index, block)| self.sums.get(first + index) == Some(&of_bytes(block)));
                Ok(())
            })?;
        }
        Ok(same)
    }
}

/// Passes the bytes of `start .. end` in chunks of whole blocks; only the last chunk may be shorter.
fn each_chunk(file: &File, start: u64, end: u64, take: &mut dyn FnMut(u64, &[u8]) -> io::Result<()>) -> io::Result<()> {
    let mut at = start;
    with_buffer(CHUNK_BYTES as u64, |buffer| {
        while at < end {
            let want = usize::try_from(end - at).unwrap_or(usize::MAX).min(CHUNK_BYTES).min(buffer.len());
            file.read_exact_at(&mut buffer[..want], at)?;
            take(at, &buffer[..want])?;
            at += want as u64;
        }
        Ok(())
    })
}

/// What appending a block does to a checksum, byte by byte of the register.
struct Shift([[u64; 256]; 8]);

impl Shift {
    fn apply(&self, sum: u64) -> u64 {
        self.0.iter().zip(sum.to_le_bytes()).fold(0, |shifted, (table, byte)| shifted ^ table[usize::from(byte)])
    }
}

fn block_shift() -> &'static Shift {
    static SHIFT: OnceLock<Box<Shift>> = OnceLock::new();
    SHIFT.get_or_init(|| {
        let mut tables = Box::new(Shift([[0; 256]; 8]));
        for (place, table) in tables.0.iter_mut().enumerate() {
            for (byte, entry) in (0_u64..).zip(table.iter_mut()) {
                *entry = shift_of_bytes(byte << (8 * place), BLOCK_BYTES as u64);
            }
        }
        tables
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    fn file_of(bytes: &[u8]) -> File {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(bytes, 0).unwrap();
        file
    }

    fn content(file: &File) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    /// Numbers that do not repeat.
    fn noise(len: usize, seed: u64) -> Vec<u8> {
        let mut state = seed | 1;
        let next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        };
        std::iter::repeat_with(next).take(len).collect()
    }

    #[test]
    fn total_of_blocks_is_checksum_of_whole() {
        for len in [0, 1, 4095, 4096, 4097, 8192, 300_001, 1 << 20] {
            let bytes = noise(len, 7);
            let sums = BlockSums::of(&file_of(&bytes), len as u64).unwrap();
            assert_eq!(sums.total(), of_bytes(&bytes), "{len} bytes");
        }
    }

    #[test]
    fn target_becomes_equal_by_writing_only_what_differs() {
        let sizes = [0, 1, 4095, 4096, 4097, 70_000, 300_000, 1_000_000];
        let pairs = sizes.iter().flat_map(|from| sizes.iter().map(move |to| (*from, *to)));
        for ((from, to), mapped) in pairs.flat_map(|pair| [(pair, false), (pair, true)]) {
            let before = noise(from, 1);
            let mut after = before.clone();
            after.resize(to, 0);
            let grown = to.saturating_sub(from);
            after[to - grown..].copy_from_slice(&noise(grown, 3));
            let changed: Vec<usize> = [0, to / 2, to.saturating_sub(1)].into_iter().filter(|at| *at < to).collect();
            changed.iter().for_each(|at| after[*at] ^= 1);

            let target = file_of(&before);
            let mut sums = BlockSums::of(&target, from as u64).unwrap();
            let passed = Cell::new(0);
            let passed_bytes = std::sync::atomic::AtomicU64::new(0);
            let source = file_of(&after);
            let mapped = (mapped && to > 0).then(|| Mapped::of(&source, to).unwrap());
            let written = sums
                .bring(
                    (&source, mapped.as_ref()),
                    &target,
                    &|write| {
                        passed.set(passed.get() + 1);
                        write()
                    },
                    &|bytes| {
                        passed_bytes.fetch_add(bytes, std::sync::atomic::Ordering::Relaxed);
                        Ok(())
                    },
                )
                .unwrap();
            assert_eq!(content(&target), after, "{from} to {to}");
            assert_eq!(sums, BlockSums::of(&target, to as u64).unwrap(), "{from} to {to}");
            assert!(sums.match_in(&target, &written).unwrap());
            let bytes: u64 = written.iter().map(|(_, len)| len).sum();
            assert_eq!(bytes, passed_bytes.into_inner());
            let most = (changed.len() + 2) * BLOCK_BYTES + grown.next_multiple_of(BLOCK_BYTES);
            assert!(bytes <= most as u64, "{from} to {to}: {bytes} bytes were written");
        }
    }

    #[test]
    fn new_zeros_stay_a_hole() {
        use std::os::unix::fs::MetadataExt;
        let (source, target) = (file_of(b"begin"), file_of(b"begin"));
        let mut sums = BlockSums::of(&target, 5).unwrap();
        source.set_len(8 << 20).unwrap();
        source.write_all_at(b"end", (8 << 20) - 3).unwrap();
        sums.bring((&source, None), &target, &|write| write(), &|_| Ok(())).unwrap();
        assert_eq!(content(&target), content(&source));
        assert!(target.metadata().unwrap().blocks() * 512 < 1 << 20, "zeros were written");
    }

    #[test]
    fn damaged_block_is_found() {
        let bytes = noise(40_000, 5);
        let target = file_of(&bytes);
        let sums = BlockSums::of(&target, 40_000).unwrap();
        assert!(sums.match_in(&target, &vec![(8192, 8192)]).unwrap());
        target.write_all_at(&[!bytes[12_000]], 12_000).unwrap();
        assert!(!sums.match_in(&target, &vec![(8192, 8192)]).unwrap());
    }
}
