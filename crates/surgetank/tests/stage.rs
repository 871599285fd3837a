//! `stage-in` and `stage-out`: trees between directories and object servers, with interruptions and continuations.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]
#![allow(clippy::duplicate_mod, reason = "both kinds of servers make certificates")]
#![cfg(feature = "s3")]

#[cfg(feature = "redis")]
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use surgetank_testkit::servers::s3::{BUCKET, S3Server};
use tempfile::TempDir;

struct Scene {
    scratch: TempDir,
}

/// The numbers of a report: copied and present files, remaining files, failures.
type Counts = (u64, u64, u64, usize);

impl Scene {
    fn new() -> Self {
        let scratch = TempDir::new().unwrap();
        fs::create_dir(scratch.path().join("state")).unwrap();
        fs::set_permissions(scratch.path().join("state"), fs::Permissions::from_mode(0o700)).unwrap();
        Self { scratch }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn shown(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    #[track_caller]
    fn script(&self, text: &str) {
        let output = Command::new("sh").args(["-euc", text]).current_dir(self.scratch.path()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    fn command(&self, server: Option<&S3Server>, verb: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_surgetank"));
        command.arg(verb).arg("--state").arg(self.path("state")).args(arguments).current_dir(self.scratch.path());
        if let Some(server) = server {
            command.envs(server.environment());
        }
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs `stage-in`, and checks the exit code.
    #[track_caller]
    fn stage(&self, server: Option<&S3Server>, code: i32, arguments: &[&str]) -> Counts {
        let output = self.command(server, "stage-in", &[&["--json"], arguments].concat()).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{}", String::from_utf8_lossy(&output.stderr));
        counts(&output)
    }

    /// Content, modes, owners, times in nanoseconds, links and extended attributes.
    #[track_caller]
    fn same(&self, one: &str, other: &str) {
        let output = Command::new("rsync")
            .args(["-aXnic", "--delete", "--modify-window=-1"])
            .arg(self.path(one).join(""))
            .arg(self.path(other).join(""))
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(String::from_utf8_lossy(&output.stdout), "");
    }
}

#[track_caller]
fn counts(output: &Output) -> Counts {
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let number = |name: &str| report[name].as_u64().unwrap();
    assert_eq!(report["exit"].as_i64(), output.status.code().map(i64::from));
    let failed = report["failed"].as_array().unwrap().len();
    (number("copied_files"), number("present_files"), number("left_files"), failed)
}

const TREE: &str = "
    umask 022
    mkdir -p tree/d/e tree/empty tree/closed
    echo hello >tree/d/hello; chmod 600 tree/d/hello; setfattr -n user.origin -v run7 tree/d/hello
    ln -s d/hello tree/link; ln -s nowhere tree/d/dangling
    for n in 1 2 3 4 5 6 7 8 9; do echo $n >tree/d/e/n$n; done
    : >tree/nothing
    printf odd >'tree/d/a b+c%41 ü&<>'
    head -c 20000000 /dev/urandom >tree/large
    touch -d '2020-01-02 03:04:05.123456789' tree/d/hello tree/large; touch -h -d '2019-01-01' tree/link
    chmod 555 tree/closed; touch -d '2021-02-03 04:05:06.5' tree/d/e tree/d tree/empty tree/closed tree
";
/// Without directories.
const TREE_FILES: u64 = 15;

#[test]
fn tree_staged_through_two_buckets_is_the_same() {
    let (Some(server), Some(other)) = (S3Server::start(), S3Server::start()) else { return };
    let scene = Scene::new();
    scene.script(TREE);
    let (here, there) = (server.url("in"), other.url("deep/er"));
    assert_eq!(scene.stage(Some(&server), 0, &["--to", &here, "tree"]), (TREE_FILES, 0, 0, 0));
    assert_eq!(fs::read(server.files().join("in/tree/d/hello")).unwrap(), b"hello\n");
    // Again: all files are present. With a change: only the changed file is copied.
    assert_eq!(scene.stage(Some(&server), 0, &["--to", &here, "tree"]), (0, TREE_FILES, 0, 0));
    scene.script("echo other >tree/d/e/n3; touch -d '2021-02-03 04:05:06.5' tree/d/e");
    assert_eq!(scene.stage(Some(&server), 0, &["--to", &here, "tree"]), (1, TREE_FILES - 1, 0, 0));
    // From server to server, and to a directory that has to be made.
    let all = server.url("in/tree/");
    assert_eq!(scene.stage(Some(&server), 0, &["--to", &there, &all]), (TREE_FILES, 0, 0, 0));
    assert_eq!(
        scene.stage(Some(&other), 0, &["--verify", "reread", "--to", "back/tree", &other.url("deep/er/")]).0,
        TREE_FILES
    );
    scene.same("tree/d", "back/tree/d");
    scene.same("tree/closed", "back/tree/closed");
    scene.stage(Some(&other), 0, &["--to", "whole", &server.url("in/tree")]);
    // A tree of its own gets its own times too; a directory that only receives a tree keeps its times.
    scene.same("tree", "whole/tree");
    assert!(server.parts().is_empty() && other.parts().is_empty(), "no upload is left");
}

/// As values that any client reads, and from there to a bucket and back.
#[cfg(feature = "redis")]
#[test]
fn tree_staged_through_redis_is_the_same() {
    let (Some(server), Some(values)) = (S3Server::start(), surgetank_testkit::servers::redis::RedisServer::start())
    else {
        return;
    };
    let scene = Scene::new();
    scene.script(TREE);
    let url = |path: &str| values.url("mine:").replacen("/0", &format!("/0/{path}"), 1);
    assert_eq!(scene.stage(None, 0, &["--to", &url("in/deep"), "tree"]), (TREE_FILES, 0, 0, 0));
    assert_eq!(scene.stage(None, 0, &["--to", &url("in/deep"), "tree"]), (0, TREE_FILES, 0, 0));
    let all = url("in/deep/tree/");
    assert_eq!(scene.stage(Some(&server), 0, &["--to", &server.url("on"), &all]), (TREE_FILES, 0, 0, 0));
    assert_eq!(fs::read(server.files().join("on/d/hello")).unwrap(), b"hello\n");
    scene.stage(None, 0, &["--to", "back", &url("in/deep/tree")]);
    scene.same("tree", "back/tree");
}

#[test]
fn patterns_and_manifests_choose_source_and_target() {
    let scene = Scene::new();
    scene.script(TREE);
    assert_eq!(scene.stage(None, 0, &["--to", "out", "tree/d/e/n[1-3]", "tree/**/hello", "tree/empty"]), (4, 0, 0, 0));
    scene.script(
        "cmp tree/d/e/n1 out/n1; cmp tree/d/hello out/d/hello; test -d out/empty; test $(find out | wc -l) = 7",
    );
    // A name that looks like a pattern is a name if the file exists.
    scene.script("echo star >'tree/*'");
    assert_eq!(scene.stage(None, 0, &["--to", "star", "tree/*"]), (1, 0, 0, 0));
    let list = format!(
        "# source, destination\ntree/d/hello\tdone/renamed\n\n{}/\tdone/all\ntree/nothing\tdone/\n",
        scene.shown("tree/d")
    );
    fs::write(scene.path("list"), list).unwrap();
    assert_eq!(scene.stage(None, 0, &["--manifest", "list"]), (14, 0, 0, 0));
    scene.script("cmp tree/d/hello done/renamed; test -f done/nothing");
    scene.same("tree/d/e", "done/all/e");
    // A missing source does not stop the others.
    fs::write(scene.path("list"), "missing\tdone/x\ntree/large\tdone/large\n").unwrap();
    assert_eq!(scene.stage(None, 3, &["--manifest", "list"]), (1, 0, 0, 1));
    for (wrong, word) in [("one column\n", "line 1"), ("a\tb\tc\n", "line 1"), ("gopher://x/y\tz\n", "gopher")] {
        fs::write(scene.path("list"), wrong).unwrap();
        let output = scene.command(None, "stage-out", &["--manifest", "list"]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && text.contains(word), "{text}");
    }
}

#[test]
fn staging_continues_after_a_deadline_or_kill() {
    let Some(server) = S3Server::start() else { return };
    let scene = Scene::new();
    scene.script(
        "mkdir tree; head -c 300000000 /dev/urandom >tree/big; for n in $(seq 300); do echo $n >tree/n$n; done",
    );
    let link = server.link(Some(200_000_000));
    let slow = format!("s3://{BUCKET}/in?endpoint={}", link.endpoint());
    let (copied, present, left, failed) =
        scene.stage(Some(&server), 3, &["--deadline", "100ms", "--to", &slow, "tree/"]);
    assert!((present, failed) == (0, 0) && left > 0 && copied + left == 301, "{copied} {left}");
    assert!(!server.files().join("in/big").exists());
    // Killed several times; data that the server has is not sent again.
    const KILLS: u64 = 3;
    for kill in 1..=KILLS {
        let sent = link.sent();
        let mut child = scene.command(Some(&server), "stage-out", &["--to", &slow, "tree/"]).spawn().unwrap();
        let begun = Instant::now();
        while link.sent() < sent + 90_000_000 {
            assert!(begun.elapsed() < Duration::from_secs(60) && child.try_wait().unwrap().is_none(), "kill {kill}");
            std::thread::sleep(Duration::from_millis(1));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!server.files().join("in/big").exists(), "kill {kill}: {} bytes were sent", link.sent());
        assert!(!server.parts().is_empty());
    }
    scene.stage(Some(&server), 0, &["--to", &slow, "tree/"]);
    let (in_flight, requests) = (4 * (16 << 20) * (KILLS + 1), 2_000_000);
    assert!(link.sent() < 300_000_000 + in_flight + requests, "{} bytes were sent", link.sent());
    scene.stage(Some(&server), 0, &["--to", "back/", &server.url("in/")]);
    scene.script("rm -f back/.surgetank-store; diff -r tree back");
    assert_eq!(server.parts(), [] as [PathBuf; 0], "no upload is left");
}

#[test]
fn file_changed_during_staging_is_refused() {
    let scene = Scene::new();
    scene.script("mkdir in out; echo one >in/a; echo two >in/b");
    // The source.
    let mut child = scene.command(None, "stage-in", &["--json", "--to", "out", "in/a"]);
    let child = child.env("SURGETANK_HOLD", "store.copied:1500").spawn().unwrap();
    await_part(&scene.path("out"));
    scene.script("echo more >>in/a");
    let output = child.wait_with_output().unwrap();
    // (Each try is held. At the second one the source does not change any more.)
    assert_eq!(counts(&output), (1, 0, 0, 0), "{}", String::from_utf8_lossy(&output.stderr));
    scene.script("cmp in/a out/a");
    // The target: another client creates it first.
    let mut child = scene.command(None, "stage-in", &["--json", "--to", "out", "in/b"]);
    let child = child.env("SURGETANK_HOLD", "store.staged:1500").spawn().unwrap();
    await_part(&scene.path("out"));
    scene.script("echo theirs >out/b");
    let output = child.wait_with_output().unwrap();
    assert_eq!(counts(&output), (0, 0, 0, 1));
    assert_eq!(fs::read_to_string(scene.path("out/b")).unwrap(), "theirs\n");
    assert_eq!(fs::read_dir(scene.path("out")).unwrap().count(), 2, "no temporary stays");
}

fn await_part(dir: &Path) {
    let begun = Instant::now();
    let is_part = |name: &std::ffi::OsStr| name.to_str().unwrap().starts_with(".surgetank-part-");
    while !fs::read_dir(dir).unwrap().flatten().any(|entry| is_part(&entry.file_name())) {
        assert!(begun.elapsed() < Duration::from_secs(30));
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn served_directory_is_staged_in_and_out() {
    let Some(server) = S3Server::start() else { return };
    let scene = Scene::new();
    scene.script(TREE);
    scene.stage(Some(&server), 0, &["--to", &server.url("in"), "tree"]);
    for name in ["over", "fast", "inner"] {
        fs::create_dir(scene.path(name)).unwrap();
        fs::set_permissions(scene.path(name), fs::Permissions::from_mode(0o700)).unwrap();
    }
    let program = env!("CARGO_BIN_EXE_surgetank");
    let state = scene.shown("inner");
    let inner = format!(
        "'{program}' stage-in -q --state '{state}' --to . '{}'; echo made >tree/made
         '{program}' stage-out -q --state '{state}' --to '{}' tree",
        server.url("in/tree"),
        server.url("out")
    );
    let output = Command::new(program)
        .envs(server.environment())
        .args(["run", "--state", &scene.shown("state"), "--tier", &format!("fast={}:1GiB", scene.shown("fast"))])
        .args(["--", "sh", "-euc", &inner])
        .current_dir(scene.path("over"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    scene.script("echo made >tree/made; cp -p over/tree/made tree/made; diff -r --no-dereference tree over/tree");
    scene.same("tree/d", "over/tree/d");
    assert_eq!(fs::read(server.files().join("out/tree/made")).unwrap(), b"made\n");
}

/// The parts that stage-in makes are drained like other files: published under their name, then renamed.
#[test]
fn served_bucket_is_staged_in() {
    let Some(server) = S3Server::start() else { return };
    let scene = Scene::new();
    scene.script(TREE);
    for name in ["over", "fast", "inner"] {
        fs::create_dir(scene.path(name)).unwrap();
        fs::set_permissions(scene.path(name), fs::Permissions::from_mode(0o700)).unwrap();
    }
    let program = env!("CARGO_BIN_EXE_surgetank");
    let inner = format!("'{program}' stage-in -q --state '{}' --to . '{}'", scene.shown("inner"), scene.shown("tree"));
    let output = Command::new(program)
        .envs(server.environment())
        .args(["run", "--state", &scene.shown("state"), "--tier", &format!("fast={}:1GiB", scene.shown("fast"))])
        .args(["--store", &server.url("project"), "--quiet-period", "0s", "--", "sh", "-euc", &inner])
        .env("SURGETANK_HOLD", "store.staged:20")
        .current_dir(scene.path("over"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    scene.stage(Some(&server), 0, &["--to", "back", &server.url("project/tree")]);
    scene.same("tree/d", "back/tree/d");
    let keys = Command::new("find").arg(server.files().join("project")).output().unwrap().stdout;
    assert!(!String::from_utf8_lossy(&keys).contains("surgetank-part"), "{}", String::from_utf8_lossy(&keys));
}

#[test]
fn two_sources_of_one_name_are_refused() {
    let scene = Scene::new();
    scene.script("mkdir run1 run2 locked; echo 1 >run1/result; echo two >run2/result; echo x >run1/other");
    let (copied, present, left, failed) =
        scene.stage(None, 3, &["--to", "out", "run1/result", "run2/result", "run1/other"]);
    assert_eq!((copied, present, left, failed), (2, 0, 0, 1));
    // The same source twice counts once.
    assert_eq!(scene.stage(None, 0, &["--to", "once", "run1/result", "run1/*"]), (2, 0, 0, 0));
    // A pattern without a match is a failure.
    assert_eq!(scene.stage(None, 3, &["--to", "none", "run1/*.nc"]), (0, 0, 0, 1));
}

#[test]
fn one_stage_process_of_a_node_copies_a_file() {
    let scene = Scene::new();
    scene.script("mkdir in out; head -c 3000000 /dev/urandom >in/a");
    let arguments = ["--json", "--to", "out", "in/a"];
    let first = scene.command(None, "stage-in", &arguments).env("SURGETANK_HOLD", "store.copied:2500").spawn().unwrap();
    await_part(&scene.path("out"));
    // A second process waits, and finds the file present.
    assert_eq!(counts(&scene.command(None, "stage-in", &arguments).output().unwrap()), (0, 1, 0, 0));
    assert_eq!(counts(&first.wait_with_output().unwrap()), (1, 0, 0, 0));
    // A process that does not know of the first one has a part of its own.
    scene.script("rm out/a; mkdir -m 700 other");
    let first = scene.command(None, "stage-in", &arguments).env("SURGETANK_HOLD", "store.copied:2500").spawn().unwrap();
    await_part(&scene.path("out"));
    let mut other = Command::new(env!("CARGO_BIN_EXE_surgetank"));
    other.args(["stage-in", "--state", &scene.shown("other")]).args(arguments).current_dir(scene.scratch.path());
    assert_eq!(counts(&other.output().unwrap()), (1, 0, 0, 0));
    // (The second process learns that the target exists. It is the same file, which is examined again.)
    let (copied, present, left, failed) = counts(&first.wait_with_output().unwrap());
    assert_eq!((copied + present + failed as u64, left), (1, 0));
    scene.script("cmp in/a out/a; test $(ls -A out | wc -l) = 1");
}

#[test]
fn target_below_its_source_is_not_copied_into_itself() {
    let scene = Scene::new();
    scene.script("mkdir -p 'd[1]/out'; echo a >'d[1]/a'; echo b >'d[1]/b'");
    assert_eq!(scene.stage(None, 3, &["--to", "d[1]/out", "d[1]/*"]), (2, 0, 0, 1));
    assert_eq!(scene.stage(None, 3, &["--to", "d[1]/out", "d[1]/*"]), (0, 2, 0, 1));
    assert_eq!(scene.stage(None, 0, &["--to", "d[1]/out", "d[1]/?"]), (0, 2, 0, 0));
    scene.script("test \"$(cd 'd[1]/out' && find . | sort | tr '\\n' ' ')\" = '. ./a ./b '");
}

#[test]
fn target_with_whole_second_times_counts_as_copied() {
    let scene = Scene::new();
    scene.script("mkdir in; echo a >in/a; echo b >in/b; touch -d '2020-01-02 03:04:05.678' in/a in/b");
    scene.stage(None, 0, &["--to", "out", "in/a", "in/b"]);
    scene.script("touch -d '2020-01-02 03:04:05' out/a; touch -d '2020-01-02 03:04:05.5' out/b");
    assert_eq!(scene.stage(None, 0, &["--to", "out", "in/a", "in/b"]), (1, 1, 0, 0));
}

#[test]
fn wrong_places_are_named_without_secrets() {
    let Some(server) = S3Server::start() else { return };
    let scene = Scene::new();
    scene.script("echo x >x");
    let url = server.url("in");
    let output = scene
        .command(Some(&server), "stage-out", &["--to", &url, "x"])
        .env("AWS_SECRET_ACCESS_KEY", "hunter2-hunter2")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && text.contains(BUCKET) && !text.contains("hunter2"), "{text}");
    for (arguments, code, word) in [
        (vec!["x"], 2, "--to"),
        (vec!["--to", "y"], 2, "SOURCE"),
        (vec!["--to", "x/y", "x"], 1, "x"),
        (vec!["--to", "s3://bucket/../y?region=x", "x"], 2, ".."),
    ] {
        let output = scene.command(Some(&server), "stage-out", &arguments).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(code) && text.contains(word), "{arguments:?}: {text}");
    }
}

/// Regression: a misspelt prefix counted as an empty one, with success, so a job began without its input.
#[test]
fn misspelt_prefix_is_a_failure() {
    let Some(server) = S3Server::start() else { return };
    let scene = Scene::new();
    scene.script("mkdir -p in/empty; echo x >in/x");
    assert_eq!(scene.stage(Some(&server), 0, &["--to", &server.url("lab"), "in"]), (1, 0, 0, 0));
    for misspelt in ["lab/inn/", "nowhere/at/all/", "lab/inn"] {
        assert_eq!(scene.stage(Some(&server), 3, &["--to", "out", &server.url(misspelt)]), (0, 0, 0, 1), "{misspelt}");
    }
    // A prefix that exists and is empty is a success.
    assert_eq!(scene.stage(Some(&server), 0, &["--to", "out", &server.url("lab/in/empty/")]), (0, 0, 0, 0));
}

/// Regression: a source in a missing directory ended the whole staging.
#[test]
fn missing_source_does_not_stop_other_sources() {
    let scene = Scene::new();
    scene.script("echo x >x");
    fs::write(scene.path("list"), "missing/y\tout/y\nx\tout/x\n").unwrap();
    assert_eq!(scene.stage(None, 3, &["--manifest", "list"]), (1, 0, 0, 1));
    scene.script("cmp x out/x");
}

/// Regression: the copy of a prefix had the store's marker, and could not be put back as a prefix of its own.
#[test]
fn store_marker_is_not_copied_as_a_file() {
    let Some(server) = S3Server::start() else { return };
    let scene = Scene::new();
    scene.script("mkdir in; echo x >in/x; echo mine >in/mine");
    scene.stage(Some(&server), 0, &["--to", &server.url("lab"), "in/"]);
    assert!(server.files().join("lab/.surgetank-store").exists());
    assert_eq!(scene.stage(Some(&server), 0, &["--to", "out", &server.url("lab")]), (2, 0, 0, 0));
    assert_eq!(scene.stage(Some(&server), 0, &["--to", &server.url("again"), "out/lab/"]), (2, 0, 0, 0));
    // In a plain directory a user's file of that name is a file.
    scene.script("echo mine >in/.surgetank-store");
    assert_eq!(scene.stage(None, 0, &["--to", "plain", "in/"]), (3, 0, 0, 0));
}

/// Regression: paths with bytes that are not text, or with dots, were refused.
#[test]
fn paths_with_any_bytes_and_dots_are_staged() {
    use std::os::unix::ffi::OsStrExt;
    let scene = Scene::new();
    scene.script("mkdir -p in/d far/away; ln -s ../far/away in/link; echo x >\"$(printf 'in/b\\377')\"; echo y >far/y");
    let odd = std::ffi::OsStr::from_bytes(b"in/b\xff");
    let output = scene.command(None, "stage-out", &["--to", "in/d/../../out"]).arg(odd).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    scene.script("cmp \"$(printf 'in/b\\377')\" \"$(printf 'out/b\\377')\"");
    fs::write(scene.path("list"), b"in/b\xff\tout/\xfe\n").unwrap();
    assert_eq!(scene.stage(None, 0, &["--manifest", "list"]), (1, 0, 0, 0));
    scene.script("cmp \"$(printf 'in/b\\377')\" \"$(printf 'out/\\376')\"");
    // After a link, `..` is relative to the link's target, as everywhere.
    assert_eq!(scene.stage(None, 0, &["--to", "out", "in/link/../y"]), (1, 0, 0, 0));
    scene.script("cmp far/y out/y");
}

/// Regression: an object whose key the server cannot list was left out, and the staging reported success.
#[test]
fn unlistable_object_is_a_named_failure() {
    use surgetank_store::checksum::of_bytes;
    use surgetank_store::object::{Objects, When, Words};
    use surgetank_store::s3::{Place, S3};
    let Some(server) = S3Server::start() else { return };
    let scene = Scene::new();
    scene.script("echo x >x");
    scene.stage(Some(&server), 0, &["--to", &server.url("lab"), "x"]);
    let mut place = Place::parse(&server.url("lab")).unwrap();
    place.credentials_file = Some(server.credentials_file());
    let bucket = S3::open(place).unwrap();
    bucket.put("a\x01", &&b"1"[..], of_bytes(b"1"), &Words::new(), When::Always).unwrap();
    let whole = bucket.abilities().lists_any_key;
    let expected = if whole { (0, (2, 0, 0, 0)) } else { (3, (1, 0, 0, 1)) };
    assert_eq!(scene.stage(Some(&server), expected.0, &["--to", "out", &server.url("lab/")]), expected.1);
}

/// Regression: `gc --store` was refused in a directory with files.
#[test]
fn gc_of_a_store_works_in_a_directory_with_files() {
    let Some(server) = S3Server::start() else { return };
    let scene = Scene::new();
    scene.script("echo x >mine");
    let output = scene.command(Some(&server), "gc", &["--store", &server.url("p")]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    scene.script("test $(cat mine) = x");
}

/// A run refuses a working directory that has files. Regression: the doctor then did not query the server.
#[test]
fn doctor_asks_the_server_in_a_directory_with_files() {
    let Some(server) = S3Server::start() else { return };
    let scene = Scene::new();
    scene.script("echo x >mine");
    let mut doctor = scene.command(Some(&server), "doctor", &["--store", &server.url("p")]);
    let text = String::from_utf8(doctor.output().unwrap().stdout).unwrap();
    assert!(text.contains("conditional writes: yes") && text.contains("does NOT work"), "{text}");
}

/// Regression: the second path had no leading slash in the message.
#[test]
fn sources_of_one_name_are_refused_with_both_paths() {
    let scene = Scene::new();
    scene.script("mkdir a b out; echo one > a/f; echo two > b/f");
    let output = scene.command(None, "stage-in", &["--to", "out", "a/f", "b/f"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(3), "{text}");
    let (first, second) = (scene.path("a/f").canonicalize().unwrap(), scene.path("b/f").canonicalize().unwrap());
    let refused = format!("{}: {} would have the same name there", second.display(), first.display());
    assert!(text.contains(&refused), "{refused} is missing in: {text}");
}
