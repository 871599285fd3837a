//! Injected faults. A file beside the mount describes them and is read before each operation, so that a test turns
//! faults on and off by writing it. Without the file there are no faults.
//!
//! One fault per line, `#` begins a comment; the first line that matches an operation decides:
//!
//! ```text
//! OPERATIONS    WHAT           [N: the next N times only]
//! all           hang                # until the file changes, or the caller is killed
//! change        EROFS               # an errno: the operation is not done
//! write,create  ENOSPC         3
//! rename        lost:EIO       1    # the operation is done, but returns this errno
//! write         corrupt        2    # one written byte is changed; reported as success
//! write         short               # half of it is written and reported
//! fsync         drop           1    # EIO, and the file's bytes are lost (zeros)
//! ```
//!
//! Operations: `lookup getattr setattr readlink create mkdir unlink rename link open read write fsync syncdir readdir
//! statfs xattr`. `create` covers files, symbolic links and special files; `unlink` covers directories too; `syncdir`
//! is the fsync of directories. `all` means all operations, and `change` those that change the file system. An N
//! counts from the last change of the file's text. Each operation with a fault adds a byte to `FILE.hits` (a hanging
//! one does not), so that a test can verify that its fault occurred. Text that cannot be parsed fails every operation
//! (EPROTO).

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use surgetank_types::error::FsResult;

use surgetank::mount::{interrupted, wait_long};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    Lookup,
    Getattr,
    Setattr,
    Readlink,
    Create,
    Mkdir,
    Unlink,
    Rename,
    Link,
    Open,
    Read,
    Write,
    Fsync,
    Syncdir,
    Readdir,
    Statfs,
    Xattr,
}

const NAMES: [(&str, Op); 17] = [
    ("lookup", Op::Lookup),
    ("getattr", Op::Getattr),
    ("setattr", Op::Setattr),
    ("readlink", Op::Readlink),
    ("create", Op::Create),
    ("mkdir", Op::Mkdir),
    ("unlink", Op::Unlink),
    ("rename", Op::Rename),
    ("link", Op::Link),
    ("open", Op::Open),
    ("read", Op::Read),
    ("write", Op::Write),
    ("fsync", Op::Fsync),
    ("syncdir", Op::Syncdir),
    ("readdir", Op::Readdir),
    ("statfs", Op::Statfs),
    ("xattr", Op::Xattr),
];

const ERRNOS: [(&str, Errno); 10] = [
    ("EACCES", Errno::ACCESS),
    ("EDQUOT", Errno::DQUOT),
    ("EIO", Errno::IO),
    ("ENOSPC", Errno::NOSPC),
    ("ENOTCONN", Errno::NOTCONN),
    ("EPERM", Errno::PERM),
    ("EROFS", Errno::ROFS),
    ("ESTALE", Errno::STALE),
    ("ETIMEDOUT", Errno::TIMEDOUT),
    ("EAGAIN", Errno::AGAIN),
];

/// How often a hanging operation checks whether it still must hang.
const LOOK_EVERY: Duration = Duration::from_millis(5);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Errno(Errno),
    Lost(Errno),
    Hang,
    Corrupt,
    Short,
    Drop,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Fault {
    operations: Vec<Op>,
    what: What,
    left: Option<u64>,
}

/// The fault of an operation that is carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wrong {
    Nothing,
    /// Returned instead of the answer.
    Lost(Errno),
    Corrupt,
    Short,
    Drop,
}

impl Wrong {
    /// The answer, unless it is lost.
    pub fn answer<T>(self, answer: T) -> FsResult<T> {
        match self {
            Self::Lost(errno) => Err(errno.into()),
            _ => Ok(answer),
        }
    }
}

#[derive(Debug, Default)]
pub struct Faults {
    file: Option<PathBuf>,
    now: Mutex<(String, Vec<Fault>)>,
}

impl Faults {
    pub fn read_from(file: PathBuf) -> Self {
        Self { file: Some(file), now: Mutex::default() }
    }

    /// Runs before an operation: fails, hangs, or returns its fault.
    pub fn apply(&self, op: Op) -> FsResult<Wrong> {
        loop {
            match self.next(op)? {
                None => return Ok(Wrong::Nothing),
                Some(What::Errno(errno)) => return Err(errno.into()),
                Some(What::Lost(errno)) => return Ok(Wrong::Lost(errno)),
                Some(What::Corrupt) => return Ok(Wrong::Corrupt),
                Some(What::Short) => return Ok(Wrong::Short),
                Some(What::Drop) => return Ok(Wrong::Drop),
                Some(What::Hang) if interrupted() => return Err(Errno::INTR.into()),
                Some(What::Hang) => {
                    wait_long();
                    std::thread::sleep(LOOK_EVERY);
                }
            }
        }
    }

    fn next(&self, op: Op) -> FsResult<Option<What>> {
        let Some(file) = &self.file else { return Ok(None) };
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        if now.0 != text {
            let faults = text.lines().filter_map(parse).collect::<Option<Vec<_>>>().ok_or(Errno::PROTO)?;
            *now = (text, faults);
        }
        let fits = |fault: &&mut Fault| fault.operations.contains(&op) && fault.left != Some(0);
        let hit = now.1.iter_mut().find(fits).map(|fault| {
            fault.left = fault.left.map(|left| left - 1);
            fault.what
        });
        if hit.is_some_and(|what| what != What::Hang) {
            // (A test that misses a byte fails; no other code reads it.)
            drop(
                OpenOptions::new()
                    .create(true)
                    .append(true)
                    .open(hits_of(file))
                    .and_then(|mut hit| hit.write_all(b"!")),
            );
        }
        Ok(hit)
    }
}

pub fn hits_of(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".hits");
    name.into()
}

/// `None` for an empty line; `Some(None)` for a line that cannot be parsed.
fn parse(line: &str) -> Option<Option<Fault>> {
    let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
    let operations = words.next()?;
    Some((|| {
        let what = what(words.next()?)?;
        let left = words.next().map(u64::from_str).transpose().ok()?;
        let one = |name| match name {
            "all" => Some(NAMES.iter().map(|(_, op)| *op).collect()),
            "change" => Some(NAMES.iter().map(|(_, op)| *op).filter(|op| changes(*op)).collect()),
            _ => NAMES.iter().find(|(known, _)| *known == name).map(|(_, op)| vec![*op]),
        };
        let operations = operations.split(',').map(one).collect::<Option<Vec<Vec<Op>>>>()?.concat();
        words.next().is_none().then_some(Fault { operations, what, left })
    })())
}

fn what(word: &str) -> Option<What> {
    let errno = |name: &str| ERRNOS.iter().find(|(known, _)| *known == name).map(|(_, errno)| *errno);
    match word {
        "hang" => Some(What::Hang),
        "corrupt" => Some(What::Corrupt),
        "short" => Some(What::Short),
        "drop" => Some(What::Drop),
        _ => match word.strip_prefix("lost:") {
            Some(name) => errno(name).map(What::Lost),
            None => errno(word).map(What::Errno),
        },
    }
}

fn changes(op: Op) -> bool {
    !matches!(op, Op::Lookup | Op::Getattr | Op::Readlink | Op::Open | Op::Read | Op::Readdir | Op::Statfs | Op::Xattr)
}
