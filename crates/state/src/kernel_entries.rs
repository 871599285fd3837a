//! What the kernel was told of a directory, and which names of it, that they do not exist. Danger avoided: a name that the shim makes, and
//! that stays missing for everybody else because nobody told the kernel otherwise.

use foldhash::HashSet;

use crate::Name;

/// Names of a directory; too many are all names, for one more than it was told of costs only a message.
#[derive(Debug, Default)]
pub struct KernelNegativeEntries {
    names: HashSet<Name>,
    all: bool,
}

impl KernelNegativeEntries {
    const NAMES_MAX: usize = 256;

    pub fn all(&mut self) {
        *self = Self { names: HashSet::default(), all: true };
    }

    pub fn add(&mut self, name: &[u8]) {
        if self.all {
            return;
        }
        self.names.insert(Name::from(name));
        if self.names.len() > Self::NAMES_MAX {
            self.all();
        }
    }

    /// All of them, which are to be told otherwise; `None`: too many to know.
    pub fn take_all(&mut self) -> Option<Vec<Name>> {
        (!self.all).then(|| self.names.drain().collect())
    }

    /// Was it told of this one? Whoever asks tells it otherwise.
    pub fn take(&mut self, name: &[u8]) -> bool {
        self.all || self.names.remove(name)
    }
}

#[cfg(test)]
mod tests {
    use super::KernelNegativeEntries;

    #[test]
    fn each_name_once_and_too_many_always() {
        let mut told = KernelNegativeEntries::default();
        assert!(!told.take(b"a"));
        told.add(b"a");
        assert!(!told.take(b"b"));
        assert!(told.take(b"a"));
        assert!(!told.take(b"a"));
        for number in 0..=KernelNegativeEntries::NAMES_MAX {
            told.add(number.to_string().as_bytes());
        }
        assert!(told.take(b"never told") && told.take(b"1") && told.take(b"1"));
    }
}
