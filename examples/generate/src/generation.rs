//! `generation_config.json`: end tokens and sampling parameters that a model comes with.

use std::path::Path;

use serde_json::Value;

use crate::fields::Fields;
use crate::{Error, Result, files};

/// Its fields that are read. `None` where it has none.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Generation {
    /// Tokens that end a text, instead of those of config.json.
    pub eos: Option<Vec<u32>>,
    /// 0 where it says that tokens are not sampled.
    pub temperature: Option<f32>,
    pub top_k: Option<usize>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
}

impl Generation {
    /// Reads it in a directory that may have it.
    ///
    /// # Errors
    /// [`Error::File`] that names the field and the cure.
    pub fn open(dir: &Path) -> Result<Self> {
        let path = dir.join("generation_config.json");
        if !files::is_there(&path)? {
            return Ok(Self::default());
        }
        let text = files::read_text(&path, "download it again")?;
        Self::parse(&text)
            .map_err(|why| Error::file(&path, format!("{why}; download it again, or delete it")))
    }

    fn parse(text: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let Value::Object(fields) = &value else { return Err("must be an object of fields".into()) };
        let has_eos = fields.get("eos_token_id").is_some_and(|it| !it.is_null());
        let fields = Fields(fields);
        let number = |name: &str, least: f64, most: f64| match fields.number(name)? {
            Some(number) if !(least..=most).contains(&number) => {
                Err(format!("{name} {number}: must be from {least} to {most}"))
            }
            number => Ok(number.map(|number| number as f32)),
        };
        let is_sampled = fields.flag("do_sample", true)?;
        Ok(Self {
            eos: if has_eos { Some(fields.tokens("eos_token_id", 0)?) } else { None },
            temperature: if is_sampled { number("temperature", 0.0, 1e6)? } else { Some(0.0) },
            top_k: fields.0.contains_key("top_k").then(|| fields.count("top_k", 0)).transpose()?,
            top_p: number("top_p", 0.0, 1.0)?,
            min_p: number("min_p", 0.0, 1.0)?,
            repetition_penalty: number("repetition_penalty", 1e-3, 1e3)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_makers_advise_is_read() {
        // GLM-4.7-Flash's.
        let glm = r#"{"_from_model_config": true, "do_sample": true, "eos_token_id": [154820, 154827, 154829],
            "pad_token_id": 154820, "temperature": 1.0, "top_p": 0.95, "transformers_version": "5.0.0"}"#;
        let glm = Generation::parse(glm).expect("a config");
        assert_eq!(
            (glm.eos, glm.temperature, glm.top_p),
            (Some(vec![154_820, 154_827, 154_829]), Some(1.0), Some(0.95))
        );
        let greedy = r#"{"do_sample": false, "temperature": 0.7, "eos_token_id": null, "top_k": 50, "repetition_penalty": 1.05}"#;
        let greedy = Generation::parse(greedy).expect("a config");
        assert_eq!((greedy.eos, greedy.temperature, greedy.top_k), (None, Some(0.0), Some(50)));
        assert_eq!(Generation::parse("{}").expect("a config"), Generation::default());
        for (text, why) in [
            (r#"{"top_p": 1.5}"#, "top_p 1.5: must be from 0 to 1"),
            (r#"{"temperature": "hot"}"#, "temperature \"hot\": must be a number"),
            (r#"{"repetition_penalty": 0}"#, "repetition_penalty 0: must be from"),
            (r#"{"eos_token_id": [-1]}"#, "eos_token_id [-1]: must be a token id"),
            ("[]", "must be an object"),
        ] {
            let error = Generation::parse(text).expect_err(text);
            assert!(error.contains(why), "{error}");
        }
    }
}
