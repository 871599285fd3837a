//! The thread that brings in what rules with `prefetch` name (Sea's prefetch list among them), beside the command that
//! has begun already. It ends when it is through, or when the agent does.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use surgetank_core::namespace::Namespace;

pub struct Prefetcher {
    stop: Arc<AtomicBool>,
    /// `None`: no rule asks for it, or it was ended.
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Prefetcher {
    pub fn start(namespace: &Arc<Namespace>) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut thread = None;
        if !namespace.rules.prefetched_below().is_empty() {
            let (namespace, stop) = (namespace.clone(), stop.clone());
            let work = move || {
                let done = namespace.prefetch_by_rules(&|| stop.load(Ordering::Relaxed));
                tracing::info!(files = done.files, bytes = done.bytes, "prefetched by rules");
            };
            thread = Some(std::thread::Builder::new().name("prefetch".to_owned()).spawn(work)?);
        }
        Ok(Self { stop, thread: Mutex::new(thread) })
    }

    /// Returns when nothing is brought in any more.
    pub fn end(&self) {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the prefetching thread panicked");
        }
    }
}
