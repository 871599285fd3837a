//! Real programs behave under `surgetank run` as they do in a plain directory.
//!
//! Each case is a shell script in `real_programs/`, with one test for each door: the mount, the preload shim,
//! seccomp, and a directory that another member of a pool owns. It runs twice from the same start: in a plain directory, and in a directory under `surgetank run`. The
//! test compares the standard output, the exit code, and the two directories afterwards. The second one is read as
//! the *store* has it, after the unmount. Compared are names, types, contents, modes, owners, links, extended
//! attributes, explicitly set times, and holes.
//!
//! A script is `bash` with `set -euo pipefail`; `$PYTHON` is the interpreter. Its head may have the lines `# needs:
//! PROGRAM…`, `# python: MODULE…` and `# sources: PROJECT…` (below `$SOURCES`). A missing one is a failure under CI,
//! and elsewhere a printed skip. The part between `#: before` and `#: run` runs in the bare directory first, so that
//! the store has files to show. The output of a script must not differ from run to run. `REAL_PROGRAMS_PLAIN=1`
//! checks that: both runs are then plain.

// A test panics at a failed step, so that the failure names its line.
#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant, SystemTime};

use tempfile::TempDir;

/// One test a script for each door, so that the runner spreads them over the cores and names the one that failed.
macro_rules! cases {
    ($($name:ident)+; without a mount: $($called:ident)+; across nodes: $($pooled:ident)+) => {
        const NAMES: &[&str] = &[$(stringify!($name)),+];
        cases!(@door by_mount, &["--no-preload"], $($name)+);
        cases!(@door by_shim, &[], $($name)+);
        cases!(@door by_seccomp, &["--door", "seccomp", "--no-preload"], $($called)+);
        mod by_another_member {
            $(#[test]
            fn $pooled() {
                let script = include_str!(concat!("real_programs/", stringify!($pooled), ".sh"));
                super::run_case(stringify!($pooled), script, super::ACROSS_NODES);
            })+
        }
    };
    (@door $door:ident, $options:expr, $($name:ident)+) => {
        mod $door {
            $(#[test]
            fn $name() {
                let script = include_str!(concat!("real_programs/", stringify!($name), ".sh"));
                super::run_case(stringify!($name), script, $options);
            })+
        }
    };
}

cases! {
    attributes_by_descriptor busy_directory changing_directory compile_and_make containers coreutils direct_io environments existing exit_codes
    find_identity fresh_programs git_repository hdf5 holes_and_ranges hostile_names java_files large_build locks mmap_shared mpi_ranks
    numpy_memmap permissions python_files rename_flags rsync_mirror special_files sqlite_rollback sqlite_wal standard_streams tail_growing
    tar_archive unnamed_files;

    // Left-out scripts and the reasons: docs/semantics.md, "Without a mount".
    without a mount:
    attributes_by_descriptor busy_directory changing_directory compile_and_make coreutils direct_io environments existing exit_codes
    find_identity git_repository hdf5 holes_and_ranges hostile_names java_files large_build locks mmap_shared mpi_ranks
    numpy_memmap permissions python_files rename_flags rsync_mirror sqlite_rollback sqlite_wal standard_streams tail_growing
    tar_archive;

    // Left out: what docs/semantics.md refuses across nodes (unnamed_files; locks names its holder), and slow ones.
    across nodes:
    attributes_by_descriptor changing_directory compile_and_make coreutils direct_io existing exit_codes find_identity
    fresh_programs git_repository hdf5 holes_and_ranges hostile_names java_files mmap_shared mpi_ranks numpy_memmap permissions
    python_files rename_flags rsync_mirror special_files sqlite_rollback sqlite_wal standard_streams tail_growing tar_archive
}

/// The directory is another member's: each request of the programs goes to its agent.
const ACROSS_NODES: &[&str] = &["--pool", "programs", "--pool-host", "127.0.0.1", "--pool-secret"];

/// A script that is not in the table above would never run.
#[test]
fn every_script_is_a_case() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/real_programs");
    let mut scripts: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .map(|name| name.strip_suffix(".sh").unwrap().to_owned())
        .collect();
    scripts.sort();
    assert_eq!(scripts, NAMES);
}

/// A program that takes longer than this hangs.
const LIMIT: Duration = Duration::from_secs(240);

struct Outcome {
    stdout: String,
    stderr: String,
    status: ExitStatus,
}

fn run_case(name: &str, script: &str, options: &[&str]) {
    if let Some(missing) = missing_needs(script) {
        assert!(std::env::var_os("CI").is_none(), "{name} needs {missing}: scripts/setup test installs it");
        eprintln!("skipped: {name} needs {missing}");
        return;
    }
    // Not under /tmp, which may be a tmpfs: the store must be a file system with all abilities of a disk's.
    let scratch = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (before, run) = match script.split_once("#: run\n") {
        Some((before, run)) => (before, run),
        None => ("", script),
    };
    let started = SystemTime::now();
    let both_plain = std::env::var_os("REAL_PROGRAMS_PLAIN").is_some();
    // The same path for both, one after another, because a program may record its path.
    let place = scratch.path().join("project");
    let [plain, buffered] = [("plain", true), ("buffered", both_plain)].map(|(side, bare)| {
        fs::create_dir(&place).unwrap();
        fs::set_permissions(&place, fs::Permissions::from_mode(0o755)).unwrap();
        let first = shell(before, &scratch, side, &place, &[]);
        assert!(first.status.success(), "{name}, before: {}", first.stderr);
        let outcome = if bare {
            shell(run, &scratch, side, &place, &[])
        } else {
            let tier = TempDir::new_in("/dev/shm").unwrap();
            let tier_words = format!("ram={}:8G", tier.path().display());
            let mut words = vec![env!("CARGO_BIN_EXE_surgetank"), "run"];
            // Not the user's own state directory, so that the state of a failed case is removed.
            let aside = TempDir::new_in("/dev/shm").unwrap();
            let state = aside.path().join("state");
            words.extend(["--over", place.to_str().unwrap(), "--tier", &tier_words]);
            words.extend(["--state", state.to_str().unwrap()]);
            words.extend(options);
            let owner = (options == ACROSS_NODES).then(|| Owner::start(&scratch, &place));
            let secret = scratch.path().join("secret");
            words.extend(owner.as_ref().and(secret.to_str()));
            words.push("--");
            let outcome = shell(run, &scratch, side, &place, &words);
            owner.into_iter().for_each(Owner::end);
            outcome
        };
        let kept = scratch.path().join(side);
        fs::rename(&place, &kept).unwrap();
        (outcome, kept)
    });

    let words = format!("\nstderr, plain:\n{}\nstderr, under surgetank:\n{}", plain.0.stderr, buffered.0.stderr);
    assert_eq!(plain.0.stdout, buffered.0.stdout, "{name}: standard output{words}");
    assert_eq!(plain.0.status.code(), buffered.0.status.code(), "{name}: exit code{words}");
    compare_trees(name, &plain.1, &buffered.1, started, &words);
}

/// Another member of the pool, which has changed the directory first.
struct Owner {
    member: std::process::Child,
    _tier: TempDir,
}

impl Owner {
    fn start(scratch: &TempDir, store: &Path) -> Self {
        let (over, state) = (scratch.path().join("owner"), scratch.path().join("owner.state"));
        fs::create_dir(&over).unwrap();
        let tier = TempDir::new_in("/dev/shm").unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_surgetank"));
        command
            .args(["run", "--quiet"])
            .args(ACROSS_NODES)
            .arg(scratch.path().join("secret"))
            .arg("--store")
            .arg(store);
        command.arg("--over").arg(&over).arg("--state").arg(state).arg("--tier");
        command.arg(format!("ram={}:8G", tier.path().display())).args(["--", "sh", "-euc"]);
        command.arg("touch .first; rm .first; echo owned; cat").current_dir(&over);
        let mut member = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let mut says = std::io::BufReader::new(member.stdout.as_mut().unwrap());
        std::io::BufRead::read_line(&mut says, &mut line).unwrap();
        assert_eq!(line, "owned\n");
        Self { member, _tier: tier }
    }

    fn end(mut self) {
        drop(self.member.stdin.take());
        let status = self.member.wait().unwrap();
        assert!(status.success(), "the member that owns the directory: {status}");
    }
}

/// The needs of the script's head that this machine lacks.
fn missing_needs(script: &str) -> Option<String> {
    let wanted = |mark: &str| -> Vec<String> {
        script
            .lines()
            .filter_map(|line| line.strip_prefix(mark))
            .flat_map(str::split_whitespace)
            .map(str::to_owned)
            .collect()
    };
    let path = std::env::var_os("PATH").unwrap_or_default();
    let have = |program: &str| std::env::split_paths(&path).any(|dir| dir.join(program).exists());
    let mut missing: Vec<String> = wanted("# needs: ");
    missing.push("bash".into());
    missing.retain(|program| !have(program));
    missing.extend(wanted("# python: ").into_iter().filter(|module| {
        let import = Command::new(python()).args(["-c", &format!("import {module}")]).stderr(Stdio::null()).status();
        !import.is_ok_and(|status| status.success())
    }));
    missing.extend(wanted("# sources: ").into_iter().filter(|project| !sources().join(project).is_dir()));
    (!missing.is_empty()).then(|| missing.join(", "))
}

/// The interpreter that `scripts/setup` installed, with numpy; otherwise the system's.
fn python() -> PathBuf {
    let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache/venv/bin/python");
    if ours.exists() { ours } else { "python3".into() }
}

/// The sources that `scripts/setup` fetched to build.
fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache/sources")
}

/// Runs a script in a directory, with `words` before it, in an environment that is the same everywhere.
fn shell(script: &str, scratch: &TempDir, side: &str, place: &Path, words: &[&str]) -> Outcome {
    let file = |kind: &str| scratch.path().join(format!("{side}.{kind}"));
    fs::write(file("sh"), format!("set -euo pipefail\n{script}")).unwrap();
    // Short, because sockets are below it; and outside the directory.
    let home = TempDir::with_prefix("st-").unwrap();
    let script_path = file("sh");
    let mut all: Vec<&std::ffi::OsStr> = words.iter().map(std::ffi::OsStr::new).collect();
    all.extend(["bash".as_ref(), script_path.as_os_str()]);
    let mut child = Command::new(all[0])
        .args(&all[1..])
        .current_dir(place)
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .env("HOME", home.path())
        .env("LC_ALL", "C.UTF-8")
        .env("TZ", "UTC")
        .env("PYTHON", python())
        .env("SOURCES", sources())
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .stdin(Stdio::null())
        .stdout(File::create(file("stdout")).unwrap())
        .stderr(File::create(file("stderr")).unwrap())
        .process_group(0)
        .spawn()
        .unwrap();
    let deadline = Instant::now() + LIMIT;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > deadline {
            end_group(&mut child);
            panic!(
                "{side}: still running after {LIMIT:?}\n{}\n{}",
                read_text(&file("stdout")),
                read_text(&file("stderr"))
            );
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    Outcome { stdout: read_text(&file("stdout")), stderr: read_text(&file("stderr")), status }
}

fn end_group(child: &mut std::process::Child) {
    let group = rustix::process::Pid::from_child(child);
    for (signal, timeout) in [
        (rustix::process::Signal::TERM, Duration::from_secs(10)),
        (rustix::process::Signal::KILL, Duration::from_secs(10)),
    ] {
        // The group may have ended already, which is fine.
        let _ = rustix::process::kill_process_group(group, signal);
        let deadline = Instant::now() + timeout;
        while Instant::now() < deadline {
            if child.try_wait().unwrap().is_some() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn read_text(path: &Path) -> String {
    String::from_utf8_lossy(&fs::read(path).unwrap()).into_owned()
}

fn compare_trees(name: &str, plain: &Path, buffered: &Path, started: SystemTime, words: &str) {
    let differences: Vec<String> = crate::trees::differences(plain, buffered, started).into_values().collect();
    assert!(
        differences.is_empty(),
        "{name}: the store differs from a plain directory:\n{}{words}",
        differences.join("\n")
    );
}
