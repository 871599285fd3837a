//! How programs reach the directory: through a mount, or, if none is possible, through their intercepted system calls.

use std::path::Path;

use rustix::thread::CapabilitySet;
use surgetank_policy::config::{Config, Way};
use surgetank_types::error::{Error, Result};

use super::seclusion;
use crate::mount::trial::{Try, tried};
use crate::seccomp;

/// How a mount is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mount {
    /// With this process's privileges.
    Privileged,
    /// In a user namespace of its own.
    UserNamespace,
    /// By fusermount3; all programs of this user see the mount.
    Fusermount,
}

/// Call it while the process has a single thread. `None`: without a mount.
pub fn chosen(config: &Config) -> Result<Option<Mount>> {
    let by_calls = match config.door {
        Way::Fuse => return mountable(&config.over).map(Some).map_err(|why| refused(config, why)),
        Way::Seccomp => seccomp::is_possible(),
        Way::Auto => match mountable(&config.over) {
            Ok(mount) => return Ok(Some(mount)),
            Err(why) => {
                tracing::warn!(%why, "no mount can be made: programs' system calls are answered instead");
                seccomp::is_possible().map_err(|calls| format!("{calls}; and no mount can be made: {why}"))
            }
        },
    };
    by_calls.map_err(|why| refused(config, why))?;
    if config.store != config.over {
        let why = "without a mount (--door seccomp) the store has to be the directory itself";
        return Err(refused(config, why.to_owned()));
    }
    Ok(None)
}

fn refused(config: &Config, why: String) -> Error {
    Error::new(format!("{} cannot be served", config.over.display()))
        .why(why)
        .remedy("`surgetank doctor` tells what is missing")
        .data("nothing was begun: the command would have worked on the bare directory")
}

/// How `over` can be mounted for runs; each method is tried as for the real mount (see `seclusion`).
pub fn mountable(over: &Path) -> std::result::Result<Mount, String> {
    let device = std::fs::OpenOptions::new().read(true).write(true).open("/dev/fuse");
    device.map_err(|why| format!("/dev/fuse: {why}"))?;
    let privileged =
        rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN));
    if privileged {
        let tried = tried(over, Try { user: false, mount: true });
        return tried.map(|()| Mount::Privileged).map_err(|why| format!("mounting: {why}"));
    }
    match tried(over, Try { user: true, mount: false }) {
        Ok(()) => tried(over, Try { user: true, mount: true })
            .map(|()| Mount::UserNamespace)
            .map_err(|why| format!("mounting in a user namespace: {why}")),
        Err(_) if seclusion::fusermount().is_some() => Ok(Mount::Fusermount),
        Err(why) => Err(format!("user namespaces: {why}; fusermount3: not found in PATH")),
    }
}
