//! A line on the agent's socket, from either side. A message that is read can be written, and reads again as the same.
#![no_main]

use std::io::BufReader;

use libfuzzer_sys::fuzz_target;
use surgetank::agent::wire::{self, Answer, Request};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(Some(request)) = wire::read::<Request>(&mut BufReader::new(bytes), wire::REQUEST_BYTES_MAX) {
        let mut written = Vec::new();
        wire::write(&mut written, &request).unwrap();
        let again = wire::read::<Request>(&mut BufReader::new(&written[..]), wire::REQUEST_BYTES_MAX).unwrap().unwrap();
        assert_eq!(format!("{again:?}"), format!("{request:?}"));
    }
    let _ = wire::read::<Answer>(&mut BufReader::new(bytes), wire::ANSWER_BYTES_MAX);
});
