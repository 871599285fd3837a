//! What the shim's door asks of the pool: may this member serve a directory now, and until when may processes believe the index?
//!
//! The danger that this avoids: a process gets a file from this member after another one decides about it.

use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use std::time::Duration;

use surgetank_core::namespace::pooled;
use surgetank_types::model::{Caller, FileId};

use super::super::link::Owner;
use super::Router;
use crate::mount::Filesystem;
use crate::shimdoor::{Membership, Stops};

/// The shim's door, as far as the router needs it.
#[derive(Default)]
pub(super) struct Shim {
    stops: OnceLock<Stops>,
}

/// The caller uses names in the directory. If it acts for another member, processes make no files there without a request from
/// now on.
pub(super) fn uses_names<F: Filesystem>(router: &Router<F>, caller: &Caller, dir: u64) {
    let (pooled, id) = (&router.namespace.pooled, FileId(dir));
    if router.remote.at(dir).is_none() && pooled.is_delegated(id) && router.is_of_a_peer(caller) {
        pooled.is_used_by_others(id);
    }
}

/// Processes believe nothing of this member any more. (This member refuses their requests already.)
pub(super) fn stop<F: Filesystem>(router: &Router<F>) {
    if let Some(stop) = router.shim.stops.get() {
        stop();
    }
}

impl<F: Filesystem> Membership for Router<F> {
    fn within(&self, dir: FileId, act: &mut dyn FnMut()) -> bool {
        // (Before the owner is looked up: a directory is given back when the work is done.)
        let _work = self.works.enter();
        let is_ours = match self.namespace.pooled.place_of(dir) {
            Some(pooled::Place::Made) => true,
            Some(pooled::Place::OfTheStore(path)) => self.link.owner(&path) == Owner::Us && !self.gives_back(&path),
            None => false,
        };
        // (Of a directory that another member answers for, the mount makes changes known there.)
        let is_given = self.delegating.may_be_given(dir.0);
        let serves = is_ours && !is_given && self.link.may_serve() && !self.leaving.load(Ordering::SeqCst);
        if serves {
            act();
        }
        serves
    }

    fn serves_until(&self) -> Duration {
        if self.left.load(Ordering::SeqCst) { Duration::ZERO } else { self.link.serves_until() }
    }

    fn on_stop(&self, stops: Stops) {
        // (Set once: an agent has one door.)
        let _ = self.shim.stops.set(stops);
    }
}
