//! A session: the conversation with the kernel over one FUSE descriptor, from the handshake to the unmount.
//!
//! States: handshake ([`super::handshake`], in [`Session::start`]) → serving → ended (unmounted, or stopped). The maker of the mount
//! ([`super::attach()`], later a supervisor) provides the descriptor; the session does not unmount.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::abi;
use super::filesystem::Filesystem;
use super::handshake::{Agreed, Options, handshake};
use super::inbox::{Clones, OnClone, touched};
use super::notifier::Notifier;
use super::request::Header;
use super::turns::Turns;
use super::workers::Workers;

/// Lets descriptors outlive the server: a keeper receives each clone, and this server uses an earlier server's clones.
#[derive(Default)]
pub(crate) struct Kept {
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

    pub(crate) fn start_kept<F: Filesystem>(
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
    pub(crate) fn take_over<F: Filesystem>(
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

    /// The way to send unsolicited messages to the kernel.
    pub fn notifier(&self) -> &Notifier {
        &self.notifier
    }

    /// The agreement with the kernel.
    pub fn agreed(&self) -> &Agreed {
        &self.agreed
    }

    /// Whether the pool still serves.
    pub fn running(&self) -> bool {
        self.workers.running()
    }

    /// Threads serving now.
    pub fn threads(&self) -> usize {
        self.workers.threads()
    }

    /// Waits for the end (an unmount); `false` if it did not come within `timeout`.
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        self.workers.wait(timeout)
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
