//! What a member with the pool's secret can send: frames in any pieces, requests to the registry, answers and messages to
//! a member. Nothing may crash, and the engine never gives a directory two owners.
#![no_main]

use std::collections::BTreeMap;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use surgetank_pool::connection::Hello;
use surgetank_pool::frame::Frames;
use surgetank_pool::{Answer, Claim, Directory, Embedded, Join, Member, MemberId, Message, Request, Times};

const LEASE: Duration = Duration::from_secs(10);
const TIMES: Times =
    Times { margin: Duration::from_millis(500), renew: Duration::from_secs(3), again: Duration::from_millis(500) };

fuzz_target!(|bytes: &[u8]| {
    let Some((&piece, bytes)) = bytes.split_first() else { return };
    let mut frames = Frames::default();
    let mut engine = Embedded::new(LEASE);
    let joined = engine.ask(Duration::ZERO, Request::Join(Join {
        instance: [1; 16],
        resumes: None,
        address: String::new(),
        temporaries: String::new(),
        role: Default::default(),
    }));
    let Ok(mut member) = Member::new(Duration::ZERO, joined, TIMES, &[]) else { unreachable!("the first member") };
    let mut now = Duration::ZERO;
    let mut owners: BTreeMap<Directory, Claim> = BTreeMap::new();
    for bytes in bytes.chunks(usize::from(piece).max(1)) {
        frames.push(bytes);
        let mut copy = Frames::default();
        copy.push(bytes);
        let _ = copy.next_message::<Hello>();
        now += Duration::from_millis(700);
        match frames.next_message::<(u64, Option<Request>, Option<Answer>, Option<Message>)>() {
            Ok(Some((number, request, answer, message))) => {
                if let Some(request) = request {
                    engine.ask(now, request);
                }
                if let Some(answer) = answer {
                    member.answered(now, number, answer);
                }
                if let Some(message) = message {
                    member.told(MemberId(2), message);
                }
                member.tick(now);
                while member.next_output().is_some() {}
            }
            Ok(None) => {}
            Err(_) => break,
        }
        for (directory, claim, _) in engine.everything().claims {
            let before = owners.insert(directory, claim);
            assert!(before.is_none_or(|before| before == claim || before.epoch < claim.epoch));
        }
    }
});
