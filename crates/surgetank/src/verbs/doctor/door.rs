//! The door: how the directory can be mounted here. Root gets a mount with passthrough. An ordinary user gets a private
//! mount in a namespace of their own, or else one by fusermount3.
//!
//! A forked child tries namespaces and the mount; it ends at once and takes them with it.

use std::fs;
use std::io;
use std::path::Path;

use surgetank_policy::config::Config;

use super::finding::{Finding, Verdict};
use crate::agent::seclusion::fusermount;
use crate::agent::way::{self, Mount};
use crate::mount::trial::{Try, tried};

/// The first kernel with FUSE passthrough.
const PASSTHROUGH_KERNEL: (u32, u32) = (6, 9);

pub fn examine(target: &Path) -> Vec<Finding> {
    let mut findings = Vec::new();
    device(&mut findings);
    let kernel = kernel(&mut findings);
    io_uring(&mut findings);

    let privileged = tried(target, Try { user: false, mount: true });
    let spaces = tried(target, Try { user: true, mount: false });
    let private = if spaces.is_ok() {
        tried(target, Try { user: true, mount: true })
    } else {
        Err(io::Error::from_raw_os_error(libc::EPERM))
    };
    let fusermount = fusermount();
    let root = privileged.is_ok();
    findings.push(match &spaces {
        Ok(()) => Finding::new("user name spaces", Verdict::Good, "may be made"),
        Err(error) => Finding::new(
            "user name spaces",
            if root { Verdict::Info } else { Verdict::Less },
            format!("can't be made: {error}"),
        )
        .remedy(user_space_remedy()),
    });
    findings.push(match (&privileged, &private) {
        (Ok(()), _) => Finding::new("mounting", Verdict::Good, "permitted"),
        (_, Ok(())) => Finding::new("mounting", Verdict::Good, "permitted in a user name space of our own"),
        (Err(error), Err(inside)) => {
            Finding::new("mounting", Verdict::Less, format!("refused: {error}; in a user name space: {inside}"))
                .remedy(user_space_remedy())
        }
    });
    findings.push(match &fusermount {
        Some(path) => Finding::new("fusermount3", Verdict::Good, path.display().to_string()),
        None => Finding::new("fusermount3", Verdict::Info, "not found in PATH")
            .remedy("only needed where user name spaces are switched off, or for a mount that all your sessions see: install the fuse3 package"),
    });
    let initial =
        fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| map.split_whitespace().eq(["0", "0", "4294967295"]));
    let mount = way::mountable(target);
    findings.push(door(&mount, initial, kernel));
    findings.push(calls(mount.is_ok(), &crate::seccomp::is_possible()));
    if mount == Ok(Mount::UserNamespace) {
        findings.push(
            Finding::new(
                "setuid programs",
                Verdict::Less,
                "sudo, su, ping and the like do not work inside the private user name space",
            )
            .remedy("call them outside of surgetank run, or have an administrator make the mount: surgetank mount"),
        );
    }
    findings
}

/// The decision of `run` itself for this configuration.
pub fn decision(config: &Config) -> Finding {
    let about = "surgetank run";
    match way::chosen(config) {
        Ok(Some(_)) => Finding::new(about, Verdict::Good, "works here by a mount"),
        Ok(None) => Finding::new(about, Verdict::Less, "works here without a mount: by system calls (seccomp)")
            .remedy("see \"door\" above for what a mount needs; `surgetank help semantics` has the differences"),
        Err(error) => Finding::new(about, Verdict::Bad, format!("{}: {}", error.what, error.why))
            .remedy("see \"door\" and \"system calls\" above; one of the two is needed"),
    }
}

/// `initial`: not in a container's user namespace.
fn door(mount: &Result<Mount, String>, initial: bool, kernel: (u32, u32)) -> Finding {
    let about = "door";
    match mount {
        Ok(Mount::Privileged) if initial && kernel >= PASSTHROUGH_KERNEL => Finding::new(
            about,
            Verdict::Good,
            "the mount with passthrough: reading and writing an open file costs what the tier costs",
        ),
        Ok(Mount::Privileged) => Finding::new(
            about,
            Verdict::Less,
            "the mount without passthrough: every read and write goes through the agent",
        )
        .remedy(if kernel < PASSTHROUGH_KERNEL {
            "a kernel from 6.9 on has passthrough"
        } else {
            "passthrough needs root outside of a container's user name space"
        }),
        Ok(Mount::UserNamespace) => Finding::new(
            about,
            Verdict::Good,
            "a private mount in a user name space, seen by the command and its children only; passthrough is for root",
        ),
        Ok(Mount::Fusermount) => Finding::new(
            about,
            Verdict::Less,
            "a mount by fusermount3, because user namespaces are not available; all your processes see it",
        )
        .remedy(user_space_remedy()),
        Err(why) if why.starts_with("/dev/fuse") => {
            Finding::new(about, Verdict::Less, format!("none: nothing can be mounted: {why}"))
                .remedy("load the module (modprobe fuse); in a container pass the device in (--device /dev/fuse)")
        }
        Err(why) => Finding::new(about, Verdict::Less, format!("none: {why}"))
            .remedy(format!("install fuse3, or {}", user_space_remedy())),
    }
}

/// The door without a mount.
fn calls(mountable: bool, possible: &Result<(), String>) -> Finding {
    let about = "system calls (seccomp)";
    match possible {
        Ok(()) if !mountable => Finding::new(
            about,
            Verdict::Less,
            "--door auto uses this door: the agent answers the command's calls on paths; opening costs a few times what a mount costs, reading and writing nothing",
        )
        .remedy("setuid programs, sockets in the directory, containers started inside and --store elsewhere do not work this way"),
        Ok(()) => Finding::new(about, Verdict::Good, "possible without a mount too: --door seccomp"),
        Err(why) => Finding::new(about, if mountable { Verdict::Info } else { Verdict::Less }, format!("not possible: {why}"))
            .remedy("a kernel from 5.14 on; as root: sysctl kernel.yama.ptrace_scope=1; in a container a profile that permits seccomp"),
    }
}

fn device(findings: &mut Vec<Finding>) {
    let opened = fs::OpenOptions::new().read(true).write(true).open("/dev/fuse");
    findings.push(match &opened {
        Ok(_) => Finding::new("/dev/fuse", Verdict::Good, "can be opened"),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Finding::new("/dev/fuse", Verdict::Less, "does not exist")
                .remedy("load the module (modprobe fuse); in a container pass the device in (--device /dev/fuse)")
        }
        Err(error) => Finding::new("/dev/fuse", Verdict::Less, format!("can't be opened: {error}"))
            .remedy("its permissions should be 0666 (chmod, or udev); in a container the device must be allowed"),
    });
}

fn kernel(findings: &mut Vec<Finding>) -> (u32, u32) {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let version = version(&release);
    findings.push(if version >= PASSTHROUGH_KERNEL {
        Finding::new("kernel", Verdict::Good, format!("{release}: has FUSE passthrough (for root)"))
    } else {
        Finding::new("kernel", Verdict::Less, format!("{release}: no FUSE passthrough"))
            .remedy("a kernel from 6.9 on lets root read and write at the tier's own speed")
    });
    version
}

fn version(release: &str) -> (u32, u32) {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

fn io_uring(findings: &mut Vec<Finding>) {
    let switch = "/sys/module/fuse/parameters/enable_uring";
    findings.push(match fs::read_to_string(switch) {
        Ok(text) if matches!(text.trim(), "Y" | "1") => {
            Finding::new("FUSE over io_uring", Verdict::Good, "switched on")
        }
        Ok(_) => Finding::new("FUSE over io_uring", Verdict::Info, "there, but switched off")
            .remedy(format!("as root: echo Y > {switch}; creating and listing files gets faster")),
        Err(_) => Finding::new("FUSE over io_uring", Verdict::Info, "not in this kernel"),
    });
}

/// What disabled user namespaces, and how to enable them.
fn user_space_remedy() -> String {
    let value = |path: &str| fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default();
    if value("/proc/sys/user/max_user_namespaces") == "0" {
        "as root: sysctl user.max_user_namespaces=15000"
    } else if value("/proc/sys/kernel/unprivileged_userns_clone") == "0" {
        "as root: sysctl kernel.unprivileged_userns_clone=1"
    } else if value("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1" {
        "as root: sysctl kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile with 'userns' for surgetank"
    } else {
        "ask the administrator whether a container or a seccomp profile forbids unshare and mount"
    }
    .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_have_remedies_unless_all_is_well() {
        let ways = [Mount::Privileged, Mount::UserNamespace, Mount::Fusermount].map(Ok);
        let none = ["/dev/fuse: absent", "mounting: refused"].map(|why| Err(why.to_owned()));
        for mount in ways.into_iter().chain(none) {
            for (initial, kernel) in [(true, (6, 9)), (false, (6, 9)), (true, (6, 1))] {
                let finding = door(&mount, initial, kernel);
                assert_eq!(finding.remedy.is_empty(), finding.verdict == Verdict::Good, "{finding:?}");
                let passes = mount == Ok(Mount::Privileged) && initial && kernel >= PASSTHROUGH_KERNEL;
                assert_eq!(finding.found.contains("mount with passthrough"), passes, "{finding:?}");
            }
            for possible in [Ok(()), Err("a reason".to_owned())] {
                let finding = calls(mount.is_ok(), &possible);
                assert_eq!(finding.remedy.is_empty(), finding.verdict == Verdict::Good, "{finding:?}");
            }
        }
    }

    #[test]
    fn kernel_versions() {
        assert_eq!(version("6.18.44-fc-v595"), (6, 18));
        assert_eq!(version("5.14.0-427.el9.x86_64"), (5, 14));
        assert!(version("6.10.1") > PASSTHROUGH_KERNEL && version("6.8.0") < PASSTHROUGH_KERNEL);
        assert_eq!(version("odd"), (0, 0));
    }

    #[test]
    fn trial_leaves_no_mount() {
        let dir = tempfile::tempdir().expect("tempdir");
        let before = fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
        let _ = tried(dir.path(), Try { user: false, mount: true });
        let _ = tried(dir.path(), Try { user: true, mount: true });
        assert_eq!(fs::read_to_string("/proc/self/mountinfo").expect("mountinfo"), before);
        assert!(tried(&dir.path().join("absent"), Try { user: false, mount: true }).is_err());
    }
}
