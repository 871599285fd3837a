//! Probes in rounds. The probes of a round are processes that begin together; the next round begins when all have
//! ended.

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde::{Deserialize, Serialize};
use surgetank_types::clock;

use super::probe::{Measured, Probe, since};
use crate::agent::place::Card;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Round {
    pub each: Vec<Measured>,
    /// From the start until the last probe has ended.
    pub wall_s: f64,
    /// Core time of the agent during the round.
    pub agent_cpu_s: f64,
}

impl Round {
    pub fn cpu_s(&self) -> f64 {
        self.each.iter().map(|measured| measured.cpu_s).sum()
    }
}

pub fn play(rounds: &[Vec<Probe>], agent: Option<&Path>) -> io::Result<Vec<Round>> {
    rounds.iter().map(|probes| round(probes, agent)).collect()
}

fn round(probes: &[Probe], agent: Option<&Path>) -> io::Result<Round> {
    let mut children = Vec::new();
    for probe in probes {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("probe")
            .arg(serde_json::to_string(probe)?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let Some(out) = child.stdout.take() else { return Err(gone(&mut child)) };
        let mut out = BufReader::new(out);
        let mut ready = String::new();
        if out.read_line(&mut ready)? == 0 {
            return Err(gone(&mut child));
        }
        children.push((child, out));
    }
    let cpu_before = agent.map_or(0.0, agent_cpu_s);
    let begun = clock::tick();
    for (child, _) in &mut children {
        if let Some(go) = child.stdin.as_mut() {
            go.write_all(b"go\n")?;
        }
    }
    let mut each = Vec::new();
    let mut wall_s = 0.0f64;
    for (mut child, mut out) in children {
        let mut answer = String::new();
        out.read_line(&mut answer)?;
        wall_s = wall_s.max(since(begun));
        if !child.wait()?.success() || answer.is_empty() {
            return Err(gone(&mut child));
        }
        each.push(serde_json::from_str::<Measured>(&answer)?);
    }
    Ok(Round { each, wall_s, agent_cpu_s: agent.map_or(0.0, agent_cpu_s) - cpu_before })
}

fn gone(child: &mut Child) -> io::Error {
    io::Error::other(format!("a probe ended before its time: {:?}", child.wait()))
}

/// Core time of the one agent below a state root, summed over its threads. The kernel counts it in nanoseconds, not in
/// ticks.
fn agent_cpu_s(state: &Path) -> f64 {
    let cards = fs::read_dir(state)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| serde_json::from_slice::<Card>(&fs::read(entry.path().join("agent.json")).ok()?).ok());
    let threads =
        cards.flat_map(|card| fs::read_dir(format!("/proc/{}/task", card.pid)).into_iter().flatten().flatten());
    let nanos = threads.filter_map(|thread| {
        let text = fs::read_to_string(thread.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<u64>().ok()
    });
    nanos.sum::<u64>() as f64 * 1e-9
}
