//! Curves over time: axes with round numbers and units. Text keeps its size for every width of the page.
//!
//! Horizontal positions are percentages, vertical ones pixels; only the curves are in a stretched box.

use std::fmt::Write as _;

use super::markup::shown;
use crate::verbs::words::{bytes, count};

pub const HEIGHT: f64 = 150.0;
/// The width of the curves' box in its own units, for every width on the page.
const WIDE: f64 = 1000.0;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    Bytes,
    BytesPerSecond,
    Count,
}

pub struct Curve {
    pub name: String,
    /// A class of the style sheet: `c0` …
    pub class: &'static str,
    /// Filled down to the axis; other curves are dashed lines.
    pub filled: bool,
    /// Moment in µs, value.
    pub points: Vec<(f64, f64)>,
}

pub struct Chart<'a> {
    pub id: String,
    pub title: String,
    pub note: String,
    pub unit: Unit,
    pub end_us: f64,
    /// Between points that are farther apart nothing is drawn: the values there are unknown.
    pub gap_us: f64,
    /// When the command ended.
    pub mark_us: Option<f64>,
    /// Shown as a line if it is not far above the curves.
    pub limit: Option<(f64, &'a str)>,
    pub curves: Vec<Curve>,
}

/// The smallest round step with which at most `most` steps cover `reach`.
pub fn round_step(reach: f64, most: f64, unit: Unit) -> f64 {
    if reach <= 0.0 {
        return 1.0;
    }
    let base: f64 = if unit == Unit::Count { 1.0 } else { 1024_f64.powf((reach / most).max(1.0).log(1024.0).floor()) };
    let mut decade = if unit == Unit::Count { 1.0 } else { base };
    loop {
        for factor in [1.0, 2.0, 5.0] {
            if reach / (decade * factor) <= most {
                return decade * factor;
            }
        }
        // 1, 2, 5 … 500 of one unit, then of the next.
        decade = if unit != Unit::Count && decade / base >= 100.0 { base * 1024.0 } else { decade * 10.0 };
        if decade > f64::MAX / 100.0 {
            return decade;
        }
    }
}

/// Labels below an axis that ends at `end_us`.
pub fn moments(end_us: f64) -> Vec<(f64, String)> {
    const STEPS: [f64; 12] = [1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0];
    let end = (end_us / 1e6).max(1e-6);
    let mut step = 10_f64.powf((end / 5.0).log10().floor());
    step = [1.0, 2.0, 5.0, 10.0].iter().map(|factor| step * factor).find(|step| end / step <= 5.0).unwrap_or(end);
    if end > 5.0 {
        step = STEPS.into_iter().find(|step| end / step <= 5.0).unwrap_or((end / 5.0 / 3600.0).ceil() * 3600.0);
    }
    let mut found = Vec::new();
    let mut nth = 0.0;
    while nth * step <= end * 1.000_001 {
        let at = nth * step;
        let text = match end {
            _ if at == 0.0 => "0".to_owned(),
            ..0.005 => format!("{:.0} µs", at * 1e6),
            ..2.0 => format!("{:.0} ms", at * 1000.0),
            ..120.0 => format!("{} s", (at * 10.0).round() / 10.0),
            ..7200.0 if step % 60.0 == 0.0 => format!("{:.0} min", at / 60.0),
            ..7200.0 => format!("{:.0}:{:02.0} min", (at / 60.0).floor(), at % 60.0),
            _ if step % 3600.0 == 0.0 => format!("{:.0} h", at / 3600.0),
            _ => format!("{:.0}:{:02.0} h", (at / 3600.0).floor(), at % 3600.0 / 60.0),
        };
        found.push((100.0 * at / end, text));
        nth += 1.0;
    }
    found
}

/// The axis of time below the drawing: lines over the whole height, labels, and the end of the command.
pub fn time_axis(end_us: f64, mark_us: Option<f64>, height: f64) -> String {
    let mut out = String::new();
    for (percent, text) in moments(end_us) {
        let anchor = if percent < 4.0 {
            "start"
        } else if percent > 94.0 {
            "end"
        } else {
            "middle"
        };
        // Writing to a string cannot fail.
        let _ = write!(
            out,
            "<line class=\"grid\" x1=\"{percent:.2}%\" x2=\"{percent:.2}%\" y1=\"0\" y2=\"{height}\"/>\
             <text class=\"tick\" x=\"{percent:.2}%\" y=\"{}\" text-anchor=\"{anchor}\">{text}</text>",
            height + 16.0
        );
    }
    if let Some(mark) = mark_us.filter(|_| end_us > 0.0) {
        let percent = (100.0 * mark / end_us).clamp(0.0, 100.0);
        let _ = write!(
            out,
            "<line class=\"mark\" x1=\"{percent:.2}%\" x2=\"{percent:.2}%\" y1=\"0\" y2=\"{height}\"><title>the command ended</title></line>"
        );
    }
    out
}

fn value_text(value: f64, unit: Unit) -> String {
    let whole = value.round().max(0.0) as u64;
    match unit {
        Unit::Count => count(whole),
        _ => {
            let text = bytes(whole).replace(".00 ", " ");
            if unit == Unit::BytesPerSecond && whole > 0 { format!("{text}/s") } else { text }
        }
    }
}

/// The picture with its title and legend.
pub fn figure(chart: &Chart<'_>) -> String {
    let highest = chart.curves.iter().flat_map(|curve| &curve.points).fold(0.0_f64, |most, point| most.max(point.1));
    let limit = chart.limit.filter(|(limit, _)| *limit <= highest.max(1.0) * 2.5);
    let reach = limit.map_or(highest, |(limit, _)| highest.max(limit)).max(1.0);
    let step = round_step(reach, 4.0, chart.unit);
    let steps = (reach / step).ceil().max(1.0);
    let top = step * steps;
    let y = |value: f64| HEIGHT * (1.0 - value / top);
    let mut out = format!(
        "<figure class=\"chart\" id=\"{}\">\n<figcaption><b>{}</b> <span>{}</span></figcaption>\n",
        chart.id,
        shown(&chart.title),
        shown(&chart.note)
    );
    out += "<div class=\"plot\">";
    let _ = write!(out, "<svg class=\"yaxis\" height=\"{}\" aria-hidden=\"true\">", HEIGHT + 34.0);
    let mut lines = String::new();
    for nth in 0..=steps as u32 {
        let value = step * f64::from(nth);
        let at = y(value) + 10.0;
        let _ = write!(
            out,
            "<text class=\"tick\" x=\"100%\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            at + 4.0,
            value_text(value, chart.unit)
        );
        let _ = write!(
            lines,
            "<line class=\"grid\" x1=\"0\" x2=\"100%\" y1=\"{:.1}\" y2=\"{:.1}\"/>",
            at - 10.0,
            at - 10.0
        );
    }
    let _ = write!(
        out,
        "</svg><svg class=\"curves\" height=\"{}\" role=\"img\" aria-label=\"{}, at most {}\">",
        HEIGHT + 34.0,
        shown(&chart.title),
        value_text(highest, chart.unit)
    );
    let _ = write!(out, "<g transform=\"translate(0 10)\">{lines}{}", time_axis(chart.end_us, chart.mark_us, HEIGHT));
    let _ = write!(
        out,
        "<svg x=\"0\" y=\"0\" width=\"100%\" height=\"{HEIGHT}\" viewBox=\"0 0 {WIDE} {HEIGHT}\" preserveAspectRatio=\"none\">"
    );
    for curve in &chart.curves {
        let dashed = if curve.filled { "" } else { " dashed" };
        for stretch in curve.points.chunk_by(|before, after| after.0 - before.0 <= chart.gap_us) {
            let places: Vec<(f64, f64)> =
                stretch.iter().map(|(at, value)| (WIDE * at / chart.end_us.max(1.0), y(*value))).collect();
            let path: String = places.iter().map(|(x, y)| format!("{x:.1},{y:.1} ")).collect();
            if let (true, Some(first), Some(last)) = (curve.filled, places.first(), places.last()) {
                let _ = write!(
                    out,
                    "<polygon class=\"fill {}\" points=\"{:.1},{HEIGHT} {path}{:.1},{HEIGHT}\"/>",
                    curve.class, first.0, last.0
                );
            }
            let _ = write!(out, "<polyline class=\"line {}{dashed}\" points=\"{}\"/>", curve.class, path.trim_end());
        }
    }
    out += "</svg>";
    if let Some((limit, _)) = limit {
        let at = y(limit);
        let _ = write!(out, "<line class=\"limit\" x1=\"0\" x2=\"100%\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>");
    }
    out += "</g></svg></div>\n<ul class=\"legend\">";
    for curve in &chart.curves {
        let dashed = if curve.filled { "" } else { " dashed" };
        let _ = write!(
            out,
            "<li><svg width=\"22\" height=\"10\" aria-hidden=\"true\"><line class=\"line {}{dashed}\" x1=\"1\" x2=\"21\" y1=\"5\" y2=\"5\"/></svg>{}</li>",
            curve.class,
            shown(&curve.name)
        );
    }
    if let Some((_, name)) = limit {
        let _ = write!(
            out,
            "<li><svg width=\"22\" height=\"10\" aria-hidden=\"true\"><line class=\"limit\" x1=\"1\" x2=\"21\" y1=\"5\" y2=\"5\"/></svg>{name}</li>"
        );
    }
    if chart.mark_us.is_some() {
        out += "<li><svg width=\"22\" height=\"10\" aria-hidden=\"true\"><line class=\"mark\" x1=\"11\" x2=\"11\" y1=\"0\" y2=\"10\"/></svg>the command ended</li>";
    }
    out += "</ul></figure>\n";
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_round() {
        for (reach, step) in [
            (4096.0, 1024.0),
            (1_000_000.0, 500.0 * 1024.0),
            (700.0 * 1024.0 * 1024.0, 200.0 * 1024.0 * 1024.0),
            (3.0, 1.0),
            (0.0, 1.0),
        ] {
            assert_eq!(round_step(reach, 4.0, Unit::Bytes), step, "{reach}");
        }
        assert_eq!(round_step(9.0, 4.0, Unit::Count), 5.0);
        assert_eq!(round_step(1e12, 4.0, Unit::Count), 5e11);
    }

    #[test]
    fn axis_of_any_span_has_a_few_ticks() {
        for end_us in [1.0, 700.0, 90_000.0, 1.5e6, 4.9e6, 61e6, 600e6, 86_400e6, 1e13] {
            let moments = moments(end_us);
            assert!((1..=6).contains(&moments.len()), "{end_us}: {moments:?}");
            assert!(moments.iter().all(|(percent, _)| (0.0..=100.1).contains(percent)), "{moments:?}");
        }
        assert_eq!(moments(10e6).last().map(|(_, text)| text.as_str()), Some("10 s"));
        assert_eq!((moments(600e6)[1].1.as_str(), moments(130e6)[1].1.as_str()), ("2 min", "0:30 min"));
    }
}
