//! Helpers for tests of delegated directories: the common part of their programs, and the count of files created
//! without a request.

use std::fs;

use super::{Ended, Scene};

pub const FAST: &[&str] = &["--quiet-period", "0s"];

pub fn scene(name: &str) -> Option<Scene> {
    let mut scene = Scene::new(name)?;
    scene.tier("ram", 8192);
    scene.beside("aside");
    Some(scene)
}

/// The program, preceded by helper functions that these tests share.
pub fn python(text: &str) -> &'static str {
    let common = r"
import errno, os, subprocess, sys, time, signal, random
def make(path, data=b'x', flags=os.O_EXCL, mode=0o644):
    made = os.open(path, os.O_CREAT | os.O_WRONLY | flags, mode)
    if data: os.write(made, data)
    os.close(made)
def delegate(dir):
    for n in range(8): make(f'{dir}/first-{n}')
def bare(*words):
    # Without the shim: through the mount.
    return subprocess.run(words, env={'PATH': os.environ['PATH']}, capture_output=True, text=True)
";
    fs::write("/mnt/program.py", format!("{common}{text}")).unwrap();
    "exec env SURGETANK_REPORT=1 python3 -S /mnt/program.py"
}

/// How many files the programs created without a request. Timing decides how often a program asks the agent instead.
/// One such file is therefore enough to show that the program can create files itself.
pub fn created_delegated(ended: &Ended) -> u64 {
    let lines = ended
        .stderr
        .lines()
        .filter_map(|line| line.split(" created in delegated directories").next().filter(|part| *part != line));
    lines.filter_map(|part| part.rsplit(' ').next()?.parse::<u64>().ok()).sum()
}

/// An intake entry as `shim/abi.h` defines it, from a process that is stopped or killed before it completes the
/// entry.
pub const INTAKE: &str = r"
import glob, mmap, struct
ring_path = glob.glob('/dev/shm/surgetank-*.index.ring')
def ring():
    path = max(glob.glob('/dev/shm/surgetank-*.index.ring'), key=os.path.getmtime)
    file = os.open(path, os.O_RDWR)
    return mmap.mmap(file, 0)
def enter(ring, dir, name, phase):
    at, = struct.unpack_from('<Q', ring, 64)
    struct.pack_into('<Q', ring, 64, at + 1)
    slot = 4096 + at % 1024 * 320
    state, id = struct.unpack_from('<QQ', ring, slot)
    assert state == at << 3, (state, at)
    struct.pack_into('<QQQ', ring, slot + 16, dir, 0, 0)
    struct.pack_into('<IIIIII', ring, slot + 40, 1, 0o644, 0, len(name), 0, 0)
    ring[slot + 64:slot + 64 + len(name)] = name
    struct.pack_into('<Q', ring, slot, at << 3 | phase)
    return slot, at
def phase(ring, slot, at):
    state, = struct.unpack_from('<Q', ring, slot)
    return state & 7 if state >> 3 == at else None
";
