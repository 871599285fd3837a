//! Sea's ini file and its three lists.
#![no_main]

use std::fs;
use std::path::{Path, PathBuf};

use libfuzzer_sys::fuzz_target;
use surgetank_policy::config::machine::Machine;
use surgetank_policy::config::{Config, Overrides, Surroundings};
use surgetank_policy::rule::RuleSet;

fuzz_target!(|input: (&str, &str, &str, &str, &[u8])| {
    let (ini, flush, evict, prefetch, path) = input;
    let dir = Path::new("/dev/shm").join(format!("surgetank-fuzz-{}", std::process::id()));
    for name in ["project", "tier"] {
        fs::create_dir_all(dir.join(name)).unwrap();
    }
    let files =
        [("sea.ini", ini), (".sea_flushlist", flush), (".sea_evictlist", evict), (".sea_prefetchlist", prefetch)];
    for (name, text) in files {
        fs::write(dir.join("project").join(name), text).unwrap();
    }
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
