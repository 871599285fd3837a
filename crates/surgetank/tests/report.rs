//! The record of a run equals the bytes that strace saw, for every kind of program and every way in which it ends.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::scene::record::{COUNTED, SMALL, is_as_traced, moved, number, record, records, small_scene as scene};
use crate::scene::{MIB, Scene};
use serde_json::Value;

#[test]
fn byte_totals_equal_those_of_strace() {
    let Some(scene) = scene("report_bytes") else { return };
    let run = |name: &str, script: &str| is_as_traced(&scene, name, script);
    let record = run(
        "dd",
        "dd if=/dev/zero of=a bs=64k count=40 status=none; dd if=a of=b bs=4k status=none; dd if=b of=/dev/null bs=1M status=none",
    );
    let dd = record["programs"].as_array().unwrap().iter().find(|program| program["program"] == "dd").unwrap();
    assert_eq!(dd["processes"], 3);
    // 40 reads or writes of 64 KiB are in class 17: 2^16 to 2^17 - 1.
    assert!(
        number(&dd["io"]["shim"]["write_sizes"][17])
            + number(&dd["io"]["passthrough"]["write_sizes"].get(17).cloned().unwrap_or(0.into()))
            >= 40,
        "{dd:#}"
    );
    run(
        "cp-cat",
        "mkdir d; head -c 3000000 /dev/urandom > d/a; cp d/a d/b; cp -a d e; cat d/a e/b > d/c; cmp d/a e/b; sha256sum d/* > sums; wc -l < sums",
    );
    run(
        "tar",
        "mkdir t; for n in $(seq 50); do head -c $((n * 997)) /dev/urandom > t/$n; done; tar -cf t.tar t; mkdir u; tar -xf t.tar -C u; gzip -k t.tar; rm -r t u",
    );
    run(
        "streams",
        r#"cat > s.c <<'END'
#include <stdio.h>
#include <stdlib.h>
int main(void) {
    char b[1000];
    FILE *f = fopen("s.out", "w");
    for (int n = 0; n < 5000; n++) fprintf(f, "line %d\n", n);
    fclose(f);
    f = fopen("s.out", "r+");
    fseek(f, 20000, SEEK_SET); if (!fread(b, 1, 100, f)) return 1;
    fseek(f, 100, SEEK_SET); fwrite(b, 1, 100, f);
    fclose(f);
    f = fopen("s.out", "r");
    while (fgets(b, sizeof b, f)) {}
    rewind(f); while (fread(b, 1, sizeof b, f) == sizeof b) {}
    fclose(f);
    f = fopen("s.out", "a"); fputs("at the end\n", f);
    printf("to stdout, left to exit\n");
    exit(0); /* f is never closed */
}
END
gcc -o s s.c; ./s > s.text; ./s >> s.text; wc -c s.out s.text"#,
    );
    run(
        "gcc",
        "for n in 1 2 3; do echo \"#include <stdio.h>\nint f$n(void) { return printf(\\\"%d\\\", $n); }\" > g$n.c; gcc -fPIC -c g$n.c; done; gcc -shared -o lib.so g1.o g2.o g3.o; ar rc lib.a g1.o g2.o g3.o; ranlib lib.a",
    );
    run(
        "sqlite",
        "sqlite3 x.db 'create table t(a, b); insert into t select value, hex(randomblob(200)) from generate_series(1, 3000); create index i on t(b);' && sqlite3 x.db 'select count(*), max(length(b)) from t' > q",
    );
    run(
        "python",
        r#"cat > p.py <<'END'
import array, json, mmap, os, shutil
array.array('d', range(100000)).tofile(open('p.bin', 'wb'))
json.dump(list(range(20000)), open('p.json', 'w'))
assert len(json.load(open('p.json'))) == 20000
fd = os.open('p.vec', os.O_RDWR | os.O_CREAT)
os.writev(fd, [b'a' * 1000, b'b' * 3000]); os.pwrite(fd, b'c' * 500, 9000); os.preadv(fd, [bytearray(2000)], 100)
os.close(fd)
with open('p.bin', 'r+b') as f:
    m = mmap.mmap(f.fileno(), 0); m[0:4] = b'abcd'; m.close()
shutil.copyfile('p.bin', 'p.copy')
pid = os.fork()
if pid == 0:
    open('p.child', 'wb').write(b'x' * 12345); os._exit(0)
os.waitpid(pid, 0)
END
/usr/bin/python3 p.py"#,
    );
    // Children that write to the shell's own standard output; streams that are inherited, moved, and flushed only at
    // exit.
    run(
        "shells",
        r#"cat > v.py <<'END'
import subprocess
print('parent one', flush=True)
subprocess.run(['sh', '-c', 'echo child; cat /etc/passwd'], stdout=open('v.child', 'w'))
subprocess.run(['true'], stdout=subprocess.DEVNULL)
print('parent two' * 1000)
END
/usr/bin/python3 v.py > v.out; /usr/bin/python3 v.py | cat > v.piped
awk 'BEGIN { for (i = 0; i < 3000; i++) print i > "v.awk"; system("echo q"); print "end" }' > v.text
sort v.awk > v.sorted; (echo a; cat v.awk; printf b) > v.mixed; sed -i s/1/2/ v.mixed"#,
    );
    let record = run(
        "gdal",
        "/usr/bin/python3 -c \"open('x.asc','w').write('ncols 200\\nnrows 200\\nxllcorner 0\\nyllcorner 0\\ncellsize 1\\n' + ('\\n'.join(' '.join(str(i*j%250) for i in range(200)) for j in range(200))))\"; gdal_translate -q -of GTiff x.asc y.tif; gdal_translate -q -co COMPRESS=DEFLATE y.tif z.tif; gdalinfo -checksum z.tif > info",
    );
    assert_eq!(record["exit"], 0);
}

#[test]
fn static_program_has_estimates_and_no_counts() {
    let Some(scene) = scene("report_static") else { return };
    fs::write("/mnt/w.c", "#include <fcntl.h>\n#include <unistd.h>\nint main(void) { static char b[100000]; int f = open(\"out\", O_CREAT | O_WRONLY, 0644); for (int n = 0; n < 30; n++) if (write(f, b, sizeof b) < 0) return 1; return close(f); }\n").unwrap();
    crate::scene::succeed(std::process::Command::new("gcc").args(["-static", "-o", "/mnt/w", "/mnt/w.c"]));
    scene.run(&SMALL, "/mnt/w").exits(0);
    let record = record(&scene);
    let process = record["processes"].as_array().unwrap().iter().find(|process| process["program"] == "w").unwrap();
    assert_eq!(process["counted"], "agent");
    let io = &process["io"];
    let (mediated, estimated) =
        (number(&io["mediated"]["write_bytes"]), number(&io["passthrough_unseen"]["estimated_write_bytes"]));
    assert_eq!(mediated + estimated, 3_000_000, "{io:#}");
    assert_eq!(number(&io["passthrough_unseen"]["write_bytes"]), 0);
    assert_eq!(number(&io["mediated"]["create_opens"]) + number(&io["passthrough_unseen"]["create_opens"]), 1);
}

#[test]
fn killed_program_is_counted_and_a_fork_counts_apart() {
    let Some(scene) = scene("report_killed") else { return };
    fs::write(
        "/mnt/p.py",
        "
import os, signal
f = os.open('parent', os.O_CREAT | os.O_WRONLY)
os.write(f, b'p' * 1000)
pid = os.fork()
if pid == 0:
    os.write(f, b'c' * 70000)
    os.execv('/bin/bash', ['bash', '-c', 'head -c 5000 /dev/zero; kill -9 $$'])
os.waitpid(pid, 0)
os.write(f, b'p' * 234)
os.kill(os.getpid(), signal.SIGKILL)
",
    )
    .unwrap();
    scene.run(&SMALL, "/usr/bin/python3 /mnt/p.py || true").exits(0);
    let record = record(&scene);
    let pythons: Vec<&Value> =
        record["processes"].as_array().unwrap().iter().filter(|process| process["program"] == "python3").collect();
    assert_eq!(pythons.len(), 2, "{record:#}");
    assert_ne!(pythons[0]["pid"], pythons[1]["pid"]);
    assert_eq!(pythons[1]["parent"], pythons[0]["pid"]);
    let written = |process: &Value| COUNTED.iter().map(|door| number(&process["io"][door]["write_bytes"])).sum::<u64>();
    assert_eq!((written(pythons[0]), written(pythons[1])), (1234, 70000));
    let counted = (&pythons[0]["counted"], &pythons[1]["counted"]);
    assert_eq!(counted, (&"shim_cut_short".into(), &"shim".into()), "the parent is killed, and the child becomes bash");
    assert!(pythons.iter().all(|process| process["ended_us"].is_u64()), "{pythons:#?}");
    // After its exec the child counts as a process of another program with the same number.
    let bash = record["processes"]
        .as_array()
        .unwrap()
        .iter()
        .find(|process| process["pid"] == pythons[1]["pid"] && process["program"] == "bash");
    assert!(bash.is_some(), "{record:#}");
    // The last kill ends only the command's child, and the shell continues.
    assert_eq!(record["command_exit"], 0);
}

fn processes_of(record: &Value, program: &str) -> u64 {
    let programs = record["programs"].as_array().unwrap();
    programs.iter().find(|one| one["program"] == program).map_or(0, |one| number(&one["processes"]))
}

/// Regression: of 600 simultaneous processes 231 found no free slot for their counts, and the record did not report
/// it.
#[test]
fn hundreds_of_processes_at_once_are_counted_each() {
    let Some(scene) = scene("report_burst") else { return };
    scene.run(&SMALL, "for i in $(seq 600); do sleep 3 & done; wait").exits(0);
    let record = record(&scene);
    assert_eq!(processes_of(&record, "sleep"), 600);
    assert_eq!(record["processes_lost"], 0);
}

/// Regression: with thousands of short processes, two at a time, slots were released only every two seconds.
#[test]
fn thousands_of_short_processes_are_counted_each() {
    let Some(scene) = scene("report_many") else { return };
    scene.run(&SMALL, "for i in $(seq 4000); do /bin/true; done").exits(0);
    let record = record(&scene);
    assert_eq!(processes_of(&record, "true"), 4000);
    assert_eq!(record["processes_lost"], 0);
}

/// Regression: the recorder stopped, or the record had 1.8e19 bytes.
#[test]
fn overwritten_counts_are_reported_as_impossible() {
    let Some(scene) = scene("report_overwritten") else { return };
    fs::write(
        "/mnt/overwrite.py",
        "
import mmap, os
path = next(line.split()[-1] for line in open('/proc/self/maps') if '.counts-' in line)
slots = mmap.mmap(os.open(path, os.O_RDWR), 0)
slots[20480:20480 + 40 * 2256] = b'\\xff' * (40 * 2256)
",
    )
    .unwrap();
    let script = "/usr/bin/python3 /mnt/overwrite.py; sleep 3; dd if=/dev/zero of=after bs=1000 count=7 status=none";
    scene.run(&SMALL, script).exits(0);
    let record = record(&scene);
    assert_eq!((number(&record["agents"]), &record["exit"]), (1, &0.into()), "{record:#}");
    assert!(number(&record["processes_disbelieved"]) > 0, "{record:#}");
    assert_eq!(moved(&record, "dd", &COUNTED).1, 7000, "a later process is counted: {record:#}");
    assert!(moved(&record, "", &COUNTED).1 < 1 << 30);
    let text = scene.verb("report", &[]).exits(0).stdout;
    assert!(text.contains("impossible"), "{text}");
}

/// Regression: the agent mapped the file, and died of SIGBUS.
#[test]
fn program_that_truncates_its_counts_ends_no_agent() {
    let Some(scene) = scene("report_cut") else { return };
    let script = "echo kept > kept; truncate -s 0 \"$(grep -o '/[^ ]*[.]counts-[0-9]*' /proc/self/maps | head -n 1)\"; sleep 1; exit 0";
    // (The run's programs have the file mapped, and may die of SIGBUS.)
    scene.run(&SMALL, script);
    let record = record(&scene);
    assert_eq!((&record["agents"], &record["counting_ended"]), (&1.into(), &true.into()), "{record:#}");
    scene.holds("kept", b"kept\n");
}

#[test]
fn unwritable_answer_is_a_failure() {
    let Some(scene) = scene("report_unwritable") else { return };
    scene.run(&SMALL, "echo one >a").exits(0);
    for (to, code) in [("/dev/full", 1), ("/dev/null", 0)] {
        for words in [&["--list"][..], &[], &["--json"]] {
            let mut command = scene.surgetank(&["report", "--state", scene.state.to_str().unwrap()]);
            let out = fs::File::options().write(true).open(to).unwrap();
            let done = command.args(words).stdout(out).stderr(std::process::Stdio::piped()).output().unwrap();
            let errors = String::from_utf8_lossy(&done.stderr).into_owned();
            assert_eq!(done.status.code(), Some(code), "{to} {words:?}: {errors}");
            assert_eq!(errors.contains("cannot be written to standard output"), code == 1, "{errors}");
        }
    }
    let help = scene.verb("report", &["--help"]).exits(0).stdout;
    assert_eq!(help.matches("[default: ").count(), 1, "{help}");
}

#[test]
fn concurrent_runs_are_counted_apart() {
    let Some(scene) = scene("report_two") else { return };
    fs::write("/mnt/w.sh", "dd if=/dev/zero of=$1 bs=1000 count=$2 status=none; touch /mnt/$1.done; while [ ! -e /mnt/$3.done ]; do sleep 0.05; done").unwrap();
    let one = scene.start(&SMALL, "bash /mnt/w.sh one 111 two");
    scene.await_served();
    let two = scene.start(&SMALL, "bash /mnt/w.sh two 222 one");
    one.ends().exits(0);
    two.ends().exits(0);
    let mut written: Vec<u64> = records(&scene).iter().map(|record| moved(record, "dd", &COUNTED).1).collect();
    written.sort_unstable();
    assert_eq!(written, [111_000, 222_000]);
    assert!(records(&scene).iter().all(|record| record["runs_beside"] == 1));
}

#[test]
fn replacing_agent_continues_the_record() {
    let Some(scene) = scene("report_replaced") else { return };
    let script = "dd if=/dev/zero of=a bs=1000 count=100 status=none; touch /mnt/first; while [ ! -e /mnt/go ]; do sleep 0.05; done; dd if=/dev/zero of=b bs=1000 count=50 status=none";
    let run = scene.start(&SMALL, script);
    crate::scene::eventually("the first half", || Path::new("/mnt/first").exists());
    // The agent records its counts every two seconds.
    let noted = || {
        fs::read_dir(&scene.state).into_iter().flatten().flatten().any(|place| {
            let text = fs::read_to_string(place.path().join("runs/now-1.json")).unwrap_or_default();
            text.contains("\"dd\"")
        })
    };
    crate::scene::eventually("the counts are recorded", noted);
    scene.replace_agent();
    scene.await_served();
    fs::write("/mnt/go", "").unwrap();
    run.ends().exits(0);
    let record = record(&scene);
    assert_eq!(record["agents"], 2);
    assert_eq!(moved(&record, "dd", &COUNTED).1, 150_000, "{record:#}");
    assert_eq!(record["exit"], 0);
    let points = record["samples"]["points"].as_array().unwrap();
    assert!(points.len() >= 2 && points.windows(2).all(|two| number(&two[0]["at_us"]) <= number(&two[1]["at_us"])));
}

#[test]
fn failed_run_has_a_private_record_of_its_failure() {
    let Some(scene) = Scene::of_user("report_user").map(|mut scene| {
        scene.tier("fast", 64);
        scene
    }) else {
        return;
    };
    scene.run(&[], "echo one > f; exit 7").exits(7);
    let record = record(&scene);
    assert_eq!((&record["command_exit"], &record["exit"]), (&Value::from(7), &Value::from(7)));
    assert_eq!(record["verdict"]["not_durable"]["total"], 0);
    let mut files = BTreeMap::new();
    for place in fs::read_dir(&scene.state).unwrap().flatten() {
        for file in fs::read_dir(place.path().join("runs")).into_iter().flatten().flatten() {
            files.insert(file.path(), fs::metadata(file.path()).unwrap().permissions().mode() & 0o777);
        }
    }
    assert_eq!(files.values().collect::<Vec<_>>(), [&0o600], "{files:?}");
    let mut other = std::process::Command::new("setpriv");
    other
        .args(["--reuid", "1234", "--regid", "1234", "--clear-groups", "--", "/mnt/surgetank", "report", "--state"])
        .arg(&scene.state);
    let output = other.output().unwrap();
    assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
}

#[test]
fn full_state_directory_does_not_fail_the_run() {
    let Some(mut scene) = scene("report_full") else { return };
    scene.state = scene.tmpfs("small-state", 24);
    fs::set_permissions(&scene.state, fs::Permissions::from_mode(0o700)).unwrap();
    let script = "dd if=/dev/zero of=/mnt/small-state/filler bs=64k status=none 2>/dev/null || true; sleep 3; rm -f /mnt/small-state/filler; dd if=/dev/zero of=a bs=1000 count=100 status=none";
    scene.run(&SMALL, script).exits(0);
    assert_eq!(fs::metadata(scene.path("a")).unwrap().len(), 100_000);
    // The same with a state directory in which the records cannot be written at all.
    for place in fs::read_dir(&scene.state).unwrap().flatten() {
        if place.path().join("runs").is_dir() {
            fs::remove_dir_all(place.path().join("runs")).unwrap();
            fs::write(place.path().join("runs"), "in the way").unwrap();
        }
    }
    scene.run(&SMALL, "echo more > b").exits(0);
    assert_eq!(scene.read("b"), b"more\n");
}

#[test]
fn spills_evictions_and_hits_have_their_reasons() {
    let Some(mut scene) = Scene::new("report_reasons") else { return };
    scene.tier("fast", 8);
    let mut big = crate::scene::noise(3, 3 * MIB);
    big.truncate(3 * MIB as usize);
    fs::write(scene.path("old"), &big).unwrap();
    let script = "cat old > copy; cat copy copy > twice; dd if=/dev/zero of=grows bs=64k count=200 status=none; cat twice > /dev/null";
    scene.run(&[], script).exits(0);
    let record = record(&scene);
    let of = |kind: &str| -> u64 {
        record["events"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|event| event["kind"] == kind)
            .map(|event| number(&event["count"]))
            .sum()
    };
    assert!(of("placed") >= 3 && of("miss") >= 1, "{:#}", record["events"]);
    assert!(
        of("spilled") + record["events"].to_string().matches("has no room").count() as u64 >= 1,
        "{:#}",
        record["events"]
    );
    assert!(
        record["files"]
            .as_array()
            .unwrap()
            .iter()
            .any(|file| file["path"] == "grows" && file["size_bytes"] == 200 * 65536)
    );
    let text = scene.verb("report", &[]).exits(0).stdout;
    for part in
        ["where the bytes went", "who did it", "what was decided, and why", "fast", "dd", "everything is in the store"]
    {
        assert!(text.contains(part), "{part}:\n{text}");
    }
    assert!(text.lines().count() < 60, "{text}");
}

/// Regression: `report` without a name showed the last run over any directory.
#[test]
fn report_without_a_name_takes_the_run_over_this_directory() {
    let Some(scene) = scene("report_here") else { return };
    fs::create_dir_all(scene.path("below")).unwrap();
    scene.run(&SMALL, "echo here > mine").exits(0);
    fs::create_dir("/mnt/other").unwrap();
    let state = scene.state.to_str().unwrap();
    let mut other = scene.surgetank(&["run", "--over", "/mnt/other", "--state", state, "--", "true"]);
    crate::scene::Running::of(command_in(&mut other, "/mnt/other", &[])).ends().exits(0);
    let at = |dir: &str, words: &[&str]| {
        let mut command = scene.surgetank(&["report", "--state", scene.state.to_str().unwrap(), "--json"]);
        crate::scene::Running::of(command_in(&mut command, dir, words)).ends()
    };
    for (dir, expected) in
        [("/mnt/project", "/mnt/project"), ("/mnt/project/below", "/mnt/project"), ("/mnt/other", "/mnt/other")]
    {
        assert_eq!(at(dir, &[]).exits(0).json()["directory"], expected, "in {dir}");
    }
    assert_eq!(
        at("/mnt/project", &["last"]).exits(0).json()["directory"],
        "/mnt/other",
        "`last` covers all directories"
    );
    at("/", &[]).exits(2).says(&["no run over / is recorded", "--list", "  data: "]);
}

fn command_in(command: &mut std::process::Command, dir: &str, words: &[&str]) -> std::process::Command {
    let program = command.get_program().to_owned();
    let all: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
    let environment: Vec<_> =
        command.get_envs().filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned()))).collect();
    let mut made = std::process::Command::new(program);
    made.args(all).args(words).env_clear().envs(environment).current_dir(dir);
    made.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    made
}

/// Regression: after the run `why` reported only that no agent serves the directory.
#[test]
fn why_answers_from_the_last_record_after_a_run() {
    let Some(scene) = scene("report_why") else { return };
    let options = [&SMALL[..], &["--rule", "scratch/=keep"]].concat();
    scene
        .run(
            &options,
            "head -c 5000 /dev/zero > made; mkdir scratch; echo kept > scratch/kept; echo x > t; mv t renamed",
        )
        .exits(0);
    let text = scene.verb("why", &["made"]).exits(0).stdout;
    for word in
        ["as run 20", "no agent serves /mnt/project now", "made", "durable", "in the store since the run", "rule"]
    {
        assert!(text.contains(word), "{word:?} is missing in:\n{text}");
    }
    let json = scene.verb("why", &["--json", "made"]).exits(0).json();
    assert_eq!((json["state"].as_str(), json["size_bytes"].as_u64()), (Some("durable"), Some(5000)), "{json}");
    assert_eq!(scene.verb("why", &["--json", "renamed"]).exits(0).json()["state"], "durable");
    let kept = scene.verb("why", &["scratch/kept"]).exits(0).stdout;
    assert!(kept.contains("not in the store when the run ended") && kept.contains("scratch/"), "{kept}");
    scene.verb("why", &["never"]).exits(1).says(&["no run has recorded anything of never", "  try:  ", "  data: "]);
    scene.verb("why", &["/tmp/elsewhere"]).exits(1).says(&["no agent of yours serves"]);
}

/// Regression: with a full state directory the run lost its record, and only the agent's log reported it.
#[test]
fn run_says_that_its_record_cannot_be_written() {
    let Some(mut scene) = scene("report_unwritten") else { return };
    scene.state = scene.tmpfs("small-state", 8);
    fs::set_permissions(&scene.state, fs::Permissions::from_mode(0o700)).unwrap();
    let fill = "echo result > made; head -c 20000000 /dev/zero > /mnt/small-state/ballast || true";
    let ended = scene.run(&SMALL, fill).exits(0);
    let ended = ended.says(&["the record of this run cannot be written", "/mnt/small-state/", "No space left"]);
    ended.says(&["  try:  make room", "  data: everything that should be durable is in the store"]);
    scene.holds("made", b"result\n");
}

/// Regression: an early drain counted as `0 B/s`, a drain after a pause as `429 B/s`, and holes as written bytes.
#[test]
fn drain_rate_is_that_of_its_work_and_holes_are_not_counted() {
    let Some(scene) = scene("report_rate") else { return };
    let script =
        "head -c 8000000 /dev/urandom > a; /mnt/surgetank wait --state /mnt/state a; truncate -s 1T holes; sleep 1";
    let options = [&SMALL[..], &["--json", "/mnt/account.json"]].concat();
    scene.run(&options, script).exits(0).says(&["tier fast:", "drain: 2 files, "]);
    let account: Value = serde_json::from_slice(&fs::read("/mnt/account.json").unwrap()).unwrap();
    let drain = &account["summary"]["drain"];
    let bytes = number(&drain["bytes"]);
    assert!((8_000_000..9_000_000).contains(&bytes), "{drain}");
    assert!(number(&account["summary"]["tiers"][0]["in_bytes"]) < 9_000_000, "{account:#}");
    // The command slept for a second in which nothing was drained: the rate covers the rest of the time.
    let whole_ms = number(&account["command_ms"]) + number(&account["drain_ms"]);
    assert!(number(&drain["bytes_per_second"]) > bytes * 1000 / whole_ms, "{drain} in {whole_ms} ms");
}

/// Regression: the progress showed "0 B of 60 MiB" for a third of the time, because only complete files counted.
#[test]
fn progress_counts_bytes_within_a_file() {
    let Some(scene) = scene("report_progress") else { return };
    let command = scene.run_command(&["--drain-bytes-per-second-max", "2M"], "head -c 16777216 /dev/urandom > large");
    // Without `--no-progress`.
    let words: Vec<_> = command.get_args().filter(|word| *word != "--no-progress").map(ToOwned::to_owned).collect();
    let mut shown = scene.surgetank(&[]);
    shown.args(words);
    let ended = crate::scene::Running::of(command_in(&mut shown, "/mnt/project", &[])).ends().exits(0);
    let line =
        ended.stderr.lines().find(|line| line.contains("draining ")).unwrap_or_else(|| panic!("{}", ended.stderr));
    assert!(line.contains(" of 16.00 MiB, 0 of 1 files, ") && line.contains(" on average)"), "{line}");
    assert!(!line.contains("draining 0 B of"), "{line}");
}

/// Regression: the message named neither the file nor the data, and an exit code of 1 replaced the command's own.
#[test]
fn account_that_cannot_be_written_is_named_with_the_data() {
    let Some(scene) = scene("report_account") else { return };
    let full = [&SMALL[..], &["--json", "/dev/full"]].concat();
    let parts =
        ["--json: the account of the run cannot be written to /dev/full", "No space left", "  try:  `surgetank report"];
    let ended = scene.run(&full, "echo one > a").exits(1).says(&parts);
    ended.says(&["  data: everything that should be durable is in the store"]);
    scene.run(&full, "echo two > a; exit 7").exits(7).says(&parts);
    scene.holds("a", b"two\n");
}
