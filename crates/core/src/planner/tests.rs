//! Compares the simulation with Sea's equations where those hold, and with properties that every prediction must have.

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use super::advise;
use super::machine::{Agent, Calibration, Door, Operations, Place, SCHEMA, Stream};
use super::predict::predict;
use super::sea::{self, Lustre, Node, Traffic};
use super::simulate::{self, Mode, Setup};
use super::workload::Workload;

const MIB: f64 = 1048576.0;
const FREE: Operations =
    Operations { create_s: 0.0, open_s: 0.0, stat_s: 0.0, unlink_s: 0.0, fsync_s: 0.0, cpu_s: 0.0, per_second: 1e12 };

fn stream(mib_s: f64) -> Stream {
    Stream { one_bps: mib_s * MIB, all_bps: mib_s * MIB, cpu_s_per_byte: 0.0, spread: 0.0 }
}

fn place(name: &str, in_memory: bool, room_mib: f64, read: f64, write: f64) -> Place {
    Place {
        name: name.into(),
        path: format!("/{name}").into(),
        in_memory,
        room_bytes: (room_mib * MIB) as u64,
        read: stream(read),
        write: stream(write),
        cached_read: stream(4000.0),
        cached_write: stream(2000.0),
        dirty_bytes: 0,
        operations: FREE,
        total_read_bps: None,
        total_write_bps: None,
    }
}

/// A machine without latency, operations, processor time or page cache: the domain of Sea's equations.
fn bare(cores: f64, ram_mib: f64, disk_mib: f64) -> Calibration {
    let door = Door {
        create_s: 0.0,
        create_cpu_s: 0.0,
        open_s: 0.0,
        open_cpu_s: 0.0,
        open_store_s: 0.0,
        open_store_cpu_s: 0.0,
        per_second: 1e12,
    };
    Calibration {
        schema: SCHEMA,
        version: "test".into(),
        taken_at_s: 0,
        host: "test".into(),
        load_before: 0.0,
        load_after: 0.0,
        cores,
        memory_bytes: 1 << 40,
        store: place("store", false, 1e6, 100.0, 50.0),
        tiers: vec![place("ram", true, ram_mib, 4000.0, 2000.0), place("disk", false, disk_mib, 500.0, 400.0)],
        agent: Agent {
            start_s: 0.0,
            shim: Some(door),
            mount: None,
            drain_file_s: 0.0,
            drain_file_cpu_s: 0.0,
            drain_bps: 1e12,
            drain_cpu_s_per_byte: 0.0,
            quiet_s: 0.0,
        },
        notes: Vec::new(),
    }
}

/// A machine with the costs of a real one.
fn real() -> Calibration {
    let mut machine = bare(2.0, 1024.0, 8192.0);
    machine.memory_bytes = 4 << 30;
    for place in machine.tiers.iter_mut().chain([&mut machine.store]) {
        for stream in [&mut place.read, &mut place.write, &mut place.cached_read, &mut place.cached_write] {
            stream.cpu_s_per_byte = 3e-10;
            stream.spread = 0.05;
        }
        place.dirty_bytes = 32 << 20;
        place.operations = Operations {
            create_s: 1e-3,
            open_s: 5e-4,
            stat_s: 5e-4,
            unlink_s: 5e-4,
            fsync_s: 5e-3,
            cpu_s: 2e-5,
            per_second: 2000.0,
        };
    }
    let door = Door {
        create_s: 8e-5,
        create_cpu_s: 7e-5,
        open_s: 5e-6,
        open_cpu_s: 5e-6,
        open_store_s: 1e-3,
        open_store_cpu_s: 5e-5,
        per_second: 2e4,
    };
    machine.agent = Agent {
        start_s: 0.02,
        shim: Some(door),
        mount: Some(Door { create_s: 1e-4, ..door }),
        drain_file_s: 1e-3,
        drain_file_cpu_s: 1e-4,
        drain_bps: 48.0 * MIB,
        drain_cpu_s_per_byte: 1e-9,
        quiet_s: 0.05,
    };
    machine
}

fn incrementation(tasks: usize, iterations: usize, mib: u64, cpu_s: f64) -> Workload {
    Workload::parse(&format!(
        "[[stage]]\nname='inc'\ntasks={tasks}\nbytes_in='{mib}M'\nbytes_out='{mib}M'\niterations={iterations}\nreread=true\ncpu_s={cpu_s}"
    ))
    .unwrap()
}

fn estimate(machine: &Calibration, workload: &Workload, setup: &Setup) -> f64 {
    simulate::run(machine, workload, setup).makespan_s
}

/// The equations' view of [`bare`] with one compute node.
fn as_sea(machine: &Calibration, processes: f64, file: f64) -> (Lustre, Node) {
    let of = |place: &Place| (place.read.all_bps, place.write.all_bps);
    let (store, ram, disk) = (of(&machine.store), of(&machine.tiers[0]), of(&machine.tiers[1]));
    let lustre = Lustre {
        network: 1e15,
        compute_nodes: 1.0,
        storage_nodes: 1.0,
        processes,
        disks: 1.0,
        disk_read: store.0,
        disk_write: store.1,
    };
    // Sea keeps room for one file of each process; Surgetank does not have to.
    let reserve = processes * file;
    let node = Node {
        cache_read: ram.0,
        cache_write: ram.1,
        tmpfs_room: machine.tiers[0].room_bytes as f64 + reserve,
        disks: 1.0,
        disk_room: machine.tiers[1].room_bytes as f64 + reserve,
        disk_read: disk.0,
        disk_write: disk.1,
    };
    (lustre, node)
}

fn traffic(tasks: f64, iterations: f64, mib: f64) -> Traffic {
    let whole = tasks * mib * MIB;
    Traffic { input: whole, intermediate: (iterations - 1.0) * whole, output: whole, file: mib * MIB }
}

fn same(got: f64, wanted: f64) {
    assert!((got / wanted - 1.0).abs() < 1e-6, "{got} instead of {wanted}");
}

/// Equation 1: on the store, without a page cache, all processes at the same step.
#[test]
fn store_without_cache_matches_equation_1() {
    let machine = bare(8.0, 0.0, 0.0);
    for processes in [1, 4] {
        let workload = incrementation(4, 3, 64, 0.0);
        let setup = Setup { page_cache: false, apart_s: 0.0, ..Setup::new(&machine, Mode::Store, processes) };
        let moved = traffic(4.0, 3.0, 64.0);
        let read = moved.input + moved.intermediate;
        let written = moved.intermediate + moved.output;
        let wanted = sea::lustre(read, written, machine.store.read.all_bps, machine.store.write.all_bps);
        same(estimate(&machine, &workload, &setup), wanted);
    }
}

/// Equation 5: all but the first read is within the page cache. Here the time also includes the writes to the store,
/// which Sea's does not count.
#[test]
fn tasks_on_the_store_with_endless_cache_match_equation_5() {
    let mut machine = bare(8.0, 0.0, 0.0);
    machine.store.dirty_bytes = 1 << 40;
    // The store's own write-back must not delay any task.
    machine.store.write = stream(0.001);
    let workload = incrementation(4, 3, 64, 0.0);
    let (lustre, node) = as_sea(&machine, 4.0, 64.0 * MIB);
    let setup = Setup { apart_s: 0.0, ..Setup::new(&machine, Mode::Store, 4) };
    let outcome = simulate::run(&machine, &workload, &setup);
    same(outcome.tasks_s, sea::lustre_cached(&traffic(4.0, 3.0, 64.0), &lustre, &node));
}

/// Equations 7–10 whatever spills, and 11 when nothing does. One process, so that no two levels are used at a time.
/// Nothing to drain, since Sea's clock stops when the application ends.
#[test]
fn intermediate_files_alone_are_equations_7_and_11() {
    let text = "[[stage]]\nname='a'\ntasks=1\nbytes_in='64M'\nbytes_out='64M'\niterations=5\nreread=true\n[[stage]]\nname='end'\ntasks=1\nreads=['a']";
    let workload = Workload::parse(text).unwrap();
    let moved = Traffic { input: 64.0 * MIB, intermediate: 320.0 * MIB, output: 0.0, file: 64.0 * MIB };
    for (ram_mib, disk_mib) in [(1e4, 0.0), (128.0, 1e4), (128.0, 64.0), (100.0, 77.0), (0.0, 1e4), (0.0, 0.0)] {
        let machine = bare(8.0, ram_mib, disk_mib);
        let setup = Setup { page_cache: false, ..Setup::new(&machine, Mode::InMemory, 1) };
        let (lustre, node) = as_sea(&machine, 1.0, 64.0 * MIB);
        same(estimate(&machine, &workload, &setup), sea::sea(&moved, &lustre, &node));
        if ram_mib > 320.0 {
            same(estimate(&machine, &workload, &setup), sea::sea_cached(&moved, &lustre, &node));
        }
    }
}

#[test]
fn drain_behind_equal_computing_costs_only_its_tail() {
    // 20 files of 50 MiB, 1 s of computing each; the drain also takes 1 s a file, and is one file behind.
    let mut machine = bare(2.0, 1e4, 0.0);
    machine.tiers[0].write = stream(1e9);
    let workload = Workload::parse("[[stage]]\nname='a'\ntasks=20\nbytes_out='50M'\ncpu_s=1.0").unwrap();
    let setup = Setup::new(&machine, Mode::CopyAll, 1);
    let took = estimate(&machine, &workload, &setup);
    assert!((took - 21.0).abs() < 0.01, "{took}");
    let direct = estimate(&machine, &workload, &Setup::new(&machine, Mode::Store, 1));
    assert!((direct - 40.0).abs() < 0.01, "{direct}");
}

#[test]
fn latency_decides_for_small_files() {
    let machine = real();
    let workload = Workload::parse("[[stage]]\nname='a'\ntasks=1\nfiles_out=10000\nbytes_out='1M'").unwrap();
    let store = predict(&machine, &workload, &Setup::new(&machine, Mode::Store, 1));
    assert!(store.estimate_s > 10.0 && store.bottleneck.contains("operations of the store"), "{store:?}");
    let within = predict(&machine, &workload, &Setup::new(&machine, Mode::InMemory, 1));
    assert!(within.outcome.tasks_s < 1.0 && within.estimate_s > 10.0 * 0.9, "{within:?}");
}

#[test]
fn full_tier_spills_what_exceeds_it() {
    let mut machine = real();
    machine.tiers.pop();
    let workload = incrementation(4, 4, 256, 0.0);
    let setup = Setup { tier_bytes: vec![512 << 20], ..Setup::new(&machine, Mode::InMemory, 2) };
    let outcome = simulate::run(&machine, &workload, &setup);
    assert!(outcome.tier_peak_bytes[0] <= 512 << 20, "{outcome:?}");
    assert!(outcome.spilled_bytes >= 2 << 30, "{outcome:?}");
}

#[test]
fn undrained_bytes_in_memory_stay_under_their_limit() {
    let machine = real();
    let workload = Workload::parse("[[stage]]\nname='a'\ntasks=32\nbytes_out='32M'").unwrap();
    let setup = Setup { dirty_bytes_max: 128 << 20, ..Setup::new(&machine, Mode::CopyAll, 4) };
    let outcome = simulate::run(&machine, &workload, &setup);
    let waited = outcome.spent.iter().any(|(cause, seconds)| *cause == simulate::Cause::DirtyLimit && *seconds > 1.0);
    assert!(waited, "{outcome:?}");
}

#[test]
fn parts_of_the_makespan_add_up_to_it() {
    let machine = real();
    for mode in Mode::ALL {
        let outcome = simulate::run(&machine, &incrementation(6, 3, 64, 0.2), &Setup::new(&machine, mode, 2));
        same(outcome.spent.iter().map(|(_, seconds)| seconds).sum(), outcome.makespan_s);
        assert!(outcome.uses.iter().all(|used| used.busy <= 1.0 + 1e-6), "{outcome:?}");
    }
}

fn advice(workload: &Workload, machine: &Calibration) -> advise::Advice {
    let question = advise::Question {
        nodes: 1,
        processes: vec![1, 2],
        modes: vec![Mode::InMemory, Mode::Move, Mode::CopyAll],
        tier_bytes: machine.tiers.iter().map(|tier| tier.room_bytes).collect(),
        page_cache: true,
    };
    advise::advise(machine, workload, &question).unwrap()
}

/// Regression: the advice `keep` for files that are all results left them out of the store.
#[test]
fn results_are_never_advised_to_stay_out_of_the_store() {
    let machine = real();
    let results = Workload::parse("[[stage]]\nname='a'\ntasks=4\nbytes_in='64M'\nbytes_out='64M'\ncpu_s=0.1").unwrap();
    let advised = advice(&results, &machine);
    assert!(advised.considered.iter().all(|prediction| prediction.setup.mode != Mode::InMemory), "{advised:?}");
    // A few bytes may stay out, without a gain: a mode that puts everything in the store is as good.
    let text = "[[stage]]\nname='a'\ntasks=4\nbytes_out=4096\n[[stage]]\nname='b'\ntasks=4\nreads=['a']\nbytes_out='64M'\ncpu_s=1";
    let advised = advice(&Workload::parse(text).unwrap(), &machine);
    let in_memory = advised.considered.iter().find(|prediction| prediction.setup.mode == Mode::InMemory).unwrap();
    assert!(in_memory.estimate_s <= advised.best.estimate_s * 1.02);
    assert_eq!(advised.best.setup.mode, Mode::CopyAll);
    assert_eq!(advice(&incrementation(8, 6, 32, 0.0), &machine).best.setup.mode, Mode::InMemory);
}

/// Regression: a cache of one byte fills and accepts again for every byte, so the answer took longer than the workload.
#[test]
fn write_back_cache_of_one_byte_equals_none() {
    let with = |dirty_bytes: u64| {
        let mut machine = real();
        machine.store.dirty_bytes = dirty_bytes;
        estimate(&machine, &incrementation(8, 6, 32, 0.0), &Setup::new(&machine, Mode::Store, 2))
    };
    assert_eq!(with(1), with(0));
}

/// All parameters that may differ between predictions.
#[derive(Debug, Clone)]
struct Any {
    tasks: usize,
    iterations: usize,
    mib: u64,
    cpu_s: f64,
    files: u64,
    processes: usize,
    nodes: usize,
    ram_mib: u64,
    mode: Mode,
}

impl Any {
    fn workload(&self) -> Workload {
        Workload::parse(&format!(
            "[[stage]]\nname='inc'\ntasks={0}\nbytes_in='{1}M'\nfiles_out={2}\nbytes_out='{1}M'\niterations={3}\nreread=true\ncpu_s={4}\n\
             [[stage]]\nname='merge'\ntasks=1\nreads=['inc']\nbytes_out='{1}M'\ncpu_s={4}",
            self.tasks, self.mib, self.files, self.iterations, self.cpu_s
        ))
        .unwrap()
    }

    fn setup(&self, machine: &Calibration) -> Setup {
        Setup {
            nodes: self.nodes,
            tier_bytes: vec![self.ram_mib << 20, 2 << 30],
            ..Setup::new(machine, self.mode, self.processes)
        }
    }
}

fn any() -> impl Strategy<Value = Any> {
    let sizes = (1usize..9, 1usize..4, 1u64..200, 0.0..2.0f64, prop_oneof![Just(1u64), 1u64..3000]);
    let ways = (1usize..6, 1usize..3, 0u64..2000, prop::sample::select(Mode::ALL.to_vec()));
    (sizes, ways).prop_map(|((tasks, iterations, mib, cpu_s, files), (processes, nodes, ram_mib, mode))| Any {
        tasks,
        iterations,
        mib,
        cpu_s,
        files,
        processes,
        nodes,
        ram_mib,
        mode,
    })
}

/// A machine whose tiers, store and drain have so many times the bandwidth.
fn with_bandwidth(machine: &Calibration, factor: f64) -> Calibration {
    let mut faster = machine.clone();
    for place in faster.tiers.iter_mut().chain([&mut faster.store]) {
        for stream in [&mut place.read, &mut place.write, &mut place.cached_read, &mut place.cached_write] {
            stream.one_bps *= factor;
            stream.all_bps *= factor;
        }
    }
    faster.agent.drain_bps *= factor;
    faster
}

/// `move` removes a file from its tier once the store has it. A faster drain removes it before the next task reads it, and the task
/// opens it in the store: 10,255 files here. The agent does the same.
#[test]
fn faster_drain_with_move_makes_tasks_read_from_the_store() {
    let any = Any {
        tasks: 7,
        iterations: 1,
        mib: 49,
        cpu_s: 1.9,
        files: 1465,
        processes: 3,
        nodes: 1,
        ram_mib: 254,
        mode: Mode::Move,
    };
    let times = |mode| {
        let any = Any { mode, ..any.clone() };
        [1.0, 2.0].map(|factor| estimate(&with_bandwidth(&real(), factor), &any.workload(), &any.setup(&real())))
    };
    let [slow, fast] = times(Mode::Move);
    assert!(fast > slow * 1.2, "{slow} s, {fast} s");
    let [slow, fast] = times(Mode::CopyAll);
    assert!(fast <= slow, "{slow} s, {fast} s");
}

/// Estimates of the same cases each time with two caps of the first tier: the second estimate as a part of the first.
fn compared(machine: &Calibration, cases: usize, caps: impl Fn(&Any, f64) -> (u64, u64)) -> Vec<f64> {
    let mut runner = TestRunner::deterministic();
    let mut drawn = || (any(), 1.0..8.0f64).new_tree(&mut runner).unwrap().current();
    let mut parts = Vec::new();
    while parts.len() < cases {
        let (any, factor) = drawn();
        let (workload, setup) = (any.workload(), any.setup(machine));
        let (one, other) = caps(&any, factor);
        let with = |bytes| estimate(machine, &workload, &Setup { tier_bytes: vec![bytes, 0], ..setup.clone() });
        parts.push(with(other) / with(one));
    }
    parts.sort_by(f64::total_cmp);
    parts
}

/// Regression: one byte of a tier took the opens of a whole set off the store. It also separated equal tasks that were
/// otherwise in step, and made them a tenth faster.
#[test]
fn tier_of_one_byte_is_not_better_than_none() {
    // (It may be a little worse, because a task goes to the node that has the byte. It may be a little better, because
    // the task is served that much sooner.)
    let parts = compared(&real(), 150, |_, _| (0, 1));
    assert!(parts.iter().all(|part| (0.97..1.05).contains(part)), "{:?}", (parts.first(), parts.last()));
    // All tasks read, then all write: in step the store took 391 s.
    let text = "[[stage]]\nname='a'\ntasks=32\nbytes_in='64M'\nbytes_out='256M'\ncpu_s=1\n[[stage]]\nname='b'\ntasks=32\nreads=['a']\nbytes_out='16M'\ncpu_s=1";
    let workload = Workload::parse(text).unwrap();
    let machine = real();
    let with = |bytes: u64| {
        estimate(&machine, &workload, &Setup { tier_bytes: vec![bytes, 0], ..Setup::new(&machine, Mode::CopyAll, 2) })
    };
    assert!((with(1) / with(0) - 1.0).abs() < 0.01, "{} {}", with(0), with(1));
    // Opens are divided by the tier's share.
    let text =
        "[[stage]]\nname='a'\ntasks=1\nfiles_out=20000\nbytes_out='20M'\n[[stage]]\nname='b'\ntasks=1\nreads=['a']";
    let workload = Workload::parse(text).unwrap();
    let with = |bytes: u64| {
        estimate(&machine, &workload, &Setup { tier_bytes: vec![bytes, 0], ..Setup::new(&machine, Mode::InMemory, 1) })
    };
    assert!((with(1) / with(0) - 1.0).abs() < 0.01, "{} {}", with(0), with(1));
    assert!(with(10 << 20) < 0.8 * with(0) && with(20 << 20) < 0.8 * with(10 << 20));
}

/// Except with a drain slower than the store: bytes on a tier then reach the store later.
#[test]
fn larger_tier_is_seldom_and_never_much_slower() {
    let mut machine = real();
    machine.agent.drain_bps = 1e12;
    (machine.agent.drain_file_s, machine.agent.quiet_s) = (0.0, 0.0);
    let parts = compared(&machine, 150, |any, factor| (any.ram_mib << 20, (any.ram_mib as f64 * factor * MIB) as u64));
    // A file leaves as a whole when it is durable, so a little more room can come at a worse time.
    let slower = parts.iter().filter(|part| **part > 1.01).count();
    assert!(slower <= parts.len() / 50, "{slower} of {}", parts.len());
    assert!(parts.last().is_some_and(|most| *most < 1.10), "{parts:?}");
}

/// Regression: of sixteen tasks that read one database, each waited until the task before it had read the database.
#[test]
fn tasks_that_share_an_input_do_not_wait_for_its_readers() {
    let machine = real();
    let all = |tasks: usize| {
        let text = format!("[[stage]]\nname='a'\ntasks={tasks}\nbytes_in='512M'\nshared_in=true\ncpu_s=0.01");
        estimate(&machine, &Workload::parse(&text).unwrap(), &Setup::new(&machine, Mode::Store, 16))
    };
    assert!(all(16) < 1.5 * all(1), "{} {}", all(16), all(1));
}

/// Regression: two tasks that begin together were both reading, then both computing, with the store idle. The estimate
/// was half as long again as the real time.
#[test]
fn equal_tasks_overlap_reading_and_computing() {
    let machine = real();
    let read_s = (32 << 20) as f64 / machine.store.read.all_bps;
    let text = format!("[[stage]]\nname='a'\ntasks=16\nbytes_in='32M'\ncpu_s={read_s}");
    let took_s = estimate(&machine, &Workload::parse(&text).unwrap(), &Setup::new(&machine, Mode::Store, 2));
    // The store is busy except during the last task's computing.
    assert!(took_s < 18.0 * read_s, "{took_s} {read_s}");
}

/// Regression: GDAL writes its tiles as it computes them; the estimate on a bare store was a fifth too long.
#[test]
fn streaming_writes_overlap_computing() {
    let mut machine = real();
    machine.store.dirty_bytes = 0;
    let text = "[[stage]]\nname='a'\ntasks=1\nbytes_out='64M'\ncpu_s=1";
    let mut workload = Workload::parse(text).unwrap();
    let setup = Setup::new(&machine, Mode::Store, 1);
    let then_s = estimate(&machine, &workload, &setup);
    workload.tasks[0].steps[0].streams = true;
    let meanwhile_s = estimate(&machine, &workload, &setup);
    let writing_s = (64 << 20) as f64 / machine.store.write.one_bps;
    assert!((then_s - meanwhile_s - writing_s.min(1.0)).abs() < 0.05 * then_s, "{then_s} {meanwhile_s} {writing_s}");
    let limits = super::bounds::bounds(&machine, &machine, &workload, &setup);
    assert!(limits.lower_s <= meanwhile_s && meanwhile_s <= limits.upper_s, "{limits:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn estimate_is_between_the_bounds(any in any()) {
        let machine = real();
        let (mut workload, setup) = (any.workload(), any.setup(&machine));
        for step in workload.tasks.iter_mut().flat_map(|task| &mut task.steps) {
            step.streams = any.files % 2 == 0;
        }
        let estimate_s = estimate(&machine, &workload, &setup);
        let limits = super::bounds::bounds(&machine, &machine, &workload, &setup);
        prop_assert!(limits.lower_s <= estimate_s * (1.0 + 1e-6), "{limits:?} {estimate_s}");
        prop_assert!(estimate_s <= limits.upper_s * (1.0 + 1e-6), "{limits:?} {estimate_s}");
        let prediction = predict(&machine, &workload, &setup);
        prop_assert!(prediction.lower_s <= prediction.estimate_s && prediction.estimate_s <= prediction.upper_s);
    }

    #[test]
    fn more_bandwidth_is_never_slower(any in any(), factor in 1.0..8.0f64) {
        let machine = real();
        let faster = with_bandwidth(&machine, factor);
        let (workload, setup) = (any.workload(), any.setup(&machine));
        let (slow, fast) = (estimate(&machine, &workload, &setup), estimate(&faster, &workload, &setup));
        // A schedule may be unlucky (Graham's anomalies), by one task at most.
        let task_s = any.cpu_s * any.iterations as f64;
        // With `move` more has to be read from the store (`faster_drain_with_move_makes_tasks_read_from_the_store`).
        let reads_again = any.mode == Mode::Move;
        prop_assert!(reads_again || fast <= slow * 1.06 + task_s, "{slow} s, with {factor} times the bandwidth {fast} s");
        let closed = |machine: &Calibration| super::bounds::bounds(machine, machine, &workload, &setup);
        prop_assert!(closed(&faster).lower_s <= closed(&machine).lower_s * (1.0 + 1e-9));
        prop_assert!(closed(&faster).upper_s <= closed(&machine).upper_s * (1.0 + 1e-9));
    }

    #[test]
    fn same_workload_has_the_same_prediction(any in any()) {
        let machine = real();
        let (workload, setup) = (any.workload(), any.setup(&machine));
        prop_assert_eq!(predict(&machine, &workload, &setup), predict(&machine, &workload, &setup));
    }
}
