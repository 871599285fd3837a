//! Finds the agent over a directory or starts one, and removes what a killed agent left over the directory.
//!
//! The danger that it avoids: two processes start an agent over one directory at the same time (`start.lock`).

use std::fs::{self, File};
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use surgetank_core::report::Visibility;
use surgetank_policy::config::Config;
use surgetank_types::error::{Error, Result};

use super::super::life::{Outcome, Startup};
use super::super::place::{Place, StateRoot};
use super::super::wire::{self, ANSWER_BYTES_MAX};
use super::{Connection, absolute, survey};
use crate::mount;
use crate::pool::rendezvous::beside::beside;
use crate::pool::rendezvous::meeting::Meeting;

const SLOW_START: Duration = Duration::from_secs(10);

/// A start takes at most this much longer for a look for pools.
const LOOK_BESIDE: Duration = Duration::from_secs(1);

/// An agent that is ready for use, and what this process holds until it has joined.
pub struct Found {
    pub connection: Connection,
    pub started: bool,
    /// Keeps a fresh agent from leaving before this process has joined; dropped afterwards.
    _start: Option<Start>,
    /// Held until this process has joined.
    _turn: Option<File>,
}

/// A fresh agent's process. Dropping it closes the pipe that keeps the agent waiting for this process.
struct Start {
    _child: Child,
}

impl Found {
    /// This process has joined: the agent may leave when it does, and other starters may proceed.
    pub fn settled(self) -> Connection {
        self.connection
    }
}

/// The agent over `config.over`; a new one when there is none.
pub fn find_or_start(config: &Config, wanted: Visibility) -> Result<Found> {
    let over = &config.over;
    let root = StateRoot::open(&config.state, over)?;
    let meta = match fs::metadata(over) {
        Err(error) if is_dead(&error) => {
            clear_dead_mount(&config.state, over)?;
            fs::metadata(over)
        }
        other => other,
    }
    .map_err(|error| Error::new(format!("the directory {} cannot be used", over.display())).why(error))?;
    if !meta.is_dir() {
        return Err(Error::new(format!("{} is not a directory", over.display())));
    }
    if let Some(connection) = around(&config.state, over, meta.dev())? {
        return Ok(Found { connection, started: false, _start: None, _turn: None });
    }
    let (place, turn) = loop {
        let place = root.place(&meta, over)?;
        let turn = place.start_turn()?;
        if root.has(&place) {
            break (place, turn);
        }
    };
    if let Some(connection) = Connection::open(&place)? {
        return Ok(Found { connection, started: false, _start: None, _turn: Some(turn) });
    }
    // An agent may be leaving, or may have been killed a moment ago.
    place.await_no_agent()?;
    for left in root.left_behind(over, Some(&place))? {
        eprintln!("surgetank: {}", left.message(over));
    }
    refuse_near_end(config)?;
    if let Some(pool) = config.pool.as_ref().filter(|pool| !pool.announcement.is_empty()) {
        eprintln!("surgetank: {}", pool.announcement);
    }
    if let Some(line) = pools_beside(config) {
        eprintln!("surgetank: {line}");
    }
    let start = spawn(config, &place, wanted)?;
    match Connection::open(&place)? {
        Some(connection) => Ok(Found { connection, started: true, _start: Some(start), _turn: Some(turn) }),
        None => Err(died(&place)),
    }
}

/// The reason to refuse this store: the place owes what an earlier agent left to another store. For a living agent see
/// [`Connection::check_store`].
pub fn refused_store(config: &Config) -> Result<Option<Error>> {
    let Some(root) = StateRoot::open_existing(&config.state)? else { return Ok(None) };
    let Ok(meta) = fs::metadata(&config.over) else { return Ok(None) };
    let Some(place) = root.existing_place(&meta, &config.over)?.filter(|place| place.is_of_other_store(config)) else {
        return Ok(None);
    };
    // The check holds `start.lock`: an agent that starts now must not find its own lock taken.
    let _turn = place.start_turn()?;
    if Connection::open(&place)?.is_some() {
        return Ok(None);
    }
    place.await_no_agent()?;
    place.refused_store(config)
}

/// Refuses to start an agent that the deadline would end at once.
fn refuse_near_end(config: &Config) -> Result<()> {
    match &config.deadline {
        Some(deadline) if deadline.is_near() => {
            Err(Error::new(format!("no agent is started over {}", config.over.display()))
                .why(format!("the job ends at {}, says {}", deadline.shown(), deadline.from))
                .remedy("give a later end with --deadline, or none: --deadline none")
                .data("nothing was begun"))
        }
        _ => Ok(()),
    }
}

/// The line for a start over a store that pools serve too.
fn pools_beside(config: &Config) -> Option<String> {
    let own = config.pool.as_ref().map(|pool| pool.name.as_str());
    // (A directory that cannot be listed has no pools that this process can join. A slow store or name service must not delay
    // the start: the thread is left behind.)
    let (found, finds) = std::sync::mpsc::channel();
    let (store, url) = (config.store.clone(), config.store_url().map(str::to_owned));
    let own = own.map(str::to_owned);
    let look = move || {
        let meeting = Meeting::to_look_at(&store, url.as_deref()).ok();
        found.send(meeting.and_then(|meeting| beside(&meeting, own.as_deref()).ok()))
    };
    std::thread::Builder::new().name("beside".to_owned()).spawn(look).ok()?;
    let pools = finds.recv_timeout(LOOK_BESIDE).ok()??;
    let names: Vec<&str> = pools.iter().map(|pool| pool.name.as_str()).collect();
    let (which, join) = match names.as_slice() {
        [] => return None,
        [name] => (format!("the pool {name}"), format!("To join it: --pool {name}.")),
        several => (format!("the pools {}", several.join(", ")), "To join one of them: --pool NAME.".to_owned()),
    };
    let silent: Vec<&str> = pools.iter().filter(|pool| !pool.answers).map(|pool| pool.file.as_str()).collect();
    let (serves, if_ended) = match (silent.is_empty(), names.len()) {
        (true, 1) => ("serves", String::new()),
        (true, _) => ("serve", String::new()),
        (false, _) => ("may serve", format!(" If a pool has ended, remove its file there: {}.", silent.join(", "))),
    };
    Some(format!(
        "{which} {serves} {} too, and this agent is not a member. Files that both change become conflict files. {join}{if_ended}",
        config.store.display()
    ))
}

/// Is `over` inside a mount that an agent serves?
fn around(state: &Path, over: &Path, device: u64) -> Result<Option<Connection>> {
    // Device numbers of mounts without a block device have major 0; a FUSE mount is one of them.
    if libc::major(device) != 0 {
        return Ok(None);
    }
    Ok(survey(state)?
        .answering
        .into_iter()
        .find(|agent| agent.hello.mount_device == device && over.starts_with(agent.hello.over.as_path())))
}

fn is_dead(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENOTCONN)
}

/// The mount over `path` whose server has ended.
pub fn dead_mount(path: &Path) -> Result<Option<PathBuf>> {
    let path = absolute(path)?;
    let dead = path.ancestors().filter(|at| fs::symlink_metadata(at).is_err_and(|error| is_dead(&error)));
    Ok(dead.last().map(Path::to_path_buf))
}

/// Removes the mount that a killed agent of this user left over `over`. False: the mount belongs to another server.
pub fn clear_dead_mount(state: &Path, over: &Path) -> Result<bool> {
    let Some(root) = StateRoot::open_existing(state)? else {
        return Ok(false);
    };
    for place in root.places()? {
        let Some(card) = place.card().filter(|card| card.global && card.over.as_path() == over) else {
            continue;
        };
        if place.try_agent_lock()?.is_some() {
            eprintln!(
                "surgetank: the agent of {} (pid {}) was killed; its dead mount is removed",
                over.display(),
                card.pid
            );
            // Lazy unmount is safe: a dead mount has no writers, and a process inside sees ENOTCONN already.
            mount::detach(over, true)?;
            return Ok(true);
        }
    }
    Ok(false)
}

fn spawn(config: &Config, place: &Place, wanted: Visibility) -> Result<Start> {
    let fail = |why: String| Error::new(format!("no agent could be started for {}", config.over.display())).why(why);
    let log = place.log().map_err(|error| fail(format!("{}: {error}", place.log_path().display())))?;
    let startup = Startup { config: config.clone(), place: place.path().into(), wanted };
    let mut message = serde_json::to_vec(&startup).map_err(|error| fail(error.to_string()))?;
    message.push(b'\n');
    let mut child = Command::new("/proc/self/exe")
        .arg0("surgetank")
        .arg("agent")
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .map_err(|error| fail(error.to_string()))?;
    if let Some(stdin) = &mut child.stdin {
        // If the agent died already, its output says why.
        let _ = stdin.write_all(&message);
    }
    let outcome = child.stdout.take().map(|stdout| {
        report_slow_start(&stdout, child.id(), config, place);
        wire::read(&mut BufReader::new(stdout), ANSWER_BYTES_MAX)
    });
    match outcome {
        Some(Ok(Some(Outcome::Ready))) => Ok(Start { _child: child }),
        Some(Ok(Some(Outcome::Failed(refusal)))) => {
            let _ = child.wait();
            Err(refusal.into())
        }
        _ => {
            let _ = child.wait();
            Err(died(place))
        }
    }
}

/// An agent may need minutes to take up what another agent left. (Any signal ends this process meanwhile.)
fn report_slow_start(stdout: &std::process::ChildStdout, pid: u32, config: &Config, place: &Place) {
    let mut fds = [PollFd::new(stdout, PollFlags::IN)];
    let time = rustix::time::Timespec::try_from(SLOW_START).ok();
    if matches!(rustix::event::poll(&mut fds, time.as_ref()), Ok(0)) {
        eprintln!(
            "surgetank: the agent of {} (pid {pid}) has been starting for {} s; its log is {}",
            config.over.display(),
            SLOW_START.as_secs(),
            place.log_path().display()
        );
    }
}

/// The agent ended without a message: the end of its log is the best explanation available.
fn died(place: &Place) -> Error {
    const SHOWN_BYTES: i64 = 600;
    let mut tail = Vec::new();
    if let Ok(mut log) = File::open(place.log_path()) {
        // A log shorter than that is read from its start.
        let _ = log.seek(SeekFrom::End(-SHOWN_BYTES));
        let _ = log.read_to_end(&mut tail);
    }
    let tail = String::from_utf8_lossy(&tail);
    let last: Vec<&str> = tail.lines().rev().take(3).collect();
    let why = last.into_iter().rev().collect::<Vec<_>>().join("\n        ");
    Error::new("the agent died while it started")
        .why(why)
        .remedy(format!("read {}; set SURGETANK_LOG=debug for more detail", place.log_path().display()))
        .data("nothing was begun")
}
