//! The machine around the namespace: tiers, and a catalog and a store that can stop at any step. The store fails as the terms
//! prescribe.

use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use surgetank_core::catalog::{Catalog, LogCatalog, Lsn};
use surgetank_core::namespace::Namespace;
use surgetank_policy::config::{Authority, Config, KeepAtExit, Pattern, RuleConfig, Survives, TierConfig};
use surgetank_store::posix::PosixStore;
use surgetank_store::{Store, Verify};
use surgetank_tier::Tiers;
use surgetank_types::error::Errno;
use surgetank_types::model::{Change, Image, Mode};

use super::door::Mounted;
use super::world::Terms;
use surgetank_testkit::model::disk::Scratch;
use surgetank_testkit::stores::faulty::{self, Failure, Faulty, Rule};
use surgetank_testkit::stores::ranges_only::RangesOnly;

const KEY: &str = "model";
/// Delay of a held publication: long enough for an operation of a program.
const HOLD: Duration = Duration::from_millis(500);

/// Passes a number of steps in store and catalog, and fails all later ones, as the kill of an agent does.
#[derive(Default)]
pub struct Fuse {
    lit: AtomicBool,
    left: AtomicI64,
}

impl Fuse {
    pub fn light(&self, steps: u64) {
        self.left.store(i64::try_from(steps).unwrap(), Ordering::SeqCst);
        self.lit.store(true, Ordering::SeqCst);
    }
    pub fn blown(&self) -> bool {
        self.lit.load(Ordering::SeqCst) && self.left.load(Ordering::SeqCst) <= 0
    }
    fn step(&self) -> bool {
        self.lit.load(Ordering::SeqCst) && self.left.fetch_sub(1, Ordering::SeqCst) <= 0
    }
}

struct FusedCatalog {
    inner: LogCatalog,
    fuse: Arc<Fuse>,
}

impl Catalog for FusedCatalog {
    fn commit(&self, changes: &[Change]) -> std::io::Result<Lsn> {
        if self.fuse.step() {
            return Err(Errno::IO.into());
        }
        self.inner.commit(changes)
    }
    fn sync(&self, upto: Lsn) -> std::io::Result<()> {
        self.inner.sync(upto)
    }
    fn position(&self) -> Lsn {
        self.inner.position()
    }
    fn load(&self) -> surgetank_types::error::Result<Image> {
        self.inner.load()
    }
    fn clear(&self) -> std::io::Result<()> {
        Catalog::clear(&self.inner)
    }
}

/// The failures of the store so far, over the lives of all agents.
#[derive(Default)]
pub struct Wrong {
    asked: AtomicU64,
    pub broken_off: AtomicU64,
    pub held: AtomicBool,
    starting: AtomicBool,
    asked_at_start: AtomicU64,
    synced: AtomicU64,
}

/// Queries of the drain only, because programs would see the error of their own.
fn is_question_of_the_drain(operation: faulty::Operation) -> bool {
    use faulty::Operation::{Check, List, Open, ReadLink, Stat, Verify};
    let drains = matches!(std::thread::current().name(), Some("drain" | "stage"));
    drains && matches!(operation, Stat | Check | ReadLink | List | Verify | Open)
}

fn keep_all() -> RuleConfig {
    let pattern = Pattern::Glob("*".into());
    RuleConfig { mode: Some(Mode::Keep), ..RuleConfig::empty(pattern, Authority::CommandLine, "the test") }
}

/// Names in the order in which the store got them.
pub type Published = Arc<Mutex<Vec<String>>>;

pub fn open(terms: &Terms, base: &Scratch, fuse: &Arc<Fuse>, published: &Published, wrong: &Arc<Wrong>) -> Mounted {
    let tier = |name: &str, cap_bytes| TierConfig {
        name: name.into(),
        paths: vec![base.join(name)],
        cap_bytes: Some(cap_bytes),
        survives: Some(Survives::Agent),
    };
    let config = Config {
        pool: None,
        over: base.join("store"),
        store: base.join("store"),
        tiers: vec![tier("fast", terms.caps[0]), tier("slow", terms.caps[1])],
        rules: if terms.keeps { vec![keep_all()] } else { Vec::new() },
        state: base.join("state"),
        ordered: true,
        pool_ordered: false,
        replicas: 1,
        replicas_at: Default::default(),
        verify: Verify::Cache,
        fsync: Some(terms.fsync),
        copy_up_bytes_max: terms.copy_up_bytes_max,
        dirty_bytes_max: u64::MAX,
        drain_threads: 2,
        drain_bytes_per_second_max: 0,
        store_ttl: terms.store_ttl,
        quiet: terms.quiet,
        deadline: None,
        job: None,
        sync_after: Duration::from_millis(20),
        retry: Duration::from_secs(1),
        wait_for_room: Duration::ZERO,
        grace: Duration::ZERO,
        keep_at_exit: if terms.keeps { KeepAtExit::Drain } else { KeepAtExit::Leave },
        direct: true,
        door: surgetank_policy::config::Way::Fuse,
        preload: false,
        preload_skip: Vec::new(),
        group_socket: None,
        metrics: None,
        metrics_token_file: surgetank_policy::config::TokenFile::Own,
        again: Vec::new(),
    };
    let root = rustix::fs::open(
        &config.store,
        rustix::fs::OFlags::PATH | rustix::fs::OFlags::DIRECTORY,
        rustix::fs::Mode::empty(),
    );
    let store = PosixStore::new(root.unwrap(), "file:store".into()).unwrap();
    if terms.ranges_only {
        return mount(terms, config, Faulty::new(RangesOnly::new(store)), fuse, published, wrong);
    }
    mount(terms, config, Faulty::new(store), fuse, published, wrong)
}

fn mount<S: Store + 'static>(
    terms: &Terms,
    config: Config,
    store: Faulty<S>,
    fuse: &Arc<Fuse>,
    published: &Published,
    wrong: &Arc<Wrong>,
) -> Mounted {
    let (unanswered, asked) = (terms.unanswered, wrong.clone());
    store.add(Rule::when(Failure::Errno(Errno::IO), move |operation, _| {
        is_question_of_the_drain(operation) && unanswered.contains(&asked.asked.fetch_add(1, Ordering::SeqCst))
    }));
    let (unsynced, synced) = (terms.unsynced, wrong.clone());
    store.add(Rule::when(Failure::Errno(Errno::IO), move |operation, _| {
        operation == faulty::Operation::SyncDirs && synced.synced.fetch_add(1, Ordering::SeqCst) == unsynced
    }));
    let (holds, held) = (terms.holds, wrong.clone());
    store.add(Rule::when(Failure::Delay(HOLD), move |operation, path| {
        let publishes = holds && operation == faulty::Operation::Publish && !path.is_temporary();
        publishes && !held.held.swap(true, Ordering::SeqCst)
    }));
    let (unanswered, starting) = (terms.unanswered_at_start, wrong.clone());
    store.add(Rule::when(Failure::Errno(Errno::IO), move |operation, path| {
        use faulty::Operation::{Open, Stat};
        matches!(operation, Open | Stat)
            && starting.starting.load(Ordering::SeqCst)
            // (An agent cannot start without the root.)
            && !path.0.is_empty()
            && starting.asked_at_start.fetch_add(1, Ordering::SeqCst) == unanswered
    }));
    let burning = fuse.clone();
    store.add(Rule::when(Failure::Errno(Errno::IO), move |operation, _| operation.writes() && burning.step()));
    // (A dead agent does not overwrite a file.)
    let (at, most, breaking) = (config.store.clone(), terms.broken_off, wrong.clone());
    store.add(Rule::when(Failure::BreaksOff(Errno::NOSPC), move |operation, path| {
        let linked = || std::fs::symlink_metadata(at.join(path.to_string())).is_ok_and(|there| there.nlink() > 1);
        operation == faulty::Operation::Publish
            && !path.is_temporary()
            && linked()
            && breaking.broken_off.fetch_add(1, Ordering::SeqCst) < most
    }));
    let published = published.clone();
    // Never fails: this rule only records.
    store.add(Rule::when(Failure::Errno(Errno::IO), move |operation, path| {
        let name = path.to_string();
        if operation == faulty::Operation::Settle && name.contains("-spill-") {
            published.lock().unwrap().push("synced, spilled".into());
        }
        if operation == faulty::Operation::Publish && !name.contains(".surgetank-tmp-") {
            published.lock().unwrap().push(name);
        }
        false
    }));
    let store: Arc<dyn Store> = Arc::new(store);
    let tiers = Arc::new(Tiers::open(&config.tiers, KEY).unwrap());
    let catalog = FusedCatalog { inner: LogCatalog::open(&config.state.join("catalog")).unwrap(), fuse: fuse.clone() };
    wrong.starting.store(true, Ordering::SeqCst);
    let namespace = Namespace::open(config, store, tiers, Arc::new(catalog), KEY.into(), false).unwrap();
    wrong.starting.store(false, Ordering::SeqCst);
    Mounted::new(namespace, terms.direct, terms.forgets)
}
