//! What stands at the end of a compressed file in a store, where anybody may write: nothing of it may stop us.
#![no_main]

use libfuzzer_sys::fuzz_target;
use surgetank_store::packed::zstd;

fuzz_target!(|bytes: &[u8]| zstd::read_end(bytes));
