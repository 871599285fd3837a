//! Whether hints are asked at operations on a file ([`Module`](surgetank_policy::hint::module::Module)).
//!
//! Without such hints the answer costs two looks.

use surgetank_policy::hint::listens;
use surgetank_policy::hint::module::Moment;
use surgetank_policy::rule::Decision;
use surgetank_state::{Inode, Tree, is_for_another};
use surgetank_types::model::{FileId, Kind};

use crate::metadata::Metadata;

/// Is any hint asked at operations?
pub(crate) fn may_be_asked(metadata: &Metadata, tree: &Tree) -> bool {
    tree.hints.any || metadata.rules.acts()
}

/// `None`: it is not a file of programs, or none of its hints is asked then.
pub(crate) fn decision_if_asked(metadata: &Metadata, tree: &Tree, id: FileId, moment: Moment) -> Option<Decision> {
    if !may_be_asked(metadata, tree) {
        return None;
    }
    let is_file = |inode: &Inode| inode.attr.kind == Kind::File && inode.logical.is_some();
    if !tree.get(id).is_some_and(is_file) || is_for_another(tree, id) {
        return None;
    }
    let path = tree.logical_path(id)?;
    Some(metadata.decided(tree, id, &path)).filter(|decision| listens(&decision.acting, moment))
}

/// May programs with the shim read the file without a question, while another one writes it?
pub(crate) fn may_be_read_unasked(metadata: &Metadata, tree: &Tree, id: FileId) -> bool {
    decision_if_asked(metadata, tree, id, Moment::Reads).is_none()
}
