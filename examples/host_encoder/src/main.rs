//! A window that shares one device, one encoder and one submit a frame with wgpu-mla.
//!
//! The device is made from egui's needs and [`wgpu_mla::gpu::wanted`]. egui hands its encoder to a paint callback
//! ahead of its own render pass; `model.rs` records into it a pass of the host, a slice of a decode, and the
//! callback then draws `out` in egui's render pass, straight from the buffer that the decode wrote. eframe submits.

mod check;
mod model;
mod pace;

use std::process::ExitCode;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use eframe::egui;
use eframe::egui_wgpu::{self, CallbackResources, ScreenDescriptor, WgpuSetup, WgpuSetupCreateNew};
use wgpu_mla::{gpu::Gpu, wgpu};

use check::Verdict;
use model::Model;

const USAGE: &str = "usage: host_encoder [--frames N]";

fn main() -> ExitCode {
    let frames = match frames(std::env::args().skip(1)) {
        Ok(frames) => frames,
        Err(message) => {
            eprintln!("{message}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let shared = OnceLock::new();
    let options = eframe::NativeOptions {
        viewport: egui::ViewportBuilder::default().with_inner_size([560.0, 460.0]),
        renderer: eframe::Renderer::Wgpu,
        wgpu_options: egui_wgpu::WgpuConfiguration { wgpu_setup: device_setup(), ..Default::default() },
        ..Default::default()
    };
    let ran = eframe::run_native(
        "host_encoder",
        options,
        Box::new(|context| {
            let window = Window::new(context, frames)?;
            let _ = shared.set(window.scene.clone());
            Ok(Box::new(window))
        }),
    );
    let done = match (ran, shared.get()) {
        (Ok(()), Some(scene)) => closing_line(scene),
        (Ok(()), None) => Err("the window never opened".into()),
        (Err(error), _) => Err(error.to_string()),
    };
    match done {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(message) => {
            eprintln!("host_encoder: {message}");
            ExitCode::FAILURE
        }
    }
}

fn frames(mut args: impl Iterator<Item = String>) -> Result<u64, String> {
    let frames = match args.next().as_deref() {
        None => return Ok(u64::MAX),
        Some("--frames") => args.next().and_then(|n| n.parse().ok()).filter(|&n| n > 0),
        Some(other) => return Err(format!("unknown argument {other}")),
    };
    match (frames, args.next()) {
        (None, _) => Err("--frames needs a number above 0".into()),
        (_, Some(other)) => Err(format!("unknown argument {other}")),
        (Some(frames), None) => Ok(frames),
    }
}

/// egui's own descriptor, and on top of it what wgpu-mla's better kernel variants need.
fn device_setup() -> WgpuSetup {
    let mut setup = WgpuSetupCreateNew::without_display_handle();
    let egui_needs = setup.device_descriptor.clone();
    setup.device_descriptor = Arc::new(move |adapter| {
        // SAFETY: nothing else in this program uses experimental features.
        let experimental = unsafe { wgpu::ExperimentalFeatures::enabled() };
        let (egui, mla) = (egui_needs(adapter), wgpu_mla::gpu::wanted(adapter, experimental));
        wgpu::DeviceDescriptor {
            required_features: egui.required_features | mla.features,
            required_limits: egui.required_limits.or_better_values_from(&mla.limits),
            experimental_features: mla.experimental,
            ..egui
        }
    });
    setup.into()
}

/// What the window and its paint callback share.
struct Scene {
    model: Mutex<Model>,
    picture: wgpu::RenderPipeline,
    picture_group: wgpu::BindGroup,
    failed: OnceLock<String>,
}

struct Window {
    scene: Arc<Scene>,
    frames: u64,
}

impl Window {
    fn new(
        context: &eframe::CreationContext<'_>,
        frames: u64,
    ) -> Result<Self, Box<dyn std::error::Error + Send + Sync>> {
        let state = context.wgpu_render_state.as_ref().ok_or("eframe runs without wgpu")?;
        let model = Model::new(Gpu::on(&state.adapter, &state.device, &state.queue))?;
        let module = state.device.create_shader_module(wgpu::include_wgsl!("picture.wgsl"));
        let picture = state.device.create_render_pipeline(&wgpu::RenderPipelineDescriptor {
            label: Some("host.picture"),
            layout: None,
            vertex: wgpu::VertexState {
                module: &module,
                entry_point: Some("corner"),
                compilation_options: Default::default(),
                buffers: &[],
            },
            fragment: Some(wgpu::FragmentState {
                module: &module,
                entry_point: Some("pixel"),
                compilation_options: Default::default(),
                targets: &[Some(state.target_format.into())],
            }),
            primitive: Default::default(),
            depth_stencil: None,
            multisample: Default::default(),
            multiview_mask: None,
            cache: None,
        });
        let picture_group =
            model::bind(&state.device, &picture.get_bind_group_layout(0), &[&model.buffers.out]);
        let failed = OnceLock::new();
        Ok(Self {
            scene: Arc::new(Scene { model: Mutex::new(model), picture, picture_group, failed }),
            frames,
        })
    }
}

impl eframe::App for Window {
    fn ui(&mut self, ui: &mut egui::Ui, _: &mut eframe::Frame) {
        let mut model = lock(&self.scene.model);
        if model.stats.frames >= self.frames || self.scene.failed.get().is_some() {
            ui.ctx().send_viewport_cmd(egui::ViewportCommand::Close);
            return;
        }
        egui::CentralPanel::default().show(ui, |ui| {
            numbers(ui, &mut model);
            ui.add_space(6.0);
            ui.label("out: a line a head, four sequences");
            let (rect, _) = ui.allocate_exact_size(ui.available_size(), egui::Sense::hover());
            let callback = Callback(self.scene.clone());
            ui.painter().add(egui_wgpu::Callback::new_paint_callback(rect, callback));
        });
        ui.ctx().request_repaint();
    }
}

fn numbers(ui: &mut egui::Ui, model: &mut Model) {
    let stats = &model.stats;
    let check = match model.check.as_mut().and_then(|check| check.poll()) {
        None => "not yet".into(),
        Some(Ok(error)) => format!("right, largest error {error:.1e}"),
        Some(Err(message)) => message.clone(),
    };
    let lines = [
        ("tokens/s", format!("{:.1}", stats.tokens_per_second())),
        ("frame", format!("{:.1} ms", stats.frame_ms)),
        ("slices", format!("{} a step, {}", model.step.num_slices(), model.pace.describe())),
        ("sequence lengths", format!("{:?}", model.seq_lens().unwrap_or_default())),
        ("decodes", format!("{} in {} frames", stats.decodes, stats.frames)),
        ("one decode checked", check),
    ];
    egui::Grid::new("numbers").show(ui, |ui| {
        for (name, value) in lines {
            ui.strong(name);
            ui.add(egui::Label::new(value).extend());
            ui.end_row();
        }
    });
    ui.label(format!("choice: {}", model.mla.why()));
}

struct Callback(Arc<Scene>);

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
        if let Err(error) = lock(&self.0.model).record_frame(encoder) {
            let _ = self.0.failed.set(error.to_string());
        }
        Vec::new()
    }

    /// In egui's render pass: it reads `out` behind the decode, with no copy and no wait.
    fn paint(&self, _: egui::PaintCallbackInfo, pass: &mut wgpu::RenderPass<'static>, _: &CallbackResources) {
        pass.set_pipeline(&self.0.picture);
        pass.set_bind_group(0, &self.0.picture_group, &[]);
        pass.draw(0..3, 0..1);
    }
}

fn closing_line(scene: &Scene) -> Result<String, String> {
    if let Some(message) = scene.failed.get() {
        return Err(message.clone());
    }
    let mut model = lock(&scene.model);
    let check = model.check.take().ok_or("no decode finished: give it more --frames")?;
    let verdict: Verdict = check.wait(model.gpu.device());
    let error = verdict.map_err(|message| format!("wrong: {message}"))?;
    let (stats, seconds) = (&model.stats, model.stats.seconds().max(1e-9));
    let tokens = stats.decodes as f64 * f64::from(model::SEQUENCES);
    Ok(format!(
        "host_encoder: {} frames, {} decodes, {:.1} tokens/s, mean frame {:.1} ms, row {}, one decode checked (largest error {error:.1e})",
        stats.frames,
        stats.decodes,
        tokens / seconds,
        seconds * 1000.0 / stats.frames.saturating_sub(1).max(1) as f64,
        model.mla.variant(),
    ))
}

fn lock(model: &Mutex<Model>) -> std::sync::MutexGuard<'_, Model> {
    model.lock().unwrap_or_else(PoisonError::into_inner)
}
