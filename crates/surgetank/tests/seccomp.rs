//! The door without a mount. Programs of all kinds see one directory. The bare directory gets only directories before
//! the drain. Calls that cannot be served are refused.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::scene::{Scene, eventually};

/// Both variants: answers of the shim have to agree with those of the agent.
const BARE: &[&str] = &["--door", "seccomp", "--no-preload"];
const WITH_SHIM: &[&str] = &["--door", "seccomp"];

fn scene(name: &str) -> Option<Scene> {
    let mut scene = Scene::new(name)?;
    scene.tier("fast", 1024);
    Some(scene)
}

/// A program without a dynamic loader, outside the directory.
fn static_program(scene: &Scene, name: &str, source: &str) -> Option<String> {
    let (code, program) = (format!("/mnt/{name}.c"), format!("/mnt/{name}"));
    fs::write(&code, source).unwrap();
    let made = scene.command("cc").args(["-static", "-O1", "-pthread", "-o", &program, &code]).output();
    if made.as_ref().is_ok_and(|made| made.status.success()) {
        return Some(program);
    }
    assert!(std::env::var_os("CI").is_none(), "{made:?}");
    eprintln!("skipped: no static C library");
    None
}

/// Typical operations of a shell and its tools, followed by a check of all files.
const CHORES: &str = r#"
mkdir -p a/b/c && cd a && pwd
echo one > b/one; cat b/one; echo two >> b/one; cat < b/one
mv b/one b/c/uno; ls b b/c; cp -a b copy; cd copy/c; cat ../../b/c/uno; pwd
cd ../..; mv b renamed; cat renamed/c/uno; cd renamed; pwd; ls; cd ..
ln -s renamed/c short; cat short/uno; ln renamed/c/uno hard; stat -c '%h %s' hard
rm hard; [ ! -e hard ]; tar cf ../all.tar . && mkdir ../out && tar xf ../all.tar -C ../out
diff -r . ../out && cd .. && rm -r out a/copy
find . -type f | sort; find . -name uno -newer all.tar
python3 - <<'P'
import os
with open('numbers', 'w+') as f:
    for n in range(1000): f.write(f'{n}\n')
    f.seek(0); assert len(f.read().split()) == 1000
    assert os.fstat(f.fileno()).st_ino == os.stat('numbers').st_ino
    assert os.path.samestat(os.fstat(f.fileno()), os.stat('numbers'))
os.truncate('numbers', 100); assert os.path.getsize('numbers') == 100
os.chmod('numbers', 0o600); os.utime('numbers', (1, 2)); s = os.stat('numbers')
assert (s.st_mode & 0o777, s.st_mtime) == (0o600, 2), s
os.mkdir('many')
for n in range(700): open(f'many/{n:03}', 'w').close()
assert sorted(os.listdir('many')) == [f'{n:03}' for n in range(700)]
seen = []
with os.scandir('many') as entries:
    for entry in entries:
        seen.append(entry.name)
        if int(entry.name) % 2: os.unlink(entry.path)
assert sorted(seen) == [f'{n:03}' for n in range(700)], len(seen)
assert len(os.listdir('many')) == 350
for wrong, errno in [('no/where', 2), ('numbers/x', 20)]:
    try: open(wrong); assert False
    except OSError as e: assert e.errno == errno, (wrong, e)
try: os.rmdir('many'); assert False
except OSError as e: assert e.errno == 39
print(os.getcwd(), os.readlink('/proc/self/cwd'), len(os.listdir('/proc/self/fd')) > 2)
P
cat numbers | wc -c
"#;

#[test]
fn shell_chores_behave_as_in_a_plain_directory() {
    let Some(scene) = scene("calls_chores") else { return };
    let mut results = Vec::new();
    for options in [None, Some(BARE), Some(WITH_SHIM)] {
        fs::remove_dir_all(&scene.over).unwrap();
        fs::create_dir(&scene.over).unwrap();
        let printed = match options {
            None => {
                let done = scene.command("bash").args(["-c", &format!("set -eu\n{CHORES}")]).output().unwrap();
                assert!(done.status.success(), "{done:?}");
                String::from_utf8(done.stdout).unwrap()
            }
            Some(options) => scene.run(options, CHORES).exits(0).stdout,
        };
        let tree: Vec<_> = scene.store_files().into_iter().collect();
        results.push((
            printed,
            tree.into_iter().map(|(path, size)| format!("{} {size}", path.display())).collect::<Vec<_>>(),
        ));
    }
    assert_eq!(results[0].0, results[1].0);
    assert_eq!(results[0].0, results[2].0);
    // The archive has times in it, and directories differ in size.
    assert_eq!(results[0].1, results[1].1);
    assert_eq!(results[0].1, results[2].1);
}

#[test]
fn only_directories_are_there_before_the_drain() {
    let Some(scene) = scene("calls_bare") else { return };
    for options in [BARE, WITH_SHIM] {
        let script = "mkdir -p d/e; echo content > d/e/f; echo more > g; cp g d/h; ln -s g s; touch d/done
            while [ ! -e /mnt/go ]; do sleep 0.05; done; cat d/e/f";
        let mut words = options.to_vec();
        words.extend(["--quiet-period", "1h"]);
        let running = scene.start(&words, script);
        eventually("the script waits", || scene.tier_files().iter().any(|path| path.ends_with("d/done")));
        assert!(scene.path("d/e").is_dir());
        assert_eq!(scene.store_files().len(), 0, "{:?}", scene.store_files());
        assert!(fs::symlink_metadata(scene.path("s")).is_err());
        fs::write("/mnt/go", "").unwrap();
        running.ends().exits(0).prints("content\n");
        scene.holds("d/e/f", b"content\n");
        scene.holds("d/h", b"more\n");
        assert_eq!(fs::read_link(scene.path("s")).unwrap(), Path::new("g"));
        scene.is_clean();
        for name in ["d", "g", "s"] {
            let path = scene.path(name);
            if path.is_dir() { fs::remove_dir_all(path).unwrap() } else { fs::remove_file(path).unwrap() }
        }
        fs::remove_file("/mnt/go").unwrap();
    }
}

/// The agent does not make a directory early if its name was in use before. Regression: after a move out of a removed
/// directory it could not be opened (EAGAIN) until the drain reached it.
#[test]
fn directory_moved_out_of_a_removed_one_opens() {
    let Some(scene) = scene("calls_moved_out") else { return };
    for options in [BARE, WITH_SHIM] {
        let mut words = options.to_vec();
        words.extend(["--quiet-period", "1h"]);
        let script = "mkdir -p d/n e; rmdir d/n; mkdir d/n; mv d/n e/m; rmdir d; ls e/m; touch e/m/f; ls e/m";
        scene.run(&words, script).exits(0).prints("f\n");
        scene.holds("e/m/f", b"");
        assert!(!scene.path("d").exists());
        fs::remove_dir_all(scene.path("e")).unwrap();
    }
}

#[test]
fn stored_files_are_read_changed_and_removed() {
    let Some(scene) = scene("calls_existing") else { return };
    for name in ["read", "append", "replace", "remove", "rename"] {
        fs::write(scene.path(name), format!("{name} as it was\n")).unwrap();
    }
    fs::create_dir(scene.path("dir")).unwrap();
    fs::write(scene.path("dir/inside"), "in a directory\n").unwrap();
    let script = "cat read dir/inside; exec 5< append; echo appended >> append; cat append; cat <&5
        echo replaced > replace; rm remove; mv rename renamed; cat renamed; mv dir moved; cat moved/inside
        [ ! -e remove ] && [ ! -e dir ] && ls";
    scene.run(BARE, script).exits(0).prints(
        "read as it was\nin a directory\nappend as it was\nappended\nappend as it was\nappended\nrename as it was\nin a directory\nappend\nmoved\nread\nrenamed\nreplace\n",
    );
    scene.holds("append", b"append as it was\nappended\n");
    scene.holds("replace", b"replaced\n");
    scene.holds("moved/inside", b"in a directory\n");
    assert!(!scene.path("remove").exists() && !scene.path("dir").exists() && !scene.path("rename").exists());
    scene.is_clean();
}

#[test]
fn static_programs_are_served_and_rings_are_refused() {
    let Some(scene) = scene("calls_static") else { return };
    let source = r#"
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/mman.h>
#include <unistd.h>
int main(void)
{
    char bytes[64] = { 0 };
    mkdir("s", 0755);
    int fd = open("s/file", O_CREAT | O_RDWR, 0640);
    if (write(fd, "static", 6) != 6 || ftruncate(fd, 4096)) return 1;
    char *map = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    memcpy(map + 6, " mapped", 7);
    munmap(map, 4096);
    struct stat a, b;
    if (fstat(fd, &a) || stat("s/file", &b) || a.st_ino != b.st_ino || a.st_dev != b.st_dev) return 2;
    if (fsync(fd) || close(fd)) return 3;
    DIR *dir = opendir("s");
    int names = 0;
    while (readdir(dir)) names++;
    closedir(dir);
    fd = open("s/file", O_RDONLY);
    if (read(fd, bytes, 13) != 13) return 4;
    long ring = syscall(SYS_io_uring_setup, 8, 0);
    printf("%s, %d names, ring: %s\n", bytes, names, ring < 0 ? strerror(errno) : "made");
    return 0;
}
"#;
    let Some(program) = static_program(&scene, "plain", source) else { return };
    scene.run(WITH_SHIM, &program).exits(0).prints("static mapped, 3 names, ring: Function not implemented\n");
    assert_eq!(&scene.read("s/file")[..13], b"static mapped");
}

#[test]
fn programs_and_scripts_run_from_the_directory() {
    let Some(scene) = scene("calls_exec") else { return };
    let script = r#"
printf '#!/bin/sh\necho "script $1"\n' > script; chmod +x script; ./script one
mkdir bin; cp /bin/echo bin/say; ./bin/say two
printf '#!%s/bin/say three\n' "$PWD" > by_other; chmod +x by_other; ./by_other | sed 's:\./.*::'
PATH=$PWD/bin:$PATH; say four
cp /bin/true not; chmod -x not; ./not 2> /dev/null || echo "refused $?"
printf '#!/bin/sh\necho old\n' > again; chmod +x again; ./again; printf '#!/bin/sh\necho new\n' > again; ./again
"#;
    scene.run(BARE, script).exits(0).prints("script one\ntwo\nthree \nfour\nrefused 126\nold\nnew\n");
    let never =
        scene.run(&["--door", "seccomp", "--rule", "kept=keep"], "cp /bin/true kept; ./kept || echo refused $?");
    never.exits(0).prints("refused 126\n");
    assert!(scene.log().contains("executing a file that is never drained"), "{}", scene.log());
}

#[test]
fn paths_outside_the_directory_are_unaffected() {
    let Some(scene) = scene("calls_outside") else { return };
    fs::create_dir("/mnt/outside").unwrap();
    fs::write("/mnt/outside/there", "outside\n").unwrap();
    std::os::unix::fs::symlink("/mnt/project", "/mnt/outside/into").unwrap();
    let script = r#"
cat ../outside/there /mnt/outside/there /mnt/project/../outside/there
ln -s ../outside out; cat out/there; echo more > out/new; cat /mnt/outside/new
echo through > /mnt/outside/into/by_link; cat by_link
mkdir d; cd d; cat ../../outside/there; cd ../../outside; pwd; cat into/by_link; ls ../project
mv there /mnt/project/crossed; [ ! -e there ]; cd -; cat ../crossed
echo stdin | cat /dev/stdin; cat /proc/self/fd/0 < ../by_link; cat <(echo pipe)
python3 -c "
import os
f = open('reopened', 'w+'); f.write('abc'); f.flush()
g = open(f'/proc/self/fd/{f.fileno()}', 'r+'); g.seek(3); g.write('def'); g.close()
print(open('reopened').read(), os.readlink(f'/proc/self/fd/{f.fileno()}'))"
"#;
    scene.run(BARE, script).exits(0).prints(
        "outside\noutside\noutside\noutside\nmore\nthrough\noutside\n/mnt/outside\nthrough\nby_link\nd\nout\n/mnt/project/d\noutside\nstdin\nthrough\npipe\nabcdef /mnt/project/d/reopened\n",
    );
    assert_eq!(fs::read_to_string("/mnt/outside/new").unwrap(), "more\n");
    scene.holds("by_link", b"through\n");
    scene.holds("d/reopened", b"abcdef");
}

#[test]
fn chroot_reaches_the_served_files() {
    let Some(scene) = scene("calls_chroot") else { return };
    let script = r#"
python3 - <<'P'
import os
os.mkdir('jail'); open('jail/seen', 'w').write('seen')
try: os.chroot('jail'); print('entered')
except OSError as e: print('refused', e.errno)
os.chroot('/mnt')
print(open('/project/jail/seen').read(), sorted(os.listdir('/project')))
open('/project/from_inside', 'w').write('from inside')
try: open('/mnt/project/jail/seen'); print('bad')
except FileNotFoundError: print('nothing there')
P
cat from_inside
"#;
    scene.run(BARE, script).exits(0).prints("refused 1\nseen ['jail']\nnothing there\nfrom inside");
    scene.holds("from_inside", b"from inside");
}

#[test]
fn calls_without_the_agent_fail_and_write_nothing() {
    let Some(scene) = scene("calls_killed") else { return };
    let script = "exec 5> log; echo begun >&5; touch ready; : > /mnt/began; trap '' TERM
        while [ ! -e /dev/null/x ] && (echo x > probe) 2> /dev/null; do :; done; echo x > late; echo y >&5";
    let running = scene.start(&["--door", "seccomp", "--no-preload", "--quiet-period", "1h"], script);
    // Outside the directory, because the records of files on the tier may not be written yet.
    eventually("the script runs", || Path::new("/mnt/began").exists());
    scene.kill_agent();
    let ended = running.ends();
    assert_ne!(ended.status.code(), Some(0), "{}", ended.stderr);
    // The shell prints at the same moment, sometimes into the middle of the message.
    ended.says(&[" died; the command sees errors"]);
    scene.await_no_agent();
    scene.drain_what_is_left().exits(0);
    assert!(!scene.path("late").exists(), "written past the agent");
    scene.holds("ready", b"");
}

#[test]
fn threads_forks_and_vforks_are_served_at_once() {
    let Some(scene) = scene("calls_stress") else { return };
    let source = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>
static void nothing(int number) { (void)number; }
static void *work(void *argument)
{
    long me = (long)argument;
    char name[64], other[64], bytes[64];
    for (int round = 0; round < 60; round++) {
        snprintf(name, sizeof name, "t%ld-%d", me, round);
        snprintf(other, sizeof other, "t%ld-%d.moved", me, round);
        int fd = open(name, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0644);
        if (fd < 0) { perror(name); abort(); }
        if (write(fd, name, strlen(name)) < 0) abort();
        pid_t child = round % 2 ? fork() : vfork();
        if (child == 0) {
            struct stat stat_;
            _exit(stat(name, &stat_) || stat_.st_size != (off_t)strlen(name));
        }
        int status;
        if (waitpid(child, &status, 0) != child || status) { fprintf(stderr, "%s: %x\n", name, status); abort(); }
        close(fd);
        if (rename(name, other)) { perror("rename"); abort(); }
        fd = open(other, O_RDONLY);
        ssize_t got = read(fd, bytes, sizeof bytes);
        if (got != (ssize_t)strlen(name) || memcmp(bytes, name, (size_t)got)) { fprintf(stderr, "%s: %zd\n", other, got); abort(); }
        close(fd);
        if (round % 3 && unlink(other)) abort();
    }
    return 0;
}
int main(void)
{
    /* Calls that are interrupted must not be made twice. */
    struct sigaction action = { .sa_handler = nothing, .sa_flags = SA_RESTART };
    sigaction(SIGALRM, &action, 0);
    struct itimerval timer = { { 0, 500 }, { 0, 500 } };
    setitimer(ITIMER_REAL, &timer, 0);
    pthread_t threads[8];
    for (long n = 0; n < 8; n++) pthread_create(&threads[n], 0, work, (void *)n);
    for (int n = 0; n < 8; n++) pthread_join(threads[n], 0);
    puts("done");
    return 0;
}
"#;
    let Some(program) = static_program(&scene, "stress", source) else { return };
    scene.run(BARE, &program).exits(0).prints("done\n");
    let files = scene.store_files();
    assert_eq!(files.len(), 8 * 20, "{files:?}");
    for path in files.keys() {
        let name = path.file_name().unwrap().to_str().unwrap();
        scene.holds(name, name.trim_end_matches(".moved").as_bytes());
    }
}

#[test]
fn unprivileged_user_is_served() {
    let Some(mut scene) = Scene::of_user("calls_user") else { return };
    scene.tier("fast", 64);
    fs::write(scene.path("secret"), "of root").unwrap();
    Command::new("chmod").args(["600", "/mnt/project/secret"]).status().unwrap();
    let script =
        "id -u; mkdir d; cd d; echo mine > f; cat f; cp f g; mv g h; ls; cat ../secret 2> /dev/null || echo denied
        sleep 0.3 & echo background";
    scene.run(BARE, script).exits(0).prints("1000\nmine\nf\nh\ndenied\nbackground\n");
    scene.holds("d/f", b"mine\n");
}

#[test]
fn chosen_door_is_reported() {
    let Some(scene) = scene("calls_auto") else { return };
    let report = "grep -c '^Seccomp:.*2' /proc/self/status || true";
    scene.run(&["--no-preload"], report).exits(0).prints("0\n");
    scene.await_no_agent();
    // No device to mount with.
    crate::scene::mount(&["--bind", "/dev/null", "/dev/fuse"]);
    // A device that cannot be opened. Regression: the doctor ended with "does NOT work here" and 1, while a run
    // worked.
    assert!(Command::new("mknod").args(["-m", "666", "/mnt/none", "c", "240", "240"]).status().unwrap().success());
    crate::scene::mount(&["--bind", "/mnt/none", "/dev/fuse"]);
    let doctor = scene.verb("doctor", &["--tier", "fast=/mnt/tier-fast:60M"]).exits(0).stdout;
    assert!(doctor.contains("works here without a mount: by system calls (seccomp)"), "{doctor}");
    assert!(doctor.contains("surgetank run works here.") && !doctor.contains("BAD"), "{doctor}");
    // The code of `run` decides: the requested door is not available.
    let doctor = scene.verb("doctor", &["--tier", "fast=/mnt/tier-fast:60M", "--door", "fuse"]).exits(1).stdout;
    assert!(doctor.contains("BAD   surgetank run: ") && doctor.contains("/dev/fuse: "), "{doctor}");
    scene.run(&["--door", "fuse"], "true").exits(1).says(&["cannot be served", "/dev/fuse: ", "surgetank doctor"]);
    scene.run(&["--no-preload"], &format!("{report}; echo x > f")).exits(0).prints("1\n");
    scene.await_no_agent();
    scene.holds("f", b"x\n");
    assert!(scene.log().contains("no mount can be made"), "{}", scene.log());
    fs::create_dir("/mnt/elsewhere").unwrap();
    fs::remove_file(scene.path("f")).unwrap();
    let refused = scene.run(&["--store", "/mnt/elsewhere"], "echo x > f");
    assert!(!refused.status.success());
    refused.says(&["cannot be served", "the store has to be the directory itself"]);
    assert!(!scene.path("f").exists());
    crate::scene::succeed(Command::new("umount").arg("/dev/fuse"));
}

#[test]
fn inotify_reports_a_write_before_the_drain() {
    let Some(scene) = scene("calls_watch") else { return };
    let script = r#"
python3 - <<'P'
import ctypes, os, select
libc = ctypes.CDLL(None)
open('f', 'w').close()
queue = libc.inotify_init()
print(libc.inotify_add_watch(queue, b'f', 2), libc.inotify_add_watch(queue, b'absent', 2))
with open('f', 'a') as f: f.write('x')
print(len(select.select([queue], [], [], 10)[0]))
P
# The name is free here and still in use in the store.
mkdir d; rmdir d; mkdir d; cd d; pwd; cd ..; mv d e; cd e; pwd; ln -s /mnt out; ls out/ > /dev/null; echo x > out/../mnt/project/e/g; cat g; cat out/../absent/x 2> /dev/null || echo none
"#;
    let mut options = BARE.to_vec();
    options.extend(["--quiet-period", "1h"]);
    scene.run(&options, script).exits(0).prints("1 -1\n1\n/mnt/project/d\n/mnt/project/e\nx\nnone\n");
}
