//! The real mount against the reference model. The program under `surgetank run` is this test itself, which performs
//! random operations by system calls. Each result, and the store afterwards, must equal the reference.
//!
//! `SURGETANK_MODEL_CASES` makes it run longer, `SURGETANK_MODEL_SEED` repeats a run.

#![allow(clippy::unwrap_used, clippy::expect_used)] // a test reports its finding by a panic

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::os::fd::FromRawFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::process::Command;

use proptest::collection::vec;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use rustix::fs::{AtFlags, CWD, FallocateFlags, RenameFlags, XattrFlags};
use rustix::io::Errno;

use surgetank_testkit::model::disk;
use surgetank_testkit::model::operation;
use surgetank_testkit::model::operation::{Access, Allocating, Operation, Renaming, SLOTS, Setting};
use surgetank_testkit::model::reference::{Answer, Kind, LINK_TARGET, Outcome, Reference, Seen};
use surgetank_testkit::seeds;

const CASES: u64 = 6;
const STEPS: usize = 150;
/// Gives the program inside the mount the seed of its operations.
const INSIDE: &str = "SURGETANK_MODEL_INSIDE";

pub fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

/// The same seed yields the same operations, so inside and outside agree on them without communication.
pub fn operations(seed: u64) -> Vec<Operation> {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config = Config { failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    vec(operation::operation(), STEPS).new_tree(&mut runner).unwrap().current()
}

fn has_older_links(seed: u64) -> bool {
    seed.is_multiple_of(2)
}

/// How the program inside reaches its files.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Doors {
    Mount,
    /// By libc, whose functions the preload shim replaces.
    Shim,
    /// Operations alternate between libc and the plain system call, which the shim does not see.
    Alternating,
}

/// Gives the program inside its doors.
const DOORS: &str = "SURGETANK_MODEL_DOORS";
/// Set for one of several processes: the program that moves files meanwhile.
const MOVER: &str = "SURGETANK_MODEL_MOVER";
/// How many processes the program starts.
const PROCESSES: &str = "SURGETANK_MODEL_PROCESSES";
/// The program lets directories be delegated before it creates files in them.
const DELEGATED: &str = "SURGETANK_MODEL_DELEGATED";

/// The room on the tiers.
#[derive(Clone, Copy, PartialEq)]
enum Room {
    /// For a part of the files.
    Little,
    /// Enough to delegate directories.
    Ample,
}

#[test]
fn mount_equals_the_reference() {
    is_what_the_reference_says(Doors::Mount, 1, Room::Little);
}

#[test]
fn shim_equals_the_reference() {
    is_what_the_reference_says(Doors::Shim, 1, Room::Little);
}

#[test]
fn both_doors_alternating_equal_the_reference() {
    is_what_the_reference_says(Doors::Alternating, 1, Room::Little);
}

/// The tiers hold a part of the files that the processes write. The agent evicts durable files and fetches them again
/// throughout.
#[test]
fn several_processes_equal_their_references() {
    is_what_the_reference_says(Doors::Alternating, 3, Room::Little);
}

#[test]
fn shim_in_delegated_directories_equals_the_reference() {
    is_what_the_reference_says(Doors::Shim, 1, Room::Ample);
}

#[test]
fn both_doors_in_delegated_directories_equal_the_reference() {
    is_what_the_reference_says(Doors::Alternating, 1, Room::Ample);
}

#[test]
fn processes_in_delegated_directories_equal_their_references() {
    is_what_the_reference_says(Doors::Alternating, 3, Room::Ample);
}

/// The operations of each process, and its directory.
fn parts(seed: u64, processes: u64) -> impl Iterator<Item = (u64, String)> {
    (0..processes)
        .map(move |part| if processes == 1 { (seed, ".".to_owned()) } else { (seed << 8 | part, format!("p{part}")) })
}

/// Directories that are to be delegated belong to the programs, and are empty before.
const OWN: &str = "own";

fn is_what_the_reference_says(doors: Doors, processes: u64, room: Room) {
    let (mut by_agent, mut by_index, mut delegated) = (0, 0, 0);
    let seed = number("SURGETANK_MODEL_SEED");
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let first = seed.unwrap_or_else(|| u64::from(now.subsec_nanos()));
    let searched = first..first + number("SURGETANK_MODEL_CASES").unwrap_or(CASES);
    for seed in seeds::kept("model_mount").into_iter().chain(searched) {
        eprintln!("SURGETANK_MODEL_SEED={seed}");
        let scratch = disk::Scratch::new();
        let store = scratch.join("store");
        let mut references: Vec<_> = parts(seed, processes).map(|(seed, dir)| (seed, dir, Reference::new())).collect();
        for (seed, dir, reference) in &mut references {
            fs::create_dir_all(store.join(&*dir)).unwrap();
            match room {
                Room::Little => disk::lay_out(&store.join(dir), reference, has_older_links(*seed)),
                Room::Ample => *dir = format!("{dir}/{OWN}"),
            }
        }
        // The rule says that all files are small, so they are written directly while there is room.
        let sizes = scratch.join("sizes.toml");
        fs::write(&sizes, "[[rules]]\nmatch = \"**\"\nsize = \"256K\"\n").unwrap();
        let caps = match room {
            Room::Ample => ["8GiB", "4GiB"],
            Room::Little if processes == 1 => ["1MiB", "4GiB"],
            Room::Little => ["512KiB", "512KiB"],
        };
        let mut command = Command::new(env!("CARGO_BIN_EXE_surgetank"));
        if room == Room::Ample {
            command.env(DELEGATED, "1");
        }
        if processes > 1 {
            command.env(PROCESSES, processes.to_string());
        }
        let output = command
            .args(["run", "--quiet", "--over"])
            .arg(&store)
            .arg("--state")
            .arg(scratch.join("state"))
            .args(["--tier", &format!("fast={}:{}", scratch.join("fast").display(), caps[0])])
            .args(["--tier", &format!("slow={}:{}", scratch.join("slow").display(), caps[1])])
            // (A rule with sizes prevents delegations.)
            .args((room == Room::Little).then(|| format!("--config={}", sizes.display())))
            .args(["--quiet-period", if processes == 1 { "1s" } else { "0s" }])
            .args((doors == Doors::Mount).then_some("--no-preload"))
            .arg("--")
            .arg(std::env::current_exe().unwrap())
            .args(INSIDE_ARGS)
            .env(INSIDE, seed.to_string())
            .env(DOORS, format!("{doors:?}"))
            .env("SURGETANK_STATE", scratch.join("state"))
            .env("SURGETANK_REPORT", "1")
            .current_dir(&store)
            .output()
            .unwrap();
        let printed = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        let counts = printed.split(['[', ':', ';', ',', ' ']).collect::<Vec<_>>();
        let number_before = |words: [&str; 3]| -> u64 {
            let places = counts.windows(4).filter(|window| window[1..] == words);
            places.filter_map(|window| window[0].parse::<u64>().ok()).sum()
        };
        by_agent += number_before(["from", "the", "agent"]);
        by_index += number_before(["opens", "from", "the"]);
        delegated += number_before(["created", "in", "delegated"]);
        let done: Vec<String> = operations(seed).iter().map(|one| format!("    {one:?},")).collect();
        let done = if processes == 1 { done.join("\n") } else { String::new() };
        assert!(output.status.success(), "SURGETANK_MODEL_SEED={seed}: {}\n{printed}\n{done}", output.status);
        for (own, dir, reference) in &mut references {
            operations(*own).iter().for_each(|operation| drop(reference.apply(operation)));
            reference.close_all();
            let found = disk::differences(&store.join(&*dir), reference, &BTreeSet::new());
            assert!(found.is_empty(), "SURGETANK_MODEL_SEED={seed}: {dir} in the store: {found:#?}\n{printed}");
        }
    }
    eprintln!("{by_agent} opens by the agent, {by_index} by the index, {delegated} in delegated directories");
    assert_eq!(delegated > 0, room == Room::Ample, "{delegated} created in delegated directories");
    let served = by_agent > 0 && by_index > 0;
    assert_eq!(served, doors != Doors::Mount, "{by_agent} opens by the agent, {by_index} by the index");
}

const INSIDE_ARGS: [&str; 4] = ["--exact", "model_mount::inside_the_mount", "--ignored", "--nocapture"];

#[test]
#[ignore = "the program that the other test runs in its mount"]
fn inside_the_mount() {
    let seed = number(INSIDE).expect("run by the other test");
    match number(PROCESSES) {
        Some(processes) => be_several(seed, processes),
        None => be_one(seed, std::env::var_os(MOVER).as_deref()),
    }
}

fn be_several(seed: u64, processes: u64) {
    let child = |(seed, dir): (u64, String)| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(INSIDE_ARGS).env_remove(PROCESSES).env(MOVER, env!("CARGO_BIN_EXE_surgetank"));
        command.env(INSIDE, seed.to_string()).current_dir(dir).spawn().unwrap()
    };
    let children: Vec<_> = parts(seed, processes).map(child).collect();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
}

/// How many operations pass between two moves: the mover evicts durable files, or prefetches files, alternately.
const MOVED_EVERY: usize = 10;

fn be_one(seed: u64, mover: Option<&OsStr>) {
    // SAFETY: takes and returns a number. The shim sees this call of libc.
    unsafe { libc::umask(0) };
    let doors = std::env::var(DOORS).unwrap();
    let mut reference = Reference::new();
    // The test outside lays out the store in the same way.
    let twin = disk::Scratch::new();
    let has_delegated = std::env::var_os(DELEGATED).is_some();
    if has_delegated {
        fs::DirBuilder::new().mode(0o755).create(OWN).unwrap();
        std::env::set_current_dir(OWN).unwrap();
    } else {
        disk::lay_out(&twin.join("store"), &mut reference, has_older_links(seed));
    }
    let mut files = [const { None }; SLOTS];
    let operations = operations(seed);
    for (index, operation) in operations.iter().enumerate() {
        if let Operation::Create { path, .. } = operation
            && has_delegated
        {
            delegate(path);
        }
        if let Some(mover) = mover
            && index % MOVED_EVERY == 0
        {
            let verb = if index % (2 * MOVED_EVERY) == 0 { "evict" } else { "prefetch" };
            let moved = Command::new(mover).args([verb, "."]).output().unwrap();
            assert!(moved.status.success(), "{verb}: {moved:?}");
        }
        let mut want = reference.apply(operation);
        // For a descriptor of the plain file only libc gives the expected answer.
        let only_libc = matches!(operation, Operation::StatOpen { .. });
        BY_LIBC.set(doors != "Alternating" || index % 2 == 0 || only_libc);
        let mut got = apply(&mut files, operation).unwrap_or_else(Outcome::Failed);
        if let (Outcome::Seen(want), Outcome::Seen(got)) = (&mut want, &mut got)
            && want.mtime.is_none()
        {
            got.mtime = None;
        }
        if want != got {
            let before: Vec<String> = operations[..=index].iter().map(|one| format!("    {one:?},")).collect();
            panic!("operation {index}, {operation:?}: {got:?}, not {want:?}\n{}", before.join("\n"));
        }
    }
}

/// Files come and go in the directory until it is delegated, if possible. The next file there is then created without
/// a request.
fn delegate(path: &str) {
    const ENOUGH: usize = 70;
    let dir = path.rsplit_once('/').map_or(".", |(dir, _)| dir);
    let names = (0..ENOUGH).map(|number| std::ffi::CString::new(format!("{dir}/scratch-{number}")).unwrap());
    let make = |name: &std::ffi::CString| {
        let flags = libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY | libc::O_CLOEXEC;
        // SAFETY: a path that ends with a zero byte and lives through the call; a descriptor that is ours.
        unsafe { libc::close(libc::open(name.as_ptr(), flags, 0o600)) == 0 }
    };
    let made: Vec<std::ffi::CString> = names.take_while(make).collect();
    // SAFETY: as above.
    made.iter().for_each(|name| assert_eq!(unsafe { libc::unlink(name.as_ptr()) }, 0));
}

fn path(path: &str) -> &Path {
    Path::new(if path.is_empty() { "." } else { path })
}

fn errno(why: &std::io::Error) -> Errno {
    Errno::from_io_error(why).unwrap_or(Errno::IO)
}

thread_local! {
    /// This operation uses libc.
    static BY_LIBC: std::cell::Cell<bool> = const { std::cell::Cell::new(true) };
}

fn open(at: &str, access: Access, append: bool, truncate: bool, more: i32, perm: u32) -> Result<File, Errno> {
    let mut flags = more | libc::O_NOFOLLOW;
    if append {
        flags |= libc::O_APPEND;
    }
    if truncate {
        flags |= libc::O_TRUNC;
    }
    let flags = flags
        | match access {
            Access::Read => libc::O_RDONLY,
            Access::Write => libc::O_WRONLY,
            Access::Both => libc::O_RDWR,
        };
    let file = if BY_LIBC.get() {
        let at = std::ffi::CString::new(path(at).as_os_str().as_encoded_bytes()).unwrap();
        // SAFETY: a path that ends with a zero byte and lives through the call.
        let number = unsafe { libc::open(at.as_ptr(), flags | libc::O_CLOEXEC, perm) };
        if number < 0 {
            return Err(errno(&std::io::Error::last_os_error()));
        }
        // SAFETY: just opened, and not shared.
        unsafe { File::from_raw_fd(number) }
    } else {
        File::from(rustix::fs::open(
            path(at),
            rustix::fs::OFlags::from_bits_retain(flags as u32),
            rustix::fs::Mode::from_raw_mode(perm),
        )?)
    };
    // The reference does not model open directories.
    if file.metadata().map_err(|why| errno(&why))?.is_dir() { Err(Errno::ISDIR) } else { Ok(file) }
}

fn seen(metadata: &fs::Metadata) -> Seen {
    let kind = disk::kind_of(metadata.file_type()).unwrap();
    Seen {
        kind,
        perm: metadata.mode() & 0o7777,
        links: metadata.nlink() as u32,
        size: if kind == Kind::Directory { 0 } else { metadata.len() },
        mtime: (kind == Kind::File).then_some(metadata.mtime()),
    }
}

fn seen_raw(stat: &rustix::fs::Stat) -> Seen {
    let kind = match stat.st_mode & libc::S_IFMT {
        libc::S_IFDIR => Kind::Directory,
        libc::S_IFLNK => Kind::Symlink,
        _ => Kind::File,
    };
    Seen {
        kind,
        perm: stat.st_mode & 0o7777,
        links: stat.st_nlink as u32,
        size: if kind == Kind::Directory { 0 } else { stat.st_size as u64 },
        mtime: (kind == Kind::File).then_some(stat.st_mtime),
    }
}

pub fn apply(files: &mut [Option<File>; SLOTS], operation: &Operation) -> Answer {
    let at = |slot: &usize| files[*slot].as_ref().ok_or(Errno::BADF);
    match operation {
        Operation::Create { path, slot, perm, access, exclusive, append, truncate } => {
            let more = libc::O_CREAT | if *exclusive { libc::O_EXCL } else { 0 };
            files[*slot] = Some(open(path, *access, *append, *truncate, more, *perm)?);
        }
        Operation::Open { path, slot, access, append, truncate } => {
            files[*slot] = Some(open(path, *access, *append, *truncate, 0, 0)?);
        }
        Operation::Read { slot, offset, length } => {
            let mut bytes = vec![0; *length];
            let mut done = 0;
            while done < bytes.len() {
                match at(slot)?.read_at(&mut bytes[done..], offset + done as u64).map_err(|why| errno(&why))? {
                    0 => break,
                    count => done += count,
                }
            }
            bytes.truncate(done);
            return Ok(Outcome::Bytes(bytes));
        }
        Operation::Write { slot, offset, length, byte } => {
            at(slot)?.write_all_at(&vec![*byte; *length], *offset).map_err(|why| errno(&why))?;
        }
        Operation::Truncate { path: at, size } => {
            let at = std::ffi::CString::new(path(at).as_os_str().as_encoded_bytes()).unwrap();
            // SAFETY: a path that ends with a zero byte and lives through the call.
            if unsafe { libc::truncate(at.as_ptr(), i64::try_from(*size).unwrap()) } != 0 {
                return Err(errno(&std::io::Error::last_os_error()));
            }
        }
        Operation::TruncateOpen { slot, size } => rustix::fs::ftruncate(at(slot)?, *size)?,
        Operation::Allocate { slot, offset, length, how } => {
            let flags = match how {
                Allocating::Extend => FallocateFlags::empty(),
                Allocating::KeepSize => FallocateFlags::KEEP_SIZE,
                Allocating::Punch => FallocateFlags::KEEP_SIZE | FallocateFlags::PUNCH_HOLE,
            };
            rustix::fs::fallocate(at(slot)?, flags, *offset, *length)?;
        }
        Operation::Close { slot } => files[*slot] = None,
        Operation::Unlink { path: at } => rustix::fs::unlink(path(at))?,
        Operation::Mkdir { path: at, perm } => rustix::fs::mkdir(path(at), rustix::fs::Mode::from_raw_mode(*perm))?,
        Operation::Rmdir { path: at } => rustix::fs::rmdir(path(at))?,
        Operation::Rename { from, to, how } => {
            let flags = match how {
                Renaming::Plain => RenameFlags::empty(),
                Renaming::NoReplace => RenameFlags::NOREPLACE,
                Renaming::Exchange => RenameFlags::EXCHANGE,
            };
            rustix::fs::renameat_with(CWD, path(from), CWD, path(to), flags)?;
        }
        Operation::Link { from, to } => rustix::fs::linkat(CWD, path(from), CWD, path(to), AtFlags::empty())?,
        Operation::Symlink { path: at } => rustix::fs::symlink(LINK_TARGET, path(at))?,
        Operation::Readlink { path: at } => {
            let target = rustix::fs::readlink(path(at), Vec::new())?;
            return Ok(Outcome::Target(target.into_string().unwrap()));
        }
        Operation::Chmod { path: at, perm } => rustix::fs::chmod(path(at), rustix::fs::Mode::from_raw_mode(*perm))?,
        Operation::Utimens { path: at, seconds } => disk::set_mtime(path(at), *seconds)?,
        Operation::SetXattr { path: at, name, byte, how } => {
            let flags = match how {
                Setting::Any => XattrFlags::empty(),
                Setting::Create => XattrFlags::CREATE,
                Setting::Replace => XattrFlags::REPLACE,
            };
            rustix::fs::setxattr(path(at), name.as_str(), &[*byte; 3], flags)?;
        }
        Operation::RemoveXattr { path: at, name } => rustix::fs::removexattr(path(at), name.as_str())?,
        Operation::ListXattr { path: at } => return Ok(Outcome::Xattrs(disk::xattrs(path(at))?)),
        Operation::List { path: at } => {
            let mut names = BTreeMap::new();
            for entry in fs::read_dir(path(at)).map_err(|why| errno(&why))? {
                let entry = entry.map_err(|why| errno(&why))?;
                let kind = disk::kind_of(entry.file_type().map_err(|why| errno(&why))?).unwrap();
                assert!(names.insert(entry.file_name().into_string().unwrap(), kind).is_none(), "listed twice");
            }
            return Ok(Outcome::Names(names));
        }
        Operation::Stat { path: at } => {
            if BY_LIBC.get() {
                return Ok(Outcome::Seen(seen(&fs::symlink_metadata(path(at)).map_err(|why| errno(&why))?)));
            }
            return Ok(Outcome::Seen(seen_raw(&rustix::fs::lstat(path(at))?)));
        }
        Operation::StatOpen { slot } => {
            return Ok(Outcome::Seen(seen(&at(slot)?.metadata().map_err(|why| errno(&why))?)));
        }
        Operation::Fsync { slot } => at(slot)?.sync_all().map_err(|why| errno(&why))?,
        Operation::FsyncDir { path: at } => {
            let dir = OpenOptions::new()
                .read(true)
                .custom_flags(libc::O_DIRECTORY)
                .open(path(at))
                .map_err(|why| errno(&why))?;
            rustix::fs::fsync(dir)?;
        }
    }
    Ok(Outcome::Fine)
}
