//! Which pages the kernel may keep when a file is opened again.
//!
//! Where the kernel reads the plain file itself (`Grant::Direct`), it has no pages from the agent. Elsewhere (an
//! ordinary user's mount, an older kernel, a store that passes through itself) it caches the answers of the agent. It
//! drops them at every open that does not call them valid. Then each further read of the file would request everything
//! again.
//!
//! Invariant: pages are valid if no process could write since the open at which the kernel began to keep them. While
//! there is a writer, nothing is kept. Until both opens are closed, the kernel decides what a write does to pages that
//! are being read.
//!
//! The danger that this avoids: a program reads old pages after the file changed.

use surgetank_state::{Inode, Pages};
use surgetank_types::clock;
use surgetank_types::error::FsResult;
use surgetank_types::model::StoreIdentity;

use crate::content::{Location, Open};
use crate::files::copies::Copies;

/// A younger version may be written again without another time, because the clocks of file systems are that coarse.
const YOUNG_NANOS: i64 = 2_000_000_000;

impl Copies {
    /// A further reader opens the file: has the store's file changed since the first open? If the answer is unknown,
    /// the kernel keeps no pages. The open itself succeeds, because the open file can be read.
    pub(crate) fn look_whether_still(&self, open: &Open) {
        let may_change = open.found.is_some() && open.content().location == Location::Store;
        let look = || Ok(self.is_to_be_looked_at(open.id)? && self.look_quietly(open.id)?);
        let looked: FsResult<bool> = if may_change { look() } else { Ok(false) };
        if looked.is_err()
            && let Some(inode) = self.metadata.write_tree().get_mut(open.id)
        {
            inode.pages = None;
            inode.checked = None;
        }
    }

    /// Do the kernel's pages match what is open now? Records which version the kernel gets pages of from now on.
    pub(crate) fn may_keep_pages(&self, open: &Open) -> bool {
        let location = open.content().location;
        let mut tree = self.metadata.write_tree();
        let Some(inode) = tree.get_mut(open.id) else { return false };
        let now = of_what(inode, open, location);
        let keep = now.is_some() && inode.pages.as_deref() == now.as_ref();
        if !keep {
            inode.pages = now.map(Box::new);
        }
        keep
    }
}

/// `None`: the file may change without a report to the agent.
fn of_what(inode: &Inode, open: &Open, location: Location) -> Option<Pages> {
    if !inode.sealed {
        return None;
    }
    match location {
        Location::Tier(_) | Location::StoreTemporary => Some(Pages::Ours(inode.epoch)),
        Location::Store => {
            let found = open.found.filter(|found| inode.identity.as_ref() == Some(found))?;
            is_settled(&found).then_some(Pages::Store(found))
        }
        Location::Arriving => None,
    }
}

fn is_settled(version: &StoreIdentity) -> bool {
    !version.is_touched() && version.ctime_nanos.saturating_add(YOUNG_NANOS) < clock::now().nanos
}
