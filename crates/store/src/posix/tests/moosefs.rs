//! The driver on a real shared file system: times of whole seconds, a client of its own between us and the server.

use surgetank_testkit::servers::moosefs::MooseFs;

use super::*;
use crate::conformance::conform_in_whole_seconds;

/// It does not tell where holes are, so that those of a file of a terabyte would be read and written; and what is changed
/// within a second, as long as before and with the same time, nothing shows.
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
