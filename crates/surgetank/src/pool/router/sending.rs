//! Sends the content of closed files to as many members as are to have it.
//!
//! The danger that this avoids: a copy of what a file was before. So the last piece is sent after a look at the file, with the
//! copy in the table already.

use std::collections::BTreeSet;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::FileExt;
use std::sync::PoisonError;

use rustix::fs::OFlags;
use rustix::io::Errno;
use surgetank_core::namespace::replicas::Sealed;
use surgetank_types::clock::tick;
use surgetank_types::error::Fault;
use surgetank_types::model::{FileId, Role};

use super::super::call::{Answer, Ask, Call};
use super::super::link::NoAnswer;
use super::super::replicas::{End, Hold, Record, Sum};
use super::super::status::MemberStatus;
use super::copies::{LISTING, next_attempt, tell, tell_while};
use super::homes::agent;
use super::{PATIENCE, Router, held, placing};
use crate::mount::Filesystem;

/// Bytes of one message.
pub(super) const PIECE_BYTES: u64 = 1 << 20;

/// Copies a file to as many members as are to have it. `patient`: may it go on? Returns whether they
/// have it, or need none.
pub(super) fn copy<F: Filesystem>(router: &Router<F>, number: u64, patient: &dyn Fn() -> bool) -> bool {
    let Some(sealed) = router.namespace.replicas.sealed(FileId(number)) else { return true };
    let wanted = usize::try_from(sealed.wanted).unwrap_or(usize::MAX).saturating_sub(1);
    if sealed.wanted > 1 {
        placing::adopt(router, number, &sealed, patient);
    }
    let record = Record::of(number, &sealed);
    let mut known = router.outgoing.copies.of(number).unwrap_or_default();
    // (Its record there is of the content itself.)
    known.retain(|member, _| *member != sealed.home.unwrap_or(router.link.member()));
    if known.values().flatten().any(|has| has.version != record.version) {
        router.outgoing.try_later(number);
        return false;
    }
    // (One in doubt gets none until it has said that it has none.)
    let have: BTreeSet<u32> = known.keys().copied().collect();
    let (earlier, holders): (Vec<_>, Vec<_>) = known
        .iter()
        .filter_map(|(member, has)| Some((*member, has.as_ref()?)))
        .partition(|(_, has)| record.follows(has));
    let mut holders: BTreeSet<u32> = holders.into_iter().map(|(member, _)| member).collect();
    let earlier: Vec<u32> = earlier.into_iter().map(|(member, _)| member).collect();
    let mut earlier = differing(router, &sealed, &record, earlier, &mut holders);
    // (If the content is elsewhere, its owner puts it back when it is lost.)
    let are_enough = |holders: &BTreeSet<u32>| {
        let has_own = wanted == 0 || sealed.home.is_none() || holders.contains(&router.link.member());
        holders.len() >= wanted && has_own
    };
    if earlier.is_empty() && are_enough(&holders) {
        return true;
    }
    // (If the content is elsewhere, the first copy is the one here.)
    earlier.sort_by_key(|member| *member != router.link.member());
    let more = candidates(router, &sealed, &have);
    for (member, is_replaced) in
        earlier.into_iter().map(|one| (one, true)).chain(more.into_iter().map(|one| (one, false)))
    {
        if are_enough(&holders) && !is_replaced || !patient() {
            break;
        }
        match send(router, &sealed, &record, (member, false), patient) {
            Ok(true) => {
                holders.insert(member);
            }
            Ok(false) => break,
            // (Without a copy here those of other members are of no use when its home is lost.)
            Err(_) if sealed.home.is_some() && !holders.contains(&router.link.member()) => break,
            Err(why) => tracing::debug!(%why, member, number, "a file was not copied to another member"),
        }
    }
    let have = are_enough(&holders);
    if !have {
        router.outgoing.try_later(number);
    }
    have
}

/// Which of these members, which have the content of an earlier close, have another one than that of now? The others learn that
/// theirs is this one.
fn differing<F: Filesystem>(
    router: &Router<F>,
    sealed: &Sealed,
    record: &Record,
    mut members: Vec<u32>,
    holders: &mut BTreeSet<u32>,
) -> Vec<u32> {
    if members.is_empty() {
        return members;
    }
    // (If it cannot be read, it cannot be sent either.)
    let Ok(sum) = sum_of(router, record.number, sealed) else { return members };
    let copies = &router.outgoing.copies;
    members.retain(|member| {
        let attempt = next_attempt(router);
        let hold = Hold::Changed { attempt, gone: Vec::new(), stored: Vec::new(), records: vec![record.clone()] };
        if copies.sum(record.number, *member) != Some(sum) {
            return true;
        }
        match tell(router, *member, hold, tick() + LISTING) {
            Ok(Answer::Done) => {
                copies.says(record.clone(), *member, attempt);
                holders.insert(*member);
                false
            }
            Ok(Answer::Failed(why)) if why == Errno::NOENT.raw_os_error() => {
                copies.is_in_doubt(record.number, *member, attempt);
                true
            }
            _ => true,
        }
    });
    members
}

fn sum_of<F: Filesystem>(router: &Router<F>, number: u64, sealed: &Sealed) -> std::io::Result<Sum> {
    /// So many are kept.
    const SOME: usize = 10_000;
    let sums = || router.outgoing.sums.lock().unwrap_or_else(PoisonError::into_inner);
    let known = sums().get(&number).filter(|(version, _)| sealed.moment == 0 && *version == sealed.version).copied();
    if let Some((_, sum)) = known {
        return Ok(sum);
    }
    let sum = read_sum(router, number, sealed)?;
    // (Of a close, or of a version that was written meanwhile, it may be another one's.)
    let is_same = |now: Sealed| sealed.moment == 0 && (now.version, now.moment) == (sealed.version, 0);
    if router.namespace.replicas.sealed(FileId(number)).is_some_and(is_same) {
        let mut sums = sums();
        if sums.len() >= SOME {
            sums.clear();
        }
        sums.insert(number, (sealed.version, sum));
    }
    Ok(sum)
}

fn read_sum<F: Filesystem>(router: &Router<F>, number: u64, sealed: &Sealed) -> std::io::Result<Sum> {
    let Some(home) = sealed.home else {
        return sum_of_file(&router.namespace.replicas.open(FileId(number))?);
    };
    match router.remote.ask(&agent(), Router::<F>::at_handle(home), Ask::SumHome { number }) {
        Ok(Answer::Bytes(sum)) => Sum::try_from(sum).map_err(|_| Errno::PROTO.into()),
        Ok(_) => Err(Errno::PROTO.into()),
        Err(fault) => Err(fault.errno.into()),
    }
}

pub(super) fn sum_of_file(file: &File) -> std::io::Result<Sum> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(file)?;
    Ok(hasher.finalize().into())
}

/// The members that may get a copy, the best first.
fn candidates<F: Filesystem>(router: &Router<F>, sealed: &Sealed, have: &BTreeSet<u32>) -> Vec<u32> {
    let me = router.link.member();
    let Ok(status) = router.link.status(LISTING) else { return Vec::new() };
    let is_storage = |one: &&MemberStatus| one.role == Role::Storage;
    let storage: BTreeSet<u32> = status.members.iter().filter(is_storage).map(|one| one.member).collect();
    let mut members: Vec<u32> = status.members.iter().map(|one| one.member).collect();
    members.retain(|member| !have.contains(member) && Some(*member) != sealed.home);
    // (Files of one directory are at the same members: a file that replaces another one is where that was.)
    members.sort_by_cached_key(|member| {
        let mut hasher = DefaultHasher::new();
        (sealed.directory.0, member).hash(&mut hasher);
        (*member != me, !storage.contains(member), hasher.finish())
    });
    members.retain(|member| *member != me || sealed.home.is_some());
    members
}

/// Where the content is read.
enum Source {
    Here(File),
    There {
        member: u32,
        handle: u64,
    },
    /// Its home has sent it.
    Sent,
}

/// Sends the content. Returns `false` if the file has changed meanwhile. `is_to_move`: its home sends it.
pub(super) fn send<F: Filesystem>(
    router: &Router<F>,
    sealed: &Sealed,
    record: &Record,
    (member, is_to_move): (u32, bool),
    patient: &dyn Fn() -> bool,
) -> std::io::Result<bool> {
    note_holder(router, member)?;
    let attempt = next_attempt(router);
    let source = match sealed.home.filter(|_| is_to_move && member != router.link.member()) {
        Some(home) if placing::has_sent(router, home, (member, attempt), (sealed, record))? => Source::Sent,
        _ => open(router, record.number, sealed, attempt)?,
    };
    let sent = send_from(router, (sealed, record), member, (&source, attempt), patient);
    if let Source::There { member, .. } = source {
        let close = Call { uid: 0, gid: 0, ask: Ask::CloseMoved { key: key_of(attempt) } };
        let until = tick() + LISTING;
        // (With the member its handles end.)
        let _ = router.link.call(member, &close, None, &mut |_| tick() < until);
    }
    sent
}

/// The next agent will ask the member what it has.
pub(super) fn note_holder<F: Filesystem>(router: &Router<F>, member: u32) -> std::io::Result<()> {
    let noted = || router.outgoing.noted.lock().unwrap_or_else(PoisonError::into_inner);
    if noted().contains(&member) || member == router.link.member() {
        return Ok(());
    }
    if !router.link.may_hold(member, LISTING) {
        return Err(std::io::Error::other("the pool's process does not answer"));
    }
    noted().insert(member);
    Ok(())
}

/// A number of an open file that is none of the kernel's.
fn key_of(attempt: u64) -> u64 {
    1 << 61 | attempt & ((1 << 40) - 1)
}

fn open<F: Filesystem>(router: &Router<F>, number: u64, sealed: &Sealed, attempt: u64) -> std::io::Result<Source> {
    let Some(home) = sealed.home else {
        return router.namespace.replicas.open(FileId(number)).map(Source::Here);
    };
    let is_same = |has: Record| has.version == sealed.version && has.moment == sealed.moment;
    if held::record_of(router, number).is_some_and(is_same)
        && let Some(copy) = held::id_of(router, number)
    {
        return router.namespace.replicas.open(copy).map(Source::Here);
    }
    let key = key_of(attempt);
    let ask = Ask::OpenHome { number, key, flags: OFlags::RDONLY.bits() };
    match router.remote.ask(&agent(), Router::<F>::at_handle(home), ask) {
        Ok(Answer::Opened { handle, .. }) => Ok(Source::There { member: home, handle }),
        Ok(_) => Err(Errno::PROTO.into()),
        Err(fault) => Err(fault.errno.into()),
    }
}

fn read<F: Filesystem>(router: &Router<F>, source: &Source, offset: u64, bytes: usize) -> std::io::Result<Vec<u8>> {
    let mut content = vec![0; bytes];
    match source {
        Source::Here(file) => file.read_exact_at(&mut content, offset)?,
        Source::Sent => return Err(Errno::INVAL.into()),
        Source::There { member, handle } => {
            let came = router.read_there(&agent(), *member, *handle, offset, &mut content);
            match came {
                Ok(came) if came == bytes => {}
                Ok(_) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                Err(Fault { errno, .. }) => return Err(errno.into()),
            }
        }
    }
    Ok(content)
}

fn send_from<F: Filesystem>(
    router: &Router<F>,
    (sealed, record): (&Sealed, &Record),
    member: u32,
    (source, attempt): (&Source, u64),
    patient: &dyn Fn() -> bool,
) -> std::io::Result<bool> {
    let (replicas, copies, id) = (&router.namespace.replicas, &router.outgoing.copies, FileId(record.number));
    let mut offset = if matches!(source, Source::Sent) { record.size_bytes } else { 0 };
    // (What is sealed is not compared later.)
    let mut hasher = (record.moment != 0).then(blake3::Hasher::new);
    loop {
        let bytes = (record.size_bytes - offset).min(PIECE_BYTES);
        let content = match usize::try_from(bytes) {
            Ok(0) | Err(_) => Vec::new(),
            Ok(bytes) => read(router, source, offset, bytes)?,
        };
        let is_last = offset + bytes == record.size_bytes;
        if let Some(hasher) = &mut hasher {
            hasher.update(&content);
        }
        let is_other = |now: Sealed| (now.version, now.moment) != (sealed.version, sealed.moment);
        if !is_last && replicas.now(id, sealed).is_none_or(is_other) {
            return Ok(false);
        }
        if is_last {
            if !copies.begins(record, member, attempt) {
                return Ok(false);
            }
            if !replicas.is_still(id, sealed) {
                ends(router, record.number, member, End::NotThere, None);
                return Ok(false);
            }
        }
        let piece = Hold::Piece { record: record.clone(), attempt, offset, content, is_last };
        let (begun, until) = (tick(), tick() + PATIENCE);
        // (Without an answer to the last one it is in doubt what the member has.)
        let is_awaited = || patient() || is_last && begun.elapsed() < LISTING;
        let answer = tell_while(router, member, piece, &|| tick() < until && is_awaited());
        if is_last {
            // (The member's process says AGAIN for an agent that has not answered, and may do so later.)
            let is_late = |errno: i32| errno == Errno::AGAIN.raw_os_error();
            let end = match &answer {
                Ok(Answer::Done) => End::There,
                Ok(Answer::Failed(errno)) if !is_late(*errno) => End::NotThere,
                Err(NoAnswer::Gone) => End::NotThere,
                _ => End::Unknown,
            };
            ends(router, record.number, member, end, hasher.as_ref().map(|hasher| hasher.finalize().into()));
        }
        match answer {
            Ok(Answer::Done) => {}
            Ok(Answer::Failed(errno)) => return Err(std::io::Error::from_raw_os_error(errno)),
            other => return Err(std::io::Error::other(format!("{other:?}"))),
        }
        if is_last {
            return Ok(true);
        }
        offset += bytes;
    }
}

/// A copy is made, or not.
fn ends<F: Filesystem>(router: &Router<F>, number: u64, member: u32, end: End, sum: Option<Sum>) {
    router.outgoing.copies.ends(number, member, end, sum, || router.namespace.replicas.is_alone(FileId(number)));
}
