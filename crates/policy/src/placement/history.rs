//! The sizes of earlier files, by class of name: the basis of reservations for files without a hint.
//!
//! A file belongs to two classes, whatever its directory: its name with every run of digits folded (`tile_#.tif`), and its
//! extension (`*.tif`). The narrower one counts if it has enough samples.
//!
//! The memory is bounded: two generations of classes. A class that is not seen for a whole generation is dropped, so names that
//! never repeat (UUIDs) displace only each other. A maximum is dropped after two windows of samples below it.

use std::collections::HashMap;

use super::choose::{Expected, HISTORY_SAMPLES_MIN};

const CLASSES_PER_GENERATION: usize = 4096;
const WINDOW_SAMPLES: u32 = 64;
const EXTENSION_BYTES_MAX: usize = 16;

#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    samples: u32,
    /// The maxima of the window that is being filled, and of the one before.
    max_bytes: u64,
    max_before_bytes: u64,
}

/// Sizes of sealed files, by class of name.
#[derive(Debug, Default)]
pub struct History {
    young: HashMap<Box<[u8]>, Seen>,
    old: HashMap<Box<[u8]>, Seen>,
}

impl History {
    /// An empty history.
    pub fn new() -> Self {
        Self::default()
    }

    /// Records that a file of this path was sealed with this size.
    pub fn observe(&mut self, path: &[u8], size_bytes: u64) {
        let name = name_of(path);
        for class in [Some(name_class(name)), extension_class(name)].into_iter().flatten() {
            let mut seen = self.get(&class).unwrap_or_default();
            if seen.samples > 0 && seen.samples.is_multiple_of(WINDOW_SAMPLES) {
                seen.max_before_bytes = std::mem::take(&mut seen.max_bytes);
            }
            seen.samples = seen.samples.saturating_add(1);
            seen.max_bytes = seen.max_bytes.max(size_bytes);
            if self.young.len() >= CLASSES_PER_GENERATION && !self.young.contains_key(&class) {
                self.old = std::mem::take(&mut self.young);
            }
            self.young.insert(class, seen);
        }
    }

    /// The size that a new file of this path will probably have.
    pub fn expected(&self, path: &[u8]) -> Expected {
        let name = name_of(path);
        let by_name = self.get(&name_class(name));
        let by_extension = || extension_class(name).and_then(|class| self.get(&class));
        let enough = |seen: &Seen| seen.samples >= HISTORY_SAMPLES_MIN;
        match by_name.filter(enough).or_else(by_extension).or(by_name) {
            Some(seen) => {
                Expected::History { max_bytes: seen.max_bytes.max(seen.max_before_bytes), samples: seen.samples }
            }
            None => Expected::Unknown,
        }
    }

    fn get(&self, class: &[u8]) -> Option<Seen> {
        self.young.get(class).or_else(|| self.old.get(class)).copied()
    }
}

fn name_of(path: &[u8]) -> &[u8] {
    path.rsplit(|byte| *byte == b'/').next().unwrap_or(path)
}

/// `tile_0017.tif` → `tile_#.tif`.
fn name_class(name: &[u8]) -> Box<[u8]> {
    let mut class = Vec::with_capacity(name.len());
    for byte in name {
        if !byte.is_ascii_digit() {
            class.push(*byte);
        } else if class.last() != Some(&b'#') {
            class.push(b'#');
        }
    }
    class.into()
}

/// `tile_0017.tif` → `*.tif`; none for dot files, and for endings that are numbers or too long to be a type of file.
fn extension_class(name: &[u8]) -> Option<Box<[u8]>> {
    let dot = name.iter().rposition(|byte| *byte == b'.').filter(|dot| *dot > 0)?;
    let extension = &name[dot + 1..];
    let kind =
        !extension.is_empty() && extension.len() <= EXTENSION_BYTES_MAX && !extension.iter().all(u8::is_ascii_digit);
    // A name class starts with `*` and a dot only if a file is really named so; the two then share a class, which is harmless.
    kind.then(|| [b"*.", extension].concat().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrow_class_with_samples_counts_before_wide_one() {
        let mut history = History::new();
        assert_eq!(history.expected(b"a/tile_1.tif"), Expected::Unknown);
        for index in 0..3_u64 {
            history.observe(format!("a/tile_{index}.tif").as_bytes(), 100 + index);
        }
        history.observe(b"mosaic.tif", 9000);
        assert_eq!(history.expected(b"b/c/tile_777.tif"), Expected::History { max_bytes: 102, samples: 3 });
        // One mosaic says little about mosaics; the extension counts.
        assert_eq!(history.expected(b"mosaic.tif"), Expected::History { max_bytes: 9000, samples: 4 });
        assert_eq!(history.expected(b"new.tif"), Expected::History { max_bytes: 9000, samples: 4 });
        assert_eq!(history.expected(b"new.txt"), Expected::Unknown);
    }

    #[test]
    fn old_maximum_after_two_windows_is_dropped() {
        let mut history = History::new();
        history.observe(b"x.dat", 1 << 40);
        for _ in 0..WINDOW_SAMPLES * 2 {
            history.observe(b"x.dat", 10);
        }
        assert_eq!(history.expected(b"x.dat"), Expected::History { max_bytes: 10, samples: 2 * WINDOW_SAMPLES + 1 });
    }

    #[test]
    fn history_stays_bounded_and_keeps_repeated_classes() {
        let mut history = History::new();
        for index in 0..50_000_u32 {
            // Letters only, so that every name is its own class.
            let name: String =
                format!("{index:x}").chars().map(|c| char::from(b'a' + c.to_digit(16).unwrap() as u8)).collect();
            history.observe(format!("{name}.uuid").as_bytes(), 7);
            assert!(history.young.len() <= CLASSES_PER_GENERATION && history.old.len() <= CLASSES_PER_GENERATION);
        }
        assert_eq!(history.expected(b"zzz.uuid"), Expected::History { max_bytes: 7, samples: 50_000 });
    }

    #[test]
    fn names_are_folded_into_classes() {
        assert_eq!(&*name_class(b"a01b22.c3"), b"a#b#.c#");
        assert_eq!(extension_class(b"a.fits").as_deref(), Some(&b"*.fits"[..]));
        for name in [&b".bashrc"[..], b"part.00017", b"plain", b"dot.", b"x.averyveryverylongending"] {
            assert_eq!(extension_class(name), None);
        }
    }
}
