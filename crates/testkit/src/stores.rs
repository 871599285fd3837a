//! Stores for tests: each wraps another one. [`faulty`] fails on demand, [`ranges_only`] hides plain files.

pub mod faulty;
pub mod ranges_only;
