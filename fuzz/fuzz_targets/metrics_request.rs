//! A client's request to the port of the metrics. Further bytes do not change an answer, and a request without the token gets
//! no metrics.
#![no_main]

use libfuzzer_sys::fuzz_target;
use surgetank::agent::scrape::{Asked, HEAD_BYTES_MAX, asked};

fuzz_target!(|bytes: &[u8]| {
    let answer = asked(bytes, Some(b"0123456789abcdef"));
    let shows = bytes.windows(16).any(|sixteen| sixteen == b"0123456789abcdef");
    assert!(shows || !matches!(answer, Asked::Metrics { .. }));
    if bytes.len() < HEAD_BYTES_MAX && answer != Asked::More {
        assert_eq!(asked(&[bytes, b"more"].concat(), Some(b"0123456789abcdef")), answer);
    }
});
