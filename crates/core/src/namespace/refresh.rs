//! `surgetank refresh`: what others changed in the store is seen from now on, however long `store_ttl` is.

use super::Namespace;

impl Namespace {
    /// Nothing that the store told is believed any more, neither by us nor by the kernel. What was made or changed here stays
    /// as it is: of that the store is told, not asked. Returns of how many files.
    pub fn refresh_all(&self) -> u64 {
        self.store.refresh();
        let mut known = Vec::new();
        let mut names = Vec::new();
        {
            let mut tree = self.write_tree();
            let ids: Vec<_> = tree.iter().map(|(id, _)| id).collect();
            for id in ids {
                let Some(inode) = tree.get_mut(id) else { continue };
                if let Some(dir) = inode.dir.as_mut() {
                    dir.absent.clear();
                    dir.negative_cache = surgetank_state::NegativeCache::default();
                }
                // (Of a directory of ours others may have changed the mode.)
                if inode.owned && !inode.is_copy() && !inode.is_dir() {
                    continue;
                }
                inode.checked = None;
                // To the kernel.
                if inode.lookups > 0 {
                    known.push(id);
                    names.extend(inode.logical.clone());
                }
            }
        }
        if let Some(door) = self.door.get() {
            for id in &known {
                door.invalidate(*id, false);
            }
            names.iter().for_each(|(dir, name)| door.invalidate_name(*dir, name));
        }
        known.len() as u64
    }
}
