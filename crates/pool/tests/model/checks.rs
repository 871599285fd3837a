//! What must hold at every moment, and in the end.

use surgetank_pool::{Authority, MemberId};

use super::machine::Machine;
use super::rows::Registry;
use super::world::World;

impl World {
    /// The registry does not count it any more. So its lease has ended by its own clock, too, or it left.
    pub fn lease_must_have_ended(&self, machine: usize, id: Option<MemberId>) {
        let clock = self.clock(machine);
        let serves = self.machines[machine].member.as_ref().is_some_and(|member| member.serves(clock));
        // (A server that has lost its last writes may know it again.)
        let is_known = matches!(self.registry, Registry::Embedded(_))
            && self.everything().members.iter().any(|record| Some(record.id) == id);
        assert!(!serves && !is_known, "seed {}, {:?}: machine {machine} was expelled", self.seed, self.now);
    }

    /// In the end each claim has an owner that knows of it, unless that is lost.
    pub fn look_at_claims(&self) {
        let everything = self.everything();
        for (directory, claim, _) in everything.claims {
            if everything.members.iter().any(|record| record.id == claim.owner) {
                let machine = self.numbers[&claim.owner];
                let member = self.machines[machine].member.as_ref();
                let authority = member.and_then(|member| member.authority(self.clock(machine), &directory));
                assert_eq!(authority, Some(Authority::Ours(claim.epoch)), "seed {}: {directory:?}", self.seed);
            }
        }
    }

    pub fn look_at_owners(&self) {
        for directory in &self.directories {
            let owns = |machine: &&Machine| {
                let clock = machine.clock(self.now);
                let authority = machine.member.as_ref().and_then(|member| member.authority(clock, directory));
                !machine.is_gone && matches!(authority, Some(Authority::Ours(_)))
            };
            let owners = self.machines.iter().filter(owns).count();
            assert!(owners <= 1, "seed {}, {:?}: {owners} owners of {directory:?}", self.seed, self.now);
        }
    }
}
