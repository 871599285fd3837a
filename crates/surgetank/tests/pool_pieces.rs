//! Large files of other members: they come in pieces, from the member that asked before, and follow each change at their owner.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::process::{Signal, kill_process};

use crate::pool::Pool;
use crate::scene::eventually;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 5 * MIB + 4321;

/// Each 8 bytes say where they are.
fn content(seed: u64, size: u64) -> Vec<u8> {
    let words = (0..size.div_ceil(8)).flat_map(|word| (word ^ seed << 40).to_le_bytes());
    words.take(usize::try_from(size).unwrap()).collect()
}

/// The first member owns the directory `d`.
fn pool(name: &str, members: usize) -> Option<Pool> {
    let mut pool = Pool::start(name, 0)?;
    pool.store_ttl = "1s";
    (0..members).for_each(|_| pool.mount_one(&["--pool-lease", "6s"]));
    fs::create_dir(pool.member(0).join("d")).unwrap();
    Some(pool)
}

fn status_of(pool: &Pool, number: usize, of: usize, what: &str) -> u64 {
    let (status, other) = (pool.status(number), pool.status(of)["member"].as_u64());
    let members = status["members"].as_array().unwrap();
    members.iter().find(|one| one["member"].as_u64() == other).unwrap()[what].as_u64().unwrap()
}

/// How many files other members have open at this one.
fn handles(pool: &Pool, number: usize) -> u64 {
    let status = pool.status(number);
    status["members"].as_array().unwrap().iter().map(|one| one["handles"].as_u64().unwrap()).sum()
}

/// The files are here as a whole: they are opened without their owner. (A refusal while something changes, or the end of a
/// delegation, ends after some tries.)
fn opened_here(pool: &Pool, paths: &[&Path]) -> Vec<File> {
    let mut opened = Vec::new();
    eventually("the files are here as a whole", || {
        opened.clear();
        eventually("closes have reached the owner", || handles(pool, 0) == 0);
        opened.extend(paths.iter().map(|path| File::open(path).unwrap()));
        let are_here = handles(pool, 0) == 0;
        if !are_here {
            for file in &mut opened {
                std::io::copy(file, &mut std::io::sink()).unwrap();
            }
        }
        are_here
    });
    opened
}

#[test]
fn large_file_comes_once_and_follows_each_change() {
    let Some(mut pool) = pool("pieces", 2) else { return };
    let (owner, other) = (pool.member(0).join("d"), pool.member(1).join("d"));
    for killed in [None, Some(1), None] {
        let names = ["kept", "written", "cut", "removed", "replaced"];
        names.iter().for_each(|name| fs::write(owner.join(name), content(1, SIZE)).unwrap());
        // One of them comes in parts only, in any order: nothing else of it is wanted.
        fs::write(owner.join("parts"), content(1, SIZE)).unwrap();
        let paths = names.map(|name| other.join(name));
        let mut opened = opened_here(&pool, &paths.each_ref().map(PathBuf::as_path)).into_iter();
        let received = status_of(&pool, 1, 0, "received_bytes");
        let [mut kept, mut written, mut cut, mut removed, mut replaced] = names.map(|_| {
            let mut file = opened.next().unwrap();
            let mut begin = [0; 16];
            file.read_exact(&mut begin).unwrap();
            assert_eq!(begin, content(1, 16)[..]);
            file
        });
        let parts = File::open(other.join("parts")).unwrap();
        let part = |offset: u64, seed: u64| {
            let mut bytes = vec![0; 1000];
            parts.read_exact_at(&mut bytes, offset).unwrap();
            let from = usize::try_from(offset).unwrap();
            assert!(bytes == content(seed, SIZE)[from..from + 1000], "{offset}");
        };
        [4 * MIB, 2 * MIB - 500, SIZE - 1000].into_iter().for_each(|offset| part(offset, 1));
        let came = status_of(&pool, 1, 0, "received_bytes") - received;
        assert!(came < 5 * MIB, "{came} bytes for four pieces");
        if let Some(killed) = killed {
            let agent = pool.agent(killed);
            kill_process(agent, Signal::KILL).unwrap();
            eventually("another agent serves", || pool.agent(killed) != agent);
        }
        for name in ["written", "parts"] {
            fs::write(owner.join(name), content(2, SIZE)).unwrap();
        }
        OpenOptions::new().write(true).open(owner.join("cut")).unwrap().set_len(MIB).unwrap();
        fs::remove_file(owner.join("removed")).unwrap();
        fs::write(owner.join("new"), "other").unwrap();
        fs::rename(owner.join("new"), owner.join("replaced")).unwrap();
        let rest = |file: &mut File| {
            let mut rest = Vec::new();
            file.read_to_end(&mut rest).unwrap();
            rest
        };
        assert!(rest(&mut kept) == content(1, SIZE)[16..]);
        assert!(rest(&mut written) == content(2, SIZE)[16..]);
        assert!(rest(&mut cut) == content(1, MIB)[16..]);
        assert!(rest(&mut removed) == content(1, SIZE)[16..]);
        assert!(rest(&mut replaced) == content(1, SIZE)[16..]);
        [4 * MIB, 2 * MIB - 500, 3 * MIB].into_iter().for_each(|offset| part(offset, 2));
        drop((kept, written, cut, removed, replaced, parts));
        eventually("all are closed", || handles(&pool, 0) == 0);
    }
    pool.end();
}

/// A file that was removed while only parts of it were here is still read, from its owner.
#[test]
fn removed_file_is_read_to_its_end() {
    let Some(mut pool) = pool("removed-pieces", 2) else { return };
    let (owner, other) = (pool.member(0).join("d/file"), pool.member(1).join("d/file"));
    fs::write(&owner, content(1, 24 * MIB)).unwrap();
    let mut file = File::open(&other).unwrap();
    let mut begin = vec![0; 1000];
    file.read_exact(&mut begin).unwrap();
    fs::remove_file(&owner).unwrap();
    file.seek(SeekFrom::Start(0)).unwrap();
    let mut all = Vec::new();
    file.read_to_end(&mut all).unwrap();
    assert!(all == content(1, 24 * MIB));
    drop(file);
    pool.end();
}

/// What all members read leaves its owner once. A member that stops meanwhile delays the next one, and changes nothing else.
#[test]
fn pieces_come_from_the_member_that_asked_before() {
    let Some(mut pool) = pool("sources", 4) else { return };
    let (owner, size) = (pool.member(0).join("d"), 24 * MIB);
    fs::write(owner.join("file"), content(3, size)).unwrap();
    let readers: Vec<_> = (1..4).map(|number| pool.member(number).join("d/file")).collect();
    // (Each one has the directory's delegation by then.)
    for reader in &readers {
        assert_eq!(fs::metadata(reader).unwrap().len(), size);
        std::io::copy(&mut File::open(reader).unwrap().take(MIB), &mut std::io::sink()).unwrap();
    }
    std::thread::scope(|scope| {
        for reader in &readers {
            scope.spawn(move || assert!(fs::read(reader).unwrap() == content(3, size)));
        }
    });
    let received = |from| (1..4).map(|number| status_of(&pool, number, from, "received_bytes")).collect::<Vec<_>>();
    let of_owner = received(0);
    eprintln!("{of_owner:?} bytes of {size} came from the owner");
    // (The first pieces come from there, and it gives no source for them.)
    assert!(of_owner.iter().sum::<u64>() < size * 2, "{of_owner:?}");
    assert!(of_owner.iter().filter(|bytes| **bytes < size / 2).count() >= 2, "{of_owner:?}");
    pool.end();
}

#[test]
fn source_that_does_not_answer_is_not_needed() {
    let Some(mut pool) = pool("no-source", 3) else { return };
    let size = 24 * MIB;
    fs::write(pool.member(0).join("d/file"), content(4, size)).unwrap();
    let [first, second] = [1, 2].map(|number| pool.member(number).join("d/file"));
    let mut file = File::open(&first).unwrap();
    std::io::copy(&mut Read::by_ref(&mut file).take(4 * MIB), &mut std::io::sink()).unwrap();
    let stopped = pool.stop(1);
    let read = fs::read(&second).unwrap();
    stopped.into_iter().for_each(|pid| kill_process(pid, Signal::CONT).unwrap());
    assert!(read == content(4, size));
    drop(file);
    pool.end();
}

/// Many programs write, replace and read large files at three members. What is read is one version, and never an older one than
/// was there before.
#[test]
fn no_reader_sees_an_older_or_a_mixed_version() {
    const ROUNDS: u64 = 12;
    let Some(mut pool) = pool("versions", 3) else { return };
    let dirs: Vec<_> = (0..3).map(|number| pool.member(number).join("d")).collect();
    fs::write(dirs[0].join("file"), content(0, 3 * MIB)).unwrap();
    let version_of = |bytes: &[u8]| u64::from_le_bytes(*bytes.first_chunk().unwrap()) >> 40;
    for round in 1..=ROUNDS {
        std::thread::scope(|scope| {
            for dir in &dirs {
                scope.spawn(move || {
                    for _ in 0..3 {
                        let read = fs::read(dir.join("file")).unwrap();
                        let version = version_of(&read);
                        assert!(version + 1 >= round && version <= round, "{version} in round {round}");
                        assert!(read == content(version, 3 * MIB), "mixed: {version} in round {round}");
                    }
                });
            }
            let writer = &dirs[usize::try_from(round % 3).unwrap()];
            scope.spawn(move || {
                let mut new = File::create(writer.join("new")).unwrap();
                new.write_all(&content(round, 3 * MIB)).unwrap();
                drop(new);
                fs::rename(writer.join("new"), writer.join("file")).unwrap();
            });
        });
        for dir in &dirs {
            assert!(fs::read(dir.join("file")).unwrap() == content(round, 3 * MIB), "old in round {round}");
        }
    }
    pool.end();
}
