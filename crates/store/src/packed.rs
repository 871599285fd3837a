//! A store in which some files lie in another form: compressed as `NAME.surgetank.zst`, which `zstd -d` opens ([`zstd`]), or
//! deduplicated as `NAME.surgetank.ref`, which says where the content lies ([`shared`]). Programs see `NAME`, with its own
//! length; nothing above this knows of it.
//!
//! A name has one of two *forms* there, plain or packed. A new version takes the form that suits it (`stage_file`): no
//! form is ever changed in place. Where both lie side by side **the plain one counts**, and the other one is a leftover: so
//! the step that shows a new version is a single one in both directions (the new plain one appears; or the old plain one
//! goes, and the packed one behind it is seen), and whoever dies between two steps leaves nothing worse than a leftover.
//! A leftover goes before the plain one that hides it does.
//!
//! Dangers avoided: bytes that do not come out again (what is packed is compared before it counts, and what comes
//! back is summed); a file whose length nobody can tell (its owner may always read a packed one); somebody's own `.zst`
//! taken for ours (the name and a record in it say whose it is); a rename over the other form that leaves the old file
//! in view.
//!
//! What it costs: content is had by ranges only (no plain files, no hard links, no exchange of names), each look at a name
//! asks for both forms, each packed file's length is read from it once.

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

/// Lengths remembered; all are forgotten when there are more.
const KNOWN_MAX: usize = 100_000;

/// One way to pack.
pub trait Packing: Send + Sync {
    /// What a packed file's name ends with.
    fn suffix(&self) -> &'static [u8];
    /// The packed form of what `source` has and will be `bound`. `None`: it is to be plain.
    fn make(&self, who: Cred, bound: &StorePath, source: &File, gate: Gate<'_>) -> io::Result<Option<Made>>;
    /// Of the content of a packed file. InvalidData: it is damaged, or not ours.
    fn length_of(&self, packed: &dyn Remote) -> io::Result<u64>;
    fn open(&self, who: Cred, packed: Arc<dyn Remote>) -> io::Result<Content>;
    /// Is it nobody's but ours?
    fn hides(&self, _path: &StorePath) -> bool {
        false
    }
    fn savings(&self) -> Savings;

    // ---- for a form whose content lies elsewhere
    /// Puts what `behind` needs into the store, under a temporary of its own. The packed file is staged already.
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
    /// From now on it is there for good.
    fn settle_behind(&self, _who: Cred, _behind: &mut [Behind]) -> io::Result<()> {
        Ok(())
    }
    fn verify_behind(&self, _who: Cred, _behind: &Behind, _how: Verify, _gate: Gate<'_>) -> io::Result<()> {
        Ok(())
    }
    /// Gives up what may have been staged with this temporary, of which `packed` is there.
    fn discard_behind(&self, _who: Cred, _temporary: &StorePath, _packed: Option<&dyn Remote>) -> io::Result<()> {
        Ok(())
    }
}

/// The packed form of a file's content.
pub struct Made {
    pub packed: File,
    pub length_bytes: u64,
    /// CRC-64/NVME of the content.
    pub checksum: u64,
    pub behind: Option<Behind>,
}

/// Content that a packed file only refers to.
#[derive(Debug, Clone)]
pub struct Behind {
    pub at: StorePath,
    /// Where it lies until it is settled; `None`: the store had it, or it is.
    pub temporary: Option<StorePath>,
    /// Sent by us.
    pub is_new: bool,
    /// What lay there was not that.
    pub is_rotten: bool,
    pub staged: Staged,
}

/// What comes out of a packed file.
pub struct Content {
    pub length_bytes: u64,
    pub checksum: u64,
    /// Fills the buffer from there.
    pub read: Box<ReadAt>,
}

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

pub struct Packed {
    inner: Arc<dyn Store>,
    packing: Box<dyn Packing>,
    copies: Mutex<HashMap<StorePath, Copy>>,
    known: Mutex<HashMap<StorePath, Known>>,
    /// What lay there when a name was looked at that is about to be published or replaced; `None`: nothing of that form.
    seen: Mutex<HashMap<StorePath, Vec<Seen>>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_absent(why: &io::Error) -> bool {
    why.kind() == io::ErrorKind::NotFound
}

impl Packed {
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
        // (Of a file system one after the other: there what a file is behind goes only after it was renamed into place.)
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

    fn told(&self, who: Cred, path: &StorePath) -> Option<io::Result<StoreStat>> {
        if self.packing.hides(path) {
            return None;
        }
        match self.inner.told(who, path)? {
            Err(absent) if is_absent(&absent) && self.may_be_packed(path) => {
                match self.inner.told(who, &self.at(Form::Packed, path))? {
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
            told => Some(told),
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
        // (Who may read it is asked again: to know its length is less.)
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
        // (What an earlier agent left is gone by now.)
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

    /// What an earlier agent staged.
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
        // First what they refer to.
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

    /// What was packed was seen to come out again as it was, when it was made: the bytes in the store have to be those.
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

    fn let_go(&self, temporary: &StorePath) {
        let copy = locked(&self.copies).remove(temporary);
        self.inner.let_go(&self.at(copy.map_or(Form::Plain, |copy| copy.form), temporary));
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
            // Hidden until now by what goes away.
            self.remove_form(who, from, Form::Packed)?;
            self.inner.rename(who, from, to)?;
            crash_point!("packed.renamed");
            return self.remove_form(who, to, Form::Packed);
        }
        if !self.may_be_packed(to) {
            return Err(Errno::NAMETOOLONG.into());
        }
        // While both are there the old one would count, and this one be found nowhere.
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
}

impl Packed {
    /// Staged without content of its own.
    fn as_it_is(&self, path: &StorePath, lies: Staged) -> io::Result<Staged> {
        let copy = Copy { form: Form::Plain, lies, length_bytes: lies.identity.size_bytes, behind: None };
        locked(&self.copies).insert(path.clone(), copy);
        Ok(lies)
    }
}
