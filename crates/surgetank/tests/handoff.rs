//! Handoff: programs continue while their agents are killed and replaced (docs/durability.md, "When
//! the agent dies under a command").
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

mod fsync;

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::scene::{Scene, eventually, succeed};

const FAST: &[&str] = &["--quiet-period", "0s"];

/// A program with open files continues unchanged when its agent is killed.
fn open_files_continue(scene: Option<Scene>, options: &[&str]) {
    let Some(mut scene) = scene else { return };
    scene.tier("ram", 64);
    for dir in ["there", "there/deep"] {
        fs::create_dir(scene.path(dir)).unwrap();
        scene.hand_over(&scene.path(dir));
    }
    fs::write(scene.path("there/old"), "of the store\n").unwrap();
    let aside = scene.beside("aside");
    let script = r"
        exec 3>new 4<there/old 5<>both
        echo before >&3
        echo both >&5
        cd there/deep
        touch /mnt/aside/ready
        until [ -e /mnt/aside/go ]; do sleep 0.01; done
        echo after >&3
        cat <&4
        echo more >&5
        pwd
        ls ..
        echo made >here
        mkdir -p sub && mv here sub/there && cat sub/there
        exec 3>&- 4<&- 5>&-
        cat ../../new ../../both
        ";
    let mut all = vec!["-v"];
    all.extend(FAST);
    all.extend(options);
    let running = scene.start(&all, script);
    eventually("the program runs", || aside.join("ready").exists());
    scene.replace_agent();
    fs::write(aside.join("go"), "").unwrap();
    let expected = "of the store\n/mnt/project/there/deep\ndeep\nold\nmade\nbefore\nafter\nboth\nmore\n";
    running.ends().exits(0).prints(expected).says(&["was replaced"]);
    scene.holds("new", b"before\nafter\n");
    scene.holds("there/deep/sub/there", b"made\n");
    scene.is_clean();
}

#[test]
fn open_files_survive_the_agent_with_the_shim() {
    open_files_continue(Scene::new("handoff-open-shim"), &[]);
}

#[test]
fn open_files_survive_the_agent_through_the_mount() {
    open_files_continue(Scene::new("handoff-open-mount"), &["--no-preload"]);
}

#[test]
fn open_files_of_an_unprivileged_user_survive_the_agent() {
    open_files_continue(Scene::of_user("handoff-open-user"), &["--no-preload"]);
}

#[test]
fn unprivileged_open_files_survive_the_agent_with_the_shim() {
    open_files_continue(Scene::of_user("handoff-open-user-shim"), &[]);
}

/// An older hard link, looked up while the drain removes the file's other name. Regression: after a kill at that
/// point the second name was missing.
#[test]
fn link_found_during_the_unlink_of_another_survives_a_kill() {
    let Some(mut scene) = Scene::new("handoff-other-name") else { return };
    scene.tier("ram", 64);
    fs::create_dir(scene.path("d")).unwrap();
    fs::write(scene.path("d/a"), "linked").unwrap();
    fs::hard_link(scene.path("d/a"), scene.path("c")).unwrap();
    let script = "cat d/a; rm d/a; sleep 1; cat c; sleep 2; cat c; echo more >>c; cat c";
    let mut command = scene.run_command(&["-v", "--quiet-period", "0s"], script);
    command.env("SURGETANK_HOLD", "drain.started:2000").env("SURGETANK_CRASH", "drain.executed:1");
    let ended = crate::scene::Running::of(command).ends().exits(0);
    assert_eq!(ended.stdout, "linkedlinkedlinkedlinkedmore\n", "{}", ended.stderr);
    assert!(ended.stderr.contains("was replaced"), "{}", ended.stderr);
    scene.holds("c", b"linkedmore\n");
    scene.is_clean();
}

/// Programs do all kinds of operations all the time, while agents are killed one after another.
fn killed_again_and_again(scene: Option<Scene>, options: &[&str], direct: bool, kills: u32) {
    let Some(mut scene) = scene else { return };
    scene.tier("ram", 64);
    scene.beside("aside");
    fs::copy(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/handoff/continues.py"), "/mnt/continues.py").unwrap();
    let script = r"
        for name in one two three; do python3 /mnt/continues.py $name /mnt/aside/stop & pids=${pids:-}\ $!; done
        for pid in $pids; do wait $pid; done
        ";
    let mut all = FAST.to_vec();
    all.extend(options);
    let mut command = scene.run_command(&all, script);
    command.env("SURGETANK_DIRECT", direct.to_string());
    let mut running = crate::scene::Running::of(command);
    eventually("the programs begin", || scene.path("three").exists() || running.has_ended());
    let given = std::env::var("SURGETANK_KILLS_SEED").map(|seed| seed.parse().unwrap());
    let seed: u32 = given.unwrap_or_else(|_| std::process::id());
    eprintln!("SURGETANK_KILLS_SEED={seed}");
    let (mut killed, mut dice) = (0, seed | 1);
    let begun = Instant::now();
    while killed < kills && !running.has_ended() && begun.elapsed() < Duration::from_secs(200) {
        dice = dice.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // Some agents are killed before they serve, but not so many in a row that the supervisor gives up.
        if killed % 5 != 4 {
            scene.await_served();
        }
        // (The supervisor counts an agent that dies as soon as it serves like one that never served.)
        std::thread::sleep(Duration::from_millis(30 + u64::from(dice >> 24)));
        if scene.agent().is_some() && !running.has_ended() {
            // The agent may be ending, and then no agent follows.
            killed += u32::from(scene.kill_one_agent());
        }
    }
    fs::write("/mnt/aside/stop", "").unwrap();
    let ended = running.ends().exits(0);
    assert_eq!(killed, kills, "agents that were killed and replaced");
    for name in ["one", "two", "three"] {
        assert!(ended.stdout.contains(&format!("{name} made ")), "{}\n{}", ended.stdout, ended.stderr);
        succeed(
            Command::new("sha256sum")
                .args(["--check", "--quiet", &format!("/mnt/aside/{name}")])
                .current_dir(&scene.over),
        );
    }
    // The last agent may have been killed after the command ended.
    scene.await_no_agent();
    scene.is_clean();
    scene.leaves_nothing_on_the_tiers();
}

#[test]
fn twenty_agent_kills_lose_nothing_with_direct_files() {
    killed_again_and_again(Scene::new("handoff-direct"), &["--no-preload"], true, 20);
}

#[test]
fn twenty_agent_kills_lose_nothing_with_mediated_files() {
    killed_again_and_again(Scene::new("handoff-mediated"), &["--no-preload"], false, 20);
}

#[test]
fn twenty_agent_kills_lose_nothing_with_the_shim() {
    killed_again_and_again(Scene::new("handoff-shim"), &[], true, 20);
}

#[test]
fn twenty_agent_kills_lose_nothing_unprivileged() {
    killed_again_and_again(Scene::of_user("handoff-user"), &["--no-preload"], true, 20);
}

#[test]
fn twenty_agent_kills_lose_nothing_unprivileged_with_the_shim() {
    killed_again_and_again(Scene::of_user("handoff-user-shim"), &[], true, 20);
}

/// A program that holds a lock keeps it, also while no agent serves. A waiting program gets the lock afterwards.
#[test]
fn locks_survive_the_agent() {
    let Some(mut scene) = Scene::new("handoff-locks") else { return };
    scene.tier("ram", 64);
    let aside = scene.beside("aside");
    let script = r#"
        cat >/mnt/locks.py <<'END'
import fcntl, os, subprocess, sys, time
one = open("posix", "w+"); two = open("flock", "w+")
fcntl.lockf(one, fcntl.LOCK_EX); fcntl.flock(two, fcntl.LOCK_EX)
waits = subprocess.Popen([sys.executable, "-c", "import fcntl, time; fcntl.lockf(open('posix', 'r+'), fcntl.LOCK_EX); print('had it', flush=True)"])
time.sleep(0.3)
open("/mnt/aside/ready", "w").close()
while not os.path.exists("/mnt/aside/go"): time.sleep(0.01)
def refused(name, take):
    ask = f"import fcntl, sys\ntry: fcntl.{take}(open('{name}', 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)\nexcept OSError: sys.exit(0)\nsys.exit(1)"
    return subprocess.run([sys.executable, "-c", ask]).returncode == 0
print(refused("posix", "lockf"), refused("flock", "flock"), waits.poll(), flush=True)
one.close()
waits.wait()
fcntl.flock(two, fcntl.LOCK_UN)
print(refused("flock", "flock"))
END
        python3 /mnt/locks.py
    "#;
    let running = scene.start(&[FAST, &["--no-preload"]].concat(), script);
    eventually("the program runs", || aside.join("ready").exists());
    scene.replace_agent();
    scene.await_served();
    scene.replace_agent();
    fs::write(aside.join("go"), "").unwrap();
    running.ends().exits(0).prints("True True None\nhad it\nFalse\n");
}

/// The script passes each of these points, and the kills do not change its output.
#[test]
fn agent_killed_at_each_critical_point_loses_nothing() {
    let points = [
        "make.adopted",
        "make.written_down",
        "seal.begun",
        "seal.written_down",
        "rename.written_down",
        "rename.before_tier",
        "unlink.begun",
        "unlink.written_down",
        "unlink.tier_done",
        "rmdir.written_down",
        "node.written_down",
        "link.written_down",
        "exchange.written_down",
        "mount.served",
        "catalog.appended",
    ];
    let Some(mut scene) = Scene::new("handoff-points") else { return };
    scene.tier("ram", 64);
    let script = r#"
        mkdir d d/e
        echo one >d/one
        (set -C; echo two >d/two)
        ln d/one d/link && ln -s one d/way
        mv d/two d/e/two
        mv d/e/two d/one
        python3 -c "
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
open('a', 'w').write('a'); open('b', 'w').write('b')
assert libc.renameat2(-100, b'a', -100, b'b', 2) == 0, ctypes.get_errno()
assert (open('a').read(), open('b').read()) == ('b', 'a')
"
        rm d/link && rmdir d/e
        cat d/way && ls d a b && rm -r d a b
        ls
    "#;
    for point in points {
        // The agent writes to the catalog before it serves a process.
        let first = if point == "catalog.appended" { 5 } else { 1 };
        for pass in first..first + 3 {
            // The next agent dies while it recovers, too.
            let mut command = scene.run_command(&[FAST, &["--no-preload", "-v"]].concat(), script);
            command.env("SURGETANK_CRASH", format!("{point}:{pass},recover.matched:{}", pass - first + 1));
            let ended = crate::scene::Running::of(command).ends().exits(0).prints("two\na\nb\n\nd:\none\nway\n");
            assert!(pass > first || ended.stderr.contains("was replaced"), "{point} is not passed: {}", ended.stderr);
            scene.await_no_agent();
            assert!(scene.store_files().is_empty(), "{point}: {:?}", scene.store_files());
        }
    }
}

/// Regression: the file existed and its program had no answer yet. The next agent mistook it for a file that no
/// program writes.
#[test]
fn unanswered_create_is_not_stored_empty() {
    let Some(mut scene) = Scene::new("handoff-maker") else { return };
    scene.tier("ram", 64);
    let mut command = scene.run_command(FAST, "echo text >f");
    command.env("SURGETANK_CRASH", "make.written_down:1").env("SURGETANK_HOLD", "shim.asked:500");
    let mut running = crate::scene::Running::of(command);
    let mut looks = 0;
    while !running.has_ended() {
        let length = fs::metadata(scene.path("f")).map_or(5, |found| found.len());
        assert_eq!(length, 5, "the file is in the store before it is written");
        looks += 1;
        std::thread::sleep(Duration::from_millis(1));
    }
    running.ends().exits(0);
    // (Few looks, if the shim used the mount because the agent did not serve the shim yet.)
    assert!(looks > 0);
    assert!(scene.log().contains("another one takes over"), "{}", scene.log());
    scene.holds("f", b"text\n");
}

/// The supervisor does not start agents indefinitely when they cannot serve. Programs get ENOTCONN as without a
/// supervisor, and the run reports it.
#[test]
fn supervisor_gives_up_after_repeated_deaths() {
    let Some(mut scene) = Scene::new("handoff-gives-up") else { return };
    scene.tier("ram", 64);
    let script = "echo sealed >f; sleep 1; ls >/dev/null 2>&1 && exit 9; ls 2>&1 | grep -q 'not connected' && exit 7";
    let mut command = scene.run_command(&[FAST, &["--no-preload"]].concat(), script);
    command.env("SURGETANK_CRASH", "seal.written_down:1,recover.loaded:1,recover.loaded:1,recover.loaded:1");
    crate::scene::Running::of(command).ends().exits(3).says(&["died"]);
    scene.holds("f", b"sealed\n");
}

/// The verbs find the new agent.
#[test]
fn verbs_reach_the_next_agent() {
    let Some(mut scene) = Scene::new("handoff-verbs") else { return };
    scene.tier("ram", 64);
    let aside = scene.beside("aside");
    let script = "echo x >f; touch /mnt/aside/ready; until [ -e /mnt/aside/go ]; do sleep 0.01; done";
    let running = scene.start(FAST, script);
    eventually("the program runs", || aside.join("ready").exists());
    let killed = scene.replace_agent();
    let status = scene.verb("status", &["--json"]).exits(0).stdout;
    assert!(!status.contains(&format!("\"pid\":{killed},")), "{status}");
    scene.verb("wait", &[scene.over.to_str().unwrap()]).exits(0);
    scene.run(&["-v"], "cat f").exits(0).prints("x\n").says(&["joined"]);
    fs::write(aside.join("go"), "").unwrap();
    running.ends().exits(0);
    scene.await_no_agent();
}

/// `wait` and `umount` continue to wait with the next agent.
#[test]
fn waiting_verbs_continue_with_the_next_agent() {
    let Some(mut scene) = Scene::new("handoff-waits") else { return };
    scene.tier("ram", 64);
    let over = scene.over.to_str().unwrap().to_owned();
    let slowly = ["--quiet-period", "0s", "--drain-bytes-per-second-max", "2M"];
    scene.verb("mount", &[&["--tier", "ram=/mnt/tier-ram:64M"][..], &slowly, &[&over]].concat()).exits(0);
    for (turn, (verb, name)) in [("wait", "f"), ("umount", "g")].into_iter().enumerate() {
        fs::write(scene.path(name), vec![b'x'; 3 << 20]).unwrap();
        let mut command = scene.surgetank(&[verb, "--state", scene.state.to_str().unwrap(), &over]);
        command.current_dir("/");
        let mut waiting = crate::scene::Running::of(command);
        eventually("the verb waits", || scene.log().matches("a client waits").count() > turn || waiting.has_ended());
        assert!(!waiting.has_ended());
        scene.replace_agent();
        waiting.ends().exits(0);
    }
    scene.await_no_agent();
    assert_eq!(scene.store_files().into_values().collect::<Vec<_>>(), [3 << 20, 3 << 20]);
}

/// A mount for all users survives too, and `umount` removes it.
#[test]
fn global_mount_survives_the_agent() {
    let Some(mut scene) = Scene::new("handoff-global") else { return };
    scene.tier("ram", 64);
    let over = scene.over.to_str().unwrap().to_owned();
    let tier = format!("ram={}:64M", "/mnt/tier-ram");
    scene.verb("mount", &["--tier", &tier, &over]).exits(0);
    let mut file = fs::File::create(scene.path("f")).unwrap();
    use std::io::Write;
    file.write_all(b"before\n").unwrap();
    scene.replace_agent();
    file.write_all(b"after\n").unwrap();
    drop(file);
    scene.holds("f", b"before\nafter\n");
    scene.replace_agent();
    scene.await_served();
    let mut umount = scene.surgetank(&["umount", "--state", scene.state.to_str().unwrap(), &over]);
    crate::scene::Running::of({
        umount.current_dir("/");
        umount
    })
    .ends()
    .exits(0);
    scene.await_no_agent();
    scene.holds("f", b"before\nafter\n");
}

/// The kernel serves a direct file, so the program continues even while no agent runs.
#[test]
fn program_with_a_direct_file_notices_no_agent_death() {
    let Some(mut scene) = Scene::new("handoff-never-notices") else { return };
    // With less room the file would be mediated.
    scene.tier("ram", 4096);
    let aside = scene.beside("aside");
    let script = r#"
        cat >/mnt/direct.py <<'END'
import os
file = os.open("f", os.O_RDWR | os.O_CREAT)
rounds = 0
while not os.path.exists("/mnt/aside/go"):
    rounds += 1
    assert os.pwrite(file, b"%9d" % rounds, 0) == 9 and os.pread(file, 9, 0) == b"%9d" % rounds
    with open("/mnt/aside/rounds.new", "w") as note: note.write(str(rounds))
    os.rename("/mnt/aside/rounds.new", "/mnt/aside/rounds")
os.close(file)
END
        python3 /mnt/direct.py
    "#;
    let running = scene.start(&[FAST, &["--no-preload"]].concat(), script);
    let rounds =
        || fs::read_to_string(aside.join("rounds")).ok().and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
    eventually("the program runs", || rounds() > 0);
    let (agent, supervisor) = (scene.agent().unwrap(), scene.supervisor().unwrap());
    // SAFETY: both processes were started by this test.
    unsafe {
        libc::kill(supervisor as i32, libc::SIGSTOP);
        libc::kill(agent as i32, libc::SIGKILL);
    }
    eventually("no agent serves", || scene.agent().is_none());
    let before = rounds();
    eventually("the program continues", || rounds() > before + 20);
    // SAFETY: as above.
    unsafe { libc::kill(supervisor as i32, libc::SIGCONT) };
    fs::write(aside.join("go"), "").unwrap();
    running.ends().exits(0);
    scene.holds("f", format!("{:9}", rounds()).as_bytes());
}

/// The next agent answers an open that waits when the agent is killed.
#[test]
fn open_waiting_at_an_agent_kill_is_answered() {
    let Some(mut scene) = Scene::new("handoff-waits-in-open") else { return };
    scene.tier("ram", 64);
    let mut command = scene.run_command(&[FAST, &["--no-preload"]].concat(), "echo x >f; cat f");
    // Longer than any command of a test may take.
    command.env("SURGETANK_HOLD", "tier.created:3600000");
    let running = crate::scene::Running::of(command);
    eventually("the file is being made", || !scene.tier_files().is_empty());
    // (The next agent has only this to do, and ends soon. A test that only looks for it may come too late.)
    scene.kill_one_agent();
    running.ends().exits(0).prints("x\n");
    scene.holds("f", b"x\n");
}

/// The next agent keeps the inode numbers that the kernel has for files and directories that are only in the store.
#[test]
fn files_only_in_the_store_keep_their_inode_numbers() {
    let Some(mut scene) = Scene::new("handoff-mirrors") else { return };
    scene.tier("ram", 64);
    fs::create_dir_all(scene.path("a/b/empty")).unwrap();
    for number in 0..300 {
        fs::write(scene.path(&format!("a/b/{number:03}")), format!("{number}")).unwrap();
    }
    let aside = scene.beside("aside");
    let script = r#"
        cat >/mnt/mirrors.py <<'END'
import os
before = {name: os.stat("a/b/" + name).st_ino for name in os.listdir("a/b")}
os.chdir("a/b")
listing = os.scandir(".")
first = [next(listing).name for _ in range(5)]
open("/mnt/aside/ready", "w").close()
while not os.path.exists("/mnt/aside/go"): pass
names = first + [entry.name for entry in listing]
assert sorted(names) == sorted(before), set(names) ^ set(before)
assert {name: os.stat(name).st_ino for name in before} == before
assert os.getcwd() == "/mnt/project/a/b"
os.rmdir("empty"); os.rename("000", "../moved"); os.rename("001", "002"); os.unlink("003")
assert open("../moved").read() == "0" and open("002").read() == "1"
os.rename("../b", "../c")
assert os.getcwd() == "/mnt/project/a/c"
END
        python3 /mnt/mirrors.py
    "#;
    let running = scene.start(&[FAST, &["--no-preload"]].concat(), script);
    eventually("the program runs", || aside.join("ready").exists());
    scene.replace_agent();
    scene.await_served();
    scene.replace_agent();
    fs::write(aside.join("go"), "").unwrap();
    running.ends().exits(0);
    scene.holds("a/c/002", b"1");
    assert!(!scene.path("a/c/empty").exists() && !scene.path("a/c/003").exists() && scene.path("a/moved").exists());
}

/// Regression: an agent died between its greeting and its check of the namespaces. The run that had just joined it
/// then failed.
#[test]
fn run_that_joins_a_dying_agent_is_admitted_by_the_next() {
    let Some(mut scene) = Scene::new("handoff-joined") else { return };
    scene.tier("ram", 64);
    let mut command = scene.run_command(FAST, "echo here >file");
    command.env("SURGETANK_HOLD", "run.joined:1500");
    let running = crate::scene::Running::of(command);
    // (An agent that is killed before a run joins has no successor.)
    eventually("the run joins", || scene.log().contains("joined run=1"));
    scene.await_served();
    scene.replace_agent();
    running.ends().exits(0);
    scene.holds("file", b"here\n");
}

/// The agent is killed after the drain removes the file in the store, and before it records the removal. Regression:
/// the next agent forgot the files that programs had open.
#[test]
fn open_deleted_file_survives_a_kill_after_its_removal() {
    let Some(mut scene) = Scene::new("handoff-deleted") else { return };
    scene.tier("ram", 64);
    let aside = scene.beside("aside");
    for deletion in ["rm ../new", "rm ../old", "rmdir ../dir"] {
        fs::write(scene.path("old"), "text\n").unwrap();
        let script = format!(
            "mkdir dir; echo text >new; sleep 1; cd dir; exec 3<../new 4<../old; {deletion}
             until [ -e /mnt/aside/go ]; do sleep 0.01; done
             cat <&3; cat <&4; stat -L -c %s /dev/fd/3 /dev/fd/4; stat -c %F ."
        );
        let mut command = scene.run_command(&[FAST, &["--no-preload", "-v"]].concat(), &script);
        // The third operation is the deletion, after the directory and the new file.
        command.env("SURGETANK_DIRECT", "false").env("SURGETANK_CRASH", "drain.executed:3");
        let running = crate::scene::Running::of(command);
        eventually("another agent takes over", || scene.log().contains("another one takes over"));
        scene.await_served();
        fs::write(aside.join("go"), "").unwrap();
        running.ends().exits(0).prints("text\ntext\n5\n5\ndirectory\n").says(&["was replaced"]);
        scene.await_no_agent();
        scene.is_clean();
        fs::remove_file(aside.join("go")).unwrap();
        succeed(Command::new("rm").args(["-rf", "new", "dir"]).current_dir(&scene.over));
        fs::remove_dir_all(&scene.state).unwrap();
    }
}

/// No record says which file then has the name. Programs that have the old file open through the agent get ESTALE,
/// and direct descriptors continue.
#[test]
fn file_replaced_while_no_agent_serves_is_stale() {
    for (direct, expected) in [("false", "ESTALE ESTALE\n"), ("true", "of the old old\n")] {
        std::thread::spawn(move || {
            let Some(mut scene) = Scene::new(&format!("handoff-replaced-{direct}")) else { return };
            scene.tier("ram", 64);
            // Files of some stores cannot be read directly, for example on overlay.
            scene.tmpfs("project", 64);
            let aside = scene.beside("aside");
            for name in ["replaced", "removed"] {
                fs::write(scene.path(name), "of the old").unwrap();
            }
            let script = r"
                cat >/mnt/stale.py <<'END'
import errno, os, time
files = [os.open(name, os.O_RDONLY) for name in ('replaced', 'removed')]
open('/mnt/aside/ready', 'w').close()
while not os.path.exists('/mnt/aside/go'): time.sleep(0.01)
def read(file, at):
    try: return os.pread(file, 10, at).decode()
    except OSError as why: return errno.errorcode[why.errno]
print(read(files[0], 0), read(files[1], 7))
END
                exec /usr/bin/python3 /mnt/stale.py";
            let running = scene.start(&[FAST, &["--no-preload", "--direct", direct]].concat(), script);
            eventually("the program runs", || aside.join("ready").exists());
            let (agent, supervisor) = (scene.agent().unwrap(), scene.supervisor().unwrap());
            // SAFETY: both processes were started by this test.
            unsafe {
                libc::kill(supervisor as i32, libc::SIGSTOP);
                libc::kill(agent as i32, libc::SIGKILL);
            }
            eventually("no agent serves", || scene.agent().is_none());
            fs::write(scene.path("new"), "of the new").unwrap();
            fs::rename(scene.path("new"), scene.path("replaced")).unwrap();
            fs::remove_file(scene.path("removed")).unwrap();
            // SAFETY: as above.
            unsafe { libc::kill(supervisor as i32, libc::SIGCONT) };
            eventually("another agent takes over", || scene.agent().is_some_and(|pid| pid != agent));
            scene.await_served();
            fs::write(aside.join("go"), "").unwrap();
            running.ends().prints(expected);
            scene.holds("replaced", b"of the new");
        })
        .join()
        .unwrap();
    }
}
