//! `surgetank.toml`: read from the parsed tree, so that every error names its line.
//!
//! The danger that it avoids: a misspelt key that is silently ignored. An unknown key is an error that names the nearest known
//! one.

use std::ops::Range;
use std::path::Path;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::key::{
    Draft, LISTS, Origin, SCALARS, Sourced, TIER_KEYS, compress, empty_rule, no_tiers, refused, rule, rule_keys, tier,
    tier_name, unknown,
};
use super::{Authority, Pattern, RuleConfig, Survives, TierConfig};
use crate::hint::Name;
use crate::words::quantity::size_bytes;
use crate::words::{collocate, mode, one_of, replicas, replicas_at, timing};
use surgetank_types::error::{Error, Result};
use surgetank_types::model::FsyncTarget;

/// Reads the file's `text` into `draft`. `label` is the file's name in messages.
pub fn read(text: &str, path: &Path, label: &str, authority: Authority, draft: &mut Draft) -> Result<()> {
    let file = File { text, label, base: path.parent().unwrap_or(Path::new("/")), authority };
    let table = DeTable::parse(text).map_err(|error| {
        let line = error.span().map_or(1, |span| line_of(text, span.start));
        Error::new(format!("{label}:{line}: this is not TOML"))
            .why(error.message())
            .remedy("correct the line; strings need quotes: quiet = \"50ms\"")
    })?;
    for (key, value) in table.get_ref() {
        let origin = file.origin(key.span());
        let key: &str = key.get_ref();
        match key {
            "tiers" => {
                let tiers = file.list(key, value)?;
                if tiers.is_empty() {
                    return Err(no_tiers(&origin));
                }
                draft.tiers = Some(tiers.iter().map(|item| file.tier(item)).collect::<Result<_>>()?);
            }
            "rules" => {
                for item in file.list(key, value)? {
                    draft.rules.push(file.rule(item)?);
                }
            }
            _ if SCALARS.contains(&key) => draft.set(key, &file.scalar(key, value)?, &origin)?,
            _ => {
                return Err(unknown("key", key, &origin.label, SCALARS.iter().chain(&LISTS).copied()));
            }
        }
    }
    Ok(())
}

struct File<'a> {
    text: &'a str,
    label: &'a str,
    base: &'a Path,
    authority: Authority,
}

impl File<'_> {
    fn origin(&self, span: Range<usize>) -> Origin {
        Origin {
            label: format!("{}:{}", self.label, line_of(self.text, span.start)),
            base: self.base.to_path_buf(),
            authority: self.authority,
        }
    }

    /// The text of a string, number or boolean.
    fn scalar(&self, key: &str, value: &Spanned<DeValue<'_>>) -> Result<String> {
        Ok(match value.get_ref() {
            DeValue::String(text) => text.to_string(),
            DeValue::Boolean(truth) => truth.to_string(),
            DeValue::Integer(number) if number.radix() == 10 => number.as_str().to_owned(),
            DeValue::Float(number) => number.as_str().to_owned(),
            other => {
                let why = format!("expected a single value, found {}", kind(other));
                return Err(refused(&self.origin(value.span()), key, &why));
            }
        })
    }

    fn truth(&self, key: &str, value: &Spanned<DeValue<'_>>) -> Result<bool> {
        value
            .get_ref()
            .as_bool()
            .ok_or_else(|| refused(&self.origin(value.span()), key, "expected true or false, without quotes"))
    }

    fn list<'v, 'i>(&self, key: &str, value: &'v Spanned<DeValue<'i>>) -> Result<&'v [Spanned<DeValue<'i>>]> {
        match value.get_ref() {
            DeValue::Array(items) => Ok(items),
            other => {
                let why =
                    format!("expected a list, found {}; write [[{key}]] tables or {key} = [\"…\", \"…\"]", kind(other));
                Err(refused(&self.origin(value.span()), key, &why))
            }
        }
    }

    fn tier(&self, item: &Spanned<DeValue<'_>>) -> Result<Sourced<TierConfig>> {
        let origin = self.origin(item.span());
        let table = match item.get_ref() {
            DeValue::String(text) => return tier(text, &origin),
            DeValue::Table(table) => table,
            other => {
                return Err(refused(&origin, "tiers", &format!("a tier is a string or a table, not {}", kind(other))));
            }
        };
        let mut made = TierConfig { name: String::new(), paths: Vec::new(), cap_bytes: None, survives: None };
        for (key, value) in table {
            let at = self.origin(key.span());
            let key: &str = key.get_ref();
            match key {
                "name" => made.name = tier_name(&self.scalar(key, value)?, &at)?,
                "path" => made.paths.push(self.base.join(self.scalar(key, value)?)),
                "paths" => {
                    for path in self.list(key, value)? {
                        made.paths.push(self.base.join(self.scalar(key, path)?));
                    }
                }
                "size" => {
                    made.cap_bytes =
                        Some(size_bytes(&self.scalar(key, value)?).map_err(|why| refused(&at, key, &why))?);
                }
                "survives" => {
                    let choices = [("agent", Survives::Agent), ("reboot", Survives::Reboot), ("node", Survives::Node)];
                    let text = self.scalar(key, value)?;
                    made.survives = Some(one_of(&text, &choices).map_err(|why| refused(&at, key, &why))?);
                }
                _ => return Err(unknown("key", key, &at.label, TIER_KEYS.iter().copied())),
            }
        }
        if made.name.is_empty() || made.paths.is_empty() {
            return Err(refused(&origin, "tiers", "a tier needs name and path (or paths)"));
        }
        Ok(Sourced { value: made, origin })
    }

    fn rule(&self, item: &Spanned<DeValue<'_>>) -> Result<RuleConfig> {
        let origin = self.origin(item.span());
        let table = match item.get_ref() {
            DeValue::String(text) => return rule(text, &origin),
            DeValue::Table(table) => table,
            other => {
                return Err(refused(&origin, "rules", &format!("a rule is a string or a table, not {}", kind(other))));
            }
        };
        let mut made = empty_rule(Pattern::Glob(String::new()), &origin);
        let mut matched = false;
        for (key, value) in table {
            let at = self.origin(key.span());
            let key: &str = key.get_ref();
            let wrong = |why: String| refused(&at, key, &why);
            match key {
                "match" => {
                    made.pattern = Pattern::Glob(self.scalar(key, value)?);
                    matched = true;
                }
                "mode" => made.mode = Some(mode(&self.scalar(key, value)?).map_err(wrong)?),
                "timing" => made.timing = Some(timing(&self.scalar(key, value)?).map_err(wrong)?),
                "fsync" => {
                    let choices = [("tier", FsyncTarget::Tier), ("store", FsyncTarget::Store)];
                    made.fsync = Some(one_of(&self.scalar(key, value)?, &choices).map_err(wrong)?);
                }
                "size" => made.size_bytes = Some(size_bytes(&self.scalar(key, value)?).map_err(wrong)?),
                "tier" => made.tier = Some(self.scalar(key, value)?),
                "prefetch" => made.prefetch = self.truth(key, value)?,
                "pin" => made.pin = self.truth(key, value)?,
                "replicas" => made.replicas = Some(replicas(&self.scalar(key, value)?).map_err(wrong)?),
                "replicas_at" => made.replicas_at = Some(replicas_at(&self.scalar(key, value)?).map_err(wrong)?),
                "collocate" => made.collocate = Some(collocate(&self.scalar(key, value)?).map_err(wrong)?),
                "dedup" => made.dedup = Some(self.truth(key, value)?),
                "compress" => made.compress = Some(compress(&self.scalar(key, value)?).map_err(wrong)?),
                _ => match Name::parse(key).ok().filter(|name| name.acts()) {
                    Some(name) => {
                        let value = self.scalar(key, value)?;
                        name.check(&value).map_err(wrong)?;
                        made.acting.set(name.as_str(), &value);
                    }
                    None => return Err(unknown("key", key, &at.label, rule_keys())),
                },
            }
        }
        if !matched {
            return Err(refused(&origin, "rules", "a rule needs match = \"GLOB\""));
        }
        Ok(made)
    }
}

fn kind(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
        DeValue::Datetime(_) => "a date",
        DeValue::Integer(number) if number.radix() != 10 => "a number that is not decimal",
        DeValue::Integer(_) | DeValue::Float(_) => "a number",
        DeValue::Boolean(_) => "true or false",
        DeValue::String(_) => "a single string",
    }
}

fn line_of(text: &str, at: usize) -> usize {
    1 + text.as_bytes().iter().take(at).filter(|byte| **byte == b'\n').count()
}
