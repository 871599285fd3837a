//! Formats quantities and lists for people.

use std::fmt::Display;
use std::io::{self, Write};
use std::path::Path;

use surgetank_core::report::{Holder, Listing, Undone, Verdict};
use surgetank_types::clock;
use surgetank_types::error::Error;

use crate::agent::commands::Commands;

pub fn bytes(value: u64) -> String {
    indicatif::BinaryBytes(value).to_string()
}

/// With separators between thousands.
pub fn count(value: u64) -> String {
    indicatif::HumanCount(value).to_string()
}

/// `11 s`, `3 min 5 s`, `2 h 4 min`.
pub fn seconds(value: u64) -> String {
    match value {
        0..60 => format!("{value} s"),
        60..3600 => format!("{} min {} s", value / 60, value % 60),
        _ => format!("{} h {} min", value / 3600, value % 3600 / 60),
    }
}

/// `35 ms`, `4.2 s`, then as [`seconds`].
pub fn millis(value: u64) -> String {
    match value {
        0..1000 => format!("{value} ms"),
        1000..60_000 => format!("{:.1} s", value as f64 / 1000.0),
        _ => seconds(value / 1000),
    }
}

/// The leftovers of a killed agent, and the command that brings them to their store.
pub fn left_by_killed(over: &Path, commands: &Commands) -> String {
    format!(
        "the agent of {} was killed: what is not in the store yet stays in its tiers. Bring it to the store with:\n  {}",
        over.display(),
        commands.run()
    )
}

/// The user's remedy for lost files.
pub fn acknowledge(commands: &Commands) -> Vec<String> {
    vec!["every command names lost files until you acknowledge them:".to_owned(), format!("  {}", commands.forget())]
}

/// A verdict, and the remedy for lost files.
pub fn print_verdict(verdict: &Verdict, commands: &Commands) {
    print_lines(&verdict_lines(verdict));
    if !verdict.lost.is_empty() {
        print_lines(&acknowledge(commands));
    }
}

/// Entries shown in a message; the JSON output has more.
const SHOWN_MAX: usize = 10;

fn list<T>(out: &mut Vec<String>, listing: &Listing<T>, heading: &str, line: impl Fn(&T) -> String) {
    if listing.is_empty() {
        return;
    }
    out.push(format!("{heading}: {}", count(listing.total)));
    out.extend(listing.first.iter().take(SHOWN_MAX).map(|entry| format!("  {}", line(entry))));
    let more = listing.total.saturating_sub(listing.first.len().min(SHOWN_MAX) as u64);
    if more > 0 {
        out.push(format!("  … and {} more", count(more)));
    }
}

fn with(label: &str, value: impl Display) -> String {
    let value = value.to_string();
    if value.is_empty() { value } else { format!("{label}{value}") }
}

fn undone_line(undone: &Undone) -> String {
    let (name, secs) =
        (format!("member {} of the pool ({})", undone.member, undone.address), undone.since_unix_seconds);
    let Some(since) = secs else { return format!("{name}, since an unknown moment") };
    let (of_day, ago) = (since % 86_400, u64::try_from(clock::now().secs()).unwrap_or(0).saturating_sub(since));
    let (hours, minutes, rest) = (of_day / 3600, of_day % 3600 / 60, of_day % 60);
    format!("{name}, since {hours:02}:{minutes:02}:{rest:02} UTC, {} ago", seconds(ago))
}

/// Everything in a verdict that a person has to know; empty if every file is durable and none is kept.
pub fn verdict_lines(verdict: &Verdict) -> Vec<String> {
    let mut out = Vec::new();
    list(&mut out, &verdict.not_durable, "not durable", |entry| {
        format!("{}{}{}", entry.path, with(": ", &entry.why), with("; safe at ", &entry.safe_at))
    });
    list(&mut out, &verdict.lost, "lost", |entry| format!("{}: {}", entry.path, entry.why));
    list(&mut out, &verdict.lost_elsewhere, "lost with another node, as far as this node knows", |entry| {
        format!("{}: {}", entry.path, entry.why)
    });
    list(&mut out, &verdict.conflicts, "changed in the store by another client, both kept", |entry| {
        format!("{}; ours is {}", entry.path, entry.kept_as)
    });
    list(&mut out, &verdict.undelivered, "not applied to the store", |entry| {
        format!("{}{}", entry.operation, with(": ", &entry.why))
    });
    list(&mut out, &verdict.perhaps_undone, "perhaps undone: what own programs of lost nodes did last", undone_line);
    list(&mut out, &verdict.kept, "NOT in the store (rule `keep`)", ToString::to_string);
    out
}

pub fn holder_lines(holders: &[Holder]) -> Vec<String> {
    holders
        .iter()
        .map(|holder| format!("  pid {}: {}{}", holder.pid, holder.command, with("  — ", &holder.holds)))
        .collect()
}

/// Prints to stdout. A reader that closes early (`| head`) is not a failure; an incomplete answer is.
pub fn print(text: &str) -> Result<(), Error> {
    let mut out = io::stdout();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(why) if why.kind() != io::ErrorKind::BrokenPipe => {
            Err(Error::new("the answer cannot be written to standard output").why(why))
        }
        _ => Ok(()),
    }
}

/// Prints to stderr, with our name as prefix.
pub fn print_lines(lines: &[String]) {
    for line in lines {
        eprintln!("surgetank: {line}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use surgetank_core::report::{NotDurable, PathText};

    #[test]
    fn long_list_is_cut_with_a_count() {
        let mut verdict = Verdict::default();
        for number in 0..12 {
            verdict.not_durable.push(NotDurable {
                path: PathText(format!("f{number}").into_bytes()),
                why: "no space".into(),
                safe_at: PathText(b"/tier/f".to_vec()),
            });
        }
        let lines = verdict_lines(&verdict);
        assert_eq!(lines[0], "not durable: 12");
        assert_eq!(lines[1], "  f0: no space; safe at /tier/f");
        assert_eq!(lines.last().unwrap(), "  … and 2 more");
        assert_eq!(lines.len(), 12);
    }

    #[test]
    fn times_are_readable() {
        assert_eq!((seconds(59), seconds(185), seconds(7440)), ("59 s".into(), "3 min 5 s".into(), "2 h 4 min".into()));
        assert_eq!((millis(35), millis(4210)), ("35 ms".into(), "4.2 s".into()));
    }
}
