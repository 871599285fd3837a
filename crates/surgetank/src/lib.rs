//! The `surgetank` binary's parts: the kernel adapter (`mount`), what it serves (`service`), the agent and the verbs.

pub mod agent;
pub mod mount;
pub mod seccomp;
pub mod service;
pub mod shimdoor;
pub mod verbs;
