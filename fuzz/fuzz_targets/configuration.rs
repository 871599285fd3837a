//! `surgetank.toml`, and paths judged by the rules in it.
#![no_main]

use std::fs;
use std::path::{Path, PathBuf};

use libfuzzer_sys::fuzz_target;
use surgetank_policy::config::machine::Machine;
use surgetank_policy::config::{Config, Overrides, Surroundings};
use surgetank_policy::rule::RuleSet;

fuzz_target!(|input: (&str, &[u8])| {
    let (text, path) = input;
    let dir = Path::new("/dev/shm").join(format!("surgetank-fuzz-{}", std::process::id()));
    for name in ["project", "tier"] {
        fs::create_dir_all(dir.join(name)).unwrap();
    }
    fs::write(dir.join("project/surgetank.toml"), text).unwrap();
    let around = Surroundings {
        cwd: dir.join("project"),
        env: Vec::new(),
        site_file: PathBuf::from("/nonexistent"),
        machine: Machine::default(),
        ram: dir.join("tier"),
        uid: 7,
    };
    let Ok(loaded) = Config::load_in(&Overrides::default(), &around) else { return };
    if let Ok(rules) = RuleSet::new(&loaded.config.rules) {
        rules.decide(path);
    }
});
