//! Programs that cannot take the preload shim, or not from where root keeps its files: other users' tasks, another C library,
//! sanitizers. They go by the mount, and what they start gets the shim again where it can take it.
#![allow(clippy::unwrap_used, reason = "in a test that is how it fails")]

mod scene;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use scene::{Scene, eventually};

fn scene(name: &str) -> Option<Scene> {
    let mut scene = Scene::new(name)?;
    scene.tier("fast", 64);
    Some(scene)
}

/// A home that only root can enter, and a directory of the machine's that is the test's own.
fn private_home() {
    fs::create_dir("/mnt/home").unwrap();
    fs::set_permissions("/mnt/home", fs::Permissions::from_mode(0o700)).unwrap();
    scene::mount(&["-t", "tmpfs", "-o", "mode=0755", "tmpfs", "/var/cache"]);
}

/// The library lay below root's home: the loader said at each exec of another user's that it cannot be preloaded.
#[test]
fn task_of_another_user_loads_the_shim_without_complaint() {
    let Some(scene) = scene("foreign_users") else { return };
    private_home();
    let script = |name: &str, waits: &str| {
        format!(
            "echo of root >{name}; chmod 755 .
            setpriv --reuid 1000 --regid 1000 --clear-groups bash -c 'cat {name}; /bin/true; grep -c libsurgetank /proc/self/maps'
            touch /mnt/{name}-ready; {waits}
            setpriv --reuid 1000 --regid 1000 --clear-groups /bin/cat {name}"
        )
    };
    let start = |name: &str, waits: &str| {
        let mut command = scene.run_command(&[], &script(name, waits));
        command.env("HOME", "/mnt/home");
        scene::Running::of(command)
    };
    // The first run ends while the second one still starts programs.
    let second = start("second", "while [ ! -e /mnt/go ]; do sleep 0.05; done");
    eventually("the second run is on its way", || Path::new("/mnt/second-ready").exists());
    let first = start("first", "").ends().exits(0);
    let in_use = fs::read_dir("/var/cache/surgetank").unwrap().count();
    fs::write("/mnt/go", "").unwrap();
    for ended in [first, second.ends().exits(0)] {
        let lines: Vec<_> = ended.stdout.lines().collect();
        assert!(lines.len() == 3 && lines[0] == "of root" && lines[1] != "0" && lines[2] == "of root", "{lines:?}");
        assert!(!ended.stderr.contains("preloaded"), "{}", ended.stderr);
    }
    assert_eq!(in_use, 1, "of the run that was still there");
    assert!(!Path::new("/var/cache/surgetank").exists(), "nobody needs it any more");
}
