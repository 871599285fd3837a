//! A full tier never ends a run: files larger than the tiers, many files, and writes in the middle all reach the
//! store.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::scene::{MIB, Scene, eventually, noise};

/// A tier of 8 MiB above one of 16 MiB.
fn small(scene: Option<Scene>) -> Option<Scene> {
    let mut scene = scene?;
    scene.tier("fast", 8).tier("slow", 16);
    Some(scene)
}

fn larger_than_all(scene: Option<Scene>, direct: &str) {
    let Some(scene) = small(scene) else { return };
    let bytes = noise(1, 64 * MIB);
    fs::write("/mnt/source", &bytes).unwrap();
    scene
        .run(
            &["--direct", direct],
            "dd if=/mnt/source of=large bs=1M status=none
             cmp /mnt/source large
             # Appended to, after it has left.
             printf more >> large",
        )
        .exits(0);
    let mut expected = bytes;
    expected.extend_from_slice(b"more");
    scene.holds("large", &expected);
    scene.is_clean();
    assert_eq!(scene.store_files().len(), 1);
}

#[test]
fn file_larger_than_all_tiers_is_stored() {
    larger_than_all(Scene::new("larger"), "true");
}

#[test]
fn file_larger_than_all_tiers_is_stored_mediated() {
    larger_than_all(Scene::new("larger_mediated"), "false");
}

#[test]
fn file_larger_than_all_tiers_is_stored_unprivileged() {
    larger_than_all(Scene::of_user("larger_user"), "true");
}

/// Writes and maps a file at random places while it grows past both tiers. The program's own memory is the model.
const HERE_AND_THERE: &str = r#"
import mmap, os, random
random.seed(7)
size = 40 << 20
model = bytearray(size)
f = os.open("scattered", os.O_RDWR | os.O_CREAT)
reader = os.open("scattered", os.O_RDONLY)
end = 0
for step in range(400):
    if step % 4 == 0:
        at = end
        length = min(size - at, 512 << 10)
    else:
        length = random.randrange(1, 70000)
        at = random.randrange(0, max(1, end - length))
    block = random.randbytes(length)
    done = 0
    while done < length:
        done += os.pwrite(f, block[done:], at + done)
    model[at:at + length] = block
    end = max(end, at + length)
    if step % 10 == 3:
        back = random.randrange(0, end)
        assert os.pread(reader, 5000, back) == bytes(model[back:min(end, back + 5000)]), (step, back)
    if step % 50 == 20:
        with mmap.mmap(f, end) as view:
            at = random.randrange(0, end - 9000)
            block = random.randbytes(9000)
            view[at:at + 9000] = block
            view.flush()
            model[at:at + 9000] = block
os.ftruncate(f, end - 12345)
del model[end - 12345:]
os.close(f)
os.close(reader)
assert open("scattered", "rb").read() == model
open("/mnt/beside/model", "wb").write(model)
"#;

fn here_and_there(scene: Option<Scene>, direct: &str) {
    let Some(scene) = small(scene) else { return };
    scene.beside("beside");
    fs::write("/mnt/program.py", HERE_AND_THERE).unwrap();
    scene.run(&["--direct", direct], "python3 /mnt/program.py").exits(0);
    scene.holds("scattered", &fs::read("/mnt/beside/model").unwrap());
    scene.is_clean();
}

#[test]
fn random_writes_and_mappings_survive_a_spill() {
    here_and_there(Scene::new("scattered"), "true");
}

#[test]
fn random_writes_and_mappings_survive_a_spill_mediated() {
    here_and_there(Scene::new("scattered_mediated"), "false");
}

#[test]
fn random_writes_and_mappings_survive_a_spill_unprivileged() {
    here_and_there(Scene::of_user("scattered_user"), "true");
}

fn many(scene: Option<Scene>, direct: &str) {
    let Some(scene) = small(scene) else { return };
    let bytes = noise(2, 64 * MIB);
    fs::write("/mnt/source", &bytes).unwrap();
    // More than the tiers hold, from several writers at once.
    scene
        .run(
            &["--direct", direct],
            "for writer in 0 1 2 3; do (
                 for i in $(seq $writer 4 127); do
                     mkdir -p d$((i % 7))
                     dd if=/mnt/source of=d$((i % 7))/$i bs=512k count=1 skip=$i status=none
                 done
             ) & done
             wait
             for i in $(seq 0 127); do
                 cmp -n 524288 -i $((i * 524288)):0 /mnt/source d$((i % 7))/$i
             done",
        )
        .exits(0);
    let files = scene.store_files();
    assert_eq!(files.len(), 128, "{files:?}");
    for (i, part) in bytes.chunks(512 << 10).enumerate() {
        scene.holds(&format!("d{}/{i}", i % 7), part);
    }
}

#[test]
fn many_files_beyond_the_tiers_are_stored() {
    many(Scene::new("many"), "true");
}

#[test]
fn many_files_beyond_the_tiers_are_stored_mediated() {
    many(Scene::new("many_mediated"), "false");
}

/// Durable files make room for new ones, and are still readable afterwards.
#[test]
fn eviction_makes_room() {
    let Some(mut scene) = Scene::new("eviction") else {
        return;
    };
    scene.tier("only", 16);
    scene.beside("beside");
    let bytes = noise(3, 48 * MIB);
    fs::write("/mnt/source", &bytes).unwrap();
    let ended = scene
        .run(
            &["--json", "/mnt/beside/report"],
            "for i in 0 1 2 3 4 5 6 7 8 9 10 11; do
                 dd if=/mnt/source of=part$i bs=4M count=1 skip=$i status=none
                 /mnt/surgetank wait --state /mnt/state --quiet part$i
             done
             /mnt/surgetank why --state /mnt/state --json part0 > /mnt/beside/first
             /mnt/surgetank why --state /mnt/state --json part11 > /mnt/beside/last
             /mnt/surgetank status --state /mnt/state --json > /mnt/beside/status
             for i in 0 1 2 3 4 5 6 7 8 9 10 11; do cat part$i; done | cmp - /mnt/source",
        )
        .exits(0);
    let json = |name: &str| -> serde_json::Value {
        serde_json::from_slice(&fs::read(format!("/mnt/beside/{name}")).unwrap()).unwrap()
    };
    assert_eq!(json("first")["state"], "evicted", "{}", ended.stderr);
    assert_eq!(json("last")["state"], "durable", "{} {}", json("last"), json("status"));
    let report = json("report");
    assert_eq!(report["summary"]["tiers"][0]["spills"], 0, "{report}");
    let status = &json("status")[0]["tiers"][0];
    assert!(status["used_bytes"].as_u64().unwrap() <= 16 * MIB, "{status}");
    for (i, part) in bytes.chunks(4 << 20).enumerate() {
        scene.holds(&format!("part{i}"), part);
    }
    scene.is_clean();
}

/// A file that grows over both tiers while another program reads it from its beginning.
#[test]
fn reader_follows_a_file_that_leaves_the_tier() {
    let Some(scene) = small(Scene::new("follow")) else {
        return;
    };
    fs::write("/mnt/source", noise(4, 32 * MIB)).unwrap();
    scene
        .run(
            &["--direct", "false"],
            "touch growing
             exec 5< growing
             for i in $(seq 0 31); do
                 dd if=/mnt/source bs=1M count=1 skip=$i status=none >> growing
                 head -c 1048576 <&5 | cmp -n 1048576 -i 0:$((i * 1048576)) - /mnt/source
             done",
        )
        .exits(0);
    scene.holds("growing", &noise(4, 32 * MIB));
}

/// Regression: a file was opened again during its publication, grew, and moved into a temporary in the store. Its
/// writer continued in the published copy, and its writes since the open were lost.
#[test]
fn file_spilled_during_its_publication_is_kept() {
    let Some(mut scene) = Scene::new("spill_published") else { return };
    scene.tier("fast", 8);
    fs::write("/mnt/source", noise(5, 24 * MIB)).unwrap();
    let script = "
        dd if=/mnt/source of=f bs=1M count=4 status=none
        sleep 0.7
        python3 -c '
import time
source = open(\"/mnt/source\", \"rb\").read()
with open(\"f\", \"ab\", 0) as f:
    def write(start, end):
        while start < end:
            start += f.write(source[start:min(end, start + (1 << 20))])
    write(4 << 20, 16 << 20)
    time.sleep(1.5)
    write(16 << 20, len(source))
'";
    let options = ["--no-preload", "--direct", "false", "--quiet-period", "0s"];
    scene.run_held("drain.started:1500", &options, script).exits(0);
    scene.holds("f", &noise(5, 24 * MIB));
    scene.is_clean();
}

/// Regression: a program rewrote a spilled file just when the temporary became the store's file. Half of the file was
/// visible there.
#[test]
fn spilled_file_truncated_during_its_publication_is_whole() {
    let Some(mut scene) = Scene::new("spill_emptied") else { return };
    scene.tier("fast", 8);
    fs::write("/mnt/source", noise(6, 12 * MIB)).unwrap();
    let script = "
        dd if=/mnt/source of=f bs=1M status=none
        sleep 0.5
        python3 -c '
import time
with open(\"f\", \"wb\", 0) as f:
    f.write(b\"new\")
    time.sleep(2)
    f.write(b\"er\")
'";
    let (stop, whole, path) = (AtomicBool::new(false), noise(6, 12 * MIB), scene.path("f"));
    let seen = std::thread::scope(|threads| {
        let watcher = threads.spawn(|| {
            let mut seen = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                if let Ok(bytes) = fs::read(&path)
                    && bytes != whole
                    && bytes != b"newer"
                {
                    seen.push(bytes.len());
                }
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            seen
        });
        let options = ["--no-preload", "--quiet-period", "0s"];
        let ended = scene.run_held("drain.started:1500", &options, script);
        stop.store(true, Ordering::Relaxed);
        ended.exits(0);
        watcher.join().unwrap()
    });
    assert!(seen.is_empty(), "sizes of partial versions: {seen:?}");
    scene.holds("f", b"newer");
    scene.is_clean();
}

/// The file was moved out of the directory into which it had spilled, and the directory was removed. Regression: the
/// agent took the directory for another client's, and the file waited for it indefinitely.
fn out_of_a_directory_that_is_removed(scene: Option<Scene>, direct: &str) {
    let Some(scene) = small(scene) else { return };
    fs::create_dir_all(scene.path("d/in")).unwrap();
    fs::write("/mnt/source", noise(7, 40 * MIB)).unwrap();
    let script = "exec 3>d/in/f
        dd if=/mnt/source bs=1M count=30 status=none >&3
        mv d/in/f f; rmdir d/in
        sleep 1.5
        dd if=/mnt/source bs=1M skip=30 status=none >&3
        exec 3>&-; cmp /mnt/source f";
    scene.run(&["--direct", direct, "--no-preload", "--quiet-period", "0s"], script).exits(0);
    scene.holds("f", &noise(7, 40 * MIB));
    assert!(!scene.path("d/in").exists());
    scene.is_clean();
}

#[test]
fn spilled_file_survives_the_removal_of_its_directory() {
    out_of_a_directory_that_is_removed(Scene::new("spill_removed"), "true");
}

#[test]
fn spilled_file_survives_removal_of_its_directory_mediated() {
    out_of_a_directory_that_is_removed(Scene::new("spill_removed_mediated"), "false");
}

/// The tier has no room for the directory to which a file is moved, so its plain file stays. Regression: no program
/// could read it any more, and a new file of its old name overwrote it.
fn moved_on_a_full_tier(name: &str, options: &[&str]) {
    let Some(mut scene) = Scene::new(name) else { return };
    scene.tier("fast", 32);
    let notes = scene.beside("notes");
    let script = "mkdir d e; echo 1 >a; echo 2 >d/f
        touch /mnt/notes/made; until [ -e /mnt/notes/full ]; do sleep 0.01; done
        mv a e/a; mv d e/d; cat e/a e/d/f
        touch /mnt/notes/moved; until [ -e /mnt/notes/roomy ]; do sleep 0.01; done
        echo 3 >a; mkdir d; echo 4 >d/f; echo 5 >e/d/g
        cat e/a e/d/f a d/f e/d/g; mv e/a b; rm e/d/g; cat b";
    let mut running = scene.start(&[&["--quiet-period", "1h"], options].concat(), script);
    eventually("the files are made", || notes.join("made").exists());
    crate::scene::mount(&["-o", "remount,nr_inodes=200", "/mnt/tier-fast"]);
    let filler = |number: u32| format!("/mnt/tier-fast/filler-{number}");
    let count = (0..).find(|number| fs::File::create(filler(*number)).is_err()).unwrap();
    fs::write(notes.join("full"), "").unwrap();
    eventually("the files are moved", || notes.join("moved").exists() || running.has_ended());
    (0..count).for_each(|number| fs::remove_file(filler(number)).unwrap());
    fs::write(notes.join("roomy"), "").unwrap();
    running.ends().exits(0).prints("1\n2\n1\n2\n3\n4\n5\n1\n");
    for (name, text) in [("b", "1\n"), ("e/d/f", "2\n"), ("a", "3\n"), ("d/f", "4\n")] {
        scene.holds(name, text.as_bytes());
    }
    scene.is_clean();
    scene.leaves_nothing_on_the_tiers();
}

/// Regression: a file that was moved on a full tier was lost.
#[test]
fn file_moved_on_a_full_tier_is_kept_through_the_mount() {
    moved_on_a_full_tier("spill_moved_mount", &["--no-preload"]);
}

/// Regression: a file that was moved on a full tier was lost.
#[test]
fn file_moved_on_a_full_tier_is_kept_with_the_shim() {
    moved_on_a_full_tier("spill_moved_shim", &[]);
}

/// Regression: files that are never drained counted against the limit of undrained bytes. They went to the store, and
/// stayed there, with half of the tier empty.
#[test]
fn temporaries_do_not_count_as_undrained() {
    let Some(mut scene) = Scene::new("temporaries_limit") else { return };
    scene.tier("fast", 64);
    fs::write("/mnt/source", noise(3, 4 * MIB)).unwrap();
    let script = "for i in 0 1 2 3 4 5; do dd if=/mnt/source of=$i.tmp bs=1M status=none; cmp /mnt/source $i.tmp
            getfattr -n user.surgetank.tier --only-values $i.tmp; echo; done";
    for door in [&[][..], &["--no-preload"], &["--no-preload", "--direct", "false"]] {
        let options = [&["--rule", "*.tmp=remove", "--dirty-bytes-max", "6M"], door].concat();
        let ended = scene.run(&options, script).exits(0);
        assert_eq!(ended.stdout, "fast\n".repeat(6), "{door:?}");
        assert_eq!(scene.store_files().len(), 0, "{door:?}");
    }
    // Files that are drained count against the limit, even if they are drained only at the end.
    for kept in [&[][..], &["--rule", "*.tmp=keep", "--keep-at-exit", "drain", "--no-preload"]] {
        let options = [&["--quiet-period", "1h", "--dirty-bytes-max", "6M"], kept].concat();
        let ended = scene.run(&options, script).exits(0);
        assert!(ended.stdout.lines().any(|line| line != "fast"), "{kept:?} {}", ended.stdout);
        scene.store_files().keys().for_each(|path| fs::remove_file(scene.path(path.to_str().unwrap())).unwrap());
    }
    scene.is_clean();
}
