//! `drain_share`: the quality of service of the drain, as its share for one file.

use crate::hint::advice::Advice;
use crate::hint::module::{Act, Event, Module, Moment};
use std::time::Duration;

/// After one piece the drain rests so long at most.
const REST_MAX: Duration = Duration::from_secs(60);

/// The part of a drain's thread that it gets while other files wait.
#[derive(Debug)]
pub(super) struct DrainShare;

fn percent(value: &str) -> Option<u32> {
    let number = value.trim().strip_suffix('%').unwrap_or(value.trim());
    number.trim_end().parse().ok().filter(|percent| (1..=100).contains(percent))
}

impl Module for DrainShare {
    fn name(&self) -> &'static str {
        "drain_share"
    }

    fn hear(&self, value: &str, _: &mut Advice) -> Result<(), String> {
        percent(value).map(drop).ok_or_else(|| format!("'{value}' is not a percentage from 1% to 100%"))
    }

    fn moments(&self) -> &'static [Moment] {
        &[Moment::Drains]
    }

    fn on(&self, value: &str, event: &Event<'_>) -> Option<Act> {
        let Event::Drains { took, others_wait: true } = event else { return None };
        let percent = percent(value)?;
        let rest = took.saturating_mul(100 - percent) / percent;
        (!rest.is_zero()).then_some(Act::Rest(rest.min(REST_MAX)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drain_rests_in_proportion_while_others_wait() {
        let on =
            |value, others_wait| DrainShare.on(value, &Event::Drains { took: Duration::from_millis(100), others_wait });
        assert_eq!(on("25%", true), Some(Act::Rest(Duration::from_millis(300))));
        assert_eq!(on("50", true), Some(Act::Rest(Duration::from_millis(100))));
        assert_eq!(on("100%", true), None);
        assert_eq!(on("25%", false), None, "a share of nothing that others want");
        let long = Event::Drains { took: Duration::from_secs(3600), others_wait: true };
        assert_eq!(DrainShare.on("1%", &long), Some(Act::Rest(REST_MAX)));
    }
}
