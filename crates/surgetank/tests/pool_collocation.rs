//! Files of a group are on one member (`collocate`, WOSS's `DP=collocation|GROUP`).

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::XattrFlags;
use serde_json::{Value, json};

use crate::pool::Pool;
use crate::pool_replicas::{bytes, lose_machine, of_member, read};
use crate::scene::{MIB, eventually};

/// Nothing is drained meanwhile.
const IDLE: [&str; 4] = ["--quiet-period", "1h", "--pool-lease", "6s"];

fn hint(path: &Path, name: &str, value: &str) {
    let name = format!("user.surgetank.hint.{name}");
    rustix::fs::setxattr(path, name.as_str(), value.as_bytes(), XattrFlags::empty()).unwrap();
}

/// What `surgetank locate` says of these files.
fn located(pool: &Pool, number: usize, names: &[&str]) -> Vec<Value> {
    let paths = names.iter().map(|name| pool.member(number).join(name));
    let output = pool.command_at(number, "locate", &["--json"]).args(paths).output().unwrap();
    serde_json::from_slice(&output.stdout).unwrap_or_else(|why| panic!("{why}: {output:?}"))
}

/// The member that is the home of all of these, as all members say; by its place.
fn together(pool: &Pool, names: &[&str]) -> usize {
    let mut homes = BTreeSet::new();
    eventually("the files are at one member", || {
        let found = (0..pool.count()).flat_map(|number| located(pool, number, names));
        homes = found.map(|one| one["home"].as_u64().unwrap_or_else(|| panic!("{one}"))).collect();
        homes.len() == 1
    });
    homes.first().map_or(0, |home| *home as usize - 1)
}

/// The files get there.
fn get_to(pool: &Pool, names: &[&str], number: usize) {
    eventually(&format!("{names:?} get to member {number}"), || {
        located(pool, 0, names).iter().all(|one| one["home"] == json!(number + 1))
    });
    assert_eq!(together(pool, names), number);
}

/// Bytes on the network, of all members.
fn moved(pool: &Pool) -> u64 {
    let pairs = pool.status(0)["traffic"].clone();
    pairs.as_array().unwrap().iter().map(|pair| pair["bytes"].as_u64().unwrap()).sum()
}

/// Bytes on the tier of a member.
fn used(pool: &Pool, number: usize) -> u64 {
    let status = of_member(pool, number);
    let tiers = status["tiers"].as_array().unwrap_or_else(|| panic!("{status}"));
    tiers.iter().map(|tier| tier["cap_bytes"].as_u64().unwrap() - tier["free_bytes"].as_u64().unwrap()).sum()
}

/// A group whose files go to this member.
fn group_of(pool: &Pool, wanted: usize) -> String {
    let dir = pool.member(0).join("groups");
    fs::create_dir_all(&dir).unwrap();
    for number in 0..100 {
        let group = format!("group {number}");
        let names: Vec<String> = (0..pool.count()).map(|by| format!("groups/{number}-{by}")).collect();
        for (by, name) in names.iter().enumerate() {
            let path = pool.member(by).join(name);
            let made = File::create(&path).unwrap();
            hint(&path, "DP", &format!("collocation|{group}"));
            drop(made);
        }
        if together(pool, &names.iter().map(String::as_str).collect::<Vec<_>>()) == wanted {
            return group;
        }
    }
    panic!("no group goes to member {wanted}");
}

/// Table 4 of WOSS: the parts of a reduce cross the network once, and the reducer reads none of them from elsewhere.
#[test]
fn parts_of_a_reduce_are_where_the_reducer_runs() {
    const PART: usize = 4 * MIB as usize;
    let Some(mut pool) = Pool::start("collocation", 0) else { return };
    (0..3).for_each(|_| pool.mount_one(&IDLE));
    for at in 0..3 {
        let dir = format!("d{at}");
        let group = group_of(&pool, at);
        fs::create_dir(pool.member(0).join(&dir)).unwrap();
        hint(&pool.member(0).join(&dir), "DP", &format!("collocation|{group}"));
        let names: Vec<String> = (0..3).map(|number| format!("{dir}/part{number}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let (before, room) = (moved(&pool), (0..3).map(|number| used(&pool, number)).collect::<Vec<_>>());
        for (number, name) in names.iter().enumerate() {
            fs::write(pool.member(number).join(name), bytes(PART, number as u8)).unwrap();
        }
        assert_eq!(together(&pool, &names), at, "the group of a file decides");
        eventually("each has one copy", || {
            let copies = located(&pool, 1, &names).into_iter().map(|one| one["copies"].clone());
            let mut copies = copies.map(|copies| copies.as_array().unwrap().clone());
            copies.all(|copies| copies.len() == 1 && copies[0]["member"] == json!(at + 1))
        });
        let elsewhere = 2 * PART as u64;
        let sent = moved(&pool) - before;
        assert!((elsewhere..elsewhere * 11 / 10).contains(&sent), "{sent} bytes for {elsewhere} that were elsewhere");
        let before = moved(&pool);
        for (number, name) in names.iter().enumerate() {
            assert!(fs::read(pool.member(at).join(name)).unwrap() == bytes(PART, number as u8), "{name}");
        }
        let came = moved(&pool) - before;
        assert!(came < MIB, "{came} bytes for {} that are here", 3 * PART);
        // What moved takes no room where it was.
        eventually("the room is free again", || {
            let more = |number: usize| used(&pool, number).saturating_sub(room[number]);
            (0..3).all(|number| (number == at) == (more(number) >= 2 * PART as u64))
                && more(at) <= 3 * PART as u64 + MIB
        });
        // Others read the same.
        for number in 0..3 {
            for (part, name) in names.iter().enumerate() {
                let path = pool.member(number).join(name);
                assert!(fs::read(&path).unwrap() == bytes(PART, part as u8), "{name} at member {number}");
                assert_eq!(fs::metadata(&path).unwrap().blocks(), PART as u64 / 512, "{name} at member {number}");
            }
        }
    }
    pool.end();
    for at in 0..3 {
        for number in 0..3 {
            let stored = read(pool.store().join(format!("d{at}/part{number}")));
            assert!(stored == Some(bytes(PART, number as u8)), "d{at}/part{number} in the store");
        }
    }
}

/// Files that a program changes after they moved are as it made them, at every member and in the store.
#[test]
fn files_that_moved_are_changed_by_all() {
    let Some(mut pool) = Pool::start("collocation-changes", 0) else { return };
    (0..3).for_each(|_| pool.mount_one(&IDLE));
    let mut expected = BTreeMap::new();
    for at in 0..3 {
        let group = group_of(&pool, at);
        let dir = format!("d{at}");
        fs::create_dir(pool.member(1).join(&dir)).unwrap();
        hint(&pool.member(1).join(&dir), "collocate", &group);
        for by in 0..3 {
            let over = pool.member(by).to_owned();
            let name = |what: &str| format!("{dir}/{what}{by}");
            for what in ["written", "appended", "cut", "renamed", "replaced", "removed", "open"] {
                fs::write(over.join(name(what)), bytes(70_000, by as u8)).unwrap();
            }
            let names: Vec<String> = ["written", "appended", "cut", "renamed", "replaced", "removed"].map(name).into();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            get_to(&pool, &names, at);
            let other = pool.member((by + 1) % 3).to_owned();
            fs::write(other.join(name("written")), bytes(1000, 7)).unwrap();
            expected.insert(name("written"), bytes(1000, 7));
            let mut appends = OpenOptions::new().append(true).open(other.join(name("appended"))).unwrap();
            appends.write_all(b"more").unwrap();
            drop(appends);
            expected.insert(name("appended"), [&bytes(70_000, by as u8)[..], b"more"].concat());
            OpenOptions::new().write(true).open(over.join(name("cut"))).unwrap().set_len(100).unwrap();
            expected.insert(name("cut"), bytes(70_000, by as u8)[..100].to_vec());
            fs::rename(other.join(name("renamed")), other.join(name("replaced"))).unwrap();
            expected.insert(name("replaced"), bytes(70_000, by as u8));
            let mut open = File::open(other.join(name("removed"))).unwrap();
            fs::remove_file(over.join(name("removed"))).unwrap();
            let mut content = Vec::new();
            open.read_to_end(&mut content).unwrap();
            assert!(content == bytes(70_000, by as u8), "a removed file that is open");
            expected.insert(name("open"), bytes(70_000, by as u8));
        }
    }
    for number in 0..3 {
        for (name, content) in &expected {
            assert!(fs::read(pool.member(number).join(name)).unwrap() == *content, "{name} at member {number}");
        }
    }
    pool.end();
    for (name, content) in &expected {
        assert!(read(pool.store().join(name)).as_ref() == Some(content), "{name} in the store");
    }
    for at in 0..3 {
        let names = crate::nodes::names(&pool.store().join(format!("d{at}")));
        assert_eq!(names.len(), 15, "{names:?}");
    }
}

/// Hints on files that are there, in the store already or not, by attribute, by the verb and by a rule; and one that takes it back.
#[test]
fn existing_files_go_to_their_group() {
    let Some(mut pool) = Pool::start("collocation-later", 0) else { return };
    (0..3).for_each(|_| pool.mount_one(&["--rule", "*.keep-here=copy"]));
    let group = group_of(&pool, 2);
    fs::create_dir(pool.member(0).join("d")).unwrap();
    let content = bytes(3 * MIB as usize, 3);
    for (number, name) in ["d/of0", "d/of1"].into_iter().enumerate() {
        fs::write(pool.member(number).join(name), &content).unwrap();
    }
    let store = pool.store();
    let in_store = |name: &str| read(store.join(name)).is_some_and(|there| there == content);
    eventually("both are in the store", || in_store("d/of0") && in_store("d/of1"));
    for number in 0..2 {
        hint(&pool.member(1).join(format!("d/of{number}")), "DP", &format!("collocation|{group}"));
    }
    get_to(&pool, &["d/of0", "d/of1"], 2);
    let before = moved(&pool);
    assert!(fs::read(pool.member(2).join("d/of0")).unwrap() == content);
    assert!(moved(&pool) - before < MIB, "it is here");
    // Where it goes next is said by name.
    let (next, name) = (group_of(&pool, 1), pool.member(0).join("d/of0"));
    let set = pool.command_at(0, "hint", &[&format!("collocate={next}")]).arg(&name).output().unwrap();
    assert!(set.status.success(), "{set:?}");
    get_to(&pool, &["d/of0"], 1);
    let why = pool.command_at(0, "why", &[]).arg(&name).output().unwrap();
    let why = String::from_utf8_lossy(&why.stdout).into_owned();
    assert!(why.contains(&format!("collocate={next} of the file\n")), "{why}");
    // An open file stays until it is closed.
    let open = File::open(pool.member(0).join("d/of1")).unwrap();
    hint(&pool.member(0).join("d/of1"), "collocate", &next);
    std::thread::sleep(std::time::Duration::from_millis(500));
    assert_eq!(located(&pool, 0, &["d/of1"])[0]["home"], json!(3));
    drop(open);
    get_to(&pool, &["d/of1"], 1);
    // The nearest hint says that a file stays where it was made.
    hint(&pool.member(0).join("d"), "collocate", &group);
    fs::create_dir(pool.member(0).join("d/local")).unwrap();
    hint(&pool.member(0).join("d/local"), "DP", "local");
    fs::write(pool.member(1).join("d/local/x"), "x").unwrap();
    fs::write(pool.member(1).join("d/y"), "y").unwrap();
    get_to(&pool, &["d/y"], 2);
    get_to(&pool, &["d/local/x"], 1);
    pool.end();
    assert!(in_store("d/of0") && in_store("d/of1"));
}

/// A file that moved comes back under its last name when the owner of the name is lost, and from its owner's copy when its home is.
#[test]
fn files_that_moved_survive_the_loss_of_a_machine() {
    for lost in ["owner", "home"] {
        let Some(mut pool) = Pool::start(&format!("collocation-{lost}"), 0) else { return };
        ["a", "b"].iter().for_each(|dir| fs::create_dir(pool.store().join(dir)).unwrap());
        let replicas = if lost == "home" { "2" } else { "1" };
        (0..3).for_each(|_| pool.mount_one(&[&IDLE[..], &["--replicas", replicas]].concat()));
        let group = group_of(&pool, if lost == "owner" { 0 } else { 2 });
        // (The last machine owns it, or the first one does.)
        let owner = if lost == "owner" { 2 } else { 0 };
        fs::write(pool.member(owner).join("a/claims"), "").unwrap();
        hint(&pool.member(owner).join("a"), "collocate", &group);
        let content = bytes(200_000, 5);
        for number in 0..3 {
            let over = pool.member(number);
            fs::write(over.join(format!("a/part{number}.tmp")), &content).unwrap();
        }
        let homes_are =
            |names: &[&str], home: u64| located(&pool, 1, names).iter().all(|one| one["home"] == json!(home));
        let parts = ["a/part0.tmp", "a/part1.tmp", "a/part2.tmp"];
        eventually("they are with their group", || homes_are(&parts, if lost == "owner" { 1 } else { 3 }));
        // (By another member than that which has made it: the home learns it. Without a move it would not.)
        for (number, by) in [(0, 0), (1, 0), (2, 1)] {
            let over = pool.member(by);
            fs::rename(over.join(format!("a/part{number}.tmp")), over.join(format!("a/part{number}"))).unwrap();
        }
        if lost == "home" {
            eventually("all files have copies", || of_member(&pool, owner)["single_copy_files"] == 0);
        }
        lose_machine(&mut pool);
        for number in 0..3 {
            for over in 0..2 {
                let path = pool.member(over).join(format!("a/part{number}"));
                eventually(&format!("{} is back", path.display()), || {
                    fs::read(&path).is_ok_and(|there| there == content)
                });
                assert!(!pool.member(over).join(format!("a/part{number}.tmp")).exists());
            }
        }
        while pool.count() > 0 {
            let ended = pool.try_end_last();
            eprintln!("{}", String::from_utf8_lossy(&ended.stderr));
        }
        for number in 0..3 {
            assert!(read(pool.store().join(format!("a/part{number}"))) == Some(content.clone()), "in the store");
        }
    }
}
