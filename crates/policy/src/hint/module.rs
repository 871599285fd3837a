//! What a hint is: a module with a name, a check of its values, and what follows from them.
//!
//! A hint works in one of two ways. It sets attributes that a rule can set, too ([`Advice`]). Or it is asked at operations on
//! the files that have it ([`Event`]), and answers what is to be done besides ([`Act`]). The core calls, and carries out the
//! answers, on whichever member of a pool acts. So a module decides, and does nothing itself: it takes no lock, and waits for
//! nothing.
//!
//! `docs/internals/hints.md` describes how to write one.

use std::fmt::Debug;
use std::time::Duration;

use crate::hint::advice::Advice;

/// One hint.
pub trait Module: Debug + Sync {
    /// Its name as a user writes it.
    fn name(&self) -> &'static str;

    /// Checks a value, and adds what it sets. The error names what is wrong with the value, and what is allowed.
    fn hear(&self, value: &str, advice: &mut Advice) -> Result<(), String>;

    /// At which operations it is asked. A rule can set a hint that is asked at any.
    fn moments(&self) -> &'static [Moment] {
        &[]
    }

    /// What is to be done besides at this operation on a file that has the hint. `value` has been checked.
    fn on(&self, value: &str, event: &Event<'_>) -> Option<Act> {
        let _ = (value, event);
        None
    }
}

/// Kinds of operations at which hints are asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// [`Event::Changes`].
    Changes,
    /// [`Event::Reads`].
    Reads,
    /// [`Event::Drains`].
    Drains,
}

/// An operation on a file that has hints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event<'a> {
    /// A version of the file that is complete is about to go: a program opens the file for writing, cuts it, or gives its
    /// name to another file. (Its removal is the wish of a program, and no event.)
    Changes {
        /// The file's name in its directory.
        name: &'a [u8],
    },
    /// A program opens the file for reading.
    Reads {
        /// A program has it open for writing.
        is_written: bool,
    },
    /// The drain has copied a piece of it.
    Drains {
        /// The time that the piece took.
        took: Duration,
        /// Other files wait for the drain.
        others_wait: bool,
    },
}

impl Event<'_> {
    /// Its kind.
    pub fn moment(&self) -> Moment {
        match self {
            Self::Changes { .. } => Moment::Changes,
            Self::Reads { .. } => Moment::Reads,
            Self::Drains { .. } => Moment::Drains,
        }
    }
}

/// Is it such a name as [`Act::SetAside`] gives?
pub fn is_set_aside(name: &[u8]) -> bool {
    let Some(inner) = name.strip_suffix(b"~") else { return false };
    let digits = inner.iter().rev().take_while(|byte| byte.is_ascii_digit()).count();
    let (before, number) = inner.split_at(inner.len() - digits);
    let number = std::str::from_utf8(number).ok().filter(|number| *number == "0" || !number.starts_with('0'));
    let number = number.and_then(|number| number.parse::<u32>().ok());
    before.ends_with(b".~") && number.is_some_and(|number| number < CONTENTS_MAX)
}

/// So many contents a file has at most, with the present one.
pub const CONTENTS_MAX: u32 = 100;

/// Is it such a name of this file?
pub fn is_set_aside_of(name: &[u8], file: &[u8]) -> bool {
    is_set_aside(name)
        && name.strip_prefix(file).is_some_and(|rest| rest.starts_with(b".~") && !rest[2..].contains(&b'.'))
}

/// What is done besides an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// The content is kept beside the file, as `NAME.~1~`. Earlier ones move up: to `NAME.~2~`, and so on.
    SetAside {
        /// So many are kept, 1 or more.
        contents: u32,
    },
    /// The program waits until no other one has the file open for writing.
    AwaitSeal,
    /// The drain does not go on with the file for this time.
    Rest(Duration),
}
