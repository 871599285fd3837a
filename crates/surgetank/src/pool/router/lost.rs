//! Directories of lost members, which other members take over.
//!
//! A lost member's directory begins again with what the store has. What programs of living nodes have changed there since may
//! be missing. So before anything is answered, each member says what its programs changed. These names do not exist until
//! they are made again. Content that a living node has is put back under its path.
//!
//! The dangers that this avoids: an older version of a file that a program has seen newer; a file that was removed and
//! returns; a rename of the lost member that its server carries out late.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use surgetank_core::namespace::Membership;
use surgetank_core::namespace::pooled::{FILES_OF_A_MEMBER, Place};
use surgetank_types::clock::tick;
use surgetank_types::error::FsResult;
use surgetank_types::model::{Caller, FileId, Kind};

use super::super::call::{Answer, Ask, Call};
use super::super::link::NoAnswer;
use super::super::others::contents::below;
use super::super::others::written::Changed;
use super::homes::agent;
use super::{PATIENCE, Router, held, owners};
use crate::mount::Filesystem;

/// How often it is looked whether something is to be put back.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// So long one member may take to say what its programs changed.
const ANSWER: Duration = Duration::from_secs(5);
/// So often something is tried, each second.
const TRIES_MAX: u32 = 60;
/// So long content may take to be put back.
const PUTTING: Duration = Duration::from_secs(600);

/// What is known of losses.
#[derive(Default)]
pub(super) struct Lost {
    /// So many losses are known with their names.
    known: AtomicUsize,
    all: Mutex<All>,
    asking: Mutex<()>,
    /// How often something has failed, by the number of the file; 0: rounds with questions to the store.
    tries: Mutex<HashMap<u64, u32>>,
}

/// Names, and which members' programs changed each.
type Names = HashMap<Box<[u8]>, BTreeSet<u32>>;

#[derive(Default)]
struct All {
    members: BTreeSet<u32>,
    /// Names that the store may have in an older version, by directory.
    names: HashMap<Vec<u8>, Names>,
    /// Paths that a member's programs removed.
    removed: BTreeMap<u32, BTreeSet<Vec<u8>>>,
}

fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(slash) => (&path[..slash], &path[slash + 1..]),
        None => (b"", path),
    }
}

impl Lost {
    /// It has failed again. Is it not tried any more?
    fn gives_up(&self, number: u64) -> bool {
        let mut tries = self.tries.lock().unwrap_or_else(PoisonError::into_inner);
        let tries = tries.entry(number).or_default();
        *tries += 1;
        *tries >= TRIES_MAX
    }

    fn all(&self) -> MutexGuard<'_, All> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does this agent know what is missing since each loss?
    pub fn is_behind(&self, losses: usize) -> bool {
        self.known.load(Ordering::Acquire) < losses
    }

    fn has(&self, directory: &[u8], name: &[u8]) -> bool {
        self.known.load(Ordering::Acquire) > 0
            && self.all().names.get(directory).is_some_and(|names| names.contains_key(name))
    }

    fn remove(&self, path: &[u8]) -> bool {
        let (directory, name) = split(path);
        let mut all = self.all();
        let Some(names) = all.names.get_mut(directory) else { return false };
        let is_removed = names.remove(name).is_some();
        if names.is_empty() {
            all.names.remove(directory);
        }
        is_removed
    }

    /// The store has what this member's programs made of the path. Returns whether other members' programs changed it, too.
    fn is_also_of_others(&self, path: &[u8], by: u32) -> bool {
        let (directory, name) = split(path);
        let mut all = self.all();
        let members = all.names.get_mut(directory).and_then(|names| names.get_mut(name));
        members.is_some_and(|members| {
            members.remove(&by);
            !members.is_empty()
        })
    }

    fn note(&self, by: u32, changed: Changed) {
        let mut all = self.all();
        for path in changed.paths {
            let (directory, name) = split(&path);
            all.names.entry(directory.to_vec()).or_default().entry(name.into()).or_default().insert(by);
        }
        all.removed.entry(by).or_default().extend(changed.removed);
    }

    /// Has a program of another member changed this path, or removed it or a directory above it? Then this member's content is not
    /// what the path had last.
    fn is_disputed(&self, path: &[u8], by: u32) -> bool {
        let all = self.all();
        let (directory, name) = split(path);
        let changed = all.names.get(directory).and_then(|names| names.get(name));
        let is_changed = changed.is_some_and(|members| members.iter().any(|member| *member != by));
        drop(all);
        is_changed || self.was_removed(path, by)
    }

    /// Has a program of another member removed it, or a directory above it?
    fn was_removed(&self, path: &[u8], by: u32) -> bool {
        let all = self.all();
        let mut removed = all.removed.iter().filter(|(member, _)| **member != by).flat_map(|(_, paths)| paths);
        removed.any(|gone| below(path, gone).is_some())
    }
}

/// Asks all members what is missing since members were lost. Errors: EIO, one does not answer; EINTR.
pub(super) fn learn<F: Filesystem>(router: &Router<F>, until: Instant) -> FsResult<()> {
    while router.lost.is_behind(router.link.losses()) {
        let _one = match router.lost.asking.try_lock() {
            Ok(one) => one,
            Err(TryLockError::Poisoned(one)) => one.into_inner(),
            Err(TryLockError::WouldBlock) => {
                router.pause(until)?;
                continue;
            }
        };
        let lost = router.link.lost();
        let unknown: Vec<(u32, String)> = {
            let all = router.lost.all();
            lost.into_iter().filter(|(member, _)| !all.members.contains(member)).collect()
        };
        for (member, temporaries) in unknown {
            if ask_all(router, member, &temporaries) {
                let mut all = router.lost.all();
                all.members.insert(member);
                router.lost.known.store(all.members.len(), Ordering::Release);
            }
        }
        if router.lost.is_behind(router.link.losses()) {
            router.pause(until)?;
        }
    }
    Ok(())
}

/// Returns whether all living members have answered.
fn ask_all<F: Filesystem>(router: &Router<F>, lost: u32, temporaries: &str) -> bool {
    let Ok(status) = router.link.status(ANSWER) else { return false };
    let me = router.link.member();
    held::is_lost(router, lost);
    router.lost.note(me, router.others.written.lost_with(lost));
    let others: Vec<u32> =
        status.members.iter().map(|status| status.member).filter(|member| ![me, lost].contains(member)).collect();
    let ask = |other: u32| {
        let ask = Ask::LostWith { member: lost, temporaries: temporaries.to_owned() };
        let until = tick() + ANSWER;
        match router.link.call(other, &Call { uid: 0, gid: 0, ask }, None, &mut |_| tick() < until) {
            Ok(Answer::Bytes(bytes)) => {
                let changed = serde_json::from_slice(&bytes);
                changed.map(|changed| router.lost.note(other, changed)).is_ok()
            }
            // (It has left, or is lost, too.)
            Err(NoAnswer::Gone) => true,
            _ => false,
        }
    };
    let ask = &ask;
    std::thread::scope(|scope| {
        // (Without a thread it is asked again.)
        let asked = others.into_iter().map(|other| std::thread::Builder::new().spawn_scoped(scope, move || ask(other)));
        let asked: Vec<_> = asked.collect();
        asked.into_iter().all(|asked| asked.is_ok_and(|asked| asked.join().unwrap_or(false)))
    })
}

/// Another member asks what programs here changed at one that is lost.
pub(super) fn asked<F: Filesystem>(router: &Router<F>, ask: &Ask) -> Answer {
    match ask {
        Ask::LostWith { member, temporaries } => {
            // (Before the list is made: what it says from now on is not believed.)
            router.link.is_lost(*member, temporaries);
            held::is_lost(router, *member);
            Answer::Bytes(serde_json::to_vec(&router.others.written.lost_with(*member)).unwrap_or_default())
        }
        Ask::MadeAgain { paths } => {
            paths.iter().for_each(|path| is_there(router, path));
            Answer::Done
        }
        _ => Answer::Failed(Errno::OPNOTSUPP.raw_os_error()),
    }
}

fn is_there<F: Filesystem>(router: &Router<F>, path: &[u8]) {
    router.lost.remove(path);
    let lost: Vec<u32> = router.link.lost().into_keys().collect();
    router.others.written.made_again(&lost, path);
}

/// Owns the directory of a lost member. Look then who does.
pub(super) fn take_over<F: Filesystem>(router: &Router<F>, path: &[u8], member: u32, until: Instant) -> FsResult<()> {
    learn(router, until)?;
    let temporaries = router.link.lost().remove(&member).unwrap_or_default();
    // (A claim of its own may be being given up.)
    if member != router.link.member() {
        let pooled = &router.namespace.pooled;
        let from = Membership { pool: router.link.key(), member };
        let end = || if temporaries.is_empty() { Ok(()) } else { pooled.end_temporaries(path, &temporaries) };
        let ended = pooled.give_notice(path, &from).and_then(|()| end());
        if let Err(why) = ended {
            let directory = String::from_utf8_lossy(path);
            tracing::warn!(%why, %directory, "a lost member's directory cannot be taken over: the store fails");
            return Err(Errno::IO.into());
        }
    }
    router.claim(path, until)
}

/// Is the name missing since a loss, whatever the store has? (What was made here since is not.)
fn is_missing<F: Filesystem>(router: &Router<F>, parent: u64, name: &[u8]) -> bool {
    let pooled = &router.namespace.pooled;
    router.link.losses() > 0
        && match pooled.place_of(FileId(parent)) {
            Some(Place::OfTheStore(path)) => {
                router.lost.has(&path, name) && !pooled.is_changed_here(FileId(parent), name)
            }
            _ => false,
        }
}

/// A name was made here, also in a directory that was made again.
pub(super) fn made<F: Filesystem>(router: &Router<F>, parent: u64, name: &[u8]) {
    if router.link.losses() > 0
        && let Some(path) = router.namespace.pooled.path_of(FileId(parent), name)
    {
        let (directory, name) = split(&path);
        if router.lost.has(directory, name) {
            settled(router, path);
        }
    }
}

/// Does a look-up here find nothing? A directory has no content that could be older. (The namespace is not asked: it would show
/// the older version to the shim.)
pub(super) fn hides<F: Filesystem>(router: &Router<F>, parent: u64, name: &[u8]) -> bool {
    is_missing(router, parent, name)
        && router
            .namespace
            .pooled
            .path_of(FileId(parent), name)
            .is_some_and(|path| !matches!(router.namespace.pooled.stored(&path), Ok(Some(Kind::Directory))))
}

/// Makes a name here, which must be new. What the store has under it is older than what was lost.
pub(super) fn making<F: Filesystem, T>(
    router: &Router<F>,
    caller: &Caller,
    (parent, name): (u64, &[u8]),
    make: impl FnOnce() -> FsResult<T>,
) -> FsResult<T> {
    if is_missing(router, parent, name) {
        // (There may be none, and the caller may have no right to it.)
        let _ = router.door.unlink(caller, parent, name);
    }
    make().inspect(|_| made(router, parent, name))
}

/// Nothing is missing under the path any more: all members learn it.
fn settled<F: Filesystem>(router: &Router<F>, path: Vec<u8>) {
    is_there(router, &path);
    let link = router.link.clone();
    let say = move || {
        let members = link.status(PATIENCE).map(|status| status.members).unwrap_or_default();
        for other in members.iter().filter(|other| other.member != link.member()) {
            let call = Call { uid: 0, gid: 0, ask: Ask::MadeAgain { paths: vec![path.clone()] } };
            let until = tick() + PATIENCE;
            // (One that is not reached reports the file as lost, although it was made again.)
            let _ = link.call(other.member, &call, None, &mut |_| tick() < until);
        }
    };
    let _ = std::thread::Builder::new().name("pool-again".to_owned()).spawn(say);
}

/// Which names a listing leaves out.
pub(super) fn left_out<F: Filesystem>(router: &Router<F>, dir: u64) -> Option<BTreeSet<Box<[u8]>>> {
    if router.link.losses() == 0 {
        return None;
    }
    let Some(Place::OfTheStore(path)) = router.namespace.pooled.place_of(FileId(dir)) else { return None };
    let all = router.lost.all();
    let names = all.names.get(&path)?.keys().cloned().collect::<Vec<_>>();
    drop(all);
    let pooled = &router.namespace.pooled;
    Some(names.into_iter().filter(|name| !pooled.is_changed_here(FileId(dir), name)).collect())
}

/// Has this node content of lost members' files that is to be put back, or removals that may be lost?
pub(super) fn is_pending<F: Filesystem>(router: &Router<F>) -> bool {
    router.link.losses() > 0 && router.link.lost().keys().any(|lost| router.others.written.is_pending(*lost))
}

/// Looks each second whether there is.
pub(super) fn look_now_and_then<F: Filesystem>(router: &Arc<Router<F>>) {
    let router = Arc::downgrade(router);
    let look = move || {
        loop {
            std::thread::sleep(LOOK_EVERY);
            let Some(router) = Weak::upgrade(&router) else { return };
            put_back(&router);
        }
    };
    if let Err(why) = std::thread::Builder::new().name("pool-losses".to_owned()).spawn(look) {
        tracing::warn!(%why, "content of lost members' files is not put back");
    }
}

/// Puts it back.
fn put_back<F: Filesystem>(router: &Arc<Router<F>>) {
    if router.link.losses() == 0 || learn(router, tick() + ANSWER).is_err() {
        return;
    }
    let (written, homes) = (&router.others.written, &router.namespace.homes);
    for lost in router.link.lost().into_keys() {
        held::is_lost(router, lost);
        let mut store_fails = false;
        for path in written.to_look_at(lost) {
            // (That takes its directory over: until then the lost member's server may carry something out.)
            owners::owner_of(router, &path);
            match router.namespace.pooled.stored(&path) {
                // (Another node may have made it after that.)
                Ok(None) if router.lost.is_also_of_others(&path, router.link.member()) => {
                    written.made_again(&[lost], &path);
                }
                Ok(None) => settled(router, path),
                Ok(Some(_)) => written.looked_at(&path),
                Err(why) => {
                    tracing::info!(%why, "whether a removal is lost is not known yet");
                    store_fails = true;
                    break;
                }
            }
        }
        if store_fails && router.lost.gives_up(0) {
            written.to_look_at(lost).iter().for_each(|path| written.looked_at(path));
        }
        let wanted = written.to_put_back(lost);
        if wanted.is_empty() {
            continue;
        }
        let here: BTreeMap<u64, bool> = homes.contents().into_iter().collect();
        let mut silent = BTreeSet::new();
        for (number, content) in wanted {
            let path = String::from_utf8_lossy(&content.path).into_owned();
            let is_ours = number / FILES_OF_A_MEMBER == u64::from(lost);
            match here.get(&number) {
                // (Its owner has said of each change.)
                None if content.is_directory && content.is_copy => {}
                // (A program there may still write it.)
                Some(false) if content.newer_at.is_some_and(|home| may_have(router, home, number, &mut silent)) => {
                    continue;
                }
                // (It may have been put back from another member, and removed, meanwhile.)
                _ if !written.is_to_be_put_back(lost, number) => continue,
                Some(false) if content.is_copy => {}
                None if content.is_directory && !router.lost.was_removed(&content.path, router.link.member()) => {}
                // (A program still writes it.)
                Some(true) => continue,
                Some(false) if is_ours && !router.lost.is_disputed(&content.path, router.link.member()) => {}
                _ => {
                    tracing::warn!(path, "a file of a lost member is not put back: it was changed elsewhere, too");
                    written.content_ends(lost, number);
                    continue;
                }
            }
            // (Otherwise a sync would wait for the store. What was synced is there.)
            let syncs = !content.is_directory && router.namespace.replicas.is_synced_by_tier(number);
            match router.link.put_back(number, (&content, syncs), PUTTING) {
                // (It stays in the list of what is lost, unless that was made again.)
                Some(false) => {
                    tracing::warn!(path, "a file of a lost member is not put back: something has its name");
                    written.content_ends(lost, number);
                    if content.is_copy && !content.is_directory {
                        // (Another copy may be there already.)
                        let _ = router.door.unlink(&agent(), homes.directory().0, homes.name_of(number).as_bytes());
                    }
                }
                Some(true) => {
                    written.puts_back();
                    tracing::info!(path, "a file of a lost member is back");
                    settled(router, content.path);
                    if !content.is_directory {
                        // (A program that has it open keeps it.)
                        let _ = router.door.unlink(&agent(), homes.directory().0, homes.name_of(number).as_bytes());
                    }
                }
                None if router.lost.gives_up(number) => {
                    tracing::warn!(path, "a file of a lost member cannot be put back");
                    written.content_ends(lost, number);
                }
                None => {}
            }
        }
    }
}

/// May the member have content for this file? `silent`: members that did not answer are not asked again.
fn may_have<F: Filesystem>(router: &Router<F>, member: u32, number: u64, silent: &mut BTreeSet<u32>) -> bool {
    if silent.contains(&member) {
        return true;
    }
    let call = Call { uid: 0, gid: 0, ask: Ask::HomeAttributes { number } };
    let until = tick() + ANSWER;
    match router.link.call(member, &call, None, &mut |_| tick() < until && !router.link.is_over()) {
        Ok(Answer::Failed(why)) if why == Errno::NOENT.raw_os_error() => false,
        Err(NoAnswer::Gone) => false,
        Ok(_) => true,
        Err(_) => {
            silent.insert(member);
            true
        }
    }
}
