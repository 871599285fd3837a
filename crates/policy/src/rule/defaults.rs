//! What is decided when nobody said anything: copy everything, and drain last what nobody waits for.

use crate::config::{Authority, Pattern, RuleConfig, Timing};
use surgetank_types::model::Mode;

/// Directories full of small files that a run rewrites all the time and nobody reads from the store while it goes on:
/// version control, virtual environments, caches, the state of workflow engines. They stay in the tiers and are
/// drained at the end; they are never lost, so a wrong guess here costs a longer final drain and nothing else.
pub const LAST_NAMES: [&str; 16] = [
    ".git",
    ".hg",
    ".svn",
    ".venv",
    "venv",
    "virtualenv",
    "__pycache__",
    ".cache",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    ".ipynb_checkpoints",
    "node_modules",
    ".snakemake",
    ".nextflow",
    ".nextflow.log*",
];

/// The rules of `Authority::Default`, weaker than any other.
pub fn rules() -> Vec<RuleConfig> {
    LAST_NAMES
        .iter()
        .map(|name| RuleConfig {
            mode: Some(Mode::Copy),
            timing: Some(Timing::Last),
            ..RuleConfig::empty(Pattern::Glob((*name).to_owned()), Authority::Default, "built in")
        })
        .collect()
}
