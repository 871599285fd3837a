//! Locks of several owners and members.

use super::*;

#[test]
fn locks_exclude_owners_and_members() {
    use LockKind::{Exclusive, None, Shared};
    const END: u64 = i64::MAX as u64;
    let scene = Scene::new();
    let root = scene.root();
    let (found, handle) = scene.created(root, b"a", libc::O_RDWR);
    let second = scene.opened(found.node, libc::O_RDWR);
    let again = Answer::Failed(libc::EAGAIN);
    let set = |handle, lock| scene.ask(Ask::Lock { handle, lock });
    let test = |handle, lock| scene.ask(Ask::TestLock { handle, lock });
    assert_eq!(set(handle, lock(7, Exclusive, 10, 19)), Answer::Done);
    // One owner, another handle.
    assert_eq!(set(second, lock(7, Exclusive, 15, END)), Answer::Done);
    assert_eq!(set(handle, lock(8, Shared, 0, END)), again);
    assert_eq!(set(handle, lock(8, Shared, 0, 9)), Answer::Done);
    assert_eq!(test(second, lock(8, Shared, 12, 12)), Answer::Lock(lock(0, Exclusive, 10, END)));
    assert_eq!(test(second, lock(9, Exclusive, 0, 3)), Answer::Lock(lock(0, Shared, 0, 9)));
    assert_eq!(test(second, lock(7, Shared, 12, 12)), Answer::Lock(lock(7, None, 12, 12)));
    for wrong in [lock(7, Shared, 5, 4), lock(7, Shared, 0, u64::MAX), lock(7, Shared, 1 << 63, 1 << 63)] {
        assert_eq!(set(handle, wrong), Answer::Failed(libc::EINVAL));
        assert_eq!(test(handle, wrong), Answer::Failed(libc::EINVAL));
    }

    // Another member's owner may have the same number.
    let Answer::Found(theirs) = scene.by(2, Ask::Directory(name(b""))) else { panic!() };
    let Answer::Created { handle: other, .. } = scene.by(2, create(theirs.node, b"a", libc::O_RDWR)) else { panic!() };
    assert_eq!(scene.by(2, Ask::Lock { handle: other, lock: lock(7, Exclusive, 12, 12) }), again);

    assert_eq!(set(handle, lock(7, None, 12, 12)), Answer::Done);
    assert_eq!(scene.by(2, Ask::Lock { handle: other, lock: lock(7, Exclusive, 12, 12) }), Answer::Done);
    assert_eq!(set(handle, lock(7, Shared, 12, 12)), again);
    scene.export.end_of(2);
    assert_eq!(set(handle, lock(7, Shared, 12, 12)), Answer::Done);

    scene.done(Ask::Unlock { handle: second, owner: 7 });
    assert_eq!(set(handle, lock(8, Exclusive, 0, END)), Answer::Done);
    scene.done(Ask::Close { handle: second });
    assert_eq!(test(handle, lock(9, Shared, 0, 0)), Answer::Lock(lock(0, Exclusive, 0, END)));
    // The last handle of the file ends its owners' locks.
    scene.done(Ask::Close { handle });
    let third = scene.opened(found.node, libc::O_RDWR);
    assert_eq!(set(third, lock(9, Exclusive, 0, END)), Answer::Done);
}

#[test]
fn flock_ends_with_its_handle() {
    let scene = Scene::new();
    let (found, first) = scene.created(scene.root(), b"a", libc::O_RDWR);
    let second = scene.opened(found.node, libc::O_RDONLY);
    let set =
        |handle, kind| scene.ask(Ask::Lock { handle, lock: Lock { owner: 1, flock: true, kind, first: 0, last: 0 } });
    assert_eq!(set(first, LockKind::Exclusive), Answer::Done);
    assert_eq!(set(second, LockKind::Shared), Answer::Failed(libc::EAGAIN));
    assert_eq!(set(first, LockKind::None), Answer::Done);
    assert_eq!(set(second, LockKind::Exclusive), Answer::Done);
    assert_eq!(set(first, LockKind::Exclusive), Answer::Failed(libc::EAGAIN));
    scene.done(Ask::Close { handle: second });
    assert_eq!(set(first, LockKind::Exclusive), Answer::Done);
}
