//! The rotary fields of a config: each is read or refused, since a model without its YaRN still writes text.

use generate::Config;
use serde_json::{Value, json};

/// A config of DeepSeek-V3's size with these fields besides.
fn with(fields: Value) -> generate::Result<Config> {
    let mut config = json!({"model_type": "deepseek_v3", "max_position_embeddings": 163_840});
    let (all, more) = (config.as_object_mut().expect("an object"), fields.as_object().expect("an object"));
    all.extend(more.clone());
    Config::from_json(&config.to_string())
}

fn rope(fields: Value) -> generate::RopeConfig {
    let text = fields.to_string();
    with(fields).unwrap_or_else(|error| panic!("{text}: {error}")).rope
}

fn must_refuse(fields: Value, all: &[&str]) {
    let text = fields.to_string();
    let error = with(fields).err().unwrap_or_else(|| panic!("taken: {text}")).to_string();
    for words in all {
        assert!(error.contains(words), "{text}: {error}\nlacks: {words}");
    }
}

/// DeepSeek-V3's.
fn v3() -> Value {
    json!({"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn"})
}

fn v3_with(key: &str, value: Value) -> Value {
    let mut object = v3();
    object[key] = value;
    object
}

fn v3_without(key: &str) -> Value {
    let mut object = v3();
    object.as_object_mut().expect("an object").remove(key);
    object
}

#[test]
fn yarn_without_a_type_is_refused() {
    for object in ["rope_scaling", "rope_parameters"] {
        must_refuse(
            json!({object: v3_without("type")}),
            &[object, "no rope_type", r#"give "rope_type": "yarn""#],
        );
        for (key, value) in [("factor", json!(40)), ("mscale", json!(1.0)), ("attention_factor", json!(1.1))]
        {
            let cure = format!("{object} has {key}, but ");
            must_refuse(json!({object: {key: value}}), &[&cure, "no rope_type"]);
            let typed = json!({object: {key: value, "rope_type": "default"}});
            must_refuse(typed, &[&cure, "its rope_type is default", "or delete"]);
        }
        must_refuse(json!({object: v3_with("type", Value::Null)}), &["no rope_type"]);
    }
}

#[test]
fn a_key_that_nothing_reads_is_named() {
    for object in ["rope_scaling", "rope_parameters"] {
        for key in ["mscale_all_dims", "rope_typ", "scaling_factor", "Factor", "attn_factor", "short_factors"]
        {
            let cure =
                format!("{object} has {key}, which is not known: correct or delete it; known are rope_type");
            must_refuse(json!({object: v3_with(key, json!(1.0))}), &[&cure, "mscale_all_dim, "]);
            must_refuse(json!({object: {key: 1.0}}), &[&cure]);
        }
        // A key is shown in part.
        must_refuse(json!({object: {"x".repeat(1000): 1}}), &["xxx, which is not known"]);
        // null is as if it were not there.
        assert_eq!(rope(json!({object: v3_with("short_factor", Value::Null)})), rope(json!({object: v3()})));
    }
    for (key, value) in [("rope_type", json!("yarn")), ("rope_scale", v3()), ("mscale_all_dim", json!(1.0))] {
        let cure = format!("{key}: not a field that is known outside of rope_scaling or rope_parameters");
        must_refuse(json!({key: value}), &[&cure, "move it there"]);
    }
}

/// The form that transformers 5 writes for models whose layers are of several kinds.
#[test]
fn rope_by_kind_of_layer_is_refused() {
    for object in ["rope_scaling", "rope_parameters"] {
        for kind in ["full_attention", "sliding_attention"] {
            let cures = [object, kind, "RoPE by kind of layer", "move its fields into"];
            must_refuse(json!({object: {kind: v3()}}), &cures);
            must_refuse(json!({object: {kind: v3(), "rope_type": "yarn"}}), &cures);
        }
    }
}

#[test]
fn factors_below_1_are_refused() {
    for factor in [json!(0.5), json!(0), json!(-40), json!(0.999)] {
        let cure = format!("factor {factor} of rope_scaling: must be at least 1");
        must_refuse(json!({"rope_scaling": v3_with("factor", factor)}), &[&cure]);
    }
    let longer = json!({"type": "yarn", "original_max_position_embeddings": 327_680});
    must_refuse(
        json!({"rope_scaling": longer}),
        &["max_position_embeddings / original_max_position_embeddings = 0.5"],
    );
    must_refuse(json!({"rope_scaling": {"type": "yarn"}}), &["factor: missing in rope_scaling"]);
    must_refuse(
        json!({"rope_scaling": v3_with("factor", json!("40"))}),
        &["factor \"40\": must be a number"],
    );
    for original in [0, -1] {
        let object = json!({"type": "yarn", "original_max_position_embeddings": original});
        must_refuse(
            json!({"rope_scaling": object}),
            &["original_max_position_embeddings", "must be more than 0"],
        );
    }
    // transformers' own default.
    let ratio = json!({"type": "yarn", "original_max_position_embeddings": 4096});
    assert_eq!(rope(json!({"rope_scaling": ratio})).softmax_mscale.0, 40.0);
    assert_eq!(rope(json!({"rope_scaling": v3_with("factor", json!(1))})).softmax_mscale, (1.0, 1.0));
}

#[test]
fn two_objects_say_the_same_or_are_refused() {
    let new = json!({"beta_fast": 32, "beta_slow": 1, "factor": 40.0, "mscale": 1, "mscale_all_dim": 1,
        "original_max_position_embeddings": 4096, "rope_type": "yarn", "rope_theta": 10000.0});
    let both = json!({"rope_scaling": v3(), "rope_parameters": new, "rope_theta": 10000});
    assert_eq!(rope(both), rope(json!({"rope_scaling": v3()})));
    for other in [
        v3_with("factor", json!(32)),
        v3_with("mscale_all_dim", json!(0.5)),
        v3_with("rope_theta", json!(50000)),
        json!({"rope_type": "default"}),
        json!({"rope_theta": 10000.0}),
    ] {
        for (old, new) in [(v3(), other.clone()), (other.clone(), v3())] {
            let cures = ["rope_scaling and rope_parameters differ", "delete the one"];
            must_refuse(json!({"rope_scaling": old, "rope_parameters": new}), &cures);
        }
    }
    // Nothing is said by one of them.
    for nothing in [Value::Null, json!({})] {
        let want = rope(json!({"rope_scaling": v3()}));
        assert_eq!(rope(json!({"rope_scaling": nothing, "rope_parameters": v3()})), want);
        assert_eq!(rope(json!({"rope_scaling": v3(), "rope_parameters": nothing})), want);
    }
    // A field in the object and outside of it.
    for (key, outer) in [("rope_theta", 50_000), ("original_max_position_embeddings", 8192)] {
        let inner = if key == "rope_theta" { 10_000 } else { 4096 };
        let object = v3_with(key, json!(inner));
        assert_eq!(rope(json!({"rope_scaling": object, key: inner})), rope(json!({"rope_scaling": v3()})));
        let cure = format!("{key} {inner} of rope_scaling and {outer} of the config: must be the same");
        must_refuse(json!({"rope_scaling": object, key: outer}), &[&cure]);
    }
    let without = v3_without("original_max_position_embeddings");
    let outside = json!({"rope_scaling": without, "original_max_position_embeddings": 4096});
    assert_eq!(rope(outside), rope(json!({"rope_scaling": v3()})));
}

/// vLLM and SGLang call YaRN so where a model is DeepSeek's, and checkpoints that they wrote have it.
#[test]
fn deepseek_yarn_is_yarn_by_deepseeks_formula() {
    let of = |object: Value| rope(json!({"rope_parameters": object}));
    let yarn = of(v3());
    assert_eq!(of(v3_with("type", json!("deepseek_yarn"))), yarn);
    assert_eq!(of(v3_with("rope_type", json!("deepseek_yarn"))), yarn, "vLLM leaves type as it was");
    must_refuse(
        json!({"rope_parameters": {"type": "default", "rope_type": "deepseek_yarn", "factor": 40}}),
        &["must be the same"],
    );
    let factor = |object: Value| of(object).cos_sin(1).expect("a table")[0];
    let m = |x: f64| 0.1 * x * 40f64.ln() + 1.0;
    for (mscale, all_dim, deepseek, transformers) in [
        (Some(1.0), Some(1.0), 1.0, 1.0),
        (Some(1.0), Some(0.5), m(1.0) / m(0.5), m(1.0) / m(0.5)),
        (None, None, m(1.0), m(1.0)),
        (Some(0.707), None, m(0.707), m(1.0)),
        (None, Some(0.707), m(1.0) / m(0.707), m(1.0)),
        (Some(0.0), None, 1.0, m(1.0)),
    ] {
        let mut object = json!({"factor": 40, "original_max_position_embeddings": 4096});
        for (key, value) in [("mscale", mscale), ("mscale_all_dim", all_dim)] {
            if let Some(value) = value {
                object[key] = json!(value);
            }
        }
        for (kind, want) in [("deepseek_yarn", deepseek), ("yarn", transformers)] {
            object["rope_type"] = json!(kind);
            let got = f64::from(factor(object.clone()));
            assert!((got / want - 1.0).abs() < 1e-6, "{object}: {got}, not {want}");
        }
    }
}

/// The fields as these checkpoints have them, by their own code and by transformers 5.
#[test]
fn what_models_ship_is_read() {
    let yarn = |factor: f64, mscale: f64| (factor, mscale);
    for (fields, softmax_mscale) in [
        // DeepSeek-V2 and V2-Lite, V3 and R1, Kimi-K2.
        (
            json!({"rope_theta": 10000, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707,
            "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096, "type": "yarn"}}),
            yarn(40.0, 0.707),
        ),
        (json!({"rope_theta": 10000, "rope_scaling": v3()}), yarn(40.0, 1.0)),
        (
            json!({"rope_theta": 50000.0, "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"}}),
            yarn(32.0, 1.0),
        ),
        // Saved again by transformers 5.
        (
            json!({"rope_interleave": true, "rope_parameters": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "rope_theta": 10000.0, "rope_type": "yarn",
            "type": "yarn", "attention_factor": null, "truncate": true, "partial_rotary_factor": 1.0}}),
            yarn(40.0, 1.0),
        ),
        // Moonlight, Youtu, GLM-4.7-Flash.
        (json!({"rope_theta": 50000.0, "rope_scaling": null}), yarn(1.0, 0.0)),
        (json!({"rope_theta": 1_600_000, "rope_scaling": null, "rope_interleave": true}), yarn(1.0, 0.0)),
        (
            json!({"rope_theta": 1_000_000, "rope_scaling": null, "partial_rotary_factor": 1.0}),
            yarn(1.0, 0.0),
        ),
        (
            json!({"rope_parameters": {"rope_theta": 1_000_000, "rope_type": "default", "partial_rotary_factor": 1.0}}),
            yarn(1.0, 0.0),
        ),
        // Mistral Small 4, but for its scaled queries.
        (
            json!({"max_position_embeddings": 1_048_576, "qk_nope_head_dim": 64, "rope_parameters": {"type": "yarn",
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192,
            "max_position_embeddings": 1_048_576, "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0,
            "llama_4_scaling_beta": 0, "partial_rotary_factor": 0.5, "apply_yarn_scaling": true}}),
            yarn(128.0, 1.0),
        ),
    ] {
        assert_eq!(rope(fields).softmax_mscale, softmax_mscale);
    }
}

/// transformers' formula; `long_factor` where a table is longer than what the model was first trained for.
#[test]
fn longrope_has_factors_for_short_and_for_long_tables() {
    let factors = |by: f64| json!((0..32).map(|pair| 1.0 + by * f64::from(pair)).collect::<Vec<_>>());
    let object = json!({"type": "longrope", "short_factor": factors(0.1), "long_factor": factors(0.5),
        "original_max_position_embeddings": 4096});
    let of = rope(json!({"rope_scaling": object}));
    let scale = (1.0 + 40f64.ln() / 4096f64.ln()).sqrt();
    for (positions, by) in [(4096, 0.1), (4097, 0.5)] {
        let table = of.cos_sin(positions).expect("a table");
        let row = &table[4000 * 64..][..64];
        for pair in 0..32 {
            let angle = 4000.0 * 10_000f64.powf(-(pair as f64) / 32.0) / (1.0 + by * pair as f64);
            for (got, want) in [(row[pair], angle.cos()), (row[pair + 32], angle.sin())] {
                assert!((f64::from(got) - want * scale).abs() < 1e-6, "{positions}, pair {pair}: {got}");
            }
        }
    }
    assert_eq!(of.softmax_mscale, (1.0, 0.0));
    let with = |key: &str, value: Value| {
        let mut object = object.clone();
        object[key] = value;
        json!({"rope_scaling": object})
    };
    let first = |fields: Value| f64::from(rope(fields).cos_sin(1).expect("a table")[0]);
    assert!((first(with("attention_factor", json!(1.25))) - 1.25).abs() < 1e-6);
    assert!((first(with("factor", json!(1.0))) - 1.0).abs() < 1e-6);
    for (key, value, cure) in [
        ("short_factor", Value::Null, "short_factor of rope_scaling: must be 32 numbers above 0"),
        ("long_factor", json!([1.0]), "long_factor of rope_scaling: must be 32 numbers above 0"),
        ("long_factor", json!([0].repeat(32)), "long_factor of rope_scaling: must be 32 numbers above 0"),
        ("long_factor", json!("1"), "long_factor \"1\": must be a list of numbers"),
        ("attention_factor", json!(0), "must be more than 0"),
        ("beta_fast", json!(32), "its rope_type is longrope: give \"rope_type\": \"yarn\""),
        ("type", json!("yarn"), "its rope_type is yarn: give \"rope_type\": \"longrope\""),
    ] {
        must_refuse(with(key, value), &[cure]);
    }
}

#[test]
fn keys_of_other_models_have_the_served_value_or_are_refused() {
    for (key, value, cure) in [
        ("apply_yarn_scaling", json!(false), "apply_yarn_scaling false of rope_scaling: must be true"),
        ("apply_yarn_scaling", json!("no"), "apply_yarn_scaling \"no\" of rope_scaling: must be true"),
        (
            "max_position_embeddings",
            json!(4096),
            "max_position_embeddings 4096 of rope_scaling and 163840 of the config",
        ),
        ("partial_rotary_factor", json!(0.5), "partial_rotary_factor 0.5 of rope_scaling: must be 1"),
        ("attention_factor", json!(0), "attention_factor 0: must be more than 0"),
    ] {
        must_refuse(json!({"rope_scaling": v3_with(key, value)}), &[cure]);
    }
    // What this model ignores is said.
    let notices = |beta: f64| {
        with(json!({"rope_scaling": v3_with("llama_4_scaling_beta", json!(beta))})).expect("a config").notices
    };
    let said = "llama_4_scaling_beta 0.1: ignored, as deepseek_v3 does not scale queries by position";
    assert!(notices(0.1)[0].starts_with(said) && notices(0.0).is_empty());
    let odd = json!({"type": "deepseek_yarn", "factor": 40, "mscale": -10.0, "mscale_all_dim": 1.0});
    must_refuse(json!({"rope_scaling": odd}), &["attention factor"]);
}
