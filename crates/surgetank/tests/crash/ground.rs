//! The kind of store. A directory is read directly. Any other store is read by a program under `surgetank run`, whose
//! agent starts without knowledge of it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::verify::{Location, store_of};
use crate::workload::Dice;
use surgetank_testkit::seeds;
use surgetank_testkit::servers::s3::S3Server;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Directory,
    /// A directory in which files are stored compressed and deduplicated.
    Packed,
    /// A real object server.
    Objects,
}

/// Points that only such a store passes, and how often a workload passes them.
const OF_PACKED: &[(&str, u64)] =
    &[("packed.referred", 20), ("packed.behind", 20), ("packed.published", 30), ("packed.renamed", 3)];
const OF_OBJECTS: &[(&str, u64)] =
    &[("store.publish", 40), ("store.published", 40), ("store.rename_copied", 4), ("store.rename_deleted", 4)];

impl Kind {
    pub const ALL: [Self; 3] = [Self::Directory, Self::Packed, Self::Objects];

    /// Seeds of cases that failed before.
    pub fn kept(self) -> impl Iterator<Item = u64> {
        seeds::kept(&format!("crash-{}", self.word())).into_iter()
    }

    pub fn word(self) -> &'static str {
        match self {
            Self::Directory => "cases",
            Self::Packed => "packed",
            Self::Objects => "objects",
        }
    }

    /// One of the kind's own points, in half of the cases.
    pub fn point(self, seed: u64) -> Option<(&'static str, u64)> {
        let points = match self {
            Self::Directory => return None,
            Self::Packed => OF_PACKED,
            Self::Objects => OF_OBJECTS,
        };
        let mut dice = Dice::new(seed ^ 0x6d0d);
        let (point, passes) = points[dice.below(points.len() as u64) as usize];
        (dice.below(2) == 0).then(|| (point, 1 + dice.below(passes)))
    }

    /// Whether it has hard links and can exchange names.
    pub fn has_links(self) -> bool {
        self == Self::Directory
    }
}

pub struct Ground {
    pub kind: Kind,
    /// The drain treats the directory as one of a file server: several requests at a time.
    remote: bool,
    server: Option<S3Server>,
}

impl Ground {
    /// `None` if this machine does not have it (never under CI). `aside` is a directory for files that the options
    /// name.
    pub fn new(kind: Kind, seed: u64, aside: &Path, options: &mut Vec<String>) -> Option<Self> {
        let mut server = None;
        match kind {
            Kind::Directory => {}
            Kind::Packed => {
                let config = aside.join("packed.toml");
                fs::write(&config, "[[rules]]\nmatch = \"*\"\ncompress = \"zstd\"\ndedup = true\n").unwrap();
                options.extend(["--config".to_owned(), config.to_str().unwrap().to_owned()]);
            }
            Kind::Objects => {
                let started = S3Server::start()?;
                options.extend(["--store".to_owned(), started.url("store")]);
                server = Some(started);
            }
        }
        let remote = kind != Kind::Objects && Dice::new(seed ^ 0x4e65).below(2) == 0;
        Some(Self { kind, remote, server })
    }

    pub fn arm(&self, command: &mut Command) {
        if let Some(server) = &self.server {
            command.envs(server.environment());
        }
        if self.remote {
            command.env("SURGETANK_STORE_IS_REMOTE", "1");
        }
    }

    /// The directory in which only complete files may have their names; `None` if there is none.
    pub fn in_the_open(&self, over: &Path) -> Option<PathBuf> {
        match (self.kind, &self.server) {
            (Kind::Directory, _) => Some(over.to_owned()),
            (Kind::Objects, Some(server)) => Some(server.files().join("store")),
            _ => None,
        }
    }
}

/// Run by the program that reads the store.
pub fn look(over: &Path, to: &Path) {
    fs::write(to, serde_json::to_vec(&store_of(over)).unwrap()).unwrap();
}

pub fn looked(at: &Path) -> BTreeMap<String, Location> {
    serde_json::from_slice(&fs::read(at).unwrap()).unwrap()
}

pub fn supervisor_of(agent: i32) -> Option<i32> {
    let stat = fs::read_to_string(format!("/proc/{agent}/stat")).ok()?;
    let parent = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()?;
    let name = fs::read_to_string(format!("/proc/{parent}/comm")).ok()?;
    (name.trim() == "surgetank-super").then_some(parent)
}
