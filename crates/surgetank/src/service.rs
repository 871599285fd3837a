//! Serves a directory: the namespace behind the mount, and the engine that answers the agent.
//!
//! [`Service`] is the agent's backend: it opens catalog, tiers and namespace, mounts, and starts the drain.

mod afterlife;
mod backings;
mod door;
mod engine;
mod guard;
mod memberships;
mod prefetcher;
pub(crate) mod recorder;
mod runs;
pub(crate) mod stores;
mod synced_copies;
mod tally;
mod trace;
mod unshimmed;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use surgetank_core::audit::{self, Ground};
use surgetank_core::catalog::LogCatalog;
use surgetank_core::drain::Drain;
use surgetank_core::namespace::{Namespace, Survival};
use surgetank_core::report::{Audit, Visibility};
use surgetank_store::Cred;
use surgetank_tier::Tiers;
use surgetank_types::clock;
use surgetank_types::error::{Error, Result};

use crate::agent::engine::{Backend, Engine, Listeners, Mounted, Opening, Running, ShimPlace};
use crate::agent::holders;
use crate::agent::place::{POOL_SOCKET, SYNCED_COPIES};
use crate::mount::{AttachOptions, Options, Readdirplus, Session, attach, detach};
use crate::pool::link::Link;
use crate::pool::router::{Lasting, Router};
use crate::shimdoor;
use door::Door;
use stores::open_store;

/// The real backend.
pub struct Service;

/// How long requests of other members that are under way may take at the end.
const CALLS_END: Duration = Duration::from_secs(2);
/// How long joining a pool may take.
const JOIN_TIMEOUT: Duration = Duration::from_secs(75);
/// How long the serving threads may take to end after the mount is gone.
const END_TIMEOUT: Duration = Duration::from_secs(10);

impl Backend for Service {
    fn start(&self, opening: Opening) -> Result<Running> {
        let tiers = Arc::new(Tiers::open(&opening.config.tiers, &opening.key)?);
        serve(opening, &tiers).inspect_err(|_| {
            // Removes empty directories that this call made; an earlier agent's files stay.
            for device in tiers.devices() {
                if let Err(why) = device.sweep() {
                    tracing::warn!(%why, device = %device.path().display(), "a tier could not be swept");
                }
            }
        })
    }

    fn offline(&self, opening: Opening) -> Result<Arc<dyn Engine>> {
        let (namespace, guard) = take_up(opening)?;
        let drain = Drain::start(&namespace).map_err(|why| Error::new("the drain could not be started").why(why))?;
        let prefetcher = prefetcher::Prefetcher::start(&namespace).map_err(|why| {
            drain.stop();
            Error::new("prefetching could not be started").why(why)
        })?;
        let runs = Arc::new(runs::Runs::default());
        let tally = tally_of(&namespace, &runs);
        let filesystem = Arc::new(door::Door::new(namespace.clone(), false, only_ids(), tally, Box::new(|| ())));
        Ok(Arc::new(engine::Served::new(namespace, drain, runs, filesystem, prefetcher, guard, None, None, None)))
    }

    fn audit(&self, opening: Opening, scrub: bool) -> Result<Audit> {
        let Opening { config, store, state, key, .. } = opening;
        let tiers = Tiers::open(&config.tiers, &key)?;
        let store = open_store(store, &config, &state)?;
        // The catalog is not opened: opening would repair what a crash left, and fold.
        let (image, recovery) = LogCatalog::look(&state.join("catalog"))?;
        let who = Cred { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw() };
        let described = store.describe();
        let store_path = if config.store_url().is_some() { Path::new(&described) } else { &config.store };
        let key = key.as_str();
        let synced_copies = state.join(SYNCED_COPIES);
        let damage = recovery.damage.as_ref();
        let store = Some(&*store);
        let ground = Ground {
            image: &image,
            damage,
            tiers: &tiers,
            store,
            who,
            store_path,
            key,
            synced_copies: &synced_copies,
            scrub,
        };
        let audit = audit::audit(&ground)?;
        for device in tiers.devices() {
            // Removes empty directories that the inspection made.
            if let Err(why) = device.sweep() {
                tracing::debug!(%why, "a tier could not be swept");
            }
        }
        Ok(audit)
    }
}

/// Opens a directory to take up its leftovers, without serving it.
fn take_up(opening: Opening) -> Result<(Arc<Namespace>, Option<guard::Guard>)> {
    let Opening { config, store, bare, state, key, .. } = opening;
    let tiers = Arc::new(Tiers::open(&config.tiers, &key)?);
    let guard = bare.map(|bare| guard::Guard::new(&config.over, bare));
    let synced_copies = synced_copies::place(store.as_ref().map(OwnedFd::as_fd), &state)?;
    let store = open_store(store, &config, &state)?;
    let catalog = Arc::new(LogCatalog::open(&state.join("catalog"))?);
    let survival = Survival { synced_copies, ..Survival::default() };
    let namespace = Namespace::open_after(config, store, tiers, catalog, key, true, survival)?;
    memberships::begin(&namespace, &state, None)?;
    Ok((namespace, guard))
}

fn serve(opening: Opening, tiers: &Arc<Tiers>) -> Result<Running> {
    let Opening { config, store, bare, state, key, visibility, by_calls, survival, on_lost } = opening;
    let over = config.over.clone();
    let root = rustix::process::geteuid().is_root() && in_initial_user_namespace();
    let guard = bare.map(|bare| guard::Guard::new(&over, bare));
    let synced_copies = synced_copies::place(store.as_ref().map(OwnedFd::as_fd), &state)?;
    let store = open_store(store, &config, &state)?;
    let catalog = Arc::new(LogCatalog::open(&state.join("catalog"))?);
    let direct = config.direct && root;
    let checks = !root || by_calls;
    let mut afterlife = afterlife::Mount::of(survival);
    let mut survival = afterlife.survival();
    survival.intake = shimdoor::left(&key, &state);
    survival.synced_copies = synced_copies;
    if !survival.again {
        sweep_shared_memory();
    }
    let namespace = Namespace::open_after(config, store, tiers.clone(), catalog, key, checks, survival)?;
    let runs = Arc::new(runs::Runs::default());
    let asked = runs.clone();
    namespace.base.runs.set_run_of(Box::new(move |pid| asked.run_of(pid)));
    let asked = runs.clone();
    namespace.base.runs.set_run_known(Box::new(move |run| asked.known(run)));
    namespace.base.waits.set(crate::mount::interrupted, crate::mount::killed, crate::mount::wait_long);
    namespace.base.succession.set_request(afterlife::request);
    if by_calls {
        return serve_calls(namespace, runs, guard, &over, &state);
    }
    let attach_options = AttachOptions {
        // A private mount contains only the run's processes. Every user may enter a global mount only if root made it.
        allow_other: root || visibility == Visibility::Private,
        default_permissions: root,
        ..AttachOptions::default()
    };
    let tally = tally_of(&namespace, &runs);
    let filesystem = Arc::new(door::Door::new(namespace.clone(), direct, only_ids(), tally.clone(), on_lost));
    let options = Options { passthrough: direct, locks: true, readdirplus: Readdirplus::Auto, ..Options::default() };
    if afterlife.is_another() {
        shimdoor::disbelieve(namespace.key(), &state);
    }
    let router = join(&namespace, &filesystem, &runs, &state)?;
    memberships::begin(&namespace, &state, router.as_deref().map(Router::membership))?;
    // (In a pool attributes of names in a listing may be another member's.)
    let readdirplus = if router.is_some() { Readdirplus::Never } else { Readdirplus::Auto };
    let options = Options { readdirplus, ..options };
    let attach = || attach(&over, &attach_options);
    let session = match &router {
        Some(router) => afterlife.serve(attach, &Arc::new(Lasting(router.clone())), &options)?,
        None => afterlife.serve(attach, &filesystem, &options)?,
    };
    // The mount of an earlier agent has programs in it: it must stay.
    let give_up = || {
        if !afterlife.is_another() {
            drop(detach(&over, true));
        }
    };
    let session = session.map_err(|why| {
        give_up();
        Error::new(format!("the mount over {} cannot be served", over.display())).why(why).data("nothing was changed")
    })?;
    let drain = Drain::start(&namespace).map_err(|why| {
        give_up();
        Error::new("the drain could not be started").why(why)
    })?;
    let prefetcher = prefetcher::Prefetcher::start(&namespace).map_err(|why| {
        drain.stop();
        give_up();
        Error::new("prefetching could not be started").why(why)
    })?;
    let again = afterlife.is_another();
    let pool = router.clone().map(|router| router as Arc<dyn shimdoor::Membership>);
    let may_preload = namespace.base.config.preload;
    let shim = may_preload.then(|| open_shim_door(&namespace, &state, &over, again, pool.as_ref())).flatten();
    if let (Some(shim), Some(keeper)) = (&shim, afterlife.keeper()) {
        shim.keep(keeper);
    }
    let place = shim.as_ref().map(|door| ShimPlace { index: door.index().into(), socket: door.socket().into() });
    let index = shim.as_ref().map(shimdoor::Opened::index);
    let others = router.as_ref().map(|router| router.others.clone());
    let recorder = recorder::Recorder::start(&namespace, &drain, tally, &state, index, others, again);
    let engine = Arc::new(engine::Served::new(
        namespace,
        drain,
        runs,
        filesystem.clone(),
        prefetcher,
        guard,
        None,
        Some(recorder),
        router.clone(),
    ));
    let pooled = router.is_some();
    if let Some(router) = router {
        let drains: std::sync::Weak<dyn crate::pool::others::Drains> = Arc::<engine::Served>::downgrade(&engine);
        router.serve(drains);
    }
    let survives = session.agreed().resends && afterlife.is_supervised();
    let mount = Box::new(OverMount { over, pooled, session, filesystem, shim });
    Ok(Running { engine, mount, shim: place, listeners: None, survives })
}

/// Without a mount: the directory stays bare, and the agent receives programs' calls.
fn serve_calls(
    namespace: Arc<Namespace>,
    runs: Arc<runs::Runs>,
    guard: Option<guard::Guard>,
    over: &Path,
    state: &Path,
) -> Result<Running> {
    memberships::begin(&namespace, state, None)?;
    let cannot = |why: io::Error| Error::new(format!("{} cannot be served without a mount", over.display())).why(why);
    let bare = rustix::fs::stat(over).map_err(|errno| cannot(errno.into()))?;
    let shim = shimdoor::open(&namespace, state, bare.st_dev, only_ids(), false, None).map_err(cannot)?;
    let socket = state.join("calls.sock");
    let tally = tally_of(&namespace, &runs);
    let told = tally.clone();
    let gave = Box::new(move |thread, file, flags, made| told.gave(thread, file, flags, made));
    let calls = crate::seccomp::open(&namespace, &shim, over, bare.st_dev, &socket, gave).map_err(cannot)?;
    let drain = Drain::start(&namespace).map_err(cannot)?;
    let prefetcher = prefetcher::Prefetcher::start(&namespace).map_err(|why| {
        drain.stop();
        cannot(why)
    })?;
    let place =
        namespace.base.config.preload.then(|| ShimPlace { index: shim.index().into(), socket: shim.socket().into() });
    // It counts no requests; the engine needs it.
    let filesystem = Arc::new(door::Door::new(namespace.clone(), true, only_ids(), tally.clone(), Box::new(|| ())));
    let recorder = recorder::Recorder::start(&namespace, &drain, tally, state, Some(shim.index()), None, false);
    let engine = Arc::new(engine::Served::new(
        namespace,
        drain,
        runs,
        filesystem,
        prefetcher,
        guard,
        Some(calls.refusals()),
        Some(recorder),
        None,
    ));
    let listeners = Listeners { socket, living: calls.living() };
    let mount = Box::new(NoMount { calls: Some(calls), shim: Some(shim) });
    Ok(Running { engine, mount, shim: place, listeners: Some(listeners), survives: false })
}

fn sweep_shared_memory() {
    let found = shimdoor::leftovers::sweep(Path::new(shimdoor::leftovers::SHARED_MEMORY), true);
    if found.files > 0 {
        tracing::info!(files = found.files, bytes = found.bytes, "removed from shared memory: their agents are dead");
    }
}

/// Connects to the pool's process, if there is one.
fn join(
    namespace: &Arc<Namespace>,
    door: &Arc<Door>,
    runs: &runs::Runs,
    state: &Path,
) -> Result<Option<Arc<Router<Door>>>> {
    let Some(pool) = &namespace.base.config.pool else { return Ok(None) };
    // (After the death of a first member, its lease is awaited.)
    let link = Link::connect(&state.join(POOL_SOCKET), JOIN_TIMEOUT + 2 * pool.lease).map_err(|error| {
        const REMEDY: &str = "check that all members use the same store and secret, and reach each other's hosts";
        let text = error.to_string();
        let (why, remedy) = text.split_once('\n').unwrap_or((&text, REMEDY));
        let failed = Error::new(format!("the pool {} cannot be joined", pool.name));
        let or_none = if pool.is_of_job { "; to work without a pool: --pool none" } else { "" };
        failed.why(why).remedy(format!("{remedy}{or_none}")).data("nothing was changed")
    })?;
    holders::has_pool(link.process());
    runs.has_pool(link.process());
    Ok(Some(Arc::new(Router::new(door.clone(), only_ids(), namespace.clone(), link))))
}

fn tally_of(namespace: &Arc<Namespace>, runs: &Arc<runs::Runs>) -> Arc<tally::Tally> {
    let asked = Arc::downgrade(namespace);
    let named = Box::new(move |file| asked.upgrade().and_then(|namespace| namespace.eager.path_and_size(file)));
    Arc::new(tally::Tally::new(runs.clone(), named))
}

struct NoMount {
    calls: Option<crate::seccomp::Opened>,
    shim: Option<shimdoor::Opened>,
}

impl Mounted for NoMount {
    fn detach(&mut self) -> io::Result<()> {
        if self.calls.as_ref().is_some_and(crate::seccomp::Opened::in_use) {
            return Err(rustix::io::Errno::BUSY.into());
        }
        self.calls = None;
        self.shim = None;
        Ok(())
    }
}

struct OverMount {
    over: PathBuf,
    /// What other members asked for may still be ending.
    pooled: bool,
    session: Session,
    filesystem: Arc<door::Door>,
    shim: Option<shimdoor::Opened>,
}

/// Without the shim's door all programs use the mount.
fn open_shim_door(
    namespace: &Arc<Namespace>,
    state: &Path,
    over: &Path,
    again: bool,
    pool: Option<&Arc<dyn shimdoor::Membership>>,
) -> Option<shimdoor::Opened> {
    use rustix::fs::{AtFlags, CWD, StatxFlags, makedev, statx};
    // Not synchronised: the answer would have to come from this agent.
    let opened = statx(CWD, over, AtFlags::STATX_DONT_SYNC, StatxFlags::empty())
        .map_err(io::Error::from)
        .map(|seen| makedev(seen.stx_dev_major, seen.stx_dev_minor))
        .and_then(|device| shimdoor::open(namespace, state, device, only_ids(), again, pool));
    opened.inspect_err(|why| tracing::warn!(%why, "programs do not get the preload shim")).ok()
}

impl OverMount {
    fn unmounted(&self) -> rustix::io::Result<()> {
        let until = clock::tick() + if self.pooled { CALLS_END } else { Duration::ZERO };
        loop {
            match rustix::mount::unmount(&self.over, rustix::mount::UnmountFlags::empty()) {
                Err(rustix::io::Errno::BUSY) if clock::tick() < until => std::thread::sleep(Duration::from_millis(10)),
                result => return result,
            }
        }
    }
}

impl Mounted for OverMount {
    fn detach(&mut self) -> io::Result<()> {
        self.filesystem.expect_end();
        // A mapping or a descriptor that was just closed may hold the mount for an instant.
        if let Err(error) = self.unmounted() {
            if error != rustix::io::Errno::PERM {
                self.filesystem.expect_more();
                return Err(error.into());
            }
            detach(&self.over, false).map_err(|why| {
                self.filesystem.expect_more();
                io::Error::other(why)
            })?;
        }
        self.shim = None;
        self.session.stop();
        if !self.session.wait(Some(END_TIMEOUT)) {
            tracing::warn!("threads of the mount are still busy");
        }
        Ok(())
    }
}

/// The one user and group of our own user namespace; `None` if there are several.
fn only_ids() -> Option<(u32, u32)> {
    use rustix::process::{getegid, geteuid};
    let map = std::fs::read_to_string("/proc/self/uid_map").ok()?;
    let one = map.lines().count() == 1 && map.split_whitespace().nth(2) == Some("1");
    one.then(|| (geteuid().as_raw(), getegid().as_raw()))
}

/// In a user namespace of its own the agent's root is not root.
fn in_initial_user_namespace() -> bool {
    std::fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| {
        let fields: Vec<&str> = map.split_whitespace().collect();
        fields == ["0", "0", "4294967295"]
    })
}
