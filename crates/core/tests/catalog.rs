//! The catalog in real processes: kills at any moment, many committers, full disks, a second opener.
//!
//! Tests that kill a process start this test program again, with `CATALOG_CHILD` set.

#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use surgetank_core::catalog::{Catalog, LogCatalog, Lsn, Options, decode};
use surgetank_types::model::{Change, EntryRecord, FileId, Image, Mark, OpKind, OpRecord, RunId, Seq};

const SMALL: Options = Options { segment_bytes_max: 32 << 10, snapshot_cache_bytes: 1 << 20 };
const CHILD: &str = "CATALOG_CHILD";

/// The batch with this number; every batch also records its number.
/// The number of the last batch.
const BATCH: Mark = Mark::Request(u64::MAX);

fn batch(number: u64) -> Vec<Change> {
    let id = FileId(number * 7919 % 503);
    let name: Box<[u8]> = format!("name-{}", number % 97).into_bytes().into();
    let record = EntryRecord { logical: Some(FileId(number)), planned: None };
    let kind = OpKind::Unlink { file: id, dir: FileId::ROOT, name: name.clone() };
    vec![
        Change::PutEntry(id, name.clone(), record),
        Change::DropEntry(FileId(number * 31 % 503), name),
        Change::PutOp(
            Seq::new(number),
            OpRecord { kind, run: RunId(1), prepared: None, last: false, started: false, certain: false },
        ),
        Change::DropOp(Seq::new(number.saturating_sub(40))),
        Change::PutMark(BATCH, number),
    ]
}

/// The state after the batches up to `number`.
fn state_after(number: u64) -> Image {
    let mut image = Image::default();
    let mut entries = BTreeMap::new();
    for change in (1..=number).flat_map(batch) {
        match change {
            Change::PutEntry(dir, name, record) => {
                entries.insert((dir, name), record);
            }
            Change::DropEntry(dir, name) => {
                entries.remove(&(dir, name));
            }
            Change::PutOp(seq, record) => {
                image.ops.insert(seq, record);
            }
            Change::DropOp(seq) => {
                image.ops.remove(&seq);
            }
            Change::PutMark(mark, number) => {
                image.marks.insert(mark, number);
            }
            other => panic!("not in a batch: {other:?}"),
        }
    }
    image.entries = entries.into_iter().map(|((dir, name), record)| (dir, name, record)).collect();
    image
}

/// Starts this program again as `test` with a role; its standard output is a pipe.
fn child(test: &str, role: &str, dir: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("catalog::{test}"), "--nocapture"])
        .env(CHILD, role)
        .env("CATALOG_DIR", dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn role() -> Option<(String, PathBuf)> {
    let role = std::env::var(CHILD).ok()?;
    Some((role, std::env::var_os("CATALOG_DIR").unwrap().into()))
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").unwrap();
    out.flush().unwrap();
}

/// Commits batch after batch until it is killed, and reports each.
fn commit_forever(dir: &Path) {
    let catalog = LogCatalog::open_with(dir, SMALL).unwrap();
    let mut number = catalog.load().unwrap().marks.get(&BATCH).map_or(0, |number| *number);
    loop {
        number += 1;
        let lsn = catalog.commit(&batch(number)).unwrap();
        if number.is_multiple_of(50) {
            catalog.sync(lsn).unwrap();
        }
        say(&format!("committed {number}"));
    }
}

#[test]
fn kill_at_any_point_loses_no_acknowledged_commit() {
    if let Some((_, dir)) = role() {
        return commit_forever(&dir);
    }
    let home = tempfile::tempdir().unwrap();
    let mut number = 0;
    for round in 0..12_u64 {
        let mut process = child("kill_at_any_point_loses_no_acknowledged_commit", "commit", home.path());
        let mut out = process.stdout.take().unwrap();
        // Reads in a thread, so that the pipe never fills.
        let reader = std::thread::spawn(move || {
            let mut text = String::new();
            out.read_to_string(&mut text).unwrap();
            text
        });
        std::thread::sleep(Duration::from_millis(30 + round * 53 % 300));
        process.kill().unwrap();
        process.wait().unwrap();
        let text = reader.join().unwrap();
        // The last line may be cut short.
        let whole = &text[..text.rfind('\n').map_or(0, |end| end + 1)];
        let promised = whole
            .lines()
            .filter_map(|line| line.split_once("committed ")?.1.parse().ok())
            .next_back()
            .unwrap_or(number);

        let catalog = LogCatalog::open_with(home.path(), SMALL).unwrap();
        let image = catalog.load().unwrap();
        let found = image.marks.get(&BATCH).map_or(0, |number| *number);
        assert!(found >= promised, "round {round}: {promised} were promised, {found} found");
        assert!(found <= promised + 1, "round {round}: more than one commit was in progress");
        assert_eq!(image, state_after(found), "round {round}");
        number = found;
    }
    assert!(number > 0, "no round lived long enough to commit");
}

#[test]
fn committers_share_writes_and_each_keeps_its_order() {
    const THREADS: u64 = 8;
    const COMMITS: u64 = 500;
    let home = tempfile::tempdir().unwrap();
    let catalog = LogCatalog::open(home.path()).unwrap();
    let mut positions = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..THREADS)
            .map(|thread| {
                let catalog = &catalog;
                scope.spawn(move || {
                    let commit = |number| {
                        let change = Change::PutMark(Mark::Request(thread), number);
                        let lsn = catalog.commit(&[change]).unwrap();
                        if number % 100 == 0 {
                            catalog.sync(lsn).unwrap();
                        }
                        lsn
                    };
                    let positions: Vec<Lsn> = (1..=COMMITS).map(commit).collect();
                    assert!(positions.is_sorted(), "a position of a thread did not grow");
                    positions
                })
            })
            .collect();
        handles.into_iter().flat_map(|handle| handle.join().unwrap()).collect::<Vec<_>>()
    });
    positions.sort();
    positions.dedup();
    assert_eq!(positions.len() as u64, THREADS * COMMITS, "two commits got the same position");
    assert_eq!(catalog.position(), *positions.last().unwrap());

    // The log itself has the commits of each thread in that thread's order.
    let log = std::fs::read(home.path().join("log-00000000000000000001.wal")).unwrap();
    let mut rest = &log[64..];
    let mut seen = BTreeMap::new();
    while let Some(decoded) = decode(rest) {
        rest = &rest[decoded.bytes..];
        let [Change::PutMark(mark, number)] = &decoded.changes[..] else { panic!("{decoded:?}") };
        assert_eq!(seen.insert(mark.clone(), *number).unwrap_or(0) + 1, *number, "{mark:?}");
    }
    assert!(rest.is_empty());
    assert_eq!(seen.len() as u64, THREADS);
    assert!(seen.values().all(|number| *number == COMMITS));
}

#[test]
fn second_opener_gets_the_holders_pid() {
    if let Some((_, dir)) = role() {
        let _catalog = LogCatalog::open(&dir).unwrap();
        say("opened");
        // Runs until the other end is closed.
        let _ = std::io::stdin().read(&mut [0]);
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let mut holder = child("second_opener_gets_the_holders_pid", "hold", home.path());
    let mut out = holder.stdout.take().unwrap();
    let mut text = String::new();
    while !text.contains("opened") {
        let mut byte = [0];
        assert_eq!(out.read(&mut byte).unwrap(), 1, "{text}");
        text.push(byte[0] as char);
    }
    let message = LogCatalog::open(home.path()).err().unwrap().to_string();
    holder.kill().unwrap();
    holder.wait().unwrap();
    assert!(message.contains(&format!("process {}", holder.id())), "{message}");
    assert!(message.contains(home.path().to_str().unwrap()), "{message}");
    // The lock ends with its holder.
    LogCatalog::open(home.path()).unwrap();
}

fn limit_file_size(bytes: Option<u64>) {
    let limit = rustix::process::Rlimit { current: bytes, maximum: None };
    rustix::process::setrlimit(rustix::process::Resource::Fsize, limit).unwrap();
}

/// Commits from several threads while files may not grow beyond a limit, then without the limit.
fn commit_against_a_limit(dir: &Path) {
    // SAFETY: ignoring a signal installs no handler; this process does nothing else with it.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let catalog = LogCatalog::open(dir).unwrap();
    limit_file_size(Some(20_000));
    let refused = std::thread::scope(|scope| {
        let commits = |thread: u64| {
            let catalog = &catalog;
            move || {
                let mut refused = 0;
                for number in 0..400 {
                    let name = format!("{thread} {number}");
                    match catalog.commit(&[Change::PutMark(Mark::Device(name.clone()), number)]) {
                        Ok(_) => say(&format!("kept {name}")),
                        Err(error) => {
                            assert_eq!(error.raw_os_error(), Some(libc::EFBIG));
                            refused += 1;
                        }
                    }
                }
                refused
            }
        };
        let handles: Vec<_> = (0..4).map(|thread| scope.spawn(commits(thread))).collect();
        handles.into_iter().map(|handle| handle.join().unwrap()).sum::<u64>()
    });
    assert!(refused > 0);
    limit_file_size(None);
    for number in 0..10 {
        let name = format!("after {number}");
        catalog.commit(&[Change::PutMark(Mark::Device(name.clone()), number)]).unwrap();
        say(&format!("kept {name}"));
    }
    catalog.sync(catalog.position()).unwrap();
    say(&format!("refused {refused}"));
}

#[test]
fn refused_writes_leave_no_trace_and_the_log_continues() {
    const NAME: &str = "refused_writes_leave_no_trace_and_the_log_continues";
    if let Some((_, dir)) = role() {
        return commit_against_a_limit(&dir);
    }
    let home = tempfile::tempdir().unwrap();
    let output = child(NAME, "limit", home.path()).wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    let kept: std::collections::BTreeSet<String> =
        text.lines().filter_map(|line| Some(line.split_once("kept ")?.1.to_owned())).collect();
    assert!(text.contains("refused ") && kept.len() > 10, "{text}");
    let catalog = LogCatalog::open(home.path()).unwrap();
    assert_eq!(catalog.recovery().dropped_bytes, 0);
    let text = |mark| if let Mark::Device(text) = mark { text } else { panic!("{mark:?}") };
    let found = catalog.load().unwrap().marks.into_keys().map(text).collect();
    assert_eq!(kept, found);
}

/// A separate small file system; unmounted when dropped. `None` without the right to mount.
struct Tmpfs(tempfile::TempDir);

impl Tmpfs {
    fn mount() -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let flags = rustix::mount::MountFlags::empty();
        match rustix::mount::mount("tmpfs", dir.path(), "tmpfs", flags, Some(c"size=3m")) {
            Ok(()) => Some(Self(dir)),
            Err(rustix::io::Errno::PERM) => None,
            Err(errno) => panic!("mount: {errno}"),
        }
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        rustix::mount::unmount(self.0.path(), rustix::mount::UnmountFlags::DETACH).unwrap();
    }
}

#[test]
fn full_disk_stops_folding_and_commits_without_corruption() {
    let Some(disk) = Tmpfs::mount() else {
        eprintln!("skipped: not permitted to mount (the preceding test covers this with a file size limit)");
        return;
    };
    let dir = disk.0.path().join("catalog");
    let options = Options { segment_bytes_max: 256 << 10, snapshot_cache_bytes: 1 << 20 };
    let filler = disk.0.path().join("filler");
    std::fs::write(&filler, vec![1; 1 << 20]).unwrap();
    let mut number = 0;
    {
        let catalog = LogCatalog::open_with(&dir, options).unwrap();
        let error = loop {
            match catalog.commit(&batch(number + 1)) {
                Ok(_) => number += 1,
                Err(error) => break error,
            }
            // Folding frees room repeatedly, so the test also fills the disk with another file.
            if number == 4000 {
                let mut more = std::fs::File::create(disk.0.path().join("more")).unwrap();
                while more.write(&[1; 4096]).is_ok_and(|count| count > 0) {}
            }
        };
        assert_eq!(error.kind(), std::io::ErrorKind::StorageFull, "{error}");
        assert!(catalog.commit(&batch(number + 1)).is_err());
        assert_eq!(catalog.load().unwrap(), state_after(number));
        std::fs::remove_file(&filler).unwrap();
        number += 1;
        catalog.commit(&batch(number)).unwrap();
        catalog.sync(catalog.position()).unwrap();
    }
    let catalog = LogCatalog::open_with(&dir, options).unwrap();
    assert_eq!(catalog.recovery().dropped_bytes, 0);
    assert_eq!(catalog.load().unwrap(), state_after(number));
}

#[test]
fn cleared_catalog_stays_empty_and_accepts_commits() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("a/b/catalog");
    let before = {
        let catalog = LogCatalog::open_with(&dir, SMALL).unwrap();
        for number in 1..2000 {
            catalog.commit(&batch(number)).unwrap();
        }
        let before = catalog.position();
        catalog.clear().unwrap();
        assert_eq!(catalog.load().unwrap(), Image::default());
        // Only the lock and an empty log are left.
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 2);
        assert!(catalog.commit(&batch(1)).unwrap() > before);
        before
    };
    let catalog = LogCatalog::open_with(&dir, SMALL).unwrap();
    assert_eq!(catalog.load().unwrap(), state_after(1));
    assert!(catalog.position() > before);
}

/// The power fails after a fold, before the removal of its segment is on the disk, so a part of the segment reappears.
/// Regression: its batches were applied over newer ones of the snapshot.
#[test]
fn returning_folded_segment_changes_nothing() {
    let (home, after) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let first = home.path().join("log-00000000000000000001.wal");
    let mut number = 0;
    {
        let catalog = LogCatalog::open_with(home.path(), SMALL).unwrap();
        for _ in 0..60 {
            number += 1;
            catalog.commit(&batch(number)).unwrap();
        }
        catalog.sync(catalog.position()).unwrap();
        std::fs::copy(&first, after.path().join(first.file_name().unwrap())).unwrap();
        while first.exists() {
            number += 1;
            catalog.commit(&batch(number)).unwrap();
        }
    }
    assert!(number > 120, "{number}");
    std::fs::copy(home.path().join("snapshot.redb"), after.path().join("snapshot.redb")).unwrap();
    let folded = {
        let catalog = LogCatalog::open_with(after.path(), SMALL).unwrap();
        let image = catalog.load().unwrap();
        let folded = image.marks[&BATCH];
        assert!(folded > 60);
        assert_eq!(image, state_after(folded));
        for number in folded + 1..=folded + 700 {
            catalog.commit(&batch(number)).unwrap();
        }
        folded
    };
    let catalog = LogCatalog::open_with(after.path(), SMALL).unwrap();
    assert_eq!(catalog.load().unwrap(), state_after(folded + 700));
}
