//! The catalog against a model, with deaths at chosen moments. A death is a copy of the directory made while nothing
//! else writes to it; `crates/core/tests/catalog.rs` kills real processes at any moment.

use std::collections::BTreeMap;
use std::os::unix::fs::{FileExt, PermissionsExt};

use proptest::prelude::*;
use tempfile::TempDir;

use super::super::segment::is_segment;
use super::*;
use surgetank_types::model::*;

/// The number of the last batch.
const BATCH: Mark = Mark::Request(u64::MAX);
const SMALL: Options = Options { segment_bytes_max: 1 << 10, snapshot_cache_bytes: 1 << 20 };

#[derive(Debug, Clone, Default, PartialEq)]
struct Model {
    files: BTreeMap<FileId, FileRecord>,
    entries: BTreeMap<(FileId, Box<[u8]>), EntryRecord>,
    ops: BTreeMap<Seq, OpRecord>,
    marks: BTreeMap<Mark, u64>,
    hints: BTreeMap<Hinted, HintRecord>,
    lost: BTreeMap<Box<[u8]>, LostRecord>,
}

impl Model {
    fn apply(&mut self, changes: &[Change]) {
        for change in changes.iter().cloned() {
            match change {
                Change::PutFile(id, record) => self.files.insert(id, *record).map(drop),
                Change::DropFile(id) => self.files.remove(&id).map(drop),
                Change::PutEntry(dir, name, record) => self.entries.insert((dir, name), record).map(|_| ()),
                Change::DropEntry(dir, name) => self.entries.remove(&(dir, name)).map(|_| ()),
                Change::PutOp(seq, record) => self.ops.insert(seq, record).map(drop),
                Change::DropOp(seq) => self.ops.remove(&seq).map(drop),
                Change::PutMark(mark, number) => self.marks.insert(mark, number).map(|_| ()),
                Change::PutHints(of, record) => self.hints.insert(of, record).map(drop),
                Change::DropHints(of) => self.hints.remove(&of).map(drop),
                Change::PutLost(path, record) => self.lost.insert(path, record).map(drop),
                Change::DropLost(path) => self.lost.remove(&path).map(drop),
            };
        }
    }

    /// As an image, in the order in which a catalog loads.
    fn image(&self) -> Image {
        Image {
            files: self.files.clone().into_iter().collect(),
            entries: self.entries.clone().into_iter().map(|((dir, name), record)| (dir, name, record)).collect(),
            ops: self.ops.clone(),
            marks: self.marks.clone(),
            hints: self.hints.clone(),
            lost: self.lost.clone(),
        }
    }
}

fn file(seed: u64) -> Box<FileRecord> {
    let name = |n: u32| (seed >> n & 1 == 1).then(|| (FileId(seed % 7), vec![seed as u8; seed as usize % 40].into()));
    let time = Timestamp { nanos: seed as i64 };
    Box::new(FileRecord {
        attr: Attr {
            kind: Kind::File,
            perm: 0o644,
            uid: 1000,
            gid: seed as u32,
            ino: seed,
            links: 1,
            size_bytes: seed,
            blocks: 8,
            device: 0,
            atime: time,
            mtime: time,
            ctime: time,
        },
        version: seed,
        durable_version: seed / 2,
        sealed: seed.is_multiple_of(3),
        replica: None,
        synced_version: 0,
        promised_version: 0,
        spill: name(1),
        identity: None,
        logical: name(2),
        applied: name(3).into_iter().collect(),
        target: None,
        xattrs: seed.is_multiple_of(5).then(|| BTreeMap::from([(b"user.a".to_vec().into(), vec![0; 3].into())])),
        pinned: false,
        adopted: seed.is_multiple_of(2),
        checksum: Some(seed),
        run: RunId(3),
    })
}

fn change() -> impl Strategy<Value = Change> {
    let id = || (0..24_u64).prop_map(FileId);
    let seq = || (0..24_u64).prop_map(Seq::new);
    let name = || {
        prop::collection::vec(prop::sample::select(vec![b'a', b'b', 0xff, b' ']), 1..3)
            .prop_map(Into::<Box<[u8]>>::into)
    };
    let mark = || prop_oneof![Just(Mark::Boot), id().prop_map(Mark::Temporaries), "[a-c]".prop_map(Mark::Device)];
    let hinted = || prop_oneof![id().prop_map(Hinted::File), name().prop_map(Hinted::Path)];
    prop_oneof![
        4 => (id(), any::<u64>()).prop_map(|(id, seed)| Change::PutFile(id, file(seed))),
        1 => id().prop_map(Change::DropFile),
        3 => (id(), name(), prop::option::of(id()), prop::option::of(id()))
            .prop_map(|(dir, name, logical, planned)| Change::PutEntry(dir, name, EntryRecord { logical, planned })),
        1 => (id(), name()).prop_map(|(dir, name)| Change::DropEntry(dir, name)),
        2 => (seq(), id(), name(), 0..9_u32).prop_map(|(seq, file, name, run)| {
            let kind = OpKind::Publish { file, dir: FileId::ROOT, name, over: None };
            Change::PutOp(seq, OpRecord { kind, run: RunId(run), prepared: None, last: false, started: false, certain: false })
        }),
        1 => seq().prop_map(Change::DropOp),
        1 => (mark(), any::<u64>()).prop_map(|(mark, number)| Change::PutMark(mark, number)),
        1 => (hinted(), id()).prop_map(|(of, since)| {
            let texts = BTreeMap::from([("mode".into(), since.0.to_string().into())]);
            Change::PutHints(of, vec![(since, texts)])
        }),
        1 => hinted().prop_map(Change::DropHints),
        1 => (name(), name()).prop_map(|(path, at)| Change::PutLost(path, LostRecord { at, why: "wiped".into() })),
        1 => name().prop_map(Change::DropLost),
    ]
}

fn batch() -> impl Strategy<Value = Vec<Change>> {
    prop::collection::vec(change(), 1..6)
}

fn segments(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<_> = entries.filter(|path| is_segment(path.file_name().unwrap().to_str().unwrap())).collect();
    found.sort();
    found
}

/// The files that a death at this point leaves.
fn dead_copy(from: &Path) -> TempDir {
    let to = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.path().join(entry.file_name())).unwrap();
    }
    to
}

#[derive(Debug, Clone)]
enum Step {
    Commit(Vec<Change>),
    Reopen,
    Sync,
    /// A death in the middle of a fold: `true` after the snapshot has it, before the segments are deleted.
    Die(bool),
    /// A death after `clear` took effect and before anything was deleted.
    DieClearing,
    Fold,
    Clear,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        20 => batch().prop_map(Step::Commit),
        1 => Just(Step::Reopen),
        1 => Just(Step::Sync),
        2 => any::<bool>().prop_map(Step::Die),
        1 => Just(Step::DieClearing),
        1 => Just(Step::Fold),
        1 => Just(Step::Clear),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn committed_changes_load_after_any_history(steps in prop::collection::vec(step(), 1..80)) {
        let mut home = tempfile::tempdir().unwrap();
        let mut model = Model::default();
        let mut catalog = LogCatalog::open_with(home.path(), SMALL).unwrap();
        let mut last = Lsn(0);
        for step in steps {
            match step {
                Step::Commit(changes) => {
                    let lsn = catalog.commit(&changes).unwrap();
                    prop_assert!(lsn > last && catalog.position() == lsn);
                    last = lsn;
                    model.apply(&changes);
                }
                Step::Reopen => {
                    drop(catalog);
                    catalog = LogCatalog::open_with(home.path(), SMALL).unwrap();
                }
                Step::Sync => {
                    catalog.sync(last).unwrap();
                    prop_assert!(catalog.shared.durable() >= last);
                }
                Step::Die(after_fold) => {
                    let copy = {
                        let mut folding = hold(&catalog.shared.folding);
                        if after_fold {
                            let closed = catalog.shared.writer.pen().closed.first().cloned();
                            if let Some((segment, last)) = closed {
                                catalog.shared.fold_segment(&mut folding, &segment, last).unwrap();
                            }
                        }
                        dead_copy(home.path())
                    };
                    drop(catalog);
                    home = copy;
                    catalog = LogCatalog::open_with(home.path(), SMALL).unwrap();
                    prop_assert_eq!(catalog.recovery(), &Recovery::default());
                }
                Step::DieClearing => {
                    let copy = {
                        let _folding = hold(&catalog.shared.folding);
                        let mut pen = catalog.shared.writer.pen();
                        catalog.shared.writer.restart(&mut pen).unwrap();
                        dead_copy(home.path())
                    };
                    drop(catalog);
                    home = copy;
                    catalog = LogCatalog::open_with(home.path(), SMALL).unwrap();
                    model = Model::default();
                }
                Step::Fold => catalog.shared.fold().unwrap(),
                Step::Clear => {
                    catalog.clear().unwrap();
                    model = Model::default();
                    prop_assert_eq!(segments(home.path()).len(), 1);
                }
            }
            prop_assert!(catalog.position() >= last, "positions never go back");
        }
        prop_assert_eq!(catalog.load().unwrap(), model.image());
        drop(catalog);
        let catalog = LogCatalog::open_with(home.path(), SMALL).unwrap();
        prop_assert_eq!(catalog.load().unwrap(), model.image());
    }

    #[test]
    fn damaged_log_tail_loses_only_later_records(
        batches in prop::collection::vec(batch(), 1..12), place in any::<prop::sample::Index>(), flip in 0_u8..=255, more in batch()
    ) {
        let home = tempfile::tempdir().unwrap();
        let mut ends = vec![HEADER_BYTES];
        {
            let catalog = LogCatalog::open(home.path()).unwrap();
            for changes in &batches {
                catalog.commit(changes).unwrap();
                ends.push(catalog.shared.writer.pen().end);
            }
        }
        let path = segments(home.path()).remove(0);
        let length = *ends.last().unwrap();
        let at = place.index(length as usize) as u64;
        let log = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let mut byte = [0];
        log.read_exact_at(&mut byte, at).unwrap();
        match flip {
            0 => log.set_len(at).unwrap(),
            flip => log.write_all_at(&[byte[0] ^ flip], at).unwrap(),
        }
        // Reserved bytes and the mark of the header vouch for nothing here.
        let harmless = flip != 0 && (28..HEADER_BYTES).contains(&at);
        let intact = if harmless { batches.len() } else { ends.iter().filter(|end| **end <= at).count().saturating_sub(1) };
        let mut model = Model::default();
        batches[..intact].iter().for_each(|changes| model.apply(changes));

        let catalog = LogCatalog::open(home.path()).unwrap();
        prop_assert_eq!(catalog.load().unwrap(), model.image());
        let left = if flip == 0 { at } else { length };
        let kept = if harmless { length } else if at < HEADER_BYTES { 0 } else { ends[intact] };
        prop_assert_eq!(catalog.recovery().dropped_bytes, left - kept);
        // A death leaves a log that is cut short; any other fault is reported to the user.
        let damage = catalog.recovery().damage.clone();
        let behind = batches.len().saturating_sub(intact + 1) as u64;
        if flip == 0 || harmless {
            prop_assert_eq!(damage.as_ref().map_or(0, |damage| damage.records_behind), 0);
        } else if at >= HEADER_BYTES {
            prop_assert_eq!(damage.as_ref().map_or(0, |damage| damage.records_behind), behind);
        } else {
            prop_assert_eq!(damage.as_ref().map(|damage| damage.records_behind), Some(batches.len() as u64));
        }
        catalog.damage_reported().unwrap();
        // The log continues from there.
        catalog.commit(&more).unwrap();
        model.apply(&more);
        drop(catalog);
        let catalog = LogCatalog::open(home.path()).unwrap();
        prop_assert_eq!(catalog.recovery(), &Recovery { damaged_once: damage.is_some(), ..Recovery::default() });
        prop_assert_eq!(catalog.load().unwrap(), model.image());
    }

    #[test]
    fn arbitrary_log_bytes_open_or_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..400), header in any::<bool>()) {
        let home = tempfile::tempdir().unwrap();
        drop(LogCatalog::open(home.path()).unwrap());
        let path = segments(home.path()).remove(0);
        let mut content = if header { std::fs::read(&path).unwrap() } else { Vec::new() };
        content.extend_from_slice(&bytes);
        std::fs::write(&path, content).unwrap();
        let catalog = LogCatalog::open(home.path()).unwrap();
        prop_assert_eq!(catalog.load().unwrap(), Image::default());
    }
}

/// A catalog with several closed segments that are not folded, the state after each of its batches and where it ends.
fn several_segments(marked: bool) -> (TempDir, Vec<Model>) {
    let home = tempfile::tempdir().unwrap();
    let copy;
    let mut states = vec![Model::default()];
    {
        let catalog = LogCatalog::open_with(home.path(), SMALL).unwrap();
        let _no_fold = hold(&catalog.shared.folding);
        for seed in 0..60 {
            let changes = [Change::PutFile(FileId(seed), file(seed * 8)), Change::PutMark(BATCH, seed + 1)];
            catalog.commit(&changes).unwrap();
            let mut next = states.last().unwrap().clone();
            next.apply(&changes);
            states.push(next);
        }
        if marked {
            catalog.sync(catalog.position()).unwrap();
        }
        copy = dead_copy(home.path());
    }
    assert!(segments(copy.path()).len() > 3);
    (copy, states)
}

fn bytes_of(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| (path.clone(), std::fs::read(path).unwrap())).collect()
}

/// A catalog of which the snapshot holds the most.
fn folded() -> (TempDir, Image) {
    let home = tempfile::tempdir().unwrap();
    let catalog = LogCatalog::open_with(home.path(), SMALL).unwrap();
    for seed in 0..200 {
        let op = OpRecord {
            kind: OpKind::SetMeta { file: FileId(seed) },
            run: RunId(1),
            prepared: None,
            last: false,
            started: false,
            certain: false,
        };
        let entry = EntryRecord { logical: Some(FileId(seed)), planned: None };
        let name = vec![b'a'; 1 + seed as usize % 9].into();
        catalog
            .commit(&[
                Change::PutFile(FileId(seed), file(seed)),
                Change::PutEntry(FileId(seed % 5), name, entry),
                Change::PutOp(Seq::new(seed), op),
            ])
            .unwrap();
    }
    catalog.shared.fold().unwrap();
    let image = catalog.load().unwrap();
    drop(catalog);
    (home, image)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Regression: a flipped bit was accepted. (A directory in a static is never removed, so the test keeps the files.)
    #[test]
    fn damaged_snapshot_is_refused_or_read_whole(
        flips in prop::collection::vec((any::<prop::sample::Index>(), 1_u8..=255), 1..4), cut in prop::option::weighted(0.1, any::<prop::sample::Index>())
    ) {
        static FOLDED: std::sync::OnceLock<(BTreeMap<PathBuf, Vec<u8>>, Image)> = std::sync::OnceLock::new();
        let (whole, image) = FOLDED.get_or_init(|| {
            let (home, image) = folded();
            let files = std::fs::read_dir(home.path()).unwrap().map(|entry| entry.unwrap());
            (files.map(|entry| (entry.file_name().into(), std::fs::read(entry.path()).unwrap())).collect(), image)
        });
        let home = tempfile::tempdir().unwrap();
        whole.iter().for_each(|(name, bytes)| std::fs::write(home.path().join(name), bytes).unwrap());
        let path = home.path().join("snapshot.redb");
        let mut bytes = std::fs::read(&path).unwrap();
        for (at, mask) in &flips {
            let at = at.index(bytes.len());
            bytes[at] ^= mask;
        }
        bytes.truncate(cut.map_or(bytes.len(), |cut| cut.index(bytes.len())));
        std::fs::write(&path, &bytes).unwrap();
        for _ in 0..2 {
            if let Ok((seen, _)) = LogCatalog::look(home.path()) {
                prop_assert!(seen == *image, "looking believes what nobody wrote");
            }
            if let Ok(seen) = LogCatalog::open(home.path()).and_then(|catalog| catalog.load()) {
                prop_assert!(seen == *image, "what nobody wrote is believed");
            }
        }
    }
}

/// Regression: the catalog cut off intact records together with the damaged one, and reported nothing.
#[test]
fn intact_records_behind_damage_are_kept_and_reported() {
    let home = tempfile::tempdir().unwrap();
    let mut ends = Vec::new();
    {
        let catalog = LogCatalog::open(home.path()).unwrap();
        for seed in 0..40 {
            catalog.commit(&[Change::PutFile(FileId(seed), file(seed))]).unwrap();
            ends.push(catalog.shared.writer.pen().end);
        }
    }
    let log = segments(home.path()).remove(0);
    damage(&log, ends[9] + 20);
    let before = std::fs::read(&log).unwrap();
    // An agent that dies before the report leaves the report to the next one.
    for _ in 0..2 {
        let catalog = LogCatalog::open(home.path()).unwrap();
        assert_eq!(catalog.load().unwrap().files.len(), 10);
        let damage = catalog.recovery().damage.clone().expect("the damage is not reported");
        assert_eq!((damage.offset, damage.records_behind), (ends[9], 29));
    }
    let catalog = LogCatalog::open(home.path()).unwrap();
    let damage = catalog.recovery().damage.clone().unwrap();
    catalog.damage_reported().unwrap();
    assert_eq!(std::fs::read(damage.reported_path()).unwrap(), before, "the log is not kept as it was");
    drop(catalog);
    let later = LogCatalog::open(home.path()).unwrap();
    assert_eq!(later.recovery(), &Recovery { damaged_once: true, ..Recovery::default() });
}

#[test]
fn log_that_ends_within_a_record_is_not_damaged() {
    let home = tempfile::tempdir().unwrap();
    drop({
        let catalog = LogCatalog::open(home.path()).unwrap();
        for seed in 0..3 {
            catalog.commit(&[Change::PutFile(FileId(seed), file(seed))]).unwrap();
        }
        catalog
    });
    let log = segments(home.path()).remove(0);
    let whole = std::fs::read(&log).unwrap();
    for length in HEADER_BYTES as usize..whole.len() {
        std::fs::write(&log, &whole[..length]).unwrap();
        assert_eq!(LogCatalog::open(home.path()).unwrap().recovery().damage, None, "cut to {length} bytes");
    }
}

#[test]
fn damage_counts_records_in_all_later_segments() {
    let (home, _) = several_segments(false);
    let logs = segments(home.path());
    damage(&logs[1], HEADER_BYTES + 20);
    let catalog = LogCatalog::open_with(home.path(), SMALL).unwrap();
    let batches = catalog.load().unwrap().marks[&BATCH];
    let damage = catalog.recovery().damage.clone().unwrap();
    assert_eq!(damage.records_behind, 60 - batches - 1);
    drop(catalog);
    let again = LogCatalog::open_with(home.path(), SMALL).unwrap().recovery().damage.clone().unwrap();
    assert_eq!(again.records_behind, damage.records_behind);
}

/// Regression: `fsck` cut the log and folded it.
#[test]
fn look_leaves_the_catalog_unchanged() {
    let (home, states) = several_segments(false);
    std::fs::write(home.path().join("snapshot.new"), "half").unwrap();
    let last = segments(home.path()).pop().unwrap();
    let cut = std::fs::metadata(&last).unwrap().len() - 3;
    std::fs::OpenOptions::new().write(true).open(&last).unwrap().set_len(cut).unwrap();
    for _ in 0..3 {
        let before = bytes_of(home.path());
        let (image, recovery) = LogCatalog::look(home.path()).unwrap();
        assert_eq!(bytes_of(home.path()), before);
        assert_eq!(image, states[image.marks[&BATCH] as usize].image());
        // A start with repair finds the same.
        let catalog = LogCatalog::open_with(home.path(), SMALL).unwrap();
        assert_eq!(catalog.load().unwrap(), image);
        assert_eq!(catalog.recovery(), &recovery);
        catalog.shared.fold().unwrap();
    }
}

fn damage(path: &Path, at: u64) {
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[!byte[0]], at).unwrap();
}

#[test]
fn damage_in_a_marked_segment_is_refused_with_file_and_offset() {
    let (home, _) = several_segments(true);
    let second = segments(home.path()).remove(1);
    damage(&second, HEADER_BYTES + 20);
    let message = LogCatalog::open(home.path()).err().unwrap().to_string();
    assert!(message.contains(second.to_str().unwrap()) && message.contains("at byte 64"), "{message}");
    assert!(message.contains("were not touched"), "{message}");
    // Refusing changes nothing: undoing the damage gives everything back.
    damage(&second, HEADER_BYTES + 20);
    assert_eq!(LogCatalog::open(home.path()).unwrap().load().unwrap().files.len(), 60);
}

#[test]
fn marked_segment_cut_or_missing_is_refused() {
    let (home, _) = several_segments(true);
    let second = segments(home.path()).remove(1);
    let whole = std::fs::read(&second).unwrap();
    std::fs::write(&second, &whole[..HEADER_BYTES as usize]).unwrap();
    assert!(LogCatalog::open(home.path()).is_err());
    std::fs::write(&second, &whole).unwrap();
    std::fs::remove_file(&segments(home.path())[0]).unwrap();
    let message = LogCatalog::open(home.path()).err().unwrap().to_string();
    assert!(message.contains("is missing"), "{message}");
}

#[test]
fn power_loss_in_an_older_segment_keeps_a_prefix() {
    for at in [3, HEADER_BYTES, HEADER_BYTES + 300, 900] {
        let (home, states) = several_segments(false);
        damage(&segments(home.path())[1], at);
        let catalog = LogCatalog::open_with(home.path(), SMALL).unwrap();
        let image = catalog.load().unwrap();
        let batches = image.marks[&BATCH] as usize;
        assert!(batches > 0 && batches < 60, "{batches}");
        assert_eq!(image, states[batches].image());
        assert!(catalog.recovery().dropped_bytes > 0);
        assert!(segments(home.path()).len() <= 2);
        // What is appended now is found again.
        catalog.commit(&[Change::PutMark(Mark::Boot, 1)]).unwrap();
        drop(catalog);
        let image = LogCatalog::open_with(home.path(), SMALL).unwrap().load().unwrap();
        assert_eq!((image.marks[&Mark::Boot], image.files.len()), (1, batches));
    }
}

#[test]
fn unmarked_segment_without_its_end_keeps_a_prefix() {
    let (home, states) = several_segments(false);
    std::fs::OpenOptions::new().write(true).open(&segments(home.path())[1]).unwrap().set_len(HEADER_BYTES).unwrap();
    let image = LogCatalog::open_with(home.path(), SMALL).unwrap().load().unwrap();
    assert_eq!(image, states[image.marks[&BATCH] as usize].image());
}

#[test]
fn closed_segments_are_folded_and_deleted_in_the_background() {
    let home = tempfile::tempdir().unwrap();
    let catalog = LogCatalog::open_with(home.path(), SMALL).unwrap();
    for seed in 0..200 {
        catalog.commit(&[Change::PutFile(FileId(seed % 50), file(seed))]).unwrap();
    }
    // Dropping lets a fold that has begun finish; the next one takes all that are left.
    catalog.shared.fold().unwrap();
    assert_eq!(segments(home.path()).len(), 1);
    assert!(catalog.shared.durable() > Lsn(0));
    let mode = std::fs::metadata(home.path()).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, 0o700);
    for name in std::fs::read_dir(home.path()).unwrap() {
        let name = name.unwrap();
        assert_eq!(name.metadata().unwrap().permissions().mode() & 0o777, 0o600, "{:?}", name.path());
    }
}

#[test]
fn failed_sync_stays_failed_until_the_next_fold() {
    let home = tempfile::tempdir().unwrap();
    let catalog = LogCatalog::open(home.path()).unwrap();
    let lsn = catalog.commit(&[Change::PutMark(Mark::Request(1), 1)]).unwrap();
    let folding = hold(&catalog.shared.folding);
    catalog.shared.syncs_to_fail.store(1, Ordering::Release);
    assert_eq!(catalog.sync(lsn).unwrap_err().raw_os_error(), Some(libc::EIO));
    // The device works again, yet what the kernel dropped is not on it.
    assert!(catalog.sync(lsn).is_err());
    let later = catalog.commit(&[Change::PutMark(Mark::Request(2), 2)]).unwrap();
    assert!(catalog.sync(later).is_err());
    drop(folding);
    // Once the snapshot has it, the log is to be trusted again.
    catalog.shared.fold().unwrap();
    catalog.sync(later).unwrap();
    assert_eq!(catalog.load().unwrap().marks.len(), 2);
}

#[test]
fn sync_of_an_uncommitted_position_is_refused() {
    let home = tempfile::tempdir().unwrap();
    let catalog = LogCatalog::open(home.path()).unwrap();
    assert_eq!(catalog.sync(Lsn(1)).unwrap_err().kind(), io::ErrorKind::InvalidInput);
}

#[test]
fn unfinished_catalog_files_are_removed_at_the_start() {
    let home = tempfile::tempdir().unwrap();
    drop(LogCatalog::open(home.path()).unwrap());
    let leftovers = ["snapshot.new", "log-00000000000000000009.new"].map(|name| home.path().join(name));
    leftovers.iter().for_each(|path| std::fs::write(path, "half").unwrap());
    LogCatalog::open(home.path()).unwrap();
    assert!(leftovers.iter().all(|path| !path.exists()));
}
