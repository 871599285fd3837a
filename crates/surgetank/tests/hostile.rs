//! Other users of the machine, broken programs and planted links can do no harm.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::scene::{Ended, Running, Scene, USER};

/// A user other than the scene's.
const OTHER_USER: u32 = 1001;

/// The command of a run that waits for a signal to continue.
const HELD: &str = "touch /mnt/beside/ready; until [ -e /mnt/beside/go ]; do sleep 0.01; done";

fn prepare(scene: Option<Scene>) -> Option<Scene> {
    let mut scene = scene?;
    scene.tier("fast", 32);
    scene.beside("beside");
    Some(scene)
}

fn held(scene: &Scene, options: &[&str], before: &str, after: &str) -> Running {
    let running = scene.start(options, &format!("{before}\n{HELD}\n{after}"));
    crate::scene::eventually("the run is ready", || Path::new("/mnt/beside/ready").exists());
    running
}

#[track_caller]
fn go_on(running: Running) -> Ended {
    fs::write("/mnt/beside/go", "").unwrap();
    running.ends()
}

/// The directory of the running agent's sockets.
fn place(scene: &Scene) -> PathBuf {
    let places = fs::read_dir(&scene.state).unwrap().map(|entry| entry.unwrap().path());
    places.into_iter().find(|path| path.join("agent.sock").exists()).unwrap()
}

/// Opens the directories above, which otherwise protect the sockets.
fn open_the_way(scene: &Scene, open: bool) {
    for (path, closed, wide) in [
        (scene.state.clone(), 0o700, 0o755),
        (place(scene), 0o700, 0o755),
        (place(scene).join("agent.sock"), 0o600, 0o666),
        (place(scene).join("shim.sock"), 0o600, 0o666),
    ] {
        fs::set_permissions(path, fs::Permissions::from_mode(if open { wide } else { closed })).unwrap();
    }
}

/// Runs python as the given user; returns its output.
#[track_caller]
fn python(user: u32, program: &str, words: &[&str]) -> String {
    let id = user.to_string();
    let output = Command::new("setpriv")
        .args(["--reuid", &id, "--regid", &id, "--clear-groups", "--", "/usr/bin/python3", "-c", program])
        .args(words)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Sends a valid request to both sockets, like a client of the right kind.
const ASK: &str = r#"
import array, socket, struct, sys
place = sys.argv[1]
agent = socket.socket(socket.AF_UNIX)
agent.settimeout(20)
agent.connect(place + "/agent.sock")
try:
    agent.sendall(b'{"hello":{"protocol":2}}\n"status"\n')
    reply = agent.recv(1 << 16)
except (BrokenPipeError, ConnectionResetError):
    reply = b""
print("agent", "answers" if reply else "hangs up")
shim = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
shim.settimeout(20)
shim.connect(place + "/shim.sock")
name = b"secret"
shim.send(struct.pack("=4I3Q2I2q4I", 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, len(name), 0) + name)
answer, ancillary, _, _ = shim.recvmsg(64, 64)
print("shim", "gives" if ancillary else struct.unpack("i", answer[:4])[0])
"#;

fn other_users_get_nothing(scene: Option<Scene>, owner: u32, others: &[u32]) {
    let Some(scene) = prepare(scene) else { return };
    // A process that writes a file of known small size gets a descriptor.
    fs::write("/mnt/small.toml", "[[rules]]\nmatch = \"**\"\nsize = \"1M\"\n").unwrap();
    let options = ["--config", "/mnt/small.toml"];
    let running = held(&scene, &options, "env -u LD_PRELOAD sh -c 'echo mine >secret; chmod 600 secret'", "cat secret");
    open_the_way(&scene, true);
    let place = place(&scene);
    let place = place.to_str().unwrap();
    assert_eq!(
        python(owner, ASK, &[place]),
        "agent answers\nshim gives\n",
        "the owner gets no answer: the test proves nothing"
    );
    for other in others {
        assert_eq!(python(*other, ASK, &[place]), "agent hangs up\nshim -1\n", "user {other}");
    }
    open_the_way(&scene, false);
    go_on(running).exits(0).prints("mine\n");
}

#[test]
fn agent_of_root_answers_no_other_user() {
    other_users_get_nothing(Scene::new("others_root"), 0, &[USER, OTHER_USER]);
}

#[test]
fn agent_of_a_user_answers_no_other_user() {
    other_users_get_nothing(Scene::of_user("others_user"), USER, &[OTHER_USER]);
}

/// At the group's socket a member can read the status and change nothing. Other users cannot read even that.
#[test]
fn group_member_may_read_the_status_and_change_nothing() {
    const GROUP: u32 = 4242;
    let Some(scene) = prepare(Scene::new("group_socket")) else { return };
    let (lab, socket) = ("/mnt/lab", "/mnt/lab/project.sock");
    fs::create_dir(lab).unwrap();
    fs::set_permissions(lab, fs::Permissions::from_mode(0o750)).unwrap();
    std::os::unix::fs::chown(lab, None, Some(GROUP)).unwrap();
    let running = held(&scene, &["--group-socket", socket], "echo mine >file", "");
    let ask = |groups: &str, words: &[&str]| {
        let id = OTHER_USER.to_string();
        let mut command = Command::new("setpriv");
        command.args(["--reuid", &id, "--regid", &id, groups, "--"]).args(words).output().unwrap()
    };
    let status = ["/mnt/surgetank", "status", "--json", "--socket", socket];
    let member = format!("--groups={GROUP}");
    let of_member = |words: &[&str]| {
        let output = ask(&member, words);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(of_member(&status).contains("\"over\": \"/mnt/project\""), "{}", of_member(&status));
    let output = of_member(&["/usr/bin/python3", "-c", EVICT, socket]);
    assert!(output.contains("answers only requests for the status"), "{output}");
    // Even if the permissions admit other users, the agent refuses them.
    for (directory, file) in [(0o750, 0o660), (0o755, 0o666)] {
        fs::set_permissions(lab, fs::Permissions::from_mode(directory)).unwrap();
        fs::set_permissions(socket, fs::Permissions::from_mode(file)).unwrap();
        let output = ask("--clear-groups", &status);
        assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
    }
    // An agent that takes over opens the socket again.
    let pid = scene.agent().unwrap();
    rustix::process::kill_process(rustix::process::Pid::from_raw(pid as i32).unwrap(), rustix::process::Signal::KILL)
        .unwrap();
    crate::scene::eventually("the next agent answers", || {
        let output = ask(&member, &status);
        output.status.success() && !String::from_utf8_lossy(&output.stdout).contains(&format!("\"pid\": {pid},"))
    });
    assert_eq!(fs::metadata(socket).unwrap().mode() & 0o777, 0o660);
    go_on(running).exits(0);
    assert!(!Path::new(socket).exists(), "the socket outlives the agent");
}

const EVICT: &str = r#"
import socket, sys
one = socket.socket(socket.AF_UNIX)
one.settimeout(20)
one.connect(sys.argv[1])
one.sendall(b'{"hello":{"protocol":2}}\n{"evict":{"path":"file"}}\n')
lines = one.makefile()
lines.readline()
print(lines.readline())
"#;

/// Input that is not a request, and clients that never complete a request or never read the answers.
const NONSENSE: &str = r#"
import array, os, random, socket, struct, sys
place, ready, go = sys.argv[1:4]
random.seed(7)
def agent():
    one = socket.socket(socket.AF_UNIX)
    one.settimeout(20)
    one.connect(place + "/agent.sock")
    return one
def shim():
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.connect(place + "/shim.sock")
    return one
def attempt(socket, *packets):
    try:
        for packet in packets:
            socket.send(packet)
    except OSError:
        pass
held = []
hello = b'{"hello":{"protocol":2}}\n'
for text in [b"\0" * 100, b"\n" * 1000, b"[" * 100000 + b"\n", b"x" * (3 << 20), b'{"hello":', hello + b'{"join":{"pid":1,',
             hello + b'{"why":{"path":"' + b"a" * 900000 + b'"}}\n', hello + b'{"join":{"pid":4294967295,"command":"\\u0000"}}\n',
             hello + b'{"evict":{"path":"../../../etc/passwd"}}\n', hello + b'{"prefetch":{"patterns":["' + b"{a," * 2000 + b'"]}}\n',
             random.randbytes(100000)]:
    one = agent()
    attempt(one, text)
    one.close()
for n in range(30):
    one = agent()
    attempt(one, hello[:random.randrange(len(hello))])
    held.append(one)
# Sends a thousand requests and never reads the answers.
one = agent()
one.setblocking(False)
attempt(one, hello, *[b'"status"\n'] * 1000)
held.append(one)
request = struct.Struct("=4I3Q2I2q4I")
def ask(op, name, length, **with_):
    return request.pack(op, with_.get("flags", 0), 0, 0xffffffff, with_.get("dir", 1), 0, 0, 0, 0, 0, 0, 0, 0, length, 0) + name
for packet in [b"", b"x", b"x" * 95, ask(1, b"", 0), ask(1, b"a/b", 3), ask(1, b"..", 2), ask(1, b".", 1), ask(1, b"a\0b", 3), ask(1, b"a", 5000),
               ask(1, b"a", 0xffffffff), ask(1, b"n" * 255, 255), ask(1, b"n" * 300, 300), ask(1, b"n" * 60000, 60000),
               ask(99, b"", 0), ask(0, b"", 0), ask(2, b"", 0), ask(3, b"", 0), ask(1, b"f", 1, dir=0), ask(1, b"f", 1, dir=2**64 - 1),
               ask(1, b"f", 1, flags=0xffffffff)]:
    one = shim()
    attempt(one, packet)
    one.close()
for n in range(500):
    one = shim()
    attempt(one, random.randbytes(random.randrange(200)))
    attempt(one, ask(random.randrange(5), b"f", 1, flags=random.getrandbits(32) & ~0o100, dir=random.getrandbits(64)))
    one.close()
# Descriptors that the agent does not expect.
for n in range(200):
    one = shim()
    try:
        one.sendmsg([ask(1, b"missing", 7)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 50))])
    except OSError:
        pass
    one.close()
one = shim()
one.setblocking(False)
attempt(one, *[ask(1, b"kept", 4)] * 5000)
held.append(one)
held += [shim() for n in range(50)]
open(ready, "w").close()
import time
while not os.path.exists(go):
    time.sleep(0.01)
"#;

fn descriptors(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

#[test]
fn garbage_and_idle_connections_leave_the_agent_working() {
    let Some(scene) = prepare(Scene::new("nonsense")) else { return };
    let running = held(&scene, &[], "echo kept >kept", "cat kept; cat served | wc -l");
    let agent = scene.agent().unwrap();
    let before = descriptors(agent);
    let place = place(&scene);
    let mut sender = Command::new("python3")
        .args(["-c", NONSENSE, place.to_str().unwrap(), "/mnt/beside/sent", "/mnt/beside/enough"])
        .spawn()
        .unwrap();
    crate::scene::eventually("all of it was sent", || {
        assert!(sender.try_wait().unwrap().is_none_or(|status| status.success()), "the sender failed");
        Path::new("/mnt/beside/sent").exists()
    });
    // All idle connections are still open, and the agent serves other clients at once.
    let served = "for n in $(seq 20); do python3 -c 'open(\"served\", \"a\").write(\"x\\n\")'; done";
    scene.run(&[], served).exits(0);
    scene.verb("status", &[scene.over.to_str().unwrap()]).exits(0);
    assert_eq!(scene.agent(), Some(agent), "another agent took over");
    fs::write("/mnt/beside/enough", "").unwrap();
    assert!(sender.wait().unwrap().success());
    crate::scene::eventually("the descriptors of the clients are closed", || descriptors(agent) <= before + 4);
    go_on(running).exits(0).prints("kept\n20\n");
    scene.holds("kept", b"kept\n");
}

/// Also without a umask.
#[test]
fn state_tiers_and_index_are_for_the_user_alone() {
    let Some(scene) = prepare(Scene::new("private")) else { return };
    // SAFETY: no other thread of this process makes files meanwhile.
    unsafe { libc::umask(0) };
    let running = held(&scene, &[], "mkdir d; echo x >d/f", "true");
    let index = fs::read_dir("/dev/shm").unwrap().map(|entry| entry.unwrap().path());
    let index: Vec<PathBuf> = index.filter(|path| path.extension().is_some_and(|kind| kind == "index")).collect();
    assert_eq!(index.len(), 1, "{index:?}");
    let mut tier = fs::read_dir("/mnt/tier-fast").unwrap().map(|entry| entry.unwrap().path());
    let files = tier.find(|path| path.join("d/f").exists()).unwrap();
    for path in [&scene.state, &place(&scene), Path::new("/mnt/tier-fast/surgetank-0"), &files, &index[0]] {
        let meta = fs::metadata(path).unwrap();
        assert_eq!((meta.mode() & 0o077, meta.uid()), (0, 0), "{}", path.display());
    }
    for entry in fs::read_dir(place(&scene)).unwrap() {
        let path = entry.unwrap().path();
        let meta = fs::symlink_metadata(&path).unwrap();
        assert!(meta.is_dir() || meta.is_socket() || meta.mode() & 0o022 == 0, "{} can be written", path.display());
    }
    go_on(running).exits(0);
}

trait Socket {
    fn is_socket(&self) -> bool;
}
impl Socket for fs::Metadata {
    fn is_socket(&self) -> bool {
        std::os::unix::fs::FileTypeExt::is_socket(&self.file_type())
    }
}

#[test]
fn tier_prepared_by_another_user_is_refused() {
    let Some(scene) = prepare(Scene::new("prepared_tier")) else { return };
    let outside = scene.beside("outside");
    let ours = Path::new("/mnt/tier-fast/surgetank-0");
    symlink(&outside, ours).unwrap();
    scene.run(&[], "echo x >f").exits(1).says(&["/mnt/tier-fast/surgetank-0"]);
    fs::remove_file(ours).unwrap();
    fs::create_dir(ours).unwrap();
    fs::set_permissions(ours, fs::Permissions::from_mode(0o777)).unwrap();
    scene.run(&[], "echo x >f").exits(1).says(&["/mnt/tier-fast/surgetank-0"]);
    fs::set_permissions(ours, fs::Permissions::from_mode(0o700)).unwrap();
    std::os::unix::fs::chown(ours, Some(OTHER_USER), None).unwrap();
    scene.run(&[], "echo x >f").exits(1).says(&["/mnt/tier-fast/surgetank-0"]);
    std::os::unix::fs::chown(ours, Some(0), None).unwrap();
    // (Other users cannot guess the end of the name.)
    scene.run(&[], "true").exits(0);
    let mut places = fs::read_dir(&scene.state).unwrap().map(|entry| entry.unwrap().path());
    let identity = fs::read(places.find(|path| path.is_dir()).unwrap().join("identity.json")).unwrap();
    let identity: serde_json::Value = serde_json::from_slice(&identity).unwrap();
    let files = format!("/mnt/tier-fast/surgetank-0-{}", identity["key"].as_str().unwrap());
    symlink(&outside, &files).unwrap();
    scene.run(&[], "echo x >f").exits(1).says(&[&*files, "symbolic link"]);
    assert_eq!(fs::read_dir(outside).unwrap().count(), 0);
    assert!(!scene.path("f").exists());
}

/// The kernel follows the links, as everywhere. The agent only handles the links themselves.
fn links_that_lead_out(name: &str, options: &[&str]) {
    let Some(scene) = prepare(Scene::new(name)) else { return };
    let outside = scene.beside("outside");
    fs::write(outside.join("victim"), "victim").unwrap();
    fs::write(outside.join("written"), "").unwrap();
    let script = "
            ln -s ../outside up; ln -s /mnt/outside there; ln -s ../outside/victim victim; ln -s ../../../../../../etc/passwd far
            mkdir d; ln -s ../../outside d/up
            cat victim; echo by the kernel >there/written; cat up/written
            ln -s /mnt/outside/new dangling; echo made >dangling
            cp -a d e; mv victim moved; rm -r d; chmod 600 moved; touch -h -d 2001-01-01 moved
            ln moved hard; rm moved; echo over >rule; mv -T rule hard
            ls; readlink up there far dangling e/up";
    let all = "victimby the kernel\ndangling\ne\nfar\nhard\nthere\nup\n../outside\n/mnt/outside\n../../../../../../etc/passwd\n/mnt/outside/new\n../../outside\n";
    scene.run(options, script).exits(0).prints(all);
    let read = |name: &str| fs::read_to_string(outside.join(name)).unwrap();
    assert_eq!(
        (read("victim"), read("written"), read("new")),
        ("victim".into(), "by the kernel\n".into(), "made\n".into())
    );
    assert_eq!(fs::metadata(outside.join("victim")).unwrap().mode() & 0o777, 0o600, "chmod follows");
    assert_eq!(fs::read_link(scene.path("far")).unwrap(), Path::new("../../../../../../etc/passwd"));
    assert_eq!(fs::read_link(scene.path("e/up")).unwrap(), Path::new("../../outside"));
    assert_eq!(scene.read("hard"), b"over\n");
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 3);
}

#[test]
fn outward_links_are_followed_by_the_kernel_through_the_mount() {
    links_that_lead_out("links_out_mount", &["--no-preload"]);
}

#[test]
fn outward_links_are_followed_by_the_kernel_with_the_shim() {
    links_that_lead_out("links_out_shim", &[]);
}

#[test]
fn outward_links_are_followed_by_the_kernel_without_a_mount() {
    links_that_lead_out("links_out_seccomp", &["--door", "seccomp"]);
}

/// A directory of the store becomes a link to another directory between two operations of a program.
#[test]
fn planted_link_in_the_store_is_not_followed() {
    let Some(scene) = prepare(Scene::new("planted_store")) else { return };
    let outside = scene.beside("outside");
    fs::write(outside.join("old"), "theirs").unwrap();
    fs::create_dir(scene.path("d")).unwrap();
    fs::write(scene.path("d/old"), "ours").unwrap();
    let running = held(
        &scene,
        &[],
        "ls d >/dev/null; exec 3>d/open; echo before >d/before",
        "echo after >&3; exec 3>&-; echo x >d/after || true; echo y >d/old || true; rm -f d/before || true; mkdir d/e || true",
    );
    fs::rename(scene.path("d"), scene.path("aside")).unwrap();
    symlink(&outside, scene.path("d")).unwrap();
    let ended = go_on(running);
    let found: Vec<_> = fs::read_dir(&outside).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(found, ["old"], "{}", ended.stderr);
    assert_eq!(fs::read(outside.join("old")).unwrap(), b"theirs", "{}", ended.stderr);
    assert!(fs::read_link(scene.path("d")).is_ok());
    assert_eq!(ended.status.code(), Some(3), "a file without a place was lost without a report: {}", ended.stderr);
}

/// The same in a tier: the new file gets another place.
#[test]
fn planted_link_in_a_tier_is_not_followed() {
    let Some(scene) = prepare(Scene::new("planted_tier")) else { return };
    let outside = scene.beside("outside");
    let running = held(
        &scene,
        &[],
        "mkdir d; echo before >d/before; exec 3>d/open",
        "echo after >&3; exec 3>&-; echo x >d/after; cat d/after",
    );
    let mut tier = fs::read_dir("/mnt/tier-fast").unwrap().map(|entry| entry.unwrap().path());
    let files = tier.find(|path| path.join("d/open").exists()).unwrap();
    let dir = files.join("d");
    fs::rename(&dir, files.join("aside")).unwrap();
    symlink(&outside, &dir).unwrap();
    let ended = go_on(running);
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 0, "{}", ended.stderr);
    assert_eq!(ended.stdout, "x\n", "{}", ended.stderr);
}

/// Files in a file system that a program mounts inside are not drained, and no file of the run is lost.
#[test]
fn mount_inside_the_mount_is_not_changed() {
    let Some(scene) = prepare(Scene::new("mount_inside")) else { return };
    let script = "mkdir d; echo below >d/below
        mount -t tmpfs none d; echo inside >d/inside; ls d; mv d/inside out; umount d; ls d; cat out
        mkdir again; mount --bind . again; echo twice >again/twice; cat twice; umount again";
    scene.run(&["--no-preload"], script).exits(0).prints("inside\nbelow\ninside\ntwice\n");
    scene.holds("d/below", b"below\n");
    scene.holds("out", b"inside\n");
    scene.holds("twice", b"twice\n");
    assert!(!scene.path("d/inside").exists());
}

/// Regression: a mount that a program left kept the agent from unmounting. The agent tried indefinitely, and the run
/// never ended.
#[test]
fn run_ends_when_a_program_leaves_a_mount_behind() {
    let Some(scene) = prepare(Scene::new("mount_left")) else { return };
    let script = "mkdir d e; echo below >d/below; mount -t tmpfs none d; echo inside >d/inside; mount -t tmpfs none d; mkdir d/deep
        mount -t tmpfs none d/deep; mount --bind . e";
    scene.run(&["--no-preload"], script).exits(0);
    scene.holds("d/below", b"below\n");
    scene.run(&["--no-preload"], "cat d/below; ls e").exits(0).prints("below\n");
}
