//! What there is of a file's versions: here, on a tier that was made to keep them, and in the store.

use super::Inode;
use surgetank_types::model::Kind;

impl Inode {
    /// Brought to a tier as the store has it (it may have gone from there again), and never written here: somebody else may
    /// change it there.
    pub fn is_copy(&self) -> bool {
        let at_rest = self.publish.is_none() && self.set_meta.is_none() && self.identity.is_some();
        let one_name = self.extra.as_ref().is_none_or(|extra| extra.more_names.is_empty() && extra.spill.is_none());
        self.owned && self.may_be_copy() && self.applied == self.logical && at_rest && one_name
    }

    /// It is a copy, or will be one when what is queued is done.
    pub fn may_be_copy(&self) -> bool {
        self.attr.kind == Kind::File && self.version == 0 && self.sealed && self.applied.is_some()
    }

    /// On a tier, and without a version yet.
    pub fn is_fresh(&self) -> bool {
        self.version == 0 && self.replica.is_some()
    }

    /// The tier has been made to keep the present version.
    pub fn is_synced(&self) -> bool {
        self.sealed && self.synced >= self.version
    }

    /// A program was promised bytes of what is not in the store yet.
    pub fn is_promised(&self) -> bool {
        self.promised > self.durable
    }

    /// The version that what is there now is, or will be when it is closed.
    pub fn present_version(&self) -> u32 {
        self.version + u32::from(!self.sealed)
    }

    pub fn dirty(&self) -> bool {
        self.version != self.durable
    }
}
