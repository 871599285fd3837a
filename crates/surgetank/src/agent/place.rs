//! The agent's place on disk: `STATE/PLACE/` with socket, locks, log, and what an agent left for the next agent.
//!
//! | file | meaning |
//! |---|---|
//! | `agent.lock` | flock held by the agent and its supervisor until both have ended |
//! | `start.lock` | flock held by the process that starts or joins, so that eight simultaneous runs share one agent; or that inspects what is left |
//! | `agent.sock` | the socket |
//! | `agent.json` | over, pid: finds a mount whose agent was killed |
//! | `agent.log` | tracing |
//! | `undrained.json` | the verdict of an agent that ended with something not durable |
//! | `identity.json` | what is served, to which store, and the instance's KEY ([`identity`]) |
//!
//! A place's name is `UID-DEVICE-INODE-BIRTH` of the *bare* directory (inside the mount it shows other numbers). The
//! danger it avoids: a state directory that another user can write. So the root is checked for owner, mode and symlink,
//! and the agent reaches everything below through the checked descriptor.

pub mod identity;
pub mod renumbered;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, OFlags};
use serde::{Deserialize, Serialize};
use surgetank_core::report::{PathText, Verdict};
use surgetank_types::clock;
use surgetank_types::error::{Error, Result};
use surgetank_types::shell;

use super::line::{self, Broken, Limits};

/// The socket of the pool's process.
pub const POOL_SOCKET: &str = "pool.sock";
/// The directory of a place with the copies that `fsync` made of files on volatile tiers.
pub const SYNCED_COPIES: &str = "synced";

/// The state root, checked.
pub struct StateRoot {
    path: PathBuf,
    dir: OwnedFd,
}

/// One agent's directory below the root.
pub struct Place {
    path: PathBuf,
    dir: OwnedFd,
}

/// Keeps agents away from a place where none lives: no agent starts while it is held.
pub struct Held {
    _agent: File,
    _turn: File,
}

/// `agent.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Card {
    pub over: PathText,
    pub pid: u32,
    pub global: bool,
}

impl StateRoot {
    /// Creates missing directories (0700) and refuses any that is not this user's alone.
    pub fn open(path: &Path, over: &Path) -> Result<Self> {
        let root = Self::make(path)?;
        let real = fs::canonicalize(path).map_err(|error| refuse(path, &error.to_string()))?;
        if real.starts_with(over) {
            return Err(refuse(path, &format!("it is below the directory that is served, {}", over.display()))
                .remedy("set `state` (or SURGETANK_STATE) to a directory elsewhere"));
        }
        Ok(root)
    }

    /// For verbs that only ask: `None` when no agent ever ran.
    pub fn open_existing(path: &Path) -> Result<Option<Self>> {
        match fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            _ => Self::checked(path).map(Some),
        }
    }

    /// The same without a served directory.
    pub fn make(path: &Path) -> Result<Self> {
        match fs::DirBuilder::new().recursive(true).mode(0o700).create(path) {
            Ok(()) => {}
            // A dangling symlink or a file in the way; `checked` says which.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(refuse(path, &error.to_string())),
        }
        Self::checked(path)
    }

    fn checked(path: &Path) -> Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| {
            let why = match errno {
                rustix::io::Errno::LOOP | rustix::io::Errno::NOTDIR if path.is_symlink() => {
                    "it is a symbolic link, which another user could redirect".to_owned()
                }
                rustix::io::Errno::NOTDIR => "it is not a directory".to_owned(),
                other => other.to_string(),
            };
            refuse(path, &why)
        })?;
        check_owner(path, &dir)?;
        Ok(Self { path: path.to_path_buf(), dir })
    }

    /// A directory in the root that belongs to no served directory.
    pub fn make_other(&self, name: &str) -> Result<PathBuf> {
        Ok(self.make_place(name)?.path)
    }

    fn make_place(&self, key: &str) -> Result<Place> {
        match rustix::fs::mkdirat(&self.dir, key, Mode::RWXU) {
            Ok(()) => rustix::fs::fsync(&self.dir)
                .map_err(|errno| refuse(&self.path, &errno.to_string()))
                .and_then(|()| self.open_place(key)),
            Err(rustix::io::Errno::EXIST) => self.open_place(key),
            Err(errno) => Err(refuse(&self.path.join(key), &errno.to_string())),
        }
    }

    fn known(&self, key: &str) -> Result<Option<Place>> {
        match rustix::fs::statat(&self.dir, key, rustix::fs::AtFlags::SYMLINK_NOFOLLOW) {
            Err(rustix::io::Errno::NOENT) => Ok(None),
            _ => self.open_place(key).map(Some),
        }
    }

    /// All places of this user.
    pub fn places(&self) -> Result<Vec<Place>> {
        let ours = format!("{}-", rustix::process::geteuid().as_raw());
        let mut places = Vec::new();
        for entry in fs::read_dir(&self.path).map_err(|error| refuse(&self.path, &error.to_string()))? {
            let Ok(entry) = entry else { continue };
            let name = entry.file_name();
            if let Some(name) = name.to_str().filter(|name| name.starts_with(&ours)) {
                places.push(self.open_place(name)?);
            }
        }
        Ok(places)
    }

    fn open_place(&self, key: &str) -> Result<Place> {
        let path = self.path.join(key);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = rustix::fs::openat(&self.dir, key, flags, Mode::empty())
            .map_err(|errno| refuse(&path, &errno.to_string()))?;
        check_owner(&path, &dir)?;
        Ok(Place { path, dir })
    }
}

/// The key includes the birth time. A file system may reuse the inode number of a removed directory. What an agent left
/// of the first directory must never count as the second's.
fn key(directory: &fs::Metadata) -> String {
    let born = directory.created().ok().and_then(|at| at.duration_since(std::time::UNIX_EPOCH).ok());
    format!(
        "{}-{:x}-{:x}-{:x}",
        rustix::process::geteuid().as_raw(),
        directory.dev(),
        directory.ino(),
        born.map_or(0, |since| since.as_nanos())
    )
}

/// Checks that the user owns it, and that no other user can read or write it.
fn check_owner(path: &Path, dir: &OwnedFd) -> Result<()> {
    let stat = rustix::fs::fstat(dir).map_err(|errno| refuse(path, &errno.to_string()))?;
    let me = rustix::process::geteuid().as_raw();
    if stat.st_uid != me {
        return Err(refuse(path, &format!("it belongs to user {}, and this is user {me}", stat.st_uid)));
    }
    if stat.st_mode & 0o077 != 0 {
        return Err(refuse(path, &format!("its mode is {:04o}: other users have access", stat.st_mode & 0o7777))
            .remedy(format!("chmod 700 {}", shell::word(path))));
    }
    Ok(())
}

fn refuse(path: &Path, why: &str) -> Error {
    Error::new(format!("the state directory {} cannot be used", path.display()))
        .why(why)
        .remedy("set `state` (or SURGETANK_STATE) to a directory of your own with mode 0700")
        .data("nothing was changed")
}

impl Place {
    /// A place by its path, as passed in `SURGETANK_AGENT` or to the agent itself.
    pub fn open(path: &Path) -> Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| refuse(path, &errno.to_string()))?;
        check_owner(path, &dir)?;
        Ok(Self { path: path.to_path_buf(), dir })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Through the descriptor: unaffected by renames above, and short enough for a socket's address.
    fn inner(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/{name}", self.dir.as_raw_fd()))
    }

    /// Where the agent reaches the pool's process.
    pub fn pool_socket(&self) -> PathBuf {
        self.inner(POOL_SOCKET)
    }

    pub fn socket(&self) -> PathBuf {
        self.inner("agent.sock")
    }

    fn lock_file(&self, name: &str) -> Result<File> {
        lock_file(&self.inner(name)).map_err(|error| refuse(&self.path.join(name), &error.to_string()))
    }

    fn try_lock(&self, name: &str) -> Result<Option<File>> {
        let file = self.lock_file(name)?;
        match lock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(file)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(refuse(&self.path, &error.to_string())),
        }
    }

    /// Waits for the lock to start or join an agent.
    pub fn start_turn(&self) -> Result<File> {
        self.await_lock("start.lock", "a command that starts or joins an agent, or inspects its leftovers")
    }

    /// `None` when an agent lives or starts, or when another process inspects what is left. The starter's lock comes
    /// first: an agent that starts must not find its own lock taken.
    pub fn try_hold(&self) -> Result<Option<Held>> {
        let Some(turn) = self.try_lock("start.lock")? else { return Ok(None) };
        Ok(self.try_lock("agent.lock")?.map(|agent| Held { _agent: agent, _turn: turn }))
    }

    /// The agent's own lock; `None` when another agent lives.
    pub fn try_agent_lock(&self) -> Result<Option<File>> {
        self.try_lock("agent.lock")
    }

    /// Like `try_hold`, but waits for an agent that was killed a moment ago and no longer answers.
    pub fn hold_dead(&self) -> Result<Option<Held>> {
        const TIMEOUT: Duration = Duration::from_secs(1);
        const LOOK_EVERY: Duration = Duration::from_millis(10);
        let begun = clock::tick();
        loop {
            if let Some(held) = self.try_hold()? {
                return Ok(Some(held));
            }
            if begun.elapsed() >= TIMEOUT || self.is_answered() {
                return Ok(None);
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Does a process hold the socket's other end? (A dying process takes connections until its end.)
    pub fn is_answered(&self) -> bool {
        const MOMENT: Duration = Duration::from_millis(200);
        let limits = Limits { until: Some(clock::tick() + MOMENT), ..Limits::default() };
        let mut socket = match line::connect(&self.socket(), &limits) {
            Ok(socket) => socket,
            Err(broken) => return matches!(broken, Broken::Silent(_)),
        };
        if socket.set_read_timeout(Some(MOMENT)).is_err() {
            return true;
        }
        // The agent sends nothing before the client's greeting: readable data here is the end of the stream.
        socket.read(&mut [0]).is_err_and(|why| why.kind() == io::ErrorKind::WouldBlock)
    }

    /// A leaving agent releases its own lock before its catalog's: a starting agent waits at most this long.
    pub fn await_catalog(&self) {
        const TIMEOUT: Duration = Duration::from_secs(30);
        const LOOK_EVERY: Duration = Duration::from_millis(10);
        let begun = clock::tick();
        // The process that opens the catalog reports what is wrong with it.
        let Ok(file) = File::open(self.inner("catalog/lock")) else { return };
        while begun.elapsed() < TIMEOUT
            && lock(&file, FlockOperation::NonBlockingLockExclusive)
                .is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
        {
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Returns when no agent lives.
    pub fn await_no_agent(&self) -> Result<()> {
        self.await_lock("agent.lock", "an agent that leaves").map(drop)
    }

    fn await_lock(&self, name: &str, holder: &str) -> Result<File> {
        await_lock(self.lock_file(name)?, &self.path.join(name), holder)
    }

    /// The log, opened for appending. A large log is renamed once.
    pub fn log(&self) -> io::Result<File> {
        const LOG_BYTES_MAX: u64 = 8 << 20;
        let path = self.inner("agent.log");
        if fs::metadata(&path).is_ok_and(|meta| meta.size() > LOG_BYTES_MAX) {
            fs::rename(&path, self.inner("agent.log.1"))?;
        }
        OpenOptions::new().create(true).append(true).mode(0o600).custom_flags(libc::O_NOFOLLOW).open(path)
    }

    pub fn log_path(&self) -> PathBuf {
        self.path.join("agent.log")
    }

    pub fn card(&self) -> Option<Card> {
        serde_json::from_slice(&fs::read(self.inner("agent.json")).ok()?).ok()
    }

    pub fn put_card(&self, card: &Card) -> io::Result<()> {
        self.put("agent.json", &serde_json::to_vec(card)?)
    }

    /// Removes socket and card when the agent leaves; locks and log stay.
    pub fn clear(&self) {
        for name in ["agent.sock", "agent.json"] {
            // A missing file is the wanted result.
            let _ = fs::remove_file(self.inner(name));
        }
    }

    /// What an earlier agent could not make durable.
    pub fn undrained(&self) -> Option<Verdict> {
        serde_json::from_slice(&fs::read(self.inner("undrained.json")).ok()?).ok()
    }

    pub fn put_undrained(&self, verdict: Option<&Verdict>) -> io::Result<()> {
        match verdict {
            Some(verdict) => self.put("undrained.json", &serde_json::to_vec_pretty(verdict)?),
            None => match fs::remove_file(self.inner("undrained.json")) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                _ => Ok(()),
            },
        }
    }

    /// The write is atomic and survives a loss of power: these files lead to what the catalog promises.
    fn put(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let temporary = self.inner(&format!("{name}.new"));
        let mut options = OpenOptions::new();
        options.create(true).truncate(true).write(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let mut file = options.open(&temporary)?;
        io::Write::write_all(&mut file, bytes)?;
        file.sync_all()?;
        fs::rename(temporary, self.inner(name))?;
        rustix::fs::fsync(&self.dir)?;
        Ok(())
    }
}

fn lock_file(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).custom_flags(libc::O_NOFOLLOW).open(path)
}

fn lock(file: &File, operation: FlockOperation) -> io::Result<()> {
    loop {
        match rustix::fs::flock(file.as_fd(), operation) {
            Err(rustix::io::Errno::INTR) => {}
            other => return other.map_err(Into::into),
        }
    }
}

/// Reports the holder when the wait is long. A signal that is not blocked ends the process meanwhile.
fn await_lock(file: File, path: &Path, holder: &str) -> Result<File> {
    const LOOK_EVERY: Duration = Duration::from_millis(5);
    let begun = clock::tick();
    let mut reported = false;
    loop {
        match lock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(refuse(path, &error.to_string())),
            Err(_) => {}
        }
        if !reported && begun.elapsed() >= line::STOPPED_PATIENCE {
            reported = true;
            eprintln!(
                "surgetank: waiting for {holder}; it holds {}. Find the process with:\n  fuser {}",
                path.display(),
                shell::word(path)
            );
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn state_root_reachable_by_other_users_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("state");
        assert!(StateRoot::open(&root, Path::new("/nowhere")).is_ok());
        assert_eq!(fs::metadata(&root).unwrap().permissions().mode() & 0o7777, 0o700);

        fs::set_permissions(&root, fs::Permissions::from_mode(0o750)).unwrap();
        let error = StateRoot::open(&root, Path::new("/nowhere")).err().unwrap();
        assert!(error.why.contains("0750") && error.remedy.contains("chmod 700"), "{error}");

        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        let error = StateRoot::open(&link, Path::new("/nowhere")).err().unwrap();
        assert!(error.why.contains("symbolic link"), "{error}");
    }

    #[test]
    fn state_root_below_the_served_directory_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let error = StateRoot::open(&dir.path().join("s"), dir.path()).err().unwrap();
        assert!(error.why.contains("below the directory"), "{error}");
    }

    #[test]
    fn directory_with_a_reused_inode_number_has_its_own_key() {
        let dir = tempfile::tempdir().unwrap();
        let first = dir.path().join("first");
        // File systems give a freed inode number to the next file; one of these tries meets that.
        let (mut keys, mut inodes) = (std::collections::BTreeSet::new(), std::collections::BTreeSet::new());
        for _ in 0..50 {
            fs::create_dir(&first).unwrap();
            let directory = first.metadata().unwrap();
            keys.insert(key(&directory));
            inodes.insert(directory.ino());
            fs::remove_dir(&first).unwrap();
        }
        assert_eq!(keys.len(), 50, "{} inode numbers", inodes.len());
    }

    #[test]
    fn agent_lock_is_exclusive_and_free_after_its_holder_dies() {
        let dir = tempfile::tempdir().unwrap();
        let root = StateRoot::open(&dir.path().join("s"), Path::new("/nowhere")).unwrap();
        let place = root.place(&dir.path().metadata().unwrap(), dir.path()).unwrap();
        let held = place.try_agent_lock().unwrap();
        assert!(held.is_some() && place.try_agent_lock().unwrap().is_none());
        drop(held);
        place.await_no_agent().unwrap();
        assert!(place.try_agent_lock().unwrap().is_some());
        assert_eq!(root.places().unwrap().len(), 1);
    }

    /// `status` and `wait` once took the lock of an agent that was starting, which then failed.
    #[test]
    fn place_is_not_locked_while_an_agent_starts() {
        let dir = tempfile::tempdir().unwrap();
        let root = StateRoot::open(&dir.path().join("s"), Path::new("/nowhere")).unwrap();
        let place = root.place(&dir.path().metadata().unwrap(), dir.path()).unwrap();
        let turn = place.start_turn().unwrap();
        assert!(place.try_hold().unwrap().is_none());
        assert!(place.try_agent_lock().unwrap().is_some());
        drop(turn);
        assert!(place.try_hold().unwrap().is_some());
    }
}
