//! Gives the command the preload shim: the library for the dynamic loader, and the shim's variables in the environment.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use surgetank_policy::config::Config;
use surgetank_types::model::RunId;

use crate::agent::wire::Hello;
use crate::shimdoor::counts;

use super::library;

/// The shim's input: a line for each mount around the command.
const MOUNTS: &str = "SURGETANK_SHIM";
const SKIP: &str = "SURGETANK_PRELOAD_SKIP";
pub const LOADER: &str = "LD_PRELOAD";

/// Variables for the command; none if the shim is disabled or not possible.
pub fn variables(config: &Config, hello: &Hello, run: RunId) -> Vec<(&'static str, OsString)> {
    let Some(shim) = hello.shim.as_ref().filter(|_| config.preload) else {
        return Vec::new();
    };
    let parts = [shim.index.as_path(), shim.socket.as_path(), hello.over.as_path()].map(Path::as_os_str);
    // These characters separate the variable's fields.
    if parts.iter().any(|part| part.as_bytes().iter().any(|byte| matches!(byte, b'\n' | b'\t'))) {
        return Vec::new();
    }
    let library = match library::place(config) {
        Ok(library) => library,
        Err(why) => {
            eprintln!("surgetank: no directory for the preload shim ({why}); all programs use the mount");
            return Vec::new();
        }
    };
    let mounts = env::var_os(MOUNTS).unwrap_or_default().into_vec();
    let ours = parts.map(OsStr::as_bytes).join(&b'\t');
    // (An enclosing run over the same directory counts in another place.)
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

/// Placed after other preloaded libraries, so that those see the program's calls first.
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
