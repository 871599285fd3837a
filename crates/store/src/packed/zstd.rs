//! The format of a compressed file: frames that `zstd -d` joins again, and at the end a table of them, so that any part can be
//! read without the parts before it.
//!
//! ```text
//! frame …                 each of FRAME_BYTES of content (the last one of what is left), with zstd's own checksum
//! skippable frame         RECORD: length and CRC-64/NVME of the whole content
//! skippable frame         the table of zstd's "seekable format" 0.1.0: lengths of all frames before it
//! ```
//! `zstd -d` skips both skippable frames; other readers of the seekable format (zstd, contrib/seekable_format) can use the
//! table.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use rustix::fs::{Mode, OFlags};

use super::super::checksum::{self, Checksum};
use super::super::{Cred, Gate, Remote, Savings, StorePath};
use super::{Content, Made, Packing, locked};
use surgetank_types::sync::{Arc, Mutex};

/// The end of a compressed file's name.
pub const SUFFIX: &[u8] = b".surgetank.zst";
/// Smaller files stay plain: they take a block of the store anyway.
const WORTH_BYTES: u64 = 4096;

/// Level of zstd for a file that is published at this path; `None`: it stays plain.
pub type Choice = Box<dyn Fn(&StorePath) -> Option<i32> + Send + Sync>;

/// Packs files by compression.
pub struct Zstd {
    choose: Choice,
    /// Directory of the unnamed files with compressed bytes, until they are staged.
    scratch: OwnedFd,
    savings: Mutex<Savings>,
    /// Also compresses files that are small or do not become smaller: for tests.
    always: bool,
}

impl Zstd {
    /// Compresses the files that `choose` selects; `scratch` is a directory for unnamed files.
    pub fn new(scratch: OwnedFd, choose: Choice) -> Self {
        Self { choose, scratch, savings: Mutex::default(), always: false }
    }

    #[cfg(test)]
    pub(super) fn always(self) -> Self {
        Self { always: true, ..self }
    }
}

impl Packing for Zstd {
    fn suffix(&self) -> &'static [u8] {
        SUFFIX
    }

    fn make(&self, _who: Cred, bound: &StorePath, source: &File, gate: Gate<'_>) -> io::Result<Option<Made>> {
        let Some(level) = (self.choose)(bound) else { return Ok(None) };
        if source.metadata()?.len() < WORTH_BYTES && !self.always {
            return Ok(None);
        }
        let began = surgetank_types::clock::tick();
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let scratch = rustix::fs::openat(&self.scratch, c".", flags, Mode::from_raw_mode(0o600));
        // If it cannot be compressed, the store gets it unchanged.
        let unmade = |why: io::Error| {
            tracing::warn!(path = %bound, %why, "no scratch file for compression can be made: the file is stored uncompressed");
        };
        let scratch = match scratch {
            Ok(scratch) => File::from(scratch),
            Err(why) => {
                unmade(why.into());
                return Ok(None);
            }
        };
        let made = match compress(source, &scratch, level, self.always, gate) {
            Err(why) if matches!(why.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT)) => {
                unmade(why);
                return Ok(None);
            }
            made => made?,
        };
        let mut savings = locked(&self.savings);
        let took = surgetank_types::clock::tick().saturating_duration_since(began);
        savings.compress_ms += u64::try_from(took.as_millis()).unwrap_or(0);
        let Some(Compressed { length_bytes, checksum, stored_bytes }) = made else {
            savings.vain_files += 1;
            return Ok(None);
        };
        savings.compressed_files += 1;
        savings.content_bytes += length_bytes;
        savings.stored_bytes += stored_bytes;
        Ok(Some(Made { packed: scratch, length_bytes, checksum, behind: None }))
    }

    fn length_of(&self, packed: &dyn Remote) -> io::Result<u64> {
        table_of(packed).map(|table| table.length_bytes)
    }

    fn open(&self, _who: Cred, packed: Arc<dyn Remote>) -> io::Result<Content> {
        let table = table_of(&*packed)?;
        let (length_bytes, checksum) = (table.length_bytes, table.checksum);
        let read = move |buffer: &mut [u8], offset: u64| table.unpack(&*packed, buffer, offset);
        Ok(Content { length_bytes, checksum, read: Box::new(read) })
    }

    fn savings(&self) -> Savings {
        *locked(&self.savings)
    }
}

fn table_of(packed: &dyn Remote) -> io::Result<Table> {
    Table::read(packed.identity().size_bytes, &|buffer, offset| packed.read_at(buffer, offset))
}

/// Bytes of content in a frame. Reads are rarely smaller: a read of one byte unpacks a whole frame.
const FRAME_BYTES: u64 = 1 << 20;
/// Bytes that are first read from a file's end: enough for the table of some 2 GiB.
const TAIL_BYTES: u64 = 16 << 10;
/// Most compressed bytes of one request.
const RUN_BYTES: u64 = 8 << 20;
/// Bytes that are compressed before a file is judged not to become smaller.
const TRIAL_BYTES: u64 = 16 << 20;

const SKIPPABLE: u32 = 0x184d_2a50;
const RECORD_MAGIC: u32 = SKIPPABLE + 5;
const TABLE_MAGIC: u32 = SKIPPABLE + 0xe;
const SEEKABLE_MAGIC: u32 = 0x8f92_eab1;
const MARK: [u8; 8] = *b"surge\x00\x00\x01";
/// Magic number, length, mark, length of the content, its checksum, checksum of those three.
const RECORD_BYTES: u64 = 8 + 32;
const FOOTER_BYTES: u64 = 9;

/// A file's content, compressed into another file.
struct Compressed {
    pub length_bytes: u64,
    /// CRC-64/NVME of the content.
    pub checksum: u64,
    pub stored_bytes: u64,
}

/// Whether less than a twentieth is saved: not worth the time of its readers.
fn is_vain(content_bytes: u64, stored_bytes: u64) -> bool {
    stored_bytes > content_bytes / 20 * 19
}

/// Writes all of `source`, compressed, to the empty `target`. `None` if it does not become smaller (unless `always`). Each
/// frame is unpacked and compared before it counts. `gate` may stop it.
fn compress(source: &File, target: &File, level: i32, always: bool, gate: Gate<'_>) -> io::Result<Option<Compressed>> {
    let length_bytes = source.metadata()?.len();
    let mut packer = ::zstd::bulk::Compressor::new(level)?;
    packer.include_checksum(true)?;
    let mut unpacker = ::zstd::bulk::Decompressor::new()?;
    let frame_bytes = usize::try_from(FRAME_BYTES).map_err(io::Error::other)?;
    let (mut plain, mut again) = (vec![0; frame_bytes], vec![0; frame_bytes]);
    let mut packed = vec![0; ::zstd::zstd_safe::compress_bound(frame_bytes)];
    let (mut sum, mut table, mut done, mut stored_bytes) = (Checksum::default(), Vec::new(), 0, 0_u64);
    while done < length_bytes {
        gate(0)?;
        let len = usize::try_from((length_bytes - done).min(FRAME_BYTES)).map_err(io::Error::other)?;
        let plain = &mut plain[..len];
        source.read_exact_at(plain, done)?;
        sum.bytes(plain);
        let count = packer.compress_to_buffer(&*plain, &mut packed[..])?;
        let unpacked = unpacker.decompress_to_buffer(&packed[..count], &mut again[..])?;
        if again[..unpacked] != *plain {
            return Err(damaged("the compressed bytes did not unpack to the original"));
        }
        target.write_all_at(&packed[..count], stored_bytes)?;
        table.push((u32::try_from(count).map_err(io::Error::other)?, u32::try_from(len).map_err(io::Error::other)?));
        stored_bytes += count as u64;
        done += len as u64;
        if done >= TRIAL_BYTES && !always && is_vain(done, stored_bytes) {
            return Ok(None);
        }
    }
    let checksum = sum.value();
    let end = ending(table, length_bytes, checksum)?;
    target.write_all_at(&end, stored_bytes)?;
    stored_bytes += end.len() as u64;
    Ok((always || !is_vain(length_bytes, stored_bytes)).then_some(Compressed { length_bytes, checksum, stored_bytes }))
}

/// The bytes after the frames. The record is in the table, as a frame without content.
fn ending(mut table: Vec<(u32, u32)>, length_bytes: u64, checksum: u64) -> io::Result<Vec<u8>> {
    table.push((RECORD_BYTES as u32, 0));
    let said = [MARK, length_bytes.to_le_bytes(), checksum.to_le_bytes()].concat();
    let mut end = [RECORD_MAGIC.to_le_bytes(), (RECORD_BYTES as u32 - 8).to_le_bytes()].concat();
    end.extend_from_slice(&said);
    end.extend_from_slice(&checksum::of_bytes(&said).to_le_bytes());
    let count = u32::try_from(table.len()).map_err(io::Error::other)?;
    let table_bytes = u32::try_from(table.len() as u64 * 8 + FOOTER_BYTES).map_err(io::Error::other)?;
    end.extend_from_slice(&[TABLE_MAGIC.to_le_bytes(), table_bytes.to_le_bytes()].concat());
    table.iter().for_each(|(stored, content)| end.extend([stored.to_le_bytes(), content.to_le_bytes()].concat()));
    end.extend_from_slice(&count.to_le_bytes());
    end.push(0);
    end.extend_from_slice(&SEEKABLE_MAGIC.to_le_bytes());
    Ok(end)
}

fn damaged(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// The places of the frames of a compressed file.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Table {
    pub length_bytes: u64,
    pub checksum: u64,
    /// The start of each frame, and the end of the last one.
    starts: Vec<u64>,
}

impl Table {
    /// Reads the table of a file of `stored_bytes`, any part of which `read` gives.
    pub fn read(stored_bytes: u64, read: &dyn Fn(&mut [u8], u64) -> io::Result<()>) -> io::Result<Self> {
        Self::read_from_tail(TAIL_BYTES, stored_bytes, read)
    }

    fn read_from_tail(
        tail_bytes: u64,
        stored_bytes: u64,
        read: &dyn Fn(&mut [u8], u64) -> io::Result<()>,
    ) -> io::Result<Self> {
        let last = |wanted: u64| -> io::Result<Vec<u8>> {
            let mut bytes = vec![0; usize::try_from(wanted.min(stored_bytes)).map_err(io::Error::other)?];
            let from = stored_bytes - bytes.len() as u64;
            read(&mut bytes, from)?;
            Ok(bytes)
        };
        let end = last(tail_bytes)?;
        let wanted = Self::ending_bytes(&end).filter(|wanted| *wanted <= stored_bytes);
        let wanted = wanted
            .ok_or_else(|| damaged("it has no table of frames at its end: it is cut short, or something else"))?;
        let end = if wanted > end.len() as u64 { last(wanted)? } else { end };
        Self::parse(&end, stored_bytes).ok_or_else(|| damaged("the table of its frames is damaged"))
    }

    /// Number of bytes after the frames, from the file's last bytes.
    fn ending_bytes(end: &[u8]) -> Option<u64> {
        let (_, footer) = end.split_last_chunk::<{ FOOTER_BYTES as usize }>()?;
        let [count @ .., 0, _, _, _, _] = footer else { return None };
        if footer[5..] != SEEKABLE_MAGIC.to_le_bytes() {
            return None;
        }
        let count = u32::from_le_bytes(*count);
        Some(u64::from(count) * 8 + FOOTER_BYTES + 8 + RECORD_BYTES)
    }

    /// `end`: the file's last bytes, with all that follow the frames.
    pub fn parse(end: &[u8], stored_bytes: u64) -> Option<Self> {
        let ending_bytes = Self::ending_bytes(end)?;
        let ending = end.get(end.len().checked_sub(usize::try_from(ending_bytes).ok()?)?..)?;
        let (record, table) = ending.split_at_checked(RECORD_BYTES as usize)?;
        let (head, said) = record.split_at_checked(8)?;
        if head != [RECORD_MAGIC.to_le_bytes(), (RECORD_BYTES as u32 - 8).to_le_bytes()].concat() {
            return None;
        }
        let (said, sum) = said.split_last_chunk::<8>()?;
        let (mark, numbers) = said.split_first_chunk::<8>()?;
        if *mark != MARK || checksum::of_bytes(said).to_le_bytes() != *sum {
            return None;
        }
        let (length, checksum) = numbers.split_first_chunk::<8>()?;
        let (length_bytes, checksum) = (u64::from_le_bytes(*length), u64::from_le_bytes(checksum.try_into().ok()?));
        let (head, entries) = table.split_at_checked(8)?;
        let table_bytes = u32::try_from(entries.len()).ok()?;
        if head != [TABLE_MAGIC.to_le_bytes(), table_bytes.to_le_bytes()].concat() {
            return None;
        }
        let entries = &entries[..entries.len() - FOOTER_BYTES as usize];
        let mut entries: Vec<(u64, u64)> = entries
            .chunks_exact(8)
            .map(|entry| {
                let word =
                    |at: usize| entry[at..at + 4].iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
                (word(0), word(4))
            })
            .collect();
        if entries.pop()? != (RECORD_BYTES, 0) {
            return None;
        }
        let (mut starts, mut at, mut left) = (vec![0], 0_u64, length_bytes);
        for (stored, content) in entries {
            if content == 0 || content != left.min(FRAME_BYTES) {
                return None;
            }
            left -= content;
            at += stored;
            starts.push(at);
        }
        (left == 0 && at + ending_bytes == stored_bytes).then_some(Self { length_bytes, checksum, starts })
    }

    /// Fills the whole buffer with content, from the frames of `file`.
    pub fn unpack(&self, file: &dyn Remote, mut buffer: &mut [u8], mut offset: u64) -> io::Result<()> {
        if offset.checked_add(buffer.len() as u64).is_none_or(|end| end > self.length_bytes) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut unpacker = ::zstd::bulk::Decompressor::new()?;
        let mut frame = Vec::new();
        while !buffer.is_empty() {
            let first = usize::try_from(offset / FRAME_BYTES).map_err(io::Error::other)?;
            let ends = offset + buffer.len() as u64;
            let count = usize::try_from(ends.div_ceil(FRAME_BYTES)).map_err(io::Error::other)?.saturating_sub(first);
            let run = self.starts.get(first..=first + count).filter(|run| run.len() > 1);
            let run = run.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?;
            // As many as one request may have, and at least one.
            let fits = run[1..].iter().take_while(|end| **end - run[0] <= RUN_BYTES).count().max(1);
            let mut packed = vec![0; usize::try_from(run[fits] - run[0]).map_err(io::Error::other)?];
            file.read_at(&mut packed, run[0])?;
            for (from, to) in run.iter().zip(&run[1..=fits]) {
                let bytes = &packed[(from - run[0]) as usize..(to - run[0]) as usize];
                let begins = offset / FRAME_BYTES * FRAME_BYTES;
                let len = usize::try_from((self.length_bytes - begins).min(FRAME_BYTES)).map_err(io::Error::other)?;
                let skip = (offset - begins) as usize;
                let wanted = buffer.len().min(len - skip);
                let (here, rest) = std::mem::take(&mut buffer).split_at_mut(wanted);
                let unpacked = if wanted == len {
                    unpacker.decompress_to_buffer(bytes, here)
                } else {
                    frame.resize(len, 0);
                    unpacker.decompress_to_buffer(bytes, &mut frame[..])
                };
                match unpacked {
                    Ok(count) if count == len => {}
                    Ok(_) => return Err(damaged("a frame has another length than the table says")),
                    Err(why) => return Err(damaged(&format!("a frame cannot be unpacked: {why}"))),
                }
                if wanted != len {
                    here.copy_from_slice(&frame[skip..skip + wanted]);
                }
                buffer = rest;
                offset += wanted as u64;
            }
        }
        Ok(())
    }
}

/// Parses a compressed file's last bytes, for the fuzzer, and reads some of the content that they refer to from them.
#[cfg(fuzzing)]
pub fn read_end(bytes: &[u8]) {
    struct InMemory<'a>(&'a [u8]);
    impl Remote for InMemory<'_> {
        fn identity(&self) -> surgetank_types::model::StoreIdentity {
            surgetank_types::model::StoreIdentity {
                ino: 1,
                size_bytes: self.0.len() as u64,
                mtime_nanos: 0,
                ctime_nanos: 0,
            }
        }
        fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
            let there = usize::try_from(offset).ok().and_then(|at| self.0.get(at..)?.get(..buffer.len()));
            buffer.copy_from_slice(there.ok_or(io::ErrorKind::UnexpectedEof)?);
            Ok(())
        }
    }
    let file = InMemory(bytes);
    let read = |buffer: &mut [u8], offset: u64| Remote::read_at(&file, buffer, offset);
    if let Ok(table) = Table::read(bytes.len() as u64, &read) {
        let mut buffer = [0; 100];
        let part = usize::try_from(table.length_bytes).map_or(100, |length| length.min(100));
        drop(table.unpack(&file, &mut buffer[..part], table.length_bytes - part as u64));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{no_gate, noise, source};
    use surgetank_types::model::StoreIdentity;

    struct InMemory(Vec<u8>);
    impl Remote for InMemory {
        fn identity(&self) -> StoreIdentity {
            StoreIdentity { ino: 1, size_bytes: self.0.len() as u64, mtime_nanos: 0, ctime_nanos: 0 }
        }
        fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
            buffer.copy_from_slice(&self.0[offset as usize..][..buffer.len()]);
            Ok(())
        }
    }

    /// Half of it repeats itself.
    fn text(len: usize) -> Vec<u8> {
        let mut bytes = noise(len);
        bytes.chunks_mut(1000).for_each(|chunk| {
            let half = chunk.len() / 2;
            chunk[..half].fill(b'x');
        });
        bytes
    }

    fn compressed(bytes: &[u8]) -> (InMemory, Compressed) {
        let target = tempfile::tempfile().unwrap();
        let made = compress(&source(bytes), &target, 1, false, no_gate()).unwrap().unwrap();
        let mut stored = vec![0; made.stored_bytes as usize];
        target.read_exact_at(&mut stored, 0).unwrap();
        assert_eq!(target.metadata().unwrap().len(), made.stored_bytes);
        (InMemory(stored), made)
    }

    fn table(stored: &InMemory) -> io::Result<Table> {
        Table::read(stored.0.len() as u64, &|buffer, offset| stored.read_at(buffer, offset))
    }

    #[test]
    fn every_range_unpacks_to_the_original() {
        for len in [5000, FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1, 9 * FRAME_BYTES + 777] {
            let bytes = text(len as usize);
            let (stored, made) = compressed(&bytes);
            assert!(made.stored_bytes < len * 6 / 10, "{len}: {}", made.stored_bytes);
            let table = table(&stored).unwrap();
            assert_eq!((table.length_bytes, table.checksum), (len, checksum::of_bytes(&bytes)));
            let parts =
                [(0, len), (0, 1), (len - 1, 1), (len / 2, len / 3), (len / 3, len / 2), (len.min(FRAME_BYTES) - 1, 1)];
            for (at, size) in parts {
                let mut part = vec![0; size as usize];
                table.unpack(&stored, &mut part, at).unwrap();
                assert!(part == bytes[at as usize..][..size as usize], "{len}: {size} bytes at {at}");
            }
            let beyond = table.unpack(&stored, &mut [0; 2], len - 1).unwrap_err();
            assert_eq!(beyond.kind(), io::ErrorKind::UnexpectedEof);
        }
    }

    #[test]
    fn table_longer_than_first_read_is_read_whole() {
        let (target, source) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        source.set_len(25 * FRAME_BYTES + 5).unwrap();
        let made = compress(&source, &target, 1, false, no_gate()).unwrap().unwrap();
        let asked = std::sync::atomic::AtomicU64::new(0);
        let read = |buffer: &mut [u8], offset: u64| {
            asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            target.read_exact_at(buffer, offset)
        };
        let table = Table::read_from_tail(100, made.stored_bytes, &read).unwrap();
        assert_eq!((table.length_bytes, table.starts.len()), (25 * FRAME_BYTES + 5, 27));
        assert_eq!(asked.into_inner(), 2);
        assert_eq!(table.checksum, made.checksum);
    }

    #[test]
    fn incompressible_file_stays_plain() {
        for len in [100, 5000, 20 << 20] {
            let read = std::sync::atomic::AtomicU64::new(0);
            let gate = |_| {
                read.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                Ok(())
            };
            let target = tempfile::tempfile().unwrap();
            assert!(compress(&source(&noise(len)), &target, 1, false, &gate).unwrap().is_none(), "{len}");
            assert!(read.into_inner() <= 16, "a part of a large one is enough to see it");
        }
    }

    #[test]
    fn compress_stops_when_gate_fails() {
        let (target, stop) = (tempfile::tempfile().unwrap(), |_| Err(io::ErrorKind::Interrupted.into()));
        let stopped = compress(&source(&text(5000)), &target, 1, false, &stop);
        assert_eq!(stopped.err().map(|why| why.kind()), Some(io::ErrorKind::Interrupted));
    }

    #[test]
    fn changed_or_missing_byte_is_detected() {
        let bytes = text(FRAME_BYTES as usize + 4000);
        let (stored, _) = compressed(&bytes);
        let len = stored.0.len();
        let read = |stored: &InMemory| -> io::Result<Vec<u8>> {
            let table = table(stored)?;
            if table.length_bytes != bytes.len() as u64 {
                return Err(damaged("length"));
            }
            let mut content = vec![0; bytes.len()];
            table.unpack(stored, &mut content, 0)?;
            if checksum::of_bytes(&content) == table.checksum { Ok(content) } else { Err(damaged("sum")) }
        };
        assert!(read(&stored).unwrap() == bytes);
        let everywhere = (0..len).step_by(4999).chain(len - 200..len);
        for at in everywhere {
            let mut broken = InMemory(stored.0.clone());
            broken.0[at] ^= 0x10;
            // A bit of a frame's header may be without meaning.
            if let Ok(content) = read(&broken) {
                assert!(content == bytes, "changed at {at} of {len}");
            }
        }
        for at in [0, 1, 8, 20, 60, len / 2, len - 60, len - 9, len - 1] {
            assert!(table(&InMemory(stored.0[..at].to_vec())).is_err(), "cut off at {at} of {len}");
        }
        let last = len - RECORD_BYTES as usize - 8 - 3 * 8 - FOOTER_BYTES as usize;
        for at in last..len {
            let mut broken = InMemory(stored.0.clone());
            broken.0[at] ^= 0x10;
            assert!(read(&broken).is_err(), "the end, changed at {at} of {len}");
        }
    }
}
