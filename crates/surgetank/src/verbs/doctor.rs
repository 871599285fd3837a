//! `surgetank doctor`: reports what this machine can do, which door a run uses and why, and how to fix what is missing.
//!
//! Each check tries the real operation and leaves no trace. Namespaces and mounts are tried in a child that ends at
//! once; files in tiers are removed again. `--clean` removes what killed agents left in shared memory. The code of
//! `surgetank run` itself (`agent/way`) decides whether `run` works with this configuration. Exit code 0 if it does, 1
//! if not.

mod door;
mod finding;
mod leftovers;
mod probe;

use std::io::{self, BufWriter, Write};
use std::path::Path;

use clap::Args;
use surgetank_policy::config::machine::Machine;
use surgetank_policy::config::quantity::show_bytes;
use surgetank_policy::config::{Config, Loaded, Survives, TierConfig};
use surgetank_types::error::{Error, Result};

use super::settings::Settings;
use crate::agent::life::log_filter;
use crate::service::stores::Address;
use finding::{Finding, Verdict};

/// Say what this machine can do, and what to do about what it can't
#[derive(Debug, Clone, Default, Args)]
pub struct DoctorArgs {
    #[command(flatten)]
    pub settings: Settings,
    /// Also measure the speed of each tier and of the store
    #[arg(long)]
    pub measure: bool,
    /// Also remove leftovers of killed agents from shared memory
    #[arg(long)]
    pub clean: bool,
    /// Write JSON
    #[arg(long)]
    pub json: bool,
}

/// Exit code 0 if `run` would work, 1 if not.
pub fn run(args: DoctorArgs) -> Result<u8> {
    let findings = examine(&args);
    let works = findings.iter().all(|finding| finding.verdict != Verdict::Bad);
    let mut out = BufWriter::new(io::stdout().lock());
    let written =
        if args.json { write_json(&findings, works, &mut out) } else { write_text(&findings, works, &mut out) };
    match written.and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Error::new("the findings can't be written").why(error))
        }
        _ => Ok(u8::from(!works)),
    }
}

fn examine(args: &DoctorArgs) -> Vec<Finding> {
    let machine = Machine::default();
    let loaded = Config::load(&args.settings.clone().overrides());
    let target = match &loaded {
        Ok(loaded) => loaded.config.over.clone(),
        Err(_) => std::env::temp_dir(),
    };
    let mut findings = door::examine(&target);
    limits(&machine, &mut findings);
    leftovers::examine(args.clean, &mut findings);
    if let (_, Some(why)) = log_filter() {
        findings
            .push(Finding::new("log", Verdict::Less, why).remedy("for example SURGETANK_LOG=debug, or leave it out"));
    }
    match &loaded {
        Ok(loaded) => {
            store(&machine, loaded, args.measure, &mut findings);
            for tier in &loaded.config.tiers {
                for path in &tier.paths {
                    device(&machine, tier, path, args.measure, &mut findings);
                }
            }
            state(&machine, &loaded.config.state, &mut findings);
            findings.push(door::decision(&loaded.config));
            findings.extend(loaded.notes.iter().map(|note| Finding::new("note", Verdict::Info, note)));
        }
        Err(error) => {
            let found =
                if error.why.is_empty() { error.what.clone() } else { format!("{} ({})", error.what, error.why) };
            findings.push(Finding::new("configuration", Verdict::Bad, found).remedy(error.remedy.clone()));
            // Despite other errors, the doctor can check whether the server answers. (It does not repeat a refused
            // URL.)
            let url = args.settings.store.as_deref().filter(|url| url.contains("://"));
            if let Some(url) = url.filter(|url| Address::parse(url).is_ok_and(|address| !address.is_local())) {
                server(url, &mut findings);
            }
        }
    }
    findings
}

/// The wanted limit of open files: each open file of a program costs the agent one or two descriptors.
const DESCRIPTORS_WANTED: u64 = 4096;

fn limits(machine: &Machine, findings: &mut Vec<Finding>) {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let ceiling = limit.maximum.unwrap_or(u64::MAX);
    let shown = |limit: Option<u64>| limit.map_or_else(|| "unlimited".to_owned(), |limit| limit.to_string());
    let found = format!("{} now, may be raised to {}", shown(limit.current), shown(limit.maximum));
    findings.push(if ceiling >= DESCRIPTORS_WANTED {
        Finding::new("open files", Verdict::Good, found)
    } else {
        Finding::new("open files", Verdict::Less, found).remedy(format!(
            "have the hard limit raised to {DESCRIPTORS_WANTED} or more (ulimit -Hn, limits.conf), or programs with many open files will fail"
        ))
    });
    if let Some(memory) = machine.memory() {
        let found = format!("{} available of {}", show_bytes(memory.available_bytes), show_bytes(memory.total_bytes));
        findings.push(Finding::new("memory", Verdict::Info, found));
    }
    let found = match machine.memory_limit() {
        Some(limit) => format!(
            "limited to {}, {} of it left; a tier in memory counts against it",
            show_bytes(limit.limit_bytes),
            show_bytes(limit.room_bytes)
        ),
        None => "not limited".to_owned(),
    };
    findings.push(Finding::new("memory cgroup", Verdict::Info, found));
}

fn server(url: &str, findings: &mut Vec<Finding>) {
    let about = format!("store {url}");
    match crate::service::stores::ask_server(url) {
        Ok(answer) => {
            findings.push(Finding::new(&about, Verdict::Good, answer.found));
            let lacking = |warning| Finding::new("durability in the store", Verdict::Less, warning);
            findings.extend(answer.warnings.into_iter().map(lacking));
        }
        Err(error) => findings.push(
            Finding::new(&about, Verdict::Bad, error.to_string())
                .remedy("check the address, the names in it and the credentials (`surgetank help stores`)"),
        ),
    }
}

fn store(machine: &Machine, loaded: &Loaded, measure: bool, findings: &mut Vec<Finding>) {
    let path = &loaded.config.store;
    if let Some(url) = loaded.config.store_url() {
        server(url, findings);
        return;
    }
    let about = format!("store {}", path.display());
    let system = match machine.file_system(path) {
        Ok(system) => system,
        Err(error) => {
            findings.push(
                Finding::new(about, Verdict::Bad, format!("can't be looked at: {error}"))
                    .remedy("check that it is mounted and reachable"),
            );
            return;
        }
    };
    let place = if system.is_shared() {
        "shared"
    } else if system.is_memory() {
        "in memory"
    } else {
        "local"
    };
    let found = format!(
        "{}, {place}, {} free of {}",
        system.kind,
        show_bytes(system.available_bytes),
        show_bytes(system.total_bytes)
    );
    let access = rustix::fs::access(path, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK);
    findings.push(match access {
        Err(error) => Finding::new(&about, Verdict::Bad, format!("{found}; we may not write there ({error})"))
            .remedy("get write permission on it, or give another store with --store"),
        Ok(()) if system.is_memory() => {
            Finding::new(&about, Verdict::Less, format!("{found}; what is kept there does not survive a reboot"))
                .remedy("use a store on a disk")
        }
        Ok(()) => Finding::new(&about, Verdict::Good, found),
    });
    if let Some(mount) = machine.mount_of(path)
        && let Some(quota) = probe::quota(&mount.source, rustix::process::getuid().as_raw())
    {
        let of = |limit: u64| {
            if limit == 0 { "no limit".to_owned() } else { show_bytes(limit) }
        };
        let verdict =
            if quota.limit_bytes > 0 && quota.used_bytes >= quota.limit_bytes { Verdict::Bad } else { Verdict::Info };
        let finding = Finding::new(
            "quota in the store",
            verdict,
            format!("{} used of {}", show_bytes(quota.used_bytes), of(quota.limit_bytes)),
        );
        findings.push(if verdict == Verdict::Bad {
            finding.remedy("remove files there, or ask for more quota")
        } else {
            finding
        });
    }
    if measure && access.is_ok() {
        findings.push(measured("speed of the store", path, system.available_bytes));
    }
}

fn device(machine: &Machine, tier: &TierConfig, path: &Path, measure: bool, findings: &mut Vec<Finding>) {
    let about = format!("tier {} {}", tier.name, path.display());
    let system = match machine.file_system(path) {
        Ok(system) => system,
        Err(error) => {
            findings.push(
                Finding::new(about, Verdict::Bad, format!("can't be looked at: {error}"))
                    .remedy("choose another directory with --tier"),
            );
            return;
        }
    };
    let survives = match tier.survives.unwrap_or(system.survives) {
        Survives::Agent => "survives the agent only",
        Survives::Reboot => "survives a reboot",
        Survives::Node => "survives the loss of the node",
    };
    let found = format!(
        "{}, {survives}; {} free of {}, we use at most {}",
        system.kind,
        show_bytes(system.available_bytes),
        show_bytes(system.total_bytes),
        show_bytes(tier.cap_bytes.unwrap_or(0))
    );
    findings.push(if system.is_shared() {
        Finding::new(&about, Verdict::Less, format!("{found}; shared storage is seldom faster than the store"))
            .remedy("use memory or a local disk")
    } else {
        Finding::new(&about, Verdict::Good, found)
    });
    match probe::abilities(path) {
        Err(error) => findings.push(
            Finding::new(format!("{about}: writing"), Verdict::Bad, format!("a file can't be made there: {error}"))
                .remedy("choose another directory with --tier, or free space and inodes there"),
        ),
        Ok(abilities) => {
            let lacks: Vec<&str> = [
                (abilities.xattrs, "extended attributes (user.*)"),
                (abilities.leases, "leases"),
                (abilities.unnamed_files, "O_TMPFILE"),
            ]
            .into_iter()
            .filter_map(|(has, name)| (!has).then_some(name))
            .collect();
            findings.push(if lacks.is_empty() {
                Finding::new(format!("{about}: abilities"), Verdict::Good, "extended attributes, leases, O_TMPFILE")
            } else {
                Finding::new(format!("{about}: abilities"), Verdict::Less, format!("without {}", lacks.join(", ")))
                    .remedy("the agent replaces the missing features, more slowly; tmpfs, ext4, xfs and btrfs have all of them")
            });
        }
    }
    if measure {
        findings.push(measured(
            &format!("{about}: speed"),
            path,
            tier.cap_bytes.unwrap_or(0).min(system.available_bytes),
        ));
    }
}

fn measured(about: &str, path: &Path, room_bytes: u64) -> Finding {
    match probe::speed(path, room_bytes) {
        Ok(speed) => Finding::new(
            about,
            Verdict::Info,
            format!(
                "writes {}/s with sync, reads {}/s ({} in 1 MiB pieces)",
                show_bytes(speed.write_bytes_per_second),
                show_bytes(speed.read_bytes_per_second),
                show_bytes(speed.bytes)
            ),
        ),
        Err(error) => {
            Finding::new(about, Verdict::Less, format!("not measured: {error}")).remedy("free some space there")
        }
    }
}

fn state(machine: &Machine, path: &Path, findings: &mut Vec<Finding>) {
    let about = format!("state {}", path.display());
    let there = path.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("/"));
    let writable = rustix::fs::access(there, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK);
    let system = machine.file_system(there);
    findings.push(match (writable, system) {
        (Err(error), _) => Finding::new(about, Verdict::Bad, format!("can't be made or written: {error}"))
            .remedy("name a directory of yours on a local disk with SURGETANK_STATE"),
        (_, Ok(system)) if system.survives != Survives::Reboot => {
            Finding::new(about, Verdict::Less, format!("on {}, the journal should be on a local disk", system.kind))
                .remedy("name a directory on a local disk with SURGETANK_STATE")
        }
        (_, Ok(system)) => Finding::new(about, Verdict::Good, format!("on {}", system.kind)),
        (_, Err(error)) => Finding::new(about, Verdict::Less, format!("can't be looked at: {error}")),
    });
}

fn write_text(findings: &[Finding], works: bool, out: &mut impl Write) -> io::Result<()> {
    for finding in findings {
        let mark = match finding.verdict {
            Verdict::Good => "ok  ",
            Verdict::Less => "less",
            Verdict::Bad => "BAD ",
            Verdict::Info => "    ",
        };
        writeln!(out, "{mark}  {}: {}", finding.about, finding.found)?;
        if !finding.remedy.is_empty() {
            writeln!(out, "      try: {}", finding.remedy)?;
        }
    }
    writeln!(
        out,
        "\n{}",
        if works { "surgetank run works here." } else { "surgetank run does NOT work here; see BAD above." }
    )
}

fn write_json(findings: &[Finding], works: bool, out: &mut impl Write) -> io::Result<()> {
    let whole = serde_json::json!({ "works": works, "findings": findings });
    writeln!(out, "{whole}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn settings(dir: &Path) -> Settings {
        for name in ["over", "tier"] {
            fs::create_dir_all(dir.join(name)).expect("mkdir");
        }
        Settings {
            over: Some(dir.join("over")),
            tiers: vec![format!("fast={}:64M", dir.join("tier").display())],
            ..Settings::default()
        }
    }

    #[test]
    fn doctor_examines_all_and_leaves_nothing() {
        let dir = tempfile::tempdir().expect("tempdir");
        let findings = examine(&DoctorArgs { settings: settings(dir.path()), measure: true, ..DoctorArgs::default() });
        let about = |text: &str| {
            findings
                .iter()
                .find(|finding| finding.about.contains(text))
                .unwrap_or_else(|| panic!("nothing about {text}"))
        };
        for text in [
            "/dev/fuse",
            "kernel",
            "io_uring",
            "user name spaces",
            "mounting",
            "fusermount3",
            "door",
            "open files",
            "memory cgroup",
            "speed of the store",
            "tier fast",
            "state",
        ] {
            about(text);
        }
        assert_eq!(about("store ").verdict, Verdict::Good, "{:?}", about("store "));
        assert!(about("abilities").found.contains("leases"));
        for finding in &findings {
            assert!(
                !matches!(finding.verdict, Verdict::Bad | Verdict::Less) || !finding.remedy.is_empty(),
                "no remedy: {finding:?}"
            );
        }
        for name in ["over", "tier"] {
            assert_eq!(fs::read_dir(dir.path().join(name)).expect("read_dir").count(), 0);
        }
    }

    #[test]
    fn bad_configuration_is_a_finding() {
        let dir = tempfile::tempdir().expect("tempdir");
        let settings = Settings { fsync: Some("sometimes".to_owned()), ..settings(dir.path()) };
        let findings = examine(&DoctorArgs { settings, ..DoctorArgs::default() });
        let bad = findings.iter().find(|finding| finding.about == "configuration").expect("a finding");
        assert_eq!(bad.verdict, Verdict::Bad);
        assert!(bad.found.contains("--fsync: 'sometimes'") && !bad.remedy.is_empty(), "{bad:?}");
        let mut out = Vec::new();
        write_json(&findings, false, &mut out).expect("json");
        let whole: serde_json::Value = serde_json::from_slice(&out).expect("json");
        assert_eq!(whole["works"], false);
        assert_eq!(whole["findings"].as_array().map(Vec::len), Some(findings.len()));
        let mut out = Vec::new();
        write_text(&findings, false, &mut out).expect("text");
        assert!(String::from_utf8_lossy(&out).contains("does NOT work"));
    }
}
