//! The parts of the `surgetank` binary: the kernel adapter (`mount`), the backend (`service`), the agent and the verbs.

#![warn(missing_docs)]

pub mod agent;
pub mod mount;
pub mod pool;
mod seccomp;
pub mod service;
pub mod shimdoor;
mod socket_address;
pub mod verbs;
