//! Rename, with its flags. A file that the store never had is renamed only here. For a file that the store has, an
//! operation of the queue renames it there too.
//!
//! The danger that this avoids: a crash or another door between the steps leaves a file without a name, or two files
//! with one.

use surgetank_policy::hint::module::is_set_aside_of;
use surgetank_state::{Entry, Inode, Name, PlainId, Tree};
use surgetank_store::StoreStat;
use surgetank_tier::Remains;
use surgetank_types::clock;
use surgetank_types::error::{Errno, FsResult};
use surgetank_types::model::{Caller, FileId, OpKind, RunId};

use crate::namespace::names::{Detached, Names, is_leaving};

pub const NOREPLACE: u32 = libc::RENAME_NOREPLACE;
pub const EXCHANGE: u32 = libc::RENAME_EXCHANGE;

impl Names {
    /// Renames `from` to `to`, or exchanges them. `flags`: as for renameat2(2). Errors: EINVAL for other flags or a
    /// store without exchange; ENOENT, permissions, the store.
    pub fn rename(
        &self,
        caller: &Caller,
        from_dir: FileId,
        from: &[u8],
        to_dir: FileId,
        to: &[u8],
        flags: u32,
    ) -> FsResult<()> {
        if flags & !(NOREPLACE | EXCHANGE) != 0 || flags == NOREPLACE | EXCHANGE {
            return Err(Errno::INVAL.into());
        }
        if flags & EXCHANGE != 0 && !self.store.exchanges() {
            return Err(Errno::INVAL.into());
        }
        if to.starts_with(surgetank_types::model::STORE_TEMPORARY_PREFIX) {
            return Err(Errno::INVAL.into());
        }
        // Another door may have changed what the names mean between the look and the rename.
        for _ in 0..crate::namespace::names::LOOKS_MAX {
            match self.rename_seen(caller, (from_dir, from), (to_dir, to), flags) {
                Err(fault) if fault.errno == Errno::STALE => {}
                Ok(()) => {
                    self.dispatcher.is_given(to_dir, to);
                    if flags & EXCHANGE != 0 {
                        self.dispatcher.is_given(from_dir, from);
                    }
                    return Ok(());
                }
                failed => return failed,
            }
        }
        Err(Errno::NOENT.into())
    }

    /// A directory that moves gets another `..`, which is a change of the directory itself.
    fn permit_other_parent(&self, caller: &Caller, id: FileId) -> FsResult<()> {
        let moved = self.metadata.read_tree().get(id).filter(|inode| inode.is_dir()).map(|inode| inode.attr);
        moved.map_or(Ok(()), |attr| self.permissions.permit(caller, &attr, 2))
    }

    fn ask_for_directory(&self, id: FileId, to_dir: FileId, to: &[u8]) {
        let mut tree = self.metadata.write_tree();
        if tree.get(id).is_some_and(Inode::is_dir)
            && let Some(d) = tree.dir_mut(to_dir)
        {
            d.negative_cache.may_be_there(to);
        }
    }

    /// `ESTALE` if a name means another file now.
    fn rename_seen(
        &self,
        caller: &Caller,
        (from_dir, from): (FileId, &[u8]),
        (to_dir, to): (FileId, &[u8]),
        flags: u32,
    ) -> FsResult<()> {
        let id = self.resolver.resolve(caller, from_dir, from)?;
        // As for a new directory: its content would hide what another node has put there.
        self.ask_for_directory(id, to_dir, to);
        let target = match self.resolver.resolve(caller, to_dir, to) {
            Ok(target) => Some(target),
            Err(fault) if fault.errno == Errno::NOENT => None,
            Err(fault) => return Err(fault),
        };
        self.permit_change(caller, from_dir)?;
        if to_dir != from_dir {
            self.permit_change(caller, to_dir)?;
            self.permit_other_parent(caller, id)?;
            if let Some(target) = target.filter(|_| flags & EXCHANGE != 0) {
                self.permit_other_parent(caller, target)?;
            }
        }
        if target.is_some() && flags & NOREPLACE != 0 {
            return Err(Errno::EXIST.into());
        }
        let run = self.runs.run(caller);
        let (from, to) = (Name::from(from), Name::from(to));
        if target.is_none() {
            self.may_be_called(&self.metadata.read_tree(), to_dir, &to)?;
        }
        if flags & EXCHANGE != 0 {
            let other = target.ok_or(Errno::NOENT)?;
            return self.exchange((from_dir, &from), id, (to_dir, &to), other, run);
        }
        if target == Some(id) {
            return Ok(());
        }
        let is_dir = self.metadata.read_tree().get(id).is_some_and(Inode::is_dir);
        if let Some(target) = target {
            let target_is_dir = self.metadata.read_tree().get(target).is_some_and(Inode::is_dir);
            match (is_dir, target_is_dir) {
                (true, false) => return Err(Errno::NOTDIR.into()),
                (false, true) => return Err(Errno::ISDIR.into()),
                (true, true) => self.must_be_empty(caller, target)?,
                (false, false) => {
                    // (An earlier content that gets the name back takes the place of the present one.)
                    let is_its_name = {
                        let tree = self.metadata.read_tree();
                        if tree.entry(to_dir, &to).and_then(Entry::logical) != Some(target) {
                            return Err(Errno::STALE.into());
                        }
                        self.permit_sticky(&tree, caller, to_dir, target)?;
                        let name = tree.get(target).and_then(|inode| inode.logical.as_ref());
                        name.is_some_and(|(dir, name)| *dir == to_dir && *name == to)
                    };
                    if is_its_name && (from_dir != to_dir || !is_set_aside_of(&from, &to)) {
                        self.dispatcher.before_change(caller, target)?;
                    }
                    self.syncs.spare_unknown_names(target)?;
                    self.opener.await_begun(target);
                }
            }
        }
        let looked: Vec<FileId> = target.into_iter().chain([id]).collect();
        self.await_stays(&looked)?;
        crash_point!("rename.looked");
        let mut tree = self.metadata.write_tree();
        self.metadata.recall_delegation(&mut tree, (!is_dir).then_some(to_dir));
        let unchanged = tree.entry(from_dir, &from).and_then(Entry::logical) == Some(id)
            && tree.entry(to_dir, &to).and_then(Entry::logical) == target;
        if !unchanged || looked.iter().any(|id| is_leaving(&tree, *id)) {
            return Err(Errno::STALE.into());
        }
        // Checked before, too, where the store may have to be asked.
        if let Some(target) = target {
            tree.require_empty(target)?;
        }
        crash_point!("name.decided");
        if tree.get(to_dir).is_none_or(|inode| inode.logical.is_none() && to_dir != FileId::ROOT) {
            return Err(Errno::NOENT.into());
        }
        self.permit_sticky(&tree, caller, from_dir, id)?;
        if let Some(target) = target {
            self.permit_sticky(&tree, caller, to_dir, target)?;
        }
        if is_dir && tree.is_within(to_dir, id) {
            return Err(Errno::INVAL.into());
        }
        let (detached, remains) = self.rename_locked(&mut tree, (from_dir, from), (to_dir, to), id, target, run)?;
        drop(tree);
        drop(remains);
        if let Some(detached) = &detached {
            self.unlink_after_sync(detached);
        }
        self.metadata.nudge();
        Ok(())
    }

    /// Gives a file its name here that comes from another member's directory. The store has it in this directory too, under
    /// the name of a temporary. Errors: EBUSY, the file that has the name is leaving; as of [`Self::rename`].
    pub(in crate::namespace) fn bring(
        &self,
        caller: &Caller,
        dir: FileId,
        (from, stat): (&Name, &StoreStat),
        to: &[u8],
        noreplace: bool,
    ) -> FsResult<FileId> {
        for _ in 0..crate::namespace::names::LOOKS_MAX {
            match self.bring_seen(caller, dir, (from, stat), to, noreplace) {
                Err(fault) if fault.errno == Errno::STALE => {}
                done => return done,
            }
        }
        Err(Errno::AGAIN.into())
    }

    fn bring_seen(
        &self,
        caller: &Caller,
        dir: FileId,
        (from, stat): (&Name, &StoreStat),
        to: &[u8],
        noreplace: bool,
    ) -> FsResult<FileId> {
        let target = match self.resolver.resolve(caller, dir, to) {
            Ok(target) => Some(target),
            Err(fault) if fault.errno == Errno::NOENT => None,
            Err(fault) => return Err(fault),
        };
        self.permit_change(caller, dir)?;
        let to = Name::from(to);
        if let Some(target) = target {
            if noreplace {
                return Err(Errno::EXIST.into());
            }
            if self.metadata.read_tree().get(target).is_some_and(Inode::is_dir) {
                return Err(Errno::ISDIR.into());
            }
            self.dispatcher.before_change(caller, target)?;
            self.syncs.spare_unknown_names(target)?;
            self.opener.await_begun(target);
        } else {
            self.may_be_called(&self.metadata.read_tree(), dir, &to)?;
        }
        let mut tree = self.metadata.write_tree();
        self.metadata.recall_delegation(&mut tree, Some(dir));
        if tree.entry(dir, &to).and_then(Entry::logical) != target {
            return Err(Errno::STALE.into());
        }
        if tree.get(dir).is_none_or(|inode| inode.logical.is_none() && dir != FileId::ROOT) {
            return Err(Errno::NOENT.into());
        }
        if let Some(target) = target {
            if is_leaving(&tree, target) {
                return Err(Errno::BUSY.into());
            }
            self.permit_sticky(&tree, caller, dir, target)?;
        }
        let id = self.resolver.integrate(&mut tree, dir, from, stat);
        let run = self.runs.run(caller);
        let (detached, remains) = self.rename_locked(&mut tree, (dir, from.clone()), (dir, to), id, target, run)?;
        drop(tree);
        drop(remains);
        if let Some(detached) = &detached {
            self.unlink_after_sync(detached);
        }
        self.metadata.nudge();
        Ok(id)
    }

    fn rename_locked(
        &self,
        tree: &mut Tree,
        (from_dir, from): (FileId, Name),
        (to_dir, to): (FileId, Name),
        id: FileId,
        target: Option<FileId>,
        run: RunId,
    ) -> FsResult<(Option<Detached>, Option<Remains<'_>>)> {
        tree.own(id);
        tree.own(to_dir);
        let is_dir = tree.get(id).is_some_and(Inode::is_dir);
        let old_path = tree.child_path(from_dir, &from).ok_or(Errno::NOENT)?;
        let was_primary =
            tree.get(id).is_some_and(|inode| inode.logical.as_ref().is_some_and(|(d, n)| *d == from_dir && *n == from));
        // First the name's present holder leaves. The file that comes takes over the store's side.
        let detached = match target {
            Some(target) if tree.get(target).is_some_and(Inode::is_dir) => {
                let path = tree.logical_path(target);
                self.remove_dir_entry(tree, (to_dir, &to), target, true, run);
                tree.touch_dir(to_dir, -1);
                if let Some(path) = path {
                    self.remove_on_tiers(&path);
                }
                None
            }
            Some(target) => Some(self.detach(tree, (to_dir, &to), target, true, run)),
            None => None,
        };
        // Then the file gets its new name.
        if let Some(inode) = tree.get_mut(id) {
            inode.attr.ctime = clock::now();
            if was_primary {
                inode.logical = Some((to_dir, to.clone()));
            } else if let Some(extra) = inode.extra.as_mut() {
                for place in &mut extra.more_names {
                    if place.0 == from_dir && place.1 == from {
                        *place = (to_dir, to.clone());
                    }
                }
            }
        }
        tree.bind(from_dir, &from, |entry| entry.set_logical(None));
        tree.bind(to_dir, &to, |entry| entry.set_logical(Some(id)));
        tree.txn.entry(from_dir, &from);
        tree.txn.entry(to_dir, &to);
        if let Some(path) = tree.child_path(to_dir, &to) {
            tree.named(id, &path);
        }
        // The store's side.
        if tree.in_store(id) {
            let last = tree.belongs_last(from_dir) && tree.belongs_last(to_dir);
            // Both must be in the store from now on.
            tree.hasten_dirs(to_dir, last);
            tree.hasten_dirs(id, last);
            let kind = tree.rename_op(id, (from_dir, &from), (to_dir, &to));
            self.metadata.queue(tree, kind, run, last, 0);
            tree.bind(from_dir, &from, |entry| entry.set_planned(None));
            tree.bind(to_dir, &to, |entry| entry.set_planned(Some(id)));
            if let Some(d) = tree.dir_mut(id) {
                d.moved = true;
            }
            // A file that is still being written is published when it closes; until then it would delay all others.
            if !is_dir && tree.get(id).is_some_and(|inode| inode.sealed) {
                self.metadata.queue_publish(tree, id);
            }
        } else {
            if let Some(seq) = tree.get(id).and_then(|inode| inode.publish) {
                tree.take_back(id, seq);
            }
            let sealed = tree.get(id).is_some_and(|inode| inode.sealed);
            if sealed {
                self.metadata.queue_publish(tree, id);
            }
            self.metadata.vacate(tree, from_dir, &from, run);
        }
        if let Some(target) = target {
            self.metadata.reap(tree, target);
        }
        let subdir = i32::from(is_dir);
        tree.touch_dir(from_dir, if from_dir == to_dir { 0 } else { -subdir });
        tree.touch_dir(to_dir, if from_dir == to_dir { 0 } else { subdir });
        tree.txn.carried_out(id);
        self.metadata.commit(tree);
        crash_point!("rename.written_down");
        // The tiers' side.
        let remains = detached.as_ref().and_then(|detached| self.detach_on_tier(detached));
        let new_path = tree.child_path(to_dir, &to).ok_or(Errno::NOENT)?;
        self.move_on_tiers(tree, id, was_primary, &old_path, &new_path);
        // Under its old name, it may have needed no sync.
        self.syncs.to_be_synced(tree, id);
        if is_dir {
            self.hints.rules_changed_below(tree, id);
        }
        Ok((detached, remains))
    }

    fn move_on_tiers(&self, tree: &Tree, id: FileId, was_primary: bool, old_path: &[u8], new_path: &[u8]) {
        crash_point!("rename.before_tier");
        let Some(inode) = tree.get(id) else { return };
        self.descriptors.watch_apart(tree, id);
        let failed = |device: &surgetank_tier::Device, why: std::io::Error| {
            self.tiers.device_failed(device.id(), &why);
            tracing::warn!(%why, path = %String::from_utf8_lossy(old_path), "a tier did not follow a rename");
        };
        if inode.is_dir() {
            let shim = self.metadata.shim.get();
            shim.inspect(|shim| shim.directories_move());
            for device in self.tiers.devices() {
                if let Err(why) = device.follow_dir(old_path, new_path) {
                    failed(device, why);
                }
            }
            shim.inspect(|shim| shim.directories_move());
        } else if let (true, Some(PlainId { device, .. })) = (was_primary, inode.replica) {
            let device = self.tiers.device(device);
            if let Err(why) = device.follow(old_path, new_path) {
                failed(device, why);
            }
        }
    }

    fn exchange(
        &self,
        (a_dir, a_name): (FileId, &Name),
        a: FileId,
        (b_dir, b_name): (FileId, &Name),
        b: FileId,
        run: RunId,
    ) -> FsResult<()> {
        if a == b {
            return Ok(());
        }
        // Both files must certainly come to the store; otherwise a single exchange there could not do it.
        self.flush_for_exchange(a)?;
        self.flush_for_exchange(b)?;
        self.await_stays(&[a, b])?;
        let mut tree = self.metadata.write_tree();
        self.metadata.recall_delegation(&mut tree, None);
        let unchanged = tree.entry(a_dir, a_name).and_then(Entry::logical) == Some(a)
            && tree.entry(b_dir, b_name).and_then(Entry::logical) == Some(b);
        if !unchanged {
            return Err(Errno::NOENT.into());
        }
        let (a_is_dir, b_is_dir) = (tree.get(a).is_some_and(Inode::is_dir), tree.get(b).is_some_and(Inode::is_dir));
        if (a_is_dir && tree.is_within(b_dir, a)) || (b_is_dir && tree.is_within(a_dir, b)) {
            return Err(Errno::INVAL.into());
        }
        tree.own(a);
        tree.own(b);
        let a_path = tree.child_path(a_dir, a_name).ok_or(Errno::NOENT)?;
        let b_path = tree.child_path(b_dir, b_name).ok_or(Errno::NOENT)?;
        // The plain file is under the primary name, whichever name is exchanged.
        let is_primary = |id: FileId, dir: FileId, name: &Name| {
            tree.get(id).is_some_and(|inode| inode.logical.as_ref().is_some_and(|(d, n)| *d == dir && n == name))
        };
        let (moves_a, moves_b) = (is_primary(a, a_dir, a_name), is_primary(b, b_dir, b_name));
        let both_in_store = tree.planned(a_dir, a_name) == Some(a) && tree.planned(b_dir, b_name) == Some(b);
        for (id, from, to) in [(a, (a_dir, a_name), (b_dir, b_name)), (b, (b_dir, b_name), (a_dir, a_name))] {
            if let Some(inode) = tree.get_mut(id) {
                inode.attr.ctime = clock::now();
                let to = (to.0, to.1.clone());
                if inode.logical.as_ref().is_some_and(|(d, n)| *d == from.0 && n == from.1) {
                    inode.logical = Some(to);
                } else if let Some(extra) = inode.extra.as_mut() {
                    for place in extra.more_names.iter_mut().filter(|place| place.0 == from.0 && place.1 == *from.1) {
                        *place = to.clone();
                    }
                }
                if let Some(d) = inode.dir.as_mut() {
                    d.moved = true;
                }
            }
        }
        tree.bind(a_dir, a_name, |entry| entry.set_logical(Some(b)));
        tree.bind(b_dir, b_name, |entry| entry.set_logical(Some(a)));
        tree.txn.entry(a_dir, a_name);
        tree.txn.entry(b_dir, b_name);
        tree.named(a, &b_path);
        tree.named(b, &a_path);
        if both_in_store {
            let kind =
                OpKind::Exchange { a, a_dir, a_name: Box::from(&**a_name), b, b_dir, b_name: Box::from(&**b_name) };
            self.metadata.queue(&mut tree, kind, run, false, 0);
            tree.bind(a_dir, a_name, |entry| entry.set_planned(Some(b)));
            tree.bind(b_dir, b_name, |entry| entry.set_planned(Some(a)));
        } else {
            // The store has at most one of them. There it is a rename, and the other file comes with its publication.
            for (id, from, to) in [(a, (a_dir, a_name), (b_dir, b_name)), (b, (b_dir, b_name), (a_dir, a_name))] {
                if tree.planned(from.0, from.1) == Some(id) {
                    let is_dir = |id: FileId| tree.get(id).is_some_and(Inode::is_dir);
                    // A directory cannot be renamed over a file, or a file over a directory: the store's holder of the
                    // name goes first.
                    if tree.planned(to.0, to.1).is_some_and(|over| is_dir(over) != is_dir(id)) {
                        self.metadata.vacate(&mut tree, to.0, to.1, run);
                    }
                    let kind = tree.rename_op(id, from, to);
                    self.metadata.queue(&mut tree, kind, run, false, 0);
                    tree.bind(from.0, from.1, |entry| entry.set_planned(None));
                    tree.bind(to.0, to.1, |entry| entry.set_planned(Some(id)));
                }
            }
            for id in [a, b] {
                if !tree.in_store(id) && tree.get(id).is_some_and(|inode| inode.sealed) {
                    if let Some(seq) = tree.get(id).and_then(|inode| inode.publish) {
                        tree.take_back(id, seq);
                    }
                    self.metadata.queue_publish(&mut tree, id);
                }
            }
        }
        let shift = i32::from(b_is_dir) - i32::from(a_is_dir);
        tree.touch_dir(a_dir, if a_dir == b_dir { 0 } else { shift });
        tree.touch_dir(b_dir, if a_dir == b_dir { 0 } else { -shift });
        tree.txn.carried_out(a);
        self.metadata.commit(&mut tree);
        crash_point!("exchange.written_down");
        self.exchange_on_tiers(&tree, (a, moves_a, &a_path), (b, moves_b, &b_path));
        drop(tree);
        self.metadata.nudge();
        Ok(())
    }

    fn exchange_on_tiers(&self, tree: &Tree, a: (FileId, bool, &[u8]), b: (FileId, bool, &[u8])) {
        let aside = crate::files::hidden_name(a.0);
        self.move_on_tiers(tree, a.0, a.1, a.2, &aside);
        crash_point!("exchange.one_aside");
        self.move_on_tiers(tree, b.0, b.1, b.2, a.2);
        self.move_on_tiers(tree, a.0, a.1, &aside, b.2);
    }

    /// An exchange of files that the store never had waits until it has them.
    fn flush_for_exchange(&self, id: FileId) -> FsResult<()> {
        let pending = {
            let mut tree = self.metadata.write_tree();
            if tree.in_store(id) {
                return Ok(());
            }
            let seq = tree.get(id).and_then(|inode| inode.publish);
            tree.hurry(seq);
            seq
        };
        if pending.is_none() {
            // Never drained (its rule), or still open: exchanged here only.
            return Ok(());
        }
        self.metadata.wake();
        let version = self.metadata.read_tree().get(id).map_or(0, |inode| inode.version);
        self.syncs.wait_durable(id, version)
    }
}
