//! Runs against a store that is a server.
#![allow(dead_code)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

pub const LIMIT: Duration = Duration::from_secs(120);

/// Marks the processes of a node, agents among them.
const MARK: &str = "SURGETANK_TEST_NODE";

/// A node without any state of an earlier one: only the store is common.
pub struct Node {
    scratch: TempDir,
}

impl Node {
    pub fn new() -> Self {
        let scratch = TempDir::new().unwrap();
        for name in ["over", "state", "fast"] {
            fs::create_dir(scratch.path().join(name)).unwrap();
            fs::set_permissions(scratch.path().join(name), fs::Permissions::from_mode(0o700)).unwrap();
        }
        Self { scratch }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    pub fn command(&self, store: &str, options: &[&str], script: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_surgetank"));
        command.arg("run").arg("--over").arg(self.path("over"));
        command.arg("--state").arg(self.path("state")).args(["--store", store]);
        command.args(["--tier", &format!("fast={}:1GiB", self.path("fast").display())]).args(options);
        command.args(["--", "sh", "-euc", script]).current_dir(self.path("over"));
        command.env(MARK, self.scratch.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn processes(&self) -> Vec<String> {
        let mark = format!("{MARK}={}", self.scratch.path().display());
        let is_ours = |entry: &fs::DirEntry| {
            let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes())
        };
        let ours = fs::read_dir("/proc").unwrap().flatten().filter(is_ours);
        ours.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    }

    /// Ends the remaining processes of a failed test, which would serve for hours, and removes their agents' shared
    /// memory.
    fn end_all(&self) {
        const TIMEOUT: Duration = Duration::from_secs(10);
        let begun = Instant::now();
        loop {
            let left = self.processes();
            if left.is_empty() || begun.elapsed() > TIMEOUT {
                break;
            }
            drop(Command::new("kill").arg("-9").args(left).stderr(Stdio::null()).status());
            std::thread::sleep(Duration::from_millis(20));
        }
        let mut doctor = Command::new(env!("CARGO_BIN_EXE_surgetank"));
        drop(doctor.args(["doctor", "--clean"]).current_dir(self.path("over")).output());
    }

    /// Waits for the end of the last agent. An agent that is killed after it reports all files as durable has a
    /// successor. The successor cleans up while the command's caller continues.
    #[track_caller]
    pub fn await_no_agent(&self) {
        let begun = Instant::now();
        while !self.processes().is_empty() {
            assert!(begun.elapsed() < LIMIT, "an agent is left");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Whether an agent has a record of an upload that it has begun.
    pub fn has_uploads(&self) -> bool {
        let mut places = fs::read_dir(self.path("state")).unwrap().flatten();
        places.any(|place| fs::read_dir(place.path().join("uploads")).is_ok_and(|mut kept| kept.next().is_some()))
    }

    /// `false`: the last agent is dead already, and no other has begun.
    pub fn kill_agent(&self) -> bool {
        let mut killed = false;
        let places = fs::read_dir(self.path("state")).unwrap().flatten();
        for place in places {
            let Ok(text) = fs::read_to_string(place.path().join("agent.json")) else { continue };
            let number: String = text
                .split("\"pid\":")
                .nth(1)
                .unwrap()
                .chars()
                .skip_while(|c| !c.is_ascii_digit())
                .take_while(char::is_ascii_digit)
                .collect();
            killed |= Command::new("kill").args(["-9", &number]).stderr(Stdio::null()).status().unwrap().success();
        }
        killed
    }
}

/// A failed test prints the agents' logs and the running processes, because its own message is seldom enough.
impl Drop for Node {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        for place in fs::read_dir(self.path("state")).into_iter().flatten().flatten() {
            let log = fs::read(place.path().join("agent.log")).unwrap_or_default();
            eprintln!("{}:\n{}", place.path().display(), String::from_utf8_lossy(&log));
        }
        let running = Command::new("ps").args(["-eo", "pid,ppid,stat,wchan:24,etimes,args"]).output();
        eprintln!("{}", running.map(|seen| String::from_utf8_lossy(&seen.stdout).into_owned()).unwrap_or_default());
        self.end_all();
    }
}

#[track_caller]
pub fn stdout_of(output: &Output) -> String {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
    out.into_owned()
}

pub fn ends(mut child: Child) -> Output {
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        assert!(begun.elapsed() < LIMIT, "the run does not end");
        std::thread::sleep(Duration::from_millis(20));
    }
    child.wait_with_output().unwrap()
}
