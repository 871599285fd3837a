//! Addresses of hosts, cached for a while: the library below resolves them at every request, even if it then uses an open
//! connection.
//!
//! The danger that it avoids: a server that moves. An entry is short-lived, and is used longer only if the name server does not
//! answer.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::NextTimeout;

const REMEMBERED: Duration = Duration::from_secs(30);

#[derive(Debug, Default)]
pub struct Names {
    asking: DefaultResolver,
    known: Mutex<HashMap<String, (Instant, Vec<SocketAddr>)>>,
}

impl Names {
    fn known(&self, host: &str, even_old: bool) -> Option<ResolvedSocketAddrs> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let (since, addresses) = known.get_mut(host)?;
        if since.elapsed() > REMEMBERED && !even_old {
            return None;
        }
        // Large services have many addresses: each new connection begins with another one.
        addresses.rotate_left(1);
        let mut answer = self.asking.empty();
        addresses.iter().for_each(|address| answer.push(*address));
        Some(answer)
    }
}

impl Resolver for Names {
    fn resolve(&self, uri: &Uri, config: &Config, timeout: NextTimeout) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let host = format!("{:?} {:?}", uri.scheme_str(), uri.authority());
        if let Some(addresses) = self.known(&host, false) {
            return Ok(addresses);
        }
        match self.asking.resolve(uri, config, timeout) {
            Ok(addresses) => {
                let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
                known.insert(host, (surgetank_types::clock::tick(), addresses.to_vec()));
                Ok(addresses)
            }
            Err(why) => self.known(&host, true).ok_or(match why {
                // The system's error for this has no number.
                ureq::Error::Io(_) => ureq::Error::HostNotFound,
                why => why,
            }),
        }
    }
}
