//! The decoder gets input that no kernel sends: random bytes, truncations and false lengths. It answers EINVAL, and
//! never panics.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use proptest::prelude::*;
use surgetank::mount::abi::{IN_HEADER_BYTES, opcode};
use surgetank::mount::request::{Operation, Request, TimeChange, decode};
use surgetank_types::model::{FileLock, LockKind, LockRequest};

/// A message with a correct header.
fn message(opcode: u32, extension_words: u16, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend_from_slice(&((IN_HEADER_BYTES + payload.len()) as u32).to_ne_bytes());
    bytes.extend_from_slice(&opcode.to_ne_bytes());
    bytes.extend_from_slice(&7u64.to_ne_bytes());
    bytes.extend_from_slice(&1u64.to_ne_bytes());
    for id in [1000u32, 100, 4242] {
        bytes.extend_from_slice(&id.to_ne_bytes());
    }
    bytes.extend_from_slice(&extension_words.to_ne_bytes());
    bytes.extend_from_slice(&[0; 2]);
    bytes.extend_from_slice(payload);
    bytes
}

/// Reads every field that points into the message.
fn touch(request: &Request<'_>) -> usize {
    match request.operation {
        Operation::BatchForget { forgets } => forgets.iter().count(),
        Operation::Write { bytes, .. } => bytes.iter().map(|&byte| usize::from(byte)).sum(),
        Operation::Rename { name, new_name, .. } => name.len() + new_name.len(),
        Operation::Symlink { name, target } => name.len() + target.len(),
        Operation::Setxattr { name, value, .. } => name.len() + value.len(),
        _ => format!("{:?}", request.operation).len(),
    }
}

fn write_payload(data: &[u8]) -> Vec<u8> {
    let mut payload = [3u64.to_ne_bytes(), 8192u64.to_ne_bytes()].concat();
    payload.extend_from_slice(&(data.len() as u32).to_ne_bytes());
    payload.extend_from_slice(&[0; 20]);
    payload.extend_from_slice(data);
    payload
}

fn setattr_payload() -> Vec<u8> {
    let mut payload = Vec::new();
    // mode, size, mtime by value, atime now
    payload.extend_from_slice(&(1u32 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 7).to_ne_bytes());
    payload.extend_from_slice(&[0; 4]);
    for value in [9u64, 1 << 40, 0, 0, (-5i64) as u64, 0] {
        payload.extend_from_slice(&value.to_ne_bytes());
    }
    for value in [0u32, 250_000_000, 0, 0o100_640, 0, 0, 0, 0] {
        payload.extend_from_slice(&value.to_ne_bytes());
    }
    payload
}

fn lock_payload() -> Vec<u8> {
    let mut payload = Vec::new();
    for value in [3u64, 77, 100, i64::MAX as u64] {
        payload.extend_from_slice(&value.to_ne_bytes());
    }
    for value in [libc::F_WRLCK as u32, 4242, 1, 0] {
        payload.extend_from_slice(&value.to_ne_bytes());
    }
    payload
}

/// Complete requests of every shape.
fn valid() -> Vec<Vec<u8>> {
    let header = |bytes: usize| vec![0u8; bytes];
    let with = |bytes: usize, text: &[u8]| [header(bytes), text.to_vec()].concat();
    vec![
        message(opcode::LOOKUP, 0, b"name\0"),
        message(opcode::FORGET, 0, &header(8)),
        message(opcode::BATCH_FORGET, 0, &[vec![2, 0, 0, 0, 0, 0, 0, 0], header(32)].concat()),
        message(opcode::GETATTR, 0, &header(16)),
        message(opcode::SETATTR, 0, &setattr_payload()),
        message(opcode::SYMLINK, 0, b"name\0target/../x\0"),
        message(opcode::MKNOD, 0, &with(16, b"fifo\0")),
        message(opcode::MKDIR, 0, &with(8, b"dir\0")),
        message(opcode::UNLINK, 0, b"name\0"),
        message(opcode::RENAME, 0, &with(8, b"old\0new\0")),
        message(opcode::RENAME2, 0, &with(16, b"old\0new\0")),
        message(opcode::LINK, 0, &with(8, b"new\0")),
        message(opcode::OPEN, 0, &header(8)),
        message(opcode::CREATE, 0, &with(16, b"new\0")),
        message(opcode::TMPFILE, 0, &with(16, b"/\0")),
        message(opcode::READ, 0, &header(40)),
        message(opcode::WRITE, 0, &write_payload(b"some data")),
        message(opcode::FLUSH, 0, &header(24)),
        message(opcode::RELEASE, 0, &header(24)),
        message(opcode::FSYNC, 0, &header(16)),
        message(opcode::FALLOCATE, 0, &header(32)),
        message(opcode::LSEEK, 0, &header(24)),
        message(opcode::COPY_FILE_RANGE, 0, &header(56)),
        message(opcode::COPY_FILE_RANGE_64, 0, &header(56)),
        message(opcode::READDIR, 0, &header(40)),
        message(opcode::GETXATTR, 0, &with(8, b"user.x\0")),
        message(opcode::SETXATTR, 0, &[vec![3, 0, 0, 0, 0, 0, 0, 0], b"user.x\0abc".to_vec()].concat()),
        message(opcode::LISTXATTR, 0, &header(8)),
        message(opcode::REMOVEXATTR, 0, b"user.x\0"),
        message(opcode::GETLK, 0, &lock_payload()),
        message(opcode::SETLK, 0, &lock_payload()),
        message(opcode::SETLKW, 0, &header(48)),
        message(opcode::ACCESS, 0, &header(8)),
        message(opcode::INIT, 0, &header(64)),
        message(opcode::INTERRUPT, 0, &header(8)),
    ]
}

#[test]
fn complete_requests_are_understood() {
    for bytes in valid() {
        let request = decode(&bytes).unwrap();
        assert_eq!((request.header.unique, request.header.node), (7, 1));
        assert_eq!((request.header.uid, request.header.gid, request.header.pid), (1000, 100, 4242));
        assert!(!matches!(request.operation, Operation::Unknown), "opcode {}", request.header.opcode);
        touch(&request);
    }
}

#[test]
fn fields_arrive_where_they_belong() {
    let bytes = message(opcode::WRITE, 0, &write_payload(b"some data"));
    let Operation::Write { fh, offset, bytes, flags } = decode(&bytes).unwrap().operation else { panic!("no write") };
    assert_eq!((fh, offset, bytes, flags.cached), (3, 8192, &b"some data"[..], false));

    let bytes = message(opcode::SETATTR, 0, &setattr_payload());
    let Operation::Setattr { change } = decode(&bytes).unwrap().operation else { panic!("no setattr") };
    assert_eq!((change.perm, change.size_bytes, change.uid, change.fh), (Some(0o640), Some(1 << 40), None, None));
    assert_eq!(change.atime, Some(TimeChange::Now));
    let Some(TimeChange::At(time)) = change.mtime else { panic!("no mtime") };
    assert_eq!((time.secs(), time.subsec_nanos()), (-5, 250_000_000));

    let bytes = message(opcode::SETLKW, 0, &lock_payload());
    let Operation::Setlk { asked, wait } = decode(&bytes).unwrap().operation else { panic!("no lock") };
    let lock = FileLock { kind: LockKind::Exclusive, first: 100, last: i64::MAX as u64, pid: 4242 };
    assert_eq!((asked, wait), (LockRequest { handle: 3, owner: 77, flock: true, lock }, true));

    let bytes = message(opcode::RENAME, 0, &[&9u64.to_ne_bytes()[..], b"old\0new\0"].concat());
    let Operation::Rename { name, new_parent, new_name, flags } = decode(&bytes).unwrap().operation else {
        panic!("no rename")
    };
    assert_eq!((name, new_parent, new_name, flags.bits()), (&b"old"[..], 9, &b"new"[..], 0));
}

#[test]
fn impossible_locks_are_refused() {
    // (at, value): an unknown kind, an end before the start, an end after the last offset of a file.
    for (at, value) in [(32, 3), (24, 99), (24, 1 << 63)] {
        let mut payload = lock_payload();
        payload[at..at + 8].copy_from_slice(&u64::to_ne_bytes(value));
        assert!(decode(&message(opcode::SETLK, 0, &payload)).is_err(), "{value} at {at}");
    }
}

#[test]
fn extensions_are_cut_off() {
    let bytes = message(opcode::LOOKUP, 2, &[b"name\0".to_vec(), vec![0xff; 16]].concat());
    let Operation::Lookup { name } = decode(&bytes).unwrap().operation else { panic!("no lookup") };
    assert_eq!(name, b"name");
    assert!(decode(&message(opcode::LOOKUP, 9, b"name\0")).is_err(), "more extension than message");
}

#[test]
fn names_that_leave_their_directory_are_refused() {
    for name in [&b"\0"[..], b".\0", b"..\0", b"a/b\0", b"/\0", b"unended"] {
        assert!(decode(&message(opcode::LOOKUP, 0, name)).is_err(), "{name:?}");
        assert!(decode(&message(opcode::UNLINK, 0, name)).is_err(), "{name:?}");
    }
}

/// A request that ends too soon is refused, wherever it ends and whatever its header says. Some requests end with
/// padding, so their last bytes may be missing without harm.
#[test]
fn truncated_requests_are_refused() {
    for whole in valid() {
        for end in 0..whole.len() {
            let mut bytes = whole[..end].to_vec();
            assert!(decode(&bytes).is_err(), "the header's length is not {end}");
            if end >= 4 {
                bytes[..4].copy_from_slice(&(end as u32).to_ne_bytes());
                if let Ok(request) = decode(&bytes) {
                    touch(&request);
                    assert!(end > IN_HEADER_BYTES, "nothing but a header passed");
                }
            }
        }
    }
    let cut = |opcode: u32, payload: &[u8]| decode(&message(opcode, 0, &payload[..payload.len() - 1])).is_err();
    assert!(cut(opcode::WRITE, &write_payload(b"some data")), "data beyond the end of the message");
    assert!(cut(opcode::SETATTR, &setattr_payload()));
    assert!(cut(opcode::BATCH_FORGET, &[vec![2, 0, 0, 0, 0, 0, 0, 0], vec![0; 32]].concat()));
    assert!(cut(opcode::RENAME2, &[&[0; 16][..], b"old\0new\0"].concat()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        if let Ok(request) = decode(&bytes) {
            touch(&request);
        }
    }

    #[test]
    fn random_payloads_never_panic(
        opcode in 0u32..60,
        extension_words in prop_oneof![9 => Just(0u16), 1 => any::<u16>()],
        payload in proptest::collection::vec(any::<u8>(), 0..300),
    ) {
        if let Ok(request) = decode(&message(opcode, extension_words, &payload)) {
            touch(&request);
        }
    }

    #[test]
    fn flipped_bytes_never_panic(which in 0usize..35, at in any::<prop::sample::Index>(), with in any::<u8>()) {
        let mut bytes = valid().swap_remove(which);
        let at = at.index(bytes.len());
        bytes[at] ^= with;
        if let Ok(request) = decode(&bytes) {
            touch(&request);
        }
    }
}
