//! The record of a run, compared with what strace sees of the same run.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::Scene;

/// A rule says that all files are small, so a process that writes one gets it from the shim.
pub const SMALL: [&str; 2] = ["--config", "/mnt/small.toml"];

pub fn small_scene(name: &str) -> Option<Scene> {
    let mut scene = Scene::new(name)?;
    scene.tier("fast", 512);
    fs::write("/mnt/small.toml", "[[rules]]\nmatch = \"**\"\nsize = \"16M\"\n").unwrap();
    Some(scene)
}

/// The newest record.
#[track_caller]
pub fn record(scene: &Scene) -> Value {
    scene.verb("report", &["--json"]).exits(0).json()
}

pub fn records(scene: &Scene) -> Vec<Value> {
    scene.verb("report", &["--list", "--json"]).exits(0).json().as_array().unwrap().clone()
}

pub fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("no number: {value}"))
}

/// Bytes read and written by processes of that name through these doors. An empty name means all processes.
pub fn moved(record: &Value, program: &str, doors: &[&str]) -> (u64, u64) {
    let mut sum = (0, 0);
    for process in record["processes"].as_array().unwrap() {
        if program.is_empty() || process["program"] == program {
            for door in doors {
                sum.0 += number(&process["io"][door]["read_bytes"]);
                sum.1 += number(&process["io"][door]["write_bytes"]);
            }
        }
    }
    sum
}

pub const COUNTED: [&str; 3] = ["shim", "passthrough", "mediated"];

/// How many bytes of a program the shim reads before it starts the program (`shim/foreign.c`).
const HEAD: &str = "511, 0)";

/// Bytes that strace saw (`-ff -y`, one file for each process) on files below these directories. The shim's own reads
/// of a started program are left out.
pub fn traced(logs: &Path, below: &[&str]) -> (u64, u64) {
    let mut sum = (0, 0);
    for log in fs::read_dir(logs).unwrap().flatten() {
        let text = fs::read_to_string(log.path()).unwrap();
        let is_at_head = |line: &&str| line.starts_with("pread64(") && line.contains(HEAD);
        let path_of = |line: &str| line.split_once('<')?.1.split_once('>').map(|(path, _)| path.to_owned());
        let started: Vec<String> = text.lines().filter(is_at_head).filter_map(path_of).collect();
        for line in text.lines() {
            if line.starts_with("pread64(") && path_of(line).is_some_and(|path| started.contains(&path)) {
                continue;
            }
            let (Some((call, rest)), Some((_, answer))) = (line.split_once('('), line.rsplit_once(" = ")) else {
                continue;
            };
            let Ok(bytes) = answer.split_whitespace().next().unwrap_or("").parse::<u64>() else { continue };
            let paths: Vec<&str> =
                rest.split('<').skip(1).filter_map(|part| part.split_once('>')).map(|part| part.0).collect();
            let ours = |at: usize| paths.get(at).is_some_and(|path| below.iter().any(|dir| path.starts_with(dir)));
            let (reads, writes) = match call.trim() {
                "read" | "pread64" | "readv" | "preadv" | "preadv2" => (ours(0), false),
                "write" | "pwrite64" | "writev" | "pwritev" | "pwritev2" => (false, ours(0)),
                "sendfile" => (ours(1), ours(0)),
                "copy_file_range" | "splice" => (ours(0), ours(1)),
                _ => continue,
            };
            sum.0 += if reads { bytes } else { 0 };
            sum.1 += if writes { bytes } else { 0 };
        }
    }
    sum
}

/// Runs the script under strace, and compares the record with strace's numbers.
#[track_caller]
pub fn is_as_traced(scene: &Scene, name: &str, script: &str) -> Value {
    let logs = PathBuf::from(format!("/mnt/trace-{name}"));
    fs::create_dir(&logs).unwrap();
    fs::write("/mnt/script.sh", format!("set -eu\n{script}")).unwrap();
    let calls =
        "read,pread64,readv,preadv,preadv2,write,pwrite64,writev,pwritev,pwritev2,sendfile,copy_file_range,splice";
    let traced_run = format!(
        "exec strace -ff -y -s 0 -e trace={calls} -e signal=none -o {}/log bash /mnt/script.sh",
        logs.display()
    );
    scene.run(&SMALL, &traced_run).exits(0);
    let record = record(scene);
    let recorded = moved(&record, "", &COUNTED);
    let true_bytes = traced(&logs, &["/mnt/tier-fast/", "/mnt/project/"]);
    assert!(true_bytes.0 + true_bytes.1 > 0, "{name}: strace saw nothing");
    for (what, recorded, is) in [("read", recorded.0, true_bytes.0), ("written", recorded.1, true_bytes.1)] {
        let off = recorded.abs_diff(is);
        println!("{name}: {what}: recorded {recorded}, strace {is}");
        assert!(off * 100 <= is, "{name}: {what}: recorded {recorded}, strace saw {is}\n{:#}", record["programs"]);
    }
    record
}
