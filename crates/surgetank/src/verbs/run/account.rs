//! The account at the end of a run: the exit code with its reason, and the summary.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use surgetank_core::report::{Holder, RunReport, Summary, Verdict};
use surgetank_types::error::Error;

use crate::verbs::exit;
use crate::verbs::outcome::Outcome;
use crate::verbs::words::{bytes, count, millis};

/// All that decides the exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts<'a> {
    pub command_exit: u8,
    /// `None`: the agent drains alone, or could not be asked.
    pub verdict: Option<&'a Verdict>,
    pub left_running: &'a [Holder],
    /// The agent died while the command ran.
    pub agent_lost: bool,
    /// The agent does not answer.
    pub silent: bool,
    /// The second Ctrl-C came.
    pub gave_up: bool,
    /// The job's end came first.
    pub timed_out: bool,
    pub detached: bool,
}

/// The exit code, and why it differs from the command's.
pub fn decide(facts: &Facts<'_>) -> (u8, &'static str) {
    if facts.agent_lost {
        return (exit::NOT_DURABLE, "the agent died while the command ran: what the command wrote then may be missing");
    }
    if facts.silent {
        return (exit::NOT_DURABLE, "the agent does not answer: whether everything is durable could not be found out");
    }
    if !facts.left_running.is_empty() {
        return (exit::NOT_DURABLE, "background children still run and may still write");
    }
    if facts.detached {
        return (exit::DETACHED, "the drain goes on without us");
    }
    if facts.gave_up {
        return (exit::NOT_DURABLE, "the final drain was interrupted");
    }
    match facts.verdict {
        None => (exit::NOT_DURABLE, "whether everything is durable could not be found out"),
        Some(verdict) if !verdict.is_durable() && facts.timed_out => {
            (exit::NOT_DURABLE, "the job ends before everything is in the store")
        }
        Some(verdict) if !verdict.is_durable() => (exit::NOT_DURABLE, "not everything is in the store"),
        Some(_) => (facts.command_exit, ""),
    }
}

/// Writes `--json FILE` and returns the exit code. The command's code and undurable files matter more than a failure to
/// write the account.
pub fn write(mut file: File, path: &Path, report: &RunReport) -> Outcome {
    let written = serde_json::to_writer_pretty(&mut file, report).map_err(io::Error::from);
    let Err(why) = written.and_then(|()| file.write_all(b"\n")) else {
        return Ok(report.exit);
    };
    let error = Error::new(format!("--json: the account of the run cannot be written to {}", path.display()))
        .why(why)
        .remedy("`surgetank report --json` has what is recorded of the run")
        .data(state_of_data(report.exit));
    if report.exit == exit::OK {
        return Err(error.into());
    }
    eprintln!("surgetank: {error}");
    Ok(report.exit)
}

fn state_of_data(exit: u8) -> &'static str {
    match exit {
        exit::NOT_DURABLE => "not everything is in the store: see above",
        exit::DETACHED => "the agent goes on draining",
        _ => "everything that should be durable is in the store",
    }
}

/// `why`: file and reason. In most cases the state directory is full.
pub fn unrecorded(why: &str, exit: u8) -> Error {
    Error::new("the record of this run cannot be written: `report` and `why` do not know it")
        .why(why)
        .remedy("make room on the file system of the state directory, or name another with --state")
        .data(state_of_data(exit))
}

/// A few lines; omits tiers without activity.
pub fn summary_lines(summary: &Summary, drain_ms: u64) -> Vec<String> {
    let mut out = Vec::new();
    for tier in summary.tiers.iter().filter(|tier| tier.files + tier.hits + tier.spills > 0) {
        let spills = if tier.spills > 0 { format!(", {} spilled", count(tier.spills)) } else { String::new() };
        out.push(format!(
            "tier {}: {} files, {} in, {} out, {} hits{spills}",
            tier.name,
            count(tier.files),
            bytes(tier.in_bytes),
            bytes(tier.out_bytes),
            count(tier.hits)
        ));
    }
    let drain = &summary.drain;
    if drain.files > 0 {
        out.push(format!(
            "drain: {} files, {}, {}/s, {} after the command ended",
            count(drain.files),
            bytes(drain.bytes),
            bytes(drain.bytes_per_second),
            millis(drain_ms)
        ));
    }
    if let Some(savings) = drain.savings.filter(|savings| savings.compressed_files + savings.vain_files > 0) {
        let vain = match savings.vain_files {
            0 => String::new(),
            vain => format!("; {} did not get smaller", count(vain)),
        };
        out.push(format!(
            "compressed: {} files, {} as {} in the store, {} of the drain's time{vain}",
            count(savings.compressed_files),
            bytes(savings.content_bytes),
            bytes(savings.stored_bytes),
            millis(savings.compress_ms)
        ));
    }
    if let Some(savings) = drain.savings.filter(|savings| savings.deduplicated_files > 0) {
        out.push(format!(
            "deduplicated: {} files, {}, of which the store did not have {}, {} of the drain's time",
            count(savings.deduplicated_files),
            bytes(savings.deduplicated_bytes),
            bytes(savings.new_bytes),
            millis(savings.hash_ms)
        ));
    }
    if drain.corrupt > 0 {
        out.push(format!("{} copies came out wrong in the store, were found and made again", count(drain.corrupt)));
    }
    if drain.failures > drain.corrupt {
        out.push(format!("the store failed {} times and was tried again", count(drain.failures - drain.corrupt)));
    }
    for short in summary.no_room.first.iter().take(10) {
        out.push(format!("{}: {}", short.path, short.why));
    }
    if summary.no_room.total > 10 {
        out.push(format!("… and {} more writers found no room", count(summary.no_room.total - 10)));
    }
    let mount = &summary.mount;
    if mount.requests > 0 {
        out.push(format!(
            "mount: {} requests, {} in the agent; {} opens direct, {} mediated ({} read, {} written)",
            count(mount.requests),
            millis(mount.service_ms),
            count(mount.direct_opens),
            count(mount.mediated_opens),
            bytes(mount.mediated_read_bytes),
            bytes(mount.mediated_write_bytes)
        ));
    }
    for refused in &summary.refused {
        let first = match (refused.path.0.is_empty(), refused.command.is_empty()) {
            (false, _) => format!(" (first: {} of {})", refused.path, refused.command),
            (true, false) => format!(" (first: {})", refused.command),
            (true, true) => String::new(),
        };
        out.push(format!("refused without a mount: {}, {} times{first}", refused.what, count(refused.count)));
    }
    if summary.at_risk_node_bytes > 0 {
        out.push(format!("at risk if this node is lost now: {}", bytes(summary.at_risk_node_bytes)));
    }
    out
}

#[cfg(test)]
mod tests {
    use surgetank_core::report::{PathText, Undelivered};

    use super::*;

    fn facts(verdict: &Verdict) -> Facts<'_> {
        Facts {
            command_exit: 7,
            verdict: Some(verdict),
            left_running: &[],
            agent_lost: false,
            silent: false,
            gave_up: false,
            timed_out: false,
            detached: false,
        }
    }

    #[test]
    fn exit_code_of_the_command_is_kept_when_all_is_durable() {
        let mut verdict = Verdict::default();
        verdict.kept.push(PathText(b"cache".to_vec()));
        assert_eq!(decide(&facts(&verdict)), (7, ""));
    }

    #[test]
    fn not_durable_wins_over_the_commands_failure() {
        let mut verdict = Verdict::default();
        verdict.undelivered.push(Undelivered { operation: "rename a → b".into(), why: "EACCES".into() });
        assert_eq!(decide(&facts(&verdict)).0, 3);
        let clean = Verdict::default();
        assert_eq!(decide(&Facts { verdict: None, ..facts(&clean) }).0, 3, "not knowing is not durable");
        assert_eq!(decide(&Facts { gave_up: true, ..facts(&clean) }).0, 3);
        assert_eq!(decide(&Facts { agent_lost: true, detached: true, ..facts(&clean) }).0, 3);
        let child = [Holder { pid: 1, command: "x".into(), holds: String::new() }];
        assert_eq!(decide(&Facts { left_running: &child, ..facts(&clean) }).0, 3);
        assert_eq!(decide(&Facts { detached: true, verdict: None, ..facts(&clean) }).0, 4);
    }
}
