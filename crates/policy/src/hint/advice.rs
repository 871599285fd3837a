//! What the hints of a file say together, in the words of a rule.
//!
//! It knows no hint by its name.

use crate::hint::acting::Acting;
use crate::words::{Collocate, ReplicasAt, Timing};
use surgetank_types::model::Mode;
use surgetank_types::sync::Arc;

/// The combined meaning of hints, as a rule would set it. `None` means that no hint sets the attribute.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Advice {
    /// What happens to the file after it is written.
    pub mode: Option<Mode>,
    /// When the drain starts with it.
    pub timing: Option<Timing>,
    /// Its expected size, in bytes.
    pub size_bytes: Option<u64>,
    /// Name of the tier to prefer.
    pub tier: Option<Arc<str>>,
    /// Whether it is not evicted.
    pub pin: Option<bool>,
    /// Whether it is copied to a tier before its use.
    pub prefetch: Option<bool>,
    /// Its next read.
    pub next_read: Option<NextRead>,
    /// On how many members of a pool it is until the store has it.
    pub replicas: Option<u32>,
    /// When it is there.
    pub replicas_at: Option<ReplicasAt>,
    /// On which member its content is.
    pub collocate: Option<Collocate>,
    /// What is to be done at operations on it.
    pub acting: Acting,
}

/// When a file will be read again, as the workflow's graph tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum NextRead {
    /// At this position of an order over all files: smaller numbers are read sooner.
    At(u64),
    /// No program will read it again.
    Never,
}

impl Advice {
    /// Takes from `weaker` what is not set here.
    pub fn or(&mut self, weaker: &Self) {
        self.mode = self.mode.or(weaker.mode);
        self.timing = self.timing.or(weaker.timing);
        self.size_bytes = self.size_bytes.or(weaker.size_bytes);
        if self.tier.is_none() {
            self.tier.clone_from(&weaker.tier);
        }
        self.pin = self.pin.or(weaker.pin);
        self.prefetch = self.prefetch.or(weaker.prefetch);
        self.next_read = self.next_read.or(weaker.next_read);
        self.replicas = self.replicas.or(weaker.replicas);
        self.replicas_at = self.replicas_at.or(weaker.replicas_at);
        if self.collocate.is_none() {
            self.collocate.clone_from(&weaker.collocate);
        }
        self.acting.or(&weaker.acting);
    }

    /// Does `other` set something that is set here, too?
    pub fn shares_with(&self, other: &Self) -> bool {
        self.beside(other).into_iter().any(|(here, there, _)| here && there) || self.acting.shares_with(&other.acting)
    }

    /// Of what `which` sets: is it here as there?
    pub fn agrees_with(&self, other: &Self, which: &Self) -> bool {
        let set = which.beside(which).into_iter().zip(self.beside(other));
        set.into_iter().all(|((is_set, ..), (.., equal))| !is_set || equal)
            && self.acting.agrees_with(&other.acting, &which.acting)
    }

    /// Does it set nothing?
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Does it set only what needs other members of a pool?
    pub fn needs_a_pool(&self) -> bool {
        let rest = Self { replicas: None, replicas_at: None, collocate: None, ..self.clone() };
        rest.is_empty() && !self.is_empty()
    }

    /// Of each attribute: is it set here, is it set there, are both equal?
    fn beside(&self, other: &Self) -> [(bool, bool, bool); 10] {
        fn pair<T: PartialEq>(a: &Option<T>, b: &Option<T>) -> (bool, bool, bool) {
            (a.is_some(), b.is_some(), a == b)
        }
        [
            pair(&self.mode, &other.mode),
            pair(&self.timing, &other.timing),
            pair(&self.size_bytes, &other.size_bytes),
            pair(&self.tier, &other.tier),
            pair(&self.pin, &other.pin),
            pair(&self.prefetch, &other.prefetch),
            pair(&self.next_read, &other.next_read),
            pair(&self.replicas, &other.replicas),
            pair(&self.replicas_at, &other.replicas_at),
            pair(&self.collocate, &other.collocate),
        ]
    }
}
