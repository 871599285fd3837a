//! The tables: tiers and store, programs, sizes of requests, processes, files, decisions, and files that are not safe.

use std::fmt::Write as _;

use surgetank_core::report::run::{Counted, Doors, EventKind, Io, RunRecord, Sizes};
use surgetank_core::report::{Listing, PathText};

use super::super::text::{traced, uncounted};
use super::markup::{number, section, shown, table, word};
use crate::verbs::report::text::micros;
use crate::verbs::words::{bytes, count};

/// Rows that are visible at once; a click shows the rest.
const ROWS_OPEN: usize = 25;
/// The limit of a trace's rows; the record has all.
const ACCESSES_SHOWN: usize = 2000;

pub fn all(record: &RunRecord) -> String {
    let mut out = unsafe_now(record);
    out += &section("places", "Where the bytes went", &places(record));
    out += &section("network", "Between nodes", &network(record));
    out += &section("programs", "Programs", &(programs(record) + &ways(record)));
    out += &section("sizes", "Sizes of requests", &sizes(record));
    out += &section("processes", "Processes", &processes(record));
    out += &section("accesses", "Which files, and how", &accesses(record));
    out += &section("files", "Files written", &files(record));
    out += &section("decisions", "What was decided, and why", &decisions(record));
    out
}

fn quantity(value: u64) -> String {
    number(value, &bytes(value))
}
fn tally(value: u64) -> String {
    number(value, &count(value))
}
fn time(value_us: u64) -> String {
    number(value_us, &micros(value_us))
}
fn per_second(value: u64, over_us: u64) -> String {
    let rate = u64::try_from(u128::from(value) * 1_000_000 / u128::from(over_us.max(1))).unwrap_or(u64::MAX);
    number(rate, &if rate > 0 { format!("{}/s", bytes(rate)) } else { "–".into() })
}

fn listed<T>(
    out: &mut String,
    id: &str,
    title: &str,
    columns: &[(&str, bool)],
    list: &Listing<T>,
    row: impl Fn(&T) -> String,
) {
    if list.is_empty() {
        return;
    }
    let rows: Vec<String> = list.first.iter().map(row).collect();
    // Writing to a string cannot fail.
    let _ = write!(out, "<h3>{title} ({})</h3>\n{}", count(list.total), table(id, columns, &rows));
    if list.more() > 0 {
        let _ = writeln!(out, "<p class=\"note\">… and {} more.</p>", count(list.more()));
    }
}

fn unsafe_now(record: &RunRecord) -> String {
    let Some(verdict) = &record.verdict else { return String::new() };
    let path = |path: &PathText| format!("<td class=\"path\">{}</td>", shown(&path.to_string()));
    let mut out = String::new();
    listed(
        &mut out,
        "not-durable",
        "Not in the store",
        &[("file", false), ("why", false), ("its bytes are in", false)],
        &verdict.not_durable,
        |one| path(&one.path) + &word(&one.why) + &path(&one.safe_at),
    );
    listed(
        &mut out,
        "lost",
        "Lost",
        &[("file", false), ("why", false), ("its bytes were in", false)],
        &verdict.lost,
        |one| path(&one.path) + &word(&one.why) + &path(&one.at),
    );
    listed(
        &mut out,
        "undelivered",
        "Not done in the store",
        &[("operation", false), ("why", false)],
        &verdict.undelivered,
        |one| word(&one.operation) + &word(&one.why),
    );
    listed(
        &mut out,
        "conflicts",
        "Changed by another client meanwhile",
        &[("file", false), ("ours is kept as", false)],
        &verdict.conflicts,
        |one| path(&one.path) + &path(&one.kept_as),
    );
    listed(&mut out, "kept", "Kept out of the store by rule", &[("file", false)], &verdict.kept, path);
    section("safety", "What is where", &out)
}

fn places(record: &RunRecord) -> String {
    let columns = [
        ("place", false),
        ("in", true),
        ("on average", true),
        ("out", true),
        ("files", true),
        ("hits", true),
        ("spills", true),
        ("capacity", true),
        ("most in use", true),
        ("most undrained", true),
    ];
    let mut rows: Vec<String> = record
        .tiers
        .iter()
        .map(|tier| {
            word(&tier.name)
                + &quantity(tier.in_bytes)
                + &per_second(tier.in_bytes, record.command_ended_us.unwrap_or(record.ended_us))
                + &quantity(tier.out_bytes)
                + &tally(tier.files)
                + &tally(tier.hits)
                + &tally(tier.spills)
                + &quantity(tier.cap_bytes)
                + &quantity(tier.used_bytes_max)
                + &quantity(tier.dirty_bytes_max)
        })
        .collect();
    let store = &record.store_traffic;
    let rate = number(
        store.out_bytes_per_second,
        &if store.out_bytes_per_second > 0 { format!("{}/s", bytes(store.out_bytes_per_second)) } else { "–".into() },
    );
    let none = "<td class=\"n zero\" data-v=\"0\">–</td>";
    rows.push(
        word("store")
            + &quantity(store.out_bytes)
            + &rate
            + &quantity(store.in_bytes)
            + &tally(store.out_files)
            + &none.repeat(5),
    );
    table("places-table", &columns, &rows)
        + "<p class=\"note\">Tiers: bytes written to and read from them, on average over the time of the command. Store: bytes made durable, at the rate while there was something to drain, and bytes fetched from it.</p>\n"
}

/// From each member to each other one, as far as this node's calls go.
fn network(record: &RunRecord) -> String {
    let Some(pool) = &record.pool_traffic else { return String::new() };
    let me = format!("{} (this one)", pool.member);
    let rows: Vec<String> = pool
        .others
        .iter()
        .flat_map(|other| {
            let there = other.member.to_string();
            let calls = word(&me) + &word(&there) + &quantity(other.sent_bytes) + &tally(other.calls);
            [
                calls,
                word(&there)
                    + &word(&me)
                    + &quantity(other.received_bytes)
                    + "<td class=\"n zero\" data-v=\"0\">–</td>",
            ]
        })
        .collect();
    let what = if rows.is_empty() { "No call to another member." } else { "" };
    table("network-table", &[("from member", false), ("to member", false), ("bytes", true), ("calls", true)], &rows)
        + &format!(
            "<p class=\"note\">{what} Calls of this node to other members of its pool while the run lasted, and the replies. What other members asked of this node is in the reports of their runs.</p>\n"
        )
}

fn io_cells(io: &Io) -> String {
    tally(io.read_opens + io.write_opens)
        + &quantity(io.read_bytes)
        + &tally(io.read_calls)
        + &quantity(io.write_bytes)
        + &tally(io.write_calls)
        + &time(io.read_us + io.write_us + io.sync_us + io.open_us)
}

const IO_COLUMNS: [(&str, bool); 6] =
    [("opens", true), ("read", true), ("reads", true), ("written", true), ("writes", true), ("time in I/O", true)];

fn programs(record: &RunRecord) -> String {
    let columns =
        [&[("program", false), ("processes", true), ("lived", true)][..], &IO_COLUMNS, &[("sizes of requests", false)]]
            .concat();
    let rows: Vec<String> = record
        .programs
        .iter()
        .map(|program| {
            let io = program.io.total();
            let small = picture(&io, 84.0, 22.0, false);
            word(&program.program)
                + &tally(program.processes)
                + &time(program.lived_us)
                + &io_cells(&io)
                + &format!("<td>{small}</td>")
        })
        .collect();
    folded("programs-table", &columns, &rows)
}

/// The doors that were used, and which figures are only estimated.
fn ways(record: &RunRecord) -> String {
    let mut all = Doors::default();
    record.programs.iter().for_each(|program| all.join(&program.io));
    let rows: Vec<String> =
        all.all().iter().filter(|(_, io)| !io.is_empty()).map(|(name, io)| word(name) + &io_cells(io)).collect();
    let columns = [&[("way", false)][..], &IO_COLUMNS].concat();
    let mut out = table("ways-table", &columns, &rows);
    let total = all.total();
    if total.estimated_read_bytes > 0 || total.estimated_write_bytes > 0 {
        let _ = writeln!(
            out,
            "<p class=\"note\">Beside that, by an estimate (sizes of files; the requests were not counted): read {}, written {}.</p>",
            bytes(total.estimated_read_bytes),
            bytes(total.estimated_write_bytes)
        );
    }
    if total.map_calls > 0 {
        let _ = writeln!(
            out,
            "<p class=\"note\">Beside that, {} were mapped into memory in {} calls; what was touched of it is not known.</p>",
            bytes(total.mapped_bytes),
            count(total.map_calls)
        );
    }
    let cut = record.processes.iter().filter(|process| process.counted == Counted::ShimCutShort).count();
    if cut > 0 {
        let _ = writeln!(
            out,
            "<p class=\"note\">{cut} processes were killed, or went on as programs that do not count: what stdio moved in them may be missing.</p>"
        );
    }
    out
}

/// A class's short name: `0`, `1`, `2–3`, `4–7` …
fn class_name(class: usize) -> String {
    if class == 0 {
        return "0 B".into();
    }
    let from = 1_u64.checked_shl(u32::try_from(class - 1).unwrap_or(u32::MAX)).unwrap_or(u64::MAX);
    bytes(from).replace(".00", "")
}

fn share(sizes: &Sizes, class: usize, most: u64) -> f64 {
    sizes.0.get(class).copied().unwrap_or(0) as f64 / most.max(1) as f64
}

/// Reads above the line, writes below it, from the smallest class to the largest that occurs.
fn picture(io: &Io, wide: f64, high: f64, named: bool) -> String {
    let classes = io.read_sizes.0.len().max(io.write_sizes.0.len());
    let first = (0..classes).find(|class| share(&io.read_sizes, *class, 1) + share(&io.write_sizes, *class, 1) > 0.0);
    let Some(first) = first else { return String::new() };
    let most = io.read_sizes.0.iter().chain(&io.write_sizes.0).copied().max().unwrap_or(1);
    let bars = classes - first;
    let step = if named { 100.0 / bars as f64 } else { 100.0 / bars.max(12) as f64 };
    let half = high / 2.0;
    let size = if named { String::new() } else { format!(" width=\"{wide}\"") };
    let below = if named { 20.0 } else { 0.0 };
    let mut out = format!(
        "<svg class=\"sizes\"{size} height=\"{}\" role=\"img\" aria-label=\"sizes of requests, {} reads and {} writes\">",
        high + below,
        io.read_sizes.total(),
        io.write_sizes.total()
    );
    let every = bars.div_ceil(10).max(1);
    for class in first..classes {
        let at = (class - first) as f64 * step;
        for (sizes, kind, up) in [(&io.read_sizes, "reads", true), (&io.write_sizes, "writes", false)] {
            let many = sizes.0.get(class).copied().unwrap_or(0);
            if many == 0 {
                continue;
            }
            // A single request among millions stays visible.
            let tall = (share(sizes, class, most) * (half - 1.0)).max(1.5);
            let top = if up { half - tall } else { half };
            let style = if up { "c0" } else { "c1" };
            let _ = write!(
                out,
                "<rect class=\"bar {style}\" x=\"{:.2}%\" width=\"{:.2}%\" y=\"{top:.1}\" height=\"{tall:.1}\"><title>{} {kind} from {}</title></rect>",
                at + step * 0.1,
                step * 0.8,
                count(many),
                class_name(class)
            );
        }
        if named && (class - first).is_multiple_of(every) {
            let _ = write!(
                out,
                "<text class=\"tick\" x=\"{:.2}%\" y=\"{}\" text-anchor=\"middle\">{}</text>",
                at + step / 2.0,
                high + 15.0,
                class_name(class)
            );
        }
    }
    let _ = write!(out, "<line class=\"axis\" x1=\"0\" x2=\"100%\" y1=\"{half}\" y2=\"{half}\"/></svg>");
    out
}

fn sizes(record: &RunRecord) -> String {
    let mut all = Doors::default();
    record.programs.iter().for_each(|program| all.join(&program.io));
    let picture = picture(&all.total(), 0.0, 160.0, true);
    if picture.is_empty() {
        return String::new();
    }
    let key = |class: &str, name: &str| {
        format!(
            "<li><svg width=\"12\" height=\"12\" aria-hidden=\"true\"><rect class=\"bar {class}\" width=\"12\" height=\"12\" rx=\"2\"/></svg>{name}</li>"
        )
    };
    format!(
        "<figure class=\"chart wide\"><figcaption><b>Requests by the bytes that they moved</b> <span>from the size named to twice that; the number is in each bar's title</span></figcaption>{picture}<ul class=\"legend\">{}{}</ul></figure>\n",
        key("c0", "reads (above the line)"),
        key("c1", "writes (below it)")
    )
}

fn processes(record: &RunRecord) -> String {
    let columns = [
        &[("program", false), ("pid", true), ("began", true), ("lived", true)][..],
        &IO_COLUMNS,
        &[("command", false)],
    ]
    .concat();
    let rows: Vec<String> = record
        .processes
        .iter()
        .map(|process| {
            let lived = process.ended_us.unwrap_or(record.ended_us).saturating_sub(process.begun_us);
            word(&process.program)
                + &number(u64::from(process.pid), &process.pid.to_string())
                + &time(process.begun_us)
                + &time(lived)
                + &io_cells(&process.io.total())
                + &format!("<td class=\"path\">{}</td>", shown(&process.command))
        })
        .collect();
    let mut out = folded("processes-table", &columns, &rows);
    for line in uncounted(record) {
        let _ = writeln!(out, "<p class=\"note\">{line}.</p>");
    }
    let left = record.processes_total.saturating_sub(record.processes_lost + record.processes.len() as u64);
    if left > 0 {
        let _ = writeln!(
            out,
            "<p class=\"note\">{} more processes moved less; all of them are in the programs' figures.</p>",
            count(left)
        );
    }
    out
}

/// The accesses of a traced run.
fn accesses(record: &RunRecord) -> String {
    let columns = [
        ("program", false),
        ("pid", true),
        ("", false),
        ("bytes", true),
        ("different ones", true),
        ("of the file", true),
        ("requests", true),
        ("order", false),
        ("file", false),
    ];
    let all = traced(record);
    if all.is_empty() {
        return String::new();
    }
    let rows: Vec<String> = all
        .iter()
        .take(ACCESSES_SHOWN)
        .map(|(process, access, way, pattern)| {
            word(&process.program)
                + &number(u64::from(process.pid), &process.pid.to_string())
                + &word(way)
                + &quantity(pattern.bytes)
                + &quantity(pattern.distinct_bytes)
                + &quantity(access.size_bytes)
                + &tally(pattern.calls)
                + &word(&pattern.order())
                + &format!("<td class=\"path\">{}</td>", shown(&access.path.to_string()))
        })
        .collect();
    let mut out = folded("accesses-table", &columns, &rows);
    if all.len() > ACCESSES_SHOWN {
        let more = count((all.len() - ACCESSES_SHOWN) as u64);
        let _ = writeln!(out, "<p class=\"note\">{more} more that moved less are in the record.</p>");
    }
    out
}

fn files(record: &RunRecord) -> String {
    let columns = [
        ("file", false),
        ("size", true),
        ("versions", true),
        ("place", false),
        ("closed at", true),
        ("until it was in the store", true),
        ("why there", false),
    ];
    let rows: Vec<String> = record
        .files
        .iter()
        .map(|file| {
            let durable = file.durable_us.map_or_else(
                || "<td class=\"n\" data-v=\"-1\">never</td>".to_owned(),
                |at| time(at.saturating_sub(file.sealed_us)),
            );
            format!("<td class=\"path\">{}</td>", shown(&file.path.to_string()))
                + &quantity(file.size_bytes)
                + &tally(file.versions)
                + &word(&file.place)
                + &time(file.sealed_us)
                + &durable
                + &format!("<td class=\"why\">{}</td>", shown(&file.placement))
        })
        .collect();
    let note = format!(
        "<p class=\"note\">The largest and those that waited longest, of {} that were written.</p>\n",
        count(record.files_total)
    );
    if rows.is_empty() { String::new() } else { folded("files-table", &columns, &rows) + &note }
}

fn decisions(record: &RunRecord) -> String {
    let rows: Vec<String> = record
        .events
        .iter()
        .map(|event| {
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
            word(kind)
                + &word(&event.place)
                + &tally(event.count)
                + &quantity(event.bytes)
                + &format!("<td class=\"why\">{}</td>", shown(&event.reason))
        })
        .collect();
    folded(
        "decisions-table",
        &[("what", false), ("place", false), ("times", true), ("bytes", true), ("why", false)],
        &rows,
    )
}

/// A long table opens with a click.
fn folded(id: &str, columns: &[(&str, bool)], rows: &[String]) -> String {
    let table = table(id, columns, rows);
    if rows.len() <= ROWS_OPEN {
        table
    } else {
        format!("<details><summary>{} rows</summary>{table}</details>\n", count(rows.len() as u64))
    }
}
