//! Paths: does one lead inside the directory or outside, through any links?
//!
//! Outside, the agent reads the host's own links, from the caller's root; inside, it asks the namespace. A program that
//! changes a path meanwhile gets the result of one of the two paths; it deceives only itself.

use rustix::io::Errno;
use surgetank_types::model::{FileId, Kind};

use super::call::{Call, Known, errno};

/// The kernel's limit.
const LINKS_MAX: usize = 40;

/// A place inside the directory.
#[derive(Debug)]
pub struct Spot {
    pub dir: FileId,
    /// Empty: the path means `found` itself, under any name.
    pub name: Vec<u8>,
    pub found: Option<Known>,
    /// The path ends with a slash.
    pub must_be_dir: bool,
}

pub enum Walked {
    /// The path's destination, if the path passed through the directory (by one of its links, or out of it). What the
    /// kernel finds there depends on what is drained.
    Outside(Option<Vec<u8>>),
    Inside(Spot),
}

/// The start of a relative path.
enum At {
    Out(Vec<u8>),
    In(FileId),
}

impl Spot {
    pub fn known(&self) -> Result<Known, Errno> {
        match self.found {
            Some(known) if self.must_be_dir && known.attr.kind != Kind::Directory => Err(Errno::NOTDIR),
            Some(known) => Ok(known),
            None => Err(Errno::NOENT),
        }
    }
}

impl Call<'_> {
    /// The path at an argument, relative to the descriptor at another.
    pub fn walk_at(&self, dirfd: i32, path: &[u8], follow: bool) -> Result<Walked, Errno> {
        if path.is_empty() {
            // The kernel says ENOENT.
            return Ok(Walked::Outside(None));
        }
        let root = self.supervisor.root_of(self.task);
        let mut entered = false;
        let mut at = if path[0] == b'/' {
            At::Out(root.clone())
        } else {
            match self.base(dirfd)? {
                Some(at) => at,
                None => return Ok(Walked::Outside(None)),
            }
        };
        let mut must_be_dir = false;
        let mut rest: Vec<Vec<u8>> = Vec::new();
        push(&mut rest, path, &mut must_be_dir);
        let follow_last = follow;
        let mut links = 0;
        while let Some(name) = rest.pop() {
            entered |= matches!(at, At::In(_));
            let last = rest.is_empty();
            let follow = !last || follow_last || must_be_dir;
            if name == b"." {
                continue;
            }
            match at {
                At::Out(ref mut here) => {
                    if name == b".." {
                        if *here != root {
                            let end = here.iter().rposition(|byte| *byte == b'/').unwrap_or(0);
                            here.truncate(end.max(1));
                        }
                        continue;
                    }
                    let mut next = here.clone();
                    if next.last() != Some(&b'/') {
                        next.push(b'/');
                    }
                    next.extend_from_slice(&name);
                    if next == self.supervisor.over {
                        at = At::In(FileId::ROOT);
                        continue;
                    }
                    if next.starts_with(b"/proc/") {
                        match self.magic(&mut next, follow)? {
                            Magic::None => {}
                            Magic::Dir(id) => {
                                at = At::In(id);
                                continue;
                            }
                            Magic::File(known) if last => {
                                return Ok(Walked::Inside(Spot {
                                    dir: FileId::ROOT,
                                    name: Vec::new(),
                                    found: Some(known),
                                    must_be_dir,
                                }));
                            }
                            Magic::File(_) => return Err(Errno::NOTDIR),
                            Magic::Elsewhere(path) => {
                                at = At::Out(path);
                                continue;
                            }
                            Magic::Nowhere => return Ok(Walked::Outside(None)),
                        }
                    }
                    if !follow {
                        return Ok(Walked::Outside(entered.then_some(next)));
                    }
                    match rustix::fs::readlink(&*next, Vec::new()) {
                        Ok(target) => {
                            links += 1;
                            if links > LINKS_MAX {
                                return Err(Errno::LOOP);
                            }
                            let target = target.into_bytes();
                            if target.first() == Some(&b'/') {
                                at = At::Out(root.clone());
                            }
                            push(&mut rest, &target, &mut must_be_dir);
                        }
                        Err(Errno::INVAL) => at = At::Out(next),
                        // It is absent, or may not be read: the kernel returns the right error.
                        Err(_) => {
                            for name in rest.iter().rev() {
                                next.push(b'/');
                                next.extend_from_slice(name);
                            }
                            return Ok(Walked::Outside(entered.then_some(next)));
                        }
                    }
                }
                At::In(dir) => {
                    if name == b".." {
                        at = self.above(dir);
                        continue;
                    }
                    let found = match self.lookup(dir, &name) {
                        Ok(found) => found,
                        Err(fault) if fault.errno == Errno::NOENT && last => {
                            return Ok(Walked::Inside(Spot { dir, name, found: None, must_be_dir }));
                        }
                        Err(fault) => return Err(errno(fault)),
                    };
                    if found.attr.kind == Kind::Symlink && follow {
                        links += 1;
                        if links > LINKS_MAX {
                            return Err(Errno::LOOP);
                        }
                        let target = self.namespace().attributes.readlink(found.id).map_err(errno)?;
                        if target.first() == Some(&b'/') {
                            at = At::Out(root.clone());
                        }
                        push(&mut rest, &target, &mut must_be_dir);
                        continue;
                    }
                    if last {
                        return Ok(Walked::Inside(Spot { dir, name, found: Some(found), must_be_dir }));
                    }
                    if found.attr.kind != Kind::Directory {
                        return Err(Errno::NOTDIR);
                    }
                    at = At::In(found.id);
                }
            }
        }
        match at {
            At::Out(here) => Ok(Walked::Outside(entered.then_some(here))),
            At::In(id) => {
                Ok(Walked::Inside(Spot { dir: id, name: Vec::new(), found: Some(self.known(id)?), must_be_dir }))
            }
        }
    }

    fn above(&self, dir: FileId) -> At {
        if dir != FileId::ROOT {
            return At::In(self.namespace().listings.parent(dir));
        }
        let over = &self.supervisor.over;
        let end = over.iter().rposition(|byte| *byte == b'/').unwrap_or(0);
        At::Out(over[..end.max(1)].to_vec())
    }

    /// `None`: outside the directory (not a directory, no such descriptor).
    fn base(&self, dirfd: i32) -> Result<Option<At>, Errno> {
        let link = self.link_of(dirfd);
        let text = match rustix::fs::readlink(&*link, Vec::new()) {
            Ok(text) => text.into_bytes(),
            // Too deep for the kernel to report its path: inside if the agent granted it.
            Err(Errno::NAMETOOLONG) => {
                let stat = rustix::fs::stat(&*link)?;
                let ours = self.supervisor.dir(stat.st_dev, stat.st_ino);
                return ours.map(|id| Some(At::In(id))).ok_or(Errno::NAMETOOLONG);
            }
            Err(_) => return Ok(None),
        };
        if text.first() != Some(&b'/') {
            return Ok(None);
        }
        if !self.supervisor.is_below(&text) {
            return Ok(Some(At::Out(text)));
        }
        Ok(self.dir_at(&link, &text)?.map(At::In))
    }

    /// The link in /proc for the start of a relative path.
    pub fn link_of(&self, dirfd: i32) -> String {
        match dirfd {
            libc::AT_FDCWD => self.task.proc("cwd"),
            number => self.task.proc(&format!("fd/{number}")),
        }
    }

    /// The served directory to which a link in /proc leads.
    pub fn dir_at(&self, link: &str, text: &[u8]) -> Result<Option<FileId>, Errno> {
        let Ok(stat) = rustix::fs::stat(link) else { return Ok(None) };
        if stat.st_mode & libc::S_IFMT != libc::S_IFDIR {
            return Ok(None);
        }
        if let Some(id) = self.supervisor.dir(stat.st_dev, stat.st_ino) {
            return Ok(Some(id));
        }
        if stat.st_nlink == 0 || text.ends_with(b" (deleted)") {
            return Err(Errno::NOENT);
        }
        // The process opened it before the agent started.
        let mut id = FileId::ROOT;
        for name in text[self.supervisor.over.len()..].split(|byte| *byte == b'/').filter(|name| !name.is_empty()) {
            id = self.lookup(id, name).map_err(errno)?.id;
        }
        self.supervisor.remember_dir(stat.st_dev, stat.st_ino, id);
        self.keep(id);
        Ok(Some(id))
    }

    /// Links below /proc that lead to an open file, whatever their text is.
    fn magic(&self, next: &mut Vec<u8>, follow: bool) -> Result<Magic, Errno> {
        let text = String::from_utf8_lossy(next).into_owned();
        let parts: Vec<&str> = text.split('/').skip(2).collect();
        match parts.as_slice() {
            // The caller's own entry, not the agent's.
            ["self" | "thread-self"] if follow => {
                *next = format!("/proc/{}", self.task.tid).into_bytes();
                return Ok(Magic::Elsewhere(next.clone()));
            }
            [_, "fd", _]
            | [_, "task", _, "fd", _]
            | [_, "cwd" | "root" | "exe"]
            | [_, "task", _, "cwd" | "root" | "exe"]
                if follow => {}
            _ => return Ok(Magic::None),
        }
        let Ok(target) = rustix::fs::readlink(&text, Vec::new()) else { return Ok(Magic::Nowhere) };
        let target = target.into_bytes();
        if target.first() != Some(&b'/') {
            return Ok(Magic::Nowhere);
        }
        if self.supervisor.is_below(&target)
            && let Some(id) = self.dir_at(&text, &target)?
        {
            return Ok(Magic::Dir(id));
        }
        match self.object(&text)? {
            Some(known) => Ok(Magic::File(known)),
            None => Ok(Magic::Elsewhere(target)),
        }
    }

    /// The served file of a descriptor.
    pub fn of_descriptor(&self, number: i32) -> Result<Option<Known>, Errno> {
        if number < 0 {
            return Ok(None);
        }
        self.object(&self.task.proc(&format!("fd/{number}")))
    }

    pub fn object(&self, link: &str) -> Result<Option<Known>, Errno> {
        let Ok(stat) = rustix::fs::stat(link) else { return Ok(None) };
        match stat.st_mode & libc::S_IFMT {
            libc::S_IFDIR if stat.st_dev == self.supervisor.over_dev => {
                if let Some(id) = self.supervisor.dir(stat.st_dev, stat.st_ino) {
                    return self.known(id).map(Some);
                }
                let Ok(text) = rustix::fs::readlink(link, Vec::new()) else { return Ok(None) };
                let text = text.into_bytes();
                if !self.supervisor.is_below(&text) {
                    return Ok(None);
                }
                self.dir_at(link, &text)?.map(|id| self.known(id)).transpose()
            }
            libc::S_IFDIR => Ok(None),
            kind => {
                let Some(id) = self.supervisor.file(stat.st_dev, stat.st_ino) else { return Ok(None) };
                // The file's name is forgotten by now; its id still identifies it. (Outside, another file may have a
                // deleted fifo's number.)
                let is_it = |known: &Known| {
                    known.attr.kind.type_bits() == kind && (known.attr.kind == Kind::File || known.attr.links > 0)
                };
                Ok(self.known(id).ok().filter(is_it))
            }
        }
    }
}

enum Magic {
    None,
    Dir(FileId),
    File(Known),
    /// Continue with this path.
    Elsewhere(Vec<u8>),
    Nowhere,
}

/// Puts the components before those that are left to walk.
fn push(rest: &mut Vec<Vec<u8>>, path: &[u8], must_be_dir: &mut bool) {
    if rest.is_empty() && path.ends_with(b"/") {
        *must_be_dir = true;
    }
    let parts: Vec<&[u8]> = path.split(|byte| *byte == b'/').filter(|part| !part.is_empty()).collect();
    if rest.is_empty() && parts.last().is_some_and(|last| *last == b".") {
        *must_be_dir = true;
    }
    rest.extend(parts.into_iter().rev().map(<[u8]>::to_vec));
}
