//! The examples of `docs/semantics.md` are true.
//!
//! Blocks of one `name` are one scene in one fresh directory: `before` in the bare directory, `run` under `surgetank
//! run`. `beside` runs at the same time in the bare directory, `after` in the bare directory again. Each is followed
//! by a block `output` with its output; stderr is not compared. `options="…"` go to `surgetank run` (`$TIER` stands
//! for a directory in memory), `exit=N` is its exit code.
//!
//! The danger avoided: an example that is never run. The test fails without any block, with a block without output,
//! and with an unknown word.

// A test panics at a failed step, so that the failure names its line.
#![allow(clippy::unwrap_used)]

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

const DOCUMENT: &str = include_str!("../../../docs/semantics.md");
/// For one block. A debug build on a busy machine is slow, and a hanging mount must not block the tests.
const LIMIT: Duration = Duration::from_secs(120);
/// How blocks that run at the same time wait for each other.
const PRELUDE: &str = r#"set -u
tell() { : >"$SCRATCH/$1"; }
await() { until [ -e "$SCRATCH/$1" ]; do sleep 0.01; done; }
"#;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    Before,
    Beside,
    Run,
    After,
}

#[derive(Debug, PartialEq, Eq)]
struct Block {
    when: When,
    script: String,
    output: String,
    options: Vec<String>,
    exit: i32,
}

#[derive(Debug, PartialEq, Eq)]
struct Scene {
    name: String,
    blocks: Vec<Block>,
}

/// Splits at spaces outside double quotes, and removes the quotes.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut quoted = false;
    for letter in line.chars() {
        match letter {
            '"' => quoted = !quoted,
            ' ' if !quoted => words.push(String::new()),
            other => words.last_mut().unwrap().push(other),
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

fn scenes(document: &str) -> Vec<Scene> {
    let mut scenes: Vec<Scene> = Vec::new();
    let mut lines = document.lines();
    let fenced = |lines: &mut std::str::Lines<'_>| -> String {
        lines.take_while(|line| *line != "```").map(|line| format!("{line}\n")).collect()
    };
    while let Some(line) = lines.next() {
        let Some(head) = line.strip_prefix("```sh semantics ") else {
            assert!(!line.contains("semantics name="), "a block without its time: {line}");
            continue;
        };
        let (mut when, mut name, mut options, mut exit) = (None, None, Vec::new(), 0);
        for word in words(head) {
            match word.split_once('=') {
                None if word == "before" => when = Some(When::Before),
                None if word == "beside" => when = Some(When::Beside),
                None if word == "run" => when = Some(When::Run),
                None if word == "after" => when = Some(When::After),
                Some(("name", value)) => name = Some(value.to_owned()),
                Some(("options", value)) => options = value.split(' ').map(str::to_owned).collect(),
                Some(("exit", value)) => exit = value.parse().unwrap(),
                _ => panic!("{word} in: {line}"),
            }
        }
        let name = name.unwrap_or_else(|| panic!("no name: {line}"));
        let script = fenced(&mut lines);
        assert_eq!(lines.next(), Some("```output"), "{name}: a block without output");
        let output = fenced(&mut lines);
        let block = Block { when: when.unwrap(), script, output, options, exit };
        match scenes.iter_mut().find(|scene| scene.name == name) {
            Some(scene) => scene.blocks.push(block),
            None => scenes.push(Scene { name, blocks: vec![block] }),
        }
    }
    scenes
}

/// The directories of one scene.
struct Stage {
    project: TempDir,
    scratch: TempDir,
    tier: TempDir,
}

impl Stage {
    fn new() -> Self {
        let memory = Path::new("/dev/shm");
        Self {
            project: TempDir::with_prefix("semantics-").unwrap(),
            scratch: TempDir::with_prefix("semantics-scratch-").unwrap(),
            tier: if memory.is_dir() { TempDir::with_prefix_in("semantics-tier-", memory) } else { TempDir::new() }
                .unwrap(),
        }
    }

    fn start(&self, block: &Block) -> Child {
        let mut words: Vec<String> = Vec::new();
        if block.when == When::Run {
            let tier = self.tier.path().display().to_string();
            words.extend([env!("CARGO_BIN_EXE_surgetank"), "run", "--quiet", "--state"].map(str::to_owned));
            words.push(self.scratch.path().join("state").display().to_string());
            let options: Vec<String> = block.options.iter().map(|word| word.replace("$TIER", &tier)).collect();
            if !options.iter().any(|word| word == "--tier") {
                words.extend(["--tier".to_owned(), format!("ram={tier}:64M")]);
            }
            words.extend(options);
            words.push("--".to_owned());
        }
        words.extend(["bash".to_owned(), "-c".to_owned(), format!("{PRELUDE}{}", block.script)]);
        // Examples call the program under test.
        let ours = Path::new(env!("CARGO_BIN_EXE_surgetank")).parent().unwrap().to_path_buf();
        let path = std::env::var_os("PATH").unwrap();
        let paths = std::iter::once(ours).chain(std::env::split_paths(&path));
        Command::new(&words[0])
            .args(&words[1..])
            .current_dir(self.project.path())
            .env_clear()
            .env("PATH", std::env::join_paths(paths).unwrap())
            .env("HOME", self.scratch.path())
            .env("SCRATCH", self.scratch.path())
            .env("LC_ALL", "C.UTF-8")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap()
    }
}

/// Compares output and exit code with the block's.
fn finish(mut child: Child, block: &Block) -> Result<(), String> {
    let (mut stdout, mut stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let errors = std::thread::spawn(move || {
        let mut text = Vec::new();
        stderr.read_to_end(&mut text).unwrap();
        String::from_utf8_lossy(&text).into_owned()
    });
    let printed = std::thread::spawn(move || {
        let mut text = Vec::new();
        stdout.read_to_end(&mut text).unwrap();
        String::from_utf8_lossy(&text).into_owned()
    });
    let deadline = Instant::now() + LIMIT;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > deadline {
            let group = rustix::process::Pid::from_child(&child);
            // The group may have ended already, which is fine.
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
            child.wait().unwrap();
            return Err(format!("still running after {LIMIT:?}"));
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let (printed, errors) = (printed.join().unwrap(), errors.join().unwrap());
    // Only a run's exit code counts; the last command of another block may be a test.
    let exit_is_right = block.when != When::Run || status.code() == Some(block.exit);
    if printed == block.output && exit_is_right {
        return Ok(());
    }
    let expected = &block.output;
    Err(format!(
        "{:?} block:\n{}--- expected, exit {}\n{expected}--- got, {status}\n{printed}--- stderr\n{errors}",
        block.when, block.script, block.exit
    ))
}

fn play(scene: &Scene) -> Result<(), String> {
    let stage = Stage::new();
    let of = |when: When| scene.blocks.iter().filter(move |block| block.when == when);
    let mut outcome = Ok(());
    for block in of(When::Before) {
        outcome = outcome.and(finish(stage.start(block), block));
    }
    let beside: Vec<_> = of(When::Beside).map(|block| (stage.start(block), block)).collect();
    for block in of(When::Run) {
        outcome = outcome.and(finish(stage.start(block), block));
    }
    if outcome.is_err() {
        // The block may wait for an event that never happens now.
        for (child, _) in &beside {
            let group = rustix::process::Pid::from_child(child);
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        }
    }
    for (child, block) in beside {
        outcome = outcome.and(finish(child, block));
    }
    for block in of(When::After) {
        outcome = outcome.and(finish(stage.start(block), block));
    }
    outcome
}

#[test]
fn every_example_of_the_semantics_holds() {
    let scenes = scenes(DOCUMENT);
    assert!(scenes.len() >= 10, "only {} scenes were found in docs/semantics.md", scenes.len());
    let wrong: Vec<String> =
        scenes.iter().filter_map(|scene| play(scene).err().map(|why| format!("== {}: {why}", scene.name))).collect();
    assert!(wrong.is_empty(), "{} of {} scenes:\n{}", wrong.len(), scenes.len(), wrong.join("\n"));
}

#[test]
fn scene_without_a_run_is_an_error_of_the_document() {
    for scene in scenes(DOCUMENT) {
        assert!(scene.blocks.iter().any(|block| block.when == When::Run), "{}: nothing is run", scene.name);
    }
}

#[test]
fn blocks_are_parsed() {
    let document = "text\n```sh semantics run name=a options=\"--rule *.x=keep --fsync store\" exit=3\necho hi\n```\n```output\nhi\n```\n";
    let expected = Block {
        when: When::Run,
        script: "echo hi\n".into(),
        output: "hi\n".into(),
        options: ["--rule", "*.x=keep", "--fsync", "store"].map(str::to_owned).to_vec(),
        exit: 3,
    };
    assert_eq!(scenes(document), [Scene { name: "a".into(), blocks: vec![expected] }]);
}
