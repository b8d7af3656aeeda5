//! [`RopeFrequencies`] from the rotary fields of a config.

use wgpu_mla::{RopeFrequencies, Yarn};

use crate::fields::Fields;
use crate::long_rope::LongRope;
use crate::rope_keys::{self, Kind};

/// How a model's rotary embedding turns.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    pub frequencies: RopeFrequencies,
    /// Pairs `(x0, x1), (x2, x3), ..`, as DeepSeek has them; otherwise `(x0, x[R/2]), ..`.
    pub interleaved: bool,
    /// `factor` and `m` of [`wgpu_mla::softmax_scale`].
    pub softmax_mscale: (f64, f64),
    /// By how much queries grow with their position.
    pub query_scaling: Option<QueryScaling>,
    /// Instead of the frequencies' own factor of cosines and sines.
    attention_factor: Option<f64>,
    /// What the frequencies are divided by.
    long: Option<LongRope>,
}

/// Queries are multiplied by `1 + beta * ln(1 + floor(position / original))`, as in Llama 4.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueryScaling {
    pub beta: f64,
    pub original: f64,
}

impl QueryScaling {
    /// The factor of a position's query.
    #[must_use]
    pub fn of(&self, position: i32) -> f32 {
        (1.0 + self.beta * (f64::from(position) / self.original).floor().ln_1p()) as f32
    }
}

impl RopeConfig {
    /// From `rope_scaling`, as DeepSeek ships it, or `rope_parameters`, as transformers 5 writes it; both have the same fields. `default`
    /// has them where the config has neither. For `R` rotary elements.
    pub(crate) fn parse(
        config: &Fields<'_>,
        interleaved: bool,
        rope_dim: u32,
        max_position: usize,
        default: Option<&str>,
    ) -> Result<Self, String> {
        rope_keys::check_outer(config)?;
        let none = default.map(serde_json::from_str).transpose().map_err(|error| error.to_string())?;
        let none = none.unwrap_or_default();
        let own = Outer { config, interleaved, rope_dim, max_position };
        let [scaling, parameters] = rope_keys::OBJECTS;
        match (config.object(scaling)?, config.object(parameters)?) {
            (None, None) => own.rope(parameters, &Fields(&none)),
            (Some(fields), None) => own.rope(scaling, &fields),
            (None, Some(fields)) => own.rope(parameters, &fields),
            // transformers 5 would take `rope_scaling`, vLLM `rope_parameters`.
            (Some(old), Some(new)) => match (own.rope(scaling, &old)?, own.rope(parameters, &new)?) {
                (old, new) if old == new => Ok(new),
                _ => Err(format!(
                    "{scaling} and {parameters} differ in what they say: delete the one that is not the checkpoint's"
                )),
            },
        }
    }

    /// Cosines and sines of every position before `max_position`, as [`RopeFrequencies::cos_sin`] lays them out.
    ///
    /// # Errors
    /// [`wgpu_mla::Error::Shape`].
    pub fn cos_sin(&self, max_position: u32) -> wgpu_mla::Result<Vec<f32>> {
        let mut table = self.frequencies.cos_sin(max_position)?;
        if let Some(long) = &self.long {
            long.turn(&mut table, self.frequencies.inv_freq(), self.attention_factor.unwrap_or(1.0));
            return Ok(table);
        }
        if let Some(factor) = self.attention_factor {
            let by = (factor / self.frequencies.attention_factor()) as f32;
            table.iter_mut().for_each(|x| *x *= by);
        }
        Ok(table)
    }
}

/// What one object of rotary fields is read with.
struct Outer<'a> {
    config: &'a Fields<'a>,
    interleaved: bool,
    rope_dim: u32,
    max_position: usize,
}

impl Outer<'_> {
    fn rope(&self, object: &str, fields: &Fields<'_>) -> Result<RopeConfig, String> {
        let kind = rope_keys::kind(fields)?;
        rope_keys::check(object, fields, kind)?;
        self.check_what_is_served(object, fields)?;
        let theta = self.one_of(object, fields, "rope_theta")?.unwrap_or(10_000.0);
        let why = |error: wgpu_mla::Error| error.to_string();
        let rope_dim = self.rope_dim;
        let beta = fields.number("llama_4_scaling_beta")?.filter(|&beta| beta != 0.0);
        let scaling = |original| beta.map(|beta| QueryScaling { beta, original });
        let max_position = self.max_position as f64;
        let plain = RopeConfig {
            frequencies: RopeFrequencies::plain(rope_dim, theta).map_err(why)?,
            interleaved: self.interleaved,
            softmax_mscale: (1.0, 0.0),
            query_scaling: scaling(max_position),
            attention_factor: None,
            long: None,
        };
        if kind == Kind::Plain {
            return Ok(plain);
        }
        let original = self.original(object, fields)?.unwrap_or(max_position);
        if kind == Kind::LongRope {
            let (long, factor) = LongRope::parse(object, fields, rope_dim, original, max_position)?;
            let query_scaling = scaling(original);
            return Ok(RopeConfig {
                attention_factor: Some(factor),
                long: Some(long),
                query_scaling,
                ..plain
            });
        }
        let yarn = self.yarn(object, fields)?;
        let attention_factor = fields.number("attention_factor")?;
        if let Some(factor) = attention_factor.filter(|&factor| factor <= 0.0) {
            return Err(format!("attention_factor {factor}: must be more than 0"));
        }
        let attention_factor = match (attention_factor, kind) {
            (None, Kind::DeepSeekYarn) => {
                // Where both formulas give the same, the two types are equal.
                Some(deepseek_factor(fields, &yarn)?).filter(|&factor| factor != yarn.attention_factor())
            }
            (given, _) => given,
        };
        Ok(RopeConfig {
            frequencies: RopeFrequencies::yarn(rope_dim, theta, &yarn).map_err(why)?,
            softmax_mscale: (yarn.factor, yarn.mscale_all_dim),
            query_scaling: scaling(original),
            attention_factor,
            ..plain
        })
    }

    /// Keys of other models, which change nothing at the value that is served.
    fn check_what_is_served(&self, object: &str, fields: &Fields<'_>) -> Result<(), String> {
        let number = |name: &str| fields.number(name);
        if let Some(other) = fields.0.get("apply_yarn_scaling").filter(|it| !it.is_null() && **it != true) {
            return Err(format!("apply_yarn_scaling {other} of {object}: must be true"));
        }
        let most = self.max_position as f64;
        if let Some(other) = number("max_position_embeddings")?.filter(|&other| other != most) {
            return Err(format!(
                "max_position_embeddings {other} of {object} and {most} of the config: must be the same; delete the wrong one"
            ));
        }
        // The share is of a head's elements: R, as transformers counts for DeepSeek-V3, or P + R, as for Mistral Small 4.
        let rope = f64::from(self.rope_dim);
        let head = rope + self.config.size("qk_nope_head_dim", 128)? as f64;
        match number("partial_rotary_factor")?.filter(|&part| part != 1.0 && part * head != rope) {
            Some(part) => Err(format!(
                "partial_rotary_factor {part} of {object}: must be 1, as qk_rope_head_dim says what RoPE turns"
            )),
            None => Ok(()),
        }
    }

    /// A number of the object, or else of the config itself, as transformers reads it.
    fn one_of(&self, object: &str, fields: &Fields<'_>, name: &str) -> Result<Option<f64>, String> {
        match (fields.number(name)?, self.config.number(name)?) {
            (Some(inner), Some(outer)) if inner != outer => Err(format!(
                "{name} {inner} of {object} and {outer} of the config: must be the same; delete the wrong one"
            )),
            (inner, outer) => Ok(inner.or(outer)),
        }
    }

    /// The positions before RoPE was extended.
    fn original(&self, object: &str, fields: &Fields<'_>) -> Result<Option<f64>, String> {
        match self.one_of(object, fields, "original_max_position_embeddings")? {
            Some(original) if original <= 0.0 => {
                Err(format!("original_max_position_embeddings {original}: must be more than 0"))
            }
            original => Ok(original),
        }
    }

    fn yarn(&self, object: &str, fields: &Fields<'_>) -> Result<Yarn, String> {
        let max_position = self.max_position as f64;
        let original = self.original(object, fields)?;
        let (factor, named) = match (fields.number("factor")?, original) {
            (Some(factor), _) => (factor, format!("factor {factor}")),
            (None, Some(original)) => {
                let named = "max_position_embeddings / original_max_position_embeddings";
                (max_position / original, format!("{named} = {}", max_position / original))
            }
            (None, None) => return Err(format!("factor: missing in {object}, and YaRN needs it; give it")),
        };
        if factor < 1.0 {
            let what = "by how much YaRN extended the context";
            return Err(format!("{named} of {object}: must be at least 1, {what}"));
        }
        let plain = Yarn::new(factor, original.unwrap_or(max_position));
        // transformers takes 0 for a key that is absent.
        let given = |name: &str, default: f64| -> Result<f64, String> {
            Ok(fields.number(name)?.filter(|&value| value != 0.0).unwrap_or(default))
        };
        Ok(Yarn {
            beta_fast: given("beta_fast", plain.beta_fast)?,
            beta_slow: given("beta_slow", plain.beta_slow)?,
            mscale: fields.number("mscale")?.unwrap_or(0.0),
            mscale_all_dim: fields.number("mscale_all_dim")?.unwrap_or(0.0),
            truncate: fields.flag("truncate", true)?,
            ..plain
        })
    }
}

/// The factor of cosines and sines in DeepSeek's code, where `mscale` is 1 and `mscale_all_dim` 0 unless given. transformers' is another
/// where a config gives one of them, and not 1.
fn deepseek_factor(fields: &Fields<'_>, yarn: &Yarn) -> Result<f64, String> {
    let m = |x: f64| 0.1 * x * yarn.factor.ln() + 1.0;
    let factor = m(fields.number("mscale")?.unwrap_or(1.0)) / m(yarn.mscale_all_dim);
    match factor.is_finite() && factor > 0.0 {
        true => Ok(factor),
        false => Err(format!(
            "mscale and mscale_all_dim make an attention factor of {factor}: must be more than 0"
        )),
    }
}
