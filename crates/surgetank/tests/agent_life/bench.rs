//! A place for one test: a directory, a state directory, and helpers that run surgetank there as a given user. Cleans
//! up when dropped.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Who {
    Root,
    Ordinary,
}

pub const NOBODY: u32 = 65534;
/// For events that happen at once when the agent works.
const TIMEOUT: Duration = Duration::from_secs(30);

pub struct Bench {
    pub who: Who,
    _dir: tempfile::TempDir,
    base: PathBuf,
}

/// The output of a program and how it ended.
#[derive(Debug)]
pub struct CommandOutput {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Bench {
    pub fn new(who: Who) -> Self {
        let dir = tempfile::Builder::new().prefix("surgetank-agent-life-").tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let base = dir.path().canonicalize().unwrap();
        let bench = Self { who, _dir: dir, base };
        for path in [bench.over(), bench.outside()] {
            fs::create_dir(&path).unwrap();
            bench.give(&path);
        }
        bench.give(&bench.base);
        bench
    }

    /// Gives the path to the user that runs the test's programs.
    pub fn give(&self, path: &Path) {
        if self.who == Who::Ordinary && rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
        }
    }

    pub fn over(&self) -> PathBuf {
        self.base.join("over")
    }
    pub fn outside(&self) -> PathBuf {
        self.base.join("outside")
    }
    pub fn state(&self) -> PathBuf {
        self.base.join("state")
    }

    /// Any program, in the served directory, as the test's user.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.over()).stdin(Stdio::null());
        command.env("SURGETANK_TEST_PROGRAM", "1").env("SURGETANK_STATE", self.state());
        command.env("SURGETANK", std::env::current_exe().unwrap()).env("OUTSIDE", self.outside());
        command.env_remove("SURGETANK_AGENT");
        if self.who == Who::Ordinary && rustix::process::geteuid().is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        command
    }

    pub fn surgetank(&self, arguments: &[&str]) -> Command {
        let mut command = self.command(std::env::current_exe().unwrap());
        command.args(arguments);
        command
    }

    pub fn invoke(&self, arguments: &[&str]) -> CommandOutput {
        output_of(self.surgetank(arguments).output().unwrap())
    }

    /// `run -- sh -c SCRIPT`, with options before.
    pub fn run(&self, options: &[&str], script: &str) -> CommandOutput {
        output_of(self.run_command(options, script).output().unwrap())
    }

    pub fn run_command(&self, options: &[&str], script: &str) -> Command {
        let mut command = self.surgetank(&["run"]);
        command.args(options).args(["--", "sh", "-c", script]);
        command
    }

    /// Starts the command with its streams piped.
    pub fn spawn(&self, mut command: Command) -> Child {
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// All agents of `status --json`.
    pub fn agents(&self) -> Vec<Value> {
        let mut command = self.surgetank(&["status", "--json"]);
        command.current_dir("/");
        let output = output_of(command.output().unwrap());
        assert_eq!(output.code, Some(0), "{output:?}");
        serde_json::from_str::<Vec<Value>>(&output.out).unwrap()
    }

    pub fn the_agent(&self) -> Value {
        let agents = self.agents();
        assert_eq!(agents.len(), 1, "{agents:?}");
        agents.into_iter().next().unwrap()
    }

    pub fn agent_pid(&self) -> i32 {
        i32::try_from(self.the_agent()["pid"].as_i64().unwrap()).unwrap()
    }

    pub fn supervisor_pid(&self) -> i32 {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.agent_pid())).unwrap();
        stat.rsplit_once(')').unwrap().1.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    /// The state directory of the only agent.
    pub fn place(&self) -> PathBuf {
        let entries = fs::read_dir(self.state()).unwrap().map(|entry| entry.unwrap().path());
        let mut places: Vec<_> = entries.filter(|path| path.is_dir()).collect();
        assert_eq!(places.len(), 1, "{places:?}");
        places.remove(0)
    }

    pub fn await_no_agent(&self) {
        until("the agent to end", || self.agents().is_empty());
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        // What a failed test left: commands inside first, then agents.
        let base = self.base.as_os_str().as_encoded_bytes().to_vec();
        for round in 0..3 {
            let left = ours(&base);
            if left.is_empty() {
                break;
            }
            for pid in left {
                kill(pid, libc::SIGKILL);
            }
            std::thread::sleep(Duration::from_millis(50 << round));
        }
        for path in [self.over()] {
            while fs::metadata(&path).is_err_and(|error| error.raw_os_error() == Some(libc::ENOTCONN))
                || fs::metadata(&path).is_ok_and(|meta| meta.dev() != fs::metadata(&self.base).unwrap().dev())
            {
                if surgetank::mount::detach(&path, true).is_err() {
                    break;
                }
            }
        }
    }
}

/// Processes whose environment names this bench's directories.
fn ours(base: &[u8]) -> Vec<i32> {
    let me = i32::try_from(std::process::id()).unwrap();
    let pids = fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid: &i32| *pid != me)
        .filter(|pid| {
            fs::read(format!("/proc/{pid}/environ"))
                .is_ok_and(|environ| environ.windows(base.len()).any(|window| window == base))
        })
        .collect()
}

pub fn output_of(output: Output) -> CommandOutput {
    use std::os::unix::process::ExitStatusExt;
    let code = output.status.code().or_else(|| output.status.signal().map(|signal| -signal));
    CommandOutput {
        code,
        out: String::from_utf8_lossy(&output.stdout).into_owned(),
        err: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// Waits for the end, with a limit: a program that hangs is killed, and its exit code shows it.
pub fn finish(child: Child) -> CommandOutput {
    let child_pid = pid(&child);
    let (ended, end) = std::sync::mpsc::channel::<()>();
    let watch = std::thread::spawn(move || {
        if end.recv_timeout(TIMEOUT) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            kill(child_pid, libc::SIGKILL);
        }
    });
    let output = child.wait_with_output().unwrap();
    drop(ended);
    watch.join().unwrap();
    output_of(output)
}

pub fn kill(pid: i32, signal: i32) {
    // SAFETY: kill takes no pointers; the pid is one that the test started.
    unsafe { libc::kill(pid, signal) };
}

pub fn pid(child: &Child) -> i32 {
    i32::try_from(child.id()).unwrap()
}

pub fn until(what: &str, mut true_now: impl FnMut() -> bool) {
    let end = Instant::now() + TIMEOUT;
    while !true_now() {
        assert!(Instant::now() < end, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

pub fn until_exists(path: &Path) {
    until(&path.display().to_string(), || path.exists());
}
