//! Orphans: plain files without a record.
//!
//! The danger that this avoids: recovery deletes the only copy of a file because the catalog lost its record.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::{fs, io};

use rustix::fs::RenameFlags;

use surgetank_state::PlainId;
use surgetank_types::model::{DeviceId, RunId};

use crate::files::HIDDEN_PREFIX;
use crate::namespace::recover::{ORPHANS, ORPHANS_REPORTED_MAX, OnTier, PendingUnlinks, Recovery};

/// Copies a plain file to the place of orphans, under a name that is not taken there. `files`: the device's directory
/// of plain files; `path`: the plain file below it; `name`: the file's name for programs.
pub fn keep_copy(files: &Path, path: &[u8], name: &[u8]) -> io::Result<()> {
    let from = files.join(OsStr::from_bytes(path));
    let aside = files.join(OsStr::from_bytes(ORPHANS));
    let mut kept = aside.join(OsStr::from_bytes(name));
    if kept.parent().is_some_and(|dir| fs::create_dir_all(dir).is_err()) {
        // A file from an earlier start is where the directory should be.
        kept = aside.join(kept.file_name().unwrap_or_default());
        fs::create_dir_all(&aside)?;
    }
    // A plain file with such a name gets another one when it is set aside.
    let copy = aside.join(OsStr::from_bytes(&[HIDDEN_PREFIX, b"copy"].concat()));
    fs::copy(&from, &copy)?;
    File::open(&copy)?.sync_all()?;
    loop {
        match rustix::fs::renameat_with(rustix::fs::CWD, &copy, rustix::fs::CWD, &kept, RenameFlags::NOREPLACE) {
            Err(rustix::io::Errno::EXIST) => kept.as_mut_os_string().push("+"),
            renamed => return Ok(renamed?),
        }
    }
}

impl Recovery<'_> {
    /// Plain files that no record names. Each may be the only copy of a file: of an agent whose state is gone (`strange`), of
    /// one whose state directory was replaced by an older copy, or of records that are `damaged`. What is empty, and what the
    /// catalog says was about to be removed, is not one.
    pub(crate) fn set_orphans_aside(
        &self,
        found: HashMap<(DeviceId, u64), OnTier>,
        strange: &HashSet<DeviceId>,
        pending_unlinks: &PendingUnlinks,
        damaged: bool,
    ) {
        let mut orphans: Vec<_> = found.into_iter().collect();
        orphans.sort_unstable_by(|(at, one), (other_at, other)| (at.0, &one.path).cmp(&(other_at.0, &other.path)));
        let mut reported: HashMap<DeviceId, usize> = HashMap::new();
        let mut old: HashMap<DeviceId, usize> = HashMap::new();
        for ((device, ino), orphan) in orphans {
            let plain = PlainId::new(device, &orphan.plain);
            if orphan.path.starts_with(ORPHANS) {
                *old.entry(device).or_default() += 1;
                continue;
            }
            // The agent died while it made or removed this file. With a damaged catalog, an empty file may be all that
            // is left. A file that was about to go may have got a place or a name since.
            let was_pending_unlink = || {
                crate::metadata::pending_unlink::mark_of(&self.metadata.read_tree(), plain)
                    .is_some_and(|file| pending_unlinks.contains(&file))
            };
            let unwanted = !damaged && (orphan.plain.size_bytes == 0 || was_pending_unlink());
            if unwanted && !strange.contains(&device) {
                // (By now another one may have come to that path.)
                drop(self.base.tiers.device(device).unlink_if(&orphan.path, ino));
                continue;
            }
            let Some(aside) = self.set_aside(device, ino, &orphan.path, damaged) else {
                continue;
            };
            let reported = reported.entry(device).or_default();
            *reported += 1;
            if *reported <= ORPHANS_REPORTED_MAX {
                let now = self.base.tiers.device(device).files_path().join(OsStr::from_bytes(&aside));
                let whose = if damaged {
                    "no record names it any more, for the catalog was damaged"
                } else if strange.contains(&device) {
                    "left by an agent whose state is gone"
                } else {
                    "no record names it: the state directory is older than the tier, or the file was put there by hand"
                };
                self.base.notes.note(
                    RunId(0),
                    String::from_utf8_lossy(&orphan.path).into_owned(),
                    format!(
                        "{whose}: {}; it may be the only copy: copy it by hand to where it belongs, or remove it",
                        now.display()
                    ),
                    true,
                );
            }
        }
        for (device, files) in reported.into_iter().filter(|(_, files)| *files > ORPHANS_REPORTED_MAX) {
            let place = self.base.tiers.device(device).files_path().join(OsStr::from_bytes(ORPHANS));
            let more = files - ORPHANS_REPORTED_MAX;
            self.base.notes.note(
                RunId(0),
                place.display().to_string(),
                format!("{more} more file(s) that no record names: {}", place.display()),
                true,
            );
        }
        for (device, files) in old {
            let place = self.base.tiers.device(device).files_path().join(OsStr::from_bytes(ORPHANS));
            self.base.notes.note(
                RunId(0),
                place.display().to_string(),
                format!(
                    "{files} file(s) that an earlier agent set aside are still there; copy them by hand or remove them"
                ),
                false,
            );
        }
    }

    /// Moves a plain file to a free name among the orphans and returns that name. Removes a file whose name says that
    /// it was only being made.
    fn set_aside(&self, device: DeviceId, ino: u64, path: &[u8], damaged: bool) -> Option<Vec<u8>> {
        let device = self.base.tiers.device(device);
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
        let mut aside = None;
        let hidden = name.starts_with(HIDDEN_PREFIX);
        let result = if hidden && !damaged {
            // (By now a file that is put back may have that path.)
            device.unlink_if(path, ino)
        } else {
            let mut to = ORPHANS.to_vec();
            if hidden {
                // Under that name the next recovery would remove it.
                to.extend_from_slice(format!("nameless-{ino}").as_bytes());
            } else {
                to.extend_from_slice(path);
            }
            // Files that were set aside before keep their names.
            let is_taken = |to: &[u8]| match device.open(to, false) {
                Ok(_) => true,
                Err(why) => why.kind() == std::io::ErrorKind::PermissionDenied,
            };
            if is_taken(&to) {
                to.extend_from_slice(format!(".{ino}").as_bytes());
            }
            while is_taken(&to) {
                to.push(b'+');
            }
            device
                .rename(path, &to)
                .map(|()| to)
                .or_else(|_| {
                    // A file from an earlier start is where the directory should be.
                    let mut flat = ORPHANS.to_vec();
                    flat.extend_from_slice(format!("{ino}-").as_bytes());
                    flat.extend_from_slice(name);
                    while is_taken(&flat) {
                        flat.push(b'+');
                    }
                    device.rename(path, &flat).map(|()| flat)
                })
                .map(|to| aside = Some(to))
        };
        if let Err(why) = result {
            tracing::warn!(%why, path = %String::from_utf8_lossy(path), "an orphan could not be set aside");
            self.base.notes.note(
                RunId(0),
                device.files_path().join(OsStr::from_bytes(path)).display().to_string(),
                format!("a file without a record could not be moved aside: {why}"),
                true,
            );
        }
        aside
    }
}
