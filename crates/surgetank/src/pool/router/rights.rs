//! Who decides, and who may: answers about a directory's owner, and about permissions.

use rustix::io::Errno;
use surgetank_core::namespace::pooled::Place;
use surgetank_types::error::FsResult;
use surgetank_types::model::{Attr, Caller, FileId, Kind};

use super::Router;
use crate::mount::Filesystem;

/// An attribute of directories for the pool's process: whether this agent decides the names. (For one whose name begins with
/// `system` the kernel checks no permission, which would be a request about the attributes.)
pub(super) const AUTHORITY: &[u8] = b"system.surgetank.authority";

/// Its value, for the pool's process.
pub(super) fn authority<F: Filesystem>(router: &Router<F>, caller: &Caller, id: u64) -> FsResult<Vec<u8>> {
    if !router.is_of_a_peer(caller) {
        return Err(Errno::NODATA.into());
    }
    // (A directory of the store is the asking member's own look-up, also if it is claimed.)
    let ours = router.remote.at(id).is_none()
        && !matches!(router.namespace.pooled.place_of(FileId(id)), Some(Place::OfTheStore(_)));
    Ok(if ours { b"ours".to_vec() } else { b"other".to_vec() })
}

/// May the caller do this with a file of these attributes? `mask`: of access(2).
pub(super) fn permits(attr: &Attr, caller: &Caller, mask: u32) -> bool {
    let class = if caller.uid == attr.uid {
        attr.perm >> 6
    } else if caller.gid == attr.gid {
        attr.perm >> 3
    } else {
        attr.perm
    };
    let runs = mask & 1 == 0 || attr.kind == Kind::Directory || attr.perm & 0o111 != 0;
    if caller.uid == 0 { runs } else { mask & 7 & !class == 0 }
}
