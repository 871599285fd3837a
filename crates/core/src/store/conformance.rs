//! What every store must do: one suite for all drivers, through the interface alone.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicU64, Ordering};

use super::checksum::Checksum;
use super::{Cred, Expect, Gate, Meta, Staged, Store, StorePath, Verify};
use crate::model::{Kind, StoreIdentity, Timestamp};

type Case = (&'static str, fn(&dyn Store));

/// Runs every case on an empty store of its own.
pub fn conform(make: impl Fn() -> Box<dyn Store>) {
    let cases: &[Case] = &[
        (
            "a file arrives whole, with its attributes",
            a_file_arrives_whole,
        ),
        ("sizes around the chunk", sizes_around_the_chunk),
        ("holes stay holes", holes_stay_holes),
        ("extended attributes", extended_attributes),
        ("times in nanoseconds", times_in_nanoseconds),
        ("every mode", every_mode),
        ("names of any bytes", names_of_any_bytes),
        ("paths longer than PATH_MAX", paths_longer_than_path_max),
        ("plain paths only", plain_paths_only),
        ("temporaries are hidden", temporaries_are_hidden),
        (
            "a stopped stage leaves nothing",
            a_stopped_stage_leaves_nothing,
        ),
        ("leftovers give way", leftovers_give_way),
        ("discard twice", discard_twice),
        ("discard spares what is not ours", discard_spares),
        ("spill in place", spill_in_place),
        ("verify finds differences", verify_finds_differences),
        ("verify a replaced copy", verify_a_replaced_copy),
        ("publish over one link", publish_over_one_link),
        ("publish over several links", publish_over_several_links),
        ("publish over a link", publish_over_a_symlink),
        ("directories", directories),
        ("a tree in one step", a_tree_in_one_step),
        (
            "a directory that is there already",
            a_directory_that_is_there,
        ),
        ("links and fifos", links_and_fifos),
        ("conflicts are seen", conflicts_are_seen),
        ("names move and go", names_move_and_go),
        ("links are not followed", links_are_not_followed),
        ("set_meta", set_meta_is_exact),
        ("batches settle", batches_settle),
        ("open is for plain files", open_is_for_plain_files),
        ("room", room),
    ];
    for (name, case) in cases {
        let store = make();
        println!("case: {name}");
        case(&*store);
    }
}

// ---- what the cases are made of

pub fn me() -> Cred {
    Cred {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
    }
}

pub fn path(text: &str) -> StorePath {
    StorePath(text.as_bytes().to_vec())
}

pub fn no_gate() -> Gate<'static> {
    &|_| Ok(())
}

pub fn meta(perm: u32) -> Meta {
    let time = Timestamp {
        nanos: 1_234_567_890_123_456_789,
    };
    Meta {
        perm,
        uid: me().uid,
        gid: me().gid,
        atime: time,
        mtime: time,
        xattrs: Some(BTreeMap::new()),
    }
}

pub fn source(bytes: &[u8]) -> File {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(bytes, 0).unwrap();
    file
}

/// Bytes that repeat nowhere near.
pub fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64 ^ len as u64;
    std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    })
    .take(len)
    .collect()
}

/// Stages under a temporary name beside `to`.
pub fn staged(store: &dyn Store, to: &str, file: &File, meta: &Meta) -> (StorePath, Staged) {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let parent = to.rfind('/').map_or("", |slash| &to[..=slash]);
    let temporary = path(&format!(
        "{parent}.surgetank-tmp-{}",
        NUMBER.fetch_add(1, Ordering::Relaxed)
    ));
    let staged = store
        .stage_file(me(), &temporary, file, meta, no_gate())
        .unwrap();
    (temporary, staged)
}

/// The whole way of a file into the store.
pub fn deliver(store: &dyn Store, to: &str, bytes: &[u8], meta: &Meta) -> StoreIdentity {
    let (temporary, copy) = staged(store, to, &source(bytes), meta);
    store
        .settle(me(), std::slice::from_ref(&temporary))
        .unwrap();
    for how in [Verify::Cache, Verify::Reread] {
        store
            .verify(me(), &temporary, &copy, how, no_gate())
            .unwrap();
    }
    let identity = store.publish(me(), &temporary, &path(to), meta).unwrap();
    let parent = to.rfind('/').map_or("", |slash| &to[..slash]);
    store.sync_dirs(me(), &[path(parent)]).unwrap();
    assert_eq!(
        store.stat(me(), &temporary).unwrap_err().kind(),
        io::ErrorKind::NotFound,
        "the temporary is gone"
    );
    identity
}

pub fn read(store: &dyn Store, at: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    store
        .open(me(), &path(at), false)
        .unwrap()
        .read_to_end(&mut bytes)
        .unwrap();
    bytes
}

pub fn names(store: &dyn Store, at: &str, temporaries: bool) -> Vec<String> {
    let mut names: Vec<_> = store
        .list(me(), &path(at), temporaries)
        .unwrap()
        .iter()
        .map(|entry| String::from_utf8_lossy(&entry.name).into_owned())
        .collect();
    names.sort();
    names
}

pub fn errno<T>(result: io::Result<T>) -> i32 {
    match result {
        Ok(_) => 0,
        Err(error) => error.raw_os_error().unwrap_or(-1),
    }
}

fn make_dir(store: &dyn Store, at: &str) {
    let parent = at.rfind('/').map_or("", |slash| &at[..=slash]);
    let temporary = path(&format!("{parent}.surgetank-tmp-dir"));
    store.stage_dir(me(), &temporary, &meta(0o755)).unwrap();
    store
        .publish(me(), &temporary, &path(at), &meta(0o755))
        .unwrap();
}

// ---- the cases

fn a_file_arrives_whole(store: &dyn Store) {
    let bytes = noise(3_000_001);
    let identity = deliver(store, "result.dat", &bytes, &meta(0o640));
    assert_eq!(read(store, "result.dat"), bytes);
    let stat = store.stat(me(), &path("result.dat")).unwrap();
    assert_eq!(stat.identity, identity);
    assert_eq!(
        (stat.attr.kind, stat.attr.perm, stat.attr.links),
        (Kind::File, 0o640, 1)
    );
    assert_eq!(
        (stat.attr.uid, stat.attr.gid, stat.attr.size_bytes),
        (me().uid, me().gid, 3_000_001)
    );
    assert_eq!(stat.attr.mtime, meta(0).mtime);
}

fn sizes_around_the_chunk(store: &dyn Store) {
    for size in [
        0,
        1,
        4095,
        4096,
        4097,
        (1 << 20) - 1,
        1 << 20,
        (1 << 20) + 1,
        (9 << 20) + 5,
        (50 << 20) + 1,
    ] {
        let bytes = noise(size);
        let (temporary, copy) = staged(store, "f", &source(&bytes), &meta(0o600));
        let mut expected = Checksum::default();
        expected.bytes(&bytes);
        assert_eq!(
            (copy.checksum, copy.identity.size_bytes),
            (expected.value(), size as u64),
            "{size}"
        );
        store
            .settle(me(), std::slice::from_ref(&temporary))
            .unwrap();
        store
            .verify(me(), &temporary, &copy, Verify::Reread, no_gate())
            .unwrap();
        store
            .publish(me(), &temporary, &path("f"), &meta(0o600))
            .unwrap();
        assert!(read(store, "f") == bytes, "{size}");
    }
}

fn holes_stay_holes(store: &dyn Store) {
    let file = tempfile::tempfile().unwrap();
    let size = 1_u64 << 40;
    file.write_all_at(b"in the middle", 512 << 20).unwrap();
    file.write_all_at(b"unaligned", (700 << 20) + 12_345)
        .unwrap();
    file.set_len(size).unwrap();
    let (temporary, copy) = staged(store, "sparse", &file, &meta(0o644));
    store
        .settle(me(), std::slice::from_ref(&temporary))
        .unwrap();
    for how in [Verify::Cache, Verify::Reread] {
        store
            .verify(me(), &temporary, &copy, how, no_gate())
            .unwrap();
    }
    store
        .publish(me(), &temporary, &path("sparse"), &meta(0o644))
        .unwrap();
    let stat = store.stat(me(), &path("sparse")).unwrap().attr;
    assert_eq!(stat.size_bytes, size);
    assert!(
        stat.blocks * 512 < 4 << 20,
        "holes are kept: {} blocks",
        stat.blocks
    );
    let kept = store.open(me(), &path("sparse"), false).unwrap();
    let mut found = [0; 9];
    kept.read_exact_at(&mut found, (700 << 20) + 12_345)
        .unwrap();
    assert_eq!(&found, b"unaligned");

    // Nothing but a hole; and the same content without holes has the same checksum.
    let (hollow, dense) = (tempfile::tempfile().unwrap(), source(&vec![0; 5 << 20]));
    hollow.set_len(5 << 20).unwrap();
    let sums = [hollow, dense].map(|file| staged(store, "z", &file, &meta(0o644)).1.checksum);
    assert_eq!(sums[0], sums[1]);
}

fn extended_attributes(store: &dyn Store) {
    let of = |pairs: &[(&[u8], &[u8])]| {
        Some(
            pairs
                .iter()
                .map(|(name, value)| ((*name).into(), (*value).into()))
                .collect(),
        )
    };
    let first = Meta {
        xattrs: of(&[
            (b"user.origin", b"run 7"),
            (b"user.empty", b""),
            (b"user.bytes", &[0, 255, 10]),
        ]),
        ..meta(0o444)
    };
    deliver(store, "f", b"x", &first);
    assert_eq!(Some(store.xattrs(me(), &path("f")).unwrap()), first.xattrs);
    assert_eq!(store.stat(me(), &path("f")).unwrap().attr.perm, 0o444);

    let second = Meta {
        xattrs: of(&[(b"user.origin", b"run 8"), (b"user.new", b"1")]),
        ..meta(0o644)
    };
    store
        .set_meta(me(), &path("f"), Kind::File, &second)
        .unwrap();
    assert_eq!(Some(store.xattrs(me(), &path("f")).unwrap()), second.xattrs);
    // `None` leaves them: on change and on replacement of the content.
    store
        .set_meta(
            me(),
            &path("f"),
            Kind::File,
            &Meta {
                xattrs: None,
                ..meta(0o600)
            },
        )
        .unwrap();
    deliver(
        store,
        "f",
        b"y",
        &Meta {
            xattrs: None,
            ..meta(0o600)
        },
    );
    assert_eq!(Some(store.xattrs(me(), &path("f")).unwrap()), second.xattrs);
    assert_eq!(
        store.stat(me(), &path("f")).unwrap().attr.mtime,
        meta(0).mtime
    );
    deliver(store, "f", b"z", &meta(0o600));
    assert!(store.xattrs(me(), &path("f")).unwrap().is_empty());
}

fn times_in_nanoseconds(store: &dyn Store) {
    // Before the epoch, too.
    for (number, nanos) in [
        1,
        999_999_999,
        1_700_000_000_000_000_001,
        -1,
        -1_500_000_000,
    ]
    .into_iter()
    .enumerate()
    {
        let (atime, mtime) = (
            Timestamp { nanos },
            Timestamp {
                nanos: nanos + 7_000_000_003,
            },
        );
        let name = format!("f{number}");
        let identity = deliver(
            store,
            &name,
            b"x",
            &Meta {
                atime,
                mtime,
                ..meta(0o644)
            },
        );
        let attr = store.stat(me(), &path(&name)).unwrap().attr;
        assert_eq!((attr.mtime, identity.mtime_nanos), (mtime, mtime.nanos));
    }
}

fn every_mode(store: &dyn Store) {
    for perm in [
        0o000, 0o200, 0o400, 0o444, 0o111, 0o600, 0o777, 0o4755, 0o2755, 0o6711, 0o1644, 0o4000,
    ] {
        let (temporary, copy) = staged(store, "f", &source(b"#!"), &meta(perm));
        store
            .settle(me(), std::slice::from_ref(&temporary))
            .unwrap();
        store
            .verify(me(), &temporary, &copy, Verify::Reread, no_gate())
            .unwrap();
        store
            .publish(me(), &temporary, &path("f"), &meta(perm))
            .unwrap();
        assert_eq!(
            store.stat(me(), &path("f")).unwrap().attr.perm,
            perm,
            "{perm:o}"
        );
    }
}

fn names_of_any_bytes(store: &dyn Store) {
    let long = vec![b'n'; 255];
    let tricky: [&[u8]; 6] = [
        b"\xff\xfe\x80",
        b" leading and trailing ",
        b"new\nline",
        b"-rf",
        b"...",
        &long,
    ];
    for (number, name) in tricky.iter().enumerate() {
        let temporary = path(&format!(".surgetank-tmp-{number}"));
        store
            .stage_file(me(), &temporary, &source(name), &meta(0o644), no_gate())
            .unwrap();
        store
            .publish(me(), &temporary, &StorePath(name.to_vec()), &meta(0o644))
            .unwrap();
    }
    let listed = store.list(me(), &StorePath::root(), true).unwrap();
    assert_eq!(listed.len(), tricky.len());
    for name in tricky {
        let found = listed.iter().find(|entry| *entry.name == *name).unwrap();
        let stat = store.stat(me(), &StorePath(name.to_vec())).unwrap().attr;
        assert_eq!((found.kind, found.ino), (Kind::File, stat.ino));
    }
    assert_eq!(
        errno(store.stage_dir(
            me(),
            &StorePath([b".surgetank-tmp-", &long[..]].concat()),
            &meta(0o755)
        )),
        libc::ENAMETOOLONG
    );
}

fn paths_longer_than_path_max(store: &dyn Store) {
    let mut at = String::new();
    while at.len() < 9000 {
        at = format!(
            "{at}{}{}",
            if at.is_empty() { "" } else { "/" },
            "d".repeat(if at.len().is_multiple_of(3) { 250 } else { 31 })
        );
        make_dir(store, &at);
    }
    let file = format!("{at}/file");
    deliver(store, &file, b"deep", &meta(0o644));
    assert_eq!(read(store, &file), b"deep");
    assert_eq!(names(store, &at, true), ["file"]);
    store.rename(me(), &path(&file), &path("shallow")).unwrap();
    assert_eq!(read(store, "shallow"), b"deep");
}

fn plain_paths_only(store: &dyn Store) {
    deliver(store, "f", b"x", &meta(0o644));
    for bad in ["/f", "../f", "./f", "f/", "a//f", "a/../f", "a\0b"] {
        assert_eq!(errno(store.stat(me(), &path(bad))), libc::EINVAL, "{bad}");
        assert_eq!(errno(store.unlink(me(), &path(bad))), libc::EINVAL, "{bad}");
    }
    assert_eq!(errno(store.unlink(me(), &StorePath::root())), libc::EBUSY);
}

fn temporaries_are_hidden(store: &dyn Store) {
    deliver(store, "f", b"x", &meta(0o644));
    staged(store, "f", &source(b"y"), &meta(0o644));
    assert_eq!(names(store, "", false), ["f"]);
    assert_eq!(names(store, "", true).len(), 2);
    assert_eq!(
        read(store, "f"),
        b"x",
        "staging does not touch the final name"
    );
}

fn a_stopped_stage_leaves_nothing(store: &dyn Store) {
    let calls = Cell::new(0_u64);
    let calls = std::sync::Mutex::new(calls);
    let stop = |_: u64| {
        let calls = calls.lock().unwrap();
        calls.set(calls.get() + 1);
        if calls.get() == 3 {
            Err(io::ErrorKind::Interrupted.into())
        } else {
            Ok(())
        }
    };
    let error = store
        .stage_file(
            me(),
            &path(".surgetank-tmp-s"),
            &source(&noise(20 << 20)),
            &meta(0o644),
            &stop,
        )
        .unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::Interrupted);
    assert_eq!(calls.into_inner().unwrap().get(), 3, "it stopped at once");
    assert!(names(store, "", true).is_empty());
}

fn leftovers_give_way(store: &dyn Store) {
    let temporary = path(".surgetank-tmp-left");
    let inner = path(".surgetank-tmp-left/deeper");
    store.stage_dir(me(), &temporary, &meta(0o755)).unwrap();
    store.stage_dir(me(), &inner, &meta(0o700)).unwrap();
    store
        .stage_file(
            me(),
            &inner.join(b"file"),
            &source(b"old"),
            &meta(0o400),
            no_gate(),
        )
        .unwrap();
    store
        .stage_file(me(), &temporary, &source(b"new"), &meta(0o644), no_gate())
        .unwrap();
    assert_eq!(read(store, ".surgetank-tmp-left"), b"new");
    store
        .stage_symlink(me(), &temporary, b"elsewhere", &meta(0o777))
        .unwrap();
    store.stage_dir(me(), &temporary, &meta(0o755)).unwrap();
    assert_eq!(names(store, "", true), [".surgetank-tmp-left"]);
    // A spill is not replaced: it may be the only copy.
    store
        .create_temporary(me(), &path(".surgetank-tmp-spill"), 0o644)
        .unwrap();
    assert_eq!(
        errno(store.create_temporary(me(), &path(".surgetank-tmp-spill"), 0o644)),
        libc::EEXIST
    );
}

fn discard_twice(store: &dyn Store) {
    let (temporary, _) = staged(store, "f", &source(b"x"), &meta(0o644));
    for _ in 0..2 {
        store.discard(me(), &temporary).unwrap();
    }
    store
        .discard(me(), &path("no/such/.surgetank-tmp-1"))
        .unwrap();
    assert!(names(store, "", true).is_empty());
}

fn discard_spares(store: &dyn Store) {
    deliver(store, "precious", b"x", &meta(0o644));
    assert_eq!(errno(store.discard(me(), &path("precious"))), libc::EINVAL);
    assert_eq!(
        errno(store.stage_file(
            me(),
            &path("precious"),
            &source(b"y"),
            &meta(0o644),
            no_gate()
        )),
        libc::EEXIST
    );
    assert_eq!(read(store, "precious"), b"x");
}

fn spill_in_place(store: &dyn Store) {
    let temporary = path(".surgetank-tmp-spill");
    let bytes = noise(2_000_000);
    let file = store.create_temporary(me(), &temporary, 0o444).unwrap();
    file.write_all_at(&bytes[..1_000_000], 0).unwrap();
    drop(file);
    // After a restart it is opened again and written on.
    store
        .open(me(), &temporary, true)
        .unwrap()
        .write_all_at(&bytes[1_000_000..], 1_000_000)
        .unwrap();
    let wanted = Meta {
        xattrs: Some([(b"user.a"[..].into(), b"b"[..].into())].into()),
        ..meta(0o444)
    };
    let copy = store
        .stage_in_place(me(), &temporary, &wanted, no_gate())
        .unwrap();
    store
        .settle(me(), std::slice::from_ref(&temporary))
        .unwrap();
    store
        .verify(me(), &temporary, &copy, Verify::Cache, no_gate())
        .unwrap();
    store
        .publish(me(), &temporary, &path("f"), &wanted)
        .unwrap();
    assert!(read(store, "f") == bytes);
    let attr = store.stat(me(), &path("f")).unwrap().attr;
    assert_eq!((attr.perm, attr.mtime), (0o444, wanted.mtime));
    assert_eq!(Some(store.xattrs(me(), &path("f")).unwrap()), wanted.xattrs);
}

fn verify_finds_differences(store: &dyn Store) {
    let bytes = noise(3 << 20);
    for how in [Verify::Cache, Verify::Reread] {
        let (temporary, copy) = staged(store, "f", &source(&bytes), &meta(0o644));
        store
            .settle(me(), std::slice::from_ref(&temporary))
            .unwrap();
        store
            .verify(me(), &temporary, &copy, how, no_gate())
            .unwrap();
        let file = store.open(me(), &temporary, true).unwrap();
        for (at, byte) in [
            (0, bytes[0]),
            (1_700_001, bytes[1_700_001]),
            ((3 << 20) - 1, bytes[(3 << 20) - 1]),
        ] {
            file.write_all_at(&[byte ^ 1], at).unwrap();
            file.sync_all().unwrap();
            assert_eq!(
                store
                    .verify(me(), &temporary, &copy, how, no_gate())
                    .unwrap_err()
                    .kind(),
                io::ErrorKind::InvalidData,
                "byte {at}"
            );
            file.write_all_at(&[byte], at).unwrap();
        }
        file.set_len((3 << 20) - 1).unwrap();
        let error = store
            .verify(me(), &temporary, &copy, how, no_gate())
            .unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert!(
            error
                .to_string()
                .contains("3145727 bytes instead of 3145728"),
            "{error}"
        );
        // A hole where bytes were.
        file.set_len(0).unwrap();
        file.set_len(3 << 20).unwrap();
        assert_eq!(
            store
                .verify(me(), &temporary, &copy, how, no_gate())
                .unwrap_err()
                .kind(),
            io::ErrorKind::InvalidData
        );
    }
}

fn verify_a_replaced_copy(store: &dyn Store) {
    let (temporary, copy) = staged(store, "f", &source(b"same"), &meta(0o644));
    let (other, _) = staged(store, "f", &source(b"same"), &meta(0o644));
    store.rename(me(), &other, &temporary).unwrap();
    assert_eq!(
        store
            .verify(me(), &temporary, &copy, Verify::Cache, no_gate())
            .unwrap_err()
            .kind(),
        io::ErrorKind::InvalidData
    );
}

fn publish_over_one_link(store: &dyn Store) {
    let first = deliver(store, "f", b"old", &meta(0o644));
    let mut reader = store.open(me(), &path("f"), false).unwrap();
    let second = deliver(store, "f", b"new content", &meta(0o600));
    assert_ne!(first.ino, second.ino);
    assert_eq!(read(store, "f"), b"new content");
    let mut old = String::new();
    reader.read_to_string(&mut old).unwrap();
    assert_eq!(old, "old", "whoever has it open keeps what it opened");
}

fn publish_over_several_links(store: &dyn Store) {
    let first = deliver(store, "f", &noise(100_000), &meta(0o644));
    store.link(me(), &path("f"), &path("g")).unwrap();
    let bytes = noise(50_001);
    let second = deliver(store, "f", &bytes, &meta(0o600));
    assert_eq!(first.ino, second.ino, "the inode stays");
    assert!(read(store, "g") == bytes, "the other name sees it too");
    let attr = store.stat(me(), &path("g")).unwrap().attr;
    assert_eq!(
        (attr.perm, attr.links, attr.mtime),
        (0o600, 2, meta(0).mtime)
    );
    assert_eq!(store.stat(me(), &path("f")).unwrap().identity, second);
    assert_eq!(names(store, "", true), ["f", "g"]);
}

fn publish_over_a_symlink(store: &dyn Store) {
    deliver(store, "target", b"untouched", &meta(0o644));
    store
        .stage_symlink(me(), &path(".surgetank-tmp-l"), b"target", &meta(0o777))
        .unwrap();
    store
        .publish(me(), &path(".surgetank-tmp-l"), &path("f"), &meta(0o777))
        .unwrap();
    deliver(store, "f", b"plain", &meta(0o644));
    assert_eq!(
        (read(store, "f"), read(store, "target")),
        (b"plain".to_vec(), b"untouched".to_vec())
    );
    assert_eq!(store.stat(me(), &path("f")).unwrap().attr.kind, Kind::File);
}

fn directories(store: &dyn Store) {
    for perm in [0o755, 0o500, 0o1777, 0o000] {
        let name = format!("d{perm:o}");
        store
            .stage_dir(me(), &path(".surgetank-tmp-d"), &meta(perm))
            .unwrap();
        let identity = store
            .publish(me(), &path(".surgetank-tmp-d"), &path(&name), &meta(perm))
            .unwrap();
        let stat = store.stat(me(), &path(&name)).unwrap();
        assert_eq!(
            (
                stat.attr.kind,
                stat.attr.perm,
                stat.attr.mtime,
                stat.attr.ino
            ),
            (Kind::Directory, perm, meta(0).mtime, identity.ino)
        );
    }
    deliver(store, "d755/f", b"x", &meta(0o644));
    assert_eq!(
        errno(store.remove_dir(me(), &path("d755"))),
        libc::ENOTEMPTY
    );
    store.unlink(me(), &path("d755/f")).unwrap();
    store.remove_dir(me(), &path("d755")).unwrap();
    assert_eq!(errno(store.stat(me(), &path("d755"))), libc::ENOENT);
    assert!(store.may_write_dir(me(), &StorePath::root()).is_ok());
    assert_eq!(errno(store.list(me(), &path("d755"), false)), libc::ENOENT);
}

fn a_tree_in_one_step(store: &dyn Store) {
    let tree = path(".surgetank-tmp-tree");
    store.stage_dir(me(), &tree, &meta(0o555)).unwrap();
    store
        .stage_dir(me(), &tree.join(b"sub"), &meta(0o755))
        .unwrap();
    let leaf = tree.join(b"sub").join(b"leaf");
    let copy = store
        .stage_file(me(), &leaf, &source(b"leaf"), &meta(0o444), no_gate())
        .unwrap();
    store
        .settle(me(), &[leaf.clone(), tree.join(b"sub"), tree.clone()])
        .unwrap();
    store
        .verify(me(), &leaf, &copy, Verify::Reread, no_gate())
        .unwrap();
    store
        .publish(me(), &tree, &path("tree"), &meta(0o555))
        .unwrap();
    assert_eq!(read(store, "tree/sub/leaf"), b"leaf");
    assert_eq!(
        store.stat(me(), &path("tree/sub/leaf")).unwrap().attr.perm,
        0o444
    );
    let attr = store.stat(me(), &path("tree")).unwrap().attr;
    assert_eq!((attr.perm, attr.mtime), (0o555, meta(0).mtime));
}

fn a_directory_that_is_there(store: &dyn Store) {
    make_dir(store, "d");
    deliver(store, "d/kept", b"x", &meta(0o644));
    let before = store.stat(me(), &path("d")).unwrap().attr.ino;
    store
        .stage_dir(me(), &path(".surgetank-tmp-d"), &meta(0o700))
        .unwrap();
    let identity = store
        .publish(me(), &path(".surgetank-tmp-d"), &path("d"), &meta(0o700))
        .unwrap();
    assert_eq!(
        (identity.ino, read(store, "d/kept")),
        (before, b"x".to_vec())
    );
    assert_eq!(names(store, "", true), ["d"]);
    // A filled one is not poured over a filled one, and a file never takes a directory's place.
    store
        .stage_dir(me(), &path(".surgetank-tmp-d"), &meta(0o700))
        .unwrap();
    store
        .stage_file(
            me(),
            &path(".surgetank-tmp-d/f"),
            &source(b"y"),
            &meta(0o644),
            no_gate(),
        )
        .unwrap();
    assert_eq!(
        errno(store.publish(me(), &path(".surgetank-tmp-d"), &path("d"), &meta(0o700))),
        libc::ENOTEMPTY
    );
    let (temporary, _) = staged(store, "d", &source(b"file"), &meta(0o644));
    assert_eq!(
        errno(store.publish(me(), &temporary, &path("d"), &meta(0o644))),
        libc::EISDIR
    );
    assert_eq!(
        errno(store.publish(
            me(),
            &path(".surgetank-tmp-d"),
            &path("d/kept"),
            &meta(0o644)
        )),
        libc::ENOTDIR
    );
    assert_eq!(read(store, "d/kept"), b"x");
}

fn links_and_fifos(store: &dyn Store) {
    store
        .stage_symlink(
            me(),
            &path(".surgetank-tmp-l"),
            b"../any/where\xff",
            &meta(0o777),
        )
        .unwrap();
    store
        .stage_node(me(), &path(".surgetank-tmp-f"), Kind::Fifo, 0, &meta(0o620))
        .unwrap();
    store
        .settle(me(), &[path(".surgetank-tmp-l"), path(".surgetank-tmp-f")])
        .unwrap();
    store
        .publish(me(), &path(".surgetank-tmp-l"), &path("link"), &meta(0o777))
        .unwrap();
    store
        .publish(me(), &path(".surgetank-tmp-f"), &path("fifo"), &meta(0o620))
        .unwrap();
    assert_eq!(
        &*store.read_link(me(), &path("link")).unwrap(),
        b"../any/where\xff"
    );
    let link = store.stat(me(), &path("link")).unwrap().attr;
    assert_eq!((link.kind, link.mtime), (Kind::Symlink, meta(0).mtime));
    let fifo = store.stat(me(), &path("fifo")).unwrap().attr;
    assert_eq!(
        (fifo.kind, fifo.perm, fifo.mtime),
        (Kind::Fifo, 0o620, meta(0).mtime)
    );
    let changed = Meta {
        mtime: Timestamp { nanos: 42 },
        ..meta(0o777)
    };
    store
        .set_meta(me(), &path("link"), Kind::Symlink, &changed)
        .unwrap();
    assert_eq!(
        store.stat(me(), &path("link")).unwrap().attr.mtime.nanos,
        42
    );
    let mut kinds: Vec<_> = store
        .list(me(), &StorePath::root(), false)
        .unwrap()
        .into_iter()
        .map(|entry| (entry.name, entry.kind))
        .collect();
    kinds.sort_by(|a, b| a.0.cmp(&b.0));
    assert_eq!(
        kinds,
        [
            (b"fifo"[..].into(), Kind::Fifo),
            (b"link"[..].into(), Kind::Symlink)
        ]
    );
}

fn conflicts_are_seen(store: &dyn Store) {
    let at = path("f");
    assert!(store.check(me(), &at, &Expect::Absent).unwrap());
    assert!(store.check(me(), &at, &Expect::Unknown).unwrap());
    let identity = deliver(store, "f", b"ours", &meta(0o644));
    let known = Expect::Identity(identity);
    assert!(store.check(me(), &at, &known).unwrap());
    assert!(!store.check(me(), &at, &Expect::Absent).unwrap());
    assert!(!store.check(me(), &at, &Expect::Unknown).unwrap());
    // Same length, same mtime: the ctime tells.
    store
        .open(me(), &at, true)
        .unwrap()
        .write_all_at(b"hers", 0)
        .unwrap();
    store.set_meta(me(), &at, Kind::File, &meta(0o644)).unwrap();
    assert!(!store.check(me(), &at, &known).unwrap());
    let identity = deliver(store, "f", b"ours again", &meta(0o644));
    store.unlink(me(), &at).unwrap();
    assert!(!store.check(me(), &at, &Expect::Identity(identity)).unwrap());
    // The times of a directory change all the time.
    make_dir(store, "d");
    let dir = store.stat(me(), &path("d")).unwrap().identity;
    deliver(store, "d/f", b"x", &meta(0o644));
    assert!(
        store
            .check(me(), &path("d"), &Expect::Identity(dir))
            .unwrap()
    );
    deliver(store, "was-dir", b"x", &meta(0o644));
    assert!(
        !store
            .check(me(), &path("was-dir"), &Expect::Identity(dir))
            .unwrap()
    );
    assert!(
        store
            .check(me(), &path("no/such"), &Expect::Absent)
            .unwrap()
    );
}

fn names_move_and_go(store: &dyn Store) {
    make_dir(store, "d");
    deliver(store, "a", b"A", &meta(0o644));
    deliver(store, "d/b", b"B", &meta(0o644));
    store.exchange(me(), &path("a"), &path("d/b")).unwrap();
    assert_eq!(
        (read(store, "a"), read(store, "d/b")),
        (b"B".to_vec(), b"A".to_vec())
    );
    store.rename(me(), &path("a"), &path("d/b")).unwrap();
    assert_eq!(names(store, "", true), ["d"]);
    assert_eq!(read(store, "d/b"), b"B");
    store.rename(me(), &path("d"), &path("e")).unwrap();
    store.link(me(), &path("e/b"), &path("c")).unwrap();
    assert_eq!(store.stat(me(), &path("c")).unwrap().attr.links, 2);
    store.unlink(me(), &path("e/b")).unwrap();
    store.remove_dir(me(), &path("e")).unwrap();
    assert_eq!(read(store, "c"), b"B");
    assert_eq!(
        errno(store.exchange(me(), &path("c"), &path("nothing"))),
        libc::ENOENT
    );
    assert_eq!(errno(store.unlink(me(), &path("nothing"))), libc::ENOENT);
    assert_eq!(
        errno(store.link(me(), &path("c"), &path("c"))),
        libc::EEXIST
    );
}

fn links_are_not_followed(store: &dyn Store) {
    make_dir(store, "real");
    deliver(store, "real/f", b"x", &meta(0o644));
    store
        .stage_symlink(me(), &path(".surgetank-tmp-l"), b"real", &meta(0o777))
        .unwrap();
    store
        .publish(me(), &path(".surgetank-tmp-l"), &path("link"), &meta(0o777))
        .unwrap();
    store
        .stage_symlink(me(), &path(".surgetank-tmp-l"), b"real/f", &meta(0o777))
        .unwrap();
    store
        .publish(me(), &path(".surgetank-tmp-l"), &path("leaf"), &meta(0o777))
        .unwrap();
    let (inside, temporary) = (path("link/f"), path("link/.surgetank-tmp-1"));
    assert_eq!(errno(store.stat(me(), &inside)), libc::ELOOP);
    assert_eq!(errno(store.list(me(), &path("link"), false)), libc::ELOOP);
    assert_eq!(errno(store.open(me(), &inside, true)), libc::ELOOP);
    assert_eq!(errno(store.open(me(), &path("leaf"), true)), libc::ELOOP);
    assert_eq!(errno(store.unlink(me(), &inside)), libc::ELOOP);
    assert_eq!(
        errno(store.stage_file(me(), &temporary, &source(b"y"), &meta(0o644), no_gate())),
        libc::ELOOP
    );
    assert_eq!(
        errno(store.stage_dir(me(), &temporary, &meta(0o755))),
        libc::ELOOP
    );
    assert_eq!(
        errno(store.create_temporary(me(), &temporary, 0o644)),
        libc::ELOOP
    );
    assert_eq!(
        errno(store.rename(me(), &path("real/f"), &path("link/g"))),
        libc::ELOOP
    );
    assert_eq!(
        errno(store.set_meta(me(), &inside, Kind::File, &meta(0o777))),
        libc::ELOOP
    );
    assert_eq!(
        errno(store.set_meta(me(), &path("leaf"), Kind::File, &meta(0o777))),
        libc::ENOENT
    );
    assert_eq!(errno(store.sync_dirs(me(), &[path("link")])), libc::ELOOP);
    assert_eq!(errno(store.may_write_dir(me(), &path("link"))), libc::ELOOP);
    assert_eq!(
        errno(store.check(me(), &inside, &Expect::Absent)),
        libc::ELOOP
    );
    // A staged copy whose directory was swapped for a link does not get through it.
    make_dir(store, "trap");
    let (copy, _) = staged(store, "trap/g", &source(b"y"), &meta(0o644));
    store.rename(me(), &path("trap"), &path("moved")).unwrap();
    store.rename(me(), &path("link"), &path("trap")).unwrap();
    assert_eq!(
        errno(store.publish(me(), &copy, &path("trap/g"), &meta(0o644))),
        libc::ELOOP
    );
    assert_eq!(names(store, "real", true), ["f"]);
    assert_eq!(store.stat(me(), &path("real/f")).unwrap().attr.perm, 0o644);
}

fn set_meta_is_exact(store: &dyn Store) {
    deliver(store, "f", b"x", &meta(0o644));
    make_dir(store, "d");
    for (name, kind, perm) in [
        ("f", Kind::File, 0o4711),
        ("d", Kind::Directory, 0o2750),
        ("f", Kind::File, 0o000),
        ("d", Kind::Directory, 0o700),
    ] {
        let wanted = Meta {
            atime: Timestamp { nanos: 5 },
            mtime: Timestamp {
                nanos: 1_000_000_007,
            },
            ..meta(perm)
        };
        let identity = store.set_meta(me(), &path(name), kind, &wanted).unwrap();
        let stat = store.stat(me(), &path(name)).unwrap();
        assert_eq!(
            (stat.attr.perm, stat.attr.atime, stat.attr.mtime),
            (perm, wanted.atime, wanted.mtime)
        );
        assert_eq!(stat.identity, identity);
        // Nothing to change: nothing changes, not even the ctime.
        assert_eq!(
            store.set_meta(me(), &path(name), kind, &wanted).unwrap(),
            identity
        );
    }
    assert_eq!(
        errno(store.set_meta(me(), &path("d"), Kind::File, &meta(0o644))),
        libc::ENOENT
    );
}

fn batches_settle(store: &dyn Store) {
    store.settle(me(), &[]).unwrap();
    store.sync_dirs(me(), &[]).unwrap();
    let copies: Vec<_> = (0..40)
        .map(|number| staged(store, "f", &source(&noise(number * 100)), &meta(0o644)))
        .collect();
    let paths: Vec<_> = copies.iter().map(|(path, _)| path.clone()).collect();
    store.settle(me(), &paths).unwrap();
    for (number, (temporary, copy)) in copies.iter().enumerate() {
        store
            .verify(me(), temporary, copy, Verify::Cache, no_gate())
            .unwrap();
        store
            .publish(me(), temporary, &path(&format!("f{number}")), &meta(0o644))
            .unwrap();
    }
    store.sync_dirs(me(), &vec![StorePath::root(); 40]).unwrap();
    assert_eq!(
        store.list(me(), &StorePath::root(), true).unwrap().len(),
        40
    );
    assert_eq!(
        errno(store.settle(me(), &[path(".surgetank-tmp-none")])),
        libc::ENOENT
    );
}

fn open_is_for_plain_files(store: &dyn Store) {
    make_dir(store, "d");
    store
        .stage_node(me(), &path(".surgetank-tmp-f"), Kind::Fifo, 0, &meta(0o666))
        .unwrap();
    // Would wait for ever if it were opened like a file.
    assert_ne!(errno(store.open(me(), &path(".surgetank-tmp-f"), false)), 0);
    assert_ne!(errno(store.open(me(), &path(".surgetank-tmp-f"), true)), 0);
    assert_eq!(errno(store.open(me(), &path("d"), false)), libc::EISDIR);
    assert_eq!(
        errno(store.open(me(), &path("none"), true)),
        libc::ENOENT,
        "never creates"
    );
    deliver(store, "f", b"0123456789", &meta(0o644));
    let mut file = store.open(me(), &path("f"), true).unwrap();
    file.write_all_at(b"X", 5).unwrap();
    file.seek(SeekFrom::Start(4)).unwrap();
    assert_eq!(
        (read(store, "f"), file.metadata().unwrap().size()),
        (b"01234X6789".to_vec(), 10)
    );
}

fn room(store: &dyn Store) {
    let space = store.space(&StorePath::root()).unwrap();
    assert!(
        space.total_bytes >= space.free_bytes
            && space.free_bytes >= space.available_bytes
            && space.total_bytes > 0
    );
    assert_eq!(space.name_bytes_max, 255);
    assert_eq!(errno(store.space(&path("none"))), libc::ENOENT);
}
