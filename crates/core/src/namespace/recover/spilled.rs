//! Recovery's questions to the store: about versions that were spilled to it, and about its own versions of lost files.
//!
//! The danger that this avoids: a slow or unreachable store makes the agent give up a version that the store still has.

use std::io;
use std::time::{Duration, Instant};

use surgetank_state::{Inode, Tree};
use surgetank_store::{Cred, StorePath, StoreStat};
use surgetank_tier::Plain;
use surgetank_types::clock;
use surgetank_types::error::Result;
use surgetank_types::model::{Attr, FileId, Kind};

use crate::base::queries::{is_absent, passes};
use crate::files::copies::STORE_TIMEOUT;
use crate::namespace::recover::lost::Held;
use crate::namespace::recover::{Doubt, Recovery, Worth, worth};

const PAUSE: Duration = Duration::from_millis(200);
/// The number of tries for a question that is not vital.
const TRIES: u32 = 4;

/// Tries until this time.
pub(crate) fn retry_until<T>(until: Instant, act: impl Fn() -> io::Result<T>) -> io::Result<T> {
    loop {
        match act() {
            Err(_) if clock::tick() < until => surgetank_types::sync::thread::sleep(PAUSE),
            done => return done,
        }
    }
}

fn as_in_store(inode: &Inode) -> bool {
    let here = inode.replica.is_some() || inode.spill().is_some();
    inode.attr.kind == Kind::File && inode.sealed && !inode.dirty() && !here && inode.applied.is_some()
}

impl Recovery<'_> {
    /// An error: the store does not tell, and without that nobody knows what there is.
    pub(crate) fn match_spills(&self, went_down: bool, damaged: bool) -> Result<()> {
        {
            // Deleted while somebody had it open: nobody has any more, unless programs go on.
            let mut tree = self.metadata.write_tree();
            let nameless: Vec<FileId> = tree
                .iter()
                .filter(|(_, inode)| inode.logical.is_none() && inode.publish.is_none() && inode.spill().is_some())
                .map(|(id, _)| id)
                .filter(|id| !self.base.succession.left_open(*id))
                .collect();
            for id in nameless {
                if damaged && let Some(extra) = tree.get_mut(id).and_then(|inode| inode.extra.as_mut()) {
                    // The file may have got a name since: it is kept, as one without a record.
                    extra.spill = None;
                    tree.txn.file(id);
                }
                self.files.sealer.drop_content(&mut tree, id, 0);
                self.metadata.reap(&mut tree, id);
            }
        }
        let spills: Vec<(FileId, StorePath, Cred)> = {
            let tree = self.metadata.read_tree();
            tree.iter()
                .filter_map(|(id, inode)| {
                    let (dir, name) = inode.spill()?;
                    Some((id, tree.applied_path(*dir)?.join(name), inode.cred()))
                })
                .collect()
        };
        for (id, path, who) in spills {
            let there = self.ask_of_spill(&path, who)?;
            let mut tree = self.metadata.write_tree();
            match there {
                None => {
                    if let Some(inode) = tree.get_mut(id) {
                        inode.extra_mut().spill = None;
                    }
                    let put_back = self.replica_missing(&mut tree, id, &Held::Store(&path));
                    let aside = put_back.zip(tree.logical_path(id)).map(|(device, path)| (id, device, path));
                    drop(tree);
                    self.put_in_place(aside.as_slice());
                    continue;
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
                        Some(Worth::Doubtful) => {
                            self.set_apart(&mut tree, id, &plain, Doubt::MachineWentDown);
                        }
                        Some(Worth::Promised) => Self::is_as_long(&mut tree, id, &plain),
                        _ => {}
                    }
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// `None`: it is gone. After any error it may be there.
    fn is_left_there(&self, path: &StorePath, who: Cred) -> io::Result<Option<StoreStat>> {
        match self.files.copies.as_either(who, |who| self.base.store.stat(who, path)) {
            Ok(there) => Ok(Some(there)),
            Err(why) if is_absent(&why) => Ok(None),
            Err(why) => Err(why),
        }
    }

    /// The same with several tries: a single unanswered question must not leave everything in doubt.
    pub(crate) fn left_there(&self, path: &StorePath, who: Cred) -> io::Result<Option<StoreStat>> {
        for _ in 1..TRIES {
            match self.is_left_there(path, who) {
                Err(why) if passes(&why) => surgetank_types::sync::thread::sleep(PAUSE),
                answer => return answer,
            }
        }
        self.is_left_there(path, who)
    }

    /// The same for a place that may be the only one of a version.
    pub(crate) fn ask_of_spill(&self, path: &StorePath, who: Cred) -> Result<Option<StoreStat>> {
        let until = clock::tick() + STORE_TIMEOUT;
        retry_until(until, || self.is_left_there(path, who)).map_err(|why| self.files.copies.does_not_tell(path, why))
    }

    /// Takes the store's attributes for files whose newer version was lost, and for files that they had replaced.
    pub(crate) fn look_at_reverted(&self) {
        let reverted = std::mem::take(&mut self.metadata.write_tree().reverted);
        for id in reverted {
            let at = {
                let tree = self.metadata.read_tree();
                tree.get(id)
                    .filter(|inode| as_in_store(inode))
                    .and_then(|inode| Some((tree.applied_path(id)?, inode.cred())))
            };
            let Some((path, who)) = at else { continue };
            let stat = match self.left_there(&path, who) {
                Ok(Some(stat)) => stat,
                Ok(None) => continue,
                Err(why) => {
                    tracing::warn!(%why, %path, "the store could not be asked for what it has of a file that was lost");
                    // Who opens it looks again.
                    let mut tree = self.metadata.write_tree();
                    let inode = tree.get_mut(id).filter(|inode| as_in_store(inode));
                    if let Some(known) = inode.and_then(|inode| inode.identity.as_mut()) {
                        *known = known.bare();
                    }
                    continue;
                }
            };
            let mut tree = self.metadata.write_tree();
            if let Some(inode) = tree.get_mut(id).filter(|inode| as_in_store(inode)) {
                let Attr { ino, links, .. } = inode.attr;
                inode.attr = match inode.set_meta {
                    None => Attr { ino, links, ..stat.attr },
                    // The other attributes are queued.
                    Some(_) => Attr { size_bytes: stat.attr.size_bytes, blocks: stat.attr.blocks, ..inode.attr },
                };
                inode.identity = Some(stat.identity);
                tree.txn.file(id);
            }
        }
    }

    /// A program was promised this many bytes, and wrote more since.
    pub(crate) fn is_as_long(tree: &mut Tree, id: FileId, plain: &Plain) {
        if let Some(inode) = tree.get_mut(id).filter(|inode| inode.sealed) {
            inode.attr.size_bytes = plain.size_bytes;
            inode.attr.mtime = plain.mtime;
            tree.txn.file(id);
        }
    }
}
