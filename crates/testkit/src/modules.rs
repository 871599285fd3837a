//! Finds test files that no `mod` names. Cargo does not compile such a file, so its tests never run, and no other check reports
//! it.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The Rust files below `tests` that no other file there declares as a module, and that are not a binary of `manifest` (the
/// text of Cargo.toml).
pub fn undeclared(tests: &Path, manifest: &str) -> BTreeSet<PathBuf> {
    let mut files = Vec::new();
    list(tests, &mut files);
    let declared: BTreeSet<PathBuf> = files.iter().flat_map(|file| declared_by(file)).collect();
    let is_binary = |file: &Path| {
        let below = file.strip_prefix(tests).unwrap().display();
        manifest.lines().any(|line| line == format!("path = \"tests/{below}\""))
    };
    files.into_iter().filter(|file| !declared.contains(file) && !is_binary(file)).collect()
}

fn list(dir: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            list(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

/// The paths at which the modules may be that a file declares with `mod NAME;`.
fn declared_by(file: &Path) -> Vec<PathBuf> {
    let dir = file.parent().unwrap();
    let is_root = matches!(file.file_name().and_then(|name| name.to_str()), Some("main.rs" | "mod.rs"));
    let inner = if is_root { dir.to_path_buf() } else { file.with_extension("") };
    let text = fs::read_to_string(file).unwrap();
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let mut declared = Vec::new();
    for (n, line) in lines.iter().enumerate() {
        let Some(name) =
            line.strip_prefix("pub ").unwrap_or(line).strip_prefix("mod ").and_then(|rest| rest.strip_suffix(';'))
        else {
            continue;
        };
        let given = n.checked_sub(1).and_then(|before| lines[before].strip_prefix("#[path = \"")?.strip_suffix("\"]"));
        match given {
            Some(path) => declared.extend(dir.join(path).canonicalize()),
            None => declared.extend([inner.join(format!("{name}.rs")), inner.join(name).join("mod.rs")]),
        }
    }
    declared
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_that_no_module_names_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let tests = dir.path().canonicalize().unwrap();
        for (name, text) in [
            ("main.rs", "mod one;\npub mod two;\n// mod forgotten;\n"),
            ("one.rs", "mod inner;\n#[path = \"two/shared.rs\"]\nmod shared;\n"),
            ("one/inner.rs", ""),
            ("one/outer.rs", ""),
            ("two/mod.rs", ""),
            ("two/shared.rs", ""),
            ("forgotten.rs", ""),
            ("apart/main.rs", ""),
        ] {
            let path = tests.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let manifest = "[[test]]\npath = \"tests/main.rs\"\n[[test]]\npath = \"tests/apart/main.rs\"\n";
        let found = undeclared(&tests, manifest);
        assert_eq!(found, ["forgotten.rs", "one/outer.rs"].map(|name| tests.join(name)).into());
    }
}
