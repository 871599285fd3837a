//! Attaches content to an open file: direct or mediated, an existing plain file or one that was just placed.
//!
//! The danger that this avoids: an incomplete copy becomes the content, or a failed copy stays charged.

use surgetank_policy::placement;
use surgetank_policy::placement::{Ask, AskKind, DirtyRoom, Place};
use surgetank_types::error::{Errno, FsResult};
use surgetank_types::model::{DeviceId, FileId, Mode, RunId};
use surgetank_types::sync::Arc;
use surgetank_types::sync::atomic::Ordering;

use crate::content::{Content, Location, Open, Placed};
use crate::files::place::Placer;
use crate::files::{Given, Via, Wish};

/// How the file is to be opened.
#[derive(Clone, Copy)]
pub(crate) struct Wanted {
    pub via: Via,
    pub writes: bool,
    pub direct: bool,
}

impl Placer {
    /// Registers the plain file with the kernel if it is to be direct; mediates where the kernel cannot do that.
    pub(crate) fn attach(
        &self,
        id: FileId,
        mut content: Content,
        wanted: Wanted,
        charged_bytes: u64,
    ) -> FsResult<Open> {
        let Wanted { via, writes, direct } = wanted;
        let backing =
            (direct && via.is_mount() && self.may_be_direct(via)).then(|| self.open_files.back(id, &content)).flatten();
        let direct = backing.is_some() || (direct && !via.is_mount());
        if !direct && writes && !content.writable {
            content.file = Arc::new(crate::content::reopen_writable(&content.file)?);
            content.writable = true;
        }
        Ok(Open::new(id, content, direct, backing, charged_bytes))
    }

    /// Opens a store file whose next version goes to a tier: with the present bytes (copy-up) or empty.
    pub(crate) fn open_placed(
        &self,
        id: FileId,
        source: Option<&std::fs::File>,
        size_bytes: u64,
        via: Via,
    ) -> FsResult<Open> {
        // The size of the source counts, not the known one.
        let size_bytes = source.map_or(Ok(size_bytes), |source| source.metadata().map(|now| now.len()))?;
        self.room_waits.with_room((Some(id), b"", RunId(0)), || self.open_where_room_is(id, source, size_bytes, via))
    }

    fn open_where_room_is(
        &self,
        id: FileId,
        source: Option<&std::fs::File>,
        size_bytes: u64,
        via: Via,
    ) -> FsResult<Open> {
        let (path, wish, attr) = {
            let tree = self.metadata.read_tree();
            let inode = tree.get(id).ok_or(Errno::STALE)?;
            let path = tree.logical_path(id).ok_or(Errno::STALE)?;
            let wish = self.wish(&tree, id, &path);
            (path, wish, inode.attr)
        };
        let kind = match source {
            Some(_) => AskKind::CopyUp { bytes: size_bytes },
            None => AskKind::Create { expected: self.expected(&path, &wish) },
        };
        // The agent fills it, whatever the program's flags are.
        let access = match via {
            Via::Only(_) => Via::Only(libc::O_RDWR),
            Via::Synced => Via::Synced,
            Via::Mount | Via::Shim(_) => Via::Mount,
        };
        let mut placed = self.place(&path, id, kind, &wish, attr.perm, access)?;
        // A writable descriptor in the agent would prevent its own leases.
        placed.made = None;
        let given = Given::known(&attr);
        let target = match source {
            Some(_) => Some(placed.writable()?),
            None => None,
        };
        if let (Some(source), Some(target)) = (source, &target) {
            // An open is not a change: the copy has the file's times.
            if let Err(why) = surgetank_types::ladder::copy_file(source, target, size_bytes, &|_| Ok(()))
                .and_then(|_| given.give(target))
            {
                self.undo_placed(&mut self.metadata.write_tree(), &placed);
                return Err(why.into());
            }
        }
        crash_point!("copy_up.copied");
        let mut tree = self.metadata.write_tree();
        tree.own(id);
        if let Err(fault) = self.adopt(&mut tree, id, &placed) {
            self.undo_placed(&mut tree, &placed);
            return Err(fault);
        }
        // Attributes that a process set by name since.
        if let (Some(target), Some(inode)) = (target, tree.get(id))
            && Given::known(&inode.attr) != given
        {
            Given::known(&inode.attr).give(&target)?;
        }
        // Charged with its adoption: from here on, the removal of its last name discharges it.
        if let (Location::Tier(device), Some(inode)) = (placed.content.location, tree.get_mut(id)) {
            inode.charged_bytes = size_bytes;
            self.tiers.device(device).add_used(i64::try_from(size_bytes).unwrap_or(i64::MAX));
        }
        crash_point!("copy_up.adopted");
        drop(tree);
        let open = self.bound(id, &placed, size_bytes, access)?;
        open.written.store(source.is_none(), Ordering::Relaxed);
        Ok(open)
    }

    /// The `Open` of a file that was just placed, and its charge.
    pub(crate) fn bound(&self, id: FileId, placed: &Placed, charged_bytes: u64, via: Via) -> FsResult<Open> {
        let wanted = Wanted { via, writes: true, direct: placed.direct };
        let open = self.attach(id, placed.content.clone(), wanted, 0)?;
        if let Location::Tier(device) = placed.content.location {
            let device = self.tiers.device(device);
            if open.direct {
                open.reserved_bytes.store(placed.reserved_bytes, Ordering::Relaxed);
            } else {
                device.unreserve(placed.reserved_bytes);
            }
            open.charged_bytes.store(charged_bytes, Ordering::Relaxed);
        }
        open.written.store(true, Ordering::Relaxed);
        Ok(open)
    }

    /// Can programs at this door have the plain file itself?
    pub(crate) fn may_be_direct(&self, via: Via) -> bool {
        via.is_only()
            || self.config.direct
                && match via {
                    Via::Synced => false,
                    Via::Mount => self.door.get().is_some_and(|door| door.passes_through()),
                    Via::Shim(_) | Via::Only(_) => true,
                }
    }

    /// Room for a direct writer of an existing file on a tier; `None`: mediate it.
    pub(crate) fn room_for_direct(&self, device: DeviceId, path: &[u8], wish: &Wish) -> Option<u64> {
        let views: Vec<_> = self.tiers.views().into_iter().filter(|view| view.id == device).collect();
        let ask = Ask {
            kind: AskKind::Create { expected: self.expected(path, wish) },
            preferred_tier: None,
            direct_possible: true,
            must_persist: false,
            mode: Mode::Keep,
            dirty: DirtyRoom { bytes: 0, bytes_max: u64::MAX },
            until_the_end: None,
            salt: 0,
        };
        match placement::choose(&ask, &views).0 {
            Place::Device { direct: true, reserve_bytes, .. } if self.tiers.device(device).leases() => {
                Some(reserve_bytes)
            }
            _ => None,
        }
    }
}
