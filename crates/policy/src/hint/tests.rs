#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

use super::*;
use crate::words::{ReplicasAt, Timing};
use surgetank_types::model::Mode;

fn hints(given: &[(&str, &str)]) -> Hints {
    let mut hints = Hints::default();
    for (name, value) in given {
        hints.set(name, value).unwrap();
    }
    hints
}

#[test]
fn hint_values_have_the_forms_of_rules() {
    let all = hints(&[
        ("mode", "keep"),
        ("timing", "last"),
        ("size", "1G"),
        ("tier", "ram"),
        ("pin", "true"),
        ("prefetch", "false"),
        ("next_read", "12"),
        ("replicas", "2"),
        ("replicas_at", "close"),
        ("collocate", "sums"),
    ]);
    let expected = Advice {
        mode: Some(Mode::Keep),
        timing: Some(Timing::Last),
        size_bytes: Some(1 << 30),
        tier: Some("ram".into()),
        pin: Some(true),
        prefetch: Some(false),
        next_read: Some(NextRead::At(12)),
        replicas: Some(2),
        replicas_at: Some(ReplicasAt::Close),
        collocate: Some(Collocate::With("sums".into())),
        acting: Acting::default(),
    };
    assert_eq!(*all.advice(), expected);
    assert_eq!(all.value("size"), Some("1G"), "as it was given");
    assert_eq!(*hints(&[("size", "4096")]).advice(), Advice { size_bytes: Some(4096), ..Advice::default() });
}

/// Each error names what is wrong with the value and what is allowed.
#[test]
fn unknown_hint_is_refused_with_allowed_values() {
    for (name, value, words) in [
        ("mod", "keep", &["no hint 'mod'", "did you mean 'mode'?", "timing", "BlockSize"][..]),
        ("Mode", "keep", &["no hint 'Mode'", "'mode'"]),
        (
            "replica",
            "1",
            &[
                "no hint 'replica'",
                "known are mode, timing, size, tier, pin, prefetch, next_read, replicas, replicas_at, collocate, drain_share, consistency, versions, DP",
            ],
        ),
        ("", "1", &["no hint ''"]),
        ("life=time", "1", &["no hint 'life=time'", "1 to 64 letters"]),
        ("lifetime", &"x".repeat(2000), &["lifetime", "1024 bytes"]),
        ("mode", "kept", &["mode: 'kept'", "keep, copy, move, remove"]),
        ("mode", "", &["mode: ''", "keep"]),
        ("timing", "now", &["timing: 'now'", "soon, last"]),
        ("size", "big", &["size: 'big'", "64M"]),
        ("size", "-1", &["size: '-1'"]),
        ("tier", "", &["tier: the name of a tier"]),
        ("pin", "1", &["pin: '1'", "true, false"]),
        ("prefetch", "yes", &["prefetch: 'yes'", "true, false"]),
        ("next_read", "soon", &["next_read: 'soon'", "whole number", "never"]),
        ("next_read", "-1", &["next_read: '-1'"]),
        ("replicas", "0", &["replicas: '0'", "1 to 16"]),
        ("versions", "0", &["versions: '0'", "1 to 100"]),
        ("drain_share", "0%", &["drain_share: '0%'", "1% to 100%"]),
        ("consistency", "strict", &["consistency: 'strict'", "posix, sealed"]),
        ("collocate", " ", &["collocate: ' '", "neither local nor the name of a group"]),
        ("collocate", &"g".repeat(256), &["1 to 255 bytes"]),
        ("DP", "remote", &["DP: 'remote'", "local, collocation|GROUP, scatter|BLOCKS"]),
        ("DP", "scatter|none", &["DP: 'scatter|none'"]),
        ("DP", "collocation|", &["DP: 'collocation|'"]),
        ("Replication", "0", &["Replication: '0'", "1 or more"]),
        ("ReplicationSemantics", "lazy", &["optimistic, pessimistic"]),
        ("CacheSize", "little", &["CacheSize: 'little'"]),
    ] {
        let mut before = hints(&[("mode", "copy"), ("DP", "local")]);
        let why = before.set(name, value).unwrap_err();
        for word in words {
            assert!(why.contains(word), "{name}={value}: {word:?} is not said in: {why}");
        }
        assert_eq!(before, hints(&[("mode", "copy"), ("DP", "local")]), "changed by what was refused");
    }
}

/// On one node the second copy is the store's; the other hints hold already or have no effect.
#[test]
fn woss_hints_on_one_node_get_their_meaning() {
    assert_eq!(hints(&[("Replication", "2")]).advice().mode, Some(Mode::Copy));
    let copies =
        |count: &str| hints(&[("Replication", count), ("ReplicationSemantics", "pessimistic")]).advice().clone();
    let once = Advice { replicas: Some(1), replicas_at: Some(ReplicasAt::Close), ..Advice::default() };
    assert_eq!(copies("1"), once);
    assert_eq!(copies("99"), Advice { mode: Some(Mode::Copy), replicas: Some(16), ..once });
    assert_eq!(hints(&[("Replication", "3"), ("replicas", "2")]).advice().replicas, Some(2), "said outright");
    assert_eq!(hints(&[("Replication", "2"), ("mode", "keep")]).advice().mode, Some(Mode::Keep), "said outright");
    for (name, value) in [("DP", "scatter|4"), ("CacheSize", "64K"), ("BlockSize", "1M")] {
        let remembered = hints(&[(name, value)]);
        assert_eq!(remembered.advice(), &Advice::default(), "{name}={value}");
        assert_eq!(remembered.texts().collect::<Vec<_>>(), [(name, value)]);
    }
}

#[test]
fn data_placement_of_woss_is_collocation() {
    let on = |given: &[(&str, &str)]| hints(given).advice().collocate.clone();
    for (value, expected) in [
        ("local", Collocate::Local),
        ("Local", Collocate::Local),
        ("collocation|g1", Collocate::With("g1".into())),
        ("collocation | g1", Collocate::With("g1".into())),
        ("collocation|local", Collocate::With("local".into())),
    ] {
        assert_eq!(on(&[("DP", value)]), Some(expected), "{value}");
    }
    let both = [("DP", "collocation|theirs"), ("collocate", "ours")];
    assert_eq!(on(&both), Some(Collocate::With("ours".into())), "said outright");
    let mut nearer = hints(&[("DP", "local")]).advice().clone();
    nearer.or(hints(&both).advice());
    assert_eq!(nearer.collocate, Some(Collocate::Local), "a nearer hint wins");
}

#[test]
fn hints_after_set_remove_and_update_are_exact() {
    let mut one = hints(&[("mode", "keep"), ("size", "1M")]);
    assert!(one.take_back("mode") && !one.take_back("mode"));
    assert_eq!(*one.advice(), Advice { size_bytes: Some(1 << 20), ..Advice::default() });
    one.update(&hints(&[("size", "2M"), ("pin", "true")]));
    assert_eq!(one, hints(&[("pin", "true"), ("size", "2M")]));
    assert_eq!(Hints::of_texts(one.texts()), one);
    assert_eq!(Hints::of_texts([("size", "2M"), ("mode", "later")].into_iter()), hints(&[("size", "2M")]));
}

/// They may be for another program.
#[test]
fn unknown_hint_is_kept_without_effect() {
    let mut one = hints(&[("size", "2M"), ("lifetime", "1h"), ("org.site.x", "")]);
    assert_eq!(*one.advice(), Advice { size_bytes: Some(2 << 20), ..Advice::default() });
    assert_eq!(one.texts().collect::<Vec<_>>(), [("size", "2M"), ("lifetime", "1h"), ("org.site.x", "")]);
    assert_eq!(one.unknown().collect::<Vec<_>>(), ["lifetime", "org.site.x"]);
    assert_eq!(Hints::of_texts(one.texts()), one);
    one.update(&hints(&[("lifetime", "2h")]));
    assert_eq!(one.value("lifetime"), Some("2h"));
    assert!(one.take_back("lifetime") && !one.take_back("lifetime") && one.take_back("org.site.x"));
    assert_eq!(one, hints(&[("size", "2M")]));
    assert!(!hints(&[("lifetime", "1h")]).is_empty());
    let mut many = Hints::default();
    let set = |many: &mut Hints, number: usize| many.set(&format!("unknown{number}"), "x");
    (0..UNKNOWN_MAX).for_each(|number| set(&mut many, number).unwrap());
    assert!(set(&mut many, UNKNOWN_MAX).unwrap_err().contains("at most 32"));
    set(&mut many, 0).unwrap();
    assert!(many.has_room_for(&hints(&[("lifetime", "1h")])).unwrap_err().contains("at most 32"));
    many.has_room_for(&hints(&[("unknown3", "1h"), ("mode", "keep")])).unwrap();
    // Names that are only similar are names of their own; what a later version recorded is kept, too.
    for name in ["note", "user", "time", "lifetime", "iter"] {
        assert_eq!(Understood::of(name), Ok(Understood::Unknown), "{name}");
    }
    for (name, meant) in
        [("mod", "mode"), ("Mode", "mode"), ("replcas", "replicas"), ("dp", "DP"), ("prefetsh", "prefetch")]
    {
        assert!(Understood::of(name).unwrap_err().contains(&format!("did you mean '{meant}'")), "{name}");
    }
    assert_eq!(Hints::of_texts([("modes", "x")].into_iter()).value("modes"), Some("x"));
}

#[test]
fn advice_of_nearer_subject_overrides_weaker() {
    let mut advice = hints(&[("mode", "keep")]).advice().clone();
    advice.or(hints(&[("mode", "copy"), ("tier", "ram")]).advice());
    assert_eq!((advice.mode, advice.tier.as_deref()), (Some(Mode::Keep), Some("ram")));
}
