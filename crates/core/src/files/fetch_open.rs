//! The first open of a file that only a store without plain files (an object store) has.
//!
//! - Small files are fetched whole to a tier before the open returns. So are files that a process writes, and all files
//!   where the agent does not mediate. They are then resident like any other: durable, evictable.
//! - Large files are read while they arrive (`namespace/fetch`), mediated until the last close.
//! - A lack of room on the tiers fails an open for reading only where the agent does not mediate. Otherwise the reads
//!   use a window.
//!
//! The danger that this avoids: attributes of one version with bytes of another. The fetched version is compared with
//! the known one; if they differ, the agent looks at the file again. From then on the store serves that version or
//! fails.

use std::fs::File;
use std::io;

use surgetank_policy::config::Config;
use surgetank_policy::placement::AskKind;
use surgetank_state::Tree;
use surgetank_store::{Remote, Source, Store, StorePath};
use surgetank_tier::Tiers;
use surgetank_types::error::{Errno, FsResult};
use surgetank_types::model::{FileId, Kind, Mode, RunId, StoreIdentity, data_bytes};
use surgetank_types::sync::Arc;
use surgetank_types::sync::atomic::Ordering;

use crate::base::Base;
use crate::base::events::Events;
use crate::base::queries::{StoreQueries, is_absent};
use crate::base::users::own_cred;
use crate::base::waits::Waits;
use crate::content::fetch::{Fetch, WINDOW_BYTES};
use crate::content::{Content, Location, Open, Placed};
use crate::files::copies::Copies;
use crate::files::evict::Eviction;
use crate::files::open_files::OpenFiles;
use crate::files::place::Placer;
use crate::files::room_wait::RoomWaits;
use crate::files::{Given, Via};
use crate::metadata::Metadata;
use crate::metadata::access::Access;

/// Files up to this size are fetched whole: one range, and processes get the plain file itself.
const WHOLE_BYTES_MAX: u64 = 4 << 20;
/// The limit of tries while another client keeps replacing the file during one open.
pub(crate) const LOOKS_MAX: usize = 10;

/// One version of a file in the store, and its path.
pub(crate) struct There {
    pub remote: Arc<dyn Remote>,
    pub path: StorePath,
}

enum Version {
    Known,
    /// Another client has made this version.
    Another,
}

/// Brings files from the store to a tier: ahead of use, or chunk by chunk while they are read.
pub struct Fetches {
    config: Arc<Config>,
    pub(super) events: Arc<Events>,
    pub(super) queries: Arc<StoreQueries>,
    pub(super) store: Arc<dyn Store>,
    pub(super) tiers: Arc<Tiers>,
    pub(super) waits: Arc<Waits>,
    access: Arc<Access>,
    pub(super) copies: Arc<Copies>,
    pub(super) eviction: Arc<Eviction>,
    pub(super) metadata: Arc<Metadata>,
    pub(super) open_files: Arc<OpenFiles>,
    pub(super) placer: Arc<Placer>,
    pub(super) room_waits: Arc<RoomWaits>,
}

impl Fetches {
    #[expect(clippy::too_many_arguments, reason = "one for each component that it uses")]
    pub(crate) fn new(
        base: &Base,
        access: &Arc<Access>,
        copies: &Arc<Copies>,
        eviction: &Arc<Eviction>,
        metadata: &Arc<Metadata>,
        open_files: &Arc<OpenFiles>,
        placer: &Arc<Placer>,
        room_waits: &Arc<RoomWaits>,
    ) -> Self {
        Self {
            config: base.config.clone(),
            events: base.events.clone(),
            queries: base.queries.clone(),
            store: base.store.clone(),
            tiers: base.tiers.clone(),
            waits: base.waits.clone(),
            access: access.clone(),
            copies: copies.clone(),
            eviction: eviction.clone(),
            metadata: metadata.clone(),
            open_files: open_files.clone(),
            placer: placer.clone(),
            room_waits: room_waits.clone(),
        }
    }

    /// The first open of a file that only the store has. `None`: the file is resident now, and the caller opens it as
    /// such. The caller holds the inode's lock.
    pub(crate) fn open_for_fetch(&self, id: FileId, writes: bool, via: Via) -> FsResult<Option<Open>> {
        for _ in 0..LOOKS_MAX {
            let (there, size_bytes) = self.there(id)?;
            let brought = if writes || via.is_only() {
                let kind = AskKind::CopyUp { bytes: size_bytes };
                self.room_waits.with_room((Some(id), b"", RunId(0)), || self.bring_in(id, &there, kind))
            } else if size_bytes <= WHOLE_BYTES_MAX {
                self.bring_in(id, &there, AskKind::Fetch { bytes: size_bytes })
            } else {
                return self.open_fetching(id, there, size_bytes).map(Some);
            };
            match brought {
                Ok(()) => return Ok(None),
                Err(fault) if fault.errno == Errno::NOSPC && !writes && !via.is_only() => {
                    return self.open_fetching(id, there, size_bytes).map(Some);
                }
                // It got other attributes or another path during the fetch, or is another file now.
                Err(fault) if fault.errno == Errno::STALE => {}
                Err(fault) => return Err(fault),
            }
        }
        Err(Errno::STALE.into())
    }

    /// The known version of the file, ready to be read, and its size.
    pub(crate) fn there(&self, id: FileId) -> FsResult<(There, u64)> {
        for _ in 0..LOOKS_MAX {
            let (path, owner) = {
                let tree = self.metadata.read_tree();
                let inode = tree.get(id).ok_or(Errno::STALE)?;
                (tree.applied_path(id).ok_or(Errno::STALE)?, inode.cred())
            };
            let who = own_cred(owner);
            let source = self
                .access
                .let_in(id, || self.queries.must_ask((who, &path), |store, who, path| store.source(who, path)));
            // The next look-up of its name finds that it is gone.
            let source = source.map_err(|why| if is_absent(&why) { Errno::STALE.into() } else { why })?;
            let Source::Remote(remote) = source else { return Err(Errno::OPNOTSUPP.into()) };
            match self.version(id, &path, remote.identity())? {
                Version::Known => {
                    let size_bytes = remote.identity().size_bytes;
                    return Ok((There { remote, path }, size_bytes));
                }
                Version::Another => self.copies.look_at_it(id)?,
            }
        }
        Err(Errno::STALE.into())
    }

    /// Is it the version whose attributes programs see?
    fn version(&self, id: FileId, path: &StorePath, is: StoreIdentity) -> FsResult<Version> {
        let mut tree = self.metadata.write_tree();
        let moved = tree.applied_path(id).as_ref() != Some(path);
        let inode = tree.get_mut(id).ok_or(Errno::STALE)?;
        let known = inode.identity;
        if known.is_some_and(|known| known.is_still(&is)) {
            inode.identity = Some(is);
            inode.checked = Some(surgetank_types::clock::Moment::now());
            return Ok(Version::Known);
        }
        // The drain moved it or changed its attributes: its bytes are the same.
        if moved {
            return Err(Errno::STALE.into());
        }
        let queued = tree.is_queued(id);
        match known {
            Some(known) if queued && (known.ino, known.size_bytes) == (is.ino, is.size_bytes) => Ok(Version::Known),
            _ if queued => Err(Errno::STALE.into()),
            _ => Ok(Version::Another),
        }
    }

    /// Fetches the whole file to a tier. The caller holds the inode's lock.
    pub(crate) fn bring_in(&self, id: FileId, there: &There, kind: AskKind) -> FsResult<()> {
        let size_bytes = there.remote.identity().size_bytes;
        if self.metadata.read_tree().logical_path(id).is_none() {
            return Err(Errno::STALE.into());
        }
        let Some((placed, target)) = self.place_hidden(id, kind)? else { return Err(Errno::NOSPC.into()) };
        let source = Source::Remote(there.remote.clone());
        let gate = |_| if self.waits.is_killed() { Err(Errno::INTR.into()) } else { Ok(()) };
        let copied = source.copy_to(&target, size_bytes, &gate);
        crash_point!("fetch.copied");
        let mut tree = self.metadata.write_tree();
        let adopted = copied
            .map_err(crate::files::fetch_read::as_fault)
            .and_then(|()| self.take_in(&mut tree, id, &placed, &target));
        if adopted.is_err() {
            self.placer.undo_placed(&mut tree, &placed);
        } else if let (Location::Tier(device), Ok(charged_bytes)) = (&placed.content.location, &adopted) {
            let device = self.tiers.device(*device);
            device.unreserve(placed.reserved_bytes);
            let written_bytes = data_bytes(size_bytes, charged_bytes / 512);
            device.counters().bytes_in.fetch_add(written_bytes, Ordering::Relaxed);
        }
        adopted.map(drop)
    }

    /// Creates a hidden plain file for the fetch, with its own id: the file itself may have a hidden one already.
    fn place_hidden(&self, id: FileId, kind: AskKind) -> FsResult<Option<(Placed, File)>> {
        let (path, wish, perm, copy) = {
            let mut tree = self.metadata.write_tree();
            // A file that lost its name is fetched for its reader alone.
            let path = tree.logical_path(id).unwrap_or_default();
            let copy = tree.new_id();
            let mut wish = self.placer.wish(&tree, id, &path);
            if !matches!(kind, AskKind::CopyUp { .. }) {
                wish.mode = Mode::Copy;
            }
            (path, wish, tree.get(id).ok_or(Errno::STALE)?.attr.perm, copy)
        };
        let mut placed = self.placer.place(&path, copy, kind, &wish, perm, Via::Mount)?;
        // A descriptor for writing in the agent would prevent its own leases.
        placed.made = None;
        if !matches!(placed.content.location, Location::Tier(_)) {
            self.placer.undo_placed(&mut self.metadata.write_tree(), &placed);
            return Ok(None);
        }
        match placed.writable() {
            Ok(target) => Ok(Some((placed, target))),
            Err(why) => {
                self.placer.undo_placed(&mut self.metadata.write_tree(), &placed);
                Err(why.into())
            }
        }
    }

    /// All bytes are there: the hidden file becomes the file's copy on the tier. Returns the charged bytes.
    pub(crate) fn take_in(&self, tree: &mut Tree, id: FileId, placed: &Placed, file: &File) -> FsResult<u64> {
        let inode = tree.get(id).ok_or(Errno::STALE)?;
        let fits = inode.attr.kind == Kind::File && inode.replica.is_none() && inode.sealed && !inode.dirty();
        if !fits || inode.logical.is_none() {
            return Err(Errno::STALE.into());
        }
        let Location::Tier(device) = placed.content.location else { return Err(Errno::STALE.into()) };
        // Its times are those that programs see.
        Given::known(&inode.attr).give(file)?;
        let charged_bytes = u64::try_from(rustix::fs::fstat(file)?.st_blocks).unwrap_or(0) * 512;
        tree.own(id);
        self.placer.adopt(tree, id, placed)?;
        if let Some(inode) = tree.get_mut(id) {
            inode.charged_bytes = charged_bytes;
        }
        self.tiers.device(device).add_used(i64::try_from(charged_bytes).unwrap_or(i64::MAX));
        tree.recount(id);
        crash_point!("fetch.adopted");
        self.metadata.commit(tree);
        Ok(charged_bytes)
    }

    /// Opens the file while it arrives. Makes no request: the first reader decides what to fetch.
    pub(crate) fn open_fetching(&self, id: FileId, there: There, size_bytes: u64) -> FsResult<Open> {
        let (file, placed) = match self.place_to_fetch(id, size_bytes)? {
            Some((placed, file)) => (file, Some(placed)),
            None => (self.window(size_bytes)?, None),
        };
        let file = Arc::new(file);
        let content = Content { file: file.clone(), location: Location::Arriving, writable: false };
        let open = Open::new(id, content, false, None, 0);
        open.set_fetch(Arc::new(Fetch::new(there.remote, there.path, size_bytes, file, placed)));
        Ok(open)
    }

    /// Reopens a file that a process has been reading since an earlier agent, which died before the file was complete.
    /// `None`: the content is elsewhere, or gone.
    pub(crate) fn fetches_again(&self, id: FileId) -> Option<Open> {
        let elsewhere = |tree: &Tree| tree.get(id).is_none_or(|inode| inode.replica.is_some() || inode.dirty());
        if self.store.features().plain_files || elsewhere(&self.metadata.read_tree()) {
            return None;
        }
        let opened = self.there(id).and_then(|(there, size_bytes)| self.open_fetching(id, there, size_bytes));
        opened.inspect_err(|why| tracing::error!(id = id.0, %why, "cannot be read on: ESTALE")).ok()
    }

    /// A place where the whole file fits without an eviction; otherwise one where it can begin. It is charged as it arrives.
    fn place_to_fetch(&self, id: FileId, size_bytes: u64) -> FsResult<Option<(Placed, File)>> {
        let asks = [AskKind::Prefetch { bytes: size_bytes }, AskKind::Fetch { bytes: size_bytes.min(WINDOW_BYTES) }];
        for kind in asks {
            match self.place_hidden(id, kind) {
                Ok(None) => {}
                Err(fault) if fault.errno == Errno::NOSPC => {}
                Err(fault) => return Err(fault),
                Ok(Some((mut placed, file))) => {
                    if let Location::Tier(device) = placed.content.location {
                        self.tiers.device(device).unreserve(std::mem::take(&mut placed.reserved_bytes));
                    }
                    if let Err(why) = file.set_len(size_bytes) {
                        self.placer.undo_placed(&mut self.metadata.write_tree(), &placed);
                        return Err(why.into());
                    }
                    return Ok(Some((placed, file)));
                }
            }
        }
        Ok(None)
    }

    /// A file without a name, in the state directory rather than in memory. Only a window of it is filled.
    fn window(&self, size_bytes: u64) -> io::Result<File> {
        use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags};
        let on_disk = || -> io::Result<File> {
            let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
            let file = File::from(rustix::fs::open(&self.config.state, flags, Mode::from_raw_mode(0o600))?);
            file.set_len(size_bytes)?;
            // Chunks that are no longer needed have to be punched out.
            rustix::fs::fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, 4096)?;
            Ok(file)
        };
        on_disk().or_else(|_| {
            let file = File::from(rustix::fs::memfd_create("surgetank-window", MemfdFlags::CLOEXEC)?);
            file.set_len(size_bytes)?;
            Ok(file)
        })
    }
}
