//! Frames: messages on a stream of bytes, each behind its length. A peer that is hostile, or that has another version,
//! gets an error and never more memory than one frame has.

use serde::Serialize;
use serde::de::DeserializeOwned;

/// A longer frame is refused. All claims of a pool are one message: some 100,000 have room.
pub const FRAME_BYTES_MAX: usize = 16 << 20;
/// A longer first frame is refused: a greeting is short.
pub const GREETING_BYTES_MAX: usize = 1 << 10;
/// The length before each frame: 4 bytes, little endian.
const LENGTH_BYTES: usize = 4;

/// Why a stream cannot be read on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BadFrame {
    /// A frame, or one to be sent, has more than [`FRAME_BYTES_MAX`] bytes.
    TooLong,
    /// Its bytes are not a message, or more than one.
    Malformed,
}

impl std::fmt::Display for BadFrame {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::TooLong => "a message is longer than 16 MiB",
            Self::Malformed => "a message cannot be read; do both members have the same version?",
        })
    }
}

impl std::error::Error for BadFrame {}

/// The frame of a message.
///
/// Errors: [`BadFrame::TooLong`].
pub fn encode(message: &impl Serialize) -> Result<Vec<u8>, BadFrame> {
    let size = postcard::experimental::serialized_size(message).map_err(|_| BadFrame::Malformed)?;
    let mut bytes = Vec::with_capacity(LENGTH_BYTES + size);
    bytes.resize(LENGTH_BYTES, 0);
    let mut bytes = postcard::to_extend(message, bytes).map_err(|_| BadFrame::Malformed)?;
    let length = bytes.len() - LENGTH_BYTES;
    if length > FRAME_BYTES_MAX {
        return Err(BadFrame::TooLong);
    }
    // (At most 2²⁴.)
    bytes[..LENGTH_BYTES].copy_from_slice(&(length as u32).to_le_bytes());
    Ok(bytes)
}

/// What has come of a stream and is not read yet.
#[derive(Debug)]
pub struct Frames {
    bytes: Vec<u8>,
    read: usize,
    /// Bytes of the longest frame that is accepted.
    longest: usize,
}

impl Default for Frames {
    fn default() -> Self {
        Self { bytes: Vec::new(), read: 0, longest: FRAME_BYTES_MAX }
    }
}

impl Frames {
    /// A stream whose next message is a greeting.
    pub fn before_greeting() -> Self {
        Self { longest: GREETING_BYTES_MAX, ..Self::default() }
    }

    /// From now on messages of any kind come.
    pub fn greeted(&mut self) {
        self.longest = FRAME_BYTES_MAX;
    }

    /// What is not read yet.
    pub(crate) fn into_rest(mut self) -> Vec<u8> {
        self.bytes.drain(..self.read);
        self.bytes
    }

    /// More has come.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.read > 0 && self.read * 2 >= self.bytes.len() {
            self.bytes.drain(..self.read);
            self.read = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// The next message, if all of it has come. After an error the stream is of no use.
    pub fn next_message<M: DeserializeOwned>(&mut self) -> Result<Option<M>, BadFrame> {
        let rest = &self.bytes[self.read..];
        let Some((length, rest)) = rest.split_first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        if length > self.longest {
            return Err(BadFrame::TooLong);
        }
        let Some(body) = rest.get(..length) else { return Ok(None) };
        match postcard::take_from_bytes(body) {
            Ok((message, [])) => {
                self.read += LENGTH_BYTES + length;
                Ok(Some(message))
            }
            _ => Err(BadFrame::Malformed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::{Ask, Request};
    use crate::{Directory, MemberId, Term};

    fn request(number: u64) -> Request {
        let directory = Directory(vec![b'd'; number as usize * 97].into());
        Request::Of { member: MemberId(3), term: Term(2), number, ask: Ask::Claim(directory) }
    }

    #[test]
    fn messages_come_whole_whatever_the_pieces() {
        let messages: Vec<Request> = (0..40).map(request).collect();
        let bytes: Vec<u8> = messages.iter().flat_map(|message| encode(message).unwrap()).collect();
        for piece in [1, 2, 3, 7, 100, 5000, bytes.len()] {
            let (mut frames, mut came) = (Frames::default(), Vec::new());
            for bytes in bytes.chunks(piece) {
                frames.push(bytes);
                while let Some(message) = frames.next_message::<Request>().unwrap() {
                    came.push(message);
                }
            }
            assert_eq!(came, messages, "pieces of {piece} bytes");
        }
    }

    #[test]
    fn long_frame_is_refused_before_it_has_come() {
        let mut frames = Frames::default();
        frames.push(&(FRAME_BYTES_MAX as u32 + 1).to_le_bytes());
        assert_eq!(frames.next_message::<Request>(), Err(BadFrame::TooLong));
        let mut frames = Frames::before_greeting();
        frames.push(&(GREETING_BYTES_MAX as u32 + 1).to_le_bytes());
        assert_eq!(frames.next_message::<Request>(), Err(BadFrame::TooLong));
        assert_eq!(encode(&vec![7_u8; FRAME_BYTES_MAX + 1]), Err(BadFrame::TooLong));
    }

    #[test]
    fn frame_that_is_not_one_message_is_refused() {
        let good = encode(&request(5)).unwrap();
        // Cut short, with a byte more, and with an unknown kind.
        for change in [
            |body: &mut Vec<u8>| body.truncate(body.len() - 1),
            |body: &mut Vec<u8>| body.push(0),
            |body: &mut Vec<u8>| body[0] = 99,
        ] {
            let mut body = good[LENGTH_BYTES..].to_vec();
            change(&mut body);
            let mut frames = Frames::default();
            frames.push(&(body.len() as u32).to_le_bytes());
            frames.push(&body);
            assert_eq!(frames.next_message::<Request>(), Err(BadFrame::Malformed));
        }
    }
}
