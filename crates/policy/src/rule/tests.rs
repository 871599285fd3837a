//! Rules over many paths, compared with a matcher that is slow and simple.

use proptest::prelude::*;

use super::*;

fn rule(text: &str, authority: Authority) -> RuleConfig {
    let (pattern, mode) = text.rsplit_once('=').expect("GLOB=MODE");
    let pattern = Pattern::Glob(pattern.to_owned());
    RuleConfig { mode: Some(mode_of(mode)), ..RuleConfig::empty(pattern, authority, "--rule") }
}

fn sea(text: &str, mode: Mode, origin: &str) -> RuleConfig {
    RuleConfig {
        pattern: Pattern::Regex(text.to_owned()),
        mode: Some(mode),
        origin: origin.to_owned(),
        ..rule("x=copy", Authority::Project)
    }
}

fn mode_of(name: &str) -> Mode {
    [Mode::Keep, Mode::Copy, Mode::Move, Mode::Remove]
        .into_iter()
        .find(|mode| mode_name(*mode) == name)
        .expect("a mode")
}

fn matches(pattern: &str, path: &[u8]) -> bool {
    let set = RuleSet::new(&[rule(&format!("{pattern}=remove"), Authority::Project)]).expect(pattern);
    set.decide(path).mode == Mode::Remove
}

#[test]
fn patterns_match_as_in_gitignore() {
    /// Pattern, what it matches, what it does not.
    type Row = (&'static str, &'static [&'static [u8]], &'static [&'static [u8]]);
    let table: [Row; 17] = [
        ("*.tmp", &[b"a.tmp", b"d/e/a.tmp", b"x.tmp/inside", b".tmp"], &[b"a.tmp2", b"tmp"]),
        ("build", &[b"build", b"build/x", b"a/build/x/y", b"a/build"], &[b"builds", b"a/rebuild/x"]),
        ("build/", &[b"build/x", b"a/build/x/y"], &[b"build", b"a/build"]),
        ("/build", &[b"build", b"build/x/y"], &[b"a/build", b"a/build/x"]),
        ("results/raw", &[b"results/raw", b"results/raw/a/b"], &[b"a/results/raw", b"results/rawer"]),
        ("results/*.nii", &[b"results/a.nii", b"results/a.nii/b"], &[b"results/sub/a.nii", b"a/results/a.nii"]),
        ("results/**/*.nii", &[b"results/a.nii", b"results/s/t/a.nii"], &[b"a.nii"]),
        ("**/logs", &[b"logs", b"a/logs/x"], &[b"a/logs2"]),
        ("**", &[b"a", b"a/b", b"\xff\xfe"], &[]),
        ("*", &[b"a", b"a/b", b"\xff\xfe", b".hidden"], &[]),
        ("a?c", &[b"abc", b"x/abc"], &[b"ac", b"a/c", b"abbc"]),
        ("[0-9]*.dat", &[b"1.dat", b"x/9z.dat"], &[b"a1.dat"]),
        ("[!a]x", &[b"bx"], &[b"ax"]),
        ("*.{png,jpg}", &[b"a.png", b"b/c.jpg"], &[b"a.gif"]),
        ("{a/b,c}", &[b"a/b", b"c", b"c/d"], &[b"x/c", b"b"]),
        (r"\*x", &[b"*x"], &[b"ax"]),
        ("caf\u{e9}*", &[b"caf\xc3\xa9-1\xff"], &[b"caf\xe9"]),
    ];
    for (pattern, yes, no) in table {
        for path in yes {
            assert!(matches(pattern, path), "{pattern} should match {}", path.escape_ascii());
        }
        for path in no {
            assert!(!matches(pattern, path), "{pattern} should not match {}", path.escape_ascii());
        }
    }
}

#[test]
fn invalid_patterns_give_errors_with_rule_and_origin() {
    for (pattern, hint) in
        [("", "empty"), ("/", "empty"), ("!x", "negated"), ("../x", ".."), ("a[", "class"), ("a{b", "")]
    {
        let mut bad = rule(&format!("{pattern}=copy"), Authority::Project);
        bad.origin = "surgetank.toml:7".to_owned();
        let error = RuleSet::new(&[rule("*=copy", Authority::Project), bad]).expect_err(pattern).to_string();
        assert!(
            error.contains("surgetank.toml:7") && error.contains(&format!("{pattern}=copy")) && error.contains(hint),
            "{error}"
        );
    }
    let error = RuleSet::new(&[sea("*.nii$", Mode::Copy, ".sea_flushlist:3")]).expect_err("regex").to_string();
    assert!(error.contains(".sea_flushlist:3") && error.contains("'.*.nii$'"), "{error}");
    assert!(RuleSet::new(&[sea("a)|(b", Mode::Copy, "l:1")]).is_err());
}

#[test]
fn rules_follow_their_precedence() {
    use Authority::{CommandLine, Project, Site};
    type Row = (&'static [(&'static str, Authority)], &'static str, &'static str);
    let table: [Row; 8] = [
        (&[("*.tmp=remove", Project), ("results/*.tmp=copy", Project)], "results/a.tmp", "copy"),
        (&[("results/*.tmp=copy", Project), ("*.tmp=remove", Project)], "results/a.tmp", "copy"),
        (&[("*.tmp=remove", Project), ("*.log=keep", Project)], "x.tmp/y.log", "keep"),
        (&[("*.tmp=remove", Project), ("*.tmp=move", Project)], "a.tmp", "move"),
        (&[("results/**/*.tmp=remove", Project), ("*=copy", Site)], "results/a.tmp", "copy"),
        (&[("results/**/*.tmp=remove", Project), ("*=keep", CommandLine)], "results/a.tmp", "keep"),
        (&[("*=keep", CommandLine), ("a*=move", Site), ("*=remove", Site)], "abc", "move"),
        (&[("*.py=move", Project)], ".venv/lib/a.py", "move"),
    ];
    for (rules, path, mode) in table {
        let rules: Vec<_> = rules.iter().map(|(text, authority)| rule(text, *authority)).collect();
        assert_eq!(mode_name(RuleSet::new(&rules).expect("rules").decide(path.as_bytes()).mode), mode, "{rules:?}");
    }
}

#[test]
fn attributes_of_a_path_are_settled_separately() {
    let mut wide = rule("*=copy", Authority::Project);
    wide.mode = None;
    wide.tier = Some("nvme".to_owned());
    wide.size_bytes = Some(1);
    let mut narrow = rule("*.dat=move", Authority::Project);
    narrow.size_bytes = Some(2);
    narrow.prefetch = true;
    let mut site = rule("d/*=copy", Authority::Site);
    site.mode = None;
    site.fsync = Some(FsyncTarget::Store);
    let set = RuleSet::new(&[narrow, wide, site]).expect("rules");
    let decision = set.decide(b"d/x.dat");
    assert_eq!((decision.mode, decision.size_bytes, decision.tier.as_deref()), (Mode::Move, Some(2), Some("nvme")));
    assert_eq!((decision.fsync, decision.prefetch, decision.pin), (Some(FsyncTarget::Store), true, false));
    assert_eq!(set.explain(b"d/x.dat").len(), 3);
    let git = set.decide(b".git/index");
    assert_eq!((git.mode, git.timing, git.tier.as_deref()), (Mode::Copy, Timing::Last, Some("nvme")));
}

/// Built in < hint < any written rule, and each attribute separately.
#[test]
fn hint_overrides_built_in_rules_but_not_written_ones() {
    let advice = Advice {
        mode: Some(Mode::Keep),
        timing: Some(Timing::Soon),
        size_bytes: Some(7),
        tier: Some("ram".into()),
        pin: Some(true),
        prefetch: None,
        next_read: None,
        replicas: None,
        replicas_at: None,
        collocate: None,
        acting: Acting::default(),
    };
    let decide =
        |rules: &[RuleConfig], path: &str| RuleSet::new(rules).expect("rules").decide_hinted(path.as_bytes(), &advice);
    for path in ["a.dat", ".git/index"] {
        let decision = decide(&[], path);
        assert_eq!(
            (decision.mode, decision.timing, decision.size_bytes),
            (Mode::Keep, Timing::Soon, Some(7)),
            "{path}"
        );
        assert!(decision.reason.is_hint() && decision.pin && decision.tier.as_deref() == Some("ram"));
    }
    for authority in [Authority::Project, Authority::CommandLine, Authority::Site] {
        let decision = decide(&[rule("*.dat=move", authority)], "a.dat");
        assert!(!decision.reason.is_hint());
        assert_eq!((decision.mode, decision.size_bytes), (Mode::Move, Some(7)), "what the rule leaves open");
    }
    // Sea's table decides last, and is a rule nevertheless.
    let lists = [sea(r".*\.dat", Mode::Copy, ".sea_flushlist:1"), sea(r".*", Mode::Keep, ".sea_flushlist")];
    assert_eq!(decide(&lists, "a.dat").mode, Mode::Copy);
    let unhinted = RuleSet::new(&[]).expect("rules").decide_hinted(b".git/index", &Advice::default());
    assert_eq!((unhinted.timing, unhinted.reason.is_hint()), (Timing::Last, false));
}

#[test]
fn built_in_rules_copy_every_path() {
    let set = RuleSet::new(&[]).expect("rules");
    let plain = set.decide(b"results/a.nii");
    assert_eq!((plain.mode, plain.timing, plain.reason), (Mode::Copy, Timing::Soon, Reason::default()));
    assert!(set.why(plain.reason).contains("no rule"));
    for name in defaults::LAST_NAMES.map(|name| name.replace('*', ".1")) {
        for path in [format!("{name}/a"), format!("deep/er/{name}/a/b")] {
            let decision = set.decide(path.as_bytes());
            assert_eq!((decision.mode, decision.timing), (Mode::Copy, Timing::Last), "{path}");
        }
    }
    assert_eq!(set.decide(b"environment/a").timing, Timing::Soon);
}

#[test]
fn reason_names_rule_and_origin() {
    let mut tmp = rule("*.tmp=remove", Authority::Project);
    tmp.origin = "surgetank.toml:12".to_owned();
    let set = RuleSet::new(&[tmp]).expect("rules");
    assert_eq!(set.why(set.decide(b"a.tmp").reason), "rule '*.tmp=remove' (surgetank.toml:12)");
    assert_eq!(set.why(set.decide(b".git/x").reason), "rule '.git=copy, last' (built in)");
}

#[test]
fn sea_lists_decide_by_sea_table() {
    let rules = [
        sea(r".*\.nii", Mode::Copy, ".sea_flushlist:1"),
        sea(r".*4\.nii", Mode::Remove, ".sea_evictlist:1"),
        sea(r".*\.log", Mode::Remove, ".sea_evictlist:2"),
        sea(r".*", Mode::Keep, ".sea_flushlist"),
    ];
    let set = RuleSet::new(&rules).expect("rules");
    for (path, mode) in [
        ("a.nii", Mode::Copy),
        ("d/a4.nii", Mode::Move),
        ("a.log", Mode::Remove),
        ("a.txt", Mode::Keep),
        ("a.nii.gz", Mode::Keep),
        (".git/index", Mode::Keep),
    ] {
        assert_eq!(set.decide(path.as_bytes()).mode, mode, "{path}");
    }
    let why = set.why(set.decide(b"d/a4.nii").reason);
    assert!(why.contains(".sea_flushlist:1") && why.contains(".sea_evictlist:1"), "{why}");
    assert_eq!(set.decide(b"\xff\xfe.nii").mode, Mode::Copy, "a name that isn't UTF-8");
    // A glob of the same authority takes precedence.
    let mut rules = rules.to_vec();
    rules.push(rule("*.log=copy", Authority::Project));
    assert_eq!(RuleSet::new(&rules).expect("rules").decide(b"a.log").mode, Mode::Copy);
}

/// Whether `pattern` (of `a`, `b`, `*`, `?`, `/`, and `**` as a whole part) matches all of `path`.
fn slow_match(pattern: &[u8], path: &[u8]) -> bool {
    let parts: Vec<&[u8]> = pattern.split(|byte| *byte == b'/').collect();
    let names: Vec<&[u8]> = path.split(|byte| *byte == b'/').collect();
    fn parts_match(parts: &[&[u8]], names: &[&[u8]]) -> bool {
        match (parts, names) {
            ([], []) => true,
            ([], _) => false,
            ([part, rest @ ..], names) if *part == b"**" => {
                // At the end `**` means "what is inside", elsewhere it may also match nothing.
                if rest.is_empty() {
                    !names.is_empty()
                } else {
                    (0..=names.len()).any(|skip| parts_match(rest, &names[skip..]))
                }
            }
            (_, []) => false,
            ([part, rest @ ..], [name, names @ ..]) => name_matches(part, name) && parts_match(rest, names),
        }
    }
    fn name_matches(part: &[u8], name: &[u8]) -> bool {
        match (part, name) {
            ([], []) => true,
            ([b'*', rest @ ..], _) => (0..=name.len()).any(|skip| name_matches(rest, &name[skip..])),
            ([b'?', rest @ ..], [_, name @ ..]) => name_matches(rest, name),
            ([byte, rest @ ..], [first, name @ ..]) => byte == first && name_matches(rest, name),
            _ => false,
        }
    }
    parts_match(&parts, &names)
}

/// Whether a user's glob matches a path: the path itself or any directory above.
fn slow_rule_match(pattern: &str, path: &str) -> bool {
    let body = pattern.trim_end_matches('/');
    let anchored = body.contains('/');
    let body = body.trim_start_matches('/');
    let full = if anchored { body.to_owned() } else { format!("**/{body}") };
    let ends: Vec<usize> = path.match_indices('/').map(|(at, _)| at).collect();
    // `x/**` and `x/**/` both mean what is inside `x`.
    let inside = pattern.ends_with('/') && !body.ends_with("**");
    let above = ends.iter().any(|end| slow_match(full.as_bytes(), &path.as_bytes()[..*end]));
    above || (!inside && slow_match(full.as_bytes(), path.as_bytes()))
}

fn pattern_strategy() -> impl Strategy<Value = String> {
    let part = prop_oneof![3 => "[ab]{1,2}", 2 => "[ab?]{0,1}\\*[ab]{0,1}", 1 => Just("**".to_owned())];
    (prop::collection::vec(part, 1..4), prop::bool::ANY, prop::bool::weighted(0.2)).prop_map(
        |(parts, rooted, inside)| {
            format!("{}{}{}", if rooted { "/" } else { "" }, parts.join("/"), if inside { "/" } else { "" })
        },
    )
}

/// Prints the cost of `decide` with forty rules, in processor time.
#[test]
#[ignore = "measures; run with --ignored --nocapture"]
fn decision_with_forty_rules_prints_its_cost() {
    let mut rules: Vec<_> = (0..20).map(|n| rule(&format!("*.ext{n}=remove"), Authority::Project)).collect();
    rules.extend((0..20).map(|n| rule(&format!("results/run{n}/**/*.dat=move"), Authority::Project)));
    let set = RuleSet::new(&rules).expect("rules");
    for path in
        ["results/run7/sub/deep/x.dat", "src/a/b/c/file.ext3", "a", ".git/objects/aa/bbccddeeff00112233445566778899"]
    {
        let now = || {
            let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
            time.tv_sec * 1_000_000_000 + time.tv_nsec
        };
        let start = now();
        for _ in 0..100_000 {
            std::hint::black_box(set.decide(std::hint::black_box(path.as_bytes())));
        }
        println!("{path}: {} ns", (now() - start) / 100_000);
    }
}

/// Everything that a prefetching rule can match must be below its plain beginning; the rest would silently not be prefetched.
#[test]
fn prefetched_below_is_plain_beginnings_of_prefetching_rules() {
    let below = |patterns: &[Pattern]| {
        let rules: Vec<RuleConfig> = patterns
            .iter()
            .map(|pattern| RuleConfig {
                pattern: pattern.clone(),
                mode: None,
                prefetch: true,
                ..rule("x=copy", Authority::Project)
            })
            .collect();
        let found = RuleSet::new(&rules).expect("rules").prefetched_below();
        found.into_iter().map(|path| String::from_utf8(path).expect("UTF-8")).collect::<Vec<_>>()
    };
    let glob = |text: &str| Pattern::Glob(text.to_owned());
    let regex = |text: &str| Pattern::Regex(text.to_owned());
    for (pattern, walked) in [
        (glob("*.nii"), ""),
        (glob("in"), ""),
        (glob("/in"), "in"),
        (glob("in/**"), "in"),
        (glob("in/deep/*.nii"), "in/deep"),
        (glob("in/a*/b"), "in"),
        (glob("in/deep/model.bin"), "in/deep/model.bin"),
        (glob(r"in\*/x"), ""),
        (regex(r"in/deep/.*\.nii"), "in/deep"),
        (regex("in/?x"), ""),
        (regex("in/a|out/b"), ""),
        (regex("(?i)in/.*"), ""),
        (regex("in/file"), "in/file"),
    ] {
        assert_eq!(below(std::slice::from_ref(&pattern)), [walked], "{pattern:?}");
    }
    assert_eq!(below(&[glob("in/**"), glob("in/deep/*"), glob("inner/*"), glob("/out")]), ["in", "inner", "out"]);
    let rules = [rule("*=keep", Authority::Project)];
    assert!(RuleSet::new(&rules).expect("rules").prefetched_below().is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn decision_for_any_bytes_succeeds(path in prop::collection::vec(any::<u8>(), 0..80)) {
        let set = RuleSet::new(&[rule("*.tmp=remove", Authority::Project), sea("a.*b", Mode::Copy, "l:1")]).expect("rules");
        let decision = set.decide(&path);
        prop_assert!(!set.why(decision.reason).is_empty());
    }

    #[test]
    fn decision_equals_that_of_the_slow_matcher(
        patterns in prop::collection::vec((pattern_strategy(), 0usize..4, 0usize..3), 1..8),
        path in prop::collection::vec("[ab]{1,3}", 1..5),
    ) {
        let path = path.join("/");
        let modes = [Mode::Keep, Mode::Copy, Mode::Move, Mode::Remove];
        let authorities = [Authority::Project, Authority::CommandLine, Authority::Site];
        let rules: Vec<RuleConfig> = patterns
            .iter()
            .map(|(pattern, mode, authority)| rule(&format!("{pattern}={}", mode_name(modes[*mode])), authorities[*authority]))
            .collect();
        let mut winner: Option<(usize, &RuleConfig)> = None;
        for (at, candidate) in rules.iter().enumerate() {
            let Pattern::Glob(text) = &candidate.pattern else { continue };
            if !slow_rule_match(text, &path) {
                continue;
            }
            let stronger = winner.is_none_or(|(_, best)| {
                let Pattern::Glob(best_text) = &best.pattern else { return true };
                (candidate.authority, text.len()) >= (best.authority, best_text.len())
            });
            if stronger {
                winner = Some((at, candidate));
            }
        }
        let expected = winner.map_or(Mode::Copy, |(_, rule)| rule.mode.expect("mode"));
        let set = RuleSet::new(&rules).expect("rules");
        prop_assert_eq!(set.decide(path.as_bytes()).mode, expected, "path {} rules {:?}", path, patterns);
    }
}
