//! The life of the agent and its runs, with real processes, namespaces, signals and mounts.
//!
//! The program under test is this test binary itself: with `SURGETANK_TEST_PROGRAM` set it is `surgetank` with the
//! backend of `fake.rs`. Every test runs as root and as an ordinary user (uid 65534) where this machine permits it.
//! No test measures time. Each wait is for an event, with a limit so that a failure ends.

// A failed expectation fails the test here. Clippy does not see that, because the functions have no `#[test]`.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod bench;
mod cases;
mod fake;
#[path = "../mirror/mod.rs"]
mod mirror;
mod silent;

use libtest_mimic::{Arguments, Trial};
use surgetank::verbs::{self, Program};

use bench::{Bench, Who};

fn main() {
    if let Some(socket) = std::env::var_os("SURGETANK_TEST_OTHER_USER") {
        return be_another_user(socket.as_ref());
    }
    if std::env::var_os("SURGETANK_TEST_PROGRAM").is_some() {
        let program = Program {
            backend: &fake::FakeBackend,
            configure: fake::configure,
            state_root: |settings| fake::configure(settings).map(|config| config.state),
        };
        std::process::exit(i32::from(verbs::main(&program)));
    }
    let arguments = Arguments::from_args();
    let mut users = vec![Who::Ordinary];
    if rustix::process::geteuid().is_root() {
        users.push(Who::Root);
        step_aside();
    }
    let mut trials = Vec::new();
    for who in users {
        for (name, case) in cases::ALL.iter().chain(silent::ALL) {
            let prefix = format!("{who:?}").to_lowercase();
            trials.push(Trial::test(format!("{prefix}::{name}"), move || {
                case(&Bench::new(who));
                Ok(())
            }));
        }
        if matches!(who, Who::Root) {
            for (name, case) in cases::ROOT_ONLY {
                trials.push(Trial::test(format!("root::{name}"), move || {
                    case(&Bench::new(who));
                    Ok(())
                }));
            }
        }
    }
    libtest_mimic::run(&arguments, trials).exit();
}

/// A mount namespace for the whole test, in which every user may open `/dev/fuse`, as on most machines. Mounts of the
/// tests stay in it, and vanish with them.
fn step_aside() {
    let node = std::env::temp_dir().join(format!("surgetank-agent-life-fuse-{}", std::process::id()));
    surgetank::mount::namespaces::private_namespace_root().unwrap();
    let device = rustix::fs::stat("/dev/fuse").unwrap().st_rdev;
    rustix::fs::mknodat(rustix::fs::CWD, &node, rustix::fs::FileType::CharacterDevice, 0o600.into(), device).unwrap();
    rustix::fs::chmod(&node, 0o666.into()).unwrap();
    rustix::mount::mount_bind(&node, "/dev/fuse").unwrap();
    std::fs::remove_file(&node).unwrap();
}

/// A process of another user that has access to the socket.
fn be_another_user(socket: &std::path::Path) {
    use std::io::{Read, Write};
    let mut stream = std::os::unix::net::UnixStream::connect(socket).unwrap();
    let mut answer = Vec::new();
    // Both may fail: the agent closes the connection without an answer.
    let _ = stream.write_all(b"{\"hello\":{\"protocol\":2}}\n");
    let _ = stream.read_to_end(&mut answer);
    println!("{}", if answer.is_empty() { "turned away" } else { "answered" });
}
