//! The registry's rows as keys and values, and a draft of their changes.
//!
//! - `h`: the head. Each change of another row changes it too, except `a`. So an exchange that guards the head sees and
//!   changes all rows as they were when it read them.
//! - `a` and a member: what its last renewal wrote, in which no two renewals are equal.
//! - `m`, `l`, `n` and a member: its record; that of a lost member; its last change and the answer.
//! - `c`, `r` and a directory: its claim; the lost member's claim that this one replaced.
//! - `x` and a revision: the change.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::exchange::{Exchanged, Key, Read, Write};
use crate::registry::{Answer, Change, Claim, Everything, MemberRecord};
use crate::rules::{CHANGES_MAX, Known, Rows};
use crate::{Directory, MemberId, Revision, Term};

/// The form of the rows.
pub(super) const FORM: u16 = 1;

/// What all rows have in common.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Head {
    pub form: u16,
    /// Random, one for each pool. The store has it, too.
    pub pool: [u8; 16],
    /// Only a process with the pool's secret knows it.
    pub proof: [u8; 32],
    pub lease: Duration,
    pub revision: Revision,
    /// Changes up to here are not remembered one by one.
    pub forgotten: Revision,
    /// In the first generation.
    pub next_member: u32,
    /// No agent joins any more.
    pub ended: bool,
    /// Grows when writes may have been lost.
    pub generation: u64,
    /// The history of the server's data to which the generation belongs.
    pub server: Vec<u8>,
    /// Members assert what they have, and nothing else changes.
    pub quiet: bool,
    /// The server has had replicas in this generation: a renewal counts only if one of them has it.
    pub replicated: bool,
}

impl Head {
    /// Which generation it is. (Two servers may count to the same number.)
    pub fn era(&self) -> Era {
        Era(self.generation, self.server.clone())
    }
}

/// A generation.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Era(pub u64, pub Vec<u8>);

/// What a renewal writes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Alive {
    pub term: Term,
    pub instance: [u8; 16],
    pub era: Era,
    pub counter: u64,
}

/// The last change that a member made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Last {
    /// (A server that forgets may bring back the row of an earlier term.)
    pub term: Term,
    pub number: u64,
    pub answer: Answer,
}

pub(super) const HEAD: &[u8] = b"h";

pub(super) fn of_member(kind: u8, id: MemberId) -> Key {
    [&[kind][..], &id.0.to_be_bytes()].concat()
}

pub(super) fn of_directory(kind: u8, directory: &Directory) -> Key {
    [&[kind], &*directory.0].concat()
}

fn of_revision(revision: Revision) -> Key {
    [&b"x"[..], &revision.0.to_be_bytes()].concat()
}

/// All keys of a kind.
pub(super) fn all(kind: u8) -> Read {
    Read::Range(vec![kind], vec![kind + 1])
}

/// The changes after a revision.
pub(super) fn changes_after(revision: Revision) -> Read {
    Read::Range(of_revision(Revision(revision.0.saturating_add(1))), vec![b'x' + 1])
}

/// All rows.
pub(super) fn everything() -> Write {
    Write::DeleteRange(vec![b'a'], vec![b'z'])
}

/// No change is remembered.
pub(super) fn no_changes() -> Write {
    Write::DeleteRange(vec![b'x'], vec![b'x' + 1])
}

pub(super) fn encode(value: &impl Serialize) -> Vec<u8> {
    // (Fails only for types that have no length.)
    postcard::to_stdvec(value).unwrap_or_default()
}

pub(super) fn decode<T: DeserializeOwned>(value: &[u8]) -> Option<T> {
    postcard::from_bytes(value).ok()
}

/// What an exchange read. A row that cannot be read counts as absent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Snapshot<'a>(pub &'a Exchanged);

impl<'a> Snapshot<'a> {
    pub fn value(&self, key: &[u8]) -> Option<&'a Vec<u8>> {
        self.0.rows.get(key)
    }

    pub fn row<T: DeserializeOwned>(&self, key: &[u8]) -> Option<T> {
        self.value(key).and_then(|value| decode(value))
    }

    fn of_kind<T: DeserializeOwned>(&self, kind: u8) -> impl Iterator<Item = (&'a [u8], T)> + use<'a, T> {
        let rows = self.0.rows.range(vec![kind]..vec![kind + 1]);
        rows.filter_map(|(key, value)| Some((&key[1..], decode(value)?)))
    }

    fn of_members<T: DeserializeOwned>(&self, kind: u8) -> impl Iterator<Item = (MemberId, T)> + use<'a, T> {
        self.of_kind(kind).filter_map(|(key, row)| Some((MemberId(u32::from_be_bytes(key.try_into().ok()?)), row)))
    }

    pub fn members(&self) -> BTreeMap<MemberId, Known> {
        self.of_members(b'm').collect()
    }

    pub fn alive(&self, id: MemberId) -> Option<Alive> {
        self.row(&of_member(b'a', id))
    }

    pub fn lost(&self) -> BTreeMap<MemberId, MemberRecord> {
        self.of_members(b'l').collect()
    }

    pub fn claims(&self) -> impl Iterator<Item = (Directory, (Claim, Revision))> + use<'a> {
        self.of_kind(b'c').map(|(key, claim)| (Directory(key.into()), claim))
    }

    pub fn replaced(&self) -> BTreeMap<Directory, Claim> {
        self.of_kind(b'r').map(|(key, claim)| (Directory(key.into()), claim)).collect()
    }

    pub fn changes(&self, after: Revision) -> Vec<(Revision, Change)> {
        let changes = self.of_kind(b'x');
        let changes = changes.filter_map(|(key, row)| Some((Revision(u64::from_be_bytes(key.try_into().ok()?)), row)));
        changes.filter(|(revision, _)| *revision > after).collect()
    }

    pub fn everything(&self, revision: Revision) -> Everything {
        Everything {
            revision,
            members: self.members().iter().map(|(id, known)| known.record(*id)).collect(),
            lost: self.lost().into_values().collect(),
            claims: self.claims().map(|(directory, (claim, at))| (directory, claim, at)).collect(),
        }
    }
}

/// Changes of rows that are to be written in one exchange. It reads what the exchange before has read.
pub(super) struct Draft<'a> {
    pub head: Head,
    rows: Snapshot<'a>,
    members: BTreeMap<MemberId, Known>,
    pub writes: Vec<Write>,
    /// By chance.
    pub chance: u64,
}

/// Members that joined in writes that were lost may have any number below these. So numbers are by chance from then on.
const SCATTERED: (u32, u32) = (1 << 10, 1 << 16);

impl<'a> Draft<'a> {
    pub fn new(head: &Head, rows: Snapshot<'a>) -> Self {
        Self { head: head.clone(), members: rows.members(), rows, writes: Vec::new(), chance: 0 }
    }

    pub fn put(&mut self, key: Key, value: &impl Serialize) {
        self.writes.push(Write::Put(key, encode(value)));
    }

    fn set(&mut self, key: Key, value: Option<&impl Serialize>) {
        match value {
            Some(value) => self.put(key, value),
            None => self.writes.push(Write::Delete(key)),
        }
    }

    /// The head too, which differs from the one before.
    pub fn finish(mut self) -> Vec<Write> {
        self.writes.push(Write::Put(HEAD.to_vec(), encode(&self.head)));
        self.writes
    }
}

impl Rows for Draft<'_> {
    fn revision(&self) -> Revision {
        self.head.revision
    }

    fn new_member(&mut self) -> MemberId {
        if self.head.generation > 1 {
            let (lost, from, many) = (self.rows.lost(), SCATTERED.0, u64::from(SCATTERED.1 - SCATTERED.0));
            let id = |nth| MemberId(from + u32::try_from(self.chance.wrapping_add(nth) % many).unwrap_or(0));
            let is_free = |id: &MemberId| !self.members.contains_key(id) && !lost.contains_key(id);
            return (0..many).map(id).find(is_free).unwrap_or(MemberId(from));
        }
        let id = MemberId(self.head.next_member);
        self.head.next_member += 1;
        id
    }

    fn members(&self) -> &BTreeMap<MemberId, Known> {
        &self.members
    }

    /// (Who puts a member puts its `a` row, too.)
    fn set_member(&mut self, id: MemberId, known: Option<Known>) {
        self.set(of_member(b'm', id), known.as_ref());
        self.writes.push(Write::Delete(of_member(b'n', id)));
        if let Some(known) = known {
            self.members.insert(id, known);
        } else {
            self.writes.push(Write::Delete(of_member(b'a', id)));
            self.members.remove(&id);
        }
    }

    fn add_lost(&mut self, record: MemberRecord) {
        self.put(of_member(b'l', record.id), &record);
    }

    fn claim_of(&self, directory: &Directory) -> Option<(Claim, Revision)> {
        self.rows.row(&of_directory(b'c', directory))
    }

    fn set_claim(&mut self, directory: &Directory, claim: Option<(Claim, Revision)>) {
        self.set(of_directory(b'c', directory), claim.as_ref());
    }

    fn replaced(&self, directory: &Directory) -> Option<Claim> {
        self.rows.row(&of_directory(b'r', directory))
    }

    fn set_replaced(&mut self, directory: &Directory, claim: Option<Claim>) {
        self.set(of_directory(b'r', directory), claim.as_ref());
    }

    fn owns_some(&self, member: MemberId) -> bool {
        self.rows.claims().any(|(_, (claim, _))| claim.owner == member)
    }

    fn note(&mut self, change: Change) {
        self.head.revision.0 += 1;
        self.put(of_revision(self.head.revision), &change);
        if self.head.revision.0 - self.head.forgotten.0 > CHANGES_MAX as u64 {
            self.head.forgotten.0 += 1;
            self.writes.push(Write::Delete(of_revision(self.head.forgotten)));
        }
    }
}
