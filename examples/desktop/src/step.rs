//! One step of the model: candle here, its attention in frames.

use generate::look::Layer;
use generate::{Error, Result};

use crate::look::Look;
use crate::writer::Writer;

impl Writer {
    /// Computes the next tokens of as many sequences as fit a slice.
    pub(crate) fn step(&mut self) -> Result<()> {
        let Some(slices) = self.slices.clone() else { return Ok(()) };
        let (checkpoint, batch) = (self.checkpoint.clone(), self.batch());
        let (model, config) = (&checkpoint.model, &checkpoint.model.config);

        let (mut ids, mut tokens, mut wanted, mut sizes) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for &(at, count) in &batch {
            let sequence = &self.sequences[at];
            ids.push((sequence.id, count as u32));
            tokens.extend_from_slice(&sequence.tokens[sequence.cached..][..count]);
            wanted.push(tokens.len() as u32 - 1);
            sizes.push((count, sequence.cached + count));
        }
        match slices.begin(&ids) {
            Err(Error::Mla(wgpu_mla::Error::OutOfPages { .. })) => return self.full(),
            other => other?,
        }

        let mut last: Vec<Vec<Layer>> = vec![Vec::new(); batch.len()];
        let mut pass = model.pass(&tokens, &slices.positions())?;
        let mut stored = Vec::new();
        while let Some(rows) = pass.rows()? {
            let is_last = pass.layer + 1 == config.num_layers;
            let Some(attended) = slices.attend(&self.shared, pass.layer, is_last, &rows)? else {
                return Ok(());
            };
            for (layers, &end) in last.iter_mut().zip(&wanted) {
                layers.push(Layer::of(&rows.q, &attended.out, tokens.len(), end as usize));
            }
            self.pace.note(&sizes, attended.ms);
            let read: usize = sizes.iter().map(|&(_, len)| len).sum();
            self.meter.attended(read * config.shape.row_elems() as usize * self.wish.kv.bytes(), attended.ms);
            stored.extend(attended.rows);
            pass.attended(attended.out)?;
        }
        let logits = pass.logits(&wanted)?;

        let each = stored.len() / tokens.len().max(1);
        let mut begin = 0;
        let answers = logits.chunks_exact(config.vocab_size);
        for ((&(at, count), logits), last) in batch.iter().zip(answers).zip(last) {
            let sequence = &mut self.sequences[at];
            sequence.cached += count;
            let chose = sequence.choose(logits, &self.text, &config.eos, config.max_position_embeddings)?;
            self.meter.tokens(usize::from(chose));
            let rows = stored[begin * each..][..count * each].to_vec();
            begin += count;
            let number = sequence.number;
            self.tell(Look::Stored { number, rows, last });
        }
        self.publish();
        Ok(())
    }

    /// Which sequences, and how many new tokens of each. A prompt is read alone, others decode together.
    fn batch(&mut self) -> Vec<(usize, usize)> {
        let at_work = |&at: &usize| self.sequences[at].ended.is_none();
        if let Some(at) = (0..self.sequences.len()).find(|at| self.sequences[*at].is_reading()) {
            let sequence = &self.sequences[at];
            return vec![(at, self.pace.piece(sequence.given() - sequence.cached, sequence.cached))];
        }
        let mut alive: Vec<usize> = (0..self.sequences.len()).filter(at_work).collect();
        let turn = self.turn % alive.len().max(1);
        alive.rotate_left(turn);
        let count = self.pace.batch(alive.iter().map(|&at| self.sequences[at].cached + 1));
        let is_all = count >= alive.len();
        alive.truncate(count);
        // The rest comes first next time.
        self.turn = if is_all { 0 } else { turn + count };
        alive.into_iter().map(|at| (at, 1)).collect()
    }

    /// No page is left.
    fn full(&mut self) -> Result<()> {
        self.is_paused = true;
        let why = "The cache has no page left: end a sequence, then go on.";
        self.shared.show(|shown| shown.notice = Some(why.into()));
        self.publish();
        Ok(())
    }
}
