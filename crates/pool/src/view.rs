//! What a member knows of the others. It may be behind the registry, never wrong about a claim that it acknowledged.

use std::collections::{BTreeMap, BTreeSet};

use crate::registry::{Change, Claim, Everything, MemberRecord, News};
use crate::{Directory, Epoch, MemberId, Revision};

/// Members and claims, as far as they are known.
#[derive(Debug)]
pub(crate) struct View {
    /// Everything up to here is known.
    revision: Revision,
    members: BTreeMap<MemberId, MemberRecord>,
    lost: BTreeMap<MemberId, MemberRecord>,
    /// Per directory the newest known fact: its claim, or that it has none. Facts from the owner itself may be newer than
    /// `revision`.
    claims: BTreeMap<Directory, (Revision, Option<Claim>)>,
}

/// What news changed.
#[derive(Debug, Default)]
pub(crate) struct Differences {
    /// Directories of which something else may be known now.
    pub changed: BTreeSet<Directory>,
    /// Members that left or were lost.
    pub gone: BTreeSet<MemberId>,
}

impl View {
    pub fn new(everything: Everything) -> Self {
        let mut view =
            Self { revision: Revision(0), members: BTreeMap::new(), lost: BTreeMap::new(), claims: BTreeMap::new() };
        view.take_everything(everything);
        view
    }

    pub fn revision(&self) -> Revision {
        self.revision
    }

    pub fn is_member(&self, id: MemberId) -> bool {
        self.members.contains_key(&id)
    }

    pub fn members(&self) -> impl Iterator<Item = &MemberRecord> {
        self.members.values()
    }

    /// Members whose lease ended before they left.
    pub fn lost(&self) -> impl Iterator<Item = &MemberRecord> {
        self.lost.values()
    }

    pub fn claims(&self) -> impl Iterator<Item = (&Directory, Claim)> {
        self.claims.iter().filter_map(|(directory, (_, claim))| Some((directory, (*claim)?)))
    }

    pub fn claim(&self, directory: &Directory) -> Option<Claim> {
        self.claims.get(directory).and_then(|(_, claim)| *claim)
    }

    /// Is the owner of the directory gone? (One that is not known yet may have joined later than the news.)
    pub fn is_lost(&self, directory: &Directory) -> bool {
        let fact = self.claims.get(directory).and_then(|(revision, claim)| Some((*revision, (*claim)?)));
        fact.is_some_and(|(revision, claim)| revision <= self.revision && !self.is_member(claim.owner))
    }

    /// Is a fact known that is newer than the claim of this epoch? (An epoch is the revision of its claim.)
    pub fn has_ended(&self, directory: &Directory, epoch: Epoch) -> bool {
        let (known, claim) = self.claims.get(directory).copied().unwrap_or((self.revision, None));
        known.0 >= epoch.0 && claim.is_none_or(|claim| claim.epoch != epoch)
    }

    /// The directories of an owner.
    pub fn owned_by(&self, owner: MemberId) -> impl Iterator<Item = (&Directory, Claim)> {
        self.claims().filter(move |(_, claim)| claim.owner == owner)
    }

    /// A fact of that revision. An older one than is known changes nothing.
    pub fn learn(&mut self, directory: &Directory, claim: Option<Claim>, revision: Revision) {
        let known = self.claims.get(directory).map_or(self.revision, |(known, _)| *known);
        if revision > known {
            self.claims.insert(directory.clone(), (revision, claim));
        }
    }

    /// Returns what differs now.
    pub fn take(&mut self, news: News) -> Differences {
        let before = self.revision;
        let Differences { mut changed, mut gone } = Differences::default();
        let members: Vec<MemberId> = self.members.keys().copied().collect();
        if let News::Changes(changes, _) = &news {
            for (revision, change) in changes.iter().filter(|(revision, _)| *revision > before) {
                match change {
                    Change::Claimed(directory, _) | Change::Released(directory) => {
                        let is_new = self.claims.get(directory).is_none_or(|(known, _)| revision > known);
                        changed.extend(is_new.then(|| directory.clone()));
                    }
                    Change::Left(id) | Change::Lost(id) => {
                        changed.extend(self.owned_by(*id).map(|(directory, _)| directory.clone()));
                        gone.insert(*id);
                    }
                    Change::Joined(_) => {}
                }
            }
        } else {
            changed.extend(self.claims.keys().cloned());
        }
        let is_gap = matches!(news, News::Gap(_));
        self.apply(news);
        // An owner that was not known yet, and turns out to be lost.
        let facts = self.claims.iter().filter(|(_, (known, _))| is_gap || *known > before && *known <= self.revision);
        changed.extend(facts.filter(|(directory, _)| is_gap || self.is_lost(directory)).map(|(d, _)| d.clone()));
        gone.extend(members.into_iter().filter(|id| !self.is_member(*id)));
        Differences { changed, gone }
    }

    fn apply(&mut self, news: News) {
        match news {
            News::Gap(everything) => self.take_everything(everything),
            News::Changes(changes, upto) => {
                for (revision, change) in changes {
                    match change {
                        _ if revision <= self.revision => continue,
                        Change::Joined(record) => drop(self.members.insert(record.id, record)),
                        Change::Left(id) => drop(self.members.remove(&id)),
                        Change::Lost(id) => self.lost.extend(self.members.remove(&id).map(|record| (id, record))),
                        Change::Claimed(directory, claim) => self.learn(&directory, Some(claim), revision),
                        Change::Released(directory) => self.learn(&directory, None, revision),
                    }
                    self.revision = revision;
                }
                self.revision = self.revision.max(upto);
                self.forget_old();
            }
        }
    }

    fn take_everything(&mut self, everything: Everything) {
        if everything.revision < self.revision {
            return;
        }
        self.revision = everything.revision;
        self.members = everything.members.into_iter().map(|record| (record.id, record)).collect();
        self.lost = everything.lost.into_iter().map(|record| (record.id, record)).collect();
        // Newer facts stay.
        self.claims.retain(|_, (known, _)| *known > everything.revision);
        for (directory, claim, at) in everything.claims {
            self.claims.entry(directory).or_insert((at, Some(claim)));
        }
    }

    /// That a directory has no claim is the rule.
    fn forget_old(&mut self) {
        let revision = self.revision;
        self.claims.retain(|_, (known, claim)| claim.is_some() || *known > revision);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Term;

    fn directory() -> Directory {
        Directory(Box::from(&b"results"[..]))
    }

    fn claim(owner: u32, epoch: u64) -> Claim {
        Claim { owner: MemberId(owner), epoch: Epoch(epoch) }
    }

    fn nothing() -> View {
        View::new(Everything { revision: Revision(0), members: Vec::new(), lost: Vec::new(), claims: Vec::new() })
    }

    #[test]
    fn news_behind_an_announcement_do_not_take_it_back() {
        let mut view = nothing();
        view.learn(&directory(), Some(claim(2, 3)), Revision(3));
        let old = vec![
            (Revision(1), Change::Claimed(directory(), claim(1, 1))),
            (Revision(2), Change::Released(directory())),
        ];
        view.take(News::Changes(old, Revision(2)));
        assert_eq!(view.claim(&directory()), Some(claim(2, 3)));
        view.take(News::Changes(vec![(Revision(4), Change::Released(directory()))], Revision(4)));
        assert_eq!(view.claim(&directory()), None);
    }

    #[test]
    fn late_announcement_of_a_released_directory_changes_nothing() {
        let mut view = nothing();
        let both = vec![
            (Revision(1), Change::Claimed(directory(), claim(1, 1))),
            (Revision(2), Change::Released(directory())),
        ];
        view.take(News::Changes(both, Revision(2)));
        view.learn(&directory(), Some(claim(1, 1)), Revision(1));
        assert_eq!(view.claim(&directory()), None);
    }

    #[test]
    fn member_that_left_is_gone_also_if_it_was_never_known() {
        let record = |id| MemberRecord {
            id: MemberId(id),
            term: Term(1),
            address: String::new(),
            temporaries: String::new(),
            role: Default::default(),
        };
        let mut view = nothing();
        let news = vec![
            (Revision(1), Change::Joined(record(1))),
            (Revision(2), Change::Joined(record(2))),
            (Revision(3), Change::Left(MemberId(2))),
        ];
        assert_eq!(view.take(News::Changes(news, Revision(3))).gone, BTreeSet::from([MemberId(2)]));
        let everything =
            Everything { revision: Revision(9), members: vec![record(3)], lost: vec![record(2)], claims: Vec::new() };
        assert_eq!(view.take(News::Gap(everything)).gone, BTreeSet::from([MemberId(1)]));
        assert_eq!(view.lost().map(|record| record.id).collect::<Vec<_>>(), [MemberId(2)]);
        view.take(News::Changes(vec![(Revision(10), Change::Lost(MemberId(3)))], Revision(10)));
        assert_eq!(view.lost().map(|record| record.id).collect::<Vec<_>>(), [MemberId(2), MemberId(3)]);
    }

    #[test]
    fn release_that_is_known_early_outlives_the_news_of_its_claim() {
        let mut view = nothing();
        view.learn(&directory(), None, Revision(2));
        view.take(News::Changes(vec![(Revision(1), Change::Claimed(directory(), claim(1, 1)))], Revision(1)));
        assert_eq!(view.claim(&directory()), None);
    }
}
