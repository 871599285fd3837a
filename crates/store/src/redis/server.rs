//! One server, and what it can do: determined on a separate key that is removed again.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::time::{Duration, Instant};

use redis::Value;

use super::durability::{Durability, Told};
use super::failure::{Failure, Meaning};
use super::nodes::hash_tag;
use super::place::Place;
use super::records::Change;
use super::scripts::{Script, TEXTS};
use super::wire::{self, Batch, Command, Wire, array_of, bytes_of, text_of};
use crate::checksum;
use crate::object::{Abilities, When, Words};
use surgetank_types::error::{Errno, Error};
use surgetank_types::sync::{Mutex, OnceLock, PoisonError};

/// Seconds after their last use at which parts of uploads, and long values that are being sent, expire.
pub const ASIDE_SECONDS: u64 = 86_400;
/// Length of every part but the last, so that each has its offset before the others are known.
pub const PART_BYTES: u64 = 16 << 20;
/// The server's default limit, if it does not report another one (`proto-max-bulk-len`).
const VALUE_BYTES_MAX: u64 = 512 << 20;
const SETTLE_TIMEOUT: Duration = Duration::from_secs(30);

pub const NOTHING: Abilities = Abilities {
    if_absent: false,
    if_same: false,
    checksums: false,
    copies: false,
    uploads_in_parts: false,
    holds_back: false,
    part_bytes_min: PART_BYTES,
    part_bytes_max: PART_BYTES,
    parts_max: 10_000,
    put_bytes_max: VALUE_BYTES_MAX,
    copy_bytes_max: VALUE_BYTES_MAX,
    object_bytes_max: VALUE_BYTES_MAX,
    lists_any_key: true,
    key_bytes_max: 64 << 10,
    words_bytes_max: 256 << 10,
};

pub struct Known {
    pub abilities: Abilities,
    /// Whether values may carry the mark that a SET removes.
    pub marks: bool,
    pub durability: Durability,
}

pub struct Server {
    pub place: Place,
    pub wire: Wire,
    /// SHA-1 digests of the scripts, in their order.
    digests: [String; TEXTS.len()],
    known: OnceLock<Known>,
    asking: Mutex<()>,
    doubtful_until: Mutex<Option<Instant>>,
    /// When other clients' keys were last searched, and how long it took.
    pub scanned: Mutex<Option<(Instant, Duration)>>,
}

impl Server {
    pub fn new(place: Place) -> Result<Self, Error> {
        Ok(Self {
            wire: Wire::new(&place)?,
            place,
            digests: TEXTS.map(|text| redis::Script::new(text).get_hash().to_owned()),
            known: OnceLock::new(),
            asking: Mutex::default(),
            doubtful_until: Mutex::default(),
            scanned: Mutex::default(),
        })
    }

    pub fn key(&self, path: &str) -> Vec<u8> {
        [self.place.prefix.as_bytes(), path.as_bytes()].concat()
    }

    pub fn own(&self, name: &str) -> Vec<u8> {
        self.key(&format!("//surgetank/{name}"))
    }

    /// Key of a long value before it has its name.
    pub fn beside(&self, id: &str) -> Vec<u8> {
        self.own(&format!("bytes/{id}"))
    }

    /// The command that runs a script. (The two keys that every script needs are named as keys, by which a server of a cluster
    /// redirects. Only those two: an absent key could have moved already while a slot moves.)
    pub fn script(&self, script: Script) -> Command {
        let command = wire::command("EVALSHA").arg(self.digests[script as usize].as_bytes()).number(2);
        let command = ["records", "index"].iter().fold(command, |command, name| command.arg(&self.own(name)));
        command.arg(self.place.prefix.as_bytes())
    }

    /// A new version of a file.
    pub fn new_change(&self, _: When<'_>, crc64nvme: Option<u64>, words: Option<&Words>) -> io::Result<Change> {
        let marks = self.known().map_err(|why| self.report("", why))?.marks;
        Ok(Change::new(random()?, marks, crc64nvme, words))
    }

    /// The meaning of a script's answer.
    pub fn done(&self, word: &str, etag: &str) -> Result<String, Failure> {
        match word {
            "ok" | "done" => Ok(etag.to_owned()),
            "condition" => Err(Failure::condition()),
            "missing" => Err(Failure::ours(Errno::NOENT, "no such key")),
            "other" => Err(Failure::ours(Errno::EXIST, "the key holds something else than a value")),
            "size" => {
                Err(Failure { meaning: Meaning::Checksum, ..Failure::ours(Errno::IO, "other bytes have arrived") })
            }
            _ => Err(Failure::garbled()),
        }
    }

    /// The error for the caller: the errno; the server's message goes to the log.
    pub fn report(&self, key: &str, why: Failure) -> io::Error {
        if why.meaning != Meaning::Condition && !why.is(Errno::NOENT) {
            tracing::warn!("{}: {key}: {why}", self.place);
        }
        why.into_io(key)
    }

    /// Asked once; a failure to ask is not cached.
    pub fn known(&self) -> Result<&Known, Failure> {
        if let Some(known) = self.known.get() {
            return Ok(known);
        }
        let _one = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = self.known.get() {
            return Ok(known);
        }
        let (told, value_bytes_max) = self.told()?;
        // The server evicts expiring keys first, so values must not expire.
        let marks = told.policy.as_deref().is_some_and(|policy| !policy.starts_with("volatile-"));
        self.try_out(marks)?;
        let abilities = Abilities {
            if_absent: true,
            if_same: true,
            copies: true,
            uploads_in_parts: true,
            put_bytes_max: value_bytes_max,
            copy_bytes_max: value_bytes_max,
            object_bytes_max: value_bytes_max,
            key_bytes_max: NOTHING.key_bytes_max.saturating_sub(self.place.prefix.len()),
            ..NOTHING
        };
        let known = Known { abilities, marks, durability: Durability::of(&told) };
        tracing::debug!("{}: {abilities:?}, marks: {marks}, {}", self.place, known.durability);
        Ok(self.known.get_or_init(|| known))
    }

    fn told(&self) -> Result<(Told, u64), Failure> {
        let mut told = Told::default();
        // In a cluster the server that has the store's keys.
        match self.wire.ask(&Batch::of(wire::command("EXISTS").arg(&self.own("records")))) {
            Err(why) if why.code != "NOPERM" => return Err(why),
            _ => {}
        }
        let info = match self.wire.ask(&Batch::of(wire::command("INFO"))) {
            Ok(mut answers) => text_of(answers.pop().unwrap_or_default())?,
            Err(why) if why.code == "NOPERM" => String::new(),
            Err(why) => return Err(why),
        };
        let field = |name: &str| info.lines().find_map(|line| line.trim_end().strip_prefix(name)?.strip_prefix(':'));
        if field("role") == Some("slave") {
            return Err(Failure::refused("READONLY", "it is a replica"));
        }
        let is_cluster = field("cluster_enabled") == Some("1");
        if !is_cluster && self.place.nodes.len() > 1 {
            return Err(Failure::ours(
                Errno::INVAL,
                "several servers are named, and this one does not belong to a cluster",
            ));
        }
        if is_cluster {
            if hash_tag(&self.place.prefix).is_none() {
                return Err(Failure::refused(
                    "CROSSSLOT",
                    "the keys of a cluster's servers have to have something in common",
                ));
            }
            let nodes = self.wire.ask(&Batch::of(wire::command("CLUSTER").arg(b"NODES")));
            self.wire
                .nodes
                .learn(&nodes.and_then(|mut answers| text_of(answers.pop().unwrap_or_default())).unwrap_or_default());
        }
        told.has_replicas = has_replicas(&info);
        told.logs = field("aof_enabled").map(|value| value == "1");
        told.maxmemory = field("maxmemory").and_then(|value| value.parse().ok());
        told.policy = field("maxmemory_policy").map(str::to_owned);
        let config = |name: &str| {
            let asked = self.wire.ask(&Batch::of(wire::command("CONFIG").arg(b"GET").arg(name.as_bytes())));
            let pair = array_of(asked.ok()?.pop()?).ok()?;
            text_of(pair.into_iter().nth(1)?).ok()
        };
        told.fsync = config("appendfsync");
        told.save = config("save");
        let waits = self.wire.ask(&Batch::of(wire::command("COMMAND").arg(b"INFO").arg(b"WAITAOF")));
        let waits = waits.ok().and_then(|mut answers| array_of(answers.pop()?).ok()?.pop());
        told.waits = matches!(waits, Some(Value::Array(_)));
        let value_bytes_max = config("proto-max-bulk-len").and_then(|value| value.parse().ok());
        Ok((told, value_bytes_max.unwrap_or(VALUE_BYTES_MAX)))
    }

    fn try_out(&self, marks: bool) -> Result<(), Failure> {
        let name = format!(".surgetank-tmp-probe-{:016x}", RandomState::new().hash_one(0));
        let other = format!("{name}-copy");
        let tried = self.try_on(&name, &other, marks);
        // Whatever the result, nothing of it stays.
        let delete = |name: &str| {
            let wrong_version = |why: &Failure| why.is(Errno::OPNOTSUPP);
            let deleted = self.wire.ask(&Batch::of(self.script(Script::Delete).arg(name.as_bytes())));
            if tried.as_ref().is_err_and(wrong_version) { Ok(()) } else { deleted.map(drop) }
        };
        let removed = delete(&name).and_then(|()| delete(&other));
        tried?;
        removed
    }

    fn try_on(&self, name: &str, other: &str, marks: bool) -> Result<(), Failure> {
        const CONTENT: &[u8] = b"surgetank asks what this server can do";
        let sum = checksum::of_bytes(CONTENT);
        let new = || Ok(Change::new(random().map_err(|_| Failure::garbled())?, marks, Some(sum), None));
        let strange = || Failure::ours(Errno::OPNOTSUPP, "the server does not do what Redis does");
        let ask = |script: Command| -> Result<String, Failure> {
            text_of(self.wire.ask(&Batch::of(script))?.pop().unwrap_or_default())
        };
        let put = |change: &Change, when| {
            let script = change.fill(self.script(Script::Put).arg(name.as_bytes()), when);
            ask(script.arg(CONTENT))
        };
        let change: Change = new()?;
        let first = put(&change, When::Absent)?;
        let again = put(&change, When::Absent)?;
        let no = put(&new()?, When::Absent)?;
        let copy: Change = new()?;
        let script = self.script(Script::Copy).arg(name.as_bytes()).arg(change.etag.as_bytes()).arg(other.as_bytes());
        let copied = ask(script.arg(copy.etag.as_bytes()).arg(copy.mark.as_bytes()).arg(b"")).map_err(|why| {
            // Since 6.2.
            if why.message.contains("nknown") { strange() } else { why }
        })?;
        let words = [first, again, no, copied];
        if words != ["ok", "done", "condition", "ok"] {
            return Err(strange());
        }
        // The same bytes by another client.
        let set = wire::command("SET").arg(&self.key(name)).arg(CONTENT);
        let answers = self.wire.ask(&Batch::of(set).and(self.script(Script::Look).arg(name.as_bytes())))?;
        let seen = bytes_of(answers.into_iter().nth(1).unwrap_or_default())?;
        if marks && seen.starts_with(change.etag.as_bytes()) {
            return Err(strange());
        }
        Ok(())
    }

    /// Returns when what was acknowledged is on the server's disk, if the server can be asked for that, and on a replica, if
    /// there is one, because the next server of the key was a replica.
    pub fn settle(&self) -> Result<(), Failure> {
        let durability = &self.known()?.durability;
        if durability.waits() {
            let wait = wire::command("WAITAOF").number(1).number(0);
            let answer = self.after_a_write(wait, SETTLE_TIMEOUT)?;
            if !matches!(array_of(answer)?.first(), Some(Value::Int(1..))) {
                return Err(Failure::ours(Errno::TIMEDOUT, "the server does not get its log to its disk"));
            }
        }
        if durability.is_replicated() || self.wire.nodes.is_cluster() {
            self.settle_replica()?;
        }
        Ok(())
    }

    fn settle_replica(&self) -> Result<(), Failure> {
        for timeout in [SETTLE_TIMEOUT / 30, SETTLE_TIMEOUT] {
            let info = match self.wire.ask(&Batch::of(wire::command("INFO").arg(b"replication"))) {
                // The user may not ask: nothing was promised either (`Durability::Untold`).
                Err(why) if why.code == "NOPERM" => return Ok(()),
                told => told?.pop().unwrap_or_default(),
            };
            let alone = !has_replicas(&text_of(info)?);
            let wait = wire::command("WAIT").number(u64::from(!alone));
            let answer = self.after_a_write(wait, timeout)?;
            if alone {
                tracing::warn!("{}: no replica is connected: only this server has what it acknowledges", self.place);
                return Ok(());
            }
            if matches!(answer, Value::Int(1..)) {
                return Ok(());
            }
        }
        Err(Failure::ours(Errno::TIMEDOUT, "the server's replica does not follow it"))
    }

    /// What this server has tells nothing about what another one acknowledged, or itself before a restart. Callers that relied
    /// on that get an error for a while: each of them comes here once.
    fn doubt(&self, run: &str) -> Result<(), Failure> {
        let mut until = self.doubtful_until.lock().unwrap_or_else(PoisonError::into_inner);
        if self.wire.have_others_acknowledged(run) {
            *until = Some(surgetank_types::clock::tick() + self.place.limits.doubt);
        }
        match *until {
            Some(until) if surgetank_types::clock::tick() < until => Err(Failure::ours(
                Errno::HOSTDOWN,
                "another server has taken over, and may not have all that was acknowledged",
            )),
            _ => Ok(()),
        }
    }

    /// Waits for what its own connection wrote, and thereby for everything before.
    fn after_a_write(&self, wait: Command, timeout: Duration) -> Result<Value, Failure> {
        let write = wire::command("SET").arg(&self.own("settled")).arg(b"").arg(b"EX").number(ASIDE_SECONDS);
        let millis = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        let (answers, run) = self.wire.ask_whom(&Batch::of(write).and(wait.number(millis)))?;
        self.doubt(&run)?;
        answers.into_iter().nth(1).ok_or_else(Failure::garbled)
    }
}

/// Whether any replica is up to date.
fn has_replicas(info: &str) -> bool {
    info.lines().any(|line| line.starts_with("slave") && line.contains("state=online"))
}

/// Random, so that it is never repeated or guessed.
pub fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(u64::from_ne_bytes(bytes))
}
