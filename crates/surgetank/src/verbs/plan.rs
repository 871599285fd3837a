//! `surgetank plan`: shows what Surgetank would do with a tree, without doing it.
//!
//! It walks the directory, or the store on a server, once and keeps only sums for each rule. So a million files need no
//! more memory than ten. It reads names and sizes, opens no file and changes nothing. It omits other mounts below the
//! directory, as the mount would.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::{self, BufWriter, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;
use surgetank_policy::config::machine::Machine;
use surgetank_policy::config::quantity::show_bytes;
use surgetank_policy::config::{Config, Loaded, Survives, Timing};
use surgetank_policy::rule::{Decision, RuleSet, mode_name};
use surgetank_store::StorePath;
use surgetank_types::error::{Error, Result};
use surgetank_types::model::{Kind, Mode, STORE_TEMPORARY_PREFIX};

use super::settings::Settings;
use crate::service::stores::Seen;

/// Names shown for each rule.
const NAMES_SHOWN: usize = 3;

/// Show what would happen to the files of a directory, without doing it
#[derive(Debug, Clone, Default, Args)]
pub struct PlanArgs {
    #[command(flatten)]
    pub settings: Settings,
    /// Show every file with what happens to it and why
    #[arg(long)]
    pub files: bool,
    /// Write JSON: one object, after one line for each file with --files
    #[arg(long)]
    pub json: bool,
}

/// Returns exit code 0, or 1 if parts of the tree could not be read.
pub fn run(args: PlanArgs) -> Result<u8> {
    let loaded = Config::load(&args.settings.overrides())?;
    let mut out = BufWriter::new(io::stdout().lock());
    let unread = plan(&loaded, args.files, args.json, &mut out)
        .and_then(|unread| out.flush().map(|()| unread))
        .or_else(|error| if error.kind() == io::ErrorKind::BrokenPipe { Ok(0) } else { Err(error) })
        .map_err(|error| Error::new("the plan can't be written").why(error))?;
    Ok(u8::from(unread > 0))
}

/// The sum for one kind of decision.
#[derive(Debug, Default)]
struct Sum {
    files: u64,
    bytes: u64,
    names: Vec<String>,
}

#[derive(Debug, Default)]
struct Tree {
    /// By (mode, drained last, rule's position), which is the display order.
    sums: BTreeMap<(u8, bool, Option<usize>), (DecisionKey, Sum)>,
    prefetch: Sum,
    pinned: Sum,
    directories: u64,
    others: u64,
    bypassed: Vec<PathBuf>,
    unread: Vec<String>,
    unread_count: u64,
}

/// The part of a decision that a sum represents.
#[derive(Debug)]
struct DecisionKey {
    mode: Mode,
    timing: Timing,
    why: String,
}

/// Returns the number of directories and files that could not be read.
fn plan(loaded: &Loaded, each_file: bool, as_json: bool, out: &mut impl Write) -> io::Result<u64> {
    let config = &loaded.config;
    let rules = RuleSet::new(&config.rules).map_err(io::Error::other)?;
    let tree = walk(config, &rules, |path, size, decision| {
        if !each_file {
            return Ok(());
        }
        let why = rules.why(decision.reason);
        if as_json {
            let line = json!({
                "path": String::from_utf8_lossy(path), "bytes": size, "mode": mode_name(decision.mode),
                "last": decision.timing == Timing::Last, "prefetch": decision.prefetch, "pin": decision.pin,
                "tier": decision.tier.as_deref(), "why": why,
            });
            writeln!(out, "{line}")
        } else {
            writeln!(out, "{:6} {:>10}  {}  ({why})", mode_name(decision.mode), show_bytes(size), printable(path))
        }
    })?;
    if as_json {
        write_json(loaded, &tree, out)?
    } else {
        write_text(loaded, &tree, out)?
    }
    Ok(tree.unread_count)
}

fn walk(
    config: &Config,
    rules: &RuleSet,
    mut file: impl FnMut(&[u8], u64, &Decision) -> io::Result<()>,
) -> io::Result<Tree> {
    // Packed files have other names and sizes in the store than programs see.
    if config.store_url().is_some() || rules.compresses() || rules.deduplicates() {
        return walk_store(config, rules, file);
    }
    let mut tree = Tree::default();
    let mounts = mounts_below(&config.over);
    let top = if config.store == config.over { &config.over } else { &config.store };
    // One open directory per level, and no list of names.
    let mut open = Vec::new();
    let mut path: Vec<u8> = Vec::new();
    enter(top, &path, &mut open, &mut tree);
    while let Some((entries, parent_len)) = open.last_mut() {
        let parent_len: usize = *parent_len;
        let Some(entry) = entries.next() else {
            open.pop();
            continue;
        };
        path.truncate(parent_len);
        let entry = match entry {
            Ok(entry) => entry,
            Err(error) => {
                tree.miss(&path, &error);
                continue;
            }
        };
        let name = entry.file_name();
        if name.as_bytes().starts_with(STORE_TEMPORARY_PREFIX) {
            continue;
        }
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(name.as_bytes());
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => {
                let full = entry.path();
                if mounts.contains(&full) {
                    tree.bypassed.push(full);
                } else {
                    enter(&full, &path, &mut open, &mut tree);
                }
            }
            Ok(kind) if kind.is_file() => match entry.metadata() {
                Ok(metadata) => {
                    let decision = rules.decide(&path);
                    tree.count(&path, metadata.len(), &decision, rules);
                    file(&path, metadata.len(), &decision)?;
                }
                Err(error) => tree.miss(&path, &error),
            },
            Ok(_) => tree.others += 1,
            Err(error) => tree.miss(&path, &error),
        }
    }
    Ok(tree)
}

fn mounts_below(over: &Path) -> Vec<PathBuf> {
    let mounts = Machine::default().mounts().into_iter().map(|mount| mount.at);
    mounts.filter(|at| at != over && at.starts_with(over)).collect()
}

/// Walks the store as programs would see it.
fn walk_store(
    config: &Config,
    rules: &RuleSet,
    mut file: impl FnMut(&[u8], u64, &Decision) -> io::Result<()>,
) -> io::Result<Tree> {
    let mut tree = Tree::default();
    let seen = Seen::open(config).map_err(io::Error::other)?;
    let mounts = if config.store == config.over { mounts_below(&config.over) } else { Vec::new() };
    let mut waiting = vec![StorePath::root()];
    while let Some(dir) = waiting.pop() {
        let mut entries = match seen.store.list(seen.who, &dir, false) {
            Ok(entries) => entries,
            Err(error) => {
                tree.miss(&dir.0, &error);
                continue;
            }
        };
        tree.directories += 1;
        entries.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        let below = waiting.len();
        for entry in entries {
            let path = dir.join(&entry.name);
            match entry.kind {
                Kind::Directory => match config.over.join(OsStr::from_bytes(&path.0)) {
                    full if mounts.contains(&full) => tree.bypassed.push(full),
                    _ => waiting.push(path),
                },
                Kind::File => match seen.store.glance(seen.who, &path) {
                    Ok(there) => {
                        let decision = rules.decide(&path.0);
                        tree.count(&path.0, there.attr.size_bytes, &decision, rules);
                        file(&path.0, there.attr.size_bytes, &decision)?;
                    }
                    Err(error) => tree.miss(&path.0, &error),
                },
                _ => tree.others += 1,
            }
        }
        waiting[below..].reverse();
    }
    Ok(tree)
}

fn enter(full: &Path, path: &[u8], open: &mut Vec<(fs::ReadDir, usize)>, tree: &mut Tree) {
    match fs::read_dir(full) {
        Ok(entries) => {
            tree.directories += 1;
            open.push((entries, path.len()));
        }
        Err(error) => tree.miss(path, &error),
    }
}

impl Tree {
    fn miss(&mut self, path: &[u8], error: &io::Error) {
        self.unread_count += 1;
        if self.unread.len() < NAMES_SHOWN {
            self.unread.push(format!("{}: {error}", printable(path)));
        }
    }

    fn count(&mut self, path: &[u8], size: u64, decision: &Decision, rules: &RuleSet) {
        let order = match decision.mode {
            Mode::Copy => 0,
            Mode::Move => 1,
            Mode::Keep => 2,
            Mode::Remove => 3,
        };
        let key = (order, decision.timing == Timing::Last, decision.reason.rule());
        let (_, sum) = self.sums.entry(key).or_insert_with(|| {
            let shown = DecisionKey { mode: decision.mode, timing: decision.timing, why: rules.why(decision.reason) };
            (shown, Sum::default())
        });
        sum.add(path, size);
        if decision.prefetch {
            self.prefetch.add(path, size);
        }
        if decision.pin {
            self.pinned.add(path, size);
        }
    }
}

impl Sum {
    fn add(&mut self, path: &[u8], size: u64) {
        self.files += 1;
        self.bytes = self.bytes.saturating_add(size);
        if self.names.len() < NAMES_SHOWN {
            self.names.push(printable(path));
        }
    }

    fn sample(&self) -> String {
        let more = if self.files > self.names.len() as u64 { ", …" } else { "" };
        format!("{}{more}", self.names.join(", "))
    }

    fn json(&self) -> serde_json::Value {
        json!({ "files": self.files, "bytes": self.bytes, "first": self.names })
    }
}

/// A path for people: control characters and bytes that are not UTF-8 become visible.
fn printable(path: &[u8]) -> String {
    OsStr::from_bytes(path).to_string_lossy().chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// A path for JSON, which allows only UTF-8.
fn lossy(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

fn survives_name(survives: Option<Survives>) -> &'static str {
    match survives {
        Some(Survives::Agent) | None => "survives the agent, not a reboot",
        Some(Survives::Reboot) => "survives a reboot",
        Some(Survives::Node) => "survives the loss of the node",
    }
}

fn write_text(loaded: &Loaded, tree: &Tree, out: &mut impl Write) -> io::Result<()> {
    let config = &loaded.config;
    writeln!(out, "directory  {}", config.over.display())?;
    writeln!(out, "store      {}", config.store.display())?;
    for (at, tier) in config.tiers.iter().enumerate() {
        let paths: Vec<String> = tier.paths.iter().map(|path| path.display().to_string()).collect();
        writeln!(
            out,
            "tier {:<5} {} {}  up to {}, {}",
            at + 1,
            tier.name,
            paths.join(", "),
            show_bytes(tier.cap_bytes.unwrap_or(0)),
            survives_name(tier.survives)
        )?;
    }
    writeln!(out, "\nWhat is written under these names:")?;
    writeln!(out, "{:<12} {:>9} {:>11}  by which rule; for example", "", "files", "bytes")?;
    for (shown, sum) in tree.sums.values() {
        let mode = format!("{}{}", mode_name(shown.mode), if shown.timing == Timing::Last { ", last" } else { "" });
        writeln!(out, "{mode:<12} {:>9} {:>11}  {}; {}", sum.files, show_bytes(sum.bytes), shown.why, sum.sample())?;
    }
    if tree.sums.is_empty() {
        writeln!(out, "no files yet; everything is copied unless a rule says otherwise")?;
    }
    if tree.prefetch.files > 0 {
        let room: u64 = config.tiers.iter().filter_map(|tier| tier.cap_bytes).fold(0, u64::saturating_add);
        writeln!(
            out,
            "\nPrefetched: {} files, {} ({})",
            tree.prefetch.files,
            show_bytes(tree.prefetch.bytes),
            tree.prefetch.sample()
        )?;
        if tree.prefetch.bytes > room {
            writeln!(out, "  more than the tiers hold ({}): the last of them stay in the store", show_bytes(room))?;
        }
    }
    if tree.pinned.files > 0 {
        writeln!(
            out,
            "Pinned: {} files, {} ({})",
            tree.pinned.files,
            show_bytes(tree.pinned.bytes),
            tree.pinned.sample()
        )?;
    }
    for path in &tree.bypassed {
        writeln!(out, "bypassed: {} is a mount of its own", path.display())?;
    }
    if tree.unread_count > 0 {
        writeln!(out, "NOT read: {} ({})", tree.unread_count, tree.unread.join("; "))?;
    }
    for note in &loaded.notes {
        writeln!(out, "note: {note}")?;
    }
    Ok(())
}

fn write_json(loaded: &Loaded, tree: &Tree, out: &mut impl Write) -> io::Result<()> {
    let sums: Vec<_> = tree
        .sums
        .values()
        .map(|(shown, sum)| {
            json!({
                "mode": mode_name(shown.mode), "last": shown.timing == Timing::Last, "why": shown.why,
                "files": sum.files, "bytes": sum.bytes, "first": sum.names,
            })
        })
        .collect();
    let tiers: Vec<_> = loaded
        .config
        .tiers
        .iter()
        .map(|tier| {
            json!({
                "name": tier.name, "paths": tier.paths.iter().map(|path| lossy(path)).collect::<Vec<_>>(),
                "cap_bytes": tier.cap_bytes, "survives": tier.survives,
            })
        })
        .collect();
    let whole = json!({
        "over": lossy(&loaded.config.over), "store": lossy(&loaded.config.store), "tiers": tiers, "rules": sums,
        "prefetch": tree.prefetch.json(), "pinned": tree.pinned.json(), "directories": tree.directories,
        "other": tree.others, "bypassed": tree.bypassed.iter().map(|path| lossy(path)).collect::<Vec<_>>(), "unread": tree.unread_count, "unread_first": tree.unread,
        "notes": loaded.notes,
    });
    writeln!(out, "{whole}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use surgetank_policy::config::Overrides;

    /// A tree with its own rules; returns what `plan` prints.
    fn planned(build: impl Fn(&Path), rules: &[&str], each_file: bool, as_json: bool) -> (String, u64) {
        let dir = tempfile::tempdir().expect("tempdir");
        let (over, tier) = (dir.path().join("over"), dir.path().join("tier"));
        fs::create_dir(&over).expect("mkdir");
        fs::create_dir(&tier).expect("mkdir");
        build(&over);
        let overrides = Overrides {
            over: Some(over),
            tiers: vec![format!("fast={}:64M", tier.display())],
            rules: rules.iter().map(|rule| (*rule).to_owned()).collect(),
            ..Overrides::default()
        };
        let loaded = Config::load(&overrides).expect("load");
        let mut out = Vec::new();
        let unread = plan(&loaded, each_file, as_json, &mut out).expect("plan");
        (String::from_utf8(out).expect("utf-8"), unread)
    }

    fn tree(over: &Path) {
        for name in ["a.nii", "b.tmp", "sub/c.nii", "sub/d.tmp", "sub/deep/e", ".git/x", "input/f", ".surgetank-tmp-1"]
        {
            let path = over.join(name);
            fs::create_dir_all(path.parent().expect("parent")).expect("mkdir");
            fs::write(path, [0u8; 100]).expect("write");
        }
        fs::write(over.join(OsStr::from_bytes(b"odd\xff\n.nii")), [0u8; 100]).expect("write");
        std::os::unix::fs::symlink("/", over.join("link")).expect("symlink");
        fs::write(over.join(".sea_prefetchlist"), "input/.*\n").expect("write");
    }

    #[test]
    fn sums_by_rule() {
        let (text, unread) = planned(tree, &["*.tmp=remove", "*.nii=move"], false, true);
        let whole: serde_json::Value = serde_json::from_str(&text).expect("json");
        let sums: Vec<(String, bool, u64, u64)> = whole["rules"]
            .as_array()
            .expect("rules")
            .iter()
            .map(|sum| {
                let number = |key: &str| sum[key].as_u64().expect("number");
                (sum["mode"].as_str().expect("mode").to_owned(), sum["last"] == true, number("files"), number("bytes"))
            })
            .collect();
        let of = |mode: &str, last, files, bytes| (mode.to_owned(), last, files, bytes);
        assert_eq!(
            sums,
            [
                of("copy", false, 3, 209),
                of("copy", true, 1, 100),
                of("move", false, 3, 300),
                of("remove", false, 2, 200)
            ]
        );
        assert_eq!((whole["prefetch"]["files"].as_u64(), whole["other"].as_u64(), unread), (Some(1), Some(1), 0));
        assert_eq!(whole["tiers"][0]["name"], "fast");
    }

    #[test]
    fn each_file_is_listed_with_its_reason() {
        let (text, _) = planned(tree, &["*.tmp=remove"], true, true);
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).expect("json")).collect();
        assert_eq!(lines.len(), 9 + 1);
        let removed = lines.iter().find(|line| line["path"] == "sub/d.tmp").expect("the file");
        assert_eq!((&removed["mode"], &removed["why"]), (&"remove".into(), &"rule '*.tmp=remove' (--rule)".into()));
        assert!(!text.contains("surgetank-tmp"), "our own temporaries are hidden");
        let (text, _) = planned(tree, &["*.tmp=remove"], true, false);
        assert!(text.lines().any(|line| line.starts_with("remove") && line.contains("sub/d.tmp")), "{text}");
        assert!(text.contains("odd\u{fffd}\u{fffd}.nii"), "{text}");
    }

    #[test]
    fn empty_tree_is_not_an_error() {
        let (text, unread) = planned(|_| {}, &[], false, false);
        assert!(text.contains("no files yet") && text.contains("fast"), "{text}");
        assert_eq!(unread, 0);
    }
}
