//! Names of a directory that the kernel caches as absent.
//!
//! The danger that it avoids: the shim creates a file, and processes without the shim do not see it, because the kernel
//! still believes that the name is absent.

use foldhash::HashSet;

use crate::Name;

/// The cached names. When they are too many, all names count as cached: an unnecessary invalidation costs only a
/// message.
#[derive(Debug, Default)]
pub struct KernelNegativeEntries {
    names: HashSet<Name>,
    all: bool,
}

impl KernelNegativeEntries {
    const NAMES_MAX: usize = 256;

    /// All names count as cached.
    pub fn all(&mut self) {
        *self = Self { names: HashSet::default(), all: true };
    }

    /// The kernel caches this name as absent.
    pub fn add(&mut self, name: &[u8]) {
        if self.all {
            return;
        }
        self.names.insert(Name::from(name));
        if self.names.len() > Self::NAMES_MAX {
            self.all();
        }
    }

    /// All cached names, for the caller to invalidate. `None`: too many to list.
    pub fn take_all(&mut self) -> Option<Vec<Name>> {
        (!self.all).then(|| self.names.drain().collect())
    }

    /// Is this name cached? The caller invalidates it.
    pub fn take(&mut self, name: &[u8]) -> bool {
        self.all || self.names.remove(name)
    }
}

#[cfg(test)]
mod tests {
    use super::KernelNegativeEntries;

    #[test]
    fn names_count_once_and_too_many_always() {
        let mut entries = KernelNegativeEntries::default();
        assert!(!entries.take(b"a"));
        entries.add(b"a");
        assert!(!entries.take(b"b"));
        assert!(entries.take(b"a"));
        assert!(!entries.take(b"a"));
        for number in 0..=KernelNegativeEntries::NAMES_MAX {
            entries.add(number.to_string().as_bytes());
        }
        assert!(entries.take(b"never cached") && entries.take(b"1") && entries.take(b"1"));
    }
}
