//! What is to be copied: a file, a tree, or the part of one that a pattern names.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use globset::{GlobBuilder, GlobMatcher};

use surgetank_store::object::is_mark;
use surgetank_store::{Cred, Gate, Store, StorePath, StoreStat, at_once};
use surgetank_types::error::{Error, Result};
use surgetank_types::model::Kind;
use surgetank_types::sync::{Mutex, PoisonError};

const DIRS_AT_ONCE: usize = 16;

/// One name to be copied.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Path in the source.
    pub from: StorePath,
    /// Path in the target.
    pub to: StorePath,
    pub(crate) stat: StoreStat,
    /// A directory that is copied; other directories only lead to a wanted file.
    pub keeps_attributes: bool,
}

impl Entry {
    /// The entry is a directory.
    pub fn is_dir(&self) -> bool {
        self.stat.attr.kind == Kind::Directory
    }

    /// Bytes of content.
    pub fn bytes(&self) -> u64 {
        if self.stat.attr.kind == Kind::File { self.stat.attr.size_bytes } else { 0 }
    }
}

/// All below a directory, or the matches of a pattern (`*`, `**`, `?`, `[…]`, `{a,b}`), with all below them.
#[derive(Debug, Clone, Default)]
pub struct Wanted(Option<GlobMatcher>);

impl Wanted {
    /// The pattern is relative to the walked directory.
    pub fn matching(pattern: &str) -> Result<Self> {
        let glob = GlobBuilder::new(pattern).literal_separator(true).build();
        let glob = glob.map_err(|why| Error::new(format!("{pattern}: not a pattern")).why(why))?;
        Ok(Self(Some(glob.compile_matcher())))
    }

    fn takes(&self, relative: &[u8]) -> bool {
        self.0.as_ref().is_none_or(|glob| glob.is_match(Path::new(OsStr::from_bytes(relative))))
    }
}

#[derive(Default)]
struct Found {
    entries: Vec<Entry>,
    dirs: Vec<(StorePath, bool)>,
    failed: Vec<(StorePath, io::Error)>,
}

/// What a walk found, and which directories it could not read.
#[derive(Debug, Default)]
pub struct Walked {
    /// Each directory before its content.
    pub entries: Vec<Entry>,
    /// Directories that could not be read, and the errors.
    pub failed: Vec<(StorePath, io::Error)>,
}

/// Walks all wanted files below `from` (or `from` itself, if it is a file). `to`: what `from` itself becomes. An error
/// of the gate ends the walk.
pub fn walk(
    store: &dyn Store,
    who: Cred,
    (from, to): (&StorePath, &StorePath),
    wanted: &Wanted,
    gate: Gate<'_>,
) -> io::Result<Walked> {
    let stat = store.stat(who, from)?;
    let all = wanted.0.is_none();
    // The target's root keeps its own attributes, whatever is put into it.
    let keeps_attributes = all && !to.0.is_empty();
    let mut entries = vec![Entry { from: from.clone(), to: to.clone(), stat, keeps_attributes }];
    if stat.attr.kind != Kind::Directory {
        return Ok(Walked { entries, failed: Vec::new() });
    }
    let mut failed = Vec::new();
    let mut level = vec![(from.clone(), all)];
    while !level.is_empty() {
        let found = Mutex::new(Found::default());
        at_once(level.len(), DIRS_AT_ONCE, &|index| {
            gate(0)?;
            let (dir, taken) = &level[index];
            let (mut here, mut below, mut failed) = (Vec::new(), Vec::new(), Vec::new());
            let listed = store.list(who, dir, false).unwrap_or_else(|why| {
                failed.push((dir.clone(), why));
                Vec::new()
            });
            for listed in listed {
                let path = dir.join(&listed.name);
                let relative = path.0[from.0.len()..].strip_prefix(b"/").unwrap_or(&path.0[from.0.len()..]);
                let taken = *taken || wanted.takes(relative);
                let is_dir = listed.kind == Kind::Directory;
                let name = StorePath(listed.name.to_vec());
                if name.is_temporary() || name.is_part() || !taken && !is_dir {
                    continue;
                }
                let stat = match store.glance(who, &path) {
                    // Removed since the listing.
                    Err(why) if why.kind() == io::ErrorKind::NotFound => continue,
                    Err(why) => {
                        failed.push((path, why));
                        continue;
                    }
                    Ok(stat) => stat,
                };
                // The marker of another store that begins here: it says when that store began, which is not true of the
                // copy.
                if is_mark(&name.0, &stat) {
                    continue;
                }
                let to = StorePath([&to.0[..], b"/", relative].concat());
                let to = if to.0.first() == Some(&b'/') { StorePath(to.0[1..].to_vec()) } else { to };
                here.push(Entry { from: path.clone(), to, stat, keeps_attributes: taken && is_dir });
                if stat.attr.kind == Kind::Directory {
                    below.push((path, taken));
                }
            }
            let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
            found.entries.extend(here);
            found.dirs.extend(below);
            found.failed.extend(failed);
            Ok(())
        })?;
        let found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
        entries.extend(found.entries);
        failed.extend(found.failed);
        level = found.dirs;
    }
    if !all {
        drop_ways_to_nothing(&mut entries);
        // The user misspelt the path, or the source is missing.
        if entries.is_empty() && failed.is_empty() {
            failed.push((from.clone(), io::Error::new(io::ErrorKind::NotFound, "nothing there matches the pattern")));
        }
    }
    Ok(Walked { entries, failed })
}

/// Drops directories below which no file is wanted.
fn drop_ways_to_nothing(entries: &mut Vec<Entry>) {
    let mut needed = std::collections::HashSet::new();
    for entry in entries.iter().filter(|entry| !entry.is_dir() || entry.keeps_attributes) {
        let mut dir = entry.from.parent();
        while needed.insert(dir.clone()) && !dir.0.is_empty() {
            dir = dir.parent();
        }
    }
    entries.retain(|entry| !entry.is_dir() || entry.keeps_attributes || needed.contains(&entry.from));
}
