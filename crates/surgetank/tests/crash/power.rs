//! Cases in which the machine loses its power. Tiers and state are on an ext4 of the case's own. The case shuts it
//! down without (or with) its journal while the writers write. A power loss allows more states, so this module judges
//! them itself.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::manifest::Story;
use crate::verify::{Location, Verified, store_of};

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// In the environment of every process that a case starts.
pub const MARK: &str = "SURGETANK_CRASH_SCENE";
const TIMEOUT: Duration = Duration::from_secs(20);

/// A file system that a power loss can stop.
pub struct Disk {
    image: PathBuf,
    pub path: PathBuf,
    boot_id: PathBuf,
}

/// Makes the mounts private to this process. `false`: the process may not mount.
pub fn seclude() -> bool {
    if !rustix::process::geteuid().is_root() {
        assert!(std::env::var_os("CI").is_none(), "not root");
        return false;
    }
    // SAFETY: called before there are other threads.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }.is_ok()
        && done(Command::new("mount").args(["--make-rprivate", "/"]))
}

fn done(command: &mut Command) -> bool {
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

impl Disk {
    pub fn new(dir: &Path, mib: u64) -> Self {
        let disk = Self { image: dir.join("image"), path: dir.join("disk"), boot_id: dir.join("boot_id") };
        File::create(&disk.image).unwrap().set_len(mib << 20).unwrap();
        assert!(done(Command::new("mkfs.ext4").args(["-q", "-m", "0"]).arg(&disk.image)));
        fs::create_dir(&disk.path).unwrap();
        disk.mount();
        disk
    }

    fn mount(&self) {
        assert!(done(Command::new("mount").args(["-o", "loop"]).args([&self.image, &self.path])));
    }

    fn unmount(&self) {
        let begun = Instant::now();
        while !done(Command::new("umount").arg(&self.path)) {
            assert!(begun.elapsed() < TIMEOUT, "a process holds the dead file system");
            std::thread::sleep(Duration::from_millis(5));
        }
        // A process that ends holds its mount namespace after it vanishes from `/proc`. Until it releases the
        // namespace, the image mounts as the same file system.
        let associated = || Command::new("losetup").arg("--associated").arg(&self.image).output().unwrap().stdout;
        while !associated().is_empty() {
            assert!(begun.elapsed() < TIMEOUT, "a process holds the dead device");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The power fails, every process with `mark` ends, and the machine boots.
    pub fn power_fails(&self, journal_too: bool, mark: &Path) {
        const SHUTDOWN: libc::Ioctl = 0x8004_587d_u32 as libc::Ioctl;
        let kind: u32 = if journal_too { 1 } else { 2 };
        let dir = File::open(&self.path).unwrap();
        // From here on no process may act: the store would show the effect.
        stop_marked(mark);
        // SAFETY: EXT4_IOC_SHUTDOWN reads the number it is given; the descriptor is open.
        assert_eq!(unsafe { libc::ioctl(dir.as_raw_fd(), SHUTDOWN, &raw const kind) }, 0);
        drop(dir);
        end_marked(mark);
        self.unmount();
        self.mount();
        let before = fs::read_to_string(BOOT_ID).unwrap();
        let number = u64::from_str_radix(before.trim().get(28..).unwrap(), 16).unwrap();
        fs::write(&self.boot_id, format!("{:0>36x}\n", number + 1)).unwrap();
        assert!(done(Command::new("mount").arg("--bind").arg(&self.boot_id).arg(BOOT_ID)));
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        done(Command::new("umount").arg(BOOT_ID));
        done(Command::new("umount").arg("--lazy").arg(&self.path));
    }
}

fn marked(mark: &Path) -> Vec<i32> {
    let wanted = format!("{MARK}={}", mark.display()).into_bytes();
    let all = fs::read_dir("/proc").unwrap().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let is_ours = |pid: &i32| {
        fs::read(format!("/proc/{pid}/environ"))
            .is_ok_and(|environment| environment.split(|byte| *byte == 0).any(|one| one == wanted))
    };
    pids.filter(is_ours).collect()
}

/// Returns when none of their threads runs any more.
///
/// Only one thread takes the signal, and until it gets its turn, the others continue. After the shutdown their catalog
/// answers EIO, and their changes of the store would not be a state that a power loss leaves.
fn stop_marked(mark: &Path) {
    let begun = Instant::now();
    let stands = |pid: i32| {
        let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        threads.filter_map(|thread| fs::read_to_string(thread.path().join("stat")).ok()).all(|stat| {
            let state = stat.rsplit_once(") ").map(|(_, rest)| rest.as_bytes()[0]);
            // (A thread that waits for a disk, or for a stopped agent, makes no further change.)
            matches!(state, Some(b'T' | b't' | b'D' | b'Z' | b'X'))
        })
    };
    loop {
        // (Listed again, because a process that one of them started at the last moment has the mark, too.)
        let running: Vec<i32> = marked(mark).into_iter().filter(|pid| !stands(*pid)).collect();
        if running.is_empty() {
            return;
        }
        assert!(begun.elapsed() < TIMEOUT, "processes cannot be stopped: {running:?}");
        for pid in running {
            // SAFETY: kill takes any number; the mark says that this case started it.
            unsafe { libc::kill(pid, libc::SIGSTOP) };
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub fn end_marked(mark: &Path) {
    let begun = Instant::now();
    loop {
        let ours = marked(mark);
        if ours.is_empty() {
            return;
        }
        assert!(begun.elapsed() < TIMEOUT, "processes cannot be ended: {ours:?}");
        for pid in ours {
            // SAFETY: kill takes any number; the mark says that this case started it.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// One writer's story, state by state. After a power loss the catalog may have any state from the last sync on.
struct History {
    states: Vec<Story>,
    /// The first state that is allowed.
    floor: usize,
    /// Contents that an fsync reported as synced to a program.
    vouched: BTreeSet<u64>,
    /// Files of which some bytes were synced.
    promised: BTreeSet<u64>,
    /// All files that had this name at some time.
    seen_at: BTreeMap<String, BTreeSet<u64>>,
}

impl History {
    fn read(manifest: &Path) -> Self {
        let text = fs::read_to_string(manifest).unwrap_or_default();
        let whole = text.rfind('\n').map_or("", |end| &text[..=end]);
        let mut history = Self {
            states: vec![Story::default()],
            floor: 0,
            vouched: BTreeSet::new(),
            promised: BTreeSet::new(),
            seen_at: BTreeMap::new(),
        };
        let mut open: Option<Vec<String>> = None;
        for line in whole.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            match words[0] {
                "B" => {
                    // An operation that has begun may be half done.
                    let words: Vec<String> = words[2..].iter().map(|word| (*word).to_owned()).collect();
                    history.advance(&words);
                    open = Some(words);
                }
                "F" => {
                    let words = open.as_ref().unwrap();
                    history.floor = history.states.len() - 1;
                    let now = history.states.last().unwrap();
                    history.vouched.insert(words[2].parse().unwrap());
                    history.promised.insert(now.names[&words[1]]);
                }
                _ => {}
            }
        }
        history
    }

    fn advance(&mut self, words: &[String]) {
        let mut next = self.states.last().unwrap().clone();
        next.apply(words);
        // A directory takes its content along.
        if words[0] == "rename" {
            let moved: Vec<(String, BTreeSet<u64>)> = self
                .seen_at
                .iter()
                .filter_map(|(path, seen)| {
                    Some((format!("{}{}", words[2], path.strip_prefix(&words[1])?), seen.clone()))
                })
                .collect();
            for (path, seen) in moved {
                self.seen_at.entry(path).or_default().extend(seen);
            }
        }
        if words[0] == "exchange" {
            let both = |path: &str| self.seen_at.get(path).cloned().unwrap_or_default();
            let all: BTreeSet<u64> = both(&words[1]).union(&both(&words[2])).copied().collect();
            self.seen_at.insert(words[1].clone(), all.clone());
            self.seen_at.insert(words[2].clone(), all);
        }
        for (path, id) in &next.names {
            self.seen_at.entry(path.clone()).or_default().insert(*id);
        }
        self.states.push(next);
    }

    fn judge(&self, found: &BTreeMap<&str, &Location>) -> Result<Verified, String> {
        self.has_one_of_those_synced(found)?;
        let mut whys = Vec::new();
        for (number, state) in self.states.iter().enumerate().skip(self.floor) {
            match self.is_this(found, state) {
                Ok(verified) => return Ok(verified),
                Err(why) => whys.push(format!("state {number}: {why}")),
            }
        }
        whys.dedup();
        whys.truncate(8);
        Err(whys.join(" | or: "))
    }

    /// If a synced file replaces another synced one, the name has one of both in every state.
    fn has_one_of_those_synced(&self, found: &BTreeMap<&str, &Location>) -> Result<(), String> {
        let allowed = &self.states[self.floor..];
        let synced = |state: &Story, path: &str| {
            let content = state.files[state.names.get(path)?].content;
            self.vouched.contains(&content).then_some(content)
        };
        for path in allowed[0].names.keys() {
            let Some(contents) = allowed.iter().map(|state| synced(state, path)).collect::<Option<BTreeSet<u64>>>()
            else {
                continue;
            };
            let there = match found.get(path.as_str()) {
                Some(Location::File { content, .. }) => content.clone(),
                _ => Err("it is not there".to_owned()),
            };
            if !there.as_ref().is_ok_and(|there| contents.contains(there)) {
                return Err(format!("{path} should have one of {contents:x?}, which were synced: {there:x?}"));
            }
        }
        Ok(())
    }

    fn is_this(&self, found: &BTreeMap<&str, &Location>, state: &Story) -> Result<Verified, String> {
        let last = self.states.last().unwrap();
        let mut verified = Verified::default();
        for (path, id) in &state.names {
            let content = state.files[id].content;
            // A file that was deleted or overwritten later may be missing, because the outcome of the later operation
            // is open.
            let untouched = last.files[id].content == content && last.names.values().any(|other| other == id);
            let needed = self.vouched.contains(&content) && untouched;
            let (is, length_bytes) = match found.get(path.as_str()) {
                Some(Location::File { content, length_bytes, .. }) => (content, length_bytes),
                Some(_) => return Err(format!("{path} is not a file")),
                None if needed => return Err(format!("{path} is lost, and was synced")),
                None => continue,
            };
            match is {
                Ok(found) if *found == content => {
                    verified.files += 1;
                    verified.bytes += length_bytes;
                }
                Ok(found) if needed => return Err(format!("{path} has {found:#x}, and {content:#x} was synced")),
                // An earlier version, or the file that had the name before.
                Ok(found) if self.was_at(path, *found) || self.was_of(*id, *found) => verified.files += 1,
                Ok(found) => return Err(format!("{path} has {found:#x}, which never was there")),
                Err(why) if needed => return Err(format!("{path}: {why}, and it was synced")),
                // Overwritten after a part of the file was synced; or written in place, because the file has several
                // names.
                Err(_) if self.promised.contains(id) || last.in_place().any(|name| name == path) => {}
                Err(why) => return Err(format!("half a file under its own name: {path}: {why}")),
            }
        }
        let known = |path: &str| {
            state.names.contains_key(path)
                || state.symlinks.contains_key(path)
                || state.dirs.contains(path)
                || path.contains(".surgetank-unproven-")
                // A spilled file whose records the catalog lost.
                || path.contains("surgetank-orphan-")
        };
        if let Some(ghost) = found.keys().find(|path| !known(path)) {
            // The previous version of a replaced name that was then taken from its successor.
            let before = matches!(found[ghost], Location::File { content: Ok(id), .. } if self.was_at(ghost, *id));
            if !before {
                return Err(format!("{ghost} should not be there"));
            }
        }
        if let Some(lost) =
            state.dirs.iter().find(|path| !matches!(found.get(path.as_str()), Some(Location::Directory)))
        {
            return Err(format!("the directory {lost} is lost"));
        }
        if let Some(lost) =
            state.symlinks.keys().find(|path| !matches!(found.get(path.as_str()), Some(Location::Symlink(_))))
        {
            return Err(format!("the symbolic link {lost} is lost"));
        }
        Ok(verified)
    }

    fn was_at(&self, path: &str, content: u64) -> bool {
        self.seen_at.get(path).is_some_and(|files| files.iter().any(|id| self.was_of(*id, content)))
    }

    /// Whether this was the file's content at some time.
    fn was_of(&self, id: u64, content: u64) -> bool {
        self.states.iter().any(|state| state.files.get(&id).is_some_and(|file| file.content == content))
    }
}

/// For every writer, the store must have a state that a power failure allows.
pub fn verify(directory: &Path, manifests: &[PathBuf]) -> Result<Verified, String> {
    let found = store_of(directory);
    let mut verified = Verified::default();
    for (writer, manifest) in manifests.iter().enumerate() {
        let home = format!("w{writer}");
        let mine = |path: &str| path == home || path.starts_with(&format!("{home}/"));
        let found: BTreeMap<&str, &Location> =
            found.iter().filter(|(path, _)| mine(path)).map(|(path, location)| (path.as_str(), location)).collect();
        let one = History::read(manifest).judge(&found).map_err(|why| format!("writer {writer}: {why}"))?;
        verified.files += one.files;
        verified.bytes += one.bytes;
    }
    Ok(verified)
}

/// For a failure's message: the names in the store, and the last operations of the writers.
pub fn describe(directory: &Path, manifests: &[PathBuf]) -> String {
    const LINES_MAX: usize = 150;
    let found = store_of(directory);
    let story = |manifest: &PathBuf| {
        let lines = fs::read_to_string(manifest).unwrap_or_default();
        let lines: Vec<&str> = lines.lines().filter(|line| !line.starts_with('E')).collect();
        format!("{}:\n{}\n", manifest.display(), lines[lines.len().saturating_sub(LINES_MAX)..].join("\n"))
    };
    format!("the store has {:?}\n{}", found.keys().collect::<Vec<_>>(), manifests.iter().map(story).collect::<String>())
}
