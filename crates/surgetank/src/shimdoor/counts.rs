//! What programs count of themselves: one file in shared memory a run, a slot a process (`shim/counts.h` in C; a test
//! compares the two).
//!
//! Programs may write anything into it, at any time: numbers are read once, and no length or index is taken from there.
//! The danger it avoids: a program that dies of a slot without memory behind it (SIGBUS), so slots are allocated before
//! they may be used.

use std::fs::File;
use std::io;
use std::mem::{offset_of, size_of};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::FallocateFlags;
use rustix::mm::{MapFlags, ProtFlags};
use surgetank_core::report::run::{Io, Kernel, Sizes};

pub const MAGIC: u64 = 0x544e_434b_4e41_5453;
pub const LAYOUT: u32 = 1;
pub const SLOTS_MAX: usize = 4096;
pub const SLOTS_OFFSET: usize = 20480;
pub const SIZES: usize = 40;
pub const PROGRAM_BYTES: usize = 64;
pub const COMMAND_BYTES: usize = 512;

pub const FREE: u32 = 0;
pub const LIVE: u32 = 1;
pub const DONE: u32 = 2;
/// Slots that are there from the beginning, and how many come when they are getting few.
const FIRST: usize = 256;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawIo {
    pub read_opens: u64,
    pub write_opens: u64,
    pub create_opens: u64,
    pub read_bytes: u64,
    pub write_bytes: u64,
    pub stream_read_bytes: u64,
    pub stream_write_bytes: u64,
    pub sync_calls: u64,
    pub map_calls: u64,
    pub mapped_bytes: u64,
    pub read_ns: u64,
    pub write_ns: u64,
    pub read_sizes: [u64; SIZES],
    pub write_sizes: [u64; SIZES],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawSlot {
    pub pid: u32,
    pub parent: u32,
    pub begun_ns: u64,
    pub ended_ns: u64,
    pub kernel_ended: [u64; 6],
    pub io: [RawIo; 2],
    pub program: [u8; PROGRAM_BYTES],
    pub command: [u8; COMMAND_BYTES],
}

#[repr(C)]
pub struct Head {
    pub magic: u64,
    pub layout: u32,
    pub slot_bytes: u32,
    pub usable: u32,
    pub lost: u32,
    pub states: [u32; SLOTS_MAX],
}

pub const FILE_BYTES: usize = SLOTS_OFFSET + SLOTS_MAX * size_of::<RawSlot>();

/// What a process has counted.
#[derive(Debug, Clone)]
pub struct Counted {
    pub slot: usize,
    pub pid: u32,
    pub parent: u32,
    /// CLOCK_MONOTONIC.
    pub begun_ns: u64,
    /// 0: it did not come to its end, or not yet.
    pub ended_ns: u64,
    pub plain: Io,
    pub mount: Io,
    /// `None`: it did not come to its end, or moved nothing.
    pub kernel_ended: Option<Kernel>,
    pub program: String,
    pub command: String,
}

pub struct Counts {
    base: NonNull<u8>,
    file: File,
    path: PathBuf,
}

// SAFETY: the mapping belongs to this value alone in the process; shared words are atomic, slots are copied out.
unsafe impl Send for Counts {}

/// The file of a run, beside the index.
pub fn path_of(index: &Path, run: u32) -> PathBuf {
    let mut path = index.as_os_str().to_owned();
    path.push(format!(".counts-{run}"));
    path.into()
}

/// What agents that are gone left there.
pub fn sweep(index: &Path) {
    let (Some(dir), Some(name)) = (index.parent(), index.file_name()) else { return };
    let mut prefix = name.to_owned();
    prefix.push(".counts-");
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_name().as_encoded_bytes().starts_with(prefix.as_encoded_bytes()) {
            drop(std::fs::remove_file(entry.path()));
        }
    }
}

impl Counts {
    pub fn create(path: &Path) -> io::Result<Self> {
        match std::fs::remove_file(path) {
            Err(why) if why.kind() != io::ErrorKind::NotFound => return Err(why),
            _ => {}
        }
        let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(path)?;
        let made = file.set_len(FILE_BYTES as u64).and_then(|()| Self::provide(&file, 0, FIRST)).and_then(|()| {
            let counts = Self::map(file, path)?;
            let head = counts.head();
            // SAFETY: the header is mapped and nobody else knows the file before it is named to a program.
            unsafe {
                (&raw mut (*head).magic).write(MAGIC);
                (&raw mut (*head).layout).write(LAYOUT);
                (&raw mut (*head).slot_bytes).write(size_of::<RawSlot>() as u32);
            }
            counts.word(offset_of!(Head, usable)).store(FIRST as u32, Ordering::Release);
            Ok(counts)
        });
        made.inspect_err(|_| drop(std::fs::remove_file(path)))
    }

    /// That of an agent before this one: programs go on counting there.
    pub fn take_over(path: &Path) -> io::Result<Self> {
        let file = File::options().read(true).write(true).open(path)?;
        if file.metadata()?.len() != FILE_BYTES as u64 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Self::map(file, path)
    }

    /// Memory for slots from `from` to `to`, and for the header.
    fn provide(file: &File, from: usize, to: usize) -> io::Result<()> {
        let (start, end) = (SLOTS_OFFSET + from * size_of::<RawSlot>(), SLOTS_OFFSET + to * size_of::<RawSlot>());
        let start = if from == 0 { 0 } else { start };
        Ok(rustix::fs::fallocate(file, FallocateFlags::empty(), start as u64, (end - start) as u64)?)
    }

    fn map(file: File, path: &Path) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address that the kernel chooses.
        let base =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), FILE_BYTES, access, MapFlags::SHARED, file.as_fd(), 0) }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, file, path: path.to_path_buf() })
    }

    fn head(&self) -> *mut Head {
        self.base.as_ptr().cast()
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        debug_assert!(offset + 4 <= size_of::<Head>());
        // SAFETY: an aligned word of the header, which is mapped as long as `self` lives.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    fn state(&self, slot: usize) -> &AtomicU32 {
        self.word(offset_of!(Head, states) + 4 * slot)
    }

    fn usable(&self) -> usize {
        // (What programs may have made of it.)
        (self.word(offset_of!(Head, usable)).load(Ordering::Acquire) as usize).min(SLOTS_MAX)
    }

    /// Processes that found no slot.
    pub fn lost(&self) -> u32 {
        self.word(offset_of!(Head, lost)).load(Ordering::Relaxed)
    }

    /// All slots that somebody has.
    pub fn look(&self) -> Vec<Counted> {
        let usable = self.usable();
        (0..usable)
            .filter(|slot| self.state(*slot).load(Ordering::Acquire) != FREE)
            .filter_map(|slot| self.read(slot))
            .collect()
    }

    fn slot_at(&self, slot: usize) -> *mut RawSlot {
        debug_assert!(slot < SLOTS_MAX);
        // SAFETY: within the mapping.
        unsafe { self.base.as_ptr().add(SLOTS_OFFSET + slot * size_of::<RawSlot>()).cast() }
    }

    fn read(&self, slot: usize) -> Option<Counted> {
        // SAFETY: the slot is mapped and allocated; it holds plain numbers and bytes, of which any value is one. Programs
        // write meanwhile: what is read may be of different moments, never invalid.
        let raw = unsafe { self.slot_at(slot).read_volatile() };
        if raw.pid == 0 {
            return None;
        }
        Some(Counted {
            slot,
            pid: raw.pid,
            parent: raw.parent,
            begun_ns: raw.begun_ns,
            ended_ns: raw.ended_ns,
            plain: io_of(&raw.io[0]),
            mount: io_of(&raw.io[1]),
            kernel_ended: raw.kernel_ended.iter().any(|count| *count != 0).then(|| kernel_of(&raw.kernel_ended)),
            program: text_of(&raw.program),
            command: text_of(&raw.command),
        })
    }

    /// The process is over: somebody else may have the slot.
    pub fn free(&self, slot: usize) {
        // SAFETY: as in `read`; its process does not write any more.
        unsafe { self.slot_at(slot).write_bytes(0, 1) };
        self.state(slot).store(FREE, Ordering::Release);
    }

    /// More slots where they are getting few.
    pub fn grow(&self, taken: usize) {
        let usable = self.usable();
        let more = (2 * usable).clamp(FIRST, SLOTS_MAX);
        if 2 * taken >= usable && more > usable && Self::provide(&self.file, usable, more).is_ok() {
            self.word(offset_of!(Head, usable)).store(more as u32, Ordering::Release);
        }
    }

    pub fn remove(&self) {
        drop(std::fs::remove_file(&self.path));
    }
}

impl Drop for Counts {
    fn drop(&mut self) {
        // SAFETY: nothing of ours points into the mapping any more.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), FILE_BYTES) };
    }
}

fn text_of(bytes: &[u8]) -> String {
    let end = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |at| at + 1);
    let words: Vec<u8> = bytes.iter().take(end).map(|byte| if *byte == 0 { b' ' } else { *byte }).collect();
    String::from_utf8_lossy(&words).into_owned()
}

fn sizes_of(sizes: &[u64; SIZES]) -> Sizes {
    let mut out = Sizes::default();
    for (class, count) in sizes.iter().enumerate() {
        out.add_many(class, *count);
    }
    out
}

fn io_of(raw: &RawIo) -> Io {
    let (read_sizes, write_sizes) = (sizes_of(&raw.read_sizes), sizes_of(&raw.write_sizes));
    Io {
        read_opens: raw.read_opens,
        write_opens: raw.write_opens,
        create_opens: raw.create_opens,
        read_bytes: raw.read_bytes,
        write_bytes: raw.write_bytes,
        read_calls: read_sizes.total(),
        write_calls: write_sizes.total(),
        sync_calls: raw.sync_calls,
        mapped_bytes: raw.mapped_bytes,
        map_calls: raw.map_calls,
        read_sizes,
        write_sizes,
        read_us: raw.read_ns / 1000,
        write_us: raw.write_ns / 1000,
        ..Io::default()
    }
}

fn kernel_of(raw: &[u64; 6]) -> Kernel {
    let [read_bytes, write_bytes, read_calls, write_calls, device_read_bytes, device_write_bytes] = *raw;
    Kernel { read_bytes, write_bytes, read_calls, write_calls, device_read_bytes, device_write_bytes }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn the_layout_is_that_of_the_header() {
        let mut ours: Vec<(String, u64)> = Vec::new();
        macro_rules! says {
            ($rust:ty, $c:literal: $($field:ident),*) => {
                ours.push((concat!("sizeof(struct ", $c, ")").to_owned(), size_of::<$rust>() as u64));
                $(ours.push((concat!("offsetof(struct ", $c, ", ", stringify!($field), ")").to_owned(), offset_of!($rust, $field) as u64));)*
            };
        }
        says!(RawIo, "st_io": read_opens, write_opens, create_opens, read_bytes, write_bytes, stream_read_bytes,
            stream_write_bytes, sync_calls, map_calls, mapped_bytes, read_ns, write_ns, read_sizes, write_sizes);
        says!(RawSlot, "st_slot": pid, parent, begun_ns, ended_ns, kernel_ended, io, program, command);
        says!(Head, "st_counts": magic, layout, slot_bytes, usable, lost, states);
        for (constant, value) in [
            ("ST_COUNTS_MAGIC", MAGIC),
            ("ST_COUNTS_LAYOUT", LAYOUT.into()),
            ("ST_SLOTS_MAX", SLOTS_MAX as u64),
            ("ST_SLOTS_OFFSET", SLOTS_OFFSET as u64),
            ("ST_SIZES", SIZES as u64),
            ("ST_SLOT_FREE", FREE.into()),
            ("ST_SLOT_LIVE", LIVE.into()),
            ("ST_SLOT_DONE", DONE.into()),
        ] {
            ours.push((constant.to_owned(), value));
        }
        let dir = tempfile::tempdir().unwrap();
        let header = concat!(env!("CARGO_MANIFEST_DIR"), "/../../shim/counts.h");
        let mut program =
            format!("#include \"{header}\"\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {{\n");
        for (what, _) in &ours {
            program += &format!("printf(\"%llu\\n\", (unsigned long long)({what}));\n");
        }
        program += "return 0; }\n";
        let (source, binary) = (dir.path().join("layout.c"), dir.path().join("layout"));
        std::fs::write(&source, program).unwrap();
        assert!(Command::new("cc").arg("-o").arg(&binary).arg(&source).status().unwrap().success());
        let said = String::from_utf8(Command::new(&binary).output().unwrap().stdout).unwrap();
        let theirs: Vec<u64> = said.lines().map(|line| line.parse().unwrap()).collect();
        assert_eq!(theirs.len(), ours.len());
        for ((what, rust), c) in ours.iter().zip(theirs) {
            assert_eq!(*rust, c, "{what}");
        }
        assert!(size_of::<Head>() <= SLOTS_OFFSET);
    }

    #[test]
    fn a_slot_is_read_and_given_away_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = path_of(&dir.path().join("index"), 3);
        let counts = Counts::create(&path).unwrap();
        assert!(counts.look().is_empty());
        // SAFETY: the slot is mapped, and this test is its only writer.
        unsafe {
            let slot = counts.slot_at(5);
            (*slot).pid = 77;
            (*slot).io[0].read_sizes[13] = 2;
            (*slot).io[0].read_bytes = 8192;
            (&mut (*slot).program)[..3].copy_from_slice(b"cat");
            (&mut (*slot).command)[..9].copy_from_slice(b"cat\0a b\0c");
        }
        counts.state(5).store(LIVE, Ordering::Release);
        let again = Counts::take_over(&path).unwrap();
        let seen = again.look();
        assert_eq!((seen.len(), seen[0].pid, seen[0].program.as_str()), (1, 77, "cat"));
        assert_eq!((seen[0].plain.read_bytes, seen[0].plain.read_calls), (8192, 2));
        assert_eq!(seen[0].command, "cat a b c");
        again.free(5);
        assert!(counts.look().is_empty());
        sweep(&dir.path().join("index"));
        assert!(!path.exists());
    }

    #[test]
    fn slots_come_when_they_get_few_and_never_beyond_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let counts = Counts::create(&dir.path().join("c")).unwrap();
        counts.grow(1);
        assert_eq!(counts.usable(), FIRST);
        for _ in 0..10 {
            counts.grow(SLOTS_MAX);
        }
        assert_eq!(counts.usable(), SLOTS_MAX);
        counts.word(offset_of!(Head, usable)).store(u32::MAX, Ordering::Relaxed);
        assert_eq!(counts.usable(), SLOTS_MAX, "what a program wrote there is not believed");
        assert!(counts.look().is_empty());
    }
}
