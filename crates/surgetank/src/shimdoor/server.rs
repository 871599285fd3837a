//! Serves the shim's requests: one thread waits for all connections and answers what it can at once. A separate thread
//! takes each request that waits for the store (fsync).

use std::cell::Cell;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::{MaybeUninit, offset_of};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use surgetank_core::namespace::{LEFT_TO_THE_MOUNT, Namespace, STORE_TO_BE_ASKED, SetAttr};
use surgetank_types::error::FsResult;
use surgetank_types::model::{Caller, FileId, Timestamp};
use surgetank_types::workers::Workers;

use super::Door;
use super::abi::{self, Request, op, set};
use crate::socket_address::Address;

const LISTENER: u64 = 0;
const STOP: u64 = 1;
const FIRST_CLIENT: u64 = 2;
const WAITING_MAX: i32 = 1024;

pub struct Server {
    door: Arc<Door>,
    listener: OwnedFd,
    epoll: OwnedFd,
    clients: HashMap<u64, Arc<OwnedFd>>,
    next: u64,
    uid: u32,
    /// Threads for requests that wait for the store.
    asides: Workers,
}

/// A request and its sender.
struct Message {
    request: Request,
    name: Vec<u8>,
    /// The bytes after the name.
    more: Vec<u8>,
    caller: Caller,
}

impl Server {
    pub fn listen(door: Arc<Door>, socket: &Path, stop: BorrowedFd<'_>) -> io::Result<Self> {
        match std::fs::remove_file(socket) {
            Err(why) if why.kind() != io::ErrorKind::NotFound => return Err(why),
            _ => {}
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        // Accepted sockets inherit it: the server also knows a sender that sends immediately, between accept and any
        // later call.
        rustix::net::sockopt::set_socket_passcred(&listener, true)?;
        rustix::net::bind(&listener, &SocketAddrUnix::new(Address::of(socket)?.path())?)?;
        rustix::net::listen(&listener, WAITING_MAX)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
        epoll::add(&epoll, stop, EventData::new_u64(STOP), EventFlags::IN)?;
        let uid = rustix::process::geteuid().as_raw();
        Ok(Self {
            door,
            listener,
            epoll,
            clients: HashMap::new(),
            next: FIRST_CLIENT,
            uid,
            asides: Workers::new("shim-aside", ASIDES_IDLE_MAX),
        })
    }

    pub fn serve(mut self) {
        SLOT.set(SERVER_SLOT);
        let mut events = Vec::with_capacity(64);
        loop {
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => {
                    tracing::error!(%errno, "the shim's door closes");
                    return;
                }
            }
            for event in &events {
                match event.data.u64() {
                    LISTENER => self.accept(),
                    STOP => return,
                    client => self.hear(client),
                }
            }
        }
    }

    fn accept(&mut self) {
        while let Ok(client) = rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            let number = self.next;
            self.next += 1;
            let ready = epoll::add(&self.epoll, &client, EventData::new_u64(number), EventFlags::IN);
            match ready {
                Ok(()) => drop(self.clients.insert(number, Arc::new(client))),
                Err(errno) => tracing::warn!(%errno, "the connection of a program failed; it uses the mount"),
            }
        }
    }

    fn hear(&mut self, number: u64) {
        let Some(client) = self.clients.get(&number).cloned() else { return };
        match receive(client.as_fd()) {
            Ok(Some(message)) => self.answer(client, message),
            Err(why) if why.kind() == io::ErrorKind::WouldBlock => {}
            Ok(None) => drop(self.clients.remove(&number)),
            Err(why) => {
                tracing::warn!(%why, "a program's message to the shim's door makes no sense");
                drop(self.clients.remove(&number));
            }
        }
    }

    fn answer(&self, client: Arc<OwnedFd>, message: Message) {
        let Some(namespace) = self.door.namespace() else { return };
        let ours = message.caller.uid == self.uid;
        // The plain file of the request may be known from the ring only.
        namespace.metadata.settle();
        match message.request.op {
            _ if !ours => reply(&client, abi::ASK_MOUNT, None),
            op::OPEN => match open(&self.door, &namespace, &message, false) {
                Err(fault) if fault.errno == STORE_TO_BE_ASKED => self.aside(Aside::Open, client, message, namespace),
                opened => answer_open(&self.door, &client, opened),
            },
            op::SETATTR => {
                let set = || self.set_attributes(&namespace, &message);
                // (What has no name belongs to the member that has it.)
                let status = match self.door.directory_of(&namespace, &message) {
                    Some(dir) => self.door.result_within(dir, abi::ASK_MOUNT, &set),
                    None => set(),
                };
                reply(&client, status, None);
            }
            op::SETATTR_NAMED => {
                let set = || self.set_attributes(&namespace, &message);
                reply(&client, self.door.result_within(named_in(&message), abi::ASK_MOUNT, &set), None);
            }
            op::SETXATTR => {
                let set = || set_attribute(&namespace, &message);
                reply(&client, self.door.result_within(named_in(&message), abi::ASK_MOUNT, &set), None);
            }
            op::GETXATTR => {
                let get = || attribute(&namespace, &message);
                match self.door.result_within(named_in(&message), Err(abi::ASK_MOUNT), &get) {
                    Ok(value) => reply_value(&client, &value, message.request.valid),
                    Err(status) => reply(&client, status, None),
                }
            }
            op::SYNC => self.aside(Aside::Sync, client, message, namespace),
            _ => reply(&client, libc::EINVAL, None),
        }
    }

    /// A request that waits for the store delays no other request.
    fn aside(&self, what: Aside, client: Arc<OwnedFd>, message: Message, namespace: Arc<Namespace>) {
        let door = Arc::clone(&self.door);
        let recipient = Arc::clone(&client);
        let slot = ASIDES.fetch_add(1, Ordering::Relaxed) % ASIDE_SLOTS;
        let act = move || {
            SLOT.set(slot);
            match what {
                Aside::Open => answer_open(&door, &recipient, open(&door, &namespace, &message, true)),
                Aside::Sync => {
                    reply(&recipient, sync(&door, &namespace, message.request.dev, message.request.ino), None);
                }
            }
        };
        if let Err(why) = self.asides.run(act) {
            tracing::warn!(%why, "no thread for a request of the shim");
            let status = match what {
                Aside::Open => abi::ASK_MOUNT,
                Aside::Sync => libc::EAGAIN,
            };
            reply(&client, status, None);
        }
    }

    fn set_attributes(&self, namespace: &Namespace, message: &Message) -> i32 {
        let request = &message.request;
        let by_name = request.op == op::SETATTR_NAMED;
        let on = |flag: u32| request.valid & flag != 0;
        let now = surgetank_types::clock::now();
        let time = |at: u32, at_now: u32, secs: i64, nanos: u32| {
            if on(at_now) { Some(now) } else { on(at).then(|| Timestamp::from_parts(secs, nanos)) }
        };
        let only = self.door.only_ids;
        let change = SetAttr {
            perm: on(set::MODE).then_some(request.mode & 0o7777),
            // Setting the owner that is shown changes nothing: the true one stays.
            uid: on(set::UID).then_some(request.uid).filter(|uid| only.is_none_or(|only| only.0 != *uid)),
            gid: on(set::GID).then_some(request.gid).filter(|gid| only.is_none_or(|only| only.1 != *gid)),
            size_bytes: None,
            atime: time(set::ATIME, set::ATIME_NOW, request.atime_s, request.atime_ns),
            mtime: time(set::MTIME, set::MTIME_NOW, request.mtime_s, request.mtime_ns),
            times_now: !on(set::ATIME) && !on(set::MTIME),
            // As in every chown, whatever the true owner is.
            kill_suidgid: on(set::UID | set::GID),
        };
        // With set-user-id or set-group-id the kernel must know the file that it protects.
        if change.perm.is_some_and(|perm| perm & 0o6000 != 0) {
            return abi::ASK_MOUNT;
        }
        if by_name {
            namespace.files.descriptors.catch_up();
        } else {
            self.door.take_closings();
        }
        for _ in 0..LOOKS_MAX {
            let id = if by_name {
                namespace.metadata.file_named(FileId(request.dir), &message.name).ok_or(abi::ASK_MOUNT)
            } else {
                self.door.of_plain(request.dev, request.ino).ok_or(libc::ENOENT)
            };
            let id = match id {
                Ok(id) => id,
                Err(status) => return status,
            };
            match namespace.attributes.setattr(&message.caller, id, None, &change) {
                Ok(_) => {
                    namespace.files.sealer.forget_attributes_for_sure(id);
                    return 0;
                }
                // Another file has the name by now.
                Err(fault) if by_name && fault.errno == rustix::io::Errno::STALE => {}
                Err(fault) => return fault.errno.raw_os_error(),
            }
        }
        abi::ASK_MOUNT
    }
}

/// The attribute that a request gets or sets: its name, and its new value.
fn split(message: &Message) -> Result<(&[u8], &[u8]), i32> {
    message.more.split_at_checked(message.request.mode as usize).ok_or(libc::EINVAL)
}

fn set_attribute(namespace: &Namespace, message: &Message) -> i32 {
    let (attribute, value) = match split(message) {
        Ok(parts) => parts,
        Err(status) => return status,
    };
    namespace.files.descriptors.catch_up();
    for _ in 0..LOOKS_MAX {
        let Some(id) = namespace.metadata.file_named(FileId(message.request.dir), &message.name) else {
            return abi::ASK_MOUNT;
        };
        match namespace.xattrs.set_attribute_known(&message.caller, id, attribute, value) {
            Some(Ok(())) => {
                // (The file has a new time of change.)
                namespace.files.sealer.forget_attributes_for_sure(id);
                return 0;
            }
            // Another file has the name by now.
            Some(Err(fault)) if fault.errno == rustix::io::Errno::STALE => {}
            Some(Err(fault)) => return fault.errno.raw_os_error(),
            None => return abi::ASK_MOUNT,
        }
    }
    abi::ASK_MOUNT
}

fn attribute(namespace: &Namespace, message: &Message) -> Result<Vec<u8>, i32> {
    let (attribute, _) = split(message)?;
    namespace.files.descriptors.catch_up();
    let id = namespace.metadata.file_named(FileId(message.request.dir), &message.name).ok_or(abi::ASK_MOUNT)?;
    // (If the file is gone meanwhile, the mount looks it up again.)
    let value = namespace.xattrs.attribute_known(id, attribute).ok_or(abi::ASK_MOUNT)?;
    let value = value.map_err(|fault| fault.errno.raw_os_error())?;
    if value.len() > abi::VALUE_BYTES_MAX { Err(abi::ASK_MOUNT) } else { Ok(value) }
}

/// How often a name is looked up whose file disappears meanwhile.
const LOOKS_MAX: usize = 3;

#[derive(Clone, Copy)]
enum Aside {
    Open,
    Sync,
}

thread_local! {
    static SLOT: Cell<u64> = const { Cell::new(0) };
    static NUMBER: Cell<u64> = const { Cell::new(0) };
}
static ASIDES: AtomicU64 = AtomicU64::new(0);
/// Threads that wait for the next request of this kind.
const ASIDES_IDLE_MAX: usize = 4;
/// At most this many requests wait for the store at once; beyond that their numbers would be lost with the agent.
const ASIDE_SLOTS: u64 = 1024;
const SERVER_SLOT: u64 = ASIDE_SLOTS;
/// The kernel's requests have smaller numbers.
const NUMBERS_FROM: u64 = 1 << 62;

/// This thread's request, if it needs a number to be distinguished: slot and number.
pub fn current() -> Option<(u64, u64)> {
    let number = NUMBER.get();
    (number != 0).then(|| (SLOT.get(), number))
}

impl Door {
    /// What `act` returns; `otherwise`: another member decides about the directory, or may.
    fn result_within<T>(&self, dir: FileId, otherwise: T, act: &dyn Fn() -> T) -> T {
        let mut result = otherwise;
        self.within(dir, &mut || result = act());
        result
    }

    /// The directory of the plain file that a request is about.
    fn directory_of(&self, namespace: &Namespace, message: &Message) -> Option<FileId> {
        let id = self.of_plain(message.request.dev, message.request.ino)?;
        namespace.pooled.name_of(id).map(|(_, dir, _)| dir)
    }
}

fn named_in(message: &Message) -> FileId {
    FileId(message.request.dir)
}

fn open(door: &Door, namespace: &Namespace, message: &Message, may_ask: bool) -> FsResult<File> {
    door.result_within(named_in(message), Err(LEFT_TO_THE_MOUNT.into()), &|| open_here(namespace, message, may_ask))
}

fn open_here(namespace: &Namespace, message: &Message, may_ask: bool) -> FsResult<File> {
    let Message { request, caller, .. } = message;
    surgetank_types::crash_point!("shim.asked");
    if request.flags as i32 & libc::O_EXCL == 0 {
        return open_new(namespace, message, may_ask);
    }
    let which = abi::mix(request.dev ^ abi::mix(request.ino ^ u64::from(caller.pid) << 32));
    let number = which & (NUMBERS_FROM - 1) | NUMBERS_FROM;
    if request.valid & abi::AGAIN != 0
        && let Some(about) = namespace.base.succession.carried_out(number)
    {
        let place = (FileId(request.dir), message.name.as_slice());
        return namespace.grants.grant_again(caller, place, about, request.flags as i32);
    }
    NUMBER.set(number);
    let opened = open_new(namespace, message, may_ask);
    NUMBER.set(0);
    opened
}

fn open_new(namespace: &Namespace, message: &Message, may_ask: bool) -> FsResult<File> {
    let Message { request, name, caller, .. } = message;
    let dir = FileId(request.dir);
    let grant = || namespace.grants.grant(caller, dir, name, request.mode & 0o7777, request.flags as i32, may_ask);
    match grant() {
        // The missing room may still belong to writers that have closed already.
        Err(fault) if fault.errno == LEFT_TO_THE_MOUNT && namespace.files.descriptors.catch_up() => grant(),
        granted => granted,
    }
}

fn answer_open(door: &Door, client: &OwnedFd, opened: FsResult<File>) {
    match opened {
        Ok(file) => {
            let _giving = door.giving();
            reply(client, 0, Some(file.as_fd()));
            surgetank_types::crash_point!("shim.given");
            drop(file);
        }
        Err(fault) if fault.errno == LEFT_TO_THE_MOUNT => reply(client, abi::ASK_MOUNT, None),
        Err(fault) => reply(client, fault.errno.raw_os_error(), None),
    }
}

fn sync(door: &Door, namespace: &Namespace, dev: u64, ino: u64) -> i32 {
    door.take_closings();
    match door.of_plain(dev, ino) {
        Some(id) => {
            namespace.files.descriptors.fsync_granted(id).map_or_else(|fault| fault.errno.raw_os_error(), |()| 0)
        }
        // The file has no name by now, and its writers have closed it.
        None => 0,
    }
}

/// A request, its name and the bytes after it, as received; `None`: it is not a valid request.
pub fn parse(bytes: &[u8]) -> Option<(Request, &[u8], &[u8])> {
    let (head, rest) = bytes.split_at_checked(size_of::<Request>())?;
    // SAFETY: `head` holds as many bytes, and any bytes are a request.
    let request: Request = unsafe { head.as_ptr().cast::<Request>().read_unaligned() };
    let (name, more) = rest.split_at_checked(request.name_bytes as usize)?;
    let more = more.get(..request.more_bytes as usize)?;
    let is_name = !name.contains(&0) && !name.contains(&b'/') && name != b"." && name != b"..";
    is_name.then_some((request, name, more))
}

/// `None`: the program has disconnected.
fn receive(client: BorrowedFd<'_>) -> io::Result<Option<Message>> {
    let mut bytes = [0; size_of::<Request>() + abi::NAME_BYTES_MAX + 1 + abi::MORE_BYTES_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmCredentials(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received =
        rustix::net::recvmsg(client, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, RecvFlags::empty())?;
    if received.bytes == 0 {
        return Ok(None);
    }
    let credentials = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmCredentials(credentials) => Some(credentials),
        _ => None,
    });
    let invalid = || io::Error::from(io::ErrorKind::InvalidData);
    // A message sent before credentials were enabled has none: then those of the connection's opener count.
    let credentials = credentials.map_or_else(|| rustix::net::sockopt::socket_peercred(client), Ok)?;
    let (request, name, more) = parse(&bytes[..received.bytes]).ok_or_else(invalid)?;
    let caller = Caller {
        uid: credentials.uid.as_raw(),
        gid: credentials.gid.as_raw(),
        pid: credentials.pid.as_raw_pid().unsigned_abs(),
        umask: 0,
    };
    Ok(Some(Message { request, name: name.to_vec(), more: more.to_vec(), caller }))
}

fn reply(client: &OwnedFd, status: i32, file: Option<BorrowedFd<'_>>) {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&status.to_ne_bytes());
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let files: Vec<BorrowedFd<'_>> = file.into_iter().collect();
    if !files.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&files));
    }
    // A program that has ended needs no answer; its descriptor is closed, and the agent notices that.
    let _ = rustix::net::sendmsg(client, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL);
}

/// Like getxattr: without room it returns the length, with too little room an error.
fn reply_value(client: &OwnedFd, value: &[u8], room_bytes: u32) {
    let asks_length = room_bytes == 0;
    if !asks_length && value.len() > room_bytes as usize {
        return reply(client, libc::ERANGE, None);
    }
    let mut head = [0; 8];
    // (No longer than `VALUE_BYTES_MAX`.)
    head[4..].copy_from_slice(&(value.len() as u32).to_ne_bytes());
    let value = if asks_length { &[] } else { value };
    let mut none = SendAncillaryBuffer::new(&mut []);
    let parts = [IoSlice::new(&head), IoSlice::new(value)];
    let _ = rustix::net::sendmsg(client, &parts, &mut none, SendFlags::NOSIGNAL);
}

const _: () = assert!(offset_of!(Request, more_bytes) + 4 == size_of::<Request>());
