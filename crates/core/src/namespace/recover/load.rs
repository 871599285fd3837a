//! The catalog's records become the live state.

use std::collections::HashMap;

use surgetank_state::{Entry, Inode, Name, OWN_INODE_BASE, Op, PlainId, Tree};
use surgetank_types::model::{DeviceId, FileId, HOMES, Image, NodeId, OpKind};

use crate::namespace::recover::Recovery;

impl Recovery<'_> {
    /// `ids`: which device each number of the catalog is now.
    pub(crate) fn load_files(&self, tree: &mut Tree, image: &mut Image, ids: &HashMap<DeviceId, DeviceId>) {
        let files = std::mem::take(&mut image.files);
        for (id, record) in files {
            tree.next_id = tree.next_id.max(id.0 + 1);
            let root = id == FileId::ROOT;
            let mut inode = Inode::new(record.attr);
            let place = |(dir, name): (FileId, Box<[u8]>)| (dir, Name::from(name));
            inode.version = u32::try_from(record.version).unwrap_or(u32::MAX);
            inode.durable = u32::try_from(record.durable_version).unwrap_or(0);
            inode.sealed = record.sealed;
            inode.replica = record.replica.and_then(|replica| {
                let device = *ids.get(&replica.device)?;
                Some(PlainId { device, born: replica.born, ino: replica.backing_ino })
            });
            inode.synced = u32::try_from(record.synced_version).unwrap_or(0);
            inode.promised = u32::try_from(record.promised_version).unwrap_or(0);
            inode.identity = record.identity.map(|known| known.of_kind(record.attr.kind));
            inode.logical = record.logical.map(place);
            inode.pinned = record.pinned;
            inode.set_checksum(record.checksum);
            inode.run = self.base.succession.still(record.run);
            inode.owned = true;
            if let Some(dir) = inode.dir.as_mut() {
                dir.adopted = record.adopted;
            }
            let home = record.replica.map(|replica| replica.node).unwrap_or_default();
            if record.target.is_some() || record.xattrs.is_some() || record.spill.is_some() || home != NodeId::default()
            {
                let extra = inode.extra_mut();
                extra.home = home;
                extra.target = record.target;
                extra.xattrs = record.xattrs;
                extra.spill = record.spill.map(place);
            }
            inode.set_names_in_store(record.applied.into_iter().map(place).collect());
            if root {
                let Some(known) = tree.get_mut(FileId::ROOT) else {
                    continue;
                };
                known.extra = inode.extra;
                continue;
            }
            let ino = inode.attr.ino;
            let known = inode.identity.as_ref().is_some_and(|identity| identity.ino == ino);
            let nameless = inode.logical.is_none();
            let is_homes = inode.logical.as_ref().is_some_and(|(dir, name)| (*dir, &**name) == (FileId::ROOT, HOMES));
            if is_homes && ino >= OWN_INODE_BASE && inode.is_dir() && inode.publish.is_none() {
                tree.homes = Some(id);
            }
            tree.insert(id, inode);
            // The store may have further names of it that no process has looked up yet.
            if known && (nameless || tree.is_hard_linked(id)) {
                tree.hard_links.insert(ino, id);
            }
        }
    }

    pub(crate) fn load_queue(&self, tree: &mut Tree, image: &mut Image) {
        for (seq, record) in std::mem::take(&mut image.ops) {
            tree.next_seq = tree.next_seq.max(seq.number() + 1);
            let mut op = Op::new(
                record.kind,
                self.base.succession.still(record.run),
                self.metadata.due_after_recovery(),
                record.last,
            );
            op.prepared = record.prepared;
            op.doubtful = record.started;
            op.certain = record.certain;
            let file = op.file();
            if let Some(inode) = tree.get_mut(file) {
                match op.kind {
                    OpKind::Publish { .. } => inode.publish = Some(seq),
                    OpKind::SetMeta { .. } => inode.set_meta = Some(seq),
                    _ => {}
                }
            }
            tree.enqueue(seq, op);
        }
    }
}

pub(crate) fn load_names(tree: &mut Tree, image: &mut Image) {
    for (dir, name, record) in std::mem::take(&mut image.entries) {
        let name = Name::from(name);
        let Some(d) = tree.dir_mut(dir) else { continue };
        d.children.insert(name.clone(), Entry::new(record.logical, record.planned));
        if let Some(id) = record.logical
            && let Some(inode) = tree.get_mut(id)
            && inode.logical.as_ref().is_some_and(|place| *place != (dir, name.clone()))
        {
            inode.extra_mut().more_names.push((dir, name));
        }
    }
}
