//! A store whose clients show attributes, content and absent names late, as NFS does: each node has its own client.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;

use serde_json::Value;

use crate::pool::Pool;
use crate::scene::server::{Server, unmount};

/// How long a client believes what it has seen, in milliseconds: longer than the test takes.
const LATE: &str = "600000";
const NODES: usize = 3;
/// Where the store is behind the clients.
const BEHIND: &str = "/mnt/behind";
const ROUNDS: usize = 8;

/// What each node's client believes for a minute: the present attributes of the names that there are, and the absence of the
/// others.
fn let_clients_believe(pool: &Pool, names: &[String]) {
    for node in 0..NODES {
        for name in names {
            let there = fs::symlink_metadata(pool.store_of(node).join("d").join(name));
            assert_eq!(there.is_ok(), name.starts_with("old"), "{name} at node {node}");
        }
    }
}

/// All members see this content under the name.
#[track_caller]
fn all_see(pool: &Pool, name: &str, content: Option<&str>) {
    for member in 0..pool.count() {
        let path = pool.member(member).join("d").join(name);
        let found = fs::read_to_string(&path).ok();
        assert_eq!(found.as_deref(), content, "{name} at member {member}");
        let length = fs::metadata(&path).ok().map(|metadata| metadata.len());
        assert_eq!(length, content.map(|content| content.len() as u64), "{name} at member {member}");
    }
}

fn drained(pool: &Pool) {
    for member in 0..pool.count() {
        let mut wait = pool.command_at(member, "wait", &["--timeout", "60s", "--json"]);
        let waited = wait.arg(pool.member(member)).output().unwrap();
        assert!(waited.status.success(), "{waited:?}");
        let found: Value = serde_json::from_slice(&waited.stdout).unwrap();
        assert!(found["durable"] == true && found["verdict"]["not_durable"]["total"] == 0, "{found}");
    }
}

#[test]
fn store_that_shows_changes_late_causes_nothing_stale_and_no_conflict() {
    let Some(mut pool) = Pool::start("late", 0) else { return };
    pool.has_own_stores = true;
    let names: Vec<String> =
        (0..ROUNDS).flat_map(|round| [format!("old{round}"), format!("new{round}"), format!("moved{round}")]).collect();
    fs::create_dir_all(Path::new(BEHIND).join("d")).unwrap();
    for name in names.iter().filter(|name| name.starts_with("old")) {
        fs::write(Path::new(BEHIND).join("d").join(name), "before").unwrap();
    }
    let mut clients = Vec::new();
    for node in 0..NODES {
        fs::create_dir(pool.store_of(node)).unwrap();
        clients.push(Server::start(&pool.store_of(node), &["--ttl-ms", LATE]));
    }
    let_clients_believe(&pool, &names);
    // The clients are as late as they should be.
    fs::write(Path::new(BEHIND).join("d/old0"), "changed").unwrap();
    assert_eq!(fs::metadata(pool.store_of(1).join("d/old0")).unwrap().len(), 6);
    fs::write(Path::new(BEHIND).join("d/old0"), "before").unwrap();
    (0..NODES).for_each(|_| pool.mount_one(&[]));
    for name in &names {
        all_see(&pool, name, name.starts_with("old").then_some("before"));
    }
    for round in 0..ROUNDS {
        let [first, second, third] = [0, 1, 2].map(|member| pool.member((round + member) % NODES).join("d"));
        let [old, new, moved] = ["old", "new", "moved"].map(|name| format!("{name}{round}"));
        // Made, written in place and replaced by several members, and in the store in between.
        fs::write(first.join(&new), "made").unwrap();
        all_see(&pool, &new, Some("made"));
        OpenOptions::new().append(true).open(second.join(&old)).unwrap().write_all(b" and after").unwrap();
        all_see(&pool, &old, Some("before and after"));
        if round % 2 == 0 {
            drained(&pool);
        }
        OpenOptions::new().append(true).open(third.join(&new)).unwrap().write_all(b" more").unwrap();
        fs::write(first.join("temporary"), "replaced").unwrap();
        fs::rename(first.join("temporary"), first.join(&old)).unwrap();
        all_see(&pool, &old, Some("replaced"));
        fs::rename(second.join(&new), second.join(&moved)).unwrap();
        all_see(&pool, &new, None);
        all_see(&pool, &moved, Some("made more"));
        if round % 4 == 1 {
            drained(&pool);
        }
        fs::remove_file(third.join(&old)).unwrap();
        all_see(&pool, &old, None);
        fs::write(second.join(&old), format!("again {round}")).unwrap();
        all_see(&pool, &old, Some(&format!("again {round}")));
    }
    drained(&pool);
    // The copies leave the tiers: now the owner's client of the store has to say what is there.
    for member in 0..NODES {
        let evicted = pool.command_at(member, "evict", &["d"]).current_dir(pool.member(member)).output().unwrap();
        assert!(evicted.status.success(), "{evicted:?}");
    }
    for round in 0..ROUNDS {
        all_see(&pool, &format!("old{round}"), Some(&format!("again {round}")));
        all_see(&pool, &format!("moved{round}"), Some("made more"));
    }
    pool.end();
    let found: BTreeSet<_> = fs::read_dir(Path::new(BEHIND).join("d"))
        .unwrap()
        .map(|one| one.unwrap().file_name().into_string().unwrap())
        .collect();
    let expected: BTreeSet<_> =
        (0..ROUNDS).flat_map(|round| [format!("old{round}"), format!("moved{round}")]).collect();
    assert_eq!(found, expected, "a conflict, or a name that should have gone");
    for name in &expected {
        let content = fs::read_to_string(Path::new(BEHIND).join("d").join(name)).unwrap();
        let number = name.trim_start_matches(char::is_alphabetic);
        assert_eq!(content, if name.starts_with("old") { format!("again {number}") } else { "made more".into() });
    }
    for node in 0..NODES {
        unmount(&pool.store_of(node));
    }
    drop(clients);
}
