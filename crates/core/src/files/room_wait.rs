//! Room waits: no place has room, so a writer waits until the drain or the user has made some. It gets the error when
//! that takes too long.
//!
//! Invariant: a waiting writer holds only what makes other requests for the same file wait too. The danger that this
//! avoids: a program fails although the drain would soon have made room.

use std::time::{Duration, Instant};

use surgetank_policy::config::Config;
use surgetank_store::Store;
use surgetank_tier::Tiers;
use surgetank_types::clock;
use surgetank_types::error::{Errno, Fault, FsResult};
use surgetank_types::model::{FileId, RunId};
use surgetank_types::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::base::events::Events;
use crate::base::waits::Waits;
use crate::base::{Base, Door};
use crate::metadata::Metadata;
use crate::report::run::EventKind;

/// How often a waiting writer checks for room, and whether its program still waits.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// The number of refused writers that the summary keeps.
const REMEMBERED_MAX: usize = 1000;

/// One writer without room.
#[derive(Debug, Clone)]
pub struct Short {
    /// Path of the file below the served directory.
    pub path: Vec<u8>,
    /// The run that wrote the file.
    pub run: RunId,
    /// The full tiers, and the answer of the store, in words.
    pub why: String,
    /// Begin of the wait.
    pub since: Instant,
    /// Begin of the wait, in seconds since 1970.
    pub at_unix_seconds: i64,
    /// The writer got the error.
    pub refused: bool,
    number: u64,
}

/// The state of one waiting operation.
#[derive(Debug, Default)]
pub(crate) struct RoomWait {
    began: Option<Instant>,
    number: u64,
}

/// Writers that wait for room.
pub struct RoomWaits {
    config: Arc<Config>,
    door: Arc<OnceLock<Arc<dyn Door>>>,
    events: Arc<Events>,
    store: Arc<dyn Store>,
    tiers: Arc<Tiers>,
    waits: Arc<Waits>,
    metadata: Arc<Metadata>,
    /// Writers for whom there is no room.
    short: Mutex<Shorts>,
}

impl RoomWaits {
    pub(crate) fn new(base: &Base, metadata: &Arc<Metadata>) -> Self {
        Self {
            config: base.config.clone(),
            door: base.door.clone(),
            events: base.events.clone(),
            store: base.store.clone(),
            tiers: base.tiers.clone(),
            waits: base.waits.clone(),
            metadata: metadata.clone(),
            short: Mutex::default(),
        }
    }

    /// Waits a while after an operation found no room in any tier, nor in the store; then the caller tries again.
    /// Errors: `fault`, if a wait does not help.
    pub(crate) fn await_room(
        &self,
        room_wait: &mut RoomWait,
        (id, path, run): (Option<FileId>, &[u8], RunId),
        fault: Fault,
    ) -> FsResult<()> {
        // Without a kernel's request, a thread of the agent would wait for itself.
        if !matches!(fault.errno, Errno::NOSPC | Errno::DQUOT) || self.door.get().is_none() {
            return Err(fault);
        }
        let timeout = self.config.wait_for_room;
        let began = *room_wait.began.get_or_insert_with(clock::tick);
        if room_wait.number == 0 {
            room_wait.number = self.is_short(id, path, run, &fault);
        }
        let left = timeout.saturating_sub(began.elapsed());
        if left.is_zero() {
            self.no_longer_short(room_wait.number, true);
            return Err(fault);
        }
        self.waits.begin_long();
        if self.waits.is_interrupted() {
            self.no_longer_short(room_wait.number, false);
            return Err(Errno::INTR.into());
        }
        let tree = self.metadata.read_tree();
        drop(self.metadata.wait_changed(tree, left.min(LOOK_EVERY)));
        Ok(())
    }

    /// There was room after all.
    pub(crate) fn has_room(&self, room_wait: &RoomWait) {
        if room_wait.number != 0 {
            self.no_longer_short(room_wait.number, false);
        }
    }

    /// Tries until there is room.
    pub(crate) fn with_room<T>(
        &self,
        about: (Option<FileId>, &[u8], RunId),
        act: impl Fn() -> FsResult<T>,
    ) -> FsResult<T> {
        let mut room_wait = RoomWait::default();
        loop {
            match act() {
                Err(fault) => self.await_room(&mut room_wait, about, fault)?,
                made => {
                    self.has_room(&room_wait);
                    return made;
                }
            }
        }
    }

    fn is_short(&self, id: Option<FileId>, path: &[u8], run: RunId, fault: &Fault) -> u64 {
        let (path, run) = match id {
            None => (path.to_vec(), run),
            Some(id) => {
                let tree = self.metadata.read_tree();
                (tree.logical_path(id).unwrap_or_default(), tree.get(id).map_or(run, |inode| inode.run))
            }
        };
        let mut tiers: Vec<&str> = self.tiers.devices().map(surgetank_tier::Device::tier_name).collect();
        tiers.dedup();
        let refused = if fault.note.is_empty() { fault.errno.to_string() } else { fault.note.to_string() };
        let why = format!(
            "no room is left anywhere: the tiers ({}) are full of what is not in the store yet, and the store {} does not take it ({refused}); everything closed before is safe",
            tiers.join(", "),
            self.store.describe(),
        );
        tracing::warn!(path = %String::from_utf8_lossy(&path), why, "a writer waits for room");
        let mut short = self.short.lock().unwrap_or_else(PoisonError::into_inner);
        let number = short.next_number();
        let at_unix_seconds = clock::now().secs();
        short.list.push(Short { path, run, why, since: clock::tick(), at_unix_seconds, refused: false, number });
        number
    }

    fn no_longer_short(&self, number: u64, refused: bool) {
        let mut short = self.short.lock().unwrap_or_else(PoisonError::into_inner);
        if !refused || short.list.iter().filter(|one| one.refused).count() >= REMEMBERED_MAX {
            short.list.retain(|one| one.number != number);
        } else if let Some(one) = short.list.iter_mut().find(|one| one.number == number) {
            one.refused = true;
            self.events.count(EventKind::NoRoom, "store", "the tiers were full and the store took no more", 0);
        }
    }

    /// Writers that wait for room, and those that got the error.
    pub fn short_of_room(&self) -> Vec<Short> {
        self.short.lock().unwrap_or_else(PoisonError::into_inner).list.clone()
    }
}

#[derive(Debug, Default)]
pub(crate) struct Shorts {
    list: Vec<Short>,
    last: u64,
}

impl Shorts {
    fn next_number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }
}
