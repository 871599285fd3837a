//! The adapter against the real kernel. A mirrored directory must behave like the directory itself, whether the
//! kernel (passthrough) or the mirror reads and writes its files. Each scenario records its observations, errors
//! included. The native directory and both mounts must yield the same record. Needs root and /dev/fuse.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::ffi::CString;
use std::fmt::Display;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::Ordering;

use crate::mirror::MirrorOptions;
use crate::mounted::{Mounted, permitted};
use rustix::fs::{AtFlags, CWD, FallocateFlags, Mode, OFlags, RenameFlags, Timespec, Timestamps, XattrFlags};

/// The observations of a scenario, line by line.
#[derive(Default)]
struct Story(Vec<String>);

impl Story {
    fn say(&mut self, text: impl Display) {
        self.0.push(text.to_string());
    }

    /// The outcome of an operation that may fail.
    fn outcome<T: std::fmt::Debug, E: Into<io::Error>>(&mut self, what: &str, outcome: Result<T, E>) {
        match outcome.map_err(Into::into) {
            Ok(value) => self.say(format_args!("{what}: {value:?}")),
            Err(error) => self.say(format_args!("{what}: errno {:?}", error.raw_os_error())),
        }
    }

    fn attributes(&mut self, path: &Path) {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        match fs::symlink_metadata(path) {
            Ok(m) => {
                let mtime = if m.mtime() < 1_000_000_000 { (m.mtime(), m.mtime_nsec()) } else { (0, 0) };
                let links = if m.is_dir() { 0 } else { m.nlink() };
                self.say(format_args!(
                    "{name}: {:o} {}:{} links {links} size {} blocks {} mtime {mtime:?}",
                    m.mode(),
                    m.uid(),
                    m.gid(),
                    if m.is_dir() { 0 } else { m.size() },
                    if m.is_dir() { 0 } else { m.blocks() },
                ));
            }
            Err(error) => self.say(format_args!("{name}: errno {:?}", error.raw_os_error())),
        }
    }
}

/// Runs a scenario on a plain directory and on both kinds of mount; all records must be the same.
fn same_everywhere(scenario: impl Fn(&Path, &mut Story) -> io::Result<()>) {
    if !permitted() {
        return;
    }
    // The server shares the process with the program here, and must not apply a umask a second time.
    rustix::process::umask(rustix::fs::Mode::empty());
    let run = |directory: &Path| {
        let mut story = Story::default();
        scenario(directory, &mut story).unwrap_or_else(|error| panic!("{error}, after {:#?}", story.0));
        story.0
    };
    let native = tempfile::tempdir().unwrap();
    let expected = run(native.path());
    assert!(!expected.is_empty());
    for passthrough in [false, true] {
        let mounted = Mounted::new(passthrough);
        assert_eq!(run(mounted.path()), expected, "passthrough: {passthrough}");
    }
}

#[test]
fn create_append_and_truncate_have_the_native_results() {
    same_everywhere(|dir, story| {
        let path = dir.join("file");
        let exclusive = || OpenOptions::new().write(true).create_new(true).mode(0o640).open(&path);
        story.outcome("exclusive", exclusive().map(drop));
        story.outcome("exclusive again", exclusive().map(drop));
        story.attributes(&path);
        fs::write(&path, b"first line\n")?;
        let mut one = OpenOptions::new().append(true).open(&path)?;
        let mut two = OpenOptions::new().append(true).open(&path)?;
        for index in 0..50 {
            writeln!(one, "one {index}")?;
            writeln!(two, "two {index}")?;
        }
        story.say(fs::read_to_string(&path)?);
        one.set_len(20)?;
        story.say(fs::read_to_string(&path)?);
        two.write_all(b"after")?;
        story.say(fs::read_to_string(&path)?);
        story.outcome("open with truncate", OpenOptions::new().write(true).truncate(true).open(&path).map(drop));
        story.attributes(&path);
        let by_path = CString::new(path.as_os_str().as_encoded_bytes())?;
        // SAFETY: the path is a string ended by a NUL that lives across the call.
        story.say(unsafe { libc::truncate(by_path.as_ptr(), 5000) });
        story.attributes(&path);
        story.say(fs::read(&path)?.iter().all(|&byte| byte == 0));
        story.outcome("a directory that is missing", File::create(dir.join("no/file")).map(drop));
        story.outcome("write to a directory", OpenOptions::new().write(true).open(dir).map(drop));
        story.outcome("append only, read", OpenOptions::new().append(true).open(&path)?.read(&mut [0; 4]));
        Ok(())
    });
}

#[test]
fn large_and_random_writes_equal_the_native_ones() {
    same_everywhere(|dir, story| {
        let path = dir.join("file");
        let block: Vec<u8> = (0..3_000_000u32).map(|index| ((index * 31) >> 3) as u8).collect();
        fs::write(&path, &block)?;
        let file = OpenOptions::new().read(true).write(true).open(&path)?;
        let mut place = 12345u64;
        for index in 0..300u64 {
            place = place.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let place = (place >> 20) % 2_900_000;
            file.write_all_at(&[index as u8; 777], place)?;
        }
        file.sync_all()?;
        let sum = fs::read(&path)?.iter().fold(0u64, |sum, &byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
        story.say(sum);
        let mut tail = [0; 10];
        story.outcome("read over the end", file.read_at(&mut tail, 2_999_995));
        story.outcome("read behind the end", file.read_at(&mut tail, 3_000_001));
        let direct = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&path).and_then(|file| {
            let layout = std::alloc::Layout::from_size_align(8192, 4096).unwrap();
            // SAFETY: the layout has a size; the memory is freed with the same layout after the slice is gone.
            unsafe {
                let memory = std::alloc::alloc_zeroed(layout);
                let outcome = file.read_exact_at(std::slice::from_raw_parts_mut(memory, 8192), 4096);
                let same = *memory.add(17) == fs::read(&path)?[4096 + 17];
                std::alloc::dealloc(memory, layout);
                outcome.map(|()| same)
            }
        });
        story.outcome("O_DIRECT", direct);
        Ok(())
    });
}

#[test]
fn sparse_files_and_their_space_equal_the_native_ones() {
    same_everywhere(|dir, story| {
        let path = dir.join("sparse");
        let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(&path)?;
        file.write_all_at(&[1; 4096], 1 << 20)?;
        file.write_all_at(&[2; 4096], 8 << 20)?;
        file.sync_all()?;
        story.attributes(&path);
        for (what, offset) in [("data", 0u64), ("data", 2 << 20), ("data", 9 << 20), ("hole", 0), ("hole", 1 << 20)] {
            let place =
                if what == "data" { rustix::fs::SeekFrom::Data(offset) } else { rustix::fs::SeekFrom::Hole(offset) };
            story.outcome(&format!("{what} from {offset}"), rustix::fs::seek(&file, place));
        }
        story.outcome("end", file.seek(SeekFrom::End(-4096)));
        story.outcome("allocate", rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 12 << 20));
        story.attributes(&path);
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        story.outcome("punch", rustix::fs::fallocate(&file, punch, 1 << 20, 4096));
        let mut page = [9; 16];
        file.read_exact_at(&mut page, 1 << 20)?;
        story.say(format_args!("{page:?}"));
        file.read_exact_at(&mut page, 8 << 20)?;
        story.say(format_args!("{page:?}"));
        story.attributes(&path);
        let target = OpenOptions::new().read(true).write(true).create_new(true).open(dir.join("copy"))?;
        let (mut from, mut to) = (8 << 20, 100);
        let copied = rustix::fs::copy_file_range(&file, Some(&mut from), &target, Some(&mut to), 3000);
        story.outcome("copy_file_range", copied);
        story.say(format_args!("{:?}", &fs::read(dir.join("copy"))?[90..110]));
        Ok(())
    });
}

#[test]
fn renames_equal_the_native_ones() {
    same_everywhere(|dir, story| {
        let at = |name: &str| dir.join(name);
        let rename = |story: &mut Story, from: &str, to: &str, flags: RenameFlags| {
            let outcome = rustix::fs::renameat_with(CWD, at(from), CWD, at(to), flags);
            story.outcome(&format!("{from} -> {to} {flags:?}"), outcome);
        };
        for name in ["a", "b", "c"] {
            fs::write(at(name), name)?;
        }
        fs::create_dir_all(at("d/e"))?;
        fs::create_dir(at("empty"))?;
        rename(story, "a", "b", RenameFlags::NOREPLACE);
        rename(story, "a", "b", RenameFlags::EXCHANGE);
        story.say(fs::read_to_string(at("a"))? + &fs::read_to_string(at("b"))?);
        rename(story, "a", "b", RenameFlags::empty());
        story.say(fs::read_to_string(at("b"))?);
        story.attributes(&at("a"));
        rename(story, "b", "d/e/b", RenameFlags::NOREPLACE);
        rename(story, "d", "d/e/f", RenameFlags::empty());
        rename(story, "empty", "d", RenameFlags::empty());
        rename(story, "d/e", "empty", RenameFlags::empty());
        story.say(fs::read_to_string(at("empty/b"))?);
        rename(story, "c", "d", RenameFlags::empty());
        rename(story, "c", "d", RenameFlags::EXCHANGE);
        story.say(at("d").is_file() && at("c").is_dir());
        rename(story, "missing", "x", RenameFlags::empty());
        story.outcome("rmdir", fs::remove_dir(at("empty")));
        story.outcome("unlink a directory", fs::remove_file(at("empty")));
        story.outcome("rmdir a file", fs::remove_dir(at("d")));
        Ok(())
    });
}

#[test]
fn links_and_unlinked_files_equal_the_native_ones() {
    same_everywhere(|dir, story| {
        let at = |name: &str| dir.join(name);
        fs::write(at("file"), b"content")?;
        story.outcome("link", fs::hard_link(at("file"), at("other")));
        story.outcome("link again", fs::hard_link(at("file"), at("other")));
        story.attributes(&at("file"));
        story.say(fs::metadata(at("file"))?.ino() == fs::metadata(at("other"))?.ino());
        let mut file = OpenOptions::new().read(true).write(true).open(at("file"))?;
        fs::remove_file(at("file"))?;
        story.attributes(&at("other"));
        fs::remove_file(at("other"))?;
        file.write_all(b"still ")?;
        file.seek(SeekFrom::Start(0))?;
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        story.say(format_args!("{text} links {}", file.metadata()?.nlink()));
        file.set_permissions(fs::Permissions::from_mode(0o604))?;
        story.say(file.metadata()?.mode());
        story.outcome("gone", fs::read(at("file")));
        story.outcome("symlink", std::os::unix::fs::symlink("target/../nowhere", at("symlink")));
        story.outcome("readlink", fs::read_link(at("symlink")));
        story.attributes(&at("symlink"));
        story.outcome("follow", fs::read(at("symlink")));
        story.outcome("loop", std::os::unix::fs::symlink("loop", at("loop")));
        story.outcome("follow loop", fs::read(at("loop")));
        let fifo = rustix::fs::mknodat(CWD, at("fifo"), rustix::fs::FileType::Fifo, Mode::from_raw_mode(0o620), 0);
        story.outcome("mkfifo", fifo);
        story.attributes(&at("fifo"));
        Ok(())
    });
}

#[test]
fn files_without_a_name_equal_the_native_ones() {
    same_everywhere(|dir, story| {
        let mut file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_TMPFILE).mode(0o600).open(dir)?;
        file.write_all(b"hidden")?;
        story.say(file.metadata()?.nlink());
        story.say(fs::read_dir(dir)?.count());
        let link = |file: &File| {
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            rustix::fs::linkat(CWD, path, CWD, dir.join("named"), AtFlags::SYMLINK_FOLLOW)
        };
        story.outcome("give a name", link(&file));
        story.say(fs::read_to_string(dir.join("named"))?);
        story.attributes(&dir.join("named"));
        Ok(())
    });
}

#[test]
fn owners_modes_and_times_equal_the_native_ones() {
    same_everywhere(|dir, story| {
        let path = dir.join("file");
        fs::write(&path, b"content")?;
        story.outcome("chmod", fs::set_permissions(&path, fs::Permissions::from_mode(0o6751)));
        story.attributes(&path);
        story.outcome("chown", std::os::unix::fs::chown(&path, Some(1234), Some(4321)));
        story.attributes(&path);
        let time = |secs, nanos| Timespec { tv_sec: secs, tv_nsec: nanos };
        for (secs, nanos) in [(123_456_789, 987_654_321), (0, 0), (1, 1)] {
            let times = Timestamps { last_access: time(77, 5), last_modification: time(secs, nanos) };
            story.outcome("utimens", rustix::fs::utimensat(CWD, &path, &times, AtFlags::empty()));
            story.attributes(&path);
            story.say(fs::metadata(&path)?.atime_nsec());
        }
        let before = fs::metadata(&path)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
        let after = fs::metadata(&path)?;
        story.say(after.ctime_nsec() != before.ctime_nsec() || after.ctime() != before.ctime());
        std::os::unix::fs::symlink("file", dir.join("symlink"))?;
        story.outcome("lchown", std::os::unix::fs::lchown(dir.join("symlink"), Some(5), Some(6)));
        let times = Timestamps { last_access: time(1, 1), last_modification: time(2, 2) };
        let touched = rustix::fs::utimensat(CWD, dir.join("symlink"), &times, AtFlags::SYMLINK_NOFOLLOW);
        story.outcome("touch symlink", touched);
        story.attributes(&dir.join("symlink"));
        story.attributes(&path);
        Ok(())
    });
}

/// A write by an ordinary user clears setuid and setgid; an ordinary user owns the files that it makes.
#[test]
fn ordinary_users_get_the_native_results() {
    same_everywhere(|dir, story| {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o777))?;
        let shared = dir.join("shared");
        fs::write(&shared, b"x")?;
        fs::set_permissions(&shared, fs::Permissions::from_mode(0o6777))?;
        fs::create_dir(dir.join("of-a-group"))?;
        std::os::unix::fs::chown(dir.join("of-a-group"), None, Some(777))?;
        fs::set_permissions(dir.join("of-a-group"), fs::Permissions::from_mode(0o2777))?;
        fs::write(dir.join("private"), b"secret")?;
        fs::set_permissions(dir.join("private"), fs::Permissions::from_mode(0o600))?;
        let script =
            "umask 027; echo y >> shared; echo z > own; mkdir made; echo w > of-a-group/own; mkdir of-a-group/made
            cat private; rm -f private && echo removed; echo status $?";
        let output = Command::new("/bin/sh").args(["-c", script]).current_dir(dir).uid(1000).gid(1000).output()?;
        story.say(String::from_utf8_lossy(&output.stdout));
        for name in ["shared", "own", "made", "of-a-group/own", "of-a-group/made"] {
            story.attributes(&dir.join(name));
        }
        story.say(fs::read_to_string(shared)?);
        Ok(())
    });
}

#[test]
fn extended_attributes_equal_the_native_ones() {
    same_everywhere(|dir, story| {
        let path = dir.join("file");
        fs::write(&path, b"x")?;
        let get = |name: &str| {
            let mut value = [0; 100];
            rustix::fs::getxattr(&path, name, &mut value).map(|bytes| value[..bytes].to_vec())
        };
        story.outcome("none", get("user.a"));
        story.outcome("set", rustix::fs::setxattr(&path, "user.a", b"value", XattrFlags::empty()));
        story.outcome("create again", rustix::fs::setxattr(&path, "user.a", b"other", XattrFlags::CREATE));
        story.outcome("replace none", rustix::fs::setxattr(&path, "user.b", b"other", XattrFlags::REPLACE));
        story.outcome("set empty", rustix::fs::setxattr(&path, "user.b", b"", XattrFlags::empty()));
        story.outcome("get", get("user.a"));
        story.outcome("get empty", get("user.b"));
        story.outcome("size", rustix::fs::getxattr(&path, "user.a", &mut [0; 0][..]));
        story.outcome("too small", rustix::fs::getxattr(&path, "user.a", &mut [0; 3][..]));
        let mut names = [0; 200];
        let bytes = rustix::fs::listxattr(&path, &mut names)?;
        let mut names: Vec<_> = names[..bytes].split(|&byte| byte == 0).map(<[u8]>::to_vec).collect();
        names.sort();
        story.say(format_args!("{names:?}"));
        story.outcome("remove", rustix::fs::removexattr(&path, "user.a"));
        story.outcome("remove again", rustix::fs::removexattr(&path, "user.a"));
        Ok(())
    });
}

#[test]
fn shared_mappings_equal_the_native_ones() {
    same_everywhere(|dir, story| {
        let path = dir.join("mapped");
        fs::write(&path, [b'.'; 10_000])?;
        let file = OpenOptions::new().read(true).write(true).open(&path)?;
        // SAFETY: a fresh mapping of 10,000 bytes of a file that long; unmapped before the end; no other process truncates it.
        unsafe {
            let (read_write, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
            let memory = libc::mmap(std::ptr::null_mut(), 10_000, read_write, shared, file.as_raw_fd(), 0);
            assert_ne!(memory, libc::MAP_FAILED, "{}", io::Error::last_os_error());
            let bytes = std::slice::from_raw_parts_mut(memory.cast::<u8>(), 10_000);
            bytes[5000..5005].copy_from_slice(b"by it");
            story.say(libc::msync(memory, 10_000, libc::MS_SYNC));
            file.write_all_at(b"by write", 100)?;
            story.say(String::from_utf8_lossy(&bytes[98..110]));
            bytes[9999] = b'!';
            drop(file);
            libc::munmap(memory, 10_000);
        }
        let text = fs::read(&path)?;
        story.say(String::from_utf8_lossy(&text[4998..5007]));
        story.say(String::from_utf8_lossy(&text[9990..]));
        Ok(())
    });
}

#[test]
fn listings_equal_the_native_ones() {
    same_everywhere(|dir, story| {
        let names = |dir: &Path| -> io::Result<Vec<String>> {
            let mut names: Vec<_> = fs::read_dir(dir)?
                .map(|entry| entry.map(|e| format!("{} {:?}", e.file_name().to_string_lossy(), e.file_type().ok())))
                .collect::<Result<_, _>>()?;
            names.sort();
            Ok(names)
        };
        let many = dir.join("many");
        fs::create_dir(&many)?;
        for index in 0..5000 {
            File::create(many.join(format!("entry {index} {}", "x".repeat(index % 200))))?;
        }
        fs::create_dir(many.join("directory"))?;
        std::os::unix::fs::symlink("x", many.join("symlink"))?;
        let listed = names(&many)?;
        story.say(listed.len());
        story.say(listed.join("\n"));
        story.say(fs::read_dir(&many)?.all(|entry| {
            let entry = entry.unwrap();
            std::os::unix::fs::DirEntryExt::ino(&entry) == fs::symlink_metadata(entry.path()).unwrap().ino()
        }));
        // Deleting during a listing neither loses nor repeats an entry.
        let mut deleted = 0;
        for entry in fs::read_dir(&many)? {
            let entry = entry?;
            if entry.file_type()?.is_file() {
                fs::remove_file(entry.path())?;
                deleted += 1;
            }
        }
        story.say(deleted);
        story.say(names(&many)?.join("\n"));
        File::create(many.join("late"))?;
        story.say(names(&many)?.join("\n"));
        Ok(())
    });
}

#[test]
fn long_names_and_statfs_results_equal_the_native_ones() {
    same_everywhere(|dir, story| {
        story.outcome("255 bytes", fs::write(dir.join("n".repeat(255)), b"x"));
        story.outcome("256 bytes", fs::write(dir.join("n".repeat(256)), b"x"));
        story.outcome("listed", fs::read_dir(dir)?.next().unwrap().map(|entry| entry.file_name().len()));
        let odd = CString::new(b"\xff\xfe \n\\".to_vec()).unwrap();
        let open = rustix::fs::openat(
            rustix::fs::open(dir, OFlags::RDONLY, Mode::empty())?,
            &odd,
            OFlags::CREATE | OFlags::WRONLY,
            Mode::from_raw_mode(0o600),
        );
        story.outcome("bytes that are not text", open.map(drop));
        story.say(fs::read_dir(dir)?.count());
        let space = rustix::fs::statvfs(dir)?;
        story.say(format_args!("{} {} {} {}", space.f_bsize, space.f_frsize, space.f_blocks, space.f_namemax));
        story.say(format_args!("{} {}", space.f_files, space.f_bfree > 0));
        Ok(())
    });
}

#[test]
fn locks_stay_with_the_kernel() {
    same_everywhere(|dir, story| {
        let path = dir.join("locked");
        let (one, two) = (File::create(&path)?, File::create(&path)?);
        let exclusive = rustix::fs::FlockOperation::NonBlockingLockExclusive;
        story.outcome("flock", rustix::fs::flock(&one, exclusive));
        story.outcome("flock again", rustix::fs::flock(&two, exclusive));
        drop(one);
        story.outcome("flock after close", rustix::fs::flock(&two, exclusive));
        story.outcome("posix lock", rustix::fs::fcntl_lock(&two, exclusive));
        Ok(())
    });
}

/// With passthrough the server gets no reads and writes. Without it, the server gets them.
#[test]
fn passthrough_reads_and_writes_do_not_arrive() {
    if !permitted() {
        return;
    }
    for passthrough in [false, true] {
        let mounted = Mounted::new(passthrough);
        let path = mounted.path().join("file");
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
        let again = File::open(&path).unwrap();
        let mut page = [0; 4096];
        for index in 0..100u64 {
            file.write_all_at(&[index as u8; 4096], index * 4096).unwrap();
            again.read_exact_at(&mut page, index * 4096).unwrap();
            assert_eq!(page, [index as u8; 4096]);
        }
        assert_eq!(file.metadata().unwrap().len(), 409_600);
        let traffic = mounted.mirror.traffic();
        let (reads, writes) = (traffic.reads.load(Ordering::SeqCst), traffic.writes.load(Ordering::SeqCst));
        if passthrough {
            assert_eq!((reads, writes), (0, 0));
        } else {
            assert!(writes >= 100, "{writes} of 100 writes arrived");
        }
        assert_eq!(fs::read(mounted.source().join("file")).unwrap().len(), 409_600);
    }
}

/// Like over NFS: a writer's close returns the device's answer to its data. A reader's close sends no request.
#[test]
fn writer_close_reports_device_errors() {
    if !permitted() {
        return;
    }
    for (flush_on_close, passthrough) in [(false, true), (true, true), (true, false)] {
        let options = MirrorOptions { passthrough, flush_on_close, ..MirrorOptions::default() };
        let mounted = Mounted::serving(options, |mirror, source| {
            fs::write(source.join("there"), "").unwrap();
            fs::write(source.join("faults"), "fsync EIO").unwrap();
            mirror.with_faults(source.join("faults"))
        });
        let closed = |flags: i32| {
            let path = CString::new(mounted.path().join("there").into_os_string().into_encoded_bytes()).unwrap();
            // SAFETY: the path ends in NUL, and the descriptor is this call's own.
            unsafe {
                let file = libc::open(path.as_ptr(), flags);
                assert!(file >= 0, "{}", io::Error::last_os_error());
                if libc::close(file) == 0 { None } else { io::Error::last_os_error().raw_os_error() }
            }
        };
        assert_eq!(closed(libc::O_WRONLY), flush_on_close.then_some(libc::EIO), "a writer's close");
        assert_eq!(closed(libc::O_RDONLY), None, "a reader's close");
    }
}
