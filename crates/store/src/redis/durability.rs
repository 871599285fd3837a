//! The server's promise about what it has acknowledged: it answers before its disk has the data, unless it is configured
//! otherwise.
//!
//! The danger that it avoids: a file that is reported durable and is lost at the server's power loss. The client cannot prevent
//! that; it determines the promise and reports it.

/// When acknowledged data is on disk, as far as the server reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Durability {
    /// On its disk before the answer (`appendfsync always`).
    Always,
    /// Up to a second later, and the driver waits for it (`WAITAOF`, since Redis 7.2).
    Waits,
    /// Up to a second later (`appendfsync everysec`).
    EverySecond,
    /// When the server's kernel writes it (`appendfsync no`).
    Sometime,
    /// With the next snapshot, by these rules (`save`). Empty: there will be none.
    Snapshots(String),
    /// The server has a log, and does not report how it syncs it.
    Untold,
    /// As the other value says, but the server may evict data when memory runs short, by this policy.
    Evicts(&'static str, Box<Durability>),
    /// As the other value says, and a replica has it too: the driver waits for it (`WAIT`).
    Replicated(Box<Durability>),
}

/// The answers of `INFO` and `CONFIG GET`. `None`: the user may not ask.
#[derive(Debug, Default)]
pub struct Told {
    pub logs: Option<bool>,
    pub fsync: Option<String>,
    pub save: Option<String>,
    pub waits: bool,
    pub has_replicas: bool,
    pub maxmemory: Option<u64>,
    pub policy: Option<String>,
}

impl Durability {
    /// Derives the promise from the server's answers.
    pub fn of(told: &Told) -> Self {
        let kept = match (told.logs, told.fsync.as_deref()) {
            (Some(true), Some("always")) => Self::Always,
            (Some(true), Some("everysec")) if told.waits => Self::Waits,
            (Some(true), Some("everysec")) => Self::EverySecond,
            (Some(true), Some(_)) => Self::Sometime,
            (Some(false), _) => {
                Self::Snapshots(told.save.clone().unwrap_or_else(|| "the user may not ask when".into()))
            }
            _ => Self::Untold,
        };
        let kept = if told.has_replicas { Self::Replicated(Box::new(kept)) } else { kept };
        // Values of Surgetank expire (after ten thousand years) only where the policy does not consider expiry.
        match told.policy.as_deref() {
            Some(policy) if policy.starts_with("allkeys-") && told.maxmemory != Some(0) => {
                const POLICIES: [&str; 3] = ["allkeys-lru", "allkeys-lfu", "allkeys-random"];
                let policy = POLICIES.into_iter().find(|known| *known == policy).unwrap_or("allkeys-…");
                Self::Evicts(policy, Box::new(kept))
            }
            _ => kept,
        }
    }

    /// Whether acknowledged data survives the server's power loss.
    pub fn is_sure(&self) -> bool {
        match self {
            Self::Always | Self::Waits => true,
            Self::Replicated(kept) => kept.is_sure(),
            _ => false,
        }
    }

    /// Whether the driver waits for the disk (`WAITAOF`).
    pub fn waits(&self) -> bool {
        match self {
            Self::Waits => true,
            Self::Evicts(_, kept) | Self::Replicated(kept) => kept.waits(),
            _ => false,
        }
    }

    /// Whether the driver waits for a replica (`WAIT`).
    pub fn is_replicated(&self) -> bool {
        match self {
            Self::Replicated(_) => true,
            Self::Evicts(_, kept) => kept.is_replicated(),
            _ => false,
        }
    }

    /// Warnings for the user, one sentence each.
    pub fn warnings(&self) -> Vec<String> {
        match self {
            _ if self.is_sure() => Vec::new(),
            Self::Evicts(policy, kept) => {
                let mut warnings = kept.warnings();
                warnings.push(format!(
                    "the server evicts files when its memory is full (maxmemory-policy {policy}); CONFIG SET maxmemory-policy noeviction"
                ));
                warnings
            }
            kept => vec![format!("{kept}; CONFIG SET appendonly yes, appendfsync always makes it sure")],
        }
    }
}

impl std::fmt::Display for Durability {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Always => f.write_str("what the server acknowledges is on its disk (appendfsync always)"),
            Self::Waits => {
                f.write_str("what is called durable is on the server's disk (appendfsync everysec and WAITAOF)")
            }
            Self::EverySecond => {
                f.write_str("a crash of the server's machine loses the last second (appendfsync everysec)")
            }
            Self::Sometime => {
                f.write_str("a crash of the server's machine loses the last half minute or so (appendfsync no)")
            }
            Self::Snapshots(save) if save.is_empty() => f.write_str(
                "the server keeps everything in memory only and loses it when it ends (appendonly no, no snapshots)",
            ),
            Self::Snapshots(save) => {
                write!(f, "a server that dies loses everything since its last snapshot (appendonly no; save: {save})")
            }
            Self::Untold => f.write_str("the server does not tell whether what it acknowledges is on its disk"),
            Self::Replicated(kept) => write!(f, "{kept}; a replica has it as well"),
            Self::Evicts(policy, kept) => write!(f, "{kept}; what does not fit into memory is evicted ({policy})"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durability_follows_from_server_configuration() {
        let told = |logs, fsync: &str, waits| Told { logs, fsync: Some(fsync.into()), waits, ..Told::default() };
        for (told, sure, part) in [
            (told(Some(true), "always", false), true, "on its disk"),
            (told(Some(true), "everysec", true), true, "WAITAOF"),
            (told(Some(true), "everysec", false), false, "last second"),
            (told(Some(true), "no", true), false, "half minute"),
            (Told { save: Some("3600 1".into()), ..told(Some(false), "always", true) }, false, "3600 1"),
            (Told { save: Some(String::new()), ..told(Some(false), "always", true) }, false, "memory only"),
            (Told { logs: Some(true), ..Told::default() }, false, "does not tell"),
            (Told::default(), false, "does not tell"),
        ] {
            let kept = Durability::of(&told);
            assert!(kept.is_sure() == sure && kept.to_string().contains(part), "{told:?}: {kept}");
            assert_eq!(kept.warnings().is_empty(), sure, "{told:?}");
        }
        let replicated = Durability::of(&Told { has_replicas: true, ..told(Some(true), "everysec", true) });
        assert!(replicated.is_sure() && replicated.waits() && replicated.is_replicated(), "{replicated:?}");
        assert!(!Durability::of(&Told { has_replicas: true, ..told(Some(false), "", false) }).is_sure());
        let mut evicts =
            Told { policy: Some("allkeys-lru".into()), maxmemory: Some(1 << 30), ..told(Some(true), "always", false) };
        assert!(Durability::of(&evicts).warnings()[0].contains("allkeys-lru"));
        for (policy, maxmemory) in [("allkeys-lru", 0), ("noeviction", 1 << 30), ("volatile-lru", 1 << 30)] {
            (evicts.policy, evicts.maxmemory) = (Some(policy.into()), Some(maxmemory));
            assert_eq!(Durability::of(&evicts), Durability::Always, "{policy} {maxmemory}");
        }
    }
}
