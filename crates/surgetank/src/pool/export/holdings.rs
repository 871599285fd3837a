//! What one member holds here: its nodes, its handles, and the open file descriptions of its lock owners.
//!
//! Invariants: a node lives until all its look-ups are taken back (its descriptor may be closed before); a lock owner's description of a file lives until the
//! owner unlocks or the member's last handle of the file closes. After `end` nothing is added.
//! The danger that it avoids: a descriptor that is closed under the lock of the table. A close may wait for the agent.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::mem;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use surgetank_types::clock::tick;
use surgetank_types::model::{Attr, Kind};

use super::locks::Description;
use super::place::{Place, Root, attr_of, reopened};
use crate::pool::call::{Found, Listed, Stored};
use crate::pool::rendezvous::meeting::Meeting;

/// Descriptors of files and of directories that one member keeps open here. Others are opened again when they are needed.
const FILES_MAX: usize = 2048;
const DIRECTORIES_MAX: usize = 2048;
/// Files that are kept for a moment after a look-up: so long, and so many for one member.
const FILES_KEPT: Duration = Duration::from_secs(1);
const FILES_KEPT_MAX: usize = 64;
/// A member that leaves tells each other one so much of its directories.
const DIRECTORIES_TOLD_MAX: usize = 100_000;
const PATH_BYTES_TOLD_MAX: usize = 4 << 20;
/// So many directories are opened again, one below the other.
const DEPTH_MAX: usize = 64;

#[derive(Debug)]
pub struct Holdings {
    pub root: Arc<Root>,
    next_handle: Arc<AtomicU64>,
    tables: Mutex<Tables>,
}

/// A file or directory that was looked up.
#[derive(Debug, Clone)]
pub struct Node {
    pub fd: Arc<OwnedFd>,
    pub kind: Kind,
}

#[derive(Debug, Clone)]
pub enum Handle {
    File(Arc<OpenFile>),
    Listing(Arc<Mutex<Listing>>),
}

#[derive(Debug)]
pub struct OpenFile {
    pub fd: OwnedFd,
    pub node: u64,
    /// Does the descriptor append?
    appends: RwLock<bool>,
}

impl OpenFile {
    /// `flags`: of the descriptor.
    pub fn new(fd: OwnedFd, node: u64, flags: OFlags) -> Self {
        Self { fd, node, appends: RwLock::new(flags.contains(OFlags::APPEND)) }
    }

    /// The descriptor appends, or does not, while this is held. The agent here sees that, as it does for its own programs. (It
    /// does not see the flag of one write.)
    pub fn appending(&self, appends: bool) -> Result<RwLockReadGuard<'_, bool>, Errno> {
        loop {
            let now = self.appends.read().unwrap_or_else(PoisonError::into_inner);
            if *now == appends {
                return Ok(now);
            }
            drop(now);
            let mut now = self.appends.write().unwrap_or_else(PoisonError::into_inner);
            let flags = fcntl_getfl(&self.fd)?;
            let others = flags - OFlags::APPEND;
            fcntl_setfl(&self.fd, if appends { flags | OFlags::APPEND } else { others })?;
            *now = appends;
        }
    }
}

/// An open directory, at the position that its listing has reached.
#[derive(Debug)]
pub struct Listing {
    pub fd: OwnedFd,
    /// Read, and not answered yet.
    pub pending: std::vec::IntoIter<Listed>,
}

/// What has ended with a handle. To be dropped without a lock.
#[derive(Debug)]
pub struct Closed {
    pub handle: Handle,
    pub descriptions: Vec<Arc<Description>>,
}

#[derive(Debug, Default)]
struct Tables {
    ended: bool,
    nodes: HashMap<u64, Counted>,
    /// Nodes with a descriptor that can be opened again, the oldest first: files, and directories.
    kept: [VecDeque<u64>; 2],
    handles: HashMap<u64, Handle>,
    /// Handles of files that the member had opened in the store, by its own number.
    moved: HashMap<u64, u64>,
    /// By node: the files that have handles.
    files: HashMap<u64, Locked>,
    /// Files without handles that stay for a moment, the oldest first.
    files_kept: VecDeque<(Instant, OwnedFd)>,
}

#[derive(Debug)]
struct Counted {
    /// `None`: it is opened again when it is needed.
    fd: Option<Arc<OwnedFd>>,
    kind: Kind,
    lookups: u64,
    /// Where it was last found: directory and name.
    at: Option<(u64, Box<[u8]>)>,
}

#[derive(Debug, Default)]
struct Locked {
    handles: usize,
    owners: HashMap<u64, Arc<Description>>,
}

impl Holdings {
    pub fn new(root: Arc<Root>, next_handle: Arc<AtomicU64>) -> Self {
        Self { root, next_handle, tables: Mutex::default() }
    }

    /// Errors: ESTALE, the member does not have the node, or its name has changed since it was open.
    pub fn node(&self, number: u64) -> Result<Node, Errno> {
        self.node_below(number, DEPTH_MAX)
    }

    /// The same of a file. No name is looked up: a program that waits for the member may hold the lock of its directory.
    pub fn node_without_names(&self, number: u64) -> Result<Node, Errno> {
        let known = {
            let tables = self.tables();
            tables.nodes.get(&number).and_then(|counted| Some(Node { fd: counted.fd.clone()?, kind: counted.kind }))
        };
        known.map_or_else(|| self.node_by_number(number), Ok)
    }

    /// A file that the member has not looked up: it answers for its directory. One without a name may be open.
    fn node_by_number(&self, number: u64) -> Result<Node, Errno> {
        if let Ok(place) = self.root.by_number(number) {
            return Ok(Node { fd: Arc::new(place.fd), kind: place.attr.kind });
        }
        let open = {
            let tables = self.tables();
            let is_of_it = |handle: &&Handle| matches!(handle, Handle::File(file) if file.node == number);
            let is_open = tables.files.contains_key(&number);
            is_open.then(|| tables.handles.values().find(is_of_it).cloned()).flatten()
        };
        match open {
            Some(Handle::File(file)) => Ok(Node { fd: Arc::new(reopened(&file.fd, OFlags::PATH)?), kind: Kind::File }),
            _ => Err(Errno::STALE),
        }
    }

    /// `depth`: so many directories may have to be opened. (Names that have changed may lead in a circle.)
    fn node_below(&self, number: u64, depth: usize) -> Result<Node, Errno> {
        let (parent, name) = {
            let tables = self.tables();
            match tables.nodes.get(&number) {
                Some(Counted { fd: Some(fd), kind, .. }) => return Ok(Node { fd: fd.clone(), kind: *kind }),
                Some(counted) => counted.at.clone().ok_or(Errno::STALE)?,
                None => {
                    drop(tables);
                    return self.node_by_number(number);
                }
            }
        };
        let directory = self.node_below(parent, depth.checked_sub(1).ok_or(Errno::STALE)?)?;
        let place = match self.root.of_name(&*directory.fd, &name) {
            Ok(place) if place.number == number => place,
            // (The member may have looked it up under another name, without a request.)
            Ok(_) | Err(Errno::NOENT | Errno::NOTDIR) => return self.node_by_number(number),
            Err(why) => return Err(why),
        };
        let fd = Arc::new(place.fd);
        let mut tables = self.tables();
        if let Some(counted) = tables.nodes.get_mut(&number) {
            counted.fd = Some(fd.clone());
        }
        let ended = tables.keep(number, place.attr.kind);
        drop(tables);
        drop(ended);
        Ok(Node { fd, kind: place.attr.kind })
    }

    /// Counts one more look-up of a place. `at`: the directory and the name where it was found, if it may be opened there
    /// again.
    pub fn found(&self, place: Place, at: Option<(u64, &[u8])>) -> Result<Found, Errno> {
        let Place { fd, number, attr } = place;
        let fd = Arc::new(fd);
        // (The descriptor outlives the guard, so it is not closed under the lock where the node is known.)
        let mut tables = self.tables();
        if tables.ended {
            return Err(Errno::NOTCONN);
        }
        let new = || Counted { fd: None, kind: attr.kind, lookups: 0, at: None };
        let counted = tables.nodes.entry(number).or_insert_with(new);
        counted.lookups = counted.lookups.saturating_add(1);
        let is_open = counted.fd.is_some();
        counted.fd.get_or_insert_with(|| fd.clone());
        let at = at.map(|(parent, name)| (parent, name.into()));
        let may_close = at.is_some();
        counted.at = at.or(counted.at.take());
        let ended = if may_close && !is_open { tables.keep(number, attr.kind) } else { None };
        drop(tables);
        drop(ended);
        Ok(Found { node: number, attr, ttl: Duration::ZERO })
    }

    /// A node has this name now.
    pub fn renamed(&self, number: u64, (parent, name): (u64, &[u8])) {
        if let Some(counted) = self.tables().nodes.get_mut(&number) {
            counted.at = counted.at.as_ref().map(|_| (parent, name.into()));
        }
    }

    /// Takes look-ups back. Unknown nodes are ignored.
    pub fn forget(&self, nodes: &[(u64, u64)]) {
        let mut ended = Vec::new();
        let mut tables = self.tables();
        for (number, lookups) in nodes {
            if let Entry::Occupied(mut counted) = tables.nodes.entry(*number) {
                let left = counted.get().lookups.saturating_sub(*lookups);
                counted.get_mut().lookups = left;
                if left == 0 {
                    ended.push(counted.remove());
                }
            }
        }
        drop(tables);
        drop(ended);
    }

    /// Errors: EBADF, the member does not have the handle.
    pub fn handle(&self, number: u64) -> Result<Handle, Errno> {
        self.tables().handles.get(&number).cloned().ok_or(Errno::BADF)
    }

    /// The handle of a moved file.
    pub fn moved(&self, key: u64) -> Option<u64> {
        self.tables().moved.get(&key).copied()
    }

    /// A moved file has this handle, unless it has got one meanwhile. Returns the handle.
    pub fn moves(&self, key: u64, handle: u64) -> u64 {
        *self.tables().moved.entry(key).or_insert(handle)
    }

    /// Its handle, which is not in the table afterwards.
    pub fn moves_no_more(&self, key: u64) -> Option<u64> {
        self.tables().moved.remove(&key)
    }

    /// Errors: EBADF, the handle is not one of a file.
    pub fn file(&self, number: u64) -> Result<Arc<OpenFile>, Errno> {
        match self.handle(number)? {
            Handle::File(file) => Ok(file),
            Handle::Listing(_) => Err(Errno::BADF),
        }
    }

    /// The attributes by handle, else by node.
    pub fn attr(&self, node: u64, handle: Option<u64>) -> Result<Attr, Errno> {
        match handle {
            Some(handle) => attr_of(&self.file(handle)?.fd),
            None => attr_of(&*self.node(node)?.fd),
        }
    }

    /// Gives a number to a handle. It is dropped if the member has ended.
    pub fn opened(&self, handle: Handle) -> Result<u64, Errno> {
        // (Declared before the guard: dropped after it.)
        let kept = handle.clone();
        let mut tables = self.tables();
        if tables.ended {
            return Err(Errno::NOTCONN);
        }
        let number = self.next_handle.fetch_add(1, Ordering::Relaxed);
        if let Handle::File(file) = &kept {
            tables.files.entry(file.node).or_default().handles += 1;
        }
        tables.handles.insert(number, handle);
        Ok(number)
    }

    pub fn closed(&self, number: u64) -> Result<Closed, Errno> {
        let mut tables = self.tables();
        let handle = tables.handles.remove(&number).ok_or(Errno::BADF)?;
        let mut descriptions = Vec::new();
        if let Handle::File(file) = &handle
            && let Entry::Occupied(mut locked) = tables.files.entry(file.node)
        {
            locked.get_mut().handles -= 1;
            if locked.get().handles == 0 {
                descriptions.extend(locked.remove().owners.into_values());
            }
        }
        Ok(Closed { handle, descriptions })
    }

    /// The description that a lock owner has of a file.
    pub fn description(&self, file: &OpenFile, owner: u64) -> Option<Arc<Description>> {
        self.tables().files.get(&file.node)?.owners.get(&owner).cloned()
    }

    /// Keeps a description, unless the owner has got one meanwhile. Errors: EBADF, the last handle was closed.
    pub fn described(&self, file: &OpenFile, owner: u64, new: Arc<Description>) -> Result<Arc<Description>, Errno> {
        // (A parameter is dropped after the guard.)
        let mut tables = self.tables();
        let locked = tables.files.get_mut(&file.node).ok_or(Errno::BADF)?;
        Ok(locked.owners.entry(owner).or_insert_with(|| new.clone()).clone())
    }

    /// The owner's description of a file, which is not in the table afterwards.
    pub fn undescribed(&self, file: &OpenFile, owner: u64) -> Option<Arc<Description>> {
        self.tables().files.get_mut(&file.node)?.owners.remove(&owner)
    }

    /// The directories that were looked up, with the paths that they have in `store`. (None is asked about through the
    /// mount.)
    pub fn directories_in(&self, store: &Meeting) -> Vec<Stored> {
        let directories: Vec<u64> = {
            let tables = self.tables();
            let directories = tables.nodes.iter().filter(|(_, counted)| counted.kind == Kind::Directory);
            directories.map(|(node, _)| *node).take(DIRECTORIES_TOLD_MAX).collect()
        };
        let mut bytes = 0;
        let stored = |node: u64| {
            let path = self.path_of(node, DEPTH_MAX).filter(|path| !path.is_empty())?;
            let ino = store.number_of(&path)?;
            Some(Stored { node, path: path.into(), ino })
        };
        let all = directories.into_iter().filter_map(stored);
        all.take_while(|stored| {
            bytes += stored.path.len();
            bytes <= PATH_BYTES_TOLD_MAX
        })
        .collect()
    }

    /// By the kernel's knowledge of an open descriptor here or above, and the names under which it was found.
    fn path_of(&self, number: u64, depth: usize) -> Option<Vec<u8>> {
        let (fd, at) = {
            let tables = self.tables();
            let counted = tables.nodes.get(&number)?;
            (counted.fd.clone(), counted.at.clone())
        };
        if let Some(fd) = fd {
            return self.root.path_below(&*fd);
        }
        let (parent, name) = at?;
        let mut path = self.path_of(parent, depth.checked_sub(1)?)?;
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(&name);
        Some(path)
    }

    /// The file stays for a moment, also without a name.
    pub fn keep(&self, file: OwnedFd) {
        let mut tables = self.tables();
        // (What is too much, or was added after the end, is dropped after the guard.)
        let _dropped = if tables.ended {
            Some((tick(), file))
        } else {
            tables.files_kept.push_back((tick(), file));
            if tables.files_kept.len() > FILES_KEPT_MAX { tables.files_kept.pop_front() } else { None }
        };
        drop(tables);
    }

    /// Lets go of files that were kept long enough.
    pub fn end_keeping(&self) {
        let mut gone = Vec::new();
        let mut tables = self.tables();
        while let Some((_, file)) = tables.files_kept.pop_front_if(|(since, _)| since.elapsed() > FILES_KEPT) {
            gone.push(file);
        }
        drop(tables);
        drop(gone);
    }

    pub fn counts(&self) -> (usize, usize) {
        let tables = self.tables();
        (tables.nodes.len(), tables.handles.len())
    }

    /// All of it ends.
    pub fn end(&self) {
        let ended = mem::replace(&mut *self.tables(), Tables { ended: true, ..Tables::default() });
        drop(ended);
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tables {
    /// The node has a descriptor. Returns that of another node, which has waited longest, if there are too many.
    fn keep(&mut self, number: u64, kind: Kind) -> Option<Arc<OwnedFd>> {
        let (index, most) = if kind == Kind::Directory { (1, DIRECTORIES_MAX) } else { (0, FILES_MAX) };
        let kept = &mut self.kept[index];
        kept.push_back(number);
        if kept.len() <= most {
            return None;
        }
        // (One that was forgotten has none, or a new one that waits at another place.)
        let oldest = kept.pop_front()?;
        self.nodes.get_mut(&oldest).and_then(|counted| counted.fd.take())
    }
}
