//! The guarantees of the session. Every request is answered, whatever the file system does. No request waits behind
//! an operation that sleeps. Interrupts arrive. A notification removes entries from the kernel's caches. Needs root
//! and /dev/fuse.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread;
use std::time::Duration;

use crate::mounted::{Mounted, Place, permitted};
use rustix::fs::OFlags;
use rustix::io::Errno;
use surgetank::mount::reply::DirectorySink;
use surgetank::mount::{
    Agreed, Attributes, BackingId, Entry, Filesystem, Looked, Notifier, Opened, OpenedDirectory, Options, SpaceReport,
    WriteFlags, interrupted,
};
use surgetank_types::error::FsResult;
use surgetank_types::model::{Attr, Caller, Kind, Timestamp};

const FOREVER: Duration = Duration::from_secs(3600);

/// Files whose names say how the file system treats a request for them.
#[derive(Default)]
struct Stage {
    gate: Mutex<bool>,
    opened: Condvar,
    at_gate: AtomicUsize,
    interrupts: AtomicUsize,
    hanging: AtomicBool,
    ended: AtomicBool,
    /// The size of the file "value", and how often names were looked up.
    value: AtomicU64,
    lookups: AtomicUsize,
    notifier: OnceLock<Notifier>,
    backing: OnceLock<(File, BackingId)>,
    writes: AtomicUsize,
}

const FILES: [&str; 4] = ["quick", "panic on read", "value", "twofold"];

impl Stage {
    fn attr(&self, id: u64) -> Attr {
        let kind = if id == 1 { Kind::Directory } else { Kind::File };
        let time = Timestamp::from_parts(1_000_000_000, 0);
        let size_bytes = if id == 1 { 4096 } else { self.value.load(Ordering::SeqCst) };
        let perm = if id == 1 { 0o755 } else { 0o644 };
        let (uid, gid, links, blocks, device) = (0, 0, 1, 8, 0);
        Attr {
            kind,
            perm,
            uid,
            gid,
            ino: id + 1000,
            links,
            size_bytes,
            blocks,
            device,
            atime: time,
            mtime: time,
            ctime: time,
        }
    }

    fn open_gate(&self) {
        *self.gate.lock().unwrap() = true;
        self.opened.notify_all();
    }
}

impl Filesystem for Stage {
    fn started(&self, notifier: &Notifier, _: &Agreed) {
        self.notifier.set(notifier.clone()).unwrap();
    }

    fn ended(&self) {
        assert!(!self.ended.swap(true, Ordering::SeqCst), "ended twice");
    }

    fn lookup(&self, _: &Caller, _: u64, name: &[u8]) -> FsResult<Looked> {
        self.lookups.fetch_add(1, Ordering::SeqCst);
        let name = std::str::from_utf8(name).unwrap();
        assert_ne!(name, "panic", "the test asks for this panic");
        if name.starts_with("gate") {
            self.at_gate.fetch_add(1, Ordering::SeqCst);
            let closed = self.gate.lock().unwrap();
            drop(self.opened.wait_while(closed, |open| !*open).unwrap());
            return Err(Errno::XDEV.into());
        }
        if name == "hang" {
            self.hanging.store(true, Ordering::SeqCst);
            while !interrupted() {
                thread::sleep(Duration::from_millis(1));
            }
            self.interrupts.fetch_add(1, Ordering::SeqCst);
            return Err(Errno::INTR.into());
        }
        match FILES.iter().position(|file| *file == name) {
            Some(index) => {
                let id = index as u64 + 2;
                let attr = self.attr(id);
                Ok(Looked::Found(Entry { id, generation: 0, attr, entry_ttl: FOREVER, attr_ttl: FOREVER }))
            }
            None => Ok(Looked::Missing { ttl: FOREVER }),
        }
    }

    fn getattr(&self, _: &Caller, id: u64, _: Option<u64>) -> FsResult<Attributes> {
        Ok(Attributes { attr: self.attr(id), ttl: FOREVER })
    }

    fn open(&self, _: &Caller, id: u64, flags: OFlags, _: bool) -> FsResult<Opened> {
        let mut opened = Opened { fh: id, no_flush: true, ..Opened::default() };
        if FILES[id as usize - 2] == "twofold" {
            opened.backing = self.backing.get().map(|(_, id)| *id);
            // Opens for writing are mediated; opens for reading use passthrough.
            opened.direct_io = flags.contains(OFlags::WRONLY);
        }
        Ok(opened)
    }

    fn read(&self, _: &Caller, id: u64, _: u64, offset: u64, buffer: &mut [u8]) -> FsResult<usize> {
        match FILES[id as usize - 2] {
            "panic on read" => panic!("the test asks for this panic"),
            _ => {
                let left = self.value.load(Ordering::SeqCst).saturating_sub(offset);
                let bytes = buffer.len().min(left as usize);
                buffer[..bytes].fill(b'v');
                Ok(bytes)
            }
        }
    }

    fn write(&self, _: &Caller, _: u64, _: u64, offset: u64, bytes: &[u8], _: WriteFlags) -> FsResult<usize> {
        assert_eq!(bytes.as_ptr() as usize % 4096, 0, "data starts on a page boundary");
        self.writes.fetch_add(1, Ordering::SeqCst);
        Ok(self.backing.get().unwrap().0.write_at(bytes, offset)?)
    }

    fn opendir(&self, _: &Caller, _: u64) -> FsResult<OpenedDirectory> {
        Ok(OpenedDirectory::default())
    }

    fn readdir(&self, _: &Caller, _: u64, _: u64, offset: u64, sink: &mut DirectorySink<'_>) -> FsResult<()> {
        for (index, name) in FILES.iter().enumerate().skip(offset as usize) {
            if sink.add(index as u64 + 1002, index as u64 + 1, Kind::File, name.as_bytes()) {
                break;
            }
        }
        Ok(())
    }

    fn statfs(&self, _: &Caller, _: u64) -> FsResult<SpaceReport> {
        Ok(SpaceReport::default())
    }
}

fn stage() -> (Arc<Stage>, Place) {
    let stage = Arc::new(Stage { value: AtomicU64::new(5), ..Stage::default() });
    let place = Place::new(&stage, &Options { passthrough: true, ..Options::default() });
    (stage, place)
}

fn errno<T>(outcome: io::Result<T>) -> Option<i32> {
    outcome.err().and_then(|error| error.raw_os_error())
}

#[test]
fn panic_of_one_request_is_only_an_io_error() {
    if !permitted() {
        return;
    }
    let (_stage, place) = stage();
    for _ in 0..3 {
        assert_eq!(errno(fs::metadata(place.path().join("panic"))), Some(libc::EIO));
        assert_eq!(errno(fs::read(place.path().join("panic on read"))), Some(libc::EIO));
        assert_eq!(fs::read(place.path().join("quick")).unwrap(), b"vvvvv");
    }
    assert!(place.session.running());
}

#[test]
fn sleeping_requests_do_not_block_other_requests() {
    if !permitted() {
        return;
    }
    let (stage, place) = stage();
    let waiters: Vec<_> = (0..20)
        .map(|index| {
            let path = place.path().join(format!("gate {index}"));
            thread::spawn(move || errno(fs::metadata(path)))
        })
        .collect();
    while stage.at_gate.load(Ordering::SeqCst) < waiters.len() {
        // This read would never return if a sleeping operation blocked the requests after it.
        assert_eq!(fs::read(place.path().join("quick")).unwrap(), b"vvvvv");
        thread::sleep(Duration::from_millis(1));
    }
    assert!(place.session.threads() > waiters.len());
    stage.open_gate();
    for waiter in waiters {
        assert_eq!(waiter.join().unwrap(), Some(libc::EXDEV));
    }
    assert_eq!(fs::read(place.path().join("quick")).unwrap(), b"vvvvv");
}

#[test]
fn sleeping_requests_beyond_the_threads_only_delay() {
    if !permitted() {
        return;
    }
    let stage = Arc::<Stage>::default();
    let place = Place::new(&stage, &Options { threads_max: 2, ..Options::default() });
    let waiters: Vec<_> = (0..6)
        .map(|index| {
            let path = place.path().join(format!("gate {index}"));
            thread::spawn(move || errno(fs::metadata(path)))
        })
        .collect();
    while stage.at_gate.load(Ordering::SeqCst) < 2 {
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(place.session.threads(), 2);
    stage.open_gate();
    for waiter in waiters {
        assert_eq!(waiter.join().unwrap(), Some(libc::EXDEV));
    }
}

#[test]
fn killed_program_ends_during_a_request() {
    if !permitted() {
        return;
    }
    let (stage, place) = stage();
    for signal in [libc::SIGINT, libc::SIGKILL] {
        stage.hanging.store(false, Ordering::SeqCst);
        let mut child = Command::new("cat").arg(place.path().join("hang")).stdout(Stdio::null()).spawn().unwrap();
        while !stage.hanging.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(1));
        }
        // SAFETY: the test started the child and has not waited for it.
        unsafe { libc::kill(child.id() as i32, signal) };
        assert_eq!(child.wait().unwrap().signal(), Some(signal));
    }
    assert_eq!(stage.interrupts.load(Ordering::SeqCst), 2);
    assert_eq!(fs::read(place.path().join("quick")).unwrap(), b"vvvvv");

    // A process whose request is open when the mount is torn down gets an error.
    stage.hanging.store(false, Ordering::SeqCst);
    let mut child = Command::new("cat").arg(place.path().join("hang")).stderr(Stdio::null()).spawn().unwrap();
    while !stage.hanging.load(Ordering::SeqCst) {
        thread::sleep(Duration::from_millis(1));
    }
    rustix::mount::unmount(place.path(), rustix::mount::UnmountFlags::FORCE).ok();
    assert_eq!(child.wait().unwrap().code(), Some(1));
    while stage.interrupts.load(Ordering::SeqCst) < 3 {
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn stopping_and_unmounting_end_the_session() {
    if !permitted() {
        return;
    }
    let (stopped, place) = stage();
    assert_eq!(fs::read(place.path().join("quick")).unwrap(), b"vvvvv");
    place.session.stop();
    assert!(!place.session.running());
    assert!(stopped.ended.load(Ordering::SeqCst));
    assert_eq!(place.session.threads(), 0);
    drop(place);

    let (unmounted, place) = stage();
    surgetank::mount::detach(place.path(), false).unwrap();
    assert!(place.session.wait(Some(Duration::from_secs(20))));
    assert!(unmounted.ended.load(Ordering::SeqCst));
    assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0, "the bare directory is back");
    assert!(surgetank::mount::detach(place.path(), false).is_err(), "a second detach succeeds");
    // A mount without a server, which the drop at the end of the test unmounts.
    let device = surgetank::mount::attach(place.path(), &Default::default()).unwrap();
    drop(device);
}

#[test]
fn notified_entries_leave_the_kernel_caches() {
    if !permitted() {
        return;
    }
    let (stage, place) = stage();
    let notifier = stage.notifier.get().unwrap();
    let path = place.path().join("value");
    let size = || fs::metadata(&path).unwrap().len();
    // (A read would make the kernel request the access time at the next stat.)
    assert_eq!(size(), 5);
    stage.value.store(9000, Ordering::SeqCst);
    assert_eq!(size(), 5, "the kernel caches attributes for an hour");
    notifier.inval_inode(4, 0, 0).unwrap();
    assert_eq!((size(), fs::read(&path).unwrap().len()), (9000, 9000));

    let looked = || stage.lookups.load(Ordering::SeqCst);
    size();
    let before = looked();
    size();
    assert_eq!(looked(), before, "the kernel caches names for an hour");
    notifier.inval_entry(1, b"value").unwrap();
    size();
    assert_eq!(looked(), before + 1);

    let missing = place.path().join("missing");
    assert!(!missing.exists());
    let before = looked();
    assert!(!missing.exists());
    assert_eq!(looked(), before, "the kernel caches missing names as well");
    notifier.inval_entry(1, b"missing").unwrap();
    assert!(!missing.exists());
    assert_eq!(looked(), before + 1);
    notifier.inval_inode(777, 0, 0).unwrap();
    notifier.inval_entry(1, b"an unknown name").unwrap();
    notifier.delete(1, 4, b"value").unwrap();
    size();
    assert!(looked() > before + 1);
}

/// An inode open for passthrough may also be opened so that reads and writes reach the server, with the same backing
/// file.
#[test]
fn writer_can_be_mediated_beside_passthrough_readers() {
    if !permitted() {
        return;
    }
    let (stage, place) = stage();
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&[b'o'; 8192], 0).unwrap();
    stage.value.store(8192, Ordering::SeqCst);
    let id = stage.notifier.get().unwrap().backing_open(&file).unwrap();
    stage.backing.set((file, id)).unwrap();
    let path = place.path().join("twofold");
    let mut reader = File::open(&path).unwrap();
    let writer = OpenOptions::new().write(true).open(&path).unwrap();
    writer.write_all_at(&[b'n'; 4096], 0).unwrap();
    assert_eq!(stage.writes.load(Ordering::SeqCst), 1, "the write reaches the server");
    let mut content = Vec::new();
    reader.read_to_end(&mut content).unwrap();
    assert_eq!(content, [[b'n'; 4096], [b'o'; 4096]].concat(), "the reader reads the backing file");
    drop((reader, writer));
    stage.notifier.get().unwrap().backing_close(id).unwrap();
    assert!(stage.notifier.get().unwrap().backing_close(id).is_err(), "a backing file closes twice");
}

/// Many threads at once: each thread gets its own names, contents and errors.
#[test]
fn crowd_of_programs_is_served() {
    if !permitted() {
        return;
    }
    for passthrough in [false, true] {
        let mounted = Mounted::new(passthrough);
        let workers: Vec<_> = (0..8)
            .map(|worker| {
                let dir = mounted.path().to_owned();
                thread::spawn(move || {
                    for index in 0..150 {
                        let (one, two) = (dir.join(format!("{worker}-{index}")), dir.join(format!("{worker}+{index}")));
                        let text = format!("{worker} {index} ").repeat(1000);
                        fs::write(&one, &text).unwrap();
                        fs::rename(&one, &two).unwrap();
                        assert_eq!(errno(fs::read(&one)), Some(libc::ENOENT));
                        assert_eq!(fs::read_to_string(&two).unwrap(), text);
                        if index % 2 == 0 {
                            fs::remove_file(&two).unwrap();
                        }
                    }
                })
            })
            .collect();
        for worker in workers {
            worker.join().unwrap();
        }
        assert_eq!(fs::read_dir(mounted.path()).unwrap().count(), 8 * 75);
        assert_eq!(fs::read_dir(mounted.source()).unwrap().count(), 8 * 75);
    }
}
