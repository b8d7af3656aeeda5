//! Which exchanges join the partial results of ranks.

/// How partial results are exchanged. All give the same numbers, within rounding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum CombineForm {
    /// LSEs are gathered, each rank scales its output by its weight, and the outputs are summed, heads scattered over the ranks: vLLM's
    /// `cp_lse_ag_out_rs`. Two exchanges; sums are of the output's dtype.
    AllGatherReduceScatter,
    /// Each rank gets the partial results of its heads from all ranks and merges them: vLLM's all-to-all form. One exchange, made as an
    /// all-gather where that sends at most 256 KiB more.
    #[default]
    AllToAll,
    /// Every rank gets the partial results of all heads from all ranks and merges them: for heads that the ranks cannot share out, or
    /// where every rank needs all. One exchange, of `world` times the bytes.
    AllGather,
}
