//! A small Redis cluster: two servers with half of the slots each, and a replica of the one that has the keys.

use std::time::{Duration, Instant};

use super::RedisServer;

/// Hash tag of every store in the cluster, which puts its keys into one slot.
pub const TAG: &str = "{project}";

/// A cluster of three servers.
pub struct RedisCluster {
    /// The server of the slot of [`TAG`].
    pub owner: RedisServer,
    /// The server of the other half of the slots.
    pub other: RedisServer,
    /// The replica of `owner`.
    pub replica: RedisServer,
}

impl RedisCluster {
    /// Starts the cluster and waits until it is complete. `None` if Redis is not installed (except under CI).
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

    /// Waits until all slots are served.
    pub fn is_whole(&self) {
        let all = [&self.owner, &self.other, &self.replica];
        eventually("the cluster is whole", || all.iter().all(|server| info(server, "cluster_state") == "ok"));
    }

    /// Makes the replica the owner after the owner was killed.
    pub fn take_over(&self) {
        self.replica.cli(&["CLUSTER", "FAILOVER", "TAKEOVER"]);
        let leads = || self.replica.cli(&["INFO", "replication"]).contains("role:master");
        eventually("it leads", leads);
    }

    /// Begins to move the keys to `other`: from now on `owner` redirects requests for absent keys. Returns the slot.
    pub fn begin_move(&self) -> String {
        let slot = self.owner.cli(&["CLUSTER", "KEYSLOT", TAG]);
        self.other.cli(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &id(&self.owner)]);
        self.owner.cli(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &id(&self.other)]);
        slot
    }

    /// Moves at most `count` keys for which `meant` is true. Returns their number.
    pub fn move_keys(&self, slot: &str, count: usize, meant: impl Fn(&str) -> bool) -> usize {
        let keys = self.owner.cli(&["CLUSTER", "GETKEYSINSLOT", slot, "10000"]);
        let keys: Vec<&str> = keys.lines().filter(|key| !key.is_empty() && meant(key)).take(count).collect();
        for key in &keys {
            let port = self.other.port().to_string();
            assert_eq!(self.owner.cli(&["MIGRATE", "127.0.0.1", &port, key, "0", "5000"]), "OK", "{key}");
        }
        keys.len()
    }

    /// Ends the move of the slot: `other` now serves it.
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
    let output = server.cli(&["CLUSTER", "INFO"]);
    let value = output.lines().find_map(|line| line.trim_end().strip_prefix(field)?.strip_prefix(':'));
    value.unwrap_or_default().to_owned()
}

/// Waits until `so` is true. Panics after a minute, with `what`.
pub fn eventually(what: &str, so: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !so() {
        assert!(Instant::now() < until, "not in a minute: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
