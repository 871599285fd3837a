//! A real Redis server for tests: Debian's, on a temporary directory and a free port of this machine.
//!
//! The danger that it avoids: a server that outlives its test. The kernel kills it when the thread that started it ends.
//! Therefore several threads must not share this value.

pub mod cluster;

use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use tempfile::TempDir;

/// Options with which every acknowledged change is on disk.
const SURE: [&str; 6] = ["--appendonly", "yes", "--appendfsync", "always", "--save", ""];

/// A Redis server.
pub struct RedisServer {
    child: Option<Child>,
    directory: TempDir,
    port: u16,
    options: Vec<String>,
}

impl RedisServer {
    /// Starts it. `None` if it is not installed (except under CI).
    pub fn start() -> Option<Self> {
        Self::start_with(&[])
    }

    /// Starts it for TLS only, with a certificate from its own authority ([`Self::authority`]).
    pub fn start_tls() -> Option<Self> {
        Self::start_with(&["--tls"])
    }

    /// Starts it with further options of its command line; the last one of a kind counts.
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
        // Another process may take the port before the server does.
        for _ in 0..5 {
            server.port = free_port();
            server.child = server.spawn();
            if server.child.is_some() {
                return Some(server);
            }
        }
        panic!("redis-server does not start: {}", server.log());
    }

    /// URL of a store in database 0: `redis://127.0.0.1:PORT/0?prefix=PREFIX`.
    pub fn url(&self, prefix: &str) -> String {
        let prefix = if prefix.is_empty() { String::new() } else { format!("?prefix={prefix}") };
        format!("redis://127.0.0.1:{}/0{prefix}", self.port)
    }

    /// The port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Path of the authority's certificate, in PEM.
    pub fn authority(&self) -> PathBuf {
        self.directory.path().join("authority.pem")
    }

    /// Output of `redis-cli` for these words, as text, without the last line's end.
    #[track_caller]
    pub fn cli(&self, words: &[&str]) -> String {
        let mut output = String::from_utf8(self.cli_bytes(words)).unwrap();
        output.truncate(output.trim_end_matches('\n').len());
        output
    }

    #[track_caller]
    /// Output of `redis-cli` for these words, as bytes.
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

    /// Stops the server's process, or lets it continue.
    pub fn sleep(&self, asleep: bool) {
        let signal = if asleep { "-STOP" } else { "-CONT" };
        let pid = self.child.as_ref().unwrap().id().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }

    /// Kills the server, as a power failure would, except that the kernel keeps its page cache.
    pub fn kill(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        // Together with the process that rewrites its log in the background, which would continue to write into the directory.
        let group = Pid::from_child(&child);
        rustix::process::kill_process_group(group, Signal::KILL).unwrap();
        child.wait().unwrap();
        let until = Instant::now() + Duration::from_secs(10);
        while rustix::process::test_kill_process_group(group).is_ok() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Starts the server again with the same address and data.
    pub fn restart(&mut self) {
        self.kill();
        self.child = self.spawn();
        assert!(self.child.is_some(), "redis-server does not come back: {}", self.log());
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    /// Starts the server; `None` if it ends instead.
    fn spawn(&self) -> Option<Child> {
        let directory = self.directory.path();
        let (plain, tls) = if self.has_tls() { (0, self.port) } else { (self.port, 0) };
        let tls = format!("{tls}");
        let file = |name: &str| directory.join(name).display().to_string();
        let (certificate, key, authority) = (file("server.pem"), file("server.key"), file("authority.pem"));
        let certified = ["--tls-port", &tls, "--tls-cert-file", &certificate, "--tls-key-file", &key];
        let authority = ["--tls-ca-cert-file", &authority, "--tls-auth-clients", "no"];
        // setpriv: the process ends with the thread that started it.
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

    /// Whether it answers and has read its data. (It tells an unknown client that it must authenticate, which suffices.)
    fn answers(&self) -> bool {
        let output = self.command().arg("PING").output().unwrap().stdout;
        output.starts_with(b"PONG") || output.starts_with(b"NOAUTH")
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A free port. A cluster's servers also use the port 10,000 above it.
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
