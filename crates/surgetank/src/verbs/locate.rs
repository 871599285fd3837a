//! `surgetank locate PATH…`: on which nodes files are. One process asks about thousands.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::io::{self, Read};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use serde::Serialize;
use surgetank_core::report::{CopyOn, Located, PathText};
use surgetank_types::error::Error;

use super::directory::{Below, agent_of};
use super::outcome::{Failure, Outcome};
use super::program::Program;
use super::settings::Settings;
use super::{exit, words};
use crate::agent::wire::{Answer, Request};

/// So many paths, of so many bytes, are asked about in one request. The answer names each node that has a copy.
const PATHS_MAX: usize = 500;
const BYTES_MAX: usize = 64 << 10;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Files; or `-`: from standard input, one a line (or, with --null, each before a zero byte)
    #[arg(value_name = "PATH…", required = true)]
    paths: Vec<OsString>,
    /// A zero byte, and not the end of a line, ends each path of standard input
    #[arg(long, short = '0')]
    null: bool,
    /// As JSON: an array in the order of the paths
    #[arg(long)]
    json: bool,
    /// Only the node that has most bytes of these files; nothing if none has some
    #[arg(long, conflicts_with = "json")]
    node: bool,
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
}

/// A file, in the order in which it was named.
#[derive(Serialize)]
struct Line<'a> {
    path: PathText,
    #[serde(flatten)]
    located: Option<&'a Located>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
}

pub fn locate(program: &Program<'_>, args: &Args) -> Outcome {
    let paths = paths(args)?;
    let Some(first) = paths.first() else {
        return print_result(args, &[], &[]);
    };
    let mut agent = agent_of(program, &Settings::of_state(args.state.as_ref()), first)?;
    let over = agent.hello.over.to_path_buf();
    let mut below = Below::new(&over);
    let mut found: Vec<Result<Located, String>> = Vec::with_capacity(paths.len());
    let mut batch: Vec<PathText> = Vec::new();
    let mut bytes = 0;
    let mut ask = |batch: Vec<PathText>| -> Outcome<()> {
        let asked = batch.len();
        match agent.ask(&Request::Locate { paths: batch })? {
            Answer::Located { files } if files.len() == asked => found.extend(files),
            other => return Err(agent.confused(&other).into()),
        }
        Ok(())
    };
    for path in &paths {
        let path = below.relative(path).map_err(|error| Failure::usage(error.data("nothing was changed")))?;
        if batch.len() == PATHS_MAX || bytes + path.0.len() > BYTES_MAX {
            ask(std::mem::take(&mut batch))?;
            bytes = 0;
        }
        bytes += path.0.len();
        batch.push(path);
    }
    ask(batch)?;
    print_result(args, &paths, &found)
}

fn paths(args: &Args) -> Outcome<Vec<PathBuf>> {
    if args.paths.as_slice() != ["-"] {
        return Ok(args.paths.iter().map(PathBuf::from).collect());
    }
    let mut text = Vec::new();
    io::stdin().lock().read_to_end(&mut text).map_err(|why| Error::new("standard input cannot be read").why(why))?;
    let end = if args.null { 0 } else { b'\n' };
    let named = text.split(|byte| *byte == end).filter(|path| !path.is_empty());
    Ok(named.map(|path| OsString::from_vec(path.to_vec()).into()).collect())
}

fn print_result(args: &Args, paths: &[PathBuf], found: &[Result<Located, String>]) -> Outcome {
    let mut text = String::new();
    if args.json {
        let lines: Vec<Line<'_>> = paths.iter().zip(found).map(|(path, found)| line(path, found)).collect();
        text = serde_json::to_string(&lines).map_err(|why| Error::new("JSON").why(why))? + "\n";
    } else {
        for (path, found) in paths.iter().zip(found) {
            match found {
                Ok(_) if args.node => {}
                Ok(found) => {
                    let copies: String = found.copies.iter().map(|copy| format!("\t{}", in_words(copy))).collect();
                    text.push_str(&format!("{}\t{}{copies}\n", path.display(), found.state));
                }
                Err(why) => eprintln!("surgetank: {}: it cannot be located\n  why:  {why}", path.display()),
            }
        }
    }
    if args.node {
        text = best_node(found.iter().flatten()).map(|node| format!("{node}\n")).unwrap_or_default();
    }
    words::print(&text)?;
    Ok(if found.iter().all(Result::is_ok) { exit::OK } else { exit::FAILED })
}

/// The node with most bytes; of several, the first by name.
fn best_node<'a>(found: impl Iterator<Item = &'a Located>) -> Option<&'a str> {
    let mut bytes: BTreeMap<&str, u64> = BTreeMap::new();
    for file in found {
        let nodes: BTreeSet<&str> = file.copies.iter().map(|copy| copy.node.as_str()).collect();
        nodes.into_iter().for_each(|node| *bytes.entry(node).or_default() += file.size_bytes);
    }
    let known = bytes.into_iter().filter(|(node, bytes)| !node.is_empty() && *bytes > 0);
    known.max_by_key(|(node, bytes)| (*bytes, std::cmp::Reverse(*node))).map(|(node, _)| node)
}

fn line<'a>(path: &Path, found: &'a Result<Located, String>) -> Line<'a> {
    Line { path: path.into(), located: found.as_ref().ok(), error: found.as_ref().err().map(String::as_str) }
}

/// `MEMBER:TIER:PATH`; outside a pool `TIER:PATH`.
fn in_words(copy: &CopyOn) -> String {
    let file = format!("{}:{}", copy.tier, String::from_utf8_lossy(&copy.path.0));
    copy.member.map_or_else(|| file.clone(), |member| format!("{member}:{file}"))
}

#[cfg(test)]
mod tests {
    use surgetank_core::report::FileState;

    use super::*;

    fn file(size_bytes: u64, nodes: &[&str]) -> Located {
        let copies = nodes.iter().map(|node| CopyOn {
            member: None,
            node: (*node).to_owned(),
            tier: "ram".to_owned(),
            path: PathText::default(),
        });
        let (state, durable) = (FileState::Sealed, false);
        Located { size_bytes, version: 1, state, home: None, copies: copies.collect(), durable, elsewhere: None }
    }

    #[test]
    fn node_with_most_bytes_is_the_best() {
        let best = |files: &[Located]| best_node(files.iter()).map(str::to_owned);
        assert_eq!(best(&[file(5, &["a"]), file(3, &["b"]), file(3, &["b", "c"])]).as_deref(), Some("b"));
        // (Two copies on one node count once.)
        assert_eq!(best(&[file(5, &["a"]), file(3, &["b", "b"])]).as_deref(), Some("a"));
        assert_eq!(best(&[file(5, &["b"]), file(5, &["a"])]).as_deref(), Some("a"));
        assert_eq!(best(&[file(0, &["a"]), file(7, &[]), file(9, &[""])]), None);
    }
}
