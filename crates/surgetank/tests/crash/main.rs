//! The crash campaign. Each case runs writers under `surgetank run`, in these steps:
//! - SIGKILL ends the agent at a crash point or at a random instant, and perhaps the next agent while it recovers.
//! - A clean run drains the remaining files, and the store is compared with every result that the writers got.
//!
//! A watcher reads the store all the time. In a third of the cases the supervisor lives: another agent takes over, and
//! no writer may see an error. In half of them the tier is large enough to delegate directories.
//! `SURGETANK_CRASH_CASES` (50): cases. `SURGETANK_CRASH_SEED`: another one at each `make crash`. A case is named by its
//! seed; `SURGETANK_CRASH_CASE=SEED` runs only that one. `SURGETANK_CRASH_OTHERS` (5): in other stores.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

mod content;
mod delegation;
mod ground;
mod manifest;
mod points;
mod power;
mod verify;
mod watch;
mod workload;

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use tempfile::TempDir;

use ground::{Ground, Kind, supervisor_of};
use manifest::{Story, record};
use points::{POINTS, is_complete};
use verify::{Location, store_of};
use watch::Watcher;
use workload::{Dice, Terms};

const CASES: u64 = 50;
const SEED: u64 = 1;
const CASES_A_TRIAL: u64 = 10;
/// Cases in each other kind of store.
const OTHERS: u64 = 5;
/// One case of this many is a loss of power, where the process may mount.
const POWER_EVERY: u64 = 5;
const WRITERS: u64 = 3;
const OPERATIONS: u64 = 120;
/// A run that takes longer is killed, and the case fails.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Room of a tier on which the agent delegates directories (`Delegator::bytes_to_delegate`).
const ROOM_TO_DELEGATE_MIB: u64 = 8192;
const DISK_ROOM_TO_DELEGATE_MIB: u64 = 4096;

/// Segment size of the catalog's log: in a case that tests folding, and in every other case.
const SEGMENT_BYTES: [Option<u64>; 2] = [Some(16 << 10), None];

fn main() {
    if let Ok(words) = std::env::var("SURGETANK_CRASH_WRITER") {
        return be_a_writer(&words);
    }
    if let Some(to) = std::env::var_os("SURGETANK_CRASH_READER") {
        return ground::look(&std::env::current_dir().unwrap(), to.as_ref());
    }
    let arguments = Arguments::from_args();
    let may_mount = power::seclude();
    let number = |name: &str, default: u64| std::env::var(name).ok().map_or(default, |text| text.parse().unwrap());
    let first = number("SURGETANK_CRASH_SEED", SEED) * 1_000_000;
    let cases = number("SURGETANK_CRASH_CASES", CASES);
    let others = number("SURGETANK_CRASH_OTHERS", OTHERS);
    let trial = |kind: Kind, seeds: std::ops::Range<u64>| {
        let name = format!("{}_from_{}", kind.word(), seeds.start);
        Trial::test(name, move || several(kind, seeds, may_mount))
    };
    let several_of = |kind: Kind, cases: u64| {
        let starts = (0..cases).step_by(CASES_A_TRIAL as usize);
        starts.map(move |at| trial(kind, first + at..first + (at + CASES_A_TRIAL).min(cases)))
    };
    let mut trials: Vec<Trial> = match std::env::var("SURGETANK_CRASH_CASE") {
        Ok(case) => {
            let (word, seed) = case.split_once(':').unwrap_or(("cases", &case));
            let kind = Kind::ALL.into_iter().find(|kind| kind.word() == word).unwrap();
            let seed = seed.parse().unwrap();
            vec![trial(kind, seed..seed + 1)]
        }
        Err(_) => (Kind::ALL.into_iter().flat_map(|kind| kind.kept().map(move |seed| trial(kind, seed..seed + 1))))
            .chain(several_of(Kind::Directory, cases))
            .chain(several_of(Kind::Packed, others))
            .chain(several_of(Kind::Objects, others))
            .collect(),
    };
    trials.push(Trial::test("every_crash_point_is_tried_or_excused", is_complete));
    trials.push(Trial::test("damaged_content_is_found", content::damage_is_found));
    libtest_mimic::run(&arguments, trials).exit();
}

/// Runs all cases, also after a failure. Together they must verify at least one file.
fn several(kind: Kind, seeds: std::ops::Range<u64>, may_mount: bool) -> Result<(), Failed> {
    let (mut files, mut found) = (0, Vec::new());
    for seed in seeds {
        match case(kind, seed, may_mount) {
            Ok(verified) => files += verified,
            Err(why) => found.push(why),
        }
    }
    if found.is_empty() && files == 0 {
        found.push("nothing was verified".to_owned());
    }
    if found.is_empty() { Ok(()) } else { Err(Failed::from(found.join("\n"))) }
}

fn be_a_writer(words: &str) {
    let words: Vec<&str> = words.split('\t').collect();
    let terms = Terms {
        seed: words[0].parse().unwrap(),
        writer: words[1].parse().unwrap(),
        operations: words[2].parse().unwrap(),
        directory: words[3].into(),
        manifest: words[4].into(),
        links: words[5] == "links",
        many: words[6] == "many",
    };
    std::process::exit(i32::from(workload::write(&terms).is_err()));
}

/// How the agent ends.
#[derive(Debug, Clone)]
enum End {
    At {
        point: &'static str,
        pass: u64,
    },
    After(Duration),
    /// The next agent ends at this point, after the first one ended at that time.
    Recovering {
        point: &'static str,
        after: Duration,
    },
    Never,
}

struct Scene {
    seed: u64,
    ground: Ground,
    kept: (TempDir, TempDir, TempDir),
    store: PathBuf,
    state: PathBuf,
    manifests: PathBuf,
    options: Vec<String>,
    direct: bool,
    /// The kill ends the agent and spares its supervisor.
    alone: bool,
    /// The agent delegates directories to the writers.
    delegates: bool,
    /// How many files the writers made in delegated directories.
    delegated: Cell<u64>,
    segment_bytes: Option<u64>,
}

impl Scene {
    fn new(kind: Kind, seed: u64, dice: &mut Dice) -> Option<Self> {
        let disk = TempDir::with_prefix_in("crash.", env!("CARGO_TARGET_TMPDIR")).unwrap();
        let memory = TempDir::with_prefix_in("crash.", "/dev/shm").unwrap();
        let aside = TempDir::with_prefix_in("crash.", "/dev/shm").unwrap();
        let (store, slow) = (disk.path().join("project"), disk.path().join("tier"));
        let state = aside.path().join("state");
        [&store, &slow].into_iter().for_each(|dir| fs::create_dir(dir).unwrap());
        // Small, so that files are evicted and spilled while they are written.
        let (fast_mib, slow_mib) = match ([(64, 64), (4, 64), (1, 1)][dice.below(3) as usize], kind) {
            // In a store that cannot take spilled files, the tiers must hold every open file of the writers.
            ((1, 1), Kind::Packed | Kind::Objects) => (4, 8),
            (room, _) => room,
        };
        let mut options = vec![
            "--tier".to_owned(),
            format!("fast={}:{fast_mib}M", memory.path().display()),
            "--tier".to_owned(),
            format!("slow={}:{slow_mib}M", slow.display()),
            "--quiet-period".to_owned(),
            ["0s", "20ms", "200ms"][dice.below(3) as usize].to_owned(),
        ];
        if dice.below(3) == 0 {
            options.push("--no-preload".to_owned());
        }
        let direct = dice.below(3) > 0;
        let manifests = aside.path().join("manifests");
        fs::create_dir(&manifests).unwrap();
        // A dice of its own, so that each seed keeps its case.
        let alone = Dice::new(seed ^ 0x5afe).below(3) == 0;
        let segment_bytes = SEGMENT_BYTES[Dice::new(seed ^ 0xf01d).below(2) as usize];
        let ground = Ground::new(kind, seed, aside.path(), &mut options)?;
        let kept = (disk, memory, aside);
        let delegated = Cell::new(0);
        let mut scene = Self {
            seed,
            ground,
            kept,
            store,
            state,
            manifests,
            options,
            direct,
            alone,
            delegates: false,
            delegated,
            segment_bytes,
        };
        if kind == Kind::Directory && Dice::new(seed ^ 0x1e4d).below(2) == 0 {
            scene.delegate();
        }
        Some(scene)
    }

    fn delegate(&mut self) {
        self.delegates = true;
        self.options.retain(|option| option != "--no-preload");
        for option in self.options.iter_mut().filter(|option| option.starts_with("fast=")) {
            *option = format!("{}:{ROOM_TO_DELEGATE_MIB}M", option.rsplit_once(':').unwrap().0);
        }
    }

    fn surgetank(&self, end: &End, command: &str) -> Command {
        let mut run = Command::new(env!("CARGO_BIN_EXE_surgetank"));
        run.arg("run")
            .args(["--over".as_ref(), self.store.as_os_str()])
            .args(["--state".as_ref(), self.state.as_os_str()]);
        run.args(&self.options).args(["--no-progress", "--", "sh", "-c", command]);
        run.current_dir(&self.store).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        run.env("SURGETANK_REPORT", "1");
        workload::sync_again_if_it_means_the_store(&mut run, &self.options);
        run.env("SURGETANK_DIRECT", self.direct.to_string()).env(power::MARK, &self.manifests);
        self.ground.arm(&mut run);
        if let Some(bytes) = self.segment_bytes {
            run.env("SURGETANK_SEGMENT_BYTES", bytes.to_string());
        }
        let armed = match end {
            End::At { point, pass } => Some(format!("{point}:{pass}")),
            // (The first agent finds nothing to recover; the one that takes over is the second.)
            End::Recovering { point, .. } if self.alone => Some(format!(",{point}:1")),
            End::Recovering { point, .. } => Some(format!("{point}:1")),
            End::After(_) | End::Never => None,
        };
        if let Some(armed) = armed {
            run.env("SURGETANK_CRASH", armed);
            run.env("SURGETANK_CRASH_DEATHS", self.deaths());
            if !self.alone {
                run.env("SURGETANK_CRASH_SUPERVISOR", "1");
            }
        }
        run
    }

    /// The file in which an agent that dies at a crash point records the point.
    fn deaths(&self) -> PathBuf {
        self.manifests.join("deaths")
    }

    /// The points that killed an agent, and how often.
    fn killed_by(&self) -> BTreeMap<String, u64> {
        let mut by = BTreeMap::new();
        for name in fs::read_to_string(self.deaths()).unwrap_or_default().lines() {
            *by.entry(name.to_owned()).or_default() += 1;
        }
        by
    }

    /// Changes the settings for points that these settings would not reach.
    fn allow(&mut self, ends: &[End]) {
        let is_about = |names: &[&str]| {
            ends.iter()
                .any(|end| matches!(end, End::At { point, .. } if names.iter().any(|name| point.starts_with(name))))
        };
        if is_about(&["catalog.rolled", "catalog.fold", "catalog.snapshot_made", "catalog.snapshot_named"]) {
            self.segment_bytes = SEGMENT_BYTES[0];
        }
        if is_about(&["sync."]) {
            // The agent syncs only files on a disk, and only while they are not in the store.
            self.options.extend(["--sync-after", "5ms"].map(str::to_owned));
            self.options.drain(..2);
            let quiet = self.options.iter().position(|option| option == "--quiet-period").unwrap();
            self.options[quiet + 1] = "1s".to_owned();
        }
        if is_about(&["spill."]) && self.ground.kind == Kind::Directory {
            // Files must outgrow all remaining tiers.
            for tier in ["fast=", "slow="] {
                for option in self.options.iter_mut().filter(|option| option.starts_with(tier)) {
                    *option = format!("{}:1M", option.rsplit_once(':').unwrap().0);
                }
            }
        }
        if is_about(&["shim.", "delegation.", "recover.intake"]) {
            self.options.retain(|option| option != "--no-preload");
        }
        if is_about(&["delegation.", "recover.intake"]) && self.ground.kind == Kind::Directory {
            self.delegate();
        }
    }

    /// Lines of the writers' manifests about the files that `why` names.
    fn noted(&self, why: &str) -> String {
        let named =
            |word: &str| word.trim_end_matches([':', ';', ',']).rsplit_once('/').map(|(_, name)| name.to_owned());
        let names: BTreeSet<String> = why.split_whitespace().filter_map(named).filter(|name| name.len() > 4).collect();
        let mut lines = String::new();
        for writer in 0..WRITERS {
            let manifest = fs::read_to_string(self.manifests.join(writer.to_string())).unwrap_or_default();
            let all = std::env::var_os("SURGETANK_LOG").is_some();
            let is_about = |line: &&str| all || names.iter().any(|name| line.contains(name.as_str()));
            manifest.lines().filter(is_about).for_each(|line| lines += &format!("  {writer}: {line}\n"));
        }
        lines
    }

    /// Runs the command to its end; the agent ends as `end` demands.
    fn run(&self, end: &End, command: &str) -> Result<Ended, String> {
        let began = Instant::now();
        let output = fs::File::create(self.manifests.join("output")).unwrap();
        let mut run = self.surgetank(end, command);
        let mut child = run.stdout(output.try_clone().unwrap()).stderr(output).spawn().unwrap();
        let mut killed = false;
        loop {
            if let Some(status) = child.try_wait().unwrap() {
                let output = fs::read_to_string(self.manifests.join("output")).unwrap();
                return Ok(Ended { status, output, killed });
            }
            if let End::After(instant) | End::Recovering { after: instant, .. } = end
                && !killed
                && began.elapsed() >= *instant
            {
                killed = self.kill_the_agent(self.alone);
            }
            if began.elapsed() > TIMEOUT {
                let _ = child.kill();
                self.kill_the_agent(false);
                return Err(format!("hangs: {}", fs::read_to_string(self.manifests.join("output")).unwrap()));
            }
            std::thread::sleep(Duration::from_micros(500));
        }
    }

    fn kill_the_agent(&self, alone: bool) -> bool {
        let places = fs::read_dir(&self.state).into_iter().flatten().flatten();
        let cards = places.filter_map(|place| fs::read_to_string(place.path().join("agent.json")).ok());
        let pids = cards.filter_map(|text| serde_json::from_str::<serde_json::Value>(&text).ok()?["pid"].as_i64());
        let pids: Vec<i32> = pids.filter_map(|pid| i32::try_from(pid).ok()).collect();
        let supervisors: Vec<i32> = pids.iter().filter_map(|pid| supervisor_of(*pid)).filter(|_| !alone).collect();
        // SAFETY: kill takes any number; these are agents of this scene's own state directory, and their supervisors.
        supervisors.into_iter().chain(pids).filter(|pid| unsafe { libc::kill(*pid, libc::SIGKILL) } == 0).count() > 0
    }

    /// Warnings and errors in the agents' logs.
    fn log(&self) -> String {
        let places = fs::read_dir(&self.state).into_iter().flatten().flatten();
        let logs = places.filter_map(|place| fs::read_to_string(place.path().join("agent.log")).ok());
        let all = std::env::var_os("SURGETANK_LOG").is_some();
        let keep = |line: &&str| all || ["WARN", "ERROR", "killed", "recover"].iter().any(|word| line.contains(word));
        logs.flat_map(|log| log.lines().filter(keep).map(|line| format!("{line}\n")).collect::<Vec<_>>()).collect()
    }

    /// The content of the store.
    fn look(&self) -> Result<BTreeMap<String, Location>, String> {
        if self.ground.kind == Kind::Directory {
            return Ok(store_of(&self.store));
        }
        let (me, to) = (std::env::current_exe().unwrap(), self.manifests.join("looked"));
        let command = format!("SURGETANK_CRASH_READER='{}' '{}'", to.display(), me.display());
        let ended = self.run(&End::Never, &command)?;
        match ended.status.success() {
            true => Ok(ground::looked(&to)),
            false => Err(format!("a run that only reads ended with {}: {}", ended.status, ended.output)),
        }
    }

    fn stories(&self) -> Vec<Story> {
        (0..WRITERS).map(|writer| Story::read(&self.manifests.join(writer.to_string()))).collect()
    }

    fn workload(&self) -> String {
        let me = std::env::current_exe().unwrap();
        let links = if self.ground.kind.has_links() { "links" } else { "" };
        let many = if self.delegates { "many" } else { "" };
        let writer = |writer: u64| {
            let manifest = self.manifests.join(writer.to_string());
            let words = format!(
                "{}\t{writer}\t{OPERATIONS}\t{}\t{}\t{links}\t{many}",
                self.seed,
                self.store.display(),
                manifest.display()
            );
            format!("SURGETANK_CRASH_WRITER='{words}' '{}' & pids=\"$pids $!\"", me.display())
        };
        let writers: Vec<String> = (0..WRITERS).map(writer).collect();
        format!("pids=; {}\nfor pid in $pids; do wait $pid || failed=1; done; exit ${{failed:-0}}", writers.join("\n"))
    }
}

struct Ended {
    status: ExitStatus,
    output: String,
    killed: bool,
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.kill_the_agent(false);
    }
}

fn case(kind: Kind, seed: u64, may_mount: bool) -> Result<u64, String> {
    let mut dice = Dice::new(seed);
    if kind == Kind::Directory && seed.is_multiple_of(POWER_EVERY) && may_mount {
        return without_power(seed, &mut dice);
    }
    // (`None` if the store's server is missing.)
    let Some(mut scene) = Scene::new(kind, seed, &mut dice) else { return Ok(1) };
    let mut ends = [a_end(&mut dice), if dice.below(3) == 0 { a_end(&mut dice) } else { End::Never }];
    if let Some((point, pass)) = kind.point(seed) {
        ends[0] = End::At { point, pass };
    }
    if let End::At { point, .. } = ends[0]
        && point.starts_with("recover.")
    {
        ends[0] = End::Recovering { point, after: Duration::from_millis(50 + Dice::new(seed ^ 0xd1e).below(500)) };
    }
    scene.allow(&ends);
    let watcher = scene.ground.in_the_open(&scene.store).map(|store| Watcher::start(&store, kind == Kind::Objects));
    let outcome = lives(&scene, &ends);
    let seen = watcher.map_or_else(Default::default, Watcher::stop);
    let explain = |why: String| {
        let output = fs::read_to_string(scene.manifests.join("output")).unwrap_or_default();
        format!(
            "SURGETANK_CRASH_CASE={}:{seed}: {why}\nends: {ends:?}\noptions: {:?}, direct: {}, alone: {}, delegated: {}, segments: {:?}\nlines of the manifests about it:\n{}\noutput of the last run:\n{output}\nthe agent logged:\n{}",
            kind.word(),
            scene.options,
            scene.direct,
            scene.alone,
            scene.delegated.get(),
            scene.segment_bytes,
            scene.noted(&why),
            scene.log()
        )
    };
    let stories = scene.stories();
    let (died, verified) = outcome.map_err(&explain)?;
    verify::excuse(&seen, &stories).map_err(&explain)?;
    let done: u64 = stories.iter().map(|story| story.done).sum();
    record(&format!(
        "{{\"seed\":{seed},\"died\":{died},\"operations\":{done},\"files\":{},\"bytes\":{},\"looks\":{},\"seen\":{},\"delegated\":{},\"points\":{}}}",
        verified.files,
        verified.bytes,
        seen.looks,
        seen.files,
        scene.delegated.get(),
        serde_json::to_string(&scene.killed_by()).unwrap()
    ));
    Ok(verified.files)
}

/// The machine loses its power while the writers write. After the next boot a run drains the remaining files.
fn without_power(seed: u64, dice: &mut Dice) -> Result<u64, String> {
    let mut scene = Scene::new(Kind::Directory, seed, dice).ok_or("no scene")?;
    let disk_mib = if scene.delegates { DISK_ROOM_TO_DELEGATE_MIB * 3 / 2 } else { 256 };
    let disk = power::Disk::new(scene.kept.0.path(), disk_mib);
    scene.state = disk.path.join("state");
    // Files in memory: what fsync synced of them is in copies beside the state, where the store is on its disk.
    let volatile = Dice::new(seed ^ 0x7e57).below(2) == 0;
    if volatile {
        scene.store = disk.path.join("project");
        fs::create_dir(&scene.store).unwrap();
        assert!(fs::File::open(&disk.path).is_ok_and(|dir| rustix::fs::syncfs(dir).is_ok()));
    }
    let cap_mib = if scene.delegates { DISK_ROOM_TO_DELEGATE_MIB } else { [64, 4][dice.below(2) as usize] };
    scene.options = vec![
        "--tier".to_owned(),
        format!("disk={}:{cap_mib}M", if volatile { scene.kept.1.path() } else { &disk.path }.display()),
        "--fsync".to_owned(),
        if volatile { "auto" } else { "tier" }.to_owned(),
        "--quiet-period".to_owned(),
        ["0s", "20ms", "1h"][dice.below(3) as usize].to_owned(),
        "--sync-after".to_owned(),
        ["20ms", "300ms", "1h"][dice.below(3) as usize].to_owned(),
    ];
    if dice.below(3) == 0 && !scene.delegates {
        scene.options.push("--no-preload".to_owned());
    }
    let manifests: Vec<PathBuf> = (0..WRITERS).map(|writer| scene.manifests.join(writer.to_string())).collect();
    let (after, journal_too) = (Duration::from_millis(50 + dice.below(900)), dice.below(2) == 0);
    let explain = |why: String| {
        let output = fs::read_to_string(scene.manifests.join("output")).unwrap_or_default();
        format!(
            "SURGETANK_CRASH_CASE={seed}: {why}\nthe power failed after {after:?}, journal too: {journal_too}\noptions: {:?}, direct: {}\noutput of the last run:\n{output}\nthe agent logged:\n{}\n{}",
            scene.options,
            scene.direct,
            scene.log(),
            power::describe(&scene.store, &manifests)
        )
    };
    let output = fs::File::create(scene.manifests.join("output")).unwrap();
    let mut run = scene.surgetank(&End::Never, &scene.workload());
    let mut child = run.stdout(output.try_clone().unwrap()).stderr(output).spawn().unwrap();
    std::thread::sleep(after);
    let in_memory = delegation::in_memory(&scene.state);
    scene.delegated.set(in_memory.iter().filter_map(|path| delegation::entries(path)).sum());
    disk.power_fails(journal_too, &scene.manifests);
    // (Otherwise they are like files in the state directory.)
    if volatile || Dice::new(seed ^ 0x3e30).below(2) == 0 {
        in_memory.iter().for_each(|path| fs::remove_file(path).unwrap());
    }
    child.wait().unwrap();
    if volatile {
        for entry in fs::read_dir(scene.kept.1.path()).unwrap() {
            fs::remove_dir_all(entry.unwrap().path()).unwrap();
        }
    }
    let ended = scene.run(&End::Never, "true").map_err(&explain)?;
    if !matches!(ended.status.code(), Some(0 | 3)) {
        return Err(explain(format!("the run after the boot ended with {}", ended.status)));
    }
    // The run named the lost files. After the acknowledgement no loss remains to report.
    let forget = concat!(env!("CARGO_BIN_EXE_surgetank"), " scavenge --forget --over . --state");
    let again = scene.run(&End::Never, &format!("{forget} '{}'", scene.state.display())).map_err(&explain)?;
    if !again.status.success() {
        return Err(explain(format!("the second run after the boot ended with {}", again.status)));
    }
    let verified = power::verify(&scene.store, &manifests).map_err(&explain)?;
    power::end_marked(&scene.manifests);
    let done: u64 = scene.stories().iter().map(|story| story.done).sum();
    record(&format!(
        "{{\"seed\":{seed},\"died\":1,\"operations\":{done},\"files\":{},\"bytes\":{},\"looks\":0,\"seen\":0,\"delegated\":{},\"points\":{{}}}}",
        verified.files,
        verified.bytes,
        scene.delegated.get()
    ));
    Ok(verified.files)
}

/// Several lives of the agent, the last one undisturbed. Returns how often it died, and what was verified.
fn lives(scene: &Scene, ends: &[End]) -> Result<(u64, verify::Verified), String> {
    let mut died = 0;
    let workload = scene.workload();
    for (life, end) in ends.iter().enumerate() {
        let command = if life == 0 { workload.as_str() } else { "true" };
        let ended = scene.run(end, command)?;
        scene.delegated.set(scene.delegated.get() + delegation::made(&ended.output));
        let killed = ended.killed || ended.output.contains("the agent of") || ended.output.contains("the agent died");
        died += u64::from(killed);
        if scene.alone && life == 0 && !ended.status.success() && !ended.output.contains("while it started") {
            return Err(format!(
                "only the agent was killed, and the run ended with {}: {}",
                ended.status, ended.output
            ));
        }
        // Exit code 0 must be true: all files are in the store at this moment.
        if ended.status.success() {
            verify::verify(&scene.look()?, &scene.stories()).map_err(|why| format!("exit code 0, but {why}"))?;
        } else if !killed {
            return Err(format!("no kill happened, and the run ended with {}: {}", ended.status, ended.output));
        }
    }
    let last = scene.run(&End::Never, "true")?;
    if !last.status.success() {
        return Err(format!("the last, undisturbed run ended with {}", last.status));
    }
    let stories = scene.stories();
    if stories.iter().map(|story| story.done).sum::<u64>() == 0 {
        return Ok((died, verify::Verified::default())); // The agent died before any operation was done. The death is counted.
    }
    let verified = verify::verify(&scene.look()?, &stories)?;
    // (An agent that served the directory before cleans up at its own pace.)
    let timeout = if last.output.contains("is served already") { TIMEOUT } else { Duration::ZERO };
    let begun = Instant::now();
    let mut tiers = tier_files(scene);
    while !tiers.is_empty() && begun.elapsed() < timeout {
        std::thread::sleep(Duration::from_millis(20));
        tiers = tier_files(scene);
    }
    if !tiers.is_empty() {
        return Err(format!("left in the tiers: {tiers:?}"));
    }
    Ok((died, verified))
}

fn tier_files(scene: &Scene) -> Vec<PathBuf> {
    let (disk, memory, _) = &scene.kept;
    let mut left = vec![disk.path().join("tier"), memory.path().to_owned()];
    let mut found = Vec::new();
    while let Some(dir) = left.pop() {
        for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
            if entry.file_type().unwrap().is_dir() { left.push(entry.path()) } else { found.push(entry.path()) }
        }
    }
    found
}

fn a_end(dice: &mut Dice) -> End {
    if POINTS.is_empty() || dice.below(4) == 0 {
        return End::After(Duration::from_millis(dice.below(700)));
    }
    let (point, passes) = POINTS[dice.below(POINTS.len() as u64) as usize];
    End::At { point, pass: 1 + dice.below(passes) }
}
