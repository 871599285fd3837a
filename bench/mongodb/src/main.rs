//! The GridFS driver beside MongoDB's own crate: the same requests to the same server, alternately (`bench/gridfs`).
//!
//! The figures are medians of the rounds, with the least and the greatest. They are the time by the clock, and the processor time
//! of this process, which other load on the machine disturbs less.

mod floor;
#[cfg(feature = "library")]
mod library;

use std::sync::Mutex;
use std::time::Instant;

use surgetank_store::at_once;
use surgetank_store::checksum::{joined, of_bytes};
use surgetank_store::gridfs::{GridFs, Place};
use surgetank_store::object::{Objects, Part, When, Words};
use surgetank_testkit::servers::mongo::MongoServer;

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

const MIB: usize = 1 << 20;
const SMALL_BYTES: usize = 4096;
const CHUNK_BYTES: usize = 255 << 10;
const PART_CHUNKS: usize = 64;
const PART_BYTES: usize = PART_CHUNKS * CHUNK_BYTES;

trait Driver: Sync {
    fn name(&self) -> &'static str;
    fn stat(&self, key: &str) -> Outcome<()>;
    /// No file has the name.
    fn publish_small(&self, key: &str, content: &[u8]) -> Outcome<()>;
    /// `count` times the same part, `threads` at a time.
    fn publish_large(&self, key: &str, part: &[u8], count: usize, threads: usize) -> Outcome<()>;
    fn read_large(&self, key: &str, length: usize) -> Outcome<()>;
    /// Removes all files.
    fn clear(&self) -> Outcome<()>;
}

struct Ours {
    store: GridFs,
    is_floor: bool,
}

impl Driver for Ours {
    fn name(&self) -> &'static str {
        "ours"
    }

    fn stat(&self, key: &str) -> Outcome<()> {
        Ok(self.store.head(key).map(drop)?)
    }

    fn publish_small(&self, key: &str, content: &[u8]) -> Outcome<()> {
        Ok(self.store.put(key, &content, of_bytes(content), &Words::new(), When::Absent).map(drop)?)
    }

    fn publish_large(&self, key: &str, part: &[u8], count: usize, threads: usize) -> Outcome<()> {
        let (id, sum) = (self.store.begin(key, &Words::new())?, of_bytes(part));
        let parts = Mutex::new(Vec::new());
        at_once(count, threads, &|nth| {
            let sent = self.store.part(key, &id, nth as u32 + 1, &part, sum);
            match sent {
                // (The floor stores no upload: the measurement ends when the bytes are sent.)
                Err(_) if self.is_floor => Ok(()),
                sent => sent.map(|part| parts.lock().map(|mut parts| parts.push(part)).unwrap_or(())),
            }
        })?;
        if self.is_floor {
            return Ok(());
        }
        let mut parts: Vec<Part> = parts.into_inner().unwrap_or_default();
        parts.sort_by_key(|part| part.number);
        let whole = parts.iter().fold(of_bytes(b""), |whole, part| joined(whole, sum, part.size_bytes));
        Ok(self.store.complete(key, &id, &parts, whole, When::Always).map(drop)?)
    }

    fn read_large(&self, key: &str, length: usize) -> Outcome<()> {
        let mut content = Vec::with_capacity(length);
        std::io::Read::read_to_end(&mut self.store.get(key, 0..length as u64, None)?, &mut content)?;
        Ok(())
    }

    fn clear(&self) -> Outcome<()> {
        loop {
            let page = self.store.list("", false, None)?;
            page.objects.iter().try_for_each(|object| self.store.delete(&object.key))?;
            if page.next.is_none() {
                return Ok(());
            }
        }
    }
}

struct Options {
    floor: bool,
    objects: usize,
    large: usize,
    rounds: usize,
    threads: usize,
}

fn main() -> Outcome<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let option = |name: &str, usual: usize| -> Outcome<usize> {
        let at = words.iter().position(|word| word == name).and_then(|at| words.get(at + 1));
        Ok(at.map_or(Ok(usual), |value| value.parse())?)
    };
    let options = Options {
        floor: words.iter().any(|word| word == "--floor"),
        objects: option("--objects", 100)?,
        large: option("--large", 64)?,
        rounds: option("--rounds", 10)?,
        threads: option("--threads", 4)?,
    };
    let mut server = None;
    let port = if options.floor {
        floor::start()?
    } else {
        server.insert(MongoServer::start().ok_or("FerretDB is missing: scripts/setup test")?).port()
    };
    let place = Place::parse(&format!("mongodb://127.0.0.1:{port}/db?bucket=b"))?;
    let mut drivers: Vec<Box<dyn Driver>> =
        vec![Box::new(Ours { store: GridFs::open(place)?, is_floor: options.floor })];
    #[cfg(feature = "library")]
    drivers.push(Box::new(library::Library::new(port)?));

    let mut figures = Figures::default();
    for driver in &drivers {
        round(driver.as_ref(), &options, &mut Figures::default())?;
    }
    for _ in 0..options.rounds {
        for driver in &drivers {
            round(driver.as_ref(), &options, &mut figures)?;
        }
    }
    figures.show();
    Ok(())
}

/// Removes everything again.
fn round(driver: &dyn Driver, options: &Options, figures: &mut Figures) -> Outcome<()> {
    let (count, name) = (options.objects, driver.name());
    let small = vec![0x5a; SMALL_BYTES];
    let key = |nth: usize| format!("small/{nth:06}");
    let each = |threads: usize, act: &(dyn Fn(usize) -> Outcome<()> + Sync)| -> Outcome<()> {
        Ok(at_once(count, threads, &|nth| act(nth).map_err(|why| std::io::Error::other(why.to_string())))?)
    };
    figures.note("stat, none there", name, count, || each(1, &|nth| driver.stat(&key(nth))))?;
    figures.note("publish 4 KiB", name, count, || each(1, &|nth| driver.publish_small(&key(nth), &small)))?;
    figures.note("stat", name, count, || each(1, &|nth| driver.stat(&key(nth))))?;
    figures.note("stat, several at a time", name, count, || each(options.threads, &|nth| driver.stat(&key(nth))))?;
    driver.clear()?;

    let (part, parts) = (vec![0x5a; PART_BYTES], (options.large * MIB).div_ceil(PART_BYTES));
    figures.note("publish large", name, 1, || driver.publish_large("large", &part, parts, options.threads))?;
    if !options.floor {
        figures.note("read large", name, 1, || driver.read_large("large", PART_BYTES * parts))?;
        driver.clear()?;
    }
    Ok(())
}

/// The operation and the driver: milliseconds by the clock, and of the processor.
#[derive(Default)]
struct Figures(Vec<(&'static str, &'static str, Vec<f64>, Vec<f64>)>);

impl Figures {
    fn note(
        &mut self,
        what: &'static str,
        driver: &'static str,
        count: usize,
        act: impl FnOnce() -> Outcome<()>,
    ) -> Outcome<()> {
        let (began, processor) = (Instant::now(), processor_millis());
        act()?;
        let wall = began.elapsed().as_secs_f64() * 1e3 / count as f64;
        let processor = (processor_millis() - processor) / count as f64;
        match self.0.iter_mut().find(|known| (known.0, known.1) == (what, driver)) {
            Some(known) => {
                known.2.push(wall);
                known.3.push(processor);
            }
            None => self.0.push((what, driver, vec![wall], vec![processor])),
        }
        Ok(())
    }

    fn show(mut self) {
        self.0.sort_by_key(|figure| figure.0);
        for (what, driver, wall, processor) in self.0 {
            println!("{what:24} {driver:10} {}   processor {}", summary(wall), summary(processor));
        }
    }
}

/// Of all threads of this process.
fn processor_millis() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 * 1e3 + time.tv_nsec as f64 / 1e6
}

fn summary(mut millis: Vec<f64>) -> String {
    millis.sort_by(f64::total_cmp);
    let (least, most) = (millis.first().unwrap_or(&0.0), millis.last().unwrap_or(&0.0));
    format!("{:9.3} ms ({least:.3} to {most:.3})", millis[millis.len() / 2])
}
