//! Users and groups: HDFS has names, a file system has numbers. This machine's lists translate.

use std::collections::HashMap;
use std::ffi::{CStr, CString};

use surgetank_types::sync::{Mutex, PoisonError};

/// The number of an unknown user or group.
const NOBODY: u32 = 65534;
/// Space for one entry of the lists; a group's entry has all its members.
const TEXT_BYTES: usize = 64 << 10;

/// Name of the process's user.
pub fn own_name() -> Option<String> {
    let mut text = vec![0_u8; TEXT_BYTES];
    // SAFETY: an all-zero passwd is a valid value; the call below fills it.
    let mut passwd: libc::passwd = unsafe { std::mem::zeroed() };
    let mut found = std::ptr::null_mut();
    let uid = rustix::process::geteuid().as_raw();
    // SAFETY: all pointers are to live locals, and the length is that of `text`.
    let status = unsafe { libc::getpwuid_r(uid, &mut passwd, text.as_mut_ptr().cast(), text.len(), &mut found) };
    if status != 0 || found.is_null() {
        return None;
    }
    // SAFETY: on success `pw_name` points to a terminated string inside `text`, which lives to the end of this function.
    unsafe { CStr::from_ptr(passwd.pw_name) }.to_str().ok().map(str::to_owned)
}

fn number_of_user(name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    let mut text = vec![0_u8; TEXT_BYTES];
    // SAFETY: an all-zero passwd is a valid value; the call below fills it.
    let mut passwd: libc::passwd = unsafe { std::mem::zeroed() };
    let mut found = std::ptr::null_mut();
    let (space, bytes) = (text.as_mut_ptr().cast(), text.len());
    // SAFETY: all pointers are to live locals, the name is terminated, and the length is that of `text`.
    let status = unsafe { libc::getpwnam_r(name.as_ptr(), &mut passwd, space, bytes, &mut found) };
    (status == 0 && !found.is_null()).then_some(passwd.pw_uid)
}

fn number_of_group(name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    let mut text = vec![0_u8; TEXT_BYTES];
    // SAFETY: an all-zero group is a valid value; the call below fills it.
    let mut group: libc::group = unsafe { std::mem::zeroed() };
    let mut found = std::ptr::null_mut();
    let (space, bytes) = (text.as_mut_ptr().cast(), text.len());
    // SAFETY: all pointers are to live locals, the name is terminated, and the length is that of `text`.
    let status = unsafe { libc::getgrnam_r(name.as_ptr(), &mut group, space, bytes, &mut found) };
    (status == 0 && !found.is_null()).then_some(group.gr_gid)
}

/// Cache of names that were looked up; the lists may be on the network.
pub struct People {
    /// The process's user in HDFS.
    pub user: String,
    uid: u32,
    gid: u32,
    users: Mutex<HashMap<String, u32>>,
    groups: Mutex<HashMap<String, u32>>,
}

impl People {
    pub fn new(user: &str) -> Self {
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        Self { user: user.to_owned(), uid, gid, users: Mutex::default(), groups: Mutex::default() }
    }

    /// Files of the own user there are its files here, even if the names differ.
    pub fn owner(&self, owner: &str, group: &str) -> (u32, u32) {
        if owner == self.user {
            return (self.uid, known(&self.groups, group, number_of_group).unwrap_or(self.gid));
        }
        let uid = known(&self.users, owner, number_of_user).unwrap_or(NOBODY);
        (uid, known(&self.groups, group, number_of_group).unwrap_or(NOBODY))
    }
}

fn known(numbers: &Mutex<HashMap<String, u32>>, name: &str, ask: fn(&str) -> Option<u32>) -> Option<u32> {
    let lock = || numbers.lock().unwrap_or_else(PoisonError::into_inner);
    let found = lock().get(name).copied();
    let number = match found {
        Some(number) => number,
        None => {
            let number = ask(name).unwrap_or(NOBODY);
            lock().insert(name.to_owned(), number);
            number
        }
    };
    (number != NOBODY).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_translate_to_numbers() {
        let people = People::new("somebody-there");
        let own = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        assert_eq!(people.owner("somebody-there", "no-such-group"), own);
        for _ in 0..2 {
            assert_eq!(people.owner("root", "root"), (0, 0));
            assert_eq!(people.owner("nobody-knows-him", "no-such-group"), (NOBODY, NOBODY));
        }
        assert!(own_name().is_some());
    }
}
