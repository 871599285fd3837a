//! A directory that comes back under another device number, and leftovers of a directory that does not.
//!
//! Loop devices, NFS and FUSE get new device numbers at each mount, and a place is found by them. So a place also
//! remembers the path that it served ([`super::identity`]). A dead agent's place belongs to the directory if it served
//! the same path and its directory had the same inode number and birth. Such a place gets the directory's new name. The
//! KEY of its tier directories and temporaries stays. The first danger that it avoids: a run misses existing leftovers,
//! and reports that all is in the store. The second danger: leftovers of one file system end up in another one that is
//! mounted under the same path.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use surgetank_core::catalog::LogCatalog;
use surgetank_types::error::Result;

use super::{Held, Place, StateRoot, await_lock, key, lock_file, refuse};
use crate::agent::commands::Commands;

/// Undrained leftovers that a run over the same path does not take up.
#[derive(Debug, Clone)]
pub struct Left {
    pub place: PathBuf,
    /// Files and operations, where the catalog can be read.
    pub counted: Option<(u64, u64)>,
    /// It is the directory's own place. A run takes it up when the place in use has no leftovers.
    pub same_directory: bool,
    /// Another process inspects the place, so its leftovers are not known.
    is_held: bool,
}

/// The numbers in a place's name, without the device.
#[derive(PartialEq, Eq)]
struct Numbers<'a> {
    device: &'a str,
    inode: &'a str,
    /// `0`: the file system does not report it.
    born: &'a str,
}

impl<'a> Numbers<'a> {
    fn of(name: &'a str) -> Option<Self> {
        let mut parts = name.splitn(4, '-').skip(1);
        Some(Self { device: parts.next()?, inode: parts.next()?, born: parts.next()? })
    }

    fn same_directory(&self, other: &Self) -> bool {
        self.inode == other.inode && (self.born == other.born || self.born == "0" || other.born == "0")
    }
}

fn same_directory(one: &str, other: &str) -> bool {
    Numbers::of(one).zip(Numbers::of(other)).is_some_and(|(one, other)| one.same_directory(&other))
}

impl StateRoot {
    /// The place for a directory, created if missing.
    pub fn place(&self, directory: &fs::Metadata, over: &Path) -> Result<Place> {
        // One process at a time: no process creates a new place while another renames the old one.
        let _turn = self.places_turn()?;
        let name = key(directory);
        let own = self.known(&name)?;
        if let Some(own) = own.as_ref().filter(|own| own.has_left()) {
            return Place::open(own.path());
        }
        if let Some((left, _dead)) = self.renumbered(&name, over, own.is_some())? {
            if let Some(own) = own {
                // Its agent is starting or ending: then it is the one to join.
                let Some(_held) = own.try_hold()? else { return Ok(own) };
                fs::remove_dir_all(own.path()).map_err(|error| refuse(own.path(), &error.to_string()))?;
            }
            let from = left.name();
            rustix::fs::renameat(&self.dir, &*from, &self.dir, &*name)
                .map_err(|errno| refuse(left.path(), &errno.to_string()))?;
            tracing::info!(from, to = name, over = %over.display(), "the directory has another device number");
            return self.open_place(&name);
        }
        self.make_place(&name)
    }

    /// The place for a directory, if an agent ever had one; under its old name if its number changed.
    pub fn existing_place(&self, directory: &fs::Metadata, over: &Path) -> Result<Option<Place>> {
        let name = key(directory);
        let own = self.known(&name)?;
        if own.as_ref().is_some_and(Place::has_left) {
            return Ok(own);
        }
        Ok(self.renumbered(&name, over, own.is_some())?.map(|(place, _)| place).or(own))
    }

    /// The place that served `over` last, for a directory below a dead mount that cannot be read itself.
    pub fn place_of(&self, over: &Path) -> Result<Option<Place>> {
        Ok(self.places()?.into_iter().find(|place| place.served(over) && place.has_left()))
    }

    /// Leftovers at other places that served `over`; `used` is the place that serves the directory now.
    pub fn left_behind(&self, over: &Path, used: Option<&Place>) -> Result<Vec<Left>> {
        let used = used.map(Place::name);
        let mut left = Vec::new();
        for place in self.places()? {
            let name = place.name();
            if used.as_ref() == Some(&name) || !place.served(over) || !place.has_left() {
                continue;
            }
            let Some(_dead) = place.hold_dead()? else {
                if !place.is_answered() {
                    left.push(Left { place: place.path, counted: None, same_directory: false, is_held: true });
                }
                continue;
            };
            place.await_catalog();
            let counted = place.count_left();
            if counted != Some((0, 0)) {
                let same_directory = used.as_ref().is_some_and(|used| same_directory(used, &name));
                left.push(Left { place: place.path, counted, same_directory, is_held: false });
            }
        }
        Ok(left)
    }

    /// A place of the same directory under another number, held against agents; a place with leftovers comes first.
    fn renumbered(&self, name: &str, over: &Path, only_with_something: bool) -> Result<Option<(Place, Held)>> {
        let mut found = None;
        for place in self.places()? {
            if place.name() == name || !same_directory(&place.name(), name) || !place.served(over) {
                continue;
            }
            let left = place.has_left();
            if (only_with_something || found.is_some()) && !left {
                continue;
            }
            if let Some(dead) = place.hold_dead()? {
                found = Some((place, dead));
                if left {
                    break;
                }
            }
        }
        Ok(found)
    }

    fn places_turn(&self) -> Result<File> {
        let path = self.path.join("places.lock");
        let file = lock_file(&path).map_err(|error| refuse(&path, &error.to_string()))?;
        await_lock(file, &path, "another `surgetank run` or `surgetank mount` that looks for its directory's place")
    }

    /// Is the place still under its name? Another run may have renamed it.
    pub fn has(&self, place: &Place) -> bool {
        let here = rustix::fs::statat(&self.dir, place.name(), rustix::fs::AtFlags::SYMLINK_NOFOLLOW);
        here.is_ok_and(|here| rustix::fs::fstat(&place.dir).is_ok_and(|held| held.st_ino == here.st_ino))
    }
}

impl Left {
    /// The message for the user: the leftovers, and the command that brings them to their store.
    pub fn message(&self, over: &Path) -> String {
        let what = match self.counted {
            Some((files, operations)) => format!("{files} file(s) and {operations} operation(s)"),
            None => "an unknown number of files".to_owned(),
        };
        let commands = Commands::of_path(&self.place, over);
        let (run, at, over) = (commands.run(), self.place.display(), over.display());
        if self.is_held {
            return format!(
                "an earlier agent of {over} may have left files undrained ({at}); another process holds them, so this is not known"
            );
        }
        if self.same_directory {
            return format!(
                "an earlier agent of {over} left {what} undrained ({at}); when this is drained, the next run takes them up:\n  {run}"
            );
        }
        format!(
            "NOT taken up: an earlier agent of {over} left {what} undrained ({at}), and another directory or file system is there now. \
             They stay in the tiers; mount the file system that was there again, then:\n  {run}\nIf the files are not needed, remove {at}"
        )
    }
}

impl Place {
    fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    pub fn served(&self, over: &Path) -> bool {
        self.identity().is_some_and(|identity| identity.over.as_path() == over)
    }

    /// May leftovers exist here? The agent lives or was killed, or it wrote down that it left some.
    pub fn has_left(&self) -> bool {
        ["agent.json", "undrained.json"].iter().any(|name| self.inner(name).exists())
    }

    /// Files whose content only the tiers have or that are lost, and operations, as recorded in a dead agent's catalog.
    pub(super) fn count_left(&self) -> Option<(u64, u64)> {
        let catalog = self.path.join("catalog");
        if !catalog.exists() {
            return Some((0, 0));
        }
        let (image, _) = LogCatalog::look(&catalog).ok()?;
        let files = image.files.iter().filter(|(_, file)| {
            file.version != file.durable_version && (file.replica.is_some() || file.spill.is_some())
        });
        // A lost file counts as left until the user acknowledges it.
        Some(((files.count() + image.lost.len()) as u64, image.ops.len() as u64))
    }
}
