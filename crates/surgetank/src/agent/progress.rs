//! The progress of a drain or a copy, for people: a bar on a terminal, a line every few seconds elsewhere, nothing when quiet.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use surgetank_core::clock;
use surgetank_core::report::Progress;

use crate::verbs::words::{bytes, count, seconds};

const LINE_EVERY: Duration = Duration::from_secs(5);

pub enum Display {
    Quiet,
    Bar(ProgressBar),
    /// `told`: of trouble, which is told at once.
    Lines {
        doing: &'static str,
        last: Instant,
        told: bool,
    },
}

impl Display {
    /// `doing`: "draining", "copying".
    pub fn new(doing: &'static str, quiet: bool) -> Self {
        if quiet {
            return Self::Quiet;
        }
        if !std::io::stderr().is_terminal() {
            return Self::Lines { doing, last: clock::tick(), told: false };
        }
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
        // The template is as good as a constant; a broken one would show in the first test run as the default style.
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
            Self::Lines { doing, last, told } => {
                if last.elapsed() >= LINE_EVERY || progress.trouble.is_some() && !*told {
                    *last = clock::tick();
                    *told |= progress.trouble.is_some();
                    eprintln!("surgetank: {doing} {}", sentence(progress));
                }
            }
        }
    }

    /// Prints something without tearing the bar.
    pub fn say(&self, text: &str) {
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

/// `1.2 GiB of 3.4 GiB, 12 of 80 files, 210.0 MiB/s, 11 s left`, and what is in the way.
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
    if progress.bytes_per_second > 0 {
        text.push_str(&format!(", {}/s", bytes(progress.bytes_per_second)));
        let left = progress.undrained_bytes / progress.bytes_per_second;
        if progress.undrained_bytes > 0 {
            text.push_str(&format!(", {} left", seconds(left)));
        }
    }
    if let Some(trouble) = &progress.trouble {
        text.push_str(&format!("; {}: {}", trouble.place, trouble.reason));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_tells_bytes_files_rate_and_remaining_time() {
        let progress = Progress {
            undrained_files: 68,
            undrained_bytes: 2 << 30,
            done_files: 12,
            done_bytes: 1 << 30,
            bytes_per_second: 200 << 20,
            ..Progress::default()
        };
        assert_eq!(sentence(&progress), "1.00 GiB of 3.00 GiB, 12 of 80 files, 200.00 MiB/s, 10 s left");
    }
}
