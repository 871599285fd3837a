//! The end of the job: `--deadline 2h30m`, a point in time, or what Slurm reports for the job.
//!
//! The danger that it avoids: a time of day of another zone. A point in time without a zone is local, as in Slurm and `at`, and
//! a note shows the time that was understood.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::words::quantity::duration;

/// The known end of the job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deadline {
    /// The end, in seconds since 1970.
    pub unix_seconds: i64,
    /// Time before the end at which the agent admits no further runs and the final drain begins: a sixteenth of the time that
    /// was left, 1 s to 60 s.
    pub lead: Duration,
    /// The source: `--deadline`, `SLURM_JOB_END_TIME`, `squeue`.
    pub from: String,
}

const LEAD_SHARE: u32 = 16;
const LEAD_MIN: Duration = Duration::from_secs(1);
const LEAD_MAX: Duration = Duration::from_secs(60);

impl Deadline {
    /// A deadline at `unix_seconds` that `from` reported at `now_seconds`, both since 1970.
    pub fn new(unix_seconds: i64, from: &str, now_seconds: i64) -> Self {
        let left = Duration::from_secs(u64::try_from(unix_seconds - now_seconds).unwrap_or(0));
        let lead = (left / LEAD_SHARE).clamp(LEAD_MIN, LEAD_MAX);
        Self { unix_seconds, lead, from: from.to_owned() }
    }

    /// Time from now to the end; zero after it.
    pub fn left(&self) -> Duration {
        let nanos = i128::from(self.unix_seconds) * 1_000_000_000 - i128::from(surgetank_types::clock::now().nanos);
        Duration::from_nanos(u64::try_from(nanos.max(0)).unwrap_or(u64::MAX))
    }

    /// Whether the end is at most `lead` away.
    pub fn is_near(&self) -> bool {
        self.left() <= self.lead
    }

    /// The end in local time, as in `2026-11-22 17:40:00 +0100`.
    pub fn shown(&self) -> String {
        shown(self.unix_seconds)
    }
}

/// Parses a duration from now or a point in time into seconds since 1970; `None` for `none`. The error names the accepted
/// forms.
pub fn deadline(text: &str, now_seconds: i64) -> Result<Option<i64>, String> {
    const SHAPES: &str = "write a duration from now (2h30m), a point in time (2026-11-22T17:40:00, with Z or +01:00 \
                          unless it is local; or seconds since 1970), or none";
    let text = text.trim();
    if text == "none" {
        return Ok(None);
    }
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        // A number without a unit is a duration that lost it: no user means 1970.
        return match text.parse() {
            Ok(seconds) if seconds >= 1_000_000_000 => Ok(Some(seconds)),
            _ => Err(format!("'{text}' has no unit; {SHAPES}")),
        };
    }
    if let Some(seconds) = point(text) {
        return Ok(Some(seconds));
    }
    let after = duration(text).map_err(|_| format!("'{text}' is not an end of a job; {SHAPES}"))?;
    // Rounded up, so that the deadline is not immediate.
    let seconds = after.as_secs() + u64::from(after.subsec_nanos() > 0);
    i64::try_from(seconds)
        .ok()
        .and_then(|seconds| now_seconds.checked_add(seconds))
        .map(Some)
        .ok_or_else(|| format!("'{text}' is too far away"))
}

/// Parses `2026-11-22T17:40[:00][Z|±01:00]`, also with a space for the T.
fn point(text: &str) -> Option<i64> {
    let (date, time) = text.split_once(['T', ' '])?;
    let numbers = |text: &str, separator: char| -> Option<Vec<i32>> {
        let plain = |part: &str| !part.is_empty() && part.len() <= 4 && part.bytes().all(|byte| byte.is_ascii_digit());
        text.split(separator).map(|part| plain(part).then(|| part.parse().ok())?).collect()
    };
    let (time, zone_seconds) = match time.find(['Z', '+', '-']) {
        None => (time, None),
        Some(at) => {
            let zone = &time[at..];
            let seconds = if zone == "Z" {
                0
            } else {
                let [hours, minutes] = numbers(&zone[1..], ':')?[..] else { return None };
                let seconds = hours * 3600 + minutes * 60;
                if zone.starts_with('-') { -seconds } else { seconds }
            };
            (&time[..at], Some(seconds))
        }
    };
    let [year, month, day] = numbers(date, '-')?[..] else { return None };
    let (hour, minute, second) = match numbers(time, ':')?[..] {
        [hour, minute] => (hour, minute, 0),
        [hour, minute, second] => (hour, minute, second),
        _ => return None,
    };
    let exists = (1970..=9999).contains(&year)
        && (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && hour < 24
        && minute < 60
        && second <= 60;
    if !exists {
        return None;
    }
    // SAFETY: an all-zero tm is a valid one.
    let mut broken_down: libc::tm = unsafe { std::mem::zeroed() };
    broken_down.tm_year = year - 1900;
    broken_down.tm_mon = month - 1;
    broken_down.tm_mday = day;
    (broken_down.tm_hour, broken_down.tm_min, broken_down.tm_sec) = (hour, minute, second);
    broken_down.tm_isdst = -1;
    Some(match zone_seconds {
        Some(zone_seconds) => {
            // SAFETY: reads and normalises the tm that it is given.
            let seconds = unsafe { libc::timegm(&raw mut broken_down) };
            seconds - i64::from(zone_seconds)
        }
        // SAFETY: as above; the zone is read from the environment, which no thread changes.
        None => unsafe { libc::mktime(&raw mut broken_down) },
    })
}

fn shown(unix_seconds: i64) -> String {
    // SAFETY: an all-zero tm is a valid one.
    let mut local: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are valid for the time of the call.
    if unsafe { libc::localtime_r(&raw const unix_seconds, &raw mut local) }.is_null() {
        return format!("@{unix_seconds}");
    }
    let east = local.tm_gmtoff / 60;
    format!(
        "{}-{:02}-{:02} {:02}:{:02}:{:02} {}{:02}{:02}",
        local.tm_year + 1900,
        local.tm_mon + 1,
        local.tm_mday,
        local.tm_hour,
        local.tm_min,
        local.tm_sec,
        if east < 0 { '-' } else { '+' },
        east.abs() / 60,
        east.abs() % 60
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: i64 = 1_795_000_000;

    #[test]
    fn deadline_of_each_form_is_parsed_or_refused() {
        for (text, seconds) in [
            ("2h30m", Some(NOW + 9000)),
            ("90s", Some(NOW + 90)),
            ("1500ms", Some(NOW + 2)),
            ("none", None),
            ("1795000100", Some(1_795_000_100)),
            ("2026-11-22T17:40:00Z", Some(1_795_369_200)),
            ("2026-11-22 17:40Z", Some(1_795_369_200)),
            ("2026-11-22T17:40:00+01:30", Some(1_795_369_200 - 5400)),
            ("2026-11-22T17:40:00-05:00", Some(1_795_369_200 + 18_000)),
        ] {
            assert_eq!(deadline(text, NOW), Ok(seconds), "{text}");
        }
        for text in [
            "",
            "90",
            "17:40",
            "tomorrow",
            "2026-13-01T00:00",
            "2026-11-22T25:00",
            "2026-11-22T17:40+1",
            "99999999999d",
        ] {
            assert!(deadline(text, NOW).is_err(), "{text}");
        }
        // Local, whatever the zone of this machine.
        let local = deadline("2026-11-22T17:40:00", NOW).unwrap().unwrap();
        assert!((local - 1_795_369_200).abs() <= 14 * 3600);
        assert!(shown(local).starts_with("2026-11-22 17:40:00 "), "{}", shown(local));
    }

    #[test]
    fn lead_is_a_sixteenth_from_one_second_to_one_minute() {
        for (left, lead) in [(2, 1), (64, 4), (7200, 60)] {
            assert_eq!(Deadline::new(NOW + left, "x", NOW).lead, Duration::from_secs(lead));
        }
        assert!(Deadline::new(NOW - 1, "x", NOW).lead == LEAD_MIN);
    }
}
