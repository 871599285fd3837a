//! Locks, conditions, atomic words and threads of everything that several threads do at once: the standard ones, or (feature
//! `schedules`, for `tests/schedules.rs` only) ones that let shuttle decide who runs next.
//!
//! What lies in memory that other processes see, and what is one for the whole process, has the standard ones always.

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

/// Has the thread ended? (Where shuttle decides, whoever asks may as well wait for it.)
pub fn is_finished<T>(thread: &thread::JoinHandle<T>) -> bool {
    #[cfg(not(feature = "schedules"))]
    return thread.is_finished();
    #[cfg(feature = "schedules")]
    {
        let _ = thread;
        true
    }
}

/// As the standard ones; time passes at once, so that a wait with a limit is one turn of the others.
#[cfg(feature = "schedules")]
mod scheduled {
    use std::ops::{Deref, DerefMut};
    use std::sync::{LockResult, PoisonError, TryLockError, TryLockResult};
    use std::time::Duration;

    #[derive(Debug, Default)]
    pub struct Mutex<T>(shuttle::sync::Mutex<T>);

    #[derive(Debug)]
    pub struct MutexGuard<'a, T> {
        of: &'a Mutex<T>,
        held: shuttle::sync::MutexGuard<'a, T>,
    }

    impl<T> Mutex<T> {
        pub const fn new(value: T) -> Self {
            Self(shuttle::sync::Mutex::new(value))
        }

        pub fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
            let held = |held| MutexGuard { of: self, held };
            self.0.lock().map(held).map_err(|poisoned| PoisonError::new(held(poisoned.into_inner())))
        }

        pub fn into_inner(self) -> LockResult<T> {
            self.0.into_inner()
        }

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

    #[derive(Debug, Default)]
    pub struct Condvar(shuttle::sync::Condvar);

    /// The limit was reached.
    #[derive(Debug, Clone, Copy)]
    pub struct TimedOut;

    impl TimedOut {
        pub fn timed_out(self) -> bool {
            true
        }
    }

    impl Condvar {
        pub fn new() -> Self {
            Self::default()
        }

        pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
            let of = guard.of;
            let held = |held| MutexGuard { of, held };
            self.0.wait(guard.held).map(held).map_err(|poisoned| PoisonError::new(held(poisoned.into_inner())))
        }

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

        pub fn notify_all(&self) {
            self.0.notify_all();
        }
        pub fn notify_one(&self) {
            self.0.notify_one();
        }
    }
}
