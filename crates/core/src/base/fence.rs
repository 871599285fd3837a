//! Directories that other members of a pool have taken over from this agent.
//!
//! A member that is lost may live on, cut off from the others, or come back later with what it has not published. A member that
//! takes a directory over leaves a *notice* in the store before it does anything else there ([`Membership::gives`]). An agent
//! whose lease has ended looks for the notice before each operation. What it still has for a directory with one replaces
//! nothing: a file appears beside its name, and nothing is renamed or removed.
//!
//! While the lease lasts there can be no notice, and the store is not asked. Between the end of the lease and that of the
//! membership nothing is published.
//!
//! The danger that this avoids: a member that was lost overwrites what others have made since, or brings back what they
//! removed.

use std::io;

use surgetank_store::{Store, StorePath, checksum};
use surgetank_types::model::{STORE_TEMPORARY_PREFIX, Seq};
use surgetank_types::sync::{Mutex, PoisonError};

use crate::base::{Members, Publishes};

/// One member of one pool. Neither number is used again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Membership {
    /// The pool's random number, in hexadecimal digits.
    pub pool: String,
    /// The member.
    pub member: u32,
}

fn prefix_of(Membership { pool, member }: &Membership) -> Vec<u8> {
    [STORE_TEMPORARY_PREFIX, format!("taken-{pool}-{member}-").as_bytes()].concat()
}

impl Membership {
    /// The name of the notice that says: the directory at this path was taken over from this member. (Two paths may have one
    /// notice. Then more files than necessary appear beside their names.)
    fn notice_of(&self, directory: &[u8]) -> Vec<u8> {
        let mut name = prefix_of(self);
        name.extend_from_slice(format!("{:016x}", checksum::of_bytes(directory)).as_bytes());
        name
    }

    /// Says that the directory of the store at this path is taken over from this member.
    pub(crate) fn gives(&self, store: &dyn Store, directory: &[u8]) -> io::Result<()> {
        store.leave_notice(&self.notice_of(directory))
    }
}

/// A membership that has not ended in order, and the first operation that was queued after it.
pub type Past = (Membership, u64);

/// As whom the agent has queued operations.
#[derive(Debug, Default)]
pub(crate) struct Fence {
    past: Mutex<Vec<Past>>,
}

impl Fence {
    /// These are the earlier memberships.
    pub fn was_member(&self, past: Vec<Past>) {
        *self.past.lock().unwrap_or_else(PoisonError::into_inner) = past;
    }

    /// Was this agent, or an earlier one of this place, that member?
    pub fn was(&self, membership: &Membership) -> bool {
        let past = self.past.lock().unwrap_or_else(PoisonError::into_inner);
        past.iter().any(|(one, _)| one == membership)
    }

    /// All operations of earlier memberships are done, or there were none.
    pub fn forget(store: &dyn Store, past: &[(Membership, Option<u64>)]) {
        for (membership, _) in past {
            if let Err(why) = store.remove_notices(&prefix_of(membership)) {
                tracing::info!(%why, ?membership, "notices of directories that were taken over stay in the store");
            }
        }
    }

    /// May the operation be carried out as usual? Errors: WouldBlock, that is not known yet.
    pub fn memberships_of(&self, seq: Seq, members: Option<&dyn Members>) -> io::Result<Vec<Membership>> {
        let mut memberships: Vec<Membership> = {
            let past = self.past.lock().unwrap_or_else(PoisonError::into_inner);
            past.iter().filter(|(_, until)| seq.number() < *until).map(|(one, _)| one.clone()).collect()
        };
        match members.map_or(Publishes::Freely, Members::publishes) {
            Publishes::Freely => {}
            Publishes::Later => {
                let why = "the lease of this node in its pool has ended, and others may take its directories over";
                return Err(io::Error::new(io::ErrorKind::WouldBlock, why));
            }
            Publishes::UnlessTaken(membership) => memberships.push(membership),
        }
        Ok(memberships)
    }
}

/// Was one of these directories of the store taken over from one of these members?
pub(crate) fn is_taken(store: &dyn Store, memberships: &[Membership], directories: &[StorePath]) -> io::Result<bool> {
    for membership in memberships {
        for directory in directories {
            if store.has_notice(&membership.notice_of(&directory.0))? {
                return Ok(true);
            }
        }
    }
    Ok(false)
}
