//! Which of many patterns match a path: all globs in one automaton set, all regular expressions in another.
//!
//! Globs read as in `.gitignore`: without a slash a pattern names a file *or any directory above it*; with a slash it
//! starts at the directory that is served; a slash at the end means "what is inside". `*` and `?` stay within a name,
//! `**` crosses directories. Paths are arbitrary bytes: names that are not UTF-8 match as well as others.
//!
//! Danger avoided: a pattern that silently matches nothing. Empty patterns, `!…`, `..` and absolute paths are refused.

use std::cell::RefCell;

use globset::{Candidate, GlobBuilder, GlobSet, GlobSetBuilder};
use regex::bytes::{Regex, RegexSet};

use crate::config::Pattern;

/// Matches patterns by their position in the list given to [`Matcher::new`].
#[derive(Debug)]
pub struct Matcher {
    globs: GlobSet,
    /// Pattern of each glob; a pattern becomes up to two globs.
    glob_owner: Vec<u16>,
    regexes: RegexSet,
    regex_owner: Vec<u16>,
}

thread_local! {
    static SCRATCH: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

impl Matcher {
    /// The error is (position, what is wrong with that pattern).
    pub fn new<'a>(patterns: impl Iterator<Item = &'a Pattern>) -> Result<Self, (usize, String)> {
        let mut globs = GlobSetBuilder::new();
        let mut glob_owner = Vec::new();
        let mut regexes = Vec::new();
        let mut regex_owner = Vec::new();
        for (position, pattern) in patterns.enumerate() {
            let owner = u16::try_from(position)
                .map_err(|_| (position, "more than 65,535 rules".to_owned()))?;
            match pattern {
                Pattern::Glob(text) => {
                    for form in forms(text).map_err(|why| (position, why))? {
                        let glob = GlobBuilder::new(&form)
                            .literal_separator(true)
                            .backslash_escape(true)
                            .build()
                            .map_err(|error| (position, error.kind().to_string()))?;
                        globs.add(glob);
                        glob_owner.push(owner);
                    }
                }
                Pattern::Regex(text) => {
                    regexes.push(whole_path(text).map_err(|why| (position, why))?);
                    regex_owner.push(owner);
                }
            }
        }
        let globs = globs.build().map_err(|error| (0, error.to_string()))?;
        let regexes = RegexSet::new(&regexes).map_err(|error| (0, error.to_string()))?;
        Ok(Self {
            globs,
            glob_owner,
            regexes,
            regex_owner,
        })
    }

    /// Calls `found` for every matching pattern, each at most once, highest position first.
    pub fn each_match(&self, path: &[u8], mut found: impl FnMut(u16)) {
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.clear();
            self.globs
                .matches_candidate_into(&Candidate::from_bytes(path), scratch);
            for position in scratch.iter_mut() {
                *position = usize::from(self.glob_owner[*position]);
            }
            if !self.regex_owner.is_empty() {
                scratch.extend(
                    self.regexes
                        .matches(path)
                        .iter()
                        .map(|index| usize::from(self.regex_owner[index])),
                );
            }
            scratch.sort_unstable_by(|a, b| b.cmp(a));
            scratch.dedup();
            for position in scratch.iter() {
                found(*position as u16);
            }
        });
    }
}

/// The globs that together mean what the user's pattern means.
fn forms(text: &str) -> Result<Vec<String>, String> {
    if let Some(rest) = text.strip_prefix('!') {
        return Err(format!(
            "a pattern can't be negated; write a longer or later rule for what is excepted, or '\\!{rest}' for such a name"
        ));
    }
    let anchored = text.trim_end_matches('/').contains('/');
    let inside_only = text.ends_with('/');
    let body = text.trim_end_matches('/').trim_start_matches('/');
    if body.is_empty() {
        return Err("the pattern is empty; '*' matches everything".to_owned());
    }
    if body.split('/').any(|part| part == ".." || part == ".") {
        return Err(
            "a pattern has no '.' or '..' parts; it starts at the directory that is served"
                .to_owned(),
        );
    }
    if body == "**" || body.ends_with("/**") {
        return Ok(vec![body.to_owned()]);
    }
    let root = if anchored { "" } else { "**/" };
    let mut forms = vec![format!("{root}{body}/**")];
    if !inside_only {
        forms.push(format!("{root}{body}"));
    }
    Ok(forms)
}

/// A regular expression that has to match the whole path. Bytes that are not UTF-8 match `.` as well, unless the
/// expression needs Unicode classes.
fn whole_path(text: &str) -> Result<String, String> {
    // Alone first: `a)(b` would slip through inside the group.
    let first = Regex::new(text).err().map(|error| shortened(&error));
    for wrapped in [
        format!(r"(?s-u)\A(?:{text})\z"),
        format!(r"(?s)\A(?:{text})\z"),
    ] {
        if first.is_none() && Regex::new(&wrapped).is_ok() {
            return Ok(wrapped);
        }
    }
    let why = first.unwrap_or_else(|| "it can't be matched against whole paths".to_owned());
    Err(if text.starts_with(['*', '+', '?']) {
        format!(
            "{why}; this looks like a shell pattern, as a regular expression it would be '.{text}'"
        )
    } else {
        why
    })
}

/// The last line of the parser's drawing: the reason.
fn shortened(error: &regex::Error) -> String {
    let text = error.to_string();
    text.lines()
        .last()
        .unwrap_or_default()
        .trim_start_matches("error: ")
        .to_owned()
}
