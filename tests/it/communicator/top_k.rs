//! `top_k` of a context that ranks share: each chooses of its own tokens, and what all chose is merged the same on each.

use wgpu_mla::communicator::Exchange;
use wgpu_mla::cpu::Cpu;
use wgpu_mla::{Device, Dtype, Result, Shares, TopK, TopKArgs, TopKBatch, View};

use super::{PATIENT, as_dyn, buffer, ranks};
use mla_support::paint::Rng;
use mla_support::reference::top_k;

const K: u32 = 24;

/// Logits of rows of different lengths, with many ties, zeros of both signs and NaN.
fn logits(lengths: &[u32]) -> Vec<Vec<f32>> {
    let mut rng = Rng(46);
    let levels = [0.0, -0.0, 1.0, f32::NAN, -2.0, f32::NEG_INFINITY];
    let value = |rng: &mut Rng| if rng.below(2) == 0 { levels[rng.below(6)] } else { rng.randn() };
    lengths.iter().map(|&length| (0..length).map(|_| value(&mut rng)).collect()).collect()
}

/// What a rank's tokens of the rows give, exchanged and merged.
fn merged(
    end: &wgpu_mla::communicator::InProcess,
    rank: u32,
    shares: &Shares,
    rows: &[Vec<f32>],
) -> Result<Vec<i32>> {
    let cpu = Cpu::with_threads(1);
    let longest = rows.iter().map(Vec::len).max().unwrap_or(0) as u32;
    let columns = shares.padded_len(0, longest).max(1);
    let (mut own, mut lengths) = (Vec::new(), Vec::new());
    for row in rows {
        let held =
            row.iter().zip(0..).filter(|&(_, token)| shares.owner(token) == rank).map(|(&logit, _)| logit);
        let before = own.len();
        own.extend(held);
        lengths.push((own.len() - before) as i32);
        own.resize(before + columns as usize, f32::MAX);
    }
    let bytes = rows.len() as u64 * u64::from(K) * 4;
    let scores = buffer(&cpu, &Dtype::F32.encode_all(&own));
    let [indices, values] = [cpu.buffer(bytes)?, cpu.buffer(bytes)?];
    let args = TopKArgs {
        logits: View::dense(&scores, 1, columns),
        columns,
        lengths: &scores,
        indices: View::dense(&indices, 1, K),
        values: Some(View::dense(&values, 1, K)),
    };
    cpu.once(TopK { k: K, slots: None }, TopKBatch::of(&lengths), &args)?;

    let all_bytes = bytes * u64::from(shares.world());
    let [all_indices, all_values] = [cpu.buffer(all_bytes)?, cpu.buffer(all_bytes)?];
    let exchanges = [
        Exchange { from: &indices, to: &all_indices, bytes },
        Exchange { from: &values, to: &all_values, bytes },
    ];
    as_dyn(end).all_gather(&cpu, &exchanges)?;
    let word = |word: &[u8]| i32::from_le_bytes([word[0], word[1], word[2], word[3]]);
    let indices: Vec<i32> = cpu.download(&all_indices, all_bytes)?.chunks_exact(4).map(word).collect();
    let values = Dtype::F32.decode_all(&cpu.download(&all_values, all_bytes)?);
    shares.merge_top_k(K, &values, &indices)
}

fn all_ranks_choose_the_set_of_the_whole() {
    let rows = logits(&[200, 0, 1, K, K + 1, 131, 77]);
    let want: Vec<i32> = rows.iter().flat_map(|row| top_k(row, K as usize)).collect();
    let even = |world, interleave| Shares::even(world, interleave).expect("shares");
    let uneven = Shares::weighted(&[5, 2, 1, 4], 3).expect("shares");
    for shares in [even(2, 1), even(3, 16), even(4, 7), uneven] {
        let all = ranks(shares.world(), PATIENT, |end, rank| merged(&end, rank, &shares, &rows));
        assert_eq!(all, vec![Some(Ok(want.clone())); shares.world() as usize], "{shares:?}");
    }
}

crate::tests![all_ranks_choose_the_set_of_the_whole];
