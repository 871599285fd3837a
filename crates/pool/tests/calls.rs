//! Calls of members to each other, in one process and over real sockets.

#![allow(clippy::unwrap_used, clippy::expect_used)] // a test reports by a panic

#[path = "calls/pool.rs"]
mod pool;
#[path = "calls/proxy.rs"]
mod proxy;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use pool::{LEASE, LONG_REPLY, One, PANICS, PATIENCE, Pool, SLEEPS, for_long, once, wait_until};
use proxy::Proxy;
use surgetank_pool::calls::{BODY_BYTES_MAX, Waits};
use surgetank_pool::{CallFailed, Caller, MemberId, Once, Secret, Term, Whereabouts};

/// Calls of many threads between all members, `count` in all. Each is carried out once, and gets its own reply.
fn call_at_once(members: &[One], threads: usize, count: usize, body_of: impl Fn(usize) -> Vec<u8> + Sync) {
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= count {
                        return;
                    }
                    let (from, to) = (number % members.len(), (number + 1) % members.len());
                    let (body, to) = (body_of(number), members[to].id());
                    let reply = members[from].caller.call(to, Some(once(number)), &body, &mut for_long()).unwrap();
                    assert!(reply.iter().eq(body.iter().rev()), "call {number}");
                    if number.is_multiple_of(3) {
                        members[from].caller.answered(to, once(number));
                    }
                }
            });
        }
    });
    for number in 0..count {
        let (from, to) = (number % members.len(), (number + 1) % members.len());
        let called = members[to].notes.called.lock().unwrap().get(&(members[from].id(), body_of(number))).copied();
        assert_eq!(called, Some(1), "call {number}");
    }
    let carried_out: usize = members.iter().map(|one| one.called().values().sum::<usize>()).sum();
    assert_eq!(carried_out, count);
}

/// Long ones, too.
fn mixed_body(number: usize) -> Vec<u8> {
    let length = if number.is_multiple_of(50) { 1 << 20 } else { 20 };
    let mut body = vec![9; length];
    body[1..9].copy_from_slice(&(number as u64).to_le_bytes());
    body
}

/// A patience that ends after this time.
fn patience(time: Duration) -> impl FnMut(Waits) -> bool {
    let until = Instant::now() + time;
    move |_| Instant::now() < until
}

#[test]
fn call_gets_its_reply_and_counts_its_bytes() {
    let mut pool = Pool::new();
    let (first, second) = (pool.join(), pool.join());
    let long = vec![9; 1 << 20];
    assert_eq!(first.call(&second, None, &[9, 8]), Ok(vec![8, 9]));
    assert_eq!(first.call(&second, None, &[]), Ok(Vec::new()));
    assert!(first.call(&second, Some(once(1)), &long).unwrap() == long);
    let [(to, (received, sent))] = first.caller.network_bytes()[..] else { panic!("calls to one member") };
    assert_eq!(to, second.id());
    let bounds = 1 << 20..(1 << 20) + (1 << 16);
    assert!(bounds.contains(&received) && bounds.contains(&sent), "{received}, {sent}");
    let bytes: HashMap<_, _> = second.membership.network_bytes().into_iter().collect();
    let (received, sent) = bytes[&first.id()];
    assert!(bounds.contains(&received) && bounds.contains(&sent), "{received}, {sent}");
}

#[test]
fn calls_of_200_threads_are_each_carried_out_once() {
    let mut pool = Pool::new();
    let members: Vec<One> = (0..3).map(|_| pool.join()).collect();
    call_at_once(&members, 200, 3000, mixed_body);
}

// The calls wait for each other's threads, and not for a connection.
#[test]
fn slow_calls_at_once_do_not_wait_for_each_other() {
    let mut pool = Pool::new();
    let (first, second) = (pool.join(), pool.join());
    let began = Instant::now();
    thread::scope(|scope| {
        for number in 0..200 {
            let (first, second) = (&first, &second);
            scope.spawn(move || assert_eq!(first.call(second, None, &[SLEEPS, number]), Ok(vec![number, SLEEPS])));
        }
    });
    assert!(began.elapsed() < Duration::from_secs(12), "{:?}", began.elapsed());
}

#[test]
fn calls_on_connections_that_are_cut_are_carried_out_once() {
    let mut pool = Pool::new();
    let members: Vec<One> = (0..2).map(|_| pool.join()).collect();
    let proxies: Vec<Arc<Proxy>> = members.iter().map(|one| Proxy::stand_before(one.membership.address())).collect();
    for (one, proxy) in members.iter().zip(&proxies) {
        members.iter().for_each(|caller| caller.reach(one.id(), &proxy.address));
        proxy.cut_after([1000..4000, 4000..400_000]);
    }
    // (Each body has room on some connections.)
    let body_of = |number: usize| {
        let mut body = mixed_body(number);
        body.resize(if number.is_multiple_of(49) { 60_000 } else { 20 }, 9);
        body
    };
    call_at_once(&members, 16, 5000, body_of);
    for proxy in &proxies {
        let (calls, replies) = proxy.cuts();
        assert!(calls > 3 && replies > 3, "{calls} cuts in calls, {replies} in replies");
    }
}

#[test]
fn connections_that_the_receiver_closed_are_replaced_at_once() {
    let mut pool = Pool::new();
    let (first, second) = (pool.join(), pool.join());
    for number in 0..20 {
        let began = Instant::now();
        assert_eq!(first.call(&second, Some(once(number)), &[9, number as u8]), Ok(vec![number as u8, 9]));
        assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
        second.membership.cut_connections();
    }
    assert_eq!(second.called().values().sum::<usize>(), 20);
}

#[test]
fn longest_bodies_are_sent_and_longer_ones_refused() {
    let mut pool = Pool::new();
    let (first, second) = (pool.join(), pool.join());
    let longest = vec![7; BODY_BYTES_MAX];
    assert!(first.call(&second, None, &longest).unwrap() == longest);
    assert_eq!(first.call(&second, None, &vec![7; BODY_BYTES_MAX + 1]), Err(CallFailed::TooLong));
    // A reply that cannot be sent is replaced by an empty one.
    for once in [None, Some(once(7))] {
        assert_eq!(first.call(&second, once, &[LONG_REPLY]), Ok(Vec::new()));
    }
    for once in [None, Some(once(8))] {
        assert_eq!(first.call(&second, once, &[PANICS]), Ok(Vec::new()));
    }
}

// The bytes wait on the network: all of the call, or its first part.
#[test]
fn call_given_up_before_it_is_read_is_never_carried_out() {
    let mut pool = Pool::new();
    let (first, second) = (pool.join(), pool.join());
    let proxy = Proxy::stand_before(second.membership.address());
    first.reach(second.id(), &proxy.address);
    assert_eq!(first.call(&second, None, &[9, 1]), Ok(vec![1, 9]));
    let mut long = vec![9; 1 << 20];
    long[1] = 2;
    for (let_through, body) in [(0, vec![9, 3]), (700_000, long)] {
        proxy.hold_after(let_through);
        let began = Instant::now();
        let given_up = first.caller.call(second.id(), Some(once(3)), &body, &mut patience(Duration::from_millis(700)));
        assert_eq!(given_up, Err(CallFailed::TimedOut));
        assert!((700..1500).contains(&began.elapsed().as_millis()), "{:?}", began.elapsed());
        proxy.end_those_held();
        proxy.let_through();
        assert_eq!(first.call(&second, None, &[9, 4]), Ok(vec![4, 9]));
        thread::sleep(Duration::from_millis(500));
        assert!(!second.called().contains_key(&(first.id(), body)));
    }
}

#[test]
fn call_that_has_begun_is_finished_after_it_is_given_up() {
    let mut pool = Pool::new();
    let (first, second) = (pool.join(), pool.join());
    let began = Instant::now();
    let to = second.id();
    let given_up = first.caller.call(to, None, &[SLEEPS], &mut patience(Duration::from_millis(500)));
    assert_eq!(given_up, Err(CallFailed::TimedOut));
    assert!((500..1200).contains(&began.elapsed().as_millis()), "{:?}", began.elapsed());
    // Its late reply is not another call's.
    assert_eq!(first.call(&second, None, &[9, 8]), Ok(vec![8, 9]));
    wait_until("the first call", || second.called().len() == 2);
    assert!(second.called().values().all(|count| *count == 1));
}

#[test]
fn repeated_call_of_the_next_agent_gets_the_first_reply() {
    let mut pool = Pool::new();
    let (first, second) = (pool.join(), pool.join());
    assert_eq!(first.call(&second, Some(once(1)), &[9, 8]), Ok(vec![8, 9]));
    // (Another body shows that the reply is the first one's.)
    let next = pool.caller_of(&first);
    assert_eq!(next.call(second.id(), Some(once(1)), &[9, 7], &mut for_long()), Ok(vec![8, 9]));
    let part = Once { part: 1, ..once(1) };
    assert_eq!(next.call(second.id(), Some(part), &[9, 6], &mut for_long()), Ok(vec![6, 9]));
    // Also while it runs, when the first agent has ended.
    let began = Instant::now();
    let to = second.id();
    let given_up = first.caller.call(to, Some(once(2)), &[SLEEPS, 5], &mut patience(Duration::from_millis(300)));
    assert_eq!(given_up, Err(CallFailed::TimedOut));
    thread::scope(|scope| {
        for _ in 0..3 {
            let reply = || next.call(to, Some(once(2)), &[SLEEPS, 4], &mut for_long());
            scope.spawn(move || assert_eq!(reply(), Ok(vec![5, SLEEPS])));
        }
    });
    assert!(began.elapsed() < Duration::from_millis(2 * 3000 - 500), "{:?}", began.elapsed());
    let expected = [vec![9, 8], vec![9, 6], vec![SLEEPS, 5]].map(|body| ((first.id(), body), 1));
    assert_eq!(second.called(), HashMap::from(expected));
}

#[test]
fn answered_calls_are_dropped_by_the_receiver() {
    let mut pool = Pool::new();
    let (first, second, third) = (pool.join(), pool.join(), pool.join());
    for number in [1, 2] {
        assert_eq!(first.call(&second, Some(once(number)), &[9, 1]), Ok(vec![1, 9]));
        assert_eq!(third.call(&second, Some(once(number)), &[9, 3]), Ok(vec![3, 9]));
    }
    first.caller.answered(second.id(), once(1));
    // (It goes with this call.)
    assert_eq!(first.call(&second, None, &[9]), Ok(vec![9]));
    assert_eq!(first.call(&second, Some(once(1)), &[9, 2]), Ok(vec![2, 9]));
    assert_eq!(first.call(&second, Some(once(2)), &[9, 2]), Ok(vec![1, 9]));
    assert_eq!(third.call(&second, Some(once(1)), &[9, 4]), Ok(vec![3, 9]));
}

#[test]
fn call_to_a_member_that_leaves_ends_with_gone() {
    let mut pool = Pool::new();
    let (first, second) = (pool.join(), pool.join());
    let to = second.id();
    thread::scope(|scope| {
        let calls = scope.spawn(|| {
            let began = Instant::now();
            (first.caller.call(to, None, &[SLEEPS], &mut for_long()), began.elapsed())
        });
        thread::sleep(Duration::from_millis(200));
        assert!(second.membership.leave(PATIENCE));
        let (reply, took) = calls.join().unwrap();
        assert_eq!(reply, Err(CallFailed::Gone));
        assert!(took < Duration::from_secs(3), "{took:?}");
    });
    assert_eq!(first.caller.call(to, None, &[9], &mut for_long()), Err(CallFailed::Gone));
    assert_eq!(second.caller.call(first.id(), None, &[9], &mut for_long()), Err(CallFailed::Expelled));
    wait_until("the host to know it", || *first.notes.gone.lock().unwrap() == [to]);
    // Its late calls are refused, also if it does not know that it left.
    let late = pool.caller_at((to, Term(1)), first.id(), first.membership.address());
    let refused = late.call(first.id(), None, &[9, 1], &mut patience(Duration::from_millis(500)));
    assert_eq!(refused, Err(CallFailed::TimedOut));
    assert!(first.called().is_empty());
}

#[test]
fn call_to_a_member_that_dies_ends_with_its_lease() {
    let mut pool = Pool::new();
    let (first, second) = (pool.join(), pool.join());
    let to = second.id();
    assert_eq!(first.call(&second, None, &[9]), Ok(vec![9]));
    drop(second);
    let began = Instant::now();
    assert_eq!(first.caller.call(to, None, &[9], &mut for_long()), Err(CallFailed::Gone));
    assert!(began.elapsed() < LEASE * 2, "{:?}", began.elapsed());
}

// (Its connection stays open: a machine that hangs.)
#[test]
fn call_to_a_silent_member_ends_when_it_is_gone_or_replaced() {
    let mut pool = Pool::new();
    let (first, second) = (pool.join(), pool.join());
    let address = second.membership.address().to_owned();
    for (then, expected) in [
        (Whereabouts::Gone, CallFailed::Gone),
        (Whereabouts::Expelled, CallFailed::Expelled),
        // (Nothing listens there: only the patience ends it.)
        (Whereabouts::At(Term(2), "127.0.0.1:1".to_owned()), CallFailed::TimedOut),
    ] {
        let (address, began) = (address.clone(), Instant::now());
        let find = move |_| match began.elapsed() < Duration::from_millis(300) {
            true => Whereabouts::At(Term(1), address.clone()),
            false => then.clone(),
        };
        let caller = Caller::new(&pool.secret, pool::POOL, first.membership.id().unwrap(), Box::new(find)).unwrap();
        let ended = caller.call(second.id(), None, &[SLEEPS], &mut patience(Duration::from_secs(2)));
        assert_eq!(ended, Err(expected));
        let took = began.elapsed();
        assert!((900..2500).contains(&took.as_millis()), "{took:?}");
        // (The third one's connection was reset before that.)
        wait_until("the receiver", || second.called().contains_key(&(first.id(), vec![SLEEPS])));
    }
}

#[test]
fn call_waits_for_a_member_that_is_not_known_yet() {
    let mut pool = Pool::new();
    let (first, second) = (pool.join(), pool.join());
    let next = MemberId(second.id().0 + 1);
    let unknown = second.caller.call(next, None, &[9], &mut patience(Duration::from_millis(300)));
    assert_eq!(unknown, Err(CallFailed::TimedOut));
    thread::scope(|scope| {
        let reply = scope.spawn(|| second.caller.call(next, None, &[9, 8], &mut for_long()));
        thread::sleep(Duration::from_millis(300));
        let third = pool.join();
        assert_eq!(third.id(), next);
        assert_eq!(reply.join().unwrap(), Ok(vec![8, 9]));
        // Neither does a new member wait for its first reply until all others know it.
        let began = Instant::now();
        assert_eq!(third.call(&first, None, &[9, 7]), Ok(vec![7, 9]));
        assert_eq!(third.call(&second, None, &[9, 6]), Ok(vec![6, 9]));
        assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    });
}

#[test]
fn replaced_agent_calls_and_is_called() {
    let mut pool = Pool::new();
    let (first, second) = (pool.join(), pool.join());
    for number in 1..=3 {
        assert_eq!(second.call(&first, Some(once(number.into())), &[9, number]), Ok(vec![number, 9]));
    }
    let (id, Term(term)) = second.membership.id().unwrap();
    // The call to the agent that dies is the next one's.
    let late = thread::scope(|scope| {
        let reply = scope.spawn(|| first.caller.call(id, Some(once(1)), &[SLEEPS, 6], &mut for_long()));
        thread::sleep(Duration::from_millis(100));
        drop(second);
        let second = pool.replace(id, term + 1);
        assert_eq!(reply.join().unwrap(), Ok(vec![6, SLEEPS]));
        second
    });
    // Its numbers are its own: it gets none of the replies that its predecessor got.
    for number in 4..=6 {
        let once = Some(once(usize::from(number) - 3));
        assert_eq!(late.call(&first, once, &[9, number]), Ok(vec![number, 9]));
    }
    assert!(first.called().len() == 6 && first.called().values().all(|count| *count == 1));
    assert!(first.notes.gone.lock().unwrap().is_empty());
}

#[test]
fn superseded_agent_calls_in_vain() {
    let mut pool = Pool::new();
    let (first, second) = (pool.join(), pool.join());
    let (id, Term(term)) = second.membership.id().unwrap();
    // (It does not know that it is superseded.)
    let blind = pool.caller_at((id, Term(term)), first.id(), first.membership.address());
    assert_eq!(blind.call(first.id(), None, &[9, 1], &mut for_long()), Ok(vec![1, 9]));
    thread::scope(|scope| {
        let reply = scope.spawn(|| second.call(&first, None, &[SLEEPS]));
        let cut = scope.spawn(|| blind.call(first.id(), None, &[SLEEPS, 2], &mut patience(Duration::from_secs(5))));
        thread::sleep(Duration::from_millis(100));
        let later = pool.replace(id, term + 1);
        assert_eq!(reply.join().unwrap(), Err(CallFailed::Expelled));
        assert_eq!(cut.join().unwrap(), Err(CallFailed::TimedOut));
        drop(later);
    });
    assert_eq!(second.call(&first, None, &[9]), Err(CallFailed::Expelled));
    assert_eq!(second.membership.serves_until(), None);
    assert!(!first.called().contains_key(&(id, vec![9])));
}

#[test]
fn strangers_and_unknown_members_are_refused() {
    let mut pool = Pool::new();
    let (first, second) = (pool.join(), pool.join());
    let (to, address) = (first.id(), first.membership.address().to_owned());
    let known = second.membership.id().unwrap();
    let at = |term: u32| {
        let address = address.clone();
        Box::new(move |_| Whereabouts::At(Term(term), address.clone()))
    };
    let other = Secret::random().unwrap();
    let callers = [
        ("other secret", Caller::new(&other, pool::POOL, known, at(1))),
        ("other pool", Caller::new(&pool.secret, [8; 16], known, at(1))),
        ("unknown member", Caller::new(&pool.secret, pool::POOL, (MemberId(77), Term(1)), at(1))),
        ("older term", Caller::new(&pool.secret, pool::POOL, (known.0, Term(0)), at(1))),
        ("itself", Caller::new(&pool.secret, pool::POOL, (to, Term(1)), at(1))),
        ("other term is expected", Caller::new(&pool.secret, pool::POOL, known, at(2))),
    ];
    for (number, (what, caller)) in callers.into_iter().enumerate() {
        let refused = caller.unwrap().call(to, None, &[9, number as u8], &mut patience(Duration::from_millis(400)));
        assert_eq!(refused, Err(CallFailed::TimedOut), "{what}");
    }
    assert!(first.called().is_empty());
    let caller = Caller::new(&pool.secret, pool::POOL, known, at(1)).unwrap();
    assert_eq!(caller.call(to, None, &[9, 1], &mut for_long()), Ok(vec![1, 9]));
}

#[test]
fn dropped_membership_closes_connections_of_callers() {
    let mut pool = Pool::new();
    let (first, second) = (pool.join(), pool.join());
    let caller = pool.caller_at(first.membership.id().unwrap(), second.id(), second.membership.address());
    let to = second.id();
    thread::scope(|scope| {
        let calls = scope.spawn(|| {
            let mut asked = 0_u32;
            let mut patient = patience(Duration::from_secs(2));
            let reply = caller.call(to, None, &[SLEEPS], &mut |waits| {
                asked += 1;
                patient(waits)
            });
            (reply, asked)
        });
        thread::sleep(Duration::from_millis(200));
        drop(second);
        let (reply, asked) = calls.join().unwrap();
        assert_eq!(reply, Err(CallFailed::TimedOut));
        assert!(asked > 30, "{asked}");
    });
}

#[test]
fn patience_is_asked_with_what_the_call_waits_for() {
    let mut pool = Pool::new();
    let (first, second) = (pool.join(), pool.join());
    let waits_for = |to: MemberId| {
        let mut seen = Vec::new();
        let mut patient = patience(Duration::from_millis(500));
        let given_up = first.caller.call(to, None, &[SLEEPS], &mut |waits| {
            seen.push(waits);
            patient(waits)
        });
        assert_eq!(given_up, Err(CallFailed::TimedOut));
        // (At least every 50 ms, and a little late on a busy machine.)
        assert!(seen.len() >= 6, "{seen:?}");
        seen.dedup();
        seen
    };
    assert_eq!(waits_for(MemberId(77)), [Waits::ForMember]);
    assert_eq!(waits_for(second.id()).last(), Some(&Waits::ForReply));
    let proxy = Proxy::stand_before(second.membership.address());
    proxy.hold_after(0);
    first.reach(second.id(), &proxy.address);
    second.membership.cut_connections();
    assert_eq!(waits_for(second.id()), [Waits::ForMember]);
}

/// Prints how long a call takes, and how much is sent in a second. Run it alone, with `--release -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn measure_calls() {
    let mut pool = Pool::new();
    let (first, second) = (pool.join(), pool.join());
    let time = |what: &str, count: u32, bytes: usize, call: &dyn Fn()| {
        (0..count / 10).for_each(|_| call());
        let began = Instant::now();
        (0..count).for_each(|_| call());
        let took = began.elapsed();
        let rate = bytes as f64 * f64::from(count) / took.as_secs_f64() / 1e6;
        println!("{what}: {:.1} µs a call, {rate:.0} MB/s", took.as_secs_f64() * 1e6 / f64::from(count));
    };
    let long = vec![pool::SHORT_REPLY; 1 << 20];
    time("empty", 20_000, 0, &|| drop(first.call(&second, None, &[])));
    time("1 MiB sent", 1000, 1 << 20, &|| drop(first.call(&second, None, &long)));
    time("1 MiB received", 1000, 1 << 20, &|| drop(first.call(&second, None, &[pool::MIB_REPLY])));
}
