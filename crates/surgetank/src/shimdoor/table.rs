//! Open-addressed tables in shared memory, with one writer and many readers that take no lock.
//!
//! An entry that readers can find never changes, except in the word that publishes it, or in one that readers check
//! afterwards. An erased entry stays as "was used", so that probes continue past it. When too many are used, the writer
//! rebuilds the table in place, twice as large if needed. Meanwhile the index's generation is odd, and readers keep
//! away.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use super::abi;
use super::memory::Memory;

/// An entry of a table.
pub trait Slot: Copy + Default {
    /// The begin of its probe.
    fn start(&self) -> u64;
    fn is_free(&self) -> bool;
    fn is_tombstone(&self) -> bool;
    /// Makes it visible to readers.
    ///
    /// # Safety
    /// `at` points to an entry of the mapped table.
    unsafe fn publish(&self, at: *mut Self);
    /// Replaces an entry with the same key; readers always find one of the two.
    ///
    /// # Safety
    /// As above.
    unsafe fn replace(&self, at: *mut Self) {
        // SAFETY: the caller's promise.
        unsafe { self.publish(at) };
    }
    /// Readers continue past it.
    ///
    /// # Safety
    /// As above.
    unsafe fn erase(at: *mut Self);
}

const WAS_USED: u32 = u32::MAX;

impl Slot for abi::Name {
    fn start(&self) -> u64 {
        self.a
    }
    fn is_free(&self) -> bool {
        self.a == 0
    }
    fn is_tombstone(&self) -> bool {
        self.a == 1
    }
    unsafe fn publish(&self, at: *mut Self) {
        // SAFETY: the caller's promise; `a` is aligned as the whole is.
        unsafe {
            let a = AtomicU64::from_ptr(&raw mut (*at).a);
            a.store(1, Ordering::Relaxed);
            fence(Ordering::Release);
            at.write_volatile(Self { a: 1, ..*self });
            a.store(self.a, Ordering::Release);
        }
    }
    unsafe fn replace(&self, at: *mut Self) {
        // SAFETY: the caller's promise; readers that see one of both compare the id with the record's own, and ask the
        // mount.
        unsafe {
            AtomicU64::from_ptr(&raw mut (*at).id).store(self.id, Ordering::Release);
            AtomicU32::from_ptr(&raw mut (*at).record).store(self.record, Ordering::Release);
        }
    }
    unsafe fn erase(at: *mut Self) {
        // SAFETY: the caller's promise.
        unsafe { AtomicU64::from_ptr(&raw mut (*at).a) }.store(1, Ordering::Release);
    }
}

macro_rules! by_record {
    ($type:ty, $start:expr) => {
        impl Slot for $type {
            fn start(&self) -> u64 {
                $start(self)
            }
            fn is_free(&self) -> bool {
                self.record == 0
            }
            fn is_tombstone(&self) -> bool {
                self.record == WAS_USED
            }
            unsafe fn publish(&self, at: *mut Self) {
                // SAFETY: the caller's promise; readers compare with the record itself, so a mixture is harmless.
                unsafe {
                    at.write_volatile(Self { record: WAS_USED, ..*self });
                    AtomicU32::from_ptr(&raw mut (*at).record).store(self.record, Ordering::Release);
                }
            }
            unsafe fn erase(at: *mut Self) {
                // SAFETY: the caller's promise.
                unsafe { AtomicU32::from_ptr(&raw mut (*at).record) }.store(WAS_USED, Ordering::Release);
            }
        }
    };
}
by_record!(abi::Dir, |dir: &abi::Dir| abi::mix(dir.ino));
by_record!(abi::Plain, |plain: &abi::Plain| abi::mix(plain.backing_ino.wrapping_add(u64::from(plain.device))));

pub struct Table<S> {
    /// Offset of the header field that gives the table's offset.
    extent_at: usize,
    offset: usize,
    pub capacity: usize,
    capacity_max: usize,
    /// Entries in use, plus entries that were.
    taken: usize,
    live: usize,
    slot: std::marker::PhantomData<S>,
}

impl<S: Slot> Table<S> {
    pub fn new(extent_at: usize, offset: usize, capacity: usize, capacity_max: usize) -> Self {
        Self { extent_at, offset, capacity, capacity_max, taken: 0, live: 0, slot: std::marker::PhantomData }
    }

    pub fn publish_extent(&self, memory: &Memory) {
        let extent = abi::Extent { offset: self.offset as u64, capacity: self.capacity as u64 };
        // SAFETY: `extent_at` is the offset of an extent in the header.
        unsafe { memory.at(self.extent_at).cast::<abi::Extent>().write_volatile(extent) };
    }
    pub fn offset(&self) -> usize {
        self.offset
    }
    pub fn bytes(&self) -> usize {
        self.capacity * size_of::<S>()
    }

    fn at(&self, memory: &Memory, index: usize) -> *mut S {
        memory.at(self.offset + index * size_of::<S>()).cast()
    }

    /// The entry for which `is` holds, on the probe from `start`.
    fn find(&self, memory: &Memory, start: u64, is: impl Fn(&S) -> bool) -> Option<*mut S> {
        let mask = self.capacity - 1;
        let mut index = start as usize & mask;
        loop {
            let at = self.at(memory, index);
            // SAFETY: the index is below the capacity, whose bytes are mapped; no other thread or process writes.
            let slot = unsafe { *at };
            if slot.is_free() {
                return None;
            }
            if !slot.is_tombstone() && is(&slot) {
                return Some(at);
            }
            index = (index + 1) & mask;
        }
    }

    pub fn get(&self, memory: &Memory, start: u64, is: impl Fn(&S) -> bool) -> Option<S> {
        // SAFETY: `find` returns entries of the table.
        self.find(memory, start, is).map(|at| unsafe { *at })
    }

    /// Replaces the entry for which `is` holds, or adds one. `false`: the table is full.
    pub fn put(&mut self, memory: &Memory, slot: S, is: impl Fn(&S) -> bool) -> bool {
        if let Some(at) = self.find(memory, slot.start(), is) {
            // SAFETY: `find` returns entries of the table.
            unsafe { slot.replace(at) };
            return true;
        }
        if self.taken * 10 >= self.capacity * 7 && !self.rebuild(memory) {
            return false;
        }
        self.add(memory, slot);
        true
    }

    fn add(&mut self, memory: &Memory, slot: S) {
        let mask = self.capacity - 1;
        let mut index = slot.start() as usize & mask;
        loop {
            let at = self.at(memory, index);
            // SAFETY: as in `find`.
            let there = unsafe { *at };
            if there.is_free() || there.is_tombstone() {
                self.taken += usize::from(there.is_free());
                self.live += 1;
                // SAFETY: as in `find`.
                unsafe { slot.publish(at) };
                return;
            }
            index = (index + 1) & mask;
        }
    }

    pub fn remove(&mut self, memory: &Memory, start: u64, is: impl Fn(&S) -> bool) {
        if let Some(at) = self.find(memory, start, is) {
            self.live -= 1;
            // SAFETY: `find` returns entries of the table.
            unsafe { S::erase(at) };
        }
    }

    /// Rebuilds the table without erased entries; larger if more than a third is in use. `false`: no room, everything
    /// stays.
    fn rebuild(&mut self, memory: &Memory) -> bool {
        let grows = self.live * 3 > self.capacity;
        let capacity = if grows { self.capacity * 2 } else { self.capacity };
        if capacity > self.capacity_max || !memory.provide(self.offset, capacity * size_of::<S>()) {
            return false;
        }
        memory.while_unsettled(|| {
            let live: Vec<S> = (0..self.capacity)
                // SAFETY: as in `find`.
                .map(|index| unsafe { *self.at(memory, index) })
                .filter(|slot| !slot.is_free() && !slot.is_tombstone())
                .collect();
            for index in 0..self.capacity {
                // SAFETY: as in `find`.
                unsafe { self.at(memory, index).write_volatile(S::default()) };
            }
            self.capacity = capacity;
            self.publish_extent(memory);
            self.taken = 0;
            self.live = 0;
            for slot in live {
                self.add(memory, slot);
            }
        });
        true
    }
}
