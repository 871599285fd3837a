//! Copies that this member has of other members' files: taken in, changed, and put back when the owner of their names is lost.
//!
//! A copy is a file in the directory of contents, under a name that no program finds. One of its attributes is its record. So
//! the next agent knows it. While it comes, it has another name, and the next agent removes it.
//!
//! A copy of a lost member's file becomes content of this node for that file ([`lost`]): so it comes back under its path.
//!
//! The danger that this avoids: a copy that its owner has given up is put back. So this module only does what the owner says,
//! in the order in which it says it.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{OFlags, RenameFlags};
use rustix::io::Errno;
use surgetank_core::namespace::pooled::FILES_OF_A_MEMBER;
use surgetank_core::namespace::replicas::HeldFile;
use surgetank_store::StorePath;
use surgetank_types::clock::tick;
use surgetank_types::error::{Fault, FsResult};
use surgetank_types::model::FileId;

use super::super::call::{Answer, Ask, Call};
use super::super::link::NoAnswer;
use super::super::others::contents::Content;
use super::super::replicas::{Hold, LISTED_MAX, Record};
use super::Router;
use super::homes::agent;
use super::serving::is_below;
use crate::mount::request::{ReleaseFlags, SetAttr};
use crate::mount::{Filesystem, TimeChange, WriteFlags};

/// The attribute of a copy that has its record.
const RECORD: &[u8] = b"user.copy";

/// The copies here.
#[derive(Default)]
pub(super) struct Held {
    /// Those of each member and number that come now.
    parts: Mutex<HashMap<(u32, u64), Part>>,
    losing: Mutex<()>,
    /// By member: attempts before this one do not count. Held while a copy becomes one.
    since: Mutex<HashMap<u32, u64>>,
    /// By number: the last message, and when it came. An earlier one that comes later does not count.
    latest: Mutex<HashMap<u64, (u64, Instant)>>,
    /// Held while contents that are not needed are removed. (A copy that becomes content does not take the name of one.)
    pub(super) removing: Mutex<()>,
    /// When this member last looked whether it may leave.
    wants_to_leave: Mutex<Option<Instant>>,
    /// Since when an owner of copies does not answer, if this member is to leave.
    silent: Mutex<Option<Instant>>,
}

/// So long a member that leaves waits for an owner that does not answer and is not lost.
const SILENT: Duration = Duration::from_secs(120);

/// A member that leaves looks more often than this whether it may.
const LEAVING: Duration = Duration::from_secs(3);

/// No message comes so much later.
const LATE: Duration = Duration::from_secs(600);

#[derive(Debug, Clone)]
struct Part {
    attempt: u64,
    id: u64,
    fh: u64,
    name: String,
    bytes: u64,
    /// When its last piece came.
    came: Instant,
}

impl Held {
    fn since(&self) -> MutexGuard<'_, HashMap<u32, u64>> {
        self.since.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This member is to leave: it becomes the home of no other content.
    pub fn wants_to_leave(&self) {
        *self.wants_to_leave.lock().unwrap_or_else(PoisonError::into_inner) = Some(tick());
    }

    fn leaves(&self) -> bool {
        let last = *self.wants_to_leave.lock().unwrap_or_else(PoisonError::into_inner);
        last.is_some_and(|last| last.elapsed() < LEAVING)
    }

    /// Does the message about this number count? Then earlier ones do not, from now on.
    fn counts(&self, number: u64, attempt: u64) -> bool {
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        let counts = latest.get(&number).is_none_or(|(last, _)| *last <= attempt);
        if counts {
            latest.insert(number, (attempt, tick()));
        }
        counts
    }

    /// Is there no later message?
    fn may_be_latest(&self, number: u64, attempt: u64) -> bool {
        let latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        latest.get(&number).is_none_or(|(last, _)| *last <= attempt)
    }

    fn is_latest(&self, number: u64, attempt: u64) -> bool {
        let latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        latest.get(&number).is_none_or(|(last, _)| *last == attempt)
    }

    fn parts(&self) -> MutexGuard<'_, HashMap<(u32, u64), Part>> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The copies here, by number.
fn records<F: Filesystem>(router: &Router<F>) -> MutexGuard<'_, HashMap<u64, Record>> {
    router.others.written.copies.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Copies of a member's files.
pub(super) fn of<F: Filesystem>(router: &Router<F>, member: u32) -> Vec<Record> {
    let records = records(router);
    records.values().filter(|record| owner_of(record.number) == member).cloned().collect()
}

fn owner_of(number: u64) -> u32 {
    u32::try_from(number / FILES_OF_A_MEMBER).unwrap_or(0)
}

/// The name of a copy in the directory of contents.
pub(super) fn name_of<F: Filesystem>(router: &Router<F>, number: u64) -> String {
    format!("{}.c{number}", router.link.key())
}

/// What an earlier agent of this member had.
pub(super) fn find<F: Filesystem>(router: &Router<F>) {
    let prefix = format!("{}.", router.link.key());
    for HeldFile { name, record, .. } in router.namespace.replicas.held(&prefix, RECORD) {
        let rest = name.strip_prefix(prefix.as_bytes()).unwrap_or_default();
        let record = record.and_then(|record| postcard::from_bytes::<Record>(&record).ok());
        match (rest.first(), record) {
            (Some(b'c'), Some(record)) => {
                // (It was to become the content, and the owner has no answer.)
                let is_to_be = is_content(router, &record);
                let record = if is_to_be { Record { home: None, ..record } } else { record };
                let child = || router.namespace.pooled.child_of(router.namespace.homes.directory(), &name);
                if is_to_be && child().is_none_or(|id| note(router, id.0, &record).is_err()) {
                    remove(router, &name);
                    continue;
                }
                records(router).insert(record.number, record);
            }
            (Some(b'p' | b'c'), _) => remove(router, &name),
            (Some(_), Some(record)) if is_content(router, &record) => {
                records(router).insert(record.number, record);
            }
            // (It was to be put back.)
            (Some(_), Some(record)) => is_to_come_back(router, &record),
            _ => {}
        }
    }
}

/// The owner of the names says something about copies here, or the home sends the content of one.
pub(super) fn asked<F: Filesystem>(router: &Router<F>, member: u32, hold: &Hold) -> Answer {
    let of_member = |number: &u64| owner_of(*number) == member;
    let sends = |record: &Record, is_last: bool| record.home == Some(member) && !is_last;
    match hold {
        Hold::Piece { record, is_last, .. }
            if !(of_member(&record.number) || sends(record, *is_last)) || !is_path(&record.path) =>
        {
            failed(Errno::PERM)
        }
        Hold::Piece { record, attempt, offset, content, .. } if !of_member(&record.number) => {
            if !router.held.may_be_latest(record.number, *attempt) {
                return failed(Errno::STALE);
            }
            let owner = owner_of(record.number);
            take(router, owner, record, (*attempt, *offset), content, false).map_or_else(
                |fault| {
                    end_part(router, (owner, record.number), Some(*attempt));
                    failed(fault.errno)
                },
                |()| Answer::Done,
            )
        }
        Hold::Piece { record, attempt, .. } if !router.held.counts(record.number, *attempt) => failed(Errno::STALE),
        Hold::Piece { record, attempt, offset, content, is_last } => {
            match take(router, member, record, (*attempt, *offset), content, *is_last) {
                Ok(()) => Answer::Done,
                Err(fault) => {
                    end_part(router, (member, record.number), Some(*attempt));
                    let since = router.held.since();
                    let is_late = since.get(&member).is_some_and(|since| attempt < since);
                    // (The owner will not know of what is there, unless a later message, or its next agent, has made it. It goes on
                    // with a copy that this one was to replace.)
                    let is_replaced = records(router).get(&record.number).is_some_and(|has| record.follows(has));
                    if !is_late && !is_replaced && router.held.is_latest(record.number, *attempt) {
                        drop_copy(router, record.number);
                    }
                    failed(fault.errno)
                }
            }
        }
        Hold::Changed { attempt, gone, stored, records } => {
            // (One message after the other, and no copy becomes one meanwhile.)
            let since = router.held.since();
            if since.get(&member).is_some_and(|since| attempt < since) {
                return failed(Errno::STALE);
            }
            let mut is_late = false;
            // (A member says nothing about another one's files.)
            let mut counts = |number: &u64| {
                let counts = of_member(number) && router.held.counts(*number, *attempt);
                is_late |= !counts;
                counts
            };
            gone.iter().filter(|number| counts(number)).for_each(|number| drop_copy(router, *number));
            stored.iter().filter(|number| counts(number)).for_each(|number| is_stored(router, *number));
            let ours = records.iter().filter(|record| is_path(&record.path) && counts(&record.number));
            let said = ours.map(|record| says(router, record)).fold(Ok(()), Result::and);
            match said {
                // (The owner looks again.)
                Ok(()) if is_late => failed(Errno::STALE),
                Ok(()) => Answer::Done,
                Err(Fault { errno, .. }) => failed(errno),
            }
        }
        Hold::Home { record, .. } if !of_member(&record.number) || !is_path(&record.path) => failed(Errno::PERM),
        Hold::Home { attempt, record, is_home } => {
            // (No message of an earlier agent, and none that drops the copy, comes between.)
            let since = router.held.since();
            let is_late = since.get(&member).is_some_and(|since| attempt < since);
            if is_late || !router.held.counts(record.number, *attempt) {
                return failed(Errno::STALE);
            }
            // (A member that leaves looks after this whether it is a home.)
            let _work = router.works.enter();
            if !is_home && router.held.leaves() || router.left.load(Ordering::SeqCst) {
                return failed(Errno::BUSY);
            }
            let done = if *is_home { has_record(router, record) } else { becomes_content(router, record) };
            done.map_or_else(|fault| failed(fault.errno), |()| Answer::Done)
        }
        Hold::List { since, first } => {
            // (From now on none of an earlier agent comes.)
            let mut all = router.held.since();
            all.insert(member, *since);
            let mut records = of(router, member);
            records.retain(|record| record.number >= *first);
            records.sort_unstable_by_key(|record| record.number);
            records.truncate(LISTED_MAX);
            Answer::Bytes(postcard::to_stdvec(&records).unwrap_or_default())
        }
    }
}

fn failed(why: Errno) -> Answer {
    Answer::Failed(why.raw_os_error())
}

fn is_path(path: &[u8]) -> bool {
    is_below(&StorePath(path.to_vec()))
}

/// Takes a piece of a copy. With the last one it counts.
pub(super) fn take<F: Filesystem>(
    router: &Router<F>,
    member: u32,
    record: &Record,
    (attempt, offset): (u64, u64),
    content: &[u8],
    is_last: bool,
) -> FsResult<()> {
    let key = (member, record.number);
    let known = router.held.parts().get(&key).cloned().filter(|part| part.attempt == attempt);
    if offset == 0 && known.is_none() {
        end_part(router, key, None);
        begin_part(router, key, record, attempt)?;
    }
    // (A piece that was sent twice may come late.)
    let part = {
        let mut parts = router.held.parts();
        let part = parts.get_mut(&key).filter(|part| part.attempt == attempt && part.bytes == offset);
        let part = part.ok_or(Errno::STALE)?;
        (part.bytes, part.came) = (offset + content.len() as u64, tick());
        part.clone()
    };
    let mut written = 0;
    while written < content.len() {
        let (at, rest) = (offset + written as u64, content.get(written..).unwrap_or_default());
        match router.door.write(&agent(), part.id, part.fh, at, rest, WriteFlags::default())? {
            0 => return Err(Errno::NOSPC.into()),
            count => written += count,
        }
    }
    if is_last { complete(router, key, record, &part) } else { Ok(()) }
}

fn begin_part<F: Filesystem>(router: &Router<F>, key: (u32, u64), record: &Record, attempt: u64) -> FsResult<()> {
    let replicas = &router.namespace.replicas;
    if router.left.load(Ordering::SeqCst) {
        return Err(Errno::HOSTDOWN.into());
    }
    if !replicas.has_room_for(record.size_bytes) {
        return Err(Errno::NOSPC.into());
    }
    let name = format!("{}.p{}.{attempt}", router.link.key(), record.number);
    let (dir, flags) = (router.namespace.homes.directory().0, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL);
    let (entry, opened) = router.door.create(&agent(), dir, name.as_bytes(), 0o600, flags, false)?;
    // (No kernel knows it.)
    router.door.forget(entry.id, 1);
    router.held.parts().insert(key, Part { attempt, id: entry.id, fh: opened.fh, name, bytes: 0, came: tick() });
    Ok(())
}

/// What has come of a copy is not wanted: of this attempt, or of any.
fn end_part<F: Filesystem>(router: &Router<F>, key: (u32, u64), attempt: Option<u64>) {
    let is_meant = |part: &Part| attempt.is_none_or(|attempt| part.attempt == attempt);
    let part = {
        let mut parts = router.held.parts();
        if parts.get(&key).is_some_and(is_meant) { parts.remove(&key) } else { None }
    };
    if let Some(part) = part {
        router.door.release(part.id, part.fh, ReleaseFlags::default());
        remove(router, part.name.as_bytes());
    }
}

/// All of it has come: it is recorded, as durable as the tier makes it, and has its name.
fn complete<F: Filesystem>(router: &Router<F>, key: (u32, u64), record: &Record, part: &Part) -> FsResult<()> {
    let (door, caller) = (&router.door, agent());
    if door.getattr(&caller, part.id, Some(part.fh))?.attr.size_bytes != record.size_bytes {
        return Err(Errno::IO.into());
    }
    if router.namespace.homes.syncs_here(part.fh) {
        door.fsync(&caller, part.id, part.fh, false)?;
    }
    let since = router.held.since();
    let is_late = since.get(&key.0).is_some_and(|since| part.attempt < *since);
    if is_late || !router.held.is_latest(record.number, part.attempt) {
        return Err(Errno::STALE.into());
    }
    router.held.parts().remove(&key);
    door.release(part.id, part.fh, ReleaseFlags::default());
    let named = note(router, part.id, record).and_then(|()| {
        let dir = router.namespace.homes.directory().0;
        let (from, to) = (part.name.as_bytes(), name_of(router, record.number));
        door.rename(&caller, dir, from, dir, to.as_bytes(), RenameFlags::empty())
    });
    if named.is_err() {
        remove(router, part.name.as_bytes());
    }
    named?;
    records(router).insert(record.number, record.clone());
    Ok(())
}

/// The file has this record from now on.
fn note<F: Filesystem>(router: &Router<F>, id: u64, record: &Record) -> FsResult<()> {
    let value = postcard::to_stdvec(record).map_err(|_| Errno::INVAL)?;
    router.door.setxattr(&agent(), id, RECORD, &value, 0)?;
    if is_content(router, record) {
        // (Programs may write it.)
        return Ok(());
    }
    let (atime, mtime) = (Some(TimeChange::At(record.times.0)), Some(TimeChange::At(record.times.1)));
    router.door.setattr(&agent(), id, &SetAttr { atime, mtime, ..SetAttr::default() })?;
    Ok(())
}

/// A copy here is of a file with another name, or other attributes. Errors: ENOENT, there is none of this version;
/// ESTALE, it is of a later close.
fn says<F: Filesystem>(router: &Router<F>, record: &Record) -> FsResult<()> {
    let known = record_of(router, record.number).ok_or(Errno::NOENT)?;
    // (Otherwise the owner has not made this member the home, or another one since.)
    if is_content(router, &known) != is_content(router, record) {
        return Err(Errno::NOENT.into());
    }
    if !is_content(router, record) && known.version != record.version {
        return Err(Errno::NOENT.into());
    }
    if !is_content(router, record) && !record.may_be_said_of(&known) {
        return Err(Errno::STALE.into());
    }
    let id = id_of(router, record.number).ok_or(Errno::NOENT)?;
    note(router, id.0, record)?;
    records(router).insert(record.number, record.clone());
    Ok(())
}

/// Is that which the record is of the content itself? (This member is its home.)
fn is_content<F: Filesystem>(router: &Router<F>, record: &Record) -> bool {
    record.home == Some(router.link.member())
}

/// A copy of this version becomes the content. Errors: ENOENT, there is none; EEXIST, an earlier content has not gone yet.
fn becomes_content<F: Filesystem>(router: &Router<F>, record: &Record) -> FsResult<()> {
    let known = record_of(router, record.number).filter(|known| known.version == record.version && known.moment == 0);
    let known = known.ok_or(Errno::NOENT)?;
    if !is_content(router, record) || is_content(router, &known) {
        return Err(Errno::BUSY.into());
    }
    let id = id_of(router, record.number).ok_or(Errno::NOENT)?;
    let (homes, from) = (&router.namespace.homes, name_of(router, record.number));
    let (dir, to) = (homes.directory().0, homes.name_of(record.number));
    note(router, id.0, record)?;
    let renamed = router.door.rename(&agent(), dir, from.as_bytes(), dir, to.as_bytes(), RenameFlags::NOREPLACE);
    if renamed.is_ok() {
        records(router).insert(record.number, record.clone());
    } else if note(router, id.0, &known).is_err() {
        drop_copy(router, record.number);
    }
    renamed
}

/// The content, which is here, has this record. Errors: ENOENT, it is not here.
fn has_record<F: Filesystem>(router: &Router<F>, record: &Record) -> FsResult<()> {
    let content = router.namespace.homes.content_for(record.number).filter(|_| is_content(router, record));
    note(router, content.ok_or(Errno::NOENT)?.0, record)?;
    records(router).insert(record.number, record.clone());
    Ok(())
}

/// A copy is not needed. If it is the content, its record is not: the owner says whether the content is.
pub(super) fn drop_copy<F: Filesystem>(router: &Router<F>, number: u64) {
    end_part(router, (owner_of(number), number), None);
    let record = records(router).remove(&number);
    match record {
        Some(record) if is_content(router, &record) => {
            if let Some(id) = router.namespace.homes.content_for(number) {
                let _ = router.door.removexattr(&agent(), id.0, RECORD);
            }
        }
        Some(_) => remove(router, name_of(router, number).as_bytes()),
        None => {
            // (A record that is not in the table was taken back.)
            if let Some(id) = router.namespace.homes.content_for(number) {
                let _ = router.door.removexattr(&agent(), id.0, RECORD);
            }
        }
    }
}

/// The store has the content that is here. From now on it is as that of a file that a program here has made.
fn is_stored<F: Filesystem>(router: &Router<F>, number: u64) {
    let record = record_of(router, number).filter(|record| is_content(router, record));
    drop_copy(router, number);
    if let Some(record) = record {
        has_path(router, &record, false);
    }
}

/// The content is gone.
pub(super) fn content_ends<F: Filesystem>(router: &Router<F>, number: u64) {
    let mut records = records(router);
    if records.get(&number).is_some_and(|record| is_content(router, record)) {
        records.remove(&number);
    }
}

fn remove<F: Filesystem>(router: &Router<F>, name: &[u8]) {
    let _ = router.door.unlink(&agent(), router.namespace.homes.directory().0, name);
}

/// The content of a copy here.
pub(super) fn id_of<F: Filesystem>(router: &Router<F>, number: u64) -> Option<FileId> {
    let homes = &router.namespace.homes;
    if record_of(router, number).is_some_and(|record| is_content(router, &record)) {
        return homes.content_for(number);
    }
    router.namespace.pooled.child_of(homes.directory(), name_of(router, number).as_bytes())
}

/// What a copy here is of.
pub(super) fn record_of<F: Filesystem>(router: &Router<F>, number: u64) -> Option<Record> {
    records(router).get(&number).cloned()
}

/// The version of that.
pub(super) fn version_of<F: Filesystem>(router: &Router<F>, number: u64) -> Option<u32> {
    records(router).get(&number).map(|record| record.version)
}

/// The member is lost: its files come back from the copies here.
pub(super) fn is_lost<F: Filesystem>(router: &Router<F>, member: u32) {
    let _one = router.held.losing.lock().unwrap_or_else(PoisonError::into_inner);
    for record in of(router, member) {
        let dir = router.namespace.homes.directory().0;
        let (from, to) = (name_of(router, record.number), router.namespace.homes.name_of(record.number));
        // (What has the name is what was here before its home was another one.)
        let rename = || router.door.rename(&agent(), dir, from.as_bytes(), dir, to.as_bytes(), RenameFlags::empty());
        let renamed = if is_content(router, &record) { Ok(()) } else { rename() };
        match renamed {
            Ok(()) => is_to_come_back(router, &record),
            Err(why) => tracing::warn!(
                why = %why.errno,
                path = %String::from_utf8_lossy(&record.path),
                "a copy of a lost member's file cannot be used"
            ),
        }
        records(router).remove(&record.number);
    }
}

fn is_to_come_back<F: Filesystem>(router: &Router<F>, record: &Record) {
    has_path(router, record, true);
}

/// If the owner is lost, what is here comes back under this path. `is_copy`: the owner has said of each change until then.
fn has_path<F: Filesystem>(router: &Router<F>, record: &Record, is_copy: bool) {
    let member = owner_of(record.number);
    let mut path = record.path.as_slice();
    for above in &record.above {
        let Some(slash) = path.iter().rposition(|byte| *byte == b'/') else { break };
        path = path.get(..slash).unwrap_or_default();
        let (path, perm, owner) = (path.to_vec(), above.perm, above.owner);
        let directory = Content { path, is_directory: true, perm, owner, is_copy, newer_at: None };
        router.others.written.has_copy(member, above.number, directory);
    }
    let (path, perm, owner) = (record.path.clone(), record.perm, record.owner);
    let newer_at = record.home.filter(|home| record.moment != 0 && *home != router.link.member());
    let file = Content { path, is_directory: false, perm, owner, is_copy, newer_at };
    router.others.written.has_copy(member, record.number, file);
}

/// Copies of files of a member that has left go: the store has everything of it. So do parts of which no more comes.
pub(super) fn look_at_owners<F: Filesystem>(router: &Router<F>) {
    let is_old = |part: &Part| part.came.elapsed() >= LATE;
    let old: Vec<_> = {
        let parts = router.held.parts();
        parts.iter().filter(|(_, part)| is_old(part)).map(|(key, part)| (*key, part.attempt)).collect()
    };
    old.into_iter().for_each(|(key, attempt)| end_part(router, key, Some(attempt)));
    router.held.latest.lock().unwrap_or_else(PoisonError::into_inner).retain(|_, (_, came)| came.elapsed() < LATE);
    let owners: BTreeSet<u32> = records(router).keys().map(|number| owner_of(*number)).collect();
    if owners.is_empty() {
        return;
    }
    let me = router.link.member();
    let lost = router.link.lost();
    let Ok(status) = router.status() else { return };
    if !router.link.may_serve() || status.members.is_empty() {
        return;
    }
    for owner in owners.into_iter().filter(|owner| *owner != me) {
        let is_member = status.members.iter().any(|one| one.member == owner);
        if !is_member && !lost.contains_key(&owner) && status.lost.iter().all(|one| one.member != owner) {
            of(router, owner).iter().for_each(|record| drop_copy(router, record.number));
        }
    }
}

/// Do the owners of the copies here live? One that does not answer may be lost in a moment: then its files come back from here.
pub(super) fn owners_live<F: Filesystem>(router: &Router<F>) -> bool {
    const PATIENCE: Duration = Duration::from_secs(2);
    let (me, lost) = (router.link.member(), router.link.lost());
    let owners: BTreeSet<u32> = records(router).keys().map(|number| owner_of(*number)).collect();
    let mut others = owners.into_iter().filter(|owner| *owner != me && !lost.contains_key(owner));
    let live = others.all(|owner| {
        let call = Call { uid: 0, gid: 0, ask: Ask::Report };
        let until = tick() + PATIENCE;
        let answer = router.link.call(owner, &call, None, &mut |_| tick() < until);
        matches!(answer, Ok(_) | Err(NoAnswer::Gone)) && !router.link.lost().contains_key(&owner)
    });
    // (An agent may be stopped while its node keeps the lease.)
    let mut silent = router.held.silent.lock().unwrap_or_else(PoisonError::into_inner);
    if live {
        *silent = None;
        return true;
    }
    silent.get_or_insert_with(tick).elapsed() >= SILENT
}

/// This member leaves: no copy stays, but those of lost members' files, which come back.
pub(super) fn end<F: Filesystem>(router: &Router<F>) {
    let lost = router.link.lost();
    let is_kept = |number: &u64| lost.contains_key(&owner_of(*number));
    let numbers: Vec<u64> = records(router).keys().copied().filter(|number| !is_kept(number)).collect();
    numbers.into_iter().for_each(|number| drop_copy(router, number));
}
