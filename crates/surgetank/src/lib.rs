//! The parts of the `surgetank` binary: the kernel adapter (`mount`), the backend (`service`), the agent and the verbs.

pub mod agent;
pub mod mount;
mod seccomp;
pub mod service;
pub mod shimdoor;
mod socket_address;
pub mod verbs;
