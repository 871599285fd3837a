//! A file's attributes, as the scripts record them; see `scripts/prelude.lua`.

use super::failure::Failure;
use super::wire::Command;
use crate::object::{Object, When, Words};

/// One new version of a file.
pub struct Change {
    /// Drawn by the driver, so that it recognises its own work.
    pub etag: String,
    /// When the value expires, in steps; `0`: never.
    pub mark: String,
    pub crc: String,
    pub words: String,
}

impl Change {
    pub fn new(random: u64, marked: bool, crc64nvme: Option<u64>, words: Option<&Words>) -> Self {
        // From some 35,000 to 70,000 years.
        let mark = if marked { (1 << 30 | random >> 34).to_string() } else { "0".into() };
        let crc = crc64nvme.map_or("-".into(), |crc| format!("{crc:016x}"));
        Self { etag: format!("{random:016x}"), mark, crc, words: words.map_or("{}".into(), text_of_words) }
    }

    #[must_use]
    pub fn with_words(self, words: String) -> Self {
        Self { words, ..self }
    }

    /// The arguments that `put` and `place` share.
    pub fn fill(&self, script: Command, when: When<'_>) -> Command {
        let (when, wanted) = match when {
            When::Always => ("always", ""),
            When::Absent => ("absent", ""),
            When::Is(etag) => ("same", etag),
        };
        [when, wanted, &self.etag, &self.mark, &self.crc, &self.words]
            .into_iter()
            .fold(script, |script, word| script.arg(word.as_bytes()))
    }
}

pub fn text_of_words(words: &Words) -> String {
    serde_json::Value::from_iter(words.clone()).to_string()
}

/// `ETAG PROOF BYTES MODIFIED CRC WORDS`
pub fn object(key: &str, record: &str) -> Result<Object, Failure> {
    let mut fields = record.splitn(6, ' ');
    let mut next = || fields.next().ok_or_else(Failure::garbled);
    let (etag, _proof, size, modified, crc, words) = (next()?, next()?, next()?, next()?, next()?, next()?);
    Ok(Object {
        key: key.to_owned(),
        size_bytes: size.parse().map_err(|_| Failure::garbled())?,
        etag: etag.to_owned(),
        modified_nanos: modified.parse().map_err(|_| Failure::garbled())?,
        words: Some(serde_json::from_str(words).map_err(|_| Failure::garbled())?),
        crc64nvme: u64::from_str_radix(crc, 16).ok(),
    })
}
