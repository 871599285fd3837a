//! `consistency`: what a program sees of a file that another one writes.

use crate::hint::advice::Advice;
use crate::hint::module::{Act, Event, Module, Moment};
use crate::words::one_of;

/// Whether readers wait until it is complete.
#[derive(Debug)]
pub(super) struct Consistency;

fn waits(value: &str) -> Result<bool, String> {
    one_of(value, &[("posix", false), ("sealed", true)])
}

impl Module for Consistency {
    fn name(&self) -> &'static str {
        "consistency"
    }

    fn hear(&self, value: &str, _: &mut Advice) -> Result<(), String> {
        waits(value).map(drop)
    }

    fn moments(&self) -> &'static [Moment] {
        &[Moment::Reads]
    }

    fn on(&self, value: &str, event: &Event<'_>) -> Option<Act> {
        let is_written = matches!(event, Event::Reads { is_written: true });
        (is_written && waits(value) == Ok(true)).then_some(Act::AwaitSeal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_readers_of_a_file_that_is_written_wait() {
        let on = |value, is_written| Consistency.on(value, &Event::Reads { is_written });
        assert_eq!(on("sealed", true), Some(Act::AwaitSeal));
        assert_eq!(on("sealed", false), None);
        assert_eq!(on("posix", true), None);
    }
}
