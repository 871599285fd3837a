//! The agent's channel to its supervisor: descriptors for the supervisor to hold, and facts that it needs.
//!
//! The messages of a SEQPACKET socket have a letter, a name and at most one descriptor. The supervisor does not answer.
//! If it has ended, the agent continues without it.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use surgetank_core::namespace::Keeper;

pub const MESSAGE_BYTES_MAX: usize = 256;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message {
    Keep,
    GiveUp,
    /// From now on another agent can continue if this one dies.
    Serving,
    /// The mount is gone and no work is left: the supervisor starts no further agent.
    Ending,
}

impl Message {
    fn letter(self) -> u8 {
        match self {
            Self::Keep => b'k',
            Self::GiveUp => b'g',
            Self::Serving => b's',
            Self::Ending => b'e',
        }
    }

    pub fn of(letter: u8) -> Option<Self> {
        [Self::Keep, Self::GiveUp, Self::Serving, Self::Ending].into_iter().find(|message| message.letter() == letter)
    }
}

pub struct Channel {
    socket: OwnedFd,
}

impl Channel {
    pub fn new(socket: OwnedFd) -> Self {
        Self { socket }
    }

    pub fn serving(&self) {
        self.report(Message::Serving);
    }

    pub fn ending(&self) {
        self.report(Message::Ending);
    }

    fn report(&self, message: Message) {
        if let Err(error) = self.send(message, "", None) {
            tracing::warn!(%error, ?message, "the supervisor is gone");
        }
    }

    fn send(&self, message: Message, name: &str, file: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let letter = [message.letter()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let files: Vec<BorrowedFd<'_>> = file.into_iter().collect();
        if !files.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(&files));
        }
        let message = [IoSlice::new(&letter), IoSlice::new(name.as_bytes())];
        rustix::net::sendmsg(self.socket.as_fd(), &message, &mut ancillary, SendFlags::NOSIGNAL)?;
        Ok(())
    }
}

impl Keeper for Channel {
    fn keep(&self, name: &str, file: BorrowedFd<'_>) -> io::Result<()> {
        self.send(Message::Keep, name, Some(file))
    }

    fn give_up(&self, name: &str) {
        // If the supervisor has ended, its copy is gone with it.
        let _ = self.send(Message::GiveUp, name, None);
    }
}
