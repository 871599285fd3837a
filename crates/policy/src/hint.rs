//! Hints: what a workflow tells about its files while it runs, as an attribute of a file or directory
//! (`user.surgetank.hint.NAME`) or by `surgetank hint`. A hint advises, a rule decides: a hint is stronger than the built-in
//! rules and weaker than every written rule.
//!
//! Names and values are those of rules. The names of WOSS (S. Al-Kiswany et al., "A cross-layer optimized storage system for
//! workflow applications", Future Generation Computer Systems 75, 2017) are accepted too. A WOSS hint with a meaning here
//! gets that meaning; the others are stored, shown, and have no effect (`docs/hints.md` lists which).
//!
//! Each hint is a module ([`module`], [`modules`]): the rest of the program knows no hint by its name. A hint of another name may
//! be for another program. It is kept and shown, and has no effect.
//!
//! The danger that it avoids: advice that is silently ignored. A wrong value, or a name that is nearly a known one, is refused,
//! with what is allowed. The others are reported ([`Hints::unknown`]).

pub mod acting;
pub mod advice;
pub mod module;
mod modules;

use std::collections::BTreeMap;

pub use crate::hint::acting::Acting;
pub use crate::hint::advice::{Advice, NextRead};
use crate::hint::module::{Act, Event, Module, Moment};
pub use crate::words::Collocate;
use crate::words::{misspelt, nearest};

/// Prefix of a hint's name as an extended attribute of a file.
pub const ATTRIBUTE_PREFIX: &[u8] = b"user.surgetank.hint.";

/// A hint that has a meaning here: its place in the list of modules.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Name(usize);

impl std::fmt::Debug for Name {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.write_str(self.as_str())
    }
}

/// The names of all hints, as a user writes them.
pub fn names() -> impl Iterator<Item = &'static str> + Clone {
    modules::ALL.iter().map(|module| module.name())
}

/// Those of them that are asked at operations. A rule can set them, each under its name.
pub fn acting_names() -> impl Iterator<Item = &'static str> + Clone {
    modules::ALL.iter().filter(|module| !module.moments().is_empty()).map(|module| module.name())
}

/// Is one of these asked at such operations?
pub fn listens(acting: &Acting, moment: Moment) -> bool {
    asked(acting, moment).next().is_some()
}

/// What they answer to an operation.
pub fn acts<'a>(acting: &'a Acting, event: &'a Event<'a>) -> impl Iterator<Item = Act> + 'a {
    asked(acting, event.moment()).filter_map(|(module, value)| module.on(value, event))
}

fn asked(acting: &Acting, moment: Moment) -> impl Iterator<Item = (&'static dyn Module, &str)> {
    let known = acting.iter().filter_map(|(name, value)| Some((Name::find(name)?.module(), value)));
    known.filter(move |(module, _)| module.moments().contains(&moment))
}

impl Name {
    fn find(text: &str) -> Option<Self> {
        names().position(|known| known == text).map(Self)
    }

    /// The name as a user writes it.
    pub fn as_str(self) -> &'static str {
        self.module().name()
    }

    fn module(self) -> &'static dyn Module {
        modules::ALL[self.0]
    }

    /// The hint of this name. The error lists the known names.
    pub fn parse(text: &str) -> Result<Self, String> {
        if let Some(name) = Self::find(text) {
            return Ok(name);
        }
        let near = misspelt(text, names())
            .or_else(|| nearest(text, names()))
            .map_or_else(String::new, |near| format!("did you mean '{near}'? "));
        let known: Vec<&str> = names().collect();
        Err(format!("there is no hint '{text}'; {near}known are {}", known.join(", ")))
    }

    /// Is it asked at operations?
    pub(crate) fn acts(self) -> bool {
        !self.module().moments().is_empty()
    }

    /// The error is a sentence for the user: what is wrong with the value, and what is allowed.
    pub(crate) fn check(self, value: &str) -> Result<(), String> {
        self.module().hear(value, &mut Advice::default())
    }

    /// Adds what a value sets that was checked before.
    fn hear(self, value: &str, advice: &mut Advice) {
        if self.module().hear(value, advice).is_ok() && self.acts() {
            advice.acting.set(self.as_str(), value);
        }
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
        if misspelt(text, names()).is_some() {
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
        name.check(value).map_err(|why| format!("{}: {why}", name.as_str()))?;
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
            name.hear(value, &mut self.advice);
        }
    }

    /// The combined meaning of the hints.
    pub fn advice(&self) -> &Advice {
        &self.advice
    }

    /// What one of the hints sets by itself. `None`: it has no meaning here, or is not set.
    pub fn advice_of(&self, name: &str) -> Option<Advice> {
        let name = Name::parse(name).ok()?;
        let mut advice = Advice::default();
        name.hear(self.given.get(&name)?, &mut advice);
        Some(advice)
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
