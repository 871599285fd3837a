//! The options by which `run` and `mount` join a pool.

use std::net::ToSocketAddrs;
use std::path::PathBuf;
use std::time::Duration;

use surgetank_policy::config::{Config, PoolConfig, Way};
use surgetank_types::error::{Error, Result};

use super::wait::duration_millis;

/// Leases of other lengths make no sense: clocks and kernels need some time, and people do not wait longer.
const LEASES: (Duration, Duration) = (Duration::from_secs(6), Duration::from_secs(3600));

/// No member believes an answer of the store longer than this: so long a first change in a directory may wait.
const BELIEVED_MAX: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Default, clap::Args)]
pub struct Pooling {
    /// Share the directory with other nodes: agents with this name and the same store are one pool
    #[arg(long, value_name = "NAME", env = "SURGETANK_POOL")]
    pool: Option<String>,
    /// Under which name or address other nodes reach this one [default: the host name]
    #[arg(long, value_name = "HOST", env = "SURGETANK_POOL_HOST", help_heading = "Pool")]
    pool_host: Option<String>,
    /// The file with the secret of the pool; it is made if there is none [default: ~/.config/surgetank/pools/NAME]
    #[arg(long, value_name = "FILE", env = "SURGETANK_POOL_SECRET_FILE", help_heading = "Pool")]
    pool_secret: Option<PathBuf>,
    /// How long a node that does not answer keeps its directories
    #[arg(long, value_name = "TIME", env = "SURGETANK_POOL_LEASE", default_value = "10s", help_heading = "Pool")]
    pool_lease: String,
}

impl Pooling {
    /// Puts the pool into the configuration, if one is named.
    pub fn configure(&self, config: &mut Config) -> Result<()> {
        let Some(name) = &self.pool else { return Ok(()) };
        let refused = |why: String| Error::new(format!("--pool {name}")).why(why).data("nothing was begun");
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if name.is_empty() || name.len() > 64 || name.starts_with('.') || !name.bytes().all(is_plain) {
            return Err(refused(
                "a name has 1 to 64 letters, digits, `-`, `_` and `.`, and begins with no `.`".to_owned(),
            ));
        }
        if config.door == Way::Seccomp {
            return Err(refused("the members of a pool need a mount".to_owned()).remedy("leave `--door seccomp` out"));
        }
        if config.store_url().is_some() {
            let why = format!("the store {} is not a directory", config.store.display());
            return Err(refused(why).remedy("name a directory that all nodes have mounted: --store PATH"));
        }
        let lease = duration_millis(&self.pool_lease).map_err(|why| refused(format!("--pool-lease: {why}")))?;
        let lease = Duration::from_millis(lease);
        if lease < LEASES.0 || lease > LEASES.1 {
            return Err(refused("--pool-lease: from 6s to 1h".to_owned()));
        }
        let host = match &self.pool_host {
            Some(host) => host.clone(),
            None => own_name(),
        };
        if (host.as_str(), 0).to_socket_addrs().is_err() {
            return Err(refused(format!("{host} has no address"))
                .remedy("name this node as others reach it: --pool-host HOST, or SURGETANK_POOL_HOST"));
        }
        let secret = match &self.pool_secret {
            Some(path) => std::path::absolute(path).map_err(|why| refused(format!("{}: {why}", path.display())))?,
            None => default_secret(name).ok_or_else(|| {
                refused("HOME is not set".to_owned()).remedy("name the file with the secret: --pool-secret FILE")
            })?,
        };
        config.store_ttl = config.store_ttl.min(BELIEVED_MAX);
        config.pool = Some(PoolConfig { name: name.clone(), secret, host, lease });
        Ok(())
    }
}

fn own_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

fn default_secret(name: &str) -> Option<PathBuf> {
    let configured = std::env::var_os("XDG_CONFIG_HOME").filter(|dir| !dir.is_empty()).map(PathBuf::from);
    let home = || std::env::var_os("HOME").filter(|dir| !dir.is_empty()).map(|dir| PathBuf::from(dir).join(".config"));
    Some(configured.or_else(home)?.join("surgetank/pools").join(name))
}
