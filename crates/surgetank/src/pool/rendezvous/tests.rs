//! Members that find each other through a temporary directory as the store.

use std::ffi::OsStr;
use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Barrier;

use surgetank_pool::Directory;
use surgetank_types::model::Role;
use tempfile::TempDir;

use super::*;

/// Of members that live. (A shorter one may end on a slow machine.)
const LONG_LEASE: Duration = Duration::from_secs(4);
/// Of members that are dead.
const LEASE: Duration = Duration::from_millis(600);

struct Idle;

impl Host for Idle {
    fn forget(&self, _: &Directory) {}
    fn expelled(&self) {}
}

/// A store, and the pool `flow` in it.
struct Scene {
    dir: TempDir,
    store: Meeting,
    config: PoolConfig,
    host: Arc<dyn Host>,
}

impl Scene {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = dir.path().join("store");
        fs::create_dir(&store).unwrap();
        let (name, secret) = ("flow".to_owned(), dir.path().join("pools/flow.1"));
        let config = PoolConfig {
            name,
            secret,
            host: "127.0.0.1".to_owned(),
            lease: LONG_LEASE,
            is_of_job: false,
            announcement: String::new(),
            registry: None,
            registry_password: None,
            role: Role::default(),
        };
        Self { store: Meeting::Directory(File::open(store).unwrap().into()), config, host: Arc::new(Idle), dir }
    }

    fn join(&self) -> io::Result<Joined> {
        join(&self.config, "key", &self.store, &self.host)
    }

    /// The error's text.
    fn fails(&self) -> String {
        match self.join() {
            Ok(joined) => {
                panic!("joined, with the file {:?}", joined.made.map(|name| String::from_utf8(name).unwrap()))
            }
            Err(why) => why.to_string(),
        }
    }

    fn path(&self, number: u64) -> PathBuf {
        self.dir.path().join("store").join(OsStr::from_bytes(&name_of(&self.config, number)))
    }

    fn write(&self, number: u64, text: &str) {
        fs::write(self.path(number), text).unwrap();
    }

    /// The file of a pool whose registry would be at this address.
    fn put(&self, number: u64, address: String, machine: Option<String>) {
        self.write(number, &Place { pool: [7; 16], address, machine, lease: LEASE }.text());
    }

    /// The names in the store behind the prefix of the project's files.
    fn names(&self) -> Vec<String> {
        let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
        let mut names: Vec<String> = fs::read_dir(self.dir.path().join("store")).unwrap().map(name).collect();
        names.sort();
        names
    }
}

fn is_made(joined: &Joined, scene: &Scene, number: u64) -> bool {
    joined.made.as_ref() == Some(&name_of(&scene.config, number))
}

/// As the registry in this member counts them.
fn members(first: &Joined) -> usize {
    first.membership.look_again();
    first.membership.members().len()
}

/// At which nothing listens. (The port of a listener that has ended could be given to another test.)
fn dead_address() -> String {
    "127.0.0.1:1".to_owned()
}

#[test]
fn live_registry_is_joined() {
    let scene = Scene::new();
    let first = scene.join().unwrap();
    let second = scene.join().unwrap();
    assert!(is_made(&first, &scene, 1) && first.membership.has_registry());
    assert!(second.made.is_none() && !second.membership.has_registry());
    assert_eq!(members(&first), 2);
    assert_eq!(scene.names(), [".surgetank-tmp-pool-flow.1"]);
    // Nothing is beside the secret.
    assert_eq!(fs::read_dir(scene.dir.path().join("pools")).unwrap().count(), 1);
}

#[test]
fn dead_first_member_gives_way_after_its_lease() {
    let mut scene = Scene::new();
    scene.config.lease = LEASE;
    // (No other test listens here, so the port stays closed.)
    scene.config.host = "127.9.8.7".to_owned();
    drop(scene.join().unwrap());
    scene.write(0, "what a dead pool left");
    let began = tick();
    let next = scene.join().unwrap();
    assert!(began.elapsed() >= LEASE, "{:?}", began.elapsed());
    assert!(is_made(&next, &scene, 2));
    assert_eq!(scene.names(), [".surgetank-tmp-pool-flow.2"]);
    scene.config.host = "127.0.0.1".to_owned();
    assert!(scene.join().unwrap().made.is_none());
}

#[test]
fn lease_of_the_dead_pool_is_awaited() {
    let mut scene = Scene::new();
    let lease = Duration::from_secs(3);
    scene.config.lease = lease;
    let place = Place { pool: [7; 16], address: dead_address(), machine: machine(), lease };
    scene.write(4, &place.text());
    let mut search = search_of(&scene);
    assert!(search.step().unwrap().is_none());
    let since = search.refused_since.unwrap();
    assert!(since.elapsed() >= lease, "{:?}", since.elapsed());
    assert!(is_made(&search.step().unwrap().unwrap(), &scene, 5));
}

fn search_of(scene: &Scene) -> Search<'_> {
    Search {
        config: &scene.config,
        temporaries: "key",
        store: &scene.store,
        host: &scene.host,
        secret: secret(&scene.config.secret).unwrap(),
        machine: machine(),
        tries: 0,
        tried: None,
        ending_until: tick() + ENDING,
        silent_since: None,
        refused_since: None,
    }
}

#[test]
fn file_that_goes_during_the_lease_ends_the_wait() {
    let mut scene = Scene::new();
    scene.config.lease = Duration::from_secs(60);
    let place = Place { pool: [7; 16], address: dead_address(), machine: machine(), lease: Duration::from_secs(60) };
    scene.write(1, &place.text());
    let began = tick();
    let joined = thread::scope(|scope| {
        let joins = scope.spawn(|| scene.join().unwrap());
        thread::sleep(ANSWER + Duration::from_secs(1));
        fs::remove_file(scene.path(1)).unwrap();
        joins.join().unwrap()
    });
    assert!(is_made(&joined, &scene, 1) && began.elapsed() < Duration::from_secs(30));
}

#[test]
fn silent_first_member_fails_the_join_and_keeps_its_file() {
    let mut scene = Scene::new();
    scene.config.lease = LEASE;
    // As a process that is stopped: the kernel accepts.
    let stopped = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = stopped.local_addr().unwrap().to_string();
    scene.put(1, address.clone(), machine());
    let text = scene.fails();
    for part in [&*address, "file .surgetank-tmp-pool-flow.1", "may still serve", "start this again", "remove the file"]
    {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert_eq!(scene.names(), [".surgetank-tmp-pool-flow.1"]);
}

#[test]
fn loopback_address_of_another_machine_is_refused() {
    let mut scene = Scene::new();
    scene.config.lease = LEASE;
    for machine in [Some("another-boot/1".to_owned()), None] {
        scene.put(1, dead_address(), machine);
        let text = scene.fails();
        assert!(text.contains("reaches this machine itself") && text.contains("--pool-host"), "{text}");
    }
    assert_eq!(scene.names(), [".surgetank-tmp-pool-flow.1"]);
}

#[test]
fn stranger_at_the_address_is_not_replaced() {
    let (mut scene, other) = (Scene::new(), Scene::new());
    let _first = other.join().unwrap();
    let text = fs::read_to_string(other.path(1)).unwrap();
    scene.write(1, &text);
    scene.config.secret = scene.dir.path().join("other");
    let text = scene.fails();
    assert!(text.contains("refused") && text.contains("the same secret"), "{text}");
    assert_eq!(scene.names(), [".surgetank-tmp-pool-flow.1"]);
}

#[test]
fn file_that_is_removed_after_the_listing_is_absent() {
    let scene = Scene::new();
    let search = search_of(&scene);
    assert_eq!(search.read(1).unwrap(), None);
    let started = Barrier::new(2);
    let is_over = std::sync::atomic::AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let address = dead_address();
            started.wait();
            while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                let text = Place { pool: [7; 16], address: address.clone(), machine: machine(), lease: LEASE }.text();
                assert!(scene.store.publish(&name_of(&scene.config, 1), text.as_bytes()).unwrap());
                remove(&scene.store, &name_of(&scene.config, 1));
            }
        });
        started.wait();
        for _ in 0..2000 {
            search.read(1).unwrap();
        }
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn damaged_file_is_named_with_a_remedy() {
    let scene = Scene::new();
    let whole = Place { pool: [7; 16], address: dead_address(), machine: machine(), lease: LEASE }.text();
    let cut = &whole[..whole.len() - 3];
    let other = whole.replace(' ', "  ");
    for text in ["", cut, "\n", "07 a:1 - 5\n", &other, &format!("{whole}{whole}"), &"x".repeat(5000)] {
        scene.write(1, text);
        let error = scene.fails();
        let is_named = error.contains("file .surgetank-tmp-pool-flow.1 in the store is damaged");
        assert!(is_named && error.contains("remove the file"), "{error}");
    }
    fs::remove_file(scene.path(1)).unwrap();
    fs::create_dir(scene.path(1)).unwrap();
    assert!(scene.fails().contains(".surgetank-tmp-pool-flow.1 in the store"));
}

#[test]
fn file_that_is_being_written_is_awaited() {
    let scene = Scene::new();
    let first = scene.join().unwrap();
    let text = fs::read_to_string(scene.path(1)).unwrap();
    scene.write(1, "");
    let joined = thread::scope(|scope| {
        let joins = scope.spawn(|| scene.join().unwrap());
        thread::sleep(Duration::from_millis(300));
        scene.write(1, &text);
        joins.join().unwrap()
    });
    assert!(joined.made.is_none());
    assert_eq!(members(&first), 2);
}

#[test]
fn one_of_two_joiners_at_once_makes_the_file() {
    for round in 0..20 {
        let scene = Scene::new();
        let start = Barrier::new(2);
        let joins = || {
            start.wait();
            scene.join().unwrap()
        };
        let both = thread::scope(|scope| {
            let (one, two) = (scope.spawn(joins), scope.spawn(joins));
            [one.join().unwrap(), two.join().unwrap()]
        });
        assert_eq!(both.iter().filter(|joined| is_made(joined, &scene, 1)).count(), 1, "round {round}");
        assert_eq!(both.iter().filter(|joined| joined.made.is_none()).count(), 1, "round {round}");
        assert_eq!(scene.names(), [".surgetank-tmp-pool-flow.1"]);
        for joined in both.iter().filter(|joined| joined.made.is_some()) {
            assert_eq!(members(joined), 2, "round {round}");
        }
    }
}

#[test]
fn one_of_two_joiners_after_a_death_begins_the_next_pool() {
    let mut scene = Scene::new();
    scene.config.lease = LEASE;
    scene.put(1, dead_address(), machine());
    let both = thread::scope(|scope| {
        let (one, two) = (scope.spawn(|| scene.join().unwrap()), scope.spawn(|| scene.join().unwrap()));
        [one.join().unwrap(), two.join().unwrap()]
    });
    let mut made: Vec<Option<String>> =
        both.into_iter().map(|joined| Some(String::from_utf8(joined.made?).unwrap())).collect();
    made.sort();
    assert_eq!(made, [None, Some(".surgetank-tmp-pool-flow.2".to_owned())]);
    assert_eq!(scene.names(), [".surgetank-tmp-pool-flow.2"]);
}

#[test]
fn ended_registry_is_awaited_until_its_file_goes() {
    let scene = Scene::new();
    let first = scene.join().unwrap();
    assert!(first.membership.end_registry());
    let began = tick();
    let next = thread::scope(|scope| {
        let joins = scope.spawn(|| scene.join().unwrap());
        thread::sleep(Duration::from_millis(200));
        remove(&scene.store, &first.made.clone().unwrap());
        joins.join().unwrap()
    });
    assert!(is_made(&next, &scene, 1) && next.membership.has_registry());
    assert!(began.elapsed() >= Duration::from_millis(200));
}

// A user removes the file of a dead pool, and another member begins a pool with its number.
#[test]
fn second_file_of_a_live_pool_is_withdrawn() {
    let scene = Scene::new();
    let dead = Place { pool: [7; 16], address: dead_address(), machine: machine(), lease: LEASE };
    let live = scene.join().unwrap();
    let mut search = search_of(&scene);
    // It read the file with the same number before.
    assert!(search.begin(2, Some(&dead), &BTreeSet::from([1])).unwrap().is_none());
    assert_eq!(scene.names(), [".surgetank-tmp-pool-flow.1"]);
    // It saw no file with a lower number.
    assert!(search.begin(4, Some(&dead), &BTreeSet::from([3])).unwrap().is_none());
    assert_eq!(scene.names(), [".surgetank-tmp-pool-flow.1"]);
    assert!(is_made(&live, &scene, 1) && scene.join().unwrap().made.is_none());
}

#[test]
fn left_temporaries_are_no_pools_and_are_swept() {
    let scene = Scene::new();
    let store = scene.dir.path().join("store");
    let swept = ".surgetank-tmp-pool-flow.9.0123456789abcdef.new";
    let kept = [
        ".surgetank-tmp-pool-flow.+5",
        ".surgetank-tmp-pool-flow.007",
        ".surgetank-tmp-pool-flow.2.3",
        ".surgetank-tmp-pool-flow.2.3.0123456789abcdef.new",
        ".surgetank-tmp-pool-flow.x.0123456789abcdef.new",
    ];
    for name in kept.iter().chain([&swept]) {
        fs::write(store.join(name), "").unwrap();
    }
    assert!(is_made(&scene.join().unwrap(), &scene, 1));
    assert!(!store.join(swept).exists());
    assert!(kept.iter().all(|name| store.join(name).exists()), "{:?}", scene.names());
}

#[test]
fn file_is_made_once_with_and_without_links() {
    let scene = Scene::new();
    let dir = File::open(scene.path(1).parent().unwrap()).unwrap();
    let name = name_of(&scene.config, 1);
    for make in [publish, meeting::publish_without_links] {
        assert!(make(dir.as_fd(), &name, b"one\n").unwrap());
        assert!(!make(dir.as_fd(), &name, b"two\n").unwrap());
        assert_eq!(fs::read(scene.path(1)).unwrap(), b"one\n");
        assert_eq!(scene.names(), [".surgetank-tmp-pool-flow.1"]);
        fs::remove_file(scene.path(1)).unwrap();
    }
}

#[test]
fn secret_is_made_once_by_processes_at_once() {
    let scene = Scene::new();
    let secrets: Vec<Secret> = thread::scope(|scope| {
        let makes = (0..8).map(|_| scope.spawn(|| secret(&scene.config.secret).unwrap())).collect::<Vec<_>>();
        makes.into_iter().map(|makes| makes.join().unwrap()).collect()
    });
    assert!(secrets.iter().all(|secret| *secret == secrets[0]));
    assert_eq!(fs::read_dir(scene.dir.path().join("pools")).unwrap().count(), 1);
}
