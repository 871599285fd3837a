//! Renames of files between directories of two members.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use rustix::process::{Signal, kill_process};

use crate::nodes::names;
use crate::pool::{Pool, run};

/// The directories of the members 0, 1 and 2.
const DIRS: [&str; 3] = ["a", "b", "c"];

/// A pool in which each member has claimed its directory.
fn pool_with_owners(name: &str, members: usize, more: &[&str]) -> Option<Pool> {
    let mut pool = Pool::start(name, 0)?;
    for dir in &DIRS[..members] {
        fs::create_dir(pool.store().join(dir)).unwrap();
    }
    (0..members).for_each(|_| pool.mount_one(more));
    for (member, dir) in DIRS[..members].iter().enumerate() {
        let claims = pool.member(member).join(dir).join("claims");
        fs::write(&claims, "").unwrap();
        fs::remove_file(claims).unwrap();
    }
    Some(pool)
}

fn errno(done: std::io::Result<()>) -> Result<(), Errno> {
    done.map_err(|why| Errno::from_io_error(&why).unwrap())
}

/// From the owner's member, to it, and from a third one: what the file is, and what every member sees then.
#[test]
fn file_moves_with_all_that_it_is() {
    let Some(mut pool) = pool_with_owners("moves", 3, &[]) else { return };
    for by in 0..3 {
        let root = pool.member(by);
        for (round, (maker, old)) in
            [(0, None), (1, None), (2, Some("old")), (0, Some("older"))].into_iter().enumerate()
        {
            let context = format!("by member {by}, made by {maker}, over {old:?}");
            let content = format!("content {by} {round}").repeat(1000);
            let from = pool.member(maker).join("a/file");
            fs::write(&from, &content).unwrap();
            fs::set_permissions(&from, fs::Permissions::from_mode(0o640)).unwrap();
            let made = fs::metadata(&from).unwrap();
            let to = format!("b/new{by}{round}");
            if let Some(old) = old {
                fs::write(pool.member(1).join(&to), old).unwrap();
                let refused = renameat_with(CWD, root.join("a/file"), CWD, root.join(&to), RenameFlags::NOREPLACE);
                assert_eq!(refused, Err(Errno::EXIST), "{context}");
            }
            let reader = File::open(root.join("a/file")).unwrap();
            fs::rename(root.join("a/file"), root.join(&to)).unwrap_or_else(|why| panic!("{context}: {why}"));
            // (At once, before anything else is asked.)
            assert_eq!(fs::read_to_string(root.join(&to)).unwrap(), content, "{context}");
            assert_eq!(fs::read_to_string(pool.store().join(&to)).unwrap(), content, "{context}: in the store");
            assert!(!pool.store().join("a/file").exists(), "{context}");
            let mut kept = String::new();
            (&reader).read_to_string(&mut kept).unwrap();
            assert_eq!(kept, content, "{context}: by a program that has it open");
            for member in 0..3 {
                let seen = pool.member(member).join(&to);
                assert_eq!(fs::read_to_string(&seen).unwrap(), content, "{context}, at {member}");
                let meta = fs::metadata(&seen).unwrap();
                assert_eq!(meta.permissions().mode() & 0o7777, 0o640, "{context}, at {member}");
                assert_eq!((meta.mtime_nsec(), meta.nlink()), (made.mtime_nsec(), 1), "{context}, at {member}");
                assert!(!pool.member(member).join("a/file").exists(), "{context}, at {member}");
            }
            // It is a file as any other one: it is written, and renamed on.
            OpenOptions::new().append(true).open(root.join(&to)).unwrap().write_all(b"more").unwrap();
            assert_eq!(fs::read_to_string(pool.member(2).join(&to)).unwrap(), format!("{content}more"), "{context}");
        }
    }
    pool.end();
    assert_eq!(names(&pool.store().join("b")).len(), 12);
    for name in names(&pool.store().join("b")) {
        let path = pool.store().join("b").join(name);
        assert!(fs::read_to_string(&path).unwrap().ends_with("more"));
        assert_eq!(fs::metadata(&path).unwrap().nlink(), 1, "{}: a second name stays", path.display());
    }
    assert!(names(&pool.store().join("a")).is_empty());
}

/// What can not be renamed so is as it was.
#[test]
fn what_does_not_move_stays() {
    let Some(mut pool) = pool_with_owners("stays", 3, &[]) else { return };
    let root = pool.member(2).to_owned();
    let refused = |from: &str, to: &str| errno(fs::rename(root.join(from), root.join(to)));
    fs::create_dir(pool.member(0).join("a/dir")).unwrap();
    assert_eq!(refused("a/dir", "b/dir"), Err(Errno::XDEV));
    fs::write(pool.member(0).join("a/one"), "one").unwrap();
    fs::hard_link(pool.member(0).join("a/one"), pool.member(0).join("a/two")).unwrap();
    assert_eq!(refused("a/one", "b/one"), Err(Errno::XDEV));
    let open = File::create(pool.member(0).join("a/open")).unwrap();
    open.write_all_at(b"before", 0).unwrap();
    assert_eq!(refused("a/open", "b/open"), Err(Errno::XDEV));
    open.write_all_at(b"after.", 0).unwrap();
    drop(open);
    assert_eq!(refused("a/absent", "b/absent"), Err(Errno::NOENT));
    fs::create_dir(pool.member(1).join("b/full")).unwrap();
    fs::write(pool.member(0).join("a/over"), "over").unwrap();
    assert_eq!(refused("a/over", "b/full"), Err(Errno::ISDIR));
    fs::write(pool.member(1).join("b/other"), "other").unwrap();
    let exchanged = renameat_with(CWD, root.join("a/over"), CWD, root.join("b/other"), RenameFlags::EXCHANGE);
    assert_eq!(exchanged, Err(Errno::XDEV));
    symlink("over", pool.member(0).join("a/link")).unwrap();
    fs::rename(root.join("a/link"), root.join("b/link")).unwrap();
    assert_eq!(fs::read_link(pool.member(0).join("b/link")).unwrap(), Path::new("over"));
    // The closed file goes.
    fs::rename(root.join("a/open"), root.join("b/open")).unwrap();
    assert_eq!(fs::read_to_string(pool.member(1).join("b/open")).unwrap(), "after.");
    pool.end();
    assert_eq!(names(&pool.store().join("a")).into_iter().collect::<Vec<_>>(), ["dir", "one", "over", "two"]);
    assert_eq!(
        names(&pool.store().join("b")).into_iter().collect::<Vec<_>>(),
        ["full", "link", "open", "other"],
        "a second name stays in the store"
    );
}

/// Programs decide by a rename which of them does a task: one of them has it, at whichever member.
#[test]
fn one_of_many_programs_takes_each_task() {
    const TASKS: usize = 30;
    let Some(mut pool) = pool_with_owners("tasks", 3, &[]) else { return };
    for task in 0..TASKS {
        fs::write(pool.member(0).join(format!("a/task{task}")), format!("{task}")).unwrap();
    }
    let meet = std::sync::Barrier::new(4);
    let taken: Vec<usize> = std::thread::scope(|scope| {
        let takers = [(0, "b"), (1, "b"), (2, "c"), (0, "a")].map(|(member, dir)| {
            let (root, meet) = (pool.member(member), &meet);
            scope.spawn(move || {
                let mut taken = 0;
                for task in 0..TASKS {
                    meet.wait();
                    // (A rename in one directory is much faster.)
                    if dir == "a" {
                        std::thread::sleep(Duration::from_millis(fastrand::u64(..60)));
                    }
                    let to = root.join(dir).join(format!("taken{task}-by{member}{dir}"));
                    match errno(fs::rename(root.join(format!("a/task{task}")), to)) {
                        Ok(()) => taken += 1,
                        Err(why) => assert_eq!(why, Errno::NOENT, "task {task} at member {member}"),
                    }
                }
                taken
            })
        });
        takers.into_iter().map(|taker| taker.join().unwrap()).collect()
    });
    eprintln!("taken by each: {taken:?}");
    assert_eq!(taken.iter().sum::<usize>(), TASKS, "{taken:?}");
    pool.end();
    let all: Vec<String> = DIRS.iter().flat_map(|dir| names(&pool.store().join(dir))).collect();
    assert_eq!(all.len(), TASKS, "{all:?}");
}

/// The kernel looks up both names while it holds the locks of both directories, and each look-up needs a lock that the other
/// program holds.
#[test]
fn renames_crosswise_do_not_wait_for_each_other() {
    const ROUNDS: usize = 60;
    let Some(mut pool) = pool_with_owners("crosswise", 2, &[]) else { return };
    let meet = std::sync::Barrier::new(2);
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for member in 0..2 {
            let (root, meet) = (pool.member(member), &meet);
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let from = root.join(DIRS[member]).join("file");
                    fs::write(&from, format!("{member} {round}")).unwrap();
                    meet.wait();
                    // (A name that no kernel knows.)
                    let to = root.join(DIRS[1 - member]).join(format!("new{round}"));
                    fs::rename(&from, &to).unwrap();
                    assert_eq!(fs::read_to_string(&to).unwrap(), format!("{member} {round}"));
                }
            });
        }
    });
    eprintln!("{} ms a round", begun.elapsed().as_millis() / ROUNDS as u128);
    pool.end();
    for (member, dir) in DIRS[..2].iter().enumerate() {
        for round in 0..ROUNDS {
            let content = fs::read_to_string(pool.store().join(dir).join(format!("new{round}"))).unwrap();
            assert_eq!(content, format!("{} {round}", 1 - member));
        }
        assert_eq!(names(&pool.store().join(dir)).len(), ROUNDS);
    }
}

/// Two programs exchange the places of two files by renames over each other.
#[test]
fn files_that_replace_each_other_end_in_one_place_each() {
    const ROUNDS: usize = 15;
    let Some(mut pool) = pool_with_owners("replace", 3, &[]) else { return };
    for round in 0..ROUNDS {
        for (member, dir) in DIRS[..2].iter().enumerate() {
            fs::write(pool.member(member).join(dir).join("file"), format!("{member} {round}")).unwrap();
        }
        let renamed: Vec<_> = std::thread::scope(|scope| {
            let both = [("a/file", "b/file", 1), ("b/file", "a/file", 2)].map(|(from, to, member)| {
                let root = pool.member(member);
                scope.spawn(move || errno(fs::rename(root.join(from), root.join(to))))
            });
            both.into_iter().map(|one| one.join().unwrap()).collect()
        });
        // One after the other: the second one moves the first one's file back, or finds none.
        assert!(renamed.iter().all(|done| matches!(done, Ok(()) | Err(Errno::NOENT))), "{renamed:?}");
        let left: Vec<_> = ["a/file", "b/file"].map(|file| fs::read_to_string(pool.member(2).join(file)).ok()).into();
        assert_eq!(left.iter().flatten().count(), 1, "round {round}: {renamed:?}, {left:?}");
    }
    pool.end();
}

/// A program with the shim closes a file and renames it at once.
#[test]
fn program_with_the_shim_renames_what_it_has_just_closed() {
    let Some(mut pool) = pool_with_owners("moves-shim", 2, &[]) else { return };
    let script = "set -e; for i in $(seq 50); do echo $i > a/made; mv -T --no-copy a/made b/got$i; \
                  test $(cat b/got$i) = $i; echo over > b/made; mv -T --no-copy b/made a/got$i; done";
    let can = std::process::Command::new("mv").arg("--help").output().unwrap();
    let script = if String::from_utf8_lossy(&can.stdout).contains("--no-copy") {
        script.to_owned()
    } else {
        // (An older mv copies without a word.)
        let rename = "python3 -c 'import os,sys; os.rename(*sys.argv[1:])'";
        script.replace("mv -T --no-copy", rename).replace("seq 50", "seq 10")
    };
    let mut program = run(&pool, 0, &script);
    assert!(program.wait().unwrap().success());
    let count = if script.contains("seq 10") { 10 } else { 50 };
    pool.end();
    for dir in ["a", "b"] {
        assert_eq!(names(&pool.store().join(dir)).len(), count, "{dir}");
    }
}

/// Programs at all members move files around while agents are killed. Each file is in one place, whole, at every end.
#[test]
fn killed_agents_lose_and_double_no_file() {
    let seconds = std::env::var("SURGETANK_RENAME_SECONDS").map_or(15, |text| text.parse().unwrap());
    let seed = std::env::var("SURGETANK_RENAME_SEED").map_or_else(|_| fastrand::u64(..), |text| text.parse().unwrap());
    eprintln!("SURGETANK_RENAME_SEED={seed}");
    let Some(mut pool) = pool_with_owners("moves-killed", 3, &[]) else { return };
    let ends = AtomicBool::new(false);
    let renamed = AtomicUsize::new(0);
    let mut kills = 0;
    let places: Vec<BTreeMap<String, PathBuf>> = std::thread::scope(|scope| {
        let movers: Vec<_> = (0..3)
            .map(|member| {
                let (pool, ends, renamed) = (&pool, &ends, &renamed);
                scope.spawn(move || move_files(pool.member(member), (member, seed), ends, renamed))
            })
            .collect();
        let mut random = fastrand::Rng::with_seed(seed);
        let until = Instant::now() + Duration::from_secs(seconds);
        while Instant::now() < until {
            std::thread::sleep(Duration::from_millis(random.u64(200..2000)));
            kill_process(pool.agent(random.usize(..3)), Signal::KILL).unwrap();
            kills += 1;
        }
        ends.store(true, Ordering::SeqCst);
        movers.into_iter().map(|mover| mover.join().unwrap()).collect()
    });
    let renamed = renamed.into_inner();
    eprintln!("{renamed} renames, {kills} agents killed");
    assert!(renamed > 8 && kills > 4, "{renamed} renames, {kills} kills: nothing was shown");
    for mine in &places {
        for (content, place) in mine {
            for member in 0..3 {
                let seen = fs::read_to_string(pool.member(member).join(place));
                assert_eq!(
                    seen.as_deref().ok(),
                    Some(&**content),
                    "SURGETANK_RENAME_SEED={seed}: {place:?} at {member}"
                );
            }
        }
    }
    pool.end();
    let wanted: BTreeMap<PathBuf, String> =
        places.into_iter().flatten().map(|(content, place)| (place, content)).collect();
    let mut found = BTreeMap::new();
    for dir in DIRS {
        for name in names(&pool.store().join(dir)) {
            let place = Path::new(dir).join(name);
            let content = fs::read_to_string(pool.store().join(&place)).unwrap();
            found.insert(place, content);
        }
    }
    assert_eq!(found, wanted, "SURGETANK_RENAME_SEED={seed}");
}

/// Where each file of this member's program is at the end, by content.
fn move_files(
    root: &Path,
    (member, seed): (usize, u64),
    ends: &AtomicBool,
    renamed: &AtomicUsize,
) -> BTreeMap<String, PathBuf> {
    const FILES: usize = 4;
    let mut random = fastrand::Rng::with_seed(seed ^ (member as u64 + 1));
    let mut files = Vec::new();
    for number in 0..FILES {
        let place = Path::new(DIRS[random.usize(..3)]).join(format!("file-{member}-{number}"));
        let content = format!("{member} {number} ").repeat(random.usize(1..3000));
        fs::write(root.join(&place), &content).unwrap();
        files.push((content, place));
    }
    let mut turn = 0;
    while !ends.load(Ordering::SeqCst) {
        turn += 1;
        let context = format!("SURGETANK_RENAME_SEED={seed}: turn {turn} of member {member}");
        let number = random.usize(..FILES);
        // (Now and then the file is new, or has new content.)
        if random.u8(..3) == 0 {
            files[number].0 = format!("{member} {number} {turn} ").repeat(random.usize(1..3000));
            fs::write(root.join(&files[number].1), &files[number].0).unwrap_or_else(|why| panic!("{context}: {why}"));
        }
        let name = format!("file-{member}-{number}-{}", random.u8(..3));
        let to = Path::new(DIRS[random.usize(..3)]).join(name);
        let from = files[number].1.clone();
        // (Of files of one program each has names of its own.)
        fs::rename(root.join(&from), root.join(&to))
            .unwrap_or_else(|why| panic!("{context}: {from:?} to {to:?}: {why}"));
        files[number].1 = to.clone();
        renamed.fetch_add(1, Ordering::Relaxed);
        let seen = fs::read_to_string(root.join(&to)).unwrap_or_else(|why| panic!("{context}: {to:?}: {why}"));
        assert!(seen == files[number].0, "{context}: {to:?} has another content than {from:?}");
        if from != to && root.join(&from).exists() {
            let there = fs::read_to_string(root.join(&from)).map(|text| text == files[number].0);
            std::thread::sleep(Duration::from_secs(3));
            let later = fs::read_to_string(root.join(&from)).map(|text| text == files[number].0);
            panic!("{context}: {from:?} is still there after a rename to {to:?}: {there:?}, 3 s later {later:?}");
        }
    }
    files.into_iter().collect()
}
