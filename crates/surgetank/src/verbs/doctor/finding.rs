//! A finding of `surgetank doctor`: its effect on `surgetank run`, and the remedy.

use serde::Serialize;

/// The effect of a finding on `surgetank run`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    Good,
    /// It works, but more slowly or with fewer features.
    Less,
    /// `run` cannot work.
    Bad,
    /// Neither good nor bad.
    Info,
}

#[derive(Debug, Clone, Serialize)]
pub struct Finding {
    pub about: String,
    pub verdict: Verdict,
    pub found: String,
    /// The remedy; empty if none is needed.
    pub remedy: String,
}

impl Finding {
    pub fn new(about: impl Into<String>, verdict: Verdict, found: impl Into<String>) -> Self {
        Self { about: about.into(), verdict, found: found.into(), remedy: String::new() }
    }
    pub fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = remedy.into();
        self
    }
}
