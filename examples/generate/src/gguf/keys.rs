//! The metadata of a GGUF file. Each error names the key, its value and what it must be.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};

use candle_core::quantized::gguf_file::Value;

use crate::fields::short;

#[derive(Default)]
pub struct Keys {
    all: HashMap<String, Value>,
    /// Keys that were looked for.
    read: RefCell<BTreeSet<String>>,
}

impl Keys {
    pub fn new(all: HashMap<String, Value>) -> Self {
        Self { all, read: RefCell::default() }
    }

    pub fn has(&self, name: &str) -> bool {
        self.all.contains_key(name)
    }

    /// A number of things.
    pub fn size(&self, name: &str) -> Result<Option<usize>, String> {
        let whole = |value: &Value| match *value {
            Value::U8(x) => Some(u64::from(x)),
            Value::U16(x) => Some(x.into()),
            Value::U32(x) => Some(x.into()),
            Value::U64(x) => Some(x),
            Value::I8(x) => x.try_into().ok(),
            Value::I16(x) => x.try_into().ok(),
            Value::I32(x) => x.try_into().ok(),
            Value::I64(x) => x.try_into().ok(),
            _ => None,
        };
        self.one(name, "a whole number", |value| usize::try_from(whole(value)?).ok())
    }

    /// # Errors
    /// One that names the key where it is missing too.
    pub fn needed(&self, name: &str) -> Result<usize, String> {
        self.size(name)?.ok_or_else(|| missing(name))
    }

    /// A number, which f32 holds.
    pub fn number(&self, name: &str) -> Result<Option<f64>, String> {
        let number = |value: &Value| match value {
            Value::F32(x) => Some(decimal(*x)),
            Value::F64(x) => Some(*x),
            Value::U32(x) => Some((*x).into()),
            Value::I32(x) => Some((*x).into()),
            _ => None,
        };
        self.one(name, "a number", |value| number(value).filter(|x| (*x as f32).is_finite()))
    }

    pub fn flag(&self, name: &str) -> Result<Option<bool>, String> {
        self.one(name, "true or false", |value| value.to_bool().ok())
    }

    pub fn text(&self, name: &str) -> Result<Option<&str>, String> {
        self.one(name, "a string", |value| Some(value.to_string().ok()?.as_str()))
    }

    pub fn strings(&self, name: &str) -> Result<Option<Vec<&str>>, String> {
        let text = |value| -> Option<&str> { Value::to_string(value).ok().map(String::as_str) };
        self.one(name, "a list of strings", |value| value.to_vec().ok()?.iter().map(text).collect())
    }

    /// A list of small whole numbers.
    pub fn kinds(&self, name: &str) -> Result<Option<Vec<u64>>, String> {
        let kind = |value: &Value| match *value {
            Value::I32(x) => x.try_into().ok(),
            Value::U32(x) => Some(x.into()),
            Value::U8(x) => Some(x.into()),
            _ => None,
        };
        self.one(name, "a list of whole numbers", |value| value.to_vec().ok()?.iter().map(kind).collect())
    }

    /// A list of f32.
    pub fn scores(&self, name: &str) -> Result<Option<Vec<f32>>, String> {
        let score = |value: &Value| value.to_f32().ok();
        self.one(name, "a list of f32", |value| value.to_vec().ok()?.iter().map(score).collect())
    }

    /// The keys that begin so, and that nothing looked for.
    pub fn left(&self, prefix: &str) -> Vec<&str> {
        let read = self.read.borrow();
        let left = |name: &&str| name.starts_with(prefix) && !read.contains(*name);
        let mut all: Vec<&str> = self.all.keys().map(String::as_str).filter(left).collect();
        all.sort_unstable();
        all
    }

    fn one<'a, T>(
        &'a self,
        name: &str,
        must: &str,
        of: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, String> {
        self.read.borrow_mut().insert(name.into());
        let Some(value) = self.all.get(name) else { return Ok(None) };
        let shown = || match value {
            Value::String(text) => format!("{text:?}"),
            other => format!("{other:?}"),
        };
        of(value).map(Some).ok_or_else(|| format!("{name} {}: must be {must}", short(&shown())))
    }
}

/// The number that the shortest decimal of an f32 writes, as whoever wrote it meant 0.0707 and not the f32 next to it.
pub fn decimal(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(x.into())
}

/// The error of a key that is missing.
pub fn missing(name: &str) -> String {
    format!("{name}: missing; download the file again, or one that a newer llama.cpp made")
}
