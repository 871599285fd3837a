//! Threads that look files up through the mount, because their process has no shim. For a process with the shim a
//! listing need not include attributes.

use std::sync::atomic::{AtomicU32, Ordering};

/// Unshimmed threads, by hash. (A thread that is confused with another only gets more than it needs, or asks.)
pub struct Unshimmed([AtomicU32; 64]);

impl Unshimmed {
    pub fn new() -> Self {
        Self([const { AtomicU32::new(0) }; 64])
    }
    fn of(&self, thread: u32) -> &AtomicU32 {
        let [first, ..] = &self.0;
        self.0.get(thread as usize % self.0.len()).unwrap_or(first)
    }
    pub fn add(&self, thread: u32) {
        self.of(thread).store(thread, Ordering::Relaxed);
    }
    pub fn has(&self, thread: u32) -> bool {
        self.of(thread).load(Ordering::Relaxed) == thread
    }
}
