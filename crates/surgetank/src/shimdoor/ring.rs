//! The ring in which the shim reports plain files that it created itself, in delegated directories
//! (`surgetank_core::metadata::intake`). `shim/abi.h` describes the layout and the writers; `shim/delegation.c` is the other
//! side.
//!
//! Programs write it, so every value is checked before use. It outlives the agent like the index: the next agent reads
//! what an earlier agent did not, before it searches for unknown files on tiers.

use std::fs::File;
use std::io;
use std::mem::offset_of;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::mm::{MapFlags, ProtFlags};
use surgetank_core::namespace::IntakeFile;
use surgetank_state::Stray;
use surgetank_types::clock;
use surgetank_types::model::{FileId, RunId};

use super::abi::{self, INTAKE_ENTRIES, IntakeEntry, phase};
use super::leftovers;

const BYTES: usize = abi::RING_SLOTS_OFFSET + INTAKE_ENTRIES as usize * size_of::<IntakeEntry>();
/// At most this many are handled in one step, so that no thread waits long for the tree.
const TAKEN_MAX: usize = 256;
const PAUSE: Duration = Duration::from_micros(20);

pub struct Ring {
    base: NonNull<u8>,
    file: File,
    path: PathBuf,
    /// The oldest entry that was not returned.
    first: AtomicU64,
    state: Mutex<State>,
}

struct State {
    /// The number of each slot's next file, as the agent wrote it there.
    numbers: Vec<u64>,
    /// Entries that were taken and not returned yet.
    taken: Vec<u64>,
    /// Entries that were revoked while their program was using them.
    strays: Vec<Stray>,
}

// SAFETY: the mapping belongs to this value; what programs write meanwhile is read and written by atomics or copied and
// checked.
unsafe impl Send for Ring {}
// SAFETY: as above.
unsafe impl Sync for Ring {}

pub fn path_of(index: &Path) -> PathBuf {
    let mut path = index.as_os_str().to_owned();
    path.push(".ring");
    path.into()
}

impl Ring {
    /// Creates a ring, or takes over that of an earlier agent. Programs have mapped such a ring and may be writing it;
    /// [`left`] took up all of its entries. `numbers`: one for each slot.
    pub fn create(index: &Path, again: bool, numbers: &mut dyn FnMut() -> u64) -> io::Result<Self> {
        let path = path_of(index);
        let taken_over = again.then(|| leftovers::open(&path).ok()).flatten();
        let taken_over = taken_over
            .filter(|file| leftovers::mark_used(file) && file.metadata().is_ok_and(|file| file.len() == BYTES as u64));
        let file = match taken_over {
            Some(file) => file,
            None => leftovers::create(&path)?,
        };
        file.set_len(BYTES as u64)?;
        // A full file system would kill the agent at the first write.
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, BYTES as u64)?;
        let ring = Self::of(file, path)?;
        let next = ring.word(offset_of!(abi::Ring, next)).load(Ordering::SeqCst);
        ring.word(offset_of!(abi::Ring, epoch)).fetch_add(1, Ordering::SeqCst);
        // (An earlier agent grants no descriptors any more either.)
        ring.word(offset_of!(abi::Ring, giving)).store(0, Ordering::SeqCst);
        let mut state = ring.state();
        for entry in next..next + INTAKE_ENTRIES {
            let number = numbers();
            state.numbers[(entry % INTAKE_ENTRIES) as usize] = number;
            // (A slot to which another program may still write stays out of use.)
            let before = ring.phase_word(entry).load(Ordering::SeqCst) & 7;
            let retired = matches!(before, phase::REVOKED | phase::SKIP);
            ring.offer(entry, number, if retired { phase::SKIP } else { phase::FREE });
        }
        drop(state);
        ring.first.store(next, Ordering::SeqCst);
        ring.word(offset_of!(abi::Ring, first)).store(next, Ordering::SeqCst);
        let head = ring.base.cast::<abi::Ring>().as_ptr();
        // SAFETY: fields of the mapped head; `magic` last.
        unsafe {
            (&raw mut (*head).layout).write_volatile(abi::LAYOUT);
            (&raw mut (*head).entries).write_volatile(INTAKE_ENTRIES as u32);
        }
        let turn = ring.word(offset_of!(abi::Ring, turn));
        turn.store((turn.load(Ordering::SeqCst) | 1) + 1, Ordering::SeqCst);
        ring.word(offset_of!(abi::Ring, magic)).store(abi::RING_MAGIC, Ordering::SeqCst);
        Ok(ring)
    }

    fn of(file: File, path: PathBuf) -> io::Result<Self> {
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a fresh mapping at an address that the kernel chooses.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), BYTES, access, flags, file.as_fd(), 0) }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let state = State { numbers: vec![0; INTAKE_ENTRIES as usize], taken: Vec::new(), strays: Vec::new() };
        Ok(Self { base, file, path, first: AtomicU64::new(0), state: Mutex::new(state) })
    }

    /// While its description is open the file counts as used.
    pub fn file(&self) -> &File {
        &self.file
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        debug_assert!(offset + 8 <= BYTES && offset.is_multiple_of(8));
        // SAFETY: an aligned word of the mapping, which lives as long as `self`.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    fn slot(entry: u64) -> usize {
        abi::RING_SLOTS_OFFSET + (entry % INTAKE_ENTRIES) as usize * size_of::<IntakeEntry>()
    }

    fn phase_word(&self, entry: u64) -> &AtomicU64 {
        self.word(Self::slot(entry) + offset_of!(IntakeEntry, state))
    }

    /// Assigns the slot to this entry, for any program to take.
    fn offer(&self, entry: u64, number: u64, phase: u64) {
        self.word(Self::slot(entry) + offset_of!(IntakeEntry, number)).store(number, Ordering::Relaxed);
        self.phase_word(entry).store(entry << 3 | phase, Ordering::SeqCst);
    }

    fn next(&self) -> u64 {
        let first = self.first.load(Ordering::Relaxed);
        // (An invalid value from a program must not cause a long search.)
        self.word(offset_of!(abi::Ring, next)).load(Ordering::SeqCst).clamp(first, first + INTAKE_ENTRIES)
    }

    /// Are there entries to take?
    pub fn waits(&self) -> bool {
        self.next() != self.first.load(Ordering::Relaxed)
    }

    fn phase(&self, entry: u64) -> Option<u64> {
        let state = self.phase_word(entry).load(Ordering::SeqCst);
        (state >> 3 == entry).then_some(state & 7)
    }

    /// The next created files. Call [`Self::give_back`] after programs find them in the index.
    pub fn take(&self) -> Vec<IntakeFile> {
        let mut state = self.state();
        state.taken.clear();
        let mut files = Vec::new();
        for entry in self.first.load(Ordering::Relaxed)..self.next() {
            match self.phase(entry) {
                Some(phase::DONE) => {
                    files.push(self.read(entry, state.numbers[(entry % INTAKE_ENTRIES) as usize]));
                    state.taken.push(entry);
                }
                Some(phase::VOID | phase::REVOKED | phase::SKIP) => state.taken.push(entry),
                // In progress, or returned before an older one.
                _ => {}
            }
            if files.len() == TAKEN_MAX {
                break;
            }
        }
        files
    }

    fn read(&self, entry: u64, number: u64) -> IntakeFile {
        let at = self.base.as_ptr().wrapping_add(Self::slot(entry)).cast::<IntakeEntry>();
        // SAFETY: a slot of the mapping; any bytes are an entry, and what a program writes meanwhile is checked as any
        // other.
        let slot = unsafe { at.read_volatile() };
        let name = slot.name.get(..slot.name_bytes as usize).unwrap_or_default();
        IntakeFile {
            number,
            dir: FileId(slot.dir),
            name: name.to_vec(),
            perm: slot.mode,
            run: RunId(slot.run),
            dev: slot.dev,
            ino: slot.ino,
        }
    }

    /// The taken files are in the index: their slots are free again.
    pub fn give_back(&self, numbers: &mut dyn FnMut() -> u64) {
        let mut state = self.state();
        let taken = std::mem::take(&mut state.taken);
        if taken.is_empty() {
            return;
        }
        let turn = self.word(offset_of!(abi::Ring, turn));
        turn.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        for entry in taken {
            let slot = (entry % INTAKE_ENTRIES) as usize;
            // An unused number is offered again.
            let phase = self.phase(entry);
            if phase == Some(phase::DONE) {
                state.numbers[slot] = numbers();
            }
            let retired = matches!(phase, Some(phase::REVOKED | phase::SKIP));
            self.offer(entry + INTAKE_ENTRIES, state.numbers[slot], if retired { phase::SKIP } else { phase::FREE });
            surgetank_types::crash_point!("delegation.giving");
        }
        let end = self.next();
        let mut first = self.first.load(Ordering::Relaxed);
        while first < end && self.phase_word(first).load(Ordering::Relaxed) >> 3 == first + INTAKE_ENTRIES {
            first += 1;
        }
        self.first.store(first, Ordering::Relaxed);
        self.word(offset_of!(abi::Ring, first)).store(first, Ordering::Release);
        fence(Ordering::SeqCst);
        turn.fetch_add(1, Ordering::SeqCst);
    }

    /// While this lives programs create no file. The kernel would report the close of the descriptor being sent only
    /// when ours is closed, after the closes of files that they created later.
    pub fn giving(&self) -> Giving<'_> {
        let giving = self.word(offset_of!(abi::Ring, giving));
        giving.fetch_add(1, Ordering::SeqCst);
        Giving(giving)
    }

    pub fn limit(&self, entries: u64) {
        self.word(offset_of!(abi::Ring, limit)).store(entries.min(INTAKE_ENTRIES), Ordering::Relaxed);
    }

    /// Ends file creation by earlier look-ups: waits for creations in progress, and revokes those of programs that do
    /// not continue.
    pub fn stop_intake(&self, timeout: Duration) {
        self.word(offset_of!(abi::Ring, epoch)).fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let since: Instant = clock::tick();
        for entry in self.first.load(Ordering::Relaxed)..self.next() {
            let under_way = || matches!(self.phase(entry), Some(phase::FREE | phase::MADE));
            while under_way() && since.elapsed() < timeout {
                std::thread::sleep(PAUSE);
            }
            for from in [phase::FREE, phase::MADE] {
                let revoked = entry << 3 | phase::REVOKED;
                let state = self.phase_word(entry);
                let was = state.compare_exchange(entry << 3 | from, revoked, Ordering::SeqCst, Ordering::SeqCst);
                if was.is_ok() && from == phase::MADE {
                    let IntakeFile { dir, name, .. } = self.read(entry, 0);
                    self.state().strays.push((dir, name));
                }
            }
        }
    }

    /// Places where a program may have created a plain file that does not count, since the last call.
    pub fn take_strays(&self) -> Vec<Stray> {
        std::mem::take(&mut self.state().strays)
    }
}

pub struct Giving<'a>(&'a AtomicU64);

impl Drop for Giving<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The entries that an earlier agent did not read. Earlier look-ups create no file any more.
pub fn left(index: &Path) -> io::Result<Vec<IntakeFile>> {
    let path = path_of(index);
    let file = match leftovers::open(&path) {
        Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        file => file?,
    };
    match file.metadata()?.len() {
        // The agent was killed before a program could use it.
        0 => return Ok(Vec::new()),
        bytes if bytes != BYTES as u64 => return Err(io::ErrorKind::InvalidData.into()),
        _ => {}
    }
    let ring = Ring::of(file, path)?;
    let head = |offset| ring.word(offset).load(Ordering::SeqCst);
    let magic = head(offset_of!(abi::Ring, magic));
    if magic != abi::RING_MAGIC {
        ring.keep();
        return if magic == 0 { Ok(Vec::new()) } else { Err(io::ErrorKind::InvalidData.into()) };
    }
    ring.first.store(head(offset_of!(abi::Ring, first)), Ordering::SeqCst);
    ring.stop_intake(TIMEOUT);
    // Look-ups from here on create none either: no agent would read their entries.
    let (first, next) = (ring.first.load(Ordering::Relaxed), ring.next());
    for entry in next..first + INTAKE_ENTRIES {
        let free = entry << 3 | phase::FREE;
        let _ =
            ring.phase_word(entry).compare_exchange(free, entry << 3 | phase::VOID, Ordering::SeqCst, Ordering::SeqCst);
    }
    let mut files = Vec::new();
    for entry in first..ring.next() {
        if ring.phase(entry) == Some(phase::DONE) {
            let number = ring.word(Ring::slot(entry) + offset_of!(IntakeEntry, number)).load(Ordering::Relaxed);
            files.push(ring.read(entry, number));
        }
    }
    ring.keep();
    Ok(files)
}

/// A program that is about to create a file continues within this time, or the agent does not wait for it.
pub const TIMEOUT: Duration = Duration::from_millis(20);

impl Ring {
    /// Keeps the file.
    fn keep(mut self) {
        self.path = PathBuf::new();
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        if !self.path.as_os_str().is_empty() {
            drop(std::fs::remove_file(&self.path));
        }
        // SAFETY: nothing of ours points into the mapping any more.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), BYTES) };
    }
}
