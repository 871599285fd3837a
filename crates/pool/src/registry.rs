//! The registry: membership with leases, and claims. An engine answers each [`Request`] in one transaction.
//!
//! Names and contents of files never pass through it. Well under 1,000 requests a second are enough for any job.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use surgetank_types::model::Role;

use crate::{Directory, Epoch, MemberId, Revision, Term};

/// What an engine is asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// An agent wants to be a member.
    Join(Join),
    /// A member asks.
    Of {
        /// The member.
        member: MemberId,
        /// Its present term. An older one is refused.
        term: Term,
        /// Grows with each request of the term. A request that comes after a later one is refused.
        number: u64,
        /// What it asks.
        ask: Ask,
    },
}

/// An agent wants to be a member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Join {
    /// Random, one for each start of an agent. The same one is answered with the same member and term.
    pub instance: [u8; 16],
    /// The agent replaces one that was this member and died, as the term that its supervisor counts. Only a higher term
    /// than the last one is accepted: the join of an agent that died meanwhile may come late.
    pub resumes: Option<(MemberId, Term)>,
    /// Where other members reach it.
    pub address: String,
    /// Begins the names of its temporaries in the store, behind the prefix of all of them.
    pub temporaries: String,
    /// What it is for.
    pub role: Role,
}

/// What a member asks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    /// Lengthens the lease, and brings what happened after this revision.
    Renew(Revision),
    /// Takes the ownership of a directory: of the store's, or of a lost member's.
    Claim(Directory),
    /// Gives it up. All changes are in the store.
    Release(Directory, Epoch),
    /// Gives up a claim with which nothing was done. One that replaced a lost member's is that one's again.
    GiveUp(Directory, Epoch),
    /// Ends the membership. The member owns nothing any more.
    Leave,
}

/// What an engine answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// To a join.
    Joined {
        /// The new member, or the resumed one.
        member: MemberId,
        /// Its term.
        term: Term,
        /// How long a lease lasts, from the moment at which the member asked for it.
        lease: Duration,
        /// All members and claims.
        everything: Everything,
    },
    /// The lease lasts longer.
    Renewed(News),
    /// The member owns the directory now, or did already.
    Granted {
        /// Number of the ownership.
        epoch: Epoch,
        /// The revision at which these are the members.
        revision: Revision,
        /// Who must know the claim before a change is answered. The member itself is among them.
        members: Vec<MemberId>,
    },
    /// Another member owns it.
    Owned {
        /// The claim that stands.
        claim: Claim,
        /// The revision at which it stood.
        revision: Revision,
    },
    /// The claim is given up.
    Released(Revision),
    /// The membership has ended.
    Left,
    /// Nothing was changed.
    Refused(Refusal),
}

/// Why an engine changes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refusal {
    /// Its lease had ended, or it left.
    NotAMember,
    /// A later agent is the same member.
    Superseded,
    /// A later request of the member came first.
    Overtaken,
    /// It does not own the directory in that epoch.
    NotOwner,
    /// It owns directories, so it cannot leave.
    StillOwns,
    /// The pool has ended: no agent joins any more.
    Ended,
    /// The pool of this name has another store.
    OtherStore,
    /// The pool's members have another secret, user or version.
    OtherSecret,
}

/// A member, as all others know it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberRecord {
    /// The member.
    pub id: MemberId,
    /// Its incarnation.
    pub term: Term,
    /// Where it is reached.
    pub address: String,
    /// Begins the names of its temporaries in the store, behind the prefix of all of them.
    pub temporaries: String,
    /// What it is for.
    pub role: Role,
}

/// An ownership.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Claim {
    /// The member that decides the directory's names. It may be lost: then no member decides them until one takes it over.
    pub owner: MemberId,
    /// Number of the ownership.
    pub epoch: Epoch,
}

/// All that the registry has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Everything {
    /// The revision at which it is so.
    pub revision: Revision,
    /// The members.
    pub members: Vec<MemberRecord>,
    /// Those whose lease ended.
    pub lost: Vec<MemberRecord>,
    /// The claims, and when each was made.
    pub claims: Vec<(Directory, Claim, Revision)>,
}

/// What a member has missed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum News {
    /// Each change after the revision that it named, in order, and up to which revision.
    Changes(Vec<(Revision, Change)>, Revision),
    /// The engine does not remember them one by one.
    Gap(Everything),
}

/// One change at the registry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Change {
    /// A new member, or a new term of one.
    Joined(MemberRecord),
    /// A member left. It owned nothing.
    Left(MemberId),
    /// A member's lease has ended. Its claims stand, without an owner that serves, until another member claims them.
    Lost(MemberId),
    /// A directory has an owner.
    Claimed(Directory, Claim),
    /// A directory is the store's again.
    Released(Directory),
}
