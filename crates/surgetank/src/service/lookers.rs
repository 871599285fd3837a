//! Who asks the mount for files' attributes, and who has the shim for that: to the latter a listing need not bring them.

use std::sync::atomic::{AtomicU32, Ordering};

/// Threads that look files up by the mount: those without the shim. (Who is taken for another one only gets more, or asks.)
pub struct Lookers([AtomicU32; 64]);

impl Lookers {
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
