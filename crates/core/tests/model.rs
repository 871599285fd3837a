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

use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};

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

#[test]
fn the_namespace_is_what_the_reference_says() {
    let seed = seed();
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config = Config { cases: cases(), failure_persistence: None, max_shrink_iters: 2000, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    let outcome = runner.run(&(world::terms(), operation::steps(STEPS_MAX)), |(terms, steps)| {
        run(&terms, &steps).map_err(TestCaseError::fail)
    });
    if let Err(TestError::Fail(why, (terms, steps))) = outcome {
        let steps: Vec<String> = steps.iter().map(|step| format!("    {step:?},")).collect();
        panic!("SURGETANK_MODEL_SEED={seed}\n{why}\n{terms:?}\n{}", steps.join("\n"));
    }
    outcome.unwrap();
}
