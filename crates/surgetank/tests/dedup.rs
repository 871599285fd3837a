//! `dedup = true` in a rule: programs see plain content, and the store has each content once.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]
#![cfg(all(feature = "compress", feature = "dedup", feature = "s3"))]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use crate::scene::Scene;
use crate::store_node::{Node, stdout_of};
use serde_json::Value;
use surgetank_testkit::servers::s3::S3Server;

const CONFIG: &str = "
[[rules]]
match = \"*\"
dedup = true
[[rules]]
match = \"*.dat\"
dedup = false
[[rules]]
match = \"*.csv\"
compress = \"zstd\"
";
const OPTIONS: [&str; 4] = ["--config", "/mnt/conf.toml", "--json", "/mnt/notes/report"];

fn prepare(name: &str) -> Option<Scene> {
    let mut scene = Scene::new(name)?;
    scene.tier("fast", 64);
    scene.beside("notes");
    fs::write("/mnt/conf.toml", CONFIG).unwrap();
    Some(scene)
}

/// The files in the store, separated into names and content.
fn stored(scene: &Scene) -> (Vec<String>, Vec<PathBuf>) {
    let (content, files): (Vec<PathBuf>, Vec<PathBuf>) =
        scene.store_files().into_keys().partition(|path| path.to_string_lossy().starts_with(".surgetank-blobs"));
    let mut files: Vec<String> = files.iter().map(|path| path.display().to_string()).collect();
    files.sort();
    (files, content)
}

fn noise(at: &str, bytes: u64) -> Vec<u8> {
    let made = Command::new("sh").args(["-c", &format!("head -c {bytes} /dev/urandom >{at}")]).status().unwrap();
    assert!(made.success());
    fs::read(at).unwrap()
}

#[test]
fn shared_files_read_plain_in_this_and_the_next_run() {
    let Some(scene) = prepare("dedup_runs") else { return };
    let bytes = noise("/mnt/notes/bytes", 300_000);
    let first =
        "cp /mnt/notes/bytes a; mkdir d; cp a d/b; cp a c.dat; seq 100000 >n.csv; cp n.csv m.csv; echo small >small
        /mnt/surgetank wait --state /mnt/state .; cp a again; mv d/b d/there; ls -a; stat -c '%n %s' again d/there
        cmp again /mnt/notes/bytes";
    let ended = scene.run(&OPTIONS, first).exits(0);
    let sizes = "again 300000\nd/there 300000\n";
    assert_eq!(ended.stdout, format!(".\n..\na\nagain\nc.dat\nd\nm.csv\nn.csv\nsmall\n{sizes}"));
    let (files, content) = stored(&scene);
    let packed = "m.csv.surgetank.zst.surgetank.ref";
    let twin = "n.csv.surgetank.zst.surgetank.ref";
    let expected = ["a.surgetank.ref", "again.surgetank.ref", "c.dat", "d/there.surgetank.ref", packed, twin, "small"];
    assert_eq!(files, expected, "{}", ended.stderr);
    assert_eq!(content.len(), 2, "of the numbers and of the others: {content:?}");
    let report: Value = serde_json::from_slice(&fs::read("/mnt/notes/report").unwrap()).unwrap();
    let savings = &report["summary"]["drain"]["savings"];
    assert_eq!(savings["deduplicated_files"], 5, "{report:#}");
    // (The drain may send a small file twice at the same time.)
    let sent = savings["new_bytes"].as_u64().unwrap();
    assert!(sent <= savings["deduplicated_bytes"].as_u64().unwrap() - 300_000, "{report:#}");
    assert!(ended.stderr.contains("deduplicated: 5 files"), "{}", ended.stderr);
    let text = fs::read_to_string(scene.path("again.surgetank.ref")).unwrap();
    let line = text.lines().find(|line| line.starts_with(".surgetank-blobs")).unwrap();
    assert!(fs::read(scene.path(line)).unwrap() == bytes, "the reference names its content");

    // Another agent, with nothing on its tiers.
    let second = "cmp again d/there; cmp n.csv m.csv; seq 100000 | cmp - n.csv; echo more >>a; rm again; tail -c 5 a
        test ! -e .surgetank-blobs-0; mkdir .surgetank-blobs-0 2>/dev/null && echo made; true";
    scene.run(&OPTIONS, second).exits(0).prints("more\n");
    assert!(scene.read(line) == bytes);
    scene.run(&OPTIONS[..2], "cmp d/there /mnt/notes/bytes; tail -c 5 a").exits(0).prints("more\n");
    // Without the rule the run shows the stored files as they are.
    scene
        .run(&[], "ls; head -n 1 a.surgetank.ref")
        .exits(0)
        .prints(&format!("a.surgetank.ref\nc.dat\nd\n{packed}\n{twin}\nsmall\nsurgetank reference 1\n"));

    // Content without a reference is removed when it is old.
    let gc = |options: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_surgetank"));
        command.args(["gc", "--over"]).arg(&scene.over).args(options);
        stdout_of(&command.output().unwrap())
    };
    fs::remove_file(scene.path("n.csv.surgetank.zst.surgetank.ref")).unwrap();
    fs::remove_file(scene.path("m.csv.surgetank.zst.surgetank.ref")).unwrap();
    assert!(gc(&[]).contains("0 contents, 0 B, removed"));
    let long_ago = SystemTime::now() - Duration::from_secs(40 * 24 * 3600);
    for path in stored(&scene).1 {
        fs::File::open(scene.path(path.to_str().unwrap())).unwrap().set_modified(long_ago).unwrap();
    }
    assert!(gc(&["--dry-run"]).contains("\n1 contents, "));
    let json: Value = serde_json::from_str(&gc(&["--json"])).unwrap();
    assert_eq!(json["content"]["blobs"].as_array().unwrap().len(), 1, "{json:#}");
    assert_eq!(json["content"]["references"], 2);
    scene.run(&OPTIONS[..2], "cmp d/there /mnt/notes/bytes; tail -c 5 a").exits(0).prints("more\n");
    scene.is_clean();
}

/// Killed at any point: each name has one complete version, old or new, and every reference has its content.
#[test]
fn killed_agent_leaves_no_dangling_reference() {
    for point in
        ["packed.referred", "packed.behind", "packed.published", "packed.renamed", "drain.stage", "drain.durable"]
    {
        for alone in [true, false] {
            std::thread::spawn(move || {
                let name = format!("dedup_killed_{}_{alone}", point.replace('.', "_"));
                let Some(scene) = prepare(&name) else { return };
                for name in ["one", "two", "three"] {
                    noise(&format!("/mnt/notes/{name}"), 200_000);
                }
                scene.run(&OPTIONS[..2], "cp /mnt/notes/one a; cp a b; echo small >c").exits(0);
                // Each name changes its form, or becomes another file's name.
                let work = "echo small >a; cp /mnt/notes/two c; mv b d; mv a b; cp d new; cp /mnt/notes/three more; mv c a";
                let mut command = scene.run_command(&[&OPTIONS[..2], &["--quiet-period", "1h"]].concat(), work);
                command.env("SURGETANK_CRASH", format!("{point}:1")).env("SURGETANK_CRASH_LOG", "/mnt/notes/points");
                if !alone {
                    command.env("SURGETANK_CRASH_SUPERVISOR", "1");
                }
                drop(crate::scene::Running::of(command).ends());
                let passed = fs::read_to_string("/mnt/notes/points").unwrap();
                assert!(passed.lines().any(|passed| passed == point), "{point} was never passed: no agent was killed");
                drop(scene.run(&OPTIONS[..2], "true"));
                let look = "ls; cmp a /mnt/notes/two; cat b; for n in d new; do cmp $n /mnt/notes/one; done; cmp more /mnt/notes/three";
                let seen = scene.run(&OPTIONS[..2], look).exits(0);
                assert_eq!(seen.stdout, "a\nb\nd\nmore\nnew\nsmall\n", "{point}, alone: {alone}\n{}", seen.stderr);
                let (files, content) = stored(&scene);
                let expected = ["a", "b", "d", "more", "new"]
                    .map(|name| if name == "b" { name.to_owned() } else { format!("{name}.surgetank.ref") });
                assert_eq!(files, expected, "{point}, alone: {alone}");
                assert_eq!(content.len(), 3, "{point}, alone: {alone}: temporaries are left: {content:?}");
            })
            .join()
            .unwrap();
        }
    }
}

#[test]
fn same_content_is_uploaded_once() {
    let Some(server) = S3Server::start() else { return };
    let store = server.url("shared");
    let run = |node: &Node, options: &[&str], script: &str| {
        stdout_of(&node.command(&store, options, script).envs(server.environment()).output().unwrap())
    };
    let conf = tempfile::tempdir().unwrap();
    let conf = conf.path().join("conf.toml");
    fs::write(&conf, CONFIG).unwrap();
    let options = ["--config", conf.to_str().unwrap()];
    let node = Node::new();
    let script = "head -c 20000000 /dev/urandom >a; cp a b; mkdir d; cp a d/c; head -c 70000 a >part; sha256sum <a; sha256sum <part";
    let sums = run(&node, &options, script);
    let total = || walk(&server.files());
    let once = total();
    assert!((20_000_000..21_000_000).contains(&once), "{once} bytes on the server");
    // Another node, which has a file with the same content.
    let node = Node::new();
    let script =
        "cp b again; mv d e; sha256sum <e/c; sha256sum <part; ls -a | grep -c blobs || true; stat -c %s again e/c";
    assert_eq!(run(&node, &options, script), format!("{sums}0\n20000000\n20000000\n"));
    assert!(total() < once + 10_000, "{} bytes on the server", total());
    let node = Node::new();
    let report = node.path("report");
    let script = "dd if=again bs=1M skip=10 count=1 status=none | wc -c; sha256sum <again";
    let output = run(&node, &[&options[..], &["--json", report.to_str().unwrap()]].concat(), script);
    assert_eq!(output, format!("1048576\n{}\n", sums.lines().next().unwrap()));
    let mut gc = Command::new(env!("CARGO_BIN_EXE_surgetank"));
    gc.envs(server.environment())
        .args(["gc", "--store", &store, "--unused-for", "0s", "--over"])
        .arg(node.path("over"));
    assert!(stdout_of(&gc.output().unwrap()).contains("0 contents, 0 B, removed"));
    run(&Node::new(), &options, "rm a b again");
    assert!(stdout_of(&gc.output().unwrap()).contains("0 contents, 0 B, removed"), "one file still has the content");
    run(&Node::new(), &options, "rm e/c");
    let output = stdout_of(&gc.output().unwrap());
    assert!(output.contains("\n1 contents, "), "no file has the content: {output}");
    assert!(total() < 200_000);
    run(
        &Node::new(),
        &options,
        &format!("echo '{}' | cut -c 1-64 >sum; sha256sum <part | grep -q -f sum", sums.lines().nth(1).unwrap()),
    );
}

/// Bytes of all files below the directory.
fn walk(dir: &Path) -> u64 {
    let each = fs::read_dir(dir).unwrap().flatten().map(|entry| {
        let meta = entry.metadata().unwrap();
        if meta.is_dir() { walk(&entry.path()) } else { meta.len() }
    });
    each.sum()
}
