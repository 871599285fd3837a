//! Loading: precedence, parsing, refusals, Sea's files; on directories of the test's own.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::time::Duration;

use super::*;
use crate::config::machine::Machine;
use crate::rule::{RuleSet, mode_name};
use surgetank_types::model::Mode;

mod again;
mod job;

/// A project, a place for a tier and a site file, apart from the real machine's.
struct Place {
    dir: tempfile::TempDir,
    around: Surroundings,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("tempdir");
        let root = dir.path().canonicalize().expect("canonical");
        for name in ["project", "fast", "fast2", "elsewhere", "empty"] {
            fs::create_dir(root.join(name)).expect("mkdir");
        }
        let around = Surroundings {
            cwd: root.join("project"),
            env: Vec::new(),
            site_file: root.join("site.toml"),
            machine: Machine::default(),
            ram: root.join("fast"),
            uid: 7,
        };
        Self { dir, around }
    }
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().canonicalize().expect("canonical").join(name)
    }
    fn write(&self, name: &str, text: &str) -> &Self {
        fs::write(self.path(name), text).expect("write");
        self
    }
    fn env(&mut self, name: &str, value: impl Into<OsString>) -> &mut Self {
        self.around.env.push((name.into(), value.into()));
        self
    }
    fn tier(&self) -> String {
        format!("t={}:1G", self.path("fast").display())
    }
    /// With a tier on the command line, so that the result does not depend on the machine.
    fn load(&self, overrides: Overrides) -> Result<Loaded> {
        let tiers = if overrides.tiers.is_empty() { vec![self.tier()] } else { overrides.tiers.clone() };
        Config::load_in(&Overrides { tiers, ..overrides }, &self.around)
    }
    fn load_as_found(&self) -> Result<Loaded> {
        Config::load_in(&Overrides::default(), &self.around)
    }
    fn error(&self, overrides: Overrides) -> String {
        self.load(overrides).expect_err("refused").to_string()
    }
    fn mode(&self, loaded: &Loaded, path: &str) -> &'static str {
        mode_name(RuleSet::new(&loaded.config.rules).expect("rules").decide(path.as_bytes()).mode)
    }
}

fn some(text: &str) -> Option<String> {
    Some(text.to_owned())
}

#[test]
fn configuration_without_sources_has_defaults() {
    let place = Place::new();
    let config = place.load(Overrides::default()).expect("load").config;
    assert_eq!(config.over, place.path("project"));
    assert_eq!(config.store, config.over);
    assert_eq!(config.state, PathBuf::from("/var/tmp/surgetank-7"));
    assert_eq!((config.ordered, config.direct, config.verify), (true, true, Verify::Cache));
    assert!(!config.pool_ordered);
    assert_eq!((config.replicas, config.replicas_at), (1, ReplicasAt::Later));
    assert_eq!((config.fsync, config.keep_at_exit, config.drain_threads), (None, KeepAtExit::Leave, 4));
    assert_eq!((config.copy_up_bytes_max, config.drain_bytes_per_second_max), (64 << 20, 0));
    assert_eq!((config.store_ttl.as_secs(), config.wait_for_room.as_secs()), (1, 60));
    assert_eq!(
        (config.quiet, config.retry, config.grace),
        (Duration::from_millis(50), Duration::from_secs(30), Duration::from_secs(5))
    );
    assert!(
        config.dirty_bytes_max > 0
            && config.dirty_bytes_max <= Machine::default().memory().expect("memory").total_bytes / 4
    );
}

#[test]
fn later_source_overrides_earlier_one() {
    let mut place = Place::new();
    place.write("site.toml", "quiet = \"1s\"\nretry = \"1s\"\ngrace = \"1s\"\nstore_ttl = \"1s\"\ndirect = false\n");
    place.write("project/surgetank.toml", "quiet = \"2s\"\nretry = \"2s\"\ngrace = \"2s\"\n");
    place.env("SURGETANK_QUIET", "3s").env("SURGETANK_RETRY", "3s").env("SURGETANK_GRACE", "");
    let loaded = place.load(Overrides { quiet: some("4s"), ..Overrides::default() }).expect("load");
    let config = loaded.config;
    let seconds = [config.quiet, config.retry, config.grace, config.store_ttl].map(|time| time.as_secs());
    assert_eq!((seconds, config.direct), ([4, 3, 2, 1], false));
    assert_eq!(loaded.files, [place.path("site.toml"), place.path("project/surgetank.toml")]);
}

#[test]
fn every_key_has_one_meaning_in_every_source() {
    let values = [
        ("store", "{elsewhere}"),
        ("state", "{root}/state"),
        ("ordered", "false"),
        ("pool_ordered", "true"),
        ("replicas", "3"),
        ("replicas_at", "close"),
        ("verify", "reread"),
        ("fsync", "store"),
        ("copy_up_bytes_max", "1.5G"),
        ("dirty_bytes_max", "10GiB"),
        ("drain_threads", "9"),
        ("drain_bytes_per_second_max", "5M"),
        ("store_ttl", "100ms"),
        ("quiet", "0"),
        ("sync_after", "7s"),
        ("retry", "2m"),
        ("wait_for_room", "3m"),
        ("grace", "1h"),
        ("deadline", "2100-01-01T00:00Z"),
        ("keep_at_exit", "drain"),
        ("direct", "no"),
        ("door", "seccomp"),
        ("preload", "off"),
        ("preload_skip", "java, mpirun:perl"),
        ("group_socket", "{root}/group.sock"),
        ("metrics", "[::1]:9464"),
        ("metrics_token_file", "none"),
    ];
    let filled = |place: &Place, text: &str| {
        text.replace("{elsewhere}", &place.path("elsewhere").to_string_lossy())
            .replace("{root}", &place.path("").to_string_lossy())
    };
    let check = |place: &Place, config: &Config| {
        assert_eq!((&config.store, &config.over), (&place.path("elsewhere"), &place.path("empty")));
        assert_eq!((&config.state, &config.group_socket), (&place.path("state"), &Some(place.path("group.sock"))));
        assert_eq!((config.ordered, config.direct, config.verify), (false, false, Verify::Reread));
        assert!(config.pool_ordered);
        assert_eq!((config.replicas, config.replicas_at), (3, ReplicasAt::Close));
        assert_eq!((config.door, &config.metrics_token_file), (Way::Seccomp, &TokenFile::Nobody));
        assert_eq!(config.metrics, Some("[::1]:9464".parse().expect("address")));
        assert_eq!((config.fsync, config.keep_at_exit), (Some(FsyncTarget::Store), KeepAtExit::Drain));
        assert_eq!((config.copy_up_bytes_max, config.dirty_bytes_max, config.drain_threads), (3 << 29, 10 << 30, 9));
        assert_eq!((config.drain_bytes_per_second_max, config.store_ttl.as_millis()), (5 << 20, 100));
        assert_eq!((config.quiet.as_secs(), config.retry.as_secs(), config.grace.as_secs()), (0, 120, 3600));
        assert_eq!((config.sync_after.as_secs(), config.wait_for_room.as_secs()), (7, 180));
        assert_eq!(config.deadline.as_ref().map(|deadline| deadline.unix_seconds), Some(4_102_444_800));
        assert_eq!((config.preload, config.preload_skip.join(" ").as_str()), (false, "java mpirun perl"));
        assert_eq!(config.tiers.len(), 2);
        assert_eq!(config.tiers[1].cap_bytes, Some(2 << 30));
        assert_eq!(config.rules.iter().filter(|rule| rule.mode == Some(Mode::Remove)).count(), 1);
    };
    let place = Place::new();
    let tiers = [place.tier(), format!("u={}:2G", place.path("fast2").display())];
    let known: BTreeSet<&str> = key::SCALARS.into_iter().collect();
    assert_eq!(values.iter().map(|(key, _)| *key).chain(["over"]).collect::<BTreeSet<_>>(), known);

    let mut text: String =
        values.iter().map(|(key, value)| format!("{key} = \"{}\"\n", filled(&place, value))).collect();
    text += &format!("over = \"empty\"\ntiers = [\"{}\", \"{}\"]\nrules = [\"*.tmp=remove\"]\n", tiers[0], tiers[1]);
    place.write("given.toml", &text);
    let given = Overrides { config: Some(place.path("given.toml")), ..Overrides::default() };
    check(&place, &Config::load_in(&given, &place.around).expect("file").config);

    let mut by_env = Place { dir: tempfile::tempdir().expect("tempdir"), around: place.around.clone() };
    for (key, value) in values {
        by_env.env(&format!("SURGETANK_{}", key.to_uppercase()), filled(&place, value));
    }
    by_env
        .env("SURGETANK_OVER", place.path("empty"))
        .env("SURGETANK_TIERS", tiers.join("; "))
        .env("SURGETANK_RULES", "*.tmp=remove;");
    check(&place, &Config::load_in(&Overrides::default(), &by_env.around).expect("environment").config);

    let value = |key: &str| values.iter().find(|(name, _)| *name == key).map(|(_, value)| filled(&place, value));
    let all = Overrides {
        over: Some(place.path("empty")),
        config: None,
        store: value("store"),
        tiers: tiers.to_vec(),
        rules: vec!["*.tmp=remove".to_owned()],
        state: value("state").map(PathBuf::from),
        ordered: value("ordered"),
        pool_ordered: value("pool_ordered"),
        replicas: value("replicas"),
        replicas_at: value("replicas_at"),
        verify: value("verify"),
        fsync: value("fsync"),
        copy_up_bytes_max: value("copy_up_bytes_max"),
        dirty_bytes_max: value("dirty_bytes_max"),
        drain_threads: value("drain_threads"),
        drain_bytes_per_second_max: value("drain_bytes_per_second_max"),
        store_ttl: value("store_ttl"),
        quiet: value("quiet"),
        sync_after: value("sync_after"),
        retry: value("retry"),
        wait_for_room: value("wait_for_room"),
        grace: value("grace"),
        deadline: value("deadline"),
        keep_at_exit: value("keep_at_exit"),
        direct: value("direct"),
        door: value("door"),
        preload: value("preload"),
        preload_skip: value("preload_skip"),
        group_socket: value("group_socket"),
        metrics: value("metrics"),
        metrics_token_file: value("metrics_token_file"),
    };
    check(&place, &Config::load_in(&all, &place.around).expect("command line").config);
}

#[test]
fn tables_of_tiers_and_rules_set_every_key() {
    let place = Place::new();
    place.write(
        "project/surgetank.toml",
        "[[tiers]]\nname = \"a\"\npaths = [\"../fast\", \"../fast2\"]\nsize = \"3G\"\nsurvives = \"agent\"\n\n[[rules]]\nmatch = \"*.dat\"\nmode = \"move\"\ntiming = \"last\"\nfsync = \"tier\"\nsize = \"2G\"\ntier = \"a\"\nprefetch = true\npin = true\n",
    );
    let loaded = place.load_as_found().expect("load");
    let tier = &loaded.config.tiers[0];
    assert_eq!((tier.name.as_str(), tier.cap_bytes, tier.survives), ("a", Some(3 << 30), Some(Survives::Agent)));
    assert_eq!(tier.paths, [place.path("fast"), place.path("fast2")]);
    let rule = &loaded.config.rules[0];
    assert_eq!((rule.mode, rule.timing, rule.fsync), (Some(Mode::Move), Some(Timing::Last), Some(FsyncTarget::Tier)));
    assert_eq!(
        (rule.size_bytes, rule.tier.as_deref(), rule.prefetch, rule.pin),
        (Some(2 << 30), Some("a"), true, true)
    );
    assert_eq!((rule.authority, rule.origin.as_str()), (Authority::Project, "surgetank.toml:7"));
    let set = RuleSet::new(&loaded.config.rules).expect("rules");
    assert!(set.why(set.decide(b"x.dat").reason).contains("(surgetank.toml:7)"));
}

#[test]
fn site_rules_override_all_others() {
    let mut place = Place::new();
    place
        .write("site.toml", "rules = [\"scratch/=copy\"]\n")
        .write("project/surgetank.toml", "rules = [\"scratch/**/*.tmp=remove\", \"*.log=keep\"]\n");
    place.env("SURGETANK_RULES", "*.log=move");
    let loaded = place.load(Overrides { rules: vec!["*.l*=remove".to_owned()], ..Overrides::default() }).expect("load");
    assert_eq!(place.mode(&loaded, "scratch/a.tmp"), "copy");
    assert_eq!(place.mode(&loaded, "a.log"), "move", "the longer of the user's two");
    let origins: Vec<&str> = loaded.config.rules.iter().map(|rule| rule.origin.as_str()).collect();
    let site = format!("{}:1", place.path("site.toml").display());
    assert_eq!(origins, [site.as_str(), "surgetank.toml:1", "surgetank.toml:1", "SURGETANK_RULES", "--rule"]);
}

#[test]
fn invalid_values_give_errors_with_place_and_remedy() {
    for (text, expected) in [
        ("quiet = \"5\"", &["surgetank.toml:1", "quiet", "5s"][..]),
        ("\nfsnyc = \"store\"", &["surgetank.toml:2", "'fsnyc'", "'fsync'"]),
        ("zzz = 1", &["surgetank.toml:1", "known are: over, store"]),
        ("quiet = ", &["surgetank.toml:1", "not TOML"]),
        ("\n\nquiet = [1]", &["surgetank.toml:3", "quiet", "a list"]),
        ("drain_threads = 0", &["surgetank.toml:1", "drain_threads", "1 to 256"]),
        ("rules = \"x=copy\"", &["surgetank.toml:1", "[[rules]]"]),
        ("rules = [\"x=copy\",\n\"y=burn\"]", &["surgetank.toml:2", "'burn'", "remove"]),
        ("[[rules]]\nmatch = \"x\"\nmdoe = \"copy\"", &["surgetank.toml:3", "'mode'"]),
        ("[[rules]]\nmode = \"copy\"", &["surgetank.toml:1", "match"]),
        ("[[rules]]\nmatch = \"x\"\ntier = \"tt\"", &["surgetank.toml:1", "no tier 'tt'", "'t'"]),
        ("rules = [\"a[=copy\"]", &["surgetank.toml:1", "a[=copy"]),
        ("[[rules]]\nmatch = \"x\"\npin = \"yes\"", &["surgetank.toml:3", "without quotes"]),
        ("[[tiers]]\nname = \"x\"", &["surgetank.toml:1", "name and path"]),
        ("[[tiers]]\nname = \"x\"\npaht = \"/x\"", &["surgetank.toml:3", "'path"]),
        ("over = \"x\"", &["surgetank.toml:1", "over", "--config"]),
        ("copy_up_bytes_max = -1", &["surgetank.toml:1", "'-1' is not a size"]),
    ] {
        let place = Place::new();
        place.write("project/surgetank.toml", text);
        let error = place.error(Overrides::default());
        for part in expected {
            assert!(error.contains(part), "{text}: {part} is not in\n{error}");
        }
        assert!(error.contains("try:"), "{error}");
    }
    let mut place = Place::new();
    place.env("SURGETANK_VERIFY", "maybe");
    let error = place.error(Overrides::default());
    assert!(error.starts_with("SURGETANK_VERIFY: 'maybe' is none of cache, reread"), "{error}");
    place.around.env.clear();
    place.env("SURGETANK_FSNYC", "store").env("SURGETANK_SOCKET_FD", "3");
    let notes = place.load(Overrides::default()).expect("load").notes;
    assert_eq!(notes, ["SURGETANK_FSNYC means nothing to this program; did you mean SURGETANK_FSYNC?"]);
}

#[test]
fn store_of_each_form_is_resolved_or_refused() {
    let place = Place::new();
    let elsewhere = place.path("elsewhere");
    for text in [
        elsewhere.display().to_string(),
        format!("file://{}", elsewhere.display()),
        format!("file://localhost{}", elsewhere.display()),
        "../elsewhere".to_owned(),
        format!("file://{}", elsewhere.display().to_string().replace('w', "%77")),
    ] {
        let overrides =
            Overrides { over: Some(place.path("empty")), store: Some(text.clone()), ..Overrides::default() };
        assert_eq!(place.load(overrides).expect(&text).config.store, elsewhere, "{text}");
    }
    for (text, part) in [
        ("hdfs://host/x", "not in this build"),
        ("s3://", "s3://BUCKET"),
        ("redis://:hunter2@host", "REDISCLI_AUTH"),
        ("redis://host?prefx=x", "password_file, prefix"),
        ("mongodb://me:hunter2@host/db", "MONGODB_PASSWORD"),
        ("mongodb://host", "data base"),
        ("file://host/x", "three slashes"),
        ("file:///x%zz", "%25"),
        ("../absent", "mkdir -p"),
        ("", "empty"),
    ] {
        let error =
            place.error(Overrides { over: Some(place.path("empty")), store: some(text), ..Overrides::default() });
        assert!(error.contains(part) && error.contains("--store"), "{text}: {error}");
    }
}

#[test]
fn conflicting_directories_are_refused() {
    let place = Place::new();
    place.write("project/data.txt", "x");
    fs::create_dir_all(place.path("project/sub")).expect("mkdir");
    fs::create_dir_all(place.path("empty/only/directories")).expect("mkdir");
    let tier = |path: &str| vec![format!("t={}", place.path(path).display())];
    let base = Overrides::default;
    for (overrides, part) in [
        (Overrides { over: Some("/".into()), ..base() }, "root directory"),
        (Overrides { over: Some("/proc".into()), ..base() }, "can't be served"),
        (Overrides { over: Some("/dev".into()), ..base() }, "can't be served"),
        (Overrides { over: Some(place.path("project/data.txt")), ..base() }, "not a directory"),
        (Overrides { over: Some(place.path("absent")), ..base() }, "No such file"),
        (Overrides { tiers: tier("project/sub"), ..base() }, "is inside the directory to serve"),
        (Overrides { tiers: tier(""), ..base() }, "contains the directory to serve"),
        (Overrides { tiers: tier("absent"), ..base() }, "mkdir -p"),
        (
            Overrides {
                over: Some(place.path("empty")),
                store: some("../elsewhere"),
                tiers: tier("elsewhere"),
                ..base()
            },
            "inside the store",
        ),
        (Overrides { state: some("sub/state").map(PathBuf::from), ..base() }, "state directory"),
        (Overrides { store: some("../elsewhere"), ..base() }, "data.txt"),
        (Overrides { store: some("sub"), ..base() }, "the store is inside"),
        (Overrides { over: Some(place.path("project/sub")), store: some("."), ..base() }, "is inside the store"),
        (Overrides { tiers: [tier("fast"), tier("fast2")].concat(), ..base() }, "two tiers"),
        (Overrides { tiers: vec![format!("t={0},{0}", place.path("fast").display())], ..base() }, "used twice"),
        (Overrides { tiers: (0..256).map(|n| format!("t{n}=/x")).collect(), ..base() }, "more than 255"),
        (Overrides { tiers: vec![format!("t={}", vec!["/x"; 256].join(","))], ..base() }, "more than 255"),
        (Overrides { tiers: vec!["store=/x".to_owned()], ..base() }, "tier's name"),
    ] {
        let error = place.error(overrides.clone());
        assert!(error.contains(part), "{overrides:?}: {part} is not in\n{error}");
    }
    // Directories without files hide nothing.
    let apart = Overrides { over: Some(place.path("empty")), store: some("../elsewhere"), ..base() };
    assert_eq!(place.load(apart).expect("load").config.store, place.path("elsewhere"));
    // A link to the directory is the directory.
    std::os::unix::fs::symlink(place.path("project"), place.path("link")).expect("symlink");
    assert_eq!(
        place.load(Overrides { over: Some(place.path("link")), ..base() }).expect("load").config.over,
        place.path("project")
    );
}

#[test]
fn tiers_passed_over_are_explained_in_notes() {
    let mut place = Place::new();
    // Everything of the test is on one file system: nothing there is faster than the store.
    place.env("SLURM_TMPDIR", place.path("fast2"));
    match place.load_as_found() {
        Ok(loaded) => {
            let paths: Vec<_> = loaded.config.tiers.iter().flat_map(|tier| tier.paths.clone()).collect();
            assert!(!paths.contains(&place.path("fast2")), "{paths:?}");
            assert!(
                loaded.notes.iter().any(|note| note.contains("$SLURM_TMPDIR") && note.contains("no speed")),
                "{:?}",
                loaded.notes
            );
        }
        Err(error) => {
            assert!(error.to_string().contains("--tier") && error.to_string().contains("$SLURM_TMPDIR"), "{error}")
        }
    }
}

#[test]
fn memory_without_other_tiers_is_a_tier() {
    if !std::path::Path::new("/dev/shm").is_dir() {
        return;
    }
    let mut place = Place::new();
    place.around.ram = PathBuf::from("/dev/shm");
    let machine = Machine::default();
    if machine.file_system(&place.path("project")).expect("statfs").is_memory() {
        return;
    }
    let loaded = place.load_as_found().expect("load");
    let ram = &loaded.config.tiers[0];
    assert_eq!((ram.name.as_str(), ram.survives), ("ram", Some(Survives::Agent)));
    let memory = machine.memory().expect("memory");
    assert!(ram.cap_bytes.expect("cap") <= memory.total_bytes / 2);
}

const INI: &str = "# Sea configuration\n[Sea]\nmount_dir = {root}/empty ;\nn_levels = 3 ;\ncache_0 = {root}/fast ;\ncache_1 = SEA_LOCALDIR ; # by name\ncache_2 = {root}/elsewhere\nlog_level = 0 ; # 4 crashes tests\nlog_file = {root}/sea.log ;\nmax_fs = 646971392 ;\nn_threads = 16 ;\n";

fn ini(place: &Place) -> String {
    INI.replace("{root}", place.path("").to_str().expect("utf-8").trim_end_matches('/'))
}

#[test]
fn sea_ini_gives_directory_store_and_tiers() {
    let mut place = Place::new();
    fs::create_dir(place.path("home")).expect("mkdir");
    place.write("home/sea.ini", &ini(&place)).write("home/.sea_flushlist", ".*\\.nii\n");
    place.env("SEA_LOCALDIR", format!("{},{}/", place.path("fast2").display(), place.path("project").display()));
    let by_config = Overrides { config: Some(place.path("home/sea.ini")), ..Overrides::default() };
    let mut by_home = Place { dir: tempfile::tempdir().expect("tempdir"), around: place.around.clone() };
    by_home.env("SEA_HOME", place.path("home"));
    for loaded in [Config::load_in(&by_config, &place.around), Config::load_in(&Overrides::default(), &by_home.around)]
    {
        let loaded = loaded.expect("load");
        let config = &loaded.config;
        assert_eq!((&config.over, &config.store), (&place.path("empty"), &place.path("elsewhere")));
        let tiers: Vec<_> = config.tiers.iter().map(|tier| (tier.name.as_str(), tier.paths.clone())).collect();
        assert_eq!(
            tiers,
            [("cache_0", vec![place.path("fast")]), ("cache_1", vec![place.path("fast2"), place.path("project")])]
        );
        assert_eq!(place.mode(&loaded, "d/a.nii"), "copy");
        assert_eq!(loaded.files, [place.path("home/sea.ini"), place.path("home/.sea_flushlist")]);
        assert!(config.rules[0].origin.ends_with("home/.sea_flushlist:1"), "{}", config.rules[0].origin);
    }
    // Served where Sea's last level is: it is its own store. Anywhere else: not Sea's store.
    let over = |name: &str| Overrides { over: Some(place.path(name)), ..by_config.clone() };
    let tier = vec![place.tier()];
    let there = Config::load_in(&Overrides { tiers: tier.clone(), ..over("elsewhere") }, &place.around).expect("load");
    assert_eq!(there.config.store, place.path("elsewhere"));
    let apart = Config::load_in(&Overrides { tiers: tier, ..over("home") }, &place.around).expect("load");
    assert_eq!(apart.config.store, place.path("home"));
    assert!(apart.notes.iter().any(|note| note.contains("not taken as the store")), "{:?}", apart.notes);
}

#[test]
fn sea_ini_with_errors_is_refused_with_its_line() {
    for (from, to, part) in [
        ("n_levels = 3", "n_levels = many", "sea.ini:4"),
        ("cache_1 =", "cache_7 =", "cache_1 is missing"),
        ("[Sea]", "[Sea]\nnonsense", "sea.ini:3"),
        ("{root}/elsewhere", "/a,/b", "sea.ini:7"),
        ("{root}/fast ;", ";", "cache_0 has no path"),
        ("mount_dir = {root}/empty", "mount_dir = /absent", "sea.ini:3"),
    ] {
        let place = Place::new();
        let root = place.path("").to_str().expect("utf-8").trim_end_matches('/').to_owned();
        let text = INI.replace(from, to).replace("{root}", &root);
        place.write("project/sea.ini", &text);
        let error = place.load_as_found().expect_err(part).to_string();
        assert!(error.contains(part), "{part} is not in\n{error}");
    }
}

#[test]
fn sea_lists_give_modes_of_their_table() {
    // (flush, evict, prefetch) → modes of a.nii, last.nii, x.log, other
    let flush = Some(".*\\.nii\n\n");
    let evict = Some("last\\.nii\r\n.*\\.log");
    for (lists, modes) in [
        ([flush, evict, None], ["copy", "move", "remove", "keep"]),
        ([flush, None, None], ["copy", "copy", "keep", "keep"]),
        ([Some(".*\n"), evict, None], ["copy", "move", "move", "copy"]),
        ([None, evict, None], ["copy", "move", "move", "copy"]),
        ([Some("\n \n"), evict, None], ["copy", "remove", "remove", "copy"]),
        ([Some(""), Some(""), Some("")], ["copy", "copy", "copy", "copy"]),
        ([None, None, Some("a.*")], ["copy", "copy", "copy", "copy"]),
    ] {
        let place = Place::new();
        for (name, text) in [".sea_flushlist", ".sea_evictlist", ".sea_prefetchlist"].iter().zip(lists) {
            if let Some(text) = text {
                place.write(&format!("project/{name}"), text);
            }
        }
        let loaded = place.load(Overrides::default()).expect("load");
        let found = ["a.nii", "last.nii", "x.log", "dir/other"].map(|path| place.mode(&loaded, path));
        assert_eq!(found, modes, "{lists:?}");
        let set = RuleSet::new(&loaded.config.rules).expect("rules");
        assert_eq!(set.decide(b"a.nii").prefetch, lists[2] == Some("a.*"));
        assert_eq!(
            loaded.notes.is_empty(),
            !modes.contains(&"keep") && lists != [None, evict, None],
            "{:?}",
            loaded.notes
        );
    }
}

#[test]
fn sea_lists_with_errors_are_refused_with_their_line() {
    for (text, parts) in
        [("ok\n(\n", &[".sea_flushlist:2", "unclosed group"][..]), ("*.nii$\n", &[".sea_flushlist:1", "'.*.nii$'"])]
    {
        let place = Place::new();
        place.write("project/.sea_flushlist", text);
        let error = place.error(Overrides::default());
        for part in parts {
            assert!(error.contains(part), "{part} is not in\n{error}");
        }
    }
    let place = Place::new();
    fs::write(place.path("project/.sea_evictlist"), b"ok\nbad\xff\n").expect("write");
    let error = place.error(Overrides::default());
    assert!(error.contains(".sea_evictlist:2") && error.contains("UTF-8"), "{error}");
}

#[test]
fn surgetank_toml_overrides_sea_files() {
    let mut place = Place::new();
    place
        .write("project/sea.ini", &ini(&place))
        .write("project/.sea_evictlist", ".*\\.log\n")
        .write("project/.sea_flushlist", ".*\\.nii\n");
    place.write("project/surgetank.toml", &format!("tiers = [\"{}\"]\nrules = [\"*.log=copy\"]\n", place.tier()));
    place.env("SEA_LOCALDIR", place.path("fast2"));
    let loaded = place.load_as_found().expect("load");
    assert_eq!(loaded.config.tiers.len(), 1);
    assert_eq!(["a.log", "a.nii", "b"].map(|path| place.mode(&loaded, path)), ["copy", "copy", "keep"]);
}

#[test]
fn every_key_has_a_row_in_the_documentation() {
    let page = include_str!("../../../../docs/configuration.md");
    let rows: Vec<&str> = page.lines().filter(|line| line.starts_with('|')).collect();
    let row_of =
        |key: &str| rows.iter().any(|row| row.split('|').nth(1).is_some_and(|cell| cell.contains(&format!("`{key}`"))));
    for key in key::SCALARS.iter().chain(&key::LISTS).chain(&key::TIER_KEYS).copied().chain(key::rule_keys()) {
        assert!(row_of(key), "docs/configuration.md has no row for `{key}`");
    }
    let place = Place::new();
    let config = serde_json::to_value(place.load(Overrides::default()).expect("load").config).expect("json");
    // `again` is derived from the other keys, and `pool` comes from options.
    for field in config.as_object().expect("object").keys().filter(|field| !["again", "pool"].contains(&field.as_str()))
    {
        assert!(key::SCALARS.iter().chain(&key::LISTS).any(|key| key == field), "Config::{field} is not a key");
    }
    for name in crate::rule::defaults::LAST_NAMES {
        assert!(page.contains(&format!("`{name}`")), "the built-in rule {name} is not documented");
    }
}

/// `surgetank status` in `/`, in the state directory or above it was refused: nothing could be served there.
#[test]
fn state_root_of_unservable_directory_is_known() {
    let mut place = Place::new();
    let asked = |place: &Place, overrides: &Overrides| load::state_root(overrides, &place.around).expect("state root");
    place.around.cwd = "/".into();
    assert_eq!(asked(&place, &Overrides::default()), PathBuf::from("/var/tmp/surgetank-7"));
    place.around.cwd = place.path("");
    place.write("surgetank.toml", "state = \"here\"\n");
    assert_eq!(asked(&place, &Overrides::default()), place.path("here"));
    // A project file that is broken is not asked where it does not matter.
    place.write("surgetank.toml", "nonsense\n");
    assert!(load::state_root(&Overrides::default(), &place.around).is_err());
    place.env("SURGETANK_STATE", "there");
    assert_eq!(asked(&place, &Overrides::default()), place.path("there"));
    let given = Overrides { state: Some("given".into()), ..Overrides::default() };
    assert_eq!(asked(&place, &given), place.path("given"));
}
