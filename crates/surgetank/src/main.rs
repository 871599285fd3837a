//! The `surgetank` binary: the verbs, with the backend that serves directories.
//!
//! The backend and the configuration are handed in here and nowhere else, so that tests can hand in others.

use std::process::ExitCode;

use surgetank::agent::engine::{Backend, Opening, Running};
use surgetank::verbs::{self, Program};
use surgetank_core::error::{Error, Result};

/// A build without namespace and drain: it can tell what it is missing, and never touches a directory.
struct Unserving;

impl Backend for Unserving {
    fn start(&self, opening: Opening) -> Result<Running> {
        Err(
            Error::new(format!("{} is not served", opening.config.over.display()))
                .why("this build has no namespace behind its mount"),
        )
    }
}

fn main() -> ExitCode {
    let configure =
        |_: &verbs::settings::Settings| Err(Error::new("this build reads no configuration"));
    ExitCode::from(verbs::main(&Program {
        backend: &Unserving,
        configure,
    }))
}
