//! Layers that choose what they attend: their lists, their outputs, and what is refused.

use wgpu_mla::{
    Backend, Capacity, Dtype, Error, ExpandedPrefix, IndexFormat, KvLayout, LayerBatch, LayerCapacity,
    LayerIndexer, LayerOptions, MlaLayerArgs, OwnSelection, PagePool, Result, RopeLayout, Selection,
    SplitPolicy, View,
};

use super::Session;
use super::errors::refuses;
use super::layer_rig::spec;
use super::selecting::{MAX_TOKENS, OneSubmit, ROOM, Selecting, Sparse, TOPK};
use super::selecting_arrays::{IndexBuffers, LayerBuffers, list};
use crate::paint::Rng;

/// A model of this dtype over a cache in slabs of so many of its 40 pages.
pub fn sparse(dtype: Dtype, cache: impl Into<KvLayout>, format: IndexFormat, slab_pages: u32) -> Sparse {
    let layer = spec(dtype, cache, RopeLayout::Interleaved, 64);
    Sparse { layer, format, slab_pages, policy: SplitPolicy::FixedTokens(8) }
}

/// Several steps of four layers, one of which makes the list of all: over caches of dtypes and records, in one buffer and in slabs.
pub fn layers_with_lists<B: Backend>(session: &Session<'_, B>) {
    let plain = IndexFormat { dtype: Dtype::Bf16, rope: None, hadamard: false, ue8m0: false };
    let (v32, glm) = (IndexFormat::DEEPSEEK_V32, IndexFormat::GLM_5);
    let all = [
        sparse(Dtype::F32, Dtype::F16, v32, 8),
        Sparse { policy: SplitPolicy::Auto, ..sparse(Dtype::Bf16, Dtype::Bf16, glm, 40) },
        sparse(Dtype::F16, Dtype::E4m3, plain, 40),
        sparse(Dtype::F32, KvLayout::Ds656, glm, 40),
    ];
    for sparse in session.one_in(4, all) {
        let name = format!("{} over {}", sparse.layer.dtype, sparse.layer.kv.layout.name());
        let steps = Selecting::new(session.backend, sparse, Capacity::default(), OneSubmit, 5)
            .and_then(|mut model| model.life());
        match steps {
            Ok(steps) => {
                for (step, result) in steps {
                    session.note(&format!("{name}, {step}"), result);
                }
            }
            Err(Error::LayoutUnsupported { op: "mla_decode", .. }) => session.note(&name, Ok(())),
            Err(error) => session.note(&name, Err(error.to_string())),
        }
    }
    session.finish("layers with lists");
}

/// Options, arguments and batches that do not go together.
pub fn refuses_selections<B: Backend>(session: &Session<'_, B>) {
    let result = refusals(session);
    session.note("refusals", result.map_err(|error| error.to_string()));
    session.finish("refuses selections");
}

fn refusals<B: Backend>(session: &Session<'_, B>) -> Result<()> {
    let backend = session.backend;
    let model = sparse(Dtype::F32, Dtype::F16, IndexFormat::DEEPSEEK_V32, 40);
    let (good, indexer) = (model.options(), model.indexer());
    let compile = |options: &LayerOptions| backend.compile_with(model.layer, options);
    let with = |indexer| LayerOptions { indexer: Some(indexer), ..good.clone() };
    for (what, options, why) in [
        ("an indexer without topk", LayerOptions { topk: 0, ..good.clone() }, "set both"),
        ("no row of scores", with(LayerIndexer { logits_bytes: 4, ..indexer }), "LayerIndexer::logits_bytes"),
        ("too many heads", with(LayerIndexer { num_heads: 65, ..indexer }), "index heads"),
        ("codes for keys", with(LayerIndexer { input: Dtype::E4m3, ..indexer }), "f32, f16 or bf16"),
        ("a long list", LayerOptions { topk: 8193, ..good.clone() }, "8192"),
    ] {
        refuses(session, what, compile(&options), why);
    }

    let (buffers, index) =
        (LayerBuffers::new(backend, &model)?, IndexBuffers::new(backend, &model, &mut Rng(1))?);
    let unread = backend.buffer(1 << 16)?;
    let weight = backend.buffer(model.layer.dims().elements() * 4)?;
    let args = MlaLayerArgs { softmax_scale: 0.1, ..buffers.args(&model, &weight, &unread)? };
    let select = |selection| MlaLayerArgs { selection, ..args.clone() };
    let own = |own| select(Selection::Own(own));
    let mine = index.own(&model)?;
    let layer = compile(&good)?;

    let dense = compile(&LayerOptions { topk: 0, indexer: None, ..good.clone() })?;
    refuses(session, "a list of a dense layer", dense.bind(&own(mine.clone()), ROOM), "LayerOptions::topk");
    let shared = select(Selection::Shared(mine.indices));
    refuses(session, "a shared list of a dense layer", dense.bind(&shared, ROOM), "LayerOptions::topk");
    let sharing = compile(&LayerOptions { indexer: None, ..good.clone() })?;
    sharing.bind(&shared, ROOM)?;
    refuses(session, "no indexer", sharing.bind(&own(mine.clone()), ROOM), "LayerOptions::indexer");

    let small = &backend.buffer(64)?;
    let in_slabs: Vec<_> =
        (0..5).map(|_| backend.buffer(model.index().cache_bytes())).collect::<Result<_>>()?;
    let in_slabs = model.index().view_in_slabs(&in_slabs.iter().collect::<Vec<_>>(), 8, 0)?;
    let kv = args.kv.buffer;
    for (what, selection, why) in [
        ("few keys", OwnSelection { k: View { buffer: small, ..mine.k }, ..mine.clone() }, "selection.k: "),
        (
            "few queries",
            OwnSelection { q: View { buffer: small, ..mine.q }, ..mine.clone() },
            "selection.q: ",
        ),
        ("a short norm", OwnSelection { norm_weight: small, ..mine.clone() }, "selection.norm_weight: "),
        ("a short bias", OwnSelection { norm_bias: small, ..mine.clone() }, "selection.norm_bias: "),
        ("few positions", OwnSelection { cos_sin: small, ..mine.clone() }, "selection.cos_sin: "),
        ("few lists", OwnSelection { indices: list(small), ..mine.clone() }, "selection.indices: "),
        ("another cut", OwnSelection { cache: in_slabs, ..mine.clone() }, "other slabs"),
        (
            "a list in the cache",
            OwnSelection { indices: list(kv), ..mine.clone() },
            "kv and selection.indices",
        ),
        (
            "a list in the output",
            OwnSelection { indices: list(args.out.buffer), ..mine.clone() },
            "out and selection.indices",
        ),
        (
            "a list over the index keys",
            OwnSelection { indices: list(mine.cache.buffer), ..mine.clone() },
            "selection.cache and selection.indices",
        ),
        (
            "a list over queries",
            OwnSelection { indices: list(args.q_nope.buffer), ..mine.clone() },
            "q_nope and selection.indices",
        ),
    ] {
        refuses(session, what, layer.bind(&own(selection), ROOM), why);
    }
    let over_out = select(Selection::Shared(list(args.out.buffer)));
    refuses(session, "a shared list in the output", layer.bind(&over_out, ROOM), "selection.indices and out");

    let mut pool = PagePool::new(model.layer.kv)?;
    let [long, short] = [(); 2].map(|()| pool.add());
    let (arrays, _) = pool.layer_step(&[(short, TOPK), (long, TOPK + 1)])?;
    let mut step = layer.step(Capacity::default())?;
    let batch = arrays.batch();
    layer.prepare(&mut step, (&batch, SplitPolicy::Auto))?;
    layer.run(&step, &layer.bind(&own(mine.clone()), ROOM)?)?;
    let all = layer.bind(&args, ROOM)?;
    refuses(session, "all of a long sequence", layer.run(&step, &all), "Selection::Own or Selection::Shared");
    let near = OwnSelection { max_position: 8, ..mine.clone() };
    let near = layer.bind(&own(near), ROOM)?;
    refuses(session, "positions past a table", layer.run(&step, &near), "max_position");
    let prefix = |sequence| [ExpandedPrefix { sequences: vec![sequence], tokens: 0, first_row: 0 }];
    let mut prepare = |batch: &LayerBatch<'_>| layer.prepare(&mut step, (batch, SplitPolicy::Auto));
    let expanded = LayerBatch { expanded: &prefix(1), ..batch };
    refuses(session, "an expanded prefix", prepare(&expanded), "leave it out of LayerBatch::expanded");
    prepare(&LayerBatch { expanded: &prefix(0), ..batch })?;

    let mut grow = || pool.layer_step(&[(long, MAX_TOKENS)]);
    let (_, (arrays, _)) = (grow()?, grow()?);
    refuses(session, "a sequence past its scores", prepare(&arrays.batch()), "LayerIndexer::max_seq_len");
    let capacity = LayerCapacity { decode_tokens: 4, ..ROOM };
    let few = compile(&LayerOptions { capacity, ..good.clone() })?;
    let other = pool.add();
    let (arrays, _) = pool.layer_step(&[(other, TOPK + 1)])?;
    let why = "LayerCapacity::decode_tokens is 4, 17 are needed";
    let mut step = few.step(Capacity::default())?;
    let prepared = few.prepare(&mut step, (&arrays.batch(), SplitPolicy::Auto));
    refuses(session, "more tokens with lists", prepared, why);
    // Only sequences of at most `topk` tokens: nothing need be chosen.
    let brief = pool.add();
    let (arrays, _) = pool.layer_step(&[(brief, TOPK)])?;
    let mut step = layer.step(Capacity::default())?;
    layer.prepare(&mut step, (&arrays.batch(), SplitPolicy::Auto))?;
    layer.run(&step, &all)
}
