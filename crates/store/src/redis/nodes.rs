//! The server to ask: the one of the URL, or in a cluster the one that has the store's keys now.
//!
//! All keys of a store have one hash tag and so one server. Any other server redirects to it (`MOVED`). If it is lost, the
//! others are asked in order until one of them names the keys' present server. While the keys move from one server to another
//! (`ASK`, `TRYAGAIN`) no client can see all of them at once, so the driver waits.

use super::failure::Failure;
use super::place::Place;
use surgetank_types::error::Error;
use surgetank_types::sync::{Mutex, MutexGuard, PoisonError};

/// One server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Host name or address.
    pub host: String,
    /// TCP port.
    pub port: u16,
}

pub struct Nodes {
    place: Place,
    at: Mutex<At>,
}

struct At {
    node: Node,
    client: redis::Client,
    /// Grows whenever another server is asked from then on.
    turn: u64,
    /// The servers of the URL, and then those of which the cluster consists, as far as it reported them.
    known: Vec<Node>,
    is_cluster: bool,
}

impl Nodes {
    pub fn new(place: &Place) -> Result<Self, Error> {
        let known = place.nodes.clone();
        let node = known.first().cloned().ok_or_else(|| Error::new(format!("the store {place} has no server")))?;
        let at = At { client: place.client(&node)?, known, node, turn: 0, is_cluster: false };
        Ok(Self { place: place.clone(), at: Mutex::new(at) })
    }

    fn at(&self) -> MutexGuard<'_, At> {
        self.at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The server to ask now, and a number that tells whether that is still so.
    pub fn now(&self) -> (redis::Client, u64) {
        let at = self.at();
        (at.client.clone(), at.turn)
    }

    pub fn is_cluster(&self) -> bool {
        self.at().is_cluster
    }

    pub fn is_now(&self, turn: u64) -> bool {
        self.at().turn == turn
    }

    /// Records the answer of `CLUSTER NODES`.
    pub fn learn(&self, text: &str) {
        let mut at = self.at();
        at.is_cluster = true;
        let others = nodes_of(text, &at.node);
        at.known.truncate(self.place.nodes.len());
        for node in others {
            if !at.known.contains(&node) {
                at.known.push(node);
            }
        }
    }

    /// Considers why a server that was asked at this number did not answer. `fresh`: the connection was new; the error of an
    /// idle one may be old. Returns whether another server is to be asked at once.
    pub fn heed(&self, turn: u64, fresh: bool, why: &Failure) -> bool {
        let mut at = self.at();
        if at.turn != turn {
            return why.code == "MOVED";
        }
        let next = match why.code.as_str() {
            "MOVED" => match moved_to(&why.message, &at.node) {
                Some(node) => node,
                None => return false,
            },
            // The server has failed, or no longer has the cluster's state.
            "" | "CLUSTERDOWN" | "LOADING" if why.again && fresh => {
                let nth = at.known.iter().position(|node| *node == at.node).map_or(0, |nth| nth + 1);
                let Some(next) = at.known.get(nth % at.known.len()).filter(|next| **next != at.node) else {
                    return false;
                };
                next.clone()
            }
            _ => return false,
        };
        at.is_cluster |= why.code == "MOVED";
        at.turn += 1;
        match self.place.client(&next) {
            Ok(client) => (at.client, at.node) = (client, next),
            Err(why) => tracing::warn!("{}: {why}", self.place),
        }
        why.code == "MOVED"
    }
}

/// Parses `SLOT HOST:PORT`; without a host it is the server that answers.
fn moved_to(message: &str, from: &Node) -> Option<Node> {
    node_of(message.split_whitespace().nth(1)?, from)
}

fn node_of(address: &str, from: &Node) -> Option<Node> {
    let (host, port) = address.rsplit_once(':')?;
    let host = if host.is_empty() || host == "?" { from.host.as_str() } else { host };
    let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
    Some(Node { host, port: port.parse().ok().filter(|port| *port != 0)? })
}

/// Parses lines of `ID HOST:PORT@BUSPORT[,HOSTNAME…] FLAGS …`.
fn nodes_of(text: &str, from: &Node) -> Vec<Node> {
    let node = |line: &str| {
        let mut words = line.split_whitespace().skip(1);
        let (address, flags) = (words.next()?, words.next()?);
        let is_there = !flags.split(',').any(|flag| matches!(flag, "noaddr" | "handshake" | "fail"));
        let address = address.split(['@', ',']).next()?;
        node_of(address, from).filter(|_| is_there)
    };
    text.lines().filter_map(node).collect()
}

/// The part that decides the slot of a key, if all keys with this prefix have the same.
pub fn hash_tag(prefix: &str) -> Option<&str> {
    let (_, rest) = prefix.split_once('{')?;
    let (tag, _) = rest.split_once('}')?;
    (!tag.is_empty()).then_some(tag)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(host: &str, port: u16) -> Node {
        Node { host: host.into(), port }
    }

    #[test]
    fn redirection_names_the_keys_server() {
        let from = node("seed", 6379);
        assert_eq!(moved_to("3999 10.0.0.7:6381", &from), Some(node("10.0.0.7", 6381)));
        assert_eq!(moved_to("3999 :6381", &from), Some(node("seed", 6381)));
        assert_eq!(moved_to("3999 [::1]:6381", &from), Some(node("::1", 6381)));
        assert_eq!(moved_to("3999 ::1:6381", &from), Some(node("::1", 6381)));
        for nonsense in ["", "3999", "3999 host", "3999 host:port", "3999 host:0"] {
            assert_eq!(moved_to(nonsense, &from), None, "{nonsense}");
        }
    }

    #[test]
    fn nodes_of_a_cluster_are_parsed() {
        let text = "\
07c3 127.0.0.1:30004@31004,host4 slave e7d1 0 1426238317239 4 connected
67ed :30002@31002,,shard-id=x master - 0 1426238316232 2 connected 5461-10922
6ec2 127.0.0.1:30005@31005 myself,slave,fail 67ed 0 1426238316232 5 connected
824f :0@0 master,noaddr - 0 0 0 disconnected
nonsense
";
        let from = node("seed", 1);
        let known = [node("127.0.0.1", 30004), node("seed", 30002)];
        assert_eq!(nodes_of(text, &from), known);
    }

    #[test]
    fn hash_tag_of_prefix_decides_the_slot() {
        for (prefix, tag) in
            [("{project}:", Some("project")), ("a{b}c{d}", Some("b")), ("a{}{d}", None), ("{", None), ("a:", None)]
        {
            assert_eq!(hash_tag(prefix), tag, "{prefix}");
        }
    }
}
