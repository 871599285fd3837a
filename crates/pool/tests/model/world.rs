//! The machines, the network, the registry and the store, and who does what when.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

use fastrand::Rng;
use surgetank_pool::{
    Answer, Authority, Claim, Directory, Embedded, Epoch, Join, Member, MemberId, Message, Output, Request, Times,
    Uptime,
};

use super::counts::Counts;
use super::machine::{Machine, Own};

const LEASE: Duration = Duration::from_secs(10);
pub const TIMES: Times =
    Times { margin: Duration::from_millis(500), renew: Duration::from_secs(3), again: Duration::from_millis(500) };
/// How long an answer of the store is believed.
pub const BELIEF: Duration = Duration::from_secs(1);
pub const MACHINES_MAX: usize = 7;

/// A program's call, which waits for its answer.
#[derive(Debug, Clone)]
pub struct Operation {
    pub id: u64,
    pub writes: bool,
    pub directory: Directory,
    /// What was answered before it began.
    pub at_least: u64,
    /// A read of the store is under way.
    pub reading: bool,
    /// When it is sent to a peer again.
    pub again: Uptime,
}

/// What a message between two agents says.
#[derive(Debug, Clone)]
pub enum Frame {
    Claims(Message),
    Do { id: u64, writes: bool, directory: Directory, epoch: Epoch },
    Done { id: u64, version: u64 },
    NotOwner,
}

#[derive(Debug, Clone)]
pub enum Event {
    /// A request arrives at the registry.
    Asked {
        machine: usize,
        incarnation: u32,
        sent: Uptime,
        request: Request,
    },
    /// An answer arrives at a machine. `sent`: when its agent sent the request, by its clock.
    Answered {
        machine: usize,
        incarnation: u32,
        sent: Uptime,
        number: u64,
        answer: Answer,
    },
    Arrived {
        from: MemberId,
        to: usize,
        incarnation: u32,
        frame: Frame,
    },
    Tick {
        machine: usize,
        number: u32,
    },
    StoreSampled {
        machine: usize,
        id: u64,
        generation: u64,
    },
    StoreRead {
        machine: usize,
        id: u64,
        generation: u64,
        version: u64,
    },
    Forgotten {
        machine: usize,
        incarnation: u32,
        directory: Directory,
        claim: Claim,
    },
    Resumed {
        machine: usize,
    },
    Started {
        machine: usize,
        resumes: Option<MemberId>,
    },
    RegistryBack,
    Step,
}

impl Event {
    fn machine(&self) -> Option<usize> {
        match self {
            Self::Answered { machine, .. }
            | Self::Tick { machine, .. }
            | Self::StoreSampled { machine, .. }
            | Self::StoreRead { machine, .. }
            | Self::Forgotten { machine, .. }
            | Self::Arrived { to: machine, .. } => Some(*machine),
            _ => None,
        }
    }
}

/// The order of events: by time, then as they were made.
type Timed = Reverse<(Uptime, u64)>;

pub struct World {
    pub seed: u64,
    pub rng: Rng,
    pub now: Uptime,
    events: BTreeMap<u64, Event>,
    order: BinaryHeap<Timed>,
    next_event: u64,
    registry: Embedded,
    pub registry_is_up: bool,
    pub machines: Vec<Machine>,
    numbers: BTreeMap<MemberId, usize>,
    pub directories: Vec<Directory>,
    store: BTreeMap<Directory, u64>,
    pub answered: BTreeMap<Directory, u64>,
    pub begun: BTreeMap<Directory, u64>,
    /// Directories whose owner was lost: what it had not published is gone.
    lost: BTreeSet<Directory>,
    /// Cut connections: two machines (`None`: the registry), until when.
    pub cuts: BTreeMap<(Option<usize>, usize), Uptime>,
    pub next_operation: u64,
    /// Programs make operations and faults happen.
    pub works: bool,
    pub faults: bool,
    pub only_reads: bool,
    /// The registry's answers to the second machine take so much longer.
    answers_take: Duration,
    pub counts: Counts,
}

impl World {
    pub fn new(seed: u64) -> Self {
        let mut world = Self::calm(seed, 0);
        let machines = world.rng.usize(2..5);
        (0..machines).for_each(|_| world.add_machine());
        (world.works, world.faults) = (true, true);
        world
    }

    /// No faults, and no operations by themselves.
    pub fn calm(seed: u64, machines: usize) -> Self {
        let directories = (0..12_u32).map(|n| Directory(format!("d{n}").into_bytes().into())).collect();
        let mut world = Self {
            seed,
            rng: Rng::with_seed(seed),
            now: Uptime::ZERO,
            events: BTreeMap::new(),
            order: BinaryHeap::new(),
            next_event: 0,
            registry: Embedded::new(LEASE),
            registry_is_up: true,
            machines: Vec::new(),
            numbers: BTreeMap::new(),
            directories,
            store: BTreeMap::new(),
            answered: BTreeMap::new(),
            begun: BTreeMap::new(),
            lost: BTreeSet::new(),
            cuts: BTreeMap::new(),
            next_operation: 0,
            works: false,
            faults: false,
            only_reads: false,
            answers_take: Duration::ZERO,
            counts: Counts::default(),
        };
        (0..machines).for_each(|_| world.add_machine());
        world.after(Duration::ZERO, Event::Step);
        world
    }

    /// Operations and faults for a time. Then the network heals, and what waits is answered.
    pub fn run(mut self, time: Duration) -> Counts {
        self.until(time);
        (self.works, self.faults) = (false, false);
        self.cuts.clear();
        self.until(time + 5 * LEASE);
        for (number, machine) in self.machines.iter().enumerate() {
            let operations = &machine.operations;
            assert!(operations.is_empty(), "seed {}: machine {number} waits for ever: {operations:?}", self.seed);
        }
        self.counts
    }

    /// Programs on all members read.
    pub fn only_reads(&mut self, time: Duration) -> Counts {
        (self.works, self.only_reads) = (true, true);
        self.until(time);
        self.counts.clone()
    }

    /// One machine changes one directory: the counts of the first change, and of all others.
    pub fn changes_by_one(&mut self, time: Duration) -> (Counts, Counts) {
        let second = Duration::from_secs(1);
        self.until(second);
        let directory = self.directories[0].clone();
        self.begin(0, true, directory.clone());
        self.until(2 * second);
        let first = std::mem::take(&mut self.counts);
        let mut at = 2 * second;
        while at < time {
            at += second / 20;
            self.begin(0, true, directory.clone());
            self.until(at);
        }
        (first, self.counts.clone())
    }

    /// A member that sees only the store reads on, while another one changes what it reads. Returns when the change was
    /// answered, and when the member that was cut off read for the last time.
    pub fn cut_off_one(&mut self) -> (Uptime, Uptime) {
        self.answers_take = Duration::from_secs(2);
        self.until(LEASE);
        let directory = self.directories[0].clone();
        let end = self.now + 2 * LEASE;
        self.cuts.extend([((None, 1), end), ((Some(0), 1), end)]);
        self.begin(0, true, directory.clone());
        let (mut answered, mut read) = (Uptime::ZERO, Uptime::ZERO);
        while self.now < end {
            if self.machines[1].operations.is_empty() {
                self.begin(1, false, directory.clone());
            }
            let before = (self.counts.operations, self.answered.contains_key(&directory));
            self.until(self.now + Duration::from_millis(5));
            if self.answered.contains_key(&directory) && !before.1 {
                answered = self.now;
            } else if self.counts.operations > before.0 {
                read = self.now;
            }
        }
        (answered, read)
    }

    pub fn add_machine(&mut self) {
        let offset = Duration::from_millis(self.rng.u64(0..1_000_000));
        let drift = self.rng.i64(-200..=200);
        self.machines.push(Machine::new(offset, drift));
        let machine = self.machines.len() - 1;
        self.after(Duration::ZERO, Event::Started { machine, resumes: None });
    }

    // Time and messages.

    pub fn after(&mut self, wait: Duration, event: Event) {
        let number = self.next_event;
        self.next_event += 1;
        self.order.push(Reverse((self.now + wait, number)));
        self.events.insert(number, event);
    }

    fn until(&mut self, end: Uptime) {
        while let Some(Reverse((at, number))) = self.order.peek().copied()
            && at <= end
        {
            self.order.pop();
            self.now = self.now.max(at);
            let event = self.events.remove(&number).unwrap();
            self.happen(event);
            self.look_at_owners();
        }
        self.now = end;
    }

    pub fn clock(&self, machine: usize) -> Uptime {
        self.machines[machine].clock(self.now)
    }

    fn is_cut(&self, one: Option<usize>, other: usize) -> bool {
        self.cuts.get(&(one, other)).is_some_and(|until| *until > self.now)
    }

    /// How long a message is under way; `None`: it is lost.
    fn delay(&mut self, one: Option<usize>, other: usize) -> Option<Duration> {
        if self.is_cut(one, other) || self.faults && self.rng.u32(0..200) == 0 {
            return None;
        }
        let slow = self.faults && self.rng.u32(0..50) == 0;
        Some(Duration::from_micros(if slow { self.rng.u64(0..3_000_000) } else { self.rng.u64(50..2_000) }))
    }

    fn send_registry(&mut self, machine: usize, request: Request) {
        self.counts.requests += 1;
        let (incarnation, sent) = (self.machines[machine].incarnation, self.clock(machine));
        if let Some(delay) = self.delay(None, machine) {
            self.after(delay, Event::Asked { machine, incarnation, sent, request });
        }
    }

    pub fn send_member(&mut self, machine: usize, to: MemberId, frame: Frame) {
        let Some(from) = self.machines[machine].member.as_ref().map(Member::id) else { return };
        let Some(&to) = self.numbers.get(&to) else { return };
        self.counts.messages += 1;
        let pair = (machine.min(to), machine.max(to));
        if let Some(delay) = self.delay(Some(pair.0), pair.1) {
            let incarnation = self.machines[to].incarnation;
            self.after(delay, Event::Arrived { from, to, incarnation, frame });
        }
    }

    fn happen(&mut self, event: Event) {
        if let Some(machine) = event.machine() {
            if self.machines[machine].is_gone {
                return;
            }
            if self.machines[machine].is_paused {
                self.machines[machine].waiting.push_back(event);
                return;
            }
        }
        let touched = event.machine();
        match event {
            Event::Asked { machine, incarnation, sent, request } => {
                self.ask_registry(machine, incarnation, sent, request)
            }
            Event::Answered { machine, incarnation, sent, number, answer } => {
                if incarnation == self.machines[machine].incarnation {
                    self.answer(machine, sent, number, answer);
                }
            }
            Event::Arrived { from, to, incarnation, frame } => {
                if incarnation == self.machines[to].incarnation {
                    self.receive(from, to, frame);
                }
            }
            // (One that a later one replaces does nothing.)
            Event::Tick { machine, number } => {
                if number == self.machines[machine].ticks {
                    self.tick(machine);
                }
            }
            Event::StoreSampled { machine, id, generation } => {
                let directory =
                    self.machines[machine].operations.iter().find(|o| o.id == id).map(|o| o.directory.clone());
                if let Some(directory) = directory {
                    let version = self.store.get(&directory).copied().unwrap_or(0);
                    let wait = Duration::from_micros(self.rng.u64(0..3_000));
                    self.after(wait, Event::StoreRead { machine, id, generation, version });
                }
            }
            Event::StoreRead { machine, id, generation, version } => self.store_read(machine, id, generation, version),
            Event::Forgotten { machine, incarnation, directory, claim } => {
                let machine = &mut self.machines[machine];
                if let Some(member) = machine.member.as_mut().filter(|_| machine.incarnation == incarnation) {
                    member.forgotten(directory, claim);
                }
            }
            Event::Resumed { machine } => {
                self.machines[machine].is_paused = false;
                let waiting = std::mem::take(&mut self.machines[machine].waiting);
                waiting.into_iter().for_each(|event| self.happen(event));
            }
            Event::Started { machine, resumes } => self.start(machine, resumes),
            Event::RegistryBack => {
                self.registry = Embedded::restored(self.now, self.registry.kept().clone());
                self.registry_is_up = true;
            }
            Event::Step => self.step(),
        }
        if let Some(machine) = touched {
            self.drive(machine);
        }
    }

    fn ask_registry(&mut self, machine: usize, incarnation: u32, sent: Uptime, request: Request) {
        if !self.registry_is_up {
            return;
        }
        let number = match &request {
            Request::Join(_) => 0,
            Request::Of { number, .. } => *number,
        };
        let answer = self.registry.ask(self.now, request);
        if let Some(delay) = self.delay(None, machine) {
            let delay = if machine == 1 { delay + self.answers_take } else { delay };
            self.after(delay, Event::Answered { machine, incarnation, sent, number, answer });
        }
    }

    // Agents.

    fn start(&mut self, machine: usize, resumes: Option<MemberId>) {
        if self.machines[machine].is_gone {
            return;
        }
        let instance = std::array::from_fn(|_| self.rng.u8(..));
        let since = self.clock(machine);
        let machine_now = &mut self.machines[machine];
        machine_now.incarnation += 1;
        machine_now.member = None;
        machine_now.joining = Some((instance, resumes, since));
        machine_now.beliefs.clear();
        for operation in &mut machine_now.operations {
            (operation.reading, operation.again) = (false, Uptime::ZERO);
        }
        self.tick(machine);
    }

    fn tick(&mut self, machine: usize) {
        let now = self.clock(machine);
        if let Some((instance, resumes, _)) = self.machines[machine].joining {
            let address = format!("machine-{machine}");
            self.send_registry(machine, Request::Join(Join { instance, resumes, address }));
            self.tick_after(machine, TIMES.again);
        } else if let Some(member) = self.machines[machine].member.as_mut() {
            member.tick(now);
            let wake = member.wake();
            let wake = self.machines[machine].true_time(wake);
            // (Operations are tried again, too.)
            let wait = wake.saturating_sub(self.now).clamp(Duration::from_millis(1), TIMES.again);
            self.tick_after(machine, wait);
        }
    }

    fn tick_after(&mut self, machine: usize, wait: Duration) {
        self.machines[machine].ticks += 1;
        let number = self.machines[machine].ticks;
        self.after(wait, Event::Tick { machine, number });
    }

    fn answer(&mut self, machine: usize, sent: Uptime, number: u64, answer: Answer) {
        let now = self.clock(machine);
        if let Some((_, resumes, _)) = self.machines[machine].joining {
            let own: Vec<_> =
                self.machines[machine].catalog.iter().map(|(directory, own)| (directory.clone(), own.epoch)).collect();
            match Member::new(sent, answer, TIMES, &own) {
                Ok(member) => {
                    self.numbers.insert(member.id(), machine);
                    self.machines[machine].joining = None;
                    self.machines[machine].member = Some(member);
                    self.tick(machine);
                }
                // Its lease ended before it was replaced.
                Err(Answer::Refused(_)) if resumes.is_some() => self.expelled(machine),
                Err(_) => {}
            }
        } else if let Some(member) = self.machines[machine].member.as_mut() {
            if matches!(answer, Answer::Granted { .. }) {
                self.counts.claims += 1;
            }
            member.answered(now, number, answer);
        }
    }

    fn receive(&mut self, from: MemberId, to: usize, frame: Frame) {
        let now = self.clock(to);
        let Some(member) = self.machines[to].member.as_mut() else { return };
        match frame {
            Frame::Claims(message) => member.told(from, message),
            Frame::Do { id, writes, directory, epoch } => {
                let ours = member.authority(now, &directory) == Some(Authority::Ours(epoch));
                let version = if ours { self.decide(to, id, writes, &directory, epoch) } else { None };
                let frame = version.map_or(Frame::NotOwner, |version| Frame::Done { id, version });
                self.send_member(to, from, frame);
            }
            Frame::Done { id, version } => {
                if self.finish(to, id, version) {
                    self.counts.at_peers += 1;
                }
            }
            Frame::NotOwner => member.look_again(now),
        }
    }

    /// What the owner does. `None`: it is giving the directory back.
    pub fn decide(
        &mut self,
        machine: usize,
        id: u64,
        writes: bool,
        directory: &Directory,
        epoch: Epoch,
    ) -> Option<u64> {
        let stored = self.store.get(directory).copied().unwrap_or(0);
        let owner = &mut self.machines[machine];
        if owner.catalog.get(directory).is_none_or(|own| own.epoch != epoch) {
            owner.catalog.insert(directory.clone(), Own { epoch, version: stored, done: BTreeMap::new() });
        }
        owner.forget(directory);
        let own = owner.catalog.get_mut(directory)?;
        if !writes {
            return Some(own.version);
        }
        if let Some(version) = own.done.get(&id) {
            return Some(*version);
        }
        own.version += 1;
        own.done.insert(id, own.version);
        let version = own.version;
        self.begun.insert(directory.clone(), version);
        Some(version)
    }

    /// Gives back some owned directories: publishes, then releases.
    fn publish(&mut self, machine: usize) {
        let now = self.clock(machine);
        let owner = &mut self.machines[machine];
        let Some(member) = owner.member.as_mut() else { return };
        for directory in std::mem::take(&mut owner.idle) {
            if let Some(Authority::Ours(epoch)) = member.authority(now, &directory) {
                if let Some(own) = owner.catalog.remove(&directory).filter(|own| own.epoch == epoch) {
                    self.store.insert(directory.clone(), own.version);
                }
                member.release(now, &directory);
                self.counts.releases += 1;
            }
        }
    }

    /// The lease has ended: what was not published is lost, and the programs get EIO.
    fn expelled(&mut self, machine: usize) {
        let now_lost: Vec<Directory> = self.machines[machine].catalog.keys().cloned().collect();
        self.lost.extend(now_lost);
        let gone = &mut self.machines[machine];
        gone.catalog.clear();
        gone.beliefs.clear();
        gone.member = None;
        gone.operations.clear();
        if gone.leaves {
            gone.is_gone = true;
            self.counts.left += 1;
        } else {
            self.counts.expelled += 1;
            self.after(Duration::from_millis(100), Event::Started { machine, resumes: None });
        }
    }

    /// Carries out what the member and the programs of a machine have to do.
    pub fn drive(&mut self, machine: usize) {
        while let Some(output) = self.machines[machine].member.as_mut().and_then(Member::next_output) {
            match output {
                Output::Ask(request) => self.send_registry(machine, request),
                Output::Tell(to, message) => self.send_member(machine, to, Frame::Claims(message)),
                Output::Forget(directory, claim) => {
                    if self.machines[machine].forget(&directory) {
                        self.counts.forgotten += 1;
                    }
                    let incarnation = self.machines[machine].incarnation;
                    let wait = Duration::from_micros(self.rng.u64(0..200_000));
                    self.after(wait, Event::Forgotten { machine, incarnation, directory, claim });
                }
                Output::Changed(_) => {}
                Output::Expelled => self.expelled(machine),
            }
        }
        for id in self.machines[machine].operations.iter().map(|o| o.id).collect::<Vec<_>>() {
            self.advance(machine, id);
        }
        if self.machines[machine].member.as_ref().is_some() {
            self.publish(machine);
        }
        // What that made it send.
        while let Some(output) = self.machines[machine].member.as_mut().and_then(Member::next_output) {
            match output {
                Output::Ask(request) => self.send_registry(machine, request),
                Output::Tell(to, message) => self.send_member(machine, to, Frame::Claims(message)),
                other => panic!("{other:?} by a claim or a release"),
            }
        }
    }

    fn look_at_owners(&self) {
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
