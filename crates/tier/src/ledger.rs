//! The ledger of one device: the bytes that Surgetank's files use, the bytes that are reserved, and the limits of both.
//!
//! Invariants, at every moment and under any concurrency (each device's ledger has one lock, held briefly):
//! - a reservation is granted only if afterwards `used + reserved + ballast ≤ min(cap, room)`;
//! - `used` is reported, never refused, and may therefore exceed the limit: then nothing is free;
//! - a share of a tier's cap moves between devices only out of what the giving device has not committed. The shares of a tier
//!   therefore always add up to its cap, and no move leaves a device above its share.
//!
//! The danger that it avoids: two opens that both see the last gigabyte free and both get it.

/// The space that a device leaves to other users: 2 % or 64 MiB, whichever is more, but at most a sixteenth, so that a tmpfs of
/// 16 MiB is usable.
pub(super) fn floor_bytes(total_bytes: u64) -> u64 {
    const FLOOR_BYTES_MIN: u64 = 64 << 20;
    (total_bytes / 50).max(FLOOR_BYTES_MIN).min(total_bytes / 16)
}

/// The origin of a device's cap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CapRule {
    /// A share of what the configuration allows the tier.
    Share,
    /// The configuration has no cap: this many sixteenths of what the device could hold, computed again in every poll.
    Sixteenths(u64),
}

#[derive(Debug, Clone)]
pub(super) struct Ledger {
    rule: CapRule,
    used_bytes: u64,
    reserved_bytes: u64,
    ballast_bytes: u64,
    cap_bytes: u64,
    /// What the device could hold at the last poll: Surgetank's own bytes plus what is available, less the floor.
    room_bytes: u64,
    /// The quota that a refusal revealed; the file system's own numbers do not report it.
    quota_bytes: Option<u64>,
}

impl Ledger {
    pub fn new(rule: CapRule, cap_bytes: u64) -> Self {
        Self { rule, used_bytes: 0, reserved_bytes: 0, ballast_bytes: 0, cap_bytes, room_bytes: 0, quota_bytes: None }
    }

    pub fn used_bytes(&self) -> u64 {
        self.used_bytes
    }
    pub fn reserved_bytes(&self) -> u64 {
        self.reserved_bytes
    }
    pub fn cap_bytes(&self) -> u64 {
        self.cap_bytes
    }

    /// All bytes that count against cap and room.
    pub fn committed_bytes(&self) -> u64 {
        self.used_bytes.saturating_add(self.reserved_bytes).saturating_add(self.ballast_bytes)
    }

    fn limit_bytes(&self) -> u64 {
        self.cap_bytes.min(self.room_bytes).min(self.quota_bytes.unwrap_or(u64::MAX))
    }

    pub fn free_bytes(&self) -> u64 {
        self.limit_bytes().saturating_sub(self.committed_bytes())
    }

    /// Bytes to evict, so that the cap holds and other users get their space; the ballast is released separately.
    pub fn excess_bytes(&self) -> u64 {
        self.used_bytes.saturating_add(self.reserved_bytes).saturating_sub(self.limit_bytes())
    }

    /// Bytes that other users need at once, whatever the cap is.
    pub fn deficit_bytes(&self) -> u64 {
        self.used_bytes.saturating_sub(self.room_bytes)
    }

    pub fn add_used(&mut self, bytes: i64) {
        let used_bytes = self.used_bytes.checked_add_signed(bytes);
        debug_assert!(used_bytes.is_some(), "more freed ({bytes}) than used ({})", self.used_bytes);
        self.used_bytes = used_bytes.unwrap_or(if bytes < 0 { 0 } else { u64::MAX });
    }

    pub fn try_reserve(&mut self, bytes: u64) -> bool {
        let granted = bytes <= self.free_bytes();
        if granted {
            self.reserved_bytes += bytes;
        }
        granted
    }

    pub fn unreserve(&mut self, bytes: u64) {
        debug_assert!(
            bytes <= self.reserved_bytes,
            "more unreserved ({bytes}) than reserved ({})",
            self.reserved_bytes
        );
        self.reserved_bytes = self.reserved_bytes.saturating_sub(bytes);
    }

    pub fn set_ballast(&mut self, bytes: u64) {
        self.ballast_bytes = bytes;
    }

    /// Records what the device has beyond Surgetank's own bytes (without its floor); negative if they are too many.
    /// `used_before_bytes` was read before the device was asked: bytes that are written or freed meanwhile are counted so that
    /// the room is too small rather than too large.
    pub fn observe(&mut self, used_before_bytes: u64, available_bytes: i64) {
        let ours_bytes = used_before_bytes.min(self.used_bytes).saturating_add(self.ballast_bytes);
        self.room_bytes = ours_bytes.saturating_add_signed(available_bytes);
        if let CapRule::Sixteenths(parts) = self.rule {
            self.cap_bytes = (self.room_bytes / 16).saturating_mul(parts);
        }
    }

    /// The device reported that it is full, against the ledger: nothing is free until the next poll.
    pub fn observe_full(&mut self) {
        self.room_bytes = self.room_bytes.min(self.committed_bytes());
    }

    /// A quota refused more than what is committed.
    pub fn observe_quota(&mut self) {
        self.quota_bytes = Some(self.used_bytes.saturating_add(self.ballast_bytes));
    }

    pub fn forget_quota(&mut self) {
        self.quota_bytes = None;
    }

    /// Gives away up to `bytes` of the cap, as far as they are not committed. Returns the bytes given.
    pub fn give_cap(&mut self, bytes: u64) -> u64 {
        let given_bytes = bytes.min(self.cap_bytes.saturating_sub(self.committed_bytes()));
        self.cap_bytes -= given_bytes;
        given_bytes
    }

    pub fn take_cap(&mut self, bytes: u64) {
        self.cap_bytes = self.cap_bytes.saturating_add(bytes);
    }

    /// What this device could still take if only its room counted: its weight when a tier's cap is shared out.
    pub fn spare_room_bytes(&self) -> u64 {
        self.room_bytes.saturating_sub(self.committed_bytes())
    }

    pub fn cap_is_shared(&self) -> bool {
        self.rule == CapRule::Share
    }
}

/// Divides `whole` in proportion to `weights` (equally when all are 0); the parts add up to `whole` exactly.
pub(super) fn share_out(whole: u64, weights: &[u64]) -> Vec<u64> {
    let total: u128 = weights.iter().map(|weight| u128::from(*weight)).sum();
    let count = weights.len() as u64;
    let mut left = whole;
    let mut parts: Vec<u64> = weights
        .iter()
        .map(|weight| {
            let part = match total {
                0 => whole / count,
                // Fits: weight ≤ total, so the quotient is at most `whole`.
                _ => (u128::from(whole) * u128::from(*weight) / total) as u64,
            };
            left -= part;
            part
        })
        .collect();
    // The remainder of the rounding goes to the first of the heaviest.
    if let Some(heaviest) = (0..weights.len()).max_by_key(|index| (weights[*index], std::cmp::Reverse(*index))) {
        parts[heaviest] += left;
    }
    parts
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Step {
        Reserve(u64),
        Write(u64),
        Free(u64),
        Unreserve(u64),
        Stranger(u64),
        Give(u64),
        Ballast(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            4 => (0..400u64).prop_map(Step::Reserve),
            3 => (0..400u64).prop_map(Step::Write),
            2 => (0..400u64).prop_map(Step::Free),
            2 => (0..400u64).prop_map(Step::Unreserve),
            2 => (0..1000u64).prop_map(Step::Stranger),
            1 => (0..300u64).prop_map(Step::Give),
            1 => (0..50u64).prop_map(Step::Ballast),
        ];
        prop::collection::vec(step, 1..200)
    }

    proptest! {
        /// A simulated device of 2000 bytes with another user on it: every reservation finds its space.
        #[test]
        fn reservations_never_exceed_cap_or_room(steps in steps(), cap in 0..2500u64) {
            const DEVICE_BYTES: u64 = 2000;
            const FLOOR_BYTES: u64 = 40;
            let mut ledger = Ledger::new(CapRule::Share, cap);
            let (mut used, mut reserved, mut stranger, mut ballast, mut cap) = (0u64, 0u64, 0u64, 0u64, cap);
            ledger.observe(0, (DEVICE_BYTES - FLOOR_BYTES).cast_signed());
            for step in steps {
                match step {
                    Step::Reserve(bytes) => {
                        let fits = used + reserved + ballast + bytes <= cap
                            && used + reserved + ballast + bytes + stranger + FLOOR_BYTES <= DEVICE_BYTES;
                        prop_assert_eq!(ledger.try_reserve(bytes), fits || bytes == 0);
                        if fits {
                            reserved += bytes;
                        }
                    }
                    Step::Write(bytes) => {
                        // A writer turns its reservation into use in the order that the device's header prescribes.
                        let bytes = bytes.min(reserved);
                        ledger.add_used(bytes as i64);
                        ledger.unreserve(bytes);
                        used += bytes;
                        reserved -= bytes;
                    }
                    Step::Free(bytes) => {
                        let bytes = bytes.min(used);
                        ledger.add_used(-(bytes as i64));
                        used -= bytes;
                    }
                    Step::Unreserve(bytes) => {
                        let bytes = bytes.min(reserved);
                        ledger.unreserve(bytes);
                        reserved -= bytes;
                    }
                    Step::Stranger(bytes) => stranger = bytes.min(DEVICE_BYTES - used - ballast),
                    Step::Give(bytes) => cap -= ledger.give_cap(bytes),
                    Step::Ballast(bytes) => {
                        if bytes <= ballast || bytes - ballast <= ledger.free_bytes() {
                            ballast = bytes;
                            ledger.set_ballast(bytes);
                        }
                    }
                }
                let left = DEVICE_BYTES.saturating_sub(used + ballast + stranger).saturating_sub(FLOOR_BYTES);
                ledger.observe(used, left.cast_signed());
                prop_assert_eq!((ledger.used_bytes(), ledger.reserved_bytes(), ledger.cap_bytes()), (used, reserved, cap));
                prop_assert!(used + reserved + ballast <= cap, "cap passed");
                let limit = cap.min(used + ballast + DEVICE_BYTES.saturating_sub(used + ballast + stranger).saturating_sub(FLOOR_BYTES));
                prop_assert_eq!(ledger.free_bytes(), limit.saturating_sub(used + reserved + ballast));
                prop_assert_eq!(ledger.excess_bytes(), (used + reserved).saturating_sub(limit));
            }
        }

        #[test]
        fn shares_add_up_to_the_whole(whole in any::<u64>(), weights in prop::collection::vec(any::<u64>(), 1..9)) {
            let parts = share_out(whole, &weights);
            prop_assert_eq!(parts.iter().map(|part| u128::from(*part)).sum::<u128>(), u128::from(whole));
            let total: u128 = weights.iter().map(|weight| u128::from(*weight)).sum();
            for (part, weight) in parts.iter().zip(&weights) {
                if let Some(fair) = (u128::from(whole) * u128::from(*weight)).checked_div(total) {
                    prop_assert!(u128::from(*part) >= fair && u128::from(*part) <= fair + weights.len() as u128);
                }
            }
        }
    }

    #[test]
    fn floor_of_tiny_device_scales_down() {
        assert_eq!(floor_bytes(16 << 20), 1 << 20);
        assert_eq!(floor_bytes(64 << 20), 4 << 20);
        assert_eq!(floor_bytes(2 << 30), 64 << 20);
        assert_eq!(floor_bytes(1 << 40), (1 << 40) / 50);
        assert_eq!(floor_bytes(0), 0);
    }

    #[test]
    fn full_report_until_next_poll_leaves_nothing_free() {
        let mut ledger = Ledger::new(CapRule::Share, 1000);
        ledger.observe(0, 1000);
        assert!(ledger.try_reserve(100));
        ledger.observe_full();
        assert_eq!(ledger.free_bytes(), 0);
        assert!(!ledger.try_reserve(1));
        ledger.observe(0, 1000);
        assert_eq!(ledger.free_bytes(), 900);
    }

    #[test]
    fn quota_until_forgotten_limits_reservations() {
        let mut ledger = Ledger::new(CapRule::Share, 1000);
        ledger.observe(0, 1000);
        ledger.add_used(300);
        assert!(ledger.try_reserve(100));
        ledger.observe_quota();
        ledger.observe(300, 700);
        assert_eq!((ledger.free_bytes(), ledger.excess_bytes()), (0, 100));
        // Freed bytes may be used again.
        ledger.add_used(-200);
        assert_eq!(ledger.free_bytes(), 100);
        ledger.forget_quota();
        assert_eq!(ledger.free_bytes(), 800);
    }

    #[test]
    fn cap_without_configuration_follows_device_not_own_use() {
        let mut ledger = Ledger::new(CapRule::Sixteenths(8), 0);
        ledger.observe(0, 1600);
        assert_eq!(ledger.cap_bytes(), 800);
        ledger.add_used(400);
        ledger.observe(400, 1200);
        assert_eq!(ledger.cap_bytes(), 800);
        assert_eq!(ledger.free_bytes(), 400);
        // Another user takes 800: our bytes stay, nothing more is free.
        ledger.observe(400, 400);
        assert_eq!(ledger.cap_bytes(), 400);
        assert_eq!(ledger.free_bytes(), 0);
    }

    /// After a job's memory limit was lowered, or programs used it up, no file left the tier: excess and deficit were one
    /// value.
    #[test]
    fn deficit_below_cap_counts_as_excess() {
        let mut ledger = Ledger::new(CapRule::Share, 1000);
        ledger.observe(0, 1000);
        ledger.add_used(600);
        ledger.observe(600, -250);
        assert_eq!((ledger.free_bytes(), ledger.excess_bytes(), ledger.deficit_bytes()), (0, 250, 250));
        ledger.add_used(-250);
        ledger.observe(350, 0);
        assert_eq!(ledger.excess_bytes(), 0);
        ledger.observe(350, -9999);
        assert_eq!(ledger.excess_bytes(), 350);
        // Over its cap, and no other user needs the space.
        ledger.give_cap(600);
        ledger.add_used(200);
        ledger.observe(550, 1000);
        assert_eq!((ledger.excess_bytes(), ledger.deficit_bytes()), (550 - ledger.cap_bytes(), 0));
    }
}
