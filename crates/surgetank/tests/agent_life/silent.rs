//! An agent that does not answer: every verb names the agent, its state and the remedy, and ends. Signals end the
//! verb earlier.

use std::fs;
use std::io::{BufRead, BufReader, Read};

use crate::bench::{Bench, CommandOutput, finish, kill, pid, until};
use crate::cases::{Case, held_run};

pub const ALL: &[Case] = &[
    ("stopped_agent_is_named_by_every_verb", stopped_agent_is_named_by_every_verb),
    ("signals_end_a_wait_for_a_stopped_agent", signals_end_a_wait_for_a_stopped_agent),
    ("run_ends_under_an_agent_that_is_stopped", run_ends_under_an_agent_that_is_stopped),
    ("second_signal_ends_a_run_under_a_stopped_agent", second_signal_ends_a_run_under_a_stopped_agent),
];

/// Stops the agent until this value continues it.
struct Stopped(i32);

impl Stopped {
    fn agent_of(bench: &Bench) -> Self {
        let agent = bench.agent_pid();
        kill(agent, libc::SIGSTOP);
        until("the agent to stop", || {
            fs::read_to_string(format!("/proc/{agent}/stat")).unwrap().rsplit_once(") ").unwrap().1.starts_with('T')
        });
        Self(agent)
    }

    #[track_caller]
    fn is_named_in(&self, output: &CommandOutput) {
        let agent = self.0;
        for word in [
            format!("(pid {agent}) does not answer: it is stopped"),
            "agent.sock".into(),
            format!("try:  kill -CONT {agent}"),
            "safe in the tiers".into(),
        ] {
            assert!(output.err.contains(&word), "{word}: {output:?}");
        }
    }

    fn goes_on(self) {
        kill(self.0, libc::SIGCONT);
    }
}

fn stopped_agent_is_named_by_every_verb(bench: &Bench) {
    let (child, gate) = held_run(bench, "host", "echo > made");
    let stopped = Stopped::agent_of(bench);
    let over = bench.over();
    let over = over.to_str().unwrap();
    let verbs: &[(i32, &[&str])] = &[
        (1, &["status"]),
        (1, &["status", "--json"]),
        (1, &["status", over]),
        (3, &["wait"]),
        (3, &["wait", "--timeout", "1s"]),
        (3, &["wait", "made"]),
        (1, &["run", "--", "true"]),
        (1, &["mount"]),
        (1, &["umount"]),
        (1, &["why", "made"]),
        (1, &["evict", "made"]),
        (1, &["pin", "made"]),
        (1, &["unpin", "made"]),
        (1, &["refresh"]),
        (1, &["prefetch", "made"]),
        (1, &["hint", "mode=keep", "made"]),
        (1, &["fsck"]),
        (1, &["scavenge"]),
    ];
    // In parallel: each waits some seconds.
    let asking: Vec<_> = verbs.iter().map(|(code, words)| (code, words, bench.spawn(bench.surgetank(words)))).collect();
    for (code, words, child) in asking {
        let output = finish(child);
        assert_eq!(output.code, Some(*code), "{words:?}: {output:?}");
        stopped.is_named_in(&output);
    }
    stopped.goes_on();
    assert_eq!(bench.invoke(&["wait"]).code, Some(0));
    fs::write(gate, "").unwrap();
    let output = finish(child);
    assert_eq!(output.code, Some(0), "{output:?}");
    bench.await_no_agent();
}

fn signals_end_a_wait_for_a_stopped_agent(bench: &Bench) {
    let (child, gate) = held_run(bench, "host", "rm slow");
    fs::write(bench.over().join("slow"), "").unwrap();
    bench.give(&bench.over().join("slow"));
    let waiter = bench.spawn(bench.surgetank(&["wait"]));
    let log = bench.place().join("agent.log");
    until("the client to wait", || fs::read_to_string(&log).unwrap().contains("a client waits"));
    let stopped = Stopped::agent_of(bench);
    // The client has blocked the first signal to count it, so the second signal ends it.
    kill(pid(&waiter), libc::SIGTERM);
    kill(pid(&waiter), libc::SIGINT);
    let output = finish(waiter);
    assert_eq!(output.code, Some(3), "{output:?}");
    assert!(output.err.contains("a second signal stops waiting"), "{output:?}");
    for (words, signal) in [(["status", "--json"], libc::SIGTERM), (["wait", "slow"], libc::SIGINT)] {
        let asking = bench.spawn(bench.surgetank(&words));
        // A signal ends any process that is still starting.
        until("the client to call the agent", || has_socket(pid(&asking)));
        kill(pid(&asking), signal);
        assert_eq!(finish(asking).code, Some(-signal), "{words:?}");
    }
    stopped.goes_on();
    fs::write(gate, "").unwrap();
    let output = finish(child);
    assert_eq!(output.code, Some(0), "{output:?}");
    bench.await_no_agent();
}

fn has_socket(pid: i32) -> bool {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    descriptors
        .filter_map(|descriptor| fs::read_link(descriptor.path()).ok())
        .any(|opened| opened.to_string_lossy().starts_with("socket:"))
}

fn run_ends_under_an_agent_that_is_stopped(bench: &Bench) {
    let (child, gate) = held_run(bench, "host", "true");
    let stopped = Stopped::agent_of(bench);
    fs::write(gate, "").unwrap();
    let output = finish(child);
    assert_eq!(output.code, Some(3), "{output:?}");
    stopped.is_named_in(&output);
    assert!(output.err.contains("whether everything is durable could not be found out"), "{output:?}");
    stopped.goes_on();
    bench.await_no_agent();
}

fn second_signal_ends_a_run_under_a_stopped_agent(bench: &Bench) {
    // The command ignores the signals, like a process that waits in a call for the agent.
    let gate = bench.outside().join("deaf-gate");
    let ready = bench.outside().join("deaf-ready");
    let script =
        format!("trap '' TERM INT; : > {}; while ! [ -e {} ]; do sleep 0.05; done", ready.display(), gate.display());
    let mut child = bench.spawn(bench.run_command(&[], &script));
    until("the command to run", || ready.exists());
    let stopped = Stopped::agent_of(bench);
    let mut err = BufReader::new(child.stderr.take().unwrap());
    let mut printed = String::new();
    while !printed.contains("kill -CONT") {
        assert_ne!(err.read_line(&mut printed).unwrap(), 0, "{printed}");
    }
    kill(pid(&child), libc::SIGTERM);
    while !printed.contains("a second signal ends this run") {
        assert_ne!(err.read_line(&mut printed).unwrap(), 0, "{printed}");
    }
    kill(pid(&child), libc::SIGTERM);
    assert_eq!(child.wait().unwrap().code(), Some(3), "{printed}");
    fs::write(gate, "").unwrap();
    err.read_to_string(&mut printed).unwrap();
    stopped.is_named_in(&CommandOutput { code: Some(3), out: String::new(), err: printed });
    stopped.goes_on();
    bench.await_no_agent();
}
