//! One version of an object, read by ranges.

use std::io::{self, Read};
use std::time::Duration;

use rustix::io::Errno;

use super::{Objects, is_condition_failed};
use crate::Remote;
use surgetank_types::model::StoreIdentity;
use surgetank_types::sync::Arc;

pub(super) struct RemoteObject {
    pub server: Arc<dyn Objects>,
    pub key: String,
    pub etag: String,
    pub identity: StoreIdentity,
    pub crc64nvme: Option<u64>,
    pub timeout: Duration,
}

/// Number of tries to continue after a connection breaks.
const TRIES_MAX: u32 = 4;

impl Remote for RemoteObject {
    fn identity(&self) -> StoreIdentity {
        self.identity
    }

    fn checksum(&self) -> Option<u64> {
        self.crc64nvme
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let mut done = 0;
        let mut tries = 0;
        while done < buffer.len() {
            let range = offset + done as u64..offset + buffer.len() as u64;
            let get = || self.server.get(&self.key, range.clone(), Some(&self.etag));
            let mut body = match super::retry_within(self.timeout, get) {
                Ok(body) => body,
                // Another version has the key, or none.
                Err(why) if is_condition_failed(&why) || why.kind() == io::ErrorKind::NotFound => {
                    return Err(Errno::STALE.into());
                }
                Err(why) => return Err(why),
            };
            let broke_off = loop {
                match body.read(&mut buffer[done..]) {
                    Ok(0) => break (done < buffer.len()).then(|| io::Error::from(io::ErrorKind::UnexpectedEof)),
                    Ok(count) => done += count,
                    Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
                    Err(why) => break Some(why),
                }
            };
            tries += 1;
            if let Some(why) = broke_off.filter(|_| tries >= TRIES_MAX) {
                return Err(why);
            }
        }
        Ok(())
    }
}
