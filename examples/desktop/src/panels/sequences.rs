//! The sequences, each with its generated text, in its colour.

use eframe::egui::{self, RichText, TextFormat};

use super::{palette, select};
use crate::shown::{SequenceShown, Shown};
use crate::writer::Ask;

/// Points of the panel's heading, and of a sequence's frame and its first line.
const HEADING: f32 = 44.0;
const HEADER: f32 = 54.0;
/// The least height of a sequence's text.
const LEAST: f32 = 76.0;
/// Characters of a fork's parent that are shown.
const GIVEN: usize = 60;

pub fn show(ui: &mut egui::Ui, shown: &Shown, selected: &mut usize, asks: &mut Vec<Ask>) {
    ui.heading("Text");
    if shown.sequences.is_empty() {
        ui.weak("No text yet.");
    }
    // So much for each that all are in sight, as far as they can be.
    let (all, count) = (ui.clip_rect().height() - HEADING, shown.sequences.len().max(1) as f32);
    let height = (all / count - HEADER).max(LEAST);
    for sequence in &shown.sequences {
        let mut stroke = ui.visuals().widgets.noninteractive.bg_stroke;
        if sequence.number == *selected && shown.sequences.len() > 1 {
            stroke = egui::Stroke::new(1.5, palette::of_sequence(sequence.number));
        }
        let frame = egui::Frame::group(ui.style()).stroke(stroke).inner_margin(8.0);
        frame.show(ui, |ui| {
            ui.set_width(ui.available_width());
            header(ui, sequence, shown, selected, asks);
            let lines = egui::ScrollArea::vertical().id_salt(sequence.number).max_height(height);
            lines
                .auto_shrink([false, true])
                .stick_to_bottom(true)
                .show(ui, |ui| ui.label(text(ui, sequence)));
        });
    }
}

fn header(
    ui: &mut egui::Ui,
    sequence: &SequenceShown,
    shown: &Shown,
    selected: &mut usize,
    asks: &mut Vec<Ask>,
) {
    let number = sequence.number;
    ui.horizontal_wrapped(|ui| {
        let colour = palette::of_sequence(number);
        let name = RichText::new(format!("Sequence {number}")).color(palette::ink_on(colour)).strong();
        let words = "Shows its attention on the right.";
        if ui.add(egui::Button::new(name).fill(colour)).on_hover_text(words).clicked() {
            select(number, selected, asks);
        }
        let words = "A fork shares all its pages until it writes to one, and begins with another token than this sequence took.";
        if ui.button("Fork").on_hover_text(words).clicked() {
            asks.push(Ask::Fork(number));
        }
        let end = ui.add_enabled(shown.sequences.len() > 1, egui::Button::new("End"));
        if end.on_hover_text("Gives back the pages that no other sequence has.").clicked() {
            asks.push(Ask::End(number));
            let left = shown.sequences.iter().find(|other| other.number != number);
            if let Some(other) = left.filter(|_| *selected == number) {
                select(other.number, selected, asks);
            }
        }
        ui.weak(about(sequence));
    });
}

fn about(sequence: &SequenceShown) -> String {
    let mut words = format!("{} tokens", sequence.tokens.len());
    match sequence.forked {
        Some((parent, tokens)) => words += &format!(", the first {tokens} of sequence {parent}"),
        None => words += &format!(", {} of the prompt", sequence.prompt_tokens),
    }
    if let Some(ended) = sequence.ended {
        words += &format!("; {ended}");
    }
    words
}

fn text(ui: &egui::Ui, sequence: &SequenceShown) -> egui::text::LayoutJob {
    let mut given = sequence.given.as_str();
    let mut job = egui::text::LayoutJob::default();
    let font = egui::TextStyle::Body.resolve(ui.style());
    let (weak, strong) = (ui.visuals().weak_text_color(), ui.visuals().strong_text_color());
    if sequence.forked.is_some()
        && let Some((at, _)) = given.char_indices().rev().nth(GIVEN - 1)
    {
        given = &given[at..];
        job.append("\u{2026}", 0.0, TextFormat::simple(font.clone(), weak));
    }
    job.append(given, 0.0, TextFormat::simple(font.clone(), weak));
    job.append(&sequence.written, 0.0, TextFormat::simple(font, strong));
    job
}
