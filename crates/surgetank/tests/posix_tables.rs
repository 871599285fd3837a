//! The cases of pjdfstest as tables (`posix_tables/*.txt`): the effect of each system call on each kind of file, and
//! the error under each condition. Each step has its expected outcome.
//!
//! In a plain directory, the reference, every step must have this outcome. Every difference through a door has an
//! entry in `posix_tables/differences.txt`, with its number and a reason. An entry without a difference fails the
//! test.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

mod table;

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::Path;

use crate::scene::Scene;
use table::{Outcome, Scenario};

const TABLES: &[&str] = &["errors", "effects", "owners", "sticky", "times"];
/// How many steps the original checks.
const AT_LEAST: usize = 8848;
/// The tables make every kind of file; this door makes no sockets.
const NO_SOCKETS: &str = "seccomp";

#[test]
fn plain_tmpfs_has_every_outcome() {
    let Some(scene) = Scene::new("tables_tmpfs") else { return };
    let plain = scene.tmpfs("plain", 64);
    is_the_yardstick(&scene, &plain);
}

#[test]
fn plain_ext4_has_every_outcome() {
    let Some(scene) = Scene::new("tables_ext4") else { return };
    // Large enough for blocks of 4 KiB, because the block size limits the length of a link.
    let plain = scene.ext4("plain", 600);
    is_the_yardstick(&scene, &plain);
}

#[test]
fn mount_has_every_outcome_but_the_listed() {
    conforms("tables_mount", "mount", &["--no-preload"]);
}

#[test]
fn mediated_mount_has_every_outcome_but_the_listed() {
    conforms("tables_mediated", "mediated", &["--no-preload", "--direct", "false"]);
}

#[test]
fn shim_has_every_outcome_but_the_listed() {
    conforms("tables_shim", "shim", &[]);
}

#[test]
fn seccomp_has_every_outcome_but_the_listed() {
    conforms("tables_seccomp", "seccomp", &["--door", "seccomp", "--no-preload"]);
}

#[test]
fn listed_reasons_are_documented() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/semantics.md");
    let page = fs::read_to_string(page).unwrap();
    for one in differences() {
        let known = page.contains(&one.why);
        assert!(known, "docs/semantics.md does not say: {}", one.why);
    }
}

/// The number of steps that have another outcome through these doors.
#[derive(Default, Clone)]
struct Difference {
    why: String,
    doors: Vec<String>,
    number: usize,
    scenario: String,
    step: String,
    outcome: String,
}

/// The format: `= why`, then `@ doors`, then `NUMBER | SCENARIO | STEP | OUTCOME`, where `*` matches any text.
fn differences() -> Vec<Difference> {
    let mut now = Difference::default();
    let mut found = Vec::new();
    for line in file("differences").lines().filter(|line| !line.is_empty()) {
        if let Some(why) = line.strip_prefix("= ") {
            why.clone_into(&mut now.why);
        } else if let Some(doors) = line.strip_prefix("@ ") {
            now.doors = doors.split(' ').map(str::to_owned).collect();
        } else {
            let parts: Vec<String> = line.split(" | ").map(str::to_owned).collect();
            let [number, scenario, step, outcome] = <[String; 4]>::try_from(parts).unwrap();
            found.push(Difference { number: number.parse().unwrap(), scenario, step, outcome, ..now.clone() });
        }
    }
    found
}

fn file(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/posix_tables");
    fs::read_to_string(folder.join(name).with_extension("txt")).unwrap()
}

/// Whether a text matches this pattern, in which `*` matches any text.
fn matches(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((head, rest)) => text.strip_prefix(head).is_some_and(|text| {
            text.char_indices().map(|(at, _)| at).chain([text.len()]).any(|at| matches(rest, &text[at..]))
        }),
    }
}

fn all_scenarios(door: &str) -> Vec<Scenario> {
    let mut found = Vec::new();
    for table in TABLES {
        found.extend(table::scenarios(table, &file(table)));
    }
    if door == NO_SOCKETS {
        // One case stays, and shows that no socket can be made.
        let can = |one: &Scenario| {
            one.name == "effects/made socket" || !one.name.split([' ', '/']).any(|word| word == "socket")
        };
        found.retain(can);
    }
    found
}

/// Puts the program and its script beside the served directory.
fn prepare(scene: &Scene, scenarios: &[Scenario]) {
    let code = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/posix_tables/perform.c");
    crate::scene::succeed(scene.command("cc").args(["-O1", "-w", "-o", "/mnt/perform"]).arg(code));
    let mut script = std::io::BufWriter::new(fs::File::create("/mnt/script").unwrap());
    for one in scenarios {
        writeln!(script, "= scenario").unwrap();
        for step in &one.steps {
            writeln!(script, "{}", step.line).unwrap();
        }
    }
    script.flush().unwrap();
}

fn is_the_yardstick(scene: &Scene, plain: &Path) {
    let scenarios = all_scenarios("plain");
    prepare(scene, &scenarios);
    let mut command = scene.command("/mnt/perform");
    let ended = crate::scene::Running::of({
        command.arg(plain).stdin(fs::File::open("/mnt/script").unwrap());
        command
    })
    .ends()
    .exits(0);
    judge("plain", &scenarios, &ended.stdout, &ended.stderr);
}

fn conforms(name: &str, door: &str, options: &[&str]) {
    let Some(mut scene) = Scene::new(name) else { return };
    scene.tier("fast", 256);
    let scenarios = all_scenarios(door);
    prepare(&scene, &scenarios);
    let ended = scene.run(options, "exec /mnt/perform . < /mnt/script");
    judge(door, &scenarios, &ended.stdout, &ended.stderr);
    ended.exits(0);
    assert_eq!(fs::read_dir(&scene.over).unwrap().count(), 0, "something is left in the store");
}

/// Compares every outcome with the table's.
fn judge(door: &str, scenarios: &[Scenario], printed: &str, stderr: &str) {
    let listed: Vec<Difference> =
        differences().into_iter().filter(|one| one.doors.iter().any(|one| one == door)).collect();
    let mut met = vec![0; listed.len()];
    let mut wrong = Vec::new();
    let mut lines = printed.lines();
    let mut count = 0;
    for scenario in scenarios {
        let mut remembered = BTreeMap::new();
        for step in &scenario.steps {
            let Some(seen) = lines.next() else {
                panic!(
                    "ended in {} before: {} ({count} steps)\n{}\n{stderr}",
                    scenario.name,
                    step.call,
                    wrong.join("\n")
                );
            };
            count += 1;
            let expected = match &step.outcome {
                Outcome::Remembered(name) => {
                    remembered.insert(name.as_str(), seen);
                    if !seen.starts_with(|first: char| first.is_ascii_digit()) {
                        wrong.push(format!("{} | {} | {seen} | to be remembered", scenario.name, step.call));
                    }
                    continue;
                }
                Outcome::Any(expected) => expected,
            };
            if expected.iter().any(|one| is_as(one, seen, &remembered)) {
                continue;
            }
            let known = |one: &Difference| {
                matches(&one.scenario, &scenario.name) && matches(&one.step, &step.call) && matches(&one.outcome, seen)
            };
            match listed.iter().position(known) {
                Some(found) => met[found] += 1,
                None => wrong.push(format!("{} | {} | {seen} | not {}", scenario.name, step.call, expected.join("|"))),
            }
        }
    }
    for (one, met) in listed.iter().zip(&met) {
        let (scenario, step, outcome) = (&one.scenario, &one.step, &one.outcome);
        if one.number != *met {
            wrong.push(format!("differs {met} times, not {}: {scenario} | {step} | {outcome}", one.number));
        }
    }
    assert!(wrong.is_empty(), "{} differences in {count} steps:\n{}\n{stderr}", wrong.len(), wrong.join("\n"));
    assert!(lines.next().is_none(), "more outcomes than steps");
    assert!(count >= AT_LEAST, "{count} steps only");
}

/// Whether an outcome is the expected one; `@NAME` and `>NAME` refer to remembered values.
fn is_as(expected: &str, seen: &str, remembered: &BTreeMap<&str, &str>) -> bool {
    let of = |name: &str| *remembered.get(name).unwrap_or_else(|| panic!("not remembered: {name}"));
    if let Some(name) = expected.strip_prefix('>') {
        // Seconds and nanoseconds; both have as many digits as those of the other time.
        return seen.len() == of(name).len() && seen > of(name);
    }
    let words: Vec<&str> = expected.split(',').map(|word| word.strip_prefix('@').map_or(word, of)).collect();
    words.join(",") == seen
}
