//! The locks of inodes: one for each file that is in use, so that a file whose store hangs does not delay others.
//!
//! The danger that this avoids: the drain waits for a writer that waits for the drain.

use std::time::Duration;

use surgetank_types::clock;
use surgetank_types::model::FileId;
use surgetank_types::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// How long the drain, and a request that sets attributes ahead of the drain, wait for a file in use. Its holder may
/// itself wait for room, and room comes from drained files.
pub(crate) const INODE_LOCK_TIMEOUT: Duration = Duration::from_secs(1);

const STRIPES: usize = 128;

pub(crate) struct InodeLocks {
    stripes: Vec<Stripe>,
}

#[derive(Default)]
struct Stripe {
    held: Mutex<Held>,
    released: Condvar,
}

#[derive(Default)]
struct Held {
    /// A few at most.
    ids: Vec<FileId>,
    waiting: u32,
}

pub(crate) struct InodeGuard<'a> {
    stripe: &'a Stripe,
    id: FileId,
}

impl InodeLocks {
    pub fn new() -> Self {
        Self { stripes: (0..STRIPES).map(|_| Stripe::default()).collect() }
    }

    fn stripe(&self, id: FileId) -> &Stripe {
        &self.stripes[(id.0 % STRIPES as u64) as usize]
    }

    pub fn lock(&self, id: FileId) -> InodeGuard<'_> {
        let stripe = self.stripe(id);
        let mut held = stripe.held();
        while held.ids.contains(&id) {
            held.waiting += 1;
            held = stripe.released.wait(held).unwrap_or_else(PoisonError::into_inner);
            held.waiting -= 1;
        }
        held.ids.push(id);
        InodeGuard { stripe, id }
    }

    /// For callers for which the holder may be waiting.
    pub fn lock_within(&self, id: FileId, timeout: Duration) -> Option<InodeGuard<'_>> {
        let stripe = self.stripe(id);
        let begun = clock::tick();
        let mut held = stripe.held();
        while held.ids.contains(&id) {
            let left = timeout.checked_sub(begun.elapsed()).filter(|left| !left.is_zero())?;
            held.waiting += 1;
            held = stripe.released.wait_timeout(held, left).unwrap_or_else(PoisonError::into_inner).0;
            held.waiting -= 1;
        }
        held.ids.push(id);
        Some(InodeGuard { stripe, id })
    }

    pub fn try_lock(&self, id: FileId) -> Option<InodeGuard<'_>> {
        let stripe = self.stripe(id);
        let mut held = stripe.held();
        if held.ids.contains(&id) {
            return None;
        }
        held.ids.push(id);
        Some(InodeGuard { stripe, id })
    }
}

impl Stripe {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for InodeGuard<'_> {
    fn drop(&mut self) {
        let mut held = self.stripe.held();
        held.ids.retain(|id| *id != self.id);
        if held.waiting > 0 {
            self.stripe.released.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_one_stripe_waited_for_each_other() {
        let locks = InodeLocks::new();
        let one = locks.lock(FileId(1));
        let other = locks.lock(FileId(1 + STRIPES as u64));
        assert!(locks.try_lock(FileId(1)).is_none());
        surgetank_types::sync::thread::scope(|scope| {
            let waits = scope.spawn(|| drop(locks.lock(FileId(1))));
            drop(one);
            waits.join().unwrap();
        });
        drop(other);
        assert!(locks.try_lock(FileId(1)).is_some());
    }
}
