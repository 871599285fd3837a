//! The life of the agent and its runs, with real processes, namespaces, signals and mounts.
//!
//! The program under test is this test binary itself: with `SURGETANK_TEST_PROGRAM` set it is `surgetank` with the
//! backend of `fake.rs`. Every test runs as root and as an ordinary user (uid 65534) where this machine permits it.
//! Nothing here measures time; waiting is for events, and bounded so that a failure ends.

mod bench;
mod cases;
mod fake;

use libtest_mimic::{Arguments, Trial};
use surgetank::verbs::{self, Program};

use bench::{Bench, Who};

fn main() {
    if std::env::var_os("SURGETANK_TEST_PROGRAM").is_some() {
        let program = Program {
            backend: &fake::FakeBackend,
            configure: fake::configure,
        };
        std::process::exit(i32::from(verbs::main(&program)));
    }
    let arguments = Arguments::from_args();
    let mut users = vec![Who::Ordinary];
    if rustix::process::geteuid().is_root() {
        users.push(Who::Root);
    }
    let mut trials = Vec::new();
    for who in users {
        for (name, case) in cases::ALL {
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
