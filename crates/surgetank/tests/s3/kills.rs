//! The agent is killed at random moments while it uploads.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::store_node::{LIMIT, Node, stdout_of};
use surgetank_testkit::seeds;
use surgetank_testkit::servers::s3::{BUCKET, S3Server};

/// Kills at random points. After each kill at most the parts in flight are sent again: four. `SURGETANK_KILLS` is the
/// number of kills.
#[test]
fn agent_killed_during_uploads_shows_no_partial_object() {
    let seed = std::env::var("SURGETANK_KILLS_SEED").map_or(7, |seed| seed.parse().unwrap());
    seeds::kept("kills").into_iter().chain([seed]).for_each(killed_while_it_uploads);
}

fn killed_while_it_uploads(seed: u64) {
    const BYTES: u64 = 200_000_000;
    const IN_FLIGHT: u64 = 4 * (16 << 20);
    eprintln!("SURGETANK_KILLS_SEED={seed}");
    let Some(server) = S3Server::start() else { return };
    let wanted: u32 = std::env::var("SURGETANK_KILLS").map_or(4, |kills| kills.parse().unwrap());
    let mut random = u128::from(seed);
    let (mut kills, mut again) = (0, Vec::new());
    for run in 0.. {
        if kills >= wanted {
            break;
        }
        let node = Node::new();
        let link = server.link(Some(100_000_000));
        let url = format!("s3://{BUCKET}/project?endpoint={}", link.endpoint());
        let script = format!("head -c {BYTES} /dev/urandom >big{run}; sha256sum big{run} >sums{run}");
        let mut child = node.command(&url, &[], &script).envs(server.environment()).spawn().unwrap();
        let big = server.files().join(format!("project/big{run}"));
        let begun = Instant::now();
        let (mut killed, mut next) = (0, None);
        while child.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < LIMIT, "seed {seed}, run {run}: the run does not end");
            assert!(
                fs::metadata(&big).map_or(true, |big| big.size() == BYTES),
                "seed {seed}, run {run}: a partial object is visible"
            );
            if killed < 3 && kills < wanted && next.is_none() && node.has_uploads() {
                random = (random * 6_364_136_223_846_793_005_u128 + 1_442_695_040_888_963_407) & u128::from(u64::MAX);
                next = Some(Instant::now() + Duration::from_millis((random >> 33) as u64 % 1500));
            }
            if next.is_some_and(|next| next <= Instant::now()) {
                next = None;
                // (The agent may have ended meanwhile.)
                if node.has_uploads() && node.kill_agent() {
                    killed += 1;
                    kills += 1;
                }
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        stdout_of(&child.wait_with_output().unwrap());
        node.await_no_agent();
        assert!(!node.has_uploads(), "seed {seed}, run {run}: a record of an upload remains after its end");
        assert!(server.parts().is_empty(), "seed {seed}, run {run}: {:?}", server.parts());
        let sums = fs::read_to_string(server.files().join(format!("project/sums{run}"))).unwrap();
        let sum = Command::new("sha256sum").arg(&big).output().unwrap();
        assert_eq!(sums.split(' ').next(), String::from_utf8_lossy(&sum.stdout).split(' ').next());
        let more = link.sent().saturating_sub(BYTES);
        assert!(more < killed * IN_FLIGHT + 2_000_000, "seed {seed}, run {run}: {more} bytes more for {killed} kills");
        again.push((killed, more));
        fs::remove_file(&big).unwrap();
    }
    println!("kills and bytes sent again, for each file: {again:?}");
    assert!(again.iter().any(|(killed, more)| *killed > 0 && *more > 0), "no upload was interrupted");
}
