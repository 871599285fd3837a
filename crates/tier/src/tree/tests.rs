use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;

use super::*;

struct Root {
    dir: tempfile::TempDir,
    fd: OwnedFd,
}

impl Root {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let fd = rustix::fs::open(dir.path(), OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap();
        Self { dir, fd }
    }
    fn tree(&self) -> Tree<'_> {
        Tree::new(self.fd.as_fd())
    }
    fn path(&self) -> &Path {
        self.dir.path()
    }
    fn put(&self, path: &str, content: &str) {
        self.tree().create(path.as_bytes(), 0o600, OFlags::RDWR).unwrap().write_all_at(content.as_bytes(), 0).unwrap();
    }
    /// path → content of every file, through the standard library.
    fn files(&self) -> BTreeMap<String, String> {
        fn below(dir: &Path, root: &Path, found: &mut BTreeMap<String, String>) {
            for entry in fs::read_dir(dir).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    below(&path, root, found);
                } else {
                    let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
                    found.insert(name, fs::read_to_string(&path).unwrap());
                }
            }
        }
        let mut found = BTreeMap::new();
        below(self.path(), self.path(), &mut found);
        found
    }
    fn expect(&self, files: &[(&str, &str)]) {
        let wanted: BTreeMap<String, String> =
            files.iter().map(|(path, content)| ((*path).to_owned(), (*content).to_owned())).collect();
        assert_eq!(self.files(), wanted);
    }
}

fn errno<T>(outcome: io::Result<T>) -> Option<Errno> {
    outcome.err().and_then(|error| Errno::from_io_error(&error))
}

#[test]
fn create_makes_parents_and_replaces_empty_directories_only() {
    let root = Root::new();
    root.put("a/b/c", "1");
    assert_eq!(errno(root.tree().create(b"a/b/c", 0o600, OFlags::RDWR)), Some(Errno::EXIST));
    fs::create_dir_all(root.path().join("x/y/z")).unwrap();
    root.put("x/y", "2");
    assert_eq!(errno(root.tree().create(b"a/b", 0o600, OFlags::RDWR)), Some(Errno::EXIST));
    assert_eq!(errno(root.tree().create(b"a/b/c/d", 0o600, OFlags::RDWR)), Some(Errno::NOTDIR));
    root.expect(&[("a/b/c", "1"), ("x/y", "2")]);
    assert_eq!(errno(root.tree().open(b"nope/nope", false)), Some(Errno::NOENT));
    let mut text = String::new();
    io::Read::read_to_string(&mut root.tree().open(b"a/b/c", false).unwrap(), &mut text).unwrap();
    assert_eq!(text, "1");
}

#[test]
fn paths_with_symlinks_or_dots_are_refused() {
    let root = Root::new();
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("victim"), "safe").unwrap();
    symlink(outside.path(), root.path().join("dir")).unwrap();
    symlink(outside.path().join("victim"), root.path().join("file")).unwrap();
    root.put("real/f", "1");
    for step_by_step in [false, true] {
        let open = |path: &[u8], flags: OFlags| {
            // openat2 refuses a mode when it creates nothing.
            let mode = if flags.contains(OFlags::CREATE) { Mode::RUSR } else { Mode::empty() };
            if step_by_step {
                open_step_by_step(root.fd.as_fd(), path, flags, mode)
            } else {
                open_beneath(root.fd.as_fd(), path, flags, mode)
            }
        };
        for path in [&b"dir/victim"[..], b"file", b"dir/new"] {
            for flags in [OFlags::RDONLY, OFlags::RDWR, OFlags::CREATE | OFlags::EXCL | OFlags::RDWR] {
                let errno = open(path, flags).unwrap_err();
                let refused = matches!(errno, Errno::LOOP | Errno::NOTDIR | Errno::EXIST);
                assert!(refused, "{step_by_step} {} {errno}", String::from_utf8_lossy(path));
            }
        }
        assert!(open(b"real/f", OFlags::RDONLY).is_ok());
    }
    let tree = root.tree();
    assert!(tree.create(b"dir/new", 0o600, OFlags::RDWR).is_err());
    assert!(tree.open(b"dir/victim", true).is_err());
    assert!(tree.rename(b"real/f", b"dir/f").is_err());
    assert!(tree.rename(b"dir/victim", b"g").is_err());
    // ELOOP, ENOTDIR or ENOENT: what counts is that nothing outside changes.
    let _ = tree.unlink(b"dir/victim");
    let _ = tree.remove_dir(b"dir");
    let _ = tree.rename_dir(b"dir", b"moved/victim");
    for path in [&b""[..], b"/etc/passwd", b"../x", b"a/../b", b"a//b", b"a/./b", b"a/", b"a\0b"] {
        assert_eq!(errno(tree.create(path, 0o600, OFlags::RDWR)), Some(Errno::INVAL));
        assert_eq!(errno(tree.unlink(path)), Some(Errno::INVAL));
        assert_eq!(errno(tree.rename(path, b"ok")), Some(Errno::INVAL));
        assert_eq!(errno(tree.rename_dir(b"real", path)), Some(Errno::INVAL));
    }
    assert_eq!(fs::read_to_string(outside.path().join("victim")).unwrap(), "safe");
    assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 1);
}

#[test]
fn rename_replaces_files_and_empty_directories() {
    let root = Root::new();
    root.put("a/f", "1");
    root.put("g", "2");
    root.tree().rename(b"a/f", b"new/deep/f").unwrap();
    root.expect(&[("g", "2"), ("new/deep/f", "1")]);
    root.tree().rename(b"new/deep/f", b"g").unwrap();
    root.expect(&[("g", "1")]);
    // `a` is an empty directory at this point.
    root.tree().rename(b"g", b"a").unwrap();
    root.expect(&[("a", "1")]);
    assert_eq!(errno(root.tree().rename(b"absent", b"b")), Some(Errno::NOENT));
    assert_eq!(errno(root.tree().rename(b"absent/absent", b"b")), Some(Errno::NOENT));
}

#[test]
fn rename_dir_onto_leftovers_keeps_every_file() {
    let root = Root::new();
    root.tree().rename_dir(b"absent", b"x").unwrap();
    root.tree().rename_dir(b"absent/deeper", b"x/y").unwrap();
    assert!(!root.path().join("x").exists());
    root.expect(&[]);
    root.put("d/one", "1");
    root.put("d/sub/two", "2");
    root.tree().rename_dir(b"d", b"far/away/d").unwrap();
    root.expect(&[("far/away/d/one", "1"), ("far/away/d/sub/two", "2")]);
    // Onto a tree of empty directories.
    fs::create_dir_all(root.path().join("d/e/f")).unwrap();
    root.tree().rename_dir(b"far/away/d", b"d").unwrap();
    root.expect(&[("d/one", "1"), ("d/sub/two", "2")]);
    // Onto a tree with files: the trees are merged, unless that would overwrite a file.
    root.put("t/one", "in the way");
    root.put("t/sub/three", "3");
    assert_eq!(errno(root.tree().rename_dir(b"d", b"t")), Some(Errno::EXIST));
    assert_eq!(errno(root.tree().rename_dir(b"d", b"t/one")), Some(Errno::EXIST));
    root.expect(&[("d/one", "1"), ("d/sub/two", "2"), ("t/one", "in the way"), ("t/sub/three", "3")]);
    root.tree().unlink(b"t/one").unwrap();
    root.tree().rename_dir(b"d", b"t").unwrap();
    root.expect(&[("t/one", "1"), ("t/sub/two", "2"), ("t/sub/three", "3")]);
    assert!(!root.path().join("d").exists());
    root.tree().rename_dir(b"t/one/below", b"x").unwrap();
    assert_eq!(errno(root.tree().rename_dir(b"t", b"t/sub/t")), Some(Errno::INVAL));
    root.tree().rename_dir(b"t", b"t").unwrap();
    root.expect(&[("t/one", "1"), ("t/sub/two", "2"), ("t/sub/three", "3")]);
}

#[test]
fn remove_is_idempotent_and_spares_trees_with_files() {
    let root = Root::new();
    root.put("a/b/f", "1");
    fs::create_dir_all(root.path().join("a/c/d")).unwrap();
    assert_eq!(errno(root.tree().remove_dir(b"a")), Some(Errno::NOTEMPTY));
    root.expect(&[("a/b/f", "1")]);
    root.tree().unlink(b"a/b/f").unwrap();
    root.tree().unlink(b"a/b/f").unwrap();
    root.tree().unlink(b"not/there/at/all").unwrap();
    root.tree().remove_dir(b"a").unwrap();
    root.tree().remove_dir(b"a").unwrap();
    assert!(!root.path().join("a").exists());
    fs::create_dir_all(root.path().join("p/q")).unwrap();
    root.put("r/f", "2");
    root.tree().remove_empty_dirs().unwrap();
    assert!(!root.path().join("p").exists());
    root.expect(&[("r/f", "2")]);
}

#[test]
fn path_longer_than_path_max_works() {
    let root = Root::new();
    let name = "n".repeat(250);
    // About 10,000 bytes, two and a half times PATH_MAX.
    let deep = vec![name.as_str(); 40].join("/");
    root.put(&format!("{deep}/file"), "deep");
    let file = root.tree().open(format!("{deep}/file").as_bytes(), false).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 4);
    let mut walked = Vec::new();
    root.tree().walk(&mut |path, _| walked.push(path.to_vec())).unwrap();
    assert_eq!(walked, [format!("{deep}/file").into_bytes()]);
    let other = deep.replacen('n', "m", 1);
    root.tree().rename(format!("{deep}/file").as_bytes(), format!("{other}/moved").as_bytes()).unwrap();
    assert!(root.tree().open(format!("{other}/moved").as_bytes(), true).is_ok());
    root.tree().rename_dir(other.as_bytes(), b"short").unwrap();
    assert!(root.tree().open(b"short/moved", false).is_ok());
    root.tree().unlink(b"short/moved").unwrap();
    root.tree().remove_empty_dirs().unwrap();
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    let too_long = vec![b'x'; 5000];
    assert_eq!(errno(root.tree().create(&too_long, 0o600, OFlags::RDWR)), Some(Errno::NAMETOOLONG));
}

#[test]
fn walk_reports_every_file_with_its_numbers() {
    use std::os::unix::fs::MetadataExt;
    let root = Root::new();
    root.put("a/one", "1");
    root.tree().create(b"two", 0o600, OFlags::RDWR).unwrap().set_len(1 << 20).unwrap();
    let odd = std::ffi::OsStr::from_bytes(b"not\xFFutf8");
    root.tree().create(odd.as_bytes(), 0o600, OFlags::RDWR).unwrap();
    symlink("a/one", root.path().join("link")).unwrap();
    let mut walked = BTreeMap::new();
    root.tree()
        .walk(&mut |path, plain| {
            walked.insert(path.to_vec(), (plain.ino, plain.size_bytes, plain.blocks_bytes));
        })
        .unwrap();
    let truth = |path: &std::ffi::OsStr| {
        let stat = fs::metadata(root.path().join(path)).unwrap();
        (path.as_bytes().to_vec(), (stat.ino(), stat.len(), stat.blocks() * 512))
    };
    let expected: BTreeMap<_, _> = [truth("a/one".as_ref()), truth("two".as_ref()), truth(odd)].into();
    assert_eq!(walked, expected);
}

#[test]
fn create_during_removal_of_empty_directories_succeeds() {
    let root = Root::new();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                root.tree().remove_empty_dirs().unwrap();
            }
        });
        for round in 0..300 {
            let path = format!("a/b/c{round}");
            root.put(&path, "x");
            root.tree().rename(path.as_bytes(), b"d/e/f").unwrap();
            root.tree().unlink(b"d/e/f").unwrap();
        }
        stop.store(true, Ordering::Relaxed);
    });
    root.expect(&[]);
}
