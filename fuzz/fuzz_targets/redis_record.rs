//! The records and uploads of a Redis server, where any client may write: no content may crash the agent.
#![no_main]

use libfuzzer_sys::fuzz_target;
use surgetank_store::redis;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(text) = std::str::from_utf8(bytes) {
        redis::read_record(text);
        let _ = redis::Place::parse(text);
    }
});
