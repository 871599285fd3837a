//! The prefetch thread. It brings in what rules with `prefetch` name (Sea's prefetch list among them) while the command
//! runs already, and then what hints name. It ends with the agent.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use surgetank_core::namespace::Namespace;

pub struct Prefetcher {
    stop: Arc<AtomicBool>,
    /// Wakes the thread; `None` ends it.
    wanted: Sender<Option<Vec<u8>>>,
    /// `None`: the thread has been ended.
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Prefetcher {
    pub fn start(namespace: &Arc<Namespace>) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (wanted, paths) = channel::<Option<Vec<u8>>>();
        let (theirs, stopped) = (namespace.clone(), stop.clone());
        let work = move || {
            let stop = || stopped.load(Ordering::Relaxed);
            if !theirs.base.rules.prefetched_below().is_empty() {
                let done = theirs.prefetch.prefetch_by_rules(&stop);
                tracing::info!(files = done.files, bytes = done.bytes, "prefetched by rules");
            }
            while let Ok(Some(path)) = paths.recv() {
                theirs.prefetch.prefetch_hinted(&path, &stop);
            }
        };
        let thread = std::thread::Builder::new().name("prefetch".to_owned()).spawn(work)?;
        let told = wanted.clone();
        // After the thread has ended no hint needs it any more.
        namespace.hints.set_prefetcher(Box::new(move |path| drop(told.send(Some(path)))));
        Ok(Self { stop, wanted, thread: Mutex::new(Some(thread)) })
    }

    /// Returns when the thread brings in nothing more.
    pub fn end(&self) {
        self.stop.store(true, Ordering::Relaxed);
        // (The thread may have ended.)
        let _ = self.wanted.send(None);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the prefetching thread panicked");
        }
    }
}

impl Drop for Prefetcher {
    /// The thread holds the namespace, and the namespace wakes the thread.
    fn drop(&mut self) {
        self.end();
    }
}
