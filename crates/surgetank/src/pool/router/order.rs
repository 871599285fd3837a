//! The order of publications across members: each asks the others how far they are, when its drain waits for it.
//!
//! An answer also means that the closes of that member's programs are known to the owners of the files. So a member waits for no
//! member while it answers: closes wait only for owners, and no owner waits for an answer about the order.
//!
//! The danger that this avoids: a mark appears in the store before data that was closed, on another node, before the mark was
//! opened.

use std::collections::HashMap;
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
    is_wanted: bool,
    /// How often the others were asked.
    asked: u64,
    /// Up to this moment (Unix) the others have everything in the store.
    until_nanos: u64,
    /// Since when a member has not answered.
    silent: HashMap<u32, Instant>,
}

impl Order {
    pub fn new(link: Arc<Link>) -> Self {
        Self { link, state: Mutex::default(), wanted: Condvar::new(), news: Condvar::new() }
    }

    pub fn until_nanos(&self) -> u64 {
        self.state().until_nanos
    }

    pub fn want(&self) {
        self.state().is_wanted = true;
        self.wanted.notify_all();
    }

    /// Has the others asked, and waits for that.
    pub fn await_news(&self) {
        self.want();
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
    fn await_wanted(&self) -> bool {
        let mut state = self.state();
        if !state.is_wanted {
            state = self.wanted.wait_timeout(state, ANSWER).unwrap_or_else(PoisonError::into_inner).0;
        }
        std::mem::take(&mut state.is_wanted)
    }

    /// Asks all others at once. Returns the members that have delivered the closes of their programs.
    fn ask(&self) -> Vec<u32> {
        let Ok(status) = self.link.status(ANSWER) else { return Vec::new() };
        let others: Vec<u32> =
            status.members.iter().map(|one| one.member).filter(|one| *one != self.link.member()).collect();
        let answers: Vec<(u32, Option<u64>)> = std::thread::scope(|scope| {
            let ask = |member: u32| {
                let until = tick() + ANSWER;
                let call = Call { uid: 0, gid: 0, ask: Ask::Published };
                match self.link.call(member, &call, None, &mut |_| tick() < until) {
                    Ok(Answer::Count(nanos)) => Some(nanos),
                    // (It has left, or is lost. Nothing comes from it.)
                    Err(NoAnswer::Gone) => Some(u64::MAX),
                    _ => None,
                }
            };
            let asked = others.iter().map(|member| (*member, scope.spawn(move || ask(*member))));
            let asked: Vec<_> = asked.collect();
            asked.into_iter().map(|(member, answer)| (member, answer.join().unwrap_or_default())).collect()
        });
        let mut state = self.state();
        state.silent.retain(|member, _| others.contains(member));
        let mut until_nanos = u64::MAX;
        for (member, answer) in &answers {
            match answer {
                Some(nanos) => {
                    state.silent.remove(member);
                    until_nanos = until_nanos.min(*nanos);
                }
                None => {
                    let since = *state.silent.entry(*member).or_insert_with(tick);
                    if since.elapsed() < SILENT {
                        until_nanos = 0;
                    } else {
                        tracing::warn!(member, "does not answer: what is in the store does not wait for it any longer");
                    }
                }
            }
        }
        state.until_nanos = until_nanos;
        answers.into_iter().filter(|(_, answer)| answer.is_some()).map(|(member, _)| member).collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks the others whenever the drain waits for them.
pub(super) fn ask_when_wanted<F: Filesystem>(router: &Arc<Router<F>>) {
    let (order, router) = (router.order.clone(), Arc::downgrade(router));
    let ask = move || {
        loop {
            let is_wanted = order.await_wanted();
            let Some(router) = router.upgrade() else { return };
            if is_wanted {
                router.namespace.order.cut(router.link.member(), ANSWER, || order.ask());
                order.tell_news();
                std::thread::sleep(ASKED_AGAIN);
            }
        }
    };
    if let Err(why) = std::thread::Builder::new().name("pool-order".to_owned()).spawn(ask) {
        tracing::error!(%why, "the drain waits for other members, and does not ask them");
    }
}

/// Another member asks how far this one is.
pub(super) fn published<F: Filesystem>(router: &Router<F>) -> Answer {
    let own = router.link.member();
    let until = router.namespace.order.is_published_until(own, ANSWER);
    // (Files that others write may hold it up. They are asked after this answer.)
    if router.namespace.order.has_others(own) {
        router.order.want();
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
