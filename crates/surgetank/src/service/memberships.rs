//! `memberships` in an agent's place: the members of pools as which its agents have queued what is not in the store yet.
//!
//! Each line is the number of a pool and that of a member. The next start adds the number of the first operation after it. A line is there before its member queues anything. It leaves once
//! everything is in the store.
//!
//! The danger that this avoids: what a lost member left is published later, over what other members have made since.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::Path;

use surgetank_core::namespace::{Membership, Namespace};
use surgetank_types::error::{Error, Result};

const FILE: &str = "memberships";

/// A membership, and the first operation that was queued after it. `None`: it lasts, as far as is known.
type Line = (Membership, Option<u64>);

/// The agent of this place begins, as this member, if it is one. Call it before the drain starts.
pub fn begin(namespace: &Namespace, state: &Path, present: Option<Membership>) -> Result<()> {
    let failed = |why: io::Error| {
        Error::new(format!("{} cannot be written or read", state.join(FILE).display()))
            .why(why)
            .remedy("free space in the directory of the state, or repair the file system below it")
            .data("what was not drained is safe on the tiers")
    };
    let known = read(state).map_err(failed)?;
    // (An agent that replaces another one is the same member.)
    let past: Vec<Line> = known.iter().filter(|(one, _)| Some(one) != present.as_ref()).cloned().collect();
    let past = if past.is_empty() { Vec::new() } else { namespace.was_member(&past) };
    let past = past.into_iter().map(|(one, until)| (one, Some(until)));
    let now: Vec<Line> = past.chain(present.map(|one| (one, None))).collect();
    if now == known { Ok(()) } else { write(state, &now).map_err(failed) }
}

fn read(state: &Path) -> io::Result<Vec<Line>> {
    let text = match fs::read_to_string(state.join(FILE)) {
        Ok(text) => text,
        Err(why) if why.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(why) => return Err(why),
    };
    let parse = |line: &str| {
        let mut words = line.split(' ');
        let membership = Membership { pool: words.next()?.to_owned(), member: words.next()?.parse().ok()? };
        let until = words.next().map(str::parse).transpose().ok()?;
        words.next().is_none().then_some((membership, until))
    };
    let damaged = || io::Error::new(ErrorKind::InvalidData, "it is damaged");
    text.lines().map(|line| parse(line).ok_or_else(damaged)).collect()
}

/// Another file takes the place of the present one, on the medium.
fn write(state: &Path, lines: &[Line]) -> io::Result<()> {
    let (path, fresh) = (state.join(FILE), state.join(format!("{FILE}.new")));
    let text_of = |(Membership { pool, member }, until): &Line| match until {
        Some(until) => format!("{pool} {member} {until}\n"),
        None => format!("{pool} {member}\n"),
    };
    let text: String = lines.iter().map(text_of).collect();
    let mut file = File::create(&fresh)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&fresh, &path)?;
    File::open(state)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memberships_are_read_as_written() {
        let state = tempfile::tempdir().unwrap();
        assert!(read(state.path()).unwrap().is_empty());
        let two = [("0123456789abcdef", 3), ("fedcba9876543210", 70_000)];
        let two = two.map(|(pool, member)| Membership { pool: pool.to_owned(), member });
        let [one, other] = two;
        let two = [(one, Some(17)), (other, None)];
        write(state.path(), &two).unwrap();
        assert_eq!(read(state.path()).unwrap(), two);
        fs::write(state.path().join(FILE), "0123456789abcdef\n").unwrap();
        assert_eq!(read(state.path()).unwrap_err().kind(), ErrorKind::InvalidData);
    }
}
