//! The tiers' fill, the drain's queue and the traffic with the store, from the samples.

use surgetank_core::report::run::{RunRecord, Sample};

use super::chart::{Chart, Curve, Unit, figure};
use crate::verbs::words::bytes;

/// Tiers get colours in their order; with more tiers the colours repeat.
const CLASSES: [&str; 6] = ["c0", "c1", "c2", "c3", "c4", "c5"];

/// A gap is this many intervals without a sample.
const GAP_INTERVALS: f64 = 5.0;

pub fn figures(record: &RunRecord) -> String {
    let points = &record.samples.points;
    if points.len() < 2 {
        return String::new();
    }
    let end_us = points.iter().map(|point| point.at_us).max().unwrap_or(0).max(record.ended_us) as f64;
    let mark_us = record.command_ended_us.map(|at| at as f64);
    let of =
        |value: &dyn Fn(&Sample) -> u64| points.iter().map(|point| (point.at_us as f64, value(point) as f64)).collect();
    let curve = |name: &str, class, filled, points| Curve { name: name.to_owned(), class, filled, points };
    let mut out = String::from("<div class=\"charts\">\n");
    // The sampler did not get processor time there.
    let gap_us = GAP_INTERVALS * record.samples.interval_us.max(1) as f64;
    let gaps = points.windows(2).any(|two| two[1].at_us.saturating_sub(two[0].at_us) as f64 > gap_us);
    let mut show = |id: String, title: String, note: String, unit, limit, curves| {
        out += &figure(&Chart {
            id,
            title,
            note,
            unit,
            end_us,
            gap_us: if unit == Unit::BytesPerSecond { f64::INFINITY } else { gap_us },
            mark_us,
            limit,
            curves,
        });
    };
    for (index, name) in record.samples.tiers.iter().enumerate() {
        let cap_bytes = record.tiers.iter().find(|tier| tier.name == *name).map_or(0, |tier| tier.cap_bytes);
        let class = CLASSES[index % CLASSES.len()];
        let fill = |point: &Sample| point.tiers.get(index).copied().unwrap_or_default();
        let note = if cap_bytes > 0 { format!("of {}", bytes(cap_bytes)) } else { String::new() };
        let limit = (cap_bytes > 0).then_some((cap_bytes as f64, "capacity"));
        let curves = vec![
            curve("in use", class, true, of(&|point| fill(point).used_bytes)),
            curve("not in the store yet", "ink", false, of(&|point| fill(point).dirty_bytes)),
        ];
        show(format!("tier-{index}"), format!("Tier {name}"), note, Unit::Bytes, limit, curves);
    }
    let queue = vec![curve("bytes", "c3", true, of(&|point| point.queue_bytes))];
    show(
        "queue-bytes".into(),
        "Waiting for the store".into(),
        "bytes in the drain's queue".into(),
        Unit::Bytes,
        None,
        queue,
    );
    let entries = vec![curve("entries", "c3", true, of(&|point| point.queue_operations))];
    show(
        "queue-entries".into(),
        "Waiting for the store".into(),
        "files, renames, deletes in the drain's queue".into(),
        Unit::Count,
        None,
        entries,
    );
    let traffic = vec![
        curve("to the store", "c0", true, rates(points, |point| point.drained_bytes)),
        curve("from the store", "c1", false, rates(points, |point| point.fetched_bytes)),
    ];
    show(
        "traffic".into(),
        "Traffic with the store".into(),
        "between one sample and the next".into(),
        Unit::BytesPerSecond,
        None,
        traffic,
    );
    out += "</div>\n";
    if gaps {
        out += "<p class=\"note\">A curve is broken where no sample was taken for a while.</p>\n";
    }
    out
}

/// Growth per second between samples, drawn as steps: the time of the growth in between is unknown.
fn rates(points: &[Sample], value: fn(&Sample) -> u64) -> Vec<(f64, f64)> {
    points
        .windows(2)
        .flat_map(|two| {
            let elapsed_us = two[1].at_us.saturating_sub(two[0].at_us).max(1);
            let rate = value(&two[1]).saturating_sub(value(&two[0])) as f64 * 1e6 / elapsed_us as f64;
            [(two[0].at_us as f64, rate), (two[1].at_us as f64, rate)]
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_is_growth_over_time() {
        let at = |at_us, drained_bytes| Sample { at_us, drained_bytes, ..Sample::default() };
        let rates =
            rates(&[at(0, 0), at(500_000, 100), at(500_000, 100), at(1_500_000, 100)], |point| point.drained_bytes);
        let values: Vec<f64> = rates.iter().map(|(_, rate)| *rate).collect();
        assert_eq!(values, [200.0, 200.0, 0.0, 0.0, 0.0, 0.0]);
    }
}
