//! A mark appears in the store after the data that was closed before it, whichever members wrote both.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};

use crate::pool::Pool;

const WRITERS: usize = 3;
const BYTES: usize = 20_000;

fn rounds() -> usize {
    std::env::var("SURGETANK_POOL_TRIALS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(80)
}

/// Where the files of a round are, below the pool's directory.
type Names = fn(writer: usize, round: usize) -> PathBuf;

/// Three members write and close a file each. Then the fourth makes the mark.
fn write(pool: &Pool, data: Names, mark: Names, rounds: usize) {
    let (ready, closed) = (Barrier::new(WRITERS + 1), Barrier::new(WRITERS + 1));
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (ready, closed) = (&ready, &closed);
            scope.spawn(move || {
                for round in 0..rounds {
                    ready.wait();
                    fs::write(pool.member(writer).join(data(writer, round)), [b'x'; BYTES]).unwrap();
                    closed.wait();
                }
            });
        }
        for round in 0..rounds {
            ready.wait();
            closed.wait();
            File::create(pool.member(WRITERS).join(mark(WRITERS, round))).unwrap().write_all(b"done").unwrap();
        }
    });
}

/// Waits for each mark in the store. Returns the data that was missing then.
fn watched(store: &Path, data: Names, mark: Names, rounds: usize) -> Vec<String> {
    let until = Instant::now() + Duration::from_secs(100);
    let mut missing = Vec::new();
    for round in 0..rounds {
        let mark = store.join(mark(WRITERS, round));
        while !mark.exists() {
            assert!(Instant::now() < until, "{} did not come", mark.display());
            std::thread::sleep(Duration::from_micros(200));
        }
        for writer in 0..WRITERS {
            let path = store.join(data(writer, round));
            let bytes = fs::metadata(&path).map(|meta| meta.len());
            if bytes.as_ref().ok() != Some(&(BYTES as u64)) {
                missing.push(format!("{} was {bytes:?} after its mark", path.display()));
            }
        }
    }
    missing
}

fn check(pool: &mut Pool, data: Names, mark: Names, rounds: usize, beside: impl FnOnce(&Pool) + Send) {
    let store = pool.store();
    let seen = pool;
    let missing = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| watched(&store, data, mark, rounds));
        let pool = &*seen;
        let other = scope.spawn(|| beside(pool));
        write(pool, data, mark, rounds);
        other.join().unwrap();
        watcher.join().unwrap()
    });
    assert!(missing.is_empty(), "{} of {} were early: {:?}", missing.len(), rounds * WRITERS, &missing[..1]);
    seen.end();
}

/// All names belong to the first member. The content is at its writers, whose closes the first member learns of later: the agent of
/// one is stopped for 300 ms now and then.
#[test]
fn mark_comes_after_its_data_in_one_directory() {
    let Some(mut pool) = Pool::start("marks", WRITERS + 1) else { return };
    fs::create_dir(pool.member(0).join("d")).unwrap();
    let data = |writer: usize, round: usize| PathBuf::from(format!("d/{round}-{writer}"));
    check(&mut pool, data, |_, round| PathBuf::from(format!("d/_SUCCESS-{round}")), rounds(), slow);
}

/// The agent of the writer is stopped before the close, so that the owner cannot learn of it before the mark is closed.
#[test]
fn mark_waits_for_a_close_that_the_owner_does_not_know() {
    let Some(mut pool) = Pool::start("latemarks", 3) else { return };
    fs::create_dir(pool.member(0).join("d")).unwrap();
    for round in 0..4 {
        let (data, mark) = (format!("d/{round}"), format!("d/_SUCCESS-{round}"));
        let mut file = File::create(pool.member(1).join(&data)).unwrap();
        file.write_all(b"data").unwrap();
        kill_process(pool.agent(1), Signal::STOP).unwrap();
        drop(file);
        fs::write(pool.member(2).join(&mark), "").unwrap();
        std::thread::sleep(Duration::from_millis(300));
        let was_early = pool.store().join(&mark).exists();
        kill_process(pool.agent(1), Signal::CONT).unwrap();
        assert!(!was_early, "round {round}");
        crate::scene::eventually("the mark comes", || pool.store().join(&mark).exists());
        assert_eq!(fs::read(pool.store().join(&data)).unwrap(), b"data");
    }
    pool.end();
}

/// Each member writes in a directory of its own, and publishes for itself.
#[test]
fn mark_comes_after_its_data_in_directories_of_all_members() {
    let Some(mut pool) = ordered("ownmarks") else { return };
    own_directories(&pool);
    let data = |writer: usize, round: usize| PathBuf::from(format!("own{writer}/{round}"));
    check(&mut pool, data, |member, round| PathBuf::from(format!("own{member}/{round}")), rounds(), |_| {});
}

/// The same, while the agent of a writer is stopped for 300 ms now and then, and a program has a file open all the time.
#[test]
fn mark_comes_after_its_data_with_a_slow_agent() {
    let Some(mut pool) = ordered("slowmarks") else { return };
    own_directories(&pool);
    let log = File::create(pool.member(1).join("own0/log")).unwrap();
    let data = |writer: usize, round: usize| PathBuf::from(format!("own{writer}/{round}"));
    let stays_open = move |pool: &Pool| {
        slow(pool);
        drop(log);
    };
    check(&mut pool, data, |member, round| PathBuf::from(format!("own{member}/{round}")), rounds(), stays_open);
}

fn slow(pool: &Pool) {
    for _ in 0..8 {
        std::thread::sleep(Duration::from_millis(53));
        kill_process(pool.agent(1), Signal::STOP).unwrap();
        std::thread::sleep(Duration::from_millis(300));
        kill_process(pool.agent(1), Signal::CONT).unwrap();
    }
}

fn ordered(name: &str) -> Option<Pool> {
    let mut pool = Pool::start(name, 0)?;
    (0..=WRITERS).for_each(|_| pool.mount_one(&["--pool-ordered", "true"]));
    Some(pool)
}

fn own_directories(pool: &Pool) {
    for member in 0..=WRITERS {
        let directory = format!("own{member}");
        fs::create_dir(pool.store().join(&directory)).unwrap();
        fs::write(pool.member(member).join(directory).join("claimed"), "").unwrap();
    }
}
