//! The keys: one list for `surgetank.toml`, `SURGETANK_…` and the command line, and the parser of each value.
//!
//! The same parsers turn every source into a `Draft`, so a value has one meaning in all sources. `docs/configuration.md` has
//! a row for each key; a test compares the two.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::deadline::deadline;
use super::{Authority, Compress, KeepAtExit, Pattern, RuleConfig, TierConfig, TokenFile, Way, metrics};
use crate::words::quantity::{duration, size_bytes};
use crate::words::{ReplicasAt, mode, one_of, replicas, replicas_at};
use surgetank_store::Verify;
use surgetank_types::error::{Error, Result};
use surgetank_types::model::FsyncTarget;

pub use crate::words::nearest;

/// Keys with one value each, by their names in `surgetank.toml`.
pub const SCALARS: [&str; 28] = [
    "over",
    "store",
    "state",
    "ordered",
    "pool_ordered",
    "replicas",
    "replicas_at",
    "verify",
    "fsync",
    "copy_up_bytes_max",
    "dirty_bytes_max",
    "drain_threads",
    "drain_bytes_per_second_max",
    "store_ttl",
    "quiet",
    "sync_after",
    "retry",
    "wait_for_room",
    "grace",
    "deadline",
    "keep_at_exit",
    "direct",
    "door",
    "preload",
    "preload_skip",
    "group_socket",
    "metrics",
    "metrics_token_file",
];
/// Keys with a list.
pub const LISTS: [&str; 2] = ["tiers", "rules"];
/// Keys of one `[[tiers]]` table.
pub const TIER_KEYS: [&str; 5] = ["name", "path", "paths", "size", "survives"];
/// Keys of one `[[rules]]` table with a field of their own.
pub const RULE_KEYS: [&str; 13] = [
    "match",
    "mode",
    "timing",
    "fsync",
    "size",
    "tier",
    "prefetch",
    "pin",
    "compress",
    "dedup",
    "replicas",
    "replicas_at",
    "collocate",
];

/// All keys of such a table: also hints that are asked at operations.
pub fn rule_keys() -> impl Iterator<Item = &'static str> + Clone {
    RULE_KEYS.into_iter().chain(crate::hint::acting_names())
}

/// The place of a value (`surgetank.toml:12`, `SURGETANK_FSYNC`, `--fsync`), the base of its relative paths, and its authority.
#[derive(Debug, Clone)]
pub(crate) struct Origin {
    pub label: String,
    pub base: PathBuf,
    pub authority: Authority,
}

/// A value with its origin, for messages.
#[derive(Debug, Clone)]
pub(crate) struct Sourced<T> {
    pub value: T,
    pub origin: Origin,
}

/// The values of the sources read so far. A later source overwrites an earlier one; rules accumulate.
#[derive(Debug, Default)]
pub(crate) struct Draft {
    pub over: Option<Sourced<PathBuf>>,
    pub store: Option<Sourced<PathBuf>>,
    pub state: Option<Sourced<PathBuf>>,
    pub tiers: Option<Vec<Sourced<TierConfig>>>,
    pub rules: Vec<RuleConfig>,
    pub ordered: Option<bool>,
    pub pool_ordered: Option<bool>,
    pub replicas: Option<u32>,
    pub replicas_at: Option<ReplicasAt>,
    pub verify: Option<Verify>,
    pub fsync: Option<FsyncTarget>,
    pub copy_up_bytes_max: Option<u64>,
    pub dirty_bytes_max: Option<u64>,
    pub drain_threads: Option<usize>,
    pub drain_bytes_per_second_max: Option<u64>,
    pub store_ttl: Option<Duration>,
    pub quiet: Option<Duration>,
    pub sync_after: Option<Duration>,
    pub retry: Option<Duration>,
    pub wait_for_room: Option<Duration>,
    pub grace: Option<Duration>,
    /// Seconds since 1970; `None` inside means no deadline, whatever Slurm reports.
    pub deadline: Option<Sourced<Option<i64>>>,
    pub keep_at_exit: Option<KeepAtExit>,
    pub direct: Option<bool>,
    pub door: Option<Way>,
    pub preload: Option<bool>,
    pub preload_skip: Option<Vec<String>>,
    pub group_socket: Option<Sourced<PathBuf>>,
    /// `None` inside means that metrics are not served, whatever a weaker source says.
    pub metrics: Option<Sourced<Option<SocketAddr>>>,
    pub metrics_token_file: Option<Sourced<TokenFile>>,
}

impl Draft {
    /// Sets one of [`SCALARS`].
    pub(crate) fn set(&mut self, key: &str, text: &str, origin: &Origin) -> Result<()> {
        let refused = |why: String| refused(origin, key, &why);
        let path = |text: &str| -> Result<Option<Sourced<PathBuf>>> {
            if text.is_empty() {
                return Err(refused("the path is empty".to_owned()));
            }
            Ok(Some(Sourced { value: origin.base.join(text), origin: origin.clone() }))
        };
        match key {
            "over" => self.over = path(text)?,
            "state" => self.state = path(text)?,
            "group_socket" => self.group_socket = path(text)?,
            "metrics" => {
                let value = metrics::address(text).map_err(refused)?;
                self.metrics = Some(Sourced { value, origin: origin.clone() });
            }
            "metrics_token_file" => {
                self.metrics_token_file = match text {
                    "none" => Some(Sourced { value: TokenFile::Nobody, origin: origin.clone() }),
                    _ => path(text)?.map(|file| Sourced { value: TokenFile::File(file.value), origin: file.origin }),
                };
            }
            "store" => {
                self.store = match store_place(text).map_err(refused)? {
                    Place::Directory(text) => path(&text)?,
                    Place::Url(url) => Some(Sourced { value: url.into(), origin: origin.clone() }),
                }
            }
            "ordered" => self.ordered = Some(truth(text).map_err(refused)?),
            "pool_ordered" => self.pool_ordered = Some(truth(text).map_err(refused)?),
            "replicas" => self.replicas = Some(replicas(text).map_err(refused)?),
            "replicas_at" => self.replicas_at = Some(replicas_at(text).map_err(refused)?),
            "direct" => self.direct = Some(truth(text).map_err(refused)?),
            "door" => {
                let choices = [("auto", Way::Auto), ("fuse", Way::Fuse), ("seccomp", Way::Seccomp)];
                self.door = Some(one_of(text, &choices).map_err(refused)?);
            }
            "preload" => self.preload = Some(truth(text).map_err(refused)?),
            "preload_skip" => self.preload_skip = Some(program_names(text).map_err(refused)?),
            "verify" => {
                let choices = [("cache", Verify::Cache), ("reread", Verify::Reread)];
                self.verify = Some(one_of(text, &choices).map_err(refused)?);
            }
            "fsync" => {
                let choices = [("auto", None), ("tier", Some(FsyncTarget::Tier)), ("store", Some(FsyncTarget::Store))];
                self.fsync = one_of(text, &choices).map_err(refused)?;
            }
            "keep_at_exit" => {
                let choices = [("leave", KeepAtExit::Leave), ("drain", KeepAtExit::Drain), ("drop", KeepAtExit::Drop)];
                self.keep_at_exit = Some(one_of(text, &choices).map_err(refused)?);
            }
            "copy_up_bytes_max" => self.copy_up_bytes_max = Some(size_bytes(text).map_err(refused)?),
            "dirty_bytes_max" => self.dirty_bytes_max = Some(size_bytes(text).map_err(refused)?),
            "drain_bytes_per_second_max" => {
                self.drain_bytes_per_second_max = Some(size_bytes(text.trim_end_matches("/s")).map_err(refused)?);
            }
            "drain_threads" => match text.trim().parse() {
                Ok(threads @ 1..=256) => self.drain_threads = Some(threads),
                _ => return Err(refused(format!("'{text}' is not a number from 1 to 256"))),
            },
            "store_ttl" => self.store_ttl = Some(duration(text).map_err(refused)?),
            "quiet" => self.quiet = Some(duration(text).map_err(refused)?),
            "sync_after" => self.sync_after = Some(duration(text).map_err(refused)?),
            "retry" => self.retry = Some(duration(text).map_err(refused)?),
            "deadline" => {
                let value = deadline(text, surgetank_types::clock::now().secs()).map_err(refused)?;
                self.deadline = Some(Sourced { value, origin: origin.clone() });
            }
            "wait_for_room" => self.wait_for_room = Some(duration(text).map_err(refused)?),
            "grace" => self.grace = Some(duration(text).map_err(refused)?),
            _ => {
                return Err(unknown("key", key, &origin.label, SCALARS.iter().chain(&LISTS).copied()));
            }
        }
        Ok(())
    }
}

/// A path from the command line; its bytes need not be UTF-8.
pub(crate) fn path(path: &Path, origin: &Origin) -> Result<Sourced<PathBuf>> {
    if path.as_os_str().is_empty() {
        return Err(refused(origin, "state", "the path is empty"));
    }
    Ok(Sourced { value: origin.base.join(path), origin: origin.clone() })
}

/// The error that `what` cannot be used at this place.
pub(crate) fn refused(origin: &Origin, what: &str, why: &str) -> Error {
    let what = if origin.label.contains(what) || origin.label.contains(&what.to_uppercase()) {
        String::new()
    } else {
        format!("{what}: ")
    };
    Error::new(format!("{}: {what}{why}", origin.label))
        .remedy("correct it there; `surgetank help configuration` lists every key with its values")
}

/// The error for a list of tiers without an entry: tiers are searched for only if there is no list.
pub(crate) fn no_tiers(origin: &Origin) -> Error {
    Error::new(format!("{}: the list of tiers is empty", origin.label))
        .remedy("leave it out to have tiers found, or name one: ram=/dev/shm:4G")
}

/// The error for an unknown name, with the nearest known one.
pub(crate) fn unknown<'a>(kind: &str, name: &str, label: &str, known: impl Iterator<Item = &'a str> + Clone) -> Error {
    let error = Error::new(format!("{label}: there is no {kind} '{name}'"));
    match nearest(name, known.clone()) {
        Some(near) => error.remedy(format!("did you mean '{near}'?")),
        None => error.remedy(format!("known are: {}", known.collect::<Vec<_>>().join(", "))),
    }
}

fn truth(text: &str) -> std::result::Result<bool, String> {
    one_of(
        text,
        &[
            ("true", true),
            ("false", false),
            ("yes", true),
            ("no", false),
            ("on", true),
            ("off", false),
            ("1", true),
            ("0", false),
        ],
    )
}

/// Parses `none`, `zstd` or `zstd:LEVEL`.
pub(crate) fn compress(text: &str) -> std::result::Result<Compress, String> {
    let wrong = || format!("'{text}' is none of none, zstd, zstd:1 to zstd:19");
    match text.split_once(':') {
        None if text == "none" => Ok(Compress::None),
        None if text == "zstd" => Ok(Compress::Zstd(1)),
        Some(("zstd", level)) => match level.parse() {
            Ok(level @ 1..=19) => Ok(Compress::Zstd(level)),
            _ => Err(wrong()),
        },
        _ => Err(wrong()),
    }
}

/// Names of programs, as `ps` shows them.
fn program_names(text: &str) -> std::result::Result<Vec<String>, String> {
    let names: Vec<String> =
        text.split([',', ':']).map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect();
    match names.iter().find(|name| name.contains('/')) {
        Some(path) => Err(format!("'{path}' is a path; give the program's name alone")),
        None => Ok(names),
    }
}

/// Schemes of stores that are not directories.
pub(super) const STORE_SCHEMES: &[&str] = &[
    #[cfg(feature = "s3")]
    "s3",
    #[cfg(feature = "gridfs")]
    "mongodb",
    #[cfg(feature = "redis")]
    "redis",
    #[cfg(feature = "redis")]
    "rediss",
    #[cfg(feature = "webhdfs")]
    "webhdfs",
];

enum Place {
    Directory(String),
    #[allow(dead_code, reason = "in a build without drivers of servers every store is a directory")]
    Url(String),
}

/// The path of a `file:` URL, or the path itself; any other URL is returned unchanged.
fn store_place(text: &str) -> std::result::Result<Place, String> {
    let Some((scheme, rest)) = text.split_once("://") else {
        return match text.strip_prefix("file:") {
            Some(path) => decoded(path).map(Place::Directory),
            None => Ok(Place::Directory(text.to_owned())),
        };
    };
    match (scheme, rest.strip_prefix("localhost").unwrap_or(rest)) {
        ("file", path) if path.starts_with('/') => decoded(path).map(Place::Directory),
        ("file", _) => Err(format!("'{text}' names a host; a file URL has three slashes: file:///path")),
        #[cfg(feature = "s3")]
        ("s3", _) => understood(text, surgetank_store::s3::Place::parse(text).map(drop)),
        #[cfg(feature = "gridfs")]
        ("mongodb", _) => understood(text, surgetank_store::gridfs::Place::parse(text).map(drop)),
        #[cfg(feature = "redis")]
        ("redis" | "rediss", _) => understood(text, surgetank_store::redis::Place::parse(text).map(drop)),
        #[cfg(feature = "webhdfs")]
        ("webhdfs", _) => understood(text, surgetank_store::webhdfs::Place::parse(text).map(drop)),
        _ => {
            let known: Vec<String> = STORE_SCHEMES.iter().map(|known| format!("{known}://…, ")).collect();
            let known = known.concat();
            Err(format!(
                "stores of the kind '{scheme}:' are not in this build; use {known}file:///path or a plain path"
            ))
        }
    }
}

#[cfg(any(feature = "gridfs", feature = "redis", feature = "s3", feature = "webhdfs"))]
fn understood(url: &str, parsed: surgetank_types::error::Result<()>) -> std::result::Result<Place, String> {
    let as_failure = |Error { what, why, remedy, .. }: Error| {
        [what, why, remedy].into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("; ")
    };
    parsed.map(|()| Place::Url(url.to_owned())).map_err(as_failure)
}

/// Decodes `%20` and the like.
fn decoded(path: &str) -> std::result::Result<String, String> {
    let mut bytes = Vec::with_capacity(path.len());
    let mut rest = path.as_bytes();
    while let [byte, tail @ ..] = rest {
        rest = tail;
        if *byte != b'%' {
            bytes.push(*byte);
            continue;
        }
        let value = tail
            .get(..2)
            .and_then(|hex| std::str::from_utf8(hex).ok())
            .and_then(|hex| u8::from_str_radix(hex, 16).ok());
        let value = value.ok_or_else(|| {
            format!("'{path}' has a '%' that is not followed by two hexadecimal digits (a '%' itself is written %25)")
        })?;
        bytes.push(value);
        rest = &tail[2..];
    }
    String::from_utf8(bytes).map_err(|_| format!("'{path}' is not UTF-8; give it as a plain path"))
}

/// Parses `NAME=PATH[,PATH…][:SIZE]`.
pub(crate) fn tier(text: &str, origin: &Origin) -> Result<Sourced<TierConfig>> {
    let shape = |why: &str| {
        refused(
            origin,
            "tier",
            &format!("'{text}' {why}; a tier is NAME=PATH[,PATH…][:SIZE], for example ram=/dev/shm:4G"),
        )
    };
    let (name, rest) = text.split_once('=').ok_or_else(|| shape("has no '='"))?;
    let (paths, cap_bytes) = match rest.rsplit_once(':') {
        Some((paths, size)) if !size.contains('/') => {
            (paths, Some(size_bytes(size).map_err(|why| refused(origin, "tier", &format!("'{text}': {why}")))?))
        }
        _ => (rest, None),
    };
    let paths: Vec<PathBuf> =
        paths.split(',').map(str::trim).filter(|path| !path.is_empty()).map(|path| origin.base.join(path)).collect();
    if paths.is_empty() {
        return Err(shape("has no path"));
    }
    let name = tier_name(name.trim(), origin)?;
    Ok(Sourced { value: TierConfig { name, paths, cap_bytes, survives: None }, origin: origin.clone() })
}

pub(crate) fn tier_name(name: &str, origin: &Origin) -> Result<String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_' || c == '.';
    if name.is_empty() || name.len() > 64 || !name.chars().all(plain) || name == "store" {
        return Err(refused(
            origin,
            "tier",
            &format!("'{name}' can't be a tier's name; use letters, digits, '-', '_' and '.', and not 'store'"),
        ));
    }
    Ok(name.to_owned())
}

/// Parses `GLOB=keep|copy|move|remove`.
pub(crate) fn rule(text: &str, origin: &Origin) -> Result<RuleConfig> {
    let (pattern, mode_text) = text.rsplit_once('=').ok_or_else(|| {
        refused(
            origin,
            "rule",
            &format!("'{text}' has no '='; a rule is GLOB=keep|copy|move|remove, for example '*.tmp=remove'"),
        )
    })?;
    let mode = mode(mode_text).map_err(|why| refused(origin, "rule", &format!("'{text}': {why}")))?;
    Ok(RuleConfig { mode: Some(mode), ..empty_rule(Pattern::Glob(pattern.to_owned()), origin) })
}

/// A rule that sets nothing yet.
pub(crate) fn empty_rule(pattern: Pattern, origin: &Origin) -> RuleConfig {
    RuleConfig::empty(pattern, origin.authority, &*origin.label)
}

/// The entries of a list in one environment variable.
pub(crate) fn pieces(text: &str) -> impl Iterator<Item = &str> {
    text.split(';').map(str::trim).filter(|piece| !piece.is_empty())
}

/// Replaces values of `draft` by those of `upper`, and appends its rules.
pub(crate) fn overlay(draft: &mut Draft, upper: Draft) {
    let Draft {
        over,
        store,
        state,
        tiers,
        rules,
        ordered,
        pool_ordered,
        replicas,
        replicas_at,
        verify,
        fsync,
        copy_up_bytes_max,
        dirty_bytes_max,
        drain_threads,
        drain_bytes_per_second_max,
        store_ttl,
        quiet,
        sync_after,
        retry,
        wait_for_room,
        grace,
        deadline,
        keep_at_exit,
        direct,
        door,
        preload,
        preload_skip,
        group_socket,
        metrics,
        metrics_token_file,
    } = upper;
    fn put<T>(slot: &mut Option<T>, value: Option<T>) {
        if value.is_some() {
            *slot = value;
        }
    }
    put(&mut draft.over, over);
    put(&mut draft.store, store);
    put(&mut draft.state, state);
    put(&mut draft.tiers, tiers);
    draft.rules.extend(rules);
    put(&mut draft.ordered, ordered);
    put(&mut draft.pool_ordered, pool_ordered);
    put(&mut draft.replicas, replicas);
    put(&mut draft.replicas_at, replicas_at);
    put(&mut draft.verify, verify);
    put(&mut draft.fsync, fsync);
    put(&mut draft.copy_up_bytes_max, copy_up_bytes_max);
    put(&mut draft.dirty_bytes_max, dirty_bytes_max);
    put(&mut draft.drain_threads, drain_threads);
    put(&mut draft.drain_bytes_per_second_max, drain_bytes_per_second_max);
    put(&mut draft.store_ttl, store_ttl);
    put(&mut draft.quiet, quiet);
    put(&mut draft.sync_after, sync_after);
    put(&mut draft.retry, retry);
    put(&mut draft.wait_for_room, wait_for_room);
    put(&mut draft.grace, grace);
    put(&mut draft.deadline, deadline);
    put(&mut draft.keep_at_exit, keep_at_exit);
    put(&mut draft.direct, direct);
    put(&mut draft.door, door);
    put(&mut draft.preload, preload);
    put(&mut draft.preload_skip, preload_skip);
    put(&mut draft.group_socket, group_socket);
    put(&mut draft.metrics, metrics);
    put(&mut draft.metrics_token_file, metrics_token_file);
}
