//! Reference and namespace side by side, with the machine around them: a store, two tiers and a catalog. The drain may be
//! stopped, and the agent may die.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use surgetank_core::drain::Drain;
use surgetank_core::namespace::Namespace;
use surgetank_types::model::{Caller, FsyncTarget};

use super::door::Mounted;
use super::machine::{Fuse, Published, Wrong, open};
use surgetank_testkit::model::disk;
use surgetank_testkit::model::disk::Scratch;
use surgetank_testkit::model::operation::{Event, Operation, Renaming, Step};
use surgetank_testkit::model::reference;
use surgetank_testkit::model::reference::{Kind, Outcome, Reference};

/// The parameters of a run besides its steps.
#[derive(Debug, Clone)]
pub struct Terms {
    pub caps: [u64; 2],
    /// The kernel accepts plain files.
    pub direct: bool,
    /// The kernel forgets unopened inodes at once.
    pub forgets: bool,
    pub store_ttl: Duration,
    pub quiet: Duration,
    pub copy_up_bytes_max: u64,
    pub fsync: FsyncTarget,
    pub drain_at_start: bool,
    pub older_links: bool,
    /// All files stay on their tier until the end, and are drained then.
    pub keeps: bool,
    /// The store has no plain files, no links and no exchange.
    pub ranges_only: bool,
    /// Numbers of the drain's queries that the store does not answer (EIO), counted from the first.
    pub unanswered: [u64; 3],
    /// Number of the query that the store does not answer to a starting agent.
    pub unanswered_at_start: u64,
    /// Number of the sync of directories that fails.
    pub unsynced: u64,
    /// The first publication is delayed, and then happens even if the agent was killed.
    pub holds: bool,
    /// Number of versions whose write over a file in place is interrupted.
    pub broken_off: u64,
}

/// The store answers every query.
pub const ALL_ANSWERED: [u64; 3] = [u64::MAX; 3];

impl Terms {
    pub fn plain() -> Self {
        Self {
            caps: [256 << 10, 1 << 20],
            direct: false,
            forgets: false,
            store_ttl: Duration::ZERO,
            quiet: Duration::ZERO,
            copy_up_bytes_max: 64 << 10,
            fsync: FsyncTarget::Tier,
            drain_at_start: false,
            older_links: false,
            keeps: false,
            ranges_only: false,
            unanswered: ALL_ANSWERED,
            unanswered_at_start: u64::MAX,
            unsynced: u64::MAX,
            holds: false,
            broken_off: 0,
        }
    }
}

pub fn terms() -> impl Strategy<Value = Terms> {
    // Some tiers force files to move while they are written, some have room for direct writes. Some are so small that many files
    // are spilled into the store itself.
    let caps =
        prop_oneof![3 => Just([256 << 10, 1 << 20]), 1 => Just([4 << 30, 4 << 30]), 2 => Just([8 << 10, 16 << 10])];
    let ttl = prop::sample::select(vec![Duration::ZERO, Duration::from_secs(60)]);
    let quiet = prop::sample::select(vec![Duration::ZERO, Duration::from_millis(5)]);
    let copy_up = prop::sample::select(vec![64 << 10, 1 << 20]);
    let fsync = prop::sample::select(vec![FsyncTarget::Tier, FsyncTarget::Store]);
    let older_links = prop::bool::weighted(0.3);
    let unanswered = prop_oneof![2 => Just(ALL_ANSWERED), 1 => prop::array::uniform3(0..80_u64)];
    let at_start = prop_oneof![2 => Just(u64::MAX), 1 => 0..8_u64];
    let unsynced = prop_oneof![2 => Just(u64::MAX), 1 => 0..12_u64];
    let store = (older_links, unanswered, 0..3_u64, at_start, unsynced);
    (caps, any::<bool>(), any::<bool>(), ttl, quiet, copy_up, fsync, any::<bool>(), store).prop_map(
        |(caps, direct, forgets, store_ttl, quiet, copy_up_bytes_max, fsync, drain_at_start, store)| Terms {
            caps,
            direct,
            forgets,
            store_ttl,
            quiet,
            copy_up_bytes_max,
            fsync,
            drain_at_start,
            older_links: store.0,
            keeps: false,
            ranges_only: false,
            unanswered: store.1,
            broken_off: store.2,
            unanswered_at_start: store.3,
            unsynced: store.4,
            holds: false,
        },
    )
}

pub struct World {
    terms: Terms,
    pub base: Scratch,
    reference: Reference,
    /// `None` only while one agent follows another.
    mounted: Option<Mounted>,
    drain: Option<Arc<Drain>>,
    fuse: Arc<Fuse>,
    /// Inode number of each file at its first stat.
    inodes: HashMap<usize, u64>,
    /// Another agent has started: link counts of directories may be wrong.
    restarted: bool,
    hinted: bool,
    published: Published,
    wrong: Arc<Wrong>,
}

impl World {
    pub fn new(terms: &Terms) -> Self {
        let base = Scratch::new();
        let mut reference = Reference::new();
        disk::lay_out(&base.join("store"), &mut reference, terms.older_links);
        let fuse = Arc::new(Fuse::default());
        let (published, wrong): (Published, Arc<Wrong>) = Default::default();
        let mounted = Some(open(terms, &base, &fuse, &published, &wrong));
        let mut world = Self {
            terms: terms.clone(),
            base,
            reference,
            mounted,
            drain: None,
            fuse,
            inodes: HashMap::new(),
            restarted: false,
            hinted: false,
            published,
            wrong,
        };
        if terms.drain_at_start {
            world.start_drain();
        }
        world
    }

    pub fn namespace(&self) -> &Arc<Namespace> {
        &self.mounted.as_ref().unwrap().namespace
    }

    fn caller(&self) -> Caller {
        self.mounted.as_ref().unwrap().caller
    }

    fn mounted(&mut self) -> &mut Mounted {
        self.mounted.as_mut().unwrap()
    }

    fn start_drain(&mut self) {
        if self.drain.is_none() {
            self.drain = Some(Drain::start(self.namespace()).unwrap());
        }
    }

    fn stop_drain(&mut self) {
        if let Some(drain) = self.drain.take() {
            drain.stop();
        }
    }

    pub fn step(&mut self, step: &Step) -> Result<(), String> {
        match step {
            Step::Do(operation) => self.operate(operation),
            Step::Happens(event) => self.happen(event),
        }
    }

    fn operate(&mut self, operation: &Operation) -> Result<(), String> {
        match operation {
            // The kernel itself refuses this rename.
            Operation::Rename { from, to, .. } if self.reference.knots(from, to) => return Ok(()),
            Operation::Link { .. } | Operation::Rename { how: Renaming::Exchange, .. } if self.terms.ranges_only => {
                return Ok(());
            }
            // These operations wait for the drain.
            Operation::Fsync { .. }
            | Operation::FsyncDir { .. }
            | Operation::Rename { how: Renaming::Exchange, .. } => self.start_drain(),
            _ => {}
        }
        let mut want = self.reference.apply(operation);
        let (mut got, attr) = self.mounted().apply(operation);
        if let (Outcome::Seen(want), Outcome::Seen(got)) = (&mut want, &mut got)
            && want.mtime.is_none()
        {
            got.mtime = None;
        }
        if let (Outcome::Seen(want), Outcome::Seen(got)) = (&want, &mut got)
            && self.restarted
            && want.kind == Kind::Directory
        {
            got.links = want.links;
        }
        if want != got {
            return Err(format!("{got:?}, not {want:?}"));
        }
        if let Some(attr) = attr {
            let node = match operation {
                Operation::Stat { path } => self.reference.find(path).unwrap(),
                Operation::StatOpen { slot } => self.reference.handles[*slot].unwrap().node,
                _ => unreachable!(),
            };
            self.inodes.retain(|node, _| self.reference.nodes.contains_key(node));
            let ino = *self.inodes.entry(node).or_insert(attr.ino);
            if ino != attr.ino {
                return Err(format!("inode number {}, before {ino}", attr.ino));
            }
            if let Some((other, _)) = self.inodes.iter().find(|(other, ino)| **other != node && **ino == attr.ino) {
                return Err(format!("inode number {} is also that of another file ({other})", attr.ino));
            }
        }
        if let (Operation::Fsync { slot }, FsyncTarget::Store, Outcome::Fine) = (operation, self.terms.fsync, want) {
            self.must_be_stored(*slot)?;
        }
        Ok(())
    }

    /// After fsync the store has the written content, under one of the file's names or an earlier one (a sync of their
    /// directory makes names durable).
    fn must_be_stored(&self, slot: usize) -> Result<(), String> {
        let node = self.reference.handles[slot].unwrap().node;
        let paths = self.paths_of(node);
        let content = &self.reference.nodes[&node].content;
        // The walk repeats, because the drain may move the file past it.
        if paths.is_empty() || (0..5).any(|_| has_file(&self.base.join("store"), content)) {
            return Ok(());
        }
        Err(format!("synced, but the store does not have it: {paths:?}"))
    }

    fn paths_of(&self, node: usize) -> Vec<String> {
        fn walk(reference: &Reference, at: usize, path: &str, node: usize, found: &mut Vec<String>) {
            for (name, child) in &reference.nodes[&at].children {
                let path = below(path, name);
                if *child == node {
                    found.push(path.clone());
                }
                walk(reference, *child, &path, node, found);
            }
        }
        let mut found = Vec::new();
        walk(&self.reference, reference::ROOT, "", node, &mut found);
        found
    }

    fn happen(&mut self, event: &Event) -> Result<(), String> {
        match event {
            Event::Settle => {
                self.settle()?;
                self.compare()
            }
            Event::StopDrain => {
                self.stop_drain();
                Ok(())
            }
            Event::StartDrain => {
                self.start_drain();
                Ok(())
            }
            Event::Evict => {
                self.mounted().forget();
                for id in self.namespace().prefetch.files_below(b"").map_err(|why| why.to_string())? {
                    self.namespace().files.eviction.evict(id, "the model wants it").map_err(|why| why.to_string())?;
                }
                self.check_every_file()
            }
            Event::Prefetch => {
                self.mounted().forget();
                for id in self.namespace().prefetch.files_below(b"").map_err(|why| why.to_string())? {
                    self.namespace().prefetch.prefetch(id, &|| false).map_err(|why| why.to_string())?;
                }
                self.check_every_file()
            }
            Event::Forget => {
                self.mounted().forget();
                Ok(())
            }
            Event::Kill => {
                self.stop_drain();
                self.restart()
            }
            Event::Hint { path, mode, timing, attribute } => {
                self.hinted = true;
                self.hint(path, &[("mode", mode), ("timing", timing)], *attribute)
            }
            Event::BrokenOff => until(|| self.wrong.broken_off.load(Ordering::SeqCst) > 0),
            Event::Held => until(|| self.wrong.held.load(Ordering::SeqCst)),
            Event::KillDrain { steps } => {
                self.fuse.light(*steps);
                self.start_drain();
                // A file with the hint `last` waits for longer than this test.
                let timeout = if self.hinted { Duration::from_millis(100) } else { super::TIMEOUT };
                let until = Instant::now() + timeout;
                while !self.fuse.blown() && self.namespace().questions.busy(None) {
                    if Instant::now() > until && self.hinted {
                        break;
                    }
                    if Instant::now() > until {
                        return Err(self.hang());
                    }
                    super::pause();
                }
                self.stop_drain();
                self.restart()
            }
        }
    }

    fn restart(&mut self) -> Result<(), String> {
        // The old agent's locks must end before the new agent starts.
        let old = Arc::downgrade(self.namespace());
        self.mounted = None;
        if old.upgrade().is_some() {
            return Err("a thread still holds the namespace of the dead agent".into());
        }
        self.fuse = Arc::new(Fuse::default());
        self.mounted = Some(open(&self.terms, &self.base, &self.fuse, &self.published, &self.wrong));
        self.reference.close_all();
        self.restarted = true;
        self.check_every_file()?;
        if self.terms.drain_at_start {
            self.start_drain();
        }
        Ok(())
    }

    fn hang(&self) -> String {
        let namespace = self.namespace();
        format!(
            "the drain hangs: {:?}; {:?}; {:?}",
            namespace.questions.stuck(),
            namespace.questions.waiting(),
            namespace.questions.undurable(None)
        )
    }

    fn hint(&mut self, path: &str, hints: &[(&str, &str)], attribute: bool) -> Result<(), String> {
        let known = self.namespace().locations.find(path.as_bytes()).ok().filter(|_| attribute);
        let is_link = self.reference.find(path).is_ok_and(|node| self.reference.nodes[&node].kind == Kind::Symlink);
        if let (Some(id), false) = (known, is_link) {
            for (name, value) in hints {
                let name = format!("user.surgetank.hint.{name}");
                let set = self.namespace().xattrs.setxattr(&self.caller(), id, name.as_bytes(), value.as_bytes(), 0);
                set.map_err(|why| why.to_string())?;
                let got = self.namespace().xattrs.getxattr(id, name.as_bytes()).map_err(|why| why.to_string())?;
                if got != value.as_bytes() {
                    return Err(format!("{path}: {name} is {got:?}, not {value}"));
                }
            }
            return Ok(());
        }
        let hints = hints.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        match self.namespace().hints.hint(&[(path.as_bytes(), &hints)]).pop() {
            Some((_, why)) => Err(why),
            None => Ok(()),
        }
    }

    /// Requests all kept-back files in the store.
    fn want_all(&mut self) -> Result<(), String> {
        let mut paths = Vec::new();
        let mut todo = vec![(String::new(), reference::ROOT)];
        while let Some((path, node)) = todo.pop() {
            let children = &self.reference.nodes[&node].children;
            todo.extend(children.iter().map(|(name, child)| (below(&path, name), *child)));
            paths.push(path);
        }
        for path in paths {
            self.hint(&path, &[("mode", "copy"), ("timing", "soon")], false)?;
        }
        Ok(())
    }

    /// Waits until the drain has no work left.
    pub fn settle(&mut self) -> Result<(), String> {
        if self.hinted {
            self.want_all()?;
        }
        self.start_drain();
        let until = Instant::now() + super::TIMEOUT;
        while self.namespace().questions.busy(None) {
            if Instant::now() > until {
                return Err(self.hang());
            }
            super::pause();
        }
        Ok(())
    }

    /// Compares every name and every byte, as programs see them.
    fn check_every_file(&mut self) -> Result<(), String> {
        let mut todo = vec![String::new()];
        while let Some(path) = todo.pop() {
            self.operate(&Operation::Stat { path: path.clone() }).map_err(|why| format!("then {path}: {why}"))?;
            let id = self.reference.find(&path).unwrap();
            match self.reference.nodes[&id].kind {
                Kind::Directory => {
                    self.operate(&Operation::List { path: path.clone() })
                        .map_err(|why| format!("then listing {path}: {why}"))?;
                    let names = self.reference.nodes[&id].children.keys();
                    todo.extend(names.map(|name| below(&path, name)));
                }
                Kind::File => {
                    let want = self.reference.nodes[&id].content.clone();
                    let got = self
                        .mounted()
                        .content(&path)
                        .map_err(|errno| format!("then {path} cannot be read: {errno:?}"))?;
                    if want != got {
                        return Err(format!(
                            "then {path} holds {}, not {}",
                            reference::shown(&got),
                            reference::shown(&want)
                        ));
                    }
                }
                Kind::Symlink => {}
            }
        }
        Ok(())
    }

    /// Compares the store itself and the accounts of the tiers, while the queue is empty.
    fn compare(&mut self) -> Result<(), String> {
        let unsettled = self.reference.writers();
        let mut found = disk::differences(&self.base.join("store"), &self.reference, &unsettled);
        if self.reference.handles.iter().all(Option::is_none) {
            for device in self.namespace().base.tiers.devices() {
                let mut blocks = 0;
                let mut paths = BTreeMap::new();
                device
                    .walk(&mut |path: &[u8], plain| {
                        blocks += plain.blocks_bytes;
                        paths.insert(String::from_utf8_lossy(path).into_owned(), plain.size_bytes);
                    })
                    .map_err(|why| why.to_string())?;
                if blocks != device.used_bytes() {
                    found.push(format!(
                        "tier {}: {} bytes charged, {blocks} on it: {paths:?}",
                        device.tier_name(),
                        device.used_bytes()
                    ));
                }
                let strangers: Vec<&String> = paths.keys().filter(|path| self.reference.find(path).is_err()).collect();
                if !strangers.is_empty() {
                    found.push(format!("tier {}: has unknown files {strangers:?}", device.tier_name()));
                }
            }
        }
        found.extend(
            self.namespace().base.notes.troubles().iter().map(|noted| format!("noted: {}: {}", noted.path, noted.what)),
        );
        if found.is_empty() { Ok(()) } else { Err(found.join("; ")) }
    }

    /// As when `run` sees the end of its command.
    pub fn begin_final_drain(&self) {
        self.namespace().questions.begin_final_drain(Some(surgetank_types::model::RunId(0)));
    }

    pub fn published(&self) -> Vec<String> {
        self.published.lock().unwrap().clone()
    }

    pub fn finish(mut self) -> Result<(), String> {
        self.mounted().close_all();
        self.reference.close_all();
        self.check_every_file()?;
        self.namespace().questions.begin_final_drain(None);
        self.settle()?;
        self.check_every_file()?;
        self.compare()?;
        self.stop_drain();
        if !self.namespace().emptying.finish() {
            return Err("some files stay on the tiers".into());
        }
        for device in self.namespace().base.tiers.devices() {
            if device.used_bytes() != 0 {
                return Err(format!(
                    "tier {}: {} bytes charged without files",
                    device.tier_name(),
                    device.used_bytes()
                ));
            }
        }
        for tier in ["fast", "slow"] {
            let left: BTreeSet<_> =
                std::fs::read_dir(self.base.join(tier)).unwrap().map(|entry| entry.unwrap().path()).collect();
            if !left.is_empty() {
                return Err(format!("left on a tier: {left:?}"));
            }
        }
        self.compare()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.stop_drain();
    }
}

fn below(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}/{name}") }
}

fn until(is_so: impl Fn() -> bool) -> Result<(), String> {
    let end = Instant::now() + super::TIMEOUT;
    while !is_so() {
        if Instant::now() > end {
            return Err("the condition is still false at the timeout".into());
        }
        super::pause();
    }
    Ok(())
}

/// Whether a file below has exactly this content. A temporary does not count.
fn has_file(at: &std::path::Path, content: &[u8]) -> bool {
    std::fs::read_dir(at).is_ok_and(|entries| {
        entries.flatten().any(|entry| {
            let path = entry.path();
            let temporary = entry.file_name().to_string_lossy().starts_with(".surgetank-tmp-");
            let kind = entry.file_type().ok();
            !temporary
                && (kind.is_some_and(|kind| kind.is_dir()) && has_file(&path, content)
                    || kind.is_some_and(|kind| kind.is_file())
                        && std::fs::read(&path).is_ok_and(|bytes| bytes == content))
        })
    })
}
