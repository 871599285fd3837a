//! Answers to questions of users and programs: where a file is, whether it is durable, and which files are not.
//!
//! The danger that this avoids: a verdict that reports everything as durable because the queue misses a file.

use std::time::{Duration, Instant};

use foldhash::HashMap;

use surgetank_policy::config::Config;
use surgetank_policy::rule::RuleSet;
use surgetank_state::{Inode, Op, PlainId, Progress, State, Tree};
use surgetank_store::Store;
use surgetank_tier::Tiers;
use surgetank_types::model::{DeviceId, FileId, Kind, Mode, OpKind, RunId, Seq};
use surgetank_types::sync::{Arc, Mutex, PoisonError};

use crate::base::Base;
use crate::base::deferred::DeferredSeals;
use crate::base::queries::StoreQueries;
use crate::base::runs::Runs;
use crate::base::users::is_drained;
use crate::files::Files;
use crate::files::copies::Copies;
use crate::files::evict::Eviction;
use crate::files::open_files::OpenFiles;
use crate::metadata::Metadata;
use crate::namespace::hints::FileHints;
use crate::namespace::locate::Locations;
use crate::report::Scope;

/// The place of a file and the reason for it (`surgetank why`, the `user.surgetank.*` attributes).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Where {
    /// Path below the served directory.
    pub path: Vec<u8>,
    /// Kind of the file.
    pub kind: Kind,
    /// Size in bytes.
    pub size_bytes: u64,
    /// State of the newest version.
    pub state: State,
    /// `ram:/dev/shm/…/file`, `store:file:///…/file`, `member 2 of the pool`.
    pub places: Vec<String>,
    /// The other member of the pool that has its content.
    pub home: Option<u32>,
    /// Name of the tier, or `store`.
    pub tier: String,
    /// The mode that applies: whether and how the file reaches the store.
    pub mode: Mode,
    /// The rule or hint that decided the mode, in words.
    pub rule: String,
    /// Every hint of the file, and whether a rule overrides it.
    pub hints: Vec<String>,
    /// Placement's reason.
    pub placed: String,
    /// Number of the newest version.
    pub version: u32,
    /// Number of the version that the store has.
    pub durable_version: u32,
    /// CRC-64/NVME of the version that the store has; `None`: unknown.
    pub checksum: Option<u64>,
    /// The file stays on its tier, because a user or a hint wants that.
    pub pinned: bool,
    /// Why its newest version is not in the store yet.
    pub pending: Option<Pending>,
    /// Tier and plain file.
    pub replica: Option<(String, Vec<u8>)>,
    /// Path below the store's root; empty while the store does not have the file.
    pub store_path: Vec<u8>,
}

/// A version on its way to the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pending {
    /// What it waits for, or the error.
    pub why: String,
    /// Time since the first failure; without one, since it was queued.
    pub since: Duration,
}

impl Pending {
    fn of(op: &Op) -> Self {
        let since = op.first_failure.unwrap_or(op.queued).elapsed();
        let why = match &op.error {
            Some(trouble) => trouble.text.clone(),
            None if op.is_last() => "its timing is `last`: it is drained when the command has ended".to_owned(),
            None => "queued for the store".to_owned(),
        };
        Self { why, since }
    }
}

/// The operation at which the drain stops.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stuck {
    /// Path below the served directory.
    pub path: Vec<u8>,
    /// The layer that failed: the store, or a tier.
    pub place: String,
    /// The error, in words.
    pub text: String,
    /// Time since the first failure.
    pub since: Duration,
    /// The final drain does not wait for it any more.
    pub lasting: bool,
}

/// The operations that wait for the store.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Waiting {
    /// Files whose content waits.
    pub files: u64,
    /// Their bytes, without holes.
    pub bytes: u64,
    /// Operations on names or attributes.
    pub operations: u64,
    /// The first file in the queue, and how long it has waited.
    pub oldest: Option<(Vec<u8>, Duration)>,
}

/// A file or operation that should be in the store and is not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Undurable {
    /// Path below the served directory.
    pub path: Vec<u8>,
    /// The operation or error for which it waits, in words.
    pub why: String,
    /// Id of the file.
    pub file: FileId,
    /// Size of the content in bytes; 0 for an operation on names or attributes.
    pub bytes: u64,
    /// A file's content; otherwise an operation on names or attributes.
    pub is_content: bool,
    /// The operation in words; empty for content that is not queued.
    pub operation: String,
}

/// The queue in figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Queued {
    /// Files whose content waits.
    pub files: u64,
    /// Written bytes, without holes.
    pub bytes: u64,
    /// Those of `bytes` that the store has in an incomplete or unpublished copy.
    pub copied_bytes: u64,
    /// Operations on names or attributes.
    pub operations: u64,
}

/// Answers for status, verdicts and commands that wait.
pub struct Questions {
    config: Arc<Config>,
    queries: Arc<StoreQueries>,
    rules: Arc<RuleSet>,
    started: Instant,
    store: Arc<dyn Store>,
    tiers: Arc<Tiers>,
    copies: Arc<Copies>,
    deferred: Arc<DeferredSeals>,
    eviction: Arc<Eviction>,
    hints: Arc<FileHints>,
    metadata: Arc<Metadata>,
    open_files: Arc<OpenFiles>,
    locations: Arc<Locations>,
    runs: Arc<Runs>,
    /// Since when a command waits for all of its run, or of everything, to be drained.
    waited_for: Mutex<HashMap<Option<RunId>, Instant>>,
}

impl Questions {
    pub(crate) fn new(base: &Base, files: &Files, hints: &Arc<FileHints>, locations: &Arc<Locations>) -> Self {
        Self {
            config: base.config.clone(),
            queries: base.queries.clone(),
            rules: base.rules.clone(),
            started: base.started,
            store: base.store.clone(),
            tiers: base.tiers.clone(),
            deferred: base.deferred.clone(),
            runs: base.runs.clone(),
            copies: files.copies.clone(),
            eviction: files.eviction.clone(),
            hints: hints.clone(),
            metadata: files.metadata.clone(),
            open_files: files.open_files.clone(),
            locations: locations.clone(),
            waited_for: Mutex::default(),
        }
    }

    /// The place of a file and the reason for it; `None`: the file is unknown or has no name.
    pub fn where_is(&self, id: FileId) -> Option<Where> {
        let tree = self.metadata.read_tree();
        let inode = tree.get(id)?;
        let path = tree.logical_path(id)?;
        let decision = self.metadata.decided(&tree, id, &path);
        let mode = self.metadata.mode_as(&tree, id, decision.mode);
        let hints = self.hints.hints_in_words(&tree, id, &decision);
        let mut rule = self.rules.why(decision.reason);
        if decision.reason.is_hint()
            && let Some(hint) = hints.iter().find(|hint| hint.starts_with("mode=") || hint.starts_with("Replication="))
        {
            rule = format!("hint {hint}");
        }
        if mode != decision.mode {
            rule.push_str(if inode.attr.kind == Kind::File {
                ", but the store has a file of this name already: it is not a temporary"
            } else {
                ", but links and special files are made in the store, like directories"
            });
        }
        let mut places = Vec::new();
        let replica = self.locations.copy_of(inode, &path);
        let mut tier = String::from("store");
        if let Some(PlainId { device, .. }) = inode.replica {
            tier = self.tiers.device(device).tier_name().to_owned();
        }
        if let Some((tier, file)) = &replica {
            places.push(format!("{tier}:{}", String::from_utf8_lossy(file)));
        } else if let Some(home) = inode.home() {
            places.push(format!("member {} of the pool", home.0));
        }
        if let Some((dir, name)) = inode.spill() {
            let at = tree.applied_path(*dir)?.join(name);
            places.push(format!("store:{}/{at}", self.store.describe()));
        }
        if let Some(applied) = tree.applied_path(id)
            && (!inode.dirty() || places.is_empty())
        {
            places.push(format!("store:{}/{applied}", self.store.describe()));
        }
        let pending = inode.publish.and_then(|seq| tree.ops.get(&seq)).map(|op| Pending::of(op));
        Some(Where {
            kind: inode.attr.kind,
            size_bytes: self.open_files.attr_of(id, inode).size_bytes,
            state: self.locations.state_of(&tree, id)?,
            places,
            home: inode.home().map(|home| u32::from(home.0)),
            tier,
            mode,
            rule,
            hints,
            placed: inode.placed.as_deref().unwrap_or_default().to_owned(),
            version: inode.version,
            durable_version: inode.durable,
            checksum: inode.checksum(),
            pinned: self.eviction.pinned(&tree, id),
            pending,
            replica,
            store_path: tree.applied_path(id).map(|path| path.0).unwrap_or_default(),
            path,
        })
    }

    /// The amount of queued work, for callers that poll while the drain carries it out: so no text is made under the
    /// tree's lock. `copied`: the bytes of an operation's file that are copied so far, while the copy runs.
    pub fn queued(&self, scope: &Scope, copied: &dyn Fn(Seq) -> u64) -> Queued {
        let tree = self.metadata.read_tree();
        let mut queued = Queued::default();
        for (seq, op) in &tree.ops {
            let mine = scope.run.is_none_or(|run| run.has(op.run));
            if !mine || !(scope.paths.is_empty() || scope.covers(&op.path(&tree))) {
                continue;
            }
            if matches!(op.kind, OpKind::Publish { .. }) {
                queued.files += 1;
                let bytes = tree.get(op.file()).map_or(0, |inode| inode.attr.data_bytes());
                queued.bytes += bytes;
                queued.copied_bytes += match op.progress {
                    Progress::Waiting => 0,
                    Progress::Staging => copied(*seq).min(bytes),
                    Progress::Staged { .. } | Progress::Committing => bytes,
                };
            } else {
                queued.operations += 1;
            }
        }
        queued
    }

    /// Files and operations that should be in the store and are not, of one run or of all. Files that are still open count.
    pub fn undurable(&self, run: Option<RunId>) -> Vec<Undurable> {
        let tree = self.metadata.read_tree();
        let mut list = Vec::new();
        let mut behind: Option<String> = None;
        for op in tree.ops.values() {
            let mine = run.is_none_or(|run| run.has(op.run));
            if mine {
                let id = op.file();
                let bytes = match &op.kind {
                    OpKind::Publish { .. } => tree.get(id).map_or(0, |inode| inode.attr.size_bytes),
                    _ => 0,
                };
                let why = match (&op.error, &behind) {
                    (Some(trouble), _) => trouble.text.clone(),
                    (None, Some(first)) => format!("waits for its turn behind {first}"),
                    (None, None) if self.queries.silent_for().is_some() => self.queries.silence(),
                    (None, None) => String::from("not yet drained"),
                };
                list.push(Undurable {
                    path: op.path(&tree),
                    why,
                    file: id,
                    bytes,
                    is_content: matches!(op.kind, OpKind::Publish { .. }),
                    operation: op.in_words(&tree),
                });
            }
            if behind.is_none() && op.error.as_ref().is_some_and(|trouble| trouble.lasting) && self.config.ordered {
                behind = Some(String::from_utf8_lossy(&op.path(&tree)).into_owned());
            }
        }
        for (id, path) in self.forgotten(&tree, run) {
            list.push(Undurable {
                why: String::from(
                    "it is not in the store and nothing is queued: a fault of surgetank, please report it",
                ),
                file: id,
                bytes: tree.get(id).map_or(0, |inode| inode.attr.size_bytes),
                is_content: true,
                operation: String::new(),
                path,
            });
        }
        for (id, inode) in tree.iter() {
            // Files that an earlier run left count for every run.
            let others = |inode: &Inode| {
                run.is_some_and(|run| inode.run != run)
                    && (inode.handles > 0 || self.copies.absence(&tree, id).is_none())
            };
            if inode.sealed || inode.logical.is_none() || others(inode) {
                continue;
            }
            let path = tree.logical_path(id).unwrap_or_default();
            if is_drained(self.metadata.mode_for(&tree, id, &path)) {
                list.push(Undurable {
                    why: self
                        .copies
                        .absence(&tree, id)
                        .map_or_else(|| "still open for writing".into(), |absent| absent.text),
                    file: id,
                    bytes: self.open_files.attr_of(id, inode).size_bytes,
                    is_content: true,
                    operation: String::new(),
                    path,
                });
            }
        }
        list
    }

    /// A check of the queue itself: files that should be in the store, are not, and have no queued operation. There
    /// should be none. If a fault of Surgetank makes one, the verdict must report it.
    fn forgotten(&self, tree: &Tree, run: Option<RunId>) -> Vec<(FileId, Vec<u8>)> {
        tree.iter()
            .filter(|(_, inode)| {
                inode.attr.kind == Kind::File
                    && inode.sealed
                    && inode.publish.is_none()
                    && inode.logical.is_some()
                    && (inode.dirty() || inode.applied.is_none())
            })
            .filter(|(_, inode)| run.is_none_or(|run| run.has(inode.run)))
            .filter_map(|(id, _)| Some((id, tree.logical_path(id)?)))
            .filter(|(id, path)| is_drained(self.metadata.mode_for(tree, *id, path)))
            .collect()
    }

    /// Queues the files that the queue misses.
    fn remember_forgotten(&self, run: Option<RunId>) {
        let mut tree = self.metadata.write_tree();
        for (id, path) in self.forgotten(&tree, run) {
            tracing::error!(path = %String::from_utf8_lossy(&path), "was neither in the store nor queued");
            if let Some(inode) = tree.get_mut(id)
                && !inode.dirty()
            {
                inode.version += 1;
            }
            tree.txn.file(id);
            self.metadata.queue_publish(&mut tree, id);
        }
    }

    /// Paths of files that are open for writing, by one run or by all. `None`: the file has no name any more.
    pub fn unsealed(&self, run: Option<RunId>) -> Vec<Option<Vec<u8>>> {
        let tree = self.metadata.read_tree();
        tree.iter()
            .filter(|(_, inode)| !inode.sealed && run.is_none_or(|run| inode.run == run))
            .map(|(id, _)| tree.logical_path(id))
            .collect()
    }

    /// The first operation that failed, if the drain stands still because of it.
    pub fn stuck(&self) -> Option<Stuck> {
        let tree = self.metadata.read_tree();
        tree.ops.values().find_map(|op| {
            let trouble = op.error.as_ref()?;
            Some(Stuck {
                path: op.path(&tree),
                place: trouble.place.clone(),
                text: trouble.text.clone(),
                since: op.first_failure.map(|at| at.elapsed()).unwrap_or_default(),
                lasting: trouble.lasting,
            })
        })
    }

    /// How long the oldest change waits for the store, in milliseconds. 0: the store has all; `u64::MAX`: not known, since
    /// changes from before `begun`, of an earlier agent, wait.
    pub fn oldest_age_ms(&self, begun: Instant) -> u64 {
        let tree = self.metadata.read_tree();
        let Some(oldest) = tree.ops.values().map(|op| op.queued).min() else { return 0 };
        if oldest <= begun {
            return u64::MAX;
        }
        u64::try_from(oldest.elapsed().as_millis()).unwrap_or(u64::MAX - 1) + 1
    }

    /// The operations that wait for the store now.
    pub fn waiting(&self) -> Waiting {
        let tree = self.metadata.read_tree();
        let mut waiting = Waiting::default();
        for op in tree.ops.values() {
            if let (OpKind::Publish { file, .. }, Some(inode)) = (&op.kind, tree.get(op.file()))
                && inode.attr.kind == Kind::File
            {
                waiting.files += 1;
                waiting.bytes += inode.attr.data_bytes();
                if waiting.oldest.is_none()
                    && let Some(path) = tree.logical_path(*file)
                {
                    waiting.oldest = Some((path, op.queued.elapsed()));
                }
            } else {
                waiting.operations += 1;
            }
        }
        waiting
    }

    /// The number of files on each device.
    pub fn files_on_devices(&self) -> foldhash::HashMap<DeviceId, u64> {
        self.metadata.read_tree().files_on_devices()
    }

    /// No seal is deferred.
    pub fn no_deferred(&self) -> bool {
        self.deferred.deferred_files().is_empty()
    }

    /// Waits until the queue changes, for `at_most`.
    pub fn wait_change(&self, at_most: Duration) {
        let tree = self.metadata.read_tree();
        drop(self.metadata.wait_changed(tree, at_most));
    }

    /// Drains the `keep` files of a run after all (`--keep-at-exit=drain`).
    pub fn drain_kept(&self, run: Option<RunId>) {
        let kept = self.metadata.kept(run, Mode::Keep);
        let mut tree = self.metadata.write_tree();
        for (id, ..) in kept {
            let Some(inode) = tree.get(id) else { continue };
            let Some((dir, name)) = inode.logical.clone() else {
                continue;
            };
            let run = inode.run;
            let over = tree.planned(dir, &name);
            let kind = OpKind::Publish { file: id, dir, name: Box::from(&*name), over };
            let seq = self.metadata.queue(&mut tree, kind, run, false, 0);
            if let Some(inode) = tree.get_mut(id) {
                inode.publish = Some(seq);
            }
        }
        drop(tree);
        self.metadata.wake();
    }

    /// Keeps a file on its tier, or ends that.
    pub fn pin(&self, id: FileId, on: bool) {
        let mut tree = self.metadata.write_tree();
        tree.own(id);
        if let Some(inode) = tree.get_mut(id) {
            inode.pinned = on;
        }
    }

    /// How long a command has waited for it to be drained.
    pub(crate) fn ending_for(&self, run: Option<RunId>) -> Duration {
        let waited_for = self.waited_for.lock().unwrap_or_else(PoisonError::into_inner);
        waited_for.get(&run).map_or_else(|| self.started.elapsed(), std::time::Instant::elapsed)
    }

    /// Begins the final drain of a run, or of everything: queued files do not rest any longer. With `None` this includes
    /// files that are written from now on, until `end_final_drain`.
    pub fn begin_final_drain(&self, run: Option<RunId>) {
        if let Some(run) = run {
            self.runs.ending.lock().unwrap_or_else(PoisonError::into_inner).insert(run);
        }
        let mut waited_for = self.waited_for.lock().unwrap_or_else(PoisonError::into_inner);
        waited_for.insert(run, surgetank_types::clock::tick());
        drop(waited_for);
        self.remember_forgotten(run);
        {
            let mut tree = self.metadata.write_tree();
            tree.drain_queue().begin_final_drain(run, surgetank_types::clock::tick());
            if run.is_none() {
                self.runs.final_drains.fetch_add(1, surgetank_types::sync::atomic::Ordering::Relaxed);
            }
        }
        self.metadata.wake();
    }

    /// One caller of `begin_final_drain(None)` has stopped waiting.
    pub fn end_final_drain(&self) {
        self.runs.final_drains.fetch_sub(1, surgetank_types::sync::atomic::Ordering::Relaxed);
    }

    /// Is any operation queued, or any file not yet sealed, of one run or of all?
    pub fn busy(&self, run: Option<RunId>) -> bool {
        let tree = self.metadata.read_tree();
        tree.ops.values().any(|op| run.is_none_or(|run| run.has(op.run)))
            || !tree.staging.is_empty()
            || !tree.discards.is_empty()
            || !self.deferred.deferred_files().is_empty()
    }
}
