//! A version that goes over the store's file in place, and breaks off there: the file was half of two versions, was taken for
//! somebody else's, and stayed so under all of its names.

use std::fs;
use std::os::unix::fs::MetadataExt;

use super::{Stage, behind, holds, stage, tell};
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
    eventually("it is being written over", || {
        let length_bytes = fs::metadata(behind("one")).unwrap().len();
        assert!(length_bytes != 100 << 10, "it was written over before the test looked: the machine is too busy");
        length_bytes == 0
    });
    faults(wrong);
    eventually("it broke off", || stage.failures() > 0);
    faults("");
    tell("end");
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

#[test]
fn a_hard_link_whose_device_failed_while_it_was_written_over_stayed_half() {
    broken_off("half_eio", "write EIO");
}

#[test]
fn a_hard_link_that_found_no_room_while_it_was_written_over_stayed_half() {
    broken_off("half_enospc", "write ENOSPC");
}

#[test]
fn a_hard_link_whose_bytes_were_dropped_by_the_sync_stayed_so() {
    broken_off("half_sync", "fsync drop 1");
}

#[test]
fn a_hard_link_that_read_back_differently_stayed_half() {
    broken_off("half_corrupt", "write corrupt 1");
}

/// Complete, but that the copy beside it was removed was not said: it was missed for good.
#[test]
fn a_hard_link_whose_copy_went_unsaid_was_not_drained() {
    broken_off("half_unsaid", "unlink lost:EIO 1");
}
