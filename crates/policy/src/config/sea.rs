//! Sea's own files, accepted unchanged: `sea.ini`, `.sea_flushlist`, `.sea_evictlist`, `.sea_prefetchlist`.
//!
//! They are read as Sea reads them. A list has one regular expression a line, appended to the cache's root, and applies to a
//! file only if it covers the whole path (Sea greps with `-o` and drops what is not a file).
//! Flush only → copy, evict only → remove, both → move, neither → keep.
//!
//! The danger that it avoids: files lost by a missing list. *Keep* for files that no list names holds only if `.sea_flushlist`
//! has an entry. Without any `.sea_flushlist`, evicting means move, not remove.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::key::{Origin, Sourced, empty_rule};
use super::places::{unreadable, utf8};
use super::{Authority, Pattern, RuleConfig, TierConfig};
use surgetank_types::error::{Error, Result};
use surgetank_types::model::Mode;

pub const INI: &str = "sea.ini";
const FLUSH: &str = ".sea_flushlist";
const EVICT: &str = ".sea_evictlist";
const PREFETCH: &str = ".sea_prefetchlist";
pub const FILES: [&str; 4] = [INI, FLUSH, EVICT, PREFETCH];

/// The configuration in Sea's files.
#[derive(Debug, Default)]
pub struct Sea {
    /// `mount_dir`: the directory in which programs see the files.
    pub over: Option<Sourced<PathBuf>>,
    /// The last level: the final place of the files.
    pub store: Option<Sourced<PathBuf>>,
    pub tiers: Vec<Sourced<TierConfig>>,
    pub rules: Vec<RuleConfig>,
    pub notes: Vec<String>,
}

/// Whether `dir` contains any of Sea's files.
pub fn is_in(dir: &Path) -> bool {
    FILES.iter().any(|name| dir.join(name).is_file())
}

/// Reads Sea's files in `dir`; `ini` is the name of the ini file there. `env` resolves values that are the name of an
/// environment variable, as Sea does.
pub fn read(
    dir: &Path,
    ini: &str,
    label: impl Fn(&str) -> String,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<Sea> {
    let mut sea = Sea::default();
    if let Some(text) = contents(&dir.join(ini))? {
        read_ini(&text, dir, &label(ini), env, &mut sea)?;
    }
    let list = |name: &str| -> Result<Option<Vec<(String, Origin)>>> {
        Ok(contents(&dir.join(name))?.map(|text| lines(&text, dir, &label(name))))
    };
    let (flush, evict, prefetch) = (list(FLUSH)?, list(EVICT)?, list(PREFETCH)?);
    let evicted = if flush.is_some() { Mode::Remove } else { Mode::Move };
    if flush.is_none() && evict.as_ref().is_some_and(|entries| !entries.is_empty()) {
        sea.notes.push(format!(
            "{}: there is no {FLUSH}, so what is listed is moved to the store and not removed; an empty {FLUSH} beside it makes Sea's 'remove' of it",
            label(EVICT)
        ));
    }
    // `.*` lists everything: no file is left to keep.
    let keeps =
        flush.as_ref().is_some_and(|entries| !entries.is_empty() && entries.iter().all(|(text, _)| text != ".*"));
    let mut add = |entries: Option<Vec<(String, Origin)>>, mode: Option<Mode>| {
        for (text, origin) in entries.unwrap_or_default() {
            sea.rules.push(RuleConfig { mode, prefetch: mode.is_none(), ..empty_rule(Pattern::Regex(text), &origin) });
        }
    };
    add(flush, Some(Mode::Copy));
    add(evict, Some(evicted));
    add(prefetch, None);
    if keeps {
        let origin = Origin {
            label: format!("{}, no line of which matches", label(FLUSH)),
            base: dir.to_path_buf(),
            authority: Authority::Project,
        };
        sea.rules.push(RuleConfig { mode: Some(Mode::Keep), ..empty_rule(Pattern::Regex(".*".to_owned()), &origin) });
        sea.notes.push(format!(
            "{}: files that it does not list stay in the tiers (keep) and are NOT in the store at the end, as in Sea; --keep-at-exit=drain brings them over",
            label(FLUSH)
        ));
    }
    Ok(sea)
}

/// The text of a file; `None` when it does not exist.
fn contents(path: &Path) -> Result<Option<String>> {
    match fs::read(path) {
        Ok(bytes) => utf8(path, bytes, "write such bytes as '.' in a list").map(Some),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(unreadable(path, &error)),
    }
}

fn origin(dir: &Path, label: &str, line: usize) -> Origin {
    Origin { label: format!("{label}:{line}"), base: dir.to_path_buf(), authority: Authority::Project }
}

/// The entries of a list, in which Sea has no comments.
fn lines(text: &str, dir: &Path, label: &str) -> Vec<(String, Origin)> {
    text.lines()
        .enumerate()
        .map(|(at, line)| (line.trim().to_owned(), origin(dir, label, at + 1)))
        .filter(|(line, _)| !line.is_empty())
        .collect()
}

fn read_ini(text: &str, dir: &Path, label: &str, env: &dyn Fn(&str) -> Option<String>, sea: &mut Sea) -> Result<()> {
    let mut keys: BTreeMap<String, (String, usize)> = BTreeMap::new();
    let mut inside = false;
    for (at, line) in text.lines().enumerate() {
        let line = without_comment(line);
        if line.is_empty() {
            continue;
        }
        if let Some(section) = line.strip_prefix('[') {
            inside = section.trim_end_matches(']').trim().eq_ignore_ascii_case("sea");
            continue;
        }
        let Some((key, value)) = line.split_once('=') else {
            return Err(Error::new(format!("{label}:{}: '{line}' is neither [section] nor key = value", at + 1))
                .remedy("correct the line, or begin it with '#' to make it a comment"));
        };
        if inside {
            let value = value.trim().trim_matches(['"', '\'']).trim();
            keys.insert(key.trim().to_ascii_lowercase(), (value.to_owned(), at + 1));
        }
    }
    // Older files call the levels source_N.
    let level = |n: usize| keys.get(&format!("cache_{n}")).or_else(|| keys.get(&format!("source_{n}")));
    let count = match keys.get("n_levels") {
        Some((text, line)) => {
            text.parse::<usize>().ok().filter(|count| (1..=255).contains(count)).ok_or_else(|| {
                Error::new(format!("{label}:{line}: n_levels = '{text}' is not a number from 1 to 255"))
                    .remedy("write how many cache_N there are, or leave n_levels out")
            })?
        }
        None => (0..).take_while(|n| level(*n).is_some()).count(),
    };
    let resolved = |value: &str| env(value).unwrap_or_else(|| value.to_owned());
    for n in 0..count {
        let (value, line) = level(n).ok_or_else(|| {
            Error::new(format!("{label}: cache_{n} is missing, but n_levels says that there are {count} levels"))
                .remedy("add it, or lower n_levels; the last level is the store")
        })?;
        let origin = origin(dir, label, *line);
        let value = resolved(value);
        let paths: Vec<PathBuf> =
            value.split(',').map(str::trim).filter(|path| !path.is_empty()).map(|path| dir.join(path)).collect();
        let Some(first) = paths.first() else {
            return Err(Error::new(format!("{}: cache_{n} has no path", origin.label))
                .remedy(format!("name its directory: cache_{n} = /path")));
        };
        if n + 1 == count {
            if paths.len() > 1 {
                return Err(Error::new(format!(
                    "{}: cache_{n} is the last level, the store; it can only be one directory",
                    origin.label
                ))
                .remedy("name one directory there, and put the others into levels before it"));
            }
            sea.store = Some(Sourced { value: first.clone(), origin });
        } else {
            let value = TierConfig { name: format!("cache_{n}"), paths, cap_bytes: None, survives: None };
            sea.tiers.push(Sourced { value, origin });
        }
    }
    if let Some((value, line)) = keys.get("mount_dir") {
        sea.over = Some(Sourced { value: dir.join(resolved(value)), origin: origin(dir, label, *line) });
    }
    Ok(())
}

/// The line without its comment: `;` and `#` start one, unless quoted.
fn without_comment(line: &str) -> &str {
    let mut quote = None;
    for (at, c) in line.char_indices() {
        match (quote, c) {
            (None, ';' | '#') => return line[..at].trim(),
            (None, '"' | '\'') => quote = Some(c),
            (Some(open), _) if c == open => quote = None,
            _ => {}
        }
    }
    line.trim()
}
