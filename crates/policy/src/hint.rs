//! Hints: what a workflow tells about its files while it runs, as an attribute of a file or directory
//! (`user.surgetank.hint.NAME`) or by `surgetank hint`. A hint advises, a rule decides: a hint is stronger than the built-in
//! rules and weaker than every written rule.
//!
//! Names and values are those of rules. The names of WOSS (S. Al-Kiswany et al., "A cross-layer optimized storage system for
//! workflow applications", Future Generation Computer Systems 75, 2017) are accepted too. A WOSS hint with a meaning here
//! gets that meaning; the others are stored, shown, and have no effect (`docs/hints.md` lists which).
//!
//! A hint of another name may be for another program. It is kept and shown, and has no effect.
//!
//! The danger that it avoids: advice that is silently ignored. A wrong value, or a name that is nearly a known one, is refused,
//! with what is allowed. The others are reported ([`Hints::unknown`]).

use std::collections::BTreeMap;

pub use crate::words::Collocate;
use crate::words::quantity::size_bytes;
use crate::words::{
    REPLICAS_MAX, ReplicasAt, Timing, collocate, misspelt, mode, nearest, one_of, replicas, replicas_at, timing,
};
use surgetank_types::model::Mode;
use surgetank_types::sync::Arc;

/// Prefix of a hint's name as an extended attribute of a file.
pub const ATTRIBUTE_PREFIX: &[u8] = b"user.surgetank.hint.";

/// Name of a hint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Name {
    /// What happens to the file after it is written.
    Mode,
    /// When the drain starts with it.
    Timing,
    /// Its expected size.
    Size,
    /// The tier to prefer.
    Tier,
    /// Whether it is not evicted.
    Pin,
    /// Whether it is copied to a tier before its use.
    Prefetch,
    /// The position of its next read in the workflow's order, or `never`.
    NextRead,
    /// On how many members of a pool it is until the store has it.
    Replicas,
    /// Whether its close waits for that.
    ReplicasAt,
    /// With which files it is on one member of a pool.
    Collocate,
    /// WOSS: data placement.
    Dp,
    /// WOSS: the number of copies.
    Replication,
    /// WOSS: when a copy counts as made.
    ReplicationSemantics,
    /// WOSS: the size of a client's cache.
    CacheSize,
    /// WOSS: the size of a block.
    BlockSize,
}

/// All hints, each with its name as a user writes it.
pub const NAMES: [(&str, Name); 15] = [
    ("mode", Name::Mode),
    ("timing", Name::Timing),
    ("size", Name::Size),
    ("tier", Name::Tier),
    ("pin", Name::Pin),
    ("prefetch", Name::Prefetch),
    ("next_read", Name::NextRead),
    ("replicas", Name::Replicas),
    ("replicas_at", Name::ReplicasAt),
    ("collocate", Name::Collocate),
    ("DP", Name::Dp),
    ("Replication", Name::Replication),
    ("ReplicationSemantics", Name::ReplicationSemantics),
    ("CacheSize", Name::CacheSize),
    ("BlockSize", Name::BlockSize),
];

impl Name {
    /// The name as a user writes it.
    pub fn as_str(self) -> &'static str {
        NAMES.iter().find(|(_, name)| *name == self).map_or("", |(text, _)| text)
    }

    /// The hint of this name. The error lists the known names.
    pub fn parse(text: &str) -> Result<Self, String> {
        if let Some((_, name)) = NAMES.iter().find(|(known, _)| *known == text) {
            return Ok(*name);
        }
        let known = NAMES.map(|(known, _)| known);
        let near = misspelt(text, known.into_iter())
            .or_else(|| nearest(text, known.into_iter()))
            .map_or_else(String::new, |near| format!("did you mean '{near}'? "));
        Err(format!("there is no hint '{text}'; {near}known are {}", known.join(", ")))
    }
}

/// What a name means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Understood {
    /// It has a meaning here.
    Known(Name),
    /// It is kept.
    Unknown,
}

/// A name and a value that are not known have so many bytes at most, and a file has so many.
const UNKNOWN_NAME_BYTES_MAX: usize = 64;
const UNKNOWN_VALUE_BYTES_MAX: usize = 1024;
const UNKNOWN_MAX: usize = 32;

impl Understood {
    /// The error is a sentence for the user: the name is nearly that of a hint, or cannot be kept.
    pub fn of(text: &str) -> Result<Self, String> {
        let known = match Name::parse(text) {
            Ok(name) => return Ok(Self::Known(name)),
            Err(why) => why,
        };
        if misspelt(text, NAMES.iter().map(|(known, _)| *known)).is_some() {
            return Err(known);
        }
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
        if text.is_empty() || text.len() > UNKNOWN_NAME_BYTES_MAX || !text.bytes().all(is_name) {
            return Err(format!(
                "{known}; another name may have 1 to {UNKNOWN_NAME_BYTES_MAX} letters, digits, '_', '.' and '-'"
            ));
        }
        Ok(Self::Unknown)
    }
}

/// The combined meaning of hints, as a rule would set it. `None` means that no hint sets the attribute.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Advice {
    /// What happens to the file after it is written.
    pub mode: Option<Mode>,
    /// When the drain starts with it.
    pub timing: Option<Timing>,
    /// Its expected size, in bytes.
    pub size_bytes: Option<u64>,
    /// Name of the tier to prefer.
    pub tier: Option<Arc<str>>,
    /// Whether it is not evicted.
    pub pin: Option<bool>,
    /// Whether it is copied to a tier before its use.
    pub prefetch: Option<bool>,
    /// Its next read.
    pub next_read: Option<NextRead>,
    /// On how many members of a pool it is until the store has it.
    pub replicas: Option<u32>,
    /// When it is there.
    pub replicas_at: Option<ReplicasAt>,
    /// On which member its content is.
    pub collocate: Option<Collocate>,
}

/// When a file will be read again, as the workflow's graph tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum NextRead {
    /// At this position of an order over all files: smaller numbers are read sooner.
    At(u64),
    /// No program will read it again.
    Never,
}

impl Advice {
    /// Takes from `weaker` what is not set here.
    pub fn or(&mut self, weaker: &Self) {
        self.mode = self.mode.or(weaker.mode);
        self.timing = self.timing.or(weaker.timing);
        self.size_bytes = self.size_bytes.or(weaker.size_bytes);
        if self.tier.is_none() {
            self.tier.clone_from(&weaker.tier);
        }
        self.pin = self.pin.or(weaker.pin);
        self.prefetch = self.prefetch.or(weaker.prefetch);
        self.next_read = self.next_read.or(weaker.next_read);
        self.replicas = self.replicas.or(weaker.replicas);
        self.replicas_at = self.replicas_at.or(weaker.replicas_at);
        if self.collocate.is_none() {
            self.collocate.clone_from(&weaker.collocate);
        }
    }

    /// Adds one hint. The error names what is wrong with the value, and what is allowed.
    fn hear(&mut self, name: Name, value: &str) -> Result<(), String> {
        let truth = |value| one_of(value, &[("true", true), ("false", false)]);
        match name {
            Name::Mode => self.mode = Some(mode(value)?),
            Name::Timing => self.timing = Some(timing(value)?),
            Name::Size => self.size_bytes = Some(size_bytes(value)?),
            Name::Tier if value.is_empty() => return Err("the name of a tier is expected".to_owned()),
            Name::Tier => self.tier = Some(value.into()),
            Name::Pin => self.pin = Some(truth(value)?),
            Name::Prefetch => self.prefetch = Some(truth(value)?),
            Name::NextRead => self.next_read = Some(next_read(value)?),
            Name::Replicas => self.replicas = Some(replicas(value)?),
            Name::ReplicasAt => self.replicas_at = Some(replicas_at(value)?),
            Name::Collocate => self.collocate = Some(collocate(value)?),
            Name::Dp => {
                let placed = placement(value)?;
                self.collocate = self.collocate.take().or(placed);
            }
            Name::Replication => match value.parse::<u32>() {
                Ok(0) | Err(_) => return Err(format!("'{value}' is not a number of copies, 1 or more")),
                // On one node the second copy is the store's.
                Ok(copies) => {
                    self.mode = self.mode.or((copies > 1).then_some(Mode::Copy));
                    self.replicas = self.replicas.or(Some(copies.min(REPLICAS_MAX)));
                }
            },
            Name::ReplicationSemantics => {
                let when = [("optimistic", ReplicasAt::Later), ("pessimistic", ReplicasAt::Close)];
                self.replicas_at = self.replicas_at.or(Some(one_of(value, &when)?));
            }
            Name::CacheSize | Name::BlockSize => drop(size_bytes(value)?),
        }
        Ok(())
    }
}

fn next_read(value: &str) -> Result<NextRead, String> {
    match value {
        "never" => Ok(NextRead::Never),
        _ => value.parse().map(NextRead::At).map_err(|_| format!("'{value}' is neither a whole number nor 'never'")),
    }
}

/// WOSS's data placement. (A group of any name, also `local`.)
fn placement(value: &str) -> Result<Option<Collocate>, String> {
    let (pattern, of) = value.split_once('|').map_or((value, None), |(pattern, of)| (pattern, Some(of.trim())));
    match (pattern.trim().to_ascii_lowercase().as_str(), of) {
        ("local", None) => Ok(Some(Collocate::Local)),
        ("collocation", Some("local")) => Ok(Some(Collocate::With("local".into()))),
        ("collocation", Some(group)) if !group.is_empty() => collocate(group).map(Some),
        ("scatter", Some(blocks)) if blocks.parse::<u64>().is_ok_and(|blocks| blocks > 0) => Ok(None),
        _ => Err(format!("'{value}' is none of local, collocation|GROUP, scatter|BLOCKS")),
    }
}

/// The hints of one file, directory or path, with their values as the user wrote them, and their combined meaning.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Hints {
    given: BTreeMap<Name, Box<str>>,
    /// Those without a meaning here.
    unknown: BTreeMap<Box<str>, Box<str>>,
    advice: Advice,
}

impl Hints {
    /// Sets one hint. A refused hint changes nothing; the error is a sentence for the user who gave it.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let name = match Understood::of(name)? {
            Understood::Known(name) => name,
            Understood::Unknown if value.len() > UNKNOWN_VALUE_BYTES_MAX => {
                return Err(format!("{name}: a value that is not known has at most {UNKNOWN_VALUE_BYTES_MAX} bytes"));
            }
            Understood::Unknown if self.unknown.len() >= UNKNOWN_MAX && !self.unknown.contains_key(name) => {
                return Err(format!("{name}: a file has at most {UNKNOWN_MAX} hints that are not known"));
            }
            Understood::Unknown => {
                self.unknown.insert(name.into(), value.into());
                return Ok(());
            }
        };
        Advice::default().hear(name, value).map_err(|why| format!("{}: {why}", name.as_str()))?;
        self.given.insert(name, value.into());
        self.settle();
        Ok(())
    }

    /// From recorded hints. A value of another version of Surgetank that this one does not understand is left out.
    pub fn of_texts<'a, 'b>(texts: impl Iterator<Item = (&'a str, &'b str)>) -> Self {
        let mut hints = Self::default();
        for (name, value) in texts {
            if Name::parse(name).is_err() {
                hints.unknown.insert(name.into(), value.into());
            } else if let Err(why) = hints.set(name, value) {
                tracing::warn!(%why, "a recorded hint is left out");
            }
        }
        hints
    }

    /// Removes a hint. Returns false if it was not set.
    pub fn take_back(&mut self, name: &str) -> bool {
        let there = match Name::parse(name) {
            Ok(name) => self.given.remove(&name).is_some(),
            Err(_) => self.unknown.remove(name).is_some(),
        };
        self.settle();
        there
    }

    /// Has one of them a meaning here?
    pub fn has_effect(&self) -> bool {
        !self.given.is_empty()
    }

    /// Can all of `newer` be set? The error is a sentence for the user.
    pub fn has_room_for(&self, newer: &Self) -> Result<(), String> {
        let more = newer.unknown.keys().filter(|name| !self.unknown.contains_key(*name)).count();
        if self.unknown.len() + more > UNKNOWN_MAX && more > 0 {
            return Err(format!("a file has at most {UNKNOWN_MAX} hints that are not known"));
        }
        Ok(())
    }

    /// Sets all hints of `newer`, in place of the present ones. ([`Self::has_room_for`] says whether it can.)
    pub fn update(&mut self, newer: &Self) {
        self.given.extend(newer.given.iter().map(|(name, value)| (*name, value.clone())));
        self.unknown.extend(newer.unknown.iter().map(|(name, value)| (name.clone(), value.clone())));
        self.settle();
    }

    fn settle(&mut self) {
        self.advice = Advice::default();
        for (name, value) in &self.given {
            // The value was checked when it was set.
            let _ = self.advice.hear(*name, value);
        }
    }

    /// The combined meaning of the hints.
    pub fn advice(&self) -> &Advice {
        &self.advice
    }

    /// The value of a hint, as the user wrote it.
    pub fn value(&self, name: &str) -> Option<&str> {
        match Name::parse(name) {
            Ok(name) => self.given.get(&name).map(AsRef::as_ref),
            Err(_) => self.unknown.get(name).map(AsRef::as_ref),
        }
    }

    /// The names that have no meaning here.
    pub fn unknown(&self) -> impl Iterator<Item = &str> {
        self.unknown.keys().map(AsRef::as_ref)
    }

    /// Whether no hint is set.
    pub fn is_empty(&self) -> bool {
        self.given.is_empty() && self.unknown.is_empty()
    }

    /// All hints: name and value, as the user wrote them.
    pub fn texts(&self) -> impl Iterator<Item = (&str, &str)> {
        let known = self.given.iter().map(|(name, value)| (name.as_str(), value.as_ref()));
        known.chain(self.unknown.iter().map(|(name, value)| (name.as_ref(), value.as_ref())))
    }
}

#[cfg(test)]
mod tests;
