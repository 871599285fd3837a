//! Hints ([`surgetank_policy::hint`]) of files, of directories for files that are made in them, and of names without a file.
//!
//! - A file's own hints follow the file.
//! - A directory's hints hold for files that are made below it from then on, wherever the directory moves. So each hint
//!   is kept with the number that the next file had. A file that leaves the directory leaves its hints.
//! - Every file that gets a hinted name (`surgetank hint`) takes its hints. They stay for the next file, because a
//!   repeated task removes its files.
//!
//! The catalog keeps hints beside the files. The store never gets them. The danger that this avoids: a hint that
//! applies to files that it was not given for.

use std::collections::{BTreeMap, BTreeSet};

use surgetank_policy::hint::{ATTRIBUTE_PREFIX, Advice, Hints};
use surgetank_policy::rule::Decision;
use surgetank_state::{HintHistory, Tree, parent};
use surgetank_tier::Tiers;
use surgetank_types::error::{Errno, Fault, FsResult};
use surgetank_types::model::{FileId, Hinted, Image, Mode, Seq};
use surgetank_types::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::base::Base;
use crate::base::runs::Runs;
use crate::base::users::is_drained;
use crate::files::Files;
use crate::files::evict::Eviction;
use crate::metadata::{Metadata, closed};
use crate::namespace::xattrs::{CREATE, REPLACE};

/// Names of one request are taken in steps of this size, so that other requests can run between them.
const NAMES_AT_ONCE: usize = 256;

/// So many unknown names are warned of.
const WARNED_MAX: usize = 256;

/// The remaining work for a file whose hints changed, to be done without a lock.
#[derive(Default)]
struct Then {
    leaves: Vec<FileId>,
    wanted: Vec<Vec<u8>>,
}

/// One path and its hints, as given.
pub type Given<'a> = (&'a [u8], &'a BTreeMap<String, String>);

/// Hints to files and directories.
pub struct FileHints {
    tiers: Arc<Tiers>,
    eviction: Arc<Eviction>,
    metadata: Arc<Metadata>,
    runs: Arc<Runs>,
    prefetcher: OnceLock<Box<dyn Fn(Vec<u8>) + Send + Sync>>,
    /// Hints that are not known: each is warned of once.
    warned: Mutex<BTreeSet<String>>,
}

impl FileHints {
    pub(crate) fn new(base: &Base, files: &Files) -> Self {
        Self {
            tiers: base.tiers.clone(),
            runs: base.runs.clone(),
            eviction: files.eviction.clone(),
            metadata: files.metadata.clone(),
            prefetcher: OnceLock::new(),
            warned: Mutex::default(),
        }
    }

    /// Sets the function that is called with each path that a hint wants prefetched.
    pub fn set_prefetcher(&self, wanted: Box<dyn Fn(Vec<u8>) + Send + Sync>) {
        drop(self.prefetcher.set(wanted));
        let tree = self.metadata.read_tree();
        let asks = tree.hints.names.iter().filter(|(_, hints)| hints.advice().prefetch == Some(true));
        let paths: Vec<Vec<u8>> = asks.map(|(path, _)| path.to_vec()).collect();
        drop(tree);
        self.want(paths);
    }

    fn want(&self, paths: Vec<Vec<u8>>) {
        if let Some(wanted) = self.prefetcher.get() {
            paths.into_iter().for_each(wanted);
        }
    }

    /// Every hint of a file in words, the nearest first, and whether it has effect.
    pub(crate) fn hints_in_words(&self, tree: &Tree, id: FileId, decision: &Decision) -> Vec<String> {
        let mut lines = Vec::new();
        let mut nearer = Advice::default();
        let decided = decision.as_advice();
        tree.each_hint(id, |dir, hints| {
            let of = dir.map_or_else(
                || if tree.dir(id).is_some() { "of the directory itself" } else { "of the file" }.to_owned(),
                |dir| match tree.logical_path(dir) {
                    Some(path) if !path.is_empty() => format!("of the directory {}", String::from_utf8_lossy(&path)),
                    _ => "of the directory that is served".to_owned(),
                },
            );
            for (name, value) in hints.texts() {
                let fate = self.fate(hints, name, &nearer, &decided);
                lines.push(format!("{name}={value} {of}{fate}"));
            }
            nearer.or(hints.advice());
        });
        lines
    }

    /// What becomes of a hint: nothing to say if it holds. `nearer`: hints that are stronger.
    fn fate(&self, hints: &Hints, name: &str, nearer: &Advice, decided: &Advice) -> &'static str {
        let Some(own) = hints.advice_of(name) else { return "; not known here, without effect" };
        if own.is_empty() {
            return "; without effect";
        }
        if own.needs_a_pool() && self.metadata.pool.get().is_none() {
            return "; without effect on one node";
        }
        match hints.advice().agrees_with(decided, &own) {
            true => "",
            false if own.shares_with(nearer) => "; a nearer hint says otherwise",
            false => "; a rule decides otherwise",
        }
    }

    // ---- as attributes

    /// The hint for the attribute `name`; the outer `None`: the attribute is not a hint.
    pub(crate) fn hint_attribute(&self, id: FileId, name: &[u8]) -> Option<FsResult<Vec<u8>>> {
        let name = name.strip_prefix(ATTRIBUTE_PREFIX)?;
        let tree = self.metadata.read_tree();
        let name = std::str::from_utf8(name).ok();
        let value = name.zip(tree.hints_of(id)).and_then(|(name, hints)| hints.value(name));
        Some(value.map(|value| value.as_bytes().to_vec()).ok_or_else(|| Errno::NODATA.into()))
    }

    /// The caller has checked the permission.
    pub(crate) fn set_hint(&self, id: FileId, name: &[u8], value: &[u8], flags: i32) -> FsResult<()> {
        let known = self.understood(name, value).map_err(|why| self.refuse_hint(id, &why))?;
        self.change_hint(id, |hints| {
            if let Some(why) = hints.and_then(|hints| hints.has_room_for(&known).err()) {
                return Err(Fault::new(Errno::NOSPC, why));
            }
            let there = hints.is_some_and(|hints| known.texts().all(|(name, _)| has(hints, name)));
            match () {
                () if flags & CREATE != 0 && there => Err(Errno::EXIST.into()),
                () if flags & REPLACE != 0 && !there => Err(Errno::NODATA.into()),
                () => Ok(Box::new(move |hints: &mut Hints| hints.update(&known))),
            }
        })
    }

    pub(crate) fn remove_hint(&self, id: FileId, name: &[u8]) -> FsResult<()> {
        let name = std::str::from_utf8(name).map_err(|_| Errno::NODATA)?.to_owned();
        self.change_hint(id, |hints| {
            if hints.is_none_or(|hints| hints.value(&name).is_none()) {
                return Err(Errno::NODATA.into());
            }
            Ok(Box::new(move |hints: &mut Hints| {
                hints.take_back(&name);
            }))
        })
    }

    /// Changes the hints of a file, and of its name if that has hints. The next file of that name must not get a hint
    /// that this one lost.
    fn change_hint(&self, id: FileId, look: impl FnOnce(Option<&Hints>) -> FsResult<Change>) -> FsResult<()> {
        let mut tree = self.metadata.write_tree();
        let change = look(tree.hints_of(id).map(AsRef::as_ref))?;
        self.metadata.recall_delegations_below(&mut tree, id);
        tree.own(id);
        tree.change_hints(id, &change);
        tree.txn.hints(Hinted::File(id));
        if let Some(path) = tree.logical_path(id)
            && let Some(given) = tree.hints.names.get_mut(path.as_slice())
        {
            change(Arc::make_mut(given));
            tree.txn.hints(Hinted::Path(path.into()));
        }
        let mut then = Then::default();
        self.hints_changed(&mut tree, id, &mut then);
        tree.txn.carried_out(id);
        drop(tree);
        self.do_then(then);
        Ok(())
    }

    fn refuse_hint(&self, id: FileId, why: &str) -> Fault {
        let path = self.metadata.read_tree().logical_path(id).unwrap_or_default();
        let path = String::from_utf8_lossy(&path).into_owned();
        tracing::warn!(path, why, "a hint was refused");
        Fault::new(Errno::INVAL, format!("{path}: {why}"))
    }

    fn understood(&self, name: &[u8], value: &[u8]) -> Result<Hints, String> {
        let text = |bytes| std::str::from_utf8(bytes).map_err(|_| "a hint's name and value are UTF-8".to_owned());
        let (name, value) = (text(name)?, text(value)?);
        self.understood_all(std::iter::once((name, value)))
    }

    fn understood_all<'a>(&self, given: impl Iterator<Item = (&'a str, &'a str)>) -> Result<Hints, String> {
        let mut hints = Hints::default();
        for (name, value) in given {
            hints.set(name, value)?;
        }
        if let Some(tier) = &hints.advice().tier
            && !self.tiers.devices().any(|device| device.tier_name() == &**tier)
        {
            let mut known: Vec<&str> = self.tiers.devices().map(surgetank_tier::Device::tier_name).collect();
            known.dedup();
            return Err(format!("tier: there is no tier '{tier}'; there are {}", known.join(", ")));
        }
        for name in hints.unknown() {
            let mut warned = self.warned.lock().unwrap_or_else(PoisonError::into_inner);
            if warned.len() < WARNED_MAX && warned.insert(name.to_owned()) {
                tracing::warn!(hint = name, "this hint is not known here: it is kept, and has no effect");
            }
        }
        Ok(hints)
    }

    // ---- by name

    /// Takes hints for paths, whether a file exists or not, without a request to the store. Returns the refused ones:
    /// index and reason.
    pub fn hint(&self, given: &[Given<'_>]) -> Vec<(usize, String)> {
        let mut refused = Vec::new();
        for (step, some) in given.chunks(NAMES_AT_ONCE).enumerate() {
            let mut then = Then::default();
            let mut tree = self.metadata.write_tree();
            for (at, (path, texts)) in some.iter().enumerate() {
                let texts = texts.iter().map(|(name, value)| (name.as_str(), value.as_str()));
                match plain(path).and_then(|path| Ok((path, self.understood_all(texts)?))) {
                    Ok((path, hints)) => {
                        if let Err(why) = self.hint_name(&mut tree, path, &hints, &mut then) {
                            refused.push((step * NAMES_AT_ONCE + at, why));
                        }
                    }
                    Err(why) => refused.push((step * NAMES_AT_ONCE + at, why)),
                }
            }
            drop(tree);
            self.do_then(then);
        }
        for (at, why) in &refused {
            let path = given.get(*at).map(|(path, _)| String::from_utf8_lossy(path));
            tracing::warn!(path = path.as_deref(), why, "a hint was refused");
        }
        refused
    }

    fn hint_name(&self, tree: &mut Tree, path: Vec<u8>, hints: &Hints, then: &mut Then) -> Result<(), String> {
        let of_name = tree.hints.names.get(path.as_slice());
        let of_file = tree.file_at(&path).and_then(|id| tree.hints_of(id));
        of_name.into_iter().chain(of_file).try_for_each(|known| known.has_room_for(hints))?;
        // Files that are made under it from here on get the hint.
        if let Some(dir) = tree.file_at(parent(&path)) {
            self.metadata.recall_delegation(tree, Some(dir));
        }
        let known = tree.file_at(&path);
        known.into_iter().for_each(|id| self.metadata.recall_delegations_below(tree, id));
        let of = Hinted::Path(path.clone().into());
        Arc::make_mut(tree.hints.of_name(&path)).update(hints);
        tree.txn.hints(of);
        match known {
            Some(id) => {
                tree.change_hints(id, |own| own.update(hints));
                tree.txn.hints(Hinted::File(id));
                self.hints_changed(tree, id, then);
            }
            None if hints.advice().prefetch == Some(true) => then.wanted.push(path),
            None => {}
        }
        Ok(())
    }

    // ---- what follows

    /// Does at once what a changed hint allows.
    fn hints_changed(&self, tree: &mut Tree, id: FileId, then: &mut Then) {
        let Some((inode, path)) = tree.get(id).zip(tree.logical_path(id)) else { return };
        let wants =
            inode.hint_history().and_then(HintHistory::now).is_some_and(|hints| hints.advice().prefetch == Some(true));
        if wants {
            then.wanted.push(path.clone());
        }
        if !inode.sealed {
            return;
        }
        if inode.is_dir() || inode.dirty() {
            self.rules_changed(tree, id);
            self.retime(tree, id, &path);
            return;
        }
        // (Its content may belong to another member now.)
        closed::note(&self.metadata, tree, id);
        if inode.replica.is_some() && self.metadata.decided(tree, id, &path).mode == Mode::Move {
            then.leaves.push(id);
        }
    }

    /// Makes the queued operations of a file due earlier or later.
    fn retime(&self, tree: &mut Tree, id: FileId, path: &[u8]) {
        let Some(inode) = tree.get(id) else { return };
        let (publish, set_meta) = (inode.publish, inode.set_meta);
        let last = self.runs.is_last(&self.metadata.decided(tree, id, path));
        if !last {
            // Its further names are queued behind it.
            let linked = publish.filter(|_| !inode.is_dir() && inode.attr.links > 1);
            let links = linked.into_iter().flat_map(|seq| tree.ops.range(seq..)).filter(|(_, op)| op.file() == id);
            let own: Vec<Seq> = links.map(|(seq, _)| *seq).chain(publish).chain(set_meta).collect();
            for seq in own {
                if !tree.hasten(seq) {
                    continue;
                }
                let Some(op) = tree.ops.get(&seq) else { continue };
                let places = surgetank_state::places(&op.kind);
                tree.txn.op(seq);
                places.into_iter().for_each(|(dir, _)| tree.hasten_dirs(dir, false));
            }
        } else if let Some(seq) = publish
            && tree.ops.get(&seq).is_some_and(|op| !op.is_last())
            && !tree.in_store(id)
            && tree.take_back(id, seq)
        {
            // At the end of the queue, where no operation builds on it.
            self.metadata.queue_publish(tree, id);
        }
    }

    fn do_then(&self, then: Then) {
        for id in then.leaves {
            if let Err(why) = self.eviction.evict(id, "a hint says move: evicted once it was in the store") {
                tracing::warn!(%why, "evict");
            }
        }
        self.want(then.wanted);
        self.metadata.nudge();
    }

    // ---- from one agent to the next

    pub(crate) fn take_up_hints(&self, image: &mut Image) {
        let mut tree = self.metadata.write_tree();
        for (of, record) in std::mem::take(&mut image.hints) {
            tree.hints.any = true;
            let history = HintHistory::of_record(&record);
            match of {
                Hinted::Path(path) => {
                    if let Some(hints) = history.now() {
                        *tree.hints.of_name(&path) = hints.clone();
                    }
                }
                Hinted::File(id) => {
                    // A number that was given out without a record must not go to a later file.
                    let since = history.since().map_or(0, |since| since.0);
                    tree.next_id = tree.next_id.max(since);
                    if let Some(inode) = tree.get_mut(id) {
                        inode.extra_mut().hints = Some(Box::new(history));
                    }
                }
            }
        }
    }

    /// The last agent ends and leaves files: those keep their hints, and later files do not get them.
    pub(crate) fn end_hints(&self) {
        let mut tree = self.metadata.write_tree();
        if !tree.hints.any {
            return;
        }
        self.metadata.recall_delegation(&mut tree, None);
        tree.hints.dirs.clear();
        for path in std::mem::take(&mut tree.hints.names).into_keys() {
            tree.txn.hints(Hinted::Path(path));
        }
        let hinted = tree.iter().filter(|(_, inode)| inode.is_dir() && inode.hint_history().is_some());
        let dirs: Vec<FileId> = hinted.map(|(id, _)| id).collect();
        for dir in dirs {
            tree.change_hints(dir, |hints| *hints = Hints::default());
            tree.txn.hints(Hinted::File(dir));
        }
    }

    /// Files that moved with their directory may have other rules and other hinted names now.
    pub(crate) fn rules_changed_below(&self, tree: &mut Tree, dir: FileId) {
        let hinted = tree.hints.any();
        let mut below: Vec<FileId> = Vec::new();
        let mut dirs = vec![dir];
        while let Some(dir) = dirs.pop() {
            let Some(d) = tree.dir(dir) else { continue };
            for child in d.children.values().filter_map(|entry| entry.logical()) {
                let Some(inode) = tree.get(child) else { continue };
                if inode.is_dir() {
                    dirs.push(child);
                }
                if hinted || !inode.is_dir() && inode.dirty() && inode.sealed {
                    below.push(child);
                }
            }
        }
        for id in below {
            if hinted && let Some(path) = tree.logical_path(id) {
                tree.named(id, &path);
            }
            self.rules_changed(tree, id);
        }
        self.metadata.commit(tree);
    }

    /// A file that the store does not have completely may have to be drained now, or not any more. A running
    /// publication continues.
    pub(crate) fn rules_changed(&self, tree: &mut Tree, id: FileId) {
        if tree.get(id).is_none_or(|inode| inode.is_dir() || !inode.dirty() || !inode.sealed) {
            return;
        }
        closed::note(&self.metadata, tree, id);
        let Some(path) = tree.logical_path(id) else { return };
        let drained = is_drained(self.metadata.mode_for(tree, id, &path));
        let pending = tree.get(id).and_then(|inode| inode.publish);
        match pending {
            None => self.metadata.queue_publish(tree, id),
            Some(seq) if !drained && !tree.in_store(id) => {
                tree.take_back(id, seq);
            }
            Some(_) => {}
        }
    }
}

type Change = Box<dyn Fn(&mut Hints)>;

fn has(hints: &Hints, name: &str) -> bool {
    hints.value(name).is_some()
}

/// The path without parts that have no meaning.
fn plain(path: &[u8]) -> Result<Vec<u8>, String> {
    let names: Vec<&[u8]> = path.split(|byte| *byte == b'/').filter(|name| !name.is_empty() && *name != b".").collect();
    if names.contains(&&b".."[..]) {
        return Err("a path with '..' is not followed; give it without".to_owned());
    }
    Ok(names.join(&b'/'))
}
