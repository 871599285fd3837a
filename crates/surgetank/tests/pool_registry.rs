//! Pools whose registry is in a Redis server: the first member is as any other.

use std::fs;
use std::path::Path;
use std::process::Output;

use surgetank_testkit::servers::redis::RedisServer;

use crate::pool::Pool;
use crate::scene::eventually;

fn leave(pool: &Pool, number: usize) -> Output {
    pool.command_at(number, "pool", &["leave"]).arg(pool.over(number)).output().unwrap()
}

fn members(pool: &Pool, number: usize) -> usize {
    pool.status(number)["members"].as_array().unwrap().len()
}

fn pool_files(store: &Path) -> usize {
    let names = fs::read_dir(store).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.starts_with(".surgetank-tmp-pool-")).count()
}

#[test]
fn pool_goes_on_after_its_first_member_leaves() {
    let Some(redis) = RedisServer::start() else { return };
    let Some(mut pool) = Pool::start("registry", 0) else { return };
    fs::create_dir_all(pool.store()).unwrap();
    let url = format!("redis://127.0.0.1:{}", redis.port());
    let more = ["--registry", url.as_str()];
    pool.mount_one(&more);
    pool.mount_one(&more);
    fs::create_dir(pool.member(0).join("d")).unwrap();
    fs::write(pool.member(0).join("d/f"), "one").unwrap();
    assert_eq!(fs::read_to_string(pool.member(1).join("d/f")).unwrap(), "one");
    let left = leave(&pool, 0);
    assert_eq!(left.status.code(), Some(0), "{left:?}");
    eventually("the other member to know it", || members(&pool, 1) == 1);
    fs::write(pool.member(1).join("d/g"), "two").unwrap();
    assert_eq!(pool.status(1)["claims"][0]["owner"], 2);
    pool.mount_one(&more);
    assert_eq!(fs::read_to_string(pool.member(2).join("d/g")).unwrap(), "two");
    assert_eq!(members(&pool, 2), 2);
    for number in [2, 1] {
        let left = leave(&pool, number);
        assert_eq!(left.status.code(), Some(0), "{left:?}");
    }
    pool.have_left();
    assert_eq!((redis.cli(&["DBSIZE"]), pool_files(&pool.store())), ("0".to_owned(), 0));
    assert_eq!(fs::read_to_string(pool.store().join("d/g")).unwrap(), "two");
}

// Members report what they own, and claims wait for one lease.
#[test]
fn members_keep_their_directories_when_the_server_forgets_all() {
    let Some(redis) = RedisServer::start() else { return };
    let Some(mut pool) = Pool::start("forgetful", 0) else { return };
    for name in ["a", "b"] {
        fs::create_dir_all(pool.store().join(name)).unwrap();
    }
    let url = format!("redis://127.0.0.1:{}", redis.port());
    let more = ["--registry", url.as_str(), "--pool-lease", "6s"];
    pool.mount_one(&more);
    pool.mount_one(&more);
    fs::write(pool.member(0).join("a/f"), "one").unwrap();
    redis.cli(&["FLUSHALL"]);
    fs::write(pool.member(1).join("a/g"), "two").unwrap();
    fs::write(pool.member(1).join("b/f"), "three").unwrap();
    assert_eq!(fs::read_to_string(pool.member(0).join("b/f")).unwrap(), "three");
    assert_eq!(fs::read_to_string(pool.member(0).join("a/g")).unwrap(), "two");
    let status = pool.status(0);
    let owner = |directory: &str| {
        let claims = status["claims"].as_array().unwrap();
        claims.iter().find(|claim| claim["directory"] == directory).map(|claim| claim["owner"].clone())
    };
    assert_eq!((owner("/a"), owner("/b")), (Some(1.into()), Some(2.into())), "{status}");
    assert_eq!(status["lost"], serde_json::json!([]), "{status}");
    pool.end();
}
