//! One machine: a clock, an agent with its member and its catalog, and programs that wait.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use surgetank_pool::{Directory, Epoch, Join, Member, MemberId, Term, Uptime};

use super::world::{Event, Operation};

/// What survives the agent: the catalog of one directory that it owns.
#[derive(Debug, Clone)]
pub struct Own {
    pub epoch: Epoch,
    pub version: u64,
}

pub struct Machine {
    offset: Uptime,
    /// How much faster than true time its clock runs, in millionths; slower if negative.
    drift_ppm: i64,
    pub member: Option<Member>,
    /// Grows at each start of the agent: connections end with it.
    pub incarnation: u32,
    /// Of an agent that has not joined yet.
    pub joining: Option<Join>,
    /// What its supervisor knows of the membership.
    pub last_term: Option<(MemberId, Term)>,
    /// How many memberships have ended.
    pub memberships: u32,
    pub catalog: BTreeMap<Directory, Own>,
    /// Changes that it carried out, and what each made of its directory: a resend gets the first answer. In the catalog.
    pub done: BTreeMap<u64, u64>,
    /// What the store said: a version, and until when it is believed.
    pub beliefs: BTreeMap<Directory, (u64, Uptime)>,
    /// Grows when what a read under way will bring must not be believed.
    pub generations: BTreeMap<Directory, u64>,
    pub operations: Vec<Operation>,
    pub is_paused: bool,
    /// The number of its next tick.
    pub ticks: u32,
    /// What came while it was paused.
    pub waiting: VecDeque<Event>,
    /// Its agent does not come back, or has left.
    pub is_gone: bool,
    pub leaves: bool,
    /// Directories that it is giving back.
    pub idle: BTreeSet<Directory>,
}

impl Machine {
    pub fn new(offset: Uptime, drift_ppm: i64) -> Self {
        Self {
            offset,
            drift_ppm,
            member: None,
            incarnation: 0,
            joining: None,
            last_term: None,
            memberships: 0,
            catalog: BTreeMap::new(),
            done: BTreeMap::new(),
            beliefs: BTreeMap::new(),
            generations: BTreeMap::new(),
            operations: Vec::new(),
            is_paused: false,
            ticks: 0,
            waiting: VecDeque::new(),
            is_gone: false,
            leaves: false,
            idle: BTreeSet::new(),
        }
    }

    /// Its clock at a true time.
    pub fn clock(&self, now: Uptime) -> Uptime {
        let nanos = i128::try_from(now.as_nanos()).unwrap();
        let drifted = nanos + nanos * i128::from(self.drift_ppm) / 1_000_000;
        self.offset + Uptime::from_nanos(u64::try_from(drifted).unwrap())
    }

    /// The true time at which its clock shows at least `clock`.
    pub fn true_time(&self, clock: Uptime) -> Uptime {
        let nanos = i128::try_from(clock.saturating_sub(self.offset).as_nanos()).unwrap();
        let steady = nanos * 1_000_000 / (1_000_000 + i128::from(self.drift_ppm)) + 2;
        Uptime::from_nanos(u64::try_from(steady).unwrap())
    }

    pub fn generation(&self, directory: &Directory) -> u64 {
        self.generations.get(directory).copied().unwrap_or(0)
    }

    /// Forgets what the store said, and what reads under way will bring.
    pub fn forget(&mut self, directory: &Directory) -> bool {
        *self.generations.entry(directory.clone()).or_default() += 1;
        self.beliefs.remove(directory).is_some()
    }
}
