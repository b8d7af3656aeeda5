//! The window: what a person sees and presses, and the frame's share of the attention.

use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use eframe::egui;
use eframe::egui_wgpu::{self, CallbackResources, ScreenDescriptor};
use wgpu_mla::{gpu::Gpu, wgpu};

use crate::args::Args;
use crate::closing::Report;
use crate::device;
use crate::panels::{self, Panels};
use crate::shared::{Shared, lock};
use crate::shown::{Check, Phase, Shown};
use crate::times::Times;
use crate::windows::{Before, Left, TITLE};
use crate::writer::{self, Ask};

/// Frames for which a lost device is told before a test goes on by itself.
const TOLD_FRAMES: usize = 30;
/// New tokens after which a test's decode is checked.
const CHECK_AT: usize = 12;

pub struct Window {
    args: Args,
    shared: Arc<Shared>,
    gpu: Gpu,
    asks: Sender<Ask>,
    thread: Option<JoinHandle<()>>,
    panels: Panels,
    times: Times,
    left: Arc<Mutex<Option<Left>>>,
    /// Why the device before this one was lost, until a person starts again.
    told: Option<String>,
    told_frames: usize,
    is_minimised: bool,
    is_ending: bool,
    losses: usize,
}

impl Window {
    pub fn new(
        context: &eframe::CreationContext<'_>,
        args: Args,
        before: Option<Before>,
        left: Arc<Mutex<Option<Left>>>,
    ) -> Result<Self, Box<dyn std::error::Error + Send + Sync>> {
        let state = context.wgpu_render_state.as_ref().ok_or("eframe runs without wgpu")?;
        panels::style(&context.egui_ctx, args.dark);
        let (told, shown, wish) = match before {
            Some(Before { why, shown, wish }) => (Some(why), shown, wish),
            None => (None, Shown::default(), args.wish.clone()),
        };
        let shared = Arc::new(Shared::new(context.egui_ctx.clone(), shown));
        device::watch(state, &shared);
        let gpu = Gpu::on(&state.adapter, &state.device, &state.queue);
        let mut schedule: Vec<(usize, Ask)> =
            args.forks.iter().map(|&tokens| (tokens, Ask::Fork(1))).collect();
        if args.frames.is_some() {
            schedule.push((CHECK_AT, Ask::Check));
            schedule.sort_by_key(|&(tokens, _)| tokens);
        }
        let first = told.is_none().then(|| wish.clone());
        let (asks, thread) = writer::start(shared.clone(), gpu.clone(), args.model.clone(), first, schedule)?;
        Ok(Self {
            losses: usize::from(told.is_some()),
            panels: Panels::new(wish),
            gpu: gpu.clone(),
            thread: Some(thread),
            times: Times::default(),
            told_frames: 0,
            is_minimised: false,
            is_ending: false,
            args,
            shared,
            asks,
            left,
            told,
        })
    }

    /// For tests: loses the device, starts again, closes.
    fn follow_args(&mut self, ctx: &egui::Context, shown: &Shown) {
        let decoded = self.times.decoding.len();
        if self.told.is_some() && self.args.lose.is_some() {
            self.told_frames += 1;
            if self.told_frames == TOLD_FRAMES {
                self.start_again();
            }
            ctx.request_repaint();
        }
        // A check is waited for, a second or so.
        let frames = self.args.frames.unwrap_or(usize::MAX);
        let is_checked = matches!(shown.check, Check::Done { .. }) || decoded > frames.saturating_add(200);
        let is_refused = shown.notice.is_some() && shown.sequences.is_empty();
        let has_failed =
            self.args.frames.is_some() && (shown.phase == Phase::Failed || is_refused && self.told.is_none());
        let is_done = shown.phase == Phase::Done && self.args.frames.is_some() && !shown.sequences.is_empty();
        if decoded >= frames && is_checked || has_failed || is_done {
            self.end(ctx);
        }
    }

    fn start_again(&mut self) {
        self.told = None;
        // The thread is there for as long as the window.
        let _ = self.asks.send(Ask::Write(self.panels.wish.clone()));
    }

    fn end(&mut self, ctx: &egui::Context) {
        if !std::mem::replace(&mut self.is_ending, true) {
            ctx.send_viewport_cmd(egui::ViewportCommand::Close);
        }
    }
}

impl eframe::App for Window {
    /// Also while the window is minimised: then there are no frames, and the writing rests.
    fn logic(&mut self, ctx: &egui::Context, _: &mut eframe::Frame) {
        let minimised = ctx.input(|input| input.viewport().minimized) == Some(true);
        if minimised != self.is_minimised {
            self.is_minimised = minimised;
            self.times.rest();
            let title = if minimised { format!("{TITLE}: paused while minimised") } else { TITLE.into() };
            ctx.send_viewport_cmd(egui::ViewportCommand::Title(title));
            if !minimised {
                let why =
                    "The writing rested while the window was minimised: its attention is recorded by frames.";
                self.shared.show(|shown| shown.notice = Some(why.into()));
            }
        }
        self.shared.draw(false);
        let decoded = self.times.decoding.len();
        if self.losses == 0 && self.args.lose.is_some_and(|frames| decoded >= frames) {
            self.losses = 1;
            self.gpu.device().destroy();
        }
    }

    fn ui(&mut self, ui: &mut egui::Ui, _: &mut eframe::Frame) {
        self.shared.draw(true);
        if let Err(error) = self.gpu.check_lost() {
            // Another reason was told before, where the device told of it.
            self.shared.lose(error.to_string());
        }
        if self.shared.lost().is_some() {
            // Nothing can be drawn any more, not even words: the next window has them.
            self.end(ui.ctx());
        }
        if self.is_ending {
            return;
        }
        // A copy, so that the threads behind it never wait for a frame.
        let shown = self.shared.shown().clone();
        let is_busy = shown.phase.is_busy();
        self.times.frame(shown.phase == Phase::Writing);

        let callback = Callback(self.shared.clone());
        ui.painter().add(egui_wgpu::Callback::new_paint_callback(ui.max_rect(), callback));
        let pressed = self.panels.show(ui, &shown, &self.times, self.told.as_deref());
        for ask in pressed.asks {
            // The thread is there for as long as the window.
            let _ = self.asks.send(ask);
        }
        if pressed.banner.restart {
            self.start_again();
        }
        if pressed.banner.dismiss {
            self.shared.show(|shown| shown.notice = None);
        }

        let ctx = ui.ctx().clone();
        if is_busy {
            ctx.request_repaint();
        } else {
            self.times.rest();
            if matches!(shown.phase, Phase::Loading | Phase::Compiling) {
                // For what turns while a person waits; the cores are the compiler's.
                ctx.request_repaint_after(Duration::from_millis(50));
            }
        }
        self.follow_args(&ctx, &shown);
    }

    fn clear_color(&self, visuals: &egui::Visuals) -> [f32; 4] {
        visuals.panel_fill.to_normalized_gamma_f32()
    }

    fn on_exit(&mut self) {
        self.shared.close();
        if let Some(thread) = self.thread.take() {
            // It panicked: what it wrote is there all the same.
            let _ = thread.join();
        }
        let shown = self.shared.shown().clone();
        let lost = self.shared.lost().map(|why| Before {
            why: why.to_owned(),
            wish: self.panels.wish.clone(),
            shown: Shown { about: None, notice: None, phase: Phase::Loading, ..shown.clone() },
        });
        let report = Report::of(&shown, &self.times, usize::from(lost.is_some()));
        *lock(&self.left) = Some(Left { report, lost });
    }
}

struct Callback(Arc<Shared>);

impl egui_wgpu::CallbackTrait for Callback {
    /// Ahead of egui's render pass, in its encoder, once for each frame that is drawn.
    fn prepare(
        &self,
        _: &wgpu::Device,
        _: &wgpu::Queue,
        _: &ScreenDescriptor,
        encoder: &mut wgpu::CommandEncoder,
        _: &mut CallbackResources,
    ) -> Vec<wgpu::CommandBuffer> {
        // Behind egui's uploads.
        self.0.draw(false);
        if let Some(slice) = self.0.take() {
            slice.record(encoder);
        }
        Vec::new()
    }

    /// What the attention gave is drawn by egui, once it was read.
    fn paint(&self, _: egui::PaintCallbackInfo, _: &mut wgpu::RenderPass<'static>, _: &CallbackResources) {}
}
