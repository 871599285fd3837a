//! Synced copies: what `fsync` synced of a file whose plain file is gone with its volatile tier. It is put back on a tier, and
//! recovery continues as with a tier that survived.
//!
//! The danger that this avoids: a copy of an earlier file counts as one of a later file with the same number.

use std::io;

use surgetank_state::{PlainId, Tree};
use surgetank_tier::{Device, Plain};
use surgetank_types::error::{Error, Result};
use surgetank_types::model::{Attr, DeviceId, FileId, RunId};

use crate::files::Given;
use crate::files::synced_copies::{Content, Left, left_in, sync_directory};
use crate::namespace::recover::Recovery;

/// Copies that could not be put back, or whose file a damaged catalog does not have.
const SET_ASIDE: &str = "kept-";

impl Recovery<'_> {
    /// Finds the copies of an earlier agent. `damaged`: no copy is removed because its file has no record. Errors: the directory
    /// cannot be read or changed.
    pub(crate) fn take_up_synced_copies(&self, damaged: bool) -> Result<()> {
        let copies = &self.files.synced_copies;
        let Some(dir) = copies.dir() else { return Ok(()) };
        let cannot =
            |why: io::Error| Error::new(format!("the copies that fsync made in {} cannot be read", dir.display())).why(why);
        let (known, without_record): (Vec<Left>, Vec<Left>) = {
            let tree = self.metadata.read_tree();
            left_in(dir).map_err(cannot)?.into_iter().partition(|one| tree.get(one.name.id).is_some())
        };
        for one in &without_record {
            if damaged {
                self.set_copy_aside(one, "a program synced it, and the catalog has no record of its file").map_err(cannot)?;
            } else {
                std::fs::remove_file(&one.path).map_err(cannot)?;
            }
        }
        // (The number of the file will be given to another one.)
        if !without_record.is_empty() {
            sync_directory(dir).map_err(cannot)?;
        }
        copies.take_over(known);
        Ok(())
    }

    fn set_copy_aside(&self, one: &Left, what: &str) -> io::Result<()> {
        let aside = one.path.with_file_name(format!("{SET_ASIDE}{}", one.name.text()));
        std::fs::rename(&one.path, &aside)?;
        self.base.notes.note(RunId(0), aside.display().to_string(), what, true);
        Ok(())
    }

    /// The file's plain file is gone: puts its newest synced copy in its place. `false`: it has none.
    pub(crate) fn put_copy_back(&self, tree: &mut Tree, id: FileId, path: &[u8], was_on: Option<DeviceId>) -> bool {
        let Some(inode) = tree.get(id) else { return false };
        let (attr, durable) = (inode.attr, inode.durable);
        let left = self.files.synced_copies.left_of(id);
        for one in left.iter().filter(|one| one.name.version > durable) {
            let put = one.content().and_then(|content| {
                let Some(content) = content else { return Ok(false) };
                let devices = was_on.map(|device| self.base.tiers.device(device)).into_iter();
                let device = devices.chain(self.base.tiers.devices()).find(|device| device.is_there());
                let device = device.ok_or_else(|| io::Error::other("no tier is there"))?;
                let plain = plain_of(device, path, attr, &content)?;
                adopt(tree, id, device, &plain, one.name.version);
                Ok(true)
            });
            match put {
                Ok(true) => {
                    self.note_promised(path);
                    return true;
                }
                // No fsync has returned for it.
                Ok(false) => {}
                Err(why) => {
                    let path = String::from_utf8_lossy(path);
                    let what = format!("what fsync synced of {path} is in this file, which could not be put back: {why}");
                    if let Err(why) = self.set_copy_aside(one, &what) {
                        self.base.notes.note(RunId(0), one.path.display().to_string(), format!("{what}; {why}"), true);
                    }
                }
            }
        }
        false
    }
}

fn plain_of(device: &Device, path: &[u8], attr: Attr, content: &Content) -> io::Result<Plain> {
    let file = device.create(path, 0o600)?;
    let written = content
        .write_to(&file)
        .and_then(|()| Given::known(&Attr { mtime: content.mtime, ..attr }).give(&file))
        .and_then(|()| Plain::of(&file));
    written.inspect_err(|_| drop(device.unlink(path)))
}

fn adopt(tree: &mut Tree, id: FileId, device: &Device, plain: &Plain, version: u32) {
    tree.drop_replica(id);
    if let Some(inode) = tree.get_mut(id) {
        // (The sync of the catalog that belongs to the copy may not have happened.)
        inode.sealed &= version <= inode.version;
        inode.replica = Some(PlainId::new(device.id(), plain));
        inode.charged_bytes = plain.blocks_bytes;
        inode.promised = inode.present_version();
        if inode.sealed {
            (inode.attr.size_bytes, inode.attr.mtime) = (plain.size_bytes, plain.mtime);
        }
    }
    device.add_used(i64::try_from(plain.blocks_bytes).unwrap_or(i64::MAX));
    tree.recount(id);
    tree.txn.file(id);
}
