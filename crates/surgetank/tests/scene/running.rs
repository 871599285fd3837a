//! A command of the scene that is still running: its output so far, and its end.

use std::io::Read;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::{Ended, LIMIT};

/// A command that is still running.
pub struct Running {
    child: Option<Child>,
    streams: Vec<std::thread::JoinHandle<String>>,
    /// Its standard error so far.
    stderr: Arc<Mutex<Vec<u8>>>,
}

impl Running {
    #[track_caller]
    pub fn of(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let collect = |mut stream: Box<dyn Read + Send>, text: Arc<Mutex<Vec<u8>>>| {
            std::thread::spawn(move || {
                let mut bytes = vec![0; 64 << 10];
                loop {
                    let count = stream.read(&mut bytes).unwrap();
                    text.lock().unwrap().extend_from_slice(&bytes[..count]);
                    if count == 0 {
                        return String::from_utf8_lossy(&text.lock().unwrap()).into_owned();
                    }
                }
            })
        };
        let stderr = Arc::default();
        let streams = vec![
            collect(Box::new(child.stdout.take().unwrap()), Arc::default()),
            collect(Box::new(child.stderr.take().unwrap()), Arc::clone(&stderr)),
        ];
        Self { child: Some(child), streams, stderr }
    }

    /// Whether standard error contains this so far.
    pub fn says(&self, words: &str) -> bool {
        String::from_utf8_lossy(&self.stderr.lock().unwrap()).contains(words)
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    pub fn has_ended(&mut self) -> bool {
        self.child.as_mut().unwrap().try_wait().unwrap().is_some()
    }

    /// The output of a command that has ended.
    pub fn so_far(&mut self) -> String {
        let texts: Vec<String> = self.streams.drain(..).map(|stream| stream.join().unwrap()).collect();
        texts.join("\n")
    }

    pub fn kill(&self) {
        // SAFETY: this value started the child and has not waited for it; it leads a group.
        unsafe { libc::kill(-(self.pid() as i32), libc::SIGKILL) };
    }

    /// Stops the command and the processes that it started.
    pub fn halt(&self) {
        // SAFETY: as above.
        unsafe { libc::kill(-(self.pid() as i32), libc::SIGSTOP) };
    }

    #[track_caller]
    pub fn ends(mut self) -> Ended {
        let deadline = Instant::now() + LIMIT;
        while !self.has_ended() {
            if Instant::now() > deadline {
                self.kill();
                let mut child = self.child.take().unwrap();
                child.wait().unwrap();
                let text: Vec<String> = self.streams.drain(..).map(|stream| stream.join().unwrap()).collect();
                panic!("still running after {LIMIT:?}:\n{}", text.join("\n"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let status = self.child.take().unwrap().wait().unwrap();
        let mut texts = self.streams.drain(..).map(|stream| stream.join().unwrap());
        let (stdout, stderr) = (texts.next().unwrap(), texts.next().unwrap());
        Ended { status, stdout, stderr }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // SAFETY: this value started the child and has not waited for it; it leads a group.
            unsafe { libc::kill(-(child.id() as i32), libc::SIGKILL) };
            child.wait().unwrap();
        }
    }
}
