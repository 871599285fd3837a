//! `run --trace`: which process read and wrote which bytes, and where in the file.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::fs;
use std::path::Path;

use crate::scene::record::{number, record, records, small_scene};
use crate::scene::{Scene, eventually};
use serde_json::Value;

const PLAIN: [&str; 2] = ["--config", "/mnt/small.toml"];
const TRACED: [&str; 3] = ["--config", "/mnt/small.toml", "--trace"];

/// A command that runs this program.
fn python(name: &str, text: &str) -> String {
    fs::write(format!("/mnt/{name}.py"), text).unwrap();
    format!("/usr/bin/python3 /mnt/{name}.py")
}

/// The accesses of all processes to a file, each as (program, access).
fn accesses<'a>(record: &'a Value, path: &str) -> Vec<(&'a str, &'a Value)> {
    let processes = record["processes"].as_array().unwrap().iter();
    processes
        .flat_map(|process| {
            let files = process["files"].as_array().map(Vec::as_slice).unwrap_or_default();
            files.iter().map(|access| (process["program"].as_str().unwrap(), access))
        })
        .filter(|(_, access)| access["path"] == path)
        .collect()
}

fn uses(record: &Value, path: &str) -> Vec<(String, bool, bool)> {
    let mut uses: Vec<_> = accesses(record, path)
        .into_iter()
        .map(|(program, access)| {
            (program.to_owned(), access["reads"].as_bool().unwrap(), access["writes"].as_bool().unwrap())
        })
        .collect();
    uses.sort();
    uses
}

#[track_caller]
fn traced(scene: &Scene, script: &str) -> Value {
    scene.run(&TRACED, script).exits(0);
    let record = record(scene);
    assert_eq!(record["traced"], true);
    record
}

#[test]
fn trace_names_programs_files_and_bytes() {
    let Some(scene) = small_scene("trace_how") else { return };
    let strided = python(
        "strided",
        "import os\nf = os.open('data', os.O_RDONLY)\nfor at in range(0, 1000000, 40000): os.pread(f, 1000, at)\n",
    );
    let again = python(
        "again",
        "import os\nf = os.open('data', os.O_RDONLY)\nfor n in range(3): os.pread(f, 4096, 0); os.pread(f, 4096, 4096)\n",
    );
    let made = "head -c 1000000 /dev/urandom > data.tmp; mv data.tmp data";
    let record = traced(&scene, &format!("{made}; {strided}; {again}; sort < data | tail -c 100 > end; rm data"));
    let of = |program: &str, at: usize| {
        let mut those = accesses(&record, "data").into_iter().filter(|(name, _)| *name == program);
        those.nth(at).unwrap_or_else(|| panic!("no {program} {at}: {record:#}")).1
    };
    let head = &of("head", 0)["write"];
    assert_eq!((number(&head["bytes"]), number(&head["distinct_bytes"])), (1_000_000, 1_000_000));
    assert_eq!(head["calls"], head["sequential_calls"]);
    let strided = &of("python3", 0)["read"];
    assert_eq!((number(&strided["calls"]), number(&strided["distinct_bytes"])), (25, 25_000));
    assert_eq!((number(&strided["strides"][0]["bytes"]), number(&strided["strides"][0]["calls"])), (40_000, 24));
    let again = &of("python3", 1)["read"];
    assert_eq!((number(&again["bytes"]), number(&again["distinct_bytes"])), (6 * 4096, 2 * 4096));
    let sorted = of("sort", 0);
    assert_eq!((number(&sorted["read"]["bytes"]), number(&sorted["size_bytes"])), (1_000_000, 1_000_000));
    // Only the pipe shows that the end comes from the data.
    let pipeline = |program: &str| {
        let processes = record["processes"].as_array().unwrap();
        processes.iter().find(|process| process["program"] == program).unwrap()["pipeline"].clone()
    };
    assert_eq!(pipeline("sort"), pipeline("tail"));
    assert!(number(&pipeline("sort")) > 0 && pipeline("head").is_null());
    assert_eq!(uses(&record, "end"), [("tail".to_owned(), false, true)]);
    // The temporary name of the file has no accesses of its own.
    assert_eq!(uses(&record, "data.tmp"), []);
    let text = scene.verb("report", &[]).exits(0).stdout;
    assert!(text.contains("stride 40000") && text.contains("66%"), "{text}");
    scene.verb("report", &["--html", "/mnt/page.html"]).exits(0);
    assert!(fs::read_to_string("/mnt/page.html").unwrap().contains("stride 40000"));
}

#[test]
fn mapped_files_and_unshimmed_programs_are_traced() {
    let Some(scene) = small_scene("trace_mapped") else { return };
    let mapping = "import mmap, os\nf = open('made', 'w+b'); f.truncate(1 << 16); m = mmap.mmap(f.fileno(), 0)\nm[:] = b'x' * (1 << 16); m.flush(); m.close(); f.close()\n";
    let asked = "import mmap\nf = open('made', 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)\nassert sum(m[::4096]) == 16 * ord('x')\n";
    let patched = "import mmap\nf = open('made', 'r+b'); m = mmap.mmap(f.fileno(), 0); m[5:6] = b'y'; m.flush()\n";
    let script =
        [python("mapping", mapping), python("asked", asked), python("patched", patched), "./copy".into()].join("; ");
    let source = "#include <fcntl.h>\n#include <unistd.h>\nint main(void) { static char b[4096]; int f = open(\"made\", O_RDONLY), t = open(\"copied\", O_CREAT | O_WRONLY, 0644); for (ssize_t n; (n = read(f, b, sizeof b)) > 0;) if (write(t, b, n) != n) return 1; return 0; }\n";
    fs::write("/mnt/w.c", source).unwrap();
    crate::scene::succeed(std::process::Command::new("gcc").args(["-static", "-o", "/mnt/project/copy", "/mnt/w.c"]));
    scene.run(&TRACED, &script).exits(0);
    let record = record(&scene);
    let expected = [("copy", true, false), ("python3", false, true), ("python3", true, false), ("python3", true, true)];
    assert_eq!(uses(&record, "made"), expected.map(|(program, reads, writes)| (program.to_owned(), reads, writes)));
    assert_eq!(uses(&record, "copied"), [("copy".to_owned(), false, true)]);
    let copied = accesses(&record, "copied");
    let write = &copied.first().unwrap().1["write"];
    assert_eq!((number(&write["bytes"]), number(&write["calls"])), (1 << 16, 16));
    assert_eq!(fs::read("/mnt/project/copied").unwrap()[..8], *b"xxxxxyxx");
}

/// An earlier run filled the tier, and an untraced run has the file open meanwhile. The trace must be complete all
/// the same.
#[test]
fn trace_beside_another_run_has_its_own_run_only() {
    let Some(scene) = small_scene("trace_beside") else { return };
    let other = scene.start(&PLAIN, "echo a > first; until [ -e go ]; do sleep 0.05; done; cat first > other");
    eventually("the other run has begun", || scene.over.join("first").exists());
    scene.run(&TRACED, "cat first > mine; touch go").exits(0);
    other.ends().exits(0);
    let records = records(&scene);
    let of = |traced: bool| records.iter().find(|record| record["traced"] == traced).unwrap();
    assert_eq!(uses(of(true), "first"), [("cat".to_owned(), true, false)]);
    assert_eq!(uses(of(true), "other"), []);
    let untraced = of(false)["processes"].as_array().unwrap();
    assert!(untraced.iter().all(|process| process["files"].is_null()), "{untraced:#?}");
}

/// The records that a running run has written so far.
fn noted(scene: &Scene) -> String {
    let places = fs::read_dir(&scene.state).unwrap().flatten();
    let records = places.filter_map(|place| fs::read_dir(place.path().join("runs")).ok()).flatten().flatten();
    records.filter_map(|record| fs::read_to_string(record.path()).ok()).collect()
}

#[test]
fn trace_continues_after_an_agent_kill() {
    let Some(scene) = small_scene("trace_survives") else { return };
    let running =
        scene.start(&TRACED, "echo a > before; touch ready; until [ -e go ]; do sleep 0.05; done; cat before > after");
    eventually("the script is ready", || scene.over.join("ready").exists());
    eventually("the trace so far is recorded", || noted(&scene).contains("before"));
    scene.replace_agent();
    let joined = || scene.log().matches("joined run=").count() == 2;
    eventually("the run has joined the next agent", joined);
    fs::write(scene.over.join("go"), "").unwrap();
    running.ends().exits(0);
    let record = record(&scene);
    assert_eq!((record["traced"].clone(), number(&record["agents"])), (true.into(), 2));
    assert_eq!(uses(&record, "after"), [("cat".to_owned(), false, true)]);
    assert!(uses(&record, "before").contains(&("cat".to_owned(), true, false)));
}

#[test]
fn trace_without_a_mount_is_refused_before_the_run() {
    let Some(scene) = small_scene("trace_refused") else { return };
    let refused = scene.run(&[&TRACED[..], &["--door", "seccomp"]].concat(), "touch begun");
    refused.says(&["cannot be traced", "without a mount", "without --trace", "nothing was begun"]);
    assert!(!Path::new("/mnt/project/begun").exists());
    // Regression: the run was reported as killed.
    let record = record(&scene);
    assert_eq!((number(&record["exit"]), record["traced"].clone()), (1, false.into()));
    assert!(record["reason"].as_str().unwrap().contains("nothing was begun"), "{record:#}");
}
