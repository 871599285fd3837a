//! Finds the patterns that match a path: all globs in one automaton set, all regular expressions in another.
//!
//! Globs have the meaning of `.gitignore`. A pattern without a slash names a file *or any directory above it*; one with a slash
//! starts at the directory that is served; a slash at the end means "what is inside". `*` and `?` stay within a name, `**`
//! crosses directories. Paths are arbitrary bytes, so names that are not UTF-8 match too.
//!
//! The danger that it avoids: a pattern that silently matches nothing. Empty patterns, `!…`, `..` and absolute paths are
//! refused.

use std::cell::RefCell;

use globset::{Candidate, Glob, GlobBuilder, GlobMatcher, GlobSet, GlobSetBuilder};
use regex::bytes::{Regex, RegexSet};

use super::written::Pattern;

/// Matches patterns by their position in the list given to [`Matcher::new`].
///
/// Most patterns are plain names, `*.ext`, or start with plain directories; these cost a comparison. One automaton for all
/// patterns took 2.7 µs a path with forty rules.
#[derive(Debug)]
pub struct Matcher {
    names: Vec<Name>,
    anchored: Vec<Anchored>,
    globs: GlobSet,
    /// Pattern of each glob; a pattern becomes up to two globs.
    glob_owner: Vec<u16>,
    regexes: RegexSet,
    regex_owner: Vec<u16>,
}

/// A pattern that compares each name of a path.
#[derive(Debug)]
struct Name {
    owner: u16,
    shape: Shape,
    text: Vec<u8>,
    /// Matches only names of directories above the path.
    inside_only: bool,
}

#[derive(Debug, Clone, Copy)]
enum Shape {
    Equals,
    Starts,
    Ends,
}

/// A pattern that starts with something literal; a path that does not start so needs no further comparison.
#[derive(Debug)]
struct Anchored {
    owner: u16,
    prefix: Vec<u8>,
    forms: Vec<GlobMatcher>,
}

thread_local! {
    static SCRATCH: RefCell<(Vec<usize>, Vec<usize>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

impl Matcher {
    /// Compiles the patterns. The error is (position, what is wrong with that pattern).
    pub fn new<'a>(patterns: impl Iterator<Item = &'a Pattern>) -> Result<Self, (usize, String)> {
        let (mut names, mut anchored) = (Vec::new(), Vec::new());
        let mut globs = GlobSetBuilder::new();
        let mut glob_owner = Vec::new();
        let mut regexes = Vec::new();
        let mut regex_owner = Vec::new();
        for (position, pattern) in patterns.enumerate() {
            let owner = u16::try_from(position).map_err(|_| (position, "more than 65,535 rules".to_owned()))?;
            match pattern {
                Pattern::Glob(text) => {
                    let forms = forms(text).map_err(|why| (position, why))?;
                    if let Some(name) = plain_name(text, owner) {
                        names.push(name);
                        continue;
                    }
                    let made: Result<Vec<Glob>, _> = forms
                        .iter()
                        .map(|form| GlobBuilder::new(form).literal_separator(true).backslash_escape(true).build())
                        .collect();
                    let made = made.map_err(|error| (position, error.kind().to_string()))?;
                    let prefix = literal_prefix(&forms);
                    if prefix.is_empty() {
                        glob_owner.extend(made.iter().map(|_| owner));
                        for glob in made {
                            globs.add(glob);
                        }
                    } else {
                        let forms = made.iter().map(Glob::compile_matcher).collect();
                        anchored.push(Anchored { owner, prefix, forms });
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
        Ok(Self { names, anchored, globs, glob_owner, regexes, regex_owner })
    }

    /// Calls `found` for every matching pattern, each at most once, highest position first.
    pub fn each_match(&self, path: &[u8], mut found: impl FnMut(u16)) {
        SCRATCH.with_borrow_mut(|(matched, in_set)| {
            matched.clear();
            let mut rest = Some(path);
            while let Some(from) = rest {
                let end = from.iter().position(|byte| *byte == b'/');
                let name = &from[..end.unwrap_or(from.len())];
                rest = end.map(|end| &from[end + 1..]);
                let names = self.names.iter().filter(|pattern| pattern.fits(name, rest.is_some()));
                matched.extend(names.map(|pattern| usize::from(pattern.owner)));
            }
            let mut candidate = None;
            for pattern in self.anchored.iter().filter(|pattern| path.starts_with(&pattern.prefix)) {
                let candidate = candidate.get_or_insert_with(|| Candidate::from_bytes(path));
                if pattern.forms.iter().any(|form| form.is_match_candidate(candidate)) {
                    matched.push(usize::from(pattern.owner));
                }
            }
            if !self.globs.is_empty() {
                let candidate = candidate.get_or_insert_with(|| Candidate::from_bytes(path));
                self.globs.matches_candidate_into(candidate, in_set);
                matched.extend(in_set.iter().map(|index| usize::from(self.glob_owner[*index])));
            }
            if !self.regex_owner.is_empty() {
                matched.extend(self.regexes.matches(path).iter().map(|index| usize::from(self.regex_owner[index])));
            }
            matched.sort_unstable_by(|a, b| b.cmp(a));
            matched.dedup();
            for position in matched.iter() {
                found(*position as u16);
            }
        });
    }
}

impl Name {
    fn fits(&self, name: &[u8], has_inside: bool) -> bool {
        let fits = match self.shape {
            Shape::Equals => name == self.text,
            Shape::Starts => name.starts_with(&self.text),
            Shape::Ends => name.ends_with(&self.text),
        };
        fits && (has_inside || !self.inside_only)
    }
}

const SPECIAL: [char; 7] = ['*', '?', '[', ']', '{', '}', '\\'];

const SPECIAL_IN_REGEX: [char; 14] = ['.', '*', '+', '?', '(', ')', '[', ']', '{', '}', '^', '$', '|', '\\'];

/// A pattern without a slash that is literal but for a star at one end.
fn plain_name(text: &str, owner: u16) -> Option<Name> {
    let body = text.trim_end_matches('/');
    if body.contains('/') {
        return None;
    }
    let (shape, literal) = match (body.strip_prefix('*'), body.strip_suffix('*')) {
        (Some(literal), _) => (Shape::Ends, literal),
        (None, Some(literal)) => (Shape::Starts, literal),
        (None, None) => (Shape::Equals, body),
    };
    let plain = !literal.contains(SPECIAL);
    plain.then(|| Name { owner, shape, text: literal.into(), inside_only: text.ends_with('/') })
}

/// The literal beginning of all forms of one pattern.
fn literal_prefix(forms: &[String]) -> Vec<u8> {
    // The forms differ only after the pattern itself.
    let shortest = forms.iter().min_by_key(|form| form.len()).map_or("", String::as_str);
    let end = shortest.find(SPECIAL).unwrap_or(shortest.len());
    // Without the last slash: `a/**` must also match a path that ends there.
    shortest[..end].trim_end_matches('/').into()
}

/// The directory (or file) that contains everything that the pattern can match; empty: anywhere.
pub(super) fn plain_beginning(pattern: &Pattern) -> Vec<u8> {
    let (text, special): (String, &[char]) = match pattern {
        Pattern::Glob(text) => {
            let shortest = forms(text).unwrap_or_default().into_iter().min_by_key(String::len);
            (shortest.unwrap_or_default(), &SPECIAL)
        }
        Pattern::Regex(text) if text.contains('|') => (String::new(), &[]),
        Pattern::Regex(text) => (text.clone(), &SPECIAL_IN_REGEX),
    };
    match text.find(special) {
        None => text.into_bytes(),
        Some(mut end) => {
            // A part before a repetition may be absent.
            if matches!(pattern, Pattern::Regex(_)) && text[end..].starts_with(['*', '?', '{']) {
                end = text[..end].char_indices().last().map_or(0, |(at, _)| at);
            }
            text[..end].rfind('/').map_or_else(Vec::new, |slash| text.as_bytes()[..slash].to_vec())
        }
    }
}

/// The globs that together have the meaning of the user's pattern.
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
        return Err("a pattern has no '.' or '..' parts; it starts at the directory that is served".to_owned());
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

/// A regular expression that has to match the whole path. Bytes that are not UTF-8 match `.` too, unless the expression needs
/// Unicode classes.
fn whole_path(text: &str) -> Result<String, String> {
    // Alone first: `a)(b` would pass inside the group.
    let first = Regex::new(text).err().map(|error| shortened(&error));
    for wrapped in [format!(r"(?s-u)\A(?:{text})\z"), format!(r"(?s)\A(?:{text})\z")] {
        if first.is_none() && Regex::new(&wrapped).is_ok() {
            return Ok(wrapped);
        }
    }
    let why = first.unwrap_or_else(|| "it can't be matched against whole paths".to_owned());
    Err(if text.starts_with(['*', '+', '?']) {
        format!("{why}; this looks like a shell pattern, as a regular expression it would be '.{text}'")
    } else {
        why
    })
}

/// The last line of the parser's message: the reason.
fn shortened(error: &regex::Error) -> String {
    let text = error.to_string();
    text.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned()
}
