//! What a run came across: a search that never comes to the hard cases shows nothing.

/// What a run came across.
#[derive(Debug, Default, Clone)]
pub struct Counts {
    pub operations: u64,
    pub store_reads: u64,
    pub beliefs: u64,
    pub at_peers: u64,
    pub claims: u64,
    pub releases: u64,
    pub forgotten: u64,
    pub replaced: u64,
    pub expelled: u64,
    pub taken_over: u64,
    pub registry_restarts: u64,
    pub left: u64,
    /// Between members.
    pub messages: u64,
    /// To the registry.
    pub requests: u64,
    /// Writes that the key-value server has forgotten.
    pub lost_writes: u64,
    pub eras: u64,
    /// Claims of dead members that no living member knew.
    pub forgotten_claims: u64,
}

impl Counts {
    pub fn add(&mut self, other: &Self) {
        let pairs = [
            (&mut self.operations, other.operations),
            (&mut self.store_reads, other.store_reads),
            (&mut self.beliefs, other.beliefs),
            (&mut self.at_peers, other.at_peers),
            (&mut self.claims, other.claims),
            (&mut self.releases, other.releases),
            (&mut self.forgotten, other.forgotten),
            (&mut self.replaced, other.replaced),
            (&mut self.expelled, other.expelled),
            (&mut self.taken_over, other.taken_over),
            (&mut self.registry_restarts, other.registry_restarts),
            (&mut self.left, other.left),
            (&mut self.messages, other.messages),
            (&mut self.requests, other.requests),
            (&mut self.lost_writes, other.lost_writes),
            (&mut self.eras, other.eras),
            (&mut self.forgotten_claims, other.forgotten_claims),
        ];
        for (sum, more) in pairs {
            *sum += more;
        }
    }
}
