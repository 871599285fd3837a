//! The registry in a key-value server that may lose its last writes. Each machine carries out its own requests there,
//! one after the other. An exchange may be lost, and may arrive after its machine has given it up.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use surgetank_pool::remote::exchange::{Exchange, Exchanged};
use surgetank_pool::remote::{Pool, Step, Wish, everything_in};
use surgetank_pool::{
    Answer, Ask, Claim, Directory, Embedded, Everything, MemberId, Message, Remote, Request, Revision, Uptime,
};

use super::memory::Memory;
use super::world::{Event, LEASE, World};

/// So long an exchange may take.
const TIMEOUT: Duration = Duration::from_secs(1);

pub enum Registry {
    Embedded(Box<Embedded>),
    Rows(Box<Rows>),
}

#[derive(Default)]
pub struct Rows {
    pub server: Memory,
    clients: BTreeMap<usize, Client>,
    /// Members that were lost, also if the server has forgotten it.
    ever_lost: BTreeSet<MemberId>,
    /// The last grant of each directory, also if the server has forgotten it.
    granted: BTreeMap<Directory, Claim>,
    begun: bool,
}

/// One machine's side.
struct Client {
    incarnation: u32,
    remote: Remote,
    /// When the member sent it, by its clock.
    queue: VecDeque<(Uptime, Request)>,
    under_way: Option<(Uptime, Request)>,
    flight: u64,
}

fn number_of(request: &Request) -> u64 {
    match request {
        Request::Join(_) => 0,
        Request::Of { number, .. } => *number,
    }
}

impl World {
    pub fn everything(&self) -> Everything {
        match &self.registry {
            Registry::Embedded(engine) => engine.everything(),
            Registry::Rows(rows) => everything_in(&rows.server.rows).map_or_else(
                || Everything { revision: Revision(0), members: Vec::new(), lost: Vec::new(), claims: Vec::new() },
                |(everything, _)| everything,
            ),
        }
    }

    /// A request arrives at an embedded registry.
    pub fn ask_registry(&mut self, machine: usize, incarnation: u32, sent: Uptime, request: Request) {
        if !self.registry_is_up {
            return;
        }
        let number = match &request {
            Request::Join(_) => 0,
            Request::Of { number, .. } => *number,
        };
        let before = self.everything();
        let Registry::Embedded(engine) = &mut self.registry else { return };
        let claimed = match &request {
            Request::Of { ask: Ask::Claim(directory), .. } => Some(directory.clone()),
            _ => None,
        };
        let answer = engine.ask(self.now, request);
        if let (Some(directory), &Answer::Granted { epoch, .. }) = (claimed, &answer) {
            let is_lost = |(of, claim, _): &(Directory, Claim, _)| *of == directory && claim.epoch != epoch;
            if before.claims.iter().any(is_lost) {
                self.lost.insert(directory);
            }
        }
        if let Some(delay) = self.delay(None, machine) {
            let delay = if machine == 1 { delay + self.answers_take } else { delay };
            self.after(delay, Event::Answered { machine, incarnation, sent, number, answer });
        }
    }

    /// Was it lost, also if the registry has forgotten that?
    pub fn is_or_was_lost(&self, id: MemberId) -> bool {
        match &self.registry {
            Registry::Embedded(engine) => !engine.everything().members.iter().any(|record| record.id == id),
            Registry::Rows(rows) => {
                rows.ever_lost.contains(&id) || !self.everything().members.iter().any(|record| record.id == id)
            }
        }
    }

    /// The registry's process ends, and another one continues.
    pub fn registry_back(&mut self) {
        let lost = self.rng.usize(0..60);
        let all = self.rng.u32(0..8) == 0;
        let nothing = self.rng.u32(0..3) == 0;
        match &mut self.registry {
            Registry::Embedded(engine) => **engine = Embedded::restored(self.now, engine.kept().clone()),
            Registry::Rows(rows) => {
                let lost = if all {
                    usize::MAX
                } else if nothing {
                    0
                } else {
                    lost
                };
                let before = rows.server.written();
                rows.server.fail_over(lost.min(before));
                self.counts.lost_writes += (before - rows.server.written()) as u64;
            }
        }
        self.registry_is_up = true;
    }

    /// Puts the request behind others of this machine.
    pub fn enqueue(&mut self, machine: usize, request: Request) {
        let (incarnation, sent) = (self.machines[machine].incarnation, self.clock(machine));
        let Registry::Rows(rows) = &mut self.registry else { return };
        let is_founder = !std::mem::replace(&mut rows.begun, true);
        let pool = Pool { id: [1; 16], proof: [2; 32], lease: LEASE, is_founder, writes_max: 40 };
        let client = rows.clients.entry(machine).or_insert_with(|| Client::new(incarnation, pool.clone()));
        if client.incarnation != incarnation || matches!(request, Request::Join(_)) && client.remote_has_joined() {
            let flight = client.flight;
            *client = Client { flight, ..Client::new(incarnation, pool) };
        }
        client.queue.push_back((sent, request));
        self.ask_next(machine);
    }

    fn ask_next(&mut self, machine: usize) {
        let now = self.clock(machine);
        loop {
            let Registry::Rows(rows) = &mut self.registry else { return };
            let Some(client) = rows.clients.get_mut(&machine) else { return };
            if client.under_way.is_some() {
                return;
            }
            let Some((sent, request)) = client.queue.pop_front() else { return };
            // (Its member does not wait for it any more.)
            if sent + LEASE <= now {
                continue;
            }
            client.under_way = Some((sent, request.clone()));
            let step = client.remote.begin(now, Wish::Ask(request));
            self.follow(machine, step);
        }
    }

    fn follow(&mut self, machine: usize, step: Step) {
        let Registry::Rows(rows) = &mut self.registry else { return };
        let Some(client) = rows.clients.get_mut(&machine) else { return };
        let incarnation = client.incarnation;
        match step {
            Step::Exchange(exchange) => {
                client.flight += 1;
                let flight = client.flight;
                if let Some(delay) = self.delay(None, machine) {
                    self.after(delay, Event::Exchange { machine, flight, exchange });
                }
                self.after(TIMEOUT, Event::TimedOut { machine, flight });
            }
            Step::Answer(answer) => {
                let under_way = client.under_way.take();
                if let Some((sent, request)) = under_way {
                    let number = number_of(&request);
                    let extra = if machine == 1 { self.answers_take } else { Duration::ZERO };
                    self.after(extra, Event::Answered { machine, incarnation, sent, number, answer });
                }
            }
            Step::Later | Step::Ended(_) => client.under_way = None,
        }
    }

    /// An exchange arrives at the server.
    pub fn exchange(&mut self, machine: usize, flight: u64, exchange: &Exchange) {
        if !self.registry_is_up {
            return;
        }
        let Registry::Rows(rows) = &mut self.registry else { return };
        let before = everything_in(&rows.server.rows);
        let Some(exchanged) = rows.server.exchange(exchange) else { return };
        if exchanged.done && !exchange.writes.is_empty() {
            let after = everything_in(&rows.server.rows);
            self.compare(before, after);
        }
        if let Some(delay) = self.delay(None, machine) {
            self.after(delay, Event::Exchanged { machine, flight, exchanged });
        }
    }

    pub fn hear(&mut self, machine: usize, from: MemberId, message: &Message) {
        let Registry::Rows(rows) = &mut self.registry else { return };
        if let (Some(client), Message::Claimed { directory, epoch, revision }) =
            (rows.clients.get_mut(&machine), message)
        {
            client.remote.hear(directory, Claim { owner: from, epoch: *epoch }, *revision);
        }
    }

    /// What a change means for the reference.
    fn compare(&mut self, before: Option<(Everything, bool)>, after: Option<(Everything, bool)>) {
        let (Some((before, was_quiet)), Some((after, is_quiet))) = (before, after) else { return };
        if let Registry::Rows(rows) = &mut self.registry {
            rows.ever_lost.extend(after.lost.iter().map(|record| record.id));
        }
        let claims: BTreeMap<&Directory, Claim> = after.claims.iter().map(|(of, claim, _)| (of, *claim)).collect();
        for (directory, claim, _) in &before.claims {
            if claims.get(directory).is_some_and(|now| now.owner != claim.owner) {
                self.lost.insert(directory.clone());
            }
        }
        let mut granted = BTreeMap::new();
        if let Registry::Rows(rows) = &mut self.registry {
            if !was_quiet && !is_quiet {
                rows.granted = claims.iter().map(|(directory, claim)| ((*directory).clone(), *claim)).collect();
            }
            granted.clone_from(&rows.granted);
        }
        self.counts.eras += u64::from(is_quiet && !was_quiet);
        if was_quiet && !is_quiet {
            // The server has forgotten the claim of a member that is dead, and no living member knew it.
            for directory in self.directories.clone() {
                let stored = self.store.get(&directory).copied().unwrap_or(0);
                let is_dead = |owner| !after.members.iter().any(|record| record.id == owner);
                let last = granted.get(&directory).filter(|last| is_dead(last.owner));
                let is_forgotten = last.is_some_and(|last| claims.get(&directory) != Some(last));
                if is_forgotten && self.answered.get(&directory).is_some_and(|at| *at > stored) {
                    self.counts.forgotten_claims += 1;
                    self.taken_over(&directory, stored);
                }
                // The claim was taken over in writes that are forgotten, by a member that is dead: the owner before it goes on.
                let claim = claims.get(&directory).filter(|claim| granted.get(&directory) != Some(claim));
                let before = claim.and_then(|claim| Some((claim, self.numbers.get(&claim.owner)?)));
                let own = before.and_then(|(claim, machine)| {
                    self.machines[*machine].catalog.get(&directory).filter(|own| own.epoch == claim.epoch)
                });
                if let Some(version) = own.map(|own| own.version) {
                    if self.answered.get(&directory).is_some_and(|at| *at > version) {
                        // (What its successor did is overwritten: `remote/eras.rs` says so.)
                        self.counts.forgotten_claims += 1;
                        self.taken_over(&directory, version);
                    }
                    let begun = self.begun.entry(directory.clone()).or_default();
                    *begun = version.max(*begun);
                }
            }
        }
    }

    pub fn exchanged(&mut self, machine: usize, flight: u64, exchanged: &Exchanged) {
        let now = self.clock(machine);
        let Registry::Rows(rows) = &mut self.registry else { return };
        let Some(client) = rows.clients.get_mut(&machine).filter(|client| client.flight == flight) else { return };
        if client.under_way.is_none() {
            return;
        }
        let step = client.remote.take(now, exchanged);
        self.follow(machine, step);
        self.ask_next(machine);
    }

    pub fn timed_out(&mut self, machine: usize, flight: u64) {
        let Registry::Rows(rows) = &mut self.registry else { return };
        let Some(client) = rows.clients.get_mut(&machine).filter(|client| client.flight == flight) else { return };
        client.flight += 1;
        client.under_way = None;
        self.ask_next(machine);
    }
}

impl Client {
    fn new(incarnation: u32, pool: Pool) -> Self {
        let (queue, under_way, flight) = (VecDeque::new(), None, 0);
        Self { incarnation, remote: Remote::new(pool), queue, under_way, flight }
    }

    fn remote_has_joined(&self) -> bool {
        self.remote.id().is_some()
    }
}
