//! The mount survives its agent: programs go on while agents are killed under them and replaced (docs/durability.md, "When
//! the agent dies under a command").

mod scene;

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use scene::{Scene, eventually, succeed};

const FAST: &[&str] = &["--quiet-period", "0s"];

/// What a program sees when its agent is killed while it has files open: nothing.
fn open_files_go_on(scene: Option<Scene>, options: &[&str]) {
    let Some(mut scene) = scene else { return };
    scene.tier("ram", 64);
    for dir in ["there", "there/deep"] {
        fs::create_dir(scene.path(dir)).unwrap();
        scene.hand_over(&scene.path(dir));
    }
    fs::write(scene.path("there/old"), "of the store\n").unwrap();
    let aside = scene.beside("aside");
    let script = r"
        exec 3>new 4<there/old 5<>both
        echo before >&3
        echo both >&5
        cd there/deep
        touch /mnt/aside/ready
        until [ -e /mnt/aside/go ]; do sleep 0.01; done
        echo after >&3
        cat <&4
        echo more >&5
        pwd
        ls ..
        echo made >here
        mkdir -p sub && mv here sub/there && cat sub/there
        exec 3>&- 4<&- 5>&-
        cat ../../new ../../both
        ";
    let mut all = vec!["-v"];
    all.extend(FAST);
    all.extend(options);
    let running = scene.start(&all, script);
    eventually("the program is there", || aside.join("ready").exists());
    scene.replace_agent();
    fs::write(aside.join("go"), "").unwrap();
    let expected = "of the store\n/mnt/project/there/deep\ndeep\nold\nmade\nbefore\nafter\nboth\nmore\n";
    running.ends().exits(0).prints(expected).says(&["was replaced"]);
    scene.holds("new", b"before\nafter\n");
    scene.holds("there/deep/sub/there", b"made\n");
    scene.is_clean();
}

#[test]
fn open_files_go_on_with_the_shim() {
    open_files_go_on(Scene::new("survive-open-shim"), &[]);
}

#[test]
fn open_files_go_on_through_the_mount() {
    open_files_go_on(Scene::new("survive-open-mount"), &["--no-preload"]);
}

#[test]
fn open_files_of_an_ordinary_user_go_on() {
    open_files_go_on(Scene::of_user("survive-open-user"), &["--no-preload"]);
}

#[test]
fn open_files_of_an_ordinary_user_go_on_with_the_shim() {
    open_files_go_on(Scene::of_user("survive-open-user-shim"), &[]);
}

/// Programs that do all kinds of things all along, while one agent after the other is killed.
fn killed_again_and_again(scene: Option<Scene>, options: &[&str], direct: bool, kills: u32) {
    let Some(mut scene) = scene else { return };
    scene.tier("ram", 64);
    scene.beside("aside");
    fs::copy(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/survive/goes_on.py"), "/mnt/goes_on.py").unwrap();
    let script = r"
        for who in one two three; do python3 /mnt/goes_on.py $who ${SECONDS_LONG} & pids=${pids:-}\ $!; done
        for pid in $pids; do wait $pid; done
        ";
    let script = script.replace("${SECONDS_LONG}", &format!("{}", f64::from(kills) * 0.15));
    let mut all = FAST.to_vec();
    all.extend(options);
    let mut command = scene.run_command(&all, &script);
    command.env("SURGETANK_DIRECT", direct.to_string());
    let mut running = scene::Running::of(command);
    let (mut killed, mut dice) = (0, std::process::id() | 1);
    let begun = Instant::now();
    while killed < kills && !running.is_over() && begun.elapsed() < Duration::from_secs(60) {
        dice = dice.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // Some are killed before they serve, but not so many in a row that nobody comes after them.
        if killed % 5 != 4 {
            scene.await_served();
        }
        std::thread::sleep(Duration::from_millis(u64::from(dice >> 24)));
        if scene.agent().is_some() && !running.is_over() {
            // It may be on its way out, and then nobody comes after it.
            killed += u32::from(scene.kill_one_agent());
        }
    }
    let ended = running.ends().exits(0);
    assert!(killed > kills / 2, "only {killed} agents were killed");
    for who in ["one", "two", "three"] {
        assert!(ended.stdout.contains(&format!("{who} made rounds")), "{}\n{}", ended.stdout, ended.stderr);
        succeed(Command::new("sha256sum").args(["--check", "--quiet", &format!("/mnt/aside/{who}")]).current_dir(&scene.over));
    }
    scene.is_clean();
    assert!(scene.tier_files().is_empty(), "left on the tiers: {:?}", scene.tier_files());
}

#[test]
fn twenty_kills_in_a_row_with_direct_files() {
    killed_again_and_again(Scene::new("survive-direct"), &["--no-preload"], true, 20);
}

#[test]
fn twenty_kills_in_a_row_with_mediated_files() {
    killed_again_and_again(Scene::new("survive-mediated"), &["--no-preload"], false, 20);
}

#[test]
fn twenty_kills_in_a_row_with_the_shim() {
    killed_again_and_again(Scene::new("survive-shim"), &[], true, 20);
}

#[test]
fn twenty_kills_in_a_row_of_an_ordinary_user() {
    killed_again_and_again(Scene::of_user("survive-user"), &["--no-preload"], true, 20);
}

#[test]
fn twenty_kills_in_a_row_of_an_ordinary_user_with_the_shim() {
    killed_again_and_again(Scene::of_user("survive-user-shim"), &[], true, 20);
}
