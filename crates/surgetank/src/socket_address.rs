//! The address of a socket in a directory. The kernel takes at most 107 bytes of a path (unix(7)). A state directory
//! below a home directory on a parallel file system is often longer. Such a socket is named from a descriptor of its
//! directory.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags};

const PATH_BYTES_MAX: usize = 107;

/// Valid while this value lives: a long path is named through its descriptor.
#[derive(Debug)]
pub struct Address {
    path: PathBuf,
    _dir: Option<OwnedFd>,
}

impl Address {
    pub fn of(socket: &Path) -> io::Result<Self> {
        if socket.as_os_str().as_bytes().len() <= PATH_BYTES_MAX {
            return Ok(Self { path: socket.to_path_buf(), _dir: None });
        }
        let (Some(parent), Some(name)) = (socket.parent(), socket.file_name()) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let dir = rustix::fs::openat(CWD, parent, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let path = Path::new("/proc/self/fd").join(dir.as_raw_fd().to_string()).join(name);
        Ok(Self { path, _dir: Some(dir) })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}
