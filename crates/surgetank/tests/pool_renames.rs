//! Renames between directories of two members.

use std::collections::BTreeSet;
use std::fs;

use rustix::io::Errno;

use crate::nodes::names;
use crate::pool::Pool;

/// The directories of the members 0 and 1.
const DIRS: [&str; 2] = ["a", "b"];

/// The kernel looks up both names while it holds the locks of both directories, and each look-up needs a lock that the other
/// program holds.
#[test]
fn renames_crosswise_do_not_wait_for_each_other() {
    const ROUNDS: usize = 60;
    let Some(mut pool) = Pool::start("crosswise", 0) else { return };
    for dir in DIRS {
        fs::create_dir(pool.store().join(dir)).unwrap();
    }
    (0..2).for_each(|_| pool.mount_one(&[]));
    for (member, dir) in DIRS.into_iter().enumerate() {
        fs::write(pool.member(member).join(dir).join("file"), dir).unwrap();
    }
    let meet = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        for member in 0..2 {
            let (root, meet) = (pool.member(member), &meet);
            scope.spawn(move || {
                let from = root.join(DIRS[member]).join("file");
                for round in 0..ROUNDS {
                    meet.wait();
                    // (A name that no kernel knows.)
                    let done = fs::rename(&from, root.join(DIRS[1 - member]).join(format!("new{round}")));
                    assert_eq!(done.map_err(|why| Errno::from_io_error(&why).unwrap()), Err(Errno::XDEV));
                }
            });
        }
    });
    pool.end();
    for dir in DIRS {
        assert_eq!(names(&pool.store().join(dir)), BTreeSet::from(["file".to_owned()]));
        assert_eq!(fs::read_to_string(pool.store().join(dir).join("file")).unwrap(), dir);
    }
}
