//! `surgetank stage-in` and `stage-out`: copy files and trees from a store to a directory and back, or from store to
//! store.
//!
//! Both do the same; the name says which end is the node's. They serve no directory and need no agent. A source or
//! destination may be in a served directory, and is then read and written like any other.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde::Serialize;
use surgetank_core::drain::Meter;
use surgetank_core::report::{PathText, Progress};
use surgetank_core::transfer::{Claims, Entry, Outcome as Came, Transfer, Walked, Wanted, walk};
use surgetank_store::{Cred, Store, StorePath, Verify, verdict};
use surgetank_types::clock;
use surgetank_types::error::{Errno, Error, Result};

use super::outcome::{Failure, Outcome};
use super::program::{Program, state_root};
use super::progress::Display;
use super::settings::Settings;
use super::{exit, wait, words};
use crate::agent::place::StateRoot;
use crate::agent::signals::Signals;
use crate::service::stores::Address;

#[derive(Debug, clap::Args)]
pub struct StageArgs {
    /// Files, directories (with a slash at the end: what is in them), patterns; paths or URLs of stores
    #[arg(value_name = "SOURCE", required_unless_present = "manifest", conflicts_with = "manifest", requires = "to")]
    sources: Vec<OsString>,
    /// The directory that they are put into, a path or the URL of a store
    #[arg(long, value_name = "DIR", conflicts_with = "manifest")]
    to: Option<OsString>,
    /// A file with a source, a tab and a destination in each line; `-`: standard input
    #[arg(long, value_name = "FILE")]
    manifest: Option<PathBuf>,
    /// Stop after this time; what is not there by then is copied when it is asked for again
    #[arg(long, value_name = "DURATION", value_parser = wait::duration_millis)]
    deadline: Option<u64>,
    /// How copies are checked: cache, or reread from the device or server
    #[arg(long, value_name = "HOW", default_value = "cache", value_parser = verify)]
    verify: Verify,
    /// What came of it, as JSON
    #[arg(long)]
    json: bool,
    #[arg(long, short)]
    quiet: bool,
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
}

fn verify(text: &str) -> Result<Verify, String> {
    match text {
        "cache" => Ok(Verify::Cache),
        "reread" => Ok(Verify::Reread),
        _ => Err("cache or reread".to_owned()),
    }
}

/// One source and its destination.
struct Pair {
    from: Address,
    wanted: Wanted,
    to: Address,
}

/// All pairs between two directories that are opened once.
#[derive(Default)]
struct Between {
    pairs: Vec<(StorePath, StorePath, Wanted)>,
}

#[derive(Default, Serialize)]
struct Report {
    copied_files: u64,
    copied_bytes: u64,
    present_files: u64,
    present_bytes: u64,
    left_files: u64,
    failed: Vec<Failed>,
    seconds: f64,
    exit: u8,
}

#[derive(Serialize)]
struct Failed {
    path: PathText,
    why: String,
}

pub fn stage(program: &Program<'_>, args: &StageArgs) -> Outcome {
    let pairs = pairs(args).map_err(Failure::usage)?;
    let signals = Signals::block(&[libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT])
        .map_err(|error| Error::new("signals cannot be blocked").why(error))?;
    // A created file keeps the mode of its creation.
    rustix::process::umask(rustix::fs::Mode::empty());
    let state = StateRoot::make(&state_root(program, &Settings::of_state(args.state.as_ref()))?)?;
    let began = clock::tick();
    let mut report = Report::default();
    let course = Course::new(began, args);
    let done = AtomicBool::new(false);
    let carried = std::thread::scope(|scope| {
        scope.spawn(|| course.attend(&signals, &done));
        // Runs on every exit path.
        let _over = Over(&done);
        carry_all(pairs, args, &state, &course, &mut report)
    });
    report.seconds = began.elapsed().as_secs_f64();
    report.exit = match &carried {
        Err(failure) => failure.exit,
        Ok(()) if report.failed.is_empty() && report.left_files == 0 => exit::OK,
        Ok(()) => exit::NOT_DURABLE,
    };
    let told = print_result(&report, args, course.why_stopped());
    carried?;
    // (Undurable files matter more than an answer that could not be written.)
    if report.exit == exit::OK {
        told?;
    }
    Ok(report.exit)
}

fn print_result(report: &Report, args: &StageArgs, stopped: Option<&str>) -> Result<()> {
    if args.json {
        // (A report contains numbers and texts: writing it as JSON cannot fail.)
        words::print(&(serde_json::to_string_pretty(report).unwrap_or_default() + "\n"))?;
    }
    for failed in &report.failed {
        eprintln!("surgetank: {}: {}", failed.path, failed.why);
    }
    if report.left_files > 0 {
        let why = stopped.unwrap_or("stopped");
        eprintln!(
            "surgetank: {why}: {} files are not there yet; the same command goes on",
            words::count(report.left_files)
        );
    }
    if !args.quiet && !args.json {
        let rate = report.copied_bytes as f64 / report.seconds.max(1e-3);
        let mut line =
            format!("{} files, {} copied", words::count(report.copied_files), words::bytes(report.copied_bytes));
        line.push_str(&format!(" in {:.1} s ({}/s)", report.seconds, words::bytes(rate as u64)));
        if report.present_files > 0 {
            line.push_str(&format!("; {} were there already", words::count(report.present_files)));
        }
        words::print(&(line + "\n"))?;
    }
    Ok(())
}

fn pairs(args: &StageArgs) -> Result<Vec<Pair>> {
    let Some(manifest) = &args.manifest else {
        let to = args.to.as_deref().unwrap_or(OsStr::new("."));
        return args.sources.iter().map(|source| pair(source, to, true)).collect();
    };
    // (Names may contain any bytes.)
    let mut text = Vec::new();
    let read = match manifest.as_os_str() == "-" {
        true => std::io::stdin().read_to_end(&mut text).map(drop),
        false => fs::read(manifest).map(|read| text = read),
    };
    read.map_err(|why| {
        let what = Error::new(format!("--manifest: {} cannot be read", manifest.display())).why(why);
        what.remedy("name a file with a source, a tab and a destination in each line, or `-` for standard input")
    })?;
    let lines = text.split(|byte| *byte == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line));
    let lines = lines.enumerate().filter(|(_, line)| !line.trim_ascii().is_empty() && !line.starts_with(b"#"));
    lines
        .map(|(number, line)| {
            let columns: Vec<&[u8]> = line.split(|byte| *byte == b'\t').collect();
            let [source, to] = columns[..] else {
                let line = String::from_utf8_lossy(line);
                return Err(Error::new(format!("{}, line {}: {line}", manifest.display(), number + 1))
                    .why("it is not a source, a tab and a destination")
                    .remedy("correct the line; a line that begins with '#' is left out"));
            };
            pair(OsStr::from_bytes(source), OsStr::from_bytes(to), to.ends_with(b"/"))
        })
        .collect()
}

/// `into`: the destination is a directory that receives the source, and not its new name.
fn pair(source: &OsStr, to: &OsStr, into: bool) -> Result<Pair> {
    let mut from = Address::parse(source)?;
    let mut to = Address::parse(to)?;
    let is_pattern = |name: &[u8]| name.iter().any(|byte| b"*?[{".contains(byte));
    let names: Vec<&[u8]> = from.path.0.split(|byte| *byte == b'/').collect();
    // A name that exists literally is not a pattern.
    let is_there =
        |count: usize| from.is_local() && local(&StorePath(names[..count].join(&b'/'))).symlink_metadata().is_ok();
    let first = names.iter().enumerate().position(|(index, name)| is_pattern(name) && !is_there(index + 1));
    if let Some(first) = first {
        let pattern = String::from_utf8(names[first..].join(&b'/')).map_err(|_| {
            Error::new(format!("{}: a pattern is not UTF-8", source.display()))
                .remedy("write '?' or '*' for bytes of another encoding")
        })?;
        from = Address { path: StorePath(names[..first].join(&b'/')), inside: true, ..from };
        return Ok(Pair { wanted: Wanted::matching(&pattern)?, from, to });
    }
    if into && !from.inside {
        let name = names.last().copied().unwrap_or_default();
        to.path = to.path.join(name);
        to.inside = false;
    } else if into {
        to.inside = true;
    }
    Ok(Pair { from, wanted: Wanted::default(), to })
}

fn below(dir: &StorePath, path: &StorePath) -> StorePath {
    if path.0.is_empty() { dir.clone() } else { dir.join(&path.0) }
}

fn local(path: &StorePath) -> PathBuf {
    Path::new("/").join(OsStr::from_bytes(&path.0))
}

/// The directory to open, and the path below it. Stores follow no links, so links on the way are resolved here.
fn opened_at(address: &Address, makes: bool) -> Result<(StorePath, StorePath)> {
    let path = &address.path;
    if !address.divides() {
        return Ok((StorePath::root(), path.clone()));
    }
    let (dir, name) = match address.inside {
        true => (path.clone(), StorePath::root()),
        false => {
            let dir = path.parent();
            let name = &path.0[dir.0.len()..];
            (dir, StorePath(name.strip_prefix(b"/").unwrap_or(name).to_vec()))
        }
    };
    if !address.is_local() {
        return Ok((dir, name));
    }
    let real = local(&dir);
    let failed = |why| {
        let what = Error::new(format!("{} cannot be used", real.display())).why(why);
        what.remedy("name a directory that exists, or that can be created by you").data("nothing was copied there")
    };
    if makes {
        // The usual mode: the modes of these directories are unknown.
        std::os::unix::fs::DirBuilderExt::mode(fs::DirBuilder::new().recursive(true), 0o755)
            .create(&real)
            .map_err(failed)?;
    }
    let real = fs::canonicalize(&real).map_err(failed)?;
    Ok((StorePath(real.as_os_str().as_bytes()[1..].to_vec()), name))
}

/// All pairs are examined before the first copy: a conflict of two sources with one name is noticed before either is
/// copied.
fn carry_all(
    pairs: Vec<Pair>,
    args: &StageArgs,
    state: &StateRoot,
    course: &Course,
    report: &mut Report,
) -> Outcome<()> {
    let who = Cred { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw() };
    let mut staging = Staging { args, state, course, report, who, targets: HashMap::new() };
    let mut loads = Vec::new();
    for (ends, between) in staging.by_directories(pairs)? {
        loads.push(staging.examine(ends, &between)?);
    }
    for load in loads {
        staging.copy(load)?;
    }
    Ok(())
}

/// A directory below the root of a store.
type Dir = (String, StorePath);

/// What all copies of one command share.
struct Staging<'a> {
    args: &'a StageArgs,
    state: &'a StateRoot,
    course: &'a Course,
    report: &'a mut Report,
    who: Cred,
    /// The source of each target, with its name for messages.
    targets: HashMap<Dir, (Dir, PathText)>,
}

/// All that is copied from one directory to another.
struct Load {
    source: Arc<dyn Store>,
    from: Dir,
    to: Dir,
    /// In the state directory, one for each target.
    place: PathBuf,
    entries: Vec<Entry>,
}

impl Staging<'_> {
    /// The pairs by the two directories between which they copy.
    fn by_directories(&mut self, pairs: Vec<Pair>) -> Result<BTreeMap<[Dir; 2], Between>> {
        let mut all: BTreeMap<[Dir; 2], Between> = BTreeMap::new();
        for pair in pairs {
            let (to_dir, to) = opened_at(&pair.to, true)?;
            let (from_dir, from) = match opened_at(&pair.from, false) {
                Ok(at) => at,
                // The remaining pairs continue.
                Err(why) => {
                    let path = local(&pair.from.path).into();
                    self.report.failed.push(Failed { path, why: why.why });
                    continue;
                }
            };
            let key = [(pair.from.root, from_dir), (pair.to.root, to_dir)];
            all.entry(key).or_default().pairs.push((from, to, pair.wanted));
        }
        Ok(all)
    }

    fn examine(&mut self, [from, to]: [Dir; 2], between: &Between) -> Result<Load> {
        let (to_root, to_dir) = &to;
        let known = format!("{to_root} {to_dir}");
        let name = format!("staging-{:016x}", surgetank_store::checksum::of_bytes(known.as_bytes()));
        let place = self.state.make_other(&name)?;
        let source = Address::open(&from.0, &from.1, &place, None)?;
        let mut load = Load { source, from, to, place, entries: Vec::new() };
        for (from, to, wanted) in &between.pairs {
            self.find(&mut load, from, to, wanted)?;
        }
        self.leave_out_conflicts(&mut load);
        self.course.expect(&load.entries);
        Ok(load)
    }

    /// Adds what one pair names.
    fn find(&mut self, load: &mut Load, from: &StorePath, to: &StorePath, wanted: &Wanted) -> Result<()> {
        let course = self.course;
        match walk(&*load.source, self.who, (from, to), wanted, &|bytes| course.pass(bytes)) {
            Ok(mut found) => {
                let is_nothing = from.0.is_empty() && found.entries.len() == 1 && found.failed.is_empty();
                if is_nothing && !Address::is_there(&load.from.0, &load.from.1, &load.place, self.who)? {
                    found.failed.push((from.clone(), Errno::NOENT.into()));
                }
                load.leave_out_copies(from, to, &mut found);
                load.entries.extend(found.entries);
                let failed = found.failed.iter().map(|(path, why)| failure(&load.source.describe(), path, why));
                self.report.failed.extend(failed);
            }
            Err(_) if course.why_stopped().is_some() => self.report.left_files += 1,
            Err(why) => self.report.failed.push(failure(&load.source.describe(), from, &why)),
        }
        Ok(())
    }

    /// Of two sources with one name at the target the second is not copied.
    fn leave_out_conflicts(&mut self, load: &mut Load) {
        let Load { source, from: (from_root, from_dir), to: (to_root, to_dir), entries, .. } = load;
        entries.retain(|entry| {
            let to = (to_root.clone(), below(to_dir, &entry.to));
            let from = (from_root.clone(), below(from_dir, &entry.from));
            if entry.is_dir() {
                return true;
            }
            let shown = named(&source.describe(), &entry.from);
            match self.targets.insert(to, (from.clone(), shown)) {
                None => true,
                // The same file given twice is copied once.
                Some((other, _)) if other == from => false,
                Some((_, other)) => {
                    let why = format!("{other} would have the same name there");
                    let why = std::io::Error::new(std::io::ErrorKind::AlreadyExists, why);
                    self.report.failed.push(failure(&source.describe(), &entry.from, &why));
                    false
                }
            }
        });
    }

    fn copy(&mut self, load: Load) -> Result<()> {
        let Load { source, to: (to_root, to_dir), place, entries, .. } = load;
        let (args, course) = (self.args, self.course);
        let cannot = |why: std::io::Error| Error::new(format!("{} cannot be used", place.display())).why(why);
        // Several processes may stage to one place; only the last one collects abandoned uploads.
        let lock = fs::File::open(&place).map_err(cannot)?;
        lock.lock_shared().map_err(cannot)?;
        let target = Address::open(&to_root, &to_dir, &place, Some(args.verify))?;
        let claims = Claims::in_directory(&place).map_err(cannot)?;
        let transfer = Transfer {
            source: &*source,
            target: &*target,
            who: self.who,
            verify: args.verify,
            spool: &place,
            claims: &claims,
            gate: &|bytes| course.pass(bytes),
            arrived: &|entry| course.arrived(entry),
        };
        let came = transfer.carry(&entries);
        let complete = came.failed.is_empty() && came.left_files == 0;
        add(self.report, came, &source.describe());
        if complete
            && lock.try_lock().is_ok()
            && let Err(why) = target.collect()
        {
            let target = target.describe();
            eprintln!("surgetank: unfinished uploads at {target} could not be aborted: {why}");
        }
        Ok(())
    }
}

impl Load {
    /// A copy must not be copied again below itself.
    fn leave_out_copies(&self, from: &StorePath, to: &StorePath, found: &mut Walked) {
        let ((from_root, from_dir), (to_root, to_dir)) = (&self.from, &self.to);
        let (begin, end) = (below(from_dir, from), below(to_dir, to));
        if from_root == to_root && end != begin && end.is_below(&begin) {
            let copies = found.entries.iter().position(|entry| below(from_dir, &entry.from) == end);
            if let Some(copies) = copies {
                let why = std::io::Error::other("the copies go there: name what is to be copied");
                found.failed.push((found.entries[copies].from.clone(), why));
            }
            let is_copy = |path: &StorePath| *path == end || path.is_below(&end);
            found.entries.retain(|entry| !is_copy(&below(from_dir, &entry.from)));
        }
    }
}

fn add(report: &mut Report, came: Came, source: &str) {
    report.copied_files += came.copied_files;
    report.copied_bytes += came.copied_bytes;
    report.present_files += came.present_files;
    report.present_bytes += came.present_bytes;
    report.left_files += came.left_files;
    report.failed.extend(came.failed.iter().map(|(path, why)| failure(source, path, why)));
}

/// A path below the root of a store, with that root: a local path begins with `/`.
fn named(source: &str, path: &StorePath) -> PathText {
    let root = source.trim_end_matches('/').as_bytes();
    PathText([root, b"/", path.0.strip_prefix(b"/").unwrap_or(&path.0)].concat())
}

fn failure(source: &str, path: &StorePath, why: &std::io::Error) -> Failed {
    let (meaning, remedy) = advice(verdict::errno_of(why));
    let why = match why.get_ref() {
        // Our own message is complete.
        Some(_) => why.to_string(),
        None => format!("{why}. {meaning} {remedy}"),
    };
    Failed { path: named(source, path), why }
}

/// The drain's advice does not fit here: there are two ends, and no rules.
fn advice(errno: Errno) -> (&'static str, &'static str) {
    match errno {
        Errno::NOENT | Errno::NOTDIR => ("It is not there, or no longer.", "Correct the name, or leave it out."),
        Errno::INVAL | Errno::ILSEQ => {
            ("The target does not take this name or this kind of file.", "Rename the file, or leave it out.")
        }
        Errno::ACCESS | Errno::PERM => (
            "This user may not read it, or not write where it is to go.",
            "Check owner and mode at both ends, or what the credentials permit.",
        ),
        other => {
            let advice = verdict::advise(other);
            (advice.meaning, advice.remedy)
        }
    }
}

struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The progress, and whether to continue.
struct Course {
    began: Instant,
    until: Option<Instant>,
    quiet: bool,
    stopped: Mutex<Option<&'static str>>,
    halted: AtomicBool,
    all_files: AtomicU64,
    all_bytes: AtomicU64,
    done_files: AtomicU64,
    passed_bytes: AtomicU64,
    meter: Meter,
}

impl Course {
    fn new(began: Instant, args: &StageArgs) -> Self {
        Self {
            began,
            until: args.deadline.map(|millis| began + Duration::from_millis(millis)),
            quiet: args.quiet || args.json,
            stopped: Mutex::default(),
            halted: AtomicBool::new(false),
            all_files: AtomicU64::new(0),
            all_bytes: AtomicU64::new(0),
            done_files: AtomicU64::new(0),
            passed_bytes: AtomicU64::new(0),
            meter: Meter::default(),
        }
    }

    fn expect(&self, entries: &[Entry]) {
        let files = entries.iter().filter(|entry| !entry.is_dir());
        self.all_files.fetch_add(files.clone().count() as u64, Ordering::Relaxed);
        self.all_bytes.fetch_add(files.map(Entry::bytes).sum(), Ordering::Relaxed);
    }

    fn arrived(&self, _entry: &Entry) {
        self.done_files.fetch_add(1, Ordering::Relaxed);
    }

    fn pass(&self, bytes: u64) -> std::io::Result<()> {
        self.passed_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.meter.pass(bytes);
        if self.until.is_some_and(|until| clock::tick() >= until) {
            self.halt("the deadline has passed");
        }
        if self.halted.load(Ordering::Relaxed) { Err(std::io::ErrorKind::Interrupted.into()) } else { Ok(()) }
    }

    fn halt(&self, why: &'static str) {
        self.stopped.lock().unwrap_or_else(std::sync::PoisonError::into_inner).get_or_insert(why);
        self.halted.store(true, Ordering::Relaxed);
    }

    fn why_stopped(&self) -> Option<&'static str> {
        *self.stopped.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Shows the progress and handles signals, until the copy ends.
    fn attend(&self, signals: &Signals, done: &AtomicBool) {
        let mut display = Display::new("copying", self.quiet);
        while !done.load(Ordering::Relaxed) {
            if let Ok(Some(signal)) = signals.next() {
                self.halt(if signal.number == libc::SIGINT { "interrupted" } else { "asked to end" });
            }
            let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
            let (all_bytes, passed) = (load(&self.all_bytes), load(&self.passed_bytes));
            let (all_files, done_files) = (load(&self.all_files), load(&self.done_files));
            display.show(&Progress {
                undrained_files: all_files.saturating_sub(done_files),
                undrained_bytes: all_bytes.saturating_sub(passed),
                done_files,
                done_bytes: passed,
                bytes_per_second: self.meter.rate(),
                average_bytes_per_second: (passed as f64 / self.began.elapsed().as_secs_f64().max(1e-3)) as u64,
                ..Progress::default()
            });
            std::thread::sleep(Duration::from_millis(50));
        }
        display.finish();
    }
}
