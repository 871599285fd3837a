//! Pools over a store in which an agent starts that is not a member: their files in the store's root.
//!
//! The danger that this avoids: a run beside a pool whose user believes that it is a member.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use surgetank_types::clock::tick;
use surgetank_types::model::STORE_TEMPORARY_PREFIX;

use super::meeting::Meeting;
use super::{Place, machine, misleads, number_of};

/// A start takes at most this much longer, for all pools together. (A name service may take longer.)
const ANSWERS: Duration = Duration::from_millis(500);
/// So many names of the store's root are read: a start must not wait for a listing of millions.
const NAMES_MAX: usize = 100_000;

/// A pool that is not known to be dead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Beside {
    /// The pool's name.
    pub name: String,
    /// Its file in the store's root.
    pub file: String,
    /// A process listens at its address. (Otherwise no process answered in time, or this process cannot ask.)
    pub answers: bool,
}

/// The pools over the store, without the one named `own`.
///
/// A pool whose first member is dead is left out: each of its addresses refuses the connection. Other members of it may
/// serve until their leases end.
pub fn beside(store: &Meeting, own: Option<&str>) -> io::Result<Vec<Beside>> {
    let mut newest: BTreeMap<String, u64> = BTreeMap::new();
    for name in store.names(&[STORE_TEMPORARY_PREFIX, b"pool-"].concat(), NAMES_MAX)? {
        let found = pool_of(&name);
        if let Some((name, number)) = found.filter(|(name, _)| Some(name.as_str()) != own) {
            let newest = newest.entry(name).or_default();
            *newest = number.max(*newest);
        }
    }
    if newest.is_empty() {
        return Ok(Vec::new());
    }
    let (machine, until) = (machine(), tick() + ANSWERS);
    let alive = newest.into_iter().filter_map(|(name, number)| {
        let file = format!("{}pool-{name}.{number}", String::from_utf8_lossy(STORE_TEMPORARY_PREFIX));
        let place = match store.read(file.as_bytes()) {
            Ok(None) => return None,
            Ok(Some(bytes)) => Place::parse(&bytes),
            // (It is the file of another user.)
            Err(_) => None,
        };
        let answers = place.map_or(Some(false), |place| answers(&place, machine.as_deref(), until))?;
        Some(Beside { name, file, answers })
    });
    Ok(alive.collect())
}

/// Whether a process listens at the first member's address. `None`: that member is dead.
fn answers(place: &Place, machine: Option<&str>, until: Instant) -> Option<bool> {
    let Ok(addresses) = place.address.to_socket_addrs() else { return Some(false) };
    if misleads(place, machine) {
        return Some(false);
    }
    let mut is_dead = true;
    for address in addresses {
        let left = until.saturating_duration_since(tick());
        if left.is_zero() {
            return Some(false);
        }
        match TcpStream::connect_timeout(&address, left) {
            Ok(_) => return Some(true),
            Err(why) => is_dead &= why.kind() == ErrorKind::ConnectionRefused,
        }
    }
    if is_dead { None } else { Some(false) }
}

/// The pool and the number of a pool's file.
fn pool_of(file: &[u8]) -> Option<(String, u64)> {
    let rest = file.strip_prefix(STORE_TEMPORARY_PREFIX)?.strip_prefix(b"pool-")?;
    let (name, number) = std::str::from_utf8(rest).ok()?.rsplit_once('.')?;
    (!name.is_empty()).then_some((name.to_owned(), number_of(number)?))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::net::TcpListener;
    use std::path::Path;

    use super::*;

    fn place(address: &str, machine: Option<String>) -> String {
        let place = Place { pool: [7; 16], address: address.to_owned(), machine, lease: Duration::from_secs(10) };
        place.text()
    }

    fn found(store: &Path, own: Option<&str>) -> Vec<(String, bool)> {
        beside(&Meeting::to_look_at(store, None).unwrap(), own)
            .unwrap()
            .into_iter()
            .map(|pool| (pool.name, pool.answers))
            .collect()
    }

    #[test]
    fn only_pools_that_may_serve_are_found() {
        let store = tempfile::tempdir().unwrap();
        let put = |ending: &str, text: String| {
            fs::write(store.path().join(format!(".surgetank-tmp-pool-{ending}")), text).unwrap();
        };
        assert_eq!(found(store.path(), None), []);
        let listens = TcpListener::bind("127.0.0.1:0").unwrap();
        let live = listens.local_addr().unwrap().to_string();
        let dead = {
            let ended = TcpListener::bind("127.0.0.1:0").unwrap();
            ended.local_addr().unwrap().to_string()
        };
        put("dead.3", place(&dead, machine()));
        put("live.2", place(&live, machine()));
        // An earlier pool of the same name, and the temporary of a member that is starting.
        put("live.1", place(&dead, machine()));
        put("new.1.0123456789abcdef.new", place(&live, machine()));
        fs::write(store.path().join(".surgetank-tmp-other"), "x").unwrap();
        assert_eq!(found(store.path(), None), [("live".to_owned(), true)]);
        assert_eq!(found(store.path(), Some("live")), []);
        // What this machine's loopback answers says nothing of another machine.
        put("far.1", place(&dead, Some("another/1".to_owned())));
        put("half.1", String::new());
        put("dots.1.1", place(&live, machine()));
        let all = [("dots.1", true), ("far", false), ("half", false), ("live", true)];
        assert_eq!(found(store.path(), None), all.map(|(name, answers)| (name.to_owned(), answers)));
        assert_eq!(
            beside(&Meeting::to_look_at(store.path(), None).unwrap(), None).unwrap()[1].file,
            ".surgetank-tmp-pool-far.1"
        );
    }
}
