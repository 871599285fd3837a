//! A snapshot of the catalog that has changed bytes or is cut off. The catalog loads the state that was written, or refuses
//! the snapshot. Looking and opening both hold to this, and neither panics.
#![no_main]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use surgetank_core::catalog::{Catalog, LogCatalog, Options};
use surgetank_types::model::{Change, EntryRecord, FileId, Image, Mark};

struct Ground {
    dir: PathBuf,
    files: Vec<(PathBuf, Vec<u8>)>,
    image: Image,
}

fn ground() -> &'static Ground {
    static GROUND: OnceLock<Ground> = OnceLock::new();
    GROUND.get_or_init(|| {
        let dir = Path::new("/dev/shm").join(format!("surgetank-fuzz-snapshot-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir(&dir).unwrap();
        let options = Options { segment_bytes_max: 1 << 10, ..Options::default() };
        let catalog = LogCatalog::open_with(&dir, options).unwrap();
        for number in 0..300 {
            let entry = EntryRecord { logical: Some(FileId(number)), planned: None };
            let name = vec![b'a'; 1 + number as usize % 9].into();
            let changes = [
                Change::PutEntry(FileId(number % 5), name, entry),
                Change::PutMark(Mark::Request(number % 50), number),
            ];
            catalog.commit(&changes).unwrap();
        }
        drop(catalog);
        // Loading folds the batches that are not folded yet.
        let image = LogCatalog::open_with(&dir, options).unwrap().load().unwrap();
        let found = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path());
        let files = found.map(|path| (path.clone(), fs::read(path).unwrap())).collect();
        assert!(dir.join("snapshot.redb").exists());
        Ground { dir, files, image }
    })
}

fuzz_target!(|input: (Option<u32>, Vec<(u32, u8)>)| {
    let ground = ground();
    for entry in fs::read_dir(&ground.dir).unwrap() {
        let _ = fs::remove_file(entry.unwrap().path());
    }
    let (cut, flips) = input;
    for (path, bytes) in &ground.files {
        let mut bytes = bytes.clone();
        if path.ends_with("snapshot.redb") {
            for (at, value) in &flips {
                let at = *at as usize % bytes.len();
                bytes[at] ^= value;
            }
            if let Some(cut) = cut {
                bytes.truncate(cut as usize % bytes.len());
            }
        }
        fs::write(path, &bytes).unwrap();
    }
    let seen = LogCatalog::look(&ground.dir).ok().map(|(image, _)| image);
    assert!(seen.as_ref().is_none_or(|image| *image == ground.image), "look returned a state that was not written");
    let loaded = LogCatalog::open(&ground.dir).and_then(|catalog| catalog.load()).ok();
    assert!(loaded.as_ref().is_none_or(|image| *image == ground.image), "load returned a state that was not written");
});
