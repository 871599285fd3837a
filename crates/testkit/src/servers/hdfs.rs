//! A real HDFS for tests: Hadoop's namenode and datanode (fetched by `scripts/setup test`) on a temporary directory and free
//! ports of this machine.
//!
//! The danger that it avoids: servers that outlive their test. The kernel kills them when the thread that started them ends.
//! Therefore several threads must not share this value.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// Java needs this long beside other tests.
const LIMIT: Duration = Duration::from_secs(240);

/// An HDFS with one datanode.
pub struct HdfsServer {
    child: Option<Child>,
    directory: TempDir,
    /// Ports of the namenode: for HTTP, and for the datanode.
    ports: (u16, u16),
    options: Vec<String>,
}

impl HdfsServer {
    /// Starts it. `None` if it is not installed (except under CI).
    pub fn start() -> Option<Self> {
        Self::start_with(&[])
    }

    /// Starts it with further settings, each `NAME=VALUE`.
    pub fn start_with(options: &[&str]) -> Option<Self> {
        if !is_installed() {
            return None;
        }
        let directory = TempDir::new().unwrap();
        let options = options.iter().map(|option| (*option).to_owned()).collect();
        let mut server = Self { child: None, directory, ports: (0, 0), options };
        // Another process may take a port before the server does.
        for _ in 0..3 {
            let free = || TcpListener::bind("127.0.0.1:0").unwrap();
            let (web, rpc) = (free(), free());
            server.ports = (web.local_addr().unwrap().port(), rpc.local_addr().unwrap().port());
            drop((web, rpc));
            server.child = server.spawn();
            if server.child.is_some() {
                return Some(server);
            }
        }
        panic!("HDFS does not start: {}", server.log());
    }

    /// URL of a path for a user: `webhdfs://USER@127.0.0.1:PORT/PATH`.
    pub fn url(&self, user: &str, path: &str) -> String {
        format!("webhdfs://{user}@127.0.0.1:{}/{path}", self.ports.0)
    }

    /// Sends `?op=…` as the superuser. Returns the status and the body of the answer.
    pub fn ask(&self, method: &str, path: &str, query: &str) -> (u16, Vec<u8>) {
        let user = superuser();
        request(self.ports.0, method, &format!("/webhdfs/v1/{path}?user.name={user}&{query}"), b"").unwrap_or_default()
    }

    #[track_caller]
    /// Like [`Self::ask`], and returns the body. Panics if the status is not a success.
    pub fn done(&self, method: &str, path: &str, query: &str) -> String {
        let (status, body) = self.ask(method, path, query);
        let body = String::from_utf8(body).unwrap();
        assert!((200..300).contains(&status), "{method} {path} {query}: {status} {body}");
        body
    }

    /// The names in a directory, those of temporaries too.
    #[track_caller]
    pub fn names(&self, path: &str) -> Vec<String> {
        let listing = self.done("GET", path, "op=LISTSTATUS");
        listing.split("\"pathSuffix\":\"").skip(1).map(|rest| rest.split('"').next().unwrap().to_owned()).collect()
    }

    #[track_caller]
    /// The content of a file.
    pub fn read(&self, path: &str) -> Vec<u8> {
        self.through("GET", path, "op=OPEN", b"")
    }

    /// Writes a file in one request, as another client.
    #[track_caller]
    pub fn write(&self, path: &str, bytes: &[u8]) {
        self.through("PUT", path, "op=CREATE&overwrite=true", bytes);
    }

    #[track_caller]
    /// Appends to a file, as another client.
    pub fn append(&self, path: &str, bytes: &[u8]) {
        self.through("POST", path, "op=APPEND", bytes);
    }

    #[track_caller]
    fn through(&self, method: &str, path: &str, query: &str, bytes: &[u8]) -> Vec<u8> {
        let answer = self.done(method, path, &format!("{query}&noredirect=true"));
        let to = answer.split("\"Location\":\"").nth(1).unwrap().split('"').next().unwrap();
        let (authority, rest) = to.strip_prefix("http://").unwrap().split_once('/').unwrap();
        let port = authority.rsplit_once(':').unwrap().1.parse().unwrap();
        // In a header the name would be encoded; in JSON it is unchanged.
        let encoded = |byte: u8| if byte.is_ascii() { char::from(byte).into() } else { format!("%{byte:02X}") };
        let target: String = format!("/{rest}").bytes().map(encoded).collect();
        let (status, body) = request(port, method, &target, bytes).unwrap();
        assert!((200..300).contains(&status), "{method} {path}: {status} {}", String::from_utf8_lossy(&body));
        body
    }

    /// Kills the servers, as a power failure would, except that the kernel keeps its page cache.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
            // The kernel kills the servers a moment later.
            let ended = || TcpListener::bind(("127.0.0.1", self.ports.0)).is_ok();
            let until = Instant::now() + LIMIT;
            while !ended() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }

    /// Stops the datanode while `meanwhile` runs. Afterwards it carries out its pending requests, even if the clients have
    /// ended.
    pub fn hold_the_datanode<R>(&self, meanwhile: impl FnOnce() -> R) -> R {
        let send = |signal: &str| {
            let about = format!("{}.*server.datanode.DataNode", self.directory.path().display());
            let sent = Command::new("pkill").args([signal, "-f", &about]).status().unwrap();
            assert!(sent.success(), "no datanode to send {signal} to");
        };
        send("-STOP");
        let result = meanwhile();
        send("-CONT");
        result
    }

    /// Starts the servers again with the same address and data.
    pub fn restart(&mut self) {
        self.kill();
        self.child = self.spawn();
        assert!(self.child.is_some(), "HDFS does not come back: {}", self.log());
    }

    fn log(&self) -> String {
        let text = |name| std::fs::read_to_string(self.directory.path().join(name)).unwrap_or_default();
        let all = [text("format.log"), text("namenode.log"), text("datanode.log")].concat();
        all.chars().rev().take(4000).collect::<Vec<_>>().into_iter().rev().collect()
    }

    /// Starts the servers; `None` if they end instead.
    fn spawn(&self) -> Option<Child> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/hdfs/serve");
        // setpriv: the process ends with the thread that started it.
        let mut child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--"])
            .arg(script)
            .arg(self.directory.path())
            .args([self.ports.0.to_string(), self.ports.1.to_string()])
            // Small blocks, so that tests can have files of several blocks.
            .args(["dfs.blocksize=8388608", "dfs.namenode.edits.noeditlogchannelflush=true"])
            .args(&self.options)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let until = Instant::now() + LIMIT;
        while child.try_wait().unwrap().is_none() && Instant::now() < until {
            // The namenode refuses changes until a datanode is registered.
            if self.ask("PUT", "", "op=SETPERMISSION&permission=777").0 == 200 {
                return Some(child);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let _ = child.kill();
        let _ = child.wait();
        None
    }
}

impl Drop for HdfsServer {
    fn drop(&mut self) {
        self.kill();
        // The servers write into the directory until they end, and it is removed next.
        let until = Instant::now() + LIMIT;
        let left = || Command::new("pkill").args(["-KILL", "-f", "--"]).arg(self.directory.path()).status();
        while left().is_ok_and(|found| found.success()) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// The superuser of the namenode: the user that starts it.
pub fn superuser() -> String {
    let output = Command::new("id").arg("-un").output().unwrap().stdout;
    String::from_utf8(output).unwrap().trim().to_owned()
}

fn request(port: u16, method: &str, target: &str, body: &[u8]) -> std::io::Result<(u16, Vec<u8>)> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    let length = body.len();
    let head = format!(
        "{method} {target} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body)?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    loop {
        let end = answer.windows(4).position(|window| window == b"\r\n\r\n").ok_or(std::io::ErrorKind::InvalidData)?;
        let head = String::from_utf8_lossy(&answer[..end]).to_ascii_lowercase();
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
        let body = answer.split_off(end + 4);
        if status != 100 {
            return Ok((status, if head.contains("transfer-encoding: chunked") { unchunked(&body) } else { body }));
        }
        answer = body;
    }
}

fn unchunked(mut body: &[u8]) -> Vec<u8> {
    let mut whole = Vec::new();
    while let Some(end) = body.windows(2).position(|window| window == b"\r\n") {
        let length = usize::from_str_radix(String::from_utf8_lossy(&body[..end]).trim(), 16).unwrap_or(0);
        if length == 0 {
            break;
        }
        whole.extend_from_slice(&body[end + 2..end + 2 + length]);
        body = &body[end + 4 + length..];
    }
    whole
}

fn is_installed() -> bool {
    let cache = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache/surgetank/tools"));
    let tools = std::env::var_os("SURGETANK_TOOLS").map(PathBuf::from).or_else(cache);
    let installed = tools.is_some_and(|tools| tools.join("hdfs/lib").exists());
    if !installed {
        assert!(std::env::var_os("CI").is_none(), "HDFS is missing: scripts/setup test");
        eprintln!("skipped: HDFS is missing (scripts/setup test)");
    }
    installed
}
