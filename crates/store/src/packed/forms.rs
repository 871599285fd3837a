//! The form of a name in the store, and the length of a packed file.

use std::io;

use super::{KNOWN_MAX, Packed, Seen, is_absent, locked, remote};
use crate::{Cred, Remote, StorePath, StoreStat};
use surgetank_types::error::Errno;
use surgetank_types::model::{Kind, StoreIdentity};
use surgetank_types::sync::Arc;

const NAME_BYTES_MAX: usize = 255;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Plain,
    Packed,
}

impl Form {
    pub fn other(self) -> Self {
        match self {
            Self::Plain => Self::Packed,
            Self::Packed => Self::Plain,
        }
    }
}

/// A file in its form.
pub(super) struct Found {
    pub form: Form,
    /// As programs see it.
    pub stat: StoreStat,
    /// As the store has it.
    pub lies: StoreIdentity,
}

/// The length that a packed file records.
#[derive(Clone, Copy)]
pub(super) struct Known {
    pub lies: StoreIdentity,
    pub length_bytes: u64,
}

/// Only the last part of the path: the directories are the store's.
pub(super) fn name_of(path: &StorePath) -> &[u8] {
    path.0.rsplit(|byte| *byte == b'/').next().unwrap_or_default()
}

pub(super) fn of_length(identity: StoreIdentity, length_bytes: u64) -> StoreIdentity {
    StoreIdentity { size_bytes: length_bytes, ..identity }
}

impl Packed {
    pub(super) fn at(&self, form: Form, path: &StorePath) -> StorePath {
        match form {
            Form::Plain => path.clone(),
            Form::Packed => StorePath([&path.0, self.packing.suffix()].concat()),
        }
    }

    /// Whether a packed form of the name is possible.
    pub(super) fn may_be_packed(&self, path: &StorePath) -> bool {
        let name = name_of(path);
        !name.is_empty() && name.len() + self.packing.suffix().len() <= NAME_BYTES_MAX
    }

    pub(super) fn find(&self, who: Cred, path: &StorePath) -> io::Result<Found> {
        self.find_by(who, path, &|path| self.inner.stat(who, path))
    }

    pub(super) fn find_by(
        &self,
        who: Cred,
        path: &StorePath,
        look: &dyn Fn(&StorePath) -> io::Result<StoreStat>,
    ) -> io::Result<Found> {
        if self.packing.hides(path) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let absent = match look(path) {
            Ok(stat) => return Ok(Found { form: Form::Plain, stat, lies: stat.identity }),
            Err(why) if is_absent(&why) && self.may_be_packed(path) => why,
            Err(why) => return Err(why),
        };
        match look(&self.at(Form::Packed, path)) {
            Ok(stat) if stat.attr.kind == Kind::File => self.packed(who, path, stat),
            Ok(_) => Err(absent),
            Err(why) if is_absent(&why) => Err(absent),
            Err(why) => Err(why),
        }
    }

    pub(super) fn packed(&self, who: Cred, path: &StorePath, mut stat: StoreStat) -> io::Result<Found> {
        let lies = stat.identity;
        let length_bytes = match self.length_known(path, lies) {
            Some(known) => known,
            None => {
                let file = self.opened(who, path)?;
                let length_bytes = self.packing.length_of(&*file).map_err(|why| self.damaged(path, why))?;
                self.remember(path, file.identity(), length_bytes);
                if file.identity() != lies {
                    // Another version since.
                    return Err(Errno::STALE.into());
                }
                length_bytes
            }
        };
        stat.attr.size_bytes = length_bytes;
        stat.identity = of_length(lies, length_bytes);
        Ok(Found { form: Form::Packed, stat, lies })
    }

    pub(super) fn length_known(&self, path: &StorePath, lies: StoreIdentity) -> Option<u64> {
        locked(&self.known).get(path).filter(|known| known.lies == lies).map(|known| known.length_bytes)
    }

    pub(super) fn remember(&self, path: &StorePath, lies: StoreIdentity, length_bytes: u64) {
        let mut known = locked(&self.known);
        if known.len() >= KNOWN_MAX {
            known.clear();
        }
        known.insert(path.clone(), Known { lies, length_bytes });
    }

    pub(super) fn saw(&self, path: &StorePath, forms: &[Seen]) {
        let mut seen = locked(&self.seen);
        // A dropped entry is looked at again.
        if seen.len() >= KNOWN_MAX {
            seen.clear();
        }
        seen.insert(path.clone(), forms.to_vec());
    }

    /// The packed file.
    pub(super) fn opened(&self, who: Cred, path: &StorePath) -> io::Result<Arc<dyn Remote>> {
        let at = self.at(Form::Packed, path);
        let opened = match self.inner.source(who, &at) {
            // A caller that may not read the file may know its length.
            Err(why) if why.kind() == io::ErrorKind::PermissionDenied && rustix::process::geteuid().is_root() => {
                self.inner.source(Cred { uid: 0, gid: 0 }, &at)
            }
            opened => opened,
        };
        remote::by_ranges(opened?)
    }

    /// The error of a damaged packed file, with its path.
    pub(super) fn damaged(&self, path: &StorePath, why: io::Error) -> io::Error {
        if why.kind() != io::ErrorKind::InvalidData {
            return why;
        }
        let at = self.at(Form::Packed, path);
        tracing::error!(path = %at, %why, "a packed file in the store cannot be read");
        io::Error::new(io::ErrorKind::InvalidData, format!("{at} in {}: {why}", self.inner.describe()))
    }

    /// Removes the form if it exists.
    pub(super) fn remove_form(&self, who: Cred, path: &StorePath, form: Form) -> io::Result<()> {
        if !self.may_be_packed(path) {
            return Ok(());
        }
        let at = self.at(form, path);
        match self.inner.stat(who, &at) {
            Ok(there) if there.attr.kind == Kind::File || form == Form::Plain && there.attr.kind != Kind::Directory => {
                match self.inner.unlink(who, &at) {
                    Err(why) if !is_absent(&why) => Err(why),
                    _ => Ok(()),
                }
            }
            Err(why) if !is_absent(&why) => Err(why),
            _ => Ok(()),
        }
    }
}
