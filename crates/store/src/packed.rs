//! A store in which some files have another form: compressed as `NAME.surgetank.zst`, which `zstd -d` opens ([`zstd`]), or
//! deduplicated as `NAME.surgetank.ref`, which names the place of the content ([`shared`]). Programs see `NAME`, with the
//! content's length; no layer above knows the forms.
//!
//! A name has one of two *forms* in the store, plain or packed. A new version gets the form that suits it (`stage_file`); no
//! form is ever changed in place. If both exist, **the plain one counts**, and the other one is a leftover. A new version
//! therefore becomes visible in a single step in both directions: the new plain file appears, or the old plain file is removed
//! and the packed one counts. A crash between two steps leaves at worst a leftover. A leftover is removed before the plain file
//! that hides it.
//!
//! The dangers that it avoids:
//! - content that cannot be restored (a packed file is compared before it counts, and content that is read is summed);
//! - a file of unknown length (its owner may always read a packed one);
//! - another client's `.zst` that is taken for a packed file (the name and a record in it identify a packed file);
//! - a rename over the other form that leaves the old file visible.
//!
//! The cost: content can only be read by ranges (no plain files, no hard links, no exchange of names), each look at a name asks
//! for both forms, and each packed file's length is read from it once.

mod forms;
mod making;
mod remote;
#[cfg(feature = "dedup")]
pub mod shared;
#[cfg(test)]
#[cfg(feature = "compress")]
mod tests;
#[cfg(feature = "compress")]
pub mod zstd;

use std::collections::HashMap;
use std::fs::File;
use std::io;

use forms::{Form, Known, name_of, of_length};

use super::{
    Cred, Expect, Features, Gate, Meta, Remote, Savings, Source, Space, Staged, Store, StoreEntry, StorePath,
    StoreStat, Turn, Verify,
};
use surgetank_types::error::Errno;
use surgetank_types::model::{Kind, StoreIdentity, Xattrs};
use surgetank_types::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Most cached lengths; all are dropped when there are more.
const KNOWN_MAX: usize = 100_000;

/// One packed form of files.
pub trait Packing: Send + Sync {
    /// The end of a packed file's name.
    fn suffix(&self) -> &'static [u8];
    /// Packs the content of `source`, which will be published as `bound`. `None`: the file stays plain.
    fn make(&self, who: Cred, bound: &StorePath, source: &File, gate: Gate<'_>) -> io::Result<Option<Made>>;
    /// Length of the content of a packed file. Errors: InvalidData if it is damaged or not a packed file.
    fn length_of(&self, packed: &dyn Remote) -> io::Result<u64>;
    /// The content of a packed file, for reading.
    fn open(&self, who: Cred, packed: Arc<dyn Remote>) -> io::Result<Content>;
    /// Whether the path belongs to the packing itself and is hidden from programs.
    fn hides(&self, _path: &StorePath) -> bool {
        false
    }
    /// Savings since the agent started.
    fn savings(&self) -> Savings;

    // ---- for a form whose content is stored elsewhere
    /// Stages the content that the packed file refers to, under a separate temporary. The packed file is staged already.
    fn stage_behind(
        &self,
        _who: Cred,
        _temporary: &StorePath,
        _behind: &mut Behind,
        _source: &File,
        _gate: Gate<'_>,
    ) -> io::Result<()> {
        Ok(())
    }
    /// Makes the content durable under its name.
    fn settle_behind(&self, _who: Cred, _behind: &mut [Behind]) -> io::Result<()> {
        Ok(())
    }
    /// Compares the content in the store.
    fn verify_behind(&self, _who: Cred, _behind: &Behind, _how: Verify, _gate: Gate<'_>) -> io::Result<()> {
        Ok(())
    }
    /// Removes what may have been staged with this temporary, of which `packed` exists.
    fn discard_behind(&self, _who: Cred, _temporary: &StorePath, _packed: Option<&dyn Remote>) -> io::Result<()> {
        Ok(())
    }
}

/// The packed form of a file's content.
pub struct Made {
    /// The packed file, not in the store yet.
    pub packed: File,
    /// Length of the content.
    pub length_bytes: u64,
    /// CRC-64/NVME of the content.
    pub checksum: u64,
    /// The content, if the packed file only refers to it.
    pub behind: Option<Behind>,
}

/// Content to which a packed file only refers.
#[derive(Debug, Clone)]
pub struct Behind {
    /// Path of the content in the store.
    pub at: StorePath,
    /// Path of the content until it is settled; `None` if the store has it under its name.
    pub temporary: Option<StorePath>,
    /// Whether this agent sent it.
    pub is_new: bool,
    /// Whether the store had other bytes at the path.
    pub is_rotten: bool,
    /// Identity and checksum of the content.
    pub staged: Staged,
}

/// The content of a packed file.
pub struct Content {
    /// Length of the content.
    pub length_bytes: u64,
    /// CRC-64/NVME of the content.
    pub checksum: u64,
    /// Reads the content.
    pub read: Box<ReadAt>,
}

/// Fills the buffer with content from this offset on.
pub type ReadAt = dyn Fn(&mut [u8], u64) -> io::Result<()> + Send + Sync;

type Seen = (Form, Option<StoreIdentity>);

/// Staged and not yet published, by its temporary.
#[derive(Clone)]
struct Copy {
    form: Form,
    /// As the store sees it.
    lies: Staged,
    length_bytes: u64,
    behind: Option<Behind>,
}

/// A store in which some files are packed.
pub struct Packed {
    inner: Arc<dyn Store>,
    packing: Box<dyn Packing>,
    copies: Mutex<HashMap<StorePath, Copy>>,
    known: Mutex<HashMap<StorePath, Known>>,
    /// The forms at the last look at a name that is about to be published or replaced; `None`: no file of that form.
    seen: Mutex<HashMap<StorePath, Vec<Seen>>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_absent(why: &io::Error) -> bool {
    why.kind() == io::ErrorKind::NotFound
}

impl Packed {
    /// Packs files of the store `inner` by `packing`.
    pub fn new(inner: Arc<dyn Store>, packing: Box<dyn Packing>) -> Self {
        Self { inner, packing, copies: Mutex::default(), known: Mutex::default(), seen: Mutex::default() }
    }
}

impl Store for Packed {
    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn features(&self) -> Features {
        let inner = self.inner.features();
        // On a file system one after the other: there a file's content is removed only after its rename.
        let publications_at_once = if inner.plain_files { 1 } else { inner.publications_at_once };
        Features { plain_files: false, hard_links: false, atomic_renames: false, publications_at_once, ..inner }
    }

    fn savings(&self) -> Option<Savings> {
        Some(self.packing.savings().and(self.inner.savings().unwrap_or_default()))
    }

    fn may_hold(&self, path: &StorePath) -> io::Result<()> {
        if name_of(path).ends_with(self.packing.suffix()) || self.packing.hides(path) {
            return Err(Errno::ILSEQ.into());
        }
        self.inner.may_hold(path)
    }

    fn stat(&self, who: Cred, path: &StorePath) -> io::Result<StoreStat> {
        self.find(who, path).map(|found| found.stat)
    }

    fn known_stat(&self, who: Cred, path: &StorePath) -> Option<io::Result<StoreStat>> {
        if self.packing.hides(path) {
            return None;
        }
        match self.inner.known_stat(who, path)? {
            Err(absent) if is_absent(&absent) && self.may_be_packed(path) => {
                match self.inner.known_stat(who, &self.at(Form::Packed, path))? {
                    Ok(mut stat) if stat.attr.kind == Kind::File => {
                        let length_bytes = self.length_known(path, stat.identity)?;
                        stat.attr.size_bytes = length_bytes;
                        stat.identity = of_length(stat.identity, length_bytes);
                        Some(Ok(stat))
                    }
                    Ok(_) => Some(Err(absent)),
                    Err(why) => Some(Err(why)),
                }
            }
            answer => Some(answer),
        }
    }

    fn glance(&self, who: Cred, path: &StorePath) -> io::Result<StoreStat> {
        self.find_by(who, path, &|path| self.inner.glance(who, path)).map(|found| found.stat)
    }

    fn list(&self, who: Cred, path: &StorePath, temporaries: bool) -> io::Result<Vec<StoreEntry>> {
        let mut entries = self.inner.list(who, path, temporaries)?;
        if path.0.is_empty() {
            entries.retain(|entry| !self.packing.hides(&path.join(&entry.name)));
        }
        let is_packed = |entry: &StoreEntry| entry.kind == Kind::File && entry.name.ends_with(self.packing.suffix());
        let (packed, mut shown): (Vec<_>, Vec<_>) = entries.into_iter().partition(is_packed);
        if packed.is_empty() {
            return Ok(shown);
        }
        let plain: std::collections::HashSet<Box<[u8]>> = shown.iter().map(|entry| entry.name.clone()).collect();
        shown.extend(packed.into_iter().filter_map(|entry| {
            let name: Box<[u8]> = entry.name.strip_suffix(self.packing.suffix())?.into();
            (!name.is_empty() && !plain.contains(&name)).then_some(StoreEntry { name, ..entry })
        }));
        Ok(shown)
    }

    fn read_link(&self, who: Cred, path: &StorePath) -> io::Result<Box<[u8]>> {
        self.inner.read_link(who, path)
    }

    fn xattrs(&self, who: Cred, path: &StorePath) -> io::Result<Xattrs> {
        let found = self.find(who, path)?;
        self.inner.xattrs(who, &self.at(found.form, path))
    }

    fn space(&self, path: &StorePath) -> io::Result<Space> {
        self.inner.space(path)
    }

    fn learn_groups(&self, who: Cred, groups: &[u32]) -> bool {
        self.inner.learn_groups(who, groups)
    }

    fn may_write_dir(&self, who: Cred, path: &StorePath) -> io::Result<()> {
        self.inner.may_write_dir(who, path)
    }

    fn open(&self, _who: Cred, _path: &StorePath, _write: bool) -> io::Result<File> {
        Err(Errno::OPNOTSUPP.into())
    }

    fn source(&self, who: Cred, path: &StorePath) -> io::Result<Source> {
        let absent = match self.inner.source(who, path) {
            Err(why) if is_absent(&why) && self.may_be_packed(path) => why,
            opened => return Ok(Source::Remote(remote::by_ranges(opened?)?)),
        };
        // Whether `who` may read it is checked again: the length needs fewer rights.
        let file = match self.inner.source(who, &self.at(Form::Packed, path)) {
            Err(why) if is_absent(&why) => return Err(absent),
            opened => remote::by_ranges(opened?)?,
        };
        let lies = file.identity();
        let content = self.packing.open(who, file).map_err(|why| self.damaged(path, why))?;
        self.remember(path, lies, content.length_bytes);
        let identity = of_length(lies, content.length_bytes);
        Ok(Source::Remote(Arc::new(remote::Unpacked { content, identity })))
    }

    fn create_temporary(&self, _who: Cred, _path: &StorePath, _perm: u32) -> io::Result<File> {
        Err(Errno::OPNOTSUPP.into())
    }

    fn stage_file(
        &self,
        who: Cred,
        path: &StorePath,
        bound: &StorePath,
        source: &File,
        meta: &Meta,
        gate: Gate<'_>,
    ) -> io::Result<Staged> {
        if !path.is_temporary() {
            return Err(Errno::EXIST.into());
        }
        self.may_hold(bound)?;
        let before = locked(&self.copies).remove(path);
        let made = self.pack((who, bound), source, meta, gate)?;
        let form = if made.is_some() { Form::Packed } else { Form::Plain };
        // What an earlier agent left was removed before.
        if let Some(before) = before {
            if before.form != form {
                self.inner.discard(who, &self.at(before.form, path))?;
            }
            if before.behind.is_some_and(|behind| behind.temporary.is_some()) {
                self.packing.discard_behind(who, path, None)?;
            }
        }
        let meta = self.with_xattrs(who, bound, form, meta)?;
        let content = made.as_ref().map_or(source, |made| &made.packed);
        let lies = self.inner.stage_file(who, &self.at(form, path), &self.at(form, bound), content, &meta, gate)?;
        let (length_bytes, checksum, mut behind) = match made {
            Some(made) => (made.length_bytes, made.checksum, made.behind),
            None => (lies.identity.size_bytes, lies.checksum, None),
        };
        if let Some(behind) = &mut behind {
            crash_point!("packed.referred");
            self.packing.stage_behind(who, path, behind, source, gate)?;
        }
        locked(&self.copies).insert(path.clone(), Copy { form, lies, length_bytes, behind });
        Ok(Staged { identity: of_length(lies.identity, length_bytes), checksum })
    }

    /// Stages what an earlier agent staged.
    fn stage_in_place(&self, who: Cred, path: &StorePath, meta: &Meta, gate: Gate<'_>) -> io::Result<Staged> {
        let found = self.find(who, path)?;
        let kept = Meta {
            perm: if found.form == Form::Packed { self.readable(meta.perm) } else { meta.perm },
            ..meta.clone()
        };
        let lies = self.inner.stage_in_place(who, &self.at(found.form, path), &kept, gate)?;
        let length_bytes = found.stat.attr.size_bytes;
        let checksum = match found.form {
            Form::Plain => lies.checksum,
            Form::Packed => {
                let file = self.opened(who, path)?;
                self.packing.open(who, file).map_err(|why| self.damaged(path, why))?.checksum
            }
        };
        locked(&self.copies).insert(path.clone(), Copy { form: found.form, lies, length_bytes, behind: None });
        Ok(Staged { identity: of_length(lies.identity, length_bytes), checksum })
    }

    fn stage_dir(&self, who: Cred, path: &StorePath, meta: &Meta) -> io::Result<Staged> {
        self.as_it_is(path, self.inner.stage_dir(who, path, meta)?)
    }

    fn stage_symlink(&self, who: Cred, path: &StorePath, target: &[u8], meta: &Meta) -> io::Result<Staged> {
        self.as_it_is(path, self.inner.stage_symlink(who, path, target, meta)?)
    }

    fn stage_node(&self, who: Cred, path: &StorePath, kind: Kind, device: u64, meta: &Meta) -> io::Result<Staged> {
        self.as_it_is(path, self.inner.stage_node(who, path, kind, device, meta)?)
    }

    fn settle(&self, who: Cred, paths: &[StorePath]) -> io::Result<()> {
        // First the content to which they refer.
        let mut behind: Vec<(&StorePath, Behind)> = {
            let copies = locked(&self.copies);
            let behind = |path| Some((path, copies.get(path)?.behind.clone()?));
            paths.iter().filter_map(behind).collect()
        };
        if !behind.is_empty() {
            let mut all: Vec<Behind> = behind.iter().map(|(_, behind)| behind.clone()).collect();
            self.packing.settle_behind(who, &mut all)?;
            behind.iter_mut().zip(all).for_each(|((_, before), now)| *before = now);
            let mut copies = locked(&self.copies);
            for (path, behind) in behind {
                if let Some(copy) = copies.get_mut(path) {
                    copy.behind = Some(behind);
                }
            }
        }
        let forms = paths.iter().map(|path| match self.staged_form(who, path) {
            Ok(copy) => self.at(copy.form, path),
            Err(_) => path.clone(),
        });
        self.inner.settle(who, &forms.collect::<Vec<_>>())
    }

    /// Packed bytes were unpacked and compared when they were made: the bytes in the store must be the same.
    fn verify(&self, who: Cred, path: &StorePath, staged: &Staged, how: Verify, gate: Gate<'_>) -> io::Result<()> {
        let copy = locked(&self.copies).get(path).cloned();
        match copy.filter(|copy| of_length(copy.lies.identity, copy.length_bytes) == staged.identity) {
            Some(copy) => {
                self.inner.verify(who, &self.at(copy.form, path), &copy.lies, how, gate)?;
                copy.behind.map_or(Ok(()), |behind| self.packing.verify_behind(who, &behind, how, gate))
            }
            None => self.inner.verify(who, path, staged, how, gate),
        }
    }

    fn collect(&self) -> io::Result<u64> {
        self.inner.collect()
    }

    fn release(&self, temporary: &StorePath) {
        let copy = locked(&self.copies).remove(temporary);
        self.inner.release(&self.at(copy.map_or(Form::Plain, |copy| copy.form), temporary));
    }

    fn refresh(&self) {
        locked(&self.known).clear();
        self.inner.refresh();
    }

    fn discard(&self, who: Cred, path: &StorePath) -> io::Result<()> {
        if !path.is_temporary() {
            return self.inner.discard(who, path);
        }
        let copy = locked(&self.copies).remove(path);
        if copy.as_ref().is_none_or(|copy| copy.form == Form::Packed) && self.may_be_packed(path) {
            let packed = self.at(Form::Packed, path);
            let left = match copy {
                Some(_) => None,
                None => self.inner.source(who, &packed).ok().and_then(|left| remote::by_ranges(left).ok()),
            };
            self.packing.discard_behind(who, path, left.as_deref())?;
            self.inner.discard(who, &packed)?;
        }
        match copy {
            Some(Copy { form: Form::Packed, .. }) => Ok(()),
            _ => self.inner.discard(who, path),
        }
    }

    fn check(&self, who: Cred, path: &StorePath, expect: &Expect) -> io::Result<bool> {
        if matches!(expect, Expect::Absent | Expect::Unknown) {
            if self.may_be_packed(path) {
                match self.inner.stat(who, &self.at(Form::Packed, path)) {
                    Err(why) if is_absent(&why) => {}
                    there => return there.map(|_| false),
                }
                if !self.inner.check(who, &self.at(Form::Packed, path), expect)? {
                    return Ok(false);
                }
            }
            let is_absent = self.inner.check(who, path, expect)?;
            if is_absent {
                self.saw(path, &[(Form::Plain, None), (Form::Packed, None)]);
            }
            return Ok(is_absent);
        }
        let found = match self.find(who, path) {
            Ok(found) if found.form == Form::Packed => found,
            Ok(found) => {
                self.saw(path, &[(Form::Plain, Some(found.lies))]);
                return self.inner.check(who, path, expect);
            }
            Err(why) if !is_absent(&why) => return Err(why),
            Err(_) => return self.inner.check(who, path, expect),
        };
        let is = found.stat.identity;
        let lies = match expect {
            Expect::Identity(known) => (is == *known).then_some(Expect::Identity(found.lies)),
            Expect::Linked(known) => {
                (StoreIdentity { ctime_nanos: known.ctime_nanos, ..is } == *known).then_some(Expect::Linked(found.lies))
            }
            other => Some(*other),
        };
        match lies {
            Some(lies) => {
                self.saw(path, &[(Form::Plain, None)]);
                self.inner.check(who, &self.at(Form::Packed, path), &lies)
            }
            None => Ok(false),
        }
    }

    fn writes_over(&self, who: Cred, temporary: &StorePath, path: &StorePath) -> io::Result<bool> {
        let form = self.staged_form(who, temporary)?.form;
        self.inner.writes_over(who, &self.at(form, temporary), &self.at(form, path))
    }

    fn publish(&self, who: Cred, temporary: &StorePath, path: &StorePath, meta: &Meta) -> io::Result<StoreIdentity> {
        self.bring(who, temporary, path, &|from, to| self.inner.publish(who, from, to, meta))
    }

    fn publish_in_turn(
        &self,
        who: Cred,
        temporary: &StorePath,
        path: &StorePath,
        meta: &Meta,
        turn: Turn<'_>,
    ) -> io::Result<StoreIdentity> {
        self.bring(who, temporary, path, &|from, to| self.inner.publish_in_turn(who, from, to, meta, turn))
    }

    fn replace(&self, who: Cred, temporary: &StorePath, path: &StorePath, meta: &Meta) -> io::Result<StoreIdentity> {
        self.bring(who, temporary, path, &|from, to| self.inner.replace(who, from, to, meta))
    }

    fn rename(&self, who: Cred, from: &StorePath, to: &StorePath) -> io::Result<()> {
        let found = self.find(who, from)?;
        locked(&self.seen).remove(to);
        if found.stat.attr.kind == Kind::Directory {
            locked(&self.seen).clear();
            locked(&self.known).clear();
            self.inner.rename(who, from, to)?;
            self.moved(from, to);
            return Ok(());
        }
        if found.form == Form::Plain {
            // Hidden until now by the form that is removed.
            self.remove_form(who, from, Form::Packed)?;
            self.inner.rename(who, from, to)?;
            crash_point!("packed.renamed");
            return self.remove_form(who, to, Form::Packed);
        }
        if !self.may_be_packed(to) {
            return Err(Errno::NAMETOOLONG.into());
        }
        // While both exist the old form would count, and the new one would be invisible.
        self.remove_form(who, to, Form::Plain)?;
        crash_point!("packed.renamed");
        self.inner.rename(who, &self.at(Form::Packed, from), &self.at(Form::Packed, to))
    }

    fn exchange(&self, _who: Cred, _a: &StorePath, _b: &StorePath) -> io::Result<()> {
        Err(Errno::INVAL.into())
    }

    fn link(&self, _who: Cred, _from: &StorePath, _to: &StorePath) -> io::Result<()> {
        Err(Errno::PERM.into())
    }

    fn unlink(&self, who: Cred, path: &StorePath) -> io::Result<()> {
        locked(&self.seen).remove(path);
        match self.inner.stat(who, path) {
            Ok(_) => {
                self.remove_form(who, path, Form::Packed)?;
                self.inner.unlink(who, path)
            }
            Err(why) if is_absent(&why) && self.may_be_packed(path) => {
                self.inner.unlink(who, &self.at(Form::Packed, path))
            }
            Err(why) => Err(why),
        }
    }

    fn remove_dir(&self, who: Cred, path: &StorePath) -> io::Result<()> {
        self.inner.remove_dir(who, path)
    }

    fn set_meta(&self, who: Cred, path: &StorePath, kind: Kind, meta: &Meta) -> io::Result<StoreIdentity> {
        let found = if kind == Kind::File { Some(self.find(who, path)?) } else { None };
        let Some(found) = found.filter(|found| found.form == Form::Packed) else {
            return self.inner.set_meta(who, path, kind, meta);
        };
        let kept = Meta { perm: self.readable(meta.perm), ..meta.clone() };
        let lies = self.inner.set_meta(who, &self.at(Form::Packed, path), kind, &kept)?;
        let length_bytes = found.stat.attr.size_bytes;
        self.remember(path, lies, length_bytes);
        Ok(of_length(lies, length_bytes))
    }

    fn sync_dirs(&self, who: Cred, paths: &[StorePath]) -> io::Result<()> {
        self.inner.sync_dirs(who, paths)
    }

    fn leave_notice(&self, name: &[u8]) -> io::Result<()> {
        self.inner.leave_notice(name)
    }

    fn has_notice(&self, name: &[u8]) -> io::Result<bool> {
        self.inner.has_notice(name)
    }

    fn remove_notices(&self, prefix: &[u8]) -> io::Result<()> {
        self.inner.remove_notices(prefix)
    }
}

impl Packed {
    /// A staged file without content of its own.
    fn as_it_is(&self, path: &StorePath, lies: Staged) -> io::Result<Staged> {
        let copy = Copy { form: Form::Plain, lies, length_bytes: lies.identity.size_bytes, behind: None };
        locked(&self.copies).insert(path.clone(), copy);
        Ok(lies)
    }
}
