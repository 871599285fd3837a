//! A store with failures while programs work. The programs continue in the tiers at their speed. `status` names the
//! start and the cause. The number of tries is limited. When the store recovers, every file reaches it, complete. No
//! corrupt file is ever visible under a final name. When no room is left anywhere, the writer waits for it.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

mod half;
mod lost;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::scene::server::{Server, faults, faults_hit};
use crate::scene::{Ended, MIB, Running, Scene, eventually, noise, same_bytes};
use serde_json::Value;

/// Scripts and the test wait for each other by files beside the directory.
const TURNS: &str =
    "mark() { touch /mnt/beside/$1; }; await() { while ! test -e /mnt/beside/$1; do sleep 0.01; done; }\n";
/// The limit for an outage of any length that a test may have: each wait is at most twice the one before, until 5 s.
const FAILURES_MAX: u64 = 40;

struct Stage {
    // Dropped before the scene: its mounts must end before the scene's processes.
    server: Option<Server>,
    scene: Scene,
}

/// A store behind a server, a tier of `tier_mib` MiB, and 64 MiB to write.
fn stage(name: &str, tier_mib: u64) -> Option<Stage> {
    Scene::new(name).map(|scene| set(scene, tier_mib))
}

fn set(mut scene: Scene, tier_mib: u64) -> Stage {
    scene.tier("fast", tier_mib);
    scene.beside("beside");
    scene.beside("behind");
    let store = scene.beside("store");
    fs::write("/mnt/source", noise(5, 64 * MIB)).unwrap();
    faults("");
    Stage { server: Some(Server::start(&store, &[])), scene }
}

fn mark(word: &str) {
    fs::write(Path::new("/mnt/beside").join(word), "").unwrap();
}

fn is_marked(word: &str) -> bool {
    Path::new("/mnt/beside").join(word).exists()
}

fn behind(name: &str) -> PathBuf {
    Path::new("/mnt/behind").join(name)
}

impl Stage {
    fn options<'a>(options: &[&'a str]) -> Vec<&'a str> {
        [&["--store", "/mnt/store"], options].concat()
    }

    fn start(&self, options: &[&str], script: &str) -> Running {
        self.scene.start(&Self::options(options), &format!("{TURNS}{script}"))
    }

    fn run(&self, options: &[&str], script: &str) -> Ended {
        self.scene.run(&Self::options(options), &format!("{TURNS}{script}"))
    }

    fn status(&self) -> Value {
        self.scene.verb("status", &["--json", "/mnt/project"]).exits(0).json()[0].take()
    }

    fn status_text(&self) -> String {
        self.scene.verb("status", &["/mnt/project"]).exits(0).stdout
    }

    /// Waits until `status` reports that the drain is paused, for this reason.
    #[track_caller]
    fn is_paused(&self, why: &str) {
        eventually("status reports why the drain is paused", || {
            let status = self.status();
            status["drain"]["paused_since_unix_seconds"].is_i64()
                && status["troubles"].as_array().unwrap().iter().any(|trouble| {
                    trouble["reason"].as_str().unwrap().contains(why)
                        && trouble["place"].as_str().unwrap().contains("/mnt/store")
                        && trouble["since_unix_seconds"].as_i64().unwrap() > 0
                })
        });
        let text = self.status_text();
        assert!(text.contains("drain: paused for ") && text.contains("trouble for ") && text.contains(why), "{text}");
    }

    /// `status` reports the pause for this long, with an unchanged start.
    #[track_caller]
    fn stays_paused(&self, longer: Duration) {
        let since = |status: &Value| status["drain"]["paused_since_unix_seconds"].clone();
        let (first, until) = (since(&self.status()), Instant::now() + longer);
        while Instant::now() < until {
            std::thread::sleep(Duration::from_millis(500));
            let status = self.status();
            assert_eq!(since(&status), first, "{status}");
            assert!(!status["troubles"].as_array().unwrap().is_empty(), "{status}");
        }
    }

    /// Waits until every file is durable, not only in place.
    #[track_caller]
    fn is_idle(&self) {
        eventually("all files are durable", || {
            let queue = &self.status()["queue"];
            queue["files"] == 0 && queue["operations"] == 0
        });
    }

    #[track_caller]
    fn failures(&self) -> u64 {
        self.status()["drain"]["failures"].as_u64().unwrap()
    }

    #[track_caller]
    fn is_clean(&self) {
        let left: Vec<_> = crate::scene::files_below(Path::new("/mnt/behind"))
            .into_keys()
            .filter(|path| crate::scene::is_ours(path))
            .collect();
        assert!(left.is_empty(), "left in the store: {left:?}");
        assert_eq!(self.scene.tier_files(), Vec::<PathBuf>::new());
    }
}

#[track_caller]
fn holds(name: &str, bytes: &[u8]) {
    same_bytes(name, &fs::read(behind(name)).unwrap_or_else(|why| panic!("{name}: {why}")), bytes);
}

/// `out/part0` to `out/part5` and `out/last`.
#[track_caller]
fn all_is_there() {
    let bytes = noise(5, 64 * MIB);
    for (i, part) in bytes.chunks(4 << 20).take(8).enumerate() {
        match i {
            6 => assert!(!behind("out/part6").exists()),
            7 => holds("out/last", part),
            _ => holds(&format!("out/part{i}"), part),
        }
    }
    holds("out/before", b"before\nand after\n");
    assert!(!behind("out/part7").exists());
}

/// A program's work on files in the tiers.
const WORK: &str = "
    for i in 0 1 2 3 4 5 6 7; do dd if=/mnt/source of=out/part$i bs=4M count=1 skip=$i status=none; done
    mv out/part7 out/last; rm out/part6; chmod 640 out/part1
    cmp -n 4194304 out/part0 /mnt/source; stat -c %s out/last; ls out >/mnt/beside/listed
    echo and after >>out/before; cat out/before; mkdir out/deeper; echo deep >out/deeper/file; ln -s last out/link";

/// The store fails while a program works, and recovers while it still runs.
fn outage(name: &str, wrong: &str, why: &str, options: &[&str]) {
    if let Some(stage) = stage(name, 96) {
        outage_on(&stage, wrong, why, options, Duration::ZERO);
    }
}

/// The outage lasts SURGETANK_OUTAGE_SECONDS: minutes in `make test-full`.
fn long_outage(name: &str, wrong: &str, why: &str) {
    let seconds = std::env::var("SURGETANK_OUTAGE_SECONDS").map_or(2, |text| text.parse().unwrap());
    if let Some(stage) = stage(name, 96) {
        outage_on(&stage, wrong, why, &[], Duration::from_secs(seconds));
    }
}

fn outage_on(stage: &Stage, wrong: &str, why: &str, options: &[&str], longer: Duration) {
    let script = format!("mkdir out; echo before >out/before; mark began; await away\n{WORK}\nmark worked; await end");
    let running = stage.start(options, &script);
    eventually("the first file is drained", || is_marked("began") && behind("out/before").exists());
    // The kernel caches the attributes of the store's root for a second.
    std::thread::sleep(Duration::from_millis(1100));
    faults(wrong);
    mark("away");
    eventually("the program completes its work without the store", || is_marked("worked"));
    assert!(!behind("out/part0").exists());
    stage.is_paused(why);
    stage.stays_paused(longer);
    let failures = stage.failures();
    assert!(failures <= FAILURES_MAX + longer.as_secs() / 4, "{failures} tries");
    faults("");
    eventually("the drain resumes", || stage.status()["drain"]["paused_since_unix_seconds"].is_null());
    mark("end");
    running.ends().exits(0);
    all_is_there();
    assert_eq!(fs::metadata(behind("out/part1")).unwrap().mode() & 0o777, 0o640);
    stage.is_clean();
}

#[test]
fn store_with_io_errors_pauses_the_drain() {
    outage("fault_eio", "all EIO", "failed to read or write", &[]);
}

#[test]
fn store_full_for_a_while_pauses_the_drain() {
    outage("fault_enospc", "write,create,mkdir ENOSPC", "full", &[]);
}

#[test]
fn store_read_only_for_a_while_pauses_the_drain() {
    outage("fault_erofs", "change EROFS", "read-only", &[]);
}

#[test]
fn store_with_stale_handles_pauses_the_drain() {
    outage("fault_estale", "all ESTALE", "no longer knows", &[]);
}

#[test]
fn store_that_times_out_pauses_the_drain() {
    long_outage("fault_etimedout", "all ETIMEDOUT", "does not answer");
}

/// Like a hard mount without its server: every call hangs in the kernel. Regression: files on the tiers were
/// unreachable as soon as the agent had to query the root's attributes.
#[test]
fn hanging_store_leaves_the_tiers_usable() {
    long_outage("fault_hang", "all hang", "does not answer");
}

/// The same for programs at the mount, with mediated reads and writes.
#[test]
fn hanging_store_leaves_the_tiers_usable_through_the_mount() {
    outage("fault_hang_mount", "all hang", "does not answer", &["--no-preload", "--direct", "false"]);
}

/// For an unprivileged user the agent checks permissions itself. Regression: it queried the store for them.
#[test]
fn hanging_store_leaves_the_tiers_usable_unprivileged() {
    if let Some(scene) = Scene::of_user("fault_hang_user") {
        outage_on(&set(scene, 96), "all hang", "does not answer", &[], Duration::ZERO);
    }
}

/// A program that requests a name that only the store has waits, and no other program does.
#[test]
fn store_waiters_do_not_block_other_programs() {
    let Some(stage) = stage("fault_hang_aside", 96) else { return };
    fs::create_dir(behind("there")).unwrap();
    fs::write(behind("there/input"), "input").unwrap();
    let script = format!(
        "mkdir out; echo before >out/before; mark began; await away
         cat there/input >/mnt/beside/input & ls there >/mnt/beside/names &
         # More than the mount has threads.
         for i in $(seq 80); do env -u LD_PRELOAD cat there/input >/dev/null & done
         await asked
         {WORK}
         mark worked; wait; mark over"
    );
    let running = stage.start(&[], &script);
    eventually("the first file is drained", || is_marked("began") && behind("out/before").exists());
    faults("all hang");
    mark("away");
    eventually("all readers wait", || stage.scene.processes("cat") > 80);
    mark("asked");
    eventually("the other programs complete their work", || is_marked("worked"));
    assert!(!is_marked("over"));
    assert_eq!(fs::read("/mnt/beside/input").unwrap_or_default(), b"");
    faults("");
    running.ends().exits(0);
    assert_eq!(fs::read("/mnt/beside/input").unwrap(), b"input");
    assert_eq!(fs::read("/mnt/beside/names").unwrap(), b"input\n");
    all_is_there();
}

/// In the final drain the agent gives up a store that does not answer, like one that fails. Regression: the drain
/// waited indefinitely, and the agent could not end.
#[test]
fn hanging_store_in_the_final_drain_is_given_up() {
    let Some(stage) = stage("fault_hang_last", 96) else { return };
    let script = format!("mkdir out; echo before >out/before; mark began; await away\n{WORK}");
    let running = stage.start(&["--retry", "2s"], &script);
    eventually("the first file is drained", || is_marked("began") && behind("out/before").exists());
    faults("all hang");
    mark("away");
    running.ends().exits(3).says(&["not durable", "does not answer", "/mnt/store", "safe at", "/mnt/tier-fast"]);
    faults("");
    stage.run(&[], "cat out/before").exits(0).prints("before\nand after\n");
    all_is_there();
    stage.is_clean();
}

/// If the store does not recover, the exit code reports the remaining files, and the next run drains them.
#[test]
fn store_that_stays_away_leaves_files_safe_on_the_tier() {
    let Some(stage) = stage("fault_stays", 96) else { return };
    let script = format!("mkdir out; echo before >out/before; mark began; await away\n{WORK}");
    let running = stage.start(&["--retry", "1s"], &script);
    eventually("the first file is drained", || is_marked("began") && behind("out/before").exists());
    faults("change ETIMEDOUT");
    mark("away");
    running.ends().exits(3).says(&["not durable", "does not answer", "/mnt/store", "safe at", "/mnt/tier-fast"]);
    faults("");
    stage.run(&[], "true").exits(0);
    all_is_there();
    stage.is_clean();
}

/// The file was renamed into place, the sync of its directory failed, a program wrote the file again, and the agent
/// ended. Regression: the next agent took its own copy for another client's and kept both.
#[test]
fn copy_whose_sync_failed_is_replaced_without_conflict() {
    let Some(stage) = stage("fault_doubtful", 96) else { return };
    let running = stage.start(
        &["--retry", "1s"],
        "mkdir out; mark began; await away; echo before >out/before; await seen; echo and after >>out/before",
    );
    eventually("the directory is drained", || is_marked("began") && behind("out").exists());
    stage.is_idle();
    faults("syncdir ETIMEDOUT");
    mark("away");
    eventually("the file is in place", || behind("out/before").exists());
    eventually("the sync of the directory fails", || stage.failures() > 0);
    faults("change ETIMEDOUT");
    mark("seen");
    running.ends().exits(3).says(&["out/before"]);
    faults("");
    stage.run(&[], "cat out/before").exits(0).prints("before\nand after\n");
    holds("out/before", b"before\nand after\n");
    stage.is_clean();
}

/// Regression: after a rename into place and a failed sync the file was refused for good, because its temporary no
/// longer existed.
#[test]
fn failed_directory_sync_is_retried() {
    let Some(stage) = stage("fault_syncdir", 96) else { return };
    fs::write(behind("one"), "old").unwrap();
    fs::hard_link(behind("one"), behind("two")).unwrap();
    let running = stage.start(
        &["--copy-up-bytes-max", "1M"],
        "mkdir out; echo x >out/moved; echo y >out/removed; cat one two; mark began; await away
         echo new >out/new; echo newer >one; mv out/moved out/renamed; rm out/removed; mkdir out/dir; ln out/new out/twice
         ln -s new out/link; chmod 600 out/renamed; mark worked; await end",
    );
    eventually("the first files are drained", || is_marked("began") && behind("out/removed").exists());
    stage.is_idle();
    faults("syncdir EIO");
    mark("away");
    eventually("the program completes its work", || is_marked("worked"));
    stage.is_paused("failed to read or write");
    eventually("the drain tries again", || stage.failures() >= 3);
    faults("");
    eventually("the drain continues", || stage.status()["queue"]["files"] == 0);
    mark("end");
    running.ends().exits(0);
    for (name, bytes) in [("out/new", "new\n"), ("out/renamed", "x\n"), ("out/twice", "new\n"), ("one", "newer\n")] {
        holds(name, bytes.as_bytes());
    }
    holds("two", b"newer\n");
    assert!(behind("out/dir").is_dir() && behind("out/link").is_symlink());
    assert!(!behind("out/removed").exists() && !behind("out/moved").exists());
    stage.is_clean();
}

/// Regression: two hundred files were all retried, each with all of its bytes.
#[test]
fn outage_limits_the_number_of_tries() {
    let Some(stage) = stage("fault_many", 96) else { return };
    let running = stage.start(
        &["--unordered"],
        "mkdir out; echo before >out/before; mark began; await away
         for i in $(seq 200); do echo $i >out/$i; done; mark worked; await end",
    );
    eventually("the first file is drained", || is_marked("began") && behind("out/before").exists());
    faults("write EIO");
    mark("away");
    eventually("all files are written", || is_marked("worked"));
    stage.is_paused("failed to read or write");
    eventually("the drain has tried several times", || stage.failures() >= 8);
    assert!(stage.failures() <= FAILURES_MAX, "{} tries", stage.failures());
    faults("");
    mark("end");
    running.ends().exits(0);
    for i in 1..=200 {
        holds(&format!("out/{i}"), format!("{i}\n").as_bytes());
    }
    stage.is_clean();
}

/// Copies come out corrupt, while a thread checks all files under their final names. `least`: how many the comparison
/// must find.
fn corrupt(name: &str, wrong: &str, verify: &str, least: u64) {
    let Some(stage) = stage(name, 96) else { return };
    let bytes = noise(5, 64 * MIB);
    let expected = |name: &str| match name {
        "large" => &bytes[..20 << 20],
        small => {
            let at = small.parse::<usize>().unwrap() << 14;
            &bytes[at..at + (16 << 10)]
        }
    };
    let over = AtomicBool::new(false);
    let ended = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                // Through the path of another thread's mount namespace, and only existing files.
                for entry in fs::read_dir("/mnt/behind/out").into_iter().flatten().flatten() {
                    let name = entry.file_name().into_string().unwrap();
                    if !name.starts_with(".surgetank-") {
                        same_bytes(&name, &fs::read(entry.path()).unwrap(), expected(&name));
                    }
                }
            }
        });
        faults(wrong);
        let script = "mkdir out
            for i in $(seq 0 29); do dd if=/mnt/source of=out/$i bs=16k count=1 skip=$i status=none; done
            dd if=/mnt/source of=out/large bs=1M count=20 status=none";
        let ended = stage.run(&["--verify", verify, "--json", "/mnt/beside/report"], script);
        over.store(true, Ordering::Relaxed);
        ended
    });
    let ended = ended.exits(0);
    assert!(faults_hit() > 0, "{wrong}: the fault never occurred");
    let report: Value = serde_json::from_slice(&fs::read("/mnt/beside/report").unwrap()).unwrap();
    let found = report["summary"]["drain"]["corrupt"].as_u64().unwrap();
    assert!(found >= least, "{found}: {report}");
    if least > 0 {
        assert!(ended.stderr.contains("copies came out wrong"), "{}", ended.stderr);
    }
    for entry in fs::read_dir("/mnt/behind/out").unwrap().flatten() {
        let name = entry.file_name().into_string().unwrap();
        same_bytes(&name, &fs::read(entry.path()).unwrap(), expected(&name));
    }
    assert_eq!(fs::read_dir("/mnt/behind/out").unwrap().count(), 31);
    stage.is_clean();
}

#[test]
fn corrupt_copies_of_a_batch_are_found_and_made_again() {
    corrupt("fault_corrupt_cache", "write corrupt 5", "cache", 5);
}

#[test]
fn corrupt_copies_are_found_when_read_back_from_the_device() {
    corrupt("fault_corrupt_reread", "write corrupt 5", "reread", 5);
}

/// fsync fails once and the kernel drops the unwritten data, as Linux does.
#[test]
fn bytes_dropped_by_a_sync_are_found() {
    corrupt("fault_fsync", "fsync drop 4", "cache", 0);
}

#[test]
fn short_writes_are_completed() {
    corrupt("fault_short", "write short 50", "cache", 0);
}

/// A tier of 16 MiB, 48 to write, and a store that refuses changes. Only files that the store has make room. The
/// writer waits, and continues when the store recovers. Creating and copying up wait, too.
#[test]
fn writer_waits_while_no_room_is_left() {
    let Some(stage) = stage("room_in_time", 16) else { return };
    fs::write(behind("log"), noise(9, 300_000)).unwrap();
    let running = stage.start(
        &["--wait-for-room", "10m"],
        "mkdir out; for i in 0 1; do dd if=/mnt/source of=out/$i bs=4M count=1 skip=$i status=none; done
         mark began; await away
         for i in 2 3 4 5 6 7 8 9 10 11; do dd if=/mnt/source of=out/$i bs=4M count=1 skip=$i status=none; done
         echo more >>log; cat out/0 | cmp -n 4194304 - /mnt/source",
    );
    eventually("the first files are drained", || is_marked("began") && behind("out/1").exists());
    faults("change EIO");
    mark("away");
    let room = |status: &Value, words: &[&str]| {
        status["troubles"].as_array().unwrap().iter().any(|trouble| {
            let text = trouble.to_string();
            words.iter().all(|word| text.contains(word))
        })
    };
    eventually("status names the file that waits for room", || {
        room(&stage.status(), &["out/", "a writer waits", "no room is left anywhere", "fast", "/mnt/store"])
    });
    eventually("the run reports it too", || running.says("a writer waits"));
    faults("");
    let ended = running.ends().exits(0).says(&["out/", "a writer waits", "no room is left anywhere"]);
    assert!(!ended.stderr.contains("a writer got an error"), "{}", ended.stderr);
    let bytes = noise(5, 64 * MIB);
    for (i, part) in bytes.chunks(4 << 20).take(12).enumerate() {
        holds(&format!("out/{i}"), part);
    }
    holds("log", &[&noise(9, 300_000)[..], b"more\n"].concat());
    stage.is_clean();
}

/// No room becomes free: the writer gets the error. The report names the file, the tiers, the store, and the cause.
#[test]
fn writer_without_room_fails_after_its_wait() {
    let Some(stage) = stage("room_too_late", 8) else { return };
    let running = stage.start(
        &["--wait-for-room", "1s", "--json", "/mnt/beside/report"],
        "mkdir out; echo before >out/before; mark began; await away
         ! dd if=/mnt/source of=out/large bs=1M 2>/mnt/beside/errors
         grep -q 'No space left' /mnt/beside/errors; mark refused; await end; rm out/large",
    );
    eventually("the first file is drained", || is_marked("began") && behind("out/before").exists());
    faults("change EIO");
    mark("away");
    eventually("the writer is refused", || is_marked("refused"));
    let text = stage.status_text();
    for word in ["out/large", "a writer got an error", "no room is left anywhere", "fast", "/mnt/store"] {
        assert!(text.contains(word), "{word}: {text}");
    }
    faults("");
    mark("end");
    running.ends().exits(0).says(&["out/large: no room is left anywhere", "(fast)", "/mnt/store"]);
    let report: Value = serde_json::from_slice(&fs::read("/mnt/beside/report").unwrap()).unwrap();
    assert_eq!(report["summary"]["no_room"]["first"][0]["path"], "out/large");
    holds("out/before", b"before\n");
    assert!(!behind("out/large").exists());
}

/// Ctrl-C reaches a writer that waits for room.
#[test]
fn writer_waiting_for_room_can_be_interrupted() {
    let Some(stage) = stage("room_interrupted", 8) else { return };
    let running = stage.start(
        &["--wait-for-room", "10h"],
        "mkdir out; echo before >out/before; mark began; await away
         dd if=/mnt/source of=out/large bs=1M 2>/dev/null & echo $! >/mnt/beside/pid
         await kill; kill $!; wait $! || true; mark killed; await end; rm out/large",
    );
    eventually("the first file is drained", || is_marked("began") && behind("out/before").exists());
    faults("change EIO");
    mark("away");
    eventually("the writer waits", || stage.status_text().contains("a writer waits"));
    mark("kill");
    eventually("the writer ends", || is_marked("killed"));
    eventually("no program waits any more", || !stage.status_text().contains("a writer waits"));
    faults("");
    mark("end");
    running.ends().exits(0);
}

/// The store's server is killed during the drain and started again. A server that disappears causes errors of its
/// own.
#[test]
fn restarted_server_gets_all_files() {
    let Some(mut stage) = stage("fault_restart", 96) else { return };
    let script = format!("mkdir out; echo before >out/before; mark began; await away\n{WORK}\nmark worked; await end");
    let running = stage.start(&["--retry", "1s"], &script);
    eventually("the first file is drained", || is_marked("began") && behind("out/before").exists());
    drop(stage.server.take());
    mark("away");
    eventually("the program completes its work without the store", || is_marked("worked"));
    stage.is_paused("mounted");
    mark("end");
    running.ends().exits(3).says(&["not durable", "mounted", "safe at", "/mnt/tier-fast"]);
    crate::scene::server::unmount(Path::new("/mnt/store"));
    stage.server = Some(Server::start(Path::new("/mnt/store"), &[]));
    stage.run(&[], "true").exits(0);
    all_is_there();
    stage.is_clean();
}
