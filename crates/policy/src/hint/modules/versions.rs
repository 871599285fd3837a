//! `versions`: the last contents of a file are kept, beside it. It is the example of `docs/internals/hints.md`.

use crate::hint::advice::Advice;
use crate::hint::module::{Act, CONTENTS_MAX, Event, Module, Moment, is_set_aside};

/// How many contents of a file there are, with the present one.
#[derive(Debug)]
pub(super) struct Versions;

fn contents(value: &str) -> Option<u32> {
    value.trim().parse().ok().filter(|contents| (1..=CONTENTS_MAX).contains(contents))
}

impl Module for Versions {
    fn name(&self) -> &'static str {
        "versions"
    }

    fn hear(&self, value: &str, _: &mut Advice) -> Result<(), String> {
        contents(value).map(drop).ok_or_else(|| format!("'{value}' is not a number from 1 to {CONTENTS_MAX}"))
    }

    fn moments(&self) -> &'static [Moment] {
        &[Moment::Changes]
    }

    fn on(&self, value: &str, event: &Event<'_>) -> Option<Act> {
        let Event::Changes { name } = event else { return None };
        let earlier = contents(value)?.checked_sub(1)?;
        // (Earlier contents have no earlier contents of their own.)
        (earlier > 0 && !is_set_aside(name)).then_some(Act::SetAside { contents: earlier })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn earlier_contents_are_set_aside_but_of_those_none() {
        let on = |value, name: &str| Versions.on(value, &Event::Changes { name: name.as_bytes() });
        assert_eq!(on("3", "state.npy"), Some(Act::SetAside { contents: 2 }));
        assert_eq!(on("1", "state.npy"), None, "the present content is the only one");
        assert_eq!(on("3", "state.npy.~1~"), None);
        assert_eq!(on("3", "a.~12~"), None);
        for name in ["a~", "a.~~", "a.~x~", "a~1~", "~", "a.~100~", "a.~01~"] {
            assert!(on("2", name).is_some(), "{name} is a file like any");
        }
        assert_eq!(Versions.on("3", &Event::Reads { is_written: true }), None);
    }
}
