//! Closed files go to the member of their group: with `collocate`, or WOSS's `DP=collocation|GROUP`.
//!
//! All members name the same one for a group: that with the highest hash of both (rendezvous hashing; D. Thaler and C. Ravishankar,
//! "Using name-based mappings to increase hit rates", IEEE/ACM Transactions on Networking 6(1), 1998). So nothing is agreed on, and
//! a member that joins or leaves moves few groups.
//!
//! The owner of the name leads. It has a copy made there ([`sending`]), which the content's home sends. Then:
//! 1. The file counts as moving to that member.
//! 2. The member makes the copy the content ([`Hold::Home`]). It may ask whether that is needed, and learns that it is.
//! 3. The file's home is that member, if the file is as it was and no program has it open.
//! 4. The content where it was is not needed any more.
//!
//! If that fails, or the owner's agent ends, the content that was there before counts, and the other one is not needed. The member
//! keeps the copy's record, and learns of changes as a holder does. So the file comes back under its path if the owner is lost.

use std::collections::{BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::FileExt;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use surgetank_core::namespace::pooled::FILES_OF_A_MEMBER;
use surgetank_core::namespace::replicas::Sealed;
use surgetank_types::clock::tick;
use surgetank_types::model::{FileId, Role};

use super::super::call::{Answer, Ask, Call};
use super::super::link::NoAnswer;
use super::super::replicas::{Hold, Record};
use super::copies::{LISTING, is_at, next_attempt, tell, tell_while};
use super::sending::{self, PIECE_BYTES};
use super::{PATIENCE, Router, delegating, held};
use crate::mount::Filesystem;

/// A home may take so long to send a content.
const SENDING: Duration = Duration::from_secs(300);

/// Files that go to another home: by number, the member.
#[derive(Default)]
pub(super) struct Moving {
    to: Mutex<HashMap<u64, u32>>,
    /// Those that have gone, and whose plain file here still has their bytes.
    full: Mutex<BTreeSet<u64>>,
    /// Those that may have to go. A member that does not answer keeps others waiting, but no copies.
    due: Mutex<BTreeSet<u64>>,
    news: Condvar,
    /// Members that were to be homes and leave, and when they said so.
    refused: Mutex<HashMap<u32, Instant>>,
}

/// A member that leaves is not asked again for so long.
const LEAVING: Duration = Duration::from_secs(30);

impl Moving {
    pub fn is_under_way(&self, number: u64, to: u32) -> bool {
        self.all().get(&number) == Some(&to)
    }

    pub fn has(&self, number: u64) -> bool {
        self.all().contains_key(&number)
    }

    fn begins(&self, number: u64, to: u32) {
        self.all().insert(number, to);
    }

    fn ends(&self, number: u64) {
        self.all().remove(&number);
    }

    fn all(&self) -> MutexGuard<'_, HashMap<u64, u32>> {
        self.to.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file was closed, and copied.
    pub fn may_go(&self, number: u64) {
        self.due.lock().unwrap_or_else(PoisonError::into_inner).insert(number);
        self.news.notify_all();
    }

    fn next(&self) -> Option<u64> {
        const PATIENCE: Duration = Duration::from_secs(1);
        let mut due = self.due.lock().unwrap_or_else(PoisonError::into_inner);
        if due.is_empty() {
            due = self.news.wait_timeout(due, PATIENCE).unwrap_or_else(PoisonError::into_inner).0;
        }
        due.pop_first()
    }

    fn refuses(&self, member: u32) -> bool {
        let refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        refused.get(&member).is_some_and(|when| when.elapsed() < LEAVING)
    }

    fn has_refused(&self, member: u32) {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner).insert(member, tick());
    }

    fn is_full(&self, number: u64) {
        self.full.lock().unwrap_or_else(PoisonError::into_inner).insert(number);
    }

    fn is_empty(&self, number: u64) {
        self.full.lock().unwrap_or_else(PoisonError::into_inner).remove(&number);
    }

    fn full(&self) -> BTreeSet<u64> {
        self.full.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The member on which the files of a group are. Members for storage run no tasks, so they have groups only if there are no others.
fn member_of<F: Filesystem>(router: &Router<F>, group: &str) -> Option<u32> {
    let members = router.link.status(LISTING).ok()?.members;
    let hash = |member: u32| {
        let mut hasher = DefaultHasher::new();
        (group, member).hash(&mut hasher);
        hasher.finish()
    };
    let best = members.iter().max_by_key(|one| (one.role != Role::Storage, hash(one.member)));
    best.map(|one| one.member)
}

/// Moves the next file. (Of one file, one copy comes after the other.)
pub(super) fn place_next<F: Filesystem>(router: &Router<F>) {
    let Some(number) = router.outgoing.moving.next() else { return };
    if router.namespace.replicas.placed(FileId(number)).is_some() && router.outgoing.takes(number, &|| true) {
        place(router, number);
        router.outgoing.has_copied(number);
    }
}

/// Moves the content of a file of this member to where it belongs.
fn place<F: Filesystem>(router: &Router<F>, number: u64) {
    let replicas = &router.namespace.replicas;
    let Some(sealed) = replicas.placed(FileId(number)) else { return };
    let Some(member) = sealed.group.as_deref().and_then(|group| member_of(router, group)) else { return };
    if sealed.home.unwrap_or(router.link.member()) == member {
        return adopt(router, number, &sealed, &|| true);
    }
    if router.outgoing.moving.refuses(member) {
        return router.outgoing.try_later(number);
    }
    match place_at(router, number, &sealed, member) {
        Ok(true) => tracing::debug!(number, member, "the content of a file is with its group"),
        Ok(false) => router.outgoing.try_later(number),
        // (It stays where it is. The member may have room for the next one.)
        Err(why) if why.raw_os_error() == Some(Errno::NOSPC.raw_os_error()) => {
            tracing::info!(number, member, "a file does not go to its group: there is no room");
        }
        Err(why) => {
            tracing::debug!(%why, number, member, "a file does not go to its group yet");
            router.outgoing.try_later(number);
        }
    }
}

/// Returns `false` if it is to be tried again.
fn place_at<F: Filesystem>(router: &Router<F>, number: u64, sealed: &Sealed, member: u32) -> std::io::Result<bool> {
    let (replicas, copies, id) = (&router.namespace.replicas, &router.outgoing.copies, FileId(number));
    if !replicas.may_move(id) {
        return Ok(false);
    }
    let record = Record::of(number, sealed);
    let known = copies.whole(number).remove(&member).flatten();
    let has_it = known.is_some_and(|known| known.is_of_content_of(&record) && known.path == record.path);
    if !has_it && !sending::send(router, sealed, &record, (member, true), &|| true)? {
        return Ok(false);
    }
    if let Some(home) = sealed.home {
        has_sent(router, home, (home, 0), (sealed, &record))?;
    }
    if !replicas.may_move(id) {
        return Ok(false);
    }
    router.outgoing.moving.begins(number, member);
    let moves = make_home(router, &record, sealed, member);
    router.outgoing.moving.ends(number);
    if *moves.as_ref().unwrap_or(&false) {
        delegating::changed(router, number);
        router.outgoing.moving.is_full(number);
        empty(router);
    }
    moves
}

/// Plain files of content that is elsewhere lose their bytes, as soon as the drain does not read them.
pub(super) fn empty<F: Filesystem>(router: &Router<F>) {
    for number in router.outgoing.moving.full() {
        match router.namespace.replicas.empty(FileId(number)) {
            Ok(false) => {}
            Ok(true) => router.outgoing.moving.is_empty(number),
            Err(why) => {
                tracing::warn!(%why, number, "a file whose content is elsewhere takes room here");
                router.outgoing.moving.is_empty(number);
            }
        }
    }
}

/// An earlier agent may have had such files.
pub(super) fn begin<F: Filesystem>(router: &Router<F>) {
    let files = router.namespace.replicas.to_be_emptied();
    files.into_iter().for_each(|FileId(number)| router.outgoing.moving.is_full(number));
}

/// The member has a copy. It becomes the home, if the file is as it was.
fn make_home<F: Filesystem>(
    router: &Router<F>,
    record: &Record,
    sealed: &Sealed,
    member: u32,
) -> std::io::Result<bool> {
    let (number, me, replicas) = (record.number, router.link.member(), &router.namespace.replicas);
    let id = FileId(number);
    if member == me {
        let copy = held::id_of(router, number).ok_or(Errno::NOENT)?;
        let is_same = replicas.now(id, sealed).is_some_and(|now| now == *sealed);
        return Ok(is_same && replicas.comes_home(id, sealed.version, &replicas.open(copy)?, true)?);
    }
    // (If the member is lost, the owner puts the content back from a copy of its own.)
    let needs_own = sealed.wanted > 1 && {
        let own = router.outgoing.copies.whole(number).remove(&me).flatten();
        !own.is_some_and(|own| own.is_of_content_of(record))
    };
    if needs_own && !sending::send(router, sealed, record, (me, false), &|| true)? {
        return Ok(false);
    }
    hand_over(router, record, sealed, member)
}

/// The home of a file of a group has the record of its content, also if it had none any more when the file was written again. (It
/// ends when the store has the file.)
pub(super) fn adopt<F: Filesystem>(router: &Router<F>, number: u64, sealed: &Sealed, patient: &dyn Fn() -> bool) {
    let Some(home) = sealed.home.filter(|_| sealed.group.is_some() && !sealed.is_clean) else { return };
    if router.link.lost().contains_key(&home) {
        return;
    }
    let copies = &router.outgoing.copies;
    let is_of_home = |has: Option<Record>| has.is_none_or(|has| has.home == Some(home));
    if copies.of(number).unwrap_or_default().remove(&home).is_some_and(is_of_home) {
        return;
    }
    let record = Record { moment: 0, ..Record::of(number, sealed) };
    if sending::note_holder(router, home).is_err() {
        return;
    }
    // (First in the table. So either the look at the file finds a change, or the change finds it there.)
    is_at(router, record.clone(), home);
    let attempt = next_attempt(router);
    let named = router.namespace.replicas.named(FileId(number)).map(|named| Record::of(number, &named));
    let is_same = named.is_some_and(|named| named.home == Some(home) && named.has_name_of(&record));
    let (hold, until) = (Hold::Home { attempt, record, is_home: true }, tick() + LISTING);
    if !is_same || tell_while(router, home, hold, &|| tick() < until && patient()) != Ok(Answer::Done) {
        router.outgoing.try_later(number);
        copies.is_in_doubt(number, home, attempt);
    }
}

/// The member has a copy: that becomes the content.
fn hand_over<F: Filesystem>(
    router: &Router<F>,
    record: &Record,
    sealed: &Sealed,
    member: u32,
) -> std::io::Result<bool> {
    let (replicas, copies) = (&router.namespace.replicas, &router.outgoing.copies);
    let (number, attempt) = (record.number, next_attempt(router));
    let record = Record { home: Some(member), ..record.clone() };
    let answer =
        tell(router, member, Hold::Home { attempt, record: record.clone(), is_home: false }, tick() + PATIENCE);
    let moves = answer == Ok(Answer::Done) && replicas.moves_to(FileId(number), sealed, member)?;
    if answer == Ok(Answer::Failed(Errno::BUSY.raw_os_error())) {
        router.outgoing.moving.has_refused(member);
    }
    if moves {
        copies.says(record, member, attempt);
        // (It may have learnt meanwhile that it has no copy any more.)
        if let Some(now) = replicas.now(FileId(number), sealed) {
            adopt(router, number, &now, &|| true);
        }
    } else {
        // (It may be the content there, which is not needed.)
        copies.is_in_doubt(number, member, attempt);
    }
    Ok(moves)
}

/// Has the home sent that member the content, but for the message with which the copy counts? It stops waiting when a program opens
/// the file. Errors: of the member or the home; EBUSY, it may not move now.
pub(super) fn has_sent<F: Filesystem>(
    router: &Router<F>,
    home: u32,
    (to, attempt): (u32, u64),
    (sealed, record): (&Sealed, &Record),
) -> std::io::Result<bool> {
    if record.size_bytes == 0 && to != home {
        return Ok(false);
    }
    let ask = Ask::SendHome { to, attempt, record: Box::new(record.clone()), is_stored: sealed.is_clean };
    let until = tick() + SENDING;
    let (replicas, id) = (&router.namespace.replicas, FileId(record.number));
    let is_same =
        || replicas.now(id, sealed).is_some_and(|now| now.version == sealed.version) && replicas.is_closed(id);
    let answer = router.link.call(home, &Call { uid: 0, gid: 0, ask }, None, &mut |_| {
        tick() < until && !router.link.is_over() && is_same()
    });
    match answer {
        Ok(Answer::Done) => Ok(true),
        Ok(Answer::Failed(errno)) => Err(std::io::Error::from_raw_os_error(errno)),
        other => Err(std::io::Error::other(format!("{other:?}"))),
    }
}

/// Sends a member the content that this one has for a file of the asking member.
pub(super) fn send_home<F: Filesystem>(
    router: &Router<F>,
    member: u32,
    (to, attempt): (u32, u64),
    (record, is_stored): (&Record, bool),
) -> Answer {
    let failed = |errno: Errno| Answer::Failed(errno.raw_os_error());
    if record.number / FILES_OF_A_MEMBER != u64::from(member) || record.home != Some(router.link.member()) {
        return failed(Errno::PERM);
    }
    let Some(content) = router.namespace.homes.content_for(record.number) else { return failed(Errno::NOENT) };
    if !is_stored && router.namespace.replicas.is_content_promised(content) {
        return failed(Errno::BUSY);
    }
    if to == router.link.member() {
        return Answer::Done;
    }
    let file = match router.namespace.replicas.open(content) {
        Ok(file) => file,
        Err(why) => return Answer::Failed(why.raw_os_error().unwrap_or(Errno::IO.raw_os_error())),
    };
    let mut offset = 0;
    while offset < record.size_bytes {
        let bytes = (record.size_bytes - offset).min(PIECE_BYTES);
        let mut content = vec![0; usize::try_from(bytes).unwrap_or(0)];
        // (It may have been cut since. The owner looks at the file after this.)
        if file.read_exact_at(&mut content, offset).is_err() {
            return failed(Errno::STALE);
        }
        let hold = Hold::Piece { record: record.clone(), attempt, offset, content, is_last: false };
        let until = tick() + PATIENCE;
        match tell(router, to, hold, until) {
            Ok(Answer::Done) => offset += bytes,
            Ok(Answer::Failed(errno)) => return Answer::Failed(errno),
            Err(NoAnswer::Gone) => return failed(Errno::HOSTDOWN),
            _ => return failed(Errno::TIMEDOUT),
        }
    }
    Answer::Done
}
