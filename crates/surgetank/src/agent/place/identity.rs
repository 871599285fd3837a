//! `identity.json`: the directory that a place serves, the store to which it owes its leftovers, and the instance's
//! KEY.
//!
//! KEY names what an agent stores outside the place: directories on tiers, temporaries in the store. It is
//! `ORIGIN-NUMBER`. NUMBER is random, so no two instances have the same KEY, even on cloned machines with one host
//! name. ORIGIN is a hash of host name, user and place: it finds files on a tier whose state is lost. A KEY stays while
//! a file may be stored under it. A cloned machine with such a place draws a new KEY after its boot if no file is. A
//! KEY that an earlier version made (`DEVICE-INODE-ORIGIN`) also stays valid.
//!
//! Invariant: while leftovers exist, the place is bound to the store for which they were written. An agent, `fsck` and
//! `scavenge` for another store are refused before they change anything. The danger that it avoids: leftovers that are
//! brought to another store with exit code 0.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};
use surgetank_core::catalog::LogCatalog;
use surgetank_core::namespace;
use surgetank_core::report::PathText;
use surgetank_policy::config::Config;
use surgetank_store::checksum;
use surgetank_tier::Remembered;
use surgetank_types::error::{Error, Result};
use surgetank_types::model::Image;

use super::{Place, refuse};
use crate::agent::commands::Commands;

const IDENTITY: &str = "identity.json";
const NUMBER_BYTES: usize = 12;
const ORIGIN_CHARS: usize = 16;

/// What a place remembers for as long as it exists.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Identity {
    /// The path that was served last.
    pub over: PathText,
    pub key: String,
    /// The store to which leftovers are owed. `None`: an earlier version did not write it down.
    #[serde(default)]
    pub store: Option<StoreMark>,
    /// The last agent's start options, as a later command needs them.
    #[serde(default)]
    again: Vec<PathText>,
    /// The machine's boot at that start.
    #[serde(default)]
    boot: String,
}

/// A store, by its name and by properties that do not depend on the name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StoreMark {
    /// A path or a URL, as a command line says it.
    pub place: PathText,
    #[serde(flatten)]
    what: What,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
enum What {
    Directory {
        device: u64,
        inode: u64,
        /// Nanoseconds since 1970, if the file system reports it.
        born: Option<u64>,
    },
    Server {
        sites: Vec<String>,
    },
}

impl StoreMark {
    fn of(config: &Config) -> Result<Self> {
        let place = PathText::from(config.store.as_path());
        if let Some(url) = config.store_url() {
            return Ok(Self { place, what: What::Server { sites: surgetank_store::sites(url)? } });
        }
        let meta = fs::metadata(&config.store)
            .map_err(|why| Error::new(format!("the store {} cannot be used", config.store.display())).why(why))?;
        let born = meta.created().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
        let born = born.and_then(|since| u64::try_from(since.as_nanos()).ok());
        Ok(Self { place, what: What::Directory { device: meta.dev(), inode: meta.ino(), born } })
    }

    /// Device numbers change with each mount, and some file systems do not report a directory's birth: there the path
    /// decides.
    fn is(&self, other: &Self) -> bool {
        let same_path = self.place == other.place;
        match (&self.what, &other.what) {
            (What::Server { sites }, What::Server { sites: others }) => sites.iter().any(|site| others.contains(site)),
            (
                What::Directory { device, inode, born },
                What::Directory { device: other_device, inode: other_inode, born: other_born },
            ) => match (born, other_born) {
                (Some(_), Some(_)) => {
                    inode == other_inode && born == other_born && (same_path || device == other_device)
                }
                (None, None) => same_path || (device, inode) == (other_device, other_inode),
                // One of the two marks was written where the file system did not report it.
                _ => same_path && inode == other_inode,
            },
            _ => false,
        }
    }
}

impl Identity {
    pub fn options(&self) -> Vec<OsString> {
        self.again.iter().map(|word| word.as_path().as_os_str().to_owned()).collect()
    }
}

impl Place {
    /// For display and searches. Decisions use [`Self::read_identity`].
    pub fn identity(&self) -> Option<Identity> {
        self.read_identity().ok().flatten()
    }

    /// `None`: the file is absent. An unreadable file must not count as absent: the place may be bound to a store.
    pub fn read_identity(&self) -> Result<Option<Identity>> {
        let read = match fs::read(self.inner(IDENTITY)) {
            Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(None),
            read => read,
        };
        read.and_then(|bytes| serde_json::from_slice(&bytes).map_err(io::Error::from)).map(Some).map_err(|why| {
            let path = self.path.join(IDENTITY);
            Error::new(format!(
                "to which store the files left here belong is not known: {} cannot be read",
                path.display()
            ))
            .why(why)
            .remedy("put that file back from a copy of the state directory, or make it readable")
            .data("nothing is changed; what is left stays on its tiers")
        })
    }

    /// Binds the place to this directory and store, for an agent that starts or takes up leftovers. Returns the KEY.
    /// The caller holds the agent's lock.
    pub fn identify(&self, config: &Config) -> Result<String> {
        let known = self.read_identity()?;
        let now = Identity {
            over: config.over.as_path().into(),
            key: self.key_for(known.as_ref(), config)?,
            store: Some(StoreMark::of(config)?),
            again: config.again.iter().map(|word| Path::new(word).into()).collect(),
            boot: boot_id(),
        };
        if known.as_ref() != Some(&now) {
            let bytes = serde_json::to_vec(&now).map_err(io::Error::from);
            bytes
                .and_then(|bytes| self.put(IDENTITY, &bytes))
                .map_err(|error| refuse(&self.path.join(IDENTITY), &error.to_string()))?;
        }
        Ok(now.key)
    }

    /// Like [`Self::identify`], for a command that takes up leftovers: the last agent's start options stay.
    pub fn take_up(&self, config: &Config) -> Result<String> {
        match self.read_identity()? {
            Some(identity) if identity.store.is_some() => {
                self.check_store(config)?;
                Ok(identity.key)
            }
            _ => self.identify(config),
        }
    }

    /// The KEY of the leftovers, for a command that only inspects: it writes nothing.
    pub fn key(&self) -> Result<String> {
        match self.read_identity()? {
            Some(identity) => Ok(identity.key),
            None => Ok(format!("{}-{}", self.origin(), random_number()?)),
        }
    }

    /// The existing KEY, or a new one if no file is stored under it.
    fn key_for(&self, known: Option<&Identity>, config: &Config) -> Result<String> {
        let Some(known) = known else { return self.new_key(config) };
        self.check_store(config)?;
        if known.boot == boot_id() || self.is_in_use(&known.key, config) {
            return Ok(known.key.clone());
        }
        self.new_key(config)
    }

    /// Draws a KEY. Files on the tiers from this origin that no place knows are found under it.
    fn new_key(&self, config: &Config) -> Result<String> {
        let origin = self.origin();
        let key = format!("{origin}-{}", random_number()?);
        let places = self.path.parent().map(fs::read_dir).and_then(io::Result::ok).into_iter().flatten().flatten();
        let known: Vec<String> =
            places.filter_map(|place| Some(Self::open(&place.path()).ok()?.identity()?.key)).collect();
        let is_left = |other: &str| origin_in(other) == Some(&*origin) && !known.iter().any(|known| known == other);
        for path in config.tiers.iter().flat_map(|tier| &tier.paths) {
            surgetank_tier::hand_over(path, &key, &is_left).map_err(|why| {
                Error::new(format!("{} cannot be searched for files of a lost state", path.display()))
                    .why(why)
                    .data("nothing is removed there")
            })?;
        }
        Ok(key)
    }

    fn origin(&self) -> String {
        let node = rustix::system::uname();
        let mut who = node.nodename().to_bytes().to_vec();
        who.push(0);
        who.extend_from_slice(&rustix::process::getuid().as_raw().to_le_bytes());
        who.extend_from_slice(self.path.as_os_str().as_encoded_bytes());
        format!("{:016x}", checksum::of_bytes(&who))
    }

    fn check_store(&self, config: &Config) -> Result<()> {
        self.refused_store(config)?.map_or(Ok(()), Err)
    }

    /// The reason to refuse this store: the leftovers are owed to another one. The caller holds the agent's lock.
    pub fn refused_store(&self, config: &Config) -> Result<Option<Error>> {
        let Some(owed) = self.read_identity()?.and_then(|identity| identity.store) else { return Ok(None) };
        if owed.is(&StoreMark::of(config)?) {
            return Ok(None);
        }
        let image = self.catalog_left();
        if !self.has_left() && image.as_ref().is_some_and(namespace::is_spent) {
            return Ok(None);
        }
        Ok(Some(self.other_store(config, &owed)))
    }

    fn other_store(&self, config: &Config, owed: &StoreMark) -> Error {
        let over = config.over.display();
        let counted =
            self.count_left().map(|(files, operations)| format!("{files} file(s), {operations} operation(s)"));
        let counted = counted.unwrap_or_else(|| "its catalog cannot be read".to_owned());
        let commands = Commands::at(self, &config.over);
        let mut only_lost = String::new();
        let lost = self.catalog_left().map_or(0, |image| image.lost.len() as u64);
        if lost > 0 && self.count_left() == Some((lost, 0)) {
            only_lost = format!("\nAll of these files are lost. To acknowledge that:\n  {}", commands.forget());
        }
        let data = format!("nothing was changed; the files stay on their tiers and below {}", self.path.display());
        if owed.place.as_path() == config.store {
            return Error::new(format!("{over} owes what is left on its tiers ({counted}) to another directory than {}", owed.place))
                .why("another directory is at this path now; its file system may not be mounted")
                .remedy(format!(
                    "mount that file system there, then run:\n  {}\nIf that store does not come back, copy the files to a new directory:\n  {}",
                    commands.run(),
                    commands.copy_out()
                ))
                .data(data);
        }
        Error::new(format!("{over} has undrained files on its tiers ({counted}) for the store {}", owed.place))
            .why(format!("this command names another store: {}", config.store.display()))
            .remedy(format!("bring it to its store first:\n  {}{only_lost}", commands.run()))
            .data(data)
    }

    /// `None`: the catalog cannot be read, or not all of it is valid.
    fn catalog_left(&self) -> Option<Image> {
        self.await_catalog();
        let (image, recovery) = LogCatalog::look(&self.path.join("catalog")).ok()?;
        recovery.damage.is_none().then_some(image)
    }

    /// May a file be stored under this key, on a tier or in the store?
    fn is_in_use(&self, key: &str, config: &Config) -> bool {
        let Some(image) = self.catalog_left().filter(namespace::is_spent) else { return true };
        let mut remembered = image.marks.keys().filter_map(Remembered::from_mark);
        let mut paths = config.tiers.iter().flat_map(|tier| &tier.paths);
        self.has_left()
            || paths.any(|path| surgetank_tier::is_in_use(path, key))
            || remembered.any(|device| device.may_hold(key))
    }

    /// Is this the store that was served last?
    pub fn is_of_store(&self, config: &Config) -> bool {
        let mark = self.identity().and_then(|identity| identity.store);
        mark.zip(StoreMark::of(config).ok()).is_some_and(|(served, asked)| served.is(&asked))
    }

    /// The last store was another one; false if the place did not write it down.
    pub fn is_of_other_store(&self, config: &Config) -> bool {
        self.identity().is_some_and(|identity| identity.store.is_some()) && !self.is_of_store(config)
    }
}

/// ORIGIN in a KEY of this or an earlier version; `None`: it is not a KEY. (The names of the shim's files begin with one.)
fn origin_in(name: &str) -> Option<&str> {
    let is_hex = |part: &&str| !part.is_empty() && part.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    let parts: Vec<&str> = name.split('-').collect();
    let origin = match parts[..] {
        [origin, number] if number.len() == 2 * NUMBER_BYTES => origin,
        [_device, _inode, origin] => origin,
        _ => return None,
    };
    (origin.len() == ORIGIN_CHARS && parts.iter().all(is_hex)).then_some(origin)
}

fn random_number() -> Result<String> {
    let mut bytes = [0_u8; NUMBER_BYTES];
    let mut filled = 0;
    while filled < NUMBER_BYTES {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(Error::new("an instance cannot get a random key").why(errno)),
        }
    }
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Empty if the kernel does not report it.
fn boot_id() -> String {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use surgetank_policy::config::{Overrides, Surroundings};

    use super::*;
    use crate::agent::place::StateRoot;

    /// A machine's directories. Its clones have the same ones.
    struct Machine {
        dir: tempfile::TempDir,
    }

    impl Machine {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            for name in ["over", "store", "other", "fast"] {
                fs::create_dir(dir.path().join(name)).unwrap();
            }
            Self { dir }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        fn config(&self, store: Option<&str>) -> Config {
            let text = |name: &str| self.path(name).display().to_string();
            let overrides = Overrides {
                over: Some(self.path("over")),
                state: Some(self.path("state")),
                store: store.map(text),
                tiers: vec![format!("fast={}:1G", text("fast"))],
                ..Overrides::default()
            };
            let around = Surroundings { env: Vec::new(), ..Surroundings::of_this_process().unwrap() };
            Config::load_in(&overrides, &around).unwrap().config
        }

        fn place(&self) -> Place {
            let config = self.config(None);
            let root = StateRoot::open(&config.state, &config.over).unwrap();
            root.place(&config.over.metadata().unwrap(), &config.over).unwrap()
        }

        /// Leftovers exist: the agent was killed.
        fn leave(&self) {
            fs::write(self.place().path().join("agent.json"), "{}").unwrap();
        }

        /// The machine boots, or a copy of it does.
        fn boot(&self) {
            let path = self.place().path().join(IDENTITY);
            let mut identity = self.place().identity().unwrap();
            identity.boot = "before".into();
            fs::write(path, serde_json::to_vec(&identity).unwrap()).unwrap();
        }
    }

    /// They were hashes of the host's name, the user and the path, which clones share.
    #[test]
    fn keys_of_equal_machines_differ() {
        let machine = Machine::new();
        let first = machine.place().identify(&machine.config(None)).unwrap();
        fs::remove_dir_all(machine.path("state")).unwrap();
        let second = machine.place().identify(&machine.config(None)).unwrap();
        assert_ne!(first, second);
    }

    #[test]
    fn key_stays_while_files_may_be_stored_under_it() {
        let machine = Machine::new();
        let config = machine.config(None);
        let key = machine.place().identify(&config).unwrap();
        assert_eq!(machine.place().identify(&config).unwrap(), key, "the same boot");
        machine.boot();
        let scope = machine.path("fast").join(format!("surgetank-{}-{key}", rustix::process::geteuid().as_raw()));
        fs::create_dir(&scope).unwrap();
        assert_eq!(machine.place().identify(&config).unwrap(), key, "plain files on a tier");
        fs::remove_dir(&scope).unwrap();
        machine.boot();
        machine.leave();
        assert_eq!(machine.place().identify(&config).unwrap(), key, "a killed agent");
        fs::remove_file(machine.place().path().join("agent.json")).unwrap();
        machine.boot();
        // A copy of this machine draws a new KEY, too.
        assert_ne!(machine.place().identify(&config).unwrap(), key, "nothing");
    }

    #[test]
    fn key_of_an_earlier_version_stays_valid() {
        let machine = Machine::new();
        let place = machine.place();
        let written = serde_json::json!({ "over": machine.path("over"), "key": "801-2f-0123456789abcdef" });
        fs::write(place.path().join(IDENTITY), written.to_string()).unwrap();
        machine.leave();
        // The place does not say to which store the leftovers are owed: the first store that a command names binds it.
        assert_eq!(place.identify(&machine.config(Some("store"))).unwrap(), "801-2f-0123456789abcdef");
        assert!(place.identify(&machine.config(Some("other"))).is_err());
    }

    /// A damaged file once read as "none", and the first store that a command named got the leftovers.
    #[test]
    fn identity_that_cannot_be_read_refuses_every_store() {
        let machine = Machine::new();
        let place = machine.place();
        let config = machine.config(Some("store"));
        place.identify(&config).unwrap();
        machine.leave();
        let path = place.path().join(IDENTITY);
        fs::write(&path, "{").unwrap();
        for refused in [place.identify(&config), place.take_up(&config), place.key()] {
            assert!(refused.unwrap_err().what.contains(&path.display().to_string()));
        }
        assert!(place.refused_store(&config).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"{");
    }

    #[test]
    fn store_without_a_birth_time_is_known_by_path_and_inode() {
        let mark = |path: &str, inode: u64, born: Option<u64>| StoreMark {
            place: Path::new(path).into(),
            what: What::Directory { device: 1, inode, born },
        };
        assert!(mark("/a", 2, None).is(&mark("/a", 2, Some(3))));
        assert!(!mark("/a", 2, None).is(&mark("/a", 4, Some(3))));
        assert!(!mark("/a", 2, Some(3)).is(&mark("/b", 2, None)));
    }

    /// The shim's files in /dev/shm once counted as keys: no run started after the state was lost.
    #[test]
    fn only_keys_of_a_lost_state_are_handed_over() {
        use std::os::unix::fs::DirBuilderExt;
        let machine = Machine::new();
        let config = machine.config(None);
        let lost = machine.place().identify(&config).unwrap();
        let fast =
            |key: &str| machine.path("fast").join(format!("surgetank-{}-{key}", rustix::process::geteuid().as_raw()));
        let origin = lost.split('-').next().unwrap();
        let others =
            [format!("{lost}.index"), format!("{lost}.counts-1"), format!("{origin}-x"), format!("801-2f-{origin}-1")];
        for key in others.iter().chain([&lost]) {
            fs::DirBuilder::new().mode(0o700).create(fast(key)).unwrap();
        }
        fs::write(fast(&lost).join("f"), "x").unwrap();
        fs::remove_dir_all(machine.path("state")).unwrap();
        let key = machine.place().identify(&config).unwrap();
        assert!(fast(&key).join("f").exists() && !fast(&lost).exists());
        assert!(others.iter().all(|other| fast(other).exists()));
        assert_eq!(origin_in("801-2f-0123456789abcdef"), Some("0123456789abcdef"));
    }

    #[test]
    fn place_with_leftovers_is_bound_to_its_store() {
        let machine = Machine::new();
        let place = machine.place();
        let [first, other] = ["store", "other"].map(|store| machine.config(Some(store)));
        place.identify(&first).unwrap();
        place.identify(&other).unwrap();
        place.identify(&first).unwrap();
        machine.leave();
        for config in [&other, &machine.config(None)] {
            let refused = place.identify(config).unwrap_err();
            assert!(refused.what.contains(&machine.path("store").display().to_string()), "{refused}");
            assert!(refused.remedy.contains("--store") && refused.remedy.contains("--tier"), "{refused}");
            assert!(place.refused_store(config).unwrap().is_some() && place.take_up(config).is_err());
        }
        let key = place.identify(&first).unwrap();
        assert_eq!(place.take_up(&first).unwrap(), key);
    }

    #[test]
    fn another_directory_at_the_path_is_another_store() {
        let machine = Machine::new();
        let place = machine.place();
        let config = machine.config(Some("store"));
        place.identify(&config).unwrap();
        machine.leave();
        fs::rename(machine.path("store"), machine.path("aside")).unwrap();
        fs::create_dir(machine.path("store")).unwrap();
        let refused = place.refused_store(&config).unwrap().unwrap();
        assert!(refused.why.contains("another directory"), "{refused}");
        // The directory itself, at either path.
        assert!(place.refused_store(&machine.config(Some("aside"))).unwrap().is_none());
    }
}
