//! The place of a store of values: `redis://[USER@]HOST[:PORT][,HOST[:PORT]…][/DB][?prefix=P&password_file=PATH]`, or
//! `rediss://` over TLS. Several hosts belong to one cluster.
//!
//! The danger that it avoids: a password in a URL ends up in logs, process lists and messages. A URL with a password is
//! refused; the password comes from the variable that `redis-cli` uses (`REDISCLI_AUTH`) or from a file.

use std::path::{Path, PathBuf};
use std::time::Duration;

use percent_encoding::percent_decode_str;
use redis::io::tcp::TcpSettings;
use redis::{ConnectionAddr, IntoConnectionInfo, RedisConnectionInfo};

use super::nodes::Node;
use surgetank_types::error::{Error, Result};

const PORT: u16 = 6379;
/// Keys of the URL's query.
const KEYS: [&str; 3] = ["authority_file", "password_file", "prefix"];

/// A store on a Redis server or cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The first server is asked, and the others while it does not answer.
    pub nodes: Vec<Node>,
    /// Whether connections use TLS.
    pub tls: bool,
    /// Number of the data base.
    pub db: u32,
    /// User name; `None` for the default user.
    pub user: Option<String>,
    /// Prefix of every key, before the path.
    pub prefix: String,
    /// File with the password, instead of `REDISCLI_AUTH`.
    pub password_file: Option<PathBuf>,
    /// PEM file with the only trusted authority.
    pub authority_file: Option<PathBuf>,
    /// Time limits.
    pub limits: Limits,
}

/// Limits of waiting, for a server and between tries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Longest time to connect.
    pub connect: Duration,
    /// Longest time without any progress.
    pub progress: Duration,
    /// Most tries of a request.
    pub tries: u32,
    /// Pause after the first try, tripled after each further one; a random part of it is used.
    pub pause: Duration,
    /// Time after which no new try starts.
    pub all_tries: Duration,
    /// Shortest time between two searches for other clients' keys; a search that took longer extends it to fifty times its
    /// duration.
    pub scan: Duration,
    /// Time after a change of server for which nothing that was acknowledged before counts as durable.
    pub doubt: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(5),
            progress: Duration::from_secs(60),
            tries: 5,
            pause: Duration::from_millis(100),
            all_tries: Duration::from_secs(10),
            scan: Duration::from_secs(1),
            doubt: Duration::from_secs(15),
        }
    }
}

impl Place {
    /// Parses a URL. Errors: it is not understood, or contains a password.
    pub fn parse(url: &str) -> Result<Self> {
        let wrong = |why: &str| {
            Error::new("the URL of the store is not understood")
                .why(why)
                .remedy("redis://USER@HOST:PORT/DB?prefix=PREFIX")
        };
        let (tls, rest) = match (url.strip_prefix("redis://"), url.strip_prefix("rediss://")) {
            (Some(rest), _) => (false, rest),
            (_, Some(rest)) => (true, rest),
            _ => return Err(wrong("it begins neither with redis:// nor with rediss://")),
        };
        let (front, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, db) = front.split_once('/').unwrap_or((front, ""));
        let (user, address) = match authority.rsplit_once('@') {
            Some((user, _)) if user.contains(':') => return Err(no_password_here()),
            Some((user, address)) => (Some(decoded(user).ok_or_else(|| wrong("it is not UTF-8"))?), address),
            None => (None, authority),
        };
        let mut nodes = Vec::new();
        for address in address.split(',') {
            let (host, port) = host_and_port(address).ok_or_else(|| wrong("the port is not a number"))?;
            if host.is_empty() {
                return Err(wrong("the host is missing"));
            }
            nodes.push(Node { host: host.to_owned(), port });
        }
        let db = match db {
            "" => 0,
            db => db.parse().map_err(|_| wrong("after the host only the number of the data base is allowed"))?,
        };
        let user = user.filter(|user| !user.is_empty());
        let (prefix, password_file, authority_file, limits) = (String::new(), None, None, Limits::default());
        let mut place = Self { nodes, tls, db, user, prefix, password_file, authority_file, limits };
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = decoded(value).ok_or_else(|| wrong("it is not UTF-8"))?;
            match key {
                "prefix" => place.prefix = value,
                "authority_file" => place.authority_file = Some(value.into()),
                "password_file" => place.password_file = Some(value.into()),
                _ if is_credential(key) => return Err(no_password_here()),
                // Without its value, which may be a secret.
                _ => return Err(wrong(&format!("{key} is not known; known are {}", KEYS.join(", ")))),
            }
        }
        Ok(place)
    }

    fn password(&self) -> Result<Option<String>> {
        let Some(path) = &self.password_file else {
            return Ok(std::env::var("REDISCLI_AUTH").ok().filter(|password| !password.is_empty()));
        };
        let text = String::from_utf8_lossy(&self.read(path)?).into_owned();
        Ok(Some(text.trim_end_matches(['\r', '\n']).to_owned()))
    }

    fn read(&self, path: &Path) -> Result<Vec<u8>> {
        let failed = Error::new(format!("the store {self} cannot be used without {}", path.display()));
        if !path.is_absolute() {
            // The agent's working directory is not the user's.
            return Err(failed.why("it is not an absolute path").remedy("name it from / on"));
        }
        std::fs::read(path).map_err(|why| failed.why(why))
    }

    pub(super) fn client(&self, node: &Node) -> Result<redis::Client> {
        let wrong = |why: redis::RedisError| Error::new(format!("the store {self} cannot be used")).why(why);
        let (host, port) = (node.host.clone(), node.port);
        let address = match self.tls {
            true => {
                // The provider that all of Surgetank uses.
                let _ = rustls::crypto::ring::default_provider().install_default();
                ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None }
            }
            false => ConnectionAddr::Tcp(host, port),
        };
        let mut who = RedisConnectionInfo::default().set_db(self.db.into()).set_skip_set_lib_name();
        if let Some(user) = &self.user {
            who = who.set_username(user);
        }
        if let Some(password) = self.password()? {
            who = who.set_password(password);
        }
        let info = address.into_connection_info().map_err(wrong)?.set_redis_settings(who);
        let info = info.set_tcp_settings(TcpSettings::default().set_nodelay(true));
        match &self.authority_file {
            Some(path) if self.tls => {
                let root_cert = Some(self.read(path)?);
                redis::Client::build_with_tls(info, redis::TlsCertificates { client_tls: None, root_cert })
            }
            _ => redis::Client::open(info),
        }
        .map_err(wrong)
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let scheme = if self.tls { "rediss" } else { "redis" };
        let address = |node: &Node| match node.host.contains(':') {
            true => format!("[{}]:{}", node.host, node.port),
            false => format!("{}:{}", node.host, node.port),
        };
        let nodes: Vec<String> = self.nodes.iter().map(address).collect();
        write!(f, "{scheme}://{}/{}", nodes.join(","), self.db)?;
        if self.prefix.is_empty() { Ok(()) } else { write!(f, "?prefix={}", self.prefix) }
    }
}

fn host_and_port(address: &str) -> Option<(&str, u16)> {
    let (host, port) = match address.strip_prefix('[') {
        // IPv6
        Some(rest) => {
            let (host, rest) = rest.split_once(']')?;
            (host, rest.strip_prefix(':'))
        }
        None => address.split_once(':').map_or((address, None), |(host, port)| (host, Some(port))),
    };
    Some((host, port.map_or(Some(PORT), |port| port.parse().ok())?))
}

fn is_credential(key: &str) -> bool {
    let key = key.to_ascii_lowercase();
    ["auth", "pass", "secret", "token", "credential", "user"].iter().any(|word| key.contains(word))
}

fn no_password_here() -> Error {
    Error::new("a password does not belong in the URL of a store")
        .why("URLs are seen in logs, messages and lists of processes")
        .remedy("put it into the environment (REDISCLI_AUTH) or into a file (password_file=PATH), and the user before the @")
}

fn decoded(text: &str) -> Option<String> {
    Some(percent_decode_str(text).decode_utf8().ok()?.into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn url_with_every_key_is_parsed() {
        let place = Place::parse("redis://me@host:7000/3?prefix=run%207:&password_file=/etc/secret").unwrap();
        assert_eq!((place.nodes.as_slice(), place.db, place.tls), (&[node("host", 7000)][..], 3, false));
        assert_eq!((place.user.as_deref(), place.prefix.as_str()), (Some("me"), "run 7:"));
        assert_eq!(place.password_file.as_deref(), Some(Path::new("/etc/secret")));
        assert_eq!(place.to_string(), "redis://host:7000/3?prefix=run 7:");
        let least = Place::parse("rediss://[::1]").unwrap();
        assert_eq!((least.nodes.as_slice(), least.tls), (&[node("::1", PORT)][..], true));
        assert_eq!(least.to_string(), "rediss://[::1]:6379/0");
        let cluster = Place::parse("redis://me@a:1,b,[::1]:2/?prefix={run}:").unwrap();
        assert_eq!(cluster.nodes, [node("a", 1), node("b", PORT), node("::1", 2)]);
        assert_eq!(cluster.to_string(), "redis://a:1,b:6379,[::1]:2/0?prefix={run}:");
    }

    fn node(host: &str, port: u16) -> Node {
        Node { host: host.into(), port }
    }

    #[test]
    fn password_in_url_is_refused_and_not_repeated() {
        for url in [
            "redis://me:hunter2@host",
            "redis://:hunter2@host",
            "redis://host?password=hunter2",
            "redis://h?AUTH=hunter2",
        ] {
            let why = Place::parse(url).unwrap_err();
            assert!(why.to_string().contains("REDISCLI_AUTH"), "{why}");
            assert!(!format!("{why} {why:?}").contains("hunter2"), "{why:?}");
        }
    }

    #[test]
    fn invalid_url_is_refused_with_its_reason() {
        for (url, word) in [
            ("http://host", "redis://"),
            ("redis://", "host"),
            ("redis://host,,other", "host"),
            ("redis://host:port", "port"),
            ("redis://host/name", "number"),
            ("redis://host?prefx=a", "authority_file, password_file, prefix"),
            ("redis://host?prefix=%ff", "UTF-8"),
        ] {
            let why = Place::parse(url).unwrap_err().to_string();
            assert!(why.contains(word), "{url}: {why}");
        }
    }
}
