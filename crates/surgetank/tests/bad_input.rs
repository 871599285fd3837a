//! Bad input to every verb, flag, key of the configuration and variable: the exit code and the message.
//!
//! A message of surgetank names what failed and where ("surgetank: …"), what to try, and the state of the data. The
//! tables ([`table`]) are compared with the program's own lists. An entry of those lists without a row here fails the
//! test.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

mod table;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use surgetank_policy::config::OTHER_VARIABLES;
use surgetank_policy::config::key::{LISTS, SCALARS, TIER_KEYS, rule_keys};
use table::{ENTRIES, Entry, FILES, KEYS, OPTIONS, REST, VARIABLES};

const CALIBRATION: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/validation/calibration-nfs.json");
const WORKLOAD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/workloads/incrementation.toml");

/// A place with a directory, a tier and the paths that rows name: `{over}`, `{tier}`, `{file}`, `{absent}`,
/// `{bytes}`.
struct Place {
    dir: tempfile::TempDir,
    /// Collected, so that one failure shows all of them.
    complaints: RefCell<Vec<String>>,
}

struct Ended {
    code: Option<i32>,
    text: String,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("surgetank-bad-input-").tempdir().unwrap();
        for name in ["over", "tier"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        fs::write(dir.path().join("file"), "text\n").unwrap();
        // A run that ended, for verbs that read its record.
        let runs = dir.path().join("state/0-1-1-1/runs");
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&runs).unwrap();
        fs::write(
            runs.join("20261124-100000-000000-1.json"),
            r#"{"id":"20261124-100000-000000-1","directory":"/nowhere"}"#,
        )
        .unwrap();
        Self { dir, complaints: RefCell::default() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The text with each name in braces replaced; `{bytes}` is a byte that is not UTF-8.
    fn filled(&self, text: &str) -> OsString {
        let mut out = Vec::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once('{') {
            let Some((name, behind)) = after.split_once('}') else { break };
            out.extend_from_slice(before.as_bytes());
            match name {
                "bytes" => out.push(0xff),
                "calibration" => out.extend_from_slice(CALIBRATION.as_bytes()),
                "workload" => out.extend_from_slice(WORKLOAD.as_bytes()),
                "over" | "tier" | "file" | "absent" | "dir" => {
                    let path = if name == "dir" { self.dir.path().to_path_buf() } else { self.path(name) };
                    out.extend_from_slice(path.as_os_str().as_bytes());
                }
                other => out.extend_from_slice(format!("{{{other}}}").as_bytes()),
            }
            rest = behind;
        }
        out.extend_from_slice(rest.as_bytes());
        OsString::from_vec(out)
    }

    /// The configuration is valid except for the row's own words.
    fn run<W: AsRef<OsStr>>(&self, words: &[W], variables: &[(&str, &str)]) -> Ended {
        let mut command = Command::new(env!("CARGO_BIN_EXE_surgetank"));
        command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.env("SURGETANK_OVER", self.path("over")).env("SURGETANK_STATE", self.path("state"));
        command.env("SURGETANK_TIERS", format!("fast={}:64M", self.path("tier").display()));
        for (name, value) in variables {
            command.env(name, self.filled(value));
        }
        let output = command.args(words).current_dir(self.dir.path()).stdin(Stdio::null()).output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        Ended { code: output.status.code(), text: String::from_utf8_lossy(&text).into_owned() }
    }
}

impl Place {
    fn check(&self, case: &str, ended: &Ended, exit: i32, says: &[&str]) {
        let mut complaints = self.complaints.borrow_mut();
        let text = &ended.text;
        let mut complain = |what: String| complaints.push(format!("{case}: {what}:\n{text}"));
        if ended.code != Some(exit) {
            complain(format!("exit code {:?}, not {exit}", ended.code));
        }
        for word in says.iter().filter(|word| !text.contains(**word)) {
            complain(format!("{word:?} is missing"));
        }
        if exit == 0 {
            return;
        }
        // The parser of the command line has a format of its own, and the doctor lists findings.
        let parts: &[&str] = if text.starts_with("error: ") || text.contains("Usage: surgetank <COMMAND>") {
            &["--help"]
        } else if text.contains("surgetank run does NOT work here") {
            &["BAD ", "      try: "]
        } else {
            &["surgetank: ", "\n  try:  ", "\n  data: "]
        };
        for part in parts.iter().filter(|part| !text.contains(**part)) {
            complain(format!("there is no {part:?}"));
        }
        if text.contains("docs/") || text.contains("panicked") {
            complain("it points to the source tree, or panics".to_owned());
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let complaints = self.complaints.borrow();
        if !std::thread::panicking() {
            assert!(complaints.is_empty(), "{} complaints:\n{}", complaints.len(), complaints.join("\n"));
        }
    }
}

/// Verbs that the help lists, each with its arguments.
fn verbs() -> Vec<clap::Command> {
    let mut line = surgetank::verbs::command();
    line.build();
    line.get_subcommands().filter(|verb| !verb.is_hide_set()).cloned().collect()
}

/// Words that a verb needs besides.
fn rest(verb: &str) -> &'static [&'static str] {
    REST.iter().find(|(name, _)| *name == verb).map_or(&[], |(_, words)| words)
}

/// Name of the option for a key.
fn option_of(key: &str) -> String {
    match key {
        "tiers" => "--tier".to_owned(),
        "rules" => "--rule".to_owned(),
        "quiet" => "--quiet-period".to_owned(),
        key => format!("--{}", key.replace('_', "-")),
    }
}

fn words(place: &Place, verb: &str, own: &[&str], rest: &[&str]) -> Vec<OsString> {
    let all = [&[verb], own, rest].concat();
    all.iter().map(|word| place.filled(word)).collect()
}

#[test]
fn every_verb_refuses_unknown_options() {
    let place = Place::new();
    for verb in verbs() {
        let name = verb.get_name();
        // (The Python package defines the options of this verb.)
        if name != "workflow" {
            let ended = place.run(&words(&place, name, &["--no-such-option"], rest(name)), &[]);
            place.check(name, &ended, 2, &["--no-such-option"]);
        }
    }
    place.check("no verb", &place.run(&["no-such-verb"], &[]), 2, &["no-such-verb"]);
    place.check("nothing", &place.run::<&str>(&[], &[]), 2, &["Usage"]);
}

/// Each option of each verb has a row with a value that it refuses. A flag refuses a value, and an option refuses a
/// missing one.
#[test]
fn every_option_refuses_bad_values_and_names_itself() {
    let place = Place::new();
    for verb in verbs() {
        let name = verb.get_name();
        for argument in verb.get_arguments().filter(|argument| argument.get_long().is_some()) {
            let long = argument.get_long().unwrap();
            if ["help", "version"].contains(&long) {
                continue;
            }
            let option = format!("--{long}");
            let case = format!("{name} {option}");
            if !argument.get_action().takes_values() {
                let given = format!("{option}=something");
                let ended = place.run(&words(&place, name, &[&given], rest(name)), &[]);
                place.check(&case, &ended, 2, &[&option]);
                continue;
            }
            let missing = place.run(&words(&place, name, &[&option], &[]), &[]);
            place.check(&format!("{case} without a value"), &missing, 2, &[&option]);
            let of_key = KEYS.iter().find(|(key, ..)| option_of(key) == option);
            let own = |verb: &str| {
                let rows = OPTIONS.iter().filter(|row| row.option == option && row.verb == verb);
                rows.map(|row| (row.value, row.exit, row.says, row.rest.unwrap_or(rest(name)))).collect::<Vec<_>>()
            };
            let mut rows = own(name);
            if rows.is_empty() {
                rows = own("*");
            }
            if rows.is_empty()
                && let Some((_, value, says)) = of_key
            {
                rows.push((*value, 2, *says, rest(name)));
            }
            assert!(!rows.is_empty(), "{case} has no row: give it one in tests/bad_input/table.rs");
            for (value, exit, says, rest) in rows {
                // The doctor reports a wrong configuration as a finding.
                let exit = if name == "doctor" { 1 } else { exit };
                let given = format!("{option}={value}");
                let ended = place.run(&words(&place, name, &[&given], rest), &[]);
                place.check(&format!("{case} {value}"), &ended, exit, says);
            }
            // An option that takes any bytes passes here, and the verb then fails at the configuration.
            let broken = [("SURGETANK_FSYNC", "sometimes")];
            let bytes = place.run(&words(&place, name, &[&format!("{option}=x{{bytes}}")], rest(name)), &broken);
            let is_named = [&option, "x\u{fffd}", "SURGETANK_FSYNC"].iter().any(|word| bytes.text.contains(*word));
            if bytes.text.contains("invalid UTF-8 was detected") || bytes.code == Some(2) && !is_named {
                let text = &bytes.text;
                place.complaints.borrow_mut().push(format!("{case} with bytes that are not UTF-8: {text}"));
            }
        }
    }
}

/// Words without an option: commands, paths, names of runs.
#[test]
fn every_argument_has_a_row_and_is_refused_by_name() {
    let place = Place::new();
    let of = |name: &str| verbs().into_iter().find(|verb| verb.get_name() == name);
    for row in ENTRIES {
        let known = of(row.verb).is_some_and(|verb| verb.get_arguments().any(|one| one.get_id() == row.argument));
        assert!(known, "there is no {} {} any more: remove its row", row.verb, row.argument);
    }
    for row in OPTIONS {
        let long = row.option.trim_start_matches("--");
        let has = |verb: &clap::Command| verb.get_arguments().any(|one| one.get_long() == Some(long));
        let known = if row.verb == "*" { verbs().iter().any(has) } else { of(row.verb).as_ref().is_some_and(has) };
        assert!(known, "there is no {} {} any more: remove its row", row.verb, row.option);
    }
    for verb in verbs() {
        for argument in verb.get_arguments().filter(|argument| argument.is_positional()) {
            let of = |row: &&Entry| row.verb == verb.get_name() && row.argument == argument.get_id().as_str();
            assert!(
                ENTRIES.iter().any(|row| of(&row)),
                "{} {} has no row: give it one in tests/bad_input/table.rs",
                verb.get_name(),
                argument.get_id()
            );
        }
    }
    for row in ENTRIES {
        // (The Python package has its own tests of what it refuses.)
        let path = [("PATH", "{absent}")];
        let ended =
            place.run(&words(&place, row.verb, row.words, &[]), if row.verb == "workflow" { &path } else { &[] });
        place.check(&format!("{} {:?}", row.verb, row.words), &ended, row.exit, row.says);
    }
}

#[test]
fn every_key_has_a_row() {
    let known: BTreeSet<&str> = SCALARS.iter().chain(&LISTS).copied().collect();
    let rows: BTreeSet<&str> = KEYS.iter().map(|(key, ..)| *key).collect();
    assert_eq!(rows, known, "keys and the rows of tests/bad_input/table.rs");
    for key in TIER_KEYS {
        assert!(FILES.iter().any(|row| row.text.contains(&format!("[[tiers]]\n{key} "))), "no row of a tier's {key}");
    }
    for key in rule_keys() {
        assert!(FILES.iter().any(|row| row.text.contains(&format!("[[rules]]\n{key} "))), "no row of a rule's {key}");
    }
    let others: BTreeSet<&str> = VARIABLES.iter().filter_map(|(name, ..)| name.strip_prefix("SURGETANK_")).collect();
    for name in OTHER_VARIABLES {
        assert!(others.contains(name), "no row of SURGETANK_{name}");
    }
}

#[test]
fn every_key_of_a_file_refuses_bad_values_by_line() {
    for (key, value, says) in KEYS {
        let place = Place::new();
        // The line before shifts it: the message must name the number of the key's line.
        let wrong = if LISTS.contains(key) { format!("[\"{value}\"]") } else { format!("\"{value}\"") };
        for text in [format!("# {key}\n{key} = {wrong}\n"), format!("\n{key} = {{ a = 1 }}\n")] {
            fs::write(place.path("over/surgetank.toml"), place.filled(&text).as_bytes()).unwrap();
            // A file that is found in the directory cannot set the directory.
            let found: &[&str] = if *key == "over" || text.contains("a = 1") { &[] } else { says };
            // (The variable is empty, so that the file's value is used.)
            let mut ended = place.run(&words(&place, "plan", &[], &[]), &[(&variable(key), "")]);
            if *key == "over" {
                // `--over` finds the file.
                let over = ["--over={over}"];
                ended = place.run(&words(&place, "plan", &over, &[]), &[("SURGETANK_OVER", "")]);
            }
            place.check(&format!("{text:?}"), &ended, 2, &[&["surgetank.toml:2"], found].concat());
        }
    }
}

fn variable(key: &str) -> String {
    format!("SURGETANK_{}", key.to_uppercase())
}

#[test]
fn every_refused_variable_is_named() {
    let place = Place::new();
    for (key, value, says) in KEYS {
        let name = variable(key);
        // (An empty variable counts as not set.)
        let ended = place.run(&["plan"], &[(&name, value)]);
        if !value.is_empty() {
            place.check(&format!("{name}={value}"), &ended, 2, &[&[name.as_str()], *says].concat());
        }
        let bytes = place.run(&["plan"], &[(&name, "x{bytes}")]);
        place.check(&format!("{name} that is not UTF-8"), &bytes, 2, &[&name]);
    }
    for (name, value, verb, exit, says) in VARIABLES {
        let ended = place.run(&[*verb], &[("SURGETANK_TIERS", ""), (name, value)]);
        // (Other findings of the doctor depend on the machine.)
        let exit = if *verb == "doctor" { ended.code.unwrap() } else { *exit };
        place.check(&format!("{name}={value} {verb}"), &ended, exit, says);
    }
}

#[test]
fn every_broken_file_is_refused_by_name_and_line() {
    for row in FILES {
        let place = Place::new();
        let at = place.path("over").join(row.file);
        fs::write(&at, place.filled(row.text).as_bytes()).unwrap();
        let ended = place.run(&["plan"], &[("SURGETANK_TIERS", row.tiers)]);
        place.check(&format!("{}: {:?}", row.file, row.text), &ended, 2, row.says);
        fs::remove_file(&at).unwrap();
    }
}

/// Regression: `--tier a=/dev/null` advised `mkdir -p /dev/null`. A printed command must work as printed.
#[test]
fn advised_command_makes_the_directory() {
    let place = Place::new();
    for name in ["new", "it's new", "two words/and $more"] {
        let path = place.path(name);
        let tier = OsString::from_vec([b"--tier=a=", path.as_os_str().as_bytes()].concat());
        let ended = place.run(&[OsStr::new("plan"), &tier], &[]);
        let advised = ended.text.lines().find_map(|line| line.strip_prefix("  try:  create it: ")).unwrap().to_owned();
        assert!(Command::new("sh").args(["-c", &advised]).status().unwrap().success(), "{advised}");
        assert!(Path::new(&path).is_dir(), "{advised}");
        assert_eq!(place.run(&[OsStr::new("plan"), &tier], &[]).code, Some(0));
    }
}
