//! Measures the catalog: `cargo run --release -p surgetank-core --example catalogbench [DIR [commit|sync|open|load]…]`.
//!
//! DIR is where the catalogs are made (default: the directory for temporary files); it decides what a sync costs.

use std::error::Error;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use surgetank_core::catalog::{Catalog, LogCatalog, Lsn};
use surgetank_types::model::{
    Attr, Change, DeviceId, EntryRecord, FileId, FileRecord, Kind, Mark, NodeId, OpKind, OpRecord, Replica, RunId, Seq,
    StoreIdentity, Timestamp,
};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const FILES_PER_DIRECTORY: u64 = 1000;

/// A file in the middle of its life: on a tier, published once.
fn file(id: u64) -> Change {
    let time = Timestamp { nanos: 1_760_000_000_000_000_000 + id as i64 };
    let name = || Some((FileId(2 + id / FILES_PER_DIRECTORY), name(id)));
    let attr = Attr {
        kind: Kind::File,
        perm: 0o644,
        uid: 1000,
        gid: 1000,
        ino: 4_000_000 + id,
        links: 1,
        size_bytes: id * 4096,
        blocks: id * 8,
        device: 0,
        atime: time,
        mtime: time,
        ctime: time,
    };
    let identity =
        StoreIdentity { ino: 9_000_000 + id, size_bytes: id * 4096, mtime_nanos: time.nanos, ctime_nanos: time.nanos };
    let replica =
        Replica { node: NodeId(0), device: DeviceId { tier: 0, device: 0 }, backing_ino: 7_000_000 + id, born: 7 };
    let record = FileRecord {
        synced_version: 0,
        promised_version: 0,
        attr,
        version: 1,
        durable_version: 1,
        sealed: true,
        replica: Some(replica),
        spill: None,
        identity: Some(identity),
        logical: name(),
        applied: name().into_iter().collect(),
        target: None,
        xattrs: None,
        pinned: false,
        adopted: false,
        checksum: Some(id.wrapping_mul(0x9e37_79b9_7f4a_7c15)),
        run: RunId(1),
    };
    Change::PutFile(FileId(id), Box::new(record))
}

fn name(id: u64) -> Box<[u8]> {
    format!("result-{id:08}.tif").into_bytes().into()
}

fn entry(id: u64) -> Change {
    let record = EntryRecord { logical: Some(FileId(id)), planned: Some(FileId(id)) };
    Change::PutEntry(FileId(2 + id / FILES_PER_DIRECTORY), name(id), record)
}

/// What creating one file commits.
fn creation(id: u64) -> [Change; 3] {
    let kind =
        OpKind::Publish { file: FileId(id), dir: FileId(2 + id / FILES_PER_DIRECTORY), name: name(id), over: None };
    [
        file(id),
        entry(id),
        Change::PutOp(
            Seq::new(id),
            OpRecord { kind, run: RunId(1), prepared: None, last: false, started: false, certain: false },
        ),
    ]
}

fn resident_kib() -> Outcome<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).ok_or("no VmRSS")?;
    Ok(line.split_whitespace().nth(1).ok_or("no number")?.parse()?)
}

fn bytes_on_disk(dir: &Path) -> Outcome<u64> {
    std::fs::read_dir(dir)?.try_fold(0, |sum, entry| Ok(sum + entry?.metadata()?.blocks() * 512))
}

/// Runs `work` in `threads` threads, `count` times each, and returns the time of all.
fn parallel(threads: u64, count: u64, work: impl Fn(u64) -> Outcome<()> + Sync) -> Outcome<Duration> {
    let start = Instant::now();
    std::thread::scope(|scope| {
        let work = &work;
        let handles: Vec<_> = (0..threads)
            .map(|thread| scope.spawn(move || (0..count).try_for_each(|index| work(1 + thread * count + index))))
            .collect();
        handles.into_iter().try_for_each(|handle| handle.join().map_err(|_| "a thread panicked")?)
    })?;
    Ok(start.elapsed())
}

fn report(what: &str, operations: u64, elapsed: Duration) {
    let each_ns = elapsed.as_nanos() as u64 / operations.max(1);
    println!(
        "{what:<58} {:>9}/s {each_ns:>9} ns each",
        operations * 1_000_000_000 / (elapsed.as_nanos() as u64).max(1)
    );
}

fn commits(base: &Path) -> Outcome<()> {
    for (what, count) in
        [("one mark", 400_000), ("one file record", 200_000), ("a creation (file, entry, operation)", 200_000)]
    {
        for threads in [1, 4] {
            let dir = tempfile::tempdir_in(base)?;
            let catalog = LogCatalog::open(dir.path())?;
            // Made ahead: what is measured is the catalog.
            let batches: Vec<Vec<Change>> = (1..=1000)
                .map(|id| match what {
                    "one mark" => vec![Change::PutMark(Mark::Request(0), id)],
                    "one file record" => vec![file(id)],
                    _ => creation(id).into(),
                })
                .collect();
            let times_ns = Mutex::new(Vec::new());
            times_ns.lock().map_err(|_| "poisoned")?.reserve(count as usize);
            let elapsed = parallel(threads, 1, |thread| {
                let mut mine_ns = Vec::with_capacity((count / threads) as usize);
                for index in 0..count / threads {
                    let start = Instant::now();
                    catalog.commit(&batches[((thread + index) % 1000) as usize])?;
                    mine_ns.push(start.elapsed().as_nanos() as u64);
                }
                times_ns.lock().map_err(|_| "poisoned")?.extend(mine_ns);
                Ok(())
            })?;
            report(&format!("commit of {what}, {threads} thread(s)"), count, elapsed);
            let mut times_ns = times_ns.into_inner().map_err(|_| "poisoned")?;
            times_ns.sort_unstable();
            let at = |part: f64| times_ns[((times_ns.len() - 1) as f64 * part) as usize];
            println!("  median {} ns, 99 % {} ns, slowest {} µs", at(0.5), at(0.99), at(1.0) / 1000);
        }
    }
    Ok(())
}

fn syncs(base: &Path) -> Outcome<()> {
    for threads in [1, 16] {
        let dir = tempfile::tempdir_in(base)?;
        let catalog = LogCatalog::open(dir.path())?;
        let each = 500;
        let elapsed = parallel(threads, each, |id| {
            let lsn = catalog.commit(&creation(id))?;
            Ok(catalog.sync(lsn)?)
        })?;
        report(&format!("synced commit of a creation, {threads} thread(s)"), threads * each, elapsed);
    }
    Ok(())
}

fn open_and_clear(base: &Path) -> Outcome<()> {
    let rounds = 20;
    let (mut open, mut clear, mut close) = (Duration::ZERO, Duration::ZERO, Duration::ZERO);
    for round in 0..rounds {
        let dir = tempfile::tempdir_in(base)?;
        let start = Instant::now();
        let catalog = LogCatalog::open(&dir.path().join("catalog"))?;
        open += start.elapsed();
        catalog.commit(&creation(round + 1))?;
        let start = Instant::now();
        catalog.clear()?;
        clear += start.elapsed();
        let start = Instant::now();
        drop(catalog);
        close += start.elapsed();
    }
    report("open of a new catalog", rounds, open);
    report("clear at the end of a short run", rounds, clear);
    report("close after clear", rounds, close);
    Ok(())
}

/// Fills a catalog with `files`, as many to a commit as a busy agent has, then loads it in this process.
fn load(base: &Path, files: u64) -> Outcome<()> {
    let dir = tempfile::tempdir_in(base)?;
    let start = Instant::now();
    let catalog = LogCatalog::open(dir.path())?;
    let mut last = Lsn(0);
    for id in 1..=files {
        last = catalog.commit(&creation(id))?;
        // Drained a little later.
        if id > 100 {
            catalog.commit(&[file(id - 100), Change::DropOp(Seq::new(id - 100))])?;
        }
    }
    println!("{files} files committed in {:.2} s ({} commits)", start.elapsed().as_secs_f64(), last.0);
    let peak_kib = resident_kib()?;
    drop(catalog);
    println!(
        "  resident while folding, at the end of it: {peak_kib} KiB; until closed {:.2} s",
        start.elapsed().as_secs_f64()
    );
    println!("  on disk: {} bytes a file", bytes_on_disk(dir.path())? / files);

    let before_kib = resident_kib()?;
    let start = Instant::now();
    let catalog = LogCatalog::open(dir.path())?;
    let opened = start.elapsed();
    let (mut count, mut bytes) = (0_u64, 0_u64);
    catalog.load_into(&mut |loaded| {
        count += 1;
        bytes += size_of_val(&loaded) as u64;
    })?;
    let elapsed = start.elapsed();
    println!(
        "  load_into of {count} records: {:.3} s ({:.3} s of it open), resident {before_kib} -> {} KiB",
        elapsed.as_secs_f64(),
        opened.as_secs_f64(),
        resident_kib()?
    );
    let start = Instant::now();
    let image = catalog.load()?;
    println!(
        "  load of {} files, {} entries as an image: {:.3} s, resident {} KiB",
        image.files.len(),
        image.entries.len(),
        start.elapsed().as_secs_f64(),
        resident_kib()?
    );
    if count < files || bytes == 0 || image.files.len() as u64 != files {
        return Err("the catalog lost something".into());
    }
    drop(image);
    let start = Instant::now();
    catalog.clear()?;
    println!("  clear: {:.3} s", start.elapsed().as_secs_f64());
    Ok(())
}

fn main() -> Outcome<()> {
    let base = std::env::args_os().nth(1).map_or_else(std::env::temp_dir, Into::into);
    let wanted: Vec<String> = std::env::args().skip(2).collect();
    let wants = |part: &str| wanted.is_empty() || wanted.iter().any(|name| name == part);
    println!("in {}", base.display());
    if wants("commit") {
        commits(&base)?;
    }
    if wants("sync") {
        syncs(&base)?;
    }
    if wants("open") {
        open_and_clear(&base)?;
    }
    if wants("load") {
        load(&base, 100_000)?;
        load(&base, 1_000_000)?;
    }
    Ok(())
}
