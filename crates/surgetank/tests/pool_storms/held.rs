//! What programs hold below the directories of a storm: working directories, and mounts of their own.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::thread::UnshareFlags;

use crate::pool::Pool;
use crate::scene;

/// For each member a directory in which there is one more, over which its node has mounted another one. (Other members could not
/// look that name up.)
pub const HELD: [&str; 4] = ["held0", "held1", "held2", "held3"];
const BELOW: &str = "below";
/// Between two looks.
const LOOKS_EVERY: Duration = Duration::from_millis(2);

/// Threads that look whether all stays.
pub struct Held {
    mounted: Vec<PathBuf>,
    ends: Arc<AtomicBool>,
    lookers: Vec<(JoinHandle<()>, Arc<AtomicUsize>)>,
}

impl Held {
    /// `dirs`: those of the storm. Each has the directories [`HELD`] from now on.
    pub fn begin(pool: &Pool, dirs: &[&str]) -> Self {
        let mut held = Self { mounted: Vec::new(), ends: Arc::default(), lookers: Vec::new() };
        for (member, dir) in dirs.iter().enumerate() {
            for name in HELD {
                fs::create_dir_all(pool.member(member).join(dir).join(name).join(BELOW)).unwrap();
            }
        }
        for (member, name) in HELD.into_iter().enumerate() {
            for dir in dirs {
                let place = pool.member(member).join(dir);
                let said = format!("{dir} of {member}");
                let other = pool.store().with_file_name(format!("mounted-{member}-{dir}"));
                fs::create_dir(&other).unwrap();
                fs::write(other.join("file"), &said).unwrap();
                let below = place.join(name).join(BELOW);
                scene::mount(&["--bind", other.to_str().unwrap(), below.to_str().unwrap()]);
                held.mounted.push(below.clone());
                for working in [place.clone(), place.join(name)] {
                    let (looks, ends) = (Arc::new(AtomicUsize::new(0)), held.ends.clone());
                    let (counts, file, said) = (looks.clone(), below.join("file"), said.clone());
                    let looker = std::thread::spawn(move || look(&working, (&file, &said), &counts, &ends));
                    held.lookers.push((looker, looks));
                }
            }
        }
        held
    }

    /// Everything was there at each look.
    pub fn end(mut self) {
        self.ends.store(true, Ordering::SeqCst);
        let mut looks = Vec::new();
        for (looker, count) in std::mem::take(&mut self.lookers) {
            looker.join().unwrap();
            looks.push(count.load(Ordering::SeqCst));
        }
        eprintln!("{looks:?} looks at working directories and mounts below");
        assert!(looks.iter().all(|count| *count > 0), "{looks:?}");
        for below in std::mem::take(&mut self.mounted) {
            rustix::mount::unmount(&below, rustix::mount::UnmountFlags::empty()).unwrap();
        }
    }
}

/// (If the storm fails, all end.)
impl Drop for Held {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::SeqCst);
    }
}

/// Works in a directory, which only this thread does.
fn look(working: &Path, (by_path, said): (&Path, &str), looks: &AtomicUsize, ends: &AtomicBool) {
    // SAFETY: only the thread's own working directory is separated.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FS) }.unwrap();
    std::env::set_current_dir(working).unwrap();
    let relative = by_path.strip_prefix(working).unwrap();
    while !ends.load(Ordering::SeqCst) {
        let now = rustix::process::getcwd(Vec::new()).unwrap_or_else(|why| panic!("{}: {why}", working.display()));
        assert_eq!(Path::new(now.to_str().unwrap()), working);
        for path in [relative, by_path] {
            let found = fs::read_to_string(path).unwrap_or_else(|why| panic!("{}: {why}", by_path.display()));
            assert_eq!(found, said, "{}", by_path.display());
        }
        looks.fetch_add(1, Ordering::SeqCst);
        std::thread::sleep(LOOKS_EVERY);
    }
}
