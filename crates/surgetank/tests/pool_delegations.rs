//! Read delegations: a member answers for directories of other members, and never with what was so before a change.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};

use crate::pool::Pool;
use crate::pool_counts::calls_at_rest;
use crate::pool_shim::Worker;
use crate::scene::eventually;

/// So many look-ups make a member ask for a directory, also after recalls. (With debug assertions.)
const LOOK_UPS: usize = 40;
const FILES: usize = 1000;

/// The first member owns the directory `d`.
fn pool(name: &str, members: usize) -> Option<Pool> {
    let mut pool = Pool::start(name, 0)?;
    pool.store_ttl = "1s";
    (0..members).for_each(|_| pool.mount_one(&["--pool-lease", "6s"]));
    fs::create_dir(pool.member(0).join("d")).unwrap();
    Some(pool)
}

/// Names and sizes, as `ls -l` finds them.
fn listed(directory: &Path) -> Vec<(String, u64)> {
    let entries = fs::read_dir(directory).unwrap().map(Result::unwrap);
    let mut all: Vec<_> = entries
        .map(|one| (one.file_name().into_string().unwrap(), one.path().symlink_metadata().unwrap().len()))
        .collect();
    all.sort();
    all
}

/// How many files other members have open at this one.
fn handles(pool: &Pool, number: usize) -> u64 {
    let status = pool.status(number);
    let members = status["members"].as_array().unwrap().iter();
    members.map(|one| one["handles"].as_u64().unwrap()).sum()
}

/// The member asks for the directory.
fn delegated(pool: &Pool, number: usize) {
    let path = pool.member(number).join("d");
    // (A refusal, while something changes, is repeated later.)
    eventually("the directory is delegated", || {
        (0..LOOK_UPS).for_each(|_| drop(path.join("missing").metadata()));
        let before = calls_at_rest(pool, number);
        (0..LOOK_UPS).for_each(|_| drop(path.join("missing").metadata()));
        // (The path itself is believed for a second.)
        calls_at_rest(pool, number) - before <= 4
    });
}

#[test]
fn second_listing_with_attributes_costs_no_messages_for_names() {
    let Some(mut pool) = pool("listed-twice", 2) else { return };
    let (owner, other) = (pool.member(0).join("d"), pool.member(1).join("d"));
    for number in 0..FILES {
        fs::write(owner.join(format!("file{number}")), "x".repeat(number % 7)).unwrap();
    }
    let expected = listed(&owner);
    let costs = [(); 2].map(|()| {
        let before = calls_at_rest(&pool, 1);
        assert_eq!(listed(&other), expected);
        calls_at_rest(&pool, 1) - before
    });
    eprintln!("{costs:?} round trips for {FILES} names with attributes");
    // (The first look-ups, the directory itself, and its path once a second.)
    assert!(costs[0] <= 40 && costs[1] <= 6, "{costs:?}");
    // The content of many files comes with one call.
    let costs = [(); 2].map(|()| {
        let before = calls_at_rest(&pool, 1);
        for number in 0..FILES {
            assert_eq!(fs::read(other.join(format!("file{number}"))).unwrap(), "x".repeat(number % 7).as_bytes());
        }
        calls_at_rest(&pool, 1) - before
    });
    eprintln!("{costs:?} round trips to read {FILES} files");
    assert!(costs[0] <= 30 && costs[1] <= 6, "{costs:?}");
    pool.end();
}

/// Each change, by the owner's programs with and without the shim, and by a third member.
#[test]
fn every_change_is_seen_at_once() {
    let Some(mut pool) = pool("recalled", 3) else { return };
    let (owner, reader, third) = (pool.member(0).join("d"), pool.member(1).join("d"), pool.member(2).join("d"));
    let shim = Worker::start(&pool, 0);
    for (round, at) in [&owner, &third, &owner].into_iter().enumerate() {
        let name = |what: &str| format!("{what}{round}");
        fs::write(at.join(name("file")), "1").unwrap();
        fs::write(at.join(name("twin")), "1").unwrap();
        fs::create_dir(at.join(name("dir"))).unwrap();
        let sees = |what: &str, change: &mut dyn FnMut(), look: &dyn Fn() -> bool| {
            delegated(&pool, 1);
            assert!(!look(), "{what}: before the change");
            change();
            assert!(look(), "{what}: after the change");
        };
        let (file, twin, made) = (name("file"), name("twin"), name("made"));
        let size = |name: &str| reader.join(name).metadata().map(|found| found.len()).ok();
        sees("write", &mut || fs::write(at.join(&file), "22").unwrap(), &|| size(&file) == Some(2));
        sees("content", &mut || fs::write(at.join(&file), "33").unwrap(), &|| {
            fs::read(reader.join(&file)).unwrap() == b"33"
        });
        let mut append = OpenOptions::new().append(true).open(at.join(&file)).unwrap();
        sees("append", &mut || append.write_all(b"4").unwrap(), &|| size(&file) == Some(3));
        drop(append);
        sees("create", &mut || drop(File::create_new(at.join(&made)).unwrap()), &|| size(&made) == Some(0));
        let mode = |name: &str| reader.join(name).metadata().map(|found| found.mode() & 0o777).ok();
        let chmod = |name: &str, mode| fs::set_permissions(at.join(name), Permissions::from_mode(mode)).unwrap();
        sees("chmod", &mut || chmod(&file, 0o600), &|| mode(&file) == Some(0o600));
        sees("chmod of the directory", &mut || chmod("", 0o711), &|| mode("") == Some(0o711));
        chmod("", 0o755);
        let moved = name("moved");
        sees("rename", &mut || fs::rename(at.join(&file), at.join(&moved)).unwrap(), &|| {
            size(&moved) == Some(3) && size(&file).is_none()
        });
        let is_twin = || fs::read(reader.join(&twin)).is_ok_and(|content| content == b"334");
        sees("replace", &mut || fs::rename(at.join(&moved), at.join(&twin)).unwrap(), &is_twin);
        let links = || reader.join(&twin).metadata().map_or(0, |found| found.nlink());
        sees("link", &mut || fs::hard_link(at.join(&twin), at.join(name("second"))).unwrap(), &|| links() == 2);
        sees("unlink of a link", &mut || fs::remove_file(at.join(name("second"))).unwrap(), &|| links() == 1);
        sees("symlink", &mut || symlink("target", at.join(name("link"))).unwrap(), &|| {
            fs::read_link(reader.join(name("link"))).is_ok_and(|to| to == Path::new("target"))
        });
        sees("mkdir", &mut || fs::create_dir(at.join(name("new"))).unwrap(), &|| reader.join(name("new")).is_dir());
        sees("rmdir", &mut || fs::remove_dir(at.join(name("new"))).unwrap(), &|| !reader.join(name("new")).exists());
        let inside = format!("dir{round}/in");
        sees("move out", &mut || fs::rename(at.join(&twin), at.join(&inside)).unwrap(), &|| {
            size(&twin).is_none() && size(&inside) == Some(3)
        });
        sees("unlink", &mut || fs::remove_file(at.join(&made)).unwrap(), &|| size(&made).is_none());
        let put = name("put");
        sees(
            "create with the shim",
            &mut || assert_eq!(shim.does(&format!("put('d/{put}', 'ab')")), serde_json::Value::Null),
            &|| size(&put) == Some(2),
        );
        sees("write with the shim", &mut || drop(shim.does(&format!("put('d/{put}', 'abc')"))), &|| {
            size(&put) == Some(3)
        });
        sees("chmod with the shim", &mut || drop(shim.does(&format!("os.chmod('d/{put}', 0o400)"))), &|| {
            mode(&put) == Some(0o400)
        });
        assert_eq!(listed(&reader), listed(&owner));
    }
    shim.end();
    pool.end();
}

/// A listing that is read while the directory changes has what stays, once.
#[test]
fn listing_goes_on_after_a_recall() {
    let Some(mut pool) = pool("listing", 2) else { return };
    let (owner, other) = (pool.member(0).join("d"), pool.member(1).join("d"));
    for number in 0..3 * FILES {
        File::create(owner.join(format!("file{number}"))).unwrap();
    }
    delegated(&pool, 1);
    let mut entries = fs::read_dir(&other).unwrap();
    let mut names: Vec<_> = entries.by_ref().take(10).map(|one| one.unwrap().file_name()).collect();
    fs::write(owner.join("new"), "").unwrap();
    names.extend(entries.map(|one| one.unwrap().file_name()).filter(|name| name != "new"));
    names.sort();
    names.dedup();
    assert_eq!(names.len(), 3 * FILES);
    pool.end();
}

/// A file stays open and readable while others come in its place. Agents are killed between.
#[test]
fn agents_are_replaced_and_nothing_stale_is_answered() {
    let Some(mut pool) = pool("replaced", 2) else { return };
    let (owner, other) = (pool.member(0).join("d"), pool.member(1).join("d"));
    // (The owner's next agent does not know whether the store has more names, and delegates nothing.)
    for killed in [1, 1, 0] {
        fs::write(owner.join("file"), "old").unwrap();
        delegated(&pool, 1);
        assert_eq!(other.join("file").metadata().unwrap().len(), 3);
        let mut open = File::open(other.join("file")).unwrap();
        let agent = pool.agent(killed);
        kill_process(agent, Signal::KILL).unwrap();
        fs::write(owner.join("new"), "newer").unwrap();
        fs::rename(owner.join("new"), owner.join("file")).unwrap();
        assert_eq!(other.join("file").metadata().unwrap().len(), 5);
        assert_eq!(fs::read(other.join("file")).unwrap(), b"newer");
        // (The agent's first look may be its last: another one serves the open file then.)
        assert_eq!(open.metadata().unwrap().len(), 3);
        let mut content = String::new();
        open.read_to_string(&mut content).unwrap();
        assert_eq!(content, "old");
        eventually("another agent serves", || pool.agent(killed) != agent);
    }
    pool.end();
}

/// Small files are opened without their owner. What is read later is what the owner has then; what it has no more stays.
#[test]
fn files_opened_without_their_owner_follow_it() {
    let Some(mut pool) = pool("opened", 2) else { return };
    let (owner, other) = (pool.member(0).join("d"), pool.member(1).join("d"));
    for killed in [None, Some(1), None] {
        for name in ["kept", "written", "cut", "removed", "replaced"] {
            fs::write(owner.join(name), "first").unwrap();
        }
        delegated(&pool, 1);
        // (Their names are looked up here.)
        assert_eq!(listed(&other).len(), 5);
        eventually("nothing is open at the owner", || handles(&pool, 0) == 0);
        let open = |name: &str| {
            let mut file = File::open(other.join(name)).unwrap();
            let mut begin = [0; 2];
            file.read_exact(&mut begin).unwrap();
            assert_eq!(&begin, b"fi");
            file
        };
        let [mut kept, mut written, mut cut, mut removed, mut replaced] =
            ["kept", "written", "cut", "removed", "replaced"].map(open);
        assert_eq!(handles(&pool, 0), 0, "files were opened at their owner");
        assert_eq!(rustix::fs::seek(&kept, rustix::fs::SeekFrom::Data(3)), Ok(3));
        assert_eq!(rustix::fs::seek(&kept, rustix::fs::SeekFrom::Hole(0)), Ok(5));
        assert_eq!(rustix::fs::seek(&kept, rustix::fs::SeekFrom::Start(2)), Ok(2));
        kept.sync_all().unwrap();
        if let Some(killed) = killed {
            let agent = pool.agent(killed);
            kill_process(agent, Signal::KILL).unwrap();
            eventually("another agent serves", || pool.agent(killed) != agent);
        }
        fs::write(owner.join("written"), "second, and longer").unwrap();
        OpenOptions::new().write(true).open(owner.join("cut")).unwrap().set_len(3).unwrap();
        fs::remove_file(owner.join("removed")).unwrap();
        fs::write(owner.join("new"), "other").unwrap();
        fs::rename(owner.join("new"), owner.join("replaced")).unwrap();
        let rest = |file: &mut File| {
            let mut rest = String::new();
            file.read_to_string(&mut rest).unwrap();
            rest
        };
        assert_eq!(rest(&mut kept), "rst");
        assert_eq!(rest(&mut written), "cond, and longer");
        assert_eq!(rest(&mut cut), "r");
        assert_eq!(rest(&mut removed), "rst");
        assert_eq!(rest(&mut replaced), "rst");
        let found = removed.metadata().unwrap();
        assert_eq!((found.nlink(), found.len()), (0, 5));
        assert_eq!(rustix::fs::seek(&removed, rustix::fs::SeekFrom::Hole(1)), Ok(5));
        removed.sync_all().unwrap();
        // A lock of such a file is one for all nodes.
        kept.try_lock().unwrap();
        let at_owner = OpenOptions::new().write(true).open(owner.join("kept")).unwrap();
        assert!(at_owner.try_lock().is_err());
        drop(kept);
        eventually("the lock ends with the file", || at_owner.try_lock().is_ok());
        // (A write at the owner is seen by a descriptor from before it.)
        let mut late = File::open(other.join("cut")).unwrap();
        fs::write(owner.join("cut"), "third").unwrap();
        assert_eq!(rest(&mut late), "third");
    }
    pool.end();
}

/// A file that was opened without its owner keeps that one from leaving, and is read there by then.
#[test]
fn owner_stays_while_its_file_is_open_at_a_member_that_did_not_ask() {
    let Some(mut pool) = Pool::start("stays", 3) else { return };
    fs::create_dir(pool.member(2).join("d")).unwrap();
    fs::write(pool.member(2).join("d/file"), "first").unwrap();
    delegated(&pool, 1);
    assert_eq!(listed(&pool.member(1).join("d")).len(), 1);
    eventually("nothing is open at the owner", || handles(&pool, 2) == 0);
    let mut open = File::open(pool.member(1).join("d/file")).unwrap();
    assert_eq!(handles(&pool, 2), 0, "the file was opened at its owner");
    let leave = |pool: &Pool, timeout: &str| {
        let output =
            pool.command_at(2, "pool", &["leave"]).args(["--timeout", timeout]).arg(pool.over(2)).output().unwrap();
        output.status.code()
    };
    assert_eq!(leave(&pool, "2s"), Some(1));
    assert_eq!(handles(&pool, 2), 1);
    fs::write(pool.member(0).join("d/file"), "second").unwrap();
    let mut content = String::new();
    open.read_to_string(&mut content).unwrap();
    assert_eq!(content, "second");
    drop(open);
    assert_eq!(leave(&pool, "60s"), Some(0));
    pool.has_left(2);
    assert_eq!(fs::read_to_string(pool.member(1).join("d/file")).unwrap(), "second");
    pool.end();
}

/// A member that does not answer delays a change for some seconds, and knows it afterwards.
#[test]
fn stopped_member_delays_a_change_and_is_not_stale_later() {
    const MOST: Duration = Duration::from_secs(9);
    let Some(mut pool) = pool("stopped", 2) else { return };
    let (owner, other) = (pool.member(0).join("d"), pool.member(1).join("d"));
    fs::write(owner.join("file"), "old").unwrap();
    delegated(&pool, 1);
    assert_eq!(other.join("file").metadata().unwrap().len(), 3);
    let stopped = pool.stop(1);
    let begun = Instant::now();
    fs::write(owner.join("file"), "newer").unwrap();
    let took = begun.elapsed();
    stopped.into_iter().for_each(|pid| kill_process(pid, Signal::CONT).unwrap());
    assert!(took < MOST, "{took:?}");
    // (It may be out of the pool: then it says so.)
    let found = other.join("file").metadata().map(|found| found.len());
    assert!(found.as_ref().is_ok_and(|len| *len == 5) || found.is_err(), "{found:?}");
    if found.is_ok() {
        pool.end();
    }
}
