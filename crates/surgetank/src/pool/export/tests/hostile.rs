//! Names, paths and numbers that a member must not use.

use std::os::unix::fs::symlink;

use super::*;

#[test]
fn hostile_names_are_refused() {
    let scene = Scene::new();
    let root = scene.root();
    let inside = scene.found(Ask::MakeDirectory { parent: root, name: name(b"d"), perm: 0o755 }).node;
    let long = vec![b'x'; 256];
    let hostile: [(&[u8], i32); 7] = [
        (b"", libc::EINVAL),
        (b".", libc::EINVAL),
        (b"..", libc::EINVAL),
        (b"a/b", libc::EINVAL),
        (b"/etc", libc::EINVAL),
        (b"a\0b", libc::EINVAL),
        (&long, libc::ENAMETOOLONG),
    ];
    for (called, error) in hostile {
        let (parent, n) = (inside, || name(called));
        let asks = [
            lookup(parent, called),
            create(parent, called, libc::O_RDWR),
            unlink(parent, called),
            Ask::SymbolicLink { parent, name: n(), target: name(b"x") },
            Ask::MakeNode { parent, name: n(), mode: libc::S_IFREG | 0o600, device: 0 },
            Ask::MakeDirectory { parent, name: n(), perm: 0o700 },
            Ask::RemoveDirectory { parent, name: n() },
            Ask::Rename { parent, name: n(), new_parent: root, new_name: name(b"x"), flags: 0 },
            Ask::Rename { parent: root, name: name(b"d"), new_parent: root, new_name: n(), flags: 0 },
            Ask::Link { node: inside, new_parent: root, new_name: n() },
        ];
        for ask in asks {
            assert_eq!(scene.fails(ask.clone()), error, "{ask:?}");
        }
    }
    let whiteout =
        Ask::Rename { parent: root, name: name(b"d"), new_parent: root, new_name: name(b"x"), flags: 1 << 2 };
    assert_eq!(scene.fails(whiteout), libc::EINVAL);
}

#[test]
fn paths_do_not_leave_the_root() {
    let scene = Scene::new();
    fs::create_dir_all(scene.path().join("d/e")).unwrap();
    symlink("/etc", scene.path().join("d/out")).unwrap();
    symlink("e", scene.path().join("d/in")).unwrap();
    fs::write(scene.path().join("d/f"), "").unwrap();
    scene.found(Ask::Directory(name(b"d/e")));
    for path in ["..", "d/..", "d/../d", "/", "/d", "d/", "d//e", ".", "d/./e", "d\0"] {
        assert_eq!(scene.fails(Ask::Directory(name(path.as_bytes()))), libc::EINVAL, "{path:?}");
    }
    for (path, error) in [
        ("d/out", libc::ENOTDIR),
        ("d/in", libc::ENOTDIR),
        ("d/out/ssl", libc::ELOOP),
        ("d/f", libc::ENOTDIR),
        ("d/none", libc::ENOENT),
    ] {
        let failed = scene.fails(Ask::Directory(name(path.as_bytes())));
        // (The kernel may say either of a link where a directory is wanted.)
        assert!(failed == error || (error == libc::ENOTDIR && failed == libc::ELOOP), "{path:?}: {failed}");
    }
    let many = vec![b"d".as_slice(); 3000].join(&b'/');
    assert_eq!(scene.fails(Ask::Directory(many.into())), libc::ENAMETOOLONG);
}

/// Needs root: it mounts.
#[test]
fn mount_below_the_root_is_refused() {
    let scene = Scene::new();
    let below = scene.path().join("m");
    fs::create_dir(&below).unwrap();
    let mounted = std::process::Command::new("mount").args(["-t", "tmpfs", "none"]).arg(&below).output();
    if !mounted.is_ok_and(|output| output.status.success()) {
        return;
    }
    let root = scene.root();
    let (by_name, by_path) = (scene.ask(lookup(root, b"m")), scene.ask(Ask::Directory(name(b"m"))));
    let unmounted = std::process::Command::new("umount").arg(&below).status().unwrap();
    assert!(unmounted.success());
    assert_eq!((by_name, by_path), (Answer::Failed(libc::EXDEV), Answer::Failed(libc::EXDEV)));
}

#[test]
fn nodes_and_handles_belong_to_one_member() {
    let scene = Scene::new();
    let root = scene.root();
    let (found, handle) = scene.created(root, b"a", libc::O_RDWR);
    let stale = Answer::Failed(libc::ESTALE);
    assert_eq!(scene.by(2, Ask::Attributes { node: found.node, handle: None }), stale);
    assert_eq!(scene.by(2, lookup(root, b"a")), stale);
    assert_eq!(scene.by(2, Ask::Open { node: found.node, flags: 0 }), stale);
    let bad = Answer::Failed(libc::EBADF);
    assert_eq!(scene.by(2, Ask::Read { handle, offset: 0, bytes: 1 }), bad);
    assert_eq!(scene.by(2, Ask::Close { handle }), bad);
    assert_eq!(scene.by(2, Ask::Attributes { node: root, handle: Some(handle) }), bad);
    scene.by(2, Ask::Forget(vec![(found.node, u64::MAX)]));
    assert_eq!(scene.export.holds(MEMBER), (2, 1));
    assert_eq!(scene.export.holds(2), (0, 0));
}
