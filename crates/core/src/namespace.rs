//! The namespace: the POSIX meaning of every operation, once, for every door.
//!
//! Names and attributes live in memory ([`Tree`](surgetank_state::Tree)). The catalog keeps them, and the drain brings them to the store
//! through the operation queue. Content is in plain files on tiers ([`content`](crate::content)). The store alone has files that no
//! process has touched.
//!
//! ARCHITECTURE.md, "Locks, in their order", has the order of the locks. The namespace does no store I/O under `tree`. It does a tier's
//! operations on names under `tree`, so that a path means one thing at a time.
//!
//! The danger that this avoids: two doors, or a door and the drain, disagree about what a name means.

pub mod attributes;
pub mod eager_publish;
pub mod earlier;
pub mod emptying;
pub mod grants;
pub mod hints;
pub mod homes;
pub mod listing;
pub mod locate;
pub mod locks;
pub mod moves;
pub mod names;
mod negative_cache;
pub mod order;
mod placing;
pub mod pooled;
pub mod prefetch;
pub mod questions;
mod recover;
mod refresh;
pub mod replicas;
pub mod resolve;
pub mod restore;
pub mod revalidation;
pub mod xattrs;

use attributes::FileAttributes;
use eager_publish::EagerPublish;
use earlier::EarlierContents;
use emptying::Emptying;
use grants::Grants;
use hints::FileHints;
use homes::Homes;
use listing::Listings;
use locate::Locations;
use locks::FileLocks;
use moves::Moves;
use names::Names;
use order::PoolOrder;
use pooled::Pooled;
use prefetch::Prefetch;
use questions::Questions;
use recover::Recovery;
use replicas::Replicas;
use resolve::Resolver;
use restore::Restore;
use revalidation::Revalidation;
use xattrs::ExtendedAttributes;

use surgetank_policy::config::Config;
use surgetank_policy::rule::Decision;
use surgetank_state::Inode;
use surgetank_store::{Cred, Store};
use surgetank_tier::Tiers;
use surgetank_types::error::{Error, Result};
use surgetank_types::model::FileId;
use surgetank_types::sync::Arc;

use crate::base::Base;
use crate::catalog::Catalog;
use crate::files::Files;
use crate::metadata::Metadata;
use crate::metadata::losses::Losses;

use crate::base::fence::Fence;
pub use crate::base::fence::{Membership, Past};
pub use crate::base::intake_file::IntakeFile;
pub use crate::base::notes::Noted;
pub use crate::base::queries::StoreQueries;
pub use crate::base::runs::{RunKnown, RunOf};
pub use crate::base::succession::{Keeper, Request, Survival};
pub use crate::base::waits::Waits;
pub use crate::base::{Counters, Door, Members, Owner, Publishes, StoreCopy, SyncedCopiesAt};
pub(crate) use crate::files::HIDDEN_PREFIX;
pub use crate::files::copies::Newest;
pub use crate::files::deadline::Outlook;
pub use crate::files::dispatcher::{Dispatcher, SEAL_TIMEOUT, STILL_WRITTEN};
pub use crate::files::prefetch::BroughtIn;
pub use crate::files::{Grant, LEFT_TO_THE_MOUNT, Opened, STORE_TO_BE_ASKED, Short};
pub use crate::metadata::index::{IndexEntry, Shim};
pub use attributes::SetAttr;
pub use eager_publish::Real;
pub use hints::Given;
pub use listing::Listed;
pub use locate::Whereabouts;
pub use questions::{Queued, Stuck, Undurable, Waiting, Where};
pub(crate) use recover::{ORPHANS, Worth, is_damage, went_down, went_down_with, worth};
pub use recover::{is_spent, keep_copy, unproven_name};
pub use resolve::{Found, NAME_TTL_MIN};
pub use xattrs::of_no_user;

/// The components that serve the doors, joined. Each is made of those before it.
pub struct Namespace {
    /// Parts that all components share.
    pub base: Base,
    /// Names and inodes, with their lock.
    pub metadata: Arc<Metadata>,
    /// Versions that are lost, until the user acknowledges them.
    pub losses: Arc<Losses>,
    /// The content of files.
    pub files: Arc<Files>,
    /// Look-ups of names.
    pub resolver: Arc<Resolver>,
    /// After a restart or a request: what the store has now.
    pub revalidation: Arc<Revalidation>,
    /// Attributes of files.
    pub attributes: Arc<FileAttributes>,
    /// Directories that processes read.
    pub listings: Arc<Listings>,
    /// Hints to files and directories.
    pub hints: Arc<FileHints>,
    /// Where files are.
    pub locations: Arc<Locations>,
    /// Answers for status, verdicts and commands that wait.
    pub questions: Arc<Questions>,
    /// Extended attributes.
    pub xattrs: Arc<ExtendedAttributes>,
    /// Operations on names.
    pub names: Arc<Names>,
    /// Contents that hints keep beside their files.
    pub earlier: Arc<EarlierContents>,
    /// Files that users or rules want on a tier ahead of use.
    pub prefetch: Arc<Prefetch>,
    /// The end of the last run.
    pub emptying: Arc<Emptying>,
    /// Files whose real path a process without the mount needs.
    pub eager: Arc<EagerPublish>,
    /// Locks that programs set on files.
    pub file_locks: Arc<FileLocks>,
    /// Open files of an agent that was killed.
    pub restore: Arc<Restore>,
    /// Plain files for doors without a mount.
    pub grants: Arc<Grants>,
    /// What the agent of a pool asks.
    pub pooled: Pooled,
    /// Content that is at another member of a pool than its name.
    pub homes: Homes,
    /// Files of which other members of a pool are to have copies.
    pub replicas: Replicas,
    /// Renames between members of a pool.
    pub moves: Moves,
    /// The order of its publications in a pool.
    pub order: PoolOrder,
}

impl Namespace {
    /// Loads the catalog, finds the files on the tiers and resumes the queue.
    pub fn open(
        config: Config,
        store: Arc<dyn Store>,
        tiers: Arc<Tiers>,
        catalog: Arc<dyn Catalog>,
        key: String,
        checks_permissions: bool,
    ) -> Result<Arc<Self>> {
        Self::open_after(config, store, tiers, catalog, key, checks_permissions, Survival::default())
    }

    /// The same with a handoff: this agent may continue after a killed one, and the next agent after this one.
    pub fn open_after(
        config: Config,
        store: Arc<dyn Store>,
        tiers: Arc<Tiers>,
        catalog: Arc<dyn Catalog>,
        key: String,
        checks_permissions: bool,
        survival: Survival,
    ) -> Result<Arc<Self>> {
        let who = Cred { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw() };
        let stat = store.stat(who, &surgetank_store::StorePath::root()).map_err(|why| {
            Error::new(format!("the store {} cannot be read", store.describe()))
                .why(why)
                .remedy("check that the directory exists and that you may enter it")
        })?;
        let mut root = Inode::new(stat.attr);
        root.identity = Some(stat.identity);
        root.owned = true;
        let keeper = survival.keeper.clone();
        let base = Base::new(config, store, tiers, catalog, key, checks_permissions, survival)?;
        let files = Arc::new(Files::new(&base, root));
        let resolver = Arc::new(Resolver::new(&base, &files));
        let revalidation = Arc::new(Revalidation::new(&base, &files, &resolver));
        let attributes = Arc::new(FileAttributes::new(&base, &files, &resolver));
        let listings = Arc::new(Listings::new(&base, &files));
        let hints = Arc::new(FileHints::new(&base, &files));
        let locations = Arc::new(Locations::new(&base, &files, &resolver));
        let questions = Arc::new(Questions::new(&base, &files, &hints, &locations));
        let xattrs = Arc::new(ExtendedAttributes::new(&base, &files, &hints, &questions));
        let names = Arc::new(Names::new(&base, &files, &attributes, &hints, &listings, &resolver));
        let earlier = EarlierContents::new(&base, &files, &attributes, &hints, &names, &resolver);
        let prefetch = Arc::new(Prefetch::new(&base, &files, &listings, &locations, &resolver));
        let emptying = Arc::new(Emptying::new(&base, &files, &hints, &revalidation));
        let eager = Arc::new(EagerPublish::new(&base, &files));
        let file_locks = Arc::new(FileLocks::new(&base, &files, keeper));
        let restore = Arc::new(Restore::new(&base, &files, &file_locks, &listings, &resolver));
        let grants = Arc::new(Grants::new(&base, &files, &names, &resolver));
        let pooled = Pooled::new(&base, &files);
        let homes = Homes::new(&base, &files);
        let replicas = Replicas::new(&base, &files);
        let moves = Moves::new(&base, &files, &names, &resolver);
        let order = PoolOrder::new(&base, &files);
        let namespace = Arc::new(Self {
            base,
            metadata: files.metadata.clone(),
            losses: files.losses.clone(),
            files,
            resolver,
            revalidation,
            attributes,
            listings,
            hints,
            locations,
            questions,
            xattrs,
            names,
            earlier,
            prefetch,
            emptying,
            eager,
            file_locks,
            restore,
            grants,
            pooled,
            homes,
            replicas,
            moves,
            order,
        });
        namespace.recovery().recover()?;
        namespace.restore.restore();
        namespace.revalidation.revalidate_with_store();
        Ok(namespace)
    }

    fn recovery(&self) -> Recovery<'_> {
        Recovery {
            base: &self.base,
            metadata: &self.metadata,
            losses: &self.losses,
            files: &self.files,
            hints: &self.hints,
            restore: &self.restore,
        }
    }

    /// The user says that tiers that are absent do not come back: their files count as lost.
    pub fn give_up_absent(&self) {
        self.recovery().give_up_absent();
    }

    /// A command ends: content at lost members of the pool does not come back, but for these files. Returns how many versions are
    /// lost, or may be in a moment.
    pub fn give_up_homes(&self, not: &[FileId]) -> usize {
        recover::give_up_homes(&self.recovery(), not)
    }

    /// The mount registers itself. Before this call, everything is mediated.
    pub fn set_door(&self, door: Arc<dyn Door>) {
        // A second door for the same mount would be a programming error; the first one stays.
        drop(self.base.door.set(door));
        self.restore.give_up_backings();
    }

    /// The agent is in a pool with others.
    pub fn set_members(&self, members: Arc<dyn Members>) {
        self.metadata.write_tree().order.keep();
        // (Set once.)
        drop(self.base.members.set(members));
    }

    /// An earlier agent was these members of pools, and has not ended that in order. With each is the first operation that was
    /// queued after it, if that is known. Returns the same with the present one. Nothing: all of theirs is in the store. Call
    /// it before the drain starts.
    pub fn was_member(&self, past: &[(Membership, Option<u64>)]) -> Vec<Past> {
        let (is_empty, next_seq) = {
            let tree = self.metadata.read_tree();
            (tree.ops.is_empty(), tree.next_seq)
        };
        if is_empty {
            Fence::forget(&*self.base.store, past);
            return Vec::new();
        }
        let past: Vec<Past> = past.iter().map(|(one, until)| (one.clone(), until.unwrap_or(next_seq))).collect();
        self.base.fence.was_member(past.clone());
        past
    }

    /// The rules' decision for a path, without hints.
    pub fn decide(&self, path: &[u8]) -> Decision {
        self.base.rules.decide(path)
    }

    /// The part of the names of temporaries in the store that identifies this agent.
    pub fn key(&self) -> &str {
        &self.base.key
    }
}
