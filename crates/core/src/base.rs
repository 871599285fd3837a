//! What every component of the core shares: the configuration, the store, the tiers, and small services that depend on none of
//! the components above.
//!
//! A component takes from [`Base`] what it needs, and the components below it. So its fields say what it depends on.

pub mod deferred;
pub mod end;
pub mod events;
pub mod fence;
pub mod intake_file;
pub mod notes;
pub mod queries;
pub mod runs;
pub mod succession;
pub mod users;
pub mod waits;

use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use deferred::DeferredSeals;
use end::End;
use events::Events;
use fence::{Fence, Membership};
use notes::Notes;
use queries::StoreQueries;
use runs::Runs;
use succession::{Succession, Survival};
use users::Permissions;
use waits::Waits;

use surgetank_policy::config::Config;
use surgetank_policy::hint::Acting;
use surgetank_policy::rule::RuleSet;
use surgetank_store::{Cred, Meta, Staged, Store, StorePath};
use surgetank_tier::Tiers;
use surgetank_types::clock;
use surgetank_types::error::Result;
use surgetank_types::model::{FileId, NodeId};
use surgetank_types::sync::atomic::AtomicU64;
use surgetank_types::sync::{Arc, OnceLock};

use crate::catalog::Catalog;

/// What the kernel's side of the mount can do for the namespace.
pub trait Door: Send + Sync {
    /// Does the kernel take plain files at all?
    fn passes_through(&self) -> bool;
    /// Registers a plain file as the backing of a file of the mount. Processes then read and write it natively.
    fn back(&self, file: BorrowedFd<'_>) -> std::io::Result<u32>;
    /// Ends the registration that [`Self::back`] returned.
    fn unback(&self, backing: u32);
    /// Makes the kernel drop the attributes that it caches, and the pages unless `attributes_only`. `false`: the kernel
    /// does not know the file.
    fn invalidate(&self, file: FileId, attributes_only: bool) -> bool;
    /// Makes the kernel drop what it caches about a name in a directory.
    fn invalidate_name(&self, dir: FileId, name: &[u8]);
    /// Returns when the mount has released (`Opener::release`) the files that processes closed until now, or when
    /// this takes too long.
    fn await_closes(&self);
    /// The same, and says whether it took no longer than this.
    fn closes_are_done(&self, _patience: Duration) -> bool {
        self.await_closes();
        true
    }
}

/// The other members of a pool, for the drain.
pub trait Members: Send + Sync {
    /// Has the member that has a file's content copy it to a temporary in the store, sync and compare it. Blocks as long as
    /// that takes, or until it `is_wanted` no more.
    fn stage(
        &self,
        home: NodeId,
        file: FileId,
        copy: &StoreCopy<'_>,
        is_wanted: &dyn Fn() -> bool,
    ) -> std::io::Result<Staged>;

    /// Up to this moment (Unix) the others have everything in the store, as far as they have said.
    fn are_published_until(&self) -> u64;

    /// The drain waits for news of that, and for closes at other members. Returns when there are some, or now and then.
    /// `needed_nanos`: the moment that it waits for. (0: it waits for closes only.)
    fn await_cut(&self, needed_nanos: u64);

    /// Can the others be asked? Otherwise nothing waits for them.
    fn keep_order(&self) -> bool;

    /// Who decides the names of a directory of the store. It waits for nothing.
    fn owner_of(&self, directory: &[u8]) -> Owner;

    /// May this member publish now? It waits for nothing.
    fn publishes(&self) -> Publishes;

    /// As which member. It waits for nothing.
    fn membership(&self) -> Membership;

    /// Is the content lost that this member has for the file? So it is if the member is lost, or if this agent was another member
    /// when the file was made. It waits for nothing.
    fn has_lost(&self, member: NodeId, file: FileId) -> bool;
}

/// May a member of a pool publish?
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Publishes {
    /// Its lease lasts: no other member takes its directories over.
    Freely,
    /// Its lease has ended, and may still be renewed.
    Later,
    /// Its membership has ended: not in a directory that was taken over from it.
    UnlessTaken(Membership),
}

/// Who decides the names of a directory of the store, in a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// This member.
    Us,
    /// No member.
    TheStore,
    /// Another member, or one that may be becoming the owner.
    Another,
}

/// A copy to be made in the store.
#[derive(Debug)]
pub struct StoreCopy<'a> {
    /// As which user.
    pub who: Cred,
    /// The temporary.
    pub path: &'a StorePath,
    /// What it will be called.
    pub bound: &'a StorePath,
    /// All but the bytes.
    pub meta: &'a Meta,
    /// Its hints that are asked at operations.
    pub acting: &'a Acting,
    /// Grows with each try. (A request that comes twice is one try.)
    pub attempt: u64,
}

/// Counts since the agent started, for summary and metrics.
#[derive(Debug, Default)]
pub struct Counters {
    /// Opens after which the kernel reads and writes the plain file itself.
    pub direct_opens: AtomicU64,
    /// Opens after which every read and write comes to the agent.
    pub mediated_opens: AtomicU64,
    /// Bytes that mediated reads returned.
    pub read_bytes: AtomicU64,
    /// Bytes that mediated writes passed to the agent.
    pub written_bytes: AtomicU64,
    /// Attributes of names that were requested from the store.
    pub store_stats: AtomicU64,
    /// Directories that were listed in the store.
    pub store_lists: AtomicU64,
}

/// The place of the copies that `fsync` makes of files in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SyncedCopiesAt {
    /// The directory, which exists.
    pub dir: PathBuf,
    /// The directory survives what the store survives. Otherwise it only has copies of an earlier agent, and `fsync` publishes.
    pub may_make: bool,
}

/// What every component shares.
#[derive(Clone)]
pub struct Base {
    pub config: Arc<Config>,
    pub rules: Arc<RuleSet>,
    pub store: Arc<dyn Store>,
    pub tiers: Arc<Tiers>,
    pub catalog: Arc<dyn Catalog>,
    /// The part of the names of temporaries in the store that identifies this agent.
    pub key: Arc<str>,
    /// Copies of what `fsync` syncs of files in memory.
    pub synced_copies: Option<SyncedCopiesAt>,
    pub queries: Arc<StoreQueries>,
    pub waits: Arc<Waits>,
    pub succession: Arc<Succession>,
    /// The kernel's side of the mount, from when it registers itself.
    pub door: Arc<OnceLock<Arc<dyn Door>>>,
    /// The other members, if this agent is in a pool.
    pub members: Arc<OnceLock<Arc<dyn Members>>>,
    pub counters: Arc<Counters>,
    pub events: Arc<Events>,
    pub(crate) end: Arc<End>,
    pub notes: Arc<Notes>,
    pub runs: Arc<Runs>,
    pub(crate) fence: Arc<Fence>,
    pub(crate) permissions: Arc<Permissions>,
    pub(crate) deferred: Arc<DeferredSeals>,
    pub(crate) started: Instant,
}

impl Base {
    /// Errors: the rules of the configuration contradict each other.
    pub fn new(
        config: Config,
        store: Arc<dyn Store>,
        tiers: Arc<Tiers>,
        catalog: Arc<dyn Catalog>,
        key: String,
        checks_permissions: bool,
        survival: Survival,
    ) -> Result<Self> {
        let waits = Arc::new(Waits::default());
        let synced_copies = survival.synced_copies.clone();
        let succession = Arc::new(Succession::new(survival));
        let events = Arc::new(Events::default());
        let end = Arc::new(End::default());
        Ok(Self {
            rules: Arc::new(RuleSet::new(&config.rules)?),
            queries: Arc::new(StoreQueries::new(store.clone(), config.retry, config.store_ttl, waits.clone())),
            config: Arc::new(config),
            store,
            tiers,
            catalog,
            key: key.into(),
            synced_copies,
            waits,
            door: Arc::default(),
            members: Arc::default(),
            counters: Arc::default(),
            notes: Arc::new(Notes::new(events.clone(), succession.clone())),
            runs: Arc::new(Runs::new(end.clone())),
            fence: Arc::default(),
            permissions: Arc::new(Permissions::new(checks_permissions)),
            deferred: Arc::default(),
            succession,
            events,
            end,
            started: clock::tick(),
        })
    }
}
