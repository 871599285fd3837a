//! Hints about copies at other members of a pool: `replicas`, `replicas_at`, and WOSS's `Replication` and
//! `ReplicationSemantics`.

use crate::hint::advice::Advice;
use crate::hint::module::Module;
use crate::words::{REPLICAS_MAX, ReplicasAt as When, one_of, replicas, replicas_at};
use surgetank_types::model::Mode;

/// On how many members of a pool it is until the store has it.
#[derive(Debug)]
pub(super) struct Replicas;

impl Module for Replicas {
    fn name(&self) -> &'static str {
        "replicas"
    }

    fn hear(&self, value: &str, advice: &mut Advice) -> Result<(), String> {
        advice.replicas = Some(replicas(value)?);
        Ok(())
    }
}

/// Whether its close waits for that.
#[derive(Debug)]
pub(super) struct ReplicasAt;

impl Module for ReplicasAt {
    fn name(&self) -> &'static str {
        "replicas_at"
    }

    fn hear(&self, value: &str, advice: &mut Advice) -> Result<(), String> {
        advice.replicas_at = Some(replicas_at(value)?);
        Ok(())
    }
}

/// WOSS: the number of copies. On one node the second copy is the store's.
#[derive(Debug)]
pub(super) struct Replication;

impl Module for Replication {
    fn name(&self) -> &'static str {
        "Replication"
    }

    fn hear(&self, value: &str, advice: &mut Advice) -> Result<(), String> {
        let copies = value.parse::<u32>().ok().filter(|copies| *copies > 0);
        let copies = copies.ok_or_else(|| format!("'{value}' is not a number of copies, 1 or more"))?;
        advice.mode = advice.mode.or((copies > 1).then_some(Mode::Copy));
        advice.replicas = advice.replicas.or(Some(copies.min(REPLICAS_MAX)));
        Ok(())
    }
}

/// WOSS: when a copy counts as made.
#[derive(Debug)]
pub(super) struct ReplicationSemantics;

impl Module for ReplicationSemantics {
    fn name(&self) -> &'static str {
        "ReplicationSemantics"
    }

    fn hear(&self, value: &str, advice: &mut Advice) -> Result<(), String> {
        let when = one_of(value, &[("optimistic", When::Later), ("pessimistic", When::Close)])?;
        advice.replicas_at = advice.replicas_at.or(Some(when));
        Ok(())
    }
}
