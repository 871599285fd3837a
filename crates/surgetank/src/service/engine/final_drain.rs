//! The final drain of a scope: here, and in a pool what programs of this node changed at other members.
//!
//! The danger that it avoids: a file that was closed a moment ago, and that a verdict calls open.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use surgetank_core::namespace::StoreCopy;
use surgetank_core::report::{Progress, Scope, Verdict};
use surgetank_policy::config::KeepAtExit;
use surgetank_store::Staged;
use surgetank_types::model::RunId;

use super::{Mark, Served};
use crate::agent::engine::Engine;
use crate::pool::others::reports::Report;
use crate::pool::others::{Drained, Drains, Wish};
use crate::pool::router::copies::come_home;

/// The others are asked for so long at once: then the client learns how far they are.
const AT_ONCE_MS: u64 = 200;

/// If a file stays open longer than this after its run ended, a process holds it.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);

impl Served {
    /// Files of programs that have just ended: the kernel reports their last close a moment later. An earlier verdict
    /// would call them open or waiting.
    pub(super) fn is_releasing(&self, scope: &Scope, begun: Option<Mark>) -> bool {
        begun.is_some_and(|begun| begun.at.elapsed() < RELEASE_TIMEOUT)
            && self
                .namespace
                .questions
                .unsealed(scope.run)
                .iter()
                .any(|path| path.as_ref().is_none_or(|path| scope.covers(path)))
    }

    /// A command ends, and nothing of it goes on. Content at lost members is given up then, so that the rest reaches the
    /// store. Returns whether something was.
    pub(super) fn gives_up_lost(&self, scope: &Scope) -> bool {
        let ends = self.begun.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&scope.run);
        let Some(pool) = self.pool.as_ref().filter(|_| ends) else { return false };
        let stay = come_home(pool);
        self.namespace.give_up_homes(&stay) > 0
    }

    pub(super) fn begin_drain_here(&self, scope: &Scope) {
        self.namespace.files.descriptors.catch_up();
        let mark = self.mark();
        self.begun.lock().unwrap_or_else(PoisonError::into_inner).insert(scope.run, mark);
        self.drain.hurry();
        self.namespace.questions.begin_final_drain(scope.run);
        // After that, so that a file sealed from now on is drained when it is sealed.
        if self.namespace.base.config.keep_at_exit == KeepAtExit::Drain {
            self.namespace.questions.drain_kept(scope.run);
        }
    }

    /// First what is here, then what is at other members.
    pub(super) fn settled_everywhere(&self, scope: &Scope, at_most: Duration) -> Progress {
        let progress = self.await_settled(scope, at_most);
        match &self.pool {
            Some(pool) if progress.settled => {
                let begins = self.others_begin.swap(false, Ordering::SeqCst);
                let at_most_ms = u64::try_from(at_most.as_millis()).unwrap_or(u64::MAX).min(AT_ONCE_MS);
                let wish = Wish { begins, at_most_ms, paths: scope.paths.clone() };
                let (progress, all_have_begun) = pool.others.with_progress(progress, &wish);
                if !all_have_begun {
                    self.others_begin.store(true, Ordering::SeqCst);
                }
                if !progress.settled {
                    std::thread::sleep(at_most.min(Duration::from_millis(50)));
                }
                progress
            }
            _ => progress,
        }
    }

    pub(super) fn left_pool(&self, close: &dyn Fn(bool) -> bool) -> Option<bool> {
        let everything = Scope::everything();
        let verdict = || self.verdict(&everything);
        Some(self.pool.as_ref()?.leave(|| self.progress(&everything).settled, || verdict().is_drained(), close))
    }

    pub(super) fn judged_everywhere(&self, scope: &Scope) -> Verdict {
        let mut verdict = self.verdict(scope);
        if let Some(pool) = &self.pool {
            let wish = Wish { begins: false, at_most_ms: 0, paths: scope.paths.clone() };
            pool.others.with_verdict(&mut verdict, &wish);
        }
        verdict
    }
}

impl Drains for Served {
    fn drained_for(&self, member: u32, wish: &Wish) -> Drained {
        let scope = Scope { run: Some(RunId::of_member(member)), paths: wish.paths.clone() };
        let has_begun = || self.begun.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&scope.run);
        if wish.begins {
            self.begin_drain_here(&scope);
        }
        let progress = self.await_settled(&scope, Duration::from_millis(wish.at_most_ms.min(AT_ONCE_MS)));
        Drained { progress, verdict: self.verdict(&scope), has_begun: has_begun() }
    }

    fn stage_for(&self, number: u64, copy: &StoreCopy<'_>) -> std::io::Result<Staged> {
        self.drain.stage_for_another(number, copy)
    }

    fn end_stage_for(&self, number: u64, attempt: u64) {
        self.drain.end_stage_for_another(number, attempt);
    }

    fn tend(&self, request: &[u8]) -> Vec<u8> {
        super::tending::for_another(self, request)
    }

    fn report(&self) -> Option<Report> {
        super::members::of_this(self)
    }
}
