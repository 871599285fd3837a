//! What a member's status, reports and metrics say about the whole pool.

use std::fs;
use std::io::Write;
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

use crate::pool::{Pool, run};
use crate::scene::{MIB, eventually};

/// `surgetank status --json` of one member.
fn status(pool: &Pool, number: usize) -> Value {
    let mut command = pool.command_at(number, "status", &["--json"]);
    let output = command.arg(pool.member(number)).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice::<Value>(&output.stdout).unwrap()[0].take()
}

fn printed(pool: &Pool, number: usize, verb: &str, words: &[&str]) -> String {
    let output = pool.command_at(number, verb, words).arg(pool.member(number)).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// The bytes and calls from one member to another one.
fn pair(traffic: &Value, from: u32, to: u32) -> (u64, u64) {
    let pairs = traffic.as_array().unwrap();
    let pair = pairs.iter().find(|pair| (&pair["from"], &pair["to"]) == (&json!(from), &json!(to)));
    let pair = pair.unwrap_or_else(|| panic!("{from} to {to}: {traffic}"));
    (pair["bytes"].as_u64().unwrap(), pair["calls"].as_u64().unwrap())
}

/// A file whose content is at the first member: what others write to it goes there.
fn made_by_the_first_one(pool: &Pool) {
    fs::create_dir(pool.member(0).join("d")).unwrap();
    fs::write(pool.member(0).join("d/big"), "").unwrap();
}

/// The second member writes a file of the first one, which drains it at the end only.
#[test]
fn status_shows_what_each_member_has_to_drain() {
    let Some(mut pool) = Pool::start("status", 0) else { return };
    pool.mount_one(&["--quiet-period", "1h"]);
    pool.mount_one(&[]);
    made_by_the_first_one(&pool);
    fs::write(pool.member(1).join("d/big"), vec![b'x'; 3 * MIB as usize]).unwrap();
    eventually("the directory is in the store", || status(&pool, 0)["queue"]["operations"] == 0);
    for number in 0..2 {
        let seen = status(&pool, number);
        assert_eq!(seen["queue"]["bytes"], json!(if number == 0 { 3 * MIB } else { 0 }), "{seen}");
        let of_pool = &seen["pool"];
        assert_eq!((&of_pool["member"], &of_pool["lost"]), (&json!(number + 1), &json!([])));
        let members = of_pool["members"].as_array().unwrap();
        let rows: Vec<_> = members
            .iter()
            .map(|one| (&one["member"], &one["has_registry"], &one["undrained_bytes"], &one["undrained_operations"]))
            .collect();
        let expected = [(json!(1), json!(true), json!(3 * MIB)), (json!(2), json!(false), json!(0))];
        let expected: Vec<_> =
            expected.iter().map(|(number, has, bytes)| (number, has, bytes, &expected[1].2)).collect();
        assert_eq!(rows, expected, "{seen}");
        assert!(members.iter().all(|one| one["address"].as_str().unwrap().starts_with("127.0.0.1:")), "{seen}");
        let (bytes, calls) = pair(&of_pool["traffic"], 2, 1);
        assert!(bytes >= 3 * MIB && calls >= 3, "{seen}");
        let (bytes, _) = pair(&of_pool["traffic"], 1, 2);
        assert!(bytes > 0 && bytes < MIB, "{seen}");
    }
    let text = printed(&pool, 1, "status", &[]);
    let row = |number: &str| text.lines().find(|line| line.trim_start().starts_with(number)).unwrap().to_owned();
    assert!(row("1 ").contains("3.00 MiB") && row("1 ").ends_with("has the registry"), "{text}");
    assert!(row("2 ").ends_with("(this one)  safe to power off"), "{text}");
    let safe = |number: usize| status(&pool, 0)["pool"]["members"][number]["safe_to_power_off"].clone();
    assert_eq!((safe(0), safe(1)), (json!(false), json!(true)), "the first one has the registry and the file");
    let shown = status(&pool, 0)["pool"]["members"][1].clone();
    assert_eq!(shown["node"].as_str(), rustix::system::uname().nodename().to_str().ok(), "{shown}");
    let room = &shown["tiers"][0];
    assert_eq!((&room["tier"], &room["cap_bytes"]), (&json!("fast"), &json!(64 * MIB)), "{shown}");
    assert!(room["free_bytes"].as_u64() > Some(32 * MIB), "{shown}");
    // Content of a file whose name is at the first one.
    let mut file = fs::File::create(pool.member(1).join("d/made")).unwrap();
    file.write_all(b"made").unwrap();
    assert_eq!(safe(1), json!(false), "while it is open");
    drop(file);
    assert_eq!(safe(1), json!(false), "while only this member has it");
    assert!(text.contains("\n  pool: member 2 of 2;"), "{text}");
    let traffic = pool.status(0)["traffic"].clone();
    assert!(pair(&traffic, 2, 1).0 >= 3 * MIB, "{traffic}");
    let text = printed(&pool, 0, "pool", &["status"]);
    assert!(text.contains("  from      to         bytes       calls\n     2       1      3."), "{text}");
    pool.end();
    assert_eq!(fs::metadata(pool.store().join("d/big")).unwrap().len(), 3 * MIB);
}

/// Neither the node that has the name of a file may be switched off, nor the one that has its content.
#[test]
fn node_with_a_name_or_a_content_alone_is_not_safe_to_power_off() {
    let Some(mut pool) = Pool::start("power-off", 0) else { return };
    fs::create_dir_all(pool.store().join("d")).unwrap();
    (0..3).for_each(|_| pool.mount_one(&["--quiet-period", "1h"]));
    let safe = |pool: &Pool| {
        let seen = status(pool, 0);
        [1, 2].map(|number| seen["pool"]["members"][number]["safe_to_power_off"].clone())
    };
    let wait = |pool: &Pool| {
        let output = pool.command_at(1, "wait", &["--timeout", "60s"]).arg(pool.member(1)).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    // The second member claims the directory.
    fs::write(pool.member(1).join("d/own"), "own").unwrap();
    assert_eq!(safe(&pool), [json!(false), json!(true)]);
    wait(&pool);
    eventually("nothing is left", || safe(&pool) == [json!(true), json!(true)]);
    fs::write(pool.member(2).join("d/made"), "made").unwrap();
    assert_eq!(safe(&pool), [json!(false), json!(false)]);
    wait(&pool);
    eventually("nothing is left", || safe(&pool) == [json!(true), json!(true)]);
    pool.end();
}

/// Neither 0 bytes nor a command that waits.
#[test]
fn member_that_does_not_answer_is_shown_as_such() {
    let Some(mut pool) = Pool::start("silent", 2) else { return };
    fs::write(pool.member(0).join("f"), "content").unwrap();
    assert_eq!(fs::read_to_string(pool.member(1).join("f")).unwrap(), "content");
    let agent = pool.agent(0);
    kill_process(agent, Signal::STOP).unwrap();
    let begun = Instant::now();
    let seen = status(&pool, 1)["pool"].take();
    let taken = begun.elapsed();
    let text = printed(&pool, 1, "status", &[]);
    kill_process(agent, Signal::CONT).unwrap();
    assert!(taken >= Duration::from_secs(2) && taken < Duration::from_secs(6), "{taken:?}");
    let silent = &seen["members"][0];
    for unknown in ["has_registry", "undrained_bytes", "undrained_operations"] {
        assert_eq!(silent.get(unknown), Some(&Value::Null), "{unknown}: {seen}");
    }
    assert_eq!(seen["members"][1]["undrained_bytes"], 0, "{seen}");
    let pairs = &seen["traffic"];
    assert!(pair(pairs, 2, 1).1 > 0, "{seen}");
    assert!(pairs[0]["bytes"].as_u64().unwrap() > 0 && pairs[0]["calls"].is_null(), "known by the receiver: {seen}");
    assert!(text.contains("no answer"), "{text}");
    eventually("it answers again", || status(&pool, 1)["pool"]["members"][0]["undrained_bytes"].is_u64());
    pool.end();
}

/// The run's own member and the other one, in both directions.
#[test]
fn report_has_the_network_of_the_run() {
    let Some(mut pool) = Pool::start("report", 1) else { return };
    made_by_the_first_one(&pool);
    let runs = |script: &str| {
        let output = run(&pool, 1, script).wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let mut report = pool.command_at(1, "report", &["last", "--json"]);
        let output = report.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice::<Value>(&output.stdout).unwrap()["pool_traffic"].clone()
    };
    let traffic = runs("head -c 3145728 /dev/zero > d/big; head -c 1048576 d/big > /dev/null");
    assert_eq!((&traffic["member"], &traffic["others"][0]["member"]), (&json!(2), &json!(1)), "{traffic}");
    let other = |name: &str| traffic["others"][0][name].as_u64().unwrap();
    assert!(other("sent_bytes") >= 3 * MIB && other("sent_bytes") < 4 * MIB, "{traffic}");
    assert!(other("received_bytes") >= MIB && other("received_bytes") < 3 * MIB, "{traffic}");
    assert!(other("calls") > 5, "{traffic}");
    let text = pool.command_at(1, "report", &["last"]).output().unwrap();
    let text = String::from_utf8(text.stdout).unwrap();
    let line = "between nodes: calls of this node (member 2) while the run lasted";
    assert!(text.contains(line), "{text}");
    let page = pool.store().with_file_name("page.html");
    let written = pool.command_at(1, "report", &["last", "--html", page.to_str().unwrap()]).output().unwrap();
    assert!(written.status.success(), "{written:?}");
    let page = fs::read_to_string(page).unwrap();
    assert!(page.contains("<td>2 (this one)</td><td>1</td><td class=\"n\" data-v=\"3"), "{page}");
    pool.end();
}

/// The next agent counts from 0.
#[test]
fn report_keeps_the_network_of_a_killed_agent() {
    let Some(mut pool) = Pool::start("report-kill", 1) else { return };
    made_by_the_first_one(&pool);
    let script = "head -c 3145728 /dev/zero > d/big; until [ -e d/go ]; do sleep 0.05; done; echo x > d/last";
    let running = run(&pool, 1, script);
    let state = pool.store().with_file_name("state1");
    let noted = || {
        let places = fs::read_dir(&state).into_iter().flatten().flatten();
        let notes = places.flat_map(|place| fs::read_dir(place.path().join("runs")).into_iter().flatten().flatten());
        let text = notes.filter_map(|note| fs::read(note.path()).ok());
        let records = text.filter_map(|text| serde_json::from_slice::<Value>(&text).ok());
        records.filter_map(|record| record["pool_traffic"]["others"][0]["sent_bytes"].as_u64()).max()
    };
    eventually("the note has the bytes", || noted() >= Some(3 * MIB));
    kill_process(pool.agent(1), Signal::KILL).unwrap();
    fs::write(pool.member(0).join("d/go"), "").unwrap();
    let output = running.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let record = pool.command_at(1, "report", &["last", "--json"]).output().unwrap();
    let record: Value = serde_json::from_slice(&record.stdout).unwrap();
    let sent_bytes = record["pool_traffic"]["others"][0]["sent_bytes"].as_u64().unwrap();
    assert_eq!(record["agents"], 2);
    assert!((3 * MIB..5 * MIB).contains(&sent_bytes), "{}", record["pool_traffic"]);
    pool.end();
}

#[test]
fn status_without_a_pool_does_not_mention_one() {
    let Some(mut scene) = crate::scene::Scene::new("pool-none") else { return };
    scene.tier("fast", 8);
    let ended = scene
        .run(
            &[],
            "/mnt/surgetank status --json --state /mnt/state . >json; /mnt/surgetank status --state /mnt/state . >text",
        )
        .exits(0);
    let seen: Value = serde_json::from_slice(&fs::read(scene.over.join("json")).unwrap()).unwrap();
    assert!(seen[0]["queue"].is_object() && seen[0].get("pool").is_none(), "{seen} {}", ended.stderr);
    let text = fs::read_to_string(scene.over.join("text")).unwrap();
    assert!(text.contains("queue:") && !text.contains("member"), "{text}");
}
