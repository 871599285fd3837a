//! The pool's secret, and TLS with a key that is derived from it.
//!
//! All members of a pool have the same key pair, and each accepts no other. So a connection proves on both sides that the
//! other one has the secret, which itself is never sent. The key is a raw public key (RFC 7250): there is no certificate
//! that could expire or name a host.
//!
//! The dangers that this avoids: a stranger on the network who reads, changes, repeats or makes messages; a secret that
//! other users of the machine can read.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, ClientConfig};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, ring, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{AlwaysResolvesServerRawPublicKeys, ServerConfig};
use rustls::sign::CertifiedKey;
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, Error, PeerMisbehaved, SignatureScheme};

/// What all members of a pool have in common: 256 random bits.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; Self::BYTES]);

// (A log must not have it.)
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

impl Secret {
    const BYTES: usize = 32;

    /// A new one.
    pub fn random() -> io::Result<Self> {
        let mut bytes = [0; Self::BYTES];
        let mut filled = 0;
        while filled < bytes.len() {
            filled += rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())?;
        }
        Ok(Self(bytes))
    }

    /// From 64 hexadecimal digits; spaces and line ends around them do not count.
    pub fn parse(text: &str) -> Option<Self> {
        let digits = text.trim();
        if digits.len() != 2 * Self::BYTES || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        let mut bytes = [0; Self::BYTES];
        for (byte, two) in bytes.iter_mut().zip(digits.as_bytes().chunks_exact(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(two).ok()?, 16).ok()?;
        }
        Some(Self(bytes))
    }

    /// As [`Self::parse`] reads it, for a file with mode 0600.
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// What only a process with the secret knows about these bytes. The secret cannot be found from it.
    pub fn proof(&self, of: &[u8]) -> [u8; Self::BYTES] {
        let key = blake3::derive_key("surgetank 2026-11-29 a pool's proof at its registry", &self.0);
        *blake3::keyed_hash(&key, of).as_bytes()
    }

    /// From a file that only this user can read.
    ///
    /// Errors: it cannot be read; it belongs to another user, or others have access; it has no secret.
    pub fn read(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let meta = file.metadata()?;
        if meta.uid() != rustix::process::geteuid().as_raw() || meta.mode() & 0o077 != 0 {
            let why = "other users have access to the pool's secret: its file must be yours, with mode 0600";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        let mut text = String::new();
        file.take(1024).read_to_string(&mut text)?;
        Self::parse(&text)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "a pool's secret has 64 hexadecimal digits"))
    }

    /// Both sides of TLS 1.3 with the key of this secret.
    pub fn tls(&self) -> Result<Tls, Error> {
        let (certified, provider) = (self.key()?, Arc::new(ring::default_provider()));
        let pinned = Arc::new(Pinned::new(&certified, &provider));
        Ok(Tls {
            client: Arc::new(client(provider.clone(), pinned.clone(), certified.clone())?),
            server: Arc::new(server(provider, pinned, certified)?),
        })
    }

    /// Accepts the other secret's key and shows its own, to which it has no right.
    #[cfg(test)]
    pub(crate) fn impostor_of(&self, other: &Self) -> Result<Tls, Error> {
        let provider = Arc::new(ring::default_provider());
        let pinned = Arc::new(Pinned::new(&*other.key()?, &provider));
        let client = Arc::new(client(provider, pinned, self.key()?)?);
        Ok(Tls { client, ..self.tls()? })
    }

    fn key(&self) -> Result<Arc<CertifiedKey>, Error> {
        // An Ed25519 key in PKCS #8, RFC 8410, section 7.
        const BEFORE_SEED: [u8; 16] =
            [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];
        let seed = blake3::derive_key("surgetank 2026-11-28 key of a pool's members", &self.0);
        let key = ring::sign::any_eddsa_type(&PrivatePkcs8KeyDer::from([&BEFORE_SEED[..], &seed].concat()))?;
        let public = key.public_key().ok_or(Error::General("the key has no public part".to_owned()))?.to_vec();
        Ok(Arc::new(CertifiedKey::new(vec![CertificateDer::from(public)], key)))
    }
}

/// TLS between members of one pool.
#[derive(Debug, Clone)]
pub struct Tls {
    pub(crate) client: Arc<ClientConfig>,
    pub(crate) server: Arc<ServerConfig>,
}

fn client(provider: Arc<CryptoProvider>, pinned: Arc<Pinned>, key: Arc<CertifiedKey>) -> Result<ClientConfig, Error> {
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(pinned)
        .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(key)));
    config.resumption = rustls::client::Resumption::disabled();
    Ok(config)
}

fn server(provider: Arc<CryptoProvider>, pinned: Arc<Pinned>, key: Arc<CertifiedKey>) -> Result<ServerConfig, Error> {
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(pinned)
        .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(key)));
    // No session is resumed: each connection proves the secret.
    config.send_tls13_tickets = 0;
    Ok(config)
}

/// Accepts one key.
#[derive(Debug)]
struct Pinned {
    public: Vec<u8>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl Pinned {
    fn new(key: &CertifiedKey, provider: &CryptoProvider) -> Self {
        let public = key.cert.first().map_or_else(Vec::new, |key| key.to_vec());
        Self { public, algorithms: provider.signature_verification_algorithms }
    }

    fn is_it(&self, key: &CertificateDer<'_>, more: &[CertificateDer<'_>]) -> Result<(), Error> {
        let is_it = more.is_empty() && key.as_ref() == self.public;
        if is_it { Ok(()) } else { Err(CertificateError::ApplicationVerificationFailure.into()) }
    }

    fn is_signed(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let key = SubjectPublicKeyInfoDer::from(key.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, signature, &self.algorithms)
    }
}

fn never() -> Result<HandshakeSignatureValid, Error> {
    Err(PeerMisbehaved::SignedHandshakeWithUnadvertisedSigScheme.into())
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        key: &CertificateDer<'_>,
        more: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.is_it(key, more).map(|()| ServerCertVerified::assertion())
    }
    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        never()
    }
    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.is_signed(message, key, signature)
    }
    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

impl ClientCertVerifier for Pinned {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }
    fn verify_client_cert(
        &self,
        key: &CertificateDer<'_>,
        more: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.is_it(key, more).map(|()| ClientCertVerified::assertion())
    }
    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        never()
    }
    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.is_signed(message, key, signature)
    }
    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secret_in_hexadecimal_is_read_again() {
        let secret = Secret::random().unwrap();
        assert_eq!(Secret::parse(&format!(" {}\n", secret.to_hex())), Some(secret.clone()));
        assert_eq!(format!("{secret:?}"), "Secret(…)");
        assert_ne!(Secret::random().unwrap(), secret);
    }

    #[test]
    fn text_that_is_no_secret_is_refused() {
        let long = "a".repeat(65);
        for text in ["", "0123", &long[..63], &long, &"g".repeat(64), &format!("+{}", &long[..63]), &"é".repeat(32)] {
            assert_eq!(Secret::parse(text), None, "{text}");
        }
    }

    #[test]
    fn secret_that_others_can_read_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        let secret = Secret::random().unwrap();
        std::fs::write(&path, secret.to_hex()).unwrap();
        for (mode, is_read) in [(0o600, true), (0o400, true), (0o640, false), (0o604, false), (0o620, false)] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let read = Secret::read(&path);
            assert_eq!(read.is_ok_and(|read| read == secret), is_read, "{mode:o}");
        }
    }
}
