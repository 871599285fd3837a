//! The driver against a real HDFS.

use std::cell::Cell;
use std::time::Duration;

use surgetank_testkit::servers::hdfs::HdfsServer;

use super::{Place, WebHdfs};
use crate::conformance::{self, deliver, errno, make_dir, me, meta, names, no_gate, noise, path, read, source, staged};
use crate::verdict::{Verdict, classify, errno_of};
use crate::{Expect, Remote, Source, Store, Verify};

fn open(server: &HdfsServer, user: &str, at: &str, ttl: Duration) -> WebHdfs {
    WebHdfs::open(Place::parse(&server.url(user, at)).unwrap(), ttl).unwrap()
}

/// One server for all tests, because it takes long to start.
#[test]
fn against_a_real_hdfs() {
    let Some(mut server) = HdfsServer::start() else { return };
    conforms(&server, &surgetank_testkit::servers::hdfs::superuser());
    // Every mode applies to a user that is not the superuser.
    conforms(&server, "ann");
    checksum_of_the_server_is_compared(&server);
    files_of_other_clients_are_kept(&server);
    reader_gets_one_version(&server);
    listing_is_valid_until_its_refresh(&server);
    refusals_pass_or_are_final(&mut server);
}

fn conforms(server: &HdfsServer, user: &str) {
    let nth = Cell::new(0);
    conformance::conform(|| {
        nth.set(nth.get() + 1);
        Box::new(open(server, user, &format!("{user}/case {}", nth.get()), Duration::from_secs(60)))
    });
    assert!(nth.get() > 15, "{} cases", nth.get());
}

/// Blocks have 8 MiB.
fn checksum_of_the_server_is_compared(server: &HdfsServer) {
    let store = open(server, "ann", "sums", Duration::ZERO);
    for size in [1, 511, 512, 513, 8 << 20, (8 << 20) + 1, 20_000_001] {
        let (temporary, copy) = staged(&store, "f", &source(&noise(size)), &meta(0o600));
        let kept = store.staged.lock().unwrap().get(&temporary).cloned().unwrap();
        let sum = kept.sum.unwrap();
        assert_eq!(sum.is(&store.digest(copy.identity.ino).unwrap()), Some(true), "{size} bytes");
        // Another client writes as many other bytes under the temporary's name, in another file or in the same one.
        let name = format!("sums/{temporary}");
        server.write(&name, &vec![7; size]);
        let number = store.status(std::str::from_utf8(&temporary.0).unwrap()).unwrap().file_id;
        assert_eq!(sum.is(&store.digest(number).unwrap()), Some(false), "{size} bytes");
        for how in [Verify::Cache, Verify::Reread] {
            let why = store.verify(me(), &temporary, &copy, how, no_gate()).unwrap_err();
            assert_eq!(why.kind(), std::io::ErrorKind::InvalidData, "{why}");
        }
        store.discard(me(), &temporary).unwrap();
    }
    // If the server's checksum cannot be compared, the store reads the bytes back.
    let (temporary, mut copy) = staged(&store, "f", &source(b"abc"), &meta(0o600));
    store.staged.lock().unwrap().get_mut(&temporary).unwrap().sum = None;
    store.verify(me(), &temporary, &copy, Verify::Cache, no_gate()).unwrap();
    copy.checksum ^= 1;
    store.verify(me(), &temporary, &copy, Verify::Cache, no_gate()).unwrap_err();
    store.discard(me(), &temporary).unwrap();
    assert_eq!(names(&store, "", true), [""; 0]);
}

fn files_of_other_clients_are_kept(server: &HdfsServer) {
    let store = open(server, "ann", "races", Duration::ZERO);
    make_dir(&store, "d");
    let (temporary, _) = staged(&store, "d/f", &source(b"ours"), &meta(0o600));
    assert!(store.check(me(), &path("d/f"), &Expect::Absent).unwrap());
    server.write("races/d/f", b"theirs");
    let why = store.publish(me(), &temporary, &path("d/f"), &meta(0o600)).unwrap_err();
    assert_eq!(errno_of(&why), surgetank_types::error::Errno::AGAIN, "{why}");
    assert_eq!(server.read("races/d/f"), b"theirs");
    assert!(!store.check(me(), &path("d/f"), &Expect::Absent).unwrap());
    store.publish(me(), &temporary, &path("d/g"), &meta(0o600)).unwrap();

    // A rename onto a name that was free at the last check.
    assert!(store.check(me(), &path("d/h"), &Expect::Absent).unwrap());
    server.write("races/d/h", b"theirs");
    let why = store.rename(me(), &path("d/g"), &path("d/h")).unwrap_err();
    assert_eq!(errno_of(&why), surgetank_types::error::Errno::AGAIN, "{why}");
    assert_eq!((server.read("races/d/h"), server.read("races/d/g")), (b"theirs".to_vec(), b"ours".to_vec()));

    // An append changes the file's identity, although its inode number is the same.
    let ours = deliver(&store, "d/ours", b"12345", &meta(0o600));
    assert!(store.check(me(), &path("d/ours"), &Expect::Identity(ours)).unwrap());
    server.append("races/d/ours", b"6");
    assert!(
        !store.check(me(), &path("d/ours"), &Expect::Identity(ours)).unwrap(),
        "the other client's file would be overwritten"
    );
    assert_eq!(read(&store, "d/ours"), b"123456");
    // A file that another client wrote has no record: HDFS's own attributes count.
    let seen = store.stat(me(), &path("d/h")).unwrap();
    assert_eq!((seen.attr.perm, seen.attr.size_bytes), (0o644, 6));
}

fn reader_gets_one_version(server: &HdfsServer) {
    let store = open(server, "ann", "reads", Duration::ZERO);
    let bytes = noise(9_000_000);
    deliver(&store, "f", &bytes, &meta(0o600));
    let Source::Remote(source) = store.source(me(), &path("f")).unwrap() else { panic!("the source is not remote") };
    let piece = |source: &dyn Remote, at: usize| {
        let mut piece = vec![0; 1000];
        source.read_at(&mut piece, at as u64).map(|()| piece)
    };
    assert_eq!(piece(&*source, 8_388_000).unwrap(), bytes[8_388_000..8_389_000], "across the end of a block");
    store.rename(me(), &path("f"), &path("g")).unwrap();
    deliver(&store, "f", &noise(9_000_001), &meta(0o600));
    assert_eq!(piece(&*source, 0).unwrap(), bytes[..1000], "the reader got the new file of the name");
    store.unlink(me(), &path("g")).unwrap();
    assert_eq!(errno(piece(&*source, 0)), libc::ESTALE);
}

fn listing_is_valid_until_its_refresh(server: &HdfsServer) {
    let store = open(server, "ann", "lists", Duration::from_secs(600));
    for number in 0..5 {
        deliver(&store, &format!("f{number}"), b"x", &meta(0o600));
    }
    assert_eq!(names(&store, "", false).len(), 5);
    let glance = |name: &str| errno(store.glance(me(), &path(name)));
    assert_eq!((glance("f4"), glance("new")), (0, libc::ENOENT));
    server.write("lists/new", b"theirs");
    server.done("DELETE", "lists/f4", "op=DELETE");
    assert_eq!((glance("f4"), glance("new")), (0, libc::ENOENT), "the server got another query");
    assert_eq!(errno(store.stat(me(), &path("f4"))), libc::ENOENT, "a query before a change uses the old listing");
    store.refresh();
    assert_eq!((glance("f4"), glance("new")), (libc::ENOENT, 0));
}

fn refusals_pass_or_are_final(server: &mut HdfsServer) {
    server.done("PUT", "theirs", "op=MKDIRS&permission=755");
    let mut place = Place::parse(&server.url("ann", "theirs")).unwrap();
    place.limits.all_tries = Duration::from_secs(1);
    let store = WebHdfs::open(place, Duration::ZERO).unwrap();
    let stage = || {
        let to = (path(".surgetank-tmp-1"), path("f"));
        store.stage_file(me(), &to.0, &to.1, &source(b"x"), &meta(0o600), no_gate()).map(drop)
    };
    let verdict = |result: std::io::Result<()>| classify(errno_of(&result.unwrap_err()));
    assert_eq!(errno(stage()), libc::EACCES);
    assert_eq!(errno(store.may_write_dir(me(), &path(""))), libc::EACCES);
    assert_eq!(verdict(stage()), Verdict::Refuse);
    server.done("PUT", "theirs", "op=SETPERMISSION&permission=777");
    stage().unwrap();
    store.discard(me(), &path(".surgetank-tmp-1")).unwrap();
    assert_eq!(names(&store, "", true), [""; 0]);
    server.kill();
    assert_eq!(verdict(stage()), Verdict::Retry);
    server.restart();
    stage().unwrap();
}
