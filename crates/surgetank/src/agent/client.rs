//! The client's side of the socket: it finds the agent of a directory, starts one and sends requests to it.
//!
//! An agent is found by the numbers of the *bare* directory. Inside a mount the directory shows other numbers. Then the
//! client asks each agent whether it serves a mount with these numbers. This happens for a `run` within a `run`, and
//! for a run in a globally mounted directory.

mod start;
mod survey;

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use surgetank_core::report::PathText;
use surgetank_policy::config::Config;
use surgetank_types::clock;
use surgetank_types::error::{Error, Result};
use surgetank_types::model::RunId;

use super::commands::Commands;
use super::line::{self, Broken, Limits, Line};
use super::place::Place;
use super::signals;
use super::wire::{Answer, Hello, PROTOCOL, RefusalKind, Request};
pub use start::{clear_dead_mount, dead_mount, find_or_start, refused_store};
pub use survey::{serving, survey};

/// Names the places of the enclosing agents, innermost last, separated by `:`. `run` sets it for its commands.
pub const AGENT_VARIABLE: &str = "SURGETANK_AGENT";
/// An agent that closes every connection for this long counts as killed and about to be replaced.
const LEAVING_TIMEOUT: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// A conversation with a living agent.
pub struct Connection {
    line: Line,
    pub hello: Hello,
    /// The agent's pid in our own pid namespace.
    pub pid: u32,
    pub place: PathBuf,
    /// Limits that end a wait for an answer early.
    pub limits: Limits,
    /// The agent did not answer in time; the client does not wait for it again.
    silent: bool,
}

/// A conversation that begins with our greeting. The answer may come late, from the agent that replaces one killed a
/// moment ago.
pub struct Dialed {
    line: Line,
    place: Place,
}

impl Dialed {
    /// `None`: no process listens there. No agent ever did, or it was killed and no process holds its socket.
    pub fn at(place: Place, limits: &Limits) -> Result<Option<Self>> {
        let greet = |line: &mut Line| line.send(&Request::Hello { protocol: PROTOCOL }, limits);
        let until = clock::tick() + LEAVING_TIMEOUT;
        loop {
            match Line::connect(&place.socket(), limits).and_then(|mut line| greet(&mut line).map(|()| line)) {
                Ok(line) => return Ok(Some(Self { line, place })),
                // An agent that was killed had taken the call; the next one takes the socket.
                Err(Broken::Closed) if clock::tick() < until => std::thread::sleep(LOOK_EVERY),
                Err(Broken::Closed) => return Ok(None),
                Err(Broken::Io(error))
                    if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) =>
                {
                    return Ok(None);
                }
                Err(broken) => return Err(unanswered(&place, 0, broken)),
            }
        }
    }

    /// The process that took the call; 0: it is in another pid namespace.
    pub fn pid(&self) -> u32 {
        self.line.pid
    }

    /// The message for the user that says why the client stops waiting for the answer.
    pub fn unanswered(&self, broken: Broken) -> Error {
        unanswered(&self.place, self.line.pid, broken)
    }

    /// Waits for the answer. `None`: the agent was leaving.
    pub fn greeted(self, limits: &Limits) -> Result<Option<Connection>> {
        let Self { mut line, place } = self;
        let pid = line.pid;
        match line.next(limits) {
            // The agent that was called was killed before it answered; another agent answered.
            Ok(Answer::Hello(_)) if !is_alive(pid) => Connection::open_within(&place, limits),
            Ok(Answer::Hello(hello)) => {
                let place = place.path().to_path_buf();
                Ok(Some(Connection { line, hello, pid, place, limits: limits.clone(), silent: false }))
            }
            Ok(Answer::Error(refusal)) => Err(refusal.into()),
            Ok(other) => Err(unusable(&place, &format!("it greets with {other:?}"))),
            Err(Broken::Closed) => Ok(None),
            Err(broken) => Err(unanswered(&place, pid, broken)),
        }
    }
}

impl AsFd for Dialed {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.line.as_fd()
    }
}

/// Sends one request to the socket of a group; see `group`.
pub fn ask_guest(socket: &Path, request: &Request) -> Result<Answer> {
    let failed = |why: &dyn std::fmt::Display| {
        Error::new(format!("no agent answers at {}", socket.display()))
            .why(why)
            .remedy("ask its owner whether a run is under way, and look whether you are in the group of that directory")
            .data("nothing was changed")
    };
    let limits = Limits::default();
    let broken = |broken: Broken| match broken {
        Broken::Closed => failed(&"the agent closed the connection"),
        Broken::Io(error) => failed(&error),
        Broken::Silent(after) => failed(&format!("no answer for {} s", after.as_secs())),
        Broken::Signal(number) => failed(&signals::name(number)),
    };
    let mut line = Line::connect(socket, &limits).map_err(broken)?;
    let mut ask = |request: &Request| -> Result<Answer> {
        match line.send(request, &limits).and_then(|()| line.next(&limits)).map_err(broken)? {
            Answer::Error(refusal) => Err(refusal.into()),
            answer => Ok(answer),
        }
    };
    ask(&Request::Hello { protocol: PROTOCOL })?;
    ask(request)
}

fn unusable(place: &Place, why: &dyn std::fmt::Display) -> Error {
    Error::new(format!("the agent at {} cannot be used", place.path().display()))
        .why(why)
        .remedy(format!("look into {}", place.log_path().display()))
}

/// `pid` 0: not known.
fn unanswered(place: &Place, pid: u32, broken: Broken) -> Error {
    let card = place.card();
    let over = card.as_ref().map_or_else(|| place.path().display().to_string(), |card| card.over.to_string());
    let pid = if pid == 0 { card.map_or(0, |card| card.pid) } else { pid };
    match broken {
        Broken::Silent(after) => line::silence(&over, pid, place.path(), after),
        Broken::Signal(number) => stopped_waiting(&over, pid, number),
        Broken::Closed => unusable(place, &"the connection was closed"),
        Broken::Io(error) => unusable(place, &error),
    }
}

fn stopped_waiting(over: &str, pid: u32, number: i32) -> Error {
    Error::new(format!("{}: stopped waiting for the agent of {over} (pid {pid})", signals::name(number)))
        .data("the agent goes on; what was closed there is in the store or safe in the tiers")
}

/// A process without a number is in another pid namespace: it cannot be checked, and counts as alive.
fn is_alive(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
    pid.is_none_or(|pid| rustix::process::test_kill_process(pid) != Err(rustix::io::Errno::SRCH))
}

impl Connection {
    /// `None`: no process listens there. No agent ever did, or it was killed.
    pub fn open(place: &Place) -> Result<Option<Self>> {
        Self::open_within(place, &Limits::default())
    }

    fn open_within(place: &Place, limits: &Limits) -> Result<Option<Self>> {
        let until = clock::tick() + LEAVING_TIMEOUT;
        loop {
            let Some(dialed) = Dialed::at(Place::open(place.path())?, limits)? else { return Ok(None) };
            match dialed.greeted(limits)? {
                // Either the agent is leaving and removes its socket, or it was killed and the next agent takes the
                // socket.
                None if clock::tick() < until => std::thread::sleep(LOOK_EVERY),
                greeted => return Ok(greeted),
            }
        }
    }

    /// Calls the agent that may have replaced this one, which has ended.
    pub fn dial_next(&self) -> Result<Option<Dialed>> {
        Dialed::at(Place::open(&self.place)?, &self.limits)
    }

    /// A second conversation with the same agent, while this one is busy.
    pub fn another(&self, limits: &Limits) -> std::result::Result<Self, Broken> {
        let place = Place::open(&self.place).map_err(|why| Broken::Io(io::Error::other(why.to_string())))?;
        let mut line = Line::connect(&place.socket(), limits)?;
        line.send(&Request::Hello { protocol: PROTOCOL }, limits)?;
        let Answer::Hello(hello) = line.next(limits)? else { return Err(Broken::Closed) };
        Ok(Self { hello, pid: line.pid, line, place: self.place.clone(), limits: limits.clone(), silent: false })
    }

    /// The commands that users can run on the directory, with the options that its agent was started with.
    pub fn commands(&self) -> Commands {
        Commands::of_path(&self.place, self.hello.over.as_path())
    }

    /// Refuses a command that means another store than the agent's. A command inside the mount that names no store
    /// means the agent's.
    pub fn check_store(&self, config: &Config) -> Result<()> {
        let place = Place::open(&self.place);
        let same = self.hello.store.as_path() == config.store;
        if same || place.is_ok_and(|place| place.is_of_store(config)) {
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

    /// Refuses a command that names a pool to which the agent does not belong. A line for the user, if the Slurm job
    /// named the pool.
    pub fn check_pool(&self, config: &Config) -> Result<Option<String>> {
        let Some(pool) = config.pool.as_ref().filter(|pool| self.hello.pool.as_ref() != Some(&pool.name)) else {
            return Ok(None);
        };
        let place = match &self.hello.pool {
            Some(other) => format!("in the pool {other}"),
            None => "in no pool".to_owned(),
        };
        let what = format!("{} is served already, {place}", self.hello.over);
        if pool.is_of_job {
            // (A run within a run is where its user started the outer one.)
            return Ok((!self.is_of_this_run()).then(|| format!("{what}: this run is not in the pool {}", pool.name)));
        }
        let wait = self.commands().wait();
        Err(Error::new(what)
            .why(format!("this command names the pool {}", pool.name))
            .remedy(format!(
                "leave the pool's name out, or wait until its runs have ended and all is in the store:\n  {wait}"
            ))
            .data("nothing was begun"))
    }

    /// Is this process inside the directory that the agent serves?
    fn is_around(&self, over: &Path) -> bool {
        self.is_of_this_run() || fs::metadata(over).is_ok_and(|meta| meta.dev() == self.hello.mount_device)
    }

    /// Is this process the command of a run under the agent, or a child of it?
    fn is_of_this_run(&self) -> bool {
        let named = std::env::var_os(AGENT_VARIABLE);
        named.is_some_and(|around| std::env::split_paths(&around).any(|place| place == self.place))
    }

    fn lost(&self, why: impl std::fmt::Display) -> Error {
        Error::new(format!("the agent of {} does not answer any more", self.hello.over))
            .why(why)
            .remedy(format!(
                "read {}, then start a new agent, which continues:\n  {}",
                self.place.join("agent.log").display(),
                self.commands().run()
            ))
            .data("sealed files are safe in the tiers; the store has no incomplete file")
    }

    /// The error for the user. After one silence the client does not wait for the agent again.
    pub fn broken(&mut self, broken: Broken) -> Error {
        self.silent |= matches!(broken, Broken::Silent(_));
        self.described(broken)
    }

    pub fn described(&self, broken: Broken) -> Error {
        let over = self.hello.over.to_string();
        match broken {
            Broken::Silent(after) => line::silence(&over, self.pid, &self.place, after),
            Broken::Signal(number) => stopped_waiting(&over, self.pid, number),
            Broken::Closed => self.lost("the connection was closed"),
            Broken::Io(error) => self.lost(error),
        }
    }

    /// The agent did not answer in time.
    pub fn is_silent(&self) -> bool {
        self.silent
    }

    /// The client gives up on the agent: it does not wait for answers that are still owed.
    pub fn give_up(&mut self) {
        self.silent = true;
    }

    /// Sends a request whose answers are then heard one by one.
    pub fn begin(&mut self, request: &Request) -> std::result::Result<(), Broken> {
        if self.silent {
            return Err(Broken::Silent(Duration::ZERO));
        }
        self.line.settle(&self.limits)?;
        self.line.send(request, &self.limits)
    }

    /// Sends a request whose answer is not needed, or is taken by [`Connection::at_hand`].
    pub fn send(&mut self, request: &Request) -> Result<()> {
        let sent = self.line.send(request, &Limits::default());
        sent.map_err(|broken| self.broken(broken))
    }

    /// The next answer. The client waits for a slow one as long as the agent greets other clients.
    pub fn hear(&mut self) -> std::result::Result<Answer, Broken> {
        loop {
            match self.line.next(&self.limits) {
                Err(Broken::Silent(after)) => {
                    let is_over = self.limits.until.is_some_and(|until| clock::tick() >= until);
                    let is_stopped = matches!(line::process_state(self.pid), Some('T' | 't'));
                    if is_over || is_stopped || !self.greets() {
                        return Err(Broken::Silent(after));
                    }
                }
                heard => return heard,
            }
        }
    }

    fn greets(&self) -> bool {
        let limits = Limits { until: Some(clock::tick() + line::STOPPED_PATIENCE), ..Limits::default() };
        self.another(&limits).is_ok()
    }

    pub fn receive(&mut self) -> Result<Answer> {
        self.hear().map_err(|broken| self.broken(broken))
    }

    /// Sends one request and returns its one answer; a refusal is an error. If the agent is killed meanwhile, the next
    /// agent is asked.
    pub fn ask(&mut self, request: &Request) -> Result<Answer> {
        loop {
            let broken = match self.begin(request).and_then(|()| self.hear()) {
                Ok(Answer::Error(refusal)) => return Err(refusal.into()),
                Ok(answer) => return Ok(answer),
                Err(broken) => broken,
            };
            // A client that had joined has to join again first.
            let joined = matches!(request, Request::Release | Request::Summary { .. });
            let has_ended = matches!(broken, Broken::Closed | Broken::Io(_));
            if joined || !has_ended || !self.goes_on_with_next() {
                return Err(self.broken(broken));
            }
        }
    }

    /// Like [`Self::ask`], with a time limit, for requests that the caller can do without.
    pub fn ask_within(&mut self, request: &Request, time: Duration) -> Result<Answer> {
        let until = self.limits.until.replace(clock::tick() + time);
        let sent = self.begin(request).and_then(|()| self.hear());
        self.limits.until = until;
        match sent {
            Ok(Answer::Error(refusal)) => Err(refusal.into()),
            Ok(answer) => Ok(answer),
            Err(Broken::Silent(_)) => Err(self.lost(format!("no answer for {} s", time.as_secs()))),
            Err(broken) => Err(self.broken(broken)),
        }
    }

    /// After the connection broke: has another agent replaced this one? If so, the conversation continues with it.
    pub fn goes_on_with_next(&mut self) -> bool {
        let place = Place::open(&self.place).ok();
        let next = place.and_then(|place| Self::open_within(&place, &self.limits).ok().flatten());
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

    /// An answer that is there without waiting. An error: the agent has closed the connection.
    pub fn at_hand(&mut self) -> std::result::Result<Option<Answer>, Broken> {
        self.line.at_hand()
    }

    /// Has every request been answered?
    pub fn has_answered(&self) -> bool {
        !self.line.is_owed()
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
        self.line.as_fd()
    }
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

/// The result of joining.
pub enum Joined {
    As(RunId),
    /// The agent is leaving; look for another.
    Leaving,
}

impl Connection {
    pub fn join(&mut self, command: &str) -> Result<Joined> {
        self.join_as(command, None)
    }

    /// `again`: the number that an earlier agent gave this run.
    pub fn join_as(&mut self, command: &str, again: Option<RunId>) -> Result<Joined> {
        let request = Request::Join { pid: std::process::id(), command: command.to_owned(), again };
        match self.begin(&request).and_then(|()| self.hear()) {
            Ok(Answer::Joined { run }) => Ok(Joined::As(run)),
            Ok(Answer::Error(refusal)) if refusal.kind == RefusalKind::Leaving => Ok(Joined::Leaving),
            Ok(Answer::Error(refusal)) => Err(refusal.into()),
            Ok(other) => Err(self.confused(&other)),
            Err(Broken::Closed) => Ok(Joined::Leaving),
            Err(broken) => Err(self.broken(broken)),
        }
    }

    /// Waits until the agent has ended. An error: the agent is stopped, or a signal ended the wait.
    pub fn await_exit(&mut self) -> Result<()> {
        let mut reported = false;
        loop {
            match self.line.closed(&self.limits) {
                Ok(()) | Err(Broken::Io(_)) => return Ok(()),
                Err(Broken::Silent(after))
                    if after >= line::BUSY_PATIENCE && line::process_state(self.pid).is_some_and(|is| is != 'T') =>
                {
                    if !reported {
                        reported = true;
                        eprintln!(
                            "surgetank: still waiting for the agent of {} (pid {}) to go; its log is {}",
                            self.hello.over,
                            self.pid,
                            self.place.join("agent.log").display()
                        );
                    }
                }
                Err(broken) => return Err(self.broken(broken)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    /// Such an agent has pid 0 here. It once counted as dead, and the client called it without end.
    #[test]
    fn agent_of_another_pid_namespace_counts_as_alive() {
        assert!(super::is_alive(0) && super::is_alive(std::process::id()));
    }
}
