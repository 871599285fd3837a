//! Sizes and durations as users write them: `64M`, `1.5G`, `10GiB`, `100ms`, `2m`.
//!
//! Sizes are binary throughout (`1K` = 1024 bytes), because file systems and `df -h` count that way.
//!
//! The danger that it avoids: a number that silently means something else. A duration needs its unit (only `0` does not), and
//! nothing is rounded up past what fits.
use std::time::Duration;

const SIZE_UNITS: [(&str, u32); 6] = [("", 0), ("k", 10), ("m", 20), ("g", 30), ("t", 40), ("p", 50)];

/// Bytes of `64M`, `1.5G`, `10GiB`, `4096`, `1T`. The error names the text and the accepted forms, not its place.
pub fn size_bytes(text: &str) -> Result<u64, String> {
    let (number, unit) = split(text);
    let unit = unit.to_ascii_lowercase();
    let unit = unit.strip_suffix("ib").or_else(|| unit.strip_suffix('b')).unwrap_or(&unit);
    let refused = || format!("'{text}' is not a size; write for example 4096, 64M, 1.5G, 10GiB or 1T");
    let shift = SIZE_UNITS.iter().find(|(name, _)| *name == unit).map(|(_, shift)| *shift).ok_or_else(refused)?;
    scaled(number, 1u64 << shift).ok_or_else(refused)
}

/// A duration of `100ms`, `5s`, `2m`, `1.5h`, `2h30m`, `1d`, or `0`. The error names the text and the accepted forms, not its
/// place.
pub fn duration(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    let after_unit = text.find(|c: char| c.is_alphabetic()).and_then(|at| {
        let digit = text[at..].find(|c: char| c.is_ascii_digit())?;
        Some(at + digit)
    });
    let refused = || format!("'{text}' is not a duration; write for example 100ms, 5s, 2m or 1h30m");
    match after_unit {
        None => one_duration(text),
        Some(at) => {
            let rest = duration(&text[at..]).map_err(|_| refused())?;
            one_duration(&text[..at]).ok().and_then(|first| first.checked_add(rest)).ok_or_else(refused)
        }
    }
}

/// One number with its unit.
fn one_duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = split(text);
    let nanos_of_unit: u64 = match unit {
        "ns" => 1,
        "us" | "µs" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "m" | "min" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        "d" => 86_400_000_000_000,
        "" if number == "0" => 1,
        "" if !number.is_empty() => {
            return Err(format!("'{text}' has no unit; write for example {text}s or {text}ms"));
        }
        _ => {
            return Err(format!("'{text}' is not a duration; write for example 100ms, 5s, 2m or 1h"));
        }
    };
    scaled(number, nanos_of_unit)
        .map(Duration::from_nanos)
        .ok_or_else(|| format!("'{text}' is not a duration; write for example 100ms, 5s, 2m or 1h"))
}

/// A number of bytes for users, with a binary unit: `12 B`, `3.4 MiB`.
pub fn show_bytes(bytes: u64) -> String {
    let mut unit = 0;
    let mut value = bytes as f64;
    const NAMES: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    while value >= 1024.0 && unit + 1 < NAMES.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", NAMES[unit]) }
}

/// Splits `1.5GiB` into `1.5` and `GiB`.
fn split(text: &str) -> (&str, &str) {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.' && c != '_').unwrap_or(text.len());
    (&text[..end], text[end..].trim_start())
}

/// `1.5` × unit, exactly (without a float). `None` if the text is not a number or does not fit.
fn scaled(number: &str, unit: u64) -> Option<u64> {
    let number = number.replace('_', "");
    let (whole, fraction) = number.split_once('.').unwrap_or((&number, ""));
    if whole.is_empty() || fraction.len() > 9 || fraction.contains('.') || number.ends_with('.') {
        return None;
    }
    let mut total = u128::from(whole.parse::<u64>().ok()?) * u128::from(unit);
    if !fraction.is_empty() {
        let digits: u128 = fraction.parse().ok()?;
        total += digits * u128::from(unit) / 10u128.pow(fraction.len() as u32);
    }
    u64::try_from(total).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_bytes_of_each_form_is_exact_or_refused() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("64M", 64 << 20),
            ("64m", 64 << 20),
            ("64MB", 64 << 20),
            ("1.5G", 3 << 29),
            ("10GiB", 10 << 30),
            ("10 GiB", 10 << 30),
            ("1T", 1 << 40),
            ("2P", 2 << 50),
            ("1_000k", 1000 << 10),
            ("0.1K", 102),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(size_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "M", "-1", "1.", "1.2.3G", "1X", "1e9", "20000P", "18446744073709551616", "1 2", "٣"] {
            let error = size_bytes(text).expect_err(text);
            assert!(error.contains(text) && error.contains("64M"), "{error}");
        }
    }

    #[test]
    fn duration_of_each_form_is_exact_or_refused() {
        for (text, nanos) in [
            ("0", 0),
            ("100ms", 100_000_000),
            ("5s", 5_000_000_000),
            ("2m", 120_000_000_000),
            ("1.5h", 5_400_000_000_000),
            ("50us", 50_000),
            ("1d", 86_400_000_000_000),
            ("2h30m", 9_000_000_000_000),
            ("1h 0.5s", 3_600_500_000_000),
        ] {
            assert_eq!(duration(text), Ok(Duration::from_nanos(nanos)), "{text}");
        }
        assert!(duration("5").expect_err("unit").contains("5s"));
        for text in ["", "s", "5 parsecs", "1.s", "99999999999d", "2h30", "2h30x", "h3m"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn show_bytes_uses_binary_units() {
        assert_eq!(show_bytes(12), "12 B");
        assert_eq!(show_bytes(3 << 29), "1.5 GiB");
        assert_eq!(show_bytes(u64::MAX), "16.0 EiB");
    }
}
