//! What an agent brings when it joins a pool.

use std::time::Duration;
use surgetank_types::model::Role;

use crate::member::Times;
use crate::remote::Pool;
use crate::remote::place::Place;
use crate::secret::Secret;
use crate::{Directory, Epoch, MemberId, Term};

/// Where the registry is.
#[derive(Debug, Clone)]
pub enum RegistryAt {
    /// In this agent, the pool's first member. A lease lasts so long.
    Here(Duration),
    /// At the first member: `HOST:PORT`.
    Peer(String),
    /// In a key-value server that all members reach.
    Server {
        /// Where it is.
        place: Box<Place>,
        /// The pool's name there.
        name: String,
        /// What members have in common.
        pool: Box<Pool>,
    },
}

/// How an agent joins.
#[derive(Debug, Clone)]
pub struct Joining {
    /// What all members have in common.
    pub secret: Secret,
    /// Random, one for each pool.
    pub pool: [u8; 16],
    /// Where the registry is.
    pub registry: RegistryAt,
    /// The host name or address under which other members reach this machine. An address is bound; for a name all
    /// addresses of the machine are.
    pub host: String,
    /// Begins the names of its temporaries in the store.
    pub temporaries: String,
    /// What the member is for.
    pub role: Role,
    /// What the agent continues.
    pub resumes: Option<Resumed>,
    /// How long a member waits for what.
    pub times: Times,
    /// How long the join may take.
    pub patience: Duration,
}

/// What an agent continues that replaces another one.
#[derive(Debug, Clone)]
pub struct Resumed {
    /// The member.
    pub member: MemberId,
    /// Higher than that of the agent before, as the supervisor counts.
    pub term: Term,
    /// The directories that the catalog knows as owned.
    pub owned: Vec<(Directory, Epoch)>,
}
