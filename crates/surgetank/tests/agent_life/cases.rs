//! The cases. Each gets a bench of its own.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Stdio;

use serde_json::Value;

use crate::bench::{Bench, NOBODY, Who, finish, kill, pid, until, until_exists};

pub type Case = (&'static str, fn(&Bench));

pub const ALL: &[Case] = &[
    ("the_commands_exit_code_is_passed_on", the_commands_exit_code_is_passed_on),
    ("only_the_command_is_inside_the_mount", only_the_command_is_inside_the_mount),
    ("not_durable_is_exit_3_with_names", not_durable_is_exit_3_with_names),
    ("kept_files_are_named_without_failure", kept_files_are_named_without_failure),
    ("signals_reach_the_command", signals_reach_the_command),
    ("background_child_is_awaited_then_named", background_child_is_awaited_then_named),
    ("eight_runs_at_once_share_one_agent", eight_runs_at_once_share_one_agent),
    ("run_leaves_while_another_continues", run_leaves_while_another_continues),
    ("a_killed_run_is_released", a_killed_run_is_released),
    ("killed_agent_is_reported_and_replaced", killed_agent_is_reported_and_replaced),
    ("a_run_inside_a_run_joins", a_run_inside_a_run_joins),
    ("state_directory_of_another_user_is_refused", state_directory_of_another_user_is_refused),
    ("garbage_on_the_socket_is_answered", garbage_on_the_socket_is_answered),
    ("inherited_descriptors_are_closed_and_redirections_kept", inherited_descriptors_are_closed_and_redirections_kept),
    ("the_command_keeps_its_limits", the_command_keeps_its_limits),
    ("the_second_interrupt_ends_the_drain", the_second_interrupt_ends_the_drain),
    ("wait_names_files_that_are_not_durable", wait_names_files_that_are_not_durable),
    ("why_evict_pin_and_prefetch_have_their_effect", why_evict_pin_and_prefetch_have_their_effect),
    ("failed_start_reports_its_cause", failed_start_reports_its_cause),
    ("mount_and_umount", mount_and_umount),
    ("a_subdirectory_is_re_entered", a_subdirectory_is_re_entered),
    ("sigterm_makes_the_agent_leave_in_order", sigterm_makes_the_agent_leave_in_order),
];

pub const ROOT_ONLY: &[Case] = &[
    ("other_mounts_below_are_bound_through", other_mounts_below_are_bound_through),
    ("other_user_is_not_answered", other_user_is_not_answered),
    ("a_dead_global_mount_is_cleared", a_dead_global_mount_is_cleared),
];

fn the_commands_exit_code_is_passed_on(bench: &Bench) {
    for (script, code) in [("exit 0", 0), ("exit 42", 42), ("kill -TERM $$", 143), ("kill -KILL $$", 137)] {
        assert_eq!(bench.run(&[], script).code, Some(code), "{script}");
    }
    let missing = bench.invoke(&["run", "--", "no-such-program-anywhere"]);
    assert_eq!(missing.code, Some(127), "{missing:?}");
    assert!(missing.err.contains("no-such-program-anywhere"), "{missing:?}");
    fs::write(bench.over().join("data"), "x").unwrap();
    assert_eq!(bench.invoke(&["run", "--", "./data"]).code, Some(126));
    assert_eq!(bench.invoke(&["run"]).code, Some(2), "no command is a usage error");
    assert_eq!(bench.invoke(&["run", "--over", "/does/not/exist", "--", "true"]).code, Some(2));
    assert!(bench.agents().is_empty(), "the agent outlived its last run");
}

fn only_the_command_is_inside_the_mount(bench: &Bench) {
    let output =
        bench.run(&[], "grep -c ' '$PWD' .* fuse.surgetank ' /proc/self/mountinfo; echo made > new; pwd; id -u");
    assert_eq!(output.code, Some(0), "{output:?}");
    let expected_uid = if bench.who == Who::Root { rustix::process::geteuid().as_raw() } else { NOBODY };
    let lines: Vec<_> = output.out.lines().map(str::to_owned).collect();
    assert_eq!(lines, ["1".to_owned(), bench.over().display().to_string(), expected_uid.to_string()]);
    assert_eq!(fs::read_to_string(bench.over().join("new")).unwrap(), "made\n");
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(&*bench.over().to_string_lossy()), "the private mount is seen outside");
}

fn not_durable_is_exit_3_with_names(bench: &Bench) {
    let report = bench.outside().join("report.json");
    let output = bench.run(&["--json", report.to_str().unwrap()], "echo > stuck-1; exit 9");
    assert_eq!(output.code, Some(3), "{output:?}");
    assert!(output.err.contains("stuck-1: it is stuck; safe at stuck-1"), "{output:?}");
    assert!(output.err.contains("own exit code was 9"), "{output:?}");
    let report: Value = serde_json::from_slice(&fs::read(report).unwrap()).unwrap();
    assert_eq!((&report["command_exit"], &report["exit"]), (&9.into(), &3.into()), "{report}");
    assert_eq!(report["verdict"]["not_durable"]["total"], 1, "{report}");
    assert_eq!(report["command"][0], "sh");
    // The next agent reports the files left, and forgets them when they are durable.
    assert!(bench.place().join("undrained.json").exists());
    let waited = bench.invoke(&["wait"]);
    assert_eq!(waited.code, Some(3), "{waited:?}");
    assert!(waited.err.contains("stuck-1"), "{waited:?}");
    fs::remove_file(bench.over().join("stuck-1")).unwrap();
    let next = bench.run(&[], "true");
    assert_eq!(next.code, Some(0), "{next:?}");
    assert!(next.err.contains("an earlier agent had to leave 1 file(s)"), "{next:?}");
    assert!(!bench.place().join("undrained.json").exists());
}

fn kept_files_are_named_without_failure(bench: &Bench) {
    let output = bench.run(&[], "echo > kept-cache");
    assert_eq!(output.code, Some(0), "{output:?}");
    assert!(output.err.contains("NOT in the store") && output.err.contains("kept-cache"), "{output:?}");
    let quiet = bench.run(&["--quiet"], "true");
    assert_eq!((quiet.code, quiet.err.as_str()), (Some(0), ""));
}

fn signals_reach_the_command(bench: &Bench) {
    for (signal, code) in [(libc::SIGTERM, 11), (libc::SIGHUP, 12), (libc::SIGUSR1, 13), (libc::SIGINT, 14)] {
        let ready = bench.outside().join(format!("ready-{signal}"));
        let script = format!(
            "trap 'exit 11' TERM; trap 'exit 12' HUP; trap 'exit 13' USR1; trap 'exit 14' INT; : > {}; while :; do sleep 0.05; done",
            ready.display()
        );
        let child = bench.spawn(bench.run_command(&["--quiet", "--grace", "10000"], &script));
        until_exists(&ready);
        kill(pid(&child), signal);
        let output = finish(child);
        assert_eq!(output.code, Some(code), "{output:?}");
    }
}

fn background_child_is_awaited_then_named(bench: &Bench) {
    let done = bench.over().join("late");
    let output = bench.run(&["--grace", "20000"], "(sleep 0.3; echo > late) >/dev/null 2>&1 &");
    assert_eq!(output.code, Some(0), "{output:?}");
    assert!(done.exists(), "the child was not waited for");

    let report = bench.outside().join("report.json");
    let output = bench.run(
        &["--grace", "50", "--json", report.to_str().unwrap()],
        "sh -c 'exec sleep 1000' >/dev/null 2>&1 & echo $!",
    );
    assert_eq!(output.code, Some(3), "{output:?}");
    let left = output.out.trim();
    assert!(output.err.contains(&format!("pid {left}: sleep 1000")), "{output:?}");
    let report: Value = serde_json::from_slice(&fs::read(report).unwrap()).unwrap();
    assert_eq!(report["left_running"][0]["pid"].to_string(), left);
    // The agent stays as long as the child, and ends with it.
    let agent = bench.the_agent();
    assert_eq!(agent["runs"].as_array().unwrap().len(), 0);
    kill(left.parse().unwrap(), libc::SIGKILL);
    bench.await_no_agent();
}

fn eight_runs_at_once_share_one_agent(bench: &Bench) {
    let gate = bench.outside().join("gate");
    let script =
        format!("echo $SURGETANK_AGENT; echo > file-$$; while ! [ -e {} ]; do sleep 0.05; done", gate.display());
    let children: Vec<_> =
        (0..8).map(|_| bench.spawn(bench.run_command(&["--quiet", "--grace", "10000"], &script))).collect();
    until("eight runs", || bench.agents().first().is_some_and(|agent| agent["runs"].as_array().unwrap().len() == 8));
    assert_eq!(bench.agents().len(), 1);
    fs::write(&gate, "").unwrap();
    let place = bench.place().display().to_string();
    for child in children {
        let output = finish(child);
        assert_eq!(output.code, Some(0), "{output:?}");
        assert_eq!(output.out.trim(), place);
    }
    assert_eq!(fs::read_dir(bench.over()).unwrap().count(), 8);
    bench.await_no_agent();
}

/// A run whose command waits for its gate. Returns with the child once the command runs.
pub fn held_run(bench: &Bench, name: &str, after: &str) -> (std::process::Child, std::path::PathBuf) {
    let gate = bench.outside().join(format!("{name}-gate"));
    let ready = bench.outside().join(format!("{name}-ready"));
    let script = format!(": > {}; while ! [ -e {} ]; do sleep 0.05; done; {after}", ready.display(), gate.display());
    let child = bench.spawn(bench.run_command(&["--grace", "10000"], &script));
    until_exists(&ready);
    (child, gate)
}

fn run_leaves_while_another_continues(bench: &Bench) {
    let (first, first_gate) = held_run(bench, "first", "true");
    let agent = bench.agent_pid();
    let (second, second_gate) = held_run(bench, "second", "echo > after; cat after");
    assert_eq!(bench.the_agent()["runs"].as_array().unwrap().len(), 2);
    fs::write(first_gate, "").unwrap();
    assert_eq!(finish(first).code, Some(0));
    assert_eq!(bench.agent_pid(), agent, "another agent");
    assert_eq!(bench.the_agent()["runs"].as_array().unwrap().len(), 1);
    fs::write(second_gate, "").unwrap();
    let output = finish(second);
    assert_eq!((output.code, output.out.as_str()), (Some(0), "\n"), "{output:?}");
    assert!(bench.agents().is_empty(), "the agent outlived its last run");
}

fn a_killed_run_is_released(bench: &Bench) {
    let (staying, staying_gate) = held_run(bench, "staying", "true");
    let (killed, killed_gate) = held_run(bench, "killed", "true");
    assert_eq!(bench.the_agent()["runs"].as_array().unwrap().len(), 2);
    kill(pid(&killed), libc::SIGKILL);
    finish_without_pipes(killed);
    until("the killed run to be released", || bench.the_agent()["runs"].as_array().unwrap().len() == 1);
    fs::write(staying_gate, "").unwrap();
    // The orphaned command of the killed run is still inside: the agent stays for it.
    assert_eq!(finish(staying).code, Some(0));
    assert_eq!(bench.the_agent()["runs"].as_array().unwrap().len(), 0);
    fs::write(killed_gate, "").unwrap();
    bench.await_no_agent();
}

/// Orphans of the child may hold its pipes open.
fn finish_without_pipes(mut child: std::process::Child) {
    drop((child.stdout.take(), child.stderr.take()));
    child.wait().unwrap();
}

fn killed_agent_is_reported_and_replaced(bench: &Bench) {
    let (child, gate) = held_run(bench, "orphan", "exit 0");
    let first = bench.agent_pid();
    kill(first, libc::SIGKILL);
    until("the agent's death", || bench.agents().is_empty());
    assert!(bench.place().join("agent.sock").exists(), "no stale socket: the test tests nothing");
    let waited = bench.invoke(&["wait"]);
    assert_eq!(waited.code, Some(3), "{waited:?}");
    assert!(waited.err.contains("was killed"), "{waited:?}");
    fs::write(gate, "").unwrap();
    let output = finish(child);
    assert_eq!(output.code, Some(3), "{output:?}");
    assert!(output.err.contains("died") && output.err.contains("a new agent took over"), "{output:?}");
    let next = bench.run(&[], "echo fine > after");
    assert_eq!(next.code, Some(0), "{next:?}");
    assert_eq!(fs::read_to_string(bench.over().join("after")).unwrap(), "fine\n");
    assert!(bench.agents().is_empty());
}

fn a_run_inside_a_run_joins(bench: &Bench) {
    fs::create_dir(bench.over().join("sub")).unwrap();
    bench.give(&bench.over().join("sub"));
    let output = bench.run(
        &["--grace", "10000"],
        "echo $SURGETANK_AGENT
         $SURGETANK run -- sh -c 'echo $SURGETANK_AGENT'
         env -u SURGETANK_AGENT $SURGETANK run -- sh -c 'echo $SURGETANK_AGENT; grep -c $PWD.*fuse.surgetank /proc/self/mountinfo'
         cd sub && $SURGETANK run -- sh -c 'echo $SURGETANK_AGENT'
         $SURGETANK status --json",
    );
    assert_eq!(output.code, Some(0), "{output:?}");
    let place = bench.place().display().to_string();
    let lines: Vec<_> = output.out.lines().take(5).collect();
    assert_eq!(lines, [&*place, &*place, &*place, "1", &*place]);
    let rest: Vec<_> = output.out.lines().skip(5).collect();
    let agents: Value = serde_json::from_str(&rest.join("\n")).unwrap();
    assert_eq!(agents.as_array().unwrap().len(), 1);
}

fn state_directory_of_another_user_is_refused(bench: &Bench) {
    fs::create_dir(bench.state()).unwrap();
    bench.give(&bench.state());
    fs::set_permissions(bench.state(), fs::Permissions::from_mode(0o777)).unwrap();
    let output = bench.run(&[], "true");
    assert_eq!(output.code, Some(1), "{output:?}");
    assert!(output.err.contains("0777") && output.err.contains("chmod 700"), "{output:?}");

    if rustix::process::geteuid().is_root() {
        fs::set_permissions(bench.state(), fs::Permissions::from_mode(0o700)).unwrap();
        std::os::unix::fs::chown(bench.state(), Some(12345), None).unwrap();
        let output = bench.run(&[], "true");
        assert_eq!(output.code, Some(1), "{output:?}");
        // An ordinary user cannot even look into it.
        assert!(output.err.contains("belongs to user 12345") || output.err.contains("ermission denied"), "{output:?}");
    }
    fs::remove_dir(bench.state()).unwrap();
    std::os::unix::fs::symlink(bench.outside(), bench.state()).unwrap();
    let output = bench.run(&[], "true");
    assert_eq!(output.code, Some(1), "{output:?}");
    assert!(output.err.contains("symbolic link"), "{output:?}");
    fs::remove_file(bench.state()).unwrap();

    let inside = bench.over().join("state");
    let output = bench.run(&["--state", inside.to_str().unwrap()], "true");
    assert_eq!(output.code, Some(1), "{output:?}");
    assert!(output.err.contains("below the directory that is served"), "{output:?}");
}

fn connect(bench: &Bench) -> (UnixStream, BufReader<UnixStream>) {
    // The path may be longer than a socket address allows, so the test uses the directory's descriptor.
    let place = fs::File::open(bench.place()).unwrap();
    let stream = UnixStream::connect(format!("/proc/self/fd/{}/agent.sock", place.as_raw_fd())).unwrap();
    (stream.try_clone().unwrap(), BufReader::new(stream))
}

fn answer(reader: &mut BufReader<UnixStream>) -> Value {
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
}

fn garbage_on_the_socket_is_answered(bench: &Bench) {
    let (child, gate) = held_run(bench, "host", "true");
    if bench.who == Who::Root || !rustix::process::geteuid().is_root() {
        let (mut writer, mut reader) = connect(bench);
        for garbage in [
            "",
            "{",
            "null",
            "[]",
            "\"status\"",
            "{\"hello\":{}}",
            "{\"hello\":{\"protocol\":2},\"x\":1}",
            "\u{0}\u{1}",
        ] {
            writer.write_all(garbage.as_bytes()).unwrap();
            writer.write_all(b"\n").unwrap();
            assert_eq!(answer(&mut reader)["error"]["kind"], "malformed", "{garbage:?}");
        }
        writer.write_all(b"{\"hello\":{\"protocol\":999}}\n").unwrap();
        assert_eq!(answer(&mut reader)["error"]["kind"], "protocol");
        writer.write_all(b"{\"hello\":{\"protocol\":2}}\n").unwrap();
        assert!(answer(&mut reader)["hello"]["pid"].is_null());
        writer.write_all(b"\"release\"\n").unwrap();
        assert_eq!(answer(&mut reader)["error"]["kind"], "malformed", "released without having joined");
        writer.write_all(b"{\"why\":{\"path\":\"../../etc/passwd\"}}\n").unwrap();
        assert_eq!(answer(&mut reader)["error"]["kind"], "failed");

        // A request longer than the limit: the agent refuses it and closes the connection, without keeping it in
        // memory.
        let (mut writer, mut reader) = connect(bench);
        let block = vec![b'x'; 1 << 16];
        for _ in 0..32 {
            if writer.write_all(&block).is_err() {
                break;
            }
        }
        let mut rest = String::new();
        // The agent closes the connection with bytes unread, so a reset may follow its answer.
        let _ = reader.read_to_string(&mut rest);
        assert!(rest.contains("longer than"), "{rest:?}");
    } else {
        // The agent answers root only from its own namespace. It must survive the attempt.
        let (mut writer, _) = connect(bench);
        let _ = writer.write_all(b"{\n");
    }
    assert_eq!(bench.the_agent()["runs"].as_array().unwrap().len(), 1, "the agent is well");
    fs::write(gate, "").unwrap();
    assert_eq!(finish(child).code, Some(0));
}

fn inherited_descriptors_are_closed_and_redirections_kept(bench: &Bench) {
    let mut shell = bench.command("sh");
    shell.args([
        "-c",
        "exec 7> held; exec 8> $OUTSIDE/other
         $SURGETANK run -- sh -c 'ls -l /proc/self/fd; cat log > /dev/null; echo through' > log",
    ]);
    let output = crate::bench::output_of(shell.output().unwrap());
    assert_eq!(output.code, Some(0), "{output:?}");
    assert!(output.err.contains("descriptor 7") && output.err.contains("held"), "{output:?}");
    let log = fs::read_to_string(bench.over().join("log")).unwrap();
    assert!(log.contains("through\n"), "{log}");
    assert!(!log.contains("/held") && log.contains("/other"), "{log}");

    let elsewhere = bench.outside().join("store");
    fs::create_dir(&elsewhere).unwrap();
    bench.give(&elsewhere);
    let mut shell = bench.command("sh");
    shell.args(["-c", "$SURGETANK run --store $OUTSIDE/store -- sh -c 'echo > made' > stray"]);
    let output = crate::bench::output_of(shell.output().unwrap());
    assert_eq!(output.code, Some(0), "{output:?}");
    assert!(output.err.contains("stdout is redirected") && output.err.contains("not in the store"), "{output:?}");
    assert!(elsewhere.join("made").exists() && !bench.over().join("made").exists());
}

fn the_command_keeps_its_limits(bench: &Bench) {
    let gate = bench.outside().join("gate");
    let mut shell = bench.command("sh");
    shell.args(["-c", "ulimit -Sn 77; exec $SURGETANK run --grace 10000 -- sh -c 'ulimit -Sn; ulimit -Hn; while ! [ -e $OUTSIDE/gate ]; do sleep 0.05; done'"]);
    let child = bench.spawn(shell);
    until("the agent", || bench.agents().len() == 1);
    let limits = fs::read_to_string(format!("/proc/{}/limits", bench.agent_pid())).unwrap();
    let open = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let numbers: Vec<_> = open.split_ascii_whitespace().skip(3).take(2).collect();
    assert_eq!(numbers[0], numbers[1], "the agent did not raise its limit: {open}");
    fs::write(gate, "").unwrap();
    let output = finish(child);
    assert_eq!(output.out.lines().next(), Some("77"), "{output:?}");
    assert_ne!(output.out.lines().nth(1), Some("77"), "{output:?}");
}

fn the_second_interrupt_ends_the_drain(bench: &Bench) {
    let mut child = bench.spawn(bench.run_command(&[], "echo > slow-file; echo written"));
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut err = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    assert_eq!(line, "written\n");
    // The command has to end first, or the signal would reach the command.
    let children = format!("/proc/{0}/task/{0}/children", child.id());
    let supervisor = bench.supervisor_pid().to_string();
    until("the command to end", || {
        fs::read_to_string(&children).unwrap().split_ascii_whitespace().all(|pid| pid == supervisor)
    });
    kill(pid(&child), libc::SIGINT);
    let mut printed = String::new();
    while !printed.contains("slow-file") {
        assert_ne!(err.read_line(&mut printed).unwrap(), 0, "{printed}");
    }
    assert!(printed.contains("the drain continues"), "{printed}");
    assert!(child.try_wait().unwrap().is_none(), "one interrupt ended it");
    kill(pid(&child), libc::SIGINT);
    err.read_to_string(&mut printed).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(3), "{printed}");
    assert!(printed.contains("surgetank wait"), "{printed}");
    // The agent continues alone.
    assert_eq!(bench.agents().len(), 1);
    fs::remove_file(bench.over().join("slow-file")).unwrap();
    bench.await_no_agent();
}

fn wait_names_files_that_are_not_durable(bench: &Bench) {
    let (child, gate) = held_run(bench, "host", "rm slow");
    fs::write(bench.over().join("slow"), "").unwrap();
    fs::write(bench.over().join("done"), "").unwrap();
    bench.give(&bench.over().join("slow"));
    let output = bench.invoke(&["wait", "--timeout", "50ms"]);
    assert_eq!(output.code, Some(3), "{output:?}");
    assert!(output.err.contains("slow: still draining"), "{output:?}");
    assert_eq!(bench.invoke(&["wait", "done"]).code, Some(0));
    let waiter = bench.spawn(bench.surgetank(&["wait"]));
    let log = bench.place().join("agent.log");
    until("the third client to wait", || fs::read_to_string(&log).unwrap().matches("a client waits").count() == 3);
    fs::write(gate, "").unwrap();
    let output = finish(waiter);
    assert_eq!(output.code, Some(0), "{output:?}");
    assert_eq!(finish(child).code, Some(0));
    // The answer is the same while the agent ends and afterwards.
    assert_eq!(bench.invoke(&["wait"]).code, Some(0));
    bench.await_no_agent();
    let output = bench.invoke(&["wait"]);
    assert_eq!(output.code, Some(0), "{output:?}");
    assert!(output.err.contains("none left anything undrained"), "{output:?}");
}

fn why_evict_pin_and_prefetch_have_their_effect(bench: &Bench) {
    fs::write(bench.over().join("a file"), "").unwrap();
    let (child, gate) = held_run(bench, "host", "true");
    let output = bench.invoke(&["why", "a file"]);
    assert_eq!(output.code, Some(0), "{output:?}");
    assert!(output.out.contains("state    durable") && output.out.contains("the fake has no tiers"), "{output:?}");
    let mut outside = bench.surgetank(&["why", "--json"]);
    outside.arg(bench.over().join("a file")).current_dir("/");
    let output = crate::bench::output_of(outside.output().unwrap());
    assert_eq!(serde_json::from_str::<Value>(&output.out).unwrap()["path"], "a file", "{output:?}");
    assert_eq!(bench.invoke(&["why", "nothing"]).code, Some(1));
    assert!(bench.invoke(&["evict", "a file"]).out.contains("4.00 KiB freed"));
    assert_eq!(bench.invoke(&["pin", "a file"]).code, Some(0));
    assert_eq!(bench.invoke(&["unpin", "a file", "nothing"]).code, Some(1));
    assert!(bench.invoke(&["prefetch", "a*", "b*"]).out.contains("2 files"));
    let text = bench.invoke(&["status"]).out;
    assert!(text.contains("run 1 (pid ") && text.contains("private to its runs"), "{text}");
    fs::write(gate, "").unwrap();
    assert_eq!(finish(child).code, Some(0));
    assert_eq!(bench.invoke(&["status"]).out, "no agent of yours is running\n");
}

fn failed_start_reports_its_cause(bench: &Bench) {
    let mut command = bench.run_command(&[], "echo > ran");
    let output = crate::bench::output_of(command.env("FAKE_START", "refuse").output().unwrap());
    assert_eq!(output.code, Some(1), "{output:?}");
    assert!(output.err.contains("the tier /fast is on fire") && output.err.contains("water"), "{output:?}");
    let mut command = bench.run_command(&[], "echo > ran");
    let output = crate::bench::output_of(command.env("FAKE_START", "die").output().unwrap());
    assert_eq!(output.code, Some(1), "{output:?}");
    assert!(output.err.contains("died while it started") && output.err.contains("last words"), "{output:?}");
    let missing = bench.outside().join("no-store");
    let output = bench.run(&["--store", missing.to_str().unwrap()], "echo > ran");
    assert_eq!(output.code, Some(1), "{output:?}");
    assert!(output.err.contains("no-store") && output.err.contains("o such file"), "{output:?}");
    assert!(!bench.over().join("ran").exists(), "the command ran without a mount");
    assert_eq!(bench.run(&[], "echo > ran").code, Some(0), "a failed start is in the way of the next");
}

fn mount_and_umount(bench: &Bench) {
    let over = bench.over();
    let over_text = over.to_str().unwrap();
    let away = |arguments: &[&str]| {
        let mut command = bench.surgetank(arguments);
        crate::bench::output_of(command.current_dir("/").output().unwrap())
    };
    let mut holder = bench.command("sleep").arg("1000").spawn().unwrap();
    let output = away(&["mount", over_text]);
    assert_eq!(output.code, Some(1), "{output:?}");
    assert!(output.err.contains(&format!("pid {}: sleep 1000", holder.id())), "{output:?}");
    holder.kill().unwrap();
    holder.wait().unwrap();

    let output = away(&["mount", over_text]);
    assert_eq!(output.code, Some(0), "{output:?}");
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(mounts.contains(&format!(" {over_text} ")), "not visible to all");
    assert_eq!(bench.the_agent()["visibility"], "global");
    assert_eq!(away(&["mount", over_text]).code, Some(1), "mounted twice");

    let output = bench.run(&["--detach-drain"], "echo > inside; echo > stuck");
    assert_eq!(output.code, Some(4), "{output:?}");
    let output = away(&["umount", over_text]);
    assert_eq!(output.code, Some(3), "{output:?}");
    assert!(output.err.contains("stuck: it is stuck"), "{output:?}");
    let mut remove = bench.command("rm");
    assert!(remove.arg("stuck").status().unwrap().success());

    let mut holder = bench.command("sleep").arg("1000").spawn().unwrap();
    let output = away(&["umount", over_text]);
    assert_eq!(output.code, Some(1), "{output:?}");
    assert!(output.err.contains(&format!("pid {}: sleep 1000", holder.id())), "{output:?}");
    holder.kill().unwrap();
    holder.wait().unwrap();
    assert_eq!(bench.agents().len(), 1, "a busy mount went away");

    let output = away(&["umount", over_text]);
    assert_eq!(output.code, Some(0), "{output:?}");
    assert!(bench.agents().is_empty());
    assert!(over.join("inside").exists());
    let output = bench.run(&["--detach-drain"], "true");
    assert_eq!(output.code, Some(2), "{output:?}");
}

fn a_subdirectory_is_re_entered(bench: &Bench) {
    let sub = bench.over().join("a b").join("c");
    fs::create_dir_all(&sub).unwrap();
    bench.give(&sub);
    let over = bench.over();
    let mut command =
        bench.surgetank(&["run", "--over", over.to_str().unwrap(), "--", "sh", "-c", "pwd -P; stat -f -c %T ."]);
    let output = crate::bench::output_of(command.current_dir(&sub).output().unwrap());
    assert_eq!(output.code, Some(0), "{output:?}");
    assert_eq!(output.out, format!("{}\nfuseblk\n", sub.display()), "{output:?}");
}

fn sigterm_makes_the_agent_leave_in_order(bench: &Bench) {
    let (child, gate) = held_run(bench, "host", "true");
    kill(bench.agent_pid(), libc::SIGTERM);
    until("the agent to refuse newcomers", || {
        fs::read_to_string(bench.place().join("agent.log")).unwrap().contains("asked to stop")
    });
    assert_eq!(bench.the_agent()["runs"].as_array().unwrap().len(), 1, "it left its run alone");
    fs::write(gate, "").unwrap();
    assert_eq!(finish(child).code, Some(0));
    assert!(bench.agents().is_empty());
}

fn other_mounts_below_are_bound_through(bench: &Bench) {
    let other = bench.over().join("scratch");
    fs::create_dir(&other).unwrap();
    rustix::mount::mount("tmpfs", &other, "tmpfs", rustix::mount::MountFlags::empty(), None).unwrap();
    let output = bench.run(&["--grace", "10000"], "stat -f -c %T scratch; echo > scratch/file; $SURGETANK status");
    let seen = other.join("file").exists();
    rustix::mount::unmount(&other, rustix::mount::UnmountFlags::empty()).unwrap();
    assert_eq!(output.code, Some(0), "{output:?}");
    assert!(output.out.starts_with("tmpfs\n"), "{output:?}");
    assert!(output.out.contains(&format!("bypassed, another mount: {}", other.display())), "{output:?}");
    assert!(seen, "the write did not reach the other mount");
}

fn other_user_is_not_answered(bench: &Bench) {
    let (child, gate) = held_run(bench, "host", "true");
    // The agent refuses another user's credentials even if that user may open the socket.
    fs::set_permissions(bench.state(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(bench.place(), fs::Permissions::from_mode(0o755)).unwrap();
    let socket = bench.place().join("agent.sock");
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o777)).unwrap();
    let mut other_user = bench.command(std::env::current_exe().unwrap());
    let output = other_user.uid(12345).gid(12345).env("SURGETANK_TEST_OTHER_USER", &socket).output().unwrap();
    let output = crate::bench::output_of(output);
    assert_eq!((output.code, output.out.as_str()), (Some(0), "turned away\n"), "{output:?}");
    fs::set_permissions(bench.state(), fs::Permissions::from_mode(0o700)).unwrap();
    fs::set_permissions(bench.place(), fs::Permissions::from_mode(0o700)).unwrap();
    fs::write(gate, "").unwrap();
    assert_eq!(finish(child).code, Some(0));
}

fn a_dead_global_mount_is_cleared(bench: &Bench) {
    let over = bench.over();
    let over_text = over.to_str().unwrap();
    let mut mount = bench.surgetank(&["mount", over_text]);
    assert!(mount.current_dir("/").stderr(Stdio::null()).status().unwrap().success());
    kill(bench.agent_pid(), libc::SIGKILL);
    until("the mount to be dead", || {
        fs::metadata(&over).is_err_and(|error| error.raw_os_error() == Some(libc::ENOTCONN))
    });
    let mut run = bench.surgetank(&["run", "--over", over_text, "--", "true"]);
    let output = crate::bench::output_of(run.current_dir("/").output().unwrap());
    assert_eq!(output.code, Some(0), "{output:?}");
    assert!(output.err.contains("dead mount"), "{output:?}");
    assert!(bench.agents().is_empty() && fs::metadata(&over).is_ok());
}
