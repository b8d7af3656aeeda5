//! Plans, tables and steps of another spec, pool or batch; and steps that share a submit.

use wgpu_mla::{
    Backend, Batch, Binding, BlockTable, Capacity, Compiled, Dtype, Error, KvSpec, KvView, LayerBatch,
    LayerCapacity, LayerOptions, MlaDecode, MlaLayer, MlaLayerArgs, MlaShape, PagePool, PageTable, Plan,
    RopeLayout, SplitPolicy, Step, View,
};

use super::errors::refuses;
use super::layer_rig::spec;
use super::{Session, run::dense_table};
use crate::paint::{Make, Rng};

/// A plan of other heads or pages, and a block table of another pool.
pub fn refuses_other_specs<B: Backend>(session: &Session<'_, B>) {
    let problem = Make::default().build();
    if !session.serves(&problem.spec) {
        session.leave_out();
        return session.finish("refuses other specs");
    }
    let result = || -> Result<(), Error> {
        let spec = problem.spec;
        let decode = session.decode(&spec)?;
        let batch = Batch::new(&problem.seq_lens, &problem.query_start_loc);
        let (heads, pages) = (spec.shape.num_heads, spec.kv.page_size);
        let fewer = MlaDecode { shape: MlaShape { num_heads: heads - 1, ..spec.shape }, ..spec };
        let larger = MlaDecode { kv: KvSpec { page_size: pages * 2, ..spec.kv }, ..spec };
        let mut step = decode.step(Capacity::default())?;
        for (what, other, why) in [
            (
                "a plan of fewer heads",
                fewer,
                format!("num_heads of the plan is {}, the op was compiled for {heads}", heads - 1),
            ),
            (
                "a plan of other pages",
                larger,
                format!("page_size of the plan is {}, the op was compiled for {pages}", pages * 2),
            ),
        ] {
            let plan = Plan::new(&other, &decode.tiling(), &batch, SplitPolicy::Auto)?;
            refuses(session, what, decode.prepare(&mut step, (&plan, dense_table(&problem))), &why);
        }
        let plan = Plan::new(&spec, &decode.tiling(), &batch, SplitPolicy::Auto)?;
        let (entries, max_pages) = (problem.block_table.clone(), problem.max_pages as u32);
        let table = BlockTable { entries, max_pages, page_size: pages + 1, slab_pages: spec.kv.num_pages };
        let why = format!("page_size of the block table is {}, the op was compiled for {pages}", pages + 1);
        refuses(
            session,
            "a table of other pages",
            decode.prepare(&mut step, (&plan, table.page_table())),
            &why,
        );
        Ok(())
    }();
    session.note("other specs", result.map_err(|error| error.to_string()));
    session.finish("refuses other specs");
}

pub(super) const MAX_TOKENS: u32 = 16;
/// Positions of the RoPE table: fewer than a sequence may have tokens.
const POSITIONS: u32 = 40;

/// A layer with a cache and inputs that do not change, and two outputs.
struct Rig<'a, B: Backend> {
    backend: &'a B,
    layer: Compiled<MlaLayer, B>,
    inputs: Inputs<B>,
    outs: [B::Buffer; 2],
}

/// All that a layer reads, and its cache: drawn at random.
pub(super) struct Inputs<B: Backend>([B::Buffer; 6]);

pub(super) fn compiled<B: Backend>(backend: &B) -> Result<Compiled<MlaLayer, B>, Error> {
    let spec = spec(Dtype::F32, Dtype::F16, RopeLayout::Interleaved, 24);
    let capacity = LayerCapacity { tokens: MAX_TOKENS, decode_tokens: MAX_TOKENS, ..Default::default() };
    backend.compile_with(spec, &LayerOptions { capacity, ..Default::default() })
}

/// Memory for the output of a layer.
pub(super) fn out<B: Backend>(layer: &Compiled<MlaLayer, B>) -> Result<B::Buffer, Error> {
    let spec = layer.op();
    layer.device().buffer(u64::from(MAX_TOKENS * spec.shape.num_heads * spec.v_head_dim) * 4)
}

impl<B: Backend> Inputs<B> {
    pub(super) fn new(layer: &Compiled<MlaLayer, B>, seed: u64) -> Result<Self, Error> {
        let (backend, spec) = (layer.device(), layer.op());
        let (heads, row) = (spec.shape.num_heads, spec.shape.row_elems());
        let MlaLayer { qk_nope_head_dim: nope, v_head_dim: value, .. } = *spec;
        let MlaShape { kv_lora_rank: latent, qk_rope_head_dim: rope, .. } = spec.shape;
        let mut rng = Rng(seed);
        let mut array = |dtype: Dtype, count: u32| {
            let bytes = dtype.encode_all(&(0..count).map(|_| rng.randn() * 0.3).collect::<Vec<_>>());
            let buffer = backend.buffer(bytes.len() as u64)?;
            backend.upload(&buffer, 0, &bytes)?;
            Ok::<_, Error>(buffer)
        };
        Ok(Self([
            array(spec.dtype, MAX_TOKENS * heads * (nope + rope))?,
            array(spec.dtype, MAX_TOKENS * latent)?,
            array(spec.dtype, MAX_TOKENS * rope)?,
            array(spec.kv.dtype(), spec.kv.num_slots() as u32 * row)?,
            array(spec.weight, heads * (nope + value) * latent)?,
            array(Dtype::F32, POSITIONS * rope)?,
        ]))
    }

    /// The bytes of the cache, which steps write.
    pub(super) fn cache(&self, backend: &B) -> Result<Vec<u8>, Error> {
        backend.download(&self.0[3], B::size(&self.0[3]))
    }

    /// What steps left in the cache, which is then as it was before.
    pub(super) fn take_cache(&self, backend: &B, before: &[u8]) -> Result<Vec<u8>, Error> {
        let bytes = self.cache(backend)?;
        backend.upload(&self.0[3], 0, before)?;
        Ok(bytes)
    }

    pub(super) fn bind(
        &self,
        layer: &Compiled<MlaLayer, B>,
        out: &B::Buffer,
    ) -> Result<Binding<MlaLayer, B>, Error> {
        let room = LayerCapacity { tokens: MAX_TOKENS, decode_tokens: MAX_TOKENS, ..Default::default() };
        layer.bind(&self.args(layer.op(), out), room)
    }

    pub(super) fn args<'a>(&'a self, spec: &MlaLayer, out: &'a B::Buffer) -> MlaLayerArgs<&'a B::Buffer> {
        let [q, kv_c, k_pe, kv, kv_b_proj, cos_sin] = &self.0;
        let (heads, nope) = (spec.shape.num_heads, spec.qk_nope_head_dim);
        let q_nope = View::dense(q, heads, nope + spec.shape.qk_rope_head_dim);
        MlaLayerArgs {
            q_nope,
            q_pe: View { offset: nope.into(), ..q_nope },
            kv_c: View::dense(kv_c, 1, spec.shape.kv_lora_rank),
            k_pe: View::dense(k_pe, 1, spec.shape.qk_rope_head_dim),
            kv: KvView::dense(kv, &spec.mla()),
            kv_b_proj,
            kv_b_scales: None,
            cos_sin,
            max_position: POSITIONS,
            out: View::dense(out, heads, spec.v_head_dim),
            softmax_scale: 0.2,
            q_scale: 1.0,
            k_scale: 1.0,
            out_scale: 1.0,
            expanded: None,
            selection: wgpu_mla::Selection::All,
            guard: None,
        }
    }
}

pub(super) struct Arrays {
    seq_lens: Vec<i32>,
    query_start_loc: Vec<i32>,
    slot_mapping: Vec<i64>,
    table: BlockTable,
}

impl Arrays {
    /// Sequences of so many tokens, of which so many are new.
    pub(super) fn new(pool: &mut PagePool, sequences: &[(u32, u32)]) -> Result<Self, Error> {
        let (mut ids, mut tokens, mut query_start_loc) = (Vec::new(), Vec::new(), vec![0]);
        for &(len, q_len) in sequences {
            let id = pool.add();
            pool.append(id, len)?;
            tokens.push((id, len - q_len..len));
            query_start_loc.push(query_start_loc[ids.len()] + q_len as i32);
            ids.push(id);
        }
        Ok(Self {
            seq_lens: pool.seq_lens(&ids)?,
            query_start_loc,
            slot_mapping: pool.slot_mapping(&tokens)?,
            table: pool.block_table(&ids, -1)?,
        })
    }

    /// The sequence and the position of each query token.
    fn tokens(&self) -> impl Iterator<Item = (usize, i32)> {
        self.query_start_loc.windows(2).zip(&self.seq_lens).enumerate().flat_map(|(sequence, (loc, &len))| {
            let new = loc[1] - loc[0];
            (0..new).map(move |i| (sequence, len - new + i))
        })
    }

    pub(super) fn positions(&self) -> Vec<i32> {
        self.tokens().map(|(_, position)| position).collect()
    }

    /// Whether a query token's sequence has at most so many.
    pub(super) fn is_decoded(&self, token: usize, most: u32) -> bool {
        let (sequence, _) = self.tokens().nth(token).expect("a token of the batch");
        self.query_start_loc[sequence + 1] - self.query_start_loc[sequence] <= most as i32
    }

    pub(super) fn batch(&self) -> LayerBatch<'_> {
        LayerBatch {
            seq_lens: &self.seq_lens,
            query_start_loc: &self.query_start_loc,
            slot_mapping: &self.slot_mapping,
            pages: self.table.page_table(),
            shared_prefixes: &[],
            expanded: &[],
        }
    }
}

impl<'a, B: Backend> Rig<'a, B> {
    fn new(backend: &'a B) -> Result<Self, Error> {
        let layer = compiled(backend)?;
        let (inputs, outs) = (Inputs::new(&layer, 7)?, [out(&layer)?, out(&layer)?]);
        Ok(Self { backend, layer, inputs, outs })
    }

    fn bind(&self, out: usize) -> Result<Binding<MlaLayer, B>, Error> {
        self.inputs.bind(&self.layer, &self.outs[out])
    }

    fn bind_with<'b>(
        &'b self,
        out: usize,
        change: impl FnOnce(&mut MlaLayerArgs<&'b B::Buffer>),
    ) -> Result<Binding<MlaLayer, B>, Error> {
        let mut args = self.inputs.args(self.layer.op(), &self.outs[out]);
        change(&mut args);
        let room = LayerCapacity { tokens: MAX_TOKENS, decode_tokens: MAX_TOKENS, ..Default::default() };
        self.layer.bind(&args, room)
    }

    fn step(&self) -> Result<Step<MlaLayer, B>, Error> {
        self.layer.step(Capacity::default())
    }

    /// What both outputs hold; they are zeroed then.
    fn take(&self) -> Result<[Vec<u8>; 2], Error> {
        let bytes = |out: &B::Buffer| {
            let bytes = self.backend.download(out, B::size(out))?;
            self.backend.upload(out, 0, &vec![0; bytes.len()])?;
            Ok::<_, Error>(bytes)
        };
        Ok([bytes(&self.outs[0])?, bytes(&self.outs[1])?])
    }
}

/// A slot mapping that contradicts the block table, and positions past the RoPE table.
pub fn refuses_layer_batches<B: Backend>(session: &Session<'_, B>) {
    let result = || -> Result<(), Error> {
        let rig = Rig::new(session.backend)?;
        let (mut step, binding) = (rig.step()?, rig.bind(0)?);
        for scale in [0.0, 1e-45, 5e-31, 9e29, 3e38, f32::NAN] {
            let bound = rig.bind_with(0, |args| args.softmax_scale = scale);
            refuses(session, "a scale of a layer", bound, "softmax_scale");
        }
        for strides in [(0, 48), (96, 0), (48, 48)] {
            let bound = rig.bind_with(0, |args| {
                (args.q_nope.token_stride, args.q_nope.head_stride) = strides;
            });
            refuses(session, "one query of a layer for several", bound, "q_nope ");
        }
        let bound = rig.bind_with(0, |args| args.kv_c.token_stride = 0);
        refuses(session, "one new row for all", bound, "kv_c 0");
        let mut pool = PagePool::new(rig.layer.op().kv)?;
        let mut arrays = Arrays::new(&mut pool, &[(17, 1), (9, 3)])?;
        let good = arrays.slot_mapping.clone();
        arrays.slot_mapping.swap(0, 1);
        let (slot, want) = (good[1], good[0]);
        let why = format!("slot_mapping[0] = {slot}, but the block table has that token in slot {want}");
        let prepared = rig.layer.prepare(&mut step, (&arrays.batch(), SplitPolicy::Auto));
        refuses(session, "slots of other tokens", prepared, &why);
        arrays.slot_mapping = vec![-1; good.len()];
        rig.layer.prepare(&mut step, (&arrays.batch(), SplitPolicy::Auto))?;
        let BlockTable { entries, max_pages, .. } = arrays.table.clone();
        let pages = PageTable::Pool { block_table: &entries, max_pages, page_size: 9 };
        let prepared =
            rig.layer.prepare(&mut step, (&LayerBatch { pages, ..arrays.batch() }, SplitPolicy::Auto));
        refuses(session, "a table of other pages", prepared, "page_size of the block table is 9");

        for (len, fits) in [(POSITIONS, true), (POSITIONS + 1, false)] {
            let arrays = Arrays::new(&mut pool, &[(len, 2)])?;
            rig.layer.prepare(&mut step, (&arrays.batch(), SplitPolicy::Auto))?;
            let checked = rig.layer.check(&step, &binding);
            if fits {
                checked?;
            } else {
                refuses(session, "a position past the table", checked, "max_position");
                refuses(session, "and recorded", rig.layer.run(&step, &binding), "max_position");
            }
        }
        Ok(())
    }();
    session.note("layer batches", result.map_err(|error| error.to_string()));
    session.finish("refuses layer batches");
}

/// Two steps, and one step that is prepared twice, before a submit: each runs with the tables it was recorded with.
pub fn steps_share_a_submit<B: Backend>(session: &Session<'_, B>) {
    let result = || -> Result<(), Error> {
        let rig = Rig::new(session.backend)?;
        let (policy, layer) = (SplitPolicy::FixedTokens(8), &rig.layer);
        let mut pool = PagePool::new(layer.op().kv)?;
        let batches = [
            Arrays::new(&mut pool, &[(19, 1), (30, 2)])?,
            Arrays::new(&mut pool, &[(33, 1), (21, 7), (9, 1)])?,
        ];
        let bindings = [rig.bind(0)?, rig.bind(1)?];
        let mut steps = [rig.step()?, rig.step()?];
        for i in 0..2 {
            layer.prepare(&mut steps[i], (&batches[i].batch(), policy))?;
            layer.run(&steps[i], &bindings[i])?;
        }
        let want = rig.take()?;
        let check = |what: &str| {
            let same = rig.take()? == want;
            session.note(what, if same { Ok(()) } else { Err("not what each gives alone".to_owned()) });
            Ok::<_, Error>(())
        };
        layer.prepare(&mut steps[0], (&batches[0].batch(), policy))?;
        layer.prepare(&mut steps[1], (&batches[1].batch(), policy))?;
        session.backend.submit(|mut recorder| {
            layer.record_on(&mut recorder, &steps[0], &bindings[0])?;
            layer.record_on(&mut recorder, &steps[1], &bindings[1])
        })?;
        check("two steps")?;
        let step = &mut steps[0];
        session.backend.submit(|mut recorder| {
            for _ in 0..3 {
                for (batch, binding) in batches.iter().zip(&bindings) {
                    layer.prepare(step, (&batch.batch(), policy))?;
                    layer.record_on(&mut recorder, step, binding)?;
                }
            }
            Ok(())
        })?;
        check("one step, prepared again and again")
    }();
    session.note("steps", result.map_err(|error| error.to_string()));
    session.finish("steps share a submit");
}
