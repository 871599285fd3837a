//! etcd: an exchange is one transaction, over the JSON gateway of its version 3 interface.
//!
//! etcd loses no write that it has answered. So its identity changes only if its data are restored from a copy, which
//! makes a new cluster.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use ureq::Agent;

use super::exchange::{Exchange, Exchanged, Key, Read, Server, Write};
use super::place::Place;

/// So long one server may take to answer.
const ANSWER: Duration = Duration::from_millis(1500);
/// A server refuses more than 128 operations in one transaction.
const WRITES_MAX: usize = 100;
/// An answer is at most so long.
const ANSWER_BYTES_MAX: u64 = 1 << 30;

/// A pool's rows in etcd.
pub struct Etcd {
    place: Place,
    prefix: Vec<u8>,
    agent: Agent,
    /// The server that answered last.
    at: usize,
    /// A sign that the user is known.
    token: Option<String>,
}

impl Etcd {
    /// Of the pool with this name.
    pub fn new(place: Place, pool: &str) -> Self {
        let config = Agent::config_builder().timeout_global(Some(ANSWER)).http_status_as_error(false);
        let prefix = format!("surgetank/{pool}/").into_bytes();
        Self { place, prefix, agent: config.build().into(), at: 0, token: None }
    }

    fn post(&self, path: &str, body: &Value) -> io::Result<Value> {
        let (host, port) = self.place.hosts.get(self.at).ok_or(ErrorKind::InvalidInput)?;
        let scheme = if self.place.tls { "https" } else { "http" };
        let host = if host.contains(':') { format!("[{host}]") } else { host.clone() };
        let mut request = self.agent.post(format!("{scheme}://{host}:{port}/v3/{path}"));
        if let Some(token) = &self.token {
            request = request.header("Authorization", token);
        }
        let sent = request.header("Content-Type", "application/json").send(body.to_string());
        let mut answer = sent.map_err(|why| {
            let why = why.into_io();
            let kind = if why.kind() == ErrorKind::ConnectionRefused { why.kind() } else { ErrorKind::TimedOut };
            io::Error::new(kind, why)
        })?;
        let status = answer.status().as_u16();
        let text = answer.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_to_string();
        let value: Value = serde_json::from_str(&text.map_err(ureq::Error::into_io)?).unwrap_or_default();
        if status == 200 {
            return Ok(value);
        }
        let why = value["error"].as_str().unwrap_or_default().to_owned();
        let denied = ["authentication", "user name is empty", "permission denied", "invalid auth token"];
        let is_denied = status == 401 || status == 403 || denied.iter().any(|part| why.contains(part));
        let kind = if is_denied { ErrorKind::PermissionDenied } else { ErrorKind::TimedOut };
        Err(io::Error::new(kind, format!("etcd answers {status}: {why}")))
    }

    fn key(&self, key: &[u8]) -> String {
        STANDARD.encode([&self.prefix, key].concat())
    }

    fn transaction(&self, exchange: &Exchange) -> Value {
        let compare = |(key, value): &(Key, Option<Vec<u8>>)| match value {
            Some(value) => json!({"key": self.key(key), "target": "VALUE", "value": STANDARD.encode(value)}),
            None => json!({"key": self.key(key), "target": "CREATE", "create_revision": "0"}),
        };
        let write = |write: &Write| match write {
            Write::Put(key, value) => json!({"requestPut": {"key": self.key(key), "value": STANDARD.encode(value)}}),
            Write::Delete(key) => json!({"requestDeleteRange": {"key": self.key(key)}}),
            Write::DeleteRange(from, to) => {
                json!({"requestDeleteRange": {"key": self.key(from), "range_end": self.key(to)}})
            }
        };
        let read = |read: &Read| match read {
            Read::Key(key) => json!({"requestRange": {"key": self.key(key)}}),
            Read::Range(from, to) => json!({"requestRange": {"key": self.key(from), "range_end": self.key(to)}}),
        };
        let reads: Vec<Value> = exchange.reads.iter().map(read).collect();
        let done: Vec<Value> = exchange.writes.iter().map(write).chain(reads.iter().cloned()).collect();
        let compare: Vec<Value> = exchange.guards.iter().map(compare).collect();
        json!({"compare": compare, "success": done, "failure": reads})
    }

    /// The user proves its password.
    fn log_in(&mut self) -> io::Result<()> {
        if self.place.password.is_empty() || self.token.is_some() {
            return Ok(());
        }
        let body = json!({"name": self.place.user, "password": self.place.password});
        let answer = self.post("auth/authenticate", &body)?;
        self.token = answer["token"].as_str().map(str::to_owned);
        Ok(())
    }

    fn try_exchange(&mut self, exchange: &Exchange) -> io::Result<Exchanged> {
        self.log_in()?;
        let answer = self.post("kv/txn", &self.transaction(exchange))?;
        let strange = || io::Error::new(ErrorKind::InvalidData, "etcd gave a strange answer");
        let bytes = |value: &Value| STANDARD.decode(value.as_str().unwrap_or_default()).map_err(|_| strange());
        let mut rows = BTreeMap::new();
        for response in answer["responses"].as_array().into_iter().flatten() {
            let range = response.get("response_range").or_else(|| response.get("responseRange"));
            for row in range.and_then(|range| range["kvs"].as_array()).into_iter().flatten() {
                let key = bytes(&row["key"])?;
                let key = key.strip_prefix(&*self.prefix).ok_or_else(strange)?;
                rows.insert(key.to_vec(), bytes(&row["value"])?);
            }
        }
        let server = answer["header"]["cluster_id"].as_str().ok_or_else(strange)?.as_bytes().to_vec();
        let done = answer["succeeded"].as_bool().unwrap_or(false);
        Ok(Exchanged { done, rows, server, has_replicas: false, is_confirmed: false })
    }
}

impl Server for Etcd {
    fn exchange(&mut self, exchange: &Exchange) -> io::Result<Exchanged> {
        let exchanged = self.try_exchange(exchange);
        if exchanged.is_err() {
            // (Another one may reach the leader.)
            self.at = (self.at + 1) % self.place.hosts.len().max(1);
            self.token = None;
        }
        exchanged
    }

    fn writes_max(&self) -> usize {
        WRITES_MAX
    }
}
