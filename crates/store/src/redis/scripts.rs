//! The operations on the server, each in one step.

/// `scripts/NAME.lua`, after the prelude.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Script {
    Look,
    Read,
    Put,
    Place,
    Copy,
    Delete,
    List,
    Scan,
}

macro_rules! text {
    ($name:literal) => {
        concat!(include_str!("scripts/prelude.lua"), include_str!(concat!("scripts/", $name, ".lua")))
    };
}

/// In the order of the names.
pub const TEXTS: [&str; 8] = [
    text!("look"),
    text!("read"),
    text!("put"),
    text!("place"),
    text!("copy"),
    text!("delete"),
    text!("list"),
    text!("scan"),
];
