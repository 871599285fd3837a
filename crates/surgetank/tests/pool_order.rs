//! What members of a pool do at once: changes seen, agents that are killed, members that come and go.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::process::{Signal, kill_process};

use crate::pool::{Pool, run, run_with};

/// A file of the store, opened before any member changes its directory.
#[test]
fn file_that_was_open_before_the_claim_grows() {
    let Some(mut pool) = Pool::start("tail", 2) else { return };
    fs::write(pool.store().join("log"), "one\n").unwrap();
    fs::write(pool.store().join("other"), "").unwrap();
    let mut reads = File::open(pool.member(1).join("log")).unwrap();
    let mut text = String::new();
    reads.read_to_string(&mut text).unwrap();
    assert_eq!(text, "one\n");
    let mut appends = OpenOptions::new().append(true).open(pool.member(0).join("log")).unwrap();
    appends.write_all(b"two\n").unwrap();
    text.clear();
    reads.read_to_string(&mut text).unwrap();
    assert_eq!(text, "two\n");
    assert_eq!(reads.metadata().unwrap().len(), 8);
    drop((appends, reads));
    pool.end();
}

/// `flock FILE COMMAND` opens for reading. Neither member has changed the directory.
#[test]
fn locks_hold_on_files_that_were_only_opened_for_reading() {
    let Some(mut pool) = Pool::start("readlocks", 2) else { return };
    fs::write(pool.store().join("lock"), "").unwrap();
    let (here, there) =
        (File::open(pool.member(0).join("lock")).unwrap(), File::open(pool.member(1).join("lock")).unwrap());
    flock(&here, FlockOperation::NonBlockingLockExclusive).unwrap();
    assert_eq!(flock(&there, FlockOperation::NonBlockingLockExclusive), Err(rustix::io::Errno::AGAIN));
    flock(&here, FlockOperation::Unlock).unwrap();
    flock(&there, FlockOperation::NonBlockingLockExclusive).unwrap();
    assert_eq!(flock(&here, FlockOperation::NonBlockingLockShared), Err(rustix::io::Errno::AGAIN));
    drop(there);
    crate::scene::eventually("the lock ends with its file", || {
        flock(&here, FlockOperation::NonBlockingLockShared).is_ok()
    });
    drop(here);
    pool.end();
}

/// Other members believe a directory's name for a moment.
#[test]
fn directory_that_is_renamed_or_removed_is_gone_for_all_at_once() {
    let Some(mut pool) = Pool::start("moves", 2) else { return };
    let (here, there) = (pool.member(0).to_owned(), pool.member(1).to_owned());
    fs::create_dir(here.join("d")).unwrap();
    for round in 0..5 {
        fs::write(here.join("d/x"), round.to_string()).unwrap();
        assert_eq!(fs::read_to_string(there.join("d/x")).unwrap(), round.to_string());
        fs::rename(here.join("d"), here.join("e")).unwrap();
        assert!(!there.join("d/x").exists(), "round {round}: the old name");
        assert_eq!(fs::read_to_string(there.join("e/x")).unwrap(), round.to_string());
        fs::create_dir(here.join("d")).unwrap();
        assert!(!there.join("d/x").exists(), "round {round}: the new directory");
        fs::remove_file(there.join("e/x")).unwrap();
        fs::remove_dir(here.join("e")).unwrap();
        assert!(!there.join("e").exists(), "round {round}");
    }
    // A mode, too: it decides who goes through.
    fs::set_permissions(here.join("d"), fs::Permissions::from_mode(0o711)).unwrap();
    assert_eq!(fs::metadata(there.join("d")).unwrap().mode() & 0o777, 0o711);
    fs::set_permissions(here.join("d"), fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(fs::metadata(there.join("d")).unwrap().mode() & 0o777, 0o755);
    pool.end();
}

/// The member that removes them has just looked at them.
#[test]
fn tree_of_another_member_is_removed_without_waiting() {
    let Some(mut pool) = Pool::start("removes", 2) else { return };
    for number in 0..30 {
        fs::create_dir_all(pool.member(0).join(format!("tree/{number}/below"))).unwrap();
    }
    let begun = Instant::now();
    fs::remove_dir_all(pool.member(1).join("tree")).unwrap();
    // (60 directories at 100 ms each, the time for which the members believe a name.)
    assert!(begun.elapsed() < Duration::from_millis(3000), "{:?}", begun.elapsed());
    assert!(!pool.member(0).join("tree").exists());
    pool.end();
}

/// The agent of the member that asks is killed, between the reply of the owner and that of the kernel.
#[test]
fn appends_are_done_once_while_the_asking_agent_is_killed() {
    let Some(mut pool) = Pool::start("asks", 2) else { return };
    fs::create_dir(pool.member(0).join("d")).unwrap();
    let log = pool.member(1).join("d/log");
    File::create(&log).unwrap();
    const RECORDS: usize = 2000;
    let mut kills = 0;
    std::thread::scope(|scope| {
        let appends = scope.spawn(|| {
            let mut log = OpenOptions::new().append(true).open(&log).unwrap();
            for number in 0..RECORDS {
                log.write_all(format!("{number}\n").as_bytes()).unwrap();
                let made =
                    OpenOptions::new().write(true).create_new(true).open(pool.member(1).join(format!("d/{number}")));
                made.unwrap_or_else(|why| panic!("{number}: {why}"));
                fs::remove_file(pool.member(1).join(format!("d/{number}"))).unwrap();
            }
        });
        while !appends.is_finished() {
            // (One that did not serve before counts as a failed start.)
            std::thread::sleep(Duration::from_millis(150));
            // (The one that is killed may just be replaced.)
            kills += usize::from(kill_process(pool.agent(1), Signal::KILL).is_ok());
        }
        appends.join().unwrap();
    });
    assert!(kills > 3, "{kills} kills");
    let expected: String = (0..RECORDS).map(|number| format!("{number}\n")).collect();
    assert_eq!(fs::read_to_string(pool.member(0).join("d/log")).unwrap(), expected);
    pool.end();
    assert_eq!(fs::read_to_string(pool.store().join("d/log")).unwrap(), expected);
}

/// Each run is a member of its own: it begins the pool, joins it, ends it, or comes while another one ends it.
#[test]
fn runs_that_come_while_others_leave_all_succeed() {
    let Some(pool) = Pool::start("comings", 0) else { return };
    const ROUNDS: usize = 6;
    std::thread::scope(|scope| {
        for node in 0..3 {
            let pool = &pool;
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    // (Node 2 has two runs at once, which share an agent or come while it leaves.)
                    let name = format!("{node}-{round}");
                    let script = format!("mkdir -p d; echo {name} > d/{name}; cat d/{name}");
                    let output = run(pool, node.min(1), &script).wait_with_output().unwrap();
                    assert!(output.status.success(), "{name}: {output:?}");
                    assert_eq!(output.stdout, format!("{name}\n").into_bytes(), "{name}");
                }
            });
        }
    });
    for node in 0..3 {
        for round in 0..ROUNDS {
            let name = format!("{node}-{round}");
            assert_eq!(fs::read_to_string(pool.store().join("d").join(&name)).unwrap(), format!("{name}\n"));
        }
    }
}

/// A shell in a directory that another member made, and below, which leaves.
#[test]
fn working_directory_stays_when_its_member_has_left() {
    let Some(mut pool) = Pool::start("stays", 1) else { return };
    let made = "mkdir -p d/e; echo one > d/f; mkdir d/gone; until [ -e d/seen ]; do sleep 0.02; done; rmdir d/gone";
    let run = run(&pool, 1, made);
    let over = pool.member(0).to_path_buf();
    crate::scene::eventually("the run has made it", || over.join("d/gone").exists());
    let shell = |directory: &str, script: &str| {
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", &format!("read go; {script}")]).current_dir(over.join(directory));
        shell
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped());
        shell.spawn().unwrap()
    };
    let outer = shell("d", "cat f && echo two > g && cat g && ls && mkdir e/h && mv g e/h && cat e/h/g && pwd -P");
    let inner = shell("d/e", "ls .. && cat ../f && pwd -P && stat -c %F .");
    let gone = shell("d/gone", "ls; echo x > y");
    fs::write(over.join("d/seen"), "").unwrap();
    assert!(run.wait_with_output().unwrap().status.success());
    crate::scene::eventually("its member has left", || pool.status(0)["members"].as_array().unwrap().len() == 1);
    let ended = |mut shell: std::process::Child| {
        shell.stdin.take().unwrap().write_all(b"go\n").unwrap();
        let output = shell.wait_with_output().unwrap();
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let d = over.join("d").display().to_string();
    assert_eq!(ended(outer), (format!("one\ntwo\ne\nf\ng\nseen\ntwo\n{d}\n"), String::new()));
    assert_eq!(ended(inner), (format!("e\nf\nseen\none\n{d}/e\ndirectory\n"), String::new()));
    // (It was removed: no name may come to be elsewhere.)
    let (listed, errors) = ended(gone);
    assert!(listed.is_empty() && errors.contains("y"), "{listed} {errors}");
    pool.end();
    assert_eq!(fs::read_to_string(pool.store().join("d/e/h/g")).unwrap(), "two\n");
    assert!(!pool.store().join("d/gone").exists());
}

const BUSY: &str = r"
import os, sys
errors, rounds = [], 0
def change(): os.mkdir('own'); os.rmdir('own')
def write():
    with open('log', 'a') as log: log.write('x')
while not os.path.exists(sys.argv[1]):
    for what in (lambda: os.stat('.'), lambda: os.listdir('.'), change, write):
        try: what()
        except OSError as why: errors.append(str(why))
    rounds += 1
assert not errors, (rounds, len(errors), errors[:3])
print(rounds, os.path.getsize('log'))
";

/// A program works in a directory of a member that leaves meanwhile. This node has looked up more directories than the
/// member keeps open.
#[test]
fn program_works_on_while_its_directorys_member_leaves() {
    let Some(mut pool) = Pool::start("works", 1) else { return };
    let made = "mkdir -p d/e; mkdir $(seq -f d/%g 2100); touch d/made; until [ -e d/seen ]; do sleep 0.02; done";
    let run = run(&pool, 1, made);
    let over = pool.member(0).to_path_buf();
    crate::scene::eventually("the run has made it", || over.join("d/made").exists());
    let ends = pool.store().join("../ends");
    let mut busy = std::process::Command::new("python3");
    busy.args(["-c", BUSY]).arg(&ends).current_dir(over.join("d/e")).stdout(std::process::Stdio::piped());
    let busy = busy.stderr(std::process::Stdio::piped()).spawn().unwrap();
    crate::scene::eventually("the program works", || over.join("d/e/log").exists());
    assert_eq!(
        fs::read_dir(over.join("d"))
            .unwrap()
            .filter(|entry| entry.as_ref().unwrap().metadata().unwrap().is_dir())
            .count(),
        2101
    );
    fs::write(over.join("d/seen"), "").unwrap();
    assert!(run.wait_with_output().unwrap().status.success());
    crate::scene::eventually("its member has left", || pool.status(0)["members"].as_array().unwrap().len() == 1);
    std::thread::sleep(Duration::from_millis(300));
    fs::write(&ends, "").unwrap();
    let output = busy.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8(output.stdout).unwrap();
    let (rounds, bytes) = said.trim().split_once(' ').unwrap();
    assert_eq!(rounds, bytes, "each record is there");
    pool.end();
    assert_eq!(fs::metadata(pool.store().join("d/e/log")).unwrap().len().to_string(), bytes);
}

/// Other members have changed directories of the store, at several depths.
#[test]
fn tree_of_the_store_is_removed_whoever_has_changed_it() {
    let Some(mut pool) = Pool::start("trees", 3) else { return };
    fs::create_dir_all(pool.store().join("old/a/b")).unwrap();
    fs::create_dir(pool.store().join("old/c")).unwrap();
    fs::write(pool.store().join("old/a/b/f"), "old").unwrap();
    fs::write(pool.member(1).join("old/a/g"), "new").unwrap();
    fs::write(pool.member(2).join("old/a/b/h"), "new").unwrap();
    fs::create_dir(pool.member(2).join("old/c/made")).unwrap();
    // It is not empty, whatever the store has.
    let why = fs::remove_dir(pool.member(0).join("old/c")).unwrap_err();
    assert_eq!(why.kind(), std::io::ErrorKind::DirectoryNotEmpty);
    fs::write(pool.member(2).join("old/c/made/still"), "works").unwrap();
    fs::remove_dir_all(pool.member(0).join("old")).unwrap();
    for member in 0..3 {
        assert!(!pool.member(member).join("old").exists(), "member {member}");
    }
    // The names can be used again, by any member.
    for member in 0..3 {
        fs::create_dir_all(pool.member(member).join("old/a")).unwrap();
        fs::write(pool.member(member).join(format!("old/a/{member}")), "again").unwrap();
    }
    assert_eq!(fs::read_dir(pool.member(0).join("old/a")).unwrap().count(), 3);
    pool.end();
    assert_eq!(fs::read_dir(pool.store().join("old/a")).unwrap().count(), 3);
    assert!(!pool.store().join("old/c").exists());
}

/// The directories that a member removes are those that the other one changes, and the other way round. None waits for
/// the other one, and a name that was made is not lost.
#[test]
fn members_that_remove_each_others_directories_do_not_wait() {
    let Some(mut pool) = Pool::start("crossing", 2) else { return };
    const DIRECTORIES: usize = 12;
    for side in ["left", "right"] {
        for number in 0..DIRECTORIES {
            fs::create_dir_all(pool.store().join(side).join(number.to_string())).unwrap();
        }
    }
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for (member, mine, theirs) in [(0, "left", "right"), (1, "right", "left")] {
            let over = pool.member(member).to_path_buf();
            scope.spawn(move || {
                for number in 0..DIRECTORIES {
                    // (It may be gone already.)
                    let made = fs::write(over.join(theirs).join(number.to_string()).join("made"), "x").is_ok();
                    let removed = fs::remove_dir(over.join(mine).join(number.to_string()));
                    assert!(removed.is_ok() || removed.unwrap_err().kind() == std::io::ErrorKind::DirectoryNotEmpty);
                    let seen = over.join(theirs).join(number.to_string()).join("made").exists();
                    assert_eq!(made, seen, "{member} {number}");
                }
            });
        }
    });
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
    pool.end();
    for side in ["left", "right"] {
        for entry in fs::read_dir(pool.store().join(side)).unwrap() {
            assert!(entry.unwrap().path().join("made").exists());
        }
    }
}

/// A program sets `O_APPEND` after the open: its own node does not know where the file ends.
#[test]
fn appends_hold_if_the_flag_is_set_after_the_open() {
    let Some(mut pool) = Pool::start("flag", 2) else { return };
    fs::create_dir(pool.member(0).join("d")).unwrap();
    let (here, there) = (pool.member(0).join("d/log"), pool.member(1).join("d/log"));
    fs::write(&here, "abcdef").unwrap();
    let mut late = OpenOptions::new().write(true).open(&there).unwrap();
    rustix::fs::fcntl_setfl(&late, rustix::fs::OFlags::APPEND).unwrap();
    OpenOptions::new().append(true).open(&here).unwrap().write_all(b"OTHER").unwrap();
    late.write_all(b"END").unwrap();
    OpenOptions::new().append(true).open(&here).unwrap().write_all(b"MORE").unwrap();
    late.write_all(b"END").unwrap();
    drop(late);
    assert_eq!(fs::read_to_string(&here).unwrap(), "abcdefOTHERENDMOREEND");
    pool.end();
}

/// Commands about another member's files, which only that member can carry out.
#[test]
fn commands_reach_the_owner_of_a_file() {
    let Some(mut pool) = Pool::start("commands", 2) else { return };
    fs::create_dir(pool.member(0).join("d")).unwrap();
    fs::write(pool.member(0).join("d/f"), vec![7; 100_000]).unwrap();
    let says = |number: usize, verb: &str, words: &[&str]| {
        let output = pool.command_at(number, verb, words).arg(pool.member(number).join("d/f")).output().unwrap();
        assert!(output.status.success(), "{verb} at {number}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let why = |number: usize| -> serde_json::Value { serde_json::from_str(&says(number, "why", &["--json"])).unwrap() };
    says(1, "wait", &["--quiet"]);
    crate::scene::eventually("both know that it is durable", || why(1)["state"] == "durable");
    assert_eq!(why(1), why(0));
    says(1, "pin", &[]);
    assert!(says(0, "evict", &[]).contains(" 0 B freed"), "it is pinned");
    says(1, "unpin", &[]);
    let freed = says(1, "evict", &[]);
    assert!(freed.contains(" 100.00 KiB freed"), "{freed}");
    assert_eq!(why(1)["state"], "evicted");
    assert!(says(1, "prefetch", &[]).starts_with("1 files"));
    assert_eq!(why(0)["state"], "durable");
    let freed = says(0, "evict", &[]);
    assert!(freed.contains(" 100.00 KiB freed"), "asked of the owner itself: {freed}");
    says(1, "hint", &["mode=keep"]);
    assert_eq!(why(0)["mode"], "keep", "{}", why(0));
    let output = pool.command_at(1, "evict", &[]).arg(pool.member(1).join("d/none")).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    pool.end();
}

/// The registry is there: it leaves last.
#[test]
fn first_member_waits_for_the_others_and_says_so() {
    let Some(mut pool) = Pool::start("last", 2) else { return };
    fs::write(pool.member(0).join("f"), "safe").unwrap();
    let umount = |words: &[&str]| {
        let mut command = pool.command_of("umount", words);
        command.arg(pool.member(0)).stderr(std::process::Stdio::piped());
        command
    };
    let output = umount(&["--timeout", "2s"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("waits until 1 other member(s) of the pool have left"), "{said}");
    assert!(
        said.contains("other members of the pool need it") && said.contains("everything is in the store"),
        "{said}"
    );
    // It serves on.
    fs::write(pool.member(0).join("g"), "on").unwrap();
    assert_eq!(fs::read_to_string(pool.member(1).join("g")).unwrap(), "on");
    let waits = umount(&[]).spawn().unwrap();
    pool.end_last();
    let output = waits.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(fs::read_to_string(pool.store().join("g")).unwrap(), "on");
}

/// What a run writes in another member's directory is published by that member, from the run's node: here at 2 MiB a second.
#[test]
fn run_ends_when_other_members_have_drained_what_it_wrote() {
    let Some(mut pool) = Pool::start("verdict", 0) else { return };
    pool.mount_one(&[]);
    fs::create_dir(pool.member(0).join("d")).unwrap();
    let begun = Instant::now();
    let script = "head -c 6291456 /dev/zero | tr '\\0' x > d/big; echo done > d/new; mv d/new d/small";
    let slow = ["--drain-bytes-per-second-max", "2MiB"];
    let output = run_with(&pool, 1, &slow, script).wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(begun.elapsed() > Duration::from_secs(2), "{:?}: the drain was not slow", begun.elapsed());
    // (Looked at in the store, at once.)
    assert_eq!(fs::metadata(pool.store().join("d/big")).map(|found| found.len()).ok(), Some(6 << 20));
    assert_eq!(fs::read_to_string(pool.store().join("d/small")).unwrap(), "done\n");
    pool.end();
}

/// A run whose output is lost with another member's node.
#[test]
fn lost_member_ends_in_a_list_and_exit_code_3() {
    let Some(mut pool) = Pool::start("lost", 0) else { return };
    fs::create_dir(pool.store().join("a")).unwrap();
    fs::create_dir(pool.store().join("b")).unwrap();
    pool.mount_one(&["--pool-lease", "6s"]);
    pool.mount_one(&["--drain-bytes-per-second-max", "1KiB"]);
    // The second member owns `a`, the run's own member `b`.
    fs::write(pool.member(1).join("a/theirs"), vec![1; 100_000]).unwrap();
    // (One file's content is lost with its owner. That of the other file is at this node.)
    let script = "echo more >> a/theirs; head -c 100000 /dev/zero > a/mine; echo safe > b/safe; touch b/written; \
                  until [ -e b/lost ]; do sleep 0.1; done";
    let run = run(&pool, 2, script);
    crate::scene::eventually("the run has written", || pool.store().join("b/written").exists());
    pool.lose(1);
    fs::write(pool.member(0).join("b/lost"), "").unwrap();
    let output = run.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("a/theirs") && said.contains("member 2"), "{said}");
    assert!(!said.contains("b/safe") && !said.contains("a/mine"), "{said}");
    assert_eq!(fs::metadata(pool.store().join("a/mine")).unwrap().len(), 100_000);
    assert_eq!(fs::read_to_string(pool.store().join("b/safe")).unwrap(), "safe\n");
    assert_eq!(pool.status(0)["lost"][0]["member"], 2);
    let shown = pool.command_of("pool", &["members"]).arg(pool.member(0)).output().unwrap();
    assert!(String::from_utf8_lossy(&shown.stdout).contains("lost"), "{shown:?}");
    let shown = pool.command_of("status", &[]).arg(pool.member(0)).output().unwrap();
    assert!(String::from_utf8_lossy(&shown.stdout).contains(" lost: what it had not put"), "{shown:?}");
    pool.end();
}

/// A name that was looked up before it was there, in the root and below. `SURGETANK_POOL_TRIALS` makes more.
#[test]
fn closed_file_is_visible_to_a_member_that_is_told_of_it() {
    let Some(mut pool) = Pool::start("visible", 2) else { return };
    let trials = std::env::var("SURGETANK_POOL_TRIALS").ok().and_then(|text| text.parse().ok()).unwrap_or(500);
    fs::create_dir(pool.member(0).join("below")).unwrap();
    let (sender, told) = std::sync::mpsc::channel::<String>();
    let (looked, waits) = std::sync::mpsc::channel::<()>();
    let (here, there) = (pool.member(0).to_owned(), pool.member(1).to_owned());
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for (trial, name) in told.iter().enumerate() {
                if trial % 2 == 0 {
                    assert!(!there.join(&name).exists(), "{name}: too early");
                    looked.send(()).unwrap();
                    continue;
                }
                assert_eq!(fs::read_to_string(there.join(&name)).unwrap_or_else(|why| panic!("{name}: {why}")), name);
                // The other way: the next member reads what this one makes of it.
                fs::write(there.join(&name), name.to_uppercase()).unwrap();
                looked.send(()).unwrap();
            }
        });
        for trial in 0..trials {
            let name = if trial % 2 == 0 { format!("f{trial}") } else { format!("below/f{trial}") };
            sender.send(name.clone()).unwrap();
            waits.recv().unwrap();
            fs::write(here.join(&name), &name).unwrap();
            sender.send(name.clone()).unwrap();
            waits.recv().unwrap();
            assert_eq!(fs::read_to_string(here.join(&name)).unwrap(), name.to_uppercase());
            fs::remove_file(here.join(&name)).unwrap();
        }
        drop(sender);
    });
    pool.end();
}

/// A database that is open on two nodes, with a rollback journal: each transaction sees the one before.
#[test]
fn database_is_open_at_two_members() {
    let Some(mut pool) = Pool::start("sqlite", 2) else { return };
    let query = |member: usize, statement: &str| -> String {
        let output = std::process::Command::new("sqlite3")
            .args(["-cmd", ".timeout 30000"])
            .arg(pool.member(member).join("data.db"))
            .arg(statement)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    query(0, "PRAGMA journal_mode=delete; CREATE TABLE counter(n INTEGER); INSERT INTO counter VALUES(0);");
    const EACH: usize = 60;
    std::thread::scope(|scope| {
        for member in 0..2 {
            let query = &query;
            scope.spawn(move || {
                for _ in 0..EACH {
                    query(member, "BEGIN IMMEDIATE; UPDATE counter SET n = n + 1; COMMIT;");
                }
            });
        }
    });
    for member in 0..2 {
        assert_eq!(query(member, "PRAGMA integrity_check; SELECT n FROM counter;"), format!("ok\n{}\n", 2 * EACH));
    }
    pool.end();
}

/// The registry is lost with the first member: the pool ends, and each run says what it knows.
#[test]
fn lost_first_member_ends_runs_with_a_list_and_exit_code_3() {
    let Some(mut pool) = Pool::start("first", 0) else { return };
    fs::create_dir(pool.store().join("a")).unwrap();
    fs::create_dir(pool.store().join("b")).unwrap();
    pool.mount_one(&["--pool-lease", "6s", "--drain-bytes-per-second-max", "1KiB"]);
    fs::write(pool.member(0).join("a/theirs"), "x").unwrap();
    let script = "head -c 100000 /dev/zero > a/mine; echo safe > b/safe; touch b/written; sleep 2";
    let run = run(&pool, 1, script);
    crate::scene::eventually("the run has written", || pool.store().join("b/written").exists());
    let begun = Instant::now();
    pool.lose(0);
    assert!(pool.is_empty());
    let output = run.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("a/mine") && said.contains("member 1"), "{said}");
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
    assert_eq!(fs::read_to_string(pool.store().join("b/safe")).unwrap(), "safe\n");
}

/// Round trips are what a network costs. The kernel asks for attributes again: of what it has just made, and of a directory that it
/// has changed.
#[test]
fn operations_at_another_member_cost_few_round_trips() {
    let Some(mut pool) = Pool::start("trips", 2) else { return };
    let (here, there) = (pool.member(0).join("d"), pool.member(1).join("d"));
    fs::create_dir(&here).unwrap();
    let cost = |what: &str, times: u64, (least, each): (u64, u64), operation: &dyn Fn(u64)| {
        let calls = || -> u64 {
            let members = pool.status(1)["members"].clone();
            let other = members.as_array().unwrap().iter().find(|one| one["member"] == 1).unwrap();
            other["calls"].as_u64().unwrap()
        };
        let (before, begun) = (calls(), Instant::now());
        (0..times).for_each(operation);
        // (The directories above are asked for each 100 ms, the time of `--store-ttl`, and forgotten files now and then.)
        let looks = 6 * (begun.elapsed().as_millis() as u64 / 100 + 2);
        let cost = calls() - before;
        eprintln!("{what}: {cost} calls for {times}");
        assert!(cost >= times * least, "{what}: {cost} calls, so something was not counted");
        assert!(cost <= times * each + looks, "{what}: {cost} calls, at most {} and {looks}", times * each);
    };
    // (A member that answers for the directory looks names up itself.)
    cost("create and close", 200, (2, 3), &|number| {
        let path = there.join(number.to_string());
        drop(OpenOptions::new().write(true).create_new(true).open(path).unwrap());
    });
    cost("stat", 200, (0, 1), &|number| assert!(fs::metadata(there.join(number.to_string())).unwrap().is_file()));
    cost("unlink", 200, (2, 3), &|number| fs::remove_file(there.join(number.to_string())).unwrap());
    for number in 0..3000 {
        fs::write(here.join(number.to_string()), "").unwrap();
    }
    // (Opened, its attributes, listed three times and at its end, closed.)
    cost("list of 3,000 names", 10, (0, 7), &|_| assert_eq!(fs::read_dir(&there).unwrap().count(), 3000));
    pool.end();
}
