//! Text to tokens and back.

use std::path::Path;

use tokenizers::Tokenizer;

use crate::{Error, Result};

/// A checkpoint's `tokenizer.json`.
pub struct Text(Tokenizer);

impl Text {
    /// # Errors
    /// [`Error::File`].
    pub fn open(dir: &Path) -> Result<Self> {
        let path = dir.join("tokenizer.json");
        if !path.exists() {
            return Err(Error::file(&path, "not there; download the checkpoint's tokenizer.json"));
        }
        let text = Tokenizer::from_file(&path);
        Ok(Self(text.map_err(|error| Error::file(&path, format!("{error}; download it again")))?))
    }

    /// # Errors
    /// [`Error::Input`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding =
            self.0.encode(text, true).map_err(|error| Error::Input(format!("tokenizer: {error}")))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// # Errors
    /// [`Error::Input`].
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        self.0.decode(tokens, true).map_err(|error| Error::Input(format!("tokenizer: {error}")))
    }

    /// Text as its tokens come, one stream a sequence: each call gives what a token completes, which for a part of a character is
    /// nothing.
    pub fn stream(&self) -> impl FnMut(u32) -> Result<String> + '_ {
        let mut stream = self.0.decode_stream(true);
        move |token| {
            let piece = stream.step(token).map_err(|error| Error::Input(format!("tokenizer: {error}")))?;
            Ok(piece.unwrap_or_default())
        }
    }
}
