//! Texts that end an answer.

/// Looks for them in a stream. What may be the beginning of one is held back until it is known.
#[derive(Debug, Clone, Default)]
pub struct Stops {
    all: Vec<String>,
    held: String,
}

impl Stops {
    pub fn new(all: &[String]) -> Self {
        Self { all: all.iter().filter(|stop| !stop.is_empty()).cloned().collect(), held: String::new() }
    }

    /// More of the stream: what of it is known to come before an end, and whether there was one.
    pub fn push(&mut self, text: &str) -> (String, bool) {
        self.held.push_str(text);
        let first = self.all.iter().filter_map(|stop| self.held.find(stop)).min();
        if let Some(end) = first {
            self.held.truncate(end);
            return (std::mem::take(&mut self.held), true);
        }
        let keep = self.all.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// What was held back, where the stream ended without.
    pub fn rest(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Bytes at the end of a text that `what` begins with, and goes on after.
pub fn overlap(text: &str, what: &str) -> usize {
    let most = text.len().min(what.len().saturating_sub(1));
    (1..=most).rev().find(|&n| what.is_char_boundary(n) && text.ends_with(&what[..n])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn streamed(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let stops: Vec<String> = stops.iter().map(|stop| (*stop).into()).collect();
        let (mut stops, mut all) = (Stops::new(&stops), String::new());
        for piece in pieces {
            let (text, stopped) = stops.push(piece);
            all += &text;
            if stopped {
                return (all, true);
            }
        }
        (all + &stops.rest(), false)
    }

    #[test]
    fn an_end_is_found_wherever_the_pieces_part() {
        let text = "one \u{e9}nd two END three";
        for at in (0..=text.len()).filter(|&at| text.is_char_boundary(at)) {
            let (a, b) = text.split_at(at);
            assert_eq!(streamed(&["END", "nope"], &[a, b]), ("one \u{e9}nd two ".into(), true), "{at}");
            assert_eq!(streamed(&["three", "\u{e9}nd"], &[a, b]), ("one ".into(), true), "{at}");
            assert_eq!(streamed(&["ENDE", "reed"], &[a, b]), (text.into(), false), "{at}");
            assert_eq!(streamed(&["", "x"], &[a, b]), (text.into(), false), "{at}");
        }
        // The first beginning of `aab` leads nowhere, the second does.
        assert_eq!(streamed(&["aab"], &["xa", "a", "a", "b"]), ("xa".into(), true));
        assert_eq!(streamed(&[], &["a", "b"]), ("ab".into(), false));
    }
}
