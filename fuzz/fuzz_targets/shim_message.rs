//! A request of the preload shim, or of a process that claims to be one.
#![no_main]

use libfuzzer_sys::fuzz_target;
use surgetank::shimdoor::parse;

fuzz_target!(|bytes: &[u8]| {
    if let Some((request, name, more)) = parse(bytes) {
        assert!(!name.contains(&0) && !name.contains(&b'/') && name != b"." && name != b"..");
        assert_eq!((name.len(), more.len()), (request.name_bytes as usize, request.more_bytes as usize));
    }
});
