//! A privileged agent that acts for several users: their rights, their files, their directories.

use super::*;

const ANN: Cred = Cred { uid: 40_001, gid: 40_001 };
const BOB: Cred = Cred { uid: 40_002, gid: 40_002 };

fn of(who: Cred, perm: u32) -> Meta {
    Meta { uid: who.uid, gid: who.gid, ..meta(perm) }
}

fn open_to_all(dir: &Path) {
    fs::set_permissions(dir, fs::Permissions::from_mode(0o777)).unwrap();
}

#[test]
fn operations_run_with_the_callers_ids() {
    if !root() {
        return;
    }
    let plain = Plain::new();
    let dir = plain.dir();
    open_to_all(&dir);
    let store = store_at(&dir);
    let temporary = path(".surgetank-tmp-1");
    // Staging also works with modes that exclude the owner.
    for perm in [0o640, 0o4755, 0o000] {
        let copy =
            store.stage_file(ANN, &temporary, &StorePath::root(), &source(b"hers"), &of(ANN, perm), no_gate()).unwrap();
        store.settle(ANN, std::slice::from_ref(&temporary)).unwrap();
        store.verify(ANN, &temporary, &copy, Verify::Reread, no_gate()).unwrap();
        store.publish(ANN, &temporary, &path("f"), &of(ANN, perm)).unwrap();
        let attr = store.stat(ANN, &path("f")).unwrap().attr;
        assert_eq!((attr.uid, attr.gid, attr.perm), (40_001, 40_001, perm));
    }
    // The store refuses operations for which the caller has no permission.
    let closed = store
        .stage_dir(ANN, &path(".surgetank-tmp-d"), &of(ANN, 0o700))
        .and_then(|_| store.publish(ANN, &path(".surgetank-tmp-d"), &path("closed"), &of(ANN, 0o700)));
    closed.unwrap();
    for denied in [
        errno(store.list(BOB, &path("closed"), false)),
        errno(store.stat(BOB, &path("closed/x"))),
        errno(store.may_write_dir(BOB, &path("closed"))),
        errno(store.open(BOB, &path("f"), false)),
        errno(store.stage_file(
            BOB,
            &path("closed/.surgetank-tmp-2"),
            &StorePath::root(),
            &source(b"x"),
            &of(BOB, 0o644),
            no_gate(),
        )),
    ] {
        assert_eq!(denied, libc::EACCES);
    }
    store.may_write_dir(ANN, &path("closed")).unwrap();
    // Root has given the file to another user: the agent does what the caller cannot.
    let copy =
        store.stage_file(ANN, &temporary, &StorePath::root(), &source(b"given"), &of(BOB, 0o4750), no_gate()).unwrap();
    store.verify(ANN, &temporary, &copy, Verify::Cache, no_gate()).unwrap();
    let attr = store.stat(ANN, &temporary).unwrap().attr;
    assert_eq!((attr.uid, attr.gid, attr.perm), (40_002, 40_002, 0o4750));
}

#[test]
fn file_of_other_owner_is_written_in_place_or_refused() {
    if !root() {
        return;
    }
    let plain = Plain::new();
    let dir = plain.dir();
    open_to_all(&dir);
    let store = store_at(&dir);
    let target = dir.join("shared");
    fs::write(&target, noise(100_000)).unwrap();
    std::os::unix::fs::chown(&target, Some(BOB.uid), Some(BOB.gid)).unwrap();
    fs::set_permissions(&target, fs::Permissions::from_mode(0o666)).unwrap();
    let before = fs::metadata(&target).unwrap().ino();
    let temporary = path(".surgetank-tmp-1");
    store.stage_file(ANN, &temporary, &StorePath::root(), &source(b"by ann"), &of(ANN, 0o600), no_gate()).unwrap();
    let identity = store.publish(ANN, &temporary, &path("shared"), &of(ANN, 0o600)).unwrap();
    let after = fs::metadata(&target).unwrap();
    assert_eq!((identity.ino, after.ino(), after.uid(), after.mode() & 0o777), (before, before, BOB.uid, 0o666));
    assert_eq!(fs::read(&target).unwrap(), b"by ann");
    assert_eq!(store.counters().overwrites, 1);

    fs::set_permissions(&target, fs::Permissions::from_mode(0o644)).unwrap();
    store.stage_file(ANN, &temporary, &StorePath::root(), &source(b"again"), &of(ANN, 0o600), no_gate()).unwrap();
    assert_eq!(errno(store.publish(ANN, &temporary, &path("shared"), &of(ANN, 0o600))), libc::EACCES);
    assert_eq!(fs::read(&target).unwrap(), b"by ann");
    assert_eq!(names(&store, "", true).len(), 2, "the verified copy is lost");
}

#[test]
fn planted_link_does_not_change_other_users_file() {
    if !root() {
        return;
    }
    let plain = Plain::new();
    let dir = plain.dir();
    open_to_all(&dir);
    let store = store_at(&dir);
    fs::write(dir.join("roots"), b"secret").unwrap();
    fs::set_permissions(dir.join("roots"), fs::Permissions::from_mode(0o600)).unwrap();
    fs::hard_link(dir.join("roots"), dir.join("f")).unwrap();
    assert_eq!(errno(store.set_meta(ANN, &path("f"), Kind::File, &of(ANN, 0o4777))), libc::EPERM);
    let attr = store.stat(me(), &path("roots")).unwrap().attr;
    assert_eq!((attr.uid, attr.perm), (0, 0o600));
}

#[test]
fn setgid_and_default_acl_of_directory_apply() {
    if !root() {
        return;
    }
    let plain = Plain::new();
    let dir = plain.dir();
    let store = store_at(&dir);
    std::os::unix::fs::chown(&dir, Some(ANN.uid), Some(BOB.gid)).unwrap();
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o2770)).unwrap();
    store
        .stage_file(ANN, &path(".surgetank-tmp-1"), &StorePath::root(), &source(b"x"), &of(ANN, 0o640), no_gate())
        .unwrap();
    store.stage_dir(ANN, &path(".surgetank-tmp-2"), &of(ANN, 0o750)).unwrap();
    assert_eq!(store.stat(ANN, &path(".surgetank-tmp-1")).unwrap().attr.gid, BOB.gid);
    store.publish(ANN, &path(".surgetank-tmp-2"), &path("d"), &of(ANN, 0o750)).unwrap();
    let attr = store.stat(ANN, &path("d")).unwrap().attr;
    assert_eq!((attr.gid, attr.perm), (BOB.gid, 0o2750), "setgid is not inherited");

    // user::rwx, group::rwx, mask r-x, other none, as the kernel encodes a default ACL.
    let acl: Vec<u8> =
        [(1_u16, 7_u16), (4, 7), (0x10, 5), (0x20, 0)].into_iter().fold(vec![2, 0, 0, 0], |mut acl, (tag, perm)| {
            acl.extend(tag.to_le_bytes());
            acl.extend(perm.to_le_bytes());
            acl.extend([0xff; 4]);
            acl
        });
    rustix::fs::setxattr(&dir, "system.posix_acl_default", &acl, rustix::fs::XattrFlags::empty()).unwrap();
    let with_xattr = Meta { xattrs: Some([(b"user.a"[..].into(), b"b"[..].into())].into()), ..of(ANN, 0o466) };
    store
        .stage_file(ANN, &path(".surgetank-tmp-3"), &StorePath::root(), &source(b"x"), &with_xattr, no_gate())
        .unwrap();
    let attr = store.stat(ANN, &path(".surgetank-tmp-3")).unwrap().attr;
    assert_eq!(attr.perm, 0o440, "the directory's default ACL limits group and others");
}

#[test]
fn access_acl_after_replacement_stays() {
    if !root() {
        return;
    }
    let plain = Plain::new();
    let dir = plain.dir();
    let store = store_at(&dir);
    deliver(&store, "f", b"old", &meta(0o660));
    let set = std::process::Command::new("setfacl").args(["-m", "u:40001:rw"]).arg(dir.join("f")).status();
    if !set.is_ok_and(|status| status.success()) {
        assert!(std::env::var_os("CI").is_none(), "setfacl is missing: scripts/setup test installs it");
        eprintln!("no setfacl: skipped");
        return;
    }
    deliver(&store, "f", b"new", &meta(0o660));
    assert_eq!(errno(store.open(ANN, &path("f"), true)), libc::EACCES, "the user cannot enter the root");
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o711)).unwrap();
    store.open(ANN, &path("f"), true).unwrap();
    assert_eq!(errno(store.open(BOB, &path("f"), true)), libc::EACCES);
}
