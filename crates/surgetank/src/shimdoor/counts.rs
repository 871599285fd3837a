//! The counts of programs about themselves: one file in shared memory per run, one slot per process (`shim/counts.h` in
//! C; a test compares the two).
//!
//! Programs own the file: they may write anything into it, at any time, and truncate it. So the agent never maps it,
//! but reads and writes it like any other file. It reads numbers once and takes no length or index from there. It
//! rejects figures that no process can have reached ([`Counted::is_possible`]).
//! The danger that it avoids: an agent or a program that dies of a slot without memory behind it (SIGBUS). Slots are
//! allocated before programs may use them.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::mem::{offset_of, size_of};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{Ordering, fence};

use rustix::fs::FallocateFlags;
use surgetank_core::report::run::{Io, Kernel, Sizes};

pub const MAGIC: u64 = 0x544e_434b_4e41_5453;
pub const LAYOUT: u32 = 2;
pub const SLOTS_MAX: usize = 4096;
pub const SLOTS_OFFSET: usize = 20480;
pub const SIZES: usize = 40;
pub const PROGRAM_BYTES: usize = 64;
pub const COMMAND_BYTES: usize = 512;

pub const FREE: u32 = 0;
#[cfg(test)]
pub const LIVE: u32 = 1;
#[cfg(test)]
pub const DONE: u32 = 2;
/// Without room for [`SLOTS_MAX`] (9 MB), this many slots are still worthwhile.
const SLOTS_MIN: usize = 256;

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
    pub sync_ns: u64,
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

/// The counts of one process.
#[derive(Debug, Clone)]
pub struct Counted {
    pub slot: usize,
    pub pid: u32,
    pub parent: u32,
    /// CLOCK_MONOTONIC.
    pub begun_ns: u64,
    /// 0: it did not end in order, or has not ended yet.
    pub ended_ns: u64,
    pub plain: Io,
    pub mount: Io,
    /// `None`: it did not end in order, or moved no data.
    pub kernel_ended: Option<Kernel>,
    pub program: String,
    pub command: String,
    /// Its figures were impossible, and are removed.
    pub disbelieved: bool,
    /// It may still count.
    pub alive: bool,
}

impl Counted {
    /// Whether a process can have reached this between its begin and `now_ns`. The limits are far above any machine's
    /// speed, and far below the values in a slot that a program overwrote.
    pub fn is_possible(&self, now_ns: u64) -> bool {
        let lived_ns = now_ns.saturating_sub(self.begun_ns);
        let in_time =
            self.begun_ns <= now_ns && (self.ended_ns == 0 || (self.begun_ns..=now_ns).contains(&self.ended_ns));
        let is_few = |count: u64| count <= lived_ns.saturating_mul(CALLS_PER_NS_MAX);
        let is_little = |bytes: u64| bytes <= lived_ns.saturating_mul(BYTES_PER_NS_MAX);
        let can_be = |io: &Io| {
            [io.read_opens, io.write_opens, io.create_opens, io.read_calls, io.write_calls, io.sync_calls, io.map_calls]
                .into_iter()
                .all(is_few)
                && is_little(io.read_bytes)
                && is_little(io.write_bytes)
                && io.mapped_bytes <= io.map_calls.saturating_mul(MAPPED_BYTES_MAX)
                && [io.read_us, io.write_us, io.sync_us]
                    .iter()
                    .all(|us| us.saturating_mul(1000) <= lived_ns.saturating_mul(THREADS_MAX))
        };
        // The kernel's figures include those of children that a parent waited for.
        let kernel_can_be = |kernel: &Kernel| {
            kernel.read_bytes < SUM_MAX
                && kernel.write_bytes < SUM_MAX
                && kernel.read_calls < SUM_MAX
                && kernel.write_calls < SUM_MAX
                && kernel.device_read_bytes < SUM_MAX
                && kernel.device_write_bytes < SUM_MAX
        };
        self.pid <= PID_MAX
            && in_time
            && can_be(&self.plain)
            && can_be(&self.mount)
            && self.kernel_ended.as_ref().is_none_or(kernel_can_be)
    }
}

/// A thousand cores, each in a call of 30 ns.
const CALLS_PER_NS_MAX: u64 = 32;
/// Not memory's bandwidth: calls that share extents move 2 GiB in microseconds.
const BYTES_PER_NS_MAX: u64 = 1 << 20;
/// The address space.
const MAPPED_BYTES_MAX: u64 = 1 << 57;
const THREADS_MAX: u64 = 1 << 16;
const SUM_MAX: u64 = 1 << 62;
/// The kernel's own limit.
const PID_MAX: u32 = 1 << 22;

pub struct Counts {
    file: File,
    path: PathBuf,
    usable: usize,
}

/// The file of a run, beside the index.
pub fn path_of(index: &Path, run: u32) -> PathBuf {
    let mut path = index.as_os_str().to_owned();
    path.push(format!(".counts-{run}"));
    path.into()
}

/// Removes files of ended agents.
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
        let made = (|| {
            file.set_len(FILE_BYTES as u64)?;
            let usable = provide(&file)?;
            for (offset, bytes) in [
                (offset_of!(Head, magic), &MAGIC.to_ne_bytes()[..]),
                (offset_of!(Head, layout), &LAYOUT.to_ne_bytes()),
                (offset_of!(Head, slot_bytes), &(size_of::<RawSlot>() as u32).to_ne_bytes()),
                (offset_of!(Head, usable), &(usable as u32).to_ne_bytes()),
            ] {
                file.write_all_at(bytes, offset as u64)?;
            }
            Ok(Self { file, path: path.to_path_buf(), usable })
        })();
        made.inspect_err(|_| drop(std::fs::remove_file(path)))
    }

    /// The file of an earlier agent: programs continue to count there.
    pub fn take_over(path: &Path) -> io::Result<Self> {
        let file = File::options().read(true).write(true).open(path)?;
        if file.metadata()?.len() != FILE_BYTES as u64 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let usable = word_in(&head_of(&file)?, offset_of!(Head, usable)) as usize;
        // (Programs may have changed it.)
        Ok(Self { file, path: path.to_path_buf(), usable: usable.min(SLOTS_MAX) })
    }

    /// Processes that found no slot.
    pub fn lost(&self) -> u32 {
        head_of(&self.file).map_or(0, |head| word_in(&head, offset_of!(Head, lost)))
    }

    pub fn usable(&self) -> usize {
        self.usable
    }

    /// All occupied slots, except those in `known`; for ended programs their last counts. An error: the file was
    /// damaged.
    pub fn look(&self, known: &HashSet<usize>, is_alive: impl Fn(u32) -> bool) -> io::Result<Vec<Counted>> {
        let head = head_of(&self.file)?;
        let mut found = Vec::new();
        for slot in 0..self.usable {
            if word_in(&head, offset_of!(Head, states) + 4 * slot) != FREE && !known.contains(&slot) {
                found.extend(self.read(slot)?);
            }
        }
        // A process that ended since its slot was read has written more into it. (Each process is checked once: the
        // answer holds for all its programs.)
        let mut of_process: HashMap<u32, (bool, u64)> = HashMap::new();
        for one in &mut found {
            let (alive, newest_ns) = of_process.entry(one.pid).or_insert_with(|| (is_alive(one.pid), 0));
            one.alive = *alive;
            *newest_ns = one.begun_ns.max(*newest_ns);
        }
        for one in found.iter_mut().filter(|one| one.ended_ns == 0) {
            if !one.alive || of_process.get(&one.pid).is_some_and(|(_, newest_ns)| *newest_ns > one.begun_ns) {
                let alive = one.alive;
                *one = self.read(one.slot)?.map_or_else(|| one.clone(), |again| Counted { alive, ..again });
            }
        }
        Ok(found)
    }

    fn read(&self, slot: usize) -> io::Result<Option<Counted>> {
        let mut bytes = [0_u8; size_of::<RawSlot>()];
        self.file.read_exact_at(&mut bytes, slot_offset(slot))?;
        // SAFETY: as many bytes as a slot has, which contains plain numbers and bytes only: any value is valid.
        // Programs write during the read: the parts may be of different moments, never invalid.
        let raw = unsafe { bytes.as_ptr().cast::<RawSlot>().read_unaligned() };
        if raw.pid == 0 {
            return Ok(None);
        }
        Ok(Some(Counted {
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
            disbelieved: false,
            alive: true,
        }))
    }

    /// The process has ended: another one may use the slot.
    pub fn free(&self, slot: usize) -> io::Result<()> {
        self.file.write_all_at(&[0; size_of::<RawSlot>()], slot_offset(slot))?;
        // A process that finds the slot free also finds it empty.
        fence(Ordering::SeqCst);
        self.file.write_all_at(&FREE.to_ne_bytes(), (offset_of!(Head, states) + 4 * slot) as u64)
    }

    /// A process removed its name: later processes do not find it any more.
    pub fn is_nameless(&self) -> bool {
        self.file.metadata().is_ok_and(|file| file.nlink() == 0)
    }

    pub fn remove(&self) {
        drop(std::fs::remove_file(&self.path));
    }
}

fn slot_offset(slot: usize) -> u64 {
    (SLOTS_OFFSET + slot * size_of::<RawSlot>()) as u64
}

/// Allocates the header and all slots, or as many as there is room for; returns their number.
fn provide(file: &File) -> io::Result<usize> {
    let mut slots = SLOTS_MAX;
    loop {
        match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, slot_offset(slots)) {
            Ok(()) => return Ok(slots),
            Err(why) if slots <= SLOTS_MIN => return Err(why.into()),
            Err(_) => slots /= 2,
        }
    }
}

fn head_of(file: &File) -> io::Result<Vec<u8>> {
    let mut head = vec![0; size_of::<Head>()];
    file.read_exact_at(&mut head, 0)?;
    Ok(head)
}

fn word_in(head: &[u8], offset: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&head[offset..offset + 4]);
    u32::from_ne_bytes(word)
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
        sync_us: raw.sync_ns / 1000,
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
    fn layout_equals_the_header() {
        let mut ours: Vec<(String, u64)> = Vec::new();
        macro_rules! says {
            ($rust:ty, $c:literal: $($field:ident),*) => {
                ours.push((concat!("sizeof(struct ", $c, ")").to_owned(), size_of::<$rust>() as u64));
                $(ours.push((concat!("offsetof(struct ", $c, ", ", stringify!($field), ")").to_owned(), offset_of!($rust, $field) as u64));)*
            };
        }
        says!(RawIo, "st_io": read_opens, write_opens, create_opens, read_bytes, write_bytes, stream_read_bytes,
            stream_write_bytes, sync_calls, map_calls, mapped_bytes, read_ns, write_ns, sync_ns, read_sizes, write_sizes);
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
        let output = String::from_utf8(Command::new(&binary).output().unwrap().stdout).unwrap();
        let theirs: Vec<u64> = output.lines().map(|line| line.parse().unwrap()).collect();
        assert_eq!(theirs.len(), ours.len());
        for ((what, rust), c) in ours.iter().zip(theirs) {
            assert_eq!(*rust, c, "{what}");
        }
        assert!(size_of::<Head>() <= SLOTS_OFFSET);
    }

    /// A process's slot, as programs write it.
    fn write(counts: &Counts, slot: usize, raw: &RawSlot, state: u32) {
        // SAFETY: its bytes; there is no padding between its numbers.
        let bytes = unsafe { std::slice::from_raw_parts(std::ptr::from_ref(raw).cast::<u8>(), size_of::<RawSlot>()) };
        counts.file.write_all_at(bytes, slot_offset(slot)).unwrap();
        counts.file.write_all_at(&state.to_ne_bytes(), (offset_of!(Head, states) + 4 * slot) as u64).unwrap();
    }

    fn empty() -> RawSlot {
        // SAFETY: numbers, of which 0 is one.
        unsafe { std::mem::zeroed() }
    }

    #[test]
    fn slot_is_read_and_reused() {
        let dir = tempfile::tempdir().unwrap();
        let path = path_of(&dir.path().join("index"), 3);
        let counts = Counts::create(&path).unwrap();
        let none = HashSet::new();
        assert!(counts.look(&none, |_| true).unwrap().is_empty());
        let mut raw = RawSlot { pid: 77, ..empty() };
        raw.io[0].read_sizes[13] = 2;
        raw.io[0].read_bytes = 8192;
        raw.program[..3].copy_from_slice(b"cat");
        raw.command[..9].copy_from_slice(b"cat\0a b\0c");
        write(&counts, 5, &raw, LIVE);
        let again = Counts::take_over(&path).unwrap();
        let seen = again.look(&none, |_| true).unwrap();
        assert_eq!((seen.len(), seen[0].pid, seen[0].program.as_str()), (1, 77, "cat"));
        assert_eq!((seen[0].plain.read_bytes, seen[0].plain.read_calls), (8192, 2));
        assert_eq!(seen[0].command, "cat a b c");
        assert!(again.look(&HashSet::from([5]), |_| true).unwrap().is_empty());
        again.free(5).unwrap();
        assert!(counts.look(&none, |_| true).unwrap().is_empty());
        sweep(&dir.path().join("index"));
        assert!(!path.exists());
    }

    /// The process ends between the read of its slot and the check whether it is alive. Regression: the record called
    /// it killed, without its last bytes.
    #[test]
    fn process_that_ends_during_a_look_is_complete() {
        let dir = tempfile::tempdir().unwrap();
        let counts = Counts::create(&path_of(&dir.path().join("index"), 3)).unwrap();
        let slot = |pid, begun_ns, ended_ns| RawSlot { pid, begun_ns, ended_ns, ..empty() };
        write(&counts, 0, &slot(77, 10, 0), LIVE);
        write(&counts, 1, &slot(78, 10, 0), LIVE);
        write(&counts, 2, &slot(78, 20, 0), LIVE);
        let ends = |pid| {
            if pid == 77 {
                write(&counts, 0, &slot(77, 10, 99), LIVE);
            }
            write(&counts, 1, &slot(78, 10, 19), LIVE);
            pid != 77
        };
        let seen = counts.look(&HashSet::new(), ends).unwrap();
        let seen: Vec<_> = seen.iter().map(|one| (one.pid, one.begun_ns, one.ended_ns, one.alive)).collect();
        assert_eq!(seen, [(77, 10, 99, false), (78, 10, 19, true), (78, 20, 0, true)]);
    }

    /// With 256 slots that doubled periodically, only 369 of 600 simultaneous processes found one.
    #[test]
    fn all_slots_exist_from_the_start() {
        let dir = tempfile::tempdir().unwrap();
        let counts = Counts::create(&dir.path().join("c")).unwrap();
        assert_eq!(counts.usable(), SLOTS_MAX);
        let head = head_of(&counts.file).unwrap();
        assert_eq!(word_in(&head, offset_of!(Head, usable)) as usize, SLOTS_MAX);
        counts.file.write_all_at(&[0xff; 8], offset_of!(Head, usable) as u64).unwrap();
        let again = Counts::take_over(&dir.path().join("c")).unwrap();
        assert_eq!(again.usable(), SLOTS_MAX, "what a program wrote there is not believed");
        assert!(again.look(&HashSet::new(), |_| true).unwrap().is_empty());
    }

    /// A mapped file would have killed the agent (SIGBUS).
    #[test]
    fn file_truncated_by_a_program_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c");
        let counts = Counts::create(&path).unwrap();
        write(&counts, 4000, &RawSlot { pid: 77, ..empty() }, LIVE);
        File::options().write(true).open(&path).unwrap().set_len(SLOTS_OFFSET as u64 + 100).unwrap();
        assert!(counts.look(&HashSet::new(), |_| true).is_err());
        File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
        assert!(counts.look(&HashSet::new(), |_| true).is_err());
        assert_eq!(counts.lost(), 0);
    }

    #[test]
    fn overwritten_slot_is_impossible() {
        let dir = tempfile::tempdir().unwrap();
        let counts = Counts::create(&dir.path().join("c")).unwrap();
        const SECOND_NS: u64 = 1_000_000_000;
        let possible = |raw: &RawSlot| {
            write(&counts, 0, raw, LIVE);
            counts.look(&HashSet::new(), |_| true).unwrap().remove(0).is_possible(100 * SECOND_NS)
        };
        let plain = RawSlot { pid: 77, begun_ns: 90 * SECOND_NS, ..empty() };
        let with = |change: &dyn Fn(&mut RawSlot)| {
            let mut raw = plain;
            change(&mut raw);
            possible(&raw)
        };
        assert!(with(&|raw| raw.io[1].write_bytes = 200 << 30), "20 GB a second");
        assert!(with(&|raw| raw.io[0].read_sizes[1] = 1_000_000_000));
        assert!(with(&|raw| raw.ended_ns = 95 * SECOND_NS));
        assert!(!with(&|raw| raw.io[0].read_bytes = u64::MAX / 2));
        assert!(!with(&|raw| raw.io[1].write_sizes[3] = u64::MAX));
        assert!(!with(&|raw| raw.io[1].read_ns = u64::MAX));
        assert!(!with(&|raw| raw.io[1].sync_ns = u64::MAX));
        assert!(!with(&|raw| raw.io[0].mapped_bytes = 1));
        assert!(!with(&|raw| raw.ended_ns = 80 * SECOND_NS));
        assert!(!with(&|raw| raw.begun_ns = 101 * SECOND_NS));
        assert!(!with(&|raw| raw.pid = u32::MAX));
        assert!(!with(&|raw| raw.kernel_ended[2] = u64::MAX));
        let mut all = [0xff_u8; size_of::<RawSlot>()];
        all[100] = 1;
        // SAFETY: any bytes are a slot.
        assert!(!possible(&unsafe { all.as_ptr().cast::<RawSlot>().read_unaligned() }));
    }
}
