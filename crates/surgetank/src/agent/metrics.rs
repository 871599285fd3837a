//! The metrics in the text format of Prometheus: one list of families, rendered for each request.
//!
//! Labels have only values from fixed sets: tiers, devices' health, and words of Surgetank. Programs and files cannot
//! make up a value. Every family is always there, with its help, even without a sample. docs/metrics.md has a row for
//! each; a test compares the two with what a run serves.

mod process;

use std::fmt::{Display, Write};

use surgetank_core::report::run::EventKind;
use surgetank_core::report::{DeadlineStatus, Figures, Health, PoolFigures, TierStatus, TierSummary};

use super::socket::Desk;
use process::Process;

/// The current metrics. `life`: the number of agents before this one.
pub fn text(desk: &Desk, life: u32) -> String {
    let mut text = Text::default();
    text.gauge("surgetank_build_info", "Always 1; the label says which version this is.");
    text.labelled(&[("version", &desk.hello.version)], 1);
    text.one_gauge(
        "surgetank_start_time_seconds",
        "When the agent began to serve, in seconds since 1970.",
        desk.since_unix_seconds,
    );
    text.one_counter(
        "surgetank_agent_replacements_total",
        "Earlier agents that were killed and replaced; their counts are lost.",
        life,
    );
    text.one_gauge("surgetank_runs", "Runs that are using the directory.", desk.users.runs().len());
    directory(&mut text, &desk.engine.figures());
    process(&mut text, &Process::of_this());
    text.text
}

fn directory(text: &mut Text, figures: &Figures) {
    tiers(text, figures);
    events(text, figures);
    queue(text, figures);
    drain(text, figures);
    mount(text, figures);
    store(text, figures);
    figures.pool.iter().for_each(|figures| pool(text, figures));
}

fn tiers(text: &mut Text, figures: &Figures) {
    let status = |text: &mut Text, name: &str, help: &str, value: fn(&TierStatus) -> u64| {
        text.gauge(name, help);
        figures.status.tiers.iter().for_each(|tier| text.labelled(&[("tier", &tier.name)], value(tier)));
    };
    status(text, "surgetank_tier_capacity_bytes", "Most that Surgetank uses of the tier.", |tier| tier.cap_bytes);
    status(text, "surgetank_tier_used_bytes", "Bytes of files on the tier.", |tier| tier.used_bytes);
    status(text, "surgetank_tier_reserved_bytes", "Bytes promised to writers and not written yet.", |tier| {
        tier.reserved_bytes
    });
    status(text, "surgetank_tier_undrained_bytes", "Bytes on the tier that the store does not have.", |tier| {
        tier.dirty_bytes
    });
    status(
        text,
        "surgetank_tier_free_bytes",
        "Room left on the tier: of its capacity, and of what its devices have.",
        |tier| tier.devices.iter().map(|device| device.free_bytes).sum(),
    );
    text.gauge("surgetank_tier_devices", "Devices of the tier, by whether they are in use or out of use after errors.");
    for tier in &figures.status.tiers {
        let well = tier.devices.iter().filter(|device| device.health == Health::Well).count();
        text.labelled(&[("tier", &tier.name), ("health", "well")], well);
        text.labelled(&[("tier", &tier.name), ("health", "sick")], tier.devices.len() - well);
    }

    text.gauge("surgetank_tier_files", "Files on the tier.");
    figures.tiers.iter().for_each(|tier| text.labelled(&[("tier", &tier.name)], tier.files));
    let summary = |text: &mut Text, name: &str, help: &str, value: fn(&TierSummary) -> u64| {
        text.counter(name, help);
        figures.summary.tiers.iter().for_each(|tier| text.labelled(&[("tier", &tier.name)], value(tier)));
    };
    summary(
        text,
        "surgetank_tier_written_bytes_total",
        "Bytes written to the tier, by programs and by copies to it; holes of files are not counted.",
        |tier| tier.in_bytes,
    );
    summary(
        text,
        "surgetank_tier_read_bytes_total",
        "Bytes read from the tier by the drain and through the agent.",
        |tier| tier.out_bytes,
    );
    summary(
        text,
        "surgetank_tier_hits_total",
        "Opens for reading by the mount that found the file on the tier.",
        |tier| tier.hits,
    );
    summary(
        text,
        "surgetank_tier_spills_total",
        "Files that had to leave the tier while they were written or when memory ran short.",
        |tier| tier.spills,
    );
    text.counter("surgetank_tier_evictions_total", "Copies dropped from the tier, whose content the store has.");
    figures.tiers.iter().for_each(|tier| text.labelled(&[("tier", &tier.name)], tier.evictions));
    text.counter("surgetank_tier_evicted_bytes_total", "Bytes freed on the tier by that.");
    figures.tiers.iter().for_each(|tier| text.labelled(&[("tier", &tier.name)], tier.evicted_bytes));
    text.counter("surgetank_tier_errors_total", "Calls of the tier's devices that failed.");
    figures.tiers.iter().for_each(|tier| text.labelled(&[("tier", &tier.name)], tier.errors));
}

fn events(text: &mut Text, figures: &Figures) {
    text.counter(
        "surgetank_events_total",
        "What was decided and met, by kind (placed, hit, miss, fetched, spilled, evicted, conflict, no_room), place (a tier, or the store) and reason.",
    );
    for event in &figures.events {
        let kind = match event.kind {
            EventKind::Placed => "placed",
            EventKind::Hit => "hit",
            EventKind::Miss => "miss",
            EventKind::Fetched => "fetched",
            EventKind::Spilled => "spilled",
            EventKind::Evicted => "evicted",
            EventKind::Conflict => "conflict",
            EventKind::NoRoom => "no_room",
        };
        text.labelled(&[("kind", kind), ("place", &event.place), ("reason", &event.reason)], event.count);
    }
}

fn queue(text: &mut Text, figures: &Figures) {
    let queue = &figures.status.queue;
    text.one_gauge("surgetank_queue_files", "Files that wait for the store.", queue.files);
    text.one_gauge("surgetank_queue_bytes", "Bytes of these files.", queue.bytes);
    text.one_gauge(
        "surgetank_queue_operations",
        "Renames, deletes and changes of attributes that wait for the store.",
        queue.operations,
    );
    let oldest = queue.oldest.as_ref().map_or(0, |oldest| oldest.age_seconds);
    text.one_gauge(
        "surgetank_queue_oldest_age_seconds",
        "How long the oldest of these files has been waiting; 0 when none is.",
        oldest,
    );
    text.gauge(
        "surgetank_at_risk_bytes",
        "Bytes meant for the store without a durable copy, which this would lose: a reboot of the node, or the loss of the node.",
    );
    text.labelled(&[("loss", "reboot")], figures.status.at_risk_reboot_bytes);
    text.labelled(&[("loss", "node")], figures.status.at_risk_node_bytes);
    text.one_gauge(
        "surgetank_lost_files",
        "Files whose newest version is lost, until the user acknowledges them.",
        figures.status.lost.total,
    );
    let deadline = |text: &mut Text, name: &str, help: &str, value: &dyn Fn(&DeadlineStatus) -> String| {
        text.gauge(name, help);
        figures.status.deadline.iter().for_each(|deadline| text.labelled(&[], value(deadline)));
    };
    deadline(
        text,
        "surgetank_deadline_timestamp_seconds",
        "When the job ends, in seconds since 1970; missing when that is not known.",
        &|deadline| deadline.unix_seconds.to_string(),
    );
    deadline(
        text,
        "surgetank_deadline_drainable_bytes",
        "What can be drained until then; missing when that is not known.",
        &|deadline| deadline.drainable_bytes.to_string(),
    );
}

fn drain(text: &mut Text, figures: &Figures) {
    let (drain, summary) = (&figures.drain, &figures.summary.drain);
    text.one_counter("surgetank_drain_files_total", "Files that became durable.", summary.files);
    text.one_counter(
        "surgetank_drain_bytes_total",
        "Bytes that became durable; holes of files are not counted.",
        summary.bytes,
    );
    text.one_counter(
        "surgetank_drain_copied_bytes_total",
        "Bytes copied to the store, copies that had to be made again included.",
        drain.copied_bytes,
    );
    text.one_counter(
        "surgetank_drain_operations_total",
        "Operations carried out in the store: publications, renames, deletes, attributes.",
        drain.operations,
    );
    text.one_counter(
        "surgetank_drain_failures_total",
        "Tries that the store refused; each is made again.",
        figures.status.drain.failures,
    );
    text.one_counter(
        "surgetank_drain_corrupt_copies_total",
        "Copies that failed verification and were repeated.",
        figures.status.drain.corrupt,
    );
    text.one_counter(
        "surgetank_drain_conflicts_total",
        "Files that another client had changed in the store; both are kept.",
        drain.conflicts,
    );
    let now = surgetank_types::clock::now().secs();
    let paused = figures.status.drain.paused_since_unix_seconds.map_or(0, |since| (now - since).max(1));
    text.one_gauge(
        "surgetank_drain_paused_seconds",
        "Seconds without progress of the drain while files wait; 0 otherwise.",
        paused,
    );
}

fn mount(text: &mut Text, figures: &Figures) {
    let mount = &figures.summary.mount;
    text.one_counter(
        "surgetank_mount_requests_total",
        "Requests of the kernel that the agent answered.",
        mount.requests,
    );
    text.one_counter(
        "surgetank_mount_service_seconds_total",
        "Time the agent spent answering them, over all threads.",
        mount.service_ms as f64 / 1000.0,
    );
    text.counter(
        "surgetank_opens_total",
        "Opens by the mount, by whether the program reads and writes the file directly or through the agent. What the preload shim opens is not among them.",
    );
    text.labelled(&[("way", "direct")], mount.direct_opens);
    text.labelled(&[("way", "mediated")], mount.mediated_opens);
    text.one_counter(
        "surgetank_mediated_read_bytes_total",
        "Bytes that programs read through the agent.",
        mount.mediated_read_bytes,
    );
    text.one_counter(
        "surgetank_mediated_written_bytes_total",
        "Bytes that programs wrote through the agent.",
        mount.mediated_write_bytes,
    );
}

fn store(text: &mut Text, figures: &Figures) {
    text.counter(
        "surgetank_store_lookups_total",
        "Questions to the store because a program wanted to know: attributes of a name, or a whole directory.",
    );
    text.labelled(&[("kind", "name")], figures.store_lookups);
    text.labelled(&[("kind", "directory")], figures.store_listings);
    let savings = figures.status.drain.savings.unwrap_or_default();
    text.one_counter(
        "surgetank_store_compressed_files_total",
        "Files that went to the store compressed.",
        savings.compressed_files,
    );
    text.one_counter(
        "surgetank_store_incompressible_files_total",
        "Files that did not get smaller and went as they are.",
        savings.vain_files,
    );
    text.one_counter(
        "surgetank_store_compressed_content_bytes_total",
        "Bytes of the compressed files, as programs see them.",
        savings.content_bytes,
    );
    text.one_counter(
        "surgetank_store_compressed_stored_bytes_total",
        "Bytes of the compressed files, as the store has them.",
        savings.stored_bytes,
    );
    text.one_counter(
        "surgetank_store_compress_seconds_total",
        "Time spent compressing, over all threads of the drain.",
        savings.compress_ms as f64 / 1000.0,
    );
    text.one_counter(
        "surgetank_store_deduplicated_files_total",
        "Files that went to the store deduplicated.",
        savings.deduplicated_files,
    );
    text.one_counter(
        "surgetank_store_deduplicated_bytes_total",
        "Bytes of the deduplicated files.",
        savings.deduplicated_bytes,
    );
    text.one_counter(
        "surgetank_store_deduplicated_new_bytes_total",
        "Of these, the bytes that the store did not have.",
        savings.new_bytes,
    );
    text.one_counter(
        "surgetank_store_hash_seconds_total",
        "Time spent finding what the store has already, over all threads of the drain.",
        savings.hash_ms as f64 / 1000.0,
    );
}

/// Only in a pool.
fn pool(text: &mut Text, figures: &PoolFigures) {
    text.gauge(
        "surgetank_pool_members",
        "Members of the pool, this one too; missing while the pool's process of this node does not answer.",
    );
    figures.members.iter().for_each(|members| text.labelled(&[], members));
    let others: Vec<_> = figures.traffic.others.iter().map(|other| (other.member.to_string(), other)).collect();
    text.counter(
        "surgetank_pool_network_bytes_total",
        "Bytes on the network of this agent's calls to the member (sent), and of the replies (received).",
    );
    for (member, other) in &others {
        text.labelled(&[("member", member), ("direction", "received")], other.received_bytes);
        text.labelled(&[("member", member), ("direction", "sent")], other.sent_bytes);
    }
    text.counter("surgetank_pool_calls_total", "Calls of this agent to the member; each one is a round trip.");
    others.iter().for_each(|(member, other)| text.labelled(&[("member", member)], other.calls));
}

/// Named like the process metrics of Prometheus' own libraries.
fn process(text: &mut Text, process: &Process) {
    text.one_counter("process_cpu_seconds_total", "Processor time of the agent.", process.cpu_seconds);
    text.one_gauge("process_resident_memory_bytes", "Memory of the agent.", process.resident_bytes);
    text.one_gauge("process_virtual_memory_bytes", "Address space of the agent.", process.virtual_bytes);
    text.one_gauge("process_open_fds", "Descriptors that the agent has open.", process.open_descriptors);
    text.one_gauge("process_max_fds", "Most that it may have.", process.descriptors_max);
}

/// The text so far.
#[derive(Default)]
struct Text {
    text: String,
    /// The current family.
    name: String,
}

impl Text {
    fn begin(&mut self, name: &str, kind: &str, help: &str) {
        name.clone_into(&mut self.name);
        // Writing to a string does not fail.
        let _ = writeln!(
            self.text,
            "# HELP {name} {}\n# TYPE {name} {kind}",
            help.replace('\\', r"\\").replace('\n', r"\n")
        );
    }

    fn gauge(&mut self, name: &str, help: &str) {
        self.begin(name, "gauge", help);
    }

    fn counter(&mut self, name: &str, help: &str) {
        self.begin(name, "counter", help);
    }

    fn labelled(&mut self, labels: &[(&str, &str)], value: impl Display) {
        self.text.push_str(&self.name);
        for (index, (label, value)) in labels.iter().enumerate() {
            let value = value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n");
            let _ = write!(self.text, "{}{label}=\"{value}\"", if index == 0 { '{' } else { ',' });
        }
        let _ = writeln!(self.text, "{} {value}", if labels.is_empty() { "" } else { "}" });
    }

    fn one_gauge(&mut self, name: &str, help: &str, value: impl Display) {
        self.gauge(name, help);
        self.labelled(&[], value);
    }

    fn one_counter(&mut self, name: &str, help: &str, value: impl Display) {
        self.counter(name, help);
        self.labelled(&[], value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_with_special_bytes_is_escaped() {
        let mut text = Text::default();
        text.counter("name_total", "a \\ and\na line");
        text.labelled(&[("tier", "a\"b\\c\nd{,}"), ("other", "")], 7);
        text.one_gauge("seconds", "x", 0.25);
        assert_eq!(
            text.text,
            "# HELP name_total a \\\\ and\\na line\n# TYPE name_total counter\nname_total{tier=\"a\\\"b\\\\c\\nd{,}\",other=\"\"} 7\n\
             # HELP seconds x\n# TYPE seconds gauge\nseconds 0.25\n"
        );
    }

    #[test]
    fn every_metric_family_is_present_at_the_start() {
        let mut text = Text::default();
        directory(&mut text, &Figures::default());
        let names = text.text.lines().filter(|line| line.starts_with("# TYPE ")).count();
        let distinct: std::collections::BTreeSet<&str> =
            text.text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
        assert_eq!(names, distinct.len(), "no family twice");
        assert!(names > 40, "{names}");
    }
}
