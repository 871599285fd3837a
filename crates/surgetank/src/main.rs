//! The `surgetank` binary: the verbs, with the backend that serves directories.
//!
//! Only this file chooses the backend and the configuration, so that tests can pass their own.

use std::process::ExitCode;

use surgetank::service::Service;
use surgetank::verbs::{self, Program};
use surgetank_policy::config::Config;

fn main() -> ExitCode {
    let configure =
        |settings: &verbs::settings::Settings| Config::load(&settings.clone().overrides()).map(|loaded| loaded.config);
    let state_root = |settings: &verbs::settings::Settings| Config::state_root(&settings.clone().overrides());
    ExitCode::from(verbs::main(&Program { backend: &Service, configure, state_root }))
}
