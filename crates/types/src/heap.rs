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

/// Buffers of a few MiB are taken from memory that the allocator has, and not from the system each time. (Otherwise the system
/// clears each page of each message between members.)
pub fn keep_buffers() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        /// From this size on the system gives each buffer apart.
        const APART_BYTES: libc::c_int = 4 << 20;
        /// So much free memory at the end of each heap is kept, until [`give_back`].
        const KEPT_BYTES: libc::c_int = 4 << 20;
        // SAFETY: `mallopt` has no precondition. It locks the allocator, as every allocation does.
        unsafe {
            libc::mallopt(libc::M_MMAP_THRESHOLD, APART_BYTES);
            libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT_BYTES);
        }
    }
}
