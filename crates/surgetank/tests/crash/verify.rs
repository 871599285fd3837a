//! Compares what the store has with what the writers were told.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use crate::content;
use crate::manifest::Story;
use crate::watch::Seen;

#[derive(Debug, Default)]
pub struct Verified {
    pub files: u64,
    pub bytes: u64,
}

/// Path → what lies there.
pub fn store_of(directory: &Path) -> (BTreeMap<String, Vec<u8>>, BTreeSet<String>) {
    let (mut files, mut dirs, mut left) = (BTreeMap::new(), BTreeSet::new(), vec![directory.to_owned()]);
    while let Some(dir) = left.pop() {
        for entry in fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(directory).unwrap().to_str().unwrap().to_owned();
            if fs::symlink_metadata(&path).unwrap().is_dir() {
                dirs.insert(name);
                left.push(path);
            } else {
                files.insert(name, fs::read(&path).unwrap());
            }
        }
    }
    (files, dirs)
}

/// Every writer's part of the store must be one of the states that his story allows.
pub fn verify(directory: &Path, stories: &[Story]) -> Result<Verified, String> {
    let (files, dirs) = store_of(directory);
    let mut verified = Verified::default();
    for (writer, story) in stories.iter().enumerate() {
        let home = format!("w{writer}");
        let mine = |path: &str| path == home || path.starts_with(&format!("{home}/"));
        let files: BTreeMap<&String, &Vec<u8>> = files.iter().filter(|(path, _)| mine(path)).collect();
        let dirs: BTreeSet<&String> = dirs.iter().filter(|path| mine(path)).collect();
        let tried: Vec<Result<Verified, String>> =
            story.allowed().iter().map(|state| is_this(&files, &dirs, state, story.half_written())).collect();
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
    let known = |path: &String| (0..stories.len()).any(|writer| path.starts_with(&format!("w{writer}/")));
    if let Some(ghost) = files.keys().find(|path| !known(path)) {
        return Err(format!("{ghost} is nobody's"));
    }
    Ok(verified)
}

fn is_this(
    files: &BTreeMap<&String, &Vec<u8>>,
    dirs: &BTreeSet<&String>,
    state: &Story,
    half: Option<&str>,
) -> Result<Verified, String> {
    let mut verified = Verified::default();
    for (path, id) in &state.files {
        let bytes = files.get(path).ok_or_else(|| format!("{path} is lost"))?;
        if half == Some(path) {
            continue;
        }
        match content::check(bytes) {
            Ok(found) if found == *id => {}
            Ok(found) => return Err(format!("{path} has {found:#x}, not {id:#x}")),
            Err(why) => return Err(format!("{path}: {why}")),
        }
        verified.files += 1;
        verified.bytes += bytes.len() as u64;
    }
    if let Some(ghost) = files.keys().find(|path| !state.files.contains_key(**path) && half != Some(path.as_str())) {
        return Err(format!("{ghost} should not be there"));
    }
    if let Some(lost) = state.dirs.iter().find(|path| !dirs.contains(path)) {
        return Err(format!("the directory {lost} is lost"));
    }
    if let Some(ghost) = dirs.iter().find(|path| !state.dirs.contains(**path)) {
        return Err(format!("the directory {ghost} should not be there"));
    }
    Ok(verified)
}

/// What the watcher saw must be excused by what was open.
pub fn excuse(seen: &Seen, stories: &[Story]) -> Result<(), String> {
    let half: Vec<&str> = stories.iter().filter_map(Story::half_written).collect();
    if let Some((path, why)) = seen.broken.iter().find(|(path, _)| !half.contains(&path.as_str())) {
        return Err(format!("half a file was visible in the store: {path}: {why}"));
    }
    match seen.disorder.first() {
        Some(why) => Err(format!("out of order in the store: {why}")),
        None => Ok(()),
    }
}
