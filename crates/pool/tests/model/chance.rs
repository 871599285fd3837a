//! What happens by chance: programs' operations, and faults.

use std::time::Duration;

use surgetank_pool::{Authority, Directory};

use super::world::{Event, MACHINES_MAX, World};

impl World {
    pub fn step(&mut self) {
        let wait = Duration::from_micros(self.rng.u64(1_000..80_000));
        self.after(wait, Event::Step);
        let able: Vec<usize> = (0..self.machines.len())
            .filter(|number| !self.machines[*number].is_gone && !self.machines[*number].is_paused)
            .collect();
        for machine in able.clone() {
            if self.machines[machine].leaves {
                self.give_up_all(machine);
            }
        }
        if able.is_empty() || !self.works {
            return;
        }
        let machine = able[self.rng.usize(..able.len())];
        let directory = self.directories[self.rng.usize(..self.directories.len())].clone();
        if self.machines[machine].operations.len() < 20 {
            let only_reads = self.only_reads || self.machines[machine].leaves;
            let writes = !only_reads && self.rng.u32(0..3) == 0;
            // Programs read more than once.
            for _ in 0..self.rng.u32(1..4) {
                self.begin(machine, writes, directory.clone());
            }
        }
        if !self.only_reads && self.rng.u32(0..6) == 0 {
            let all: Vec<Directory> = self.machines[machine].catalog.keys().cloned().collect();
            let idle: Vec<Directory> = all.into_iter().filter(|_| self.rng.bool()).collect();
            self.machines[machine].idle.extend(idle);
            self.drive(machine);
        }
        if self.faults && self.rng.u32(0..40) == 0 {
            self.fault(machine);
        }
    }

    /// Also claims that others do not acknowledge.
    fn give_up_all(&mut self, machine: usize) {
        let now = self.clock(machine);
        for directory in self.directories.clone() {
            let here = &mut self.machines[machine];
            match here.member.as_mut() {
                Some(member) if member.authority(now, &directory) == Some(Authority::Between) => {
                    member.give_up(now, &directory);
                }
                _ => drop(here.idle.insert(directory)),
            }
        }
        self.drive(machine);
    }

    fn fault(&mut self, machine: usize) {
        let short = self.rng.u32(0..3) > 0;
        let time = Duration::from_millis(self.rng.u64(if short { 10..3_000 } else { 3_000..25_000 }));
        match self.rng.u32(0..12) {
            0..=1 => drop(self.cuts.insert((None, machine), self.now + time)),
            2..=4 => {
                let other = self.rng.usize(..self.machines.len());
                if other != machine {
                    self.cuts.insert((Some(machine.min(other)), machine.max(other)), self.now + time);
                }
            }
            5..=6 => {
                self.machines[machine].is_paused = true;
                self.after(time, Event::Resumed { machine });
            }
            7..=8 => {
                // (Also one that has not joined yet.)
                let here = &mut self.machines[machine];
                if here.member.take().is_some() || here.joining.take().is_some() {
                    here.incarnation += 1;
                    if let Some((_, term)) = &mut here.last_term {
                        term.0 += 1;
                    }
                    let resumes = here.last_term;
                    self.counts.replaced += 1;
                    let replaced = Duration::from_millis(self.rng.u64(20..4_000));
                    self.after(replaced, Event::Started { machine, resumes });
                }
            }
            9 => {
                if self.registry_is_up {
                    self.registry_is_up = false;
                    self.counts.registry_restarts += 1;
                    self.after(time.min(Duration::from_secs(5)), Event::RegistryBack);
                }
            }
            10 => {
                if self.machines.len() < MACHINES_MAX {
                    self.add_machine();
                }
            }
            _ => {
                let staying = self.machines.iter().filter(|machine| !machine.is_gone && !machine.leaves).count();
                if staying > 1 && !self.machines[machine].leaves {
                    self.machines[machine].leaves = true;
                    let now = self.clock(machine);
                    if let Some(member) = self.machines[machine].member.as_mut() {
                        member.leave(now);
                    }
                }
            }
        }
    }
}
