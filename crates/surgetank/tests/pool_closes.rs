//! Closes that wait until other members have copies (`--replicas-at close`).

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};

use crate::pool::{Pool, run_with};
use crate::pool_replicas::{all_have_copies, bytes, lose_machine, of_member, read, try_close};
use crate::pool_shim;
use crate::scene::{MIB, eventually};

const AT_CLOSE: [&str; 4] = ["--replicas", "2", "--replicas-at", "close"];
/// Nothing is drained before the end.
const LATE: [&str; 2] = ["--quiet-period", "1h"];

/// Members of which the last one may be lost. Their closes wait.
fn pool(name: &str, members: usize) -> Option<Pool> {
    let mut pool = Pool::start(name, 0)?;
    fs::create_dir(pool.store().join("a")).unwrap();
    let options = [&AT_CLOSE[..], &LATE].concat();
    pool.mount_one(&[&["--pool-lease", "6s"], &options[..]].concat());
    (1..members).for_each(|_| pool.mount_one(&options));
    Some(pool)
}

fn written(path: &Path, content: &[u8]) -> File {
    let mut file = File::create(path).unwrap();
    file.write_all(content).unwrap();
    file
}

/// A thread that closes a file. Returns how long that takes.
fn closing(file: File) -> std::thread::JoinHandle<Duration> {
    std::thread::spawn(move || {
        let begun = Instant::now();
        close(file);
        begun.elapsed()
    })
}

/// Closes, and panics if that fails.
fn close(file: File) {
    try_close(file).unwrap();
}

/// It returns when another member has the file, wherever the name and the content are. A file that no other member may have is
/// closed at once.
#[test]
fn close_returns_when_another_member_has_the_file() {
    const STOPPED: Duration = Duration::from_secs(1);
    let Some(mut pool) = pool("closes", 2) else { return };
    let (zero, one) = (pool.member(0).to_owned(), pool.member(1).to_owned());
    fs::write(zero.join("a/claims"), "").unwrap();
    fs::create_dir(one.join("own")).unwrap();
    for name in ["own/file", "a/file"] {
        let file = written(&one.join(name), &bytes(300_000, 1));
        let stopped = pool.stop(0);
        let begun = closing(file);
        std::thread::sleep(STOPPED);
        let waits = !begun.is_finished();
        stopped.into_iter().for_each(|pid| kill_process(pid, Signal::CONT).unwrap());
        assert!(waits, "the close did not wait");
        let took = begun.join().unwrap();
        assert!((STOPPED..Duration::from_secs(20)).contains(&took), "{took:?}");
        all_have_copies(&pool, 0);
        all_have_copies(&pool, 1);
    }
    pool.end();
    assert_eq!(read(pool.store().join("a/file")), Some(bytes(300_000, 1)));
}

/// While a duplicate of the descriptor is open: nothing but the close can have made the copy.
#[test]
fn content_at_a_close_outlives_the_machine() {
    let Some(mut pool) = pool("close-lost", 3) else { return };
    let (zero, two) = (pool.member(0).to_owned(), pool.member(2).to_owned());
    fs::write(zero.join("a/claims"), "").unwrap();
    fs::create_dir(two.join("own")).unwrap();
    let mut kept = Vec::new();
    let names = ["own/small", "own/large", "a/small", "a/large"].map(PathBuf::from);
    for (number, name) in names.iter().enumerate() {
        let count = if name.ends_with("small") { 5 } else { 3 * MIB as usize + 7 };
        let mut file = written(&two.join(name), &bytes(count, number as u8));
        close(file.try_clone().unwrap());
        // (Of a second close, the longer content.)
        file.write_all(b"more").unwrap();
        close(file.try_clone().unwrap());
        file.write_all(b"lost").unwrap();
        kept.push((file, [bytes(count, number as u8), b"more".to_vec()].concat()));
    }
    let mut renamed = names.clone();
    renamed[0] = "own/renamed".into();
    fs::rename(two.join(&names[0]), two.join(&renamed[0])).unwrap();
    lose_machine(&mut pool);
    for (name, (_, content)) in renamed.iter().zip(&kept) {
        eventually(&format!("{} has the content of the close", name.display()), || {
            fs::read(zero.join(name)).is_ok_and(|found| found == *content)
        });
    }
    assert!(!zero.join(&names[0]).exists());
    drop(kept);
    pool.try_end_last();
}

/// The next agents know which copies are of a close, at the member of the program and at that of the name. A close that waits
/// meanwhile is waited for by the next one.
#[test]
fn content_at_a_close_outlives_agents() {
    let Some(mut pool) = pool("close-agents", 3) else { return };
    let (zero, two) = (pool.member(0).to_owned(), pool.member(2).to_owned());
    fs::write(zero.join("a/claims"), "").unwrap();
    fs::create_dir(two.join("own")).unwrap();
    let names = ["own/file", "a/file"];
    let kept = names.map(|name| {
        let file = written(&two.join(name), &bytes(70_000, 4));
        close(file.try_clone().unwrap());
        file
    });
    let killed = [2, 0].map(|number| (number, pool.agent(number)));
    let waiting = written(&two.join("own/waiting"), b"waits");
    let duplicate = waiting.try_clone().unwrap();
    killed.iter().for_each(|(_, agent)| kill_process(*agent, Signal::KILL).unwrap());
    let waiting = closing(waiting);
    for (number, agent) in killed {
        eventually("another agent serves", || pool.member(number).join("a").exists() && pool.agent(number) != agent);
    }
    waiting.join().unwrap();
    // (Copies that do not count would be dropped by now.)
    std::thread::sleep(Duration::from_secs(1));
    lose_machine(&mut pool);
    for (name, content) in
        names.map(|name| (name, bytes(70_000, 4))).into_iter().chain([("own/waiting", b"waits".to_vec())])
    {
        eventually(&format!("{name} has the content of the close"), || {
            fs::read(zero.join(name)).is_ok_and(|found| found == content)
        });
    }
    drop((kept, duplicate));
    pool.try_end_last();
}

/// Fills the member's tier to three quarters.
fn fill(pool: &Pool, number: usize) {
    fs::write(pool.member(number).join(FILLER), bytes(50 * MIB as usize, 0)).unwrap();
}

/// It gets no copy.
const FILLER: &str = "b/filler";
const KEPT: [&str; 2] = ["--rule", "filler=keep"];

/// Directories of the store: `b` is for what fills a tier.
fn directories(pool: &Pool) {
    ["a", "b"].iter().for_each(|dir| fs::create_dir(pool.store().join(dir)).unwrap());
}

/// A member that is full takes no copy: the next one is asked, also for a small file.
#[test]
fn close_asks_the_next_member_if_one_is_full() {
    let Some(mut pool) = Pool::start("close-full", 0) else { return };
    directories(&pool);
    let options = [&AT_CLOSE[..], &LATE, &KEPT].concat();
    pool.mount_one(&[&["--pool-lease", "6s"], &options[..]].concat());
    (1..3).for_each(|_| pool.mount_one(&options));
    let two = pool.member(2).to_owned();
    fill(&pool, 0);
    for number in 0..8 {
        let dir = two.join(format!("a/dir{number}"));
        fs::create_dir(&dir).unwrap();
        let took = closing(written(&dir.join("file"), b"small")).join().unwrap();
        assert!(took < Duration::from_secs(10), "{took:?}");
    }
    pool.end();
}

/// A copy that cannot be replaced stays. The status does not count it for what was written since.
#[test]
fn copy_that_cannot_be_replaced_stays() {
    let Some(mut pool) = Pool::start("close-refused", 0) else { return };
    directories(&pool);
    let options = [&AT_CLOSE[..], &LATE, &KEPT].concat();
    pool.mount_one(&[&["--pool-lease", "6s"], &options[..]].concat());
    pool.mount_one(&options);
    let (zero, one) = (pool.member(0).to_owned(), pool.member(1).to_owned());
    let mut file = written(&one.join("a/file"), b"first");
    close(file.try_clone().unwrap());
    assert_eq!(of_member(&pool, 1)["single_copy_files"], 0);
    fill(&pool, 0);
    file.write_all(b" and second").unwrap();
    let duplicate = file.try_clone().unwrap();
    let second = std::thread::spawn(move || drop(duplicate));
    eventually("the status says so", || of_member(&pool, 1)["single_copy_files"] == 1);
    std::thread::sleep(Duration::from_secs(1));
    assert!(!second.is_finished());
    lose_machine(&mut pool);
    eventually("the content of the first close is there", || read(zero.join("a/file")) == Some(b"first".to_vec()));
    second.join().unwrap();
    drop(file);
    pool.end();
}

/// A holder that leaves is replaced, also while the file is open.
#[test]
fn content_at_a_close_is_copied_again_when_its_holder_leaves() {
    let Some(mut pool) = pool("close-leaves", 3) else { return };
    let (zero, two) = (pool.member(0).to_owned(), pool.member(2).to_owned());
    let files: Vec<_> = (0..6).map(|number| two.join(format!("dir{number}"))).collect();
    let kept: Vec<_> = files
        .iter()
        .map(|dir| {
            fs::create_dir(dir).unwrap();
            let file = written(&dir.join("file"), b"content");
            close(file.try_clone().unwrap());
            file
        })
        .collect();
    assert_eq!(of_member(&pool, 2)["single_copy_files"], 0);
    let left = pool.try_end(1, "60s");
    assert!(left.status.success(), "{left:?}");
    eventually("the other member has the copies", || {
        // (The member that counts may learn later that the holder has left.)
        let know = [0, 2].iter().all(|member| pool.asked(*member, "members")["members"].as_array().unwrap().len() == 2);
        know && of_last(&pool)["single_copy_files"] == 0
    });
    lose_machine(&mut pool);
    for number in 0..6 {
        let path = zero.join(format!("dir{number}/file"));
        eventually("the content of the close is there", || read(&path) == Some(b"content".to_vec()));
    }
    drop(kept);
    pool.has_left(1);
    pool.end();
}

/// The last one of two that are left.
fn of_last(pool: &Pool) -> serde_json::Value {
    let mut command = pool.command_at(2, "status", &["--json"]);
    let output = command.arg(pool.member(2)).output().unwrap();
    let status = serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap();
    status[0]["pool"]["members"][1].clone()
}

/// What a duplicate has written after a close is copied when the file is sealed. If nothing was, it costs nothing more.
#[test]
fn copy_of_a_close_is_replaced_only_by_what_was_written_since() {
    let Some(mut pool) = pool("close-cost", 2) else { return };
    let (zero, one) = (pool.member(0).to_owned(), pool.member(1).to_owned());
    fs::create_dir(one.join("own")).unwrap();
    let sent = |pool: &Pool| {
        let members = pool.asked(1, "members")["members"].clone();
        members.as_array().unwrap().iter().map(|one| one["sent_bytes"].as_u64().unwrap()).sum::<u64>()
    };
    let before = sent(&pool);
    fs::write(one.join("own/whole"), bytes(8 * MIB as usize, 1)).unwrap();
    // (The comparison after the last close has been.)
    all_have_copies(&pool, 1);
    std::thread::sleep(Duration::from_millis(500));
    let cost = sent(&pool) - before;
    eprintln!("{cost} bytes were sent for a copy of {}", 8 * MIB);
    assert!((8 * MIB..8 * MIB + 200_000).contains(&cost), "{cost}");
    // As long as before, and a moment later: only the content differs.
    let file = written(&one.join("own/changed"), &bytes(100_000, 2));
    close(file.try_clone().unwrap());
    file.write_all_at(&bytes(1_000, 9), 50_000).unwrap();
    drop(file);
    let mut changed = bytes(100_000, 2);
    changed[50_000..51_000].copy_from_slice(&bytes(1_000, 9));
    all_have_copies(&pool, 1);
    lose_machine(&mut pool);
    for (name, content) in [("own/whole", bytes(8 * MIB as usize, 1)), ("own/changed", changed)] {
        eventually("the last content is there", || read(zero.join(name)) == Some(content.clone()));
    }
    pool.end();
}

/// A member alone waits until another one has come. A program that is killed does not.
#[test]
fn close_waits_for_a_member_that_can_have_the_copy() {
    let Some(mut pool) = pool("close-alone", 1) else { return };
    let zero = pool.member(0).to_owned();
    let mut child =
        std::process::Command::new("sh").arg("-c").arg("echo > a/killed").current_dir(&zero).spawn().unwrap();
    let begun = closing(written(&zero.join("a/file"), b"content"));
    // The agent has a thread for each of them, and goes on.
    let more: Vec<_> = (0..100).map(|number| closing(written(&zero.join(format!("a/{number}")), b"content"))).collect();
    std::thread::sleep(Duration::from_secs(1));
    assert!(of_member(&pool, 0)["single_copy_files"].as_u64() >= Some(101));
    // What has no name any more needs no copy.
    let removed = closing(written(&zero.join("a/removed"), b"content"));
    std::thread::sleep(Duration::from_millis(200));
    assert!(!removed.is_finished());
    fs::remove_file(zero.join("a/removed")).unwrap();
    assert!(removed.join().unwrap() < Duration::from_secs(10));
    assert!(!begun.is_finished() && !more.iter().any(|one| one.is_finished()) && child.try_wait().unwrap().is_none());
    child.kill().unwrap();
    eventually("the program ends", || child.try_wait().unwrap().is_some());
    pool.mount_one(&AT_CLOSE);
    begun.join().unwrap();
    let longest = more.into_iter().map(|one| one.join().unwrap()).max();
    assert!(longest < Some(Duration::from_secs(30)), "{longest:?}");
    all_have_copies(&pool, 0);
    pool.end();
}

/// Rules and hints say so for some files, in the words of WOSS, too. Other closes do not wait.
#[test]
fn rules_and_hints_say_which_closes_wait() {
    let Some(mut pool) = Pool::start("close-rules", 0) else { return };
    fs::write(
        "/mnt/closes.toml",
        "[[rules]]\nmatch = \"*.safe\"\nreplicas = 2\nreplicas_at = \"close\"\n\n[[rules]]\nmatch = \"*.tmp\"\nmode = \"remove\"\n",
    )
    .unwrap();
    fs::create_dir(pool.store().join("a")).unwrap();
    pool.mount_one(&["--pool-lease", "6s", "--config", "/mnt/closes.toml", "--quiet-period", "1h"]);
    pool.mount_one(&["--config", "/mnt/closes.toml"]);
    let (zero, one) = (pool.member(0).to_owned(), pool.member(1).to_owned());
    fs::write(zero.join("a/claims"), "").unwrap();
    fs::create_dir(zero.join("a/hinted")).unwrap();
    for (name, value) in [("Replication", "2"), ("ReplicationSemantics", "pessimistic")] {
        let status = std::process::Command::new("setfattr")
            .args(["-n", &format!("user.surgetank.hint.{name}"), "-v", value])
            .arg(zero.join("a/hinted"))
            .status()
            .unwrap();
        assert!(status.success());
    }
    let alone = || of_member(&pool, 0)["single_copy_files"].as_u64().unwrap();
    let before = alone();
    let mut kept = Vec::new();
    for over in [&zero, &one] {
        for name in ["a/one.safe", "a/hinted/one", "a/other", "a/of.tmp", "a/hinted/of.tmp"] {
            let file = written(&over.join(format!("{name}{}", if over == &zero { "" } else { ".safe" })), b"content");
            close(file.try_clone().unwrap());
            kept.push(file);
        }
    }
    // At member 0: all but the three that no rule or hint names. Through member 1 all are named so.
    assert_eq!(alone() - before, 3);
    drop(kept);
    pool.end();
}

/// Programs with the shim use the mount for such files, so their closes wait, too.
#[test]
fn closes_of_programs_with_the_shim_wait() {
    let Some(mut pool) = pool_shim::pool("closes", 1, &["a"], &["--pool-lease", "6s"]) else { return };
    pool.mount_one(&[&["--config", "/mnt/small.toml"], &AT_CLOSE[..], &LATE].concat());
    let script = "mkdir own; for i in $(seq 50); do echo $i > own/$i; done; python3 -c \"
import os, time
os.makedirs('own/sub')
fds = [os.open('own/sub/%d' % i, os.O_CREAT | os.O_WRONLY) for i in range(30)]
kept = [os.dup(fd) for fd in fds]
for fd in fds:
    os.write(fd, b'content')
    os.close(fd)
while os.path.exists('/mnt/closes-wait'):
    time.sleep(0.02)
\"";
    fs::write("/mnt/closes-wait", "").unwrap();
    let child = run_with(&pool, 1, &[], script);
    let made = pool.member(1).join("own/sub/29");
    eventually("the program has closed its files", || {
        fs::metadata(&made).is_ok_and(|found| found.len() == 7) && of_member(&pool, 1)["single_copy_files"] == 0
    });
    lose_machine(&mut pool);
    fs::remove_file("/mnt/closes-wait").unwrap();
    let zero = pool.member(0).to_owned();
    for number in 1..=50 {
        let content = format!("{number}\n").into_bytes();
        eventually("the file is there", || read(zero.join(format!("own/{number}"))) == Some(content.clone()));
    }
    for number in 0..30 {
        let path = zero.join(format!("own/sub/{number}"));
        eventually("the file is there", || read(&path) == Some(b"content".to_vec()));
    }
    // (Its agent is gone.)
    drop(child);
    pool.end();
}
