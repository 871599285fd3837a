//! Which process copies a file at the moment, on this node.
//!
//! A claim is a lock on a byte of a file that all staging processes open. The kernel releases it however its holder
//! ends.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use surgetank_store::{StorePath, checksum};

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The claims of all processes that stage between two places with one state directory.
pub struct Claims {
    file: File,
    /// The node and the state directory. A process with another pair does not see these locks, and gets its own
    /// temporaries.
    owner: Vec<u8>,
}

/// Released when it is dropped.
pub struct Claim<'a> {
    claims: &'a Claims,
    at: i64,
}

impl Claims {
    /// `place`: a directory of the node's own.
    pub fn in_directory(place: &Path) -> io::Result<Self> {
        let file = File::options().read(true).write(true).create(true).truncate(false).open(place.join("claims"))?;
        let mut owner = std::fs::read(BOOT_ID).unwrap_or_default();
        owner.extend_from_slice(std::fs::canonicalize(place)?.as_os_str().as_encoded_bytes());
        Ok(Self { file, owner })
    }

    pub(super) fn owner(&self) -> &[u8] {
        &self.owner
    }

    /// EAGAIN: another process copies it.
    pub(super) fn claim(&self, to: &StorePath) -> io::Result<Claim<'_>> {
        let at = (checksum::of_bytes(&to.0) >> 2) as i64;
        match self.lock(libc::F_WRLCK, at) {
            Ok(()) => Ok(Claim { claims: self, at }),
            Err(why) if matches!(why.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
                Err(io::Error::new(io::ErrorKind::WouldBlock, "another stage-in or stage-out copies it just now"))
            }
            Err(why) => Err(why),
        }
    }

    fn lock(&self, kind: libc::c_int, at: i64) -> io::Result<()> {
        let asked = libc::flock {
            l_type: kind as libc::c_short,
            l_whence: libc::SEEK_SET as libc::c_short,
            l_start: at,
            l_len: 1,
            l_pid: 0,
        };
        // SAFETY: F_OFD_SETLK reads one `flock`, which lives across the call; the descriptor is open.
        match unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_OFD_SETLK, &raw const asked) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        // (A lock that cannot be released ends with the file.)
        drop(self.claims.lock(libc::F_UNLCK, self.at));
    }
}
