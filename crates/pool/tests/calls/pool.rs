//! A pool whose members count what they carry out.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use surgetank_pool::calls::{BODY_BYTES_MAX, Waits};
use surgetank_pool::membership::{Host, Joining, RegistryAt, Resumed};
use surgetank_pool::{CallFailed, Caller, Directory, MemberId, Membership, Once, Secret, Term, Times, Whereabouts};
use surgetank_types::model::Role;

pub const LEASE: Duration = Duration::from_secs(4);
pub const TIMES: Times =
    Times { margin: Duration::from_millis(300), renew: Duration::from_millis(500), again: Duration::from_millis(200) };
pub const PATIENCE: Duration = Duration::from_secs(60);
pub const POOL: [u8; 16] = [3; 16];

/// A member replies to a call with its reversed body, and counts it. A body that begins with one of these is another
/// matter.
pub const SLEEPS: u8 = 1;
pub const LONG_REPLY: u8 = 2;
pub const PANICS: u8 = 3;
pub const SHORT_REPLY: u8 = 4;
pub const MIB_REPLY: u8 = 5;

#[derive(Default)]
pub struct Notes {
    pub called: Mutex<HashMap<(MemberId, Vec<u8>), usize>>,
    pub gone: Mutex<Vec<MemberId>>,
}

impl Host for Notes {
    fn forget(&self, _: &Directory) {}
    fn expelled(&self) {}
    fn call(&self, from: MemberId, body: Vec<u8>) -> Vec<u8> {
        match body.first() {
            Some(&SLEEPS) => thread::sleep(Duration::from_secs(3)),
            Some(&LONG_REPLY) => return vec![0; BODY_BYTES_MAX + 1],
            Some(&PANICS) => panic!("a panic that the test asks for"),
            Some(&SHORT_REPLY) | None => return Vec::new(),
            Some(&MIB_REPLY) => return vec![9; 1 << 20],
            _ => {}
        }
        let reply = body.iter().rev().copied().collect();
        *self.called.lock().unwrap().entry((from, body)).or_default() += 1;
        reply
    }
    fn gone(&self, member: MemberId) {
        self.gone.lock().unwrap().push(member);
    }
}

pub struct One {
    pub membership: Arc<Membership>,
    pub caller: Caller,
    pub notes: Arc<Notes>,
    /// Members that its caller reaches elsewhere.
    elsewhere: Arc<Mutex<HashMap<MemberId, String>>>,
}

impl One {
    pub fn id(&self) -> MemberId {
        self.membership.id().unwrap().0
    }
    pub fn called(&self) -> HashMap<(MemberId, Vec<u8>), usize> {
        self.notes.called.lock().unwrap().clone()
    }
    pub fn call(&self, to: &Self, once: Option<Once>, body: &[u8]) -> Result<Vec<u8>, CallFailed> {
        self.caller.call(to.id(), once, body, &mut for_long())
    }
    /// From now on its caller reaches the member there.
    pub fn reach(&self, member: MemberId, address: &str) {
        self.elsewhere.lock().unwrap().insert(member, address.to_owned());
    }
}

/// A patience that is longer than any test.
pub fn for_long() -> impl FnMut(Waits) -> bool {
    let until = Instant::now() + PATIENCE;
    move |_| Instant::now() < until
}

pub fn once(number: usize) -> Once {
    Once { request: number as u64, part: 0 }
}

pub fn wait_until(what: &str, mut is: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is() {
        assert!(Instant::now() < end, "not in time: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

pub struct Pool {
    pub secret: Secret,
    registry: Option<String>,
}

impl Pool {
    pub fn new() -> Self {
        Self { secret: Secret::random().unwrap(), registry: None }
    }

    pub fn join(&mut self) -> One {
        let one = self.start(None);
        self.registry.get_or_insert_with(|| one.membership.address().to_owned());
        one
    }

    /// An agent that replaces the one of this member.
    pub fn replace(&self, member: MemberId, term: u32) -> One {
        self.start(Some(Resumed { member, term: Term(term), owned: Vec::new() }))
    }

    fn start(&self, resumes: Option<Resumed>) -> One {
        let joining = Joining {
            secret: self.secret.clone(),
            pool: POOL,
            registry: self.registry.clone().map_or(RegistryAt::Here(LEASE), RegistryAt::Peer),
            host: "127.0.0.1".to_owned(),
            temporaries: "key".to_owned(),
            role: Role::default(),
            resumes,
            times: TIMES,
            patience: PATIENCE,
        };
        let notes = Arc::new(Notes::default());
        let membership = Arc::new(Membership::join(joining, notes.clone()).unwrap());
        let elsewhere = Arc::new(Mutex::new(HashMap::new()));
        let caller = self.caller_with(&membership, elsewhere.clone());
        One { membership, caller, notes, elsewhere }
    }

    fn caller_with(&self, membership: &Arc<Membership>, elsewhere: Arc<Mutex<HashMap<MemberId, String>>>) -> Caller {
        // (The agent ends when the test drops it.)
        let of = Arc::downgrade(membership);
        let find = move |id| match of.upgrade().map_or(Whereabouts::Expelled, |membership| membership.find(id)) {
            Whereabouts::At(term, address) => {
                Whereabouts::At(term, elsewhere.lock().unwrap().get(&id).cloned().unwrap_or(address))
            }
            other => other,
        };
        Caller::new(&self.secret, POOL, membership.id().unwrap(), Box::new(find)).unwrap()
    }

    /// Another caller of the member, as the next agent has.
    pub fn caller_of(&self, one: &One) -> Caller {
        self.caller_with(&one.membership, Arc::default())
    }

    /// A caller that knows one member, at a place that never changes.
    pub fn caller_at(&self, me: (MemberId, Term), to: MemberId, address: &str) -> Caller {
        let address = address.to_owned();
        let find = move |id| {
            if id == to { Whereabouts::At(Term(1), address.clone()) } else { Whereabouts::Unknown }
        };
        Caller::new(&self.secret, POOL, me, Box::new(find)).unwrap()
    }
}
