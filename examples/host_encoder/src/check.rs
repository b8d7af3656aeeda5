//! One finished decode, compared with the oracle: read back without a wait, computed on another thread.

use std::sync::mpsc::{Receiver, channel};

use mla_support::reference::{Decode, mla_decode};
use wgpu_mla::{Dtype, Mask, Result, wgpu};

use crate::model::{self, Model, SPEC};

/// The largest error that an element of `out` may have; all of them are below 1.
const TOLERANCE: f64 = 1e-3;

pub struct Check {
    receiver: Receiver<Verdict>,
    verdict: Option<Verdict>,
}

/// The largest error, or what went wrong.
pub type Verdict = std::result::Result<f64, String>;

impl Check {
    /// Records a copy of what went into a decode and what came out. The buffer maps itself once the host has
    /// submitted and the device is done; a later submit of the host notices.
    pub fn record(model: &Model, encoder: &mut wgpu::CommandEncoder) -> Result<Self> {
        let sources = [&model.buffers.query, &model.buffers.cache, &model.buffers.out];
        let ends = sources.iter().scan(0, |end, source| {
            *end += source.size();
            Some(*end)
        });
        let ends: Vec<u64> = ends.collect();
        let usage = wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::MAP_READ;
        let copy = model::buffer(model.gpu.device(), "host.check", ends[2], usage);
        for (source, end) in sources.into_iter().zip(&ends) {
            encoder.copy_buffer_to_buffer(source, 0, &copy, end - source.size(), source.size());
        }

        let (seq_lens, table) = (model.seq_lens()?, model.block_table()?);
        let (sender, receiver) = channel();
        let mapped = copy.clone();
        encoder.map_buffer_on_submit(&copy, wgpu::MapMode::Read, .., move |done| {
            std::thread::spawn(move || {
                let verdict = done.map_err(|error| error.to_string()).and_then(|()| {
                    let bytes = mapped.get_mapped_range(..).map_err(|error| error.to_string())?;
                    let (inputs, out) = bytes.split_at(ends[1] as usize);
                    let (query, cache) = inputs.split_at(ends[0] as usize);
                    compare(query, cache, out, &seq_lens, &table)
                });
                // The receiver is gone once the window was closed.
                let _ = sender.send(verdict);
            });
        });
        Ok(Self { receiver, verdict: None })
    }

    /// The result, if it has arrived.
    pub fn poll(&mut self) -> Option<&Verdict> {
        self.verdict = self.verdict.take().or_else(|| self.receiver.try_recv().ok());
        self.verdict.as_ref()
    }

    /// The result. Waits, so it is for the end of a program, not for a frame.
    pub fn wait(mut self, device: &wgpu::Device) -> Verdict {
        if self.poll().is_none() {
            device.poll(wgpu::PollType::wait_indefinitely()).map_err(|error| error.to_string())?;
        }
        let received = || self.receiver.recv().unwrap_or_else(|_| Err("the copy was never mapped".into()));
        self.verdict.unwrap_or_else(received)
    }
}

fn compare(
    query: &[u8],
    cache: &[u8],
    out: &[u8],
    seq_lens: &[i32],
    table: &wgpu_mla::BlockTable,
) -> Verdict {
    let (want, _) = mla_decode(&Decode {
        num_heads: SPEC.shape.num_heads as usize,
        kv_lora_rank: SPEC.shape.kv_lora_rank as usize,
        qk_rope_head_dim: SPEC.shape.qk_rope_head_dim as usize,
        page_size: SPEC.kv.page_size as usize,
        q: &SPEC.query.decode_all(query),
        kv_cache: &SPEC.kv.dtype.decode_all(cache),
        block_table: &table.entries,
        max_pages: table.max_pages as usize,
        seq_lens,
        query_start_loc: &model::query_start_loc(),
        mask: Mask::Causal,
        softmax_scale: model::softmax_scale().into(),
        k_scale: 1.0,
        q_scale: 1.0,
    });
    let got = Dtype::F32.decode_all(out);
    let mut largest = 0.0;
    for (at, (&got, &want)) in got.iter().zip(&want).enumerate() {
        let error = (f64::from(got) - want).abs();
        if error.is_nan() || error > TOLERANCE {
            return Err(format!("element {at} of out is {got}, the reference says {want}"));
        }
        largest = error.max(largest);
    }
    Ok(largest)
}
