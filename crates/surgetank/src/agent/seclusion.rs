//! A private mount namespace for the agent and its runs, by any right that this process has.
//!
//! | user | how | the mount is seen by |
//! |---|---|---|
//! | root | mount namespace | the runs |
//! | ordinary user | user + mount namespace | the runs |
//! | ordinary user, user namespaces forbidden | fusermount3, in the current namespace | every program of this user |
//! | none of these | – | refused, with both reasons |

use std::path::PathBuf;

use rustix::thread::CapabilitySet;
use surgetank_core::report::Visibility;
use surgetank_types::error::{Error, Result};

use crate::mount::namespaces;

/// Call it while the process has a single thread.
pub fn seclude() -> Result<Visibility> {
    let privileged =
        rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN));
    if privileged {
        return match namespaces::private_namespace_root() {
            Ok(()) => Ok(Visibility::Private),
            Err(error) => Err(refused(&format!("a mount namespace: {error}"))),
        };
    }
    let before = user_namespace();
    match namespaces::private_namespace_user() {
        Ok(()) => Ok(Visibility::Private),
        // The process is half inside the user namespace: methods that work outside are not possible any more.
        Err(error) if user_namespace() != before => Err(refused(&format!("the ids of a user namespace: {error}"))),
        Err(error) => match fusermount() {
            Some(helper) => {
                tracing::warn!(%error, helper = %helper.display(), "no user namespace: the mount is visible to all of this user's programs");
                Ok(Visibility::Global)
            }
            None => Err(refused(&format!("user namespaces: {error}; fusermount3: not found in PATH"))),
        },
    }
}

fn user_namespace() -> Option<PathBuf> {
    std::fs::read_link("/proc/self/ns/user").ok()
}

pub fn fusermount() -> Option<PathBuf> {
    std::env::split_paths(&std::env::var_os("PATH")?).map(|dir| dir.join("fusermount3")).find(|path| path.is_file())
}

fn refused(why: &str) -> Error {
    Error::new("no mount is possible on this machine for this user").why(why).remedy(
        "have user namespaces enabled (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone) or fuse3 installed; `surgetank doctor` tells more",
    )
}
