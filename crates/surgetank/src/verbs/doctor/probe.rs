//! Trials in a directory: the features of its file system, its speed, and its quota.
//!
//! Every trial file has a unique name and is removed again, also when a trial fails.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{Advice, Mode, OFlags, XattrFlags};
use surgetank_types::clock::tick;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Abilities {
    pub xattrs: bool,
    pub leases: bool,
    pub unnamed_files: bool,
}

/// A file that is removed when dropped.
struct Trial {
    path: PathBuf,
    file: File,
}

impl Trial {
    fn new(dir: &Path) -> io::Result<Self> {
        let path = dir.join(format!(".surgetank-doctor-{}", std::process::id()));
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .custom_flags(libc::O_NOFOLLOW)
            .mode(0o600)
            .open(&path)?;
        Ok(Self { path, file })
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

pub fn abilities(dir: &Path) -> io::Result<Abilities> {
    let mut trial = Trial::new(dir)?;
    trial.file.write_all(b"surgetank")?;
    let xattrs = rustix::fs::fsetxattr(&trial.file, "user.surgetank.doctor", b"1", XattrFlags::empty()).is_ok();
    let unnamed_files =
        rustix::fs::open(dir, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR).is_ok();
    Ok(Abilities { xattrs, leases: leases(&trial)?, unnamed_files })
}

/// The kernel grants a read lease once no process can write, and refuses it while a process can.
fn leases(trial: &Trial) -> io::Result<bool> {
    let reader = File::open(&trial.path)?;
    let lease = |file: &File| {
        // SAFETY: fcntl with an open descriptor and an integer argument touches no memory of ours.
        unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK) == 0 }
    };
    let while_writable = lease(&reader);
    if while_writable {
        return Ok(false);
    }
    // The first file still has its writer, so the second half needs a file without one.
    let second = trial.path.with_extension("lease");
    let made = File::create(&second).map(drop).and_then(|()| File::open(&second));
    let granted = made.as_ref().is_ok_and(lease);
    let _ = fs::remove_file(&second);
    Ok(granted)
}

#[derive(Debug, Clone, Copy)]
pub struct Speed {
    pub bytes: u64,
    pub write_bytes_per_second: u64,
    pub read_bytes_per_second: u64,
}

const PIECE_BYTES: usize = 1 << 20;
const MEASURE_BYTES_MAX: u64 = 256 << 20;
const MEASURE_BYTES_MIN: u64 = 8 << 20;

/// Sequential speed with a file of a quarter of the room, at most 256 MiB; the cache is dropped before reading.
pub fn speed(dir: &Path, room_bytes: u64) -> io::Result<Speed> {
    let bytes = (room_bytes / 4).min(MEASURE_BYTES_MAX) / PIECE_BYTES as u64 * PIECE_BYTES as u64;
    if bytes < MEASURE_BYTES_MIN {
        return Err(io::Error::new(io::ErrorKind::StorageFull, "too little room"));
    }
    let mut trial = Trial::new(dir)?;
    // Not constant, so that a compressing file system shows its speed with real data.
    let mut piece: Vec<u8> = Vec::with_capacity(PIECE_BYTES);
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    while piece.len() < PIECE_BYTES {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        piece.extend_from_slice(&state.rotate_right(29).to_le_bytes());
    }
    let start = tick();
    for _ in 0..bytes / PIECE_BYTES as u64 {
        trial.file.write_all(&piece)?;
    }
    trial.file.sync_all()?;
    let wrote = start.elapsed();
    rustix::fs::fadvise(&trial.file, 0, None, Advice::DontNeed)?;
    let mut reader = File::open(&trial.path)?;
    let start = tick();
    while reader.read(&mut piece)? > 0 {}
    let read = start.elapsed();
    let rate = |took: Duration| (bytes as f64 / took.as_secs_f64().max(1e-9)) as u64;
    Ok(Speed { bytes, write_bytes_per_second: rate(wrote), read_bytes_per_second: rate(read) })
}

#[derive(Debug, Clone, Copy)]
pub struct Quota {
    pub used_bytes: u64,
    /// 0: no limit.
    pub limit_bytes: u64,
}

/// The user's quota on a local file system's block device, if there is one and the user may read it.
pub fn quota(device: &str, uid: u32) -> Option<Quota> {
    let device = std::ffi::CString::new(device).ok()?;
    const USER: i32 = 0;
    const SUBCOMMAND_SHIFT: i32 = 8;
    // SAFETY: dqblk is a plain structure of integers, for which all zeroes is a value.
    let mut answer: libc::dqblk = unsafe { std::mem::zeroed() };
    // SAFETY: `device` is a C string and `answer` a dqblk; both outlive the call.
    let failed = unsafe {
        libc::quotactl(
            (libc::Q_GETQUOTA << SUBCOMMAND_SHIFT) | USER,
            device.as_ptr(),
            uid.cast_signed(),
            (&raw mut answer).cast(),
        )
    };
    // Limits are counted in blocks of 1 KiB.
    (failed == 0).then_some(Quota { used_bytes: answer.dqb_curspace, limit_bytes: answer.dqb_bhardlimit << 10 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tries_leave_nothing_behind() {
        let dir = tempfile::tempdir().expect("tempdir");
        let found = abilities(dir.path()).expect("abilities");
        assert!(found.leases && found.unnamed_files, "{found:?}");
        let speed = speed(dir.path(), 64 << 20).expect("speed");
        assert_eq!(speed.bytes, 16 << 20);
        assert!(speed.write_bytes_per_second > 0 && speed.read_bytes_per_second > 0);
        assert_eq!(fs::read_dir(dir.path()).expect("read_dir").count(), 0);
    }

    #[test]
    fn probe_without_room_gives_no_measurement() {
        let dir = tempfile::tempdir().expect("tempdir");
        assert!(speed(dir.path(), 1 << 20).is_err());
        assert!(abilities(&dir.path().join("absent")).is_err());
    }
}
