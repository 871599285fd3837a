//! The place where members of a pool find each other: the root of the store, in a directory or on a server of objects.
//!
//! A file here appears whole, and only if no file has its name: in a directory by a hard link, on a server by the condition of
//! the write. A server that does not honour this condition is refused.
//!
//! The danger that this avoids: two members that both begin a pool under one name.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{AtFlags, Dir, Mode, OFlags};
use rustix::io::Errno;
use surgetank_store::checksum;
use surgetank_store::object::{Objects, When, Words, directory_number, is_condition_failed};
#[cfg(feature = "s3")]
use surgetank_store::s3::{Place as S3Place, S3};
use surgetank_types::error::{Error, Result};

/// The end of a temporary's name. So no temporary has the name of a pool's file.
pub(super) const FRESH: &str = ".new";
/// A pool's file is at most so long.
const BYTES_MAX: u64 = 1024;

/// The store, before a process opens it.
pub enum Where {
    /// Its directory.
    Directory(OwnedFd),
    /// The URL of a server.
    Server(String),
}

impl Where {
    /// Errors: the server does not answer, or cannot serve a pool.
    pub fn open(self) -> Result<Meeting> {
        match self {
            Self::Directory(dir) => Ok(Meeting::Directory(dir)),
            Self::Server(url) => Meeting::on_server(&url),
        }
    }
}

/// Can the store of this URL serve a pool?
pub fn is_supported(url: &str) -> bool {
    cfg!(feature = "s3") && url.starts_with("s3://")
}

/// The root of the store.
pub enum Meeting {
    Directory(OwnedFd),
    Server(Arc<dyn Objects>),
}

impl Meeting {
    fn on_server(url: &str) -> Result<Self> {
        #[cfg(feature = "s3")]
        if is_supported(url) {
            return Self::conditional(Arc::new(S3::open(S3Place::parse(url)?)?));
        }
        Err(unsupported(url))
    }

    /// Errors: two members could both make a file.
    fn conditional(server: Arc<dyn Objects>) -> Result<Self> {
        if server.abilities().if_absent {
            return Ok(Self::Server(server));
        }
        let why = "its server does not honour conditional writes (If-None-Match)";
        Err(Error::new(format!("the store {} cannot serve a pool", server.describe()))
            .why(why)
            .remedy("use another server, or work without a pool: --pool none"))
    }

    /// For a look only: nothing is written.
    pub fn to_look_at(store: &Path, url: Option<&str>) -> Result<Self> {
        let Some(url) = url else {
            let opened = rustix::fs::open(store, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
            let failed = |why| Error::new(format!("{} cannot be looked into", store.display())).why(why);
            return opened.map(Self::Directory).map_err(failed);
        };
        #[cfg(feature = "s3")]
        if is_supported(url) {
            return Ok(Self::Server(Arc::new(S3::open_to_read(S3Place::parse(url)?)?)));
        }
        Err(unsupported(url))
    }

    /// The names with this prefix among the first ones of the root.
    pub(super) fn names(&self, prefix: &[u8], at_most: usize) -> io::Result<Vec<Vec<u8>>> {
        let mut names = Vec::new();
        match self {
            Self::Directory(dir) => {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
                let dir = rustix::fs::openat(dir, c".", flags, Mode::empty())?;
                for entry in Dir::read_from(dir)?.take(at_most) {
                    let entry = entry?;
                    let name = entry.file_name().to_bytes();
                    names.extend(name.starts_with(prefix).then(|| name.to_vec()));
                }
            }
            Self::Server(server) => {
                let mut from = None;
                loop {
                    let page = server.list(key(prefix)?, true, from.as_deref())?;
                    names.extend(page.objects.into_iter().map(|object| object.key.into_bytes()));
                    from = page.next;
                    if from.is_none() || names.len() >= at_most {
                        break;
                    }
                }
            }
        }
        Ok(names)
    }

    /// `None`: there is no such file.
    pub(super) fn read(&self, name: &[u8]) -> io::Result<Option<Vec<u8>>> {
        let server = match self {
            Self::Directory(dir) => return read_file(dir, name),
            Self::Server(server) => server,
        };
        let Some(object) = server.head(key(name)?)? else { return Ok(None) };
        let mut bytes = Vec::new();
        if object.size_bytes == 0 {
            return Ok(Some(bytes));
        }
        match server.get(&object.key, 0..object.size_bytes.min(BYTES_MAX), Some(&object.etag)) {
            Ok(body) => body.take(BYTES_MAX).read_to_end(&mut bytes).map(|_| Some(bytes)),
            Err(why) if is_condition_failed(&why) || why.kind() == ErrorKind::NotFound => Ok(None),
            Err(why) => Err(why),
        }
    }

    /// Makes a file that appears whole, if the directory can link. Returns whether it was made: `false` if one of this
    /// name is there.
    pub(super) fn publish(&self, name: &[u8], content: &[u8]) -> io::Result<bool> {
        let server = match self {
            Self::Directory(dir) => return publish(dir.as_fd(), name, content),
            Self::Server(server) => server,
        };
        match server.put(key(name)?, &content, checksum::of_bytes(content), &Words::new(), When::Absent) {
            Ok(_) => Ok(true),
            Err(why) if is_condition_failed(&why) => Ok(false),
            Err(why) => Err(why),
        }
    }

    /// On a server the file may be absent.
    pub(super) fn remove(&self, name: &[u8]) -> io::Result<()> {
        match self {
            Self::Directory(dir) => Ok(rustix::fs::unlinkat(dir, name, AtFlags::empty())?),
            Self::Server(server) => server.delete(key(name)?),
        }
    }

    /// The inode number that the directory at this path has in the store. `None`: it is not known.
    pub fn number_of(&self, path: &[u8]) -> Option<u64> {
        match self {
            Self::Directory(dir) => Some(rustix::fs::statat(dir, path, AtFlags::SYMLINK_NOFOLLOW).ok()?.st_ino),
            Self::Server(server) => directory_number(&**server, std::str::from_utf8(path).ok()?).ok(),
        }
    }
}

fn unsupported(url: &str) -> Error {
    let scheme = url.split_once(':').map_or(url, |(scheme, _)| scheme);
    Error::new(format!("a store of the kind '{scheme}:' cannot serve a pool"))
        .why("its members meet in a directory, or in an S3 bucket")
}

fn key(name: &[u8]) -> io::Result<&str> {
    std::str::from_utf8(name).map_err(|_| Errno::ILSEQ.into())
}

pub(super) fn random<const BYTES: usize>() -> io::Result<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    let mut filled = 0;
    while filled < BYTES {
        filled += rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(bytes)
}

/// `None`: there is no such file.
fn read_file(store: &OwnedFd, name: &[u8]) -> io::Result<Option<Vec<u8>>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let mut bytes = Vec::new();
    let read = rustix::fs::openat(store, name, flags, Mode::empty())
        .map_err(io::Error::from)
        .and_then(|file| File::from(file).take(BYTES_MAX).read_to_end(&mut bytes));
    match read {
        Ok(_) => Ok(Some(bytes)),
        Err(why) if matches!(why.kind(), ErrorKind::NotFound | ErrorKind::StaleNetworkFileHandle) => Ok(None),
        Err(why) => Err(why),
    }
}

/// Makes a file that appears whole, if the directory can link. Returns whether it was made: `false` if one of this name
/// is there.
pub(super) fn publish(dir: BorrowedFd<'_>, name: &[u8], content: &[u8]) -> io::Result<bool> {
    let random = format!(".{:016x}{FRESH}", u64::from_be_bytes(random()?));
    let fresh = [name, random.as_bytes()].concat();
    let file = create(dir, &fresh, content)?;
    let made = rustix::fs::linkat(dir, &*fresh, dir, name, AtFlags::empty());
    // (NFS repeats a request whose answer is lost. The second one then finds the name of the first.)
    let is_linked = file.metadata().is_ok_and(|meta| std::os::unix::fs::MetadataExt::nlink(&meta) > 1);
    // (It may have been swept.)
    let _ = rustix::fs::unlinkat(dir, &*fresh, AtFlags::empty());
    match made {
        Ok(()) => Ok(true),
        Err(Errno::EXIST) => Ok(is_linked),
        Err(Errno::NOENT) => Ok(false),
        Err(Errno::PERM | Errno::OPNOTSUPP | Errno::NOSYS) => publish_without_links(dir, name, content),
        Err(errno) => Err(errno.into()),
    }
}

/// A reader may see the file before its content.
pub(super) fn publish_without_links(dir: BorrowedFd<'_>, name: &[u8], content: &[u8]) -> io::Result<bool> {
    match create(dir, name, content) {
        Ok(_) => Ok(true),
        Err(why) if why.kind() == ErrorKind::AlreadyExists => Ok(false),
        Err(why) => Err(why),
    }
}

/// A new file with this content, on the store's medium. Nothing stays of one that fails.
fn create(dir: BorrowedFd<'_>, name: &[u8], content: &[u8]) -> io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let named =
        |why: io::Error| io::Error::new(why.kind(), format!("{}: {why}", Path::new(OsStr::from_bytes(name)).display()));
    let opened = rustix::fs::openat(dir, name, flags, Mode::from_raw_mode(0o600));
    let mut file = File::from(opened.map_err(|errno| named(errno.into()))?);
    if let Err(why) = file.write_all(content).and_then(|()| file.sync_all()) {
        let _ = rustix::fs::unlinkat(dir, name, AtFlags::empty());
        return Err(named(why));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::ops::Range;
    use std::sync::{Barrier, Mutex};
    use std::thread;

    use surgetank_store::object::{Abilities, Body, Object, Page, Part, condition_failed};

    use super::*;

    /// A server in memory.
    struct Memory {
        if_absent: bool,
        objects: Mutex<BTreeMap<String, Vec<u8>>>,
    }

    fn object((key, bytes): (&String, &Vec<u8>)) -> Object {
        let (size_bytes, crc64nvme) = (bytes.len() as u64, None);
        Object { key: key.clone(), size_bytes, etag: "1".into(), modified_nanos: 0, words: None, crc64nvme }
    }

    impl Objects for Memory {
        fn describe(&self) -> String {
            "memory:".into()
        }
        fn abilities(&self) -> Abilities {
            Abilities {
                if_absent: self.if_absent,
                if_same: false,
                checksums: false,
                copies: false,
                uploads_in_parts: false,
                holds_back: false,
                part_bytes_min: 0,
                part_bytes_max: 0,
                parts_max: 0,
                put_bytes_max: u64::MAX,
                copy_bytes_max: 0,
                object_bytes_max: u64::MAX,
                lists_any_key: true,
                key_bytes_max: 1000,
                words_bytes_max: 1000,
            }
        }
        fn head(&self, key: &str) -> io::Result<Option<Object>> {
            Ok(self.objects.lock().unwrap().get_key_value(key).map(object))
        }
        fn get(&self, key: &str, range: Range<u64>, _: Option<&str>) -> io::Result<Box<dyn Read + Send>> {
            let bytes = self.objects.lock().unwrap().get(key).cloned().ok_or(ErrorKind::NotFound)?;
            Ok(Box::new(io::Cursor::new(bytes[range.start as usize..range.end as usize].to_vec())))
        }
        fn list(&self, prefix: &str, _: bool, _: Option<&str>) -> io::Result<Page> {
            let all = self.objects.lock().unwrap();
            let objects = all.iter().filter(|(key, _)| key.starts_with(prefix)).map(object).collect();
            Ok(Page { objects, ..Page::default() })
        }
        fn put(&self, key: &str, body: &dyn Body, _: u64, _: &Words, when: When<'_>) -> io::Result<String> {
            let mut bytes = vec![0; body.len() as usize];
            body.read_at(&mut bytes, 0)?;
            let mut all = self.objects.lock().unwrap();
            if when == When::Absent && self.if_absent && all.contains_key(key) {
                return Err(condition_failed(key));
            }
            all.insert(key.to_owned(), bytes);
            Ok("1".into())
        }
        fn delete(&self, key: &str) -> io::Result<()> {
            self.objects.lock().unwrap().remove(key);
            Ok(())
        }
        fn copy(&self, _: &str, _: Option<&str>, _: &str, _: Option<&Words>) -> io::Result<String> {
            Err(ErrorKind::Unsupported.into())
        }
        fn begin(&self, _: &str, _: &Words) -> io::Result<String> {
            Err(ErrorKind::Unsupported.into())
        }
        fn part(&self, _: &str, _: &str, _: u32, _: &dyn Body, _: u64) -> io::Result<Part> {
            Err(ErrorKind::Unsupported.into())
        }
        fn part_of(&self, _: &str, _: &str, _: u32, _: &str, _: Range<u64>, _: &str) -> io::Result<Part> {
            Err(ErrorKind::Unsupported.into())
        }
        fn parts(&self, _: &str, _: &str) -> io::Result<Vec<Part>> {
            Ok(Vec::new())
        }
        fn complete(&self, _: &str, _: &str, _: &[Part], _: u64, _: When<'_>) -> io::Result<String> {
            Err(ErrorKind::Unsupported.into())
        }
        fn abort(&self, _: &str, _: &str) -> io::Result<()> {
            Ok(())
        }
        fn uploads(&self, _: &str) -> io::Result<Vec<surgetank_store::object::Upload>> {
            Ok(Vec::new())
        }
    }

    fn server(if_absent: bool) -> Result<Meeting> {
        Meeting::conditional(Arc::new(Memory { if_absent, objects: Mutex::default() }))
    }

    #[test]
    fn server_that_ignores_conditions_is_refused() {
        let Err(why) = server(false) else { panic!("it was accepted") };
        assert!(why.why.contains("conditional writes") && !why.remedy.is_empty(), "{why}");
        assert!(Meeting::on_server("webhdfs://host/x").is_err());
    }

    #[test]
    fn file_on_a_server_is_made_once() {
        let meeting = server(true).unwrap();
        for round in 0..20 {
            let name = format!("pool.{round}").into_bytes();
            let (all, meeting) = (Barrier::new(4), &meeting);
            let makes = |maker: usize| {
                let (name, all) = (&name, &all);
                move || {
                    all.wait();
                    meeting.publish(name, format!("{maker}").as_bytes()).unwrap().then_some(maker)
                }
            };
            let makers: Vec<usize> = thread::scope(|scope| {
                let makers: Vec<_> = (0..4).map(|maker| scope.spawn(makes(maker))).collect();
                makers.into_iter().filter_map(|maker| maker.join().unwrap()).collect()
            });
            assert_eq!(makers.len(), 1, "round {round}");
            assert_eq!(meeting.read(&name).unwrap(), Some(format!("{}", makers[0]).into_bytes()));
        }
        assert_eq!(meeting.names(b"pool.1", usize::MAX).unwrap().len(), 11);
        meeting.remove(b"pool.1").unwrap();
        meeting.remove(b"pool.1").unwrap();
        assert_eq!((meeting.read(b"pool.1").unwrap(), meeting.names(b"pool.", 100).unwrap().len()), (None, 19));
    }
}
