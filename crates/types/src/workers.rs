//! Threads for jobs that may block: a thread whose job has ended waits for the next one, so that few are started.

use std::io;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

type Job = Box<dyn FnOnce() + Send>;

/// A thread for each job that runs, and some that wait.
#[derive(Debug)]
pub struct Workers {
    name: &'static str,
    /// Number of threads that may wait.
    idle_max: usize,
    idle: Arc<Mutex<Vec<Sender<Job>>>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Workers {
    /// `name`: of the threads, at most 15 bytes. `idle_max`: how many threads wait for a next job.
    #[must_use]
    pub fn new(name: &'static str, idle_max: usize) -> Self {
        Self { name, idle_max, idle: Arc::default() }
    }

    /// Begins the job at once, in a thread of its own. Errors: the system does not start another thread; the job is dropped.
    pub fn run(&self, job: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let job: Job = Box::new(job);
        let idle = locked(&self.idle).pop();
        match idle {
            None => self.start(job),
            // (A thread that is in the list takes what it is sent.)
            Some(idle) => idle.send(job).or_else(|back| self.start(back.0)),
        }
    }

    fn start(&self, job: Job) -> io::Result<()> {
        let (idle, idle_max) = (self.idle.clone(), self.idle_max);
        let work = move || {
            job();
            let (sender, jobs) = channel::<Job>();
            loop {
                {
                    let mut idle = locked(&idle);
                    if idle.len() >= idle_max {
                        return;
                    }
                    idle.push(sender.clone());
                }
                match jobs.recv() {
                    Ok(job) => job(),
                    Err(_) => return,
                }
            }
        };
        std::thread::Builder::new().name(self.name.to_owned()).stack_size(1 << 20).spawn(work).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::time::Duration;

    #[test]
    fn jobs_that_block_do_not_delay_others() {
        let workers = Workers::new("test", 2);
        let (ends, end) = channel::<()>();
        let (end, (begun, beginnings)) = (Arc::new(Mutex::new(end)), channel());
        for _ in 0..20 {
            let (end, begun) = (end.clone(), begun.clone());
            workers
                .run(move || {
                    begun.send(()).unwrap();
                    let _ = locked(&end).recv();
                })
                .unwrap();
        }
        for _ in 0..20 {
            beginnings.recv_timeout(Duration::from_secs(10)).unwrap();
        }
        drop(ends);
    }

    #[test]
    fn jobs_in_sequence_share_threads() {
        let workers = Workers::new("test", 2);
        let mut threads = HashSet::new();
        for _ in 0..100 {
            let (sender, receiver) = channel();
            workers.run(move || sender.send(std::thread::current().id()).unwrap()).unwrap();
            threads.insert(receiver.recv_timeout(Duration::from_secs(10)).unwrap());
            // The thread waits again a moment after its answer.
            while locked(&workers.idle).is_empty() {
                std::thread::yield_now();
            }
        }
        assert!(threads.len() <= 2, "{} threads", threads.len());
        assert!(locked(&workers.idle).len() <= 2);
    }
}
