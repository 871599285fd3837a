//! `surgetank hint NAME=VALUE… PATH…`: sends a workflow's hints about files to the agent, for one file or for thousands
//! in one process. A file need not exist yet.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::io::{self, BufRead, BufReader};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use serde::Serialize;
use serde_json::Value;
use surgetank_core::report::{HintOf, PathText, RefusedHint};
use surgetank_policy::hint::{Hints, Understood};
use surgetank_types::error::{Error, Result};

use super::directory::{Below, agent_of};
use super::outcome::{Failure, Outcome};
use super::program::Program;
use super::settings::Settings;
use super::{exit, words};
use crate::agent::wire::{Answer, REQUEST_BYTES_MAX, Request};

/// The part of a request that is not hints.
const ENVELOPE_BYTES: usize = 1024;
/// At most this many refusals are listed one by one.
const TOLD_MAX: usize = 20;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Hints, then what they are for: `mode=keep size=1G a b`; or `-`: JSON lines from standard input
    #[arg(value_name = "NAME=VALUE… PATH…")]
    words: Vec<OsString>,
    /// JSON lines: {"path": "a", "mode": "keep", "size": 4096}
    #[arg(long, value_name = "FILE", conflicts_with = "words")]
    from: Option<PathBuf>,
    /// What was done, as JSON
    #[arg(long)]
    json: bool,
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
}

#[derive(Debug, PartialEq, Eq)]
struct PathHints {
    path: PathBuf,
    hints: BTreeMap<String, String>,
}

#[derive(Serialize)]
struct Summary {
    paths: u64,
    requests: u64,
    refused_paths: u64,
    refused: Vec<RefusedHint>,
}

/// Sends no hint unless every one is understood. A hint that the agent refuses (for an absent tier) does not stop the
/// rest.
pub fn hint(program: &Program<'_>, args: &Args) -> Outcome {
    let given = match (&args.from, args.words.as_slice()) {
        (Some(file), _) => {
            let opened = std::fs::File::open(file).map_err(|why| unreadable(&file.display().to_string(), &why))?;
            of_lines(BufReader::new(opened), &file.display().to_string())?
        }
        (None, [word]) if word == "-" => of_lines(io::stdin().lock(), "standard input")?,
        (None, words) => of_words(words)?,
    };
    let Some(first) = given.first() else {
        return print_result(args, &Summary { paths: 0, requests: 0, refused_paths: 0, refused: Vec::new() });
    };
    let named = given.iter().flat_map(|one| one.hints.keys()).collect::<BTreeSet<_>>();
    for name in named.into_iter().filter(|name| Understood::of(name) == Ok(Understood::Unknown)) {
        eprintln!("surgetank: the hint '{name}' is not known here: it is kept, and has no effect");
    }
    let mut agent = agent_of(program, &Settings::of_state(args.state.as_ref()), &first.path)?;
    let over = agent.hello.over.to_path_buf();
    let mut below = Below::new(&over);
    let hints = given.into_iter().map(|one| {
        Ok(HintOf { path: below.relative(&one.path).map_err(|error| error.data("no hint was set"))?, hints: one.hints })
    });
    let batches = batches(hints.collect::<Result<Vec<HintOf>>>()?)?;
    let mut summary = Summary { paths: 0, requests: 0, refused_paths: 0, refused: Vec::new() };
    for hints in batches {
        summary.paths += hints.len() as u64;
        summary.requests += 1;
        match agent.ask(&Request::Hint { hints })? {
            Answer::Hinted { refused } => {
                summary.refused_paths += refused.total;
                summary.refused.extend(refused.first);
            }
            other => return Err(agent.confused(&other).into()),
        }
    }
    print_result(args, &summary)
}

fn print_result(args: &Args, summary: &Summary) -> Outcome {
    for one in summary.refused.iter().take(TOLD_MAX) {
        eprintln!("surgetank: {}: the hint is refused\n  why:  {}", one.path, one.why);
    }
    let left = summary.refused_paths.saturating_sub(TOLD_MAX.min(summary.refused.len()) as u64);
    if left > 0 {
        eprintln!("surgetank: {left} more paths were refused; the agent's log has them");
    }
    if args.json {
        let text = serde_json::to_string_pretty(summary).map_err(|error| Error::new("JSON").why(error))?;
        words::print(&(text + "\n"))?;
    }
    Ok(if summary.refused_paths == 0 { exit::OK } else { exit::FAILED })
}

fn unreadable(what: &str, why: &io::Error) -> Failure {
    let error = Error::new(format!("--from: {what} cannot be read")).why(why).data("no hint was set");
    error.remedy("name a file with one JSON object a line, or `-` for standard input").into()
}

/// Leading words with `=` are hints, the others paths.
fn of_words(words: &[OsString]) -> Outcome<Vec<PathHints>> {
    let usage = |what: String| {
        let remedy = "surgetank hint mode=keep size=1G PATH…; a path with '=' that comes first is written ./PATH";
        Failure::usage(Error::new(what).remedy(remedy).data("no hint was set"))
    };
    let mut hints = BTreeMap::new();
    let mut paths = words.iter();
    while let Some((name, value)) = paths.as_slice().first().and_then(split) {
        check(&name, &value).map_err(&usage)?;
        hints.insert(name, value);
        paths.next();
    }
    if hints.is_empty() || paths.as_slice().is_empty() {
        return Err(usage(format!("there is no {}", if hints.is_empty() { "hint" } else { "path" })));
    }
    Ok(paths.map(|path| PathHints { path: path.into(), hints: hints.clone() }).collect())
}

fn split(word: &OsString) -> Option<(String, String)> {
    let (name, value) = word.to_str()?.split_once('=')?;
    (!name.contains('/')).then(|| (name.to_owned(), value.to_owned()))
}

fn check(name: &str, value: &str) -> std::result::Result<(), String> {
    Hints::default().set(name, value)
}

/// One object a line: `path`, and hints beside it.
fn of_lines(from: impl BufRead, what: &str) -> Outcome<Vec<PathHints>> {
    let mut given = Vec::new();
    for (at, line) in from.split(b'\n').enumerate() {
        let line = line.map_err(|why| unreadable(what, &why))?;
        if line.trim_ascii().is_empty() {
            continue;
        }
        given.push(of_line(&line).map_err(|why| {
            let error = Error::new(format!("{what}, line {}: this is not a hint", at + 1)).why(why);
            Failure::usage(error.remedy(r#"write {"path": "a", "mode": "keep", "size": "1G"}"#).data("no hint was set"))
        })?);
    }
    Ok(given)
}

fn of_line(line: &[u8]) -> std::result::Result<PathHints, String> {
    let mut members: serde_json::Map<String, Value> = serde_json::from_slice(line).map_err(|why| why.to_string())?;
    let path = members.remove("path").ok_or("it has no \"path\"")?;
    let PathText(path) = serde_json::from_value(path).map_err(|_| "its \"path\" is not a string")?;
    if path.is_empty() {
        return Err("its \"path\" is empty".to_owned());
    }
    let mut hints = BTreeMap::new();
    for (name, value) in members {
        let value = match value {
            Value::String(text) => text,
            Value::Number(number) => number.to_string(),
            Value::Bool(truth) => truth.to_string(),
            other => return Err(format!("{name}: {other} is not a single value")),
        };
        check(&name, &value)?;
        hints.insert(name, value);
    }
    if hints.is_empty() {
        return Err("it says nothing of its path".to_owned());
    }
    Ok(PathHints { path: OsString::from_vec(path).into(), hints })
}

/// As few requests as their size limit allows.
fn batches(hints: Vec<HintOf>) -> Result<Vec<Vec<HintOf>>> {
    let mut batches: Vec<Vec<HintOf>> = Vec::new();
    let mut room = 0;
    for one in hints {
        let bytes = 1 + serde_json::to_vec(&one).map_err(|why| Error::new("JSON").why(why))?.len();
        match batches.last_mut() {
            Some(batch) if bytes <= room => {
                room -= bytes;
                batch.push(one);
            }
            _ => {
                room = (REQUEST_BYTES_MAX - ENVELOPE_BYTES).saturating_sub(bytes);
                batches.push(vec![one]);
            }
        }
    }
    Ok(batches)
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    fn given(path: &str, hints: &[(&str, &str)]) -> PathHints {
        let hints = hints.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        PathHints { path: path.into(), hints }
    }

    fn words(text: &[&str]) -> std::result::Result<Vec<PathHints>, String> {
        let words: Vec<OsString> = text.iter().map(Into::into).collect();
        of_words(&words).map_err(|failure| {
            assert_eq!(failure.exit, exit::USAGE);
            failure.error.to_string()
        })
    }

    fn lines(text: &str) -> std::result::Result<Vec<PathHints>, String> {
        of_lines(text.as_bytes(), "list").map_err(|failure| {
            assert_eq!(failure.exit, exit::USAGE);
            failure.error.to_string()
        })
    }

    #[test]
    fn words_are_hints_and_then_paths() {
        let both = [("mode", "keep"), ("size", "1G")];
        assert_eq!(words(&["mode=keep", "size=1G", "a", "b=c"]), Ok(vec![given("a", &both), given("b=c", &both)]));
        assert_eq!(words(&["mode=keep", "./b=c"]), Ok(vec![given("./b=c", &both[..1])]));
        for (wrong, why) in [
            (&["mode=kept", "a"][..], "keep, copy, move, remove"),
            (&["mod=keep", "a"], "did you mean 'mode'?"),
            (&["mode=keep"], "no path"),
            (&["a"], "no hint"),
            (&[], "no hint"),
        ] {
            let error = words(wrong).unwrap_err();
            assert!(error.contains(why) && error.contains("no hint was set"), "{wrong:?}: {error}");
        }
    }

    #[test]
    fn wrong_line_is_named() {
        let text = "{\"path\": \"a\", \"size\": 4096, \"pin\": true}\n\n{\"path\": [97, 255], \"mode\": \"keep\"}\n";
        let read = lines(text).unwrap();
        assert_eq!(read[0], given("a", &[("size", "4096"), ("pin", "true")]));
        assert_eq!(read[1].path.as_os_str().as_bytes(), b"a\xff");
        for (wrong, why) in [
            ("{\"path\": \"b\", \"mod\": \"keep\"}", "did you mean 'mode'?"),
            ("{\"path\": \"b\", \"mode\": null}", "mode: null is not a single value"),
            ("{\"path\": \"b\"}", "says nothing"),
            ("{\"mode\": \"keep\"}", "no \"path\""),
            ("{\"path\": 1, \"mode\": \"keep\"}", "is not a string"),
            ("{\"path\": \"b\"", "EOF"),
            ("keep", "expected"),
        ] {
            let error = lines(&format!("{{\"path\": \"a\", \"mode\": \"keep\"}}\n{wrong}\n")).unwrap_err();
            assert!(error.contains("list, line 2") && error.contains(why), "{wrong}: {error}");
        }
    }

    #[test]
    fn thirty_thousand_paths_are_a_handful_of_requests() {
        let hints = [("mode".to_owned(), "remove".to_owned()), ("size".to_owned(), "1073741824".to_owned())];
        let hints: Vec<HintOf> = (0..30_000)
            .map(|n| HintOf {
                path: PathText(format!("work/stage-{}/part-{n:06}.fits", n % 100).into_bytes()),
                hints: hints.clone().into(),
            })
            .collect();
        let batches = batches(hints.clone()).unwrap();
        assert!(batches.len() <= 4, "{} requests", batches.len());
        for batch in &batches {
            let line = serde_json::to_vec(&Request::Hint { hints: batch.clone() }).unwrap();
            assert!(line.len() <= REQUEST_BYTES_MAX, "a request of {} bytes", line.len());
        }
        assert_eq!(batches.concat(), hints, "all of them, in their order");
    }
}
