//! Each test is named after a fault that was fixed.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::fs;
use std::os::unix::fs::FileTypeExt;

use crate::scene::{Running, Scene, eventually};

fn prepare(name: &str) -> Option<Scene> {
    let mut scene = Scene::new(name)?;
    scene.tier("fast", 32);
    Some(scene)
}

const ADVICE: [&str; 3] = ["killed", "surgetank run --state /mnt/state", "--over /mnt/project -- true"];

impl Scene {
    /// `surgetank mount` over the directory.
    #[track_caller]
    fn mounted(&self, options: &[&str]) {
        self.mount_again(options).exits(0);
    }

    #[track_caller]
    fn mount_again(&self, options: &[&str]) -> crate::scene::Ended {
        let over = self.over.to_str().unwrap();
        let mut words = vec!["--tier", "fast=/mnt/tier-fast:32M"];
        words.extend(options);
        words.push(over);
        let mut all = vec!["mount", "--state", self.state.to_str().unwrap()];
        all.extend(words);
        let mut command = self.surgetank(&all);
        command.current_dir("/");
        Running::of(command).ends()
    }

    #[track_caller]
    fn asked_at_root(&self, verb: &str, words: &[&str]) -> crate::scene::Ended {
        let mut all = vec![verb, "--state", self.state.to_str().unwrap()];
        all.extend(words);
        let mut command = self.surgetank(&all);
        command.current_dir("/");
        Running::of(command).ends()
    }

    fn is_dead(&self) -> bool {
        fs::metadata(&self.over).is_err_and(|error| error.raw_os_error() == Some(libc::ENOTCONN))
    }
}

/// Without a rule the agent prefetches nothing. With a rule it prefetches the files that match, and they can be
/// evicted again. Regression: such rules had no effect.
#[test]
fn prefetch_rule_fetches_matching_files_only() {
    let Some(scene) = prepare("prefetch_rules") else {
        return;
    };
    fs::create_dir_all(scene.path("in/deep")).unwrap();
    fs::create_dir_all(scene.path("other")).unwrap();
    for name in ["in/a.bin", "in/deep/b.bin", "in/c.txt", "other/d.bin"] {
        fs::write(scene.path(name), crate::scene::noise(1, 100_000)).unwrap();
    }
    fs::write(scene.path("surgetank.toml"), "[[rules]]\nmatch = \"in/**/*.bin\"\nprefetch = true\n").unwrap();
    let tier = "getfattr --absolute-names -n user.surgetank.tier --only-values";
    scene
        .run(
            &[],
            &format!(
                "for f in in/a.bin in/deep/b.bin; do
                   for n in $(seq 600); do [ \"$({tier} $f)\" = fast ] && break; sleep 0.05; done
                   echo $f $({tier} $f)
                 done
                 for f in in/c.txt other/d.bin; do echo $f $({tier} $f); done
                 cat in/a.bin | cmp - other/d.bin
                 surgetank() {{ /mnt/surgetank \"$@\"; }}
                 surgetank evict --state /mnt/state in/a.bin >/dev/null
                 echo evicted $({tier} in/a.bin)"
            ),
        )
        .exits(0)
        .prints("in/a.bin fast\nin/deep/b.bin fast\nin/c.txt store\nother/d.bin store\nevicted store\n");
    assert_eq!(scene.tier_files(), Vec::<std::path::PathBuf>::new());
    scene.is_clean();
}

#[test]
fn sea_prefetch_list_fetches_matching_files() {
    let Some(scene) = prepare("prefetch_sea") else {
        return;
    };
    fs::create_dir(scene.path("in")).unwrap();
    fs::write(scene.path("in/a.nii"), "a").unwrap();
    fs::write(scene.path("in/a.txt"), "a").unwrap();
    fs::write(scene.path(".sea_prefetchlist"), "in/.*\\.nii\n").unwrap();
    let tier = "getfattr -n user.surgetank.tier --only-values";
    scene
        .run(
            &[],
            &format!(
                "for n in $(seq 600); do [ \"$({tier} in/a.nii)\" = fast ] && break; sleep 0.05; done
                 echo $({tier} in/a.nii) $({tier} in/a.txt)"
            ),
        )
        .exits(0)
        .prints("fast store\n");
}

/// An unfinished prefetch delays neither the command nor the end of the run.
#[test]
fn prefetching_ends_with_the_agent() {
    let Some(scene) = prepare("prefetch_ends") else {
        return;
    };
    fs::create_dir(scene.path("in")).unwrap();
    for n in 0..2000 {
        fs::write(scene.path(&format!("in/{n}")), "x").unwrap();
    }
    fs::write(scene.path("surgetank.toml"), "[[rules]]\nmatch = \"in/\"\nprefetch = true\n").unwrap();
    scene.run(&[], "echo mine >in/7; echo new >out").exits(0);
    scene.holds("in/7", b"mine\n");
    scene.holds("out", b"new\n");
    assert_eq!(scene.tier_files(), Vec::<std::path::PathBuf>::new());
    scene.is_clean();
}

/// Programs fill a tier of 32 MiB three times, and pinned files stay. Regression: pin rules had no effect.
#[test]
fn pinned_files_stay_on_a_full_tier() {
    let Some(scene) = prepare("pin_rules") else {
        return;
    };
    fs::write(scene.path("surgetank.toml"), "[[rules]]\nmatch = \"model*\"\npin = true\n").unwrap();
    let tier = "getfattr -n user.surgetank.tier --only-values";
    let state = "getfattr -n user.surgetank.state --only-values";
    scene
        .run(
            &[],
            &format!(
                "head -c 1000000 /dev/urandom >model
                 head -c 1000000 /dev/urandom >plain
                 for n in $(seq 24); do
                   head -c 4000000 /dev/urandom >big-$n
                   for m in $(seq 600); do
                     case $({state} big-$n) in durable|evicted) break;; esac; sleep 0.05
                   done
                 done
                 /mnt/surgetank evict --state /mnt/state model plain >/dev/null
                 echo $({tier} model) $({tier} plain)"
            ),
        )
        .exits(0)
        .prints("fast store\n");
    // The pin ends with the agent.
    assert_eq!(scene.tier_files(), Vec::<std::path::PathBuf>::new());
    scene.is_clean();
}

#[test]
fn keep_rule_stores_links_and_fifos() {
    let Some(scene) = prepare("keep_links") else {
        return;
    };
    scene
        .run(&["--rule", "k/=keep"], "mkdir k; ln -s nowhere k/link; mkfifo k/fifo; echo data >k/file")
        .exits(0)
        .says(&["NOT in the store", "k/file"]);
    assert_eq!(fs::read_link(scene.path("k/link")).unwrap(), std::path::Path::new("nowhere"));
    assert!(fs::metadata(scene.path("k/fifo")).unwrap().file_type().is_fifo());
    assert!(!scene.path("k/file").exists());
    // No file is lost, and no file is stored twice.
    scene.run(&["--rule", "k/=keep"], "readlink k/link; [ -p k/fifo ]; cat k/file").exits(0).prints("nowhere\ndata\n");
}

/// Regression: with a remove rule the store never got the new content of a file that it had.
#[test]
fn remove_rule_updates_a_file_that_the_store_has() {
    let Some(scene) = prepare("remove_rewritten") else {
        return;
    };
    for name in ["a.dat", "b.dat", "c.dat", "removed.dat"] {
        fs::write(scene.path(name), "old").unwrap();
    }
    scene
        .run(
            &["--rule", "*.dat=remove"],
            "echo new >a.dat
             echo more >>b.dat
             echo replaced >c.new; mv c.new c.dat
             echo scratch >d.dat
             rm removed.dat; echo again >removed.dat
             /mnt/surgetank why --state /mnt/state a.dat | grep -c 'not a temporary'",
        )
        .exits(0)
        .prints("1\n");
    scene.holds("a.dat", b"new\n");
    scene.holds("b.dat", b"oldmore\n");
    scene.holds("c.dat", b"replaced\n");
    assert!(!scene.path("d.dat").exists() && !scene.path("removed.dat").exists());
    assert_eq!(scene.tier_files(), Vec::<std::path::PathBuf>::new());
    scene.is_clean();
    // The catalog is empty: the next run takes up no file.
    scene.run(&[], "true").exits(0);
    assert!(!scene.log().contains("took up"), "{}", scene.log());
}

/// Regression: `wait` reported files of a killed agent of a global mount as durable, and no agent could take them up.
#[test]
fn wait_over_a_dead_mount_reports_undrained_files() {
    let Some(scene) = prepare("dead_mount") else {
        return;
    };
    let over = scene.over.to_str().unwrap();
    scene.mounted(&["--quiet-period", "1h"]);
    fs::create_dir(scene.path("sub")).unwrap();
    fs::write(scene.path("sub/file"), "undrained").unwrap();
    scene.kill_agent();
    eventually("the mount is dead", || scene.is_dead());
    scene.asked_at_root("wait", &[over]).exits(3).says(&ADVICE);
    scene.asked_at_root("wait", &[scene.path("sub/file").to_str().unwrap()]).exits(3);
    scene.asked_at_root("status", &[over]).exits(1).says(&["dead mount", "umount --state /mnt/state"]);
    // `mount` removes the dead mount, starts again, and finds the file.
    scene.mount_again(&[]).exits(0).says(&["dead mount is removed"]);
    assert_eq!(scene.read("sub/file"), b"undrained");
    scene.asked_at_root("wait", &[over]).exits(0);
    scene.asked_at_root("umount", &[over]).exits(0);
    scene.holds("sub/file", b"undrained");
    scene.is_clean();
}

#[test]
fn umount_removes_a_dead_mount() {
    let Some(scene) = prepare("dead_mount_umount") else {
        return;
    };
    let over = scene.over.to_str().unwrap();
    scene.mounted(&["--quiet-period", "1h"]);
    fs::write(scene.path("file"), "undrained").unwrap();
    scene.kill_agent();
    eventually("the mount is dead", || scene.is_dead());
    scene.asked_at_root("umount", &[over]).exits(3).says(&ADVICE);
    assert!(!scene.is_dead());
    scene.asked_at_root("wait", &[over]).exits(3);
    scene.drain_what_is_left().exits(0);
    scene.holds("file", b"undrained");
    scene.asked_at_root("wait", &[over]).exits(0);
}

/// A run started inside the dead mount continues in the directory underneath. Regression: it read no configuration.
#[test]
fn run_started_in_a_dead_mount_works() {
    let Some(scene) = prepare("dead_mount_run") else {
        return;
    };
    scene.mounted(&["--quiet-period", "1h"]);
    fs::write(scene.path("file"), "undrained").unwrap();
    // A shell that is inside all the time, like a user's shell.
    let script = "while [ ! -e /mnt/go ]; do sleep 0.05; done
        exec /mnt/surgetank run --state /mnt/state --tier fast=/mnt/tier-fast:32M -- sh -c 'cat file; echo new >new'";
    let mut command = std::process::Command::new("sh");
    command
        .args(["-c", script])
        .current_dir(&scene.over)
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped());
    // The marks by which a later run finds remaining processes of this one.
    for (name, value) in scene.surgetank(&[]).get_envs() {
        command.env(name, value.unwrap_or_default());
    }
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let shell = Running::of(command);
    scene.kill_agent();
    eventually("the mount is dead", || scene.is_dead());
    fs::write("/mnt/go", "").unwrap();
    shell.ends().exits(0).prints("undrained");
    scene.holds("file", b"undrained");
    scene.holds("new", b"new\n");
}

#[test]
fn status_and_wait_work_from_any_directory() {
    let Some(scene) = prepare("asking_anywhere") else {
        return;
    };
    let over = scene.over.to_str().unwrap();
    scene.asked_at_root("status", &[]).exits(0);
    scene.asked_at_root("wait", &[over]).exits(0);
    scene.mounted(&[]);
    for here in ["/", "/mnt"] {
        for (verb, words) in [("status", vec![]), ("status", vec![over]), ("wait", vec![over])] {
            let mut all = vec![verb, "--state", "/mnt/state"];
            all.extend(words);
            let mut command = scene.surgetank(&all);
            command.current_dir(here);
            Running::of(command).ends().exits(0);
        }
    }
    scene.asked_at_root("umount", &[over]).exits(0);
}

/// Writes `file` without draining it, and kills the agent.
#[track_caller]
fn write_and_kill(scene: &Scene) {
    let written = "/mnt/written";
    let running = scene
        .start(&["--quiet-period", "1h"], &format!("mkdir sub; echo undrained >sub/file; touch {written}; sleep 1000"));
    eventually("the file is written", || std::path::Path::new(written).exists());
    fs::remove_file(written).unwrap();
    scene.kill_agent();
    running.kill();
    drop(running);
    assert!(!scene.path("sub/file").exists(), "the file was drained: the test proves nothing");
}

/// Regression: the next agent searched under the new number, found no files, and the run reported success.
#[test]
fn files_survive_a_new_device_number_of_the_store() {
    let Some(scene) = prepare("renumbered") else {
        return;
    };
    scene.ext4("project", 64);
    let over = scene.over.to_str().unwrap();
    write_and_kill(&scene);
    scene.ext4_renumbered("project");
    assert!(!scene.path("sub/file").exists());
    scene.asked_at_root("wait", &[over]).exits(3).says(&["killed"]);
    scene.drain_what_is_left().exits(0);
    scene.holds("sub/file", b"undrained\n");
    scene.is_clean();
    assert_eq!(scene.tier_files(), Vec::<std::path::PathBuf>::new());
    scene.asked_at_root("wait", &[over]).exits(0);

    // The same after an orderly end: the agent finds a kept file, and drains a file that the store refused before.
    scene.run(&["--rule", "kept=keep"], "echo kept >kept").exits(0);
    scene.ext4_renumbered("project");
    scene.run(&["--rule", "kept=keep"], "cat kept").exits(0).prints("kept\n");
    let full = scene.path("ballast");
    let file = fs::File::create(&full).unwrap();
    let room = rustix::fs::statvfs(&scene.over).unwrap();
    let room = room.f_bavail * room.f_frsize - (1 << 20);
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, room).unwrap();
    drop(file);
    scene.run(&["--retry", "500ms", "--rule", "kept=keep"], "head -c 4M /dev/zero >late").exits(3).says(&["late"]);
    scene.ext4_renumbered("project");
    scene.asked_at_root("wait", &[over]).exits(3).says(&["late"]);
    fs::remove_file(full).unwrap();
    scene.drain_what_is_left().exits(0);
    scene.holds("late", &vec![0; 4 << 20]);
    scene.holds("kept", b"kept\n");
    scene.is_clean();
    assert_eq!(scene.tier_files(), Vec::<std::path::PathBuf>::new());
    let places = fs::read_dir(&scene.state).unwrap().flatten().filter(|entry| entry.path().is_dir());
    assert_eq!(places.count(), 1, "one directory, one place");
}

#[test]
fn leftovers_of_another_file_system_are_named() {
    let Some(scene) = prepare("other_file_system") else {
        return;
    };
    scene.ext4("project", 64);
    let over = scene.over.to_str().unwrap();
    write_and_kill(&scene);
    crate::scene::succeed(std::process::Command::new("umount").arg(over));
    let left = ["NOT taken up", "1 file(s)", "mount the file system", "/mnt/state/"];
    // The mount point itself is visible now: another directory.
    scene.run(&[], "test ! -e sub; echo other >other").exits(0).says(&left);
    scene.holds("other", b"other\n");
    scene.asked_at_root("wait", &[over]).exits(3).says(&left);
    scene.ext4_again("project");
    scene.drain_what_is_left().exits(0);
    scene.holds("sub/file", b"undrained\n");
    assert!(!scene.path("other").exists());
    scene.asked_at_root("wait", &[over]).exits(0);
    crate::scene::succeed(std::process::Command::new("umount").arg(over));
    let silent = scene.run(&[], "test -e other").exits(0);
    assert!(!silent.stderr.contains("NOT taken up"), "{}", silent.stderr);
}

impl Scene {
    /// Starts a process in a mount namespace of its own. It runs the script, marks that it is ready, and stays.
    #[track_caller]
    fn elsewhere(&self, script: &str) -> Running {
        let _ = fs::remove_file("/mnt/ready");
        let script = format!("set -e\n{script}\ntouch /mnt/ready\nexec sleep 1000");
        let mut command = self.command("unshare");
        command.args(["--mount", "bash", "-c", &script]).current_dir("/");
        let running = Running::of(command);
        eventually("the other mount namespace is ready", || std::path::Path::new("/mnt/ready").exists());
        running
    }
}

/// A process with another directory under the same path, as in a container, does not keep the directory busy. A
/// process with the directory itself does, under any path. Regression: `mount` refused for both.
#[test]
fn only_processes_in_the_directory_itself_refuse_a_mount() {
    let Some(scene) = prepare("other_namespace") else {
        return;
    };
    let over = scene.over.to_str().unwrap();
    fs::create_dir_all(scene.path("sub")).unwrap();
    fs::write(scene.path("sub/file"), "bare").unwrap();
    let another = scene.beside("another").display().to_string();
    fs::create_dir_all(format!("{another}/sub")).unwrap();
    fs::write(format!("{another}/sub/file"), "another").unwrap();
    let seen = scene.beside("seen").display().to_string();

    for hide in [
        format!("mount -t tmpfs none {over}; mkdir {over}/sub; touch {over}/sub/file"),
        format!("mount --bind {another} {over}"),
    ] {
        for hold in ["cd OVER/sub", "exec 7<OVER/sub/file", "exec 7<OVER"] {
            let other = scene.elsewhere(&format!("{hide}\n{}", hold.replace("OVER", over)));
            scene.mounted(&[]);
            fs::write(scene.path("out"), hold).unwrap();
            scene.asked_at_root("umount", &[over]).exits(0);
            scene.await_no_agent();
            scene.holds("out", hold.as_bytes());
            other.kill();
        }
    }
    for (show, at) in [
        (String::new(), over),
        (format!("mount --bind {over} {seen}"), &seen),
        (format!("mount --bind {over}/sub {seen}; mkdir -p /mnt/new"), &seen),
    ] {
        let sub = if show.contains("/sub") { at.to_owned() } else { format!("{at}/sub") };
        for hold in [format!("cd {sub}"), format!("exec 7<>{sub}/file"), format!("exec 7<{sub}")] {
            let holder = scene.elsewhere(&format!("{show}\n{hold}"));
            scene.mount_again(&[]).exits(1).says(&["is in use", &format!("pid {}", holder.pid())]);
            holder.kill();
        }
    }
    scene.mounted(&[]);
    scene.asked_at_root("umount", &[over]).exits(0);
}

/// Regression: `doctor`, and a start that failed, left directories in the tiers for an agent that never served.
#[test]
fn failed_start_and_doctor_leave_tiers_empty() {
    let Some(scene) = prepare("failed_start") else {
        return;
    };
    let shared_memory = || fs::read_dir("/dev/shm").unwrap().count();
    let tier = || fs::read_dir("/mnt/tier-fast").unwrap().count();
    for options in [vec![], vec!["--measure"], vec!["--measure", "--tier", "fast=/mnt/tier-fast:32M"]] {
        let ended = Running::of(scene.surgetank(&[&["doctor"][..], &options].concat())).ends().exits(0);
        assert!(ended.stdout.contains("surgetank run works here"), "{}", ended.stdout);
        assert_eq!((shared_memory(), tier()), (0, 0), "{options:?}");
    }
    assert_eq!(scene.store_files().len(), 0);

    scene.run(&["--rule", "kept=keep"], "echo kept >kept").exits(0);
    let (there, kept) = (scene.tier_files(), tier());
    crate::scene::mount(&["--bind", "/dev/null", "/dev/fuse"]);
    for _ in 0..2 {
        let start = Running::of(scene.surgetank(&["run", "--door", "fuse", "--state", "/mnt/state2", "--", "true"]));
        start.ends().exits(1).says(&["cannot be served", "mounting: "]);
        assert_eq!((shared_memory(), tier()), (0, kept));
        // Kept files stay there.
        scene.run(&["--door", "fuse"], "true").exits(1);
        assert_eq!(scene.tier_files(), there);
    }
    crate::scene::succeed(std::process::Command::new("umount").arg("/dev/fuse"));
    scene.run(&["--rule", "kept=keep"], "cat kept").exits(0).prints("kept\n");
}

/// Regression: the agent cached entries drained beside a kept file indefinitely, and showed them after another client
/// had deleted them.
#[test]
fn changes_between_runs_are_seen_beside_kept_files() {
    let Some(scene) = prepare("changed_between_runs") else {
        return;
    };
    let keep = ["--rule", "*.kept=keep"];
    scene
        .run(
            &keep,
            "mkdir -p d/full d/empty; echo kept >d/a.kept; ln -s nowhere d/symlink
             for n in 1 2 3 4; do echo out >d/out$n; done; ln d/out4 d/link; echo x >d/full/x",
        )
        .exits(0);
    fs::write(scene.path("d/out1"), "changed by another client\n").unwrap();
    fs::remove_file(scene.path("d/out2")).unwrap();
    fs::rename(scene.path("d/out3"), scene.path("d/moved")).unwrap();
    fs::write(scene.path("d/out4"), "changed through a link\n").unwrap();
    fs::remove_file(scene.path("d/symlink")).unwrap();
    fs::remove_dir(scene.path("d/empty")).unwrap();
    fs::remove_dir_all(scene.path("d/full")).unwrap();
    scene
        .run(
            &keep,
            "echo d/*; stat -c %s d/out1 d/out4; cat d/out1 d/a.kept d/moved d/link
             echo more >>d/out1; rm d/out4; echo new >d/out2; mkdir d/full; echo y >d/full/y",
        )
        .exits(0)
        .prints(
            "d/a.kept d/link d/moved d/out1 d/out4\n26\n23\nchanged by another client\nkept\nout\nchanged through a link\n",
        );
    scene.holds("d/out1", b"changed by another client\nmore\n");
    scene.holds("d/out2", b"new\n");
    scene.holds("d/link", b"changed through a link\n");
    scene.holds("d/full/y", b"y\n");
    assert_eq!(scene.store_files().len(), 5, "{:?}", scene.store_files());
    scene.run(&[], "true").exits(0);
    scene.holds("d/a.kept", b"kept\n");
    scene.is_clean();
    assert_eq!(scene.tier_files(), Vec::<std::path::PathBuf>::new());
}

/// Regression: a directory with a kept file was shown empty after another client had removed it in the store.
#[test]
fn removed_directory_with_kept_files_takes_new_files() {
    directory_with_something_kept("removed_directory", |_| {}, "");
}

#[test]
fn replaced_directory_with_kept_files_is_not_stale() {
    let replace = |scene: &Scene| {
        fs::create_dir_all(scene.path("d/e")).unwrap();
        fs::write(scene.path("d/e/theirs"), "theirs\n").unwrap();
    };
    directory_with_something_kept("replaced_directory", replace, " d/e/theirs");
}

fn directory_with_something_kept(name: &str, replace: impl Fn(&Scene), theirs: &str) {
    let Some(scene) = prepare(name) else {
        return;
    };
    let keep = ["--rule", "*.kept=keep"];
    fs::write(scene.path("old.kept"), "old\n").unwrap();
    scene
        .run(
            &keep,
            "mkdir -p -m 750 d/e d/bare; echo kept >d/e/a.kept; mv old.kept d; echo new >d/old.kept; echo out >d/out",
        )
        .exits(0);
    scene.holds("d/old.kept", b"old\n");
    fs::remove_dir_all(scene.path("d")).unwrap();
    replace(&scene);
    scene
        .run(
            &keep,
            "echo d/* d/e/*; cat d/old.kept d/e/a.kept
             echo b >d/e/b.kept; echo x >d/e/x; echo out2 >d/out; mkdir d/f; echo y >d/f/y; mv d/e g; mv g d/e",
        )
        .exits(0)
        .prints(&format!("d/e d/old.kept d/e/a.kept{theirs}\nnew\nkept\n"));
    for (name, content) in [("d/e/x", "x\n"), ("d/out", "out2\n"), ("d/f/y", "y\n")] {
        scene.holds(name, content.as_bytes());
    }
    assert_eq!(scene.store_files().len(), if theirs.is_empty() { 3 } else { 4 }, "{:?}", scene.store_files());

    // The directory exists again even if no program touches it.
    fs::remove_dir_all(scene.path("d")).unwrap();
    scene.run(&keep, "true").exits(0);
    assert!(scene.path("d/e").is_dir() && scene.store_files().is_empty());
    scene.drain_what_is_left().exits(0);
    for (name, content) in [("d/old.kept", "new\n"), ("d/e/a.kept", "kept\n"), ("d/e/b.kept", "b\n")] {
        scene.holds(name, content.as_bytes());
    }
    assert_eq!(scene.store_files().len(), 3);
    assert_eq!(scene.tier_files(), Vec::<std::path::PathBuf>::new());
    scene.is_clean();
}

/// The catalog's lock ends just after the agent's own. Regression: a run that began in between was refused.
#[test]
fn run_right_after_another_waits_for_the_catalog() {
    let Some(scene) = prepare("catalog_in_use") else {
        return;
    };
    scene.run(&[], "echo one >one").exits(0);
    scene.await_no_agent();
    let mut places = fs::read_dir(&scene.state).unwrap().flatten().map(|entry| entry.path().join("catalog/lock"));
    let lock = fs::File::open(places.find(|path| path.exists()).unwrap()).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let mut running = scene.start(&[], "echo two >two");
    eventually("the agent begins", || scene.agent().is_some());
    std::thread::sleep(std::time::Duration::from_millis(200));
    assert!(!running.has_ended(), "{}", running.so_far());
    drop(lock);
    running.ends().exits(0);
    scene.holds("two", b"two\n");
}

/// Regression: the agent refused the command line, and the run started one agent after another.
#[test]
fn very_long_command_line_starts_one_agent() {
    let Some(scene) = prepare("long_command") else {
        return;
    };
    let long = "y".repeat(100_000);
    let mut command =
        scene.surgetank(&["run", "--state", "/mnt/state", "--tier", "fast=/mnt/tier-fast:32M", "--", "true"]);
    command.args(std::iter::repeat_n(&long, 15));
    command.current_dir(&scene.over);
    Running::of(command).ends().exits(0);
}
