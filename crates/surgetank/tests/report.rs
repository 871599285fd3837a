//! The record of a run says what its programs did: byte for byte what strace saw of them, whoever they are and however they end.
#![allow(clippy::unwrap_used, reason = "in a test that is how it fails")]

mod scene;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use scene::{MIB, Scene};
use serde_json::Value;

/// Files are known to be small, so whoever writes one has it directly.
const SMALL: [&str; 2] = ["--config", "/mnt/small.toml"];

fn scene(name: &str) -> Option<Scene> {
    let mut scene = Scene::new(name)?;
    scene.tier("fast", 512);
    fs::write("/mnt/small.toml", "[[rules]]\nmatch = \"**\"\nsize = \"16M\"\n").unwrap();
    Some(scene)
}

/// The newest record.
#[track_caller]
fn record(scene: &Scene) -> Value {
    scene.verb("report", &["--json"]).exits(0).json()
}

fn records(scene: &Scene) -> Vec<Value> {
    scene.verb("report", &["--list", "--json"]).exits(0).json().as_array().unwrap().clone()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("no number: {value}"))
}

/// Bytes read and written by processes of that name (all: ""), in these doors.
fn moved(record: &Value, program: &str, doors: &[&str]) -> (u64, u64) {
    let mut sum = (0, 0);
    for process in record["processes"].as_array().unwrap() {
        if program.is_empty() || process["program"] == program {
            for door in doors {
                sum.0 += number(&process["io"][door]["read_bytes"]);
                sum.1 += number(&process["io"][door]["write_bytes"]);
            }
        }
    }
    sum
}

const COUNTED: [&str; 3] = ["shim", "passthrough", "mediated"];

/// What strace saw (`-ff -y`, one file a process) on files below these directories.
fn traced(logs: &Path, below: &[&str]) -> (u64, u64) {
    let mut sum = (0, 0);
    for log in fs::read_dir(logs).unwrap().flatten() {
        for line in fs::read_to_string(log.path()).unwrap().lines() {
            let (Some((call, rest)), Some((_, answer))) = (line.split_once('('), line.rsplit_once(" = ")) else {
                continue;
            };
            let Ok(bytes) = answer.split_whitespace().next().unwrap_or("").parse::<u64>() else { continue };
            let paths: Vec<&str> =
                rest.split('<').skip(1).filter_map(|part| part.split_once('>')).map(|part| part.0).collect();
            let ours = |at: usize| paths.get(at).is_some_and(|path| below.iter().any(|dir| path.starts_with(dir)));
            let (reads, writes) = match call.trim() {
                "read" | "pread64" | "readv" | "preadv" | "preadv2" => (ours(0), false),
                "write" | "pwrite64" | "writev" | "pwritev" | "pwritev2" => (false, ours(0)),
                "sendfile" => (ours(1), ours(0)),
                "copy_file_range" | "splice" => (ours(0), ours(1)),
                _ => continue,
            };
            sum.0 += if reads { bytes } else { 0 };
            sum.1 += if writes { bytes } else { 0 };
        }
    }
    sum
}

/// Runs the script with strace around it and compares.
#[track_caller]
fn is_as_traced(scene: &Scene, name: &str, script: &str) -> Value {
    let logs = PathBuf::from(format!("/mnt/trace-{name}"));
    fs::create_dir(&logs).unwrap();
    fs::write("/mnt/script.sh", format!("set -eu\n{script}")).unwrap();
    let calls =
        "read,pread64,readv,preadv,preadv2,write,pwrite64,writev,pwritev,pwritev2,sendfile,copy_file_range,splice";
    let traced_run = format!(
        "exec strace -ff -y -s 0 -e trace={calls} -e signal=none -o {}/log bash /mnt/script.sh",
        logs.display()
    );
    scene.run(&SMALL, &traced_run).exits(0);
    let record = record(scene);
    let told = moved(&record, "", &COUNTED);
    let true_bytes = traced(&logs, &["/mnt/tier-fast/", "/mnt/project/"]);
    assert!(true_bytes.0 + true_bytes.1 > 0, "{name}: strace saw nothing");
    for (what, told, is) in [("read", told.0, true_bytes.0), ("written", told.1, true_bytes.1)] {
        let off = told.abs_diff(is);
        println!("{name}: {what}: recorded {told}, strace {is}");
        assert!(off * 100 <= is, "{name}: {what}: recorded {told}, strace saw {is}\n{:#}", record["programs"]);
    }
    record
}

#[test]
fn byte_totals_are_what_strace_saw() {
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
gcc -o s s.c; ./s > s.said; ./s >> s.said; wc -c s.out s.said"#,
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
    // Children that write to the shell's own standard output, streams that are inherited, moved and left to the end.
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
awk 'BEGIN { for (i = 0; i < 3000; i++) print i > "v.awk"; system("echo q"); print "end" }' > v.said
sort v.awk > v.sorted; (echo a; cat v.awk; printf b) > v.mixed; sed -i s/1/2/ v.mixed"#,
    );
    let record = run(
        "gdal",
        "/usr/bin/python3 -c \"open('x.asc','w').write('ncols 200\\nnrows 200\\nxllcorner 0\\nyllcorner 0\\ncellsize 1\\n' + ('\\n'.join(' '.join(str(i*j%250) for i in range(200)) for j in range(200))))\"; gdal_translate -q -of GTiff x.asc y.tif; gdal_translate -q -co COMPRESS=DEFLATE y.tif z.tif; gdalinfo -checksum z.tif > info",
    );
    assert_eq!(record["exit"], 0);
}

/// A descriptor that appends is at the front until it writes, and at the end from there on: all of the file was counted.
#[test]
fn what_a_file_had_before_it_was_appended_to_was_counted_as_written() {
    let Some(scene) = scene("report_append") else { return };
    is_as_traced(
        &scene,
        "append",
        r#"cat > a.c <<'END'
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>
int main(int count, char **words) {
    char b[1000];
    FILE *f = fopen("log", "a+");
    fputs("not read\n", f); fclose(f);
    f = fopen("log", "a+");
    if (!fread(b, 1, sizeof b, f)) return 1;
    fseek(f, 0, SEEK_CUR); fputs("read before\n", f); fflush(f); fputs("and again\n", f);
    fseek(f, 100, SEEK_SET); if (!fread(b, 1, 10, f)) return 1;
    fclose(f);
    int d = open("log", O_WRONLY | O_APPEND);
    f = fdopen(d, "w"); fputs("by descriptor\n", f); if (write(d, b, 10) != 10) return 1; fclose(f);
    f = fopen("log", "a"); fputs("left to exit\n", f);
    return 0;
}
END
gcc -o a a.c; head -c 4000000 /dev/zero > log
for n in $(seq 20); do echo "line $n" >> log; done
{ echo one; sh -c 'echo two'; /bin/echo three; (echo four); } >> log
./a; ./a >> log; stdbuf -o0 printf '%s\n' five >> log; exec >> log; echo six; (echo seven); cat a.c; echo eight"#,
    );
}

/// C++ opens a FILE and then reads and writes its descriptor by itself: both were counted.
#[test]
fn what_a_program_moved_on_the_descriptor_under_a_stream_was_counted_twice() {
    let Some(scene) = scene("report_under") else { return };
    is_as_traced(
        &scene,
        "under",
        r#"cat > c.cc <<'END'
#include <fstream>
#include <string>
int main() {
    std::string line(1000, 'x');
    { std::ofstream out("c.out"); for (int n = 0; n < 3000; n++) out << line << '\n'; }
    std::ifstream in("c.out");
    for (int n = 0; n < 50; n++) { in.seekg(n * 20000); std::getline(in, line); }
    in.seekg(0); while (std::getline(in, line)) {}
    std::fstream both("c.out"); both.seekg(500); both.get(); both.seekp(2000000); both << "here";
    std::ofstream("c.out", std::ios::app) << "at the end";
}
END
cat > u.c <<'END'
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>
#include <sys/uio.h>
int main(void) {
    static char b[200000];
    FILE *f = fopen("u.out", "w+");
    fputs("before\n", f); fflush(f);
    for (int n = 0; n < 10; n++) if (write(fileno(f), b, sizeof b) < 0) return 1;
    fputs("after\n", f); fflush(f);
    if (pwrite(fileno(f), b, 1000, 0) < 0) return 1;
    rewind(f); lseek(fileno(f), 0, SEEK_SET); if (read(fileno(f), b, sizeof b) < 0) return 1;
    fclose(f);
    f = fopen("hole", "w"); lseek(fileno(f), 1l << 30, SEEK_SET); fputc('x', f); fclose(f);
    f = fopen("closed", "w"); fputs("flushed\n", f); fflush(f); close(fileno(f));
    /* Its number is another file's now. */
    int d = open("other", O_CREAT | O_WRONLY, 0600); if (write(d, b, sizeof b) < 0) return 1;
    printf("by stdio\n"); fflush(stdout); if (write(1, "by hand\n", 8) < 0 || pwrite(1, "by stdio\n", 9, 0) < 0) return 1;
    return 0;
}
END
g++ -o c c.cc; gcc -w -o u u.c; ./c; ./u > u.said"#,
    );
}

/// What waited to be written went to another file than the one in which it was counted, too.
#[test]
fn what_waited_to_be_written_when_its_descriptor_became_another_file_was_counted_twice() {
    let Some(scene) = scene("report_moved") else { return };
    is_as_traced(
        &scene,
        "moved",
        r#"cat > m.c <<'END'
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>
int main(void) {
    for (int n = 0; n < 500; n++) printf("hello");
    dup2(open("m.two", O_CREAT | O_WRONLY, 0600), 1);
    for (int n = 0; n < 500; n++) printf("world");
    FILE *f = fopen("m.three", "w");
    for (int n = 0; n < 500; n++) fputs("hello", f);
    dup2(open("m.four", O_CREAT | O_WRONLY, 0600), fileno(f));
    for (int n = 0; n < 500; n++) fputs("world", f);
    fclose(f);
    fflush(stdout); close(1); open("m.five", O_CREAT | O_WRONLY, 0600); printf("number one again\n");
    return 0;
}
END
gcc -w -o /mnt/m m.c; rm m.c; /mnt/m > m.one"#,
    );
}

/// Numbers of descriptors that were closed past libc, as node does, were believed to be the files that had them.
#[test]
fn pipes_and_sockets_with_the_number_of_a_file_were_counted_as_its_bytes() {
    let Some(scene) = scene("report_numbers") else { return };
    is_as_traced(
        &scene,
        "numbers",
        r#"cat > /mnt/n.c <<'END'
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
static char b[100000];
static void moves(int from, int to, int times) {
    for (int n = 0; n < times; n++) if (write(to, b, 50000) != 50000 || read(from, b, 50000) != 50000) exit(1);
    syscall(SYS_close, from); syscall(SYS_close, to);
}
static void leaves_numbers(void) {
    int files[8];
    for (int n = 0; n < 8; n++) { files[n] = open("numbers", O_CREAT | O_WRONLY, 0600); if (write(files[n], b, 10) != 10) exit(1); }
    for (int n = 0; n < 8; n++) syscall(SYS_close, files[n]);
}
int main(void) {
    int two[2];
    leaves_numbers(); pipe(two); moves(two[0], two[1], 20);
    leaves_numbers(); pipe2(two, O_CLOEXEC); moves(two[0], two[1], 20);
    leaves_numbers(); socketpair(AF_UNIX, SOCK_STREAM, 0, two); moves(two[0], two[1], 20);
    leaves_numbers(); syscall(SYS_pipe2, two, 0); two[1] = fcntl(two[1], F_DUPFD, 5); two[0] = dup(two[0]); moves(two[0], two[1], 20);
    leaves_numbers(); long one = 1; int e = eventfd(0, 0); for (int n = 0; n < 1000; n++) if (write(e, &one, 8) != 8) return 1;
    /* A child that has its parent's memory opens a file over its parent's number, and the other way round. */
    pipe(two); dup2(two[1], 90); if (write(90, b, 1) != 1) return 1;
    int kept = open("kept", O_CREAT | O_WRONLY, 0600); dup2(kept, 91); if (write(91, b, 1000) != 1000) return 1;
    FILE *f = fopen("stream", "w"); fputs("stream", f);
    if (!vfork()) { dup2(open("vforked", O_CREAT | O_WRONLY, 0600), 90); write(90, b, 100); close(91); close(fileno(f)); _exit(0); }
    wait(0);
    moves(two[0], 90, 20);
    if (write(91, b, 1000) != 1000) return 1;
    fclose(f);
    return 0;
}
END
gcc -w -O1 -o /mnt/n /mnt/n.c; /mnt/n"#,
    );
}

/// A stream that a child inherits has one position for both, and each counted what the other wrote.
#[test]
fn what_a_child_wrote_to_a_stream_of_its_parents_was_counted_in_both() {
    let Some(scene) = scene("report_inherited") else { return };
    is_as_traced(
        &scene,
        "inherited",
        r#"cat > i.c <<'END'
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
static char b[100000];
int main(void) {
    FILE *f = fopen("one", "w"), *kept = fopen("kept", "w");
    fwrite(b, 1, sizeof b, f); fflush(f);
    for (int n = 0; n < 3; n++) { if (!fork()) { fwrite(b, 1, sizeof b, f); exit(0); } wait(0); }
    for (int n = 0; n < 3; n++) { if (!fork()) { fwrite(b, 1, 50000, f); fflush(f); fclose(kept); _exit(0); } wait(0); }
    fwrite(b, 1, sizeof b, f); fclose(f);
    /* And one that the parent alone goes on with, while there is a child. */
    for (int n = 0; n < 3; n++) {
        if (!fork()) { usleep(20000); _exit(0); }
        fwrite(b, 1, 70000, kept);
    }
    while (wait(0) > 0) {}
    fwrite(b, 1, 70000, kept);
    return 0;
}
END
gcc -w -o i i.c; ./i"#,
    );
}

/// A program that ends with _exit, as every dash does, was told of as killed, and what its streams had moved was not counted.
#[test]
fn an_end_by_exit_without_destructors_was_taken_for_a_kill() {
    let Some(scene) = scene("report_exit") else { return };
    let record = is_as_traced(
        &scene,
        "exit",
        r#"cat > /mnt/e.c <<'END'
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
static char b[100000];
int main(void) {
    void (*ends[3])(int) = {_exit, _Exit, quick_exit};
    for (int n = 0; n < 3; n++) {
        FILE *f = fopen("flushed", "w");
        if (!fork()) {
            f = fopen("by-child", "w"); fwrite(b, 1, sizeof b, f); fflush(f); fputs("never written", f);
            ends[n](0);
        }
        wait(0);
        if (!vfork()) ends[n](0);
        wait(0);
        fwrite(b, 1, sizeof b, f); fclose(f);
    }
    FILE *f = fopen("flushed", "w"); fwrite(b, 1, sizeof b, f); fflush(f); fputs("never written", f);
    _exit(0);
}
END
gcc -w -o /mnt/e /mnt/e.c; /mnt/e; dash -c 'echo a > f; (echo b > g); cat f g > h'"#,
    );
    let processes = record["processes"].as_array().unwrap();
    assert!(processes.iter().filter(|process| process["program"] == "e").count() == 4, "{record:#}");
    assert!(processes.iter().any(|process| process["program"] == "dash"), "{record:#}");
    // (strace tries out what the kernel can, with children that it kills.)
    let is_cut = |process: &&Value| process["counted"] == "shim_cut_short" && process["program"] != "strace";
    let cut: Vec<&Value> = processes.iter().filter(is_cut).collect();
    assert!(cut.is_empty(), "{cut:#?}");
}

#[test]
fn a_static_program_is_told_by_estimate_and_never_as_counted() {
    let Some(scene) = scene("report_static") else { return };
    fs::write("/mnt/w.c", "#include <fcntl.h>\n#include <unistd.h>\nint main(void) { static char b[100000]; int f = open(\"out\", O_CREAT | O_WRONLY, 0644); for (int n = 0; n < 30; n++) if (write(f, b, sizeof b) < 0) return 1; return close(f); }\n").unwrap();
    scene::succeed(std::process::Command::new("gcc").args(["-static", "-o", "/mnt/w", "/mnt/w.c"]));
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
fn what_a_killed_program_did_is_there_and_a_fork_counts_for_itself() {
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
    assert_eq!(counted, (&"shim_cut_short".into(), &"shim".into()), "killed, and gone on as bash");
    assert!(pythons.iter().all(|process| process["ended_us"].is_u64()), "{pythons:#?}");
    // After its exec the child is another program's process with the same number.
    let bash = record["processes"]
        .as_array()
        .unwrap()
        .iter()
        .find(|process| process["pid"] == pythons[1]["pid"] && process["program"] == "bash");
    assert!(bash.is_some(), "{record:#}");
    // The last kill was the command's own end for the shell around it.
    assert_eq!(record["command_exit"], 0);
}

#[test]
fn two_runs_at_once_are_kept_apart() {
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
fn an_agent_that_is_replaced_goes_on_with_the_record() {
    let Some(scene) = scene("report_replaced") else { return };
    let script = "dd if=/dev/zero of=a bs=1000 count=100 status=none; touch /mnt/first; while [ ! -e /mnt/go ]; do sleep 0.05; done; dd if=/dev/zero of=b bs=1000 count=50 status=none";
    let run = scene.start(&SMALL, script);
    scene::eventually("the first half", || Path::new("/mnt/first").exists());
    // What it had counted by now is written down every two seconds.
    let noted = || {
        fs::read_dir(&scene.state).into_iter().flatten().flatten().any(|place| {
            let text = fs::read_to_string(place.path().join("runs/now-1.json")).unwrap_or_default();
            text.contains("\"dd\"")
        })
    };
    scene::eventually("it is noted", noted);
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
fn a_failed_run_has_a_record_that_says_so_and_only_its_user_reads_it() {
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
    let told = other.output().unwrap();
    assert!(!told.status.success() && told.stdout.is_empty(), "{told:?}");
}

#[test]
fn a_state_directory_that_is_full_does_not_fail_the_run() {
    let Some(mut scene) = scene("report_full") else { return };
    scene.state = scene.tmpfs("small-state", 24);
    fs::set_permissions(&scene.state, fs::Permissions::from_mode(0o700)).unwrap();
    let script = "dd if=/dev/zero of=/mnt/small-state/filler bs=64k status=none 2>/dev/null || true; sleep 3; rm -f /mnt/small-state/filler; dd if=/dev/zero of=a bs=1000 count=100 status=none";
    scene.run(&SMALL, script).exits(0);
    assert_eq!(fs::metadata(scene.path("a")).unwrap().len(), 100_000);
    // And one where the records cannot be put at all.
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
    let mut big = scene::noise(3, 3 * MIB);
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
