//! Programs that run until the power fails, and the content of the store afterwards.

use std::collections::BTreeMap;
use std::fs;

use crate::scene::{Running, Scene, eventually};

pub const TIER: [&str; 8] =
    ["--tier", "disk=/mnt/disk:200M", "--quiet-period", "1h", "--config", "/mnt/conf.toml", "--fsync", "tier"];

pub fn prepare(name: &str) -> Option<Scene> {
    let mut scene = Scene::new(name)?;
    scene.ext4("disk", 512);
    scene.state = "/mnt/disk/state".into();
    fs::write("/mnt/conf.toml", "").unwrap();
    scene.beside("notes");
    for name in ["old", "result", "log"] {
        fs::write(scene.path(name), "before\n").unwrap();
    }
    Some(scene)
}

/// Runs the program until it is ready, then fails the power.
pub fn until_the_power_fails(scene: &Scene, options: &[&str], program: &str, journal_too: bool) {
    let running = begin(scene, options, program);
    eventually("the program runs", || fs::exists("/mnt/notes/there").unwrap());
    scene.power_fails("disk", journal_too);
    drop(running);
}

pub fn begin(scene: &Scene, options: &[&str], program: &str) -> Running {
    fs::write("/mnt/program.py", program).unwrap();
    for name in ["there", "closed", "go"] {
        let _ = fs::remove_file(format!("/mnt/notes/{name}"));
    }
    let options = [&TIER[..], options].concat();
    let mut command = scene.run_command(&options, "exec /usr/bin/python3 /mnt/program.py");
    command.env("SURGETANK_LOG", "info,surgetank_core::files::sync=debug");
    Running::of(command)
}

/// How many closed files the agents have synced on their tier, without a program's fsync.
pub fn synced(scene: &Scene) -> usize {
    let log = scene.log();
    let counts = log.lines().filter_map(|line| line.split("closed files are synced files=").nth(1)?.parse().ok());
    counts.collect::<Vec<usize>>().iter().sum()
}

/// Lets the program continue once this many more of its closed files are synced.
pub fn go_on_when_synced(scene: &Scene, before: usize, files: usize) {
    eventually("files are closed", || fs::exists("/mnt/notes/closed").unwrap());
    eventually("the closed files are synced", || synced(scene) >= before + files);
    fs::write("/mnt/notes/go", "").unwrap();
}

pub const CLOSED: &str = "
def closed():
    open('/mnt/notes/closed', 'w').close()
    while not os.path.exists('/mnt/notes/go'): time.sleep(0.01)
";

/// The files in the store. Files set apart are in the second map, under the original name.
pub fn store_of(scene: &Scene) -> (BTreeMap<String, Vec<u8>>, BTreeMap<String, Vec<u8>>) {
    let (mut there, mut apart) = (BTreeMap::new(), BTreeMap::new());
    let mut dirs = vec![scene.over.clone()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(&scene.over).unwrap().to_str().unwrap().to_owned();
            if path.is_dir() {
                dirs.push(path);
            } else if let Some((name, _)) = name.split_once(".surgetank-unproven-") {
                apart.insert(name.to_owned(), fs::read(&path).unwrap());
            } else {
                there.insert(name, fs::read(&path).unwrap());
            }
        }
    }
    (there, apart)
}

pub const PUT: &str = "
import os, time
def put(name, text, flags=0, sync=False):
    fd = os.open(name, os.O_CREAT | os.O_WRONLY | flags, 0o644)
    os.write(fd, text)
    if sync: os.fsync(fd)
    os.close(fd)
def there():
    open('/mnt/notes/there', 'w').close()
    time.sleep(100)
";
