//! The kernel's interface for user notification (include/uapi/linux/seccomp.h): calls arrive on a descriptor, answers
//! leave.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// struct seccomp_notif.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Notice {
    /// Identifies this call; void as soon as the caller has ended or was interrupted.
    pub id: u64,
    /// Thread id, in our pid namespace.
    pub tid: u32,
    flags: u32,
    pub number: i32,
    arch: u32,
    instruction: u64,
    pub args: [u64; 6],
}

/// struct seccomp_notif_resp.
#[repr(C)]
struct Response {
    id: u64,
    value: i64,
    error: i32,
    flags: u32,
}

/// struct seccomp_notif_addfd.
#[repr(C)]
struct AddDescriptor {
    id: u64,
    flags: u32,
    source: u32,
    target: u32,
    target_flags: u32,
}

const CONTINUE: u32 = 1;
const ADD_AND_SEND: u32 = 2;
const SYNC_WAKE_UP: u64 = 1;

const RECEIVE: u64 = request(3, size_of::<Notice>(), 0);
const SEND: u64 = request(3, size_of::<Response>(), 1);
const IS_VALID: u64 = request(1, size_of::<u64>(), 2);
const ADD: u64 = request(1, size_of::<AddDescriptor>(), 3);
const SET_FLAGS: u64 = request(1, size_of::<u64>(), 4);

const fn request(direction: u64, bytes: usize, number: u64) -> u64 {
    direction << 30 | (bytes as u64) << 16 | (b'!' as u64) << 8 | number
}

pub struct Listener(OwnedFd);

impl Listener {
    pub fn new(descriptor: OwnedFd) -> Self {
        let listener = Self(descriptor);
        // The caller continues at once on the processor that answered; kernels before 6.6 do not support it.
        let _ = listener.ioctl(SET_FLAGS, SYNC_WAKE_UP as *mut libc::c_void);
        listener
    }

    fn ioctl(&self, request: u64, argument: *mut libc::c_void) -> io::Result<i32> {
        // SAFETY: each request comes with its structure, alive during the call, or with a plain number.
        let result = unsafe { libc::ioctl(self.0.as_raw_fd(), request as _, argument) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
    }

    /// Waits for a call.
    pub fn receive(&self) -> io::Result<Notice> {
        // The kernel requires zeros.
        let mut notice = Notice::default();
        self.ioctl(RECEIVE, (&raw mut notice).cast())?;
        Ok(notice)
    }

    /// Does the caller still wait for this answer? If it does, bytes that were read from its memory are its own.
    pub fn is_valid(&self, id: u64) -> bool {
        let mut id = id;
        self.ioctl(IS_VALID, (&raw mut id).cast()).is_ok()
    }

    fn send(&self, mut response: Response) -> io::Result<()> {
        self.ioctl(SEND, (&raw mut response).cast()).map(drop)
    }

    pub fn succeed(&self, id: u64, value: i64) -> io::Result<()> {
        self.send(Response { id, value, error: 0, flags: 0 })
    }

    pub fn fail(&self, id: u64, errno: i32) -> io::Result<()> {
        self.send(Response { id, value: 0, error: -errno, flags: 0 })
    }

    /// The kernel continues the call unchanged.
    pub fn release(&self, id: u64) -> io::Result<()> {
        self.send(Response { id, value: 0, error: 0, flags: CONTINUE })
    }

    /// Puts a descriptor into the caller's table, and returns its number as the answer.
    pub fn hand_over(&self, id: u64, file: BorrowedFd<'_>, close_on_exec: bool) -> io::Result<()> {
        let mut add = AddDescriptor {
            id,
            flags: ADD_AND_SEND,
            source: file.as_raw_fd().cast_unsigned(),
            target: 0,
            target_flags: if close_on_exec { libc::O_CLOEXEC.cast_unsigned() } else { 0 },
        };
        self.ioctl(ADD, (&raw mut add).cast()).map(drop)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

const _: () = assert!(size_of::<Notice>() == 80 && size_of::<Response>() == 24 && size_of::<AddDescriptor>() == 24);
