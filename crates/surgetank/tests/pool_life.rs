//! How members come and go: `surgetank pool leave`, the pool of a Slurm job, and starts beside a pool that is not theirs.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

use crate::pool::{Pool, parent_of, run};
use crate::scene::{MIB, eventually};

fn leave(pool: &Pool, number: usize, words: &[&str]) -> Output {
    let mut command = pool.command_at(number, "pool", &["leave"]);
    command.args(words).arg(pool.over(number)).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn is_mounted(over: &Path) -> bool {
    fs::read_to_string("/proc/thread-self/mounts").unwrap().lines().any(|line| line.split(' ').nth(1) == over.to_str())
}

/// Lines about pools that the start does not join.
fn lines_about_pools(text: &str) -> Vec<&str> {
    text.lines().filter(|line| line.contains("this agent is not a member")).collect()
}

fn pool_files(store: &Path) -> Vec<String> {
    let names = fs::read_dir(store).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.filter(|name| name.starts_with(".surgetank-tmp-pool-")).collect();
    names.sort();
    names
}

#[test]
fn member_that_leaves_drains_and_others_take_its_directories() {
    let Some(mut pool) = Pool::start("leave", 3) else { return };
    fs::create_dir(pool.member(2).join("d")).unwrap();
    fs::write(pool.member(2).join("d/f"), vec![b'x'; 2 * MIB as usize]).unwrap();
    assert_eq!(pool.status(0)["claims"][0]["owner"], 3);
    let left = leave(&pool, 2, &["--json"]);
    assert_eq!(left.status.code(), Some(0), "{left:?}");
    assert!(said(&left).contains("has left the pool test"), "{left:?}");
    let json: Value = serde_json::from_slice(&left.stdout).unwrap();
    assert_eq!(
        (&json["left"], &json["pool"], &json["verdict"]["not_durable"]["total"]),
        (&json!(true), &json!("test"), &json!(0))
    );
    assert_eq!(json["directory"], json!(pool.over(2)));
    assert!(!is_mounted(&pool.over(2)), "the mount is there");
    assert_eq!(fs::metadata(pool.store().join("d/f")).unwrap().len(), 2 * MIB);
    pool.has_left(2);
    let status = pool.status(0);
    let members: Vec<_> = status["members"].as_array().unwrap().iter().map(|one| one["member"].clone()).collect();
    assert_eq!((members, &status["claims"], &status["lost"]), (vec![json!(1), json!(2)], &json!([]), &json!([])));
    fs::write(pool.member(1).join("d/g"), "later").unwrap();
    assert_eq!(pool.status(0)["claims"][0]["owner"], 2);
    assert_eq!(fs::read_to_string(pool.member(0).join("d/g")).unwrap(), "later");
    // The first member has the registry.
    let refused = leave(&pool, 0, &["--timeout", "1s", "--json"]);
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    assert!(said(&refused).contains("other members of the pool need it"), "{refused:?}");
    assert!(refused.stdout.is_empty() && is_mounted(pool.member(0)), "{refused:?}");
    // A node that left may come again.
    pool.mount_one(&[]);
    assert_eq!(fs::read_to_string(pool.member(2).join("d/g")).unwrap(), "later");
    pool.end();
}

#[test]
fn leave_is_refused_while_runs_or_programs_use_the_member() {
    let Some(mut pool) = Pool::start("leave-busy", 1) else { return };
    // A run has its own member, or is in the mount of one.
    pool.mount_one(&[]);
    let script = "echo x > here; until [ -e go ]; do sleep 0.02; done";
    for number in [1, 2] {
        let running = run(&pool, number, script);
        eventually("the run works", || pool.member(0).join("here").exists());
        let refused = leave(&pool, number, &[]);
        assert_eq!(refused.status.code(), Some(1), "{refused:?}");
        let text = said(&refused);
        assert!(text.contains("sh -euc echo x") && text.contains("run 1"), "{text}");
        assert!(text.contains("try:") && !text.contains("has left"), "{text}");
        assert_eq!(pool.status(0)["members"].as_array().unwrap().len(), number + 1);
        fs::write(pool.member(0).join("go"), "").unwrap();
        let ended = running.wait_with_output().unwrap();
        assert!(ended.status.success(), "{ended:?}");
        fs::remove_file(pool.member(0).join("go")).unwrap();
        fs::remove_file(pool.member(0).join("here")).unwrap();
    }
    // The agent of the second run has left with it.
    let absent = leave(&pool, 2, &[]);
    assert!(absent.status.code() == Some(1) && said(&absent).contains("no agent of yours serves"), "{absent:?}");
    let mut inside = Command::new("sleep").arg("60").current_dir(pool.member(1)).spawn().unwrap();
    let refused = leave(&pool, 1, &[]);
    assert!(refused.status.code() == Some(1) && said(&refused).contains("it is in use"), "{refused:?}");
    inside.kill().unwrap();
    inside.wait().unwrap();
    assert_eq!(leave(&pool, 1, &["--quiet"]).status.code(), Some(0));
    pool.has_left(1);
    pool.end();
}

/// The run gave its background child no time.
#[test]
fn leave_waits_for_a_member_whose_runs_have_ended() {
    let Some(mut pool) = Pool::start("leave-runs", 1) else { return };
    let mut command = pool.command("run", 1, &["--quiet", "--grace", "0s", "--over"]);
    command.arg(pool.over(1)).args(["--", "sh", "-c", "echo x > f; (sleep 1; echo y > g) >/dev/null 2>&1 &"]);
    let ended = command.current_dir(pool.over(1)).output().unwrap();
    assert!(said(&ended).contains("still running"), "{ended:?}");
    let late = leave(&pool, 1, &["--timeout", "100ms"]);
    assert!(late.status.code() == Some(1) && said(&late).contains("did not leave in time"), "{late:?}");
    let left = leave(&pool, 1, &["--json"]);
    assert_eq!(left.status.code(), Some(0), "{left:?}");
    assert_eq!(serde_json::from_slice::<Value>(&left.stdout).unwrap()["left"], true);
    assert_eq!(fs::read_to_string(pool.store().join("g")).unwrap(), "y\n");
    assert_eq!(pool.status(0)["members"].as_array().unwrap().len(), 1);
    pool.end();
}

#[test]
fn leave_that_cannot_drain_ends_with_3_and_the_member_stays() {
    let Some(mut pool) = Pool::start("leave-slow", 1) else { return };
    pool.mount_one(&["--drain-bytes-per-second-max", "1MiB"]);
    fs::write(pool.member(1).join("f"), vec![b'x'; 2 * MIB as usize]).unwrap();
    let late = leave(&pool, 1, &["--timeout", "300ms", "--json"]);
    assert_eq!(late.status.code(), Some(3), "{late:?}");
    assert!(said(&late).contains("f: ") && said(&late).contains("stays mounted"), "{late:?}");
    let json: Value = serde_json::from_slice(&late.stdout).unwrap();
    assert_eq!((&json["left"], json["verdict"]["not_durable"]["total"].as_u64()), (&json!(false), Some(1)));
    assert_eq!(fs::metadata(pool.member(0).join("f")).unwrap().len(), 2 * MIB);
    let left = leave(&pool, 1, &[]);
    assert_eq!(left.status.code(), Some(0), "{left:?}");
    pool.has_left(1);
    assert_eq!(fs::metadata(pool.store().join("f")).unwrap().len(), 2 * MIB);
    pool.end();
}

#[test]
fn leave_without_a_pool_is_refused_and_unmounts_nothing() {
    let Some(pool) = Pool::start("leave-none", 0) else { return };
    let mounted = pool.without_pool("mount", 0, &[]).arg(pool.over(0)).output().unwrap();
    assert!(mounted.status.success(), "{mounted:?}");
    let refused = leave(&pool, 0, &[]);
    assert!(refused.status.code() == Some(1) && said(&refused).contains("belongs to no pool"), "{refused:?}");
    assert!(is_mounted(&pool.over(0)));
    // A run that names a pool must not work without it.
    let named = run(&pool, 0, "touch ran").wait_with_output().unwrap();
    assert!(named.status.code() == Some(2) && said(&named).contains("is served already, in no pool"), "{named:?}");
    assert!(!pool.over(0).join("ran").exists());
    // (The agent learns a moment later that the refused run has ended.)
    eventually("the directory is unmounted", || {
        let ended = pool.command_at(0, "umount", &[]).arg(pool.over(0)).output().unwrap();
        let is_used = said(&ended).contains("it is in use");
        assert!(ended.status.success() || is_used, "{ended:?}");
        !is_used
    });
}

/// A run in a Slurm job, as `srun` starts one on a node.
fn in_job(pool: &Pool, number: usize, nodes: &str, more: &[&str], script: &str) -> Command {
    let mut command = pool.without_pool("run", number, &["--pool-host", "127.0.0.1", "--no-summary", "--over"]);
    command.arg(pool.over(number)).args(more).args(["--", "sh", "-euc", script]).current_dir(pool.over(number));
    command.env("HOME", pool.store().with_file_name("home"));
    command.env("SLURM_JOB_ID", "4711").env("SLURM_JOB_NUM_NODES", nodes);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[test]
fn runs_of_a_slurm_job_of_two_nodes_share_a_directory() {
    let Some(pool) = Pool::start("slurm", 0) else { return };
    // (For a while only: without the pool the file never comes.)
    let waits = "n=0; until [ -e $1 ]; do sleep 0.01; n=$((n+1)); [ $n -lt 1000 ]; done";
    let script = format!("mkdir d; echo one > d/one; set -- d/two; {waits}; cat d/two > d/three");
    let first = in_job(&pool, 0, "2", &[], &script).spawn().unwrap();
    let script = format!("set -- d/one; {waits}; cat d/one; echo two > d/new; mv d/new d/two");
    let second = in_job(&pool, 1, "2", &["--quiet"], &script).spawn().unwrap();
    let (first, second) = (first.wait_with_output().unwrap(), second.wait_with_output().unwrap());
    assert!(first.status.success() && second.status.success() && second.stdout == b"one\n", "{first:?} {second:?}");
    let line = "surgetank: the Slurm job has 2 nodes: this one joins the pool slurm-4711";
    assert_eq!(said(&first).matches(line).count(), 1, "{first:?}");
    assert!(said(&first).contains("--pool none"), "{first:?}");
    assert!(!said(&second).contains("slurm-4711"), "{second:?}");
    assert_eq!(fs::read_to_string(pool.store().join("d/three")).unwrap(), "two\n");
    // One secret for all jobs.
    let secrets = pool.store().with_file_name("home/.config/surgetank/pools");
    let names: Vec<_> = fs::read_dir(secrets).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["slurm"]);
    assert_eq!(pool_files(&pool.store()), [""; 0]);
}

#[test]
fn runs_of_a_slurm_job_have_no_pool_on_one_node_or_if_none_is_wanted() {
    let Some(pool) = Pool::start("slurm-none", 0) else { return };
    let store = pool.store();
    let script = format!("ls -A {}", store.display());
    let none: (&[&str], _) = (&["--pool", "none"], None);
    let of_variable: (&[&str], _) = (&[], Some(("SURGETANK_POOL", "none")));
    let without_count: (&[&str], _) = (&[], Some(("SLURM_JOB_NUM_NODES", "")));
    for (nodes, (more, variable)) in
        [("1", (&[] as &[&str], None)), ("2", none), ("2", of_variable), ("2", without_count)]
    {
        let mut command = in_job(&pool, 0, nodes, more, &script);
        let ended = command.envs(variable).env_remove("HOME").output().unwrap();
        assert!(ended.status.success() && ended.stdout.is_empty() && !said(&ended).contains("pool"), "{ended:?}");
    }
    // A run within a run without a pool, and a run in a mount without one.
    let inner = format!("/mnt/surgetank run --state {} -- true", store.with_file_name("state0").display());
    let ended = in_job(&pool, 0, "2", &["--pool", "none"], &inner).output().unwrap();
    assert!(ended.status.success() && !said(&ended).contains("pool"), "{ended:?}");
    let mounted = pool.without_pool("mount", 0, &[]).arg(pool.over(0)).output().unwrap();
    assert!(mounted.status.success(), "{mounted:?}");
    let ended = in_job(&pool, 0, "2", &[], "true").output().unwrap();
    let line = "is served already, in no pool: this run is not in the pool slurm-4711";
    assert!(ended.status.success() && said(&ended).contains(line), "{ended:?}");
    let ended = pool.command_at(0, "umount", &[]).arg(pool.over(0)).output().unwrap();
    assert!(ended.status.success(), "{ended:?}");
    // The user chose what excludes a pool: the run says so and works.
    let ended = in_job(&pool, 0, "2", &["--door", "seccomp"], "true").output().unwrap();
    assert!(said(&ended).contains("the Slurm job has 2 nodes, and this one joins no pool"), "{ended:?}");
    // The rest is refused before the command starts.
    let refusals: [(&str, &str, &str); 4] = [
        ("HOME", "", "SLURM_JOB_ID=4711: HOME is not set"),
        ("SLURM_JOB_NUM_NODES", "two", "SLURM_JOB_NUM_NODES=two: it is not a number of nodes"),
        ("SLURM_JOB_ID", "a/b", "SLURM_JOB_ID=a/b: it is not the number of a job"),
        ("SURGETANK_POOL_SECRET_FILE", "/proc/none/secret", "the pool slurm-4711 cannot be joined"),
    ];
    for (name, value, text) in refusals {
        let ended = in_job(&pool, 0, "2", &[], "touch ran").env(name, value).output().unwrap();
        let text_given = said(&ended).replace("\n  why:  ", ": ");
        assert!(!ended.status.success() && text_given.contains(text), "{name}={value}: {text_given}");
        assert!(text_given.contains("without a pool: --pool none"), "{name}={value}: {text_given}");
        assert!(!store.join("ran").exists());
    }
    assert_eq!(pool_files(&store), [""; 0]);
}

/// A run that writes its own file and the common one, and then works until `go` is there. Returns when it has written.
fn writer(pool: &Pool, number: usize, name: &str, options: &[&str]) -> Child {
    let [ready, go] = [name, "go"].map(|name| pool.store().with_file_name(format!("at-{name}")));
    let script = format!(
        "echo {name} > d/{name}; echo {name} > d/common; touch {}; until [ -e {} ]; do sleep 0.02; done",
        ready.display(),
        go.display()
    );
    let mut command = pool.without_pool("run", number, options);
    command.args(["--quiet", "--over"]).arg(pool.over(number)).args(["--", "sh", "-euc", &script]);
    let running = command.current_dir(pool.over(number)).spawn().unwrap();
    eventually("the run has written", || ready.exists());
    running
}

/// Each start reports the pools that it finds, once. No agent removes what another one has in the store.
#[test]
fn two_pools_and_a_plain_run_over_one_directory_keep_all_files() {
    let Some(pool) = Pool::start("beside", 0) else { return };
    let store = pool.store();
    fs::create_dir(store.join("d")).unwrap();
    let foreign = [".surgetank-tmp-0123-4", "d/.surgetank-tmp-0123-5"].map(|name| store.join(name));
    foreign.iter().for_each(|path| fs::write(path, "another instance").unwrap());
    let of_pool = |number: usize, name: &str| {
        let secret = store.with_file_name(format!("secret-{name}"));
        let options = ["--pool", name, "--pool-host", "127.0.0.1", "--pool-secret", secret.to_str().unwrap()];
        writer(&pool, number, name, &options)
    };
    let running = [of_pool(0, "flow"), of_pool(1, "other"), writer(&pool, 2, "plain", &[])];
    let files = [".surgetank-tmp-pool-flow.1", ".surgetank-tmp-pool-other.1"];
    assert_eq!(pool_files(&store), files, "a start removed the file of a pool");
    fs::write(store.with_file_name("at-go"), "").unwrap();
    let [flow, other, plain] = running.map(|running| {
        let ended = running.wait_with_output().unwrap();
        assert!(matches!(ended.status.code(), Some(0 | 3)), "{ended:?}");
        said(&ended)
    });
    assert_eq!(lines_about_pools(&flow), [""; 0]);
    let [line] = lines_about_pools(&other)[..] else { panic!("{other}") };
    assert!(line.contains(&format!("the pool flow serves {} too", store.display())), "{line}");
    assert!(line.contains("To join it: --pool flow."), "{line}");
    let [line] = lines_about_pools(&plain)[..] else { panic!("{plain}") };
    assert!(line.contains("the pools flow, other serve ") && line.contains("--pool NAME"), "{line}");
    let names = fs::read_dir(store.join("d")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let all: BTreeMap<_, _> =
        names.map(|name| (name.clone(), fs::read_to_string(store.join("d").join(name)).unwrap())).collect();
    for name in ["flow", "other", "plain"] {
        assert_eq!(all.get(name), Some(&format!("{name}\n")), "{all:?}");
    }
    // One has the name. Each other one has a conflict file, or overwrote what it saw.
    let mut versions = all.iter().filter(|(name, _)| name.starts_with("common"));
    assert!(versions.all(|(_, text)| ["flow\n", "other\n", "plain\n"].contains(&text.as_str())), "{all:?}");
    assert!(all.contains_key("common") && foreign.iter().all(|path| path.exists()), "{all:?}");
    assert_eq!(pool_files(&store), [""; 0]);
}

/// A lost node's file does not mislead later runs.
#[test]
fn pool_whose_first_member_is_dead_is_not_reported() {
    let Some(mut pool) = Pool::start("beside-dead", 1) else { return };
    let plain = |pool: &Pool, number: usize| {
        let mut command = pool.without_pool("run", number, &["--quiet", "--over"]);
        let output = command.arg(pool.over(number)).args(["--", "true"]).current_dir("/mnt").output().unwrap();
        assert!(output.status.success(), "{output:?}");
        said(&output)
    };
    assert_eq!(lines_about_pools(&plain(&pool, 1)).len(), 1);
    pool.lose(0);
    assert_eq!(pool_files(&pool.store()).len(), 1);
    assert_eq!(lines_about_pools(&plain(&pool, 2)), [""; 0]);
}

/// The lease ends meanwhile if nothing renews it: the pool's process does, while no agent serves. `SURGETANK_RESTART_FILES`: so
/// many files wait for the drain, and the test prints how long the next agent takes to serve.
#[test]
fn member_whose_agent_starts_for_longer_than_the_lease_keeps_its_directories() {
    let files: usize = std::env::var("SURGETANK_RESTART_FILES").ok().and_then(|text| text.parse().ok()).unwrap_or(500);
    let Some(mut pool) = Pool::ample("restart", 0) else { return };
    fs::create_dir(pool.store().join("a")).unwrap();
    pool.mount_one(&["--pool-lease", "2s"]);
    pool.mount_one(&["--pool-lease", "2s", "--quiet-period", "24h"]);
    let one = pool.member(1).to_owned();
    for number in 0..files {
        if number % 1000 == 0 {
            fs::create_dir(one.join(format!("a/{}", number / 1000))).unwrap();
        }
        fs::write(one.join(format!("a/{}/{number}", number / 1000)), "").unwrap();
    }
    let owned = |pool: &Pool| pool.asked(0, "status")["claims"].clone();
    let before = owned(&pool);
    assert_eq!(before[0]["owner"], 2, "{before}");
    let agent = pool.agent(1);
    let supervisor = parent_of(agent.as_raw_nonzero().get()).and_then(rustix::process::Pid::from_raw).unwrap();
    kill_process(supervisor, Signal::STOP).unwrap();
    kill_process(agent, Signal::KILL).unwrap();
    std::thread::sleep(Duration::from_secs(6));
    assert_eq!((pool.asked(0, "members")["lost"].clone(), owned(&pool)), (json!([]), before.clone()));
    let begun = Instant::now();
    kill_process(supervisor, Signal::CONT).unwrap();
    // (The kernel keeps requests until the next agent takes them.)
    fs::write(one.join("a/after"), "").unwrap();
    eprintln!("an agent with {files} files that wait for the drain serves after {:?}", begun.elapsed());
    eventually("another agent is noted", || pool.agent(1) != agent);
    assert_eq!(fs::read_dir(one.join("a")).unwrap().count(), files.div_ceil(1000) + 1);
    assert_eq!((pool.asked(0, "members")["lost"].clone(), owned(&pool)), (json!([]), before));
    pool.end();
    let stored: usize =
        (0..files.div_ceil(1000)).map(|dir| fs::read_dir(pool.store().join(format!("a/{dir}"))).unwrap().count()).sum();
    assert_eq!(stored, files);
}
