//! The records of a run, as JSON.

use std::path::Path;
use std::time::SystemTime;

use serde_json::{Map, Value, json};

use super::Result;
use super::clock::Timing;

/// The records of a run.
pub struct Records {
    head: Value,
    records: Vec<Value>,
    failed: usize,
}

impl Records {
    /// `device` describes the device: its name, driver and so on.
    pub fn new(bench: &str, device: Value) -> Self {
        let date = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
        let version = env!("CARGO_PKG_VERSION");
        Self {
            head: json!({ "bench": bench, "crate": version, "date": date, "device": device }),
            records: Vec::new(),
            failed: 0,
        }
    }

    /// A fact about the whole run.
    pub fn note(&mut self, name: &str, value: impl Into<Value>) {
        self.head[name] = value.into();
    }

    pub fn add(&mut self, record: Value) {
        self.records.push(record);
    }

    /// Says what went wrong with a workload. The others are still run, and [`Records::save`] then fails.
    pub fn fail(&mut self, workload: &str, error: &dyn std::error::Error) {
        println!("| {workload} | FAILED: {error} |");
        self.add(json!({ "workload": workload, "failed": error.to_string() }));
        self.failed += 1;
    }

    /// Writes the file, if one is wanted.
    ///
    /// # Errors
    /// Where a workload failed, too.
    pub fn save(mut self, path: Option<&Path>) -> Result<()> {
        if let Some(path) = path {
            self.head["records"] = self.records.into();
            std::fs::write(path, serde_json::to_string_pretty(&self.head)? + "\n")
                .map_err(|error| format!("{}: {error}", path.display()))?;
            eprintln!("wrote {}", path.display());
        }
        match self.failed {
            0 => Ok(()),
            failed => Err(format!("{failed} workloads failed").into()),
        }
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

/// A figure of a table with three significant digits, or a dash where there is none.
pub fn figure(value: f64) -> String {
    match value.abs() {
        size if !size.is_finite() => "-".into(),
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// Like [`figure`], with a decimal for microseconds.
pub fn micros(us: f64) -> String {
    if (100.0..100_000.0).contains(&us) { format!("{us:.1}") } else { figure(us) }
}
