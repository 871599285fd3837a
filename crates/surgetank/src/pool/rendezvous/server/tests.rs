//! Members that find each other through a Redis server.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use surgetank_pool::Directory;
use surgetank_testkit::servers::redis::RedisServer;
use surgetank_types::model::Role;

use super::*;

const LEASE: Duration = Duration::from_secs(2);

struct Idle;

impl Host for Idle {
    fn forget(&self, _: &Directory) {}
    fn expelled(&self) {}
}

fn config(dir: &Path, redis: &RedisServer) -> PoolConfig {
    PoolConfig {
        name: "flow".to_owned(),
        secret: dir.join("secret"),
        host: "127.0.0.1".to_owned(),
        lease: LEASE,
        is_of_job: false,
        announcement: String::new(),
        registry: Some(format!("redis://127.0.0.1:{}", redis.port())),
        registry_password: None,
        role: Role::default(),
    }
}

fn store(dir: &Path, name: &str) -> Meeting {
    let path = dir.join(name);
    fs::create_dir_all(&path).unwrap();
    Meeting::Directory(File::open(path).unwrap().into())
}

fn join_in(config: &PoolConfig, store: &Meeting) -> io::Result<Joined> {
    super::super::join(config, "key", store, &(Arc::new(Idle) as Arc<dyn Host>))
}

#[test]
fn members_over_one_store_are_one_pool_and_others_are_refused() {
    let Some(redis) = RedisServer::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), &redis);
    let (one, other) = (store(dir.path(), "one"), store(dir.path(), "other"));
    let first = join_in(&config, &one).unwrap();
    let second = join_in(&config, &one).unwrap();
    second.membership.look_again();
    assert_eq!(second.membership.members().len(), 2);
    let why = join_in(&config, &other).map(drop).unwrap_err().to_string();
    assert!(why.contains("has another store") && why.contains("--pool NAME"), "{why}");
    assert_eq!(fs::read_dir(dir.path().join("other")).unwrap().count(), 0);
    let embedded = PoolConfig { registry: None, ..config.clone() };
    let why = join_in(&embedded, &one).map(drop).unwrap_err().to_string();
    assert!(why.contains("--registry URL"), "{why}");
    let strange = PoolConfig { secret: dir.path().join("another"), ..config };
    let why = join_in(&strange, &one).map(drop).unwrap_err().to_string();
    assert!(why.contains("another secret"), "{why}");
    drop(first);
}

#[test]
fn pool_begins_again_after_its_last_member_has_left() {
    let Some(redis) = RedisServer::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (config, one) = (config(dir.path(), &redis), store(dir.path(), "one"));
    for _ in 0..2 {
        let first = join_in(&config, &one).unwrap();
        assert!(first.membership.end_registry() && first.membership.leave(LEASE * 4));
        super::super::remove(&one, first.made.as_deref().unwrap());
        assert_eq!(redis.cli(&["DBSIZE"]), "0");
    }
}

#[test]
fn password_that_others_can_read_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("password");
    fs::write(&path, "word\n").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    let why = place("redis://a", Some(&path)).map(drop).unwrap_err().to_string();
    assert!(why.contains("0600") && !why.contains("word\n"), "{why}");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(place("redis://a", Some(&path)).unwrap().password, "word");
}
