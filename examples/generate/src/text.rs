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

/// The files of a tokenizer; the first that is there is taken.
const NAMES: [&str; 3] = ["tokenizer.json", "tiktoken.model", "tokenizer.model"];

impl Text {
    /// `tokenizer.json`, or else `tiktoken.model` or SentencePiece's `tokenizer.model`; and `tokenizer_config.json` where it is there. A
    /// GGUF file has all of it in its metadata.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn open(dir: &Path) -> Result<Self> {
        #[cfg(not(target_arch = "wasm32"))]
        if let Some(gguf) = crate::gguf::Gguf::of(dir)? {
            return Ok(Self::load(dir, &gguf.tokenizer()?.to_string())?.with(&gguf.tokenizer_config()?));
        }
        let config = TokenizerConfig::open(dir)?;
        let all = NAMES.map(|name| dir.join(name));
        let there =
            all.iter().map(|path| Ok(files::is_there(path)?.then_some(path))).collect::<Result<Vec<_>>>()?;
        Ok(Self::of_file(there.into_iter().flatten().next().unwrap_or(&all[0]), &config)?.with(&config))
    }

    /// The tokenizer is that of another file or directory, where it is given; what is put around a text is that of a GGUF file all the
    /// same.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn open_with(dir: &Path, given: Option<&Path>) -> Result<Self> {
        let Some(given) = given else { return Self::open(dir) };
        let (around, config) =
            (TokenizerConfig::open(dir)?, TokenizerConfig::open(given.parent().unwrap_or(given))?);
        match given.is_dir() {
            true => Ok(Self::open(given)?.with(&around)),
            false => Ok(Self::of_file(given, &config)?.with(&around)),
        }
    }

    fn of_file(path: &Path, config: &TokenizerConfig) -> Result<Self> {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let missing = "download the checkpoint's tokenizer.json, tiktoken.model or tokenizer.model";
        if !files::is_there(path)? {
            return Err(Error::file(path, format!("not there; {missing}")));
        }
        let made = match name {
            _ if name.ends_with(".json") => return Self::load(path, &files::read_text(path, missing)?),
            _ if name.ends_with("tiktoken.model") => {
                tiktoken::read(&files::read_text(path, missing)?, config)
            }
            _ if name.ends_with(".model") => {
                sentencepiece::read(&std::fs::read(path).map_err(|error| Error::file(path, error))?)
            }
            _ => Err(format!("no tokenizer by its name; name a {}", NAMES.join(", "))),
        };
        Self::load(path, &made.map_err(|why| Error::file(path, why))?.to_string())
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
