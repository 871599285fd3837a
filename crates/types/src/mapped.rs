//! A file mapped for reading, while other processes may write or shorten it.
//!
//! A look at a page behind the file's new end raises SIGBUS. The handler puts zeros there and notes that, so the reader continues
//! and learns of it ([`Mapped::is_cut`]).
//!
//! The danger that this avoids: a program that shortens its file ends the process that looks at it.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Mappings at the same time; the handler looks at all of them.
const MAPPINGS_MAX: usize = 64;

struct Range {
    /// 0: free; 1: being made or removed.
    start: AtomicUsize,
    bytes: AtomicUsize,
    cut: AtomicBool,
}

static RANGES: [Range; MAPPINGS_MAX] =
    [const { Range { start: AtomicUsize::new(0), bytes: AtomicUsize::new(0), cut: AtomicBool::new(false) } };
        MAPPINGS_MAX];

/// Size of a page in bytes, a power of two.
static PAGE_BYTES: AtomicUsize = AtomicUsize::new(4096);

/// Handler of SIGBUS before this module's.
static BEFORE: AtomicUsize = AtomicUsize::new(0);

/// The first bytes of a file, in memory.
#[derive(Debug)]
pub struct Mapped {
    start: *mut libc::c_void,
    bytes: usize,
    range: usize,
}

// SAFETY: the mapping belongs to no thread, and is only read.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Maps the first `bytes` of a file. Errors: those of the system; `OutOfMemory` with 64 mappings.
    pub fn of(file: &File, bytes: usize) -> io::Result<Self> {
        handle_signals();
        let free = |range: &Range| range.start.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        let range = RANGES.iter().position(free).ok_or(io::ErrorKind::OutOfMemory)?;
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        // SAFETY: a new mapping, at an address that the kernel chooses; the descriptor is open.
        let start = unsafe { libc::mmap(ptr::null_mut(), bytes, libc::PROT_READ, flags, file.as_raw_fd(), 0) };
        if start == libc::MAP_FAILED {
            let why = io::Error::last_os_error();
            RANGES[range].start.store(0, Ordering::Release);
            return Err(why);
        }
        RANGES[range].cut.store(false, Ordering::SeqCst);
        RANGES[range].bytes.store(bytes, Ordering::SeqCst);
        RANGES[range].start.store(start as usize, Ordering::SeqCst);
        Ok(Self { start, bytes, range })
    }

    /// Length of the mapping in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The file was shorter than the mapping at some look. What was read there, and everything that is read later, is zeros.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        RANGES[self.range].cut.load(Ordering::Relaxed)
    }

    /// Passes `len` bytes from `at` on, which must be within the mapping. They may change during the call: two looks at one byte
    /// can differ.
    ///
    /// # Panics
    /// The range is not within the mapping.
    pub fn look<T>(&self, at: usize, len: usize, act: impl FnOnce(&[u8]) -> T) -> T {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.bytes), "{at} + {len} of {}", self.bytes);
        // SAFETY: the range is mapped as long as `self` lives (checked above), and every value of a byte is valid. Other processes
        // may write the bytes meanwhile, as with any file that is mapped shared: `act` computes a checksum, which is then one of
        // neither state.
        act(unsafe { std::slice::from_raw_parts(self.start.cast::<u8>().add(at), len) })
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // (While its addresses are given to another mapping, the range belongs to no mapping.)
        RANGES[self.range].start.store(1, Ordering::SeqCst);
        // SAFETY: this mapping; nothing refers to it any more.
        unsafe { libc::munmap(self.start, self.bytes) };
        RANGES[self.range].start.store(0, Ordering::Release);
    }
}

fn handle_signals() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: asks for a number.
        let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        PAGE_BYTES.store(usize::try_from(page_bytes).unwrap_or(4096), Ordering::Relaxed);
        // SAFETY: all zeros are a valid `sigaction`; the handler keeps to what a signal handler may do.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            let mut before: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_bus as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut before);
            BEFORE.store(
                if before.sa_flags & libc::SA_SIGINFO != 0 { before.sa_sigaction } else { 0 },
                Ordering::Release,
            );
            libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut());
        }
    });
}

/// Only atomics and system calls: allocates nothing, locks nothing, leaves `errno` as it was.
extern "C" fn on_bus(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t` to a handler with SA_SIGINFO.
    let address = unsafe { (*info).si_addr() } as usize;
    for range in &RANGES {
        let start = range.start.load(Ordering::SeqCst);
        let end = start.saturating_add(range.bytes.load(Ordering::SeqCst));
        // (The owner of the range that has the address is in `look`, so that range does not change.)
        if start <= 1 || !(start..end).contains(&address) || range.start.load(Ordering::SeqCst) != start {
            continue;
        }
        range.cut.store(true, Ordering::Relaxed);
        let page = address & !(PAGE_BYTES.load(Ordering::Relaxed) - 1);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: replaces pages of a mapping that this module made, and whose owner is in `look`; errno is restored.
        unsafe {
            let errno = *libc::__errno_location();
            let zeros = libc::mmap(page as *mut libc::c_void, end - page, libc::PROT_READ, flags, -1, 0);
            *libc::__errno_location() = errno;
            if zeros != libc::MAP_FAILED {
                return;
            }
        }
    }
    let before = BEFORE.load(Ordering::Acquire);
    // SAFETY: the handler that was installed with SA_SIGINFO before this one; or the default, with which the access ends the
    // process when it is repeated.
    unsafe {
        if before > 1 {
            let before: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                std::mem::transmute(before);
            before(signal, info, context);
        } else {
            libc::signal(signal, libc::SIG_DFL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn shortened_file_reads_as_zeros_and_is_noted() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[7; 40_000], 0).unwrap();
        let mapped = Mapped::of(&file, 40_000).unwrap();
        assert!(mapped.look(0, 40_000, |bytes| bytes.iter().all(|byte| *byte == 7)));
        file.write_all_at(&[8; 10], 20_000).unwrap();
        assert_eq!(mapped.look(20_000, 2, |bytes| bytes.to_vec()), [8, 8]);
        assert!(!mapped.is_cut());
        file.set_len(4096).unwrap();
        assert_eq!(mapped.look(4095, 2, |bytes| bytes.to_vec()), [7, 0]);
        assert!(mapped.is_cut());
        assert!(mapped.look(4096, 30_000, |bytes| bytes.iter().all(|byte| *byte == 0)));
    }

    #[test]
    fn mappings_are_limited_and_given_back() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        for _ in 0..2 {
            let all: Vec<_> = std::iter::from_fn(|| Mapped::of(&file, 4096).ok()).collect();
            assert!((MAPPINGS_MAX - 2..=MAPPINGS_MAX).contains(&all.len()), "{}", all.len());
        }
    }
}
