//! The form: the prompt, how to write, and the dtype of the cache.

use eframe::egui::{self, Key, Modifiers, RichText};

use crate::shown::{Check, Phase, Shown};
use crate::wish::Wish;
use crate::writer::Ask;

const CONTROLS: f32 = 350.0;

pub fn show(ui: &mut egui::Ui, wish: &mut Wish, shown: &Shown, is_enabled: bool, asks: &mut Vec<Ask>) {
    let width = ui.available_width();
    let side_by_side = width > 2.0 * CONTROLS;
    ui.add_enabled_ui(is_enabled, |ui| match side_by_side {
        true => {
            ui.horizontal_top(|ui| {
                let left = width - CONTROLS - ui.spacing().item_spacing.x;
                ui.vertical(|ui| {
                    ui.set_width(left);
                    prompt(ui, wish, asks);
                });
                ui.vertical(|ui| controls(ui, wish, shown, asks));
            });
        }
        false => {
            prompt(ui, wish, asks);
            controls(ui, wish, shown, asks);
        }
    });
}

fn prompt(ui: &mut egui::Ui, wish: &mut Wish, asks: &mut Vec<Ask>) {
    let id = ui.make_persistent_id("prompt");
    // Enter writes, Shift and Enter begin a line.
    let enter = ui.memory(|memory| memory.has_focus(id))
        // `consume_key` would take it with Shift too.
        && ui.input(|input| !input.modifiers.shift)
        && ui.input_mut(|input| input.consume_key(Modifiers::NONE, Key::Enter));
    let edit = egui::TextEdit::multiline(&mut wish.prompt)
        .id(id)
        .desired_rows(4)
        .background_color(egui::Color32::TRANSPARENT)
        .desired_width(f32::INFINITY)
        .hint_text("A prompt. Enter writes, Shift+Enter begins a line.")
        .return_key(egui::KeyboardShortcut::new(Modifiers::SHIFT, Key::Enter));
    // An outline for its ground, which would cost a software device more.
    let has_focus = ui.memory(|memory| memory.has_focus(id));
    let widgets = &ui.visuals().widgets;
    let outline = if has_focus { ui.visuals().selection.stroke } else { widgets.noninteractive.bg_stroke };
    egui::Frame::new().stroke(outline).corner_radius(4.0).inner_margin(2.0).show(ui, |ui| {
        egui::ScrollArea::vertical()
            .id_salt("prompt")
            .max_height(86.0)
            .show(ui, |ui| ui.add(edit.frame(egui::Frame::NONE.inner_margin(4.0))));
    });
    if enter {
        asks.push(Ask::Write(wish.clone()));
    }
}

fn controls(ui: &mut egui::Ui, wish: &mut Wish, shown: &Shown, asks: &mut Vec<Ask>) {
    ui.horizontal_wrapped(|ui| {
        ui.label("Temperature");
        let temperature =
            egui::DragValue::new(&mut wish.temperature).range(0.0..=5.0).speed(0.01).max_decimals(2);
        ui.add(temperature).on_hover_text("0: always the likeliest token. From the next text on.");
        ui.label("New tokens");
        ui.add(egui::DragValue::new(&mut wish.new_tokens).range(1..=1000))
            .on_hover_text("That each sequence gets.");
        ui.label("Seed");
        ui.add(egui::DragValue::new(&mut wish.seed).range(0..=u64::from(u32::MAX)));
    });
    ui.horizontal_wrapped(|ui| {
        ui.label("Cache dtype");
        for offered in &shown.dtypes {
            let (dtype, is_chosen) = (offered.dtype, wish.kv == offered.dtype);
            let words = match &offered.lacks {
                Some(lacks) => format!("Not on this device: {lacks}"),
                None => {
                    "Another dtype is another cache: it is lost, and the text begins again from the prompt."
                        .into()
                }
            };
            let choice = egui::Button::selectable(is_chosen, dtype.to_string());
            let choice = ui
                .add_enabled(offered.lacks.is_none(), choice)
                .on_hover_text(&words)
                .on_disabled_hover_text(&words);
            if choice.clicked() && !is_chosen {
                wish.kv = dtype;
                asks.push(Ask::Write(wish.clone()));
            }
        }
        if shown.dtypes.is_empty() {
            ui.weak("-");
        }
    });
    ui.weak("Another dtype is another cache: the text begins again.");
    ui.horizontal_wrapped(|ui| {
        if ui
            .button(RichText::new("Write").strong())
            .on_hover_text("Begins a text from the prompt. So does Enter.")
            .clicked()
        {
            asks.push(Ask::Write(wish.clone()));
        }
        let paused = shown.phase == Phase::Paused;
        let pause = egui::Button::new(if paused { "Go on" } else { "Pause" });
        if ui.add_enabled(paused || shown.phase.is_busy(), pause).clicked() {
            asks.push(Ask::Pause(!paused));
        }
        let check = egui::Button::new("Check one decode");
        let words = "Compares the selected sequence's last decode, every layer and head, with an f64 oracle.";
        let can_check = shown.weights.is_some() && !matches!(shown.check, Check::Running);
        if ui.add_enabled(can_check, check).on_hover_text(words).clicked() {
            asks.push(Ask::Check);
        }
    });
}
