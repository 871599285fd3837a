//! The text of a deduplicated file, for programs, and for users without Surgetank:
//!
//! ```text
//! surgetank reference 1
//! The content of this file lies, for it and for others that have the same, in this one, below the store's root:
//! .surgetank-blobs-1000/af/1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262
//! bytes 123456
//! crc64nvme ae8b14860a799888
//! ```

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::super::super::checksum::Checksum;
use super::super::super::{Gate, Remote, StorePath};
use super::damaged;

const BLOBS: &str = ".surgetank-blobs";
const FIRST: &str = "surgetank reference 1";
const WORDS: &str =
    "The content of this file lies, for it and for others that have the same, in this one, below the store's root:";
const TEXT_BYTES_MAX: u64 = 1024;
const READ_BYTES: usize = 1 << 20;

/// The directory of the content; with the owner's id where files have owners.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Blobs {
    pub owner: Option<u32>,
}

impl Blobs {
    pub fn root(self) -> StorePath {
        StorePath(self.owner.map_or_else(|| BLOBS.to_owned(), |uid| format!("{BLOBS}-{uid}")).into_bytes())
    }

    pub fn named(name: &[u8]) -> Option<Self> {
        match std::str::from_utf8(name).ok()?.strip_prefix(BLOBS)? {
            "" => Some(Self { owner: None }),
            rest => {
                let uid = rest.strip_prefix('-')?.parse().ok()?;
                Some(Self { owner: Some(uid) }).filter(|blobs| blobs.root().0 == name)
            }
        }
    }

    pub fn is_one(name: &[u8]) -> bool {
        Self::named(name).is_some()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reference {
    pub blobs: Blobs,
    /// BLAKE3 hash of the content.
    pub hash: [u8; 32],
    pub length_bytes: u64,
    /// CRC-64/NVME of the content.
    pub checksum: u64,
}

impl Reference {
    /// The reference to the content of `source`, which is read whole. `gate` may stop it.
    pub fn to(blobs: Blobs, source: &File, gate: Gate<'_>) -> io::Result<Self> {
        let length_bytes = source.metadata()?.len();
        let (mut hasher, mut sum) = (blake3::Hasher::new(), Checksum::default());
        let mut buffer = vec![0; READ_BYTES];
        let mut at = 0;
        while at < length_bytes {
            gate(0)?;
            let len = usize::try_from(length_bytes - at).map_or(READ_BYTES, |left| left.min(READ_BYTES));
            source.read_exact_at(&mut buffer[..len], at)?;
            hasher.update(&buffer[..len]);
            sum.bytes(&buffer[..len]);
            at += len as u64;
        }
        Ok(Self { blobs, hash: *hasher.finalize().as_bytes(), length_bytes, checksum: sum.value() })
    }

    /// The path of the content.
    pub fn path(&self) -> StorePath {
        let hash = blake3::Hash::from_bytes(self.hash).to_hex();
        let (first, rest) = hash.split_at(2);
        self.blobs.root().join(first.as_bytes()).join(rest.as_bytes())
    }

    pub fn text(&self) -> String {
        format!("{FIRST}\n{WORDS}\n{}\nbytes {}\ncrc64nvme {:016x}\n", self.path(), self.length_bytes, self.checksum)
    }

    pub fn read(packed: &dyn Remote) -> io::Result<Self> {
        let bytes = packed.identity().size_bytes;
        if bytes > TEXT_BYTES_MAX {
            return Err(damaged("it is not a reference, but its name ends like one"));
        }
        let mut text = vec![0; usize::try_from(bytes).map_err(io::Error::other)?];
        packed.read_at(&mut text, 0)?;
        std::str::from_utf8(&text)
            .ok()
            .and_then(Self::parse)
            .ok_or_else(|| damaged("the reference is damaged, or is another file whose name ends like one"))
    }

    /// Parses exactly what `text` makes.
    pub fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        if (lines.next()?, lines.next()?) != (FIRST, WORDS) {
            return None;
        }
        let mut parts = lines.next()?.split('/');
        let blobs = Blobs::named(parts.next()?.as_bytes())?;
        let hash = *blake3::Hash::from_hex([parts.next()?, parts.next()?].concat()).ok()?.as_bytes();
        let length_bytes = lines.next()?.strip_prefix("bytes ")?.parse().ok()?;
        let checksum = u64::from_str_radix(lines.next()?.strip_prefix("crc64nvme ")?, 16).ok()?;
        let reference = Self { blobs, hash, length_bytes, checksum };
        (reference.text() == text).then_some(reference)
    }
}
