//! What owners do with their directories, also with those of lost members.

use surgetank_pool::{Directory, Epoch, Member, MemberId};

use super::machine::Own;
use super::world::World;

impl World {
    /// What the owner does.
    pub fn decide(&mut self, machine: usize, id: u64, writes: bool, directory: &Directory, epoch: Epoch) -> u64 {
        let owner = &mut self.machines[machine];
        if let Some(version) = owner.done.get(&id) {
            return *version;
        }
        if writes {
            owner.forget(directory);
        }
        self.owns(machine, directory, epoch);
        let owner = &mut self.machines[machine];
        let own = owner.catalog.get_mut(directory).unwrap();
        own.version += u64::from(writes);
        let version = own.version;
        if writes {
            owner.done.insert(id, version);
            let now = (version, owner.member.as_ref().map(Member::id));
            let before = self.applied.insert(id, now);
            // (A member that is gone cannot say that it has done it.)
            let twice = before.and_then(|(_, by)| by).is_some_and(|by| !self.is_or_was_lost(by));
            assert!(!twice, "seed {}: operation {id} is carried out twice: {before:?}, {now:?}", self.seed);
            self.begun.insert(directory.clone(), version);
        }
        version
    }

    /// The owner begins with what the store has.
    pub fn owns(&mut self, machine: usize, directory: &Directory, epoch: Epoch) {
        let stored = self.store.get(directory).copied().unwrap_or(0);
        let owner = &mut self.machines[machine];
        if owner.catalog.get(directory).is_none_or(|own| own.epoch != epoch) {
            owner.catalog.insert(directory.clone(), Own { epoch, version: stored });
            let is_lost = self.lost.remove(directory);
            if self.answered.get(directory).is_some_and(|answered| *answered > stored) {
                assert!(is_lost, "seed {}: {directory:?} is at {stored} without a loss", self.seed);
                self.taken_over(directory, stored);
            }
        }
    }

    /// The owner was lost before it published everything: the next one begins with what the store has.
    pub fn taken_over(&mut self, directory: &Directory, stored: u64) {
        self.counts.taken_over += 1;
        self.answered.insert(directory.clone(), stored);
        self.begun.insert(directory.clone(), stored);
        for operation in self.machines.iter_mut().flat_map(|machine| &mut machine.operations) {
            if operation.directory == *directory {
                operation.at_least = operation.at_least.min(stored);
            }
        }
    }

    /// Programs here wait no longer for the member.
    pub fn gone(&mut self, machine: usize, id: MemberId) {
        let here = &mut self.machines[machine];
        if !here.member.as_ref().is_some_and(|member| member.lost().any(|record| record.id == id)) {
            return;
        }
        let waiting = here.operations.iter_mut().filter(|one| one.waits.is_some_and(|(claim, _)| claim.owner == id));
        let waiting: Vec<u64> = waiting
            .map(|one| {
                one.waits = None;
                one.id
            })
            .collect();
        waiting.into_iter().for_each(|id| self.advance(machine, id));
    }
}
