//! The place of an HDFS, `webhdfs://[USER@]HOST[:PORT]/PATH`, and the user that requests name.
//!
//! The danger that it avoids: a secret in a URL ends up in logs, process lists and messages. No secret is accepted: only
//! servers that trust the user's name are supported.

use std::time::Duration;

use percent_encoding::percent_decode_str;

use super::people;
use surgetank_types::error::{Error, Result};

/// Hadoop's default.
const PORT: u16 = 9870;

/// A store in a directory of an HDFS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// URL of the namenode: `http://host:port`.
    pub endpoint: String,
    /// The directory: absolute, never with a slash at the end; empty for the root.
    pub root: String,
    /// The user's name in HDFS.
    pub user: String,
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
    /// Longest time for a datanode's answer while the last bytes of a file pass through all its copies.
    pub work: Duration,
    /// Most tries of a request.
    pub tries: u32,
    /// Pause after the first try, tripled after each further one; a random part of it is used.
    pub pause: Duration,
    /// Time after which no new try starts.
    pub all_tries: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(5),
            progress: Duration::from_secs(60),
            work: Duration::from_secs(600),
            // The time limit ends the tries: a namenode that restarts refuses each at once, for seconds.
            tries: 12,
            pause: Duration::from_millis(100),
            all_tries: Duration::from_secs(10),
        }
    }
}

impl Place {
    /// Parses a URL. The user is that of the URL, of `HADOOP_USER_NAME`, or of the process. Errors: it is not understood, or
    /// contains a password.
    pub fn parse(url: &str) -> Result<Self> {
        let named = std::env::var("HADOOP_USER_NAME").ok().filter(|name| !name.is_empty());
        Self::parse_as(url, || named.or_else(people::own_name))
    }

    /// `usual`: the user if the URL names none.
    fn parse_as(url: &str, usual: impl FnOnce() -> Option<String>) -> Result<Self> {
        let wrong = |why: &str| {
            Error::new("the URL of the store is not understood").why(why).remedy("webhdfs://HOST:PORT/PATH")
        };
        let rest = url.strip_prefix("webhdfs://").ok_or_else(|| wrong("it does not begin with webhdfs://"))?;
        if rest.contains(['?', '#']) {
            return Err(wrong("nothing is allowed after the path"));
        }
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (user, host) = match authority.rsplit_once('@') {
            Some((user, host)) => (Some(user.to_owned()), host),
            None => (None, authority),
        };
        if user.as_ref().is_some_and(|user| user.contains(':')) {
            return Err(wrong(
                "there is a password in it, which HDFS does not know; and every process list would show it",
            ));
        }
        // `[::1]:9870`
        let (name, given) = match host.rsplit_once(':') {
            Some((name, port)) if !port.ends_with(']') => (name, Some(port)),
            _ => (host, None),
        };
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._[]:".contains(&byte);
        if name.is_empty() || !name.bytes().all(plain) || name.contains(':') && !name.starts_with('[') {
            return Err(wrong("there is no host in it"));
        }
        let port = match given {
            Some(port) => port.parse().map_err(|_| wrong("the port is not a number"))?,
            None => PORT,
        };
        let names: Vec<String> = path
            .split('/')
            .filter(|name| !name.is_empty())
            .map(|name| percent_decode_str(name).decode_utf8().map(|name| name.into_owned()))
            .collect::<std::result::Result<_, _>>()
            .map_err(|_| wrong("the path is not UTF-8"))?;
        if names.iter().any(|name| matches!(name.as_str(), "." | "..") || name.contains([':', '\0', '/'])) {
            return Err(wrong("HDFS has no such path"));
        }
        let root: String = names.iter().flat_map(|name| ["/", name]).collect();
        let user = user.or_else(usual).ok_or_else(|| {
            wrong("it names no user").remedy("name the user in HADOOP_USER_NAME, or webhdfs://USER@HOST:PORT/PATH")
        })?;
        // As HDFS itself has it.
        let first = |byte: u8| byte.is_ascii_alphabetic() || byte == b'_';
        let later = |byte: u8| byte.is_ascii_alphanumeric() || b"._-$".contains(&byte);
        if !user.bytes().next().is_some_and(first) || !user.bytes().all(later) {
            return Err(wrong("HDFS takes letters, digits and ._- in the name of a user"));
        }
        let endpoint = format!("http://{name}:{port}");
        Ok(Self { endpoint, root, user, limits: Limits::default() })
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let authority = self.endpoint.split_once("://").map_or("", |(_, authority)| authority);
        let slash = if self.root.is_empty() { "/" } else { "" };
        write!(f, "webhdfs://{}@{authority}{slash}{}", self.user, self.root)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Result<Place> {
        Place::parse_as(url, || Some("me".into()))
    }

    #[test]
    fn urls_are_parsed_or_refused() {
        for (url, endpoint, root, user) in [
            ("webhdfs://host:1234/a//b%20c/", "http://host:1234", "/a/b c", "me"),
            ("webhdfs://ann@host", "http://host:9870", "", "ann"),
            ("webhdfs://[::1]:5/x", "http://[::1]:5", "/x", "me"),
            ("webhdfs://[::1]/x", "http://[::1]:9870", "/x", "me"),
        ] {
            let place = parse(url).unwrap();
            assert_eq!((&*place.endpoint, &*place.root, &*place.user), (endpoint, root, user), "{url}");
        }
        assert_eq!(parse("webhdfs://host/a").unwrap().to_string(), "webhdfs://me@host:9870/a");
        assert_eq!(parse("webhdfs://host").unwrap().to_string(), "webhdfs://me@host:9870/");
        for url in [
            "hdfs://host/a",
            "webhdfs:///a",
            "swebhdfs://host/a",
            "webhdfs://host:x/a",
            "webhdfs://a:b@host/",
            "webhdfs://host/a?x=y",
            "webhdfs://host/../a",
            "webhdfs://host/a:b",
            "webhdfs://a b@host/",
            "webhdfs://host/%ff",
        ] {
            let why = parse(url).unwrap_err().to_string();
            assert!(!why.contains(":b@"), "{url}: {why}");
        }
        assert!(Place::parse_as("webhdfs://host/a", || None).is_err());
    }
}
