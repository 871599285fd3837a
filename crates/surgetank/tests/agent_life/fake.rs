//! A backend for the tests: a real mount (the adapter's mirror) over a real store. Its engine derives from the names
//! of the files what is durable:
//!
//! - `stuck*` is never durable;
//! - `slow*` is not settled until it is removed;
//! - `kept*` is kept;
//! - every other file is durable at once.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::mirror::{Mirror, MirrorOptions};
use surgetank::agent::engine::{Backend, Engine, Mounted, Opening, Running};
use surgetank::mount::{AttachOptions, Options, Session, attach, detach};
use surgetank::verbs::settings::Settings;
use surgetank_core::report::*;
use surgetank_policy::config::{Config, KeepAtExit};
use surgetank_store::Verify;
use surgetank_types::error::{Error, Result};
use surgetank_types::model::{Mode, RunId};

pub struct FakeBackend;

struct FakeEngine {
    store: OwnedFd,
    runs: AtomicU32,
}

struct FakeMount {
    over: PathBuf,
    session: Session,
}

impl Backend for FakeBackend {
    fn offline(&self, _opening: Opening) -> Result<Arc<dyn Engine>> {
        Err(Error::new("the fake backend serves or does not"))
    }

    fn audit(&self, _opening: Opening, _scrub: bool) -> Result<surgetank_core::report::Audit> {
        Ok(surgetank_core::report::Audit::default())
    }

    fn start(&self, opening: Opening) -> Result<Running> {
        let fail = |error: io::Error| Error::new("the fake backend failed").why(error);
        match std::env::var("FAKE_START").as_deref() {
            Ok("refuse") => return Err(Error::new("the tier /fast is on fire").remedy("water")),
            Ok("die") => {
                tracing::error!("last words");
                std::process::abort();
            }
            _ => {}
        }
        let store = PathBuf::from(format!("/proc/self/fd/{}", opening.store.as_ref().unwrap().as_raw_fd()));
        let mirror = Arc::new(Mirror::new(&store, MirrorOptions::default()).map_err(fail)?);
        let root = rustix::process::geteuid().is_root();
        let options = AttachOptions { allow_other: root, default_permissions: root, ..AttachOptions::default() };
        let over = opening.config.over.clone();
        let device = attach(&over, &options)?;
        let session = Session::start(device, &mirror, &Options::default()).map_err(fail)?;
        Ok(Running {
            engine: Arc::new(FakeEngine { store: opening.store.unwrap(), runs: AtomicU32::new(0) }),
            mount: Box::new(FakeMount { over, session }),
            shim: None,
            listeners: None,
            survives: false,
        })
    }
}

impl Mounted for FakeMount {
    fn detach(&mut self) -> io::Result<()> {
        detach(&self.over, false).map_err(|error| io::Error::other(error.to_string()))?;
        self.session.wait(None);
        Ok(())
    }
}

impl FakeEngine {
    fn named(&self, prefix: &str, scope: &Scope) -> Vec<PathText> {
        let entries = fs::read_dir(format!("/proc/self/fd/{}", self.store.as_raw_fd())).unwrap();
        let mut names: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name())
            .filter(|name| name.as_bytes().starts_with(prefix.as_bytes()) && scope.covers(name.as_bytes()))
            .map(|name| PathText(name.as_bytes().to_vec()))
            .collect();
        names.sort();
        names
    }
}

impl Engine for FakeEngine {
    fn trace_run(&self, _run: RunId) -> Result<()> {
        Err(Error::new("the fake traces nothing"))
    }

    fn scrub(&self, _repair: bool) -> surgetank_core::report::Audit {
        surgetank_core::report::Audit::default()
    }

    fn forget_losses(&self) -> surgetank_core::report::Listing<surgetank_core::report::Lost> {
        surgetank_core::report::Listing::default()
    }

    fn status(&self) -> Status {
        let files = self.named("slow", &Scope::everything()).len() as u64;
        Status { queue: Queue { files, ..Queue::default() }, ..Status::default() }
    }

    fn locate(&self, paths: &[PathText]) -> Vec<std::result::Result<Located, String>> {
        paths.iter().map(|path| Err(format!("{path} is not asked about"))).collect()
    }

    fn copies(&self, _numbers: &[u64], _files: &[Same]) -> Vec<Option<CopyOn>> {
        Vec::new()
    }

    fn why(&self, path: &[u8]) -> Result<Why> {
        if !self.named("", &Scope::everything()).iter().any(|name| name.0 == path) {
            return Err(Error::new(format!("{} does not exist", String::from_utf8_lossy(path))));
        }
        Ok(Why {
            path: path.into(),
            state: FileState::Durable,
            size_bytes: 0,
            place: "store".into(),
            mode: Mode::Copy,
            rule: "default".into(),
            hints: Vec::new(),
            placement: "the fake has no tiers".into(),
            replicas: Vec::new(),
            store_path: path.into(),
            pinned: false,
            trouble: None,
        })
    }

    fn progress(&self, scope: &Scope) -> Progress {
        let undrained_files = self.named("slow", scope).len() as u64;
        Progress { undrained_files, settled: undrained_files == 0, ..Progress::default() }
    }

    fn await_settled(&self, scope: &Scope, at_most: Duration) -> Progress {
        let until = Instant::now() + at_most;
        loop {
            let progress = self.progress(scope);
            if progress.settled || Instant::now() >= until {
                return progress;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn begin_final_drain(&self, _: &Scope) {}

    fn verdict(&self, scope: &Scope) -> Verdict {
        let undone =
            |why: &'static str| move |path: PathText| NotDurable { safe_at: path.clone(), path, why: why.into() };
        let stuck = self.named("stuck", scope).into_iter().map(undone("it is stuck"));
        let slow = self.named("slow", scope).into_iter().map(undone("still draining"));
        Verdict {
            not_durable: stuck.chain(slow).collect(),
            kept: self.named("kept", scope).into_iter().collect(),
            ..Verdict::default()
        }
    }

    fn summary(&self, _: Option<RunId>) -> Summary {
        Summary::default()
    }

    fn figures(&self) -> Figures {
        Figures { status: self.status(), ..Figures::default() }
    }

    fn evict(&self, path: &[u8]) -> Result<u64> {
        self.why(path).map(|_| 4096)
    }

    fn pin(&self, path: &[u8], _: bool) -> Result<()> {
        self.why(path).map(|_| ())
    }

    fn hint(
        &self,
        _: &[surgetank_core::report::HintOf],
    ) -> surgetank_core::report::Listing<surgetank_core::report::RefusedHint> {
        surgetank_core::report::Listing::default()
    }

    fn refresh(&self) {}
    fn prefetch(&self, patterns: &[Vec<u8>]) -> Result<Prefetch> {
        Ok(Prefetch { files: patterns.len() as u64, bytes: 0 })
    }

    fn register_run(&self, _: u32) -> RunId {
        RunId(self.runs.fetch_add(1, Ordering::Relaxed) + 1)
    }

    fn restore_run(&self, _run: RunId, _pid: u32) {}

    fn release_run(&self, _: RunId) -> Option<String> {
        None
    }

    fn shutdown(&self) {}
}

/// The configuration that an agent needs at least.
pub fn configure(settings: &Settings) -> Result<Config> {
    let given = settings.over.clone().unwrap_or_else(|| ".".into());
    let over = match given.canonicalize() {
        Ok(path) => path,
        // A dead mount has no canonical form; the tests name it absolutely.
        Err(error) if error.raw_os_error() == Some(libc::ENOTCONN) => given,
        Err(error) => return Err(Error::new(given.display().to_string()).why(error)),
    };
    let state = settings.state.as_ref().map(PathBuf::from);
    let state = state.or_else(|| std::env::var_os("SURGETANK_STATE").map(PathBuf::from));
    let state = state.ok_or_else(|| Error::new("no state directory"))?;
    let grace = settings.grace.as_deref().map(|text| text.parse().map(Duration::from_millis));
    Ok(Config {
        pool: None,
        store: settings.store.as_ref().map_or_else(|| over.clone(), PathBuf::from),
        over,
        tiers: Vec::new(),
        rules: Vec::new(),
        again: vec!["--state".into(), state.clone().into()],
        state,
        ordered: true,
        pool_ordered: false,
        replicas: 1,
        replicas_at: Default::default(),
        verify: Verify::Cache,
        fsync: None,
        copy_up_bytes_max: 0,
        dirty_bytes_max: 0,
        drain_threads: 1,
        drain_bytes_per_second_max: 0,
        store_ttl: Duration::ZERO,
        quiet: Duration::ZERO,
        sync_after: Duration::ZERO,
        retry: Duration::ZERO,
        wait_for_room: Duration::ZERO,
        grace: grace.transpose().map_err(|error| Error::new("--grace").why(error))?.unwrap_or_default(),
        deadline: None,
        job: None,
        keep_at_exit: KeepAtExit::Leave,
        direct: false,
        door: surgetank_policy::config::Way::Fuse,
        preload: false,
        preload_skip: Vec::new(),
        group_socket: None,
        metrics: None,
        metrics_token_file: surgetank_policy::config::TokenFile::Own,
    })
}
