//! `surgetank locate`: where the contents of a pool's files are, asked at each member.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Instant;

use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

use crate::pool::Pool;
use crate::scene::{MIB, eventually};

/// What a member says of files below the directory, in its JSON, and the exit code.
fn located(pool: &Pool, number: usize, names: &[&str]) -> (Value, Option<i32>) {
    let paths = names.iter().map(|name| pool.member(number).join(name));
    let output = pool.command_at(number, "locate", &["--json"]).args(paths).output().unwrap();
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    (serde_json::from_str(&text).unwrap_or_else(|why| panic!("{why}: {output:?}")), output.status.code())
}

/// The members that have a copy; each is compared with the content.
fn holders(found: &Value, content: &[u8]) -> BTreeSet<u64> {
    let copies = found["copies"].as_array().unwrap_or_else(|| panic!("{found}"));
    let node = rustix::system::uname();
    let of = copies.iter().map(|copy| {
        assert_eq!(copy["tier"], json!("fast"), "{found}");
        assert_eq!(copy["node"].as_str(), node.nodename().to_str().ok(), "{found}");
        let member = copy["member"].as_u64().unwrap();
        let file = copy["path"].as_str().unwrap();
        assert!(file.contains(&format!("/tier{}/", member - 1)), "{found}");
        assert_eq!(fs::read(file).unwrap(), content, "{file}");
        member
    });
    of.collect()
}

fn ask(mut command: Command, input: &str) -> Output {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

/// Names at one member, contents at others; a rule keeps nothing from the store, so that a home is possible.
#[test]
fn every_member_knows_each_copy() {
    let Some(mut pool) = Pool::start("locate", 0) else { return };
    for _ in 0..3 {
        pool.mount_one(&["--quiet-period", "1h", "--replicas", "2"]);
    }
    fs::create_dir(pool.member(0).join("d")).unwrap();
    fs::write(pool.member(0).join("d/own"), "own").unwrap();
    fs::write(pool.member(1).join("d/made"), "made by the second one").unwrap();
    fs::create_dir(pool.member(2).join("e")).unwrap();
    fs::write(pool.member(2).join("e/third"), "").unwrap();
    let names = ["d/own", "d/made", "e/third", "d"];
    let contents: [&[u8]; 3] = [b"own", b"made by the second one", b""];
    for number in 0..3 {
        let mut found = Value::Null;
        eventually("two members have each file", || {
            let (now, exit) = located(&pool, number, &names);
            assert_eq!(exit, Some(0), "{now}");
            found = now;
            (0..2).all(|at| found[at]["copies"].as_array().is_some_and(|copies| copies.len() == 2))
        });
        for (at, content) in contents.iter().enumerate() {
            let one = &found[at];
            assert_eq!(one["path"].as_str(), pool.member(number).join(names[at]).to_str(), "{found}");
            assert_eq!(one["size_bytes"], json!(content.len()), "{found}");
            assert_eq!((&one["durable"], &one["state"]), (&json!(false), &json!("sealed")), "{found}");
            assert!(one.get("elsewhere").is_none(), "{found}");
            assert!(holders(one, content).contains(&one["home"].as_u64().unwrap()), "{found}");
        }
        let homes = [&found[0]["home"], &found[1]["home"], &found[2]["home"]];
        assert_eq!(homes, [&json!(1), &json!(2), &json!(3)], "member {number}: {found}");
        assert_eq!(found[3]["copies"], json!([]), "a directory: {found}");
    }
    let node =
        pool.command_at(1, "locate", &["--node"]).args(names.map(|name| pool.member(1).join(name))).output().unwrap();
    let name = format!("{}\n", rustix::system::uname().nodename().to_str().unwrap());
    assert_eq!((String::from_utf8_lossy(&node.stdout).into_owned(), node.status.code()), (name, Some(0)), "{node:?}");
    // What is written again is not where it was before.
    fs::write(pool.member(0).join("d/own"), "written again").unwrap();
    eventually("the copy is of the new content", || {
        let (found, _) = located(&pool, 2, &["d/own"]);
        holders(&found[0], b"written again").len() == 2
    });
    let lines =
        pool.command_at(1, "locate", &[]).args(["d/own", "d/none"].map(|name| pool.member(1).join(name))).output();
    let lines = lines.unwrap();
    let text = String::from_utf8_lossy(&lines.stdout).into_owned();
    assert!(text.contains("/d/own\tsealed\t1:fast:/mnt/pool/tier0/") && text.lines().count() == 1, "{lines:?}");
    assert_eq!(lines.status.code(), Some(1), "{lines:?}");
    assert!(String::from_utf8_lossy(&lines.stderr).contains("d/none: it cannot be located"), "{lines:?}");
    let attribute = |number: usize, name: &str| {
        let mut value = vec![0; 4096];
        let file = pool.member(number).join(name);
        let length = rustix::fs::getxattr(&file, "user.surgetank.location", &mut value[..]).unwrap();
        String::from_utf8(value[..length].to_vec()).unwrap()
    };
    assert!(attribute(2, "d/own").starts_with("1:fast:/mnt/pool/tier0/"), "{}", attribute(2, "d/own"));
    assert_eq!(attribute(2, "d/made").lines().next(), Some("2::"));
    pool.end();
}

/// Inputs in directories that no member has claimed are on the tiers of those that read them.
#[test]
fn files_of_the_store_are_where_they_were_read() {
    let Some(mut pool) = Pool::start("locate-store", 0) else { return };
    fs::create_dir_all(pool.store().join("input")).unwrap();
    let content = vec![7; MIB as usize];
    fs::write(pool.store().join("input/a"), &content).unwrap();
    fs::write(pool.store().join("input/b"), &content).unwrap();
    for _ in 0..3 {
        pool.mount_one(&[]);
    }
    let prefetch = |number: usize, name: &str| {
        let output = pool.command_at(number, "prefetch", &[]).arg(pool.member(number).join(name)).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    prefetch(1, "input/a");
    prefetch(2, "input/a");
    prefetch(2, "input/b");
    for number in 0..3 {
        eventually("the copies are known", || {
            let (found, exit) = located(&pool, number, &["input/a", "input/b"]);
            assert_eq!(exit, Some(0), "{found}");
            assert_eq!((&found[0]["home"], &found[0]["durable"]), (&json!(null), &json!(true)), "{found}");
            let both = [holders(&found[0], &content), holders(&found[1], &content)];
            both == [BTreeSet::from([2, 3]), BTreeSet::from([3])]
        });
    }
    // Another client replaces one: what the members have of it is old.
    fs::write(pool.store().join("input/a"), "new").unwrap();
    eventually("no copy of the old content counts", || {
        let (found, _) = located(&pool, 0, &["input/a"]);
        found[0]["size_bytes"] == json!(3) && found[0]["copies"] == json!([])
    });
    pool.end();
}

/// Two rounds of messages, whatever the number of files. A member that does not answer is waited for once.
#[test]
fn thousands_of_files_take_a_handful_of_calls() {
    const FILES: usize = 3000;
    let Some(mut pool) = Pool::start("locate-many", 2) else { return };
    for number in 0..2 {
        let dir = pool.member(number).join(format!("d{number}"));
        fs::create_dir(&dir).unwrap();
        (0..FILES).for_each(|file| drop(fs::File::create(dir.join(format!("{file}"))).unwrap()));
    }
    let calls = || pool.asked(0, "members")["members"][1]["calls"].as_u64().unwrap();
    let list = |of: &[usize]| -> String {
        let paths = of.iter().flat_map(|owner| (0..FILES).map(move |file| (owner, file)));
        paths.map(|(owner, file)| format!("{}\n", pool.member(0).join(format!("d{owner}/{file}")).display())).collect()
    };
    let before = calls();
    let output = ask(pool.command_at(0, "locate", &["--json", "-"]), &list(&[0, 1]));
    let found: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), found.len()), (Some(0), 2 * FILES), "{:?}", output.stderr);
    for (at, one) in found.iter().enumerate() {
        assert_eq!(one["home"], json!(1 + at / FILES), "{one}");
        let name = format!("{}", at % FILES);
        assert!(Path::new(one["path"].as_str().unwrap()).ends_with(&name), "{one}");
    }
    // (The command has four requests. The rest looks up directories, and confirms what is believed.)
    assert!(calls() - before <= 150, "{} calls", calls() - before);
    let stopped = pool.agent(1);
    kill_process(stopped, Signal::STOP).unwrap();
    let begun = Instant::now();
    let (found, exit) = located(&pool, 0, &["d0/1", "d1/1"]);
    kill_process(stopped, Signal::CONT).unwrap();
    assert_eq!((exit, &found[0]["home"], &found[1]["home"]), (Some(0), &json!(1), &json!(2)), "{found}");
    assert_eq!(found[1]["copies"], json!([{"member": 2, "node": "", "tier": "", "path": ""}]), "{found}");
    assert!((9..55).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
    pool.end();
}
