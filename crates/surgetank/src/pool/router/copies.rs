//! Copies of this member's files at other members, until the store has the files.
//!
//! Closed files are queued. Threads of their own send the content to as many members as are to have it. Each change of a file's
//! name or content is followed by [`changed`], before the program that made it is answered: the holders learn it there.
//!
//! Invariants:
//! - A copy that is being made is in the table before its file is looked at for the last time. So either that look finds a
//!   change, or the change finds the copy.
//! - A holder that does not answer is asked until it has left or is lost.
//!
//! The danger that this avoids: a file that was removed or written since returns when this member is lost.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use surgetank_types::clock::{tick, uptime};
use surgetank_types::error::FsResult;
use surgetank_types::model::{Caller, FileId};

use super::super::call::{Answer, Ask, Call};
use super::super::link::{Link, NoAnswer};
use super::super::replicas::{Copies, Hold, LISTED_MAX, Record, Sum};
use super::adopt::Names;
use super::lengths::end_name;
use super::placing::{self, Moving};
use super::{PATIENCE, Router, delegating, held, sending};
use crate::mount::request::ReleaseFlags;
use crate::mount::{Filesystem, Opened, killed_at_close};

/// Closed files are taken together so long.
const TOGETHER: Duration = Duration::from_millis(20);
/// How often the copies are compared with the files, if there are some.
const COMPARE_EVERY: Duration = Duration::from_millis(200);
/// The same with very many copies. As often they are compared with the members.
const MEMBERS_EVERY: Duration = Duration::from_secs(1);
const MANY: usize = 5_000;
/// A file that no member could take is tried again after this.
const AGAIN: Duration = Duration::from_secs(2);
/// So many files are copied at once.
const THREADS: usize = 2;
/// The agent looks so long for copies of an agent before it, each time.
pub(super) const LISTING: Duration = Duration::from_secs(5);

/// What is to be copied, and what was.
pub(super) struct Outgoing {
    pub(super) copies: Copies,
    queue: Mutex<Queue>,
    news: Condvar,
    /// All copies that an earlier agent made are known.
    are_known: AtomicBool,
    /// Members that have not said yet which of those they have.
    unasked: Mutex<BTreeSet<u32>>,
    /// Members that the next agent will ask.
    pub(super) noted: Mutex<BTreeSet<u32>>,
    pub(super) attempts: AtomicU64,
    /// What an earlier agent left is taken in.
    pub(super) begun: Instant,
    /// Sums of sealed versions here whose copy could not be replaced yet: they are not read again.
    pub(super) sums: Mutex<BTreeMap<u64, (u32, Sum)>>,
    /// So many losses were looked at.
    losses: AtomicUsize,
    /// Files that go to another home.
    pub(super) moving: Moving,
}

#[derive(Default)]
struct Queue {
    due: VecDeque<u64>,
    queued: BTreeSet<u64>,
    /// A thread copies them.
    busy: BTreeSet<u64>,
    later: VecDeque<(Instant, u64)>,
}

impl Outgoing {
    pub fn new(link: &Link) -> Self {
        // (Later than that of an agent before it.)
        let start = u64::try_from(uptime().as_nanos()).unwrap_or(0);
        Self {
            copies: Copies::default(),
            queue: Mutex::default(),
            news: Condvar::new(),
            are_known: AtomicBool::new(!link.had_earlier()),
            unasked: Mutex::new(link.holders().collect()),
            noted: Mutex::default(),
            attempts: AtomicU64::new(start),
            begun: tick(),
            sums: Mutex::default(),
            losses: AtomicUsize::new(0),
            moving: Moving::default(),
        }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same, unless it is to be tried again soon anyway.
    fn add_unless_later(&self, number: Option<u64>) {
        let number = number.filter(|number| !self.queue().later.iter().any(|(_, later)| later == number));
        self.add(number);
    }

    fn add(&self, numbers: impl IntoIterator<Item = u64>) {
        let mut queue = self.queue();
        for number in numbers {
            if queue.queued.insert(number) {
                queue.due.push_back(number);
            }
        }
        self.news.notify_all();
    }

    /// A thread of a program copies this file. `false`: another one does, and goes on.
    pub(super) fn takes(&self, number: u64, patient: &dyn Fn() -> bool) -> bool {
        let mut queue = self.queue();
        while !queue.busy.insert(number) {
            if !patient() {
                return false;
            }
            queue = self.news.wait_timeout(queue, TOGETHER).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    pub(super) fn has_copied(&self, number: u64) {
        self.queue().busy.remove(&number);
        self.news.notify_all();
    }

    fn next(&self) -> Option<u64> {
        let mut queue = self.queue();
        if queue.due.is_empty() {
            queue = self.news.wait_timeout(queue, MEMBERS_EVERY).unwrap_or_else(PoisonError::into_inner).0;
        }
        let number = queue.due.pop_front()?;
        if queue.busy.contains(&number) {
            // (In a moment: of one file, one copy comes after the other.)
            queue.due.push_back(number);
            drop(self.news.wait_timeout(queue, TOGETHER));
            return None;
        }
        queue.queued.remove(&number);
        queue.busy.insert(number);
        Some(number)
    }

    /// The member may have copies of an earlier agent: it is to say which. (Itself: those here are known already.)
    fn unasked(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.unasked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn try_later(&self, number: u64) {
        self.queue().later.push_back((tick() + AGAIN, number));
    }

    fn take_late(&self) -> Vec<u64> {
        let now = tick();
        let mut queue = self.queue();
        let mut late = Vec::new();
        while let Some((_, number)) = queue.later.pop_front_if(|(when, _)| *when <= now) {
            late.push(number);
        }
        late
    }
}

/// A program closes the file: copies it, in the thread of the request. Returns whether as many members as are to have it have it, or
/// it needs no copies. Errors: of the tier.
pub(super) fn copy_closed<F: Filesystem>(router: &Router<F>, number: u64, until: Instant) -> std::io::Result<bool> {
    let patient = || tick() < until && !killed_at_close();
    if !router.outgoing.are_known.load(Ordering::Acquire) || !router.outgoing.takes(number, &patient) {
        return Ok(false);
    }
    let replicas = &router.namespace.replicas;
    // (While no other thread copies the file: a later moment ends the copy of an earlier one.)
    let have = replicas.closes(FileId(number), next_attempt(router)).map(|needs| {
        // (It is not as it was if another program has opened it for writing meanwhile.)
        !needs || sending::copy(router, number, &patient) && replicas.sealed(FileId(number)).is_some()
    });
    router.outgoing.has_copied(number);
    have
}

/// The number of a message about copies, or of a close that waits for some.
pub(super) fn next_attempt<F: Filesystem>(router: &Router<F>) -> u64 {
    router.outgoing.attempts.fetch_add(1, Ordering::Relaxed)
}

/// Begins. The mount is there.
pub(super) fn begin<F: Filesystem>(router: &Arc<Router<F>>) {
    held::find(router);
    let me = router.link.member();
    held::of(router, me).into_iter().for_each(|record| is_at(router, record, me));
    router.outgoing.unasked().remove(&me);
    all_may_be_known(router);
    router.namespace.replicas.note_closed();
    placing::begin(router);
    let mut looks = Looks::default();
    let mut begun = spawn(router, "pool-copies", move |router| look(router, &mut looks));
    for _ in 0..THREADS {
        begun &= spawn(router, "pool-copying", |router| {
            if let Some(number) = router.outgoing.next() {
                sending::copy(router, number, &|| true);
                router.outgoing.has_copied(number);
                router.outgoing.moving.may_go(number);
            }
        });
    }
    begun &= spawn(router, "pool-placing", placing::place_next);
    if !begun {
        tracing::warn!("closed files are not copied to other members");
    }
}

fn spawn<F: Filesystem>(
    router: &Arc<Router<F>>,
    name: &str,
    mut step: impl FnMut(&Router<F>) + Send + 'static,
) -> bool {
    let router = Arc::downgrade(router);
    let run = move || {
        while let Some(router) = Weak::upgrade(&router) {
            step(&router);
        }
    };
    std::thread::Builder::new().name(name.to_owned()).spawn(run).is_ok()
}

/// When the copies were looked at.
#[derive(Default)]
struct Looks {
    compared: Option<Instant>,
    members: Option<Instant>,
}

/// Is it so long ago? Then it is now.
fn is_due(last: &mut Option<Instant>, every: Duration) -> bool {
    let is_due = last.is_none_or(|last| last.elapsed() >= every);
    if is_due {
        *last = Some(tick());
    }
    is_due
}

fn look<F: Filesystem>(router: &Router<F>, looks: &mut Looks) {
    let outgoing = &router.outgoing;
    if !outgoing.are_known.load(Ordering::Acquire) {
        learn(router);
        std::thread::sleep(TOGETHER);
        return;
    }
    let patience = if outgoing.copies.are_none() { MEMBERS_EVERY } else { COMPARE_EVERY };
    let closed = router.namespace.replicas.take_closed(patience);
    let are_some = !closed.is_empty();
    outgoing.add(closed.into_iter().map(|FileId(number)| number));
    outgoing.add(outgoing.take_late());
    let losses = router.link.losses();
    let are_lost = outgoing.losses.swap(losses, Ordering::Relaxed) < losses;
    if is_due(&mut looks.members, MEMBERS_EVERY) || are_lost {
        come_home(router);
        held::look_at_owners(router);
        placing::empty(router);
        look_at_members(router);
    }
    let numbers = outgoing.copies.numbers();
    let every = if numbers.len() < MANY { COMPARE_EVERY } else { MEMBERS_EVERY };
    if !numbers.is_empty() && is_due(&mut looks.compared, every) {
        // (What a holder did not learn is tried again.)
        let _ = compare(router, &numbers, tick() + LISTING);
    }
    if are_some {
        std::thread::sleep(TOGETHER);
    }
}

/// Which copies that an earlier agent made do members have? All are asked at the same time.
fn learn<F: Filesystem>(router: &Router<F>) {
    let unasked = router.outgoing.unasked().clone();
    std::thread::scope(|scope| {
        for member in &unasked {
            scope.spawn(move || {
                if learn_of(router, *member) {
                    router.outgoing.unasked().remove(member);
                }
            });
        }
    });
    all_may_be_known(router);
}

fn all_may_be_known<F: Filesystem>(router: &Router<F>) {
    if router.outgoing.unasked().is_empty() {
        router.namespace.replicas.are_known();
        router.outgoing.are_known.store(true, Ordering::Release);
    }
}

/// The member has a copy that an earlier agent made.
pub(super) fn is_at<F: Filesystem>(router: &Router<F>, record: Record, member: u32) {
    // (Before the table: what leaves that is not in the other one any more.)
    router.namespace.replicas.has_copy(FileId(record.number));
    if record.moment != 0 {
        let Record { number, moment, version, size_bytes, times, .. } = record;
        router.namespace.replicas.was_closed(FileId(number), (moment, version), size_bytes, times);
    }
    router.outgoing.copies.is_at(record, member);
}

/// Returns whether all that the member has is known.
fn learn_of<F: Filesystem>(router: &Router<F>, member: u32) -> bool {
    // (An earlier agent's message may still be carried out.)
    let since = router.outgoing.attempts.load(Ordering::Relaxed);
    let mut first = 0;
    loop {
        match tell(router, member, Hold::List { since, first }, tick() + LISTING) {
            Ok(Answer::Bytes(bytes)) => {
                let Ok(records) = postcard::from_bytes::<Vec<Record>>(&bytes) else { return false };
                let next = records.last().filter(|_| records.len() == LISTED_MAX).map(|last| last.number + 1);
                records.into_iter().for_each(|record| is_at(router, record, member));
                let Some(next) = next else { return true };
                first = next;
            }
            Err(NoAnswer::Gone) => return true,
            _ => return false,
        }
    }
}

/// Members that are none any more have no copies: others get some.
fn look_at_members<F: Filesystem>(router: &Router<F>) {
    if router.outgoing.copies.are_none() {
        return;
    }
    let Ok(status) = router.link.status(LISTING) else { return };
    if status.members.is_empty() {
        return;
    }
    let is_member = |member: u32| status.members.iter().any(|one| one.member == member);
    let alone = |number: u64| router.namespace.replicas.is_alone(FileId(number));
    router.outgoing.add(router.outgoing.copies.keep_members(is_member, alone));
}

pub(super) fn tell<F: Filesystem>(
    router: &Router<F>,
    member: u32,
    hold: Hold,
    until: Instant,
) -> Result<Answer, NoAnswer> {
    tell_while(router, member, hold, &|| tick() < until)
}

pub(super) fn tell_while<F: Filesystem>(
    router: &Router<F>,
    member: u32,
    hold: Hold,
    patient: &dyn Fn() -> bool,
) -> Result<Answer, NoAnswer> {
    if member == router.link.member() {
        return Ok(held::asked(router, member, &hold));
    }
    let call = Call { uid: 0, gid: 0, ask: Ask::Hold(Box::new(hold)) };
    let once = router.link.next_once();
    let answer = router.link.call(member, &call, Some(once), &mut |_| patient() && !router.link.is_over());
    router.link.answered(member, once);
    answer
}

// ---- A change of files that have copies.

/// Names or content of files may have changed. Returns when no holder has what they were before. Errors: EIO, one does not answer
/// and is still a member.
pub(super) fn changed<F: Filesystem>(router: &Router<F>, files: &[Option<FileId>]) -> FsResult<()> {
    await_known(router)?;
    if router.outgoing.copies.are_none() {
        return Ok(());
    }
    let numbers: Vec<u64> = files.iter().flatten().map(|FileId(number)| *number).collect();
    compare_for_program(router, &numbers)
}

/// Removes a name.
pub(super) fn unlink<F: Filesystem>(router: &Router<F>, caller: &Caller, at: (u64, &[u8])) -> FsResult<()> {
    change(router, &[at], || router.door.unlink(caller, at.0, at.1))
}

/// Renames something here. (All below a directory has another path then.)
pub(super) fn rename<F: Filesystem>(
    router: &Router<F>,
    names: &Names<'_>,
    rename: impl FnOnce() -> FsResult<()>,
) -> FsResult<()> {
    change(router, &[names.from, names.to], rename)
}

/// Makes a change of names. They are looked up if any file has copies.
fn change<F: Filesystem>(
    router: &Router<F>,
    names: &[(u64, &[u8])],
    change: impl FnOnce() -> FsResult<()>,
) -> FsResult<()> {
    await_known(router)?;
    let (pooled, copies) = (&router.namespace.pooled, &router.outgoing.copies);
    let found = (!copies.are_none()).then(|| {
        let files = names.iter().filter_map(|(dir, name)| pooled.child_of(FileId(*dir), name));
        let paths = names.iter().filter_map(|(dir, name)| pooled.path_of(FileId(*dir), name));
        (files.collect::<Vec<_>>(), paths.collect::<Vec<_>>())
    });
    change()?;
    if copies.are_none() {
        return Ok(());
    }
    // (Copies may have been made meanwhile.)
    let Some((files, paths)) = found else { return compare_for_program(router, &copies.numbers()) };
    let below = paths.iter().flat_map(|path| copies.below(path));
    let numbers: Vec<u64> = files.into_iter().map(|FileId(number)| number).chain(below).collect();
    compare_for_program(router, &numbers)
}

/// A program has opened the file. If it may write, no member has a copy before it does.
pub(super) fn opened<F: Filesystem>(router: &Router<F>, id: u64, opened: &Opened) -> FsResult<()> {
    if !router.namespace.homes.writes(opened.fh) {
        return Ok(());
    }
    changed(router, &[Some(FileId(id))]).inspect_err(|_| end_name(router, id, opened.fh, ReleaseFlags::default()))
}

fn await_known<F: Filesystem>(router: &Router<F>) -> FsResult<()> {
    let until = tick() + PATIENCE;
    while !router.outgoing.are_known.load(Ordering::Acquire) {
        router.pause(until)?;
    }
    Ok(())
}

fn compare_for_program<F: Filesystem>(router: &Router<F>, numbers: &[u64]) -> FsResult<()> {
    let until = tick() + PATIENCE;
    while !compare(router, numbers, until) {
        router.pause(until)?;
    }
    Ok(())
}

/// What a holder learns.
#[derive(Default)]
struct Told {
    gone: Vec<u64>,
    stored: Vec<u64>,
    records: Vec<Record>,
}

/// Compares copies with the files, and tells the holders what has changed. Returns whether all have learnt it.
fn compare<F: Filesystem>(router: &Router<F>, numbers: &[u64], until: Instant) -> bool {
    let copies = &router.outgoing.copies;
    let mut are_made = true;
    let mut all = Vec::new();
    for number in numbers {
        let known = copies.when_made(*number, || tick() < until && !router.link.is_over());
        all.extend(known.map(|known| (*number, known)));
        are_made &= tick() < until;
    }
    // (After the messages that made those. A holder refuses this one after a later one, and then it is said again.)
    let attempt = next_attempt(router);
    let mut told = BTreeMap::<u32, Told>::new();
    for (number, holders) in &all {
        let sealed = router.namespace.replicas.sealed(FileId(*number));
        let record = sealed.map(|sealed| Record::of(*number, &sealed));
        let home = router.namespace.homes.home_of(FileId(*number));
        for (member, has) in holders {
            // (The content itself is here.)
            let is_here = || record.as_ref().is_some_and(|now| now.home.is_none());
            let is_needless = *member == router.link.member() && is_here() && !router.outgoing.moving.has(*number);
            let of_home = has.as_ref().filter(|has| has.home == Some(*member) && home == Some(*member));
            if has.is_none() && home == Some(*member) && !router.namespace.homes.is_removed(FileId(*number)) {
                // (It keeps the name that it knows.)
                told.entry(*member).or_default().stored.push(*number);
                continue;
            }
            if let Some(has) = of_home {
                // (The content itself: the member learns its name.)
                let named = router.namespace.replicas.named(FileId(*number));
                match named.map(|named| Record::of(*number, &named)) {
                    Some(now) if now.has_name_of(has) => {}
                    Some(now) => told.entry(*member).or_default().records.push(now),
                    None if router.namespace.homes.is_removed(FileId(*number)) => {
                        told.entry(*member).or_default().gone.push(*number);
                    }
                    None => told.entry(*member).or_default().stored.push(*number),
                }
                continue;
            }
            let now = match record.as_ref().zip(has.as_ref()) {
                _ if is_needless => None,
                Some((record, has)) if record.is_of_content_of(has) => Some((record.clone(), has)),
                Some((record, has)) if record.follows(has) => {
                    // (Of a close. A thread compares it with what is sealed. The next close does so itself.)
                    router.outgoing.add_unless_later((record.moment == 0).then_some(*number));
                    Some((record.with_content_of(has), has))
                }
                _ => None,
            };
            match now {
                Some((record, has)) if record.says(has) => {}
                Some((record, _)) => told.entry(*member).or_default().records.push(record),
                None => told.entry(*member).or_default().gone.push(*number),
            }
        }
    }
    let mut have_learnt = are_made;
    for (member, Told { gone, stored, records }) in told {
        let hold = Hold::Changed { attempt, gone: gone.clone(), stored: stored.clone(), records: records.clone() };
        let answer = tell(router, member, hold, until);
        match answer {
            Ok(Answer::Done) | Err(NoAnswer::Gone) => {
                for number in gone.into_iter().chain(stored) {
                    copies.has_gone(number, member, attempt, || router.namespace.replicas.is_alone(FileId(number)));
                    // (It may be a newer version that needs copies.)
                    router.outgoing.add_unless_later(Some(number));
                }
                records.into_iter().for_each(|record| copies.says(record, member, attempt));
            }
            Ok(Answer::Failed(why)) if why == Errno::NOENT.raw_os_error() => {
                records.iter().for_each(|record| copies.is_in_doubt(record.number, member, attempt));
                have_learnt = false;
            }
            _ => have_learnt = false,
        }
    }
    have_learnt
}

// ---- A file whose home is lost.

/// If its home is lost, and its content is here as a copy, it is at home here. Returns whether it is.
pub(super) fn comes_home<F: Filesystem>(router: &Router<F>, id: FileId) -> bool {
    let home = router.namespace.homes.home_of(id);
    if !home.is_some_and(|home| router.link.lost().contains_key(&home)) {
        return false;
    }
    let Some((record, copy)) = held::record_of(router, id.0).zip(held::id_of(router, id.0)) else { return false };
    let replicas = &router.namespace.replicas;
    match replicas.open(copy).and_then(|copy| replicas.comes_home(id, record.version, &copy, false)) {
        Ok(comes) => {
            if comes {
                if record.moment != 0 {
                    // (Others may have what came after that close. They get this.)
                    let attempt = next_attempt(router);
                    let holders = router.outgoing.copies.of(id.0).unwrap_or_default();
                    holders.keys().for_each(|member| router.outgoing.copies.is_in_doubt(id.0, *member, attempt));
                }
                delegating::changed(router, id.0);
                tracing::info!(number = id.0, "a file has its content from a copy: its home is lost");
            }
            comes
        }
        Err(why) => {
            tracing::warn!(%why, number = id.0, "a copy cannot take the place of content that is lost");
            false
        }
    }
}

/// Content of lost homes that has a copy here is here from now on. Returns the files for which that failed: it is tried again.
pub fn come_home<F: Filesystem>(router: &Router<F>) -> Vec<FileId> {
    if router.link.losses() == 0 {
        return Vec::new();
    }
    let lost = router.link.lost();
    let mut records = held::of(router, router.link.member());
    let home = |record: &Record| router.namespace.homes.home_of(FileId(record.number));
    records.retain(|record| home(record).is_some_and(|home| lost.contains_key(&home)));
    let (come, mut stay): (Vec<u64>, Vec<u64>) =
        records.iter().map(|record| record.number).partition(|number| comes_home(router, FileId(*number)));
    // (They need other copies now.)
    let _ = compare(router, &come, tick() + LISTING);
    // (Of another version there is no copy.)
    stay.retain(|number| {
        let sealed = router.namespace.replicas.sealed(FileId(*number));
        sealed.is_some_and(|sealed| held::version_of(router, *number) == Some(sealed.version))
    });
    stay.into_iter().map(FileId).collect()
}

/// This member leaves: no holder keeps anything of it. (The store has everything.)
pub(super) fn end<F: Filesystem>(router: &Router<F>) {
    let _ = compare(router, &router.outgoing.copies.numbers(), tick() + LISTING);
    held::end(router);
}
