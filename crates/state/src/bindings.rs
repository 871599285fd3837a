//! Where the store has each file, and how operations change that.
//!
//! While the drain carries out a batch, the catalog keeps where everything was before it ([`Before`]). After a crash
//! the catalog then says where the started operations began. A query of the store shows how far they came.

use std::collections::HashMap;

use surgetank_store::StorePath;
use surgetank_types::model::{FileId, Kind, OpKind, StoreIdentity};

use crate::{Inode, Name, Place, Tree, files_of};

/// What the catalog knows of a file in the present batch.
#[derive(Debug)]
pub struct Before {
    /// The names that the store had for the file.
    pub names: Vec<Place>,
    /// The version that the store had.
    pub identity: Option<StoreIdentity>,
}

impl Inode {
    /// All names that the store has for the file, as far as the agent knows.
    pub fn names_in_store(&self) -> Vec<Place> {
        self.applied.iter().chain(self.extra.iter().flat_map(|extra| &extra.more_applied)).cloned().collect()
    }

    /// Hard links in the store that no process has looked up yet.
    pub fn has_unknown_names(&self) -> bool {
        let known = usize::from(self.logical.is_some()) + self.extra.as_ref().map_or(0, |extra| extra.more_names.len());
        self.attr.kind == Kind::File && self.attr.links as usize > known
    }

    /// Replaces the names that the store has for the file.
    pub fn set_names_in_store(&mut self, mut names: Vec<Place>) {
        let first = (!names.is_empty()).then(|| names.remove(0));
        self.applied = first;
        if !names.is_empty() || self.extra.is_some() {
            self.extra_mut().more_applied = names;
        }
    }

    /// The store has it under one more name.
    pub fn gains(&mut self, at: Place) {
        if self.applied.is_none() {
            self.applied = Some(at);
        } else if self.applied.as_ref() != Some(&at) {
            let more = &mut self.extra_mut().more_applied;
            if !more.contains(&at) {
                more.push(at);
            }
        }
    }

    /// The file loses one of its names in the store; another name, if it has one, replaces it.
    pub fn leaves(&mut self, at: &Place) {
        let more = self.extra.as_mut().map(|extra| &mut extra.more_applied);
        if self.applied.as_ref() == Some(at) {
            self.applied = more.and_then(Vec::pop);
        } else if let Some(more) = more {
            more.retain(|other| other != at);
        }
    }

    fn moves(&mut self, from: &Place, to: Place) {
        if self.applied.as_ref() == Some(from) || self.applied.is_none() {
            self.applied = Some(to);
        } else if let Some(extra) = self.extra.as_mut() {
            extra.more_applied.iter_mut().filter(|place| *place == from).for_each(|place| *place = to.clone());
        }
    }
}

impl Tree {
    /// No process asked for that name before: the store had it before the batch that is being carried out now.
    pub fn is_found_at(&mut self, id: FileId, at: &Place) {
        if let Some(inode) = self.get_mut(id) {
            inode.gains(at.clone());
        }
        if let Some(before) = self.before.get_mut(&id).filter(|before| !before.names.contains(at)) {
            before.names.push(at.clone());
        }
    }

    /// Another client removed that name: no batch of the drain began with it.
    pub fn is_not_found_at(&mut self, id: FileId, at: &Place) {
        if let Some(inode) = self.get_mut(id) {
            inode.leaves(at);
        }
        if let Some(before) = self.before.get_mut(&id) {
            before.names.retain(|name| name != at);
        }
    }

    /// From now on the catalog keeps the present places of the operation's files.
    pub fn hold_books(&mut self, kind: &OpKind) {
        for id in files_of(kind) {
            if let Some(inode) = self.get(id) {
                let before = Before { names: inode.names_in_store(), identity: inode.identity };
                self.before.entry(id).or_insert(before);
            }
        }
    }

    /// Is an operation queued that moves the file in the store, or a directory above it?
    pub fn moves_in_store(&self, id: FileId) -> bool {
        let moves = |(dir, name): &Place| self.entry(*dir, name).is_some_and(|entry| entry.pins > 0);
        let spilled_into = self.get(id).and_then(Inode::spill).map(|(dir, _)| *dir);
        self.way_in_store(id).any(moves) || spilled_into.is_some_and(|dir| self.way_in_store(dir).any(moves))
    }

    /// The same at this moment. (Its operation may be carried out, and not be in the catalog yet.)
    pub fn is_moving_in_store(&self, id: FileId) -> bool {
        let mut at = Some(id);
        while let Some(id) = at {
            if self.before.contains_key(&id) {
                return true;
            }
            at = self.get(id).and_then(|inode| inode.applied.as_ref()).map(|(dir, _)| *dir);
        }
        false
    }

    /// Where the store has the content: below a temporary name while it was spilled.
    pub fn path_in_store(&self, id: FileId) -> Option<StorePath> {
        match self.get(id)?.spill() {
            Some((dir, name)) => Some(self.applied_path(*dir)?.join(name)),
            None => self.applied_path(id),
        }
    }

    /// Its place in the store, its directory's, and so on.
    fn way_in_store(&self, id: FileId) -> impl Iterator<Item = &Place> {
        let place = |id: FileId| self.get(id).and_then(|inode| inode.applied.as_ref());
        std::iter::successors(place(id), move |(dir, _)| place(*dir))
    }

    /// Does it have several names, or did it at the first look-up?
    pub fn is_hard_linked(&self, id: FileId) -> bool {
        self.get(id).is_some_and(|inode| {
            let several =
                inode.attr.links > 1 || inode.extra.as_ref().is_some_and(|extra| !extra.more_applied.is_empty());
            !inode.is_dir() && (several || self.hard_links.get(&inode.attr.ino) == Some(&id))
        })
    }

    /// The catalog may follow the tree again.
    pub fn release_books(&mut self, kind: &OpKind) {
        for id in files_of(kind) {
            self.before.remove(&id);
        }
    }

    /// The name as its directory has it, so that files share one allocation.
    fn shared(&self, dir: FileId, name: &[u8]) -> Name {
        let known = self.dir(dir).and_then(|dir| dir.children.get_key_value(name));
        known.map_or_else(|| Name::from(name), |(name, _)| name.clone())
    }

    /// Where a publication or a rename puts its file: a file that the store has is published where it is now.
    pub fn destination(&self, kind: &OpKind) -> Option<Place> {
        match kind {
            OpKind::Publish { file, dir, name, .. } => {
                let now = self.get(*file).and_then(|inode| inode.applied.clone());
                Some(now.unwrap_or_else(|| (*dir, self.shared(*dir, name))))
            }
            OpKind::Rename { to_dir, to, .. } => Some((*to_dir, self.shared(*to_dir, to))),
            _ => None,
        }
    }

    /// All that the store has below a directory, as far as it is known.
    pub fn applied_below(&self, dir: FileId) -> Vec<FileId> {
        let mut below: HashMap<FileId, bool> = HashMap::from([(dir, true), (FileId::ROOT, dir == FileId::ROOT)]);
        let mut way = Vec::new();
        let mut is_below = |mut at: FileId| {
            let answer = loop {
                if let Some(known) = below.get(&at) {
                    break *known;
                }
                way.push(at);
                let Some((parent, _)) = self.get(at).and_then(|inode| inode.applied.as_ref()) else { break false };
                at = *parent;
            };
            below.extend(way.drain(..).map(|id| (id, answer)));
            answer
        };
        let parents = self.iter().filter_map(|(id, inode)| Some((id, inode.applied.as_ref()?.0)));
        parents.filter(|(_, parent)| is_below(*parent)).map(|(id, _)| id).collect()
    }

    /// The store has carried out the operation. `at`: where the file is, if not at its destination (a conflict).
    /// Returns files that lost a name in the store.
    pub fn carried_out(&mut self, kind: &OpKind, at: Option<Place>) -> Vec<FileId> {
        let at = at.map(|(dir, name)| (dir, self.shared(dir, &name))).or_else(|| self.destination(kind));
        // (Where another client has the name, the drain used another name, which no operation has.)
        let link = match kind {
            OpKind::Link { dir, name, .. } => Some((*dir, Name::from(&**name))),
            _ => None,
        };
        for (dir, name) in at.iter().chain(&link) {
            if let Some(d) = self.dir_mut(*dir) {
                d.absent.remove(name);
                d.negative_cache.may_be_there(name);
            }
        }
        let mut gone = Vec::new();
        let place = |dir: &FileId, name: &[u8]| (*dir, Name::from(name));
        let change = |tree: &mut Self, id: FileId, act: &mut dyn FnMut(&mut Inode)| {
            if let Some(inode) = tree.get_mut(id) {
                act(inode);
            }
        };
        match (kind, at) {
            (OpKind::Publish { file, over, .. }, Some(at)) => {
                let again = self.get(*file).is_some_and(|inode| inode.applied.is_some());
                if let Some(over) = over.filter(|over| over != file && !again) {
                    change(self, over, &mut |inode| inode.leaves(&at));
                    gone.push(over);
                }
                change(self, *file, &mut |inode| inode.applied = Some(at.clone()));
            }
            (OpKind::Rename { file, from_dir, from, to_dir, to, over }, Some(at)) => {
                if let Some(over) = over.filter(|over| over != file) {
                    change(self, over, &mut |inode| inode.leaves(&place(to_dir, to)));
                    gone.push(over);
                }
                change(self, *file, &mut |inode| inode.moves(&place(from_dir, from), at.clone()));
            }
            (OpKind::Exchange { a, a_dir, a_name, b, b_dir, b_name }, _) => {
                let (at_a, at_b) = (place(a_dir, a_name), place(b_dir, b_name));
                change(self, *a, &mut |inode| inode.moves(&at_a, at_b.clone()));
                change(self, *b, &mut |inode| inode.moves(&at_b, at_a.clone()));
            }
            (OpKind::Unlink { file, dir, name } | OpKind::RemoveDir { file, dir, name }, _) => {
                change(self, *file, &mut |inode| inode.leaves(&place(dir, name)));
                gone.push(*file);
            }
            (OpKind::Link { file, dir, name }, _) => {
                change(self, *file, &mut |inode| inode.gains(place(dir, name)));
            }
            (OpKind::SetMeta { .. } | OpKind::Publish { .. } | OpKind::Rename { .. }, _) => {}
        }
        gone
    }
}
