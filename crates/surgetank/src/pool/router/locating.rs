//! Where contents are, for `surgetank locate`: which other members have a file of this one, and what this one has of others'.

use surgetank_core::namespace::replicas::Sealed;
use surgetank_types::model::FileId;

use super::super::replicas::Record;
use super::{Router, held};
use crate::mount::Filesystem;

/// The other members that have the content of this member's file: its home, and those with whole copies of it as it is now.
pub fn members_with<F: Filesystem>(router: &Router<F>, id: FileId, home: Option<u32>) -> Vec<u32> {
    let lost = router.link.lost();
    let mut found: Vec<u32> = home.into_iter().filter(|home| !lost.contains_key(home)).collect();
    if router.outgoing.copies.are_none() {
        return found;
    }
    let whole = router.outgoing.copies.whole(id.0);
    let now = || router.namespace.replicas.sealed(id).map(|sealed: Sealed| Record::of(id.0, &sealed));
    if let Some(now) = (!whole.is_empty()).then(now).flatten() {
        let has_it = whole.into_iter().filter(|(member, has)| {
            has.as_ref().is_some_and(|has| now.is_of_content_of(has)) && !lost.contains_key(member)
        });
        found.extend(has_it.map(|(member, _)| member).filter(|member| Some(*member) != home));
    }
    found
}

/// Tier and plain file of the content that this member has for another one's file of this number: as its home, or as a copy.
pub fn content_of<F: Filesystem>(router: &Router<F>, number: u64) -> Option<(String, Vec<u8>)> {
    let locations = &router.namespace.locations;
    let home = locations.content_copy(&router.namespace.homes.name_of(number));
    home.or_else(|| locations.content_copy(&held::name_of(router, number)))
}

/// The number of this member.
pub fn this_member<F: Filesystem>(router: &Router<F>) -> u32 {
    router.link.member()
}

/// All members but this one. Without an answer of the pool's process: none.
pub fn other_members<F: Filesystem>(router: &Router<F>) -> Vec<u32> {
    let me = router.link.member();
    let status = router.status().map(|status| status.members).unwrap_or_default();
    status.into_iter().map(|one| one.member).filter(|member| *member != me).collect()
}
