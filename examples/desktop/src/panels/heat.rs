//! Softmax weights of a sequence's last token: a line a head, a column a token of the context.

use std::sync::Arc;

use eframe::egui::{self, Color32, ColorImage, Sense, TextureHandle, TextureOptions, vec2};
use egui_plot::{GridMark, HoverPosition, PlotBounds, PlotImage, PlotPoint};

use super::{fixed_plot, palette};
use crate::shown::{Shown, Weights};

const HEIGHT: f32 = 200.0;

/// The picture, which changes with a token and not with a frame.
#[derive(Default)]
pub struct Heat {
    texture: Option<TextureHandle>,
    of: Option<(Arc<Weights>, bool)>,
}

impl Heat {
    pub fn show(&mut self, ui: &mut egui::Ui, shown: &Shown, selected: usize) {
        let weights = shown.weights.as_ref();
        let number = weights.map_or(selected, |weights| weights.number);
        ui.horizontal_wrapped(|ui| {
            ui.heading("Attention of the last token");
            if shown.sequences.len() > 1 {
                ui.colored_label(palette::of_sequence(number), format!("sequence {number}"));
            }
            ui.with_layout(egui::Layout::right_to_left(egui::Align::Center), legend);
        });
        match weights {
            Some(weights) => plot(ui, shown, self.texture(ui, weights), weights),
            None => {
                ui.weak("No token yet.");
                ui.allocate_space(vec2(ui.available_width(), HEIGHT));
            }
        }
    }

    fn texture(&mut self, ui: &egui::Ui, weights: &Arc<Weights>) -> egui::TextureId {
        let dark = ui.visuals().dark_mode;
        let is_drawn = self.of.as_ref().is_some_and(|(of, was)| Arc::ptr_eq(of, weights) && *was == dark);
        if let Some(texture) = self.texture.as_ref().filter(|_| is_drawn) {
            return texture.id();
        }
        let pixels: Vec<Color32> =
            weights.values.iter().map(|&weight| palette::of_weight(weight, ui.visuals())).collect();
        let lines = pixels.len() / weights.tokens.max(1);
        let image = ColorImage::new([weights.tokens, lines], pixels);
        self.of = Some((weights.clone(), dark));
        match &mut self.texture {
            Some(texture) => {
                texture.set(image, TextureOptions::NEAREST);
                texture.id()
            }
            None => {
                self.texture.insert(ui.ctx().load_texture("weights", image, TextureOptions::NEAREST)).id()
            }
        }
    }
}

fn plot(ui: &mut egui::Ui, shown: &Shown, texture: egui::TextureId, weights: &Arc<Weights>) {
    let (layers, heads, tokens) = (weights.layers, weights.heads, weights.tokens.max(1));
    let lines = (layers * heads) as f64;
    // The first layer is at the top; its label is at the middle of its heads.
    let middles = move |_| {
        let middle = move |layer: usize| lines - (layer as f64 + 0.5) * heads as f64;
        (0..layers).map(|layer| GridMark { value: middle(layer), step_size: heads as f64 }).collect()
    };
    let layer_at = move |mark: GridMark, _: &_| {
        let layer = ((lines - mark.value) / heads as f64).floor() as usize;
        if layer < layers { format!("layer {}", layer + 1) } else { String::new() }
    };
    let words = move |position: &HoverPosition<'_>| {
        let (HoverPosition::NearDataPoint { position, .. } | HoverPosition::Elsewhere { position }) =
            position;
        tell(weights, shown, position.x, lines - position.y)
    };
    fixed_plot("weights", HEIGHT)
        .show_grid(false)
        .x_axis_label("token of the context")
        .y_axis_label(format!("{heads} heads a layer"))
        .y_axis_min_width(58.0)
        .x_grid_spacer(move |_| marks(tokens))
        .y_grid_spacer(middles)
        .y_axis_formatter(layer_at)
        .x_axis_formatter(|mark, _| format!("{:.0}", mark.value))
        .label_formatter(words)
        .show(ui, |plot| {
            plot.set_plot_bounds(PlotBounds::from_min_max([0.0, 0.0], [tokens as f64, lines]));
            let (center, size) =
                (PlotPoint::new(tokens as f64 / 2.0, lines / 2.0), [tokens as f32, lines as f32]);
            plot.image(PlotImage::new("weights", texture, center, size).allow_hover(false));
        });
}

/// A few tokens, to be numbered.
fn marks(tokens: usize) -> Vec<GridMark> {
    let every = [5, 10, 20, 50, 100].into_iter().find(|every| tokens / every <= 10).unwrap_or(200);
    (0..=tokens).step_by(every).map(|at| GridMark { value: at as f64, step_size: every as f64 }).collect()
}

/// What is at a place of the picture.
fn tell(weights: &Weights, shown: &Shown, token: f64, line: f64) -> Option<String> {
    if token < 0.0 || line < 0.0 {
        return None;
    }
    let (token, line) = (token as usize, line as usize);
    let weight = weights.values.get(line * weights.tokens + token).filter(|_| token < weights.tokens)?;
    let sequence = shown.sequences.iter().find(|sequence| sequence.number == weights.number)?;
    let name = sequence.tokens.get(token).and_then(|&id| shown.vocabulary.get(id as usize))?;
    let (layer, head) = (line / weights.heads + 1, line % weights.heads + 1);
    Some(format!(
        "layer {layer}, head {head}\ntoken {} of {}: {name:?}\nweight {weight:.4}",
        token + 1,
        weights.tokens
    ))
}

/// What a colour means, drawn from right to left.
fn legend(ui: &mut egui::Ui) {
    const STEPS: usize = 24;
    ui.weak("weight 1");
    let (rect, response) = ui.allocate_exact_size(vec2(120.0, 12.0), Sense::hover());
    let step = rect.width() / STEPS as f32;
    for at in 0..STEPS {
        let part = egui::Rect::from_min_size(
            rect.min + vec2(at as f32 * step, 0.0),
            vec2(step + 0.5, rect.height()),
        );
        let colour = palette::of_weight((at as f32 + 0.5) / STEPS as f32, ui.visuals());
        ui.painter().rect_filled(part, 0.0, colour);
    }
    let edge = ui.visuals().widgets.noninteractive.bg_stroke;
    ui.painter().rect_stroke(rect, 0.0, edge, egui::StrokeKind::Outside);
    response.on_hover_text("The colour is the square root of the weight, as most weights are small. Point at the picture for a token and its weight.");
    ui.weak("0");
}
