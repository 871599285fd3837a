//! Members of a pool over one bucket of a real S3 server, which keeps each object as a plain file.
#![cfg(feature = "s3")]

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Output;
use std::time::Duration;

use rustix::process::{Signal, kill_process};
use surgetank_store::checksum;
use surgetank_store::object::{Objects, When, Words};
use surgetank_store::s3::{Place, S3};
use surgetank_testkit::servers::s3::S3Server;

use crate::pool::{Pool, run};
use crate::pool_shim::Worker;
use crate::scene::{eventually, noise};

/// The prefix of the store in the bucket.
const PREFIX: &str = "project";

fn pool_on(server: &S3Server, name: &str) -> Option<Pool> {
    Pool::on_server(&format!("objects-{name}"), &server.url(PREFIX), &server.environment())
}

/// Each object by its key, and its content, without the objects of directories and the store's mark.
fn objects(server: &S3Server) -> BTreeMap<String, Vec<u8>> {
    let root = server.files().join(PREFIX);
    let mut found = BTreeMap::new();
    let mut todo = vec![root.clone()];
    while let Some(dir) = todo.pop() {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            if entry.file_type().unwrap().is_dir() {
                todo.push(entry.path());
            } else {
                let key = entry.path().strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
                found.insert(key, fs::read(entry.path()).unwrap());
            }
        }
    }
    found.remove(".surgetank-store");
    found
}

/// Another client, which knows nothing of Surgetank.
fn client(server: &S3Server) -> S3 {
    let mut place = Place::parse(&server.url(PREFIX)).unwrap();
    place.credentials_file = Some(server.credentials_file());
    S3::open(place).unwrap()
}

fn put(client: &S3, key: &str, content: &[u8]) {
    client.put(key, &content, checksum::of_bytes(content), &Words::new(), When::Always).unwrap();
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn leave(pool: &mut Pool, number: usize) {
    let mut command = pool.command_at(number, "pool", &["leave"]);
    let left = command.arg(pool.over(number)).output().unwrap();
    assert_eq!(left.status.code(), Some(0), "{left:?}");
    pool.has_left(number);
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn members_that_start_at_once_are_one_pool() {
    let Some(server) = S3Server::start() else { return };
    let Some(mut pool) = pool_on(&server, "start") else { return };
    for round in 0..4 {
        pool.mount_at_once(3);
        for number in 0..3 {
            // (A member learns a moment later who else has joined.)
            eventually("three members", || pool.status(number)["members"].as_array().unwrap().len() == 3);
            fs::write(pool.member(number).join(format!("{round}-{number}")), "content").unwrap();
        }
        let files: Vec<String> = objects(&server).into_keys().filter(|key| key.contains("tmp-pool")).collect();
        assert_eq!(files, [".surgetank-tmp-pool-test.1"], "round {round}");
        assert!(names(pool.member(0)).iter().all(|name| !name.contains("tmp")), "a program sees the pool's file");
        // The first member leaves last.
        let first = (0..3).find(|number| pool.status(*number)["has_registry"] == true).unwrap();
        let umount = |number: usize| {
            let mut command = pool.command_at(number, "umount", &["--timeout", "60s"]);
            let output = command.arg(pool.over(number)).output().unwrap();
            assert!(output.status.success(), "{output:?}");
        };
        (0..3).filter(|number| *number != first).chain([first]).for_each(umount);
        (0..3).rev().for_each(|number| pool.has_left(number));
        let there = objects(&server);
        assert_eq!(there.len(), 3 * (round + 1), "{:?}", there.keys());
    }
}

#[test]
fn files_of_all_members_reach_the_bucket() {
    let Some(server) = S3Server::start() else { return };
    let bucket = client(&server);
    put(&bucket, "old/kept", b"before");
    put(&bucket, "old/changed", b"before");
    let Some(mut pool) = pool_on(&server, "files") else { return };
    pool.mount_at_once(3);
    let mut wanted = BTreeMap::from([("old/kept".to_owned(), b"before".to_vec())]);
    // The third member owns `old`, the second `d`.
    fs::write(pool.member(2).join("old/changed"), "after").unwrap();
    wanted.insert("old/changed".to_owned(), b"after".to_vec());
    fs::create_dir(pool.member(1).join("d")).unwrap();
    let large = noise(7, 40_000_000);
    for number in 0..3 {
        let (d, old) = (pool.member(number).join("d"), pool.member(number).join("old"));
        let mut want = |path: String, content: &[u8]| drop(wanted.insert(path, content.to_vec()));
        fs::create_dir(d.join(format!("own{number}"))).unwrap();
        for (name, content) in
            [("empty", &b""[..]), ("small", b"small"), ("medium", &large[..300_000]), ("large", &large)]
        {
            let path = format!("own{number}/{name}");
            fs::write(d.join(&path), content).unwrap();
            want(format!("d/{path}"), content);
        }
        fs::write(old.join(format!("new{number}")), format!("by {number}")).unwrap();
        want(format!("old/new{number}"), format!("by {number}").as_bytes());
        // Names and versions that do not stay.
        fs::write(d.join("common"), format!("version {number}, and more")).unwrap();
        fs::write(d.join("common"), format!("version {number}")).unwrap();
        want("d/common".to_owned(), format!("version {number}").as_bytes());
        fs::write(d.join("gone"), &large[..1000]).unwrap();
        fs::rename(d.join("gone"), d.join(format!("renamed{number}"))).unwrap();
        want(format!("d/renamed{number}"), &large[..1000]);
        fs::write(d.join("gone"), "x").unwrap();
        fs::remove_file(d.join("gone")).unwrap();
        fs::create_dir(d.join("short")).unwrap();
        fs::write(d.join("short/f"), "x").unwrap();
        fs::remove_file(d.join("short/f")).unwrap();
        fs::remove_dir(d.join("short")).unwrap();
        fs::create_dir_all(old.join(format!("deep{number}/er"))).unwrap();
        // Each member sees all of it.
        for other in 0..3 {
            assert_eq!(fs::read_to_string(pool.member(other).join("d/common")).unwrap(), format!("version {number}"));
            assert!(fs::read(pool.member(other).join(format!("d/own{number}/large"))).unwrap() == large);
        }
    }
    // Appended, and written in the middle, by all members.
    for number in 0..3 {
        let path = pool.member(number).join("d/own1/medium");
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"end").unwrap();
        OpenOptions::new().write(true).open(&path).unwrap().write_all_at(b"middle", 1000 * number as u64).unwrap();
    }
    let changed = wanted.get_mut("d/own1/medium").unwrap();
    changed.extend(b"endendend");
    (0..3).for_each(|number| changed[1000 * number..1000 * number + 6].copy_from_slice(b"middle"));
    fs::set_permissions(pool.member(0).join("d/own2/small"), fs::Permissions::from_mode(0o600)).unwrap();
    let linked = fs::hard_link(pool.member(0).join("old/kept"), pool.member(0).join("old/linked")).unwrap_err();
    assert_eq!(linked.raw_os_error(), Some(libc::EPERM), "a server of objects has no hard links");
    let seen = names(&pool.member(0).join("old"));
    assert_eq!(seen, ["changed", "deep0", "deep1", "deep2", "kept", "new0", "new1", "new2"]);
    end(&mut pool);
    let there = objects(&server);
    assert_eq!(there.keys().collect::<Vec<_>>(), wanted.keys().collect::<Vec<_>>());
    wanted.iter().for_each(|(key, content)| assert!(there[key] == *content, "{key} differs"));
    assert!(server.parts().is_empty(), "an upload is left: {:?}", server.parts());
    // A member that knows nothing of it.
    pool.mount_at_once(1);
    assert_eq!(fs::metadata(pool.member(0).join("d/own2/small")).unwrap().mode() & 0o777, 0o600);
    assert_eq!(names(&pool.member(0).join("old/deep1")), ["er"]);
    assert!(!pool.member(0).join("d/short").exists());
    pool.end();
}

/// All members leave, the one with the registry last.
fn end(pool: &mut Pool) {
    let count = pool.count();
    let first = (0..count).find(|number| pool.status(*number)["has_registry"] == true).unwrap();
    for number in (0..count).filter(|number| *number != first).chain([first]) {
        let mut command = pool.command_at(number, "umount", &["--timeout", "60s"]);
        let output = command.arg(pool.over(number)).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }
    (0..count).rev().for_each(|number| pool.has_left(number));
}

/// A member has listed a directory, and read its files, when another one claims and changes it.
#[test]
fn no_member_believes_an_old_listing_or_content() {
    const DIRECTORIES: usize = 12;
    let Some(server) = S3Server::start() else { return };
    let bucket = client(&server);
    for number in 0..DIRECTORIES {
        put(&bucket, &format!("d{number}/f"), b"old content");
        put(&bucket, &format!("d{number}/goes"), b"goes");
        put(&bucket, &format!("d{number}/open"), b"old, and longer than before");
    }
    let Some(mut pool) = pool_on(&server, "stale") else { return };
    // The longest belief that a pool has.
    pool.store_ttl = "1s";
    (0..3).for_each(|_| pool.mount_one(&[]));
    for number in 0..DIRECTORIES {
        let [reads, changes, other] = [0, 1, 2].map(|member| pool.member(member).join(format!("d{number}")));
        let look = |dir: &Path| (names(dir), fs::read_to_string(dir.join("f")).unwrap());
        for dir in [&reads, &other, &reads] {
            assert_eq!(look(dir), (vec!["f".into(), "goes".into(), "open".into()], "old content".to_owned()));
            assert!(!dir.join("new").exists());
        }
        let mut open = File::open(reads.join("open")).unwrap();
        let mut first = [0; 3];
        open.read_exact(&mut first).unwrap();
        fs::write(changes.join("new"), "new").unwrap();
        fs::write(changes.join("f"), format!("content {number}")).unwrap();
        fs::remove_file(changes.join("goes")).unwrap();
        OpenOptions::new().write(true).open(changes.join("open")).unwrap().write_all_at(b"new", 0).unwrap();
        fs::set_permissions(changes.join("f"), fs::Permissions::from_mode(0o640)).unwrap();
        for dir in [&reads, &other] {
            assert_eq!(look(dir), (vec!["f".into(), "new".into(), "open".into()], format!("content {number}")));
            assert_eq!(fs::metadata(dir.join("f")).unwrap().mode() & 0o777, 0o640);
            assert!(!dir.join("goes").exists());
        }
        // Opened before the other member claimed the directory.
        open.seek(SeekFrom::Start(0)).unwrap();
        open.read_exact(&mut first).unwrap();
        assert_eq!(&first, b"new");
    }
    end(&mut pool);
    assert_eq!(objects(&server).len(), 3 * DIRECTORIES);
}

/// Again and again a member changes a directory and leaves. Then the others look, and one of them changes it.
#[test]
fn directories_of_a_member_that_left_are_as_it_left_them() {
    let Some(server) = S3Server::start() else { return };
    let bucket = client(&server);
    put(&bucket, "d/f", b"0");
    put(&bucket, "d/sub/f", b"0");
    let Some(mut pool) = pool_on(&server, "left") else { return };
    pool.store_ttl = "1s";
    (0..2).for_each(|_| pool.mount_one(&[]));
    for round in 1..5 {
        let before = format!("{}", round - 1);
        for number in 0..2 {
            let dir = pool.member(number).join("d");
            assert_eq!(fs::read_to_string(dir.join("f")).unwrap(), before);
            assert_eq!(fs::read_to_string(dir.join("sub/f")).unwrap(), before);
            assert!(!dir.join(format!("made{round}")).exists());
        }
        pool.mount_one(&[]);
        let dir = pool.member(2).join("d");
        fs::write(dir.join("f"), format!("{round}")).unwrap();
        fs::write(dir.join("sub/f"), format!("{round}")).unwrap();
        fs::create_dir(dir.join(format!("made{round}"))).unwrap();
        fs::write(dir.join(format!("made{round}/f")), "made").unwrap();
        fs::set_permissions(dir.join("sub"), fs::Permissions::from_mode(0o700 + round)).unwrap();
        fs::set_permissions(dir.join("sub/f"), fs::Permissions::from_mode(0o600 + round)).unwrap();
        if round > 1 {
            fs::remove_file(dir.join(format!("made{}/f", round - 1))).unwrap();
            fs::remove_dir(dir.join(format!("made{}", round - 1))).unwrap();
        }
        leave(&mut pool, 2);
        for number in 0..2 {
            let dir = pool.member(number).join("d");
            assert_eq!(names(&dir), ["f".to_owned(), format!("made{round}"), "sub".to_owned()], "member {number}");
            assert_eq!(fs::read_to_string(dir.join("f")).unwrap(), format!("{round}"), "member {number}");
            assert_eq!(fs::read_to_string(dir.join("sub/f")).unwrap(), format!("{round}"), "member {number}");
            assert_eq!(fs::read_to_string(dir.join(format!("made{round}/f"))).unwrap(), "made");
            assert_eq!(fs::metadata(dir.join("sub")).unwrap().mode() & 0o777, 0o700 + round);
            assert_eq!(fs::metadata(dir.join("sub/f")).unwrap().mode() & 0o777, 0o600 + round);
        }
    }
    // Another member takes them over.
    fs::write(pool.member(1).join("d/f"), "taken over").unwrap();
    assert_eq!(fs::read_to_string(pool.member(0).join("d/f")).unwrap(), "taken over");
    fs::remove_file(pool.member(1).join("d/made4/f")).unwrap();
    fs::remove_dir(pool.member(0).join("d/made4")).unwrap();
    end(&mut pool);
    let there = objects(&server);
    let wanted = [("d/f", "taken over"), ("d/sub/f", "4")].map(|(key, text)| (key.to_owned(), text.into()));
    assert_eq!(there, BTreeMap::from(wanted));
    assert!(!server.files().join(PREFIX).join("d/made4").exists());
}

/// Agents of the owner and of the member that writes are killed while files are on their way to the bucket.
#[test]
fn killed_agents_lose_nothing_and_leave_no_upload() {
    const FILES: usize = 40;
    let Some(server) = S3Server::start() else { return };
    let Some(mut pool) = pool_on(&server, "kills") else { return };
    (0..2).for_each(|_| pool.mount_one(&[]));
    fs::create_dir(pool.member(0).join("d")).unwrap();
    let large = noise(3, 20_000_000);
    let content = |number: usize| {
        if number.is_multiple_of(10) { large.clone() } else { format!("content {number}").into_bytes() }
    };
    let mut kills = 0;
    std::thread::scope(|scope| {
        let dir = pool.member(1).join("d");
        let writes = scope.spawn(move || {
            for number in 0..FILES {
                fs::write(dir.join(format!("new{number}")), content(number)).unwrap();
                fs::rename(dir.join(format!("new{number}")), dir.join(format!("f{number}"))).unwrap();
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        while !writes.is_finished() {
            for member in 0..2 {
                std::thread::sleep(Duration::from_millis(150));
                // (The one that is killed may just be replaced.)
                kills += usize::from(kill_process(pool.agent(member), Signal::KILL).is_ok());
            }
        }
        writes.join().unwrap();
    });
    assert!(kills > 2, "{kills} kills");
    // In the middle of the final drain, too.
    fs::write(pool.member(1).join("d/last"), &large).unwrap();
    std::thread::sleep(Duration::from_millis(30));
    kill_process(pool.agent(0), Signal::KILL).unwrap();
    eventually("the next agent serves", || fs::metadata(pool.member(1).join("d/last")).is_ok());
    end(&mut pool);
    let there = objects(&server);
    assert_eq!(there.len(), FILES + 1, "{:?}", there.keys());
    for number in 0..FILES {
        let is = &there[&format!("d/f{number}")];
        let should = if number.is_multiple_of(10) { large.clone() } else { format!("content {number}").into_bytes() };
        assert!(*is == should, "f{number} has {} bytes", is.len());
    }
    assert!(there["d/last"] == large);
    assert!(server.parts().is_empty(), "an upload is left: {:?}", server.parts());
}

#[test]
fn runs_share_a_bucket_and_end_with_their_files_in_it() {
    let Some(server) = S3Server::start() else { return };
    let Some(pool) = pool_on(&server, "runs") else { return };
    let waits = "until [ -e $1 ]; do sleep 0.01; done";
    let first = run(&pool, 0, &format!("mkdir d; echo one > d/one; set -- d/two; {waits}; cat d/two > d/three"));
    let second = run(&pool, 1, &format!("set -- d/one; {waits}; cat d/one; echo two > d/new; mv d/new d/two"));
    let (first, second) = (first.wait_with_output().unwrap(), second.wait_with_output().unwrap());
    assert!(first.status.success(), "{first:?}");
    assert!(second.status.success() && second.stdout == b"one\n", "{second:?}");
    // The pool of a Slurm job. (A start without the option does not report a pool that has ended.)
    let in_job = |number: usize, script: &str| {
        let mut command = pool.without_pool("run", number, &["--pool-host", "127.0.0.1", "--no-summary", "--over"]);
        command.arg(pool.over(number)).args(["--", "sh", "-euc", script]).current_dir(pool.over(number));
        command.env("SLURM_JOB_ID", "4711").env("SLURM_JOB_NUM_NODES", "2").spawn().unwrap()
    };
    let first = in_job(0, &format!("echo 1 > d/four; set -- d/five; {waits}"));
    let second = in_job(1, &format!("set -- d/four; {waits}; echo 2 > d/five"));
    for ended in [first.wait_with_output().unwrap(), second.wait_with_output().unwrap()] {
        assert!(ended.status.success() && said(&ended).contains("joins the pool slurm-4711"), "{ended:?}");
        assert!(!said(&ended).contains("not a member"), "{ended:?}");
    }
    let there: Vec<_> =
        objects(&server).into_iter().map(|(key, text)| (key, String::from_utf8(text).unwrap())).collect();
    let wanted = [("d/five", "2\n"), ("d/four", "1\n"), ("d/one", "one\n"), ("d/three", "two\n"), ("d/two", "two\n")];
    assert_eq!(there, wanted.map(|(key, text)| (key.to_owned(), text.to_owned())));
}

#[test]
fn start_beside_a_pool_of_the_bucket_says_so() {
    let Some(server) = S3Server::start() else { return };
    let Some(mut pool) = pool_on(&server, "beside") else { return };
    pool.mount_one(&[]);
    let mut command = pool.without_pool("run", 1, &["--quiet", "--over"]);
    let ended = command.arg(pool.over(1)).args(["--", "ls", "-A"]).output().unwrap();
    assert!(ended.status.success() && ended.stdout.is_empty(), "{ended:?}");
    assert!(said(&ended).contains("the pool test serves s3://"), "{ended:?}");
    // What cannot serve a pool is refused.
    fs::write("/mnt/rules.toml", "[[rules]]\nmatch = \"*.txt\"\ncompress = \"zstd\"\n").unwrap();
    let compress = ["--config", "/mnt/rules.toml"];
    let ended = pool.command("mount", 1, &compress).arg(pool.over(1)).output().unwrap();
    assert!(!ended.status.success() && said(&ended).contains("the store is on a server"), "{ended:?}");
    pool.end();
}

/// In directories that a program makes, and in those of the bucket. (Their numbers are as large as those of new files.)
#[test]
fn shim_serves_own_directories_over_a_bucket() {
    let Some(server) = S3Server::start() else { return };
    put(&client(&server), "old/kept", b"before");
    let Some(mut pool) = pool_on(&server, "shim") else { return };
    fs::write("/mnt/small.toml", "[[rules]]\nmatch = \"**\"\nsize = \"64K\"\n").unwrap();
    (0..2).for_each(|_| pool.mount_one(&["--config", "/mnt/small.toml"]));
    let worker = Worker::start(&pool, 0);
    assert!(worker.does("os.mkdir('new')").is_null());
    const FILES: u64 = 20;
    for path in (0..FILES).flat_map(|n| [format!("new/{n}"), format!("old/{n}")]) {
        assert!(worker.does(&format!("put('{path}', 'by the shim')")).is_null());
        let there = pool.member(1).join(&path);
        assert_eq!(fs::read_to_string(&there).unwrap(), "by the shim");
        fs::write(&there, "by another").unwrap();
        assert_eq!(worker.does(&format!("get(os.path.abspath('{path}'))")), "by another");
    }
    let counts = worker.end();
    assert!(counts.opens_by_agent() >= 2 * FILES - 2, "{}", counts.opens_by_agent());
    // (Now and then the other member's descriptor is still closing.)
    assert!(counts.opens_from_index() >= 2 * FILES * 3 / 4, "{}", counts.opens_from_index());
    pool.end();
    let there = objects(&server);
    assert!(
        (0..FILES).all(|n| there[&format!("old/{n}")] == b"by another" && there[&format!("new/{n}")] == b"by another")
    );
}

/// A node that was lost comes back with what it had not published over a bucket: that replaces nothing.
#[test]
fn what_a_lost_member_left_replaces_no_object() {
    let Some(server) = S3Server::start() else { return };
    let bucket = client(&server);
    for key in ["a/old", "a/gone", "a/same"] {
        put(&bucket, key, b"stored");
    }
    let Some(mut pool) = pool_on(&server, "back") else { return };
    pool.mount_one(&["--pool-lease", "6s"]);
    pool.mount_one(&["--drain-bytes-per-second-max", "2KiB"]);
    let (zero, owner) = (pool.member(0).to_owned(), pool.member(1).to_owned());
    fs::write(owner.join("a/first"), noise(40_000, 1)).unwrap();
    for name in ["a/both", "a/only", "a/old"] {
        fs::write(owner.join(name), "owner").unwrap();
    }
    fs::remove_file(owner.join("a/gone")).unwrap();
    pool.lose(1);
    eventually("the loss is noticed", || pool.status(0)["lost"][0]["member"] == 2);
    for name in ["a/both", "a/old"] {
        fs::write(zero.join(name), "zero").unwrap();
    }
    eventually("it is in the bucket", || {
        let there = objects(&server);
        ["a/both", "a/old"].iter().all(|key| there.get(*key).is_some_and(|content| content == b"zero"))
    });

    pool.mount_one(&[]);
    let only = |there: &BTreeMap<String, Vec<u8>>| -> BTreeMap<String, Vec<u8>> {
        let in_it = there.iter().filter(|(key, _)| key.starts_with("a/"));
        let named = |key: &String| key.split(".surgetank-conflict-").next().unwrap_or_default().to_owned();
        let mark = |key: &String| if key.contains(".surgetank-conflict-") { " beside" } else { "" };
        in_it.map(|(key, content)| (named(key) + mark(key), content.clone())).collect()
    };
    eventually("its queue is done", || only(&objects(&server)).contains_key("a/old beside"));
    let (owners, zeros, stored) = (b"owner".to_vec(), b"zero".to_vec(), b"stored".to_vec());
    let expected = [
        ("a/both", &zeros),
        ("a/both beside", &owners),
        ("a/first beside", &noise(40_000, 1)),
        ("a/gone", &stored),
        ("a/old", &zeros),
        ("a/old beside", &owners),
        ("a/only beside", &owners),
        ("a/same", &stored),
    ];
    let expected = expected.map(|(key, content)| (key.to_owned(), content.clone()));
    assert!(only(&objects(&server)) == BTreeMap::from(expected), "{:?}", only(&objects(&server)).keys());
}
