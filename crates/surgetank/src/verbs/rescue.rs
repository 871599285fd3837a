//! `surgetank fsck` and `surgetank scavenge`: show what remains after a failure, and bring it where it belongs.
//!
//! The danger that both avoid: deciding for the user. `fsck` changes nothing without `--repair`, and never removes the
//! only copy of a file. `scavenge` writes to the store as a run would, or into a fresh directory.

use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{Mode, OFlags, Timespec, Timestamps};
use surgetank_core::namespace::{self, unproven_name};
use surgetank_core::report::{Audit, Finding, Listing, Lost, Proven, Scope, TierCopy, Undrained, Visibility, What};
use surgetank_policy::config::Config;
use surgetank_types::error::{Error, Result};
use surgetank_types::ladder;

use super::directory::clear_dead_mount;
use super::outcome::{Failure, Outcome};
use super::program::Program;
use super::progress::Display;
use super::settings::Settings;
use super::{exit, left, words};
use crate::agent::client;
use crate::agent::commands::Commands;
use crate::agent::engine::{Engine, Opening};
use crate::agent::place::{Held, Place, StateRoot};
use crate::agent::wire::{Answer, Request};

#[derive(Debug, clap::Args)]
pub struct FsckArgs {
    /// The served directory [default: the current one]
    #[arg(value_name = "DIR", conflicts_with = "over")]
    directory: Option<PathBuf>,
    /// Read every byte whose checksum is known, and compare it
    #[arg(long)]
    scrub: bool,
    /// Repair: continue an agent's work, drain its files, replace rotten copies by good ones
    #[arg(long)]
    repair: bool,
    /// As JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    settings: Settings,
}

#[derive(Debug, clap::Args)]
pub struct ScavengeArgs {
    /// The served directory [default: the current one]
    #[arg(value_name = "DIR", conflicts_with = "over")]
    directory: Option<PathBuf>,
    /// Only list files that are not in the store, and where they are
    #[arg(long, conflicts_with = "to")]
    list: bool,
    /// Copy the files into this new directory instead of the store; the originals stay unchanged
    #[arg(long, value_name = "OUT")]
    to: Option<PathBuf>,
    /// Acknowledge lost files: name them one last time, and stop reporting them. Gives up files on a tier that is not there, too
    #[arg(long, conflicts_with_all = ["list", "to", "json"])]
    forget: bool,
    /// As JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    settings: Settings,
}

const TIMEOUT: Duration = Duration::from_secs(5);

/// The place of a directory that no agent serves, held against agents.
struct Left {
    config: Config,
    place: Place,
    _held: Held,
}

impl Left {
    fn is_for_its_store(&self) -> Outcome<()> {
        self.place.refused_store(&self.config)?.map_or(Ok(()), |refusal| Err(Failure::usage(refusal)))
    }

    fn opening(&self) -> Result<Opening> {
        let config = self.config.clone();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = |path: &Path, role: &str| -> Result<OwnedFd> {
            rustix::fs::open(path, flags, Mode::empty())
                .map_err(|errno| Error::new(format!("{role} {} cannot be opened", path.display())).why(errno))
        };
        Ok(Opening {
            store: config.store_url().is_none().then(|| open(&config.store, "the store")).transpose()?,
            bare: (config.store != config.over).then(|| open(&config.over, "the directory")).transpose()?,
            survival: None,
            state: self.place.path().to_path_buf(),
            key: self.place.key()?,
            visibility: Visibility::Private,
            by_calls: true,
            on_lost: Box::new(|| ()),
            config,
        })
    }
}

/// `None`: no agent ever left anything there.
fn left_of(config: Config) -> Outcome<Option<Left>> {
    let cannot = |why: io::Error| Error::new(format!("{} cannot be looked at", config.over.display())).why(why);
    let Some(root) = StateRoot::open_existing(&config.state)? else { return Ok(None) };
    let meta = config.over.metadata().map_err(cannot)?;
    let Some(place) = root.existing_place(&meta, &config.over)? else { return Ok(None) };
    // An agent that was killed a moment ago may still be ending.
    let begun = std::time::Instant::now();
    let held = loop {
        match place.try_hold()? {
            None if begun.elapsed() < TIMEOUT => std::thread::sleep(Duration::from_millis(20)),
            outcome => break outcome,
        }
    };
    let Some(held) = held else {
        if !place.is_answered() {
            return Err(left::held(&place, &config.over).into());
        }
        return Err(Error::new(format!("{} is being served", config.over.display()))
            .remedy(format!("wait until its agent is gone:\n  {}", Commands::of(&config).wait()))
            .into());
    };
    place.await_catalog();
    // A created file keeps the mode of its creation.
    rustix::process::umask(Mode::empty());
    Ok(Some(Left { config, place, _held: held }))
}

fn configure(program: &Program<'_>, directory: Option<&PathBuf>, settings: &Settings) -> Outcome<Config> {
    let mut settings = settings.clone();
    settings.over = directory.cloned().or(settings.over);
    clear_dead_mount(program, &settings)?;
    (program.configure)(&settings).map_err(Failure::usage)
}

pub fn fsck(program: &Program<'_>, args: &FsckArgs) -> Outcome {
    let config = configure(program, args.directory.as_ref(), &args.settings)?;
    if let Some(mut agent) = client::serving(&config.state, &config.over)? {
        agent.check_store(&config).map_err(Failure::usage)?;
        let audit = match agent.ask(&Request::Scrub { repair: args.repair })? {
            Answer::Audit(audit) => *audit,
            other => return Err(agent.confused(&other).into()),
        };
        return print_result(&audit, args.json, &config);
    }
    let Some(left) = left_of(config.clone())? else {
        let audit = Audit { findings: without_record(&without_state(&tiers_of(&config))?), ..Audit::default() };
        return print_result(&audit, args.json, &config);
    };
    left.is_for_its_store()?;
    let before = program.backend.audit(left.opening()?, args.scrub)?;
    if !args.repair {
        return print_result(&before, args.json, &config);
    }
    for finding in &before.findings {
        if let Some(copy) = &finding.copy {
            keep_copy(copy, &finding.path.0)?;
        }
    }
    left.place.take_up(&left.config)?;
    let engine = program.backend.offline(left.opening()?)?;
    let mut after = if args.scrub { engine.scrub(true) } else { Audit::default() };
    let durable = drain(&left, engine, false)?;
    let again = program.backend.audit(left.opening()?, false)?;
    // A finding that is gone after the repair is fixed. Findings that need reading were judged during the repair.
    after.files = before.files;
    let by_reading = after.findings.len();
    for mut finding in before.findings {
        let known = |other: &surgetank_core::report::Finding| other.path == finding.path && other.what == finding.what;
        if !after.findings[..by_reading].iter().any(known) {
            finding.repaired =
                !again.findings.iter().any(known) && !finding.what.is_lost() && finding.what != What::NotInStore;
            after.findings.push(finding);
        }
    }
    after.undrained = again.undrained;
    let code = print_result(&after, args.json, &config)?;
    Ok(if durable { code } else { exit::NOT_DURABLE })
}

/// Another client has removed the file from the store, so it stays removed; a tier's copy would disappear with it. That
/// copy may be the only one: a separate copy joins the files without a record.
fn keep_copy(copy: &TierCopy, path: &[u8]) -> Result<()> {
    let copied = namespace::keep_copy(&copy.files, &copy.path, path);
    copied.map_err(|why| {
        Error::new(format!("{} cannot be kept", copy.files.join(OsStr::from_bytes(&copy.path)).display()))
            .why(why)
            .remedy("make room on the tier, or copy the file to where it belongs, and start again")
            .data("nothing was changed")
    })
}

fn print_forgotten(forgotten: &Listing<Lost>) {
    for one in &forgotten.first {
        eprintln!("surgetank: forgotten: {}: {}", one.path, one.why);
    }
    let more =
        if forgotten.more() > 0 { format!(", {} of them not listed here", forgotten.more()) } else { String::new() };
    eprintln!("surgetank: {} lost files are acknowledged{more}", words::count(forgotten.total));
}

/// Drains everything that the store accepts; returns whether that was all. `forget`: acknowledges losses.
fn drain(left: &Left, engine: Arc<dyn Engine>, forget: bool) -> Result<bool> {
    const LOOK_EVERY: Duration = Duration::from_millis(200);
    let everything = Scope::everything();
    if forget {
        engine.give_up_absent();
    }
    engine.begin_final_drain(&everything);
    let mut display = Display::new("draining", false);
    loop {
        let progress = engine.await_settled(&everything, LOOK_EVERY);
        if progress.settled {
            break;
        }
        display.show(&progress);
    }
    display.finish();
    if forget {
        print_forgotten(&engine.forget_losses());
    }
    let verdict = engine.verdict(&everything);
    engine.shutdown();
    // Dropping it releases the catalog's lock.
    drop(engine);
    let durable = verdict.is_durable();
    words::print_verdict(&verdict, &Commands::at(&left.place, &left.config.over));
    left.place
        .put_undrained((!durable).then_some(&verdict))
        .map_err(|why| Error::new("the note for the next start could not be written").why(why))?;
    left.place.clear();
    Ok(durable)
}

fn print_result(audit: &Audit, json: bool, config: &Config) -> Outcome {
    let bad = audit.findings.iter().filter(|finding| !finding.repaired && finding.what.is_trouble()).count();
    let code = if bad == 0 { exit::OK } else { exit::NOT_DURABLE };
    if json {
        print_json(audit)?;
        return Ok(code);
    }
    let mut text = String::new();
    for finding in &audit.findings {
        let repaired = if finding.repaired { " (repaired)" } else { "" };
        let path = if finding.path.0.is_empty() { String::new() } else { format!("{}: ", finding.path) };
        text += &format!("{:<16} {path}{} [{}]{repaired}\n", finding.what.to_string(), finding.text, finding.at);
    }
    let scrubbed = match audit.scrubbed_bytes {
        0 => String::new(),
        read => format!(", {} read and compared", words::bytes(read)),
    };
    text += &format!(
        "{}: {} files checked{scrubbed}; {} findings, {bad} need action; {} not in the store yet\n",
        config.over.display(),
        words::count(audit.files),
        audit.findings.len(),
        words::count(audit.undrained.len() as u64),
    );
    words::print(&text)?;
    if audit.lost().next().is_some() {
        words::print_lines(&words::acknowledge(&Commands::of(config)));
    }
    Ok(code)
}

fn print_json(value: &impl serde::Serialize) -> Result<()> {
    words::print(&(serde_json::to_string_pretty(value).map_err(|why| Error::new("JSON").why(why))? + "\n"))?;
    Ok(())
}

pub fn scavenge(program: &Program<'_>, args: &ScavengeArgs) -> Outcome {
    let config = configure(program, args.directory.as_ref(), &args.settings)?;
    if let Some(mut agent) = client::serving(&config.state, &config.over)? {
        if args.forget {
            return match agent.ask(&Request::ForgetLosses)? {
                Answer::Forgotten(forgotten) => {
                    print_forgotten(&forgotten);
                    Ok(exit::OK)
                }
                other => Err(agent.confused(&other).into()),
            };
        }
        return Err(Error::new(format!("{} is being served: it has no leftovers", config.over.display()))
            .remedy(format!("wait until all of it is in the store:\n  {}", Commands::of(&config).wait()))
            .into());
    }
    let (over, named) = (config.over.clone(), config.clone());
    let tiers = tiers_of(&config);
    let Some(left) = left_of(config)? else {
        let ownerless = without_state(&tiers)?;
        if !ownerless.is_empty() {
            eprintln!("surgetank: no state of {} exists; its tiers have these plain files:", over.display());
        }
        list_or_copy(&ownerless, args, &over)?;
        if ownerless.is_empty() || args.to.is_some() {
            return Ok(exit::OK);
        }
        eprintln!(
            "surgetank: no catalog entry identifies these files. Copy them to a new directory and inspect them:\n  {}",
            Commands::of(&named).copy_out()
        );
        return Ok(exit::NOT_DURABLE);
    };
    if args.list || args.to.is_some() {
        let audit = program.backend.audit(left.opening()?, false)?;
        list_or_copy(&audit.undrained, args, &over)?;
        // The list does not contain all findings.
        let missing =
            |finding: &&Finding| matches!(finding.what, What::Damaged | What::Lost | What::Orphan | What::Unread);
        let commands = Commands::at(&left.place, &over);
        let mut is_all = true;
        for finding in audit.findings.iter().filter(missing) {
            is_all = false;
            let path = if finding.path.0.is_empty() { String::new() } else { format!("{}: ", finding.path) };
            eprintln!("surgetank: {}: {path}{} [{}]", finding.what, finding.text, finding.at);
        }
        if audit.findings.iter().any(|finding| finding.what == What::Damaged) {
            eprintln!("surgetank: the files are named by:\n  {}", commands.fsck());
        }
        if audit.lost().next().is_some() {
            words::print_lines(&words::acknowledge(&commands));
        }
        return Ok(if is_all { exit::OK } else { exit::NOT_DURABLE });
    }
    left.is_for_its_store()?;
    left.place.take_up(&left.config)?;
    let engine = program.backend.offline(left.opening()?)?;
    Ok(if drain(&left, engine, args.forget)? { exit::OK } else { exit::NOT_DURABLE })
}

fn tiers_of(config: &Config) -> Vec<PathBuf> {
    config.tiers.iter().flat_map(|tier| tier.paths.iter().cloned()).collect()
}

/// Plain files on the tiers of a directory without a state.
fn without_record(files: &[Undrained]) -> Vec<Finding> {
    let finding = |one: &Undrained| Finding {
        what: What::Orphan,
        path: one.path.clone(),
        at: one.at.clone(),
        text: "no state of the directory is known: if it is missed, copy it to where it belongs".into(),
        repaired: false,
        copy: None,
    };
    files.iter().map(finding).collect()
}

fn list_or_copy(undrained: &[Undrained], args: &ScavengeArgs, over: &Path) -> Result<()> {
    if let Some(out) = &args.to {
        copy_to(undrained, out)?;
    }
    if args.json {
        return print_json(&undrained);
    }
    let line = |one: &Undrained| {
        let doubt = match one.proven {
            Proven::InPart => "  (the machine went down during a write: synced data is there)",
            Proven::Nothing => "  (the machine went down before it was synced: perhaps not complete)",
            Proven::Cut => "  (not as long as it was when it was closed)",
            Proven::Whole | Proven::Unknown if one.open => "  (was open: perhaps not complete)",
            Proven::Whole | Proven::Unknown => "",
        };
        format!("{:>12}  {}  {}{doubt}\n", one.size_bytes, one.path, one.at)
    };
    let total: u64 = undrained.iter().map(|one| one.size_bytes).sum();
    let end = match &args.to {
        Some(out) => format!("copied to {}", out.display()),
        None => format!("not in the store {}", over.display()),
    };
    let sum = format!("{} files, {}: {end}\n", words::count(undrained.len() as u64), words::bytes(total));
    words::print(&(undrained.iter().map(line).collect::<String>() + &sum))
}

/// Plain files below this user's scopes that nothing else knows: their state directory is lost.
fn without_state(tiers: &[PathBuf]) -> Result<Vec<Undrained>> {
    let mut found = Vec::new();
    for tier in tiers {
        for files in surgetank_tier::files_of_all(tier) {
            let mut dirs = vec![files.clone()];
            while let Some(dir) = dirs.pop() {
                let listed = match fs::read_dir(&dir) {
                    Ok(listed) => listed,
                    Err(why) if dir == files && why.kind() == io::ErrorKind::NotFound => continue,
                    Err(why) => return Err(Error::new(format!("{} cannot be read", dir.display())).why(why)),
                };
                for entry in listed.flatten() {
                    let Ok(meta) = entry.metadata() else { continue };
                    if meta.is_dir() {
                        dirs.push(entry.path());
                    } else if meta.is_file() && meta.len() > 0 {
                        let at = entry.path();
                        let path = at.strip_prefix(&files).unwrap_or(&at).to_path_buf();
                        found.push(Undrained {
                            path: path.into(),
                            at: at.into(),
                            size_bytes: meta.len(),
                            open: false,
                            proven: Proven::Unknown,
                            perm: meta.mode() & 0o7777,
                            mtime: surgetank_types::model::Timestamp::from_parts(
                                meta.mtime(),
                                meta.mtime_nsec() as u32,
                            ),
                        });
                    }
                }
            }
        }
    }
    Ok(found)
}

/// Copies into a new or empty directory: it replaces no file there, and no link leads out of it.
fn copy_to(undrained: &[Undrained], out: &Path) -> Result<()> {
    let failed = |path: &Path, why: io::Error| {
        Error::new(format!("--to: {} cannot be written", path.display()))
            .why(why)
            .remedy("name a new directory in a place that is yours to write")
            .data("nothing was changed in the place of the files")
    };
    match DirBuilder::new().mode(0o700).create(out) {
        Ok(()) => {}
        Err(why) if why.kind() == io::ErrorKind::AlreadyExists => {
            if fs::read_dir(out).map_err(|why| failed(out, why))?.next().is_some() {
                return Err(Error::new(format!("--to: {} is not empty", out.display()))
                    .remedy("name a new directory")
                    .data("nothing was changed in the place of the files"));
            }
        }
        Err(why) => return Err(failed(out, why)),
    }
    for one in undrained {
        let path = one.path.as_path();
        if !path.components().all(|part| matches!(part, Component::Normal(_))) {
            return Err(Error::new(format!("{} is not a path below a directory", one.path)));
        }
        // A copy that is not proven whole never gets its own name, under which it could replace a good version.
        let name = path.file_name().unwrap_or_default();
        let name = match one.proven {
            Proven::Nothing | Proven::Cut => OsString::from_vec(unproven_name(name.as_bytes(), 0)),
            Proven::Whole | Proven::InPart | Proven::Unknown => name.to_owned(),
        };
        let mut to = out.join(path).with_file_name(&name);
        let dir = to.parent().unwrap_or(out).to_path_buf();
        DirBuilder::new().mode(0o700).recursive(true).create(&dir).map_err(|why| failed(&dir, why))?;
        // Of the same path on two tiers both copies are kept.
        let mut number = 1;
        let target = loop {
            match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&to) {
                Err(why) if why.kind() == io::ErrorKind::AlreadyExists => {
                    number += 1;
                    let mut name = name.clone();
                    name.push(format!(".{number}"));
                    to = dir.join(name);
                }
                opened => break opened.map_err(|why| failed(&to, why))?,
            }
        };
        let copy = || -> io::Result<()> {
            let source = File::open(one.at.as_path())?;
            let len = source.metadata()?.len();
            ladder::copy_file(&source, &target, len, &|_| Ok(()))?;
            target.set_len(len)?;
            rustix::fs::fchmod(&target, Mode::from_raw_mode(one.perm & 0o7777))?;
            let mtime = Timespec { tv_sec: one.mtime.secs(), tv_nsec: i64::from(one.mtime.subsec_nanos()) };
            rustix::fs::futimens(&target, &Timestamps { last_access: mtime, last_modification: mtime })?;
            target.sync_all()
        };
        copy().map_err(|why| {
            Error::new(format!("{} could not be copied to {}", one.at, to.display()))
                .why(why)
                .data("the file was not moved")
        })?;
    }
    File::open(out).and_then(|dir| dir.sync_all()).map_err(|why| failed(out, why))
}
