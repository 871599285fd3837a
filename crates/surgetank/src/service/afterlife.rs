//! Keeps the mount alive beyond its agent. The supervisor holds its descriptor and clones. Surviving memory holds what
//! the agent and the kernel agreed on. The next agent continues to serve from these.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use surgetank_core::handoff::Record;
use surgetank_core::namespace::{Keeper, Request, Survival};
use surgetank_types::error::Result;

use crate::agent::engine::Afterlife;
use crate::mount::{Agreed, Filesystem, Kept, Options, Session};

const DEVICE: &str = "device";
const CLONE: &str = "clone-";
const AGREED: &str = "agreed";

/// The number of agents before this one: requests of threads of different agents must not be confused.
static LIFE: AtomicU64 = AtomicU64::new(0);
/// No worker pool has more threads than this.
const SLOTS: u64 = 1 << 16;

/// The request that this thread serves.
pub fn request() -> Option<Request> {
    let of_shim = || crate::shimdoor::current().map(|(slot, number)| (SLOTS / 2 + slot, number));
    let of_member = || crate::pool::router::numbered_request().map(|(slot, number)| (SLOTS / 4 * 3 + slot, number));
    let of_kernel = crate::mount::current().map(|current| (current.slot, current.number));
    let (slot, number) = of_kernel.or_else(of_shim).or_else(of_member)?;
    Some(Request { slot: LIFE.load(Ordering::Relaxed) * SLOTS + slot, number })
}

pub struct Mount {
    afterlife: Option<Afterlife>,
    device: Option<OwnedFd>,
    clones: Vec<OwnedFd>,
}

impl Mount {
    pub fn of(afterlife: Option<Afterlife>) -> Self {
        let mut mount = Self { afterlife, device: None, clones: Vec::new() };
        if let Some(afterlife) = &mut mount.afterlife {
            LIFE.store(afterlife.life.into(), Ordering::Relaxed);
            mount.device = afterlife.kept.remove(DEVICE);
            let clones = afterlife.kept.split_off(CLONE);
            let mut others = BTreeMap::new();
            for (name, file) in clones {
                if name.starts_with(CLONE) {
                    mount.clones.push(file);
                } else {
                    others.insert(name, file);
                }
            }
            afterlife.kept.append(&mut others);
        }
        mount
    }

    pub fn is_supervised(&self) -> bool {
        self.afterlife.is_some()
    }

    /// An earlier agent served the mount, and was killed.
    pub fn is_another(&self) -> bool {
        self.afterlife.as_ref().is_some_and(|afterlife| afterlife.life > 0)
    }

    /// Holds descriptors and facts that have to outlive an agent.
    pub fn keeper(&self) -> Option<&dyn Keeper> {
        self.afterlife.as_ref().map(|afterlife| &*afterlife.channel as &dyn Keeper)
    }

    pub fn survival(&mut self) -> Survival {
        let again = self.is_another();
        let Some(afterlife) = &mut self.afterlife else { return Survival::default() };
        let kept: HashMap<String, File> =
            std::mem::take(&mut afterlife.kept).into_iter().map(|(name, file)| (name, file.into())).collect();
        Survival {
            handoff: Some(Arc::clone(&afterlife.handoff)),
            keeper: Some(Arc::clone(&afterlife.channel) as Arc<dyn Keeper>),
            kept,
            again,
            ..Survival::default()
        }
    }

    /// Serves the mount: a fresh one, or one whose agent was killed. The outer error is from mounting.
    pub fn serve<F: Filesystem>(
        &mut self,
        attach: impl FnOnce() -> Result<OwnedFd>,
        filesystem: &Arc<F>,
        options: &Options,
    ) -> Result<io::Result<Session>> {
        let Some(afterlife) = &self.afterlife else {
            return Ok(Session::start(attach()?, filesystem, options));
        };
        let channel = Arc::clone(&afterlife.channel);
        let next = AtomicU64::new(0);
        let life = afterlife.life;
        let on_clone = Box::new(move |clone: std::os::fd::BorrowedFd<'_>| {
            let number = next.fetch_add(1, Ordering::Relaxed);
            channel.keep(&format!("{CLONE}{life}-{number}"), clone).is_ok()
        });
        let kept = Kept { clones: std::mem::take(&mut self.clones), on_clone: Some(on_clone) };
        if let Some(device) = self.device.take() {
            let agreed = afterlife.handoff.left().facts.get(AGREED).and_then(|text| serde_json::from_slice(text).ok());
            let Some(agreed): Option<Agreed> = agreed else {
                return Ok(Err(io::Error::other("the earlier agent did not say what it agreed on with the kernel")));
            };
            return Ok(Session::take_over(device, filesystem, options, kept, agreed));
        }
        let device = attach()?;
        if let Err(error) = afterlife.channel.keep(DEVICE, device.as_fd()) {
            tracing::warn!(%error, "the mount would not survive this agent");
        }
        let session = Session::start_kept(device, filesystem, options, kept);
        if let Ok(session) = &session
            && let Ok(value) = serde_json::to_vec(session.agreed())
        {
            afterlife.handoff.put(&Record::Fact { name: AGREED, value: &value });
        }
        Ok(session)
    }
}
