//! Hints about the place of a file: `size`, `tier`, `collocate`, and WOSS's `DP`.

use crate::hint::advice::Advice;
use crate::hint::module::Module;
use crate::words::quantity::size_bytes;
use crate::words::{Collocate as Place, collocate};

/// Its expected size.
#[derive(Debug)]
pub(super) struct Size;

impl Module for Size {
    fn name(&self) -> &'static str {
        "size"
    }

    fn hear(&self, value: &str, advice: &mut Advice) -> Result<(), String> {
        advice.size_bytes = Some(size_bytes(value)?);
        Ok(())
    }
}

/// The tier to prefer. (Which there are, the core knows.)
#[derive(Debug)]
pub(super) struct Tier;

impl Module for Tier {
    fn name(&self) -> &'static str {
        "tier"
    }

    fn hear(&self, value: &str, advice: &mut Advice) -> Result<(), String> {
        if value.is_empty() {
            return Err("the name of a tier is expected".to_owned());
        }
        advice.tier = Some(value.into());
        Ok(())
    }
}

/// With which files it is on one member of a pool.
#[derive(Debug)]
pub(super) struct Collocate;

impl Module for Collocate {
    fn name(&self) -> &'static str {
        "collocate"
    }

    fn hear(&self, value: &str, advice: &mut Advice) -> Result<(), String> {
        advice.collocate = Some(collocate(value)?);
        Ok(())
    }
}

/// WOSS: data placement.
#[derive(Debug)]
pub(super) struct Dp;

impl Module for Dp {
    fn name(&self) -> &'static str {
        "DP"
    }

    fn hear(&self, value: &str, advice: &mut Advice) -> Result<(), String> {
        let placed = placement(value)?;
        advice.collocate = advice.collocate.take().or(placed);
        Ok(())
    }
}

/// (A group may have any name, also `local`.)
fn placement(value: &str) -> Result<Option<Place>, String> {
    let (pattern, of) = value.split_once('|').map_or((value, None), |(pattern, of)| (pattern, Some(of.trim())));
    match (pattern.trim().to_ascii_lowercase().as_str(), of) {
        ("local", None) => Ok(Some(Place::Local)),
        ("collocation", Some("local")) => Ok(Some(Place::With("local".into()))),
        ("collocation", Some(group)) if !group.is_empty() => collocate(group).map(Some),
        ("scatter", Some(blocks)) if blocks.parse::<u64>().is_ok_and(|blocks| blocks > 0) => Ok(None),
        _ => Err(format!("'{value}' is none of local, collocation|GROUP, scatter|BLOCKS")),
    }
}
