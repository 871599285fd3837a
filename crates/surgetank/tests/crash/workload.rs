//! The command under `surgetank run`: writers with files of their own. Each writer records, outside the directory,
//! every operation that it begins, and each one that succeeds. A writer stops at the first error, because the agent
//! is then dead.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::fs::{CWD, RenameFlags, XattrFlags};

use crate::content;

/// The extended attribute that files get.
pub const MARK: &str = "user.crash";

const SYNCS_AGAIN: &str = "SURGETANK_CRASH_SYNCS_AGAIN";

/// (After a loss of power, a file of which some bytes were synced on its tier has them, complete or not.)
pub fn sync_again_if_it_means_the_store(run: &mut Command, options: &[String]) {
    if !options.iter().any(|option| option == "--fsync") {
        run.env(SYNCS_AGAIN, "1");
    }
}

/// A small generator: the same seed yields the same operations.
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5bf0_3635_f0a5_b2c1)
    }
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit.max(1)
    }
}

pub struct Terms {
    pub seed: u64,
    pub writer: u64,
    pub operations: u64,
    pub directory: PathBuf,
    pub manifest: PathBuf,
    /// The store has hard links, and can exchange names.
    pub links: bool,
    /// Many files in a row.
    pub many: bool,
}

struct Writer {
    links: bool,
    dice: Dice,
    directory: PathBuf,
    manifest: File,
    writer: u64,
    next: u64,
    files: Vec<String>,
    dirs: Vec<String>,
    ordered: u64,
    step: u64,
}

/// One writer, in a process of its own.
pub fn write(terms: &Terms) -> io::Result<()> {
    let manifest = OpenOptions::new().append(true).create(true).open(&terms.manifest)?;
    let mut writer = Writer {
        links: terms.links,
        dice: Dice::new(terms.seed ^ terms.writer << 32),
        directory: terms.directory.clone(),
        manifest,
        writer: terms.writer,
        next: 0,
        files: Vec::new(),
        dirs: vec![format!("w{}", terms.writer)],
        ordered: 0,
        step: 0,
    };
    // The directory may exist from an earlier life.
    let home = format!("w{}", terms.writer);
    writer.noted(&format!("mkdir {home}"), |writer| fs::create_dir(writer.directory.join(&home)))?;
    writer
        .noted(&format!("mkdir {home}/order"), |writer| fs::create_dir(writer.directory.join(&home).join("order")))?;
    for operation in 0..terms.operations {
        writer.operation()?;
        if terms.many && operation % 4 == 0 {
            writer.burst()?;
        }
    }
    Ok(())
}

impl Writer {
    /// B(egun), then E(nded) or X (an error: the operation may or may not have happened).
    fn noted(&mut self, what: &str, act: impl FnOnce(&mut Self) -> io::Result<()>) -> io::Result<()> {
        self.step += 1;
        let step = self.step;
        self.log(&format!("B {step} {what}"))?;
        let result = act(self);
        self.log(&match &result {
            Ok(()) => format!("E {step}"),
            Err(why) => format!("X {step} {why}"),
        })?;
        result
    }

    fn log(&mut self, line: &str) -> io::Result<()> {
        self.manifest.write_all(format!("{line}\n").as_bytes())
    }

    fn fresh(&mut self) -> (String, u64) {
        self.next += 1;
        let dir = self.dirs[self.dice.below(self.dirs.len() as u64) as usize].clone();
        (format!("{dir}/f{:05}", self.next), self.writer << 32 | self.next)
    }

    fn some_file(&mut self) -> Option<usize> {
        (!self.files.is_empty()).then(|| self.dice.below(self.files.len() as u64) as usize)
    }

    fn size(&mut self) -> usize {
        match self.dice.below(20) {
            0..=11 => self.dice.below(4000) as usize,
            12..=17 => self.dice.below(60_000) as usize,
            18 => self.dice.below(400_000) as usize,
            _ => self.dice.below(1_500_000) as usize,
        }
    }

    fn operation(&mut self) -> io::Result<()> {
        match self.dice.below(27) {
            0..=5 => self.create(false),
            6 | 7 => self.create(true),
            8 | 9 => self.in_order(),
            10 | 11 => self.overwrite(),
            12 | 13 => self.replace(),
            14 | 15 => self.rename(),
            16 | 17 => self.unlink(),
            18 => self.mkdir(),
            19 => self.rename_dir(),
            20 if self.links => self.link(),
            21 if self.links => self.exchange(),
            22 => self.chmod(),
            23 => self.mark(),
            24 => self.symlink(),
            25 => self.rmdir(),
            _ => {
                std::thread::sleep(Duration::from_millis(self.dice.below(30)));
                Ok(())
            }
        }
    }

    /// Like a program that unpacks an archive: the agent delegates directories in which a program creates many files.
    fn burst(&mut self) -> io::Result<()> {
        let in_order = self.dice.below(3) == 0;
        let dir = self.dirs[self.dice.below(self.dirs.len() as u64) as usize].clone();
        for _ in 0..2 + self.dice.below(20) {
            if in_order {
                self.in_order()?;
                continue;
            }
            let (_, id) = self.fresh();
            let (path, len) = (format!("{dir}/b{:05}", self.next), self.dice.below(3000) as usize);
            let sync = self.dice.below(40) == 0;
            self.noted(&format!("create {path} {id}"), |writer| {
                writer.put(OpenOptions::new().write(true).create_new(true), &path, id, len, sync)
            })?;
            self.files.push(path);
            if self.dice.below(8) == 0 {
                self.unlink()?;
            }
        }
        Ok(())
    }

    fn create(&mut self, sync: bool) -> io::Result<()> {
        let (path, id) = self.fresh();
        let len = self.size();
        self.noted(&format!("create {path} {id}"), |writer| {
            let mut options = OpenOptions::new();
            options.write(true).create_new(true);
            writer.put(&options, &path, id, len, sync)
        })?;
        self.files.push(path);
        Ok(())
    }

    /// Files in order: a later one must never be in the store without the earlier ones.
    fn in_order(&mut self) -> io::Result<()> {
        self.ordered += 1;
        let (_, id) = self.fresh();
        let path = format!("w{}/order/o{:05}", self.writer, self.ordered);
        let len = self.size();
        self.noted(&format!("create {path} {id}"), |writer| {
            writer.put(OpenOptions::new().write(true).create_new(true), &path, id, len, false)
        })
    }

    fn overwrite(&mut self) -> io::Result<()> {
        let Some(index) = self.some_file() else { return Ok(()) };
        let path = self.files[index].clone();
        let ((_, id), len) = (self.fresh(), self.size());
        let sync = self.dice.below(3) == 0;
        self.noted(&format!("overwrite {path} {id}"), |writer| {
            writer.put(OpenOptions::new().write(true).truncate(true), &path, id, len, sync)
        })
    }

    fn put(&mut self, options: &OpenOptions, path: &str, id: u64, len: usize, sync: bool) -> io::Result<()> {
        let bytes = content::make(id, len);
        let mut file = options.open(self.directory.join(path))?;
        for part in bytes.chunks(20_000) {
            file.write_all(part)?;
        }
        if sync {
            self.sync_again(&file, &bytes, id)?;
            file.sync_all()?;
            let step = self.step;
            // From here on the bytes are promised, whether the file is closed or not.
            self.log(&format!("F {step}"))?;
            std::thread::sleep(Duration::from_millis(self.dice.below(20)));
        }
        drop(file);
        Ok(())
    }

    /// Like a database: changes a few bytes and syncs, again and again. In the end the bytes are what they were.
    fn sync_again(&mut self, file: &File, bytes: &[u8], id: u64) -> io::Result<()> {
        // A dice of its own, so that each seed keeps its case.
        let mut dice = Dice::new(id ^ 0x5c3a);
        if std::env::var_os(SYNCS_AGAIN).is_none() || bytes.len() < content::REVISED_BYTES_MIN || dice.below(3) > 0 {
            return Ok(());
        }
        let rounds = 4 + dice.below(5);
        for revision in (1..rounds).map(|round| id << 8 | round) {
            let revised = content::make_revision(id, bytes.len(), revision);
            let (at, trailer) = content::revised(bytes.len(), revision);
            file.write_all_at(&revised[at..=at], at as u64)?;
            file.write_all_at(&revised[trailer..], trailer as u64)?;
            file.sync_data()?;
            file.write_all_at(&bytes[at..=at], at as u64)?;
        }
        let (_, trailer) = content::revised(bytes.len(), 0);
        file.write_all_at(&bytes[trailer..], trailer as u64)
    }

    /// Saves like careful programs: writes a new file, then renames it over the old one. Half of the saves sync it
    /// first.
    fn replace(&mut self) -> io::Result<()> {
        let Some(index) = self.some_file() else { return Ok(()) };
        let path = self.files[index].clone();
        let ((_, id), len) = (self.fresh(), self.size());
        let new = format!("{path}.new{}", self.next);
        let sync = self.next.is_multiple_of(2);
        self.noted(&format!("create {new} {id}"), |writer| {
            writer.put(OpenOptions::new().write(true).create_new(true), &new, id, len, sync)
        })?;
        self.noted(&format!("rename {new} {path}"), |writer| {
            fs::rename(writer.directory.join(&new), writer.directory.join(&path))
        })
    }

    fn rename(&mut self) -> io::Result<()> {
        let Some(index) = self.some_file() else { return Ok(()) };
        let (from, (to, _)) = (self.files[index].clone(), self.fresh());
        self.noted(&format!("rename {from} {to}"), |writer| {
            fs::rename(writer.directory.join(&from), writer.directory.join(&to))
        })?;
        self.files[index] = to;
        Ok(())
    }

    fn unlink(&mut self) -> io::Result<()> {
        let Some(index) = self.some_file() else { return Ok(()) };
        let path = self.files.swap_remove(index);
        self.noted(&format!("unlink {path}"), |writer| fs::remove_file(writer.directory.join(&path)))
    }

    fn mkdir(&mut self) -> io::Result<()> {
        self.next += 1;
        let dir = self.dirs[self.dice.below(self.dirs.len() as u64) as usize].clone();
        let path = format!("{dir}/d{:05}", self.next);
        self.noted(&format!("mkdir {path}"), |writer| fs::create_dir(writer.directory.join(&path)))?;
        self.dirs.push(path);
        Ok(())
    }

    /// A name that is not in use, in one of the directories.
    fn free(&mut self, letter: char) -> String {
        self.next += 1;
        let dir = &self.dirs[self.dice.below(self.dirs.len() as u64) as usize];
        format!("{dir}/{letter}{:05}", self.next)
    }

    fn link(&mut self) -> io::Result<()> {
        let Some(index) = self.some_file() else { return Ok(()) };
        let (from, to) = (self.files[index].clone(), self.free('l'));
        self.noted(&format!("link {from} {to}"), |writer| {
            fs::hard_link(writer.directory.join(&from), writer.directory.join(&to))
        })?;
        self.files.push(to);
        Ok(())
    }

    fn exchange(&mut self) -> io::Result<()> {
        let (Some(one), Some(other)) = (self.some_file(), self.some_file()) else { return Ok(()) };
        if one == other {
            return Ok(());
        }
        let (a, b) = (self.files[one].clone(), self.files[other].clone());
        self.noted(&format!("exchange {a} {b}"), |writer| {
            let (a, b) = (writer.directory.join(&a), writer.directory.join(&b));
            Ok(rustix::fs::renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE)?)
        })
    }

    fn chmod(&mut self) -> io::Result<()> {
        let Some(index) = self.some_file() else { return Ok(()) };
        let (path, mode) = (self.files[index].clone(), 0o600 + self.dice.below(0o100) as u32);
        self.noted(&format!("chmod {path} {mode:o}"), |writer| {
            fs::set_permissions(writer.directory.join(&path), fs::Permissions::from_mode(mode))
        })
    }

    fn mark(&mut self) -> io::Result<()> {
        let Some(index) = self.some_file() else { return Ok(()) };
        let (path, value) = (self.files[index].clone(), self.dice.below(1_000_000).to_string());
        self.noted(&format!("mark {path} {value}"), |writer| {
            let path = writer.directory.join(&path);
            Ok(rustix::fs::setxattr(path, MARK, value.as_bytes(), XattrFlags::empty())?)
        })
    }

    fn symlink(&mut self) -> io::Result<()> {
        let path = self.free('s');
        let target = format!("somewhere-{}", self.next);
        self.noted(&format!("symlink {path} {target}"), |writer| {
            std::os::unix::fs::symlink(&target, writer.directory.join(&path))
        })
    }

    /// A directory that has just been made, and is therefore empty.
    fn rmdir(&mut self) -> io::Result<()> {
        let path = self.free('e');
        self.noted(&format!("mkdir {path}"), |writer| fs::create_dir(writer.directory.join(&path)))?;
        std::thread::sleep(Duration::from_millis(self.dice.below(30)));
        self.noted(&format!("rmdir {path}"), |writer| fs::remove_dir(writer.directory.join(&path)))
    }

    fn rename_dir(&mut self) -> io::Result<()> {
        if self.dirs.len() < 2 {
            return Ok(());
        }
        let index = 1 + self.dice.below(self.dirs.len() as u64 - 1) as usize;
        self.next += 1;
        let from = self.dirs[index].clone();
        let parent = Path::new(&from).parent().unwrap().to_str().unwrap();
        let to = format!("{parent}/m{:05}", self.next);
        self.noted(&format!("rename {from} {to}"), |writer| {
            fs::rename(writer.directory.join(&from), writer.directory.join(&to))
        })?;
        for path in self.files.iter_mut().chain(&mut self.dirs) {
            if let Some(rest) = path.strip_prefix(&from).filter(|rest| rest.is_empty() || rest.starts_with('/')) {
                *path = format!("{to}{rest}");
            }
        }
        Ok(())
    }
}
