//! The end of a job: the scheduler announces it, or sends SIGTERM and kills a little later, and wipes the node's
//! local storage. Then every file that was reported durable is in the store. The next run finds each other file, or
//! names it as lost.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::scene::{MIB, Running, Scene, eventually, noise};
use serde_json::Value;

fn prepare(name: &str) -> Option<Scene> {
    let mut scene = Scene::new(name)?;
    scene.beside("beside");
    scene.tier("fast", 96);
    fs::write("/mnt/source", noise(7, 32 * MIB)).unwrap();
    Some(scene)
}

fn signal(pid: u32, number: i32) {
    // SAFETY: the process was started by this test.
    assert_eq!(unsafe { libc::kill(pid as i32, number) }, 0);
}

/// Waits until a program creates this file, which marks its progress.
#[track_caller]
fn await_mark(running: &mut Running, what: &str) {
    eventually(what, || {
        assert!(!running.has_ended(), "{}", running.so_far());
        is_marked(what)
    });
}

fn is_marked(what: &str) -> bool {
    Path::new("/mnt/beside").join(what).exists()
}

fn mark(what: &str) {
    fs::write(Path::new("/mnt/beside").join(what), "").unwrap();
}

fn part(number: usize, mib: usize) -> Vec<u8> {
    static SOURCE: OnceLock<Vec<u8>> = OnceLock::new();
    SOURCE.get_or_init(|| noise(7, 32 * MIB))[(number * mib) << 20..((number + 1) * mib) << 20].to_vec()
}

/// The note of undrained files that an agent writes while there is time.
fn undrained(scene: &Scene) -> Option<Value> {
    let places = fs::read_dir(&scene.state).ok()?.flatten();
    places.filter_map(|place| serde_json::from_slice(&fs::read(place.path().join("undrained.json")).ok()?).ok()).next()
}

fn names_in(verdict: &Value) -> Vec<String> {
    let list = verdict["not_durable"]["first"].as_array().cloned().unwrap_or_default();
    list.iter().map(|one| one["path"].as_str().unwrap().to_owned()).collect()
}

/// Kills every process of the job, as a scheduler does.
#[track_caller]
fn kill_all(scene: &Scene, running: Running) {
    running.kill();
    if scene.agent().is_some() || scene.supervisor().is_some() {
        scene.kill_agent();
    }
    drop(running);
}

/// Files beyond the amount that can be drained in time are written directly to the store.
fn beyond_what_can_be_drained(name: &str, door: &[&str]) {
    let Some(scene) = prepare(name) else { return };
    let options = [&["--deadline", "14s", "--drain-bytes-per-second-max", "2M"], door].concat();
    let script = "for i in 0 1 2 3 4 5 6 7; do dd if=/mnt/source of=part$i bs=4M count=1 skip=$i status=none
            getfattr -n user.surgetank.location --only-values part$i; echo; done
        /mnt/surgetank status --state /mnt/state --json . > /mnt/beside/status
        /mnt/surgetank status --state /mnt/state . > /mnt/beside/status.text";
    // (13 s × 2 MiB/s × ¾ = 19 MiB: four or five of the eight files fit the remaining time.)
    let ended = scene.run(&options, script).exits(0);
    let in_store: Vec<bool> = ended.stdout.lines().map(|line| line.starts_with("store:")).collect();
    assert_eq!(in_store.len(), 8, "{}", ended.stdout);
    assert!(!in_store[0] && !in_store[1] && in_store[7], "{}", ended.stdout);
    for number in 0..8 {
        scene.holds(&format!("part{number}"), &part(number, 4));
    }
    scene.is_clean();
    let status: Value = serde_json::from_slice(&fs::read("/mnt/beside/status").unwrap()).unwrap();
    let outlook = &status[0]["deadline"];
    assert_eq!(outlook["from"], "--deadline", "{status}");
    assert!(
        outlook["left_seconds"].as_u64().unwrap() <= 14 && outlook["bytes_per_second"].as_u64().unwrap() <= 2 * MIB
    );
    let text = fs::read_to_string("/mnt/beside/status.text").unwrap();
    assert!(text.contains("the job ends in ") && text.contains("can be drained by then"), "{text}");
}

#[test]
fn undrainable_rest_is_written_straight_to_the_store() {
    beyond_what_can_be_drained("deadline_store", &["--no-preload"]);
}

#[test]
fn undrainable_rest_is_written_straight_with_the_shim() {
    beyond_what_can_be_drained("deadline_store_shim", &[]);
}

/// Near the job's end a file waits neither for its quiet period nor for the final drain.
#[test]
fn drain_near_the_end_skips_the_quiet_period() {
    let Some(scene) = prepare("deadline_hurry") else { return };
    let options = ["--quiet-period", "1h"];
    let script = "mkdir .git; echo last > .git/last; echo quiet > quiet; touch /mnt/beside/written
        until [ -e /mnt/beside/seen ]; do sleep 0.02; done";
    let mut command = scene.run_command(&options, script);
    let end = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs() + 8;
    command.env("SLURM_JOB_END_TIME", end.to_string());
    let mut running = Running::of(command);
    await_mark(&mut running, "written");
    eventually("all is in the store, and the command continues", || {
        assert!(!running.has_ended(), "{}", running.so_far());
        scene.path("quiet").exists() && scene.path(".git/last").exists()
    });
    // Files written from then on are drained at once.
    eventually("the last call", || scene.log().contains("says SLURM_JOB_END_TIME: no new run is admitted"));
    mark("seen");
    running.ends().exits(0).says(&["the job ends at", "says SLURM_JOB_END_TIME", "everything is due"]);
    scene.is_clean();
}

/// The store is full at the end of the job. The run names the remaining files and records them, and the next run
/// drains them.
#[test]
fn undrained_files_at_the_end_are_named() {
    let Some(scene) = prepare("deadline_left") else { return };
    scene.tmpfs("project", 12);
    fs::write(scene.path("ballast"), vec![1; 10 << 20]).unwrap();
    let script = "dd if=/mnt/source of=fits bs=1M count=1 status=none
        dd if=/mnt/source of=left bs=4M count=1 status=none; touch /mnt/beside/written";
    // (While a test waits, a command that waits for another event would not end.)
    let ended = scene.run(&["--deadline", "6s", "--retry", "1h"], script).exits(3);
    ended.says(&["not durable: 1", "left", "safe at /mnt/tier-fast", "the job ends before", "scavenge"]);
    // The agent continues until it is killed, and has recorded the remaining files.
    eventually("the remaining files are recorded", || {
        undrained(&scene).is_some_and(|left| names_in(&left) == ["left"])
    });
    // After the announced end no run is admitted, because the job's end would interrupt it.
    scene.kill_agent();
    fs::remove_file(scene.path("ballast")).unwrap();
    scene.run(&["--deadline", "1s"], "true").exits(1).says(&["the job ends at", "--deadline none"]);
    scene.run(&["--deadline", "none"], "true").exits(0).says(&["an earlier agent had to leave 1 file(s)"]);
    scene.holds("left", &part(0, 4));
    scene.is_clean();
    assert_eq!(undrained(&scene), None);
}

/// The run passes SIGTERM to the command. While the command ends, its files so far are drained.
#[test]
fn sigterm_to_the_run_hastens_the_drain_and_is_passed_on() {
    let Some(scene) = prepare("sigterm_run") else { return };
    let script = "mkdir .git; echo early > .git/early; echo early > early
        trap 'echo late > late; until [ -e /mnt/beside/seen ]; do sleep 0.02; done; echo last > last; exit 7' TERM
        touch /mnt/beside/written; while :; do sleep 0.02; done";
    let mut running = scene.start(&["--quiet-period", "1h"], script);
    await_mark(&mut running, "written");
    assert!(!scene.path("early").exists());
    signal(running.pid(), libc::SIGTERM);
    eventually("the written files are in the store before the command ends", || {
        assert!(!running.has_ended(), "{}", running.so_far());
        ["early", ".git/early", "late"].iter().all(|name| scene.path(name).exists())
    });
    mark("seen");
    running.ends().exits(7);
    scene.holds("last", b"last\n");
    scene.is_clean();
}

const PARTS: usize = 32;

/// Sends SIGTERM to all processes of the job, then SIGKILL in the middle of the drain. Returns the files that `wait`
/// reported as durable.
fn terminated_and_killed(scene: &Scene, tier: &[&str]) -> BTreeMap<String, Vec<u8>> {
    let slow = [&["--drain-bytes-per-second-max", "4M", "--quiet-period", "1h"], tier].concat();
    let script = format!(
        "for i in $(seq 0 {}); do dd if=/mnt/source of=part$i bs=1M count=1 skip=$i status=none; done
        trap 'exit 0' TERM; touch /mnt/beside/written; while :; do sleep 0.02; done",
        PARTS - 1
    );
    let mut running = scene.start(&slow, &script);
    await_mark(&mut running, "written");
    for pid in [running.pid(), scene.supervisor().unwrap(), scene.agent().unwrap()] {
        signal(pid, libc::SIGTERM);
    }
    eventually("the remaining files are recorded", || undrained(scene).is_some_and(|left| !names_in(&left).is_empty()));
    eventually("a part is durable", || scene.path("part2").exists());
    let mut durable = BTreeMap::new();
    for number in 0..3 {
        scene.verb("wait", &[scene.path(&format!("part{number}")).to_str().unwrap()]).exits(0);
        durable.insert(format!("part{number}"), part(number, 1));
    }
    kill_all(scene, running);
    assert!(
        !scene.path(&format!("part{}", PARTS - 1)).exists(),
        "all files were drained before the kill: the test proves nothing"
    );
    durable
}

fn all_parts() -> BTreeMap<String, Vec<u8>> {
    (0..PARTS).map(|number| (format!("part{number}"), part(number, 1))).collect()
}

fn holds_all(scene: &Scene, files: &BTreeMap<String, Vec<u8>>) {
    files.iter().for_each(|(name, bytes)| scene.holds(name, bytes));
}

#[test]
fn rest_is_drained_by_the_next_run_after_sigterm_and_kill() {
    let Some(scene) = prepare("sigterm_killed") else { return };
    let durable = terminated_and_killed(&scene, &[]);
    holds_all(&scene, &durable);
    scene.run(&[], "true").exits(0).says(&["an earlier agent had to leave"]);
    holds_all(&scene, &all_parts());
    scene.is_clean();
}

/// Only named files are missing, the others are complete, and the loss is reported until it is acknowledged.
#[track_caller]
fn lost_is_named(scene: &Scene, options: &[&str], durable: &BTreeMap<String, Vec<u8>>) {
    let ended = scene.run(&[options, &["--json", "/mnt/beside/report"]].concat(), "true").exits(3);
    holds_all(scene, durable);
    let there = scene.store_files();
    for (name, bytes) in all_parts() {
        if there.contains_key(Path::new(&name)) {
            scene.holds(&name, &bytes);
        }
    }
    let report: Value = serde_json::from_slice(&fs::read("/mnt/beside/report").unwrap()).unwrap();
    let verdict = report["verdict"].to_string();
    for name in all_parts().into_keys().filter(|name| !there.contains_key(Path::new(name))) {
        assert!(
            verdict.contains(&format!("{name}: ")) || verdict.contains(&format!("{name}\"")),
            "{name} is missing: {verdict}"
        );
    }
    assert!(ended.stderr.contains("part"), "{}", ended.stderr);
    scene.is_clean();
    // Every run names a loss until the user acknowledges it.
    let forget = "/mnt/surgetank scavenge --state /mnt/state --over /mnt/project --forget";
    scene.run(options, &format!("{forget}; echo new > new")).exits(0);
    scene.holds("new", b"new\n");
}

/// Removes everything in the tier.
fn wipe(tier: &Path) {
    for entry in fs::read_dir(tier).unwrap() {
        fs::remove_dir_all(entry.unwrap().path()).unwrap();
    }
}

#[test]
fn wiped_files_are_named_after_sigterm_and_kill() {
    let Some(scene) = prepare("sigterm_wiped") else { return };
    let durable = terminated_and_killed(&scene, &[]);
    wipe(Path::new("/mnt/tier-fast"));
    lost_is_named(&scene, &[], &durable);
}

/// The epilog removes the job's directory on the local disk, and the next job has another one. Regression: the next
/// run waited for the removed directory indefinitely.
#[test]
fn tier_directory_removed_by_an_epilog_is_not_waited_for() {
    let Some(mut scene) = Scene::new("wiped_disk") else { return };
    scene.beside("beside");
    fs::write("/mnt/source", noise(7, 32 * MIB)).unwrap();
    let disk = scene.ext4("disk", 128);
    let dir = |job: &str| {
        let dir = disk.join(job);
        fs::create_dir_all(&dir).unwrap();
        format!("disk={}:96M", dir.display())
    };
    scene.tier("spare", 8);
    let (first, second) = (dir("job-1"), dir("job-2"));
    // (A rule prefers the disk here.)
    let preferred = |text: &str| -> Vec<String> { vec!["--tier".into(), text.to_owned()] };
    let first: Vec<String> = preferred(&first);
    let first: Vec<&str> = first.iter().map(String::as_str).collect();
    let second: Vec<String> = preferred(&second);
    let second: Vec<&str> = second.iter().map(String::as_str).collect();
    let rule = ["--config", "/mnt/prefer.toml"];
    fs::write("/mnt/prefer.toml", "[[rules]]\nmatch = \"part*\"\ntier = \"disk\"\n").unwrap();
    let durable = terminated_and_killed(&scene, &[&first[..], &rule].concat());
    fs::remove_dir_all(disk.join("job-1")).unwrap();
    lost_is_named(&scene, &[&second[..], &rule].concat(), &durable);
    // The directory itself stays, empty.
    let durable = {
        for name in all_parts().into_keys() {
            let _ = fs::remove_file(scene.path(&name));
        }
        for name in fs::read_dir("/mnt/beside").unwrap().flatten() {
            fs::remove_file(name.path()).unwrap();
        }
        terminated_and_killed(&scene, &[&second[..], &rule].concat())
    };
    wipe(&disk.join("job-2"));
    lost_is_named(&scene, &[&second[..], &rule].concat(), &durable);
    assert!(Command::new("umount").arg(&disk).status().unwrap().success());
}

/// Regression: the agent was killed while it ended, and the next agent did not know that it had to stop.
#[test]
fn replacing_agent_knows_of_the_order_to_stop() {
    let Some(scene) = prepare("sigterm_replaced") else { return };
    let script = "echo early > early; touch /mnt/beside/written
        until [ -e /mnt/beside/seen ]; do sleep 0.02; done; echo late > late";
    let mut running = scene.start(&["--quiet-period", "1h"], script);
    await_mark(&mut running, "written");
    signal(scene.supervisor().unwrap(), libc::SIGTERM);
    let orders = |scene: &Scene| scene.log().matches("asked to stop").count();
    eventually("the agent gets the order", || orders(&scene) > 0);
    let before = orders(&scene);
    scene.replace_agent();
    eventually("the next agent gets the order", || orders(&scene) > before);
    mark("seen");
    running.ends().exits(0);
    scene.holds("early", b"early\n");
    scene.holds("late", b"late\n");
    scene.is_clean();
}

/// Ctrl-C in the drain: the first interrupt names the remaining files, and the second one stops the wait. The command
/// that the run prints then drains the rest, even after the agent was killed.
#[test]
fn printed_command_of_the_second_interrupt_drains_the_rest() {
    let Some(scene) = prepare("interrupted") else { return };
    let script = "for i in 0 1 2 3; do dd if=/mnt/source of=part$i bs=1M count=1 skip=$i status=none; done";
    let mut running = scene.start(&["--drain-bytes-per-second-max", "64K"], script);
    eventually("the command has ended", || {
        assert!(!running.has_ended(), "{}", running.so_far());
        scene.log().contains("a client waits")
    });
    signal(running.pid(), libc::SIGINT);
    // (Two simultaneous interrupts count as one, and the second one ends the list of the first.)
    eventually("the first interrupt is answered", || running.says("part3: "));
    assert!(!running.has_ended(), "one interrupt ended it");
    signal(running.pid(), libc::SIGINT);
    let ended = running.ends().exits(3).says(&[
        "SIGINT: the drain continues; a second signal stops waiting. Not in the store yet:",
        "part3: ",
        "safe at /mnt/tier-fast",
        "the final drain was interrupted",
        "surgetank wait --state /mnt/state /mnt/project",
    ]);
    scene.kill_agent();
    assert!(!scene.path("part3").exists(), "all files were drained: the test proves nothing");
    scene.as_printed(&ended.printed("scavenge")).exits(0);
    (0..4).for_each(|number| scene.holds(&format!("part{number}"), &part(number, 1)));
    scene.is_clean();
}

/// The run waits for children that outlive the command, then names them. Their output still reaches the store.
#[test]
fn background_child_output_after_the_grace_is_stored() {
    let Some(scene) = prepare("background") else { return };
    let script = "(sleep 0.3; echo in time > in-time) > /dev/null 2>&1 &";
    scene.run(&["--grace", "60s"], script).exits(0);
    scene.holds("in-time", b"in time\n");
    let script = "exec 3> open; echo begun >&3
        (trap '' HUP; until [ -e /mnt/beside/seen ]; do sleep 0.02; done; echo late > late; echo ended >&3) > /dev/null 2>&1 &
        echo early > early";
    let ended = scene.run(&["--grace", "100ms"], script).exits(3);
    let ended = ended.says(&["still running after the grace", "background children still run", "bash"]);
    scene.holds("early", b"early\n");
    assert!(!scene.path("late").exists() && !scene.path("open").exists(), "{}", ended.stderr);
    mark("seen");
    scene.await_no_agent();
    scene.holds("late", b"late\n");
    scene.holds("open", b"begun\nended\n");
    scene.is_clean();
}

/// Without state and tiers nothing can be reported as lost. The store has every durable file, and no partial one.
#[test]
fn wiped_state_and_tiers_leave_the_store_unharmed() {
    let Some(scene) = prepare("wiped_both") else { return };
    fs::write(scene.path("old"), "before\n").unwrap();
    let durable = terminated_and_killed(&scene, &[]);
    wipe(Path::new("/mnt/tier-fast"));
    fs::remove_dir_all(&scene.state).unwrap();
    scene.run(&[], "cat old; echo after > old").exits(0).prints("before\n");
    holds_all(&scene, &durable);
    for path in scene.store_files().into_keys() {
        let name = path.to_str().unwrap();
        match all_parts().get(name) {
            Some(bytes) => scene.holds(name, bytes),
            // Unfinished copies: no record of their location remains.
            None => assert!(name == "old" || name.starts_with(".surgetank-tmp-"), "{name}"),
        }
    }
    scene.holds("old", b"after\n");
    assert_eq!(scene.tier_files(), Vec::<PathBuf>::new());
}

/// Writes eight files of 1 MiB, twice as many as the agent drains at a time, and four temporaries; then the command
/// ends. The drain takes four seconds.
fn slow_tail(scene: &Scene, after: &str) -> Running {
    let options = ["--drain-bytes-per-second-max", "2M", "--quiet-period", "1h", "--rule", "*.tmp=remove"];
    let script = format!(
        "for i in 0 1 2 3 4 5 6 7; do dd if=/mnt/source of=part$i bs=1M count=1 skip=$i status=none; done
        for i in 0 1 2 3; do cp part$i $i.tmp; done
        {after}
        touch /mnt/beside/written"
    );
    let mut running = scene.start(&options, &script);
    await_mark(&mut running, "written");
    running
}

/// Regression: the agent emptied the tiers only after the whole drain, and programs that had ended waited for it.
#[test]
fn tiers_are_emptied_while_the_rest_drains() {
    let Some(scene) = prepare("parting") else { return };
    let mut running = slow_tail(&scene, "");
    eventually("temporaries and durable files have left the tier, and the rest is still draining", || {
        assert!(!running.has_ended(), "{}", running.so_far());
        let left = scene.tier_files();
        left.len() < 8 && !left.iter().any(|path| path.to_string_lossy().ends_with(".tmp"))
    });
    assert!(!scene.path("part7").exists());
    running.ends().exits(0);
    (0..8).for_each(|number| scene.holds(&format!("part{number}"), &part(number, 1)));
    scene.is_clean();
}

/// A process that outlives the command still reads temporaries. A run that joins meanwhile reads its own. Regression:
/// the agent removed them.
#[test]
fn temporaries_stay_while_a_process_may_read_them() {
    let Some(scene) = prepare("parting_left") else { return };
    let left = "(touch /mnt/beside/left; until [ -e /mnt/beside/seen ]; do sleep 0.02; done
        cat ?.tmp > /mnt/beside/read 2>&1; touch /mnt/beside/done) > /dev/null 2>&1 < /dev/null &";
    let mut running = slow_tail(&scene, left);
    eventually("a part is durable and has left the tier", || {
        assert!(!running.has_ended(), "{}", running.so_far());
        scene.path("part0").exists() && scene.tier_files().len() < 12
    });
    let mut other =
        scene.start(&["--rule", "*.tmp=remove"], "echo mine > mine.tmp; touch /mnt/beside/came; sleep 1; cat mine.tmp");
    await_mark(&mut other, "came");
    mark("seen");
    await_mark(&mut running, "done");
    let all: Vec<u8> = (0..4).flat_map(|number| part(number, 1)).collect();
    crate::scene::same_bytes("the data read", &fs::read("/mnt/beside/read").unwrap(), &all);
    assert_eq!(other.ends().exits(0).stdout, "mine\n");
    // (A remaining process might still write.)
    running.ends().exits(3);
    (0..8).for_each(|number| scene.holds(&format!("part{number}"), &part(number, 1)));
    scene.is_clean();
}

/// Regression: the kernel and the shim kept names of removed temporaries, so the joining run could not make them
/// again.
#[test]
fn run_that_joins_the_final_drain_can_remake_temporaries() {
    let Some(scene) = prepare("emptied_names") else { return };
    let mut running = slow_tail(&scene, "ls -l > /dev/null; env -u LD_PRELOAD stat ?.tmp > /dev/null");
    eventually("temporaries have left the tier, and the rest is still draining", || {
        assert!(!running.has_ended(), "{:?} {}", scene.tier_files(), running.so_far());
        !scene.tier_files().iter().any(|path| path.to_string_lossy().ends_with(".tmp"))
    });
    assert!(!scene.path("part7").exists());
    let script = "ls *.tmp 2>/dev/null | wc -l
        for i in 0 1; do echo new$i > $i.tmp; cat $i.tmp; env -u LD_PRELOAD cat $i.tmp; done
        for i in 2 3; do env -u LD_PRELOAD sh -c 'echo new > $0.tmp' $i; cat $i.tmp; stat -c %s $i.tmp; done";
    let ended = scene.run(&["--rule", "*.tmp=remove"], script).exits(0);
    assert_eq!(ended.stdout, "0\nnew0\nnew0\nnew1\nnew1\nnew\n4\nnew\n4\n");
    running.ends().exits(0);
    (0..8).for_each(|number| scene.holds(&format!("part{number}"), &part(number, 1)));
    scene.is_clean();
}
