//! The namespace as programs reach it: walks paths, and makes the checks that the kernel makes before it sends a request.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::Errno;
use surgetank_core::namespace::{Door, Namespace, SetAttr};
use surgetank_types::error::FsResult;
use surgetank_types::model::{self, Attr, Caller, FileId, Timestamp};

use surgetank_testkit::model::operation::{Access, Allocating, Operation, Renaming, SLOTS, Setting};
use surgetank_testkit::model::reference::{Answer, Kind, LINK_TARGET, Outcome, Seen};

/// A kernel that accepts every offered plain file; direct reads and writes still go through the namespace.
struct Kernel {
    backed: AtomicU32,
}

impl Door for Kernel {
    fn passes_through(&self) -> bool {
        true
    }
    fn back(&self, _file: BorrowedFd<'_>) -> std::io::Result<u32> {
        Ok(self.backed.fetch_add(1, Ordering::Relaxed) + 1)
    }
    fn unback(&self, _backing: u32) {}
    fn invalidate(&self, _file: FileId, _attributes_only: bool) -> bool {
        true
    }
    fn invalidate_name(&self, _dir: FileId, _name: &[u8]) {}
    fn await_closes(&self) {}
}

#[derive(Clone, Copy)]
struct Slot {
    handle: u64,
    id: FileId,
    access: Access,
    append: bool,
}

pub struct Mounted {
    pub namespace: Arc<Namespace>,
    pub caller: Caller,
    slots: [Option<Slot>; SLOTS],
    /// References that the kernel holds.
    lookups: HashMap<FileId, u64>,
    /// The kernel forgets unopened inodes at once.
    forgets: bool,
}

fn kind_of(kind: model::Kind) -> Kind {
    match kind {
        model::Kind::File => Kind::File,
        model::Kind::Directory => Kind::Directory,
        model::Kind::Symlink => Kind::Symlink,
        other => panic!("a {other:?}, which the test did not make"),
    }
}

impl Mounted {
    pub fn new(namespace: Arc<Namespace>, direct: bool, forgets: bool) -> Self {
        if direct {
            namespace.set_door(Arc::new(Kernel { backed: AtomicU32::new(0) }));
        }
        let caller = Caller {
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            pid: std::process::id(),
            umask: 0,
        };
        Self { namespace, caller, slots: [None; SLOTS], lookups: HashMap::new(), forgets }
    }

    pub fn apply(&mut self, operation: &Operation) -> (Outcome, Option<Attr>) {
        let mut attr = None;
        let outcome = self.answer(operation, &mut attr).unwrap_or_else(Outcome::Failed);
        if self.forgets {
            self.forget();
        }
        (outcome, attr)
    }

    pub fn forget(&mut self) {
        // The kernel keeps open files, and the directories above kept inodes.
        let open: Vec<FileId> = self.slots.iter().flatten().map(|slot| slot.id).collect();
        for (id, count) in std::mem::take(&mut self.lookups) {
            if open.contains(&id) {
                self.lookups.insert(id, count);
            } else {
                self.namespace.resolver.forget(id, count);
            }
        }
    }

    pub fn close_all(&mut self) {
        for slot in self.slots.iter_mut().filter_map(Option::take) {
            self.namespace.files.opener.release(slot.handle);
        }
    }

    /// All bytes of a file, through a separate handle.
    pub fn content(&mut self, path: &str) -> Result<Vec<u8>, Errno> {
        let there = self.find(path)?;
        let opened = errno_of(self.namespace.files.opener.open_file(&self.caller, there.id, libc::O_RDONLY))?;
        let mut bytes = vec![0; there.attr.size_bytes as usize + 1];
        let count = errno_of(self.namespace.files.transfers.read(opened.handle, 0, &mut bytes));
        self.namespace.files.opener.release(opened.handle);
        bytes.truncate(count?);
        if self.forgets {
            self.forget();
        }
        Ok(bytes)
    }

    fn met(&mut self, id: FileId) {
        *self.lookups.entry(id).or_insert(0) += 1;
    }

    fn child(&mut self, dir: FileId, kind: Kind, name: &str) -> Result<Met, Errno> {
        match kind {
            Kind::Directory => {}
            Kind::File => return Err(Errno::NOTDIR),
            Kind::Symlink => return Err(Errno::NOENT),
        }
        let found = self.namespace.resolver.lookup(&self.caller, dir, name.as_bytes()).map_err(|fault| fault.errno)?;
        self.met(found.id);
        Ok(Met { id: found.id, kind: kind_of(found.attr.kind), attr: found.attr })
    }

    fn find(&mut self, path: &str) -> Result<Met, Errno> {
        let root = self.namespace.attributes.getattr(FileId::ROOT, None).map_err(|fault| fault.errno)?;
        let mut at = Met { id: FileId::ROOT, kind: Kind::Directory, attr: root.attr };
        for name in path.split('/').filter(|name| !name.is_empty()) {
            at = self.child(at.id, at.kind, name)?;
        }
        Ok(at)
    }

    fn find_followed(&mut self, path: &str) -> Result<Met, Errno> {
        let found = self.find(path)?;
        if found.kind == Kind::Symlink { Err(Errno::NOENT) } else { Ok(found) }
    }

    fn place<'a>(&mut self, path: &'a str) -> Result<(FileId, &'a [u8], Option<Met>), Errno> {
        let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
        let dir = self.find(dir)?;
        let there = match self.child(dir.id, dir.kind, name) {
            Ok(found) => Some(found),
            Err(Errno::NOENT) if dir.kind == Kind::Directory => None,
            Err(errno) => return Err(errno),
        };
        Ok((dir.id, name.as_bytes(), there))
    }

    fn slot(&self, slot: usize) -> Result<Slot, Errno> {
        self.slots[slot].ok_or(Errno::BADF)
    }

    fn opened(&mut self, slot: usize, opened: Slot) {
        if let Some(before) = self.slots[slot].replace(opened) {
            self.namespace.files.opener.release(before.handle);
        }
    }

    fn seen(attr: &Attr) -> Seen {
        let kind = kind_of(attr.kind);
        Seen {
            kind,
            perm: attr.perm,
            links: attr.links,
            size: if kind == Kind::Directory { 0 } else { attr.size_bytes },
            mtime: (kind == Kind::File).then_some(attr.mtime.secs()),
        }
    }

    fn answer(&mut self, operation: &Operation, attr: &mut Option<Attr>) -> Answer {
        let caller = self.caller;
        let namespace = self.namespace.clone();
        match operation {
            Operation::Create { path, slot, perm, access, exclusive, append, truncate } => {
                let (dir, name, there) = self.place(path)?;
                if !exclusive && there.is_some_and(|there| there.kind == Kind::Symlink) {
                    return Err(Errno::LOOP);
                }
                let flags = flags(*access, *append, *truncate) | if *exclusive { libc::O_EXCL } else { 0 };
                let (found, opened) = errno_of(namespace.names.create(&caller, dir, name, *perm, flags))?;
                self.met(found.id);
                self.opened(*slot, Slot { handle: opened.handle, id: found.id, access: *access, append: *append });
            }
            Operation::Open { path, slot, access, append, truncate } => {
                let there = self.find(path)?;
                if there.kind == Kind::Symlink {
                    return Err(Errno::LOOP);
                }
                let opened =
                    errno_of(namespace.files.opener.open_file(&caller, there.id, flags(*access, *append, *truncate)))?;
                self.opened(*slot, Slot { handle: opened.handle, id: there.id, access: *access, append: *append });
            }
            Operation::Read { slot, offset, length } => {
                let slot = self.slot(*slot)?;
                if !slot.access.reads() {
                    return Err(Errno::BADF);
                }
                let mut buffer = vec![0; *length];
                let count = errno_of(namespace.files.transfers.read(slot.handle, *offset, &mut buffer))?;
                buffer.truncate(count);
                return Ok(Outcome::Bytes(buffer));
            }
            Operation::Write { slot, offset, length, byte } => {
                let slot = self.slot(*slot)?;
                if !slot.access.writes() {
                    return Err(Errno::BADF);
                }
                let data = vec![*byte; *length];
                let offset = if slot.append {
                    errno_of(namespace.attributes.getattr(slot.id, None))?.attr.size_bytes
                } else {
                    *offset
                };
                let mut done = 0;
                while done < data.len() {
                    done += errno_of(namespace.files.transfers.write(
                        slot.handle,
                        offset + done as u64,
                        &data[done..],
                        slot.append,
                    ))?;
                }
            }
            Operation::Truncate { path, size } => {
                let there = self.find_followed(path)?;
                let change = SetAttr { size_bytes: Some(*size), ..SetAttr::default() };
                errno_of(namespace.attributes.setattr(&caller, there.id, None, &change))?;
            }
            Operation::TruncateOpen { slot, size } => {
                let slot = self.slot(*slot)?;
                if !slot.access.writes() {
                    return Err(Errno::INVAL);
                }
                let change = SetAttr { size_bytes: Some(*size), ..SetAttr::default() };
                errno_of(namespace.attributes.setattr(&caller, slot.id, Some(slot.handle), &change))?;
            }
            Operation::Allocate { slot, offset, length, how } => {
                let slot = self.slot(*slot)?;
                if !slot.access.writes() {
                    return Err(Errno::BADF);
                }
                let mode = match how {
                    Allocating::Extend => 0,
                    Allocating::KeepSize => libc::FALLOC_FL_KEEP_SIZE,
                    Allocating::Punch => libc::FALLOC_FL_KEEP_SIZE | libc::FALLOC_FL_PUNCH_HOLE,
                };
                errno_of(namespace.files.transfers.allocate(slot.handle, mode as u32, *offset, *length))?;
            }
            Operation::Close { slot } => {
                if let Some(slot) = self.slots[*slot].take() {
                    namespace.files.opener.release(slot.handle);
                }
            }
            Operation::Unlink { path } => {
                let (dir, name, _) = self.place(path)?;
                errno_of(namespace.names.unlink(&caller, dir, name))?;
            }
            Operation::Mkdir { path, perm } => {
                let (dir, name, _) = self.place(path)?;
                let found = errno_of(namespace.names.mkdir(&caller, dir, name, *perm))?;
                self.met(found.id);
            }
            Operation::Rmdir { path } => {
                let (dir, name, _) = self.place(path)?;
                errno_of(namespace.names.rmdir(&caller, dir, name))?;
            }
            Operation::Rename { from, to, how } => {
                let (from_dir, from_name, _) = self.place(from)?;
                let (to_dir, to_name, _) = self.place(to)?;
                let flags = match how {
                    Renaming::Plain => 0,
                    Renaming::NoReplace => libc::RENAME_NOREPLACE,
                    Renaming::Exchange => libc::RENAME_EXCHANGE,
                };
                errno_of(namespace.names.rename(&caller, from_dir, from_name, to_dir, to_name, flags))?;
            }
            Operation::Link { from, to } => {
                let id = self.find(from)?.id;
                let (dir, name, _) = self.place(to)?;
                let found = errno_of(namespace.names.link(&caller, id, dir, name))?;
                self.met(found.id);
            }
            Operation::Symlink { path } => {
                let (dir, name, _) = self.place(path)?;
                let found = errno_of(namespace.names.symlink(&caller, dir, name, LINK_TARGET.as_bytes()))?;
                self.met(found.id);
            }
            Operation::Readlink { path } => {
                let there = self.find(path)?;
                let target = errno_of(namespace.attributes.readlink(there.id))?;
                return Ok(Outcome::Target(String::from_utf8(target.into_vec()).unwrap()));
            }
            Operation::Chmod { path, perm } => {
                let there = self.find_followed(path)?;
                errno_of(namespace.attributes.setattr(
                    &caller,
                    there.id,
                    None,
                    &SetAttr { perm: Some(*perm), ..SetAttr::default() },
                ))?;
            }
            Operation::Utimens { path, seconds } => {
                let there = self.find_followed(path)?;
                let mtime = Some(Timestamp::from_parts(*seconds, 0));
                errno_of(namespace.attributes.setattr(
                    &caller,
                    there.id,
                    None,
                    &SetAttr { mtime, ..SetAttr::default() },
                ))?;
            }
            Operation::SetXattr { path, name, byte, how } => {
                let there = self.find_followed(path)?;
                let flags = match how {
                    Setting::Any => 0,
                    Setting::Create => libc::XATTR_CREATE,
                    Setting::Replace => libc::XATTR_REPLACE,
                };
                errno_of(namespace.xattrs.setxattr(&caller, there.id, name.as_bytes(), &[*byte; 3], flags))?;
            }
            Operation::RemoveXattr { path, name } => {
                let there = self.find_followed(path)?;
                errno_of(namespace.xattrs.removexattr(&caller, there.id, name.as_bytes()))?;
            }
            Operation::ListXattr { path } => {
                let there = self.find_followed(path)?;
                let names = errno_of(namespace.xattrs.listxattr(there.id))?;
                let mut found = BTreeMap::new();
                for name in names.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
                    let value = errno_of(namespace.xattrs.getxattr(there.id, name))?;
                    found.insert(String::from_utf8(name.to_vec()).unwrap(), value);
                }
                return Ok(Outcome::Xattrs(found));
            }
            Operation::List { path } => {
                let there = self.find_followed(path)?;
                return self.list(there);
            }
            Operation::Stat { path } => {
                let there = self.find(path)?;
                let again = errno_of(namespace.attributes.getattr(there.id, None))?.attr;
                assert_eq!(Self::seen(&again), Self::seen(&there.attr), "lookup and getattr of {path} differ");
                *attr = Some(again);
                return Ok(Outcome::Seen(Self::seen(&again)));
            }
            Operation::StatOpen { slot } => {
                let slot = self.slot(*slot)?;
                let now = errno_of(namespace.attributes.getattr(slot.id, Some(slot.handle)))?.attr;
                *attr = Some(now);
                return Ok(Outcome::Seen(Self::seen(&now)));
            }
            Operation::Fsync { slot } => {
                let slot = self.slot(*slot)?;
                errno_of(namespace.files.syncs.fsync(slot.handle, false))?;
            }
            Operation::FsyncDir { path } => {
                let there = self.find_followed(path)?;
                if there.kind != Kind::Directory {
                    return Err(Errno::NOTDIR);
                }
                errno_of(namespace.files.syncs.fsync_dir(there.id))?;
            }
        }
        Ok(Outcome::Fine)
    }

    fn list(&mut self, dir: Met) -> Answer {
        let listing = errno_of(self.namespace.listings.opendir(&self.caller, dir.id))?.fh;
        let entries = errno_of(self.namespace.listings.listing(listing, 0))?;
        self.namespace.listings.releasedir(listing);
        let mut names = BTreeMap::new();
        for entry in entries.iter() {
            let name = String::from_utf8(entry.name.to_vec()).unwrap();
            let found =
                self.child(dir.id, dir.kind, &name).unwrap_or_else(|errno| panic!("{name} is listed but {errno:?}"));
            assert_eq!(found.attr.ino, entry.ino, "the listing has another inode number for {name}");
            let before = names.insert(name, kind_of(entry.kind));
            assert!(before.is_none(), "listed twice");
        }
        Ok(Outcome::Names(names))
    }
}

#[derive(Clone, Copy)]
struct Met {
    id: FileId,
    kind: Kind,
    attr: Attr,
}

fn errno_of<T>(result: FsResult<T>) -> Result<T, Errno> {
    result.map_err(|fault| fault.errno)
}

fn flags(access: Access, append: bool, truncate: bool) -> i32 {
    let mut flags = match access {
        Access::Read => libc::O_RDONLY,
        Access::Write => libc::O_WRONLY,
        Access::Both => libc::O_RDWR,
    };
    if append {
        flags |= libc::O_APPEND;
    }
    if truncate {
        flags |= libc::O_TRUNC;
    }
    flags
}
