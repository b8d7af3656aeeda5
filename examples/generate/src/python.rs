//! What templates that were written for Python expect of a value's text: `str`, `repr`, `json.dumps` and `strftime`.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::Value;
use minijinja::value::ValueKind;

/// `str(value)`, which is what `{{ value }}` writes.
pub fn text(value: &Value) -> String {
    match (value.kind(), value.as_str()) {
        (ValueKind::Undefined, _) => String::new(),
        (_, Some(text)) => text.into(),
        _ => repr(value),
    }
}

/// `repr(value)`.
fn repr(value: &Value) -> String {
    match value.kind() {
        ValueKind::String => quoted(value.as_str().unwrap_or_default()),
        ValueKind::None => "None".into(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.into(),
        ValueKind::Number => number(value),
        ValueKind::Map => {
            let entry = |(key, value): (Value, Value)| format!("{}: {}", repr(&key), repr(&value));
            format!("{{{}}}", entries(value).map(entry).collect::<Vec<_>>().join(", "))
        }
        ValueKind::Seq | ValueKind::Iterable => {
            format!("[{}]", items(value).map(|it| repr(&it)).collect::<Vec<_>>().join(", "))
        }
        _ => value.to_string(),
    }
}

fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == quote => out.extend(['\\', c]),
            c if c.is_control() => _ = write!(out, "\\x{:02x}", c as u32),
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

fn items(value: &Value) -> impl Iterator<Item = Value> {
    value.try_iter().into_iter().flatten()
}

fn entries(value: &Value) -> impl Iterator<Item = (Value, Value)> {
    items(value).map(|key| {
        let of_key = value.get_item(&key).unwrap_or_default();
        (key, of_key)
    })
}

/// `text.title()`: every letter that comes after none is a capital, all others are small.
pub fn title(text: &str) -> String {
    let (mut out, mut is_inside) = (String::with_capacity(text.len()), false);
    for c in text.chars() {
        match is_inside {
            true => out.extend(c.to_lowercase()),
            false => out.extend(c.to_uppercase()),
        }
        is_inside = c.is_alphabetic();
    }
    out
}

/// A whole number, or the shortest decimal that is this f64.
fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let Ok(number) = f64::try_from(value.clone()) else { return value.to_string() };
    let text = format!("{number:?}");
    match text.split_once('e') {
        None => text,
        Some((digits, exponent)) => {
            let (sign, exponent) = match exponent.strip_prefix('-') {
                Some(below) => ('-', below),
                None => ('+', exponent),
            };
            format!("{digits}e{sign}{exponent:0>2}")
        }
    }
}

/// The options of `json.dumps`.
#[derive(Debug, Clone)]
pub struct Json {
    pub ensure_ascii: bool,
    /// What a level is indented by; `None` for one line.
    pub indent: Option<String>,
    /// Between items, and between a key and its value.
    pub separators: (String, String),
    pub sort_keys: bool,
}

impl Json {
    /// # Errors
    /// A value that JSON cannot hold.
    pub fn dumps(&self, value: &Value) -> Result<String, String> {
        let mut out = String::new();
        self.write(value, 0, &mut out)?;
        Ok(out)
    }

    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), String> {
        match value.kind() {
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), out),
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value)),
            ValueKind::Map => {
                let mut all: Vec<_> = entries(value).collect();
                if self.sort_keys {
                    all.sort_by_key(|(key, _)| text(key));
                }
                self.nested('{', '}', all.len(), depth, out, |at, out| {
                    self.string(&text(&all[at].0), out);
                    out.push_str(&self.separators.1);
                    self.write(&all[at].1, depth + 1, out)
                })?;
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let all: Vec<_> = items(value).collect();
                self.nested('[', ']', all.len(), depth, out, |at, out| self.write(&all[at], depth + 1, out))?;
            }
            other => return Err(format!("tojson: {other} is nothing that JSON holds")),
        }
        Ok(())
    }

    fn nested(
        &self,
        open: char,
        close: char,
        count: usize,
        depth: usize,
        out: &mut String,
        mut item: impl FnMut(usize, &mut String) -> Result<(), String>,
    ) -> Result<(), String> {
        out.push(open);
        let line = |depth: usize, out: &mut String| {
            if let Some(indent) = &self.indent {
                out.push('\n');
                (0..depth).for_each(|_| out.push_str(indent));
            }
        };
        for at in 0..count {
            if at > 0 {
                out.push_str(&self.separators.0);
            }
            line(depth + 1, out);
            item(at, out)?;
        }
        if count > 0 {
            line(depth, out);
        }
        out.push(close);
        Ok(())
    }

    fn string(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if (c as u32) < 0x20 => _ = write!(out, "\\u{:04x}", c as u32),
                c if self.ensure_ascii && (c as u32) > 0x7e => {
                    for half in c.encode_utf16(&mut [0; 2]) {
                        _ = write!(out, "\\u{half:04x}");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// The time in UTC in a format of `strftime`.
pub fn strftime_now(format: &str) -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    strftime(since.as_secs(), format)
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

fn strftime(seconds: u64, format: &str) -> String {
    let (days, second) = (seconds / 86400, seconds % 86400);
    let weekday = DAYS[(days % 7) as usize];
    let (year, month, day) = date(days);
    let name = MONTHS[month - 1];
    let first = (1..month).map(|month| month_length(year, month)).sum::<u64>();
    let (hour, minute) = (second / 3600, second / 60 % 60);
    let mut out = String::new();
    let mut rest = format.chars();
    while let Some(c) = rest.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        _ = match rest.next() {
            Some('Y') => write!(out, "{year}"),
            Some('y') => write!(out, "{:02}", year % 100),
            Some('m') => write!(out, "{month:02}"),
            Some('B') => write!(out, "{name}"),
            Some('b' | 'h') => write!(out, "{}", &name[..3]),
            Some('d') => write!(out, "{day:02}"),
            Some('e') => write!(out, "{day:2}"),
            Some('j') => write!(out, "{:03}", first + day),
            Some('A') => write!(out, "{weekday}"),
            Some('a') => write!(out, "{}", &weekday[..3]),
            Some('H') => write!(out, "{hour:02}"),
            Some('I') => write!(out, "{:02}", (hour + 11) % 12 + 1),
            Some('p') => write!(out, "{}", if hour < 12 { "AM" } else { "PM" }),
            Some('M') => write!(out, "{minute:02}"),
            Some('S') => write!(out, "{:02}", second % 60),
            Some('F') => write!(out, "{year}-{month:02}-{day:02}"),
            Some('T') => write!(out, "{hour:02}:{minute:02}:{:02}", second % 60),
            Some('%') => write!(out, "%"),
            Some(other) => write!(out, "%{other}"),
            None => write!(out, "%"),
        };
    }
    out
}

/// Year, month and day of so many days after 1970 began.
fn date(mut days: u64) -> (u64, usize, u64) {
    let mut year = 1970;
    loop {
        let length = 365 + u64::from(is_leap(year));
        if days < length {
            break;
        }
        (days, year) = (days - length, year + 1);
    }
    let mut month = 1;
    while days >= month_length(year, month) {
        (days, month) = (days - month_length(year, month), month + 1);
    }
    (year, month, days + 1)
}

fn month_length(year: u64, month: usize) -> u64 {
    match month {
        2 => 28 + u64::from(is_leap(year)),
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        let all = "%Y-%m-%d %H:%M:%S %a %A %b %B %y %j %e %I%p %F %T %% %Q %";
        // What Python's datetime.fromtimestamp(.., timezone.utc) writes.
        assert_eq!(
            strftime(951_825_600, all),
            "2000-02-29 12:00:00 Tue Tuesday Feb February 00 060 29 12PM 2000-02-29 12:00:00 % %Q %"
        );
        assert_eq!(strftime(1_795_824_005, "%d %b %Y, %H:%M:%S, %A"), "28 Nov 2026, 00:00:05, Saturday");
        assert_eq!(strftime(0, "%F %A %I"), "1970-01-01 Thursday 12");
    }

    #[test]
    fn values_are_written_as_python_does() {
        let json = r#"{"a": [1, 2.5, 1e16, 0.00005, true, null], "it's": "x\"y", "b": {}}"#;
        let value: Value = serde_json::from_str(json).expect("a value");
        let want = r#"{'a': [1, 2.5, 1e+16, 5e-05, True, None], "it's": 'x"y', 'b': {}}"#;
        assert_eq!(text(&value), want);
        assert_eq!(text(&Value::from("plain")), "plain");
        assert_eq!(text(&Value::UNDEFINED), "");
    }
}
