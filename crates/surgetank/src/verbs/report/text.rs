//! A record as one screen of text: what happened, where the bytes went, which programs did the I/O, what slowed the
//! run, and what the engine decided and why.

use std::fmt::Write as _;

use surgetank_core::report::PathText;
use surgetank_core::report::pattern::{Access, Pattern};
use surgetank_core::report::run::{Counted, EventKind, Io, Process, RunRecord};

use crate::verbs::words::{bytes, count, millis, seconds};

const PROGRAMS_SHOWN: usize = 12;
const EVENTS_SHOWN: usize = 16;
const FILES_SHOWN: usize = 5;
const ACCESSES_SHOWN: usize = 12;

pub fn list(records: &[RunRecord]) -> String {
    if records.is_empty() {
        return "no run is recorded\n".into();
    }
    let mut out = String::new();
    for record in records {
        let exit = record.exit.map_or_else(|| "?".to_owned(), |exit| exit.to_string());
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "{:<26} exit {exit:<3} {:>10}  {}  {}",
            record.id,
            micros(record.ended_us),
            record.directory,
            shown(&record.command, 60)
        );
    }
    out
}

pub fn render(record: &RunRecord) -> String {
    let mut out = String::new();
    let _ = write(&mut out, record);
    out
}

fn write(out: &mut String, record: &RunRecord) -> std::fmt::Result {
    head(out, record)?;
    traffic(out, record)?;
    between_nodes(out, record)?;
    programs(out, record)?;
    accesses(out, record)?;
    slowed(out, record)?;
    events(out, record)?;
    files(out, record)
}

fn head(out: &mut String, record: &RunRecord) -> std::fmt::Result {
    writeln!(out, "run {}: {}", record.id, shown(&record.command, 100))?;
    writeln!(out, "  over {}, store {}, on {}", record.directory, clean(&record.store), clean(&record.host))?;
    let exit = match (record.command_exit, record.exit) {
        (Some(command), Some(exit)) if command == exit => format!("exit {exit}"),
        (Some(command), Some(exit)) => format!("exit {exit} (the command's {command}: {})", clean(&record.reason)),
        _ => "how it ended is not known: the run itself was killed, or lost its agent".into(),
    };
    match record.command_ended_us {
        Some(at) => {
            writeln!(out, "  {} in the command, {} after it; {exit}", micros(at), micros(record.tail.elapsed_us))?
        }
        None => writeln!(out, "  {} in all; {exit}", micros(record.ended_us))?,
    }
    if let Some(verdict) = &record.verdict {
        if verdict.is_durable() {
            writeln!(out, "  everything is in the store{}", kept(verdict.kept.total))?;
        } else {
            writeln!(
                out,
                "  NOT everything was in the store: {} files, {} lost, {} operations, {} conflicts",
                count(verdict.not_durable.total),
                count(verdict.lost.total),
                count(verdict.undelivered.total),
                count(verdict.conflicts.total)
            )?;
        }
    }
    if record.agents > 1 {
        writeln!(out, "  {} agents served it, one after the other", record.agents)?;
    }
    if record.runs_beside > 0 {
        writeln!(
            out,
            "  {} other runs shared the directory: tiers, store and decisions below are of all of them",
            record.runs_beside
        )?;
    }
    Ok(())
}

fn kept(total: u64) -> String {
    if total > 0 { format!(", but for {} files that are kept by rule", count(total)) } else { String::new() }
}

fn traffic(out: &mut String, record: &RunRecord) -> std::fmt::Result {
    writeln!(out, "\nwhere the bytes went")?;
    writeln!(
        out,
        "  {:<12} {:>10} {:>10} {:>9} {:>9} {:>9} {:>10} {:>10} {:>10}",
        "", "in", "out", "files", "hits", "spills", "cap", "most full", "most dirty"
    )?;
    for tier in &record.tiers {
        writeln!(
            out,
            "  {:<12} {:>10} {:>10} {:>9} {:>9} {:>9} {:>10} {:>10} {:>10}",
            clean(&tier.name),
            bytes(tier.in_bytes),
            bytes(tier.out_bytes),
            count(tier.files),
            count(tier.hits),
            count(tier.spills),
            bytes(tier.cap_bytes),
            bytes(tier.used_bytes_max),
            bytes(tier.dirty_bytes_max)
        )?;
    }
    let store = &record.store_traffic;
    writeln!(
        out,
        "  {:<12} {:>10} {:>10} {:>9}",
        "store",
        bytes(store.out_bytes),
        bytes(store.in_bytes),
        count(store.out_files)
    )
}

/// The network, if the run was in a pool.
fn between_nodes(out: &mut String, record: &RunRecord) -> std::fmt::Result {
    let Some(pool) = &record.pool_traffic else { return Ok(()) };
    writeln!(out, "\nbetween nodes: calls of this node (member {}) while the run lasted", pool.member)?;
    if pool.others.is_empty() {
        return writeln!(out, "  no call to another member");
    }
    writeln!(out, "  {:<12} {:>10} {:>10} {:>9}", "member", "received", "sent", "calls")?;
    for other in &pool.others {
        writeln!(
            out,
            "  {:<12} {:>10} {:>10} {:>9}",
            other.member,
            bytes(other.received_bytes),
            bytes(other.sent_bytes),
            count(other.calls)
        )?;
    }
    Ok(())
}

/// The gaps in the figures of programs.
pub fn uncounted(record: &RunRecord) -> Vec<String> {
    let mut lines = Vec::new();
    if record.processes_lost > 0 {
        lines.push(format!(
            "{} processes were not counted: too many ran at once; their I/O is not included below",
            count(record.processes_lost)
        ));
    }
    if record.processes_disbelieved > 0 {
        lines.push(format!(
            "{} of the processes gave figures that are impossible (a program wrote over them): below is what the agent saw of those",
            count(record.processes_disbelieved)
        ));
    }
    if record.accesses_left_out > 0 {
        lines.push(format!(
            "what processes did to files is not all in the trace: {} opens and requests were of files for which there was no room",
            count(record.accesses_left_out)
        ));
    }
    if record.counting_ended {
        lines
            .push("a program truncated or removed the counters' shared memory: later I/O is not included below".into());
    }
    lines
}

fn programs(out: &mut String, record: &RunRecord) -> std::fmt::Result {
    writeln!(out, "\nwho did it ({} processes)", count(record.processes_total))?;
    for line in uncounted(record) {
        writeln!(out, "  {line}")?;
    }
    writeln!(
        out,
        "  {:<18} {:>6} {:>10} {:>10} {:>8} {:>8} {:>9} {:>9}  {:>21}",
        "program", "times", "read", "written", "reads", "writes", "opens", "I/O time", "of all it did"
    )?;
    for program in record.programs.iter().take(PROGRAMS_SHOWN) {
        let io = program.io.total();
        let all = program
            .kernel
            .map_or_else(String::new, |kernel| format!("{} / {}", bytes(kernel.read_bytes), bytes(kernel.write_bytes)));
        writeln!(
            out,
            "  {:<18} {:>6} {:>10} {:>10} {:>8} {:>8} {:>9} {:>9}  {all:>21}",
            shown(&program.program, 18),
            count(program.processes),
            bytes(io.read_bytes),
            bytes(io.write_bytes),
            count(io.read_calls),
            count(io.write_calls),
            count(io.read_opens + io.write_opens),
            micros(io.read_us + io.write_us + io.sync_us)
        )?;
        extras(out, &io)?;
    }
    let more = record.programs.len().saturating_sub(PROGRAMS_SHOWN);
    if more > 0 {
        writeln!(out, "  … and {more} more programs")?;
    }
    let mut all = surgetank_core::report::run::Doors::default();
    record.programs.iter().for_each(|program| all.join(&program.io));
    let ways: Vec<String> = all
        .all()
        .iter()
        .filter(|(_, io)| io.bytes() > 0)
        .map(|(door, io)| format!("{} {door}", bytes(io.bytes())))
        .collect();
    if !ways.is_empty() {
        writeln!(out, "  by way: {}", ways.join(", "))?;
    }
    let cut = record.processes.iter().filter(|process| process.counted == Counted::ShimCutShort).count();
    if cut > 0 {
        writeln!(
            out,
            "  {cut} processes were killed, or went on as programs that do not count: what stdio moved in them may be missing"
        )?;
    }
    Ok(())
}

/// For a traced run: which process read and wrote which file, and how; the largest transfers.
fn accesses(out: &mut String, record: &RunRecord) -> std::fmt::Result {
    let all = traced(record);
    if all.is_empty() {
        return Ok(());
    }
    writeln!(out, "\nwhich files, and how")?;
    writeln!(
        out,
        "  {:<18} {:>7} {:>10} {:>10} {:>7} {:<18}  file",
        "program", "", "bytes", "of them", "again", "order"
    )?;
    for (process, access, way, pattern) in all.iter().take(ACCESSES_SHOWN) {
        writeln!(
            out,
            "  {:<18} {:>7} {:>10} {:>10} {:>6}% {:<18}  {}",
            shown(&process.program, 18),
            way,
            bytes(pattern.bytes),
            bytes(pattern.distinct_bytes),
            (pattern.again_bytes() * 100).checked_div(pattern.bytes).unwrap_or(0),
            pattern.order(),
            access.path
        )?;
    }
    let more = all.len().saturating_sub(ACCESSES_SHOWN);
    if more > 0 {
        writeln!(out, "  … and {more} more (--json, --html)")?;
    }
    Ok(())
}

/// The largest transfers first.
pub fn traced(record: &RunRecord) -> Vec<(&Process, &Access, &'static str, &Pattern)> {
    let mut all: Vec<_> = record
        .processes
        .iter()
        .flat_map(|process| process.files.iter().map(move |access| (process, access)))
        .flat_map(|(process, access)| {
            let (read, write) = (access.read.as_ref(), access.write.as_ref());
            let ways = [("read", read), ("written", write)];
            ways.into_iter().filter_map(move |(way, pattern)| Some((process, access, way, pattern?)))
        })
        .collect();
    all.sort_by(|a, b| b.3.bytes.cmp(&a.3.bytes).then_with(|| a.1.path.cmp(&b.1.path)));
    all
}

fn extras(out: &mut String, io: &Io) -> std::fmt::Result {
    if io.map_calls > 0 {
        writeln!(out, "    and mapped {} in {} maps", bytes(io.mapped_bytes), count(io.map_calls))?;
    }
    if io.estimated_read_bytes > 0 || io.estimated_write_bytes > 0 {
        writeln!(
            out,
            "    and by an estimate (sizes of files, not counted): read {}, written {}",
            bytes(io.estimated_read_bytes),
            bytes(io.estimated_write_bytes)
        )?;
    }
    Ok(())
}

/// The costs of the run's time, a sentence each.
pub fn slow(record: &RunRecord) -> Vec<String> {
    let store = &record.store_traffic;
    let mut lines = Vec::new();
    if record.tail.undrained_bytes > 0 {
        lines.push(format!(
            "when the command ended, {} in {} files were left to drain: {}",
            bytes(record.tail.undrained_bytes),
            count(record.tail.undrained_files),
            micros(record.tail.elapsed_us)
        ));
    }
    if store.out_bytes > 0 && store.busy_us > 0 {
        lines.push(format!(
            "the drain had something to do for {}, at {}/s",
            micros(store.busy_us),
            bytes(store.out_bytes_per_second)
        ));
    }
    if store.failures > store.corrupt {
        lines.push(format!("the store failed {} times and was tried again", count(store.failures - store.corrupt)));
    }
    if store.corrupt > 0 {
        lines.push(format!("{} copies came out wrong and were made again", count(store.corrupt)));
    }
    if record.traced {
        lines.push("the run was traced: everything that programs read and wrote went through the agent".into());
    }
    let mediated = |process: &&Process| !record.traced && process.io.mediated.bytes() > 0;
    for process in record.processes.iter().filter(mediated).take(3) {
        lines.push(format!(
            "{} [{}] went through the agent with {}",
            clean(&process.program),
            process.pid,
            bytes(process.io.mediated.bytes())
        ));
    }
    lines
}

fn slowed(out: &mut String, record: &RunRecord) -> std::fmt::Result {
    let lines = slow(record);
    if lines.is_empty() {
        return Ok(());
    }
    writeln!(out, "\nwhat took time")?;
    lines.iter().try_for_each(|line| writeln!(out, "  {line}"))
}

fn events(out: &mut String, record: &RunRecord) -> std::fmt::Result {
    if record.events.is_empty() {
        return Ok(());
    }
    writeln!(out, "\nwhat was decided, and why")?;
    for event in record.events.iter().take(EVENTS_SHOWN) {
        let kind = match event.kind {
            EventKind::Placed => "placed",
            EventKind::Hit => "hit",
            EventKind::Miss => "miss",
            EventKind::Fetched => "fetched",
            EventKind::Spilled => "spilled",
            EventKind::Evicted => "evicted",
            EventKind::Conflict => "conflict",
            EventKind::NoRoom => "no room",
        };
        let moved = if event.bytes > 0 { format!(" ({})", bytes(event.bytes)) } else { String::new() };
        writeln!(
            out,
            "  {kind:<9} {:<10} {:>8}{moved}: {}",
            clean(&event.place),
            count(event.count),
            clean(&event.reason)
        )?;
    }
    let more = record.events.len().saturating_sub(EVENTS_SHOWN);
    if more > 0 {
        writeln!(out, "  … and {more} more reasons (--json)")?;
    }
    Ok(())
}

fn files(out: &mut String, record: &RunRecord) -> std::fmt::Result {
    if record.files.is_empty() {
        return Ok(());
    }
    writeln!(out, "\nthe largest of {} files written", count(record.files_total))?;
    for file in record.files.iter().take(FILES_SHOWN) {
        let durable = match file.durable_us {
            Some(at) => format!("in the store {} after its close", micros(at.saturating_sub(file.sealed_us))),
            None => "never in the store".into(),
        };
        writeln!(out, "  {:>10}  {}: {}, {durable}", bytes(file.size_bytes), file.path, clean(&file.place))?;
    }
    Ok(())
}

pub fn micros(value: u64) -> String {
    match value {
        0..1000 => format!("{value} µs"),
        _ if value < 3_600_000_000 => millis(value / 1000),
        _ => seconds(value / 1_000_000),
    }
}

/// Escaped for a terminal.
fn clean(text: &str) -> String {
    PathText(text.as_bytes().to_vec()).to_string()
}

fn shown(text: &str, chars_max: usize) -> String {
    let clean = clean(text);
    match clean.chars().count() > chars_max {
        true => clean.chars().take(chars_max - 1).chain(['…']).collect(),
        false => clean,
    }
}

#[cfg(test)]
mod tests {
    use surgetank_core::report::run::{Event, Process, Program, Tail};

    use super::*;

    #[test]
    fn program_name_with_control_bytes_is_escaped() {
        let mut record = RunRecord { command: "a\x1b[2Jb".into(), processes_total: 1, ..RunRecord::default() };
        record.programs.push(Program { program: "x\x07".into(), processes: 1, ..Program::default() });
        assert!(!render(&record).contains(['\x1b', '\x07']));
        assert!(!list(&[record]).contains('\x1b'));
    }

    #[test]
    fn estimates_are_named_as_such_and_in_no_sum() {
        let mut record = RunRecord { processes_total: 1, ..RunRecord::default() };
        let mut program = Program { program: "static".into(), processes: 1, ..Program::default() };
        program.io.passthrough_unseen.estimated_write_bytes = 1 << 20;
        record.programs.push(program);
        let text = render(&record);
        assert!(text.contains("by an estimate") && text.contains("written 1.00 MiB"), "{text}");
        assert!(!text.contains("by way"), "{text}");
    }

    #[test]
    fn causes_of_delay_are_named() {
        let mut record =
            RunRecord { exit: Some(3), command_exit: Some(0), reason: "not all".into(), ..RunRecord::default() };
        record.command_ended_us = Some(2_000_000);
        record.tail =
            Tail { elapsed_us: 1_500_000, undrained_files: 2, undrained_bytes: 4096, undrained_operations: 0 };
        let mut process = Process { pid: 5, program: "dd".into(), ..Process::default() };
        process.io.mediated.write_bytes = 1;
        record.processes.push(process);
        let (place, reason) = ("ram".to_owned(), "it grew".to_owned());
        record.events.push(Event { kind: EventKind::Spilled, place, reason, count: 7, bytes: 0 });
        let text = render(&record);
        for part in [
            "exit 3 (the command's 0: not all)",
            "4.00 KiB in 2 files",
            "dd [5] went through the agent",
            "spilled",
            "it grew",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
