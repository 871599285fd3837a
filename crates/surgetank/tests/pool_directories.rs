//! Renames of directories that the store had before the pool.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, Mode, OFlags, RenameFlags, openat, renameat_with};
use rustix::io::Errno;
use rustix::process::{Signal, kill_process};

use crate::nodes::names;
use crate::pool::Pool;

/// A pool over a store that has this tree: directories end with a slash. Member 0 has claimed its root.
fn pool_over(name: &str, members: usize, tree: &[&str]) -> Option<Pool> {
    let mut pool = Pool::start(name, 0)?;
    for path in tree {
        make(&pool.store(), path);
    }
    (0..members).for_each(|_| pool.mount_one(&[]));
    fs::write(pool.member(0).join("claims"), "").unwrap();
    fs::remove_file(pool.member(0).join("claims")).unwrap();
    Some(pool)
}

fn make(store: &Path, path: &str) {
    if let Some(dir) = path.strip_suffix('/') {
        fs::create_dir_all(store.join(dir)).unwrap();
    } else {
        fs::create_dir_all(store.join(path).parent().unwrap()).unwrap();
        fs::write(store.join(path), path).unwrap();
    }
}

/// All files below a directory, with their content; directories without any as a path that ends with a slash.
fn tree(root: &Path) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    collect(root, "", &mut found);
    found
}

fn collect(root: &Path, below: &str, found: &mut BTreeMap<String, String>) {
    let all = names(&root.join(below));
    if all.is_empty() && !below.is_empty() {
        found.insert(format!("{below}/"), String::new());
    }
    for name in all {
        let path = if below.is_empty() { name } else { format!("{below}/{name}") };
        if root.join(&path).is_dir() {
            collect(root, &path, found);
        } else {
            found.insert(path.clone(), fs::read_to_string(root.join(&path)).unwrap());
        }
    }
}

fn expected(all: &[(&str, &str)]) -> BTreeMap<String, String> {
    all.iter().map(|(path, content)| ((*path).to_owned(), (*content).to_owned())).collect()
}

fn errno(done: std::io::Result<()>) -> Result<(), Errno> {
    done.map_err(|why| Errno::from_io_error(&why).unwrap())
}

/// By each member. The others have seen the directory before, have a directory below open, and a file.
#[test]
fn directory_of_the_store_is_renamed_for_all() {
    let sets = ["set0/", "set1/", "set2/"].map(|set| [set, "one"].concat());
    let deep = ["set0/", "set1/", "set2/"].map(|set| [set, "a/b/two"].concat());
    let all: Vec<&str> = sets.iter().chain(&deep).map(String::as_str).collect();
    let Some(mut pool) = pool_over("dirs-all", 3, &all) else { return };
    let mut wanted = BTreeMap::new();
    for by in 0..3 {
        let (from, to) = (format!("set{by}"), format!("moved{by}"));
        let (root, context) = (pool.member(by), format!("by member {by}"));
        let before = fs::metadata(root.join(&from).join("a")).unwrap();
        let others: Vec<_> = (0..3)
            .map(|member| {
                let root = pool.member(member);
                assert_eq!(tree(&root.join(&from)).len(), 2);
                let dir = File::open(root.join(&from).join("a")).unwrap();
                (root, dir, File::open(root.join(&from).join("a/b/two")).unwrap())
            })
            .collect();
        // (What is not in the store yet moves with it.)
        let fresh = Path::new(&from).join("a/fresh");
        if by == 0 {
            fs::write(root.join(&fresh), "fresh").unwrap();
        }
        fs::rename(root.join(&from), root.join(&to)).unwrap_or_else(|why| panic!("{context}: {why}"));
        for (member, (root, dir, file)) in others.iter().enumerate() {
            let context = format!("{context}, at {member}");
            assert_eq!(errno(fs::metadata(root.join(&from)).map(drop)), Err(Errno::NOENT), "{context}");
            assert_eq!(fs::read_to_string(root.join(&to).join("a/b/two")).unwrap(), format!("set{by}/a/b/two"));
            assert_eq!(fs::metadata(root.join(&to).join("a")).unwrap().ino(), before.ino(), "{context}");
            assert_eq!(std::io::read_to_string(file).unwrap(), format!("set{by}/a/b/two"), "{context}");
            // A working directory, as it was.
            let flags = OFlags::CREATE | OFlags::WRONLY;
            let made = openat(dir, format!("b/by{member}"), flags, Mode::from(0o644))
                .unwrap_or_else(|why| panic!("{context}: {why}"));
            File::from(made).write_all(b"made").unwrap();
            let name = format!("{to}/a/b/by{member}");
            assert_eq!(fs::read_to_string(pool.member(2 - member).join(&name)).unwrap(), "made", "{context}");
            wanted.insert(name, "made".to_owned());
        }
        // The old name is free for another one.
        fs::create_dir(root.join(&from)).unwrap();
        fs::write(root.join(&from).join("new"), "new").unwrap();
        for member in 0..3 {
            assert_eq!(tree(&pool.member(member).join(&from)), expected(&[("new", "new")]), "{context}, at {member}");
        }
        wanted.insert(format!("{from}/new"), "new".to_owned());
        wanted.insert(format!("{to}/one"), format!("set{by}/one"));
        wanted.insert(format!("{to}/a/b/two"), format!("set{by}/a/b/two"));
        if by == 0 {
            wanted.insert(format!("{to}/a/fresh"), "fresh".to_owned());
        }
        for member in 0..3 {
            assert_eq!(tree(pool.member(member)).get(&format!("{to}/one")), wanted.get(&format!("{to}/one")));
        }
    }
    pool.end();
    assert_eq!(tree(&pool.store()), wanted);
}

/// Renamed again, below another one, and out of one: the directories below have no owner by their new paths.
#[test]
fn renamed_directories_are_renamed_again() {
    let Some(mut pool) = pool_over("dirs-again", 2, &["set/a/b/two", "set/c/", "other/x"]) else { return };
    let (here, there) = (pool.member(0), pool.member(1));
    fs::rename(here.join("set"), here.join("first")).unwrap();
    fs::rename(there.join("first"), there.join("second")).unwrap();
    // Out of a directory that was renamed, into the root, which is claimed by its path.
    fs::rename(here.join("second/a/b"), here.join("b")).unwrap();
    assert_eq!(fs::read_to_string(there.join("b/two")).unwrap(), "set/a/b/two");
    fs::write(there.join("b/three"), "three").unwrap();
    // Into it.
    fs::rename(there.join("other"), there.join("second/a/other")).unwrap();
    fs::write(here.join("second/a/other/y"), "y").unwrap();
    // Over an empty one, and over a full one.
    fs::rename(here.join("second/a"), here.join("second/c")).unwrap();
    assert_eq!(errno(fs::rename(there.join("b"), there.join("second"))), Err(Errno::NOTEMPTY));
    let wanted = expected(&[
        ("b/three", "three"),
        ("b/two", "set/a/b/two"),
        ("second/c/other/x", "other/x"),
        ("second/c/other/y", "y"),
    ]);
    for root in [here, there] {
        assert_eq!(tree(root), wanted);
    }
    pool.end();
    assert_eq!(tree(&pool.store()), wanted);
}

/// At once one after the other, with many directories below. Another member has them open.
#[test]
fn directories_below_are_found_after_many_renames() {
    const BELOW: usize = 60;
    let all: Vec<String> = (0..BELOW).map(|number| format!("set/{number}/a/in")).collect();
    let Some(mut pool) = pool_over("dirs-many", 2, &all.iter().map(String::as_str).collect::<Vec<_>>()) else { return };
    let (here, there) = (pool.member(0), pool.member(1));
    let open: Vec<File> = (0..BELOW).map(|number| File::open(there.join(format!("set/{number}/a"))).unwrap()).collect();
    let names = ["set", "one", "two", "three", "four"];
    for name in names.windows(2) {
        fs::rename(here.join(name[0]), here.join(name[1])).unwrap();
    }
    fs::create_dir_all(here.join("set/0/a")).unwrap();
    for (number, dir) in open.iter().enumerate() {
        let made = openat(dir, "made", OFlags::CREATE | OFlags::WRONLY, Mode::from(0o644)).unwrap();
        File::from(made).write_all(number.to_string().as_bytes()).unwrap();
    }
    let mut wanted = expected(&[("set/0/a/", "")]);
    for number in 0..BELOW {
        wanted.insert(format!("four/{number}/a/in"), format!("set/{number}/a/in"));
        wanted.insert(format!("four/{number}/a/made"), number.to_string());
    }
    assert_eq!((tree(here), tree(there)), (wanted.clone(), wanted.clone()));
    drop(open);
    pool.end();
    assert_eq!(tree(&pool.store()), wanted);
}

#[test]
fn directories_of_the_store_are_exchanged_and_replaced() {
    let Some(mut pool) = pool_over("dirs-exchanged", 2, &["one/a/in", "two/b/in", "three/c/in", "empty/", "over/"])
    else {
        return;
    };
    let (here, there) = (pool.member(0), pool.member(1));
    assert_eq!((tree(here).len(), tree(there).len()), (5, 5));
    renameat_with(CWD, there.join("one"), CWD, there.join("two"), RenameFlags::EXCHANGE).unwrap();
    assert_eq!(fs::read_to_string(here.join("two/a/in")).unwrap(), "one/a/in");
    assert_eq!(fs::read_to_string(there.join("one/b/in")).unwrap(), "two/b/in");
    // (Claimed by the other member, and empty.)
    fs::write(there.join("over/gone"), "").unwrap();
    fs::remove_file(there.join("over/gone")).unwrap();
    fs::rename(here.join("two"), here.join("over")).unwrap();
    let refused = renameat_with(CWD, here.join("over"), CWD, here.join("empty"), RenameFlags::NOREPLACE);
    assert_eq!(refused, Err(Errno::EXIST));
    fs::create_dir(here.join("made")).unwrap();
    fs::rename(there.join("made"), there.join("empty")).unwrap();
    // A directory that the other member has open changes its place with a file.
    let dir = File::open(there.join("three/c")).unwrap();
    fs::write(here.join("file"), "file").unwrap();
    renameat_with(CWD, here.join("file"), CWD, here.join("three"), RenameFlags::EXCHANGE).unwrap();
    let made = openat(&dir, "made", OFlags::CREATE | OFlags::WRONLY, Mode::from(0o644)).unwrap();
    File::from(made).write_all(b"made").unwrap();
    drop(dir);
    let wanted = expected(&[
        ("empty/", ""),
        ("file/c/in", "three/c/in"),
        ("file/c/made", "made"),
        ("one/b/in", "two/b/in"),
        ("over/a/in", "one/a/in"),
        ("three", "file"),
    ]);
    for root in [here, there] {
        assert_eq!(tree(root), wanted);
    }
    pool.end();
    assert_eq!(tree(&pool.store()), wanted);
}

/// A member that has changed a directory below decides about it by its path: mv copies then.
#[test]
fn directory_with_another_members_changes_below_is_copied() {
    let Some(mut pool) = pool_over("dirs-changed", 2, &["set/a/in", "set/b/in", "set/c/in"]) else { return };
    let (here, there) = (pool.member(0), pool.member(1));
    fs::write(there.join("set/b/more"), "more").unwrap();
    for by in [here, there] {
        assert_eq!(errno(fs::rename(by.join("set"), by.join("moved"))), Err(Errno::XDEV));
    }
    // Nothing has changed.
    let mut wanted = expected(&[
        ("set/a/in", "set/a/in"),
        ("set/b/in", "set/b/in"),
        ("set/b/more", "more"),
        ("set/c/in", "set/c/in"),
    ]);
    assert_eq!((tree(here), tree(there)), (wanted.clone(), wanted.clone()));
    fs::write(there.join("set/c/late"), "late").unwrap();
    wanted.insert("set/c/late".to_owned(), "late".to_owned());
    let moved = Command::new("mv").args([there.join("set"), there.join("moved")]).output().unwrap();
    assert!(moved.status.success(), "{moved:?}");
    let wanted: BTreeMap<String, String> =
        wanted.into_iter().map(|(path, content)| (path.replacen("set", "moved", 1), content)).collect();
    assert_eq!((tree(here), tree(there)), (wanted.clone(), wanted.clone()));
    pool.end();
    assert_eq!(tree(&pool.store()), wanted);
}

/// Programs of two members rename directories of the store while agents are killed.
#[test]
fn killed_agents_leave_each_directory_one_name() {
    const SETS: usize = 300;
    let seconds = std::env::var("SURGETANK_RENAME_SECONDS").map_or(6, |text| text.parse().unwrap());
    let sets = |member: usize| (0..SETS).map(move |set| format!("x/set{member}-{set}/a/in"));
    let all: Vec<String> = sets(0).chain(sets(1)).chain(["y/".to_owned()]).collect();
    let Some(mut pool) = pool_over("dirs-killed", 2, &all.iter().map(String::as_str).collect::<Vec<_>>()) else {
        return;
    };
    // (Otherwise each member may own one of both.)
    for dir in ["x", "y"] {
        fs::write(pool.member(0).join(dir).join("claims"), "").unwrap();
        fs::remove_file(pool.member(0).join(dir).join("claims")).unwrap();
    }
    let until = Instant::now() + Duration::from_secs(seconds);
    let (turns, kills) = std::thread::scope(|scope| {
        let movers = [0, 1].map(|member| {
            let root = pool.member(member);
            scope.spawn(move || {
                (0..SETS).take_while(|_| Instant::now() < until).map(|turn| move_set(root, member, turn)).count()
            })
        });
        let mut kills = 0;
        while Instant::now() < until {
            std::thread::sleep(Duration::from_millis(fastrand::u64(200..1500)));
            kill_process(pool.agent(kills % 2), Signal::KILL).unwrap();
            kills += 1;
        }
        (movers.map(|mover| mover.join().unwrap()), kills)
    });
    eprintln!("{turns:?} directories renamed, {kills} agents killed");
    assert!(turns.iter().all(|turns| *turns > 4) && kills > 2, "nothing was shown");
    let mut wanted = BTreeMap::new();
    for (member, turns) in turns.into_iter().enumerate() {
        for (set, path) in sets(member).enumerate() {
            if set < turns {
                wanted.insert(format!("x/back{member}-{set}/a/in"), path);
                wanted.insert(format!("x/back{member}-{set}/a/new"), format!("{member} {set}"));
            } else {
                wanted.insert(path.clone(), path);
            }
        }
    }
    wanted.insert("y/".to_owned(), String::new());
    for member in 0..2 {
        assert!(tree(pool.member(member)) == wanted, "{:#?}", differences(&tree(pool.member(member)), &wanted));
    }
    pool.end();
    assert!(tree(&pool.store()) == wanted, "{:#?}", differences(&tree(&pool.store()), &wanted));
}

/// To another directory, with a new file, and back.
fn move_set(root: &Path, member: usize, turn: usize) {
    let context = |step: &str| format!("turn {turn} of member {member}, {step}");
    let (from, to, back) = (
        root.join(format!("x/set{member}-{turn}")),
        root.join(format!("y/set{member}-{turn}")),
        root.join(format!("x/back{member}-{turn}")),
    );
    fs::rename(&from, &to).unwrap_or_else(|why| panic!("{}: {why}", context("there")));
    assert!(!from.exists(), "{}", context("the old name"));
    fs::write(to.join("a/new"), format!("{member} {turn}"))
        .unwrap_or_else(|why| panic!("{}: {why}", context("a file")));
    fs::rename(&to, &back).unwrap_or_else(|why| panic!("{}: {why}", context("back")));
    assert_eq!(tree(&back).len(), 2, "{}", context("what is in it"));
}

fn differences<'a>(
    found: &'a BTreeMap<String, String>,
    wanted: &'a BTreeMap<String, String>,
) -> Vec<(&'a String, Option<&'a String>, Option<&'a String>)> {
    let paths = found.keys().chain(wanted.keys()).filter(|path| found.get(*path) != wanted.get(*path));
    paths.map(|path| (path, found.get(path), wanted.get(path))).collect()
}
