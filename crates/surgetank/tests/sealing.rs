//! Files that are written directly, and complete only when the kernel says that nobody can write any more.
#![allow(clippy::unwrap_used, reason = "in a test that is how it fails")]

mod scene;

use scene::Scene;

/// Directly written, and opened for reading before the lease that seals it was granted.
#[test]
fn a_file_that_was_read_before_its_seal_was_never_drained() {
    let Some(mut scene) = Scene::new("read_before_seal") else {
        return;
    };
    scene.tier("fast", 64);
    let script = "for n in $(seq 30); do head -c 1000000 /dev/urandom >f-$n; sha256sum f-$n >>sums; done";
    scene.run(&[], script).exits(0);
    let check = std::process::Command::new("sha256sum")
        .args(["--check", "--quiet", "sums"])
        .current_dir(scene.path(""))
        .output()
        .unwrap();
    assert!(check.status.success(), "{}", String::from_utf8_lossy(&check.stdout));
    assert_eq!(scene.read("sums").iter().filter(|byte| **byte == b'\n').count(), 30);
    scene.is_clean();
}

/// What a writer had charged and reserved went with his `Open` when the file outlived it unsealed.
#[test]
fn a_file_that_lingered_was_charged_for_ever() {
    let Some(mut scene) = Scene::new("lingering_charge") else {
        return;
    };
    scene.tier("fast", 256);
    // Open for longer than the tender's look at what direct writers wrote.
    let script = "for n in $(seq 20); do exec 9>f-$n; head -c 300000 /dev/urandom >&9; sleep 0.12; exec 9>&-; done
        sleep 0.5; rm f-*
        for n in $(seq 100); do
            used=$(/mnt/surgetank status --state /mnt/state --json | python3 -c '
import json, sys
print(sum(tier[\"used_bytes\"] for tier in json.load(sys.stdin)[0][\"tiers\"]))')
            [ \"$used\" -gt 100000 ] || break; sleep 0.05
        done; echo $used >used";
    scene.run(&[], script).exits(0);
    let used: u64 = String::from_utf8(scene.read("used")).unwrap().trim().parse().unwrap();
    assert!(used <= 100_000, "{used} bytes are charged for nothing");
    scene.is_clean();
}
