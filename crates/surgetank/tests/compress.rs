//! `compress = "zstd"` in a rule: programs see plain content, and `zstd -d` opens the files in the store.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]
#![cfg(all(feature = "compress", feature = "s3"))]

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::scene::{Scene, eventually};
use crate::store_node::{Node, stdout_of};
use serde_json::Value;
use surgetank_testkit::servers::s3::S3Server;

const CONFIG: &str = "
[[rules]]
match = \"*\"
compress = \"zstd:1\"
[[rules]]
match = \"*.dat\"
compress = \"none\"
";

fn prepare(name: &str) -> Option<Scene> {
    let mut scene = Scene::new(name)?;
    scene.tier("fast", 64);
    scene.beside("notes");
    fs::write("/mnt/conf.toml", CONFIG).unwrap();
    Some(scene)
}

const OPTIONS: [&str; 4] = ["--config", "/mnt/conf.toml", "--json", "/mnt/notes/report"];

/// The output of `zstd -d` for a file of the store.
fn unpacked(path: &Path) -> Vec<u8> {
    let output = Command::new("zstd").args(["-d", "-q", "-c"]).arg(path).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

fn numbers(last: u32) -> Vec<u8> {
    (1..=last).flat_map(|number| format!("{number}\n").into_bytes()).collect()
}

#[test]
fn compressed_files_read_plain_in_this_and_the_next_run() {
    let Some(scene) = prepare("compress_runs") else { return };
    fs::write(scene.path("stored"), numbers(50_000)).unwrap();
    let first = "seq 200000 >table; seq 300 >small.dat; head -c 100000 /dev/urandom >dense; cp dense /mnt/notes/
        mkdir d; seq 100000 >d/moved; /mnt/surgetank wait --state /mnt/state .
        stat -c '%n %s' table d/moved; mv d/moved d/there; echo more >>stored; seq 40000 >gone
        /mnt/surgetank evict --state /mnt/state . >&2
        tail -n 1 table; sed -n 100000p table; sha256sum <table; rm gone; ls; setfattr -n user.tag -v kept table";
    let ended = scene.run(&OPTIONS, first).exits(0);
    let expected = numbers(200_000);
    let sum = Command::new("sh").args(["-c", "seq 200000 | sha256sum"]).output().unwrap().stdout;
    let sum = String::from_utf8(sum).unwrap();
    let sizes = format!("table {}\nd/moved {}\n", expected.len(), numbers(100_000).len());
    assert_eq!(ended.stdout, format!("{sizes}200000\n100000\n{sum}d\ndense\nsmall.dat\nstored\ntable\n"));
    let mut stored: Vec<String> = scene.store_files().into_keys().map(|path| path.display().to_string()).collect();
    stored.sort();
    let packed = ["d/there.surgetank.zst", "dense", "small.dat", "stored.surgetank.zst", "table.surgetank.zst"];
    assert_eq!(stored, packed, "{}", ended.stderr);
    assert!(unpacked(&scene.path("table.surgetank.zst")) == expected);
    assert!(unpacked(&scene.path("d/there.surgetank.zst")) == numbers(100_000));
    assert!(unpacked(&scene.path("stored.surgetank.zst")) == [numbers(50_000), b"more\n".to_vec()].concat());
    let report: Value = serde_json::from_slice(&fs::read("/mnt/notes/report").unwrap()).unwrap();
    let savings = &report["summary"]["drain"]["savings"];
    assert!(savings["stored_bytes"].as_u64().unwrap() * 2 < savings["content_bytes"].as_u64().unwrap(), "{report:#}");
    assert!(ended.stderr.contains("compressed: "), "{}", ended.stderr);

    // Another agent, with nothing on its tiers.
    let second = "sha256sum <table; getfattr --only-values -n user.tag table; echo
        cmp dense /mnt/notes/dense; seq 5 >table; truncate -s 3 d/there; mv d/there .; ln -s table link";
    scene.run(&OPTIONS, second).exits(0).prints(&format!("{sum}kept\n"));
    let mut stored: Vec<String> = scene.store_files().into_keys().map(|path| path.display().to_string()).collect();
    stored.sort();
    assert_eq!(stored, ["dense", "link", "small.dat", "stored.surgetank.zst", "table", "there"]);
    assert_eq!(scene.read("table"), numbers(5));
    assert_eq!(scene.read("there"), b"1\n2");
    // Without the rule the run shows the stored files as they are.
    scene
        .run(&[], "ls; zstd -d -q -c stored.surgetank.zst | tail -n 1")
        .exits(0)
        .prints("d\ndense\nlink\nsmall.dat\nstored.surgetank.zst\ntable\nthere\nmore\n");
    scene.is_clean();
}

/// Killed at any point: each name has one complete version, old or new.
#[test]
fn killed_agent_leaves_each_name_once() {
    for point in ["packed.published", "packed.renamed", "drain.stage", "drain.durable"] {
        for alone in [true, false] {
            std::thread::spawn(move || {
                let name = format!("compress_killed_{}_{alone}", point.replace('.', "_"));
                let Some(scene) = prepare(&name) else { return };
                scene
                    .run(&OPTIONS[..2], "seq 20000 >a; seq 20001 >b; head -c 30000 /dev/urandom >c; cp c /mnt/notes/c")
                    .exits(0);
                // Each name changes its form, or becomes another file's name.
                let work = "cat /mnt/notes/c >a; seq 30000 >c; mv b d; mv a b; seq 40000 >new; mv c a";
                let mut command = scene.run_command(&[&OPTIONS[..2], &["--quiet-period", "1h"]].concat(), work);
                command.env("SURGETANK_CRASH", format!("{point}:1")).env("SURGETANK_CRASH_LOG", "/mnt/notes/points");
                if !alone {
                    command.env("SURGETANK_CRASH_SUPERVISOR", "1");
                }
                drop(crate::scene::Running::of(command).ends());
                let passed = fs::read_to_string("/mnt/notes/points").unwrap();
                assert!(passed.lines().any(|passed| passed == point), "{point} was never passed: no agent was killed");
                drop(scene.run(&OPTIONS[..2], "true"));
                let seen = scene.run(&OPTIONS[..2], "ls; wc -l <a; cmp b /mnt/notes/c; wc -l <d; wc -l <new").exits(0);
                assert_eq!(
                    seen.stdout, "a\nb\nd\nnew\n30000\n20001\n40000\n",
                    "{point}, alone: {alone}\n{}",
                    seen.stderr
                );
                let stored: Vec<String> =
                    scene.store_files().into_keys().map(|path| path.display().to_string()).collect();
                let packed = ["a.surgetank.zst", "b", "d.surgetank.zst", "new.surgetank.zst"];
                assert_eq!(stored, packed, "{point}, alone: {alone}");
            })
            .join()
            .unwrap();
        }
    }
}

/// Another client puts a plain file where the drain is to publish a file, or where a compressed file is stored.
#[test]
fn conflict_with_another_client_keeps_both_files() {
    let Some(scene) = prepare("compress_conflict") else { return };
    scene.run(&OPTIONS[..2], "seq 20000 >changed").exits(0);
    let options = [&OPTIONS[..2], &["--quiet-period", "0s"]].concat();
    let script = "exec 3>>changed 4>made; echo ours >&3; seq 30000 >&4; touch /mnt/notes/written
        until test -e /mnt/notes/meddled; do sleep 0.01; done";
    let running = scene.start(&options, script);
    eventually("the run's files are written", || Path::new("/mnt/notes/written").exists());
    for name in ["changed", "made"] {
        fs::write(scene.path(name), "theirs").unwrap();
    }
    fs::write("/mnt/notes/meddled", "").unwrap();
    running.ends().exits(3).says(&["changed", "made", "both kept"]);
    let seen = scene.run(&OPTIONS[..2], "cat changed made; wc -l <$(ls -d changed.*); wc -l <$(ls -d made.*)").exits(0);
    assert_eq!(seen.stdout, "theirstheirs20001\n30000\n");
}

#[test]
fn objects_are_compressed_and_read_by_ranges() {
    let Some(server) = S3Server::start() else { return };
    let store = server.url("packed");
    let run = |node: &Node, options: &[&str], script: &str| {
        stdout_of(&node.command(&store, options, script).envs(server.environment()).output().unwrap())
    };
    let conf = tempfile::tempdir().unwrap();
    let conf = conf.path().join("conf.toml");
    fs::write(&conf, CONFIG).unwrap();
    let options = ["--config", conf.to_str().unwrap()];
    let node = Node::new();
    let script = "seq 3000000 >table; seq 20000 >other; mv other renamed";
    run(&node, &options, script);
    let node = Node::new();
    let script = "stat -c %s table; sed -n 2999999p table; wc -l <renamed; sha256sum <table; seq 3000000 | sha256sum";
    let output = run(&node, &options, script);
    let lines: Vec<&str> = output.lines().collect();
    let length = numbers(3_000_000).len().to_string();
    assert_eq!(lines[..3], [&*length, "2999999", "20000"]);
    assert_eq!(lines[3], lines[4]);
    let node = Node::new();
    let script = "ls; zstd -d -q -c renamed.surgetank.zst | tail -n 1";
    let output = run(&node, &[], script);
    assert_eq!(output, "renamed.surgetank.zst\ntable.surgetank.zst\n20000\n");
}
