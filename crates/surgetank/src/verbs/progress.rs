//! The progress of a drain or a copy, for people: a bar on a terminal, a line every few seconds elsewhere, nothing when quiet.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use surgetank_core::report::Progress;
use surgetank_types::clock;

use super::words::{bytes, count, seconds};

const LINE_EVERY: Duration = Duration::from_secs(5);

pub enum Display {
    Quiet,
    Bar(ProgressBar),
    /// `reported`: the last reported trouble; new trouble is reported at once.
    Lines {
        doing: &'static str,
        last: Instant,
        reported: bool,
    },
}

impl Display {
    /// `doing`: "draining", "copying".
    pub fn new(doing: &'static str, quiet: bool) -> Self {
        if quiet {
            return Self::Quiet;
        }
        if !std::io::stderr().is_terminal() {
            return Self::Lines { doing, last: clock::tick(), reported: false };
        }
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
        // The template is constant; a broken one would show the default style in the first test run.
        if let Ok(style) = ProgressStyle::with_template(&format!("surgetank: {doing} [{{bar:24}}] {{msg}}")) {
            bar.set_style(style.progress_chars("=> "));
        }
        Self::Bar(bar)
    }

    pub fn show(&mut self, progress: &Progress) {
        match self {
            Self::Quiet => {}
            Self::Bar(bar) => {
                // A small share for each file, so that a thousand empty ones move the bar too.
                const FILE_WEIGHT_BYTES: u64 = 64 << 10;
                let left = progress.undrained_bytes
                    + FILE_WEIGHT_BYTES * (progress.undrained_files + progress.undrained_operations);
                let done = progress.done_bytes + FILE_WEIGHT_BYTES * progress.done_files;
                bar.set_length(left + done);
                bar.set_position(done);
                bar.set_message(sentence(progress));
            }
            Self::Lines { doing, last, reported } => {
                if last.elapsed() >= LINE_EVERY || progress.trouble.is_some() && !*reported {
                    *last = clock::tick();
                    *reported |= progress.trouble.is_some();
                    eprintln!("surgetank: {doing} {}", sentence(progress));
                }
            }
        }
    }

    /// Prints something without tearing the bar.
    pub fn print(&self, text: &str) {
        match self {
            Self::Bar(bar) => bar.suspend(|| eprintln!("{text}")),
            _ => eprintln!("{text}"),
        }
    }

    pub fn finish(&self) {
        if let Self::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}

/// `1.2 GiB of 3.4 GiB, 12 of 80 files, 210.0 MiB/s (190.0 MiB/s on average), 11 s left`, and what is in the way.
pub fn sentence(progress: &Progress) -> String {
    let mut text = format!(
        "{} of {}, {} of {} files",
        bytes(progress.done_bytes),
        bytes(progress.done_bytes + progress.undrained_bytes),
        progress.done_files,
        count(progress.done_files + progress.undrained_files),
    );
    if progress.undrained_operations > 0 {
        text.push_str(&format!(", {} operations", count(progress.undrained_operations)));
    }
    let (now, average) = (progress.bytes_per_second, progress.average_bytes_per_second);
    if now > 0 || average > 0 {
        text.push_str(&format!(", {}/s ({}/s on average)", bytes(now), bytes(average)));
    }
    if let Some(left) = seconds_left(progress) {
        text.push_str(&format!(", {} left", seconds(left)));
    }
    if let Some(trouble) = &progress.trouble {
        text.push_str(&format!("; {}: {}", trouble.place, trouble.reason));
    }
    text
}

/// Uses the mean of both rates: the current one alone jumps, the average alone is late to show a change. `None`: no
/// bytes are left to copy, or none move.
fn seconds_left(progress: &Progress) -> Option<u64> {
    let rate = progress.bytes_per_second / 2 + progress.average_bytes_per_second / 2;
    let is_moving = progress.bytes_per_second > 0 && rate > 0 && progress.undrained_bytes > 0;
    // While bytes are left the result is not 0.
    is_moving.then(|| progress.undrained_bytes.div_ceil(rate))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_has_bytes_files_both_rates_and_remaining_time() {
        let progress = Progress {
            undrained_files: 68,
            undrained_bytes: 2 << 30,
            done_files: 12,
            done_bytes: 1 << 30,
            bytes_per_second: 200 << 20,
            average_bytes_per_second: 100 << 20,
            ..Progress::default()
        };
        let rates = "200.00 MiB/s (100.00 MiB/s on average)";
        assert_eq!(sentence(&progress), format!("1.00 GiB of 3.00 GiB, 12 of 80 files, {rates}, 14 s left"));
        // It once said "0 s left" with 20 MiB to go.
        let nearly = Progress { undrained_bytes: 20 << 20, ..progress.clone() };
        assert!(sentence(&nearly).ends_with(", 1 s left"));
        // A stalled copy has no end time; the average still shows its past rate.
        let stands = Progress { bytes_per_second: 0, ..progress };
        assert!(sentence(&stands).ends_with(", 0 B/s (100.00 MiB/s on average)"), "{}", sentence(&stands));
    }
}
