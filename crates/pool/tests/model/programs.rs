//! Programs: their operations, and the comparison of each answer with the reference.

use std::time::Duration;

use surgetank_pool::{Authority, Directory, Epoch};

use super::world::{BELIEF, Event, Frame, Operation, TIMES, World};

impl World {
    pub fn begin(&mut self, machine: usize, writes: bool, directory: Directory) {
        let id = self.next_operation;
        self.next_operation += 1;
        let at_least = self.answered.get(&directory).copied().unwrap_or(0);
        let operation = Operation { id, writes, directory, at_least, reading: false, waits: None, refused: None };
        self.machines[machine].operations.push(operation);
        self.advance(machine, id);
        self.drive(machine);
    }

    /// As far as it comes: then it waits for an answer, or until the directory's authority changes.
    pub fn advance(&mut self, machine: usize, id: u64) {
        let now = self.clock(machine);
        let here = &mut self.machines[machine];
        let Some(position) = here.operations.iter().position(|operation| operation.id == id) else { return };
        let Operation { writes, directory, reading, waits, refused, .. } = here.operations[position].clone();
        // (The kernel asks no agent.)
        let believed =
            here.beliefs.get(&directory).filter(|(_, until)| !writes && *until > now).map(|(version, _)| *version);
        if let Some(version) = believed {
            self.counts.beliefs += 1;
            self.finish(machine, id, version);
            return;
        }
        let Some(member) = here.member.as_mut().filter(|_| waits.is_none()) else { return };
        match member.authority(now, &directory) {
            None => {}
            Some(Authority::Ours(epoch)) => {
                let version = self.decide(machine, id, writes, &directory, epoch);
                self.finish(machine, id, version);
            }
            Some(Authority::Store | Authority::Between) if writes => member.claim(now, &directory),
            Some(Authority::Store | Authority::Between) if reading => {}
            Some(Authority::Store | Authority::Between) => {
                here.operations[position].reading = true;
                let generation = here.generation(&directory);
                let wait = Duration::from_micros(self.rng.u64(0..3_000));
                self.after(wait, Event::StoreSampled { machine, id, generation });
            }
            // (That it has ended is news, which come.)
            Some(Authority::Peer(claim)) if refused == Some(claim.epoch) => {}
            Some(Authority::Peer(claim)) => {
                here.operations[position].waits = Some((claim, now + TIMES.again));
                self.send_member(machine, claim.owner, Frame::Do { id, writes, directory, epoch: claim.epoch });
            }
            Some(Authority::Lost(_)) => member.claim(now, &directory),
        }
    }

    /// A peer that has not answered is asked again, unless it is gone.
    pub fn ask_peers_again(&mut self, machine: usize) {
        let now = self.clock(machine);
        let here = &mut self.machines[machine];
        let Some(member) = here.member.as_mut() else { return };
        let (mut frames, mut gone, mut failed) = (Vec::new(), Vec::new(), Vec::new());
        for operation in &mut here.operations {
            let Some((claim, again)) = operation.waits.filter(|(_, again)| *again <= now) else { continue };
            operation.waits = Some((claim, again.max(now) + TIMES.again));
            if member.lost().any(|record| record.id == claim.owner) {
                operation.waits = None;
                gone.push(operation.id);
                continue;
            }
            // (It has left, and may have done it.)
            let is_gone = !member.members().any(|id| id == claim.owner);
            if is_gone && member.authority(now, &operation.directory).is_some_and(|it| it != Authority::Peer(claim)) {
                failed.push(operation.id);
                continue;
            }
            member.look_again(now);
            let Operation { id, writes, directory, .. } = operation.clone();
            frames.push((claim.owner, Frame::Do { id, writes, directory, epoch: claim.epoch }));
        }
        here.operations.retain(|operation| !failed.contains(&operation.id));
        frames.into_iter().for_each(|(owner, frame)| self.send_member(machine, owner, frame));
        gone.into_iter().for_each(|id| self.advance(machine, id));
    }

    /// The owner has not done it, and will not in that epoch.
    pub fn refused(&mut self, machine: usize, id: u64, epoch: Epoch) {
        let now = self.clock(machine);
        let here = &mut self.machines[machine];
        let Some(operation) = here.operations.iter_mut().find(|operation| operation.id == id) else { return };
        if operation.waits.is_some_and(|(claim, _)| claim.epoch == epoch) {
            (operation.waits, operation.refused) = (None, Some(epoch));
            if let Some(member) = here.member.as_mut() {
                member.look_again(now);
            }
            self.advance(machine, id);
        }
    }

    pub fn store_read(&mut self, machine: usize, id: u64, generation: u64, version: u64) {
        let now = self.clock(machine);
        let here = &mut self.machines[machine];
        let Some(operation) = here.operations.iter_mut().find(|operation| operation.id == id) else { return };
        operation.reading = false;
        let directory = operation.directory.clone();
        let Some(member) = here.member.as_ref() else { return };
        let is_stores = matches!(member.authority(now, &directory), Some(Authority::Store | Authority::Between));
        if is_stores && generation == here.generation(&directory) {
            here.beliefs.insert(directory, (version, now + BELIEF));
            self.counts.store_reads += 1;
            self.finish(machine, id, version);
        } else {
            self.advance(machine, id);
        }
    }

    /// The program gets its answer, which is compared with the reference.
    pub fn finish(&mut self, machine: usize, id: u64, version: u64) -> bool {
        let operations = &mut self.machines[machine].operations;
        let Some(position) = operations.iter().position(|operation| operation.id == id) else { return false };
        let Operation { writes, directory, at_least, .. } = operations.remove(position);
        self.counts.operations += 1;
        let begun = self.begun.get(&directory).copied().unwrap_or(0);
        let (seed, now) = (self.seed, self.now);
        assert!(
            version >= at_least + u64::from(writes) && version <= begun,
            "seed {seed}, {now:?}: machine {machine} got {version} in {directory:?}; answered before: {at_least}, begun: {begun}"
        );
        if writes {
            let applied = self.applied.get(&id).map(|(version, ..)| *version);
            assert_eq!(applied, Some(version), "seed {seed}: operation {id}");
            let answered = self.answered.entry(directory).or_default();
            *answered = (*answered).max(version);
        }
        true
    }
}
