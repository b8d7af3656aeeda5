//! Text to tokens and back.

use std::path::Path;

use tokenizers::Tokenizer;

use crate::guard::caught;
use crate::{Error, Result, files};

/// A checkpoint's `tokenizer.json`.
pub struct Text(Tokenizer);

impl Text {
    /// # Errors
    /// [`Error::File`].
    pub fn open(dir: &Path) -> Result<Self> {
        let path = dir.join("tokenizer.json");
        let text = files::read_text(&path, "download the checkpoint's tokenizer.json")?;
        Self::load(&path, &text)
    }

    /// The tokenizer from its file's text.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn parse(text: &str) -> Result<Self> {
        Self::load(Path::new("tokenizer.json"), text)
    }

    fn load(path: &Path, text: &str) -> Result<Self> {
        // `tokenizers` panics on some malformed files.
        let loaded =
            caught(|| text.parse::<Tokenizer>()).and_then(|it| it.map_err(|error| error.to_string()));
        Ok(Self(loaded.map_err(|why| Error::file(path, format!("{why}; download it again")))?))
    }

    /// # Errors
    /// [`Error::Input`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        Ok(checked(|| self.0.encode(text, true))?.get_ids().to_vec())
    }

    /// # Errors
    /// [`Error::Input`].
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        checked(|| self.0.decode(tokens, true))
    }

    /// Decodes a stream of tokens, one stream a sequence. Each call gives the text that a token completes: nothing for a part of a
    /// character.
    pub fn stream(&self) -> impl FnMut(u32) -> Result<String> + '_ {
        let mut stream = self.0.decode_stream(true);
        move |token| Ok(checked(|| stream.step(token))?.unwrap_or_default())
    }
}

fn checked<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T> {
    let result = caught(call).and_then(|it| it.map_err(|error| error.to_string()));
    result.map_err(|why| Error::Input(format!("tokenizer: {why}; use the tokenizer.json of the checkpoint")))
}
