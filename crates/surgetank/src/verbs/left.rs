//! Inspects what a dead agent left, without its store: which files its tiers have, and which are lost.
//!
//! The danger that it avoids: trusting an earlier agent's note. Since then a tier may have been emptied or unmounted;
//! then "safe at" names a missing file.

use std::collections::HashMap;
use std::path::Path;

use surgetank_core::audit::{self, Ground};
use surgetank_core::catalog::LogCatalog;
use surgetank_core::report::{Audit, Finding, Lost, NotDurable, Proven, Verdict, What};
use surgetank_store::Cred;
use surgetank_tier::Tiers;
use surgetank_types::error::{Error, Result};
use surgetank_types::shell;

use crate::agent::commands::Commands;
use crate::agent::place::{Place, SYNCED_COPIES, StateRoot};

use super::words::count;

/// The result of inspecting a place.
pub enum Looked {
    /// Another process holds the place: an agent, or a command that inspects it. Its leftovers are not known.
    Held,
    /// No agent lives. The audit is empty if no agent ever wrote anything there.
    Dead { was_killed: bool, audit: Audit },
}

/// Changes nothing.
pub fn look(place: &Place) -> Result<Looked> {
    let Some(_dead) = place.hold_dead()? else { return Ok(Looked::Held) };
    // An agent removes its card when it ends.
    let was_killed = place.card().is_some();
    Ok(Looked::Dead { was_killed, audit: audit_of(place)? })
}

/// The caller holds the place.
fn audit_of(place: &Place) -> Result<Audit> {
    let catalog = place.path().join("catalog");
    if !catalog.exists() {
        return Ok(Audit::default());
    }
    place.await_catalog();
    let (image, recovery) = LogCatalog::look(&catalog)?;
    let Some(identity) = place.read_identity()? else { return Ok(Audit::default()) };
    let key = identity.key;
    // Devices that the catalog names are opened at their recorded paths.
    let tiers = Tiers::open(&[], &key)?;
    let who = Cred { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw() };
    let damage = recovery.damage.as_ref();
    let ground = Ground {
        image: &image,
        damage,
        tiers: &tiers,
        store: None,
        who,
        store_path: Path::new(""),
        key: &key,
        synced_copies: &place.path().join(SYNCED_COPIES),
        scrub: false,
    };
    audit::audit(&ground)
}

/// The error that says why the leftovers over `over` are not known.
pub fn held(place: &Place, over: &Path) -> Error {
    let locks = ["agent.lock", "start.lock"].map(|name| shell::word(place.path().join(name)));
    Error::new(format!("whether all of {} is in the store is not known", over.display()))
        .why(format!(
            "another process holds {}: an agent that starts or ends, or a command that looks at what is left",
            place.path().display()
        ))
        .remedy(format!(
            "ask again when that process has ended:\n  {}\nTo name it:\n  fuser {}",
            Commands::at(place, over).wait(),
            locks.join(" ")
        ))
        .data("nothing was changed")
}

pub fn lost(audit: &Audit) -> impl Iterator<Item = Lost> {
    audit.lost().map(|one| Lost { path: one.path.clone(), at: one.at.clone(), why: one.text.clone() })
}

/// The leftovers of directories without an agent, one line each.
pub fn notices(state: &Path) -> Result<Vec<String>> {
    let Some(root) = StateRoot::open_existing(state)? else { return Ok(Vec::new()) };
    let mut lines = Vec::new();
    for place in root.places()?.into_iter().filter(Place::has_left) {
        let Some(over) = place.identity().map(|identity| identity.over) else { continue };
        let audit = match look(&place)? {
            Looked::Dead { audit, .. } => audit,
            // `status` asks its agent directly.
            Looked::Held if place.is_answered() => continue,
            Looked::Held => {
                lines.push(format!("{over}  (no agent): {}", held(&place, over.as_path())));
                continue;
            }
        };
        let (lost, away, there) = (audit.lost().count(), unread(&audit).count(), audit.undrained.len());
        if lost + away + there > 0 {
            lines.push(format!(
                "{over}  (no agent): {} files are lost, {} are on tiers that are not there, {} wait on tiers for the store; to name them:\n  {}",
                count(lost as u64),
                count(away as u64),
                count(there as u64),
                Commands::at(&place, over.as_path()).fsck()
            ));
        }
    }
    Ok(lines)
}

/// Files on tiers that are absent or cannot be read.
fn unread(audit: &Audit) -> impl Iterator<Item = &Finding> {
    audit.findings.iter().filter(|one| one.what == What::Unread && !one.path.0.is_empty())
}

/// The verdict of an ended agent, corrected by the current state.
pub fn corrected(mut verdict: Verdict, audit: &Audit) -> Verdict {
    let lost: HashMap<_, _> = audit.lost().map(|one| (&one.path, one)).collect();
    let doubted = |one: &&Finding| matches!(one.what, What::Unread | What::Unproven | What::WrongSize);
    let doubted: HashMap<_, _> = audit.findings.iter().filter(doubted).map(|one| (&one.path, one)).collect();
    // A plain file that is truncated, or may be, is not safe.
    let whole = audit.undrained.iter().filter(|one| one.proven == Proven::Whole);
    let at: HashMap<_, _> = whole.map(|one| (&one.path, &one.at)).collect();
    let (listed, not_listed) = (verdict.not_durable.first.len() as u64, verdict.not_durable.more());
    verdict.not_durable.first.retain(|one| !lost.contains_key(&one.path));
    for one in &mut verdict.not_durable.first {
        if let Some(doubted) = doubted.get(&one.path) {
            one.why.clone_from(&doubted.text);
        }
        // (This does not check a temporary in the store.)
        one.safe_at = at.get(&one.path).map(|at| (*at).clone()).unwrap_or_default();
    }
    // For entries beyond the listed ones the note has only their number.
    let still_listed = verdict.not_durable.first.len() as u64;
    let new_losses = (lost.len() as u64).saturating_sub(verdict.lost.total);
    let others = new_losses.saturating_sub(listed - still_listed);
    verdict.not_durable.total = still_listed + not_listed.saturating_sub(others);
    verdict.lost = self::lost(audit).collect();
    verdict
}

/// The leftovers of an agent that was killed before it could write a verdict.
pub fn of_killed(audit: &Audit) -> Verdict {
    let away = unread(audit).map(|one| NotDurable {
        path: one.path.clone(),
        why: one.text.clone(),
        safe_at: Default::default(),
    });
    Verdict { not_durable: away.collect(), lost: lost(audit).collect(), ..Verdict::default() }
}
