//! Which pages the kernel may keep when a file is opened again.
//!
//! Where the kernel reads the plain file itself (`Grant::Direct`) it has none of ours. Where it cannot (an ordinary user's mount, an
//! older kernel, a store that passes through itself) it has pages of what it asked us for, and drops them at every open that does
//! not say that they are good: whoever reads a file again would ask us for all of it again.
//!
//! They are good if nobody could write since the open at which they began to be kept. With a writer about nothing is kept:
//! what a write through another open makes of pages that are just being read is the kernel's affair until both are closed.

use surgetank_types::clock;
use surgetank_types::error::FsResult;
use surgetank_types::model::StoreIdentity;

use super::super::Namespace;
use super::super::content::{Location, Open};
use surgetank_state::{Inode, Pages};

/// A version that is younger than this may be written again without another time: file systems' clocks are that coarse.
const YOUNG_NANOS: i64 = 2_000_000_000;

impl Namespace {
    /// Somebody opens it for reading who is not the first: was the store's file changed since it was opened? Where that
    /// cannot be told no pages are kept; it fails no open, for what was opened can be read.
    pub(super) fn look_whether_still(&self, open: &Open) {
        let may_change = open.found.is_some() && open.content().location == Location::Store;
        let look = || Ok(self.is_to_be_looked_at(open.id)? && self.look_quietly(open.id)?);
        let looked: FsResult<bool> = if may_change { look() } else { Ok(false) };
        if looked.is_err()
            && let Some(inode) = self.write_tree().get_mut(open.id)
        {
            inode.pages = None;
            inode.checked = None;
        }
    }

    /// Are the pages that the kernel may have of it those of what is open now? Remembers of what it gets some from now on.
    pub(super) fn may_keep_pages(&self, open: &Open) -> bool {
        let location = open.content().location;
        let mut tree = self.write_tree();
        let Some(inode) = tree.get_mut(open.id) else { return false };
        let now = of_what(inode, open, location);
        let keep = now.is_some() && inode.pages.as_deref() == now.as_ref();
        if !keep {
            inode.pages = now.map(Box::new);
        }
        keep
    }
}

/// `None`: of what may change without our hearing of it.
fn of_what(inode: &Inode, open: &Open, location: Location) -> Option<Pages> {
    if !inode.sealed {
        return None;
    }
    match location {
        Location::Tier(_) | Location::StoreTemporary => Some(Pages::Ours(inode.epoch)),
        Location::Store => {
            let found = open.found.filter(|found| inode.identity.as_deref() == Some(found))?;
            is_settled(&found).then_some(Pages::Store(found))
        }
        Location::Arriving => None,
    }
}

fn is_settled(version: &StoreIdentity) -> bool {
    !version.is_touched() && version.ctime_nanos.saturating_add(YOUNG_NANOS) < clock::now().nanos
}
