//! The run's text as text of the page, and quantities in cells that can be sorted.

use surgetank_core::report::PathText;

/// Escapes text from outside, so that it cannot be markup, end an attribute, or reverse the line's direction.
pub fn shown(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    // (Control characters are written out there.)
    for c in PathText(text.as_bytes().to_vec()).to_string().chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' => {
                out += &c.escape_default().to_string();
            }
            _ => out.push(c),
        }
    }
    out
}

/// A number's cell: `text` for people, `value` for sorting.
pub fn number(value: u64, text: &str) -> String {
    let class = if value == 0 { "n zero" } else { "n" };
    format!("<td class=\"{class}\" data-v=\"{value}\">{}</td>", shown(text))
}

pub fn word(text: &str) -> String {
    format!("<td>{}</td>", shown(text))
}

/// `2026-11-24 22:05:13 UTC`
pub fn utc(unix_us: i64) -> String {
    let seconds = unix_us.div_euclid(1_000_000);
    let (days, in_day) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    // Days since 1 March of year 0, in eras of 400 years.
    let shifted = days + 719_468;
    let (era, of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = era * 400 + year_of_era + i64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02} UTC", in_day / 3600, in_day / 60 % 60, in_day % 60)
}

/// A table whose columns can be sorted. `columns`: heading, and whether it has numbers. Empty without rows.
pub fn table(id: &str, columns: &[(&str, bool)], rows: &[String]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let head: String = columns
        .iter()
        .map(|(name, number)| format!("<th scope=\"col\"{}>{name}</th>", if *number { " class=\"n\"" } else { "" }))
        .collect();
    let rows: String = rows.iter().map(|row| format!("<tr>{row}</tr>\n")).collect();
    format!(
        "<div class=\"scroll\"><table id=\"{id}\"><thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table></div>\n"
    )
}

/// A part of the page under its heading. Empty if there is no content.
pub fn section(id: &str, title: &str, content: &str) -> String {
    if content.is_empty() {
        String::new()
    } else {
        format!("<section id=\"{id}\">\n<h2>{title}</h2>\n{content}</section>\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_name_stays_text() {
        assert_eq!(
            shown("<script>alert('x')</script>&\""),
            "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;&amp;&quot;"
        );
        assert_eq!(shown("a\u{202e}b\u{0}\n\u{1b}[2J"), "a\\u{202e}b\\u{0}\\n\\u{1b}[2J");
        assert_eq!(shown(&PathText(vec![b'x', 0xff]).to_string()), "x\u{fffd}");
    }

    #[test]
    fn timestamp_is_a_date() {
        assert_eq!(utc(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(utc(1_709_210_096_999_999), "2024-02-29 12:34:56 UTC");
        assert_eq!(utc(-1), "1969-12-31 23:59:59 UTC");
    }
}
