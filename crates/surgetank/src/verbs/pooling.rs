//! The options by which `run` and `mount` join a pool.

use std::ffi::OsString;
use std::net::ToSocketAddrs;
use std::path::PathBuf;
use std::time::Duration;

use surgetank_policy::config::{Config, PoolConfig, Way};
use surgetank_policy::rule::RuleSet;
use surgetank_types::error::{Error, Result};
use surgetank_types::model::Role;

use super::wait::duration_millis;
use crate::agent::way::mountable;
use crate::pool::rendezvous;
use crate::pool::rendezvous::meeting::is_supported;
use crate::pool::rendezvous::server::place;

const LEASE: &str = "10s";
/// Leases of other lengths make no sense: clocks and kernels need some time, and people do not wait longer.
const LEASES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(3600));

/// In place of a pool's name: none, also in a Slurm job of several nodes.
const NO_POOL: &str = "none";
/// The name of a Slurm job's pool is this and the job's number.
const JOB_PREFIX: &str = "slurm-";
/// All jobs of a user have one secret. (A file for each job would stay.)
const SECRET_OF_JOBS: &str = "slurm";

#[derive(Debug, Clone, Default, clap::Args)]
pub struct Pooling {
    /// Share the directory with other nodes: agents with this name and the same store are one pool; none: no pool
    /// (SURGETANK_POOL) [default: slurm-JOBID in a Slurm job of several nodes]
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
    /// What this node is for: storage prefers it for copies of other nodes' files (--replicas), and keeps no room for programs
    /// of its own (SURGETANK_ROLE) [default: compute]
    #[arg(long, value_name = "compute|storage", help_heading = "Pool")]
    role: Option<String>,
    /// Keep the pool's registry in this server, and not in the first member: redis://HOST:PORT, rediss://HOST:PORT,
    /// redis+sentinel://HOST:PORT,…/MASTER or etcd://HOST:PORT,…; the same on all nodes (SURGETANK_REGISTRY)
    #[arg(long, value_name = "URL", help_heading = "Pool")]
    registry: Option<String>,
    /// The file with the registry's password, with mode 0600 (SURGETANK_REGISTRY_PASSWORD_FILE)
    #[arg(long, value_name = "FILE", help_heading = "Pool")]
    registry_password_file: Option<PathBuf>,
}

/// The value of a variable; an empty one counts as not set.
fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

fn text_of(name: &str) -> Option<String> {
    variable(name).map(|value| value.to_string_lossy().into_owned())
}

/// A pool's name.
struct Named {
    /// As the user gave it, for messages.
    source: String,
    name: String,
    /// How many nodes the Slurm job has after which it is named.
    nodes: Option<u64>,
}

fn refused(what: &str, why: impl std::fmt::Display) -> Error {
    Error::new(what.to_owned()).why(why).data("nothing was begun")
}

impl Pooling {
    /// Puts the pool into the configuration, if one is named or the Slurm job has several nodes. `quiet`: the user
    /// wants to read of problems only.
    pub fn configure(&self, config: &mut Config, quiet: bool) -> Result<()> {
        let lease = self.lease()?;
        let (registry, registry_password) = self.registry()?;
        let role = self.role()?;
        let Some(Named { source, name, nodes }) = self.named()? else { return Ok(()) };
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if name.is_empty() || name.len() > 64 || name.starts_with('.') || !name.bytes().all(is_plain) {
            let why = "a name has 1 to 64 letters, digits, `-`, `_` and `.`, and begins with no `.`";
            return Err(refused(&source, why).remedy("choose another name, the same on all nodes"));
        }
        // (A job for which no pool was named works as it would without one.)
        let unmountable = nodes.and_then(|_| mountable(&config.over).err());
        let without = unmountable.map(|why| (format!("nothing can be mounted: {why}"), ""));
        match (excluded(config).or(without), nodes) {
            (Some((why, _)), Some(nodes)) => {
                if !quiet {
                    eprintln!("surgetank: the Slurm job has {nodes} nodes, and this one joins no pool: {why}");
                }
                return Ok(());
            }
            (Some((why, remedy)), None) => return Err(refused(&source, why).remedy(remedy)),
            (None, _) => {}
        }
        let or_none = if nodes.is_some() { ", or work without a pool: --pool none" } else { "" };
        let host = self.pool_host.clone().or_else(|| text_of("SURGETANK_POOL_HOST")).unwrap_or_else(own_name);
        if (host.as_str(), 0).to_socket_addrs().is_err() {
            let remedy = "name this node as others reach it: --pool-host HOST, or SURGETANK_POOL_HOST";
            return Err(refused(&source, format!("{host} has no address")).remedy(format!("{remedy}{or_none}")));
        }
        let given = self.pool_secret.clone().or_else(|| variable("SURGETANK_POOL_SECRET_FILE").map(PathBuf::from));
        let secret = match given {
            Some(path) => {
                std::path::absolute(&path).map_err(|why| refused(&source, format!("{}: {why}", path.display())))?
            }
            None => default_secret(&name).ok_or_else(|| {
                let remedy = "name the file with the secret: --pool-secret FILE";
                refused(&source, "HOME is not set").remedy(format!("{remedy}{or_none}"))
            })?,
        };
        let announcement = match nodes {
            Some(nodes) if !quiet => format!(
                "the Slurm job has {nodes} nodes: this one joins the pool {name} (to work without a pool: --pool none)"
            ),
            _ => String::new(),
        };
        let believed = rendezvous::BELIEVED_MAX.min(lease / rendezvous::BELIEVED_OF_A_LEASE);
        config.store_ttl = config.store_ttl.min(believed);
        // Not `auto`: a start that can make no mount fails, and does not work without the pool.
        config.door = Way::Fuse;
        let is_of_job = nodes.is_some();
        config.pool =
            Some(PoolConfig { name, secret, host, lease, role, is_of_job, announcement, registry, registry_password });
        Ok(())
    }

    /// Empty values are refused here, too, whether there is a pool or not.
    fn lease(&self) -> Result<Duration> {
        let is_empty = |path: &PathBuf| path.as_os_str().is_empty();
        let empty = [
            ("--pool-host", self.pool_host.as_ref().is_some_and(String::is_empty)),
            ("--pool-secret", self.pool_secret.as_ref().is_some_and(is_empty)),
        ];
        if let Some((option, _)) = empty.iter().find(|(_, is_empty)| *is_empty) {
            return Err(refused(option, "its value is empty").remedy("give a value, or leave the option out"));
        }
        let lease = self.pool_lease.clone().or_else(|| text_of("SURGETANK_POOL_LEASE"));
        let lease = duration_millis(lease.as_deref().unwrap_or(LEASE));
        let wrong =
            |why: String| refused("--pool-lease", why).remedy("give a time from 1s to 1h, or leave it out: 10s");
        let lease = Duration::from_millis(lease.map_err(wrong)?);
        if lease < LEASES.0 || lease > LEASES.1 {
            return Err(wrong("it has to be from 1s to 1h".to_owned()));
        }
        Ok(lease)
    }

    fn role(&self) -> Result<Role> {
        let (source, text) = match (&self.role, text_of("SURGETANK_ROLE")) {
            (Some(text), _) => ("--role", text.clone()),
            (None, Some(text)) => ("SURGETANK_ROLE", text),
            (None, None) => return Ok(Role::default()),
        };
        match text.as_str() {
            "compute" => Ok(Role::Compute),
            "storage" => Ok(Role::Storage),
            other => {
                let why = format!("'{other}' is not one of compute, storage");
                Err(refused(source, why).remedy("name one of them, or leave the option out"))
            }
        }
    }

    /// The registry's server, and the file with its password. A wrong one is refused here, before an agent starts.
    fn registry(&self) -> Result<(Option<String>, Option<PathBuf>)> {
        let (source, url) = match (&self.registry, text_of("SURGETANK_REGISTRY")) {
            (Some(url), _) => ("--registry", Some(url.clone())),
            (None, url) => ("SURGETANK_REGISTRY", url),
        };
        let file = self.registry_password_file.clone();
        let file = file.or_else(|| variable("SURGETANK_REGISTRY_PASSWORD_FILE").map(PathBuf::from));
        let file = file.map(|path| {
            let named = |why| refused("--registry-password-file", format!("{}: {why}", path.display()));
            std::path::absolute(&path).map_err(named)
        });
        let file = file.transpose()?;
        let Some(url) = url else { return Ok((None, None)) };
        let remedy = match url.rsplit_once('@').map(|(user, _)| user.contains("://") && user.matches(':').count() > 1) {
            Some(true) => "put the password into a file with mode 0600: --registry-password-file FILE",
            _ => "name a server, for example --registry redis://HOST:6379, or leave the option out",
        };
        place(&url, None).map_err(|why| refused(source, why).remedy(remedy))?;
        let remedy = "name a file of yours with mode 0600 that has only the password";
        place(&url, file.as_deref()).map_err(|why| refused("--registry-password-file", why).remedy(remedy))?;
        Ok((Some(url), file))
    }

    fn named(&self) -> Result<Option<Named>> {
        let (source, name) = match (&self.pool, text_of("SURGETANK_POOL")) {
            (Some(name), _) => (format!("--pool {name}"), name.clone()),
            (None, Some(name)) => (format!("SURGETANK_POOL={name}"), name),
            (None, None) => return of_slurm_job(),
        };
        Ok((name != NO_POOL).then_some(Named { source, name, nodes: None }))
    }
}

/// The pool of the Slurm job, if it has several nodes. (In a step, too, these variables are those of the whole job.)
fn of_slurm_job() -> Result<Option<Named>> {
    let Some(job) = text_of("SLURM_JOB_ID") else { return Ok(None) };
    let counts = ["SLURM_JOB_NUM_NODES", "SLURM_NNODES"];
    let Some((variable, count)) = counts.iter().find_map(|name| Some((name, text_of(name)?))) else { return Ok(None) };
    const REMEDY: &str = "name the pool, the same on all nodes: --pool NAME. To work without a pool: --pool none";
    let Ok(nodes) = count.parse::<u64>() else {
        return Err(refused(&format!("{variable}={count}"), "it is not a number of nodes").remedy(REMEDY));
    };
    if nodes <= 1 {
        return Ok(None);
    }
    let source = format!("SLURM_JOB_ID={job}");
    if !is_number(&job) {
        return Err(refused(&source, "it is not the number of a job").remedy(REMEDY));
    }
    Ok(Some(Named { source, name: format!("{JOB_PREFIX}{job}"), nodes: Some(nodes) }))
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// What the user chose with which there is no pool: the reason, and what to do.
fn excluded(config: &Config) -> Option<(String, &'static str)> {
    if config.door == Way::Seccomp {
        return Some(("the members of a pool need a mount".to_owned(), "leave `--door seccomp` out"));
    }
    let url = config.store_url()?;
    if !is_supported(url) {
        let scheme = url.split_once(':').map_or(url, |(scheme, _)| scheme);
        let why = format!("the store is not a directory or an S3 bucket, but of the kind `{scheme}:`");
        return Some((
            why,
            "name a directory that all nodes have mounted, or a bucket: --store PATH, --store s3://BUCKET",
        ));
    }
    let packs = RuleSet::new(&config.rules).is_ok_and(|rules| rules.compresses() || rules.deduplicates());
    let why = "rules compress or deduplicate files, and the store is on a server".to_owned();
    packs.then_some((why, "leave these rules out"))
}

fn own_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

fn default_secret(name: &str) -> Option<PathBuf> {
    let configured = variable("XDG_CONFIG_HOME").map(PathBuf::from);
    let home = || variable("HOME").map(|dir| PathBuf::from(dir).join(".config"));
    let is_of_job = name.strip_prefix(JOB_PREFIX).is_some_and(is_number);
    let file = if is_of_job { SECRET_OF_JOBS } else { name };
    Some(configured.or_else(home)?.join("surgetank/pools").join(file))
}
