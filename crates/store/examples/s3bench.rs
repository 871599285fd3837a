//! Measures the S3 driver on a server: many objects by some threads, and a large one in parts.
//!
//! usage: s3bench URL small [--objects N] [--bytes N] [--threads N]
//!        s3bench URL large [--bytes N] [--part-bytes N] [--threads N]

use std::io::Read;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use surgetank_store::checksum::of_bytes;
use surgetank_store::object::{Objects, Part, When, Words};
use surgetank_store::s3::{Place, S3};

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

const MIB: u64 = 1 << 20;

fn main() -> Outcome<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let (Some(url), Some(what)) = (words.first(), words.get(1)) else {
        return Err("usage: s3bench URL small|large [--objects N] [--bytes N] [--part-bytes N] [--threads N]".into());
    };
    let option = |name: &str, usual: u64| -> Outcome<u64> {
        let at = words.iter().position(|word| word == name).and_then(|at| words.get(at + 1));
        Ok(at.map_or(Ok(usual), |value| value.parse())?)
    };
    let store = S3::open(Place::parse(url)?)?;
    match what.as_str() {
        "small" => {
            let (objects, bytes) = (option("--objects", 2000)?, option("--bytes", 4096)?);
            small(&store, objects, usize::try_from(bytes)?, option("--threads", 1)?)?;
        }
        "large" => {
            let bytes = option("--bytes", 1 << 30)?;
            large(&store, bytes, option("--part-bytes", 16 * MIB)?, option("--threads", 4)?)?;
        }
        other => return Err(format!("{other}: small or large").into()),
    }
    println!("{:?}", store.counters());
    Ok(())
}

fn small(store: &S3, objects: u64, bytes: usize, threads: u64) -> Outcome<()> {
    let content = vec![0x5a; bytes];
    let sum = of_bytes(&content);
    let each = |name: &str, one: &(dyn Fn(&str) -> Outcome<()> + Sync)| -> Outcome<()> {
        let meter = Meter::start();
        let next = AtomicU64::new(0);
        together(threads, || {
            loop {
                let nth = next.fetch_add(1, Ordering::Relaxed);
                if nth >= objects {
                    return Ok(());
                }
                one(&format!("small/{nth:08}"))?;
            }
        })?;
        meter.show(name, objects, objects * bytes as u64);
        Ok(())
    };
    each("put", &|key| Ok(store.put(key, &content.as_slice(), sum, &Words::new(), When::Always).map(drop)?))?;
    each("head", &|key| Ok(store.head(key).map(drop)?))?;
    each("get", &|key| {
        let mut read = vec![0; bytes];
        Ok(store.get(key, 0..bytes as u64, None)?.read_exact(&mut read)?)
    })?;
    each("delete", &|key| Ok(store.delete(key)?))
}

fn large(store: &S3, bytes: u64, part_bytes: u64, threads: u64) -> Outcome<()> {
    let content = vec![0x5a; usize::try_from(part_bytes)?];
    let sum = of_bytes(&content);
    let count = bytes / part_bytes;
    let whole = {
        let mut all = surgetank_store::checksum::Checksum::default();
        (0..count).for_each(|_| all.bytes(&content));
        all.value()
    };
    let meter = Meter::start();
    let id = store.begin("large", &Words::new())?;
    let (next, parts) = (AtomicU64::new(0), Mutex::new(Vec::<Part>::new()));
    together(threads, || {
        loop {
            let nth = next.fetch_add(1, Ordering::Relaxed);
            if nth >= count {
                return Ok(());
            }
            let part = store.part("large", &id, u32::try_from(nth)? + 1, &content.as_slice(), sum)?;
            parts.lock().map_err(|_| "a thread died")?.push(part);
        }
    })?;
    meter.show("upload parts", count, bytes);
    let mut parts = parts.into_inner()?;
    parts.sort_by_key(|part| part.number);
    store.complete("large", &id, &parts, whole, When::Always)?;
    meter.show("upload", 1, bytes);

    let meter = Meter::start();
    let next = AtomicU64::new(0);
    together(threads, || {
        let mut buffer = vec![0; 1 << 20];
        loop {
            let from = next.fetch_add(1, Ordering::Relaxed) * part_bytes;
            if from >= count * part_bytes {
                return Ok(());
            }
            let mut reader = store.get("large", from..from + part_bytes, None)?;
            while reader.read(&mut buffer)? > 0 {}
        }
    })?;
    meter.show("download", 1, bytes);
    Ok(store.delete("large")?)
}

fn together(threads: u64, work: impl Fn() -> Outcome<()> + Sync) -> Outcome<()> {
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(&work)).collect();
        all.into_iter().try_for_each(|thread| thread.join().map_err(|_| "a thread died")?)
    })
}

struct Meter {
    began: Instant,
    cpu: Duration,
}

impl Meter {
    fn start() -> Self {
        Self { began: Instant::now(), cpu: cpu() }
    }

    fn show(&self, what: &str, objects: u64, bytes: u64) {
        let (wall, used) = (self.began.elapsed().as_secs_f64(), (cpu() - self.cpu).as_secs_f64());
        let (mib, gib) = (bytes as f64 / MIB as f64, bytes as f64 / (1 << 30) as f64);
        println!(
            "{what}: {objects} in {wall:.2} s, {:.0}/s, {:.1} MiB/s; processor {used:.2} s, {:.0} us each, {:.2} s/GiB",
            objects as f64 / wall,
            mib / wall,
            used * 1e6 / objects as f64,
            used / gib
        );
    }
}

/// Processor time of this process.
fn cpu() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0))
}
