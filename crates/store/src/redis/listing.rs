//! Listings, from the index that every change maintains; and other clients' keys, which must be searched.
//!
//! Other clients' keys are found by a SCAN of the data base, on the server: before the first listing, and then before one that
//! comes later than `Limits::scan` after the last, or than fifty times the duration of that SCAN. Removals by other clients are
//! noticed at once.

use super::failure::Failure;
use super::records;
use super::scripts::Script;
use super::server::Server;
use super::wire::{Batch, array_of, bytes_of, text_of};
use crate::object::Page;
use surgetank_types::sync::PoisonError;

/// Keys and prefixes of a page; other clients' keys count five times, because the server computes their checksums.
const PAGE: u64 = 1000;
/// Keys in one step of the SCAN.
const STEP: u64 = 1000;
const SCAN_SHARE: u32 = 50;

impl Server {
    pub fn page(&self, prefix: &str, delimited: bool, from: Option<&str>) -> Result<Page, Failure> {
        if from.is_none() {
            self.find_others()?;
        }
        // Other clients' names need not be UTF-8: a position is bytes.
        let from: Vec<u8> = from.unwrap_or_default().chars().map(|byte| byte as u8).collect();
        let script = self.script(Script::List).arg(prefix.as_bytes()).arg(if delimited { b"1" } else { b"0" });
        let answer = self.wire.ask(&Batch::of(script.arg(&from).number(PAGE)))?.pop().unwrap_or_default();
        let mut answer = array_of(answer)?.into_iter();
        let mut next = || answer.next().unwrap_or_default();
        let mut page = Page::default();
        let mut keys = array_of(next())?.into_iter();
        while let (Some(key), Some(record)) = (keys.next(), keys.next()) {
            // A key that is not UTF-8 cannot be a path here.
            if let Ok(key) = String::from_utf8(bytes_of(key)?) {
                page.objects.push(records::object(&key, &text_of(record)?)?);
            }
        }
        for prefix in array_of(next())? {
            page.prefixes.extend(String::from_utf8(bytes_of(prefix)?));
        }
        let next = bytes_of(next())?;
        page.next = (!next.is_empty()).then(|| next.iter().map(|byte| char::from(*byte)).collect());
        Ok(page)
    }

    pub fn forget_scan(&self) {
        *self.scanned.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn find_others(&self) -> Result<(), Failure> {
        // Other threads wait meanwhile: a key that they would not see may be a directory.
        let mut scanned = self.scanned.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, took)) = *scanned
            && at.elapsed() < self.place.limits.scan.max(took * SCAN_SHARE)
        {
            return Ok(());
        }
        let begun = surgetank_types::clock::tick();
        let pattern = pattern_of(&self.place.prefix);
        let mut cursor = b"0".to_vec();
        loop {
            let script = self.script(Script::Scan).arg(&cursor).arg(pattern.as_bytes()).number(STEP);
            cursor = bytes_of(self.wire.ask(&Batch::of(script))?.pop().unwrap_or_default())?;
            if cursor == b"0" {
                break;
            }
        }
        *scanned = Some((surgetank_types::clock::tick(), begun.elapsed()));
        Ok(())
    }
}

/// The pattern of the keys with this prefix.
fn pattern_of(prefix: &str) -> String {
    let mut pattern = String::new();
    for letter in prefix.chars() {
        if matches!(letter, '*' | '?' | '[' | ']' | '\\') {
            pattern.push('\\');
        }
        pattern.push(letter);
    }
    pattern + "*"
}
