//! A file server as the store: a separate program, which a test can kill, and in which it can inject faults.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::{eventually, succeed};

pub struct Server {
    child: Child,
}

/// The file that lists the faults to inject.
const FAULTS: &str = "/mnt/faults";

/// From now on the store has these faults (`tests/mirror/faults.rs`); none if the text is empty.
pub fn faults(text: &str) {
    fs::write("/mnt/faults.new", text).unwrap();
    fs::rename("/mnt/faults.new", FAULTS).unwrap();
}

/// How many operations failed because of an injected fault.
pub fn faults_hit() -> u64 {
    fs::metadata(format!("{FAULTS}.hits")).map_or(0, |file| file.len())
}

impl Server {
    pub fn start(at: &Path, options: &[&str]) -> Self {
        let tests = std::env::current_exe().unwrap();
        let program = tests.parent().unwrap().parent().unwrap().join("examples/slowfs");
        let child = Command::new(program)
            .args(["/mnt/behind", at.to_str().unwrap()])
            .args(["--faults", FAULTS])
            .args(if options.contains(&"--ttl-ms") { &[][..] } else { &["--ttl-ms", "0"] })
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
