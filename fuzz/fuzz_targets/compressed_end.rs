//! What stands at the end of a compressed file in a store, where anybody may write: nothing of it may stop us.
#![no_main]

use libfuzzer_sys::fuzz_target;
use surgetank_core::store::compressed;

fuzz_target!(|bytes: &[u8]| compressed::read_end(bytes));
