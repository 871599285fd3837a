//! The agent's process, from its first instruction to its last.
//!
//! Start-up (single-threaded until the engine starts): own session → start-up message on stdin → lock → private
//! namespace → a handle on the store → take other mounts along → engine and mount → socket →
//! "ready" on stdout. Anything that fails is told on stdout instead, so that the user sees the real reason.
//! End: last user gone → final drain → nobody left in the namespace → closed → unmount → catalog synced → exit.
//!
//! The danger it avoids: mounting before the handle is open (the store would be served through itself), and going
//! while a background child of a run can still write.

use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::thread::CapabilitySet;
use serde::{Deserialize, Serialize};
use surgetank_core::clock;
use surgetank_core::config::Config;
use surgetank_core::error::{Error, Result};
use surgetank_core::report::{Holder, PathText, Phase, Scope, Visibility};

use super::engine::{Backend, Engine, Mounted, Opening, Running};
use super::holders;
use super::place::{Card, Place};
use super::seclusion;
use super::signals::Signals;
use super::socket::{self, Desk};
use super::submounts::{self, Taken};
use super::users::Users;
use super::way;
use super::wire::{self, Hello, PROTOCOL, Refusal};

/// The message on stdin.
#[derive(Debug, Serialize, Deserialize)]
pub struct Startup {
    pub config: Config,
    pub place: PathText,
    /// `Global`: `surgetank mount`; the agent stays without users.
    pub wanted: Visibility,
}

/// The message on stdout.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Ready,
    Failed(Refusal),
}

/// `surgetank agent`, started by `run` and `mount` with pipes on stdin and stdout and the log on stderr.
pub fn main(backend: &dyn Backend) -> u8 {
    close_inherited();
    // Fails only for a group leader, and then we have a session's distance already.
    let _ = rustix::process::setsid();
    // Modes come with every request, masked already by the caller's own umask.
    rustix::process::umask(Mode::empty());
    start_log();
    let begun = begin(backend);
    let outcome = match &begun {
        Ok(_) => Outcome::Ready,
        Err(error) => {
            tracing::error!("cannot start: {error}");
            Outcome::Failed(Refusal::from(copy_of(error)))
        }
    };
    // Whoever started us may be gone already; then nobody joins, and we leave again.
    let _ = wire::write(&mut io::stdout(), &outcome).and_then(|()| io::Write::flush(&mut io::stdout()));
    match begun {
        Ok(agent) => agent.live(),
        Err(_) => 1,
    }
}

fn copy_of(error: &Error) -> Error {
    Error { what: error.what.clone(), why: error.why.clone(), remedy: error.remedy.clone(), data: error.data.clone() }
}

/// A long-lived process must not keep a stranger's pipe open.
fn close_inherited() {
    // SAFETY: called first thing in the process; descriptors from 3 on belong to nobody here.
    unsafe { libc::syscall(libc::SYS_close_range, 3_u32, u32::MAX, 0_u32) };
}

fn start_log() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("SURGETANK_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    // Fails only when a subscriber is set already.
    let _ = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).with_ansi(false).try_init();
    std::panic::set_hook(Box::new(|panic| tracing::error!("{panic}")));
}

/// As many descriptors as we may have: every open file of every program costs one or two.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let now = getrlimit(Resource::Nofile);
    let system = std::fs::read_to_string("/proc/sys/fs/nr_open").ok().and_then(|text| text.trim().parse().ok());
    // Beyond the hard limit only with CAP_SYS_RESOURCE; otherwise up to it.
    let all = Rlimit { current: system, maximum: system };
    if (system.is_none() || setrlimit(Resource::Nofile, all).is_err())
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: now.maximum, maximum: now.maximum })
    {
        tracing::warn!(%error, "the descriptor limit stays at {:?}", now.current);
    }
}

/// CAP_SYS_RESOURCE would let the drain eat the blocks that a file system reserves for root. In a user namespace
/// everything but the right to mount goes: the agent checks permissions itself, and must not be above them.
fn drop_capabilities(in_user_namespace: bool) -> io::Result<()> {
    let mut sets = rustix::thread::capabilities(None)?;
    let kept = if in_user_namespace { CapabilitySet::SYS_ADMIN } else { !CapabilitySet::SYS_RESOURCE };
    sets.effective &= kept;
    sets.permitted &= kept;
    sets.inheritable &= kept;
    rustix::thread::set_capabilities(None, sets)?;
    Ok(())
}

fn namespace_inode(which: &str) -> io::Result<u64> {
    Ok(std::fs::metadata(format!("/proc/self/ns/{which}"))?.ino())
}

fn open_directory(path: &Path, role: &str) -> Result<OwnedFd> {
    rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| Error::new(format!("{role} {} cannot be opened", path.display())).why(errno))
}

struct Agent {
    desk: Arc<Desk>,
    mount: Box<dyn Mounted>,
    taken: Vec<Taken>,
    place: Place,
    signals: Arc<Signals>,
    listener: UnixListener,
    /// Closes when whoever started us has joined or died.
    starter: BufReader<io::Stdin>,
    /// Holds the lock until the process ends.
    _lock: std::fs::File,
}

fn begin(backend: &dyn Backend) -> Result<Agent> {
    let fail = |why: String| Error::new("the agent cannot start").why(why);
    let mut starter = BufReader::new(io::stdin());
    let mut line = Vec::new();
    starter.read_until(b'\n', &mut line).map_err(|error| fail(error.to_string()))?;
    let Startup { config, place, wanted } =
        serde_json::from_slice(&line).map_err(|error| fail(format!("the start-up message: {error}")))?;

    let place = Place::open(place.as_path())?;
    let lock = place.try_agent_lock()?.ok_or_else(|| fail("another agent serves this directory".into()))?;
    place.await_catalog();
    let signals = Signals::block(&[libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT])
        .map_err(|error| fail(error.to_string()))?;
    Signals::ignore_broken_leases();
    raise_descriptor_limit();

    let user_before = namespace_inode("user").map_err(|error| fail(error.to_string()))?;
    let by_calls = wanted == Visibility::Private && way::by_calls(&config)?;
    let visibility = match wanted {
        Visibility::Private if by_calls => Visibility::Private,
        Visibility::Private => seclusion::seclude()?,
        Visibility::Global => Visibility::Global,
    };
    let user_namespace = namespace_inode("user").map_err(|error| fail(error.to_string()))?;
    drop_capabilities(user_namespace != user_before).map_err(|error| fail(format!("capabilities: {error}")))?;

    let over = config.over.clone();
    let store = open_directory(&config.store, "the store")?;
    let may_mount =
        rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN));
    let taken = if may_mount && !by_calls { submounts::take(&over)? } else { refuse_submounts(&over)? };

    let users = Arc::new(Users::new(wanted == Visibility::Global));
    let lost = Arc::clone(&users);
    let opening = Opening {
        store,
        state: place.path().to_path_buf(),
        key: place.identify(&over)?,
        visibility,
        by_calls,
        on_lost: Box::new(move || {
            tracing::error!("the mount is not served any more: somebody unmounted it");
            lost.stay_no_longer();
        }),
        config,
    };
    let store_path = PathText::from(opening.config.store.as_path());
    let Running { engine, mut mount, shim, listeners } = backend.start(opening)?;
    if let Err(error) = submounts::put_back(&taken) {
        detach_after_failure(&mut *mount, &*engine);
        return Err(error);
    }
    let mount_device = match device_of(&over) {
        Ok(device) => device,
        Err(error) => {
            detach_after_failure(&mut *mount, &*engine);
            return Err(fail(format!("the fresh mount is not there: {error}")));
        }
    };

    place.clear();
    let listener = UnixListener::bind(place.socket()).map_err(|error| fail(format!("socket: {error}")))?;
    let card = Card { over: over.as_path().into(), pid: std::process::id(), global: visibility == Visibility::Global };
    place.put_card(&card).map_err(|error| fail(format!("{}: {error}", place.path().display())))?;
    let desk = Desk {
        engine,
        users,
        hello: Hello {
            protocol: PROTOCOL,
            version: env!("CARGO_PKG_VERSION").into(),
            over: over.as_path().into(),
            store: store_path,
            mount_device,
            shim,
            listeners: listeners.as_ref().map(|listeners| listeners.socket.as_path().into()),
            visibility,
            user_namespace,
            mount_namespace: namespace_inode("mnt").map_err(|error| fail(error.to_string()))?,
            inherited: inherited(&place),
        },
        since_unix_seconds: clock::now().secs(),
        listeners,
        bypassed: taken.iter().map(|taken| taken.path.as_path().into()).collect(),
    };
    tracing::info!(over = %over.display(), ?visibility, "serving");
    Ok(Agent { desk: Arc::new(desk), mount, taken, place, signals: Arc::new(signals), listener, starter, _lock: lock })
}

/// The device number of the mount, without a request to ourselves: one killed while it waits for its own answer holds
/// the connection open and waits for ever, and the directory's lock with it.
fn device_of(over: &Path) -> io::Result<u64> {
    use rustix::fs::{AtFlags, CWD, StatxFlags};
    let seen = rustix::fs::statx(CWD, over, AtFlags::STATX_DONT_SYNC, StatxFlags::empty())?;
    Ok(rustix::fs::makedev(seen.stx_dev_major, seen.stx_dev_minor))
}

fn refuse_submounts(over: &Path) -> Result<Vec<Taken>> {
    let below = submounts::below(over).map_err(|error| Error::new("the mount table cannot be read").why(error))?;
    match below.first() {
        None => Ok(Vec::new()),
        Some(path) => Err(Error::new(format!("{} is mounted below the served directory", path.display()))
            .why("without user namespaces an ordinary user cannot bind it through")
            .remedy("serve a directory that does not contain it (--over)")),
    }
}

/// Best effort: the error that brought us here is the one to tell.
fn detach_after_failure(mount: &mut dyn Mounted, engine: &dyn Engine) {
    if let Err(error) = mount.detach() {
        tracing::error!(%error, "unmount after a failed start");
    }
    engine.shutdown();
}

fn inherited(place: &Place) -> String {
    match place.undrained() {
        None => String::new(),
        Some(verdict) => format!(
            "an earlier agent had to leave {} file(s) and {} operation(s) undrained; they are drained now",
            verdict.not_durable.total, verdict.undelivered.total
        ),
    }
}

impl Agent {
    fn live(mut self) -> u8 {
        let users = Arc::clone(&self.desk.users);
        if let Err(error) = self.spawn_threads() {
            // Without them nobody can reach us: leave in order.
            tracing::error!(%error, "threads");
            users.stop_admitting();
        }
        loop {
            users.await_leaving();
            if !self.drain_all() || !users.close() {
                continue;
            }
            match self.detach() {
                Ok(()) => break,
                Err(error) => {
                    let over = self.desk.hello.over.to_path_buf();
                    let busy = holders::of_directory(&over);
                    tracing::warn!(%error, ?busy, "the mount is in use");
                    users.reopen(busy.clone());
                    holders::await_one_gone(&busy, Duration::from_secs(1));
                }
            }
        }
        self.end();
        0
    }

    fn spawn_threads(&mut self) -> io::Result<()> {
        let named = |name: &str| std::thread::Builder::new().name(name.into());
        let listener = self.listener.try_clone()?;
        let desk = Arc::clone(&self.desk);
        named("socket").spawn(move || socket::serve(&listener, &desk))?;

        let users = Arc::clone(&self.desk.users);
        let mut starter = std::mem::replace(&mut self.starter, BufReader::new(io::stdin()));
        named("starter").spawn(move || {
            // Nothing more is sent: this returns when the pipe closes.
            let _ = starter.read_to_end(&mut Vec::new());
            users.nobody_came();
        })?;

        let desk = Arc::clone(&self.desk);
        let signals = Arc::clone(&self.signals);
        named("signals").spawn(move || {
            while signals.wait().is_ok() {
                tracing::warn!("told to stop: nobody new is admitted, everything is due");
                desk.engine.begin_final_drain(&Scope::everything());
                desk.users.stop_admitting();
            }
        })?;
        Ok(())
    }

    /// True when everything is settled and nobody is left who could write more; false to look again.
    fn drain_all(&self) -> bool {
        const LOOK_EVERY: Duration = Duration::from_millis(500);
        let everything = Scope::everything();
        let Desk { engine, users, hello, .. } = &*self.desk;
        if let Some(listeners) = &self.desk.listeners {
            if !listeners.nobody_lives() {
                std::thread::sleep(LOOK_EVERY / 5);
                return false;
            }
        } else if hello.visibility == Visibility::Private {
            let residents: Vec<Holder> = holders::of_our_namespace();
            if !residents.is_empty() {
                holders::await_one_gone(&residents, LOOK_EVERY);
                return false;
            }
        }
        let mut begun = false;
        while users.phase() == Phase::Leaving {
            // What the last run's drain was refused for good would only be refused once more; what came after it is new.
            if !begun && !engine.progress(&everything).settled {
                engine.begin_final_drain(&everything);
                begun = true;
            }
            if engine.await_settled(&everything, LOOK_EVERY).settled {
                return true;
            }
        }
        false
    }

    fn detach(&mut self) -> Result<()> {
        let copies = submounts::take_away(&self.taken)?;
        if self.desk.hello.visibility == Visibility::Private {
            submounts::take_away_left(&self.desk.hello.over.to_path_buf());
        }
        match self.mount.detach() {
            Ok(()) => Ok(()),
            Err(error) => {
                submounts::put_back(&copies)?;
                self.taken = copies;
                Err(Error::new("the unmount was refused").why(error))
            }
        }
    }

    fn end(self) {
        let verdict = self.desk.engine.verdict(&Scope::everything());
        let clean = verdict.is_durable();
        if !clean {
            tracing::error!(?verdict, "not everything could be made durable; state and tiers stay for the next start");
        }
        self.desk.engine.shutdown();
        if let Err(error) = self.place.put_undrained((!clean).then_some(&verdict)) {
            tracing::error!(%error, "the note for the next start");
        }
        self.place.clear();
        self.desk.users.detached();
        tracing::info!("gone");
    }
}
