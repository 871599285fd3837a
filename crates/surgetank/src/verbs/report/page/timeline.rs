//! The programs over time: a bar for each process, or, with many processes, the number of running ones for each
//! program.
//!
//! Processes that only started other ones (no I/O of their own in the directory) appear like all others; the colour is
//! the program's.

use std::collections::HashMap;
use std::fmt::Write as _;

use surgetank_core::report::run::{Process, RunRecord};

use super::chart::time_axis;
use super::markup::shown;
use crate::verbs::report::text::micros;
use crate::verbs::words::{bytes, count};

/// More processes than this are shown by program.
const BARS_MAX: usize = 40;
const PROGRAMS_MAX: usize = 24;
const CLASSES: [&str; 6] = ["c0", "c1", "c2", "c3", "c4", "c5"];
const ROW: f64 = 22.0;
/// The number of positions across the chart at which running processes are counted.
const PLACES: usize = 1000;

pub fn figure(record: &RunRecord) -> String {
    if record.processes.is_empty() || record.ended_us == 0 {
        return String::new();
    }
    let by_program = record.processes.len() > BARS_MAX || record.processes_total > BARS_MAX as u64;
    let (labels, rows, note) = if by_program { programs(record) } else { processes(record) };
    let height = ROW * labels.len() as f64;
    let mut out = format!(
        "<figure class=\"chart wide\" id=\"timeline\">\n<figcaption><b>Tasks</b> <span>{}</span></figcaption>\n<div class=\"plot\"><div class=\"names\">",
        shown(&note)
    );
    // Writing to a string cannot fail.
    for (name, more) in &labels {
        let _ = write!(out, "<div title=\"{0}\"><span>{0}</span><small>{1}</small></div>", shown(name), shown(more));
    }
    let mark_us = record.command_ended_us.map(|at| at as f64);
    let _ = writeln!(
        out,
        "</div><svg class=\"curves\" height=\"{}\" role=\"img\" aria-label=\"when each task ran\">{}{rows}</svg></div>",
        height + 22.0,
        time_axis(record.ended_us as f64, mark_us, height)
    );
    if mark_us.is_some() {
        out += "<ul class=\"legend\"><li><svg width=\"22\" height=\"10\" aria-hidden=\"true\"><line class=\"mark\" x1=\"11\" x2=\"11\" y1=\"0\" y2=\"10\"/></svg>the command ended; the drain went on until the right edge</li></ul>";
    }
    out += "</figure>\n";
    out
}

fn class_of(record: &RunRecord) -> HashMap<&str, &'static str> {
    record.programs.iter().zip(CLASSES).map(|(program, class)| (program.program.as_str(), class)).collect()
}

type Labels = Vec<(String, String)>;

fn end_of(process: &Process, record: &RunRecord) -> u64 {
    process.ended_us.unwrap_or(record.ended_us).clamp(process.begun_us, record.ended_us.max(process.begun_us))
}

fn processes(record: &RunRecord) -> (Labels, String, String) {
    let classes = class_of(record);
    let mut labels = Labels::new();
    let mut rows = String::new();
    for (index, process) in record.processes.iter().enumerate() {
        let end = end_of(process, record);
        let io = process.io.total();
        labels.push((process.program.clone(), process.pid.to_string()));
        let from = 100.0 * process.begun_us as f64 / record.ended_us as f64;
        let wide = 100.0 * (end - process.begun_us) as f64 / record.ended_us as f64;
        let class = classes.get(process.program.as_str()).unwrap_or(&"rest");
        let unseen = if process.ended_us.is_none() { " unseen" } else { "" };
        let title = format!(
            "{}\n{} to {}; read {}, written {}, {} in I/O",
            if process.command.is_empty() { &process.program } else { &process.command },
            micros(process.begun_us),
            process.ended_us.map_or_else(|| "after the run".to_owned(), micros),
            bytes(io.read_bytes),
            bytes(io.write_bytes),
            micros(io.read_us + io.write_us + io.sync_us + io.open_us)
        );
        // (Never too narrow to be visible.)
        let _ = write!(
            rows,
            "<rect class=\"bar {class}{unseen}\" x=\"{from:.2}%\" y=\"{:.0}\" height=\"{:.0}\" rx=\"2\" style=\"width:max(3px,{wide:.2}%)\"><title>{}</title></rect>",
            index as f64 * ROW + 4.0,
            ROW - 8.0,
            shown_lines(&title)
        );
    }
    let total = record.processes_total.max(labels.len() as u64);
    (labels, rows, format!("{} processes, a bar each; the colour is the program's", count(total)))
}

fn shown_lines(text: &str) -> String {
    text.split('\n').map(shown).collect::<Vec<_>>().join("\n")
}

/// One row per program: at each position of the chart the maximum of its running processes.
fn programs(record: &RunRecord) -> (Labels, String, String) {
    let classes = class_of(record);
    let mut known: Vec<(&str, Vec<(usize, usize)>)> = Vec::new();
    let mut index_of: HashMap<&str, usize> = HashMap::new();
    let place = |at: u64| ((at as f64 / record.ended_us as f64 * PLACES as f64) as usize).min(PLACES - 1);
    for process in &record.processes {
        let index = *index_of.entry(&process.program).or_insert_with(|| {
            known.push((&process.program, Vec::new()));
            known.len() - 1
        });
        known[index].1.push((place(process.begun_us), place(end_of(process, record))));
    }
    let mut labels = Labels::new();
    let mut rows = String::new();
    let hidden = known.len().saturating_sub(PROGRAMS_MAX);
    for (index, (program, spans)) in known.iter().take(PROGRAMS_MAX).enumerate() {
        let running = running(spans);
        let most = running.iter().copied().max().unwrap_or(0).max(1);
        labels.push((
            (*program).to_owned(),
            if most > 1 {
                format!("× {}, {most} at once", count(spans.len() as u64))
            } else {
                format!("× {}", count(spans.len() as u64))
            },
        ));
        let class = classes.get(program).unwrap_or(&"rest");
        let bottom = (index + 1) as f64 * ROW - 3.0;
        let mut path = format!("0,{bottom} ");
        let mut before = u32::MAX;
        for (at, now) in running.iter().enumerate() {
            if *now != before {
                let level = |many: u32| bottom - (ROW - 6.0) * f64::from(many) / f64::from(most);
                if before != u32::MAX {
                    let _ = write!(path, "{at},{:.1} ", level(before));
                }
                let _ = write!(path, "{at},{:.1} ", level(*now));
                before = *now;
            }
        }
        let last = bottom - (ROW - 6.0) * f64::from(before) / f64::from(most);
        let _ = write!(
            rows,
            "<polygon class=\"bar {class}\" points=\"{path}{PLACES},{last:.1} {PLACES},{bottom}\"><title>{}</title></polygon>",
            shown(program)
        );
    }
    let height = ROW * labels.len() as f64;
    let rows = format!(
        "<svg x=\"0\" y=\"0\" width=\"100%\" height=\"{height}\" viewBox=\"0 0 {PLACES} {height}\" preserveAspectRatio=\"none\">{rows}</svg>"
    );
    let mut note = format!(
        "how many processes of each program were running, each row to its own height; {} in all",
        count(record.processes_total)
    );
    let listed = record.processes.len() as u64;
    if record.processes_total > listed {
        let _ = write!(note, ", the {} that moved most are drawn", count(listed));
    }
    if hidden > 0 {
        let _ = write!(note, "; {hidden} more programs are not drawn");
    }
    (labels, rows, note)
}

/// The number of spans (both ends included) that cover each position.
fn running(spans: &[(usize, usize)]) -> Vec<u32> {
    let mut change = vec![0_i64; PLACES + 1];
    for (from, to) in spans {
        change[*from] += 1;
        change[*to + 1] -= 1;
    }
    let mut now = 0;
    change[..PLACES]
        .iter()
        .map(|by| {
            now += by;
            u32::try_from(now).unwrap_or(0)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_processes_are_counted_together() {
        let running = running(&[(0, 10), (5, 5), (5, PLACES - 1)]);
        assert_eq!((running[0], running[5], running[6], running[11], running[PLACES - 1]), (1, 3, 2, 1, 1));
    }
}
