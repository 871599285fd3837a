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

/// A directory as the store; all that ends in `.plain` stays as it is.
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
    /// Names at the top, but for the one of the content.
    fn lies(&self) -> Vec<String> {
        let all = fs::read_dir(self.dir.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut all: Vec<String> = all.filter(|name| !name.starts_with(".surgetank-blobs")).collect();
        all.sort();
        all
    }
    /// All content there is, and temporaries of it.
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
fn conforms_whatever_lies_there() {
    for always in [true, false] {
        let grounds = std::cell::RefCell::new(Vec::new());
        // (What its owner may not read stays readable for him there.)
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
fn conforms_on_objects() {
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
fn content_lies_once_for_all_who_have_it() {
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
    assert_eq!(ground.lies(), ["a.plain", "a.surgetank.ref", "c.surgetank.ref", "d", "other.surgetank.ref", "small"]);
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
    // People find it, too.
    let text = fs::read_to_string(ground.at("c.surgetank.ref")).unwrap();
    let line = text.lines().find(|line| line.starts_with(".surgetank-blobs")).unwrap();
    assert!(fs::read(ground.at(line)).unwrap() == bytes);
    let hash = blake3::hash(&bytes).to_hex();
    assert!(line.ends_with(&format!("/{}/{}", &hash[..2], &hash[2..])), "{line}");
    // A change of one of them is nothing to the others.
    deliver(&store, "a", &noise(150_000), &meta(0o640));
    store.unlink(me(), &path("c")).unwrap();
    assert!(read(&store, "d/b") == bytes);
}

/// What the store has already was held to the drain's rate while it was compared: the second run took as long as the first.
#[test]
fn comparing_counted_as_sending() {
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

/// Nobody else may list or change it; nothing of the mount leads there.
#[test]
fn content_is_out_of_sight() {
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
fn where_no_directory_can_be_had_files_are_stored_as_they_are() {
    let ground = Ground::new();
    // Somebody else's, who could remove what we refer to; and something that is no directory.
    fs::write(ground.blobs(), "").unwrap();
    let store = ground.store();
    deliver(&store, "a", &noise(100_000), &meta(0o600));
    assert_eq!(ground.lies(), ["a"]);
    if me().uid == 0 {
        fs::remove_file(ground.blobs()).unwrap();
        fs::create_dir(ground.blobs()).unwrap();
        std::os::unix::fs::chown(ground.blobs(), Some(12345), None).unwrap();
        deliver(&ground.store(), "b", &noise(100_000), &meta(0o600));
        assert_eq!(ground.lies(), ["a", "b"]);
    }
}

/// They took each other's directory away, and stored their files as they were.
#[test]
fn two_who_made_the_first_directory_had_none() {
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
        assert_eq!(ground.lies(), ["a.surgetank.ref", "b.surgetank.ref", "c.surgetank.ref"]);
    }
}

#[test]
fn rotten_content_is_replaced_by_the_next_who_has_it() {
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
fn what_is_damaged_or_gone_is_said_and_never_read() {
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
    assert_eq!(why.kind(), io::ErrorKind::InvalidData, "that it is not there would be said of the file");
    assert_eq!(ground.store().stat(me(), &path("a")).unwrap().attr.size_bytes, 100_000);
}

/// Content may be brought again, or given a new time, while somebody reads it.
#[test]
fn readers_go_on_when_their_content_is_replaced_by_the_same() {
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

/// Between hashing and copying.
#[test]
fn what_is_written_to_meanwhile_gets_no_name_of_other_content() {
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
    assert_eq!(ground.lies(), [""; 0]);
}

#[test]
fn what_an_earlier_agent_staged_is_published_only_with_its_content() {
    let ground = Ground::new();
    let bytes = noise(100_000);
    let (temporary, copy) = staged(&ground.store(), "a", &source(&bytes), &meta(0o644));
    // Its content had no name yet when the agent died.
    let store = ground.store();
    assert_eq!(store.stat(me(), &temporary).unwrap().identity, copy.identity);
    assert_eq!(errno_of(store.publish(me(), &temporary, &path("a"), &meta(0o644))), io::ErrorKind::InvalidData);
    store.discard(me(), &temporary).unwrap();
    assert_eq!((ground.lies().len(), ground.content().len()), (0, 0), "the temporary of the content goes with it");
    // It had.
    let earlier = ground.store();
    let (temporary, _) = staged(&earlier, "a", &source(&bytes), &meta(0o644));
    earlier.settle(me(), std::slice::from_ref(&temporary)).unwrap();
    let store = ground.store();
    store.settle(me(), std::slice::from_ref(&temporary)).unwrap();
    store.publish(me(), &temporary, &path("a"), &meta(0o644)).unwrap();
    assert!(read(&store, "a") == bytes);
    assert_eq!(ground.lies(), ["a.surgetank.ref"]);
}

#[test]
fn versions_take_turns_in_both_forms() {
    let ground = Ground::new();
    let store = ground.store();
    let mut identity = deliver(&store, "f", b"first", &meta(0o600));
    for round in 0..4 {
        let bytes = if round % 2 == 0 { noise(70_000 + round) } else { noise(100 + round) };
        assert!(store.check(me(), &path("f"), &Expect::Identity(identity)).unwrap());
        identity = deliver(&store, "f", &bytes, &meta(0o600));
        assert_eq!(ground.lies(), [if round % 2 == 0 { "f.surgetank.ref" } else { "f" }]);
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
fn only_what_nobody_refers_to_for_long_is_collected() {
    let ground = Ground::new();
    let store = ground.store();
    make_dir(&store, "d");
    for (name, size) in [("d/kept", 100_000), ("gone", 110_000), ("again", 120_000)] {
        deliver(&store, name, &noise(size), &meta(0o600));
    }
    for name in ["gone", "again"] {
        store.unlink(me(), &path(name)).unwrap();
    }
    assert_eq!(ground.unused(MONTH, false).unwrap(), unused::Unused::default(), "all are young");
    ground.age();
    // Referred to anew: staged only.
    let (temporary, _) = staged(&store, "later", &source(&noise(120_000)), &meta(0o600));
    let found = ground.unused(MONTH, true).unwrap();
    assert_eq!((found.references, found.blobs.len(), found.blobs[0].size_bytes), (2, 1, 110_000));
    assert_eq!(ground.content().len(), 3, "a dry run");
    assert_eq!(ground.unused(MONTH, false).unwrap(), found);
    assert_eq!(ground.content().len(), 2);
    store.settle(me(), std::slice::from_ref(&temporary)).unwrap();
    store.publish(me(), &temporary, &path("later"), &meta(0o600)).unwrap();
    assert!(read(&store, "later") == noise(120_000) && read(&store, "d/kept") == noise(100_000));
    // And those that a killed agent left in the making.
    let (lost, _) = staged(&store, "lost", &source(&noise(130_000)), &meta(0o600));
    fs::remove_file(ground.at(&format!("{lost}.surgetank.ref"))).unwrap();
    ground.age();
    let blobs = ground.unused(MONTH, false).unwrap().blobs;
    assert!(blobs.len() == 1 && blobs[0].path.contains(".surgetank-tmp-"), "{blobs:?}");
}

#[test]
fn where_something_cannot_be_looked_into_nothing_is_collected() {
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

/// Referred to after a long time, content is young again.
#[test]
fn who_refers_to_old_content_makes_it_young() {
    let ground = Ground::new();
    deliver(&ground.store(), "a", &noise(100_000), &meta(0o600));
    ground.age();
    deliver(&ground.store(), "b", &noise(100_000), &meta(0o600));
    let age = fs::metadata(ground.content().remove(0)).unwrap().modified().unwrap().elapsed().unwrap();
    assert!(age < Duration::from_secs(3600), "{age:?}");
}
