//! Content of large files in directories that other members have delegated: it comes in pieces, as programs read it.
//!
//! The file is opened at its owner, as without a delegation. While the delegation lasts, what has come is read here. When all has
//! come, it is a bundle of one file, and is opened without its owner.
//!
//! *Sources*: the owner names the member that asked for the same file before this one. Pieces come from there, if it has them, or a
//! program there has the file open. So a file that all members read at the same time goes from one to the next, and leaves its
//! owner once.
//!
//! Invariants:
//! - A piece of another member counts only if both delegations last after it came. So at that moment both have what the owner has.
//! - Without a delegation, and after any failure, a program reads at the owner.
//!
//! The danger that this avoids: a program reads what was so before a change that another program knows.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use rustix::io::Errno;
use surgetank_types::clock::tick;
use surgetank_types::error::FsResult;

use super::super::call::{Answer, Ask};
use super::Router;
use super::bundles::{beside, large};
use super::delegated::{self, ASKING, Key};
use super::homes::agent;
use super::kept::{Bundle, write_at};
use crate::mount::{Filesystem, killed, wait_long};

/// Bytes that come with one message.
pub(super) const PIECE_BYTES: u64 = 1 << 20;
/// A file of so many pieces comes whole with the first read. A larger one does when it is opened again.
const FEW: usize = 2;
/// A file of fewer pieces comes from its owner.
const SOURCE_MIN: usize = 8;
/// So many pieces come ahead of a program that reads one after the other.
const AHEAD_MAX: usize = 8;
/// So many files come ahead at the same time.
const THREADS_MAX: usize = 32;
/// The thread that brings pieces waits so long for more to do.
const REST: Duration = Duration::from_millis(100);
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// A source that has so many pieces not is asked for none.
const MISSES_MAX: u32 = 2;

/// What is here of a file, and what is to come.
pub(super) struct Pieces {
    is_whole: AtomicBool,
    left: AtomicUsize,
    state: Mutex<State>,
    changed: Condvar,
    /// Pieces are written one after the other.
    writing: Mutex<()>,
}

struct State {
    pieces: Vec<Piece>,
    /// Handles of programs' files at the owner.
    handles: Vec<(u32, u64)>,
    /// The piece after the last one that was read, and how many more are wanted.
    next: usize,
    ahead: usize,
    /// Up to which piece they come ahead, and whether all are to come.
    until: usize,
    all: bool,
    /// A thread brings them.
    is_brought: bool,
    source: Source,
    misses: u32,
    is_broken: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Piece {
    Missing,
    Coming,
    Here,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    Unknown,
    Owner,
    Member(u32),
}

/// Brings pieces that are wanted soon.
pub(super) trait Brings: Send + Sync {
    fn bring_ahead(&self, bundle: &Arc<Bundle>);
}

impl<F: Filesystem> Brings for Router<F> {
    fn bring_ahead(&self, bundle: &Arc<Bundle>) {
        ahead(self, bundle);
        self.bundles.threads.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Pieces {
    pub fn new(size_bytes: u64) -> Self {
        let count = usize::try_from(size_bytes.div_ceil(PIECE_BYTES)).unwrap_or(usize::MAX);
        let state = State {
            pieces: vec![Piece::Missing; count],
            handles: Vec::new(),
            next: 0,
            ahead: 0,
            until: 0,
            all: false,
            is_brought: false,
            source: if count < SOURCE_MIN { Source::Owner } else { Source::Unknown },
            misses: 0,
            is_broken: false,
        };
        let (is_whole, changed, writing) = Default::default();
        Self { is_whole, left: AtomicUsize::new(count), state: Mutex::new(state), changed, writing }
    }

    pub fn left_bytes(&self) -> u64 {
        self.left.load(Ordering::SeqCst) as u64 * PIECE_BYTES
    }

    pub fn are_whole(&self) -> bool {
        self.is_whole.load(Ordering::SeqCst)
    }

    /// Something could not be written: nothing more comes.
    pub fn are_broken(&self) -> bool {
        self.hold().is_broken
    }

    /// Nothing comes any more.
    pub fn end(&self) {
        self.hold().is_broken = true;
    }

    /// A program has the file open at its owner. `again`: one had it before.
    pub fn opened(&self, handle: (u32, u64), again: bool) {
        let mut state = self.hold();
        state.handles.push(handle);
        state.all |= again;
    }

    pub fn closed(&self, handle: (u32, u64)) {
        self.hold().handles.retain(|one| *one != handle);
    }

    fn hold(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Pieces up to this one are read. Returns whether a thread is to bring more.
    fn reads(&mut self, (first, last): (usize, usize)) -> bool {
        let follows = first == self.next || first + 1 == self.next;
        self.ahead = match self.ahead {
            _ if !follows => 0,
            // (Not for a program that reads only the beginning.)
            ahead if last + 1 > self.next && last > 1 => (ahead * 2).clamp(1, AHEAD_MAX),
            ahead => ahead,
        };
        self.next = last + 1;
        self.all |= self.pieces.len() <= FEW;
        self.until = last + 1 + self.ahead;
        let is_wanted = !self.is_brought && !self.is_broken && self.wanted().is_some();
        self.is_brought |= is_wanted;
        is_wanted
    }

    /// The next piece for the thread.
    fn wanted(&self) -> Option<usize> {
        let missing = |piece: &usize| self.pieces.get(*piece) == Some(&Piece::Missing);
        let all = if self.all { self.pieces.len() } else { 0 };
        (self.next..self.until.min(self.pieces.len())).chain(0..all).find(missing)
    }
}

/// The offset and length of a piece.
fn range(bundle: &Bundle, piece: usize) -> (u64, u64) {
    let offset = piece as u64 * PIECE_BYTES;
    (offset, bundle.size_bytes().saturating_sub(offset).min(PIECE_BYTES))
}

/// Reads a file that a program has open at its owner. `None`: it is to be read there.
pub(super) fn read<F: Filesystem>(
    router: &Router<F>,
    fh: u64,
    offset: u64,
    buffer: &mut [u8],
) -> Option<FsResult<usize>> {
    let (bundle, key) = beside(router, fh)?;
    if !is_still(router, key, &bundle) {
        return None;
    }
    let wanted = bundle.size_bytes().saturating_sub(offset).min(buffer.len() as u64);
    if wanted == 0 {
        return Some(Ok(0));
    }
    if let Some(pieces) = bundle.pieces.as_ref().filter(|pieces| !pieces.are_whole()) {
        let piece_of = |at: u64| usize::try_from(at / PIECE_BYTES).unwrap_or(usize::MAX);
        let (first, last) = (piece_of(offset), piece_of(offset + wanted - 1));
        let begins = pieces.hold().reads((first, last));
        if begins {
            begin(router, &bundle);
        } else {
            // (The thread may rest.)
            pieces.changed.notify_all();
        }
        if !(first..=last).all(|piece| bring(router, (key, &bundle), pieces, (piece, true))) {
            return None;
        }
    }
    Some(bundle.read(0, offset, buffer)).filter(Result::is_ok)
}

fn is_still<F: Filesystem>(router: &Router<F>, key: Key, bundle: &Bundle) -> bool {
    delegated::of(router, key).is_some_and(|directory| bundle.is_of(&directory))
}

// ---- Bringing.

/// A thread brings what is wanted soon.
fn begin<F: Filesystem>(router: &Router<F>, bundle: &Arc<Bundle>) {
    let (one, brings) = (bundle.clone(), router.bundles.brings.get().and_then(Weak::upgrade));
    let bring = move || brings.into_iter().for_each(|brings| brings.bring_ahead(&one));
    let thread = || std::thread::Builder::new().name("pool-ahead".to_owned()).spawn(bring).is_ok();
    let threads = &router.bundles.threads;
    if threads.fetch_add(1, Ordering::SeqCst) >= THREADS_MAX || !thread() {
        threads.fetch_sub(1, Ordering::SeqCst);
        bundle.pieces.iter().for_each(|pieces| pieces.hold().is_brought = false);
    }
}

fn ahead<F: Filesystem>(router: &Router<F>, bundle: &Arc<Bundle>) {
    let (Some(pieces), Some(key)) = (&bundle.pieces, bundle.key) else { return };
    let mut rests_until = None;
    loop {
        let mut state = pieces.hold();
        let ends = state.is_broken || pieces.left.load(Ordering::SeqCst) == 0 || state.handles.is_empty();
        match state.wanted().filter(|_| !ends) {
            Some(piece) => {
                rests_until = None;
                drop(state);
                // (A program that reads it brings it, or finds out why not.)
                if !is_still(router, key, bundle) || !bring(router, (key, bundle), pieces, (piece, false)) {
                    pieces.hold().is_brought = false;
                    return;
                }
            }
            None if ends || rests_until.is_some_and(|until| tick() >= until) => {
                state.is_brought = false;
                return;
            }
            None => {
                rests_until = rests_until.or(Some(tick() + REST));
                drop(pieces.changed.wait_timeout(state, REST).unwrap_or_else(PoisonError::into_inner));
            }
        }
    }
}

/// Has the piece come, if need be from another member? With `false` it is to be read at the owner. `is_program`: a program waits, so
/// that the owner is asked as patiently as without pieces.
fn bring<F: Filesystem>(
    router: &Router<F>,
    (key, bundle): (Key, &Arc<Bundle>),
    pieces: &Pieces,
    (piece, is_program): (usize, bool),
) -> bool {
    let until = tick() + ASKING;
    let mut state = pieces.hold();
    loop {
        match state.pieces.get(piece) {
            Some(Piece::Here) => return true,
            Some(Piece::Missing) if !state.is_broken => break,
            Some(Piece::Coming) if tick() < until && !killed() => {}
            _ => return false,
        }
        wait_long();
        state = pieces.changed.wait_timeout(state, LOOK_EVERY).unwrap_or_else(PoisonError::into_inner).0;
    }
    let handle = state.handles.last().copied();
    let is_first = pieces.left.load(Ordering::SeqCst) == state.pieces.len();
    let asks = !is_first && state.source == Source::Unknown;
    if asks {
        state.source = Source::Owner;
    }
    state.pieces[piece] = Piece::Coming;
    drop(state);
    if asks && let Some(member) = source_of(router, key, bundle) {
        pieces.hold().source = Source::Member(member);
    }
    let content = from_source(router, (key, bundle), pieces, piece);
    let content = content.or_else(|| from_owner(router, handle?, range(bundle, piece), is_program));
    let content = content.filter(|content| content.len() as u64 == range(bundle, piece).1);
    // (An earlier delegation's content is not mixed with that of a later one.)
    let content = content.filter(|_| is_still(router, key, bundle));
    let is_written = content
        .is_some_and(|content| write(router, (bundle, pieces), bundle.header_bytes + range(bundle, piece).0, &content));
    if let Some(piece) = pieces.hold().pieces.get_mut(piece) {
        *piece = if is_written { Piece::Here } else { Piece::Missing };
    }
    pieces.changed.notify_all();
    // (The last one. Without its header, the file is opened at the owner.)
    if is_written && pieces.left.fetch_sub(1, Ordering::SeqCst) == 1 {
        let header = bundle.header();
        let is_whole = header.is_some_and(|header| write(router, (bundle, pieces), 0, &header));
        pieces.is_whole.store(is_whole, Ordering::SeqCst);
    }
    is_written
}

fn from_owner<F: Filesystem>(
    router: &Router<F>,
    (member, handle): (u32, u64),
    (offset, bytes): (u64, u64),
    is_program: bool,
) -> Option<Vec<u8>> {
    let ask = Ask::Read { handle, offset, bytes: u32::try_from(bytes).ok()? };
    let answer = if is_program {
        router.remote.ask(&agent(), Router::<F>::at_handle(member), ask).ok()
    } else {
        delegated::ask(router, member, ask)
    };
    match answer {
        Some(Answer::Bytes(content)) => Some(content),
        _ => None,
    }
}

fn source_of<F: Filesystem>(router: &Router<F>, key: Key, bundle: &Bundle) -> Option<u32> {
    let serial = delegated::of(router, key).filter(|directory| bundle.is_of(directory))?.serial;
    match delegated::ask(router, key.0, Ask::Source { node: key.1, serial, file: bundle.node()? })? {
        Answer::Count(member) => u32::try_from(member).ok().filter(|member| *member != 0),
        _ => None,
    }
}

fn from_source<F: Filesystem>(
    router: &Router<F>,
    (key, bundle): (Key, &Bundle),
    pieces: &Pieces,
    piece: usize,
) -> Option<Vec<u8>> {
    let Source::Member(member) = pieces.hold().source else { return None };
    let ask = Ask::Piece { owner: key.0, directory: key.1, file: bundle.node()?, piece: piece as u64 };
    let answer = delegated::ask(router, member, ask);
    let mut state = pieces.hold();
    match answer {
        Some(Answer::Bytes(content)) if content.len() as u64 == range(bundle, piece).1 => {
            state.misses = 0;
            Some(content)
        }
        answer => {
            state.misses += 1;
            if answer.is_none() || state.misses >= MISSES_MAX {
                state.source = Source::Owner;
            }
            None
        }
    }
}

/// Returns whether all is written. (One after the other: the file is where the last write has left it.)
fn write<F: Filesystem>(router: &Router<F>, (bundle, pieces): (&Bundle, &Pieces), offset: u64, content: &[u8]) -> bool {
    let _one = pieces.writing.try_lock().unwrap_or_else(|_| {
        wait_long();
        pieces.writing.lock().unwrap_or_else(PoisonError::into_inner)
    });
    // (Programs of this node need what is left.)
    let written = if router.namespace.replicas.has_room_for(content.len() as u64) {
        write_at(router, bundle.id, offset, content)
    } else {
        Err(Errno::NOSPC.into())
    };
    match written {
        Ok(file) => {
            bundle.is_in(file);
            true
        }
        Err(why) => {
            tracing::debug!(why = %why.errno, "content of another member's file is not kept here");
            pieces.end();
            false
        }
    }
}

// ---- For other members.

/// Another member asks for a piece of a third one's file. (Members trust each other with content, as with [`Ask::Contents`].)
pub(super) fn give<F: Filesystem>(router: &Router<F>, key: Key, file: u64, piece: u64) -> Answer {
    let content = || {
        let directory = delegated::of(router, key)?;
        let bundle = large(router, &directory, (key, file))?.1;
        let piece = usize::try_from(piece).ok().filter(|_| piece < bundle.size_bytes().div_ceil(PIECE_BYTES))?;
        if let Some(pieces) = bundle.pieces.as_ref().filter(|pieces| !pieces.are_whole()) {
            let is_wanted = {
                let state = pieces.hold();
                state.pieces.get(piece).is_some_and(|one| *one != Piece::Missing) || !state.handles.is_empty()
            };
            if !is_wanted || !bring(router, (key, &bundle), pieces, (piece, false)) {
                return None;
            }
        }
        let (offset, bytes) = range(&bundle, piece);
        let mut content = vec![0; usize::try_from(bytes).ok()?];
        let read = bundle.read(0, offset, &mut content).ok()?;
        (read == content.len() && is_still(router, key, &bundle)).then_some(content)
    };
    content().map_or(Answer::Failed(Errno::AGAIN.raw_os_error()), Answer::Bytes)
}
