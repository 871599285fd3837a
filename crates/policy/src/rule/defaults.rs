//! The built-in rules: copy everything, and drain last the files that no process waits for.

use super::written::{Authority, Pattern, RuleConfig};
use crate::words::Timing;
use surgetank_types::model::Mode;

/// Directories full of small files that a run rewrites all the time and that no process reads from the store meanwhile: version
/// control, virtual environments, caches, the state of workflow engines. They stay in the tiers and are drained at the end.
/// They are never lost, so a wrong entry here costs only a longer final drain.
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
