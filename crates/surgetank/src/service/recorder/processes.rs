//! The processes of a run: merges their own counts with the agent's observations when they end.
//!
//! A request counts for one door only (`report::run::Doors`). The kernel read and wrote what a program counted on
//! descriptors of the mount, unless the agent mediated it. If the agent mediated all requests of the process, the
//! program's figures count, as they say what it asked for. If the agent mediated some, the agent's figures are
//! subtracted. The dangers that it avoids: counting the same byte twice; an impossible figure, which is left out and
//! reported.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::time::Instant;

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use surgetank_core::report::PathText;
use surgetank_core::report::run::{
    Counted as How, Io, Kernel, PROCESSES_MAX, Process, Program, RunRecord, TRACED_PROCESSES_MAX,
};
use surgetank_types::model::FileId;

use crate::service::tally::Seen;
use crate::shimdoor::counts::{Counted, Counts};

/// The limit of program names, which processes choose themselves.
const PROGRAMS_MAX: usize = 1000;

/// The begin of a run, as both readings of one clock.
pub struct Since {
    pub begun: Instant,
    pub begun_ns: u64,
}

impl Since {
    fn now_ns(&self) -> u64 {
        self.begun_ns.saturating_add(u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }
    fn of_ns(&self, at_ns: u64) -> u64 {
        at_ns.saturating_sub(self.begun_ns) / 1000
    }
    fn of(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.begun).as_micros()).unwrap_or(u64::MAX)
    }
}

#[derive(Default)]
pub struct Processes {
    list: Vec<Process>,
    /// Entries for which processes' lists of files had no room.
    left_out: u64,
    total: u64,
    programs: BTreeMap<String, Program>,
    /// Figures of ended children that their parents waited for: the kernel adds them to the parents'.
    children: HashMap<u32, Kernel>,
    /// Slots of processes in `list`, to be freed after the next note.
    settled: HashSet<usize>,
    /// Processes that found no slot.
    pub lost: u64,
    /// Processes with impossible figures.
    disbelieved: u64,
}

pub fn is_alive(pid: u32) -> bool {
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return false };
    !matches!(test_kill_process(pid), Err(Errno::SRCH))
}

impl Processes {
    /// Begins with the processes that the record has already.
    pub fn of(record: &mut RunRecord) -> Self {
        let programs = std::mem::take(&mut record.programs);
        Self {
            list: std::mem::take(&mut record.processes),
            total: record.processes_total.saturating_sub(record.processes_lost),
            disbelieved: record.processes_disbelieved,
            left_out: record.accesses_left_out,
            programs: programs.into_iter().map(|program| (program.program.clone(), program)).collect(),
            ..Self::default()
        }
    }

    /// Slots whose processes are gathered already.
    pub fn settled(&self) -> &HashSet<usize> {
        &self.settled
    }

    /// Gathers processes that have ended; `all`: living ones as well. Returns the number that ended.
    pub fn gather(&mut self, counted: Vec<Counted>, mut seen: HashMap<u32, Seen>, since: &Since, all: bool) -> usize {
        let mut counted: Vec<Counted> = counted
            .into_iter()
            .filter(|one| !self.settled.contains(&one.slot))
            .map(|one| believed(one, since))
            .collect();
        counted.sort_by_key(|one| one.begun_ns);
        let mut next_of: HashMap<u32, &Counted> = HashMap::new();
        let mut over: Vec<(&Counted, Option<&Counted>, bool)> = Vec::new();
        // From the end, so that the next program of the same process is known.
        for one in counted.iter().rev() {
            let next = next_of.insert(one.pid, one);
            let alive = next.is_none() && one.alive;
            if all || !alive {
                over.push((one, next, alive));
            }
        }
        let on_mount = counted.iter().filter(|one| one.mount != Io::default());
        // (In the order of their begin: the last one remains.)
        let last_on_mount: HashMap<u32, u64> = on_mount.map(|one| (one.pid, one.begun_ns)).collect();
        // Children come before their parents.
        over.sort_by_key(|(one, next, _)| match next {
            Some(next) => next.begun_ns,
            None if one.ended_ns == 0 => u64::MAX,
            None => one.ended_ns,
        });
        let taken = over.len();
        for (one, next, alive) in over {
            let last_of_it = next.is_none();
            let has_mount = one.mount != Io::default();
            let later_has = last_on_mount.get(&one.pid).is_some_and(|begun_ns| *begun_ns > one.begun_ns);
            // The process continued as a program that does not count: the agent's observations belong to that program.
            let left = |seen: &Seen| one.ended_ns == 0 && last_of_it && !is_named(seen, &one.program);
            let is_its = last_of_it || (has_mount && !later_has);
            let is_its = is_its && !seen.get(&one.pid).is_some_and(left);
            let seen = if is_its { seen.remove(&one.pid) } else { None };
            let process = self.of_counted(one, next, seen, since, alive);
            self.settled.insert(one.slot);
            self.disbelieved += u64::from(one.disbelieved);
            self.add(process);
        }
        for (pid, seen) in seen {
            self.left_out += seen.traced.as_ref().map_or(0, |traced| traced.left_out);
            self.add(of_seen(pid, seen, since));
        }
        taken
    }

    fn of_counted(
        &mut self,
        one: &Counted,
        next: Option<&Counted>,
        seen: Option<Seen>,
        since: &Since,
        alive: bool,
    ) -> Process {
        let ended_ns = if one.ended_ns != 0 { Some(one.ended_ns) } else { next.map(|next| next.begun_ns) };
        let kernel_end = one.kernel_ended;
        let of_children = if kernel_end.is_some() { self.children.remove(&one.pid) } else { None };
        let kernel = kernel_end.map(|end| less(&end, &of_children.unwrap_or_default()));
        if let (Some(end), None) = (kernel_end, next) {
            self.children.entry(one.parent).or_default().join(&end);
        }
        let mut process = Process {
            pid: one.pid,
            parent: one.parent,
            program: one.program.clone(),
            command: one.command.clone(),
            begun_us: since.of_ns(one.begun_ns),
            ended_us: match ended_ns {
                Some(at) => Some(since.of_ns(at)),
                None if alive => None,
                None => Some(since.of(Instant::now())),
            },
            counted: if one.disbelieved {
                How::Agent
            } else if one.ended_ns != 0 || alive || next.is_some() {
                How::Shim
            } else {
                How::ShimCutShort
            },
            kernel,
            ..Process::default()
        };
        process.io.shim = one.plain.clone();
        let mut mount = one.mount.clone();
        match seen {
            None => process.io.passthrough = mount,
            Some(seen) => {
                let (mediated, direct) = (&seen.mediated, &seen.direct);
                let opens_directly = direct.read_opens + direct.write_opens > 0;
                // (Every fsync in the mount counts for the agent, even if the kernel reads and writes.)
                if is_only_synced(mediated) {
                    take_opens(&mut mount, direct);
                    process.io.passthrough = mount;
                } else if !opens_directly && mount != Io::default() {
                    take_opens(&mut mount, mediated);
                    process.io.mediated = mount;
                } else {
                    process.io.mediated = mediated.clone();
                    take_off(&mut mount, mediated);
                    take_opens(&mut mount, direct);
                    process.io.passthrough = mount;
                }
            }
        }
        process
    }

    fn add(&mut self, process: Process) {
        self.total += 1;
        let full = self.programs.len() >= PROGRAMS_MAX && !self.programs.contains_key(&process.program);
        let name = if full { "(others)" } else { process.program.as_str() };
        let program = self
            .programs
            .entry(name.to_owned())
            .or_insert_with(|| Program { program: name.to_owned(), ..Program::default() });
        program.processes += 1;
        let lived_us = process.ended_us.unwrap_or(process.begun_us).saturating_sub(process.begun_us);
        program.lived_us = program.lived_us.saturating_add(lived_us);
        program.io.join(&process.io);
        if let Some(kernel) = &process.kernel {
            program.kernel.get_or_insert_default().join(kernel);
        }
        self.list.push(process);
        if self.list.len() >= 2 * TRACED_PROCESSES_MAX {
            self.shorten();
        }
    }

    /// Keeps processes with a trace: the trace exists for them.
    fn shorten(&mut self) {
        self.list.sort_by_key(|process| std::cmp::Reverse((!process.files.is_empty(), weight(process))));
        let traced = self.list.partition_point(|process| !process.files.is_empty());
        self.list.truncate(traced.clamp(PROCESSES_MAX, TRACED_PROCESSES_MAX));
    }

    /// Frees the slots of ended processes.
    pub fn free(&mut self, counts: &Counts) -> io::Result<()> {
        self.settled.drain().try_for_each(|slot| counts.free(slot))
    }

    /// `named`: the current name of a file.
    pub fn write_into(&mut self, record: &mut RunRecord, named: impl Fn(FileId) -> Option<Vec<u8>>) {
        self.shorten();
        for access in self.list.iter_mut().flat_map(|process| &mut process.files) {
            if let Some(path) = access.file.and_then(&named) {
                access.path = PathText(path);
            }
        }
        record.accesses_left_out = self.left_out;
        record.processes = self.list.clone();
        record.processes.sort_by_key(|process| process.begun_us);
        record.processes_total = self.total + self.lost;
        record.processes_lost = self.lost;
        record.processes_disbelieved = self.disbelieved;
        record.programs = self.programs.values().cloned().collect();
        record.programs.sort_by_key(|program| std::cmp::Reverse(all_bytes(&program.io.total())));
    }
}

/// Removes impossible figures.
fn believed(one: Counted, since: &Since) -> Counted {
    if one.is_possible(since.now_ns()) {
        return one;
    }
    let (plain, mount) = (Io::default(), Io::default());
    Counted { disbelieved: true, begun_ns: since.begun_ns, ended_ns: 0, plain, mount, kernel_ended: None, ..one }
}

/// The kernel shortens names.
fn is_named(seen: &Seen, program: &str) -> bool {
    const NAME_BYTES_MAX: usize = 15;
    let name = program.as_bytes();
    name.get(..NAME_BYTES_MAX).unwrap_or(name) == seen.program.as_bytes()
}

fn of_seen(pid: u32, seen: Seen, since: &Since) -> Process {
    let mut process = Process {
        pid,
        parent: seen.parent,
        program: seen.program,
        begun_us: since.of(seen.begun),
        ended_us: (!is_alive(pid)).then(|| since.of(seen.last)),
        counted: How::Agent,
        ..Process::default()
    };
    process.io.mediated = seen.mediated;
    process.io.passthrough_unseen = seen.direct;
    process.io.seccomp = seen.seccomp;
    if let Some(traced) = seen.traced {
        // (The process may have become another program since its first request.)
        process.program = traced.program;
        process.command = traced.command;
        process.pipeline = traced.pipeline;
        process.files = traced.files.iter().map(|(file, touched)| touched.access(*file)).collect();
        process.files.sort_by(|a, b| a.path.cmp(&b.path));
    }
    process
}

fn all_bytes(io: &Io) -> u64 {
    io.bytes().saturating_add(io.estimated_read_bytes).saturating_add(io.estimated_write_bytes)
}

/// Decides which processes stay in a list that is too long.
fn weight(process: &Process) -> (u64, u64) {
    let total = process.io.total();
    (all_bytes(&total), process.ended_us.unwrap_or(u64::MAX).saturating_sub(process.begun_us))
}

fn is_only_synced(io: &Io) -> bool {
    Io { sync_calls: 0, sync_us: 0, ..io.clone() }.is_empty()
}

fn take_opens(to: &mut Io, from: &Io) {
    to.read_opens = from.read_opens;
    to.write_opens = from.write_opens;
    to.create_opens = from.create_opens;
    to.open_us = from.open_us;
}

fn take_off(from: &mut Io, what: &Io) {
    from.read_bytes = from.read_bytes.saturating_sub(what.read_bytes);
    from.write_bytes = from.write_bytes.saturating_sub(what.write_bytes);
    from.read_calls = from.read_calls.saturating_sub(what.read_calls);
    from.write_calls = from.write_calls.saturating_sub(what.write_calls);
    from.read_us = from.read_us.saturating_sub(what.read_us);
    from.write_us = from.write_us.saturating_sub(what.write_us);
    from.sync_calls = from.sync_calls.saturating_sub(what.sync_calls);
    from.sync_us = from.sync_us.saturating_sub(what.sync_us);
    for (sizes, less) in [(&mut from.read_sizes, &what.read_sizes), (&mut from.write_sizes, &what.write_sizes)] {
        for (size, less) in sizes.0.iter_mut().zip(&less.0) {
            *size = size.saturating_sub(*less);
        }
    }
}

fn less(whole: &Kernel, part: &Kernel) -> Kernel {
    Kernel {
        read_bytes: whole.read_bytes.saturating_sub(part.read_bytes),
        write_bytes: whole.write_bytes.saturating_sub(part.write_bytes),
        read_calls: whole.read_calls.saturating_sub(part.read_calls),
        write_calls: whole.write_calls.saturating_sub(part.write_calls),
        device_read_bytes: whole.device_read_bytes.saturating_sub(part.device_read_bytes),
        device_write_bytes: whole.device_write_bytes.saturating_sub(part.device_write_bytes),
    }
}

#[cfg(test)]
mod tests {
    use surgetank_types::model::RunId;

    use super::*;

    /// The largest process id: it is alive only after four million others.
    const NOBODY: u32 = 1 << 22;

    fn counted(slot: usize, pid: u32, program: &str, begun_ns: u64, ended_ns: u64) -> Counted {
        Counted {
            slot,
            pid,
            parent: 1,
            begun_ns,
            ended_ns,
            plain: Io::default(),
            mount: Io::default(),
            kernel_ended: (ended_ns != 0).then(Kernel::default),
            program: program.into(),
            command: program.into(),
            disbelieved: false,
            alive: is_alive(pid),
        }
    }

    fn seen(pid: u32) -> Seen {
        Seen::new(RunId(1), pid, 1, "dd")
    }

    fn since() -> Since {
        let begun = Instant::now();
        Since { begun: begun.checked_sub(std::time::Duration::from_secs(9)).unwrap_or(begun), begun_ns: 0 }
    }

    fn record(processes: &mut Processes) -> RunRecord {
        let mut record = RunRecord::default();
        processes.write_into(&mut record, |_| None);
        record
    }

    #[test]
    fn exec_splits_a_process_into_two_programs() {
        let mut processes = Processes::default();
        let mut shell = counted(0, NOBODY, "sh", 1000, 0);
        shell.plain.read_bytes = 1;
        let mut killed = counted(1, NOBODY, "sleep", 5000, 0);
        killed.plain.write_bytes = 2;
        processes.gather(vec![killed.clone(), shell.clone()], HashMap::new(), &since(), false);
        processes.gather(vec![killed, shell], HashMap::new(), &since(), true);
        let record = record(&mut processes);
        assert_eq!(record.processes.len(), 2, "each once");
        let [sh, sleep] = &record.processes[..] else { unreachable!() };
        assert_eq!((sh.program.as_str(), sh.ended_us, sh.io.shim.read_bytes), ("sh", Some(5), 1));
        assert_eq!(sh.kernel, None, "the kernel counts the process on");
        assert_eq!(sh.counted, How::Shim);
        assert_eq!((sleep.counted, sleep.io.shim.write_bytes, sleep.kernel), (How::ShimCutShort, 2, None));
    }

    /// Regression: a process wrote 2⁶⁴ − 1 into its slot, and the recorder stopped or the record had 1.8e19 bytes.
    #[test]
    fn impossible_figures_of_a_process_are_left_out_and_counted() {
        let mut processes = Processes::default();
        let mut liar = counted(0, NOBODY, "liar", 1000, 0);
        liar.plain.write_bytes = u64::MAX;
        liar.plain.write_sizes.add_many(3, u64::MAX);
        let mut honest = counted(1, NOBODY - 1, "honest", 2000, 3000);
        honest.plain.write_bytes = 7;
        let mut agent = seen(NOBODY);
        agent.program = "liar".into();
        agent.mediated.write_bytes = 5;
        processes.gather(vec![liar, honest], HashMap::from([(NOBODY, agent)]), &since(), false);
        let record = record(&mut processes);
        assert_eq!((record.processes_total, record.processes_disbelieved), (2, 1));
        let of = |name: &str| record.processes.iter().find(|process| process.program == name).unwrap();
        assert_eq!((of("liar").counted, of("liar").io.total().write_bytes), (How::Agent, 5));
        assert_eq!((of("honest").counted, of("honest").io.total().write_bytes), (How::Shim, 7));
    }

    #[test]
    fn kernel_counts_of_children_are_not_their_parents() {
        let mut processes = Processes::default();
        let end = |bytes| Some(Kernel { read_bytes: bytes, ..Kernel::default() });
        let parent = Counted { kernel_ended: end(100), ..counted(0, NOBODY, "make", 1, 900) };
        let child = Counted { kernel_ended: end(70), parent: NOBODY, ..counted(1, NOBODY - 1, "cc", 2, 800) };
        processes.gather(vec![parent, child], HashMap::new(), &since(), false);
        let record = record(&mut processes);
        let of = |name: &str| record.programs.iter().find(|program| program.program == name).unwrap().kernel.unwrap();
        assert_eq!((of("make").read_bytes, of("cc").read_bytes), (30, 70));
    }

    #[test]
    fn byte_is_counted_at_one_door() {
        let of = |mount_bytes: u64, mediated_bytes: u64, direct_opens: u64| {
            let mut processes = Processes::default();
            let mut one = counted(0, NOBODY, "dd", 1, 2);
            one.mount.write_bytes = mount_bytes;
            let mut agent = seen(NOBODY);
            agent.mediated.write_bytes = mediated_bytes;
            agent.mediated.write_opens = u64::from(mediated_bytes > 0);
            agent.direct.write_opens = direct_opens;
            agent.direct.estimated_write_bytes = 5 * direct_opens;
            processes.gather(vec![one], HashMap::from([(NOBODY, agent)]), &since(), false);
            let io = record(&mut processes).processes.remove(0).io;
            assert!(io.passthrough_unseen.is_empty(), "no estimate where it was counted");
            assert_eq!(io.passthrough.write_opens, direct_opens);
            (io.passthrough.write_bytes, io.mediated.write_bytes)
        };
        assert_eq!(of(100, 0, 1), (100, 0), "the kernel did it all");
        assert_eq!(of(100, 90, 0), (0, 100), "the agent did it all: what the program asked for stands");
        assert_eq!(of(100, 40, 1), (60, 40));
    }

    #[test]
    fn program_without_the_shim_has_the_agents_counts() {
        let mut processes = Processes::default();
        let mut agent = seen(NOBODY);
        agent.mediated.read_bytes = 7;
        agent.direct.estimated_read_bytes = 9;
        processes.gather(Vec::new(), HashMap::from([(NOBODY, agent)]), &since(), false);
        let record = record(&mut processes);
        let process = &record.processes[0];
        assert_eq!((process.counted, process.io.mediated.read_bytes), (How::Agent, 7));
        assert_eq!((process.io.passthrough_unseen.estimated_read_bytes, process.io.total().bytes()), (9, 7));
        assert_eq!(record.processes_total, 1);
    }

    #[test]
    fn work_after_exec_of_a_static_program_counts_for_it() {
        let mut processes = Processes::default();
        let mut agent = seen(NOBODY);
        agent.program = "static".into();
        agent.mediated.write_bytes = 7;
        processes.gather(vec![counted(0, NOBODY, "bash", 1, 0)], HashMap::from([(NOBODY, agent)]), &since(), false);
        let record = record(&mut processes);
        let of =
            |name: &str| record.programs.iter().find(|program| program.program == name).unwrap().io.total().write_bytes;
        assert_eq!((of("bash"), of("static")), (0, 7));
    }

    #[test]
    fn record_keeps_the_largest_processes_and_counts_all() {
        let mut processes = Processes::default();
        let many = 3 * TRACED_PROCESSES_MAX as u64;
        for at in 0..many {
            let mut one = counted(at as usize, NOBODY - at as u32, "true", 1 + at, 2 + at);
            one.plain.read_bytes = at;
            processes.gather(vec![one], HashMap::new(), &since(), false);
        }
        let record = record(&mut processes);
        assert_eq!((record.processes.len(), record.processes_total), (PROCESSES_MAX, many));
        assert_eq!(record.programs[0].processes, many);
        assert!(record.processes.iter().all(|process| process.io.shim.read_bytes >= many - PROCESSES_MAX as u64));
    }
}
