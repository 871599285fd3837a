//! The door without a mount at its limits: refused calls and their report, interpreters in the directory, and agents
//! without access to programs' memory.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::fs;
use std::mem::MaybeUninit;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};

use crate::scene::{Scene, eventually};

const BARE: &[&str] = &["--door", "seccomp", "--no-preload"];

fn scene(name: &str) -> Option<Scene> {
    let mut scene = Scene::new(name)?;
    scene.tier("fast", 1024);
    Some(scene)
}

#[test]
fn refused_calls_are_reported_and_write_nothing() {
    let Some(scene) = scene("gaps_refused") else { return };
    let script = r#"
mkdir d; echo there > taken
python3 - <<'P'
import errno, os, socket, tempfile
# Two names of one number.
errno.errorcode[errno.EOPNOTSUPP] = 'EOPNOTSUPP'
def bind(path):
    one = socket.socket(socket.AF_UNIX)
    try: one.bind(path); return 'bound'
    except OSError as e: return errno.errorcode[e.errno]
print(bind('d/socket'), bind('taken'), bind('/mnt/outside-socket'), bind(b'\0abstract-' + os.urandom(8)))
try: os.mknod('node', 0o140600); print('made')
except OSError as e: print(errno.errorcode[e.errno])
def unnamed(path):
    try: os.close(os.open(path, os.O_TMPFILE | os.O_RDWR)); return 'opened'
    except OSError as e: return errno.errorcode[e.errno]
print(unnamed('d'), unnamed('absent'), unnamed('taken'), unnamed('/mnt'))
# A program that is refused an unnamed file makes a file with a name, and deletes it.
with tempfile.TemporaryFile(dir='d') as f:
    f.write(b'x' * 100_000); f.seek(0); print(len(f.read()))
print(os.listdir('d'))
P
"#;
    let ended = scene
        .run(BARE, script)
        .exits(0)
        .prints("EOPNOTSUPP EADDRINUSE bound bound\nEOPNOTSUPP\nEOPNOTSUPP ENOENT ENOTDIR opened\n100000\n[]\n");
    ended.says(&[
        "refused without a mount: sockets in the directory, 2 times (first: d/socket of python3)",
        "refused without a mount: files without a name (O_TMPFILE), 2 times (first: ",
    ]);
    assert_eq!(scene.store_files().into_keys().collect::<Vec<_>>(), [std::path::Path::new("taken")]);
    // A run without refused calls reports none.
    let ended = scene.run(BARE, "cat taken").exits(0);
    assert!(!ended.stderr.contains("refused"), "{}", ended.stderr);
}

#[test]
fn interpreter_in_the_directory_is_used() {
    let Some(scene) = scene("gaps_interpreter") else { return };
    // The loader of this machine, under the test's own name. The store has an old file of that name, which must not
    // be used.
    fs::write(scene.path("loader"), "not a program").unwrap();
    fs::write("/mnt/hello.c", "#include <stdio.h>\nint main(void) { puts(\"hello\"); return 5; }\n").unwrap();
    let script = r#"
real=$(readlink -f /lib64/ld-linux-x86-64.so.2 /lib/ld-linux-aarch64.so.1 2>/dev/null | head -1)
cp "$real" new; chmod +x new; mv new loader
cc -o /mnt/hello /mnt/hello.c -Wl,--dynamic-linker=/mnt/project/loader
/mnt/hello || echo "ended with $?"
cp /mnt/hello hello; ./hello || echo "ended with $?"
rm loader; /mnt/hello 2> /dev/null || echo "without: $?"; ./hello 2> /dev/null || echo "without: $?"
"#;
    let printed = "hello\nended with 5\nhello\nended with 5\nwithout: 127\nwithout: 127\n";
    let mut options = BARE.to_vec();
    // No file is drained unless a program requests it.
    options.extend(["--quiet-period", "1h"]);
    scene.run(&options, script).exits(0).prints(printed);
}

/// Simulates Yama, which this kernel may lack: the agent's accesses fail with EPERM, and `run` reads the programs'
/// memory for it.
#[test]
fn agent_without_ptrace_rights_asks_the_run() {
    let Some(mut scene) = Scene::of_user("gaps_yama") else { return };
    scene.tier("fast", 64);
    let aside = scene.beside("aside");
    let injected = "inject=process_vm_readv,process_vm_writev,pidfd_getfd:error=EPERM";
    let script = r#"
mkdir early; touch /mnt/aside/waits; while [ ! -e /mnt/aside/go ]; do sleep 0.05; done
mkdir -p d/e; echo content > d/e/f; cp d/e/f g; mv g d/h; cat d/h; stat -c %s d/h; readlink -f d/e/../h
ls d; ln -s d/h link; cat link; printf '#!/bin/sh\necho a script\n' > s; chmod +x s; ./s
python3 - <<'P'
import os
open('long', 'wb').write(b'x' * 200_000); os.setxattr('long', 'user.big', b'v' * 3000)
print(len(os.getxattr('long', 'user.big')), os.getcwd(), len(os.listdir('d')))
P
for n in $(seq 40); do (echo $n > many$n) & done; wait; ls | wc -l
(sleep 0.3; cat d/h > by_orphan) &
"#;
    let running = scene.start(BARE, script);
    eventually("the script waits", || aside.join("waits").exists());
    let agent = scene.agent().unwrap().to_string();
    let words = ["-f", "-qq", "-o", "/mnt/trace", "-e", injected];
    let calls = "trace=process_vm_readv,process_vm_writev,pidfd_getfd";
    let Ok(mut strace) =
        Command::new("strace").args(words).args(["-e", calls, "-p", &agent]).stdin(Stdio::null()).spawn()
    else {
        assert!(std::env::var_os("CI").is_none(), "strace is missing: scripts/setup test installs it");
        eprintln!("skipped: no strace");
        return;
    };
    eventually("strace holds the agent", || {
        let tasks = fs::read_dir(format!("/proc/{agent}/task")).unwrap().flatten();
        tasks.map(|task| fs::read_to_string(task.path().join("status")).unwrap_or_default()).all(|status| {
            let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"));
            tracer.is_none_or(|tracer| tracer.trim() != "0")
        })
    });
    fs::write("/mnt/aside/go", "").unwrap();
    running.ends().exits(0).prints("content\n8\n/mnt/project/d/h\ne\nh\ncontent\na script\n3000 /mnt/project 2\n45\n");
    scene.await_no_agent();
    strace.wait().unwrap();
    scene.holds("d/h", b"content\n");
    scene.holds("many40", b"40\n");
    scene.holds("by_orphan", b"content\n");
    let trace = fs::read_to_string("/mnt/trace").unwrap();
    for call in ["process_vm_readv", "process_vm_writev", "pidfd_getfd"] {
        // Only calls that strace prints on one line: an interrupted call ends on a line of its own.
        let ended: Vec<_> = trace.lines().filter(|line| line.contains(call) && line.contains(" = ")).collect();
        assert!(!ended.is_empty(), "{call} was not called");
        let permitted: Vec<_> = ended.iter().filter(|line| !line.contains("EPERM")).collect();
        assert!(permitted.is_empty(), "{permitted:?}");
    }
}

/// Where only an administrator may trace, the run does not begin.
#[test]
fn yama_restriction_is_reported_before_the_run_begins() {
    let Some(mut scene) = Scene::of_user("gaps_yama_strict") else { return };
    scene.tier("fast", 64);
    // A kernel without Yama has no such file, so a tmpfs with one covers the directory.
    crate::scene::mount(&["-t", "tmpfs", "tmpfs", "/proc/sys/kernel"]);
    fs::create_dir("/proc/sys/kernel/yama").unwrap();
    let scope = |level: &str| fs::write("/proc/sys/kernel/yama/ptrace_scope", level).unwrap();
    scope("1\n");
    scene.run(BARE, "echo served > f").exits(0);
    scene.holds("f", b"served\n");
    scene.await_no_agent();
    scope("2\n");
    let refused = scene.run(BARE, "echo escaped > g");
    assert!(!refused.status.success());
    refused.says(&["cannot be served", "kernel.yama.ptrace_scope is 2", "nothing was begun"]);
    assert!(!scene.path("g").exists());
    // The doctor may recommend another door: only its finding about this one matters here.
    let diagnosis = scene.verb("doctor", &[]);
    let text = format!("{}{}", diagnosis.stdout, diagnosis.stderr);
    assert!(text.contains("kernel.yama.ptrace_scope is 2"), "{text}");
}

/// Calls that no current C library makes, but that Go, static programs and older libraries do. Found by removing each
/// from the filter.
#[test]
fn every_stat_call_gives_the_same_answer() {
    let Some(scene) = scene("gaps_answers") else { return };
    fs::write(
        "/mnt/ask.c",
        r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>
#define CHECK(condition) if (!(condition)) { printf("line %d: %s\n", __LINE__, #condition); return 1; }
static int same(struct stat *a, struct stat *b)
{
    return a->st_ino == b->st_ino && a->st_dev == b->st_dev && a->st_size == b->st_size && a->st_mode == b->st_mode &&
           a->st_nlink == b->st_nlink && a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}
int main(void)
{
    struct stat named, other;
    struct statx extended;
    struct statfs directory, space;
    int fd = open("f", O_CREAT | O_RDWR, 0640), dir = open(".", O_RDONLY | O_DIRECTORY);
    CHECK(write(fd, "bytes", 5) == 5 && !stat("f", &named) && named.st_size == 5);
    CHECK(!syscall(SYS_fstat, fd, &other) && same(&named, &other));
    CHECK(!syscall(SYS_newfstatat, fd, "", &other, AT_EMPTY_PATH) && same(&named, &other));
    CHECK(!syscall(SYS_newfstatat, dir, "f", &other, 0) && same(&named, &other));
    CHECK(!syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &extended));
    CHECK(extended.stx_ino == named.st_ino && extended.stx_size == 5);
#ifdef SYS_stat
    CHECK(!syscall(SYS_stat, "f", &other) && same(&named, &other));
    CHECK(!syscall(SYS_lstat, "f", &other) && same(&named, &other));
#endif
    /* The file system is the directory's, not the tier's. */
    CHECK(!statfs(".", &directory));
    CHECK(!statfs("f", &space) && space.f_type == directory.f_type && space.f_blocks == directory.f_blocks);
    CHECK(!fstatfs(fd, &space) && space.f_type == directory.f_type && space.f_blocks == directory.f_blocks);
    CHECK(!fstatfs(dir, &space) && space.f_type == directory.f_type && space.f_blocks == directory.f_blocks);
    puts("one answer");
    return 0;
}
"#,
    )
    .unwrap();
    crate::scene::succeed(scene.command("cc").args(["-O1", "-o", "/mnt/ask", "/mnt/ask.c"]));
    // The store is not a tmpfs, the tier is.
    let mut options = BARE.to_vec();
    options.extend(["--quiet-period", "1h"]);
    scene.run(&options, "/mnt/ask").exits(0).prints("one answer\n");
}

/// A synced file is in the store when the call returns.
#[test]
fn fsync_on_a_memory_tier_means_the_store() {
    let Some(scene) = scene("gaps_fsync") else { return };
    scene.state_elsewhere();
    let script =
        "python3 -c 'import os; f = open(\"synced\", \"w\"); f.write(\"safe\"); f.flush(); os.fsync(f.fileno()); \
        open(\"/mnt/synced\", \"w\").close()
while not os.path.exists(\"/mnt/go\"): pass'";
    let mut options = BARE.to_vec();
    options.extend(["--quiet-period", "1h"]);
    let running = scene.start(&options, script);
    eventually("fsync returns", || std::path::Path::new("/mnt/synced").exists());
    scene.holds("synced", b"safe");
    fs::write("/mnt/go", "").unwrap();
    running.ends().exits(0);
}

#[test]
fn access_denies_calls_that_would_fail() {
    let Some(mut scene) = Scene::of_user("gaps_access") else { return };
    scene.tier("fast", 64);
    fs::write(scene.path("secret"), "of root").unwrap();
    crate::scene::succeed(Command::new("chmod").args(["600", "/mnt/project/secret"]));
    let script = r#"
echo mine > own; chmod 400 own; mkdir shut; chmod 000 shut
python3 - <<'P'
import os
print([os.access(*asked) for asked in (('secret', os.F_OK), ('secret', os.R_OK), ('own', os.R_OK), ('own', os.W_OK),
    ('own', os.X_OK), ('.', os.W_OK | os.X_OK), ('shut', os.X_OK), ('absent', os.F_OK), ('/etc/shadow', os.R_OK))])
print([os.access(path, os.W_OK, effective_ids=True, follow_symlinks=False) for path in ('secret', 'own', '.')])
P
chmod 700 shut
"#;
    scene
        .run(BARE, script)
        .exits(0)
        .prints("[True, False, True, False, False, True, False, False, False]\n[False, False, True]\n");
}

/// The shim marks its own look-ups on a tier in a register that its calls do not use otherwise. Regression: the mark
/// stayed there, so the program's next call passed the filter too, and the bare directory answered it.
#[test]
fn call_after_a_call_of_the_shim_is_served() {
    let Some(scene) = scene("gaps_own_calls") else { return };
    let script = r#"exec /usr/bin/python3 - <<'P'
import os
os.mkdir('d')
for n in range(20):
    one, other = f'{n}', f'd/{n}'
    with open(one, 'w') as f: f.write(one)
    os.link(one, other)
    assert os.path.exists(other) and os.stat(other).st_nlink == 2
    assert open(other).read() == one
    os.unlink(one)
    assert open(other).read() == one and os.stat(other).st_nlink == 1
P"#;
    scene.run(&["--door", "seccomp"], script).exits(0);
    for n in 0..20 {
        scene.holds(&format!("d/{n}"), n.to_string().as_bytes());
    }
}

/// Regression: the link call failed half done, and the drain stopped at a file without content.
#[test]
fn link_to_a_deleted_file_stops_no_drain() {
    let Some(scene) = scene("gaps_deleted_link") else { return };
    let script = r#"exec /usr/bin/python3 - <<'P'
import errno, os
open('removed', 'w').write('removed')
held = open('removed', 'r+')
os.unlink('removed')
import ctypes
path = b'/proc/self/fd/%d' % held.fileno()
assert ctypes.CDLL(None, use_errno=True).linkat(-100, path, -100, b'back', 0x400) == -1
print(errno.errorcode[ctypes.get_errno()], os.fstat(held.fileno()).st_nlink, os.listdir('.'))
open('removed', 'w').write('another')
os.mkdir('d')
os.chdir('d')
os.rmdir('../d')
try: os.open('.', os.O_RDONLY)
except OSError as e: print(errno.errorcode[e.errno])
P"#;
    for options in [BARE, &["--door", "seccomp"]] {
        scene.run(options, script).exits(0).prints("ENOENT 0 []\nENOENT\n");
        scene.holds("removed", b"another");
        fs::remove_file(scene.path("removed")).unwrap();
    }
}

/// Regression: the filter took "none" for a file of the working directory, and `unshare -m` was refused.
#[test]
fn mount_of_a_file_system_without_a_path_is_allowed() {
    let Some(scene) = scene("gaps_mounts") else { return };
    let script = "mkdir /mnt/here /mnt/there
        unshare -m sh -c 'mount -t tmpfs tmpfs /mnt/here && echo >/mnt/here/made && echo x >f && cat f && ls /mnt/here'
        unshare -m mount --bind . /mnt/there || echo refused";
    scene.run(BARE, script).exits(0).prints("x\nmade\nrefused\n");
    scene.holds("f", b"x\n");
}

/// Data through a FIFO changes its times in the bare directory. Regression: that counted as another client's change,
/// with exit 3.
#[test]
fn used_fifo_can_be_removed_and_renamed() {
    let Some(scene) = scene("gaps_fifo") else { return };
    let script = "mkfifo one two
        for pipe in one two; do (echo through $pipe >$pipe) & cat $pipe; wait; done
        rm one; mv two moved; ls";
    scene.run(BARE, script).exits(0).prints("through one\nthrough two\nmoved\n");
    assert!(!scene.path("one").exists() && scene.path("moved").exists());
}

/// Two regressions: the agent compared a FIFO's own times after a use had changed them. The result was a false
/// conflict with exit 3, for example with Snakemake's `pipe()`. A change through its descriptor reached the bare FIFO
/// instead.
#[test]
fn used_fifo_takes_new_attributes_without_conflict() {
    let Some(scene) = scene("gaps_fifo_attributes") else { return };
    let script = r#"
mkfifo touched modes bydescriptor; mknod null c 1 3; mkdir d
for pipe in touched modes; do (echo through $pipe >$pipe) & cat $pipe; wait; done
echo away >null
touch touched; touch -d @5000 null; chmod 600 modes; chmod 640 null; chown 1000 modes
exec /usr/bin/python3 - <<'P'
import os
pipe = os.open('bydescriptor', os.O_RDWR)
os.write(pipe, b'in it'); os.read(pipe, 5)
named, opened = os.stat('bydescriptor'), os.fstat(pipe)
print(os.path.samestat(named, opened), os.readlink(f'/proc/self/fd/{pipe}'))
os.fchmod(pipe, 0o604); os.utime(pipe, (7, 8)); os.fchown(pipe, -1, 1000)
try: os.fsync(pipe)
except OSError as e: print(os.strerror(e.errno))
for name in ('touched', 'modes', 'null', 'bydescriptor'):
    stat = os.stat(name)
    print(name, oct(stat.st_mode), stat.st_uid, stat.st_gid, int(stat.st_mtime) if stat.st_mtime < 10_000 else 'now')
os.rename('touched', 'd/touched'); os.write(pipe, b'in it'); os.chmod('bydescriptor', 0o600); os.unlink('modes')
P"#;
    let printed = "through touched\nthrough modes\nTrue /mnt/project/bydescriptor\nInvalid argument
touched 0o10644 0 0 now\nmodes 0o10600 1000 0 now\nnull 0o20640 0 0 5000\nbydescriptor 0o10604 0 1000 8\n";
    for door in [BARE, &["--door", "seccomp"]] {
        scene.run(door, script).exits(0).prints(printed);
        assert_eq!(fs::metadata(scene.path("bydescriptor")).unwrap().permissions().mode(), 0o10600);
        assert_eq!(fs::metadata(scene.path("null")).unwrap().permissions().mode(), 0o20640);
        assert!(scene.path("d/touched").exists() && !scene.path("modes").exists());
        fs::remove_dir_all(scene.path("d")).unwrap();
        for name in ["bydescriptor", "null"] {
            fs::remove_file(scene.path(name)).unwrap();
        }
    }
}

/// Regression: a trailing slash after a file's name gave ENOTDIR, where every file system returns EISDIR.
#[test]
fn open_with_a_trailing_slash_fails_as_elsewhere() {
    let Some(scene) = scene("gaps_slash") else { return };
    let script = r#"
mkdir -p "$1" && cd "$1" && mkdir d && touch file && ln -s file link && ln -s d dlink && ln -s absent dangling && ln -s d/ slash
exec /usr/bin/python3 - <<'P'
import errno, os
flags = {'read': os.O_RDONLY, 'write': os.O_WRONLY, 'create': os.O_CREAT | os.O_RDWR, 'create to read': os.O_CREAT,
    'excl': os.O_CREAT | os.O_EXCL | os.O_WRONLY, 'trunc': os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 'path': os.O_PATH,
    'nofollow': os.O_CREAT | os.O_NOFOLLOW | os.O_WRONLY, 'directory': os.O_DIRECTORY}
names = ('file/', 'd/', 'absent/', 'link/', 'dlink/', 'slash', 'slash/', 'file//', 'd/.', 'd/..', 'file/.', 'absent/x', 'file/x', 'd/x/')
for name in names:
    for how, given in flags.items():
        try: os.close(os.open(name, given)); result = 'opened'
        except OSError as e: result = errno.errorcode[e.errno]
        print(name, how, result)
P"#;
    fs::write("/mnt/script", script).unwrap();
    let plain = scene.command("bash").args(["-eu", "/mnt/script", "/mnt/plain"]).output().unwrap();
    let plain = String::from_utf8(plain.stdout).unwrap();
    assert!(plain.contains("file/ create EISDIR\n"), "{plain}");
    for (door, dir) in [(BARE, "one"), (&["--door", "seccomp"][..], "two"), (&["--door", "fuse"], "three")] {
        scene.run(door, &format!("bash -eu /mnt/script {dir}")).exits(0).prints(&plain);
    }
}

/// Regression: the shim read the program's pointers, and the program died where the kernel returns EFAULT.
#[test]
fn bad_pointers_give_efault_through_every_door() {
    let Some(scene) = scene("gaps_pointers") else { return };
    let script = r#"
mkdir -p d; echo there > d/f
exec /usr/bin/python3 - <<'P'
import ctypes, errno, mmap, os
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
none = libc.mmap(None, 4096, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
out, here, held = ctypes.create_string_buffer(4096), -100, os.open('d/f', os.O_RDWR)
wrong = []
for bad in (none, 0xdeadc0de, 2**64 - 1, 2**63, 0):
    bad = ctypes.c_void_p(bad)
    calls = {'open': (bad, 0), 'openat': (here, bad, 0o101, 0o600), 'creat': (bad, 0o600), 'stat': (bad, out), 'lstat': (bad, out),
        'access': (bad, 0), 'chmod': (bad, 0o600), 'chown': (bad, 0, 0), 'lchown': (bad, 0, 0), 'truncate': (bad, ctypes.c_long(0)),
        'unlink': (bad,), 'rmdir': (bad,), 'mkdir': (bad, 0o700), 'mkfifo': (bad, 0o600), 'symlink': (b'to', bad),
        'link': (bad, b'to'), 'rename': (bad, b'to'), 'readlink': (bad, out, 100), 'chdir': (bad,), 'statfs': (bad, out),
        'getxattr': (bad, b'user.a', out, 10), 'execv': (bad, None), 'statx': (here, bad, 0, 0x7ff, out)}
    if bad.value:
        calls.update({'utimensat': (here, bad, None, 0)})
        calls.update({'fstat': (held, bad), 'statx of a file': (here, b'd/f', 0, 0x7ff, bad), 'stat into': (b'd/f', bad),
            'times': (here, b'd/f', bad, 0), 'futimens': (held, bad), 'fstatfs': (held, bad), 'readlink into': (b'/proc/self/exe', bad, 9)})
    for name, given in calls.items():
        function = getattr(libc, {'times': 'utimensat'}.get(name, name.split()[0]))
        ctypes.set_errno(0)
        if function(*given) != -1 or ctypes.get_errno() != errno.EFAULT:
            wrong.append((name, bad.value and hex(bad.value), errno.errorcode.get(ctypes.get_errno())))
print(wrong)
print(open('d/f').read(), end='')
P"#;
    for door in [BARE, &["--door", "seccomp"], &["--door", "fuse", "--no-preload"], &["--door", "fuse"]] {
        scene.run(door, script).exits(0).prints("[]\nthere\n");
    }
}

/// The store has the FIFO, but not under this name yet. Regression: the kernel made a file there, and the other end
/// waited indefinitely.
#[test]
fn fifo_under_an_undrained_name_stays_a_fifo() {
    let Some(scene) = scene("gaps_fifo_names") else { return };
    let script = "mkfifo one; (echo first >one) & cat one; wait
        for n in 1 2 3 4 5; do
          ln one two; rm one; ln two three; (echo through >three) & timeout 20 cat two; wait
          rm two; mv three one
        done; ls";
    scene.run(BARE, script).exits(0).prints(&format!("first\n{}one\n", "through\n".repeat(5)));
}
/// Regression: permissions used the agent's groups and the system's list for the process's user, not the groups of
/// the process itself.
#[test]
fn file_of_a_supplementary_group_opens_to_its_members() {
    let Some(scene) = scene("gaps_groups") else { return };
    let give_to_team = |path: &Path, mode| {
        chown(path, None, Some(crate::scene::TEAM)).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    for (name, mode) in [("shared", 0o640), ("not_for_the_team", 0o604)] {
        fs::write(scene.path(name), "of the team\n").unwrap();
        give_to_team(&scene.path(name), mode);
    }
    let script = r#"
cat > /mnt/ask.py <<'P'
import errno, os, sys
def tried(what, *given):
    try: what(*given); return 'done'
    except OSError as e: return errno.errorcode[e.errno]
mine = 'team/' + sys.argv[1]
def make(): os.close(os.open(mine, os.O_CREAT | os.O_WRONLY, 0o640))
print(tried(open, 'shared'), tried(open, 'not_for_the_team'), tried(os.listdir, 'team'), tried(make),
    tried(os.chown, mine, -1, 2000), tried(os.chmod, mine, 0o2750), tried(os.chown, mine, -1, 3000), tried(os.mkdir, mine + '.d'),
    tried(os.access, 'shared', os.R_OK) and os.access('shared', os.R_OK))
if os.path.exists(mine): print(oct(os.stat(mine).st_mode), os.stat(mine).st_gid)
P
as() { setpriv --reuid 1000 --regid 1000 "$@"; }
as --groups 2000 /usr/bin/python3 /mnt/ask.py member
as --groups 4000,2000,4001 /usr/bin/python3 /mnt/ask.py of_several
as --clear-groups /usr/bin/python3 /mnt/ask.py other
"#;
    let member = "done EACCES done done done done EPERM done True\n0o102750 2000\n";
    let other = "EACCES done EACCES EACCES EACCES EACCES EACCES EACCES False\n";
    for door in [BARE, &["--door", "fuse", "--no-preload"]] {
        let team = scene.path("team");
        fs::create_dir(&team).unwrap();
        give_to_team(&team, 0o770);
        scene.run(door, script).exits(0).prints(&format!("{member}{member}{other}"));
        fs::remove_dir_all(team).unwrap();
    }
}

/// The address of a socket holds 107 bytes. Regression: with a long path to the home programs ran without the shim,
/// and only the agent's log reported it. Without a mount no program worked.
#[test]
fn state_directory_may_have_a_long_path() {
    let Some(mut scene) = scene("gaps_long_path") else { return };
    scene.state = format!("/mnt/{}/{}/state", "home".repeat(30), "user".repeat(30)).into();
    fs::create_dir_all(&scene.state).unwrap();
    fs::set_permissions(&scene.state, fs::Permissions::from_mode(0o700)).unwrap();
    for door in ["fuse", "seccomp"] {
        let script = "/usr/bin/python3 -c \"for n in range(50): open(f'made{n}', 'w').write('made')\"";
        let ended = scene.run(&["--door", door], script).exits(0);
        assert_eq!(scene.store_files().len(), 50);
        // Programs request their files from the agent, not from the mount.
        if door == "fuse" {
            ended.says(&[" 0 opens direct"]);
        }
        scene.await_no_agent();
    }
}

/// Regression: the agent noticed the close of a file after a link or a FIFO that was made later.
#[test]
fn link_and_fifo_reach_the_store_after_earlier_closes() {
    let Some(scene) = scene("gaps_order") else { return };
    let events = inotify::init(CreateFlags::NONBLOCK).unwrap();
    inotify::add_watch(&events, scene.path(""), WatchFlags::CREATE | WatchFlags::MOVED_TO).unwrap();
    let script = "for n in $(seq 100); do echo $n >f$n; ln -s f$n l$n; echo $n >g$n; mkfifo p$n; done";
    scene.run(&[BARE, &["--quiet-period", "0s"]].concat(), script).exits(0);
    let mut buffer = vec![MaybeUninit::uninit(); 1 << 16];
    let mut reader = inotify::Reader::new(&events, &mut buffer);
    let mut seen: Vec<String> = Vec::new();
    while let Ok(event) = reader.next() {
        seen.extend(event.file_name().map(|name| name.to_string_lossy().into_owned()));
    }
    let at = |name: String| seen.iter().position(|one| *one == name).ok_or(name);
    for n in 1..=100 {
        let order = ["f", "l", "g", "p"].map(|kind| at(format!("{kind}{n}")).unwrap());
        assert!(order.is_sorted(), "{n}: {order:?}");
    }
}
