//! A real MooseFS for tests: Debian's master, chunkserver and client, on a temporary directory and in a separate network
//! namespace.
//!
//! The danger that it avoids: servers that outlive their test, and a mount whose servers ended, on which every access hangs.
//! The kernel kills them with the thread that started them; the mount is removed before the directory.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(60);

/// A MooseFS with one chunkserver and a mount.
pub struct MooseFs {
    child: Child,
    directory: TempDir,
}

impl MooseFs {
    /// Starts it. `None` if it is not installed or the user is not root (except under CI).
    pub fn start() -> Option<Self> {
        if !can_be() {
            return None;
        }
        let directory = TempDir::new().unwrap();
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/moosefs/serve");
        // setpriv: the process ends with the thread that started it.
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--", "unshare", "--net"])
            .arg(script)
            .arg(directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let server = Self { child, directory };
        let begun = Instant::now();
        while !server.has_room() {
            assert!(begun.elapsed() < LIMIT, "MooseFS does not start: {}", server.log());
            std::thread::sleep(Duration::from_millis(50));
        }
        Some(server)
    }

    /// The directory at which it is mounted.
    pub fn root(&self) -> PathBuf {
        self.directory.path().join("mnt")
    }

    /// Whether the chunkserver's disk is registered with the master.
    fn has_room(&self) -> bool {
        let mounted = std::fs::read_to_string("/proc/self/mounts").unwrap();
        mounted.contains(&format!(" {} ", self.root().display()))
            && rustix::fs::statvfs(self.root()).is_ok_and(|space| space.f_bavail > 0)
    }

    /// Kills `master` or `chunkserver`; it is started again a second later.
    #[track_caller]
    pub fn kill(&self, server: &str) {
        let words = format!("^mfs{server} .*{}/{server}.cfg", self.directory.path().display());
        let begun = Instant::now();
        while !Command::new("pkill").args(["-KILL", "-f", "--", &words]).status().unwrap().success() {
            assert!(begun.elapsed() < LIMIT, "there is no {server}: {}", self.log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn log(&self) -> String {
        let text = |name| std::fs::read_to_string(self.directory.path().join(name)).unwrap_or_default();
        let all = [text("master.log"), text("chunkserver.log"), text("mount.log")].concat();
        all.chars().rev().take(4000).collect::<Vec<_>>().into_iter().rev().collect()
    }
}

impl Drop for MooseFs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.root()).stderr(Stdio::null()).status();
        let _ = self.child.kill();
        let _ = self.child.wait();
        // The servers write into the directory until they end, and it is removed next.
        let begun = Instant::now();
        let left = || Command::new("pkill").args(["-KILL", "-f", "--"]).arg(self.directory.path()).status();
        while left().is_ok_and(|found| found.success()) && begun.elapsed() < LIMIT {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn can_be() -> bool {
    let on_path = |name: &str| {
        let path = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&path).chain([PathBuf::from("/usr/sbin")]).any(|dir| dir.join(name).exists())
    };
    let installed = ["mfsmaster", "mfschunkserver", "mfsmount"].iter().all(|name| on_path(name));
    let root = rustix::process::geteuid().is_root() && Path::new("/dev/fuse").exists();
    if !(installed && root) {
        assert!(std::env::var_os("CI").is_none(), "MooseFS needs root, /dev/fuse, moosefs-*: scripts/setup test");
        eprintln!("skipped: MooseFS needs root, /dev/fuse, moosefs-* (scripts/setup test)");
    }
    installed && root
}
