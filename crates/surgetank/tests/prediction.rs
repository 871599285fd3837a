//! `calibrate`, `model` and `advise` from the command line: their output, the input that they refuse, and the files
//! that they leave.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::scene::Scene;
use serde_json::{Value, json};

/// A directory of this test, empty.
fn place(name: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("surgetank-prediction-{name}"));
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).unwrap();
    dir
}

/// A store with 50 MiB/s and half a millisecond for each operation, and a tier in memory.
fn calibration() -> Value {
    let stream = |mib: f64| json!({"one_bps": mib * 1048576.0, "all_bps": mib * 1048576.0, "cpu_s_per_byte": 3e-10, "spread": 0.02});
    let operations = |each: f64| json!({"create_s": each, "open_s": each, "stat_s": each, "unlink_s": each, "fsync_s": each, "cpu_s": 2e-5, "per_second": 2000.0});
    let place = |name: &str, in_memory: bool, mib: f64, each: f64| {
        json!({
            "name": name, "path": format!("/{name}"), "in_memory": in_memory, "room_bytes": 4u64 << 30,
            "read": stream(mib), "write": stream(mib), "cached_read": stream(3000.0), "cached_write": stream(1500.0),
            "dirty_bytes": 32 << 20, "operations": operations(each),
        })
    };
    let door = json!({
        "create_s": 8e-4, "create_cpu_s": 1e-4, "open_s": 1e-5, "open_cpu_s": 1e-5, "open_store_s": 1e-3,
        "open_store_cpu_s": 1e-4, "per_second": 3000.0,
    });
    json!({
        "schema": 1, "version": "test", "taken_at_s": 0, "host": "test", "load_before": 0.0, "load_after": 0.0, "cores": 2.0,
        "memory_bytes": 8u64 << 30, "store": place("store", false, 50.0, 5e-4), "tiers": [place("ram", true, 2000.0, 1e-5)],
        "agent": {
            "start_s": 0.03, "shim": door, "mount": door, "drain_file_s": 2e-3, "drain_file_cpu_s": 2e-4, "drain_bps": 5e7,
            "drain_cpu_s_per_byte": 1e-9, "quiet_s": 0.05,
        },
        "notes": [],
    })
}

fn ask(dir: &Path, workload: &str, words: &[&str]) -> Output {
    fs::write(dir.join("calibration.json"), calibration().to_string()).unwrap();
    fs::write(dir.join("workload.toml"), workload).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_surgetank"));
    command.current_dir(dir).args(&words[..1]).args(["workload.toml", "--calibration", "calibration.json"]);
    command.args(&words[1..]).output().unwrap()
}

fn answer(dir: &Path, workload: &str, words: &[&str]) -> Value {
    let done = ask(dir, workload, words);
    assert!(done.status.success(), "{done:?}");
    serde_json::from_slice(&done.stdout).unwrap()
}

const MUCH_IO: &str = "[[stage]]\nname='inc'\ntasks=8\nbytes_in='32M'\nbytes_out='32M'\niterations=6\nreread=true";
const MUCH_COMPUTING: &str = "[[stage]]\nname='think'\ntasks=8\nbytes_in='1M'\nbytes_out='1M'\ncpu_s=60";

#[test]
fn every_mode_has_an_estimate_between_its_bounds() {
    let dir = place("modes");
    let output = answer(&dir, MUCH_IO, &["model", "--json"]);
    let predictions = output["predictions"].as_array().unwrap();
    let modes: Vec<&str> = predictions.iter().map(|one| one["setup"]["mode"].as_str().unwrap()).collect();
    assert_eq!(modes, ["store", "in-memory", "copy-all", "move"]);
    for one in predictions {
        let of = |name: &str| one[name].as_f64().unwrap();
        assert!(of("lower_s") <= of("estimate_s") && of("estimate_s") <= of("upper_s"), "{one}");
    }
    // The lower bound for the store: 1.5 GiB, and 256 MiB of them, at 50 MiB/s, less an allowance for concurrent requests.
    assert!(predictions[0]["lower_s"].as_f64().unwrap() > 30.0 / 1.11);
    for one in predictions {
        assert!(one["upper_s"].as_f64().unwrap() <= 1.5 * one["lower_s"].as_f64().unwrap(), "{one}");
    }
    assert!(predictions[1]["upper_s"].as_f64().unwrap() < 20.0);
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn sweep_has_a_line_for_each_value() {
    let dir = place("sweep");
    let output = answer(&dir, MUCH_IO, &["model", "--json", "--mode", "in-memory", "--sweep", "ram=64M,512M,2G"]);
    let estimates: Vec<f64> =
        output["predictions"].as_array().unwrap().iter().map(|one| one["estimate_s"].as_f64().unwrap()).collect();
    assert_eq!(estimates.len(), 3);
    assert!(estimates[0] > 1.5 * estimates[2], "{estimates:?}");
    let wrong = ask(&dir, MUCH_IO, &["model", "--sweep", "nothing=3"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("no tier nothing"), "{wrong:?}");
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn advice_says_when_surgetank_is_not_worth_it() {
    let dir = place("advice");
    let output = answer(&dir, MUCH_IO, &["advise", "--json"]);
    assert_eq!((&output["use_surgetank"], &output["best"]["setup"]["mode"]), (&json!(true), &json!("in-memory")));
    assert!(output["command"].as_str().unwrap().contains("--tier ram=/ram:"), "{}", output["command"]);
    let done = ask(&dir, MUCH_COMPUTING, &["advise"]);
    assert!(String::from_utf8_lossy(&done.stdout).starts_with("do not use Surgetank here"), "{done:?}");
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn unreadable_input_is_named_with_exit_code_2() {
    let dir = place("refused");
    let refusal = |workload: &str, words: &[&str]| {
        let done = ask(&dir, workload, words);
        assert_eq!(done.status.code(), Some(2), "{done:?}");
        String::from_utf8_lossy(&done.stderr).into_owned()
    };
    assert!(refusal("[[stage]]\nname='a'\ntasks=1\nbite_out='1M'", &["model"]).contains("bite_out"));
    assert!(refusal(MUCH_IO, &["advise", "--tier", "gold:1G"]).contains("no tier gold"));
    // Regression: each value made I/O free, made the estimate negative, infinite or not a number, or ended the
    // program.
    for (at, value, named) in [
        ("/store/write/all_bps", json!(0.0), "write.all_bps of store"),
        ("/store/read/one_bps", json!(1e-300), "read.one_bps of store is"),
        ("/store/total_read_bps", json!(0.0), "total_read_bps of store"),
        ("/store/total_write_bps", json!(-5.0), "total_write_bps of store is -5, it must be from 1 to"),
        ("/store/dirty_bytes", json!(1u64 << 62), "dirty_bytes of store"),
        ("/tiers/0/operations/per_second", json!(0.0), "operations.per_second of tiers[0] (ram)"),
        ("/agent/start_s", json!(-3.0), "agent.start_s"),
        ("/agent/mount/create_cpu_s", json!(-1.0), "agent.mount.create_cpu_s"),
        ("/cores", json!(1e300), "cores is"),
    ] {
        let mut broken = calibration();
        match broken.pointer_mut(at) {
            Some(figure) => *figure = value,
            None => broken["store"][at.rsplit('/').next().unwrap()] = value,
        }
        fs::write(dir.join("broken.json"), broken.to_string()).unwrap();
        for verb in ["model", "advise"] {
            let mut command = Command::new(env!("CARGO_BIN_EXE_surgetank"));
            let words = [verb, "workload.toml", "--calibration", "broken.json"];
            let done = command.current_dir(&dir).args(words).output().unwrap();
            assert_eq!(done.status.code(), Some(2), "{at}: {done:?}");
            assert!(String::from_utf8_lossy(&done.stderr).contains(named), "{at}: {done:?}");
        }
    }
    assert!(refusal("[[stage]]\nname='a'\ntasks=1000000000000", &["model"]).contains("too large"));
    fs::remove_dir_all(dir).unwrap();
}

/// The calibration measures a real machine through a real agent. `model` can read the result, and no file remains.
#[test]
fn calibration_measures_and_cleans_up() {
    let Some(scene) = Scene::new("prediction_calibrate") else { return };
    let (tier, store) = (scene.tmpfs("measured", 256), scene.beside("slow"));
    let left = store.join(".surgetank-calibrate-999999999");
    fs::create_dir(&left).unwrap();
    let out = scene.beside("out").join("calibration.json");
    let option = format!("ram={}:128M", tier.display());
    let words = ["calibrate", "--tier", &option, "--store", store.to_str().unwrap(), "--out", out.to_str().unwrap()];
    let done = scene.surgetank(&words).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let measured: Value = serde_json::from_slice(&fs::read(&out).unwrap()).unwrap();
    assert_eq!((&measured["tiers"][0]["name"], &measured["tiers"][0]["in_memory"]), (&json!("ram"), &json!(true)));
    assert!(measured["agent"]["mount"]["create_s"].as_f64().unwrap() > 0.0, "{measured}");
    assert!(
        measured["agent"]["drain_cpu_s_per_byte"].as_f64().unwrap() > 0.0,
        "the agent's processor time: {measured}"
    );
    for place in [&tier, &store] {
        let names: Vec<_> = fs::read_dir(place).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(names.iter().all(|name| !name.to_string_lossy().contains("calibrate")), "{names:?}");
    }
    let dir = place("calibrated");
    fs::write(dir.join("workload.toml"), MUCH_IO).unwrap();
    let model = ["model", "workload.toml", "--calibration", out.to_str().unwrap()];
    let done = Command::new(env!("CARGO_BIN_EXE_surgetank")).current_dir(&dir).args(model).output().unwrap();
    assert!(done.status.success(), "{done:?}");
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn calibration_without_room_is_refused() {
    let Some(scene) = Scene::new("prediction_room") else { return };
    let tight = scene.tmpfs("tight", 32);
    let option = format!("ram={}:32M", tight.display());
    let store = scene.beside("slow");
    let words = ["calibrate", "--tier", &option, "--store", store.to_str().unwrap()];
    let done = scene.surgetank(&words).output().unwrap();
    assert_eq!(done.status.code(), Some(1), "{done:?}");
    assert!(String::from_utf8_lossy(&done.stderr).contains("too little to measure with"), "{done:?}");
    assert_eq!(fs::read_dir(&tight).unwrap().count(), 0);
}
