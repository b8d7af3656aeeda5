//! Every op's arguments: specs, strides, sizes, aliases, scales and inputs, most of them good and some broken. What is accepted gives the
//! same bits as dense arrays do, and changes nothing else; what is good is accepted.

mod array;
mod attention;
mod cache;
mod case;
mod index_logits;
mod indexer;
mod merges;
mod rows;
mod top_k;

use std::ops::Range;
use std::sync::OnceLock;

use mla_support::gpu;
use wgpu_mla::cpu::Cpu;
use wgpu_mla::gpu::Gpu;
use wgpu_mla::{Op, View, for_each_op};

use crate::source::Source;
use crate::{Target, Verdict};
use array::Array;
use case::Draw;

/// On the CPU backend.
pub const ON_CPU: Target = Target {
    name: "ops",
    about: "the arguments of every op, on the CPU backend",
    run: on_cpu,
    seeds: Vec::new,
    least_ran: 50,
    longest: 512,
    memory: 256 << 20,
};

/// On the GPU backend.
pub const ON_GPU: Target =
    Target { name: "ops_gpu", about: "the same on the GPU backend", run: on_gpu, ..ON_CPU };

fn on_cpu(input: &[u8]) -> Verdict {
    static CPU: OnceLock<Cpu> = OnceLock::new();
    let cpu = CPU.get_or_init(|| Cpu::with_threads(2));
    let mut source = Source::new(input);
    macro_rules! each {
        ($($op:ty),*) => { [$(case::run::<$op, Cpu>),*] };
    }
    let ops: &[fn(&Cpu, &mut Source<'_>) -> Verdict] = &for_each_op!(each);
    ops[source.index(ops.len())](cpu, &mut source)
}

fn on_gpu(input: &[u8]) -> Verdict {
    static GPU: OnceLock<Gpu> = OnceLock::new();
    let gpu = GPU.get_or_init(|| gpu().unwrap_or_else(|why| panic!("no GPU: {why:?}")));
    let mut source = Source::new(input);
    macro_rules! each {
        ($($op:ty),*) => { [$(case::run::<$op, Gpu>),*] };
    }
    let ops: &[fn(&Gpu, &mut Source<'_>) -> Verdict] = &for_each_op!(each);
    ops[source.index(ops.len())](gpu, &mut source)
}

/// One of an op's samples.
fn sample<O: Op>(source: &mut Source<'_>) -> O {
    source.pick(&O::samples())
}

/// A range of a few tokens, perhaps empty; a broken one may end before it begins.
fn tokens(draw: &mut Draw<'_, '_>) -> Range<u32> {
    let begin = draw.number(0, 2);
    let end = draw.number(0, 4);
    if draw.is_broken { begin..end } else { begin..begin + end }
}

fn view<B: Copy>(array: &Array, buffer: B) -> View<B> {
    View { buffer, offset: array.offset, token_stride: array.strides[1], head_stride: array.strides[2] }
}
