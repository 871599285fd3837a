//! The documentation and the program: the page of the command line equals the program's own help, and the site has
//! every page.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// With this variable set the test writes the page instead of comparing it.
const WRITE: &str = "SURGETANK_WRITE_DOCS";

type NamesVerb = fn(&str) -> String;

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs")
}

fn help(words: &[&str]) -> String {
    // (The width of the terminal would set the length of the lines.)
    let done = Command::new(env!("CARGO_BIN_EXE_surgetank")).args(words).env_remove("COLUMNS").output().unwrap();
    assert!(done.status.success(), "{words:?}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

/// The verbs that `surgetank --help` lists.
fn verbs() -> Vec<String> {
    let help = help(&["--help"]);
    let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let names = listed.filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    names.filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

#[test]
fn page_of_the_command_line_is_the_programs_help() {
    let mut page = String::from(
        "# Command line\n\nThis page is `surgetank --help` and `surgetank help VERB`, as the program prints them. \
         Every option that is also a key of the configuration is explained in [Configuration](configuration.md).\n",
    );
    let verbs = verbs();
    assert!(verbs.len() > 20, "{verbs:?}");
    let texts = verbs.iter().map(|verb| (format!("surgetank {verb}"), help(&[verb, "--help"])));
    for (title, text) in std::iter::once((String::from("surgetank"), help(&["--help"]))).chain(texts) {
        let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
        page += &format!("\n## {title}\n\n```text\n{}\n```\n", lines.join("\n").trim_end());
    }
    let path = docs().join("command-line.md");
    if std::env::var_os(WRITE).is_some() {
        fs::write(&path, &page).unwrap();
    }
    let kept = fs::read_to_string(&path).unwrap_or_default();
    let differs = page.lines().zip(kept.lines()).find(|(is, was)| is != was);
    assert!(page == kept, "{}: {WRITE}=1 writes it again; {differs:?}", path.display());
}

#[test]
fn site_has_every_page() {
    let summary = fs::read_to_string(docs().join("SUMMARY.md")).unwrap();
    let links = summary.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let listed: BTreeSet<PathBuf> = links.map(PathBuf::from).collect();
    let mut pages = BTreeSet::new();
    let mut left = vec![docs()];
    while let Some(dir) = left.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                left.push(path);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                pages.insert(path.strip_prefix(docs()).unwrap().to_path_buf());
            }
        }
    }
    pages.remove(Path::new("SUMMARY.md"));
    assert_eq!(listed, pages);
}

#[test]
fn completions_and_man_pages_are_of_every_verb() {
    // How each shell's script names a verb.
    let named: [(&str, NamesVerb); 3] = [
        ("bash", |verb| format!("surgetank__subcmd__{}", verb.replace('-', "__subcmd__"))),
        ("zsh", |verb| format!("\n'{verb}:")),
        ("fish", |verb| format!("__fish_surgetank_needs_command\" -f -a \"{verb}\"")),
    ];
    for (shell, name) in named {
        let script = help(&["completions", shell]);
        for verb in verbs() {
            assert!(script.contains(&name(&verb)), "{shell}: {verb}");
        }
    }
    let dir = tempfile::tempdir().unwrap();
    help(&["help", "--man", dir.path().to_str().unwrap()]);
    let written: BTreeSet<String> =
        fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    let wanted = verbs().into_iter().map(|verb| format!("surgetank-{verb}.1"));
    for name in wanted.chain([String::from("surgetank.1")]) {
        assert!(written.contains(&name), "{name} is not in {written:?}");
    }
    let page = fs::read_to_string(dir.path().join("surgetank-run.1")).unwrap();
    assert!(page.contains("tier") && page.contains(".SH OPTIONS"), "{page}");
}

/// The page of the socket's protocol has a row for each request.
#[test]
fn protocol_page_has_every_request() {
    let source = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/agent/wire.rs")).unwrap();
    let page = fs::read_to_string(docs().join("internals/protocol.md")).unwrap();
    let body = source.split_once("pub enum Request {\n").unwrap().1.split_once("\n}\n").unwrap().0;
    let variants =
        body.lines().filter_map(|line| line.strip_prefix("    ")).filter(|line| line.starts_with(char::is_uppercase));
    let names: Vec<String> = variants.map(|line| snake_case(line.split([' ', '(', ',']).next().unwrap())).collect();
    assert!(names.len() > 15, "{names:?}");
    let missing: Vec<&String> = names.iter().filter(|name| !page.contains(&format!("\"{name}\""))).collect();
    assert!(missing.is_empty(), "docs/internals/protocol.md has no row for {missing:?}");
}

fn snake_case(name: &str) -> String {
    let divided =
        |letter: char| if letter.is_uppercase() { vec!['_', letter.to_ascii_lowercase()] } else { vec![letter] };
    name.chars().flat_map(divided).skip(1).collect()
}
