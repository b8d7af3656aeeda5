//! Ranks that were set up as others: nothing may be exchanged.

use std::cell::Cell;

use wgpu_mla::communicator::{Communicator, StepDigest};
use wgpu_mla::{
    Backend, CombineForm, ContextParallel, ContextParallelSpec, Dtype, Error, KvSpec, KvView, LseBase,
    MlaDecode, MlaShape, Query, View,
};

use super::Session;
use super::errors::refuses;

/// An engine that says where it is, and counts exchanges: it has no other ranks.
struct Place {
    rank: u32,
    world: u32,
    exchanges: Cell<u32>,
}

impl<B: Backend> Communicator<B> for Place {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn world(&self) -> u32 {
        self.world
    }

    fn all_gather_host(&self, mine: &[u8]) -> Result<Vec<u8>, Error> {
        self.exchanges.set(self.exchanges.get() + 1);
        Ok(mine.repeat(self.world as usize))
    }
}

/// Another rank or world than the communicator's, in every form.
pub fn refuses_other_ranks<B: Backend>(session: &Session<'_, B>) {
    let result = || -> Result<(), Error> {
        for form in [CombineForm::AllToAll, CombineForm::AllGatherReduceScatter, CombineForm::AllGather] {
            // For one token an all-to-all is made as an all-gather, for 200 it is not.
            for (max_tokens, world) in [(1, 2), (200, 2), (1, 1)] {
                let (num_heads, kv_lora_rank, out, lse_base) = (4, 256, Dtype::F32, LseBase::E);
                let spec = ContextParallelSpec {
                    num_heads,
                    kv_lora_rank,
                    out,
                    lse_base,
                    rank: 0,
                    world,
                    max_tokens,
                    form,
                };
                let mut cp = ContextParallel::new(session.backend, spec)?;
                cp.prepare(1)?;
                let at = |rank, world| Place { rank, world, exchanges: Cell::default() };
                for (place, why) in [
                    (at(1, 2), if world == 2 { "has 0 and 1 as rank" } else { "has 1 and 2 as world" }),
                    (at(1, 1), if world == 2 { "has 2 and 1 as world" } else { "has 0 and 1 as rank" }),
                    (at(0, 4), "and 4 as world"),
                    (at(u32::MAX, world), "has 0 and 4294967295 as rank"),
                ] {
                    let what = format!("{form:?} of {world}, at {} of {}", place.rank, place.world);
                    refuses(session, &what, cp.combine(&place), why);
                    let exchanges = place.exchanges.get();
                    let none = if exchanges == 0 { Ok(()) } else { Err(format!("{exchanges} exchanges")) };
                    session.note(&format!("{what} exchanges nothing"), none);
                    refuses(session, &what, cp.digest().agree(&place as &dyn Communicator<B>), "world");
                }
                let own = at(0, world);
                session.note("its own place", cp.combine(&own).map_err(|error| error.to_string()));
            }
        }
        Ok(())
    }();
    session.note("context parallel", result.map_err(|error| error.to_string()));
    session.finish("refuses other ranks");
}

/// The arguments that a [`ContextParallel`] makes are those that its buffers and its spec need.
pub fn decode_arguments<B: Backend>(session: &Session<'_, B>) {
    let result = || -> Result<(), Error> {
        let backend = session.backend;
        let shape = MlaShape { num_heads: 4, kv_lora_rank: 256, qk_rope_head_dim: 32 };
        let kv = KvSpec { layout: Dtype::F32.into(), page_size: 4, num_pages: 2 };
        let decode = MlaDecode { shape, kv, query: Dtype::F32, out: Dtype::F32 };
        let [q, cache] = [backend.buffer(decode.query_bytes(3))?, backend.buffer(decode.cache_bytes())?];
        for lse_base in [LseBase::E, LseBase::Two] {
            let spec = ContextParallelSpec { lse_base, ..ContextParallelSpec::of(&decode, 0, 1, 3) };
            let cp = ContextParallel::new(backend, spec)?;
            let args =
                cp.decode_args(Query::Whole(View::dense(&q, 4, 288)), KvView::dense(&cache, &decode), 0.1);
            let is_right = args.lse_base == lse_base
                && (args.out.token_stride, args.out.head_stride) == (256, 3 * 256)
                && (args.lse.token_stride, args.lse.head_stride) == (1, 3)
                && [args.softmax_scale, args.k_scale, args.q_scale] == [0.1, 1.0, 1.0];
            session.note("arguments", if is_right { Ok(()) } else { Err(format!("{args:?}")) });
            let compiled = backend.compile(decode)?;
            session.note("binds", compiled.bind(&args, 3).map(drop).map_err(|error| error.to_string()));
            let own = Place { rank: 0, world: 1, exchanges: Cell::default() };
            let digest: StepDigest = cp.digest().spec(&decode).layer(&args);
            let agreed = digest.agree(&own as &dyn Communicator<B>);
            session.note("agrees", agreed.map_err(|error| error.to_string()));
        }
        Ok(())
    }();
    session.note("decode arguments", result.map_err(|error| error.to_string()));
    session.finish("decode arguments");
}
