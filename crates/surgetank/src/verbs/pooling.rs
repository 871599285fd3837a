//! The options by which `run` and `mount` join a pool.

use std::ffi::OsString;
use std::net::ToSocketAddrs;
use std::path::PathBuf;
use std::time::Duration;

use surgetank_policy::config::{Config, PoolConfig, Way};
use surgetank_types::error::{Error, Result};

use super::wait::duration_millis;

const LEASE: &str = "10s";
/// Leases of other lengths make no sense: clocks and kernels need some time, and people do not wait longer.
const LEASES: (Duration, Duration) = (Duration::from_secs(6), Duration::from_secs(3600));

/// No member believes an answer of the store longer than this: so long a first change in a directory may wait.
const BELIEVED_MAX: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Default, clap::Args)]
pub struct Pooling {
    /// Share the directory with other nodes: agents with this name and the same store are one pool (SURGETANK_POOL)
    #[arg(long, value_name = "NAME")]
    pool: Option<String>,
    /// Under which name or address other nodes reach this one (SURGETANK_POOL_HOST) [default: the host name]
    #[arg(long, value_name = "HOST", help_heading = "Pool")]
    pool_host: Option<String>,
    /// The file with the secret of the pool; it is made if there is none (SURGETANK_POOL_SECRET_FILE) [default:
    /// ~/.config/surgetank/pools/NAME]
    #[arg(long, value_name = "FILE", help_heading = "Pool")]
    pool_secret: Option<PathBuf>,
    /// How long a node that does not answer keeps its directories (SURGETANK_POOL_LEASE) [default: 10s]
    #[arg(long, value_name = "TIME", help_heading = "Pool")]
    pool_lease: Option<String>,
}

/// The value of a variable; an empty one counts as not set.
fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

fn text_of(name: &str) -> Option<String> {
    variable(name).map(|value| value.to_string_lossy().into_owned())
}

impl Pooling {
    /// Puts the pool into the configuration, if one is named.
    pub fn configure(&self, config: &mut Config) -> Result<()> {
        let refused = |what: &str, why: String| Error::new(what.to_owned()).why(why).data("nothing was begun");
        let is_empty = |path: &PathBuf| path.as_os_str().is_empty();
        let empty = [
            ("--pool-host", self.pool_host.as_ref().is_some_and(String::is_empty)),
            ("--pool-secret", self.pool_secret.as_ref().is_some_and(is_empty)),
        ];
        if let Some((option, _)) = empty.iter().find(|(_, is_empty)| *is_empty) {
            return Err(
                refused(option, "its value is empty".to_owned()).remedy("give a value, or leave the option out")
            );
        }
        let lease = self.pool_lease.clone().or_else(|| text_of("SURGETANK_POOL_LEASE"));
        let lease = duration_millis(lease.as_deref().unwrap_or(LEASE));
        let wrong =
            |why: String| refused("--pool-lease", why).remedy("give a time from 6s to 1h, or leave it out: 10s");
        let lease = Duration::from_millis(lease.map_err(wrong)?);
        if lease < LEASES.0 || lease > LEASES.1 {
            return Err(wrong("it has to be from 6s to 1h".to_owned()));
        }
        let (source, name) = match (&self.pool, text_of("SURGETANK_POOL")) {
            (Some(name), _) => (format!("--pool {name}"), name.clone()),
            (None, Some(name)) => (format!("SURGETANK_POOL={name}"), name),
            (None, None) => return Ok(()),
        };
        let refused = |why: String| refused(&source, why);
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if name.is_empty() || name.len() > 64 || name.starts_with('.') || !name.bytes().all(is_plain) {
            let why = "a name has 1 to 64 letters, digits, `-`, `_` and `.`, and begins with no `.`";
            return Err(refused(why.to_owned()).remedy("choose another name, the same on all nodes"));
        }
        if config.door == Way::Seccomp {
            return Err(refused("the members of a pool need a mount".to_owned()).remedy("leave `--door seccomp` out"));
        }
        if config.store_url().is_some() {
            let why = format!("the store {} is not a directory", config.store.display());
            return Err(refused(why).remedy("name a directory that all nodes have mounted: --store PATH"));
        }
        let host = self.pool_host.clone().or_else(|| text_of("SURGETANK_POOL_HOST")).unwrap_or_else(own_name);
        if (host.as_str(), 0).to_socket_addrs().is_err() {
            return Err(refused(format!("{host} has no address"))
                .remedy("name this node as others reach it: --pool-host HOST, or SURGETANK_POOL_HOST"));
        }
        let named = self.pool_secret.clone().or_else(|| variable("SURGETANK_POOL_SECRET_FILE").map(PathBuf::from));
        let secret = match named {
            Some(path) => std::path::absolute(&path).map_err(|why| refused(format!("{}: {why}", path.display())))?,
            None => default_secret(&name).ok_or_else(|| {
                refused("HOME is not set".to_owned()).remedy("name the file with the secret: --pool-secret FILE")
            })?,
        };
        config.store_ttl = config.store_ttl.min(BELIEVED_MAX);
        config.pool = Some(PoolConfig { name, secret, host, lease });
        Ok(())
    }
}

fn own_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

fn default_secret(name: &str) -> Option<PathBuf> {
    let configured = variable("XDG_CONFIG_HOME").map(PathBuf::from);
    let home = || variable("HOME").map(|dir| PathBuf::from(dir).join(".config"));
    Some(configured.or_else(home)?.join("surgetank/pools").join(name))
}
