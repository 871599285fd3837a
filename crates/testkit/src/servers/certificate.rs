//! A certificate for `localhost` from its own authority, made by openssl.

use std::path::Path;
use std::process::Command;

/// Makes `server.pem`, `server.key` and `authority.pem` in the directory. Panics if openssl fails.
pub(crate) fn certify(directory: &Path) {
    let script = r#"set -e
        umask 077
        openssl ecparam -name prime256v1 -genkey -noout -out authority.key
        openssl req -x509 -new -key authority.key -out authority.pem -days 2 -subj "/CN=an authority for a test"
        openssl ecparam -name prime256v1 -genkey -noout -out server.key
        openssl req -new -key server.key -out server.csr -subj /CN=localhost
        echo subjectAltName=DNS:localhost >extension
        openssl x509 -req -in server.csr -CA authority.pem -CAkey authority.key -CAcreateserial -days 2 \
            -extfile extension -out server.pem"#;
    let output = Command::new("sh").args(["-c", script]).current_dir(directory).output().unwrap();
    assert!(output.status.success(), "openssl: {}", String::from_utf8_lossy(&output.stderr));
}
