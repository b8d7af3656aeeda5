//! The variant `shared`, without tensor cores: the tile of a workgroup, and the WGSL. Pure.

use super::{Kernel, Request};
use crate::base::dtype::Dtype;
use crate::gpu::caps::{Caps, DeviceKind};
use crate::gpu::kernels::formats::Format;
use crate::gpu::kernels::{GROUP, unrolled, where_all_f32};
use crate::ops::MlaPrefill;

/// The tile of a workgroup and its division among threads: see the head of `shaders/mla_prefill.wgsl`.
#[derive(Debug, Clone, Copy)]
struct Cut {
    /// Quads (4 each) of query rows, and of a block's keys, of a thread.
    row_quads: u32,
    key_quads: u32,
    /// Columns of queries and keys that are staged at a time.
    depth: u32,
    /// Keys whose values are staged at a time.
    slice_keys: u32,
}

impl Cut {
    fn of(caps: &Caps, spec: &MlaPrefill) -> Self {
        // Measured on an H200 at 128/64/128, row_quads and key_quads: 1 and 2, 24.6 TFLOP/s; 1 and 1 with a depth of 32, 22.7; 2 and 2,
        // 22.5; 2 and 1, 17.7. Elsewhere by registers: 32 of scores and, for 128 columns, 32 of the output.
        let key_quads = match caps.kind {
            DeviceKind::Discrete if spec.dtype != Dtype::F32 && !caps.subgroups_vary_to_32() => 2,
            _ => 1,
        };
        let slice_keys = if spec.v_head_dim > 128 { 8 } else { 16 };
        Self { row_quads: 1, key_quads, depth: 32 / key_quads, slice_keys }
    }

    /// vec4s of workgroup memory: the largest of the phases that share it.
    fn staged(&self, spec: &MlaPrefill) -> u32 {
        let tile = 16 * self.row_quads;
        let slices = self.depth * (tile + 16 * self.key_quads);
        let values = self.slice_keys * (tile + 16 * column_quads(spec));
        slices.max(values).max(tile * 16)
    }
}

/// Quads of output columns of a thread.
const fn column_quads(spec: &MlaPrefill) -> u32 {
    spec.v_head_dim.div_ceil(64)
}

pub(super) fn kernel(caps: &Caps, (spec, _): &Request) -> Result<Kernel, String> {
    let cut = Cut::of(caps, spec);
    let all_f32 = [spec.dtype, spec.out] == [Dtype::F32; 2];
    let bytes = 16 * cut.staged(spec);
    let needs = [
        ("bytes of workgroup memory", bytes, caps.workgroup_memory_bytes),
        ("invocations", GROUP, caps.max_invocations),
        ("storage buffers", 8, caps.max_storage_buffers),
    ];
    if let Some((what, need, has)) = needs.into_iter().find(|(_, need, has)| need > has) {
        return Err(format!("{need} {what} are needed, the device was made with {has}"));
    }
    // Software devices keep arrays in memory anyway, and unrolled kernels compile for long there.
    let marker = if caps.kind == DeviceKind::Software { "" } else { "// unroll" };
    let text = include_str!("../../../../shaders/mla_prefill.wgsl").replace("// unroll on cards", marker);
    let text = where_all_f32(&text, all_f32);
    let columns = spec.qk_nope_head_dim + spec.qk_rope_head_dim;
    // Where all is f32, the keys of the first level of sums; with 8, Intel's spill.
    let value_turn = if all_f32 && !caps.subgroups_vary_to_32() { 8 } else { 4 };
    let mut consts = vec![
        ("GROUP", GROUP),
        ("NUM_HEADS", spec.num_heads),
        ("NOPE_QUADS", spec.qk_nope_head_dim / 4),
        ("ROPE_QUADS", spec.qk_rope_head_dim / 4),
        ("V_QUADS", spec.v_head_dim / 4),
        ("ROW_QUADS", cut.row_quads),
        ("KEY_QUADS", cut.key_quads),
        ("COLUMN_QUADS", column_quads(spec)),
        ("KEYS_OF_THREAD", 4 * cut.key_quads),
        ("COLUMNS_OF_THREAD", 4 * column_quads(spec)),
        ("SCORES", 4 * cut.key_quads * cut.row_quads),
        ("ACC", 4 * column_quads(spec) * cut.row_quads),
        ("TOKENS", 64 * cut.key_quads),
        ("DEPTH", cut.depth),
        ("SLICES", columns.div_ceil(cut.depth)),
        ("DEPTH_TURN", 8),
        ("SUMS_APART", u32::from(spec.dtype == Dtype::F32)),
        ("SLICE_KEYS", cut.slice_keys),
        ("VALUE_TURN", value_turn),
        ("ROLLED", caps.subgroups_vary_to_32().into()),
        ("STAGED", cut.staged(spec)),
    ];
    let mut files = vec![
        include_str!("../../../../shaders/lib/round.wgsl"),
        Format::of(spec.dtype).quad,
        "alias Unit = Quad;\n",
        Format::of(spec.out).out,
        include_str!("../../../../shaders/lib/prefill.wgsl"),
        include_str!("../../../../shaders/lib/row_end.wgsl"),
        include_str!("../../../../shaders/lib/prefill_read.wgsl"),
        &text,
    ];
    if all_f32 {
        // An error grows by the additions of each level: of 400,000 keys 8, 224 and 224, or 4, 320 and 312.
        let total_blocks = if value_turn == 8 { 28 } else { 20 };
        consts.extend([("TURN", 4 * cut.row_quads), ("TOTAL_TOKENS", total_blocks * 64 * cut.key_quads)]);
        files.push(include_str!("../../../../shaders/lib/prefill_totals.wgsl"));
    }
    let dims = format!("{}.{}.{}", spec.qk_nope_head_dim, spec.qk_rope_head_dim, spec.v_head_dim);
    let variant = format!("shared.{}.out_{}.{dims}", spec.dtype, spec.out);
    let source = unrolled("mla_prefill", &variant, &consts, &[], &files);
    Ok(Kernel { source, rows: 64 * cut.row_quads, unit: 4, pins_loads: false })
}
