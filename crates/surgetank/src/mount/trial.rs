//! Can a mount be made here? A forked child tries it, ends at once, and takes its namespaces and the mount with it.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

#[derive(Clone, Copy)]
pub struct Try {
    /// In a user namespace of our own.
    pub user: bool,
    /// Mount FUSE over the target; otherwise only create the namespaces.
    pub mount: bool,
}

/// Tries it in a child that ends at once; a mount ends with the child's namespace.
pub fn tried(target: &Path, what: Try) -> io::Result<()> {
    let uid = rustix::process::geteuid().as_raw();
    let gid = rustix::process::getegid().as_raw();
    let uid_map = format!("{uid} {uid} 1");
    let gid_map = format!("{gid} {gid} 1");
    let target = CString::new(target.as_os_str().as_bytes())?;
    let mut command = Command::new("/");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let attempt = move || -> io::Result<()> {
        attempt(what, &uid_map, &gid_map, &target, (uid, gid))?;
        // SAFETY: ends the forked child at once, without exec and without running any of the parent's code.
        unsafe { libc::_exit(0) }
    };
    // SAFETY: between fork and exec `attempt` makes system calls only and allocates nothing; its strings were made
    // before.
    unsafe { command.pre_exec(attempt) };
    command.spawn()?.wait().map(drop)
}

/// Runs in the forked child: system calls only, no allocation.
fn attempt(what: Try, uid_map: &str, gid_map: &str, target: &CString, (uid, gid): (u32, u32)) -> io::Result<()> {
    let done = |result: i32| {
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
    };
    let spaces = if what.user { libc::CLONE_NEWUSER | libc::CLONE_NEWNS } else { libc::CLONE_NEWNS };
    // SAFETY: unshare takes a number only.
    done(unsafe { libc::unshare(spaces) })?;
    if what.user {
        // Absent on old kernels, and then not needed.
        let _ = write_to(c"/proc/self/setgroups", "deny");
        write_to(c"/proc/self/uid_map", uid_map)?;
        write_to(c"/proc/self/gid_map", gid_map)?;
    }
    // SAFETY: C strings and null pointers as mount(2) wants them.
    done(unsafe {
        libc::mount(
            std::ptr::null(),
            c"/".as_ptr(),
            std::ptr::null(),
            libc::MS_REC | libc::MS_PRIVATE,
            std::ptr::null(),
        )
    })?;
    if !what.mount {
        return Ok(());
    }
    // SAFETY: a C string and flags.
    let fuse = done(unsafe { libc::open(c"/dev/fuse".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) })?;
    let mut options = [0u8; 128];
    {
        use io::Write;
        let mut rest = &mut options[..127];
        write!(rest, "fd={fuse},rootmode=40000,user_id={uid},group_id={gid}")?;
    }
    let flags = libc::MS_NOSUID | libc::MS_NODEV;
    // SAFETY: all four are C strings (`options` keeps its last zero byte), alive during the call.
    done(unsafe {
        libc::mount(c"surgetank-doctor".as_ptr(), target.as_ptr(), c"fuse".as_ptr(), flags, options.as_ptr().cast())
    })?;
    Ok(())
}

fn write_to(path: &std::ffi::CStr, text: &str) -> io::Result<()> {
    // SAFETY: a C string and a flag; the descriptor is closed below.
    let file = unsafe { libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC) };
    if file < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `text` is readable for its length.
    let wrote = unsafe { libc::write(file, text.as_ptr().cast(), text.len()) };
    let result = if wrote == text.len() as isize { Ok(()) } else { Err(io::Error::last_os_error()) };
    // SAFETY: our own descriptor, closed once.
    unsafe { libc::close(file) };
    result
}
