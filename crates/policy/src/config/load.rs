//! From all sources to one [`Config`]: precedence, resolution, refusals.
//!
//! Defaults < site file < Sea's files < project file < environment < command line. Rules of all sources accumulate, and among
//! rules the site wins (see [`crate::rule`]).
//!
//! The danger that it avoids: a start with conflicting directories. A configuration that would hide files, or mount a directory
//! over its own source, is refused before anything is changed.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::again::{self, Sources};
use super::deadline::Deadline;
use super::key::{self, Draft, Origin, Sourced};
use super::machine::Machine;
use super::places::{directory, first_file, refuse_bytes, unreadable, utf8};
use super::sea::{self, Sea};
use super::tiers::{self, Candidates};
use super::{Authority, Config, Overrides, RuleConfig, Surroundings, TierConfig, file};
use crate::rule::RuleSet;
use crate::words::nearest;
use surgetank_store::Verify;
use surgetank_types::error::{Error, Result};
use surgetank_types::shell;

const UTF8_ADVICE: &str = "save the file as UTF-8; in patterns '?' or '*' stand for bytes of another encoding";
const PROJECT_FILE: &str = "surgetank.toml";
const PREFIX: &str = "SURGETANK_";
/// Slurm's variable for the end of the job, in seconds since 1970.
const SLURM_END: &str = "SLURM_JOB_END_TIME";
const SLURM_JOB: &str = "SLURM_JOB_ID";
/// Variables with the prefix `SURGETANK_` that are not keys, without the prefix.
pub const OTHER_VARIABLES: [&str; 6] = ["CONFIG", "TMP", "LOG", "REPORT", "SHIM", "POOL"];
/// Most tiers, and most devices of one tier: their numbers have one byte.
const DEVICES_MAX: usize = 255;

/// A configuration, and notes for the user about its origin.
#[derive(Debug, Clone, PartialEq)]
pub struct Loaded {
    /// The resolved configuration.
    pub config: Config,
    /// One sentence each: tiers that were passed over, Sea's files that were found, variables that seem misspelt.
    pub notes: Vec<String>,
    /// The configuration files that were read.
    pub files: Vec<PathBuf>,
}

pub fn load(overrides: &Overrides, around: &Surroundings) -> Result<Loaded> {
    let mut draft = Draft::default();
    let mut notes = Vec::new();
    let mut files = Vec::new();

    if read_site(around, &mut draft)? {
        files.push(around.site_file.clone());
    }
    let given = given_file(overrides, around);
    let given_ini = given.as_ref().filter(|path| is_ini(path));
    let home = home(overrides, around);
    let mut project = Draft::default();
    let toml = read_project(given.as_deref(), &home, &mut project)?;
    let home = project.over.as_ref().map_or(home, |over| over.value.clone());
    let sea = read_sea(given_ini, &home, around, &mut files)?;
    files.extend(toml);
    if let Some(sea) = &sea {
        draft.over.clone_from(&sea.over);
        if !sea.tiers.is_empty() {
            draft.tiers = Some(sea.tiers.clone());
        }
        draft.rules.extend(sea.rules.iter().cloned());
        notes.extend(sea.notes.iter().cloned());
    }
    key::overlay(&mut draft, project);
    environment(around, &mut draft, &mut notes)?;
    overrides.apply(&around.cwd, &mut draft)?;
    // A list that only SEA_HOME leads to is named too.
    let by_variable = files.iter().find(|path| is_ini(path) && path.parent() != Some(&home)).cloned();
    resolve(draft, sea, around, notes, files, given.or(by_variable).as_deref())
}

/// Only the state root, for commands that only ask. Whether the directory could be served does not matter to them.
pub fn state_root(overrides: &Overrides, around: &Surroundings) -> Result<PathBuf> {
    let mut draft = Draft::default();
    let given = match &overrides.state {
        Some(path) => Some(("--state", path.clone())),
        None => around.path("SURGETANK_STATE").map(|path| ("SURGETANK_STATE", path)),
    };
    match given {
        Some((label, path)) => {
            let origin =
                Origin { label: label.to_owned(), base: around.cwd.clone(), authority: Authority::CommandLine };
            draft.state = Some(key::path(&path, &origin)?);
        }
        None => {
            read_site(around, &mut draft)?;
            let home = home(overrides, around);
            // A dead mount hides any configuration file.
            let hidden = fs::metadata(&home)
                .is_err_and(|error| error.raw_os_error() == Some(rustix::io::Errno::NOTCONN.raw_os_error()));
            if !hidden {
                let mut project = Draft::default();
                read_project(given_file(overrides, around).as_deref(), &home, &mut project)?;
                key::overlay(&mut draft, project);
            }
        }
    }
    Ok(said_state(&draft, around).0)
}

fn read_site(around: &Surroundings, draft: &mut Draft) -> Result<bool> {
    let path = &around.site_file;
    let Some(text) = optional(path)? else {
        return Ok(false);
    };
    file::read(&text, path, &path.display().to_string(), Authority::Site, draft)?;
    forbid_over(draft)?;
    Ok(true)
}

/// The configuration file that the user named: a `surgetank.toml` or a `sea.ini`.
fn given_file(overrides: &Overrides, around: &Surroundings) -> Option<PathBuf> {
    let given = overrides.config.clone().or_else(|| around.path("SURGETANK_CONFIG"));
    given.map(|path| around.cwd.join(path))
}

fn is_ini(path: &Path) -> bool {
    path.extension().is_some_and(|end| end == "ini")
}

/// The directory in which project files are searched: `over`, as far as it is known without them.
fn home(overrides: &Overrides, around: &Surroundings) -> PathBuf {
    let said_over = overrides.over.clone().or_else(|| around.path("SURGETANK_OVER"));
    around.cwd.join(said_over.unwrap_or_default())
}

fn read_project(given: Option<&Path>, home: &Path, project: &mut Draft) -> Result<Option<PathBuf>> {
    if let Some(path) = given.filter(|path| !is_ini(path)) {
        let text = optional(path)?.ok_or_else(|| missing_config(path))?;
        file::read(&text, path, &path.display().to_string(), Authority::Project, project)?;
        return Ok(Some(path.to_path_buf()));
    }
    let path = home.join(PROJECT_FILE);
    let Some(text) = optional(&path)? else {
        return Ok(None);
    };
    file::read(&text, &path, PROJECT_FILE, Authority::Project, project)?;
    forbid_over(project)?;
    Ok(Some(path))
}

fn missing_config(path: &Path) -> Error {
    Error::new(format!("the configuration file {} does not exist", path.display()))
        .remedy("correct --config (or SURGETANK_CONFIG), or leave it out")
}

/// Refuses `over` in files that are found in `over`, and in the site's file.
fn forbid_over(draft: &Draft) -> Result<()> {
    match &draft.over {
        None => Ok(()),
        Some(over) => Err(Error::new(format!("{}: 'over' can't be set here", over.origin.label))
            .why("this file is found by the directory that is served, it can't choose it")
            .remedy("give --over, or name the file with --config")),
    }
}

fn optional(path: &Path) -> Result<Option<String>> {
    match fs::read(path) {
        Ok(bytes) => utf8(path, bytes, UTF8_ADVICE).map(Some),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::NOTCONN.raw_os_error()) => {
            let dir = path.parent().unwrap_or(path);
            Err(Error::new(format!("{} is a dead mount, its server is gone", dir.display()))
                .why(error)
                .remedy(format!("if an agent of yours was killed there: surgetank umount {}", shell::word(dir))))
        }
        Err(error) => Err(unreadable(path, &error)),
    }
}

/// Reads Sea's files beside the ini that was named, in `over`, or in `$SEA_HOME`: the first that has any of them.
fn read_sea(
    ini: Option<&PathBuf>,
    home: &Path,
    around: &Surroundings,
    files: &mut Vec<PathBuf>,
) -> Result<Option<Sea>> {
    let env = |name: &str| around.var(name);
    let (dir, ini_name) = match ini {
        Some(path) => {
            if !path.is_file() {
                return Err(missing_config(path));
            }
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            (path.parent().unwrap_or(Path::new("/")).to_path_buf(), name)
        }
        None if sea::is_in(home) => (home.to_path_buf(), sea::INI.to_owned()),
        None => match around.var("SEA_HOME").map(|dir| around.cwd.join(dir)).filter(|dir| sea::is_in(dir)) {
            Some(dir) => (dir, sea::INI.to_owned()),
            None => return Ok(None),
        },
    };
    let names = std::iter::once(ini_name.as_str()).chain(sea::FILES.iter().copied().skip(1));
    files.extend(names.map(|name| dir.join(name)).filter(|path| path.is_file()));
    let label = |name: &str| {
        if dir == home { name.to_owned() } else { dir.join(name).display().to_string() }
    };
    sea::read(&dir, &ini_name, label, &env).map(Some)
}

/// `SURGETANK_…`: every key in capitals; lists separated by `;`.
fn environment(around: &Surroundings, draft: &mut Draft, notes: &mut Vec<String>) -> Result<()> {
    for (name, value) in &around.env {
        let Some(name) = name.to_str().filter(|name| name.starts_with(PREFIX)) else {
            continue;
        };
        let key = name[PREFIX.len()..].to_ascii_lowercase();
        let origin = Origin { label: name.to_owned(), base: around.cwd.clone(), authority: Authority::CommandLine };
        let known = key::SCALARS.iter().chain(&key::LISTS).copied();
        if !known.clone().any(|known| known == key) {
            let upper = &name[PREFIX.len()..];
            if !OTHER_VARIABLES.contains(&upper)
                && let Some(near) = nearest(&key, known)
            {
                notes.push(format!(
                    "{name} means nothing to this program; did you mean {PREFIX}{}?",
                    near.to_uppercase()
                ));
            }
            continue;
        }
        if value.is_empty() {
            continue;
        }
        let paths = [("over", &mut draft.over), ("state", &mut draft.state)];
        if let Some((_, slot)) = paths.into_iter().find(|(name, _)| *name == key) {
            *slot = Some(key::path(Path::new(value), &origin)?);
            continue;
        }
        let text = value.to_str().ok_or_else(|| key::refused(&origin, &key, "the value is not UTF-8"))?;
        match key.as_str() {
            "tiers" => {
                let tiers = key::pieces(text).map(|piece| key::tier(piece, &origin)).collect::<Result<Vec<_>>>()?;
                if tiers.is_empty() {
                    return Err(key::no_tiers(&origin));
                }
                draft.tiers = Some(tiers);
            }
            "rules" => {
                for piece in key::pieces(text) {
                    draft.rules.push(key::rule(piece, &origin)?);
                }
            }
            _ => draft.set(&key, text, &origin)?,
        }
    }
    Ok(())
}

fn resolve(
    mut draft: Draft,
    sea: Option<Sea>,
    around: &Surroundings,
    mut notes: Vec<String>,
    files: Vec<PathBuf>,
    named_file: Option<&Path>,
) -> Result<Loaded> {
    let machine = &around.machine;
    let over = resolve_over(&draft, around)?;
    if draft.store.is_none() {
        draft.store = sea.and_then(|sea| store_of_sea(sea, &over, &mut notes));
    }
    let store = resolve_store(&draft, &over, machine)?;
    let state = resolve_state(&draft, around, &over, &store)?;
    let (metrics, metrics_token_file) = super::metrics::settled(&draft)?;
    let said_tiers = again::said_tiers(&draft);
    let tiers = resolve_tiers(draft.tiers, around, &over, &store, &mut notes)?;
    refuse_unknown_tiers(&draft.rules, &tiers)?;
    RuleSet::new(&draft.rules)?;
    let unsaid = draft.deadline.is_none();
    let deadline = resolve_deadline(draft.deadline, around, &mut notes);
    let job = around.var(SLURM_JOB).filter(|_| unsaid && deadline.is_none());
    if let Some(job) = &job {
        notes.push(format!("Slurm does not report the end of job {job}: `run` and `mount` ask squeue"));
    }
    let mut config = Config {
        pool: None,
        over,
        store,
        tiers,
        rules: draft.rules,
        state,
        ordered: draft.ordered.unwrap_or(true),
        pool_ordered: draft.pool_ordered.unwrap_or(false),
        replicas: draft.replicas.unwrap_or(1),
        replicas_at: draft.replicas_at.unwrap_or_default(),
        verify: draft.verify.unwrap_or(Verify::Cache),
        fsync: draft.fsync,
        copy_up_bytes_max: draft.copy_up_bytes_max.unwrap_or(64 << 20),
        dirty_bytes_max: draft.dirty_bytes_max.unwrap_or_else(|| tiers::dirty_bytes_max(machine)),
        drain_threads: draft.drain_threads.unwrap_or(4),
        drain_bytes_per_second_max: draft.drain_bytes_per_second_max.unwrap_or(0),
        store_ttl: draft.store_ttl.unwrap_or(Duration::from_secs(1)),
        quiet: draft.quiet.unwrap_or(Duration::from_millis(50)),
        sync_after: draft.sync_after.unwrap_or(Duration::from_secs(30)),
        retry: draft.retry.unwrap_or(Duration::from_secs(30)),
        wait_for_room: draft.wait_for_room.unwrap_or(Duration::from_secs(60)),
        grace: draft.grace.unwrap_or(Duration::from_secs(5)),
        deadline,
        job,
        keep_at_exit: draft.keep_at_exit.unwrap_or_default(),
        direct: draft.direct.unwrap_or(true),
        door: draft.door.unwrap_or_default(),
        preload: draft.preload.unwrap_or(true),
        preload_skip: draft.preload_skip.unwrap_or_default(),
        group_socket: draft.group_socket.map(|given| given.value),
        metrics,
        metrics_token_file,
        again: Vec::new(),
    };
    let sources = Sources { file: named_file, says_store: draft.store.is_some(), tiers: said_tiers.as_deref() };
    config.again = again::options(&config, &sources, around);
    Ok(Loaded { config, notes, files })
}

/// The configured end of the job, else Slurm's. A variable that is nonsense, or left from another job, does not fail the start.
fn resolve_deadline(
    given: Option<Sourced<Option<i64>>>,
    around: &Surroundings,
    notes: &mut Vec<String>,
) -> Option<Deadline> {
    let now = surgetank_types::clock::now().secs();
    let found = match given {
        Some(given) => given.value.map(|seconds| Deadline::new(seconds, &given.origin.label, now)),
        None => around.var(SLURM_END).and_then(|text| match text.parse() {
            Ok(seconds) if seconds > now => Some(Deadline::new(seconds, SLURM_END, now)),
            Ok(_) => {
                notes.push(format!("{SLURM_END}={text} has passed: no deadline is known"));
                None
            }
            Err(_) => {
                notes.push(format!("{SLURM_END}={text} is not a number of seconds: no deadline is known"));
                None
            }
        }),
    };
    if let Some(deadline) = &found {
        notes.push(format!("the job ends at {}, says {}", deadline.shown(), deadline.from));
    }
    found
}

fn resolve_over(draft: &Draft, around: &Surroundings) -> Result<PathBuf> {
    let here = Sourced {
        value: around.cwd.clone(),
        origin: Origin {
            label: "the current directory".to_owned(),
            base: around.cwd.clone(),
            authority: Authority::Default,
        },
    };
    let given = draft.over.as_ref().unwrap_or(&here);
    let over = directory(given, "the directory to serve", "give a directory that exists with --over")?;
    if over == Path::new("/") {
        return Err(Error::new(format!("{}: the root directory can't be served", given.origin.label))
            .why("the programs, the tiers and the agent's state are under it")
            .remedy("change to the project's directory, or give it with --over"));
    }
    if ["/proc", "/sys", "/dev"]
        .iter()
        .any(|system| over == Path::new(system) || over.starts_with(system) && !over.starts_with("/dev/shm"))
    {
        return Err(Error::new(format!("{}: {} can't be served", given.origin.label, over.display()))
            .why("the system and the agent need it unchanged")
            .remedy("change to the project's directory, or give it with --over"));
    }
    Ok(over)
}

/// The last level of Sea's files, if they are about the directory `over`: it is that level itself, or their `mount_dir`.
fn store_of_sea(sea: Sea, over: &Path, notes: &mut Vec<String>) -> Option<Sourced<PathBuf>> {
    let base = sea.store?;
    let same = |given: &Sourced<PathBuf>| given.value.canonicalize().is_ok_and(|path| path == over);
    if same(&base) || sea.over.as_ref().is_some_and(same) {
        return Some(base);
    }
    notes.push(format!(
        "{}: {} is not taken as the store, because {} is neither it nor mount_dir",
        base.origin.label,
        base.value.display(),
        over.display()
    ));
    None
}

fn resolve_store(draft: &Draft, over: &Path, machine: &Machine) -> Result<PathBuf> {
    let store = match &draft.store {
        None => over.to_path_buf(),
        Some(given) if super::url_of(&given.value).is_some() => given.value.clone(),
        Some(given) => directory(given, "the store", "give another directory with --store")?,
    };
    if store != over {
        refuse_apart(over, &store, machine)?;
    }
    Ok(store)
}

/// Refuses a separate store whose files the mount would hide, or one that contains, or is inside, the directory.
fn refuse_apart(over: &Path, store: &Path, machine: &Machine) -> Result<()> {
    for (inner, outer, what) in [
        (over, store, "the directory to serve is inside the store"),
        (store, over, "the store is inside the directory to serve"),
    ] {
        if inner.starts_with(outer) {
            return Err(Error::new(format!("{what}: {} in {}", inner.display(), outer.display()))
                .why("the mount would contain itself")
                .remedy("use directories beside each other, or leave --store out to keep files where they are"));
        }
    }
    // The command joins a run that already serves it: the files seen there are the store's.
    let served = machine.mount_of(over).is_some_and(|mount| {
        mount.at == over && (mount.source.contains("surgetank") || mount.kind.contains("surgetank"))
    });
    if served {
        return Ok(());
    }
    match first_file(over) {
        None => Ok(()),
        Some(file) => {
            Err(Error::new(format!("{} has files of its own, and the store is {}", over.display(), store.display()))
                .why(format!("the mount would hide them, for example {}", file.display()))
                .remedy("serve an empty directory, move the files into the store, or leave --store out")
                .data("nothing was changed"))
        }
    }
}

fn resolve_state(draft: &Draft, around: &Surroundings, over: &Path, store: &Path) -> Result<PathBuf> {
    let (path, label) = said_state(draft, around);
    refuse_bytes(&path, label, "the state directory")?;
    for (what, other) in [("the directory to serve", over), ("the store", store)] {
        if path.starts_with(other) {
            return Err(Error::new(format!(
                "{label}: the state directory {} is inside {what}, {}",
                path.display(),
                other.display()
            ))
            .why("the mount would show, drain and hide the journal and the socket")
            .remedy("put it elsewhere with --state or SURGETANK_STATE, on a local disk that survives a reboot"));
        }
    }
    Ok(path)
}

/// The physical path of the state directory, and the source that names it.
fn said_state<'a>(draft: &'a Draft, around: &Surroundings) -> (PathBuf, &'a str) {
    match &draft.state {
        Some(given) => (physical(&given.value), given.origin.label.as_str()),
        None => (again::usual_state(around), "the default"),
    }
}

/// The physical path of something that need not exist.
pub(super) fn physical(path: &Path) -> PathBuf {
    let mut rest = Vec::new();
    let mut at = path;
    loop {
        if let Ok(found) = at.canonicalize() {
            return rest.iter().rev().fold(found, |path, name| path.join(name));
        }
        match (at.parent(), at.file_name()) {
            (Some(parent), Some(name)) => {
                rest.push(name);
                at = parent;
            }
            _ => return path.to_path_buf(),
        }
    }
}

/// The configured tiers, else those that the machine offers.
fn resolve_tiers(
    given: Option<Vec<Sourced<TierConfig>>>,
    around: &Surroundings,
    over: &Path,
    store: &Path,
    notes: &mut Vec<String>,
) -> Result<Vec<TierConfig>> {
    let machine = &around.machine;
    if let Some(given) = given {
        return given_tiers(machine, given, over, store);
    }
    let (found, passed_over) = tiers::found(machine, &candidates(around), over, store);
    if found.is_empty() {
        return Err(Error::new(format!("no place was found that is faster than the store {}", store.display()))
            .why(passed_over.join("; "))
            .remedy("name one with --tier NAME=PATH[:SIZE], for example --tier disk=/scratch/me"));
    }
    notes.extend(passed_over);
    Ok(found)
}

/// Refuses rules that name a tier that is not there.
fn refuse_unknown_tiers(rules: &[RuleConfig], tiers: &[TierConfig]) -> Result<()> {
    let known = tiers.iter().map(|tier| tier.name.as_str());
    for rule in rules {
        if let Some(name) = &rule.tier
            && !known.clone().any(|tier| tier == name)
        {
            return Err(key::unknown("tier", name, &rule.origin, known));
        }
    }
    Ok(())
}

fn given_tiers(
    machine: &Machine,
    given: Vec<Sourced<TierConfig>>,
    over: &Path,
    store: &Path,
) -> Result<Vec<TierConfig>> {
    let mut tiers: Vec<TierConfig> = Vec::new();
    if let Some(first) = given.get(DEVICES_MAX) {
        return Err(Error::new(format!("{}: {} tiers are more than {DEVICES_MAX}", first.origin.label, given.len()))
            .remedy("make one tier of several directories: NAME=PATH,PATH"));
    }
    let mut used: Vec<PathBuf> = Vec::new();
    for Sourced { value: mut tier, origin } in given {
        let label = &origin.label;
        let name = tier.name.clone();
        if tiers.iter().any(|known| known.name == name) {
            return Err(Error::new(format!("{label}: there are two tiers of the name '{name}'"))
                .remedy(format!("give one tier several devices instead: {name}=PATH,PATH")));
        }
        if tier.paths.len() > DEVICES_MAX {
            return Err(Error::new(format!("{label}: tier '{name}' has more than {DEVICES_MAX} devices"))
                .remedy("leave some of them out, or make two tiers of them"));
        }
        for path in &mut tier.paths {
            let given = Sourced { value: path.clone(), origin: origin.clone() };
            *path = directory(
                &given,
                &format!("the directory of tier '{name}',"),
                "name a directory of yours for this tier, or leave the tier out",
            )?;
            refuse_tier(path, &name, label, over, store)?;
            if used.contains(path) {
                return Err(
                    Error::new(format!("{label}: {} is used twice", path.display())).remedy("name each directory once")
                );
            }
            used.push(path.clone());
        }
        let completed = tiers::completed(machine, tier).map_err(|error| {
            Error::new(format!("{label}: the file system of tier '{name}' can't be looked at"))
                .why(error)
                .remedy("name another directory for this tier, or leave the tier out")
        })?;
        tiers.push(completed);
    }
    Ok(tiers)
}

fn refuse_tier(path: &Path, name: &str, label: &str, over: &Path, store: &Path) -> Result<()> {
    for (what, other) in [("the directory to serve", over), ("the store", store)] {
        let clash = if path.starts_with(other) {
            format!("is inside {what}, {}", other.display())
        } else if other.starts_with(path) {
            format!("contains {what}, {}", other.display())
        } else {
            continue;
        };
        return Err(Error::new(format!("{label}: the directory {} of tier '{name}' {clash}", path.display()))
            .why("a tier must be apart from what it speeds up")
            .remedy("use a directory of its own, for example one beside it"));
    }
    if let Err(error) = rustix::fs::access(path, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK) {
        return Err(Error::new(format!("{label}: the directory {} of tier '{name}' can't be written", path.display()))
            .why(error)
            .remedy("choose one that is yours, or leave the tier out"));
    }
    Ok(())
}

/// The directories in which tiers are searched when the configuration names none.
fn candidates(around: &Surroundings) -> Candidates {
    let named = ["SURGETANK_TMP", "SLURM_TMPDIR", "TMPDIR"]
        .into_iter()
        .filter_map(|name| Some((format!("${name}"), around.cwd.join(around.var(name)?))));
    let usual = ["/tmp", "/var/tmp"].map(|path| ("a usual place".to_owned(), PathBuf::from(path)));
    Candidates { ram: around.ram.clone(), disks: named.chain(usual).collect() }
}
