//! Opens the store that a URL or a path names.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "compress")]
use surgetank_policy::config::Compress;
use surgetank_policy::config::Config;
use surgetank_policy::rule::RuleSet;
#[cfg(feature = "gridfs")]
use surgetank_store::gridfs::{GridFs, Place as GridFsPlace};
#[cfg(any(feature = "gridfs", feature = "redis", feature = "s3"))]
use surgetank_store::object::{Abilities, ObjectStore, Objects};
#[cfg(any(feature = "compress", feature = "dedup"))]
use surgetank_store::packed::Packed;
#[cfg(feature = "dedup")]
use surgetank_store::packed::shared::{self, Shared, unused::Unused};
#[cfg(feature = "compress")]
use surgetank_store::packed::zstd::{self, Zstd};
use surgetank_store::posix::PosixStore;
#[cfg(feature = "redis")]
use surgetank_store::redis::{Place as RedisPlace, Redis};
#[cfg(feature = "s3")]
use surgetank_store::s3::{Place as S3Place, S3};
#[cfg(feature = "webhdfs")]
use surgetank_store::webhdfs::{Place as HdfsPlace, WebHdfs};
use surgetank_store::{Cred, Store, StorePath, Verify};
use surgetank_types::error::{Error, Result};

/// The answer of a store's server.
pub struct Answer {
    pub found: String,
    /// The guarantees that the server lacks.
    pub warnings: Vec<String>,
}

/// Does the server of a store answer, and what can it do?
pub fn ask_server(url: &str) -> Result<Answer> {
    #[cfg(feature = "s3")]
    if url.starts_with("s3://") {
        let server = S3::open(S3Place::parse(url)?)?;
        return Ok(Answer { found: abilities_in_words(&server.abilities()), warnings: Vec::new() });
    }
    #[cfg(feature = "gridfs")]
    if is_gridfs(url) {
        let server = GridFs::open(GridFsPlace::parse(url)?)?;
        let kept = if server.is_replicated() { "most servers of its set" } else { "it alone" };
        let found =
            format!("{}; what it acknowledges is in the journal of {kept}", abilities_in_words(&server.abilities()));
        return Ok(Answer { found, warnings: Vec::new() });
    }
    #[cfg(feature = "redis")]
    if is_redis(url) {
        let server = Redis::open(RedisPlace::parse(url)?)?;
        let mut found = abilities_in_words(&server.abilities());
        let durability = server.durability();
        if let Some(sure) = durability.as_ref().filter(|durability| durability.is_sure()) {
            found = format!("{found}; {sure}");
        }
        return Ok(Answer { found, warnings: durability.map_or_else(Vec::new, |kept| kept.warnings()) });
    }
    #[cfg(feature = "webhdfs")]
    if is_hdfs(url) {
        let server = WebHdfs::open(HdfsPlace::parse(url)?, Duration::ZERO)?;
        return Ok(Answer { found: server.abilities_in_words(), warnings: Vec::new() });
    }
    Err(not_here(url))
}

fn not_here(url: &str) -> Error {
    Error::new(format!("the store {url} cannot be used")).why("this kind of store is not in this build")
}

#[cfg(any(feature = "gridfs", feature = "redis", feature = "s3"))]
fn abilities_in_words(can: &Abilities) -> String {
    let word = |can: bool| if can { "yes" } else { "no" };
    format!(
        "it answers; conditional writes: {}, checksums: {}, uploads in parts: {}",
        word(can.if_absent && can.if_same),
        word(can.checksums),
        word(can.uploads_in_parts)
    )
}

#[cfg(feature = "gridfs")]
fn is_gridfs(url: &str) -> bool {
    url.starts_with("mongodb://")
}

#[cfg(feature = "redis")]
fn is_redis(url: &str) -> bool {
    url.starts_with("redis://") || url.starts_with("rediss://")
}

#[cfg(feature = "webhdfs")]
fn is_hdfs(url: &str) -> bool {
    url.starts_with("webhdfs://")
}

/// The log warns about what is not safe with this server.
#[cfg(feature = "redis")]
fn open_redis(url: &str, scan: Duration) -> Result<Redis> {
    let mut place = RedisPlace::parse(url)?;
    place.limits.scan = scan;
    let server = Redis::open(place)?;
    for warning in server.durability().iter().flat_map(|kept| kept.warnings()) {
        tracing::warn!("{}: {warning}", server.describe());
    }
    Ok(server)
}

/// `root`: the store's directory, if it is one. Rules may say that the store compresses or deduplicates files.
pub fn open_store(root: Option<OwnedFd>, config: &Config, state: &Path) -> Result<Arc<dyn Store>> {
    packed(open_as_it_is(root, config, state)?, config, state)
}

fn packed(mut store: Arc<dyn Store>, config: &Config, state: &Path) -> Result<Arc<dyn Store>> {
    let rules = Arc::new(RuleSet::new(&config.rules)?);
    // Deduplication applies to compressed content.
    if rules.deduplicates() {
        store = deduplicated(store, &rules)?;
    }
    if rules.compresses() { compressed(store, &rules, state) } else { Ok(store) }
}

#[cfg(feature = "compress")]
fn compressed(store: Arc<dyn Store>, rules: &Arc<RuleSet>, state: &Path) -> Result<Arc<dyn Store>> {
    let flags = rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
    let scratch = rustix::fs::open(state, flags, rustix::fs::Mode::empty())
        .map_err(|why| Error::new(format!("{} cannot be opened", state.display())).why(why))?;
    let rules = Arc::clone(rules);
    let choose = move |path: &StorePath| match rules.decide(&path.0).compress {
        Some(Compress::Zstd(level)) => Some(level),
        Some(Compress::None) | None => None,
    };
    Ok(Arc::new(Packed::new(store, Box::new(Zstd::new(scratch, Box::new(choose))))))
}

#[cfg(not(feature = "compress"))]
fn compressed(store: Arc<dyn Store>, _rules: &Arc<RuleSet>, _state: &Path) -> Result<Arc<dyn Store>> {
    Err(not_in_this_build(&*store, "compress"))
}

#[cfg(feature = "dedup")]
fn deduplicated(store: Arc<dyn Store>, rules: &Arc<RuleSet>) -> Result<Arc<dyn Store>> {
    let rules = Arc::clone(rules);
    let choose = move |path: &StorePath| {
        #[cfg(feature = "compress")]
        let plain = path.0.strip_suffix(zstd::SUFFIX).unwrap_or(&path.0);
        #[cfg(not(feature = "compress"))]
        let plain = &path.0;
        rules.decide(plain).dedup
    };
    let shared = Shared::new(Arc::clone(&store), Box::new(choose));
    Ok(Arc::new(Packed::new(store, Box::new(shared))))
}

#[cfg(not(feature = "dedup"))]
fn deduplicated(store: Arc<dyn Store>, _rules: &Arc<RuleSet>) -> Result<Arc<dyn Store>> {
    Err(not_in_this_build(&*store, "dedup"))
}

#[cfg(not(all(feature = "compress", feature = "dedup")))]
fn not_in_this_build(store: &dyn Store, what: &str) -> Error {
    Error::new(format!("nothing can be packed in {}", store.describe()))
        .why(format!("a rule says {what}, and that is not in this build"))
}

fn open_as_it_is(root: Option<OwnedFd>, config: &Config, state: &Path) -> Result<Arc<dyn Store>> {
    let shown = config.store.display();
    let refused = |why: &dyn std::fmt::Display| Error::new(format!("the store {shown} cannot be used")).why(why);
    if let Some(root) = root {
        return Ok(Arc::new(PosixStore::new(root, format!("file://{shown}")).map_err(|why| refused(&why))?));
    }
    #[cfg(any(feature = "gridfs", feature = "redis", feature = "s3"))]
    let tree_of = |server: Arc<dyn Objects>| -> Result<Arc<dyn Store>> {
        let store = ObjectStore::new(server, &state.join("uploads"), config.verify, config.store_ttl);
        Ok(Arc::new(store.map_err(|why| refused(&why))?.with_timeout(config.retry)))
    };
    #[cfg(feature = "s3")]
    if let Some(url) = config.store_url().filter(|url| url.starts_with("s3://")) {
        return tree_of(Arc::new(S3::open(S3Place::parse(url)?)?));
    }
    #[cfg(feature = "gridfs")]
    if let Some(url) = config.store_url().filter(|url| is_gridfs(url)) {
        return tree_of(Arc::new(GridFs::open(GridFsPlace::parse(url)?)?));
    }
    #[cfg(feature = "redis")]
    if let Some(url) = config.store_url().filter(|url| is_redis(url)) {
        return tree_of(Arc::new(open_redis(url, config.store_ttl)?));
    }
    #[cfg(feature = "webhdfs")]
    if let Some(url) = config.store_url().filter(|url| is_hdfs(url)) {
        return Ok(Arc::new(WebHdfs::open(HdfsPlace::parse(url)?, config.store_ttl)?.with_timeout(config.retry)));
    }
    Err(refused(&"it is neither a directory nor a kind of store that is in this build"))
}

/// An upload that began on a server and never ended.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Abandoned {
    pub path: String,
    pub begun_unix_seconds: i64,
}

/// Uploads that are older than this; aborts them unless `looking`.
pub fn abandoned(url: &str, older_than: Duration, looking: bool) -> Result<Vec<Abandoned>> {
    #[cfg(feature = "s3")]
    if url.starts_with("s3://") {
        return given_up(&S3::open(S3Place::parse(url)?)?, older_than, looking);
    }
    #[cfg(feature = "gridfs")]
    if is_gridfs(url) {
        return given_up(&GridFs::open(GridFsPlace::parse(url)?)?, older_than, looking);
    }
    // (An upload to Redis expires by itself.)
    Ok(Vec::new())
}

#[cfg(any(feature = "gridfs", feature = "s3"))]
fn given_up(server: &dyn Objects, older_than: Duration, looking: bool) -> Result<Vec<Abandoned>> {
    let failed = |why| Error::new(format!("{} cannot be cleaned up", server.describe())).why(why);
    let before = surgetank_types::clock::now().nanos - i64::try_from(older_than.as_nanos()).unwrap_or(i64::MAX);
    let mut given_up = Vec::new();
    for upload in server.uploads("").map_err(failed)? {
        if upload.begun_nanos > before {
            continue;
        }
        if !looking {
            server.abort(&upload.key, &upload.id).map_err(failed)?;
        }
        let begun_unix_seconds = upload.begun_nanos.div_euclid(1_000_000_000);
        // An upload that was killed before it named its file.
        let path = if upload.key.is_empty() { "(chunks of no file)".to_owned() } else { upload.key };
        given_up.push(Abandoned { path, begun_unix_seconds });
    }
    Ok(given_up)
}

/// Deduplicated content that no file has referred to, or begun to refer to, for this time; removes it unless `looking`.
#[cfg(feature = "dedup")]
pub fn unused(config: &Config, unused_for: Duration, looking: bool) -> Result<Unused> {
    let scratch = Scratch::new()?;
    let store = open_as_it_is(root_of(config)?, config, &scratch.0)?;
    shared::unused::collect(&*store, ourselves(), unused_for, looking)
        .map_err(|why| Error::new(format!("unused content cannot be removed from {}", config.store.display())).why(why))
}

/// The store as a run would show it, without an agent.
pub struct Seen {
    pub store: Arc<dyn Store>,
    pub who: Cred,
    _scratch: Scratch,
}

impl Seen {
    pub fn open(config: &Config) -> Result<Self> {
        let scratch = Scratch::new()?;
        let store = match config.store_url() {
            // (No trial writes on the server.)
            Some(url) => {
                let at = Address::parse(url)?;
                Address::open(&at.root, &at.path, &scratch.0, None)?
            }
            None => open_as_it_is(root_of(config)?, config, &scratch.0)?,
        };
        Ok(Self { store: packed(store, config, &scratch.0)?, who: ourselves(), _scratch: scratch })
    }
}

fn ourselves() -> Cred {
    Cred { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw() }
}

fn root_of(config: &Config) -> Result<Option<OwnedFd>> {
    use rustix::fs::OFlags;
    if config.store_url().is_some() {
        return Ok(None);
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(&config.store, flags, rustix::fs::Mode::empty())
        .map(Some)
        .map_err(|why| Error::new(format!("{} cannot be looked into", config.store.display())).why(why))
}

/// Replaces an agent's state: a store of objects keeps operations in progress there, and here there are none.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new() -> Result<Self> {
        use std::os::unix::fs::DirBuilderExt;
        let name = format!("surgetank-{}-{}", std::process::id(), surgetank_types::clock::now().nanos);
        let path = std::env::temp_dir().join(name);
        std::fs::DirBuilder::new().mode(0o700).create(&path).map_err(|why| {
            Error::new(format!("{} cannot be made", path.display())).why(why).remedy("set TMPDIR to another place")
        })?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}

/// Without resolving `..`, which leads to the real parent of the directory before it.
fn absolute(path: &Path) -> std::io::Result<PathBuf> {
    let here = std::path::absolute(path)?;
    let names: Vec<_> = here.components().collect();
    let Some(last) = names.iter().rposition(|name| *name == Component::ParentDir) else { return Ok(here) };
    let (before, behind) = names.split_at(last + 1);
    Ok(std::fs::canonicalize(before.iter().collect::<PathBuf>())?.join(behind.iter().collect::<PathBuf>()))
}

/// A location in a store or in a directory, as written on a command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// The part that all locations on one server share, or `/`.
    pub root: String,
    /// The path below that.
    pub path: StorePath,
    /// It ends with a slash: it means the directory's contents.
    pub inside: bool,
}

impl Address {
    pub fn parse(text: impl AsRef<OsStr>) -> Result<Self> {
        let given = text.as_ref();
        // (A path may contain any bytes, a URL may not.)
        let text = given.to_str().unwrap_or_default();
        let (root, path) = match text.split_once("://") {
            #[cfg(feature = "s3")]
            Some(("s3", rest)) => {
                // Checked as a whole, so that an error names all of it.
                S3Place::parse(text)?;
                let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
                let (bucket, path) = place.split_once('/').unwrap_or((place, ""));
                let path = percent_encoding::percent_decode_str(path).collect();
                (format!("s3://{bucket}?{query}"), path)
            }
            #[cfg(any(feature = "gridfs", feature = "redis"))]
            Some((scheme @ ("mongodb" | "redis" | "rediss"), rest)) => {
                let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
                let mut parts = place.splitn(3, '/');
                let (host, db) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
                let root = format!("{scheme}://{host}/{db}?{query}");
                match scheme {
                    #[cfg(feature = "gridfs")]
                    "mongodb" => drop(GridFsPlace::parse(&root)?),
                    #[cfg(feature = "redis")]
                    "redis" | "rediss" => drop(RedisPlace::parse(&root)?),
                    _ => return Err(not_here(&root)),
                }
                (root, percent_encoding::percent_decode_str(parts.next().unwrap_or_default()).collect())
            }
            #[cfg(feature = "webhdfs")]
            Some((scheme @ "webhdfs", rest)) => {
                HdfsPlace::parse(text)?;
                let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
                (format!("{scheme}://{host}"), percent_encoding::percent_decode_str(path).collect())
            }
            Some(("file", path)) if path.starts_with('/') => ("/".to_owned(), path.as_bytes().to_vec()),
            Some((scheme, _)) => {
                // Without the rest: it may contain a password.
                return Err(Error::new(format!("a store of the kind '{scheme}:' cannot be used"))
                    .why("that kind is not in this build")
                    .remedy("`surgetank help stores` lists the kinds that there are"));
            }
            None => {
                let here = absolute(Path::new(given)).map_err(|why| {
                    let what = Error::new(format!("{} is not a usable path", given.display())).why(why);
                    what.remedy("give the path of a file or directory")
                })?;
                let slash: &[u8] = if given.as_bytes().ends_with(b"/") { b"/" } else { b"" };
                ("/".to_owned(), [here.as_os_str().as_bytes(), slash].concat())
            }
        };
        let inside = path.last().is_none_or(|byte| *byte == b'/');
        let names: Vec<&[u8]> =
            path.split(|byte| *byte == b'/').filter(|name| !name.is_empty() && *name != b".").collect();
        if names.contains(&&b".."[..]) {
            return Err(Error::new(format!("{text} cannot be used")).why("there is .. in it"));
        }
        Ok(Self { root, path: StorePath(names.join(&b'/')), inside })
    }

    pub fn is_local(&self) -> bool {
        self.root == "/"
    }

    /// Can a directory of it be opened as a store of its own, with the same files?
    pub fn divides(&self) -> bool {
        self.is_local() || self.root.starts_with("s3://") || self.root.contains("webhdfs://")
    }

    /// Does it exist? (The root of an opened server always exists.)
    pub fn is_there(root: &str, dir: &StorePath, state: &Path, who: Cred) -> Result<bool> {
        if dir.0.is_empty() || !root.starts_with("s3://") {
            return Ok(true);
        }
        let parent = dir.parent();
        let name = &dir.0[parent.0.len()..];
        let name = StorePath(name.strip_prefix(b"/").unwrap_or(name).to_vec());
        match Self::open(root, &parent, state, None)?.stat(who, &name) {
            Ok(_) => Ok(true),
            Err(why) if why.kind() == std::io::ErrorKind::NotFound => Ok(false),
            Err(why) => Err(Error::new(format!("{dir} cannot be looked for")).why(why)),
        }
    }

    /// Opens a directory of a server or of this machine. `state`: remembers operations in progress.
    pub fn open(root: &str, dir: &StorePath, state: &Path, how: Option<Verify>) -> Result<Arc<dyn Store>> {
        if root == "/" {
            let path = Path::new("/").join(std::ffi::OsStr::from_bytes(&dir.0));
            let refused =
                |why: &dyn std::fmt::Display| Error::new(format!("{} cannot be opened", path.display())).why(why);
            let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
            let opened = rustix::fs::open(&path, flags, rustix::fs::Mode::empty()).map_err(|why| refused(&why))?;
            return Ok(Arc::new(PosixStore::new(opened, path.display().to_string()).map_err(|why| refused(&why))?));
        }
        #[cfg(any(feature = "gridfs", feature = "redis", feature = "s3"))]
        let tree_of = |server: Arc<dyn Objects>| -> Result<Arc<dyn Store>> {
            let store = ObjectStore::new(server, state, how.unwrap_or(Verify::Cache), LISTING_TTL);
            let store = store.map_err(|why| Error::new(format!("{} cannot be used", state.display())).why(why))?;
            Ok(Arc::new(if how.is_some() { store } else { store.as_it_was() }))
        };
        #[cfg(feature = "s3")]
        if root.starts_with("s3://") {
            let mut place = S3Place::parse(root)?;
            let name = String::from_utf8_lossy(&dir.0);
            place.prefix = if name.is_empty() { String::new() } else { format!("{name}/") };
            let server = if how.is_some() { S3::open(place)? } else { S3::open_to_read(place)? };
            return tree_of(Arc::new(server));
        }
        #[cfg(feature = "gridfs")]
        if is_gridfs(root) {
            return tree_of(Arc::new(GridFs::open(GridFsPlace::parse(root)?)?));
        }
        #[cfg(feature = "redis")]
        if is_redis(root) {
            return tree_of(Arc::new(open_redis(root, LISTING_TTL)?));
        }
        #[cfg(feature = "webhdfs")]
        if is_hdfs(root) {
            let mut place = HdfsPlace::parse(root)?;
            let name = std::str::from_utf8(&dir.0)
                .map_err(|_| Error::new(format!("{root} cannot be used")).why("the path is not UTF-8"))?;
            place.root = if name.is_empty() { String::new() } else { format!("/{name}") };
            let opened = if how.is_some() { WebHdfs::open } else { WebHdfs::open_to_read };
            return Ok(Arc::new(opened(place, LISTING_TTL)?));
        }
        Err(not_here(root))
    }
}

/// Longer than a walk takes from a directory's listing to its files.
const LISTING_TTL: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> (String, String, bool) {
        let address = Address::parse(text).unwrap_or_else(|why| panic!("{why}"));
        (address.root, String::from_utf8(address.path.0).unwrap_or_default(), address.inside)
    }

    #[test]
    fn places_are_a_server_and_a_path() {
        assert_eq!(parsed("/a//b/./c"), ("/".into(), "a/b/c".into(), false));
        assert_eq!(parsed("file:///a/b/"), ("/".into(), "a/b".into(), true));
        let here = std::env::current_dir().unwrap_or_default().join("x").display().to_string();
        assert_eq!(parsed("x").1, here[1..]);
        assert!(Address::parse("s3://bucket/../x").is_err() && Address::parse("gopher://x/y").is_err());
        #[cfg(feature = "s3")]
        {
            let query = "endpoint=http://127.0.0.1:9";
            let root = format!("s3://bucket?{query}");
            assert_eq!(parsed(&format!("s3://bucket/a%20b/c?{query}")), (root.clone(), "a b/c".into(), false));
            assert_eq!(parsed(&format!("s3://bucket?{query}")), (root, String::new(), true));
            assert!(Address::parse("s3://bucket/x?secret=y").is_err());
        }
        #[cfg(feature = "webhdfs")]
        {
            let root = "webhdfs://ann@host:9870".to_owned();
            assert_eq!(parsed("webhdfs://ann@host:9870/a%20b//c/"), (root, "a b/c".into(), true));
            assert!(Address::parse("webhdfs://host/x?y").is_err());
        }
        #[cfg(feature = "redis")]
        {
            let root = "redis://host:7000/2?prefix=p".to_owned();
            assert_eq!(parsed("redis://host:7000/2/a/b?prefix=p"), (root, "a/b".into(), false));
            assert!(Address::parse("redis://host/a/b").is_err() && Address::parse("redis://u:p@host/0").is_err());
        }
        #[cfg(feature = "gridfs")]
        {
            let root = "mongodb://me@host:7000/db?bucket=b".to_owned();
            assert_eq!(parsed("mongodb://me@host:7000/db/a/b/?bucket=b"), (root, "a/b".into(), true));
            assert!(Address::parse("mongodb://host").is_err() && Address::parse("mongodb://u:p@host/db").is_err());
        }
    }
}
