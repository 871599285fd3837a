//! A connection that reads the server's answer even if the server does not read the rest of the body.
//!
//! The danger that it avoids: a server that refuses a write early (the condition does not hold, no permission) answers and
//! closes while the client still sends. A client that stops at the failed write never reads the answer, takes it for a broken
//! connection, and sends everything again. Here the rest of the body is dropped and the answer is read; if there is none,
//! reading fails.

use std::io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset};

use ureq::Error;
use ureq::unversioned::transport::{Buffers, ConnectionDetails, Connector, NextTimeout, Transport};

#[derive(Debug)]
pub struct Listening;

impl<In: Transport> Connector<In> for Listening {
    type Out = Hearing<In>;

    fn connect(&self, _: &ConnectionDetails<'_>, below: Option<In>) -> Result<Option<Self::Out>, Error> {
        Ok(below.map(|below| Hearing { below, closed: false }))
    }
}

#[derive(Debug)]
pub struct Hearing<T> {
    below: T,
    /// The server reads no more.
    closed: bool,
}

impl<T: Transport> Transport for Hearing<T> {
    fn buffers(&mut self) -> &mut dyn Buffers {
        self.below.buffers()
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), Error> {
        if self.closed {
            return Ok(());
        }
        match self.below.transmit_output(amount, timeout) {
            Err(Error::Io(why)) if matches!(why.kind(), BrokenPipe | ConnectionReset | ConnectionAborted) => {
                self.closed = true;
                Ok(())
            }
            sent => sent,
        }
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, Error> {
        self.below.await_input(timeout)
    }

    fn is_open(&mut self) -> bool {
        !self.closed && self.below.is_open()
    }

    fn is_tls(&self) -> bool {
        self.below.is_tls()
    }
}
