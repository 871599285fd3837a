//! Measures the store's driver beside `cp -r` and a sync of the file system: same source (in memory), same destination,
//! alternating, caches dropped before each run, every figure up to and including the last sync.
//!
//! `storebench DIR [--large BYTES] [--small COUNT] [--threads N] [--batch N] [--runs N] [--source DIR]`

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use surgetank_store::posix::PosixStore;
use surgetank_store::{Cred, Meta, Store, StorePath, Verify};
use surgetank_types::model::Timestamp;

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

const SMALL_BYTES: usize = 4096;
const FILES_PER_DIR: usize = 1000;
const ROOT: Cred = Cred { uid: 0, gid: 0 };

struct Options {
    destination: PathBuf,
    source: PathBuf,
    large_bytes: usize,
    small_count: usize,
    threads: usize,
    batch_files: usize,
    runs: usize,
}

fn options() -> Outcome<Options> {
    let mut words = std::env::args().skip(1);
    let destination = words.next().ok_or(
        "usage: storebench DIR [--large BYTES] [--small COUNT] [--threads N] [--batch N] [--runs N] [--source DIR]",
    )?;
    let mut options = Options {
        destination: destination.into(),
        source: "/dev/shm/surgetank-storebench".into(),
        large_bytes: 1 << 30,
        small_count: 10_000,
        threads: 3,
        batch_files: 256,
        runs: 3,
    };
    while let Some(word) = words.next() {
        let value = words.next().ok_or("a value is missing")?;
        match word.as_str() {
            "--large" => options.large_bytes = value.parse()?,
            "--small" => options.small_count = value.parse()?,
            "--threads" => options.threads = value.parse()?,
            "--batch" => options.batch_files = value.parse()?,
            "--runs" => options.runs = value.parse()?,
            "--source" => options.source = value.into(),
            other => return Err(format!("what is {other}?").into()),
        }
    }
    Ok(options)
}

fn main() -> Outcome<()> {
    let options = options()?;
    fs::create_dir_all(&options.source)?;
    let outcome = bench(&options);
    fs::remove_dir_all(&options.source)?;
    outcome
}

fn bench(options: &Options) -> Outcome<()> {
    if options.large_bytes > 0 {
        let tree = options.source.join("large");
        fs::create_dir_all(&tree)?;
        File::create(tree.join("file"))?.write_all(&noise(options.large_bytes))?;
        let mut results = Vec::new();
        for _ in 0..options.runs {
            results.push([
                timed(options, |to| copy_and_sync(&tree, to))?,
                timed(options, |to| drain(&tree, to, 1, 1, Verify::Cache))?,
                timed(options, |to| drain(&tree, to, 1, 1, Verify::Reread))?,
            ]);
        }
        report(&format!("one file of {} bytes", options.large_bytes), &results);
        fs::remove_dir_all(&tree)?;
    }
    if options.small_count > 0 {
        let tree = options.source.join("small");
        for number in 0..options.small_count {
            let dir = tree.join(format!("{}", number / FILES_PER_DIR));
            fs::create_dir_all(&dir)?;
            fs::write(dir.join(format!("{number}")), noise(SMALL_BYTES))?;
        }
        let mut results = Vec::new();
        for _ in 0..options.runs {
            results.push([
                timed(options, |to| copy_and_sync(&tree, to))?,
                timed(options, |to| drain(&tree, to, options.threads, options.batch_files, Verify::Cache))?,
                timed(options, |to| drain(&tree, to, options.threads, options.batch_files, Verify::Reread))?,
            ]);
        }
        report(&format!("{} files of {SMALL_BYTES} bytes, {} threads", options.small_count, options.threads), &results);
    }
    Ok(())
}

fn report(what: &str, results: &[[f64; 3]]) {
    println!("{what}");
    let median = |column: usize| {
        let mut times: Vec<_> = results.iter().map(|row| row[column]).collect();
        times.sort_by(f64::total_cmp);
        (times[times.len() / 2], times)
    };
    let base = median(0).0;
    for (column, name) in ["cp -r + sync", "drain, verify cache", "drain, verify reread"].into_iter().enumerate() {
        let (time, all) = median(column);
        println!(
            "  {name:22} median {time:8.3} s   time ratio {:.2}   bandwidth ratio {:.2}   all {all:.3?}",
            time / base,
            base / time
        );
    }
}

fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let words = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.take(len.div_ceil(8)).flatten().take(len).collect()
}

fn timed(options: &Options, run: impl FnOnce(&Path) -> Outcome<()>) -> Outcome<f64> {
    let to = options.destination.join("storebench");
    fs::create_dir(&to)?;
    fs::set_permissions(&to, fs::Permissions::from_mode(0o755))?;
    Command::new("sync").status()?;
    fs::write("/proc/sys/vm/drop_caches", "3")?;
    let start = Instant::now();
    let result = run(&to);
    let seconds = start.elapsed().as_secs_f64();
    fs::remove_dir_all(&to)?;
    result.map(|()| seconds)
}

fn copy_and_sync(from: &Path, to: &Path) -> Outcome<()> {
    for (program, args) in
        [("cp", vec!["-r".as_ref(), from.as_os_str(), to.as_os_str()]), ("sync", vec!["-f".as_ref(), to.as_os_str()])]
    {
        if !Command::new(program).args(args).status()?.success() {
            return Err(format!("{program} failed").into());
        }
    }
    Ok(())
}

fn meta_of(path: &Path) -> Outcome<Meta> {
    let stat = fs::metadata(path)?;
    let time = |secs, nanos: i64| Timestamp::from_parts(secs, nanos as u32);
    Ok(Meta {
        perm: stat.mode() & 0o7777,
        uid: stat.uid(),
        gid: stat.gid(),
        times: Some((time(stat.atime(), stat.atime_nsec()), time(stat.mtime(), stat.mtime_nsec()))),
        xattrs: None,
    })
}

fn path(text: &str) -> StorePath {
    StorePath(text.as_bytes().to_vec())
}

/// The drain's work on sealed files, without its journal: batches through stage, settle, verify, publish, sync.
fn drain(from: &Path, to: &Path, threads: usize, batch_files: usize, how: Verify) -> Outcome<()> {
    let store = PosixStore::new(File::open(to)?.into(), to.display().to_string())?;
    let mut files = Vec::new();
    let mut dirs = Vec::new();
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.file_type()?.is_dir() {
            let meta = meta_of(&entry.path())?;
            store.stage_dir(ROOT, &path(".surgetank-tmp-dir"), &meta)?;
            store.publish(ROOT, &path(".surgetank-tmp-dir"), &path(&name), &meta)?;
            for file in fs::read_dir(entry.path())? {
                files.push((name.clone(), file?.path()));
            }
            dirs.push(name);
        } else {
            files.push((String::new(), entry.path()));
        }
    }
    store.sync_dirs(ROOT, &[StorePath::root()])?;
    let batches: Vec<_> = files.chunks(batch_files).collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| -> Outcome<()> {
                    while let Some(batch) = batches.get(next.fetch_add(1, Ordering::Relaxed)) {
                        deliver(&store, batch, how)?;
                    }
                    Ok(())
                })
            })
            .collect();
        workers.into_iter().try_for_each(|worker| worker.join().map_err(|_| "a worker panicked")?)
    })?;
    println!("    {:?}", store.counters());
    Ok(())
}

fn deliver(store: &PosixStore, batch: &[(String, PathBuf)], how: Verify) -> Outcome<()> {
    let mut copies = Vec::new();
    for (dir, file) in batch {
        let name = file.file_name().ok_or("no name")?.to_string_lossy();
        let temporary = path(dir).join(format!(".surgetank-tmp-{name}").as_bytes());
        let meta = meta_of(file)?;
        let staged = store.stage_file(ROOT, &temporary, &StorePath::root(), &File::open(file)?, &meta, &|_| Ok(()))?;
        copies.push((temporary, path(dir).join(name.as_bytes()), staged, meta));
    }
    let temporaries: Vec<_> = copies.iter().map(|(temporary, ..)| temporary.clone()).collect();
    store.settle(ROOT, &temporaries)?;
    for (temporary, _, staged, _) in &copies {
        store.verify(ROOT, temporary, staged, how, &|_| Ok(()))?;
    }
    for (temporary, to, _, meta) in &copies {
        store.publish(ROOT, temporary, to, meta)?;
    }
    let dirs: Vec<_> = batch.iter().map(|(dir, _)| path(dir)).collect();
    store.sync_dirs(ROOT, &dirs)?;
    Ok(())
}
