//! Rules, Sea's lists and the verbs that query and manage files, with the real program over a real directory.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::fs;
use std::path::{Path, PathBuf};

use crate::scene::{Ended, MIB, Running, Scene, eventually, noise};
use serde_json::Value;

fn prepare(name: &str) -> Option<Scene> {
    let mut scene = Scene::new(name)?;
    scene.tier("fast", 32);
    scene.beside("beside");
    Some(scene)
}

fn names(scene: &Scene) -> Vec<String> {
    let files = scene.store_files().into_keys();
    files.map(|path| path.to_string_lossy().into_owned()).collect()
}

fn beside(name: &str) -> Value {
    let bytes = fs::read(Path::new("/mnt/beside").join(name)).unwrap();
    serde_json::from_slice(&bytes).unwrap_or_else(|why| panic!("{name}: {why}"))
}

const MODES: [&str; 8] =
    ["--rule", "*.keep=keep", "--rule", "*.move=move", "--rule", "*.tmp=remove", "--rule", "*.copy=copy"];
const WRITE: &str = "for mode in keep move tmp copy; do echo $mode > file.$mode; done";
/// For scripts: runs a verb inside a run.
const ASK: &str = "ask() { verb=$1; shift; /mnt/surgetank $verb --state /mnt/state \"$@\"; }";

#[test]
fn each_mode_has_its_effect() {
    let Some(scene) = prepare("modes") else {
        return;
    };
    scene
        .run(
            &MODES,
            &format!(
                "{ASK}
                 {WRITE}
                 ask wait --quiet file.copy file.move
                 for mode in keep move tmp copy; do ask why --json file.$mode > /mnt/beside/$mode; done
                 cat file.keep file.move file.tmp file.copy"
            ),
        )
        .exits(0)
        .says(&["NOT in the store", "file.keep"]);
    for (mode, state, replicas) in
        [("keep", "sealed", 1), ("move", "evicted", 0), ("tmp", "sealed", 1), ("copy", "durable", 1)]
    {
        let why = beside(mode);
        assert_eq!(why["state"], state, "{why}");
        assert_eq!(why["replicas"].as_array().unwrap().len(), replicas, "{why}");
        assert!(why["rule"].as_str().unwrap().contains(&format!("*.{mode}")), "{why}");
    }
    assert_eq!(names(&scene), ["file.copy", "file.move"]);
    // A kept file exists in the next run; a temporary does not.
    scene.run(&MODES, "test \"$(cat file.keep)\" = keep; ! test -e file.tmp; ls > /mnt/beside/listed").exits(0);
    assert_eq!(fs::read_to_string("/mnt/beside/listed").unwrap(), "file.copy\nfile.keep\nfile.move\n");
    assert_eq!(names(&scene), ["file.copy", "file.move"]);
}

#[test]
fn keep_at_exit_leaves_drains_or_drops() {
    let Some(scene) = prepare("kept") else { return };
    let with = |what: &'static str| [&MODES[..2], &["--keep-at-exit", what]].concat();
    scene.run(&with("leave"), "echo 1 > a.keep").exits(0).says(&["NOT in the store", "a.keep"]);
    assert_eq!(names(&scene), [""; 0]);
    assert!(scene.tier_files().iter().any(|path| path.ends_with("a.keep")));
    let ended = scene.run(&with("drain"), "echo 2 > b.keep").exits(0);
    assert!(!ended.stderr.contains("NOT in the store"), "{}", ended.stderr);
    scene.holds("a.keep", b"1\n");
    scene.holds("b.keep", b"2\n");
    scene.run(&with("drop"), "echo 3 > c.keep; cat a.keep b.keep").exits(0);
    assert_eq!(names(&scene), ["a.keep", "b.keep"]);
    assert_eq!(scene.tier_files(), Vec::<PathBuf>::new());
}

#[test]
fn sea_lists_have_their_effect() {
    let Some(scene) = prepare("sea") else { return };
    // Sea's modes: flushed and evicted is moved, only flushed is copied, only evicted is removed, neither is kept.
    fs::write(scene.path(".sea_flushlist"), ".*\\.result$\n.*\\.both$\n").unwrap();
    fs::write(scene.path(".sea_evictlist"), ".*\\.both$\n.*\\.scratch$\n").unwrap();
    fs::write(scene.path(".sea_prefetchlist"), ".*\\.input$\n").unwrap();
    fs::write(scene.path("one.input"), noise(1, 100_000)).unwrap();
    fs::write(scene.path("other"), "in the store").unwrap();
    scene
        .run(
            &[],
            &format!(
                "{ASK}
                 for kind in result both scratch neither; do echo $kind > file.$kind; done
                 until ask why --json one.input > /mnt/beside/input; grep -q '\"tier\"' /mnt/beside/input; do sleep 0.02; done
                 ask wait --quiet file.result file.both
                 for kind in result both scratch neither; do ask why --json file.$kind > /mnt/beside/$kind; done
                 ask why --json other > /mnt/beside/other"
            ),
        )
        .exits(0);
    for (kind, mode) in [("result", "copy"), ("both", "move"), ("scratch", "remove"), ("neither", "keep")] {
        assert_eq!(beside(kind)["mode"], mode, "{}", beside(kind));
    }
    assert_eq!(beside("other")["replicas"].as_array().unwrap().len(), 0);
    let mut shown = names(&scene);
    shown.retain(|name| !name.starts_with(".sea"));
    assert_eq!(shown, ["file.both", "file.result", "one.input", "other"]);
}

/// evict, pin, unpin and prefetch have their effect, and a file that is not durable never leaves the tier.
#[test]
fn evict_pin_and_prefetch_act_and_keep_undrained_files() {
    let Some(scene) = prepare("tended") else {
        return;
    };
    fs::write(scene.path("there"), noise(2, 300_000)).unwrap();
    scene
        .run(
            &["--rule", "*.keep=keep"],
            &format!(
                "{ASK}
                 echo x > file; echo x > only.keep; echo x > pinned
                 ask wait --quiet file pinned
                 ask pin pinned
                 ask evict file pinned only.keep
                 for name in file pinned only.keep; do ask why --json $name > /mnt/beside/$name; done
                 ask unpin pinned; ask evict pinned
                 ask why --json pinned > /mnt/beside/unpinned
                 ask prefetch there
                 ask why --json there > /mnt/beside/there
                 cat file pinned only.keep there > /dev/null"
            ),
        )
        .exits(0);
    assert_eq!(beside("file")["state"], "evicted");
    assert_eq!(beside("pinned")["state"], "durable");
    assert_eq!(beside("pinned")["pinned"], true);
    assert_eq!(beside("only.keep")["replicas"][0]["tier"], "fast", "{}", beside("only.keep"));
    assert_eq!(beside("unpinned")["state"], "evicted");
    assert_eq!(beside("there")["replicas"][0]["tier"], "fast", "{}", beside("there"));
}

/// Regression: `wait` reported a missing path as durable.
#[test]
fn wait_for_a_missing_path_fails() {
    let Some(mut scene) = Scene::new("wait_nowhere") else { return };
    scene.tier("fast", 8);
    scene.run(&[], "echo x > there").exits(0);
    scene.await_no_agent();
    let (there, typo) = (scene.path("there"), scene.path("their"));
    scene.verb("wait", &[there.to_str().unwrap()]).exits(0);
    scene.verb("wait", &[there.to_str().unwrap(), typo.to_str().unwrap()]).exits(2).says(&["their cannot be found"]);
}

/// The status while files wait, and the exit code of a `wait` that times out.
#[test]
fn status_and_wait_report_the_drain() {
    let Some(scene) = prepare("status") else {
        return;
    };
    fs::write("/mnt/source", noise(3, 16 * MIB)).unwrap();
    let running = scene.start(
        // Slow enough that no file is drained before the test has read the status.
        &["--drain-bytes-per-second-max", "4M"],
        "head -c 12M /mnt/source > large
         touch /mnt/beside/written
         while ! test -e /mnt/beside/asked; do sleep 0.01; done",
    );
    eventually("the file is written", || Path::new("/mnt/beside/written").exists());
    let status = scene.verb("status", &["--json", "/mnt/project"]).exits(0).json();
    let agent = &status[0];
    assert_eq!(agent["over"], "/mnt/project");
    assert_eq!(agent["phase"], "serving");
    assert_eq!(agent["runs"].as_array().unwrap().len(), 1, "{agent}");
    assert_eq!(agent["tiers"][0]["name"], "fast");
    assert_eq!(agent["queue"]["files"], 1, "{agent}");
    assert_eq!(agent["queue"]["oldest"]["path"], "large", "{agent}");
    assert_eq!(agent["tiers"][0]["dirty_bytes"], 12 * MIB, "{agent}");
    let words = scene.verb("status", &["/mnt/project"]).exits(0).stdout;
    for word in ["/mnt/project", "fast", "large"] {
        assert!(words.contains(word), "{word}: {words}");
    }
    scene.verb("wait", &["--quiet", "--timeout", "50ms", "/mnt/project/large"]).exits(3).says(&["large"]);
    fs::write("/mnt/beside/asked", "").unwrap();
    running.ends().exits(0);
    scene.holds("large", &noise(3, 16 * MIB)[..12 << 20]);
    let status = scene.verb("status", &["--json"]).exits(0).json();
    assert_eq!(status, Value::Array(Vec::new()));
}

/// `plan` reports the modes that the same rules then apply.
#[test]
fn plan_reports_and_changes_nothing() {
    let Some(scene) = prepare("plan") else { return };
    for mode in ["keep", "move", "tmp", "copy"] {
        fs::write(scene.path(&format!("file.{mode}")), mode).unwrap();
    }
    let plan = |words: &[&str]| -> Ended {
        let all = [&["plan", "--over", "/mnt/project", "--state", "/mnt/state"], words, &MODES].concat();
        Running::of(scene.surgetank(&all)).ends().exits(0)
    };
    let lines = plan(&["--files", "--json"]).stdout;
    let planned = |name: &str| -> String {
        let line = lines.lines().find(|line| line.contains(&format!("\"{name}\""))).unwrap();
        serde_json::from_str::<Value>(line).unwrap()["mode"].as_str().unwrap().to_owned()
    };
    assert_eq!(["file.keep", "file.move", "file.tmp", "file.copy"].map(planned), ["keep", "move", "remove", "copy"]);
    assert!(plan(&[]).stdout.contains("*.keep"));
    assert_eq!(scene.agent(), None);
    assert_eq!(names(&scene).len(), 4);
    assert!(!scene.state.exists());
}

/// Two runs share an agent. The verdict of each covers its own files.
#[test]
fn runs_with_one_agent_are_judged_apart() {
    let Some(scene) = prepare("two_runs") else {
        return;
    };
    fs::write(scene.path("contested"), "of old").unwrap();
    let hold =
        |name: &str| format!("touch /mnt/beside/{name}; while ! test -e /mnt/beside/go-{name}; do sleep 0.01; done");
    let unlucky = scene.start(&[], &format!("exec 3>> contested; echo ours >&3; {}", hold("unlucky")));
    eventually("the first writes", || Path::new("/mnt/beside/unlucky").exists());
    let lucky = scene.start(&[], &format!("echo fine > fine; {}", hold("lucky")));
    eventually("the second writes", || Path::new("/mnt/beside/lucky").exists());
    let status = scene.verb("status", &["--json"]).exits(0).json();
    assert_eq!(status[0]["runs"].as_array().unwrap().len(), 2, "{status}");
    fs::write(scene.path("contested"), "by another client").unwrap();
    fs::write("/mnt/beside/go-unlucky", "").unwrap();
    unlucky.ends().exits(3).says(&["contested", "both kept"]);
    fs::write("/mnt/beside/go-lucky", "").unwrap();
    let ended = lucky.ends().exits(0);
    assert!(!ended.stderr.contains("contested"), "{}", ended.stderr);
    scene.holds("fine", b"fine\n");
    scene.holds("contested", b"by another client");
}

/// Regression: after one `wait` no file had its quiet period.
#[test]
fn quiet_period_applies_after_a_wait() {
    let Some(mut scene) = Scene::new("after_a_wait") else { return };
    scene.tier("fast", 64);
    let script = "echo a >a; /mnt/surgetank wait --state /mnt/state a; echo b >b; mkdir .git; echo c >.git/c; touch /mnt/notes/there
        until test -e /mnt/notes/seen; do sleep 0.01; done; /mnt/surgetank wait --state /mnt/state b";
    scene.beside("notes");
    let running = scene.start(&["--quiet-period", "500ms"], script);
    eventually("the first is stored", || std::path::Path::new("/mnt/notes/there").exists());
    assert!(scene.path("a").exists() && !scene.path("b").exists(), "{:?}", scene.store_files());
    eventually("the second is stored after its quiet period", || scene.path("b").exists());
    assert!(!scene.path(".git/c").exists(), "a file that is stored last did not wait for the end");
    std::fs::write("/mnt/notes/seen", "").unwrap();
    running.ends().exits(0);
    scene.holds(".git/c", b"c\n");
}
