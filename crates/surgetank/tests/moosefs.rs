//! A real shared file system as the store: whole runs over a MooseFS mount, and its servers killed in the middle.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::store_node::{Node, ends, stdout_of};
use surgetank_testkit::servers::moosefs::MooseFs;

/// The store is the directory itself.
fn command(node: &Node, at: &Path, script: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_surgetank"));
    command.arg("run").arg("--over").arg(at).arg("--state").arg(node.path("state"));
    command.args(["--tier", &format!("fast={}:1GiB", node.path("fast").display())]);
    command.args(["--", "sh", "-euc", script]).current_dir(at).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs in the directory as other clients see it, without surgetank.
#[track_caller]
fn plainly(at: &Path, script: &str) -> String {
    stdout_of(&Command::new("sh").args(["-euc", script]).current_dir(at).output().unwrap())
}

const WRITES: &str = "
    mkdir -p d/e/f empty
    echo hello >d/hello; chmod 600 d/hello
    setfattr -n user.origin -v run7 d/hello
    touch -d '2020-01-02 03:04:05' d/hello
    head -c 40000000 /dev/urandom >big; ln big hard
    ln -s d/hello link; mkfifo pipe; chmod 2750 d/e/f; echo '#!' >tool; chmod 4711 tool
    i=0; while [ $i -lt 50 ]; do echo $i >d/e/n$i; i=$((i + 1)); done
    mv d/e/n5 d/e/moved; rm d/e/n7; mv empty void
    sha256sum big d/hello d/e/n* >sums
    touch -d '2019-01-02 03:04:05' d/e
";
const LOOKS: &str = "
    sha256sum --check --quiet sums; stat -c '%n %F %a %h %s' big hard d/hello d/e/f pipe tool; stat -c %Y d/hello d/e
    readlink link; ls -A void; ls d/e | wc -l; getfattr --only-values -n user.origin d/hello
";

#[test]
fn run_output_in_moosefs_equals_a_plain_directory() {
    let Some(server) = MooseFs::start() else { return };
    let (ours, plain) = (server.root().join("ours"), server.root().join("plain"));
    fs::create_dir(&ours).unwrap();
    fs::create_dir(&plain).unwrap();
    let node = Node::new();
    // The random bytes differ. Everything else must be the same, seen from outside and by a second run.
    stdout_of(&command(&node, &ours, WRITES).output().unwrap());
    plainly(&plain, WRITES);
    let want = plainly(&plain, LOOKS);
    assert_eq!(plainly(&ours, LOOKS), want);
    assert_eq!(stdout_of(&command(&node, &ours, LOOKS).output().unwrap()), want);
    let changes = "
        echo more >>d/hello; chmod 640 d/hello; echo x >>hard; truncate -s 1 d/e/n1; mv d/e g; rm big; rmdir void
        mv g/moved again; cp d/hello copy; mv copy d/hello";
    stdout_of(&command(&node, &ours, changes).output().unwrap());
    plainly(&plain, changes);
    let looks = "find . ! -type d -printf '%P %m %n %s %y %l\\n' | sort; find . -type d -printf '%P %m\\n' | sort";
    let want = plainly(&plain, looks);
    assert!(want.contains("hard 644 1 40000002 f"), "{want}");
    assert_eq!(plainly(&ours, looks), want);
}

/// Regression: the exchange succeeded, and could then never be drained.
#[test]
fn exchange_of_names_is_refused_on_moosefs() {
    let Some(server) = MooseFs::start() else { return };
    let ours = server.root().join("ours");
    fs::create_dir(&ours).unwrap();
    let exchange = "
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.renameat2(-100, b'a', -100, b'b', 2), os.strerror(ctypes.get_errno()))";
    let script = format!("echo a >a; echo b >b; python3 -c \"{exchange}\"; cat a b");
    let want = "-1 Invalid argument\na\nb\n";
    assert_eq!(stdout_of(&command(&Node::new(), &ours, &script).output().unwrap()), want);
    assert_eq!(plainly(&ours, &script), want);
    assert_eq!(plainly(&ours, "ls -A"), "a\nb\n");
}

/// The change happens within the same second, and MooseFS stores times in whole seconds.
#[test]
fn change_by_another_client_in_moosefs_is_seen() {
    let Some(server) = MooseFs::start() else { return };
    let ours = server.root().join("ours");
    fs::create_dir(&ours).unwrap();
    fs::write(ours.join("theirs"), "old").unwrap();
    let node = Node::new();
    let read = node.path("read");
    let script = format!(
        "cat theirs; echo ours >mine; touch {}; sleep 2; until [ -e go ]; do sleep 0.2; done; cat theirs",
        read.display()
    );
    let run = command(&node, &ours, &script).spawn().unwrap();
    while !read.exists() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    fs::write(ours.join("theirs"), "newer").unwrap();
    fs::write(ours.join("go"), "").unwrap();
    assert_eq!(stdout_of(&ends(run)), "oldnewer");
    assert_eq!(fs::read(ours.join("mine")).unwrap(), b"ours\n");
}

#[test]
fn servers_and_agents_that_are_killed_lose_nothing() {
    let Some(server) = MooseFs::start() else { return };
    let ours = server.root().join("ours");
    fs::create_dir(&ours).unwrap();
    let node = Node::new();
    let script = "
        i=0; while [ $i -lt 60 ]; do echo $i >f$i; head -c 1000000 /dev/urandom >b$i; i=$((i + 1)); sleep 0.05; done
        sha256sum f* b* >sums";
    let run = command(&node, &ours, script).spawn().unwrap();
    for victim in ["chunkserver", "agent", "master", "agent", "chunkserver"] {
        std::thread::sleep(std::time::Duration::from_millis(700));
        if victim == "agent" {
            node.kill_agent();
        } else {
            server.kill(victim);
        }
    }
    stdout_of(&ends(run));
    assert_eq!(plainly(&ours, "sha256sum --check --quiet sums; ls -A | wc -l; wc -l <sums"), "121\n120\n");
}
