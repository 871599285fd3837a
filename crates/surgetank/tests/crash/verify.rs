//! Compares the store with the results that the writers got.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::content;
use crate::manifest::Story;
use crate::watch::Seen;
use crate::workload::MARK;

#[derive(Debug, Default)]
pub struct Verified {
    pub files: u64,
    pub bytes: u64,
}

/// What the store has under a name.
#[derive(serde::Serialize, serde::Deserialize)]
pub enum Location {
    Directory,
    Symlink(String),
    File { content: Result<u64, String>, length_bytes: u64, ino: u64, mode: u32, mark: Option<String> },
}

pub fn store_of(directory: &Path) -> BTreeMap<String, Location> {
    let (mut found, mut left) = (BTreeMap::new(), vec![directory.to_owned()]);
    while let Some(dir) = left.pop() {
        for entry in fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(directory).unwrap().to_str().unwrap().to_owned();
            let stat = fs::symlink_metadata(&path).unwrap();
            let location = if stat.is_dir() {
                left.push(path);
                Location::Directory
            } else if stat.is_symlink() {
                Location::Symlink(fs::read_link(&path).unwrap().to_str().unwrap().to_owned())
            } else {
                let mut mark = [0; 64];
                let mark = rustix::fs::getxattr(&path, MARK, &mut mark).ok().map(|length| mark[..length].to_vec());
                let mark = mark.map(|mark| String::from_utf8(mark).unwrap());
                let bytes = fs::read(&path).unwrap();
                let (content, length_bytes) = (content::check_last(&bytes), bytes.len() as u64);
                Location::File { content, length_bytes, ino: stat.ino(), mode: stat.mode() & 0o7777, mark }
            };
            found.insert(name, location);
        }
    }
    found
}

/// Every writer's part of the store must be one of the states that the writer's story allows.
pub fn verify(found: &BTreeMap<String, Location>, stories: &[Story]) -> Result<Verified, String> {
    let mut verified = Verified::default();
    for (writer, story) in stories.iter().enumerate() {
        let home = format!("w{writer}");
        let mine = |path: &str| path == home || path.starts_with(&format!("{home}/"));
        let found: BTreeMap<&str, &Location> =
            found.iter().filter(|(path, _)| mine(path)).map(|(path, location)| (path.as_str(), location)).collect();
        let tried: Vec<Result<Verified, String>> =
            story.allowed().iter().map(|state| is_this(&found, state, &story.half_written())).collect();
        match tried.iter().find_map(|one| one.as_ref().ok()) {
            Some(one) => {
                verified.files += one.files;
                verified.bytes += one.bytes;
            }
            None => {
                let whys: Vec<String> = tried.into_iter().filter_map(Result::err).collect();
                return Err(format!("writer {writer}: {}; open: {:?}", whys.join(" | or: "), story.open));
            }
        }
    }
    let known = |path: &String| {
        (0..stories.len()).any(|writer| *path == format!("w{writer}") || path.starts_with(&format!("w{writer}/")))
    };
    if let Some(ghost) = found.keys().find(|path| !known(path)) {
        return Err(format!("{ghost} belongs to no writer"));
    }
    Ok(verified)
}

fn is_this(found: &BTreeMap<&str, &Location>, state: &Story, half: &[&str]) -> Result<Verified, String> {
    let mut verified = Verified::default();
    // Names of one file have one inode, and no other file has it.
    let mut inodes: BTreeMap<u64, u64> = BTreeMap::new();
    for (path, id) in &state.names {
        let Some(Location::File { content, length_bytes, ino, mode, mark }) = found.get(path.as_str()) else {
            return Err(format!("{path} is lost"));
        };
        if *inodes.entry(*id).or_insert(*ino) != *ino {
            return Err(format!("{path} no longer names its file"));
        }
        let file = &state.files[id];
        if file.mode.is_some_and(|wanted| wanted != *mode) {
            return Err(format!("{path} has mode {mode:o}, not {:o}", file.mode.unwrap()));
        }
        if file.mark.is_some() && file.mark != *mark {
            return Err(format!("{path} has the attribute {mark:?}, not {:?}", file.mark));
        }
        if half.contains(&path.as_str()) {
            continue;
        }
        match content {
            Ok(found) if *found == file.content => {}
            Ok(found) => return Err(format!("{path} has {found:#x}, not {:#x}", file.content)),
            Err(why) => return Err(format!("{path}: {why}")),
        }
        verified.files += 1;
        verified.bytes += length_bytes;
    }
    let distinct: BTreeSet<u64> = inodes.values().copied().collect();
    if distinct.len() != inodes.len() {
        return Err("two files have become one".to_owned());
    }
    for (path, target) in &state.symlinks {
        match found.get(path.as_str()) {
            Some(Location::Symlink(found)) if found == target => verified.files += 1,
            _ => return Err(format!("the symbolic link {path} is lost")),
        }
    }
    if let Some(lost) = state.dirs.iter().find(|path| !matches!(found.get(path.as_str()), Some(Location::Directory))) {
        return Err(format!("the directory {lost} is lost"));
    }
    let known = |path: &str| {
        state.names.contains_key(path)
            || state.symlinks.contains_key(path)
            || state.dirs.contains(path)
            || half.contains(&path)
    };
    match found.keys().find(|path| !known(path)) {
        Some(ghost) => Err(format!("{ghost} should not be there")),
        None => Ok(verified),
    }
}

/// Each broken file that the watcher saw must be explained by an operation that was open.
pub fn excuse(seen: &Seen, stories: &[Story]) -> Result<(), String> {
    let half: Vec<&str> =
        stories.iter().flat_map(|story| story.half_written().into_iter().chain(story.in_place())).collect();
    if let Some((path, why)) = seen.broken.iter().find(|(path, _)| !half.contains(&path.as_str())) {
        return Err(format!("half a file was visible in the store: {path}: {why}"));
    }
    match seen.disorder.first() {
        Some(why) => Err(format!("out of order in the store: {why}")),
        None => Ok(()),
    }
}
