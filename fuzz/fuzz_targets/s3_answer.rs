//! An answer of an object server, in XML: no content may crash the agent.
#![no_main]

use libfuzzer_sys::fuzz_target;
use surgetank_store::s3;

fuzz_target!(|bytes: &[u8]| {
    s3::read_answer(bytes);
    if let Ok(url) = std::str::from_utf8(bytes) {
        let _ = s3::Place::parse(url);
    }
});
