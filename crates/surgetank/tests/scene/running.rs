//! A command of the scene that goes on: what it has said so far, and its end.

use std::io::Read;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::{Ended, LIMIT};

/// A command that goes on.
pub struct Running {
    child: Option<Child>,
    streams: Vec<std::thread::JoinHandle<String>>,
    /// Its error output until now.
    said: Arc<Mutex<Vec<u8>>>,
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
        let said = Arc::default();
        let streams = vec![
            collect(Box::new(child.stdout.take().unwrap()), Arc::default()),
            collect(Box::new(child.stderr.take().unwrap()), Arc::clone(&said)),
        ];
        Self { child: Some(child), streams, said }
    }

    /// Has it said this, until now?
    pub fn says(&self, words: &str) -> bool {
        String::from_utf8_lossy(&self.said.lock().unwrap()).contains(words)
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    pub fn is_over(&mut self) -> bool {
        self.child.as_mut().unwrap().try_wait().unwrap().is_some()
    }

    /// What an ended command said.
    pub fn so_far(&mut self) -> String {
        let texts: Vec<String> = self.streams.drain(..).map(|stream| stream.join().unwrap()).collect();
        texts.join("\n")
    }

    pub fn kill(&self) {
        // SAFETY: the child is ours and not yet waited for; it leads a group.
        unsafe { libc::kill(-(self.pid() as i32), libc::SIGKILL) };
    }

    /// The command and what it started do nothing more.
    pub fn halt(&self) {
        // SAFETY: as above.
        unsafe { libc::kill(-(self.pid() as i32), libc::SIGSTOP) };
    }

    #[track_caller]
    pub fn ends(mut self) -> Ended {
        let deadline = Instant::now() + LIMIT;
        while !self.is_over() {
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
            // SAFETY: the child is ours and not yet waited for; it leads a group.
            unsafe { libc::kill(-(child.id() as i32), libc::SIGKILL) };
            child.wait().unwrap();
        }
    }
}
