//! The shim's door: an index and a socket. Preloaded programs read the index of the namespace in shared memory without
//! a request. On the socket they request files for writing (docs/internals/doors.md).
//!
//! The mount stays authoritative: this door leaves to the mount what it cannot serve at once, and a program that finds
//! the door closed uses the mount.

pub(crate) mod abi;
mod closings;
pub(crate) mod counts;
mod index;
pub(crate) mod leftovers;
mod memory;
mod ring;
mod server;
mod table;

pub use server::parse;
#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, Weak};
use std::time::Duration;

use rustix::event::EventfdFlags;
use surgetank_core::namespace::{IndexEntry, IntakeFile, Keeper, Namespace, Shim};
use surgetank_state::Stray;
use surgetank_types::clock;
use surgetank_types::model::FileId;

use closings::{Closed, Closings};
use index::{Index, Place};
pub(crate) use server::current;

/// Programs trust the index for this long after the last sign of life.
const BELIEVED: Duration = Duration::from_secs(2);
/// Programs read a clock that is late by so much.
const A_TICK: Duration = Duration::from_millis(20);
const SIGN_EVERY: Duration = Duration::from_millis(200);
/// After this many periods the agent ends the watches of directories without an open file.
const REST_EVERY: u32 = 5;
/// Closed files are gathered for this long; a thread that needs to know takes them in at once.
const GATHERED: Duration = Duration::from_millis(1);

/// The agent's place in a pool.
pub(crate) trait Membership: Send + Sync {
    /// Does `act` if this member decides the directory's names, and returns whether it did. No other member decides them meanwhile.
    fn within(&self, dir: FileId, act: &mut dyn FnMut()) -> bool;
    /// Until when this member may answer, by the time since the machine's start.
    fn serves_until(&self) -> Duration;
    /// `stops` is called when that ends earlier.
    fn on_stop(&self, stops: Stops);
}

pub(crate) type Stops = Box<dyn Fn() + Send + Sync>;

pub(crate) struct Door {
    index: Mutex<Index>,
    closings: Closings,
    namespace: Weak<Namespace>,
    only_ids: Option<(u32, u32)>,
    giving: RwLock<()>,
    pool: Option<Weak<dyn Membership>>,
    /// `None`: no directory is delegated.
    ring: Option<ring::Ring>,
}

/// An open door; closed by dropping it.
pub(crate) struct Opened {
    stop: OwnedFd,
    threads: Vec<std::thread::JoinHandle<()>>,
    socket: PathBuf,
    door: Arc<Door>,
}

/// Makes programs distrust the index of an earlier agent, until [`open`] has filled it again. Call it before any change
/// is possible.
pub(crate) fn disbelieve(key: &str, state: &Path) {
    let [in_memory, beside] = places_of_index(key, state);
    for path in [in_memory, beside] {
        match memory::unsettle(&path) {
            Err(why) if why.kind() != io::ErrorKind::NotFound => {
                tracing::error!(%why, path = %path.display(), "programs may believe an old index");
            }
            _ => {}
        }
    }
}

/// The last entries that an earlier agent did not read. Call it before the search for unknown files on tiers; opening
/// the door discards the entries.
pub(crate) fn left(key: &str, state: &Path) -> Vec<IntakeFile> {
    let of = |index: &PathBuf| {
        ring::left(index).unwrap_or_else(|why| {
            tracing::warn!(%why, path = %index.display(), "the last intake of an earlier agent cannot be read");
            Vec::new()
        })
    };
    places_of_index(key, state).iter().flat_map(of).collect()
}

/// Opens the door. Everything that is known is shown from now on. `again`: programs have mapped an earlier agent's
/// index. `pool`: the agent is in one.
pub(crate) fn open(
    namespace: &Arc<Namespace>,
    state: &Path,
    mount_dev: u64,
    only_ids: Option<(u32, u32)>,
    again: bool,
    pool: Option<&Arc<dyn Membership>>,
) -> io::Result<Opened> {
    let places =
        namespace.base.tiers.devices().filter(|device| device.is_there() && device.leases()).take(abi::DEVICES_MAX);
    let places: Vec<Place> = places.map(place_of).collect::<io::Result<_>>()?;
    let index = create_index(namespace.key(), state, places, only_ids, again)?;
    let ring = ring::Ring::create(index.memory().path(), again, &mut || namespace.metadata.number_to_delegate())
        .inspect_err(|why| tracing::debug!(%why, "no directories are delegated to programs"))
        .ok();
    if ring.is_some() {
        index.has_ring();
    }
    let door = Arc::new(Door {
        index: Mutex::new(index),
        closings: Closings::new()?,
        namespace: Arc::downgrade(namespace),
        only_ids,
        giving: RwLock::default(),
        pool: pool.map(Arc::downgrade),
        ring,
    });
    namespace.metadata.set_shim(door.clone());
    door.index().open(mount_dev);
    let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let socket = state.join(SOCKET);
    let server = server::Server::listen(door.clone(), &socket, stop.as_fd())?;
    door.live();
    if let Some(pool) = pool {
        let stopped = Arc::downgrade(&door);
        pool.on_stop(Box::new(move || stopped.upgrade().iter().for_each(|door| door.live())));
    }
    let mut threads = vec![std::thread::Builder::new().name("shim".into()).spawn(move || server.serve())?];
    let (closings, stopped) = (door.clone(), stop.try_clone()?);
    threads.push(
        std::thread::Builder::new().name("shim-closed".into()).spawn(move || closings.follow_closings(&stopped))?,
    );
    let (alive, stopped) = (door.clone(), stop.try_clone()?);
    threads.push(std::thread::Builder::new().name("shim-alive".into()).spawn(move || alive.stay_alive(&stopped))?);
    Ok(Opened { stop, threads, socket, door })
}

const SOCKET: &str = "shim.sock";

fn place_of(device: &surgetank_tier::Device) -> io::Result<Place> {
    let dev = rustix::fs::fstat(device.root())?.st_dev;
    let flags = rustix::fs::fstatvfs(device.root())?.f_flag;
    Ok(Place {
        id: device.id(),
        root: device.files_path().to_path_buf(),
        dev,
        noexec: flags.contains(rustix::fs::StatVfsMountFlags::NOEXEC),
    })
}

/// In memory if possible: on a disk the kernel would write its pages back for nothing.
fn create_index(
    key: &str,
    state: &Path,
    places: Vec<Place>,
    only_ids: Option<(u32, u32)>,
    again: bool,
) -> io::Result<Index> {
    let [in_memory, beside] = places_of_index(key, state);
    Index::create(&in_memory, places.clone(), only_ids, again).or_else(|why| {
        tracing::debug!(%why, path = %in_memory.display(), "the index goes into the state's directory");
        Index::create(&beside, places, only_ids, again)
    })
}

fn places_of_index(key: &str, state: &Path) -> [PathBuf; 2] {
    let name = format!("{}{key}.index", leftovers::prefix());
    [Path::new(leftovers::SHARED_MEMORY).join(name), state.join("index")]
}

/// Lives while a descriptor is granted.
pub(crate) struct Giving<'a> {
    _in_ring: Option<ring::Giving<'a>>,
    _held: RwLockReadGuard<'a, ()>,
}

impl Opened {
    pub fn door(&self) -> Arc<Door> {
        self.door.clone()
    }
    pub fn index(&self) -> PathBuf {
        self.door.index().memory().path().to_path_buf()
    }
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Gives the supervisor the files whose locks say that they are in use, so that they outlive this agent.
    pub fn keep(&self, keeper: &dyn Keeper) {
        let index = self.door.index();
        let files = [("index", Some(index.memory().file())), ("ring", self.door.ring.as_ref().map(ring::Ring::file))];
        for (name, file) in files {
            if let Some(Err(why)) = file.map(|file| keeper.keep(name, file.as_fd())) {
                tracing::warn!(%why, name, "another agent may remove it while this one is replaced");
            }
        }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if let Some(namespace) = self.door.namespace() {
            namespace.metadata.end_delegation();
        }
        self.door.index().memory().live_until(0);
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        for thread in self.threads.drain(..) {
            drop(thread.join());
        }
        drop(std::fs::remove_file(&self.socket));
        drop(std::fs::remove_file(ring::path_of(&self.index())));
        drop(std::fs::remove_file(self.index()));
    }
}

impl Door {
    fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn namespace(&self) -> Option<Arc<Namespace>> {
        self.namespace.upgrade()
    }

    pub fn of_plain(&self, dev: u64, ino: u64) -> Option<FileId> {
        self.index().of_plain(dev, ino)
    }

    /// Hold it from before a descriptor is sent until our own is closed, which may be the last one by then.
    pub fn giving(&self) -> Giving<'_> {
        let held = self.giving.read().unwrap_or_else(PoisonError::into_inner);
        Giving { _in_ring: self.ring.as_ref().map(ring::Ring::giving), _held: held }
    }

    fn take_closings(&self) {
        let Some(namespace) = self.namespace() else { return };
        let heard = || namespace.metadata.settle();
        self.closings.take(heard, |closed| match closed {
            Closed::Of(id) => namespace.files.descriptors.grant_closed(id),
            Closed::Any => {
                namespace.files.descriptors.any_grant_closed();
                true
            }
        });
    }

    /// A process that waits for a descriptor does not wait for the sealing of other files; and sealing several at a
    /// time costs less.
    fn follow_closings(&self, stop: &OwnedFd) {
        use rustix::event::{PollFd, PollFlags, poll};
        loop {
            let mut fds = [PollFd::new(stop, PollFlags::IN), PollFd::new(&self.closings, PollFlags::IN)];
            if poll(&mut fds, None).is_ok() && !fds[0].revents().is_empty() {
                return;
            }
            std::thread::sleep(GATHERED);
            self.take_closings();
        }
    }

    fn live(&self) {
        // (One after the other: an earlier answer of the pool must not come last.)
        let index = self.index();
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let nanos = u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0);
        let believed = self.serves_for().map_or(BELIEVED, |left| left.saturating_sub(A_TICK).min(BELIEVED));
        index.memory().live_until(nanos + believed.as_nanos() as u64);
    }

    /// How long this member may go on answering; `None`: it is in no pool.
    fn serves_for(&self) -> Option<Duration> {
        let until = self.pool.as_ref()?.upgrade().map_or(Duration::ZERO, |pool| pool.serves_until());
        Some(until.saturating_sub(clock::uptime()))
    }

    /// As [`Membership::within`]; without a pool this member decides everything.
    fn within(&self, dir: FileId, act: &mut dyn FnMut()) -> bool {
        let Some(pool) = &self.pool else {
            act();
            return true;
        };
        pool.upgrade().is_some_and(|pool| pool.within(dir, act))
    }

    fn stay_alive(&self, stop: &OwnedFd) {
        let timeout = rustix::time::Timespec { tv_sec: 0, tv_nsec: i64::from(SIGN_EVERY.subsec_nanos()) };
        for turn in 1_u32.. {
            self.live();
            if turn.is_multiple_of(REST_EVERY) {
                self.closings.rest();
            }
            let mut fds = [rustix::event::PollFd::new(stop, rustix::event::PollFlags::IN)];
            if rustix::event::poll(&mut fds, Some(&timeout)).is_ok_and(|ready| ready > 0) {
                return;
            }
        }
    }
}

impl Shim for Door {
    fn show(&self, entry: &IndexEntry, name: &[u8]) {
        self.index().show(entry, name);
    }
    fn hide(&self, id: FileId) {
        self.index().hide(id);
    }
    fn conceal(&self, id: FileId) {
        self.index().conceal(id);
    }
    fn name(&self, dir: FileId, name: &[u8], id: Option<FileId>) {
        self.index().name(dir, name, id);
    }
    fn directories_move(&self) {
        self.index().directories_move();
    }
    fn watch(&self, id: FileId, file: BorrowedFd<'_>) -> io::Result<()> {
        self.closings.watch(id, file)
    }
    fn watch_in(&self, dir: &Path, name: &[u8], id: FileId) -> io::Result<()> {
        self.closings.watch_in(dir, name, id)
    }
    fn intake_waits(&self) -> bool {
        self.ring.as_ref().is_some_and(ring::Ring::waits)
    }
    fn take_intake(&self) -> Vec<IntakeFile> {
        self.ring.as_ref().map(ring::Ring::take).unwrap_or_default()
    }
    fn give_back(&self, numbers: &mut dyn FnMut() -> u64) {
        if let Some(ring) = &self.ring {
            ring.give_back(numbers);
        }
    }
    fn take_strays(&self) -> Vec<Stray> {
        self.ring.as_ref().map(ring::Ring::take_strays).unwrap_or_default()
    }
    fn stop_intake(&self) {
        if let Some(ring) = &self.ring {
            ring.stop_intake(ring::TIMEOUT);
        }
    }
    fn limit_intake(&self, entries: u64) {
        if let Some(ring) = &self.ring {
            ring.limit(entries);
        }
    }
    fn watch_delegated(&self, dir: &Path) -> io::Result<i32> {
        if self.ring.is_none() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        self.closings.watch_delegated(dir)
    }
    fn no_longer_delegated(&self, watch: i32) {
        self.closings.no_longer_delegated(watch);
    }
    fn made_in(&self, watch: i32, name: &[u8], id: FileId) -> bool {
        self.closings.made_in(watch, name, id)
    }
    fn catch_up(&self) {
        self.await_grants();
        self.take_closings();
    }
    fn await_grants(&self) {
        drop(self.giving.write().unwrap_or_else(PoisonError::into_inner));
    }
}
