//! Changes a file's attributes: permissions, owners, times, size, extended attributes.

use rustix::io::Errno;
use surgetank_core::namespace::SetAttr;
use surgetank_types::model::{FileId, Kind, Timestamp};

use super::call::{Answer, Answered, Call, DONE, Known, errno};
use super::walk::Walked;

const XATTR_VALUE_BYTES_MAX: usize = 65536;
const XATTR_NAME_BYTES_MAX: usize = 256;

impl Call<'_> {
    /// `None`: the path is outside.
    fn target(&self, dirfd: i32, path: usize, flags: i32) -> Result<Option<Known>, Errno> {
        let text = self.path(path)?;
        if text.is_empty() && flags & libc::AT_EMPTY_PATH != 0 {
            return self.of_descriptor(dirfd);
        }
        match self.walk_flags(dirfd, &text, flags)? {
            Walked::Outside(to) => {
                self.go_outside(dirfd, &text, to.as_deref())?;
                Ok(None)
            }
            Walked::Inside(spot) => spot.known().map(Some),
        }
    }

    fn change(&self, id: FileId, change: &SetAttr) -> Answered {
        self.namespace().files.descriptors.catch_up();
        self.namespace().attributes.setattr(&self.caller()?, id, None, change).map_err(errno)?;
        DONE
    }

    pub(super) fn chmod(&self, dirfd: i32, path: usize, mode: u32, flags: i32) -> Answered {
        let Some(known) = self.target(dirfd, path, flags)? else { return Ok(Answer::Continue) };
        if known.attr.kind == Kind::Symlink {
            return Err(Errno::OPNOTSUPP);
        }
        self.change(known.id, &SetAttr { perm: Some(mode & 0o7777), ..SetAttr::default() })
    }

    pub(super) fn fchmod(&self) -> Answered {
        let Some(known) = self.of_descriptor(self.int(0))? else { return Ok(Answer::Continue) };
        self.change(known.id, &SetAttr { perm: Some(self.arg(1) as u32 & 0o7777), ..SetAttr::default() })
    }

    fn give(&self, id: FileId, (uid, gid): (u64, u64)) -> Answered {
        let given = |id: u64| Some(id as u32).filter(|id| *id != u32::MAX);
        self.change(id, &SetAttr { uid: given(uid), gid: given(gid), ..SetAttr::default() })
    }

    pub(super) fn chown(&self, dirfd: i32, path: usize, ids: (u64, u64), flags: i32) -> Answered {
        match self.target(dirfd, path, flags)? {
            Some(known) => self.give(known.id, ids),
            None => Ok(Answer::Continue),
        }
    }

    pub(super) fn fchown(&self) -> Answered {
        match self.of_descriptor(self.int(0))? {
            Some(known) => self.give(known.id, (self.arg(1), self.arg(2))),
            None => Ok(Answer::Continue),
        }
    }

    fn set_times(&self, id: FileId, atime: Option<Timestamp>, mtime: Option<Timestamp>, now: bool) -> Answered {
        if atime.is_none() && mtime.is_none() {
            return DONE;
        }
        self.change(id, &SetAttr { atime, mtime, times_now: now, ..SetAttr::default() })
    }

    pub(super) fn utimens(&self) -> Answered {
        let flags = self.int(3);
        let known =
            if self.arg(1) == 0 { self.of_descriptor(self.int(0))? } else { self.target(self.int(0), 1, flags)? };
        let Some(known) = known else { return Ok(Answer::Continue) };
        let now = surgetank_types::clock::now();
        if self.arg(2) == 0 {
            return self.set_times(known.id, Some(now), Some(now), true);
        }
        let times: [i64; 4] = self.task.get(self.arg(2))?;
        let time = |secs: i64, nanos: i64| match nanos {
            libc::UTIME_NOW => Ok(Some(now)),
            libc::UTIME_OMIT => Ok(None),
            0..=999_999_999 => Ok(Some(Timestamp::from_parts(secs, nanos as u32))),
            _ => Err(Errno::INVAL),
        };
        let all_now = times[1] == libc::UTIME_NOW && times[3] == libc::UTIME_NOW;
        self.set_times(known.id, time(times[0], times[1])?, time(times[2], times[3])?, all_now)
    }

    /// utimes, futimesat: in microseconds.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn utimes(&self, dirfd: i32, path: usize, times: usize) -> Answered {
        let known = if self.arg(path) == 0 { self.of_descriptor(dirfd)? } else { self.target(dirfd, path, 0)? };
        let Some(known) = known else { return Ok(Answer::Continue) };
        let now = surgetank_types::clock::now();
        if self.arg(times) == 0 {
            return self.set_times(known.id, Some(now), Some(now), true);
        }
        let times: [i64; 4] = self.task.get(self.arg(times))?;
        let time = |secs: i64, micros: i64| match micros {
            0..=999_999 => Ok(Some(Timestamp::from_parts(secs, micros as u32 * 1000))),
            _ => Err(Errno::INVAL),
        };
        self.set_times(known.id, time(times[0], times[1])?, time(times[2], times[3])?, false)
    }

    #[cfg(target_arch = "x86_64")]
    pub(super) fn utime(&self) -> Answered {
        let Some(known) = self.target(libc::AT_FDCWD, 0, 0)? else { return Ok(Answer::Continue) };
        let now = surgetank_types::clock::now();
        if self.arg(1) == 0 {
            return self.set_times(known.id, Some(now), Some(now), true);
        }
        let times: [i64; 2] = self.task.get(self.arg(1))?;
        let time = |secs| Some(Timestamp::from_parts(secs, 0));
        self.set_times(known.id, time(times[0]), time(times[1]), false)
    }

    /// Through a descriptor, like every write.
    pub(super) fn truncate(&self) -> Answered {
        let Some(known) = self.target(libc::AT_FDCWD, 0, 0)? else { return Ok(Answer::Continue) };
        match known.attr.kind {
            Kind::File => {}
            Kind::Directory => return Err(Errno::ISDIR),
            _ => return Err(Errno::INVAL),
        }
        let size_bytes = u64::try_from(self.arg(1).cast_signed()).map_err(|_| Errno::INVAL)?;
        let flags = libc::O_WRONLY | if size_bytes == 0 { libc::O_TRUNC } else { 0 };
        self.namespace().files.descriptors.catch_up();
        let caller = self.caller()?;
        let file = self.namespace().grants.open_plain(&caller, known.id, flags).map_err(errno)?;
        rustix::fs::ftruncate(&file, size_bytes)?;
        if caller.uid != 0 {
            self.namespace().attributes.clear_suidgid(&caller, known.id);
        }
        DONE
    }

    fn xattr_target(&self, follow: bool) -> Result<Option<Known>, Errno> {
        self.target(libc::AT_FDCWD, 0, if follow { 0 } else { libc::AT_SYMLINK_NOFOLLOW })
    }

    fn xattr_name(&self) -> Result<Vec<u8>, Errno> {
        let name = self
            .task
            .string(self.arg(1), XATTR_NAME_BYTES_MAX)
            .map_err(|errno| if errno == Errno::NAMETOOLONG { Errno::RANGE } else { errno })?;
        if name.is_empty() { Err(Errno::RANGE) } else { Ok(name) }
    }

    /// Copies a value, as far as there is room; no room at all asks for its size.
    fn put_value(&self, value: &[u8], out: usize, room: usize) -> Answered {
        let room = usize::try_from(self.arg(room)).unwrap_or(usize::MAX);
        if room > 0 {
            if value.len() > room {
                return Err(Errno::RANGE);
            }
            self.task.write(self.arg(out), value)?;
        }
        Ok(Answer::Value(value.len() as i64))
    }

    fn get_value(&self, known: Known) -> Answered {
        let name = self.xattr_name()?;
        if name.starts_with(b"user.") {
            self.namespace().attributes.access(&self.caller()?, known.id, 4).map_err(errno)?;
        }
        let value = self.namespace().xattrs.getxattr(known.id, &name).map_err(errno)?;
        self.put_value(&value, 2, 3)
    }

    fn set_value(&self, known: Known) -> Answered {
        let bytes = usize::try_from(self.arg(3)).ok().filter(|bytes| *bytes <= XATTR_VALUE_BYTES_MAX);
        let mut value = vec![0; bytes.ok_or(Errno::TOOBIG)?];
        if !value.is_empty() {
            self.task.read(self.arg(2), &mut value)?;
        }
        let name = self.xattr_name()?;
        self.check()?;
        self.namespace().xattrs.setxattr(&self.caller()?, known.id, &name, &value, self.int(4)).map_err(errno)?;
        DONE
    }

    fn list_values(&self, known: Known) -> Answered {
        let list = self.namespace().xattrs.listxattr(known.id).map_err(errno)?;
        self.put_value(&list, 1, 2)
    }

    fn remove_value(&self, known: Known) -> Answered {
        self.namespace().xattrs.removexattr(&self.caller()?, known.id, &self.xattr_name()?).map_err(errno)?;
        DONE
    }

    pub(super) fn getxattr(&self, follow: bool) -> Answered {
        self.xattr_target(follow)?.map_or(Ok(Answer::Continue), |known| self.get_value(known))
    }
    pub(super) fn setxattr(&self, follow: bool) -> Answered {
        self.xattr_target(follow)?.map_or(Ok(Answer::Continue), |known| self.set_value(known))
    }
    pub(super) fn listxattr(&self, follow: bool) -> Answered {
        self.xattr_target(follow)?.map_or(Ok(Answer::Continue), |known| self.list_values(known))
    }
    pub(super) fn removexattr(&self, follow: bool) -> Answered {
        self.xattr_target(follow)?.map_or(Ok(Answer::Continue), |known| self.remove_value(known))
    }

    pub(super) fn descriptor_xattr(&self, number: libc::c_long) -> Answered {
        let Some(known) = self.of_descriptor(self.int(0))? else { return Ok(Answer::Continue) };
        match number {
            libc::SYS_fgetxattr => self.get_value(known),
            libc::SYS_fsetxattr => self.set_value(known),
            libc::SYS_flistxattr => self.list_values(known),
            _ => self.remove_value(known),
        }
    }
}
