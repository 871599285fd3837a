//! Quoting of command lines that users are shown. A shell that reads such a line gets each word unchanged.
//!
//! Invariant: a line contains no control character, so that a file's name cannot repaint a terminal or start a second command.
//! The danger that it avoids: a blank or a quote in a path turns the advice into another command.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

/// One word, quoted where a POSIX shell would interpret it. Control characters and bytes that are not UTF-8 are written as
/// `$'\NNN'` (octal), which bash, zsh and ksh read.
pub fn word(text: impl AsRef<OsStr>) -> String {
    let bytes = text.as_ref().as_bytes();
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.is_empty() && text.chars().all(is_plain) => text.to_owned(),
        Ok(text) if !text.contains(char::is_control) => format!("'{}'", text.replace('\'', r"'\''")),
        _ => escaped(bytes),
    }
}

/// The words of one command, each quoted by [`word`], separated by blanks.
pub fn line<W: AsRef<OsStr>>(words: impl IntoIterator<Item = W>) -> String {
    words.into_iter().map(word).collect::<Vec<_>>().join(" ")
}

fn is_plain(c: char) -> bool {
    c.is_alphanumeric() || "-_./,:=@%+".contains(c)
}

fn escaped(bytes: &[u8]) -> String {
    let mut text = "$'".to_owned();
    for byte in bytes {
        match byte {
            b'\'' | b'\\' => text.extend(['\\', char::from(*byte)]),
            b' '..=b'~' => text.push(char::from(*byte)),
            // Three octal digits, so that a digit that follows does not become a part of the number.
            other => text += &format!("\\{other:03o}"),
        }
    }
    text + "'"
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::os::unix::ffi::OsStringExt;
    use std::process::Command;

    use super::*;

    #[test]
    fn word_without_special_characters_stays_unquoted() {
        assert_eq!(line(["surgetank", "run", "--over", "/a/b-c_1.d"]), "surgetank run --over /a/b-c_1.d");
        assert_eq!(line(["a b", "it's", "", "~"]), r"'a b' 'it'\''s' '' '~'");
    }

    #[test]
    fn line_read_by_shell_gives_the_same_words() {
        let all: Vec<u8> = (1..=255).collect();
        let words: Vec<OsString> = vec![
            "a b".into(),
            "it's \"quoted\"".into(),
            "$(touch x); `y` & | < > * ? [a] {b,c} ~ # ! \\".into(),
            "s3://b/p?endpoint=http://h:1&region=r".into(),
            "two\nlines\t7".into(),
            "größe".into(),
            "".into(),
            OsString::from_vec(b"\xff1'2".to_vec()),
            OsString::from_vec(all),
        ];
        let script = format!("printf '%s\\0' {}", line(&words));
        assert!(!script.contains(char::is_control), "{script}");
        let output = Command::new("bash").args(["-c", &script]).output().unwrap().stdout;
        let read: Vec<OsString> = output
            .strip_suffix(b"\0")
            .unwrap()
            .split(|byte| *byte == 0)
            .map(|w| OsString::from_vec(w.to_vec()))
            .collect();
        assert_eq!(read, words);
    }
}
