//! The run of a process, found by descent from the run's process: each run is judged by what it wrote.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use surgetank_pool::calls::caller_of;
use surgetank_types::model::RunId;

/// Process ids are reused, so a cached answer expires after this time.
const BELIEVED: Duration = Duration::from_secs(1);
const ANCESTORS_MAX: usize = 256;

#[derive(Default)]
pub struct Runs {
    /// The process that acts for other members of the pool.
    pool: OnceLock<u32>,
    next: AtomicU32,
    runs: Mutex<Vec<(RunId, u32)>>,
    known: Mutex<HashMap<u32, (RunId, Instant)>>,
}

impl Runs {
    /// This process acts for other members.
    pub fn has_pool(&self, process: u32) {
        let _ = self.pool.set(process);
    }

    /// A process has one run. If an earlier agent registered the process, the process did not get that answer and has
    /// joined again. Its writes must not count for a run that no client waits for.
    pub fn register(&self, pid: u32) -> RunId {
        let run = RunId(self.next.fetch_add(1, Ordering::Relaxed) + 1);
        let mut runs = self.runs();
        runs.retain(|(_, root)| *root != pid);
        runs.push((run, pid));
        run
    }

    /// A run of an earlier agent keeps its number.
    pub fn restore(&self, run: RunId, pid: u32) {
        self.next.fetch_max(run.0, Ordering::Relaxed);
        let mut runs = self.runs();
        runs.retain(|(known, _)| *known != run);
        runs.push((run, pid));
    }

    pub fn release(&self, run: RunId) {
        self.runs().retain(|(known, _)| *known != run);
        self.known.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn runs(&self) -> std::sync::MutexGuard<'_, Vec<(RunId, u32)>> {
        self.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The run with this number, if it continues; a single run owns all writes.
    pub fn known(&self, run: RunId) -> RunId {
        match self.runs().as_slice() {
            _ if run.is_of_a_member() => run,
            [(only, _)] => *only,
            several if several.iter().any(|(known, _)| *known == run) => run,
            _ => RunId(0),
        }
    }

    /// Reads /proc only if several runs share the directory, or in a pool.
    pub fn run_of(&self, pid: u32) -> RunId {
        let runs = self.runs().clone();
        let find = match (runs.as_slice(), self.pool.get()) {
            ([], None) => return RunId(0),
            ([(run, _)], None) => return *run,
            _ => || {
                self.member_of(pid).map_or_else(
                    || match runs.as_slice() {
                        [(run, _)] => *run,
                        several => descent(pid, several),
                    },
                    RunId::of_member,
                )
            },
        };
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((run, _)) = known.get(&pid).filter(|(_, at)| at.elapsed() < BELIEVED) {
            return *run;
        }
        let run = find();
        if known.len() > 10_000 {
            known.clear();
        }
        known.insert(pid, (run, Instant::now()));
        run
    }

    /// The member for whose programs the thread acts.
    fn member_of(&self, thread: u32) -> Option<u32> {
        let process = self.pool.get()?;
        let name = std::fs::read_to_string(format!("/proc/{process}/task/{thread}/comm")).ok()?;
        caller_of(&name).map(|member| member.0)
    }
}

fn descent(pid: u32, runs: &[(RunId, u32)]) -> RunId {
    let mut at = pid;
    for _ in 0..ANCESTORS_MAX {
        if let Some((run, _)) = runs.iter().find(|(_, root)| *root == at) {
            return *run;
        }
        match parent_of(at) {
            Some(parent) if parent > 1 => at = parent,
            _ => break,
        }
    }
    RunId(0)
}

fn parent_of(pid: u32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command's name may contain spaces and parentheses; the fields after the last one are plain.
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The agent is killed before it answers, and the run joins the next agent. Regression: that agent counted the
    /// run's bytes for its first number.
    #[test]
    fn registered_run_keeps_one_number_across_agents() {
        let runs = Runs::default();
        let pid = std::process::id();
        runs.restore(RunId(7), pid);
        let anew = runs.register(pid);
        let other = runs.register(u32::MAX - 1);
        assert_eq!((runs.run_of(pid), anew), (RunId(8), RunId(8)));
        runs.release(other);
        assert_eq!(runs.run_of(pid), anew);
    }

    #[test]
    fn child_belongs_to_the_run_of_its_ancestor() {
        let runs = Runs::default();
        let mine = runs.register(std::process::id());
        let mut child = std::process::Command::new("sleep").arg("30").spawn().unwrap();
        let other = runs.register(u32::MAX - 1);
        assert_eq!(runs.run_of(child.id()), mine);
        assert_eq!(runs.run_of(1), RunId(0));
        runs.release(other);
        assert_eq!(runs.run_of(1), mine, "a single run owns whatever comes");
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
