//! The driver on a real shared file system, which has times of whole seconds and a client with its own cache.

use surgetank_testkit::servers::moosefs::MooseFs;

use super::*;
use crate::conformance::conform_in_whole_seconds;

/// MooseFS does not report holes, so a copy would read and write those of a file of a terabyte. The driver cannot see a change
/// within a second that keeps length and time.
const WITHOUT: &[&str] = &["times in nanoseconds", "holes stay holes", "conflicts are seen"];

#[test]
fn conforms_on_moosefs() {
    let Some(server) = MooseFs::start() else { return };
    let nth = std::cell::Cell::new(0);
    conform_in_whole_seconds(WITHOUT, || {
        nth.set(nth.get() + 1);
        let dir = server.root().join(format!("case{}", nth.get()));
        fs::create_dir(&dir).unwrap();
        Box::new(store_at(&dir))
    });
    assert!(nth.get() > 15, "{} cases", nth.get());
}
