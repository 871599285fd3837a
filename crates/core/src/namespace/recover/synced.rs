//! Synced copies: after the machine went down, what `fsync` synced of files on volatile tiers is put back on a tier. From there
//! recovery continues as with a tier that survived.
//!
//! The danger that this avoids: a copy of an earlier file counts as one of a later file with the same number.

use std::cmp::Reverse;
use std::io;
use std::path::Path;

use surgetank_state::{Inode, PlainId};
use surgetank_tier::{Device, Plain};
use surgetank_types::error::{Error, Result};
use surgetank_types::model::{Attr, FileId, Image, RunId};

use crate::files::Given;
use crate::files::synced_copies::{Content, Left, left_in, sync_directory};
use crate::namespace::recover::Recovery;
use crate::namespace::recover::lost::went_down_with;

/// Copies whose file a damaged catalog does not have.
const SET_ASIDE: &str = "without-record-";

impl Recovery<'_> {
    /// `damaged`: no copy is removed because its file has no record. An error: a copy could not be put back, and is kept.
    pub(crate) fn restore_synced(&self, image: &Image, damaged: bool) -> Result<()> {
        let copies = &self.files.synced_copies;
        let Some(dir) = copies.dir() else { return Ok(()) };
        let cannot = |why: io::Error| {
            Error::new(format!("the copies that fsync made in {} cannot be read", dir.display())).why(why)
        };
        let mut left = left_in(dir).map_err(cannot)?;
        left.sort_unstable_by_key(|one| (one.name.id, Reverse((one.name.version, one.name.number))));
        let mut kept = Vec::new();
        let mut removed = false;
        for of_file in left.chunk_by(|a, b| a.name.id == b.name.id) {
            let id = of_file[0].name.id;
            if self.metadata.read_tree().get(id).is_none() {
                // (The number of the file will be given to another one.)
                of_file.iter().try_for_each(|one| self.without_record(one, damaged)).map_err(cannot)?;
                removed = true;
                continue;
            }
            self.put_copy_back(id, of_file, image)?;
            kept.extend_from_slice(of_file);
        }
        if removed {
            sync_directory(dir).map_err(cannot)?;
        }
        crash_point!("recover.put_back");
        copies.take_over(kept);
        Ok(())
    }

    fn without_record(&self, one: &Left, damaged: bool) -> io::Result<()> {
        if !damaged {
            return std::fs::remove_file(&one.path);
        }
        let aside = one.path.with_file_name(format!("{SET_ASIDE}{}", one.name.text()));
        std::fs::rename(&one.path, &aside)?;
        let what = "a program synced it, and the catalog has no record of its file: its content follows the first 4096 bytes";
        self.base.notes.note(RunId(0), aside.display().to_string(), what, true);
        Ok(())
    }

    /// `copies`: of one file, the newest first.
    fn put_copy_back(&self, id: FileId, copies: &[Left], image: &Image) -> Result<()> {
        let target = {
            let tree = self.metadata.read_tree();
            let replica = tree.get(id).filter(|inode| inode.dirty() || !inode.sealed).and_then(|inode| inode.replica);
            let number = replica.and_then(|plain| tree.device_numbers.get(&plain.device).copied());
            replica.filter(|_| went_down_with(image, number)).zip(tree.logical_path(id))
        };
        // Nothing happened to the tier; or the file is elsewhere by now.
        let Some((plain, path)) = target else { return Ok(()) };
        let durable = self.metadata.read_tree().get(id).map_or(0, |inode| inode.durable);
        for one in copies.iter().filter(|one| one.name.version > durable) {
            let content = match one.content() {
                Ok(Some(content)) => content,
                Ok(None) => continue,
                Err(why) => {
                    let what = format!("a copy that fsync made cannot be read: {why}");
                    self.base.notes.note(RunId(0), one.path.display().to_string(), what, true);
                    continue;
                }
            };
            let named = self.base.tiers.device(plain.device);
            let device = if named.is_there() {
                Some(named)
            } else {
                self.base.tiers.devices().find(|device| device.is_there())
            };
            let made = device.ok_or_else(|| io::Error::other("no tier is there")).and_then(|device| {
                let plain = self.plain_of(device, &path, id, &content)?;
                Ok(PlainId::new(device.id(), &plain))
            });
            let plain = made.map_err(|why| not_put_back(&path, &one.path, why))?;
            let mut tree = self.metadata.write_tree();
            tree.drop_replica(id);
            if let Some(inode) = tree.get_mut(id) {
                // The sync of the catalog that belongs to the copy may not have happened.
                inode.sealed &= one.name.version <= inode.version;
                inode.replica = Some(plain);
                inode.promised = inode.present_version();
            }
            tree.txn.file(id);
            return Ok(());
        }
        Ok(())
    }

    fn plain_of(&self, device: &Device, path: &[u8], id: FileId, content: &Content) -> io::Result<Plain> {
        // (A volatile tier has nothing of the time before the machine went down.)
        drop(device.unlink(path));
        let file = device.create(path, 0o600)?;
        content.write_to(&file)?;
        let known = |inode: &Inode| Given::known(&Attr { mtime: content.mtime, ..inode.attr });
        let given = self.metadata.read_tree().get(id).map(known);
        given.map_or(Ok(()), |given| given.give(&file))?;
        Plain::of(&file)
    }
}

fn not_put_back(path: &[u8], copy: &Path, why: io::Error) -> Error {
    Error::new(format!("{} cannot be put back on a tier after the machine went down", String::from_utf8_lossy(path)))
        .why(why)
        .data(format!("what fsync synced of it is in {}, behind the first 4096 bytes", copy.display()))
        .remedy("make room on the tiers, or add one, and start again")
}
