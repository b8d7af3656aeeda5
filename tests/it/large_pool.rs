//! Lists that name slots past 2^31 bytes of a pool, on cards with memory for it.

use mla_support::close::{Tolerance, close};
use mla_support::paint::{Lists, Make, Sees, sequences};
use mla_support::suite::Session;
use mla_support::suite::run::{How, plan_of};
use mla_support::{Ignored, Outcome};
use wgpu_mla::{
    Backend, Capacity, Dtype, Indices, KvLayout, MlaDecode, MlaDecodeArgs, PageTable, SplitPolicy,
};

use crate::harness::Test;

/// Where the pool ends.
const POOL_BYTES: u64 = (1 << 31) + (1 << 26);

/// 100 tokens from slot 0 on, around 2^31 bytes, and to the last slot, in an order that goes back and forth.
fn slots(num_slots: u64, token_bytes: u64) -> Vec<i32> {
    let middle = (1u64 << 31) / token_bytes;
    let near = |i: u64| match i % 3 {
        0 => i,
        1 => middle + i - 50,
        _ => num_slots - 1 - i,
    };
    (0..100).map(|i| near(i) as i32).collect()
}

fn past_2_31_bytes<B: Backend>(backend: &B) -> Outcome {
    let mut served = 0;
    for (records, heads) in [(None, 16), (Some(KvLayout::Ds656), 16), (Some(KvLayout::Ds656), 128)] {
        let batch = sequences(&[(100, 2)]);
        let small = Make { records, heads, sees: Sees::Full, sequences: batch, ..Make::default() }.build();
        let token = small.spec.kv.token(&small.spec.shape).bytes;
        let page_bytes = small.spec.kv.page_bytes(&small.spec.shape);
        let mut kv = small.spec.kv;
        kv.num_pages = (POOL_BYTES / page_bytes) as u32;
        let slots = slots(kv.num_slots(), token);
        let lists = Lists { topk: 100, slots: slots.repeat(2), topk_length: None };
        let mut listed = small.clone();
        (listed.spec, listed.lists) = (MlaDecode { kv, ..small.spec }, Some(lists));
        let session = Session::new(backend);
        if backend.largest_binding() < listed.spec.cache_bytes() {
            return Err(Ignored(format!("a binding has at most {} bytes here", backend.largest_binding())));
        }
        if !session.takes_inputs(&listed, &How::default()) {
            session.finish("a pool past 2^31 bytes");
            continue;
        }
        served += 1;
        let (pool, spec, tokens) = (backend.buffer(listed.spec.cache_bytes()), &listed.spec, 2);
        let Ok(pool) = pool else { return Err(Ignored("no memory for 2 GiB in one buffer".to_owned())) };
        for (from, to) in small.slots(0).into_iter().zip(&slots) {
            let bytes = &small.kv[from as usize * token as usize..][..token as usize];
            backend.upload(&pool, *to as u64 * token, bytes).expect("uploaded");
        }
        let upload = |bytes: &[u8]| {
            let buffer = backend.buffer(bytes.len() as u64).expect("memory");
            backend.upload(&buffer, 0, bytes).expect("uploaded");
            buffer
        };
        let words: Vec<u8> = slots.repeat(2).iter().flat_map(|slot| slot.to_le_bytes()).collect();
        let (q, words) = (upload(&small.q), upload(&words));
        let out = backend.buffer(spec.out_bytes(tokens)).expect("memory");
        let lse = backend.buffer(spec.lse_bytes(tokens)).expect("memory");
        let (want_out, want_lse) = small.expected();
        for policy in [SplitPolicy::Auto, SplitPolicy::OneSplit] {
            let how = How { policy, ..How::default() };
            let decode = session.decode_of(&listed, &how).expect("a decode");
            let plan = plan_of(&listed, &how, &decode.tiling()).expect("a plan");
            let mut step = decode.step(Capacity::of(&plan)).expect("a step");
            decode.prepare(&mut step, (&plan, PageTable::Indices)).expect("prepared");
            let args = MlaDecodeArgs {
                indices: Some(Indices::dense(&words, 100)),
                ..MlaDecodeArgs::dense(spec, &q, &pool, &out, &lse, small.softmax_scale)
            };
            decode.run(&step, &decode.bind(&args, tokens).expect("bound")).expect("ran");
            let read = |buffer, bytes| Dtype::F32.decode_all(&backend.download(buffer, bytes).expect("read"));
            let tolerance = session.tolerance(&small, 1);
            for report in [
                close("out", &read(&out, spec.out_bytes(tokens)), &want_out, &tolerance),
                close("lse", &read(&lse, spec.lse_bytes(tokens)), &want_lse, &Tolerance::lse()),
            ] {
                assert!(report.ok(), "{}, {policy:?}: {report}", small.name);
            }
        }
    }
    if served > 0 { Ok(()) } else { Err(Ignored("lists of slots are not served here".to_owned())) }
}

/// A software device has the memory of the machine, which may not be enough.
#[cfg(feature = "wgpu")]
fn wgpu() -> Outcome {
    let gpu = mla_support::gpu()?;
    if gpu.caps().kind == wgpu_mla::DeviceKind::Software {
        return Err(Ignored("a software device".to_owned()));
    }
    past_2_31_bytes(&gpu)
}

#[cfg(feature = "cuda")]
fn cuda() -> Outcome {
    let cuda = mla_support::cuda()?;
    if wgpu_mla::Device::name(&cuda).contains("PTX interpreter") {
        return Err(Ignored("the interpreter's card".to_owned()));
    }
    past_2_31_bytes(&cuda)
}

pub fn tests() -> Vec<Test> {
    vec![
        #[cfg(feature = "wgpu")]
        Test::new("large_pool::wgpu", wgpu),
        #[cfg(feature = "cuda")]
        Test::new("large_pool::cuda", cuda),
    ]
}
