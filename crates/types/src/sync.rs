//! Locks, conditions, atomic words and threads. By default they are the standard library's. With the feature `schedules` (for
//! `crates/core/tests/schedules` only) shuttle decides which thread runs next.
//!
//! Memory that other processes share, and statics of the whole process, always use the standard ones.

pub use std::sync::{Arc, OnceLock, PoisonError};
#[cfg(not(feature = "schedules"))]
pub use std::{
    sync::{Condvar, Mutex, MutexGuard, RwLock, atomic},
    thread,
};

#[cfg(feature = "schedules")]
pub use scheduled::{Condvar, Mutex, MutexGuard};
#[cfg(feature = "schedules")]
pub use shuttle::{
    sync::{RwLock, atomic},
    thread,
};

/// Whether the thread has ended. Under shuttle always true: the caller joins it, and shuttle runs it to its end.
pub fn is_finished<T>(thread: &thread::JoinHandle<T>) -> bool {
    #[cfg(not(feature = "schedules"))]
    return thread.is_finished();
    #[cfg(feature = "schedules")]
    {
        let _ = thread;
        true
    }
}

/// Like the standard ones, but time does not pass: a wait with a limit yields once to the other threads and then times out.
#[cfg(feature = "schedules")]
mod scheduled {
    use std::ops::{Deref, DerefMut};
    use std::sync::{LockResult, PoisonError, TryLockError, TryLockResult};
    use std::time::Duration;

    /// A mutex that shuttle schedules, with the interface of [`std::sync::Mutex`].
    #[derive(Debug, Default)]
    pub struct Mutex<T>(shuttle::sync::Mutex<T>);

    /// Keeps a [`Mutex`] locked until it is dropped.
    #[derive(Debug)]
    pub struct MutexGuard<'a, T> {
        of: &'a Mutex<T>,
        held: shuttle::sync::MutexGuard<'a, T>,
    }

    impl<T> Mutex<T> {
        /// An unlocked mutex.
        pub const fn new(value: T) -> Self {
            Self(shuttle::sync::Mutex::new(value))
        }

        /// Blocks until the mutex is free. Errors: a thread panicked while it held the mutex.
        pub fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
            let held = |held| MutexGuard { of: self, held };
            self.0.lock().map(held).map_err(|poisoned| PoisonError::new(held(poisoned.into_inner())))
        }

        /// The value. Errors: a thread panicked while it held the mutex.
        pub fn into_inner(self) -> LockResult<T> {
            self.0.into_inner()
        }

        /// Locks the mutex if it is free. Errors: another thread holds it, or panicked while it held it.
        pub fn try_lock(&self) -> TryLockResult<MutexGuard<'_, T>> {
            let held = |held| MutexGuard { of: self, held };
            self.0.try_lock().map(held).map_err(|refused| match refused {
                TryLockError::Poisoned(poisoned) => PoisonError::new(held(poisoned.into_inner())).into(),
                TryLockError::WouldBlock => TryLockError::WouldBlock,
            })
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            &self.held
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            &mut self.held
        }
    }

    /// A condition variable that shuttle schedules, with the interface of [`std::sync::Condvar`].
    #[derive(Debug, Default)]
    pub struct Condvar(shuttle::sync::Condvar);

    /// Result of a wait with a limit, which always ends at its limit here.
    #[derive(Debug, Clone, Copy)]
    pub struct TimedOut;

    impl TimedOut {
        /// Always true.
        pub fn timed_out(self) -> bool {
            true
        }
    }

    impl Condvar {
        /// A condition variable without waiting threads.
        pub fn new() -> Self {
            Self::default()
        }

        /// Waits for a notification. Errors: a thread panicked while it held the mutex.
        pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
            let of = guard.of;
            let held = |held| MutexGuard { of, held };
            self.0.wait(guard.held).map(held).map_err(|poisoned| PoisonError::new(held(poisoned.into_inner())))
        }

        /// Yields once to the other threads. Errors: a thread panicked while it held the mutex.
        pub fn wait_timeout<'a, T>(
            &self,
            guard: MutexGuard<'a, T>,
            _at_most: Duration,
        ) -> LockResult<(MutexGuard<'a, T>, TimedOut)> {
            let of = guard.of;
            drop(guard);
            shuttle::thread::yield_now();
            let timed_out = |held| (held, TimedOut);
            of.lock().map(timed_out).map_err(|poisoned| PoisonError::new(timed_out(poisoned.into_inner())))
        }

        /// Wakes all waiting threads.
        pub fn notify_all(&self) {
            self.0.notify_all();
        }
        /// Wakes one waiting thread.
        pub fn notify_one(&self) {
            self.0.notify_one();
        }
    }
}
