//! All-to-all, or all-gather, and a merge.

use super::layout::Pair;
use super::spec::ContextParallelSpec;
use crate::base::error::Result;
use crate::base::view::View;
use crate::communicator::{Communicator, Exchange};
use crate::ops::op::{Binding, Compiled, Kernel, Step};
use crate::ops::{Device, MergeStates, MergeStatesArgs, MergeStatesExtent};

/// What is exchanged: this rank's partial results, and those that come.
pub struct Sets<B> {
    pub partial: Pair<B>,
    gathered: Pair<B>,
    /// Both pairs as one piece of memory each, where the device has parts of buffers: an exchange is then one message.
    whole: Option<(B, B)>,
    /// Heads of a rank that come to each rank.
    heads: u32,
    /// Bytes of a rank's set in `whole`.
    set_bytes: u64,
}

impl<B: Clone> Sets<B> {
    pub fn new<D: Device<Buffer = B>>(device: &D, spec: &ContextParallelSpec) -> Result<Self> {
        let world = u64::from(spec.world);
        let [out, lse] = [spec.out_bytes(spec.num_heads), spec.lse_bytes(spec.num_heads)];
        // A set begins where vector loads may.
        let set_bytes = (out + lse).next_multiple_of(32);
        let heads = spec.exchanged_heads();
        if heads == spec.num_heads && out.is_multiple_of(16) {
            let (from, to) = (device.buffer(set_bytes)?, device.buffer(set_bytes * world)?);
            let parts =
                |whole: &B| Some(Pair { out: D::part(whole, 0, out)?, lse: D::part(whole, out, lse)? });
            if let (Some(partial), Some(gathered)) = (parts(&from), parts(&to)) {
                return Ok(Self { partial, gathered, whole: Some((from, to)), heads, set_bytes });
            }
        }
        let partial = Pair::new(device, spec, spec.num_heads)?;
        let gathered = Pair {
            out: device.buffer(spec.out_bytes(heads) * world)?,
            lse: device.buffer(spec.lse_bytes(heads) * world)?,
        };
        Ok(Self { partial, gathered, whole: None, heads, set_bytes })
    }

    /// The heads that this rank merges: views of their first set, and strides from a set to the next.
    fn merged(&self, spec: &ContextParallelSpec) -> [(View<&B>, u64); 2] {
        let first = if self.heads == spec.local_heads() { 0 } else { spec.rank * spec.local_heads() };
        let Pair { out, lse } = &self.gathered;
        let [out, lse] = [spec.out_view(out), spec.lse_view(lse)]
            .map(|view| View { offset: u64::from(first) * view.head_stride, ..view });
        let Some((_, all)) = &self.whole else {
            let rows = spec.rows(self.heads);
            return [(out, rows * u64::from(spec.kv_lora_rank)), (lse, rows)];
        };
        let lse_at = spec.out_bytes(self.heads) / 4;
        let (out, lse) =
            (View { buffer: all, ..out }, View { buffer: all, offset: lse_at + lse.offset, ..lse });
        [(out, self.set_bytes / spec.out.bytes() as u64), (lse, self.set_bytes / 4)]
    }
}

/// This form on one device.
pub struct Merged<D: Kernel<MergeStates>> {
    device: D,
    spec: ContextParallelSpec,
    sets: Sets<D::Buffer>,
    merge: Compiled<MergeStates, D>,
    step: Step<MergeStates, D>,
    binding: Binding<MergeStates, D>,
}

impl<D: Kernel<MergeStates>> Merged<D> {
    pub fn new(
        device: &D,
        spec: ContextParallelSpec,
        sets: Sets<D::Buffer>,
        joined: &Pair<D::Buffer>,
    ) -> Result<Self> {
        let merge = device.compile(MergeStates { dtype: spec.out, head_size: spec.kv_lora_rank })?;
        let [(states, set_stride), (lse, lse_set_stride)] = sets.merged(&spec);
        let args = MergeStatesArgs {
            states,
            set_stride,
            lse,
            lse_set_stride,
            lse_base: spec.lse_base,
            output: spec.out_view(&joined.out),
            output_lse: Some(spec.lse_view(&joined.lse)),
            num_heads: spec.local_heads(),
            output_scale: 1.0,
        };
        let room = MergeStatesExtent { tokens: spec.max_tokens, sets: spec.world };
        let binding = merge.bind(&args, room)?;
        let step = merge.step(spec.max_tokens)?;
        Ok(Self { device: device.clone(), spec, sets, merge, step, binding })
    }

    pub fn prepare(&mut self, tokens: u32) -> Result<()> {
        self.merge.prepare(&mut self.step, (0..tokens, self.spec.world))
    }

    pub fn run(&self, communicator: &dyn Communicator<D>) -> Result<()> {
        // Nothing is exchanged before the merge is known to fit.
        self.merge.check(&self.step, &self.binding)?;
        let Sets { partial, gathered, whole, heads, set_bytes } = &self.sets;
        if let Some((from, to)) = whole {
            communicator.all_gather(&self.device, &[Exchange { from, to, bytes: *set_bytes }])?;
            return self.merge.run(&self.step, &self.binding);
        }
        let exchanges = [
            (&partial.out, &gathered.out, self.spec.out_bytes(*heads)),
            (&partial.lse, &gathered.lse, self.spec.lse_bytes(*heads)),
        ]
        .map(|(from, to, bytes)| Exchange { from, to, bytes });
        if *heads == self.spec.num_heads {
            communicator.all_gather(&self.device, &exchanges)?;
        } else {
            communicator.all_to_all(&self.device, &exchanges)?;
        }
        self.merge.run(&self.step, &self.binding)
    }
}
