//! The mount survives its agent: programs go on while agents are killed under them and replaced (docs/durability.md, "When
//! the agent dies under a command").

mod scene;

use scene::{Scene, eventually};

const FAST: &[&str] = &["--quiet-period", "0s"];

/// What a program sees when its agent is killed while it has files open: nothing.
#[test]
fn open_files_and_the_working_directory_go_on() {
    for preload in ["true", "false"] {
        let Some(mut scene) = Scene::new(&format!("survive-open-{preload}")) else { return };
        scene.tier("ram", 64);
        std::fs::create_dir_all(scene.path("there/deep")).unwrap();
        std::fs::write(scene.path("there/old"), "of the store\n").unwrap();
        let aside = scene.beside("aside");
        let script = format!(
            r"
            exec 3>new 4<there/old 5<>both
            echo before >&3
            echo both >&5
            cd there/deep
            touch {0}/ready
            until [ -e {0}/go ]; do sleep 0.01; done
            echo after >&3
            cat <&4
            echo more >&5
            pwd
            ls ..
            echo made >here
            mkdir -p sub && mv here sub/there && cat sub/there
            exec 3>&- 4<&- 5>&-
            cat ../../new ../../both
            ",
            aside.display()
        );
        let mut command = vec!["-v"];
        command.extend(FAST);
        if preload == "false" {
            command.push("--no-preload");
        }
        let running = scene.start(&command, &script);
        eventually("the program is there", || aside.join("ready").exists());
        scene.replace_agent();
        std::fs::write(aside.join("go"), "").unwrap();
        let expected = "of the store\n/mnt/project/there/deep\ndeep\nold\nmade\nbefore\nafter\nboth\nmore\n";
        running.ends().exits(0).prints(expected).says(&["was replaced"]);
        scene.holds("new", b"before\nafter\n");
        scene.holds("there/deep/sub/there", b"made\n");
        scene.is_clean();
    }
}
