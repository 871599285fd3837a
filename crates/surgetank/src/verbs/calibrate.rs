//! `surgetank calibrate`: measures this machine's tiers, its store and the agent in under a minute.
//!
//! ```text
//! room? ─► scratch directories ─► each tier, the store: streams, names ─► an agent over a scratch directory: doors, drain ─► JSON
//! ```
//! Every tier and store gets a directory `.surgetank-calibrate-PID`, which is removed at the end. The next calibration
//! removes the directory of a killed one. A place is skipped if a quarter of its room is not enough. The danger that it
//! avoids: figures of the page cache instead of the device. A file is dropped from the cache before a cold read; if
//! that is not allowed, a note says so.

mod doors;
mod places;
pub mod probe;
pub mod rounds;
mod scratch;

use std::path::{Path, PathBuf};
use std::{fs, io};

use clap::Args;
use surgetank_core::planner::machine::{Calibration, SCHEMA};
use surgetank_policy::config::machine::Machine;
use surgetank_policy::config::quantity::show_bytes;
use surgetank_policy::config::tiers::cap_bytes;
use surgetank_types::error::{Error, Result};

use super::outcome::{Failure, Outcome};
use super::program::Program;
use super::settings::Settings;
use super::{exit, words};

/// Measure this machine's tiers, store and agent, for `model` and `advise`
#[derive(Debug, Args)]
pub struct CalibrateArgs {
    /// A tier and its devices, as for `run`; may be given several times [default: found]
    #[arg(long = "tier", value_name = "NAME=PATH[,PATH…][:SIZE]")]
    tiers: Vec<String>,
    /// Directory of the store [default: the current directory]
    #[arg(long, value_name = "DIR")]
    store: Option<PathBuf>,
    /// Where the calibration goes [default: ~/.cache/surgetank/calibration.json]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Print the calibration as JSON
    #[arg(long)]
    json: bool,
}

/// The file that `model` and `advise` read by default.
pub fn default_file() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")))?;
    Some(cache.join("surgetank/calibration.json"))
}

pub fn calibrate(program: &Program<'_>, args: &CalibrateArgs) -> Outcome {
    let store = args.store.clone().unwrap_or_else(|| PathBuf::from("."));
    if store.to_str().is_some_and(|text| text.contains("://")) {
        return Err(Failure::usage(
            Error::new(format!("--store: {} is on a server; only a directory is measured", store.display())).remedy(
                "measure with a directory, then edit the figures of `store` in the file (`surgetank help model`)",
            ),
        ));
    }
    let store = fs::canonicalize(&store).map_err(|error| {
        let what = Error::new(format!("--store: {} can't be looked at", store.display())).why(error);
        Failure::usage(what.remedy("give a directory that exists"))
    })?;
    let settings = Settings { over: Some(store.clone()), tiers: args.tiers.clone(), ..Settings::default() };
    let config = (program.configure)(&settings).map_err(Failure::usage)?;
    let out = args.out.clone().or_else(default_file);
    // This check precedes minutes of measuring.
    out.as_deref().map_or(Ok(()), writable).map_err(Failure::usage)?;

    let machine = Machine::default();
    let load_before = load_average();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut notes = Vec::new();
    if config.tiers.is_empty() {
        notes.push("no tier was found or given: only the store was measured".to_owned());
    }
    let mut tiers = Vec::new();
    for tier in &config.tiers {
        for (number, path) in tier.paths.iter().enumerate() {
            let found = room(&machine, path)?;
            // A cap applies to the whole tier: its devices share it equally.
            let cap = tier.cap_bytes.map_or(found.cap, |cap| (cap / tier.paths.len() as u64).min(found.cap));
            let name = if number == 0 { tier.name.clone() } else { format!("{}+{number}", tier.name) };
            tiers.push(places::measure(&name, path, found.in_memory, cap, cores, &mut notes)?);
        }
    }
    let found = room(&machine, &store)?;
    let measured = places::measure("store", &store, found.in_memory, found.cap, cores, &mut notes)?;
    let agent = doors::measure(&config, &store, &measured, cores, &mut notes)?;
    let load_after = load_average();
    if load_before > 0.5 * cores as f64 {
        notes.push(format!(
            "other processes were running (load {load_before:.1} on {cores} cores): measure again on an idle machine"
        ));
    }
    let calibration = Calibration {
        schema: SCHEMA,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        taken_at_s: std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |since| since.as_secs()),
        host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        load_before,
        load_after,
        cores: cores as f64,
        memory_bytes: memory_bytes(&machine),
        store: measured,
        tiers,
        agent,
        notes,
    };
    let text = serde_json::to_string_pretty(&calibration)
        .map_err(|error| Error::new("the calibration can't be written as JSON").why(error))?;
    if let Some(out) = &out {
        write(out, &text)?;
    }
    if args.json {
        words::print(&format!("{text}\n"))?;
    } else {
        words::print(&shown(&calibration, out.as_deref()))?;
    }
    Ok(exit::OK)
}

fn unwritable(out: &Path, why: io::Error) -> Error {
    Error::new(format!("--out: the calibration can't be written to {}", out.display()))
        .why(why)
        .remedy("give another file with --out")
        .data("no file of yours was changed")
}

/// Could the file be written? It stays unchanged.
fn writable(out: &Path) -> Result<()> {
    let failed = |why| unwritable(out, why);
    match fs::OpenOptions::new().append(true).open(out) {
        Err(why) if why.kind() == io::ErrorKind::NotFound => {
            let parent = out.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
            fs::create_dir_all(parent).map_err(failed)?;
            let access = rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK;
            rustix::fs::access(parent, access).map_err(|why| failed(why.into()))
        }
        opened => opened.map(drop).map_err(failed),
    }
}

fn write(out: &Path, text: &str) -> Result<()> {
    let failed = |why| unwritable(out, why);
    fs::write(out, format!("{text}\n")).map_err(failed)
}

struct Room {
    in_memory: bool,
    cap: u64,
}

fn room(machine: &Machine, path: &Path) -> Result<Room> {
    let look = || -> std::io::Result<Room> {
        Ok(Room { in_memory: machine.file_system(path)?.is_memory(), cap: cap_bytes(machine, path)? })
    };
    look().map_err(|error| Error::new(format!("{} can't be looked at", path.display())).why(error))
}

fn memory_bytes(machine: &Machine) -> u64 {
    let available = machine.memory().map_or(1 << 30, |memory| memory.available_bytes);
    machine.memory_limit().map_or(available, |limit| available.min(limit.room_bytes))
}

fn load_average() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().next().and_then(|first| first.parse().ok()).unwrap_or(0.0)
}

/// The result as text for people.
fn shown(calibration: &Calibration, out: Option<&Path>) -> String {
    let rate = |bps: f64| format!("{}/s", show_bytes(bps as u64));
    let micros = |seconds: f64| format!("{:.0} µs", seconds * 1e6);
    let mut lines = vec![format!(
        "{:10} {:>13} {:>13} {:>13} {:>13} {:>9} {:>9} {:>9}",
        "", "read", "write", "read, all", "write, all", "create", "open", "fsync"
    )];
    for place in calibration.tiers.iter().chain([&calibration.store]) {
        lines.push(format!(
            "{:10} {:>13} {:>13} {:>13} {:>13} {:>9} {:>9} {:>9}",
            place.name,
            rate(place.read.one_bps),
            rate(place.write.one_bps),
            rate(place.read.all_bps),
            rate(place.write.all_bps),
            micros(place.operations.create_s),
            micros(place.operations.open_s),
            micros(place.operations.fsync_s),
        ));
    }
    let agent = &calibration.agent;
    for (name, door) in [("shim", agent.shim), ("mount", agent.mount)] {
        if let Some(door) = door {
            lines.push(format!(
                "{name:10} create {}, open {}, open of a file that only the store has {}, {:.0} creations a second at most",
                micros(door.create_s),
                micros(door.open_s),
                micros(door.open_store_s),
                door.per_second
            ));
        }
    }
    lines.push(format!(
        "drain      {}, {:.2} s of a core a GiB; a small file {} ({} of a core)",
        rate(agent.drain_bps),
        agent.drain_cpu_s_per_byte * (1u64 << 30) as f64,
        micros(agent.drain_file_s),
        micros(agent.drain_file_cpu_s)
    ));
    lines.push(format!(
        "store      writers may be {} ahead; the agent takes {:.0} ms to start and end",
        show_bytes(calibration.store.dirty_bytes),
        agent.start_s * 1e3
    ));
    lines.extend(calibration.notes.iter().map(|note| format!("note: {note}")));
    lines.extend(out.map(|out| format!("written to {}", out.display())));
    lines.join("\n") + "\n"
}
