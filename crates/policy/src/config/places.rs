//! Files and directories that a configuration names, and the advice for one that cannot be used.
//!
//! The danger that it avoids: advice that fails as it is printed, such as `mkdir -p /dev/null`.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::key::Sourced;
use surgetank_types::error::{Error, Result};
use surgetank_types::shell;

/// The physical path of a directory that exists. `otherwise` is the advice if it cannot be created under this name.
pub(super) fn directory(given: &Sourced<PathBuf>, what: &str, otherwise: &str) -> Result<PathBuf> {
    let label = &given.origin.label;
    let failed = |why: String| {
        let remedy = if can_be_made(&given.value) {
            format!("create it: mkdir -p {}", shell::word(&given.value))
        } else {
            otherwise.to_owned()
        };
        Error::new(format!("{label}: {what} {} can't be used", given.value.display())).why(why).remedy(remedy)
    };
    let path = given.value.canonicalize().map_err(|error| failed(error.to_string()))?;
    if !path.is_dir() {
        return Err(failed("it is not a directory".to_owned()));
    }
    refuse_bytes(&path, label, what)?;
    Ok(path)
}

/// Refuses a path that is not UTF-8. Files may have any name, but these directories are named in messages to the agent, in
/// records and in printed commands, all of which are text.
pub(super) fn refuse_bytes(path: &Path, label: &str, what: &str) -> Result<()> {
    match path.to_str() {
        Some(_) => Ok(()),
        None => Err(Error::new(format!("{label}: {what} {} can't be used", path.display()))
            .why("its path is not UTF-8")
            .remedy("rename the directory, or name another one")),
    }
}

/// Whether `mkdir -p` would make it: the nearest existing ancestor is a directory that this user may write.
fn can_be_made(path: &Path) -> bool {
    let mut ancestors = path
        .ancestors()
        .skip_while(|path| path.symlink_metadata().is_err_and(|error| error.kind() == ErrorKind::NotFound));
    // An existing entry of this name cannot be made, not even a dangling link.
    ancestors.next().is_some_and(|there| {
        there != path
            && there.is_dir()
            && rustix::fs::access(there, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK).is_ok()
            && !["/proc", "/sys"].iter().any(|system| there.starts_with(system))
    })
}

/// The first entry below `dir` that is not a directory.
pub(super) fn first_file(dir: &Path) -> Option<PathBuf> {
    let mut left = vec![dir.to_path_buf()];
    while let Some(dir) = left.pop() {
        for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                left.push(entry.path());
            } else {
                return Some(entry.path());
            }
        }
    }
    None
}

/// The error for a configuration file that exists and cannot be read.
pub(super) fn unreadable(path: &Path, error: &std::io::Error) -> Error {
    let what = Error::new(format!("the configuration file {} can't be read", path.display())).why(error);
    what.remedy(match error.kind() {
        ErrorKind::IsADirectory => "name a file, for example surgetank.toml in that directory",
        ErrorKind::PermissionDenied => "get read permission on it, or give another file with --config",
        _ => "correct it, or give another file with --config",
    })
}

/// The text of a configuration file; `advice` says what to write in place of bytes that are not UTF-8.
pub(super) fn utf8(path: &Path, bytes: Vec<u8>, advice: &str) -> Result<String> {
    String::from_utf8(bytes).map_err(|error| {
        let before = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
        Error::new(format!("{}:{line}: this line is not UTF-8", path.display())).remedy(advice)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mkdir_is_advised_only_where_it_succeeds() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("file"), "").unwrap();
        std::os::unix::fs::symlink("nowhere", at("dangling")).unwrap();
        for name in ["new", "new/below", "it's new"] {
            assert!(can_be_made(&at(name)), "{name}");
        }
        for path in
            [at("file"), at("file/below"), at("dangling"), at("dangling/x"), "/dev/null".into(), "/proc/x".into()]
        {
            assert!(!can_be_made(&path), "{}", path.display());
        }
    }
}
