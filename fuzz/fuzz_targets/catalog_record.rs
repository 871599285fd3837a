//! A record of the catalog's log, as a torn disk may have it.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = surgetank_core::catalog::decode(bytes);
});
