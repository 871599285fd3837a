//! A session: the conversation with the kernel over one FUSE descriptor, from the handshake to the unmount.
//!
//! States: handshake (in [`Session::start`]) → serving → ended (unmounted, or stopped). The maker of the mount
//! ([`super::attach()`], later a supervisor) provides the descriptor; the session does not unmount.
//!
//! Locks (flock, POSIX) come here only with [`Options::locks`]; otherwise the kernel keeps them itself. The write-back
//! cache is never requested.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::abi::{self, init};
use super::filesystem::Filesystem;
use super::notifier::Notifier;
use super::reply::{self, Reply};
use super::request::{self, Header, Offer, Operation};
use super::workers::{Clones, OnClone, Turns, Workers, touched};

/// When the kernel requests entries together with their attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Readdirplus {
    #[default]
    Never,
    /// If the program seems to want them (`ls -l`).
    Auto,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Request passthrough ([`Agreed::passthrough`] reports whether it was granted).
    pub passthrough: bool,
    /// The number of stacked file systems (overlay, another passthrough mount) for which this one counts. Backing files
    /// must be on a file system with a smaller number. The kernel allows 1 and 2.
    pub stack_depth: u32,
    pub readdirplus: Readdirplus,
    /// Request the locks of programs; the file system then has [`Filesystem::setlk`] and [`Filesystem::getlk`].
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
    pub minor: u32,
    pub passthrough: bool,
    pub readdirplus: bool,
    /// The file system clears setuid and setgid bits, so the kernel need not check them before writes.
    pub killpriv: bool,
    pub transfer_bytes_max: usize,
    /// The kernel can send again requests that were read and not answered: another server can take over.
    pub resends: bool,
}

/// Lets descriptors outlive the server: a keeper receives each clone, and this server uses an earlier server's clones.
#[derive(Default)]
pub struct Kept {
    pub clones: Vec<OwnedFd>,
    pub on_clone: Option<OnClone>,
}

/// Dropping it changes nothing: the pool continues until the mount ends or [`Session::stop`] is called.
pub struct Session {
    workers: Arc<Workers>,
    notifier: Notifier,
    agreed: Agreed,
}

impl Session {
    /// Shakes hands on a freshly mounted descriptor and starts the pool. Returns when requests are being served.
    pub fn start<F: Filesystem>(device: OwnedFd, filesystem: &Arc<F>, options: &Options) -> io::Result<Self> {
        Self::start_kept(device, filesystem, options, Kept::default())
    }

    pub fn start_kept<F: Filesystem>(
        device: OwnedFd,
        filesystem: &Arc<F>,
        options: &Options,
        kept: Kept,
    ) -> io::Result<Self> {
        let agreed = handshake(&device, options)?;
        Self::serve(device, filesystem, options, kept, agreed, |_| Ok(Vec::new()))
    }

    /// Takes over from a server of the descriptor that ended without notice. That server's agreement with the kernel
    /// stays valid.
    pub fn take_over<F: Filesystem>(
        device: OwnedFd,
        filesystem: &Arc<F>,
        options: &Options,
        kept: Kept,
        agreed: Agreed,
    ) -> io::Result<Self> {
        Self::serve(device, filesystem, options, kept, agreed, |notifier| {
            notifier.resend()?;
            read_again(notifier.device(), agreed.transfer_bytes_max)
        })
    }

    fn serve<F: Filesystem>(
        device: OwnedFd,
        filesystem: &Arc<F>,
        options: &Options,
        kept: Kept,
        agreed: Agreed,
        behind: impl FnOnce(&Notifier) -> io::Result<Vec<Vec<u8>>>,
    ) -> io::Result<Self> {
        let device = Arc::new(device);
        let turns = Arc::<Turns>::default();
        let notifier = Notifier::new(Arc::clone(&device), Arc::clone(&turns));
        turns.put_behind(behind(&notifier)?);
        filesystem.started(&notifier, &agreed);
        let clones = Clones::new(kept.clones, kept.on_clone);
        let workers = Arc::new(Workers::new(device, options.threads_max, agreed.transfer_bytes_max, clones, turns));
        workers.start(filesystem)?;
        Ok(Self { workers, notifier, agreed })
    }

    pub fn notifier(&self) -> &Notifier {
        &self.notifier
    }

    pub fn agreed(&self) -> &Agreed {
        &self.agreed
    }

    pub fn running(&self) -> bool {
        self.workers.running()
    }

    /// Threads serving now.
    pub fn threads(&self) -> usize {
        self.workers.threads()
    }

    /// Waits for the end (an unmount); `false` if it did not come within `patience`.
    pub fn wait(&self, patience: Option<Duration>) -> bool {
        self.workers.wait(patience)
    }

    /// Ends serving without an unmount. Current requests are answered. Later ones wait for the next server of the
    /// descriptor, or fail when the last copy of it is closed.
    pub fn stop(&self) {
        self.workers.stop();
    }
}

/// Reads requests that the kernel sends again, before any other thread reads. They are sorted into their original
/// order, because the order of closes matters. A new request among them comes last.
fn read_again(device: &OwnedFd, transfer_bytes_max: usize) -> io::Result<Vec<Vec<u8>>> {
    let mut buffer = touched(transfer_bytes_max + abi::REQUEST_SLACK_BYTES);
    let mut found: Vec<(u64, Vec<u8>)> = Vec::new();
    let before = rustix::fs::fcntl_getfl(device)?;
    rustix::fs::fcntl_setfl(device, before | OFlags::NONBLOCK)?;
    let outcome = loop {
        match rustix::io::read(device.as_fd(), &mut buffer) {
            Ok(bytes) => {
                let Ok(header) = Header::decode(&buffer[..bytes]) else { continue };
                let again = header.unique & abi::UNIQUE_RESEND != 0;
                let place = if again { header.unique & !abi::UNIQUE_RESEND } else { u64::MAX };
                found.push((place, buffer[..bytes].to_vec()));
                if !again {
                    break Ok(());
                }
            }
            Err(Errno::INTR | Errno::NOENT) => {}
            Err(Errno::AGAIN) => break Ok(()),
            Err(errno) => break Err(errno),
        }
    };
    rustix::fs::fcntl_setfl(device, before)?;
    outcome?;
    found.sort_by_key(|(place, _)| *place);
    Ok(found.into_iter().map(|(_, request)| request).collect())
}

fn handshake(device: &OwnedFd, options: &Options) -> io::Result<Agreed> {
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
