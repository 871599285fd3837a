//! Finds content to which no file of the store refers.
//!
//! The danger that it avoids: an agent refers to the content during the search. Content with a new reference is young
//! (`shared`), and only old content is considered. A file that moves during the walk may be missed, so the tree is walked
//! twice; if the two walks find different references, nothing is removed. A file that cannot be read may refer to anything:
//! then nothing is removed either.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::time::Duration;

use super::super::super::{Cred, Store, StorePath};
use super::super::is_absent;
use super::super::remote::by_ranges;
use super::references::{Blobs, Reference};
use super::{SUFFIX, damaged};
use surgetank_types::clock;
use surgetank_types::model::{Kind, Timestamp};

/// The content that was found, and removed unless it was a dry run.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Unused {
    /// Number of references in the store.
    pub references: u64,
    /// The unused content.
    pub blobs: Vec<Blob>,
}

/// One unused content.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Blob {
    /// Its path in the store.
    pub path: String,
    /// Its length.
    pub size_bytes: u64,
    /// Time of the last reference or later, in seconds since 1970.
    pub used_unix_seconds: i64,
}

struct Old {
    path: StorePath,
    size_bytes: u64,
    at: Timestamp,
}

/// References found, by their paths.
type Met = BTreeMap<StorePath, StorePath>;

/// Removes content to which no file refers and to which no reference was made for `unused_for`. `store` is the plain store,
/// without packing. With `dry_run` nothing is removed.
///
/// Errors: those of the store; files that changed during the search, or that cannot be read (nothing is removed).
pub fn collect(store: &dyn Store, who: Cred, unused_for: Duration, dry_run: bool) -> io::Result<Unused> {
    let mut old = Vec::new();
    let limit = clock::now().nanos.saturating_sub(i64::try_from(unused_for.as_nanos()).unwrap_or(i64::MAX));
    for entry in store.list(who, &StorePath::root(), false)? {
        let Some(blobs) = Blobs::named(&entry.name) else { continue };
        // Of another user: its references cannot be determined.
        let own = blobs.owner.is_none_or(|uid| uid == who.uid || who.uid == 0);
        if own && entry.kind == Kind::Directory {
            old_of(store, who, &blobs.root(), limit, &mut old)?;
        }
    }
    let mut unused = Unused::default();
    if old.is_empty() {
        return Ok(unused);
    }
    let mut met = Met::new();
    walk(store, who, &StorePath::root(), &mut met)?;
    unused.references = met.len() as u64;
    let wanted: HashSet<&StorePath> = met.values().collect();
    old.retain(|one| !wanted.contains(&one.path));
    if old.is_empty() {
        return Ok(unused);
    }
    store.refresh();
    let mut again = Met::new();
    walk(store, who, &StorePath::root(), &mut again)?;
    if met != again {
        let why = "files came, went or moved in the store while it was looked through: nothing was removed";
        return Err(io::Error::new(io::ErrorKind::ResourceBusy, why));
    }
    if let Some(what) = store.hidden()? {
        let why = format!("no path leads to {what}: what it refers to is not known, nothing was removed");
        return Err(damaged(why));
    }
    for one in old {
        if !dry_run {
            // It may be young again.
            match store.stat(who, &one.path) {
                Ok(there) if there.attr.mtime == one.at => {
                    let gone = if one.path.is_temporary() { Store::discard } else { Store::unlink };
                    gone(store, who, &one.path)?;
                }
                Ok(_) => continue,
                Err(why) if is_absent(&why) => continue,
                Err(why) => return Err(why),
            }
        }
        unused.blobs.push(Blob {
            path: one.path.to_string(),
            size_bytes: one.size_bytes,
            used_unix_seconds: one.at.secs(),
        });
    }
    Ok(unused)
}

fn old_of(store: &dyn Store, who: Cred, dir: &StorePath, limit: i64, old: &mut Vec<Old>) -> io::Result<()> {
    for entry in store.list(who, dir, true)? {
        let path = dir.join(&entry.name);
        if entry.kind == Kind::Directory {
            old_of(store, who, &path, limit, old)?;
            continue;
        }
        match store.glance(who, &path) {
            Ok(there) if there.attr.mtime.nanos < limit => {
                old.push(Old { path, size_bytes: there.attr.size_bytes, at: there.attr.mtime });
            }
            Err(why) if !is_absent(&why) => return Err(why),
            _ => {}
        }
    }
    Ok(())
}

/// Walks the tree, with references that are not published yet.
fn walk(store: &dyn Store, who: Cred, dir: &StorePath, met: &mut Met) -> io::Result<()> {
    let told = |why: io::Error| {
        let what = if dir.0.is_empty() { "the root".to_owned() } else { dir.to_string() };
        io::Error::new(
            why.kind(),
            format!("{what} cannot be looked into ({why}): what it refers to is not known, nothing was removed"),
        )
    };
    let entries = match store.list(who, dir, true) {
        // Removed meanwhile; the second walk shows it.
        Err(why) if is_absent(&why) => return Ok(()),
        entries => entries.map_err(told)?,
    };
    for entry in entries {
        let path = dir.join(&entry.name);
        if entry.kind == Kind::Directory && !(dir.0.is_empty() && Blobs::is_one(&entry.name)) {
            walk(store, who, &path, met)?;
        } else if entry.kind == Kind::File && entry.name.ends_with(SUFFIX) {
            let read = store.source(who, &path).and_then(by_ranges).and_then(|packed| Reference::read(&*packed));
            match read {
                Ok(reference) => {
                    met.insert(path, reference.path());
                }
                Err(why) if is_absent(&why) => {}
                Err(why) => {
                    return Err(damaged(format!(
                        "{path} cannot be read ({why}): what it refers to is not known, nothing was removed"
                    )));
                }
            }
        }
    }
    Ok(())
}
