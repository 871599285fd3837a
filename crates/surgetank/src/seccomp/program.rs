//! The files that the kernel opens by itself when it executes a file: the interpreter of a script, and that of a
//! dynamic program.

use std::ffi::{CStr, OsStr};
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

/// The number of bytes that the kernel reads.
const HEAD_BYTES: usize = 256;
/// A program's own table is short; the kernel refuses most longer ones, too.
const SEGMENTS_BYTES_MAX: usize = 1 << 16;
const PATH_BYTES_MAX: usize = 4096;

pub fn interpreter_of(path: &CStr) -> Option<Vec<u8>> {
    // The open must not wait for a process at a fifo's other end.
    let file =
        File::options().read(true).custom_flags(libc::O_NONBLOCK).open(OsStr::from_bytes(path.to_bytes())).ok()?;
    let mut head = vec![0; HEAD_BYTES];
    let read = file.read_at(&mut head, 0).ok()?;
    head.truncate(read);
    if let Some(line) = head.strip_prefix(b"#!") {
        return of_script(line);
    }
    of_program(&head, &file)
}

fn of_script(line: &[u8]) -> Option<Vec<u8>> {
    let line = line.split(|byte| *byte == b'\n').next()?;
    let mut words = line.split(|byte| matches!(byte, b' ' | b'\t')).filter(|word| !word.is_empty());
    words.next().map(<[u8]>::to_vec)
}

/// PT_INTERP of a 64-bit ELF file of this machine's byte order.
fn of_program(head: &[u8], file: &File) -> Option<Vec<u8>> {
    const CLASS_64: u8 = 2;
    const SEGMENT_BYTES: usize = 56;
    const INTERPRETER: u32 = 3;
    if !head.starts_with(b"\x7fELF") || head.get(4) != Some(&CLASS_64) {
        return None;
    }
    let segments_at = u64::from_ne_bytes(head.get(32..40)?.try_into().ok()?);
    let bytes = usize::from(u16::from_ne_bytes(head.get(54..56)?.try_into().ok()?));
    let count = usize::from(u16::from_ne_bytes(head.get(56..58)?.try_into().ok()?));
    if bytes != SEGMENT_BYTES || bytes * count > SEGMENTS_BYTES_MAX {
        return None;
    }
    let mut segments = vec![0; bytes * count];
    file.read_exact_at(&mut segments, segments_at).ok()?;
    for segment in segments.chunks_exact(SEGMENT_BYTES) {
        let long = |from: usize| Some(u64::from_ne_bytes(segment.get(from..from + 8)?.try_into().ok()?));
        if u32::from_ne_bytes(segment.get(..4)?.try_into().ok()?) != INTERPRETER {
            continue;
        }
        let length = usize::try_from(long(32)?).ok().filter(|length| (2..=PATH_BYTES_MAX).contains(length))?;
        let mut path = vec![0; length];
        file.read_exact_at(&mut path, long(8)?).ok()?;
        return path.split(|byte| *byte == 0).next().filter(|path| !path.is_empty()).map(<[u8]>::to_vec);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_and_programs_name_their_interpreters() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = std::ffi::CString::new(file.path().as_os_str().as_bytes()).unwrap();
        let named = |content: &[u8]| {
            std::fs::write(file.path(), content).unwrap();
            interpreter_of(&path).map(|path| String::from_utf8(path).unwrap())
        };
        assert_eq!(named(b"#! \t/bin/sh -e\nexit\n").as_deref(), Some("/bin/sh"));
        assert_eq!(named(b"#!bin/own"), Some("bin/own".into()));
        assert_eq!(named(b"#!\n/bin/sh"), None);
        assert_eq!(named(b"echo"), None);
        assert_eq!(named(b""), None);
        // A program that is truncated anywhere has no interpreter, and causes no error.
        let program = std::fs::read("/bin/sh").unwrap();
        assert!(named(&program).unwrap().contains("ld-linux"));
        for length in [5, 40, 57, 63, 70, 200, 500] {
            assert_eq!(named(&program[..length]), None, "{length}");
        }
    }
}
