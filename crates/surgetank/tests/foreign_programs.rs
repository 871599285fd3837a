//! Programs that cannot take the preload shim, or cannot load it from root's directories: other users' tasks, another
//! C library, sanitizers. They use the mount. A program that they start gets the shim again if it can take it.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::scene::{Scene, eventually};

fn scene(name: &str) -> Option<Scene> {
    let mut scene = Scene::new(name)?;
    scene.tier("fast", 64);
    Some(scene)
}

/// A home that only root can enter, and a private `/var/cache` for the test.
fn private_home() {
    fs::create_dir("/mnt/home").unwrap();
    fs::set_permissions("/mnt/home", fs::Permissions::from_mode(0o700)).unwrap();
    crate::scene::mount(&["-t", "tmpfs", "-o", "mode=0755", "tmpfs", "/var/cache"]);
}

/// Regression: the library was stored below root's home. At each exec by another user the loader complained that it
/// cannot be preloaded.
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
        crate::scene::Running::of(command)
    };
    // The first run ends while the second one still starts programs.
    let second = start("second", "while [ ! -e /mnt/go ]; do sleep 0.05; done");
    eventually("the second run has begun", || Path::new("/mnt/second-ready").exists());
    let first = start("first", "").ends().exits(0);
    fs::write("/mnt/go", "").unwrap();
    for ended in [first, second.ends().exits(0)] {
        let lines: Vec<_> = ended.stdout.lines().collect();
        assert!(lines.len() == 3 && lines[0] == "of root" && lines[1] != "0" && lines[2] == "of root", "{lines:?}");
        assert!(!ended.stderr.contains("preloaded"), "{}", ended.stderr);
    }
    // The library stays: programs that outlive their run load it by its name.
    assert_eq!(fs::read_dir("/var/cache/surgetank").unwrap().count(), 1);
}

/// Prints whether its work succeeded and whether it has the shim.
const TRIES: &str = r#"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
int main(int count, char **words)
{
    char line[4096], *name = words[count - 1];
    struct stat out;
    FILE *file = fopen(name, "w"), *maps = fopen("/proc/self/maps", "r");
    fprintf(file, "%s\n", name);
    if (fclose(file) || stat(name, &out) || out.st_size != (off_t)strlen(name) + 1)
        return 9;
    int has = 0;
    while (fgets(line, sizeof line, maps))
        has |= strstr(line, "/libsurgetank-") != NULL;
    fclose(maps);
    printf("%s %s\n", name, has && getenv("SURGETANK_SHIM") ? "with" : "without");
    fflush(stdout);
    return 0;
}
"#;

/// Whether the compiler of another C library is installed.
fn has_musl(scene: &Scene) -> bool {
    let has = scene.command("musl-gcc").arg("--version").output().is_ok_and(|output| output.status.success());
    assert!(has || std::env::var_os("CI").is_none(), "musl-gcc is missing: scripts/setup test installs it");
    has
}

fn compiled(scene: &Scene, compiler: &str, options: &[&str], name: &str) -> String {
    let (code, program) = ("/mnt/tries.c", format!("/mnt/{name}"));
    fs::write(code, TRIES).unwrap();
    let made = scene.command(compiler).args(options).args(["-O1", "-o", &program, code]).output();
    assert!(made.as_ref().is_ok_and(|made| made.status.success()), "{compiler}: {made:?} (scripts/setup test)");
    program
}

/// Regression: musl's loader ended such programs with 127, and AddressSanitizer's runtime with 1, also when
/// `--preload-skip` named them.
#[test]
fn foreign_program_runs_first_or_under_the_shim() {
    let Some(scene) = scene("foreign_first") else { return };
    for (name, compiler, options) in [
        ("musl", "musl-gcc", &[][..]),
        ("static", "musl-gcc", &["-static"]),
        ("address", "cc", &["-fsanitize=address"]),
        ("thread", "cc", &["-fsanitize=thread"]),
        ("plain", "cc", &[]),
    ] {
        if compiler == "musl-gcc" && !has_musl(&scene) {
            eprintln!("skipped: no musl-gcc");
            continue;
        }
        let program = compiled(&scene, compiler, options, name);
        // Also in the served directory, where the program is found only through the mount.
        let has = if matches!(name, "plain" | "musl") { "with" } else { "without" };
        let script = format!(
            "cp {program} bin-{name}; printf '#!/mnt/project/bin-{name}\\n' >script-{name}; chmod +x script-{name}
            {program} a-{name}; ./bin-{name} b-{name}; env {program} c-{name}; (exec {program} d-{name})
            PATH=/mnt/project:$PATH bin-{name} e-{name}; ./script-{name} f-{name}; sh -c '{program} g-{name}; :'"
        );
        let printed: String = ('a'..='g').map(|at| format!("{at}-{name} {has}\n")).collect();
        for door in ["fuse", "seccomp"] {
            scene.run(&["--door", door], &script).exits(0).prints(&printed);
            scene.holds(&format!("g-{name}"), format!("g-{name}\n").as_bytes());
        }
        // As the first program, by path, by name, and from the directory.
        for first in [program.as_str(), name, &format!("./bin-{name}")] {
            let words =
                ["run", "--over", "/mnt/project", "--state", "/mnt/state", "--no-progress", "--preload-skip", name];
            let mut command = scene.surgetank(&words);
            command.args(["--tier", "fast=/mnt/tier-fast:64M", "--", first, "first"]);
            command.env("PATH", format!("/mnt:{}", std::env::var("PATH").unwrap()));
            let ended = crate::scene::Running::of(command).ends().exits(0);
            assert_eq!(ended.stdout, format!("first {has}\n"), "{first}");
            scene.holds("first", b"first\n");
        }
    }
}

/// Each of libc's functions that start a program. A program that another C library's program starts has the shim
/// again.
#[test]
fn foreign_program_is_started_by_every_exec() {
    let Some(scene) = scene("foreign_execs") else { return };
    let program = compiled(&scene, "cc", &["-fsanitize=address"], "address");
    let plain = compiled(&scene, "cc", &[], "plain");
    let starter = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
extern char **environ;
#ifndef __GLIBC__ /* musl has none */
#define execveat(dir, path, given, environ, flags) execve(program, given, environ)
#endif
int main(int count, char **words)
{
    for (int way = 0; way < 13; way++) {
        char name[10], *program = words[1], *given[] = {"address", name, NULL};
        pid_t child = -1;
        sprintf(name, "way-%d", way);
        if (way == 11 && posix_spawn(&child, program, NULL, NULL, given, environ)) return 2;
        if (way == 12 && posix_spawnp(&child, "address", NULL, NULL, given, environ)) return 3;
        if (way < 11 && !(child = way % 2 ? vfork() : fork())) {
            int file = open(program, O_RDONLY), dir = open("/mnt", O_RDONLY | O_DIRECTORY);
            switch (way) {
            case 0: execve(program, given, environ); break;
            case 1: execv(program, given); break;
            case 2: execvp("address", given); break;
            case 3: execvpe("address", given, environ); break;
            case 4: execl(program, "address", name, NULL); break;
            case 5: execlp("address", "address", name, NULL); break;
            case 6: execle(program, "address", name, NULL, environ); break;
            case 7: fexecve(file, given, environ); break;
            case 8: execveat(AT_FDCWD, program, given, environ, 0); break;
            case 9: execveat(dir, "address", given, environ, 0); break;
            case 10: execveat(file, "", given, environ, AT_EMPTY_PATH); break;
            }
            _exit(99);
        }
        int status = -1;
        if (waitpid(child, &status, 0) != child || status) printf("way %d: %x\n", way, status);
    }
    fflush(stdout);
    return execl(words[2], "plain", "after", NULL);
}
"#;
    fs::write("/mnt/starter.c", starter).unwrap();
    let compilers = if has_musl(&scene) { &["cc", "musl-gcc"][..] } else { &["cc"] };
    for compiler in compilers {
        let options = ["-O1", "-w", "-o", "/mnt/starter", "/mnt/starter.c"];
        crate::scene::succeed(scene.command(compiler).args(options));
        let mut command = scene.run_command(&[], &format!("exec /mnt/starter {program} {plain}"));
        command.env("PATH", format!("/mnt:{}", std::env::var("PATH").unwrap()));
        let ended = crate::scene::Running::of(command).ends().exits(0);
        let expected: String = (0..13).map(|way| format!("way-{way} without\n")).collect();
        assert_eq!(ended.stdout, format!("{expected}after with\n"), "{compiler}: {}", ended.stderr);
    }
}

/// Another preloaded library stays when the shim is removed from `LD_PRELOAD`.
#[test]
fn other_preloaded_libraries_stay_with_foreign_programs() {
    let Some(scene) = scene("foreign_others") else { return };
    let asked = compiled(&scene, "cc", &["-fsanitize=undefined"], "undefined");
    fs::write("/mnt/other.c", "__attribute__((constructor)) static void start(void) { }\n").unwrap();
    crate::scene::succeed(scene.command("cc").args(["-shared", "-fPIC", "-o", "/mnt/other.so", "/mnt/other.c"]));
    fs::write("/mnt/fake.c", "void __asan_nothing(void) { }\n").unwrap();
    let options = ["-shared", "-fPIC", "-Wl,-soname,libasan.so.77", "-o", "/mnt/libasan.so.77", "/mnt/fake.c"];
    crate::scene::succeed(scene.command("cc").args(options));
    let needs = ["-Wl,--no-as-needed", "-Wl,-rpath,/mnt", "-o", "/mnt/needs", "/mnt/tries.c", "/mnt/libasan.so.77"];
    crate::scene::succeed(scene.command("cc").args(needs));
    let script = format!("{asked} a; /mnt/needs b; grep -c other.so /proc/self/maps >/dev/null && echo stays");
    let mut command = scene.run_command(&[], &script);
    command.env("LD_PRELOAD", "/mnt/other.so");
    crate::scene::Running::of(command).ends().exits(0).prints("a with\nb without\nstays\n");
    // The first program.
    let words = ["run", "--over", "/mnt/project", "--state", "/mnt/state", "--no-progress", "--", "/mnt/needs", "c"];
    let mut command = scene.surgetank(&words);
    command.env("LD_PRELOAD", "/mnt/other.so").env("SURGETANK_TIERS", "fast=/mnt/tier-fast:64M");
    crate::scene::Running::of(command).ends().exits(0).prints("c without\n");
}

/// The loader drops the library from a set-user-id program. The program then finds the same files through the mount,
/// with its owner's rights.
#[test]
fn set_user_id_program_uses_the_mount() {
    let Some(scene) = scene("foreign_set_ids") else { return };
    let script = "install -o 1000 -m 4755 /bin/cp /mnt/copies; install -d -m 777 shared; chmod 755 .
        echo of root >shared/from
        /mnt/copies shared/from shared/to
        stat -c %u shared/to; cat shared/to";
    let ended = scene.run(&[], script).exits(0).prints("1000\nof root\n");
    assert!(!ended.stderr.contains("preloaded"), "{}", ended.stderr);
    scene.holds("shared/to", b"of root\n");
    scene.is_clean();
}
