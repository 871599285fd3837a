//! Fills a directory's [`NegativeCache`](surgetank_state::NegativeCache): lists the directory when look-ups in it often fail.
//!
//! The danger that this avoids: one request to the store for each of many missing names.

use surgetank_state::NAMES_LISTED_MAX;
use surgetank_types::model::{Caller, FileId};
use surgetank_types::sync::PoisonError;
use surgetank_types::sync::atomic::Ordering;

use crate::namespace::resolve::Resolver;

impl Resolver {
    /// A look-up failed in the store. If this happens often in the directory, the agent lists it.
    pub(crate) fn missed(&self, caller: &Caller, dir: FileId, name: &[u8]) {
        let ttl = self.config.store_ttl;
        let began = self.metadata.write_tree().dir_mut(dir).and_then(|dir| dir.negative_cache.missed(name, ttl));
        if let Some(began) = began {
            let names = self.names_listed(caller, dir);
            if let Some(dir) = self.metadata.write_tree().dir_mut(dir) {
                dir.negative_cache.listed(began, names.as_deref());
            }
        }
    }

    fn names_listed(&self, caller: &Caller, dir: FileId) -> Option<Vec<Box<[u8]>>> {
        let _moving = self.metadata.moving.read().unwrap_or_else(PoisonError::into_inner);
        let path = self.metadata.read_tree().applied_path(dir)?;
        self.counters.store_lists.fetch_add(1, Ordering::Relaxed);
        let ask =
            |who| self.queries.must_ask((who, &path), |store, who, path| store.names(who, path, NAMES_LISTED_MAX));
        self.access.let_caller_in(caller, dir, ask).ok()?
    }
}
