//! What is to be copied: a file, a tree, or what a pattern names of one.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use globset::{GlobBuilder, GlobMatcher};

use crate::error::{Error, Result};
use crate::model::Kind;
use crate::store::{Cred, Store, StorePath, StoreStat, at_once};
use crate::sync::{Mutex, PoisonError};

const DIRS_AT_ONCE: usize = 16;

/// One name to be copied.
#[derive(Debug, Clone)]
pub struct Entry {
    pub from: StorePath,
    pub to: StorePath,
    pub stat: StoreStat,
    /// A directory that is copied; others are only on the way to something.
    pub keeps_attributes: bool,
}

impl Entry {
    pub fn is_dir(&self) -> bool {
        self.stat.attr.kind == Kind::Directory
    }

    /// Of content.
    pub fn bytes(&self) -> u64 {
        if self.stat.attr.kind == Kind::File { self.stat.attr.size_bytes } else { 0 }
    }
}

/// All below a directory, or what matches a pattern (`*`, `**`, `?`, `[…]`, `{a,b}`), with what is below that.
#[derive(Debug, Clone, Default)]
pub struct Wanted(Option<GlobMatcher>);

impl Wanted {
    /// Relative to the directory that is walked.
    pub fn matching(pattern: &str) -> Result<Self> {
        let glob = GlobBuilder::new(pattern).literal_separator(true).build();
        let glob = glob.map_err(|why| Error::new(format!("{pattern}: not a pattern")).why(why))?;
        Ok(Self(Some(glob.compile_matcher())))
    }

    fn takes(&self, relative: &[u8]) -> bool {
        self.0.as_ref().is_none_or(|glob| glob.is_match(Path::new(OsStr::from_bytes(relative))))
    }
}

struct Found {
    entries: Vec<Entry>,
    dirs: Vec<(StorePath, bool)>,
}

/// Everything that is wanted below `from` (or that file itself), each directory before what is in it. `to`: what `from`
/// itself becomes.
pub fn walk(
    store: &dyn Store,
    who: Cred,
    (from, to): (&StorePath, &StorePath),
    wanted: &Wanted,
) -> io::Result<Vec<Entry>> {
    let stat = store.stat(who, from)?;
    let all = wanted.0.is_none();
    // The root of what we write to is somebody else's, whatever is put into it.
    let keeps_attributes = all && !to.0.is_empty();
    let mut entries = vec![Entry { from: from.clone(), to: to.clone(), stat, keeps_attributes }];
    if stat.attr.kind != Kind::Directory {
        return Ok(entries);
    }
    let mut level = vec![(from.clone(), all)];
    while !level.is_empty() {
        let found = Mutex::new(Found { entries: Vec::new(), dirs: Vec::new() });
        at_once(level.len(), DIRS_AT_ONCE, &|index| {
            let (dir, taken) = &level[index];
            let (mut here, mut below) = (Vec::new(), Vec::new());
            for listed in store.list(who, dir, false)? {
                let path = dir.join(&listed.name);
                let relative = path.0[from.0.len()..].strip_prefix(b"/").unwrap_or(&path.0[from.0.len()..]);
                let taken = *taken || wanted.takes(relative);
                let is_dir = listed.kind == Kind::Directory;
                if StorePath(listed.name.to_vec()).is_temporary() || !taken && !is_dir {
                    continue;
                }
                let stat = match store.glance(who, &path) {
                    // Gone since the listing.
                    Err(why) if why.kind() == io::ErrorKind::NotFound => continue,
                    stat => stat?,
                };
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
            Ok(())
        })?;
        let found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
        entries.extend(found.entries);
        level = found.dirs;
    }
    if !all {
        drop_ways_to_nothing(&mut entries);
    }
    Ok(entries)
}

/// Directories below which nothing is wanted.
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
