//! The small ops.

use super::*;

fn merge_state_follows_the_spec() {
    let cpu = Cpu::with_threads(2);
    let (tokens, heads, head_size) = (5u32, 3u32, 7u32);
    let count = (tokens * heads * head_size) as usize;
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        let filled = |bytes: &[u8]| {
            let mut bytes = bytes.to_vec();
            bytes.resize(bytes.len().next_multiple_of(4), 0);
            let buffer = cpu.buffer(bytes.len() as u64).unwrap();
            cpu.upload(&buffer, 0, &bytes).unwrap();
            buffer
        };
        // By (token, head): every pairing of empty and not.
        let special = [f32::NEG_INFINITY, f32::INFINITY, f32::NAN, 2.5, -40.0];
        let lses: [Vec<f32>; 2] = [1, 2].map(|s| {
            (0..15).map(|i| if i < 10 { special[i * s % 5] } else { noise(s as u64, i as u64) }).collect()
        });
        let data: [Vec<u8>; 2] = [0, 1].map(|s| {
            let value = |i: usize| {
                let empty = !lses[s][i / 7 % 3 * 5 + i / 21].is_finite();
                if empty { f32::NAN } else { noise(s as u64 + 5, i as u64) }
            };
            dtype.encode_all(&(0..count).map(value).collect::<Vec<_>>())
        });
        let outs = data.each_ref().map(|bytes| filled(bytes));
        let lse_buffers = lses.each_ref().map(|lse| filled(&Dtype::F32.encode_all(lse)));
        // One element of offset, so that rows share words.
        let (output, output_lse) = (cpu.buffer(count as u64 * 4 + 8).unwrap(), cpu.buffer(64).unwrap());
        let rows = |buffer| View::dense(buffer, heads, head_size);
        let by_head = |buffer| View { buffer, offset: 0, token_stride: 1, head_stride: tokens.into() };
        let spec = MergeState { dtype, head_size };
        let args = MergeStateArgs {
            prefix_output: rows(&outs[0]),
            prefix_lse: by_head(&lse_buffers[0]),
            suffix_output: rows(&outs[1]),
            suffix_lse: by_head(&lse_buffers[1]),
            output: View { offset: 1, ..rows(&output) },
            output_lse: Some(by_head(&output_lse)),
            num_tokens: tokens,
            num_heads: heads,
            output_scale: 1.0,
        };
        cpu.once(spec, (), &args).unwrap();
        let got = cpu.download(&output, count as u64 * 4 + 8).unwrap();
        let got_lse = Dtype::F32.decode_all(&cpu.download(&output_lse, 60).unwrap());
        assert_eq!(dtype.decode_at(&got, 0).to_bits(), 0);
        assert_eq!(dtype.decode_at(&got, count + 1).to_bits(), 0);
        let (abs, bytes) = (
            match dtype {
                Dtype::F32 => 2e-6,
                Dtype::F16 => 1e-3,
                _ => 2e-2,
            },
            dtype.bytes(),
        );
        for i in 0..count {
            let row = i / 7 % 3 * 5 + i / 21;
            let [a, b] = [lses[0][row], lses[1][row]];
            let got_bits = &got[(i + 1) * bytes..][..bytes];
            let (want_lse, copied) = match (a.is_finite(), b.is_finite()) {
                (true, true) => {
                    let [wa, wb] = [a, b].map(|x| f64::from(x).exp());
                    let [x, y] = [0, 1].map(|s| f64::from(dtype.decode_at(&data[s], i)));
                    let want = (wa * x + wb * y) / (wa + wb);
                    let error = (f64::from(dtype.decode_at(&got, i + 1)) - want).abs();
                    assert!(error <= abs || error <= abs * want.abs(), "{dtype} {i}: off by {error}");
                    let error = f64::from(got_lse[row]) - (wa + wb).ln();
                    assert!(error.abs() <= 2e-6 * (wa + wb).ln().abs().max(1.0));
                    continue;
                }
                (true, false) => (a, Some(0)),
                (false, true) => (b, Some(1)),
                (false, false) => (f32::NEG_INFINITY, None),
            };
            assert_eq!(got_lse[row].to_bits(), want_lse.to_bits());
            assert_eq!(got_bits, copied.map_or(&[0; 4][..bytes], |s| &data[s][i * bytes..][..bytes]));
        }
        // In place is an error, and so is one buffer for both outputs.
        let in_place = MergeStateArgs { output: rows(&outs[0]), ..args };
        let aliased = cpu.once(spec, (), &in_place);
        assert!(matches!(aliased, Err(Error::Aliased { a: "prefix_output", b: "output" })));
        let both = MergeStateArgs { output_lse: Some(by_head(&output)), ..in_place };
        assert!(cpu.once(spec, (), &both).is_err());
        let no_lse = MergeStateArgs { output_lse: None, output: rows(&output), ..both };
        cpu.once(spec, (), &no_lse).unwrap();
    }
}

fn append_writes_the_bytes_that_the_encoder_gives() {
    let cpu = Cpu::with_threads(2);
    for (l, r) in [(256u32, 32u32), (512, 0)] {
        for kv_dtype in DTYPES {
            for input in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
                let kv = KvSpec { layout: kv_dtype.into(), page_size: 3, num_pages: 4 };
                let spec = KvAppend { shape: shape(1, l, r), kv, input, guard: false };
                let k_scale = if kv_dtype == Dtype::E4m3 { 0.013 } else { 1.0 };
                let slots = [5i64, -1, 0, 11];
                let n = (l + r) as usize;
                let value = |t: usize, i: usize| match (t, i) {
                    (0, 0) => f32::INFINITY,
                    (0, 1) => f32::NEG_INFINITY,
                    (0, 2) => f32::NAN,
                    (2, 3) => 1e4,
                    _ => noise(t as u64, i as u64) * 3.0,
                };
                let rows: Vec<Vec<u8>> = (0..4)
                    .map(|t| input.encode_all(&(0..n).map(|i| value(t, i)).collect::<Vec<_>>()))
                    .collect();
                let cut = l as usize * input.bytes();
                let part = |range: fn(&[u8], usize) -> &[u8]| {
                    let bytes: Vec<u8> = rows.iter().flat_map(|row| range(row, cut).to_vec()).collect();
                    let buffer = cpu.buffer(bytes.len() as u64).unwrap();
                    cpu.upload(&buffer, 0, &bytes).unwrap();
                    buffer
                };
                let (kv_c, k_pe) = (part(|row, cut| &row[..cut]), part(|row, cut| &row[cut..]));
                let row_bytes = n * kv_dtype.bytes();
                let mut want = vec![0xA5; 12 * row_bytes];
                let cache = cpu.buffer(want.len() as u64).unwrap();
                cpu.upload(&cache, 0, &want).unwrap();
                let layer = KvAppendArgs {
                    kv_c: View::dense(&kv_c, 1, l),
                    k_pe: View::dense(&k_pe, 1, r),
                    kv: KvView::dense(
                        &cache,
                        &MlaDecode { shape: spec.shape, kv, query: input, out: Dtype::F32 },
                    ),
                    k_scale,
                    guard: None,
                };
                cpu.once(spec, &slots, &layer).unwrap();
                for (row, &slot) in rows.iter().zip(&slots).filter(|(_, slot)| **slot >= 0) {
                    let encoded = if input == kv_dtype {
                        row.clone()
                    } else {
                        let scaled: Vec<f32> = input.decode_all(row).iter().map(|x| x / k_scale).collect();
                        kv_dtype.encode_all(&scaled)
                    };
                    want[slot as usize * row_bytes..][..row_bytes].copy_from_slice(&encoded);
                }
                assert!(
                    cpu.download(&cache, want.len() as u64).unwrap() == want,
                    "{l}/{r} {input} to {kv_dtype}"
                );

                let out_of_range = cpu.once(spec, &[12], &layer);
                assert!(matches!(out_of_range, Err(Error::SlotOutOfRange { .. })));
                assert!(matches!(cpu.once(spec, &[1, 1], &layer), Err(Error::SlotOverlap { .. })));
                let aliased = KvAppendArgs { kv_c: View { buffer: &cache, ..layer.kv_c }, ..layer };
                let aliased = cpu.once(spec, &[1], &aliased);
                assert!(matches!(aliased, Err(Error::Aliased { a: "kv_c", b: "kv" })), "{aliased:?}");
            }
        }
    }
}

fn pages_are_copied_whole_and_alone() {
    let cpu = Cpu::with_threads(2);
    let kv = KvSpec { layout: Dtype::E4m3.into(), page_size: 3, num_pages: 4 };
    let spec = MlaDecode { kv, ..small_spec() };
    let page = 3 * spec.shape.row_elems() as usize;
    let stride = page + 8;
    let before: Vec<u8> = (0..stride * 8).map(|i| (i % 251) as u8).collect();
    let buffer = cpu.buffer(before.len() as u64).unwrap();
    cpu.upload(&buffer, 0, &before).unwrap();
    let view = KvView {
        buffer: &buffer,
        offset: 8,
        layer_stride: 4 * stride as u64 - 8,
        layer: 1,
        block_stride: stride as u64,
        slabs: wgpu_mla::Slabs::ONE,
    };
    let copy = KvCopyPages { shape: spec.shape, kv };
    cpu.once(copy, &[(0, 3), (1, 2)], &view).unwrap();
    let mut want = before;
    for (from, to) in [(0, 3), (1, 2)] {
        let at = |p: usize| 4 * stride + p * stride;
        want.copy_within(at(from)..at(from) + page, at(to));
    }
    assert!(cpu.download(&buffer, want.len() as u64).unwrap() == want);
    for copies in [&[(0, 4)][..], &[(0, 1), (1, 2)], &[(0, 2), (1, 2)]] {
        assert!(matches!(cpu.once(copy, copies, &view), Err(Error::CopyConflict { .. })));
    }
    let half = MlaShape { kv_lora_rank: 128, qk_rope_head_dim: 16, ..spec.shape };
    assert!(matches!(cpu.once(KvCopyPages { shape: half, kv }, &[], &view), Err(Error::Shape { .. })));
    let long = KvView { layer: 9, ..view };
    assert!(matches!(cpu.once(copy, &[(0, 1)], &long), Err(Error::BufferTooSmall { .. })));
}

crate::tests![
    merge_state_follows_the_spec,
    append_writes_the_bytes_that_the_encoder_gives,
    pages_are_copied_whole_and_alone,
];
