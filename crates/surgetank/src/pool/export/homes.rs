//! Requests on content that this member has for files of other members' directories, by the number of such a file.
//!
//! The danger that it avoids: a number that leads to another file. The kernel opens it in the one directory that has such
//! contents, and follows nothing there.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{OFlags, getxattr};
use rustix::io::Errno;
use surgetank_types::clock::tick;

use super::content::{chosen, close};
use super::holdings::{Handle, Holdings, OpenFile};
use super::place::path_of;
use crate::pool::call::{Answer, Home};

/// Its value at a file says which member has the content, and the file's number. Other members do not see it.
pub const HOME: &str =
    // (Unit tests serve a plain directory, which takes only names of users.)
    if cfg!(test) { "user.surgetank.home" } else { "system.surgetank.home" };
/// Its value is [`Content`](crate::pool::call::Content) of a home where a writer ends.
pub const CONTENT: &str = "system.surgetank.content";
/// The end of that value if a close waits for copies.
pub const WAITS: &str = " waits";
/// A program that has just made a file may not have made its content yet.
const MAKING: Duration = Duration::from_millis(500);
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// The home of an open file's content (`None`: this member, or the store), and whether a writer's close waits for copies.
pub fn of(fd: impl AsFd) -> Result<(Option<Home>, bool), Errno> {
    let mut value = [0; 64];
    let length = match getxattr(path_of(fd), HOME, &mut value[..]) {
        Ok(length) => length,
        // The last one: a mount outside a pool.
        Err(Errno::NODATA | Errno::OPNOTSUPP) => return Ok((None, false)),
        Err(error) => return Err(error),
    };
    let text = value.get(..length).and_then(|text| std::str::from_utf8(text).ok()).ok_or(Errno::PROTO)?;
    let (text, waits) = text.strip_suffix(WAITS).map_or((text, false), |text| (text, true));
    if text.is_empty() {
        return Ok((None, waits));
    }
    let (member, number) = text.split_once(' ').ok_or(Errno::PROTO)?;
    let home = member.parse().ok().zip(number.parse().ok());
    home.map(|(member, number)| (Some(Home { member, number }), waits)).ok_or(Errno::PROTO)
}

/// Opens the content. A key has one handle.
pub fn open(of: &Holdings, number: u64, key: u64, flags: u32) -> Result<Answer, Errno> {
    if let Some(handle) = of.moved(key) {
        return Ok(Answer::Opened { handle, waits: false });
    }
    let flags = chosen(flags, OFlags::empty())?;
    let until = tick() + MAKING;
    let fd = loop {
        match of.root.open_home(number, flags) {
            Err(Errno::NOENT | Errno::AGAIN) if tick() < until => std::thread::sleep(LOOK_EVERY),
            opened => break opened?,
        }
    };
    let file = OpenFile::new(fd, number, flags);
    let handle = of.opened(Handle::File(Arc::new(file)))?;
    let known = of.moves(key, handle);
    if known != handle {
        close(of, handle)?;
    }
    Ok(Answer::Opened { handle: known, waits: false })
}
