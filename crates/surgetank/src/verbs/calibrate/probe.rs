//! One timed measurement, made in a process of its own (`surgetank probe`), as programs do. Times are in seconds.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use surgetank_types::clock;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Probe {
    /// Sequential; with `sync` the time includes the sync to the device.
    Write {
        path: PathBuf,
        bytes: u64,
        sync: bool,
    },
    Read {
        path: PathBuf,
    },
    /// New files of 4 KiB.
    Create {
        dir: PathBuf,
        files: u64,
    },
    /// Each file is opened, its first bytes are read, and it is closed.
    Open {
        dir: PathBuf,
        files: u64,
    },
    Stat {
        dir: PathBuf,
        files: u64,
    },
    Unlink {
        dir: PathBuf,
        files: u64,
    },
    /// New files, each synced; only the syncs are timed.
    Sync {
        dir: PathBuf,
        files: u64,
    },
    /// Until every file is in the store (`surgetank wait`).
    Durable {
        over: PathBuf,
        state: PathBuf,
    },
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Measured {
    /// The time until programs continue.
    pub wall_s: f64,
    /// For a synced write: the sync alone.
    pub sync_s: f64,
    /// Core time of this process.
    pub cpu_s: f64,
}

const PIECE_BYTES: usize = 1 << 20;
const SMALL_BYTES: usize = 4096;

fn cpu_s() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

pub fn measure(probe: &Probe) -> io::Result<Measured> {
    let mut buffer = vec![0u8; PIECE_BYTES];
    // Not zeros, which a file system may omit; and touched before the clock starts.
    for (at, byte) in buffer.iter_mut().enumerate() {
        *byte = (at.wrapping_mul(2_654_435_761) >> 7) as u8;
    }
    let (begun, cpu_before) = (clock::tick(), cpu_s());
    let mut wall_s = None;
    let mut sync_s = 0.0;
    match probe {
        Probe::Write { path, bytes, sync } => {
            let mut file = File::create(path)?;
            let mut left = *bytes;
            while left > 0 {
                let piece = left.min(PIECE_BYTES as u64) as usize;
                file.write_all(&buffer[..piece])?;
                left -= piece as u64;
            }
            if *sync {
                let syncing = clock::tick();
                file.sync_all()?;
                sync_s = since(syncing);
            }
        }
        Probe::Read { path } => {
            let mut file = File::open(path)?;
            while file.read(&mut buffer)? > 0 {}
        }
        Probe::Create { dir, files } => {
            // The process that fills the directory creates it, as programs do. Otherwise the agent would ask the store
            // for each new name.
            if !dir.is_dir() {
                fs::create_dir(dir)?;
            }
            each(dir, *files, |path| {
                OpenOptions::new().write(true).create_new(true).open(path)?.write_all(&buffer[..SMALL_BYTES])
            })?;
        }
        Probe::Open { dir, files } => {
            each(dir, *files, |path| File::open(path)?.read_exact(&mut buffer[..SMALL_BYTES]))?;
        }
        Probe::Stat { dir, files } => each(dir, *files, |path| fs::metadata(path).map(drop))?,
        Probe::Unlink { dir, files } => each(dir, *files, |path| fs::remove_file(path))?,
        Probe::Sync { dir, files } => {
            each(dir, *files, |path| {
                let mut file = File::create(path)?;
                file.write_all(&buffer[..SMALL_BYTES])?;
                let syncing = clock::tick();
                file.sync_all()?;
                sync_s += since(syncing);
                Ok(())
            })?;
            wall_s = Some(sync_s);
        }
        Probe::Durable { over, state } => {
            let done = std::process::Command::new(std::env::current_exe()?)
                .args(["wait", "--quiet", "--state"])
                .arg(state)
                .arg(over)
                .status()?;
            if !done.success() {
                return Err(io::Error::other("`surgetank wait` says that not all is durable"));
            }
        }
    }
    Ok(Measured { wall_s: wall_s.unwrap_or_else(|| since(begun)), sync_s, cpu_s: cpu_s() - cpu_before })
}

fn each(dir: &Path, files: u64, mut what: impl FnMut(&Path) -> io::Result<()>) -> io::Result<()> {
    (0..files).try_for_each(|number| what(&dir.join(format!("f{number}"))))
}

/// Seconds since `begun`.
pub fn since(begun: std::time::Instant) -> f64 {
    clock::tick().duration_since(begun).as_secs_f64()
}
