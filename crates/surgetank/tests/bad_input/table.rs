//! The rows. In values `{over}` is the directory, `{tier}` the tier, `{file}` a plain file, `{absent}` a name that
//! does not exist. `{dir}` is the directory around them, `{bytes}` a byte that is not UTF-8.

/// A value that an option refuses. `verb`: `*` for every verb that has the option and no row of its own.
pub struct Refused {
    pub verb: &'static str,
    pub option: &'static str,
    pub value: &'static str,
    pub exit: i32,
    pub says: &'static [&'static str],
    /// In place of the verb's other words.
    pub rest: Option<&'static [&'static str]>,
}

/// Words that a verb refuses as one of its arguments.
pub struct Entry {
    pub verb: &'static str,
    pub argument: &'static str,
    pub words: &'static [&'static str],
    pub exit: i32,
    pub says: &'static [&'static str],
}

/// A file of the configuration in the directory.
pub struct Broken {
    pub file: &'static str,
    pub text: &'static str,
    /// `SURGETANK_TIERS`; if empty, the file's tiers are used.
    pub tiers: &'static str,
    pub says: &'static [&'static str],
}

/// Words that a verb needs besides the option in question.
pub const REST: &[(&str, &[&str])] = &[
    ("run", &["--", "true"]),
    ("why", &["a"]),
    ("locate", &["a"]),
    ("evict", &["a"]),
    ("pin", &["a"]),
    ("unpin", &["a"]),
    ("prefetch", &["a"]),
    ("hint", &["mode=keep", "a"]),
    ("stage-in", &["{file}", "--to", "{over}"]),
    ("stage-out", &["{file}", "--to", "{over}"]),
    ("calibrate", &["--store={over}"]),
    ("model", &["{file}"]),
    ("advise", &["{file}"]),
];

/// For each key a value that is refused in a file, a variable and an option.
pub const KEYS: &[(&str, &str, &[&str])] = &[
    ("over", "{absent}", &["absent", "No such file"]),
    ("store", "gopher://x/y", &["'gopher:'"]),
    ("state", "{over}/state", &["is inside", "state"]),
    ("tiers", "fast", &["'fast' has no '='"]),
    ("rules", "*.tmp", &["'*.tmp' has no '='"]),
    ("ordered", "maybe", &["'maybe' is none of true, false"]),
    ("pool_ordered", "maybe", &["'maybe' is none of true, false"]),
    ("replicas", "0", &["'0' is not a number from 1 to 16"]),
    ("replicas_at", "never", &["'never' is none of later, close"]),
    ("verify", "twice", &["'twice' is none of cache, reread"]),
    ("fsync", "sometimes", &["'sometimes' is none of auto, tier, store"]),
    ("copy_up_bytes_max", "much", &["'much'"]),
    ("dirty_bytes_max", "-1", &["'-1'"]),
    ("drain_threads", "0", &["'0' is not a number from 1 to 256"]),
    ("drain_bytes_per_second_max", "fast", &["'fast'"]),
    ("store_ttl", "5", &["'5'"]),
    ("quiet", "long", &["'long'"]),
    ("sync_after", "soon", &["'soon'"]),
    ("retry", "5 parsecs", &["'5 parsecs'"]),
    ("wait_for_room", "-3s", &["'-3s'"]),
    ("grace", "s", &["'s'"]),
    ("deadline", "tomorrow", &["'tomorrow'"]),
    ("keep_at_exit", "burn", &["'burn' is none of leave, drain, drop"]),
    ("direct", "2", &["'2' is none of true, false"]),
    ("door", "window", &["'window' is none of auto, fuse, seccomp"]),
    ("preload", "sure", &["'sure' is none of true, false"]),
    ("preload_skip", "/bin/sh", &["'/bin/sh' is a path"]),
    ("group_socket", "", &["the path is empty"]),
    ("metrics", "http://x", &["'http://x' is none of PORT"]),
    ("metrics_token_file", "", &["the path is empty"]),
];

const fn of(
    verb: &'static str,
    option: &'static str,
    value: &'static str,
    exit: i32,
    says: &'static [&'static str],
) -> Refused {
    Refused { verb, option, value, exit, says, rest: None }
}

/// The same row with other words besides.
const fn with(row: Refused, rest: &'static [&'static str]) -> Refused {
    Refused { rest: Some(rest), ..row }
}

const MODEL: &[&str] = &["--calibration={calibration}", "{workload}"];
const NO_AGENT: &[&str] = &["no agent of yours serves"];

/// The values of options that are keys are in [`KEYS`].
pub const OPTIONS: &[Refused] = &[
    of("*", "--config", "{absent}", 2, &["absent does not exist"]),
    of("*", "--config", "{over}", 2, &["over can't be read", "Is a directory", "name a file"]),
    of("*", "--config", "{file}", 2, &["file:1: this is not TOML"]),
    of("*", "--over", "{absent}", 2, &["--over", "absent can't be used", "mkdir -p"]),
    of("*", "--over", "{file}", 2, &["--over", "it is not a directory"]),
    of("*", "--over", "/", 2, &["--over", "the root directory can't be served"]),
    of("*", "--over", "/proc", 2, &["--over", "/proc can't be served"]),
    of("*", "--store", "gopher://x/y", 2, &["--store", "'gopher:'"]),
    of("*", "--store", "{absent}", 2, &["--store", "mkdir -p"]),
    of("*", "--store", "{file}", 2, &["--store", "it is not a directory", "another directory"]),
    of("*", "--store", "file://host/path", 2, &["--store", "three slashes"]),
    of("*", "--tier", "fast", 2, &["--tier", "'fast' has no '='"]),
    of("*", "--tier", "a=/dev/null", 2, &["--tier", "/dev/null", "name a directory of yours"]),
    of("*", "--tier", "a={absent}", 2, &["--tier", "mkdir -p"]),
    of("*", "--tier", "a={file}/below", 2, &["--tier", "name a directory of yours"]),
    of("*", "--tier", "a={tier}:much", 2, &["--tier", "much"]),
    of("*", "--tier", "a={tier},{tier}", 2, &["--tier", "is used twice"]),
    of("*", "--tier", "store={tier}", 2, &["--tier", "'store' can't be a tier's name"]),
    of("*", "--tier", "a={over}", 2, &["--tier", "is inside the directory to serve"]),
    of("*", "--state", "{over}/state", 2, &["--state", "is inside the directory to serve"]),
    of("*", "--rule", "*.tmp=burn", 2, &["--rule", "'burn' is none of"]),
    of("*", "--rule", "=keep", 2, &["--rule"]),
    of("*", "--rule", "[=keep", 2, &["--rule"]),
    of("*", "--state", "{absent}{bytes}", 2, &["--state", "its path is not UTF-8"]),
    of("*", "--group-socket", "", 2, &["--group-socket", "empty"]),
    of("*", "--pool", "a/b", 2, &["--pool a/b", "letters"]),
    of("*", "--pool", "", 2, &["--pool", "letters"]),
    of("*", "--pool-host", "", 2, &["--pool-host", "empty"]),
    of("*", "--pool-secret", "", 2, &["--pool-secret"]),
    of("*", "--pool-lease", "soon", 2, &["--pool-lease", "soon"]),
    of("*", "--pool-lease", "900ms", 2, &["--pool-lease", "from 1s"]),
    of("*", "--registry-password-file", "", 2, &["--registry-password-file"]),
    of("*", "--role", "burst", 2, &["--role", "'burst' is not one of compute, storage"]),
    of("*", "--registry", "http://host", 2, &["--registry", "redis://"]),
    of("*", "--registry", "redis://user:word@host", 2, &["--registry", "password", "--registry-password-file"]),
    of("*", "--metrics-token-file", "", 2, &["--metrics-token-file", "empty"]),
    of("run", "--json", "{absent}/x", 2, &["--json", "absent/x cannot be written"]),
    of("run", "--json", "{over}", 2, &["--json", "over cannot be written"]),
    with(of("calibrate", "--store", "{absent}", 2, &["--store", "absent can't be looked at"]), &[]),
    with(of("calibrate", "--store", "s3://bucket/x", 2, &["--store", "only a directory is measured"]), &[]),
    of("calibrate", "--out", "{over}", 2, &["over", "--out"]),
    of("calibrate", "--out", "{file}/below", 2, &["file/below", "--out"]),
    of("status", "--socket", "{absent}", 1, &["no agent answers at", "absent"]),
    of("status", "--state", "{file}", 1, &["file cannot be used", "it is not a directory"]),
    of("report", "--state", "{file}", 1, &["file cannot be used", "it is not a directory"]),
    of("wait", "--state", "{file}", 1, &["file cannot be used", "it is not a directory"]),
    of("why", "--state", "{file}", 1, &["file cannot be used", "it is not a directory"]),
    of("locate", "--state", "{file}", 1, &["file cannot be used", "it is not a directory"]),
    of("evict", "--state", "{file}", 1, &["file cannot be used", "it is not a directory"]),
    of("pin", "--state", "{file}", 1, &["file cannot be used", "it is not a directory"]),
    of("unpin", "--state", "{file}", 1, &["file cannot be used", "it is not a directory"]),
    of("prefetch", "--state", "{file}", 1, &["file cannot be used", "it is not a directory"]),
    of("hint", "--state", "{file}", 1, &["file cannot be used", "it is not a directory"]),
    of("refresh", "--state", "{file}", 1, &["file cannot be used", "it is not a directory"]),
    of("umount", "--state", "{file}", 1, &["file cannot be used", "it is not a directory"]),
    of("stage-in", "--state", "{file}", 1, &["file cannot be used", "it is not a directory"]),
    of("stage-out", "--state", "{file}", 1, &["file cannot be used", "it is not a directory"]),
    of("report", "--html", "{absent}/x", 1, &["absent/x cannot be written", "--html"]),
    of("help", "--man", "{file}", 1, &["cannot be written", "file", "surgetank help --man DIR"]),
    of("wait", "--timeout", "soon", 2, &["--timeout", "`soon` is not a unit of time"]),
    of("umount", "--timeout", "-1", 2, &["--timeout"]),
    with(of("hint", "--from", "{absent}", 1, &["--from", "absent cannot be read"]), &[]),
    with(of("hint", "--from", "{file}", 2, &["file, line 1: this is not a hint"]), &[]),
    of("gc", "--older-than", "old", 2, &["--older-than", "`old` is not a unit of time"]),
    of("gc", "--unused-for", "1y", 2, &["--unused-for", "`y` is not a unit of time"]),
    with(of("*", "--manifest", "{absent}", 2, &["--manifest", "absent cannot be read"]), &[]),
    with(of("*", "--manifest", "{file}", 2, &["file, line 1: text", "it is not a source, a tab"]), &[]),
    with(of("*", "--to", "gopher://x/y", 2, &["'gopher:'", "surgetank help stores"]), &["{file}"]),
    with(of("*", "--to", "{file}/below", 1, &["file", "Not a directory"]), &["{file}"]),
    with(of("scavenge", "--to", "{file}", 1, &["--to", "file cannot be written"]), &[]),
    of("stage-in", "--deadline", "soon", 2, &["--deadline", "`soon` is not a unit of time"]),
    of("stage-out", "--deadline", "soon", 2, &["--deadline", "`soon` is not a unit of time"]),
    of("stage-in", "--verify", "twice", 2, &["--verify", "cache or reread"]),
    of("stage-out", "--verify", "twice", 2, &["--verify", "cache or reread"]),
    of("*", "--calibration", "{absent}", 2, &["absent can't be read", "surgetank calibrate"]),
    of("*", "--calibration", "{file}", 2, &["calibration"]),
    with(of("model", "--tier", "none", 2, &["--tier", "no tier none"]), MODEL),
    with(of("advise", "--tier", "none", 2, &["--tier", "no tier none"]), MODEL),
    with(of("model", "--tier", "ram:much", 2, &["--tier", "much"]), MODEL),
    with(of("advise", "--tier", "ram:much", 2, &["--tier", "much"]), MODEL),
    of("*", "--nodes", "0", 2, &["--nodes", "1..=1024"]),
    with(of("*", "--memory", "much", 2, &["--memory", "much"]), MODEL),
    of("*", "--processes", "0", 2, &["--processes", "1..=4096"]),
    of("*", "--mode", "quick", 2, &["--mode", "in-memory"]),
    with(of("*", "--sweep", "ram", 2, &["--sweep", "there is no ="]), MODEL),
];

const fn entry(
    verb: &'static str,
    argument: &'static str,
    words: &'static [&'static str],
    exit: i32,
    says: &'static [&'static str],
) -> Entry {
    Entry { verb, argument, words, exit, says }
}

pub const ENTRIES: &[Entry] = &[
    entry("run", "command", &[], 2, &["<COMMAND>"]),
    entry("run", "command", &["true"], 2, &["'true'"]),
    entry("mount", "directory", &["{absent}"], 2, &["absent can't be used"]),
    entry("umount", "directory", &["{absent}"], 1, NO_AGENT),
    entry("status", "directory", &["{absent}"], 1, NO_AGENT),
    entry("report", "run", &["2020"], 2, &["no run 2020 is recorded", "--list"]),
    entry("report", "run", &["--json", "--html=x"], 2, &["--json", "--html"]),
    entry("wait", "paths", &["{absent}"], 2, &["absent cannot be found"]),
    entry("why", "path", &["{absent}"], 1, NO_AGENT),
    entry("locate", "paths", &["{absent}"], 1, NO_AGENT),
    entry("evict", "paths", &["{absent}"], 1, NO_AGENT),
    entry("pin", "paths", &[], 2, &["<PATH>"]),
    entry("unpin", "paths", &["{absent}"], 1, NO_AGENT),
    entry("prefetch", "paths", &["{absent}"], 1, NO_AGENT),
    entry("hint", "words", &[], 2, &["there is no hint"]),
    entry("hint", "words", &["mode=keep"], 2, &["there is no path"]),
    entry("hint", "words", &["mode=burn", "a"], 2, &["mode: 'burn' is none of"]),
    entry("hint", "words", &["mod=keep", "a"], 2, &["did you mean 'mode'"]),
    entry("hint", "words", &["speed=9", "a"], 1, &["the hint 'speed' is not known here", "no agent of yours serves"]),
    entry("refresh", "directory", &["{absent}"], 1, NO_AGENT),
    entry("stage-in", "sources", &[], 2, &["<SOURCE>"]),
    entry("stage-in", "sources", &["gopher://x/y", "--to={over}"], 2, &["'gopher:'"]),
    entry("stage-out", "sources", &["{file}"], 2, &["--to"]),
    entry("fsck", "directory", &["{absent}"], 2, &["absent can't be used"]),
    entry("scavenge", "directory", &["{absent}"], 2, &["absent can't be used"]),
    entry("model", "workload", &["--calibration={calibration}", "{absent}"], 2, &["absent", "can't be read"]),
    entry("model", "workload", &["--calibration={calibration}", "{file}"], 2, &["file"]),
    entry("advise", "workload", &["--calibration={calibration}", "{absent}"], 2, &["absent", "can't be read"]),
    entry("workflow", "words", &["explain", "x"], 127, &["python3 cannot be executed"]),
    entry("completions", "shell", &["basch"], 2, &["'basch'", "bash", "zsh"]),
    entry("help", "about", &["configuraton"], 2, &["'configuraton'", "surgetank help configuration"]),
];

/// Variables that are not keys, and the effect of a bad value: name, value, verb, exit code, fragments of the output.
pub const VARIABLES: &[(&str, &str, &str, i32, &[&str])] = &[
    ("SURGETANK_TIERS", ";;", "plan", 2, &["SURGETANK_TIERS: the list of tiers is empty"]),
    ("SURGETANK_TIERS", "fast={tier}/{bytes}", "plan", 2, &["SURGETANK_TIERS", "not UTF-8"]),
    ("SURGETANK_RULES", "*.tmp", "plan", 2, &["SURGETANK_RULES"]),
    ("SURGETANK_CONFIG", "{absent}", "plan", 2, &["absent does not exist", "SURGETANK_CONFIG"]),
    ("SURGETANK_CONFIG", "{absent}{bytes}", "plan", 2, &["does not exist", "SURGETANK_CONFIG"]),
    ("SURGETANK_CONFIG", "{over}", "plan", 2, &["Is a directory"]),
    ("SURGETANK_TMP", "{absent}", "plan", 0, &["$SURGETANK_TMP", "No such file"]),
    ("SURGETANK_LOG", "=,=", "doctor", 0, &["SURGETANK_LOG", "`info` is logged"]),
    ("SURGETANK_LOG", "{bytes}", "doctor", 0, &["SURGETANK_LOG", "not UTF-8"]),
    ("SURGETANK_POOL", "a/b", "mount", 2, &["SURGETANK_POOL=a/b", "letters"]),
    // For programs under the run, which read them themselves.
    ("SURGETANK_REPORT", "{bytes}", "plan", 0, &[]),
    ("SURGETANK_SHIM", "{bytes}", "plan", 0, &[]),
    ("SURGETANK_FSYNK", "tier", "plan", 0, &["SURGETANK_FSYNK", "did you mean SURGETANK_FSYNC?"]),
    ("SLURM_JOB_END_TIME", "tomorrow", "plan", 0, &["SLURM_JOB_END_TIME=tomorrow"]),
    ("SLURM_JOB_END_TIME", "1", "plan", 0, &["SLURM_JOB_END_TIME=1 has passed"]),
];

const fn toml(text: &'static str, says: &'static [&'static str]) -> Broken {
    Broken { file: "surgetank.toml", text, tiers: "fast={tier}", says }
}

/// A file whose tiers are the ones in use.
const fn tiers(text: &'static str, says: &'static [&'static str]) -> Broken {
    Broken { file: "surgetank.toml", text, tiers: "", says }
}

const fn sea(file: &'static str, text: &'static str, says: &'static [&'static str]) -> Broken {
    Broken { file, text, tiers: "fast={tier}", says }
}

pub const FILES: &[Broken] = &[
    toml("quiet = 50ms\n", &["surgetank.toml:1: this is not TOML", "strings need quotes"]),
    toml("\nfsync = \"{bytes}\"\n", &["surgetank.toml:2: this line is not UTF-8", "save the file as UTF-8"]),
    toml("fsynk = \"tier\"\n", &["surgetank.toml:1: there is no key 'fsynk'", "'fsync'"]),
    toml("drain_threads = 0x10\n", &["surgetank.toml:1", "a number that is not decimal"]),
    toml("tiers = 3\n", &["surgetank.toml:1: tiers: expected a list, found a number;"]),
    toml("rules = \"*.tmp=keep\"\n", &["surgetank.toml:1: rules: expected a list, found a single string"]),
    toml("tiers = [3]\n", &["surgetank.toml:1: tiers: a tier is a string or a table, not a number"]),
    toml("rules = [true]\n", &["surgetank.toml:1", "a rule is a string or a table, not true or false"]),
    tiers("tiers = []\n", &["surgetank.toml:1: the list of tiers is empty"]),
    tiers("[[tiers]]\nname = \"a b\"\n", &["surgetank.toml:2", "'a b' can't be a tier's name"]),
    tiers("[[tiers]]\npath = \"{absent}\"\nname = \"a\"\n", &["surgetank.toml:1", "mkdir -p"]),
    tiers("[[tiers]]\npaths = \"{tier}\"\nname = \"a\"\n", &["surgetank.toml:2: paths: expected a list"]),
    tiers("[[tiers]]\nsize = \"much\"\nname = \"a\"\npath = \"{tier}\"\n", &["surgetank.toml:2: size", "'much'"]),
    tiers("[[tiers]]\nsurvives = \"all\"\nname = \"a\"\npath = \"{tier}\"\n", &["surgetank.toml:2: survives", "'all'"]),
    tiers("[[tiers]]\nspeed = 9\n", &["surgetank.toml:2: there is no key 'speed'", "known are: name"]),
    toml("[[rules]]\nmatch = \"[\"\nmode = \"keep\"\n", &["surgetank.toml:1", "["]),
    toml("[[rules]]\nmode = \"burn\"\n", &["surgetank.toml:2: mode: 'burn'"]),
    toml("[[rules]]\ntiming = \"never\"\n", &["surgetank.toml:2: timing: 'never'"]),
    toml("[[rules]]\nfsync = \"auto\"\n", &["surgetank.toml:2: fsync: 'auto' is none of tier, store"]),
    toml("[[rules]]\nsize = \"much\"\n", &["surgetank.toml:2: size"]),
    toml("[[rules]]\ntier = \"none\"\nmatch = \"*\"\n", &["surgetank.toml:1: there is no tier 'none'"]),
    toml("[[rules]]\nprefetch = \"true\"\n", &["surgetank.toml:2: prefetch: expected true or false"]),
    toml("[[rules]]\npin = 1\n", &["surgetank.toml:2: pin: expected true or false"]),
    toml("[[rules]]\ncompress = \"zstd:99\"\n", &["surgetank.toml:2: compress: 'zstd:99'"]),
    toml("[[rules]]\ndedup = \"no\"\n", &["surgetank.toml:2: dedup: expected true or false"]),
    toml("[[rules]]\nreplicas = 17\n", &["surgetank.toml:2: replicas: '17' is not a number from 1 to 16"]),
    toml(
        "[[rules]]\ncollocate = \"\"\n",
        &["surgetank.toml:2: collocate: '' is neither local nor the name of a group"],
    ),
    toml("[[rules]]\nversions = 0\n", &["surgetank.toml:2: versions: '0' is not a number from 1 to 100"]),
    toml("[[rules]]\ndrain_share = \"0%\"\n", &["surgetank.toml:2: drain_share: '0%' is not a percentage"]),
    toml("[[rules]]\nconsistency = true\n", &["surgetank.toml:2: consistency: 'true' is none of posix, sealed"]),
    toml("[[rules]]\nreplicas_at = 1\n", &["surgetank.toml:2: replicas_at: '1' is none of later, close"]),
    toml("[[rules]]\nmatsh = \"*\"\n", &["surgetank.toml:2: there is no key 'matsh'", "'match'"]),
    toml("[[rules]]\npin = true\n", &["surgetank.toml:1: rules: a rule needs match"]),
    sea("sea.ini", "[Sea]\nnonsense\n", &["sea.ini:2: 'nonsense' is neither [section] nor key = value"]),
    sea("sea.ini", "[Sea]\nn_levels = many\n", &["sea.ini:2: n_levels = 'many'"]),
    sea("sea.ini", "[Sea]\nn_levels = 2\ncache_0 = {tier}\n", &["sea.ini: cache_1 is missing"]),
    sea("sea.ini", "[Sea]\ncache_0 = ,\ncache_1 = {over}\n", &["sea.ini:2: cache_0 has no path"]),
    sea("sea.ini", "[Sea]\ncache_0 = {tier}\ncache_1 = {over},{tier}\n", &["sea.ini:3: cache_1 is the last level"]),
    sea("sea.ini", "[Sea]\n# {bytes}\n", &["sea.ini:2: this line is not UTF-8"]),
    sea(".sea_flushlist", "a\n*.nii\n", &[".sea_flushlist:2"]),
    sea(".sea_evictlist", "(\n", &[".sea_evictlist:1"]),
    sea(".sea_prefetchlist", "a\n\n{bytes}\n", &[".sea_prefetchlist:3: this line is not UTF-8"]),
];
