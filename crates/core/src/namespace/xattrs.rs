//! Extended attributes: the user's, which reach the store; those that show where a file is; and hints
//! ([`crate::namespace::hints`]), which the store never gets.
//!
//! The danger that this avoids: a change by one door overwrites a change by another one.

use std::collections::BTreeMap;

use surgetank_policy::hint::ATTRIBUTE_PREFIX;
use surgetank_state::Inode;
use surgetank_types::clock;
use surgetank_types::error::{Errno, FsResult};
use surgetank_types::model::{Caller, FileId, Kind, Xattrs};
use surgetank_types::sync::{Arc, PoisonError};

use crate::base::Base;
use crate::base::queries::StoreQueries;
use crate::base::runs::Runs;
use crate::base::users::{Permissions, own_cred};
use crate::files::open::Opener;
use crate::files::{Files, STORE_TO_BE_ASKED};
use crate::metadata::{Metadata, this_member};
use crate::namespace::hints::FileHints;
use crate::namespace::questions::{Questions, Where};

/// The attributes that show where a file is.
const VIRTUAL: [&[u8]; 4] =
    [b"user.surgetank.location", b"user.surgetank.state", b"user.surgetank.tier", b"user.surgetank.node"];
const XATTR_NAME_BYTES_MAX: usize = 255;
const XATTR_VALUE_BYTES_MAX: usize = 65536;
/// Linux's flags of setxattr.
pub(crate) const CREATE: i32 = 1;
pub(crate) const REPLACE: i32 = 2;

/// The answer to a question for an attribute whose name does not begin with `user.`.
pub fn of_no_user(name: &[u8]) -> Errno {
    // A listing of a directory asks once where there are no labels, and for every file where one has none.
    let absent = name.starts_with(b"security.") && name != b"security.selinux";
    if absent { Errno::NODATA } else { Errno::OPNOTSUPP }
}

/// Extended attributes, the virtual ones among them.
pub struct ExtendedAttributes {
    queries: Arc<StoreQueries>,
    hints: Arc<FileHints>,
    metadata: Arc<Metadata>,
    opener: Arc<Opener>,
    permissions: Arc<Permissions>,
    questions: Arc<Questions>,
    runs: Arc<Runs>,
}

impl ExtendedAttributes {
    pub(crate) fn new(base: &Base, files: &Files, hints: &Arc<FileHints>, questions: &Arc<Questions>) -> Self {
        Self {
            queries: base.queries.clone(),
            permissions: base.permissions.clone(),
            runs: base.runs.clone(),
            hints: hints.clone(),
            metadata: files.metadata.clone(),
            opener: files.opener.clone(),
            questions: questions.clone(),
        }
    }

    /// The present attributes, from the store if the agent has none of its own.
    fn xattrs_of(&self, id: FileId) -> FsResult<Xattrs> {
        if let Some(known) = self.metadata.read_tree().get(id).and_then(Self::known_xattrs) {
            return Ok(known);
        }
        let asked = self.opener.asked_of_it(id, || {
            let _moving = self.metadata.moving.read().unwrap_or_else(PoisonError::into_inner);
            let (path, who) = {
                let tree = self.metadata.read_tree();
                let inode = tree.get(id).ok_or(Errno::STALE)?;
                if let Some(xattrs) = inode.extra.as_ref().and_then(|extra| extra.xattrs.as_ref()) {
                    return Ok(xattrs.clone());
                }
                match tree.applied_path(id) {
                    Some(path) if !matches!(inode.attr.kind, Kind::Symlink) => (path, inode.cred()),
                    _ => return Ok(BTreeMap::new()),
                }
            };
            Ok(self.queries.must_ask((own_cred(who), &path), |store, who, path| store.xattrs(who, path))?)
        });
        match asked {
            Err(fault) if fault.errno == Errno::OPNOTSUPP => Ok(BTreeMap::new()),
            other => other,
        }
    }

    /// Virtual attributes: location and state. They are not listed, so `cp -a` does not copy them.
    fn virtual_xattr(&self, id: FileId, name: &[u8]) -> Option<Vec<u8>> {
        let what = name.strip_prefix(b"user.surgetank.").filter(|_| VIRTUAL.contains(&name))?;
        let answer = self.questions.where_is(id)?;
        match what {
            b"location" => Some(self.location(&answer)),
            b"state" => Some(answer.state.to_string().into_bytes()),
            b"tier" => Some(answer.tier.into_bytes()),
            // If only the store has it, no node does.
            b"node" if answer.replica.is_none() => Some(Vec::new()),
            b"node" => Some(rustix::system::uname().nodename().to_bytes().to_vec()),
            _ => None,
        }
    }

    /// A line for each place: `TIER:PATH` or `store:URL`. In a pool `MEMBER:TIER:PATH`, without tier and path if another member
    /// has the content: that one knows them.
    fn location(&self, answer: &Where) -> Vec<u8> {
        let me = this_member(&self.metadata);
        let lines = answer.places.iter().enumerate().map(|(at, place)| match (answer.home, me) {
            (Some(home), _) if at == 0 => format!("{home}::"),
            (None, Some(me)) if at == 0 && answer.replica.is_some() => format!("{me}:{place}"),
            _ => place.clone(),
        });
        lines.collect::<Vec<_>>().join("\n").into_bytes()
    }

    /// `None`: the store may have attributes.
    fn known_xattrs(inode: &Inode) -> Option<Xattrs> {
        let ours = inode.extra.as_ref().and_then(|extra| extra.xattrs.clone());
        ours.or_else(|| inode.applied.is_none().then(Xattrs::new))
    }

    /// The agent's own attributes. `None`: not one of them, or the file does not exist.
    fn own_attribute(&self, id: FileId, name: &[u8]) -> Option<FsResult<Vec<u8>>> {
        self.virtual_xattr(id, name).map(Ok).or_else(|| self.hints.hint_attribute(id, name))
    }

    /// Answers without the store. `None`: the store has to be asked, or the file does not exist.
    pub fn attribute_known(&self, id: FileId, name: &[u8]) -> Option<FsResult<Vec<u8>>> {
        self.own_attribute(id, name).or_else(|| {
            let known =
                self.metadata.read_tree().get(id).filter(|_| !VIRTUAL.contains(&name)).and_then(Self::known_xattrs)?;
            Some(known.get(name).map(|value| value.to_vec()).ok_or_else(|| Errno::NODATA.into()))
        })
    }

    /// The value of an extended attribute. Errors: ENODATA if it is absent, EOPNOTSUPP outside of `user.`, the store.
    pub fn getxattr(&self, id: FileId, name: &[u8]) -> FsResult<Vec<u8>> {
        if !name.starts_with(b"user.") {
            return Err(of_no_user(name).into());
        }
        if let Some(value) = self.own_attribute(id, name) {
            return value;
        }
        let value = self.xattrs_of(id)?.remove(name).ok_or(Errno::NODATA)?;
        Ok(value.into_vec())
    }

    /// Names of the extended attributes, each with a zero byte at its end. Virtual ones are not listed. Errors: the
    /// store.
    pub fn listxattr(&self, id: FileId) -> FsResult<Vec<u8>> {
        let mut list = Vec::new();
        for name in self.xattrs_of(id)?.keys() {
            list.extend_from_slice(name);
            list.push(0);
        }
        Ok(list)
    }

    /// Sets an extended attribute. `flags`: as for setxattr(2). Errors: EEXIST, ENODATA, ERANGE, EOPNOTSUPP outside of
    /// `user.`, permissions, the store.
    pub fn setxattr(&self, caller: &Caller, id: FileId, name: &[u8], value: &[u8], flags: i32) -> FsResult<()> {
        self.may_set_xattr(caller, id, name)?;
        if name.len() > XATTR_NAME_BYTES_MAX || value.len() > XATTR_VALUE_BYTES_MAX {
            return Err(Errno::RANGE.into());
        }
        if let Some(hint) = name.strip_prefix(ATTRIBUTE_PREFIX) {
            return self.hints.set_hint(id, hint, value, flags);
        }
        let asked = self.xattrs_of(id)?;
        self.change_xattrs(caller, id, Some(asked), |xattrs| {
            let present = xattrs.contains_key(name);
            if flags & CREATE != 0 && present {
                return Err(Errno::EXIST.into());
            }
            if flags & REPLACE != 0 && !present {
                return Err(Errno::NODATA.into());
            }
            xattrs.insert(Box::from(name), Box::from(value));
            Ok(())
        })
    }

    /// As `setxattr`, without the store, and without an eviction because of a hint. `None`: that is not possible.
    pub fn set_attribute_known(&self, caller: &Caller, id: FileId, name: &[u8], value: &[u8]) -> Option<FsResult<()>> {
        if VIRTUAL.contains(&name) || name.starts_with(ATTRIBUTE_PREFIX) {
            let stays = |inode: &Inode| !inode.sealed || inode.dirty() || inode.replica.is_none();
            let stays = self.metadata.read_tree().get(id).is_some_and(stays);
            return stays.then(|| self.setxattr(caller, id, name, value, 0));
        }
        let set = || {
            self.may_set_xattr(caller, id, name)?;
            self.change_xattrs(caller, id, None, |xattrs| {
                xattrs.insert(Box::from(name), Box::from(value));
                Ok(())
            })
        };
        match set() {
            Err(fault) if fault.errno == STORE_TO_BE_ASKED => None,
            done => Some(done),
        }
    }

    /// Removes an extended attribute. Errors: ENODATA, EOPNOTSUPP outside of `user.`, permissions, the store.
    pub fn removexattr(&self, caller: &Caller, id: FileId, name: &[u8]) -> FsResult<()> {
        self.may_set_xattr(caller, id, name)?;
        if let Some(hint) = name.strip_prefix(ATTRIBUTE_PREFIX) {
            return self.hints.remove_hint(id, hint);
        }
        let asked = self.xattrs_of(id)?;
        self.change_xattrs(caller, id, Some(asked), |xattrs| {
            xattrs.remove(name).map(drop).ok_or_else(|| Errno::NODATA.into())
        })
    }

    fn may_set_xattr(&self, caller: &Caller, id: FileId, name: &[u8]) -> FsResult<()> {
        let attr = self.metadata.read_tree().get(id).ok_or(Errno::STALE)?.attr;
        if !name.starts_with(b"user.") {
            return Err(Errno::OPNOTSUPP.into());
        }
        // No store takes this name, and the drain would stop there.
        if name == b"user." {
            return Err(Errno::INVAL.into());
        }
        if VIRTUAL.contains(&name) {
            return Err(Errno::PERM.into());
        }
        if !matches!(attr.kind, Kind::File | Kind::Directory) {
            return Err(Errno::PERM.into());
        }
        // A sticky directory belongs to all users, so only its owner may set its attributes.
        if self.permissions.checks_permissions && attr.kind == Kind::Directory && attr.perm & 0o1000 != 0 {
            self.permissions.permit_owner(caller, &attr)?;
        }
        self.permissions.permit(caller, &attr, 2)
    }

    /// In one step, because another door may do the same. `asked`: the store's attributes, if the agent has none of its own.
    fn change_xattrs(
        &self,
        caller: &Caller,
        id: FileId,
        asked: Option<Xattrs>,
        change: impl FnOnce(&mut Xattrs) -> FsResult<()>,
    ) -> FsResult<()> {
        let mut tree = self.metadata.write_tree();
        let inode = tree.get(id).ok_or(Errno::STALE)?;
        let mut xattrs = Self::known_xattrs(inode).or(asked).ok_or(STORE_TO_BE_ASKED)?;
        change(&mut xattrs)?;
        self.metadata.recall_delegation(&mut tree, Some(id));
        tree.own(id);
        let inode = tree.get_mut(id).ok_or(Errno::STALE)?;
        inode.extra_mut().xattrs = Some(xattrs);
        inode.attr.ctime = clock::now();
        self.metadata.queue_meta(&mut tree, id, self.runs.run(caller), false);
        tree.txn.carried_out(id);
        drop(tree);
        self.metadata.nudge();
        Ok(())
    }
}
