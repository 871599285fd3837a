//! The driver against a real HDFS.

#[path = "../../../tests/hdfs_server/mod.rs"]
mod hdfs_server;

use std::cell::Cell;
use std::time::Duration;

use hdfs_server::HdfsServer;

use super::{Place, WebHdfs};
use crate::model::{Kind, Timestamp};
use crate::store::conformance::{
    self, deliver, errno, make_dir, me, meta, names, no_gate, noise, path, read, source, staged,
};
use crate::store::{Expect, Meta, Source, Store, Verify, verdict};

fn open(server: &HdfsServer, user: &str, at: &str, ttl: Duration) -> WebHdfs {
    WebHdfs::open(Place::parse(&server.url(user, at)).unwrap(), ttl).unwrap()
}

/// One server for all: it takes a while to start.
#[test]
fn against_a_real_hdfs() {
    let Some(server) = HdfsServer::start() else { return };
    conforms(&server, &hdfs_server::superuser());
    // Who is no superuser is held to every mode.
    conforms(&server, "ann");
}

fn conforms(server: &HdfsServer, user: &str) {
    let nth = Cell::new(0);
    conformance::conform(|| {
        nth.set(nth.get() + 1);
        Box::new(open(server, user, &format!("{user}/case {}", nth.get()), Duration::from_secs(60)))
    });
    assert!(nth.get() > 15, "{} cases", nth.get());
}
