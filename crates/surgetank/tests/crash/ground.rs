//! What the store is. A directory is looked at where it lies; any other store by a program under `surgetank run`, with an agent
//! that knows nothing of it.

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
    /// A directory in which files lie compressed and deduplicated.
    Packed,
    /// A real server of objects.
    Objects,
}

/// Points that only such a store passes, and how often a workload does.
const OF_PACKED: &[(&str, u64)] =
    &[("packed.referred", 20), ("packed.behind", 20), ("packed.published", 30), ("packed.renamed", 3)];
const OF_OBJECTS: &[(&str, u64)] =
    &[("store.publish", 40), ("store.published", 40), ("store.rename_copied", 4), ("store.rename_deleted", 4)];

impl Kind {
    pub const ALL: [Self; 3] = [Self::Directory, Self::Packed, Self::Objects];

    /// Cases that failed once.
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

    /// One of its own points, in half of the cases.
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

    /// Hard links and exchanged names.
    pub fn has_links(self) -> bool {
        self == Self::Directory
    }
}

pub struct Ground {
    pub kind: Kind,
    /// A directory that is drained to as to one of a file server: several requests at a time.
    remote: bool,
    server: Option<S3Server>,
}

impl Ground {
    /// `None`: it cannot be had here (never under CI). `aside`: for what the options name.
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

    /// Where whole files, and only those, have their names; `None`: nowhere.
    pub fn in_the_open(&self, over: &Path) -> Option<PathBuf> {
        match (self.kind, &self.server) {
            (Kind::Directory, _) => Some(over.to_owned()),
            (Kind::Objects, Some(server)) => Some(server.files().join("store")),
            _ => None,
        }
    }
}

/// What the program does that looks.
pub fn look(over: &Path, to: &Path) {
    fs::write(to, serde_json::to_vec(&store_of(over)).unwrap()).unwrap();
}

pub fn looked(at: &Path) -> BTreeMap<String, Location> {
    serde_json::from_slice(&fs::read(at).unwrap()).unwrap()
}
