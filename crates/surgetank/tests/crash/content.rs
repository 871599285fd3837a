//! Content that proves by itself whether it is complete: a reader can check a file alone, anywhere and at any time.

const MAGIC: &[u8; 8] = b"STCRASH1";
pub const HEADER_BYTES: usize = 24;

/// The content of the file with this id, `len` bytes long (at least a header).
pub fn make(id: u64, len: usize) -> Vec<u8> {
    let len = len.max(HEADER_BYTES);
    let mut bytes = Vec::with_capacity(len);
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&id.to_le_bytes());
    bytes.extend_from_slice(&(len as u64).to_le_bytes());
    let mut state = id.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        // (A part of it can be compressed away.)
        let word = (state & 0x1f1f_1f1f_1f1f_1f1f).to_le_bytes();
        let rest = (len - bytes.len()).min(8);
        bytes.extend_from_slice(&word[..rest]);
    }
    bytes
}

const TRAILER_BYTES: usize = 8;
/// Shorter content has no revisions.
pub const REVISED_BYTES_MIN: usize = HEADER_BYTES + 2 * TRAILER_BYTES;

/// The byte, and the trailer's offset, in which this revision differs from the content.
pub fn revised(len: usize, revision: u64) -> (usize, usize) {
    let trailer = len - TRAILER_BYTES;
    (HEADER_BYTES + (revision.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20) as usize % (trailer - HEADER_BYTES), trailer)
}

/// The content in a revision: a byte is inverted, and the trailer says which. Revision 0 is the content itself.
pub fn make_revision(id: u64, len: usize, revision: u64) -> Vec<u8> {
    let mut bytes = make(id, len);
    if revision != 0 {
        let (at, trailer) = revised(bytes.len(), revision);
        bytes[at] = !bytes[at];
        bytes[trailer..].iter_mut().zip(revision.to_le_bytes()).for_each(|(byte, of)| *byte ^= of);
    }
    bytes
}

fn revision_of(bytes: &[u8], id: u64) -> u64 {
    if bytes.len() < REVISED_BYTES_MIN {
        return 0;
    }
    let (plain, trailer) = (make(id, bytes.len()), bytes.len() - TRAILER_BYTES);
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes[trailer..].try_into().unwrap());
    word(bytes) ^ word(&plain)
}

/// Like [`check`], and the file is in its last revision.
pub fn check_last(bytes: &[u8]) -> Result<u64, String> {
    let id = check(bytes)?;
    match revision_of(bytes, id) {
        0 => Ok(id),
        revision => Err(format!("{id:#x} in revision {revision:#x}, which is not the last")),
    }
}

/// The id of a file that is complete, in any revision; otherwise what is wrong with it.
pub fn check(bytes: &[u8]) -> Result<u64, String> {
    let Some((header, _)) = bytes.split_at_checked(HEADER_BYTES) else {
        return Err(format!("{} bytes, not even a header", bytes.len()));
    };
    let word = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().unwrap());
    if &header[..8] != MAGIC {
        return Err("no header".to_owned());
    }
    let (id, len) = (word(8), word(16));
    if len != bytes.len() as u64 {
        return Err(format!("{} bytes of the {len} of {id:#x}", bytes.len()));
    }
    match make_revision(id, bytes.len(), revision_of(bytes, id)).iter().zip(bytes).position(|(want, have)| want != have)
    {
        None => Ok(id),
        Some(at) => Err(format!("{id:#x} differs from byte {at} on")),
    }
}

/// A check that cannot fail would find nothing.
pub fn damage_is_found() -> Result<(), libtest_mimic::Failed> {
    for (len, revision) in [(5_000, 1), (100_000, u64::MAX), (5_000, 0)] {
        let bytes = make_revision(7, len, revision);
        assert_eq!(check(&bytes), Ok(7));
        assert_eq!(check_last(&bytes).is_ok(), revision == 0);
        let (at, trailer) = revised(len, revision);
        for place in [HEADER_BYTES, at, trailer, len - 1] {
            let mut damaged = bytes.clone();
            damaged[place] ^= 0x80;
            assert!(check(&damaged).is_err(), "byte {place} of {len} in revision {revision}");
        }
    }
    Ok(())
}
