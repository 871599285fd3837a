//! The conformance suite: what every store must do, tested through the interface alone.
//!
//! It is compiled for tests only: those of this crate, and with the feature `conformance` those of other crates.

#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicU64, Ordering};

use super::checksum::Checksum;
use super::{Cred, Expect, Gate, Meta, Staged, Store, StorePath, Verify};
use surgetank_types::model::{Kind, StoreIdentity, Timestamp};

mod copies;
mod names;
mod publication;

type Case = (&'static str, Needs, fn(&dyn Store));

/// A feature of the store that a case needs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Needs {
    Nothing,
    /// Content can be opened and written in place, and has holes; names are any bytes; staged directories move whole.
    PlainFiles,
    HardLinks,
}
use Needs::{HardLinks, Nothing, PlainFiles};

/// Runs every case that the store's features permit, each on an empty store.
pub fn conform(make: impl Fn() -> Box<dyn Store>) {
    conform_but_for(&[], make);
}

/// For a file system with times of whole seconds; `without`: cases that it cannot pass.
pub fn conform_in_whole_seconds(without: &[&str], make: impl Fn() -> Box<dyn Store>) {
    WHOLE_SECONDS.set(true);
    conform_but_for(without, make);
    WHOLE_SECONDS.set(false);
}

/// `without`: cases that the store cannot pass.
pub fn conform_but_for(without: &[&str], make: impl Fn() -> Box<dyn Store>) {
    let cases: &[Case] = &[
        ("a file arrives whole, with its attributes", Nothing, copies::a_file_arrives_whole),
        ("sizes around the chunk", Nothing, copies::sizes_around_the_chunk),
        ("holes stay holes", PlainFiles, copies::holes_stay_holes),
        ("extended attributes", Nothing, copies::extended_attributes),
        ("times in nanoseconds", Nothing, copies::times_in_nanoseconds),
        ("every mode", Nothing, copies::every_mode),
        ("names of any bytes", PlainFiles, copies::names_of_any_bytes),
        ("paths longer than PATH_MAX", PlainFiles, copies::paths_longer_than_path_max),
        ("plain paths only", Nothing, copies::plain_paths_only),
        ("temporaries are hidden", Nothing, copies::temporaries_are_hidden),
        ("a stopped stage leaves nothing", Nothing, copies::a_stopped_stage_leaves_nothing),
        ("leftovers give way", PlainFiles, copies::leftovers_give_way),
        ("discard twice", Nothing, copies::discard_twice),
        ("discard spares what is not ours", Nothing, copies::discard_spares),
        ("spill in place", PlainFiles, copies::spill_in_place),
        ("verify finds differences", PlainFiles, copies::verify_finds_differences),
        ("verify a replaced copy", PlainFiles, copies::verify_a_replaced_copy),
        ("publish over one link", Nothing, publication::publish_over_one_link),
        ("publish over several links", HardLinks, publication::publish_over_several_links),
        ("replace one of several links", HardLinks, publication::replace_one_of_several_links),
        ("publish over a link", Nothing, publication::publish_over_a_symlink),
        ("directories", Nothing, publication::directories),
        ("staged copies move with their directory", Nothing, publication::staged_copies_move),
        ("a tree in one step", PlainFiles, publication::a_tree_in_one_step),
        ("a directory that is there already", PlainFiles, publication::a_directory_that_is_there),
        ("links and fifos", Nothing, names::links_and_fifos),
        ("conflicts are seen", PlainFiles, names::conflicts_are_seen),
        ("names move and go", PlainFiles, names::names_move_and_go),
        ("links are not followed", PlainFiles, names::links_are_not_followed),
        ("set_meta", Nothing, names::set_meta_is_exact),
        ("batches settle", Nothing, names::batches_settle),
        ("open is for plain files", PlainFiles, names::open_is_for_plain_files),
        ("room", PlainFiles, names::room),
        ("listed names are complete", Nothing, names::listed_names_are_complete),
        ("notices between agents", Nothing, names::notices_between_agents),
    ];
    let unknown = without.iter().find(|name| cases.iter().all(|(known, ..)| *known != **name));
    assert_eq!(unknown, None, "no case of this name");
    for (name, needs, case) in cases.iter().filter(|(name, ..)| !without.contains(name)) {
        let store = make();
        let features = store.features();
        if *needs == PlainFiles && !features.plain_files || *needs == HardLinks && !features.hard_links {
            continue;
        }
        println!("case: {name}");
        case(&*store);
    }
}

// ---- helpers of the cases

/// The user of this process.
pub fn me() -> Cred {
    Cred { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw() }
}

/// The path of this text.
pub fn path(text: &str) -> StorePath {
    StorePath(text.as_bytes().to_vec())
}

/// Lets every copy run to its end.
pub fn no_gate() -> Gate<'static> {
    &|_| Ok(())
}

thread_local! {
    static WHOLE_SECONDS: Cell<bool> = const { Cell::new(false) };
}

fn in_whole_seconds() -> bool {
    WHOLE_SECONDS.get()
}

/// The time that [`meta`] gives files.
pub fn time() -> Timestamp {
    Timestamp { nanos: if in_whole_seconds() { 1_234_567_890_000_000_000 } else { 1_234_567_890_123_456_789 } }
}

/// Attributes of a file of this user, without extended ones.
pub fn meta(perm: u32) -> Meta {
    Meta { perm, uid: me().uid, gid: me().gid, times: Some((time(), time())), xattrs: Some(BTreeMap::new()) }
}

/// A file outside the store with this content.
pub fn source(bytes: &[u8]) -> File {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(bytes, 0).unwrap();
    file
}

/// Bytes without repetition at short distances.
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

/// Stages a file under a temporary name beside `to`.
pub fn staged(store: &dyn Store, to: &str, file: &File, meta: &Meta) -> (StorePath, Staged) {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let parent = to.rfind('/').map_or("", |slash| &to[..=slash]);
    let temporary = path(&format!("{parent}.surgetank-tmp-{}", NUMBER.fetch_add(1, Ordering::Relaxed)));
    let staged = store.stage_file(me(), &temporary, &path(to), file, meta, no_gate()).unwrap();
    (temporary, staged)
}

/// Brings a file into the store by all steps.
pub fn deliver(store: &dyn Store, to: &str, bytes: &[u8], meta: &Meta) -> StoreIdentity {
    let (temporary, copy) = staged(store, to, &source(bytes), meta);
    store.settle(me(), std::slice::from_ref(&temporary)).unwrap();
    for how in [Verify::Cache, Verify::Reread] {
        store.verify(me(), &temporary, &copy, how, no_gate()).unwrap();
    }
    let identity = store.publish(me(), &temporary, &path(to), meta).unwrap();
    let parent = to.rfind('/').map_or("", |slash| &to[..slash]);
    store.sync_dirs(me(), &[path(parent)]).unwrap();
    assert_eq!(store.stat(me(), &temporary).unwrap_err().kind(), io::ErrorKind::NotFound, "the temporary is gone");
    identity
}

/// The content of a file of the store.
pub fn read(store: &dyn Store, at: &str) -> Vec<u8> {
    let mut file = tempfile::tempfile().unwrap();
    let size_bytes = store.stat(me(), &path(at)).unwrap().attr.size_bytes;
    store.source(me(), &path(at)).unwrap().copy_to(&file, size_bytes, no_gate()).unwrap();
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0)).unwrap();
    file.read_to_end(&mut bytes).unwrap();
    bytes
}

/// The names in a directory of the store, sorted.
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

/// The errno of a failure; 0 if there was none.
pub fn errno<T>(result: io::Result<T>) -> i32 {
    match result {
        Ok(_) => 0,
        Err(error) => error.raw_os_error().unwrap_or(-1),
    }
}

/// Makes a directory in the store by all steps.
pub fn make_dir(store: &dyn Store, at: &str) {
    let parent = at.rfind('/').map_or("", |slash| &at[..=slash]);
    let temporary = path(&format!("{parent}.surgetank-tmp-dir"));
    store.stage_dir(me(), &temporary, &meta(0o755)).unwrap();
    store.publish(me(), &temporary, &path(at), &meta(0o755)).unwrap();
}
