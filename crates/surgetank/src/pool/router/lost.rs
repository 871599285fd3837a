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
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use surgetank_core::namespace::pooled::{FILES_OF_A_MEMBER, Place};
use surgetank_types::clock::tick;
use surgetank_types::error::FsResult;
use surgetank_types::model::{FileId, Kind};

use super::super::call::{Answer, Ask, Call};
use super::super::link::NoAnswer;
use super::super::others::written::{Changed, below};
use super::homes::agent;
use super::{PATIENCE, Router, owners};
use crate::mount::Filesystem;

/// So long one member may take to say what its programs changed.
const ANSWER: Duration = Duration::from_secs(5);
/// So long content may take to be put back.
const PUTTING: Duration = Duration::from_secs(600);

/// What is known of losses.
#[derive(Default)]
pub(super) struct Lost {
    /// So many losses are known with their names.
    known: AtomicUsize,
    all: Mutex<All>,
    asking: Mutex<()>,
}

#[derive(Default)]
struct All {
    members: BTreeSet<u32>,
    /// Names that the store may have in an older version, by directory: which members' programs changed them.
    names: HashMap<Vec<u8>, HashMap<Box<[u8]>, BTreeSet<u32>>>,
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

    fn note(&self, by: u32, changed: Changed) {
        let mut all = self.all();
        for path in changed.paths {
            let (directory, name) = split(&path);
            all.names.entry(directory.to_vec()).or_default().entry(name.into()).or_default().insert(by);
        }
        all.removed.entry(by).or_default().extend(changed.removed);
    }

    /// Has a program of another member changed or removed this path, or a directory above it? Then this member's content is not
    /// what the path had last.
    fn is_disputed(&self, path: &[u8], by: u32) -> bool {
        let all = self.all();
        let others = |(directory, names): (&Vec<u8>, &HashMap<Box<[u8]>, BTreeSet<u32>>)| {
            names.iter().any(|(name, members)| {
                let changed = if directory.is_empty() { name.to_vec() } else { [directory, &b"/"[..], name].concat() };
                below(path, &changed).is_some() && members.iter().any(|member| *member != by)
            })
        };
        let removed = all.removed.iter().filter(|(member, _)| **member != by);
        removed.flat_map(|(_, paths)| paths).any(|gone| below(path, gone).is_some()) || all.names.iter().any(others)
    }
}

/// Asks all members what is missing since members were lost. Errors: EIO, one does not answer; EINTR.
pub(super) fn learn<F: Filesystem>(router: &Router<F>, until: Instant) -> FsResult<()> {
    while router.lost.is_behind(router.link.losses()) {
        let _one = router.lost.asking.lock().unwrap_or_else(PoisonError::into_inner);
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
    router.lost.note(me, router.others.written.lost_with(lost));
    for other in status.members.iter().map(|status| status.member).filter(|member| ![me, lost].contains(member)) {
        let ask = Ask::LostWith { member: lost, temporaries: temporaries.to_owned() };
        let until = tick() + ANSWER;
        match router.link.call(other, &Call { uid: 0, gid: 0, ask }, None, &mut |_| tick() < until) {
            Ok(Answer::Bytes(bytes)) => match serde_json::from_slice(&bytes) {
                Ok(changed) => router.lost.note(other, changed),
                Err(_) => return false,
            },
            // (It has left, or is lost, too.)
            Err(NoAnswer::Gone) => {}
            _ => return false,
        }
    }
    true
}

/// Another member asks what programs here changed at one that is lost.
pub(super) fn asked<F: Filesystem>(router: &Router<F>, ask: &Ask) -> Answer {
    match ask {
        Ask::LostWith { member, temporaries } => {
            // (Before the list is made: what it says from now on is not believed.)
            router.link.is_lost(*member, temporaries);
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
    if !temporaries.is_empty()
        && let Err(why) = router.namespace.pooled.end_temporaries(path, &temporaries)
    {
        tracing::warn!(%why, directory = %String::from_utf8_lossy(path), "a lost member's temporaries stay in the store");
        return Err(Errno::IO.into());
    }
    router.claim(path, until)
}

/// Is the name missing since a loss, whatever the store has?
fn is_missing<F: Filesystem>(router: &Router<F>, parent: u64, name: &[u8]) -> bool {
    router.link.losses() > 0
        && match router.namespace.pooled.place_of(FileId(parent)) {
            Some(Place::OfTheStore(path)) => router.lost.has(&path, name),
            _ => false,
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

/// A name is about to be made here. What the store has under it is older than what was lost.
pub(super) fn makes<F: Filesystem>(router: &Router<F>, parent: u64, name: &[u8]) {
    if is_missing(router, parent, name) {
        // (There may be none.)
        let _ = router.door.unlink(&agent(), parent, name);
    }
}

/// A name was made here.
pub(super) fn made<F: Filesystem>(router: &Router<F>, parent: u64, name: &[u8]) {
    if !is_missing(router, parent, name) {
        return;
    }
    let Some(path) = router.namespace.pooled.path_of(FileId(parent), name) else { return };
    settled(router, path);
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
    router.lost.all().names.get(&path).map(|names| names.keys().cloned().collect())
}

/// Has this node content of lost members' files that is to be put back, or removals that may be lost?
pub(super) fn is_pending<F: Filesystem>(router: &Router<F>) -> bool {
    router.link.losses() > 0 && router.link.lost().keys().any(|lost| router.others.written.is_pending(*lost))
}

/// Puts it back.
pub(super) fn put_back<F: Filesystem>(router: &Arc<Router<F>>) {
    if router.link.losses() == 0 || learn(router, tick() + ANSWER).is_err() {
        return;
    }
    let (written, homes) = (&router.others.written, &router.namespace.homes);
    for lost in router.link.lost().into_keys() {
        for path in written.to_look_at(lost) {
            // (That takes its directory over: until then the lost member's server may carry something out.)
            owners::owner_of(router, &path);
            match router.namespace.pooled.stored(&path) {
                Ok(None) => settled(router, path),
                Ok(Some(_)) => written.looked_at(&path),
                Err(why) => tracing::warn!(%why, "whether a removal is lost is not known yet"),
            }
        }
        let wanted = written.to_put_back(lost);
        if wanted.is_empty() {
            continue;
        }
        let here: BTreeMap<u64, bool> = homes.contents().into_iter().collect();
        for (number, content) in wanted {
            let path = String::from_utf8_lossy(&content.path).into_owned();
            let is_ours = number / FILES_OF_A_MEMBER == u64::from(lost);
            match here.get(&number) {
                // (A program still writes it.)
                Some(true) => continue,
                Some(false) if is_ours && !router.lost.is_disputed(&content.path, router.link.member()) => {}
                _ => {
                    tracing::warn!(path, "a file of a lost member is not put back: it was changed elsewhere, too");
                    written.content_ends(lost, number);
                    continue;
                }
            }
            match router.link.put_back(number, &content, PUTTING) {
                Some(is_put) => {
                    written.puts_back();
                    tracing::info!(path, is_put, "content of a lost member's file");
                    is_there(router, &content.path);
                    // (A program that has it open keeps it.)
                    let _ = router.door.unlink(&agent(), homes.directory().0, homes.name_of(number).as_bytes());
                }
                None => tracing::warn!(path, "a file of a lost member could not be put back yet"),
            }
        }
    }
}
