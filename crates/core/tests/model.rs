//! The namespace against the reference model: random programs and random mishaps, on real tiers, a real store and a real
//! catalog. Whatever programs see must be what the reference says; when all is drained, the store itself must be it.
//!
//! `SURGETANK_MODEL_CASES` makes it run longer, `SURGETANK_MODEL_SEED` repeats a run.

#[path = "model/disk.rs"]
mod disk;
#[path = "model/door.rs"]
mod door;
#[path = "model/operation.rs"]
mod operation;
#[path = "model/reference.rs"]
mod reference;
#[path = "model/world.rs"]
mod world;

use std::time::{Duration, Instant};

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use operation::Step;
use world::{Terms, World};

const CASES: u32 = 64;
const STEPS_MAX: usize = 120;

fn seed() -> u64 {
    let told = std::env::var("SURGETANK_MODEL_SEED").ok().map(|text| text.parse().expect("SURGETANK_MODEL_SEED: a number"));
    told.unwrap_or_else(|| std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().subsec_nanos().into())
}

fn cases() -> u32 {
    std::env::var("SURGETANK_MODEL_CASES").ok().map_or(CASES, |text| text.parse().expect("SURGETANK_MODEL_CASES: a number"))
}

/// Runs one sequence; a panic anywhere in it is its failure.
fn run(terms: &Terms, steps: &[Step]) -> Result<(), String> {
    let outcome = std::panic::catch_unwind(|| {
        let mut world = World::new(terms);
        for (index, step) in steps.iter().enumerate() {
            world.step(step).map_err(|why| format!("step {index}, {step:?}: {why}"))?;
        }
        world.finish().map_err(|why| format!("at the end: {why}"))
    });
    outcome.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(text.unwrap_or_else(|| "panicked".to_owned()))
    })
}

/// Shrinking stops after this long: what is left then is short enough to read.
const SHRINKING: Duration = Duration::from_secs(60);
/// The drain runs beside the programs, so that a failure may need more than one run to show again.
const TRIES: usize = 3;

/// Leaves out whatever the failure does not need.
fn shrink(terms: &Terms, mut steps: Vec<Step>, mut why: String) -> (Vec<Step>, String) {
    let until = Instant::now() + SHRINKING;
    let mut chunk = steps.len();
    while chunk > 0 {
        let mut at = 0;
        let before = steps.len();
        while at < steps.len() && Instant::now() < until {
            let mut fewer = steps.clone();
            fewer.drain(at..(at + chunk).min(steps.len()));
            match (0..TRIES).find_map(|_| run(terms, &fewer).err()) {
                Some(reason) => (steps, why) = (fewer, reason),
                None => at += chunk,
            }
        }
        chunk = if chunk == 1 && steps.len() < before { 1 } else { chunk / 2 };
    }
    (steps, why)
}

#[test]
fn the_namespace_is_what_the_reference_says() {
    let seed = seed();
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config = Config { failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    let strategy = (world::terms(), operation::steps(STEPS_MAX));
    for case in 0..cases() {
        let (terms, steps) = strategy.new_tree(&mut runner).unwrap().current();
        if let Err(why) = run(&terms, &steps) {
            let (steps, why) = shrink(&terms, steps, why);
            let steps: Vec<String> = steps.iter().map(|step| format!("    {step:?},")).collect();
            panic!("SURGETANK_MODEL_SEED={seed}, case {case}\n{why}\n{terms:?}\n{}", steps.join("\n"));
        }
    }
}
