//! Synced copies: what `fsync` synced of a file whose plain file is gone with its volatile tier. It is put back on a tier, and
//! recovery continues as with a tier that survived.
//!
//! The danger that this avoids: a copy of an earlier file counts as one of a later file with the same number.

use std::io;

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use surgetank_state::{PlainId, Tree};
use surgetank_tier::{Device, Plain};
use surgetank_types::error::{Error, Result};
use surgetank_types::model::{Attr, DeviceId, FileId, RunId};

use crate::base::Base;
use crate::files::synced_copies::{Content, KEPT, Left, SyncedCopies, left_in, sync_directory};
use crate::files::{Given, hidden_name};
use crate::metadata::Metadata;
use crate::namespace::recover::Recovery;

/// Puts synced copies in the place of plain files that are gone.
pub(super) struct PutBack<'a> {
    base: &'a Base,
    metadata: &'a Metadata,
    copies: &'a SyncedCopies,
}

impl<'a> PutBack<'a> {
    pub fn of(recovery: &Recovery<'a>) -> Self {
        Self { base: recovery.base, metadata: recovery.metadata, copies: &recovery.files.synced_copies }
    }

    /// Finds the copies of an earlier agent. `damaged`: no copy is removed because its file has no record. Errors: the directory
    /// cannot be read or changed.
    pub fn take_up(&self, damaged: bool) -> Result<()> {
        let Some(dir) = self.copies.dir() else { return Ok(()) };
        let cannot = |why: io::Error| {
            Error::new(format!("the copies that fsync made in {} cannot be read", dir.display())).why(why)
        };
        let (known, without_record): (Vec<Left>, Vec<Left>) = {
            let tree = self.metadata.read_tree();
            left_in(dir).map_err(cannot)?.into_iter().partition(|one| tree.get(one.name.id).is_some())
        };
        for one in &without_record {
            if damaged {
                self.set_aside(one, "a program synced it, and the catalog has no record of its file")
                    .map_err(cannot)?;
            } else {
                std::fs::remove_file(&one.path).map_err(cannot)?;
            }
        }
        // (The number of the file will be given to another one.)
        if !without_record.is_empty() {
            sync_directory(dir).map_err(cannot)?;
        }
        self.copies.take_over(known);
        Ok(())
    }

    fn set_aside(&self, one: &Left, what: &str) -> io::Result<()> {
        let mut aside = one.path.with_file_name(format!("{KEPT}{}", one.name.text()));
        loop {
            match renameat_with(CWD, &one.path, CWD, &aside, RenameFlags::NOREPLACE) {
                // A copy from an earlier start.
                Err(Errno::EXIST) => aside.as_mut_os_string().push("+"),
                renamed => break renamed?,
            }
        }
        self.base.notes.note(RunId(0), aside.display().to_string(), what, true);
        Ok(())
    }

    /// The file's plain file is gone: makes another one of its newest synced copy, under the file's hidden name. Returns its
    /// device; `None`: there is no copy.
    pub fn put_back(&self, tree: &mut Tree, id: FileId, path: &[u8], was_on: Option<DeviceId>) -> Option<DeviceId> {
        let inode = tree.get(id)?;
        let (attr, version, durable) = (inode.attr, inode.version, inode.durable);
        let left = self.copies.left_of(id);
        for one in left.iter().filter(|one| one.name.version > durable) {
            match one.content() {
                Ok(Some(content)) => {
                    // The times that a program set belong to the version that it closed.
                    let is_closed_version = one.name.version == version && content.size_bytes == attr.size_bytes;
                    let mtime = if is_closed_version { attr.mtime } else { content.mtime };
                    let made = self.plain_of(id, Attr { mtime, ..attr }, &content, was_on);
                    match made {
                        Ok((device, plain)) => {
                            adopt(tree, id, device, &plain, one.name.version);
                            self.note(path);
                            crash_point!("recover.put_back");
                            return Some(device.id());
                        }
                        Err(why) => self.keep(path, one, &why),
                    }
                }
                // No fsync has returned for it.
                Ok(None) => tracing::info!(path = %one.path.display(), "a copy that fsync was making is not used"),
                Err(why) => self.keep(path, one, &why),
            }
        }
        None
    }

    /// On the first tier that has room.
    fn plain_of(
        &self,
        id: FileId,
        attr: Attr,
        content: &Content,
        was_on: Option<DeviceId>,
    ) -> io::Result<(&Device, Plain)> {
        let mut failed = io::Error::other("no tier is there");
        let devices = was_on.map(|device| self.base.tiers.device(device)).into_iter().chain(self.base.tiers.devices());
        for device in devices.filter(|device| device.is_there()) {
            let name = hidden_name(id);
            // (Left by a start that was killed.)
            drop(device.unlink(&name));
            let made = device.create(&name, 0o600).and_then(|file| {
                content.write_to(&file)?;
                Given::known(&attr).give(&file)?;
                Plain::of(&file)
            });
            match made {
                Ok(plain) => return Ok((device, plain)),
                Err(why) => {
                    drop(device.unlink(&name));
                    failed = why;
                }
            }
        }
        Err(failed)
    }

    fn keep(&self, path: &[u8], one: &Left, why: &io::Error) {
        let path = String::from_utf8_lossy(path);
        let what = format!("what fsync synced of {path} is in this file, which could not be put back: {why}");
        if let Err(why) = self.set_aside(one, &what) {
            self.base.notes.note(RunId(0), one.path.display().to_string(), format!("{what}; {why}"), true);
        }
    }

    fn note(&self, path: &[u8]) {
        self.base.notes.note(
            RunId(0),
            String::from_utf8_lossy(path).into_owned(),
            "the tier's memory was lost: what fsync synced of it is there, what was written after that is not",
            true,
        );
    }
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
