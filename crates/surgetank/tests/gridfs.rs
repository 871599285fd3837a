//! A store in GridFS behind the mount: whole runs against a real server.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]
#![cfg(feature = "gridfs")]

use std::fs;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use crate::store_node::{LIMIT, Node, ends, stdout_of};
use surgetank_testkit::servers::mongo::{MongoServer, PASSWORD, USER};

/// The list of MongoDB's own client: names and lengths below the prefix.
fn files(server: &MongoServer) -> Vec<(String, u64)> {
    let listed = server.client(&["list"]);
    let file = |line: &str| {
        let mut words = line.rsplit_once(" [")?.0.rsplitn(2, ' ');
        let size = words.next()?.parse().ok()?;
        Some((words.next()?.strip_prefix("p/")?.to_owned(), size))
    };
    let files: Vec<(String, u64)> = listed.lines().filter_map(file).collect();
    files.into_iter().filter(|(name, _)| name != ".surgetank-store").collect()
}

fn names(server: &MongoServer) -> Vec<String> {
    files(server).into_iter().map(|(name, _)| name).collect()
}

/// No upload is in progress, and no chunk is left over.
#[track_caller]
fn nothing_else_stays(server: &MongoServer) {
    assert_eq!(server.client(&["count", "surgetank.locks"]), "0");
    nothing_but_locks_stays(server);
}

#[track_caller]
fn nothing_but_locks_stays(server: &MongoServer) {
    for collection in ["surgetank.uploads", "surgetank.parts"] {
        assert_eq!(server.client(&["count", collection]), "0", "{collection}");
    }
    const CHUNK_BYTES: u64 = 255 << 10;
    let chunks: u64 = files(server).iter().map(|(_, size)| size.div_ceil(CHUNK_BYTES)).sum();
    assert_eq!(server.client(&["count", "chunks"]), (chunks + 1).to_string(), "chunks of the files and of the mark");
}

fn command(node: &Node, server: &MongoServer, options: &[&str], script: &str) -> Command {
    node.command(&server.url("p/"), options, script)
}

#[track_caller]
fn run(node: &Node, server: &MongoServer, script: &str) -> String {
    stdout_of(&command(node, server, &[], script).output().unwrap())
}

const WRITES: &str = "
    mkdir -p d/e/f empty
    echo hello >d/hello; chmod 600 d/hello
    setfattr -n user.origin -v run7 d/hello
    touch -d '2020-01-02 03:04:05.123456789' d/hello
    ln -s d/hello link; mkfifo pipe; chmod 750 d/e/f
    i=0; while [ $i -lt 20 ]; do echo $i >d/e/n$i; i=$((i + 1)); done
    mv d/e/n5 d/e/moved; rm d/e/n7; mv empty void
    printf 'odd' >\"d/a b+c%41 ü&<>\"; printf 'x' >'d/[a]*?\\x'
    sha256sum d/hello d/e/n* d/a* >sums
";

#[test]
fn run_output_is_on_the_server_and_reads_back() {
    let Some(server) = MongoServer::start() else { return };
    run(&Node::new(), &server, WRITES);
    for (name, bytes) in
        [("d/hello", &b"hello\n"[..]), ("link", b"d/hello"), ("d/a b+c%41 ü&<>", b"odd"), ("d/[a]*?\\x", b"x")]
    {
        assert_eq!(server.client_get(&format!("p/{name}")), bytes, "{name}");
    }
    let there = names(&server);
    assert!(!there.iter().any(|name| name == "d/e/n5" || name == "d/e/n7" || name.contains("-tmp-")), "{there:?}");
    // Another node, which has no state of these files.
    let seen = run(
        &Node::new(),
        &server,
        "sha256sum --check --quiet sums; stat -c '%a %Y %y %s' d/hello; readlink link; ls -A void; ls d/e | wc -l
         getfattr --only-values -n user.origin d/hello; echo; cat link; stat -c '%F %a' pipe d/e/f; cat d/[[]*",
    );
    let lines: Vec<&str> = seen.lines().collect();
    assert!(lines[0].starts_with("600 ") && lines[0].contains(".123456789 ") && lines[0].ends_with(" 6"), "{seen}");
    assert_eq!(lines[1..], ["d/hello", "20", "run7", "hello", "fifo 644", "directory 750", "x"], "{seen}");
    // Changes of stored files only: names, content, attributes, directories.
    run(
        &Node::new(),
        &server,
        "mv d/e g; echo more >>d/hello; chmod 640 d/hello; mv g/moved again; rmdir void; truncate -s 1 g/n1",
    );
    let seen = run(
        &Node::new(),
        &server,
        "cat d/hello; stat -c %a d/hello; ls; ls g | wc -l; cat again; wc -c <g/n1; getfattr --only-values -n user.origin d/hello",
    );
    assert_eq!(seen, "hello\nmore\n640\nagain\nd\ng\nlink\npipe\nsums\n19\n5\n1\nrun7");
    nothing_else_stays(&server);
}

/// (A test of its own, because this server examines all chunks for each client.)
#[test]
fn large_file_is_stored_in_parts_and_reads_back() {
    let Some(server) = MongoServer::start() else { return };
    run(&Node::new(), &server, "head -c 18000000 /dev/urandom >big; sha256sum big >sums");
    assert!(files(&server).contains(&("big".into(), 18_000_000)), "{:?}", files(&server));
    run(
        &Node::new(),
        &server,
        "sha256sum --check --quiet sums; mv big bigger; truncate -s 1000000 bigger; sha256sum bigger >sums",
    );
    run(&Node::new(), &server, "sha256sum --check --quiet sums; test ! -e big");
    nothing_else_stays(&server);
}

#[test]
fn files_of_other_clients_are_shown_and_never_overwritten() {
    let Some(server) = MongoServer::start() else { return };
    server.client_put("p/in/a", b"one");
    server.client_put("p/in/b", b"two");
    server.client_put("elsewhere", b"no");
    let seen = run(&Node::new(), &server, "ls; cat in/a in/b; echo three >>in/b; rm in/a; echo ours >in/c");
    assert_eq!(seen, "in\nonetwo");
    assert_eq!(server.client_get("p/in/b"), b"twothree\n");
    assert!(!names(&server).contains(&"in/a".into()));
    // After the drain has checked the name and before it writes, another client puts the file: both files stay.
    let put = Node::new();
    fs::write(put.path("theirs"), "theirs").unwrap();
    let here = env!("CARGO_MANIFEST_DIR");
    let script = format!(
        "cat in/c; echo mine >in/c; sleep 0.5
         {here}/../../.cache/venv/bin/python {here}/../testkit/src/servers/mongo/client.py mongodb://127.0.0.1:{}/db b put p/in/c {}",
        server.port(),
        put.path("theirs").display()
    );
    let output = command(&Node::new(), &server, &[], &script).env("SURGETANK_HOLD", "store.publish:4000").output();
    let seen = String::from_utf8(output.unwrap().stdout).unwrap();
    assert_eq!((seen.as_str(), server.client_get("p/in/c")), ("ours\n", b"theirs".to_vec()));
    let there = names(&server);
    let conflict: Vec<&String> = there.iter().filter(|name| name.contains("c.surgetank-conflict-")).collect();
    assert_eq!(conflict.len(), 1, "{there:?}");
    assert_eq!(server.client_get(&format!("p/{}", conflict[0])), b"mine\n");
}

#[test]
fn restarted_server_has_every_file_in_the_end() {
    let Some(mut server) = MongoServer::start() else { return };
    let node = Node::new();
    let script =
        "i=0; while [ $i -lt 60 ]; do echo $i >f$i; i=$((i + 1)); sleep 0.02; done; head -c 18000000 /dev/zero >big";
    let child = command(&node, &server, &[], script).spawn().unwrap();
    let begun = Instant::now();
    while names(&server).len() < 5 {
        assert!(begun.elapsed() < LIMIT);
    }
    server.kill();
    std::thread::sleep(Duration::from_secs(2));
    server.restart();
    stdout_of(&ends(child));
    assert_eq!(names(&server).len(), 61);
    assert_eq!(server.client_get("p/f59"), b"59\n");
    clean_up(&node, &server);
    assert_eq!(names(&server).len(), 61);
    // The stopped server keeps a lock that could not be removed. The next change of the name removes it. There are at
    // most as many as files that the drain publishes at a time.
    let locked: u32 = server.client(&["count", "surgetank.locks"]).parse().unwrap();
    assert!(locked <= 4, "{locked} names are locked");
    nothing_but_locks_stays(&server);
}

/// A cut between two requests of a small file may leave a chunk.
fn clean_up(node: &Node, server: &MongoServer) {
    let mut gc = Command::new(env!("CARGO_BIN_EXE_surgetank"));
    gc.args(["gc", "--older-than", "0s", "--over"]).arg(node.path("over")).args(["--store", &server.url("p/")]);
    stdout_of(&gc.arg("--state").arg(node.path("state")).output().unwrap());
}

#[test]
fn killed_agent_leaves_no_partial_file() {
    let Some(server) = MongoServer::start() else { return };
    let node = Node::new();
    let slow = node.path("slow.toml");
    fs::write(&slow, "drain_bytes_per_second_max = \"20MiB/s\"\n").unwrap();
    let script = "i=0; while [ $i -lt 30 ]; do echo $i >f$i; i=$((i + 1)); done
                  head -c 40000000 /dev/urandom >big; sha256sum big >sums; sleep 1";
    let mut child = command(&node, &server, &["--config", slow.to_str().unwrap()], script).spawn().unwrap();
    let begun = Instant::now();
    let mut kills = 0;
    while child.try_wait().unwrap().is_none() {
        assert!(begun.elapsed() < LIMIT * 2, "the run does not end");
        let half = files(&server).into_iter().find(|(name, size)| name == "big" && *size != 40_000_000);
        assert_eq!(half, None, "a partial file is visible");
        if kills < 3 && node.has_uploads() {
            std::thread::sleep(Duration::from_millis(300));
            kills += u32::from(node.kill_agent());
        }
    }
    stdout_of(&child.wait_with_output().unwrap());
    assert!(kills > 0);
    assert!(!node.has_uploads(), "a record of an upload remains after its end");
    assert_eq!(names(&server).len(), 32);
    let big = node.path("read-back");
    fs::write(&big, server.client_get("p/big")).unwrap();
    let sum = Command::new("sha256sum").arg(&big).output().unwrap();
    let first = |text: &[u8]| String::from_utf8_lossy(text).split(' ').next().map(str::to_owned);
    assert_eq!(first(&server.client_get("p/sums")), first(&sum.stdout));
    clean_up(&node, &server);
    assert_eq!(names(&server).len(), 32);
    nothing_else_stays(&server);
}

#[test]
fn unlistable_name_hides_no_file_and_stops_gc() {
    let Some(server) = MongoServer::start() else { return };
    server.client_put("p/d/aa", b"a");
    server.client_put("p/d/zz", b"z");
    server.client(&["odd", "p/d/mm"]);
    for nth in 0..3 {
        server.client_put(&format!("p/d//{nth}"), b"x");
    }
    assert_eq!(run(&Node::new(), &server, "ls d").trim_end(), "aa\nzz");
    run(&Node::new(), &server, "mv d e");
    assert_eq!(run(&Node::new(), &server, "cat e/aa e/zz"), "az");
    // A stored file refers to content. A file without a valid path may refer to the same content.
    let node = Node::new();
    let rule = node.path("rule.toml");
    fs::write(&rule, "[[rules]]\nmatch = \"*.h5\"\ndedup = true\n").unwrap();
    let options = ["--config", rule.to_str().unwrap()];
    let dedup = |script: &str| stdout_of(&command(&Node::new(), &server, &options, script).output().unwrap());
    dedup("head -c 200000 /dev/urandom >x.h5");
    dedup("rm x.h5");
    let mut gc = Command::new(env!("CARGO_BIN_EXE_surgetank"));
    gc.args(["gc", "--unused-for", "0s", "--store", &server.url("p/"), "--over"]).arg(node.path("over"));
    let text = failed(&gc.output().unwrap());
    assert!(text.contains("nothing was removed"), "{text}");
    assert!(names(&server).iter().any(|name| name.starts_with(".surgetank-blobs")), "{:?}", names(&server));
}

fn failed(output: &Output) -> String {
    assert!(!output.status.success(), "the command must fail");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn password_is_read_from_the_environment_and_never_shown() {
    let Some(server) = MongoServer::start_guarded() else { return };
    let node = Node::new();
    let url = format!("mongodb://{USER}@127.0.0.1:{}/db?authSource=db&prefix=p/", server.port());
    let right = node.command(&url, &[], "echo x >x").env("MONGODB_PASSWORD", PASSWORD).output().unwrap();
    stdout_of(&right);
    for password in ["hunter2", ""] {
        let output = Node::new().command(&url, &[], "true").env("MONGODB_PASSWORD", password).output().unwrap();
        let text = failed(&output);
        assert!(text.contains("MONGODB_PASSWORD") && !text.contains("hunter2"), "{text}");
    }
    let url = format!("mongodb://{USER}:hunter2@127.0.0.1:{}/db", server.port());
    let text = failed(&Node::new().command(&url, &[], "true").output().unwrap());
    assert!(text.contains("MONGODB_PASSWORD") && !text.contains("hunter2"), "{text}");
    let mut seen = 0;
    for place in fs::read_dir(node.path("state")).unwrap().flatten() {
        let log = fs::read_to_string(place.path().join("agent.log")).unwrap_or_default();
        assert!(!log.contains(PASSWORD), "{log}");
        seen += 1;
    }
    assert!(seen > 0, "no state, and so no log");
}

#[test]
fn doctor_reports_what_the_server_can_do() {
    let Some(server) = MongoServer::start() else { return };
    let node = Node::new();
    let mut doctor = Command::new(env!("CARGO_BIN_EXE_surgetank"));
    doctor.args(["doctor", "--json", "--over"]).arg(node.path("over")).args(["--store", &server.url("p/")]);
    let output = doctor.arg("--state").arg(node.path("state")).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("conditional writes: yes") && text.contains("journal of it alone"), "{text}");
}

#[test]
fn tree_is_staged_in_and_out() {
    let Some(server) = MongoServer::start() else { return };
    let node = Node::new();
    let (from, back) = (node.path("from"), node.path("back"));
    fs::create_dir_all(from.join("d")).unwrap();
    fs::create_dir(&back).unwrap();
    fs::write(from.join("d/one"), "1").unwrap();
    fs::write(from.join("two"), "22").unwrap();
    let place = format!("mongodb://127.0.0.1:{}/db/out?bucket=b", server.port());
    let staged = |verb: &str, to: &str, from: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_surgetank"));
        stdout_of(&command.args([verb, "--to", to, from]).env("XDG_STATE_HOME", node.path("state")).output().unwrap());
    };
    staged("stage-out", &place, &format!("{}/", from.display()));
    assert_eq!((server.client_get("out/d/one"), server.client_get("out/two")), (b"1".to_vec(), b"22".to_vec()));
    server.client_put("out/theirs", b"333");
    staged("stage-in", back.to_str().unwrap(), &place.replace("/out?", "/out/?"));
    let read = |name: &str| fs::read_to_string(back.join(name)).unwrap();
    assert_eq!((read("d/one"), read("two"), read("theirs")), ("1".into(), "22".into(), "333".into()));
}
