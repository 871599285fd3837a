//! Starts the command: it enters the agent's namespaces and returns to the working directory by its path, which now
//! leads through the mount. It has the descriptors, signals and limits that a shell would give it.
//!
//! Descriptors on the bare directory lead underneath the mount. Those above 2 are closed for the command. Standard
//! streams stay unchanged. The shell opened them on the store's own file before the start, so their bytes are in the
//! store at once. The mount shows the name (`docs/semantics.md`, "Redirections").

use std::ffi::{CString, OsString};
use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::io::FdFlags;
use surgetank_core::report::Visibility;
use surgetank_types::error::{Error, Result};

use crate::agent::client::{AGENT_VARIABLE, Connection};
use crate::agent::line::{self, Broken, Limits};
use crate::agent::signals::Signals;
use crate::mount::namespaces::Namespaces;
use crate::verbs::exit;

use super::preload::LOADER;

/// A descriptor on the bare directory or on a file below it.
#[derive(Debug, PartialEq, Eq)]
pub struct Inherited {
    pub number: i32,
    pub path: PathBuf,
}

/// Descriptors from our parent process that are below `over`. Call it before this process opens a file there.
pub fn inherited_below(over: &Path) -> Vec<Inherited> {
    let Ok(entries) = fs::read_dir("/proc/self/fd") else {
        return Vec::new();
    };
    let mut found: Vec<Inherited> = entries
        .flatten()
        .filter_map(|entry| {
            let number = entry.file_name().to_str()?.parse().ok()?;
            let path = fs::read_link(entry.path()).ok()?;
            path.starts_with(over).then_some(Inherited { number, path })
        })
        .collect();
    found.sort_by_key(|inherited| inherited.number);
    found
}

/// The command will not have the descriptor.
pub fn close_in_command(inherited: &Inherited) -> io::Result<()> {
    // SAFETY: the number was listed in /proc/self/fd, and nothing in this process, which has a single thread by now,
    // closes it.
    let fd = unsafe { BorrowedFd::borrow_raw(inherited.number) };
    rustix::io::fcntl_setfd(fd, FdFlags::CLOEXEC)?;
    Ok(())
}

/// Which step before exec failed; sent through a pipe, because exec reports an errno only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Namespaces = 1,
    Directory = 2,
    Filter = 3,
    /// The command cannot take the preload shim; it is started again without.
    Foreign = 4,
}

unsafe extern "C" {
    /// shim/foreign.c: it makes only system calls, and uses only memory of its own stack.
    fn st_is_foreign(program: *const libc::c_char, search: *const libc::c_char) -> bool;
}

/// The command did not start.
pub enum Stillborn {
    /// The command cannot be executed: the exit code as a shell gives it.
    Command { exit: u8, error: Error },
    /// Surgetank could not prepare the command's process.
    Ours(Error),
}

pub fn spawn(
    command: &[OsString],
    cwd: &Path,
    agent: &Connection,
    signals: &Signals,
    variables: &[(&str, OsString)],
) -> std::result::Result<u32, Stillborn> {
    let Some((program, arguments)) = command.split_first() else {
        return Err(Stillborn::Ours(Error::new("no command is given")));
    };
    let namespaces = namespaces_of(agent).map_err(Stillborn::Ours)?;
    let arming = arming_of(agent).map_err(Stillborn::Ours)?;
    let broken =
        |error: &dyn std::fmt::Display| Stillborn::Ours(Error::new("the command cannot be started").why(error));
    let cwd_bytes = CString::new(cwd.as_os_str().as_bytes()).map_err(|error| broken(&error))?;
    let over_bytes = CString::new(agent.hello.over.0.clone()).map_err(|error| broken(&error))?;
    let name = CString::new(program.as_bytes()).map_err(|error| broken(&error))?;
    let search =
        CString::new(std::env::var_os("PATH").unwrap_or_default().as_bytes()).map_err(|error| broken(&error))?;
    let preloads = variables.iter().any(|(variable, _)| *variable == LOADER);
    let (mut told, tell) = io::pipe().map_err(|error| broken(&error))?;
    let unblock = signals.unblock_in_child();
    let before_exec = move || {
        let failed = |step: Step, error: io::Error| {
            // A pipe that fails now has no remedy.
            let _ = (&tell).write_all(&[step as u8]);
            error
        };
        if let Some(namespaces) = &namespaces {
            namespaces.enter().map_err(|error| failed(Step::Namespaces, error))?;
            // Before the first stat of the mount's root, the kernel takes root as its owner. A user namespace does not
            // know root, and the kernel refuses to create files there. Chdir does not fetch the owner. An error shows
            // below.
            let _ = rustix::fs::stat(&over_bytes);
        }
        if let Some(arming) = &arming {
            arming.arm().map_err(|error| failed(Step::Filter, error))?;
        }
        rustix::process::chdir(&cwd_bytes).map_err(|errno| failed(Step::Directory, errno.into()))?;
        // SAFETY: both are C strings, and the callee keeps no pointer. (Only from here is the program in its final
        // place.)
        if preloads && unsafe { st_is_foreign(name.as_ptr(), search.as_ptr()) } {
            return Err(failed(Step::Foreign, io::ErrorKind::Unsupported.into()));
        }
        unblock()
    };
    let mut child = Command::new(program);
    child.args(arguments).env(AGENT_VARIABLE, agents_around(agent));
    child.envs(variables.iter().map(|(name, value)| (name, value)));
    // SAFETY: the closure makes system calls on values prepared before the fork, and allocates nothing.
    unsafe { child.pre_exec(before_exec) };
    let spawned = child.spawn();
    // The closure holds the other end of the pipe.
    drop(child);
    match spawned {
        Ok(child) => Ok(child.id()),
        Err(error) => {
            let mut step = [0];
            let got = told.read(&mut step).unwrap_or(0);
            if step[0] == Step::Foreign as u8 {
                let others: Vec<_> = variables.iter().filter(|(name, _)| *name != LOADER).cloned().collect();
                return spawn(command, cwd, agent, signals, &others);
            }
            Err(if got == 0 { not_executable(program, &error) } else { lost(step[0], cwd, agent, &error) })
        }
    }
}

fn not_executable(program: &OsString, error: &io::Error) -> Stillborn {
    // A search that meets a closed directory in PATH reports "permission denied" for any program.
    let nowhere = !program.as_bytes().contains(&b'/')
        && !std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).any(|dir| dir.join(program).exists());
    let missing = nowhere || error.kind() == io::ErrorKind::NotFound;
    let exit = if missing { exit::NOT_FOUND } else { exit::NOT_EXECUTABLE };
    Stillborn::Command { exit, error: Error::new(format!("{} cannot be executed", program.display())).why(error) }
}

fn lost(step: u8, cwd: &Path, agent: &Connection, error: &io::Error) -> Stillborn {
    let over = &agent.hello.over;
    Stillborn::Ours(if step == Step::Filter as u8 {
        Error::new("the command's system calls cannot be put before the agent")
            .why(format!("seccomp: {error}"))
            .remedy("inside another filter with a listener (a container, another surgetank run) it takes a mount: --door fuse")
            .data("nothing was begun")
    } else if step == Step::Namespaces as u8 {
        Error::new(format!("the mount over {over} cannot be entered"))
            .why(format!("setns: {error}"))
            .remedy("the agent belongs to another container or user; run as the user that started it")
    } else {
        Error::new(format!("the working directory {} cannot be entered through the mount", cwd.display()))
            .why(error)
            .remedy("with --store elsewhere the directory has to exist there")
    })
}

/// `None` if the mount is visible here: it is global, or this process is inside already.
fn namespaces_of(agent: &Connection) -> Result<Option<Namespaces>> {
    use std::os::unix::fs::MetadataExt;
    let ours = fs::metadata("/proc/self/ns/mnt").map(|meta| meta.ino()).unwrap_or(0);
    if agent.hello.visibility == Visibility::Global || ours == agent.hello.mount_namespace {
        return Ok(None);
    }
    Namespaces::of(agent.pid).map(Some).map_err(|error| {
        Error::new(format!("the namespaces of the agent (pid {}) cannot be opened", agent.pid)).why(error)
    })
}

/// `None` if there is a mount.
fn arming_of(agent: &Connection) -> Result<Option<crate::seccomp::Arming>> {
    let Some(listeners) = &agent.hello.listeners else { return Ok(None) };
    connect_to_listeners(listeners.as_path())
        .and_then(crate::seccomp::Arming::new)
        .map(Some)
        .map_err(|error| Error::new(format!("the agent (pid {}) takes no command's calls", agent.pid)).why(error))
}

fn connect_to_listeners(socket: &Path) -> io::Result<UnixStream> {
    let agent = match line::connect(socket, &Limits::default()) {
        Ok(agent) => agent,
        Err(Broken::Io(error)) => return Err(error),
        Err(_) => return Err(io::ErrorKind::TimedOut.into()),
    };
    agent.set_read_timeout(Some(line::BUSY_PATIENCE))?;
    Ok(agent)
}

/// The agents around the command, this run's last.
fn agents_around(agent: &Connection) -> OsString {
    let before = std::env::var_os(AGENT_VARIABLE).unwrap_or_default();
    let mut places: Vec<PathBuf> = std::env::split_paths(&before).filter(|path| !path.as_os_str().is_empty()).collect();
    places.retain(|place| *place != agent.place);
    places.push(agent.place.clone());
    // This fails for a path with a colon; then the command's children find the agent by asking all agents.
    std::env::join_paths(places).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn descriptors_below_the_directory_are_found_and_closed_on_exec() {
        let dir = tempfile::tempdir().unwrap();
        let over = dir.path().canonicalize().unwrap();
        let inside = File::create(over.join("inside")).unwrap();
        rustix::io::fcntl_setfd(&inside, FdFlags::empty()).unwrap();
        let found = inherited_below(&over);
        assert_eq!(found, [Inherited { number: inside.as_raw_fd(), path: over.join("inside") }]);
        close_in_command(&found[0]).unwrap();
        assert_eq!(rustix::io::fcntl_getfd(&inside).unwrap(), FdFlags::CLOEXEC);
    }
}
