//! `surgetank locate`: where the contents of thousands of files are, over all members of a pool.
//!
//! 1. The owner of each directory is asked about all of the files there, at the same time as the others.
//! 2. It names other members that have their contents. Those are asked for tier and plain file.
//!
//! So there are two rounds of messages, whatever the number of files in a directory. In a directory that no member has claimed, each member may
//! have files of the store on its tiers: all of them are asked in the second round.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use surgetank_core::namespace::Whereabouts;
use surgetank_core::report::{CopyOn, FileState, Located, PathText, Same};
use surgetank_state::State;
use surgetank_types::clock::tick;

use super::Served;
use crate::agent::wire::{Answer, Request};
use crate::pool::router::locating::{content_of, members_with, other_members, this_member};
use crate::pool::router::owners::{Decides, Directories};

/// So long directories are looked up. The rest is not asked about.
const LOOKING: Duration = Duration::from_secs(20);

/// One file; an error in words.
type Found = Result<Located, String>;
/// Asks another member.
pub(super) type Asks<'a> = &'a (dyn Fn(u32, &Request) -> Answer + Sync);

/// The state in the words of the report.
pub(super) fn shown(state: State) -> FileState {
    match state {
        State::Open => FileState::Open,
        State::Sealed | State::Kept => FileState::Sealed,
        State::Draining => FileState::Draining,
        State::Durable => FileState::Durable,
        State::Evicted => FileState::Evicted,
        State::Lost => FileState::Lost,
    }
}

fn member(served: &Served) -> Option<u32> {
    served.pool.as_ref().map(|pool| this_member(pool))
}

fn copy_here(served: &Served, (tier, file): (String, Vec<u8>)) -> CopyOn {
    let node = rustix::system::uname().nodename().to_string_lossy().into_owned();
    CopyOn { member: member(served), node, tier, path: PathText(file) }
}

fn located(served: &Served, at: Whereabouts) -> Located {
    // (While a program writes it, no copy is whole.)
    let is_whole = at.is_file && at.state != State::Open;
    let others = served.pool.as_ref().filter(|_| is_whole).map(|pool| members_with(pool, at.id, at.home));
    let others = others.unwrap_or_default();
    // (A version without a number is the store's.)
    let is_home = at.version > 0 && at.copy.is_some();
    Located {
        size_bytes: at.size_bytes,
        version: at.version,
        state: shown(at.state),
        home: at.home.or_else(|| member(served).filter(|_| is_home)),
        copies: at.copy.into_iter().filter(|_| is_whole).map(|copy| copy_here(served, copy)).collect(),
        durable: matches!(at.state, State::Durable | State::Evicted),
        elsewhere: (!others.is_empty()).then_some((at.id.0, others)),
    }
}

/// As this agent knows them.
pub(super) fn here(served: &Served, paths: &[PathText]) -> Vec<Found> {
    served.namespace.files.descriptors.catch_up();
    let found = served.namespace.locations.locate(paths);
    found.into_iter().map(|one| one.map(|at| located(served, at)).map_err(|fault| fault.to_string())).collect()
}

/// What this member has of other members' files, and of the store's.
pub(super) fn copies_here(served: &Served, numbers: &[u64], files: &[Same]) -> Vec<Option<CopyOn>> {
    let content = |number: &u64| served.pool.as_ref().and_then(|pool| content_of(pool, *number));
    let contents = numbers.iter().map(content);
    let of_the_store = files.iter().map(|file| served.namespace.locations.same_copy(file));
    contents.chain(of_the_store).map(|copy| copy.map(|copy| copy_here(served, copy))).collect()
}

/// As all members know them. `None`: no other member has a part in it.
pub(super) fn everywhere(served: &Served, paths: &[PathText], ask: Asks<'_>) -> Option<Vec<Found>> {
    let pool = served.pool.as_deref()?;
    let others = other_members(pool);
    if others.is_empty() {
        return None;
    }
    let until = tick() + LOOKING;
    let mut directories = Directories::default();
    let mut deciders: HashMap<&[u8], Decides> = HashMap::new();
    let mut by_owner: BTreeMap<Option<u32>, Vec<usize>> = BTreeMap::new();
    let mut of_the_store = Vec::new();
    for (at, path) in paths.iter().enumerate() {
        let above = path.0.iter().rposition(|byte| *byte == b'/').map_or(&b""[..], |slash| &path.0[..slash]);
        let decides = match deciders.get(above) {
            Some(known) => Some(*known),
            // (A look-up may wait for a member that does not answer.)
            None if tick() > until => None,
            None => {
                let decides = directories.decider(pool, above);
                deciders.insert(above, decides);
                Some(decides)
            }
        };
        if decides == Some(Decides::TheStore) {
            of_the_store.push(at);
        }
        match decides {
            Some(Decides::Member(member)) => by_owner.entry(Some(member)).or_default().push(at),
            Some(Decides::Us | Decides::TheStore) => by_owner.entry(None).or_default().push(at),
            None => {}
        }
    }
    directories.end(pool);
    let of = |places: &[usize]| places.iter().map(|at| paths[*at].clone()).collect::<Vec<_>>();
    let unasked = || Err("the pool's members take too long to answer; see `surgetank pool members`".to_owned());
    let mut answers: Vec<Found> = paths.iter().map(|_| unasked()).collect();
    let asked = at_once(by_owner.into_iter().collect(), |(owner, places)| {
        let found = match owner {
            None => here(served, &of(places)),
            Some(owner) => match ask(*owner, &Request::Locate { paths: of(places) }) {
                Answer::Located { files } if files.len() == places.len() => files,
                Answer::Error(refusal) => {
                    vec![Err(surgetank_types::error::Error::from(refusal).to_string()); places.len()]
                }
                _ => vec![Err(format!("member {owner} of the pool gave another answer")); places.len()],
            },
        };
        (places.clone(), found)
    });
    for (places, found) in asked {
        places.into_iter().zip(found).for_each(|(at, found)| answers[at] = found);
    }
    add_copies(served, paths, &mut answers, (&others, &of_the_store), ask);
    Some(answers)
}

/// The second round.
fn add_copies(
    served: &Served,
    paths: &[PathText],
    answers: &mut [Found],
    (others, of_the_store): (&[u32], &[usize]),
    ask: Asks<'_>,
) {
    let mut numbers: BTreeMap<u32, Vec<(usize, u64)>> = BTreeMap::new();
    for (at, answer) in answers.iter_mut().enumerate() {
        let Some((number, members)) = answer.as_mut().ok().and_then(|found| found.elsewhere.take()) else { continue };
        members.into_iter().for_each(|member| numbers.entry(member).or_default().push((at, number)));
    }
    let same = |at: &usize| {
        let found = answers[*at].as_ref().ok().filter(|found| found.durable && found.size_bytes > 0)?;
        let mtime = served.namespace.locations.known_mtime(&paths[*at].0)?;
        Some((*at, Same { path: paths[*at].clone(), size_bytes: found.size_bytes, mtime }))
    };
    let (places, same): (Vec<usize>, Vec<Same>) = of_the_store.iter().filter_map(same).unzip();
    if !same.is_empty() {
        for member in others {
            numbers.entry(*member).or_default();
        }
    }
    let me = member(served);
    let asked = at_once(numbers.into_iter().collect(), |(member, of)| {
        let known: Vec<u64> = of.iter().map(|(_, number)| *number).collect();
        let copies = if me == Some(*member) {
            copies_here(served, &known, &[])
        } else {
            match ask(*member, &Request::Copies { numbers: known, files: same.clone() }) {
                Answer::Copies { copies } => copies,
                _ => Vec::new(),
            }
        };
        (*member, of.clone(), copies)
    });
    for (member, of, mut copies) in asked {
        let answered = copies.len() == of.len() + same.len() || me == Some(member);
        copies.resize(of.len() + same.len(), None);
        let rest = copies.split_off(of.len());
        for ((at, _), copy) in of.into_iter().zip(copies) {
            let unknown =
                || CopyOn { member: Some(member), node: String::new(), tier: String::new(), path: PathText::default() };
            if let Ok(found) = &mut answers[at] {
                found.copies.extend(if answered { copy } else { Some(unknown()) });
            }
        }
        for (at, copy) in places.iter().zip(rest) {
            if let Ok(found) = &mut answers[*at] {
                found.copies.extend(copy);
            }
        }
    }
}

/// Does all of it at the same time: another member may take its time to answer.
fn at_once<T: Sync, R: Send>(of: Vec<T>, act: impl Fn(&T) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let (first, rest) = match of.split_first() {
            Some(split) => split,
            None => return Vec::new(),
        };
        let others: Vec<_> = rest.iter().map(|one| scope.spawn(|| act(one))).collect();
        let mut done = vec![act(first)];
        done.extend(others.into_iter().filter_map(|other| other.join().ok()));
        done
    })
}
