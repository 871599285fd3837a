//! What somebody sends to the port of the metrics. More of the same does not change an answer, and no answer without the token.
#![no_main]

use libfuzzer_sys::fuzz_target;
use surgetank::agent::scrape::{Asked, HEAD_BYTES_MAX, asked};

fuzz_target!(|bytes: &[u8]| {
    let told = asked(bytes, Some(b"0123456789abcdef"));
    let shows = bytes.windows(16).any(|sixteen| sixteen == b"0123456789abcdef");
    assert!(shows || !matches!(told, Asked::Metrics { .. }));
    if bytes.len() < HEAD_BYTES_MAX && told != Asked::More {
        assert_eq!(asked(&[bytes, b"more"].concat(), Some(b"0123456789abcdef")), told);
    }
});
