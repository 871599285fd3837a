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

/// Where a walk is: at a path of the host, or in a directory of the namespace.
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
    /// Where the path leads, relative to the descriptor `dirfd`. `follow`: a link at its end is followed.
    pub fn walk_at(&self, dirfd: i32, path: &[u8], follow: bool) -> Result<Walked, Errno> {
        if path.is_empty() {
            // The kernel says ENOENT.
            return Ok(Walked::Outside(None));
        }
        let root = self.supervisor.root_of(self.task);
        let at = if path[0] == b'/' {
            At::Out(root.clone())
        } else {
            match self.base(dirfd)? {
                Some(at) => at,
                None => return Ok(Walked::Outside(None)),
            }
        };
        let (rest, must_be_dir) = (Vec::new(), false);
        let mut walk = Walk { call: self, root, at, rest, must_be_dir, follow_last: follow, links: 0, entered: false };
        push(&mut walk.rest, path, &mut walk.must_be_dir);
        walk.run()
    }

    /// Like `walk_at`; the flags are those of fchmodat, fchownat, fstatat and similar calls.
    pub fn walk_flags(&self, dirfd: i32, path: &[u8], flags: i32) -> Result<Walked, Errno> {
        self.walk_at(dirfd, path, flags & libc::AT_SYMLINK_NOFOLLOW == 0)
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
    fn dir_at(&self, link: &str, text: &[u8]) -> Result<Option<FileId>, Errno> {
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

/// A walk that has not arrived.
struct Walk<'a> {
    call: &'a Call<'a>,
    /// The caller's root directory.
    root: Vec<u8>,
    at: At,
    /// The names that are left, the next one last.
    rest: Vec<Vec<u8>>,
    must_be_dir: bool,
    /// A link at the end of the path is followed.
    follow_last: bool,
    links: usize,
    /// The path passed through the directory.
    entered: bool,
}

impl Walk<'_> {
    fn run(mut self) -> Result<Walked, Errno> {
        while let Some(name) = self.rest.pop() {
            self.entered |= matches!(self.at, At::In(_));
            if name == b"." {
                continue;
            }
            let arrived = match self.at {
                At::Out(ref here) => {
                    let here = here.clone();
                    self.step_outside(here, &name)?
                }
                At::In(dir) => self.step_inside(dir, name)?,
            };
            if let Some(walked) = arrived {
                return Ok(walked);
            }
        }
        match self.at {
            At::Out(ref mut here) => {
                let here = std::mem::take(here);
                Ok(self.outside(here))
            }
            At::In(id) => Ok(self.inside(id, Vec::new(), Some(self.call.known(id)?))),
        }
    }

    /// The host's own name and links.
    fn step_outside(&mut self, mut here: Vec<u8>, name: &[u8]) -> Result<Option<Walked>, Errno> {
        let (last, follow) = (self.rest.is_empty(), self.follows());
        if name == b".." {
            if here != self.root {
                let end = here.iter().rposition(|byte| *byte == b'/').unwrap_or(0);
                here.truncate(end.max(1));
                self.at = At::Out(here);
            }
            return Ok(None);
        }
        let mut next = here;
        if next.last() != Some(&b'/') {
            next.push(b'/');
        }
        next.extend_from_slice(name);
        if next == self.call.supervisor.over {
            self.at = At::In(FileId::ROOT);
            return Ok(None);
        }
        if next.starts_with(b"/proc/") {
            let elsewhere = match self.magic(&mut next, follow)? {
                Magic::None => None,
                Magic::Dir(id) => Some(At::In(id)),
                Magic::File(known) if last => return Ok(Some(self.inside(FileId::ROOT, Vec::new(), Some(known)))),
                Magic::File(_) => return Err(Errno::NOTDIR),
                Magic::Elsewhere(path) => Some(At::Out(path)),
                Magic::Nowhere => return Ok(Some(Walked::Outside(None))),
            };
            if let Some(at) = elsewhere {
                self.at = at;
                return Ok(None);
            }
        }
        if !follow {
            return Ok(Some(self.outside(next)));
        }
        match rustix::fs::readlink(&*next, Vec::new()) {
            Ok(target) => {
                self.count_link()?;
                self.continue_with(&target.into_bytes());
            }
            Err(Errno::INVAL) => self.at = At::Out(next),
            // It is absent, or may not be read: the kernel returns the right error.
            Err(_) => {
                for name in self.rest.iter().rev() {
                    next.push(b'/');
                    next.extend_from_slice(name);
                }
                return Ok(Some(self.outside(next)));
            }
        }
        Ok(None)
    }

    /// A name and a link of the namespace.
    fn step_inside(&mut self, dir: FileId, name: Vec<u8>) -> Result<Option<Walked>, Errno> {
        let (last, follow) = (self.rest.is_empty(), self.follows());
        if name == b".." {
            self.at = self.above(dir);
            return Ok(None);
        }
        let found = match self.call.lookup(dir, &name) {
            Ok(found) => found,
            Err(fault) if fault.errno == Errno::NOENT && last => return Ok(Some(self.inside(dir, name, None))),
            Err(fault) => return Err(errno(fault)),
        };
        if found.attr.kind == Kind::Symlink && follow {
            self.count_link()?;
            let target = self.call.namespace().attributes.readlink(found.id).map_err(errno)?;
            self.continue_with(&target);
            return Ok(None);
        }
        if last {
            return Ok(Some(self.inside(dir, name, Some(found))));
        }
        if found.attr.kind != Kind::Directory {
            return Err(Errno::NOTDIR);
        }
        self.at = At::In(found.id);
        Ok(None)
    }

    /// Whether a link under the name that was just taken is followed.
    fn follows(&self) -> bool {
        !self.rest.is_empty() || self.follow_last || self.must_be_dir
    }

    fn count_link(&mut self) -> Result<(), Errno> {
        self.links += 1;
        if self.links > LINKS_MAX { Err(Errno::LOOP) } else { Ok(()) }
    }

    /// Continues with a link's target.
    fn continue_with(&mut self, target: &[u8]) {
        if target.first() == Some(&b'/') {
            self.at = At::Out(self.root.clone());
        }
        push(&mut self.rest, target, &mut self.must_be_dir);
    }

    fn outside(&self, path: Vec<u8>) -> Walked {
        Walked::Outside(self.entered.then_some(path))
    }

    fn inside(&self, dir: FileId, name: Vec<u8>, found: Option<Known>) -> Walked {
        Walked::Inside(Spot { dir, name, found, must_be_dir: self.must_be_dir })
    }

    fn above(&self, dir: FileId) -> At {
        if dir != FileId::ROOT {
            return At::In(self.call.namespace().listings.parent(dir));
        }
        let over = &self.call.supervisor.over;
        let end = over.iter().rposition(|byte| *byte == b'/').unwrap_or(0);
        At::Out(over[..end.max(1)].to_vec())
    }

    /// Links below /proc that lead to an open file, whatever their text is.
    fn magic(&self, next: &mut Vec<u8>, follow: bool) -> Result<Magic, Errno> {
        let text = String::from_utf8_lossy(next).into_owned();
        let parts: Vec<&str> = text.split('/').skip(2).collect();
        match parts.as_slice() {
            // The caller's own entry, not the agent's.
            ["self" | "thread-self"] if follow => {
                *next = format!("/proc/{}", self.call.task.tid).into_bytes();
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
        if self.call.supervisor.is_below(&target)
            && let Some(id) = self.call.dir_at(&text, &target)?
        {
            return Ok(Magic::Dir(id));
        }
        match self.call.object(&text)? {
            Some(known) => Ok(Magic::File(known)),
            None => Ok(Magic::Elsewhere(target)),
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
