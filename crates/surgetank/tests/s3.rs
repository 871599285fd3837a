//! A store of objects behind the mount: whole runs against a real server.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]
#![cfg(feature = "s3")]

mod kills;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::store_node::{LIMIT, Node, ends, stdout_of};
use surgetank_testkit::servers::s3::{ACCESS, S3Server, SECRET};

fn command(node: &Node, server: &S3Server, options: &[&str], script: &str) -> Command {
    let mut command = node.command(&server.url("project"), options, script);
    command.envs(server.environment());
    command
}

#[track_caller]
fn run(node: &Node, server: &S3Server, options: &[&str], script: &str) -> String {
    stdout_of(&command(node, server, options, script).output().unwrap())
}

/// The bucket's objects below the prefix. The server stores each one as a plain file.
fn objects(server: &S3Server) -> Vec<String> {
    let root = server.files().join("project");
    let mut found = Vec::new();
    let mut todo = vec![root.clone()];
    while let Some(dir) = todo.pop() {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            if entry.file_type().unwrap().is_dir() {
                todo.push(entry.path());
            } else {
                found.push(entry.path().strip_prefix(&root).unwrap().to_str().unwrap().to_owned());
            }
        }
    }
    found.retain(|key| key != ".surgetank-store");
    found.sort();
    found
}

const WRITES: &str = "
    mkdir -p d/e/f empty
    echo hello >d/hello; chmod 600 d/hello
    setfattr -n user.origin -v run7 d/hello
    touch -d '2020-01-02 03:04:05.123456789' d/hello
    head -c 40000000 /dev/urandom >big
    ln -s d/hello link
    i=0; while [ $i -lt 50 ]; do echo $i >d/e/n$i; i=$((i + 1)); done
    mv d/e/n5 d/e/moved; rm d/e/n7
    printf 'odd' >\"d/a b+c%41 ü&<>\"
    sha256sum big d/hello d/e/n* d/a* >sums
";

#[test]
fn run_output_is_in_the_bucket_and_reads_back() {
    let Some(server) = S3Server::start() else { return };
    let node = Node::new();
    run(&node, &server, &[], WRITES);
    let keys = objects(&server);
    assert_eq!(keys.len(), 54, "{keys:?}");
    assert_eq!(fs::read(server.files().join("project/d/hello")).unwrap(), b"hello\n");
    assert_eq!(fs::metadata(server.files().join("project/big")).unwrap().size(), 40_000_000);
    // Another node, which has no state of these files.
    let other = Node::new();
    let seen = run(
        &other,
        &server,
        &[],
        "sha256sum --check --quiet sums; stat -c '%a %Y %y %s' d/hello; readlink link; ls -A empty; ls d/e | wc -l
         getfattr --only-values -n user.origin d/hello; echo; cat link",
    );
    let lines: Vec<&str> = seen.lines().collect();
    assert!(lines[0].starts_with("600 ") && lines[0].contains(".123456789 ") && lines[0].ends_with(" 6"), "{seen}");
    assert_eq!(lines[1..], ["d/hello", "50", "run7", "hello"], "{seen}");
    // Changes of stored files only: names, content, attributes, directories.
    run(
        &other,
        &server,
        &[],
        "mv d/e g; echo more >>d/hello; chmod 640 d/hello; rm big; mv g/moved again; rmdir empty; truncate -s 1 g/n1",
    );
    let third = Node::new();
    let seen = run(
        &third,
        &server,
        &[],
        "cat d/hello; stat -c %a d/hello; ls; ls g | wc -l; cat again; wc -c <g/n1; getfattr --only-values -n user.origin d/hello",
    );
    assert_eq!(seen, "hello\nmore\n640\nagain\nd\ng\nlink\nsums\n49\n5\n1\nrun7");
}

#[test]
fn unordered_files_are_published_several_at_a_time() {
    let Some(server) = S3Server::start() else { return };
    let node = Node::new();
    run(
        &node,
        &server,
        &["--unordered"],
        "mkdir d; i=0; while [ $i -lt 500 ]; do echo $i >d/$i; i=$((i + 1)); done; echo x >d/7; rm d/8; mv d/9 d/10",
    );
    let keys = objects(&server);
    assert_eq!(keys.len(), 498);
    let read = |name: &str| fs::read_to_string(server.files().join("project/d").join(name)).unwrap();
    assert_eq!((read("7"), read("10"), read("499")), ("x\n".into(), "9\n".into(), "499\n".into()));
}

/// If `fN` is visible, every earlier file is, too. (Each file is checked by itself, because a listing is not atomic.)
fn are_in_order(seen: &[String], server: &S3Server) {
    let last = seen.iter().filter_map(|name| name.strip_prefix('f')?.parse::<u32>().ok()).max();
    for number in 0..last.unwrap_or(0) {
        let earlier = server.files().join(format!("project/f{number}"));
        assert!(earlier.exists(), "f{number} is missing, but f{last:?} exists");
    }
}

/// The order holds although several publications run at a time.
#[test]
fn later_file_never_appears_before_an_earlier_one() {
    let Some(server) = S3Server::start() else { return };
    let node = Node::new();
    let script = "mkdir d; i=0; while [ $i -lt 600 ]; do head -c $((i * 37 % 9000)) /dev/zero >f$i; i=$((i + 1)); done";
    let mut child = command(&node, &server, &[], script).spawn().unwrap();
    let mut looks = 0;
    while child.try_wait().unwrap().is_none() {
        let seen = objects(&server);
        are_in_order(&seen, &server);
        looks += u32::from((1..600).contains(&seen.len()));
        std::thread::sleep(Duration::from_millis(1));
    }
    stdout_of(&ends(child));
    assert_eq!(objects(&server).len(), 600);
    assert!(looks > 5, "only {looks} looks during the run");
}

#[test]
fn restarted_server_has_every_file_in_the_end() {
    let Some(mut server) = S3Server::start() else { return };
    let node = Node::new();
    let script =
        "i=0; while [ $i -lt 300 ]; do echo $i >f$i; i=$((i + 1)); sleep 0.005; done; head -c 30000000 /dev/zero >big";
    let child = command(&node, &server, &[], script).spawn().unwrap();
    let begun = Instant::now();
    while objects(&server).len() < 20 {
        assert!(begun.elapsed() < LIMIT);
        std::thread::sleep(Duration::from_millis(5));
    }
    server.kill();
    are_in_order(&objects(&server), &server);
    std::thread::sleep(Duration::from_secs(2));
    server.restart();
    stdout_of(&ends(child));
    assert_eq!(objects(&server).len(), 301);
    assert_eq!(fs::read(server.files().join("project/f299")).unwrap(), b"299\n");
}

#[test]
fn credentials_are_read_from_their_sources_and_never_shown() {
    let Some(server) = S3Server::start() else { return };
    let node = Node::new();
    let mut wrong = command(&node, &server, &[], "true");
    let output = wrong.env("AWS_SECRET_ACCESS_KEY", "hunter2-hunter2").output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && !text.contains("hunter2") && text.contains("s3://bucket"), "{text}");
    let mut on_the_line = Command::new(env!("CARGO_BIN_EXE_surgetank"));
    let url = format!("{}&secret_access_key=hunter2", server.url("project"));
    let output =
        on_the_line.args(["run", "--over"]).arg(node.path("over")).args(["--store", &url, "--", "true"]).output();
    let text = String::from_utf8_lossy(&output.unwrap().stderr).into_owned();
    assert!(text.contains("AWS_ACCESS_KEY_ID") && !text.contains("hunter2"), "{text}");
}

/// Regression: the server's listings had another name for the file. Its content was in the bucket, and no client
/// could find it.
#[test]
fn unlistable_names_are_refused_or_listed() {
    let Some(server) = S3Server::start() else { return };
    let script = r#"n=0; for name in '\001' 'a\033b' 'a\tb' 'a\rb' 'a\177' '\357\277\277'; do n=$((n + 1))
        (echo $n >"$(printf "$name")") 2>/dev/null || echo $n >>refused; done; cat refused 2>/dev/null || :"#;
    let refused = run(&Node::new(), &server, &[], script);
    let seen = run(&Node::new(), &server, &[], "rm -f refused; ls >/dev/null; cat *");
    let mut seen: Vec<&str> = seen.lines().chain(refused.lines()).collect();
    seen.sort_unstable();
    assert_eq!(seen, ["1", "2", "3", "4", "5", "6"]);
}

/// Objects of another client, on a server whose ages sometimes have whole seconds only.
#[test]
fn objects_of_other_clients_change_without_conflict() {
    use surgetank_store::checksum::of_bytes;
    use surgetank_store::object::{Objects, When, Words};
    use surgetank_store::s3::{Place, S3};
    let Some(server) = S3Server::start() else { return };
    let mut place = Place::parse(&server.url("project")).unwrap();
    place.credentials_file = Some(server.credentials_file());
    let bucket = S3::open(place).unwrap();
    for key in ["d/over", "d/more", "d/removed", "d/kept", "e/moved"] {
        bucket.put(key, &key.as_bytes(), of_bytes(key.as_bytes()), &Words::new(), When::Always).unwrap();
    }
    let node = Node::new();
    let seen = run(&node, &server,
        &[],
        "ls -lR >/dev/null; echo new >d/over; echo more >>d/more; rm d/removed; chmod 600 d/kept; mv e/moved d/moved; mv d f
         ls e; cat f/over f/more f/kept f/moved",
    );
    assert_eq!(seen, "new\nd/moremore\nd/kepte/moved");
    assert_eq!(objects(&server), ["f/kept", "f/more", "f/moved", "f/over"]);
    let seen = run(&Node::new(), &server, &[], "cat f/over f/more f/kept f/moved; stat -c %a f/kept");
    assert_eq!(seen, "new\nd/moremore\nd/kepte/moved600\n");
}

/// For a store on a server, and for one with packed files, `plan` lists the files that programs would see. No
/// temporary remains.
#[test]
fn plan_lists_the_files_of_an_object_store() {
    let Some(server) = S3Server::start() else { return };
    let node = Node::new();
    let rules = node.path("rules.toml");
    let rule = "[[rules]]\nmatch = \"*.csv\"\ncompress = \"zstd:1\"\n[[rules]]\nmatch = \"*.tmp\"\nmode = \"keep\"\n";
    fs::write(&rules, rule).unwrap();
    let options = ["--config", rules.to_str().unwrap()];
    run(
        &node,
        &server,
        &options,
        "mkdir -p d/e; head -c 300000 /dev/zero >d/a.csv; echo x >d/e/b; echo plain >c.tmp.txt",
    );
    assert_eq!(objects(&server), ["c.tmp.txt", "d/a.csv.surgetank.zst", "d/e/b"]);
    let mut command = Command::new(env!("CARGO_BIN_EXE_surgetank"));
    command.envs(server.environment()).env("TMPDIR", node.path("over")).args(["plan", "--files", "--json", "--over"]);
    command.arg(node.path("over")).args(["--store", &server.url("project")]).args(options);
    let output = stdout_of(&command.output().unwrap());
    let files: Vec<(String, u64)> = output
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter_map(|line| Some((line["path"].as_str()?.to_owned(), line["bytes"].as_u64()?)))
        .collect();
    assert_eq!(files, [("c.tmp.txt".into(), 6), ("d/a.csv".into(), 300_000), ("d/e/b".into(), 2)]);
    assert_eq!(objects(&server).len(), 3);
    assert_eq!(fs::read_dir(node.path("over")).unwrap().count(), 0, "a temporary is left in TMPDIR");
}

#[test]
fn half_done_renames_are_finished_after_a_kill() {
    let Some(server) = S3Server::start() else { return };
    run(&Node::new(), &server, &[], "mkdir d empty; for n in 1 2 3 4 5 6 7 8 9; do echo $n >d/$n; done; echo f >file");
    for (point, script) in [
        ("store.rename_copied:1", "mv file name"),
        ("store.rename_copied:4", "mv d e; echo 10 >e/10"),
        ("store.rename:1", "mv e d"),
        // Some files written just before have the old name of the directory, and some have the new one.
        ("store.rename_deleted:6", "echo 5 >d/5; echo 11 >d/11; rm d/2; mv d e; echo 12 >e/12"),
        ("store.rename_deleted:6", "echo 11 >e/11; mv e/12 e/13; mv e f; mv f/1 f/14; mv f d"),
        ("store.rename_deleted:6", "echo 7 >d/7; rmdir empty; mv d empty; mv empty d"),
    ] {
        let node = Node::new();
        let mut command = command(&node, &server, &[], script);
        stdout_of(&command.env("SURGETANK_CRASH", point).output().unwrap());
        let log = fs::read_dir(node.path("state")).unwrap().flatten();
        let log: String = log.filter_map(|place| fs::read_to_string(place.path().join("agent.log")).ok()).collect();
        assert!(log.contains("the agent died"), "{point}: no agent was killed: {log}");
    }
    let numbers = (1..=14).filter(|n| ![1, 2, 12].contains(n));
    let expected: Vec<String> = numbers.map(|n| format!("d/{n}")).chain(["name".into()]).collect();
    let mut found = objects(&server);
    found.sort_by_key(|key| expected.iter().position(|other| other == key));
    assert_eq!(found, expected);
    assert_eq!(fs::read_to_string(server.files().join("project/d/7")).unwrap(), "7\n");
}

/// Regression: after the rename each file is another object, with another tag if it was uploaded in parts. An
/// overwrite then counted as a conflict with another client, also in an agent that replaced a killed one.
#[test]
fn large_file_of_a_renamed_directory_can_be_overwritten() {
    let Some(server) = S3Server::start() else { return };
    let surgetank = env!("CARGO_BIN_EXE_surgetank");
    for point in ["", "drain.renamed:1", "store.rename_copied:1", "store.rename_deleted:1"] {
        let node = Node::new();
        let script = format!(
            "mkdir d; head -c 40000000 /dev/urandom >d/big; {surgetank} wait .; mv d e; {surgetank} wait .; printf x >>e/big; stat -c %s e/big"
        );
        let mut command = command(&node, &server, &["--quiet-period", "0s"], &script);
        assert_eq!(stdout_of(&command.env("SURGETANK_CRASH", point).output().unwrap()), "40000001\n", "{point}");
        let log = fs::read_dir(node.path("state")).unwrap().flatten();
        let log: String = log.filter_map(|place| fs::read_to_string(place.path().join("agent.log")).ok()).collect();
        assert_eq!(log.contains("the agent died"), !point.is_empty(), "{point}: {log}");
        assert_eq!(objects(&server), ["e/big"], "{point}");
        run(&Node::new(), &server, &[], "rm -r e");
    }
}

/// Programs continue while the agent is replaced. Regression: of a directory whose rename was interrupted they missed
/// the files that already had their new names, until the drain finished the rename.
#[test]
fn directory_is_whole_while_its_rename_is_unfinished() {
    let Some(server) = S3Server::start() else { return };
    run(&Node::new(), &server, &[], "mkdir d; for n in 1 2 3 4 5 6 7 8 9; do echo $n >d/$n; done");
    let node = Node::new();
    // (No program has requested any of the files, so the agent knows only the store's names.)
    let script = "mv d e; sleep 1; cat e/1 e/2 e/3 e/7 e/8 e/9; ls e | wc -l";
    let mut command = command(&node, &server, &["--quiet-period", "0s"], script);
    command.env("SURGETANK_CRASH", "store.rename_deleted:5").env("SURGETANK_HOLD", ",drain.started:4000");
    assert_eq!(stdout_of(&command.output().unwrap()), "1\n2\n3\n7\n8\n9\n9\n");
    let log = fs::read_dir(node.path("state")).unwrap().flatten();
    let log: String = log.filter_map(|place| fs::read_to_string(place.path().join("agent.log")).ok()).collect();
    assert!(log.contains("the agent died"), "no agent was killed: {log}");
    assert_eq!(objects(&server), ["e/1", "e/2", "e/3", "e/4", "e/5", "e/6", "e/7", "e/8", "e/9"]);
}

/// The agent is killed before it sends a new version of the same length and time as the old one. Regression: the next
/// agent took the version for written in place, and dropped it.
#[test]
fn version_of_equal_size_and_time_is_sent_after_a_kill() {
    let Some(server) = S3Server::start() else { return };
    run(&Node::new(), &server, &[], "echo one >f; touch -d '2020-01-01 UTC' f");
    let node = Node::new();
    let script = "echo two >f; touch -d '2020-01-01 UTC' f; setfattr -n user.two -v x f";
    stdout_of(&command(&node, &server, &[], script).env("SURGETANK_CRASH", "store.publish:1").output().unwrap());
    let log = fs::read_dir(node.path("state")).unwrap().flatten();
    let log: String = log.filter_map(|place| fs::read_to_string(place.path().join("agent.log")).ok()).collect();
    assert!(log.contains("the agent died"), "no agent was killed: {log}");
    let seen = run(&Node::new(), &server, &[], "cat f; getfattr --only-values -n user.two f");
    assert_eq!(seen, "two\nx");
}

#[test]
fn gc_aborts_uploads_of_a_lost_node() {
    use surgetank_store::object::{Objects, Words};
    use surgetank_store::s3::{Place, S3};
    let Some(server) = S3Server::start() else { return };
    let place = |prefix: &str| {
        let mut place = Place::parse(&server.url(prefix)).unwrap();
        place.credentials_file = Some(server.credentials_file());
        place
    };
    let bucket = S3::open(place("project")).unwrap();
    bucket.begin("d/big", &Words::new()).unwrap();
    S3::open(place("other")).unwrap().begin("not ours", &Words::new()).unwrap();
    let node = Node::new();
    let gc = |options: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_surgetank"));
        command
            .envs(server.environment())
            .args(["gc", "--store", &server.url("project"), "--over"])
            .arg(node.path("over"));
        stdout_of(&command.args(options).output().unwrap())
    };
    let nothing = "0 contents, 0 B, removed\n";
    assert_eq!(gc(&[]), format!("0 uploads aborted\n{nothing}"), "young uploads were aborted");
    std::thread::sleep(Duration::from_secs(1));
    assert!(gc(&["--older-than", "0s", "--dry-run"]).contains("\n1 uploads would be aborted\n"));
    assert_eq!(bucket.uploads("").unwrap().len(), 1);
    let output = gc(&["--older-than", "0s"]);
    assert!(output.starts_with("d/big  begun ") && output.contains("1 uploads aborted\n"), "{output}");
    assert_eq!(bucket.uploads("").unwrap().len(), 0);
    assert_eq!(S3::open(place("other")).unwrap().uploads("").unwrap().len(), 1);
}

/// Several files are published at a time and wait for their turns. Regression: a publication found its copy outdated
/// before its turn and did not report it. No file was stored after that.
#[test]
fn file_overwritten_during_its_turn_does_not_stop_the_drain() {
    let Some(server) = S3Server::start() else { return };
    let node = Node::new();
    let script = "for n in a b c; do head -c 3000000 /dev/zero >$n; done; sleep 0.7; echo shorter >b; echo shorter >c";
    let mut command = node.command(&server.url("turns"), &["--quiet-period", "300ms"], script);
    command.envs(server.environment()).env("SURGETANK_HOLD", "store.publish:1000");
    stdout_of(&command.output().unwrap());
    let files = server.files().join("turns");
    assert_eq!(fs::metadata(files.join("a")).unwrap().len(), 3_000_000);
    assert_eq!(fs::read(files.join("b")).unwrap(), b"shorter\n");
    assert_eq!(fs::read(files.join("c")).unwrap(), b"shorter\n");
}

#[test]
fn drain_keeps_below_its_rate() {
    let Some(server) = S3Server::start() else { return };
    let node = Node::new();
    let slow = node.path("slow.toml");
    fs::write(&slow, "drain_bytes_per_second_max = \"10MiB/s\"\n").unwrap();
    // Both kinds of upload: whole files, and files in parts.
    let script = "head -c 20000000 /dev/urandom >big; for n in 1 2 3 4 5; do head -c 2000000 /dev/urandom >f$n; done";
    let begun = Instant::now();
    run(&node, &server, &["--config", slow.to_str().unwrap()], script);
    let (bytes, rate, ahead) = (30_000_000.0, f64::from(10 << 20), 0.1);
    assert!(begun.elapsed().as_secs_f64() >= bytes / rate - ahead, "{:?}", begun.elapsed());
}

/// A service that gives temporary credentials to a machine or a container, like on AWS.
fn lender(asked: Arc<Mutex<Vec<String>>>) -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut head = BufReader::new(stream.try_clone().unwrap()).lines().map(Result::unwrap_or_default);
            let line = head.next().unwrap_or_default();
            let lines: Vec<String> = head.take_while(|line| !line.is_empty()).collect();
            let may = |name: &str, value: &str| {
                lines.iter().any(|line| line.to_ascii_lowercase() == format!("{name}: {value}"))
            };
            let keys = format!(
                r#"{{"Code":"Success","AccessKeyId":"{ACCESS}","SecretAccessKey":"{SECRET}","Token":"","Expiration":"2099-01-01T00:00:00Z"}}"#
            );
            let answer = match line.split(' ').take(2).collect::<Vec<_>>()[..] {
                ["PUT", "/latest/api/token"] => Some("a-token".to_owned()),
                ["GET", path] if path.starts_with("/latest/") && !may("x-aws-ec2-metadata-token", "a-token") => None,
                ["GET", "/latest/meta-data/iam/security-credentials/"] => Some("role".to_owned()),
                ["GET", "/latest/meta-data/iam/security-credentials/role"] => Some(keys),
                ["GET", "/container"] if may("authorization", "a-secret") => Some(keys),
                _ => None,
            };
            asked.lock().unwrap().push(line);
            let (status, body) = answer.map_or(("403 Forbidden", String::new()), |body| ("200 OK", body));
            let head = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
            let _ = stream.write_all((head + &body).as_bytes());
        }
    });
    address
}

#[test]
fn credentials_come_from_every_aws_source() {
    let Some(server) = S3Server::start() else { return };
    let asked: Arc<Mutex<Vec<String>>> = Arc::default();
    let lender = lender(Arc::clone(&asked));
    let home = Node::new();
    let profiles = home.path("profiles");
    let keys = |name: &str, secret: &str| {
        format!("[{name}]\naws_access_key_id = {ACCESS}\naws_secret_access_key = {secret}\n")
    };
    fs::write(&profiles, keys("default", "wrong-wrong-wrong") + &keys("lab", SECRET)).unwrap();
    let profiles = profiles.to_str().unwrap().to_owned();
    let container = format!("{lender}/container");
    for (variables, word) in [
        (vec![("AWS_SHARED_CREDENTIALS_FILE", profiles.as_str()), ("AWS_PROFILE", "lab")], ""),
        (
            vec![("AWS_CONTAINER_CREDENTIALS_FULL_URI", &container), ("AWS_CONTAINER_AUTHORIZATION_TOKEN", "a-secret")],
            "/container",
        ),
        (vec![("AWS_EC2_METADATA_SERVICE_ENDPOINT", &lender)], "security-credentials/role"),
    ] {
        asked.lock().unwrap().clear();
        let node = Node::new();
        let mut command = node.command(&server.url("temporary"), &[], "echo x >x; cat x");
        command.env("HOME", node.path("state")).envs(variables.clone());
        for unset in ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"] {
            command.env_remove(unset);
        }
        assert_eq!(stdout_of(&command.output().unwrap()), "x\n", "{variables:?}");
        let asked = asked.lock().unwrap();
        assert_eq!(asked.is_empty(), word.is_empty(), "{variables:?}: {asked:?}");
        assert!(asked.iter().any(|line| line.contains(word)) || word.is_empty(), "{asked:?}");
        for place in fs::read_dir(node.path("state")).unwrap().flatten() {
            let log = fs::read_to_string(place.path().join("agent.log")).unwrap_or_default();
            assert!(!log.contains(SECRET) && !log.contains("a-secret"), "{log}");
        }
    }
}

/// A listing needs no request for each file, neither to the server nor to the agent: the attributes come with the
/// names.
#[test]
fn listed_file_costs_no_request() {
    let Some(server) = S3Server::start() else { return };
    let (dirs, files) = (10, 150);
    for number in 0..dirs * files {
        let dir = server.files().join(format!("project/d{}", number % dirs));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join(format!("f{number}")), vec![b'x'; number]).unwrap();
    }
    let node = Node::new();
    let account = node.path("account");
    let listed = run(&node, &server, &["--json", account.to_str().unwrap()], "ls -lR");
    let sizes: usize = listed
        .lines()
        .filter_map(|line| line.strip_prefix('-')?.split_whitespace().nth(4))
        .map(|size| size.parse::<usize>().unwrap())
        .sum();
    assert_eq!(sizes, (0..dirs * files).sum::<usize>(), "{listed}");
    let account: serde_json::Value = serde_json::from_slice(&fs::read(account).unwrap()).unwrap();
    let requests = account["summary"]["mount"]["requests"].as_u64().unwrap();
    assert!((10..300).contains(&requests), "{requests} requests for {} files", dirs * files);
}

/// The files were read before, so a tier has a copy of them.
#[test]
fn change_by_another_client_is_seen_after_store_ttl() {
    another_client_changes_files("200ms", "sleep 2", "");
}

/// The agent and the kernel cache the state of the store for an hour.
#[test]
fn change_by_another_client_is_seen_after_a_refresh() {
    let refresh = format!("'{}' refresh --state ../state d", env!("CARGO_BIN_EXE_surgetank"));
    another_client_changes_files("1h", &refresh, "oldoldchanged removed \n");
}

/// `before`: the output before `then` runs.
fn another_client_changes_files(ttl: &str, then: &str, before: &str) {
    use surgetank_store::checksum::of_bytes;
    use surgetank_store::object::{Objects, When, Words};
    use surgetank_store::s3::{Place, S3};
    let Some(server) = S3Server::start() else { return };
    let mut place = Place::parse(&server.url("project")).unwrap();
    place.credentials_file = Some(server.credentials_file());
    let bucket = S3::open(place).unwrap();
    let put = |key: &str, text: &str| {
        bucket.put(key, &text.as_bytes(), of_bytes(text.as_bytes()), &Words::new(), When::Always).unwrap();
    };
    put("d/changed", "old");
    put("d/removed", "old");
    let node = Node::new();
    let looks = if before.is_empty() { "" } else { "look" };
    let script = format!(
        "look() {{ cat d/changed; cat d/removed d/new 2>/dev/null || true; ls d | tr '\\n' ' '; echo; }}
         look; touch ../looked; while [ ! -e ../put ]; do sleep 0.02; done
         {looks}
         {then}; look"
    );
    let child = command(&node, &server, &["--store-ttl", ttl], &script).spawn().unwrap();
    let begun = Instant::now();
    while !node.path("looked").exists() {
        assert!(begun.elapsed() < LIMIT);
        std::thread::sleep(Duration::from_millis(10));
    }
    put("d/changed", "other content");
    put("d/new", "new");
    bucket.delete("d/removed").unwrap();
    fs::write(node.path("put"), "").unwrap();
    let seen = stdout_of(&ends(child));
    assert_eq!(seen, format!("oldoldchanged removed \n{before}other contentnewchanged new \n"));
    assert_eq!(objects(&server), ["d/changed", "d/new"], "a removed file came back");
    let left = fs::read_dir(node.path("fast")).unwrap().flatten().count();
    assert_eq!(left, 0, "a copy outlives the agent");
}
