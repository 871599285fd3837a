//! Calls that do not work inside the directory: the agent refuses them there. Outside, the kernel continues them.

use rustix::io::Errno;

use super::bare;
use super::call::{Answer, Answered, Call};
use super::walk::Walked;

/// Refuses a call on a path inside with `with`; `what` is the reason for the user.
pub(super) fn outside_only(call: &Call<'_>, dirfd: i32, path: usize, what: &'static str, with: Errno) -> Answered {
    if call.arg(path) == 0 {
        return Ok(Answer::Continue);
    }
    let path = call.path(path)?;
    match call.walk_at(dirfd, &path, true)? {
        Walked::Outside(to) => bare::go_outside(call, dirfd, &path, to.as_deref()),
        Walked::Inside(_) => call.refuse(what, with),
    }
}

/// The kernel would create the socket in the bare directory, where no program would find it.
pub(super) fn bind(call: &Call<'_>) -> Answered {
    const FAMILY_BYTES: usize = 2;
    let bytes = usize::try_from(call.int(2)).unwrap_or(0).min(size_of::<libc::sockaddr_un>());
    if bytes <= FAMILY_BYTES {
        return Ok(Answer::Continue);
    }
    let mut address = vec![0; bytes];
    call.task.read(call.arg(1), &mut address)?;
    call.check()?;
    let family = u16::from_ne_bytes([address[0], address[1]]);
    let path = &address[FAMILY_BYTES..];
    let path = &path[..path.iter().position(|byte| *byte == 0).unwrap_or(path.len())];
    if i32::from(family) != libc::AF_UNIX || path.is_empty() {
        return Ok(Answer::Continue);
    }
    call.names(path);
    match call.walk_at(libc::AT_FDCWD, path, false)? {
        Walked::Outside(to) => bare::go_outside(call, libc::AT_FDCWD, path, to.as_deref()),
        Walked::Inside(spot) if spot.found.is_some() => Err(Errno::ADDRINUSE),
        Walked::Inside(_) => call.refuse("sockets in the directory", Errno::OPNOTSUPP),
    }
}
