//! A new version: made in the form that suits it, and put in the place of the previous one, whatever its form.

use std::fs::File;
use std::io;

use super::forms::{Form, of_length};
use super::{Copy, Made, Packed, is_absent, locked};
use crate::{Cred, Gate, Meta, Staged, StorePath};
use surgetank_types::model::{Kind, StoreIdentity};

impl Packed {
    /// The mode of a packed file: its owner must be able to read its length. (A server of objects has no permission bits.)
    pub(super) fn readable(&self, perm: u32) -> u32 {
        if self.inner.features().directories { perm | 0o400 } else { perm }
    }

    /// Follows the rename of a directory with staged copies.
    pub(super) fn moved(&self, from: &StorePath, to: &StorePath) {
        let mut copies = locked(&self.copies);
        let inside: Vec<StorePath> = copies.keys().filter(|path| path.is_below(from)).cloned().collect();
        for path in inside {
            if let Some(copy) = copies.remove(&path) {
                copies.insert(StorePath([&*to.0, &path.0[from.0.len()..]].concat()), copy);
            }
        }
    }

    /// The form and name under which a temporary is stored.
    pub(super) fn staged_form(&self, who: Cred, temporary: &StorePath) -> io::Result<Copy> {
        if let Some(copy) = locked(&self.copies).get(temporary) {
            return Ok(copy.clone());
        }
        // Of an earlier agent.
        let found = self.find(who, temporary)?;
        let lies = Staged { identity: found.lies, checksum: 0 };
        Ok(Copy { form: found.form, lies, length_bytes: found.stat.attr.size_bytes, behind: None })
    }

    /// `None`: the file stays plain.
    pub(super) fn pack(
        &self,
        (who, bound): (Cred, &StorePath),
        source: &File,
        meta: &Meta,
        gate: Gate<'_>,
    ) -> io::Result<Option<Made>> {
        if meta.perm != self.readable(meta.perm) || !self.may_be_packed(bound) {
            return Ok(None);
        }
        // A file with several names, or of another owner, is overwritten in place.
        let present = self.inner.stat(who, bound);
        if present.is_ok_and(|there| there.attr.links > 1 || there.attr.uid != meta.uid) {
            return Ok(None);
        }
        self.packing.make(who, bound, source, gate)
    }

    /// Extended attributes that are not given stay with the name, also when its form changes.
    pub(super) fn with_xattrs(&self, who: Cred, bound: &StorePath, form: Form, meta: &Meta) -> io::Result<Meta> {
        let mut meta = meta.clone();
        if meta.xattrs.is_none() {
            match self.find(who, bound) {
                Ok(found) if found.form != form && found.stat.attr.kind == Kind::File => {
                    meta.xattrs = Some(self.inner.xattrs(who, &self.at(found.form, bound))?);
                }
                Err(why) if !is_absent(&why) && why.raw_os_error() != Some(libc::ENOTDIR) => return Err(why),
                _ => {}
            }
        }
        Ok(meta)
    }

    /// Publishes one form and removes the other form of the same name.
    pub(super) fn bring(
        &self,
        who: Cred,
        temporary: &StorePath,
        path: &StorePath,
        publish: &dyn Fn(&StorePath, &StorePath) -> io::Result<StoreIdentity>,
    ) -> io::Result<StoreIdentity> {
        let copy = self.staged_form(who, temporary)?;
        if copy.form == Form::Packed && !locked(&self.copies).contains_key(temporary) {
            // Of an earlier agent: the content to which it refers must exist.
            let file = self.opened(who, temporary)?;
            self.packing.open(who, file).map_err(|why| self.damaged(temporary, why))?;
        }
        let lies = publish(&self.at(copy.form, temporary), &self.at(copy.form, path))?;
        crash_point!("packed.published");
        let other = copy.form.other();
        let seen = locked(&self.seen).remove(path).unwrap_or_default();
        match seen.into_iter().find(|(form, _)| *form == other) {
            Some((_, None)) => {}
            // What another client wrote meanwhile is newer: it counts, and stays.
            Some((_, Some(known))) if !self.lies_as(who, &self.at(other, path), known)? => {
                tracing::warn!(path = %path, "replaced in the store while a packed version was published: left as it is");
            }
            Some(_) | None => self.remove_form(who, path, other)?,
        }
        locked(&self.copies).remove(temporary);
        if copy.form == Form::Plain {
            return Ok(lies);
        }
        self.remember(path, lies, copy.length_bytes);
        Ok(of_length(lies, copy.length_bytes))
    }

    /// Whether the file is exactly that version, or absent.
    fn lies_as(&self, who: Cred, at: &StorePath, known: StoreIdentity) -> io::Result<bool> {
        match self.inner.stat(who, at) {
            Ok(now) => Ok(known.is(&now.identity)),
            Err(why) if is_absent(&why) => Ok(true),
            Err(why) => Err(why),
        }
    }
}
