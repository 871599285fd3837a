//! A database in the directory, through the mount and with the preload shim. PostgreSQL makes a cluster, and pgbench
//! works on it while agents are killed.
//!
//! Here fsync means the store, and PostgreSQL panics at the first fsync that fails.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::scene::{Scene, eventually};

/// How many agents are killed under pgbench.
const KILLS: usize = 20;

/// The server refuses to run as root. The script uses the account that Debian's package makes.
const SCRIPT: &str = r#"
cat >/mnt/out/work.sh <<'END'
set -eu
bin=$(ls -d /usr/lib/postgresql/*/bin | tail -n 1)
export PGDATA=$PWD/data PGHOST=/mnt/out PGUSER=test PGDATABASE=postgres
cluster() { $bin/pg_ctl -w -t 80 -l /mnt/out/server.log "$@" >/dev/null; }
# Small segments: each commit drains the segment that is being written.
$bin/initdb --no-locale -E UTF8 -U test -A trust --wal-segsize=1 >/mnt/out/initdb.log
cat >>data/postgresql.conf <<CONF
listen_addresses = ''
unix_socket_directories = '/mnt/out'
shared_buffers = 16MB
min_wal_size = 4MB
max_wal_size = 16MB
CONF
cluster start
$bin/pgbench -i -q -s 1 2>/mnt/out/init.log
touch /mnt/out/loaded
$bin/psql -q -c 'create table emptied (number int)'
# Before each round the server creates new files and removes old ones.
until [ -e /mnt/out/stop ]; do
    $bin/psql -q -c 'vacuum pgbench_branches' -c 'vacuum full pgbench_tellers' -c 'truncate emptied' -c 'insert into emptied values (1)'
    $bin/pgbench -n -c 4 -j 2 -t 5 >>/mnt/out/bench.log 2>&1
    echo >>/mnt/out/rounds
done
# All four tables have the same sum, and there are as many rows as transactions; also after a restart. Every index finds every row.
look() { $bin/psql -At -c 'select (select count(*) from pgbench_history), (select sum(delta) from pgbench_history),
    (select sum(abalance) from pgbench_accounts), (select sum(bbalance) from pgbench_branches), (select sum(tbalance) from pgbench_tellers)'; }
before=$(look)
cluster -m fast stop
cluster start
[ "$before" = "$(look)" ]
$bin/psql -q -c 'create extension amcheck'
$bin/pg_amcheck --heapallindexed >/mnt/out/amcheck.log 2>&1
cluster -m fast stop
echo "$before"
END
setpriv --reuid postgres --regid postgres --clear-groups bash /mnt/out/work.sh
"#;

#[track_caller]
fn database(name: &str, options: &[&str]) {
    let installed = |version: &fs::DirEntry| version.path().join("bin/initdb").exists();
    if !fs::read_dir("/usr/lib/postgresql")
        .is_ok_and(|mut found| found.any(|version| version.is_ok_and(|one| installed(&one))))
    {
        assert!(std::env::var_os("CI").is_none(), "PostgreSQL is missing: scripts/setup test");
        eprintln!("skipped: PostgreSQL is missing (scripts/setup test)");
        return;
    }
    let Some(mut scene) = Scene::new(name) else { return };
    scene.tier("fast", 512);
    let out = scene.beside("out");
    for path in [&scene.over, &out] {
        assert!(Command::new("chown").args(["postgres:postgres"]).arg(path).status().unwrap().success());
    }
    let options = [&["--fsync", "store", "--grace", "10s"], options].concat();
    let mut running = scene.start(&options, SCRIPT);
    let there = |name: &str| Path::new("/mnt/out").join(name).exists();
    let rounds = || fs::read("/mnt/out/rounds").map_or(0, |rounds| rounds.len());
    let log = || fs::read_to_string("/mnt/out/server.log").unwrap_or_default();
    eventually("the tables are filled", || there("loaded") || running.has_ended());
    for _ in 0..KILLS {
        let before = rounds();
        eventually("pgbench works", || rounds() > before || running.has_ended());
        if !running.has_ended() {
            scene.replace_agent();
        }
    }
    let before = rounds();
    eventually("pgbench continues", || rounds() > before || running.has_ended());
    fs::write(out.join("stop"), "").unwrap();
    let ended = running.ends();
    let server_log = log();
    assert_eq!(ended.status.code(), Some(0), "{}\n{server_log}", ended.stderr);
    assert!(!server_log.contains("PANIC") && !server_log.contains("Interrupted"), "{server_log}");
    let figures: Vec<&str> = ended.stdout.trim().split('|').collect();
    assert_eq!(figures[0].parse(), Ok(20 * rounds()), "the acknowledged transactions: {}", ended.stdout);
    assert!(figures[2..].iter().all(|sum| *sum == figures[1]), "the sums differ: {}", ended.stdout);
    // The store has the state that the server left when it stopped.
    let control = Command::new("sh")
        .args(["-c", "$(ls -d /usr/lib/postgresql/*/bin | tail -n 1)/pg_controldata /mnt/project/data"])
        .output()
        .unwrap();
    let control = String::from_utf8_lossy(&control.stdout).into_owned();
    assert!(
        control.lines().any(|line| line.starts_with("Database cluster state") && line.ends_with("shut down")),
        "{control}"
    );
    scene.is_clean();
}

#[test]
fn database_survives_killed_agents_through_the_mount() {
    database("postgresql_mount", &["--no-preload"]);
}

#[test]
fn database_survives_killed_agents_with_the_shim() {
    database("postgresql_shim", &[]);
}
