//! An ordinary user without privileges: a mount in a user and mount namespace of its own works. Processes that enter
//! the namespace see it, and no other process does. Needs root (to become another user), user namespaces and
//! /dev/fuse.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::thread;
use std::time::{Duration, Instant};

use crate::mounted::permitted;
use surgetank::mount::namespaces::Namespaces;
use tempfile::TempDir;

const USER: u32 = 1000;
const TIMEOUT: Duration = Duration::from_secs(30);

/// The file server, running as the user; ended when dropped.
struct Server {
    child: Child,
}

impl Drop for Server {
    fn drop(&mut self) {
        // SAFETY: this value started the child and has not waited for it.
        unsafe { libc::kill(self.child.id() as i32, libc::SIGTERM) };
        self.child.wait().unwrap();
    }
}

fn example(name: &str) -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    tests.parent().unwrap().parent().unwrap().join("examples").join(name)
}

/// The user's server, the directory to show, its mountpoint, and a FUSE device.
struct Room {
    server: PathBuf,
    source: PathBuf,
    mountpoint: PathBuf,
    device: PathBuf,
    _directory: TempDir,
}

impl Room {
    fn new() -> Self {
        let room = tempfile::tempdir().unwrap();
        fs::set_permissions(room.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let [source, mountpoint] = ["source", "mountpoint"].map(|name| {
            let path = room.path().join(name);
            fs::create_dir(&path).unwrap();
            chown(&path, Some(USER), Some(USER)).unwrap();
            path
        });
        let server = room.path().join("slowfs");
        fs::copy(example("slowfs"), &server).unwrap();
        let device = room.path().join("fuse");
        let made = Command::new("mknod").arg(&device).args(["-m", "666", "c", "10", "229"]).status().unwrap();
        assert!(made.success());
        fs::write(source.join("there"), "seen").unwrap();
        Self { server, source, mountpoint, device, _directory: room }
    }
}

/// On machines where users may mount, every user may open `/dev/fuse`; here the test binds a copy with that mode.
fn start(room: &Room, options: &str) -> Server {
    let Room { server, source, mountpoint, device, .. } = room;
    let script = format!(
        "mount --bind {device} /dev/fuse && exec setpriv --reuid {USER} --regid {USER} --clear-groups \
         {server} {source} {mountpoint} {options}",
        device = device.display(),
        server = server.display(),
        source = source.display(),
        mountpoint = mountpoint.display(),
    );
    let child = Command::new("unshare").args(["--mount", "sh", "-c", &script]).spawn().unwrap();
    let mut server = Server { child };
    let since = Instant::now();
    let table = format!("/proc/{}/mountinfo", server.child.id());
    let place = format!(" {} ", mountpoint.display());
    while !fs::read_to_string(&table).unwrap_or_default().lines().any(|l| l.contains(&place) && l.contains("fuse.")) {
        assert!(server.child.try_wait().unwrap().is_none(), "the server ended");
        assert!(since.elapsed() < TIMEOUT, "no mount appeared");
        thread::sleep(Duration::from_millis(5));
    }
    server
}

fn inside(pid: u32, script: &str, dir: &Path) -> Output {
    let namespaces = Namespaces::of(pid).unwrap();
    let mut command = Command::new("/bin/sh");
    command.args(["-c", script, "sh"]).arg(dir).uid(USER).gid(USER);
    // SAFETY: between fork and exec only setns is called, on descriptors opened before.
    unsafe { command.pre_exec(move || namespaces.enter()) };
    command.output().unwrap()
}

#[test]
fn unprivileged_private_mount_serves_files() {
    if !permitted() {
        return;
    }
    if fs::read_to_string("/proc/sys/user/max_user_namespaces").is_ok_and(|max| max.trim() == "0") {
        assert!(std::env::var_os("CI").is_none(), "user namespaces are disabled");
        eprintln!("skipped: user namespaces are disabled");
        return;
    }
    let room = Room::new();
    let (source, mountpoint) = (&room.source, &room.mountpoint);
    let running = start(&room, "--private");
    let pid = running.child.id();
    let output =
        inside(pid, "cd \"$1\" && cat there && echo new > made && mkdir d && mv made d && cat d/made", mountpoint);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "seennew\n", "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(fs::read_to_string(source.join("d/made")).unwrap(), "new\n");
    assert_eq!(fs::metadata(source.join("d/made")).unwrap().permissions().mode() & 0o777, 0o644);
    // The ids are those outside the namespace.
    let output = inside(pid, "id -u; stat -c %u \"$1/there\" \"$1/d\"", mountpoint);
    assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{USER}\n65534\n{USER}\n"));

    assert_eq!(fs::read_dir(mountpoint).unwrap().count(), 0, "the mount is visible outside");
    drop(running);
}

/// Without namespaces the setuid helper mounts. It also unmounts when the server gets SIGTERM.
#[test]
fn mount_by_the_helper_serves_files() {
    if !permitted() {
        return;
    }
    if Command::new("fusermount3").arg("--version").output().is_err() {
        assert!(std::env::var_os("CI").is_none(), "fusermount3 is not installed");
        eprintln!("skipped: fusermount3 is not installed");
        return;
    }
    let room = Room::new();
    let mut running = start(&room, "");
    let pid = running.child.id().to_string();
    let output = Command::new("nsenter")
        .args(["--target", &pid, "--mount", "setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups", "cat"])
        .arg(room.mountpoint.join("there"))
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "seen", "{}", String::from_utf8_lossy(&output.stderr));
    // SAFETY: the test started the child and has not waited for it.
    unsafe { libc::kill(running.child.id() as i32, libc::SIGTERM) };
    assert!(running.child.wait().unwrap().success(), "the server did not unmount through the helper");
}
