//! Engines of the suite whose rows are in a key-value server: each member carries out its own requests there.

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use surgetank_pool::remote::driver::{Outcome, carry_out, server};
use surgetank_pool::remote::exchange::{Exchange, Exchanged, Server};
use surgetank_pool::remote::place::Place;
use surgetank_pool::remote::{Pool, Wish};
use surgetank_pool::{Answer, Ask, MemberId, Remote, Request, Revision, Term, Uptime};

use super::memory::Memory;
use super::servers::{Etcd, Redis, is_installed};
use super::{Engine, LEASE};

/// One agent.
struct Agent {
    instance: [u8; 16],
    joined: Option<(MemberId, Term)>,
    remote: Remote,
    server: Box<dyn Server>,
}

pub struct OnServer {
    now: Uptime,
    agents: Vec<Agent>,
    connect: Box<dyn Fn() -> Box<dyn Server>>,
    restart: Box<dyn FnMut()>,
}

struct Shared(Arc<Mutex<Memory>>);

impl Server for Shared {
    fn exchange(&mut self, exchange: &Exchange) -> std::io::Result<Exchanged> {
        self.0.lock().unwrap().exchange(exchange).ok_or_else(|| std::io::ErrorKind::ConnectionReset.into())
    }
    fn writes_max(&self) -> usize {
        20
    }
}

pub fn in_memory() -> OnServer {
    let memory = Arc::new(Mutex::new(Memory::default()));
    let other = memory.clone();
    OnServer::new(move || Box::new(Shared(memory.clone())), move || other.lock().unwrap().fail_over(0))
}

pub fn on_redis() -> Option<OnServer> {
    if !is_installed("redis-server") {
        return None;
    }
    let mut redis = Redis::lasting();
    let place = Place::parse(&format!("redis://127.0.0.1:{}/1", redis.port)).unwrap();
    let restart = move || {
        redis.kill();
        redis.again();
    };
    Some(OnServer::new(move || server(&place, "flow"), restart))
}

pub fn on_etcd() -> Option<OnServer> {
    if !is_installed("etcd") {
        return None;
    }
    let mut etcd = Etcd::start(3);
    let place = Place::parse(&etcd.url()).unwrap();
    let restart = move || {
        (0..3).for_each(|number| etcd.kill_one(number));
        (0..3).for_each(|number| etcd.start_one(number));
        etcd.await_leader();
    };
    Some(OnServer::new(move || server(&place, "flow"), restart))
}

impl OnServer {
    fn new(connect: impl Fn() -> Box<dyn Server> + 'static, restart: impl FnMut() + 'static) -> Self {
        let (connect, restart) = (Box::new(connect), Box::new(restart));
        Self { now: Duration::from_secs(1000), agents: Vec::new(), connect, restart }
    }

    /// The number of the agent that asks.
    fn agent(&mut self, request: &Request) -> Option<usize> {
        match request {
            Request::Of { member, term, .. } => {
                self.agents.iter().position(|agent| agent.joined == Some((*member, *term)))
            }
            Request::Join(join) => {
                let known = self.agents.iter().position(|agent| agent.instance == join.instance);
                known.or_else(|| {
                    let server = (self.connect)();
                    let (is_founder, writes_max) = (self.agents.is_empty(), server.writes_max());
                    let pool = Pool { id: [1; 16], proof: [2; 32], lease: LEASE, is_founder, writes_max };
                    let (instance, joined, remote) = (join.instance, None, Remote::new(pool));
                    self.agents.push(Agent { instance, joined, remote, server });
                    Some(self.agents.len() - 1)
                })
            }
        }
    }

    fn try_once(&mut self, agent: usize, request: Request) -> Option<Answer> {
        let now = self.now;
        let Agent { remote, server, joined, .. } = &mut self.agents[agent];
        match carry_out(remote, &mut **server, &|| now, Wish::Ask(request)) {
            Ok(Outcome::Answer(answer)) => {
                if let Answer::Joined { member, term, .. } = &answer {
                    *joined = Some((*member, *term));
                }
                Some(answer)
            }
            Ok(_) => None,
            Err(why) => {
                eprintln!("tried again: {why}");
                thread::sleep(Duration::from_millis(20));
                None
            }
        }
    }

    /// As agents do all the time.
    fn renew_all(&mut self) {
        for agent in 0..self.agents.len() {
            if let Some((member, term)) = self.agents[agent].joined {
                let ask = Ask::Renew(Revision(0));
                self.try_once(agent, Request::Of { member, term, number: 0, ask });
            }
        }
    }
}

impl Engine for OnServer {
    fn ask(&mut self, request: Request) -> Answer {
        let agent = self.agent(&request).expect("an agent that has joined");
        for _ in 0..200 {
            if let Some(answer) = self.try_once(agent, request.clone()) {
                return answer;
            }
            // (After a restart all members report for one lease.)
            self.pass(50);
            self.renew_all();
        }
        panic!("there is no answer to {request:?}");
    }

    fn pass(&mut self, of_a_lease: u32) {
        self.now += LEASE * of_a_lease / 1000;
    }

    fn restart(&mut self) {
        (self.restart)();
    }
}
