//! Programs that run until the power fails, and what the store has then.

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
    scene.beside("told");
    for name in ["old", "result", "log"] {
        fs::write(scene.path(name), "before\n").unwrap();
    }
    Some(scene)
}

/// Runs the program until it says that it is there, and takes the power away.
pub fn until_the_power_fails(scene: &Scene, options: &[&str], program: &str, journal_too: bool) {
    let running = begin(scene, options, program);
    eventually("the program is there", || fs::exists("/mnt/told/there").unwrap());
    scene.power_fails("disk", journal_too);
    drop(running);
}

pub fn begin(scene: &Scene, options: &[&str], program: &str) -> Running {
    fs::write("/mnt/program.py", program).unwrap();
    for name in ["there", "closed", "go"] {
        let _ = fs::remove_file(format!("/mnt/told/{name}"));
    }
    let options = [&TIER[..], options].concat();
    let mut command = scene.run_command(&options, "exec /usr/bin/python3 /mnt/program.py");
    command.env("SURGETANK_LOG", "info,surgetank_core::files::sync=debug");
    Running::of(command)
}

/// How many closed files agents have synced where they lie, without a program's fsync.
pub fn synced(scene: &Scene) -> usize {
    let log = scene.log();
    let counts = log.lines().filter_map(|line| line.split("closed files are synced files=").nth(1)?.parse().ok());
    counts.collect::<Vec<usize>>().iter().sum()
}

/// The program goes on when so many more files are synced that it closed.
pub fn go_on_when_synced(scene: &Scene, before: usize, files: usize) {
    eventually("files are closed", || fs::exists("/mnt/told/closed").unwrap());
    eventually("they are synced", || synced(scene) >= before + files);
    fs::write("/mnt/told/go", "").unwrap();
}

pub const CLOSED: &str = "
def closed():
    open('/mnt/told/closed', 'w').close()
    while not os.path.exists('/mnt/told/go'): time.sleep(0.01)
";

/// What the store has; what was set apart is told by the first part of its name.
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
    open('/mnt/told/there', 'w').close()
    time.sleep(100)
";
