//! The reference model of the file system: operations ([`operation`]), the result of each ([`mod@reference`]), and the
//! comparison of a directory with the model ([`disk`]).

pub mod disk;
pub mod operation;
pub mod reference;
