//! `tokenizer_config.json`: what is put around a text, and the chat template.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value};

use crate::fields::Fields;
use crate::{Error, Result, files};

/// Its fields that are read. Older checkpoints have the special tokens in `special_tokens_map.json`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TokenizerConfig {
    /// Whether a text begins with [`TokenizerConfig::bos`]. `None`: tokenizer.json decides, as it does where neither flag is given.
    pub add_bos: Option<bool>,
    pub add_eos: Option<bool>,
    /// `bos_token`, `eos_token` and the like, by these names: variables of a template.
    pub special: BTreeMap<String, String>,
    pub chat_template: Option<String>,
    /// The class that the tokens were made by, such as `PreTrainedTokenizerFast`.
    pub class: Option<String>,
    /// `added_tokens_decoder`: tokens by id, and whether each is special.
    pub added: BTreeMap<u32, (String, bool)>,
}

impl TokenizerConfig {
    /// Reads it in a directory that may have it. A GGUF file has the same in its metadata.
    ///
    /// # Errors
    /// [`Error::File`] that names the field and the cure.
    pub fn open(dir: &Path) -> Result<Self> {
        #[cfg(not(target_arch = "wasm32"))]
        if let Some(gguf) = crate::gguf::Gguf::of(dir)? {
            return gguf.tokenizer_config();
        }
        let mut config = Self::default();
        for name in ["special_tokens_map.json", "tokenizer_config.json"] {
            let path = dir.join(name);
            if files::is_there(&path)? {
                let text = files::read_text(&path, "download it again")?;
                let again = |why| Error::file(&path, format!("{why}; download it again, or delete it"));
                config.read(&text).map_err(again)?;
            }
        }
        Ok(config)
    }

    /// What a file says comes before what was known.
    fn read(&mut self, text: &str) -> Result<(), String> {
        let value: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let Value::Object(object) = &value else { return Err("must be an object of fields".into()) };
        let fields = Fields(object);
        let flag = |name: &str| match object.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(_) => fields.flag(name, false).map(Some),
        };
        self.add_bos = flag("add_bos_token")?.or(self.add_bos);
        self.add_eos = flag("add_eos_token")?.or(self.add_eos);
        self.class = fields.text("tokenizer_class")?.map(Into::into).or(self.class.take());
        for (name, value) in object.iter().filter(|(name, _)| name.ends_with("_token")) {
            if let Some(token) = content(value) {
                self.special.insert(name.clone(), token.into());
            }
        }
        let added = fields.object("added_tokens_decoder")?;
        for (id, value) in added.iter().flat_map(|added| added.0) {
            let token = id.parse().ok().zip(content(value));
            let (id, token) =
                token.ok_or(format!("added_tokens_decoder has {id}, which is no id of a token"))?;
            let is_special = value.get("special").and_then(Value::as_bool).unwrap_or(false);
            self.added.insert(id, (token.into(), is_special));
        }
        self.chat_template = template(object)?.or(self.chat_template.take());
        Ok(())
    }

    pub fn bos(&self) -> Option<&str> {
        self.special.get("bos_token").map(String::as_str)
    }

    pub fn eos(&self) -> Option<&str> {
        self.special.get("eos_token").map(String::as_str)
    }
}

/// A token is its text, or an object with it.
fn content(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}

/// One template, or a list of named ones, of which `default` is for chats.
fn template(object: &Map<String, Value>) -> Result<Option<String>, String> {
    match object.get("chat_template") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(Value::Array(named)) => {
            let default = named.iter().find(|one| one.get("name").and_then(Value::as_str) == Some("default"));
            let text = default.and_then(|one| one.get("template")).and_then(Value::as_str);
            text.map(|text| Some(text.into()))
                .ok_or("chat_template: none of the list is named default".into())
        }
        Some(_) => Err("chat_template: must be a text or a list of named ones".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_files_say_is_read() {
        let mut config = TokenizerConfig::default();
        config.read(r#"{"bos_token": "<s>", "unk_token": {"content": "<unk>"}}"#).expect("a map");
        let text = r#"{"add_bos_token": true, "add_eos_token": null, "bos_token": {"content": "<b>", "lstrip": false}, "pad_token": null,
            "chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}"#;
        config.read(text).expect("a config");
        assert_eq!((config.add_bos, config.add_eos, config.bos()), (Some(true), None, Some("<b>")));
        assert_eq!(config.chat_template.as_deref(), Some("d"));
        assert_eq!(config.special.keys().collect::<Vec<_>>(), ["bos_token", "unk_token"]);
        for (text, why) in [
            (r#"{"add_bos_token": 1}"#, "add_bos_token 1: must be true or false"),
            (r#"{"chat_template": [{"name": "rag", "template": "t"}]}"#, "none of the list is named default"),
            (r#"{"chat_template": 7}"#, "chat_template: must be a text"),
            ("[]", "must be an object"),
        ] {
            assert!(config.read(text).expect_err(text).contains(why));
        }
    }
}
