//! Measures one tier or the store: bandwidth of one process and of several, operations on names, and dirty bytes ahead
//! of the device.

use std::fs;
use std::io;
use std::path::Path;

use surgetank_core::planner::machine::{Operations, Place, Stream};
use surgetank_policy::config::quantity::show_bytes;
use surgetank_types::error::{Error, Result};

use super::probe::Probe;
use super::rounds::{Round, play};
use super::scratch::Scratch;

/// The size of a stream is chosen so that it takes about this long.
const STREAM_S: f64 = 1.2;
const STREAM_BYTES_MIN: u64 = 16 << 20;
const STREAM_BYTES_MAX: u64 = 384 << 20;
/// Rounds of one process; their differences are the spread.
const ROUNDS: usize = 3;
const FILES: u64 = 120;
const SYNCED_FILES: u64 = 10;
/// A size that the page cache certainly takes at once.
const CACHED_BYTES: u64 = 4 << 20;
const CLOSED_BYTES_MIN: u64 = 16 << 20;
const CLOSED_BYTES_MAX: u64 = 64 << 20;

pub fn measure(
    name: &str,
    path: &Path,
    in_memory: bool,
    room_bytes: u64,
    cores: usize,
    notes: &mut Vec<String>,
) -> Result<Place> {
    if room_bytes / 4 < STREAM_BYTES_MIN {
        return Err(Error::new(format!(
            "{} has {} for us, too little to measure with",
            path.display(),
            show_bytes(room_bytes)
        ))
        .remedy(format!("free {} there, or give another directory", show_bytes(4 * STREAM_BYTES_MIN))));
    }
    let scratch = Scratch::new(path)?;
    let failed = |error: io::Error| {
        Error::new(format!("{} can't be measured", path.display()))
            .why(error)
            .remedy("see that nothing else fills or removes it")
    };
    let subject = Subject { dir: &scratch.path, in_memory, cores, room_bytes };
    subject.measure(name, path, notes).map_err(failed)
}

struct Subject<'a> {
    dir: &'a Path,
    in_memory: bool,
    cores: usize,
    room_bytes: u64,
}

impl Subject<'_> {
    fn measure(&self, name: &str, path: &Path, notes: &mut Vec<String>) -> io::Result<Place> {
        let bytes = self.stream_bytes()?;
        eprintln!(
            "surgetank: measuring {name} {}: {} at a time, removed again",
            path.display(),
            show_bytes(bytes.max(CACHED_BYTES))
        );
        let file = self.dir.join("stream");
        let (mut writes, mut reads, mut cached, mut ahead) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let written = self.one(Probe::Write { path: file.clone(), bytes, sync: !self.in_memory })?;
            ahead.push(written.each[0].sync_s);
            writes.push(written);
            self.cold(&file, notes);
            reads.push(self.one(Probe::Read { path: file.clone() })?);
            cached.push(self.one(Probe::Read { path: file.clone() })?);
        }
        let (write_all_s, read_all_s) = self.several(bytes, notes)?;
        let write = stream(bytes, &writes, write_all_s);
        let read = stream(bytes, &reads, read_all_s);
        let cached_read = stream(bytes, &cached, None);
        let cached_write = if self.in_memory { write } else { self.cached_write()? };
        let mut dirty_bytes = if self.in_memory { 0 } else { dirty_bytes(bytes, write.one_bps, median(&ahead)) };
        if dirty_bytes > 0 && self.close_waits(dirty_bytes, &write, &cached_write)? {
            notes.push(format!("{name}: a writer's close waits until its bytes are there, as over NFS"));
            dirty_bytes = 0;
        }
        let scaled = |stream: Stream| Stream { all_bps: stream.one_bps * self.cores as f64, ..stream };
        Ok(Place {
            name: name.to_owned(),
            path: path.to_owned(),
            in_memory: self.in_memory,
            room_bytes: self.room_bytes,
            read,
            write,
            // Copies in memory: as many at a time as there are cores.
            cached_read: scaled(cached_read),
            cached_write: if self.in_memory { write } else { scaled(cached_write) },
            dirty_bytes,
            operations: self.operations(notes)?,
            total_read_bps: None,
            total_write_bps: None,
        })
    }

    fn one(&self, probe: Probe) -> io::Result<Round> {
        play(&[vec![probe]], None)?.pop().ok_or_else(|| io::Error::other("no measurement"))
    }

    /// The stream's size, estimated from a first small file.
    fn stream_bytes(&self) -> io::Result<u64> {
        let path = self.dir.join("first");
        let first = self.one(Probe::Write { path: path.clone(), bytes: STREAM_BYTES_MIN, sync: true })?;
        fs::remove_file(path)?;
        let bytes = (STREAM_BYTES_MIN as f64 / first.each[0].wall_s * STREAM_S) as u64;
        Ok(bytes.clamp(STREAM_BYTES_MIN, STREAM_BYTES_MAX.min(self.room_bytes / 4)) >> 20 << 20)
    }

    /// As many processes as cores, each with its share.
    fn several(&self, bytes: u64, notes: &mut Vec<String>) -> io::Result<(Option<f64>, Option<f64>)> {
        if self.cores == 1 {
            return Ok((None, None));
        }
        let share = bytes / self.cores as u64;
        let paths: Vec<_> = (0..self.cores).map(|number| self.dir.join(format!("stream-{number}"))).collect();
        let write =
            |path: &std::path::PathBuf| Probe::Write { path: path.clone(), bytes: share, sync: !self.in_memory };
        let written = play(&[paths.iter().map(write).collect()], None)?;
        for path in &paths {
            self.cold(path, notes);
        }
        let read = play(&[paths.iter().map(|path| Probe::Read { path: path.clone() }).collect()], None)?;
        paths.iter().try_for_each(fs::remove_file)?;
        let pace = |rounds: &[Round]| rounds.first().map(|round| (share * self.cores as u64) as f64 / round.wall_s);
        Ok((pace(&written), pace(&read)))
    }

    fn cached_write(&self) -> io::Result<Stream> {
        let mut rounds = Vec::new();
        for number in 0..ROUNDS {
            let path = self.dir.join(format!("cached-{number}"));
            rounds.push(self.one(Probe::Write { path: path.clone(), bytes: CACHED_BYTES, sync: false })?);
            fs::File::open(&path)?.sync_all()?;
            fs::remove_file(path)?;
        }
        Ok(stream(CACHED_BYTES, &rounds, None))
    }

    /// Does the client send dirty data before close returns? Then close blocks the program's computation.
    fn close_waits(&self, dirty_bytes: u64, write: &Stream, cached: &Stream) -> io::Result<bool> {
        let path = self.dir.join("closed");
        // More than a store accepts at once.
        let bytes = dirty_bytes.clamp(CLOSED_BYTES_MIN, CLOSED_BYTES_MAX).min(self.room_bytes / 4);
        let closed = self.one(Probe::Write { path: path.clone(), bytes, sync: false })?;
        fs::File::open(&path)?.sync_all()?;
        fs::remove_file(path)?;
        Ok(is_through(closed.each[0].wall_s, bytes, write.one_bps, cached.one_bps))
    }

    fn operations(&self, notes: &mut Vec<String>) -> io::Result<Operations> {
        let dirs: Vec<_> = (0..self.cores).map(|number| self.dir.join(format!("names-{number}"))).collect();
        dirs.iter().try_for_each(fs::create_dir)?;
        let alone = self.dir.join("names");
        fs::create_dir(&alone)?;
        let created = self.one(Probe::Create { dir: alone.clone(), files: FILES })?;
        let together = dirs.iter().map(|dir| Probe::Create { dir: dir.clone(), files: FILES }).collect();
        let together = play(&[together], None)?;
        self.settle_files(&alone)?;
        self.cold(&alone, notes);
        let opened = self.one(Probe::Open { dir: alone.clone(), files: FILES })?;
        self.cold(&alone, notes);
        let stat = self.one(Probe::Stat { dir: alone.clone(), files: FILES })?;
        let unlinked = self.one(Probe::Unlink { dir: alone.clone(), files: FILES })?;
        let synced = self.one(Probe::Sync { dir: alone, files: SYNCED_FILES })?;
        let each = |round: &Round| round.each[0].wall_s / FILES as f64;
        let all = together.first().map_or(f64::INFINITY, |round| round.wall_s);
        let per_second = ((FILES * self.cores as u64) as f64 / all).max(1.0 / each(&created)).min(1e9);
        Ok(Operations {
            create_s: each(&created),
            open_s: each(&opened),
            stat_s: each(&stat),
            unlink_s: each(&unlinked),
            fsync_s: synced.each[0].wall_s / SYNCED_FILES as f64,
            cpu_s: created.cpu_s() / FILES as f64,
            per_second,
        })
    }

    /// Syncs the files, so that the cache can drop them.
    fn settle_files(&self, dir: &Path) -> io::Result<()> {
        if self.in_memory {
            return Ok(());
        }
        // A FUSE mount does not pass syncfs on, so the files are synced one by one.
        fs::read_dir(dir)?.try_for_each(|entry| fs::File::open(entry?.path())?.sync_all())
    }

    fn cold(&self, path: &Path, notes: &mut Vec<String>) {
        if !self.in_memory {
            make_cold(path, notes);
        }
    }
}

/// Drops the file from the page cache: root drops the whole cache, other users what the kernel releases of one file.
pub fn make_cold(path: &Path, notes: &mut Vec<String>) {
    if rustix::process::geteuid().is_root() && fs::write("/proc/sys/vm/drop_caches", "3").is_ok() {
        return;
    }
    let note = "not root: files are asked out of the page cache one by one, which a network file system need not heed";
    if !notes.iter().any(|have| have == note) {
        notes.push(note.to_owned());
    }
    if let Ok(file) = fs::File::open(path) {
        // The note says what the call does not drop.
        let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
    }
}

fn stream(bytes: u64, rounds: &[Round], all_bps: Option<f64>) -> Stream {
    let walls: Vec<f64> = rounds.iter().map(|round| round.each[0].wall_s).collect();
    let cpu: Vec<f64> = rounds.iter().map(Round::cpu_s).collect();
    let one_bps = bytes as f64 / median(&walls);
    let (least, most) =
        walls.iter().fold((f64::INFINITY, 0.0f64), |(least, most), wall| (least.min(*wall), most.max(*wall)));
    Stream {
        one_bps,
        all_bps: all_bps.unwrap_or(one_bps).max(one_bps),
        cpu_s_per_byte: median(&cpu) / bytes as f64,
        spread: ((most - least) / (2.0 * median(&walls))).min(0.9),
    }
}

pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}

/// Did it take as long as the device does, rather than as memory? (If they hardly differ, it does not matter.)
fn is_through(wall_s: f64, bytes: u64, write_bps: f64, cached_bps: f64) -> bool {
    let midway_s = bytes as f64 * (1.0 / write_bps + 1.0 / cached_bps) / 2.0;
    2.0 * write_bps < cached_bps && wall_s > midway_s
}

/// The bytes that were dirty when the writer ended; or, if that is nearly all, the kernel's own limit.
fn dirty_bytes(bytes: u64, write_bps: f64, sync_s: f64) -> u64 {
    let ahead = (sync_s * write_bps) as u64;
    if ahead < bytes / 5 * 4 {
        return ahead;
    }
    let text = fs::read_to_string("/proc/vmstat").unwrap_or_default();
    let pages = text.lines().find_map(|line| line.strip_prefix("nr_dirty_threshold ")?.trim().parse::<u64>().ok());
    pages.map_or(ahead, |pages| (pages * rustix::param::page_size() as u64).max(ahead))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dirty_limit_equals_the_bytes_that_sync_wrote() {
        assert_eq!(dirty_bytes(100 << 20, f64::from(50 << 20), 0.5), 25 << 20);
        assert!(dirty_bytes(100 << 20, f64::from(50 << 20), 1.9) >= 95 << 20);
    }

    #[test]
    fn close_as_slow_as_the_device_counts_as_waiting() {
        assert!(is_through(0.27, 30 << 20, f64::from(110 << 20), f64::from(800 << 20)));
        assert!(!is_through(0.04, 30 << 20, f64::from(110 << 20), f64::from(800 << 20)));
        // A disk as fast as memory.
        assert!(!is_through(0.06, 64 << 20, f64::from(1100 << 20), f64::from(1300 << 20)));
    }

    #[test]
    fn spread_is_half_the_difference_of_rounds() {
        let round = |wall_s| Round {
            each: vec![super::super::probe::Measured { wall_s, sync_s: 0.0, cpu_s: 0.1 }],
            wall_s,
            agent_cpu_s: 0.0,
        };
        let got = stream(100, &[round(1.0), round(1.1), round(0.9)], Some(300.0));
        assert_eq!((got.one_bps, got.all_bps), (100.0, 300.0));
        assert!((got.spread - 0.1).abs() < 1e-12 && (got.cpu_s_per_byte - 1e-3).abs() < 1e-12);
    }
}
