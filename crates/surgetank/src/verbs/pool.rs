//! `surgetank pool status`, `members`, `leave` and `lost`: the pool of the agent of a directory.

mod leave;
mod lost;

use std::path::PathBuf;

use surgetank_core::report::Pair;
use surgetank_types::error::Error;
use surgetank_types::model::Role;

use super::directory::{agent_of, without_pool};
use super::exit;
use super::outcome::Outcome;
use super::program::Program;
use super::settings::Settings;
use super::words::{bytes, count};
use crate::agent::client::Connection;
use crate::agent::wire::{Answer, Request};
use crate::pool::status::PoolStatus;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Members, directories and their owners, bytes on the network
    Status(Of),
    /// The members, a line each
    Members(Of),
    /// Leave the pool: drain, give the directories back, and unmount; other members go on
    Leave(leave::Args),
    /// Files whose content was only on a lost node: make them again
    Lost(lost::Args),
}

#[derive(Debug, clap::Args)]
struct Of {
    /// The directory [default: the one we are in]
    #[arg(value_name = "DIR")]
    directory: Option<PathBuf>,
    /// As JSON
    #[arg(long)]
    json: bool,
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
}

pub fn pool(program: &Program<'_>, args: &Args) -> Outcome {
    let (of, is_status) = match &args.what {
        What::Status(of) => (of, true),
        What::Members(of) => (of, false),
        What::Leave(args) => return leave::leave(program, args),
        What::Lost(args) => return lost::lost(program, args),
    };
    let directory = of.directory.clone().unwrap_or_else(|| PathBuf::from("."));
    let mut agent = agent_of(program, &Settings::of_state(of.state.as_ref()), &directory)?;
    let status = match agent.ask(&Request::Pool)? {
        Answer::Pool(Some(status)) => status,
        _ => return Err(without_pool(&agent).into()),
    };
    let traffic = if is_status { traffic(&mut agent)? } else { None };
    if of.json {
        let all = WithTraffic { status: &status, traffic: traffic.as_deref() };
        let text =
            serde_json::to_string_pretty(&all).map_err(|why| Error::new("the status cannot be printed").why(why))?;
        println!("{text}");
        return Ok(exit::OK);
    }
    print_members(&status);
    if is_status {
        print_directories(&status);
        print_traffic(traffic.as_deref().unwrap_or_default());
    }
    Ok(exit::OK)
}

/// The status, and the network between each two members.
#[derive(serde::Serialize)]
struct WithTraffic<'a> {
    #[serde(flatten)]
    status: &'a PoolStatus,
    #[serde(skip_serializing_if = "Option::is_none")]
    traffic: Option<&'a [Pair]>,
}

/// Each member knows its own part, and the agent asks all of them for its status.
fn traffic(agent: &mut Connection) -> Result<Option<Vec<Pair>>, Error> {
    match agent.ask(&Request::Status)? {
        Answer::Status(status) => Ok(status.pool.map(|pool| pool.traffic)),
        other => Err(agent.confused(&other)),
    }
}

fn print_members(status: &PoolStatus) {
    println!(
        "{:>6}  {:>4}  {:<32}  {:>10}  {:>12}  {:>12}  {:>6}",
        "member", "term", "address", "calls", "received", "sent", "open"
    );
    for member in &status.members {
        let own = if member.member == status.member { "  (this one)" } else { "" };
        let role = if member.role == Role::Storage { "  for storage" } else { "" };
        println!(
            "{:>6}  {:>4}  {:<32}  {:>10}  {:>12}  {:>12}  {:>6}{own}{role}",
            member.member,
            member.term,
            member.address,
            count(member.calls),
            bytes(member.received_bytes),
            bytes(member.sent_bytes),
            member.handles
        );
    }
    for lost in &status.lost {
        println!(
            "{:>6}  {:>4}  {:<32}  lost: what it had not put into the store is missing",
            lost.member, "", lost.address
        );
    }
}

fn print_directories(status: &PoolStatus) {
    println!();
    println!("{:>6}  directory", "owner");
    for claim in &status.claims {
        println!("{:>6}  {}", claim.owner, claim.directory);
    }
}

/// The pairs with the most bytes. The JSON output has all.
fn print_traffic(traffic: &[Pair]) {
    const SHOWN_MAX: usize = 20;
    if traffic.is_empty() {
        return;
    }
    let mut pairs: Vec<&Pair> = traffic.iter().collect();
    pairs.sort_by_key(|pair| (std::cmp::Reverse(pair.bytes), pair.from, pair.to));
    println!();
    println!("{:>6}  {:>6}  {:>12}  {:>10}", "from", "to", "bytes", "calls");
    for pair in pairs.iter().take(SHOWN_MAX) {
        let known = |value: Option<String>| value.unwrap_or_else(|| "no answer".to_owned());
        println!(
            "{:>6}  {:>6}  {:>12}  {:>10}",
            pair.from,
            pair.to,
            known(pair.bytes.map(bytes)),
            known(pair.calls.map(count))
        );
    }
    if pairs.len() > SHOWN_MAX {
        println!("… and {} more pairs", count((pairs.len() - SHOWN_MAX) as u64));
    }
}
