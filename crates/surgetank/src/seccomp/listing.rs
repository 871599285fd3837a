//! Directory listings. The program has the bare directory open, and its position there is free for our use. The kernel
//! keeps it with the open file, shares it among duplicates and children, and seeks in it, all without the agent.
//!
//! A position is the number of a name. A name gets its number when it is first listed, and keeps it. So a program that
//! continues a listing finds every name that stayed exactly once, even if other programs list in between.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use rustix::fs::SeekFrom;
use rustix::io::Errno;
use surgetank_core::namespace::{Listed, Namespace};
use surgetank_types::clock;
use surgetank_types::model::{FileId, Kind};

use super::call::{Answer, Answered, Call, errno};

/// A program that continues this much later gets the names of that moment.
const SNAPSHOT_BELIEVED: Duration = Duration::from_secs(5);
const DIRS_MAX: usize = 1024;
/// "." and ".." come first.
const FIRST: u64 = 3;
const BUFFER_BYTES_MAX: usize = 1 << 20;

#[derive(Default)]
pub struct Cookies {
    dirs: HashMap<FileId, Book>,
}

struct Book {
    numbers: HashMap<Box<[u8]>, u64>,
    next: u64,
    /// Sorted by number.
    snapshot: Vec<(u64, Listed)>,
    taken: Instant,
}

impl Cookies {
    fn put(&mut self, dir: FileId, listed: &[Listed]) {
        if self.dirs.len() >= DIRS_MAX && !self.dirs.contains_key(&dir) {
            let oldest = self.dirs.iter().min_by_key(|(_, book)| book.taken).map(|(id, _)| *id);
            if let Some(oldest) = oldest {
                self.dirs.remove(&oldest);
            }
        }
        let book = self.dirs.entry(dir).or_insert_with(|| Book {
            numbers: HashMap::new(),
            next: FIRST,
            snapshot: Vec::new(),
            taken: clock::tick(),
        });
        book.snapshot.clear();
        for one in listed {
            let number = *book.numbers.entry(Box::from(&*one.name)).or_insert_with(|| {
                book.next += 1;
                book.next - 1
            });
            book.snapshot.push((number, one.clone()));
        }
        book.snapshot.sort_unstable_by_key(|(number, _)| *number);
        book.taken = clock::tick();
    }

    fn fresh(&self, dir: FileId) -> bool {
        self.dirs.get(&dir).is_some_and(|book| book.taken.elapsed() < SNAPSHOT_BELIEVED)
    }

    fn after(&self, dir: FileId, position: u64) -> &[(u64, Listed)] {
        let Some(book) = self.dirs.get(&dir) else { return &[] };
        &book.snapshot[book.snapshot.partition_point(|(number, _)| *number <= position)..]
    }
}

/// Entries in the format of getdents64 (or the older getdents).
struct Filling {
    bytes: Vec<u8>,
    room: usize,
    position: u64,
    wide: bool,
}

impl Filling {
    /// False: the entry does not fit any more.
    fn add(&mut self, number: u64, ino: u64, kind: Kind, name: &[u8]) -> bool {
        let head = if self.wide { 19 } else { 18 };
        let bare = head + name.len() + if self.wide { 1 } else { 2 };
        let length = bare.next_multiple_of(8);
        if self.bytes.len() + length > self.room {
            return false;
        }
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&ino.to_ne_bytes());
        self.bytes.extend_from_slice(&number.to_ne_bytes());
        self.bytes.extend_from_slice(&u16::try_from(length).unwrap_or(u16::MAX).to_ne_bytes());
        let kind = kind.dirent_type() as u8;
        if self.wide {
            self.bytes.push(kind);
        }
        self.bytes.extend_from_slice(name);
        self.bytes.resize(start + length, 0);
        if !self.wide {
            self.bytes[start + length - 1] = kind;
        }
        self.position = number;
        true
    }
}

fn list(namespace: &Namespace, call: &Call<'_>, dir: FileId) -> Result<Vec<Listed>, Errno> {
    // The permission to read was checked at the open.
    let caller = surgetank_types::model::Caller { uid: 0, gid: 0, pid: call.task.tid, umask: 0 };
    let opened = namespace.listings.opendir(&caller, dir).map_err(errno)?;
    let listed = namespace.listings.listing(opened.fh, 0).map(|listed| listed.to_vec()).map_err(errno);
    namespace.listings.releasedir(opened.fh);
    listed
}

pub(super) fn getdents(call: &Call<'_>, wide: bool) -> Answered {
    let number = call.int(0);
    let Some(known) = call.of_descriptor(number)?.filter(|known| known.attr.kind == Kind::Directory) else {
        return Ok(Answer::Continue);
    };
    let namespace = call.namespace();
    let theirs = call.task.descriptor(number)?;
    let position = rustix::fs::tell(&theirs)?;
    let cookies = || call.supervisor.cookies.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if position == 0 || !cookies().fresh(known.id) {
        if namespace.eager.path_of(known.id).is_none() {
            // A deleted directory is empty.
            return Ok(Answer::Value(0));
        }
        let listed = list(namespace, call, known.id)?;
        cookies().put(known.id, &listed);
    }
    let room = usize::try_from(call.arg(2) as u32).unwrap_or(0).min(BUFFER_BYTES_MAX);
    let mut filling = Filling { bytes: Vec::new(), room, position, wide };
    let mut fits = true;
    if position < 1 {
        fits = filling.add(1, known.attr.ino, Kind::Directory, b".");
    }
    if fits && position < 2 {
        let above = namespace.metadata.ino(namespace.listings.parent(known.id));
        fits = filling.add(2, above, Kind::Directory, b"..");
    }
    if fits {
        for (number, listed) in cookies().after(known.id, position.max(FIRST - 1)) {
            fits = filling.add(*number, listed.ino, listed.kind, &listed.name);
            if !fits {
                break;
            }
        }
    }
    if !fits && filling.bytes.is_empty() {
        return Err(Errno::INVAL);
    }
    call.task.write(call.arg(1), &filling.bytes)?;
    rustix::fs::seek(&theirs, SeekFrom::Start(filling.position))?;
    Ok(Answer::Value(filling.bytes.len() as i64))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(names: &[&str]) -> Vec<Listed> {
        names.iter().map(|name| Listed { name: name.as_bytes().into(), kind: Kind::File, ino: 1 }).collect()
    }

    #[test]
    fn unchanged_name_is_listed_once_beside_other_listings() {
        let mut cookies = Cookies::default();
        let dir = FileId(7);
        cookies.put(dir, &listed(&["a", "c", "e"]));
        let read_until = cookies.after(dir, 0)[1].0;
        cookies.put(dir, &listed(&["a", "b", "c", "d", "e"]));
        let rest: Vec<&[u8]> = cookies.after(dir, read_until).iter().map(|(_, listed)| &*listed.name).collect();
        assert!(
            rest.contains(&b"e".as_slice()) && !rest.contains(&b"a".as_slice()) && !rest.contains(&b"c".as_slice())
        );
        cookies.put(dir, &listed(&["e"]));
        assert_eq!(cookies.after(dir, read_until).len(), 1);
    }

    #[test]
    fn entries_have_the_kernels_layout() {
        let mut wide = Filling { bytes: Vec::new(), room: 48, position: 0, wide: true };
        assert!(wide.add(5, 9, Kind::Directory, b"name"));
        assert_eq!(wide.bytes.len(), 24);
        assert_eq!((&wide.bytes[16..18], wide.bytes[18], &wide.bytes[19..24]), (&[24, 0][..], 4, &b"name\0"[..]));
        assert!(!wide.add(6, 9, Kind::File, b"a name that is longer"));
        assert_eq!(wide.position, 5);
        let mut narrow = Filling { bytes: Vec::new(), room: 48, position: 0, wide: false };
        assert!(narrow.add(5, 9, Kind::File, b"name"));
        assert_eq!((narrow.bytes.len(), &narrow.bytes[18..23], narrow.bytes[23]), (24, &b"name\0"[..], 8));
    }
}
