//! The order of publications across members: each asks the others how far they are, when its drain waits for it.
//!
//! An answer also means that the closes of that member's programs are known to the owners of the files. So a member waits for no
//! member while it answers: closes wait only for owners, and no owner waits for an answer about the order.
//!
//! The danger that this avoids: a mark appears in the store before data that was closed, on another node, before the mark was
//! opened.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use surgetank_types::clock::tick;
use surgetank_types::model::FileId;

use super::super::call::{Answer, Ask, Call};
use super::super::link::{Link, NoAnswer};
use super::Router;
use crate::mount::{Filesystem, Opened};

/// A member is asked again after this. (Each answer allows all that was queued before it.)
const ASKED_AGAIN: Duration = Duration::from_millis(20);
/// So long the drain waits for an answer, before it looks at its queue again.
const NEWS: Duration = Duration::from_millis(50);
/// So long a member may take for its answer, before it is asked again.
const ANSWER: Duration = Duration::from_secs(2);
/// A member that has not answered for so long is not waited for any longer.
const SILENT: Duration = Duration::from_secs(10);

/// What the others have said.
pub(super) struct Order {
    link: Arc<Link>,
    state: Mutex<State>,
    wanted: Condvar,
    news: Condvar,
}

#[derive(Default)]
struct State {
    /// The moment that the drain waits for; 0: it waits for closes only. `None`: it does not wait.
    wanted: Option<u64>,
    /// How often the others were asked.
    asked: u64,
    /// A thread asks.
    is_asking: bool,
    /// Up to this moment (Unix) the others have everything in the store.
    until_nanos: u64,
    /// Since when a member has not answered. (0: this node's process.)
    silent: HashMap<u32, Instant>,
}

impl Order {
    pub fn new(link: Arc<Link>) -> Self {
        Self { link, state: Mutex::default(), wanted: Condvar::new(), news: Condvar::new() }
    }

    pub fn until_nanos(&self) -> u64 {
        self.state().until_nanos
    }

    pub fn is_asking(&self) -> bool {
        self.state().is_asking
    }

    fn want(&self, needed_nanos: u64) {
        let mut state = self.state();
        state.wanted = state.wanted.max(Some(needed_nanos));
        self.wanted.notify_all();
    }

    /// Has the others asked, and waits for that.
    pub fn await_news(&self, needed_nanos: u64) {
        self.want(needed_nanos);
        let state = self.state();
        let before = state.asked;
        // (Without news the drain asks again.)
        drop(self.news.wait_timeout_while(state, NEWS, |state| state.asked == before));
    }

    fn tell_news(&self) {
        self.state().asked += 1;
        self.news.notify_all();
    }

    /// Returns when it is wanted, or now and then.
    fn await_wanted(&self) -> Option<u64> {
        let mut state = self.state();
        if state.wanted.is_none() {
            state = self.wanted.wait_timeout(state, ANSWER).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.wanted.take()
    }

    /// Asks others, all at once: those whose programs write here, or all, if a moment is needed. Returns those that may not have
    /// delivered the closes of their programs. `now_nanos`: the beginning of the cut. Later moments are not asked for.
    fn ask(&self, writers: &BTreeSet<u32>, needed_nanos: u64, now_nanos: u64) -> Vec<u32> {
        let others = if needed_nanos == 0 {
            writers.iter().copied().collect()
        } else {
            match self.members() {
                Some(others) => others,
                None => return writers.iter().copied().collect(),
            }
        };
        let answers: Vec<(u32, Option<u64>)> = std::thread::scope(|scope| {
            let ask = |member: u32| {
                let until = tick() + ANSWER;
                let call = Call { uid: 0, gid: 0, ask: Ask::Published { needed_nanos } };
                match self.link.call(member, &call, None, &mut |_| tick() < until) {
                    Ok(Answer::Count(nanos)) => Some(nanos),
                    // (It has left, or is lost. Nothing comes from it.)
                    Err(NoAnswer::Gone) => Some(u64::MAX),
                    _ => None,
                }
            };
            // (Without a thread a member is asked the next time.)
            let begun = |member: u32| std::thread::Builder::new().spawn_scoped(scope, move || ask(member)).ok();
            let asked: Vec<_> = others.iter().map(|member| (*member, begun(*member))).collect();
            let answer = |thread: std::thread::ScopedJoinHandle<'_, Option<u64>>| thread.join().ok().flatten();
            asked.into_iter().map(|(member, thread)| (member, thread.and_then(answer))).collect()
        });
        let mut state = self.state();
        let mut until_nanos = now_nanos;
        let mut missing = Vec::new();
        for (member, answer) in &answers {
            match answer {
                Some(nanos) => {
                    state.silent.remove(member);
                    until_nanos = until_nanos.min(*nanos);
                }
                None if state.is_silent(*member) => {
                    tracing::warn!(member, "does not answer: what is in the store does not wait for it any longer");
                }
                None => {
                    until_nanos = 0;
                    missing.push(*member);
                }
            }
        }
        if needed_nanos > 0 {
            state.until_nanos = until_nanos;
        }
        missing
    }

    /// All other members. `None`: this node's process does not answer, and is waited for.
    fn members(&self) -> Option<Vec<u32>> {
        let Ok(status) = self.link.status(ANSWER) else {
            let mut state = self.state();
            if state.is_silent(0) {
                state.until_nanos = u64::MAX;
            }
            return None;
        };
        let mut state = self.state();
        state.silent.retain(|member, _| status.members.iter().any(|one| one.member == *member));
        Some(status.members.iter().map(|one| one.member).filter(|one| *one != self.link.member()).collect())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// It has not answered. Has it not for so long that it is not waited for?
    fn is_silent(&mut self, member: u32) -> bool {
        self.silent.entry(member).or_insert_with(tick).elapsed() >= SILENT
    }
}

/// Asks the others whenever the drain waits for them.
pub(super) fn ask_when_wanted<F: Filesystem>(router: &Arc<Router<F>>) {
    let (order, weak) = (router.order.clone(), Arc::downgrade(router));
    let ask = move || {
        loop {
            let wanted = order.await_wanted();
            let Some(router) = weak.upgrade() else { return };
            if let Some(needed_nanos) = wanted {
                let in_pool = &router.namespace.order;
                let writers = in_pool.writers(router.link.member());
                in_pool.cut(ANSWER, |now_nanos| order.ask(&writers, needed_nanos, now_nanos));
                order.tell_news();
                std::thread::sleep(ASKED_AGAIN);
            }
        }
    };
    match std::thread::Builder::new().name("pool-order".to_owned()).spawn(ask) {
        Ok(_) => router.order.state().is_asking = true,
        Err(why) => {
            tracing::error!(%why, "other members are not asked, and files reach the store in no order with theirs")
        }
    }
}

/// Another member asks how far this one is.
pub(super) fn published<F: Filesystem>(router: &Router<F>, needed_nanos: u64) -> Answer {
    let own = router.link.member();
    let in_pool = &router.namespace.order;
    let until = in_pool.is_published_until(own, needed_nanos, ANSWER);
    // (Files that others write may hold it up. They are asked after this answer.)
    if until.is_some_and(|until| until < needed_nanos) && !in_pool.writers(own).is_empty() {
        router.order.want(0);
    }
    until.map_or(Answer::Failed(Errno::TIMEDOUT.raw_os_error()), Answer::Count)
}

/// A file of this member was opened. `by`: another member, for whose program.
pub(super) fn opened<F: Filesystem>(router: &Router<F>, id: u64, opened: &Opened, by: impl FnOnce() -> Option<u32>) {
    let homes = &router.namespace.homes;
    // (Content for another member's file has no place in the queue here.)
    if homes.writes(opened.fh) && !homes.is_content(FileId(id)) {
        router.namespace.order.hold(opened.fh, by().unwrap_or(router.link.member()));
    }
}
