//! What a request changes: the rules of all engines. An engine brings the rows ([`Rows`]) and makes the changes last.
//!
//! Invariants: the revision grows with each change, and an epoch is the revision of its claim. A claim of a living member
//! is never replaced. A claim of a lost member is, and [`give_up`] brings it back.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use surgetank_types::model::Role;

use crate::registry::{Answer, Change, Claim, Join, MemberRecord, Refusal};
use crate::{Directory, Epoch, MemberId, Revision, Term};

/// So many changes are remembered one by one. A member that missed more gets everything.
pub(crate) const CHANGES_MAX: usize = 4096;

/// A member, as an engine knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Known {
    pub term: Term,
    pub instance: [u8; 16],
    pub address: String,
    pub temporaries: String,
    pub role: Role,
}

impl Known {
    pub fn record(&self, id: MemberId) -> MemberRecord {
        let (address, temporaries) = (self.address.clone(), self.temporaries.clone());
        MemberRecord { id, term: self.term, address, temporaries, role: self.role }
    }
}

/// What the rules read and write. All of it is of one moment.
pub(crate) trait Rows {
    fn revision(&self) -> Revision;
    /// A number that no member has had.
    fn new_member(&mut self) -> MemberId;
    fn members(&self) -> &BTreeMap<MemberId, Known>;
    /// Puts the member, or removes it with all that belongs to its term.
    fn set_member(&mut self, id: MemberId, known: Option<Known>);
    fn add_lost(&mut self, record: MemberRecord);
    fn claim_of(&self, directory: &Directory) -> Option<(Claim, Revision)>;
    fn set_claim(&mut self, directory: &Directory, claim: Option<(Claim, Revision)>);
    /// The claim of a lost member that a later one replaced.
    fn replaced(&self, directory: &Directory) -> Option<Claim>;
    fn set_replaced(&mut self, directory: &Directory, claim: Option<Claim>);
    fn owns_some(&self, member: MemberId) -> bool;
    /// The revision grows by one, and news have the change.
    fn note(&mut self, change: Change);
}

pub(crate) fn join(rows: &mut impl Rows, join: Join) -> Result<(MemberId, Term), Refusal> {
    let mut all = rows.members().iter();
    let again = all.find(|(_, known)| known.instance == join.instance).map(|(id, known)| (*id, known.term));
    let (id, term) = match (again, join.resumes) {
        (Some(again), _) => return Ok(again),
        (None, Some((id, term))) => match rows.members().get(&id) {
            None => return Err(Refusal::NotAMember),
            Some(before) if term <= before.term => return Err(Refusal::Superseded),
            Some(_) => (id, term),
        },
        (None, None) => (rows.new_member(), Term(1)),
    };
    let Join { instance, address, temporaries, role, .. } = join;
    let known = Known { term, instance, address, temporaries, role };
    let record = known.record(id);
    rows.set_member(id, Some(known));
    rows.note(Change::Joined(record));
    Ok((id, term))
}

/// The member's lease has ended.
pub(crate) fn lose(rows: &mut impl Rows, id: MemberId) {
    if let Some(record) = rows.members().get(&id).map(|known| known.record(id)) {
        rows.add_lost(record);
    }
    rows.set_member(id, None);
    rows.note(Change::Lost(id));
}

pub(crate) fn leave(rows: &mut impl Rows, member: MemberId) -> Answer {
    if rows.owns_some(member) {
        return Answer::Refused(Refusal::StillOwns);
    }
    rows.set_member(member, None);
    rows.note(Change::Left(member));
    Answer::Left
}

pub(crate) fn claim(rows: &mut impl Rows, member: MemberId, directory: &Directory) -> Answer {
    let epoch = match rows.claim_of(directory) {
        Some((claim, _)) if claim.owner == member => claim.epoch,
        Some((claim, _)) if rows.members().contains_key(&claim.owner) => {
            return Answer::Owned { claim, revision: rows.revision() };
        }
        // (The owner's lease has ended: it has stopped before.)
        before => {
            if let Some((lost, _)) = before {
                rows.set_replaced(directory, Some(lost));
            }
            return grant(rows, member, directory);
        }
    };
    Answer::Granted { epoch, revision: rows.revision(), members: rows.members().keys().copied().collect() }
}

/// A new ownership.
pub(crate) fn grant(rows: &mut impl Rows, member: MemberId, directory: &Directory) -> Answer {
    let epoch = Epoch(rows.revision().0 + 1);
    put_claim(rows, directory, Claim { owner: member, epoch });
    Answer::Granted { epoch, revision: rows.revision(), members: rows.members().keys().copied().collect() }
}

pub(crate) fn release(rows: &mut impl Rows, claim: Claim, directory: &Directory) -> Answer {
    if rows.claim_of(directory).map(|(stands, _)| stands) != Some(claim) {
        return Answer::Refused(Refusal::NotOwner);
    }
    rows.set_claim(directory, None);
    rows.set_replaced(directory, None);
    rows.note(Change::Released(directory.clone()));
    Answer::Released(rows.revision())
}

pub(crate) fn give_up(rows: &mut impl Rows, claim: Claim, directory: &Directory) -> Answer {
    let stands = rows.claim_of(directory).map(|(stands, _)| stands) == Some(claim);
    let Some(lost) = rows.replaced(directory).filter(|_| stands) else { return release(rows, claim, directory) };
    rows.set_replaced(directory, None);
    put_claim(rows, directory, lost);
    Answer::Owned { claim: lost, revision: rows.revision() }
}

fn put_claim(rows: &mut impl Rows, directory: &Directory, claim: Claim) {
    rows.note(Change::Claimed(directory.clone(), claim));
    let at = rows.revision();
    rows.set_claim(directory, Some((claim, at)));
}
