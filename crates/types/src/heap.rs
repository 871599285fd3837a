//! Memory that the allocator keeps after its user has freed it.

/// Gives the pages without a live allocation back to the system. Useful after much was freed at once: glibc keeps such
/// pages, for each thread apart, and the agent lives as long as its job. Other threads that
/// allocate may wait meanwhile.
pub fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: `malloc_trim` has no precondition. It locks the allocator's arenas, as every allocation does.
    unsafe {
        libc::malloc_trim(0);
    }
}
