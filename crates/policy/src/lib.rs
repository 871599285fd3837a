//! Policy: the configuration ([`config`]), the rules for paths ([`rule`]), hints ([`hint`]), and the decision where a file is
//! placed and what is evicted ([`placement`]).
//!
//! Invariant: policy reads files only to load the configuration. Every decision is a pure function that returns its reason.

#![warn(missing_docs)]

pub mod config;
pub mod hint;
pub mod placement;
pub mod rule;
mod words;
