//! Opens, enters, executes: calls that give a program a file which the kernel then serves by itself.

use std::ffi::CString;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use rustix::fs::inotify::{self, WatchFlags};
use rustix::io::Errno;
use surgetank_core::namespace::Real;
use surgetank_types::clock;
use surgetank_types::model::{Caller, FileId, Kind};

use super::call::{Answer, Answered, Call, Known, errno};
use super::walk::{Spot, Walked};
use super::{program, task};

/// If the kernel must find a change in the store, the call waits at most this long for its drain.
const PATIENCE: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(2);
const SCRIPTS_MAX: usize = 5;
const TRIES_MAX: usize = 100;

/// struct open_how
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
struct How {
    flags: u64,
    mode: u64,
    resolve: u64,
}

impl Call<'_> {
    pub(super) fn openat2(&self) -> Answered {
        if self.arg(3) < size_of::<How>() as u64 {
            return Ok(Answer::Continue);
        }
        let how: How = self.task.get(self.arg(2))?;
        let path = self.path(1)?;
        if how.resolve == 0 {
            return self.open(self.int(0), 1, how.flags as i32, how.mode as u32);
        }
        // Only the kernel itself can guarantee how a path is resolved.
        match self.walk_at(self.int(0), &path, how.flags as i32 & libc::O_NOFOLLOW == 0)? {
            Walked::Outside(to) => self.go_outside(self.int(0), &path, to.as_deref()),
            Walked::Inside(_) => self.refuse("openat2 with RESOLVE flags", Errno::NOSYS),
        }
    }

    pub(super) fn open(&self, dirfd: i32, path: usize, flags: i32, mode: u32) -> Answered {
        let path = self.path(path)?;
        let creates = flags & libc::O_CREAT != 0;
        let excludes = creates && flags & libc::O_EXCL != 0;
        let follow = flags & libc::O_NOFOLLOW == 0 && !excludes;
        for _ in 0..TRIES_MAX {
            let spot = match self.walk_at(dirfd, &path, follow)? {
                Walked::Outside(to) => return self.go_outside(dirfd, &path, to.as_deref()),
                Walked::Inside(spot) => spot,
            };
            if creates && flags & libc::O_DIRECTORY != 0 {
                return Err(Errno::INVAL);
            }
            if flags & libc::O_TMPFILE == libc::O_TMPFILE {
                // As in file systems without the feature: a program with that errno creates a named file.
                if spot.known()?.attr.kind != Kind::Directory {
                    return Err(Errno::NOTDIR);
                }
                return self.refuse("files without a name (O_TMPFILE)", Errno::OPNOTSUPP);
            }
            // As in the kernel for a slash after a name, whichever file has it.
            if creates && spot.must_be_dir && !spot.name.is_empty() {
                return Err(Errno::ISDIR);
            }
            let file: OwnedFd = match spot.found {
                Some(_) if excludes => return Err(Errno::EXIST),
                Some(known) => match self.open_known(&spot, known, flags) {
                    // The file was deleted meanwhile: as if it had never existed.
                    Err(Errno::NOENT | Errno::STALE) if !spot.name.is_empty() => continue,
                    // A deleted directory that is a process's working directory.
                    Err(Errno::STALE) => return Err(Errno::NOENT),
                    other => match other? {
                        Some(file) => file,
                        None => return self.special(dirfd, &path, &spot, known.id),
                    },
                },
                None if !creates => return Err(Errno::NOENT),
                None => match self.create(&spot, flags, mode) {
                    Err(Errno::EXIST) if !excludes => continue,
                    other => other?,
                },
            };
            return Ok(Answer::Descriptor { file, close_on_exec: flags & libc::O_CLOEXEC != 0 });
        }
        Err(Errno::AGAIN)
    }

    fn create(&self, spot: &Spot, flags: i32, mode: u32) -> Result<OwnedFd, Errno> {
        let caller = self.creator()?;
        self.namespace().files.descriptors.catch_up();
        let perm = mode & 0o7777 & !caller.umask;
        let (id, file) = self
            .namespace()
            .grants
            .create_plain(&caller, spot.dir, &spot.name, perm, flags & !libc::O_EXCL)
            .map_err(errno)?;
        self.remember(id, rustix::fs::fstat(&file));
        if flags & libc::O_ACCMODE == libc::O_RDONLY {
            drop(file);
            // The mode does not restrict the process that creates the file.
            let maker = Caller { uid: 0, ..caller };
            let flags = flags & !(libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC);
            let file = self.namespace().grants.open_plain(&maker, id, flags).map_err(errno)?;
            self.remember(id, rustix::fs::fstat(&file));
            (self.supervisor.gave)(self.task.tid, id, flags, false);
            return Ok(file.into());
        }
        (self.supervisor.gave)(self.task.tid, id, flags, true);
        Ok(file.into())
    }

    fn remember(&self, id: FileId, there: Result<rustix::fs::Stat, Errno>) {
        if let Ok(stat) = there
            && self.supervisor.remember_file(stat.st_dev, stat.st_ino, id)
        {
            self.keep(id);
        }
    }

    fn plain(&self, id: FileId, flags: i32) -> Result<OwnedFd, Errno> {
        let caller = self.caller()?;
        let writes = flags & libc::O_ACCMODE != libc::O_RDONLY || flags & libc::O_TRUNC != 0;
        if writes {
            self.namespace().files.descriptors.catch_up();
        }
        let file = self.namespace().grants.open_plain(&caller, id, flags).map_err(errno)?;
        self.remember(id, rustix::fs::fstat(&file));
        (self.supervisor.gave)(self.task.tid, id, flags, false);
        // The agent does not see writes to the plain file.
        if writes && caller.uid != 0 {
            self.namespace().attributes.clear_suidgid(&caller, id);
        }
        Ok(file.into())
    }

    /// `None`: the kernel opens it itself.
    fn open_known(&self, spot: &Spot, known: Known, flags: i32) -> Result<Option<OwnedFd>, Errno> {
        let path_only = flags & libc::O_PATH != 0;
        let writes = flags & libc::O_ACCMODE != libc::O_RDONLY || flags & libc::O_TRUNC != 0;
        if flags & libc::O_NOATIME != 0 && !path_only {
            let caller = self.caller()?;
            if caller.uid != 0 && caller.uid != known.attr.uid {
                return Err(Errno::PERM);
            }
        }
        match known.attr.kind {
            Kind::Directory if flags & libc::O_CREAT != 0 || writes && !path_only => Err(Errno::ISDIR),
            Kind::Directory => {
                if !path_only {
                    self.namespace().attributes.access(&self.caller()?, known.id, 4).map_err(errno)?;
                }
                // The kernel injects no O_PATH descriptors: a readable one can do everything that an O_PATH one can.
                self.directory(known.id, flags & libc::O_NOATIME).map(|(file, _)| Some(file))
            }
            _ if spot.must_be_dir || flags & libc::O_DIRECTORY != 0 => Err(Errno::NOTDIR),
            Kind::Symlink if path_only => {
                self.tell("O_PATH of symbolic links");
                Err(Errno::OPNOTSUPP)
            }
            Kind::Symlink => Err(Errno::LOOP),
            Kind::File if path_only => {
                // Opening with O_PATH needs no permission to read.
                let anybody = Caller { uid: 0, gid: 0, pid: self.task.tid, umask: 0 };
                let file = self.namespace().grants.open_plain(&anybody, known.id, libc::O_RDONLY).map_err(errno)?;
                self.remember(known.id, rustix::fs::fstat(&file));
                Ok(Some(file.into()))
            }
            Kind::File => self.plain(known.id, flags & !(libc::O_CREAT | libc::O_EXCL)).map(Some),
            // A fifo or a device is the store's own: all processes must open the same one.
            _ => Ok(None),
        }
    }

    /// The kernel opens the file, and must find it under this one of its names: otherwise O_CREAT creates a file there.
    fn special(&self, dirfd: i32, path: &[u8], spot: &Spot, id: FileId) -> Answered {
        let below = self.await_file(id)?;
        self.await_name(dirfd, path, spot, &below)?;
        // The catalog answers later calls on the program's descriptor, because it has the attributes.
        self.remember(id, rustix::fs::lstat(&*self.bare(&below)));
        Ok(Answer::Continue)
    }

    fn await_name(&self, dirfd: i32, path: &[u8], spot: &Spot, below: &[u8]) -> Result<(), Errno> {
        // Through /proc it is the open file itself, at any path.
        if !spot.name.is_empty() {
            let until = clock::tick() + PATIENCE;
            let ours = rustix::fs::stat(&*self.bare(below))?;
            while !self.await_path(dirfd, path, ours, until)? {}
        }
        Ok(())
    }

    /// Opens the bare directory.
    fn directory(&self, id: FileId, flags: i32) -> Result<(OwnedFd, Real), Errno> {
        let until = clock::tick() + PATIENCE;
        let mut opened_up = false;
        loop {
            match self.namespace().eager.real_dir(id) {
                Ok(real) => {
                    match task::open_directory(
                        &self.bare(&real.path.0),
                        OFlags::from_bits_retain(flags.cast_unsigned()),
                    ) {
                        Ok(file) => {
                            let stat = rustix::fs::fstat(&file)?;
                            // Unless the drain moved it during the open.
                            if self.namespace().eager.real_dir(id).is_ok_and(|now| now == real) {
                                if self.supervisor.remember_dir(stat.st_dev, stat.st_ino, id) {
                                    self.keep(id);
                                }
                                return Ok((file, real));
                            }
                        }
                        Err(Errno::NOENT | Errno::NOTDIR) if clock::tick() < until => {}
                        // The mode that admits the caller may wait in the queue.
                        Err(Errno::ACCESS) if !opened_up => {
                            opened_up = true;
                            self.namespace().files.access.attributes_ahead(id);
                            continue;
                        }
                        Err(why) => return Err(why),
                    }
                }
                Err(fault) if fault.errno == Errno::AGAIN => {}
                Err(fault) => return Err(errno(fault)),
            }
            self.wait(until, "a directory that takes the place of another")?;
        }
    }

    fn bare(&self, below: &[u8]) -> Vec<u8> {
        let mut path = self.supervisor.over.clone();
        if !below.is_empty() {
            path.push(b'/');
            path.extend_from_slice(below);
        }
        path
    }

    /// Makes everything due now, and waits a moment.
    fn wait(&self, until: Instant, what: &'static str) -> Result<(), Errno> {
        self.check()?;
        if clock::tick() >= until {
            return self.refuse(what, Errno::BUSY).map(drop);
        }
        self.namespace().files.descriptors.catch_up();
        self.namespace().eager.hurry_everything();
        std::thread::sleep(LOOK_EVERY);
        Ok(())
    }

    /// The kernel continues the call. A path that passed through the directory must lead the kernel to the same place.
    /// Links and moved directories have to be drained for that.
    pub(super) fn go_outside(&self, dirfd: i32, path: &[u8], leads_to: Option<&[u8]>) -> Answered {
        let Some(leads_to) = leads_to else { return Ok(Answer::Continue) };
        let theirs = self.seen_from_here(dirfd, path)?.into_bytes();
        let until = clock::tick() + PATIENCE;
        let agree = || {
            let theirs = end_of(&theirs);
            let nowhere = absent(&theirs) && absent(leads_to);
            same(&theirs, leads_to) || nowhere && (absent(above(leads_to)) || same(above(&theirs), above(leads_to)))
        };
        while !agree() {
            self.wait(until, "paths that lead out by links that are not drained yet")?;
        }
        Ok(Answer::Continue)
    }

    /// The path as this process can access it.
    fn seen_from_here(&self, dirfd: i32, path: &[u8]) -> Result<CString, Errno> {
        let mut whole = if path.first() == Some(&b'/') {
            let root = self.supervisor.root_of(self.task);
            if root == b"/" { Vec::new() } else { root }
        } else {
            let mut base = self.link_of(dirfd).into_bytes();
            base.push(b'/');
            base
        };
        whole.extend_from_slice(path);
        CString::new(whole).map_err(|_| Errno::NOENT)
    }

    /// Waits until this path leads the kernel to the very file at `below`.
    fn await_path(&self, dirfd: i32, path: &[u8], ours: rustix::fs::Stat, until: Instant) -> Result<bool, Errno> {
        let theirs = rustix::fs::stat(self.seen_from_here(dirfd, path)?.as_c_str());
        if let Ok(theirs) = theirs
            && (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino)
        {
            return Ok(true);
        }
        self.wait(until, "a path whose links are not drained yet")?;
        Ok(false)
    }

    pub(super) fn chdir(&self) -> Answered {
        let path = self.path(0)?;
        let spot = match self.walk_at(libc::AT_FDCWD, &path, true)? {
            Walked::Outside(to) => return self.go_outside(libc::AT_FDCWD, &path, to.as_deref()),
            Walked::Inside(spot) => spot,
        };
        let known = spot.known()?;
        if known.attr.kind != Kind::Directory {
            return Err(Errno::NOTDIR);
        }
        self.namespace().attributes.access(&self.caller()?, known.id, 1).map_err(errno)?;
        let until = clock::tick() + PATIENCE;
        loop {
            let (file, real) = self.directory(known.id, libc::O_PATH)?;
            if !real.in_place {
                self.wait(until, "a directory that was moved")?;
            } else if self.await_path(libc::AT_FDCWD, &path, rustix::fs::fstat(&file)?, until)? {
                // The kernel checks the permission at the bare directory.
                self.namespace().files.access.attributes_ahead(known.id);
                return Ok(Answer::Continue);
            }
        }
    }

    /// A watcher of a file (tail -f) gets the plain file's events: the bare one does not change. A directory's events
    /// come from the drain.
    pub(super) fn inotify_add_watch(&self) -> Answered {
        let path = self.path(1)?;
        let mask = self.arg(2) as u32;
        let spot = match self.walk_at(libc::AT_FDCWD, &path, mask & libc::IN_DONT_FOLLOW == 0)? {
            Walked::Outside(to) => return self.go_outside(libc::AT_FDCWD, &path, to.as_deref()),
            Walked::Inside(spot) => spot,
        };
        let known = spot.known()?;
        let plain = match known.attr.kind {
            Kind::File => self.plain(known.id, libc::O_RDONLY)?,
            Kind::Directory => self.directory(known.id, 0)?.0,
            _ => return self.refuse("inotify on links and special files", Errno::ACCESS),
        };
        let theirs = self.task.descriptor(self.int(0))?;
        let link = format!("/proc/self/fd/{}", plain.as_raw_fd());
        let flags = WatchFlags::from_bits_retain(mask & !libc::IN_DONT_FOLLOW);
        Ok(Answer::Value(inotify::add_watch(&theirs, link, flags)?.into()))
    }

    /// Waits until the store has the file as programs see it.
    fn await_file(&self, id: FileId) -> Result<Vec<u8>, Errno> {
        let until = clock::tick() + PATIENCE;
        loop {
            match self.namespace().eager.real_file(id) {
                Ok(path) => return Ok(path.0),
                Err(fault) if fault.errno == Errno::AGAIN => {
                    self.wait(until, "a program that does not get into the store")?
                }
                Err(fault) if fault.errno == Errno::ACCESS => {
                    return self.refuse("executing a file that is never drained", Errno::ACCESS).map(|_| Vec::new());
                }
                Err(fault) => return Err(errno(fault)),
            }
        }
    }

    pub(super) fn exec(&self, dirfd: i32, path: usize, flags: i32) -> Answered {
        let path = self.path(path)?;
        if path.is_empty() {
            // The open file itself.
            return Ok(Answer::Continue);
        }
        self.executable(dirfd, &path, flags & libc::AT_SYMLINK_NOFOLLOW == 0, 0)
    }

    fn executable(&self, dirfd: i32, path: &[u8], follow: bool, depth: usize) -> Answered {
        let interpreter = match self.walk_at(dirfd, path, follow)? {
            Walked::Outside(to) => {
                self.go_outside(dirfd, path, to.as_deref())?;
                match self.seen_from_here(dirfd, path) {
                    Ok(seen) => program::interpreter_of(&seen),
                    Err(_) => None,
                }
            }
            Walked::Inside(spot) => {
                let known = spot.known()?;
                if known.attr.kind != Kind::File {
                    return Err(Errno::ACCESS);
                }
                self.namespace().files.descriptors.catch_up();
                self.namespace().attributes.access(&self.caller()?, known.id, 1).map_err(errno)?;
                let below = self.await_file(known.id)?;
                self.await_name(dirfd, path, &spot, &below)?;
                CString::new(self.bare(&below)).ok().and_then(|seen| program::interpreter_of(&seen))
            }
        };
        // The kernel opens it by itself.
        match interpreter {
            Some(interpreter) if depth < SCRIPTS_MAX => self.executable(libc::AT_FDCWD, &interpreter, true, depth + 1),
            _ => Ok(Answer::Continue),
        }
    }
}

fn same(a: &[u8], b: &[u8]) -> bool {
    match (rustix::fs::lstat(a), rustix::fs::lstat(b)) {
        (Ok(a), Ok(b)) if (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino) => true,
        // One of them names a link, the other its target.
        (Ok(_), Ok(_)) => match (rustix::fs::stat(a), rustix::fs::stat(b)) {
            (Ok(a), Ok(b)) => (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino),
            _ => false,
        },
        _ => false,
    }
}

/// The end of a dangling link; any other path unchanged.
fn end_of(path: &[u8]) -> Vec<u8> {
    const LINKS_MAX: usize = 40;
    let mut end = path.to_vec();
    for _ in 0..LINKS_MAX {
        if rustix::fs::stat(&*end).is_ok() {
            return path.to_vec();
        }
        let Ok(target) = rustix::fs::readlink(&*end, Vec::new()) else { return end };
        let target = target.into_bytes();
        end = if target.first() == Some(&b'/') { target } else { [above(&end), b"/", &target].concat() };
    }
    path.to_vec()
}

fn absent(path: &[u8]) -> bool {
    rustix::fs::lstat(path).is_err()
}

/// The path's parent directory.
fn above(path: &[u8]) -> &[u8] {
    let path = path.strip_suffix(b"/").unwrap_or(path);
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(0) | None => b"/",
        Some(end) => &path[..end],
    }
}
