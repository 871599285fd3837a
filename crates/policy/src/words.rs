//! Words that hints, rules and the configuration have in common, so that a value has one meaning in all of them.
//!
//! It knows none of the three.

pub mod quantity;

use serde::{Deserialize, Serialize};

use surgetank_types::model::Mode;

/// When the drain starts with a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "lowercase")]
pub enum Timing {
    /// As soon as it is sealed and was quiet for the configured time.
    #[default]
    Soon,
    /// In the final drain (`.git`, caches, virtual environments).
    Last,
}

/// The mode as it is written in a rule: `keep`, `copy`, `move`, `remove`.
pub fn mode_name(mode: Mode) -> &'static str {
    match mode {
        Mode::Keep => "keep",
        Mode::Copy => "copy",
        Mode::Move => "move",
        Mode::Remove => "remove",
    }
}

/// The value of one of a few words. The error lists the words.
pub fn one_of<T: Clone>(text: &str, choices: &[(&str, T)]) -> Result<T, String> {
    choices.iter().find(|(name, _)| *name == text.trim()).map(|(_, value)| value.clone()).ok_or_else(|| {
        format!("'{text}' is none of {}", choices.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", "))
    })
}

/// Parses `keep`, `copy`, `move` or `remove`.
pub fn mode(text: &str) -> Result<Mode, String> {
    one_of(text, &[("keep", Mode::Keep), ("copy", Mode::Copy), ("move", Mode::Move), ("remove", Mode::Remove)])
}

/// Parses `soon` or `last`.
pub fn timing(text: &str) -> Result<Timing, String> {
    one_of(text, &[("soon", Timing::Soon), ("last", Timing::Last)])
}

/// The highest number of members that have a file.
pub(crate) const REPLICAS_MAX: u32 = 16;

/// When a closed file has its copies at other members of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "lowercase")]
pub enum ReplicasAt {
    /// Soon after its close.
    #[default]
    Later,
    /// Before its close returns.
    Close,
}

/// Parses `later` or `close`.
pub fn replicas_at(text: &str) -> Result<ReplicasAt, String> {
    one_of(text, &[("later", ReplicasAt::Later), ("close", ReplicasAt::Close)])
}

/// On which member of a pool the content of a closed file is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Collocate {
    /// On that where it was made.
    Local,
    /// On one member, with all files of this group.
    With(Box<str>),
}

impl Collocate {
    /// The group.
    pub fn group(&self) -> Option<&str> {
        match self {
            Self::Local => None,
            Self::With(group) => Some(group),
        }
    }
}

/// Parses `local`, or the name of a group.
pub fn collocate(text: &str) -> Result<Collocate, String> {
    const BYTES_MAX: usize = 255;
    match text.trim() {
        "local" => Ok(Collocate::Local),
        group if !group.is_empty() && group.len() <= BYTES_MAX => Ok(Collocate::With(group.into())),
        _ => Err(format!("'{text}' is neither local nor the name of a group, of 1 to {BYTES_MAX} bytes")),
    }
}

/// Parses a number of members that have a file, 1 to 16.
pub fn replicas(text: &str) -> Result<u32, String> {
    match text.trim().parse() {
        Ok(count @ 1..=REPLICAS_MAX) => Ok(count),
        _ => Err(format!("'{text}' is not a number from 1 to 16")),
    }
}

/// The known name that `name` most probably stands for; `None` if all differ too much.
pub fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    known
        .map(|candidate| (edits(name, candidate), candidate))
        .min_by_key(|(distance, _)| *distance)
        .filter(|(distance, candidate)| *distance <= 1 + candidate.len() / 4)
        .map(|(_, candidate)| candidate)
}

/// The known name of which `name` is probably a misspelling. `None`: it is a name of its own.
pub fn misspelt<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    const LONG: usize = 8;
    let is_it = |candidate: &&str| {
        let edits_max = if candidate.len() > LONG { 2 } else { 1 };
        candidate.eq_ignore_ascii_case(name) || edits(name, candidate) <= edits_max
    };
    known.into_iter().find(is_it)
}

/// The Levenshtein distance.
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}
