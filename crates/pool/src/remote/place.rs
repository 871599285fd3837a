//! Where the registry's key-value server is: a URL without a password, and the password beside it.
//!
//! The danger that this avoids: a password on a command line, in a log or in a status.

use std::fmt;

/// Of Redis.
const REDIS_PORT: u16 = 6379;
/// Of Redis Sentinel.
const SENTINEL_PORT: u16 = 26379;
/// Of etcd.
const ETCD_PORT: u16 = 2379;

/// A server, or several that stand for each other.
#[derive(Clone, PartialEq, Eq)]
pub struct Place {
    /// Which kind.
    pub kind: Kind,
    /// `HOST` and port of each.
    pub hosts: Vec<(String, u16)>,
    /// The user; empty: the server's default.
    pub user: String,
    /// The password; empty: none.
    pub password: String,
    /// The server's certificate is verified.
    pub tls: bool,
    url: String,
}

/// What the servers are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// One Redis server, and the number of its database.
    Redis(i64),
    /// Sentinels that know the present master of this name.
    Sentinel(String),
    /// etcd.
    Etcd,
}

/// Without the password.
impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.url)
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Place({self})")
    }
}

impl Place {
    /// From a URL:
    ///
    /// - `redis://[USER@]HOST[:PORT][/DATABASE]`, or `rediss://` with TLS
    /// - `redis+sentinel://[USER@]HOST[:PORT][,HOST[:PORT]…]/MASTER`
    /// - `etcd://[USER@]HOST[:PORT][,HOST[:PORT]…]`, or `etcds://` with TLS
    ///
    /// Errors: what is wrong with it.
    pub fn parse(url: &str) -> Result<Self, String> {
        const FORMS: &str = "it has to be redis://HOST:PORT, redis+sentinel://HOST:PORT,…/MASTER or etcd://HOST:PORT,…";
        let (scheme, rest) = url.split_once("://").ok_or(FORMS)?;
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (user, hosts) = authority.rsplit_once('@').unwrap_or(("", authority));
        if user.contains(':') {
            return Err("a password must not be in the URL: other users of the machine can read it".to_owned());
        }
        let (kind, tls, port) = match scheme {
            "redis" | "rediss" => {
                let database = if path.is_empty() { "0" } else { path };
                let database: u16 =
                    database.parse().map_err(|_| format!("'{path}' is not the number of a database"))?;
                (Kind::Redis(i64::from(database)), scheme == "rediss", REDIS_PORT)
            }
            "redis+sentinel" => {
                let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
                if path.is_empty() || !path.bytes().all(is_name) {
                    return Err("the name of the master has to stand behind the sentinels: /MASTER".to_owned());
                }
                (Kind::Sentinel(path.to_owned()), false, SENTINEL_PORT)
            }
            "etcd" | "etcds" if path.is_empty() => (Kind::Etcd, scheme == "etcds", ETCD_PORT),
            "etcd" | "etcds" => return Err("nothing may stand behind the servers".to_owned()),
            _ => return Err(FORMS.to_owned()),
        };
        let hosts = hosts.split(',').map(|host| host_of(host, port)).collect::<Result<Vec<_>, _>>()?;
        if matches!(kind, Kind::Redis(_)) && hosts.len() > 1 {
            return Err("only one server can be named: several of them need sentinels (redis+sentinel://)".to_owned());
        }
        Ok(Self { kind, hosts, user: user.to_owned(), password: String::new(), tls, url: url.to_owned() })
    }
}

fn host_of(text: &str, port: u16) -> Result<(String, u16), String> {
    let wrong = || format!("'{text}' is not HOST:PORT");
    let (host, digits) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, "")) => (host, None),
        Some((host, rest)) => (host, Some(rest.strip_prefix(':').ok_or_else(wrong)?)),
        None => text.split_once(':').map_or((text, None), |(host, digits)| (host, Some(digits))),
    };
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte);
    if host.is_empty() || !host.bytes().all(is_plain) {
        return Err(wrong());
    }
    let port = digits.map_or(Some(port), |digits| digits.parse().ok().filter(|port| *port > 0)).ok_or_else(wrong)?;
    Ok((host.to_owned(), port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn url_names_servers_and_user() {
        let one = Place::parse("redis://flow@registry:7000/3").unwrap();
        assert_eq!((one.kind, one.user), (Kind::Redis(3), "flow".to_owned()));
        assert_eq!(one.hosts, [("registry".to_owned(), 7000)]);
        let three = Place::parse("redis+sentinel://a,b:5,[::1]:6/main").unwrap();
        assert_eq!(three.kind, Kind::Sentinel("main".to_owned()));
        assert_eq!(three.hosts, [("a".to_owned(), 26379), ("b".to_owned(), 5), ("::1".to_owned(), 6)]);
        assert!(Place::parse("rediss://a").unwrap().tls);
        assert_eq!(Place::parse("etcd://a,b").unwrap().hosts.len(), 2);
    }

    #[test]
    fn url_that_is_wrong_is_refused() {
        for url in
            ["", "redis", "http://a", "redis://", "redis://a,b", "redis://a/x", "redis+sentinel://a", "etcd://a/x"]
        {
            assert!(Place::parse(url).is_err(), "{url}");
        }
        for url in ["redis://a:x", "redis://a:0", "redis://a:70000", "redis://a b", "etcd://a,,b"] {
            assert!(Place::parse(url).is_err(), "{url}");
        }
        let why = Place::parse("redis://user:word@a").unwrap_err();
        assert!(why.contains("password") && !why.contains("word@"), "{why}");
    }
}
