//! Prepares once, before any mount, what all agents of the directory share: the lock, the namespaces, and handles on
//! the directories that the mount will cover.
//!
//! The danger that it avoids: opening the store after the mount exists, so that the agent serves the store through
//! itself.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::thread::CapabilitySet;
use surgetank_core::report::Visibility;
use surgetank_policy::config::Config;
use surgetank_types::error::{Error, Result};

use super::life::Startup;
use super::place::Place;
use super::scrape::Port;
use super::seclusion;
use super::signals::Signals;
use super::submounts::{self, Taken};
use super::way;
use crate::pool::rendezvous::meeting::Where;
use crate::pool::{process, rendezvous};
use crate::socket_address::Address;

pub struct Ground {
    pub config: Config,
    pub wanted: Visibility,
    pub visibility: Visibility,
    pub by_calls: bool,
    pub place: Place,
    pub user_namespace: u64,
    pub store: Option<OwnedFd>,
    /// The served directory itself, if the store is elsewhere.
    pub bare: Option<OwnedFd>,
    pub key: String,
    pub taken: Vec<Taken>,
    /// The port of the metrics, if they are served; each agent answers there during its life.
    pub port: Option<Port>,
    /// Closes when the starter has joined or died.
    pub starter: BufReader<io::Stdin>,
    /// Holds the lock until the last process that has it ends.
    pub lock: File,
    /// What the pool's process begins with, if there is one.
    pub pool: Option<process::Start>,
}

fn fail(why: impl std::fmt::Display) -> Error {
    Error::new("the agent cannot start").why(why)
}

impl Ground {
    /// Call it while the process has a single thread.
    pub fn prepare() -> Result<Self> {
        let mut starter = BufReader::new(io::stdin());
        let mut line = Vec::new();
        starter.read_until(b'\n', &mut line).map_err(fail)?;
        let Startup { config, place, wanted } =
            serde_json::from_slice(&line).map_err(|error| fail(format!("the start-up message: {error}")))?;

        let place = Place::open(place.as_path())?;
        let lock = place.try_agent_lock()?.ok_or_else(|| fail("another agent serves this directory"))?;
        Signals::ignore_broken_leases();
        raise_descriptor_limit();

        let port = Port::of(&config)?;
        let user_before = namespace_inode("user").map_err(fail)?;
        let by_calls = wanted == Visibility::Private && way::chosen(&config)?.is_none();
        let visibility = match wanted {
            Visibility::Private if by_calls => Visibility::Private,
            Visibility::Private => seclusion::seclude()?,
            Visibility::Global => Visibility::Global,
        };
        let user_namespace = namespace_inode("user").map_err(fail)?;
        drop_capabilities(user_namespace != user_before).map_err(|error| fail(format!("capabilities: {error}")))?;

        let over = &config.over;
        let is_directory = config.store_url().is_none();
        let store = is_directory.then(|| open_directory(&config.store, "the store")).transpose()?;
        let bare = (config.store != *over).then(|| open_directory(over, "the directory")).transpose()?;
        let may_mount =
            rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN));
        let taken = if may_mount && !by_calls { submounts::take(over)? } else { refuse_submounts(over)? };
        let key = place.identify(&config)?;
        let pool = pool_of(&config, store.as_ref(), (&place, &key))?;
        Ok(Self {
            config,
            wanted,
            visibility,
            by_calls,
            place,
            user_namespace,
            store,
            bare,
            key,
            taken,
            port,
            starter,
            lock,
            pool,
        })
    }
}

fn pool_of(config: &Config, store: Option<&OwnedFd>, (place, key): (&Place, &str)) -> Result<Option<process::Start>> {
    let Some(pool) = &config.pool else { return Ok(None) };
    let path = place.pool_socket();
    // (A missing one is the rule.)
    let _ = std::fs::remove_file(&path);
    let bound = Address::of(&path).and_then(|address| UnixListener::bind(address.path()));
    let socket = bound.map_err(|error| fail(format!("{}: {error}", path.display())))?;
    let store = match store {
        Some(store) => Where::Directory(store.try_clone().map_err(fail)?),
        None => Where::Server(config.store_url().unwrap_or_default().to_owned()),
    };
    let believed = config.store_ttl.min(rendezvous::BELIEVED_MAX);
    let (config, over, temporaries) = (pool.clone(), config.over.clone(), key.to_owned());
    Ok(Some(process::Start { config, store, over, believed, temporaries, socket }))
}

pub fn namespace_inode(which: &str) -> io::Result<u64> {
    Ok(std::fs::metadata(format!("/proc/self/ns/{which}"))?.ino())
}

/// Raises the limit of descriptors to its maximum: every open file of every program costs one or two.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let now = getrlimit(Resource::Nofile);
    let system = std::fs::read_to_string("/proc/sys/fs/nr_open").ok().and_then(|text| text.trim().parse().ok());
    // Beyond the hard limit only with CAP_SYS_RESOURCE; otherwise up to it.
    let all = Rlimit { current: system, maximum: system };
    if (system.is_none() || setrlimit(Resource::Nofile, all).is_err())
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: now.maximum, maximum: now.maximum })
    {
        tracing::warn!(%error, "the descriptor limit stays at {:?}", now.current);
    }
}

/// CAP_SYS_RESOURCE would let the drain use the blocks that a file system reserves for root. In a user namespace the
/// agent keeps only the right to mount. It checks permissions itself and must not be above them.
fn drop_capabilities(in_user_namespace: bool) -> io::Result<()> {
    let mut sets = rustix::thread::capabilities(None)?;
    let kept = if in_user_namespace { CapabilitySet::SYS_ADMIN } else { !CapabilitySet::SYS_RESOURCE };
    sets.effective &= kept;
    sets.permitted &= kept;
    sets.inheritable &= kept;
    rustix::thread::set_capabilities(None, sets)?;
    Ok(())
}

fn open_directory(path: &Path, role: &str) -> Result<OwnedFd> {
    rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| Error::new(format!("{role} {} cannot be opened", path.display())).why(errno))
}

fn refuse_submounts(over: &Path) -> Result<Vec<Taken>> {
    let below = submounts::below(over).map_err(|error| Error::new("the mount table cannot be read").why(error))?;
    match below.first() {
        None => Ok(Vec::new()),
        Some(path) => Err(Error::new(format!("{} is mounted below the served directory", path.display()))
            .why("without user namespaces an ordinary user cannot bind it through")
            .remedy("serve a directory that does not contain it (--over)")),
    }
}
