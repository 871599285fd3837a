//! What happens by chance: programs' operations, and faults.

use std::time::Duration;

use surgetank_pool::Directory;

use super::world::{Event, MACHINES_MAX, World};

impl World {
    pub fn step(&mut self) {
        let wait = Duration::from_micros(self.rng.u64(1_000..80_000));
        self.after(wait, Event::Step);
        let able: Vec<usize> = (0..self.machines.len())
            .filter(|number| !self.machines[*number].is_gone && !self.machines[*number].is_paused)
            .collect();
        if able.is_empty() || !self.works {
            return;
        }
        let machine = able[self.rng.usize(..able.len())];
        let directory = self.directories[self.rng.usize(..self.directories.len())].clone();
        if !self.machines[machine].leaves && self.machines[machine].operations.len() < 20 {
            let writes = !self.only_reads && self.rng.u32(0..3) == 0;
            // Programs read more than once.
            for _ in 0..self.rng.u32(1..4) {
                self.begin(machine, writes, directory.clone());
            }
        }
        if !self.only_reads && (self.machines[machine].leaves || self.rng.u32(0..6) == 0) {
            let all = std::mem::take(&mut self.machines[machine].catalog);
            let idle: Vec<Directory> =
                all.keys().filter(|_| self.rng.bool() || self.machines[machine].leaves).cloned().collect();
            self.machines[machine].catalog = all;
            self.machines[machine].idle.extend(idle);
            self.drive(machine);
        }
        if self.faults && self.rng.u32(0..40) == 0 {
            self.fault(machine);
        }
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
                if let Some(member) = self.machines[machine].member.take() {
                    self.machines[machine].incarnation += 1;
                    self.counts.replaced += 1;
                    let replaced = Duration::from_millis(self.rng.u64(20..4_000));
                    self.after(replaced, Event::Started { machine, resumes: Some(member.id()) });
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
                if staying > 1 && self.machines[machine].operations.is_empty() {
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
