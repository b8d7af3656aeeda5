//! `top_k` against the oracle, exactly: the set, the tie-break and the order, on every variant.

use wgpu_mla::{
    Backend, Dtype, Error, OpOptions, PageTable, TopK, TopKArgs, TopKBatch, TopKExtent, TopKPages, TopKSlots,
    View,
};

use super::Session;
use super::memory::{download, gather, scatter, upload};
use super::run::Layout;
use crate::case::TopKCase;
use crate::paint::{POISON, Rng, WILD};
use crate::reference::{slots_of, top_k};

/// Rows of logits, of which only the first ones count.
pub struct Case {
    pub spec: TopK,
    /// `[rows, columns]`; behind a row's length large values.
    pub logits: Vec<f32>,
    pub columns: usize,
    pub lengths: Vec<i32>,
    /// The rows of each sequence, and the pages of each, with slots.
    pub query_start_loc: Vec<i32>,
    pub block_table: Vec<i32>,
    pub max_pages: usize,
}

/// How a case is run.
#[derive(Debug, Clone, Copy, Default)]
pub struct How<'a> {
    pub variant: Option<&'a str>,
    pub layout: Layout,
    /// The device has the lengths, some of them past the row and below 0.
    pub device_lengths: bool,
    pub values: bool,
    pub out_row: u32,
    /// How often the step runs, each time into the same rows.
    pub runs: usize,
}

/// Kinds of rows, by turns.
const KINDS: usize = 14;

/// A row of a kind. All of it is filled; what is behind its length is replaced later.
fn row(rng: &mut Rng, kind: usize, columns: usize) -> Vec<f32> {
    let nans = [0x7FC0_0000, 0xFFC0_0000, 0x7F80_0001, 0xFFFF_FFFF].map(f32::from_bits);
    let infinity = f32::INFINITY;
    let level = |rng: &mut Rng, levels: usize| rng.below(levels) as f32 - 2.0;
    let value = |at: usize, rng: &mut Rng| match kind {
        0 => rng.randn(),
        // Hundreds of ties, of several levels and of two.
        1 => level(rng, 5),
        2 => level(rng, 2),
        // All are one.
        3 => -1.25,
        4 => [0.0, -0.0][rng.below(2)],
        5 => [0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0][rng.below(6)],
        6 => [nans[rng.below(4)], -infinity, infinity, rng.randn()][rng.below(4)],
        7 => [nans[rng.below(4)], -infinity, -infinity][rng.below(3)],
        8 => nans[rng.below(4)],
        9 => at as f32,
        10 => -(at as f32),
        // Any bits.
        11 => f32::from_bits(rng.next() as u32),
        // Ties in all digits but the last, and in the first digit only.
        12 => f32::from_bits(0x4040_0000 + rng.below(700) as u32),
        _ => f32::from_bits(0xC040_0000 + (rng.below(1 << 20)) as u32),
    };
    (0..columns).map(|at| value(at, rng)).collect()
}

impl Case {
    /// A row of each kind, with lengths around `k`, and those of 0, 1 and all.
    pub fn new(seed: u64, spec: TopK, columns: usize, rows: usize) -> Self {
        let mut rng = Rng(seed);
        let k = (spec.k as usize).min(columns);
        let lengths =
            [columns, k + 1, columns - columns / 3, k, 1, columns, 0, (2 * k).min(columns), columns - 1];
        let (mut logits, mut all) = (Vec::new(), Vec::new());
        for index in 0..rows {
            let length = lengths[(index + index / KINDS) % lengths.len()].min(columns);
            let mut row = row(&mut rng, index % KINDS, columns);
            row[length..].fill(f32::MAX);
            logits.extend(row);
            all.push(length as i32);
        }
        let mut case = Self {
            spec,
            logits,
            columns,
            lengths: all,
            query_start_loc: vec![0, rows as i32],
            block_table: Vec::new(),
            max_pages: 0,
        };
        if let Some(slots) = spec.slots {
            case.add_pages(&mut rng, slots);
        }
        case
    }

    /// Sequences of a few rows, some of none; what no row reaches of a table is wild.
    fn add_pages(&mut self, rng: &mut Rng, slots: TopKSlots) {
        let (rows, page_size) = (self.lengths.len(), slots.page_size as usize);
        self.query_start_loc = vec![0, 0, 1.min(rows) as i32];
        while (self.query_start_loc[self.query_start_loc.len() - 1] as usize) < rows {
            let last = self.query_start_loc[self.query_start_loc.len() - 1] as usize;
            self.query_start_loc.push((last + rng.below(4)).min(rows) as i32);
        }
        self.max_pages = self.columns.div_ceil(page_size) + 1;
        for ends in self.query_start_loc.windows(2) {
            let longest = self.lengths[ends[0] as usize..ends[1] as usize].iter().max().copied().unwrap_or(0);
            let used = (longest as usize).div_ceil(page_size);
            let page = |rng: &mut Rng| rng.below(slots.num_pages as usize) as i32;
            self.block_table.extend(
                (0..self.max_pages).map(|block| if block < used { page(rng) } else { WILD[block % 4] }),
            );
        }
    }

    fn pages(&self) -> Option<TopKPages<'_>> {
        let pages = PageTable::Dense { block_table: &self.block_table, max_pages: self.max_pages as u32 };
        self.spec.slots.map(|_| TopKPages { pages, query_start_loc: &self.query_start_loc, first_token: 0 })
    }

    fn row(&self, index: usize) -> &[f32] {
        &self.logits[index * self.columns..][..self.lengths[index] as usize]
    }

    /// What each row's entries must be, and their values' bits.
    pub fn expected(&self) -> (Vec<i32>, Vec<u32>) {
        let (mut entries, mut values) = (Vec::new(), Vec::new());
        for index in 0..self.lengths.len() {
            let row = self.row(index);
            let chosen = top_k(row, self.spec.k as usize);
            let bits = |&at: &i32| usize::try_from(at).map_or(0xFF80_0000, |at| row[at].to_bits());
            values.extend(chosen.iter().map(bits));
            entries.extend(match self.spec.slots {
                None => chosen,
                Some(slots) => {
                    let ends = &self.query_start_loc[1..];
                    let seq = ends.iter().position(|&end| end as usize > index).expect("its sequence");
                    let table = &self.block_table[seq * self.max_pages..][..self.max_pages];
                    slots_of(&chosen, table, slots.page_size as usize)
                }
            });
        }
        (entries, values)
    }

    /// Runs the step and compares every word of both outputs and around them.
    pub fn check<B: Backend>(&self, backend: &B, how: How<'_>) -> Result<(), String> {
        let text = |error: Error| error.to_string();
        let rows = self.lengths.len();
        let logit_dims = [rows, 1, self.columns];
        // Rows begin anywhere: odd strides and offsets.
        let strides = how.layout.strides(logit_dims, 1);
        let mut bytes = scatter(&Dtype::F32.encode_all(&self.logits), logit_dims, 4, strides);
        if how.layout != Layout::Dense {
            // Around the rows is what would be chosen.
            let large = f32::INFINITY.to_le_bytes();
            let is_gap = |word: &[u8]| word == [POISON; 4];
            bytes
                .chunks_exact_mut(4)
                .filter(|word| is_gap(word))
                .for_each(|word| word.copy_from_slice(&large));
            for (index, &value) in self.logits.iter().enumerate() {
                let at = strides.offset + index / self.columns * strides.token + index % self.columns;
                bytes[at * 4..][..4].copy_from_slice(&value.to_bits().to_le_bytes());
            }
        }
        let logits = upload(backend, &bytes).map_err(text)?;
        let past = |(index, &length): (usize, &i32)| match length {
            0 => [0, -1, i32::MIN][index % 3],
            length if length as usize == self.columns => [length, length + 1, i32::MAX][index % 3],
            length => length,
        };
        let on_device: Vec<i32> = self.lengths.iter().enumerate().map(past).collect();
        let lengths =
            upload(backend, &on_device.iter().flat_map(|length| length.to_le_bytes()).collect::<Vec<u8>>())
                .map_err(text)?;

        let k = self.spec.k as usize;
        let out_dims = [rows + how.out_row as usize, 1, k];
        let out = how.layout.strides(out_dims, 1);
        let before = vec![POISON; out.end(out_dims) * 4];
        let indices = upload(backend, &before).map_err(text)?;
        let values = upload(backend, &before).map_err(text)?;
        let args = TopKArgs {
            logits: strides.view(&logits),
            columns: self.columns as u32,
            lengths: &lengths,
            indices: out.view(&indices),
            values: how.values.then(|| out.view(&values)),
        };
        let options = OpOptions { variant: how.variant.map(str::to_owned) };
        let op = backend.compile_with(self.spec, &options).map_err(text)?;
        let mut step = op.step(Default::default()).map_err(text)?;
        let batch = TopKBatch { pages: self.pages(), out_row: how.out_row, ..TopKBatch::of(&self.lengths) };
        let batch = if how.device_lengths { TopKBatch { lengths: None, ..batch } } else { batch };
        op.prepare(&mut step, batch).map_err(text)?;
        let binding = op.bind(&args, step.used()).map_err(text)?;
        let (mut entries, mut bits) = self.expected();
        if let (true, Some(slots)) = (how.device_lengths, self.spec.slots) {
            // The host does not know which entries of the table are used.
            entries
                .iter_mut()
                .filter(|slot| **slot as u32 >= slots.num_pages * slots.page_size)
                .for_each(|slot| *slot = -1);
        }
        let mut entries: Vec<u32> = entries.into_iter().map(|entry| entry as u32).collect();
        let above = how.out_row as usize * k;
        entries.splice(0..0, std::iter::repeat_n(u32::MAX, above));
        bits.splice(0..0, std::iter::repeat_n(u32::MAX, above));
        if !how.values {
            bits.fill(u32::MAX);
        }
        for run in 0..how.runs.max(1) {
            op.run(&step, &binding).map_err(text)?;
            let read = |buffer: &B::Buffer| {
                let bytes = download(backend, buffer, before.len()).map_err(text)?;
                let (dense, intact) = gather(&bytes, out_dims, 4, out);
                let word = |word: &[u8]| u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
                intact.map(|()| dense.chunks_exact(4).map(word).collect::<Vec<u32>>())
            };
            let wrong = |what: &str, got: &[u32], want: &[u32]| {
                let at = got.iter().zip(want).position(|(got, want)| got != want);
                at.map_or(Ok(()), |at| {
                    let (row, place, got, want) = (at / k, at % k, got[at] as i32, want[at] as i32);
                    Err(format!("run {run}: {what} of row {row}, place {place}: {got} instead of {want}"))
                })
            };
            wrong("index", &read(&indices)?, &entries)?;
            wrong("value", &read(&values)?, &bits)?;
        }
        Ok(())
    }
}

/// A case file, on every variant.
pub fn check_case<B: Backend>(backend: &B, case: &TopKCase) -> Result<(), String> {
    let own = Case {
        spec: case.spec,
        logits: Dtype::F32.decode_all(&case.logits),
        columns: case.columns,
        lengths: case.lengths.clone(),
        query_start_loc: case.query_start_loc.clone(),
        block_table: case.block_table.clone(),
        max_pages: case.max_pages,
    };
    if own.expected().0 != case.indices {
        return Err("the file expects other entries than the oracle".to_owned());
    }
    let all = backend.variants(&case.spec).into_iter();
    let mut runs = all.filter(|candidate| candidate.lacks.is_none());
    runs.try_for_each(|candidate| own.check(backend, How { variant: Some(candidate.name), ..How::default() }))
}

/// The variants that run here, by name; of a backend with a single kernel the best.
fn variants<B: Backend>(session: &Session<'_, B>, spec: &TopK) -> Vec<&'static str> {
    let all = session.backend.variants(spec).into_iter();
    all.filter(|candidate| candidate.lacks.is_none()).map(|candidate| candidate.name).collect()
}

/// A device in software, on which a kernel takes long: the PTX interpreter takes a second for a few blocks.
fn is_slow<B: Backend>(session: &Session<'_, B>) -> bool {
    let name = session.backend.name();
    name.contains("llvmpipe") || name.contains("PTX interpreter")
}

const PAGES: Option<TopKSlots> = Some(TopKSlots { page_size: 7, num_pages: 900 });

/// Every kind of row, of few logits and of some thousand, in every layout.
pub fn choices<B: Backend>(session: &Session<'_, B>) {
    let slow = is_slow(session);
    let rows = if slow { KINDS } else { 2 * KINDS };
    for variant in variants(session, &TopK { k: 1, slots: None }) {
        for (turn, (k, columns, slots)) in
            [(300, 3001, None), (1, 2, None), (64, 2500, PAGES), (2048, 2100, None), (5, 40, PAGES)]
                .into_iter()
                .enumerate()
        {
            // A number of blocks that is only forced has no kernel of another kind.
            if slow && variant.starts_with("cluster") && turn != 2 {
                continue;
            }
            let case = Case::new(turn as u64, TopK { k, slots }, columns, rows);
            let layouts = [Layout::Gaps, Layout::Dense];
            let how = How {
                variant: Some(variant),
                layout: layouts[turn % 2],
                device_lengths: turn % 3 == 1,
                values: turn % 2 == 0,
                out_row: (turn % 3) as u32,
                runs: if slow { 1 } else { 2 },
            };
            session.note(&format!("{variant}, {k} of {columns}, {how:?}"), case.check(session.backend, how));
            // One row, which as many workgroups share as there are.
            if turn == 0 {
                for kind in [1, 4, 7] {
                    let mut one = Case::new(kind, case.spec, columns, 1);
                    one.logits = row(&mut Rng(kind), kind as usize, columns);
                    session
                        .note(&format!("{variant}, a row of kind {kind}"), one.check(session.backend, how));
                }
            }
        }
        session.note(&format!("{variant}, no columns"), no_columns(session.backend, variant));
        let device = How { variant: Some(variant), device_lengths: true, ..How::default() };
        let case = Case::new(9, TopK { k: 40, slots: PAGES }, 1100, KINDS);
        session
            .note(&format!("{variant}, slots by lengths of the device"), case.check(session.backend, device));
    }
    session.finish("choices");
}

/// Rows of no columns, which begin past the end of their buffer: entries of -1.
fn no_columns<B: Backend>(backend: &B, variant: &str) -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let (rows, k) = (4, 5);
    let [logits, lengths] = [backend.buffer(4), backend.buffer(4 * rows)].map(|made| made.map_err(text));
    let (logits, lengths) = (logits?, lengths?);
    let bytes = (rows * k * 4) as usize;
    let indices = upload(backend, &vec![0x11; bytes]).map_err(text)?;
    let args = TopKArgs {
        logits: View { buffer: &logits, offset: 0, token_stride: 4, head_stride: 0 },
        columns: 0,
        lengths: &lengths,
        indices: View::dense(&indices, 1, k as u32),
        values: None,
    };
    let options = OpOptions { variant: Some(variant.to_owned()) };
    let spec = TopK { k: k as u32, slots: None };
    backend.once_with(spec, &options, TopKBatch::of(&[0; 4]), &args).map_err(text)?;
    let got = download(backend, &indices, bytes).map_err(text)?;
    if got[..bytes].iter().all(|&byte| byte == 0xFF) { Ok(()) } else { Err(format!("{got:x?}")) }
}

/// Rows longer than what a block of a CUDA kernel holds, and than a slice of a WGSL one.
pub fn long_rows<B: Backend>(session: &Session<'_, B>) {
    for variant in variants(session, &TopK { k: 1, slots: None }) {
        let shapes: &[(u32, usize, usize)] = match session.cases {
            super::Cases::Representative => &[(777, 9000, 2)],
            _ if is_slow(session) => &[(300, 17_000, 2)],
            _ => &[(2048, 17_000, 3), (100, 40_000, 3)],
        };
        for &(k, columns, rows) in shapes {
            let case = Case::new(columns as u64, TopK { k, slots: None }, columns, rows);
            let how = How { variant: Some(variant), ..How::default() };
            session.note(&format!("{variant}, {k} of {columns}"), case.check(session.backend, how));
        }
    }
    session.finish("long rows");
}

/// Random rows with hundreds of ties: the same step gives the oracle's bits at every replay.
pub fn replays<B: Backend>(session: &Session<'_, B>) {
    let runs = if is_slow(session) { 2 } else { 1000 };
    for variant in variants(session, &TopK { k: 1, slots: None }) {
        let mut case = Case::new(77, TopK { k: 200, slots: None }, 1500, 6);
        for (index, part) in case.logits.chunks_exact_mut(1500).enumerate() {
            let ties = row(&mut Rng(index as u64 + 5), [1, 2, 0][index % 3], 1500);
            let length = case.lengths[index] as usize;
            part[..length].copy_from_slice(&ties[..length]);
        }
        let how = How { variant: Some(variant), values: true, runs, ..How::default() };
        session.note(&format!("{variant}, {how:?}"), case.check(session.backend, how));
    }
    session.finish("replays");
}

/// Specs, lengths, pages, sizes and aliases.
pub fn refuses_top_k<B: Backend>(session: &Session<'_, B>) {
    let refuses = |what: &str, result: Result<(), Error>, why: &str| {
        let checked = match result {
            Ok(()) => Err("was accepted".to_owned()),
            Err(error) if error.to_string().contains(why) => Ok(()),
            Err(error) => Err(format!("{error:?} does not name {why:?}")),
        };
        session.note(what, checked);
    };
    let result = || -> Result<(), Error> {
        let backend = session.backend;
        let spec = TopK { k: 4, slots: None };
        for k in [0, 8193, u32::MAX] {
            refuses(&format!("k {k}"), backend.compile(TopK { k, ..spec }).map(drop), "8192");
        }
        let slots = |page_size, num_pages| TopK { slots: Some(TopKSlots { page_size, num_pages }), ..spec };
        refuses("no page size", backend.compile(slots(0, 1)).map(drop), "page_size");
        refuses("2^31 slots", backend.compile(slots(256, 1 << 23)).map(drop), "num_pages");
        let [logits, lengths, indices, values] = [
            backend.buffer(2 * 8 * 4)?,
            backend.buffer(2 * 4)?,
            backend.buffer(3 * 4 * 4)?,
            backend.buffer(3 * 4 * 4)?,
        ];
        let good = TopKArgs {
            logits: View::dense(&logits, 1, 8),
            columns: 8,
            lengths: &lengths,
            indices: View::dense(&indices, 1, 4),
            values: Some(View::dense(&values, 1, 4)),
        };
        let run = |batch: TopKBatch<'_>, args: &TopKArgs<&B::Buffer>| backend.once(spec, batch, args);
        let of = TopKBatch::of;
        let fine =
            |what: &str, result: Result<(), Error>| session.note(what, result.map_err(|e| e.to_string()));
        fine("good rows", run(of(&[8, 0]), &good));
        fine("no rows", run(of(&[]), &good));
        fine("no rows, far away", run(TopKBatch { out_row: u32::MAX, ..of(&[]) }, &good));
        let one = TopKArgs { logits: View { token_stride: 3, ..good.logits }, ..good };
        fine("the stride of one row is unread", run(of(&[8]), &one));
        let read = TopKArgs { lengths: &logits, ..good };
        fine(
            "lengths of the step, and those of the device in a buffer that is read",
            run(of(&[8, 0]), &read),
        );
        refuses("a length past the row", run(of(&[9, 0]), &good), "columns");
        refuses("a negative length", run(of(&[1, -1]), &good), "negative");
        refuses("three lengths of two rows", run(TopKBatch { rows: 2, ..of(&[1; 3]) }, &good), "lengths");
        refuses("three rows", run(of(&[1; 3]), &good), "logits");
        refuses("rows past the indices", run(TopKBatch { out_row: 2, ..of(&[1; 2]) }, &good), "indices");
        refuses("no buffer has so many", run(TopKBatch::rows(u32::MAX), &good), "rows");
        let pages = PageTable::Dense { block_table: &[0, 1], max_pages: 1 };
        let pages = |first_token| Some(TopKPages { pages, query_start_loc: &[0, 1, 2], first_token });
        refuses("pages without slots", run(TopKBatch { pages: pages(0), ..of(&[1]) }, &good), "TopK::slots");
        let by_slots = |batch| backend.once(slots(4, 2), batch, &good);
        refuses("slots without pages", by_slots(of(&[1])), "pages");
        fine("slots", by_slots(TopKBatch { pages: pages(0), ..of(&[4, 3]) }));
        refuses(
            "a row without pages",
            by_slots(TopKBatch { pages: pages(1), ..of(&[4, 3]) }),
            "query_start_loc",
        );
        refuses(
            "a table that is too short",
            by_slots(TopKBatch { pages: pages(0), ..of(&[5, 3]) }),
            "block table",
        );
        let few = TopK { slots: Some(TopKSlots { page_size: 4, num_pages: 1 }), ..spec };
        let wild = backend.once(few, TopKBatch { pages: pages(0), ..of(&[4, 3]) }, &good);
        refuses("a wild page", wild, "page 1");
        for (what, args, why) in [
            ("columns past 2^20", TopKArgs { columns: (1 << 20) + 1, ..good }, "columns"),
            (
                "rows that overlap",
                TopKArgs { logits: View { token_stride: 7, ..good.logits }, ..good },
                "overlap",
            ),
            (
                "lists that overlap",
                TopKArgs { indices: View { token_stride: 3, ..good.indices }, ..good },
                "overlap",
            ),
            (
                "rows past the buffer",
                TopKArgs { logits: View { offset: 1, ..good.logits }, ..good },
                "logits",
            ),
            (
                "values past the buffer",
                TopKArgs { values: Some(View { offset: 9, ..good.indices }), ..good },
                "values",
            ),
            (
                "indices in the logits",
                TopKArgs { indices: View { buffer: &logits, ..good.indices }, ..good },
                "same buffer",
            ),
            ("values in the indices", TopKArgs { values: Some(good.indices), ..good }, "same buffer"),
            ("lengths in the indices", TopKArgs { lengths: &indices, ..good }, "same buffer"),
        ] {
            refuses(what, run(of(&[8, 8]), &args), why);
        }
        let op = backend.compile(spec)?;
        let binding = op.bind(&good, TopKExtent { rows: 1, columns: 0, out_rows: 1 })?;
        let mut step = op.step(Default::default())?;
        for (batch, why) in [(of(&[1, 1]), "more rows"), (TopKBatch { out_row: 1, ..of(&[1]) }, "out_rows")] {
            op.prepare(&mut step, batch)?;
            refuses("a step past its binding", op.run(&step, &binding), why);
        }
        Ok(())
    }();
    session.note("top_k", result.map_err(|error| error.to_string()));
    session.finish("refuses top_k");
}
