//! The keys of `rope_scaling` and `rope_parameters`. A key that nothing reads is an error: without YaRN, or with half of it, a model
//! still writes text.

use serde_json::Value;

use crate::fields::Fields;

/// The objects of a config that say how RoPE is extended. They have the same keys.
pub const OBJECTS: [&str; 2] = ["rope_scaling", "rope_parameters"];

/// Keys of every `rope_type`.
const PLAIN: [&str; 7] = [
    "rope_type",
    "type",
    "rope_theta",
    // Mistral's configs and what vLLM and SGLang add: read to be compared with the only value that is served.
    "max_position_embeddings",
    "partial_rotary_factor",
    "apply_yarn_scaling",
    "llama_4_scaling_beta",
];

/// Keys that only YaRN reads, but for those of LongRoPE.
const YARN: [&str; 8] = [
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "truncate",
];

/// Keys that LongRoPE reads.
const LONG: [&str; 5] =
    ["short_factor", "long_factor", "factor", "original_max_position_embeddings", "attention_factor"];

/// The config's own fields about RoPE.
const OUTER: [&str; 4] = ["rope_theta", "rope_interleave", OBJECTS[0], OBJECTS[1]];

/// Which formula an object asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Plain,
    /// The formula of transformers.
    Yarn,
    /// `deepseek_yarn`, as vLLM and SGLang write it: as DeepSeek's own code computes it.
    DeepSeekYarn,
    LongRope,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Plain => "default",
            Self::Yarn | Self::DeepSeekYarn => "yarn",
            Self::LongRope => "longrope",
        }
    }

    fn reads(self, key: &str) -> bool {
        let own: &[&str] = match self {
            Self::Plain => &[],
            Self::Yarn | Self::DeepSeekYarn => &YARN,
            Self::LongRope => &LONG,
        };
        PLAIN.contains(&key) || own.contains(&key)
    }
}

/// `rope_type`, or `type` as it was called; a config that transformers saved again has both.
///
/// # Errors
/// A type that is not served, and two that differ.
pub fn kind(fields: &Fields<'_>) -> Result<Kind, String> {
    let (new, old) = (fields.text("rope_type")?, fields.text("type")?);
    let kind = |name: &str| match name {
        "default" => Ok(Kind::Plain),
        "yarn" => Ok(Kind::Yarn),
        "deepseek_yarn" => Ok(Kind::DeepSeekYarn),
        "longrope" => Ok(Kind::LongRope),
        other => Err(format!(
            "rope_type {other}: must be default or yarn, or deepseek_yarn, its form in vLLM, or longrope"
        )),
    };
    let (Some(new), Some(old)) = (new, old) else { return kind(new.or(old).unwrap_or("default")) };
    match (kind(new)?, kind(old)?) {
        (a, b) if a == b => Ok(a),
        // vLLM renames one of the two.
        (Kind::DeepSeekYarn, Kind::Yarn) | (Kind::Yarn, Kind::DeepSeekYarn) => Ok(Kind::DeepSeekYarn),
        _ => Err(format!("rope_type {new} and type {old}: must be the same; delete the wrong one")),
    }
}

/// Checks that every key of the object is known, and that something reads it for this type of RoPE. A key that is `null` counts as absent.
///
/// # Errors
/// One that names the key, the object, and the cure.
pub fn check(object: &str, fields: &Fields<'_>, kind: Kind) -> Result<(), String> {
    let given = || fields.0.iter().filter(|(_, value)| !value.is_null());
    let is_known = |key: &str| Kind::Yarn.reads(key) || Kind::LongRope.reads(key);
    if let Some((key, value)) = given().find(|(key, _)| !is_known(key)) {
        let key = shown(key);
        return Err(match value {
            Value::Object(_) => format!(
                "{object} has an object {key}: RoPE by kind of layer is not served, since all layers are of one kind here; move its fields into {object} itself"
            ),
            _ => {
                let known =
                    PLAIN.iter().chain(&YARN).chain(&LONG[..2]).copied().collect::<Vec<_>>().join(", ");
                format!("{object} has {key}, which is not known: correct or delete it; known are {known}")
            }
        });
    }
    match given().find(|(key, _)| !kind.reads(key)) {
        Some((key, _)) => {
            let typed = given().any(|(key, _)| key == "rope_type" || key == "type");
            let why = if typed { format!("its rope_type is {}", kind.name()) } else { "no rope_type".into() };
            let (of, name) = match Kind::Yarn.reads(key) {
                true => (Kind::Yarn, "YaRN"),
                false => (Kind::LongRope, "LongRoPE"),
            };
            Err(format!(
                "{object} has {key}, but {why}: give \"rope_type\": \"{}\", or delete {key} for RoPE without {name}",
                of.name()
            ))
        }
        None => Ok(()),
    }
}

/// Checks that the config itself has no field about RoPE that nothing reads, such as `rope_type` outside of its object.
///
/// # Errors
/// One that names the field.
pub fn check_outer(config: &Fields<'_>) -> Result<(), String> {
    let about_rope = |key: &str| key.starts_with("rope_") || YARN[2..6].contains(&key);
    let odd = config
        .0
        .iter()
        .find(|(key, value)| !value.is_null() && about_rope(key) && !OUTER.contains(&key.as_str()));
    let Some((key, _)) = odd else { return Ok(()) };
    let (key, objects) = (shown(key), OBJECTS.join(" or "));
    Err(format!("{key}: not a field that is known outside of {objects}; move it there, or delete it"))
}

/// A config may come from anywhere: no more of a key than anyone reads.
fn shown(key: &str) -> String {
    key.chars().take(60).collect()
}
