//! SIGKILL ends the agent at any moment. The next run over the directory finds every closed file, and the store never
//! shows a half-copied one.
//!
//! A program changes the directory step by step and records each completed step. The same program, run in a plain
//! directory for the same number of steps, yields the expected content of the store. The interrupted step may have
//! happened or not. A file that was being written at that time may have any content.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::scene::{Running, Scene, eventually, files_below, is_ours, succeed};

const PROGRAM: &str = include_str!("recovery/changes.py");
const STEPS: usize = 120;

fn prepare(name: &str) -> Option<Scene> {
    let mut scene = Scene::new(name)?;
    scene.tier("fast", 32).tier("slow", 64);
    scene.beside("beside");
    fs::write("/mnt/changes.py", PROGRAM).unwrap();
    Some(scene)
}

/// The steps that the program recorded.
struct Log {
    done: usize,
    /// The interrupted step: its kind and the paths it touches.
    cut: Option<(String, Vec<PathBuf>)>,
}

fn read_log(path: &str) -> Log {
    let text = fs::read_to_string(path).unwrap_or_default();
    let done = text.lines().filter(|line| line.starts_with("done")).count();
    let cut = text.lines().last().and_then(|line| line.strip_prefix("begin "));
    Log {
        done,
        cut: cut.map(|cut| {
            let mut words = cut.split(' ');
            (words.next().unwrap().to_owned(), words.map(PathBuf::from).collect())
        }),
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Entry {
    Directory,
    File(u32, Vec<u8>),
    Symlink(PathBuf),
}

fn tree(root: &Path) -> BTreeMap<PathBuf, Entry> {
    let mut found = BTreeMap::new();
    let mut todo = vec![PathBuf::new()];
    while let Some(directory) = todo.pop() {
        for entry in fs::read_dir(root.join(&directory)).unwrap() {
            let entry = entry.unwrap();
            let path = directory.join(entry.file_name());
            let meta = entry.metadata().unwrap();
            let what = if meta.is_dir() {
                todo.push(path.clone());
                Entry::Directory
            } else if meta.is_symlink() {
                Entry::Symlink(fs::read_link(entry.path()).unwrap())
            } else {
                Entry::File(meta.permissions().mode() & 0o7777, fs::read(entry.path()).unwrap())
            };
            found.insert(path, what);
        }
    }
    found
}

/// The content of a plain directory after the first steps.
fn expected(seed: usize, steps: usize) -> BTreeMap<PathBuf, Entry> {
    let plain = PathBuf::from(format!("/mnt/plain-{seed}-{steps}"));
    // The number of steps does not change the steps themselves.
    succeed(
        Command::new("python3")
            .arg("/mnt/changes.py")
            .args([seed.to_string(), steps.to_string()])
            .arg(&plain)
            .arg("/dev/null"),
    );
    let tree = tree(&plain);
    fs::remove_dir_all(&plain).unwrap();
    tree
}

fn describe(entry: Option<&Entry>) -> String {
    match entry {
        None => "nothing".into(),
        Some(Entry::File(mode, bytes)) => format!(
            "{mode:o}, {} bytes, begins {:?}",
            bytes.len(),
            String::from_utf8_lossy(&bytes[..bytes.len().min(26)])
        ),
        Some(other) => format!("{other:?}"),
    }
}

fn differences(is: &BTreeMap<PathBuf, Entry>, should: &BTreeMap<PathBuf, Entry>) -> Vec<String> {
    let paths: BTreeSet<_> = is.keys().chain(should.keys()).collect();
    paths
        .into_iter()
        .filter(|path| is.get(*path) != should.get(*path))
        .map(|path| {
            format!("{path:?}: the store has {}, closed was {}", describe(is.get(path)), describe(should.get(path)))
        })
        .collect()
}

/// The store has the result of the completed steps, and at most that of the interrupted one.
#[track_caller]
fn compare(scene: &Scene, seed: usize) {
    let log = read_log(&format!("/mnt/beside/log-{seed}"));
    let mut is = tree(&scene.path(&format!("round-{seed}")));
    let mut before = expected(seed, log.done);
    let Some((kind, paths)) = log.cut else {
        let wrong = differences(&is, &before);
        assert!(wrong.is_empty(), "seed {seed}, complete: {wrong:#?}");
        return;
    };
    let mut after = expected(seed, log.done + 1);
    if ["write", "again", "replace"].contains(&kind.as_str()) {
        // `replace` writes a file of its own and then renames it.
        let loose: Vec<&PathBuf> = match kind.as_str() {
            "replace" => paths.iter().skip(1).collect(),
            _ => paths.iter().collect(),
        };
        for path in loose {
            for tree in [&mut is, &mut before, &mut after] {
                tree.remove(path);
            }
        }
    }
    let wrong = differences(&is, &before);
    let also_wrong = differences(&is, &after);
    assert!(
        wrong.is_empty() || also_wrong.is_empty(),
        "seed {seed}, {} steps done, cut off: {kind} {paths:?}\nagainst before: {wrong:#?}\nagainst after: {also_wrong:#?}",
        log.done
    );
}

/// Whether all bytes belong to one version.
fn is_whole(bytes: &[u8]) -> bool {
    let mut lines = bytes.chunks(27).enumerate();
    let Some(head) = bytes.get(..18) else {
        return false;
    };
    let count: Option<usize> = std::str::from_utf8(&head[9..17]).ok().and_then(|text| text.parse().ok());
    count.is_some_and(|count| count * 27 == bytes.len())
        && lines.all(|(at, line)| {
            &line[..18] == head && std::str::from_utf8(&line[18..26]).is_ok_and(|text| text.parse() == Ok(at))
        })
}

/// Reads all files of the store again and again, and records each partial file.
struct Watch {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<(usize, Vec<String>)>>,
}

impl Watch {
    fn new(scene: &Scene, seed: usize) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let asked = stop.clone();
        let root = scene.path(&format!("round-{seed}"));
        let log = format!("/mnt/beside/log-{seed}");
        let thread = std::thread::spawn(move || {
            let mut seen = 0;
            let mut wrong = Vec::new();
            while !asked.load(Ordering::Relaxed) {
                for path in files_below(&root).into_keys().filter(|path| !is_ours(path)) {
                    // The file was renamed or removed meanwhile, or is a dangling symbolic link.
                    let Ok(bytes) = fs::read(root.join(&path)) else {
                        continue;
                    };
                    seen += 1;
                    let cut_off =
                        || read_log(&log).cut.is_some_and(|(_, paths)| paths.iter().any(|cut| path.starts_with(cut)));
                    if !is_whole(&bytes) && !cut_off() {
                        wrong.push(format!("{path:?}: {}", describe(Some(&Entry::File(0, bytes)))));
                    }
                }
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
            (seen, wrong)
        });
        Self { stop, thread: Some(thread) }
    }

    #[track_caller]
    fn ends(mut self) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        let (seen, wrong) = self.thread.take().unwrap().join().unwrap();
        assert!(wrong.is_empty(), "visible in the store, and not whole: {wrong:#?}");
        seen
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn begin(scene: &Scene, seed: usize, options: &[&str]) -> Running {
    scene.start(options, &format!("exec python3 /mnt/changes.py {seed} {STEPS} round-{seed} /mnt/beside/log-{seed}"))
}

impl Running {
    /// Waits until the program has completed this many steps.
    #[track_caller]
    fn gets_to(&mut self, seed: usize, steps: usize) {
        let log = format!("/mnt/beside/log-{seed}");
        eventually("the program completes its steps", || {
            let there = read_log(&log).done >= steps;
            assert!(there || !self.has_ended(), "ended: {}", self.so_far());
            there
        });
    }
}

/// The agent is killed while the program writes. The next run takes over and drains, and the first run reports a
/// possible loss.
fn killed_while_writing(name: &str, direct: &str, seeds: std::ops::Range<usize>) {
    let Some(scene) = prepare(name) else { return };
    for seed in seeds {
        let watch = Watch::new(&scene, seed);
        let mut running = begin(&scene, seed, &["--direct", direct]);
        running.gets_to(seed, 1 + seed * 37 % (STEPS / 2));
        scene.kill_agent();
        running.ends().exits(3).says(&["died"]);
        scene.drain_what_is_left().exits(0);
        watch.ends();
        compare(&scene, seed);
        scene.is_clean();
    }
}

#[test]
fn agent_killed_during_writes_loses_no_data() {
    killed_while_writing("killed_writing", "true", 1..5);
}

#[test]
fn agent_killed_during_mediated_writes_loses_no_data() {
    killed_while_writing("killed_writing_mediated", "false", 11..15);
}

/// The agent and its run are killed in the middle of a slow drain, several times. The next agent continues.
#[test]
fn agent_killed_during_the_drain_loses_no_data() {
    let Some(scene) = prepare("killed_draining") else {
        return;
    };
    for seed in 21..24 {
        let watch = Watch::new(&scene, seed);
        let slow = ["--drain-bytes-per-second-max", "2M"];
        let mut running = begin(&scene, seed, &slow);
        running.gets_to(seed, STEPS);
        for kill in 1..3 {
            let had = files_below(&scene.over).len();
            eventually("the drain continues", || files_below(&scene.over).len() >= had + kill || running.has_ended());
            running.kill();
            if scene.agent().is_some() {
                scene.kill_agent();
            }
            drop(running);
            running = scene.start(&slow, "true");
        }
        running.kill();
        if scene.agent().is_some() {
            scene.kill_agent();
        }
        scene.drain_what_is_left().exits(0);
        assert!(watch.ends() > 0, "the watch read no file");
        compare(&scene, seed);
        scene.is_clean();
    }
}

/// Only the run is killed: the agent drains the remaining files alone.
#[test]
fn agent_outlives_its_run() {
    let Some(scene) = prepare("orphaned_agent") else {
        return;
    };
    let seed = 31;
    let mut running = begin(&scene, seed, &[]);
    running.gets_to(seed, STEPS / 2);
    running.kill();
    drop(running);
    scene.await_no_agent();
    compare(&scene, seed);
    scene.is_clean();
}

/// The files that agents have in shared memory now.
fn shared_memory() -> Vec<PathBuf> {
    fs::read_dir("/dev/shm").unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// A run that has made a file and waits. A file `stop` in its directory ends it.
fn waiting(scene: &Scene) -> Running {
    let running = scene.start(&[], "echo x > file; touch /mnt/beside/ready; until [ -e stop ]; do sleep 0.02; done");
    eventually("the program runs", || Path::new("/mnt/beside/ready").exists());
    running
}

/// A run of the same user over another directory, with another state.
fn run_elsewhere(scene: &Scene) {
    scene.beside("elsewhere");
    let words = ["run", "--over", "/mnt/elsewhere", "--state", "/mnt/state-elsewhere", "--no-progress"];
    let tier = ["--tier", "slow=/mnt/tier-slow:32M", "--", "true"];
    Running::of(scene.surgetank(&[&words[..], &tier].concat())).ends().exits(0);
}

/// Regression: only a run of the same project removed these files; the tests alone left 40 of them.
#[test]
fn memory_of_a_killed_agent_is_removed_by_any_next_agent() {
    let Some(scene) = prepare("memory_left") else { return };
    let running = waiting(&scene);
    scene.kill_agent();
    running.kill();
    drop(running);
    assert!(shared_memory().len() >= 2, "the test proves nothing: {:?}", shared_memory());
    run_elsewhere(&scene);
    assert_eq!(shared_memory(), Vec::<PathBuf>::new());
    scene.drain_what_is_left().exits(0);
    scene.holds("file", b"x\n");
}

#[test]
fn memory_of_a_killed_agent_is_removed_by_the_doctor() {
    let Some(scene) = prepare("memory_doctor") else { return };
    let doctor = |words: &[&str]| Running::of(scene.surgetank(&[&["doctor"], words].concat())).ends().exits(0).stdout;
    let living = waiting(&scene);
    let used = shared_memory();
    assert!(doctor(&["--clean"]).contains("killed agents in /dev/shm: 0 files removed"));
    assert_eq!(shared_memory(), used);
    scene.kill_agent();
    living.kill();
    drop(living);
    let text = doctor(&[]);
    assert!(text.contains(&format!("killed agents in /dev/shm: {} files", used.len())), "{text}");
    assert!(text.contains("try: surgetank doctor --clean"), "{text}");
    assert_eq!(shared_memory(), used);
    let text = doctor(&["--clean"]);
    assert!(text.contains(&format!("{} files removed", used.len())), "{text}");
    assert_eq!(shared_memory(), Vec::<PathBuf>::new());
}

/// While its supervisor replaces a killed agent, the agent does not count as dead.
#[test]
fn memory_stays_while_the_agent_is_replaced() {
    let Some(scene) = prepare("memory_replaced") else { return };
    let running = waiting(&scene);
    let used = shared_memory();
    for stopped in [false, true] {
        let (supervisor, agent) = (scene.supervisor().unwrap(), scene.agent().unwrap());
        let signal = |pid: u32, signal| {
            // SAFETY: the process was started by this test.
            assert_eq!(unsafe { libc::kill(pid as i32, signal) }, 0);
        };
        if stopped {
            signal(supervisor, libc::SIGSTOP);
            signal(agent, libc::SIGKILL);
        } else {
            scene.replace_agent();
            scene.await_served();
        }
        run_elsewhere(&scene);
        assert_eq!(shared_memory(), used, "stopped: {stopped}");
        signal(supervisor, libc::SIGCONT);
    }
    scene.await_served();
    let stop = scene.run(&[], "cat file; touch stop").exits(0);
    stop.prints("x\n");
    running.ends().exits(0);
    assert_eq!(shared_memory(), Vec::<PathBuf>::new());
}

/// The files of one process, so that all of them are closed before the script marks its progress.
const LEAVES: &str = "mkdir -p sub; head -c 3000000 /dev/urandom > sub/one; head -c 2000000 /dev/urandom > two; cp sub/one two /mnt/beside; touch /mnt/beside/ready; sleep 100";
/// No file is drained during a test.
const SLOW: [&str; 2] = ["--drain-bytes-per-second-max", "1K"];

/// A run that wrote two files, and was killed with its agent before they were in the store.
fn killed_with_files(scene: &Scene, tiers: &[&str]) {
    let _ = fs::remove_file("/mnt/beside/ready");
    let mut options: Vec<&str> = SLOW.to_vec();
    for tier in tiers {
        options.extend(["--tier", tier]);
    }
    let mut running = scene.start(&options, LEAVES);
    eventually("the files are written", || {
        assert!(!running.has_ended(), "{}", running.so_far());
        Path::new("/mnt/beside/ready").exists()
    });
    running.kill();
    if scene.agent().is_some() {
        scene.kill_agent();
    }
    assert!(!scene.path("two").exists(), "drained before it was killed");
}

#[track_caller]
fn has_both(scene: &Scene) {
    for (name, copy) in [("sub/one", "one"), ("two", "two")] {
        scene.holds(name, &fs::read(Path::new("/mnt/beside").join(copy)).unwrap());
    }
    scene.is_clean();
}

/// The next start names its tiers in another order, so that each has the other one's position.
#[test]
fn tiers_in_another_order_lose_no_file() {
    let Some(scene) = Scene::new("reversed_tiers") else {
        return;
    };
    scene.beside("beside");
    let (a, b) = (scene.tmpfs("tier-a", 33), scene.tmpfs("tier-b", 33));
    let (a, b) = (format!("a={}:4M", a.display()), format!("b={}:32M", b.display()));
    killed_with_files(&scene, &[&a, &b]);
    scene.run(&["--tier", &b, "--tier", &a], "cmp two /mnt/beside/two").exits(0);
    has_both(&scene);
    for tier in ["/mnt/tier-a", "/mnt/tier-b"] {
        assert_eq!(files_below(Path::new(tier)), BTreeMap::new(), "left on {tier}");
    }
}

/// The next start has another tier, and the catalog alone names the one with the files.
#[test]
fn tier_no_longer_configured_is_drained() {
    let Some(scene) = Scene::new("other_tier") else {
        return;
    };
    scene.beside("beside");
    let (a, b) = (scene.tmpfs("tier-a", 33), scene.tmpfs("tier-b", 33));
    let (a, b) = (format!("a={}:32M", a.display()), format!("b={}:32M", b.display()));
    killed_with_files(&scene, &[&a]);
    scene.run(&["--tier", &b], "cmp sub/one /mnt/beside/one; cat two >> two.copy; mv two moved; mv moved two; echo more >> sub/one; echo more >> /mnt/beside/one").exits(0);
    has_both(&scene);
    assert_eq!(fs::read_dir("/mnt/tier-a").unwrap().count(), 0, "nothing is left on the old tier");
    scene.holds("two.copy", &fs::read("/mnt/beside/two").unwrap());
}

/// The tier with the files is unreachable for a while. Every start names the files, and the drain continues once the
/// tier is back.
#[test]
fn files_on_a_missing_tier_are_named_and_drained_later() {
    let Some(scene) = Scene::new("missing_tier") else {
        return;
    };
    scene.beside("beside");
    let (a, b) = (scene.ext4("tier-a", 64), scene.tmpfs("tier-b", 33));
    let (a, b) = (format!("a={}:32M", a.display()), format!("b={}:32M", b.display()));
    killed_with_files(&scene, &[&a]);
    succeed(Command::new("umount").arg("/mnt/tier-a"));
    for _ in 0..2 {
        // A read of unavailable data is an error, never an empty file.
        scene.run(&["--tier", &b], "! cat two > /mnt/beside/read; test -e sub/one").exits(3).says(&[
            "/mnt/tier-a",
            "sub/one",
            "two",
            "bring it back",
        ]);
        assert!(!scene.path("two").exists() && !scene.path("sub/one").exists());
    }
    // Whether mounted or not: an empty directory of the same path is not the tier.
    scene.run(&["--tier", &a], "true").exits(3).says(&["/mnt/tier-a", "sub/one", "two", "bring it back"]);
    scene.ext4_again("tier-a");
    scene.run(&["--tier", &b], "cmp two /mnt/beside/two").exits(0);
    has_both(&scene);
    succeed(Command::new("umount").arg("/mnt/tier-a"));
}

/// The state is lost, the files on the tier are not. The run names and keeps them, outside the programs' paths.
#[test]
fn files_without_their_state_are_named_and_kept() {
    let Some(scene) = Scene::new("lost_state") else {
        return;
    };
    scene.beside("beside");
    let a = format!("a={}:32M", scene.tmpfs("tier-a", 33).display());
    killed_with_files(&scene, &[&a]);
    fs::remove_dir_all(&scene.state).unwrap();
    scene.run(&["--tier", &a], "echo new > two; mkdir -p sub; echo new > sub/one").exits(3).says(&[
        "left by an agent whose state is gone",
        "/.surgetank-orphans/two",
        "/.surgetank-orphans/sub/one",
        "copy it by hand",
    ]);
    scene.holds("two", b"new\n");
    scene.holds("sub/one", b"new\n");
    // Again with other content: files that were set aside before stay.
    let kept = |name: &str| {
        let below = files_below(Path::new("/mnt/tier-a"));
        let mut found: Vec<_> = below.into_keys().filter(|path| path.to_string_lossy().contains(name)).collect();
        found.sort();
        found.into_iter().map(|path| fs::read(Path::new("/mnt/tier-a").join(path)).unwrap()).collect::<Vec<_>>()
    };
    let first = fs::read("/mnt/beside/two").unwrap();
    assert_eq!(kept(".surgetank-orphans/two"), std::slice::from_ref(&first));
    for name in ["two", "sub/one"] {
        fs::remove_file(scene.path(name)).unwrap();
    }
    scene.run(&["--tier", &a], "true").exits(0);
    killed_with_files(&scene, &[&a]);
    fs::remove_dir_all(&scene.state).unwrap();
    scene.run(&["--tier", &a], "true").exits(3);
    let both = kept(".surgetank-orphans/two");
    assert!(both.len() == 2 && both.contains(&first), "{} files", both.len());
    assert!(both.contains(&fs::read("/mnt/beside/two").unwrap()));
}

/// The copy was staged beside the directory that was yet to be made. Regression: the next agent looked for it in that
/// directory, did not find it, and took it for published. (The store's file had the length and time of its
/// replacement.)
#[test]
fn copy_staged_beside_its_new_directory_is_published() {
    let Some(mut scene) = Scene::new("copy_elsewhere") else { return };
    scene.tier("fast", 32);
    scene.beside("beside");
    fs::create_dir(scene.path("old")).unwrap();
    for (file, text) in [(scene.path("old/file"), "before"), ("/mnt/beside/file".into(), "after!")] {
        fs::write(&file, text).unwrap();
        succeed(Command::new("touch").args(["-d", "@1000000000"]).arg(&file));
    }
    // While the first file waits to be published, the drain copies the next ones: the new directory is not in the
    // store yet.
    let script = "echo 1 > first; sleep 1.5; mkdir new; mv old/file new/file; cp -p /mnt/beside/file new/file; sleep 4";
    let mut command = scene.run_command(&["--quiet-period", "0s"], script);
    command.env("SURGETANK_HOLD", "drain.compared:4000").env("SURGETANK_CRASH", "drain.renamed:1");
    Running::of(command).ends().exits(0);
    assert!(scene.log().contains("another one takes over"), "{}", scene.log());
    scene.holds("new/file", b"after!");
    scene.is_clean();
}

/// A writable file of another user is overwritten in place, so that the owner stays the same. Regression: after a
/// kill in the middle the next agent took the partial file for the other user's change, and kept both versions.
fn killed_over_another_users_file(name: &str, alone: bool) {
    let Some(mut scene) = Scene::of_user(name) else { return };
    scene.tier("fast", 32);
    let theirs = scene.path("theirs");
    fs::write(&theirs, "their content").unwrap();
    std::os::unix::fs::chown(&theirs, Some(0), Some(crate::scene::TEAM)).unwrap();
    fs::set_permissions(&theirs, fs::Permissions::from_mode(0o664)).unwrap();
    let mut command = scene.run_command(&["--quiet-period", "0s"], "cat theirs; echo ours >theirs");
    command.env("SURGETANK_CRASH", "store.overwriting:1");
    if !alone {
        command.env("SURGETANK_CRASH_SUPERVISOR", "1");
    }
    let ended = Running::of(command).ends().exits(if alone { 0 } else { 3 });
    assert!(!ended.stderr.contains("another client"), "{}", ended.stderr);
    assert!(scene.log().contains("took up what an earlier agent left"), "{}", scene.log());
    let ended = scene.drain_what_is_left().exits(0);
    assert!(!ended.stderr.contains("another client"), "{}", ended.stderr);
    scene.holds("theirs", b"ours\n");
    assert_eq!(fs::metadata(&theirs).unwrap().uid(), 0);
    assert_eq!(scene.store_files().len(), 1, "{:?}", scene.store_files());
}

/// Regression: after a kill during the overwrite the next agent took the partial file for the other user's own
/// version.
#[test]
fn half_written_file_in_place_is_recognised() {
    killed_over_another_users_file("killed_over_theirs", true);
}

/// Regression: the same, with the next run after the supervisor's death.
#[test]
fn half_written_file_in_place_is_recognised_by_the_next_run() {
    killed_over_another_users_file("killed_over_theirs_both", false);
}
