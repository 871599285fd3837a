//! A file server as the store: another program, which can be killed, and told to do wrong.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::{eventually, succeed};

pub struct Server {
    child: Child,
}

/// What goes wrong is said here.
const FAULTS: &str = "/mnt/faults";

/// From now on this goes wrong in the store (`tests/mirror/faults.rs`); nothing if empty.
pub fn faults(text: &str) {
    fs::write("/mnt/faults.new", text).unwrap();
    fs::rename("/mnt/faults.new", FAULTS).unwrap();
}

/// How many operations went wrong because of that.
pub fn faults_met() -> u64 {
    fs::metadata(format!("{FAULTS}.met")).map_or(0, |met| met.len())
}

impl Server {
    pub fn start(at: &Path, options: &[&str]) -> Self {
        let tests = std::env::current_exe().unwrap();
        let program = tests.parent().unwrap().parent().unwrap().join("examples/slowfs");
        let child = Command::new(program)
            .args(["/mnt/behind", at.to_str().unwrap()])
            .args(["--ttl-ms", "0", "--faults", FAULTS])
            .args(options)
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        eventually("the server serves", || {
            fs::read_to_string("/proc/thread-self/mountinfo")
                .unwrap()
                .lines()
                .any(|line| line.contains(&format!(" {} ", at.display())) && line.contains("fuse"))
        });
        Self { child }
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn unmount(path: &Path) {
    succeed(Command::new("umount").arg("-l").arg(path));
}
