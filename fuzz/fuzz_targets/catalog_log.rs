//! A log of the catalog that was cut off or damaged anywhere. The catalog loads the state after a prefix of its batches, or
//! refuses the log. It does not panic.
#![no_main]

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use surgetank_core::catalog::{Catalog, LogCatalog};
use surgetank_types::model::{Change, Image, Mark};

/// The number of the last batch.
const BATCH: Mark = Mark::Request(u64::MAX);
const BATCHES: u64 = 40;

fn batch(number: u64) -> Vec<Change> {
    vec![Change::PutMark(Mark::Request(number % 7), number), Change::PutMark(BATCH, number)]
}

fn state_after(number: u64) -> Image {
    let mut image = Image::default();
    for change in (1..=number).flat_map(batch) {
        if let Change::PutMark(mark, number) = change {
            image.marks.insert(mark, number);
        }
    }
    image
}

struct Ground {
    dir: PathBuf,
    /// Name and bytes of the one segment.
    segment: (PathBuf, Vec<u8>),
}

fn ground() -> &'static Ground {
    static GROUND: OnceLock<Ground> = OnceLock::new();
    GROUND.get_or_init(|| {
        let dir = Path::new("/dev/shm").join(format!("surgetank-fuzz-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir(&dir).unwrap();
        let catalog = LogCatalog::open(&dir).unwrap();
        for number in 1..=BATCHES {
            catalog.commit(&batch(number)).unwrap();
        }
        drop(catalog);
        let found = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path());
        let path = found.filter(|path| path.extension().is_some_and(|end| end == "wal")).max().unwrap();
        let bytes = fs::read(&path).unwrap();
        Ground { dir, segment: (path, bytes) }
    })
}

fuzz_target!(|input: (u16, Vec<(u16, u8)>)| {
    let ground = ground();
    for entry in fs::read_dir(&ground.dir).unwrap() {
        let _ = fs::remove_file(entry.unwrap().path());
    }
    let (path, bytes) = &ground.segment;
    let mut bytes = bytes.clone();
    let (cut, flips) = input;
    for (at, value) in &flips {
        let at = usize::from(*at) % bytes.len();
        bytes[at] ^= value;
    }
    bytes.truncate(usize::from(cut) % (bytes.len() + 1));
    let file = fs::File::create(path).unwrap();
    file.write_all_at(&bytes, 0).unwrap();
    let Ok(catalog) = LogCatalog::open(&ground.dir) else { return };
    let Ok(image) = catalog.load() else { return };
    let number = image.marks.get(&BATCH).copied().unwrap_or(0);
    assert_eq!(image, state_after(number), "no prefix");
});
