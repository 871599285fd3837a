//! Content that this member has for other members' files, and what their agents ask about it.
//!
//! The danger that this avoids: content is removed that is the last copy of a file. Only the owner of the name says that it is
//! not, and an answer that does not come is none.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use rustix::io::Errno;
use surgetank_core::namespace::pooled::FILES_OF_A_MEMBER;
use surgetank_core::namespace::{self, Members, Membership, Publishes};
use surgetank_pool::calls::Waits;
use surgetank_store::{Cred, Meta, Staged, StorePath};
use surgetank_types::clock::{tick, uptime};
use surgetank_types::model::{FileId, NodeId};

use super::super::call::{Answer, Ask, Call, Change, Copied, Need, Time};
use super::super::link::{Link, NoAnswer, Owner};
use super::here;
use super::homes::agent;
use super::lengths::{bring_unknown, look_at_lengths};
use super::order::{self, Order};
use super::sending::sum_of_file;
use super::{PATIENCE, Router, bundles, copies, delegating, held, kept, moves, names, pieces, placing};
use crate::mount::request::SetAttr;
use crate::mount::{Filesystem, TimeChange};

/// How often it is asked which contents are still needed.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// So long a home may take to end a copy that is not wanted any more.
const ENDING: Duration = Duration::from_secs(2);
/// So many are asked about at once.
const NUMBERS_MAX: usize = 1000;
/// Contents that the store has leave when a tier is fuller than one part of this.
const FULL: u64 = 2;

/// What another member's agent asks.
pub(super) fn asked<F: Filesystem>(router: &Router<F>, member: u32, ask: &Ask) -> Answer {
    let homes = &router.namespace.homes;
    match ask {
        // (Of another member's file.)
        Ask::Stage { number, .. } | Ask::EndStage { number, .. } if number / FILES_OF_A_MEMBER != u64::from(member) => {
            Answer::Failed(Errno::PERM.raw_os_error())
        }
        Ask::Stage { number, copy } => {
            let cred = |(uid, gid)| Cred { uid, gid };
            let Copied { who, path, bound, perm, owner: (uid, gid), times, xattrs, acting, attempt } = &**copy;
            let (path, bound) = (StorePath(path.to_vec()), StorePath(bound.to_vec()));
            if !is_below(&path) || !is_below(&bound) {
                return Answer::Failed(Errno::INVAL.raw_os_error());
            }
            let meta = Meta { perm: *perm, uid: *uid, gid: *gid, times: *times, xattrs: xattrs.clone() };
            let who = cred(*who);
            let (path, bound, meta) = (&path, &bound, &meta);
            let copy = namespace::StoreCopy { who, path, bound, meta, acting, attempt: *attempt };
            let drains = router.drains.get().and_then(Weak::upgrade);
            let staged = drains.map(|drains| drains.stage_for(*number, &copy));
            match staged.unwrap_or_else(|| Err(std::io::ErrorKind::TimedOut.into())) {
                Ok(Staged { identity, checksum }) => Answer::Staged { identity, checksum },
                Err(why) => {
                    tracing::info!(%why, number, "content for another member was not copied");
                    let known = why.kind() == std::io::ErrorKind::Interrupted;
                    let otherwise = if known { Errno::INTR } else { Errno::IO };
                    Answer::Failed(why.raw_os_error().unwrap_or(otherwise.raw_os_error()))
                }
            }
        }
        Ask::EndStage { number, attempt } => {
            if let Some(drains) = router.drains.get().and_then(Weak::upgrade) {
                drains.end_stage_for(*number, *attempt);
            }
            Answer::Done
        }
        Ask::Published { needed_nanos } => order::published(router, *needed_nanos),
        Ask::HomeAttributes { number } => attributes_of(router, *number, None),
        Ask::StoredUntil { member } => Answer::Count(router.others.stored.of(*member)),
        Ask::OldestAge => Answer::Count(router.namespace.questions.oldest_age_ms(router.outgoing.begun)),
        Ask::SumHome { number } => sum_of(router, *number),
        Ask::SendHome { to, attempt, record, is_stored } => {
            placing::send_home(router, member, (*to, *attempt), (record, *is_stored))
        }
        Ask::ChangeHome { number, change } => attributes_of(router, *number, Some(change)),
        Ask::Needs { numbers } => {
            let need = |number: &u64| match FileId(*number) {
                _ if router.outgoing.moving.is_under_way(*number, member) => Need::Needed,
                id if homes.is_gone(id, member) => Need::Gone,
                id if homes.is_settled(id) => Need::InStore,
                _ => Need::Needed,
            };
            Answer::Needed(numbers.iter().map(need).collect())
        }
        // (A reader that found nothing at the home says so, too.)
        Ask::EndHome { number } if homes.end_home(FileId(*number)) => Answer::Done,
        Ask::EndHome { number } if copies::comes_home(router, FileId(*number)) => Answer::Done,
        Ask::EndHome { number } if homes.is_removed(FileId(*number)) => Answer::Failed(Errno::STALE.raw_os_error()),
        Ask::EndHome { .. } => Answer::Failed(Errno::BUSY.raw_os_error()),
        Ask::Delegate { node, serial, from } => delegating::give(router, member, *node, (*serial, *from)),
        Ask::IsDelegated { node, serial } => delegating::is_held(router, member, *node, *serial),
        Ask::Contents { node, serial, files } => delegating::contents(router, member, (*node, *serial), files),
        Ask::Source { node, serial, file } => delegating::source(router, member, (*node, *serial), *file),
        Ask::Piece { owner, directory, file, piece } => pieces::give(router, (*owner, *directory), *file, *piece),
        Ask::NameOf { who, parent, name } => names::named(router, *who, (*parent, name)),
        ask => moves::asked(router, member, ask),
    }
}

/// Size and times of content here, after a change of them.
fn attributes_of<F: Filesystem>(router: &Router<F>, number: u64, change: Option<&Change>) -> Answer {
    let Some(content) = router.namespace.homes.content_for(number) else {
        return Answer::Failed(Errno::NOENT.raw_os_error());
    };
    let time = |time: Option<Time>| {
        time.map(|time| match time {
            Time::Now => TimeChange::Now,
            Time::At(time) => TimeChange::At(time),
        })
    };
    let changed = change.map_or(Ok(()), |Change { size_bytes, atime, mtime, .. }| {
        let (atime, mtime) = (time(*atime), time(*mtime));
        let change = SetAttr { size_bytes: *size_bytes, atime, mtime, ..SetAttr::default() };
        router.door.setattr(&agent(), content.0, &change).map(|_| ())
    });
    // (The stamp is later than the change.)
    match changed.and_then(|()| here::of_content(router, content)) {
        Ok(content) => Answer::Content(content),
        Err(fault) => Answer::Failed(fault.errno.raw_os_error()),
    }
}

fn sum_of<F: Filesystem>(router: &Router<F>, number: u64) -> Answer {
    let Some(content) = router.namespace.homes.content_for(number) else {
        return Answer::Failed(Errno::NOENT.raw_os_error());
    };
    match router.namespace.replicas.open(content).and_then(|file| sum_of_file(&file)) {
        Ok(sum) => Answer::Bytes(sum.to_vec()),
        Err(why) => Answer::Failed(why.raw_os_error().unwrap_or(Errno::IO.raw_os_error())),
    }
}

/// To be taken before the content is looked at.
pub(super) fn stamp_nanos() -> u64 {
    u64::try_from(uptime().as_nanos()).unwrap_or(u64::MAX)
}

pub(super) fn is_below(path: &StorePath) -> bool {
    let names = path.0.split(|byte| *byte == b'/');
    !path.0.is_empty() && names.into_iter().all(|name| !matches!(name, b"" | b"." | b"..") && !name.contains(&0))
}

/// Looks each second which contents are needed.
pub(super) fn look_now_and_then<F: Filesystem>(router: &Arc<Router<F>>) {
    look_at_lengths(router);
    let router = Arc::downgrade(router);
    let look = move || {
        loop {
            std::thread::sleep(LOOK_EVERY);
            let Some(router) = Weak::upgrade(&router) else { return };
            let is_full = || {
                router.namespace.base.tiers.devices().any(|device| {
                    let view = device.view();
                    view.used_bytes > view.cap_bytes / FULL
                })
            };
            let _ = remove_unneeded(&router, &is_full);
            bundles::remove_unneeded(&router);
            kept::make_room(&router, 0);
            bring_unknown(&router);
        }
    };
    if let Err(why) = std::thread::Builder::new().name("pool-homes".to_owned()).spawn(look) {
        tracing::warn!(%why, "contents of removed files of other members stay until the end");
    }
}

/// This member is to leave: removes all that the store has.
pub(super) fn remove_all<F: Filesystem>(router: &Router<F>) -> usize {
    router.held.wants_to_leave();
    remove_unneeded(router, &|| true)
}

/// Removes contents that no file needs, and while `room_is_wanted` those too that the store has, the oldest first. Returns how
/// many stay that living members need.
pub(super) fn remove_unneeded<F: Filesystem>(router: &Router<F>, room_is_wanted: &dyn Fn() -> bool) -> usize {
    let _one = router.held.removing.lock().unwrap_or_else(PoisonError::into_inner);
    let mut stay = 0;
    let mut of_members = BTreeMap::<u32, Vec<u64>>::new();
    for (number, is_open) in router.namespace.homes.contents() {
        if is_open {
            stay += 1;
        } else {
            let member = u32::try_from(number / FILES_OF_A_MEMBER).unwrap_or(0);
            of_members.entry(member).or_default().push(number);
        }
    }
    for (member, mut numbers) in of_members {
        numbers.sort_unstable();
        // (By number: the oldest first.)
        for numbers in numbers.chunks(NUMBERS_MAX) {
            let ask = Ask::Needs { numbers: numbers.to_vec() };
            let needs = match asked_agent(&router.link, member, ask) {
                Ok(Answer::Needed(needs)) if needs.len() == numbers.len() => needs,
                // (One that has left has put everything into the store. Of one that is lost, it may be the last copy.)
                Err(NoAnswer::Gone) => {
                    let has_left = router.link.may_serve()
                        && !router.link.lost().contains_key(&member)
                        && router.status().is_ok_and(|status| {
                            !status.members.is_empty()
                                && status.members.iter().all(|one| one.member != member)
                                && status.lost.iter().all(|one| one.member != member)
                        });
                    vec![Need::Gone; if has_left { numbers.len() } else { 0 }]
                }
                _ => {
                    stay += numbers.len();
                    continue;
                }
            };
            for (number, need) in numbers.iter().zip(needs) {
                let goes = match need {
                    Need::Gone => true,
                    Need::InStore if room_is_wanted() => {
                        matches!(asked_agent(&router.link, member, Ask::EndHome { number: *number }), Ok(Answer::Done))
                    }
                    Need::InStore => continue,
                    Need::Needed => false,
                };
                if goes {
                    let homes = &router.namespace.homes;
                    held::content_ends(router, *number);
                    // (A program that has it open keeps it.)
                    let _ = router.door.unlink(&agent(), homes.directory().0, homes.name_of(*number).as_bytes());
                    router.others.written.content_ends(member, *number);
                } else {
                    stay += 1;
                }
            }
        }
    }
    stay
}

fn asked_agent(link: &Link, member: u32, ask: Ask) -> Result<Answer, NoAnswer> {
    let until = tick() + PATIENCE;
    link.call(member, &Call { uid: 0, gid: 0, ask }, None, &mut |_| tick() < until)
}

/// The other members, for the drain.
pub(super) struct Others {
    pub link: Arc<Link>,
    pub order: Arc<Order>,
}

impl Members for Others {
    fn stage(
        &self,
        NodeId(home): NodeId,
        FileId(number): FileId,
        copy: &namespace::StoreCopy<'_>,
        is_wanted: &dyn Fn() -> bool,
    ) -> std::io::Result<Staged> {
        let Meta { perm, uid, gid, times, xattrs } = copy.meta.clone();
        let copied = Copied {
            who: (copy.who.uid, copy.who.gid),
            path: copy.path.0.as_slice().into(),
            bound: copy.bound.0.as_slice().into(),
            perm,
            owner: (uid, gid),
            times,
            xattrs,
            acting: copy.acting.clone(),
            attempt: copy.attempt,
        };
        let call = Call { uid: 0, gid: 0, ask: Ask::Stage { number, copy: Box::new(copied) } };
        if number / FILES_OF_A_MEMBER != u64::from(self.link.member()) {
            return Err(std::io::Error::other("its content is at a member of an earlier pool"));
        }
        let until = tick() + PATIENCE;
        let mut patient = |waits| is_wanted() && (waits == Waits::ForReply || tick() < until);
        match self.link.call(home.into(), &call, None, &mut patient) {
            Ok(Answer::Staged { identity, checksum }) => Ok(Staged { identity, checksum }),
            Ok(Answer::Failed(errno)) => Err(std::io::Error::from_raw_os_error(errno)),
            Err(NoAnswer::Gone) => {
                let why = format!("its content was at member {home} of the pool, which is lost");
                Err(std::io::Error::other(why))
            }
            _ => {
                // (Otherwise the home may make the temporary after it was removed here.)
                let end = Ask::EndStage { number, attempt: copy.attempt + 1 };
                let (call, until) = (Call { uid: 0, gid: 0, ask: end }, tick() + ENDING);
                let ended = self.link.call(home.into(), &call, None, &mut |_| tick() < until);
                if !matches!(ended, Ok(Answer::Done) | Err(NoAnswer::Gone)) {
                    tracing::warn!(member = %home, number, "a copy that is not wanted any more may stay in the store");
                }
                let kind = if is_wanted() { std::io::ErrorKind::TimedOut } else { std::io::ErrorKind::Interrupted };
                Err(kind.into())
            }
        }
    }

    fn are_published_until(&self) -> u64 {
        self.order.until_nanos()
    }

    fn await_cut(&self, needed_nanos: u64) {
        self.order.await_news(needed_nanos);
    }

    fn keep_order(&self) -> bool {
        self.order.is_asking() && !self.link.is_over()
    }

    fn owner_of(&self, directory: &[u8]) -> namespace::Owner {
        match self.link.owner(directory) {
            Owner::Us => namespace::Owner::Us,
            Owner::TheStore => namespace::Owner::TheStore,
            Owner::Between | Owner::Member(..) | Owner::Lost(_) => namespace::Owner::Another,
        }
    }

    fn publishes(&self) -> Publishes {
        if self.link.may_serve() {
            Publishes::Freely
        } else if self.link.is_over() {
            Publishes::UnlessTaken(self.membership())
        } else {
            Publishes::Later
        }
    }

    fn membership(&self) -> Membership {
        Membership { pool: self.link.key(), member: self.link.member() }
    }

    fn has_lost(&self, NodeId(member): NodeId, FileId(number): FileId) -> bool {
        number / FILES_OF_A_MEMBER != u64::from(self.link.member())
            || self.link.losses() > 0 && self.link.lost().contains_key(&u32::from(member))
    }
}
