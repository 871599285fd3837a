//! Compares two directories: names, types, contents, modes, owners, links, extended attributes, explicitly set times,
//! and holes.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// The properties of a file that must be equal; the message names each one that differs.
#[derive(Debug, PartialEq)]
struct Entry {
    kind: &'static str,
    mode: String,
    owner: (u32, u32),
    size: u64,
    content: u64,
    target: Option<PathBuf>,
    /// The first name of this inode.
    same_as: PathBuf,
    xattrs: BTreeMap<String, Vec<u8>>,
    /// Only if it was set explicitly, to a time long before the test began.
    mtime: Option<(i64, i64)>,
    sparse: bool,
}

/// The paths that differ, with a description.
pub fn differences(plain: &Path, store: &Path, started: SystemTime) -> BTreeMap<PathBuf, String> {
    let (plain, store) = (tree(plain, started), tree(store, started));
    plain
        .keys()
        .chain(store.keys())
        .filter_map(|path| {
            let difference = match (plain.get(path), store.get(path)) {
                (Some(a), Some(b)) if a == b => return None,
                (Some(_), None) => format!("{path:?} is missing in the store"),
                (None, Some(_)) => format!("{path:?} is in the store and should not be"),
                (a, b) => format!("{path:?}\n  plain {a:?}\n  store {b:?}"),
            };
            Some((path.clone(), difference))
        })
        .collect()
}

fn tree(root: &Path, started: SystemTime) -> BTreeMap<PathBuf, Entry> {
    let mut paths = vec![PathBuf::new()];
    let mut next = 0;
    while next < paths.len() {
        let path = paths[next].clone();
        next += 1;
        if fs::symlink_metadata(root.join(&path)).unwrap().is_dir() {
            let names = fs::read_dir(root.join(&path)).unwrap();
            paths.extend(names.map(|entry| path.join(entry.unwrap().file_name())));
        }
    }
    paths.sort();
    let mut first_names = BTreeMap::new();
    paths
        .into_iter()
        .map(|path| {
            let entry = look(root, &path, started, &mut first_names);
            (path, entry)
        })
        .collect()
}

fn look(root: &Path, path: &Path, started: SystemTime, first_names: &mut BTreeMap<u64, PathBuf>) -> Entry {
    let full = root.join(path);
    let meta = fs::symlink_metadata(&full).unwrap();
    let kind = match meta.file_type() {
        kind if kind.is_dir() => "directory",
        kind if kind.is_file() => "file",
        kind if kind.is_symlink() => "symbolic link",
        kind if kind.is_fifo() => "pipe",
        kind if kind.is_socket() => "socket",
        _ => "other",
    };
    let file = kind == "file";
    let began = started.duration_since(UNIX_EPOCH).unwrap().as_secs() as i64;
    Entry {
        kind,
        mode: format!("{:o}", meta.mode() & 0o7777),
        owner: (meta.uid(), meta.gid()),
        size: if file { meta.size() } else { 0 },
        content: if file { checksum(&full) } else { 0 },
        target: fs::read_link(&full).ok(),
        same_as: first_names.entry(meta.ino()).or_insert_with(|| path.to_owned()).clone(),
        xattrs: xattrs(&full),
        mtime: (meta.mtime() < began - 3600).then(|| (meta.mtime(), meta.mtime_nsec())),
        sparse: file && meta.size() >= 1 << 20 && meta.blocks() * 512 < meta.size() / 2,
    }
}

fn checksum(path: &Path) -> u64 {
    // Modes do not stop root, and an ordinary user's scripts leave their files readable at the end.
    let mut file = File::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme);
    let mut block = vec![0; 1 << 16];
    loop {
        match file.read(&mut block).unwrap() {
            0 => return digest.finalize(),
            count => digest.update(&block[..count]),
        }
    }
}

fn xattrs(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut names = vec![0u8; 1 << 16];
    let length = match rustix::fs::llistxattr(path, &mut names[..]) {
        Ok(length) => length,
        // Symbolic links and special files have no attributes that a user may set.
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::PERM) => return BTreeMap::new(),
        Err(error) => panic!("{}: {error}", path.display()),
    };
    names[..length]
        .split(|byte| *byte == 0)
        .filter(|name| name.starts_with(b"user."))
        .map(|name| {
            let name = std::ffi::OsStr::from_bytes(name);
            let mut value = vec![0u8; 1 << 16];
            let length = rustix::fs::lgetxattr(path, name, &mut value[..]).unwrap();
            value.truncate(length);
            (name.to_string_lossy().into_owned(), value)
        })
        .collect()
}
