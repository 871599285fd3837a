//! `surgetank refresh`: shows changes by other clients of the store at once, however long `store_ttl` is.
//!
//! The danger that this avoids: a refresh that drops the agent's own changes.

use crate::namespace::revalidation::Revalidation;

impl Revalidation {
    /// Drops the store's answers from the caches of the agent and the kernel. Files that were made or changed here
    /// stay: the drain brings them to the store. Returns the number of files.
    pub fn refresh_all(&self) -> u64 {
        self.store.refresh();
        let mut known = Vec::new();
        let mut names = Vec::new();
        {
            let mut tree = self.metadata.write_tree();
            let ids: Vec<_> = tree.iter().map(|(id, _)| id).collect();
            for id in ids {
                let Some(inode) = tree.get_mut(id) else { continue };
                if let Some(dir) = inode.dir.as_mut() {
                    dir.absent.clear();
                    dir.negative_cache = surgetank_state::NegativeCache::default();
                }
                // Other clients may have changed the mode of the agent's own directory.
                if inode.owned && !inode.is_copy() && !inode.is_dir() {
                    continue;
                }
                inode.checked = None;
                // Known to the kernel.
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
