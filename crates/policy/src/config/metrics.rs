//! The address at which the agent serves its metrics, and the token that readers show: `--metrics 127.0.0.1:9464`.
//!
//! The agent listens only if the configuration has an address. Every user of the machine can connect to a port of the loopback
//! interface, and a TCP connection does not identify the user. A reader therefore shows a token, from a file that only the
//! permitted users can read.
//!
//! The danger that it avoids: figures of one user's run that all other users, or the network, can read by mistake.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::key::{Draft, refused};
use surgetank_types::error::Result;

/// The file with the token that readers of the metrics must show.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "lowercase")]
pub enum TokenFile {
    /// `metrics-token` in the root of journals and sockets, made if it is absent.
    #[default]
    Own,
    /// This file.
    File(PathBuf),
    /// No token: every reader that can connect gets the metrics.
    Nobody,
}

/// Parses `IP:PORT`, or a port of 127.0.0.1; `None` for `none`. Host names are refused: the interface must be visible in the
/// configuration.
pub(super) fn address(text: &str) -> std::result::Result<Option<SocketAddr>, String> {
    let text = text.trim();
    if text == "none" {
        return Ok(None);
    }
    let parsed = match (text.parse::<u16>(), text.strip_prefix("localhost:").map(str::parse::<u16>)) {
        (Ok(port), _) | (_, Some(Ok(port))) => Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port)),
        _ => text.parse().ok(),
    };
    match parsed {
        Some(address) if address.port() > 0 => Ok(Some(address)),
        Some(_) => Err(format!("'{text}' has no port; give PORT or IP:PORT")),
        None => Err(format!(
            "'{text}' is none of PORT (of 127.0.0.1), IP:PORT, none; for example 9464, or 0.0.0.0:9464 for all interfaces"
        )),
    }
}

/// Checks both keys together: without a token, only a loopback address is allowed.
pub(super) fn settled(draft: &Draft) -> Result<(Option<SocketAddr>, TokenFile)> {
    let address = draft.metrics.as_ref().and_then(|given| given.value);
    let token = draft.metrics_token_file.as_ref();
    if let (Some(address), Some(given)) = (address, token)
        && given.value == TokenFile::Nobody
        && !address.ip().is_loopback()
    {
        let why = format!(
            "without a token every user in the network could read the metrics at {address}; leave it out (a token is made then), or serve 127.0.0.1 only"
        );
        return Err(refused(&given.origin, "metrics_token_file", &why));
    }
    Ok((address, token.map(|given| given.value.clone()).unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_of_each_form_is_parsed_or_refused() {
        for (text, address_then) in [
            ("9464", Some("127.0.0.1:9464")),
            ("localhost:9464", Some("127.0.0.1:9464")),
            (" 0.0.0.0:1 ", Some("0.0.0.0:1")),
            ("[::1]:9464", Some("[::1]:9464")),
            ("none", None),
        ] {
            assert_eq!(address(text).expect(text), address_then.map(|text| text.parse().expect("address")), "{text}");
        }
        for text in ["", "0", "127.0.0.1:0", ":9464", "127.0.0.1", "99999", "node1:9464", "http://127.0.0.1:1"] {
            assert!(address(text).is_err(), "{text}");
        }
    }
}
