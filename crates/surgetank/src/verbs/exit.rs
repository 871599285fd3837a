//! Surgetank's own exit codes; a command's code is passed on unchanged.

pub const OK: u8 = 0;
/// Surgetank failed: no mount, no agent, or an unexpected answer.
pub const FAILED: u8 = 1;
/// The command line or the configuration is wrong.
pub const USAGE: u8 = 2;
/// A file that should be durable is not, or a process still writes.
pub const NOT_DURABLE: u8 = 3;
/// The drain continues without this process (`--detach-drain`).
pub const DETACHED: u8 = 4;
/// The command exists but cannot be executed.
pub const NOT_EXECUTABLE: u8 = 126;
pub const NOT_FOUND: u8 = 127;
