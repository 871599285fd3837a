//! The `surgetank` binary's parts: the kernel adapter (`mount`), the agent and the verbs.

pub mod settings;
pub mod verbs;
