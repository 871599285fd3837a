//! The handshake: the kernel's offer, the server's wishes ([`Options`]), and the agreement ([`Agreed`]).
//!
//! Locks (flock, POSIX) come to the server only with [`Options::locks`]; otherwise the kernel keeps them itself. The
//! write-back cache is never requested.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;

use super::abi::{self, init};
use super::reply::{self, Reply};
use super::request::{self, Offer, Operation};

/// When the kernel requests entries together with their attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Readdirplus {
    /// Entries come without attributes.
    #[default]
    Never,
    /// If the program seems to want them (`ls -l`).
    Auto,
}

/// The server's wishes for a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Request passthrough ([`Agreed::passthrough`] reports whether it was granted).
    pub passthrough: bool,
    /// The number of stacked file systems (overlay, another passthrough mount) for which this one counts. Backing files
    /// must be on a file system with a smaller number. The kernel allows 1 and 2.
    pub stack_depth: u32,
    /// The use of READDIRPLUS.
    pub readdirplus: Readdirplus,
    /// Request the locks of programs; the file system then has [`super::Filesystem::setlk`] and [`super::Filesystem::getlk`].
    pub locks: bool,
    /// Largest single read or write; a thread's buffers are that large.
    pub transfer_bytes_max: usize,
    /// Requests without a waiting program (read-ahead, releases) in flight at once.
    pub background_max: u16,
    /// Operations that may block at once, without those that wait for a program's lock. There is one thread until some
    /// do.
    pub threads_max: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            passthrough: false,
            stack_depth: 1,
            readdirplus: Readdirplus::Never,
            locks: false,
            transfer_bytes_max: 1 << 20,
            background_max: 64,
            threads_max: 64,
        }
    }
}

/// The agreement between kernel and server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Agreed {
    /// The minor number of the protocol that both use.
    pub minor: u32,
    /// Open files may have backing files.
    pub passthrough: bool,
    /// The kernel requests entries with attributes.
    pub readdirplus: bool,
    /// The file system clears setuid and setgid bits, so the kernel need not check them before writes.
    pub killpriv: bool,
    /// Largest single read or write, in bytes.
    pub transfer_bytes_max: usize,
    /// The kernel can send again requests that were read and not answered: another server can take over.
    pub resends: bool,
}

/// Answers the kernel's offer on a freshly mounted descriptor.
pub(super) fn handshake(device: &OwnedFd, options: &Options) -> io::Result<Agreed> {
    let mut buffer = vec![0; options.transfer_bytes_max + abi::REQUEST_SLACK_BYTES];
    let bytes = loop {
        match rustix::io::read(device.as_fd(), &mut buffer) {
            Err(Errno::INTR) => {}
            outcome => break outcome?,
        }
    };
    let request = request::decode(&buffer[..bytes])?;
    let Operation::Init { offer } = request.operation else {
        return Err(io::Error::other("the kernel's first request is not the handshake: is the descriptor in use?"));
    };
    if offer.major != abi::VERSION_MAJOR || offer.minor < abi::VERSION_MINOR_MIN {
        let text = format!(
            "the kernel speaks FUSE {}.{}, needed is {}.{} (Linux 5.4) or newer",
            offer.major,
            offer.minor,
            abi::VERSION_MAJOR,
            abi::VERSION_MINOR_MIN
        );
        send(device, request.header.unique, Errno::PROTO.raw_os_error(), &[])?;
        return Err(io::Error::new(io::ErrorKind::Unsupported, text));
    }
    let (agreed, answer) = agree(&offer, options);
    send(device, request.header.unique, 0, answer.body())?;
    Ok(agreed)
}

/// The accepted part of the kernel's offer, and the answer with it.
fn agree(offer: &Offer, options: &Options) -> (Agreed, Reply) {
    let mut wanted = init::ASYNC_READ
        | init::ATOMIC_O_TRUNC
        | init::BIG_WRITES
        | init::AUTO_INVAL_DATA
        | init::ASYNC_DIO
        | init::PARALLEL_DIROPS
        | init::MAX_PAGES
        | init::CACHE_SYMLINKS
        | init::HANDLE_KILLPRIV_V2
        | init::INIT_EXT
        | init::DIRECT_IO_ALLOW_MMAP
        | init::HAS_RESEND;
    if options.passthrough {
        wanted |= init::PASSTHROUGH;
    }
    if options.locks {
        wanted |= init::POSIX_LOCKS | init::FLOCK_LOCKS;
    }
    if options.readdirplus == Readdirplus::Auto {
        wanted |= init::DO_READDIRPLUS | init::READDIRPLUS_AUTO;
    }
    let flags = wanted & offer.flags;
    let passthrough = flags & init::PASSTHROUGH != 0;
    let agreed = Agreed {
        minor: offer.minor.min(abi::VERSION_MINOR),
        passthrough,
        readdirplus: flags & init::DO_READDIRPLUS != 0,
        killpriv: flags & init::HANDLE_KILLPRIV_V2 != 0,
        transfer_bytes_max: options.transfer_bytes_max,
        resends: offer.flags & init::HAS_RESEND != 0,
    };
    let bytes_max = u32::try_from(options.transfer_bytes_max).unwrap_or(u32::MAX);
    let pages_max = u16::try_from(options.transfer_bytes_max / abi::PAGE_BYTES).unwrap_or(u16::MAX);

    let mut answer = Reply::default();
    answer.u32(abi::VERSION_MAJOR);
    answer.u32(agreed.minor);
    answer.u32(offer.readahead_bytes_max);
    answer.u32(flags as u32);
    answer.u16(options.background_max);
    answer.u16(options.background_max / 4 * 3);
    answer.u32(bytes_max);
    answer.u32(1); // granularity of timestamps, in nanoseconds
    answer.u16(pages_max);
    answer.u16(0); // no DAX
    answer.u32((flags >> 32) as u32);
    answer.u32(if passthrough { options.stack_depth } else { 0 });
    answer.bytes(&[0; 24]);
    (agreed, answer)
}

fn send(device: &OwnedFd, unique: u64, error: i32, body: &[u8]) -> io::Result<()> {
    let header = reply::header(unique, error, body.len());
    rustix::io::writev(device.as_fd(), &reply::slices(&header, body))?;
    Ok(())
}
