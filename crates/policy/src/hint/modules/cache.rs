//! Hints about what stays on a tier: `pin`, `prefetch`, `next_read`, and WOSS's `CacheSize`.

use crate::hint::advice::{Advice, NextRead as Read};
use crate::hint::module::Module;
use crate::words::one_of;
use crate::words::quantity::size_bytes;

fn truth(value: &str) -> Result<bool, String> {
    one_of(value, &[("true", true), ("false", false)])
}

/// Whether it is not evicted.
#[derive(Debug)]
pub(super) struct Pin;

impl Module for Pin {
    fn name(&self) -> &'static str {
        "pin"
    }

    fn hear(&self, value: &str, advice: &mut Advice) -> Result<(), String> {
        advice.pin = Some(truth(value)?);
        Ok(())
    }
}

/// Whether it is copied to a tier before its use.
#[derive(Debug)]
pub(super) struct Prefetch;

impl Module for Prefetch {
    fn name(&self) -> &'static str {
        "prefetch"
    }

    fn hear(&self, value: &str, advice: &mut Advice) -> Result<(), String> {
        advice.prefetch = Some(truth(value)?);
        Ok(())
    }
}

/// The position of its next read in the workflow's order, or `never`.
#[derive(Debug)]
pub(super) struct NextRead;

impl Module for NextRead {
    fn name(&self) -> &'static str {
        "next_read"
    }

    fn hear(&self, value: &str, advice: &mut Advice) -> Result<(), String> {
        let wrong = |_| format!("'{value}' is neither a whole number nor 'never'");
        let read = if value == "never" { Read::Never } else { Read::At(value.parse().map_err(wrong)?) };
        advice.next_read = Some(read);
        Ok(())
    }
}

/// WOSS: the size of a client's cache. The kernel's page cache is not divided by files.
#[derive(Debug)]
pub(super) struct CacheSize;

impl Module for CacheSize {
    fn name(&self) -> &'static str {
        "CacheSize"
    }

    fn hear(&self, value: &str, _: &mut Advice) -> Result<(), String> {
        size_bytes(value).map(drop)
    }
}
