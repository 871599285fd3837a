//! An answer of a server that speaks MongoDB's protocol, and URLs of such servers: no content may crash the agent.
#![no_main]

use libfuzzer_sys::fuzz_target;
use surgetank_store::gridfs;

fuzz_target!(|bytes: &[u8]| {
    gridfs::read_answer(bytes);
    if let Ok(text) = std::str::from_utf8(bytes) {
        let _ = gridfs::Place::parse(text);
    }
});
