//! Layers whose sequences share pages or memory: what is right, and what is refused with the layer's own words.

use wgpu_mla::{
    Backend, BlockTable, Compiled, Dtype, Error, ExpandBatch, Expanded, ExpandedPrefix, KvSpec, LayerBatch,
    LayerCapacity, LayerOptions, MlaExpand, MlaExpandArgs, MlaLayer, MlaLayerArgs, PagePool, PageTable,
    RopeLayout, SplitPolicy, View,
};

use super::Session;
use super::errors::refuses;
use super::layer_rig::{Rig, Submitted, spec};
use super::mixed::{Inputs, MAX_TOKENS, out};

const PREFIX_ROWS: u32 = 16;
const ROOM: LayerCapacity = LayerCapacity {
    tokens: MAX_TOKENS,
    decode_tokens: 4,
    prefix_rows: PREFIX_ROWS,
    positions: 0,
    listed_tokens: 0,
};

fn compiled<B: Backend>(backend: &B) -> Result<Compiled<MlaLayer, B>, Error> {
    let spec = spec(Dtype::F32, Dtype::F16, RopeLayout::Interleaved, 24);
    backend.compile_with(spec, &LayerOptions { capacity: ROOM, ..LayerOptions::default() })
}

/// Prompts that share pages have more tokens in all than the pool: they take more chunks, whatever the workspace.
pub fn prompts_share_pages<B: Backend>(session: &Session<'_, B>) {
    for (policy, rows) in
        [(SplitPolicy::Auto, 1024), (SplitPolicy::Auto, 16), (SplitPolicy::FixedTokens(8), 1024)]
    {
        let result = || -> Result<_, Error> {
            let spec = spec(Dtype::F32, Dtype::F16, RopeLayout::Interleaved, rows);
            let spec = MlaLayer { kv: KvSpec { num_pages: 7, ..spec.kv }, ..spec };
            let mut rig = Rig::new(session.backend, spec, 0, Submitted, 3)?;
            let a = rig.pool.add();
            let first = rig.step(&[(a, 32)], policy, None)?;
            let (b, c) = (rig.pool.fork(a)?, rig.pool.fork(a)?);
            Ok([first, rig.step(&[(a, 5), (b, 3), (c, 6)], policy, None)?])
        };
        let name = format!("{policy:?}, {rows} rows");
        match result() {
            Ok(steps) => steps.iter().for_each(|step| session.note(&name, step.check())),
            Err(error) => session.note(&name, Err(error.to_string())),
        }
    }
    session.finish("prompts share pages");
}

/// Arrays that are parts of one buffer must not overlap.
pub fn refuses_overlaps<B: Backend>(session: &Session<'_, B>) {
    let result = || -> Result<(), Error> {
        let layer = compiled(session.backend)?;
        let spec = *layer.op();
        let (inputs, output) = (Inputs::new(&layer, 3)?, out(&layer)?);
        let bytes = spec.expanded_bytes(PREFIX_ROWS);
        let array = |bytes: u64| session.backend.buffer(bytes);
        let arrays = [array(bytes[0])?, array(bytes[1])?, array(bytes[2])?];
        let expanded = Expanded::dense(&spec, arrays.each_ref());
        let good = MlaLayerArgs { expanded: Some(expanded), ..inputs.args(&spec, &output) };
        layer.bind(&good, ROOM)?;
        let out_in =
            |buffer, offset| MlaLayerArgs { out: View { buffer, offset, ..good.out }, ..good.clone() };
        let with = |expanded| MlaLayerArgs { expanded: Some(expanded), ..good.clone() };
        let swap = |buffer| View { buffer, ..expanded.k_nope };
        let kv = good.kv.buffer;
        for (what, args, why) in [
            ("out in the cache", out_in(kv, 0), "kv and out"),
            ("out further in the cache", out_in(kv, 1024), "kv and out"),
            ("out over kv_c", out_in(good.kv_c.buffer, 8), "kv_c and out"),
            ("out over cos_sin", out_in(good.cos_sin, 0), "cos_sin and out"),
            ("out in q", out_in(good.q_nope.buffer, 0), "q_nope and out"),
            ("out in the weights", out_in(good.kv_b_proj, 0), "kv_b_proj and out"),
            (
                "expanded keys in out",
                with(Expanded { k_nope: swap(&output), ..expanded }),
                "expanded.k_nope and out",
            ),
            (
                "expanded keys in the cache",
                with(Expanded { k_nope: swap(kv), ..expanded }),
                "expanded.k_nope and kv",
            ),
            (
                "expanded rows in the cache",
                with(Expanded { rows: View { buffer: kv, ..expanded.rows }, ..expanded }),
                "expanded.rows and kv",
            ),
            (
                "expanded values in out",
                with(Expanded { v: View { buffer: &output, ..expanded.v }, ..expanded }),
                "expanded.v and out",
            ),
        ] {
            refuses(session, what, layer.bind(&args, ROOM), why);
        }
        let op = session.backend.compile(MlaExpand(spec))?;
        let MlaLayerArgs { kv: cache, k_scale, kv_b_proj, kv_b_scales, .. } = good.clone();
        let good = MlaExpandArgs { kv: cache, k_scale, kv_b_proj, kv_b_scales, expanded };
        op.bind(&good, PREFIX_ROWS)?;
        for (what, expanded, why) in [
            ("keys in the cache", Expanded { k_nope: swap(kv), ..expanded }, "kv and expanded.k_nope"),
            (
                "keys in the rows",
                Expanded { k_nope: swap(expanded.rows.buffer), ..expanded },
                "expanded.rows and expanded.k_nope",
            ),
            (
                "keys in the weights",
                Expanded { k_nope: swap(kv_b_proj), ..expanded },
                "kv_b_proj and expanded.k_nope",
            ),
        ] {
            refuses(session, what, op.bind(&MlaExpandArgs { expanded, ..good.clone() }, PREFIX_ROWS), why);
        }
        Ok(())
    }();
    session.note("overlaps", result.map_err(|error| error.to_string()));
    session.finish("refuses overlaps");
}

/// The output behind the latent rows, in one buffer, which no op of a layer reads and writes: as in two.
pub fn arrays_share_a_buffer<B: Backend>(session: &Session<'_, B>) {
    let result = || -> Result<(), Error> {
        let layer = compiled(session.backend)?;
        let (spec, backend) = (*layer.op(), session.backend);
        let mut pool = PagePool::new(spec.kv)?;
        let seq = pool.add();
        pool.append(seq, 5)?;
        let table = pool.block_table(&[seq], -1)?;
        let slots = pool.slot_mapping(&[(seq, 2..5)])?;
        let batch = LayerBatch {
            seq_lens: &[5],
            query_start_loc: &[0, 3],
            slot_mapping: &slots,
            pages: table.page_table(),
            shared_prefixes: &[],
            expanded: &[],
        };
        let mut step = layer.step(Default::default())?;
        layer.prepare(&mut step, (&batch, SplitPolicy::Auto))?;
        let bytes = u64::from(3 * spec.shape.num_heads * spec.v_head_dim) * 4;
        let (inputs, output) = (Inputs::new(&layer, 5)?, out(&layer)?);
        let good = inputs.args(&spec, &output);
        let room = LayerCapacity { prefix_rows: 0, ..ROOM };
        layer.run(&step, &layer.bind(&good, room)?)?;
        let want = backend.download(&output, bytes)?;

        let kv_c_bytes = u64::from(MAX_TOKENS * spec.shape.kv_lora_rank) * 4;
        let both = backend.buffer(kv_c_bytes + B::size(&output))?;
        backend.upload(&both, 0, &backend.download(good.kv_c.buffer, kv_c_bytes)?)?;
        let out = View { buffer: &both, offset: kv_c_bytes / 4, ..good.out };
        let args = MlaLayerArgs { kv_c: View { buffer: &both, ..good.kv_c }, out, ..good };
        layer.run(&step, &layer.bind(&args, room)?)?;
        let got = backend.download(&both, kv_c_bytes + bytes)?;
        let same = got[kv_c_bytes as usize..] == want;
        session.note("one buffer", if same { Ok(()) } else { Err("not what two buffers give".to_owned()) });
        Ok(())
    }();
    session.note("one buffer", result.map_err(|error| error.to_string()));
    session.finish("arrays share a buffer");
}

/// Errors of a bind name the layer's arguments, not those of its ops.
pub fn names_layer_arguments<B: Backend>(session: &Session<'_, B>) {
    let result = || -> Result<(), Error> {
        let layer = compiled(session.backend)?;
        let spec = *layer.op();
        let (inputs, output) = (Inputs::new(&layer, 3)?, out(&layer)?);
        let bytes = spec.expanded_bytes(PREFIX_ROWS);
        let array = |bytes: u64| session.backend.buffer(bytes);
        let arrays = [array(bytes[0])?, array(bytes[1])?, array(bytes[2])?];
        let small = &session.backend.buffer(64)?;
        let expanded = Expanded::dense(&spec, arrays.each_ref());
        let good = MlaLayerArgs { expanded: Some(expanded), ..inputs.args(&spec, &output) };
        let odd = View { offset: 4, ..good.out };
        let (overlapping, too_small) = (View { token_stride: 8, ..good.out }, "the view ends at byte");
        let with = |expanded| MlaLayerArgs { expanded: Some(expanded), ..good.clone() };
        for (args, why) in [
            (MlaLayerArgs { kv_b_proj: small, ..good.clone() }, format!("kv_b_proj: {too_small}")),
            (MlaLayerArgs { cos_sin: small, ..good.clone() }, format!("cos_sin: {too_small}")),
            (
                MlaLayerArgs { q_nope: View { buffer: small, ..good.q_nope }, ..good.clone() },
                format!("q_nope: {too_small}"),
            ),
            (
                MlaLayerArgs { q_pe: View { buffer: small, ..good.q_pe }, ..good.clone() },
                format!("q_pe: {too_small}"),
            ),
            (
                MlaLayerArgs { out: View { buffer: small, ..good.out }, ..good.clone() },
                format!("out: {too_small}"),
            ),
            (MlaLayerArgs { out: odd, ..good.clone() }, "out 4: must be a multiple of 8".to_owned()),
            (MlaLayerArgs { out: overlapping, ..good.clone() }, "out 8: token and head strides".to_owned()),
            (
                with(Expanded { v: View { buffer: small, ..expanded.v }, ..expanded }),
                format!("expanded.v: {too_small}"),
            ),
            (
                with(Expanded { k_nope: View { buffer: small, ..expanded.k_nope }, ..expanded }),
                format!("expanded.k_nope: {too_small}"),
            ),
            (
                with(Expanded { rows: View { buffer: small, ..expanded.rows }, ..expanded }),
                format!("expanded.rows: {too_small}"),
            ),
        ] {
            refuses(session, &why, layer.bind(&args, ROOM), &why);
        }
        let op = session.backend.compile(MlaExpand(spec))?;
        let MlaLayerArgs { kv, k_scale, kv_b_proj, kv_b_scales, .. } = good.clone();
        let good = MlaExpandArgs { kv, k_scale, kv_b_proj, kv_b_scales, expanded };
        for (args, why) in [
            (MlaExpandArgs { kv_b_proj: small, ..good.clone() }, "kv_b_proj: the view"),
            (
                MlaExpandArgs {
                    expanded: Expanded { v: View { buffer: small, ..expanded.v }, ..expanded },
                    ..good.clone()
                },
                "expanded.v: the view",
            ),
            (
                MlaExpandArgs {
                    expanded: Expanded { k_nope: View { buffer: small, ..expanded.k_nope }, ..expanded },
                    ..good.clone()
                },
                "expanded.k_nope: the view",
            ),
            (
                MlaExpandArgs {
                    expanded: Expanded { rows: View { buffer: small, ..expanded.rows }, ..expanded },
                    ..good
                },
                "expanded.rows: the view",
            ),
        ] {
            refuses(session, why, op.bind(&args, PREFIX_ROWS), why);
        }
        let mut step = op.step(())?;
        let few = op.prepare(&mut step, ExpandBatch { pages: &[3], tokens: 9, first_row: 0 });
        refuses(session, "too few pages", few, "ExpandBatch::pages has 1 entries, 2 are needed");
        Ok(())
    }();
    session.note("names", result.map_err(|error| error.to_string()));
    session.finish("names of a layer's arguments");
}

/// Batches whose sequences share pages as they must not, and those that a layer is too small for.
pub fn refuses_shared_pages<B: Backend>(session: &Session<'_, B>) {
    let result = || -> Result<(), Error> {
        let layer = compiled(session.backend)?;
        let mut step = layer.step(Default::default())?;
        let mut prepare = |batch: &LayerBatch<'_>| layer.prepare(&mut step, (batch, SplitPolicy::Auto));
        let nothing = LayerBatch {
            seq_lens: &[],
            query_start_loc: &[0],
            slot_mapping: &[],
            pages: PageTable::Dense { block_table: &[], max_pages: 0 },
            shared_prefixes: &[],
            expanded: &[],
        };
        // Pages of 8 tokens. Both have page 5 second, and write to it.
        let table = |entries: &[i32]| {
            let (entries, max_pages) = (entries.to_vec(), entries.len() as u32 / 2);
            BlockTable { entries, max_pages, page_size: 8, slab_pages: 40 }
        };
        let (both, apart) = (table(&[1, 5, 2, 5]), table(&[1, 5, 1, 6]));
        let two = LayerBatch { seq_lens: &[10, 11], query_start_loc: &[0, 1, 2], ..nothing };
        let written = LayerBatch { slot_mapping: &[41, 42], pages: both.page_table(), ..two };
        refuses(
            session,
            "one page, two writers",
            prepare(&written),
            "sequences 0 and 1 both write to page 5",
        );
        prepare(&LayerBatch { slot_mapping: &[41, -1], ..written })?;
        prepare(&LayerBatch { slot_mapping: &[41, 50], pages: apart.page_table(), ..two })?;

        let of = |tokens| [ExpandedPrefix { sequences: vec![0, 1], tokens, first_row: 0 }];
        let read = LayerBatch { slot_mapping: &[-1, -1], ..two };
        prepare(&LayerBatch { pages: apart.page_table(), expanded: &of(8), ..read })?;
        let differs = prepare(&LayerBatch { pages: both.page_table(), expanded: &of(8), ..read });
        refuses(
            session,
            "a prefix in other pages",
            differs,
            "block 0 of sequences 0 and 1 is not the same page",
        );
        for given_up in [[-1, 5, -1, 6], [-1, 5, 1, 6], [1, 5, -1, 6]] {
            prepare(&LayerBatch { pages: table(&given_up).page_table(), expanded: &of(8), ..read })?;
        }
        let outside = table(&[40, 5, 40, 6]);
        let outside = prepare(&LayerBatch { pages: outside.page_table(), expanded: &of(8), ..read });
        refuses(session, "a prefix outside of the pool", outside, "page 40 is not in the pool");

        let kv_indptr = [0, 2, 1];
        let pages = PageTable::Csr { kv_indptr: &kv_indptr, kv_indices: &[1, 5, 6] };
        refuses(
            session,
            "a kv_indptr that goes down",
            prepare(&LayerBatch { pages, ..read }),
            "kv_indptr[2] = 1",
        );

        let five = LayerBatch {
            seq_lens: &[1; 5],
            query_start_loc: &[0, 1, 2, 3, 4, 5],
            slot_mapping: &[-1; 5],
            ..nothing
        };
        let pages = PageTable::Dense { block_table: &[0, 1, 2, 3, 4], max_pages: 1 };
        let why = "LayerCapacity::decode_tokens is 4, 5 are needed: compile the layer with more";
        refuses(session, "more decodes", prepare(&LayerBatch { pages, ..five }), why);
        let last =
            LayerBatch { seq_lens: &[4, 1], query_start_loc: &[0, 4, 5], slot_mapping: &[-1; 5], ..nothing };
        let pages = PageTable::Dense { block_table: &[0, 1], max_pages: 1 };
        let why = "LayerCapacity::decode_tokens is 4, 5 are needed: put decodes first";
        refuses(session, "a decode behind a prompt", prepare(&LayerBatch { pages, ..last }), why);
        Ok(())
    }();
    session.note("batches", result.map_err(|error| error.to_string()));
    session.finish("refuses shared pages");
}

/// A workspace that holds less than a page is refused at once; none is a layer that only decodes.
pub fn workspace_bytes<B: Backend>(session: &Session<'_, B>) {
    let result = || -> Result<(), Error> {
        let spec = spec(Dtype::F32, Dtype::F16, RopeLayout::Interleaved, 0);
        let options = LayerOptions { capacity: ROOM, ..LayerOptions::default() };
        let page = 8 * spec.workspace_row_bytes();
        for workspace_bytes in [1, page - 1] {
            let small = MlaLayer { workspace_bytes, ..spec };
            let why = format!("MlaLayer::workspace_bytes is {workspace_bytes}, {page} are needed");
            refuses(session, &why, session.backend.compile_with(small, &options), &why);
        }
        let layer = session.backend.compile_with(spec, &options)?;
        let mut step = layer.step(Default::default())?;
        let mut prepare = |query_start_loc: &[i32]| {
            let tokens = query_start_loc[1] as usize;
            let batch = LayerBatch {
                seq_lens: &[7],
                query_start_loc,
                slot_mapping: &vec![-1; tokens],
                pages: PageTable::Dense { block_table: &[4], max_pages: 1 },
                shared_prefixes: &[],
                expanded: &[],
            };
            layer.prepare(&mut step, (&batch, SplitPolicy::Auto))
        };
        refuses(session, "a prompt without a workspace", prepare(&[0, 3]), "workspace_bytes 0");
        prepare(&[0, 2])?;
        let (inputs, output) = (Inputs::new(&layer, 3)?, out(&layer)?);
        let room = LayerCapacity { prefix_rows: 0, ..ROOM };
        layer.run(&step, &layer.bind(&inputs.args(layer.op(), &output), room)?)
    }();
    session.note("workspaces", result.map_err(|error| error.to_string()));
    session.finish("bytes of a workspace");
}
