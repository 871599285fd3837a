//! Stores for tests: each wraps another one. [`faulty`] fails on demand, [`distant`] hides plain files.

pub mod distant;
pub mod faulty;
