//! WOSS's `BlockSize`. Files are stored whole, so that it sets nothing.

use crate::hint::advice::Advice;
use crate::hint::module::Module;
use crate::words::quantity::size_bytes;

/// WOSS: the size of a block.
#[derive(Debug)]
pub(super) struct BlockSize;

impl Module for BlockSize {
    fn name(&self) -> &'static str {
        "BlockSize"
    }

    fn hear(&self, value: &str, _: &mut Advice) -> Result<(), String> {
        size_bytes(value).map(drop)
    }
}
