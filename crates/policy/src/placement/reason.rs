//! The reason for a file's place, as a sentence for `surgetank why`.

use std::fmt;
use surgetank_types::sync::Arc;

/// The basis of a reservation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Basis {
    /// A hint or a rule named the size.
    Hint,
    /// The size of earlier files of the same class.
    History {
        /// The largest of them, in bytes.
        max_bytes: u64,
        /// How many of them were seen.
        samples: u32,
    },
    /// The bytes exist already: a spill, a copy from the store, a prefetch.
    Content,
}

/// What ensures that the file has space at its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Guarantee {
    /// A reservation on the device.
    Reserved {
        /// The bytes reserved.
        bytes: u64,
        /// What the number of bytes is based on.
        basis: Basis,
    },
    /// Free space for everything that direct writers could write before the next poll.
    Ample {
        /// The bytes that could be written unseen before the next poll.
        bytes: u64,
    },
    /// Nothing: the agent writes, and moves the file when space runs out.
    Mediated,
}

/// Why a tier that comes earlier in the order was passed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Skip {
    /// The device is out of use after errors.
    Sick,
    /// The file must survive an event that the tier does not survive.
    Volatile,
    /// The file does not fit.
    NoRoom {
        /// Free bytes of the device that comes closest.
        free_bytes: u64,
        /// Bytes that the file needs.
        wanted_bytes: u64,
    },
    /// Volatile tiers would hold too much undrained data.
    Undrained {
        /// Undrained bytes on volatile tiers now.
        dirty_bytes: u64,
        /// The most that is allowed.
        dirty_bytes_max: u64,
    },
    /// The file could not be drained before the job ends.
    TooLate {
        /// Bytes to drain before the end.
        dirty_bytes: u64,
        /// Bytes that can be drained until then.
        drainable_bytes: u64,
    },
    /// A file that spills does not move to a faster tier, nor to the device that it has to leave.
    SpilledFrom,
}

/// The reason of a decision: the place, what ensures its space, and what was passed over. `Display` prints it as a sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reason {
    /// The file is on a tier.
    Tier {
        /// Name of the tier.
        tier: Arc<str>,
        /// Whether a hint or a rule preferred the tier.
        preferred: bool,
        /// Free bytes of the device at the decision.
        free_bytes: u64,
        /// What ensures the file's space.
        guarantee: Guarantee,
        /// The tiers that come earlier, each with its obstacle.
        skipped: Vec<(Arc<str>, Skip)>,
    },
    /// No tier could take the file.
    Store {
        /// The tiers, each with its obstacle.
        skipped: Vec<(Arc<str>, Skip)>,
    },
}

impl Reason {
    /// Name of the tier, or `store`.
    pub fn place(&self) -> &str {
        match self {
            Self::Tier { tier, .. } => tier,
            Self::Store { .. } => "store",
        }
    }

    /// The sentence without the figures of the single case, so that similar ones can be counted together.
    pub fn brief(&self) -> String {
        let (mut brief, skipped) = match self {
            Self::Tier { preferred, guarantee, skipped, .. } => {
                let which = if *preferred { "preferred tier" } else { "fastest tier with room" };
                let how = match guarantee {
                    Guarantee::Reserved { basis: Basis::Hint, .. } => "reserved by hint or rule",
                    Guarantee::Reserved { basis: Basis::History { .. }, .. } => {
                        "reserved by what such files reached before"
                    }
                    Guarantee::Reserved { basis: Basis::Content, .. } => "reserved for its content",
                    Guarantee::Ample { .. } => "room is ample",
                    Guarantee::Mediated => "writes go through the agent",
                };
                (format!("{which}, {how}"), skipped)
            }
            Self::Store { skipped } => ("no tier can take it".to_owned(), skipped),
        };
        for (tier, skip) in skipped {
            let why = match skip {
                Skip::Sick => "is out of use",
                Skip::Volatile => "does not outlive the node",
                Skip::NoRoom { .. } => "has no room",
                Skip::Undrained { .. } => "has too much undrained",
                Skip::TooLate { .. } => "may be wiped before it is drained",
                Skip::SpilledFrom => "is what it had to leave",
            };
            brief.push_str("; ");
            brief.push_str(tier);
            brief.push(' ');
            brief.push_str(why);
        }
        brief
    }

    /// The reason without digits that its sentence does not show, so that similar decisions share one sentence.
    pub fn rounded(mut self) -> Self {
        if let Self::Tier { free_bytes, guarantee, .. } = &mut self {
            *free_bytes = rounded(*free_bytes);
            match guarantee {
                Guarantee::Reserved { basis: Basis::History { samples, .. }, .. } if *samples >= 10 => {
                    *samples = 10_u32.pow(samples.ilog10());
                }
                _ => {}
            }
        }
        self
    }
}

/// Rounds to eight binary digits: less than half a percent off.
fn rounded(bytes: u64) -> u64 {
    let cut = (u64::BITS - bytes.leading_zeros()).saturating_sub(8);
    bytes.saturating_add((1 << cut) >> 1) >> cut << cut
}

/// A number of bytes that prints with a binary unit: `3.1 GiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        if self.0 < 1024 {
            return write!(f, "{} B", self.0);
        }
        let mut value = self.0 as f64 / 1024.0;
        let mut unit = 0;
        // A value that would print as 1024.0 gets the next unit.
        while value >= 1023.95 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        let whole = (value - value.round()).abs() < 0.05;
        if whole { write!(f, "{value:.0} {}", UNITS[unit]) } else { write!(f, "{value:.1} {}", UNITS[unit]) }
    }
}

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sick => f.write_str("is out of use after errors"),
            Self::Volatile => f.write_str("does not outlive the node and this file must"),
            Self::NoRoom { free_bytes, wanted_bytes } => {
                write!(f, "has {} free of the {} wanted", Bytes(*free_bytes), Bytes(*wanted_bytes))
            }
            Self::Undrained { dirty_bytes, dirty_bytes_max } => write!(
                f,
                "may hold {} that is not in the store yet, and {} are there",
                Bytes(*dirty_bytes_max),
                Bytes(*dirty_bytes)
            ),
            Self::TooLate { dirty_bytes, drainable_bytes } => write!(
                f,
                "may be wiped when the job ends: {} can be drained until then, and {} are to be",
                Bytes(*drainable_bytes),
                Bytes(*dirty_bytes)
            ),
            Self::SpilledFrom => f.write_str("is what it had to leave"),
        }
    }
}

impl fmt::Display for Guarantee {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reserved { bytes, basis: Basis::Hint } => write!(f, "{} reserved by hint or rule", Bytes(*bytes)),
            Self::Reserved { bytes, basis: Basis::History { max_bytes, samples } } => {
                // The sentence is stored for every file, so a million files must share a few sentences.
                let seen = match samples {
                    0..10 => samples.to_string(),
                    _ => format!("at least {}", 10_u32.pow(samples.ilog10())),
                };
                let (bytes, max_bytes) = (Bytes(*bytes), Bytes(*max_bytes));
                write!(f, "{bytes} reserved because such files reached {max_bytes} before ({seen} seen)")
            }
            Self::Reserved { bytes, basis: Basis::Content } => write!(f, "{} reserved for its content", Bytes(*bytes)),
            Self::Ample { bytes } => {
                write!(f, "room is ample (more than the {} that could be written unseen)", Bytes(*bytes))
            }
            Self::Mediated => f.write_str("writes go through the agent, which moves the file when room runs out"),
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let skipped = match self {
            Self::Tier { tier, preferred, free_bytes, guarantee, skipped } => {
                let which = if *preferred { "preferred tier" } else { "fastest tier with room" };
                write!(f, "{which}: {tier} has {} free, {guarantee}", Bytes(*free_bytes))?;
                skipped
            }
            Self::Store { skipped } => {
                f.write_str("in the store: no tier can take it")?;
                skipped
            }
        };
        for (tier, skip) in skipped {
            write!(f, "; {tier} {skip}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_prints_as_a_sentence() {
        let reason = Reason::Tier {
            tier: "nvme".into(),
            preferred: false,
            free_bytes: 3_328_599_654,
            guarantee: Guarantee::Reserved {
                bytes: 12 << 20,
                basis: Basis::History { max_bytes: 6 << 20, samples: 5 },
            },
            skipped: vec![("ram".into(), Skip::NoRoom { free_bytes: 1000, wanted_bytes: 12 << 20 })],
        };
        assert_eq!(
            reason.to_string(),
            "fastest tier with room: nvme has 3.1 GiB free, 12 MiB reserved because such files reached 6 MiB before \
             (5 seen); ram has 1000 B free of the 12 MiB wanted"
        );
    }

    #[test]
    fn similar_reasons_have_the_same_brief_form() {
        let of =
            |free_bytes| Reason::Store { skipped: vec![("ram".into(), Skip::NoRoom { free_bytes, wanted_bytes: 7 })] };
        assert_eq!(of(1).brief(), of(2).brief());
        assert_eq!(of(1).brief(), "no tier can take it; ram has no room");
        assert_ne!(of(1).brief(), Reason::Store { skipped: Vec::new() }.brief());
    }

    #[test]
    fn rounding_keeps_the_printed_sentence() {
        assert_eq!(rounded(0), 0);
        assert_eq!(rounded(1 << 30), 1 << 30);
        assert_eq!(rounded((4 << 30) - 4096), 4 << 30);
        assert_eq!(rounded(u64::MAX), 0xff << 56);
        let of = |free_bytes| Reason::Tier {
            tier: "ram".into(),
            preferred: false,
            free_bytes,
            guarantee: Guarantee::Ample { bytes: 1 << 20 },
            skipped: Vec::new(),
        };
        assert_eq!(of((4 << 30) - 4096).rounded(), of((4 << 30) - 8192).rounded());
    }

    #[test]
    fn bytes_print_with_binary_units() {
        for (bytes, text) in [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (1 << 20, "1 MiB")] {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
        assert_eq!(Bytes((1 << 20) - 1).to_string(), "1 MiB");
        assert_eq!(Bytes(u64::MAX).to_string(), "16 EiB");
    }
}
