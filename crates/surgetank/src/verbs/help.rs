//! `surgetank help [VERB | TOPIC]`: the pages of the manual, which are part of the program.
//!
//! Messages with more to explain point here, because an installed program comes without its sources. `--man DIR` writes
//! man pages of the verbs, from the same command line.

use std::path::{Path, PathBuf};

use clap::Command;
use surgetank_policy::config::key::nearest;
use surgetank_types::error::Error;

use super::outcome::{Failure, Outcome};
use super::{exit, words};

#[derive(Debug, clap::Args)]
pub struct HelpArgs {
    /// A verb, or one of the topics that `surgetank help` lists
    #[arg(value_name = "VERB|TOPIC")]
    about: Option<String>,
    /// Write a man page of each verb into this directory
    #[arg(long, value_name = "DIR", conflicts_with = "about")]
    man: Option<PathBuf>,
}

/// A page of the manual: its name, its subject, and its text.
struct Topic {
    name: &'static str,
    about: &'static str,
    text: &'static str,
}

macro_rules! topics {
    ($($name:literal: $about:literal),* $(,)?) => {
        &[$(Topic { name: $name, about: $about, text: include_str!(concat!("../../../../docs/", $name, ".md")) }),*]
    };
}

const TOPICS: &[Topic] = topics! {
    "configuration": "every key of surgetank.toml, variable and option; tiers and rules",
    "durability": "what is safe when, and what each kind of failure costs",
    "exit-codes": "what each exit code means",
    "hints": "what programs and workflows can say about their files",
    "metrics": "what the agent serves for Prometheus",
    "model": "how `model` and `advise` predict; descriptions of workloads",
    "report": "what `report` shows, and the record of a run",
    "semantics": "what programs see, operation by operation",
    "stores": "directories, S3, HDFS, Redis and GridFS as stores; compression and deduplication",
    "workflows": "what a workflow's graph is used for",
};

/// `line`: the whole command line, whose verbs have their own help.
pub fn help(args: &HelpArgs, mut line: Command) -> Outcome {
    if let Some(dir) = &args.man {
        write_man_pages(line, dir)?;
        return Ok(exit::OK);
    }
    let Some(about) = args.about.as_deref() else {
        words::print(&format!("{}\n{}", line.render_long_help(), list()))?;
        return Ok(exit::OK);
    };
    let topic = TOPICS.iter().find(|topic| topic.name == about).map(|topic| readable(topic.text));
    let verb = line.find_subcommand_mut(about).filter(|verb| !verb.is_hide_set()).map(|verb| {
        let named = std::mem::take(verb).bin_name(format!("surgetank {about}"));
        named.clone().render_long_help().to_string()
    });
    if topic.is_none() && verb.is_none() {
        let shown = line.get_subcommands().filter(|verb| !verb.is_hide_set());
        let verbs: Vec<String> = shown.map(|verb| verb.get_name().to_owned()).collect();
        let known = TOPICS.iter().map(|topic| topic.name).chain(verbs.iter().map(String::as_str));
        let remedy = match nearest(about, known) {
            Some(near) => format!("surgetank help {near}"),
            None => "`surgetank help` lists the verbs and the topics".to_owned(),
        };
        let what = format!("there is no verb and no topic '{about}'");
        return Err(Failure::usage(Error::new(what).remedy(remedy)));
    }
    words::print(&[verb, topic].into_iter().flatten().collect::<Vec<_>>().join("\n"))?;
    Ok(exit::OK)
}

fn write_man_pages(line: Command, dir: &Path) -> Result<(), Error> {
    let failed = |why: std::io::Error| {
        let what = format!("man pages cannot be written to {}", dir.display());
        let remedy = "surgetank help --man DIR, with a directory that you may write";
        Error::new(what).why(why).remedy(remedy).data("no data is concerned")
    };
    std::fs::create_dir_all(dir).map_err(failed)?;
    clap_mangen::generate_to(line, dir).map_err(failed)
}

fn list() -> String {
    let rows = TOPICS.iter().map(|topic| format!("  {:<14} {}\n", topic.name, topic.about));
    format!("Topics, for `surgetank help TOPIC`:\n{}", rows.collect::<String>())
}

/// Markdown's links lead to files that an installation lacks. `[stores](stores.md#s3)` becomes "stores (`surgetank help
/// stores`)"; every other link becomes its words alone.
fn readable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("](") {
        let target = after.split_once(')').filter(|(target, _)| !target.contains(char::is_whitespace));
        let (Some(open), Some((target, behind))) = (before.rfind('['), target) else {
            out.push_str(before);
            out.push_str("](");
            rest = after;
            continue;
        };
        let label = &before[open + 1..];
        out.push_str(before[..open].strip_suffix('!').unwrap_or(&before[..open]));
        out.push_str(label);
        let page = target.split('#').next().unwrap_or("").trim_end_matches(".md");
        if TOPICS.iter().any(|topic| topic.name == page) {
            out.push_str(&format!(" (`surgetank help {page}`)"));
        }
        rest = behind;
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::*;

    #[test]
    fn links_become_words_and_topics() {
        assert_eq!(readable("see [stores](stores.md#s3), [below](#x)"), "see stores (`surgetank help stores`), below");
        assert_eq!(readable("![plot](plots/a.png) and a[1](b c) stay"), "plot and a[1](b c) stay");
        for topic in TOPICS {
            let text = readable(topic.text);
            assert!(!text.contains(".md#") && text.starts_with("# "), "{}", topic.name);
        }
    }

    fn sources(dir: &Path, out: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(dir).unwrap().flatten() {
            let path = entry.path();
            if path.is_dir() {
                sources(&path, out);
            } else if path.extension().is_some_and(|end| end == "rs" || end == "py") {
                out.push(path);
            }
        }
    }

    /// Messages once pointed to files of the source tree, which a user of an installed program does not have.
    #[test]
    fn messages_point_to_topics_that_exist() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut files = Vec::new();
        ["crates/core/src", "crates/surgetank/src", "python/surgetank", "python/snakemake_storage_plugin_surgetank"]
            .iter()
            .for_each(|dir| sources(&root.join(dir), &mut files));
        let mut named = 0;
        for file in files.iter().filter(|file| !file.ends_with("verbs/help.rs") && !file.ends_with("tests.rs")) {
            let text = std::fs::read_to_string(file).unwrap();
            let is_comment = |line: &str| {
                let line = line.trim_start();
                ["//", "#", "\"\"\"", "* "].iter().any(|mark| line.starts_with(mark)) || line.contains("include_str!")
            };
            for (at, line) in text.lines().enumerate().take_while(|(_, line)| !line.contains("#[cfg(test)]")) {
                let place = format!("{}:{}: {line}", file.display(), at + 1);
                if line.contains('"') && !is_comment(line) {
                    assert!(!line.contains("docs/") && !line.contains("examples/"), "{place}");
                }
                for (start, _) in line.match_indices("surgetank help ") {
                    let word = &line[start + "surgetank help ".len()..];
                    let name = word.split(|c: char| !c.is_ascii_lowercase() && c != '-').next().unwrap_or("");
                    named += 1;
                    assert!(name.is_empty() || TOPICS.iter().any(|topic| topic.name == name), "{place}");
                }
            }
        }
        assert!(named > 0);
        for verb in super::super::command().get_subcommands_mut() {
            let help = verb.render_long_help().to_string();
            assert!(!help.contains("docs/"), "{help}");
        }
    }
}
