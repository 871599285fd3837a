//! The place of a store of objects: `s3://BUCKET/PREFIX?endpoint=URL&region=NAME&…`, completed from the environment and the
//! profile as the AWS tools do.
//!
//! The danger that it avoids: a secret in a URL ends up in logs, process lists and messages. Credentials in a URL are refused,
//! and what this file prints of a URL never contains any.

use std::path::PathBuf;
use std::time::Duration;

use percent_encoding::percent_decode_str;

use surgetank_types::error::{Error, Result};

/// Keys of the URL's query.
const KEYS: [&str; 6] = ["endpoint", "payload", "profile", "region", "requests_per_second", "style"];

/// How a request names the bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// `http://host/bucket/key`
    Path,
    /// `http://bucket.host/key`
    Virtual,
}

/// Whether the hash of a body is part of its request's signature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Payload {
    /// It is: every body is read twice, once for the hash.
    Signed,
    /// It is not; the checksum of the body is.
    Unsigned,
    /// Unsigned, until the server refuses that.
    Auto,
}

/// A store on an S3 server: one bucket and prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Name of the bucket.
    pub bucket: String,
    /// Prefix of every key: empty, or ends with `/`.
    pub prefix: String,
    /// `http://host:port` or `https://host`, and a path if there is one; never with `/` at the end, and without the bucket.
    pub endpoint: String,
    /// Region of the bucket, as requests are signed for it.
    pub region: String,
    /// How a request names the bucket.
    pub style: Style,
    /// Whether bodies are signed.
    pub payload: Payload,
    /// Name of the profile with the credentials; `None` for the default one.
    pub profile: Option<String>,
    /// Most requests a second; `None`: no limit.
    pub requests_per_second: Option<u32>,
    /// PEM file with the only trusted authorities.
    pub ca_bundle: Option<PathBuf>,
    /// File with the credentials, instead of every usual source; never from a URL.
    pub credentials_file: Option<PathBuf>,
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
    /// Longest time for an answer while the server joins parts or copies.
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
            progress: Duration::from_secs(30),
            work: Duration::from_secs(600),
            tries: 5,
            pause: Duration::from_millis(100),
            all_tries: Duration::from_secs(10),
        }
    }
}

/// The user's environment, so that tests provide their own.
trait Surroundings {
    fn variable(&self, name: &str) -> Option<String>;
    fn file(&self, path: &str) -> Option<String>;
}

/// The environment of this process.
struct Own;

impl Surroundings for Own {
    fn variable(&self, name: &str) -> Option<String> {
        std::env::var(name).ok().filter(|value| !value.is_empty())
    }
    fn file(&self, path: &str) -> Option<String> {
        std::fs::read_to_string(path).ok()
    }
}

impl Place {
    /// Parses a URL and completes it from this process's environment. Errors: it is not understood, or contains credentials.
    pub fn parse(url: &str) -> Result<Self> {
        Self::parse_with(url, &Own)
    }

    fn parse_with(url: &str, around: &dyn Surroundings) -> Result<Self> {
        let wrong = |why: String| {
            Error::new("the URL of the store is not understood")
                .why(why)
                .remedy("s3://BUCKET/PREFIX?endpoint=https://HOST&region=NAME")
        };
        let rest = url.strip_prefix("s3://").ok_or_else(|| wrong("it does not begin with s3://".into()))?;
        let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (bucket, prefix) = path.split_once('/').unwrap_or((path, ""));
        if bucket.contains('@') {
            return Err(no_credentials_here());
        }
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
        if bucket.is_empty() || !bucket.bytes().all(plain) {
            return Err(wrong("the name of the bucket is missing or has other characters than a-z 0-9 - .".into()));
        }
        let prefix = decoded(prefix).map_err(&wrong)?;
        let prefix = prefix.trim_matches('/');

        let mut asked = Asked::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = decoded(value).map_err(&wrong)?;
            asked.take(key, value).map_err(|why| why.unwrap_or_else(&wrong))?;
        }
        Self::completed(bucket, prefix, asked, around).map_err(wrong)
    }

    fn completed(bucket: &str, prefix: &str, asked: Asked, around: &dyn Surroundings) -> Result<Self, String> {
        let profile = Profile::read(asked.profile.as_deref(), around);
        let first = |names: &[&str]| names.iter().find_map(|name| around.variable(name));
        let region =
            asked.region.or_else(|| first(&["AWS_REGION", "AWS_DEFAULT_REGION"])).or_else(|| profile.region.clone());
        let ignored = first(&["AWS_IGNORE_CONFIGURED_ENDPOINT_URLS"]).is_some_and(|value| value == "true");
        let configured = || first(&["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"]).or_else(|| profile.endpoint.clone());
        let endpoint = asked.endpoint.or_else(|| if ignored { None } else { configured() });
        let (endpoint, region, usual) = match (endpoint, region) {
            // Self-hosted servers rarely check the region; it is part of the signature nevertheless.
            (Some(endpoint), region) => (endpoint, region.unwrap_or_else(|| "us-east-1".into()), Style::Path),
            (None, Some(region)) => {
                let domain = if region.starts_with("cn-") { "amazonaws.com.cn" } else { "amazonaws.com" };
                // A certificate for *.s3… is invalid for names with dots.
                let style = if bucket.contains('.') { Style::Path } else { Style::Virtual };
                (format!("https://s3.{region}.{domain}"), region, style)
            }
            (None, None) => {
                return Err(
                    "neither endpoint nor region is known: not from the URL, nor AWS_REGION, nor the profile".into()
                );
            }
        };
        Ok(Self {
            bucket: bucket.to_owned(),
            prefix: if prefix.is_empty() { String::new() } else { format!("{prefix}/") },
            endpoint: checked_endpoint(&endpoint)?,
            region,
            style: asked.style.unwrap_or(usual),
            payload: asked.payload.unwrap_or(Payload::Auto),
            profile: asked.profile,
            requests_per_second: asked.requests_per_second,
            ca_bundle: around.variable("AWS_CA_BUNDLE").map(PathBuf::from),
            credentials_file: None,
            limits: Limits::default(),
        })
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "s3://{}/{}", self.bucket, self.prefix.trim_end_matches('/'))
    }
}

#[derive(Default)]
struct Asked {
    endpoint: Option<String>,
    payload: Option<Payload>,
    profile: Option<String>,
    region: Option<String>,
    requests_per_second: Option<u32>,
    style: Option<Style>,
}

impl Asked {
    /// `Err(Ok(_))`: the whole error; `Err(Err(_))`: why the URL is wrong.
    fn take(&mut self, key: &str, value: String) -> Result<(), Result<Error, String>> {
        let one_of = |words: &str| Err(Err(format!("{key}={value}: it is one of {words}")));
        match key {
            "endpoint" => self.endpoint = Some(value),
            "region" => self.region = Some(value),
            "profile" => self.profile = Some(value),
            "requests_per_second" => match value.parse() {
                Ok(rate) if rate > 0 => self.requests_per_second = Some(rate),
                _ => return Err(Err(format!("{key}={value}: it is a number from 1"))),
            },
            "style" => match value.as_str() {
                "path" => self.style = Some(Style::Path),
                "virtual" => self.style = Some(Style::Virtual),
                _ => return one_of("path, virtual"),
            },
            "payload" => match value.as_str() {
                "signed" => self.payload = Some(Payload::Signed),
                "unsigned" => self.payload = Some(Payload::Unsigned),
                "auto" => self.payload = Some(Payload::Auto),
                _ => return one_of("auto, signed, unsigned"),
            },
            _ if is_credential(key) => return Err(Ok(no_credentials_here())),
            // Without its value, which may be a secret.
            _ => return Err(Err(format!("{key} is not known; known are {}", KEYS.join(", ")))),
        }
        Ok(())
    }
}

fn is_credential(key: &str) -> bool {
    let key = key.to_ascii_lowercase();
    ["access", "secret", "token", "password", "credential", "key"].iter().any(|word| key.contains(word))
}

fn no_credentials_here() -> Error {
    Error::new("credentials do not belong in the URL of a store")
        .why("URLs are seen in logs, messages and lists of processes")
        .remedy(
            "put them where the AWS tools look: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile in ~/.aws \
             (profile=NAME), or the role of the instance",
        )
}

fn decoded(text: &str) -> Result<String, String> {
    let text = percent_decode_str(text).decode_utf8().map_err(|_| "it is not UTF-8".to_owned())?;
    Ok(text.into_owned())
}

fn checked_endpoint(endpoint: &str) -> Result<String, String> {
    // Without the value, which may contain a password.
    let uri: ureq::http::Uri = endpoint.parse().map_err(|_| "the endpoint is not a URL".to_owned())?;
    if !matches!(uri.scheme_str(), Some("http" | "https")) {
        return Err("the endpoint begins neither with http:// nor with https://".into());
    }
    let host = uri.authority().ok_or("the endpoint has no host")?;
    if host.as_str().contains('@') {
        return Err("the endpoint has credentials in it: they belong in the environment or a profile".into());
    }
    if uri.query().is_some() {
        return Err("the endpoint has a question mark in it".into());
    }
    Ok(endpoint.trim_end_matches('/').to_owned())
}

#[derive(Default)]
struct Profile {
    region: Option<String>,
    endpoint: Option<String>,
}

impl Profile {
    fn read(named: Option<&str>, around: &dyn Surroundings) -> Self {
        let name = named.map(str::to_owned).or_else(|| around.variable("AWS_PROFILE")).unwrap_or("default".into());
        let home = || Some(format!("{}/.aws/config", around.variable("HOME")?));
        let found = || {
            let text = around.file(&around.variable("AWS_CONFIG_FILE").or_else(home)?)?;
            let file = ini::Ini::load_from_str(&text).ok()?;
            let section = file.section(Some(format!("profile {name}"))).or_else(|| file.section(Some(name)))?;
            let value = |key: &str| section.get(key).map(str::to_owned);
            Some(Self { region: value("region"), endpoint: value("endpoint_url") })
        };
        found().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[derive(Default)]
    struct Pretended(HashMap<&'static str, &'static str>);

    impl Surroundings for Pretended {
        fn variable(&self, name: &str) -> Option<String> {
            self.0.get(name).map(|value| (*value).to_owned())
        }
        fn file(&self, path: &str) -> Option<String> {
            self.variable(path)
        }
    }

    fn parse(url: &str, around: &[(&'static str, &'static str)]) -> Result<Place> {
        Place::parse_with(url, &Pretended(around.iter().copied().collect()))
    }

    #[test]
    fn url_with_every_key_is_parsed() {
        let url = "s3://data/runs/a%20b/?endpoint=http%3A%2F%2Fhost%3A7070%2F&region=here&requests_per_second=50&style=virtual";
        let place = parse(url, &[]).unwrap();
        assert_eq!((place.bucket.as_str(), place.prefix.as_str()), ("data", "runs/a b/"));
        assert_eq!((place.endpoint.as_str(), place.region.as_str()), ("http://host:7070", "here"));
        assert_eq!((place.style, place.requests_per_second), (Style::Virtual, Some(50)));
        assert_eq!(place.to_string(), "s3://data/runs/a b");
    }

    #[test]
    fn endpoint_of_amazon_follows_from_region_and_bucket() {
        let place = parse("s3://data?region=eu-west-1", &[]).unwrap();
        assert_eq!((place.endpoint.as_str(), place.style), ("https://s3.eu-west-1.amazonaws.com", Style::Virtual));
        assert_eq!(place.prefix, "");
        assert_eq!(parse("s3://da.ta?region=x", &[]).unwrap().style, Style::Path);
        let china = parse("s3://data", &[("AWS_REGION", "cn-north-1")]).unwrap();
        assert_eq!(china.endpoint, "https://s3.cn-north-1.amazonaws.com.cn");
    }

    #[test]
    fn url_overrides_environment_overrides_profile() {
        let config =
            "[default]\nregion = from-profile\nendpoint_url = http://profile\n[profile other]\nregion = of-other\n";
        let around = [("HOME", "/h"), ("/h/.aws/config", config)];
        let place = parse("s3://b", &around).unwrap();
        assert_eq!((place.region.as_str(), place.endpoint.as_str()), ("from-profile", "http://profile"));
        assert_eq!(parse("s3://b?profile=other", &around).unwrap().region, "of-other");
        let mut more = around.to_vec();
        more.extend([("AWS_ENDPOINT_URL", "http://all"), ("AWS_DEFAULT_REGION", "from-environment")]);
        let place = parse("s3://b", &more).unwrap();
        assert_eq!((place.region.as_str(), place.endpoint.as_str()), ("from-environment", "http://all"));
        more.push(("AWS_ENDPOINT_URL_S3", "http://only-s3"));
        assert_eq!(parse("s3://b", &more).unwrap().endpoint, "http://only-s3");
        assert_eq!(parse("s3://b?endpoint=https://url", &more).unwrap().endpoint, "https://url");
        more.push(("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true"));
        assert_eq!(parse("s3://b", &more).unwrap().endpoint, "https://s3.from-environment.amazonaws.com");
    }

    #[test]
    fn unknown_key_gives_error_with_known_ones() {
        let why = parse("s3://b?endpoint=http://h&regoin=x", &[]).unwrap_err().to_string();
        for word in KEYS.iter().chain(&["regoin"]) {
            assert!(why.contains(word), "{why}");
        }
    }

    #[test]
    fn credentials_in_url_are_refused_and_not_repeated() {
        for url in [
            "s3://AKID:hunter2@b/p?endpoint=http://h",
            "s3://b?endpoint=http://h&secret_access_key=hunter2",
            "s3://b?endpoint=http://h&AWS_SESSION_TOKEN=hunter2",
            "s3://b?endpoint=http://user:hunter2@h",
        ] {
            let why = parse(url, &[]).unwrap_err();
            assert!(why.to_string().contains("environment") || why.to_string().contains("AWS_ACCESS_KEY_ID"), "{why}");
            assert!(!format!("{why} {why:?}").contains("hunter2"), "{why:?}");
        }
    }

    #[test]
    fn invalid_url_is_refused_with_its_reason() {
        for (url, word) in [
            ("https://b", "s3://"),
            ("s3://", "bucket"),
            ("s3:///key", "bucket"),
            ("s3://b", "region"),
            ("s3://b?endpoint=host:7070", "http"),
            ("s3://b?endpoint=ftp://host", "http"),
            ("s3://b?endpoint=http://h&style=round", "path, virtual"),
            ("s3://b?endpoint=http://h&requests_per_second=0", "number"),
            ("s3://b/%ff?endpoint=http://h", "UTF-8"),
        ] {
            let why = parse(url, &[]).unwrap_err().to_string();
            assert!(why.contains(word), "{url}: {why}");
        }
    }
}
