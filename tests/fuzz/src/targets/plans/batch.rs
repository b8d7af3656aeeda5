//! A batch that is good.

use mla_support::paint::Sees;
use wgpu_mla::{Dtype, KvSpec, MlaDecode, MlaShape, PageTable, SharedPrefix, SplitPolicy, Tiling};

use super::tiling;
use crate::source::Source;

/// Small dims and pools of each dtype.
pub fn spec(source: &mut Source<'_>) -> MlaDecode {
    let (kv_lora_rank, qk_rope_head_dim) =
        source.pick(&[(256, 32), (256, 32), (256, 32), (512, 0), (512, 64)]);
    let num_heads = match source.below(8) {
        0 => source.between(7, 40),
        _ => source.between(1, 6),
    };
    let page_size = source.pick(&[4, 1, 2, 3, 5, 16, 16, 64]);
    let num_pages = source.between(1, 160 / page_size + 2);
    let floats = [Dtype::F32, Dtype::F16, Dtype::Bf16];
    MlaDecode {
        shape: MlaShape { num_heads, kv_lora_rank, qk_rope_head_dim },
        kv: KvSpec { layout: source.pick(&Dtype::ALL).into(), page_size, num_pages },
        query: source.pick(&Dtype::ALL),
        out: source.pick(&floats),
    }
}

/// How the host has the page table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    Dense,
    Csr,
    Pool,
    PoolCsr,
}

/// A batch and how it is planned.
#[derive(Debug, Clone)]
pub struct Drawn {
    pub lens: Vec<i32>,
    pub starts: Vec<i32>,
    /// `[batch, max_pages]`, wild past what is used.
    pub table: Vec<i32>,
    pub max_pages: u32,
    pub form: Form,
    /// Tokens in a page of the pool that made the table.
    pub page_size: u32,
    pub sees: Sees,
    pub prefixes: Vec<SharedPrefix>,
    /// 0 for one buffer.
    pub slab_pages: u32,
    pub policy: SplitPolicy,
    pub tiling: Tiling,
    pub softmax_scale: f32,
    /// Where each row of a CSR table begins, where it is not what the lengths say.
    pub indptr: Option<Vec<i32>>,
}

impl Drawn {
    pub fn draw(source: &mut Source<'_>, spec: &MlaDecode, of: &Tiling) -> Self {
        let KvSpec { page_size, num_pages, .. } = spec.kv;
        let mut free: Vec<i32> = (0..num_pages as i32).collect();
        source.rng().shuffle(&mut free);
        let (mut lens, mut starts) = (Vec::new(), vec![0]);
        let mut rows: Vec<Vec<i32>> = Vec::new();
        for _ in 0..source.below(6) {
            let most = spec.kv.num_slots().min(150) as u32;
            let len = match source.below(5) {
                0 => source.below(3) as u32,
                1 => (source.between(0, most / page_size) * page_size).saturating_sub(source.between(0, 1)),
                2 => source.between(0, most),
                _ => source.between(0, most.min(24)),
            };
            lens.push(len.min(most) as i32);
            starts.push(starts[starts.len() - 1] + source.pick(&[1, 1, 1, 0, 2, 3, 4, 9]));
            let mut row: Vec<i32> = Vec::new();
            for _ in 0..len.min(most).div_ceil(page_size) {
                // Pages run out; a page may then be of several sequences, or stand twice in a row.
                let page = free.pop().unwrap_or_else(|| source.below(num_pages.into()) as i32);
                row.push(page);
            }
            rows.push(row);
        }
        let prefixes = share(source, &mut rows, &lens, page_size);
        let longest = rows.iter().map(Vec::len).max().unwrap_or(0) as u32;
        let max_pages = longest + source.between(0, 2);
        let mut table = Vec::new();
        for row in &rows {
            table.extend_from_slice(row);
            let wild = (row.len()..max_pages as usize).map(|_| source.hostile() as i32);
            table.extend(wild);
        }
        let total = starts[starts.len() - 1] as usize;
        let sees = match source.below(6) {
            0 => Sees::Full,
            1 => Sees::CausalFrom(source.pick(&[0, 1, -1, 5, 40, i64::MIN, i64::MAX, i64::MAX - 1])),
            2 => {
                let mut bounds = Vec::with_capacity(total);
                for (seq, &len) in lens.iter().enumerate() {
                    let queries = starts[seq + 1] - starts[seq];
                    bounds.extend((0..queries).map(|_| source.between(0, len as u32)));
                }
                Sees::Bounds(bounds)
            }
            _ => Sees::Causal,
        };
        let slab_pages = if num_pages > 1 && source.chance(64) {
            source.between(num_pages.div_ceil(64), num_pages)
        } else {
            0
        };
        Self {
            lens,
            starts,
            table,
            max_pages,
            form: source.pick(&[Form::Dense, Form::Csr, Form::Pool, Form::PoolCsr]),
            page_size,
            sees,
            prefixes,
            // One slab is one buffer.
            slab_pages: if slab_pages == num_pages { 0 } else { slab_pages },
            policy: match source.below(4) {
                0 => SplitPolicy::OneSplit,
                1 => SplitPolicy::FixedTokens(source.between(1, 40)),
                2 if source.chance(64) => SplitPolicy::FixedTokens(source.hostile().max(1)),
                _ => SplitPolicy::Auto,
            },
            tiling: tiling(source, of),
            softmax_scale: source.pick(&[0.1147, 1.0, 1e-6]),
            indptr: None,
        }
    }

    /// Query tokens that the arrays are made for, of a batch whose starts may be broken.
    pub fn tokens(&self) -> u32 {
        self.starts.last().map_or(0, |&end| end.clamp(0, 256) as u32)
    }

    /// Compressed rows, with the pages that the lengths use.
    pub fn csr(&self) -> (Vec<i32>, Vec<i32>) {
        let (mut indptr, mut indices) = (vec![0], Vec::new());
        for (seq, &len) in self.lens.iter().enumerate() {
            let row = self.table.get(seq * self.max_pages as usize..).unwrap_or(&[]);
            let row = &row[..row.len().min(self.max_pages as usize)];
            let used = (len.max(0) as u32).div_ceil(self.page_size.max(1)) as usize;
            indices.extend_from_slice(&row[..used.min(row.len())]);
            indptr.push(indices.len() as i32);
        }
        (self.indptr.clone().unwrap_or(indptr), indices)
    }

    pub fn pages<'a>(&'a self, (kv_indptr, kv_indices): &'a (Vec<i32>, Vec<i32>)) -> PageTable<'a> {
        let Self { table, max_pages, page_size, .. } = self;
        let (block_table, max_pages, page_size) = (&table[..], *max_pages, *page_size);
        match self.form {
            Form::Dense => PageTable::Dense { block_table, max_pages },
            Form::Csr => PageTable::Csr { kv_indptr, kv_indices },
            Form::Pool => PageTable::Pool { block_table, max_pages, page_size },
            Form::PoolCsr => PageTable::PoolCsr { kv_indptr, kv_indices, page_size },
        }
    }

    /// The table as the oracle takes it.
    pub fn dense(&self) -> (Vec<i32>, usize) {
        (self.table.clone(), self.max_pages as usize)
    }
}

/// Groups of sequences, whose first pages it makes the same.
fn share(source: &mut Source<'_>, rows: &mut [Vec<i32>], lens: &[i32], page_size: u32) -> Vec<SharedPrefix> {
    let mut groups = Vec::new();
    let mut first = 0;
    while first < rows.len() && source.chance(96) {
        let count = source.between(1, (rows.len() - first) as u32) as usize;
        let members: Vec<u32> = (first as u32..(first + count) as u32).collect();
        let pages = members.iter().map(|&seq| rows[seq as usize].len()).min().unwrap_or(0);
        let pages = source.index(pages + 1);
        for &member in &members[1..] {
            let shared = rows[first][..pages].to_vec();
            rows[member as usize][..pages].copy_from_slice(&shared);
        }
        let shortest = members.iter().map(|&seq| lens[seq as usize] as u32).min().unwrap_or(0);
        let most = (pages as u32 * page_size).min(shortest);
        let mut members = members;
        source.rng().shuffle(&mut members);
        groups.push(SharedPrefix { sequences: members, tokens: source.between(0, most) });
        first += count;
    }
    groups
}
