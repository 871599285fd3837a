//! A small cluster: two servers with half of the slots each, and a replica of the one that has the keys.

use std::time::{Duration, Instant};

use super::RedisServer;

/// Of every store here.
pub const TAG: &str = "{project}";

pub struct RedisCluster {
    /// Has the keys with the tag.
    pub owner: RedisServer,
    /// Has those of the other slots.
    pub other: RedisServer,
    /// Follows the owner.
    pub replica: RedisServer,
}

impl RedisCluster {
    /// `None`: it is not installed, and this is not CI.
    pub fn start() -> Option<Self> {
        let start = || RedisServer::start_with(&["--cluster-enabled", "yes", "--cluster-node-timeout", "30000"]);
        let cluster = Self { owner: start()?, other: start()?, replica: start()? };
        let slot: u16 = cluster.owner.cli(&["CLUSTER", "KEYSLOT", TAG]).parse().unwrap();
        let halves = [["0", "8191"], ["8192", "16383"]];
        let [of_owner, of_other] = if slot < 8192 { halves } else { [halves[1], halves[0]] };
        cluster.owner.cli(&[&["CLUSTER", "ADDSLOTSRANGE"][..], &of_owner].concat());
        cluster.other.cli(&[&["CLUSTER", "ADDSLOTSRANGE"][..], &of_other].concat());
        for server in [&cluster.other, &cluster.replica] {
            cluster.owner.cli(&["CLUSTER", "MEET", "127.0.0.1", &server.port().to_string()]);
        }
        let all = [&cluster.owner, &cluster.other, &cluster.replica];
        eventually("all know each other", || all.iter().all(|server| info(server, "cluster_known_nodes") == "3"));
        let owner = id(&cluster.owner);
        eventually("it follows", || cluster.replica.cli(&["CLUSTER", "REPLICATE", &owner]) == "OK");
        cluster.is_whole();
        let follows = || cluster.owner.cli(&["INFO", "replication"]).contains("state=online");
        eventually("the replica has everything", follows);
        Some(cluster)
    }

    /// All slots are served.
    pub fn is_whole(&self) {
        let all = [&self.owner, &self.other, &self.replica];
        eventually("the cluster is whole", || all.iter().all(|server| info(server, "cluster_state") == "ok"));
    }

    /// The replica takes the place of an owner that is gone.
    pub fn take_over(&self) {
        self.replica.cli(&["CLUSTER", "FAILOVER", "TAKEOVER"]);
        let leads = || self.replica.cli(&["INFO", "replication"]).contains("role:master");
        eventually("it leads", leads);
    }

    /// The first half of moving the keys: whoever asks for one is told that it may be elsewhere.
    pub fn begin_move(&self) -> String {
        let slot = self.owner.cli(&["CLUSTER", "KEYSLOT", TAG]);
        self.other.cli(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &id(&self.owner)]);
        self.owner.cli(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &id(&self.other)]);
        slot
    }

    /// At most so many of those that are meant.
    pub fn move_keys(&self, slot: &str, count: usize, meant: impl Fn(&str) -> bool) -> usize {
        let keys = self.owner.cli(&["CLUSTER", "GETKEYSINSLOT", slot, "10000"]);
        let keys: Vec<&str> = keys.lines().filter(|key| !key.is_empty() && meant(key)).take(count).collect();
        for key in &keys {
            let port = self.other.port().to_string();
            assert_eq!(self.owner.cli(&["MIGRATE", "127.0.0.1", &port, key, "0", "5000"]), "OK", "{key}");
        }
        keys.len()
    }

    pub fn end_move(&self, slot: &str) {
        for server in [&self.other, &self.owner] {
            server.cli(&["CLUSTER", "SETSLOT", slot, "NODE", &id(&self.other)]);
        }
    }
}

fn id(server: &RedisServer) -> String {
    server.cli(&["CLUSTER", "MYID"])
}

fn info(server: &RedisServer, field: &str) -> String {
    let told = server.cli(&["CLUSTER", "INFO"]);
    let value = told.lines().find_map(|line| line.trim_end().strip_prefix(field)?.strip_prefix(':'));
    value.unwrap_or_default().to_owned()
}

pub fn eventually(what: &str, so: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !so() {
        assert!(Instant::now() < until, "not in a minute: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
