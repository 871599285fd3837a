//! Which files are wanted on a tier ahead of use: a command, a rule or a hint names them. [`fetches`](crate::files::prefetch) brings
//! them.

use surgetank_policy::rule::RuleSet;
use surgetank_types::error::{Errno, Error, FsResult, Result};
use surgetank_types::model::{FileId, Kind};
use surgetank_types::sync::Arc;

use crate::base::Base;
use crate::files::Files;
use crate::files::fetch_open::Fetches;
use crate::files::prefetch::{BroughtIn, COPIES_MAX, Outcome, ourselves};
use crate::metadata::Metadata;
use crate::namespace::listing::Listings;
use crate::namespace::locate::Locations;
use crate::namespace::resolve::Resolver;

/// Files that users or rules want on a tier ahead of use.
pub struct Prefetch {
    rules: Arc<RuleSet>,
    fetches: Arc<Fetches>,
    listings: Arc<Listings>,
    metadata: Arc<Metadata>,
    locations: Arc<Locations>,
    resolver: Arc<Resolver>,
}

impl Prefetch {
    pub(crate) fn new(
        base: &Base,
        files: &Files,
        listings: &Arc<Listings>,
        locations: &Arc<Locations>,
        resolver: &Arc<Resolver>,
    ) -> Self {
        Self {
            rules: base.rules.clone(),
            fetches: files.fetches.clone(),
            listings: listings.clone(),
            metadata: files.metadata.clone(),
            locations: locations.clone(),
            resolver: resolver.clone(),
        }
    }

    /// Brings a file of the store to a tier. Returns its bytes; 0 when the tier has it already, a process writes it, or
    /// no tier has room. `stop` ends a running copy.
    pub fn prefetch(&self, id: FileId, stop: &(dyn Fn() -> bool + Sync)) -> Result<u64> {
        for _ in 0..COPIES_MAX {
            match self.fetches.bring_ahead(id, stop)? {
                Outcome::Brought(bytes) => return Ok(bytes),
                Outcome::Not => return Ok(0),
                Outcome::Overtaken => {}
            }
        }
        Ok(0)
    }

    /// Prefetches the files that rules with `prefetch` name. Looks only into directories that such a rule can mean, and
    /// only at files that it means. Skips files that cannot be read or copied.
    pub fn prefetch_by_rules(&self, stop: &(dyn Fn() -> bool + Sync)) -> BroughtIn {
        let mut done = BroughtIn::default();
        let mut todo = self.rules.prefetched_below();
        while let Some(path) = todo.pop() {
            if stop() {
                break;
            }
            if let Err(why) = self.prefetch_in(&path, &mut todo, &mut done, stop) {
                let path = String::from_utf8_lossy(&path);
                tracing::warn!(%path, errno = %why.errno, "could not be looked into for prefetching");
            }
        }
        done
    }

    /// Prefetches what a hint names: a file, or all files below a directory. Skips files that the store does not have.
    pub fn prefetch_hinted(&self, path: &[u8], stop: &(dyn Fn() -> bool + Sync)) {
        for id in self.files_below(path).unwrap_or_default() {
            match self.prefetch(id, stop) {
                _ if stop() => return,
                Ok(_) => {}
                Err(why) => tracing::warn!(path = %String::from_utf8_lossy(path), %why, "not prefetched"),
            }
        }
    }

    /// One directory, or a file that a rule names outright.
    fn prefetch_in(
        &self,
        path: &[u8],
        todo: &mut Vec<Vec<u8>>,
        done: &mut BroughtIn,
        stop: &(dyn Fn() -> bool + Sync),
    ) -> FsResult<()> {
        let id = match self.locations.find(path) {
            Err(fault) if matches!(fault.errno, Errno::NOENT | Errno::NOTDIR) => return Ok(()),
            other => other?,
        };
        let kind = self.metadata.read_tree().get(id).map(|inode| inode.attr.kind);
        if kind == Some(Kind::File) {
            self.prefetch_ruled(path, id, done, stop);
        }
        if kind != Some(Kind::Directory) {
            return Ok(());
        }
        for listed in self.listings.merged(&ourselves(), id)? {
            if stop() {
                break;
            }
            let mut child = path.to_vec();
            if !child.is_empty() {
                child.push(b'/');
            }
            child.extend_from_slice(&listed.name);
            match listed.kind {
                Kind::Directory => todo.push(child),
                Kind::File if self.rules.decide(&child).prefetch => {
                    match self.resolver.resolve(&ourselves(), id, &listed.name) {
                        Ok(file) => self.prefetch_ruled(&child, file, done, stop),
                        Err(fault) if fault.errno == Errno::NOENT => {}
                        Err(fault) => return Err(fault),
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn prefetch_ruled(&self, path: &[u8], id: FileId, done: &mut BroughtIn, stop: &(dyn Fn() -> bool + Sync)) {
        if !self.rules.decide(path).prefetch {
            return;
        }
        match self.prefetch(id, stop) {
            Ok(0) => {}
            Ok(bytes) => {
                done.files += 1;
                done.bytes += bytes;
            }
            Err(why) => {
                tracing::warn!(path = %String::from_utf8_lossy(path), %why, "not prefetched")
            }
        }
    }

    /// Files below a path that the tiers or the store have, for evict, pin and prefetch of whole trees.
    pub fn files_below(&self, path: &[u8]) -> Result<Vec<FileId>> {
        let shown = String::from_utf8_lossy(path).into_owned();
        let failed = |why: &dyn std::fmt::Display| Error::new(format!("{shown}: cannot be looked up")).why(why);
        let caller = ourselves();
        let mut files = Vec::new();
        let mut todo = vec![self.locations.find(path).map_err(|why| failed(&why))?];
        while let Some(id) = todo.pop() {
            let kind = self.metadata.read_tree().get(id).map(|inode| inode.attr.kind);
            match kind {
                Some(Kind::Directory) => {
                    for listed in self.listings.merged(&caller, id).map_err(|why| failed(&why))? {
                        match self.resolver.resolve(&caller, id, &listed.name) {
                            Ok(child) => todo.push(child),
                            Err(fault) if fault.errno == Errno::NOENT => {}
                            Err(fault) => return Err(failed(&fault)),
                        }
                    }
                }
                Some(Kind::File) => files.push(id),
                _ => {}
            }
        }
        Ok(files)
    }

    /// Files that a glob (relative to the directory) or a path names.
    pub fn files_matching(&self, pattern: &[u8]) -> Result<Vec<FileId>> {
        let text = String::from_utf8_lossy(pattern).into_owned();
        if !text.contains(['*', '?', '[', '{']) {
            return self.files_below(pattern);
        }
        let glob = globset::GlobBuilder::new(&text)
            .literal_separator(true)
            .build()
            .map_err(|why| Error::new(format!("{text}: not a pattern")).why(why))?;
        let matcher = glob.compile_matcher();
        // Only the part of the tree under the pattern's plain beginning is walked.
        let plain: Vec<&str> = text.split('/').take_while(|part| !part.contains(['*', '?', '[', '{'])).collect();
        let mut files = Vec::new();
        for id in self.files_below(plain.join("/").as_bytes())? {
            let path = self.metadata.read_tree().logical_path(id).unwrap_or_default();
            let path: &std::ffi::OsStr = std::os::unix::ffi::OsStrExt::from_bytes(path.as_slice());
            if matcher.is_match(std::path::Path::new(path)) {
                files.push(id);
            }
        }
        Ok(files)
    }
}
