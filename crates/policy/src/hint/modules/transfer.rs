//! Hints about the way to the store: `mode`, `timing`.

use crate::hint::advice::Advice;
use crate::hint::module::Module;
use crate::words::{mode, timing};

/// What happens to the file after it is written.
#[derive(Debug)]
pub(super) struct Mode;

impl Module for Mode {
    fn name(&self) -> &'static str {
        "mode"
    }

    fn hear(&self, value: &str, advice: &mut Advice) -> Result<(), String> {
        advice.mode = Some(mode(value)?);
        Ok(())
    }
}

/// When the drain starts with it.
#[derive(Debug)]
pub(super) struct Timing;

impl Module for Timing {
    fn name(&self) -> &'static str {
        "timing"
    }

    fn hear(&self, value: &str, advice: &mut Advice) -> Result<(), String> {
        advice.timing = Some(timing(value)?);
        Ok(())
    }
}
