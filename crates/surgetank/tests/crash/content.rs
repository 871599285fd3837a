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

/// The id of a complete file; otherwise what is wrong with it.
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
    match make(id, bytes.len()).iter().zip(bytes).position(|(want, have)| want != have) {
        None => Ok(id),
        Some(at) => Err(format!("{id:#x} differs from byte {at} on")),
    }
}
