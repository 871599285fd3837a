//! Programs with the preload shim in a pool: the order in which what they close reaches the store, and files that they make without
//! a request in delegated directories.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::Path;

use serde_json::Value;

use crate::pool::Pool;
use crate::pool_shim::{Worker, kill, pool, trials};
use crate::scene::eventually;

/// How many files each writer makes in a round.
const FILES: usize = 6;

/// In each round all writers make their files. Then the last worker makes the mark. In the store the mark comes last.
fn marks(pool: &Pool, data: &[&Worker], mark: &Worker, names: &dyn Fn(usize, usize) -> String) {
    let store = pool.store();
    let rounds = trials() / 2;
    let seen = std::thread::scope(|scope| {
        let members = data.len();
        let all: Vec<Vec<String>> =
            (0..rounds).map(|round| (0..=members).map(|at| names(at, round)).collect()).collect();
        let watched = all.clone();
        let watcher = scope.spawn(move || {
            let mut early: Vec<String> = Vec::new();
            for round in &watched {
                let (mark, data) = round.split_last().unwrap();
                eventually("the mark comes", || store.join(mark).exists());
                let files = data.iter().flat_map(|name| (0..FILES).map(move |n| format!("{name}-{n}")));
                let missing: Vec<String> =
                    files.filter(|name| fs::read(store.join(name)).ok().as_deref() != Some(b"data")).collect();
                early.extend(missing);
            }
            early
        });
        for round in &all {
            let (mark_name, data_names) = round.split_last().unwrap();
            for (worker, name) in data.iter().zip(data_names) {
                worker.begins(&format!("[put(f'{name}-{{n}}', 'data') for n in range({FILES})]"));
            }
            data.iter().for_each(|worker| assert_eq!(worker.ends(), Value::from(vec![Value::Null; FILES])));
            assert_eq!(mark.does(&format!("put('{mark_name}', '')")), Value::Null);
        }
        watcher.join().unwrap()
    });
    assert!(seen.is_empty(), "{seen:?} of {rounds} rounds");
}

#[test]
fn mark_of_another_member_comes_after_data_of_the_shim() {
    let Some(mut pool) = pool("marks", 2, &[], &[]) else { return };
    let workers = [Worker::start(&pool, 0), Worker::start(&pool, 0), Worker::start(&pool, 1)];
    workers[0].does("os.mkdir('d')");
    let data = [&workers[0], &workers[1]];
    marks(&pool, &data, &workers[2], &|at, round| format!("d/{round}-{at}"));
    // Data of both, and the mark with the shim.
    marks(&pool, &[&workers[1], &workers[2]], &workers[0], &|at, round| format!("d/second-{round}-{at}"));
    let [first, second, _] = workers.map(Worker::end);
    assert!(first.opens_by_agent() > 0 && second.opens_by_agent() > 0);
    pool.end();
}

#[test]
fn mark_comes_after_data_of_the_shim_in_directories_of_all_members() {
    let Some(mut pool) = pool("ownmarks", 3, &["own0", "own1", "own2"], &["--pool-ordered", "true"]) else { return };
    let workers = [0, 1, 2].map(|number| Worker::start(&pool, number));
    for (number, worker) in workers.iter().enumerate() {
        assert_eq!(worker.does(&format!("put('own{number}/claimed', '')")), Value::Null);
    }
    // A program that has a file open all the time holds up nothing.
    workers[0].does("kept.update(log=os.open('own0/log', os.O_CREAT | os.O_WRONLY))");
    marks(&pool, &[&workers[0], &workers[1]], &workers[2], &|at, round| format!("own{at}/{round}"));
    workers[0].does("os.close(kept.pop('log'))");
    for counts in workers.map(Worker::end) {
        assert!(counts.opens_by_agent() > 0);
    }
    pool.end();
}

/// A directory that no other member has used is delegated. The first use ends that, and misses nothing.
#[test]
fn what_was_made_without_a_request_is_seen_by_another_member() {
    let Some(mut pool) = Pool::ample("shim-delegated", 2) else { return };
    let worker = Worker::start(&pool, 0);
    let there = pool.member(1).to_owned();
    for trial in 0..trials() {
        let dir = there.join(format!("d{trial}"));
        worker.does(&format!("os.mkdir('d{trial}')"));
        // (Of the directory itself, not of names in it.)
        assert!(dir.is_dir());
        for count in [20, 5] {
            let made = format!("[put(f'd{trial}/{{n}}-{count}', f'{{n}}', os.O_EXCL) for n in range({count})][:0]");
            assert!(worker.does(&made).is_array());
            let last = dir.join(format!("{}-{count}", count - 1));
            match trial % 4 {
                0 => assert_eq!(fs::read_to_string(&last).unwrap(), format!("{}", count - 1)),
                1 => assert_eq!(fs::metadata(&last).unwrap().len(), format!("{}", count - 1).len() as u64),
                2 => assert_eq!(File::create_new(&last).unwrap_err().kind(), ErrorKind::AlreadyExists),
                _ => assert!(fs::read_dir(&dir).unwrap().count() >= count),
            }
            for n in 0..count {
                assert_eq!(fs::read_to_string(dir.join(format!("{n}-{count}"))).unwrap(), n.to_string(), "{trial}");
            }
            fs::remove_file(&last).unwrap();
            assert_eq!(worker.does(&format!("os.path.exists('d{trial}/{}-{count}')", count - 1)), false);
        }
        let names = fs::read_dir(&dir).unwrap().count();
        assert_eq!(worker.does(&format!("len(os.listdir('d{trial}'))")), names);
        assert_eq!(names, 20 + 5 - 2);
    }
    let made = worker.end().made_without_a_request();
    assert!(made as usize > trials() && made as usize <= 20 * trials(), "{made} of {}", 25 * trials());
    pool.end();
}

/// Nor does the death of the agent lose any.
#[test]
fn what_was_made_without_a_request_is_seen_after_the_agent_was_killed() {
    let Some(mut pool) = Pool::ample("shim-delkilled", 2) else { return };
    let worker = Worker::start(&pool, 0);
    for trial in 0..8 {
        worker.does(&format!("os.mkdir('d{trial}')"));
        assert!(worker.does(&format!("[put(f'd{trial}/{{n}}', 'text') for n in range(50)]")).is_array());
        kill(&pool);
        for n in 0..50 {
            assert_eq!(fs::read_to_string(pool.member(1).join(format!("d{trial}/{n}"))).unwrap(), "text", "{trial}");
        }
        assert!(worker.does(&format!("put('d{trial}/later', 'text')")).is_null());
        assert_eq!(fs::read_to_string(pool.member(1).join(format!("d{trial}/later"))).unwrap(), "text", "{trial}");
    }
    assert!(worker.end().made_without_a_request() > 0);
    pool.end();
    assert_eq!(fs::read_dir(pool.store().join("d7")).unwrap().count(), 51);
}

/// The data is in delegated directories. Another member uses the mark's directory only.
#[test]
fn mark_comes_after_data_that_was_made_without_a_request() {
    let Some(mut pool) = Pool::ample("shim-delmarks", 2) else { return };
    let workers = [Worker::start(&pool, 0), Worker::start(&pool, 0), Worker::start(&pool, 1)];
    ["d", "m"].iter().for_each(|dir| assert!(workers[0].does(&format!("os.mkdir('{dir}')")).is_null()));
    let data = [&workers[0], &workers[1]];
    let names = |at: usize, round: usize| format!("{}/{round}-{at}", if at == 2 { "m" } else { "d" });
    marks(&pool, &data, &workers[2], &names);
    let [first, second, _] = workers.map(Worker::end);
    let made = first.made_without_a_request() + second.made_without_a_request();
    assert!(made > 0);
    pool.end();
}

/// For a comparison: small files in an own directory, by a program with the shim.
#[test]
#[ignore = "a measurement: SURGETANK_MEASURED=POOL or PLAIN"]
fn measured_small_files() {
    let Some(mut pool) = Pool::ample("shim-measured", 0) else { return };
    let is_pool = std::env::var("SURGETANK_MEASURED").is_ok_and(|what| what == "POOL");
    let options: [&str; 0] = [];
    let members = if is_pool { 2 } else { 1 };
    for number in 0..members {
        if is_pool {
            pool.mount_one(&options);
        } else {
            let over = pool.over(number);
            assert!(pool.without_pool("mount", number, &options).arg(&over).status().unwrap().success());
        }
    }
    let script = "
import os, time
os.makedirs('own/d')
for turn in range(5):
    count = 2000
    begin = time.monotonic()
    for n in range(count):
        fd = os.open(f'own/d/{turn}-{n}', os.O_CREAT | os.O_WRONLY, 0o644)
        os.write(fd, b'x' * 1000)
        os.close(fd)
    made = count / (time.monotonic() - begin)
    begin = time.monotonic()
    for n in range(count):
        fd = os.open(f'own/d/{turn}-{n}', os.O_RDONLY)
        os.read(fd, 4096)
        os.close(fd)
    print(f'{made:.0f} made, {count / (time.monotonic() - begin):.0f} read a second', flush=True)
";
    for preload in ["1", "0"] {
        let mut command = if is_pool { pool.command("run", 0, &[]) } else { pool.without_pool("run", 0, &[]) };
        command.args(["--quiet", "--over"]).arg(pool.over(0)).args(["--", "/usr/bin/env"]);
        if preload == "0" {
            command.args(["-u", "LD_PRELOAD", "-u", "SURGETANK_SHIM"]);
        }
        command.args(["/usr/bin/python3", "-c", &script.replace("own/d", &format!("own/d{preload}"))]);
        let output = command.env("SURGETANK_REPORT", "1").current_dir(pool.over(0)).output().unwrap();
        eprintln!(
            "shim {preload}: {}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    let over: &Path = &pool.over(0);
    if is_pool {
        pool.end();
    } else {
        assert!(pool.command_at(0, "umount", &[]).arg(over).status().unwrap().success());
    }
}
