//! The rows. In values `{over}` is the directory, `{tier}` the tier, `{file}` a plain file, `{absent}` a name that does not
//! exist, `{dir}` the directory around them, `{bytes}` a byte that is not UTF-8.

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
    /// `SURGETANK_TIERS`; empty: as the file says.
    pub tiers: &'static str,
    pub says: &'static [&'static str],
}

/// What a verb has to be given besides the option in question.
pub const REST: &[(&str, &[&str])] = &[
    ("run", &["--", "true"]),
    ("why", &["a"]),
    ("evict", &["a"]),
    ("pin", &["a"]),
    ("unpin", &["a"]),
    ("prefetch", &["a"]),
    ("hint", &["mode=keep", "a"]),
    ("stage-in", &["{file}", "--to", "{over}"]),
    ("stage-out", &["{file}", "--to", "{over}"]),
    ("model", &["{file}"]),
    ("advise", &["{file}"]),
];

/// For each key a value that is refused, wherever it is written: in a file, a variable, an option.
pub const KEYS: &[(&str, &str, &[&str])] = &[
    ("over", "{absent}", &["absent", "No such file"]),
    ("store", "gopher://x/y", &["'gopher:'"]),
    ("state", "{over}/state", &["lies inside", "state"]),
    ("tiers", "fast", &["'fast' has no '='"]),
    ("rules", "*.tmp", &["'*.tmp' has no '='"]),
    ("ordered", "maybe", &["'maybe' is none of true, false"]),
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

pub const OPTIONS: &[Refused] = &[];

pub const ENTRIES: &[Entry] = &[];

pub const VARIABLES: &[(&str, &str, &str, i32, &[&str])] = &[];

pub const FILES: &[Broken] = &[];
