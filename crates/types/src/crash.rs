//! Points at which the crash campaign (`make crash`) kills the agent: every step that touches disk or state has one. Only debug
//! builds have them.
//!
//! The environment of the agent selects what happens:
//!
//! - `SURGETANK_CRASH=NAME:N`: SIGKILL when the agent passes NAME for the Nth time. The agents that follow it read the next
//!   words of a list: `NAME:N,NAME:N`.
//! - `SURGETANK_CRASH_SUPERVISOR`: the agent's supervisor is killed first, so that no agent follows.
//! - `SURGETANK_HOLD=NAME:MILLISECONDS`: a thread that passes NAME waits there, so that a test can act meanwhile.
//! - `SURGETANK_HOLD=NAME:@FILE`: a thread that passes NAME makes `FILE.reached` and waits until FILE exists.
//! - `SURGETANK_CRASH_LOG=FILE`: every passing appends a line, so that the campaign knows which points exist.
//! - `SURGETANK_CRASH_DEATHS=FILE`: an agent that dies at NAME first appends NAME, so that the campaign knows what it tried.

/// A point at which the crash campaign can kill the agent: `crash_point!("drain.rename")`. Empty in release builds.
#[macro_export]
macro_rules! crash_point {
    ($name:literal) => {
        #[cfg(debug_assertions)]
        $crate::crash::pass($name);
    };
}

/// Sets how many agents of this place ran before this one. The agent calls it before it passes the first point.
pub fn begin_life(life: u32) {
    LIFE.store(life, std::sync::atomic::Ordering::Relaxed);
}

static LIFE: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);

#[cfg(debug_assertions)]
pub use armed::{is_next, pass};

#[cfg(debug_assertions)]
mod armed {
    use std::fs::{File, OpenOptions};
    use std::io::Write;
    use std::path::PathBuf;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    struct Armed {
        name: String,
        left: AtomicU64,
        held: String,
        hold: Hold,
        log: Option<File>,
    }

    enum Hold {
        For(Duration),
        Until(PathBuf),
    }

    static ARMED: OnceLock<Option<Armed>> = OnceLock::new();

    /// Passes the point `name`: logs it, waits at it, or kills the process, as the environment asks.
    pub fn pass(name: &str) {
        let Some(armed) = ARMED.get_or_init(from_environment) else { return };
        if let Some(mut log) = armed.log.as_ref() {
            // One write a line, so that lines of several threads do not mix. A campaign that misses a line tries one point less.
            let _ = log.write_all(format!("{name}\n").as_bytes());
        }
        if armed.held == name {
            armed.hold.stay();
        }
        if armed.name == name && armed.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            if let Some(mut deaths) = written("SURGETANK_CRASH_DEATHS") {
                let _ = deaths.write_all(format!("{name}\n").as_bytes());
            }
            if std::env::var_os("SURGETANK_CRASH_SUPERVISOR").is_some()
                && let Some(supervisor) = rustix::process::getppid()
            {
                let _ = rustix::process::kill_process(supervisor, rustix::process::Signal::KILL);
            }
            // SIGKILL flushes nothing and runs no destructor, as when the kernel kills the process.
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        }
    }

    /// Whether the next passing of `name` kills the process.
    pub fn is_next(name: &str) -> bool {
        let armed = ARMED.get_or_init(from_environment);
        armed.as_ref().is_some_and(|armed| armed.name == name && armed.left.load(Ordering::Relaxed) == 1)
    }

    fn from_environment() -> Option<Armed> {
        let log = written("SURGETANK_CRASH_LOG");
        let (name, count) = name_and_number("SURGETANK_CRASH");
        let (held, hold) = name_and_number("SURGETANK_HOLD");
        (log.is_some() || !name.is_empty() || !held.is_empty()).then(|| Armed {
            name,
            left: AtomicU64::new(count.parse().unwrap_or(0)),
            held,
            hold: match hold.strip_prefix('@') {
                Some(path) => Hold::Until(path.into()),
                None => Hold::For(Duration::from_millis(hold.parse().unwrap_or(0))),
            },
            log,
        })
    }

    fn written(variable: &str) -> Option<File> {
        std::env::var_os(variable).and_then(|path| OpenOptions::new().append(true).create(true).open(path).ok())
    }

    impl Hold {
        fn stay(&self) {
            const LOOK_EVERY: Duration = Duration::from_millis(2);
            match self {
                Self::For(time) => std::thread::sleep(*time),
                Self::Until(path) => {
                    let mut reached = path.clone().into_os_string();
                    reached.push(".reached");
                    // A test that waits for it says that it is missing.
                    drop(File::create(reached));
                    while !path.exists() {
                        std::thread::sleep(LOOK_EVERY);
                    }
                }
            }
        }
    }

    /// `NAME:NUMBER`, or another word in the number's place.
    fn name_and_number(variable: &str) -> (String, String) {
        let all = std::env::var(variable).unwrap_or_default();
        let life = super::LIFE.load(Ordering::Relaxed) as usize;
        let words = all.split(',').nth(life).unwrap_or_default();
        let (name, number) = words.rsplit_once(':').unwrap_or_default();
        (name.to_owned(), number.to_owned())
    }
}
