use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use super::super::Packed;
use super::*;
use crate::conformance::{
    conform, conform_but_for, deliver, errno, make_dir, me, meta, names, no_gate, noise, path, read, source, staged,
};
use crate::object::ObjectStore;
use crate::object::memory::Memory;
use crate::posix::PosixStore;
use crate::{Expect, Source};
use surgetank_types::model::Timestamp;

fn dir_of(at: &Path) -> OwnedFd {
    rustix::fs::open(at, OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap()
}

/// A directory as the store; every file whose name ends in `.plain` stays plain.
struct Ground {
    dir: tempfile::TempDir,
}

impl Ground {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }
    fn posix(&self) -> Arc<dyn Store> {
        Arc::new(PosixStore::new(dir_of(self.dir.path()), "file:test".into()).unwrap())
    }
    fn store(&self) -> Packed {
        packed(self.posix(), false)
    }
    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
    fn blobs(&self) -> PathBuf {
        self.at(&format!(".surgetank-blobs-{}", me().uid))
    }
    /// Names at the top, without the directory of the content.
    fn names(&self) -> Vec<String> {
        let all = fs::read_dir(self.dir.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut all: Vec<String> = all.filter(|name| !name.starts_with(".surgetank-blobs")).collect();
        all.sort();
        all
    }
    /// All content files, including temporaries.
    fn content(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let mut dirs = vec![self.blobs()];
        while let Some(dir) = dirs.pop() {
            for entry in fs::read_dir(dir).into_iter().flatten() {
                let entry = entry.unwrap();
                if entry.file_type().unwrap().is_dir() { dirs.push(entry.path()) } else { found.push(entry.path()) }
            }
        }
        found.sort();
        found
    }
    fn unused(&self, for_so_long: Duration, dry_run: bool) -> io::Result<unused::Unused> {
        unused::collect(&*self.posix(), me(), for_so_long, dry_run)
    }
    fn age(&self) {
        let long_ago = std::time::SystemTime::now() - Duration::from_secs(100 * 24 * 3600);
        for blob in self.content() {
            fs::File::open(blob).unwrap().set_modified(long_ago).unwrap();
        }
    }
}

fn packed(inner: Arc<dyn Store>, always: bool) -> Packed {
    let shared = Shared::new(Arc::clone(&inner), Box::new(|path| !path.0.ends_with(b".plain")));
    Packed::new(inner, Box::new(if always { shared.always() } else { shared }))
}

const MONTH: Duration = Duration::from_secs(30 * 24 * 3600);

#[test]
fn deduplicating_store_conforms() {
    for always in [true, false] {
        let grounds = std::cell::RefCell::new(Vec::new());
        // In this form the owner can still read a file whose mode forbids it.
        let without: &[&str] = if always { &["set_meta"] } else { &[] };
        conform_but_for(without, || {
            let ground = Ground::new();
            let store = packed(ground.posix(), always);
            grounds.borrow_mut().push(ground);
            Box::new(store)
        });
    }
}

#[test]
fn deduplicating_store_on_objects_conforms() {
    for always in [true, false] {
        let uploads = std::cell::RefCell::new(Vec::new());
        conform(|| {
            let kept = tempfile::tempdir().unwrap();
            let objects = ObjectStore::new(Arc::new(Memory::default()), kept.path(), Verify::Cache, Duration::ZERO);
            uploads.borrow_mut().push(kept);
            Box::new(packed(Arc::new(objects.unwrap()), always))
        });
    }
}

#[test]
fn equal_content_is_stored_once() {
    let ground = Ground::new();
    let store = ground.store();
    let bytes = noise(200_000);
    make_dir(&store, "d");
    let tagged = Some([(b"user.tag"[..].into(), b"1"[..].into())].into_iter().collect());
    let identity = deliver(&store, "a", &bytes, &Meta { xattrs: tagged, ..meta(0o640) });
    deliver(&store, "d/b", &bytes, &meta(0o444));
    // Another agent.
    let another = ground.store();
    deliver(&another, "c", &bytes, &meta(0o600));
    deliver(&another, "other", &noise(100_000), &meta(0o600));
    deliver(&another, "small", b"x", &meta(0o600));
    deliver(&another, "a.plain", &bytes, &meta(0o600));
    assert_eq!(ground.names(), ["a.plain", "a.surgetank.ref", "c.surgetank.ref", "d", "other.surgetank.ref", "small"]);
    assert_eq!(names(&store, "", true), ["a", "a.plain", "c", "d", "other", "small"]);
    assert_eq!(ground.content().len(), 2);
    for name in ["a", "d/b", "c", "a.plain"] {
        assert!(read(&store, name) == bytes, "{name}");
        assert_eq!(store.stat(me(), &path(name)).unwrap().attr.size_bytes, 200_000);
    }
    assert_eq!(another.stat(me(), &path("a")).unwrap().identity, identity);
    assert_eq!(store.stat(me(), &path("d/b")).unwrap().attr.perm, 0o444);
    assert_eq!(store.xattrs(me(), &path("a")).unwrap().len(), 1);
    let savings = another.savings().unwrap();
    assert_eq!((savings.deduplicated_files, savings.deduplicated_bytes, savings.new_bytes), (2, 300_000, 100_000));
    // A user can find it too.
    let text = fs::read_to_string(ground.at("c.surgetank.ref")).unwrap();
    let line = text.lines().find(|line| line.starts_with(".surgetank-blobs")).unwrap();
    assert!(fs::read(ground.at(line)).unwrap() == bytes);
    let hash = blake3::hash(&bytes).to_hex();
    assert!(line.ends_with(&format!("/{}/{}", &hash[..2], &hash[2..])), "{line}");
    // A change of one file does not affect the others.
    deliver(&store, "a", &noise(150_000), &meta(0o640));
    store.unlink(me(), &path("c")).unwrap();
    assert!(read(&store, "d/b") == bytes);
}

/// Regression: the comparison with content that the store already has was limited to the drain's rate, so a second run took as
/// long as the first.
#[test]
fn comparison_of_known_content_is_not_throttled() {
    let ground = Ground::new();
    let store = ground.store();
    let bytes = noise(3 << 20);
    let sent = |name: &str| {
        let counted = std::sync::atomic::AtomicU64::new(0);
        let gate = |bytes: u64| {
            counted.fetch_add(bytes, std::sync::atomic::Ordering::Relaxed);
            Ok(())
        };
        store.stage_file(me(), &path(name), &path("a"), &source(&bytes), &meta(0o640), &gate).unwrap();
        counted.into_inner()
    };
    let first = sent(".surgetank-tmp-1");
    assert!(first >= 3 << 20, "{first}");
    deliver(&store, "b", &bytes, &meta(0o640));
    let second = sent(".surgetank-tmp-2");
    assert!((1..1000).contains(&second), "{second}");
}

/// No other user may list or change the content, and no path of the mount leads there.
#[test]
fn content_is_hidden_from_the_mount() {
    let ground = Ground::new();
    let store = ground.store();
    deliver(&store, "a", &noise(100_000), &meta(0o600));
    let mode = |at: &Path| fs::metadata(at).unwrap().permissions().mode() & 0o7777;
    let blob = ground.content().remove(0);
    assert_eq!((mode(&ground.blobs()), mode(blob.parent().unwrap()), mode(&blob)), (0o711, 0o711, 0o444));
    assert_eq!(mode(&ground.at("a.surgetank.ref")), 0o600);
    let inside = blob.strip_prefix(ground.dir.path()).unwrap().to_str().unwrap();
    for hidden in [inside, &format!(".surgetank-blobs-{}", me().uid), ".surgetank-blobs"] {
        assert_eq!(errno_of(store.stat(me(), &path(hidden))), io::ErrorKind::NotFound, "{hidden}");
        assert_eq!(errno(store.may_hold(&path(hidden))), libc::EILSEQ, "{hidden}");
    }
    assert_eq!(errno(store.may_hold(&path("b.surgetank.ref"))), libc::EILSEQ);
    store.may_hold(&path("d/.surgetank-blobs")).unwrap();
}

fn errno_of<T>(result: io::Result<T>) -> io::ErrorKind {
    result.err().map_or(io::ErrorKind::Other, |why| why.kind())
}

#[test]
fn files_without_content_directory_are_stored_unchanged() {
    let ground = Ground::new();
    // Two cases: a file instead of the directory, and a directory of another user, which could remove the content.
    fs::write(ground.blobs(), "").unwrap();
    let store = ground.store();
    deliver(&store, "a", &noise(100_000), &meta(0o600));
    assert_eq!(ground.names(), ["a"]);
    if me().uid == 0 {
        fs::remove_file(ground.blobs()).unwrap();
        fs::create_dir(ground.blobs()).unwrap();
        std::os::unix::fs::chown(ground.blobs(), Some(12345), None).unwrap();
        deliver(&ground.store(), "b", &noise(100_000), &meta(0o600));
        assert_eq!(ground.names(), ["a", "b"]);
    }
}

/// Regression: two agents removed each other's directory, and stored their files unchanged.
#[test]
fn concurrent_makers_of_first_directory_both_succeed() {
    for _ in 0..20 {
        let ground = Ground::new();
        let store = ground.store();
        std::thread::scope(|scope| {
            for name in ["a", "b", "c"] {
                let store = &store;
                scope.spawn(move || {
                    deliver(store, name, &noise(70_000 + usize::from(name.as_bytes()[0])), &meta(0o600))
                });
            }
        });
        assert_eq!(ground.names(), ["a.surgetank.ref", "b.surgetank.ref", "c.surgetank.ref"]);
    }
}

#[test]
fn damaged_content_is_replaced_by_the_next_copy() {
    let ground = Ground::new();
    let bytes = noise(100_000);
    deliver(&ground.store(), "a", &bytes, &meta(0o600));
    let blob = ground.content().remove(0);
    fs::set_permissions(&blob, fs::Permissions::from_mode(0o644)).unwrap();
    for rotten in [vec![b'x'; 100_000], vec![], noise(99_999)] {
        fs::write(&blob, rotten).unwrap();
        deliver(&ground.store(), "b", &bytes, &meta(0o600));
        assert!(read(&ground.store(), "a") == bytes);
    }
    assert_eq!(ground.content(), [blob]);
}

#[test]
fn damaged_or_missing_content_is_an_error() {
    let ground = Ground::new();
    deliver(&ground.store(), "a", &noise(100_000), &meta(0o600));
    let at = ground.at("a.surgetank.ref");
    let good = fs::read_to_string(&at).unwrap();
    let size = good.replace("bytes 100000", "bytes 100001");
    let outside = good.replace(".surgetank-blobs-", "../.surgetank-blobs-");
    let twice = good.clone() + &good;
    for bad in [&good[..good.len() - 1], "", "something else", &outside, &twice, &good.to_uppercase()] {
        fs::write(&at, bad).unwrap();
        for why in [ground.store().stat(me(), &path("a")).err(), ground.store().source(me(), &path("a")).err()] {
            let why = why.unwrap();
            assert_eq!(why.kind(), io::ErrorKind::InvalidData, "{bad}");
            assert!(why.to_string().contains("a.surgetank.ref"), "{why}");
        }
    }
    fs::write(&at, size).unwrap();
    assert_eq!(errno_of(ground.store().source(me(), &path("a"))), io::ErrorKind::InvalidData);
    fs::write(&at, good).unwrap();
    let blob = ground.content().remove(0);
    let sound = fs::read(&blob).unwrap();
    fs::set_permissions(&blob, fs::Permissions::from_mode(0o644)).unwrap();
    let mut flipped = sound.clone();
    flipped[50_000] ^= 1;
    fs::write(&blob, flipped).unwrap();
    let remote = ground.store().source(me(), &path("a")).unwrap();
    let why = remote.copy_to(&tempfile::tempfile().unwrap(), 100_000, no_gate()).unwrap_err();
    assert_eq!(why.kind(), io::ErrorKind::InvalidData);
    fs::remove_file(blob).unwrap();
    let why = ground.store().source(me(), &path("a")).err().unwrap();
    assert_eq!(why.kind(), io::ErrorKind::InvalidData, "missing content is reported as a missing file");
    assert_eq!(ground.store().stat(me(), &path("a")).unwrap().attr.size_bytes, 100_000);
}

/// Another agent may send content again, or give it a new time, while a program reads it.
#[test]
fn reader_continues_when_content_is_replaced_by_equal_one() {
    let ground = Ground::new();
    let bytes = noise(100_000);
    deliver(&ground.store(), "a", &bytes, &meta(0o600));
    let Source::Remote(remote) = ground.store().source(me(), &path("a")).unwrap() else { panic!() };
    let mut part = vec![0; 1000];
    remote.read_at(&mut part, 0).unwrap();
    let blob = ground.content().remove(0);
    let aside = blob.with_extension("new");
    fs::write(&aside, &bytes).unwrap();
    fs::rename(aside, &blob).unwrap();
    remote.read_at(&mut part, 7000).unwrap();
    assert!(part == bytes[7000..8000]);
    ground.age();
    remote.read_at(&mut part, 9000).unwrap();
    assert!(part == bytes[9000..10_000]);
}

/// A write between hashing and copying.
#[test]
fn file_changed_while_stored_gets_no_wrong_hash() {
    let ground = Ground::new();
    let store = ground.store();
    let file = source(&noise(3 << 20));
    let calls = std::sync::atomic::AtomicU64::new(0);
    let meddle = |_| {
        if calls.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 2 {
            file.write_all_at(b"changed", 0).unwrap();
        }
        Ok(())
    };
    let temporary = path(".surgetank-tmp-1");
    let outcome = store.stage_file(me(), &temporary, &path("a"), &file, &meta(0o600), &meddle);
    assert_eq!(errno_of(outcome), io::ErrorKind::InvalidData);
    store.discard(me(), &temporary).unwrap();
    assert_eq!(ground.content(), [""; 0].map(PathBuf::from));
    assert_eq!(ground.names(), [""; 0]);
}

#[test]
fn reference_of_earlier_agent_needs_its_content() {
    let ground = Ground::new();
    let bytes = noise(100_000);
    let (temporary, copy) = staged(&ground.store(), "a", &source(&bytes), &meta(0o644));
    // The agent died before the content got a name.
    let store = ground.store();
    assert_eq!(store.stat(me(), &temporary).unwrap().identity, copy.identity);
    assert_eq!(errno_of(store.publish(me(), &temporary, &path("a"), &meta(0o644))), io::ErrorKind::InvalidData);
    store.discard(me(), &temporary).unwrap();
    assert_eq!((ground.names().len(), ground.content().len()), (0, 0), "the temporary of the content stays");
    // The agent died after the content got a name.
    let earlier = ground.store();
    let (temporary, _) = staged(&earlier, "a", &source(&bytes), &meta(0o644));
    earlier.settle(me(), std::slice::from_ref(&temporary)).unwrap();
    let store = ground.store();
    store.settle(me(), std::slice::from_ref(&temporary)).unwrap();
    store.publish(me(), &temporary, &path("a"), &meta(0o644)).unwrap();
    assert!(read(&store, "a") == bytes);
    assert_eq!(ground.names(), ["a.surgetank.ref"]);
}

#[test]
fn versions_alternate_between_both_forms() {
    let ground = Ground::new();
    let store = ground.store();
    let mut identity = deliver(&store, "f", b"first", &meta(0o600));
    for round in 0..4 {
        let bytes = if round % 2 == 0 { noise(70_000 + round) } else { noise(100 + round) };
        assert!(store.check(me(), &path("f"), &Expect::Identity(identity)).unwrap());
        identity = deliver(&store, "f", &bytes, &meta(0o600));
        assert_eq!(ground.names(), [if round % 2 == 0 { "f.surgetank.ref" } else { "f" }]);
        assert!(read(&store, "f") == bytes);
    }
    let time = Timestamp { nanos: 1_000_000_000_000_000_007 };
    deliver(&store, "f", &noise(90_000), &meta(0o600));
    let changed = Meta { perm: 0o640, times: Some((time, time)), ..meta(0) };
    store.set_meta(me(), &path("f"), Kind::File, &changed).unwrap();
    let stat = store.stat(me(), &path("f")).unwrap();
    assert_eq!((stat.attr.perm, stat.attr.mtime, stat.attr.size_bytes), (0o640, time, 90_000));
}

#[test]
fn collect_removes_old_unreferenced_content_only() {
    let ground = Ground::new();
    let store = ground.store();
    make_dir(&store, "d");
    for (name, size) in [("d/kept", 100_000), ("gone", 110_000), ("again", 120_000)] {
        deliver(&store, name, &noise(size), &meta(0o600));
    }
    for name in ["gone", "again"] {
        store.unlink(me(), &path(name)).unwrap();
    }
    assert_eq!(ground.unused(MONTH, false).unwrap(), unused::Unused::default(), "young content is removed");
    ground.age();
    // A new reference that is only staged also counts.
    let (temporary, _) = staged(&store, "later", &source(&noise(120_000)), &meta(0o600));
    let found = ground.unused(MONTH, true).unwrap();
    assert_eq!((found.references, found.blobs.len(), found.blobs[0].size_bytes), (2, 1, 110_000));
    assert_eq!(ground.content().len(), 3, "a dry run removes content");
    assert_eq!(ground.unused(MONTH, false).unwrap(), found);
    assert_eq!(ground.content().len(), 2);
    store.settle(me(), std::slice::from_ref(&temporary)).unwrap();
    store.publish(me(), &temporary, &path("later"), &meta(0o600)).unwrap();
    assert!(read(&store, "later") == noise(120_000) && read(&store, "d/kept") == noise(100_000));
    // Temporary content of a killed agent is removed too.
    let (lost, _) = staged(&store, "lost", &source(&noise(130_000)), &meta(0o600));
    fs::remove_file(ground.at(&format!("{lost}.surgetank.ref"))).unwrap();
    ground.age();
    let blobs = ground.unused(MONTH, false).unwrap().blobs;
    assert!(blobs.len() == 1 && blobs[0].path.contains(".surgetank-tmp-"), "{blobs:?}");
}

#[test]
fn collect_with_unreadable_file_removes_nothing() {
    let ground = Ground::new();
    let store = ground.store();
    deliver(&store, "gone", &noise(100_000), &meta(0o600));
    store.unlink(me(), &path("gone")).unwrap();
    ground.age();
    fs::write(ground.at("broken.surgetank.ref"), "surgetank reference 1\n").unwrap();
    let why = ground.unused(MONTH, false).unwrap_err();
    assert!(why.to_string().contains("nothing was removed"), "{why}");
    assert_eq!(ground.content().len(), 1);
    fs::remove_file(ground.at("broken.surgetank.ref")).unwrap();
    assert_eq!(ground.unused(MONTH, false).unwrap().blobs.len(), 1);
    assert_eq!(fs::metadata(ground.blobs()).unwrap().uid(), me().uid);
}

/// A new reference makes old content young again.
#[test]
fn reference_to_old_content_renews_its_time() {
    let ground = Ground::new();
    deliver(&ground.store(), "a", &noise(100_000), &meta(0o600));
    ground.age();
    deliver(&ground.store(), "b", &noise(100_000), &meta(0o600));
    let age = fs::metadata(ground.content().remove(0)).unwrap().modified().unwrap().elapsed().unwrap();
    assert!(age < Duration::from_secs(3600), "{age:?}");
}
