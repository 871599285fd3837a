//! A store that fails on demand: wraps another one, for tests of every error path.
//!
//! Rules are tried in the order in which they were added. The first that matches an operation decides it; a rule that is used
//! up no longer matches. Without a matching rule the operation passes to the inner store. Rules can be added while the store is
//! in use.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use surgetank_store::{
    BlockSums, Cred, Expect, Features, Gate, Meta, Source, Space, Staged, Store, StoreEntry, StorePath, StoreStat,
    Turn, Verify,
};
use surgetank_types::error::Errno;
use surgetank_types::model::{Kind, StoreIdentity};

/// The methods of [`Store`], as rules name them.
#[allow(missing_docs, reason = "each variant has the name of the method")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Operation {
    Stat,
    List,
    ReadLink,
    Xattrs,
    Space,
    MayWriteDir,
    Open,
    CreateTemporary,
    StageFile,
    StageInPlace,
    StageDir,
    StageSymlink,
    StageNode,
    Settle,
    Verify,
    Discard,
    Check,
    Publish,
    Rename,
    Exchange,
    Link,
    Unlink,
    RemoveDir,
    SetMeta,
    SyncDirs,
}

impl Operation {
    /// Whether the operation makes something new in the store.
    fn takes_room(self) -> bool {
        use Operation::{CreateTemporary, StageDir, StageFile, StageInPlace, StageNode, StageSymlink};
        matches!(self, CreateTemporary | StageFile | StageInPlace | StageDir | StageSymlink | StageNode)
    }

    /// Whether the operation changes the store.
    pub fn writes(self) -> bool {
        use Operation::{Discard, Exchange, Link, Publish, RemoveDir, Rename, SetMeta, Unlink};
        self.takes_room() || matches!(self, Discard | Publish | Rename | Exchange | Link | Unlink | RemoveDir | SetMeta)
    }
}

/// How an operation fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// It does nothing and returns this errno.
    Errno(Errno),
    /// It is carried out, but returns this errno (a lost answer).
    LostAnswer(Errno),
    /// It is carried out after this time.
    Delay(Duration),
    /// The staged copy is cut to half its length, and success is reported.
    ShortCopy,
    /// One byte in the middle of the staged copy is wrong, and success is reported.
    FlipByte,
    /// A publication over a file in place is interrupted, with this errno; any other publication is carried out.
    BreaksOff(Errno),
}

type Predicate = Box<dyn Fn(Operation, &StorePath) -> bool + Send>;

/// When and how to fail; made by [`Rule::when`], limited by [`Rule::times`].
pub struct Rule {
    fits: Predicate,
    failure: Failure,
    left: u64,
}

impl Rule {
    /// Fails every time the predicate holds. An operation on several paths is tried for each of them.
    pub fn when(failure: Failure, fits: impl Fn(Operation, &StorePath) -> bool + Send + 'static) -> Self {
        Self { fits: Box::new(fits), failure, left: u64::MAX }
    }

    /// Fails at every call of one operation.
    pub fn on(operation: Operation, failure: Failure) -> Self {
        Self::when(failure, move |now, _| now == operation)
    }

    /// Fails at every operation that needs space, as a full store does.
    pub fn full() -> Self {
        Self::when(Failure::Errno(Errno::NOSPC), |operation, _| operation.takes_room())
    }

    /// Fails at every change, as a read-only store does.
    pub fn read_only() -> Self {
        Self::when(Failure::Errno(Errno::ROFS), |operation, _| {
            operation.writes() || operation == Operation::MayWriteDir
        })
    }

    /// Fails at every operation, as an unmounted store does.
    pub fn unmounted() -> Self {
        Self::when(Failure::Errno(Errno::NOTCONN), |_, _| true)
    }

    /// Delays every operation by this time.
    pub fn slow(by: Duration) -> Self {
        Self::when(Failure::Delay(by), |_, _| true)
    }

    /// Fails only this many times.
    #[must_use]
    pub fn times(mut self, count: u64) -> Self {
        self.left = count;
        self
    }
}

/// A store that fails by its rules, otherwise like `S`.
pub struct Faulty<S> {
    inner: S,
    rules: Mutex<Vec<Rule>>,
    calls: Mutex<BTreeMap<Operation, u64>>,
}

impl<S: Store> Faulty<S> {
    /// Wraps `inner`, without rules.
    pub fn new(inner: S) -> Self {
        Self { inner, rules: Mutex::default(), calls: Mutex::default() }
    }

    /// Adds a rule after the present ones.
    pub fn add(&self, rule: Rule) {
        lock(&self.rules).push(rule);
    }

    /// Number of calls of an operation, failed ones included.
    pub fn calls(&self, operation: Operation) -> u64 {
        lock(&self.calls).get(&operation).copied().unwrap_or(0)
    }

    /// The wrapped store.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    fn decide(&self, operation: Operation, paths: &[&StorePath]) -> Option<Failure> {
        *lock(&self.calls).entry(operation).or_default() += 1;
        for rule in lock(&self.rules).iter_mut() {
            if rule.left == 0 || !paths.iter().any(|path| (rule.fits)(operation, path)) {
                continue;
            }
            rule.left -= 1;
            return Some(rule.failure);
        }
        None
    }

    fn run<T>(
        &self,
        operation: Operation,
        paths: &[&StorePath],
        inner: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<T> {
        Self::carry_out(self.decide(operation, paths), inner)
    }

    fn carry_out<T>(failure: Option<Failure>, inner: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        match failure {
            Some(Failure::Errno(errno)) => Err(errno.into()),
            Some(Failure::LostAnswer(errno)) => inner().and(Err(errno.into())),
            Some(Failure::Delay(delay)) => {
                std::thread::sleep(delay);
                inner()
            }
            Some(Failure::ShortCopy | Failure::FlipByte | Failure::BreaksOff(_)) | None => inner(),
        }
    }

    /// Like `run`, for a copy, which can also be damaged.
    fn run_copy(
        &self,
        operation: Operation,
        who: Cred,
        path: &StorePath,
        inner: impl FnOnce() -> io::Result<Staged>,
    ) -> io::Result<Staged> {
        let failure = self.decide(operation, &[path]);
        match failure {
            Some(Failure::Errno(errno)) => return Err(errno.into()),
            Some(Failure::Delay(delay)) => std::thread::sleep(delay),
            _ => {}
        }
        let staged = inner()?;
        let half = staged.identity.size_bytes / 2;
        match failure {
            Some(Failure::LostAnswer(errno)) => return Err(errno.into()),
            Some(Failure::ShortCopy) => self.inner.open(who, path, true)?.set_len(half)?,
            Some(Failure::FlipByte) if staged.identity.size_bytes > 0 => {
                let file = self.inner.open(who, path, true)?;
                let mut byte = [0];
                file.read_exact_at(&mut byte, half)?;
                file.write_all_at(&[!byte[0]], half)?;
                file.sync_all()?;
            }
            _ => {}
        }
        Ok(staged)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<S: Store> Store for Faulty<S> {
    fn describe(&self) -> String {
        self.inner.describe()
    }
    fn features(&self) -> Features {
        self.inner.features()
    }
    fn may_hold(&self, path: &StorePath) -> io::Result<()> {
        self.inner.may_hold(path)
    }
    fn known_stat(&self, who: Cred, path: &StorePath) -> Option<io::Result<StoreStat>> {
        self.inner.known_stat(who, path)
    }

    fn glance(&self, who: Cred, path: &StorePath) -> io::Result<StoreStat> {
        self.run(Operation::Stat, &[path], || self.inner.glance(who, path))
    }
    fn source(&self, who: Cred, path: &StorePath) -> io::Result<Source> {
        self.run(Operation::Open, &[path], || self.inner.source(who, path))
    }
    fn stat(&self, who: Cred, path: &StorePath) -> io::Result<StoreStat> {
        self.run(Operation::Stat, &[path], || self.inner.stat(who, path))
    }
    fn list(&self, who: Cred, path: &StorePath, temporaries: bool) -> io::Result<Vec<StoreEntry>> {
        self.run(Operation::List, &[path], || self.inner.list(who, path, temporaries))
    }
    fn names(&self, who: Cred, path: &StorePath, at_most: usize) -> io::Result<Option<Vec<Box<[u8]>>>> {
        self.run(Operation::List, &[path], || self.inner.names(who, path, at_most))
    }
    fn read_link(&self, who: Cred, path: &StorePath) -> io::Result<Box<[u8]>> {
        self.run(Operation::ReadLink, &[path], || self.inner.read_link(who, path))
    }
    fn xattrs(&self, who: Cred, path: &StorePath) -> io::Result<BTreeMap<Box<[u8]>, Box<[u8]>>> {
        self.run(Operation::Xattrs, &[path], || self.inner.xattrs(who, path))
    }
    fn space(&self, path: &StorePath) -> io::Result<Space> {
        self.run(Operation::Space, &[path], || self.inner.space(path))
    }
    fn learn_groups(&self, who: Cred, groups: &[u32]) -> bool {
        self.inner.learn_groups(who, groups)
    }
    fn may_write_dir(&self, who: Cred, path: &StorePath) -> io::Result<()> {
        self.run(Operation::MayWriteDir, &[path], || self.inner.may_write_dir(who, path))
    }
    fn open(&self, who: Cred, path: &StorePath, write: bool) -> io::Result<File> {
        self.run(Operation::Open, &[path], || self.inner.open(who, path, write))
    }
    fn create_temporary(&self, who: Cred, path: &StorePath, perm: u32) -> io::Result<File> {
        self.run(Operation::CreateTemporary, &[path], || self.inner.create_temporary(who, path, perm))
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
        self.run_copy(Operation::StageFile, who, path, || self.inner.stage_file(who, path, bound, source, meta, gate))
    }
    fn block_sums(&self, who: Cred, path: &StorePath, staged: &Staged) -> io::Result<Option<BlockSums>> {
        self.run(Operation::Verify, &[path], || self.inner.block_sums(who, path, staged))
    }
    fn restage_file(
        &self,
        who: Cred,
        path: &StorePath,
        source: &File,
        meta: &Meta,
        earlier: (&StoreIdentity, &mut BlockSums),
        gate: Gate<'_>,
    ) -> io::Result<(Staged, u64)> {
        self.run(Operation::StageFile, &[path], || self.inner.restage_file(who, path, source, meta, earlier, gate))
    }
    fn publish_keeping(
        &self,
        who: Cred,
        temporary: &StorePath,
        path: &StorePath,
        meta: &Meta,
    ) -> io::Result<Option<(StoreIdentity, StoreIdentity)>> {
        self.run(Operation::Publish, &[path, temporary], || self.inner.publish_keeping(who, temporary, path, meta))
    }
    fn stage_in_place(&self, who: Cred, path: &StorePath, meta: &Meta, gate: Gate<'_>) -> io::Result<Staged> {
        self.run_copy(Operation::StageInPlace, who, path, || self.inner.stage_in_place(who, path, meta, gate))
    }
    fn stage_dir(&self, who: Cred, path: &StorePath, meta: &Meta) -> io::Result<Staged> {
        self.run(Operation::StageDir, &[path], || self.inner.stage_dir(who, path, meta))
    }
    fn stage_symlink(&self, who: Cred, path: &StorePath, target: &[u8], meta: &Meta) -> io::Result<Staged> {
        self.run(Operation::StageSymlink, &[path], || self.inner.stage_symlink(who, path, target, meta))
    }
    fn stage_node(&self, who: Cred, path: &StorePath, kind: Kind, device: u64, meta: &Meta) -> io::Result<Staged> {
        self.run(Operation::StageNode, &[path], || self.inner.stage_node(who, path, kind, device, meta))
    }
    fn settle(&self, who: Cred, paths: &[StorePath]) -> io::Result<()> {
        self.run(Operation::Settle, &paths.iter().collect::<Vec<_>>(), || self.inner.settle(who, paths))
    }
    fn verify(&self, who: Cred, path: &StorePath, staged: &Staged, how: Verify, gate: Gate<'_>) -> io::Result<()> {
        self.run(Operation::Verify, &[path], || self.inner.verify(who, path, staged, how, gate))
    }
    fn collect(&self) -> io::Result<u64> {
        self.inner.collect()
    }
    fn release(&self, temporary: &StorePath) {
        self.inner.release(temporary);
    }

    fn refresh(&self) {
        self.inner.refresh();
    }
    fn discard(&self, who: Cred, path: &StorePath) -> io::Result<()> {
        self.run(Operation::Discard, &[path], || self.inner.discard(who, path))
    }
    fn check(&self, who: Cred, path: &StorePath, expect: &Expect) -> io::Result<bool> {
        self.run(Operation::Check, &[path], || self.inner.check(who, path, expect))
    }
    fn writes_over(&self, who: Cred, temporary: &StorePath, path: &StorePath) -> io::Result<bool> {
        self.run(Operation::Stat, &[path, temporary], || self.inner.writes_over(who, temporary, path))
    }
    fn publish(&self, who: Cred, temporary: &StorePath, path: &StorePath, meta: &Meta) -> io::Result<StoreIdentity> {
        match self.decide(Operation::Publish, &[path, temporary]) {
            Some(Failure::BreaksOff(errno)) if self.inner.writes_over(who, temporary, path)? => {
                self.inner.open(who, path, true)?.set_len(1)?;
                Err(errno.into())
            }
            failure => Self::carry_out(failure, || self.inner.publish(who, temporary, path, meta)),
        }
    }
    fn publish_absent(
        &self,
        who: Cred,
        temporary: &StorePath,
        path: &StorePath,
        turn: Option<Turn<'_>>,
    ) -> io::Result<StoreIdentity> {
        let publish = || self.inner.publish_absent(who, temporary, path, turn);
        self.run(Operation::Publish, &[path, temporary], publish)
    }
    fn replace(&self, who: Cred, temporary: &StorePath, path: &StorePath, meta: &Meta) -> io::Result<StoreIdentity> {
        self.run(Operation::Publish, &[path, temporary], || self.inner.replace(who, temporary, path, meta))
    }
    fn rename(&self, who: Cred, from: &StorePath, to: &StorePath) -> io::Result<()> {
        self.run(Operation::Rename, &[from, to], || self.inner.rename(who, from, to))
    }
    fn exchanges(&self) -> bool {
        self.inner.exchanges()
    }
    fn exchange(&self, who: Cred, a: &StorePath, b: &StorePath) -> io::Result<()> {
        self.run(Operation::Exchange, &[a, b], || self.inner.exchange(who, a, b))
    }
    fn link(&self, who: Cred, from: &StorePath, to: &StorePath) -> io::Result<()> {
        self.run(Operation::Link, &[from, to], || self.inner.link(who, from, to))
    }
    fn unlink(&self, who: Cred, path: &StorePath) -> io::Result<()> {
        self.run(Operation::Unlink, &[path], || self.inner.unlink(who, path))
    }
    fn remove_dir(&self, who: Cred, path: &StorePath) -> io::Result<()> {
        self.run(Operation::RemoveDir, &[path], || self.inner.remove_dir(who, path))
    }
    fn set_meta(&self, who: Cred, path: &StorePath, kind: Kind, meta: &Meta) -> io::Result<StoreIdentity> {
        self.run(Operation::SetMeta, &[path], || self.inner.set_meta(who, path, kind, meta))
    }
    fn sync_dirs(&self, who: Cred, paths: &[StorePath]) -> io::Result<()> {
        self.run(Operation::SyncDirs, &paths.iter().collect::<Vec<_>>(), || self.inner.sync_dirs(who, paths))
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use rustix::fs::{Mode, OFlags};
    use tempfile::TempDir;

    use super::*;
    use surgetank_store::conformance::{self, me, meta, no_gate, path, source};
    use surgetank_store::posix::PosixStore;

    /// An empty store without rules, in a directory of its own inside `dir`.
    fn faulty(dir: &TempDir) -> Faulty<PosixStore> {
        // The agent clears it at its start, too.
        rustix::process::umask(Mode::empty());
        let at = tempfile::tempdir_in(dir).unwrap().keep();
        fs::set_permissions(&at, fs::Permissions::from_mode(0o700)).unwrap();
        let handle = rustix::fs::open(&at, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).unwrap();
        Faulty::new(PosixStore::new(handle, format!("file://{}", at.display())).unwrap())
    }

    #[test]
    fn faulty_store_without_rules_conforms() {
        let dir = tempfile::tempdir().unwrap();
        conformance::conform(|| Box::new(faulty(&dir)));
    }

    #[test]
    fn rule_fails_matching_calls_up_to_its_limit() {
        let dir = tempfile::tempdir().unwrap();
        let store = faulty(&dir);
        let root = StorePath::root();
        assert!(store.stat(me(), &root).is_ok());
        store.add(Rule::on(Operation::Stat, Failure::Errno(Errno::STALE)).times(1));
        assert_eq!(store.stat(me(), &root).unwrap_err().raw_os_error(), Some(libc::ESTALE));
        assert!(store.stat(me(), &root).is_ok());
        assert_eq!(store.calls(Operation::Stat), 3);
        store.add(Rule::unmounted().times(1));
        assert_eq!(store.list(me(), &root, false).unwrap_err().raw_os_error(), Some(libc::ENOTCONN));
        assert!(store.list(me(), &root, false).is_ok());
        store.add(Rule::full());
        assert_eq!(
            store.stage_dir(me(), &path(".surgetank-tmp-d"), &meta(0o755)).unwrap_err().raw_os_error(),
            Some(libc::ENOSPC)
        );
        assert!(store.list(me(), &root, true).unwrap().is_empty());
    }

    #[test]
    fn damaged_copies_are_detected_by_verify() {
        let dir = tempfile::tempdir().unwrap();
        let store = faulty(&dir);
        for failure in [Failure::ShortCopy, Failure::FlipByte] {
            store.add(Rule::on(Operation::StageFile, failure).times(1));
            let temporary = path(".surgetank-tmp-1");
            let file = source(b"some bytes that matter");
            let staged = store.stage_file(me(), &temporary, &path("f"), &file, &meta(0o644), no_gate()).unwrap();
            for how in [Verify::Cache, Verify::Reread] {
                let error = store.verify(me(), &temporary, &staged, how, no_gate()).unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{failure:?}: {error}");
            }
            let again = store.stage_file(me(), &temporary, &path("f"), &file, &meta(0o644), no_gate()).unwrap();
            store.verify(me(), &temporary, &again, Verify::Reread, no_gate()).unwrap();
        }
    }
}
