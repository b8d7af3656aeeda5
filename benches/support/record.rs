//! What a run leaves behind: records as JSON.

use std::path::Path;
use std::time::SystemTime;

use serde_json::{Map, Value, json};
use wgpu_mla::gpu::Gpu;

use super::Result;
use super::clock::Timing;

/// The records of a run.
pub struct Records {
    head: Value,
    rows: Vec<Value>,
}

impl Records {
    pub fn new(bench: &str, gpu: Option<&Gpu>) -> Self {
        let date = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
        let device = gpu.map_or(json!({ "name": "CPU" }), |gpu| {
            let info = gpu.adapter.get_info();
            json!({
                "name": info.name,
                "driver": info.driver,
                "driver_info": info.driver_info,
                "api": format!("{:?}", info.backend),
                "kind": format!("{:?}", info.device_type),
            })
        });
        let version = env!("CARGO_PKG_VERSION");
        Self {
            head: json!({ "bench": bench, "crate": version, "date": date, "device": device }),
            rows: Vec::new(),
        }
    }

    /// A fact about the whole run.
    pub fn note(&mut self, name: &str, value: impl Into<Value>) {
        self.head[name] = value.into();
    }

    pub fn add(&mut self, row: Value) {
        self.rows.push(row);
    }

    pub fn save(mut self, path: Option<&Path>) -> Result<()> {
        let Some(path) = path else { return Ok(()) };
        self.head["records"] = self.rows.into();
        std::fs::write(path, serde_json::to_string_pretty(&self.head)? + "\n")
            .map_err(|error| format!("{}: {error}", path.display()))?;
        eprintln!("wrote {}", path.display());
        Ok(())
    }
}

/// A timing's fields of a record.
pub fn timing_fields(timing: &Timing) -> Map<String, Value> {
    let us = |seconds: f64| json!((seconds * 1e9).round() / 1e3);
    let mut fields = Map::new();
    fields.insert("us".into(), us(timing.median));
    fields.insert("us_min".into(), us(timing.min));
    fields.insert("host_us".into(), us(timing.host));
    fields
}

/// A figure of a table, or a dash where there is none.
pub fn cell(value: f64, decimals: usize) -> String {
    if value.is_finite() { format!("{value:.decimals$}") } else { "-".into() }
}
