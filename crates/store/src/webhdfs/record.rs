//! What HDFS cannot keep of a file, in an attribute of the file: `user.surgetank`, as JSON.
//!
//! HDFS has times in milliseconds from 1970 on, no setuid and setgid bits, no symbolic links, no fifos, and users by name. HDFS
//! gets all of it as far as possible, so that other programs see it, and the record has the rest. The record counts for as long
//! as HDFS still has the values that it got then: a later change of mode, time or content by another client takes precedence.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use super::answers::Status;
use super::people::People;
use crate::{Meta, StoreStat};
use surgetank_types::model::{Attr, Kind, StoreIdentity, Timestamp};

pub const NAME: &str = "user.surgetank";
/// Mode of links and fifos in HDFS, where they are files.
pub const OTHER_PERM: u32 = 0o644;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// With the type.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// The owner's name in HDFS when the numbers were recorded.
    pub owner: String,
    pub atime_nanos: i64,
    pub mtime_nanos: i64,
    pub size_bytes: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub device: u64,
    /// CRC-64/NVME of the content.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub crc64nvme: Option<u64>,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// As HDFS has it.
pub fn millis(nanos: i64) -> i64 {
    nanos.div_euclid(1_000_000).max(0)
}

fn nanos(millis: i64) -> i64 {
    millis.saturating_mul(1_000_000)
}

/// The permission bits in HDFS. The owner may always read the file there, because its record must be readable.
pub fn native_perm(kind: Kind, perm: u32) -> u32 {
    match kind {
        Kind::Directory => perm & 0o1777 | 0o400,
        Kind::File => perm & 0o777 | 0o400,
        _ => OTHER_PERM,
    }
}

impl Record {
    pub fn kind(&self) -> Kind {
        Kind::from_mode(self.mode)
    }

    pub fn text(&self) -> Cow<'static, str> {
        serde_json::to_string(self).map_or(Cow::Borrowed("{}"), Cow::Owned)
    }

    pub fn parse(text: &[u8]) -> Option<Self> {
        serde_json::from_slice(text).ok()
    }

    /// Whether the file has neither been written nor got another time since.
    fn is_of(&self, status: &Status) -> bool {
        self.size_bytes == status.length && millis(self.mtime_nanos) == status.modification_time
    }

    /// The present attributes with this change. `checksum`: of new content.
    pub fn changed(present: &StoreStat, before: Option<&Self>, owner: &str, meta: &Meta) -> Self {
        let attr = &present.attr;
        let (atime, mtime) = meta.times.unwrap_or((attr.atime, attr.mtime));
        Self {
            mode: attr.kind.type_bits() | meta.perm,
            uid: meta.uid,
            gid: meta.gid,
            owner: owner.to_owned(),
            atime_nanos: atime.nanos,
            mtime_nanos: mtime.nanos,
            // A directory's size has no meaning.
            size_bytes: if attr.kind == Kind::Directory { 0 } else { attr.size_bytes },
            device: attr.device,
            crc64nvme: before.and_then(|before| before.crc64nvme),
        }
    }
}

/// The attributes and the identity by which a change is noticed.
pub fn stat_of(status: &Status, record: Option<&Record>, people: &People) -> StoreStat {
    let is_dir = status.is_dir();
    let whole = record.filter(|record| is_dir == (record.kind() == Kind::Directory));
    let same = whole.filter(|record| !is_dir && record.is_of(status));
    let kind = match same {
        _ if is_dir => Kind::Directory,
        Some(record) => record.kind(),
        None => Kind::File,
    };
    let perm = match whole {
        Some(record) if same.is_some() && kind != Kind::File => record.mode & 0o7777,
        Some(record) if native_perm(kind, record.mode & 0o7777) == status.perm() => record.mode & 0o7777,
        _ => status.perm(),
    };
    let exact = |said: Option<i64>, has: i64| match said {
        Some(said) if millis(said) == has => Timestamp { nanos: said },
        _ => Timestamp { nanos: nanos(has) },
    };
    let mtime = exact(whole.map(|record| record.mtime_nanos), status.modification_time);
    let atime = exact(whole.map(|record| record.atime_nanos), status.access_time);
    let (uid, gid) = match whole.filter(|record| record.owner == status.owner) {
        Some(record) => (record.uid, record.gid),
        None => people.owner(&status.owner, &status.group),
    };
    let ctime = Timestamp { nanos: nanos(status.modification_time) };
    let attr = Attr {
        kind,
        perm,
        uid,
        gid,
        ino: status.file_id,
        links: if is_dir { 2 } else { 1 },
        size_bytes: status.length,
        blocks: status.length.div_ceil(512),
        device: same.map_or(0, |record| record.device),
        atime,
        mtime,
        ctime,
    };
    let identity = StoreIdentity {
        ino: status.file_id,
        size_bytes: status.length,
        mtime_nanos: mtime.nanos,
        ctime_nanos: ctime.nanos,
    };
    StoreStat { attr, identity }
}

/// The checksum of content that is still that of the record.
pub fn checksum_of(status: &Status, record: Option<&Record>) -> Option<u64> {
    record.filter(|record| record.is_of(status))?.crc64nvme
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status() -> Status {
        Status {
            access_time: 7,
            block_size: 1 << 27,
            file_id: 16388,
            group: "users".into(),
            length: 5,
            modification_time: 1_700_000_000_001,
            owner: "ann".into(),
            path_suffix: String::new(),
            children_num: 0,
            permission: "644".into(),
            kind: "FILE".into(),
        }
    }

    fn record() -> Record {
        Record {
            mode: 0o104_644,
            uid: 7,
            gid: 8,
            owner: "ann".into(),
            atime_nanos: 7_000_009,
            mtime_nanos: 1_700_000_000_001_234_567,
            size_bytes: 5,
            device: 0,
            crc64nvme: Some(u64::MAX),
        }
    }

    #[test]
    fn record_as_text_reads_back() {
        let record = record();
        assert_eq!(Record::parse(record.text().as_bytes()), Some(record));
        assert_eq!(Record::parse(b"{}"), None);
        for (nanos, kept) in [(-1, 0), (-1_500_000_000, 0), (999_999, 0), (1_000_000, 1)] {
            assert_eq!(millis(nanos), kept);
        }
    }

    #[test]
    fn change_by_other_client_overrides_the_record() {
        let (people, record) = (People::new("somebody"), record());
        let stat = |status: &Status| stat_of(status, Some(&record), &people).attr;
        let attr = stat(&status());
        assert_eq!((attr.kind, attr.perm, attr.uid, attr.gid), (Kind::File, 0o4644, 7, 8));
        assert_eq!((attr.mtime.nanos, attr.atime.nanos), (record.mtime_nanos, record.atime_nanos));
        assert_eq!(checksum_of(&status(), Some(&record)), Some(u64::MAX));
        let chmod = stat(&Status { permission: "600".into(), ..status() });
        assert_eq!((chmod.perm, chmod.mtime), (0o600, attr.mtime));
        let touch = stat(&Status { modification_time: 5, ..status() });
        assert_eq!((touch.mtime.nanos, touch.perm), (5_000_000, 0o4644));
        let chown = stat(&Status { owner: "nobody-knows-him".into(), ..status() });
        assert_ne!(chown.uid, 7);
        let append = Status { length: 6, modification_time: 1_700_000_000_001, ..status() };
        assert_eq!(checksum_of(&append, Some(&record)), None);
    }

    #[test]
    fn link_overwritten_by_other_client_is_a_file() {
        let (people, link) = (People::new("somebody"), Record { mode: 0o120_777, ..record() });
        assert_eq!(stat_of(&status(), Some(&link), &people).attr.kind, Kind::Symlink);
        assert_eq!(stat_of(&status(), Some(&link), &people).attr.perm, 0o777);
        let written = Status { length: 6, ..status() };
        let attr = stat_of(&written, Some(&link), &people).attr;
        assert_eq!((attr.kind, attr.perm), (Kind::File, 0o644));
    }
}
