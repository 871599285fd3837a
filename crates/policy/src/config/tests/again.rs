//! The options of a later command with the same meaning.

use super::*;

fn words(config: &Config) -> String {
    surgetank_types::shell::line(&config.again)
}

#[test]
fn options_contain_what_no_file_repeats() {
    let mut place = Place::new();
    let root = place.path("").display().to_string();
    let root = root.trim_end_matches('/');
    place.env("SURGETANK_STORE", "../elsewhere").env("SURGETANK_RULES", "*.tmp=remove");
    let overrides = Overrides {
        state: Some("../the state".into()),
        tiers: vec!["t=../fast,../fast2:64M".into()],
        rules: vec!["*.dat=keep".into()],
        keep_at_exit: Some("drain".into()),
        verify: Some("reread".into()),
        ordered: Some("false".into()),
        pool_ordered: Some("true".into()),
        replicas: Some("2".into()),
        replicas_at: Some("close".into()),
        ..Overrides::default()
    };
    let config = place.load(overrides).unwrap().config;
    let expected = format!(
        "--state '{root}/the state' --store {root}/elsewhere --tier t={root}/project/../fast,{root}/project/../fast2:64M \
         --rule '*.tmp=remove' --rule '*.dat=keep' --keep-at-exit drain --verify reread --ordered false --pool-ordered true \
         --replicas 2 --replicas-at close"
    );
    assert_eq!(words(&config), expected);
    assert!(config.says_store());
}

#[test]
fn options_leave_out_values_of_files_found_again() {
    let place = Place::new();
    place.write(
        "project/surgetank.toml",
        &format!("tiers = [{{ name = \"t\", path = \"{}\" }}]", place.path("fast").display()),
    );
    let config = place.load_as_found().unwrap().config;
    assert_eq!((words(&config).as_str(), config.says_store()), ("", false));
    // The directory itself is a store that the user named: a variable may name another one.
    let given = Overrides { store: Some(".".into()), ..Overrides::default() };
    let config = Config::load_in(&given, &place.around).unwrap().config;
    assert_eq!(words(&config), format!("--store {}", place.path("project").display()));
}

#[test]
fn options_contain_named_file_and_its_state() {
    let place = Place::new();
    let text = format!(
        "state = \"{}\"\n[[tiers]]\nname = \"t\"\npath = \"{}\"",
        place.path("empty").display(),
        place.path("fast").display()
    );
    place.write("given.toml", &text);
    let overrides = Overrides { config: Some("../given.toml".into()), ..Overrides::default() };
    let config = Config::load_in(&overrides, &place.around).unwrap().config;
    let expected =
        format!("--state {} --config {}", place.path("empty").display(), place.path("project/../given.toml").display());
    assert_eq!(words(&config), expected);
}
