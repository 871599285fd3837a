//! Several requests at the same time: a server answers each after a while, and most of that is waiting.

use std::io;

use surgetank_types::sync::atomic::{AtomicUsize, Ordering};
use surgetank_types::sync::{Mutex, PoisonError};

/// Calls `act` for each of `0 .. count`, `threads` at a time. After the first error no further call starts, and that error is
/// returned.
pub fn at_once(count: usize, threads: usize, act: &(dyn Fn(usize) -> io::Result<()> + Sync)) -> io::Result<()> {
    let next = AtomicUsize::new(0);
    let failed: Mutex<Option<io::Error>> = Mutex::new(None);
    let failure = || failed.lock().unwrap_or_else(PoisonError::into_inner);
    let work = || {
        while failure().is_none() {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count {
                return;
            }
            if let Err(why) = act(index) {
                failure().get_or_insert(why);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.min(count) {
            scope.spawn(work);
        }
        work();
    });
    let failed = failure().take();
    failed.map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_run_once_and_stop_after_an_error() {
        let done = Mutex::new(Vec::new());
        at_once(1000, 8, &|index| {
            done.lock().unwrap().push(index);
            Ok(())
        })
        .unwrap();
        let mut done = std::mem::take(&mut *done.lock().unwrap());
        done.sort_unstable();
        assert_eq!(done, (0..1000).collect::<Vec<_>>());
        let begun = AtomicUsize::new(0);
        let refused = at_once(1000, 4, &|index| {
            begun.fetch_add(1, Ordering::Relaxed);
            if index == 10 { Err(io::ErrorKind::NotFound.into()) } else { Ok(()) }
        });
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::NotFound);
        assert!(begun.load(Ordering::Relaxed) < 1000);
        at_once(0, 4, &|_| Err(io::ErrorKind::Other.into())).unwrap();
    }
}
