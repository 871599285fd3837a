//! Costs of file operations in a directory: one round for each line of standard input.
//!
//! `bench/figures` keeps one of these running in every door (bare tier, shim, mount, seccomp) and runs their rounds
//! alternately. A drift of the machine then affects all of them. Each round prints a JSON object: operation →
//! nanoseconds, and GB/s for streams.
//!
//! Every call uses libc's symbols, as most programs do: a preloaded library sees the calls.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, BufRead, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;

#[derive(Parser)]
struct Arguments {
    place: PathBuf,
    /// Repetitions of each small operation in a round.
    #[arg(long, default_value_t = 2000)]
    repeat: usize,
    /// Size of the file for the large reads and writes.
    #[arg(long, default_value_t = 256)]
    stream_mib: usize,
    /// Only operations whose name contains this.
    #[arg(long, default_value = "")]
    only: String,
}

const PAGE_BYTES: usize = 4096;
const WINDOW_PAGES: usize = 1024;
const LISTED_ENTRIES: usize = 1000;
const MIB: usize = 1 << 20;
const GAP: Duration = Duration::from_micros(100);
/// Outside of every mount.
const OUTSIDE: &CStr = c"/etc/passwd";

struct Room {
    directory: PathBuf,
    arguments: Arguments,
    figures: serde_json::Map<String, serde_json::Value>,
}

impl Room {
    fn prepare(arguments: Arguments) -> io::Result<Self> {
        // Absolute, as most programs name their files. The working directory then makes no difference.
        let directory = arguments.place.canonicalize()?.join(format!("doorbench-{}", std::process::id()));
        std::fs::create_dir(&directory)?;
        std::fs::create_dir(directory.join("listed"))?;
        for index in 0..LISTED_ENTRIES {
            File::create(directory.join(format!("listed/entry-{index:06}")))?;
        }
        std::fs::write(directory.join("file"), vec![7; WINDOW_PAGES * PAGE_BYTES])?;
        Ok(Self { directory, arguments, figures: serde_json::Map::new() })
    }

    fn path(&self, name: &str) -> io::Result<CString> {
        text(&self.directory.join(name))
    }

    fn round(&mut self) -> io::Result<()> {
        self.figures.clear();
        let file = self.path("file")?;
        self.each("open+close", |_| open_close(&file, libc::O_RDONLY))?;
        self.each("stat", |_| stat(&file))?;
        let missing = self.path("missing")?;
        self.each("stat, missing", |_| match stat(&missing) {
            Err(why) if why.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(why) => Err(why),
            Ok(()) => Err(io::Error::other("a missing file is there")),
        })?;
        self.each("outside: open+close", |_| open_close(OUTSIDE, libc::O_RDONLY))?;
        self.each("outside: stat", |_| stat(OUTSIDE))?;
        let new = (0..self.arguments.repeat).map(|index| self.path(&format!("new-{index}")));
        let new: Vec<CString> = new.collect::<io::Result<_>>()?;
        if self.wanted("create+close") || self.wanted("unlink") {
            let flags = libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY;
            self.note("create+close", |index| open_close(&new[index], flags), new.len())?;
            self.note("unlink", |index| unlink(&new[index]), new.len())?;
        }
        let names = [self.path("one")?, self.path("two")?];
        if self.wanted("rename") {
            open_close(&names[0], libc::O_CREAT | libc::O_WRONLY)?;
            self.each("rename", |index| rename(&names[index % 2], &names[(index + 1) % 2]))?;
            unlink(&names[self.arguments.repeat % 2])?;
        }
        if self.wanted("readdir of 1000") {
            let listed = self.directory.join("listed");
            let list = |_| match std::fs::read_dir(&listed)?.count() {
                LISTED_ENTRIES => Ok(()),
                entries => Err(io::Error::other(format!("{entries} entries listed, {LISTED_ENTRIES} are there"))),
            };
            self.note("readdir of 1000", list, (self.arguments.repeat / 100).max(1))?;
        }
        self.after_gaps("open a directory, 100 µs after another")?;
        let held = File::options().read(true).write(true).open(self.directory.join("file"))?;
        let mut page = vec![1; PAGE_BYTES];
        let offset = |index: usize| (index % WINDOW_PAGES * PAGE_BYTES) as u64;
        self.each("pwrite 4 KiB", |index| held.write_all_at(&page, offset(index)))?;
        self.each("pread 4 KiB", |index| held.read_exact_at(&mut page, offset(index)))?;
        drop(held);
        if self.wanted("stream") { self.stream() } else { Ok(()) }
    }

    /// As in a program that computes between its calls: the thread that serves the mount may sleep by then.
    fn after_gaps(&mut self, name: &str) -> io::Result<()> {
        if !self.wanted(name) {
            return Ok(());
        }
        let (directory, times) = (self.path("listed")?, (self.arguments.repeat / 4).max(1));
        let mut taken = 0.0;
        for _ in 0..times {
            let idle = Instant::now();
            while idle.elapsed() < GAP {
                std::hint::spin_loop();
            }
            let start = Instant::now();
            open_close(&directory, libc::O_RDONLY | libc::O_DIRECTORY)?;
            taken += nanos(start);
        }
        self.figures.insert(name.to_owned(), (taken / times as f64).into());
        Ok(())
    }

    fn wanted(&self, name: &str) -> bool {
        name.contains(&self.arguments.only)
    }

    fn each(&mut self, name: &str, operation: impl FnMut(usize) -> io::Result<()>) -> io::Result<()> {
        if self.wanted(name) { self.note(name, operation, self.arguments.repeat) } else { Ok(()) }
    }

    fn note(&mut self, name: &str, mut operation: impl FnMut(usize) -> io::Result<()>, times: usize) -> io::Result<()> {
        let start = Instant::now();
        for index in 0..times {
            operation(index)?;
        }
        self.figures.insert(name.to_owned(), (nanos(start) / times as f64).into());
        Ok(())
    }

    fn stream(&mut self) -> io::Result<()> {
        let path = self.directory.join("stream");
        let mut block = vec![3; MIB];
        let (blocks, bytes) = (self.arguments.stream_mib, (self.arguments.stream_mib * MIB) as f64);
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&path)?;
        let start = Instant::now();
        for index in 0..blocks {
            file.write_all_at(&block, (index * MIB) as u64)?;
        }
        self.figures.insert("stream write 1 MiB".to_owned(), (bytes / nanos(start)).into());
        drop(file);
        let file = File::open(&path)?;
        let start = Instant::now();
        for index in 0..blocks {
            file.read_exact_at(&mut block, (index * MIB) as u64)?;
        }
        self.figures.insert("stream read 1 MiB".to_owned(), (bytes / nanos(start)).into());
        std::fs::remove_file(&path)
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.directory) {
            eprintln!("doorbench: {} stays behind: {error}", self.directory.display());
        }
    }
}

fn text(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

fn done(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn open_close(path: &CStr, flags: libc::c_int) -> io::Result<()> {
    // SAFETY: a path that ends with a nul; the descriptor is ours and closed once.
    unsafe { done(libc::close(done(libc::open(path.as_ptr(), flags | libc::O_CLOEXEC, 0o644))?)).map(drop) }
}

fn stat(path: &CStr) -> io::Result<()> {
    // SAFETY: `stat` is plain numbers, for which all zeroes are values; the path ends with a nul.
    unsafe { done(libc::stat(path.as_ptr(), &mut std::mem::zeroed())).map(drop) }
}

fn unlink(path: &CStr) -> io::Result<()> {
    // SAFETY: the path ends with a nul.
    done(unsafe { libc::unlink(path.as_ptr()) }).map(drop)
}

fn rename(from: &CStr, to: &CStr) -> io::Result<()> {
    // SAFETY: both paths end with a nul.
    done(unsafe { libc::rename(from.as_ptr(), to.as_ptr()) }).map(drop)
}

fn nanos(start: Instant) -> f64 {
    start.elapsed().as_nanos() as f64
}

fn run(arguments: Arguments) -> io::Result<()> {
    let mut room = Room::prepare(arguments)?;
    for line in io::stdin().lock().lines() {
        line?;
        room.round()?;
        println!("{}", serde_json::Value::Object(room.figures.clone()));
        io::stdout().flush()?;
    }
    Ok(())
}

fn main() -> ExitCode {
    match run(Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("doorbench: {error}");
            ExitCode::FAILURE
        }
    }
}
