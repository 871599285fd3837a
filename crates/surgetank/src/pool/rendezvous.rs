//! How the members of a pool find each other: by a file in the store, and by a secret that each of them has.
//!
//! The file says where the registry is. It is made whole and only if no such file is there, and only its maker removes
//! it. If that member does not answer, a file with the next number is made: then a new pool begins. The secret is not in
//! the store.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{AtFlags, Dir, Mode, OFlags};
use surgetank_policy::config::PoolConfig;
use surgetank_pool::membership::{Host, Joining, Membership, RegistryAt};
use surgetank_pool::{Secret, Times};
use surgetank_types::model::STORE_TEMPORARY_PREFIX;

/// So long a registry may take to answer before it counts as dead.
const ANSWER: Duration = Duration::from_secs(4);
/// So long before its lease ends a member stops: kernels believe an answer for at most 1 s, and clocks differ.
const MARGIN: Duration = Duration::from_millis(1200);
/// So often another member was first, or a pool was dead.
const TRIES_MAX: usize = 20;

/// A membership, and the file that this member made.
pub struct Joined {
    pub membership: Membership,
    /// Its name in the store, if this member has the registry.
    pub made: Option<Vec<u8>>,
}

/// Joins the pool, or begins it.
///
/// Errors: the secret is another one or is not readable, the store cannot be written, this machine cannot be reached.
pub fn join(config: &PoolConfig, store: &OwnedFd, host: &Arc<dyn Host>) -> io::Result<Joined> {
    let secret = secret(&config.secret)?;
    let joining = |pool, registry, patience| Joining {
        secret: secret.clone(),
        pool,
        registry,
        host: config.host.clone(),
        resumes: None,
        times: Times { margin: MARGIN, renew: config.lease * 3 / 10, again: Duration::from_millis(500) },
        patience,
    };
    let mut dead = None;
    for _ in 0..TRIES_MAX {
        let newest = newest(config, store)?;
        if let Some((number, name)) = newest.clone().filter(|(number, _)| dead != Some(*number)) {
            let (pool, address) = read(store, &name)?;
            let wanted = joining(pool, RegistryAt::Peer(address.clone()), ANSWER);
            match Membership::join(wanted, host.clone()) {
                Ok(membership) => return Ok(Joined { membership, made: None }),
                Err(why) if why.kind() == io::ErrorKind::PermissionDenied => {
                    let text = format!("pool {}: its first member at {address} refused: {why}", config.name);
                    return Err(io::Error::new(why.kind(), text));
                }
                Err(why) => {
                    tracing::warn!(%why, pool = config.name, "the pool's first member does not answer: a new pool begins");
                    dead = Some(number);
                    continue;
                }
            }
        }
        let mut pool = [0; 16];
        rustix::rand::getrandom(&mut pool, rustix::rand::GetRandomFlags::empty())?;
        let membership = Membership::join(joining(pool, RegistryAt::Here(config.lease), ANSWER), host.clone())?;
        let name = name_of(config, newest.map_or(1, |(number, _)| number + 1));
        if publish(store, &name, &pool, membership.address())? {
            return Ok(Joined { membership, made: Some(name) });
        }
    }
    Err(io::Error::other(format!("pool {}: others begin it again and again", config.name)))
}

/// The member that made the file has left.
pub fn remove(store: &OwnedFd, name: &[u8]) {
    // (A file that stays is found dead by the next member.)
    let _ = rustix::fs::unlinkat(store, name, AtFlags::empty());
}

/// The secret of the file, or a new one if there is no such file.
fn secret(path: &Path) -> io::Result<Secret> {
    let named = |why: io::Error| io::Error::new(why.kind(), format!("{}: {why}", path.display()));
    for _ in 0..2 {
        match Secret::read(path) {
            Err(why) if why.kind() == io::ErrorKind::NotFound => {}
            read => return read.map_err(named),
        }
        if let Some(dir) = path.parent() {
            std::fs::create_dir_all(dir).map_err(named)?;
        }
        let fresh = path.with_extension(format!("{}.new", std::process::id()));
        let mut file =
            File::options().write(true).create(true).truncate(true).mode(0o600).open(&fresh).map_err(named)?;
        file.write_all(Secret::random()?.to_hex().as_bytes()).and_then(|()| file.sync_all()).map_err(named)?;
        // Only if there is none yet: another member may have made one.
        let made = std::fs::hard_link(&fresh, path);
        std::fs::remove_file(&fresh).map_err(named)?;
        match made {
            Err(why) if why.kind() != io::ErrorKind::AlreadyExists => return Err(named(why)),
            _ => {}
        }
    }
    Secret::read(path).map_err(named)
}

fn prefix_of(config: &PoolConfig) -> Vec<u8> {
    [STORE_TEMPORARY_PREFIX, b"pool-", config.name.as_bytes(), b"."].concat()
}

fn name_of(config: &PoolConfig, number: u64) -> Vec<u8> {
    [prefix_of(config), number.to_string().into_bytes()].concat()
}

/// The file with the highest number.
fn newest(config: &PoolConfig, store: &OwnedFd) -> io::Result<Option<(u64, Vec<u8>)>> {
    let prefix = prefix_of(config);
    let mut newest = None;
    let dir = rustix::fs::openat(store, c".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    for entry in Dir::read_from(dir)? {
        let name = entry?.file_name().to_bytes().to_vec();
        let number = name.strip_prefix(&*prefix).and_then(|rest| std::str::from_utf8(rest).ok()?.parse().ok());
        newest = newest.max(number.map(|number: u64| (number, name)));
    }
    Ok(newest)
}

fn read(store: &OwnedFd, name: &[u8]) -> io::Result<([u8; 16], String)> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut text = String::new();
    let file = File::from(rustix::fs::openat(store, name, flags, Mode::empty())?);
    file.take(1024).read_to_string(&mut text)?;
    let parsed = || -> Option<([u8; 16], String)> {
        let (pool, address) = text.trim().split_once(' ')?;
        let number = u128::from_str_radix(pool, 16).ok()?;
        Some((number.to_be_bytes(), address.to_owned()))
    };
    let bad = || io::Error::new(io::ErrorKind::InvalidData, format!("{} is damaged", String::from_utf8_lossy(name)));
    parsed().ok_or_else(bad)
}

/// Returns whether the file was made: `false` if one of this name is there.
fn publish(store: &OwnedFd, name: &[u8], pool: &[u8; 16], address: &str) -> io::Result<bool> {
    let fresh = [name, b".", std::process::id().to_string().as_bytes(), b".new"].concat();
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let mut file = File::from(rustix::fs::openat(store, &*fresh, flags, Mode::from_raw_mode(0o600))?);
    let text = format!("{:032x} {address}\n", u128::from_be_bytes(*pool));
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all())?;
    let made = rustix::fs::linkat(store.as_fd(), &*fresh, store.as_fd(), name, AtFlags::empty());
    rustix::fs::unlinkat(store, &*fresh, AtFlags::empty())?;
    match made {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::EXIST) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}
