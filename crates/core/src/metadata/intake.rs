//! Delegated directories: processes create new plain files there without asking, and record them in the intake, a ring
//! in shared memory (docs/internals/doors.md, "Delegated directories").
//!
//! States of a directory:
//! - delegated;
//! - ended: the index does not show it as delegated any more;
//! - recalled: every file that a process created is in the tree.
//!
//! Invariants:
//! - `Metadata::read_tree` and `Metadata::write_tree` take in the intake before they return. So for each request such
//!   a file is one that another door created just before.
//! - `recall_delegation` comes before any change to what a delegated directory is, and before another binding of a name
//!   in it. The tree stays locked from the recall to the change.
//!
//! The danger that this avoids: a file that a process has created, and that another process or the drain does not see.

use std::fs::File;
use std::os::fd::AsFd;
use std::time::Duration;

use foldhash::HashSet;

use surgetank_state::{Delegation, Entry, Inode, Name, OWN_INODE_BASE, PlainId, Tree};
use surgetank_tier::Plain;
use surgetank_types::clock;
use surgetank_types::model::{Attr, DeviceId, FileId, Kind, RunId, Timestamp};
use surgetank_types::sync::atomic::Ordering;
use surgetank_types::sync::{Arc, PoisonError};

use crate::base::intake_file::IntakeFile;
use crate::content::{Content, Location, Open};
use crate::metadata::{Metadata, hold_place};

/// A process that creates one file asks for one file.
pub(crate) const MADE_MIN: u16 = 2;
/// The upper limit of the demand, which each recall of a directory doubles.
const MADE_MAX: u16 = 64;
pub(crate) const DELEGATIONS_MAX: usize = 16;
/// The device reserves room for this many files of each directory. A file counts with its expected bytes, at least
/// `FILE_BYTES_MIN`.
pub(crate) const FILES_AHEAD: u64 = 64;
pub(crate) const FILE_BYTES_MIN: u64 = 64 << 10;
const FREE_SHARE: u64 = 4;
/// While this many handed-out files are open, processes ask for new ones.
const HANDED_MAX: u64 = 1024;
/// The share of the agent's limit of open files that handed-out files may use.
const OPEN_SHARE: u64 = 4;
/// A directory in which no process creates a file for this long is recalled. The kernel keeps no listing of a delegated
/// directory, and each look-up in it also searches the ring.
pub(crate) const UNUSED: Duration = Duration::from_secs(2);
pub(crate) const DIRTY_AHEAD_BYTES: u64 = DELEGATIONS_MAX as u64 * FILES_AHEAD * FILE_BYTES_MIN;

impl Metadata {
    /// A number for a file that a process may create.
    pub fn number_to_delegate(&self) -> u64 {
        self.write_tree().new_id().0
    }

    /// Takes in the files that processes have recorded until now.
    pub fn settle(&self) {
        if self.delegated.load(Ordering::SeqCst) > 0 {
            drop(self.read_tree());
        }
    }

    pub(crate) fn settle_in(&self, tree: &mut Tree) {
        let Some(shim) = self.shim.get() else { return };
        while shim.intake_waits() {
            let all_created = shim.take_intake();
            crash_point!("delegation.settling");
            self.commit_apart(tree, |tree| self.take_all_in(tree, &all_created));
            crash_point!("delegation.settled");
            self.limit_by_grants();
            shim.give_back(&mut || tree.new_id().0);
            // Other entries may be under way; a caller that waits for them looks again.
            if all_created.is_empty() {
                return;
            }
        }
    }

    fn take_all_in(&self, tree: &mut Tree, all_created: &[IntakeFile]) {
        let mut dirs: Vec<FileId> = Vec::new();
        for created in all_created {
            match self.take_one_in(tree, created) {
                Ok(()) if !dirs.contains(&created.dir) => dirs.push(created.dir),
                Ok(()) => {}
                Err(why) => {
                    let path = tree.child_path(created.dir, &created.name).unwrap_or_else(|| created.name.clone());
                    self.notes.note(
                        RunId(0),
                        String::from_utf8_lossy(&path).into_owned(),
                        format!("a program created it in a delegated directory, and it is lost: {why}"),
                        true,
                    );
                }
            }
        }
        for dir in dirs {
            tree.touch_dir(dir, 0);
        }
    }

    fn take_one_in(&self, tree: &mut Tree, created: &IntakeFile) -> Result<(), String> {
        let delegation = tree.delegations.dirs.get_mut(&created.dir).ok_or("the directory is not delegated")?;
        delegation.used = clock::tick();
        let (device, watch, reserve_bytes, reason) =
            (delegation.device, delegation.watch, delegation.reserve_bytes, delegation.reason.clone());
        let (file, stat, path) = self.plain_file_of(tree, created, device)?;
        let plain = Plain::of(&file).map_err(|why| why.to_string())?;
        let name = Name::from(created.name.as_slice());
        let id = tree.new_id();
        let mut inode = Inode::new(attr_of(created, &stat));
        inode.logical = Some((created.dir, name.clone()));
        inode.sealed = false;
        inode.run = self.runs.run_claimed(created.run);
        inode.handles = 1;
        inode.replica = Some(PlainId::new(device, &plain));
        inode.placed = reason;
        tree.insert(id, inode);
        tree.bind(created.dir, &name, |entry| entry.set_logical(Some(id)));
        tree.own(id);
        tree.txn.entry(created.dir, &name);
        let content = Content { file: Arc::new(file), location: Location::Tier(device), writable: false };
        let open = Arc::new(Open::new(id, content, true, None, 0));
        if self.tiers.device(device).try_reserve(reserve_bytes) {
            open.reserved_bytes.store(reserve_bytes, Ordering::Relaxed);
        }
        open.users.lock().unwrap_or_else(PoisonError::into_inner).writers = 1;
        open.granted.store(true, Ordering::Relaxed);
        open.granted_to(stat.st_uid);
        self.directly_written(&open);
        self.opens().insert(id, open.clone());
        hold_place(self, tree, id);
        self.granted.fetch_add(1, Ordering::Relaxed);
        let is_watched = self.shim.get().is_some_and(|shim| {
            shim.made_in(watch, &created.name, id) || shim.watch(id, open.content().file.as_fd()).is_ok()
        });
        if !is_watched {
            tracing::warn!(path = %String::from_utf8_lossy(&path), "a plain file cannot be watched; it is looked at now and then");
            self.deferred.defer_seal(id);
        }
        Ok(())
    }

    /// The plain file, if it matches the entry and the name is free.
    fn plain_file_of(
        &self,
        tree: &Tree,
        created: &IntakeFile,
        device: DeviceId,
    ) -> Result<(File, rustix::fs::Stat, Vec<u8>), String> {
        let name = &created.name;
        if !is_name(name) {
            return Err("the name is not valid".into());
        }
        let path = tree.child_path(created.dir, name).ok_or("its directory is gone")?;
        if tree.entry(created.dir, name).and_then(Entry::logical).is_some() {
            return Err("the name is another file's".into());
        }
        let file = self.tiers.device(device).open(&path, false).map_err(|why| why.to_string())?;
        let stat = rustix::fs::fstat(&file).map_err(|why| why.to_string())?;
        if !is_own_file(&stat) || (stat.st_dev, stat.st_ino) != (created.dev, created.ino) {
            return Err("the path has another file".into());
        }
        Ok((file, stat, path))
    }

    /// Files that the agent does not know yet may take only a part of the free room.
    pub(crate) fn limit_intake(&self, tree: &Tree) {
        let of = |delegation: &Delegation| {
            self.tiers.device(delegation.device).free_bytes()
                / FREE_SHARE
                / delegation.reserve_bytes.max(FILE_BYTES_MIN)
        };
        self.intake_max.store(tree.delegations.dirs.values().map(of).min().unwrap_or(0), Ordering::Relaxed);
        self.limit_by_grants();
    }

    /// Processes create files faster than the agent seals them. Each one is open in the agent until it is sealed.
    pub(crate) fn limit_by_grants(&self) {
        let left = self.granted_max.saturating_sub(self.granted.load(Ordering::Relaxed) as u64);
        if let Some(shim) = self.shim.get() {
            shim.limit_intake(self.intake_max.load(Ordering::Relaxed).min(left));
        }
    }

    /// Recalls a directory (`None`: all). After this only the agent creates files in it, and all created files are in
    /// the tree.
    pub(crate) fn recall_delegation(&self, tree: &mut Tree, dir: Option<FileId>) {
        self.recall_delegations(tree, |_, one| dir.is_none_or(|dir| dir == one));
    }

    /// The same for a directory and all directories below it.
    pub(crate) fn recall_delegations_below(&self, tree: &mut Tree, dir: FileId) {
        self.recall_delegations(tree, |tree, one| tree.is_within(one, dir));
    }

    fn recall_delegations(&self, tree: &mut Tree, which: impl Fn(&Tree, FileId) -> bool) {
        let dirs: Vec<FileId> = tree.delegations.dirs.keys().filter(|one| which(tree, **one)).copied().collect();
        if dirs.is_empty() {
            return;
        }
        for dir in &dirs {
            if let Some(d) = tree.dir_mut(*dir) {
                d.demand.after = (d.demand.after.max(MADE_MIN) * 2).min(MADE_MAX);
            }
        }
        self.recall_dirs(tree, &dirs);
    }

    pub(crate) fn recall_dirs(&self, tree: &mut Tree, dirs: &[FileId]) {
        let Some(shim) = self.shim.get() else { return };
        for dir in dirs {
            if let Some(delegation) = tree.delegations.dirs.get_mut(dir) {
                delegation.ended = true;
            }
            self.show(tree, *dir);
        }
        shim.stop_intake();
        crash_point!("delegation.stopped");
        self.settle_in(tree);
        for dir in dirs {
            if let Some(delegation) = tree.delegations.dirs.remove(dir) {
                self.tiers.device(delegation.device).unreserve(delegation.ahead_bytes);
                shim.no_longer_delegated(delegation.watch);
            }
            if let Some(d) = tree.dir_mut(*dir) {
                d.demand.made = 0;
                d.is_delegated = false;
                // The kernel's listing may be older than the last file.
                d.is_in_kernel = false;
            }
        }
        self.delegated.store(tree.delegations.dirs.len(), Ordering::SeqCst);
        tree.delegations.strays.extend(shim.take_strays());
        self.remove_strays(tree);
    }

    /// Removes files whose maker died or stalled before it recorded them. While a directory is not delegated, no
    /// process creates files in it. Recovery removes empty files without a record by itself.
    fn remove_strays(&self, tree: &mut Tree) {
        for (dir, name) in std::mem::take(&mut tree.delegations.strays) {
            let place = (dir, Name::from(name.as_slice()));
            if tree.delegations.dirs.contains_key(&dir) || tree.making.contains_key(&place) {
                tree.delegations.strays.push((dir, name));
                continue;
            }
            let Some(path) = tree.child_path(dir, &name).filter(|_| is_name(&name)) else { continue };
            let known = tree.entry(dir, &name).and_then(Entry::logical).and_then(|id| tree.get(id)?.replica);
            for device in self.tiers.devices().filter(|device| device.is_there()) {
                let Some(stat) = device.open(&path, false).ok().and_then(|file| rustix::fs::fstat(&file).ok()) else {
                    continue;
                };
                let is_known = known.is_some_and(|plain| (plain.device, plain.ino) == (device.id(), stat.st_ino));
                if !is_known && is_own_file(&stat) && stat.st_size == 0 {
                    drop(device.unlink_if(&path, stat.st_ino));
                }
            }
        }
    }

    /// All delegations end: a process comes to write through the mount, or the agent leaves its pool.
    pub fn recall_for_writer(&self) {
        if self.delegated.load(Ordering::SeqCst) > 0 {
            let mut tree = self.write_tree();
            let dirs: Vec<FileId> = tree.delegations.dirs.keys().copied().collect();
            self.recall_dirs(&mut tree, &dirs);
        }
    }

    /// Ends all delegations; there are no new ones after this.
    pub fn end_delegation(&self) {
        self.delegation_ended.store(true, Ordering::SeqCst);
        let mut tree = self.write_tree();
        self.recall_delegation(&mut tree, None);
    }

    /// Files that an earlier agent did not record in the catalog: this agent records them now. Recovery finds their
    /// plain files like all others.
    pub(crate) fn take_in_left(&self, tree: &mut Tree) {
        let all_created = std::mem::take(&mut *self.succession.intake.lock().unwrap_or_else(PoisonError::into_inner));
        let mut inos: HashSet<u64> = HashSet::default();
        if !all_created.is_empty() {
            inos.extend(tree.iter().map(|(_, inode)| inode.attr.ino));
        }
        for created in &all_created {
            // A process wrote the number: the mask bounds it.
            tree.next_id = tree.next_id.max((created.number & (OWN_INODE_BASE - 1)) + 1);
        }
        for created in all_created {
            let known = tree.entry(created.dir, &created.name).and_then(Entry::logical);
            let ino = OWN_INODE_BASE + (created.number & (OWN_INODE_BASE - 1));
            if known.and_then(|id| tree.get(id)).is_some_and(|inode| inode.attr.ino == ino) {
                continue;
            }
            let devices = self.tiers.devices().filter(|device| device.is_there());
            let found = devices.map(|device| (device.id(), self.plain_file_of(tree, &created, device.id())));
            let found: Vec<_> = found.collect();
            let made =
                found.into_iter().find_map(|(device, file)| file.ok().map(|(file, stat, _)| (device, file, stat)));
            let made = made.filter(|_| inos.insert(ino));
            let Some((device, file, stat)) = made else {
                let path = tree.child_path(created.dir, &created.name).unwrap_or_else(|| created.name.clone());
                self.notes.note(
                    RunId(0),
                    String::from_utf8_lossy(&path).into_owned(),
                    "a program created it just before an earlier agent died, and it is not there any more",
                    true,
                );
                continue;
            };
            let Ok(plain) = Plain::of(&file) else { continue };
            let name = Name::from(created.name.as_slice());
            let mut inode = Inode::new(attr_of(&created, &stat));
            inode.logical = Some((created.dir, name.clone()));
            inode.sealed = false;
            inode.run = self.succession.still(created.run);
            inode.replica = Some(PlainId::new(device, &plain));
            let id = tree.new_id();
            tree.insert(id, inode);
            tree.bind(created.dir, &name, |entry| entry.set_logical(Some(id)));
            tree.own(id);
            tree.txn.entry(created.dir, &name);
        }
        self.commit(tree);
        crash_point!("recover.intake");
    }

    pub(crate) fn has_left_intake(&self) -> bool {
        !self.succession.intake.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }
}

/// The limit of handed-out files that are open in the agent. At the limit, delegations add no more.
pub(crate) fn granted_max() -> u64 {
    let open_max = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    open_max.map_or(HANDED_MAX, |max| (max / OPEN_SHARE).min(HANDED_MAX))
}

fn is_name(name: &[u8]) -> bool {
    let is_one = !name.is_empty() && name.len() <= 255 && !name.contains(&0) && !name.contains(&b'/');
    is_one && name != b"." && name != b".." && !name.starts_with(surgetank_types::model::STORE_TEMPORARY_PREFIX)
}

fn is_own_file(stat: &rustix::fs::Stat) -> bool {
    let regular = stat.st_mode & libc::S_IFMT == libc::S_IFREG;
    regular && stat.st_uid == rustix::process::geteuid().as_raw() && stat.st_nlink == 1
}

fn attr_of(created: &IntakeFile, stat: &rustix::fs::Stat) -> Attr {
    let changed = Timestamp::from_parts(stat.st_ctime, stat.st_ctime_nsec as u32);
    Attr {
        kind: Kind::File,
        perm: created.perm & 0o777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        ino: OWN_INODE_BASE + (created.number & (OWN_INODE_BASE - 1)),
        links: 1,
        size_bytes: 0,
        blocks: 0,
        device: 0,
        atime: Timestamp::from_parts(stat.st_atime, stat.st_atime_nsec as u32),
        mtime: Timestamp::from_parts(stat.st_mtime, stat.st_mtime_nsec as u32),
        ctime: changed,
    }
}
