//! Members that are lost, and others that take their directories over.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::nodes::names;
use crate::pool::Pool;
use crate::scene::eventually;

pub fn bytes(count: usize, seed: u8) -> Vec<u8> {
    (0..count).map(|index| (index as u8).wrapping_mul(31).wrapping_add(seed)).collect()
}

/// Members 0 and 1, and member 2, which owns the directory `a` of the store and drains hardly anything.
fn pool_with_a_slow_owner(name: &str, stored: &[(&str, &str)]) -> Option<Pool> {
    let mut pool = Pool::start(name, 0)?;
    fs::create_dir(pool.store().join("a")).unwrap();
    for (path, text) in stored {
        fs::write(pool.store().join(path), text).unwrap();
    }
    pool.mount_one(&["--pool-lease", "6s"]);
    pool.mount_one(&[]);
    pool.mount_one(&["--drain-bytes-per-second-max", "1KiB"]);
    fs::write(pool.member(2).join("a/theirs"), bytes(200_000, 1)).unwrap();
    Some(pool)
}

fn lose_last(pool: &mut Pool) {
    let number = pool.count() - 1;
    pool.lose(number);
    eventually("the loss is noticed", || pool.status(0)["lost"][0]["member"] == number as u64 + 1);
}

pub fn read(path: impl AsRef<Path>) -> Option<Vec<u8>> {
    match fs::read(&path) {
        Ok(content) => Some(content),
        Err(why) if why.kind() == std::io::ErrorKind::NotFound => None,
        Err(why) => panic!("{}: {why}", path.as_ref().display()),
    }
}

/// What the content of a living node is comes back under its path, also in a directory that was lost; nothing that another
/// member removed does.
#[test]
fn directory_of_a_lost_member_is_taken_over_with_what_living_nodes_have() {
    let stored = [("a/old", "stored"), ("a/gone", "stored"), ("a/same", "stored")];
    let Some(mut pool) = pool_with_a_slow_owner("taken", &stored) else { return };
    let (zero, one) = (pool.member(0).to_owned(), pool.member(1).to_owned());
    fs::write(zero.join("a/mine"), bytes(300_000, 2)).unwrap();
    fs::set_permissions(zero.join("a/mine"), fs::Permissions::from_mode(0o751)).unwrap();
    let before = fs::metadata(zero.join("a/mine")).unwrap();
    fs::create_dir(one.join("a/made")).unwrap();
    fs::write(one.join("a/made/theirs"), bytes(100_000, 3)).unwrap();
    fs::write(one.join("a/part"), "one").unwrap();
    fs::rename(one.join("a/part"), one.join("a/whole")).unwrap();
    // A file is made at one member, and removed or changed by another.
    fs::write(zero.join("a/removed"), "zero").unwrap();
    fs::remove_file(one.join("a/removed")).unwrap();
    fs::write(zero.join("a/moved"), "zero").unwrap();
    fs::rename(one.join("a/moved"), one.join("a/elsewhere")).unwrap();
    fs::remove_file(one.join("a/gone")).unwrap();
    let dir = pool.store().join("a");
    let temporaries = || -> Vec<String> {
        let all = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        all.filter(|name| name.starts_with(".surgetank-tmp-")).collect()
    };
    eventually("a file is on its way to the store", || !temporaries().is_empty());
    let under_way = temporaries();
    lose_last(&mut pool);

    let begun = Instant::now();
    for over in [&one, &zero] {
        eventually("content comes back", || read(over.join("a/mine")) == Some(bytes(300_000, 2)));
        eventually("content comes back", || read(over.join("a/made/theirs")) == Some(bytes(100_000, 3)));
        eventually("content comes back", || read(over.join("a/whole")) == Some(b"one".to_vec()));
        assert_eq!(read(over.join("a/same")), Some(b"stored".to_vec()));
        // What the lost node's own programs did is undone.
        assert_eq!(read(over.join("a/theirs")), None);
        for name in ["a/gone", "a/removed", "a/part", "a/moved", "a/elsewhere"] {
            assert_eq!(read(over.join(name)), None, "{name}");
        }
        assert_eq!(names(&over.join("a")).into_iter().collect::<Vec<_>>(), ["made", "mine", "old", "same", "whole"]);
        let after = fs::metadata(over.join("a/mine")).unwrap();
        assert_eq!(
            (after.mode(), after.mtime(), after.mtime_nsec()),
            (before.mode(), before.mtime(), before.mtime_nsec())
        );
    }
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    // A rename of the lost member that the store carries out late finds nothing.
    for temporary in under_way {
        let late = fs::rename(dir.join(&temporary), dir.join("theirs")).unwrap_err();
        assert_eq!(late.kind(), std::io::ErrorKind::NotFound, "{temporary}");
    }
    // Both go on there, and so does a name of which something is lost.
    fs::write(zero.join("a/next"), "zero").unwrap();
    assert_eq!(fs::read_to_string(one.join("a/next")).unwrap(), "zero");
    let mut file = fs::OpenOptions::new().write(true).create_new(true).open(one.join("a/gone")).unwrap();
    file.write_all(b"again").unwrap();
    drop(file);
    for name in ["a/removed", "a/part", "a/moved", "a/elsewhere"] {
        fs::write(zero.join(name), "again").unwrap();
    }
    assert_eq!(fs::read_to_string(zero.join("a/gone")).unwrap(), "again");
    pool.end();
    let store = pool.store();
    assert_eq!(read(store.join("a/mine")), Some(bytes(300_000, 2)));
    assert_eq!(read(store.join("a/made/theirs")), Some(bytes(100_000, 3)));
    assert_eq!(read(store.join("a/gone")), Some(b"again".to_vec()));
    let all = ["elsewhere", "gone", "made", "mine", "moved", "next", "old", "part", "removed", "same", "whole"];
    assert_eq!(
        names(&store.join("a")).into_iter().collect::<Vec<_>>(),
        all,
        "temporaries of the lost member, or files that were not made"
    );
}

/// A file of the store that was overwritten by a living node is never shown in its older version.
#[test]
fn older_version_in_the_store_is_not_shown_for_what_is_lost() {
    let Some(mut pool) = pool_with_a_slow_owner("older", &[("a/mine", "stored"), ("a/theirs too", "stored")]) else {
        return;
    };
    let (zero, one) = (pool.member(0).to_owned(), pool.member(1).to_owned());
    fs::write(zero.join("a/part"), "newer").unwrap();
    fs::rename(zero.join("a/part"), zero.join("a/mine")).unwrap();
    // The content of this one is at the lost member.
    fs::write(pool.member(2).join("a/part"), "newer").unwrap();
    fs::rename(one.join("a/part"), one.join("a/theirs too")).unwrap();
    lose_last(&mut pool);
    let until = Instant::now() + Duration::from_secs(5);
    let mut is_back = false;
    while Instant::now() < until {
        for over in [&zero, &one] {
            let mine = read(over.join("a/mine"));
            assert!(mine.is_none() && !is_back || mine == Some(b"newer".to_vec()), "{mine:?}");
            is_back |= mine.is_some();
            assert_eq!(read(over.join("a/theirs too")), None);
        }
    }
    assert!(is_back, "content is not put back");
    fs::write(zero.join("a/theirs too"), "made again").unwrap();
    fs::write(one.join("a/part"), "").unwrap();
    pool.end();
    assert_eq!(read(pool.store().join("a/mine")), Some(b"newer".to_vec()));
    assert_eq!(read(pool.store().join("a/theirs too")), Some(b"made again".to_vec()));
}

/// One after the other is lost: the next ones take over what the lost ones had taken over.
#[test]
fn directories_outlive_two_losses() {
    let Some(mut pool) = pool_with_a_slow_owner("twice", &[]) else { return };
    let zero = pool.member(0).to_owned();
    fs::write(zero.join("a/zero"), "zero").unwrap();
    lose_last(&mut pool);
    // Member 1 takes it over.
    fs::write(pool.member(1).join("a/one"), "one").unwrap();
    eventually("content comes back", || read(pool.member(1).join("a/zero")) == Some(b"zero".to_vec()));
    pool.lose(1);
    eventually("content comes back", || read(zero.join("a/zero")) == Some(b"zero".to_vec()));
    fs::write(zero.join("a/last"), "last").unwrap();
    assert_eq!(pool.status(0)["lost"].as_array().unwrap().len(), 2);
    pool.end();
    assert_eq!(read(pool.store().join("a/zero")), Some(b"zero".to_vec()));
    assert_eq!(read(pool.store().join("a/last")), Some(b"last".to_vec()));
}

/// What a program last made of its names: their content, or nothing. `None`: a call failed, so it may be either.
type Made = BTreeMap<String, Option<Option<Vec<u8>>>>;

/// Changes names of its own in the directory until `stops`. Returns what is there then.
fn work(over: &Path, member: usize, seed: u64, stops: &AtomicBool) -> Made {
    let mut rng = fastrand::Rng::with_seed(seed * 10 + member as u64);
    let mut made = Made::new();
    while !stops.load(Ordering::SeqCst) {
        let dir = if rng.bool() { format!("a/below{member}") } else { "a".to_owned() };
        let name = format!("{dir}/of{member}-{}", rng.u32(0..12));
        let path = over.join(&name);
        let known = made.get(&name).cloned().unwrap_or(Some(None));
        let mut content = bytes(rng.usize(0..100_000), rng.u8(..));
        let (done, is) = match rng.u32(0..10) {
            0 if known.as_ref().is_some_and(Option::is_some) => (fs::remove_file(&path), None),
            1 if known.as_ref().is_some_and(Option::is_some) => {
                let append = |text: &[u8]| fs::OpenOptions::new().append(true).open(&path)?.write_all(text);
                let whole = known.flatten().map(|before| [&before[..], b"more"].concat());
                (append(b"more"), whole)
            }
            2..=4 => {
                let part = over.join(format!("{dir}/.part{member}"));
                let written = fs::create_dir_all(over.join(&dir)).and_then(|()| fs::write(&part, &content));
                (written.and_then(|()| fs::rename(&part, &path)), Some(std::mem::take(&mut content)))
            }
            _ => (fs::create_dir_all(over.join(&dir)).and_then(|()| fs::write(&path, &content)), Some(content)),
        };
        made.insert(name, done.is_ok().then_some(is));
        std::thread::sleep(Duration::from_millis(rng.u64(0..20)));
    }
    made
}

/// Programs of two nodes work on names of their own while the owner of their directories is lost. Nothing of what they were
/// answered is lost, but for removals, which are named. `SURGETANK_LOSSES` runs more cases, `SURGETANK_LOSS_SEED` begins with another one.
#[test]
fn nothing_that_living_nodes_did_is_lost_with_the_owner() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let first = number("SURGETANK_LOSS_SEED").unwrap_or(1);
    let (mut compared, mut failed) = (0, 0);
    let Some(mut pool) = Pool::start("losses", 0) else { return };
    for seed in first..first + number("SURGETANK_LOSSES").unwrap_or(1) {
        pool.again(&format!("case{seed}"), 0);
        fs::create_dir(pool.store().join("a")).unwrap();
        pool.mount_one(&["--pool-lease", "6s"]);
        pool.mount_one(&[]);
        let rate = ["1KiB", "1MiB", "1GiB"][seed as usize % 3];
        pool.mount_one(&["--drain-bytes-per-second-max", rate]);
        fs::write(pool.member(2).join("a/claims"), "").unwrap();
        let (zero, one) = (pool.member(0).to_owned(), pool.member(1).to_owned());
        let stops = AtomicBool::new(false);
        let made = std::thread::scope(|scope| {
            let works = [(0, &zero), (1, &one)].map(|(member, over)| {
                let stops = &stops;
                scope.spawn(move || work(over, member, seed, stops))
            });
            std::thread::sleep(Duration::from_millis(fastrand::Rng::with_seed(seed).u64(200..3000)));
            lose_last(&mut pool);
            // Some go on after the take-over, and some do not.
            std::thread::sleep(Duration::from_millis(if seed % 2 == 0 { 0 } else { 1500 }));
            stops.store(true, Ordering::SeqCst);
            works.map(|work| work.join().unwrap())
        });
        let made: Vec<_> = made.into_iter().flatten().collect();
        failed += made.iter().filter(|(_, is)| is.is_none()).count();
        let certain: BTreeMap<String, Option<Vec<u8>>> =
            made.into_iter().filter_map(|(name, is)| Some((name, is?))).collect();
        for (name, is) in &certain {
            for over in [&one, &zero] {
                eventually(&format!("seed {seed}: {name}"), || read(over.join(name)) == *is);
            }
        }
        let mut said = String::new();
        while pool.count() > 0 {
            said += &String::from_utf8_lossy(&pool.try_end_last().stderr);
        }
        for (name, is) in &certain {
            // A removal may be lost, and is named then: the store may have a newer file.
            let is_listed = said.contains(&format!(" {name}: member 3 "));
            let found = read(pool.store().join(name));
            assert!(
                if is_listed { is.is_none() } else { found == *is },
                "seed {seed}: {name} in the store: {:?} bytes, {:?} at the end; {said}",
                found.map(|found| found.len()),
                is.as_ref().map(Vec::len)
            );
            compared += 1;
        }
    }
    eprintln!("{compared} names compared; {failed} calls failed at the loss");
    assert!(compared >= 10, "nothing was compared");
}

/// Stored files of which the owner, member 2, has changed all, and has published nothing yet.
const STORED: [(&str, &str); 4] =
    [("a/old", "stored"), ("a/gone", "stored"), ("a/from", "stored"), ("a/kept", "stored")];

fn owner_with_changes(name: &str) -> Option<Pool> {
    let mut pool = Pool::start(name, 0)?;
    fs::create_dir(pool.store().join("a")).unwrap();
    for (path, text) in STORED {
        fs::write(pool.store().join(path), text).unwrap();
    }
    pool.mount_one(&["--pool-lease", "6s"]);
    pool.mount_one(&[]);
    pool.mount_one(&["--drain-bytes-per-second-max", "2KiB"]);
    let owner = pool.member(2).to_owned();
    // (All else comes behind it in the order.)
    fs::write(owner.join("a/first"), bytes(16_000, 1)).unwrap();
    fs::write(owner.join("a/both"), "owner").unwrap();
    fs::write(owner.join("a/only"), "owner").unwrap();
    fs::write(owner.join("a/old"), "owner").unwrap();
    fs::remove_file(owner.join("a/gone")).unwrap();
    fs::rename(owner.join("a/from"), owner.join("a/to")).unwrap();
    fs::set_permissions(owner.join("a/kept"), fs::Permissions::from_mode(0o600)).unwrap();
    fs::create_dir(owner.join("a/made")).unwrap();
    fs::write(owner.join("a/made/file"), "owner").unwrap();
    Some(pool)
}

/// Living members take the directory over, and change what the lost one has changed.
fn go_on_without(pool: &Pool) {
    let (zero, one) = (pool.member(0), pool.member(1));
    for name in ["a/both", "a/old"] {
        fs::write(zero.join(name), "zero").unwrap();
    }
    assert_eq!(read(one.join("a/gone")), Some(b"stored".to_vec()));
    assert_eq!(read(one.join("a/only")), None);
    fs::remove_file(one.join("a/from")).unwrap();
    eventually("it is in the store", || {
        let store = pool.store();
        read(store.join("a/both")) == Some(b"zero".to_vec())
            && read(store.join("a/old")) == Some(b"zero".to_vec())
            && read(store.join("a/from")).is_none()
    });
}

/// What the lost member has published since has replaced nothing, and is beside the names.
fn nothing_was_replaced(pool: &Pool) {
    let dir = pool.store().join("a");
    let beside = |of: &str| -> Option<Vec<u8>> {
        let prefix = format!("{of}.surgetank-conflict-");
        let found: Vec<String> = names(&dir).into_iter().filter(|name| name.starts_with(&prefix)).collect();
        assert!(found.len() <= 1, "{found:?}");
        read(dir.join(found.first()?))
    };
    let owners = || Some(b"owner".to_vec());
    let file = || {
        let made = names(&dir).into_iter().find(|name| name.starts_with("made.surgetank-conflict-"))?;
        read(dir.join(made).join("file"))
    };
    eventually("the lost member's queue is done", || file() == owners());
    assert_eq!(beside("first"), Some(bytes(16_000, 1)));
    for name in ["both", "only", "old"] {
        assert_eq!(beside(name), owners(), "{name}");
    }
    let there: Vec<String> = names(&dir).into_iter().filter(|name| !name.contains(".surgetank-conflict-")).collect();
    assert_eq!(there, ["both", "gone", "kept", "old"]);
    for (name, text) in [("both", "zero"), ("old", "zero"), ("gone", "stored"), ("kept", "stored")] {
        assert_eq!(read(dir.join(name)), Some(text.into()), "{name}");
    }
    assert_eq!(fs::metadata(dir.join("kept")).unwrap().mode() & 0o777, 0o644);
}

/// An owner that is cut off from its pool, and not from the store, is lost. It goes on draining, and replaces nothing of what
/// others have made meanwhile.
#[test]
fn member_that_is_cut_off_and_lives_replaces_nothing() {
    let Some(pool) = owner_with_changes("cut") else { return };
    pool.cut(2);
    eventually("the loss is noticed", || pool.status(0)["lost"][0]["member"] == 3);
    go_on_without(&pool);
    nothing_was_replaced(&pool);
    // Its programs see nothing more there.
    assert_eq!(fs::read(pool.member(2).join("a/kept")).unwrap_err().raw_os_error(), Some(libc::EIO));
}

/// A node that was lost comes back with what it had not published: that replaces nothing either.
#[test]
fn what_a_lost_member_left_replaces_nothing_when_it_comes_back() {
    let Some(mut pool) = owner_with_changes("back") else { return };
    lose_last(&mut pool);
    go_on_without(&pool);
    pool.mount_one(&[]);
    nothing_was_replaced(&pool);
    // As a new member it works there as any other.
    fs::write(pool.member(2).join("a/new"), "again").unwrap();
    assert_eq!(fs::read_to_string(pool.member(0).join("a/new")).unwrap(), "again");
    eventually("it is in the store", || read(pool.store().join("a/new")) == Some(b"again".to_vec()));
}

/// Both living nodes say since when the lost node's own work may be undone, whichever of them has asked it. Their exit codes
/// stay 0.
#[test]
fn verdict_says_since_when_the_lost_nodes_own_work_may_be_undone() {
    let Some(mut pool) = Pool::start("undone", 0) else { return };
    pool.mount_one(&["--pool-lease", "6s"]);
    pool.mount_one(&[]);
    pool.mount_one(&["--quiet-period", "24h"]);
    let begun = Instant::now();
    fs::write(pool.member(2).join("own"), "of the lost node").unwrap();
    // (Each member asks the next one every 5 s.)
    std::thread::sleep(Duration::from_secs(11));
    lose_last(&mut pool);
    for number in 0..2 {
        let mut command = pool.command_at(number, "wait", &[]);
        let output = command.arg(pool.member(number)).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{text}");
        assert!(text.contains("perhaps undone: what own programs of lost nodes did last: 1"), "{text}");
        let line = text.lines().find(|line| line.contains("member 3 of the pool")).unwrap_or_else(|| panic!("{text}"));
        let ago = line.split(" UTC, ").nth(1).and_then(|rest| rest.strip_suffix(" s ago"));
        let ago = Duration::from_secs(ago.and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("{line}")));
        let (least, most) = (begun.elapsed() - Duration::from_secs(4), begun.elapsed() + Duration::from_secs(2));
        assert!((least..most).contains(&ago), "{line}: {least:?} to {most:?}");
    }
    pool.end();
}
