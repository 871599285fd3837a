//! Files whose name and whose content are at different members: the content stays where a program wrote it.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Signal, kill_process};

use crate::pool::Pool;
use crate::scene::eventually;

const MIB: usize = 1 << 20;

/// Contents that a member has for files of other members, and their lengths.
fn contents(pool: &Pool, number: usize) -> Vec<(PathBuf, u64)> {
    let mut found = Vec::new();
    let mut left = vec![pool.store().with_file_name(format!("tier{number}"))];
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
            let path = entry.path();
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => left.push(path),
                Ok(_) if directory.ends_with(".surgetank-homes") => {
                    found.push((path, entry.metadata().map_or(0, |metadata| metadata.len())));
                }
                _ => {}
            }
        }
    }
    found
}

/// Bytes between a member and all others so far.
fn network_bytes(pool: &Pool, number: usize) -> u64 {
    let members = pool.status(number)["members"].clone();
    let of = |one: &serde_json::Value, what: &str| one[what].as_u64().unwrap();
    members.as_array().unwrap().iter().map(|one| of(one, "sent_bytes") + of(one, "received_bytes")).sum()
}

fn bytes(length: usize, seed: u8) -> Vec<u8> {
    (0..length).map(|at| (at as u8).wrapping_mul(31).wrapping_add((at >> 8) as u8) ^ seed).collect()
}

fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Table 4 of WOSS: a pipeline moves no content, also in a directory of another member.
#[test]
fn pipeline_in_another_members_directory_moves_no_content() {
    let Some(mut pool) = Pool::start("home", 3) else { return };
    fs::write(pool.member(0).join("first"), "the first member owns the root").unwrap();
    let (here, content) = (pool.member(1).to_owned(), bytes(16 * MIB, 1));
    let before = network_bytes(&pool, 1);
    // One task writes, the next one reads that and writes, on one node.
    fs::write(here.join("a"), &content).unwrap();
    fs::write(here.join("b.tmp"), fs::read(here.join("a")).unwrap()).unwrap();
    fs::rename(here.join("b.tmp"), here.join("b")).unwrap();
    assert_eq!(fs::read(here.join("b")).unwrap(), content);
    assert_eq!(contents(&pool, 1).iter().map(|(_, length)| length).sum::<u64>(), 32 * MIB as u64);
    // The drain takes it from there, too.
    eventually("both are in the store", || {
        let in_store = |name| fs::read(pool.store().join(name)).is_ok_and(|there| there == content);
        in_store("a") && in_store("b")
    });
    let moved = network_bytes(&pool, 1) - before;
    assert!(moved < MIB as u64, "{moved} bytes on the network for 32 MiB that were written and read on one node");
    // The owner and others see them as they are.
    for number in [0, 2] {
        let there = pool.member(number);
        assert_eq!(names(there), ["a", "b", "first"]);
        let metadata = fs::metadata(there.join("b")).unwrap();
        assert_eq!((metadata.len(), metadata.blocks()), (16 * MIB as u64, 16 * MIB as u64 / 512));
        assert_eq!(metadata.mtime_nsec(), fs::metadata(here.join("b")).unwrap().mtime_nsec());
        assert!(fs::read(there.join("b")).unwrap() == content, "member {number}");
    }
    assert!(network_bytes(&pool, 1) - before > 32 * MIB as u64, "the figure counts content");
    // Programs see nothing of how it is done.
    assert!(!names(&here).iter().any(|name| name.contains("homes")));
    assert!(fs::metadata(here.join(".surgetank-homes")).is_err());
    pool.end();
    assert!(fs::read(pool.store().join("b")).unwrap() == content);
    assert_eq!(names(&pool.store()), ["a", "b", "first"]);
}

/// Table 4 of WOSS: a reduce moves what is elsewhere, and a broadcast moves the file to each other node once.
#[test]
fn reduce_and_broadcast_move_each_byte_once() {
    const PART: usize = 8 * MIB;
    let Some(mut pool) = Pool::start("table-4", 0) else { return };
    // (Nothing is drained meanwhile: that moves no content, and takes files from their home.)
    (0..3).for_each(|_| pool.mount_one(&["--quiet-period", "1h"]));
    fs::create_dir(pool.member(0).join("d")).unwrap();
    let moved = |pool: &Pool| -> u64 {
        let pairs = pool.status(0)["traffic"].clone();
        pairs.as_array().unwrap().iter().map(|pair| pair["bytes"].as_u64().unwrap()).sum()
    };
    let read = |pool: &Pool, number: usize, name: &str, seed: u8| {
        assert!(fs::read(pool.member(number).join(name)).unwrap() == bytes(PART, seed), "{name} at member {number}");
    };
    let before = moved(&pool);
    for number in 0..3 {
        fs::write(pool.member(number).join(format!("d/part{number}")), bytes(PART, number as u8)).unwrap();
    }
    let written = moved(&pool) - before;
    assert!(written < MIB as u64, "{written} bytes on the network for parts that stay on their nodes");
    (0..3).for_each(|number| read(&pool, 2, &format!("d/part{number}"), number as u8));
    let reduced = moved(&pool) - before;
    let elsewhere = 2 * PART as u64;
    assert!((elsewhere..elsewhere * 11 / 10).contains(&reduced), "{reduced} bytes for {elsewhere} that are elsewhere");
    fs::write(pool.member(0).join("d/all"), bytes(PART, 9)).unwrap();
    let before = moved(&pool);
    (0..3).for_each(|number| read(&pool, number, "d/all", 9));
    let spread = moved(&pool) - before;
    assert!((elsewhere..elsewhere * 11 / 10).contains(&spread), "{spread} bytes to two nodes for {PART}");
    pool.end();
}

/// Everything that programs of three nodes do with one file at the same time is one file's.
#[test]
fn file_is_one_for_writers_on_all_nodes() {
    let Some(mut pool) = Pool::start("home-writers", 3) else { return };
    fs::write(pool.member(0).join("first"), "").unwrap();
    let paths: Vec<PathBuf> = (0..3).map(|number| pool.member(number).join("file")).collect();
    let made = File::create_new(&paths[1]).unwrap();
    made.write_all_at(&bytes(MIB, 1), MIB as u64).unwrap();
    assert!(File::create_new(&paths[2]).is_err_and(|why| why.kind() == std::io::ErrorKind::AlreadyExists));
    // The length is seen while the file is open.
    assert!(paths.iter().all(|path| fs::metadata(path).unwrap().len() == 2 * MIB as u64));
    let open = |number: usize| OpenOptions::new().read(true).write(true).open(&paths[number]).unwrap();
    let (owner, third) = (open(0), open(2));
    owner.write_all_at(&bytes(MIB, 0), 0).unwrap();
    third.write_all_at(&bytes(MIB, 2), 2 * MIB as u64).unwrap();
    let whole = [bytes(MIB, 0), bytes(MIB, 1), bytes(MIB, 2)].concat();
    for path in &paths {
        assert!(fs::read(path).unwrap() == whole, "{}", path.display());
    }
    // Through what each one has open.
    let mut seen = vec![0; 3 * MIB];
    for file in [&owner, &third] {
        file.read_exact_at(&mut seen, 0).unwrap();
        assert!(seen == whole);
    }
    // Cut by one, appended to by another, and the first one closes last.
    third.set_len(MIB as u64).unwrap();
    OpenOptions::new().append(true).open(&paths[0]).unwrap().write_all(b"end").unwrap();
    drop((owner, third));
    assert_eq!(made.metadata().unwrap().len(), MIB as u64 + 3);
    let time = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000_000);
    made.set_modified(time).unwrap();
    drop(made);
    let whole = [bytes(MIB, 0), b"end".to_vec()].concat();
    for path in &paths {
        assert!(fs::read(path).unwrap() == whole);
        assert_eq!(fs::metadata(path).unwrap().modified().unwrap(), time, "{}", path.display());
    }
    // Written again by each one after it was closed.
    for (number, path) in paths.iter().enumerate() {
        fs::write(path, format!("by {number}")).unwrap();
        assert!(paths.iter().all(|path| fs::read_to_string(path).unwrap() == format!("by {number}")));
    }
    pool.end();
    assert_eq!(fs::read_to_string(pool.store().join("file")).unwrap(), "by 2");
}

/// The kernel of a member keeps the length that it saw last. Another member, or a program at the home, has cut the file or has
/// appended to it since.
#[test]
fn append_lands_at_the_end_wherever_the_file_was_cut() {
    let Some(mut pool) = Pool::start("home-appends", 3) else { return };
    fs::write(pool.member(0).join("first"), "").unwrap();
    let paths: Vec<PathBuf> = (0..3).map(|number| pool.member(number).join("file")).collect();
    // The second member is the home, and the first one is the owner.
    drop(File::create_new(&paths[1]).unwrap());
    let open = |append: bool| -> Vec<File> {
        let open = |path| OpenOptions::new().read(true).write(true).append(append).open(path).unwrap();
        paths.iter().map(open).collect()
    };
    let (cuts, appends, later) = (open(false), open(true), open(false));
    for file in &later {
        let flags = rustix::fs::fcntl_getfl(file).unwrap();
        rustix::fs::fcntl_setfl(file, flags | rustix::fs::OFlags::APPEND).unwrap();
    }
    let mut wrong = Vec::new();
    for (cutter, cut) in cuts.iter().enumerate() {
        for (appender, path) in paths.iter().enumerate() {
            for how in ["open before", "open since", "set since"] {
                // Long, so that each kernel has seen that length, and then cut.
                for file in [&appends, &later].into_iter().flatten() {
                    cut.set_len(3000).unwrap();
                    (&*file).write_all(b"long").unwrap();
                }
                cut.set_len(1000).unwrap();
                let fresh = (how == "open since").then(|| OpenOptions::new().append(true).open(path).unwrap());
                let by_how = if how == "set since" { &later[appender] } else { &appends[appender] };
                fresh.as_ref().unwrap_or(by_how).write_all(b"end").unwrap();
                let length = cuts[0].metadata().unwrap().len();
                if length != 1003 || !fs::read(&paths[2]).unwrap().ends_with(b"end") {
                    wrong.push(format!("cut by {cutter}, {how} by {appender}: {length}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    drop((cuts, appends, later));
    pool.end();
    assert_eq!(fs::metadata(pool.store().join("file")).unwrap().len(), 1003);
}

/// Programs of all nodes append, and one of them cuts off what it has read: each record is whole, and in no hole.
#[test]
fn appends_of_all_nodes_do_not_overlap() {
    let Some(mut pool) = Pool::start("home-appenders", 3) else { return };
    fs::write(pool.member(0).join("first"), "").unwrap();
    let paths: Vec<PathBuf> = (0..3).map(|number| pool.member(number).join("file")).collect();
    drop(File::create_new(&paths[1]).unwrap());
    const RECORDS: usize = 300;
    let record = |member: usize, number: usize| format!("{member:07}{number:08}\n");
    let append = |member: usize| {
        let file = OpenOptions::new().append(true).open(&paths[member]).unwrap();
        (0..RECORDS).for_each(|number| (&file).write_all(record(member, number).as_bytes()).unwrap());
    };
    std::thread::scope(|scope| {
        (0..6).for_each(|thread| drop(scope.spawn(move || append(thread % 3))));
    });
    let text = fs::read_to_string(&paths[0]).unwrap();
    let mut seen: Vec<&str> = text.lines().collect();
    seen.sort_unstable();
    let expected: Vec<String> = (0..3)
        .flat_map(|member| (0..RECORDS).flat_map(move |number| [record(member, number), record(member, number)]))
        .map(|line| line.trim_end().to_owned())
        .collect();
    assert_eq!(seen.len(), expected.len());
    assert!(seen == expected);
    // The file only grows between the look and the cut.
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3).map(|thread| scope.spawn(move || append(thread))).collect();
        let cuts = OpenOptions::new().write(true).open(&paths[2]).unwrap();
        while threads.iter().any(|thread| !thread.is_finished()) {
            cuts.set_len(cuts.metadata().unwrap().len() / 32 * 16).unwrap();
        }
    });
    let text = fs::read(&paths[0]).unwrap();
    let is_whole = |line: &[u8]| line.len() == 16 && line.ends_with(b"\n") && !line.contains(&0);
    let broken: Vec<_> = text.chunks(16).filter(|line| !is_whole(line)).map(String::from_utf8_lossy).collect();
    assert!(broken.is_empty(), "{} of {} records: {:?}", broken.len(), text.len() / 16, broken.first());
    pool.end();
    assert!(fs::read(pool.store().join("file")).unwrap() == text);
}

/// Removed or replaced by its owner while it is open at its home: the program continues, and the content goes with it.
#[test]
fn content_goes_with_the_last_program_that_has_the_removed_file() {
    let Some(mut pool) = Pool::start("home-removed", 2) else { return };
    fs::write(pool.member(0).join("first"), "").unwrap();
    let (here, there) = (pool.member(1).join("file"), pool.member(0).join("file"));
    let mut file = OpenOptions::new().create_new(true).read(true).write(true).open(&here).unwrap();
    file.write_all(b"one").unwrap();
    fs::remove_file(&there).unwrap();
    assert!(!here.exists());
    file.write_all(b" two").unwrap();
    file.seek(SeekFrom::Start(0)).unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!((text.as_str(), contents(&pool, 1).len()), ("one two", 1));
    drop(file);
    eventually("the content is gone", || contents(&pool, 1).is_empty());
    // The same name, renamed over at the owner.
    fs::write(&here, "old").unwrap();
    fs::write(there.with_file_name("new"), "new").unwrap();
    fs::rename(there.with_file_name("new"), &there).unwrap();
    assert_eq!(fs::read_to_string(&here).unwrap(), "new");
    eventually("the replaced content is gone", || contents(&pool, 1).is_empty());
    pool.end();
    assert_eq!(names(&pool.store()), ["file", "first"]);
}

/// Agents of the owner and of the home are killed while a program writes and another one reads.
#[test]
fn killed_agents_of_owner_and_home_lose_nothing() {
    let Some(mut pool) = Pool::start("home-killed", 2) else { return };
    fs::write(pool.member(0).join("first"), "").unwrap();
    let (here, there) = (pool.member(1).to_owned(), pool.member(0).to_owned());
    let part = bytes(100_000, 7);
    for killed in [1, 0, 1, 0] {
        let name = format!("file{killed}");
        let file = OpenOptions::new().create(true).append(true).open(here.join(&name)).unwrap();
        let reads = File::open(there.join(&name)).unwrap();
        let before = file.metadata().unwrap().len();
        for turn in 1..=20 {
            (&file).write_all(&part).unwrap();
            if turn == 7 {
                kill_process(pool.agent(killed), Signal::KILL).unwrap();
            }
            let length = before + turn * part.len() as u64;
            assert_eq!(reads.metadata().unwrap().len(), length, "agent {killed}, turn {turn}");
            let mut seen = vec![0; part.len()];
            reads.read_exact_at(&mut seen, length - part.len() as u64).unwrap();
            assert!(seen == part);
        }
        // A name that is made while the agent is replaced.
        kill_process(pool.agent(killed), Signal::KILL).unwrap();
        fs::write(here.join(format!("made{killed}{before}")), &part).unwrap();
        assert!(fs::read(there.join(format!("made{killed}{before}"))).unwrap() == part);
    }
    pool.end();
    for name in ["file0", "file1"] {
        assert!(fs::read(pool.store().join(name)).unwrap() == part.repeat(40), "{name}");
    }
    assert_eq!(names(&pool.store()).len(), 7);
}

/// The home is asked for a copy in the store and answers late. Meanwhile the owner removes the file.
#[test]
fn copy_that_is_made_too_late_does_not_stay_in_the_store() {
    let Some(mut pool) = Pool::start("home-late", 0) else { return };
    pool.mount_one(&["--quiet-period", "2s"]);
    pool.mount_one(&[]);
    let there = pool.member(0).join("d/file");
    fs::create_dir(pool.member(0).join("d")).unwrap();
    fs::write(pool.member(1).join("d/file"), bytes(1000, 1)).unwrap();
    fs::write(pool.member(1).join("d/other"), bytes(1000, 2)).unwrap();
    assert_eq!(fs::metadata(&there).unwrap().len(), 1000);
    kill_process(pool.agent(1), Signal::STOP).unwrap();
    std::thread::sleep(Duration::from_millis(3000));
    assert!(!pool.store().join("d/file").exists(), "it was copied before its home was stopped");
    fs::remove_file(&there).unwrap();
    // (The owner looks each second whether a copy is still wanted.)
    std::thread::sleep(Duration::from_millis(2000));
    kill_process(pool.agent(1), Signal::CONT).unwrap();
    pool.end();
    assert_eq!(names(&pool.store().join("d")), ["other"]);
}

/// More is written than the tier holds: what the store has leaves the home, and is read from the store.
#[test]
fn home_that_fills_up_gives_room_to_new_files() {
    let Some(mut pool) = Pool::start("home-full", 2) else { return };
    fs::write(pool.member(0).join("first"), "").unwrap();
    let here = pool.member(1).to_owned();
    for number in 0..12_u8 {
        fs::write(here.join(format!("{number}")), bytes(12 * MIB, number)).unwrap();
    }
    eventually("everything is in the store, and most of it has left", || {
        let lengths: u64 = contents(&pool, 1).iter().map(|(_, length)| length).sum();
        names(&pool.store()).iter().filter(|name| name.len() <= 2).count() == 12 && lengths <= 40 * MIB as u64
    });
    for number in 0..12_u8 {
        let member = pool.member(usize::from(number % 2));
        assert!(fs::read(member.join(format!("{number}"))).unwrap() == bytes(12 * MIB, number), "{number}");
    }
    // Changed by both after that.
    OpenOptions::new().write(true).open(here.join("0")).unwrap().write_all_at(b"changed", 5).unwrap();
    fs::write(pool.member(0).join("11"), "replaced").unwrap();
    pool.end();
    let mut changed = bytes(12 * MIB, 0);
    changed[5..12].copy_from_slice(b"changed");
    assert!(fs::read(pool.store().join("0")).unwrap() == changed);
    assert_eq!(fs::read_to_string(pool.store().join("11")).unwrap(), "replaced");
}

/// The home is lost before the store has the content: the owner names the file and ends with 3. It never publishes the
/// empty file that it has.
#[test]
fn content_of_a_lost_home_is_named_and_nothing_empty_is_published() {
    let Some(mut pool) = Pool::start("home-lost", 0) else { return };
    pool.mount_one(&["--pool-lease", "6s"]);
    pool.mount_one(&["--drain-bytes-per-second-max", "1KiB"]);
    fs::write(pool.member(0).join("first"), "safe").unwrap();
    fs::write(pool.member(1).join("lost"), bytes(100_000, 3)).unwrap();
    // (The owner learns the length when the program has closed the file.)
    std::thread::sleep(std::time::Duration::from_millis(500));
    fs::write(pool.member(0).join("behind"), "safe").unwrap();
    pool.lose(1);
    assert_eq!(fs::metadata(pool.member(0).join("lost")).unwrap().len(), 100_000);
    eventually("the loss is noticed", || pool.status(0)["lost"][0]["member"] == 2);
    assert!(fs::read(pool.member(0).join("lost")).is_err());
    let ended = pool.command_of("umount", &["--timeout", "8s"]).arg(pool.member(0)).output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(3), "{said}");
    assert!(said.contains("lost") && said.contains("member 2"), "{said}");
    assert!(!pool.store().join("lost").exists(), "an empty file was published");
    assert_eq!(fs::read_to_string(pool.store().join("first")).unwrap(), "safe");
    // What was behind it in the order has come.
    assert_eq!(fs::read_to_string(pool.store().join("behind")).unwrap(), "safe");
    pool.have_ended();
}
