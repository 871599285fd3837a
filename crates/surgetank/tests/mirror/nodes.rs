//! The files that the kernel knows, each held by an O_PATH descriptor so that its inode cannot be reused.
//!
//! Invariant: a (device, inode) pair has at most one node id at a time, and ids are never used again.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::Stat;
use rustix::io::Errno;
use surgetank_types::error::FsResult;
use surgetank_types::model::{Attr, Kind, Timestamp};

use surgetank::mount::BackingId;
use surgetank::mount::abi::ROOT_NODE;
use surgetank::mount::attach::descriptor_path;

pub struct Node {
    pub id: u64,
    pub fd: OwnedFd,
    key: (u64, u64),
    pub opens: Mutex<Opens>,
}

/// All opens of a node must agree: with a backing file, or without. The first open decides, until the last is closed.
#[derive(Default)]
pub struct Opens {
    pub count: u64,
    pub backing: Option<BackingId>,
}

impl Node {
    /// Leads to the file itself, whatever its current name.
    pub fn path(&self) -> PathBuf {
        descriptor_path(self.fd.as_fd())
    }

    pub fn attr(&self) -> io::Result<Attr> {
        Ok(attr_of(&rustix::fs::fstat(&self.fd)?))
    }

    pub fn opens(&self) -> MutexGuard<'_, Opens> {
        self.opens.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub struct Nodes {
    table: Mutex<Table>,
}

struct Table {
    known: HashMap<u64, (Arc<Node>, u64)>,
    ids: HashMap<(u64, u64), u64>,
    next_id: u64,
}

impl Nodes {
    pub fn new(root: OwnedFd) -> io::Result<Self> {
        let stat = rustix::fs::fstat(&root)?;
        let key = (stat.st_dev, stat.st_ino);
        let node = Arc::new(Node { id: ROOT_NODE, fd: root, key, opens: Mutex::default() });
        let known = HashMap::from([(ROOT_NODE, (node, 1))]);
        let table = Table { known, ids: HashMap::from([(key, ROOT_NODE)]), next_id: ROOT_NODE + 1 };
        Ok(Self { table: Mutex::new(table) })
    }

    pub fn get(&self, id: u64) -> FsResult<Arc<Node>> {
        self.table().known.get(&id).map(|(node, _)| Arc::clone(node)).ok_or_else(|| Errno::STALE.into())
    }

    /// Counts one look-up of the file behind `fd`.
    pub fn adopt(&self, fd: OwnedFd) -> io::Result<(Arc<Node>, Attr)> {
        let stat = rustix::fs::fstat(&fd)?;
        let key = (stat.st_dev, stat.st_ino);
        let mut table = self.table();
        let id = *table.ids.get(&key).unwrap_or(&table.next_id);
        if id == table.next_id {
            table.next_id += 1;
            table.ids.insert(key, id);
        }
        let (node, lookups) =
            table.known.entry(id).or_insert_with(|| (Arc::new(Node { id, fd, key, opens: Mutex::default() }), 0));
        *lookups += 1;
        Ok((Arc::clone(node), attr_of(&stat)))
    }

    pub fn forget(&self, id: u64, count: u64) {
        let mut table = self.table();
        let Some((node, lookups)) = table.known.get_mut(&id) else {
            return;
        };
        *lookups = lookups.saturating_sub(count);
        if *lookups == 0 && id != ROOT_NODE {
            let key = node.key;
            table.known.remove(&id);
            table.ids.remove(&key);
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn attr_of(stat: &Stat) -> Attr {
    let time = |secs: i64, nanos: u64| Timestamp::from_parts(secs, u32::try_from(nanos).unwrap_or(0));
    Attr {
        kind: Kind::from_mode(stat.st_mode),
        perm: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        ino: stat.st_ino,
        links: u32::try_from(stat.st_nlink).unwrap_or(u32::MAX),
        size_bytes: u64::try_from(stat.st_size).unwrap_or(0),
        blocks: u64::try_from(stat.st_blocks).unwrap_or(0),
        device: stat.st_rdev,
        atime: time(stat.st_atime, stat.st_atime_nsec),
        mtime: time(stat.st_mtime, stat.st_mtime_nsec),
        ctime: time(stat.st_ctime, stat.st_ctime_nsec),
    }
}
