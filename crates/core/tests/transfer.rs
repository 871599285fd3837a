//! Trees that are copied from one directory to another.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;

use surgetank_core::transfer::{Claims, Outcome, Transfer, Wanted, walk};
use surgetank_store::posix::PosixStore;
use surgetank_store::{Cred, StorePath, Verify};

fn copied(who: Cred, from: &Path, to: &Path, spool: &Path) -> Outcome {
    let open = |dir: &Path| PosixStore::new(File::open(dir).unwrap().into(), String::new()).unwrap();
    let (source, target, claims) = (open(from), open(to), Claims::in_directory(spool).unwrap());
    let gate = |_| Ok(());
    let tree = StorePath(b"tree".to_vec());
    let walked = walk(&source, who, (&tree, &tree), &Wanted::default(), &gate).unwrap();
    assert!(walked.failed.is_empty());
    let arrived = |_: &_| ();
    let (source, target) = (&source, &target);
    Transfer { source, target, who, verify: Verify::Cache, spool, claims: &claims, gate: &gate, arrived: &arrived }
        .carry(&walked.entries)
}

/// Root may write anywhere, so under root the copy runs as another user.
#[test]
fn read_only_directory_of_an_earlier_copy_is_filled_again() {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let who = if uid == 0 { Cred { uid: 4242, gid: 4242 } } else { Cred { uid, gid } };
    let scratch = tempfile::tempdir().unwrap();
    let [from, to, spool] = ["from", "to", "spool"].map(|name| scratch.path().join(name));
    let tree = from.join("tree");
    for dir in [&from, &to, &spool, &tree] {
        fs::create_dir(dir).unwrap();
        chown(dir, Some(who.uid), Some(who.gid)).unwrap();
    }
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let read_only = |dir: &Path, perm| fs::set_permissions(dir, fs::Permissions::from_mode(perm)).unwrap();
    for (number, name) in ["first", "second"].into_iter().enumerate() {
        read_only(&tree, 0o755);
        fs::write(tree.join(name), name).unwrap();
        read_only(&tree, 0o555);
        let came = copied(who, &from, &to, &spool);
        assert!(came.failed.is_empty(), "{came:?}");
        assert_eq!((came.copied_files, came.present_files), (1, number as u64));
        let target = to.join("tree");
        assert_eq!(fs::read_to_string(target.join(name)).unwrap(), name);
        assert_eq!(fs::metadata(target).unwrap().permissions().mode() & 0o7777, 0o555);
    }
}
