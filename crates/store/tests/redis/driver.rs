//! Helpers of the driver's tests.

#![allow(dead_code)]

use std::collections::BTreeSet;
use std::io::Read;
use std::time::Duration;

use surgetank_store::checksum::of_bytes;
use surgetank_store::object::{Objects, When, Words};
use surgetank_store::redis::{Place, Redis};

use surgetank_testkit::servers::redis::RedisServer;

pub const MIB: usize = 1 << 20;
pub const PART: usize = 16 * MIB;
pub const WRONG: &str = "0123456789abcdef";

pub fn place(server: &RedisServer, prefix: &str) -> Place {
    let mut place = Place::parse(&server.url(prefix)).unwrap();
    place.limits.scan = Duration::ZERO;
    place
}

pub fn open(server: &RedisServer, prefix: &str) -> Redis {
    Redis::open(place(server, prefix)).unwrap_or_else(|why| panic!("{why}"))
}

pub fn words(pairs: &[(&str, &str)]) -> Words {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

pub fn put(store: &Redis, key: &str, content: &[u8], when: When<'_>) -> std::io::Result<String> {
    store.put(key, &content, of_bytes(content), &Words::new(), when)
}

pub fn get(store: &Redis, key: &str, range: std::ops::Range<u64>) -> Vec<u8> {
    let mut content = Vec::new();
    store.get(key, range, None).unwrap().read_to_end(&mut content).unwrap();
    content
}

pub fn errno<T>(result: std::io::Result<T>) -> Option<i32> {
    result.err().and_then(|why| why.raw_os_error())
}

/// Bytes that depend on their offset.
pub fn pattern(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bytes.extend_from_slice(&(state >> 11).to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// Keys and prefixes of all pages, each of them once and in order.
pub fn all(store: &Redis, prefix: &str, delimited: bool) -> (BTreeSet<String>, BTreeSet<String>) {
    let (mut keys, mut prefixes, mut from) = (Vec::new(), Vec::new(), None);
    loop {
        let page = store.list(prefix, delimited, from.as_deref()).unwrap();
        keys.extend(page.objects.into_iter().map(|object| object.key));
        prefixes.extend(page.prefixes);
        from = page.next;
        if from.is_none() {
            break;
        }
    }
    assert!(keys.is_sorted() && prefixes.is_sorted(), "not in the order of their bytes");
    let (count, sets) = (keys.len() + prefixes.len(), (BTreeSet::from_iter(keys), BTreeSet::from_iter(prefixes)));
    assert_eq!(count, sets.0.len() + sets.1.len(), "something is listed twice");
    sets
}

pub fn keys(server: &RedisServer) -> BTreeSet<String> {
    server.cli(&["KEYS", "*"]).lines().filter(|key| !key.is_empty()).map(str::to_owned).collect()
}
