//! The length of files here whose content is at another member: brought before the last writer's handle ends here.
//!
//! The danger that this avoids: an earlier answer is recorded after a later one. So each answer has a stamp of its home, which
//! was taken before the content was looked at.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::OFlags;
use rustix::io::Errno;
use surgetank_core::namespace::Dispatcher;
use surgetank_types::error::FsResult;
use surgetank_types::model::{Attr, Caller, FileId};

use super::super::call::{Answer, Ask, Content};
use super::homes::agent;
use super::{Router, delegating};
use crate::mount::Filesystem;
use crate::mount::request::ReleaseFlags;

/// The newest that is known of the content after asking its home.
pub(super) fn attributes_at<F: Filesystem>(router: &Router<F>, member: u32, number: u64) -> FsResult<Attr> {
    match router.remote.ask(&agent(), Router::<F>::at_handle(member), Ask::HomeAttributes { number })? {
        Answer::Content(content) => Ok(router.lengths.newest(number, content)),
        _ => Err(Errno::PROTO.into()),
    }
}

/// What the home says of content with a close of it: the close itself comes next.
pub(super) fn announced<F: Filesystem>(router: &Router<F>, member: Option<u32>, id: u64, value: &[u8]) -> FsResult<()> {
    let content = postcard::from_bytes::<Content>(value).map_err(|_| Errno::INVAL)?;
    if member.is_none() || router.namespace.homes.home_of(FileId(id)) != member {
        return Err(Errno::STALE.into());
    }
    router.lengths.newest(id, content);
    *router.lengths.hold().announced.entry(id).or_default() += 1;
    Ok(())
}

/// The handle of a name here ends. If its program wrote, the length of the content is brought first. (One after the other: an
/// earlier answer must not be recorded after a later one.)
pub(super) fn end_name<F: Filesystem>(router: &Router<F>, id: u64, fh: u64, flags: ReleaseFlags) {
    if router.namespace.homes.home_of(FileId(id)).is_none() {
        return router.namespace.order.close(fh, FileId(id), || router.door.release(id, fh, flags));
    }
    let one = router.lengths.of(id);
    let _one = one.lock().unwrap_or_else(PoisonError::into_inner);
    let homes = &router.namespace.homes;
    let content = if homes.writes(fh) { bring_size(router, id, fh, (true, true)) } else { None };
    router.namespace.order.close(fh, FileId(id), || router.door.release(id, fh, flags));
    if !homes.is_written(FileId(id)) {
        router.lengths.is_known(id);
        // (The plain file here is one hole.)
        if let Some(content) = content {
            homes.takes_blocks(FileId(id), content.blocks);
            // (It may have been looked at since it was closed.)
            delegating::changed(router, id);
        }
    }
}

/// fsync(2) through a handle of the name.
pub(super) fn sync_name<F: Filesystem>(
    router: &Router<F>,
    caller: &Caller,
    id: u64,
    (handle, data_only): (u64, bool),
) -> FsResult<()> {
    // (If it is not known, the drain waits for it.)
    let _ = bring(router, id, handle, false);
    router.door.fsync(caller, id, handle, data_only)
}

/// While a program writes content that is elsewhere: its length is the one here from now on. `wrote`: its program may have
/// written. Returns whether it is known.
pub(super) fn bring<F: Filesystem>(router: &Router<F>, id: u64, handle: u64, wrote: bool) -> bool {
    let homes = &router.namespace.homes;
    if homes.home_of(FileId(id)).is_none() || !homes.is_written(FileId(id)) {
        return true;
    }
    let one = router.lengths.of(id);
    let _one = one.lock().unwrap_or_else(PoisonError::into_inner);
    bring_size(router, id, handle, (wrote, false)).is_some() || homes.home_of(FileId(id)).is_none()
}

/// `ends`: the handle does. Returns the attributes of the content.
fn bring_size<F: Filesystem>(router: &Router<F>, id: u64, fh: u64, (wrote, ends): (bool, bool)) -> Option<Attr> {
    let homes = &router.namespace.homes;
    let member = homes.home_of(FileId(id))?;
    let known = |attr: &Attr| homes.content_is(fh, (attr.size_bytes, attr.mtime), wrote);
    let announced = if ends { router.lengths.take_announced(id) } else { None };
    let newest = announced.map_or_else(|| attributes_at(router, member, id), Ok);
    match newest.and_then(|attr| known(&attr).map(|()| attr)) {
        Ok(attr) => return Some(attr),
        // (Its program was killed before it had made the content.)
        Err(fault) if fault.errno == Errno::NOENT => homes.never_began(FileId(id)),
        // The drain compares the length: it does not publish the file before that is known.
        Err(fault) => {
            tracing::warn!(member, id, why = %fault.errno, "the length of a file at another member is unknown");
            // (ESTALE: the member is gone, and the content with it.)
            if fault.errno != Errno::STALE {
                router.lengths.unknown(id);
            }
        }
    }
    None
}

/// Asks again for lengths of which the home has not answered.
pub(super) fn bring_unknown<F: Filesystem>(router: &Router<F>) {
    let homes = &router.namespace.homes;
    for id in router.lengths.take_unknown() {
        let Some(member) = homes.home_of(FileId(id)) else { continue };
        let (there, here) = (attributes_at(router, member, id), router.door.getattr(&agent(), id, None));
        match (there, here) {
            (Ok(there), Ok(here)) if there.size_bytes != here.attr.size_bytes => {
                // (As a program that opens the file for writing and closes it.)
                match Dispatcher::unasked(|| router.door.open(&agent(), id, OFlags::WRONLY, false)) {
                    Ok(opened) => {
                        delegating::changed(router, id);
                        end_name(router, id, opened.fh, ReleaseFlags::default());
                    }
                    Err(fault) if fault.errno == Errno::STALE => {}
                    Err(_) => router.lengths.unknown(id),
                }
            }
            (Ok(_), _) if !homes.is_written(FileId(id)) => router.lengths.is_known(id),
            (Ok(_), _) => {}
            (Err(fault), _) if [Errno::STALE, Errno::NOENT].contains(&fault.errno) => {}
            (Err(_), _) => router.lengths.unknown(id),
        }
    }
}

/// An earlier agent may have sealed files whose length it did not learn.
pub(super) fn look_at_lengths<F: Filesystem>(router: &Router<F>) {
    if router.link.had_earlier() {
        router.namespace.homes.undrained().into_iter().for_each(|id| router.lengths.unknown(id.0));
    }
}

/// Lengths of files whose content is elsewhere, while they are brought.
#[derive(Default)]
pub(super) struct Lengths {
    brought: Mutex<HashMap<u64, Arc<Mutex<()>>>>,
    unknown: Mutex<BTreeSet<u64>>,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    /// The newest answers of homes about files that programs write.
    contents: HashMap<u64, Content>,
    /// How many closes the home has announced that have not come yet.
    announced: HashMap<u64, usize>,
}

impl Lengths {
    fn of(&self, id: u64) -> Arc<Mutex<()>> {
        let mut brought = self.brought.lock().unwrap_or_else(PoisonError::into_inner);
        brought.retain(|of, one| *of == id || Arc::strong_count(one) > 1);
        brought.entry(id).or_default().clone()
    }

    fn unknown(&self, id: u64) {
        self.unknown.lock().unwrap_or_else(PoisonError::into_inner).insert(id);
    }

    /// An answer about a file: an earlier one, if that is newer.
    pub fn newest(&self, id: u64, content: Content) -> Attr {
        let mut seen = self.hold();
        let newest = seen.contents.entry(id).or_insert(content);
        if newest.stamp_nanos < content.stamp_nanos {
            *newest = content;
        }
        newest.attr
    }

    /// The last answer about a file that programs write.
    pub fn last(&self, id: u64) -> Option<Attr> {
        self.hold().contents.get(&id).map(|content| content.attr)
    }

    /// What the home said with a close. (Another member's close may take it. Then the home is asked at the announced one.)
    fn take_announced(&self, id: u64) -> Option<Attr> {
        let mut seen = self.hold();
        let closes = seen.announced.get_mut(&id)?;
        *closes -= 1;
        if *closes == 0 {
            seen.announced.remove(&id);
        }
        seen.contents.get(&id).map(|content| content.attr)
    }

    /// The version is sealed: its attributes are this member's.
    pub fn is_known(&self, id: u64) {
        let mut seen = self.hold();
        seen.contents.remove(&id);
        seen.announced.remove(&id);
    }

    fn take_unknown(&self) -> BTreeSet<u64> {
        std::mem::take(&mut *self.unknown.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn hold(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
