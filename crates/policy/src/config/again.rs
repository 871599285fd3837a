//! The options with which a later command means the same directory, store, tiers and state: from any working directory, with
//! any environment.
//!
//! Values of a file that is found again (`surgetank.toml` in the directory, the site's) are left out.
//! The danger that it avoids: advice without `--store`, which brings files to another store than their own.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::Surroundings;
use super::key::Draft;
use super::{Authority, Config, KeepAtExit, Overrides, Pattern, RuleConfig, TierConfig, load};
use crate::words::{ReplicasAt, mode_name};
use surgetank_store::Verify;

pub(super) const STORE: &str = "--store";

/// What the resolved configuration alone does not contain.
pub(super) struct Sources<'a> {
    /// A file that the user named, or that a variable found.
    pub file: Option<&'a Path>,
    pub says_store: bool,
    /// The tiers of the command line or of a variable.
    pub tiers: Option<&'a [TierConfig]>,
}

/// The tiers of the draft, unless a file that is found again names them.
pub(super) fn said_tiers(draft: &Draft) -> Option<Vec<TierConfig>> {
    let given = draft.tiers.as_ref()?;
    let by_people = given.iter().all(|tier| tier.origin.authority == Authority::CommandLine);
    by_people.then(|| given.iter().map(|tier| tier.value.clone()).collect())
}

/// The options, except `--over`.
pub(super) fn options(config: &Config, sources: &Sources<'_>, around: &Surroundings) -> Vec<OsString> {
    let mut words = state(&config.state, around);
    let mut add = |option: &str, value: OsString| words.extend([option.into(), value]);
    if let Some(file) = sources.file {
        add("--config", file.into());
    }
    if sources.says_store || config.store != config.over {
        add(STORE, config.store.clone().into());
    }
    for tier in sources.tiers.unwrap_or_default() {
        add("--tier", tier_text(tier));
    }
    for rule in config.rules.iter().filter(|rule| rule.authority == Authority::CommandLine) {
        if let Some(text) = rule_text(rule) {
            add("--rule", text.into());
        }
    }
    match config.keep_at_exit {
        KeepAtExit::Leave => {}
        KeepAtExit::Drain => add("--keep-at-exit", "drain".into()),
        KeepAtExit::Drop => add("--keep-at-exit", "drop".into()),
    }
    if config.verify == Verify::Reread {
        add("--verify", "reread".into());
    }
    if !config.ordered {
        add("--ordered", "false".into());
    }
    if config.pool_ordered {
        add("--pool-ordered", "true".into());
    }
    if config.replicas > 1 {
        add("--replicas", config.replicas.to_string().into());
    }
    if config.replicas_at == ReplicasAt::Close {
        add("--replicas-at", "close".into());
    }
    words
}

/// The option for this state; empty if every command finds it without.
pub(super) fn state(state: &Path, around: &Surroundings) -> Vec<OsString> {
    let found = load::state_root(&Overrides::default(), around).is_ok_and(|found| found == state);
    if found && usual_state(around) == state { Vec::new() } else { vec!["--state".into(), state.into()] }
}

pub(super) fn usual_state(around: &Surroundings) -> PathBuf {
    load::physical(Path::new(&format!("/var/tmp/surgetank-{}", around.uid)))
}

/// `NAME=PATH[,PATH…][:SIZE]`
fn tier_text(tier: &TierConfig) -> OsString {
    let mut text = OsString::from(format!("{}=", tier.name));
    for (index, path) in tier.paths.iter().enumerate() {
        if index > 0 {
            text.push(",");
        }
        text.push(path);
    }
    if let Some(bytes) = tier.cap_bytes {
        let units = [(30, "G"), (20, "M"), (10, "K")];
        let unit = units.into_iter().find(|(shift, _)| bytes > 0 && bytes % (1 << shift) == 0);
        let (shift, name) = unit.unwrap_or((0, ""));
        text.push(format!(":{}{name}", bytes >> shift));
    }
    text
}

/// `GLOB=MODE`; a rule of the command line has no other form.
fn rule_text(rule: &RuleConfig) -> Option<String> {
    match (&rule.pattern, rule.mode) {
        (Pattern::Glob(glob), Some(mode)) => Some(format!("{glob}={}", mode_name(mode))),
        _ => None,
    }
}
