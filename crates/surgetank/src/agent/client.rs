//! The other side of the socket: finding the agent of a directory, starting one, asking it.
//!
//! A directory's agent is found by the numbers of the *bare* directory. Inside a mount the directory shows other
//! numbers; then the agents are asked which of them serves a mount with these (a `run` within a `run`, a run in a
//! globally mounted directory).

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use surgetank_core::config::Config;
use surgetank_core::error::{Error, Result};
use surgetank_core::model::RunId;
use surgetank_core::report::{PathText, Scope, Verdict, Visibility};

use super::commands::Commands;
use super::life::{Outcome, Startup};
use super::place::{Place, StateRoot};
use super::wire::{self, ANSWER_BYTES_MAX, Answer, Hello, PROTOCOL, RefusalKind, Request};
use crate::mount;

/// Names the places of the agents around us, innermost last, separated by `:`; set for commands under `run`.
pub const AGENT_VARIABLE: &str = "SURGETANK_AGENT";

/// A conversation with a living agent.
pub struct Connection {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
    pub hello: Hello,
    /// As our own pid namespace numbers it.
    pub pid: u32,
    pub place: PathBuf,
}

/// A conversation that has begun with our greeting. Its answer may come late: from the agent that takes over from one that
/// was killed a moment ago.
pub struct Dialed {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
    pid: u32,
    place: Place,
}

impl Dialed {
    /// `None`: nobody listens there (never did, or was killed, and nobody holds its socket).
    pub fn at(place: Place) -> Result<Option<Self>> {
        let stream = match UnixStream::connect(place.socket()) {
            Ok(stream) => stream,
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
                return Ok(None);
            }
            Err(error) => return Err(silent(&place, &error)),
        };
        let peer = rustix::net::sockopt::socket_peercred(&stream).map_err(|errno| silent(&place, &errno))?;
        let pid = peer.pid.as_raw_nonzero().get().cast_unsigned();
        let mut writer = stream.try_clone().map_err(|error| silent(&place, &error))?;
        match wire::write(&mut writer, &Request::Hello { protocol: PROTOCOL }) {
            Ok(()) => Ok(Some(Self { reader: BufReader::new(stream), writer, pid, place })),
            Err(error) if is_hangup(&error) => Ok(None),
            Err(error) => Err(silent(&place, &error)),
        }
    }

    /// Waits for the answer. `None`: it was on its way out.
    pub fn greeted(self) -> Result<Option<Connection>> {
        let Self { mut reader, writer, pid, place } = self;
        match wire::read(&mut reader, ANSWER_BYTES_MAX) {
            // Whom we called was killed before he heard us; another one did.
            Ok(Some(Answer::Hello(_))) if !is_alive(pid) => Connection::open(&place),
            Ok(Some(Answer::Hello(hello))) => {
                Ok(Some(Connection { reader, writer, hello, pid, place: place.path().to_path_buf() }))
            }
            Ok(Some(Answer::Error(refusal))) => Err(refusal.into()),
            Ok(Some(other)) => Err(silent(&place, &format!("it greets with {other:?}"))),
            Ok(None) => Ok(None),
            Err(error) if is_hangup(&error) => Ok(None),
            Err(error) => Err(silent(&place, &error)),
        }
    }
}

impl AsFd for Dialed {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.writer.as_fd()
    }
}

/// One question at the socket of a group; see `group`.
pub fn ask_guest(socket: &Path, request: &Request) -> Result<Answer> {
    let failed = |why: &dyn std::fmt::Display| {
        Error::new(format!("nobody answers at {}", socket.display()))
            .why(why)
            .remedy("ask its owner whether a run is under way, and look whether you are in the group of that directory")
            .data("nothing was changed")
    };
    let stream = UnixStream::connect(socket).map_err(|why| failed(&why))?;
    let mut writer = stream.try_clone().map_err(|why| failed(&why))?;
    let mut reader = BufReader::new(stream);
    let mut ask = |request: &Request| -> Result<Answer> {
        wire::write(&mut writer, request).map_err(|why| failed(&why))?;
        match wire::read(&mut reader, ANSWER_BYTES_MAX).map_err(|why| failed(&why))? {
            Some(Answer::Error(refusal)) => Err(refusal.into()),
            Some(answer) => Ok(answer),
            None => Err(failed(&"it turned us away")),
        }
    };
    ask(&Request::Hello { protocol: PROTOCOL })?;
    ask(request)
}

fn silent(place: &Place, why: &dyn std::fmt::Display) -> Error {
    Error::new(format!("the agent at {} does not answer", place.path().display()))
        .why(why)
        .remedy(format!("look into {}", place.log_path().display()))
}

fn is_alive(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
    pid.is_some_and(|pid| rustix::process::test_kill_process(pid) != Err(rustix::io::Errno::SRCH))
}

impl Connection {
    /// `None`: nobody listens there (never did, or was killed).
    pub fn open(place: &Place) -> Result<Option<Self>> {
        match Dialed::at(Place::open(place.path())?)? {
            Some(dialed) => dialed.greeted(),
            None => Ok(None),
        }
    }

    /// Calls the agent that may have taken over from this one, which is gone.
    pub fn dial_next(&self) -> Result<Option<Dialed>> {
        Dialed::at(Place::open(&self.place)?)
    }

    /// A second conversation with the same agent, while this one is busy.
    pub fn another(&self) -> Result<Option<Self>> {
        Self::open(&Place::open(&self.place)?)
    }

    /// What can be done about the directory, with what its agent was started with.
    pub fn commands(&self) -> Commands {
        Commands::of_path(&self.place, self.hello.over.as_path())
    }

    /// Refuses a command that means another store than the agent's. One that is given inside the mount, and says none,
    /// means the agent's.
    pub fn check_store(&self, config: &Config) -> Result<()> {
        let place = Place::open(&self.place);
        let same = self.hello.store.as_path() == config.store;
        if same || place.as_ref().is_ok_and(|place| place.serves_store(config)) {
            return Ok(());
        }
        if !config.says_store() && self.is_around(&config.over) {
            return Ok(());
        }
        Err(Error::new(format!("{} is served already, with the store {}", self.hello.over, self.hello.store))
            .why(format!("this command names another store: {}", config.store.display()))
            .remedy(format!(
                "give its store, or wait until its runs have ended and all is in it:\n  {}",
                self.commands().wait()
            ))
            .data("nothing was begun"))
    }

    /// Are we inside what it serves?
    fn is_around(&self, over: &Path) -> bool {
        let named = std::env::var_os(AGENT_VARIABLE);
        let named = named.is_some_and(|around| std::env::split_paths(&around).any(|place| place == self.place));
        named || fs::metadata(over).is_ok_and(|meta| meta.dev() == self.hello.mount_device)
    }

    fn lost(&self, why: impl std::fmt::Display) -> Error {
        Error::new(format!("the agent of {} does not answer any more", self.hello.over))
            .why(why)
            .remedy(format!(
                "look into {}, then let a new agent take up what is there:\n  {}",
                self.place.join("agent.log").display(),
                self.commands().run()
            ))
            .data("what was sealed is in the tiers; nothing half-written is in the store")
    }

    pub fn send(&mut self, request: &Request) -> Result<()> {
        wire::write(&mut self.writer, request).map_err(|error| self.lost(error))
    }

    pub fn receive(&mut self) -> Result<Answer> {
        match wire::read(&mut self.reader, ANSWER_BYTES_MAX) {
            Ok(Some(answer)) => Ok(answer),
            Ok(None) => Err(self.lost("the connection was closed")),
            Err(error) => Err(self.lost(error)),
        }
    }

    /// One question, one answer; a refusal is an error. An agent that was killed over it is replaced, and the next one asked.
    pub fn ask(&mut self, request: &Request) -> Result<Answer> {
        loop {
            match self.send(request).and_then(|()| self.receive()) {
                Ok(Answer::Error(refusal)) => return Err(refusal.into()),
                Ok(answer) => return Ok(answer),
                // Whoever joined has to join again first.
                Err(lost) if matches!(request, Request::Release | Request::Summary { .. }) => return Err(lost),
                Err(lost) if !self.goes_on_with_next() => return Err(lost),
                Err(_replaced) => {}
            }
        }
    }

    /// After the conversation broke off: is there an agent that took over? It is talked to from now on.
    pub fn goes_on_with_next(&mut self) -> bool {
        let next = self.dial_next().ok().flatten().and_then(|dialed| dialed.greeted().ok().flatten());
        match next {
            Some(next) if next.pid != self.pid => {
                *self = next;
                true
            }
            _ => false,
        }
    }

    /// The agent answered something that the question does not allow.
    pub fn confused(&self, answer: &Answer) -> Error {
        self.lost(format!("it answered {answer:?}"))
    }

    pub fn verdict(&mut self, scope: Scope) -> Result<Verdict> {
        match self.ask(&Request::Verdict { scope })? {
            Answer::Verdict { verdict, .. } => Ok(*verdict),
            other => Err(self.confused(&other)),
        }
    }

    /// Is there a whole answer to be read without waiting?
    pub fn has_answer(&self) -> bool {
        self.reader.buffer().contains(&b'\n')
    }

    /// After the last answer: true once the agent has closed the connection. Call when readable.
    pub fn is_closed(&mut self) -> bool {
        match self.reader.fill_buf() {
            Ok(bytes) => bytes.is_empty(),
            Err(error) => error.kind() != io::ErrorKind::WouldBlock && error.kind() != io::ErrorKind::Interrupted,
        }
    }

    /// A path as the agent knows it: relative to the served directory.
    pub fn relative(&self, path: &Path) -> Result<PathText> {
        let over = self.hello.over.to_path_buf();
        match absolute(path)?.strip_prefix(&over) {
            Ok(rest) => Ok(rest.into()),
            Err(_) => Err(Error::new(format!("{} is not below {}", path.display(), over.display()))
                .why("the agent serves that directory only")
                .remedy("`surgetank status` lists the directories that are served")
                .data("nothing was changed")),
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.writer.as_fd()
    }
}

fn is_hangup(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::UnexpectedEof)
}

/// Absolute, with symlinks resolved as far down as the path exists outside the mount.
pub fn absolute(path: &Path) -> Result<PathBuf> {
    let whole = std::path::absolute(path)
        .map_err(|error| Error::new(format!("{} has no absolute form", path.display())).why(error))?;
    let mut clean = PathBuf::new();
    for part in whole.components() {
        match part {
            std::path::Component::ParentDir => {
                clean.pop();
            }
            part => clean.push(part),
        }
    }
    // The last component itself may be a symlink that is meant.
    let Some((parent, name)) = clean.parent().zip(clean.file_name()) else {
        return Ok(clean);
    };
    for existing in parent.ancestors() {
        if let Ok(real) = existing.canonicalize() {
            let below = parent.strip_prefix(existing).unwrap_or(Path::new(""));
            return Ok(if below.as_os_str().is_empty() { real.join(name) } else { real.join(below).join(name) });
        }
    }
    Ok(clean)
}

/// All living agents: those around us, then those of the state root.
pub fn all(state: &Path) -> Result<Vec<Connection>> {
    let mut found: Vec<Connection> = Vec::new();
    let mut places = Vec::new();
    if let Some(around) = std::env::var_os(AGENT_VARIABLE) {
        places.extend(std::env::split_paths(&around).filter_map(|path| Place::open(&path).ok()));
        places.reverse();
    }
    if let Some(root) = StateRoot::open_existing(state)? {
        places.extend(root.places()?);
    }
    for place in places {
        if found.iter().any(|known| known.place == place.path()) {
            continue;
        }
        // One that does not answer must not hide the others.
        if let Ok(Some(connection)) = Connection::open(&place) {
            found.push(connection);
        }
    }
    Ok(found)
}

/// The agent that serves the directory in which `path` lies: the innermost one.
pub fn serving(state: &Path, path: &Path) -> Result<Option<Connection>> {
    let path = absolute(path)?;
    let real = path.canonicalize().unwrap_or_else(|_| path.clone());
    Ok(all(state)?
        .into_iter()
        .filter(|agent| path.starts_with(agent.hello.over.as_path()) || real.starts_with(agent.hello.over.as_path()))
        .max_by_key(|agent| agent.hello.over.0.len()))
}

/// An agent to be used, and what it took to have it.
pub struct Found {
    pub connection: Connection,
    pub started: bool,
    /// Keeps a fresh agent from leaving before we joined; dropped afterwards.
    pub start: Option<Start>,
    /// Held until we joined.
    _turn: Option<File>,
}

/// A fresh agent's process. Dropping it closes the pipe that keeps the agent waiting for us.
pub struct Start {
    child: Child,
}

impl Found {
    /// We have joined: the agent may go when we go, and others may have their turn.
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
        return Ok(Found { connection, started: false, start: None, _turn: None });
    }
    let (place, turn) = loop {
        let place = root.place(&meta, over)?;
        let turn = place.start_turn()?;
        if root.has(&place) {
            break (place, turn);
        }
    };
    if let Some(connection) = Connection::open(&place)? {
        return Ok(Found { connection, started: false, start: None, _turn: Some(turn) });
    }
    // One that is on its way out, or one that was killed a moment ago.
    place.await_no_agent()?;
    for left in root.left_behind(over, Some(&place))? {
        eprintln!("surgetank: {}", left.tell(over));
    }
    refuse_near_end(config)?;
    let start = spawn(config, &place, wanted)?;
    match Connection::open(&place)? {
        Some(connection) => Ok(Found { connection, started: true, start: Some(start), _turn: Some(turn) }),
        None => Err(died(&place)),
    }
}

/// Why nothing is begun for this store, where what an earlier agent left is owed to another one. Of a living agent see
/// [`Connection::check_store`].
pub fn refused_store(config: &Config) -> Result<Option<Error>> {
    let Some(root) = StateRoot::open_existing(&config.state)? else { return Ok(None) };
    let Ok(meta) = fs::metadata(&config.over) else { return Ok(None) };
    let Some(place) = root.existing_place(&meta, &config.over)?.filter(|place| !place.serves_store(config)) else {
        return Ok(None);
    };
    match place.try_agent_lock()? {
        Some(_dead) => place.refused_store(config),
        None => Ok(None),
    }
}

/// An agent that would leave as soon as it came serves nobody.
fn refuse_near_end(config: &Config) -> Result<()> {
    match &config.deadline {
        Some(deadline) if deadline.is_near() => {
            Err(Error::new(format!("nothing is begun over {}", config.over.display()))
                .why(format!("the job ends at {}, says {}", deadline.shown(), deadline.from))
                .remedy("give a later end with --deadline, or none: --deadline none")
                .data("nothing was begun"))
        }
        _ => Ok(()),
    }
}

/// Is `over` inside a mount that an agent serves?
fn around(state: &Path, over: &Path, device: u64) -> Result<Option<Connection>> {
    // Device numbers of mounts without a block device have major 0; a FUSE mount is one of them.
    if libc::major(device) != 0 {
        return Ok(None);
    }
    Ok(all(state)?
        .into_iter()
        .find(|agent| agent.hello.mount_device == device && over.starts_with(agent.hello.over.as_path())))
}

fn is_dead(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENOTCONN)
}

/// The mount over `path` whose server is gone.
pub fn dead_mount(path: &Path) -> Result<Option<PathBuf>> {
    let path = absolute(path)?;
    let dead = path.ancestors().filter(|at| fs::symlink_metadata(at).is_err_and(|error| is_dead(&error)));
    Ok(dead.last().map(Path::to_path_buf))
}

/// Takes away what an agent of ours that was killed left over `over`; false when it is none of ours.
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
                "surgetank: the agent of {} (pid {}) was killed; its dead mount is taken away",
                over.display(),
                card.pid
            );
            // Lazy, because a dead mount has no writers any more: whoever is inside sees ENOTCONN already.
            mount::detach(over, true)?;
            return Ok(true);
        }
    }
    Ok(false)
}

fn spawn(config: &Config, place: &Place, wanted: Visibility) -> Result<Start> {
    let fail = |why: String| {
        Error::new(format!("no agent could be started for {}", config.over.display()))
            .why(why)
            .remedy(format!("look into {}, and whether its file system is full", place.log_path().display()))
            .data("nothing was begun")
    };
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
        // If it died already, reading says why.
        let _ = stdin.write_all(&message);
    }
    let outcome = child.stdout.take().map(|stdout| wire::read(&mut BufReader::new(stdout), ANSWER_BYTES_MAX));
    match outcome {
        Some(Ok(Some(Outcome::Ready))) => Ok(Start { child }),
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

impl Start {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

/// The agent ended without a word: the end of its log is the best that we can tell.
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
        .remedy(format!("look into {}; SURGETANK_LOG=debug tells more", place.log_path().display()))
        .data("nothing was begun")
}

/// What became of joining.
pub enum Joined {
    As(RunId),
    /// It is on its way out; look for another.
    Leaving,
}

impl Connection {
    pub fn join(&mut self, command: &str) -> Result<Joined> {
        self.join_as(command, None)
    }

    /// `again`: what an earlier agent called this run.
    pub fn join_as(&mut self, command: &str, again: Option<RunId>) -> Result<Joined> {
        let request = Request::Join { pid: std::process::id(), command: command.to_owned(), again };
        if self.send(&request).is_err() {
            return Ok(Joined::Leaving);
        }
        match wire::read(&mut self.reader, ANSWER_BYTES_MAX) {
            Ok(Some(Answer::Joined { run })) => Ok(Joined::As(run)),
            Ok(Some(Answer::Error(refusal))) if refusal.kind == RefusalKind::Leaving => Ok(Joined::Leaving),
            Ok(Some(Answer::Error(refusal))) => Err(refusal.into()),
            Ok(Some(other)) => Err(self.confused(&other)),
            Ok(None) => Ok(Joined::Leaving),
            Err(error) if is_hangup(&error) => Ok(Joined::Leaving),
            Err(error) => Err(self.lost(error)),
        }
    }

    /// Blocks until the agent is gone.
    pub fn await_gone(&mut self, at_most: Option<Duration>) -> bool {
        // A socket that refuses a timeout still ends when the agent does.
        let _ = self.writer.set_read_timeout(at_most);
        self.is_closed()
    }
}
