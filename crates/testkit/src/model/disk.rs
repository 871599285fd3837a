//! A plain directory beside the reference: fills one like the other, and lists their differences.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{AtFlags, Timespec, Timestamps, XattrFlags};

use super::operation::{Access, Operation, Setting};
use super::reference::{Kind, LINK_TARGET, ROOT, Reference, shown};

/// Fills the store's directory and the reference with the same files before a test. With `older_links`, a file already has
/// three names, which no program has looked up.
pub fn lay_out(root: &Path, reference: &mut Reference, older_links: bool) {
    use Operation::{Chmod, Close, Create, Link, Mkdir, SetXattr, Symlink, Utimens, Write};
    let create = |path: &str| Create {
        path: path.into(),
        slot: 0,
        perm: 0o644,
        access: Access::Write,
        exclusive: true,
        append: false,
        truncate: false,
    };
    let write = |length, byte| Write { slot: 0, offset: 0, length, byte };
    let close = || Close { slot: 0 };
    let operations = [
        Mkdir { path: "a".into(), perm: 0o755 },
        Mkdir { path: "a/b".into(), perm: 0o750 },
        create("b"),
        write(100, 1),
        close(),
        create("a/a"),
        write(5000, 2),
        close(),
        // Larger than the limit of a copy-up: it is written in place.
        create("a/c"),
        write(100_000, 3),
        close(),
        Symlink { path: "a/b/b".into() },
        Chmod { path: "b".into(), perm: 0o640 },
        SetXattr { path: "b".into(), name: "user.one".into(), byte: 9, how: Setting::Any },
        Utimens { path: "b".into(), seconds: 1_234_567_890 },
    ];
    let links = ["c", "a/b/a"].map(|to| Link { from: "a/a".into(), to: to.into() });
    for operation in operations.iter().chain(links.iter().filter(|_| older_links)) {
        reference.apply(operation);
    }
    let ids: Vec<usize> = reference.nodes.keys().copied().collect();
    for id in ids {
        let node = reference.nodes.get_mut(&id).unwrap();
        if node.kind == Kind::File {
            node.mtime.get_or_insert(1_400_000_000);
        }
    }
    let mut made = HashMap::new();
    write_out(root, reference, ROOT, &mut made);
}

fn write_out(at: &Path, reference: &Reference, id: usize, made: &mut HashMap<usize, PathBuf>) {
    let node = &reference.nodes[&id];
    if let Some(first) = made.get(&id) {
        return fs::hard_link(first, at).unwrap();
    }
    made.insert(id, at.to_owned());
    match node.kind {
        Kind::Symlink => return std::os::unix::fs::symlink(LINK_TARGET, at).unwrap(),
        Kind::File => fs::write(at, &node.content).unwrap(),
        Kind::Directory => {
            if id != ROOT {
                fs::create_dir(at).unwrap();
            }
            for (name, child) in &node.children {
                write_out(&at.join(name), reference, *child, made);
            }
        }
    }
    fs::set_permissions(at, fs::Permissions::from_mode(node.perm)).unwrap();
    for (name, value) in &node.xattrs {
        rustix::fs::setxattr(at, name.as_str(), value, XattrFlags::empty()).unwrap();
    }
    if let Some(seconds) = node.mtime {
        set_mtime(at, seconds).unwrap();
    }
}

/// Sets the modification time of a file, in seconds since 1970.
pub fn set_mtime(path: &Path, seconds: i64) -> rustix::io::Result<()> {
    let mtime = Timespec { tv_sec: seconds, tv_nsec: 0 };
    let atime = Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT };
    let times = Timestamps { last_access: atime, last_modification: mtime };
    rustix::fs::utimensat(rustix::fs::CWD, path, &times, AtFlags::empty())
}

/// The extended attributes of a file, by name.
pub fn xattrs(path: &Path) -> rustix::io::Result<BTreeMap<String, Vec<u8>>> {
    let mut names = vec![0; 4096];
    let length = rustix::fs::listxattr(path, &mut names)?;
    let mut found = BTreeMap::new();
    for name in names[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let name = String::from_utf8(name.to_vec()).unwrap();
        let mut value = vec![0; 4096];
        let length = rustix::fs::getxattr(path, name.as_str(), &mut value)?;
        value.truncate(length);
        found.insert(name, value);
    }
    Ok(found)
}

/// The differences between the directory and the reference, one a line. Names of `unsettled` nodes are skipped, because a
/// program is writing them.
pub fn differences(root: &Path, reference: &Reference, unsettled: &BTreeSet<usize>) -> Vec<String> {
    let mut found = Vec::new();
    let mut inodes = HashMap::new();
    compare(root, "", reference, ROOT, unsettled, &mut inodes, &mut found);
    found
}

fn compare(
    at: &Path,
    path: &str,
    reference: &Reference,
    id: usize,
    unsettled: &BTreeSet<usize>,
    inodes: &mut HashMap<u64, usize>,
    found: &mut Vec<String>,
) {
    let node = &reference.nodes[&id];
    if unsettled.contains(&id) {
        return;
    }
    let metadata = match fs::symlink_metadata(at) {
        Ok(metadata) => metadata,
        Err(why) => return found.push(format!("{path}: {why}")),
    };
    let kind = kind_of(metadata.file_type());
    if kind != Some(node.kind) {
        return found.push(format!("{path}: is a {kind:?}, not a {:?}", node.kind));
    }
    let perm = metadata.mode() & 0o7777;
    if perm != node.perm {
        found.push(format!("{path}: mode {perm:o}, not {:o}", node.perm));
    }
    let other = *inodes.entry(metadata.ino()).or_insert(id);
    if other != id {
        found.push(format!("{path}: a hard link of another file"));
    }
    // A file that is being written gets its names in the store only at its close.
    if node.kind != Kind::Directory && unsettled.is_empty() && metadata.nlink() != u64::from(node.links) {
        found.push(format!("{path}: {} links, not {}", metadata.nlink(), node.links));
    }
    match node.kind {
        Kind::Symlink => {
            let target = fs::read_link(at).unwrap();
            if target != Path::new(LINK_TARGET) {
                found.push(format!("{path}: leads to {}", target.display()));
            }
            return;
        }
        Kind::File => {
            let content = fs::read(at).unwrap();
            if content != node.content {
                found.push(format!("{path}: holds {}, not {}", shown(&content), shown(&node.content)));
            }
            if let Some(mtime) = node.mtime
                && mtime != metadata.mtime()
            {
                found.push(format!("{path}: modified at {}, not {mtime}", metadata.mtime()));
            }
        }
        Kind::Directory => {
            let mut names: BTreeSet<String> = node.children.keys().cloned().collect();
            names.extend(fs::read_dir(at).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()));
            for name in names {
                let below = if path.is_empty() { name.clone() } else { format!("{path}/{name}") };
                match node.children.get(&name) {
                    Some(child) => compare(&at.join(&name), &below, reference, *child, unsettled, inodes, found),
                    // Files that are being written may be in the store under a temporary name.
                    None if name.starts_with(".surgetank-tmp-") && !unsettled.is_empty() => {}
                    None => found.push(format!("{below}: should not be there")),
                }
            }
        }
    }
    match xattrs(at) {
        Ok(xattrs) if xattrs == node.xattrs => {}
        other => found.push(format!("{path}: extended attributes {other:?}, not {:?}", node.xattrs)),
    }
}

/// The reference's type for a type of file; `None` if the reference has no such type.
pub fn kind_of(kind: fs::FileType) -> Option<Kind> {
    match kind {
        kind if kind.is_file() => Some(Kind::File),
        kind if kind.is_dir() => Some(Kind::Directory),
        kind if kind.is_symlink() => Some(Kind::Symlink),
        _ => None,
    }
}

/// A directory that is removed with its owner. The directories of dead processes are removed when the next one is made.
pub struct Scratch(PathBuf);

impl Scratch {
    /// A new directory with empty `store`, `state`, `fast` and `slow`, on a file system with extended attributes.
    #[allow(clippy::new_without_default, reason = "it makes a directory")]
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let prefix = "surgetank-model-";
        // tmpfs has extended attributes since Linux 6.6; on older kernels the usual directory serves.
        let shm = Path::new("/dev/shm");
        let fits = rustix::fs::setxattr(shm, "user.surgetank-model", b"1", rustix::fs::XattrFlags::empty()).is_ok();
        let parent = if fits { shm.to_owned() } else { std::env::temp_dir() };
        if fits {
            // Another test may have removed it first.
            let _gone = rustix::fs::removexattr(shm, "user.surgetank-model");
        }
        for entry in std::fs::read_dir(&parent).unwrap().flatten() {
            let name = entry.file_name().into_string().unwrap_or_default();
            let pid = name.strip_prefix(prefix).and_then(|rest| rest.split('-').next());
            if pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
                drop(std::fs::remove_dir_all(entry.path()));
            }
        }
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("{prefix}{}-{number}", std::process::id()));
        for part in ["store", "state", "fast", "slow"] {
            fs::create_dir_all(path.join(part)).unwrap();
        }
        fs::set_permissions(path.join("state"), fs::Permissions::from_mode(0o700)).unwrap();
        Self(path)
    }
    /// A path in the directory.
    pub fn join(&self, part: &str) -> PathBuf {
        self.0.join(part)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}
