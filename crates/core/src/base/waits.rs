//! What a thread that waits for a process asks about that process. The kernel adapter knows; without one no wait is interrupted.

use surgetank_types::sync::OnceLock;

/// Functions of the kernel adapter, by which a waiting thread learns about its process.
#[derive(Default)]
pub struct Waits {
    interrupted: OnceLock<fn() -> bool>,
    killed: OnceLock<fn() -> bool>,
    long: OnceLock<fn()>,
}

impl Waits {
    /// `interrupted`: whether any signal arrived for the process for which this thread waits. `killed`: whether one that ends it
    /// did. `long`: called by a thread that is about to wait for an unlimited time.
    pub fn set(&self, interrupted: fn() -> bool, killed: fn() -> bool, long: fn()) {
        // Set again it would be of the same adapter; the first stays.
        let _ = self.interrupted.set(interrupted);
        let _ = self.killed.set(killed);
        let _ = self.long.set(long);
    }

    /// For waits that a signal interrupts on a local file system too (locks), and for those that a local one does not have (room).
    pub(crate) fn is_interrupted(&self) -> bool {
        self.interrupted.get().is_some_and(|interrupted| interrupted())
    }

    /// For all other waits: a process that continues must not see EINTR from fsync, rename, open or read.
    pub(crate) fn is_killed(&self) -> bool {
        self.killed.get().is_some_and(|killed| killed())
    }

    pub(crate) fn begin_long(&self) {
        if let Some(long) = self.long.get() {
            long();
        }
    }
}
