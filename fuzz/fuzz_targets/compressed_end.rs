//! The end of a compressed file in a store, where any user may write: no content of it may crash the agent.
#![no_main]

use libfuzzer_sys::fuzz_target;
use surgetank_store::packed::zstd;

fuzz_target!(|bytes: &[u8]| zstd::read_end(bytes));
