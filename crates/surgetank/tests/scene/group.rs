//! A control group with a limit on memory, of version 2 or 1, according to which of them has the memory controller.

use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::eventually;

pub struct Group {
    path: PathBuf,
    version_2: bool,
}

impl Group {
    /// `None` where the test cannot create groups. Removes the group that an earlier test of this name left.
    pub fn new(name: &str) -> Option<Self> {
        let root = Path::new("/sys/fs/cgroup");
        let has = |path: &Path| fs::read_to_string(path).is_ok_and(|text| text.contains("memory"));
        let version_2 = has(&root.join("cgroup.subtree_control"));
        let parent = if version_2 { root.to_path_buf() } else { root.join("memory") };
        if !version_2 && !parent.join("memory.limit_in_bytes").exists() {
            assert!(std::env::var_os("CI").is_none(), "no memory controller");
            eprintln!("skipped: no memory controller");
            return None;
        }
        let group = Self { path: parent.join(format!("surgetank-test-{name}")), version_2 };
        group.remove();
        if let Err(why) = fs::create_dir(&group.path) {
            assert!(std::env::var_os("CI").is_none(), "no group can be made: {why}");
            eprintln!("skipped: no group can be made: {why}");
            return None;
        }
        Some(group)
    }

    pub fn below(&self, name: &str) -> Self {
        if self.version_2 {
            fs::write(self.path.join("cgroup.subtree_control"), "+memory").unwrap();
        }
        let path = self.path.join(name);
        fs::create_dir(&path).unwrap();
        Self { path, version_2: self.version_2 }
    }

    fn file(&self, version_2: &str, version_1: &str) -> PathBuf {
        self.path.join(if self.version_2 { version_2 } else { version_1 })
    }

    /// Version 1 refuses a limit below the current use.
    pub fn try_limit(&self, bytes: u64) -> bool {
        let limited = fs::write(self.file("memory.max", "memory.limit_in_bytes"), bytes.to_string()).is_ok();
        // No swap, as on compute nodes. The machine may lack a controller of swap.
        drop(fs::write(
            self.file("memory.swap.max", "memory.memsw.limit_in_bytes"),
            match self.version_2 {
                true => "0".to_owned(),
                false => bytes.to_string(),
            },
        ));
        limited
    }

    #[track_caller]
    pub fn limited(self, bytes: u64) -> Self {
        assert!(self.try_limit(bytes));
        self
    }

    pub fn used_bytes(&self) -> u64 {
        let text = fs::read_to_string(self.file("memory.current", "memory.usage_in_bytes")).unwrap();
        text.trim().parse().unwrap()
    }

    /// How many processes the kernel killed for lack of memory.
    pub fn kills(&self) -> u64 {
        let text = fs::read_to_string(self.file("memory.events", "memory.oom_control")).unwrap();
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")).unwrap().trim().parse().unwrap()
    }

    /// Puts the command, and every process that it starts, into the group.
    pub fn holds(&self, command: &mut Command) {
        let procs = CString::new(self.path.join("cgroup.procs").as_os_str().as_bytes()).unwrap();
        let enter = move || {
            // SAFETY: open and write with what was made before the fork; both are async-signal-safe.
            let written = unsafe {
                let fd = libc::open(procs.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
                libc::write(fd, c"0".as_ptr().cast(), 1)
            };
            if written == 1 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        };
        // SAFETY: see above.
        unsafe { command.pre_exec(enter) };
    }

    fn remove(&self) {
        if !self.path.exists() {
            return;
        }
        for below in fs::read_dir(&self.path).into_iter().flatten().flatten() {
            if below.path().is_dir() {
                Self { path: below.path(), version_2: self.version_2 }.remove();
            }
        }
        eventually("the group is empty", || {
            let pids = fs::read_to_string(self.path.join("cgroup.procs")).unwrap_or_default();
            for pid in pids.lines().filter_map(|line| line.parse::<i32>().ok()).filter(|pid| *pid > 0) {
                // SAFETY: only what a test put there is in this group.
                unsafe { libc::kill(pid, libc::SIGKILL) };
            }
            fs::remove_dir(&self.path).is_ok() || !self.path.exists()
        });
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if !std::thread::panicking() || self.path.exists() {
            self.remove();
        }
    }
}
