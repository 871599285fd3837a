//! TCP sockets as members use them: connecting with a patience, listening, and noticing a peer that has ended.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use surgetank_types::clock::tick;

/// What waits looks so often whether it may wait on.
pub(crate) const SLICE: Duration = Duration::from_millis(50);
/// After so long without an acknowledgement a connection is closed: before a lease ends, so that there is time for
/// another connection.
const SILENCE: Duration = Duration::from_secs(4);
/// So many connections wait for `accept`.
const BACKLOG: i32 = 1024;

/// How long something may take, and what is asked meanwhile.
pub(crate) struct Patience<'a> {
    until: Instant,
    goes_on: &'a mut dyn FnMut() -> bool,
}

impl<'a> Patience<'a> {
    /// `goes_on`: asked at least every [`SLICE`]; `false` ends it.
    pub fn new(patience: Duration, goes_on: &'a mut dyn FnMut() -> bool) -> Self {
        Self { until: tick() + patience, goes_on }
    }

    /// How long to wait before the next call of this function.
    pub fn slice(&mut self) -> io::Result<Duration> {
        self.slice_before(self.until)
    }

    fn slice_before(&mut self, until: Instant) -> io::Result<Duration> {
        let left = until.min(self.until).saturating_duration_since(tick());
        if left.is_zero() || !(self.goes_on)() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left.min(SLICE)) }
    }
}

/// Connects to `HOST:PORT`.
///
/// Errors: `ConnectionRefused` if each address of the host refused the connection.
pub(crate) fn connect(address: &str, patience: &mut Patience<'_>) -> io::Result<TcpStream> {
    let addresses: Vec<SocketAddr> = address.to_socket_addrs()?.collect();
    let mut failed: Option<io::Error> = None;
    for (tried, address) in addresses.iter().enumerate() {
        // (Each address gets its share of what is left.)
        let left = patience.until.saturating_duration_since(tick());
        let share = left / u32::try_from(addresses.len() - tried).unwrap_or(1);
        match connect_to(address, tick() + share, patience) {
            Ok(socket) => return Ok(socket),
            Err(why) if failed.as_ref().is_none_or(|why| why.kind() == io::ErrorKind::ConnectionRefused) => {
                failed = Some(why);
            }
            Err(_) => {}
        }
    }
    Err(failed.unwrap_or_else(|| io::ErrorKind::AddrNotAvailable.into()))
}

fn connect_to(address: &SocketAddr, until: Instant, patience: &mut Patience<'_>) -> io::Result<TcpStream> {
    let socket = socket_for(address, SocketFlags::NONBLOCK)?;
    match rustix::net::connect(&socket, address) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS | rustix::io::Errno::INTR) => {}
        Err(why) => return Err(why.into()),
    }
    while !is_ready(&socket, PollFlags::OUT, patience.slice_before(until)?) {}
    sockopt::socket_error(&socket)??;
    let socket = TcpStream::from(socket);
    socket.set_nonblocking(false)?;
    Ok(socket)
}

fn socket_for(address: &SocketAddr, flags: SocketFlags) -> rustix::io::Result<std::os::fd::OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC | flags, None)
}

/// Waits until the socket has one of these events, or an error.
pub(crate) fn is_ready(socket: impl AsFd, events: PollFlags, wait: Duration) -> bool {
    let mut waits = [PollFd::new(&socket, events)];
    let time = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) };
    matches!(poll(&mut waits, Some(&time)), Ok(1..))
}

/// Has the peer closed its side, or reset the connection? What it sent before may still be unread.
pub(crate) fn has_ended(socket: &TcpStream) -> bool {
    is_ready(socket, PollFlags::RDHUP, Duration::ZERO)
}

/// Listens under a name or an address, and returns its `HOST:PORT`, too. An address is bound. For a name all addresses of
/// the machine are: on Debian a host's own name means 127.0.1.1.
pub(crate) fn listen(host: &str) -> io::Result<(TcpListener, String)> {
    let literal = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let listener = match literal.parse::<IpAddr>() {
        Ok(address) => listen_at(address)?,
        Err(_) => listen_at(Ipv6Addr::UNSPECIFIED.into()).or_else(|_| listen_at(Ipv4Addr::UNSPECIFIED.into()))?,
    };
    let port = listener.local_addr()?.port();
    let is_ipv6 = literal.parse::<Ipv6Addr>().is_ok();
    Ok((listener, if is_ipv6 { format!("[{literal}]:{port}") } else { format!("{host}:{port}") }))
}

fn listen_at(address: IpAddr) -> io::Result<TcpListener> {
    let address = SocketAddr::new(address, 0);
    let socket = socket_for(&address, SocketFlags::empty())?;
    if address.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED) {
        sockopt::set_ipv6_v6only(&socket, false)?;
    }
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(TcpListener::from(socket))
}

/// A peer that says nothing more, not even that it ends, is noticed within [`SILENCE`].
pub(crate) fn end_with_the_peer(socket: &TcpStream) -> rustix::io::Result<()> {
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, SILENCE / 2)?;
    sockopt::set_tcp_keepintvl(socket, Duration::from_secs(1))?;
    sockopt::set_tcp_keepcnt(socket, 2)?;
    // (In milliseconds; of bytes that the peer does not acknowledge.)
    sockopt::set_tcp_user_timeout(socket, SILENCE.as_millis() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_binds_all_addresses_and_a_literal_its_own() {
        let (listener, address) = listen("localhost").unwrap();
        assert!(listener.local_addr().unwrap().ip().is_unspecified());
        let port = listener.local_addr().unwrap().port();
        assert_eq!(address, format!("localhost:{port}"));
        // (A host's own name on Debian.)
        TcpStream::connect(("127.0.1.1", port)).unwrap();
        let (listener, address) = listen("127.0.0.1").unwrap();
        assert_eq!(listener.local_addr().unwrap().to_string(), address);
        assert!(TcpStream::connect(("127.0.1.1", listener.local_addr().unwrap().port())).is_err());
    }

    #[test]
    fn refused_port_is_reported_as_refused() {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut goes_on = || true;
        let mut patience = Patience::new(Duration::from_secs(5), &mut goes_on);
        let refused = connect(&format!("localhost:{port}"), &mut patience).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn wait_that_may_not_go_on_ends_at_the_next_slice() {
        let mut asked = 0;
        let mut goes_on = || {
            asked += 1;
            asked < 3
        };
        let mut patience = Patience::new(Duration::from_secs(60), &mut goes_on);
        assert!(patience.slice().is_ok_and(|slice| slice == SLICE) && patience.slice().is_ok());
        assert_eq!(patience.slice().unwrap_err().kind(), io::ErrorKind::TimedOut);
    }
}
