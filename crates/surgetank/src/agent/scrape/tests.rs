use std::os::unix::fs::PermissionsExt;

use proptest::prelude::*;

use super::*;

const TOKEN: &[u8] = b"0123456789abcdef";

fn with(line: &str, fields: &str) -> Asked {
    asked(format!("{line}\r\n{fields}\r\n").as_bytes(), Some(TOKEN))
}

#[test]
fn request_is_parsed_when_its_head_is_complete() {
    let whole = b"GET /metrics HTTP/1.1\r\nHost: x\r\naUTHORIZATION:  bearer 0123456789abcdef \r\n\r\nrest";
    let end = whole.len() - 4;
    for length in 0..end {
        assert_eq!(asked(&whole[..length], Some(TOKEN)), Asked::More, "{length}");
    }
    assert_eq!(asked(whole, Some(TOKEN)), Asked::Metrics { head_only: false });
    let right = "Authorization: Bearer 0123456789abcdef\r\n";
    assert_eq!(with("HEAD /metrics HTTP/1.1", right), Asked::Metrics { head_only: true });
    assert_eq!(with("GET /metrics?name=x HTTP/1.0", right), Asked::Metrics { head_only: false });
    for (line, refused) in [
        ("POST /metrics HTTP/1.1", Refused::OtherMethod),
        ("GET / HTTP/1.1", Refused::OtherPath),
        ("GET /metrics/../etc/passwd HTTP/1.1", Refused::OtherPath),
        ("GET http://x/metrics HTTP/1.1", Refused::OtherPath),
        ("GET /metrics HTTP/2.0", Refused::Malformed),
        ("GET  /metrics HTTP/1.1", Refused::Malformed),
        ("GET /metrics", Refused::Malformed),
        ("\u{1}\u{2}\u{3}", Refused::Malformed),
    ] {
        assert_eq!(with(line, right), Asked::Refused(refused), "{line}");
    }
    assert_eq!(with("GET /metrics HTTP/1.1", "no colon\r\n"), Asked::Refused(Refused::Malformed));
    assert_eq!(asked(&[b'a'; HEAD_BYTES_MAX], None), Asked::Refused(Refused::TooLong));
}

#[test]
fn request_without_the_token_is_refused() {
    for fields in [
        "",
        "Authorization: Bearer\r\n",
        "Authorization: Bearer 0123456789abcdeg\r\n",
        "Authorization: Bearer 0123456789abcdef0\r\n",
        "Authorization: Basic 0123456789abcdef\r\n",
        "X-Authorization: Bearer 0123456789abcdef\r\n",
    ] {
        for path in ["/metrics", "/", "/else"] {
            let line = format!("GET {path} HTTP/1.1");
            assert_eq!(with(&line, fields), Asked::Refused(Refused::NoToken), "{line} {fields}");
        }
    }
    assert_eq!(asked(b"GET /metrics HTTP/1.1\r\n\r\n", None), Asked::Metrics { head_only: false });
}

#[test]
fn token_that_is_not_secret_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let made = own_token(dir.path()).unwrap();
    assert_eq!((made.len(), own_token(dir.path()).unwrap()), (64, made), "the same again");
    let path = dir.path().join(TOKEN_NAME);
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left there");
    for (mode, good) in [(0o400, true), (0o640, true), (0o644, false), (0o660, false), (0o602, false)] {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        assert_eq!(read_token(&path).is_ok(), good, "{mode:o}");
    }
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    for (text, good) in
        [("0123456789abcdef\n", true), ("short", false), ("two words of some length", false), ("", false)]
    {
        fs::write(&path, text).unwrap();
        assert_eq!(read_token(&path).is_ok(), good, "{text:?}");
    }
    assert!(read_token(dir.path()).is_err(), "a directory");
    assert!(read_token(&dir.path().join("absent")).is_err());
}

#[test]
fn port_in_use_is_named() {
    let first = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = first.local_addr().unwrap();
    let error = bind(address).err().unwrap();
    assert!(error.what.contains(&address.to_string()) && error.remedy.contains(&address.port().to_string()), "{error}");
    assert!(error.data.contains("nothing was begun"), "{error}");
}

proptest! {
    #[test]
    fn arbitrary_request_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        asked(&bytes, Some(TOKEN));
    }

    #[test]
    fn no_request_gets_past_the_token(method in "[A-Z]{1,7}", path in "/[a-z./?]{0,12}", value in "[ -~]{0,40}") {
        let head = format!("{method} {path} HTTP/1.1\r\nAuthorization: {value}\r\n\r\n");
        let answered = asked(head.as_bytes(), Some(TOKEN));
        let is_told = matches!(answered, Asked::Metrics { .. });
        prop_assert!(!is_told || value.contains("0123456789abcdef"), "{head}");
    }
}
