//! A store in which some files lie compressed: `NAME.surgetank.zst`, which `zstd -d` opens. Programs see `NAME`, with its own
//! length; nothing above this knows of it.
//!
//! A name has one of two *forms* there, plain or compressed. A new version takes the form that suits it (`stage_file`): no
//! form is ever changed in place. Where both lie side by side **the plain one counts**, and the other one is a leftover: so
//! the step that shows a new version is a single one in both directions (the new plain one appears; or the old plain one
//! goes, and the compressed one behind it is seen), and whoever dies between two steps leaves nothing worse than a leftover.
//! A leftover goes before the plain one that hides it does.
//!
//! Dangers avoided: bytes that do not come out again (every frame is unpacked and compared before it counts, and what comes
//! back is summed); a file whose length nobody can tell (its owner may always read a compressed one); somebody's own `.zst`
//! taken for ours (the name and a record at its end say whose it is); a rename over the other form that leaves the old file
//! in view.
//!
//! What it costs: content is had by ranges only (no plain files, no hard links, no exchange of names), each look at a name
//! asks for both forms, each compressed file's length is read from its end once.

mod forms;
mod frames;
mod making;
mod remote;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use forms::{Form, Known, may_be_packed, name_of, of_length};
use frames::Table;

use super::{
    Cred, Expect, Features, Gate, Meta, Savings, Source, Space, Staged, Store, StoreEntry, StorePath, StoreStat, Turn,
    Verify,
};
use crate::error::Errno;
use crate::model::{Kind, StoreIdentity, Xattrs};
use crate::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a compressed file's last bytes say, for the fuzzer; some of what they point to is looked for in them.
#[cfg(fuzzing)]
pub fn read_end(bytes: &[u8]) {
    struct InMemory<'a>(&'a [u8]);
    impl super::Remote for InMemory<'_> {
        fn identity(&self) -> StoreIdentity {
            StoreIdentity { ino: 1, size_bytes: self.0.len() as u64, mtime_nanos: 0, ctime_nanos: 0 }
        }
        fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
            let there = usize::try_from(offset).ok().and_then(|at| self.0.get(at..)?.get(..buffer.len()));
            buffer.copy_from_slice(there.ok_or(io::ErrorKind::UnexpectedEof)?);
            Ok(())
        }
    }
    let file = InMemory(bytes);
    let read = |buffer: &mut [u8], offset: u64| super::Remote::read_at(&file, buffer, offset);
    if let Ok(table) = Table::read(bytes.len() as u64, &read) {
        let mut buffer = [0; 100];
        let part = usize::try_from(table.length_bytes).map_or(100, |length| length.min(100));
        drop(table.unpack(&file, &mut buffer[..part], table.length_bytes - part as u64));
    }
}

/// What a compressed file's name ends with.
pub const SUFFIX: &[u8] = b".surgetank.zst";
/// Smaller ones are not worth it: a block of the store is taken anyway.
const WORTH_BYTES: u64 = 4096;
/// Lengths remembered; all are forgotten when there are more.
const KNOWN_MAX: usize = 100_000;

/// Level of zstd for what is published there; `None`: stays plain.
pub type Choice = Box<dyn Fn(&StorePath) -> Option<i32> + Send + Sync>;

/// Staged and not yet published, by its temporary.
#[derive(Clone, Copy)]
struct Copy {
    form: Form,
    /// As the store sees it.
    lies: Staged,
    length_bytes: u64,
}

pub struct Compressed {
    inner: Arc<dyn Store>,
    choose: Choice,
    /// Where what is compressed lies until it has been staged, without a name.
    scratch: OwnedFd,
    copies: Mutex<HashMap<StorePath, Copy>>,
    known: Mutex<HashMap<StorePath, Known>>,
    /// What lay there when a name was looked at that is about to be published or replaced; `None`: nothing of that form.
    seen: Mutex<HashMap<StorePath, Vec<(Form, Option<StoreIdentity>)>>>,
    savings: Mutex<Savings>,
    /// Also what is small, or does not get smaller: for tests.
    always: bool,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_absent(why: &io::Error) -> bool {
    why.kind() == io::ErrorKind::NotFound
}

impl Compressed {
    pub fn new(inner: Arc<dyn Store>, scratch: OwnedFd, choose: Choice) -> Self {
        Self {
            inner,
            choose,
            scratch,
            copies: Mutex::default(),
            known: Mutex::default(),
            seen: Mutex::default(),
            savings: Mutex::default(),
            always: false,
        }
    }

    #[cfg(test)]
    fn always(self) -> Self {
        Self { always: true, ..self }
    }
}

impl Store for Compressed {
    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn features(&self) -> Features {
        Features { plain_files: false, hard_links: false, atomic_renames: false, ..self.inner.features() }
    }

    fn savings(&self) -> Option<Savings> {
        Some(*locked(&self.savings))
    }

    fn may_hold(&self, path: &StorePath) -> io::Result<()> {
        if name_of(path).ends_with(SUFFIX) {
            return Err(Errno::ILSEQ.into());
        }
        self.inner.may_hold(path)
    }

    fn stat(&self, who: Cred, path: &StorePath) -> io::Result<StoreStat> {
        self.find(who, path).map(|found| found.stat)
    }

    fn told(&self, who: Cred, path: &StorePath) -> Option<io::Result<StoreStat>> {
        match self.inner.told(who, path)? {
            Err(absent) if is_absent(&absent) && may_be_packed(path) => {
                match self.inner.told(who, &Form::Packed.of(path))? {
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
        let entries = self.inner.list(who, path, temporaries)?;
        let is_packed = |entry: &StoreEntry| entry.kind == Kind::File && entry.name.ends_with(SUFFIX);
        let (packed, mut shown): (Vec<_>, Vec<_>) = entries.into_iter().partition(is_packed);
        if packed.is_empty() {
            return Ok(shown);
        }
        let plain: std::collections::HashSet<Box<[u8]>> = shown.iter().map(|entry| entry.name.clone()).collect();
        shown.extend(packed.into_iter().filter_map(|entry| {
            let name: Box<[u8]> = entry.name.strip_suffix(SUFFIX)?.into();
            (!name.is_empty() && !plain.contains(&name)).then_some(StoreEntry { name, ..entry })
        }));
        Ok(shown)
    }

    fn read_link(&self, who: Cred, path: &StorePath) -> io::Result<Box<[u8]>> {
        self.inner.read_link(who, path)
    }

    fn xattrs(&self, who: Cred, path: &StorePath) -> io::Result<Xattrs> {
        let found = self.find(who, path)?;
        self.inner.xattrs(who, &found.form.of(path))
    }

    fn space(&self, path: &StorePath) -> io::Result<Space> {
        self.inner.space(path)
    }

    fn may_write_dir(&self, who: Cred, path: &StorePath) -> io::Result<()> {
        self.inner.may_write_dir(who, path)
    }

    fn open(&self, _who: Cred, _path: &StorePath, _write: bool) -> io::Result<File> {
        Err(Errno::OPNOTSUPP.into())
    }

    fn source(&self, who: Cred, path: &StorePath) -> io::Result<Source> {
        let absent = match self.inner.source(who, path) {
            Err(why) if is_absent(&why) && may_be_packed(path) => why,
            opened => return Ok(Source::Remote(remote::by_ranges(opened?)?)),
        };
        // (Who may read it is asked again: to know its length is less.)
        let file = match self.inner.source(who, &Form::Packed.of(path)) {
            Err(why) if is_absent(&why) => return Err(absent),
            opened => remote::by_ranges(opened?)?,
        };
        let table = self.table_of(path, &*file)?;
        let lies = file.identity();
        self.remember(path, lies, table.length_bytes);
        let identity = of_length(lies, table.length_bytes);
        Ok(Source::Remote(Arc::new(remote::Unpacked { file, table, identity })))
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
        locked(&self.copies).remove(path);
        let made = match (self.choose)(bound) {
            Some(level) => {
                let made = self.compress((who, bound), source, level, meta, gate)?;
                // What an earlier agent left of it may have the other form.
                let other = if made.is_some() { Form::Plain } else { Form::Packed };
                self.inner.discard(who, &other.of(path))?;
                made
            }
            None => None,
        };
        let form = if made.is_some() { Form::Packed } else { Form::Plain };
        let meta = self.with_xattrs(who, bound, form, meta)?;
        let content = made.as_ref().map_or(source, |(scratch, _)| scratch);
        let lies = self.inner.stage_file(who, &form.of(path), &form.of(bound), content, &meta, gate)?;
        let (length_bytes, checksum) = match &made {
            Some((_, made)) => (made.length_bytes, made.checksum),
            None => (lies.identity.size_bytes, lies.checksum),
        };
        locked(&self.copies).insert(path.clone(), Copy { form, lies, length_bytes });
        Ok(Staged { identity: of_length(lies.identity, length_bytes), checksum })
    }

    /// What an earlier agent staged.
    fn stage_in_place(&self, who: Cred, path: &StorePath, meta: &Meta, gate: Gate<'_>) -> io::Result<Staged> {
        let found = self.find(who, path)?;
        let kept = Meta {
            perm: if found.form == Form::Packed { self.readable(meta.perm) } else { meta.perm },
            ..meta.clone()
        };
        let lies = self.inner.stage_in_place(who, &found.form.of(path), &kept, gate)?;
        let length_bytes = found.stat.attr.size_bytes;
        let checksum = match found.form {
            Form::Plain => lies.checksum,
            Form::Packed => self.opened(who, path)?.1.checksum,
        };
        locked(&self.copies).insert(path.clone(), Copy { form: found.form, lies, length_bytes });
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
        let forms = paths.iter().map(|path| match self.staged_form(who, path) {
            Ok(copy) => copy.form.of(path),
            Err(_) => path.clone(),
        });
        self.inner.settle(who, &forms.collect::<Vec<_>>())
    }

    /// What was compressed came out again as it was, when it was made (`frames`): the bytes in the store have to be those.
    fn verify(&self, who: Cred, path: &StorePath, staged: &Staged, how: Verify, gate: Gate<'_>) -> io::Result<()> {
        let copy = locked(&self.copies).get(path).copied();
        match copy.filter(|copy| of_length(copy.lies.identity, copy.length_bytes) == staged.identity) {
            Some(copy) => self.inner.verify(who, &copy.form.of(path), &copy.lies, how, gate),
            None => self.inner.verify(who, path, staged, how, gate),
        }
    }

    fn collect(&self) -> io::Result<u64> {
        self.inner.collect()
    }

    fn let_go(&self, temporary: &StorePath) {
        let copy = locked(&self.copies).remove(temporary);
        self.inner.let_go(&copy.map_or(Form::Plain, |copy| copy.form).of(temporary));
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
        if copy.is_none_or(|copy| copy.form == Form::Packed) && may_be_packed(path) {
            self.inner.discard(who, &Form::Packed.of(path))?;
        }
        if copy.is_none_or(|copy| copy.form == Form::Plain) { self.inner.discard(who, path) } else { Ok(()) }
    }

    fn check(&self, who: Cred, path: &StorePath, expect: &Expect) -> io::Result<bool> {
        if matches!(expect, Expect::Absent | Expect::Unknown) {
            if may_be_packed(path) {
                match self.inner.stat(who, &Form::Packed.of(path)) {
                    Err(why) if is_absent(&why) => {}
                    there => return there.map(|_| false),
                }
                if !self.inner.check(who, &Form::Packed.of(path), expect)? {
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
                self.inner.check(who, &Form::Packed.of(path), &lies)
            }
            None => Ok(false),
        }
    }

    fn writes_over(&self, who: Cred, temporary: &StorePath, path: &StorePath) -> io::Result<bool> {
        let form = self.staged_form(who, temporary)?.form;
        self.inner.writes_over(who, &form.of(temporary), &form.of(path))
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
            crash_point!("compressed.renamed");
            return self.remove_form(who, to, Form::Packed);
        }
        if !may_be_packed(to) {
            return Err(Errno::NAMETOOLONG.into());
        }
        // While both are there the old one would count, and this one be found nowhere.
        self.remove_form(who, to, Form::Plain)?;
        crash_point!("compressed.renamed");
        self.inner.rename(who, &Form::Packed.of(from), &Form::Packed.of(to))
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
            Err(why) if is_absent(&why) && may_be_packed(path) => self.inner.unlink(who, &Form::Packed.of(path)),
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
        let lies = self.inner.set_meta(who, &Form::Packed.of(path), kind, &kept)?;
        let length_bytes = found.stat.attr.size_bytes;
        self.remember(path, lies, length_bytes);
        Ok(of_length(lies, length_bytes))
    }

    fn sync_dirs(&self, who: Cred, paths: &[StorePath]) -> io::Result<()> {
        self.inner.sync_dirs(who, paths)
    }
}

impl Compressed {
    /// Staged without content of its own.
    fn as_it_is(&self, path: &StorePath, lies: Staged) -> io::Result<Staged> {
        let copy = Copy { form: Form::Plain, lies, length_bytes: lies.identity.size_bytes };
        locked(&self.copies).insert(path.clone(), copy);
        Ok(lies)
    }
}
