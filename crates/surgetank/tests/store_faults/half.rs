//! A new version overwrites the store's file in place, and the overwrite is interrupted. Regression: the file had
//! halves of two versions, counted as another client's, and stayed so under all of its names.

use std::fs;
use std::os::unix::fs::MetadataExt;

use super::{Stage, behind, holds, mark, stage};
use crate::scene::server::faults;
use crate::scene::{Running, eventually, noise};

fn broken_off(name: &str, wrong: &str) {
    let Some(stage) = stage(name, 96) else { return };
    fs::write(behind("one"), "old").unwrap();
    fs::hard_link(behind("one"), behind("two")).unwrap();
    let number = fs::metadata(behind("one")).unwrap().ino();
    let script = "cat one two; dd if=/mnt/source of=one bs=100k count=1 status=none; while ! test -e /mnt/beside/end; do sleep 0.01; done";
    let mut command = stage.scene.run_command(&Stage::options(&["--quiet-period", "0s"]), script);
    command.env("SURGETANK_HOLD", "store.overwriting:4000");
    let running = Running::of(command);
    eventually("the drain overwrites the file", || {
        let length_bytes = fs::metadata(behind("one")).unwrap().len();
        assert!(length_bytes != 100 << 10, "the overwrite ended before the test looked: the machine is too busy");
        length_bytes == 0
    });
    faults(wrong);
    eventually("the overwrite fails", || stage.failures() > 0);
    faults("");
    mark("end");
    let ended = running.ends().exits(0);
    assert!(!ended.stderr.contains("another client"), "{}", ended.stderr);
    let bytes = noise(5, 100 << 10);
    holds("one", &bytes);
    holds("two", &bytes);
    let names: Vec<_> = fs::read_dir("/mnt/behind").unwrap().flatten().map(|entry| entry.file_name()).collect();
    assert_eq!(names.len(), 2, "{names:?}");
    assert_eq!(fs::metadata(behind("two")).unwrap().ino(), number);
    stage.is_clean();
}

/// Regression: the file stayed half written in the store.
#[test]
fn half_written_link_is_completed_after_an_io_error() {
    broken_off("half_eio", "write EIO");
}

/// Regression: the file stayed half written in the store.
#[test]
fn half_written_link_is_completed_after_no_space() {
    broken_off("half_enospc", "write ENOSPC");
}

/// Regression: the file stayed half written in the store.
#[test]
fn half_written_link_is_completed_after_a_dropped_sync() {
    broken_off("half_sync", "fsync drop 1");
}

/// Regression: the file stayed half written in the store.
#[test]
fn half_written_link_is_completed_after_a_bad_reread() {
    broken_off("half_corrupt", "write corrupt 1");
}

/// The file is complete, and the answer to the removal of the copy beside it is lost. Regression: the drain then
/// searched for that copy again and again.
#[test]
fn link_is_drained_when_the_copys_removal_is_unreported() {
    broken_off("half_unreported", "unlink lost:EIO 1");
}
