//! One window after another: the next where the device of the last was lost.

use std::sync::{Arc, Mutex};

use eframe::{egui, egui_wgpu};

use crate::args::Args;
use crate::closing::Report;
use crate::device;
use crate::shared::lock;
use crate::shown::Shown;
use crate::window::Window;
use crate::wish::Wish;

pub const TITLE: &str = "wgpu-mla";

/// Opens the window, and another where the device of the last was lost: a surface and all of egui's own are of one device.
pub fn run(args: &Args) -> Result<Report, String> {
    let mut report = Report::default();
    let mut before = None;
    loop {
        let left = Arc::new(Mutex::new(None));
        let options = eframe::NativeOptions {
            viewport: egui::ViewportBuilder::default()
                .with_inner_size(args.size)
                .with_min_inner_size([360.0, 320.0]),
            renderer: eframe::Renderer::Wgpu,
            // It costs a software device a third of its frame.
            dithering: false,
            wgpu_options: egui_wgpu::WgpuConfiguration { wgpu_setup: device::setup(), ..Default::default() },
            ..Default::default()
        };
        let (leaves, args, before_it) = (left.clone(), args.clone(), before.take());
        let open: eframe::AppCreator<'_> =
            Box::new(move |context| Ok(Box::new(Window::new(context, args, before_it, leaves)?)));
        eframe::run_native(TITLE, options, open).map_err(|error| error.to_string())?;
        let Some(one) = lock(&left).take() else { return Err("the window never opened".into()) };
        let Left { report: of_one, lost } = one;
        report.add(of_one);
        match lost {
            Some(lost) => before = Some(lost),
            None => return Ok(report),
        }
    }
}

/// What a window leaves behind.
pub struct Left {
    pub report: Report,
    pub lost: Option<Before>,
}

/// A window whose device was lost, for the next one.
pub struct Before {
    pub why: String,
    pub shown: Shown,
    pub wish: Wish,
}
