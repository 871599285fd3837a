//! How the members of a pool find each other: by a file in the store, and by a secret that each of them has.
//!
//! The file has the number of the pool (random), the registry's address, and the machine and lease of its maker. It
//! appears whole, and only if no file of this name is there. Its maker removes it. The secret is not in the store.
//!
//! A second pool begins only if the first member is proven dead: nothing listens at its address, and one lease later
//! still nothing does. Until then other members of that pool may serve. A member that does not answer may serve: then
//! the join fails.
//!
//! The danger that this avoids: two pools over one store, in which two members decide the same names.

pub mod beside;
pub mod meeting;
pub mod server;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use surgetank_policy::config::PoolConfig;
use surgetank_pool::membership::{Host, Joining, Membership, RegistryAt};
use surgetank_pool::{Secret, Times};
use surgetank_types::clock::tick;
use surgetank_types::model::STORE_TEMPORARY_PREFIX;

use meeting::{FRESH, Meeting, publish, random};

/// So long one try to reach a registry may take. All tries together: this or a lease, whichever is longer.
const ANSWER: Duration = Duration::from_secs(4);
/// The same for a registry at whose address nothing listened before.
const DEAD_ANSWER: Duration = Duration::from_secs(1);
/// So long a registry that ends, or a file that is listed and not there, may stay.
const ENDING: Duration = Duration::from_secs(60);
/// So long the making of a file may take in a directory without hard links.
const WRITING: Duration = Duration::from_secs(2);
/// Between two looks at the files.
const PAUSE: Duration = Duration::from_millis(50);
/// So long before its lease ends a member stops: kernels believe an answer for at most 1 s, and clocks differ. With a short
/// lease: a quarter of it.
const MARGIN: Duration = Duration::from_millis(1200);
/// No member believes an answer about a directory longer than this: so long a first change there may wait.
pub const BELIEVED_MAX: Duration = Duration::from_secs(1);
/// An answer is believed for at most this part of a lease. So it is less than the margin.
pub const BELIEVED_OF_A_LEASE: u32 = 6;
/// What has no answer is asked again after this time, or a fifth of a lease.
const AGAIN: Duration = Duration::from_millis(500);
/// So often another member was first, or another pool was found.
const TRIES_MAX: usize = 20;
/// A lease of the file is at most so long.
const LEASE_MAX: Duration = Duration::from_secs(3600);

/// A membership, and the file that this member made.
pub struct Joined {
    pub membership: Membership,
    /// Its name in the store, if this member has the registry, or if the registry is in a server.
    pub made: Option<Vec<u8>>,
}

/// Joins the pool, or begins it.
///
/// Errors: the secret is another one or is not readable; the store cannot be written; other nodes cannot reach this
/// machine; the first member does not answer and is not proven dead; the pool's file is damaged. The first line of the
/// text is the cause. A second line, if there is one, is what to do.
///
/// `temporaries`: begins the names of this member's temporaries in the store.
pub fn join(config: &PoolConfig, temporaries: &str, store: &Meeting, host: &Arc<dyn Host>) -> io::Result<Joined> {
    if let Some(url) = &config.registry {
        return server::join(config, url, temporaries, store, host);
    }
    let mut search = Search {
        config,
        temporaries,
        store,
        host,
        secret: secret(&config.secret)?,
        machine: machine(),
        tries: 0,
        tried: None,
        ending_until: tick() + ENDING,
        silent_since: None,
        refused_since: None,
    };
    loop {
        if let Some(joined) = search.step()? {
            return Ok(joined);
        }
    }
}

/// Errors: the pool's lease is so short that this node would believe answers for too long.
fn believes_too_long(config: &PoolConfig, lease: Duration) -> io::Result<()> {
    if config.lease <= lease || lease / BELIEVED_OF_A_LEASE >= BELIEVED_MAX {
        return Ok(());
    }
    let text = format!(
        "members of the pool {} have leases of {lease:?}, and this node would believe answers longer",
        config.name
    );
    let remedy = format!("start this with --pool-lease {}ms", lease.as_millis());
    Err(io::Error::new(ErrorKind::InvalidInput, format!("{text}\n{remedy}")))
}

/// The member that made the file has left.
pub fn remove(store: &Meeting, name: &[u8]) {
    // (A file that stays is found dead by the next member.)
    let _ = store.remove(name);
}

/// What a pool's file says.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    /// Random, one for each pool.
    pool: [u8; 16],
    /// Where the registry is: `HOST:PORT`.
    address: String,
    /// The boot and the network namespace of the registry's machine. `None`: its kernel does not report them.
    machine: Option<String>,
    /// That of all members of the pool.
    lease: Duration,
}

impl Place {
    fn text(&self) -> String {
        let (pool, machine) = (u128::from_be_bytes(self.pool), self.machine.as_deref().unwrap_or("-"));
        format!("{pool:032x} {} {machine} {}\n", self.address, self.lease.as_millis())
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let line = std::str::from_utf8(bytes).ok()?.strip_suffix('\n')?;
        let mut fields = line.split(' ');
        let mut next = || fields.next().filter(|field| !field.is_empty());
        let (pool, address, machine, lease) = (next()?, next()?, next()?, next()?);
        if pool.len() != 32 || fields.next().is_some() {
            return None;
        }
        Some(Self {
            pool: u128::from_str_radix(pool, 16).ok()?.to_be_bytes(),
            address: address.to_owned(),
            machine: Some(machine.to_owned()).filter(|machine| machine != "-"),
            lease: Duration::from_millis(lease.parse().ok()?).min(LEASE_MAX),
        })
    }
}

/// One join.
struct Search<'a> {
    config: &'a PoolConfig,
    temporaries: &'a str,
    store: &'a Meeting,
    host: &'a Arc<dyn Host>,
    secret: Secret,
    machine: Option<String>,
    tries: usize,
    /// The pool to which the times below belong: the number of its file, and its own.
    tried: Option<(u64, [u8; 16])>,
    ending_until: Instant,
    silent_since: Option<Instant>,
    refused_since: Option<Instant>,
}

impl Search<'_> {
    /// `None`: the files may be others by now.
    fn step(&mut self) -> io::Result<Option<Joined>> {
        let numbers = numbers(self.config, self.store)?;
        let Some(number) = numbers.last().copied() else {
            self.has_no_server()?;
            return self.begin(1, None, &numbers);
        };
        let Some(place) = self.read(number)? else {
            return self.look_again(number, "the store lists it and does not find it");
        };
        if self.tried != Some((number, place.pool)) {
            self.count_try()?;
            self.tried = Some((number, place.pool));
            self.ending_until = tick() + ENDING;
            (self.silent_since, self.refused_since) = (None, None);
        }
        believes_too_long(self.config, place.lease)?;
        let began = tick();
        let patience = if self.refused_since.is_some() { DEAD_ANSWER } else { ANSWER };
        let joining = self.joining(place.pool, RegistryAt::Peer(place.address.clone()), patience, place.lease);
        let why = match Membership::join(joining, self.host.clone()) {
            Ok(membership) => return Ok(Some(Joined { membership, made: None })),
            Err(why) => why,
        };
        match why.kind() {
            ErrorKind::ConnectionAborted => self.look_again(number, "its pool has ended"),
            // (All else has failed in this process.)
            ErrorKind::ConnectionRefused | ErrorKind::PermissionDenied | ErrorKind::TimedOut
                if misleads(&place, self.machine.as_deref()) =>
            {
                Err(self.misled(number, &place))
            }
            ErrorKind::ConnectionRefused => self.refused(number, &place, &numbers),
            ErrorKind::TimedOut => self.silent(number, &place, began, &why),
            ErrorKind::PermissionDenied => {
                let text = format!("the pool's first member at {} refused: {why}", place.address);
                let remedy = "use the same secret and the same version on all nodes";
                Err(io::Error::new(why.kind(), format!("{text}\n{remedy}; {}", self.removal(number))))
            }
            _ => Err(self.not_listening(&why)),
        }
    }

    /// A pool of this name whose registry is in a server may have members.
    fn has_no_server(&self) -> io::Result<()> {
        let name = server::name(self.config);
        if self.store.read(&name)?.is_none() {
            return Ok(());
        }
        let (pool, file) = (&self.config.name, String::from_utf8_lossy(&name).into_owned());
        let text = format!("the pool {pool} has its registry in a server (file {file} in the store)");
        let remedy = "name the server: --registry URL; if that pool has no members, remove the file";
        Err(io::Error::new(ErrorKind::AlreadyExists, format!("{text}\n{remedy}")))
    }

    /// How long a first member may be silent.
    fn patience(&self) -> Duration {
        ANSWER.max(self.config.lease)
    }

    /// `lease`: that of the pool, which counts.
    fn joining(&self, pool: [u8; 16], registry: RegistryAt, patience: Duration, lease: Duration) -> Joining {
        Joining {
            secret: self.secret.clone(),
            pool,
            registry,
            host: self.config.host.clone(),
            temporaries: self.temporaries.to_owned(),
            role: self.config.role,
            resumes: None,
            times: Times { margin: MARGIN.min(lease / 4), renew: lease * 3 / 10, again: AGAIN.min(lease / 5) },
            patience,
        }
    }

    fn count_try(&mut self) -> io::Result<()> {
        self.tries += 1;
        let text = "other members begin and end the pool too often";
        if self.tries > TRIES_MAX { Err(io::Error::other(text)) } else { Ok(()) }
    }

    /// The file goes soon.
    fn look_again(&self, number: u64, why: &str) -> io::Result<Option<Joined>> {
        if tick() >= self.ending_until {
            let text = format!("the file {} stays in the store: {why}", self.shown(number));
            return Err(io::Error::new(ErrorKind::TimedOut, format!("{text}\n{}", self.removal(number))));
        }
        thread::sleep(PAUSE);
        Ok(None)
    }

    /// The first member may be stopped or slow, or the network between is cut.
    fn silent(&mut self, number: u64, place: &Place, began: Instant, why: &io::Error) -> io::Result<Option<Joined>> {
        let since = *self.silent_since.get_or_insert(began);
        if since.elapsed() >= self.patience() {
            let (address, file) = (&place.address, self.shown(number));
            let which = format!("the pool's first member at {address} (file {file} in the store)");
            let text = format!("{which} does not answer and may still serve: {why}");
            let remedy = format!("start this again when that node answers; {}", self.removal(number));
            return Err(io::Error::new(ErrorKind::TimedOut, format!("{text}\n{remedy}")));
        }
        thread::sleep(PAUSE);
        Ok(None)
    }

    /// The first member is dead. The other members serve until their leases end.
    fn refused(&mut self, number: u64, place: &Place, known: &BTreeSet<u64>) -> io::Result<Option<Joined>> {
        self.silent_since = None;
        let is_first = self.refused_since.is_none();
        let since = *self.refused_since.get_or_insert_with(tick);
        if since.elapsed() >= place.lease {
            tracing::warn!(pool = self.config.name, address = place.address, "a new pool begins");
            let next = number.checked_add(1).ok_or_else(|| self.damaged(number))?;
            return self.begin(next, Some(place), known);
        }
        if is_first {
            let (pool, address, wait) = (&self.config.name, &place.address, place.lease);
            tracing::warn!(pool, address, ?wait, "the pool's first member is dead: other members may serve until then");
        }
        while since.elapsed() < place.lease && self.is_newest(number, place)? {
            thread::sleep(PAUSE.min(place.lease.saturating_sub(since.elapsed())));
        }
        self.ending_until = tick() + ENDING;
        Ok(None)
    }

    fn is_newest(&self, number: u64, place: &Place) -> io::Result<bool> {
        let is_last = numbers(self.config, self.store)?.last() == Some(&number);
        Ok(is_last && self.read(number)?.is_some_and(|now| now.pool == place.pool))
    }

    /// Makes the file. `dead`: the pool before, whose file is the last of the `known` ones. All of these are dead.
    fn begin(&mut self, number: u64, dead: Option<&Place>, known: &BTreeSet<u64>) -> io::Result<Option<Joined>> {
        let (pool, lease) = (random()?, self.config.lease);
        let membership =
            Membership::join(self.joining(pool, RegistryAt::Here(lease), ANSWER, lease), self.host.clone())
                .map_err(|why| self.not_listening(&why))?;
        let place = Place { pool, address: membership.address().to_owned(), machine: self.machine.clone(), lease };
        let name = name_of(self.config, number);
        if self.store.publish(&name, place.text().as_bytes())? {
            if self.is_alone(number, dead, known) {
                self.sweep(known);
                return Ok(Some(Joined { membership, made: Some(name) }));
            }
            membership.end_registry();
            remove(self.store, &name);
        }
        self.count_try()?;
        thread::sleep(PAUSE);
        Ok(None)
    }

    /// Is each other file that of a dead pool? If a user has removed a file, another member may have begun a pool with
    /// another number.
    fn is_alone(&self, number: u64, dead: Option<&Place>, known: &BTreeSet<u64>) -> bool {
        let Ok(now) = numbers(self.config, self.store) else { return false };
        let are_known = now.iter().all(|other| *other == number || known.contains(other));
        let is_same = |dead: &Place| match self.read(number - 1) {
            Ok(found) => found.is_none_or(|found| found.pool == dead.pool),
            Err(_) => false,
        };
        are_known && dead.is_none_or(is_same)
    }

    /// Removes the files of dead pools, and the temporaries of killed processes. (A process that misses its temporary
    /// looks again.)
    fn sweep(&self, dead: &BTreeSet<u64>) {
        let left = temporaries(self.config, self.store).unwrap_or_default();
        for name in dead.iter().map(|number| name_of(self.config, *number)).chain(left) {
            remove(self.store, &name);
        }
    }

    /// `None`: there is no such file any more.
    fn read(&self, number: u64) -> io::Result<Option<Place>> {
        let until = tick() + WRITING;
        loop {
            let bytes = self.store.read(&name_of(self.config, number));
            let named =
                |why: io::Error| io::Error::new(why.kind(), format!("{} in the store: {why}", self.shown(number)));
            let Some(bytes) = bytes.map_err(named)? else { return Ok(None) };
            if let Some(place) = Place::parse(&bytes) {
                return Ok(Some(place));
            }
            // (Without hard links it may be written at the moment.)
            if bytes.ends_with(b"\n") || tick() >= until {
                return Err(self.damaged(number));
            }
            thread::sleep(PAUSE);
        }
    }

    fn damaged(&self, number: u64) -> io::Error {
        let text = format!("the pool's file {} in the store is damaged", self.shown(number));
        io::Error::new(ErrorKind::InvalidData, format!("{text}\n{}", self.removal(number)))
    }

    fn misled(&self, number: u64, place: &Place) -> io::Error {
        let address = &place.address;
        let text = format!(
            "the address {address} of the pool's first member reaches this machine itself. \
            That member is on another machine, or ran before this one restarted"
        );
        let remedy = "start each member with a name that other nodes reach: --pool-host HOST";
        io::Error::new(ErrorKind::AddrNotAvailable, format!("{text}\n{remedy}; {}", self.removal(number)))
    }

    fn not_listening(&self, why: &io::Error) -> io::Error {
        let text = format!("this process cannot be a member at {}: {why}", self.config.host);
        io::Error::new(why.kind(), format!("{text}\nname this node as others reach it: --pool-host HOST"))
    }

    fn removal(&self, number: u64) -> String {
        format!("if that member is gone for good, remove the file {} in the store", self.shown(number))
    }

    fn shown(&self, number: u64) -> String {
        String::from_utf8_lossy(&name_of(self.config, number)).into_owned()
    }
}

/// Does the address reach this machine, though another one wrote it? (Or this one, before it restarted.)
fn misleads(place: &Place, machine: Option<&str>) -> bool {
    let is_here = machine.is_some() && machine == place.machine.as_deref();
    let reaches_here = |address: SocketAddr| address.ip().is_unspecified() || address.ip().to_canonical().is_loopback();
    !is_here && place.address.to_socket_addrs().is_ok_and(|mut all| all.any(reaches_here))
}

/// The boot and the network namespace: in both together an address on the loopback reaches the same processes.
fn machine() -> Option<String> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let network = std::fs::read_link("/proc/self/ns/net").ok()?;
    let digits: String = network.to_str()?.chars().filter(char::is_ascii_digit).collect();
    let boot = boot.trim();
    (!boot.is_empty() && !boot.contains(' ')).then(|| format!("{boot}/{digits}"))
}

/// The secret of the file, or a new one if there is no such file.
fn secret(path: &Path) -> io::Result<Secret> {
    let named = |why: io::Error| io::Error::new(why.kind(), format!("{}: {why}", path.display()));
    let (dir, name) = path
        .parent()
        .zip(path.file_name())
        .ok_or_else(|| named(io::Error::new(ErrorKind::InvalidInput, "it cannot be a file")))?;
    let until = tick() + WRITING;
    for _ in 0..2 {
        loop {
            match Secret::read(path) {
                Err(why) if why.kind() == ErrorKind::NotFound => break,
                // (Without hard links it may be written at the moment.)
                Err(why) if why.kind() == ErrorKind::InvalidData && tick() < until => thread::sleep(PAUSE),
                read => return read.map_err(named),
            }
        }
        std::fs::create_dir_all(dir).map_err(named)?;
        // Only if there is none yet: another member may have made one.
        let dir = File::open(dir).map_err(named)?;
        publish(dir.as_fd(), name.as_bytes(), Secret::random()?.to_hex().as_bytes()).map_err(named)?;
    }
    Secret::read(path).map_err(named)
}

fn prefix_of(config: &PoolConfig) -> Vec<u8> {
    [STORE_TEMPORARY_PREFIX, b"pool-", config.name.as_bytes(), b"."].concat()
}

fn name_of(config: &PoolConfig, number: u64) -> Vec<u8> {
    [prefix_of(config), number.to_string().into_bytes()].concat()
}

/// In the form in which [`name_of`] writes it.
fn number_of(digits: &str) -> Option<u64> {
    digits.parse().ok().filter(|number: &u64| number.to_string() == digits)
}

/// What is behind the pool's prefix in the names of its files and temporaries.
fn endings(config: &PoolConfig, store: &Meeting) -> io::Result<Vec<String>> {
    let prefix = prefix_of(config);
    let names = store.names(&prefix, usize::MAX)?;
    let ending = |name: &Vec<u8>| Some(std::str::from_utf8(name.strip_prefix(&*prefix)?).ok()?.to_owned());
    Ok(names.iter().filter_map(ending).collect())
}

/// The numbers of the pool's files.
fn numbers(config: &PoolConfig, store: &Meeting) -> io::Result<BTreeSet<u64>> {
    Ok(endings(config, store)?.iter().filter_map(|ending| number_of(ending)).collect())
}

/// The names of the pool's temporaries: `NUMBER.RANDOM.new` behind the prefix. (Another pool's name may begin as this
/// one.)
fn temporaries(config: &PoolConfig, store: &Meeting) -> io::Result<Vec<Vec<u8>>> {
    let is_temporary = |ending: &str| {
        let parts = ending.strip_suffix(FRESH).and_then(|rest| rest.split_once('.'));
        parts.is_some_and(|(number, random)| {
            number_of(number).is_some() && random.len() == 16 && random.bytes().all(|digit| digit.is_ascii_hexdigit())
        })
    };
    let endings = endings(config, store)?.into_iter().filter(|ending| is_temporary(ending));
    Ok(endings.map(|ending| [prefix_of(config), ending.into_bytes()].concat()).collect())
}

#[cfg(test)]
mod tests;
