//! Redis and Valkey, with or without Sentinel: an exchange is one script.
//!
//! A pool has two keys: a hash with its rows, and a sorted set with their names, for ranges. The script runs alone in the
//! server, so an exchange is whole. What the server loses when it fails is the business of [`super::eras`]: its identity is
//! that of its process and of its history (`run_id`, `master_replid`). Each promotion changes the second.
//!
//! With replicas, an exchange that asks for it waits until one has its writes (`WAIT`). Only renewals need that. A claim
//! at a server whose replica was promoted meanwhile ends with the lease, which no renewal lengthens.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::time::{Duration, Instant};

use redis::{
    Client, Connection, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisConnectionInfo, RedisError, Script,
    Value,
};
use surgetank_types::clock::tick;

use super::exchange::{Exchange, Exchanged, Key, Read, Server, Write};
use super::place::{Kind, Place};

/// So long the server may take to answer.
const ANSWER: Duration = Duration::from_secs(1);
/// So long a replica may take.
const REPLICA: Duration = Duration::from_millis(500);
/// So often the server is asked whether it has replicas.
const LOOK: Duration = Duration::from_secs(5);
/// A script gets at most so many words.
const WRITES_MAX: usize = 100_000;

const SCRIPT: &str = r"
local rows, names, at = KEYS[1], KEYS[2], 1
local function word() at = at + 1; return ARGV[at - 1] end
local function within(from, to) return redis.call('ZRANGEBYLEX', names, '[' .. from, '(' .. to) end
local done = 1
for _ = 1, tonumber(word()) do
    local key, is_present, value = word(), word(), word()
    local now = redis.call('HGET', rows, key)
    if is_present == '1' then
        if now ~= value then done = 0 end
    elseif now then
        done = 0
    end
end
for _ = 1, tonumber(word()) do
    local kind, key, value = word(), word(), word()
    if done == 1 then
        if kind == 'p' then
            redis.call('HSET', rows, key, value)
            redis.call('ZADD', names, 0, key)
        elseif kind == 'd' then
            redis.call('HDEL', rows, key)
            redis.call('ZREM', names, key)
        else
            for _, name in ipairs(within(key, value)) do
                redis.call('HDEL', rows, name)
                redis.call('ZREM', names, name)
            end
        end
    end
end
local found = {done}
local function add(key)
    local value = redis.call('HGET', rows, key)
    if value then
        found[#found + 1] = key
        found[#found + 1] = value
    end
end
for _ = 1, tonumber(word()) do
    local kind, from, to = word(), word(), word()
    if kind == 'k' then
        add(from)
    else
        for _, name in ipairs(within(from, to)) do add(name) end
    end
end
return found
";

/// A pool's rows in Redis.
pub struct Redis {
    place: Place,
    names: [String; 2],
    script: Script,
    live: Option<Live>,
}

struct Live {
    connection: Connection,
    server: Vec<u8>,
    has_replicas: bool,
    looked: Instant,
}

impl Redis {
    /// Of the pool with this name. Connects at the first exchange.
    pub fn new(place: Place, pool: &str) -> Self {
        let names = ["", ":names"].map(|what| format!("surgetank:{{{pool}}}{what}"));
        Self { place, names, script: Script::new(SCRIPT), live: None }
    }

    fn connect(&self, (host, port): &(String, u16), settings: RedisConnectionInfo) -> io::Result<Connection> {
        let (host, port) = (host.clone(), *port);
        let tls = self.place.tls && !matches!(self.place.kind, Kind::Sentinel(_));
        let address = if tls {
            ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None }
        } else {
            ConnectionAddr::Tcp(host, port)
        };
        let info: ConnectionInfo = address.into_connection_info().map_err(failed)?;
        let client = Client::open(info.set_redis_settings(settings)).map_err(failed)?;
        let connection = client.get_connection_with_timeout(ANSWER).map_err(failed)?;
        connection.set_read_timeout(Some(ANSWER)).map_err(failed)?;
        connection.set_write_timeout(Some(ANSWER)).map_err(failed)?;
        Ok(connection)
    }

    fn settings(&self) -> RedisConnectionInfo {
        let database = if let Kind::Redis(database) = self.place.kind { database } else { 0 };
        let mut settings = RedisConnectionInfo::default().set_db(database).set_skip_set_lib_name();
        if !self.place.password.is_empty() {
            if !self.place.user.is_empty() {
                settings = settings.set_username(&self.place.user);
            }
            settings = settings.set_password(&self.place.password);
        }
        settings
    }

    /// The present master, as the sentinels say.
    fn master(&self, name: &str) -> io::Result<(String, u16)> {
        let mut why = io::Error::new(ErrorKind::NotFound, "no sentinel is named");
        for sentinel in &self.place.hosts {
            let plain = RedisConnectionInfo::default().set_skip_set_lib_name();
            let asked = self.connect(sentinel, plain).and_then(|mut connection| {
                let mut ask = redis::cmd("SENTINEL");
                ask.arg("get-master-addr-by-name").arg(name);
                let found: Option<(String, u16)> = ask.query(&mut connection).map_err(failed)?;
                let unknown = || io::Error::new(ErrorKind::NotFound, format!("the sentinels know no master '{name}'"));
                found.ok_or_else(unknown)
            });
            match asked {
                Ok(master) => return Ok(master),
                Err(error) => why = error,
            }
        }
        Err(why)
    }

    fn live(&mut self) -> io::Result<&mut Live> {
        if let Some(live) = self.live.as_mut().filter(|live| tick() >= live.looked + LOOK) {
            (live.server, live.has_replicas) = identity(&mut live.connection)?;
            live.looked = tick();
        }
        let live = match self.live.take() {
            Some(live) => live,
            None => {
                let address = match &self.place.kind {
                    Kind::Sentinel(name) => self.master(name)?,
                    _ => self.place.hosts.first().cloned().ok_or(ErrorKind::InvalidInput)?,
                };
                let mut connection = self.connect(&address, self.settings())?;
                let (server, has_replicas) = identity(&mut connection)?;
                Live { connection, server, has_replicas, looked: tick() }
            }
        };
        Ok(self.live.insert(live))
    }

    fn try_exchange(&mut self, exchange: &Exchange) -> io::Result<Exchanged> {
        let [rows, names] = self.names.clone();
        let script = self.script.clone();
        let live = self.live()?;
        if let Some(wanted) = &exchange.only_at {
            (live.server, live.has_replicas) = identity(&mut live.connection)?;
            if *wanted != live.server {
                return Err(io::Error::new(ErrorKind::ConnectionReset, "the server is another one now"));
            }
        }
        let mut invocation = script.prepare_invoke();
        invocation.key(rows).key(names);
        invocation.arg(exchange.guards.len());
        for (key, value) in &exchange.guards {
            invocation.arg(&key[..]).arg(u8::from(value.is_some())).arg(value.as_deref().unwrap_or_default());
        }
        invocation.arg(exchange.writes.len());
        for write in &exchange.writes {
            match write {
                Write::Put(key, value) => invocation.arg("p").arg(&key[..]).arg(&value[..]),
                Write::Delete(key) => invocation.arg("d").arg(&key[..]).arg(""),
                Write::DeleteRange(from, to) => invocation.arg("r").arg(&from[..]).arg(&to[..]),
            };
        }
        invocation.arg(exchange.reads.len());
        for read in &exchange.reads {
            match read {
                Read::Key(key) => invocation.arg("k").arg(&key[..]).arg(""),
                Read::Range(from, to) => invocation.arg("r").arg(&from[..]).arg(&to[..]),
            };
        }
        let found: Vec<Value> = invocation.invoke(&mut live.connection).map_err(failed)?;
        let (done, rows) = parse(found)?;
        let mut is_confirmed = false;
        if exchange.confirm && done && live.has_replicas {
            let mut wait = redis::cmd("WAIT");
            let replicas: u64 =
                wait.arg(1).arg(REPLICA.as_millis() as u64).query(&mut live.connection).map_err(failed)?;
            is_confirmed = replicas > 0;
        }
        let (server, has_replicas) = (live.server.clone(), live.has_replicas);
        Ok(Exchanged { done, rows, server, has_replicas, is_confirmed })
    }
}

impl Server for Redis {
    fn exchange(&mut self, exchange: &Exchange) -> io::Result<Exchanged> {
        let exchanged = self.try_exchange(exchange);
        if exchanged.is_err() {
            self.live = None;
        }
        exchanged
    }

    fn writes_max(&self) -> usize {
        WRITES_MAX
    }
}

/// Which history the server has, and whether it has replicas.
///
/// Errors: it is a replica itself.
fn identity(connection: &mut Connection) -> io::Result<(Vec<u8>, bool)> {
    let mut ask =
        |section: &str| -> io::Result<String> { redis::cmd("INFO").arg(section).query(connection).map_err(failed) };
    let (server, replication) = (ask("server")?, ask("replication")?);
    let field = |text: &str, name: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        value.map(|value| value.trim().to_owned()).unwrap_or_default()
    };
    if field(&replication, "role") != "master" {
        return Err(io::Error::new(ErrorKind::ConnectionReset, "the server is a replica"));
    }
    let identity = format!("{} {}", field(&server, "run_id"), field(&replication, "master_replid"));
    let replicas = field(&replication, "connected_slaves");
    Ok((identity.into_bytes(), !matches!(&*replicas, "" | "0")))
}

fn parse(found: Vec<Value>) -> io::Result<(bool, BTreeMap<Key, Vec<u8>>)> {
    let strange = || io::Error::new(ErrorKind::InvalidData, "the server gave a strange answer");
    let mut found = found.into_iter();
    let Some(Value::Int(done)) = found.next() else { return Err(strange()) };
    let mut rows = BTreeMap::new();
    while let Some(key) = found.next() {
        let (Value::BulkString(key), Some(Value::BulkString(value))) = (key, found.next()) else {
            return Err(strange());
        };
        rows.insert(key, value);
    }
    Ok((done == 1, rows))
}

/// A wrong password is `PermissionDenied`.
fn failed(why: RedisError) -> io::Error {
    let denied = ["WRONGPASS", "NOAUTH", "NOPERM"];
    let is_denied =
        why.kind() == redis::ErrorKind::AuthenticationFailed || why.code().is_some_and(|code| denied.contains(&code));
    let kind = if is_denied {
        ErrorKind::PermissionDenied
    } else if why.is_connection_refusal() {
        ErrorKind::ConnectionRefused
    } else {
        ErrorKind::TimedOut
    };
    io::Error::new(kind, why.to_string())
}
