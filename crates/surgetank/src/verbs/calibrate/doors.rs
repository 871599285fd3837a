//! The agent's own cost on this machine: an agent over a scratch directory in the store, files through each door, and
//! the drain.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use surgetank_core::planner::machine::{Agent, Door, Place};
use surgetank_policy::config::{Config, TierConfig};
use surgetank_types::clock;
use surgetank_types::error::{Error, Result};

use super::places::{make_cold, median};
use super::probe::{Probe, since};
use super::rounds::Round;
use super::scratch::Scratch;

const FILES: u64 = 300;
const STORE_FILES: u64 = 100;
const SMALL_DIRS: usize = 3;
/// The number of large files in the drain measurement, which takes about `DRAIN_S` in total.
const LARGE_FILES: u64 = 4;
const DRAIN_S: f64 = 2.0;
const LARGE_BYTES_MAX: u64 = 256 << 20;

pub fn measure(
    config: &Config,
    store: &Path,
    measured: &Place,
    cores: usize,
    notes: &mut Vec<String>,
) -> Result<Agent> {
    let failed = |error: io::Error| {
        Error::new("the agent can't be measured")
            .why(error)
            .remedy("`surgetank doctor` says what is missing here for `surgetank run`")
    };
    let scratch = Scratch::new(store)?;
    let state = Scratch::new(&std::env::temp_dir())?;
    let stage = Stage { config, over: scratch.path.join("over"), state: state.path.join("state"), cores };
    eprintln!("surgetank: measuring the agent over {}", stage.over.display());
    let mut own = || -> io::Result<Agent> {
        let start_s = stage.start_s()?;
        let shim = if config.preload { Some(stage.door(true, notes)?) } else { None };
        let mount = Some(stage.door(false, notes)?);
        let drain = stage.drain(measured)?;
        Ok(Agent { start_s, shim, mount, quiet_s: config.quiet.as_secs_f64(), ..drain })
    };
    own().map_err(failed)
}

struct Stage<'a> {
    config: &'a Config,
    over: PathBuf,
    state: PathBuf,
    cores: usize,
}

impl Stage<'_> {
    fn run(&self, options: &[&str]) -> io::Result<Command> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["run", "--quiet", "--over"]).arg(&self.over).arg("--state").arg(&self.state).args(options);
        command.args(self.config.tiers.iter().flat_map(|tier| ["--tier".into(), tier_option(tier)]));
        // The user's environment for runs must not change the measurement.
        for (name, _) in std::env::vars_os() {
            if name.to_str().is_some_and(|name| name.starts_with("SURGETANK_") && name != "SURGETANK_SHIM") {
                command.env_remove(name);
            }
        }
        command.arg("--");
        Ok(command)
    }

    fn play(&self, options: &[&str], rounds: &[Vec<Probe>]) -> io::Result<Vec<Round>> {
        let mut command = self.run(options)?;
        command.arg(std::env::current_exe()?).args(["probe", "--rounds", "--agent"]).arg(&self.state);
        let done = command.arg(serde_json::to_string(rounds)?).stderr(Stdio::piped()).output()?;
        if !done.status.success() {
            return Err(io::Error::other(String::from_utf8_lossy(&done.stderr).trim().to_owned()));
        }
        Ok(serde_json::from_slice(&done.stdout)?)
    }

    fn clear(&self) -> io::Result<()> {
        if self.over.exists() {
            fs::remove_dir_all(&self.over)?;
        }
        fs::create_dir(&self.over)
    }

    /// The time of an empty run, minus the time of its command alone.
    fn start_s(&self) -> io::Result<f64> {
        self.clear()?;
        let time = |mut command: Command| -> io::Result<f64> {
            let begun = clock::tick();
            let done = command.stderr(Stdio::piped()).output()?;
            if !done.status.success() {
                return Err(io::Error::other(String::from_utf8_lossy(&done.stderr).trim().to_owned()));
            }
            Ok(since(begun))
        };
        let mut runs = Vec::new();
        for _ in 0..3 {
            let mut with = self.run(&[])?;
            with.arg("true");
            runs.push(time(with)? - time(Command::new("true"))?);
        }
        Ok(median(&runs).max(0.0))
    }

    fn door(&self, shim: bool, notes: &mut Vec<String>) -> io::Result<Door> {
        self.clear()?;
        let in_store = self.over.join("in");
        fs::create_dir(&in_store)?;
        for number in 0..STORE_FILES {
            let path = in_store.join(format!("f{number}"));
            fs::write(&path, [7u8; 4096])?;
            fs::File::open(&path)?.sync_all()?;
        }
        let dirs: Vec<PathBuf> = (0..=self.cores).map(|number| self.over.join(format!("d{number}"))).collect();
        make_cold(&in_store, notes);
        let create = |dir: &PathBuf| Probe::Create { dir: dir.clone(), files: FILES };
        let rounds = [
            vec![Probe::Open { dir: in_store, files: STORE_FILES }],
            vec![create(&dirs[0])],
            vec![Probe::Open { dir: dirs[0].clone(), files: FILES }],
            dirs[1..].iter().map(create).collect(),
        ];
        let mut options = vec!["--rule", "d*/=keep", "--keep-at-exit", "drop"];
        if !shim {
            options.push("--no-preload");
        }
        let played = self.play(&options, &rounds)?;
        let [store, created, opened, together] = &played[..] else {
            return Err(io::Error::other("rounds are missing"));
        };
        let wall = |round: &Round, files: u64| round.each[0].wall_s / files as f64;
        let cpu = |round: &Round, files: u64| (round.cpu_s() + round.agent_cpu_s) / files as f64;
        let all = (FILES * self.cores as u64) as f64 / together.wall_s;
        Ok(Door {
            create_s: wall(created, FILES),
            create_cpu_s: cpu(created, FILES),
            open_s: wall(opened, FILES),
            open_cpu_s: cpu(opened, FILES),
            open_store_s: wall(store, STORE_FILES),
            open_store_cpu_s: cpu(store, STORE_FILES),
            per_second: all.max(1.0 / wall(created, FILES)),
        })
    }

    /// The time from close to durable: small files, then large ones. Sets only the fields of the drain.
    fn drain(&self, store: &Place) -> io::Result<Agent> {
        self.clear()?;
        // In several directories, as in workflows: within one directory names are created and renamed one after the
        // other.
        let small: Vec<PathBuf> = (0..SMALL_DIRS).map(|number| self.over.join(format!("small{number}"))).collect();
        let large = self.over.join("large");
        small.iter().chain([&large]).try_for_each(fs::create_dir)?;
        let tiers = &self.config.tiers;
        let held = tiers.iter().map(held_bytes).sum::<u64>() / LARGE_FILES;
        let most = if tiers.is_empty() { LARGE_BYTES_MAX } else { LARGE_BYTES_MAX.min(held) };
        let bytes = ((store.write.all_bps * DRAIN_S) as u64 / LARGE_FILES).min(most).max(4 << 20);
        let durable = || vec![Probe::Durable { over: self.over.clone(), state: self.state.clone() }];
        let create = |dir| vec![Probe::Create { dir, files: FILES / SMALL_DIRS as u64 }];
        let mut rounds: Vec<_> = small.into_iter().map(create).chain([durable()]).collect();
        for number in 0..LARGE_FILES {
            rounds.push(vec![Probe::Write { path: large.join(format!("f{number}")), bytes, sync: false }]);
        }
        rounds.push(durable());
        let played = self.play(&[], &rounds)?;
        let (small, large) = played.split_at(SMALL_DIRS + 1);
        let quiet_s = self.config.quiet.as_secs_f64();
        let sum = |rounds: &[Round], what: fn(&Round) -> f64| rounds.iter().map(what).sum::<f64>();
        let files_s = (sum(small, |round| round.wall_s) - quiet_s).max(0.0);
        let written_s = large.first().map_or(0.0, |round| round.wall_s);
        // The drain starts only after the first large file was closed and its quiet period passed.
        let moved_s = (sum(large, |round| round.wall_s) - written_s - quiet_s).max(1e-3);
        let moved = (bytes * LARGE_FILES) as f64;
        Ok(Agent {
            start_s: 0.0,
            shim: None,
            mount: None,
            drain_file_s: files_s / FILES as f64,
            // The agent's cost of creating them is part of the door's figures.
            drain_file_cpu_s: small.last().map_or(0.0, |round| round.agent_cpu_s) / FILES as f64,
            drain_bps: moved / moved_s,
            drain_cpu_s_per_byte: sum(large, |round| round.agent_cpu_s) / moved,
            quiet_s,
        })
    }
}

/// All of them together fit: a direct writer that outruns the agent would get the device's ENOSPC instead of a
/// measurement.
fn held_bytes(tier: &TierConfig) -> u64 {
    let free = tier.paths.iter().filter_map(|path| rustix::fs::statvfs(path).ok()).map(|fs| fs.f_bavail * fs.f_frsize);
    free.sum::<u64>().min(tier.cap_bytes.unwrap_or(u64::MAX))
}

fn tier_option(tier: &TierConfig) -> String {
    let paths: Vec<String> = tier.paths.iter().map(|path| path.display().to_string()).collect();
    let cap = tier.cap_bytes.map_or_else(String::new, |bytes| format!(":{bytes}"));
    format!("{}={}{cap}", tier.name, paths.join(","))
}
