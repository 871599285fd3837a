//! A request that a kernel might send.
#![no_main]

use libfuzzer_sys::fuzz_target;
use surgetank::mount::request::{Operation, decode};

fuzz_target!(|bytes: &[u8]| {
    let Ok(request) = decode(bytes) else { return };
    // Reads every part of the request that points into the message.
    match request.operation {
        Operation::BatchForget { forgets } => drop(forgets.iter().count()),
        operation => drop(format!("{operation:?}")),
    }
});
