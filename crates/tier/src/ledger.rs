//! The ledger of one device: what our files use, what is promised, and how much there may be of both.
//!
//! Invariants, at every moment and under any concurrency (each device's ledger is behind one short lock):
//! - a reservation is granted only while `used + reserved + ballast ≤ min(cap, room)` afterwards;
//! - `used` is a fact that is told to us (never refused), so it may pass the limit: then nothing is free;
//! - share of a tier's cap moves between devices only out of what the giver has not committed, so the
//!   shares of a tier always add up to its cap and no device is caught above its share by the move.
//!
//! The danger it avoids: two openers who both see the last gigabyte free and both get it.

/// What a device keeps untouched for others: 2 % or 64 MiB, whichever is more, but never above a sixteenth,
/// so that a tmpfs of 16 MiB can be used at all.
pub(super) fn floor_bytes(total_bytes: u64) -> u64 {
    const FLOOR_BYTES_MIN: u64 = 64 << 20;
    (total_bytes / 50).max(FLOOR_BYTES_MIN).min(total_bytes / 16)
}

/// How the cap of a device comes about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CapRule {
    /// A share of what the configuration allows the tier.
    Share,
    /// Nobody said: this many sixteenths of what the device could hold for us, looked at in every poll.
    Sixteenths(u64),
}

#[derive(Debug, Clone)]
pub(super) struct Ledger {
    rule: CapRule,
    used_bytes: u64,
    reserved_bytes: u64,
    ballast_bytes: u64,
    cap_bytes: u64,
    /// What the device could hold for us when last looked at: ours plus available less floor.
    room_bytes: u64,
    /// What a quota was seen to allow; the file system's own numbers do not tell.
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

    /// Everything that counts against cap and room.
    pub fn committed_bytes(&self) -> u64 {
        self.used_bytes.saturating_add(self.reserved_bytes).saturating_add(self.ballast_bytes)
    }

    fn limit_bytes(&self) -> u64 {
        self.cap_bytes.min(self.room_bytes).min(self.quota_bytes.unwrap_or(u64::MAX))
    }

    pub fn free_bytes(&self) -> u64 {
        self.limit_bytes().saturating_sub(self.committed_bytes())
    }

    /// What should be evicted so that the cap is kept and others get their room; the ballast yields by itself.
    pub fn excess_bytes(&self) -> u64 {
        self.used_bytes.saturating_add(self.reserved_bytes).saturating_sub(self.limit_bytes())
    }

    /// What others need back at once, whatever the cap is.
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

    /// Takes in what the device has for us beyond what we have (its floor is off already); negative where we have too much.
    /// `used_before_bytes` was read before the device was asked: bytes that were written or freed meanwhile are counted so
    /// that room comes out too small rather than too large.
    pub fn observe(&mut self, used_before_bytes: u64, available_bytes: i64) {
        let ours_bytes = used_before_bytes.min(self.used_bytes).saturating_add(self.ballast_bytes);
        self.room_bytes = ours_bytes.saturating_add_signed(available_bytes);
        if let CapRule::Sixteenths(parts) = self.rule {
            self.cap_bytes = (self.room_bytes / 16).saturating_mul(parts);
        }
    }

    /// The device said that it is full although we thought otherwise: nothing is free until the next look.
    pub fn observe_full(&mut self) {
        self.room_bytes = self.room_bytes.min(self.committed_bytes());
    }

    /// A quota refused more than we have.
    pub fn observe_quota(&mut self) {
        self.quota_bytes = Some(self.used_bytes.saturating_add(self.ballast_bytes));
    }

    pub fn forget_quota(&mut self) {
        self.quota_bytes = None;
    }

    /// Gives up to `bytes` of the cap away, as far as it is not committed.
    pub fn give_cap(&mut self, bytes: u64) -> u64 {
        let given_bytes = bytes.min(self.cap_bytes.saturating_sub(self.committed_bytes()));
        self.cap_bytes -= given_bytes;
        given_bytes
    }

    pub fn take_cap(&mut self, bytes: u64) {
        self.cap_bytes = self.cap_bytes.saturating_add(bytes);
    }

    /// What this device could still take if only its room mattered: the weight in sharing out a tier's cap.
    pub fn spare_room_bytes(&self) -> u64 {
        self.room_bytes.saturating_sub(self.committed_bytes())
    }

    pub fn cap_is_shared(&self) -> bool {
        self.rule == CapRule::Share
    }
}

/// Shares `whole` out in proportion to `weights` (equally when all are 0); the parts add up to `whole` exactly.
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
    // What rounding left over goes to the first of the heaviest.
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
        /// A simulated device of 2000 bytes with a stranger on it: what was reserved always finds room.
        #[test]
        fn reservations_never_pass_cap_or_room(steps in steps(), cap in 0..2500u64) {
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
                        // A writer turns what it reserved into use, in the order callers are told to.
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
        fn shares_add_up(whole in any::<u64>(), weights in prop::collection::vec(any::<u64>(), 1..9)) {
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
    fn the_floor_scales_down_for_tiny_devices() {
        assert_eq!(floor_bytes(16 << 20), 1 << 20);
        assert_eq!(floor_bytes(64 << 20), 4 << 20);
        assert_eq!(floor_bytes(2 << 30), 64 << 20);
        assert_eq!(floor_bytes(1 << 40), (1 << 40) / 50);
        assert_eq!(floor_bytes(0), 0);
    }

    #[test]
    fn a_device_that_says_full_is_full_until_the_next_look() {
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
    fn a_quota_is_believed_until_it_is_forgotten() {
        let mut ledger = Ledger::new(CapRule::Share, 1000);
        ledger.observe(0, 1000);
        ledger.add_used(300);
        assert!(ledger.try_reserve(100));
        ledger.observe_quota();
        ledger.observe(300, 700);
        assert_eq!((ledger.free_bytes(), ledger.excess_bytes()), (0, 100));
        // What is freed may be used again.
        ledger.add_used(-200);
        assert_eq!(ledger.free_bytes(), 100);
        ledger.forget_quota();
        assert_eq!(ledger.free_bytes(), 800);
    }

    #[test]
    fn an_unstated_cap_follows_the_device_and_not_our_own_use() {
        let mut ledger = Ledger::new(CapRule::Sixteenths(8), 0);
        ledger.observe(0, 1600);
        assert_eq!(ledger.cap_bytes(), 800);
        ledger.add_used(400);
        ledger.observe(400, 1200);
        assert_eq!(ledger.cap_bytes(), 800);
        assert_eq!(ledger.free_bytes(), 400);
        // A stranger takes 800: what is ours stays ours, nothing more is free.
        ledger.observe(400, 400);
        assert_eq!(ledger.cap_bytes(), 400);
        assert_eq!(ledger.free_bytes(), 0);
    }

    /// A job's memory limit that was lowered, or used up by programs, left everything where it was.
    #[test]
    fn what_is_wanted_back_was_not_in_excess() {
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
        // Over its cap, and nobody needs it.
        ledger.give_cap(600);
        ledger.add_used(200);
        ledger.observe(550, 1000);
        assert_eq!((ledger.excess_bytes(), ledger.deficit_bytes()), (550 - ledger.cap_bytes(), 0));
    }
}
