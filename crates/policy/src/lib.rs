//! What the user wants, and what follows: the configuration, rules for paths, hints, and where a file goes ([`placement`]).

pub mod config;
pub mod hint;
pub mod placement;
pub mod rule;
