//! Writes that go around the mount are reported.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::fs;

use crate::scene::Scene;

/// `run` itself is outside the mount: its root leads to the bare directory.
const PAST: &str = "past=/proc/$PPID/root$PWD";

fn prepare(name: &str) -> Option<(Scene, String)> {
    let mut scene = Scene::new(name)?;
    scene.tier("fast", 32);
    let store = scene.over.with_file_name("elsewhere");
    fs::create_dir(scene.path("../elsewhere")).unwrap();
    Some((scene, store.to_str().unwrap().to_owned()))
}

#[test]
fn write_past_the_mount_is_an_error_with_its_name() {
    let Some((scene, store)) = prepare("escaped") else { return };
    let ended = scene.run(
        &["--store", &store],
        &format!("{PAST}; echo fine > fine; mkdir $past/deep; echo lost > $past/deep/escaped; test ! -e deep"),
    );
    let ended = ended.exits(3);
    assert!(
        ended.stderr.contains("deep/escaped: was written to the bare directory under the mount"),
        "{}",
        ended.stderr
    );
    assert_eq!(fs::read(scene.path("../elsewhere/fine")).unwrap(), b"fine\n");
    assert_eq!(fs::read(scene.path("deep/escaped")).unwrap(), b"lost\n", "it is not touched");
}

#[test]
fn run_inside_its_directory_is_not_an_escape() {
    let Some((scene, store)) = prepare("nothing_escaped") else { return };
    let ended =
        scene.run(&["--store", &store], "mkdir d; echo fine > d/fine; mkdir /proc/$PPID/root$PWD/only-a-directory");
    assert!(
        !ended.exits(0).stderr.contains("was written to the bare directory"),
        "a bare directory counts as an escape"
    );
}

/// The file then belongs to the store, and programs see it.
#[test]
fn write_past_the_mount_into_the_store_is_seen() {
    let Some((scene, _)) = prepare("anothers") else { return };
    scene.run(&[], &format!("{PAST}; echo here > $past/from-outside; cat from-outside")).exits(0).prints("here\n");
}
