//! POSIX conformance: some 150 tiny programs (`posix/*.c`, one table), each in a directory of its own. They run in a
//! plain directory and under `surgetank run` through every door. Their output must be the same, line by line. The
//! directories afterwards must be the same as well, the second one as the *store* has it.
//!
//! Every difference has an entry in `posix/differences.txt`, with a sentence of `docs/semantics.md` that documents
//! it. An entry without a difference fails the test. A case by hand: `cc -o cases posix/*.c && ./cases prepare DIR &&
//! ./cases run DIR CASE`.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::time::SystemTime;

use crate::scene::Scene;

#[test]
fn mount_conforms() {
    conforms("posix_mount", "mount", &["--no-preload"]);
}

#[test]
fn mediated_mount_conforms() {
    conforms("posix_mediated", "mediated", &["--no-preload", "--direct", "false"]);
}

#[test]
fn shim_conforms() {
    conforms("posix_shim", "shim", &[]);
}

#[test]
fn seccomp_conforms() {
    conforms("posix_seccomp", "seccomp", &["--door", "seccomp", "--no-preload"]);
}

#[test]
fn seccomp_with_the_shim_conforms() {
    conforms("posix_both", "both", &["--door", "seccomp"]);
}

/// Each reason quotes the page, so the page must contain it.
#[test]
fn every_difference_is_documented() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/semantics.md");
    let page = fs::read_to_string(page).unwrap();
    for one in differences() {
        assert!(page.contains(one.why), "docs/semantics.md does not say: {}", one.why);
    }
}

/// A line that differs (`plain`, `ours`), or a path (`case`) that differs in the store at the end.
#[derive(Default, Clone)]
struct Difference {
    why: &'static str,
    doors: Vec<&'static str>,
    /// The difference depends on timing, or on the file system of the plain directory. An open that the shim's door
    /// cannot serve at once goes through the mount. Overlay has no whiteouts.
    sometimes: bool,
    in_store: bool,
    case: &'static str,
    plain: &'static str,
    ours: &'static str,
}

/// The format: `= why`, then `@ doors`, then `case`, `- plain`, `+ ours`, or `store path`. A line holds for all lines
/// below it.
fn differences() -> Vec<Difference> {
    let mut found = Vec::new();
    let mut now = Difference::default();
    for line in include_str!("posix/differences.txt").lines().filter(|line| !line.is_empty()) {
        match line.split_once(' ').unwrap_or((line, "")) {
            ("=", why) => now = Difference { why, ..Difference::default() },
            ("@", doors) => {
                now.doors = doors.split(' ').filter(|door| *door != "sometimes").collect();
                now.sometimes = doors.ends_with("sometimes");
            }
            ("store", path) => found.push(Difference { in_store: true, case: path, ..now.clone() }),
            ("-", plain) => now.plain = plain,
            ("+", ours) => found.push(Difference { ours, ..now.clone() }),
            (case, _) => now.case = case,
        }
    }
    found
}

fn conforms(name: &str, door: &str, options: &[&str]) {
    let Some(mut scene) = Scene::new(name) else { return };
    scene.tier("fast", 256);
    build(&scene);
    let started = SystemTime::now();

    crate::scene::succeed(scene.command("/mnt/cases").args(["prepare", "."]));
    let plain = scene.command("/mnt/cases").args(["run", "."]).output().unwrap();
    fs::rename(&scene.over, "/mnt/plain").unwrap();
    fs::create_dir(&scene.over).unwrap();
    crate::scene::succeed(scene.command("/mnt/cases").args(["prepare", "."]));
    // A case that is known to wait indefinitely gets a short time limit.
    let waits = |one: &Difference| one.ours == "ended with ALRM" && one.doors.contains(&door);
    let waiting: Vec<&str> = differences().into_iter().filter(waits).map(|one| one.case).collect();
    let ended = scene.run(options, &format!("HURRIED='{}' exec /mnt/cases run .", waiting.join(" ")));
    assert!(plain.status.success());

    let listed: Vec<Difference> = differences().into_iter().filter(|one| one.doors.contains(&door)).collect();
    let mut met = BTreeSet::new();
    let mut wrong = Vec::new();
    let plain = sections(&String::from_utf8_lossy(&plain.stdout));
    let ours = sections(&ended.stdout);
    assert!(plain.len() >= 150, "{} cases only", plain.len());
    for (case, lines) in &plain {
        let empty = Vec::new();
        let seen = ours.get(case).unwrap_or(&empty);
        for number in 0..lines.len().max(seen.len()) {
            let line = |of: &[String]| of.get(number).map_or("", String::as_str).trim_end().to_owned();
            let (there, here) = (line(lines), line(seen));
            let known = |one: &Difference| !one.in_store && one.case == case && one.plain == there && one.ours == here;
            if there == here {
                continue;
            }
            match listed.iter().position(known) {
                Some(found) => drop(met.insert(found)),
                None => wrong.push(format!("{case}, line {number}:\n  plain {there}\n  ours  {here}")),
            }
        }
    }
    for (path, how) in crate::trees::differences(Path::new("/mnt/plain"), &scene.over, started) {
        match listed.iter().position(|one| one.in_store && Path::new(one.case) == path) {
            Some(found) => drop(met.insert(found)),
            None => wrong.push(how),
        }
    }
    let unmet = listed.iter().enumerate().filter(|(number, one)| !one.sometimes && !met.contains(number));
    wrong.extend(unmet.map(|(_, one)| format!("{} no longer differs here: {} / {}", one.case, one.plain, one.ours)));
    assert!(wrong.is_empty(), "{} differences:\n{}\n{}", wrong.len(), wrong.join("\n"), ended.stderr);
    assert_eq!(ended.status.code(), Some(0), "{}", ended.stderr);
}

fn build(scene: &Scene) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/posix");
    let code = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let code: Vec<_> = code.filter(|path| path.extension().is_some_and(|kind| kind == "c")).collect();
    crate::scene::succeed(scene.command("cc").args(["-O1", "-w", "-o", "/mnt/cases"]).args(code));
}

/// The output of each case.
fn sections(text: &str) -> BTreeMap<String, Vec<String>> {
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut case = String::new();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("== ") {
            name.clone_into(&mut case);
            found.entry(case.clone()).or_default();
        } else {
            found.entry(case.clone()).or_default().push(line.to_owned());
        }
    }
    found
}
