//! The page of a run in a real browser. The page causes no error and loads nothing. No element sticks out or covers
//! another one. The page shows the record's figures, and shows hostile names as plain text.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use surgetank::verbs::report::page::render;
use surgetank_core::report::run::{
    Event, EventKind, File, Fill, Process, Program, RunRecord, Sample, Samples, StoreTraffic, Tail, TierRecord,
};
use surgetank_core::report::{NotDurable, PathText, PoolTraffic, Traffic, Verdict};
use surgetank_policy::config::Survives;

const NONCE: &str = "a0b1c2d3";
/// Each name tries to break out of its text in another way.
const NAMES: [&str; 6] = [
    "<script>window.taken=1</script>",
    "\"><img src=x onerror=\"window.taken=1\">",
    "' onmouseover='window.taken=1",
    "</title></svg></pre></table><svg onload=window.taken=1>",
    "a\u{1b}[2J\u{0}\u{202e}gnp.exe",
    "&lt;b&gt; ä 名前",
];

/// Runs in the page, and records its observations in an attribute of the root.
const PROBE: &str = include_str!("page/probe.js");

/// `None` where there is no browser.
fn seen(name: &str, page: &str, wide: u32) -> Option<Value> {
    let found = Command::new("chromium").arg("--version").output();
    if found.is_err() {
        assert!(std::env::var_os("CI").is_none(), "no chromium");
        eprintln!("skipped: no chromium");
        return None;
    }
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("page-{name}-{wide}"));
    drop(fs::remove_dir_all(&dir));
    fs::create_dir_all(&dir).unwrap();
    let probe = format!("<script nonce=\"{NONCE}\">{PROBE}</script>\n<title>");
    fs::write(dir.join("page.html"), page.replacen("<title>", &probe, 1)).unwrap();
    let output = Command::new("chromium")
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"])
        .args(["--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--dump-dom"])
        .arg(format!("--user-data-dir={}", dir.join("profile").display()))
        .arg(format!("--window-size={wide},1000"))
        .arg(format!("file://{}", dir.join("page.html").display()))
        .env("HOME", &dir)
        .output()
        .unwrap();
    let dom = String::from_utf8_lossy(&output.stdout).into_owned();
    let mark = "data-seen=\"";
    let from =
        dom.find(mark).unwrap_or_else(|| panic!("{dom}\n{}", String::from_utf8_lossy(&output.stderr))) + mark.len();
    let coded = &dom[from..from + dom[from..].find('"').unwrap()];
    let mut bytes = Vec::new();
    let mut rest = coded.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        if *first == b'%' {
            bytes.push(u8::from_str_radix(std::str::from_utf8(&tail[..2]).unwrap(), 16).unwrap());
            rest = &tail[2..];
        } else {
            bytes.push(*first);
            rest = tail;
        }
    }
    drop(fs::remove_dir_all(&dir));
    Some(serde_json::from_slice(&bytes).unwrap())
}

#[track_caller]
fn is_sound(seen: &Value, wide: u32) {
    for nothing in ["errors", "out", "over", "loaded"] {
        assert_eq!(seen[nothing], Value::Array(Vec::new()), "{nothing} at {wide}");
    }
    assert_eq!((&seen["wide"], &seen["scrolls"]), (&Value::from(wide), &Value::from(0)));
    assert_eq!((&seen["taken"], &seen["images"], &seen["scripts"]), (&Value::Null, &Value::from(0), &Value::from(2)));
}

/// A long run with many processes and hostile program names.
fn large() -> RunRecord {
    let second = 1_000_000;
    let mut record = RunRecord {
        id: "20261124-101500-7".into(),
        version: "0.1.0".into(),
        host: NAMES[1].into(),
        command: format!("{} {}", NAMES[0], "x".repeat(900)),
        directory: PathText(b"/scratch/\xff\xfe/<i>project".to_vec()),
        store: "s3://bucket/prefix".into(),
        begun_unix_us: 1_795_558_298_000_000,
        command_ended_us: Some(500 * second),
        ended_us: 600 * second,
        command_exit: Some(0),
        exit: Some(3),
        reason: "one file is not in the store".into(),
        agents: 2,
        runs_beside: 1,
        processes_total: 4321,
        files_total: 100_000,
        store_traffic: StoreTraffic {
            out_files: 7,
            out_bytes: 5 << 40,
            busy_us: 90 * second,
            out_bytes_per_second: 300 << 20,
            ..StoreTraffic::default()
        },
        pool_traffic: Some(PoolTraffic {
            member: 3,
            others: vec![Traffic { member: 1, calls: 1 << 40, received_bytes: 1 << 50, sent_bytes: 7 }; 40],
        }),
        tail: Tail { elapsed_us: 100 * second, undrained_files: 3, undrained_bytes: 1 << 35, undrained_operations: 0 },
        ..RunRecord::default()
    };
    for (name, cap_bytes) in [("ram", 64 << 30), ("nvme", 2_u64 << 40)] {
        record.tiers.push(TierRecord {
            name: name.into(),
            cap_bytes,
            survives: Some(Survives::Agent),
            in_bytes: cap_bytes / 2,
            files: 12,
            ..TierRecord::default()
        });
    }
    let mut samples = Samples { interval_us: second, tiers: vec!["ram".into(), "nvme".into()], points: Vec::new() };
    for nth in 0..600_u64 {
        let used_bytes = (nth % 100) * (600 << 20);
        let tiers =
            vec![Fill { used_bytes, dirty_bytes: used_bytes / 2 }, Fill { used_bytes: nth << 31, dirty_bytes: 0 }];
        samples.points.push(Sample {
            at_us: nth * second,
            tiers,
            queue_operations: nth * 31 % 9999,
            queue_bytes: used_bytes,
            drained_bytes: nth << 33,
            fetched_bytes: nth << 20,
        });
    }
    record.samples = samples;
    for nth in 0..1000_u32 {
        let program = NAMES[nth as usize % NAMES.len()].to_owned();
        let begun_us = u64::from(nth) * second / 2;
        let ended_us = (!nth.is_multiple_of(17)).then_some(begun_us + 40 * second);
        let mut process = Process {
            pid: 4_000_000 + nth,
            program,
            command: NAMES[3].into(),
            begun_us,
            ended_us,
            ..Process::default()
        };
        process.io.shim.read_bytes = u64::from(nth) << 30;
        process.io.mediated.write_bytes = 5;
        record.processes.push(process);
    }
    for (nth, name) in (1_u64..).zip(NAMES) {
        let mut program =
            Program { program: name.into(), processes: 700, lived_us: nth * second, ..Program::default() };
        program.io.shim.read_bytes = nth << 40;
        program.io.shim.read_calls = nth * 1_000_000_007;
        (0..40).for_each(|class| program.io.shim.read_sizes.add_many(class, nth << class));
        program.io.mediated.write_bytes = nth;
        program.io.mediated.write_sizes.add(nth);
        record.programs.push(program);
        let path = PathText([name.as_bytes(), b"/\xff/", "long".repeat(60).as_bytes()].concat());
        let place = "ram".into();
        record.files.push(File {
            path: path.clone(),
            size_bytes: nth << 33,
            versions: nth,
            place,
            placement: name.into(),
            ..File::default()
        });
        record.events.push(Event {
            kind: EventKind::Spilled,
            place: "ram".into(),
            reason: name.into(),
            count: nth,
            bytes: 0,
        });
        let verdict = record.verdict.get_or_insert_with(Verdict::default);
        verdict.not_durable.push(NotDurable { path: path.clone(), why: name.into(), safe_at: path });
    }
    record
}

#[test]
fn large_run_with_hostile_names_renders_soundly() {
    let record = large();
    let page = render(&record, NONCE);
    assert!(page.len() < 2 << 20, "{} bytes", page.len());
    for wide in [1280, 600] {
        let Some(seen) = seen("large", &page, wide) else { return };
        is_sound(&seen, wide);
        let programs = seen["tables"]["programs-table"].as_array().unwrap();
        let shown: Vec<(String, u64)> = programs
            .iter()
            .map(|row| (row[0].as_str().unwrap().to_owned(), row[4].as_str().unwrap().parse().unwrap()))
            .collect();
        let should: Vec<(String, u64)> = record
            .programs
            .iter()
            .map(|program| {
                (
                    PathText(program.program.clone().into_bytes()).to_string().replace('\u{202e}', "\\u{202e}"),
                    program.io.total().read_bytes,
                )
            })
            .collect();
        assert_eq!(shown, should);
        let mut names: Vec<&str> =
            seen["sorted"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
        assert_ne!(names, should.iter().map(|one| one.0.as_str()).collect::<Vec<_>>(), "a click does not sort");
        names.sort_unstable();
        let mut all: Vec<&str> = should.iter().map(|one| one.0.as_str()).collect();
        all.sort_unstable();
        assert_eq!(names, all, "a click loses rows");
        assert_eq!(seen["tables"]["processes-table"].as_array().unwrap().len(), 1000);
        assert_eq!(seen["tiles"]["processes"], "4,321");
        assert_eq!(seen["tiles"]["to the store"], "5.00 TiB");
        let files = seen["tables"]["files-table"].as_array().unwrap();
        assert!(
            files[0][0].as_str().unwrap().starts_with("<script>window.taken=1</script>/\u{fffd}/long"),
            "{}",
            files[0][0]
        );
        let pids: Vec<&str> =
            seen["tables"]["processes-table"].as_array().unwrap().iter().map(|row| row[1].as_str().unwrap()).collect();
        assert_eq!((pids[0], pids[999]), ("4000000", "4000999"));
    }
}

#[test]
fn empty_run_renders_soundly() {
    for record in [RunRecord::default(), RunRecord { ended_us: 900, id: "x".into(), ..RunRecord::default() }] {
        for wide in [1280, 600] {
            let Some(seen) = seen("empty", &render(&record, NONCE), wide) else { return };
            is_sound(&seen, wide);
        }
    }
}

#[test]
fn each_of_few_processes_has_a_bar() {
    let mut record = large();
    record.processes.truncate(30);
    record.processes_total = 30;
    let page = render(&record, NONCE);
    assert_eq!(page.matches("rx=\"2\" style=\"width:max(3px").count(), 30);
    for wide in [1280, 600] {
        let Some(seen) = seen("few", &page, wide) else { return };
        is_sound(&seen, wide);
    }
}
