//! Where a store in GridFS is: `mongodb://[USER@]HOST[:PORT]/DB[?bucket=fs&prefix=P&…]`. Keys that MongoDB's own URLs have, too,
//! have the same names (`authSource`, `tls`, `tlsCAFile`).
//!
//! The danger that this avoids: a password in a URL appears in logs, process lists and messages. It is refused here. The password
//! comes from the environment (`MONGODB_PASSWORD`) or from a file.

use std::path::{Path, PathBuf};
use std::time::Duration;

use percent_encoding::percent_decode_str;

use surgetank_types::error::{Error, Result};

const PORT: u16 = 27017;
/// The keys that may follow the `?`.
const KEYS: [&str; 6] = ["authSource", "bucket", "password_file", "prefix", "tls", "tlsCAFile"];

/// A GridFS bucket on a server, as a URL names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Name or address of the server.
    pub host: String,
    /// TCP port; 27017 unless the URL says otherwise.
    pub port: u16,
    /// The data base with the bucket.
    pub db: String,
    /// The GridFS bucket: its collections are `BUCKET.files` and `BUCKET.chunks`.
    pub bucket: String,
    /// Put before each path unchanged.
    pub prefix: String,
    /// The user to log in as; `None`: no login.
    pub user: Option<String>,
    /// The data base that the user belongs to.
    pub auth_source: String,
    /// The file with the password, instead of `MONGODB_PASSWORD`.
    pub password_file: Option<PathBuf>,
    /// The connection uses TLS.
    pub tls: bool,
    /// PEM file with the only trusted certificate authorities.
    pub authority_file: Option<PathBuf>,
    /// How long requests may take.
    pub limits: Limits,
}

/// How long requests wait, for a server and between tries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// The limit for making a connection.
    pub connect: Duration,
    /// The limit for a request without progress.
    pub progress: Duration,
    /// The limit for one try, from its first byte to the last byte of the answer.
    pub request: Duration,
    /// The largest number of tries of a request.
    pub tries: u32,
    /// The pause after the first try. Each further pause is three times as long. All are upper bounds (jitter).
    pub pause: Duration,
    /// No try begins after this time.
    pub all_tries: Duration,
    /// A lock of a name expires when one agent has held it for this time.
    pub hold: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(5),
            progress: Duration::from_secs(60),
            request: Duration::from_secs(300),
            tries: 5,
            pause: Duration::from_millis(100),
            all_tries: Duration::from_secs(10),
            hold: Duration::from_secs(30),
        }
    }
}

impl Place {
    /// Reads `mongodb://[USER@]HOST[:PORT]/DB[?KEY=VALUE&…]`. Errors name the part of the URL that is wrong.
    pub fn parse(url: &str) -> Result<Self> {
        let wrong = |why: &str| {
            Error::new("the URL of the store is not understood")
                .why(why)
                .remedy("mongodb://USER@HOST:PORT/DB?bucket=fs&prefix=PREFIX")
        };
        let rest = url.strip_prefix("mongodb://").ok_or_else(|| wrong("it does not begin with mongodb://"))?;
        let (front, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, db) = front.split_once('/').unwrap_or((front, ""));
        let (user, address) = match authority.rsplit_once('@') {
            Some((user, _)) if user.contains(':') => return Err(no_password_here()),
            Some((user, address)) => (Some(decoded(user).ok_or_else(|| wrong("it is not UTF-8"))?), address),
            None => (None, authority),
        };
        if address.contains(',') {
            return Err(wrong("the URL names several hosts; it has to name the primary alone"));
        }
        let (host, port) = host_and_port(address).ok_or_else(|| wrong("the port is not a number"))?;
        if host.is_empty() {
            return Err(wrong("the host is missing"));
        }
        let db = decoded(db.trim_end_matches('/')).ok_or_else(|| wrong("it is not UTF-8"))?;
        if db.is_empty() || db.contains(['/', '\\', '.', ' ', '"', '$', '\0']) {
            return Err(wrong("after the host, the URL has to have the name of a data base and nothing else"));
        }
        let mut place = Self {
            host: host.to_owned(),
            port,
            db,
            bucket: "fs".to_owned(),
            prefix: String::new(),
            user: user.filter(|user| !user.is_empty()),
            auth_source: "admin".to_owned(),
            password_file: None,
            tls: query.split('&').any(|pair| pair.starts_with("tlsCAFile=")),
            authority_file: None,
            limits: Limits::default(),
        };
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = decoded(value).ok_or_else(|| wrong("it is not UTF-8"))?;
            match (key, value.as_str()) {
                ("authSource", _) => place.auth_source = value,
                ("bucket", "") => return Err(wrong("the bucket has no name")),
                ("bucket", _) if value.contains(['$', '\0']) => {
                    return Err(wrong("the name of the bucket has a $ or a NUL"));
                }
                ("bucket", _) => place.bucket = value,
                ("password_file", _) => place.password_file = Some(value.into()),
                ("prefix", _) => place.prefix = value,
                ("tls", "true") => place.tls = true,
                ("tls", "false") => place.tls = false,
                ("tls", _) => return Err(wrong("tls has to be true or false")),
                ("tlsCAFile", _) => place.authority_file = Some(value.into()),
                _ if is_credential(key) => return Err(no_password_here()),
                // The message has no value: it may be a secret.
                _ => return Err(wrong(&format!("{key} is not known; known are {}", KEYS.join(", ")))),
            }
        }
        if place.authority_file.is_some() && !place.tls {
            return Err(wrong("tlsCAFile needs TLS, and tls=false disables it"));
        }
        Ok(place)
    }

    /// `None`: neither a file nor the environment has a password.
    pub(super) fn password(&self) -> Result<Option<String>> {
        let Some(path) = &self.password_file else {
            return Ok(std::env::var("MONGODB_PASSWORD").ok().filter(|password| !password.is_empty()));
        };
        let text = String::from_utf8_lossy(&self.read(path)?).into_owned();
        Ok(Some(text.trim_end_matches(['\r', '\n']).to_owned()))
    }

    pub(super) fn read(&self, path: &Path) -> Result<Vec<u8>> {
        let failed = Error::new(format!("the store {self} cannot be used without {}", path.display()));
        if !path.is_absolute() {
            // The agent's working directory is not the user's.
            return Err(failed.why("it is not an absolute path").remedy("give the path from / on"));
        }
        std::fs::read(path).map_err(|why| failed.why(why))
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        write!(f, "mongodb://{host}:{}/{}?bucket={}", self.port, self.db, self.bucket)?;
        if self.prefix.is_empty() { Ok(()) } else { write!(f, "&prefix={}", self.prefix) }
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
        .why("logs, messages and lists of processes show URLs")
        .remedy("put it into the environment (MONGODB_PASSWORD) or into a file (password_file=PATH), and the user before the @")
}

fn decoded(text: &str) -> Option<String> {
    Some(percent_decode_str(text).decode_utf8().ok()?.into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn url_with_every_part_is_parsed() {
        let url = "mongodb://me@host:7000/db?bucket=b&prefix=run%207/&password_file=/etc/secret&authSource=db&tls=true";
        let place = Place::parse(url).unwrap();
        assert_eq!((place.host.as_str(), place.port, place.db.as_str(), place.tls), ("host", 7000, "db", true));
        assert_eq!((place.user.as_deref(), place.auth_source.as_str()), (Some("me"), "db"));
        assert_eq!(place.password_file.as_deref(), Some(Path::new("/etc/secret")));
        assert_eq!(place.to_string(), "mongodb://host:7000/db?bucket=b&prefix=run 7/");
        let least = Place::parse("mongodb://[::1]/db/").unwrap();
        assert_eq!((least.host.as_str(), least.port, least.tls), ("::1", PORT, false));
        assert_eq!(least.to_string(), "mongodb://[::1]:27017/db?bucket=fs");
    }

    #[test]
    fn url_with_an_authority_file_enables_tls() {
        assert!(Place::parse("mongodb://host/db?tlsCAFile=/ca.pem").unwrap().tls, "the connection is not encrypted");
        assert!(!Place::parse("mongodb://host/db?tls=false").unwrap().tls);
    }

    #[test]
    fn refused_url_gives_the_reason() {
        for (url, word) in [
            ("mongodb://host/db?tls=false&tlsCAFile=/ca.pem", "tlsCAFile"),
            ("mongodb://me:hunter2@host/db", "MONGODB_PASSWORD"),
            ("mongodb://host/db?password=hunter2", "MONGODB_PASSWORD"),
            ("mongodb://host", "data base"),
            ("mongodb://host/db/more", "data base"),
            ("mongodb://a,b/db", "primary"),
            ("mongodb:///db", "host"),
            ("mongodb://host:x/db", "port"),
            ("mongodb://host/db?bukket=x", "bucket, password_file"),
            ("mongodb://host/db?tls=perhaps", "true or false"),
            ("mongodb://host/db?prefix=%ff", "UTF-8"),
        ] {
            let why = Place::parse(url).unwrap_err().to_string();
            assert!(why.contains(word) && !why.contains("hunter2"), "{url}: {why}");
        }
    }
}
