//! Builds the preload shim (shim/*.c) into a shared library, which the binary carries with it, and the part of it that says which
//! programs cannot take it (shim/foreign.c) into the binary, which starts the first one.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

fn main() {
    if let Err(why) = build() {
        eprintln!("the preload shim cannot be built: {why}");
        std::process::exit(1);
    }
}

fn build() -> Result<(), String> {
    let variable = |name: &str| env::var_os(name).ok_or_else(|| format!("cargo did not set {name}"));
    let shim = Path::new(&variable("CARGO_MANIFEST_DIR")?).join("../../shim");
    let library = PathBuf::from(variable("OUT_DIR")?).join("libsurgetank.so");
    println!("cargo::rerun-if-changed={}", shim.display());
    println!("cargo::rerun-if-env-changed=CC");
    let read = |path: &Path| fs::read_to_string(path).map_err(|why| format!("{}: {why}", path.display()));
    let flags = read(&shim.join("flags"))?;
    let listed = fs::read_dir(&shim).map_err(|why| format!("{}: {why}", shim.display()))?;
    let mut sources: Vec<PathBuf> = listed
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "c"))
        .collect();
    sources.sort();
    let compiler = env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    // Libraries come after what uses them.
    let (libraries, options): (Vec<&str>, Vec<&str>) =
        flags.split_whitespace().partition(|flag| flag.starts_with("-l"));
    let run = |command: &mut Command| {
        let built =
            command.output().map_err(|why| format!("{compiler}: {why}; a C compiler is needed (Debian: gcc)"))?;
        if built.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&built.stderr).into_owned()) }
    };
    let object = PathBuf::from(variable("OUT_DIR")?).join("foreign.o");
    let code = options.iter().filter(|option| !option.starts_with("-Wl,") && **option != "-shared");
    run(Command::new(&compiler).args(code).arg("-c").arg("-o").arg(&object).arg(shim.join("foreign.c")))?;
    println!("cargo::rustc-link-arg={}", object.display());
    run(Command::new(&compiler).args(&options).arg("-o").arg(&library).args(&sources).args(libraries))
}
