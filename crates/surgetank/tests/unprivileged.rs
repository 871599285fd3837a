//! An ordinary user without any privilege: a private mount, the user's own files, and the errors of a plain
//! directory.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

use crate::scene::{MIB, Running, Scene, TEAM, USER, eventually, noise};

fn prepare(name: &str) -> Option<Scene> {
    let mut scene = Scene::of_user(name)?;
    scene.tier("fast", 8).tier("slow", 16);
    scene.beside("beside");
    Some(scene)
}

#[test]
fn files_belong_to_the_user() {
    let Some(scene) = prepare("user_own") else {
        return;
    };
    scene
        .run(
            &[],
            "test $(id -u) = 1000
             umask 027
             mkdir dir
             echo text > dir/file
             ln dir/file dir/again
             ln -s file dir/symbolic
             echo '#!/bin/sh
exit 5' > dir/program
             chmod 750 dir/program
             test $(stat -c %u:%g:%a dir/file) = 1000:1000:640
             test $(stat -c %h dir/file) = 2
             e=0; dir/program || e=$?; test $e = 5",
        )
        .exits(0);
    for (name, mode) in [("dir", 0o750), ("dir/file", 0o640), ("dir/program", 0o750)] {
        let meta = fs::metadata(scene.path(name)).unwrap();
        assert_eq!((meta.uid(), meta.gid(), meta.mode() & 0o7777), (USER, USER, mode), "{name}");
    }
    assert_eq!(fs::metadata(scene.path("dir/again")).unwrap().nlink(), 2);
    assert_eq!(fs::read_link(scene.path("dir/symbolic")).unwrap().to_str(), Some("file"));
    scene.holds("dir/file", b"text\n");
    scene.is_clean();
}

#[test]
fn exit_codes_equal_those_of_the_command() {
    let Some(scene) = prepare("user_exit") else {
        return;
    };
    scene.run(&[], "echo x > made; exit 41").exits(41);
    scene.holds("made", b"x\n");
    scene.run(&[], "kill -TERM $$").exits(128 + 15);
    Running::of(scene.surgetank(&["run", "--state", "/mnt/state", "--", "/nowhere/to/be/found"])).ends().exits(127);
}

/// Calls that fail in a plain directory fail here too, with the same message; a plain run is the model.
#[test]
fn permission_errors_equal_the_native_ones() {
    let Some(scene) = prepare("user_permission") else {
        return;
    };
    let script = "cd $1
        try() { if (eval \"$1\") > /dev/null 2> $ERR; then echo \"yes: $1\"; else echo \"no: $1: $(sed 's/.*: //' $ERR)\"; fi; }
        try 'cat unreadable'; try 'echo x > unreadable'; try 'echo x >> unwritable'; try 'cat unwritable'
        try 'echo x > closed/new'; try 'rm closed/there'; try 'cat closed/there'; try 'mkdir closed/dir'
        try 'ls locked'; try 'cat locked/there'
        try 'cat roots'; try 'echo x >> roots'; try 'cat secret'; try 'chmod 777 roots'
        try 'mv closed/there here'; try 'rm sticky/roots'; try 'mv sticky/roots sticky/mine'; try 'echo x > sticky/new'
        try 'echo x > team/new'; try 'echo x >> team/theirs'; try 'rm team/old'; try 'mkdir team/dir'; try 'echo x > strange/new'
        try 'chmod 600 unreadable; cat unreadable'
        try 'touch -d 2020-01-01 roots'; try 'ln -s x closed/link'; try './unwritable'; try 'rmdir closed'";
    let make = |root: &std::path::Path| {
        let write = |name: &str, mode: u32, owner: u32| {
            let path = root.join(name);
            fs::write(&path, "text").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            chown(&path, Some(owner), Some(owner)).unwrap();
        };
        let directory = |name: &str, mode: u32, owner: u32| {
            let path = root.join(name);
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            chown(&path, Some(owner), Some(owner)).unwrap();
        };
        for name in ["closed", "locked", "sticky", "team", "strange"] {
            fs::create_dir(root.join(name)).unwrap();
        }
        write("unreadable", 0o000, USER);
        write("unwritable", 0o444, USER);
        write("roots", 0o644, 0);
        write("secret", 0o600, 0);
        write("closed/there", 0o644, USER);
        write("locked/there", 0o644, USER);
        write("sticky/roots", 0o644, 0);
        write("team/theirs", 0o664, 0);
        write("team/old", 0o664, 0);
        chown(root.join("team/theirs"), Some(0), Some(TEAM)).unwrap();
        directory("closed", 0o555, USER);
        directory("sticky", 0o1777, 0);
        directory("team", 0o755, 0);
        chown(root.join("team"), Some(0), Some(TEAM)).unwrap();
        fs::set_permissions(root.join("team"), fs::Permissions::from_mode(0o2775)).unwrap();
        directory("strange", 0o775, 0);
        directory("locked", 0o000, USER);
    };
    let plain = scene.beside("plain");
    make(&plain);
    make(&scene.over);
    let script_path = "/mnt/script";
    fs::write(script_path, script).unwrap();
    let native = {
        let mut shell = scene.command("bash");
        shell.args([script_path, "/mnt/plain"]).env("ERR", "/mnt/beside/err");
        Running::of(shell).ends()
    };
    let ours = scene.run(&[], &format!("set +eu; ERR=/mnt/beside/err; export ERR; bash {script_path} /mnt/project"));
    assert_eq!(native.stdout, ours.stdout, "{}", ours.stderr);
    ours.exits(0);
    // In a directory of the group new files belong to the group.
    for name in ["team/new", "team/dir"] {
        let meta = fs::metadata(scene.path(name)).unwrap();
        assert_eq!((meta.uid(), meta.gid()), (USER, TEAM), "{name}");
    }
    assert!(native.stdout.contains("no: cat unreadable: Permission denied"), "{}", native.stdout);
}

#[test]
fn file_larger_than_the_tiers_is_stored() {
    let Some(scene) = prepare("user_spill") else {
        return;
    };
    let bytes = noise(8, 40 * MIB);
    fs::write("/mnt/source", &bytes).unwrap();
    scene.run(&[], "cp /mnt/source large; cmp large /mnt/source").exits(0);
    scene.holds("large", &bytes);
    assert_eq!(fs::metadata(scene.path("large")).unwrap().uid(), USER);
    scene.is_clean();
}

/// The mount is the user's own: no process outside sees it, not even in the same directory.
#[test]
fn mount_is_invisible_to_other_processes() {
    let Some(scene) = prepare("user_private") else {
        return;
    };
    let running = scene.start(
        &[],
        "exec 3> held
         echo inside >&3
         touch /mnt/beside/written
         while ! test -e /mnt/beside/looked; do sleep 0.01; done
         test \"$(cat held)\" = inside",
    );
    eventually("the file is written", || std::path::Path::new("/mnt/beside/written").exists());
    assert!(!scene.path("held").exists(), "an open file is in the store");
    let mounts = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    assert!(!mounts.contains(" /mnt/project "), "{mounts}");
    fs::write("/mnt/beside/looked", "").unwrap();
    running.ends().exits(0);
    scene.holds("held", b"inside\n");
}

/// Regression: the drain made the directory in the store with its last mode, so that it took no more files.
#[test]
fn directory_that_becomes_read_only_gets_its_files() {
    let Some(scene) = prepare("user_read_only_directory") else {
        return;
    };
    // No file is drained before the end.
    let script = "for n in $(seq 20); do mkdir -p d$n/sub; echo $n >d$n/sub/x; chmod 555 d$n/sub d$n; done";
    scene.run(&["--quiet-period", "1h"], script).exits(0);
    for n in 1..=20 {
        scene.holds(&format!("d{n}/sub/x"), format!("{n}\n").as_bytes());
        let mode =
            std::os::unix::fs::PermissionsExt::mode(&fs::metadata(scene.path(&format!("d{n}"))).unwrap().permissions());
        assert_eq!(mode & 0o7777, 0o555, "d{n}");
    }
    scene.is_clean();
}

#[test]
fn doctor_knows_the_unprivileged_door() {
    let Some(scene) = prepare("user_doctor") else {
        return;
    };
    let ended = Running::of(scene.surgetank(&["doctor"])).ends();
    assert_eq!(ended.status.code(), Some(0), "{}\n{}", ended.stdout, ended.stderr);
    for word in ["user name spaces", "a private mount", "surgetank run works here"] {
        assert!(ended.stdout.contains(word), "{word}: {}", ended.stdout);
    }
}

/// Regression: the kernel did not yet know the directory's owner, and refused. A shell's first look-ups had hidden
/// that.
#[test]
fn command_may_begin_with_making_a_file() {
    let Some(scene) = prepare("user_first_act") else { return };
    for options in [&["--no-preload"][..], &[]] {
        let tier = format!("fast={}:16M", scene.beside("first").display());
        let words = ["run", "--over", "/mnt/project", "--state", "/mnt/state", "--tier", &tier, "--no-progress"];
        let command = scene.surgetank(&[&words[..], options, &["--", "mkdir", "made"]].concat());
        Running::of(command).ends().exits(0);
        scene.await_no_agent();
        fs::remove_dir(scene.path("made")).unwrap();
    }
}

const DOORS: [&[&str]; 3] = [&[], &["--no-preload"], &["--door", "seccomp", "--no-preload"]];

/// Regression: a mode for a directory of the store waited in the queue, and the agent asked the store for permissions.
/// `chmod -R u+w` followed by `rm -rf` was refused.
#[test]
fn mode_change_in_the_queue_applies_at_once() {
    let Some(scene) = prepare("user_opened") else { return };
    for door in DOORS {
        let place = scene.path("closed/deep");
        fs::create_dir_all(&place).unwrap();
        fs::write(place.join("file"), "old").unwrap();
        fs::create_dir(scene.path("blind")).unwrap();
        for (path, mode) in [("closed/deep/file", 0o400), ("closed/deep", 0), ("closed", 0o500), ("blind", 0)] {
            chown(scene.path(path), Some(USER), Some(USER)).unwrap();
            fs::set_permissions(scene.path(path), fs::Permissions::from_mode(mode)).unwrap();
        }
        let script = r#"exec /usr/bin/python3 - <<'P'
import os
os.chmod('blind', 0o700)
print(os.listdir('blind'), os.path.exists('blind/x'))
os.chmod('blind', 0)
os.chmod('blind', 0o700)
os.chdir('blind')
os.chdir('..')
open('blind/x', 'w').write('x')
os.chmod('blind', 0o500)
os.chmod('closed', 0o700)
os.chmod('closed/deep', 0o700)
print(open('closed/deep/file').read())
os.unlink('closed/deep/file')
os.rmdir('closed/deep')
os.rmdir('closed')
P"#;
        scene.run(door, script).exits(0).prints("[] False\nold\n");
        assert!(!scene.path("closed").exists());
        scene.holds("blind/x", b"x");
        assert_eq!(fs::metadata(scene.path("blind")).unwrap().mode() & 0o7777, 0o500);
        scene.is_clean();
        fs::remove_dir_all(scene.path("blind")).unwrap();
        let script = "mkdir late; exec 3>late/f; chmod 555 late; echo late >&3";
        scene.run(door, script).exits(0);
        scene.holds("late/f", b"late\n");
        scene.run(door, "chmod 755 late; echo more >>late/f; chmod 500 late").exits(0);
        scene.holds("late/f", b"late\nmore\n");
        assert_eq!(fs::metadata(scene.path("late")).unwrap().mode() & 0o7777, 0o500);
        fs::remove_dir_all(scene.path("late")).unwrap();
    }
}

/// Regression: the directory admits no new version, and the drain noticed that late. The run ended with exit 3, and
/// the new content was only on the tier.
#[test]
fn file_in_a_read_only_directory_is_drained() {
    let Some(scene) = prepare("user_closed") else { return };
    for door in DOORS {
        fs::create_dir(scene.path("closed")).unwrap();
        for name in ["new", "longer", "read"] {
            let path = scene.path("closed").join(name);
            fs::write(&path, "old").unwrap();
            chown(&path, Some(USER), Some(USER)).unwrap();
        }
        let script = "exec 3<closed/read; echo new >closed/new; echo er >>closed/longer; cat closed/new closed/longer
            python3 -c 'f = open(\"closed/read\", \"r+\"); f.write(\"n\"); f.close()'; cat <&3";
        scene.run(door, script).exits(0).prints("new\nolder\nnld");
        scene.holds("closed/new", b"new\n");
        scene.holds("closed/longer", b"older\n");
        scene.holds("closed/read", b"nld");
        scene.is_clean();
        fs::remove_dir_all(scene.path("closed")).unwrap();
    }
}

/// A directory of the team that another user owns. The drain never sets its attributes: only the owner may set them,
/// and may change them meanwhile.
#[test]
fn directory_of_another_user_keeps_its_attributes() {
    let Some(scene) = prepare("user_teams_directory") else {
        return;
    };
    let dir = scene.path("teams");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("file"), "old\n").unwrap();
    chown(&dir, Some(0), Some(TEAM)).unwrap();
    chown(dir.join("file"), Some(USER), Some(TEAM)).unwrap();
    // Times of content and attributes differ.
    std::process::Command::new("touch").args(["-d", "2011-11-11"]).arg(&dir).status().unwrap();
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o2775)).unwrap();
    let script = "cat teams/file; sleep 0.2; echo new >>teams/file; echo more >teams/made; touch teams/made";
    scene.run(&[], script).exits(0);
    scene.holds("teams/file", b"old\nnew\n");
    scene.holds("teams/made", b"more\n");
    let meta = fs::metadata(&dir).unwrap();
    assert_eq!((meta.uid(), meta.gid(), meta.mode() & 0o7777), (0, TEAM, 0o2775));
    scene.is_clean();
}

/// Regression: the plain file has no set-user-id and set-group-id bits, so a write through its descriptor cleared
/// none. The bits stayed, and reached the store.
#[test]
fn write_to_an_own_file_clears_set_ids() {
    let Some(scene) = prepare("user_set_ids") else { return };
    let program = r#"
import os
def mode(name): print(name, oct(os.stat(name).st_mode & 0o7777))
made = os.open('made', os.O_RDWR | os.O_CREAT, 0o6755); mode('made')
os.write(made, b'written'); mode('made'); os.close(made); mode('made')
late = os.open('late', os.O_RDWR | os.O_CREAT, 0o755); os.write(late, b'before')
os.fchmod(late, 0o6755); mode('late')
os.write(late, b'behind'); mode('late'); os.close(late); mode('late')
again = os.open('again', os.O_WRONLY | os.O_CREAT, 0o755); os.write(again, b'text'); os.close(again)
os.chmod('again', 0o4755); mode('again')
again = os.open('again', os.O_WRONLY | os.O_APPEND); os.write(again, b'more'); mode('again'); os.close(again); mode('again')
kept = os.open('kept', os.O_WRONLY | os.O_CREAT, 0o755); os.write(kept, b'text')
os.fchmod(kept, 0o4755); os.close(kept); mode('kept')
os.chown('kept', -1, -1); mode('kept')
os.chmod('kept', 0o4755); mode('kept')
"#;
    fs::write("/mnt/set_ids.py", program).unwrap();
    let plain = scene.command("bash").args(["-c", "python3 /mnt/set_ids.py"]).output().unwrap();
    assert!(plain.status.success(), "{plain:?}");
    let names = ["made", "late", "again", "kept"];
    let modes = || names.map(|name| fs::metadata(scene.path(name)).unwrap().mode() & 0o7777);
    let (plain, left) = (String::from_utf8(plain.stdout).unwrap(), modes());
    assert!(plain.ends_with("kept 0o4755\n") && left == [0o755, 0o755, 0o755, 0o4755], "{plain} {left:?}");
    for door in DOORS {
        names.iter().for_each(|name| fs::remove_file(scene.path(name)).unwrap());
        scene.run(door, "python3 /mnt/set_ids.py").exits(0).prints(&plain);
        assert_eq!(modes(), left, "{door:?}");
    }
    scene.is_clean();
}
