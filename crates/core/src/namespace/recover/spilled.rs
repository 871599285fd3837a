//! What recovery asks the store for: versions that were spilled into it, and what it has of versions that were lost.

use std::io;
use std::time::Duration;

use crate::clock;
use crate::error::{Error, Result};
use crate::model::{Attr, FileId, Kind};
use crate::store::{Cred, StorePath, StoreStat};
use crate::tier::Plain;

use super::super::Namespace;
use super::super::journal::Txn;
use super::super::resolve::is_absent;
use super::super::tree::{Inode, Tree};
use super::{Worth, worth};

/// How long the store may keep recovery waiting.
const PATIENCE: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(200);

fn as_in_store(inode: &Inode) -> bool {
    let here = inode.replica.is_some() || inode.spill().is_some();
    inode.attr.kind == Kind::File && inode.sealed && !inode.dirty() && !here && inode.applied.is_some()
}

impl Namespace {
    /// An error: the store does not tell, and without that nobody knows what there is.
    pub(super) fn match_spills(&self, went_down: bool, damaged: bool) -> Result<()> {
        {
            // Deleted while somebody had it open: nobody has any more, unless programs go on.
            let mut tree = self.tree();
            let nameless: Vec<FileId> = tree
                .iter()
                .filter(|(_, inode)| inode.logical.is_none() && inode.publish.is_none() && inode.spill().is_some())
                .map(|(id, _)| id)
                .filter(|id| !self.left_open(*id))
                .collect();
            let mut txn = Txn::default();
            for id in nameless {
                if damaged && let Some(extra) = tree.get_mut(id).and_then(|inode| inode.extra.as_mut()) {
                    // It may have got a name since: kept, as what no record names.
                    extra.spill = None;
                    txn.file(id);
                }
                self.drop_content(&mut tree, &mut txn, id, 0);
                self.reap(&mut tree, &mut txn, id);
            }
            self.commit(&tree, txn);
        }
        let spills: Vec<(FileId, StorePath, Cred)> = {
            let tree = self.tree();
            tree.iter()
                .filter_map(|(id, inode)| {
                    let (dir, name) = inode.spill()?;
                    Some((id, tree.applied_path(*dir)?.join(name), inode.cred()))
                })
                .collect()
        };
        for (id, path, who) in spills {
            let there = self.ask_of_spill(&path, who)?;
            let mut tree = self.tree();
            let mut txn = Txn::default();
            match there {
                None => {
                    let logical = tree.logical_path(id);
                    if let Some(inode) = tree.get_mut(id) {
                        inode.extra_mut().spill = None;
                    }
                    self.replica_missing(&mut tree, &mut txn, id, logical);
                }
                Some(there) if went_down => {
                    let plain = Plain {
                        ino: 0,
                        born: 0,
                        size_bytes: there.attr.size_bytes,
                        blocks_bytes: 0,
                        mtime: there.attr.mtime,
                    };
                    match tree.get(id).map(|inode| worth(&inode.into(), plain.size_bytes)) {
                        Some(Worth::Doubtful) => drop(self.set_apart(&mut tree, &mut txn, id, &plain)),
                        Some(Worth::Promised) => Self::is_as_long(&mut tree, &mut txn, id, &plain),
                        _ => {}
                    }
                }
                Some(_) => {}
            }
            self.commit(&tree, txn);
        }
        Ok(())
    }

    /// `None`: it is gone. Whatever else the store says, it may be there.
    fn ask_of_spill(&self, path: &StorePath, who: Cred) -> Result<Option<StoreStat>> {
        let until = clock::tick() + PATIENCE;
        loop {
            // (Root may be nobody there.)
            let own = self.own_cred(who);
            let there = self.store.stat(own, path).or_else(|why| match why.kind() {
                io::ErrorKind::PermissionDenied if own != who => self.store.stat(who, path),
                _ => Err(why),
            });
            match there {
                Ok(there) => return Ok(Some(there)),
                Err(why) if is_absent(&why) => return Ok(None),
                Err(why) if clock::tick() >= until => {
                    return Err(Error::new(format!("The store {} cannot be asked for {path}", self.store.describe()))
                        .why(why)
                        .remedy("start again when it can: what an earlier agent spilled there is in no other place")
                        .data("nothing was changed; files in the tiers and in the store are as they were"));
                }
                Err(_) => crate::sync::thread::sleep(PAUSE),
            }
        }
    }

    /// What was lost, the store's version stands for, and what it replaced, is as the store has it.
    pub(super) fn look_at_reverted(&self) {
        let reverted = std::mem::take(&mut self.tree().reverted);
        for id in reverted {
            let at = {
                let tree = self.tree();
                tree.get(id)
                    .filter(|inode| as_in_store(inode))
                    .and_then(|inode| Some((tree.applied_path(id)?, inode.cred())))
            };
            let Some((path, who)) = at else { continue };
            let stat = match self.store.stat(self.own_cred(who), &path) {
                Ok(stat) => stat,
                Err(why) => {
                    tracing::warn!(%why, %path, "the store could not be asked for what it has of a file that was lost");
                    continue;
                }
            };
            let mut tree = self.tree();
            let mut txn = Txn::default();
            if let Some(inode) = tree.get_mut(id).filter(|inode| as_in_store(inode)) {
                let Attr { ino, links, .. } = inode.attr;
                inode.attr = match inode.set_meta {
                    None => Attr { ino, links, ..stat.attr },
                    // The others are on their way.
                    Some(_) => Attr { size_bytes: stat.attr.size_bytes, blocks: stat.attr.blocks, ..inode.attr },
                };
                inode.identity = Some(Box::new(stat.identity));
                txn.file(id);
            }
            self.commit(&tree, txn);
        }
    }

    /// A program was promised this much, and wrote more since.
    pub(super) fn is_as_long(tree: &mut Tree, txn: &mut Txn, id: FileId, plain: &Plain) {
        if let Some(inode) = tree.get_mut(id).filter(|inode| inode.sealed) {
            inode.attr.size_bytes = plain.size_bytes;
            inode.attr.mtime = plain.mtime;
            txn.file(id);
        }
    }
}
