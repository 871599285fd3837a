use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use super::zstd::Zstd;
use super::*;
use crate::conformance::{
    conform, conform_but_for, deliver, errno, make_dir, me, meta, names, no_gate, noise, path, read, source, staged,
};
use crate::object::ObjectStore;
use crate::object::memory::Memory;
use crate::posix::PosixStore;
use surgetank_types::model::Timestamp;

fn dir_of(at: &Path) -> OwnedFd {
    rustix::fs::open(at, OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap()
}

fn scratch() -> OwnedFd {
    rustix::fs::open(std::env::temp_dir(), OFlags::DIRECTORY, Mode::empty()).unwrap()
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
        let choose = |path: &StorePath| (!path.0.ends_with(b".plain")).then_some(1);
        Packed::new(self.posix(), Box::new(Zstd::new(scratch(), Box::new(choose))))
    }
    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
    fn names(&self) -> Vec<String> {
        let mut all: Vec<String> = fs::read_dir(self.dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        all.sort();
        all
    }
}

/// Text that zstd can compress.
fn text(round: u8) -> Vec<u8> {
    (0..20_000_u32).flat_map(|number| format!("{round} {number}\n").into_bytes()).collect()
}

#[test]
fn compressing_store_conforms() {
    for always in [true, false] {
        let grounds = std::cell::RefCell::new(Vec::new());
        // In this form the owner can still read a file whose mode forbids it (see below).
        let without: &[&str] = if always { &["set_meta"] } else { &[] };
        conform_but_for(without, || {
            let ground = Ground::new();
            let zstd = Zstd::new(scratch(), Box::new(|_| Some(1)));
            let zstd = if always { zstd.always() } else { zstd };
            let store = Packed::new(ground.posix(), Box::new(zstd));
            grounds.borrow_mut().push(ground);
            Box::new(store)
        });
    }
}

#[test]
fn compressing_store_on_objects_conforms() {
    for always in [true, false] {
        let uploads = std::cell::RefCell::new(Vec::new());
        conform(|| {
            let kept = tempfile::tempdir().unwrap();
            let objects =
                ObjectStore::new(Arc::new(Memory::default()), kept.path(), Verify::Cache, std::time::Duration::ZERO);
            uploads.borrow_mut().push(kept);
            let zstd = Zstd::new(scratch(), Box::new(|_| Some(1)));
            let zstd = if always { zstd.always() } else { zstd };
            Box::new(Packed::new(Arc::new(objects.unwrap()), Box::new(zstd)))
        });
    }
}

#[test]
fn compressed_file_is_read_by_zstd() {
    let ground = Ground::new();
    let store = ground.store();
    let bytes = text(1);
    let identity = deliver(&store, "table.csv", &bytes, &meta(0o640));
    assert_eq!(ground.names(), ["table.csv.surgetank.zst"]);
    let stored = fs::read(ground.at("table.csv.surgetank.zst")).unwrap();
    assert!(stored.len() < bytes.len() / 3);
    assert_eq!(::zstd::stream::decode_all(&stored[..]).unwrap(), bytes);
    let stat = store.stat(me(), &path("table.csv")).unwrap();
    assert_eq!((stat.attr.size_bytes, stat.attr.perm, stat.identity), (bytes.len() as u64, 0o640, identity));
    assert_eq!(names(&store, "", true), ["table.csv"]);
    assert!(read(&store, "table.csv") == bytes);
    // Another agent, without any state.
    let another = ground.store();
    assert_eq!(another.stat(me(), &path("table.csv")).unwrap().identity, identity);
    let Source::Remote(remote) = another.source(me(), &path("table.csv")).unwrap() else { panic!() };
    assert_eq!(remote.identity(), identity);
    assert_eq!(remote.checksum(), Some(super::super::checksum::of_bytes(&bytes)));
    let savings = store.savings().unwrap();
    assert_eq!((savings.compressed_files, savings.content_bytes), (1, bytes.len() as u64));
    assert_eq!(savings.stored_bytes, stored.len() as u64);
}

#[test]
fn unsuitable_files_stay_plain() {
    let ground = Ground::new();
    let store = ground.store();
    let long = "n".repeat(250);
    deliver(&store, "small", b"x", &meta(0o644));
    deliver(&store, "dense", &noise(100_000), &meta(0o644));
    deliver(&store, "closed", &text(1), &meta(0o200));
    deliver(&store, &long, &text(1), &meta(0o644));
    deliver(&store, "by-rule.plain", &text(1), &meta(0o644));
    let mut expected = vec!["by-rule.plain", "closed", "dense", &long, "small"];
    expected.sort_unstable();
    assert_eq!(ground.names(), expected);
    assert_eq!(names(&store, "", true), expected);
    assert_eq!(store.savings().unwrap().vain_files, 1, "the number of files that compression did not make smaller");
    for name in ["x.surgetank.zst", "d/.surgetank.zst"] {
        assert_eq!(errno(store.may_hold(&path(name))), libc::EILSEQ);
    }
}

/// Each version has exactly one form, the one that suits it.
#[test]
fn versions_alternate_between_both_forms() {
    let ground = Ground::new();
    let store = ground.store();
    let tagged = |value: &[u8]| Some([(b"user.tag"[..].into(), value.into())].into_iter().collect());
    let mut identity = deliver(&store, "f", b"first", &Meta { xattrs: tagged(b"kept"), ..meta(0o600) });
    for round in 0..4 {
        let bytes = if round % 2 == 0 { text(round) } else { noise(5000 + round as usize) };
        assert!(store.check(me(), &path("f"), &Expect::Identity(identity)).unwrap());
        assert!(!store.check(me(), &path("f"), &Expect::Absent).unwrap());
        let known = Meta { xattrs: None, ..meta(0o600) };
        identity = deliver(&store, "f", &bytes, &known);
        assert_eq!(ground.names(), [if round % 2 == 0 { "f.surgetank.zst" } else { "f" }]);
        assert!(read(&store, "f") == bytes);
        assert_eq!(Some(store.xattrs(me(), &path("f")).unwrap()), tagged(b"kept"), "round {round}");
        assert!(store.check(me(), &path("f"), &Expect::Identity(identity)).unwrap());
        let other = StoreIdentity { size_bytes: identity.size_bytes + 1, ..identity };
        assert!(!store.check(me(), &path("f"), &Expect::Identity(other)).unwrap());
    }
    store.unlink(me(), &path("f")).unwrap();
    assert_eq!(ground.names(), [""; 0]);
    assert!(store.check(me(), &path("f"), &Expect::Absent).unwrap());
}

/// A crash between the two steps of a change of form leaves both forms.
#[test]
fn plain_form_beside_packed_one_counts() {
    let ground = Ground::new();
    let store = ground.store();
    let leave_both = |name: &str| {
        deliver(&store, name, &text(7), &meta(0o644));
        fs::write(ground.at(name), "plain").unwrap();
    };
    leave_both("f");
    assert_eq!(names(&store, "", true), ["f"]);
    assert_eq!(read(&store, "f"), b"plain");
    assert_eq!(store.stat(me(), &path("f")).unwrap().attr.size_bytes, 5);
    store.rename(me(), &path("f"), &path("g")).unwrap();
    assert_eq!(ground.names(), ["g"]);
    leave_both("g");
    store.unlink(me(), &path("g")).unwrap();
    assert_eq!(ground.names(), [""; 0]);
    // A rename onto a name of the other form, both ways.
    for (moved, there) in [("a", "b.plain"), ("b.plain", "a")] {
        deliver(&store, moved, &text(1), &meta(0o644));
        deliver(&store, there, &text(2), &meta(0o644));
        store.rename(me(), &path(moved), &path(there)).unwrap();
        assert_eq!(names(&store, "", true), [there]);
        assert_eq!(ground.names().len(), 1);
        assert!(read(&store, there) == text(1));
        store.unlink(me(), &path(there)).unwrap();
    }
    // A new version where both forms exist.
    for bytes in [text(3), noise(5000)] {
        leave_both("h");
        deliver(&store, "h", &bytes, &meta(0o644));
        assert_eq!(ground.names().len(), 1);
        assert!(read(&store, "h") == bytes);
        store.unlink(me(), &path("h")).unwrap();
    }
    assert_eq!(ground.names(), [""; 0]);
}

#[test]
fn other_type_of_file_replaces_packed_file() {
    let ground = Ground::new();
    let store = ground.store();
    deliver(&store, "f", &text(1), &meta(0o644));
    let temporary = path(".surgetank-tmp-link");
    store.stage_symlink(me(), &temporary, b"elsewhere", &meta(0o777)).unwrap();
    store.publish(me(), &temporary, &path("f"), &meta(0o777)).unwrap();
    assert_eq!(ground.names(), ["f"]);
    assert_eq!(&*store.read_link(me(), &path("f")).unwrap(), b"elsewhere");
    deliver(&store, "f", &text(2), &meta(0o644));
    assert_eq!(ground.names(), ["f.surgetank.zst"]);
    // A directory of that name is not a packed file.
    fs::create_dir(ground.at("d.surgetank.zst")).unwrap();
    assert_eq!(errno(store.stat(me(), &path("d"))), libc::ENOENT);
    assert_eq!(names(&store, "", true), ["d.surgetank.zst", "f"]);
}

#[test]
fn packed_file_has_attributes_of_its_content() {
    let ground = Ground::new();
    let store = ground.store();
    deliver(&store, "f", &text(1), &meta(0o644));
    let time = Timestamp { nanos: 1_000_000_000_000_000_007 };
    let set = |perm: u32| Meta { perm, times: Some((time, time)), ..meta(0) };
    let identity = store.set_meta(me(), &path("f"), Kind::File, &set(0o4751)).unwrap();
    let stat = store.stat(me(), &path("f")).unwrap();
    assert_eq!((stat.attr.perm, stat.attr.mtime, stat.identity), (0o4751, time, identity));
    assert_eq!(stat.attr.size_bytes, text(1).len() as u64);
    // The owner can always read the file in the store, because otherwise its length could not be determined.
    store.set_meta(me(), &path("f"), Kind::File, &set(0)).unwrap();
    assert_eq!(store.stat(me(), &path("f")).unwrap().attr.perm, 0o400);
    assert!(read(&store, "f") == text(1));
}

#[test]
fn file_of_other_owner_is_overwritten_in_place() {
    let ground = Ground::new();
    let store = ground.store();
    fs::write(ground.at("linked"), "old").unwrap();
    fs::hard_link(ground.at("linked"), ground.at("also")).unwrap();
    deliver(&store, "linked", &text(1), &meta(0o644));
    assert_eq!(ground.names(), ["also", "linked"]);
    assert!(fs::read(ground.at("also")).unwrap() == text(1));
    assert_eq!(fs::metadata(ground.at("also")).unwrap().nlink(), 2);
}

#[test]
fn renamed_directory_keeps_packed_files() {
    let ground = Ground::new();
    let store = ground.store();
    make_dir(&store, "d");
    deliver(&store, "d/f", &text(1), &meta(0o644));
    store.rename(me(), &path("d"), &path("e")).unwrap();
    assert_eq!(errno(store.stat(me(), &path("d/f"))), libc::ENOENT);
    assert!(read(&store, "e/f") == text(1));
    assert_eq!(errno(store.remove_dir(me(), &path("e"))), libc::ENOTEMPTY);
    store.unlink(me(), &path("e/f")).unwrap();
    store.remove_dir(me(), &path("e")).unwrap();
    assert_eq!(ground.names(), [""; 0]);
}

#[test]
fn form_written_by_other_client_since_check_stays() {
    let ground = Ground::new();
    let store = ground.store();
    let identity = deliver(&store, "f", b"plain", &meta(0o644));
    let (temporary, _) = staged(&store, "f", &source(&text(1)), &meta(0o644));
    assert!(store.check(me(), &path("f"), &Expect::Identity(identity)).unwrap());
    fs::write(ground.at("f"), "another's").unwrap();
    store.publish(me(), &temporary, &path("f"), &meta(0o644)).unwrap();
    assert_eq!(read(&store, "f"), b"another's");
    assert_eq!(names(&store, "", true), ["f"]);
}

#[test]
fn form_absent_before_rename_is_found_after_it() {
    let ground = Ground::new();
    let store = ground.store();
    make_dir(&store, "d");
    assert!(store.check(me(), &path("d/f"), &Expect::Absent).unwrap());
    store.rename(me(), &path("d"), &path("e")).unwrap();
    make_dir(&store, "d");
    deliver(&ground.store(), "d/f", &text(1), &meta(0o644));
    deliver(&store, "d/f", b"plain", &meta(0o644));
    assert!(!ground.at("d/f.surgetank.zst").exists(), "the packed form stays, and the next removal would reveal it");
}

#[test]
fn damaged_packed_file_is_an_error() {
    let ground = Ground::new();
    let store = ground.store();
    deliver(&store, "f", &text(1), &meta(0o644));
    let at = ground.at("f.surgetank.zst");
    let good = fs::read(&at).unwrap();
    for (what, bytes) in [("cut", &good[..good.len() - 5]), ("empty", b""), ("foreign", b"not ours")] {
        fs::write(&at, bytes).unwrap();
        let another = ground.store();
        let why = another.stat(me(), &path("f")).unwrap_err();
        assert_eq!(why.kind(), io::ErrorKind::InvalidData, "{what}");
        assert!(why.to_string().contains("f.surgetank.zst"), "{why}");
        let why = another.source(me(), &path("f")).err().unwrap();
        assert!(why.to_string().contains("f.surgetank.zst"), "{why}");
    }
    let mut flipped = good.clone();
    flipped[good.len() / 2] ^= 1;
    fs::write(&at, &flipped).unwrap();
    let another = ground.store();
    let target = tempfile::tempfile().unwrap();
    let size_bytes = another.stat(me(), &path("f")).unwrap().attr.size_bytes;
    let why = another.source(me(), &path("f")).unwrap().copy_to(&target, size_bytes, no_gate()).unwrap_err();
    assert_eq!(why.kind(), io::ErrorKind::InvalidData);
}

/// A copy that an earlier agent staged is recognised by its bytes alone.
#[test]
fn copy_staged_by_earlier_agent_is_published() {
    let ground = Ground::new();
    let (temporary, copy) = staged(&ground.store(), "f", &source(&text(1)), &meta(0o644));
    let store = ground.store();
    let found = store.stat(me(), &temporary).unwrap();
    assert_eq!(found.identity, copy.identity);
    store.settle(me(), std::slice::from_ref(&temporary)).unwrap();
    store.publish(me(), &temporary, &path("f"), &meta(0o644)).unwrap();
    assert_eq!(ground.names(), ["f.surgetank.zst"]);
    assert!(read(&store, "f") == text(1));
    // Another agent can also discard it, in either form.
    for name in ["g", "g.plain"] {
        let (temporary, _) = staged(&ground.store(), name, &source(&text(2)), &meta(0o644));
        ground.store().discard(me(), &temporary).unwrap();
    }
    assert_eq!(ground.names(), ["f.surgetank.zst"]);
}

#[test]
fn file_without_scratch_space_is_stored_plain() {
    let ground = Ground::new();
    // Files cannot be made in /proc.
    let scratch = rustix::fs::open("/proc", OFlags::DIRECTORY, Mode::empty()).unwrap();
    let store = Packed::new(ground.posix(), Box::new(Zstd::new(scratch, Box::new(|_| Some(1)))));
    deliver(&store, "f", &text(1), &meta(0o644));
    assert_eq!(ground.names(), ["f"]);
    assert_eq!(fs::metadata(ground.at("f")).unwrap().permissions().mode() & 0o777, 0o644);
}
