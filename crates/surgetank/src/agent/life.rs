//! The agent's process, from its first instruction to its last.
//!
//! Start-up (single-threaded until the engine starts): own session → start-up message on stdin → lock, private
//! namespace, a handle on the store, other mounts below copied ([`super::ground`]) → the supervisor forks → engine and
//! mount → socket → "ready" on stdout. A failure is reported on stdout instead, so that the user sees the real reason.
//! End: last user gone → final drain → no process left in the namespace → closed → unmount → catalog synced → exit.
//!
//! The dangers that it avoids: mounting before the handle is open (the agent would serve the store through itself);
//! leaving while a background child of a run can still write.

use std::io::{self, BufReader, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::Mode;
use serde::{Deserialize, Serialize};
use surgetank_core::handoff::{Handoff, Left, LeftRun, Record};
use surgetank_core::namespace::Keeper;
use surgetank_core::report::{Holder, PathText, Phase, RunStatus, Scope, Visibility};
use surgetank_policy::config::{Config, Deadline};
use surgetank_types::clock;
use surgetank_types::error::{Error, Result};

use super::engine::{Afterlife, Backend, Engine, Mounted, Opening, Running};
use super::final_drain::FinalDrain;
use super::ground::{Ground, namespace_inode};
use super::group::GroupSocket;
use super::holders;
use super::keep::Channel;
use super::metrics;
use super::place::{Card, Place};
use super::scrape::Port;
use super::signals::Signals;
use super::socket::{self, Desk};
use super::submounts::{self, Taken};
use super::supervisor::{self, Inheritance};
use super::users::Users;
use super::wire::{self, Hello, PROTOCOL, Refusal};
use crate::pool::process;

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
    // This fails only for a group leader, which is separated from the starter's session already.
    let _ = rustix::process::setsid();
    // Modes come with every request; the caller's own umask has masked them already.
    rustix::process::umask(Mode::empty());
    start_log();
    match Ground::prepare() {
        Err(error) => {
            report(Err(&error));
            1
        }
        // Another agent cannot take up programs' calls.
        Ok(ground) if ground.by_calls => serve(backend, ground, None),
        Ok(mut ground) => {
            let pool = ground.pool.take().map(|start| move || process::main(start));
            supervisor::supervise(ground, pool, |ground, inheritance| serve(backend, ground, Some(inheritance)))
        }
    }
}

/// An agent's life, from its first own instruction.
fn serve(backend: &dyn Backend, ground: Ground, inheritance: Option<Inheritance>) -> u8 {
    let life = inheritance.as_ref().map_or(0, |inheritance| inheritance.life);
    let channel = inheritance.as_ref().map(|inheritance| Arc::clone(&inheritance.channel));
    if channel.is_some() {
        holders::has_supervisor();
    }
    surgetank_types::crash::begin_life(life);
    let begun = begin(backend, ground, inheritance);
    if life == 0 {
        report(begun.as_ref().map(drop));
    } else if let Err(error) = &begun {
        tracing::error!("cannot take over: {error}");
    }
    match begun {
        Ok(agent) => {
            if let Some(channel) = channel.filter(|_| agent.survives) {
                channel.serving();
            }
            agent.live()
        }
        Err(_) => 1,
    }
}

fn report(begun: Result<(), &Error>) {
    let outcome = match begun {
        Ok(_) => Outcome::Ready,
        Err(error) => {
            tracing::error!("cannot start: {error}");
            Outcome::Failed(Refusal::from(copy_of(error)))
        }
    };
    // The starter may have died already; then no run joins, and the agent leaves again.
    let _ = wire::write(&mut io::stdout(), &outcome).and_then(|()| io::Write::flush(&mut io::stdout()));
}

fn copy_of(error: &Error) -> Error {
    Error { what: error.what.clone(), why: error.why.clone(), remedy: error.remedy.clone(), data: error.data.clone() }
}

/// A long-lived process must not keep a foreign pipe open.
fn close_inherited() {
    // SAFETY: called first thing in the process; no part of it uses a descriptor from 3 on.
    unsafe { libc::syscall(libc::SYS_close_range, 3_u32, u32::MAX, 0_u32) };
}

/// The log filter from `SURGETANK_LOG`, and the reason if that value is ignored.
pub fn log_filter() -> (tracing_subscriber::EnvFilter, Option<String>) {
    const NAME: &str = "SURGETANK_LOG";
    let usual = || tracing_subscriber::EnvFilter::new("info");
    let Some(filter_text) = std::env::var_os(NAME).filter(|filter_text| !filter_text.is_empty()) else {
        return (usual(), None);
    };
    let refused =
        |why: &str| (usual(), Some(format!("{NAME}={}: {why}; `info` is logged", filter_text.to_string_lossy())));
    match filter_text.to_str().map(tracing_subscriber::EnvFilter::try_new) {
        Some(Ok(filter)) => (filter, None),
        Some(Err(why)) => refused(&why.to_string()),
        None => refused("it is not UTF-8"),
    }
}

fn start_log() {
    let (filter, refused) = log_filter();
    // (If the log cannot be written, an error about it cannot either; trying would end the agent.)
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).log_internal_errors(false);
    // This fails only when a subscriber is set already.
    let _ = log.with_ansi(false).try_init();
    if let Some(why) = refused {
        tracing::warn!("{why}");
    }
    std::panic::set_hook(Box::new(|panic| tracing::error!("{panic}")));
}

struct Agent {
    desk: Arc<Desk>,
    mount: Box<dyn Mounted>,
    taken: Vec<Taken>,
    place: Arc<Place>,
    final_drain: Arc<FinalDrain>,
    deadline: Option<Deadline>,
    signals: Arc<Signals>,
    listener: UnixListener,
    group_socket: Option<GroupSocket>,
    port: Option<Port>,
    life: u32,
    /// Closes when the starter has joined or died. `None`: a later agent has no starter.
    starter: Option<BufReader<io::Stdin>>,
    channel: Option<Arc<Channel>>,
    /// Another agent can continue if this one dies.
    survives: bool,
    /// Holds the lock until the process ends.
    _lock: std::fs::File,
}

/// How long a new agent waits for the runs of the one before.
const REJOIN_PAUSE: Duration = Duration::from_secs(10);
/// The names under which the supervisor keeps the socket and the fact about the mounts below the directory.
const LISTENER: &str = "listener";
const TAKEN: &str = "taken";

fn fail(why: impl std::fmt::Display) -> Error {
    Error::new("the agent cannot start").why(why)
}

fn begin(backend: &dyn Backend, ground: Ground, inheritance: Option<Inheritance>) -> Result<Agent> {
    let Ground {
        config,
        wanted,
        visibility,
        by_calls,
        place,
        user_namespace,
        store,
        bare,
        key,
        taken,
        port,
        starter,
        lock,
        pool: _,
    } = ground;
    place.await_catalog();
    let signals = Signals::block(&[libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT]).map_err(fail)?;

    let over = config.over.clone();
    let deadline = config.deadline.clone();
    let group_socket = config.group_socket.clone();
    let users = Arc::new(Users::new(wanted == Visibility::Global));
    let lost = Arc::clone(&users);
    let store_path = PathText::from(config.store.as_path());
    let pool_name = config.pool.as_ref().map(|pool| pool.name.clone());
    let (past, survival) = Past::of(inheritance)?;
    let Past { life, handoff, channel, listener, left } = past;
    let opening = Opening {
        store,
        bare,
        state: place.path().to_path_buf(),
        key,
        visibility,
        by_calls,
        survival,
        on_lost: Box::new(move || {
            tracing::error!("the mount is not served any more: another process unmounted it");
            lost.stay_no_longer();
        }),
        config,
    };
    if life > 0 && !is_mounted(&over) {
        return Err(finish_unmounted(backend, opening, &place, channel.as_deref()));
    }
    let Running { engine, mut mount, shim, listeners, survives } = backend.start(opening)?;
    let (taken, mount_device) =
        mounts_of(&over, taken, left.as_ref()).inspect_err(|_| detach_after_failure(&mut *mount, &*engine))?;
    let bypassed: Vec<PathText> = taken.iter().map(|taken| taken.path.as_path().into()).collect();
    note_mounts(handoff.as_deref(), &bypassed);
    let listener = listen(&place, listener, channel.as_deref())?;
    let group_socket = bind_group_socket(group_socket.as_deref(), &over, life)
        .inspect_err(|_| detach_after_failure(&mut *mount, &*engine))?;
    put_card(&place, &over, visibility)?;
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
            mount_namespace: namespace_inode("mnt").map_err(fail)?,
            inherited: if life == 0 { inherited(&place) } else { String::new() },
            pool: pool_name,
        },
        since_unix_seconds: clock::now().secs(),
        listeners,
        bypassed,
        handoff,
    };
    expect_runs(&desk, left);
    tracing::info!(over = %over.display(), ?visibility, life, "serving");
    let (desk, place) = (Arc::new(desk), Arc::new(place));
    Ok(Agent {
        final_drain: FinalDrain::new(Arc::clone(&desk), Arc::clone(&place)),
        deadline,
        desk,
        mount,
        taken,
        place,
        signals: Arc::new(signals),
        listener,
        group_socket,
        port,
        life,
        starter: (life == 0).then_some(starter),
        channel,
        survives,
        _lock: lock,
    })
}

/// What an agent knows of the agents before it.
#[derive(Default)]
struct Past {
    life: u32,
    handoff: Option<Arc<Handoff>>,
    channel: Option<Arc<Channel>>,
    /// The socket of the agent before.
    listener: Option<OwnedFd>,
    /// `None`: this agent is the first one.
    left: Option<Left>,
}

impl Past {
    /// With what the backend needs of it.
    fn of(inheritance: Option<Inheritance>) -> Result<(Self, Option<Afterlife>)> {
        let Some(Inheritance { handoff, channel, mut kept, life }) = inheritance else {
            return Ok((Self::default(), None));
        };
        if life > 0 && !handoff.is_whole() {
            return Err(fail("the handoff of the previous agent is incomplete: this agent cannot continue from it"));
        }
        let left = (life > 0).then(|| handoff.left());
        let listener = kept.remove(LISTENER);
        let past = Self { life, handoff: Some(handoff.clone()), channel: Some(channel.clone()), listener, left };
        Ok((past, Some(Afterlife { handoff, channel, kept, life })))
    }
}

/// The previous agent was killed after it had removed the mount: no program is served any more.
fn finish_unmounted(backend: &dyn Backend, opening: Opening, place: &Place, channel: Option<&Channel>) -> Error {
    match backend.offline(opening) {
        Ok(engine) => {
            leave(&*engine, place);
            if let Some(channel) = channel {
                channel.ending();
            }
            fail("the mount had ended already; this agent finished the work that was left")
        }
        Err(error) => error,
    }
}

/// The mounts below the directory, put back by this agent or by an earlier one; and the device number of our own mount.
fn mounts_of(over: &Path, mut taken: Vec<Taken>, left: Option<&Left>) -> Result<(Vec<Taken>, u64)> {
    if let Some(left) = left {
        let paths: Vec<PathText> =
            left.facts.get(TAKEN).and_then(|text| serde_json::from_slice(text).ok()).unwrap_or_default();
        taken = paths.into_iter().map(|path| Taken::there(path.to_path_buf())).collect();
    } else {
        submounts::put_back(&taken)?;
    }
    let mount_device = device_of(over).map_err(|error| fail(format!("the fresh mount is not there: {error}")))?;
    Ok((taken, mount_device))
}

/// For the next agent.
fn note_mounts(handoff: Option<&Handoff>, taken: &[PathText]) {
    if let Some(handoff) = handoff
        && let Ok(value) = serde_json::to_vec(taken)
    {
        handoff.put(&Record::Fact { name: TAKEN, value: &value });
    }
}

/// The socket of the place, which the supervisor keeps for the next agent. `earlier`: the socket of the agent before.
fn listen(place: &Place, earlier: Option<OwnedFd>, channel: Option<&Channel>) -> Result<UnixListener> {
    let listener = match earlier {
        Some(listener) => heard_again(listener).map_err(|error| fail(format!("socket: {error}")))?,
        None => {
            place.clear();
            UnixListener::bind(place.socket()).map_err(|error| fail(format!("socket: {error}")))?
        }
    };
    if let Some(channel) = channel
        && let Err(error) = channel.keep(LISTENER, listener.as_fd())
    {
        tracing::warn!(%error, "the socket would not survive this agent");
    }
    Ok(listener)
}

fn bind_group_socket(path: Option<&Path>, over: &Path, life: u32) -> Result<Option<GroupSocket>> {
    match path.map(|path| GroupSocket::bind(path, over)).transpose() {
        // A run that continues after a kill does without the group's socket.
        Err(error) if life > 0 => {
            tracing::warn!(%error, "the group's socket");
            Ok(None)
        }
        bound => bound,
    }
}

/// From now on clients find this agent.
fn put_card(place: &Place, over: &Path, visibility: Visibility) -> Result<()> {
    let card = Card { over: over.into(), pid: std::process::id(), global: visibility == Visibility::Global };
    place.put_card(&card).map_err(|error| fail(format!("{}: {error}", place.path().display())))
}

/// The runs of the agent before join again by themselves.
fn expect_runs(desk: &Desk, left: Option<Left>) {
    for (run, LeftRun { pid, command }) in left.into_iter().flat_map(|left| left.runs) {
        desk.engine.restore_run(run, pid);
        desk.engine.record_run(run, pid, &command, true);
        desk.users.expect(RunStatus { run, pid, command, since_unix_seconds: desk.since_unix_seconds });
    }
}

/// Listens again, so that a process that connects from now on sees this agent's pid.
fn heard_again(listener: OwnedFd) -> io::Result<UnixListener> {
    const WAITING_MAX: i32 = 128;
    rustix::net::listen(&listener, WAITING_MAX)?;
    Ok(UnixListener::from(listener))
}

/// The device number of the mount, without a request to ourselves. An agent that is killed while it waits for its own
/// answer would hold the connection open indefinitely, and the directory's lock with it.
fn device_of(over: &Path) -> io::Result<u64> {
    use rustix::fs::{AtFlags, CWD, StatxFlags};
    let seen = rustix::fs::statx(CWD, over, AtFlags::STATX_DONT_SYNC, StatxFlags::empty())?;
    Ok(rustix::fs::makedev(seen.stx_dev_major, seen.stx_dev_minor))
}

/// Called after the unmount.
fn leave(engine: &dyn Engine, place: &Place) {
    let verdict = engine.verdict(&Scope::everything());
    let clean = verdict.is_durable();
    if !clean {
        tracing::error!(?verdict, "some files are not durable; state and tiers stay for the next start");
    }
    engine.shutdown();
    if let Err(error) = place.put_undrained((!clean).then_some(&verdict)) {
        tracing::error!(%error, "the note for the next start");
    }
    place.clear();
}

/// Checks without a request to the server of the mount.
fn is_mounted(over: &Path) -> bool {
    use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags};
    let seen = rustix::fs::statx(CWD, over, AtFlags::STATX_DONT_SYNC, StatxFlags::empty());
    seen.is_ok_and(|seen| seen.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

/// Best effort: the earlier error is the one to report.
fn detach_after_failure(mount: &mut dyn Mounted, engine: &dyn Engine) {
    if let Err(error) = mount.detach() {
        tracing::error!(%error, "unmount after a failed start");
    }
    engine.shutdown();
}

fn inherited(place: &Place) -> String {
    match place.undrained() {
        None => String::new(),
        Some(verdict) if verdict.is_drained() => String::new(),
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
            // Without these threads no client can reach the agent: leave in order.
            tracing::error!(%error, "threads");
            users.stop_admitting();
        }
        loop {
            users.await_leaving();
            if !self.drain_all() {
                continue;
            }
            let close = |closes: bool| {
                if !closes {
                    users.reopen(Vec::new());
                }
                closes && users.close()
            };
            match self.desk.engine.leave_pool(&close) {
                Some(false) => continue,
                // A run that comes now needs an agent that joins the pool again, also if the mount is in use.
                Some(true) => users.stop_admitting(),
                None if users.close() => {}
                None => continue,
            }
            match self.detach() {
                Ok(()) => break,
                Err(error) => {
                    let over = self.desk.hello.over.to_path_buf();
                    let busy = holders::of_directory(&over);
                    tracing::warn!(%error, ?busy, "the mount is in use");
                    users.reopen(busy.clone());
                    holders::await_one_exit(&busy, Duration::from_secs(1));
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
        named("socket").spawn(move || socket::serve(&listener, &desk, None))?;
        if let Some(socket) = &self.group_socket {
            let (listener, desk, gid) = (socket.listener.try_clone()?, Arc::clone(&self.desk), socket.gid);
            named("group socket").spawn(move || socket::serve(&listener, &desk, Some(gid)))?;
        }

        if let Some(port) = self.port.take() {
            let (desk, life) = (Arc::clone(&self.desk), self.life);
            named("metrics").spawn(move || port.serve(&|| metrics::text(&desk, life)))?;
        }

        let users = Arc::clone(&self.desk.users);
        let engine = Arc::clone(&self.desk.engine);
        match self.starter.take() {
            Some(mut starter) => named("starter").spawn(move || {
                // The starter sends nothing more: this returns when the pipe closes.
                let _ = starter.read_to_end(&mut Vec::new());
                users.starter_left();
            })?,
            // Runs join again by themselves; a run that does not has ended meanwhile.
            None => named("starter").spawn(move || {
                std::thread::sleep(REJOIN_PAUSE);
                users.forget_expected().into_iter().for_each(|run| drop(engine.release_run(run)));
            })?,
        };

        let final_drain = Arc::clone(&self.final_drain);
        let signals = Arc::clone(&self.signals);
        named("signals").spawn(move || {
            while signals.wait().is_ok() {
                final_drain.begin("asked to stop");
            }
        })?;
        if let Some(deadline) = self.deadline.take() {
            let final_drain = Arc::clone(&self.final_drain);
            named("deadline").spawn(move || final_drain.await_deadline(&deadline))?;
        }
        Ok(())
    }

    /// True when everything is settled and no process is left that could write more; false to check again.
    fn drain_all(&self) -> bool {
        const LOOK_EVERY: Duration = Duration::from_millis(500);
        let everything = Scope::everything();
        let Desk { engine, users, hello, .. } = &*self.desk;
        if let Some(listeners) = &self.desk.listeners {
            if !listeners.is_empty() {
                std::thread::sleep(LOOK_EVERY / 5);
                return false;
            }
        } else if hello.visibility == Visibility::Private {
            let residents: Vec<Holder> = holders::of_our_namespace();
            if !residents.is_empty() {
                holders::await_one_exit(&residents, LOOK_EVERY);
                return false;
            }
        }
        let mut begun = false;
        while users.phase() == Phase::Leaving {
            // The store would only refuse again what it refused the last run's drain for good; later files are new.
            if !begun && !engine.progress(&everything).settled {
                engine.begin_final_drain(&everything);
                begun = true;
            }
            if engine.await_settled(&everything, LOOK_EVERY).settled {
                return true;
            }
        }
        // Another run has joined: its writes have their own quiet period.
        if begun {
            engine.end_final_drain(&everything);
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
        self.final_drain.end();
        leave(&*self.desk.engine, &self.place);
        if let Some(channel) = &self.channel {
            channel.ending();
        }
        self.desk.users.detached();
        tracing::info!("the agent has ended");
    }
}
