//! Which way programs come to the directory: by a mount, or, where none can be made, by their system calls.

use rustix::thread::CapabilitySet;
use surgetank_core::config::{Config, Way};
use surgetank_core::error::{Error, Result};

use super::seclusion;
use crate::mount::trial::{Try, tried};
use crate::seccomp;

/// To be called while the process has a single thread. True: without a mount.
pub fn by_calls(config: &Config) -> Result<bool> {
    let by_calls = match config.door {
        Way::Fuse => return Ok(false),
        Way::Seccomp => seccomp::is_possible(),
        Way::Auto => match mountable(config) {
            Ok(()) => return Ok(false),
            Err(why) => {
                tracing::warn!(%why, "no mount can be made: programs' system calls are answered instead");
                seccomp::is_possible().map_err(|calls| format!("{calls}; and no mount can be made: {why}"))
            }
        },
    };
    let refused = |why: String| {
        Error::new(format!("{} cannot be served", config.over.display()))
            .why(why)
            .remedy("`surgetank doctor` tells what is missing")
            .data("nothing was begun: the command would have worked on the bare directory")
    };
    by_calls.map_err(refused)?;
    if config.store != config.over {
        return Err(refused("without a mount (--door seccomp) the store has to be the directory itself".to_owned()));
    }
    Ok(true)
}

fn mountable(config: &Config) -> std::result::Result<(), String> {
    let device = std::fs::OpenOptions::new().read(true).write(true).open("/dev/fuse");
    device.map_err(|why| format!("/dev/fuse: {why}"))?;
    // As the mount would be made: see `seclusion`.
    let privileged =
        rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN));
    if privileged {
        return tried(&config.over, Try { user: false, mount: true }).map_err(|why| format!("mounting: {why}"));
    }
    match tried(&config.over, Try { user: true, mount: false }) {
        Ok(()) => tried(&config.over, Try { user: true, mount: true })
            .map_err(|why| format!("mounting in a user namespace: {why}")),
        Err(_) if seclusion::fusermount().is_some() => Ok(()),
        Err(why) => Err(format!("user namespaces: {why}; fusermount3: not found in PATH")),
    }
}
