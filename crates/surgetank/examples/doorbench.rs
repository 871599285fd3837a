//! What file operations cost in two directories, for instance a mount and the bare tier: round by round in turn (A B A B), so
//! that a drift of the machine hits both. Prints medians with their quartiles, and JSON.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use rustix::fs::{Mode, OFlags};
use rustix::process::Pid;
use rustix::thread::CpuSet;
use serde_json::json;

#[derive(Parser)]
struct Arguments {
    a: PathBuf,
    b: PathBuf,
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// Repetitions of each small operation in a round.
    #[arg(long, default_value_t = 2000)]
    repeat: usize,
    /// Size of the file for the large reads and writes.
    #[arg(long, default_value_t = 256)]
    stream_mib: usize,
    /// Keep this program, and the servers, on one core.
    #[arg(long, conflicts_with = "cores")]
    core: Option<usize>,
    /// Keep this program on the first core, the servers on the second.
    #[arg(long, value_parser = two_cores)]
    cores: Option<[usize; 2]>,
    /// The process behind a directory, for --core and --cores. May be given several times.
    #[arg(long)]
    server_pid: Vec<i32>,
    /// Only operations whose name contains this.
    #[arg(long, default_value = "")]
    only: String,
    /// Where the figures go as JSON; standard output without it.
    #[arg(long)]
    json: Option<PathBuf>,
}

fn two_cores(text: &str) -> Result<[usize; 2], String> {
    let number = |text: &str| text.parse().map_err(|error| format!("{error}"));
    let (own, servers) = text.split_once(',').ok_or("two numbers are wanted, as in 0,1")?;
    Ok([number(own)?, number(servers)?])
}

const PAGE_BYTES: usize = 4096;
const WINDOW_PAGES: usize = 1024;
const LISTED_ENTRIES: usize = 1000;
const MIB: usize = 1 << 20;

/// Figures of one round: operation, unit, value.
type Round = Vec<(&'static str, &'static str, f64)>;

struct Room {
    directory: PathBuf,
    repeat: usize,
    stream_mib: usize,
}

impl Room {
    fn prepare(place: &Path, arguments: &Arguments) -> io::Result<Self> {
        let directory = place.join(format!("doorbench-{}", std::process::id()));
        std::fs::create_dir(&directory)?;
        std::fs::create_dir(directory.join("listed"))?;
        for index in 0..LISTED_ENTRIES {
            File::create(directory.join(format!("listed/entry-{index:06}")))?;
        }
        std::fs::write(directory.join("file"), vec![7; WINDOW_PAGES * PAGE_BYTES])?;
        Ok(Self { directory, repeat: arguments.repeat, stream_mib: arguments.stream_mib })
    }

    fn round(&self, only: &str) -> io::Result<Round> {
        let mut round = Round::new();
        let wanted = |name: &str| name.contains(only);
        let file = self.directory.join("file");
        if wanted("open+close") {
            round.push(self.each("open+close", |_| open(&file, OFlags::RDONLY).map(drop))?);
        }
        if wanted("create+close") || wanted("unlink") {
            let names: Vec<_> = (0..self.repeat).map(|index| self.directory.join(format!("new-{index}"))).collect();
            let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY;
            round.push(self.each("create+close", |index| open(&names[index], flags).map(drop))?);
            round.push(self.each("unlink", |index| std::fs::remove_file(&names[index]))?);
        }
        if wanted("stat") {
            round.push(self.each("stat, cached", |_| rustix::fs::stat(&file).map(drop).map_err(Into::into))?);
        }
        if wanted("rename") {
            let names = [self.directory.join("one"), self.directory.join("two")];
            File::create(&names[0])?;
            round.push(self.each("rename", |index| std::fs::rename(&names[index % 2], &names[(index + 1) % 2]))?);
            std::fs::remove_file(&names[self.repeat % 2])?;
        }
        if wanted("readdir") {
            let listed = self.directory.join("listed");
            let times = (self.repeat / 100).max(1);
            let start = Instant::now();
            for _ in 0..times {
                let entries = std::fs::read_dir(&listed)?.count();
                if entries != LISTED_ENTRIES {
                    return Err(io::Error::other(format!("{entries} entries listed, {LISTED_ENTRIES} are there")));
                }
            }
            round.push(("readdir of 1000", "ns", nanos(start) / times as f64));
        }
        let held = File::options().read(true).write(true).open(&file)?;
        let mut page = vec![1; PAGE_BYTES];
        let offset = |index: usize| (index % WINDOW_PAGES * PAGE_BYTES) as u64;
        if wanted("pwrite") {
            round.push(self.each("pwrite 4 KiB", |index| held.write_all_at(&page, offset(index)))?);
        }
        if wanted("pread") {
            round.push(self.each("pread 4 KiB", |index| held.read_exact_at(&mut page, offset(index)))?);
        }
        if wanted("stream") {
            self.stream(&mut round)?;
        }
        Ok(round)
    }

    fn each(
        &self,
        name: &'static str,
        mut operation: impl FnMut(usize) -> io::Result<()>,
    ) -> io::Result<(&'static str, &'static str, f64)> {
        let start = Instant::now();
        for index in 0..self.repeat {
            operation(index)?;
        }
        Ok((name, "ns", nanos(start) / self.repeat as f64))
    }

    fn stream(&self, round: &mut Round) -> io::Result<()> {
        let path = self.directory.join("stream");
        let mut block = vec![3; MIB];
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&path)?;
        let start = Instant::now();
        for index in 0..self.stream_mib {
            file.write_all_at(&block, (index * MIB) as u64)?;
        }
        round.push(("stream write 1 MiB", "GB/s", (self.stream_mib * MIB) as f64 / nanos(start)));
        drop(file);
        let file = File::open(&path)?;
        let start = Instant::now();
        for index in 0..self.stream_mib {
            file.read_exact_at(&mut block, (index * MIB) as u64)?;
        }
        round.push(("stream read 1 MiB", "GB/s", (self.stream_mib * MIB) as f64 / nanos(start)));
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

fn open(path: &Path, flags: OFlags) -> io::Result<std::os::fd::OwnedFd> {
    Ok(rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::from_raw_mode(0o644))?)
}

fn nanos(start: Instant) -> f64 {
    start.elapsed().as_nanos() as f64
}

/// Lower quartile, median, upper quartile.
fn quartiles(mut values: Vec<f64>) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| values[(values.len() - 1) * quarter / 4])
}

fn pin(arguments: &Arguments) -> io::Result<()> {
    let (own, servers) = match (&arguments.core, &arguments.cores) {
        (Some(core), _) => (*core, *core),
        (None, Some(cores)) => (cores[0], cores[1]),
        (None, None) => return Ok(()),
    };
    let only = |core: usize| {
        let mut set = CpuSet::new();
        set.set(core);
        set
    };
    rustix::thread::sched_setaffinity(None, &only(own))?;
    for pid in &arguments.server_pid {
        for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
            let task = task?.file_name().to_string_lossy().parse().ok().and_then(Pid::from_raw);
            rustix::thread::sched_setaffinity(task, &only(servers))?;
        }
    }
    Ok(())
}

fn run(arguments: &Arguments) -> io::Result<()> {
    pin(arguments)?;
    let rooms = [Room::prepare(&arguments.a, arguments)?, Room::prepare(&arguments.b, arguments)?];
    let mut rounds: [Vec<Round>; 2] = Default::default();
    for number in 0..=arguments.rounds {
        for (room, rounds) in rooms.iter().zip(&mut rounds) {
            let round = room.round(&arguments.only)?;
            // The first round warms up.
            if number > 0 {
                rounds.push(round);
            }
        }
    }
    let mut figures = Vec::new();
    println!("{:<20} {:>5} {:>36} {:>36} {:>7}", "", "", "A", "B", "A/B");
    for (index, (name, unit, _)) in rounds[0][0].iter().enumerate() {
        let [a, b] = [0, 1].map(|side: usize| quartiles(rounds[side].iter().map(|round| round[index].2).collect()));
        let digits = if *unit == "ns" { 0 } else { 2 };
        let show = |q: [f64; 3]| format!("{:.digits$} ({:.digits$} – {:.digits$})", q[1], q[0], q[2]);
        println!("{name:<20} {unit:>5} {:>36} {:>36} {:>7.2}", show(a), show(b), a[1] / b[1]);
        let side = |q: [f64; 3]| json!({ "median": q[1], "lower_quartile": q[0], "upper_quartile": q[2] });
        figures.push(json!({ "operation": name, "unit": unit, "a": side(a), "b": side(b) }));
    }
    let report = json!({
        "a": arguments.a, "b": arguments.b, "rounds": arguments.rounds, "repeat": arguments.repeat,
        "core": arguments.core, "cores": arguments.cores, "figures": figures,
    });
    match &arguments.json {
        Some(path) => std::fs::write(path, format!("{report:#}\n")),
        None => {
            println!("{report}");
            Ok(())
        }
    }
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("doorbench: {error}");
            ExitCode::FAILURE
        }
    }
}
