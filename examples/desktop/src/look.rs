//! A thread that looks into the attention: softmax weights of the last token, and a check of one decode against the f64 oracle. Both
//! are computed on the host, from the token's query and the rows that the cache holds, as kernels do not give weights away.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use generate::look::{Cached, Layer};
use generate::{Checkpoint, Error, Furthest, Result, softmax_weights};

use crate::shared::Shared;
use crate::shown::{Check, Weights};

/// What it is told.
pub enum Look {
    /// The tokens that a sequence got, `[tokens, layers, L + R]`, and the last of them in each layer.
    Stored {
        number: usize,
        rows: Vec<f32>,
        last: Vec<Layer>,
    },
    Forked {
        from: usize,
        to: usize,
    },
    Ended(usize),
    /// All sequences are gone.
    Clear,
    Select(usize),
    /// Check the selected sequence's last decode.
    Check,
}

/// A sequence, as far as its rows are known.
#[derive(Clone)]
struct Seen {
    cached: Cached,
    last: Vec<Layer>,
}

struct Looker {
    shared: Arc<Shared>,
    checkpoint: Arc<Checkpoint>,
    /// `kv_b_proj` of each layer.
    kv_b: Vec<Vec<f32>>,
    seen: BTreeMap<usize, Seen>,
    selected: usize,
    /// Whether the selected sequence has changed since its weights were shown.
    is_new: bool,
    check: bool,
}

/// Starts the thread, which ends with its sender.
///
/// # Errors
/// The errors of candle and of the system.
pub fn start(shared: Arc<Shared>, checkpoint: Arc<Checkpoint>) -> Result<(Sender<Look>, JoinHandle<()>)> {
    let layers = 0..checkpoint.model.config.num_layers;
    let kv_b = layers.map(|layer| checkpoint.model.kv_b_proj(layer)).collect::<Result<_>>()?;
    let (sender, receiver) = channel();
    let mut looker =
        Looker { shared, checkpoint, kv_b, seen: BTreeMap::new(), selected: 1, is_new: false, check: false };
    let thread = std::thread::Builder::new().name("looker".into()).spawn(move || looker.run(&receiver));
    let why = |error| Error::Input(format!("no thread to look into the attention: {error}"));
    Ok((sender, thread.map_err(why)?))
}

impl Looker {
    fn run(&mut self, told: &Receiver<Look>) {
        while let Ok(first) = told.recv() {
            // All that has come since: only the newest is worth drawing.
            for look in std::iter::once(first).chain(told.try_iter()) {
                self.note(look);
            }
            if let Err(error) = self.look() {
                self.shared
                    .show(|shown| shown.notice = Some(format!("The attention cannot be shown: {error}")));
            }
        }
    }

    fn note(&mut self, look: Look) {
        let changed = match look {
            Look::Stored { number, rows, last } => {
                let new = || Seen { cached: Cached::new(&self.checkpoint.model.config), last: Vec::new() };
                let seen = self.seen.entry(number).or_insert_with(new);
                seen.cached.rows.extend(rows);
                seen.last = last;
                number == self.selected
            }
            Look::Forked { from, to } => {
                if let Some(seen) = self.seen.get(&from).cloned() {
                    self.seen.insert(to, seen);
                }
                to == self.selected
            }
            Look::Ended(number) => {
                self.seen.remove(&number);
                false
            }
            Look::Clear => {
                self.seen.clear();
                self.selected = 1;
                false
            }
            Look::Select(number) => {
                self.selected = number;
                true
            }
            Look::Check => {
                self.check = true;
                false
            }
        };
        self.is_new |= changed;
    }

    fn look(&mut self) -> Result<()> {
        let Some(seen) = self.seen.get(&self.selected).filter(|seen| seen.cached.tokens() > 0) else {
            return Ok(());
        };
        let (config, tokens) = (&self.checkpoint.model.config, seen.cached.tokens());
        if std::mem::take(&mut self.is_new) {
            let mut values = Vec::new();
            for (layer, (token, kv_b)) in seen.last.iter().zip(&self.kv_b).enumerate() {
                let q_pe = token.rotated(config, tokens - 1)?;
                values.extend(softmax_weights(config, &seen.cached, layer, token, &q_pe, kv_b));
            }
            let heads = config.shape.num_heads as usize;
            let weights = Weights { number: self.selected, layers: config.num_layers, heads, tokens, values };
            self.shared.show(|shown| shown.weights = Some(Arc::new(weights)));
        }
        if std::mem::take(&mut self.check) {
            self.shared.show(|shown| shown.check = Check::Running);
            let mut furthest = Furthest::default();
            for (layer, (token, kv_b)) in seen.last.iter().zip(&self.kv_b).enumerate() {
                furthest.compare(
                    config,
                    &seen.cached,
                    layer,
                    token,
                    &token.rotated(config, tokens - 1)?,
                    kv_b,
                );
            }
            self.shared.show(|shown| shown.check = Check::Done { furthest, tokens });
        }
        Ok(())
    }
}
