//! A temporary directory as the mount: its files by requests of members.

mod hostile;
mod locks;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use surgetank_types::model::{Attr, Kind, Timestamp};
use tempfile::TempDir;

use super::Export;
use crate::pool::call::{Answer, Ask, Call, Change, Found, Listed, Lock, LockKind, Time};

/// An export of a directory, with requests of the member 1 as the process's own user.
struct Scene {
    export: Export,
    dir: TempDir,
}

const MEMBER: u32 = 1;

impl Scene {
    fn new() -> Self {
        // As the pool's process does: the mode of a request has the program's mask already.
        rustix::process::umask(rustix::fs::Mode::empty());
        let dir = tempfile::tempdir().unwrap();
        Self { export: Export::new(dir.path().to_owned(), std::time::Duration::ZERO), dir }
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn by(&self, member: u32, ask: Ask) -> Answer {
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        self.export.answer(member, &Call { uid, gid, ask })
    }

    fn ask(&self, ask: Ask) -> Answer {
        self.by(MEMBER, ask)
    }

    fn done(&self, ask: Ask) {
        assert_eq!(self.ask(ask), Answer::Done);
    }

    fn fails(&self, ask: Ask) -> i32 {
        match self.ask(ask) {
            Answer::Failed(number) => number,
            other => panic!("{other:?}"),
        }
    }

    fn found(&self, ask: Ask) -> Found {
        match self.ask(ask) {
            Answer::Found(found) => found,
            other => panic!("{other:?}"),
        }
    }

    fn handle(&self, ask: Ask) -> u64 {
        match self.ask(ask) {
            Answer::Opened { handle, .. } | Answer::Created { handle, .. } => handle,
            other => panic!("{other:?}"),
        }
    }

    fn bytes(&self, ask: Ask) -> Vec<u8> {
        match self.ask(ask) {
            Answer::Bytes(bytes) => bytes,
            other => panic!("{other:?}"),
        }
    }

    fn attr(&self, ask: Ask) -> Attr {
        match self.ask(ask) {
            Answer::Attributes { attr, .. } => attr,
            other => panic!("{other:?}"),
        }
    }

    fn root(&self) -> u64 {
        self.found(Ask::Directory(name(b""))).node
    }

    fn created(&self, parent: u64, called: &[u8], flags: i32) -> (Found, u64) {
        match self.ask(create(parent, called, flags)) {
            Answer::Created { found, handle, .. } => (found, handle),
            other => panic!("{other:?}"),
        }
    }

    fn opened(&self, node: u64, flags: i32) -> u64 {
        self.handle(Ask::Open { node, flags: flags as u32 })
    }

    fn written(&self, handle: u64, offset: u64, content: &[u8]) {
        let answer = self.ask(Ask::Write { handle, offset, at_end: false, content: content.to_vec() });
        assert_eq!(answer, Answer::Count(content.len() as u64));
    }

    fn read(&self, handle: u64) -> Vec<u8> {
        self.bytes(Ask::Read { handle, offset: 0, bytes: u32::MAX })
    }
}

fn name(bytes: &[u8]) -> Box<[u8]> {
    bytes.into()
}

fn create(parent: u64, called: &[u8], flags: i32) -> Ask {
    Ask::Create { parent, name: name(called), perm: 0o640, flags: flags as u32 }
}

fn lookup(parent: u64, called: &[u8]) -> Ask {
    Ask::Lookup { parent, name: name(called), keep: false }
}

fn unlink(parent: u64, called: &[u8]) -> Ask {
    Ask::Unlink { parent, name: name(called) }
}

fn change(node: u64, change: Change) -> Ask {
    Ask::SetAttributes { node, handle: None, change }
}

#[test]
fn file_lives_by_calls() {
    let scene = Scene::new();
    let root = scene.root();
    let (found, handle) = scene.created(root, b"a", libc::O_RDWR | libc::O_EXCL);
    assert_eq!((found.attr.kind, found.attr.perm, found.attr.size_bytes), (Kind::File, 0o640, 0));
    assert_eq!(scene.fails(create(root, b"a", libc::O_RDWR | libc::O_EXCL)), libc::EEXIST);
    scene.written(handle, 3, b"content");
    assert_eq!(scene.read(handle), b"\0\0\0content");
    assert_eq!(scene.bytes(Ask::Read { handle, offset: 4, bytes: 3 }), b"ont");
    assert_eq!(scene.bytes(Ask::Read { handle, offset: 100, bytes: 3 }), b"");
    scene.done(Ask::Sync { handle, data_only: true });

    let again = scene.found(lookup(root, b"a"));
    assert_eq!((again.node, again.attr.size_bytes), (found.node, 10));
    assert_eq!(again.attr.ino, fs::metadata(scene.path().join("a")).unwrap().ino());
    scene.done(Ask::Rename { parent: root, name: name(b"a"), new_parent: root, new_name: name(b"b"), flags: 0 });
    assert_eq!(scene.fails(lookup(root, b"a")), libc::ENOENT);
    let linked = scene.found(Ask::Link { node: found.node, new_parent: root, new_name: name(b"c") });
    assert_eq!((linked.node, linked.attr.links), (found.node, 2));
    let exclusive = Ask::Rename {
        parent: root,
        name: name(b"b"),
        new_parent: root,
        new_name: name(b"c"),
        flags: libc::RENAME_NOREPLACE,
    };
    assert_eq!(scene.fails(exclusive), libc::EEXIST);
    scene.done(unlink(root, b"b"));
    scene.done(unlink(root, b"c"));
    assert_eq!(scene.fails(unlink(root, b"c")), libc::ENOENT);
    // The handle and the node outlive the last name.
    assert_eq!(scene.read(handle), b"\0\0\0content");
    assert_eq!(scene.attr(Ask::Attributes { node: found.node, handle: Some(handle) }).links, 0);
    let second = scene.opened(found.node, libc::O_RDONLY);
    assert_eq!(scene.read(second), b"\0\0\0content");
    scene.done(Ask::Close { handle });
    scene.done(Ask::Close { handle: second });
    assert_eq!(scene.fails(Ask::Close { handle }), libc::EBADF);
    assert_eq!(scene.fails(Ask::Read { handle, offset: 0, bytes: 1 }), libc::EBADF);
    // Found by the creation, the look-up and the link.
    scene.done(Ask::Forget(vec![(found.node, 2)]));
    assert_eq!(scene.export.holds(MEMBER), (2, 0));
    scene.done(Ask::Forget(vec![(found.node, 1), (found.node, 7), (12_345, 1)]));
    assert_eq!(scene.export.holds(MEMBER), (1, 0));
    assert_eq!(scene.fails(Ask::Attributes { node: found.node, handle: None }), libc::ESTALE);
}

#[test]
fn attributes_change_as_asked() {
    let scene = Scene::new();
    let root = scene.root();
    let (found, handle) = scene.created(root, b"a", libc::O_RDWR);
    scene.written(handle, 0, b"0123456789");
    let node = found.node;
    let at = Timestamp::from_parts(-5, 7);
    let wanted = Change { perm: Some(0o711), size_bytes: Some(4), mtime: Some(Time::At(at)), ..Change::default() };
    let attr = scene.attr(change(node, wanted));
    assert_eq!((attr.perm, attr.size_bytes, attr.mtime), (0o711, 4, at));
    assert_eq!(scene.read(handle), b"0123");
    let before = scene.attr(Ask::Attributes { node, handle: None });
    let now = scene.attr(change(node, Change { mtime: Some(Time::Now), ..Change::default() }));
    assert!(now.mtime > at && now.atime == before.atime);
    let shorter = Change { size_bytes: Some(1), ..Change::default() };
    let by_handle = Ask::SetAttributes { node, handle: Some(handle), change: shorter };
    assert_eq!(scene.attr(by_handle).size_bytes, 1);
    for size_bytes in [u64::MAX, 1 << 63] {
        let too_long = Change { size_bytes: Some(size_bytes), ..Change::default() };
        assert_eq!(scene.fails(change(node, too_long)), libc::EINVAL);
    }
    assert_eq!(scene.fails(change(node, Change { uid: Some(u32::MAX), ..Change::default() })), libc::EINVAL);

    let link = scene.found(Ask::SymbolicLink { parent: root, name: name(b"l"), target: name(b"/etc/passwd") });
    let touched = scene.attr(change(link.node, Change { mtime: Some(Time::At(at)), ..Change::default() }));
    assert_eq!((touched.kind, touched.mtime), (Kind::Symlink, at));
    assert_eq!(scene.fails(change(link.node, Change { perm: Some(0o777), ..Change::default() })), libc::EOPNOTSUPP);
    assert_eq!(scene.fails(change(link.node, Change { size_bytes: Some(0), ..Change::default() })), libc::EINVAL);
}

#[test]
fn extended_attributes_pass_but_the_authority_is_hidden() {
    let scene = Scene::new();
    let root = scene.root();
    let (Found { node, .. }, _) = scene.created(root, b"a", libc::O_RDWR);
    let set = |called: &[u8]| Ask::SetXattr { node, name: name(called), value: name(b"v"), flags: 0 };
    let get = |called: &[u8]| Ask::GetXattr { node, name: name(called) };
    scene.done(set(b"user.x"));
    assert_eq!(scene.bytes(get(b"user.x")), b"v");
    let only_new = Ask::SetXattr { node, name: name(b"user.x"), value: name(b""), flags: libc::XATTR_CREATE as u32 };
    assert_eq!(scene.fails(only_new), libc::EEXIST);
    let authority = super::names::AUTHORITY;
    rustix::fs::setxattr(scene.path().join("a"), authority, b"ours", rustix::fs::XattrFlags::empty()).unwrap();
    assert_eq!(scene.fails(get(authority.as_bytes())), libc::ENODATA);
    assert_eq!(scene.fails(set(authority.as_bytes())), libc::EPERM);
    assert_eq!(scene.bytes(Ask::ListXattrs { node }), b"user.x\0");
    scene.done(Ask::RemoveXattr { node, name: name(b"user.x") });
    assert_eq!(scene.fails(get(b"user.x")), libc::ENODATA);
    assert_eq!(scene.fails(get(b"")), libc::ERANGE);
    assert_eq!(scene.fails(get(b"user.\0x")), libc::EINVAL);
    let link = scene.found(Ask::SymbolicLink { parent: root, name: name(b"l"), target: name(b"a") });
    assert_eq!(scene.fails(Ask::GetXattr { node: link.node, name: name(b"user.x") }), libc::EOPNOTSUPP);
}

#[test]
fn directory_of_another_owner_is_left_to_the_asker() {
    let scene = Scene::new();
    let root = scene.root();
    for (called, authority) in [("ours", "ours"), ("theirs", "store"), ("long", &"x".repeat(1000))] {
        let path = scene.path().join(called);
        fs::create_dir(&path).unwrap();
        let value = authority.as_bytes();
        rustix::fs::setxattr(path, super::names::AUTHORITY, value, rustix::fs::XattrFlags::empty()).unwrap();
    }
    assert_eq!(scene.found(lookup(root, b"ours")).attr.kind, Kind::Directory);
    assert_eq!(scene.ask(lookup(root, b"theirs")), Answer::OfTheStore);
    assert_eq!(scene.ask(lookup(root, b"long")), Answer::OfTheStore);
    assert_eq!(scene.export.holds(MEMBER), (2, 0));
}

#[test]
fn directories_and_links_are_made_and_removed() {
    let scene = Scene::new();
    let root = scene.root();
    let made = scene.found(Ask::MakeDirectory { parent: root, name: name(b"d"), perm: 0o1777 });
    assert_eq!((made.attr.kind, made.attr.perm), (Kind::Directory, 0o1777));
    scene.created(made.node, b"f", libc::O_WRONLY);
    let remove = || Ask::RemoveDirectory { parent: root, name: name(b"d") };
    assert_eq!(scene.fails(remove()), libc::ENOTEMPTY);
    assert_eq!(scene.fails(unlink(root, b"d")), libc::EISDIR);
    assert_eq!(scene.fails(Ask::Open { node: made.node, flags: 0 }), libc::EISDIR);
    assert_eq!(scene.fails(create(root, b"d", libc::O_WRONLY)), libc::EISDIR);
    assert_eq!(scene.found(Ask::Directory(name(b"d"))).node, made.node);
    scene.done(unlink(made.node, b"f"));
    scene.done(Ask::SyncDirectory { node: made.node });
    scene.done(remove());

    let link = scene.found(Ask::SymbolicLink { parent: root, name: name(b"l"), target: name(b"/etc/passwd") });
    assert_eq!(link.attr.kind, Kind::Symlink);
    assert_eq!(scene.found(lookup(root, b"l")).node, link.node);
    assert_eq!(scene.bytes(Ask::ReadLink { node: link.node }), b"/etc/passwd");
    assert_eq!(scene.fails(Ask::ReadLink { node: root }), libc::EINVAL);
    assert_eq!(scene.fails(Ask::Open { node: link.node, flags: 0 }), libc::ELOOP);
    assert_eq!(scene.fails(create(root, b"l", libc::O_RDONLY)), libc::ELOOP);
    let second = scene.found(Ask::Link { node: link.node, new_parent: root, new_name: name(b"m") });
    assert_eq!((second.node, second.attr.links), (link.node, 2));
}

#[test]
fn pipe_is_made_but_never_opened() {
    let scene = Scene::new();
    let root = scene.root();
    let mode = libc::S_IFIFO | 0o600;
    let pipe = scene.found(Ask::MakeNode { parent: root, name: name(b"p"), mode, device: 0 });
    assert_eq!((pipe.attr.kind, pipe.attr.perm), (Kind::Fifo, 0o600));
    assert_eq!(scene.fails(Ask::Open { node: pipe.node, flags: libc::O_RDONLY as u32 }), libc::EINVAL);
    for flags in [libc::O_RDONLY, libc::O_WRONLY, libc::O_RDWR] {
        assert_eq!(scene.fails(create(root, b"p", flags)), libc::ENXIO);
    }
    let wrong = |mode| Ask::MakeNode { parent: root, name: name(b"q"), mode, device: 0 };
    assert_eq!(scene.fails(wrong(libc::S_IFLNK)), libc::EINVAL);
    assert_eq!(scene.fails(wrong(libc::S_IFDIR)), libc::EPERM);
    scene.found(wrong(libc::S_IFREG | 0o600));
}

#[test]
fn appends_of_two_handles_follow_each_other() {
    let scene = Scene::new();
    let root = scene.root();
    let (found, first) = scene.created(root, b"a", libc::O_WRONLY | libc::O_APPEND);
    let second = scene.opened(found.node, libc::O_WRONLY | libc::O_APPEND);
    for (handle, content) in [(first, b"one "), (second, b"two "), (first, b"3.. ")] {
        let answer = scene.ask(Ask::Write { handle, offset: 0, at_end: true, content: content.to_vec() });
        assert_eq!(answer, Answer::Count(content.len() as u64));
    }
    assert_eq!(fs::read(scene.path().join("a")).unwrap(), b"one two 3.. ");
    // The program took `O_APPEND` back.
    scene.written(first, 4, b"2");
    assert_eq!(fs::read(scene.path().join("a")).unwrap(), b"one 2wo 3.. ");
    // (Without the flag of the creation, which a descriptor keeps.)
    let third = scene.opened(found.node, libc::O_RDWR | libc::O_EXCL | libc::O_CREAT | libc::O_TRUNC);
    assert_eq!(scene.read(third), b"");
}

fn list(handle: u64, from_the_beginning: bool) -> Ask {
    Ask::List { handle, from_the_beginning }
}

#[test]
fn listing_has_every_name_once() {
    let scene = Scene::new();
    let expected: BTreeSet<_> = (0..2500).map(|number| format!("a-name-of-a-file-{number}")).collect();
    for called in &expected {
        fs::write(scene.path().join(called), "").unwrap();
    }
    let handle = scene.handle(Ask::OpenDirectory { node: scene.root() });
    let mut pages = Vec::new();
    let mut names = BTreeSet::new();
    loop {
        let Answer::Names(page) = scene.ask(list(handle, false)) else { panic!() };
        if page.is_empty() {
            break;
        }
        pages.push(page.len());
        for Listed { ino, kind, name } in page {
            assert!(kind == Kind::File && ino != 0);
            assert!(names.insert(String::from_utf8(name.to_vec()).unwrap()));
        }
    }
    assert_eq!(pages, [1000, 1000, 500]);
    assert_eq!(names, expected);
    for (from_the_beginning, expected) in [(true, 1000), (false, 1000), (true, 1000), (false, 1000), (false, 500)] {
        let Answer::Names(page) = scene.ask(list(handle, from_the_beginning)) else { panic!() };
        assert_eq!(page.len(), expected);
    }
    assert_eq!(scene.fails(Ask::Read { handle, offset: 0, bytes: 1 }), libc::EBADF);
    scene.done(Ask::Close { handle });
    let (_, file) = scene.created(scene.root(), b"f", libc::O_RDWR);
    assert_eq!(scene.fails(list(file, false)), libc::ENOTDIR);
}

#[test]
fn space_is_reserved_and_holes_are_found() {
    let scene = Scene::new();
    let (_, handle) = scene.created(scene.root(), b"a", libc::O_RDWR);
    let whence = libc::SEEK_DATA as u32;
    scene.written(handle, 1 << 20, b"x");
    assert_eq!(scene.ask(Ask::Seek { handle, offset: 0, whence }), Answer::Count(1 << 20));
    assert_eq!(scene.fails(Ask::Seek { handle, offset: 0, whence: libc::SEEK_SET as u32 }), libc::EINVAL);
    scene.done(Ask::Allocate { handle, mode: 0, offset: 0, length: 2 << 20 });
    assert_eq!(fs::metadata(scene.path().join("a")).unwrap().len(), 2 << 20);
    for offset in [u64::MAX, 1 << 63] {
        assert_eq!(scene.fails(Ask::Seek { handle, offset, whence }), libc::EINVAL);
        assert_eq!(scene.fails(Ask::Allocate { handle, mode: 0, offset, length: 1 }), libc::EINVAL);
        assert_eq!(scene.fails(Ask::Read { handle, offset, bytes: 1 }), libc::EINVAL);
        assert_eq!(scene.fails(Ask::Write { handle, offset, at_end: false, content: vec![1] }), libc::EINVAL);
    }
    // The end of the numbers.
    let offset = i64::MAX as u64;
    scene.fails(Ask::Write { handle, offset, at_end: false, content: vec![1] });
    scene.ask(Ask::Read { handle, offset, bytes: 10 });
}

fn lock(owner: u64, kind: LockKind, first: u64, last: u64) -> Lock {
    Lock { owner, flock: false, kind, first, last }
}

/// The open descriptors that lead below a directory.
fn descriptors(below: &Path) -> usize {
    let entries = fs::read_dir("/proc/self/fd").unwrap();
    entries.filter(|entry| fs::read_link(entry.as_ref().unwrap().path()).is_ok_and(|to| to.starts_with(below))).count()
}

#[test]
fn end_of_a_member_closes_what_it_had() {
    let scene = Scene::new();
    let root = scene.root();
    assert_eq!(descriptors(scene.path()), 2);
    let (_, handle) = scene.created(root, b"a", libc::O_RDWR);
    let set = Ask::Lock { handle, lock: lock(1, LockKind::Exclusive, 0, 1) };
    scene.done(set.clone());
    scene.handle(Ask::OpenDirectory { node: root });
    scene.by(2, Ask::Directory(name(b"")));
    assert_eq!(scene.export.holds(MEMBER), (2, 2));
    // The root's; two nodes, two handles and a lock's; the other member's node.
    assert_eq!(descriptors(scene.path()), 7);
    scene.export.end_of(MEMBER);
    assert_eq!(scene.export.holds(MEMBER), (0, 0));
    assert_eq!(descriptors(scene.path()), 2);
    // The number of a handle never returns.
    let (_, next) = scene.created(scene.root(), b"a", libc::O_RDWR);
    assert!(next > handle);
    assert_eq!(scene.fails(set), libc::EBADF);
    scene.export.end();
    assert_eq!(descriptors(scene.path()), 0);
    assert_eq!(scene.fails(Ask::Directory(name(b""))), libc::ENOTCONN);
}

#[test]
fn calls_of_many_threads_leave_nothing() {
    let scene = Scene::new();
    let root = scene.root();
    std::thread::scope(|scope| {
        for thread in 0..8_u8 {
            let scene = &scene;
            scope.spawn(move || {
                for round in 0..100_u8 {
                    let called = [b'a' + (thread + round) % 3];
                    let (found, handle) = scene.created(root, &called, libc::O_RDWR);
                    scene.written(handle, u64::from(thread), &called);
                    scene.ask(Ask::Lock { handle, lock: lock(thread.into(), LockKind::Exclusive, 0, 9) });
                    scene.ask(unlink(root, &called));
                    scene.done(Ask::Close { handle });
                    scene.done(Ask::Forget(vec![(found.node, 1)]));
                }
            });
        }
    });
    assert_eq!(scene.export.holds(MEMBER), (1, 0));
    assert_eq!(descriptors(scene.path()), 2);
}

/// Needs root.
#[test]
fn files_belong_to_the_user_of_the_request() {
    let other = if rustix::process::geteuid().is_root() { 65_534 } else { 0 };
    let scene = Scene::new();
    let root = scene.root();
    let as_other = |ask| scene.export.answer(MEMBER, &Call { uid: other, gid: other, ask });
    if !rustix::process::geteuid().is_root() {
        assert_eq!(as_other(lookup(root, b"a")), Answer::Failed(libc::EPERM));
        return;
    }
    fs::set_permissions(scene.path(), fs::Permissions::from_mode(0o700)).unwrap();
    assert_eq!(as_other(create(root, b"a", libc::O_RDWR)), Answer::Failed(libc::EACCES));
    fs::set_permissions(scene.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let Answer::Created { found, handle, .. } = as_other(create(root, b"a", libc::O_RDWR)) else { panic!() };
    assert_eq!((found.attr.uid, found.attr.gid), (other, other));
    let owned = as_other(change(found.node, Change { uid: Some(0), ..Change::default() }));
    assert_eq!(owned, Answer::Failed(libc::EPERM));
    let Answer::Attributes { attr, .. } =
        as_other(change(found.node, Change { perm: Some(0o600), ..Change::default() }))
    else {
        panic!()
    };
    assert_eq!(attr.perm, 0o600);
    assert_eq!(as_other(Ask::Lock { handle, lock: lock(1, LockKind::Exclusive, 0, 1) }), Answer::Done);
    // The thread has its own ids again, and its groups.
    let (found, _) = scene.created(root, b"b", libc::O_RDWR);
    assert_eq!((found.attr.uid, found.attr.gid), (0, rustix::process::getegid().as_raw()));
    assert_eq!(as_other(Ask::Open { node: found.node, flags: libc::O_RDWR as u32 }), Answer::Failed(libc::EACCES));
    let impossible = scene.export.answer(MEMBER, &Call { uid: u32::MAX, gid: 0, ask: lookup(root, b"a") });
    assert_eq!(impossible, Answer::Failed(libc::EPERM));
}

/// More files than descriptors: those that were closed are opened again by their names.
#[test]
fn nodes_outlive_their_descriptors() {
    let scene = Scene::new();
    let root = scene.root();
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = open();
    let first =
        scene.found(Ask::MakeNode { parent: root, name: name(b"first"), mode: libc::S_IFREG | 0o600, device: 0 });
    let gone = scene.found(Ask::MakeNode { parent: root, name: name(b"gone"), mode: libc::S_IFREG | 0o600, device: 0 });
    for number in 0..5000 {
        let called = format!("f{number}");
        let mode = libc::S_IFREG | 0o600;
        scene.found(Ask::MakeNode { parent: root, name: name(called.as_bytes()), mode, device: 0 });
    }
    assert!(open() < before + 3000, "{} descriptors", open() - before);
    let handle = scene.handle(Ask::Open { node: first.node, flags: libc::O_RDWR as u32 });
    scene.done(Ask::Close { handle });
    assert_eq!(scene.attr(Ask::Attributes { node: first.node, handle: None }).ino, first.attr.ino);
    // Another file has the name by now.
    scene.done(unlink(root, b"gone"));
    scene.done(Ask::Rename { parent: root, name: name(b"f0"), new_parent: root, new_name: name(b"gone"), flags: 0 });
    assert_eq!(scene.fails(Ask::Attributes { node: gone.node, handle: None }), libc::ESTALE);
}
