//! Shared memory of agents that were killed together with their runs: counted, and removed with `--clean`.

use std::path::Path;

use surgetank_policy::config::quantity::show_bytes;

use super::finding::{Finding, Verdict};
use crate::shimdoor::leftovers::{self, Leftovers, SHARED_MEMORY};

/// Reports only leftovers, unless `clean` asks for an answer.
pub fn examine(clean: bool, findings: &mut Vec<Finding>) {
    findings.extend(describe(clean, leftovers::sweep(Path::new(SHARED_MEMORY), clean)));
}

fn describe(clean: bool, left: Leftovers) -> Vec<Finding> {
    let about = format!("killed agents in {SHARED_MEMORY}");
    let Leftovers { files, bytes, kept } = left;
    let mut findings = Vec::new();
    if clean {
        let found = format!("{files} files removed, {} freed", show_bytes(bytes));
        findings.push(Finding::new(&about, Verdict::Info, found));
    } else if files > 0 {
        let found = format!("{files} files, {}", show_bytes(bytes));
        findings.push(Finding::new(&about, Verdict::Less, found).remedy("surgetank doctor --clean"));
    }
    findings.extend(kept.into_iter().map(|(path, files)| {
        let found = format!("{} stays: it names {files} files on tiers that no agent has recorded", path.display());
        Finding::new(&about, Verdict::Less, found).remedy(
            "start the next run on the directory that was served, which records and drains them; if its state directory is lost, remove this file",
        )
    }));
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leftovers_are_named_with_the_next_command() {
        let left = || Leftovers { files: 3, bytes: 5 << 20, kept: vec![("/dev/shm/one.ring".into(), 7)] };
        let found = describe(false, left());
        assert!(found[0].found.contains("3 files, 5.0 MiB"), "{:?}", found[0]);
        assert_eq!(found[0].remedy, "surgetank doctor --clean");
        assert!(found[1].found.contains("/dev/shm/one.ring stays: it names 7 files"), "{:?}", found[1]);
        assert!(describe(true, left())[0].found.contains("3 files removed, 5.0 MiB freed"));
        assert!(describe(false, Leftovers::default()).is_empty());
    }
}
