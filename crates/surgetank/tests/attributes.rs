//! Hints and queries as extended attributes, through each door to the agent.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use crate::scene::Scene;

const PROGRAM: &str = r#"
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def attempt(what, *words, **more):
    try: print(what(*words, **more))
    except OSError as error: print(errno.errorcode[error.errno])
def asked(path, name, room):
    buffer = ctypes.create_string_buffer(room + 1)
    got = libc.getxattr(path, name, buffer if room else None, room)
    print(room, got, errno.errorcode[ctypes.get_errno()] if got < 0 else buffer.raw[:got] if room else '-')
def set_attribute(path, name, value, size):
    print(libc.setxattr(path, name, value, size, 0) and errno.errorcode[ctypes.get_errno()])
with open('f', 'w') as f: f.write('x')
mode, state = 'user.surgetank.hint.mode', 'user.surgetank.state'
attempt(os.getxattr, 'f', mode)
attempt(os.setxattr, 'f', mode, b'keep')
for room in (0, 1, 3, 4, 100): asked(b'f', mode.encode(), room)
attempt(os.getxattr, 'f', state)
attempt(os.setxattr, 'f', state, b'durable')
attempt(os.setxattr, 'f', mode, b'no such mode')
attempt(os.setxattr, 'f', mode, b'copy', os.XATTR_CREATE)
attempt(os.getxattr, 'f', 'user.surgetank.none')
attempt(os.getxattr, 'f', 'user.other')
attempt(os.setxattr, 'f', 'user.other', b'1' * 2000)
attempt(lambda: len(os.getxattr('f', 'user.other')))
attempt(os.listxattr, 'f')
attempt(os.getxattr, 'absent', mode)
attempt(os.getxattr, 'f/below', mode)
os.symlink('f', 'l')
attempt(os.getxattr, 'l', mode)
attempt(os.getxattr, 'l', mode, follow_symlinks=False)
attempt(os.getxattr, f'/proc/self/fd/{os.open("f", os.O_RDONLY)}', mode)
# Memory that does not belong to the program.
for bad in (8, 1 << 46): set_attribute(b'f', mode.encode(), ctypes.c_void_p(bad), 4)
set_attribute(b'f', ctypes.c_void_p(8), b'keep', 4)
set_attribute(b'f', mode.encode(), b'move', 4)
attempt(os.getxattr, 'f', mode)
# Of a file that is made again, and of a file in the store.
os.unlink('f'); open('f', 'w').close()
attempt(os.getxattr, 'f', mode)
attempt(os.getxattr, 'old', state)
attempt(os.setxattr, 'old', 'user.surgetank.hint.pin', b'true')
attempt(os.getxattr, 'old', 'user.surgetank.hint.pin')
"#;

fn prepare(name: &str) -> Option<Scene> {
    let mut scene = Scene::new(name)?;
    scene.tier("fast", 64);
    std::fs::write(scene.path("old"), b"theirs").unwrap();
    std::fs::write(scene.beside("beside").join("attributes.py"), PROGRAM).unwrap();
    Some(scene)
}

/// The output of a file system without the shim, except for surgetank's own names.
const EXPECTED: &str = r#"ENODATA
None
0 4 -
1 -1 ERANGE
3 -1 ERANGE
4 4 b'keep'
100 4 b'keep'
b'kept'
EPERM
EINVAL
EEXIST
ENODATA
ENODATA
None
2000
['user.other']
ENOENT
ENOTDIR
b'keep'
ENODATA
b'keep'
EFAULT
EFAULT
EFAULT
0
b'move'
ENODATA
b'evicted'
None
b'true'
"#;

#[track_caller]
fn prints_the_same(name: &str, options: &[&str]) {
    let Some(scene) = prepare(name) else { return };
    let ended = scene.run(options, "python3 /mnt/beside/attributes.py").exits(0);
    assert_eq!(ended.stdout, EXPECTED, "{}", ended.stderr);
    scene.is_clean();
}

#[test]
fn mount_serves_attributes() {
    prints_the_same("attributes-mount", &["--no-preload"]);
}

#[test]
fn shim_serves_the_attributes_of_the_mount() {
    prints_the_same("attributes-shim", &[]);
}

#[test]
fn seccomp_serves_the_attributes_of_the_mount() {
    prints_the_same("attributes-seccomp", &["--door", "seccomp"]);
}

/// Regression: through the mount each tag took a look-up and a request of its own.
#[test]
fn tag_on_a_new_file_needs_few_mount_requests() {
    let Some(scene) = prepare("attributes-requests") else { return };
    let script = "
        cat >/mnt/beside/tag.py <<'P'
import os
for number in range(20):
    with open(f'f{number}', 'w') as f: f.write('x')
    os.setxattr(f'f{number}', 'user.surgetank.hint.mode', b'keep')
    assert os.getxattr(f'f{number}', 'user.surgetank.hint.mode') == b'keep'
    assert os.getxattr(f'f{number}', 'user.surgetank.tier') == b'fast'
    os.setxattr(f'f{number}', 'user.pattern', b'pipeline')
    assert os.getxattr(f'f{number}', 'user.pattern') == b'pipeline'
P
        traced() { strace -f -e trace=setxattr,getxattr -o /mnt/beside/calls \"$@\" python3 /mnt/beside/tag.py && grep xattr /mnt/beside/calls | wc -l; }
        traced && rm f* && traced env -u LD_PRELOAD";
    // (For files in the store the shim asks the mount: a hint might change their state.)
    let ended = scene.run(&["--rule", "**=keep", "--keep-at-exit", "drop"], script).exits(0);
    // (The shim's index does not list a file that is being sealed at that moment.)
    let counted: Vec<u64> = ended.stdout.lines().map(|line| line.trim().parse().unwrap()).collect();
    let [with_shim, without] = counted[..] else { panic!("{}", ended.stdout) };
    assert_eq!(without, 100, "all of them are system calls without the shim");
    assert!(with_shim <= 20, "{with_shim} of 100 by the mount");
}

/// Regression: `cp -a` gives each file an ACL, which the mount does not have. It answered that after three requests.
#[test]
fn acl_of_a_copied_file_needs_no_mount_request() {
    let Some(scene) = prepare("attributes-acl") else { return };
    let script = "
        over=$PWD; mkdir /mnt/beside/from && cd /mnt/beside/from && for n in $(seq 20); do echo $n >f$n; chmod 604 f$n; done
        traced() { strace -f -e trace=setxattr,fsetxattr -o /mnt/beside/calls \"$@\" && grep -c xattr /mnt/beside/calls; }
        cd $over; traced cp -a /mnt/beside/from with; traced env -u LD_PRELOAD cp -a /mnt/beside/from without
        stat -c %a with/f7 without/f7; cat with/f7 without/f7; python3 - <<'P'
import errno, os
for act in (lambda: os.setxattr('with/f7', 'system.posix_acl_access', b'x'), lambda: os.getxattr('with/f7', 'system.posix_acl_access')):
    try: act()
    except OSError as why: print(why.errno == errno.EOPNOTSUPP)
P";
    let ended = scene.run(&["--rule", "**=keep", "--keep-at-exit", "drop"], script).exits(0);
    let lines: Vec<&str> = ended.stdout.lines().collect();
    let [with_shim, without, rest @ ..] = &lines[..] else { panic!("{}", ended.stdout) };
    assert_eq!(rest, ["604", "604", "7", "7", "True", "True"]);
    let (with_shim, without): (u64, u64) = (with_shim.parse().unwrap(), without.parse().unwrap());
    assert!(with_shim <= 4 && without >= 20, "{with_shim} and {without} calls of the kernel for 20 files");
}
