//! Hints that are asked at operations, in a pool: the owner of the directory acts, wherever programs and content are.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::XattrFlags;

use crate::pool::Pool;
use crate::pool_replicas::bytes;

fn hint(path: &Path, name: &str, value: &str) {
    let name = format!("user.surgetank.hint.{name}");
    rustix::fs::setxattr(path, name.as_str(), value.as_bytes(), XattrFlags::empty()).unwrap();
}

/// What all members say of these files: nothing else is there under such a name.
fn are(pool: &Pool, dir: &str, expected: &[(&str, &[u8])]) {
    for number in 0..pool.count() {
        let dir = pool.member(number).join(dir);
        for (name, content) in expected {
            let found = fs::read(dir.join(name)).unwrap_or_else(|why| panic!("{name} at member {number}: {why}"));
            assert!(found == *content, "{name} at member {number}: {} bytes, {:?}", found.len(), found.first());
        }
        let mut names: Vec<String> =
            fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        assert_eq!(names, expected.iter().map(|(name, _)| (*name).to_owned()).collect::<Vec<_>>(), "at {number}");
    }
}

#[test]
fn earlier_contents_are_kept_whichever_member_writes() {
    const SIZE: usize = 3 << 20;
    let Some(mut pool) = Pool::start("pool-versions", 0) else { return };
    (0..3).for_each(|_| pool.mount_one(&["--quiet-period", "1h", "--pool-lease", "6s"]));
    let at = |pool: &Pool, number: usize, name: &str| pool.member(number).join("d").join(name);
    fs::create_dir(pool.member(0).join("d")).unwrap();
    hint(&pool.member(0).join("d"), "versions", "3");
    // Written at the owner, at another member (which has the content from then on), and by third ones.
    let contents: Vec<Vec<u8>> = (0..6).map(|number| bytes(SIZE + number, number as u8)).collect();
    for (number, by) in [1, 2, 0, 1].into_iter().enumerate() {
        fs::write(at(&pool, by, "f"), &contents[number]).unwrap();
        let kept = (1..=number.min(2)).map(|back| (format!("f.~{back}~"), &contents[number - back]));
        let kept: Vec<(String, &Vec<u8>)> = kept.collect();
        let mut expected: Vec<(&str, &[u8])> = vec![("f", &contents[number])];
        expected.extend(kept.iter().map(|(name, content)| (name.as_str(), content.as_slice())));
        are(&pool, "d", &expected);
    }
    // A part is changed; another file gets the name, from another directory.
    let mut file = OpenOptions::new().write(true).open(at(&pool, 2, "f")).unwrap();
    file.seek(SeekFrom::Start(7)).unwrap();
    file.write_all(b"changed").unwrap();
    drop(file);
    let mut changed = contents[3].clone();
    changed[7..14].copy_from_slice(b"changed");
    are(&pool, "d", &[("f", &changed), ("f.~1~", &contents[3]), ("f.~2~", &contents[2])]);
    fs::create_dir(pool.member(2).join("e")).unwrap();
    fs::write(pool.member(2).join("e/new"), &contents[4]).unwrap();
    fs::rename(pool.member(2).join("e/new"), at(&pool, 2, "f")).unwrap();
    are(&pool, "d", &[("f", &contents[4]), ("f.~1~", &changed), ("f.~2~", &contents[3])]);
    let cut = "import os, sys; os.truncate(sys.argv[1], 1)";
    assert!(Command::new("python3").args(["-c", cut]).arg(at(&pool, 1, "f")).status().unwrap().success());
    are(&pool, "d", &[("f", &contents[4][..1]), ("f.~1~", &contents[4]), ("f.~2~", &changed)]);
    pool.end();
    for (name, content) in [("f", &contents[4][..1]), ("f.~1~", &contents[4]), ("f.~2~", &changed)] {
        assert!(fs::read(pool.store().join("d").join(name)).unwrap() == content, "{name} in the store");
    }
}

#[test]
fn readers_of_all_members_wait_for_the_seal() {
    let Some(mut pool) = Pool::start("pool-sealed", 0) else { return };
    (0..3).for_each(|_| pool.mount_one(&["--pool-lease", "6s"]));
    fs::create_dir(pool.member(0).join("d")).unwrap();
    hint(&pool.member(0).join("d"), "consistency", "sealed");
    for by in 0..3 {
        let name = format!("d/f{by}");
        let mut file = File::create(pool.member(by).join(&name)).unwrap();
        file.write_all(b"begun ").unwrap();
        let begun = Instant::now();
        let readers: Vec<_> = (0..3)
            .map(|number| {
                let path = pool.member(number).join(&name);
                thread::spawn(move || {
                    let mut text = String::new();
                    File::open(path).unwrap().read_to_string(&mut text).unwrap();
                    (text, begun.elapsed())
                })
            })
            .collect();
        const WRITES: Duration = Duration::from_millis(700);
        thread::sleep(WRITES);
        file.write_all(b"ended").unwrap();
        drop(file);
        for (number, reader) in readers.into_iter().enumerate() {
            let (text, waited) = reader.join().unwrap();
            assert_eq!(text, "begun ended", "at member {number}, written at {by}");
            assert!(waited >= WRITES, "{waited:?} at member {number}, written at {by}");
        }
    }
}
