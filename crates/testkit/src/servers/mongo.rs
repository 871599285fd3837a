//! A real server with GridFS for tests: FerretDB (built by `scripts/setup test`), which speaks MongoDB's protocol and stores
//! its data in SQLite, on a temporary directory and a free port of this machine; and MongoDB's own client.
//!
//! The danger that it avoids: a server that outlives its test. The kernel kills it when the thread that started it ends.
//! Therefore several threads must not share this value.

use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// The user of a guarded server.
pub const USER: &str = "ann";
/// The password of [`USER`], with characters that a URL must encode.
pub const PASSWORD: &str = "not-so-secret, =0123";

#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    Open,
    /// A client must authenticate.
    Guarded,
    Tls,
}

/// A FerretDB server.
pub struct MongoServer {
    program: PathBuf,
    child: Option<Child>,
    directory: TempDir,
    port: u16,
    how: How,
}

impl MongoServer {
    /// Starts it. `None` if it is not installed (except under CI).
    pub fn start() -> Option<Self> {
        Self::start_as(How::Open)
    }

    /// Starts it for `USER` with `PASSWORD` only.
    pub fn start_guarded() -> Option<Self> {
        Self::start_as(How::Guarded)
    }

    /// Starts it for TLS only, with a certificate from its own authority ([`Self::authority`]).
    pub fn start_tls() -> Option<Self> {
        Self::start_as(How::Tls)
    }

    fn start_as(how: How) -> Option<Self> {
        let program = program()?;
        let directory = TempDir::new().unwrap();
        std::fs::create_dir(directory.path().join("data")).unwrap();
        if how == How::Tls {
            super::certificate::certify(directory.path());
        }
        let mut server = Self { program, child: None, directory, port: 0, how };
        // Another process may take the port before the server does.
        for _ in 0..5 {
            server.port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            server.child = server.spawn();
            if server.child.is_some() {
                return Some(server);
            }
        }
        panic!("ferretdb does not start: {}", server.log());
    }

    /// URL of a store: `mongodb://127.0.0.1:PORT/db?bucket=b&prefix=PREFIX`.
    pub fn url(&self, prefix: &str) -> String {
        let prefix = if prefix.is_empty() { String::new() } else { format!("&prefix={prefix}") };
        format!("{}{prefix}", self.bucket_url("b"))
    }

    /// URL of a store in its own bucket. (FerretDB scans all chunks of a bucket, so fewer of them are faster.)
    pub fn bucket_url(&self, bucket: &str) -> String {
        format!("mongodb://127.0.0.1:{}/db?bucket={bucket}", self.port)
    }

    /// The port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Path of the authority's certificate, in PEM.
    pub fn authority(&self) -> PathBuf {
        self.directory.path().join("authority.pem")
    }

    /// Runs MongoDB's own client on the same bucket (see `client.py`) and returns its output.
    #[track_caller]
    pub fn client(&self, words: &[&str]) -> String {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let python = here.join("../../.cache/venv/bin/python");
        let script = here.join("src/servers/mongo/client.py");
        let url = format!("mongodb://127.0.0.1:{}/db", self.port);
        let output = Command::new(python).arg(script).args([&url, "b"]).args(words).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
    }

    /// Stores a file by MongoDB's own client.
    pub fn client_put(&self, name: &str, bytes: &[u8]) {
        let file = self.directory.path().join("put");
        std::fs::write(&file, bytes).unwrap();
        self.client(&["put", name, file.to_str().unwrap()]);
    }

    /// Reads a file by MongoDB's own client.
    pub fn client_get(&self, name: &str) -> Vec<u8> {
        let file = self.directory.path().join("got");
        self.client(&["get", name, file.to_str().unwrap()]);
        std::fs::read(file).unwrap()
    }

    /// Stops the server's process, or lets it continue.
    pub fn sleep(&self, asleep: bool) {
        let signal = if asleep { "-STOP" } else { "-CONT" };
        let pid = self.child.as_ref().unwrap().id().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }

    /// Kills the server.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// Starts the server again with the same address and data.
    pub fn restart(&mut self) {
        self.kill();
        self.child = self.spawn();
        assert!(self.child.is_some(), "ferretdb does not come back: {}", self.log());
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    /// Starts the server; `None` if it ends instead.
    fn spawn(&self) -> Option<Child> {
        let directory = self.directory.path();
        let file = |name: &str| directory.join(name).display().to_string();
        let address = format!("127.0.0.1:{}", self.port);
        let (plain, tls) = if self.how == How::Tls { ("", address.as_str()) } else { (address.as_str(), "") };
        let log = std::fs::File::create(directory.join("log")).unwrap();
        let mut command = Command::new("setpriv");
        // setpriv: the process ends with the thread that started it.
        command.args(["--pdeathsig", "KILL", "--"]).arg(&self.program).args(["--handler", "sqlite"]);
        command.args(["--sqlite-url", &format!("file:{}/", file("data")), "--state-dir", "-", "--debug-addr", "-"]);
        command.args(["--telemetry", "disable", "--log-level", "warn", "--listen-addr", plain, "--listen-tls", tls]);
        match self.how {
            How::Open => {}
            How::Guarded => {
                command.args(["--test-enable-new-auth", "--setup-database", "db", "--setup-username", USER]);
                command.env("FERRETDB_SETUP_PASSWORD", PASSWORD);
            }
            How::Tls => {
                let (certificate, key) = (file("server.pem"), file("server.key"));
                command.args(["--listen-tls-cert-file", &certificate, "--listen-tls-key-file", &key]);
            }
        }
        let (err, out) = (log.try_clone().unwrap(), log);
        let mut child = command.stdin(Stdio::null()).stdout(out).stderr(err).spawn().unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        while child.try_wait().unwrap().is_none() && Instant::now() < until {
            if TcpStream::connect(("127.0.0.1", self.port)).is_ok() {
                return Some(child);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = child.kill();
        let _ = child.wait();
        None
    }
}

impl Drop for MongoServer {
    fn drop(&mut self) {
        self.kill();
    }
}

fn program() -> Option<PathBuf> {
    let tools = std::env::var_os("SURGETANK_TOOLS").map(PathBuf::from).or_else(|| {
        let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        let cache = cache.or_else(|| Some(Path::new(&std::env::var_os("HOME")?).join(".cache")))?;
        Some(cache.join("surgetank/tools"))
    });
    let program = tools.map(|tools| tools.join("bin/ferretdb")).filter(|program| program.exists());
    if program.is_none() {
        assert!(std::env::var_os("CI").is_none(), "ferretdb is missing: scripts/setup test");
        eprintln!("skipped: ferretdb is missing (scripts/setup test)");
    }
    program
}
