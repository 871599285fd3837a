//! The faults that the mirror injects.

use rustix::io::Errno;

use crate::mirror::faults::{Faults, Op, Wrong, hits_of};

#[test]
fn file_turns_faults_on_and_off() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("faults");
    let faults = Faults::read_from(file.clone());
    assert_eq!(faults.apply(Op::Write).unwrap(), Wrong::Nothing);
    std::fs::write(&file, "# none\nwrite,create ENOSPC 2\nrename lost:EIO\nwrite corrupt # then this\n").unwrap();
    for op in [Op::Write, Op::Create] {
        assert_eq!(faults.apply(op).unwrap_err().errno, Errno::NOSPC);
    }
    assert_eq!(faults.apply(Op::Write).unwrap(), Wrong::Corrupt);
    assert_eq!(faults.apply(Op::Create).unwrap(), Wrong::Nothing);
    assert_eq!(faults.apply(Op::Rename).unwrap(), Wrong::Lost(Errno::IO));
    assert_eq!(std::fs::read(hits_of(&file)).unwrap().len(), 4);
    std::fs::write(&file, "change EROFS\n").unwrap();
    assert_eq!(faults.apply(Op::Rename).unwrap_err().errno, Errno::ROFS);
    assert_eq!(faults.apply(Op::Lookup).unwrap(), Wrong::Nothing);
    std::fs::write(&file, "write what\n").unwrap();
    assert_eq!(faults.apply(Op::Lookup).unwrap_err().errno, Errno::PROTO);
    std::fs::remove_file(&file).unwrap();
    assert_eq!(faults.apply(Op::Rename).unwrap(), Wrong::Nothing);
}
