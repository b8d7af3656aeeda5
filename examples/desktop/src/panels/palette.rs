//! Colours: one a sequence, and a ramp for weights.

use eframe::egui::{Color32, Visuals};

/// Tableau's, which differ in lightness too and can be told apart on dark and on light.
const SEQUENCES: [Color32; 8] = [
    Color32::from_rgb(78, 121, 167),
    Color32::from_rgb(242, 142, 43),
    Color32::from_rgb(89, 161, 79),
    Color32::from_rgb(225, 87, 89),
    Color32::from_rgb(118, 183, 178),
    Color32::from_rgb(176, 122, 161),
    Color32::from_rgb(237, 201, 72),
    Color32::from_rgb(156, 117, 95),
];

/// The colour of a sequence, by its number.
pub fn of_sequence(number: usize) -> Color32 {
    SEQUENCES[(number.max(1) - 1) % SEQUENCES.len()]
}

/// Readable on such a colour.
pub fn ink_on(ground: Color32) -> Color32 {
    let [r, g, b, _] = ground.to_array().map(f32::from);
    if 0.299 * r + 0.587 * g + 0.114 * b > 140.0 { Color32::BLACK } else { Color32::WHITE }
}

/// The colour of a weight from 0 to 1, by its square root, since most weights are small. The ends are those of the page of examples/web.
pub fn of_weight(weight: f32, visuals: &Visuals) -> Color32 {
    let (cold, hot) = match visuals.dark_mode {
        true => (Color32::from_rgb(22, 24, 26), Color32::from_rgb(168, 220, 255)),
        false => (Color32::from_rgb(251, 250, 247), Color32::from_rgb(11, 58, 92)),
    };
    cold.lerp_to_gamma(hot, weight.clamp(0.0, 1.0).sqrt())
}
