//! The thread that writes: it answers what a person asks for, and computes a step after the other. candle does what is not attention
//! here, so that no frame waits for it.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use generate::attention::Attention;
use generate::{Checkpoint, Error, Result, Sampling, Text};
use wgpu_mla::gpu::Gpu;

use crate::look::{self, Look};
use crate::open;
use crate::pace::Pace;
use crate::sequence::Sequence;
use crate::shared::{Shared, lock};
use crate::shown::{Check, Phase};
use crate::slice::Slices;
use crate::speed::Meter;
use crate::wish::Wish;

/// What a person asks for.
pub enum Ask {
    /// Begin a text from its prompt. Another dtype of the cache means another cache.
    Write(Wish),
    Pause(bool),
    /// By its number.
    Fork(usize),
    End(usize),
    Select(usize),
    Check,
}

pub struct Writer {
    pub(crate) shared: Arc<Shared>,
    pub(crate) gpu: Gpu,
    pub(crate) checkpoint: Arc<Checkpoint>,
    pub(crate) text: Text,
    looks: Sender<Look>,
    pub(crate) slices: Option<Arc<Slices>>,
    pub(crate) pace: Pace,
    pub(crate) meter: Meter,
    pub(crate) wish: Wish,
    pub(crate) sequences: Vec<Sequence>,
    numbers: usize,
    pub(crate) is_paused: bool,
    /// Where the next step's batch begins, if not all sequences fit one.
    pub(crate) turn: usize,
    /// Tokens after which the first sequence is checked by itself, and forked.
    schedule: Vec<(usize, Ask)>,
}

/// Starts the thread. `schedule` asks by itself, once the first sequence has so many new tokens.
pub fn start(
    shared: Arc<Shared>,
    gpu: Gpu,
    dir: std::path::PathBuf,
    first: Option<Wish>,
    schedule: Vec<(usize, Ask)>,
) -> std::io::Result<(Sender<Ask>, JoinHandle<()>)> {
    let (sender, asks) = channel();
    let thread = std::thread::Builder::new().name("writer".into()).spawn(move || {
        let told = shared.clone();
        let ran = open::checkpoint(&shared, &gpu, &dir).and_then(|(checkpoint, text)| {
            let (looks, looker) = look::start(shared.clone(), checkpoint.clone())?;
            let mut writer = Writer {
                pace: Pace::new(&checkpoint.model.config),
                shared,
                gpu,
                checkpoint,
                text,
                looks,
                slices: None,
                meter: Meter::default(),
                wish: Wish::default(),
                sequences: Vec::new(),
                numbers: 0,
                is_paused: false,
                turn: 0,
                schedule,
            };
            let ran = writer.run(first, &asks);
            drop(writer);
            let _ = looker.join();
            ran
        });
        if let Err(error) = ran {
            fail(&told, &error);
        }
    })?;
    Ok((sender, thread))
}

/// Says what went wrong, and what helps.
fn fail(shared: &Shared, error: &Error) {
    if let Error::Mla(wgpu_mla::Error::DeviceLost { detail }) = error {
        shared.lose(detail.clone());
    }
    shared.show(|shown| {
        shown.phase = Phase::Failed;
        shown.notice = Some(format!("{error}. Then start the program again."));
    });
}

impl Writer {
    fn run(&mut self, first: Option<Wish>, asks: &Receiver<Ask>) -> Result<()> {
        if let Some(wish) = first {
            self.answer(Ask::Write(wish))?;
        }
        while !self.shared.is_closing() {
            let is_busy = !self.is_paused && self.sequences.iter().any(|sequence| sequence.ended.is_none());
            let asked = match is_busy {
                true => asks.try_recv().map_err(|error| error == TryRecvError::Disconnected),
                false => asks
                    .recv_timeout(Duration::from_millis(50))
                    .map_err(|error| error == RecvTimeoutError::Disconnected),
            };
            match asked {
                Ok(ask) => self.answer(ask)?,
                Err(true) => break,
                Err(false) if is_busy => {
                    self.step()?;
                    self.ask_on_schedule()?;
                }
                Err(false) => {}
            }
        }
        Ok(())
    }

    fn ask_on_schedule(&mut self) -> Result<()> {
        let written = self.sequences.first().map_or(0, |first| first.written().len());
        if self.schedule.first().is_some_and(|&(tokens, _)| written >= tokens) {
            let (_, ask) = self.schedule.remove(0);
            self.answer(ask)?;
        }
        Ok(())
    }

    /// What a person did wrong is said and forgotten; other errors end the thread.
    fn answer(&mut self, ask: Ask) -> Result<()> {
        let answered = match ask {
            Ask::Write(wish) => self.write(wish),
            Ask::Pause(pause) => {
                self.is_paused = pause;
                Ok(())
            }
            Ask::Fork(number) => self.fork(number),
            Ask::End(number) => self.end(number),
            Ask::Select(number) => {
                self.tell(Look::Select(number));
                Ok(())
            }
            Ask::Check => {
                self.tell(Look::Check);
                Ok(())
            }
        };
        match answered {
            Err(Error::Input(why)) => self.shared.show(|shown| shown.notice = Some(why)),
            other => other?,
        }
        self.publish();
        Ok(())
    }

    /// Begins a text.
    fn write(&mut self, wish: Wish) -> Result<()> {
        let prompt = self.text.encode(&wish.prompt)?;
        let most = self.checkpoint.model.config.max_position_embeddings;
        if prompt.is_empty() || prompt.len() >= most {
            let tokens = prompt.len();
            return Err(Error::Input(format!("The prompt has {tokens} tokens: give it 1 to {}.", most - 1)));
        }
        self.forget()?;
        if self.slices.is_none() || self.wish.kv != wish.kv {
            self.slices = None;
            self.slices = Some(Arc::new(open::slices(self, wish.kv)?));
        }
        let Some(slices) = &self.slices else { return Ok(()) };
        let id = lock(&slices.paged).pages_mut().add();
        let sampling = Sampling { temperature: wish.temperature, seed: wish.seed, ..Sampling::default() };
        self.sequences.push(Sequence::new(id, prompt, &self.text, sampling, wish.new_tokens)?);
        (self.wish, self.numbers, self.is_paused, self.turn) = (wish, 1, false, 0);
        self.shared.show(|shown| {
            shown.notice = None;
            shown.weights = None;
            shown.check = Check::NotYet;
        });
        Ok(())
    }

    /// Gives all pages back.
    fn forget(&mut self) -> Result<()> {
        self.tell(Look::Clear);
        for sequence in std::mem::take(&mut self.sequences) {
            if let Some(slices) = &self.slices {
                lock(&slices.paged).pages_mut().free(sequence.id)?;
            }
        }
        Ok(())
    }

    fn fork(&mut self, number: usize) -> Result<()> {
        if self.sequences.len() >= open::MOST_SEQUENCES {
            let most = open::MOST_SEQUENCES;
            return Err(Error::Input(format!(
                "There are {most} sequences, as many as fit a step: end one first."
            )));
        }
        let Some(parent) = self.sequences.iter().find(|it| it.number == number && it.can_fork()) else {
            return Ok(());
        };
        let Some(slices) = &self.slices else { return Ok(()) };
        let id = lock(&slices.paged).pages_mut().fork(parent.id)?;
        self.numbers += 1;
        let sampling =
            Sampling { temperature: self.wish.temperature, seed: self.wish.seed, ..Sampling::default() };
        let fork = parent.fork(id, self.numbers, &self.text, sampling, self.wish.new_tokens)?;
        self.tell(Look::Forked { from: number, to: fork.number });
        self.sequences.push(fork);
        Ok(())
    }

    fn end(&mut self, number: usize) -> Result<()> {
        let Some(at) = self.sequences.iter().position(|it| it.number == number) else { return Ok(()) };
        let ended = self.sequences.remove(at);
        self.turn = 0;
        self.tell(Look::Ended(number));
        if let Some(slices) = &self.slices {
            lock(&slices.paged).pages_mut().free(ended.id)?;
        }
        Ok(())
    }

    pub(crate) fn tell(&self, look: Look) {
        // The thread ends with this one, not before, or it panicked: then weights stay as they are.
        let _ = self.looks.send(look);
    }
}
