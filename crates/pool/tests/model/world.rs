//! The machines, the network, the registry and the store, and who does what when.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

use fastrand::Rng;
use surgetank_pool::remote::exchange::{Exchange, Exchanged};
use surgetank_pool::{
    Answer, Authority, Claim, Directory, Embedded, Epoch, Join, Member, MemberId, Message, Output, Refusal, Request,
    Term, Times, Uptime,
};
use surgetank_types::model::Role;

use super::counts::Counts;
use super::machine::Machine;
use super::rows::Registry;

pub const LEASE: Duration = Duration::from_secs(10);
pub const TIMES: Times =
    Times { margin: Duration::from_millis(1_500), renew: Duration::from_secs(3), again: Duration::from_millis(500) };
/// How long a kernel believes an answer of the store. It does not ask the agent meanwhile.
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
    /// The owner that was asked and has not answered, and when it is asked again. It may have carried out the operation: no
    /// other one is asked.
    pub waits: Option<(Claim, Uptime)>,
    /// An ownership that has ended, as its owner said.
    pub refused: Option<Epoch>,
}

/// What a message between two agents says.
#[derive(Debug, Clone)]
pub enum Frame {
    Claims(Message),
    Do {
        id: u64,
        writes: bool,
        directory: Directory,
        epoch: Epoch,
    },
    Done {
        id: u64,
        version: u64,
    },
    /// That ownership has ended.
    NotOwner {
        id: u64,
        epoch: Epoch,
    },
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
        resumes: Option<(MemberId, Term)>,
    },
    RegistryBack,
    /// An exchange arrives at the key-value server.
    Exchange {
        machine: usize,
        flight: u64,
        exchange: Exchange,
    },
    /// What became of it arrives at the machine.
    Exchanged {
        machine: usize,
        flight: u64,
        exchanged: Exchanged,
    },
    /// The machine gives an exchange up.
    TimedOut {
        machine: usize,
        flight: u64,
    },
    Step,
}

impl Event {
    fn machine(&self) -> Option<usize> {
        match self {
            Self::Answered { machine, .. }
            | Self::Exchanged { machine, .. }
            | Self::TimedOut { machine, .. }
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
    pub registry: Registry,
    pub registry_is_up: bool,
    pub machines: Vec<Machine>,
    pub numbers: BTreeMap<MemberId, usize>,
    pub directories: Vec<Directory>,
    pub store: BTreeMap<Directory, u64>,
    pub answered: BTreeMap<Directory, u64>,
    pub begun: BTreeMap<Directory, u64>,
    /// Directories of lost members that another one has claimed since.
    pub lost: BTreeSet<Directory>,
    /// What each change made of its directory, and which member did it: carried out once.
    pub applied: BTreeMap<u64, (u64, Option<MemberId>)>,
    /// Cut connections: two machines (`None`: the registry), until when.
    pub cuts: BTreeMap<(Option<usize>, usize), Uptime>,
    pub next_operation: u64,
    /// Programs make operations and faults happen.
    pub works: bool,
    pub faults: bool,
    pub only_reads: bool,
    /// The registry's answers to the second machine take so much longer.
    pub answers_take: Duration,
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

    /// With the registry in a key-value server.
    pub fn with_lost_writes(seed: u64) -> Self {
        let mut world = Self::new(seed);
        world.registry = Registry::Rows(Box::default());
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
            registry: Registry::Embedded(Box::new(Embedded::new(LEASE))),
            registry_is_up: true,
            machines: Vec::new(),
            numbers: BTreeMap::new(),
            directories,
            store: BTreeMap::new(),
            answered: BTreeMap::new(),
            begun: BTreeMap::new(),
            lost: BTreeSet::new(),
            applied: BTreeMap::new(),
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
            assert!(operations.is_empty(), "seed {}: machine {number} waits indefinitely: {operations:?}", self.seed);
            assert!(!machine.leaves || machine.is_gone, "seed {}: machine {number} does not get away", self.seed);
            let unfinished = machine.member.as_ref().map_or(0, Member::unfinished);
            assert_eq!(unfinished, 0, "seed {}: machine {number} does not finish {:?}", self.seed, machine.member);
        }
        self.look_at_claims();
        self.counts
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

    pub fn until(&mut self, end: Uptime) {
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
    pub fn delay(&mut self, one: Option<usize>, other: usize) -> Option<Duration> {
        if self.is_cut(one, other) || self.faults && self.rng.u32(0..200) == 0 {
            return None;
        }
        let slow = self.faults && self.rng.u32(0..50) == 0;
        Some(Duration::from_micros(if slow { self.rng.u64(0..3_000_000) } else { self.rng.u64(50..2_000) }))
    }

    fn send_registry(&mut self, machine: usize, request: Request) {
        self.counts.requests += 1;
        if matches!(self.registry, Registry::Rows(_)) {
            self.enqueue(machine, request);
            return;
        }
        let (incarnation, sent) = (self.machines[machine].incarnation, self.clock(machine));
        for _ in 0..self.copies() {
            if let Some(delay) = self.delay(None, machine) {
                self.after(delay, Event::Asked { machine, incarnation, sent, request: request.clone() });
            }
        }
    }

    pub fn send_member(&mut self, machine: usize, to: MemberId, frame: Frame) {
        let Some(from) = self.machines[machine].member.as_ref().map(Member::id) else { return };
        let Some(&to) = self.numbers.get(&to) else { return };
        self.counts.messages += 1;
        let pair = (machine.min(to), machine.max(to));
        for _ in 0..self.copies() {
            if let Some(delay) = self.delay(Some(pair.0), pair.1) {
                let incarnation = self.machines[to].incarnation;
                self.after(delay, Event::Arrived { from, to, incarnation, frame: frame.clone() });
            }
        }
    }

    /// A message may come twice.
    fn copies(&mut self) -> u32 {
        1 + u32::from(self.faults && self.rng.u32(0..100) == 0)
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
            Event::RegistryBack => self.registry_back(),
            Event::Exchange { machine, flight, exchange } => self.exchange(machine, flight, &exchange),
            Event::Exchanged { machine, flight, exchanged } => self.exchanged(machine, flight, &exchanged),
            Event::TimedOut { machine, flight } => self.timed_out(machine, flight),
            Event::Step => self.step(),
        }
        if let Some(machine) = touched {
            self.drive(machine);
        }
    }

    // Agents.

    fn start(&mut self, machine: usize, resumes: Option<(MemberId, Term)>) {
        if self.machines[machine].is_gone {
            return;
        }
        let instance = std::array::from_fn(|_| self.rng.u8(..));
        let machine_now = &mut self.machines[machine];
        machine_now.incarnation += 1;
        machine_now.member = None;
        machine_now.joining = Some(Join {
            instance,
            resumes,
            address: format!("machine-{machine}"),
            temporaries: String::new(),
            role: Role::default(),
        });
        for operation in &mut machine_now.operations {
            operation.reading = false;
        }
        self.tick(machine);
    }

    fn tick(&mut self, machine: usize) {
        let now = self.clock(machine);
        if let Some(join) = self.machines[machine].joining.clone() {
            self.send_registry(machine, Request::Join(join));
            self.tick_after(machine, TIMES.again);
        } else if let Some(member) = self.machines[machine].member.as_mut() {
            member.tick(now);
            let wake = member.wake();
            let wake = self.machines[machine].true_time(wake);
            // (Peers are asked again, too.)
            let wait = wake.saturating_sub(self.now).clamp(Duration::from_millis(1), TIMES.again);
            self.tick_after(machine, wait);
            self.ask_peers_again(machine);
        }
    }

    fn tick_after(&mut self, machine: usize, wait: Duration) {
        self.machines[machine].ticks += 1;
        let number = self.machines[machine].ticks;
        self.after(wait, Event::Tick { machine, number });
    }

    fn answer(&mut self, machine: usize, sent: Uptime, number: u64, answer: Answer) {
        let now = self.clock(machine);
        if let Some(Join { resumes, .. }) = self.machines[machine].joining {
            let own: Vec<_> =
                self.machines[machine].catalog.iter().map(|(directory, own)| (directory.clone(), own.epoch)).collect();
            match Member::new(sent, answer, TIMES, &own) {
                Ok(mut member) => {
                    self.numbers.insert(member.id(), machine);
                    let here = &mut self.machines[machine];
                    if here.leaves {
                        member.leave(now);
                    }
                    here.last_term = Some((member.id(), member.term()));
                    (here.joining, here.member) = (None, Some(member));
                    self.tick(machine);
                    self.advance_all(machine);
                }
                // Its lease ended before it was replaced.
                Err(Answer::Refused(_)) if resumes.is_some() => {
                    self.lease_must_have_ended(machine, resumes.map(|(id, _)| id));
                    self.expelled(machine);
                }
                Err(_) => {}
            }
        } else if let Some(member) = self.machines[machine].member.as_mut() {
            let id = member.id();
            self.counts.claims += u64::from(matches!(answer, Answer::Granted { .. }));
            match answer {
                Answer::Left => self.counts.left += 1,
                Answer::Refused(Refusal::Superseded) => panic!("seed {}: machine {machine} is superseded", self.seed),
                _ => {}
            }
            let refused = answer == Answer::Refused(Refusal::NotAMember);
            member.answered(now, number, answer);
            if refused {
                self.lease_must_have_ended(machine, Some(id));
            }
        }
    }

    fn receive(&mut self, from: MemberId, to: usize, frame: Frame) {
        let now = self.clock(to);
        let Some(member) = self.machines[to].member.as_mut() else { return };
        match frame {
            Frame::Claims(message) => {
                member.told(now, from, message.clone());
                self.hear(to, from, &message);
            }
            Frame::Do { id, writes, directory, epoch } => {
                let authority = member.authority(now, &directory);
                // The answer comes later: the sender asks again.
                let is_later = authority.is_none() || !member.has_ended(&directory, epoch);
                let done = self.machines[to].done.get(&id).copied();
                let frame = match done {
                    Some(version) => Frame::Done { id, version },
                    None if authority == Some(Authority::Ours(epoch)) => {
                        Frame::Done { id, version: self.decide(to, id, writes, &directory, epoch) }
                    }
                    None if is_later => return,
                    None => Frame::NotOwner { id, epoch },
                };
                self.send_member(to, from, frame);
            }
            Frame::Done { id, version } => {
                // (An owner that is known to be lost is not believed: the next one may serve already.)
                let waits = self.machines[to].operations.iter().find(|one| one.id == id).and_then(|one| one.waits);
                // (Nor does a member that is lost itself count: its programs get EIO soon.)
                let is_member =
                    self.everything().members.iter().any(|record| self.numbers.get(&record.id) == Some(&to));
                let is_believed = is_member && waits.is_some_and(|(claim, _)| claim.owner == from);
                if is_believed && self.finish(to, id, version) {
                    self.counts.at_peers += 1;
                }
            }
            Frame::NotOwner { id, epoch } => self.refused(to, id, epoch),
        }
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

    /// The membership has ended: what was not published is lost, and the programs get EIO.
    fn expelled(&mut self, machine: usize) {
        let gone = &mut self.machines[machine];
        gone.catalog.clear();
        gone.done.clear();
        gone.memberships += 1;
        gone.member = None;
        gone.last_term = None;
        gone.operations.clear();
        if gone.leaves {
            gone.is_gone = true;
        } else {
            self.counts.expelled += 1;
            self.after(Duration::from_millis(100), Event::Started { machine, resumes: None });
        }
    }

    /// Carries out what the member wants done.
    pub fn drive(&mut self, machine: usize) {
        self.publish(machine);
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
                Output::Changed(directory) => {
                    let clock = self.clock(machine);
                    let member = self.machines[machine].member.as_ref();
                    if let Some(Authority::Ours(epoch)) = member.and_then(|it| it.authority(clock, &directory)) {
                        self.owns(machine, &directory, epoch);
                    }
                    let waiting = self.machines[machine].operations.iter().filter(|one| one.directory == directory);
                    for id in waiting.map(|one| one.id).collect::<Vec<_>>() {
                        self.advance(machine, id);
                    }
                }
                Output::Gone(id) => self.gone(machine, id),
                Output::Serves => self.advance_all(machine),
                Output::Expelled => self.expelled(machine),
            }
        }
    }

    fn advance_all(&mut self, machine: usize) {
        for id in self.machines[machine].operations.iter().map(|one| one.id).collect::<Vec<_>>() {
            self.advance(machine, id);
        }
    }
}
