//! A real Redis server for tests: Debian's, on a temporary directory and a free port of this machine.
//!
//! The danger: a server that outlives its test. The kernel kills it with the thread that started it, however that ends; so it
//! must not be kept in anything that several threads share.

pub mod cluster;

use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use tempfile::TempDir;

/// What it acknowledges is on its disk.
const SURE: [&str; 6] = ["--appendonly", "yes", "--appendfsync", "always", "--save", ""];

pub struct RedisServer {
    child: Option<Child>,
    directory: TempDir,
    port: u16,
    options: Vec<String>,
}

impl RedisServer {
    /// `None`: it is not installed, and this is not CI.
    pub fn start() -> Option<Self> {
        Self::start_with(&[])
    }

    /// With a certificate of an authority of its own, `authority()`, and for TLS only.
    pub fn start_tls() -> Option<Self> {
        Self::start_with(&["--tls"])
    }

    /// With other options of its command line, the last of a kind counts.
    pub fn start_with(options: &[&str]) -> Option<Self> {
        if !is_installed() {
            return None;
        }
        let directory = TempDir::new().unwrap();
        if options.contains(&"--tls") {
            super::certificate::certify(directory.path());
        }
        let options = SURE.iter().chain(options).map(|option| (*option).to_owned()).collect();
        let mut server = Self { child: None, directory, port: 0, options };
        // Somebody else may take the port before the server does.
        for _ in 0..5 {
            server.port = free_port();
            server.child = server.spawn();
            if server.child.is_some() {
                return Some(server);
            }
        }
        panic!("redis-server does not start: {}", server.log());
    }

    /// `redis://127.0.0.1:PORT/0?prefix=PREFIX`
    pub fn url(&self, prefix: &str) -> String {
        let prefix = if prefix.is_empty() { String::new() } else { format!("?prefix={prefix}") };
        format!("redis://127.0.0.1:{}/0{prefix}", self.port)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// PEM.
    pub fn authority(&self) -> PathBuf {
        self.directory.path().join("authority.pem")
    }

    /// What `redis-cli` prints of the answer, but for the end of its last line.
    #[track_caller]
    pub fn cli(&self, words: &[&str]) -> String {
        let mut told = String::from_utf8(self.cli_bytes(words)).unwrap();
        told.truncate(told.trim_end_matches('\n').len());
        told
    }

    #[track_caller]
    pub fn cli_bytes(&self, words: &[&str]) -> Vec<u8> {
        let output = self.command().args(words).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    }

    fn command(&self) -> Command {
        let mut command = Command::new("redis-cli");
        command.args(["-p", &self.port.to_string()]);
        if self.has_tls() {
            command.args(["-h", "localhost", "--tls", "--cacert"]).arg(self.authority());
        }
        command
    }

    fn has_tls(&self) -> bool {
        self.options.iter().any(|option| option == "--tls")
    }

    /// It hears nothing and says nothing.
    pub fn sleep(&self, asleep: bool) {
        let signal = if asleep { "-STOP" } else { "-CONT" };
        let pid = self.child.as_ref().unwrap().id().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }

    /// As if the machine lost its power, but for what the kernel keeps.
    pub fn kill(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        // With the process that rewrites its log in the background, which would go on writing into the directory.
        let group = Pid::from_child(&child);
        rustix::process::kill_process_group(group, Signal::KILL).unwrap();
        child.wait().unwrap();
        let until = Instant::now() + Duration::from_secs(10);
        while rustix::process::test_kill_process_group(group).is_ok() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// At the same address, with what it had.
    pub fn restart(&mut self) {
        self.kill();
        self.child = self.spawn();
        assert!(self.child.is_some(), "redis-server does not come back: {}", self.log());
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    /// `None`: it ended instead.
    fn spawn(&self) -> Option<Child> {
        let directory = self.directory.path();
        let (plain, tls) = if self.has_tls() { (0, self.port) } else { (self.port, 0) };
        let tls = format!("{tls}");
        let file = |name: &str| directory.join(name).display().to_string();
        let (certificate, key, authority) = (file("server.pem"), file("server.key"), file("authority.pem"));
        let certified = ["--tls-port", &tls, "--tls-cert-file", &certificate, "--tls-key-file", &key];
        let authority = ["--tls-ca-cert-file", &authority, "--tls-auth-clients", "no"];
        // setpriv: with the thread that started it, it goes.
        let mut child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--", "redis-server", "--bind", "127.0.0.1", "--daemonize", "no"])
            .args(["--port", &plain.to_string(), "--dir", &directory.display().to_string(), "--logfile", &file("log")])
            .args(certified.iter().chain(&authority).filter(|_| self.has_tls()))
            .args(self.options.iter().filter(|option| *option != "--tls"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        while child.try_wait().unwrap().is_none() && Instant::now() < until {
            if self.answers() {
                return Some(child);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = child.kill();
        let _ = child.wait();
        None
    }

    /// And has read its data. (Whom it does not know it tells so.)
    fn answers(&self) -> bool {
        let said = self.command().arg("PING").output().unwrap().stdout;
        said.starts_with(b"PONG") || said.starts_with(b"NOAUTH")
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A cluster's servers speak with each other on the one 10,000 above.
fn free_port() -> u16 {
    let any = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    std::iter::repeat_with(any).find(|port| *port < 55_000).unwrap()
}

fn is_installed() -> bool {
    let is_there = |name: &str| Path::new("/usr/bin").join(name).exists();
    let installed = is_there("redis-server") && is_there("redis-cli");
    if !installed {
        assert!(std::env::var_os("CI").is_none(), "redis-server is missing: scripts/setup test");
        eprintln!("skipped: redis-server is missing (scripts/setup test)");
    }
    installed
}
