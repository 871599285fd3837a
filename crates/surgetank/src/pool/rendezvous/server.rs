//! Joins a pool whose registry is in a key-value server: it is found there by its name.
//!
//! The store has one file of the pool, with the pool's random number and its lease. The registry has the same number. So
//! two pools of one name over different stores do not become one: the second one is refused. Its maker chose the number,
//! so it may begin at once. Another member begins only after a lease: an earlier pool may have been forgotten. The member
//! that leaves last removes the file, after the registry's rows.
//!
//! The dangers that this avoids: members over different stores in one pool; a pool beside one that the server has
//! forgotten; a password in a list of processes.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use surgetank_policy::config::PoolConfig;
use surgetank_pool::connection::PROTOCOL;
use surgetank_pool::membership::{Host, Joining, Membership, RegistryAt};
use surgetank_pool::remote::driver;
use surgetank_pool::remote::place::Place;
use surgetank_pool::remote::{FOUNDING, Pool};
use surgetank_pool::{Secret, Times};
use surgetank_types::clock::tick;

use super::meeting::{Meeting, random};
use super::{AGAIN, Joined, MARGIN, PAUSE, TRIES_MAX, WRITING, believes_too_long, name_of, numbers, prefix_of};

/// A password is at most so long.
const PASSWORD_BYTES_MAX: u64 = 4096;
/// So much longer than two leases a join may take: those are for members that report after a restart of the server.
const PATIENCE: Duration = Duration::from_secs(8);

/// What the store's file says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Mark {
    pool: [u8; 16],
    lease: Duration,
}

impl Mark {
    fn text(&self) -> String {
        format!("{:032x} {}\n", u128::from_be_bytes(self.pool), self.lease.as_millis())
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let line = std::str::from_utf8(bytes).ok()?.strip_suffix('\n')?;
        let (pool, lease) = line.split_once(' ').filter(|(pool, _)| pool.len() == 32)?;
        let lease = Duration::from_millis(lease.parse().ok()?);
        Some(Self { pool: u128::from_str_radix(pool, 16).ok()?.to_be_bytes(), lease: lease.min(super::LEASE_MAX) })
    }
}

/// The file of a pool with a registry in a server.
pub(super) fn name(config: &PoolConfig) -> Vec<u8> {
    [prefix_of(config), b"registry".to_vec()].concat()
}

/// The URL, with the password of the file.
///
/// Errors: the URL is wrong; the file cannot be read, or others can read it.
pub fn place(url: &str, password: Option<&Path>) -> io::Result<Place> {
    let mut place = Place::parse(url).map_err(|why| io::Error::new(ErrorKind::InvalidInput, why))?;
    if let Some(path) = password {
        let named = |why: io::Error| io::Error::new(why.kind(), format!("{}: {why}", path.display()));
        let file = File::open(path).map_err(named)?;
        let meta = file.metadata().map_err(named)?;
        if meta.uid() != rustix::process::geteuid().as_raw() || meta.mode() & 0o077 != 0 {
            let why = "other users have access to the password: its file must be yours, with mode 0600";
            return Err(named(io::Error::new(ErrorKind::PermissionDenied, why)));
        }
        file.take(PASSWORD_BYTES_MAX).read_to_string(&mut place.password).map_err(named)?;
        let end = place.password.trim_end_matches(['\r', '\n']).len();
        place.password.truncate(end);
    }
    Ok(place)
}

/// Joins the pool, or begins it.
///
/// Errors: as [`super::join`].
pub(super) fn join(
    config: &PoolConfig,
    url: &str,
    temporaries: &str,
    store: &Meeting,
    host: &Arc<dyn Host>,
) -> io::Result<Joined> {
    let place = place(url, config.registry_password.as_deref())?;
    let secret = super::secret(&config.secret)?;
    let name = name(config);
    let mut look = FOUNDING * 3 / 4;
    for _ in 0..TRIES_MAX {
        if let Some(number) = numbers(config, store)?.last() {
            let file = String::from_utf8_lossy(&name_of(config, *number)).into_owned();
            let text =
                format!("the pool {} has its registry in its first member (file {file} in the store)", config.name);
            let remedy = "leave --registry out to join it; if that pool is dead, remove the file";
            return Err(io::Error::new(ErrorKind::AlreadyExists, format!("{text}\n{remedy}")));
        }
        let (mark, is_founder) = match read(store, &name)? {
            Some(mark) => (mark, false),
            None => {
                let mark = Mark { pool: random()?, lease: config.lease };
                if !store.publish(&name, mark.text().as_bytes())? {
                    thread::sleep(PAUSE);
                    continue;
                }
                (mark, true)
            }
        };
        believes_too_long(config, mark.lease)?;
        let patience = if is_founder { 2 * mark.lease + PATIENCE } else { look };
        let joining = joining(config, (&place, &secret), mark, is_founder, (temporaries, patience));
        let why = match Membership::join(joining, host.clone()) {
            Ok(membership) => return Ok(Joined { membership, made: Some(name) }),
            Err(why) => why,
        };
        if is_founder {
            // (No member has this number.)
            let _ = store.remove(&name);
        } else if matches!(why.kind(), ErrorKind::TimedOut | ErrorKind::ConnectionAborted | ErrorKind::AlreadyExists)
            && look < mark.lease
        {
            // Its last member may be leaving, or its maker may be slow. Afterwards it is another file, or none.
            look = 2 * mark.lease + PATIENCE;
            continue;
        }
        return Err(explained(config, &place, &why));
    }
    Err(io::Error::other("other members begin and end the pool too often"))
}

fn joining(
    config: &PoolConfig,
    (place, secret): (&Place, &Secret),
    mark: Mark,
    is_founder: bool,
    (temporaries, patience): (&str, Duration),
) -> Joining {
    let uid = rustix::process::geteuid().as_raw();
    let proof = secret.proof(&[&mark.pool[..], &uid.to_be_bytes(), format!("{PROTOCOL}").as_bytes()].concat());
    let writes_max = driver::server(place, &config.name).writes_max();
    let pool = Pool { id: mark.pool, proof, lease: mark.lease, is_founder, writes_max };
    Joining {
        secret: secret.clone(),
        pool: mark.pool,
        registry: RegistryAt::Server {
            place: Box::new(place.clone()),
            name: config.name.clone(),
            pool: Box::new(pool),
        },
        host: config.host.clone(),
        temporaries: temporaries.to_owned(),
        role: config.role,
        resumes: None,
        times: Times {
            margin: MARGIN.min(mark.lease / 4),
            renew: mark.lease * 3 / 10,
            again: AGAIN.min(mark.lease / 5),
        },
        patience,
    }
}

/// What to do about it.
fn explained(config: &PoolConfig, place: &Place, why: &io::Error) -> io::Error {
    let name = &config.name;
    let (text, remedy) = match why.kind() {
        ErrorKind::AlreadyExists => {
            (format!("the pool {name} at {place} has another store"), "choose another name for this pool: --pool NAME")
        }
        ErrorKind::PermissionDenied => (
            why.to_string(),
            "use the same secret, user and version on all nodes, and the registry's password: --registry-password-file FILE",
        ),
        ErrorKind::AddrNotAvailable | ErrorKind::AddrInUse => {
            return io::Error::new(why.kind(), format!("{why}\nname this node as others reach it: --pool-host HOST"));
        }
        _ => (why.to_string(), "start the registry's server, or name another one: --registry URL"),
    };
    io::Error::new(why.kind(), format!("{text}\n{remedy}"))
}

/// `None`: there is no such file.
fn read(store: &Meeting, name: &[u8]) -> io::Result<Option<Mark>> {
    let until = tick() + WRITING;
    loop {
        let Some(bytes) = store.read(name)? else { return Ok(None) };
        if let Some(mark) = Mark::parse(&bytes) {
            return Ok(Some(mark));
        }
        // (Without hard links it may be written at the moment.)
        if bytes.ends_with(b"\n") || tick() >= until {
            let shown = String::from_utf8_lossy(name);
            let text = format!("the pool's file {shown} in the store is damaged");
            let remedy = "if the pool has no members, remove the file";
            return Err(io::Error::new(ErrorKind::InvalidData, format!("{text}\n{remedy}")));
        }
        thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests;
