//! The scene's agent and its supervisor, and how they end.

use std::fs;

use serde_json::Value;

use super::{Scene, cmdline, eventually, marked};

impl Scene {
    /// The living agent.
    pub fn agent(&self) -> Option<u32> {
        self.agents().into_iter().find(|pid| !is_supervisor(*pid))
    }

    /// The process that replaces an agent that is killed.
    pub fn supervisor(&self) -> Option<u32> {
        self.agents().into_iter().find(|pid| is_supervisor(*pid))
    }

    fn agents(&self) -> Vec<u32> {
        let mut all = marked(&self.behind);
        all.retain(|pid| cmdline(*pid).get(1).is_some_and(|word| word == "agent"));
        all
    }

    /// Kills the supervisor as well, so that no other agent takes over.
    #[track_caller]
    pub fn kill_agent(&self) {
        let agent = self.agent().unwrap();
        for pid in self.supervisor().into_iter().chain([agent]) {
            // SAFETY: the process was started by this test.
            unsafe { libc::kill(pid as i32, libc::SIGKILL) };
        }
        eventually("the agent is dead", || self.agents().is_empty());
    }

    /// Kills the agent, so that another one takes over; returns which one was killed.
    #[track_caller]
    pub fn replace_agent(&self) -> u32 {
        let agent = self.agent().unwrap();
        // SAFETY: the process was started by this test.
        unsafe { libc::kill(agent as i32, libc::SIGKILL) };
        eventually("another agent takes over", || self.agent().is_some_and(|pid| pid != agent));
        agent
    }

    #[track_caller]
    pub fn await_no_agent(&self) {
        eventually("the agent ends", || self.agents().is_empty());
    }

    /// A run ends when its files are in the store; then the agent empties the tiers, and ends.
    #[track_caller]
    pub fn leaves_nothing_on_the_tiers(&self) {
        self.await_no_agent();
        assert!(self.tier_files().is_empty(), "left on the tiers: {:?}", self.tier_files());
    }

    /// Kills the agent; true when it was replaced, false when it is the last one.
    #[track_caller]
    pub fn kill_one_agent(&self) -> bool {
        let Some(agent) = self.agent() else { return false };
        // SAFETY: the process was started by this test.
        unsafe { libc::kill(agent as i32, libc::SIGKILL) };
        eventually("the agent is dead", || self.agent() != Some(agent));
        eventually("another agent takes over, or the supervisor ends", || {
            self.agent().is_some() || self.supervisor().is_none()
        });
        self.agent().is_some()
    }

    /// Returns when the agent that runs now answers requests.
    #[track_caller]
    pub fn await_served(&self) {
        eventually("the agent serves", || {
            let places = fs::read_dir(&self.state).into_iter().flatten().flatten();
            let cards = places.filter_map(|place| fs::read_to_string(place.path().join("agent.json")).ok());
            let mut pids = cards.filter_map(|text| serde_json::from_str::<Value>(&text).ok()?["pid"].as_u64());
            let agent = self.agent().map(u64::from);
            agent.is_none() || pids.any(|pid| Some(pid) == agent)
        });
    }
}

fn is_supervisor(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "surgetank-super")
}
