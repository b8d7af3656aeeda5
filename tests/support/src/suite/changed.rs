//! Plans whose public fields a host has changed: each is refused, or runs inside of its buffers.

use wgpu_mla::plan::WorkItem;
use wgpu_mla::{Backend, Batch, Capacity, Dtype, Error, MlaDecodeArgs, Plan, SlabTable, SplitPolicy};

use super::Session;
use super::errors::refuses;
use super::memory::{Pages, download, upload};
use super::run::{Layout, Output, dense_table};
use crate::paint::{Make, POISON, Problem, sequences};

/// What a host may write into a field: in range, just past it, and far away.
const VALUES: [u32; 6] = [0, 1, 37, 1 << 16, 1 << 30, u32::MAX];

type Change = (&'static str, fn(&mut Plan, u32));

fn item(plan: &mut Plan) -> &mut WorkItem {
    &mut plan.items[0]
}

const CHANGES: [Change; 18] = [
    ("items.first_row", |plan, value| item(plan).first_row = value),
    ("items.num_rows", |plan, value| item(plan).num_rows = value),
    ("items.page_begin", |plan, value| item(plan).page_begin = value),
    ("items.kv_begin", |plan, value| item(plan).kv_begin = value),
    ("items.kv_end", |plan, value| item(plan).kv_end = value),
    ("items.partial", |plan, value| item(plan).partial = value),
    ("items.pool", |plan, value| item(plan).pool = value),
    ("items.reserved", |plan, value| item(plan).reserved = value),
    ("queries.token", |plan, value| plan.queries[0].token = value),
    ("queries.visible", |plan, value| plan.queries[0].visible = value),
    ("merges.token", |plan, value| plan.merges[0].token = value),
    ("merges.begin", |plan, value| plan.merges[0].begin = value),
    ("merges.end", |plan, value| plan.merges[0].end = value),
    ("merge_partials", |plan, value| plan.merge_partials[0] = value),
    ("num_partials", |plan, value| plan.num_partials = value),
    ("seq_lens", |plan, value| plan.seq_lens[0] = value),
    ("page_begin", |plan, value| plan.page_begin[1] = value),
    ("shared", |plan, value| plan.shared.push((0, value, 1 + value % 40))),
];

/// Whole fields, each with what the check says of it.
const FIELDS: [(Change, &str); 4] = [
    (("num_queries", |plan, value| plan.num_queries = value), "more query tokens"),
    (("num_heads", |plan, value| plan.num_heads = value), "num_heads of the plan"),
    (("page_size", |plan, value| plan.page_size = value), "page_size of the plan"),
    (("no sequences", |plan, _| (plan.seq_lens, plan.page_begin) = (vec![], vec![])), "plan of items"),
];

/// Every public field with every value: refused, or run without a write outside of its arrays. A plan that nobody changed is right after
/// all of them.
pub fn changed_plans<B: Backend>(session: &Session<'_, B>) {
    let sequences = sequences(&[(37, 1), (90, 2)]);
    let Some(problem) = served(session, &Make { sequences, ..Make::default() }) else {
        return session.finish("changed plans");
    };
    let result = || -> Result<(), Error> {
        let rig = Rig::new(session, &problem)?;
        for (what, change) in CHANGES {
            for value in VALUES {
                let mut changed = rig.plan.clone();
                change(&mut changed, value);
                session.note(&format!("{what} {value}"), rig.run(&changed).map(drop));
            }
        }
        for ((what, change), why) in FIELDS {
            let mut changed = rig.plan.clone();
            change(&mut changed, 1 << 10);
            refuses(session, what, rig.refused(&changed), why);
        }
        session.note("a step that could not grow", rig.could_not_grow().map_err(|error| error.to_string()));
        session
            .note("the plan as it was", rig.run(&rig.plan).and_then(|ran| ran.ok_or("refused".to_owned())));
        Ok(())
    }();
    session.note("changed plans", result.map_err(|error| error.to_string()));
    session.finish("changed plans");
}

/// The parts of a plan over slabs are no plans of a step, and may be planned anew.
pub fn plans_of_one_slab<B: Backend>(session: &Session<'_, B>) {
    let Some(problem) = served(session, &Make::default()) else { return session.finish("plans of one slab") };
    let result = || -> Result<(), Error> {
        let rig = Rig::new(session, &problem)?;
        let slab_pages = problem.spec.kv.num_pages.div_ceil(2);
        let slabs = Some(SlabTable { pages: dense_table(&problem), slab_pages });
        let batch = Batch { slabs, ..Batch::new(&problem.seq_lens, &problem.query_start_loc) };
        let tiling = session.decode(&problem.spec)?.tiling();
        let plan = Plan::new(&problem.spec, &tiling, &batch, SplitPolicy::Auto)?;
        let [first, _] = plan.slabs() else { unreachable!("two slabs") };
        refuses(session, "the plan of a slab", rig.refused(first.plan()), "the plan is of one slab");
        let mut again = first.plan().clone();
        again.update(&problem.spec, &tiling, &Batch { slabs: None, ..batch }, SplitPolicy::Auto)?;
        session.note("planned anew", rig.run(&again).and_then(|ran| ran.ok_or("refused".to_owned())));
        Ok(())
    }();
    session.note("plans of one slab", result.map_err(|error| error.to_string()));
    session.finish("plans of one slab");
}

/// A problem of dims and dtypes that the session's variant serves.
fn served<B: Backend>(session: &Session<'_, B>, make: &Make) -> Option<Problem> {
    let dtypes = [(Dtype::F32, (256, 32)), (Dtype::Bf16, (512, 64)), (Dtype::E4m3, (512, 64))];
    let build = |(dtype, dims)| Make { cache: dtype, query: dtype, dims, ..make.clone() }.build();
    let problem = dtypes.map(build).into_iter().find(|problem| session.serves(&problem.spec));
    if problem.is_none() {
        session.leave_out();
    }
    problem
}

/// A problem's arrays, with gaps around the results.
struct Rig<'a, 's, B: Backend> {
    session: &'a Session<'s, B>,
    problem: &'a Problem,
    plan: Plan,
    q: B::Buffer,
    kv: B::Buffer,
}

impl<'a, 's, B: Backend> Rig<'a, 's, B> {
    fn new(session: &'a Session<'s, B>, problem: &'a Problem) -> Result<Self, Error> {
        let (spec, backend) = (&problem.spec, session.backend);
        let batch = Batch::new(&problem.seq_lens, &problem.query_start_loc);
        let tiling = session.decode(spec)?.tiling();
        let plan = Plan::new(spec, &tiling, &batch, SplitPolicy::FixedTokens(32))?;
        Ok(Self {
            session,
            problem,
            plan,
            q: upload(backend, &problem.q)?,
            kv: upload(backend, &problem.kv)?,
        })
    }

    /// Prepares a step with a plan, for a binding of the batch's query tokens.
    fn refused(&self, plan: &Plan) -> Result<(), Error> {
        let (problem, backend) = (self.problem, self.session.backend);
        let (spec, tokens) = (&problem.spec, problem.total_q() as u32);
        let decode = self.session.decode(spec)?;
        let (out, lse) = (backend.buffer(spec.out_bytes(tokens))?, backend.buffer(spec.lse_bytes(tokens))?);
        let args = MlaDecodeArgs::dense(spec, &self.q, &self.kv, &out, &lse, problem.softmax_scale);
        let binding = decode.bind(&args, tokens)?;
        let mut step = decode.step(Capacity::default())?;
        decode.prepare(&mut step, (plan, dense_table(problem)))?;
        decode.run(&step, &binding)
    }

    /// A step that no memory was left for serves the next plan.
    fn could_not_grow(&self) -> Result<(), Error> {
        let decode = self.session.decode(&self.problem.spec)?;
        let mut step = decode.step(Capacity::default())?;
        let mut large = self.plan.clone();
        large.num_partials = u32::MAX;
        // Terabytes, which a system may promise all the same.
        let _ = decode.prepare(&mut step, (&large, dense_table(self.problem)));
        decode.prepare(&mut step, (&self.plan, dense_table(self.problem)))
    }

    /// Runs a plan; `None` where it is refused.
    fn run(&self, plan: &Plan) -> Result<Option<()>, String> {
        let wrong = |error: Error| error.to_string();
        let (problem, backend) = (self.problem, self.session.backend);
        let spec = &problem.spec;
        let decode = self.session.decode(spec).map_err(wrong)?;
        let (tokens, heads) = (problem.total_q(), spec.shape.num_heads as usize);
        let out = Output::new([tokens, heads, spec.shape.kv_lora_rank as usize], spec.out, Layout::Gaps, 8);
        let lse = Output::new([tokens, heads, 1], Dtype::F32, Layout::Gaps, 1);
        let mut step = decode.step(Capacity::default()).map_err(wrong)?;
        match decode.prepare(&mut step, (plan, dense_table(problem))) {
            Ok(()) => {}
            Err(error @ (Error::Internal { .. } | Error::DeviceLost { .. })) => return Err(wrong(error)),
            Err(_) => return Ok(None),
        }
        let [outs, lses] = [&out, &lse].map(|array| upload(backend, &vec![POISON; array.len]).map_err(wrong));
        let (outs, lses) = (outs?, lses?);
        let row = spec.shape.row_elems() as usize;
        let args = MlaDecodeArgs {
            kv: Pages::dense(&spec.kv, row).view(&self.kv),
            out: out.strides.view(&outs),
            lse: lse.strides.view(&lses),
            ..MlaDecodeArgs::dense(spec, &self.q, &self.kv, &outs, &lses, problem.softmax_scale)
        };
        let binding = decode.bind(&args, tokens as u32).map_err(wrong)?;
        decode.run(&step, &binding).map_err(wrong)?;
        out.read(backend, &outs)?;
        lse.read(backend, &lses)?;
        let kv = download(backend, &self.kv, problem.kv.len()).map_err(wrong)?;
        let guard = kv.strip_prefix(&problem.kv[..]).filter(|guard| guard.iter().all(|&byte| byte == POISON));
        guard.map(|_| Some(())).ok_or("the cache was written".to_owned())
    }
}
