//! The turns of a conversation as tokens.

use crate::{ChatTemplate, Message, Result, Text};

/// Turns, the text that a template makes of them, and its tokens.
pub struct Chat<'a> {
    text: &'a Text,
    template: &'a ChatTemplate,
    /// Whether the model is to reason before it answers, where its template asks.
    think: Option<bool>,
    messages: Vec<Message>,
    /// The text of the last prompt and its answer, and the tokens that these were.
    so_far: Option<(String, Vec<u32>)>,
    prompt: String,
}

impl<'a> Chat<'a> {
    pub fn new(
        text: &'a Text,
        template: &'a ChatTemplate,
        system: Option<&str>,
        think: Option<bool>,
    ) -> Self {
        let system = system.map(|content| Message { role: "system", content: content.into() });
        let messages = system.into_iter().collect();
        Self { text, template, think, messages, so_far: None, prompt: String::new() }
    }

    /// All tokens up to the answer of a question. Where the new text goes on from the last answer, that has the tokens that the model
    /// chose, and only what follows is split into tokens, so that the cache holds the rest: a template may also change earlier turns, and
    /// leave out what was reasoned.
    ///
    /// # Errors
    /// [`crate::Error::Input`] for turns that the template refuses; the question is then none.
    pub fn ask(&mut self, question: &str) -> Result<Vec<u32>> {
        self.messages.push(Message { role: "user", content: question.into() });
        let prompt = self.template.render(&self.messages, self.think);
        let tokens = prompt.and_then(|prompt| {
            self.prompt = prompt;
            let rest = self.so_far.take().and_then(|(so_far, tokens)| {
                let rest = self.prompt.strip_prefix(&so_far)?;
                self.text.begins_apart(rest).then_some((tokens, rest))
            });
            match rest {
                Some((mut tokens, rest)) => {
                    tokens.extend(self.text.encode_only(rest)?);
                    Ok(tokens)
                }
                None => self.text.encode_only(&self.prompt),
            }
        });
        if tokens.is_err() {
            self.messages.pop();
        }
        tokens
    }

    /// The text of the last question's prompt.
    #[must_use]
    pub fn prompt(&self) -> &str {
        &self.prompt
    }

    /// The answer to it: the tokens of its prompt and its own, and as much of its text as counts.
    ///
    /// # Errors
    /// [`crate::Error::Input`].
    pub fn answered(&mut self, prompt: Vec<u32>, answer: &[u32], content: String) -> Result<()> {
        let mut tokens = prompt;
        tokens.extend(answer);
        let is_whole = self.text.decode(answer)? == content;
        self.so_far = is_whole.then(|| (format!("{}{content}", self.prompt), tokens));
        self.messages.push(Message { role: "assistant", content });
        Ok(())
    }
}
