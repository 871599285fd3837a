//! The reference: a directory tree in memory, as POSIX and Linux define it, too simple to be wrong. It has no tiers, no drain
//! and no catalog. [`Reference::apply`] gives the result that a program must see.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use rustix::io::Errno;

use super::operation::{Access, Allocating, Operation, Renaming, SLOTS, Setting};

/// Target of every symbolic link: a name that does not exist.
pub const LINK_TARGET: &str = "nowhere";

/// Type of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link to [`LINK_TARGET`].
    Symlink,
}

/// The fields of `stat` that the reference knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// Type of the file.
    pub kind: Kind,
    /// Permission bits.
    pub perm: u32,
    /// Number of hard links.
    pub links: u32,
    /// Length in bytes; 0 for directories.
    pub size: u64,
    /// Modification time, in seconds since 1970; `None` where the reference does not know it.
    pub mtime: Option<i64>,
}

/// The result of an operation, as a program sees it.
#[derive(Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Success without a value.
    Fine,
    /// The system call fails.
    Failed(Errno),
    /// The bytes that were read.
    Bytes(Vec<u8>),
    /// The attributes of a file.
    Seen(Seen),
    /// The names in a directory, with their types.
    Names(BTreeMap<String, Kind>),
    /// The target of a symbolic link.
    Target(String),
    /// The extended attributes of a file.
    Xattrs(BTreeMap<String, Vec<u8>>),
}

impl std::fmt::Debug for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Fine => f.write_str("fine"),
            Self::Failed(errno) => write!(f, "{errno:?}"),
            Self::Bytes(bytes) => write!(f, "{}", shown(bytes)),
            Self::Seen(seen) => write!(f, "{seen:?}"),
            Self::Names(names) => write!(f, "{names:?}"),
            Self::Target(target) => write!(f, "-> {target}"),
            Self::Xattrs(xattrs) => write!(f, "{xattrs:?}"),
        }
    }
}

/// Bytes as runs: `12×0x00 100×0x07`.
pub fn shown(bytes: &[u8]) -> String {
    let runs = bytes.chunk_by(|a, b| a == b).map(|run| format!("{}×{:#04x}", run.len(), run[0]));
    format!("[{}]", runs.collect::<Vec<_>>().join(" "))
}

/// A successful outcome, or the errno.
pub type Answer = Result<Outcome, Errno>;

/// A file, directory or symbolic link.
#[derive(Debug, Clone)]
pub struct Node {
    /// Type of the node.
    pub kind: Kind,
    /// Permission bits.
    pub perm: u32,
    /// The content of a file.
    pub content: Vec<u8>,
    /// The names in a directory, with the numbers of their nodes.
    pub children: BTreeMap<String, usize>,
    /// Number of hard links.
    pub links: u32,
    /// Extended attributes by name.
    pub xattrs: BTreeMap<String, Vec<u8>>,
    /// Modification time in seconds since 1970, if a program set it and no operation changed it since.
    pub mtime: Option<i64>,
}

/// An open file.
#[derive(Debug, Clone, Copy)]
pub struct Handle {
    /// Number of its node.
    pub node: usize,
    /// Whether it reads, writes or both.
    pub access: Access,
    /// Whether it was opened with `O_APPEND`.
    pub append: bool,
    /// Whether this open made the file, which is complete at the close.
    pub made: bool,
}

/// The whole state: the tree and the open files.
#[derive(Debug, Clone)]
pub struct Reference {
    /// All nodes by number, also unlinked ones that are open.
    pub nodes: HashMap<usize, Node>,
    next: usize,
    /// The open file of each slot.
    pub handles: [Option<Handle>; SLOTS],
}

/// Number of the root directory's node.
pub const ROOT: usize = 0;

impl Reference {
    /// An empty tree.
    #[allow(clippy::new_without_default, reason = "`new` says more where a test begins")]
    pub fn new() -> Self {
        let root = Node::new(Kind::Directory, 0o755);
        Self { nodes: HashMap::from([(ROOT, root)]), next: 1, handles: [None; SLOTS] }
    }

    fn node(&self, id: usize) -> &Node {
        &self.nodes[&id]
    }
    fn node_mut(&mut self, id: usize) -> &mut Node {
        self.nodes.get_mut(&id).unwrap()
    }

    /// The node at a path. A link at the end is not followed.
    pub fn find(&self, path: &str) -> Result<usize, Errno> {
        let mut at = ROOT;
        for name in path.split('/').filter(|name| !name.is_empty()) {
            at = self.child(at, name)?.ok_or(Errno::NOENT)?;
        }
        Ok(at)
    }

    fn child(&self, dir: usize, name: &str) -> Result<Option<usize>, Errno> {
        match self.node(dir).kind {
            Kind::Directory => Ok(self.node(dir).children.get(name).copied()),
            Kind::File => Err(Errno::NOTDIR),
            // Its target does not exist.
            Kind::Symlink => Err(Errno::NOENT),
        }
    }

    /// The node at a path. A link at the end is followed, to a target that does not exist.
    fn find_followed(&self, path: &str) -> Result<usize, Errno> {
        let id = self.find(path)?;
        if self.node(id).kind == Kind::Symlink { Err(Errno::NOENT) } else { Ok(id) }
    }

    /// The directory of a path, its last name, and the node with that name.
    fn place<'a>(&self, path: &'a str) -> Result<(usize, &'a str, Option<usize>), Errno> {
        let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
        let dir = self.find(dir)?;
        Ok((dir, name, self.child(dir, name)?))
    }

    fn add(&mut self, node: Node) -> usize {
        let id = self.next;
        self.next += 1;
        self.nodes.insert(id, node);
        id
    }

    /// Adds a node under a free name.
    fn enter(&mut self, dir: usize, name: &str, node: Node) -> usize {
        let is_dir = node.kind == Kind::Directory;
        let id = self.add(node);
        self.node_mut(dir).children.insert(name.to_owned(), id);
        self.touch(dir);
        if is_dir {
            self.node_mut(dir).links += 1;
        }
        id
    }

    fn touch(&mut self, id: usize) {
        self.node_mut(id).mtime = None;
    }

    /// Removes a name, and the node too if it was the last name and no program has it open.
    fn remove(&mut self, dir: usize, name: &str) {
        let Some(id) = self.node_mut(dir).children.remove(name) else {
            return;
        };
        self.touch(dir);
        if self.node(id).kind == Kind::Directory {
            self.node_mut(dir).links -= 1;
            self.node_mut(id).links = 0;
        } else {
            self.node_mut(id).links -= 1;
        }
        self.reap(id);
    }

    fn reap(&mut self, id: usize) {
        let open = self.handles.iter().flatten().any(|handle| handle.node == id);
        if self.node(id).links == 0 && !open {
            self.nodes.remove(&id);
        }
    }

    /// The nodes that a program is writing.
    pub fn writers(&self) -> BTreeSet<usize> {
        self.handles
            .iter()
            .flatten()
            .filter(|handle| handle.access.writes() || handle.made)
            .map(|handle| handle.node)
            .collect()
    }

    fn close(&mut self, slot: usize) {
        if let Some(handle) = self.handles[slot].take() {
            self.reap(handle.node);
        }
    }

    /// Closes all files, as the end of all processes does.
    pub fn close_all(&mut self) {
        (0..SLOTS).for_each(|slot| self.close(slot));
    }

    /// The attributes of a node.
    pub fn seen(&self, id: usize) -> Seen {
        let node = self.node(id);
        Seen {
            kind: node.kind,
            perm: node.perm,
            links: node.links,
            size: match node.kind {
                Kind::File => node.content.len() as u64,
                Kind::Directory => 0,
                Kind::Symlink => LINK_TARGET.len() as u64,
            },
            mtime: if node.kind == Kind::File { node.mtime } else { None },
        }
    }

    fn file_at(&self, slot: usize) -> Result<Handle, Errno> {
        self.handles[slot].ok_or(Errno::BADF)
    }

    fn is_below(&self, id: usize, above: usize) -> bool {
        id == above || self.node(above).children.values().any(|child| self.is_below(id, *child))
    }

    /// Whether the kernel itself refuses the rename: a directory into itself, or over its own ancestor.
    pub fn knots(&self, from: &str, to: &str) -> bool {
        let (Ok((_, _, Some(id))), Ok((dir, _, target))) = (self.place(from), self.place(to)) else {
            return false;
        };
        let from_dir = self.place(from).unwrap().0;
        self.is_below(dir, id) || target.is_some_and(|target| self.is_below(from_dir, target))
    }

    /// Carries out an operation and returns the result that a program must see.
    pub fn apply(&mut self, operation: &Operation) -> Outcome {
        self.answer(operation).unwrap_or_else(Outcome::Failed)
    }

    fn answer(&mut self, operation: &Operation) -> Answer {
        match operation {
            Operation::Create { path, slot, perm, access, exclusive, append, truncate } => {
                let (dir, name, there) = self.place(path)?;
                let id = match there {
                    Some(_) if *exclusive => return Err(Errno::EXIST),
                    Some(id) => self.openable(id, *truncate)?,
                    None => self.enter(dir, name, Node::new(Kind::File, *perm)),
                };
                self.opened(*slot, Handle { node: id, access: *access, append: *append, made: there.is_none() });
            }
            Operation::Open { path, slot, access, append, truncate } => {
                let id = self.find(path)?;
                let id = self.openable(id, *truncate)?;
                self.opened(*slot, Handle { node: id, access: *access, append: *append, made: false });
            }
            Operation::Read { slot, offset, length } => {
                let handle = self.file_at(*slot)?;
                if !handle.access.reads() {
                    return Err(Errno::BADF);
                }
                let content = &self.node(handle.node).content;
                let from = (*offset as usize).min(content.len());
                let to = (from + length).min(content.len());
                return Ok(Outcome::Bytes(content[from..to].to_vec()));
            }
            Operation::Write { slot, offset, length, byte } => {
                let handle = self.file_at(*slot)?;
                if !handle.access.writes() {
                    return Err(Errno::BADF);
                }
                self.touch(handle.node);
                let content = &mut self.node_mut(handle.node).content;
                let from = if handle.append { content.len() } else { *offset as usize };
                if content.len() < from + length {
                    content.resize(from + length, 0);
                }
                content[from..from + length].fill(*byte);
            }
            Operation::Truncate { path, size } => {
                let id = self.find_followed(path)?;
                if self.node(id).kind == Kind::Directory {
                    return Err(Errno::ISDIR);
                }
                self.cut(id, *size);
            }
            Operation::TruncateOpen { slot, size } => {
                let handle = self.file_at(*slot)?;
                if !handle.access.writes() {
                    return Err(Errno::INVAL);
                }
                self.cut(handle.node, *size);
            }
            Operation::Allocate { slot, offset, length, how } => {
                let handle = self.file_at(*slot)?;
                if !handle.access.writes() {
                    return Err(Errno::BADF);
                }
                self.touch(handle.node);
                let content = &mut self.node_mut(handle.node).content;
                let end = (offset + length) as usize;
                match how {
                    Allocating::Extend if content.len() < end => content.resize(end, 0),
                    Allocating::Punch => {
                        let from = (*offset as usize).min(content.len());
                        let to = end.min(content.len());
                        content[from..to].fill(0);
                    }
                    _ => {}
                }
            }
            Operation::Close { slot } => self.close(*slot),
            Operation::Unlink { path } => {
                let (dir, name, there) = self.place(path)?;
                let id = there.ok_or(Errno::NOENT)?;
                if self.node(id).kind == Kind::Directory {
                    return Err(Errno::ISDIR);
                }
                self.remove(dir, name);
            }
            Operation::Mkdir { path, perm } => {
                let (dir, name, there) = self.place(path)?;
                if there.is_some() {
                    return Err(Errno::EXIST);
                }
                self.enter(dir, name, Node::new(Kind::Directory, *perm));
            }
            Operation::Rmdir { path } => {
                let (dir, name, there) = self.place(path)?;
                let id = there.ok_or(Errno::NOENT)?;
                self.must_be_empty(id)?;
                self.remove(dir, name);
            }
            Operation::Rename { from, to, how } => return self.rename(from, to, *how),
            Operation::Link { from, to } => {
                let id = self.find(from)?;
                let (dir, name, there) = self.place(to)?;
                if there.is_some() {
                    return Err(Errno::EXIST);
                }
                if self.node(id).kind == Kind::Directory {
                    return Err(Errno::PERM);
                }
                self.node_mut(dir).children.insert(name.to_owned(), id);
                self.touch(dir);
                self.node_mut(id).links += 1;
            }
            Operation::Symlink { path } => {
                let (dir, name, there) = self.place(path)?;
                if there.is_some() {
                    return Err(Errno::EXIST);
                }
                self.enter(dir, name, Node::new(Kind::Symlink, 0o777));
            }
            Operation::Readlink { path } => {
                let id = self.find(path)?;
                if self.node(id).kind != Kind::Symlink {
                    return Err(Errno::INVAL);
                }
                return Ok(Outcome::Target(LINK_TARGET.to_owned()));
            }
            Operation::Chmod { path, perm } => {
                let id = self.find_followed(path)?;
                self.node_mut(id).perm = *perm;
            }
            Operation::Utimens { path, seconds } => {
                let id = self.find_followed(path)?;
                self.node_mut(id).mtime = Some(*seconds);
            }
            Operation::SetXattr { path, name, byte, how } => {
                let id = self.find_followed(path)?;
                let xattrs = &mut self.node_mut(id).xattrs;
                match how {
                    Setting::Create if xattrs.contains_key(name) => return Err(Errno::EXIST),
                    Setting::Replace if !xattrs.contains_key(name) => return Err(Errno::NODATA),
                    _ => xattrs.insert(name.clone(), vec![*byte; 3]),
                };
            }
            Operation::RemoveXattr { path, name } => {
                let id = self.find_followed(path)?;
                self.node_mut(id).xattrs.remove(name).ok_or(Errno::NODATA)?;
            }
            Operation::ListXattr { path } => {
                let id = self.find_followed(path)?;
                return Ok(Outcome::Xattrs(self.node(id).xattrs.clone()));
            }
            Operation::List { path } => {
                let id = self.find_followed(path)?;
                if self.node(id).kind != Kind::Directory {
                    return Err(Errno::NOTDIR);
                }
                let names = self.node(id).children.iter().map(|(name, id)| (name.clone(), self.node(*id).kind));
                return Ok(Outcome::Names(names.collect()));
            }
            Operation::Stat { path } => return Ok(Outcome::Seen(self.seen(self.find(path)?))),
            Operation::StatOpen { slot } => {
                return Ok(Outcome::Seen(self.seen(self.file_at(*slot)?.node)));
            }
            Operation::Fsync { slot } => {
                self.file_at(*slot)?;
            }
            Operation::FsyncDir { path } => {
                let id = self.find_followed(path)?;
                if self.node(id).kind != Kind::Directory {
                    return Err(Errno::NOTDIR);
                }
            }
        }
        Ok(Outcome::Fine)
    }

    fn openable(&mut self, id: usize, truncate: bool) -> Result<usize, Errno> {
        match self.node(id).kind {
            Kind::Directory => Err(Errno::ISDIR),
            Kind::Symlink => Err(Errno::LOOP),
            Kind::File => {
                if truncate {
                    self.cut(id, 0);
                }
                Ok(id)
            }
        }
    }

    /// Opens a file in a slot, whose earlier file is closed.
    fn opened(&mut self, slot: usize, handle: Handle) {
        let before = self.handles[slot].replace(handle);
        if let Some(before) = before {
            self.reap(before.node);
        }
    }

    fn cut(&mut self, id: usize, size: u64) {
        self.touch(id);
        self.node_mut(id).content.resize(size as usize, 0);
    }

    fn must_be_empty(&self, id: usize) -> Result<(), Errno> {
        match self.node(id) {
            node if node.kind != Kind::Directory => Err(Errno::NOTDIR),
            node if !node.children.is_empty() => Err(Errno::NOTEMPTY),
            _ => Ok(()),
        }
    }

    fn rename(&mut self, from: &str, to: &str, how: Renaming) -> Answer {
        let (from_dir, from_name, there) = self.place(from)?;
        let (to_dir, to_name, target) = self.place(to)?;
        let id = there.ok_or(Errno::NOENT)?;
        match (how, target) {
            (Renaming::NoReplace, Some(_)) => return Err(Errno::EXIST),
            (Renaming::Exchange, None) => return Err(Errno::NOENT),
            _ => {}
        }
        if self.is_below(to_dir, id) {
            return Err(Errno::INVAL);
        }
        if target.is_some_and(|target| self.is_below(from_dir, target)) {
            return Err(if how == Renaming::Exchange { Errno::INVAL } else { Errno::NOTEMPTY });
        }
        if target == Some(id) {
            return Ok(Outcome::Fine);
        }
        let is_dir = |node: usize| self.node(node).kind == Kind::Directory;
        if let (Renaming::Exchange, Some(target)) = (how, target) {
            let shift = i32::from(is_dir(target)) - i32::from(is_dir(id));
            self.node_mut(from_dir).children.insert(from_name.to_owned(), target);
            self.node_mut(to_dir).children.insert(to_name.to_owned(), id);
            let links = &mut self.node_mut(from_dir).links;
            *links = links.saturating_add_signed(shift);
            let links = &mut self.node_mut(to_dir).links;
            *links = links.saturating_add_signed(-shift);
            self.touch(from_dir);
            self.touch(to_dir);
            return Ok(Outcome::Fine);
        }
        if let Some(target) = target {
            match (is_dir(id), is_dir(target)) {
                (false, true) => return Err(Errno::ISDIR),
                (true, false) => return Err(Errno::NOTDIR),
                (true, true) => self.must_be_empty(target)?,
                (false, false) => {}
            }
        }
        let moves_dir = is_dir(id);
        self.remove(to_dir, to_name);
        self.node_mut(from_dir).children.remove(from_name);
        self.node_mut(to_dir).children.insert(to_name.to_owned(), id);
        self.touch(from_dir);
        self.touch(to_dir);
        if moves_dir {
            self.node_mut(from_dir).links -= 1;
            self.node_mut(to_dir).links += 1;
        }
        Ok(Outcome::Fine)
    }
}

impl Node {
    /// A new node without content.
    pub fn new(kind: Kind, perm: u32) -> Self {
        Self {
            kind,
            perm,
            content: Vec::new(),
            children: BTreeMap::new(),
            links: if kind == Kind::Directory { 2 } else { 1 },
            xattrs: BTreeMap::new(),
            mtime: None,
        }
    }
}
