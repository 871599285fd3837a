//! The reference model of the file system: operations ([`operation`]), what each must answer ([`mod@reference`]), and a directory
//! compared with it ([`disk`]).

pub mod disk;
pub mod operation;
pub mod reference;
