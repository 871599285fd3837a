//! A new version: made in the form that suits it, and put in the place of the one before, whatever its form.

use std::fs::File;
use std::io;

use rustix::fs::{Mode, OFlags};

use super::forms::{Form, may_be_packed, of_length};
use super::frames::{self, Made};
use super::{Compressed, Copy, WORTH_BYTES, is_absent, locked};
use crate::model::{Kind, StoreIdentity};
use crate::store::{Cred, Gate, Meta, Staged, StorePath};

impl Compressed {
    /// In a directory its owner has to find out how long a compressed file is; a server asks nobody for permission bits.
    pub(super) fn readable(&self, perm: u32) -> u32 {
        if self.inner.features().plain_files { perm | 0o400 } else { perm }
    }

    /// A directory has another name, and so has what is staged in it.
    pub(super) fn moved(&self, from: &StorePath, to: &StorePath) {
        let mut copies = locked(&self.copies);
        let inside: Vec<StorePath> = copies.keys().filter(|path| path.is_below(from)).cloned().collect();
        for path in inside {
            if let Some(copy) = copies.remove(&path) {
                copies.insert(StorePath([&*to.0, &path.0[from.0.len()..]].concat()), copy);
            }
        }
    }

    /// As it lies there: under which name, and as what.
    pub(super) fn staged_form(&self, who: Cred, temporary: &StorePath) -> io::Result<Copy> {
        if let Some(copy) = locked(&self.copies).get(temporary) {
            return Ok(*copy);
        }
        // An earlier agent's.
        let found = self.find(who, temporary)?;
        let lies = Staged { identity: found.lies, checksum: 0 };
        Ok(Copy { form: found.form, lies, length_bytes: found.stat.attr.size_bytes })
    }

    /// `None`: it is to be plain.
    pub(super) fn compress(
        &self,
        (who, bound): (Cred, &StorePath),
        source: &File,
        level: i32,
        meta: &Meta,
        gate: Gate<'_>,
    ) -> io::Result<Option<(File, Made)>> {
        let is_small = source.metadata()?.len() < WORTH_BYTES && !self.always;
        if is_small || meta.perm != self.readable(meta.perm) || !may_be_packed(bound) {
            return Ok(None);
        }
        // A file of several names, or somebody else's, is written over where it is.
        let present = self.inner.stat(who, bound);
        if present.is_ok_and(|there| there.attr.links > 1 || there.attr.uid != meta.uid) {
            return Ok(None);
        }
        let began = crate::clock::tick();
        let scratch = rustix::fs::openat(
            &self.scratch,
            c".",
            OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC,
            Mode::from_raw_mode(0o600),
        );
        // Where it cannot be made, the store gets it as it is.
        let unmade = |why: io::Error| {
            tracing::warn!(path = %bound, %why, "nothing can be compressed beside our state: it is stored as it is");
        };
        let scratch = match scratch {
            Ok(scratch) => File::from(scratch),
            Err(why) => {
                unmade(why.into());
                return Ok(None);
            }
        };
        let made = match frames::compress(source, &scratch, level, self.always, gate) {
            Err(why) if matches!(why.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT)) => {
                unmade(why);
                return Ok(None);
            }
            made => made?,
        };
        let mut savings = locked(&self.savings);
        let took = crate::clock::tick().saturating_duration_since(began);
        savings.compress_ms += u64::try_from(took.as_millis()).unwrap_or(0);
        match &made {
            Some(made) => {
                savings.compressed_files += 1;
                savings.content_bytes += made.length_bytes;
                savings.stored_bytes += made.stored_bytes;
            }
            None => savings.vain_files += 1,
        }
        Ok(made.map(|made| (scratch, made)))
    }

    /// Extended attributes that are not given stay with the name, also when its form is another one from now on.
    pub(super) fn with_xattrs(&self, who: Cred, bound: &StorePath, form: Form, meta: &Meta) -> io::Result<Meta> {
        let mut meta = meta.clone();
        if meta.xattrs.is_none() {
            match self.find(who, bound) {
                Ok(found) if found.form != form && found.stat.attr.kind == Kind::File => {
                    meta.xattrs = Some(self.inner.xattrs(who, &found.form.of(bound))?);
                }
                Err(why) if !is_absent(&why) && why.raw_os_error() != Some(libc::ENOTDIR) => return Err(why),
                _ => {}
            }
        }
        Ok(meta)
    }

    /// Whatever is published under a name, the other form of that name goes.
    pub(super) fn bring(
        &self,
        who: Cred,
        temporary: &StorePath,
        path: &StorePath,
        publish: &dyn Fn(&StorePath, &StorePath) -> io::Result<StoreIdentity>,
    ) -> io::Result<StoreIdentity> {
        let copy = self.staged_form(who, temporary)?;
        let lies = publish(&copy.form.of(temporary), &copy.form.of(path))?;
        crash_point!("compressed.published");
        let other = copy.form.other();
        let seen = locked(&self.seen).remove(path).unwrap_or_default();
        match seen.into_iter().find(|(form, _)| *form == other) {
            Some((_, None)) => {}
            // What somebody else wrote there meanwhile was written after ours: it counts, and stays.
            Some((_, Some(known))) if !self.lies_as(who, &other.of(path), known)? => {
                tracing::warn!(path = %path, "replaced in the store while a compressed version was published: left as it is");
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

    /// Is it that one, or nothing at all?
    fn lies_as(&self, who: Cred, at: &StorePath, known: StoreIdentity) -> io::Result<bool> {
        match self.inner.stat(who, at) {
            Ok(now) => Ok(known.is(&now.identity)),
            Err(why) if is_absent(&why) => Ok(true),
            Err(why) => Err(why),
        }
    }
}
