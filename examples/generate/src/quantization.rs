//! Error messages for quantised weights, which are not served.

/// The advice for weights that are not plain floats: by the `quant_method` of config.json's `quantization_config`, and by whether FP8 was
/// found. Plain weights load whatever the method: DeepSeek's `fp8_cast_bf16.py` leaves `quantization_config` where it was.
pub fn cure(method: Option<&str>, fp8: bool) -> String {
    match method {
        Some(other) if other != "fp8" => format!(
            "quant_method {other} of quantization_config is not served: download the unquantised checkpoint, or dequantise this one to bf16"
        ),
        None if !fp8 => "weights must be F32, F16 or BF16: download the unquantised checkpoint".into(),
        _ => "FP8 weights are not served: convert them to bf16 with DeepSeek's `fp8_cast_bf16.py`, and name the directory that it wrote"
            .into(),
    }
}

/// Whether a tensor is the scale of FP8 weights, as DeepSeek and compressed-tensors name them.
pub fn is_scale(name: &str) -> bool {
    ["weight_scale_inv", "weight_scale", "input_scale"].iter().any(|end| name.ends_with(end))
}
