//! Namespace, drain and catalog under shuttle, which chooses the next thread at each lock and each atomic word (`sync`).
//! `cargo nextest run --workspace --features surgetank-core/schedules --test schedules`
//!
//! `SURGETANK_SCHEDULES`: executions of each test. A failure prints its schedule and `SURGETANK_SCHEDULES_SEED`, which repeats
//! the run unless the failure depends on time.

#![allow(clippy::unwrap_used, clippy::expect_used)] // a test reports by a panic

#[path = "../model/door.rs"]
mod door;
#[path = "../model/machine.rs"]
mod machine;
#[path = "../model/several.rs"]
mod several;
#[allow(dead_code, reason = "the model needs more of it")]
#[path = "../model/world.rs"]
mod world;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use rustix::io::Errno;
use shuttle::rand::Rng;
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};

use door::Mounted;
use surgetank_testkit::model::operation;
use surgetank_testkit::model::operation::{Access, Operation, Renaming};
use surgetank_testkit::model::reference::Outcome;
use surgetank_testkit::seeds;
use surgetank_types::model::{Caller, FileId};
use world::{Terms, World};

/// A wait beyond this time is a hang: no thread's turn can end it.
const TIMEOUT: Duration = Duration::from_secs(60);
const EXECUTIONS: usize = 60;
/// Steps of a program in one execution.
const STEPS_MAX: usize = 40;
/// Operations of each of the two programs.
const TURNS: usize = 8;
const STACK_BYTES: usize = 2 << 20;

fn pause() {
    shuttle::thread::yield_now();
}

fn executions() -> usize {
    std::env::var("SURGETANK_SCHEDULES").map_or(EXECUTIONS, |text| text.parse().expect("SURGETANK_SCHEDULES: a number"))
}

/// A different seed in each run.
fn seed() -> u64 {
    let given = std::env::var("SURGETANK_SCHEDULES_SEED").ok();
    let now = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_secs();
    given.map_or_else(now, |text| text.parse().expect("SURGETANK_SCHEDULES_SEED: a number"))
}

fn explore(what: impl Fn() + Send + Sync + 'static) {
    let what = Arc::new(what);
    for seed in seeds::kept("schedules").into_iter().chain([seed()]) {
        eprintln!("SURGETANK_SCHEDULES_SEED={seed}");
        let schedulers: [Box<dyn Scheduler + Send>; 2] = [
            Box::new(RandomScheduler::new_from_seed(seed, executions())),
            Box::new(PctScheduler::new_from_seed(seed, 3, executions())),
        ];
        for scheduler in schedulers {
            let mut config = shuttle::Config::new();
            config.stack_size = STACK_BYTES;
            config.silence_warnings = true;
            config.max_steps = shuttle::MaxSteps::None;
            let what = what.clone();
            shuttle::Runner::new(scheduler, config).run(move || what());
        }
    }
}

fn drawn<T>(strategy: impl Strategy<Value = T>) -> T {
    let mut seed = [0; 32];
    seed[..8].copy_from_slice(&shuttle::rand::thread_rng().r#gen::<u64>().to_le_bytes());
    let config = Config { failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &seed));
    strategy.new_tree(&mut runner).unwrap().current()
}

/// As in `model.rs`, but independent of the machine's own timing.
#[test]
fn a_program_and_the_drain() {
    explore(|| {
        let (terms, steps) = drawn((world::terms(), operation::steps(STEPS_MAX)));
        let mut world = World::new(&terms);
        for (index, step) in steps.iter().enumerate() {
            world.step(step).unwrap_or_else(|why| panic!("step {index} of {steps:?}: {why}\n{terms:?}"));
        }
        world.finish().unwrap_or_else(|why| panic!("{steps:?}, at the end: {why}\n{terms:?}"));
    });
}

/// The operations of one execution's programs that a test can check afterwards.
#[derive(Default)]
struct Account {
    /// The content of each written file: a byte, and its number of repetitions.
    made: Vec<(u8, usize)>,
    removed: usize,
}

const NAMES: [&str; 5] = ["p", "q", "r", "a/p", "a/q"];

fn a_program(mut mounted: Mounted, number: u8, account: &Mutex<Account>) {
    let name = || NAMES[shuttle::rand::thread_rng().gen_range(0..NAMES.len())].to_owned();
    // These results are expected: the kernel retries a stale name, and the two programs use the same names.
    let meets = |outcome: Outcome| match outcome {
        Outcome::Failed(Errno::NOENT | Errno::EXIST | Errno::STALE) => false,
        Outcome::Failed(other) => panic!("program {number}: {other:?}"),
        _ => true,
    };
    for turn in 0..TURNS {
        match shuttle::rand::thread_rng().gen_range(0..6) {
            0 | 1 => {
                let (byte, length) = (number * 64 + turn as u8 + 1, 1000 * (turn + 1));
                let create = Operation::Create {
                    path: name(),
                    slot: 0,
                    perm: 0o644,
                    access: Access::Write,
                    exclusive: true,
                    append: false,
                    truncate: false,
                };
                if meets(mounted.apply(&create).0) {
                    account.lock().unwrap().made.push((byte, length));
                    let write = Operation::Write { slot: 0, offset: 0, length, byte };
                    assert!(meets(mounted.apply(&write).0));
                    assert!(meets(mounted.apply(&Operation::Close { slot: 0 }).0));
                }
            }
            2 => {
                meets(mounted.apply(&Operation::Rename { from: name(), to: name(), how: Renaming::NoReplace }).0);
            }
            3 => {
                meets(mounted.apply(&Operation::Rename { from: name(), to: name(), how: Renaming::Exchange }).0);
            }
            4 => {
                let removed = meets(mounted.apply(&Operation::Unlink { path: name() }).0);
                account.lock().unwrap().removed += usize::from(removed);
            }
            _ => {
                if let Ok(content) = mounted.content(&name()) {
                    assert!(content.windows(2).all(|two| two[0] == two[1]), "a file has bytes of another file");
                }
            }
        }
    }
}

/// Two programs and the drain change the same names. No file is lost, doubled or mixed with another, and at the end the
/// programs see the content of the store.
#[test]
fn two_programs_and_the_drain() {
    explore(|| {
        let terms = Terms { drain_at_start: true, ..drawn(world::terms()) };
        let mut world = World::new(&terms);
        let before = world.tree().unwrap();
        let account = Arc::new(Mutex::new(Account::default()));
        let programs = [0, 1].map(|number| {
            let (mounted, account) = (world.another_program(), account.clone());
            shuttle::thread::spawn(move || a_program(mounted, number, &account))
        });
        programs.into_iter().for_each(|program| program.join().unwrap());
        world.settle().unwrap();
        let account = account.lock().unwrap();
        let found: BTreeMap<String, Vec<u8>> =
            world.tree().unwrap().into_iter().filter(|(path, _)| !before.contains_key(path)).collect();
        assert_eq!(found, world.stored().into_iter().filter(|(path, _)| !before.contains_key(path)).collect());
        assert_eq!(found.len(), account.made.len() - account.removed, "{:?} of {:?}", found.keys(), account.made);
        let mut left = account.made.clone();
        for (path, content) in &found {
            let token = (content[0], content.len());
            let at = left.iter().position(|made| *made == token);
            left.swap_remove(at.unwrap_or_else(|| panic!("{path} holds {token:?}, of {:?}", account.made)));
            assert!(content.iter().all(|byte| *byte == token.0), "{path} is mixed");
        }
        assert!(world.troubles().is_empty(), "{:?}", world.troubles());
    });
}

/// Regression: a look-up failed with ENOENT while the last holder of the inode released it.
#[test]
fn file_is_found_while_its_last_holder_forgets_it() {
    explore(|| {
        let world = World::new(&Terms::plain());
        let path = world.stored().into_keys().find(|path| !path.contains('/')).unwrap();
        let askers = [0, 1].map(|pid| {
            let (namespace, name) = (world.namespace().clone(), path.clone());
            shuttle::thread::spawn(move || {
                let caller = Caller { uid: 0, gid: 0, pid, umask: 0o022 };
                for _ in 0..3 {
                    let found = namespace.resolver.lookup(&caller, FileId::ROOT, name.as_bytes()).unwrap();
                    namespace.resolver.forget(found.id, 1);
                }
            })
        });
        askers.into_iter().for_each(|asker| asker.join().unwrap());
    });
}
