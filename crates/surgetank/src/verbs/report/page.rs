//! A record as one page for a browser: SVG charts, tables, no network, no external parts.
//!
//! Everything from the run except the charts' coordinates passes through `markup::shown`: users choose the names of
//! files and programs freely. The page's own policy forbids it to run or load anything, except the one script with the
//! page's nonce. The danger that it avoids: a file's name that becomes a program in the reader's browser.

mod chart;
mod markup;
mod series;
mod tables;
mod timeline;

use std::fmt::Write as _;
use std::io;

use surgetank_core::report::run::{Doors, RunRecord};

use super::text::{micros, slow};
use crate::verbs::words::{bytes, count};
use markup::{section, shown};

const STYLE: &str = include_str!("page/style.css");
const SCRIPT: &str = include_str!("page/sort.js");

/// `nonce`: a word that was not known when the run's files were named.
pub fn render(record: &RunRecord, nonce: &str) -> String {
    let mut out = String::with_capacity(128 << 10);
    let title = format!("Run {}", record.id);
    // Writing to a string cannot fail.
    let _ = write!(
        out,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>{}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n",
        shown(&title)
    );
    out += &head(record);
    out += &verdict(record);
    out += &tiles(record);
    out += &section("When", "What ran when", &timeline::figure(record));
    out += &section("Where", "Tiers and store over time", &series::figures(record));
    out += &tables::all(record);
    out += &section("advice", "What would have helped", &advice(record));
    let _ = write!(
        out,
        "<footer>Surgetank {} · record {} · figures and their meaning: surgetank help report</footer>\n</main>\n<script nonce=\"{nonce}\">{SCRIPT}</script>\n</body>\n</html>\n",
        shown(&record.version),
        shown(&record.id)
    );
    out
}

/// A random word of 128 bits.
pub fn fresh_nonce() -> io::Result<String> {
    let mut word = [0_u8; 16];
    let mut filled = 0;
    while filled < word.len() {
        filled += rustix::rand::getrandom(&mut word[filled..], rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(word.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn head(record: &RunRecord) -> String {
    format!(
        "<header>\n<p class=\"kicker\">surgetank run</p>\n<h1>{}</h1>\n<pre class=\"command\">{}</pre>\n\
         <dl class=\"facts\"><div><dt>directory</dt><dd>{}</dd></div><div><dt>store</dt><dd>{}</dd></div>\
         <div><dt>node</dt><dd>{}</dd></div><div><dt>began</dt><dd>{}</dd></div></dl>\n</header>\n",
        shown(&record.id),
        shown(&record.command),
        shown(&record.directory.to_string()),
        shown(&record.store),
        shown(&record.host),
        markup::utc(record.begun_unix_us)
    )
}

/// Is every file safe? The first part of the page.
fn verdict(record: &RunRecord) -> String {
    let mut notes = Vec::new();
    let (class, sign, text) = match &record.verdict {
        None => {
            ("unsure", "?", "How it ended is not known: the run was killed, or left its drain to the agent.".to_owned())
        }
        Some(verdict) if verdict.is_durable() => {
            ("good", "✓", "Everything that was to be kept is in the store.".to_owned())
        }
        Some(verdict) => (
            "bad",
            "!",
            format!(
                "Not everything was in the store: {} files, {} lost, {} operations, {} conflicts.",
                count(verdict.not_durable.total),
                count(verdict.lost.total),
                count(verdict.undelivered.total),
                count(verdict.conflicts.total)
            ),
        ),
    };
    if let Some(kept) = record.verdict.as_ref().map(|verdict| verdict.kept.total).filter(|kept| *kept > 0) {
        notes.push(format!("{} files are kept out of the store by rule.", count(kept)));
    }
    match (record.command_exit, record.exit) {
        (Some(command), Some(exit)) if command == exit => notes.push(format!("Exit {exit}.")),
        (Some(command), Some(exit)) => notes.push(format!("Exit {exit}, the command's {command}: {}", record.reason)),
        _ => {}
    }
    if record.agents > 1 {
        notes.push(format!("{} agents served it, one after the other.", record.agents));
    }
    if record.runs_beside > 0 {
        notes.push(format!(
            "{} other runs shared the directory: tiers, store, decisions and curves are of all of them.",
            record.runs_beside
        ));
    }
    let mut out = format!(
        "<div class=\"verdict {class}\" role=\"status\"><span class=\"sign\" aria-hidden=\"true\">{sign}</span><div><strong>{}</strong>",
        shown(&text)
    );
    if !notes.is_empty() {
        let _ = write!(out, "<p>{}</p>", shown(&notes.join(" ")));
    }
    let slowed = slow(record);
    if !slowed.is_empty() {
        let lines: String = slowed.iter().map(|line| format!("<li>{}</li>", shown(line))).collect();
        let _ = write!(out, "<p class=\"lead\">What took time</p><ul>{lines}</ul>");
    }
    out += "</div></div>\n";
    out
}

/// The model answers that. It needs to know the machine, and the reader's machine may be another one.
fn advice(record: &RunRecord) -> String {
    if record.processes.is_empty() {
        return String::new();
    }
    let id = shown(&record.id);
    format!(
        "<p class=\"note\">Other tiers, another mode, more or fewer tasks at a time: the model predicts what they would have changed, from this record and a calibration of the machine.</p>\n\
         <pre class=\"command\">surgetank calibrate\nsurgetank report {id} --json &gt;run.json\nsurgetank advise run.json</pre>\n"
    )
}

fn tiles(record: &RunRecord) -> String {
    let mut all = Doors::default();
    record.programs.iter().for_each(|program| all.join(&program.io));
    let io = all.total();
    let rate = record.store_traffic.out_bytes_per_second;
    let in_io = [io.write_us, io.sync_us, io.open_us].into_iter().fold(io.read_us, u64::saturating_add);
    let tiles = [
        (
            "elapsed",
            micros(record.ended_us),
            match record.command_ended_us {
                Some(at) => format!("{} in the command, {} after it", micros(at), micros(record.tail.elapsed_us)),
                None => String::new(),
            },
        ),
        ("processes", count(record.processes_total), format!("of {} programs", count(record.programs.len() as u64))),
        ("read", bytes(io.read_bytes), format!("{} calls, {} opens", count(io.read_calls), count(io.read_opens))),
        ("written", bytes(io.write_bytes), format!("{} calls, {} opens", count(io.write_calls), count(io.write_opens))),
        ("in I/O calls", micros(in_io), "all processes together".to_owned()),
        (
            "to the store",
            bytes(record.store_traffic.out_bytes),
            if rate > 0 { format!("{}/s while there was something to do", bytes(rate)) } else { String::new() },
        ),
    ];
    let tiles: String = tiles
        .iter()
        .map(|(name, value, more)| {
            format!(
                "<div class=\"tile\"><span>{name}</span><b data-tile=\"{name}\">{}</b><small>{}</small></div>",
                shown(value),
                shown(more)
            )
        })
        .collect();
    format!("<div class=\"tiles\">{tiles}</div>\n")
}
