//! A synced copy on the disk: a plain file with the content, and what it is in an extended attribute.
//!
//! | bytes of the attribute | |
//! |---|---|
//! | 0–8 | "SURGSYNC" |
//! | 8–16 | format = 1, state: 1 complete, 2 changing (u32 each) |
//! | 16–32 | file id, version (u64 each) |
//! | 32–48 | length of the content, its CRC-64/NVME (u64 each; they count while it is complete) |
//! | 48–56 | CRC-64/NVME of the bytes before |
//!
//! All numbers are little endian. The file's name has file id, version, and the copy's own number.
//!
//! The danger that this avoids: a copy that was being made when the machine went down counts as complete.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{XattrFlags, fgetxattr, fsetxattr, fstat};
use rustix::io::Errno;
use surgetank_store::checksum::{Checksum, of_bytes};
use surgetank_types::model::{FileId, Timestamp};

const ATTRIBUTE: &str = "user.surgetank.synced";
const MAGIC: &[u8; 8] = b"SURGSYNC";
const FORMAT: u32 = 1;
const COMPLETE: u32 = 1;
const CHANGING: u32 = 2;
const SUMMED_BYTES: usize = 48;
const ATTRIBUTE_BYTES: usize = 56;
const CHUNK_BYTES: usize = 1 << 20;

/// Names of copies that recovery could not put back, or whose file a damaged catalog does not have, begin so.
pub(crate) const KEPT: &str = "kept-";

/// What a copy's name says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Name {
    pub id: FileId,
    pub version: u32,
    /// A later copy of the file has a higher one.
    pub number: u64,
}

impl Name {
    pub fn text(&self) -> String {
        format!("{:x}-{:x}-{:x}", self.id.0, self.version, self.number)
    }

    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('-').map(|part| u64::from_str_radix(part, 16).ok());
        let (id, version, number) = (parts.next()??, parts.next()??, parts.next()??);
        parts.next().is_none().then_some(Self { id: FileId(id), version: u32::try_from(version).ok()?, number })
    }
}

/// A copy that this agent writes.
#[derive(Debug)]
pub(super) struct CopyFile {
    file: File,
    about: [u8; SUMMED_BYTES],
}

impl CopyFile {
    pub fn create(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)?;
        Ok(Self { file, about: [0; SUMMED_BYTES] })
    }

    pub fn file(&self) -> &File {
        &self.file
    }

    /// The content is written: syncs it, with the attribute that proves it. (The file systems on which copies are made bring a
    /// new file's name to the disk with it.)
    pub fn complete(&mut self, name: &Name, size_bytes: u64, checksum: u64) -> io::Result<()> {
        let numbers = [name.id.0, u64::from(name.version), size_bytes, checksum];
        self.about[..8].copy_from_slice(MAGIC);
        self.about[8..12].copy_from_slice(&FORMAT.to_le_bytes());
        for (place, number) in self.about[16..].chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        self.set(COMPLETE)?;
        crash_point!("synced_copy.written");
        self.file.sync_all()
    }

    /// From now on the content changes, and its checksum says nothing.
    pub fn will_change(&mut self) -> io::Result<()> {
        self.set(CHANGING)?;
        self.file.sync_all()
    }

    fn set(&mut self, state: u32) -> io::Result<()> {
        self.about[12..16].copy_from_slice(&state.to_le_bytes());
        let sum = of_bytes(&self.about).to_le_bytes();
        let value: Vec<u8> = self.about.iter().chain(&sum).copied().collect();
        Ok(fsetxattr(&self.file, ATTRIBUTE, &value, XattrFlags::empty())?)
    }
}

/// A copy of an earlier agent.
#[derive(Debug, Clone)]
pub(crate) struct Left {
    pub name: Name,
    pub path: PathBuf,
}

/// The copies in a directory. A directory that is absent has none. Errors: those of reading it.
pub(crate) fn left_in(dir: &Path) -> io::Result<Vec<Left>> {
    let entries = match std::fs::read_dir(dir) {
        Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut left = Vec::new();
    for entry in entries {
        let entry = entry?;
        if let Some(name) = entry.file_name().to_str().and_then(Name::parse) {
            left.push(Left { name, path: entry.path() });
        }
    }
    Ok(left)
}

/// Copies that recovery kept for the user. Errors: those of reading the directory.
pub(crate) fn kept_in(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(dir) {
        Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let paths: io::Result<Vec<PathBuf>> = entries.map(|entry| Ok(entry?.path())).collect();
    let is_kept =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(KEPT.as_bytes()));
    Ok(paths?.into_iter().filter(is_kept).collect())
}

/// What a copy has, for a reader.
#[derive(Debug)]
pub(crate) struct Content {
    file: File,
    pub size_bytes: u64,
    /// Time of the last sync that changed it.
    pub mtime: Timestamp,
}

impl Left {
    /// The content of the copy; `None`: it was being made, so no fsync has returned for it. Errors: those of reading.
    pub fn content(&self) -> io::Result<Option<Content>> {
        let file = File::open(&self.path)?;
        let mut about = [0; ATTRIBUTE_BYTES];
        match fgetxattr(&file, ATTRIBUTE, &mut about) {
            Ok(ATTRIBUTE_BYTES) => {}
            Ok(_) | Err(Errno::NODATA | Errno::RANGE) => return Ok(None),
            Err(why) => return Err(why.into()),
        }
        let number = |at: usize| about[at..at + 8].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
        let is_known = &about[..8] == MAGIC
            && number(8) as u32 == FORMAT
            && number(SUMMED_BYTES) == of_bytes(&about[..SUMMED_BYTES])
            && (number(16), number(24)) == (self.name.id.0, u64::from(self.name.version));
        let stat = fstat(&file)?;
        let size_bytes = u64::try_from(stat.st_size).unwrap_or(0);
        let mtime = Timestamp::from_parts(stat.st_mtime, stat.st_mtime_nsec as u32);
        let content = Content { file, size_bytes, mtime };
        let is_whole = match (number(8) >> 32) as u32 {
            COMPLETE => size_bytes == number(32) && content.checksum()? == number(40),
            CHANGING => true,
            _ => false,
        };
        Ok((is_known && is_whole).then_some(content))
    }
}

impl Content {
    fn checksum(&self) -> io::Result<u64> {
        let mut sum = Checksum::default();
        self.each(&mut |_, chunk| {
            sum.bytes(chunk);
            Ok(())
        })?;
        Ok(sum.value())
    }

    /// Writes the content to an empty file.
    pub fn write_to(&self, target: &File) -> io::Result<()> {
        self.each(&mut |at, chunk| {
            if chunk.iter().any(|byte| *byte != 0) { target.write_all_at(chunk, at) } else { Ok(()) }
        })?;
        target.set_len(self.size_bytes)
    }

    fn each(&self, take: &mut dyn FnMut(u64, &[u8]) -> io::Result<()>) -> io::Result<()> {
        let mut buffer = vec![0; CHUNK_BYTES];
        let mut at = 0;
        while at < self.size_bytes {
            let want = usize::try_from(self.size_bytes - at).unwrap_or(usize::MAX).min(CHUNK_BYTES);
            self.file.read_exact_at(&mut buffer[..want], at)?;
            take(at, &buffer[..want])?;
            at += want as u64;
        }
        Ok(())
    }
}

/// Brings the names in a directory to the disk.
pub(crate) fn sync_directory(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}
