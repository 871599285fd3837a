//! Nodes that are lost, cut off, or killed while programs of all nodes work: four agents with short leases on a network.
//!
//! Each name belongs to the programs of one node. At the end the store is compared with what they were answered:
//!
//! - What the programs of a node that was a member all the time were answered is in the store, or a verdict names it.
//! - What those of a node that was cut off were answered is in the store, beside the name, or a verdict names it.
//! - What was synced to the store is there, or a later version, whatever was lost.
//! - Nothing is in the store that no program wrote, and no call waits for longer than its patience.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::nodes::names;
use crate::pool::Pool;
use crate::pool_losses::{bytes, read};
use crate::pool_network::Cut;
use crate::scene::eventually;

const NODES: usize = 4;
/// A program's step, of a few calls, takes at most this: the patience for other members, and what the machine adds.
const PATIENCE: Duration = Duration::from_secs(90);

/// What happens to one of the nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    /// The machine ends, with its tiers.
    Lost,
    /// It ends, and comes back with its tiers as a new member.
    Back,
    /// Cut off for some time: shorter than a lease, or longer.
    Apart(Cut, u64),
    /// Cut off until its programs have ended.
    Gone(Cut),
    /// Its agent is killed, and replaced.
    Agent,
    /// Its agent is killed when it passes this point, and replaced.
    Point(&'static str),
}

const POINTS: [&str; 6] = [
    "drain.executed",
    "drain.durable",
    "drain.compared",
    "store.published",
    "seal.written_down",
    "rename.written_down",
];

impl Event {
    fn of(rng: &mut fastrand::Rng) -> Self {
        let cut = [Cut::All, Cut::Sent, Cut::Received][rng.usize(0..3)];
        match rng.u32(0..10) {
            0 | 1 => Self::Lost,
            2 => Self::Back,
            3 => Self::Apart(cut, 300),
            4 | 5 => Self::Apart(cut, 5000),
            6 | 7 => Self::Gone(cut),
            8 => Self::Agent,
            _ => Self::Point(POINTS[rng.usize(0..POINTS.len())]),
        }
    }

    /// May the node's membership end by it?
    fn may_expel(self) -> bool {
        !matches!(self, Self::Agent | Self::Point(_))
    }
}

/// What programs were answered about one name.
#[derive(Debug, Default)]
struct Story {
    /// The last answer: its content, or that it is absent. `None`: a call failed, so it may be either.
    last: Option<Option<Vec<u8>>>,
    /// All that was written, in order.
    written: Vec<Vec<u8>>,
    /// So many of these are not older than what is in the store.
    synced: usize,
}

type Stories = BTreeMap<String, Story>;

/// Changes names of its own until `stops`. Returns what became of them, and the longest wait.
fn work(over: &Path, node: usize, seed: u64, stops: &AtomicBool) -> (Stories, Duration) {
    let mut rng = fastrand::Rng::with_seed(seed * 10 + node as u64);
    let (mut stories, mut longest) = (Stories::new(), Duration::ZERO);
    while !stops.load(Ordering::SeqCst) {
        let dir = ["a", "b", "c"][rng.usize(0..3)];
        let name = format!("{dir}/of{node}-{}", rng.u32(0..3));
        let path = over.join(&name);
        let story = stories.entry(name).or_insert_with(|| Story { last: Some(None), ..Story::default() });
        let content = bytes(rng.usize(1..30_000), rng.u8(..));
        let begun = Instant::now();
        let is_there = story.last.as_ref().is_some_and(Option::is_some);
        let (done, is, is_synced) = match rng.u32(0..12) {
            0 if is_there => (fs::remove_file(&path), None, false),
            1..=3 => {
                let part = over.join(format!("{dir}/.part{node}"));
                let written = fs::write(&part, &content).and_then(|()| fs::rename(&part, &path));
                (written, Some(content), false)
            }
            4 => {
                let write = || {
                    let mut file = fs::File::create(&path)?;
                    file.write_all(&content)?;
                    file.sync_all()
                };
                (write(), Some(content), true)
            }
            _ => (fs::write(&path, &content), Some(content), false),
        };
        longest = longest.max(begun.elapsed());
        story.written.extend(is.clone());
        if is_synced && done.is_ok() {
            story.synced = story.written.len();
        }
        story.last = done.is_ok().then_some(is);
        std::thread::sleep(Duration::from_millis(rng.u64(5..40)));
    }
    (stories, longest)
}

/// One case. Returns how many answers were compared.
fn case(pool: &mut Pool, seed: u64) -> usize {
    let mut rng = fastrand::Rng::with_seed(seed);
    let (event, node) = (Event::of(&mut rng), rng.usize(1..NODES));
    let node = if event == Event::Agent && rng.bool() { 0 } else { node };
    eprintln!("case {seed}: {event:?} at node {node}");
    for dir in ["a", "b", "c"] {
        fs::create_dir(pool.store().join(dir)).unwrap();
    }
    for number in 0..NODES {
        // (What cannot be delivered is tried for a shorter time than by default.)
        let mut more = vec!["--pool-lease", "1s", "--retry", "4s"];
        let rate = ["64KiB", "256KiB", "1GiB"][rng.usize(0..3)];
        more.extend(["--drain-bytes-per-second-max", rate]);
        let is_at = if let Event::Point(point) = event { (number == node).then_some(point) } else { None };
        let crash = is_at.map(|point| format!("{point}:{}", rng.u32(1..10)));
        pool.mount_with(&more, crash.as_deref());
    }
    // Each directory has an owner that the seed chooses.
    for dir in ["a", "b", "c"] {
        fs::write(pool.member(rng.usize(0..NODES)).join(dir).join("claims"), "").unwrap();
    }
    // (In every second case files go to the member of their group.)
    if seed.is_multiple_of(2) {
        for dir in ["a", "b", "c"] {
            let (dir, group) = (pool.member(rng.usize(0..NODES)).join(dir), format!("group {}", rng.u32(..)));
            let hint = "user.surgetank.hint.collocate";
            rustix::fs::setxattr(&dir, hint, group.as_bytes(), rustix::fs::XattrFlags::empty()).unwrap();
        }
    }
    let overs: Vec<PathBuf> = (0..NODES).map(|number| pool.member(number).to_owned()).collect();
    let (stops, ends) = (AtomicBool::new(false), AtomicBool::new(false));
    let made = std::thread::scope(|scope| {
        let works: Vec<_> = (0..NODES)
            .map(|number| {
                // (The programs of a machine end with it.)
                let stops = if number == node && matches!(event, Event::Lost | Event::Back) { &ends } else { &stops };
                let over = &overs[number];
                scope.spawn(move || work(over, number, seed, stops))
            })
            .collect();
        std::thread::sleep(Duration::from_millis(rng.u64(200..2500)));
        strike(pool, event, node, &ends);
        std::thread::sleep(Duration::from_millis(rng.u64(500..3000)));
        stops.store(true, Ordering::SeqCst);
        works.into_iter().map(|work| work.join().unwrap()).collect::<Vec<_>>()
    });
    eprintln!("longest steps: {:?}", made.iter().map(|(_, longest)| *longest).collect::<Vec<_>>());
    let lost = event.may_expel().then_some(node);
    let (said, codes) = end(pool, event, node);
    let mut compared = 0;
    for (number, (stories, longest)) in made.iter().enumerate() {
        assert!(*longest < PATIENCE, "seed {seed}: a call of node {number} took {longest:?}");
        for (name, story) in stories {
            let why = format!("seed {seed}, {event:?} at node {node}: {name} of node {number}; {codes:?}; {said}");
            compared += verify(pool, (name, story), lost == Some(number), event, &said, &why);
        }
    }
    if said.contains("lost with another node") {
        assert!(codes.contains(&Some(3)), "seed {seed}: a loss without an exit code: {codes:?}; {said}");
    }
    compared
}

fn strike(pool: &Pool, event: Event, node: usize, ends: &AtomicBool) {
    match event {
        Event::Lost | Event::Back => {
            ends.store(true, Ordering::SeqCst);
            pool.kill(node);
            if event == Event::Lost {
                pool.wipe(node);
            } else {
                // (Only a member that is lost comes back as another one.)
                eventually("the loss is noticed", || pool.status(0)["lost"][0]["member"] == node as u64 + 1);
                pool.mount_again(node, &["--pool-lease", "1s", "--retry", "4s"]);
            }
        }
        Event::Apart(cut, millis) => {
            pool.network().cut(node, cut);
            std::thread::sleep(Duration::from_millis(millis));
            pool.network().heal(node, cut);
        }
        Event::Gone(cut) => pool.network().cut(node, cut),
        Event::Agent => rustix::process::kill_process(pool.agent(node), rustix::process::Signal::KILL).unwrap(),
        // (It happens by itself.)
        Event::Point(_) => {}
    }
}

/// All members end, the first one last. Returns what they said, and their exit codes.
fn end(pool: &mut Pool, event: Event, node: usize) -> (String, Vec<Option<i32>>) {
    let (mut said, mut codes) = (String::new(), Vec::new());
    // (The first member leaves last.)
    let order =
        (1..NODES).filter(|number| *number != node).chain([node].into_iter().filter(|one| *one != 0)).chain([0]);
    for number in order {
        if event == Event::Lost && number == node {
            continue;
        }
        let begun = Instant::now();
        let output = pool.try_end(number, "60s");
        eprintln!("node {number} ended with {:?} in {:?}", output.status.code(), begun.elapsed());
        said += &format!("\nnode {number}: {}", String::from_utf8_lossy(&output.stderr));
        codes.push(output.status.code());
        assert!(
            matches!(output.status.code(), Some(0 | 3)),
            "node {number} ended with {:?}: {said}",
            output.status.code()
        );
    }
    if let Event::Gone(cut) = event {
        pool.network().heal(node, cut);
    }
    pool.have_ended();
    (said, codes)
}

/// Returns 1 if something was compared.
fn verify(pool: &Pool, (name, story): (&str, &Story), is_lost: bool, event: Event, said: &str, why: &str) -> usize {
    let found = read(pool.store().join(name));
    let version = |content: &[u8]| story.written.iter().rposition(|one| one == content);
    if let Some(content) = &found {
        // (A call that failed may have written a part. One that was answered has not.)
        let is_whole = version(content).is_some();
        assert!(is_whole || story.last.is_none() || is_lost, "of no program, {} bytes: {why}", content.len());
    }
    // (A list that people read is short. So few names are made.)
    let is_named = said.contains(&format!(" {name}: ")) || said.contains("… and ");
    let (dir, file) = name.split_once('/').unwrap();
    let prefix = format!("{file}.surgetank-conflict-");
    let beside = || -> Vec<Vec<u8>> {
        let all = names(&pool.store().join(dir)).into_iter().filter(|one| one.starts_with(&prefix));
        all.filter_map(|one| read(pool.store().join(dir).join(one))).collect()
    };
    if is_lost
        && story.synced > 0
        && story.last.as_ref().is_some_and(Option::is_some)
        && story.synced == story.written.len()
    {
        let synced = &story.written[story.synced - 1];
        let is_there = found.as_ref() == Some(synced) || beside().contains(synced);
        assert!(is_there, "what was synced is lost: {why}");
        return 1;
    }
    let Some(last) = &story.last else { return 0 };
    if found == *last {
        return 1;
    }
    if is_lost && matches!(event, Event::Lost | Event::Back) {
        // What the machine's own programs did may be undone.
        return 0;
    }
    match last {
        Some(content) => assert!(
            is_named || is_lost && beside().contains(content),
            "{:?} of {} versions in the store: {why}",
            found.map(|content| version(&content)),
            story.written.len()
        ),
        None => assert!(is_named, "a removal is undone: {why}"),
    }
    1
}

/// `SURGETANK_NODE_CASES` runs more cases, `SURGETANK_NODE_SEED` begins with another one.
#[test]
fn nothing_that_was_promised_is_lost_with_a_node() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let (first, cases) = (number("SURGETANK_NODE_SEED").unwrap_or(1), number("SURGETANK_NODE_CASES").unwrap_or(2));
    let Some(mut pool) = Pool::on_network("crash", NODES) else { return };
    let mut compared = 0;
    for seed in first..first + cases {
        pool.again(&format!("case{seed}"), 0);
        let begun = Instant::now();
        let of_case = case(&mut pool, seed);
        eprintln!("case {seed}: {of_case} names compared in {:?}", begun.elapsed());
        compared += of_case;
        fs::remove_dir_all(pool.store()).unwrap();
    }
    assert!(compared as u64 >= 10 * cases, "only {compared} names were compared");
    eprintln!("{cases} cases: {compared} names compared");
}
