//! The ring in which the shim tells of the plain files that it made itself, in directories that are lent
//! (`surgetank_core::namespace::lent`; the layout and who writes what stand in `shim/abi.h`, the other side is `shim/lent.c`).
//!
//! Nothing in it is believed before it is checked: programs write it. It outlives the agent like the index does: what an
//! earlier agent did not come to read is read by the next one, before it finds files on tiers that nobody knows.

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
use surgetank_core::namespace::Claimed;
use surgetank_state::Stray;
use surgetank_types::clock;
use surgetank_types::model::{FileId, RunId};

use super::abi::{self, CLAIMS, Claim, phase};
use super::leftovers;

const BYTES: usize = abi::RING_SLOTS_OFFSET + CLAIMS as usize * size_of::<Claim>();
/// So many are dealt with in one step, so that nobody waits long for the tree.
const TAKEN_MAX: usize = 256;
const PAUSE: Duration = Duration::from_micros(20);

pub struct Ring {
    base: NonNull<u8>,
    file: File,
    path: PathBuf,
    /// The oldest claim that was not given back.
    first: AtomicU64,
    state: Mutex<State>,
}

struct State {
    /// Which number each slot's next file gets, as we wrote it there.
    numbers: Vec<u64>,
    /// Claims that were taken and not given back yet.
    taken: Vec<u64>,
    /// Whose claims were revoked in the middle.
    strays: Vec<Stray>,
}

// SAFETY: the mapping belongs to this value; what others write meanwhile is read and written by atomics or copied and checked.
unsafe impl Send for Ring {}
// SAFETY: as above.
unsafe impl Sync for Ring {}

pub fn path_of(index: &Path) -> PathBuf {
    let mut path = index.as_os_str().to_owned();
    path.push(".ring");
    path.into()
}

impl Ring {
    /// A new one; or that of an earlier agent, which programs have mapped and may be writing, all of whose claims were taken
    /// up by [`left`]. `numbers`: one for each slot.
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
        // A full file system would kill us at the first write.
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, BYTES as u64)?;
        let ring = Self::of(file, path)?;
        let next = ring.word(offset_of!(abi::Ring, next)).load(Ordering::SeqCst);
        ring.word(offset_of!(abi::Ring, epoch)).fetch_add(1, Ordering::SeqCst);
        // (Nor does an earlier agent.)
        ring.word(offset_of!(abi::Ring, giving)).store(0, Ordering::SeqCst);
        let mut state = ring.state();
        for claim in next..next + CLAIMS {
            let number = numbers();
            state.numbers[(claim % CLAIMS) as usize] = number;
            // (What another program may still write to stays out of use.)
            let before = ring.phase_word(claim).load(Ordering::SeqCst) & 7;
            let retired = matches!(before, phase::REVOKED | phase::SKIP);
            ring.offer(claim, number, if retired { phase::SKIP } else { phase::FREE });
        }
        drop(state);
        ring.first.store(next, Ordering::SeqCst);
        ring.word(offset_of!(abi::Ring, first)).store(next, Ordering::SeqCst);
        let head = ring.base.cast::<abi::Ring>().as_ptr();
        // SAFETY: fields of the mapped head; `magic` last.
        unsafe {
            (&raw mut (*head).layout).write_volatile(abi::LAYOUT);
            (&raw mut (*head).claims).write_volatile(CLAIMS as u32);
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
        let state = State { numbers: vec![0; CLAIMS as usize], taken: Vec::new(), strays: Vec::new() };
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

    fn slot(claim: u64) -> usize {
        abi::RING_SLOTS_OFFSET + (claim % CLAIMS) as usize * size_of::<Claim>()
    }

    fn phase_word(&self, claim: u64) -> &AtomicU64 {
        self.word(Self::slot(claim) + offset_of!(Claim, state))
    }

    /// The slot is this claim's, whoever takes it.
    fn offer(&self, claim: u64, number: u64, phase: u64) {
        self.word(Self::slot(claim) + offset_of!(Claim, number)).store(number, Ordering::Relaxed);
        self.phase_word(claim).store(claim << 3 | phase, Ordering::SeqCst);
    }

    fn next(&self) -> u64 {
        let first = self.first.load(Ordering::Relaxed);
        // (A program that writes nonsense there must not make us look for long.)
        self.word(offset_of!(abi::Ring, next)).load(Ordering::SeqCst).clamp(first, first + CLAIMS)
    }

    /// Is there anything in it?
    pub fn waits(&self) -> bool {
        self.next() != self.first.load(Ordering::Relaxed)
    }

    fn phase(&self, claim: u64) -> Option<u64> {
        let state = self.phase_word(claim).load(Ordering::SeqCst);
        (state >> 3 == claim).then_some(state & 7)
    }

    /// The next files that were made; to be followed by [`Self::give_back`] when programs find them in the index.
    pub fn take(&self) -> Vec<Claimed> {
        let mut state = self.state();
        state.taken.clear();
        let mut files = Vec::new();
        for claim in self.first.load(Ordering::Relaxed)..self.next() {
            match self.phase(claim) {
                Some(phase::DONE) => {
                    files.push(self.read(claim, state.numbers[(claim % CLAIMS) as usize]));
                    state.taken.push(claim);
                }
                Some(phase::VOID | phase::REVOKED | phase::SKIP) => state.taken.push(claim),
                // On its way, or given back before an older one.
                _ => {}
            }
            if files.len() == TAKEN_MAX {
                break;
            }
        }
        files
    }

    fn read(&self, claim: u64, number: u64) -> Claimed {
        let at = self.base.as_ptr().wrapping_add(Self::slot(claim)).cast::<Claim>();
        // SAFETY: a slot of the mapping; any bytes are a claim, and what a program writes meanwhile is checked as any other.
        let slot = unsafe { at.read_volatile() };
        let name = slot.name.get(..slot.name_bytes as usize).unwrap_or_default();
        Claimed {
            number,
            dir: FileId(slot.dir),
            name: name.to_vec(),
            perm: slot.mode,
            run: RunId(slot.run),
            dev: slot.dev,
            ino: slot.ino,
        }
    }

    /// What was taken is in the index: its slots are free for others.
    pub fn give_back(&self, numbers: &mut dyn FnMut() -> u64) {
        let mut state = self.state();
        let taken = std::mem::take(&mut state.taken);
        if taken.is_empty() {
            return;
        }
        let turn = self.word(offset_of!(abi::Ring, turn));
        turn.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        for claim in taken {
            let slot = (claim % CLAIMS) as usize;
            // A number that was not used is offered again.
            let phase = self.phase(claim);
            if phase == Some(phase::DONE) {
                state.numbers[slot] = numbers();
            }
            let retired = matches!(phase, Some(phase::REVOKED | phase::SKIP));
            self.offer(claim + CLAIMS, state.numbers[slot], if retired { phase::SKIP } else { phase::FREE });
            surgetank_types::crash_point!("lent.giving");
        }
        let end = self.next();
        let mut first = self.first.load(Ordering::Relaxed);
        while first < end && self.phase_word(first).load(Ordering::Relaxed) >> 3 == first + CLAIMS {
            first += 1;
        }
        self.first.store(first, Ordering::Relaxed);
        self.word(offset_of!(abi::Ring, first)).store(first, Ordering::Release);
        fence(Ordering::SeqCst);
        turn.fetch_add(1, Ordering::SeqCst);
    }

    /// As long as this lives programs make nothing: the close of what they are sent just now would be told of when ours is
    /// closed, after those of files that they made later.
    pub fn giving(&self) -> Giving<'_> {
        let giving = self.word(offset_of!(abi::Ring, giving));
        giving.fetch_add(1, Ordering::SeqCst);
        Giving(giving)
    }

    pub fn limit(&self, claims: u64) {
        self.word(offset_of!(abi::Ring, limit)).store(claims.min(CLAIMS), Ordering::Relaxed);
    }

    /// Whatever was looked up until now makes no file any more: those that are being made are waited for, and those of
    /// programs that do not go on are revoked.
    pub fn stop_claims(&self, patience: Duration) {
        self.word(offset_of!(abi::Ring, epoch)).fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let since: Instant = clock::tick();
        for claim in self.first.load(Ordering::Relaxed)..self.next() {
            let under_way = || matches!(self.phase(claim), Some(phase::FREE | phase::MADE));
            while under_way() && since.elapsed() < patience {
                std::thread::sleep(PAUSE);
            }
            for from in [phase::FREE, phase::MADE] {
                let revoked = claim << 3 | phase::REVOKED;
                let state = self.phase_word(claim);
                let was = state.compare_exchange(claim << 3 | from, revoked, Ordering::SeqCst, Ordering::SeqCst);
                if was.is_ok() && from == phase::MADE {
                    let Claimed { dir, name, .. } = self.read(claim, 0);
                    self.state().strays.push((dir, name));
                }
            }
        }
    }

    /// Where somebody may have made a plain file that counts for nothing, since this was asked last.
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

/// What an earlier agent did not come to read. Nothing is made by what was looked up before.
pub fn left(index: &Path) -> io::Result<Vec<Claimed>> {
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
    ring.stop_claims(PATIENCE);
    // And by what is looked up from here on: nobody would come to read of it.
    let (first, next) = (ring.first.load(Ordering::Relaxed), ring.next());
    for claim in next..first + CLAIMS {
        let free = claim << 3 | phase::FREE;
        let _ =
            ring.phase_word(claim).compare_exchange(free, claim << 3 | phase::VOID, Ordering::SeqCst, Ordering::SeqCst);
    }
    let mut files = Vec::new();
    for claim in first..ring.next() {
        if ring.phase(claim) == Some(phase::DONE) {
            let number = ring.word(Ring::slot(claim) + offset_of!(Claim, number)).load(Ordering::Relaxed);
            files.push(ring.read(claim, number));
        }
    }
    ring.keep();
    Ok(files)
}

/// A program that is about to make a file goes on within this time, or is not waited for.
pub const PATIENCE: Duration = Duration::from_millis(20);

impl Ring {
    /// The file stays where it is.
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
