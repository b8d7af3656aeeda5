//! Text to tokens and back.

use std::path::Path;

use tokenizers::Tokenizer;

use crate::guard::caught;
use crate::tokenizer_config::TokenizerConfig;
use crate::{Error, Result, files, sentencepiece, tiktoken};

/// A checkpoint's tokenizer.
pub struct Text {
    tokenizer: Tokenizer,
    /// Where `tokenizer_config.json` says it: the tokens before and after a text, instead of those of tokenizer.json.
    around: Option<[Option<u32>; 2]>,
    /// The token that `tokenizer_config.json` says ends a turn.
    pub eos: Option<u32>,
}

impl Text {
    /// `tokenizer.json`, or else `tiktoken.model` or SentencePiece's `tokenizer.model`; and `tokenizer_config.json` where it is there.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn open(dir: &Path) -> Result<Self> {
        let config = TokenizerConfig::open(dir)?;
        let [json, ranks, pieces] =
            ["tokenizer.json", "tiktoken.model", "tokenizer.model"].map(|name| dir.join(name));
        if !files::is_there(&json)? {
            let made = if files::is_there(&ranks)? {
                Some((&ranks, tiktoken::read(&files::read_text(&ranks, "download it again")?, &config)))
            } else if files::is_there(&pieces)? {
                let file = std::fs::read(&pieces).map_err(|error| Error::file(&pieces, error))?;
                Some((&pieces, sentencepiece::read(&file)))
            } else {
                None
            };
            if let Some((path, made)) = made {
                let made = made.map_err(|why| Error::file(path, why))?;
                return Ok(Self::load(path, &made.to_string())?.with(&config));
            }
        }
        let text = files::read_text(
            &json,
            "download the checkpoint's tokenizer.json, tiktoken.model or tokenizer.model",
        )?;
        Ok(Self::load(&json, &text)?.with(&config))
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
        let tokenizer = loaded.map_err(|why| Error::file(path, format!("{why}; download it again")))?;
        Ok(Self { tokenizer, around: None, eos: None })
    }

    /// With the flags and special tokens of a config. As in transformers, one flag that is given stands for both.
    fn with(mut self, config: &TokenizerConfig) -> Self {
        let id = |token: Option<&str>| token.and_then(|token| self.tokenizer.token_to_id(token));
        let (bos, eos) = (id(config.bos()), id(config.eos()));
        if config.add_bos.or(config.add_eos).is_some() {
            let given = |flag: Option<bool>, token| if flag == Some(true) { token } else { None };
            self.around = Some([given(config.add_bos, bos), given(config.add_eos, eos)]);
        }
        self.eos = eos;
        self
    }

    /// The tokens of a text, with those that are put around it. A text that begins with BOS itself gets no other.
    ///
    /// # Errors
    /// [`Error::Input`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let Some([bos, eos]) = self.around else {
            return Ok(checked(|| self.tokenizer.encode(text, true))?.get_ids().to_vec());
        };
        let mut tokens = self.encode_only(text)?;
        let Some(first) = tokens.first().copied() else { return Ok(tokens) };
        if let Some(bos) = bos.filter(|&bos| bos != first) {
            tokens.insert(0, bos);
        }
        tokens.extend(eos);
        Ok(tokens)
    }

    /// The tokens of a text alone, such as that of a chat template, which writes all special tokens itself.
    ///
    /// # Errors
    /// [`Error::Input`].
    pub fn encode_only(&self, text: &str) -> Result<Vec<u32>> {
        Ok(checked(|| self.tokenizer.encode(text, false))?.get_ids().to_vec())
    }

    /// Whether a text begins with a token that no other text becomes a part of: what comes before it does not change its tokens.
    pub fn begins_apart(&self, text: &str) -> bool {
        let added = self.tokenizer.get_added_tokens_decoder();
        added
            .values()
            .any(|token| !token.content.is_empty() && !token.lstrip && text.starts_with(&token.content))
    }

    /// # Errors
    /// [`Error::Input`].
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        checked(|| self.tokenizer.decode(tokens, true))
    }

    /// Decodes a stream of tokens, one stream a sequence. Each call gives the text that a token completes: nothing for a part of a
    /// character.
    pub fn stream(&self) -> impl FnMut(u32) -> Result<String> + '_ {
        let mut stream = self.tokenizer.decode_stream(true);
        move |token| Ok(checked(|| stream.step(token))?.unwrap_or_default())
    }
}

fn checked<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T> {
    let result = caught(call).and_then(|it| it.map_err(|error| error.to_string()));
    result.map_err(|why| Error::Input(format!("tokenizer: {why}; use the tokenizer.json of the checkpoint")))
}
