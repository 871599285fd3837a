//! A file's attributes, as user metadata of its object, so that a file that is read back is the same file.
//!
//! | word | value |
//! |---|---|
//! | `mode` | octal, with the type: `100644` (rclone's `--metadata` knows it) |
//! | `uid`, `gid` | decimal |
//! | `mtime` | seconds and nanoseconds since 1970: `1712345678.123456789` (rclone's) |
//! | `atime` | the same, if it differs |
//! | `surgetank-id` | 16 hexadecimal digits: one version of one file; copies and renames keep it |
//! | `surgetank-xattrs` | `user.*` attributes, postcard in hexadecimal; absent without any |
//! | `surgetank-device` | of a device file |
//!
//! An object without them is another client's: a file of the agent's user, as old as the object.

use std::hash::{BuildHasher, Hash};
use std::io;

use rustix::io::Errno;

use super::{Object, Objects, Words};
use crate::{Meta, StoreStat};
use surgetank_types::model::{Attr, Kind, StoreIdentity, Timestamp, Xattrs};

const ID: &str = "surgetank-id";
pub(super) const XATTRS: &str = "surgetank-xattrs";
const DEVICE: &str = "surgetank-device";
const FILE_PERM: u32 = 0o644;
const DIR_PERM: u32 = 0o755;

/// The owner of an object without an owner.
#[derive(Debug, Clone, Copy)]
pub(super) struct Owner {
    pub uid: u32,
    pub gid: u32,
}

/// All words of a new version.
pub(super) fn words_of(kind: Kind, id: u64, device: u64, meta: &Meta, before: Option<&Words>) -> io::Result<Words> {
    let mut words = Words::new();
    let mut say = |name: &str, value: String| drop(words.insert(name.to_owned(), value));
    say("mode", format!("{:o}", kind.type_bits() | meta.perm));
    say("uid", meta.uid.to_string());
    say("gid", meta.gid.to_string());
    match (meta.times, before.and_then(|before| before.get("mtime"))) {
        (Some((atime, mtime)), _) => {
            say("mtime", decimal(mtime));
            if atime != mtime {
                say("atime", decimal(atime));
            }
        }
        (None, Some(kept)) => {
            say("mtime", kept.clone());
            if let Some(kept) = before.and_then(|before| before.get("atime")) {
                say("atime", kept.clone());
            }
        }
        (None, None) => say("mtime", decimal(surgetank_types::clock::now())),
    }
    say(ID, format!("{id:016x}"));
    if device != 0 {
        say(DEVICE, device.to_string());
    }
    let kept = before.and_then(|before| before.get(XATTRS)).cloned();
    let xattrs = match &meta.xattrs {
        Some(xattrs) if xattrs.is_empty() => None,
        Some(xattrs) => Some(hexadecimal(&postcard::to_stdvec(xattrs).map_err(io::Error::other)?)),
        None => kept,
    };
    if let Some(xattrs) = xattrs {
        say(XATTRS, xattrs);
    }
    Ok(words)
}

/// These words for the same content; words of other clients stay.
pub(super) fn reworded(before: Option<&Words>, ours: Words) -> Words {
    const OURS: [&str; 8] = ["mode", "uid", "gid", "mtime", "atime", ID, XATTRS, DEVICE];
    let mut words = before.cloned().unwrap_or_default();
    words.retain(|name, _| !OURS.contains(&name.as_str()));
    words.extend(ours);
    words
}

/// Length of names and values, as a server counts it.
pub(super) fn bytes_of(words: &Words) -> usize {
    words.iter().map(|(name, value)| name.len() + value.len()).sum()
}

pub(super) fn xattrs_of(words: &Words) -> io::Result<Xattrs> {
    let Some(text) = words.get(XATTRS) else { return Ok(Xattrs::new()) };
    let bad = || io::Error::new(io::ErrorKind::InvalidData, "extended attributes cannot be decoded");
    let bytes = bytes_of_hexadecimal(text).ok_or_else(bad)?;
    postcard::from_bytes(&bytes).map_err(|_| bad())
}

pub(super) fn id_of(words: &Words) -> Option<u64> {
    u64::from_str_radix(words.get(ID)?, 16).ok().filter(|id| *id != 0)
}

pub(super) fn stat_of(object: &Object, owner: Owner) -> StoreStat {
    let is_dir = object.key.ends_with('/');
    let none = Words::new();
    let words = object.words.as_ref().unwrap_or(&none);
    let number = |name: &str| words.get(name).and_then(|value| value.parse::<u64>().ok());
    let mode = words.get("mode").and_then(|mode| u32::from_str_radix(mode, 8).ok());
    let kind = match mode {
        _ if is_dir => Kind::Directory,
        // A mode with permission bits only is that of a file.
        Some(mode) if mode & libc::S_IFMT != 0 && Kind::from_mode(mode) != Kind::Directory => Kind::from_mode(mode),
        _ => Kind::File,
    };
    let perm = mode.map_or(if is_dir { DIR_PERM } else { FILE_PERM }, |mode| mode & 0o7777);
    // Whole seconds: some answers of a server have no fractions, and the time must be the same in all of them.
    let modified = Timestamp { nanos: object.modified_nanos - object.modified_nanos.rem_euclid(1_000_000_000) };
    let mtime = words.get("mtime").and_then(|text| from_decimal(text)).unwrap_or(modified);
    let own = id_of(words);
    let ino = own.unwrap_or_else(|| {
        if is_dir { dir_ino(object.key.trim_end_matches('/')) } else { number_of(&(&object.key, &object.etag)) }
    });
    let short = |number: Option<u64>, other: u32| number.and_then(|n| u32::try_from(n).ok()).unwrap_or(other);
    let attr = Attr {
        kind,
        perm,
        uid: short(number("uid"), owner.uid),
        gid: short(number("gid"), owner.gid),
        ino,
        links: if is_dir { 2 } else { 1 },
        size_bytes: object.size_bytes,
        blocks: object.size_bytes.div_ceil(512),
        device: number(DEVICE).unwrap_or(0),
        atime: words.get("atime").and_then(|text| from_decimal(text)).unwrap_or(mtime),
        mtime,
        ctime: modified,
    };
    // A listing does not contain the time in another client's words, so the identity cannot depend on it.
    let known_by = if own.is_some() { mtime } else { modified };
    StoreStat { attr, identity: identity_of(ino, object.size_bytes, known_by, &object.etag) }
}

/// The etag takes the place of the change time.
pub(super) fn identity_of(ino: u64, size_bytes: u64, mtime: Timestamp, etag: &str) -> StoreIdentity {
    StoreIdentity { ino, size_bytes, mtime_nanos: mtime.nanos, ctime_nanos: number_of(&etag) as i64 }
}

/// Inode number of a directory that only its files imply.
pub(super) fn dir_ino(path: &str) -> u64 {
    number_of(&("directory", path))
}

/// The inode number of the directory at this path, whether it is there or not.
pub fn directory_number(server: &dyn Objects, path: &str) -> io::Result<u64> {
    let words = server.head(&format!("{path}/"))?.and_then(|marker| marker.words);
    Ok(words.as_ref().and_then(id_of).unwrap_or_else(|| dir_ino(path)))
}

/// The same in every agent, and never 0.
fn number_of(what: &impl Hash) -> u64 {
    foldhash::quality::FixedState::with_seed(0x7375_7267_6574_616e).hash_one(what) >> 1 | 1
}

fn decimal(time: Timestamp) -> String {
    let sign = if time.nanos < 0 { "-" } else { "" };
    let nanos = time.nanos.unsigned_abs();
    format!("{sign}{}.{:09}", nanos / 1_000_000_000, nanos % 1_000_000_000)
}

fn from_decimal(text: &str) -> Option<Timestamp> {
    let (sign, digits) = text.strip_prefix('-').map_or((1, text), |digits| (-1, digits));
    let (secs, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let fraction: String = fraction.chars().chain("000000000".chars()).take(9).collect();
    let nanos = secs.parse::<i64>().ok()?.checked_mul(1_000_000_000)?.checked_add(fraction.parse().ok()?)?;
    Some(Timestamp { nanos: sign * nanos })
}

fn hexadecimal(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn bytes_of_hexadecimal(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes();
    digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok().filter(|pair| pair.len() == 2)?, 16).ok())
        .collect()
}

/// Refuses words that are too long for the server.
pub(super) fn too_many(words: &Words, bytes_max: usize) -> io::Result<()> {
    if bytes_of(words) > bytes_max { Err(Errno::TOOBIG.into()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_as_decimal_reads_back_exactly() {
        for nanos in [0, 1, -1, 999_999_999, -1_500_000_000, 1_712_345_678_123_456_789, -7_000_000_001] {
            let text = decimal(Timestamp { nanos });
            assert_eq!(from_decimal(&text), Some(Timestamp { nanos }), "{text}");
        }
        assert_eq!(from_decimal("12.5"), Some(Timestamp { nanos: 12_500_000_000 }));
        assert_eq!(from_decimal("12"), Some(Timestamp { nanos: 12_000_000_000 }));
        for wrong in ["", "now", "1.x", "99999999999999.0"] {
            assert_eq!(from_decimal(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn invalid_words_of_other_client_are_ignored() {
        let mut object = Object {
            key: "a".into(),
            size_bytes: 7,
            etag: "e".into(),
            modified_nanos: 5,
            words: Some(
                [("mode", "77777777"), ("uid", "-3"), (ID, "zz"), (XATTRS, "0é")]
                    .map(|(name, value)| (name.to_owned(), value.to_owned()))
                    .into(),
            ),
            crc64nvme: None,
        };
        let stat = stat_of(&object, Owner { uid: 1, gid: 2 });
        assert_eq!((stat.attr.uid, stat.attr.gid, stat.attr.size_bytes), (1, 2, 7));
        assert!(xattrs_of(object.words.as_ref().unwrap()).is_err());
        object.words = None;
        let stat = stat_of(&object, Owner { uid: 1, gid: 2 });
        assert_eq!((stat.attr.kind, stat.attr.perm, stat.attr.mtime.nanos), (Kind::File, FILE_PERM, 0));
    }
}
