//! What a model reasons before it answers.

use crate::stops::overlap;

/// The tags around it, in the models that have any.
const TAGS: [(&str, &str); 2] = [("<think>", "</think>"), ("[THINK]", "[/THINK]")];

/// Leaves it out of a stream.
#[derive(Debug, Clone, Default)]
pub struct Thinking {
    /// What ends it, while it lasts.
    until: Option<&'static str>,
    held: String,
    /// Whether the answer has not begun yet, so that empty lines before it are left out too.
    is_before: bool,
}

impl Thinking {
    /// `prompt`: the text that the stream continues. Templates may begin the reasoning in it.
    pub fn after(prompt: &str) -> Self {
        let open = TAGS.iter().find(|(open, _)| prompt.trim_end().ends_with(open));
        Self { until: open.map(|(_, close)| *close), held: String::new(), is_before: true }
    }

    /// More of the stream: what of it is not reasoning. What may be the beginning of a tag is held back.
    pub fn push(&mut self, text: &str) -> String {
        self.held.push_str(text);
        let mut out = String::new();
        loop {
            let found = match self.until {
                Some(close) => self.held.find(close).map(|at| (at, close, None)),
                None => {
                    let open = |(open, close)| Some((self.held.find(open)?, open, Some(close)));
                    TAGS.into_iter().filter_map(open).min_by_key(|(at, ..)| *at)
                }
            };
            let Some((at, tag, until)) = found else { break };
            self.take(at, &mut out);
            self.held.drain(..tag.len());
            (self.until, self.is_before) = (until, true);
        }
        let tags: Vec<&str> = match self.until {
            Some(close) => vec![close],
            None => TAGS.map(|(open, _)| open).into(),
        };
        let keep = tags.into_iter().map(|tag| overlap(&self.held, tag)).max().unwrap_or(0);
        self.take(self.held.len() - keep, &mut out);
        out
    }

    /// What was held back, where the stream ended.
    pub fn rest(&mut self) -> String {
        let mut out = String::new();
        self.take(self.held.len(), &mut out);
        out
    }

    fn take(&mut self, bytes: usize, out: &mut String) {
        let text: String = self.held.drain(..bytes).collect();
        if self.until.is_some() {
            return;
        }
        let text = if self.is_before { text.trim_start() } else { &text };
        self.is_before &= text.is_empty();
        out.push_str(text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasoning_is_left_out_wherever_the_pieces_part() {
        for (prompt, text, want) in [
            ("", "<think>a < b</think>\n\nYes, 1 < 2.", "Yes, 1 < 2."),
            ("<|assistant|><think>\n", "a <b></think>Yes\n[THINK]b[/THINK]\n no", "Yes\nno"),
            ("<think></think>", "Plain [THIN <thinker>", "Plain [THIN <thinker>"),
            ("", "[THINK]never done </think>", ""),
        ] {
            for at in 0..=text.len() {
                let (mut thinking, (a, b)) = (Thinking::after(prompt), text.split_at(at));
                let got = thinking.push(a) + &thinking.push(b) + &thinking.rest();
                assert_eq!(got, want, "{text} at {at}");
            }
        }
    }
}
