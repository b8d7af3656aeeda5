//! What a step spends on burn's operations, on this crate's kernels, and on the host.

use std::time::{Duration, Instant};

use burn::tensor::Device;

/// A part of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// burn's operations: projections, norms, experts, the head.
    Burn,
    /// wgpu-mla's: the cache and the attention.
    Ours,
    /// Neither: pages, plans and tables of a step, embeddings, and logits on their way back.
    Host,
}

/// Times by part. They are measured only where asked for, as the device is waited for after each part: a step takes longer then.
#[derive(Debug, Clone, Default)]
pub struct Times {
    since: Option<Instant>,
    /// Until the host had handed the work over, and the whole.
    spent: [(Duration, Duration); 3],
}

impl Times {
    /// Starts to measure, from 0.
    pub fn begin(&mut self) {
        *self = Self { since: Some(Instant::now()), ..Self::default() };
    }

    /// What it measured. It stops.
    pub fn take(&mut self) -> Self {
        std::mem::take(self)
    }

    /// What came since the last call belongs to a part.
    pub fn end(&mut self, part: Part, device: &Device) {
        let Some(since) = self.since else { return };
        let handed_over = since.elapsed();
        if part != Part::Host {
            // An error comes again where values are read.
            let _ = device.sync();
        }
        let (host, all) = &mut self.spent[part as usize];
        *host += handed_over;
        *all += since.elapsed();
        self.since = Some(Instant::now());
    }

    /// A line for each part, of so many steps.
    #[must_use]
    pub fn report(&self, steps: u32) -> String {
        let total: f64 = self.spent.iter().map(|(_, all)| all.as_secs_f64()).sum();
        let line = |(name, (host, all)): (&str, &(Duration, Duration))| {
            let us = |time: &Duration| time.as_secs_f64() * 1e6 / f64::from(steps.max(1));
            let share = 100.0 * all.as_secs_f64() / total.max(1e-12);
            format!("  {name:<28} {:9.0} us, {share:4.1} %; handed over after {:9.0} us\n", us(all), us(host))
        };
        let names = ["burn: products, norms", "ours: cache and attention", "host: tables, rows, logits"];
        names.into_iter().zip(&self.spent).map(line).collect()
    }
}
