//! Rules: the mode of a path, and the reason.
//!
//! Every attribute of a [`Decision`] is settled separately. The rule with the highest [`Authority`] that sets it wins; within
//! one authority the longest matching pattern wins, then the later one. Any matching rule can set `prefetch` and `pin`. Hints
//! ([`crate::hint`]) are stronger than built-in rules and weaker than written ones.
//!
//! Regular expressions come from Sea's lists only. They are weaker than globs of the same authority. Among themselves Sea's own
//! table decides instead of the length: listed for flushing → copy, for eviction → remove, in both → move, otherwise keep.
//!
//! Invariant: `decide` never fails, and allocates almost nothing, because it is called for every file that is created or
//! opened.

pub(crate) mod defaults;
mod matcher;
mod written;

pub use crate::words::mode_name;
pub use written::{Authority, Compress, Pattern, RuleConfig};

use surgetank_types::sync::Arc;

use crate::hint::module::Moment;
use crate::hint::{Acting, Advice, NextRead, listens};
use crate::words::{Collocate, ReplicasAt, Timing};
use matcher::Matcher;
use surgetank_types::error::{Error, Result};
use surgetank_types::model::{FsyncTarget, Mode};

/// All rules, compiled.
#[derive(Debug)]
pub struct RuleSet {
    /// Weakest first.
    rules: Vec<Ranked>,
    matcher: Matcher,
    acts: bool,
}

#[derive(Debug)]
struct Ranked {
    config: RuleConfig,
    tier: Option<Arc<str>>,
}

/// What the rules and hints decide for a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// What happens to the file after it is written.
    pub mode: Mode,
    /// When the drain starts with it.
    pub timing: Timing,
    /// What fsync waits for; `None`: the configuration's default.
    pub fsync: Option<FsyncTarget>,
    /// Expected size, in bytes.
    pub size_bytes: Option<u64>,
    /// Name of the tier to prefer.
    pub tier: Option<Arc<str>>,
    /// Whether it is copied to a tier before its use.
    pub prefetch: bool,
    /// Whether it is not evicted.
    pub pin: bool,
    /// The next read. Only a hint sets it, from the workflow's graph.
    pub next_read: Option<NextRead>,
    /// Its form in the store; `None`: unchanged.
    pub compress: Option<Compress>,
    /// Whether the store holds equal content only once.
    pub dedup: bool,
    /// On how many members of a pool it is until the store has it; `None`: the configuration's default.
    pub replicas: Option<u32>,
    /// When it is there; `None`: as the configuration says.
    pub replicas_at: Option<ReplicasAt>,
    /// On which member of a pool its content is; `None`: where it was made.
    pub collocate: Option<Collocate>,
    /// What is to be done at operations on it.
    pub acting: Acting,
    /// The origin of `mode`; [`RuleSet::why`] states it in words.
    pub reason: Reason,
}

/// Refers to the rule that decided (and, for Sea's `move`, to the second one), or says that a hint did. It allocates nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Reason {
    rule: Option<u16>,
    with: Option<u16>,
    hint: bool,
}

impl Reason {
    /// Whether a hint decided.
    pub fn is_hint(self) -> bool {
        self.hint
    }

    /// Position in [`RuleSet::rules`]; `None` when no rule matched.
    pub fn rule(self) -> Option<usize> {
        self.rule.map(usize::from)
    }
}

impl Decision {
    /// The same in the words of hints.
    pub fn as_advice(&self) -> Advice {
        Advice {
            mode: Some(self.mode),
            timing: Some(self.timing),
            size_bytes: self.size_bytes,
            tier: self.tier.clone(),
            pin: Some(self.pin),
            prefetch: Some(self.prefetch),
            next_read: self.next_read,
            replicas: self.replicas,
            replicas_at: self.replicas_at,
            collocate: self.collocate.clone(),
            acting: self.acting.clone(),
        }
    }
}

impl RuleSet {
    /// Compiles `rules` together with the built-in ones. Errors: a pattern that is invalid, with its rule and origin.
    pub fn new(rules: &[RuleConfig]) -> Result<Self> {
        let all = defaults::rules().into_iter().chain(rules.iter().cloned());
        let mut rules: Vec<Ranked> =
            all.map(|config| Ranked { tier: config.tier.as_deref().map(Arc::from), config }).collect();
        // Stable: of equal rank the later one stays the stronger.
        rules.sort_by_key(|rule| rank(&rule.config));
        let matcher = Matcher::new(rules.iter().map(|rule| &rule.config.pattern)).map_err(|(position, why)| {
            let (what, origin) = match rules.get(position) {
                Some(rule) => (spelled(&rule.config), rule.config.origin.as_str()),
                None => ("the rules".to_owned(), ""),
            };
            Error::new(format!("{origin}: {what} can't be understood"))
                .why(why)
                .remedy("correct the pattern; `surgetank help configuration`, section Rules, describes the patterns")
        })?;
        let acts = rules.iter().any(|rule| !rule.config.acting.is_empty());
        Ok(Self { rules, matcher, acts })
    }

    /// Whether no rule sets, by a file's name, its place or anything that must be known when the file is made.
    pub fn place_all_alike(&self) -> bool {
        self.rules.iter().all(|rule| {
            let config = &rule.config;
            config.tier.is_none()
                && config.size_bytes.is_none()
                && config.compress.is_none()
                && config.dedup.is_none()
                && [Moment::Changes, Moment::Reads].iter().all(|moment| !listens(&config.acting, *moment))
        })
    }

    /// The decision for the file `path`: any bytes, relative to the directory that is served.
    pub fn decide(&self, path: &[u8]) -> Decision {
        self.decide_hinted(path, &Advice::default())
    }

    /// The same with the file's hints, which are weaker than every written rule.
    pub fn decide_hinted(&self, path: &[u8], advice: &Advice) -> Decision {
        let mut decision = Decision {
            mode: Mode::default(),
            timing: Timing::default(),
            fsync: None,
            size_bytes: None,
            tier: None,
            prefetch: false,
            pin: false,
            next_read: advice.next_read,
            compress: None,
            dedup: false,
            replicas: None,
            replicas_at: None,
            collocate: None,
            acting: Acting::default(),
            reason: Reason::default(),
        };
        let mut mode = ModeVote::default();
        let mut timing = None;
        let mut dedup = None;
        self.matcher.each_match(path, |id| {
            let Ranked { config, tier } = &self.rules[usize::from(id)];
            // A built-in rule sets only mode and timing.
            let written = config.authority > Authority::Hint;
            if written || advice.mode.is_none() {
                mode.hear(id, config);
            }
            if written || advice.timing.is_none() {
                timing = timing.or(config.timing);
            }
            decision.fsync = decision.fsync.or(config.fsync);
            decision.size_bytes = decision.size_bytes.or(config.size_bytes);
            if decision.tier.is_none() {
                decision.tier.clone_from(tier);
            }
            decision.prefetch |= config.prefetch;
            decision.pin |= config.pin;
            decision.compress = decision.compress.or(config.compress);
            dedup = dedup.or(config.dedup);
            decision.replicas = decision.replicas.or(config.replicas);
            decision.replicas_at = decision.replicas_at.or(config.replicas_at);
            if decision.collocate.is_none() {
                decision.collocate.clone_from(&config.collocate);
            }
            decision.acting.or(&config.acting);
        });
        decision.timing = timing.or(advice.timing).unwrap_or_default();
        decision.size_bytes = decision.size_bytes.or(advice.size_bytes);
        if decision.tier.is_none() {
            decision.tier.clone_from(&advice.tier);
        }
        decision.prefetch |= advice.prefetch == Some(true);
        decision.pin |= advice.pin == Some(true);
        decision.dedup = dedup.unwrap_or(false);
        decision.replicas = decision.replicas.or(advice.replicas);
        decision.replicas_at = decision.replicas_at.or(advice.replicas_at);
        if decision.collocate.is_none() {
            decision.collocate.clone_from(&advice.collocate);
        }
        decision.acting.or(&advice.acting);
        (decision.mode, decision.reason) = match (mode.outcome(), advice.mode) {
            ((_, Reason { rule: None, .. }), Some(mode)) => (mode, Reason { hint: true, ..Reason::default() }),
            (outcome, _) => outcome,
        };
        decision
    }

    /// The reason in words: `rule '*.tmp=remove' (surgetank.toml:12)`.
    pub fn why(&self, reason: Reason) -> String {
        let words = |id: u16| {
            let config = &self.rules[usize::from(id)].config;
            format!("rule '{}' ({})", spelled(config), config.origin)
        };
        match (reason.rule, reason.with) {
            (None, _) if reason.hint => "a hint".to_owned(),
            (None, _) => "no rule sets a mode; files without one are copied".to_owned(),
            (Some(rule), None) => words(rule),
            (Some(rule), Some(with)) => format!("{} together with {}", words(rule), words(with)),
        }
    }

    /// Every rule that matches `path`, strongest first, in words.
    pub fn explain(&self, path: &[u8]) -> Vec<String> {
        let mut lines = Vec::new();
        self.matcher.each_match(path, |id| lines.push(self.why(Reason { rule: Some(id), ..Reason::default() })));
        lines
    }

    /// The directories (and files) that contain everything that rules with `prefetch` can match, none inside another. An empty
    /// path is the whole tree. The list is empty if no rule prefetches.
    pub fn prefetched_below(&self) -> Vec<Vec<u8>> {
        let rules = self.rules().filter(|rule| rule.prefetch);
        let mut found: Vec<Vec<u8>> = rules.map(|rule| matcher::plain_beginning(&rule.pattern)).collect();
        found.sort();
        let mut outermost: Vec<Vec<u8>> = Vec::new();
        for path in found {
            let inside = outermost.iter().any(|outer| {
                outer.is_empty()
                    || path.strip_prefix(outer.as_slice()).is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
            });
            if !inside {
                outermost.push(path);
            }
        }
        outermost
    }

    /// Whether any rule sets hints that are asked at operations.
    pub fn acts(&self) -> bool {
        self.acts
    }

    /// Whether any rule compresses.
    pub fn compresses(&self) -> bool {
        self.rules().any(|rule| matches!(rule.compress, Some(Compress::Zstd(_))))
    }

    /// Whether any rule deduplicates.
    pub fn deduplicates(&self) -> bool {
        self.rules().any(|rule| rule.dedup == Some(true))
    }

    /// All rules, weakest first; [`Reason::rule`] is an index into them.
    pub fn rules(&self) -> impl ExactSizeIterator<Item = &RuleConfig> {
        self.rules.iter().map(|rule| &rule.config)
    }
}

/// Strength in the order of precedence; the position in the list decides between equals.
fn rank(rule: &RuleConfig) -> (Authority, bool, usize) {
    match &rule.pattern {
        Pattern::Glob(text) => (rule.authority, true, text.len()),
        Pattern::Regex(_) => (rule.authority, false, 0),
    }
}

/// Determines the mode from rules that arrive strongest first.
#[derive(Default)]
struct ModeVote {
    settled: Option<(Mode, u16)>,
    /// Sea's lists: their authority, and the first rule for each mode.
    sea: Option<Authority>,
    flushed: Option<u16>,
    evicted: Option<u16>,
    moved: Option<u16>,
    kept: Option<u16>,
}

impl ModeVote {
    fn hear(&mut self, id: u16, rule: &RuleConfig) {
        let Some(mode) = rule.mode else { return };
        if self.settled.is_some() || self.sea.is_some_and(|authority| authority != rule.authority) {
            return;
        }
        if matches!(rule.pattern, Pattern::Glob(_)) {
            // Globs come before the regular expressions of their authority.
            if self.sea.is_none() {
                self.settled = Some((mode, id));
            }
            return;
        }
        self.sea = Some(rule.authority);
        let slot = match mode {
            Mode::Copy => &mut self.flushed,
            Mode::Remove => &mut self.evicted,
            Mode::Move => &mut self.moved,
            Mode::Keep => &mut self.kept,
        };
        slot.get_or_insert(id);
    }

    fn outcome(self) -> (Mode, Reason) {
        let because = |rule| Reason { rule: Some(rule), ..Reason::default() };
        match self {
            Self { settled: Some((mode, id)), .. } => (mode, because(id)),
            Self { moved: Some(id), .. } => (Mode::Move, because(id)),
            Self { flushed: Some(flush), evicted: Some(evict), .. } => {
                (Mode::Move, Reason { rule: Some(flush), with: Some(evict), hint: false })
            }
            Self { flushed: Some(id), .. } => (Mode::Copy, because(id)),
            Self { evicted: Some(id), .. } => (Mode::Remove, because(id)),
            Self { kept: Some(id), .. } => (Mode::Keep, because(id)),
            _ => (Mode::default(), Reason::default()),
        }
    }
}

/// A rule as a user would write it: `*.tmp=remove`, or with what it sets instead of a mode.
fn spelled(rule: &RuleConfig) -> String {
    let pattern = match &rule.pattern {
        Pattern::Glob(text) | Pattern::Regex(text) => text,
    };
    let mut parts: Vec<String> = Vec::new();
    parts.extend(rule.mode.map(|mode| mode_name(mode).to_owned()));
    if rule.timing == Some(Timing::Last) {
        parts.push("last".to_owned());
    }
    parts.extend(
        rule.fsync.map(|target| format!("fsync {}", if target == FsyncTarget::Tier { "tier" } else { "store" })),
    );
    parts.extend(rule.size_bytes.map(|bytes| format!("size {bytes}")));
    parts.extend(rule.tier.as_ref().map(|tier| format!("tier {tier}")));
    if rule.prefetch {
        parts.push("prefetch".to_owned());
    }
    if rule.pin {
        parts.push("pin".to_owned());
    }
    parts.extend(rule.compress.map(|how| match how {
        Compress::None => "compress none".to_owned(),
        Compress::Zstd(level) => format!("compress zstd:{level}"),
    }));
    parts.extend(rule.dedup.map(|is| format!("dedup {is}")));
    parts.extend(rule.replicas.map(|count| format!("replicas {count}")));
    parts.extend(rule.replicas_at.map(|when| match when {
        ReplicasAt::Later => "replicas later".to_owned(),
        ReplicasAt::Close => "replicas at close".to_owned(),
    }));
    parts.extend(rule.collocate.as_ref().map(|on| match on {
        Collocate::Local => "collocate local".to_owned(),
        Collocate::With(group) => format!("collocate {group}"),
    }));
    parts.extend(rule.acting.iter().map(|(name, value)| format!("{name} {value}")));
    format!("{pattern}={}", parts.join(", "))
}

#[cfg(test)]
mod tests;
