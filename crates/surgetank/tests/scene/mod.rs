//! A scene for tests of the real program. It has a directory to serve, tiers of known size, a state directory, and an
//! agent that ends with the test.
//!
//! Everything is below `/mnt`, in a mount namespace that belongs to the test's thread. Its mounts vanish with the
//! thread, also when the test process is killed. The directory behind it is `target/tmp/NAME`. By that name, and by a
//! variable in the environment of its processes, a test finds what an earlier run did not clean up. Needs root, also
//! for the scene of an ordinary user.
#![allow(dead_code, reason = "each test file is compiled with its own copy and uses a part of it")]
// A test panics at a failed step, so that the failure names its line.
#![allow(clippy::unwrap_used)]

mod agents;
pub mod delegation;
pub mod group;
pub mod printed;
pub mod record;
mod running;
pub mod server;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

pub use running::Running;

pub const MIB: u64 = 1 << 20;
/// A user without privileges. Not `nobody`: in a user namespace the files of all other users seem to belong to that
/// user.
pub const USER: u32 = 1000;
/// A supplementary group of that user.
pub const TEAM: u32 = 2000;
/// Marks the scene's processes, so that the next run finds them if this one is killed.
const MARK: &str = "SURGETANK_TEST_SCENE";
const FUSE: &str = "/dev/fuse";
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// A wait that is longer than this counts as a hang.
pub const LIMIT: Duration = Duration::from_secs(90);
/// Names of temporaries and hidden files begin so. At the end the store may have no such name.
const OURS: &str = ".surgetank-";

pub struct Scene {
    /// The directory behind the mount at `/mnt`.
    behind: PathBuf,
    /// The directory that is served, and its own store unless `--store` is given.
    pub over: PathBuf,
    pub state: PathBuf,
    /// Runs everything as this user.
    pub user: Option<u32>,
    tiers: Vec<String>,
}

/// How a command ended, and its output.
pub struct Ended {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    #[track_caller]
    pub fn exits(self, code: i32) -> Self {
        assert_eq!(
            self.status.code(),
            Some(code),
            "{:?}\nstdout:\n{}\nstderr:\n{}",
            self.status,
            self.stdout,
            self.stderr
        );
        self
    }

    /// Standard error contains each of these.
    #[track_caller]
    pub fn says(self, words: &[&str]) -> Self {
        for word in words {
            assert!(self.stderr.contains(word), "{word:?} is missing in:\n{}", self.stderr);
        }
        self
    }

    #[track_caller]
    pub fn prints(self, text: &str) -> Self {
        assert_eq!(self.stdout, text, "stderr:\n{}", self.stderr);
        self
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|why| panic!("{why}: {}", self.stdout))
    }
}

/// Two tests that share a name would clear each other's directories. The lock is held until the process ends.
fn hold_name(behind: &Path) {
    let lock = File::create(behind.with_extension("lock")).unwrap();
    // The lock belongs to the process, not to the descriptor: a test may set up a scene of the same name again.
    let held = rustix::fs::fcntl_lock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive);
    assert!(held.is_ok(), "another test has the scene {}", behind.display());
    std::mem::forget(lock);
}

impl Scene {
    /// `None` where tests may not mount. One scene a test, named after it.
    pub fn new(name: &str) -> Option<Self> {
        if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
            assert!(std::env::var_os("CI").is_none(), "mounting needs root and /dev/fuse");
            eprintln!("skipped: mounting needs root and /dev/fuse");
            return None;
        }
        // SAFETY: affects this thread alone: it gets a namespace of its own, with its present directories.
        unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }.unwrap();
        mount(&["--make-rprivate", "/"]);
        let behind = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("scene-{name}"));
        hold_name(&behind);
        end_marked(&behind);
        if behind.exists() {
            fs::remove_dir_all(&behind).unwrap();
        }
        fs::create_dir_all(&behind).unwrap();
        fs::set_permissions(&behind, fs::Permissions::from_mode(0o755)).unwrap();
        mount(&["--bind", behind.to_str().unwrap(), "/mnt"]);
        // From this path every user can run the program, whatever directory it was built in. Every user may open the
        // device, as on machines where users may mount.
        let program = Path::new("/mnt/surgetank");
        File::create(program).unwrap();
        mount(&["--bind", env!("CARGO_BIN_EXE_surgetank"), "/mnt/surgetank"]);
        succeed(Command::new("mknod").args(["-m", "666", "/mnt/fuse", "c", "10", "229"]));
        mount(&["--bind", "/mnt/fuse", FUSE]);
        // Here the program looks for tiers when none is configured.
        mount(&["-t", "tmpfs", "-o", "size=64m,mode=1777", "tmpfs", "/dev/shm"]);
        let over = PathBuf::from("/mnt/project");
        fs::create_dir(&over).unwrap();
        Some(Self { behind, over, state: "/mnt/state".into(), user: None, tiers: Vec::new() })
    }

    /// The same, owned by a user without privileges.
    pub fn of_user(name: &str) -> Option<Self> {
        let mut scene = Self::new(name)?;
        scene.user = Some(USER);
        chown(&scene.over, Some(USER), Some(USER)).unwrap();
        fs::create_dir(&scene.state).unwrap();
        fs::set_permissions(&scene.state, fs::Permissions::from_mode(0o700)).unwrap();
        chown(&scene.state, Some(USER), Some(USER)).unwrap();
        Some(scene)
    }

    /// Adds a tier: a tmpfs a little larger than the cap, because the tier's own directories need room.
    pub fn tier(&mut self, name: &str, cap_mib: u64) -> &mut Self {
        let path = self.tmpfs(&format!("tier-{name}"), cap_mib + 1);
        self.tiers.push(format!("{name}={}:{cap_mib}M", path.display()));
        self
    }

    /// Puts the agent's state on another file system than the store: there `fsync` publishes a file of a volatile tier.
    pub fn state_elsewhere(&self) {
        let state = self.tmpfs("state", 64);
        fs::set_permissions(state, fs::Permissions::from_mode(0o700)).unwrap();
    }

    /// Adds a tier at this path, after those added before.
    pub fn other_tier(&mut self, name: &str, path: &Path, cap_mib: u64) {
        self.tiers.push(format!("{name}={}:{cap_mib}M", path.display()));
    }

    /// A file system of limited size at `/mnt/NAME`.
    pub fn tmpfs(&self, name: &str, size_mib: u64) -> PathBuf {
        let path = Path::new("/mnt").join(name);
        fs::create_dir_all(&path).unwrap();
        let options = format!("size={size_mib}m,mode=0755");
        mount(&["-t", "tmpfs", "-o", &options, "tmpfs", path.to_str().unwrap()]);
        self.hand_over(&path);
        path
    }

    /// An ext4 of its own at `/mnt/NAME`. `ext4_again` mounts the same image again.
    pub fn ext4(&self, name: &str, size_mib: u64) -> PathBuf {
        let image = PathBuf::from(format!("/mnt/{name}.img"));
        File::create(&image).unwrap().set_len(size_mib * MIB).unwrap();
        succeed(Command::new("mkfs.ext4").args(["-q", "-m", "0", image.to_str().unwrap()]));
        let path = self.ext4_again(name);
        fs::remove_dir(path.join("lost+found")).unwrap();
        self.hand_over(&path);
        path
    }

    pub fn ext4_again(&self, name: &str) -> PathBuf {
        let path = Path::new("/mnt").join(name);
        fs::create_dir_all(&path).unwrap();
        let image = format!("/mnt/{name}.img");
        mount(&["-o", "loop", &image, path.to_str().unwrap()]);
        path
    }

    /// The power fails. This ext4 keeps the synced data and, with `journal_too`, what its journal has. Every process
    /// of the scene ends, and the machine boots. The store keeps everything, because it is another machine's.
    #[track_caller]
    pub fn power_fails(&self, name: &str, journal_too: bool) {
        const SHUTDOWN: libc::Ioctl = 0x8004_587d_u32 as libc::Ioctl;
        let path = Path::new("/mnt").join(name);
        let dir = File::open(&path).unwrap();
        let kind: u32 = if journal_too { 1 } else { 2 };
        // From here on no process may act: the store would show the effect.
        for pid in marked(&self.behind) {
            // SAFETY: the mark says that this scene started it.
            unsafe { libc::kill(pid as i32, libc::SIGSTOP) };
        }
        // SAFETY: EXT4_IOC_SHUTDOWN reads the number it is given; the descriptor is open.
        assert_eq!(unsafe { libc::ioctl(dir.as_raw_fd(), SHUTDOWN, &raw const kind) }, 0);
        drop(dir);
        self.machine_dies(&path);
        // A process that ends holds its mount namespace after it vanishes from `/proc`. Until it releases the
        // namespace, the image mounts as the same file system.
        eventually("the dead device is released", || {
            let image = format!("/mnt/{name}.img");
            Command::new("losetup").args(["--associated", &image]).output().unwrap().stdout.is_empty()
        });
        self.ext4_again(name);
    }

    /// Ends every process of the scene, unmounts this file system, and simulates another boot of the machine.
    #[track_caller]
    pub fn machine_dies(&self, mounted: &Path) {
        end_marked(&self.behind);
        eventually("the dead file system is released", || {
            Command::new("umount").arg(mounted).stderr(Stdio::null()).status().unwrap().success()
        });
        let id = fs::read_to_string(BOOT_ID).unwrap();
        let new = Path::new("/mnt/boot_id");
        fs::write(new, format!("{:0>36}\n", u64::from_str_radix(id.trim().get(28..).unwrap(), 16).unwrap() + 1))
            .unwrap();
        mount(&["--bind", new.to_str().unwrap(), BOOT_ID]);
    }

    /// Unmounts an ext4 of the scene and mounts it again, with another device number.
    pub fn ext4_renumbered(&self, name: &str) {
        let path = Path::new("/mnt").join(name);
        let number = fs::metadata(&path).unwrap().dev();
        // Attached a second time before the first number is free.
        let image = format!("/mnt/{name}.img");
        let attach = Command::new("losetup").args(["--find", "--show", &image]).output().unwrap();
        assert!(attach.status.success(), "{attach:?}");
        let device = String::from_utf8(attach.stdout).unwrap();
        let device = device.trim();
        succeed(Command::new("umount").arg(&path));
        // The namespace of an agent that has just ended may hold the file system for an instant.
        eventually("the first device is released", || {
            let devices = Command::new("losetup").args(["--associated", &image]).output().unwrap();
            devices.stdout.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).count() == 1
        });
        succeed(Command::new("blockdev").args(["--flushbufs", device]));
        mount(&[device, path.to_str().unwrap()]);
        // Detached when the file system is unmounted.
        succeed(Command::new("losetup").args(["--detach", device]));
        assert_ne!(fs::metadata(&path).unwrap().dev(), number, "the same device number: nothing is tested");
    }

    /// A directory beside the served one, where scripts record what they see.
    pub fn beside(&self, name: &str) -> PathBuf {
        let path = Path::new("/mnt").join(name);
        fs::create_dir_all(&path).unwrap();
        self.hand_over(&path);
        path
    }

    pub fn hand_over(&self, path: &Path) {
        if let Some(user) = self.user {
            chown(path, Some(user), Some(user)).unwrap();
        }
    }

    /// The program itself, without any variable of the environment that could configure it.
    pub fn surgetank(&self, words: &[&str]) -> Command {
        let mut command = self.command("/mnt/surgetank");
        command.args(words);
        command
    }

    /// Any program, as the scene's user.
    pub fn command(&self, program: &str) -> Command {
        let mut command = match self.user {
            None => Command::new(program),
            Some(user) => {
                let mut command = Command::new("setpriv");
                let groups = format!("{user},{TEAM}");
                let user = user.to_string();
                command.args(["--reuid", &user, "--regid", &user, "--groups", &groups, "--", program]);
                command
            }
        };
        command
            .current_dir(&self.over)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", "/mnt")
            .env("LC_ALL", "C.UTF-8")
            .env(MARK, &self.behind)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        command
    }

    pub fn run_command(&self, options: &[&str], script: &str) -> Command {
        let mut words = vec![
            "run",
            "--over",
            self.over.to_str().unwrap(),
            "--state",
            self.state.to_str().unwrap(),
            "--no-progress",
        ];
        for tier in &self.tiers {
            words.extend(["--tier", tier]);
        }
        words.extend(options);
        let script = format!("set -eu\n{script}");
        words.extend(["--", "bash", "-c", &script]);
        self.surgetank(&words)
    }

    /// `surgetank run OPTIONS -- bash -c SCRIPT` in the served directory.
    #[track_caller]
    pub fn run(&self, options: &[&str], script: &str) -> Ended {
        Running::of(self.run_command(options, script)).ends()
    }

    /// Every thread of the agent that passes this crash point waits there for the given time.
    #[track_caller]
    pub fn run_held(&self, held: &str, options: &[&str], script: &str) -> Ended {
        let mut command = self.run_command(options, script);
        command.env("SURGETANK_HOLD", held);
        Running::of(command).ends()
    }

    pub fn start(&self, options: &[&str], script: &str) -> Running {
        Running::of(self.run_command(options, script))
    }

    /// Another verb, from outside the run.
    #[track_caller]
    pub fn verb(&self, verb: &str, words: &[&str]) -> Ended {
        let mut all = vec![verb, "--state", self.state.to_str().unwrap()];
        all.extend(words);
        Running::of(self.surgetank(&all)).ends()
    }

    /// A verb with these words only, without `--state`.
    #[track_caller]
    pub fn bare_verb(&self, verb: &str, words: &[&str]) -> Ended {
        Running::of(self.surgetank(&[&[verb], words].concat())).ends()
    }

    /// The user's last resort: a run over the same directory, with all other settings at their defaults.
    #[track_caller]
    pub fn drain_what_is_left(&self) -> Ended {
        self.run(&[], "true")
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.over.join(name)
    }

    #[track_caller]
    pub fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap_or_else(|why| panic!("{name}: {why}"))
    }

    #[track_caller]
    pub fn holds(&self, name: &str, bytes: &[u8]) {
        same_bytes(name, &self.read(name), bytes);
    }

    /// The store has no temporary and no hidden file.
    #[track_caller]
    pub fn is_clean(&self) {
        let left: Vec<PathBuf> = self.store_files().into_keys().filter(|path| is_ours(path)).collect();
        assert!(left.is_empty(), "left in the store: {left:?}");
    }

    /// Every file of the bare directory with its size.
    pub fn store_files(&self) -> BTreeMap<PathBuf, u64> {
        files_below(&self.over)
    }

    /// Relative path of every file of the tiers, without hidden ones.
    pub fn tier_files(&self) -> Vec<PathBuf> {
        self.tiers
            .iter()
            .flat_map(|tier| {
                let path = tier.split_once('=').unwrap().1.rsplit_once(':').unwrap().0;
                files_below(Path::new(path)).into_keys()
            })
            .collect()
    }

    /// How many processes of this name the scene runs.
    pub fn processes(&self, name: &str) -> usize {
        let is_it = |pid: &u32| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == name);
        marked(&self.behind).iter().filter(|pid| is_it(pid)).count()
    }

    pub fn log(&self) -> String {
        let places = fs::read_dir(&self.state).into_iter().flatten().flatten();
        places.filter_map(|place| fs::read_to_string(place.path().join("agent.log")).ok()).collect()
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("---- agent's log\n{}", self.log());
        }
        // The namespace ends with the thread. Below `/mnt` the files of the directory itself are visible here,
        // without the other mounts.
        let _ = rustix::mount::unmount("/mnt", rustix::mount::UnmountFlags::DETACH);
        // A mount over one of these may have hidden an earlier mount, which still holds a file of the directory.
        for place in [BOOT_ID, FUSE] {
            while rustix::mount::unmount(place, rustix::mount::UnmountFlags::DETACH).is_ok() {}
        }
        // While a process executes a program it has no mark for an instant, and may create a file then.
        let deadline = Instant::now() + LIMIT;
        loop {
            end_marked(&self.behind);
            match fs::remove_dir_all(&self.behind) {
                Ok(()) => return,
                Err(_) if !self.behind.exists() => return,
                Err(why) if Instant::now() > deadline => return eprintln!("{} stays: {why}", self.behind.display()),
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }
}

#[track_caller]
pub fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !is_so() {
        assert!(Instant::now() < deadline, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Bytes that do not compress and differ for each seed.
pub fn noise(seed: u64, length: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(length as usize + 8);
    while (bytes.len() as u64) < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length as usize);
    bytes
}

/// Compares without printing megabytes when they differ.
#[track_caller]
pub fn same_bytes(name: &str, is: &[u8], should: &[u8]) {
    assert_eq!(is.len(), should.len(), "{name}: its length");
    if is != should {
        let differs = is.iter().zip(should).position(|(is, should)| is != should);
        panic!("{name}: other bytes from {differs:?} on");
    }
}

pub fn is_ours(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(OURS))
}

/// Regular files and links below a directory, by relative path.
pub fn files_below(root: &Path) -> BTreeMap<PathBuf, u64> {
    let mut found = BTreeMap::new();
    let mut directories = vec![PathBuf::new()];
    while let Some(directory) = directories.pop() {
        // A directory that vanishes during the walk is not a failure.
        for entry in fs::read_dir(root.join(&directory)).into_iter().flatten().flatten() {
            let path = directory.join(entry.file_name());
            let Ok(meta) = entry.metadata() else { continue };
            if meta.is_dir() {
                directories.push(path);
            } else {
                found.insert(path, meta.size());
            }
        }
    }
    found
}

#[track_caller]
pub fn succeed(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

#[track_caller]
pub fn mount(words: &[&str]) {
    succeed(Command::new("mount").args(words));
}

fn alive(pid: u32) -> bool {
    // A zombie has an empty command line.
    fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty())
}

fn cmdline(pid: u32) -> Vec<String> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&line).split('\0').map(str::to_owned).collect()
}

/// Processes that a scene of this name started.
fn marked(behind: &Path) -> Vec<u32> {
    let mark = format!("{MARK}={}", behind.display());
    let pids = fs::read_dir("/proc").unwrap().flatten();
    pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid: &u32| {
            fs::read(format!("/proc/{pid}/environ"))
                .is_ok_and(|text| text.split(|byte| *byte == 0).any(|one| one == mark.as_bytes()))
        })
        .collect()
}

fn end_marked(behind: &Path) {
    let deadline = Instant::now() + LIMIT;
    loop {
        let left: Vec<u32> = marked(behind).into_iter().filter(|pid| alive(*pid)).collect();
        if left.is_empty() || Instant::now() > deadline {
            return;
        }
        for pid in left {
            // SAFETY: the mark says that a scene of this name started it.
            unsafe { libc::kill(pid as i32, libc::SIGKILL) };
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
