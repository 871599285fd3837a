//! Counting for the report, in arbitrary programs. Regressions: bytes that were counted twice, and counting that
//! harmed the program.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::fs;

use crate::scene::record::{SMALL, is_as_traced, number, record, small_scene as scene};
use serde_json::Value;

/// An appending descriptor is at the start until its first write, and at the end from then on. Regression: the whole
/// file was counted as written.
#[test]
fn append_counts_only_the_appended_bytes() {
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

/// C++ opens a FILE and then reads and writes its descriptor itself. Regression: both were counted.
#[test]
fn io_on_the_descriptor_of_a_stream_is_counted_once() {
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
    /* The next file gets the same descriptor number. */
    int d = open("other", O_CREAT | O_WRONLY, 0600); if (write(d, b, sizeof b) < 0) return 1;
    printf("by stdio\n"); fflush(stdout); if (write(1, "by hand\n", 8) < 0 || pwrite(1, "by stdio\n", 9, 0) < 0) return 1;
    return 0;
}
END
g++ -o c c.cc; gcc -w -o u u.c; ./c; ./u > u.text"#,
    );
}

/// Regression: buffered bytes went to another file than the one for which they were counted, and were counted there
/// too.
#[test]
fn buffered_bytes_of_a_moved_descriptor_are_counted_once() {
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

/// A program such as node closes descriptors past libc. Regression: pipes and sockets with a reused number counted as
/// the file's bytes.
#[test]
fn reused_descriptor_number_is_not_counted_as_the_file() {
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
    /* A child with its parent's memory opens a file over its parent's number, and the other way round. */
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

/// An inherited stream has one position for parent and child. Regression: each counted what the other wrote.
#[test]
fn write_to_an_inherited_stream_is_counted_once() {
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
    /* A stream to which only the parent writes, while a child runs. */
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

/// Regression: the record reported a program that ends with `_exit`, as every dash does, as killed. It left out the
/// bytes of the program's streams.
#[test]
fn end_by_underscore_exit_is_not_a_kill() {
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
    // (strace tests the kernel's abilities with children that it kills.)
    let is_cut = |process: &&Value| process["counted"] == "shim_cut_short" && process["program"] != "strace";
    let cut: Vec<&Value> = processes.iter().filter(is_cut).collect();
    assert!(cut.is_empty(), "{cut:#?}");
}

/// Compiles a C program into /mnt.
fn compiled(name: &str, source: &str) -> String {
    let (path, code) = (format!("/mnt/{name}"), format!("/mnt/{name}.c"));
    fs::write(&code, source).unwrap();
    crate::scene::succeed(std::process::Command::new("gcc").args(["-O1", "-w", "-pthread", "-o", &path, &code]));
    path
}

/// Regression: the count at the program's end read a stream that another thread was closing. The program died, and
/// its output was lost. (The test avoids `exit`: there libc itself flushes streams in use, which killed this program
/// about once in tens of thousands of runs.)
#[test]
fn stream_closed_by_another_thread_at_exit_is_harmless() {
    let Some(scene) = scene("shim_stream_threads") else { return };
    let program = compiled(
        "threads",
        r#"
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
static void *opens_and_closes(void *number) {
    char name[64];
    snprintf(name, sizeof name, "q%ld", (long)number);
    for (;;) {
        FILE *file = fopen(name, "r");
        if (file) { fgetc(file); fclose(file); }
    }
}
int main(int count, char **words) {
    pthread_t thread;
    for (long at = 0; at < 4; at++) {
        char name[64];
        snprintf(name, sizeof name, "q%ld", at);
        FILE *file = fopen(name, "w");
        fputs("hello", file);
        fclose(file);
    }
    for (long at = 0; at < 4; at++) pthread_create(&thread, 0, opens_and_closes, (void *)at);
    usleep(1000 + atoi(words[2]) * 37);
    printf("result\n");
    fflush(stdout);
    if (words[1][0] == 'x') execl("/bin/true", "true", (char *)0);
    _exit(0);
}
"#,
    );
    let script = format!(
        "for at in $(seq 150); do for how in end x; do result=$({program} $how $at) || {{ echo \"$how: $?\"; exit 1; }}
         [ \"$result\" = result ] || {{ echo \"$how: lost\"; exit 1; }}; done; done"
    );
    scene.run(&SMALL, &script).exits(0).prints("");
}

/// Regression: the program died of a stream whose memory was unmapped without libc.
#[test]
fn stream_with_unmapped_memory_at_exit_is_harmless() {
    let Some(scene) = scene("shim_stream_unmapped") else { return };
    let program = compiled(
        "unmapped",
        r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <malloc.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
int main(int count, char **words) {
    mallopt(M_MMAP_THRESHOLD, 64);
    FILE *file = fopen("f", "w");
    fputs("hello", file);
    int (*past_the_shim)(FILE *) = dlsym(dlopen("libc.so.6", RTLD_LAZY), "fclose");
    past_the_shim(file);
    open("g", O_CREAT | O_WRONLY, 0600);
    if (words[1][0] == 'x') execl("/bin/true", "true", (char *)0);
    return 0;
}
"#,
    );
    scene.run(&SMALL, &format!("{program} exit; {program} x")).exits(0).prints("");
    scene.holds("f", b"hello");
}

/// Regression: the shim read the first buffer before the kernel could refuse the vector, and the program died.
#[test]
fn vector_at_an_unmapped_address_is_refused() {
    let Some(scene) = scene("shim_vector_nowhere") else { return };
    let program = compiled(
        "vectors",
        r#"
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>
#define REFUSED(call) if (errno = 0, (call) != -1 || errno != EFAULT) return printf("%s: %d\n", #call, errno), 1;
int main(void) {
    int file = open("v", O_CREAT | O_RDWR, 0600);
    if (pwrite(file, "x", 1, 0) != 1) return 2;
    const struct iovec *nowhere = mmap(0, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REFUSED(readv(file, nowhere, 3))
    REFUSED(writev(file, nowhere, 3))
    REFUSED(preadv(file, nowhere, 3, 0))
    REFUSED(pwritev(file, nowhere, 3, 0))
    REFUSED(preadv64(file, nowhere, 3, 0))
    REFUSED(pwritev64(file, nowhere, 3, 0))
    REFUSED(preadv2(file, nowhere, 3, 0, 0))
    REFUSED(pwritev2(file, nowhere, 3, 0, 0))
    REFUSED(preadv64v2(file, nowhere, 3, -1, 0))
    REFUSED(pwritev64v2(file, nowhere, 3, -1, 0))
    return 0;
}
"#,
    );
    scene.run(&SMALL, &program).exits(0).prints("");
}

/// A third of a database's time is in fsync. Regression: the record said that it took none.
#[test]
fn time_in_fsync_is_counted() {
    let Some(scene) = scene("report_sync") else { return };
    let source = "#include <fcntl.h>\n#include <unistd.h>\nint main(void) { int f = open(\"out\", O_CREAT | O_WRONLY, 0600); for (int n = 0; n < 20; n++) { if (write(f, \"x\", 1) != 1) return 1; if (n % 2 ? fsync(f) : fdatasync(f)) return 2; } return close(f); }\n";
    std::fs::write("/mnt/w.c", source).unwrap();
    for (options, link, door) in
        [(vec![], "-O1", "shim"), (vec!["--no-preload"], "-O1", "mediated"), (vec![], "-static", "mediated")]
    {
        crate::scene::succeed(std::process::Command::new("gcc").args([link, "-o", "/mnt/syncs", "/mnt/w.c"]));
        scene.run(&[&SMALL[..], &options].concat(), "/mnt/syncs; rm out").exits(0);
        let record = record(&scene);
        let programs = record["programs"].as_array().unwrap();
        let io = &programs.iter().find(|program| program["program"] == "syncs").unwrap()["io"];
        assert_eq!(number(&io[door]["sync_calls"]), 20, "{door}: {io:#}");
        assert!(number(&io[door]["sync_us"]) > 0, "{door}: {io:#}");
        let all: u64 = io.as_object().unwrap().values().map(|io| number(&io["sync_calls"])).sum();
        assert_eq!(all, 20, "each call counts in one door: {io:#}");
    }
}

/// Regression: without a mount the record of a program without the shim had its name and no figures.
#[test]
fn programs_without_the_shim_are_counted_without_a_mount() {
    let Some(scene) = scene("report_seccomp") else { return };
    let source = "#include <fcntl.h>\n#include <unistd.h>\nint main(void) { static char b[100000]; int f = open(\"in\", O_RDONLY), t = open(\"out\", O_CREAT | O_WRONLY, 0600); ssize_t n; while ((n = read(f, b, sizeof b)) > 0) if (write(t, b, n) != n) return 1; return open(\"in\", O_RDONLY) < 0; }\n";
    fs::write("/mnt/w.c", source).unwrap();
    crate::scene::succeed(std::process::Command::new("gcc").args(["-static", "-o", "/mnt/copies", "/mnt/w.c"]));
    let script = "head -c 300000 /dev/zero > in; /mnt/copies; cat out > again";
    scene.run(&[&SMALL[..], &["--door", "seccomp"]].concat(), script).exits(0);
    let record = record(&scene);
    let io = |program: &str| {
        let mut those = record["programs"].as_array().unwrap().iter();
        those.find(|one| one["program"] == program).unwrap_or_else(|| panic!("{record:#}"))["io"].clone()
    };
    let copies = io("copies");
    let figures = |io: &Value| {
        ["read_opens", "write_opens", "create_opens", "estimated_read_bytes", "estimated_write_bytes", "read_bytes"]
            .map(|name| number(&io[name]))
    };
    assert_eq!(figures(&copies["seccomp"]), [2, 1, 1, 600_000, 300_000, 0], "{copies:#}");
    let cat = io("cat");
    assert_eq!(number(&cat["shim"]["read_bytes"]), 300_000, "{cat:#}");
    assert_eq!(
        figures(&cat["seccomp"]),
        [0; 6],
        "the program counts itself, and the agent does not count it again: {cat:#}"
    );
}
