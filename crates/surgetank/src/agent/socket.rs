//! The agent's side of the socket: one thread per connection, one request after the other.
//!
//! A connection that joined *is* the run: when it closes, for any reason, the agent releases the run. The agent answers
//! only the same user and root. The directory is 0700 already; this check is a second barrier. At the group's socket it
//! also answers the group's members, and only with the status.

use std::io::{self, BufReader};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use surgetank_core::handoff::{Handoff, Record};
use surgetank_core::report::{AgentStatus, Holder, PathText, RunStatus, Scope, Visibility};
use surgetank_types::clock;
use surgetank_types::model::RunId;

use super::engine::{Engine, Listeners};
use super::holders;
use super::tending;
use super::users::Users;
use super::wire::{self, Answer, Hello, PROTOCOL, Refusal, RefusalKind, Request};

const LAST_TIMEOUT: Duration = Duration::from_millis(100);
/// How often the agent sends progress to a waiting client.
const PROGRESS_EVERY: Duration = Duration::from_millis(200);

/// What every connection needs.
pub struct Desk {
    pub engine: Arc<dyn Engine>,
    pub users: Arc<Users>,
    pub hello: Hello,
    pub since_unix_seconds: i64,
    pub listeners: Option<Listeners>,
    pub bypassed: Vec<PathText>,
    /// Tells the next agent which runs are here.
    pub handoff: Option<Arc<Handoff>>,
}

impl Desk {
    fn hand_off(&self, record: &Record<'_>) {
        if let Some(handoff) = &self.handoff {
            handoff.put(record);
        }
    }

    /// Checks for the programs that were started here and their remaining children. (`None` on a mount that every
    /// process sees: any process may be inside.)
    fn is_deserted(&self) -> Option<Box<dyn Fn() -> bool + Send>> {
        match self.listeners.clone() {
            Some(listeners) => Some(Box::new(move || listeners.is_empty())),
            None if self.hello.visibility == Visibility::Private => {
                Some(Box::new(|| holders::of_our_namespace().is_empty()))
            }
            None => None,
        }
    }

    /// Was it the last run, and the reason if its record is not written.
    fn release(&self, run: RunId) -> (bool, Option<String>) {
        let unrecorded = self.engine.release_run(run);
        self.hand_off(&Record::Ended { run });
        (self.users.leave(run), unrecorded)
    }
}

/// Accepts until the process ends. `group`: its members may ask here, too.
pub fn serve(listener: &UnixListener, desk: &Arc<Desk>, group: Option<u32>) {
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                let desk = Arc::clone(desk);
                let thread = std::thread::Builder::new().name("client".into()).stack_size(512 << 10);
                if let Err(error) = thread.spawn(move || talk(&desk, stream, group)) {
                    tracing::error!(%error, "no thread for a client");
                }
            }
            Err(error) => {
                tracing::error!(%error, "accept");
                // The process is probably out of descriptors: give clients time to close some.
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }
}

fn talk(desk: &Desk, stream: UnixStream, group: Option<u32>) {
    let mut client = match Client::new(desk, stream, group) {
        Ok(client) => client,
        Err(error) => {
            tracing::warn!(%error, "a client was turned away");
            return;
        }
    };
    if let Err(error) = client.converse() {
        tracing::debug!(%error, "a client's connection ended");
    }
    if let Some(run) = client.run.take() {
        tracing::info!(run = run.0, "released: its connection ended");
        desk.release(run);
    }
}

struct Client<'a> {
    desk: &'a Desk,
    reader: BufReader<UnixStream>,
    writer: UnixStream,
    greeted: bool,
    run: Option<RunId>,
    /// The connection came to the group's socket.
    is_guest: bool,
}

fn may_ask(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

impl<'a> Client<'a> {
    fn new(desk: &'a Desk, stream: UnixStream, group: Option<u32>) -> io::Result<Self> {
        let peer = rustix::net::sockopt::socket_peercred(&stream)?;
        let is_member = |gid: u32| -> io::Result<bool> {
            Ok(peer.gid.as_raw() == gid || super::group::is_member(stream.as_fd(), gid)?)
        };
        if !may_ask(peer.uid.as_raw()) && !group.map_or(Ok(false), is_member)? {
            let why = format!("user {} asks the agent of another user", peer.uid.as_raw());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        // A client that stops reading must not hold the agent indefinitely.
        stream.set_write_timeout(Some(Duration::from_secs(30)))?;
        let writer = stream.try_clone()?;
        Ok(Self { desk, reader: BufReader::new(stream), writer, greeted: false, run: None, is_guest: group.is_some() })
    }

    fn send(&mut self, answer: &Answer) -> io::Result<()> {
        wire::write(&mut self.writer, answer)
    }

    fn refuse(&mut self, kind: RefusalKind, what: impl Into<String>) -> io::Result<()> {
        self.send(&Answer::Error(Refusal::new(kind, what)))
    }

    fn converse(&mut self) -> io::Result<()> {
        loop {
            let line = match wire::read_line(&mut self.reader, wire::REQUEST_BYTES_MAX) {
                Ok(Some(line)) => line,
                Ok(None) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    // The start of the next request is unknown: report the error and close.
                    self.refuse(RefusalKind::Malformed, format!("the request is refused: {error}"))?;
                    return Err(error);
                }
                Err(error) => return Err(error),
            };
            match wire::decode_request(&line) {
                Err(refusal) => self.send(&Answer::Error(refusal))?,
                Ok(Request::Hello { protocol }) => self.greet(protocol)?,
                Ok(_) if !self.greeted => self.refuse(RefusalKind::Malformed, "the first request must be `hello`")?,
                Ok(request) if self.is_guest && !matches!(request, Request::Status) => {
                    self.refuse(RefusalKind::Failed, "this socket answers only requests for the status")?;
                }
                Ok(request) => self.answer(request)?,
            }
        }
    }

    fn greet(&mut self, protocol: u32) -> io::Result<()> {
        if protocol != PROTOCOL {
            let mut refusal = Refusal::new(
                RefusalKind::Protocol,
                format!("the agent speaks protocol {PROTOCOL}, the caller {protocol}"),
            );
            refusal.why = format!("the agent is surgetank {}", self.desk.hello.version);
            refusal.remedy = "wait until its runs have ended, then start again".into();
            return self.send(&Answer::Error(refusal));
        }
        self.greeted = true;
        self.send(&Answer::Hello(self.desk.hello.clone()))
    }

    fn answer(&mut self, request: Request) -> io::Result<()> {
        let engine = Arc::clone(&self.desk.engine);
        let answer = match request {
            Request::Hello { .. } => return Ok(()),
            Request::Join { pid, command, again } => return self.join(pid, command, again),
            Request::Status => Answer::Status(Box::new(self.status())),
            Request::Pool => match self.desk.engine.pool_status().transpose() {
                Ok(status) => Answer::Pool(status.map(Box::new)),
                Err(error) => Answer::Error(error.into()),
            },
            Request::Waiting => Answer::Waiting(engine.waiting_for_room()),
            Request::Scrub { repair } => Answer::Audit(Box::new(engine.scrub(repair))),
            Request::ForgetLosses => Answer::Forgotten(engine.forget_losses()),
            Request::Wait { scope, timeout_ms } => return self.wait(&scope, timeout_ms),
            Request::Verdict { scope } => {
                Answer::Verdict { verdict: Box::new(engine.verdict_everywhere(&scope)), timed_out: false }
            }
            Request::Summary { run } => Answer::Summary(Box::new(engine.summary(run))),
            Request::Refresh => {
                engine.refresh();
                Answer::Done
            }
            Request::Hasten { scope } => {
                engine.begin_final_drain(&scope);
                Answer::Done
            }
            Request::Trace => {
                let Some(run) = self.run else {
                    return self.refuse(RefusalKind::Malformed, "this connection has not joined");
                };
                match engine.trace_run(run) {
                    Ok(()) => Answer::Done,
                    Err(error) => Answer::Error(error.into()),
                }
            }
            Request::Account(account) => {
                let Some(run) = self.run else {
                    return self.refuse(RefusalKind::Malformed, "this connection has not joined");
                };
                engine.account(run, &account);
                Answer::Done
            }
            Request::Release => {
                let Some(run) = self.run.take() else {
                    return self.refuse(RefusalKind::Malformed, "this connection has not joined");
                };
                // This is asked before the release: a leaving agent may retry refused operations.
                let at_once = self.goes_at_once();
                let (last, unrecorded) = self.desk.release(run);
                Answer::Released { last: last && at_once, unrecorded: unrecorded.unwrap_or_default() }
            }
            Request::Unmount { timeout_ms } => return self.unmount(timeout_ms),
            Request::Why { .. }
            | Request::Locate { .. }
            | Request::Copies { .. }
            | Request::Evict { .. }
            | Request::Pin { .. }
            | Request::Hint { .. }
            | Request::Prefetch { .. } => {
                let answer = engine.answered_with_others(&request).or_else(|| tending::answered(&*engine, &request));
                let refusal = || Answer::Error(Refusal::new(RefusalKind::Malformed, "this request has no answer"));
                answer.unwrap_or_else(refusal)
            }
        };
        self.send(&answer)
    }

    /// Does the agent leave within a moment? Other runs' files may need to drain, or other runs' children may live.
    fn goes_at_once(&self) -> bool {
        if let Some(listeners) = &self.desk.listeners {
            // The kernel reports the last process's end a moment after it.
            let until = clock::tick() + LAST_TIMEOUT;
            while !listeners.is_empty() && clock::tick() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
            return listeners.is_empty() && self.desk.engine.progress(&Scope::everything()).settled;
        }
        self.desk.engine.progress(&Scope::everything()).settled
            && (self.desk.hello.visibility == Visibility::Global || holders::of_our_namespace().is_empty())
    }

    fn join(&mut self, pid: u32, command: String, again: Option<RunId>) -> io::Result<()> {
        if self.run.is_some() {
            return self.refuse(RefusalKind::Malformed, "this connection has joined already");
        }
        let run = match again {
            Some(run) => {
                self.desk.engine.restore_run(run, pid);
                run
            }
            None => self.desk.engine.register_run(pid),
        };
        self.desk.hand_off(&Record::Joined { run, pid, command: &command });
        let (recorded, is_again) = (command.clone(), again.is_some());
        let status = RunStatus { run, pid, command, since_unix_seconds: clock::now().secs() };
        if !self.desk.users.join(status, || self.desk.engine.user_joined()) {
            self.desk.engine.release_run(run);
            self.desk.hand_off(&Record::Ended { run });
            return self.refuse(RefusalKind::Leaving, "the agent is about to go");
        }
        tracing::info!(run = run.0, pid, "joined");
        self.desk.engine.record_run(run, pid, &recorded, is_again);
        self.run = Some(run);
        self.send(&Answer::Joined { run })
    }

    fn status(&self) -> AgentStatus {
        let desk = self.desk;
        AgentStatus {
            over: desk.hello.over.clone(),
            store: desk.hello.store.clone(),
            pid: std::process::id(),
            version: desk.hello.version.clone(),
            phase: desk.users.phase(),
            visibility: desk.hello.visibility,
            since_unix_seconds: desk.since_unix_seconds,
            runs: desk.users.runs(),
            bypassed: desk.bypassed.clone(),
            pool: desk.engine.pool_members(),
            content: desk.engine.status(),
        }
    }

    fn wait(&mut self, scope: &Scope, timeout_ms: Option<u64>) -> io::Result<()> {
        if !self.desk.users.begin_wait() {
            return self.refuse(RefusalKind::Leaving, "the agent is about to go");
        }
        tracing::info!(?scope, "a client waits");
        if let Some(run) = self.run.filter(|run| scope.run == Some(*run)) {
            let is_deserted = self.desk.is_deserted();
            self.desk.users.command_ended(run, || self.desk.engine.all_commands_ended(is_deserted));
        }
        let result = self.drain(scope, timeout_ms).and_then(|timed_out| {
            let verdict = Box::new(self.desk.engine.verdict_everywhere(scope));
            self.send(&Answer::Verdict { verdict, timed_out })
        });
        self.desk.users.end_wait();
        result
    }

    /// The final drain of a scope with progress for the client; true when the time ran out first.
    fn drain(&mut self, scope: &Scope, timeout_ms: Option<u64>) -> io::Result<bool> {
        let engine = Arc::clone(&self.desk.engine);
        engine.begin_final_drain(scope);
        let timed_out = self.follow(&*engine, scope, timeout_ms);
        engine.end_final_drain(scope);
        timed_out
    }

    fn follow(&mut self, engine: &dyn Engine, scope: &Scope, timeout_ms: Option<u64>) -> io::Result<bool> {
        let begun = clock::tick();
        loop {
            let left = timeout_ms.map(|ms| Duration::from_millis(ms).saturating_sub(begun.elapsed()));
            let progress = engine.await_settled_everywhere(scope, left.unwrap_or(PROGRESS_EVERY).min(PROGRESS_EVERY));
            let settled = progress.settled;
            self.send(&Answer::Progress(progress))?;
            if settled {
                return Ok(false);
            }
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(true);
            }
        }
    }

    fn unmount(&mut self, timeout_ms: Option<u64>) -> io::Result<()> {
        let desk = self.desk;
        if desk.hello.visibility == Visibility::Private {
            let mut refusal = Refusal::new(RefusalKind::Failed, "this mount is private to its runs");
            refusal.remedy = "it goes when they end".into();
            return self.send(&Answer::Error(refusal));
        }
        let over = desk.hello.over.to_path_buf();
        let mut busy: Vec<Holder> = desk
            .users
            .runs()
            .into_iter()
            .map(|run| Holder { pid: run.pid, command: run.command, holds: format!("run {}", run.run.0) })
            .collect();
        busy.extend(holders::of_directory(&over));
        if !busy.is_empty() {
            return self.send(&Answer::Busy { holders: busy });
        }
        if !desk.users.begin_wait() {
            return self.refuse(RefusalKind::Leaving, "the agent is about to go");
        }
        let everything = Scope::everything();
        let until = timeout_ms.map(|timeout| clock::tick() + Duration::from_millis(timeout));
        let drained = self.drain(&everything, timeout_ms);
        desk.users.end_wait();
        let timed_out = drained?;
        let verdict = desk.engine.verdict_everywhere(&everything);
        // Waiting does not bring lost files back.
        let drained = verdict.is_drained();
        self.send(&Answer::Verdict { verdict: Box::new(verdict), timed_out })?;
        if timed_out || !drained {
            return Ok(());
        }
        if !desk.users.ask_unmount() {
            return self.refuse(RefusalKind::Failed, "another umount is under way");
        }
        loop {
            match desk.users.await_unmount(Duration::from_secs(1)) {
                Some(Err(holders)) => return self.send(&Answer::Busy { holders }),
                Some(Ok(())) => {
                    let sent = self.send(&Answer::Done);
                    desk.users.unmount_answered();
                    return sent;
                }
                None => {}
            }
            let Some(pool) = desk.engine.pool_status() else { continue };
            let pool = pool.unwrap_or_default();
            let others = pool.members.iter().filter(|other| other.member != pool.member);
            let members = others.filter(|other| pool.has_registry || other.handles > 0).count();
            let ends = until.is_some_and(|until| clock::tick() >= until);
            let sent = self.send(&Answer::Waits { members, to_leave: pool.has_registry });
            if (ends || sent.is_err()) && desk.users.withdraw_unmount() {
                sent?;
                let (what, remedy) = if members > 0 {
                    const FIRST: &str = "umount it after them, the pool's first member last";
                    ("it stays mounted: other members of the pool need it", FIRST)
                } else {
                    ("it stays mounted: it did not leave in time", "umount again, with a longer --timeout")
                };
                let mut refusal = Refusal::new(RefusalKind::Failed, what);
                refusal.remedy = remedy.into();
                refusal.data = "everything is in the store".into();
                return self.send(&Answer::Error(refusal));
            }
        }
    }
}
