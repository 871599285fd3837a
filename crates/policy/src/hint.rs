//! Hints: what a workflow knows of its files, told while it runs: as an attribute of a file or directory
//! (`user.surgetank.hint.NAME`) or by `surgetank hint`. A hint advises, a rule decides: it is stronger than what is built in,
//! and weaker than every rule that somebody wrote ([`crate::rule`]).
//!
//! Names and values are those of rules. The names of WOSS are accepted beside them: what means something on one node is
//! taken for that, the rest is remembered, shown, and has no effect (`docs/hints.md` says of each which).
//!
//! Danger avoided: advice that is silently ignored. What is not understood is refused, with what would be.

use std::collections::BTreeMap;

use crate::config::Timing;
use crate::config::key::{mode, nearest, one_of};
use crate::config::quantity::size_bytes;
use surgetank_types::model::Mode;
use surgetank_types::sync::Arc;

/// In front of a hint's name where it is an attribute of a file.
pub const ATTRIBUTE_PREFIX: &[u8] = b"user.surgetank.hint.";

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Name {
    Mode,
    Timing,
    Size,
    Tier,
    Pin,
    Prefetch,
    NextRead,
    // WOSS's.
    Dp,
    Replication,
    ReplicationSemantics,
    CacheSize,
    BlockSize,
}

pub const NAMES: [(&str, Name); 12] = [
    ("mode", Name::Mode),
    ("timing", Name::Timing),
    ("size", Name::Size),
    ("tier", Name::Tier),
    ("pin", Name::Pin),
    ("prefetch", Name::Prefetch),
    ("next_read", Name::NextRead),
    ("DP", Name::Dp),
    ("Replication", Name::Replication),
    ("ReplicationSemantics", Name::ReplicationSemantics),
    ("CacheSize", Name::CacheSize),
    ("BlockSize", Name::BlockSize),
];

impl Name {
    pub fn as_str(self) -> &'static str {
        NAMES.iter().find(|(_, name)| *name == self).map_or("", |(text, _)| text)
    }

    /// The error says what is known instead.
    pub fn parse(text: &str) -> Result<Self, String> {
        if let Some((_, name)) = NAMES.iter().find(|(known, _)| *known == text) {
            return Ok(*name);
        }
        let known = NAMES.map(|(known, _)| known);
        let near = nearest(text, known.into_iter()).map_or_else(String::new, |near| format!("did you mean '{near}'? "));
        Err(format!("there is no hint '{text}'; {near}known are {}", known.join(", ")))
    }
}

/// What hints come to, in the words of a rule.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Advice {
    pub mode: Option<Mode>,
    pub timing: Option<Timing>,
    pub size_bytes: Option<u64>,
    /// Name of the tier to prefer.
    pub tier: Option<Arc<str>>,
    pub pin: Option<bool>,
    pub prefetch: Option<bool>,
    pub next_read: Option<NextRead>,
}

/// When a file will be read again, as who knows the workflow sees it: in some order that is the same for all files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum NextRead {
    /// Sooner than what has a larger number.
    At(u64),
    /// Nobody will.
    Never,
}

impl Advice {
    /// What is not said here is taken from `weaker`.
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
    }

    /// Takes up one hint. The error says what is wrong with the value, and what is allowed.
    fn hear(&mut self, name: Name, value: &str) -> Result<(), String> {
        let truth = |value| one_of(value, &[("true", true), ("false", false)]);
        match name {
            Name::Mode => self.mode = Some(mode(value)?),
            Name::Timing => self.timing = Some(one_of(value, &[("soon", Timing::Soon), ("last", Timing::Last)])?),
            Name::Size => self.size_bytes = Some(size_bytes(value)?),
            Name::Tier if value.is_empty() => return Err("the name of a tier is expected".to_owned()),
            Name::Tier => self.tier = Some(value.into()),
            Name::Pin => self.pin = Some(truth(value)?),
            Name::Prefetch => self.prefetch = Some(truth(value)?),
            Name::NextRead => self.next_read = Some(next_read(value)?),
            Name::Dp => placement(value)?,
            Name::Replication => match value.parse::<u32>() {
                Ok(0) | Err(_) => return Err(format!("'{value}' is not a number of copies, 1 or more")),
                // On one node a second copy is the store's.
                Ok(copies) if copies > 1 => self.mode = self.mode.or(Some(Mode::Copy)),
                Ok(_) => {}
            },
            Name::ReplicationSemantics => one_of(value, &[("optimistic", ()), ("pessimistic", ())])?,
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

/// WOSS's data placement: every file is on this node already.
fn placement(value: &str) -> Result<(), String> {
    let (pattern, of) = value.split_once('|').map_or((value, None), |(pattern, of)| (pattern, Some(of.trim())));
    match (pattern.trim().to_ascii_lowercase().as_str(), of) {
        ("local", None) => Ok(()),
        ("collocation", Some(group)) if !group.is_empty() => Ok(()),
        ("scatter", Some(blocks)) if blocks.parse::<u64>().is_ok_and(|blocks| blocks > 0) => Ok(()),
        _ => Err(format!("'{value}' is none of local, collocation|GROUP, scatter|BLOCKS")),
    }
}

/// The hints of one file, directory or path, as they were given, and what they come to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Hints {
    said: BTreeMap<Name, Box<str>>,
    advice: Advice,
}

impl Hints {
    /// Nothing is changed when it is refused; the error is a sentence for who gave it.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let name = Name::parse(name)?;
        Advice::default().hear(name, value).map_err(|why| format!("{}: {why}", name.as_str()))?;
        self.said.insert(name, value.into());
        self.settle();
        Ok(())
    }

    /// From what was set before. What an older or newer Surgetank understood and this one does not is left out.
    pub fn of_texts<'a, 'b>(texts: impl Iterator<Item = (&'a str, &'b str)>) -> Self {
        let mut hints = Self::default();
        for (name, value) in texts {
            if let Err(why) = hints.set(name, value) {
                tracing::warn!(%why, "a hint that was written down is left out");
            }
        }
        hints
    }

    /// `false`: there was none.
    pub fn take_back(&mut self, name: Name) -> bool {
        let there = self.said.remove(&name).is_some();
        self.settle();
        there
    }

    /// What `newer` says replaces what was said.
    pub fn update(&mut self, newer: &Self) {
        self.said.extend(newer.said.iter().map(|(name, value)| (*name, value.clone())));
        self.settle();
    }

    fn settle(&mut self) {
        self.advice = Advice::default();
        for (name, value) in &self.said {
            // (Looked at when it was set.)
            let _ = self.advice.hear(*name, value);
        }
    }

    pub fn advice(&self) -> &Advice {
        &self.advice
    }

    pub fn value(&self, name: Name) -> Option<&str> {
        self.said.get(&name).map(AsRef::as_ref)
    }

    pub fn is_empty(&self) -> bool {
        self.said.is_empty()
    }

    pub fn texts(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.said.iter().map(|(name, value)| (name.as_str(), value.as_ref()))
    }
}

#[cfg(test)]
mod tests;
