use std::io::{Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;

/// Name, stretches of data (offset, length), length of the file.
type Shape = (&'static str, &'static [(u64, usize)], u64);

fn unnamed(dir: &Path) -> File {
    tempfile::tempfile_in(dir).unwrap()
}

/// tmpfs and the disk; both exist on every machine that runs these tests.
fn dirs() -> [std::path::PathBuf; 2] {
    let disk = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target");
    std::fs::create_dir_all(&disk).unwrap();
    ["/dev/shm".into(), disk]
}

fn pattern(offset: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|index| ((offset + index).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8 | 1).collect()
}

fn fill(file: &File, stretches: &[(u64, usize)], len: u64) {
    file.set_len(len).unwrap();
    for (offset, len) in stretches {
        file.write_all_at(&pattern(*offset, *len), *offset).unwrap();
    }
}

fn content(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

fn open_gate(_: u64) -> io::Result<()> {
    Ok(())
}

const MIB: u64 = 1 << 20;

#[test]
fn copy_between_file_systems_keeps_bytes_and_holes() {
    let shapes: [Shape; 6] = [
        ("empty", &[], 0),
        ("dense", &[(0, (9 * MIB + 123) as usize)], 9 * MIB + 123),
        ("only a hole", &[], 7 * MIB),
        ("hole at the end", &[(0, 5000)], 20 * MIB),
        ("holes between", &[(MIB, 70_000), (9 * MIB, 4096), (30 * MIB - 1, 1)], 30 * MIB),
        ("hole at the start", &[(16 * MIB, 12345)], 16 * MIB + 12345),
    ];
    for from_dir in dirs() {
        for to_dir in dirs() {
            for (name, stretches, len) in shapes {
                let (mut from, mut to) = (unnamed(&from_dir), unnamed(&to_dir));
                fill(&from, stretches, len);
                to.write_all(b"what was there before").unwrap();
                from.seek(io::SeekFrom::Start(17)).unwrap();
                to.seek(io::SeekFrom::Start(3)).unwrap();
                let moved = AtomicU64::new(0);
                let gate = |bytes| {
                    moved.fetch_add(bytes, Ordering::Relaxed);
                    Ok(())
                };
                let what = format!("{name}: {} → {}", from_dir.display(), to_dir.display());
                assert_eq!(copy_file(&from, &to, len, &gate).unwrap(), len, "{what}");
                assert!(content(&from) == content(&to), "{what}: bytes differ");
                assert_eq!(from.stream_position().unwrap(), 17, "{what}");
                assert_eq!(to.stream_position().unwrap(), 3, "{what}");
                // Holes may grow by at most the file systems' block sizes.
                let (from_blocks, to_blocks) = (from.metadata().unwrap().blocks(), to.metadata().unwrap().blocks());
                assert!(to_blocks <= from_blocks + 128, "{what}: {from_blocks} blocks became {to_blocks}");
                let data: u64 = stretches.iter().map(|(_, len)| *len as u64).sum();
                assert!(moved.load(Ordering::Relaxed) >= data, "{what}: the gate saw too little");
            }
        }
    }
}

#[test]
fn every_rung_moves_the_same_bytes() {
    for from_dir in dirs() {
        for to_dir in dirs() {
            for rung in [Rung::CopyFileRange, Rung::Splice, Rung::ReadWrite] {
                let (from, to) = (unnamed(&from_dir), unnamed(&to_dir));
                let len = 5 * MIB + 777;
                fill(&from, &[(0, len as usize)], len);
                let mut transfer = Transfer { rung, ..Transfer::new() };
                assert_eq!(transfer.copy(&from, &to, 1000, len + 5000, &open_gate).unwrap(), len - 1000);
                let (from, to) = (content(&from), content(&to));
                assert!(to[..1000].iter().all(|byte| *byte == 0) && to[1000..] == from[1000..], "{rung:?}");
            }
        }
    }
}

#[test]
fn copy_of_shorter_source_ends_at_its_end() {
    let [tmpfs, disk] = dirs();
    let (from, to) = (unnamed(&tmpfs), unnamed(&disk));
    fill(&from, &[(0, 100_000)], 100_000);
    assert_eq!(copy_file(&from, &to, 60_000, &open_gate).unwrap(), 60_000);
    assert_eq!(content(&to), content(&from)[..60_000]);
    assert_eq!(copy_file(&from, &to, u64::MAX, &open_gate).unwrap(), 100_000);
    assert_eq!(content(&to), content(&from));
    assert_eq!(copy_range(&from, &to, 99_000, 5_000, &open_gate).unwrap(), 1_000);
    assert_eq!(copy_range(&from, &to, 200_000, 5_000, &open_gate).unwrap(), 0);
}

#[test]
fn copy_stops_when_gate_fails() {
    let [tmpfs, disk] = dirs();
    let (from, to) = (unnamed(&tmpfs), unnamed(&disk));
    let len = 3 * CHUNK_BYTES;
    fill(&from, &[(0, len as usize)], len);
    let moved = AtomicU64::new(0);
    let gate = |bytes| match moved.fetch_add(bytes, Ordering::Relaxed) + bytes > CHUNK_BYTES {
        true => Err(io::ErrorKind::Interrupted.into()),
        false => Ok(()),
    };
    assert_eq!(copy_file(&from, &to, len, &gate).unwrap_err().kind(), io::ErrorKind::Interrupted);
    assert_eq!(moved.load(Ordering::Relaxed), 2 * CHUNK_BYTES);
}

#[test]
fn copy_of_leased_file_keeps_write_lease() {
    for dir in dirs() {
        let (from, to) = (unnamed(&dir), unnamed(&dir));
        fill(&from, &[(MIB, 100_000), (10 * MIB, 10)], 12 * MIB);
        // SAFETY: these fcntl commands take an int and touch no memory of ours; the descriptor is open.
        let lease = |command, kind: libc::c_int| unsafe { libc::fcntl(from.as_raw_fd(), command, kind) };
        assert_eq!(lease(libc::F_SETLEASE, libc::F_WRLCK), 0);
        assert_eq!(copy_file(&from, &to, 12 * MIB, &open_gate).unwrap(), 12 * MIB);
        assert_eq!(lease(libc::F_GETLEASE, 0), libc::F_WRLCK, "the lease is still whole");
        assert_eq!(lease(libc::F_SETLEASE, libc::F_UNLCK), 0);
        assert!(content(&from) == content(&to));
        assert!(to.metadata().unwrap().blocks() * 512 < 2 * MIB, "long zeros stay holes");
    }
}

#[test]
fn copy_to_append_mode_destination_fails() {
    let [tmpfs, _] = dirs();
    let from = unnamed(&tmpfs);
    let to = tempfile::NamedTempFile::new_in(&tmpfs).unwrap();
    let append = File::options().append(true).open(to.path()).unwrap();
    fill(&from, &[(0, 10)], 10);
    assert_eq!(copy_file(&from, &append, 10, &open_gate).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    assert_eq!(copy_range(&from, &append, 0, 10, &open_gate).unwrap_err().raw_os_error(), Some(libc::EINVAL));
}

/// Figures for `docs/performance.md`: `cargo test -p surgetank-types ladder -- --ignored --nocapture`.
#[test]
#[ignore = "measures; asserts only that the copies are whole"]
fn copy_at_each_rung_prints_its_rate() {
    let [tmpfs, disk] = dirs();
    const LEN: u64 = 1 << 30;
    for (name, from_dir, to_dir) in
        [("tmpfs → tmpfs", &tmpfs, &tmpfs), ("tmpfs → disk", &tmpfs, &disk), ("disk → tmpfs", &disk, &tmpfs)]
    {
        let from = unnamed(from_dir);
        for offset in (0..LEN).step_by(MIB as usize) {
            from.write_all_at(&pattern(offset, MIB as usize), offset).unwrap();
        }
        for rung in [Rung::CopyFileRange, Rung::Splice, Rung::ReadWrite] {
            let mut rates: Vec<f64> = (0..5)
                .map(|_| {
                    let to = unnamed(to_dir);
                    let mut transfer = Transfer { rung, ..Transfer::new() };
                    let start = crate::clock::tick();
                    assert_eq!(transfer.copy(&from, &to, 0, LEN, &open_gate).unwrap(), LEN);
                    let rate = LEN as f64 / start.elapsed().as_secs_f64() / 1e9;
                    assert_eq!(to.metadata().unwrap().len(), LEN);
                    rate
                })
                .collect();
            rates.sort_by(f64::total_cmp);
            println!("{name} starting at {rung:?}: median {:.2} GB/s ({:.2}–{:.2})", rates[2], rates[0], rates[4]);
        }
    }
}
