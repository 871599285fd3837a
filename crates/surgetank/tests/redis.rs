//! A store of values behind the mount: whole runs against a real Redis server.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]
#![cfg(feature = "redis")]

use std::fs;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use crate::store_node::{LIMIT, Node, ends, stdout_of};
use surgetank_testkit::servers::redis::RedisServer;

/// Files, links and directories' own objects below the prefix.
fn values(server: &RedisServer) -> Vec<String> {
    let keys = server.cli(&["KEYS", "p:*"]);
    let mut keys: Vec<String> =
        keys.lines().filter(|key| !key.is_empty() && !key.contains("//surgetank/")).map(str::to_owned).collect();
    keys.retain(|key| key != "p:.surgetank-store");
    keys.sort();
    keys
}

fn command(node: &Node, server: &RedisServer, options: &[&str], script: &str) -> Command {
    node.command(&server.url("p:"), options, script)
}

#[track_caller]
fn run(node: &Node, server: &RedisServer, script: &str) -> String {
    stdout_of(&command(node, server, &[], script).output().unwrap())
}

const WRITES: &str = "
    mkdir -p d/e/f empty
    echo hello >d/hello; chmod 600 d/hello
    setfattr -n user.origin -v run7 d/hello
    touch -d '2020-01-02 03:04:05.123456789' d/hello
    head -c 40000000 /dev/urandom >big
    ln -s d/hello link; mkfifo pipe; chmod 750 d/e/f
    i=0; while [ $i -lt 50 ]; do echo $i >d/e/n$i; i=$((i + 1)); done
    mv d/e/n5 d/e/moved; rm d/e/n7; mv empty void
    printf 'odd' >\"d/a b+c%41 ü&<>\"; printf 'x' >'d/[a]*?\\x'
    sha256sum big d/hello d/e/n* d/a* >sums
";

#[test]
fn run_output_is_on_the_server_and_reads_back() {
    let Some(server) = RedisServer::start() else { return };
    run(&Node::new(), &server, WRITES);
    assert_eq!(server.cli(&["GET", "p:d/hello"]), "hello");
    assert_eq!(server.cli(&["GET", "p:link"]), "d/hello");
    assert_eq!(server.cli(&["GET", "p:d/a b+c%41 ü&<>"]), "odd");
    assert_eq!(server.cli(&["GET", "p:d/[a]*?\\x"]), "x");
    assert_eq!(server.cli(&["STRLEN", "p:big"]), "40000000");
    let keys = values(&server);
    assert!(!keys.iter().any(|key| key == "p:d/e/n5" || key == "p:d/e/n7" || key.contains("-tmp-")), "{keys:?}");
    // Another node, which has no state of these files.
    let seen = run(
        &Node::new(),
        &server,
        "sha256sum --check --quiet sums; stat -c '%a %Y %y %s' d/hello; readlink link; ls -A void; ls d/e | wc -l
         getfattr --only-values -n user.origin d/hello; echo; cat link; stat -c '%F %a' pipe d/e/f; cat d/[[]*",
    );
    let lines: Vec<&str> = seen.lines().collect();
    assert!(lines[0].starts_with("600 ") && lines[0].contains(".123456789 ") && lines[0].ends_with(" 6"), "{seen}");
    assert_eq!(lines[1..], ["d/hello", "50", "run7", "hello", "fifo 644", "directory 750", "x"], "{seen}");
    // Changes of stored files only: names, content, attributes, directories.
    run(
        &Node::new(),
        &server,
        "mv d/e g; echo more >>d/hello; chmod 640 d/hello; rm big; mv g/moved again; rmdir void; truncate -s 1 g/n1",
    );
    let seen = run(
        &Node::new(),
        &server,
        "cat d/hello; stat -c %a d/hello; ls; ls g | wc -l; cat again; wc -c <g/n1; getfattr --only-values -n user.origin d/hello",
    );
    assert_eq!(seen, "hello\nmore\n640\nagain\nd\ng\nlink\npipe\nsums\n49\n5\n1\nrun7");
    let left = server.cli(&["KEYS", "p://surgetank/*"]);
    assert_eq!(
        left.lines().filter(|key| !key.is_empty()).count(),
        2,
        "records and index, and nothing half done: {left}"
    );
}

#[test]
fn values_of_other_clients_are_shown_and_never_overwritten() {
    let Some(server) = RedisServer::start() else { return };
    server.cli(&["MSET", "p:in/a", "one", "p:in/b", "two", "elsewhere", "no"]);
    let node = Node::new();
    let seen = run(&node, &server, "ls; cat in/a in/b; echo three >>in/b; rm in/a; echo ours >in/c");
    assert_eq!(seen, "in\nonetwo");
    assert_eq!((server.cli(&["GET", "p:in/b"]), server.cli(&["EXISTS", "p:in/a"])), ("twothree".into(), "0".into()));
    // After the drain has checked the name and before it writes, another client sets the value: both values stay.
    let script = format!("cat in/c; echo mine >in/c; sleep 0.5; redis-cli -p {} SET p:in/c theirs", server.port());
    let output = command(&Node::new(), &server, &[], &script).env("SURGETANK_HOLD", "store.publish:1500").output();
    let seen = String::from_utf8(output.unwrap().stdout).unwrap();
    assert_eq!((seen.as_str(), server.cli(&["GET", "p:in/c"])), ("ours\nOK\n", "theirs".into()));
    let keys = values(&server);
    let conflict: Vec<&String> = keys.iter().filter(|key| key.contains("c.surgetank-conflict-")).collect();
    assert_eq!(conflict.len(), 1, "{keys:?}");
    assert_eq!(server.cli(&["GET", conflict[0]]), "mine");
}

/// Regression: after the rename each file is another value, and the drain took the overwritten one for another
/// client's.
#[test]
fn file_of_a_renamed_directory_can_be_overwritten() {
    let Some(server) = RedisServer::start() else { return };
    let surgetank = env!("CARGO_BIN_EXE_surgetank");
    let script = format!(
        "mkdir d; echo one >d/f; echo one >d/g; {surgetank} wait .; mv d e; {surgetank} wait .; echo two >e/f; mv e/g e/h"
    );
    run(&Node::new(), &server, &script);
    assert_eq!(values(&server), ["p:e/", "p:e/f", "p:e/h"]);
    let script = format!("cat e/f; stat -c %s e/h; mv e d; {surgetank} wait .; cat d/f; echo three >d/f; rm d/h");
    assert_eq!(run(&Node::new(), &server, &script), "two\n4\ntwo\n");
    assert_eq!(values(&server), ["p:d/", "p:d/f"]);
    assert_eq!(server.cli(&["GET", "p:d/f"]), "three");
}

#[test]
fn restarted_server_has_every_file_in_the_end() {
    let Some(mut server) = RedisServer::start() else { return };
    let node = Node::new();
    let script =
        "i=0; while [ $i -lt 300 ]; do echo $i >f$i; i=$((i + 1)); sleep 0.005; done; head -c 30000000 /dev/zero >big";
    let child = command(&node, &server, &[], script).spawn().unwrap();
    let begun = Instant::now();
    while values(&server).len() < 20 {
        assert!(begun.elapsed() < LIMIT);
        std::thread::sleep(Duration::from_millis(5));
    }
    server.kill();
    std::thread::sleep(Duration::from_secs(2));
    server.restart();
    stdout_of(&ends(child));
    assert_eq!(values(&server).len(), 301);
    assert_eq!(server.cli(&["GET", "p:f299"]), "299");
}

/// Regression: `mkdir` of a new name waited two minutes for a server that was down or stopped, whatever `--retry`
/// was.
#[test]
fn mkdir_needs_no_server_or_waits_as_long_as_retry() {
    for asleep in [false, true] {
        let Some(mut server) = RedisServer::start() else { return };
        let node = Node::new();
        let surgetank = env!("CARGO_BIN_EXE_surgetank");
        let script = format!(
            "mkdir -p made/sub; echo 1 >made/a; {surgetank} wait .; touch {0}/ready; until [ -e {0}/away ]; do sleep 0.1; done
             mkdir made/new made/sub/new made/new/deep; echo 2 >made/new/b; mv made/a made/sub/; ls made made/sub
             timeout 40 mkdir new || echo \"mkdir gives $?\"",
            node.path("").display()
        );
        let child = command(&node, &server, &["--retry", "1s"], &script).spawn().unwrap();
        let begun = Instant::now();
        while !node.path("ready").exists() {
            assert!(begun.elapsed() < LIMIT);
            std::thread::sleep(Duration::from_millis(5));
        }
        if asleep {
            server.sleep(true)
        } else {
            server.kill()
        }
        fs::write(node.path("away"), "").unwrap();
        let output = ends(child);
        let (seen, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert_eq!(seen, "made:\nnew\nsub\n\nmade/sub:\na\nnew\nmkdir gives 1\n", "{errors}");
        assert_eq!(output.status.code(), Some(3), "{errors}");
        if asleep {
            server.sleep(false)
        } else {
            server.restart()
        }
        run(&node, &server, "true");
        let keys = values(&server);
        assert_eq!(
            keys,
            [
                "p:made/",
                "p:made/new/",
                "p:made/new/b",
                "p:made/new/deep/",
                "p:made/sub/",
                "p:made/sub/a",
                "p:made/sub/new/"
            ]
        );
    }
}

/// Regression: a program that handles a signal while the agent fetches a file for it got EINTR from `open` or `read`.
#[test]
fn signals_do_not_interrupt_reads_during_a_fetch() {
    let Some(server) = RedisServer::start() else { return };
    run(&Node::new(), &server, "head -c 30000000 /dev/zero >read; cp read written");
    let node = Node::new();
    let program = "
import ctypes, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
signal.signal(signal.SIGALRM, lambda *_: None)
signal.siginterrupt(signal.SIGALRM, False)
def check(name, got):
    print(name, os.strerror(ctypes.get_errno()) if got < 0 else 'succeeds', flush=True)
    return got
signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
file = check('open', libc.open(b'read', os.O_RDONLY))
buffer = ctypes.create_string_buffer(1 << 20)
open(sys.argv[1] + '/ready', 'w').close()
while not os.path.exists(sys.argv[1] + '/away'): pass
check('read', libc.pread(file, buffer, len(buffer), ctypes.c_long(20_000_000)))
check('open to write', libc.open(b'written', os.O_RDWR))
# Python resets the signal's action before it ends.
signal.setitimer(signal.ITIMER_REAL, 0)
";
    fs::write(node.path("signals.py"), program).unwrap();
    let script = format!("python3 {0}/signals.py {0}", node.path("").display());
    let child = command(&node, &server, &[], &script).spawn().unwrap();
    let begun = Instant::now();
    while !node.path("ready").exists() {
        assert!(begun.elapsed() < LIMIT);
        std::thread::sleep(Duration::from_millis(5));
    }
    // Both calls wait for the stopped server while signals arrive.
    server.sleep(true);
    fs::write(node.path("away"), "").unwrap();
    std::thread::sleep(Duration::from_secs(1));
    server.sleep(false);
    assert_eq!(stdout_of(&ends(child)), "open succeeds\nread succeeds\nopen to write succeeds\n");
}

#[test]
fn killed_agent_leaves_no_partial_file() {
    let Some(server) = RedisServer::start() else { return };
    let node = Node::new();
    let slow = node.path("slow.toml");
    fs::write(&slow, "drain_bytes_per_second_max = \"30MiB/s\"\n").unwrap();
    let script = "i=0; while [ $i -lt 100 ]; do echo $i >f$i; i=$((i + 1)); done
                  head -c 100000000 /dev/urandom >big; sha256sum big >sums; sleep 1";
    let mut child = command(&node, &server, &["--config", slow.to_str().unwrap()], script).spawn().unwrap();
    let begun = Instant::now();
    let mut kills = 0;
    while child.try_wait().unwrap().is_none() {
        assert!(begun.elapsed() < LIMIT, "the run does not end");
        let size = server.cli(&["STRLEN", "p:big"]);
        assert!(size == "0" || size == "100000000", "a partial file is visible: {size}");
        if kills < 3 && node.has_uploads() {
            std::thread::sleep(Duration::from_millis(300));
            kills += u32::from(node.kill_agent());
            std::thread::sleep(Duration::from_millis(200));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    stdout_of(&child.wait_with_output().unwrap());
    assert!(kills > 0);
    assert!(!node.has_uploads(), "a record of an upload remains after its end");
    assert_eq!(values(&server).len(), 102);
    let mut raw = server.cli_bytes(&["--raw", "GET", "p:big"]);
    raw.pop();
    let big = node.path("read-back");
    fs::write(&big, raw).unwrap();
    let sum = Command::new("sha256sum").arg(&big).output().unwrap();
    assert_eq!(
        server.cli(&["GET", "p:sums"]).split(' ').next(),
        String::from_utf8_lossy(&sum.stdout).split(' ').next()
    );
    let left = server.cli(&["KEYS", "p://surgetank/*"]);
    assert_eq!(left.lines().filter(|key| !key.is_empty()).count(), 2, "{left}");
}

fn failed(output: &Output) -> String {
    assert!(!output.status.success(), "the command must fail");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn password_is_read_from_the_environment_and_never_shown() {
    let Some(server) = RedisServer::start() else { return };
    server.cli(&["CONFIG", "SET", "requirepass", "the-right-one"]);
    let node = Node::new();
    let right = command(&node, &server, &[], "echo x >x").env("REDISCLI_AUTH", "the-right-one").output().unwrap();
    stdout_of(&right);
    for (password, word) in [("hunter2", "WRONGPASS"), ("", "NOAUTH")] {
        let output = command(&Node::new(), &server, &[], "true").env("REDISCLI_AUTH", password).output().unwrap();
        let text = failed(&output);
        assert!(text.contains(word) && text.contains("REDISCLI_AUTH") && !text.contains("hunter2"), "{text}");
    }
    let url = format!("redis://me:hunter2@127.0.0.1:{}", server.port());
    let text = failed(&Node::new().command(&url, &[], "true").output().unwrap());
    assert!(text.contains("REDISCLI_AUTH") && !text.contains("hunter2"), "{text}");
    for place in fs::read_dir(node.path("state")).unwrap().flatten() {
        let log = fs::read_to_string(place.path().join("agent.log")).unwrap_or_default();
        assert!(!log.contains("the-right-one"), "{log}");
    }
}

#[test]
fn file_larger_than_the_server_allows_is_named_undrained() {
    let Some(server) = RedisServer::start_with(&["--proto-max-bulk-len", "18mb"]) else { return };
    let node = Node::new();
    let output = command(&node, &server, &[], "head -c 20000000 /dev/zero >big; echo x >small").output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{text}");
    assert!(text.contains("big") && text.contains("larger than the store"), "{text}");
    assert_eq!(server.cli(&["EXISTS", "p:big"]), "0");
}

#[test]
fn doctor_and_log_report_the_servers_durability() {
    for (options, code, word) in
        [(&[][..], true, "appendfsync always"), (&["--appendonly", "no"][..], false, "memory only")]
    {
        let Some(server) = RedisServer::start_with(options) else { return };
        let node = Node::new();
        let mut doctor = Command::new(env!("CARGO_BIN_EXE_surgetank"));
        doctor.args(["doctor", "--json", "--over"]).arg(node.path("over")).args(["--store", &server.url("p:")]);
        let output = doctor.arg("--state").arg(node.path("state")).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains(word) && text.contains("uploads in parts: yes"), "{text}");
        assert_eq!(text.contains("durability in the store"), !code, "{text}");
        let log = node.path("log");
        let script = format!("cat {}/*/agent.log >{}", node.path("state").display(), log.display());
        stdout_of(&command(&node, &server, &[], &script).output().unwrap());
        assert_eq!(fs::read_to_string(log).unwrap().contains(word), !code);
    }
}
