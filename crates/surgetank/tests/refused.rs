//! Calls that docs/semantics.md says are refused: each fails with the named errno, at the named door.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::fs;
use std::process::Command;

use crate::scene::Scene;

fn prepare(name: &str) -> Option<Scene> {
    let mut scene = Scene::new(name)?;
    scene.tier("fast", 64);
    Some(scene)
}

fn python(scene: &Scene, options: &[&str], program: &str) -> String {
    fs::write("/mnt/program.py", program).unwrap();
    scene.run(options, "exec /usr/bin/python3 /mnt/program.py").exits(0).stdout
}

#[test]
fn calls_only_a_device_can_serve_are_refused() {
    let Some(scene) = prepare("refused_device") else { return };
    fs::write(scene.path("stored"), "stored").unwrap();
    let program = "
import errno, fcntl, os
def attempt(call):
    try: call(); return 'done'
    except OSError as why: return errno.errorcode[why.errno]
FICLONE, FIEMAP, GETFLAGS, SETFLAGS = 0x40049409, 0xC020660B, 0x80086601, 0x40086602
for name in ['stored', 'made']:
    made = os.open(name, os.O_RDWR | os.O_CREAT); copy = os.open('copy', os.O_RDWR | os.O_CREAT)
    print(attempt(lambda: fcntl.ioctl(copy, FICLONE, made)), attempt(lambda: fcntl.ioctl(made, FIEMAP, bytearray(32))),
          attempt(lambda: fcntl.ioctl(made, GETFLAGS, bytearray(8))), attempt(lambda: fcntl.ioctl(made, SETFLAGS, bytearray(8))))
    for what in ['state', 'tier']:
        print(attempt(lambda: os.setxattr(name, 'user.surgetank.' + what, b'x')))
";
    let once = format!("ENOTSUP ENOTSUP ENOTTY ENOTTY\n{}", "EPERM\n".repeat(2));
    for door in [&["--no-preload"][..], &["--no-preload", "--direct", "false"]] {
        assert_eq!(python(&scene, door, program), once.repeat(2), "{door:?}");
    }
}

/// The request for a lock fails if 1,024 requests already wait.
#[test]
fn waiter_1025_for_a_lock_is_refused() {
    let Some(scene) = prepare("refused_waiters") else { return };
    let program = "
import errno, fcntl, os, resource, sys, threading, time
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
threading.stack_size(128 << 10)
answers = []
held = os.open('lock', os.O_RDWR | os.O_CREAT); fcntl.flock(held, fcntl.LOCK_EX)
def wait():
    mine = os.open('lock', os.O_RDWR)
    try: fcntl.flock(mine, fcntl.LOCK_EX); answers.append('got it')
    except OSError as why: answers.append(errno.errorcode[why.errno])
    os.close(mine)
waiters = [threading.Thread(target=wait) for _ in range(1030)]
for waiter in waiters: waiter.start()
while len(answers) < 6: time.sleep(0.01)
time.sleep(0.2)
print(sorted(answers))
sys.stdout.flush()
os._exit(0)
";
    let printed = python(&scene, &["--no-preload"], program);
    assert_eq!(printed, format!("{:?}\n", ["ENOLCK"; 6]).replace('"', "'"));
}

/// With seccomp: the calls of 32-bit programs, io_uring, and file handles.
#[test]
fn calls_no_filter_can_follow_are_refused() {
    let Some(scene) = prepare("refused_seccomp") else { return };
    let source = r#"
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
int main(void) {
    struct { unsigned bytes; int type; char handle[128]; } handle = { 128, 0, {0} };
    int mount;
    char room[128] = {0};
    long number = 20;
    printf("%d", (int)name_to_handle_at(AT_FDCWD, "made", (struct file_handle *)&handle, &mount, 0));
    printf(" %s", strerrorname_np(errno));
    syscall(SYS_open_by_handle_at, AT_FDCWD, &handle, O_RDONLY);
    printf(" %s", strerrorname_np(errno));
    syscall(SYS_io_uring_setup, 1, room);
    printf(" %s\n", strerrorname_np(errno));
    fflush(stdout);
    __asm__ volatile("int $0x80" : "+a"(number) : : "memory", "r8", "r9", "r10", "r11");
    printf("%s\n", number == getpid() ? "its number" : strerrorname_np((int)-number));
    return 0;
}
"#;
    fs::write("/mnt/calls.c", source).unwrap();
    crate::scene::succeed(Command::new("cc").args(["-o", "/mnt/calls", "/mnt/calls.c"]));
    let ended = scene.run(&["--door", "seccomp"], "echo x >made; exec /mnt/calls").exits(0);
    let (first, rest) = ended.stdout.split_once('\n').unwrap();
    assert_eq!(first, "-1 EOPNOTSUPP EPERM ENOSYS");
    // (A kernel without such calls kills a process that makes them.)
    let plain = Command::new("/mnt/calls").output().unwrap();
    if plain.status.success() {
        assert!(String::from_utf8_lossy(&plain.stdout).ends_with("its number\n"));
        assert_eq!(rest, "ENOSYS\n");
    }
}
