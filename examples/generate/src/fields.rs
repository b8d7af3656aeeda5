//! The fields of a JSON object. Each error names the field, its value and what it must be.

use serde_json::{Map, Value};

/// Larger sizes than any model has. Products of two fit 64 bits, and no allocation follows a size until a tensor has it.
const LARGEST: u64 = 1 << 24;

pub struct Fields<'a>(pub &'a Map<String, Value>);

impl<'a> Fields<'a> {
    /// A size of at least 1. `default` stands for an absent field.
    pub fn size(&self, name: &str, default: impl Into<Option<usize>>) -> Result<usize, String> {
        self.optional_size(name, default)?.ok_or_else(|| wrong(name, &Value::Null, &range(1)))
    }

    /// A size of at least 1, or `null`.
    pub fn optional_size(
        &self,
        name: &str,
        default: impl Into<Option<usize>>,
    ) -> Result<Option<usize>, String> {
        self.whole(name, default.into(), 1)
    }

    /// A number of things, which may be 0; `null` counts as 0.
    pub fn count(&self, name: &str, default: usize) -> Result<usize, String> {
        Ok(self.whole(name, Some(default), 0)?.unwrap_or(0))
    }

    fn whole(&self, name: &str, default: Option<usize>, least: u64) -> Result<Option<usize>, String> {
        match self.0.get(name) {
            None => Ok(default),
            Some(Value::Null) => Ok(None),
            Some(value) => match value.as_u64() {
                Some(number) if (least..=LARGEST).contains(&number) => Ok(Some(number as usize)),
                _ => Err(wrong(name, value, &range(least))),
            },
        }
    }

    /// A number that f32 holds. `None` where it is absent or `null`.
    pub fn number(&self, name: &str) -> Result<Option<f64>, String> {
        let Some(value) = self.given(name) else { return Ok(None) };
        let number = value.as_f64().filter(|&number| (number as f32).is_finite());
        number.map(Some).ok_or_else(|| wrong(name, value, "a number that f32 holds"))
    }

    /// `null` is false, as in Python.
    pub fn flag(&self, name: &str, default: bool) -> Result<bool, String> {
        match self.0.get(name) {
            None => Ok(default),
            Some(Value::Null) => Ok(false),
            Some(value) => value.as_bool().ok_or_else(|| wrong(name, value, "true or false")),
        }
    }

    /// `None` where it is absent or `null`.
    pub fn text(&self, name: &str) -> Result<Option<&'a str>, String> {
        let Some(value) = self.given(name) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| wrong(name, value, "a string"))
    }

    /// A list of strings; `None` where it is absent or `null`.
    pub fn strings(&self, name: &str) -> Result<Option<Vec<&'a str>>, String> {
        let Some(value) = self.given(name) else { return Ok(None) };
        let strings = value.as_array().and_then(|strings| strings.iter().map(Value::as_str).collect());
        strings.map(Some).ok_or_else(|| wrong(name, value, "a list of strings"))
    }

    /// A list of numbers that f32 holds; `None` where it is absent or `null`.
    pub fn numbers(&self, name: &str) -> Result<Option<Vec<f64>>, String> {
        let Some(value) = self.given(name) else { return Ok(None) };
        let number = |value: &Value| value.as_f64().filter(|&number| (number as f32).is_finite());
        let numbers = value.as_array().and_then(|numbers| numbers.iter().map(number).collect());
        numbers.map(Some).ok_or_else(|| wrong(name, value, "a list of numbers that f32 holds"))
    }

    /// `None` where it is absent, `null` or empty.
    pub fn object(&self, name: &str) -> Result<Option<Fields<'a>>, String> {
        let Some(value) = self.given(name) else { return Ok(None) };
        let object = value.as_object().ok_or_else(|| wrong(name, value, "an object"))?;
        Ok(Some(Fields(object)).filter(|fields| !fields.0.is_empty()))
    }

    /// Token ids: one, a list, or none for `null`.
    pub fn tokens(&self, name: &str, default: u32) -> Result<Vec<u32>, String> {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        match self.0.get(name) {
            None => Ok(vec![default]),
            Some(Value::Null) => Ok(Vec::new()),
            Some(value) => match value {
                Value::Array(ids) => ids.iter().map(id).collect(),
                one => id(one).map(|id| vec![id]),
            }
            .ok_or_else(|| wrong(name, value, "a token id or a list of them")),
        }
    }

    fn given(&self, name: &str) -> Option<&'a Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }
}

fn range(least: u64) -> String {
    format!("a whole number from {least} to {LARGEST}")
}

fn wrong(name: &str, value: &Value, must: &str) -> String {
    format!("{name} {}: must be {must}", short(&value.to_string()))
}

/// The beginning of a text, for an error.
pub fn short(text: &str) -> String {
    let mut shown: String = text.chars().take(60).collect();
    if shown.len() < text.len() {
        shown += "..";
    }
    shown
}
