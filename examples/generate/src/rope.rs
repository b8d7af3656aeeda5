//! [`RopeFrequencies`] from the rotary fields of a config.

use wgpu_mla::{RopeFrequencies, Yarn};

use crate::fields::Fields;

/// How a model's rotary embedding turns.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    pub frequencies: RopeFrequencies,
    /// Pairs `(x0, x1), (x2, x3), ..`, as DeepSeek has them; otherwise `(x0, x[R/2]), ..`.
    pub interleaved: bool,
    /// `factor` and `m` of [`wgpu_mla::softmax_scale`].
    pub softmax_mscale: (f64, f64),
    /// Instead of the frequencies' own factor of cosines and sines.
    attention_factor: Option<f64>,
}

impl RopeConfig {
    /// From `rope_scaling`, as DeepSeek ships it, or else `rope_parameters`, as transformers 5 writes it; both have the same fields. For
    /// `R` rotary elements.
    pub(crate) fn parse(
        config: &Fields<'_>,
        interleaved: bool,
        rope_dim: u32,
        max_position: usize,
    ) -> Result<Self, String> {
        let none = serde_json::Map::new();
        let given = match config.object("rope_scaling")? {
            Some(fields) => Some(fields),
            None => config.object("rope_parameters")?,
        };
        let fields = given.unwrap_or(Fields(&none));
        let theta = fields.number("rope_theta")?.or(config.number("rope_theta")?).unwrap_or(10_000.0);
        let why = |error: wgpu_mla::Error| error.to_string();
        match rope_type(&fields)? {
            "default" => Ok(Self {
                frequencies: RopeFrequencies::plain(rope_dim, theta).map_err(why)?,
                interleaved,
                softmax_mscale: (1.0, 0.0),
                attention_factor: None,
            }),
            "yarn" => {
                let yarn = yarn(&fields, max_position)?;
                let attention_factor = fields.number("attention_factor")?;
                if let Some(factor) = attention_factor.filter(|&factor| factor <= 0.0) {
                    return Err(format!("attention_factor {factor}: must be more than 0"));
                }
                Ok(Self {
                    frequencies: RopeFrequencies::yarn(rope_dim, theta, &yarn).map_err(why)?,
                    interleaved,
                    softmax_mscale: (yarn.factor, yarn.mscale_all_dim),
                    attention_factor,
                })
            }
            other => Err(format!("rope_type {other}: must be default or yarn")),
        }
    }

    /// Cosines and sines of every position before `max_position`, as [`RopeFrequencies::cos_sin`] lays them out.
    ///
    /// # Errors
    /// [`wgpu_mla::Error::Shape`].
    pub fn cos_sin(&self, max_position: u32) -> wgpu_mla::Result<Vec<f32>> {
        let mut table = self.frequencies.cos_sin(max_position)?;
        if let Some(factor) = self.attention_factor {
            let by = (factor / self.frequencies.attention_factor()) as f32;
            table.iter_mut().for_each(|x| *x *= by);
        }
        Ok(table)
    }
}

/// `rope_type`, or `type` as it was called; a config that transformers saved again has both.
fn rope_type<'a>(fields: &Fields<'a>) -> Result<&'a str, String> {
    match (fields.text("rope_type")?, fields.text("type")?) {
        (Some(new), Some(old)) if new != old => {
            Err(format!("rope_type {new} and type {old}: must be the same; delete the wrong one"))
        }
        (new, old) => Ok(new.or(old).unwrap_or("default")),
    }
}

fn yarn(fields: &Fields<'_>, max_position: usize) -> Result<Yarn, String> {
    let max_position = max_position as f64;
    let original = fields.number("original_max_position_embeddings")?.unwrap_or(max_position);
    let plain = Yarn::new(fields.number("factor")?.unwrap_or(max_position / original), original);
    // As transformers: 0 is as if it were not there.
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
