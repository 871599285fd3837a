//! Gives the command the preload shim: the library where the dynamic loader finds it, and what it has to know in the
//! environment.
//!
//! The library lies in the user's home where possible. Launchers such as srun carry the environment to other nodes, where
//! the home is usually there too and our state is not: there the shim finds no mount and refuses to write underneath,
//! whereas a library that is missing would let everything through.

use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::{env, fs, io};

use surgetank_core::config::Config;
use surgetank_core::model::RunId;

use crate::agent::wire::Hello;
use crate::shimdoor::counts;

const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libsurgetank.so"));

/// What the shim reads: a line for each mount around the command.
const MOUNTS: &str = "SURGETANK_SHIM";
const SKIP: &str = "SURGETANK_PRELOAD_SKIP";
const LOADER: &str = "LD_PRELOAD";

/// Variables for the command; none where the shim is switched off or cannot be.
pub fn variables(config: &Config, hello: &Hello, run: RunId) -> Vec<(&'static str, OsString)> {
    let Some(shim) = hello.shim.as_ref().filter(|_| config.preload) else {
        return Vec::new();
    };
    let parts = [shim.index.as_path(), shim.socket.as_path(), hello.over.as_path()].map(Path::as_os_str);
    // They separate what the variable holds.
    if parts.iter().any(|part| part.as_bytes().iter().any(|byte| matches!(byte, b'\n' | b'\t'))) {
        return Vec::new();
    }
    let library = match library(config) {
        Ok(library) => library,
        Err(why) => {
            eprintln!("surgetank: the preload shim cannot be put anywhere ({why}); everything goes by the mount");
            return Vec::new();
        }
    };
    let mounts = env::var_os(MOUNTS).unwrap_or_default().into_vec();
    let ours = parts.map(OsStr::as_bytes).join(&b'\t');
    // (A run around this one over the same directory has another place to count.)
    let of_others: Vec<&[u8]> = mounts
        .split(|byte| *byte == b'\n')
        .filter(|line| {
            !line.is_empty()
                && **line != *ours
                && !line.strip_prefix(&*ours).is_some_and(|rest| rest.starts_with(b"\t"))
        })
        .collect();
    let mut mounts = of_others.join(&b'\n');
    if !mounts.is_empty() {
        mounts.push(b'\n');
    }
    mounts.extend_from_slice(&ours);
    mounts.push(b'\t');
    mounts.extend_from_slice(counts::path_of(shim.index.as_path(), run.0).as_os_str().as_bytes());
    let mut variables = vec![(MOUNTS, OsString::from_vec(mounts)), (LOADER, preloaded(library.as_os_str()))];
    if !config.preload_skip.is_empty() {
        variables.push((SKIP, config.preload_skip.join(":").into()));
    }
    variables
}

/// After what is preloaded already, so that those see the program's calls first.
fn preloaded(library: &OsStr) -> OsString {
    let mut list = env::var_os(LOADER).unwrap_or_default();
    let there = list.as_bytes().split(|byte| matches!(byte, b':' | b' ')).any(|one| one == library.as_bytes());
    if there {
        return list;
    }
    if !list.is_empty() {
        list.push(":");
    }
    list.push(library);
    list
}

/// The library as a file, put there if it is not yet.
fn library(config: &Config) -> io::Result<PathBuf> {
    // Named by its content: programs that run have theirs open, a newer one does not disturb them.
    let name = format!("libsurgetank-{:016x}.so", fingerprint(LIBRARY));
    let home = env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| env::var_os("HOME").map(|home| Path::new(&home).join(".cache")))
        .filter(|home| home.is_absolute() && !home.starts_with(&config.over))
        .map(|home| home.join("surgetank"));
    let mut failed = None;
    for dir in home.into_iter().chain([config.state.join("lib")]) {
        // The loader separates paths by these.
        if dir.as_os_str().as_bytes().iter().any(|byte| matches!(byte, b':' | b' ' | b'$')) {
            continue;
        }
        match put(&dir, &name) {
            Ok(path) => return Ok(path),
            Err(why) => failed = Some(why),
        }
    }
    Err(failed.unwrap_or_else(|| io::Error::other("no directory whose path the dynamic loader understands")))
}

fn put(dir: &Path, name: &str) -> io::Result<PathBuf> {
    let path = dir.join(name);
    let ours = rustix::process::geteuid().as_raw();
    let is_it = |path: &Path| {
        fs::symlink_metadata(path)
            .is_ok_and(|there| there.is_file() && there.uid() == ours && there.len() == LIBRARY.len() as u64)
    };
    if is_it(&path) {
        return Ok(path);
    }
    fs::create_dir_all(dir)?;
    let temporary = dir.join(format!("{name}.{}", std::process::id()));
    drop(fs::remove_file(&temporary));
    let mut file = fs::File::options().write(true).create_new(true).mode(0o755).open(&temporary)?;
    let written = file.write_all(LIBRARY).and_then(|()| fs::rename(&temporary, &path));
    if written.is_err() {
        drop(fs::remove_file(&temporary));
    }
    written.map(|()| path)
}

/// Tells builds apart; nothing depends on its being hard to forge.
fn fingerprint(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}
