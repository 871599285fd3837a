//! Where the contents of many files are, without the reasons: a scheduler asks about thousands of files at once.
//!
//! The danger that this avoids: an older version counts as a copy. So a copy in a directory that only the store decides is
//! named if its size and time are those that the asking member knows.

use surgetank_state::{Inode, PlainId, State, Tree};
use surgetank_tier::Tiers;
use surgetank_types::error::{Errno, FsResult};
use surgetank_types::model::{Caller, FileId, Kind};
use surgetank_types::sync::Arc;

use crate::base::Base;
use crate::files::Files;
use crate::files::copies::Copies;
use crate::files::open_files::OpenFiles;
use crate::metadata::{Metadata, may_have_copies};
use crate::namespace::resolve::Resolver;
use crate::report::{PathText, Same};

/// Where a file is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Whereabouts {
    /// Its number here.
    pub id: FileId,
    /// Its length in bytes.
    pub size_bytes: u64,
    /// Its time of the last change: seconds and nanoseconds.
    pub mtime: (i64, u32),
    /// Number of its newest version.
    pub version: u32,
    /// State of that.
    pub state: State,
    /// It is a regular file.
    pub is_file: bool,
    /// The other member that has its content.
    pub home: Option<u32>,
    /// The copy here: tier and plain file.
    pub copy: Option<(String, Vec<u8>)>,
}

/// Finds files, and says where their contents are.
pub struct Locations {
    tiers: Arc<Tiers>,
    copies: Arc<Copies>,
    metadata: Arc<Metadata>,
    open_files: Arc<OpenFiles>,
    resolver: Arc<Resolver>,
}

/// The agent itself.
fn agent() -> Caller {
    Caller { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw(), pid: 0, umask: 0 }
}

impl Locations {
    pub(crate) fn new(base: &Base, files: &Files, resolver: &Arc<Resolver>) -> Self {
        Self {
            tiers: base.tiers.clone(),
            copies: files.copies.clone(),
            metadata: files.metadata.clone(),
            open_files: files.open_files.clone(),
            resolver: resolver.clone(),
        }
    }

    /// The file at a logical path, as the agent itself sees it.
    pub fn find(&self, path: &[u8]) -> FsResult<FileId> {
        let mut at = FileId::ROOT;
        for name in path.split(|byte| *byte == b'/').filter(|name| !name.is_empty() && *name != b".") {
            if name == b".." {
                return Err(Errno::INVAL.into());
            }
            at = self.resolver.resolve(&agent(), at, name)?;
        }
        Ok(at)
    }

    /// Where these files are, each by its path below the served directory. Errors: of a look-up.
    pub fn locate(&self, paths: &[PathText]) -> Vec<FsResult<Whereabouts>> {
        // (Files that are asked about together are in few directories, one after the other.)
        let mut last: Option<(Vec<u8>, FsResult<FileId>)> = None;
        let mut located = |path: &[u8]| {
            let (above, name) = match path.iter().rposition(|byte| *byte == b'/') {
                Some(at) => (&path[..at], &path[at + 1..]),
                None => (&b""[..], path),
            };
            if name.is_empty() || name == b"." || name == b".." {
                return self.whereabouts(self.find(path)?).ok_or_else(|| Errno::NOENT.into());
            }
            if last.as_ref().is_none_or(|(known, _)| known != above) {
                last = Some((above.to_vec(), self.find(above)));
            }
            let dir = last.as_ref().map_or(Ok(FileId::ROOT), |(_, dir)| dir.clone())?;
            let id = self.resolver.resolve(&agent(), dir, name)?;
            self.whereabouts(id).ok_or_else(|| Errno::NOENT.into())
        };
        paths.iter().map(|path| located(&path.0)).collect()
    }

    /// Where a file is. `None`: it is unknown or has no name.
    pub fn whereabouts(&self, id: FileId) -> Option<Whereabouts> {
        self.whereabouts_in(&self.metadata.read_tree(), id)
    }

    fn whereabouts_in(&self, tree: &Tree, id: FileId) -> Option<Whereabouts> {
        let inode = tree.get(id)?;
        let path = tree.logical_path(id)?;
        let attr = self.open_files.attr_of(id, inode);
        Some(Whereabouts {
            id,
            size_bytes: attr.size_bytes,
            mtime: (attr.mtime.secs(), attr.mtime.subsec_nanos()),
            version: inode.version,
            state: self.state_of(tree, id)?,
            is_file: attr.kind == Kind::File,
            home: inode.home().map(|home| u32::from(home.0)),
            copy: self.copy_of(inode, &path),
        })
    }

    /// The state of a file, in a pool with what is known of lost members.
    pub(super) fn state_of(&self, tree: &Tree, id: FileId) -> Option<State> {
        let is_lost = tree.get(id)?.home().is_some()
            && !may_have_copies(&self.metadata, id)
            && self.copies.is_of_this_pool(id)
            && self.copies.absence(tree, id).is_some();
        if is_lost { Some(State::Lost) } else { tree.state_of(id) }
    }

    /// Tier and plain file of the content that this node has. (For content elsewhere there is an empty one.)
    pub(super) fn copy_of(&self, inode: &Inode, path: &[u8]) -> Option<(String, Vec<u8>)> {
        let PlainId { device, .. } = inode.replica.filter(|_| inode.home().is_none())?;
        let device = self.tiers.device(device);
        let mut file = device.files_path().as_os_str().as_encoded_bytes().to_vec();
        file.push(b'/');
        file.extend_from_slice(path);
        Some((device.tier_name().to_owned(), file))
    }

    /// The copy here of a file that another member describes. The store is not asked.
    pub fn same_copy(&self, other: &Same) -> Option<(String, Vec<u8>)> {
        let tree = self.metadata.read_tree();
        let found = self.whereabouts_in(&tree, tree.file_at(&other.path.0)?)?;
        let is_same = (found.size_bytes, found.mtime) == (other.size_bytes, other.mtime);
        let is_whole = matches!(found.state, State::Durable);
        found.copy.filter(|_| is_same && is_whole && found.is_file)
    }

    /// When a known file was changed: seconds and nanoseconds.
    pub fn known_mtime(&self, path: &[u8]) -> Option<(i64, u32)> {
        let tree = self.metadata.read_tree();
        let id = tree.file_at(path)?;
        let mtime = self.open_files.attr_of(id, tree.get(id)?).mtime;
        Some((mtime.secs(), mtime.subsec_nanos()))
    }

    /// The plain file of content that this member has for another one, by its name in the directory of contents.
    pub fn content_copy(&self, name: &str) -> Option<(String, Vec<u8>)> {
        let tree = self.metadata.read_tree();
        let id = tree.entry(tree.homes?, name.as_bytes())?.logical()?;
        self.copy_of(tree.get(id)?, &tree.logical_path(id)?)
    }
}
