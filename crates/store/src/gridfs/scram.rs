//! The login without sending the password: SCRAM-SHA-256 (RFC 7677), two messages each way.
//!
//! The danger that this avoids: a server that does not know the password and accepts the login. The driver checks the server's
//! proof.

use base64::prelude::{BASE64_STANDARD, Engine};
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use super::failure::Failure;

/// The limits of the rounds. Fewer are guessed too soon (RFC 7677). A false server could demand an endless number.
const ROUNDS: std::ops::RangeInclusive<u32> = 4096..=10_000_000;

type Hash = [u8; 32];

pub struct Exchange {
    password: String,
    nonce: String,
    first_bare: String,
    server_signature: Hash,
}

impl Exchange {
    /// `nonce`: unpredictable, and never used twice.
    pub fn new(user: &str, password: &str, nonce: &[u8]) -> Result<Self, Failure> {
        // Other characters would need a normal form (SASLprep).
        if !password.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ') {
            return Err(Failure::login_refused(
                "the password has characters that are not ASCII, which are not supported",
            ));
        }
        let nonce = BASE64_STANDARD.encode(nonce);
        let first_bare = format!("n={},r={nonce}", user.replace('=', "=3D").replace(',', "=2C"));
        Ok(Self { password: password.to_owned(), nonce, first_bare, server_signature: [0; 32] })
    }

    pub fn first(&self) -> String {
        format!("n,,{}", self.first_bare)
    }

    /// The answer to the server's first message.
    pub fn second(&mut self, server_first: &str) -> Result<String, Failure> {
        let field = |name: &str| server_first.split(',').find_map(|field| field.strip_prefix(name)?.strip_prefix('='));
        let wrong = || Failure::login_refused("the server's messages do not follow SCRAM-SHA-256");
        let nonce = field("r").filter(|nonce| nonce.starts_with(&self.nonce)).ok_or_else(wrong)?;
        let salt = BASE64_STANDARD.decode(field("s").ok_or_else(wrong)?).map_err(|_| wrong())?;
        let rounds = field("i").and_then(|rounds| rounds.parse().ok()).filter(|rounds| ROUNDS.contains(rounds));
        let salted = salted(self.password.as_bytes(), &salt, rounds.ok_or_else(wrong)?);
        let client_key = keyed(&salted, &[b"Client Key"]);
        let stored_key: Hash = Sha256::digest(client_key).into();
        let without_proof = format!("c=biws,r={nonce}");
        let text = [self.first_bare.as_str(), ",", server_first, ",", &without_proof].concat();
        let signature = keyed(&stored_key, &[text.as_bytes()]);
        let proof: Vec<u8> = client_key.iter().zip(signature).map(|(key, signature)| key ^ signature).collect();
        self.server_signature = keyed(&keyed(&salted, &[b"Server Key"]), &[text.as_bytes()]);
        Ok(format!("{without_proof},p={}", BASE64_STANDARD.encode(proof)))
    }

    /// Checks that the server knows the password, too.
    pub fn end(&self, server_final: &str) -> Result<(), Failure> {
        let proof = server_final.strip_prefix("v=").and_then(|text| BASE64_STANDARD.decode(text).ok());
        match proof {
            Some(proof) if proof == self.server_signature => Ok(()),
            _ => Err(Failure::login_refused("the server does not prove that it knows the password")),
        }
    }
}

fn keyed(key: &[u8], parts: &[&[u8]]) -> Hash {
    // (HMAC takes keys of any length.)
    let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(key) else { return [0; 32] };
    parts.iter().for_each(|part| mac.update(part));
    mac.finalize().into_bytes().into()
}

/// PBKDF2 for one block.
fn salted(password: &[u8], salt: &[u8], rounds: u32) -> Hash {
    let mut step = keyed(password, &[salt, &1_u32.to_be_bytes()]);
    let mut whole = step;
    for _ in 1..rounds {
        step = keyed(password, &[&step]);
        whole.iter_mut().zip(step).for_each(|(whole, step)| *whole ^= step);
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of RFC 7677.
    #[test]
    fn scram_exchange_matches_the_rfc_example() {
        let mut exchange = Exchange::new("user", "pencil", b"").unwrap();
        exchange.nonce = "rOprNGfwEbeRWgbNEkqO".into();
        exchange.first_bare = format!("n=user,r={}", exchange.nonce);
        assert_eq!(exchange.first(), "n,,n=user,r=rOprNGfwEbeRWgbNEkqO");
        let said = "r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096";
        let answer = exchange.second(said).unwrap();
        assert!(answer.ends_with("p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="), "{answer}");
        exchange.end("v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=").unwrap();
        assert!(exchange.end("v=7rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=").is_err());
        for wrong in ["r=other,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096", &said.replace("4096", "1"), "r=rOprNGfwEbeRWgbNEkqO"]
        {
            assert!(exchange.second(wrong).is_err(), "{wrong}");
        }
    }
}
