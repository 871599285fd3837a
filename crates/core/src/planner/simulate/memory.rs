//! The kernel's page cache: which sets memory still has, and how far writers may be ahead of a device.

use std::collections::{BTreeMap, HashMap};

/// The content of one node's page cache: whole sets, least recently used out first.
#[derive(Debug, Clone)]
pub struct PageCache {
    room: f64,
    /// Memory that tiers take.
    taken: f64,
    held: f64,
    sets: HashMap<usize, (u64, f64)>,
    oldest: BTreeMap<u64, usize>,
    tick: u64,
}

impl PageCache {
    pub fn new(room: f64) -> Self {
        Self { room, taken: 0.0, held: 0.0, sets: HashMap::new(), oldest: BTreeMap::new(), tick: 0 }
    }

    /// Bytes of the set in the cache.
    pub fn has(&self, set: usize) -> f64 {
        self.sets.get(&set).map_or(0.0, |(_, bytes)| *bytes)
    }

    pub fn put(&mut self, set: usize, bytes: f64) {
        self.forget(set);
        if bytes <= 0.0 || bytes > self.room - self.taken {
            return;
        }
        self.tick += 1;
        self.sets.insert(set, (self.tick, bytes));
        self.oldest.insert(self.tick, set);
        self.held += bytes;
        self.shrink();
    }

    /// Memory moves to a tier, or returns from it.
    pub fn take(&mut self, bytes: f64) {
        self.taken += bytes;
        self.shrink();
    }

    fn shrink(&mut self) {
        while self.held > self.room - self.taken {
            let Some((_, set)) = self.oldest.first_key_value().map(|(tick, set)| (*tick, *set)) else {
                break;
            };
            self.forget(set);
        }
    }

    fn forget(&mut self, set: usize) {
        if let Some((tick, bytes)) = self.sets.remove(&set) {
            self.oldest.remove(&tick);
            self.held -= bytes;
        }
    }
}

/// Dirty pages of one device: writers run at memory's speed until it is full, then at the device's.
///
/// While it is full, writers write *through*: each byte in pushes one out. The write-back of the rest continues beside
/// them. Write-back begins with a small minimum, or when no flow writes any more.
#[derive(Debug, Clone)]
pub struct Buffer {
    pub level: f64,
    limit: f64,
    pub full: bool,
}

/// Once full, it accepts bytes again with this much room: the kernel also releases writers in bursts.
const TAKES_AGAIN: f64 = 0.9;
const WRITES_BACK_FROM: f64 = 0.05;
/// Levels are sums of many steps: less than this part of the limit, or of a byte, counts as zero.
const ROUNDING: f64 = 1e-9;

impl Buffer {
    pub fn new(limit: f64) -> Self {
        Self { level: 0.0, limit, full: limit <= 0.0 }
    }

    pub fn is_empty(&self) -> bool {
        self.level <= self.limit * ROUNDING
    }

    pub fn is_to_flush(&self, writers: bool) -> bool {
        !self.is_empty() && (!writers || self.full || self.level >= self.limit * (WRITES_BACK_FROM - ROUNDING))
    }

    pub fn turn(&mut self, writers: bool) {
        if self.limit <= 0.0 {
            return;
        }
        if self.level >= self.limit * (1.0 - ROUNDING) {
            self.full = true;
        } else if !writers || self.level <= self.limit * (TAKES_AGAIN + ROUNDING) {
            self.full = false;
        }
    }

    /// Seconds until it changes its state, at these rates.
    pub fn turns_after_s(&self, inflow: f64, outflow: f64) -> f64 {
        if self.limit <= 0.0 || inflow == outflow {
            return f64::INFINITY;
        }
        let net = inflow - outflow;
        let goal = if net > 0.0 {
            if self.full {
                return f64::INFINITY;
            }
            if outflow == 0.0 && self.level < self.limit * (WRITES_BACK_FROM - ROUNDING) {
                self.limit * WRITES_BACK_FROM
            } else {
                self.limit
            }
        } else if self.full && self.level > self.limit * (TAKES_AGAIN + ROUNDING) {
            self.limit * TAKES_AGAIN
        } else {
            0.0
        };
        ((goal - self.level) / net).max(0.0)
    }

    pub fn gain(&mut self, bytes: f64) {
        self.level = (self.level + bytes).clamp(0.0, self.limit.max(0.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_cache_evicts_the_least_recently_used_set() {
        let mut cache = PageCache::new(10.0);
        cache.put(1, 4.0);
        cache.put(2, 4.0);
        cache.put(1, 4.0);
        cache.put(3, 4.0);
        assert_eq!([1, 2, 3].map(|set| cache.has(set)), [4.0, 0.0, 4.0]);
        cache.take(5.0);
        assert_eq!([1, 3].map(|set| cache.has(set)), [0.0, 4.0]);
        cache.put(4, 11.0);
        assert_eq!(cache.has(4), 0.0);
    }

    #[test]
    fn buffer_fills_and_accepts_again_after_a_flush() {
        let mut buffer = Buffer::new(100.0);
        assert_eq!(buffer.turns_after_s(20.0, 0.0), 0.25);
        assert!(!buffer.is_to_flush(true));
        buffer.gain(5.0);
        assert!(buffer.is_to_flush(true));
        assert_eq!(buffer.turns_after_s(29.0, 10.0), 5.0);
        buffer.gain(95.0);
        buffer.turn(true);
        assert!(buffer.full);
        assert_eq!(buffer.turns_after_s(0.0, 5.0), 2.0);
        buffer.gain(-10.0);
        buffer.turn(true);
        assert!(!buffer.full);
        assert!(Buffer::new(0.0).full);
    }
}
