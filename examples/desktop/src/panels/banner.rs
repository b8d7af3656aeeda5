//! What a person should know, and what they can do about it.

use eframe::egui::{self, RichText};

use crate::shown::{Phase, Shown};

/// What a person pressed.
#[derive(Default)]
pub struct Answer {
    /// To start again on the new device.
    pub restart: bool,
    /// To see the notice no more.
    pub dismiss: bool,
}

pub fn show(ui: &mut egui::Ui, shown: &Shown, lost: Option<&str>) -> Answer {
    let mut answer = Answer::default();
    if let Some(why) = lost {
        let why = why.split(['.', ';']).next().unwrap_or(why);
        let words = format!(
            "The GPU is gone ({why}). A driver that was reset or a computer that slept does that. This window has opened the device \
             anew; the text was lost with its cache, and begins again from the prompt."
        );
        framed(ui, &words, |ui| {
            let button = ui.button(RichText::new("Start again").strong());
            answer.restart = button.clicked();
            button.request_focus();
        });
    } else if let Some(notice) = &shown.notice {
        framed(ui, notice, |ui| answer.dismiss = ui.button("Close").clicked());
    }
    progress(ui, &shown.phase, lost.is_some());
    answer
}

fn framed(ui: &mut egui::Ui, words: &str, more: impl FnOnce(&mut egui::Ui)) {
    let warn = ui.visuals().warn_fg_color;
    let frame = egui::Frame::group(ui.style()).stroke((1.0, warn)).inner_margin(8.0);
    frame.show(ui, |ui| {
        ui.set_width(ui.available_width());
        ui.horizontal_wrapped(|ui| {
            ui.label(RichText::new(words).color(ui.visuals().strong_text_color()));
            more(ui);
        });
    });
}

/// What is being waited for.
fn progress(ui: &mut egui::Ui, phase: &Phase, is_lost: bool) {
    let waits = |ui: &mut egui::Ui, words: String| {
        ui.horizontal(|ui| {
            ui.spinner();
            ui.label(words);
        });
    };
    match phase {
        _ if is_lost => {}
        Phase::Loading => waits(ui, "Loading the model.".into()),
        Phase::Compiling => {
            let (done, last) = crate::compiled::progress();
            let words = match done {
                0 => "Compiling the attention's kernels for this device, on a thread of their own.".into(),
                _ => format!(
                    "Compiling the attention's kernels for this device: {done} ops are compiled, {last} the last."
                ),
            };
            waits(ui, words);
        }
        Phase::Reading { done, all } => {
            let share = *done as f32 / (*all).max(1) as f32;
            let words = format!("reading the prompt: {done} of {all} tokens");
            ui.add(egui::ProgressBar::new(share).text(words));
        }
        Phase::Writing | Phase::Paused | Phase::Done | Phase::Failed => {}
    }
}
