//! Hints that are asked at operations: earlier contents, readers that wait, shares of the drain. Through every door.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::fs;
use std::time::Duration;

use crate::scene::{Scene, eventually};

const WORDS: &str = r#"
    ask() { verb=$1; shift; /mnt/surgetank $verb --state /mnt/state "$@"; }
    value() { getfattr --only-values -n user.surgetank.$2 "$1"; }
    show() { for file in "$@"; do printf '%s:%s ' "$file" "$(head -c 20 "$file" 2>&1)"; done; echo; }
"#;

fn prepare(name: &str) -> Option<Scene> {
    let mut scene = Scene::new(name)?;
    scene.tier("fast", 64);
    scene.beside("beside");
    fs::write(scene.path("surgetank.toml"), "[[rules]]\nmatch = \"*.ckpt\"\nversions = 2\n").unwrap();
    Some(scene)
}

fn names(scene: &Scene) -> Vec<String> {
    scene.store_files().into_keys().map(|path| path.to_string_lossy().into_owned()).collect()
}

fn keep_earlier_contents(name: &str, options: &[&str]) {
    let Some(scene) = prepare(name) else { return };
    fs::write(scene.path("stored"), "of the store").unwrap();
    let script = format!(
        r#"{WORDS}
        ask hint versions=3 f g h p stored t
        for n in 1 2 3 4; do echo $n >f; done
        show f f.~*~
        python3 - <<'P'
import os
with open("g", "wb") as file: file.write(b"a" * 3000000)
os.chmod("g", 0o640); os.utime("g", (1000000000, 1000000000))
with open("g", "r+b") as file: file.seek(5); file.write(b"b")
os.truncate("g", 10)
with open("g", "ab") as file:
    for n in range(3): file.write(b"c"); file.flush()
stat = os.stat("g.~2~")
print(open("g.~2~", "rb").read() == b"aaaaab" + b"a" * 2999994, oct(stat.st_mode & 0o777), open("g.~1~").read())
P
        for n in 1 2 3 4; do echo $n >h.part; mv h.part h; done
        show h h.~*~
        # A rule, a hint of a directory, a file that only the store has, an earlier content that a program changes.
        for n in 1 2 3; do echo $n >a.ckpt; done
        show a.ckpt a.ckpt.~*~
        mkdir d; setfattr -n user.surgetank.hint.versions -v 2 d; echo 1 >d/x; echo 2 >d/x; echo 0 >d/x.~1~; echo 3 >d/x
        show d/x d/x.~*~; ls d
        echo new >stored
        show stored stored.~1~
        # What was never complete, or was removed, is not kept. Nor is an empty file.
        : >p; echo 1 >p; rm p; echo 2 >p; ls p.~1~ 2>&1 | grep -c 'No such'
        ask hint mode=remove t; echo 1 >t; echo 2 >t; show t.~1~
        # Back to an earlier content; touched, and by another name; a content of another user is not replaced.
        ask hint versions=3 r; for n in 1 2 3; do echo $n >r; done; mv r.~1~ r; show r r.~*~; echo 4 >r; show r r.~*~
        touch r; touch r; show r r.~*~
        mkdir -m 1777 shared; ask hint versions=3 shared/u; echo other >shared/u.~1~; chown 65534 shared/u.~1~
        echo 1 >shared/u; echo 2 >shared/u; show shared/u shared/u.~*~
        mkdir closed; echo 1 >closed/v; chown 65534 closed/v; ask hint versions=2 closed/v; echo 2 >closed/v; ls closed
        ask why f | grep versions
        "#
    );
    let ended = scene.run(options, &script).exits(0);
    let expected = "f:4 f.~1~:3 f.~2~:2 \n\
        True 0o640 aaaaabaaaa\n\
        h:4 h.~1~:3 h.~2~:2 \n\
        a.ckpt:3 a.ckpt.~1~:2 \n\
        d/x:3 d/x.~1~:2 \nx\nx.~1~\n\
        stored:new stored.~1~:of the store \n\
        1\n\
        t.~1~:1 \n\
        r:2 r.~2~:1 \nr:4 r.~1~:2 r.~2~:1 \n\
        r:4 r.~1~:4 r.~2~:2 \n\
        shared/u:2 shared/u.~1~:other \n\
        v\n";
    assert!(ended.stdout.starts_with(expected), "{}\n{}", ended.stdout, ended.stderr);
    assert!(ended.stdout[expected.len()..].contains("versions=3 of the file\n"), "{}", ended.stdout);
    drop(ended);
    assert_eq!(
        names(&scene),
        [
            "a.ckpt",
            "a.ckpt.~1~",
            "closed/v",
            "d/x",
            "d/x.~1~",
            "f",
            "f.~1~",
            "f.~2~",
            "g",
            "g.~1~",
            "g.~2~",
            "h",
            "h.~1~",
            "h.~2~",
            "p",
            "r",
            "r.~1~",
            "r.~2~",
            "shared/u",
            "shared/u.~1~",
            "stored",
            "stored.~1~",
            "surgetank.toml"
        ]
    );
    assert_eq!(fs::read_to_string(scene.path("stored.~1~")).unwrap(), "of the store");
    assert_eq!(fs::read_to_string(scene.path("h.~2~")).unwrap(), "2\n");
    scene.is_clean();
}

#[test]
fn earlier_contents_are_kept_through_the_mount() {
    keep_earlier_contents("versions-mount", &["--no-preload"]);
}

#[test]
fn earlier_contents_are_kept_with_the_shim() {
    keep_earlier_contents("versions-shim", &[]);
}

#[test]
fn earlier_contents_are_kept_without_a_mount() {
    keep_earlier_contents("versions-seccomp", &["--door", "seccomp", "--no-preload"]);
}

/// The kernel knows names and listings that the agent changes.
#[test]
fn program_that_knows_the_names_sees_the_newest_contents() {
    let Some(scene) = prepare("versions-cached") else { return };
    let script = format!(
        r#"{WORDS}
        mkdir d; ask hint versions=3 d/f
        python3 - <<'P'
import os
kept = ["d/f.~1~", "d/f.~2~", "d/f.~3~"]
for n in range(30):
    seen = [open(name).read() for name in kept if os.path.exists(name)]
    assert seen == [str(m) for m in range(n - 2, max(n - 4, -1), -1)][:2], (n, seen)
    assert sorted(os.listdir("d")) == sorted((["f"] if n else []) + [name[2:] for name in kept[:len(seen)]]), n
    with open("d/f", "w") as file: file.write(str(n))
P
        # A program gives a file the name of an earlier content.
        echo one >h; ln h d/f.~3~; cat d/f.~3~; ask hint versions=5 d/f; echo new >d/f; show d/f.~1~ d/f.~4~
        # By a rename: the kernel knows it by that, so it keeps the name.
        echo g >g; mv g d/f.~1~; cat d/f.~1~; echo newer >d/f; show d/f d/f.~1~ d/f.~2~
        ask status --json | grep -o 'a program has renamed a file to f.~1~' | head -n 1
        "#
    );
    let ended = scene.run(&["--no-preload"], &script).exits(0);
    let expected =
        "one\nd/f.~1~:29 d/f.~4~:one \ng\nd/f:newer d/f.~1~:g d/f.~2~:28 \na program has renamed a file to f.~1~\n";
    assert_eq!(ended.stdout, expected, "{}", ended.stderr);
}

/// Programs that write at once: each earlier content is one that was complete, and no two are the same version.
#[test]
fn writers_at_once_keep_whole_contents() {
    let Some(scene) = prepare("versions-writers") else { return };
    let script = format!(
        r#"{WORDS}
        ask hint versions=9 f
        python3 - <<'P'
import os, sys
children = []
for who in range(4):
    if (child := os.fork()) == 0:
        for n in range(12):
            name = f"part{{who}}"
            with open(name, "wb") as file: file.write(f"{{who}}.{{n}};".encode() * 50000)
            os.rename(name, "f")
        os._exit(0)
    children.append(child)
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
seen = set()
for name in ["f"] + [f"f.~{{n}}~" for n in range(1, 9)]:
    content = open(name, "rb").read()
    first = content[:content.index(b";") + 1]
    assert content == first * 50000, (name, first, len(content))
    seen.add(first)
assert len(seen) == 9, seen
assert not os.path.exists("f.~9~") and not os.path.exists("f.~0~")
P
        "#
    );
    scene.run(&[], &script).exits(0);
    scene.is_clean();
}

/// Whenever the agent is killed: each content is kept once, in its order.
fn keep_contents_while_agents_die(name: &str, options: &[&str]) {
    const KILLS: usize = 15;
    let Some(mut scene) = Scene::new(name) else { return };
    scene.tier("fast", 64);
    let aside = scene.beside("aside");
    let script = format!(
        r#"{WORDS}
        ask hint versions=3 f
        python3 - 2>/mnt/aside/errors <<'P'
import os
def content(n): return f"{{n}};".encode() * 20000
n = 0
while not os.path.exists("/mnt/aside/stop") or n < 20:
    n += 1
    name = "f" if n % 3 else "part"
    with open(name, "wb") as file: file.write(content(n))
    if name != "f": os.rename(name, "f")
    for back, kept in enumerate(["f", "f.~1~", "f.~2~"]):
        if n > back:
            there = open(kept, "rb").read()
            assert there == content(n - back), (n, kept, there[:10], len(there))
    open("/mnt/aside/begun", "w").close()
print(n > 20, sorted(os.listdir(".")))
P
        "#
    );
    let running = scene.start(options, &script);
    eventually("the program runs", || aside.join("begun").exists());
    for kill in 0..KILLS {
        assert_eq!(fs::read_to_string(aside.join("errors")).unwrap(), "", "kill {kill}");
        scene.replace_agent();
        scene.await_served();
        std::thread::sleep(Duration::from_millis(20 + 13 * (kill as u64 % 7)));
    }
    fs::write(aside.join("stop"), "").unwrap();
    running.ends().exits(0).prints("True ['f', 'f.~1~', 'f.~2~']\n");
    assert_eq!(names(&scene), ["f", "f.~1~", "f.~2~"]);
    scene.is_clean();
}

#[test]
fn earlier_contents_outlive_agents_through_the_mount() {
    keep_contents_while_agents_die("versions-killed-mount", &["--no-preload"]);
}

#[test]
fn earlier_contents_outlive_agents_with_the_shim() {
    keep_contents_while_agents_die("versions-killed-shim", &[]);
}

fn wait_for_writers(name: &str, options: &[&str]) {
    let Some(scene) = prepare(name) else { return };
    let script = format!(
        r#"{WORDS}
        ask hint consistency=sealed s
        python3 - <<'P' &
import os, time
file = open("s", "w"); file.write("begun "); file.flush()
assert open("s").read() == "begun ", "a program does not wait for itself"
open("/mnt/beside/go", "w").close()
while not os.path.exists("/mnt/beside/waited"): time.sleep(0.01)
file.write("ended")
P
        while [ ! -e /mnt/beside/go ]; do sleep 0.01; done
        cat s >/mnt/beside/read & reader=$!
        # A signal ends the wait.
        timeout 0.5 cat s || echo $?
        if [ -s /mnt/beside/read ]; then echo early; fi
        touch /mnt/beside/waited
        wait $reader; cat /mnt/beside/read; echo
        cat s; echo
        "#
    );
    let ended = scene.run(options, &script).exits(0);
    assert_eq!(ended.stdout, "124\nbegun ended\nbegun ended\n", "{}", ended.stderr);
    drop(ended);
    scene.is_clean();
}

#[test]
fn readers_wait_for_the_seal_through_the_mount() {
    wait_for_writers("sealed-mount", &["--no-preload"]);
}

#[test]
fn readers_wait_for_the_seal_with_the_shim() {
    wait_for_writers("sealed-shim", &[]);
}

/// The large file was closed first. The others are in the store before it.
#[test]
fn drain_rests_for_other_files() {
    let Some(scene) = prepare("drain-share") else { return };
    let script = format!(
        r#"{WORDS}
        ask hint drain_share=1% big
        head -c 16M /dev/zero >big
        for n in $(seq 8); do head -c 1M /dev/zero >small$n; done
        python3 - <<'P'
import os, time
state = lambda name: os.getxattr(name, "user.surgetank.state")
small = [f"small{{n}}" for n in range(1, 9)]
until = time.monotonic() + 100
while any(state(name) != b"durable" for name in small):
    assert time.monotonic() < until
    time.sleep(0.01)
print(state("big") != b"durable")
P
        "#
    );
    let options = ["--unordered", "--drain-bytes-per-second-max", "4M", "--drain-threads", "2"];
    let ended = scene.run(&options, &script).exits(0);
    assert_eq!(ended.stdout, "True\n", "{}", ended.stderr);
}
