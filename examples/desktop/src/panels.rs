//! What a person sees, and what they press: drawn from plain data, in each frame anew.

pub mod banner;
mod heat;
mod pages;
mod palette;
mod prompt;
mod sequences;
mod status;
mod times;

use eframe::egui;
use egui_plot::Plot;

use crate::shown::{Phase, Shown};
use crate::times::Times;
use crate::wish::Wish;
use crate::writer::Ask;

/// Below this width all panels are one column.
const TWO_COLUMNS: f32 = 760.0;
/// Below this height, too, so that nothing is squeezed out.
const FIXED_PROMPT: f32 = 520.0;

/// What the window remembers from frame to frame.
pub struct Panels {
    /// What is in the form.
    pub wish: Wish,
    selected: usize,
    heat: heat::Heat,
    shows_why: bool,
}

/// What came of a frame.
#[derive(Default)]
pub struct Pressed {
    pub asks: Vec<Ask>,
    pub banner: banner::Answer,
}

impl Panels {
    pub fn new(wish: Wish) -> Self {
        Self { wish, selected: 1, heat: heat::Heat::default(), shows_why: false }
    }

    pub fn show(&mut self, ui: &mut egui::Ui, shown: &Shown, times: &Times, lost: Option<&str>) -> Pressed {
        let mut pressed = Pressed::default();
        let size = ui.available_size();
        // The window is cleared in the panels' colour: to fill them again costs a software device most of its frame.
        let panel = egui::Frame::side_top_panel(ui.style()).fill(egui::Color32::TRANSPARENT);
        let center = egui::Frame::central_panel(ui.style()).fill(egui::Color32::TRANSPARENT);
        egui::Panel::bottom("status").frame(panel).show(ui, |ui| {
            status::show(ui, shown, times, &mut self.shows_why);
        });
        if size.x >= TWO_COLUMNS && size.y >= FIXED_PROMPT {
            egui::Panel::top("prompt").frame(panel).show(ui, |ui| {
                self.top(ui, shown, lost, &mut pressed);
            });
            egui::Panel::left("sequences").frame(panel).default_size(size.x * 0.42).min_size(260.0).show(
                ui,
                |ui| {
                    scroll(ui, "sequences", |ui| {
                        sequences::show(ui, shown, &mut self.selected, &mut pressed.asks)
                    });
                },
            );
            egui::CentralPanel::default().frame(center).show(ui, |ui| {
                scroll(ui, "pictures", |ui| self.pictures(ui, shown, times, &mut pressed.asks));
            });
        } else {
            egui::CentralPanel::default().frame(center).show(ui, |ui| {
                scroll(ui, "all", |ui| {
                    self.top(ui, shown, lost, &mut pressed);
                    ui.separator();
                    sequences::show(ui, shown, &mut self.selected, &mut pressed.asks);
                    ui.separator();
                    self.pictures(ui, shown, times, &mut pressed.asks);
                });
            });
        }
        pressed
    }

    fn top(&mut self, ui: &mut egui::Ui, shown: &Shown, lost: Option<&str>, pressed: &mut Pressed) {
        ui.add_space(6.0);
        let is_enabled = lost.is_none() && shown.phase != Phase::Failed;
        prompt::show(ui, &mut self.wish, shown, is_enabled, &mut pressed.asks);
        if pressed.asks.iter().any(|ask| matches!(ask, Ask::Write(_))) {
            self.selected = 1;
        }
        pressed.banner = banner::show(ui, shown, lost);
        ui.add_space(4.0);
    }

    fn pictures(&mut self, ui: &mut egui::Ui, shown: &Shown, times: &Times, asks: &mut Vec<Ask>) {
        self.heat.show(ui, shown, self.selected);
        ui.add_space(8.0);
        pages::show(ui, shown, &mut self.selected, asks);
        ui.add_space(8.0);
        times::show(ui, times);
    }
}

/// A plot that the pointer reads and does not move.
fn fixed_plot<'a>(name: &str, height: f32) -> Plot<'a> {
    Plot::new(name)
        .height(height)
        .allow_zoom(false)
        .allow_drag(false)
        .allow_scroll(false)
        .allow_boxed_zoom(false)
        .allow_double_click_reset(false)
        .allow_axis_zoom_drag(false)
        .show_background(false)
}

fn scroll(ui: &mut egui::Ui, name: &str, show: impl FnOnce(&mut egui::Ui)) {
    egui::ScrollArea::vertical().id_salt(name).auto_shrink(false).show(ui, |ui| {
        // Beside the bar.
        egui::Frame::new().inner_margin(egui::Margin { right: 8, top: 4, bottom: 8, left: 0 }).show(ui, show);
    });
}

/// Selects a sequence, for its attention to be shown.
fn select(number: usize, selected: &mut usize, asks: &mut Vec<Ask>) {
    if *selected != number {
        *selected = number;
        asks.push(Ask::Select(number));
    }
}

/// Sizes and spaces, and the theme that was asked for.
pub fn style(ctx: &egui::Context, dark: Option<bool>) {
    if let Some(dark) = dark {
        ctx.set_theme(if dark { egui::Theme::Dark } else { egui::Theme::Light });
    }
    ctx.all_styles_mut(|style| {
        style.spacing.item_spacing = egui::vec2(8.0, 5.0);
        style.spacing.button_padding = egui::vec2(9.0, 3.0);
    });
}
