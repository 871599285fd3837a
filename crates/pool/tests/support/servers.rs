//! Key-value servers for tests, each on ports and in a directory of its own. They end with their value.

#![allow(dead_code)] // each test uses some

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Is the program there? With `CI=true` it has to be.
pub fn is_installed(program: &str) -> bool {
    let found = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    assert!(found || std::env::var_os("CI").is_none_or(|ci| ci != "true"), "{program} is missing");
    if !found {
        eprintln!("skipped: {program} is missing");
    }
    found
}

pub fn await_port(port: u16) {
    let until = Instant::now() + Duration::from_secs(30);
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(Instant::now() < until, "nothing listens at {port}");
        thread::sleep(Duration::from_millis(10));
    }
}

pub struct Process(Child);

impl Process {
    pub fn start(command: &mut Command) -> Self {
        Self(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }

    pub fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A Redis server.
pub struct Redis {
    pub directory: TempDir,
    pub port: u16,
    options: Vec<String>,
    process: Option<Process>,
}

impl Redis {
    pub fn start(options: &[&str]) -> Self {
        let options = options.iter().map(|option| (*option).to_owned()).collect();
        let mut server = Self { directory: tempfile::tempdir().unwrap(), port: free_port(), options, process: None };
        server.again();
        server
    }

    /// Each write is in its log before it is answered.
    pub fn lasting() -> Self {
        Self::start(&["--appendonly", "yes", "--appendfsync", "always"])
    }

    pub fn kill(&mut self) {
        self.process = None;
    }

    pub fn again(&mut self) {
        let mut command = Command::new("redis-server");
        command.args(["--bind", "127.0.0.1", "--save", "", "--daemonize", "no", "--port", &self.port.to_string()]);
        command.arg("--dir").arg(self.directory.path()).args(&self.options);
        self.process = Some(Process::start(&mut command));
        await_port(self.port);
        let until = Instant::now() + Duration::from_secs(30);
        while self.command("PING").is_none_or(|answer| answer.contains("LOADING")) {
            assert!(Instant::now() < until, "the server does not answer");
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// What the server answers to an inline command.
    pub fn command(&self, words: &str) -> Option<String> {
        command(self.port, words)
    }
}

pub fn command(port: u16, words: &str) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_millis(300))).ok()?;
    stream.write_all(format!("{words}\r\n").as_bytes()).ok()?;
    let mut answer = vec![0; 65536];
    let read = stream.read(&mut answer).ok()?;
    (read > 0).then(|| String::from_utf8_lossy(&answer[..read]).into_owned())
}

/// Three etcd servers.
pub struct Etcd {
    pub directory: TempDir,
    ports: Vec<(u16, u16)>,
    processes: Vec<Option<Process>>,
}

impl Etcd {
    pub fn start(servers: usize) -> Self {
        let ports = (0..servers).map(|_| (free_port(), free_port())).collect();
        let processes = (0..servers).map(|_| None).collect();
        let mut cluster = Self { directory: tempfile::tempdir().unwrap(), ports, processes };
        (0..servers).for_each(|number| cluster.start_one(number));
        cluster.await_leader();
        cluster
    }

    pub fn start_one(&mut self, number: usize) {
        let (client, peer) = self.ports[number];
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        let all = self.ports.iter().enumerate().map(|(number, (_, peer))| format!("s{number}={}", url(*peer)));
        let all = all.collect::<Vec<_>>().join(",");
        let mut command = Command::new("etcd");
        command.arg("--data-dir").arg(self.directory.path().join(number.to_string()));
        command.args(["--name", &format!("s{number}"), "--initial-cluster", &all, "--unsafe-no-fsync"]);
        command.args(["--listen-client-urls", &url(client), "--advertise-client-urls", &url(client)]);
        command.args(["--listen-peer-urls", &url(peer), "--initial-advertise-peer-urls", &url(peer)]);
        if cfg!(target_arch = "aarch64") {
            command.env("ETCD_UNSUPPORTED_ARCH", "arm64");
        }
        self.processes[number] = Some(Process::start(&mut command));
        await_port(client);
    }

    pub fn kill_one(&mut self, number: usize) {
        self.processes[number] = None;
    }

    pub fn url(&self) -> String {
        let hosts: Vec<String> = self.ports.iter().map(|(client, _)| format!("127.0.0.1:{client}")).collect();
        format!("etcd://{}", hosts.join(","))
    }

    /// The number of the leader.
    pub fn leader(&self) -> Option<usize> {
        (0..self.ports.len()).find(|number| {
            let answer = self.status(*number).unwrap_or_default();
            let field = |name: &str| {
                let at = answer.find(&format!("\"{name}\":\""))? + name.len() + 4;
                answer[at..].split('"').next().map(str::to_owned)
            };
            field("leader").is_some_and(|leader| leader != "0" && field("member_id") == Some(leader))
        })
    }

    fn status(&self, number: usize) -> Option<String> {
        let port = self.ports[number].0;
        let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(1))).ok()?;
        let head =
            "POST /v3/maintenance/status HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}";
        stream.write_all(head.as_bytes()).ok()?;
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        Some(answer)
    }

    pub fn await_leader(&self) {
        let until = Instant::now() + Duration::from_secs(60);
        while self.leader().is_none() {
            assert!(Instant::now() < until, "etcd elects no leader");
            thread::sleep(Duration::from_millis(50));
        }
    }
}

/// A connection to a server that can be cut.
pub struct Proxy {
    pub port: u16,
    is_cut: Arc<AtomicBool>,
}

impl Proxy {
    pub fn to(server: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = Self { port: listener.local_addr().unwrap().port(), is_cut: Arc::default() };
        let is_cut = proxy.is_cut.clone();
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(server) = TcpStream::connect(("127.0.0.1", server)) else { continue };
                for (from, to) in [(client.try_clone().unwrap(), server.try_clone().unwrap()), (server, client)] {
                    let is_cut = is_cut.clone();
                    thread::spawn(move || forward(from, to, &is_cut));
                }
            }
        });
        proxy
    }

    /// What is sent is lost from now on, or not any more.
    pub fn cut(&self, cut: bool) {
        self.is_cut.store(cut, Ordering::Release);
    }
}

fn forward(mut from: TcpStream, mut to: TcpStream, is_cut: &AtomicBool) {
    let mut bytes = vec![0; 65536];
    let mut lost = false;
    while let Ok(read @ 1..) = from.read(&mut bytes) {
        lost |= is_cut.load(Ordering::Acquire);
        if !lost && to.write_all(&bytes[..read]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

pub fn write(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
}
