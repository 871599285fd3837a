//! Programs: their operations, and the comparison of each answer with the reference.

use std::time::Duration;

use surgetank_pool::{Authority, Directory, Uptime};

use super::world::{BELIEF, Event, Frame, Operation, TIMES, World};

impl World {
    pub fn begin(&mut self, machine: usize, writes: bool, directory: Directory) {
        let id = self.next_operation;
        self.next_operation += 1;
        let at_least = self.answered.get(&directory).copied().unwrap_or(0);
        let operation = Operation { id, writes, directory, at_least, reading: false, again: Uptime::ZERO };
        self.machines[machine].operations.push(operation);
        self.drive(machine);
    }

    pub fn advance(&mut self, machine: usize, id: u64) {
        let now = self.clock(machine);
        let here = &mut self.machines[machine];
        let Some(position) = here.operations.iter().position(|operation| operation.id == id) else { return };
        let Some(member) = here.member.as_mut() else { return };
        let Operation { writes, directory, reading, again, .. } = here.operations[position].clone();
        match member.authority(now, &directory) {
            None => {}
            Some(Authority::Ours(epoch)) => {
                if let Some(version) = self.decide(machine, id, writes, &directory, epoch) {
                    self.finish(machine, id, version);
                }
            }
            Some(Authority::Store | Authority::Between) if writes => member.claim(now, &directory),
            Some(Authority::Store | Authority::Between) => {
                let belief =
                    here.beliefs.get(&directory).filter(|(_, until)| *until > now).map(|(version, _)| *version);
                if let Some(version) = belief {
                    self.counts.beliefs += 1;
                    self.finish(machine, id, version);
                } else if !reading {
                    here.operations[position].reading = true;
                    let generation = here.generation(&directory);
                    let wait = Duration::from_micros(self.rng.u64(0..3_000));
                    self.after(wait, Event::StoreSampled { machine, id, generation });
                }
            }
            Some(Authority::Peer(claim)) if now >= again => {
                here.operations[position].again = now + TIMES.again;
                self.send_member(machine, claim.owner, Frame::Do { id, writes, directory, epoch: claim.epoch });
            }
            Some(Authority::Peer(_)) => {}
            Some(Authority::Lost(_)) => {
                here.operations.remove(position);
                self.counts.failed += 1;
            }
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
            let answered = self.answered.entry(directory).or_default();
            *answered = (*answered).max(version);
        }
        true
    }
}
