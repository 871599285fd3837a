//! A real S3 server for tests: versitygw (built by `scripts/setup test`) on a temporary directory and a free port of this
//! machine.
//!
//! The danger that it avoids: a server that outlives its test. The kernel kills it when the thread that started it ends.
//! Therefore several threads must not share this value.

pub mod link;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::certificate::certify;
use tempfile::TempDir;

/// The access key of the server's only account.
pub const ACCESS: &str = "surgetank-test";
/// The secret of [`ACCESS`].
pub const SECRET: &str = "not-so-secret-0123456789";
/// The bucket that exists at the start.
pub const BUCKET: &str = "bucket";

/// A versitygw server.
pub struct S3Server {
    program: PathBuf,
    child: Option<Child>,
    directory: TempDir,
    port: u16,
    tls: bool,
}

impl S3Server {
    /// Starts it. `None` if it is not installed (except under CI).
    pub fn start() -> Option<Self> {
        Self::start_with(false)
    }

    /// Starts it for TLS, with a certificate from its own authority ([`Self::authority`]).
    pub fn start_tls() -> Option<Self> {
        Self::start_with(true)
    }

    fn start_with(tls: bool) -> Option<Self> {
        let program = program()?;
        let directory = TempDir::new().unwrap();
        std::fs::create_dir_all(directory.path().join("data").join(BUCKET)).unwrap();
        let file = format!("[default]\naws_access_key_id = {ACCESS}\naws_secret_access_key = {SECRET}\n");
        std::fs::write(directory.path().join("credentials"), file).unwrap();
        if tls {
            certify(directory.path());
        }
        // Another process may take the port before the server does.
        for _ in 0..5 {
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let child = spawn(&program, directory.path(), port, tls);
            if let Some(child) = answers(child, port, tls) {
                return Some(Self { program, child: Some(child), directory, port, tls });
            }
        }
        panic!("versitygw does not start: {}", log_of(directory.path()));
    }

    /// URL of the server.
    pub fn endpoint(&self) -> String {
        if self.tls { format!("https://localhost:{}", self.port) } else { format!("http://127.0.0.1:{}", self.port) }
    }

    /// A link to the server with this rate in each direction, in bytes per second; `None`: no limit.
    pub fn link(&self, bytes_per_second: Option<u64>) -> link::Link {
        link::Link::to(self.port, bytes_per_second)
    }

    /// The files in which the server stores the parts of unfinished uploads.
    pub fn parts(&self) -> Vec<PathBuf> {
        fn below(dir: &Path) -> Vec<PathBuf> {
            let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
            let whole = |path: PathBuf| if path.is_dir() { below(&path) } else { vec![path] };
            entries.flat_map(|entry| whole(entry.path())).collect()
        }
        below(&self.files().join(".sgwtmp"))
    }

    /// URL of a store: `s3://bucket/PREFIX?endpoint=…`.
    pub fn url(&self, prefix: &str) -> String {
        format!("s3://{BUCKET}/{prefix}?endpoint={}", self.endpoint())
    }

    /// Path of a credentials file with the access key and the secret.
    pub fn credentials_file(&self) -> PathBuf {
        self.directory.path().join("credentials")
    }

    /// Path of the authority's certificate, in PEM.
    pub fn authority(&self) -> PathBuf {
        self.directory.path().join("authority.pem")
    }

    /// Environment variables with the access key and the secret, for child processes.
    pub fn environment(&self) -> [(&'static str, &'static str); 2] {
        [("AWS_ACCESS_KEY_ID", ACCESS), ("AWS_SECRET_ACCESS_KEY", SECRET)]
    }

    /// The directory in which the server stores the bucket's objects, as files.
    pub fn files(&self) -> PathBuf {
        self.directory.path().join("data").join(BUCKET)
    }

    /// Kills the server, as a power failure would, except that the kernel keeps its page cache.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// Starts the server again with the same address and data.
    pub fn restart(&mut self) {
        self.kill();
        let child = spawn(&self.program, self.directory.path(), self.port, self.tls);
        self.child = answers(child, self.port, self.tls);
        assert!(self.child.is_some(), "versitygw does not come back: {}", log_of(self.directory.path()));
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        self.kill();
    }
}

fn program() -> Option<PathBuf> {
    let cache = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache/surgetank/tools"));
    let tools = std::env::var_os("SURGETANK_TOOLS").map(PathBuf::from).or_else(cache);
    let found = tools.map(|tools| tools.join("bin/versitygw")).filter(|path| path.exists());
    if found.is_none() {
        assert!(std::env::var_os("CI").is_none(), "versitygw is missing: scripts/setup test");
        eprintln!("skipped: versitygw is missing (scripts/setup test)");
    }
    found
}

fn spawn(program: &Path, directory: &Path, port: u16, tls: bool) -> Child {
    let log = std::fs::OpenOptions::new().create(true).append(true).open(directory.join("log")).unwrap();
    let (certificate, key) = (directory.join("server.pem"), directory.join("server.key"));
    let certified = [Path::new("--cert"), &certificate, Path::new("--key"), &key];
    // setpriv: the process ends with the thread that started it.
    Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "--"])
        .arg(program)
        .args(["--keep-alive", "--quiet", "--port", &format!("127.0.0.1:{port}")])
        .args(certified.iter().filter(|_| tls))
        .arg("posix")
        .arg(directory.join("data"))
        .env("ROOT_ACCESS_KEY", ACCESS)
        .env("ROOT_SECRET_KEY", SECRET)
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .spawn()
        .unwrap()
}

/// Waits until the server answers; `None` if it ends instead.
fn answers(mut child: Child, port: u16, tls: bool) -> Option<Child> {
    let until = Instant::now() + Duration::from_secs(60);
    while child.try_wait().unwrap().is_none() {
        if speaks(port, tls) {
            return Some(child);
        }
        if Instant::now() > until {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let _ = child.kill();
    let _ = child.wait();
    None
}

fn speaks(port: u16, tls: bool) -> bool {
    let talk = || {
        let mut stream = TcpStream::connect(("127.0.0.1", port))?;
        if tls {
            return Ok(true);
        }
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        stream.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
        let mut first = [0; 5];
        stream.read_exact(&mut first)?;
        std::io::Result::Ok(&first == b"HTTP/")
    };
    talk().unwrap_or(false)
}

fn log_of(directory: &Path) -> String {
    std::fs::read_to_string(directory.join("log")).unwrap_or_default()
}
